"""Edge attribution equals autograd on explicit copies of the stream, and exact patching where the model is linear."""

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from interp import Edit, HookedTransformer, Read, observe
from interp.causal.graph import EdgeGraph
from interp.circuits import edge_scores as kernel
from interp.circuits.edge_attribution import Line, Method, edge_attribution
from interp.data.batch import Batch
from interp.model import MLP, LayerNorm, ModelConfig, NoNorm, NoPosition, Tap, Transformer
from interp.passes.metrics import kl_divergence, logit_difference, of_logits
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
from tests.tolerances import assert_close

CLEAN, CORRUPT = some_tokens(3, 7), some_tokens(3, 7, seed=1)
METRIC = logit_difference(ANSWER, WRONG)


def attributed(
    model: Transformer, clean: Tensor = CLEAN, corrupt: Tensor = CORRUPT, **how: object
) -> xr.Dataset:
    return edge_attribution(HookedTransformer(model), clean, corrupt, metric=METRIC, each=True, **how)  # type: ignore[arg-type]


def by_edge(table: xr.Dataset, config: ModelConfig) -> dict[str, Tensor]:
    """Every prompt's score of every edge."""
    each = torch.from_numpy(table["each"].values)
    graph = EdgeGraph.of(config)
    return {edge: each[:, graph.index(edge)[0], graph.index(edge)[1]] for edge in edges(config)}


def changes(model: Transformer, clean: Tensor = CLEAN, corrupt: Tensor = CORRUPT) -> dict[str, Tensor]:
    there, here = writes(model, corrupt), writes(model, clean)
    return {name: there[name] - here[name] for name in here}


# oracles


@pytest.mark.parametrize("name", SUMS)
def test_every_edge_is_autograd_on_the_receiver_s_own_copy_of_the_stream(name: str) -> None:
    model = build(name)
    found, change, grads = by_edge(attributed(model), model.config), changes(model), gradients(model, CLEAN)
    for edge, score in found.items():
        assert_close(score, by_autograd(model, CLEAN, change, edge, grads), torch.float64)
    assert max(float(score.abs().max()) for score in found.values()) > 1e-2


@pytest.mark.parametrize("name", SUMS)
def test_between_neighbouring_tokens_every_edge_is_the_exact_patch(name: str) -> None:
    """Two tokens 1e-6 apart: what is beyond first order is as much smaller."""
    model = perturbed(CONFIGS[name])
    model.embed.weight[9] = model.embed.weight[8] + 1e-6 * torch.randn(24, generator=dice()).double()
    clean, corrupt = CLEAN.clone(), CLEAN.clone()
    clean[:, 2], corrupt[:, 2] = 8, 9
    change = changes(model, clean, corrupt)
    along = (
        ("eap-ig-inputs", "eap-ig-activations", "clean-corrupted") if name in ("parallel", "gemma2") else ()
    )
    for method in ("eap", *along):
        found = by_edge(attributed(model, clean, corrupt, method=method, steps=2), model.config)
        some = list(found)[:: 11 if method == "eap" else 29]
        true = {edge: exact(model, clean, edge, change) for edge in some}
        largest = max(float(x.abs().max()) for x in true.values())
        assert largest > 1e-8
        assert max(float((found[edge] - true[edge]).abs().max()) for edge in some) < 1e-3 * largest


def dice(seed: int = 0) -> torch.Generator:
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
def exact_of_linear(*, parallel: bool) -> dict[str, Tensor]:
    model = linear(parallel=parallel)
    change = changes(model)
    return {edge: exact(model, CLEAN, edge, change) for edge in edges(model.config)}


@pytest.mark.parametrize("method", ["eap", "eap-ig-inputs", "eap-ig-activations", "clean-corrupted"])
@pytest.mark.parametrize("parallel", [False, True])
def test_in_a_linear_network_every_method_is_exact_patching(method: str, parallel: bool) -> None:
    model = linear(parallel=parallel)
    found = by_edge(attributed(model, method=method, steps=3), model.config)
    for edge, score in found.items():
        assert_close(score, exact_of_linear(parallel=parallel)[edge], torch.float64)
    into_values = [e for e in found if e.endswith(("<v>", "m1", "logits"))]
    assert all(float(found[e].abs().max()) > 1e-3 for e in into_values)


# completeness


def whole(model: Transformer, site: str) -> Tensor:
    """The exact change of the metric when all that this site writes is the corrupted run's."""
    given = observe(model, Batch(CORRUPT), [Read(site)]).trace[site]
    with torch.no_grad():
        return difference(model(CLEAN, Tap(edits=[Edit(site, lambda _: given)]))) - difference(model(CLEAN))


def out_of(table: xr.Dataset, senders: list[str]) -> Tensor:
    return torch.from_numpy(table["each"].sel(sender=senders).sum(("sender", "receiver")).values)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2"])
def test_integrated_scores_out_of_the_input_sum_to_the_whole_effect(name: str) -> None:
    model, errors = build(name), []
    expected = whole(model, START)
    for steps in (2, 12, 128):
        table = attributed(model, method="eap-ig-inputs", steps=steps, rule="midpoint")
        errors.append(float((out_of(table, ["input"]) - expected).abs().max()))
    assert errors == sorted(errors, reverse=True), "more steps, smaller error"
    assert errors[-1] < 1e-3 * float(expected.abs().max()) < errors[0]
    released = attributed(model, method="eap-ig-inputs", steps=100)
    assert float((out_of(released, ["input"]) - expected).abs().max()) < 0.1 * float(expected.abs().max())


@pytest.mark.parametrize("name", ["llama-gqa", "parallel", "gemma2"])
def test_integrated_activations_sum_to_the_effect_of_corrupting_the_sublayer(name: str) -> None:
    model = build(name)
    table = attributed(model, method="eap-ig-activations", steps=96, rule="gauss")
    heads = {layer: [f"a{layer}.h{h}" for h in range(4)] for layer in range(2)}
    groups = {START: ["input"]} | {f"blocks.{i}.hook_attn_out": heads[i] for i in range(2)}
    if model.config.mlp is not None:
        groups |= {f"blocks.{i}.hook_mlp_out": [f"m{i}"] for i in range(2)}
    for site, senders in groups.items():
        expected = whole(model, site)
        assert (out_of(table, senders) - expected).abs().max() < 1e-3 * expected.abs().max(), site


def test_clean_corrupted_is_the_mean_of_both_gradients() -> None:
    model = build("gpt2")
    ends = [attributed(model, a, b)["each"] for a, b in ((CLEAN, CORRUPT), (CORRUPT, CLEAN))]
    found = attributed(model, method="clean-corrupted")["each"]
    np.testing.assert_allclose(found, (ends[0] - ends[1]) / 2, atol=1e-12)


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
    edge = "input->a0.h0<k>"
    true = exact(model, clean, edge, changes(model, clean, corrupt))
    assert float(true) < -0.9
    plain, along = (
        by_edge(attributed(model, clean, corrupt, method=method, steps=400, rule="midpoint"), model.config)
        for method in ("eap", "eap-ig-inputs")
    )
    assert abs(float(plain[edge])) < 1e-6
    assert float(along[edge]) == pytest.approx(float(true), rel=1e-3)
    others = [abs(float(along[name])) for name in along if name.startswith("input->") and name != edge]
    assert max(others) < 1e-6, "what the tokens differ in is read by the key alone"


# promises


@pytest.mark.parametrize(
    ("name", "method"), [("gemma2", "eap"), ("llama-gqa", "eap-ig-inputs"), ("gpt2", "eap-ig-activations")]
)
def test_splitting_and_padding_change_no_number(name: str, method: Method) -> None:
    model = HookedTransformer(build(name))
    ask: Callable[..., xr.Dataset] = functools.partial(
        edge_attribution, model, metric=METRIC, method=method, steps=2
    )
    plain = ask(CLEAN, CORRUPT)
    parts = ask(CLEAN, CORRUPT, batch_size=2)
    for side in ("left", "right"):
        other = ask(padded(CLEAN, side), padded(CORRUPT, side))
        for key in ("score", "score_low", "score_high", "clean", "corrupt"):
            np.testing.assert_allclose(other[key], plain[key], atol=1e-9)
            np.testing.assert_allclose(parts[key], plain[key], atol=1e-9)


def padded(tokens: Tensor, side: str) -> Batch:
    extra, hidden = torch.full((3, 2), 17), torch.zeros(3, 2, dtype=torch.bool)
    parts = [(tokens, torch.ones_like(tokens, dtype=torch.bool)), (extra, hidden)]
    values, keep = (torch.cat(x, 1) for x in zip(*(parts if side == "right" else parts[::-1]), strict=True))
    return Batch(values, keep)


@pytest.mark.parametrize("columns", [1, 3, 16])
def test_the_tile_size_changes_no_number(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = attributed(build("llama-gqa"), method="eap-ig-inputs", steps=2)
    width = 24 * (11 + 3 * 8)
    monkeypatch.setitem(kernel.TILE, "cpu", columns * width)
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
    monkeypatch.setitem(kernel.TILE, "cpu", 32 * 1024)
    with Largest() as seen:
        attributed(model, clean, corrupt)
    assert seen.numbers <= 32 * 1024 < 2 * 48 * 16 * 64
    assert seen.numbers >= 2 * 48 * 16 * 4, "and it did see the heads"


def test_the_mean_comes_with_its_interval_and_the_metric_of_both_runs() -> None:
    model = build("gpt2")
    table = attributed(model)
    each = table["each"].values
    half = 1.959963984540054 * each.std(0, ddof=1) / np.sqrt(3)
    np.testing.assert_allclose(table.score, each.mean(0), atol=1e-12)
    np.testing.assert_allclose(table.score_high - table.score, half, atol=1e-12)
    np.testing.assert_allclose(table.score - table.score_low, half, atol=1e-12)
    np.testing.assert_allclose(table.clean, difference(model(CLEAN)), atol=1e-12)
    np.testing.assert_allclose(table.corrupt, difference(model(CORRUPT)), atol=1e-12)
    exists = EdgeGraph.of(model.config).exists.numpy()
    assert (np.isfinite(table.score.values) == exists).all() and table.attrs["edges"] == exists.sum()


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2"])
def test_lower_precision_agrees_with_double(name: str) -> None:
    wide, narrow, half = (
        torch.from_numpy(attributed(build(name, dtype)).score.values).double()
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    )
    assert_close(narrow.nan_to_num(), wide.nan_to_num(), torch.float32)
    known = wide[~wide.isnan()]
    assert (half[~wide.isnan()] - known).abs().mean() < 0.1 * known.abs().mean()


def test_kl_divergence_is_measured_from_the_clean_run() -> None:
    model = HookedTransformer(build("gpt2"))
    table = edge_attribution(
        model,
        CLEAN,
        CORRUPT,
        metric=kl_divergence(),
        method="eap-ig-inputs",
        steps=64,
        rule="gauss",
        each=True,
    )
    p, q = (build("gpt2")(x)[:, -1].log_softmax(-1) for x in (CLEAN, CORRUPT))
    expected = (p.exp() * (p - q)).sum(-1)
    assert_close(torch.from_numpy(table.corrupt.values), expected)
    assert float(abs(table.clean).max()) < 1e-12
    assert (out_of(table, ["input"]) - expected).abs().max() < 1e-2 * expected.abs().max()


# refusals


def test_what_has_no_meaning_is_refused_by_name() -> None:
    model = HookedTransformer(build("gpt2"))
    with pytest.raises(
        ValueError, match="KL divergence compares with the clean run, where its gradient is 0"
    ):
        edge_attribution(model, CLEAN, CORRUPT, metric=kl_divergence())
    with pytest.raises(ValueError, match="gradient is zero in every prompt"):
        edge_attribution(model, CLEAN, CORRUPT, metric=of_logits(lambda x: 0 * x[:, 0, 0]))
    with pytest.raises(ValueError, match="sum of what its parts add; this model norms the sum itself"):
        attributed(build("post-norm"))
    with pytest.raises(ValueError, match="at least one step is required, got 0"):
        Line("eap-ig-inputs", steps=0)


def test_the_points_are_those_of_the_released_code() -> None:
    inputs, activations = Line("eap-ig-inputs", 4).points(), Line("eap-ig-activations", 4).points()
    assert inputs[0].tolist() == [0, 0.25, 0.5, 0.75] and activations[0].tolist() == [0.25, 0.5, 0.75, 1]
    assert inputs[1].tolist() == [0.25] * 4
    assert Line("clean-corrupted", 9).points()[0].tolist() == [0, 1]
