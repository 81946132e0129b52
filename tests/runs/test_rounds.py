"""Questions in stages: what they ask is answered once a round, from shared passes, journalled, shared and resumed."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import xarray as xr

import interp
from interp import Batch, HookedTransformer
from interp.attention import AttentionKernel, Heads
from interp.causal import CausalTrace
from interp.core.stats import Means
from interp.lenses import LateLayers, LogitLens
from interp.model import Transformer
from interp.model.tap import Read
from interp.passes import ByRow, Reading, Staged
from interp.passes.observe import as_model
from interp.passes.question import Ask, Question, Stages
from interp.runs import journal as journals
from interp.tasks import RepeatedTokens
from tests.configs import build, some_tokens

ROWS = [row.tolist() for row in torch.randint(1, 20, (9, 12), generator=torch.Generator().manual_seed(0))]
NEXT = [int(row[-1]) for row in ROWS]
KNOWN = LateLayers([3] * len(ROWS))
ASKED = [Heads(sentences=None), KNOWN, LogitLens(top=2, pos=-1)]


def model() -> HookedTransformer:
    return HookedTransformer(build("gpt2"))


def stream(rows: Sequence[Sequence[int]] = ROWS) -> interp.Stream:
    return interp.Stream(interp.data.open_source(rows), model().text, tokens_per_batch=24, rows_per_window=4)


def agree(found: interp.runs.Results, expected: interp.runs.Results) -> None:
    assert list(found) == list(expected) and found.complete and expected.complete
    for name, value in expected.items():
        xr.testing.assert_identical(found[name], value)


def passes(patch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of all passes from here on."""
    seen: list[torch.Size] = []
    forward = Transformer.forward
    patch.setattr(
        Transformer,
        "forward",
        lambda self, tokens, *more, **how: (seen.append(tokens.shape), forward(self, tokens, *more, **how))[
            1
        ],
    )
    return seen


def test_heads_of_a_corpus_are_those_of_its_rows_and_share_their_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = Batch(torch.tensor(ROWS))
    alone = interp.heads(model(), rows, sentences=None)
    lens = interp.run([LogitLens(top=2, pos=-1)], model(), [rows])
    seen = passes(monkeypatch)
    found = interp.run([Heads(sentences=None), LogitLens(top=2, pos=-1)], model(), [rows])
    assert seen == [(9, 12)], "one pass for both"
    xr.testing.assert_allclose(found["heads"].drop_vars("label"), alone.drop_vars("label"), rtol=1e-10)
    xr.testing.assert_allclose(found["logit_lens"], lens["logit_lens"], rtol=1e-10)
    given = interp.run([Heads(repeats=RepeatedTokens(5, 3, rows=4), sentences=None)], model())["heads"]
    both = interp.run(
        [Heads(repeats=RepeatedTokens(5, 3, rows=4), sentences=None), LogitLens()], model(), [rows]
    )["heads"]
    xr.testing.assert_identical(both, given)
    assert int(given.attrs["rows"]) == 4 != int(found["heads"].attrs["rows"]), (
        "rows of its own where they are said"
    )


def test_random_heads_are_looked_at_on_the_data_too() -> None:
    rows = [Batch(torch.tensor(ROWS))]
    table = interp.run([Heads(sentences=None, random=3)], model(), rows)["heads"]
    p = table.p.sel(score="previous_token")
    assert bool(p.notnull().all()) and float(p.min()) >= 2 / (3 * table.sizes["head"] + 1)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 2, 5, 7])
def test_a_run_in_stages_that_is_killed_goes_on_and_gives_the_same_bits(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine rows in five batches, which the late layers go through a second time."""
    whole, out = interp.run(ASKED, model(), stream()), tmp_path / "run"
    write, count = journals.Journal.write, iter(range(after))

    def writing(self: journals.Journal, done: object) -> None:
        if next(count, None) is None:
            raise KeyboardInterrupt
        write(self, done)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(journals.Journal, "write", writing)
        with pytest.raises(KeyboardInterrupt):
            interp.run(ASKED, model(), stream(), out=out)
    seen = passes(monkeypatch)
    agree(interp.run(ASKED, model(), stream(), out=out, resume=True), whole)
    left = 5 - min(after, 5) + 3 * (5 - max(after - 5, 0))
    assert len(seen) == left, "a pass for each batch, then a pass and two of a sweep: none is done again"
    agree(interp.run(ASKED, model(), stream(), out=out, resume=True), whole)
    assert {"heads.nc", "late_layers.nc", "logit_lens.nc", "2-late_layers"} <= {
        each.name for each in out.iterdir()
    }
    with pytest.raises(ValueError, match="holds another run over data"):
        interp.run(
            [Heads(sentences=None, random=1), *ASKED[1:]], model(), stream(ROWS[:5]), out=out, resume=True
        )


def test_jobs_of_an_array_share_every_stage(tmp_path: Path) -> None:
    whole, out = interp.run(ASKED, model(), stream()), tmp_path / "run"
    first = interp.run(ASKED, model(), stream(), out=out, shard="0/2")
    assert not first.complete and list(first) == ["logit_lens"], "a table of some rows would be a wrong one"
    second = interp.run(ASKED, model(), stream(), out=out, shard="1/2")
    assert not second.complete and set(second) == {"heads", "late_layers", "logit_lens"}
    agree(interp.run(ASKED, model(), stream(), out=out, resume=True), whole)


def test_a_trace_without_sigma_takes_it_from_the_data_first() -> None:
    network, rows = model(), [Batch(torch.tensor(ROWS))]
    best = network.transformer(rows[0].tokens)[:, -1].argmax(-1).tolist()
    found = interp.run([CausalTrace(range(1, 3), best, samples=2)], network, rows)["causal_trace"]
    sigma = interp.causal.subject_spread(network, rows[0], range(1, 3))
    given = interp.run([CausalTrace(range(1, 3), best, samples=2, sigma=sigma)], network, rows)[
        "causal_trace"
    ]
    assert found.attrs["sigma"] == pytest.approx(sigma, rel=1e-12)
    xr.testing.assert_allclose(found, given, rtol=1e-9)
    with pytest.raises(
        ValueError, match="twice: data that can be read again are required, got an iterator; or say"
    ):
        interp.run([CausalTrace(range(1, 3), best)], network, iter(ROWS))


def test_data_and_folders_that_nobody_asks_about_are_refused(tmp_path: Path) -> None:
    kernel = AttentionKernel(RepeatedTokens(5, 3, rows=2))
    with pytest.raises(ValueError, match="attention_kernel need no data and leave nothing to resume"):
        interp.run([kernel], model(), stream())
    with pytest.raises(ValueError, match="late_layers must be asked about rows: data is required"):
        interp.run([KNOWN], model())
    with pytest.raises(ValueError, match="need no data and leave nothing to resume"):
        interp.run([Heads(sentences=None)], model(), out=tmp_path / "run")


class _Caught(Question):
    """Asks about rows on which its own computation fails, and goes on without them."""

    def bind(self, model: object) -> Staged:
        def refuse(*_: object) -> dict[str, torch.Tensor]:
            raise ValueError("not these rows")

        fine = Reading([Read("hook_embed")], lambda trace, *_: {"x": trace[Read("hook_embed")].mean((1, 2))})
        batch = [Batch(some_tokens(2, 5))]

        def stages(has_data: bool) -> Stages[xr.Dataset]:
            source = interp.data.stream.data_source(batch, as_model(model).text, 64)
            try:
                yield [Ask(ByRow("bad", Reading([Read("hook_embed")], refuse), Means), source)]
            except ValueError as cause:
                said = str(cause)
            (kept,) = yield [Ask(ByRow("good", fine, Means), source)]
            return xr.Dataset({"x": ((), float(kept.moments["x"].mean))}, attrs={"said": said})

        return Staged(self.name, stages, data="none")


def test_error_on_own_rows_is_raised_where_they_were_asked_about() -> None:
    found = interp.run([_Caught()], model())[_Caught().name]
    assert found.attrs["said"] == "not these rows" and float(found.x) == float(found.x)
