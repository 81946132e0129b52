"""Every ablation equals a loop of hooked passes with values written by hand, and hidden circuits show in sets only."""

import functools
from collections.abc import Callable, Iterable, Mapping
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.causal import ablate
from interp.causal.stand_ins import StandIn, other_rows, with_required_data
from interp.data.batch import Batch
from interp.model.edits import Mean, Resample, Zero
from interp.passes.metrics import kl_divergence, logit_difference, next_token_loss
from tests.configs import build, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

TOKENS, OTHER = some_tokens(rows=4), some_tokens(rows=4, seed=1)
ANSWER, WRONG = [3, 4, 5, 6], [6, 7, 8, 9]
METRIC = logit_difference(ANSWER, WRONG)
GROUPS = ["a", "b", "a", "b"]
MODELS = ("gpt2", "llama-gqa", "parallel")
SITES = {
    "head": ("attn.hook_z", lambda i: (slice(None), i), (1, 3)),
    "neuron": ("mlp.hook_post", lambda i: (slice(None), i), (29, 4)),
    "mlp": ("hook_mlp_out", lambda i: (slice(None),), (0, 0)),
    "attn": ("hook_attn_out", lambda i: (slice(None),), (0, 0)),
    "resid": ("hook_resid_pre", lambda i: (slice(None),), (0, 0)),
}
SEEN = [
    f"blocks.{i}.{site}"
    for i in range(2)
    for site in ("attn.hook_pattern", *(row[0] for row in SITES.values()))
]
Values = Mapping[str, Tensor]


@functools.cache
def subject(name: str) -> HookedTransformer:
    return HookedTransformer(build(name), None, name=name)


def difference(logits: Tensor) -> Tensor:
    """The logit difference of every row at its last column, off all logits."""
    rows = torch.arange(len(logits))
    return logits[rows, -1, torch.tensor(ANSWER)] - logits[rows, -1, torch.tensor(WRONG)]


def by_mean_of(values: Tensor, groups: list[str]) -> Tensor:
    """Per row and column the mean over the rows of the same group, row by row."""
    found = torch.zeros_like(values)
    for row, group in enumerate(groups):
        mates = [values[i] for i, name in enumerate(groups) if name == group]
        found[row] = sum(mates) / len(mates)
    return found


def one_mean(values: Tensor) -> Tensor:
    """One mean over all rows and columns, everywhere."""
    total, count = torch.zeros_like(values[0, 0]), 0
    for row, column in product(range(values.shape[0]), range(values.shape[1])):
        total, count = total + values[row, column], count + 1
    return (total / count).expand(4, 9, *total.shape)


Case = tuple[StandIn, dict[str, object], Callable[[Tensor, Tensor], Tensor]]
"""What stands in, what is given with it, and the value by hand from the prompts' own and the reference's."""
CASES: dict[str, Case] = {
    "zero": (Zero(), {}, lambda own, _: torch.zeros_like(own)),
    "mean": (Mean(), {}, lambda own, _: by_mean_of(own, ["all"] * 4)),
    "mean of a reference": (
        Mean("position"), {"reference": OTHER}, lambda _, other: by_mean_of(other, ["all"] * 4),
    ),
    "mean of templates": (Mean("template"), {"groups": GROUPS}, lambda own, _: by_mean_of(own, GROUPS)),
    "mean of templates of a reference": (
        Mean("template"), {"groups": GROUPS, "reference": OTHER}, lambda _, other: by_mean_of(other, GROUPS),
    ),
    "one mean": (Mean("reference"), {"reference": OTHER}, lambda _, other: one_mean(other)),
    "corrupted": (Resample(), {"reference": OTHER}, lambda _, other: other),
    "rows": (
        Resample(3), {}, lambda own, _: own[other_rows(torch.zeros(4, dtype=torch.long), 3)],
    ),
    "rows of a group": (
        Resample(3), {"groups": GROUPS}, lambda own, _: own[torch.tensor([2, 3, 0, 1])],
    ),
}  # fmt: skip


def by_hand(
    model: HookedTransformer, cells: list[tuple[str, tuple]], case: str, *, freeze: bool = False
) -> Tensor:
    """The effect `[prompt]` of putting the hand-made values at these cells, from whole passes with hooks."""
    own, other = recorded(model)
    hooks = []
    for site, index in cells:
        values = CASES[case][2](own[site], other[site])

        def put(
            value: Tensor, hook: interp.passes.HookPoint, index: tuple = index, values: Tensor = values
        ) -> Tensor:
            value[(slice(None), *index)] = values[(slice(None), *index)]
            return value

        hooks.append((site, put))
    for layer in range(2) if freeze else ():
        name = f"blocks.{layer}.attn.hook_pattern"
        hooks.append((name, lambda value, hook: own[hook.name]))
    return difference(model.run_with_hooks(TOKENS, fwd_hooks=hooks)) - whole(model)


@functools.cache
def whole(model: HookedTransformer) -> Tensor:
    """The logit difference without any ablation."""
    return difference(model(TOKENS))


@functools.cache
def recorded(model: HookedTransformer) -> tuple[Values, Values]:
    """Every site of both batches."""
    caches = (model.run_with_cache(tokens)[1] for tokens in (TOKENS, OTHER))
    own, other = ({name: cache[name] for name in SEEN} for cache in caches)
    return own, other


@over("case", CASES)
@pytest.mark.parametrize("name", MODELS)
def test_every_change_is_what_hooks_give(name: str, case: str) -> None:
    check(name, case, SITES if name == "gpt2" or case == "corrupted" else ("head", "mlp"), freeze=False)


@over("case", ["zero", "mean", "corrupted"])
@pytest.mark.parametrize("name", MODELS)
def test_frozen_patterns_are_put_back_everywhere(name: str, case: str) -> None:
    check(name, case, ("head", "mlp"), freeze=True)


def check(name: str, case: str, kinds: Iterable[str], *, freeze: bool) -> None:
    """One part of each kind in either layer against hooks."""
    model, (change, given, _) = subject(name), CASES[case]
    for kind in kinds:
        site, index, some = SITES[kind]
        found = ablate(
            model, TOKENS, kind, change=change, freeze_patterns=freeze, metric=METRIC, **given,  # type: ignore[arg-type]
        )  # fmt: skip
        each = torch.from_numpy(found["each"].values)
        for layer, i in enumerate(some):
            cell = (slice(None), layer, i) if kind in ("head", "neuron") else (slice(None), layer)
            cells = [(f"blocks.{layer}.{site}", index(i))]
            assert_close(each[cell], by_hand(model, cells, case, freeze=freeze))


def test_frozen_patterns_differ_from_free_ones() -> None:
    model = subject("gpt2")
    free, frozen = (
        ablate(model, TOKENS, "mlp", change=Zero(), freeze_patterns=freeze, metric=METRIC)["each"].values
        for freeze in (False, True)
    )
    assert (abs(free - frozen)[:, 0] > 1e-3).all()
    np.testing.assert_allclose(free[:, 1], frozen[:, 1], rtol=1e-9, err_msg="no pattern follows the last MLP")


@pytest.mark.parametrize("name", MODELS)
def test_positions_one_at_a_time(name: str) -> None:
    model = subject(name)
    found = ablate(model, TOKENS, "head", change=Mean(), metric=METRIC, by=("pos", "head", "layer"))
    assert found.value.dims == ("layer", "pos", "head")
    for layer, p, h in ((0, 3, 1), (1, 8, 2), (1, 2, 0)):
        cells = [(f"blocks.{layer}.attn.hook_z", (p, h))]
        assert_close(torch.from_numpy(found["each"].values)[:, layer, p, h], by_hand(model, cells, "mean"))
    unread = {"layer": 1, "pos": slice(0, 7)}
    np.testing.assert_allclose(
        found.value.sel(unread), 0, atol=1e-9, err_msg="nothing after the last block reads them"
    )
    assert not found.changed.sel(unread).any() and found.changed.sel(layer=0).all()


def test_dims_that_are_not_named_are_ablated_at_once() -> None:
    model = subject("gpt2")
    heads = ablate(model, TOKENS, "head", change=Zero(), metric=METRIC, by=("layer",))
    every = ablate(model, TOKENS, "head", change=Zero(), metric=METRIC, by=())
    both = ablate(model, TOKENS, "head", change=Zero(), metric=METRIC, by=("head",), layers=[0, 1])
    z = [f"blocks.{layer}.attn.hook_z" for layer in range(2)]
    everything = (slice(None),)
    assert_close(torch.from_numpy(heads["each"].values)[:, 1], by_hand(model, [(z[1], everything)], "zero"))
    assert every.value.dims == () and every["each"].dims == ("prompt",)
    assert_close(torch.from_numpy(every["each"].values), by_hand(model, [(s, everything) for s in z], "zero"))
    pair = [(s, (slice(None), 2)) for s in z]
    assert_close(torch.from_numpy(both["each"].values)[:, 2], by_hand(model, pair, "zero"))


@pytest.mark.parametrize("name", MODELS)
def test_sets_are_ablated_together(name: str) -> None:
    model = subject(name)
    sets = [["L0H1", "L1H2"], ["L0.mlp", "L1N7", "L1.attn"], "L0.resid"]
    found = ablate(model, TOKENS, sets, change=Resample(), metric=METRIC, reference=OTHER)
    assert found["part"].values.tolist() == ["L0H1+L1H2", "L0.mlp+L1N7+L1.attn", "L0.resid"]
    everything = (slice(None),)
    cells = [
        [("blocks.0.attn.hook_z", (slice(None), 1)), ("blocks.1.attn.hook_z", (slice(None), 2))],
        [
            ("blocks.0.hook_mlp_out", everything), ("blocks.1.mlp.hook_post", (slice(None), 7)),
            ("blocks.1.hook_attn_out", everything),
        ],
        [("blocks.0.hook_resid_pre", everything)],
    ]  # fmt: skip
    for i, some in enumerate(cells):
        assert_close(torch.from_numpy(found["each"].values)[:, i], by_hand(model, some, "corrupted"))


def test_sets_by_position() -> None:
    model = subject("gpt2")
    sets = [["L0H1", "L1H2"], ["L0.mlp"]]
    found = ablate(model, TOKENS, sets, change=Zero(), metric=METRIC, by=("part", "pos"))
    cells = [("blocks.0.attn.hook_z", (4, 1)), ("blocks.1.attn.hook_z", (4, 2))]
    assert_close(torch.from_numpy(found["each"].values)[:, 0, 4], by_hand(model, cells, "zero"))


@pytest.mark.parametrize(
    "case", ["mean", "mean of templates of a reference", "one mean", "corrupted", "rows"]
)
def test_splitting_the_prompts_changes_no_number(case: str) -> None:
    change, given, _ = CASES[case]
    model, prompts = subject("gpt2"), Batch(TOKENS).numbered()
    other = model.to_batch(given["reference"]) if "reference" in given else None
    whole, reference = with_required_data(change, prompts, other, given.get("groups"))
    groups = {"groups": given["groups"]} if "groups" in given and isinstance(change, Mean) else {}
    joined, split = (
        ablate(model, list(whole.split(n)), change=change, metric=METRIC, reference=reference, **groups)
        for n in (32, 3)
    )
    np.testing.assert_allclose(split["each"].values, joined["each"].values, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(joined.value, joined["each"].mean("prompt"), rtol=1e-9)


def padded(tokens: Tensor, lengths: tuple[int, ...]) -> Batch:
    return Batch.of([row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)])


def test_padded_prompts_take_means_over_real_tokens_only() -> None:
    """The mean at column 7 is that of the two rows that reach it."""
    model, batch = subject("llama-gqa"), padded(TOKENS, (9, 7, 8, 5))
    found = ablate(model, batch, "attn", change=Mean(), metric=METRIC)
    site, rows = (
        "blocks.0.hook_attn_out",
        [row[keep] for row, keep in zip(batch.tokens, batch.real, strict=True)],
    )
    caches = [model.run_with_cache(row[None])[1] for row in rows]
    for i, row in enumerate(rows):
        value = torch.stack(
            [
                torch.stack([c[site][0, p] for c, r in zip(caches, rows, strict=True) if len(r) > p]).mean(0)
                for p in range(len(row))
            ]
        )[None]
        out = model.run_with_hooks(row[None], fwd_hooks=[(site, lambda _, hook, value=value: value)])[0, -1]
        clean = model(row[None])[0, -1]
        effect = (out[ANSWER[i]] - out[WRONG[i]]) - (clean[ANSWER[i]] - clean[WRONG[i]])
        assert_close(torch.from_numpy(found["each"].values)[i, 0], effect)


def test_other_metrics_and_a_metric_that_compares() -> None:
    model = subject("gpt2")
    found = ablate(model, TOKENS, "mlp", change=Zero(), metric=kl_divergence())
    assert_close(torch.from_numpy(found.base.values), torch.zeros(4, dtype=torch.float64))
    zero = [("blocks.1.hook_mlp_out", lambda value, hook: value * 0)]
    clean, cut = (x.log_softmax(-1) for x in (model(TOKENS), model.run_with_hooks(TOKENS, fwd_hooks=zero)))
    expected = (clean[:, -1].exp() * (clean[:, -1] - cut[:, -1])).sum(-1)
    assert_close(torch.from_numpy(found["each"].values)[:, 1], expected)
    losses = ablate(model, TOKENS, "mlp", change=Zero(), metric=next_token_loss())
    taken = [-x[:, :-1].gather(2, TOKENS[:, 1:, None]).mean((1, 2)) for x in (clean, cut)]
    assert_close(torch.from_numpy(losses["each"].values)[:, 1], taken[1] - taken[0])
    assert losses.attrs["unit"] == "nats"


def test_what_changes_nothing_is_said_to() -> None:
    same = ablate(
        subject("gpt2"), TOKENS, "head", change=Mean(), metric=METRIC, reference=TOKENS[:1].expand(4, 9)
    )
    assert same.changed.all()
    corrupt = TOKENS.clone()
    corrupt[:, 6:] = OTHER[:, 6:]
    found = ablate(
        subject("gpt2"),
        TOKENS,
        "head",
        change=Resample(),
        metric=METRIC,
        reference=corrupt,
        by=("layer", "pos"),
    )
    assert found.changed.sel(pos=slice(0, 5)).sum() == 0 and bool(found.changed.sel(layer=0, pos=6))
    assert (found["each"].sel(pos=slice(0, 5)) == 0).all()
