"""Rank collapse: the exponents of the theory, and blocks with parts off against a composition of their parts."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from interp import Batch, Edit, HookedTransformer
from interp.edits import Add
from interp.lab.depth import rank_collapse, switched_off
from interp.lab.depth.rank_collapse import LINES, composite_norm, relative_residual
from interp.lab.depth.switched_blocks import Switch, pass_through
from interp.model import ModelConfig, NoNorm, NoPosition, Read, Tap, Transformer
from interp.model.attention import Memory
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.loops import over
from tests.tolerances import assert_close, student95

N, D = 12, 16
CROSSED = replace(CONFIGS["gpt2"], cross_attention=True)


def isolated(causal: bool, layers: int, spread: float, heads: int = 2) -> HookedTransformer:
    """Attention layers without norm and position; the embedding of token i is m + spread * noise_i."""
    config = ModelConfig(
        layers, D, heads, N, N, norm=NoNorm(), position=NoPosition(), causal=causal, final_norm=False
    )
    torch.manual_seed(0)
    model = Transformer(config).double().eval().requires_grad_(False)
    g = torch.Generator().manual_seed(1)
    for layer in range(layers):
        for weight in (model.block(layer).attn.qkv.weight, model.block(layer).attn.out.weight):
            weight.copy_(torch.randn(weight.shape, generator=g, dtype=torch.float64) / D**0.5)
    common, noise = (torch.randn(n, D, generator=g, dtype=torch.float64) for n in (1, N))
    model.embed.weight.copy_(common + spread * noise)
    return HookedTransformer(model)


def residuals(model: HookedTransformer, line: str = "SAN") -> np.ndarray:
    return rank_collapse(model, torch.arange(N)[None], lines=[line]).value.sel(line=line).to_numpy()


@pytest.mark.parametrize(("causal", "slope"), [(False, 3.0), (True, 1.0)])
def test_attention_layer_cubes_the_residual_unless_causally_masked(causal: bool, slope: float) -> None:
    both = np.array([residuals(isolated(causal, 1, spread)) for spread in (3e-4, 1e-3, 3e-3)])
    found = np.polyfit(np.log10(both[:, 0]), np.log10(both[:, 1]), 1)[0]
    assert abs(found - slope) < 0.02
    assert both.min() > 1e-13  # far above rounding, or the slope would be that of noise


def test_encoder_without_skips_falls_to_its_floor_and_stays_with_them() -> None:
    model = isolated(False, 6, 0.3)
    found = rank_collapse(model, torch.arange(N)[None])
    assert found.line.values.tolist() == ["SAN", "SAN+skip"]
    san, skip = (found.value.sel(line=line).to_numpy() for line in ("SAN", "SAN+skip"))
    assert san[-1] < found.attrs["floor"] < 1e-14 < san[1]
    assert skip.min() > 0.1 * skip[0]
    assert san[0] == skip[0]


def test_the_composite_norm_and_the_residual_are_those_of_a_slow_loop() -> None:
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    real = torch.tensor([[False, True, True, True, False], [True] * 5])
    for row in range(2):
        kept = x[row][real[row]].numpy()

        def norm(a: np.ndarray) -> float:
            return float(np.sqrt(np.linalg.norm(a, 1) * np.linalg.norm(a, np.inf)))

        expected = norm(kept - kept.mean(0)) / norm(kept)
        assert float(relative_residual(x, real)[row]) == pytest.approx(expected, abs=1e-12)
        assert float(composite_norm(torch.from_numpy(kept))) == pytest.approx(norm(kept))


def read(model: Transformer, x: Tensor, layer: int, site: str, memory: Memory | None) -> Tensor:
    """A site of block `layer` when x enters it (tokens at layer 0)."""
    tap = Tap([Read(f"blocks.{layer}.{site}")])
    model(x, tap, layer, layer + 1, memory=memory)
    return tap.values[tap.reads[0]]


def _instead(old: Tensor, new: Tensor) -> Tensor:
    return new


def slow_block(
    model: Transformer, x: Tensor, layer: int, off: tuple[Switch, ...], memory: Memory | None
) -> Tensor:
    """A block put together from its modules: x enters, parts that are off are left out. Layer 0 gets tokens."""
    block, config = model.block(layer), model.config
    skip, with_mlp = "skip" not in off, "mlp" not in off
    resid = read(model, x, layer, "hook_resid_pre", memory)
    mid = read(model, x, layer, "hook_attn_out", memory)
    if config.parallel:
        mid = mid + skip * resid
        return mid + read(model, x, layer, "hook_mlp_out", memory) if with_mlp else mid
    for sublayer in config.sublayers:
        before = resid
        if sublayer in ("mlp_before_out", "mlp_out"):
            mlp, ln = (block.mlp, block.ln2) if sublayer == "mlp_out" else (block.mlp_before, block.ln0)
            assert mlp is not None
            added = mlp(block.reading(ln)(before), None) / (2 if "mlp_before" in config.mlps else 1)
            norm = block.post_norm(sublayer)
            added = config.residual_scale * (added if norm is None else norm(added))
            resid = added + skip * before if with_mlp else before
        elif sublayer == "cross_attn_out":
            assert memory is not None and block.cross_attn is not None and block.ln_cross is not None
            (heads,) = (block.cross_attn,)
            normed = block.reading(block.ln_cross)(before)
            q = (normed @ heads.q.weight.mT + heads.q.bias).unflatten(-1, (config.n_heads, -1))
            k, v = (memory.states @ heads.kv.weight.mT + heads.kv.bias).chunk(2, -1)
            k, v = (part.unflatten(-1, (config.n_heads, -1)) for part in (k, v))
            weights = (torch.einsum("bqhe,bshe->bhqs", q, k) * config.score_scale(layer)).softmax(-1)
            z = torch.einsum("bhqs,bshe->bqhe", weights, v).flatten(2)
            resid = z @ heads.out.weight.mT + heads.out.bias + skip * before
        elif (
            "mlp_before" in config.mlps
        ):  # attention of what the first MLP left, through the block without that MLP
            silent = Edit(f"blocks.{layer}.hook_mlp_before_out", torch.zeros_like)
            entering = Edit(f"blocks.{layer}.hook_resid_pre", partial(_instead, new=before))
            out = Read(f"blocks.{layer}.hook_attn_out")
            tap = Tap([out], [entering, silent])
            model(x, tap, layer, layer + 1)
            resid = tap.values[out] + skip * before
        else:
            resid = mid + skip * before
        norm = block.sum_norm(sublayer)
        resid = resid if norm is None else norm(resid)
    return resid


@over("line", LINES)
@pytest.mark.parametrize("name", [*CONFIGS, "crossed"])
def test_switched_blocks_are_those_put_together_from_their_parts(name: str, line: str) -> None:
    model = perturbed(CROSSED) if name == "crossed" else build(name)
    off, tokens = LINES[line], some_tokens()
    memory = None
    if name == "crossed":
        states = torch.randn(3, 4, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        memory = Memory(states)
    batch = Batch(tokens, memory=memory)
    start = read(model, tokens, 0, "hook_resid_pre", memory)
    found, last = pass_through(model, batch, range(2), stream=start, off=off, via=torch.clone)
    expected = slow_block(model, tokens, 0, off, memory)
    assert_close(found[0], expected)
    assert_close(found[1], slow_block(model, expected, 1, off, memory))
    assert torch.equal(found[1], last)
    if not off:
        assert_close(last, model(tokens, stop=2, memory=memory))


def test_a_stream_put_in_place_of_the_models_goes_through_the_same_blocks() -> None:
    model, tokens = build("llama-gqa"), some_tokens()
    middle = model(tokens, stop=1)
    _, twice = pass_through(model, Batch(tokens), range(1), stream=middle, off=(), via=torch.clone)
    tap_read = read(model, tokens, 0, "hook_resid_pre", None)
    assert not torch.allclose(twice, middle) and not torch.allclose(twice, tap_read)
    _, moved = pass_through(model, Batch(tokens), range(1, 2), stream=middle, off=(), via=torch.clone)
    assert_close(moved, model(tokens, stop=2))


def test_intervals_are_over_texts() -> None:
    model = HookedTransformer(build("gpt2"))
    rows = some_tokens(rows=4)
    each = np.stack([rank_collapse(model, row[None]).value for row in rows])
    found = rank_collapse(model, rows)
    np.testing.assert_allclose(found.value, each.mean(0), rtol=1e-12)
    half = student95(4) * each.std(0, ddof=1) / 2
    np.testing.assert_allclose(found.high - found.value, half, rtol=1e-9, atol=1e-12)


def test_every_text_counts_against_a_null_of_zero() -> None:
    found = rank_collapse(HookedTransformer(build("gpt2")), some_tokens(rows=4), lines=["SAN"])
    assert (found.n == 4).all() and (found.null == 0).all()


@over("line", LINES)
@pytest.mark.parametrize("name", ["gpt2", "parallel", "post-norm", "gemma2"])
def test_switches_are_edits_of_any_pass(name: str, line: str) -> None:
    """The residual of a line is that of a model edited by its switches."""
    network, tokens = build(name), some_tokens()
    edits = [edit for layer in range(2) for edit in switched_off(network.config, layer, LINES[line])]
    edited = rank_collapse(HookedTransformer(network.edited(edits)), tokens, lines=["transformer"])
    plain = rank_collapse(HookedTransformer(network), tokens, lines=[line])
    np.testing.assert_allclose(edited.value, plain.value.values, rtol=1e-12)


def test_an_edit_holds_where_a_switch_replaces_a_sum() -> None:
    """SAN of a model whose stream between the sublayers is shifted: the shift comes after the skip is taken away."""
    network, tokens = build("gpt2"), some_tokens()
    shift = torch.linspace(-1, 1, network.config.d_model, dtype=torch.float64)
    start = read(network, tokens, 0, "hook_resid_pre", None)
    for site, sublayer in (("resid_mid", "attn_out"), ("attn_out", "attn_out")):
        model = network.edited([Edit(f"L0.{site}", Add(shift))])
        found, _ = pass_through(
            model, Batch(tokens), range(1), stream=start, off=("skip", "mlp"), via=torch.clone
        )
        assert_close(found[0], read(network, tokens, 0, f"hook_{sublayer}", None) + shift)


def test_what_has_no_meaning_is_refused() -> None:
    plain, bare = HookedTransformer(build("gpt2")), HookedTransformer(build("attention-only"))
    with pytest.raises(KeyError, match="unknown line 'SAN-skip'; nearest: SAN"):
        rank_collapse(plain, some_tokens(), lines=["SAN-skip"])
    with pytest.raises(ValueError, match="'transformer' requires MLPs"):
        rank_collapse(bare, some_tokens(), lines=["transformer"])
    with pytest.raises(ValueError, match="distinct lines"):
        rank_collapse(plain, some_tokens(), lines=["SAN", "SAN"])
    with pytest.raises(ValueError, match="rows of at least two are required"):
        rank_collapse(plain, some_tokens(n=1))
    with pytest.raises(ValueError, match="one text per row"):
        rank_collapse(plain, Batch.packed([[1, 2, 3], [4, 5]], 5))
