"""Circuits of features equal autograd entry by entry, exact edits where the metric is linear, and a planted circuit."""

import copy
import functools
import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

import interp
from interp import Edit, HookedTransformer, Read
from interp.circuits import GraphPrompt, feature_circuit, read_attribution_graph, write_attribution_graph
from interp.edits import Set, Zero
from interp.features import Dictionary, ReLU
from interp.model import MLP, ModelConfig, NoNorm, NoPosition, Tap, Transformer
from interp.passes import observe
from interp.passes.metrics import kl_divergence
from tests.configs import CONFIGS, perturbed
from tests.tolerances import assert_close

S = 4
SITES = (
    ("blocks.0.hook_resid_post", "blocks.0.hook_resid_post"),
    ("blocks.1.ln2.hook_normalized", "blocks.1.hook_mlp_out"),
    ("blocks.2.hook_attn_out", "blocks.2.hook_attn_out"),
)
CLEAN, CORRUPT = torch.tensor([[3, 1, 4], [2, 7, 1]]), torch.tensor([[3, 6, 4], [2, 9, 5]])
METRIC = interp.logit_difference(3, 4)
EVERY = {"node_threshold": 0.0, "edge_threshold": 0.0, "most": 1000, "metric": METRIC}
PAIRS = CLEAN, CORRUPT


def dictionary(d: int, seed: int, s: int = S, **where: object) -> Dictionary:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {"W_enc": normal(d, s) / d**0.5, "b_enc": normal(s) + 1, "W_dec": normal(s, d) / s**0.5}
    weights["b_dec"] = normal(d)
    return Dictionary(ReLU(), weights, apply_b_dec_to_input=False, **where)  # type: ignore[arg-type]


@functools.cache
def plain() -> HookedTransformer:
    torch.manual_seed(0)
    return HookedTransformer(perturbed(replace(CONFIGS["llama-gqa"], n_layers=3)))


@functools.cache
def coders() -> tuple[Dictionary, ...]:
    """An SAE of the stream, a transcoder of an MLP, an SAE of what attention adds: block by block."""
    return tuple(
        dictionary(plain().cfg.d_model, i, reads=reads, writes=writes)
        for i, (reads, writes) in enumerate(SITES)
    )


@functools.cache
def split() -> HookedTransformer:
    return plain().with_dictionaries(coders())


def states(rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Features and error of every block, worked out from the sites of the model without dictionaries."""
    found = []
    for coder, (reads, writes) in zip(coders(), SITES, strict=True):
        trace = observe(plain(), rows, [Read(site) for site in dict.fromkeys((reads, writes))]).trace
        f = (trace[reads] @ coder.W_enc + coder.b_enc).relu()
        found.append((f, trace[writes] - f @ coder.W_dec - coder.b_dec))
    return found


def run(
    rows: Tensor, state: Mapping[int, tuple[Tensor, Tensor]], held: set[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The metric of each row, and the live sites, where blocks get these features and errors, or no gradient."""
    seen: dict[str, Tensor] = {}

    def at(site: str, cells: Tensor) -> Tensor:
        layer = next((i for i, (_, writes) in enumerate(SITES) if writes == site), None)
        if layer in state:
            f, e = state[layer]
            cells = f @ coders()[layer].W_dec + coders()[layer].b_dec + e
        elif layer in held:
            cells = cells.detach()
        seen[site] = cells
        return cells

    names = dict.fromkeys(itertools.chain(*SITES))
    edits = [Edit(site, functools.partial(at, site)) for site in names]
    with torch.enable_grad():
        logits = plain().transformer(rows, Tap(edits=edits))[:, -1]
    return logits[:, 3] - logits[:, 4], seen


def leaves(rows: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    f, e = states(rows)[layer]
    return f.detach().clone().requires_grad_(), e.detach().clone().requires_grad_()


def slopes(rows: Tensor, layer: int, held: set[int]) -> tuple[Tensor, Tensor]:
    """The gradient of the metric at the features and the error of a block."""
    state = leaves(rows, layer)
    f, e = torch.autograd.grad(run(rows, {layer: state}, held)[0].sum(), state)
    return f, e


def per_node(f: Tensor, e: Tensor) -> Tensor:
    """Products `[b p ...]` of features and of an error as `[b p node]`."""
    return torch.cat((f, e.sum(-1, keepdim=True)), -1)


def slow_edges(before: int, after: int) -> Tensor:
    """[b p_before node p_after node]: every entry of the Jacobian by itself, blocks between them held."""
    own, other = states(CLEAN)[before], states(CORRUPT)[before]
    change = [o - x for o, x in zip(other, own, strict=True)]
    state = leaves(CLEAN, before)
    _, seen = run(CLEAN, {before: state}, set(range(before + 1, after)))
    coder, (reads, writes) = coders()[after], SITES[after]
    with torch.enable_grad():
        f = (seen[reads] @ coder.W_enc + coder.b_enc).relu()
        downstream = f, seen[writes] - f @ coder.W_dec - coder.b_dec
    weights = torch.zeros(2, 3, S + 1, 3, S + 1, dtype=torch.float64)
    for values, slope, node in zip(downstream, slopes(CLEAN, after, set()), (None, S), strict=True):
        for b, p, i in itertools.product(*map(range, values.shape)):
            jacobian = torch.autograd.grad(values[b, p, i], state, retain_graph=True)
            along = per_node(*(x * y for x, y in zip(jacobian, change, strict=True)))
            weights[b, :, :, p, i if node is None else node] += along[b] * slope[b, p, i]
    return weights


NAMES = [[*(f"L{layer}F{i}" for i in range(S)), f"L{layer}.error"] for layer in range(3)]

ALL = list(itertools.chain(*NAMES))


def block(found: xr.Dataset, before: int, after: int) -> np.ndarray:
    """Edges between all nodes of two blocks, 0 where there is none."""
    return found.edge_value.reindex(sender=NAMES[before], receiver=NAMES[after]).fillna(0.0).to_numpy()


@functools.cache
def every(**asked: object) -> xr.Dataset:
    return feature_circuit(split(), *PAIRS, **(EVERY | asked))


# oracles


@pytest.mark.parametrize("direction", ["noise", "denoise"])
def test_effects_of_features_and_errors_are_those_of_attribution_patch(direction: str) -> None:
    found = every(direction=direction)
    how = {"metric": METRIC, "direction": direction, "agreement": 0}
    features = interp.causal.attribution_patch(
        split(), CLEAN, CORRUPT, "features", by=("layer", "feature"), **how
    )
    errors = interp.causal.attribution_patch(
        split(), CLEAN, CORRUPT, "blocks.1.hook_error", by=("layer",), **how
    )
    effect = found.value.reindex(node=ALL).fillna(0.0).to_numpy().reshape(3, S + 1)
    assert_close(torch.from_numpy(effect[:, :S]), torch.from_numpy(features.value.to_numpy()))
    assert effect[1, S] == pytest.approx(float(errors.value.sel(layer=1)), rel=1e-9)


@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (1, 2)], ids=str)
def test_edges_are_jacobians_entry_by_entry_along_the_direct_path(pair: tuple[int, int]) -> None:
    slow = slow_edges(*pair)
    assert_close(torch.from_numpy(block(every(), *pair)), slow.sum((1, 3)).mean(0))
    found = every(by_position=True)
    for first, last in itertools.product(range(3), range(3)):
        ends = {"sender": pair[0], "receiver": pair[1]}
        names = {
            end: [f"{name}@{pos}" for name in NAMES[layer]]
            for (end, layer), pos in zip(ends.items(), (first, last), strict=True)
        }
        weights = found.edge_value.reindex(names).fillna(0.0).to_numpy()
        assert_close(torch.from_numpy(weights), slow[:, first, :, last].mean(0))


def test_edges_to_the_logits_hold_what_all_other_dictionaries_write() -> None:
    for layer in range(3):
        own, other = states(CLEAN)[layer], states(CORRUPT)[layer]
        slope = slopes(CLEAN, layer, {0, 1, 2} - {layer})
        product = per_node(*((o - x) * g for o, x, g in zip(other, own, slope, strict=True)))
        found = every().edge_value.sel(receiver="logits").reindex(sender=NAMES[layer]).fillna(0.0)
        assert_close(torch.from_numpy(found.to_numpy()), product.sum(1).mean(0))


def test_edges_out_of_a_node_sum_to_its_effect() -> None:
    assert_close(torch.from_numpy(every().outside.to_numpy()), torch.zeros(every().sizes["node"]).double())
    by_position = every(by_position=True)
    assert float(abs(by_position.outside).max()) < 1e-12
    kept = feature_circuit(split(), *PAIRS, **(EVERY | {"most": 6}))
    whole = kept.edge_value.fillna(0.0).sum("receiver") + kept.outside.rename(node="sender")
    assert_close(torch.from_numpy(whole.to_numpy()), torch.from_numpy(kept.value.to_numpy()))
    assert "most=6 of the largest are kept" in kept.view.notes[0]
    largest = abs(every().value).sortby(abs(every().value), ascending=False).node.to_numpy()[:6]
    assert set(kept.node.to_numpy()) == set(largest)


def patched(state: tuple[Tensor, Tensor], layer: int) -> Tensor:
    with torch.no_grad():
        return run(CLEAN, {layer: state}, set())[0]


def test_integrated_effects_of_a_dictionary_sum_to_the_effect_of_its_site() -> None:
    base = patched(states(CLEAN)[1], 1)
    exact = [float((patched(states(CORRUPT)[layer], layer) - base).mean()) for layer in range(3)]
    missed = {}
    for steps, rule in ((100, "released"), (200, "released"), (40, "gauss")):
        found = every(method="integrated", steps=steps, rule=rule)
        sums = [float(found.value.where(found.node.isin(names), 0).sum()) for names in NAMES]
        missed[steps, rule] = max(abs(a - b) for a, b in zip(sums, exact, strict=True))
    assert missed[40, "gauss"] < 1e-3 * max(map(abs, exact))
    assert missed[200, "released"] == pytest.approx(missed[100, "released"] / 2, rel=0.2)


def test_the_left_sum_begins_at_the_run_that_is_intervened_on() -> None:
    one = every(method="integrated", steps=1)
    xr.testing.assert_allclose(one.value, every().value)


# a metric that is linear in the features: exact


@functools.cache
def linear() -> tuple[HookedTransformer, Dictionary]:
    """Neither norm after the last block: the logits are linear in the stream that leaves it."""
    torch.manual_seed(0)
    model = HookedTransformer(perturbed(CONFIGS["no-norm"]))
    sae = dictionary(model.cfg.d_model, 3, 12, reads="blocks.1.hook_resid_post")
    return model.with_dictionaries([sae]), sae


@pytest.mark.parametrize("replacement", ["resample", "zero", "mean"])
def test_effects_are_those_of_edits_where_the_metric_is_linear(replacement: str) -> None:
    model, _ = linear()
    found = feature_circuit(model, *PAIRS, **(EVERY | {"replacement": replacement}))
    sites = ("blocks.1.hook_features", "blocks.1.hook_error")
    trace = observe(model, CORRUPT, [Read(site) for site in sites]).trace
    base = model(CLEAN)[:, -1]
    assert found.sizes["node"] > 5
    for name in found.node.to_numpy():
        site = sites[name.endswith("error")]
        other = trace[site] if replacement != "mean" else trace[site].mean(0, keepdim=True)
        edit = Edit(name, Zero() if replacement == "zero" else Set(other))
        moved = model.edited(edit)(CLEAN)[:, -1] if replacement != "resample" else observe(
            model, CLEAN, edits=[edit]).output[:, -1]  # fmt: skip
        change = moved - base
        exact = float((change[:, 3] - change[:, 4]).mean())
        assert float(found.value.sel(node=name)) == pytest.approx(exact, rel=1e-10, abs=1e-10)


def test_one_prompt_without_a_corrupted_one_is_asked_against_zero() -> None:
    model, _ = linear()
    found = feature_circuit(model, CLEAN, **(EVERY | {"replacement": "zero"}))
    pairs = feature_circuit(model, *PAIRS, **(EVERY | {"replacement": "zero"}))
    xr.testing.assert_allclose(found.value, pairs.value)
    xr.testing.assert_allclose(found.faithfulness, pairs.faithfulness)
    with pytest.raises(ValueError, match="clean and corrupted prompts are required"):
        feature_circuit(model, CLEAN, **EVERY)


# runs of the circuit


def by_hand(found: xr.Dataset, kept: set[str], errors: str, complement: bool) -> Tensor:
    """The metric of a run of the circuit, block after block: what is outside takes the corrupted prompts' value."""
    nodes, other = set(found.node.to_numpy()), states(CORRUPT)
    edits = []
    for layer, names in enumerate(NAMES):
        for i, name in enumerate(names[:-1]):
            if name not in kept:
                edits.append(Edit(name, Set(other[layer][0][..., i])))
        of_circuit = (names[-1] in nodes) != complement
        if not {"circuit": of_circuit, "kept": True, "replaced": False}[errors]:
            edits.append(Edit(names[-1], Set(other[layer][1])))
    logits = observe(split(), CLEAN, edits=edits).output[:, -1]
    return logits[:, 3] - logits[:, 4]


def test_faithfulness_is_that_of_edits_by_hand() -> None:
    found = feature_circuit(split(), *PAIRS, **(EVERY | {"most": 7, "draws": 2}))
    features = {name for names in NAMES for name in names[:-1]}
    nodes = set(found.node.to_numpy()) & features
    sets = {"found": nodes, "complement": features - nodes, "no feature": set(), "every feature": features}
    for (circuit, kept), errors in itertools.product(sets.items(), found.errors.to_numpy()):
        value = by_hand(found, kept, errors, circuit == "complement")
        assert_close(torch.from_numpy(found["each"].sel(circuit=circuit, errors=errors).to_numpy()), value)
    gain, total = found["each"] - found.empty, float((found.full - found.empty).mean())
    xr.testing.assert_allclose(found.faithfulness, gain.mean("prompt") / total)


def test_the_whole_set_is_faithful_the_empty_one_not_at_all() -> None:
    found = every()
    assert float(found.faithfulness.sel(circuit="every feature", errors="kept")) == 1
    assert float(found.faithfulness.sel(circuit="no feature", errors="replaced")) == 0
    assert float(found.faithfulness.sel(circuit="found", errors="circuit")) == pytest.approx(1)
    assert float(found.faithfulness.sel(circuit="complement", errors="circuit")) == pytest.approx(
        0, abs=1e-12
    )
    assert found.faithfulness_ends.isnull().all()  # of two prompts


def test_the_interval_is_a_bootstrap_over_prompts() -> None:
    model, _ = linear()
    tokens = torch.randint(0, 31, (24, 4), generator=torch.Generator().manual_seed(0))
    other = torch.cat((tokens[:, :1], tokens.roll(1, 0)[:, 1:2], tokens[:, 2:]), 1)
    found = feature_circuit(model, tokens, other, **(EVERY | {"most": 4}))
    gain = (found["each"] - found.empty).sel(circuit="found", errors="circuit").to_numpy()
    total, generator = (found.full - found.empty).to_numpy(), np.random.default_rng(0)
    drawn = generator.multinomial(24, np.full(24, 1 / 24), size=20000)
    ends = np.quantile((drawn @ gain) / (drawn @ total), (0.025, 0.975))
    one = found.sel(circuit="found", errors="circuit")
    width = ends[1] - ends[0]
    assert one.faithfulness_ends.to_numpy().tolist() == pytest.approx(ends.tolist(), abs=0.1 * width)


# a planted circuit


@functools.cache
def planted() -> tuple[HookedTransformer, tuple[Tensor, Tensor]]:
    """Token 1 is read by a neuron of MLP 0, which is read by one of MLP 1, which writes the answer; the rest is noise.

    L0F7 and L1F3 are these; L0F11 is active when L0F7 is, and writes what nothing reads; L0F12 is active then too and
    its direction is the answer's, so that it has an effect and none through L1F3; L1F5 reads what L1F3 does and writes
    what nothing reads.
    """
    width, d, s = 40, 40, 30
    config = ModelConfig(
        2, d, 2, 8, 12, d_head=4, mlp=MLP(width, act="relu"), norm=NoNorm(), final_norm=False, position=NoPosition(),
    )  # fmt: skip
    network, generator = Transformer(config).double(), torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0]
    token, moved, answer, idle = basis[:4]

    def noise(*shape: int) -> Tensor:
        return 0.02 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(noise(*parameter.shape))
        network.embed.weight[1] += token
        network.unembed.weight[5] += 4 * answer
        for layer, (reads, writes) in enumerate(((token, moved), (moved, answer))):
            mlp = network.block(layer).mlp
            mlp.into.weight[0] += 3 * reads
            mlp.out.weight[:, 0] += writes
    saes = []
    for layer, rows in enumerate(
        (
            {7: (token, moved), 11: (token, idle), 12: (token, 0.2 * answer)},
            {3: (moved, answer), 5: (moved, idle)},
        )
    ):
        W_enc, W_dec = noise(d, s), noise(s, d)
        for i, (reads, writes) in rows.items():
            W_enc[:, i], W_dec[i] = 3 * reads, writes
        weights = {
            "W_enc": W_enc,
            "b_enc": torch.zeros(s).double(),
            "W_dec": W_dec,
            "b_dec": torch.zeros(d).double(),
        }
        where = {"reads": f"blocks.{layer}.hook_mlp_in", "writes": f"blocks.{layer}.hook_mlp_out"}
        saes.append(Dictionary(ReLU(), weights, **where))
    clean = torch.randint(6, 12, (6, 5), generator=generator)
    clean[:, -1] = 1
    corrupt = clean.clone()
    corrupt[:, -1] = 2
    model = HookedTransformer(network.eval().requires_grad_(False))
    return model.with_dictionaries(saes), (clean, corrupt)


def test_a_planted_circuit_is_found_and_its_companions_are_not() -> None:
    model, pairs = planted()
    metric = interp.logit_difference(5, 4)
    found = feature_circuit(model, *pairs, metric=metric, node_threshold=0.5, edge_threshold=0.3)
    nodes = set(found.node.to_numpy())
    assert {"L0F7", "L1F3", "L0F12"} <= nodes <= {"L0F7", "L1F3", "L0F12", "L0.error", "L1.error"}
    assert bool(found.edge.sel(sender="L0F7", receiver="L1F3")) and bool(
        found.edge.sel(sender="L1F3", receiver="logits")
    )
    assert not bool(found.edge.sel(sender="L0F12", receiver="L1F3"))
    through = float(found.edge_value.sel(sender="L0F7", receiver="L1F3"))
    assert through == pytest.approx(float(found.value.sel(node="L0F7")), rel=0.05)
    two = feature_circuit(model, *pairs, metric=metric, nodes=["L0F7", "L1F3"], draws=20)
    share = two.sel(circuit="found", errors="replaced")
    assert float(share.faithfulness) > 0.8 and float(share.faithfulness_null) < 0.3
    false = feature_circuit(model, *pairs, metric=metric, nodes=["L0F11", "L1F5"])
    assert abs(float(false.faithfulness.sel(circuit="found", errors="replaced"))) < 0.05
    assert float(false.faithfulness.sel(circuit="complement", errors="kept")) > 0.9
    assert float(abs(false.value).max()) < 0.05 * abs(float(found.value.sel(node="L0F7")))


# the form of the question


def test_numbers_do_not_depend_on_batches_padding_or_order() -> None:
    rows = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8], [6, 2, 8, 3, 1]]
    others = [[3, 1, 6, 1, 5, 9, 2], [2, 7, 5, 8], [6, 4, 8, 3, 1]]
    whole = feature_circuit(split(), rows, others, **(EVERY | {"most": 8, "draws": 1}))
    turned = feature_circuit(split(), rows[::-1], others[::-1], **(EVERY | {"most": 8, "draws": 1}))
    for name in ("value", "edge_value", "faithfulness", "outside", "error_share"):
        xr.testing.assert_allclose(whole[name], turned[name], atol=1e-10)
    single = [
        feature_circuit(
            split(), [row], [other], **EVERY | {"nodes": tuple(whole.node.to_numpy()), "draws": 1}
        )
        for row, other in zip(rows, others, strict=True)
    ]
    mean = sum(one.value for one in single) / 3
    xr.testing.assert_allclose(whole.value.drop_vars("pos"), mean.drop_vars("pos"), atol=1e-10)
    edges = sum(one.edge_value for one in single) / 3
    xr.testing.assert_allclose(whole.edge_value, edges, atol=1e-10)


def test_effects_at_positions_sum_to_those_of_all_positions() -> None:
    by_position = every(by_position=True)
    summed = by_position.value.groupby("part").sum()
    assert_close(
        torch.from_numpy(summed.sel(part=every().node.to_numpy()).to_numpy()),
        torch.from_numpy(every().value.to_numpy()),
    )
    assert set(by_position.pos.to_numpy().tolist()) <= {0, 1, 2}


def test_the_share_of_errors_is_that_of_all_effects() -> None:
    effect = every().value.reindex(node=ALL).fillna(0.0).to_numpy().reshape(3, S + 1)
    share = np.abs(effect[:, S]) / np.abs(effect).sum(1)
    assert_close(torch.from_numpy(every().error_share.to_numpy()), torch.from_numpy(share))
    whole = np.abs(effect[:, S]).sum() / np.abs(effect).sum()
    assert every().attrs["errors"].startswith(f"carry {whole:.0%}")
    few = feature_circuit(split(), *PAIRS, **(EVERY | {"nodes": ("L0F1",)}))
    assert few.attrs["errors"] == every().attrs["errors"]


def test_a_circuit_of_one_prompt_is_a_graph_of_the_viewer(tmp_path: Path) -> None:
    pair = CLEAN[:1], CORRUPT[:1]
    found = feature_circuit(split(), *pair, **(EVERY | {"most": 9, "by_position": True}))
    prompt = GraphPrompt("a b c", ("a", " b", " c"), " d", 0.5)
    write_attribution_graph(found, prompt, tmp_path / "graph.json")
    graph = read_attribution_graph(tmp_path / "graph.json")
    assert len(graph.nodes) == 10 and len(graph.links) == found.attrs["edges"]
    by_label = {node.label.split(" ")[0]: node for node in graph.nodes}
    for name, feature, pos in zip(found.node.values, found.feature.values, found.pos.values, strict=True):
        node = by_label[name]
        assert node.position == pos
        i, layer = feature, int(node.layer)
        assert node.feature == (-1 if feature < 0 else (layer + i) * (layer + i + 1) // 2 + i)
    total = -float(found.edge_value.sum())  # replacing what helps lowers the metric
    assert graph.links.weight.sum() == pytest.approx(total)
    ids = [node["node_id"] for node in json.loads((tmp_path / "graph.json").read_text())["nodes"]]
    assert len(set(ids)) == len(ids)
    with pytest.raises(ValueError, match="this circuit was scored on 2 pairs"):
        write_attribution_graph(every(), prompt, tmp_path / "graph.json")


def test_half_precision_gives_the_numbers_of_single_precision_to_its_rounding() -> None:
    sae = [copy.deepcopy(coder).to(torch.float32) for coder in coders()]
    asked = EVERY | {"most": 6, "draws": 1}
    models = {
        dtype: HookedTransformer(copy.deepcopy(plain().transformer).to(dtype)).with_dictionaries(sae)
        for dtype in (torch.float32, torch.bfloat16)
    }
    single = feature_circuit(models[torch.float32], *PAIRS, **asked)
    nodes = tuple(single.node.to_numpy())
    half = feature_circuit(models[torch.bfloat16], *PAIRS, **(asked | {"nodes": nodes}))
    scale = float(abs(single.value).max())
    assert float(abs(half.value - single.value).max()) < 0.1 * scale


def test_what_cannot_be_asked_is_refused() -> None:
    def refused(match: str, error: type[Exception] = ValueError, **asked: object) -> None:
        with pytest.raises(error, match=match):
            feature_circuit(split(), *PAIRS, **(EVERY | asked))

    refused("no node has an effect of 1000", node_threshold=1000.0)
    refused("requires replacement='resample'", direction="denoise", replacement="zero")
    refused("draws must be a number, at least 0", draws=-1)
    refused("compares with the clean run", metric=kl_divergence())
    refused("a feature or an error is required", nodes=("L0H1",))
    refused("requires every node without a position", nodes=("L0F1@2",))
    refused("requires every node with its position", nodes=("L0F1",), by_position=True)
    refused("none twice", nodes=("L0F1", "L0F1"))
    refused("features are 0 to 3", IndexError, nodes=("L0F4",))
    refused("reference prompts belong to replacement='mean'", reference=CLEAN)
    with pytest.raises(ValueError, match="requires a model with dictionaries"):
        feature_circuit(plain(), *PAIRS, **EVERY)
    only = plain().with_dictionaries(coders()[:1])
    with pytest.raises(KeyError, match="block 1 has no dictionary"):
        feature_circuit(only, *PAIRS, **(EVERY | {"nodes": ("L1F0",)}))
