"""Continuing prompts: greedy is an argmax loop, rows end with a stop token, padding changes nothing.

Step by step every position is seen once, and all answers together are those of one full pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from interp.data.batch import Batch
from interp.model import Transformer
from interp.model.sites import find, names
from interp.model.tap import Edit, Read, Tap
from interp.passes.generate import Step, generate, joined, stream
from interp.passes.observe import observe
from interp.passes.sampling import Sampling
from tests.configs import CAUSAL, CONFIGS, N_CTX, build, perturbed, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

ROWS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
RAGGED = Batch.of(ROWS)
POST, PATTERN = Read("blocks.1.hook_resid_post"), Read("blocks.0.attn.hook_pattern")
OUT = Read("unembed.hook_out")
CACHED = pytest.mark.parametrize("use_cache", [True, False])


@pytest.fixture
def passes() -> Iterator[list[Tensor]]:
    """The tokens of every forward pass of the shared gpt2 model."""
    fed: list[Tensor] = []
    handle = build("gpt2").register_forward_pre_hook(lambda module, args: fed.append(args[0]))
    yield fed
    handle.remove()


def by_position(value: Tensor, read: Read, model: Transformer) -> Tensor:
    """The answer with its position axis (queries, for patterns) in second place."""
    axes = find(read.site, model.config)[0].axes.split()
    return value.movedim(axes.index("q" if "q" in axes else "p"), 1)


def argmax_loop(model: Transformer, row: list[int], n: int) -> list[int]:
    """One row, one token at a time, everything recomputed."""
    row = list(row)
    for _ in range(n):
        row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    return row


@pytest.mark.parametrize(
    "name", ["gpt2", "llama-gqa", "attention-only-rotary", "parallel", "window", "scale-by-layer"]
)
def test_greedy_is_the_argmax_loop_with_and_without_the_cache(name: str) -> None:
    model, tokens = build(name), some_tokens(rows=2, n=5)
    expected = [argmax_loop(model, row.tolist(), 5) for row in tokens]
    for use_cache in (True, False):
        got = generate(model, Batch(tokens), 5, use_cache=use_cache)
        assert got.keep is None
        assert got.tokens.tolist() == expected


@pytest.mark.parametrize(("name", "side"), [("gpt2", "left"), ("llama-gqa", "right"), ("window", "left")])
@CACHED
def test_a_padded_batch_gives_what_each_row_gives_alone(name: str, side: str, use_cache: bool) -> None:
    model = build(name)
    batch = generate(model, Batch.of(ROWS, side=side), 4, use_cache=use_cache)
    assert batch.keep is not None
    for row, keep, prompt in zip(batch.tokens, batch.keep, ROWS, strict=True):
        assert row[keep].tolist() == argmax_loop(model, prompt, 4)


@pytest.mark.parametrize("prompt_types", [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
@CACHED
def test_new_tokens_have_the_type_of_their_prompts_last(prompt_types: list[int], use_cache: bool) -> None:
    """The argmax loop with types, as in transformers; a batch that is passed again has the logits of that loop."""
    model, rows = perturbed(replace(CONFIGS["gpt2"], n_token_types=2)), [ROWS[0], ROWS[1]]
    types = [prompt_types, prompt_types[-2:]]
    given = replace(Batch.of(rows), types=Batch.of(types).tokens)
    found, untyped = (generate(model, batch, 6, use_cache=use_cache) for batch in (given, Batch.of(rows)))
    for i, (row, kinds) in enumerate(zip(rows, types, strict=True)):
        for _ in range(6):
            logits = model(torch.tensor([row]), types=torch.tensor([kinds]))[0, -1]
            row, kinds = [*row, int(logits.argmax())], [*kinds, kinds[-1]]
        assert found.tokens[i][found.real[i]].tolist() == row
        assert found.types is not None and found.types[i][found.real[i]].tolist() == kinds
    assert not torch.equal(found.tokens, untyped.tokens)
    empty = generate(model, given, 0, use_cache=use_cache)
    assert empty.types is not None and empty.types[0].tolist() == prompt_types


# --- where it ends ------------------------------------------------------------------------------------------------


@CACHED
def test_a_row_ends_with_the_stop_token_and_is_padding_from_there(use_cache: bool) -> None:
    model, tokens = build("gpt2"), some_tokens(rows=4, n=5)
    free = generate(model, Batch(tokens), 10)
    stop = int(free.tokens[0, 7])
    batch = generate(model, Batch(tokens), 10, stop_tokens=[stop], use_cache=use_cache)
    keep = torch.ones_like(batch.tokens).bool() if batch.keep is None else batch.keep
    for i, row in enumerate(free.tokens.tolist()):
        new = row[5:]
        new = new[: new.index(stop) + 1] if stop in new else new
        assert batch.tokens[i][keep[i]].tolist() == row[:5] + new
        assert set(batch.tokens[i][~keep[i]].tolist()) <= {stop}
    assert not keep[0].all()


@CACHED
def test_rows_end_with_whichever_of_several_stop_tokens_they_meet_first(use_cache: bool) -> None:
    model, tokens = build("gpt2"), some_tokens(rows=4, n=5)
    free = generate(model, Batch(tokens), 10).tokens
    stops = {int(free[0, 7]), int(free[1, 6]), int(free[2, 9])}
    batch = generate(model, Batch(tokens), 10, stop_tokens=stops, use_cache=use_cache)
    assert batch.keep is not None
    ended = set()
    for got, keep, row in zip(batch.tokens, batch.keep, free.tolist(), strict=True):
        end = next((i for i in range(5, 15) if row[i] in stops), 14)
        assert got[keep].tolist() == row[: end + 1]
        assert set(got[~keep].tolist()) <= {row[end]}, "padded with the stop token that ended it"
        ended.add(row[end])
    assert len(ended) > 1, "rows end differently"


def test_generation_ends_when_every_row_has() -> None:
    model, tokens = build("gpt2"), some_tokens(rows=1, n=5)
    stop = int(generate(model, Batch(tokens), 3).tokens[0, -1])
    batch = generate(model, Batch(tokens), 15, stop_tokens=[stop])
    assert batch.tokens.shape[1] <= 8
    assert int(batch.tokens[0, -1]) == stop
    assert batch.keep is None


def test_a_stop_token_in_the_prompt_ends_nothing() -> None:
    tokens = some_tokens(rows=1, n=5)
    batch = generate(build("gpt2"), Batch(tokens), 3, stop_tokens=[int(tokens[0, 2])])
    assert batch.tokens.shape[1] > 5


def test_no_new_tokens_give_the_prompt() -> None:
    assert torch.equal(generate(build("gpt2"), Batch(some_tokens()), 0).tokens, some_tokens())


def test_a_continuation_may_fill_the_context_and_go_no_further() -> None:
    assert generate(build("gpt2"), Batch(some_tokens()), N_CTX - 9).tokens.shape == (3, N_CTX)
    with pytest.raises(
        ValueError, match=f"9 prompt tokens and {N_CTX - 8} new ones do not fit the context of {N_CTX}"
    ):
        generate(build("gpt2"), Batch(some_tokens()), N_CTX - 8)


# --- steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("sampling", [None, Sampling(seed=3)])
def test_the_steps_are_the_columns_that_generate_collects(sampling: Sampling | None, use_cache: bool) -> None:
    model = build("llama-gqa")
    stop = generate(model, RAGGED, 3).tokens[:1, -1].tolist()
    settings = {"sampling": sampling, "stop_tokens": stop, "use_cache": use_cache}
    whole = generate(model, RAGGED, 6, **settings)
    steps = list(stream(model, RAGGED, 6, **settings))
    assert torch.equal(torch.stack([step.tokens for step in steps], 1), whole.tokens[:, 7:])
    assert whole.keep is not None
    assert torch.equal(torch.stack([step.alive for step in steps], 1), whole.keep[:, 7:])


def test_a_step_is_computed_when_it_is_asked_for(passes: list[Tensor]) -> None:
    steps = stream(build("gpt2"), Batch(some_tokens()), 5)
    assert not passes
    next(steps)
    assert len(passes) == 1
    assert len(list(steps)) == 4
    assert len(passes) == 5


def test_the_prompt_is_fed_once_and_the_last_token_never(passes: list[Tensor]) -> None:
    batch = generate(build("gpt2"), Batch(some_tokens()), 5)
    assert [fed.shape[1] for fed in passes] == [9, 1, 1, 1, 1]
    assert torch.equal(torch.cat(passes, 1), batch.tokens[:, :-1])


def test_nothing_is_computed_after_every_row_has_ended(passes: list[Tensor]) -> None:
    model, batch = build("gpt2"), Batch(some_tokens(rows=1))
    stop = int(generate(model, batch, 1).tokens[0, -1])
    passes.clear()
    assert len(list(stream(model, batch, 9, stop_tokens=[stop]))) == 1
    assert len(passes) == 1


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
@pytest.mark.parametrize("sampling", [None, Sampling(3.0, top_k=5, seed=0)])
def test_logits_and_log_probabilities_are_the_models_own(name: str, sampling: Sampling | None) -> None:
    model, prompt = build(name), Batch(some_tokens())
    steps = list(stream(model, prompt, 5, sampling=sampling, repetition_penalty=1.5))
    final = torch.cat((prompt.tokens, torch.stack([step.tokens for step in steps], 1)), 1)
    logits = model(final)[:, 8:-1]
    assert_close(torch.stack([step.logits for step in steps], 1), logits)
    chosen = logits.log_softmax(-1).gather(2, final[:, 9:, None])[..., 0]
    assert_close(torch.stack([step.log_probs for step in steps], 1), chosen)


def test_gradients_are_on_again_between_the_steps() -> None:
    for step in stream(build("gpt2"), Batch(some_tokens()), 2):
        assert torch.is_grad_enabled()
        assert not step.logits.requires_grad


# --- reads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CAUSAL)
@over("padded", [False, True])
def test_joined_answers_of_every_site_equal_one_full_pass(name: str, padded: bool) -> None:
    model = build(name)
    reads = [Read(site) for site in names(model.config, on_demand=True)]
    prompt = RAGGED if padded else Batch(some_tokens())
    traces = [step.trace for step in stream(model, prompt, 5, reads=reads)]
    final = generate(model, prompt, 5)
    seen = final.tokens[:, :-1]
    keep = torch.ones_like(seen, dtype=torch.bool) if final.keep is None else final.keep[:, :-1]
    full = observe(model, Batch(seen, keep if padded else None), reads).trace
    for read in reads:
        got = by_position(joined(traces, read, model.config), read, model)
        expected = by_position(full[read], read, model)
        assert got.shape == expected.shape
        if got.shape[0] == 1:
            assert_close(got, expected)
        else:
            assert_close(got[keep], expected[keep])


@pytest.mark.parametrize("read", [POST, PATTERN, Read("blocks.0.mlp.hook_post"), OUT], ids=lambda r: r.site)
def test_every_position_is_read_once(read: Read) -> None:
    model = build("gpt2")
    answers = [step.trace[read] for step in stream(model, Batch(some_tokens()), 4, reads=[read])]
    assert [by_position(a, read, model).shape[1] for a in answers] == [9, 1, 1, 1]


def test_reading_changes_no_token() -> None:
    model = build("llama-gqa")
    steps = list(stream(model, RAGGED, 6, reads=[Read(name) for name in names(model.config, on_demand=True)]))
    assert torch.equal(torch.stack([s.tokens for s in steps], 1), generate(model, RAGGED, 6).tokens[:, 7:])


def test_logits_are_computed_for_the_last_prompt_token_unless_read() -> None:
    model, shapes = build("gpt2"), []

    def note(value: Tensor) -> Tensor:
        shapes.append(list(value.shape[:2]))
        return value

    edit = Edit("unembed.hook_out", note)
    list(stream(model, Batch(some_tokens()), 2, edits=[edit]))
    list(stream(model, Batch(some_tokens()), 2, edits=[edit], reads=[OUT]))
    list(stream(model, Batch(some_tokens()), 2, edits=[edit], reads=[Read("hook_embed"), POST]))
    assert shapes == [[3, 1], [3, 1], [3, 9], [3, 1], [3, 1], [3, 1]]


def test_a_reduced_answer_is_given_step_by_step_and_refused_by_joined() -> None:
    model, norm = build("gpt2"), Read(POST.site, via=lambda x: x.norm(dim=-1))
    traces = [step.trace for step in stream(model, Batch(some_tokens()), 3, reads=[norm, POST])]
    assert_close(torch.cat([t[norm] for t in traces], 1), joined(traces, POST, model.config).norm(dim=-1))
    with pytest.raises(
        ValueError, match=r"requires a read without via: the answers at 'blocks.1.hook_resid_p"
    ):
        joined(traces, norm, model.config)
    with pytest.raises(KeyError, match=r"2 reads of 'blocks.1.hook_resid_post'"):
        joined(traces, POST.site, model.config)


def test_answers_are_joined_by_site_name_too() -> None:
    model = build("gpt2")
    traces = [step.trace for step in stream(model, Batch(some_tokens()), 3, reads=[POST, PATTERN])]
    assert torch.equal(joined(traces, POST.site, model.config), joined(traces, POST, model.config))
    with pytest.raises(
        KeyError, match=r"nothing was read at 'blocks.1.hook_resid_pos'; nearest: blocks.1.hook_res"
    ):
        joined(traces, "blocks.1.hook_resid_pos", model.config)
    with pytest.raises(ValueError, match="at least one step is required, got none"):
        joined([], POST, model.config)


# --- edits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "parallel", "attention-only"])
@over("site", ["blocks.0.hook_resid_post", "blocks.1.attn.hook_z", "blocks.0.attn.hook_v"])
@over("use_cache", [True, False])
def test_an_edit_applies_at_every_step(name: str, site: str, use_cache: bool) -> None:
    """Oracle: the argmax loop that recomputes everything under the edit."""
    model, edit = build(name), Edit(site, lambda x: x.flip(-1) * 1.5 + 1.0)
    tokens = some_tokens()
    for _ in range(5):
        tokens = torch.cat((tokens, model(tokens, Tap(edits=[edit]))[:, -1:].argmax(-1)), 1)
    got = generate(model, Batch(some_tokens()), 5, edits=[edit], use_cache=use_cache).tokens
    assert torch.equal(got, tokens)
    assert not torch.equal(got, generate(model, Batch(some_tokens()), 5).tokens), "the edit changes something"


def test_an_edit_sees_the_prompt_then_one_position_and_reads_see_its_work() -> None:
    model, seen = build("gpt2"), []

    def zero(value: Tensor) -> Tensor:
        seen.append(value.shape[1])
        return value.zero_()

    steps = list(stream(model, Batch(some_tokens()), 4, reads=[POST], edits=[Edit(POST.site, zero)]))
    assert seen == [9, 1, 1, 1]
    assert not joined([step.trace for step in steps], POST, model.config).any()


def test_an_edit_may_concern_some_rows() -> None:
    model, batch = build("gpt2"), Batch(some_tokens())
    edit = Edit("blocks.0.hook_resid_post", lambda x: x.flip(-1), rows=(1,))
    plain, every = generate(model, batch, 6), generate(model, batch, 6, edits=[Edit(edit.site, edit.change)])
    got = generate(model, batch, 6, edits=[edit])
    assert torch.equal(got.tokens[[0, 2]], plain.tokens[[0, 2]])
    assert torch.equal(got.tokens[1], every.tokens[1])


# --- refused before anything is computed --------------------------------------------------------------------------

Attempt = Callable[[Transformer, Batch], Iterator[Step]]
REFUSED: dict[str, tuple[Attempt, type[Exception], str]] = {
    "too long": (lambda m, b: stream(m, b, N_CTX), ValueError, f"9 prompt tokens and {N_CTX} new ones do not fit"),
    "negative": (lambda m, b: stream(m, b, -1), ValueError, "max_new_tokens >= 0 is required, got -1"),
    "penalty": (
        lambda m, b: stream(m, b, 2, repetition_penalty=0.0), ValueError,
        r"repetition_penalty in \[0.001, 1000\] is required",
    ),
    "stop token": (lambda m, b: stream(m, b, 2, stop_tokens=[31]), ValueError, r"must be in \[0, 30\], got 31"),
    "negative stop token": (lambda m, b: stream(m, b, 2, stop_tokens=[1, -1]), ValueError, "got -1"),
    "branches": (
        lambda m, b: stream(m, replace(b, branches=torch.ones_like(b.tokens)), 2), ValueError,
        r"rows of one continuation, got rows with several \(branches\)",
    ),
    "read": (
        lambda m, b: stream(m, b, 2, reads=[Read("blocks.0.hook_resid_pots")]), KeyError,
        "unknown site 'blocks.0.hook_resid_pots'; nearest: blocks.0.hook_resid_post",
    ),
    "edit": (
        lambda m, b: stream(m, b, 2, edits=[Edit("blocks.2.hook_resid_post", torch.relu)]), KeyError,
        "layers are 0 to 1 in this model, got 2",
    ),
    "absent site": (
        lambda m, b: stream(m, b, 2, reads=[Read("blocks.0.mlp.hook_pre_linear")]), KeyError, "this model has no",
    ),
    "uncached read": (
        lambda m, b: stream(m, b, 2, reads=[POST], use_cache=False), ValueError,
        "reads while generating require the cache",
    ),
    "gradient": (
        lambda m, b: stream(m, b, 2, reads=[Read(POST.site, grad=True)]), ValueError, "requires gradients",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_done_is_refused_at_the_call(what: str, passes: list[Tensor]) -> None:
    attempt, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        attempt(build("gpt2"), Batch(some_tokens()))
    assert not passes


def test_a_model_that_looks_ahead_generates_only_without_the_cache() -> None:
    assert not CONFIGS["bidirectional"].causal
    model, batch = build("bidirectional"), Batch(some_tokens())
    with pytest.raises(ValueError, match="a key/value cache requires a causal model"):
        stream(model, batch, 2)
    assert generate(model, batch, 2, use_cache=False).tokens.shape == (3, 11)


class Operators(TorchDispatchMode):
    """Counts what is dispatched."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def step_operators(n_layers: int) -> int:
    """What one more token takes, with the cache and nothing read."""
    model = Transformer(replace(CONFIGS["gpt2"], n_layers=n_layers))
    counts = []
    for new in (2, 3):
        with Operators() as operators:
            generate(model, Batch(some_tokens(1, 4)), new)
        counts.append(operators.count)
    return counts[1] - counts[0]


def test_layer_of_one_step_dispatches_only_products_attention_and_cache() -> None:
    """Four products with their views and transposes 16, attention 1, its axes 7, norms 2, sums 2, gelu 1, cache 6."""
    assert step_operators(3) - step_operators(2) <= 35
