"""Analyses of Macaron blocks: neither MLP is left out, or the analysis is refused with the reason."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.causal import CausalTrace
from interp.causal.graph import EdgeGraph
from interp.causal.patching import patch_preset
from interp.circuits.circuit_evaluation import degree_matched
from interp.circuits.edge_circuit import connected
from interp.circuits.mib_files import write_mib
from interp.compat.hooked_export import to_hooked_state
from interp.model import MLP, Edit, Read, Tap, UsualBlock
from interp.model.block import FeedForward
from interp.model.edits import Zero
from interp.model.parts import Part
from interp.passes.metrics import logit_difference
from interp.passes.packs import block_products
from interp.runs.tensor_parallel import check_tensor_parallel
from interp.weights import neurons
from tests.configs import CONFIGS, build, some_tokens
from tests.tolerances import assert_close

CONFIG = CONFIGS["macaron"]
ANSWER, WRONG = [3, 14, 7], [5, 1, 30]
METRIC = logit_difference(ANSWER, WRONG)


def model() -> HookedTransformer:
    return HookedTransformer(build("macaron"))


def difference(logits: Tensor) -> Tensor:
    rows = torch.arange(3)
    return logits[rows, -1, torch.tensor(ANSWER)] - logits[rows, -1, torch.tensor(WRONG)]


def without(first: bool, layers: tuple[int, ...], neuron: int | None = None) -> Tensor:
    """The logit difference of the model whose weights of these MLPs (or of one neuron of them) are zero."""
    changed = deepcopy(build("macaron"))
    for layer in layers:
        block = changed.block(layer)
        mlp = block.mlp_before if first else block.mlp
        assert isinstance(mlp, FeedForward) and mlp.out.bias is not None
        if neuron is None:
            mlp.out.weight.zero_(), mlp.out.bias.zero_()
        else:
            mlp.out.weight[:, neuron] = 0
    return difference(changed(some_tokens()))


def test_ablating_either_mlp_is_zeroing_its_weights() -> None:
    whole = difference(build("macaron")(some_tokens()))
    for what, first in (("mlp", False), ("mlp_before", True)):
        found = interp.ablate(model(), some_tokens(), what, change=Zero(), metric=METRIC)  # type: ignore[arg-type]
        for layer in range(2):
            assert_close(torch.from_numpy(found.each.values[:, layer]), without(first, (layer,)) - whole)
        assert float(found.value.max() - found.value.min()) > 1e-3
    found = interp.ablate(model(), some_tokens(), "neuron_before", change=Zero(), metric=METRIC, layers=[1])
    assert found.value.dims == ("layer", "neuron") and found.sizes["neuron"] == 40
    assert_close(torch.from_numpy(found.each.values[:, 0, 17]), without(True, (1,), 17) - whole)


def test_sets_name_the_parts_of_the_first_mlp() -> None:
    assert Part.of("b1").site == "blocks.1.hook_mlp_before_out"
    assert Part.of("L1B3").site == "blocks.1.mlp_before.hook_post"
    whole = difference(build("macaron")(some_tokens()))
    found = interp.ablate(
        model(), some_tokens(), [["L0.mlp_before", "L1.mlp_before"]], change=Zero(), metric=METRIC
    )
    assert_close(torch.from_numpy(found.each.values[:, 0]), without(True, (0, 1)) - whole)
    with pytest.raises(KeyError, match="hook_mlp_before_out"):
        interp.ablate(
            HookedTransformer(build("gpt2")), some_tokens(), "mlp_before", change=Zero(), metric=METRIC
        )


def test_patching_a_first_mlp_is_the_edit_at_its_site() -> None:
    clean, corrupt = some_tokens(), some_tokens(seed=1)
    found = interp.patch(model(), clean, corrupt, "mlp_before_out", metric=METRIC)
    site = "blocks.0.hook_mlp_before_out"
    of_clean = Tap([Read(site)])
    build("macaron")(clean, of_clean)

    def put(value: Tensor) -> Tensor:
        value[:, 2] = of_clean.values[of_clean.reads[0]][:, 2]
        return value

    patched = build("macaron")(corrupt, Tap(edits=[Edit(site, put)]))
    expected = difference(patched) - difference(build("macaron")(corrupt))
    assert_close(torch.from_numpy(found.each.sel(layer=0, pos=2).values), expected)


def test_every_sublayer_of_a_block_is_patched() -> None:
    found = patch_preset(
        model(), some_tokens(1), some_tokens(1, seed=1), "block_every", metric=logit_difference(3, 5)
    )
    assert list(found) == ["mlp_before_out", "resid_pre", "attn_out", "mlp_out"]


def test_the_lens_reads_the_stream_between_first_mlp_and_attention() -> None:
    found = interp.logit_lens(
        model(), some_tokens(), sites=("resid_pre", "resid_pre_attn", "resid_mid"), top=1
    )
    assert found.depth.values.tolist() == [
        *(f"L{layer}.resid{state}" for layer in range(2) for state in ("", "_pre_attn", "_mid")), "L1.resid_post",
    ]  # fmt: skip
    tap = Tap([Read("blocks.1.hook_resid_pre_attn")])
    build("macaron")(some_tokens(), tap)
    best = build("macaron").read_out(tap.values[tap.reads[0]]).argmax(-1)
    assert found.top_token.sel(depth="L1.resid_pre_attn").values[..., 0].tolist() == best.tolist()


def test_states_between_the_sublayers_are_all_there() -> None:
    _, cache = model().run_with_cache(some_tokens())
    states = cache.accumulated_resid(incl_mid=True)
    assert states.parts[:4] == ("L0.resid", "L0.resid_pre_attn", "L0.resid_mid", "L1.resid")
    steps = states.values[1:4] - states.values[:3]
    for step, name in zip(steps, ("mlp_before_out", "attn_out", "mlp_out"), strict=True):
        assert_close(step, cache[f"blocks.0.hook_{name}"])


def test_a_trace_of_mlps_restores_and_severs_both() -> None:
    both = [f"blocks.{i}.hook_mlp{part}_out" for i in range(2) for part in ("_before", "")]
    tracing = partial(CausalTrace, "the subject")
    assert tracing(kind="mlp", window=1).restored(1, CONFIG) == both[2:]
    assert tracing(severed="mlp").frozen(0, CONFIG) == both
    assert tracing(kind="attn", window=10).restored(0, CONFIG) == [
        "blocks.0.hook_attn_out",
        "blocks.1.hook_attn_out",
    ]


def test_the_mlps_of_alti_logit_are_those_of_the_attribution() -> None:
    found = interp.token_attribution(model(), some_tokens(), ANSWER, method="alti_logit")
    parts = interp.attribute(model(), some_tokens(), ANSWER).value
    mlps = [c for c in parts.part.values if "mlp" in c]
    assert len(mlps) == 4
    assert found.mlp.values == pytest.approx(parts.sel(part=mlps).sum("part").values)


def test_the_largest_neurons_are_chosen_among_both_mlps() -> None:
    every = interp.attribute(model(), some_tokens(), ANSWER, parts="neuron")
    some = interp.attribute(model(), some_tokens(), ANSWER, parts="neuron", top=9)
    names = [c for c in every.part.values if c[2:3] in ("B", "N")]
    sizes = abs(every.value.sel(part=names)).mean("prompt")
    largest = set(sizes.part.values[sizes.values.argsort()[-9:]])
    assert {c for c in some.part.values if c[2:3] in ("B", "N")} == largest
    assert {c[2] for c in largest} == {"B", "N"}
    rest = [c for c in names if c.startswith("L1B") and c not in largest]
    expected = every.value.sel(part=rest).sum("part").values
    assert some.value.sel(part="L1.mlp_before_rest").values == pytest.approx(expected)
    assert float(some.attrs["completeness_error"]) < 1e-12
    with pytest.raises(ValueError, match=r"top must be in \[1, 160\]"):
        interp.attribute(model(), some_tokens(), ANSWER, parts="neuron", top=161)


def test_a_backward_lens_has_the_matrices_of_both() -> None:
    found = interp.backward_lens(model(), some_tokens(), ANSWER)
    before = ["mlp_before.W_in", "mlp_before.W_gate", "mlp_before.W_out"]
    assert found.matrix.values.tolist() == ["W_in", "W_gate", "W_out", "W_Q", "W_K", "W_V", "W_O", *before]
    assert found.part.sel(layer=1).values[[0, 2, -1]].tolist() == ["L1.mlp", "L1.mlp", "L1.mlp_before"]
    assert found.side.values[[0, 2, 7, 9]].tolist() == ["x", "delta", "x", "delta"]
    x, delta = interp.lenses.gradient_factors(model(), some_tokens(), ANSWER)["blocks.0.mlp_before.W_out"]
    cells = found.sel(matrix="mlp_before.W_out", layer=0)
    assert cells.delta.values.tolist() == delta.norm(dim=-1).tolist()
    ranks = interp.lenses.gradient_rank(model(), some_tokens(), ANSWER, matrices=["mlp_before.W_out"])
    gradients = torch.einsum("bpi,bpo->bio", x, delta)
    assert ranks.value.values[:, 0, 0].tolist() == torch.linalg.matrix_rank(gradients).tolist()


def test_spectra_have_the_matrices_of_both() -> None:
    names = interp.weights.spectra(model()).matrix.values.tolist()
    for part in ("mlp", "mlp_before"):
        assert {f"blocks.1.{part}.{w}" for w in ("W_in", "W_gate", "W_out")} <= set(names)


def test_a_sweep_is_planned_with_the_cost_of_both() -> None:
    plain = replace(CONFIG, block=UsualBlock())
    assert isinstance(CONFIG.mlp, MLP)
    assert block_products(CONFIG) - block_products(plain) == 24 * 3 * CONFIG.mlp.d_mlp


def exact_effects() -> torch.Tensor:
    found = interp.circuits.edge_effects(model(), some_tokens(), some_tokens(seed=1), metric=METRIC)
    return torch.from_numpy(found.value.values).nan_to_num()


def test_the_edges_out_of_the_input_sum_to_the_whole_effect() -> None:
    """Gauss' rule: the integral along the line from corrupted to clean embeddings is the metric's whole change."""
    found = interp.circuits.edge_attribution(
        model(),
        some_tokens(),
        some_tokens(seed=1),
        metric=METRIC,
        method="eap-ig-inputs",
        steps=48,
        rule="gauss",
    )
    whole = difference(build("macaron")(some_tokens())) - difference(build("macaron")(some_tokens(seed=1)))
    out = found.value.sel(sender="L0.resid").sum("receiver")
    assert float(out) == pytest.approx(float(whole.mean()), rel=1e-3)
    assert abs(float(found.value.sel(sender="L0.resid", receiver="L0.mlp_before"))) > 1e-2


def test_a_circuit_found_by_exact_effects_has_the_largest_connected_edges() -> None:
    graph, effects = EdgeGraph.of(CONFIG), exact_effects()
    found = interp.circuits.find_circuit(
        model(), some_tokens(), some_tokens(seed=1), metric=METRIC, edges=30, method="exact", search="top_n"
    )
    places = effects.abs().flatten().topk(30).indices
    largest = {graph.name(int(i) // len(graph.receivers), int(i) % len(graph.receivers)) for i in places}
    assert set(found.edges) <= largest
    assert found.mask().equal(connected(graph, graph.chosen(largest)))
    assert any("mlp_before" in edge for edge in found.edges)
    assert interp.circuits.Circuit.of(graph, found.mask(), effects).mask().equal(found.mask())


def test_a_circuit_is_evaluated_by_passes_with_its_edges_alone() -> None:
    graph, pairs = EdgeGraph.of(CONFIG), (some_tokens(), some_tokens(seed=1))
    circuit = interp.circuits.find_circuit(model(), *pairs, metric=METRIC, edges=40)
    found = interp.circuits.evaluate_circuit(model(), *pairs, circuit, metric=METRIC, nodes=2)
    masks = torch.stack((graph.exists, circuit.mask(), torch.zeros_like(graph.exists)))
    ran = interp.circuits.interchange(model(), *pairs, masks, metric=METRIC)
    full, kept, empty = torch.from_numpy(ran["each"].values.T)
    faithful = (kept - empty).mean() / (full - empty).mean()
    assert float(found.value.isel(circuit=0).sel(score="faithfulness")) == pytest.approx(float(faithful))
    assert {"L0.mlp_before", "L1.mlp_before"} & set(found.part.values)


def test_random_circuits_keep_the_degrees_of_the_first_mlp() -> None:
    graph = EdgeGraph.of(CONFIG)
    kept = graph.exists & (torch.rand(graph.exists.shape, generator=torch.Generator().manual_seed(0)) < 0.4)
    other = degree_matched(graph, kept, np.random.default_rng(0))
    assert not other.equal(kept) and not bool((other & ~graph.exists).any())
    for layer in range(2):
        for mlp in ("mlp_before", "mlp"):
            sender, receiver = graph.mlp_sender(layer, mlp), graph.mlp_receiver(layer, mlp)
            assert other[sender].sum() == kept[sender].sum()
            assert other[:, receiver].sum() == kept[:, receiver].sum()


def test_circuits_with_the_first_mlp_are_saved_and_drawn_in_the_order_of_the_pass(tmp_path: Path) -> None:
    scores = {"L0.resid->L0.mlp_before": 2.0, "L0.mlp_before->L0H1.q": 1.0, "L0H1->L1.mlp_before": -1.0}
    circuit = interp.circuits.Circuit(EdgeGraph.of(CONFIG), scores | {"L1.mlp_before->logits": 3.0})
    circuit.save(tmp_path / "circuit.json")
    assert interp.circuits.Circuit.load(tmp_path / "circuit.json") == circuit
    names = ["L0.resid", "L0.mlp_before", "L0H1", "L1.mlp_before", "logits"]
    places = {text.get_text(): text.get_position()[1] for text in interp.plot.circuit(circuit).texts}
    heights = [places[name] for name in names if name in places]
    assert len(heights) >= 3 and heights == sorted(set(heights))


def test_a_model_edited_between_the_mlps_is_no_sum() -> None:
    edited = model().edited(Edit("blocks.0.hook_resid_pre_attn", Zero()))
    with pytest.raises(ValueError, match=r"inputs that are sums.*hook_resid_pre_attn|resid_pre_attn"):
        interp.circuits.edge_effects(edited, some_tokens(), some_tokens(seed=1), metric=METRIC)


REFUSED: dict[str, Callable[[], object]] = {
    "files of MIB": lambda: write_mib(
        "never_written.json", model(), torch.zeros(EdgeGraph.of(CONFIG).exists.shape)
    ),
    "TransformerLens": lambda: to_hooked_state(build("macaron")),
    "tensor parallel": lambda: check_tensor_parallel(CONFIG, 2),
    "neurons in words": lambda: neurons(model(), "L0N3"),
}


@pytest.mark.parametrize("function", REFUSED)
def test_what_knows_one_mlp_alone_refuses_two(function: str) -> None:
    with pytest.raises(ValueError, match=r"(?i)macaron"):
        REFUSED[function]()
