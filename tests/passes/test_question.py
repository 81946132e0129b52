"""Analyses of one run share its passes: many at once give what each gives alone, from no more than needed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import xarray as xr
from torch import Tensor

import interp
from interp.attention import AttentionEntropy
from interp.core.results import labelled
from interp.core.stats import Means, Partial
from interp.data.batch import Batch
from interp.lenses import LogitLens
from interp.model import Edit, Read, Tap, Trace, Transformer
from interp.passes.question import Askable, ByRow, Questions, Reading
from interp.residual import Attribute
from interp.tasks import RepeatedTokens
from tests.configs import CONFIGS, build, perturbed

DATA = RepeatedTokens(period=5, repeats=3, rows=6)
CONFIG = CONFIGS["gpt2"]


def batch() -> Batch:
    tokens = DATA.tokens(CONFIG.d_vocab, 0)
    return Batch(tokens, bos=True).with_answers(tokens[:, 3], tokens[:, 4])


def mean_norm(name: str = "norm", site: str = "blocks.0.hook_resid_post") -> ByRow:
    """A small analysis of our own: the average norm of a site."""

    def compute(trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
        return {"norm": trace[site].norm(dim=-1).mean(1)}

    def finish(merged: Partial) -> xr.Dataset:
        assert isinstance(merged, Means)
        return labelled(
            "made_up", {"norm": ((), merged.moments["norm"].mean)}, attrs={"n": merged.moments["norm"].n}
        )

    return ByRow(name, Reading([Read(site)], compute), Means, finish)


def run(asked: Sequence[Askable], model: Transformer, batches: Iterable[Batch]) -> Mapping[str, xr.Dataset]:
    """The results over these batches as they are."""
    return interp.run(asked, model, batches if isinstance(batches, Iterator) else list(batches))


def test_several_analyses_in_one_pass_give_what_each_gives_alone() -> None:
    questions: list[Askable] = [Attribute(parts="source"), LogitLens(top=3), AttentionEntropy(), mean_norm()]
    together = run(questions, build("gpt2"), batch().split(4))
    assert together.keys() == {"attribute", "logit_lens", "attention_entropy", "norm"}
    for analysis in questions:
        alone = run([analysis], build("gpt2"), batch().split(4))[analysis.name]
        xr.testing.assert_allclose(together[analysis.name], alone, rtol=1e-10, atol=1e-10)
        assert together[analysis.name].attrs.keys() == alone.attrs.keys()


def test_the_number_of_rows_counted_is_the_number_given() -> None:
    for size in (1, 4, 6):
        assert run([mean_norm()], build("gpt2"), batch().split(size))["norm"].attrs["n"] == 6


def test_two_analyses_of_one_site_share_its_read() -> None:
    calls: list[int] = []

    def counting(value: Tensor) -> Tensor:
        calls.append(1)
        return value

    read = Read("blocks.0.hook_resid_post", counting)
    both = [
        ByRow(
            n,
            Reading([read], lambda t, b, m: {"x": t[read].sum((1, 2))}),
            Means,
            lambda m: labelled("made_up", {}),
        )
        for n in ("a", "b")
    ]
    run(both, build("gpt2"), batch().split(3))
    assert len(calls) == 2, "once per batch"


def test_the_pass_stops_at_the_deepest_block_anybody_reads() -> None:
    ran: list[str] = []

    class Noting(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module, name: str) -> None:
            super().__init__()
            self.inner, self.name = inner, name

        def forward(self, *args: object) -> object:
            ran.append(self.name)
            return self.inner(*args)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

    model = perturbed(CONFIG)
    model.blocks = torch.nn.ModuleList(Noting(block, f"block {i}") for i, block in enumerate(model.blocks))
    model.unembed = Noting(model.unembed, "unembed")
    run([mean_norm()], model, [batch()])
    assert ran == ["block 0"]
    ran.clear()
    run([mean_norm(), mean_norm("deep", "unembed.hook_out")], model, [batch()])
    assert ran == ["block 0", "block 1", "unembed"]


def test_logits_are_computed_at_the_last_position_unless_more_is_asked() -> None:
    shapes: list[tuple[int, ...]] = []
    read = Read("unembed.hook_out", lambda x: (shapes.append(tuple(x.shape)), x[:, -1, :1])[1])

    def asking(name: str, last_only: bool) -> ByRow:
        rows = Reading([read], lambda t, b, m: {"x": t[read]}, last_only)
        return ByRow(name, rows, Means, lambda m: labelled("made_up", {}))

    run([asking("a", True), asking("b", True)], build("gpt2"), [batch()])
    run([asking("a", True), asking("b", False)], build("gpt2"), [batch()])
    assert shapes == [(6, 1, 31), (6, 16, 31)]


@pytest.mark.parametrize("names", [[], ["norm", "norm"]])
def test_analyses_without_distinct_names_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match="questions of distinct names are required"):
        run([mean_norm(n) for n in names], build("gpt2"), [batch()])
    with pytest.raises(ValueError, match="questions of distinct names are required"):
        Questions.of([mean_norm(n) for n in names], CONFIG)


def test_no_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one row is required, got"):
        run([mean_norm()], build("gpt2"), iter(()))


def test_a_site_the_model_does_not_have_is_refused_before_any_pass() -> None:
    with pytest.raises(KeyError, match=r"this model has no 'blocks.0.mlp.hook_post'"):
        run([mean_norm(site="blocks.0.mlp.hook_post")], build("attention-only"), iter(()))


def test_an_edited_model_is_what_the_tap_says_and_no_analysis_changes_it() -> None:
    model, tokens = build("gpt2"), batch().tokens
    before = model(tokens)
    zero = Tap(edits=[Edit("blocks.0.hook_mlp_out", torch.zeros_like)])
    assert not torch.equal(model(tokens, zero), before)
    run([LogitLens(), Attribute(parts="neuron")], model, [batch()])
    assert torch.equal(model(tokens), before)
