"""A cut edge equals a score of -inf set by a hook, whatever is cut together; what nobody could see is refused."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.causal import KnockOut, knock_out
from interp.causal.knockout import SCORED, Cuts
from interp.data.batch import Batch
from interp.data.sources import open_source
from interp.data.stream import Stream
from interp.model import sites
from interp.model.edits import Edit, Set, Zero
from interp.model.tap import Read
from interp.passes.metrics import logit_difference
from interp.passes.observe import observe
from interp.passes.sweep import Sweep
from interp.passes.variants import Variant
from interp.zoo.planted import PLANTED
from tests.batches import in_batches
from tests.configs import build, some_tokens
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.tolerances import assert_close

TOKENS = some_tokens(rows=3)
ANSWER, WRONG = [3, 4, 5], [6, 7, 8]
METRIC = logit_difference(ANSWER, WRONG)
MODELS = ("gpt2", "llama-gqa", "parallel", "window", "bidirectional", "gemma2", "bloom")


def subject(name: str) -> HookedTransformer:
    return HookedTransformer(build(name), None, name=name)


def by_hand(
    model: HookedTransformer,
    edges: Sequence[tuple[int, int]],
    layers: Sequence[int],
    heads: Sequence[int] = range(4),
    tokens: Tensor = TOKENS,
) -> Tensor:
    """The effect `[prompt]` of -inf at these (query, key)s, from whole passes with hooks."""

    def cut(scores: Tensor, hook: interp.passes.HookPoint) -> Tensor:
        for head in heads:
            for q, k in edges:
                scores[:, head, q, k] = -torch.inf
        return scores

    def difference(logits: Tensor) -> Tensor:
        rows = torch.arange(len(tokens))
        return logits[rows, -1, torch.tensor(ANSWER)] - logits[rows, -1, torch.tensor(WRONG)]

    hooks = [(f"blocks.{layer}.attn.hook_attn_scores", cut) for layer in layers]
    return difference(model.run_with_hooks(tokens, fwd_hooks=hooks)) - difference(model(tokens))


@pytest.mark.parametrize("name", MODELS)
def test_every_cut_is_what_hooks_give(name: str) -> None:
    model = subject(name)
    queries, keys = [-1, 6], [5, 7]
    edges = [(8, 5), (8, 7), (6, 5), (6, 7)]
    joint = knock_out(model, TOKENS, queries, keys, metric=METRIC)
    each = torch.from_numpy(joint["each"].values)
    assert joint.value.dims == ("layer",)
    for layer in range(2):
        assert_close(each[:, layer], by_hand(model, edges, [layer]))
    everywhere = knock_out(model, TOKENS, queries, keys, metric=METRIC, by=())
    assert_close(torch.from_numpy(everywhere["each"].values), by_hand(model, edges, [0, 1]))
    single = knock_out(model, TOKENS, queries, keys, metric=METRIC, by=("key", "head", "layer", "query"))
    assert single.value.dims == ("layer", "head", "query", "key")
    cell = torch.from_numpy(single["each"].sel(layer=1, head=2, query=-1, key=5).values)
    assert_close(cell, by_hand(model, [(8, 5)], [1], [2]))
    assert (
        single["query"].values.tolist() == queries and str(single.part.sel(layer=1, head=2).values) == "L1H2"
    )
    some = knock_out(model, TOKENS, queries, keys, metric=METRIC, heads=[1, 3], layers=[1])
    assert_close(torch.from_numpy(some["each"].values)[:, 0], by_hand(model, edges, [1], [1, 3]))


@pytest.mark.parametrize("name", MODELS)
def test_an_edge_that_changes_nothing_beside_a_later_one_that_does(name: str) -> None:
    """The planner enters at the later query; the earlier cut must not land in another column."""
    model = subject(name)
    found = knock_out(model, TOKENS, [3, 7, 8], [6], metric=METRIC, by=())
    assert_close(torch.from_numpy(found["each"].values), by_hand(model, [(3, 6), (7, 6), (8, 6)], [0, 1]))


def test_a_put_before_the_first_changed_column_is_written_nowhere() -> None:
    """What is put at column 3 is there already, so all that changes is the attention of column 7."""
    model, batch = build("gpt2"), Batch(TOKENS).with_answers(torch.tensor(ANSWER), torch.tensor(WRONG))
    reads = [Read("blocks.0.hook_mlp_out"), Read("blocks.0.hook_attn_out")]
    own, other = (
        observe(model, Batch(x), reads).trace.answers for x in (TOKENS, some_tokens(rows=3, seed=1))
    )
    mlp = own[reads[0]].clone()
    mlp[:, 4:] = 5.0
    late = Edit(reads[1].site, Set(other[reads[1]]), {"pos": 7})
    early = Variant([Edit(reads[1].site, Set(other[reads[1]]), {"pos": 4})])
    sweep = Sweep(
        model, batch, [Variant([Edit(reads[0].site, Set(mlp), {"pos": 3}), late]), Variant([late]), early]
    )
    values = sweep.run(logit_difference()).values
    assert_close(values[0], values[1])


def test_a_window_cuts_the_layers_around_each() -> None:
    """As in the code of Geva et al.: from layer - window // 2, `window` layers, cut at the ends."""
    model = subject("gpt2")
    for window, groups in ((2, [[0], [0, 1]]), (3, [[0, 1], [0, 1]])):
        found = knock_out(model, TOKENS, [8], [3], metric=METRIC, window=window)
        for layer, group in enumerate(groups):
            assert_close(torch.from_numpy(found["each"].values)[:, layer], by_hand(model, [(8, 3)], group))


def test_masks_say_which_columns_in_each_prompt() -> None:
    model = subject("llama-gqa")
    batch = Batch.of([TOKENS[0].tolist(), TOKENS[1, :6].tolist(), TOKENS[2].tolist()])
    queries, keys = torch.zeros(2, 3, 9, dtype=torch.bool)
    columns = [(8, (1, 2)), (5, (3,)), (8, (1, 2))]
    for row, (q, ks) in enumerate(columns):
        queries[row, q] = True
        keys[row, list(ks)] = True
    found = knock_out(model, in_batches(model, batch, 1), queries, keys, metric=METRIC, by=("head",))
    for row, (q, ks) in enumerate(columns):
        alone = batch.tokens[row : row + 1, : int(batch.lengths[row])].expand(3, -1)
        expected = by_hand(model, [(q, k) for k in ks], [0, 1], [3], alone)[row]
        assert_close(torch.from_numpy(found["each"].values)[row, 3], expected)


def test_rows_still_sum_to_1_and_what_was_cut_is_spread_over_the_rest() -> None:
    """In layer 0 the scores stay, so the pattern is that of the run without the cut, divided by what is left."""
    model, batch = build("gpt2"), Batch(TOKENS)
    cuts = Cuts(("layer",), (0,), (0, 1, 2, 3), 1, model.config)
    read = Read("blocks.0.attn.hook_pattern")
    cut = Sweep(model, batch, cuts.variants([4], [1, 2])).read([read])[read][0]
    whole = HookedTransformer(model, None).run_with_cache(TOKENS)[1][read.site].clone()
    whole[:, :, 4, [1, 2]] = 0
    whole[:, :, 4] /= whole[:, :, 4].sum(-1, keepdim=True)
    assert_close(cut, whole)
    assert_close(cut.sum(-1), torch.ones(3, 4, 9, dtype=torch.float64))


def test_an_edge_that_does_not_exist_is_said_to_change_nothing() -> None:
    found = knock_out(subject("gpt2"), TOKENS, [3], [1, 6], metric=METRIC, by=("key",))
    assert found.changed.values.tolist() == [True, False]
    assert (found["each"].sel(key=6) == 0).all() and (found["each"].sel(key=1) != 0).all()
    window = knock_out(subject("window"), TOKENS, [8], [2, 7], metric=METRIC, by=("key",))
    assert window.changed.values.tolist() == [False, True], "the window of 4 does not reach that far"


def test_a_query_that_would_see_nothing_is_refused() -> None:
    for name, query, keys in (("gpt2", 2, [0, 1, 2]), ("window", 8, [5, 6, 7, 8])):
        with pytest.raises(ValueError, match=f"query {query} of layer 0 sees none"):
            knock_out(subject(name), TOKENS, [query], keys, metric=METRIC)
        single = knock_out(subject(name), TOKENS, [query], keys, metric=METRIC, by=("key",))
        assert np.isfinite(single["each"]).all()
    with pytest.raises(ValueError, match="query 0 of layer 0"):
        knock_out(subject("gpt2"), TOKENS, [0], [0], metric=METRIC, by=("key",))
    sink = knock_out(subject("gpt-oss"), TOKENS, [0], [0], metric=METRIC)
    assert np.isfinite(sink["each"]).all(), "the sink takes it all"


BAD: dict[str, tuple[type[Exception], str, dict[str, object]]] = {
    "no such column": (IndexError, r"query must be in \[0, 8\], got 9", {"queries": [9]}),
    "no column": (ValueError, "at least one key", {"keys": []}),
    "unknown dim": (KeyError, "nearest: key", {"by": ("keys",)}),
    "no such head": (IndexError, r"head must be in \[0, 3\], got 4", {"heads": [4]}),
    "window without layers": (ValueError, "with 'layer' in `by`", {"window": 2, "by": ()}),
    "mask of another shape": (ValueError, r"boolean of shape \[3, 9\]", {"keys": torch.ones(3, 8, dtype=torch.bool)}),
    "masks one by one": (
        ValueError, "alike in all prompts", {"keys": torch.eye(9, dtype=torch.bool)[:3], "by": ("key",)},
    ),
}  # fmt: skip


@over("case", BAD)
def test_what_has_no_meaning_is_refused_by_name(case: str) -> None:
    error, message, given = BAD[case]
    with pytest.raises(error, match=message):
        knock_out(subject("gpt2"), TOKENS, **{"queries": [8], "keys": [3], "metric": METRIC, **given})  # type: ignore[arg-type]


RAGGED = ([1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4])


@pytest.mark.parametrize("side", ["left", "right"])
def test_tokens_are_counted_in_each_prompt_by_itself(side: Literal["left", "right"]) -> None:
    model, batch = subject("gpt2"), Batch.of(RAGGED, side=side)
    found = knock_out(model, batch, [-1, 1], [0], metric=METRIC, by=("query", "layer"))
    assert found["query"].values.tolist() == [-1, 1]
    for row, ids in enumerate(RAGGED):
        tokens = torch.tensor([ids]).expand(3, -1)
        for layer in range(2):
            expected = by_hand(model, [(len(ids) - 1, 0)], [layer], tokens=tokens)[row]
            assert_close(torch.from_numpy(found["each"].sel(query=-1, layer=layer).values)[row], expected)


def test_padding_is_no_token() -> None:
    batch = Batch.of(RAGGED)
    with pytest.raises(IndexError, match=r"query must be in \[0, 2\], got 3"):
        knock_out(subject("gpt2"), batch, [3], [1], metric=METRIC)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[:, 3] = True
    with pytest.raises(ValueError, match="got padding"):
        knock_out(subject("gpt2"), batch, mask, [1], metric=METRIC)
    with pytest.raises(ValueError, match="at least one query and none twice"):
        knock_out(subject("gpt2"), batch, [-1, 3], [1], metric=METRIC)


def test_masks_find_their_prompts_in_a_stream() -> None:
    """Rows of a stream are sorted by length, and its batches are as wide as their longest row."""
    model, lengths = subject("gpt2"), (9, 5, 8, 6)
    rows = [row[:n].tolist() for row, n in zip(some_tokens(rows=4), lengths, strict=True)]
    queries, keys = torch.zeros(2, 4, 9, dtype=torch.bool)
    for row, n in enumerate(lengths):
        queries[row, n - 1], keys[row, 1 + row % 2] = True, True
    asked = KnockOut(queries, keys, metric=logit_difference([3, 4, 5, 6], [6, 7, 8, 9]), by=("layer",))
    stream = Stream(open_source(rows), model.text, tokens_per_batch=16)
    found = interp.run([asked], model, stream)["knock_out"].sortby("prompt")
    whole = knock_out(model, Batch.of(rows), queries, keys, metric=asked.metric)
    np.testing.assert_allclose(found["each"].values, whole["each"].values, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="answers or labels for 4 prompts, got 3 rows"):
        interp.run([asked], model, rows[:3])
    with pytest.raises(
        ValueError, match=r"masks and answers for the same prompts are required, got \[3, 4\]"
    ):
        interp.run([replace(asked, metric=METRIC)], model, rows)


def test_the_planted_head_needs_the_edge_from_the_end_to_the_name() -> None:
    circuit = PLANTED["either"](0, 8)
    where = (circuit.clean != circuit.corrupt) & (circuit.clean != circuit.answer[:, None])
    small = circuit.clean == circuit.answer[:, None]
    end = torch.zeros_like(small)
    end[:, -1] = True
    metric = logit_difference(circuit.answer, circuit.wrong)
    model = HookedTransformer(circuit.model, None)
    one = knock_out(model, circuit.clean, end, small, metric=metric, by=())
    both = knock_out(model, circuit.clean, end, small | where, metric=metric, by=())
    whole = float(one.base.mean())
    assert abs(float(one.value)) < 0.1 * whole and float(both.value) < -0.9 * whole


def test_layers_without_attention_scores_are_left_out_or_refused() -> None:
    mixed = HookedTransformer(build_mixed("linear-softmax"), None)
    found = knock_out(mixed, TOKENS, [-1], [1, 2], metric=METRIC, by=("layer",))
    assert found.layer.values.tolist() == [1]
    assert_close(
        torch.tensor(found.each.values[:, 0]), by_hand(mixed, [(-1, 1), (-1, 2)], [1]).to(torch.float64)
    )
    wide = knock_out(mixed, TOKENS, [-1], [1, 2], metric=METRIC, by=("layer",), window=2)
    assert_close(torch.tensor(wide.each.values), torch.tensor(found.each.values))
    with pytest.raises(
        KeyError, match=r"layer 0 mixes positions by Linear, .*in this model layers \[1\] have them"
    ):
        knock_out(mixed, TOKENS, [-1], [1, 2], metric=METRIC, layers=[0])


@pytest.mark.parametrize(
    ("name", "kind", "instead"),
    [
        ("lightning", "Lightning", r"Edit\('blocks\.0\.attn\.hook_pattern'"),
        ("linear", "Linear", r"Edit\('blocks\.0\.attn\.hook_pattern'"),
        ("pool", "Pool", r"Edit\('blocks\.0\.attn\.hook_pattern'"),
        ("polar", "Polar", r"edit blocks\.0\.hook_attn_out"),
        ("mamba2", "Mamba2", r"edit blocks\.0\.hook_attn_out"),
    ],
)
def test_mixers_without_scores_say_who_has_them_and_what_to_do(name: str, kind: str, instead: str) -> None:
    model = HookedTransformer(build_mixed(name), None)
    said = (
        rf"scores to -inf before a softmax: layer 0 mixes positions by {kind}, which has no scores; no layer of this "
        rf"model has them\. Mixers with scores: Softmax, Latent, DualChunk, Reformer, Synthesizer\. Instead, {instead}"
    )
    for layers in (None, [0]):
        with pytest.raises(KeyError, match=said):
            knock_out(model, TOKENS, [-1], [1], metric=METRIC, layers=layers)
    if "pattern" in instead:
        site = "blocks.0.attn.hook_pattern"
        edit = Edit(site, Zero(), {"query": -1, "key": 1})
        weights = observe(model, TOKENS, [Read(site)], [edit]).trace[site]
        whole = observe(model, TOKENS, [Read(site)]).trace[site].clone()
        whole[:, :, -1, 1] = 0
        assert_close(weights, whole)


def test_the_mixers_said_to_have_scores_are_those_that_have_them() -> None:
    with_scores = {type(m).__name__ for c in MIXERS.values() for m in c.mixers if m.traits.scored}
    assert with_scores == set(SCORED)
    for name, config in MIXERS.items():
        for layer, mixer in enumerate(config.mixers):
            has = f"blocks.{layer}.attn.hook_attn_scores" in sites.names(config, on_demand=True)
            assert has == mixer.traits.scored, name
