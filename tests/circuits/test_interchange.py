"""Running with some edges only equals a slow pass over the graph, written out node by node."""

import functools
import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from jaxtyping import TypeCheckError
from torch import Tensor

import interp
from interp import HookedTransformer, observe
from interp.causal import EdgeGraph
from interp.circuits import Circuit, EdgeEffects, Interchange, edge_attribution, edge_effects, interchange
from interp.circuits.interchange import Replacement
from interp.data.batch import Batch
from interp.data.pairs import Pairs
from interp.edits import Add, Scale, Zero
from interp.model import Tap, Transformer
from interp.model.config import ModelConfig
from interp.model.tap import Edit, Read
from interp.passes import schedule
from interp.passes.metrics import kl_divergence, logit_difference, next_token_loss
from tests.batches import in_batches
from tests.causal.slow_edges import ANSWER, START, WRONG, difference, edges, exact, place, writes
from tests.causal.test_graph import SUMS
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.tolerances import assert_close, student95

CLEAN, CORRUPT = some_tokens(3, 7), some_tokens(3, 7, seed=1)
METRIC = logit_difference(ANSWER, WRONG)
ONE_OF_EACH = ("gpt2", "llama-gqa", "attention-only-rotary", "parallel", "gemma2", "gpt-oss", "macaron")
"""Groups, no MLP, parallel blocks, norms of what is added, experts, an MLP before attention."""


def run(
    model: Transformer,
    masks: Tensor,
    replacement: Replacement = "resample",
    size: int | None = None,
    **how: object,
) -> Tensor:
    """The metric `[circuit, prompt]` under every circuit."""
    asked = {"metric": METRIC, "replacement": replacement, **how}
    pair = (
        (CLEAN, CORRUPT)
        if size is None
        else (in_batches(model, CLEAN, size), in_batches(model, CORRUPT, size))
    )
    found = interchange(HookedTransformer(model), *pair, masks, **asked)  # type: ignore[arg-type]
    return torch.from_numpy(found["each"].values.T)


def graph_of(model: Transformer) -> EdgeGraph:
    return EdgeGraph.of(model.config)


def ends(graph: EdgeGraph) -> Tensor:
    """All edges, and none."""
    return torch.stack((graph.exists, torch.zeros_like(graph.exists)))


def sides(direction: str) -> tuple[Tensor, Tensor]:
    """The prompts that are intervened on, and those that the values come from."""
    return (CORRUPT, CLEAN) if direction == "denoise" else (CLEAN, CORRUPT)


def effects(model: Transformer, **how: object) -> xr.Dataset:
    asked = {"metric": METRIC, "each": True, **how}
    return edge_effects(HookedTransformer(model), CLEAN, CORRUPT, **asked)  # type: ignore[arg-type]


def some_circuits(graph: EdgeGraph, n: int, seed: int = 0, share: float = 0.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(n, *graph.exists.shape, generator=generator) < share) & graph.exists


def slowly(model: Transformer, kept: Tensor, other: dict[str, Tensor]) -> Tensor:
    """The metric of one circuit: input after input is corrected in the order of the pass, each in a pass of its own.

    A pass with all corrections so far says what the senders that the next inputs see say in the circuit.
    """
    graph, edits = EdgeGraph.of(model.config), []
    dropped = {e for e in edges(model.config) if not kept[graph.index(e)]}
    for group in groups(model.config):
        said = spoken(model, CLEAN, edits)
        for receiver in group:
            changes = [
                other[s] - said[s] for s in senders(receiver, model.config) if f"{s}->{receiver}" in dropped
            ]
            edits += [at(model.config, receiver, change) for change in changes]
    with torch.no_grad():
        return difference(model(CLEAN, Tap(edits=edits)))


def spoken(model: Transformer, tokens: Tensor, edits: list[Edit]) -> dict[str, Tensor]:
    """What every sender adds to the stream in a pass under edits: `writes`, with heads by the difference they make.

    A head's share is what its z W_O adds behind the layer's norm at that norm's scale, a linear map of it.
    """
    config, layers = model.config, range(model.config.n_layers)
    scaled = config.norms_output
    names = [
        "attn.hook_result",
        *(f"hook_{mlp}_out" for mlp in config.mlps),
        *["ln1_post.hook_scale"] * scaled,
    ]
    reads = [Read(START), *(Read(f"blocks.{i}.{n}") for i in layers for n in names)]
    seen = observe(model, Batch(tokens), reads, edits).trace
    found = {"L0.resid": seen[START]}
    for i in layers:
        shares = seen[f"blocks.{i}.attn.hook_result"]
        if scaled:
            norm = model.block(i).ln1_post
            assert norm is not None and norm.gamma is not None
            shares = norm.centred(shares) * norm.gamma / seen[f"blocks.{i}.ln1_post.hook_scale"][:, :, None]
        found |= {f"L{i}H{h}": x * config.residual_scale for h, x in enumerate(shares.unbind(2))}
        found |= {f"L{i}.{mlp}": seen[f"blocks.{i}.hook_{mlp}_out"] for mlp in config.mlps}
    return found


@functools.cache
def groups(config: ModelConfig) -> list[list[str]]:
    """Receivers in the order of the pass; those of one list see the same senders."""
    receivers = EdgeGraph.of(config).receivers
    return [
        list(group)
        for _, group in itertools.groupby(receivers, key=lambda r: (r[:2], r.partition(".mlp")[1:]))
    ]


@functools.cache
def senders(receiver: str, config: ModelConfig) -> list[str]:
    return [e.partition("->")[0] for e in edges(config) if e.partition("->")[2] == receiver]


def at(config: ModelConfig, receiver: str, change: Tensor) -> Edit:
    site, head = place(config, receiver)

    def corrected(x: Tensor) -> Tensor:
        if head is None:
            return x + change
        x[:, :, head] += change
        return x

    return Edit(site, corrected)


BIASED = replace(CONFIGS["gemma2"], out_bias=True)
"""Heads behind a norm of their sum, with a bias that belongs to none of them."""


# oracles


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_any_circuit_is_the_pass_written_out_node_by_node(name: str) -> None:
    model = build(name)
    other, masks = writes(model, CORRUPT), some_circuits(graph_of(model), 2)
    found = run(model, masks)
    for values, kept in zip(found, masks, strict=True):
        assert_close(values, slowly(model, kept, other), torch.float64)
    assert (found[0] - found[1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", [*SUMS, "biased"])
def test_all_edges_are_the_clean_run_and_none_the_corrupted_one(name: str) -> None:
    model = perturbed(BIASED) if name == "biased" else build(name)
    full, empty = run(model, ends(graph_of(model)))
    assert (full - difference(model(CLEAN))).abs().max() <= 1e-9
    assert (empty - difference(model(CORRUPT))).abs().max() <= 1e-9


@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "attention-only", "macaron"])
@pytest.mark.parametrize("replacement", ["mean", "zero"])
def test_means_and_zeros_replace_what_a_run_says(name: str, replacement: Replacement) -> None:
    model = build(name)
    masks = some_circuits(graph_of(model), 2)
    other = {s: x.mean(0, keepdim=True) for s, x in writes(model, CORRUPT).items()}
    if replacement == "zero":
        other = {s: torch.zeros_like(x) for s, x in other.items()}
    for values, kept in zip(run(model, masks, replacement), masks, strict=True):
        assert_close(values, slowly(model, kept, other), torch.float64)


def test_mean_is_over_the_reference_by_position_without_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, width = build("llama-gqa"), CLEAN.shape[1]
    tokens = some_tokens(5, width, seed=3)
    keep = torch.ones_like(tokens, dtype=torch.bool)
    keep[0, 4:] = False
    whole, short = writes(model, tokens), writes(model, tokens[:1, :4])
    other = {}
    for s, x in whole.items():
        rest = x[1:].sum(0)
        rest[:4] += short[s][0]
        other[s] = (rest / keep.sum(0)[:, None])[None]
    (kept,) = some_circuits(graph_of(model), 1)
    ask = functools.partial(run, model, kept[None], "mean", reference=Batch(tokens, keep))
    found = ask()
    assert_close(found[0], slowly(model, kept, other), torch.float64)
    monkeypatch.setattr("interp.passes.memory.HOST_ROOM", 1)
    assert_close(ask(), found)


def test_a_mean_reaches_as_far_as_it_must() -> None:
    """A reference of more columns serves shorter prompts; padding at the end needs none."""
    model, (kept,) = build("gpt2"), some_circuits(graph_of(build("gpt2")), 1)
    longer = torch.cat((CORRUPT, some_tokens(3, 2, seed=5)), 1)
    plain = run(model, kept[None], "mean")
    assert_close(run(model, kept[None], "mean", reference=longer), plain)
    wide = [padded(tokens, "right") for tokens in (CLEAN, CORRUPT)]
    asked = {"metric": METRIC, "replacement": "mean", "reference": CORRUPT}
    found = interchange(HookedTransformer(model), *wide, kept[None], **asked)  # type: ignore[arg-type]
    assert_close(torch.from_numpy(found["each"].values.T), plain)
    left = [padded(tokens, "left") for tokens in (CLEAN, CORRUPT)]
    found = interchange(HookedTransformer(model), *left, kept[None], **asked)  # type: ignore[arg-type]
    assert_close(torch.from_numpy(found["each"].values.T), plain)


# promises


@pytest.mark.parametrize("name", ["llama-gqa", "gemma2"])
def test_packing_and_padding_change_no_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    masks = some_circuits(graph_of(model), 4)
    plain = run(model, masks)
    assert_close(run(model, masks, size=2), plain)
    for side in ("left", "right"):
        batches = [padded(tokens, side) for tokens in (CLEAN, CORRUPT)]
        other = interchange(HookedTransformer(model), *batches, masks, metric=METRIC)
        assert_close(torch.from_numpy(other["each"].values.T), plain)
    monkeypatch.setattr("interp.passes.memory.HOST_ROOM", 1)
    assert_close(run(model, masks), plain)


def padded(tokens: Tensor, side: str) -> Batch:
    extra, hidden = torch.full((len(tokens), 2), 17), torch.zeros(len(tokens), 2, dtype=torch.bool)
    parts = [(tokens, torch.ones_like(tokens, dtype=torch.bool)), (extra, hidden)]
    values, keep = (torch.cat(x, 1) for x in zip(*(parts if side == "right" else parts[::-1]), strict=True))
    return Batch(values, keep)


def test_a_metric_that_compares_compares_with_the_clean_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("gpt2")
    masks = ends(graph_of(model))
    full, empty = run(model, masks, metric=kl_divergence())
    p, q = (model(x)[:, -1].log_softmax(-1) for x in (CLEAN, CORRUPT))
    assert full.abs().max() < 1e-12
    assert_close(empty, (p.exp() * (p - q)).sum(-1))
    monkeypatch.setattr("interp.passes.memory.HOST_ROOM", 1)
    assert_close(run(model, masks, metric=kl_divergence())[1], empty)


def test_a_metric_of_all_positions_sees_them_all() -> None:
    model = build("llama-gqa")
    (full,) = run(model, graph_of(model).exists[None], metric=next_token_loss())
    losses = model(CLEAN).log_softmax(-1)[:, :-1].gather(-1, CLEAN[:, 1:, None])
    assert_close(full, -losses[..., 0].mean(1))


def test_half_precision_is_near_and_keeps_the_ends() -> None:
    model = build("llama-gqa", torch.bfloat16)
    full, empty = run(model, ends(graph_of(model)))
    assert_close(full, difference(model(CLEAN)).float(), torch.bfloat16)
    assert_close(empty, difference(model(CORRUPT)).float(), torch.bfloat16)


# edges one at a time


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_exact_effects_are_one_edge_changed_by_hand(name: str, direction: str) -> None:
    model, (own, other) = build(name), sides(direction)
    table = effects(model, direction=direction)
    here, there = writes(model, own), writes(model, other)
    change = {s: there[s] - here[s] for s in here}
    graph = EdgeGraph.of(model.config)
    each = torch.from_numpy(table["each"].values)
    for edge in list(edges(model.config))[::17]:
        s, r = graph.index(edge)
        assert_close(each[:, s, r], exact(model, own, edge, change), torch.float64)
    assert (torch.from_numpy(table.value.values).isnan() == ~graph.exists).all()
    assert_close(torch.from_numpy(table.value.values).nan_to_num(), each.nan_to_num().mean(0))
    assert table.changed.values[graph.exists].all(), "every sender says something else in the other run"
    assert_close(torch.from_numpy(table.clean.values), difference(model(CLEAN)))
    assert_close(torch.from_numpy(table.corrupt.values), difference(model(CORRUPT)))


@pytest.mark.parametrize("name", ["llama-gqa", "gptj", "macaron"])
def test_circuits_that_lack_one_edge_are_the_exact_effects(name: str) -> None:
    model = build(name)
    graph = graph_of(model)
    cells = graph.exists.nonzero()[::7]
    masks = graph.exists.repeat(len(cells), 1, 1)
    masks[torch.arange(len(cells)), cells[:, 0], cells[:, 1]] = False
    table = effects(model, direction="noise")
    each = torch.from_numpy(table["each"].values)[:, cells[:, 0], cells[:, 1]]
    assert_close(run(model, masks) - difference(model(CLEAN)), each.T, torch.float64)


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_an_edge_of_the_last_heads_is_the_patch_of_the_head(direction: str) -> None:
    """Without MLPs all that a last head does is its edge to the logits, and one sign holds for both."""
    model = build("attention-only")
    table = effects(model, direction=direction)
    whole = interp.patch(model, CLEAN, CORRUPT, "z", metric=METRIC, direction=direction)  # type: ignore[arg-type]
    for head in range(model.config.n_heads):
        edge = table["each"].sel(sender=f"L1H{head}", receiver="logits")
        np.testing.assert_allclose(edge, whole["each"].sel(layer=1, head=head), atol=1e-12)


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_a_metric_of_every_token_judges_each_run_by_its_own_tokens(direction: str) -> None:
    model = build("gpt2")
    found = edge_effects(
        HookedTransformer(model), CLEAN, CORRUPT, metric=next_token_loss(), edges=["L0.mlp->logits"],
        direction=direction, each=True,  # type: ignore[arg-type]
    )  # fmt: skip
    for name, tokens in (("clean", CLEAN), ("corrupt", CORRUPT)):
        losses = torch.nn.functional.cross_entropy(model(tokens)[:, :-1].mT, tokens[:, 1:], reduction="none")
        np.testing.assert_allclose(found[name], losses.mean(1), rtol=1e-5)


def test_effects_of_a_metric_that_compares_are_measured_from_the_clean_run() -> None:
    model = build("gpt2")
    restored, corrupted = (
        effects(model, direction=way, metric=kl_divergence()) for way in ("denoise", "noise")
    )
    assert float(abs(restored.clean).max()) < 1e-12 and float(restored.corrupt.min()) > 1e-3
    np.testing.assert_allclose(restored.corrupt, corrupted.corrupt, atol=1e-12)
    assert float(corrupted.value.min()) >= -1e-12, "nothing is nearer to the clean run than itself"


# questions


def test_the_functions_are_the_questions_asked_by_run() -> None:
    model = HookedTransformer(build("gpt2"))
    batch = replace(Batch(CLEAN), corrupt=CORRUPT).numbered()
    masks = some_circuits(EdgeGraph.of(model.cfg), 3)
    questions = [Interchange(masks, metric=METRIC), EdgeEffects(METRIC, each=True)]
    found = interp.run(questions, model, batch)
    xr.testing.assert_identical(
        found["interchange"], interchange(model, CLEAN, CORRUPT, masks, metric=METRIC)
    )
    xr.testing.assert_identical(found["edge_effects"], effects(model.transformer))
    streamed = interp.run(questions, model, Pairs(CLEAN.tolist(), CORRUPT.tolist()))["interchange"]
    np.testing.assert_allclose(streamed["each"], found["interchange"]["each"], atol=1e-12)


def test_the_mean_metric_comes_with_its_interval() -> None:
    model = build("gpt2")
    masks = some_circuits(graph_of(model), 2)
    found = interchange(model, CLEAN, CORRUPT, masks, metric=METRIC)
    each = found["each"].values
    np.testing.assert_allclose(found.value, each.mean(0), atol=1e-12)
    np.testing.assert_allclose(
        found.high - found.value, student95(3) * each.std(0, ddof=1) / 3**0.5, atol=1e-12
    )
    assert found.n.values.tolist() == [3, 3] and found.value.attrs["unit"] == "logits"
    assert list(interp.frame(found)) == ["circuit", "value", "low", "high", "n"]


def test_circuits_are_taken_as_records_too() -> None:
    model = build("gpt2")
    masks = some_circuits(graph_of(model), 2)
    circuits = [Circuit.of(graph_of(model), mask, mask.double()) for mask in masks]
    assert torch.equal(run(model, circuits), run(model, masks))  # type: ignore[arg-type]
    assert_close(run(model, circuits[1])[0], run(model, masks)[1])  # type: ignore[arg-type]


# edited models


def without_head_1(z: Tensor, hook: object) -> Tensor:
    z[:, :, 1] = 0
    return z


@pytest.mark.parametrize("replacement", ["resample", "mean", "zero"])
def test_circuits_are_those_of_the_edited_model(replacement: Replacement) -> None:
    model, edits = (
        build("gpt2"),
        [Edit("L0H1", Zero()), Edit("L1.mlp", Scale(2.0)), Edit("L1.resid", Add(0.5))],
    )
    under = model.edited(edits)
    masks = some_circuits(graph_of(model), 2)
    found = run(under, masks, replacement)
    hooked, asked = HookedTransformer(model), {"metric": METRIC, "replacement": replacement}
    with hooked.hooks([("blocks.0.attn.hook_z", without_head_1)], edits=edits[1:]):
        same = interchange(hooked, CLEAN, CORRUPT, masks, **asked)  # type: ignore[arg-type]
    assert_close(torch.from_numpy(same["each"].values.T), found)
    other = writes(under, CORRUPT)
    if replacement != "resample":
        other = {s: x.mean(0, keepdim=True) * (replacement == "mean") for s, x in other.items()}
    for values, kept in zip(found, masks, strict=True):
        assert_close(values, slowly(under, kept, other), torch.float64)


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_exact_effects_are_those_of_the_edited_model(direction: str) -> None:
    """What is added to the input of one head stays there when another edge of it is changed."""
    model, (own, other) = build("gpt2"), sides(direction)
    edits = [Edit("L0H1", Zero()), Edit("L1H2.k", Add(torch.ones(24).double())), Edit("L1.mlp", Scale(2.0))]
    under = model.edited(edits)
    table = effects(under, direction=direction)
    here, there = writes(under, own), writes(under, other)
    change = {s: there[s] - here[s] for s in here}
    each, graph = torch.from_numpy(table["each"].values), graph_of(model)
    for edge in [*list(edges(model.config))[::17], "L0H0->L1H2.k", "L0H0->L1H1.k"]:
        s, r = graph.index(edge)
        assert_close(each[:, s, r], exact(under, own, edge, change), torch.float64)


@pytest.mark.parametrize(
    "edit",
    [
        Edit("L0.attn", Zero()),
        Edit("L1.resid", Scale(2.0)),
        Edit("L1H1.q", Zero()),
        Edit("L0.mlp_in", torch.clone),
    ],
    ids=lambda edit: f"{edit.where}-{type(edit.change).__name__}",
)
def test_edits_after_which_inputs_are_no_sums_are_refused(edit: Edit) -> None:
    model = build("gpt2")
    for ask in (effects, functools.partial(run, masks=ends(graph_of(model)))):
        with pytest.raises(ValueError, match=f"sums of what heads and MLPs say; .* edited at {edit.name}"):
            ask(model.edited([edit]))


# refusals


def test_what_has_no_meaning_is_refused_by_name() -> None:
    model = HookedTransformer(build("gpt2"))
    masks = ends(EdgeGraph.of(model.cfg))
    ask = functools.partial(interchange, model, CLEAN, CORRUPT, masks, metric=METRIC)
    with pytest.raises((ValueError, TypeCheckError), match="replacement"):
        ask(replacement="noise")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reference prompts belong to replacement='mean', got 'zero'"):
        ask(replacement="zero", reference=CLEAN)
    with pytest.raises(ValueError, match="reach as far as the prompts, got 5 tokens for 7"):
        ask(replacement="mean", reference=CLEAN[:, :5])
    with pytest.raises((ValueError, TypeCheckError), match=r"masks \[circuit, sender, receiver\]"):
        interchange(model, CLEAN, CORRUPT, torch.ones(2, 11, 26, dtype=torch.bool), metric=METRIC)
    with pytest.raises(ValueError, match="a circuit of EdgeGraph"):
        interchange(model, CLEAN, CORRUPT, Circuit(EdgeGraph(1, 2, 2), {}), metric=METRIC)
    with pytest.raises(ValueError, match="at least one circuit is required"):
        interchange(model, CLEAN, CORRUPT, [], metric=METRIC)
    with pytest.raises(ValueError, match="norms the sum itself"):
        interchange(build("post-norm"), CLEAN, CORRUPT, masks, metric=METRIC)
    with pytest.raises(ValueError, match="must differ from its clean one"):
        edge_effects(model, CLEAN, CLEAN, metric=METRIC)
    with pytest.raises(ValueError, match="requires reference prompts, got none"):
        interp.run(
            [Interchange(masks, metric=METRIC, replacement="mean")],
            model,
            Pairs(CLEAN.tolist(), CORRUPT.tolist()),
        )


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "parallel"])
def test_edges_asked_for_have_the_numbers_that_they_have_among_all(name: str, direction: str) -> None:
    model = build(name)
    graph, whole = graph_of(model), effects(model, direction=direction)
    names = [*graph.names()][1::7]
    some = effects(model, direction=direction, edges=names)
    here = graph.chosen(names).numpy()
    for variable in ("value", "low", "high", "normalised"):
        np.testing.assert_allclose(
            some[variable].values[here], whole[variable].values[here], rtol=1e-4, atol=1e-5
        )
        assert np.isnan(some[variable].values[~here]).all()
    assert (some.n.values[~here] == 0).all() and set(interp.frame(some).edge) == set(names)
    assert some.attrs["notes"] == [f"{len(names)} of {len(graph)} edges were changed; the others are NaN"]


def test_a_number_of_edges_is_those_of_the_largest_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ran = build("gpt2"), []
    plain = schedule.Sweep

    def counted(network, batch, variants, *more, **named):  # type: ignore[no-untyped-def]
        ran.append(len(variants))
        return plain(network, batch, variants, *more, **named)

    monkeypatch.setattr(schedule, "Sweep", counted)
    some = effects(model, edges=9)
    assert sum(ran) == 9
    estimate = edge_attribution(
        HookedTransformer(model), CLEAN, CORRUPT, metric=METRIC, method="eap-ig-inputs"
    )
    table = interp.frame(estimate)
    assert set(interp.frame(some).edge) == set(table.edge[table.value.abs().nlargest(9).index])


def test_edges_that_cannot_be_asked_for_are_refused() -> None:
    model = build("gpt2")
    for number in (0, len(graph_of(model)) + 1):
        with pytest.raises(ValueError, match=f"edges must be 1 to {len(graph_of(model))}"):
            effects(model, edges=number)
    with pytest.raises(KeyError, match=r"no edge 'L1H0->L0\.mlp'"):
        effects(model, edges=["L1H0->L0.mlp"])


def test_what_a_layer_says_is_projected_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    module = sys.modules["interp.circuits.interchange"]  # the name in the package is the function
    plain = module.head_matrices

    def counted(model: Transformer, layer: int) -> Tensor:
        calls.append(layer)
        return plain(model, layer)

    monkeypatch.setattr(module, "head_matrices", counted)
    model = build("gpt2")
    run(model, some_circuits(graph_of(model), 3))
    assert calls == list(range(model.config.n_layers))


def test_nothing_of_a_pass_stays_behind() -> None:
    model = build("gpt2")
    masks = some_circuits(graph_of(model), 2)
    first = run(model, masks)
    run(model, ~masks)
    assert torch.equal(run(model, masks), first)
