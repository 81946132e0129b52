"""Edge attribution equals autograd on explicit copies of the stream, and exact patching where the model is linear."""

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import interp
from interp import Edit, HookedTransformer, Read, frame, observe
from interp.causal import EdgeGraph
from interp.circuits import EdgeAttribution, edge_attribution
from interp.circuits.edge_attribution import EdgeMethod, GradientLine
from interp.core.stats import ACCEPTED_MISS
from interp.data.batch import Batch
from interp.data.pairs import Pairs
from interp.edits import Add, Scale, Zero
from interp.model import MLP, LayerNorm, ModelConfig, NoNorm, NoPosition, Tap, Transformer
from interp.passes.metrics import kl_divergence, logit_difference, of_logits
from tests.batches import in_batches
from tests.causal.slow_edges import (
    ANSWER,
    START,
    WRONG,
    by_autograd,
    difference,
    edges,
    exact,
    gradients,
    writes,
)
from tests.causal.test_graph import SUMS
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.tolerances import assert_close, student95

CLEAN, CORRUPT = some_tokens(3, 7), some_tokens(3, 7, seed=1)
METRIC = logit_difference(ANSWER, WRONG)
both_directions = pytest.mark.parametrize("direction", ["denoise", "noise"])


def sides(direction: str, clean: Tensor = CLEAN, corrupt: Tensor = CORRUPT) -> tuple[Tensor, Tensor]:
    """The prompts that are intervened on, and those that the values come from."""
    return (corrupt, clean) if direction == "denoise" else (clean, corrupt)


def attributed(
    model: Transformer, clean: Tensor = CLEAN, corrupt: Tensor = CORRUPT, **how: object
) -> xr.Dataset:
    return edge_attribution(HookedTransformer(model), clean, corrupt, metric=METRIC, each=True, **how)  # type: ignore[arg-type]


def by_edge(table: xr.Dataset, config: ModelConfig) -> dict[str, Tensor]:
    """Every prompt's score of every edge."""
    each = torch.from_numpy(table["each"].values)
    graph = EdgeGraph.of(config)
    return {edge: each[:, graph.index(edge)[0], graph.index(edge)[1]] for edge in edges(config)}


def changes(model: Transformer, own: Tensor = CLEAN, other: Tensor = CORRUPT) -> dict[str, Tensor]:
    there, here = writes(model, other), writes(model, own)
    return {name: there[name] - here[name] for name in here}


# oracles


@both_directions
@pytest.mark.parametrize("name", SUMS)
def test_every_edge_is_autograd_on_the_receiver_s_own_copy_of_the_stream(name: str, direction: str) -> None:
    model, (own, other) = build(name), sides(direction)
    found = by_edge(attributed(model, direction=direction), model.config)
    change, grads = changes(model, own, other), gradients(model, own)
    for edge, score in found.items():
        assert_close(score, by_autograd(model, own, change, edge, grads), torch.float64)
    assert max(float(score.abs().max()) for score in found.values()) > 1e-2


@both_directions
@pytest.mark.parametrize("name", SUMS)
def test_between_neighbouring_tokens_every_edge_is_the_exact_patch(name: str, direction: str) -> None:
    """Two tokens 1e-6 apart: what is beyond first order is as much smaller."""
    model = perturbed(CONFIGS[name])
    model.embed.weight[9] = model.embed.weight[8] + 1e-6 * torch.randn(24, generator=seeded()).double()
    clean, corrupt = CLEAN.clone(), CLEAN.clone()
    clean[:, 2], corrupt[:, 2] = 8, 9
    own, other = sides(direction, clean, corrupt)
    change = changes(model, own, other)
    along = (
        ("eap-ig-inputs", "eap-ig-activations", "clean-corrupted")
        if name in ("parallel", "gemma2", "macaron")
        else ()
    )
    for method in ("eap", *along):
        table = attributed(model, clean, corrupt, method=method, steps=2, direction=direction)
        found = by_edge(table, model.config)
        some = list(found)[:: 11 if method == "eap" else 29]
        true = {edge: exact(model, own, edge, change) for edge in some}
        largest = max(float(x.abs().max()) for x in true.values())
        assert largest > 1e-8
        assert max(float((found[edge] - true[edge]).abs().max()) for edge in some) < 1e-3 * largest


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@functools.cache
def linear(*, parallel: bool = False) -> Transformer:
    """No norms, uniform attention (no keys), an MLP that always stays on the straight side of its ReLU."""
    config = replace(CONFIGS["no-norm"], final_norm=False, parallel=parallel, mlp=MLP(40, act="relu"))
    model = perturbed(config)
    for layer in range(2):
        block = model.block(layer)
        weight, bias = block.attn.part("k")
        assert bias is not None and block.mlp is not None
        weight.zero_(), bias.zero_()
        block.mlp.into.bias += 60.0  # type: ignore[union-attr]
        block.mlp.out.bias -= 60.0 * block.mlp.out.weight.sum(
            1
        )  # the stream stays small, layer 1 straight too
    seen = observe(
        model, Batch(torch.cat([CLEAN, CORRUPT])), [Read(f"blocks.{i}.mlp.hook_pre") for i in range(2)]
    )
    assert all(float(seen.trace[f"blocks.{i}.mlp.hook_pre"].min()) > 1 for i in range(2))
    return model


@functools.cache
def exact_of_linear(*, parallel: bool, direction: str) -> dict[str, Tensor]:
    model, (own, other) = linear(parallel=parallel), sides(direction)
    change = changes(model, own, other)
    return {edge: exact(model, own, edge, change) for edge in edges(model.config)}


@both_directions
@pytest.mark.parametrize("method", ["eap", "eap-ig-inputs", "eap-ig-activations", "clean-corrupted"])
@pytest.mark.parametrize("parallel", [False, True])
def test_in_a_linear_network_every_method_is_exact_patching(
    method: str, parallel: bool, direction: str
) -> None:
    model = linear(parallel=parallel)
    found = by_edge(attributed(model, method=method, steps=3, direction=direction), model.config)
    for edge, score in found.items():
        assert_close(score, exact_of_linear(parallel=parallel, direction=direction)[edge], torch.float64)
    into_values = [e for e in found if e.endswith((".v", "L1.mlp", "logits"))]
    assert all(float(found[e].abs().max()) > 1e-3 for e in into_values)


# completeness


def whole(model: Transformer, site: str, direction: str) -> Tensor:
    """The exact change of the metric when all that this site writes is the other run's."""
    own, other = sides(direction)
    given = observe(model, Batch(other), [Read(site)]).trace[site]
    with torch.no_grad():
        return difference(model(own, Tap(edits=[Edit(site, lambda _: given)]))) - difference(model(own))


def out_of(table: xr.Dataset, senders: list[str]) -> Tensor:
    return torch.from_numpy(table["each"].sel(sender=senders).sum(("sender", "receiver")).values)


@both_directions
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "macaron"])
def test_integrated_scores_out_of_the_input_sum_to_the_whole_effect(name: str, direction: str) -> None:
    model, errors = build(name), []
    expected = whole(model, START, direction)
    for steps in (2, 12, 128):
        table = attributed(model, method="eap-ig-inputs", steps=steps, rule="midpoint", direction=direction)
        errors.append(float((out_of(table, ["L0.resid"]) - expected).abs().max()))
    assert errors == sorted(errors, reverse=True), "more steps, smaller error"
    assert errors[-1] < 1e-3 * float(expected.abs().max()) < errors[0]
    released = attributed(model, method="eap-ig-inputs", steps=100, direction=direction)
    assert float((out_of(released, ["L0.resid"]) - expected).abs().max()) < 0.1 * float(expected.abs().max())


@both_directions
@pytest.mark.parametrize("each", [True, False])
def test_what_the_integral_misses_is_said(direction: str, each: bool) -> None:
    model, ask = HookedTransformer(build("gpt2")), {"method": "eap-ig-inputs", "metric": METRIC}
    rows = edge_attribution(model, CLEAN, CORRUPT, steps=2, direction=direction, each=True, **ask)  # type: ignore[arg-type]
    total = (rows.clean - rows.corrupt) * (1 if direction == "denoise" else -1)
    missed = np.abs(rows["each"].isel(sender=0).sum("receiver") - total)
    found = edge_attribution(
        model,
        in_batches(model, CLEAN, 1),
        in_batches(model, CORRUPT, 1),
        steps=2,
        direction=direction,
        each=each,
        **ask,
    )  # type: ignore[arg-type]
    error = found.attrs["integral_error"]
    np.testing.assert_allclose(error, float(missed.sum() / np.abs(total).sum()), rtol=1e-4)
    assert error > ACCEPTED_MISS
    (said,) = found.attrs["notes"]
    assert f"misses the metric's change by {error:.2g} of it" in said
    more = edge_attribution(model, CLEAN, CORRUPT, steps=20, rule="gauss", direction=direction, **ask)  # type: ignore[arg-type]
    assert more.attrs["integral_error"] < 1e-3 and "notes" not in more.attrs
    assert "integral_error" not in edge_attribution(model, CLEAN, CORRUPT, metric=METRIC).attrs


@both_directions
@pytest.mark.parametrize("name", ["llama-gqa", "parallel", "gemma2"])
def test_integrated_activations_sum_to_the_effect_of_changing_the_sublayer(name: str, direction: str) -> None:
    model = build(name)
    table = attributed(model, method="eap-ig-activations", steps=96, rule="gauss", direction=direction)
    heads = {layer: [f"L{layer}H{h}" for h in range(4)] for layer in range(2)}
    groups = {START: ["L0.resid"]} | {f"blocks.{i}.hook_attn_out": heads[i] for i in range(2)}
    if model.config.mlp is not None:
        groups |= {f"blocks.{i}.hook_mlp_out": [f"L{i}.mlp"] for i in range(2)}
    for site, senders in groups.items():
        expected = whole(model, site, direction)
        assert (out_of(table, senders) - expected).abs().max() < 1e-3 * expected.abs().max(), site


def test_clean_corrupted_is_the_mean_of_both_gradients() -> None:
    model = build("gpt2")
    restored, corrupted = (attributed(model, direction=way)["each"] for way in ("denoise", "noise"))
    found = attributed(model, method="clean-corrupted")["each"]
    np.testing.assert_allclose(found, (restored - corrupted) / 2, atol=1e-12)


# directions


@pytest.mark.parametrize("method", ["eap-ig-inputs", "clean-corrupted"])
def test_along_whole_runs_the_directions_differ_in_their_sign_alone(method: str) -> None:
    restored, corrupted = (
        attributed(build("gpt2"), method=method, steps=3, direction=way) for way in ("denoise", "noise")
    )
    np.testing.assert_array_equal(restored["each"], -corrupted["each"])
    np.testing.assert_array_equal(restored.value, -corrupted.value)
    np.testing.assert_array_equal(restored.clean, corrupted.clean)


@pytest.mark.parametrize(
    ("method", "rule"), [("eap", "released"), ("eap-ig-inputs", "midpoint"), ("eap-ig-activations", "gauss")]
)
def test_restoring_is_corrupting_with_the_prompts_swapped(method: str, rule: str) -> None:
    """Where the points of the line are the same from both ends."""
    model, how = build("llama-gqa"), {"method": method, "rule": rule, "steps": 3}
    restored = attributed(model, CLEAN, CORRUPT, **how)
    swapped = attributed(model, CORRUPT, CLEAN, direction="noise", **how)
    np.testing.assert_allclose(restored["each"], swapped["each"], atol=1e-12)
    np.testing.assert_allclose(restored.clean, swapped.corrupt, atol=1e-12)
    assert restored.attrs["direction"] == "denoise" and "minus" in restored.attrs["effect"]


def test_normalised_scores_are_shares_of_what_the_runs_differ_in() -> None:
    table = attributed(build("gpt2"))
    total = float((table.clean - table.corrupt).mean())
    np.testing.assert_allclose(table.normalised, table.value / total, atol=1e-12)
    other = attributed(build("gpt2"), direction="noise")
    np.testing.assert_allclose(other.normalised, 1 + other.value / total, atol=1e-12)


def saturated() -> Transformer:
    """One head. The last token asks; of two others one has a key (20 or -20) and writes up, one has none and down."""
    config = ModelConfig(
        1, 4, 1, 3, 5, norm=NoNorm(), final_norm=False, position=NoPosition(), qkv_bias=False, out_bias=False,
        attn_scale=1.0,
    )  # fmt: skip
    model = Transformer(config).double().requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    model.embed.weight[:4] = torch.tensor([[20.0, 1, 0, 0], [-20, 1, 0, 0], [0, -1, 0, 0], [0, 0, 1, 0]])
    attn, unembed = model.block(0).attn, model.unembed
    assert unembed is not None
    for part, row, column in (("q", 0, 2), ("k", 0, 0), ("v", 1, 1)):
        attn.part(part)[0][0, row, column] = 1.0
    attn.out.weight[3, 1] = 1.0
    unembed.weight[ANSWER, 3] = 1.0
    return model


def test_a_sure_softmax_hides_its_key_from_eap_and_not_from_eap_ig() -> None:
    model, clean, corrupt = saturated(), torch.tensor([[0, 2, 3]]), torch.tensor([[1, 2, 3]])
    edge = "L0.resid->L0H0.k"
    true = exact(model, corrupt, edge, changes(model, corrupt, clean))
    assert float(true) > 0.9
    plain, along = (
        by_edge(attributed(model, clean, corrupt, method=method, steps=400, rule="midpoint"), model.config)
        for method in ("eap", "eap-ig-inputs")
    )
    assert abs(float(plain[edge])) < 1e-6
    assert float(along[edge]) == pytest.approx(float(true), rel=1e-3)
    others = [abs(float(along[name])) for name in along if name.startswith("L0.resid->") and name != edge]
    assert max(others) < 1e-6, "what the tokens differ in is read by the key alone"


# promises


@pytest.mark.parametrize(("name", "method"), [("llama-gqa", "eap-ig-inputs"), ("gpt2", "eap-ig-activations")])
def test_padding_changes_no_number(name: str, method: EdgeMethod) -> None:
    model = HookedTransformer(build(name))
    ask: Callable[..., xr.Dataset] = functools.partial(
        edge_attribution, model, metric=METRIC, method=method, steps=2
    )
    plain = ask(CLEAN, CORRUPT)
    for side in ("left", "right"):
        other = ask(padded(CLEAN, side), padded(CORRUPT, side))
        for key in ("value", "low", "high", "normalised", "clean", "corrupt"):
            np.testing.assert_allclose(other[key], plain[key], atol=1e-9)


def padded(tokens: Tensor, side: str) -> Batch:
    extra, hidden = torch.full((3, 2), 17), torch.zeros(3, 2, dtype=torch.bool)
    parts = [(tokens, torch.ones_like(tokens, dtype=torch.bool)), (extra, hidden)]
    values, keep = (torch.cat(x, 1) for x in zip(*(parts if side == "right" else parts[::-1]), strict=True))
    return Batch(values, keep)


@pytest.mark.parametrize("columns", [1, 3, 16])
def test_the_tile_size_changes_no_number(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = attributed(build("llama-gqa"), method="eap-ig-inputs", steps=2)
    width = 24 * (11 + 3 * 8)
    monkeypatch.setattr("interp.passes.memory.HOST_ROOM", 4 * columns * width)
    tiled = attributed(build("llama-gqa"), method="eap-ig-inputs", steps=2)
    np.testing.assert_allclose(tiled["each"], plain["each"], atol=1e-11)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operator makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else (found,):
            self.numbers = max(self.numbers, x.numel() if isinstance(x, Tensor) else 0)
        return found


def test_no_tensor_is_as_large_as_heads_times_d_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 heads of 4 in a model 64 wide: the largest thing is a weight, or the tile."""
    config = ModelConfig(1, 64, 16, 64, 31, mlp=MLP(64), norm=LayerNorm())
    model, (clean, corrupt) = perturbed(config, torch.float32), (some_tokens(2, 48, seed=i) for i in range(2))
    monkeypatch.setattr("interp.passes.memory.HOST_ROOM", 4 * 32 * 1024)
    with Largest() as seen:
        attributed(model, clean, corrupt)
    assert seen.numbers <= 32 * 1024 < 2 * 48 * 16 * 64
    assert seen.numbers >= 2 * 48 * 16 * 4, "and it did see the heads"


def test_the_mean_comes_with_its_interval_and_the_metric_of_both_runs() -> None:
    model = build("gpt2")
    table = attributed(model)
    each = table["each"].values
    half = student95(3) * each.std(0, ddof=1) / np.sqrt(3)
    np.testing.assert_allclose(table.value, each.mean(0), atol=1e-12)
    np.testing.assert_allclose(table.high - table.value, half, atol=1e-12)
    np.testing.assert_allclose(table.value - table.low, half, atol=1e-12)
    np.testing.assert_allclose(table.clean, difference(model(CLEAN)), atol=1e-12)
    np.testing.assert_allclose(table.corrupt, difference(model(CORRUPT)), atol=1e-12)
    exists = EdgeGraph.of(model.config).exists.numpy()
    assert (np.isfinite(table.value.values) == exists).all() and table.attrs["edges"] == exists.sum()
    assert (table.n == np.where(exists, 3, 0)).all() and not (table.changed.values & ~exists).any()


def test_without_every_prompt_only_moments_are_kept() -> None:
    model = build("gpt2")
    table, every = (
        edge_attribution(model, CLEAN, CORRUPT, metric=METRIC, each=each) for each in (False, True)
    )
    assert {*table.sizes} == {"sender", "receiver"} and "each" not in table
    np.testing.assert_allclose(table.value, every.value, atol=1e-12)
    assert float(table.clean) == pytest.approx(float(every.clean.mean()))


def test_the_frame_has_one_row_for_each_edge_that_exists() -> None:
    model = build("llama-gqa")
    table = edge_attribution(model, CLEAN, CORRUPT, metric=METRIC)
    rows = frame(table)
    graph = EdgeGraph.of(model.config)
    assert rows.edge.tolist() == list(graph.names()) and len(rows.columns) <= 12
    assert rows.value.notna().all() and (rows.n == 3).all()
    assert rows.edge.tolist() == [f"{s}->{r}" for s, r in zip(rows.sender, rows.receiver, strict=True)]
    assert [float(table.value[graph.index(edge)]) for edge in rows.edge[::9]] == rows.value[::9].tolist()
    assert len(frame(table, "normalised")) == len(graph)


def test_the_frame_of_joined_reduced_and_other_results_has_their_edges() -> None:
    tables = [
        edge_attribution(build(name), CLEAN, CORRUPT, metric=METRIC) for name in ("gpt2", "attention-only")
    ]
    rows = frame(xr.concat(tables, "model", join="outer"))
    assert all(rows.edge == rows.sender + "->" + rows.receiver)
    for i, table in enumerate(tables):
        of_one = rows[(rows.model == i) & rows.value.notna()]
        assert set(of_one.edge) == set(frame(table).edge)
    one = tables[0]
    longer = frame(one.reindex(sender=[*one.sender.values, "other"]))
    pd.testing.assert_series_equal(longer.edge, frame(one).edge)
    first = frame(one.isel(sender=0, drop=True))
    assert first.receiver.tolist() == one.receiver.values[one.edge.values[0]].tolist()
    assert len(frame(one.rename(sender="src", receiver="dst"))) == len(frame(one))
    names = xr.DataArray([0.1, 0.2], dims="edge", coords={"edge": ["a->b", "b->c"]})
    assert frame(names).edge.tolist() == ["a->b", "b->c"]
    numbered = xr.Dataset({"value": ("edge", [0.1, 0.2])}, coords={"edge": [0, 1]})
    assert frame(numbered).edge.tolist() == [0, 1]


# the question


@both_directions
def test_the_function_is_the_question_asked_by_run(direction: str) -> None:
    model, asked = HookedTransformer(build("gpt2")), {"metric": METRIC, "method": "eap-ig-inputs", "steps": 2}
    plain = edge_attribution(model, CLEAN, CORRUPT, direction=direction, **asked)  # type: ignore[arg-type]
    question = EdgeAttribution(direction=direction, **asked)  # type: ignore[arg-type]
    batch = replace(Batch(CLEAN), corrupt=CORRUPT).numbered()
    found = interp.run([question], model, batch)["edge_attribution"]
    xr.testing.assert_identical(found, plain)
    streamed = interp.run([question], model, Pairs(CLEAN.tolist(), CORRUPT.tolist()))["edge_attribution"]
    np.testing.assert_allclose(streamed.value, plain.value, atol=1e-12)


# edited models


@both_directions
@pytest.mark.parametrize(
    "edits",
    [[Edit("L0H1", Zero())], [Edit("L0.mlp", Scale(0.5)), Edit("L1H2", Scale(2.0), {"pos": -1})]],
    ids=["head", "mlp and head"],
)
def test_edges_are_those_of_the_edited_model(edits: list[Edit], direction: str) -> None:
    model, (own, other) = build("gpt2"), sides(direction)
    under = model.edited(edits)
    table = attributed(under, direction=direction)
    change, grads = changes(under, own, other), gradients(under, own)
    for edge, score in by_edge(table, model.config).items():
        assert_close(score, by_autograd(under, own, change, edge, grads), torch.float64)
    assert not table.equals(attributed(model, direction=direction))


def test_what_is_added_to_the_stream_is_no_sender_s() -> None:
    model = build("gpt2")
    under = model.edited([Edit("L1.resid", Add(torch.ones(24).double())), Edit("L0.attn", Add(1.0))])
    change, grads = changes(under, CORRUPT, CLEAN), gradients(under, CORRUPT)
    for edge, score in by_edge(attributed(under), model.config).items():
        assert_close(score, by_autograd(under, CORRUPT, change, edge, grads), torch.float64)


@pytest.mark.parametrize(
    "edit",
    [
        Edit("L0.attn", Zero()), Edit("L1.resid", Scale(2.0)), Edit("L1.resid", torch.clone), Edit("L1H1.q", Zero()),
        Edit("L1H1.q", Add(1.0)), Edit("blocks.1.attn.hook_k", Zero()), Edit("blocks.0.ln1.hook_scale", Add(1.0)),
        Edit("blocks.1.hook_mlp_in", Zero()),
    ],
    ids=lambda edit: f"{edit.where}-{type(edit.change).__name__}",
)  # fmt: skip
def test_edits_after_which_inputs_are_no_sums_are_refused(edit: Edit) -> None:
    with pytest.raises(ValueError, match=f"sums of what heads and MLPs say; .* edited at {edit.name}"):
        attributed(build("gpt2").edited([edit]))


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2"])
def test_lower_precision_agrees_with_double(name: str) -> None:
    wide, narrow, half = (
        torch.from_numpy(attributed(build(name, dtype)).value.values).double()
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    )
    assert_close(narrow.nan_to_num(), wide.nan_to_num(), torch.float32)
    known = wide[~wide.isnan()]
    assert (half[~wide.isnan()] - known).abs().mean() < 0.1 * known.abs().mean()


@both_directions
def test_kl_divergence_is_measured_from_the_clean_run(direction: str) -> None:
    model = HookedTransformer(build("gpt2"))
    table = edge_attribution(
        model,
        CLEAN,
        CORRUPT,
        metric=kl_divergence(),
        method="eap-ig-inputs",
        steps=64,
        rule="gauss",
        direction=direction,  # type: ignore[arg-type]
        each=True,
    )
    p, q = (build("gpt2")(x)[:, -1].log_softmax(-1) for x in (CLEAN, CORRUPT))
    expected = (p.exp() * (p - q)).sum(-1)
    assert_close(torch.from_numpy(table.corrupt.values), expected)
    assert float(abs(table.clean).max()) < 1e-12
    total = -expected if direction == "denoise" else expected
    assert (out_of(table, ["L0.resid"]) - total).abs().max() < 1e-2 * expected.abs().max()


def test_kl_divergence_has_a_gradient_at_the_corrupted_run() -> None:
    model = build("gpt2")
    table = edge_attribution(model, CLEAN, CORRUPT, metric=kl_divergence(), each=True)
    p = model(CLEAN)[:, -1].log_softmax(-1)

    def divergence(logits: Tensor) -> Tensor:
        return (p.exp() * (p - logits[:, -1].log_softmax(-1))).sum()

    end = "blocks.1.hook_resid_post"
    grad = observe(model, Batch(CORRUPT), [Read(end, grad=True)], metric=divergence).trace[
        Read(end, grad=True)
    ]
    change = changes(model, CORRUPT, CLEAN)
    for sender in ("L0.resid", "L1.mlp", "L1H3"):
        score = torch.from_numpy(table["each"].sel(sender=sender, receiver="logits").values)
        assert_close(score, (change[sender] * grad).sum((1, 2)))


# refusals


def test_what_has_no_meaning_is_refused_by_name() -> None:
    model = HookedTransformer(build("gpt2"))
    with pytest.raises(
        ValueError, match="KL divergence compares with the clean run, where its gradient is 0"
    ):
        edge_attribution(model, CLEAN, CORRUPT, metric=kl_divergence(), direction="noise")
    with pytest.raises(ValueError, match="its gradient is zero in every prompt"):
        edge_attribution(model, CLEAN, CORRUPT, metric=of_logits(lambda x: 0 * x[:, 0, 0]))
    with pytest.raises(ValueError, match="sum of what its parts add; this model norms the sum itself"):
        attributed(build("post-norm"))
    with pytest.raises(ValueError, match="at least one step is required, got 0"):
        GradientLine("eap-ig-inputs", steps=0)


def test_the_points_are_those_of_the_released_code() -> None:
    inputs, activations = (
        GradientLine("eap-ig-inputs", 4).points(),
        GradientLine("eap-ig-activations", 4).points(),
    )
    assert inputs[0].tolist() == [0, 0.25, 0.5, 0.75] and activations[0].tolist() == [0.25, 0.5, 0.75, 1]
    assert inputs[1].tolist() == [0.25] * 4
    assert GradientLine("clean-corrupted", 9).points()[0].tolist() == [0, 1]
