"""One head in its stages, and neurons inside routes: the pages' numbers are those of the pass, by slow loops."""

import base64
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import interp
from interp.data.batch import Batch
from interp.model.transformer import Transformer
from interp.pages.flow import NEURONS
from interp.pages.reasons import STEPS
from interp.pages.stages import NEVER, HeadStages, every_stage, payload, stage_reads, staged
from tests.configs import build, perturbed, some_tokens
from tests.loops import over
from tests.mixers import MIXERS
from tests.pages.reports import PROMPT, report
from tests.tiny import hooked
from tests.tolerances import assert_close

PLAIN = ["gpt2", "llama-gqa", "mqa", "scale-by-layer", "parallel"]
ADDED = ["bloom", "t5", "gemma2", "window"]
"""Positions add to the scores, a soft cap bends them, a window hides some."""


def stages_of(network: Transformer, tokens: torch.Tensor, layers: Sequence[int]) -> dict[int, HeadStages]:
    return every_stage(
        network, layers, interp.observe(network, Batch(tokens), stage_reads(network, layers)).trace
    )


def ends(name: str, model: interp.HookedTransformer, layer: int) -> tuple[str, str]:
    """Where queries and keys stand as the scores are made of them."""
    rotary = model.cfg.rotary_dim > 0
    return (f"blocks.{layer}.attn.hook_rot_q", f"blocks.{layer}.attn.hook_rot_k") if rotary else (
        f"blocks.{layer}.attn.hook_q", f"blocks.{layer}.attn.hook_k"
    )  # fmt: skip


@pytest.mark.parametrize("name", [*PLAIN, *ADDED])
def test_every_stage_is_what_the_pass_holds(name: str) -> None:
    model, tokens = interp.HookedTransformer(build(name)), some_tokens(1, 7)
    _, cache = model.run_with_cache(tokens)
    found = stages_of(model.transformer, tokens, staged(model.transformer))
    assert sorted(found) == list(range(model.cfg.n_layers))
    for layer, stages in found.items():
        q, k = (cache[site][0] for site in ends(name, model, layer))
        v, z = cache["v", layer][0], cache["z", layer][0]
        scores, pattern = cache["attn_scores", layer][0], cache["pattern", layer][0]
        assert torch.equal(stages.scores, scores) and torch.equal(stages.pattern, pattern)
        group = q.shape[1] // k.shape[1]
        scale = model.cfg.score_scale(layer)
        for head in range(q.shape[1]):
            for i in range(7):
                weighted = [pattern[head, i, j] * (v[j, head // group] @ z[i, head]) for j in range(7)]
                length = math.sqrt(float(z[i, head] @ z[i, head]))
                assert_close(stages.weighted[head, i], torch.stack(weighted) / length)
                assert_close(stages.weighted[head, i].sum(), z[i, head].norm())
                for j in range(7):
                    product = sum(a * b for a, b in zip(q[i, head], k[j, head // group], strict=True))
                    assert_close(stages.products[head, i, j], product)
                    assert_close(stages.scaled[head, i, j], product * scale)
                    if name in PLAIN and j <= i:
                        assert_close(stages.scaled[head, i, j], scores[head, i, j])


@over("name", [name for name, config in MIXERS.items() if config.causal])
def test_stages_end_in_z_under_every_mixer_that_has_them(name: str) -> None:
    model = interp.HookedTransformer(perturbed(MIXERS[name]))
    tokens = some_tokens(1, 7)
    _, cache = model.run_with_cache(tokens)
    layers = staged(model.transformer)
    for layer, stages in stages_of(model.transformer, tokens, layers).items():
        assert_close(stages.weighted.sum(-1), cache["z", layer][0].norm(dim=-1).T)
        assert_close(stages.scores, cache["attn_scores", layer][0])
    if name.startswith("log-n") and layers:  # the factor goes by the number of keys
        seen = stages.scores > -torch.inf
        assert_close(stages.scaled[seen], stages.scores[seen])
    if name in (
        "differential",
        "linear",
        "polar",
        "mamba2",
        "cosine",
        "synthesizer",
    ):  # no one product of q and k
        assert layers == []


@pytest.mark.parametrize("name", [*PLAIN, *ADDED])
def test_what_the_page_keeps_is_a_whole_number_of_its_unit(name: str) -> None:
    model, tokens = interp.HookedTransformer(build(name)), some_tokens(1, 7)
    trace = interp.observe(model, tokens, stage_reads(model.transformer, [0, 1])).trace
    kept = payload(model.transformer, ["L0H1", "L1H0"], trace)
    stages = every_stage(model.transformer, [0, 1], trace)
    assert set(kept) == {"L0H1", "L1H0"}
    for part, layer, head in (("L0H1", 0, 1), ("L1H0", 1, 0)):
        one, says = stages[layer], kept[part]
        assert ("scores" in says) == (name in ADDED)
        for kind, values in (("products", one.products), ("weighted", one.weighted), ("scores", one.scores)):
            if kind not in says:
                continue
            cells = np.frombuffer(base64.b64decode(says[kind]["cells"]), "<i2").reshape(7, 7)
            hidden = (values[head] == -torch.inf).numpy()
            assert ((cells == NEVER) == hidden).all()
            unit = says[kind]["unit"]
            np.testing.assert_allclose(
                cells[~hidden] * unit, values[head].numpy()[~hidden], rtol=0, atol=0.51 * unit
            )
            assert np.abs(cells[~hidden]).max() == STEPS


def slow_shares(model: interp.HookedTransformer, layer: int, pos: int, mlp: float) -> np.ndarray:
    """The MLP's share split among its neurons, one neuron at a time, in float64."""
    _, cache = model.run_with_cache(PROMPT)
    y = cache["resid_post", layer][0, pos].double()
    post = cache["post", layer][0, pos].double()
    out, bias = model.transformer.block(layer).mlp.out.weight.double().T, None
    module = model.transformer.block(layer).mlp.out.bias
    bias = torch.zeros_like(y) if module is None else module.double()
    writes = [*(post[n] * out[n] for n in range(len(post))), bias]
    closer = [max(0.0, float(y.abs().sum() - (y - z).abs().sum())) for z in writes]
    return mlp * np.array(closer[:-1]) / sum(closer)


@pytest.mark.parametrize("name", ["gpt2", "parallel", "llama-gqa"])
def test_neurons_take_the_mlps_share_by_the_measure_of_the_sum(name: str) -> None:
    model, tables = hooked(name), report(name).tables
    flows, found = tables["flow_routes"], tables["flow_neurons"]
    mlps = flows[flows.kind == "mlp"].set_index(["layer", "query"]).value
    checked = 0
    for (layer, pos), rows in found.groupby(["layer", "query"]):
        expected = slow_shares(model, layer, pos, mlps[layer, pos])
        assert len(rows) <= NEURONS and rows["rank"].tolist() == list(range(len(rows)))
        np.testing.assert_allclose(rows.value, expected[rows.neuron], rtol=2e-4, atol=1e-9)
        np.testing.assert_allclose(rows.value, np.sort(expected)[::-1][: len(rows)], rtol=2e-4, atol=1e-9)
        assert (rows.part == [f"L{layer}N{n}" for n in rows.neuron]).all()
        checked += len(rows)
    assert checked > 10


def test_a_mixture_of_experts_says_why_no_neurons_stand_in_its_routes() -> None:
    one = report("granite-moe")
    assert "flow_neurons" not in one.tables
    assert "no neurons that write on their own" in one.absent["flow_neurons"]
