"""Mixers through causal traces, circuits and pages: the numbers of slow loops, or a refusal that says why."""

import re
from dataclasses import replace

import pytest
import torch
from markupsafe import escape

import interp
from interp import HookedTransformer
from interp.attention.shares import with_pattern
from interp.causal import CausalTrace
from interp.causal.graph import EdgeGraph, reads_by_qkv
from interp.circuits import Circuit, evaluate_circuit, interchange
from interp.families.tokenizer import HuggingFaceTokenizer
from interp.lab import AdaptiveSoftmax
from interp.model import ModelConfig
from interp.model.tap import Read
from interp.pages import About, Report, ReportQuestion, page, report_of
from interp.passes.observe import observe
from tests.causal.slow_edges import writes
from tests.causal.test_causal_trace import ALONE, LENGTHS, SAMPLES, Asked, slow
from tests.circuits.test_interchange import CLEAN, CORRUPT, METRIC, run, slowly, some_circuits
from tests.configs import CONFIGS, perturbed, some_tokens
from tests.mixers import MIXERS, build_mixed
from tests.tiny import backend, gpt2_tokenizer
from tests.tolerances import assert_close

PROMPT = "When Mary and John went to the shop, John gave a drink to"
CORRUPTED = PROMPT.replace("John gave", "Mary gave")


@pytest.mark.parametrize("name", ["differential", "minimax", "memory-gate"])
def test_a_causal_trace_is_the_slow_loop(name: str) -> None:
    model = build_mixed(name)
    if model.config.n_layers > 2:
        model = perturbed(replace(model.config, n_layers=2, mixer=model.config.mixers[-2:]))
    rows = [row[:n] for row, n in zip(some_tokens(3, 8, seed=4), LENGTHS, strict=True)]
    answers = [int(model(row[None])[0, -1].argmax()) for row in rows]
    asked = Asked(HookedTransformer(model), rows, answers)
    protocol = CausalTrace("the subject", kind="attn", window=1, samples=SAMPLES, severed="attn")
    found = asked.trace(kind="attn", window=1, severed="attn")
    for i in (1, 2):
        effects, _, _ = slow(asked, i, protocol, ALONE)
        assert_close(torch.from_numpy(found.each.values[i, :, : LENGTHS[i]]), effects.mean(0))
    assert float(abs(found.each).max()) > 1e-4


@pytest.mark.parametrize("name", ["differential", "lightning", "refined-value"])
def test_a_circuit_is_the_pass_written_out_node_by_node(name: str) -> None:
    """With heads that norm their z (differential, lightning) too: what they say is what they add."""
    model = build_mixed(name)
    graph = EdgeGraph.of(model.config)
    masks = some_circuits(graph, 1)
    assert_close(run(model, masks)[0], slowly(model, masks[0], writes(model, CORRUPT)), torch.float64)
    everything = Circuit(graph, dict.fromkeys(graph.names(), 1.0))
    result = evaluate_circuit(model, CLEAN, CORRUPT, everything, metric=METRIC, subsets=2, draws=1)
    assert float(result.value.sel(score="faithfulness")[0]) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("name", ["polar", "memory-gate", "synthesizer", "lightning-gated"])
def test_circuits_of_heads_that_read_in_other_ways_are_refused(name: str) -> None:
    assert not reads_by_qkv(MIXERS[name])
    whole = torch.ones(1, 1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="otherwise than as queries, keys and values"):
        interchange(HookedTransformer(build_mixed(name)), CLEAN, CORRUPT, whole, metric=METRIC)


def spoken(config: ModelConfig) -> HookedTransformer:
    """A model of this shape with a tokenizer, and room for the prompt."""
    config = replace(config, d_vocab=backend().get_vocab_size(), n_ctx=32)
    torch.manual_seed(0)
    return HookedTransformer(perturbed(config), HuggingFaceTokenizer(gpt2_tokenizer()), name="tiny")


def reported(model: HookedTransformer, corrupt: str | None = None) -> Report:
    return report_of(model, ReportQuestion(PROMPT, corrupt=corrupt), About("tiny"))


@pytest.mark.parametrize("name", ["linear-softmax", "synthesizer"])
def test_a_page_shows_what_such_heads_have(name: str) -> None:
    model = spoken(MIXERS[name])
    found = reported(model)
    assert found.contrast is not None
    total = float(found.tables["attribution"].value.sum())
    assert total == pytest.approx(found.contrast.total, rel=1e-9)
    bilinear = all(mixer.traits.bilinear for mixer in MIXERS[name].mixers)
    assert set(found.tables["composition"].kind) == ({"Q", "K", "V"} if bilinear else {"V"})
    assert ("head_tokens" in found.tables) == bilinear
    assert ("head_tokens" in found.absent) != bilinear
    assert ("no QK circuit: positions are mixed by" in page(found)) != bilinear
    circuits = found.tables["circuits"]
    matching = circuits[circuits.score == "matching"].set_index("layer").value
    for layer in range(2):
        known = layer > 0 and MIXERS[name].mixers[layer].traits.bilinear
        assert bool(matching[layer].notna().all()) == known
    assert "V-composition" in page(found)


@pytest.mark.slow
def test_a_page_of_macaron_blocks_has_a_column_for_either_mlp() -> None:
    model = spoken(CONFIGS["macaron"])
    found = reported(model, CORRUPTED)
    table = found.tables["attribution"]
    assert found.contrast is not None
    assert float(table.value.sum()) == pytest.approx(found.contrast.total, rel=1e-9)
    assert table.kind.value_counts()[["mlp", "mlp_before"]].tolist() == [2, 2]
    expected = interp.attribute(
        model, PROMPT, *model.transformer(model.to_tokens(PROMPT))[0, -1].topk(2).indices
    )
    first = expected.value.sel(part="L1.mlp_before").item()
    assert float(table.set_index("part").value["L1.mlp_before"]) == pytest.approx(first)
    heads = re.findall(r"<th scope=\"col\">(.*?)</th>", page(found))
    assert ["first MLP", "MLP"] in [heads[i : i + 2] for i in range(len(heads))]
    assert {"mlp_before_out", "mlp_out"} <= set(found.tables["patching"].site)
    assert found.corrupted is not None and "edges" not in found.absent
    edges = set(found.tables["edges"].sender) | set(found.tables["edges"].receiver)
    assert "L0.mlp_before" in edges and "L0.mlp_before" in page(found)


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("latent", {"circuits", "composition", "head_tokens", "edges", "faithfulness"}),
        ("polar", {"attention", "heads", "attribution_sources", "value_norms", "flow_routes"}),
        ("memory-gate", {"attention", "heads", "attribution_sources", "value_norms", "flow_routes"}),
        ("gated-delta-pairs", {"value_norms", "circuits", "flow_routes"}),
    ],
)
def test_a_page_says_of_each_table_that_such_heads_lack_why(name: str, lost: set[str]) -> None:
    model = spoken(MIXERS[name])
    found, patterned = reported(model), with_pattern(MIXERS[name])
    assert found.contrast is not None and lost <= set(found.absent)
    assert not set(found.absent) & set(found.tables)
    assert float(found.tables["attribution"].value.sum()) == pytest.approx(found.contrast.total, rel=1e-9)
    shown = page(found)
    for table in lost - {"value_norms", "edges", "faithfulness"}:
        assert escape(found.absent[table]) in shown
    if patterned:
        pattern = observe(
            model, model.to_batch(PROMPT), [Read(f"blocks.{i}.attn.hook_pattern") for i in patterned]
        )
        for layer, rows in found.tables["attention"].groupby("layer"):
            own = pattern.trace[f"blocks.{layer}.attn.hook_pattern"][0]
            n = own.shape[-1]
            expected = own[:, *torch.tril_indices(n, n)].flatten()
            torch.testing.assert_close(
                torch.tensor(rows.value.to_numpy()), expected.to(torch.float32).double(), check_dtype=False
            )
        scores = found.tables["heads"].query("score == 'induction'").set_index("layer").value
        assert scores.isna().groupby("layer").all().tolist() == [
            i not in patterned for i in range(model.cfg.n_layers)
        ]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MIXERS["lightning"], "may be negative or sum to anything"),
        (MIXERS["pool"], "may be negative or sum to anything"),
        (replace(CONFIGS["gpt2"], output=AdaptiveSoftmax((10, 20))), "has the output layer AdaptiveSoftmax"),
    ],
)
def test_a_page_that_could_not_be_true_is_refused(config: ModelConfig, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        reported(spoken(config))
