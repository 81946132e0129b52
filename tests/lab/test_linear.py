"""Linear, lightning and polar attention against loops over the tokens, and their forms against each other."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor, nn
from transformers.models.minimax.configuration_minimax import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from interp.lab import Lightning, Linear, Polar
from interp.lab.lightning import LightningMixer
from interp.lab.linear import Decay, all_sums, causal_sums
from interp.lab.polar import PolarMixer
from interp.model import (
    Edit,
    ModelConfig,
    NoPosition,
    Read,
    RMSNorm,
    Rotary,
    Softmax,
    Tap,
    Transformer,
    sites,
)
from interp.passes.sweep import Sweep
from tests.configs import empty_cache, perturbed, some_tokens
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.passes.test_sweep import DIFFERENCE, asked, cells, loop
from tests.tolerances import assert_close

BASE = replace(MIXERS["linear"], norm=RMSNorm())
FAMILY = [
    name for name, c in MIXERS.items() if any(isinstance(m, Linear | Lightning | Polar) for m in c.mixers)
]
BOTH_WAYS = over("causal", [True, False])
LENGTHS = over("n", [1, 2, 3, 4, 5, 8, 9, 24])


def model_with(mixer: Linear | Lightning | Polar, **changes: object) -> Transformer:
    torch.manual_seed(3)
    return perturbed(replace(BASE, mixer=mixer, **changes), torch.float64, 3)  # type: ignore[arg-type]


def seen_in(model: Transformer, tokens: Tensor, layer: int, *names: str) -> list[Tensor]:
    """These sites of one layer in one pass that is not told to write out its pattern."""
    reads = [Read(f"blocks.{layer}.{name}") for name in names]
    tap = Tap(reads)
    model(tokens, tap)
    return [tap.values[read] for read in reads]


def by_loop(
    q: Tensor, k: Tensor, v: Tensor, weight: Callable[[int, Tensor, Tensor, int], Tensor], causal: bool = True
) -> tuple[Tensor, Tensor]:
    """sum_j w_ij v_j and sum_j w_ij, one query, head and key at a time; w is given head, q_i, k_j and |i - j|."""
    rows, n, heads, _ = q.shape
    group = heads // k.shape[2]
    sums, totals = (
        torch.zeros(rows, n, heads, v.shape[3], dtype=q.dtype),
        torch.zeros(rows, n, heads, 1, dtype=q.dtype),
    )
    for b, i, h in itertools.product(range(rows), range(n), range(heads)):
        for j in range(i + 1 if causal else n):
            w = weight(h, q[b, i, h], k[b, j, h // group], abs(i - j))
            sums[b, i, h] += w * v[b, j, h // group]
            totals[b, i, h] += w
    return sums, totals


def elu_plus_one(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


# --- linear -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@LENGTHS
@BOTH_WAYS
@over("feature", ["elu", "relu"])
def test_linear_attention_is_the_loop(feature: str, causal: bool, n: int) -> None:
    """Katharopoulos et al. 2020, equation 4, in causal models with j <= i."""
    model = model_with(Linear(feature, chunk=4), d_head=10, n_kv_heads=2, causal=causal)  # type: ignore[arg-type]
    q, k, v, z = seen_in(model, some_tokens(2, n), 1, *(f"attn.hook_{x}" for x in "qkvz"))
    phi = torch.relu if feature == "relu" else elu_plus_one
    sums, totals = by_loop(q, k, v, lambda h, a, b, gap: phi(a) @ phi(b), causal)
    assert_close(z, sums / (totals + 1e-6))


def test_features_stand_behind_the_rotation() -> None:
    model = model_with(Linear(chunk=4), position=Rotary())
    q, k, v, z = seen_in(model, some_tokens(), 1, *(f"attn.hook_{x}" for x in ("rot_q", "rot_k", "v", "z")))
    sums, totals = by_loop(q, k, v, lambda h, a, b, gap: elu_plus_one(a) @ elu_plus_one(b))
    assert_close(z, sums / (totals + 1e-6))


@pytest.mark.parametrize("feature", ["elu", "relu"])
def test_weights_are_never_negative_and_rows_sum_to_one(feature: str) -> None:
    model = model_with(Linear(feature))  # type: ignore[arg-type]
    (pattern,) = seen_in(model, some_tokens(), 0, "attn.hook_pattern")
    assert (pattern >= 0).all() and (pattern.triu(1) == 0).all()
    rows = pattern.sum(-1)
    empty = pattern.abs().sum(-1) == 0
    torch.testing.assert_close(rows[~empty], torch.ones_like(rows[~empty]), rtol=1e-3, atol=1e-3)
    assert feature == "relu" or not empty.any()


@pytest.mark.parametrize("observed", [False, True])
def test_a_query_without_a_positive_feature_gets_zero(observed: bool) -> None:
    model, tokens = model_with(Linear("relu", chunk=4)), some_tokens()
    edit = Edit("blocks.0.attn.hook_q", lambda q: -q.abs())
    z = Read("blocks.0.attn.hook_z")
    tap = Tap([z, *[Read("blocks.0.attn.hook_pattern")] * observed], [edit])
    model(tokens, tap)
    assert (tap.values[z] == 0).all()


def test_without_queries_that_choose_linear_attention_is_the_mean() -> None:
    model = model_with(Linear(chunk=4))
    z, v = Read("blocks.0.attn.hook_z"), Read("blocks.0.attn.hook_v")
    tap = Tap([z, v], [Edit("blocks.0.attn.hook_k", torch.ones_like)])
    model(some_tokens(), tap)
    mean = tap.values[v].cumsum(1) / torch.arange(1, 10, dtype=torch.float64)[:, None, None]
    torch.testing.assert_close(tap.values[z], mean, rtol=1e-5, atol=1e-5)  # eps is 1e-6


# --- lightning ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@LENGTHS
@BOTH_WAYS
@over("layer", [0, 1])
@over("decay", [False, True])
def test_lightning_attention_is_the_loop(n: int, causal: bool, layer: int, decay: bool) -> None:
    """TransNormerLLM's equation with MiniMax-01's slopes, gate and norm, written out for one query at a time."""
    model = model_with(Lightning(decay=decay, gate=True, chunk=4), d_head=10, n_kv_heads=2, causal=causal)
    q, k, v, z, x = seen_in(
        model, some_tokens(2, n), layer, *(f"attn.hook_{x}" for x in "qkvz"), "ln1.hook_normalized"
    )
    depth = 1 - layer / (2 - 1 + 1e-5) + 1e-5

    def weight(h: int, a: Tensor, b: Tensor, gap: int) -> Tensor:
        slope = 2 ** (-8 * (h + 1) / 4) * depth
        return F.silu(a) @ F.silu(b) * (math.exp(-slope * gap) if decay else 1.0)

    flat = by_loop(q, k, v, weight, causal)[0].flatten(2)
    mixer = model.block(layer).attn
    assert isinstance(mixer, LightningMixer) and mixer.gate is not None
    gamma = mixer.out_norm.norm.weight
    assert gamma is not None
    normed = flat / (flat.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gamma
    assert_close(z.flatten(2), normed / (1 + (-x @ mixer.gate.weight.T).exp()))


def test_lightning_attention_is_minimax_01s() -> None:
    """Oracle: Hugging Face's module, but for SiLU on the values, which is turned off there."""
    heads, width = 4, 10
    theirs = MiniMaxLightningAttention(
        MiniMaxConfig(
            hidden_size=24, num_attention_heads=heads, head_dim=width, num_hidden_layers=3, block_size=4,
            layer_types=["linear_attention"] * 3,
        ),
        1,
    )  # fmt: skip

    class OnQueriesAndKeys(nn.Module):
        def forward(self, qkv: Tensor) -> Tensor:
            q, k, v = qkv.unflatten(-1, (heads, 3, width)).unbind(-2)
            return torch.stack((F.silu(q), F.silu(k), v), -2).flatten(-3)

    theirs.act_fn = OnQueriesAndKeys()
    config = replace(
        BASE, n_layers=3, d_head=width, mixer=Lightning(gate=True, chunk=4), qkv_bias=False, out_bias=False
    )
    torch.manual_seed(0)
    model = perturbed(config, torch.float32)
    mixer = model.block(1).attn
    assert isinstance(mixer, LightningMixer) and mixer.gate is not None
    joined = mixer.qkv.weight.unflatten(0, (3, heads, width)).transpose(0, 1).flatten(0, 2)
    gamma = mixer.out_norm.norm.weight
    assert gamma is not None
    theirs.load_state_dict(
        {
            "qkv_proj.weight": joined, "out_proj.weight": mixer.out.weight, "norm.weight": gamma,
            "output_gate.weight": mixer.gate.weight,
        },
        strict=False,
    )  # fmt: skip
    x, out = seen_in(model, some_tokens(), 1, "ln1.hook_normalized", "hook_attn_out")
    with torch.no_grad():
        expected = theirs(x, None, None)[0]
    assert_close(out, expected)


def test_the_pattern_is_that_of_the_sums_before_the_norm() -> None:
    model = model_with(Lightning(chunk=4))
    pattern, v, z, scale = seen_in(
        model,
        some_tokens(),
        1,
        *(f"attn.hook_{x}" for x in ("pattern", "v", "z")),
        "attn.out_norm.hook_scale",
    )
    sums = torch.einsum("bhqk,bkhe->bqhe", pattern, v)
    mixer = model.block(1).attn
    assert isinstance(mixer, LightningMixer) and mixer.out_norm.norm.weight is not None
    assert_close(sums / scale * mixer.out_norm.norm.weight.unflatten(0, (4, -1)), z)
    assert scale.shape == (3, 9, 1, 1)


def test_lightning_layers_of_a_rotary_stack_do_not_rotate() -> None:
    minimax = build_mixed("minimax")
    lightning = seen_in(minimax, some_tokens(), 0, "attn.hook_z")[0]
    q, k, v = seen_in(minimax, some_tokens(), 0, *(f"attn.hook_{x}" for x in "qkv"))
    with pytest.raises(KeyError, match=r"no 'blocks\.0\.attn\.hook_rot_q'"):
        Tap([Read("blocks.0.attn.hook_rot_q")]).open(minimax.config, 0, None)
    Tap([Read("blocks.7.attn.hook_rot_q")]).open(minimax.config, 0, None)
    plain = replace(minimax.config, position=NoPosition())
    other = Transformer(plain).double().eval()
    other.load_state_dict(minimax.state_dict(), strict=False)
    assert_close(seen_in(other, some_tokens(), 0, "attn.hook_z")[0], lightning)
    assert q.shape[2] == 2 * k.shape[2] == 2 * v.shape[2]


# --- polar --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@LENGTHS
@BOTH_WAYS
def test_polar_attention_is_the_loop(n: int, causal: bool) -> None:
    """PolaFormer, section 4: two streams with half of the values each, gated; the paper's own is bidirectional."""
    model = model_with(Polar(max_power=3.0, chunk=4), d_head=10, n_kv_heads=2, causal=causal)
    q, k, v, z, x = seen_in(
        model, some_tokens(2, n), 1, *(f"attn.hook_{x}" for x in "qkvz"), "ln1.hook_normalized"
    )
    mixer = model.block(1).attn
    assert isinstance(mixer, PolarMixer)
    power = 1 + 3.0 / (1 + (-mixer.power).exp())

    def f(x: Tensor, h: int) -> Tensor:
        return torch.where(x > 0, x, 0.0) ** power[h // 2]

    def same(h: int, a: Tensor, b: Tensor, gap: int) -> Tensor:
        return f(a, h) @ f(b, h) + f(-a, h) @ f(-b, h)

    def opposite(h: int, a: Tensor, b: Tensor, gap: int) -> Tensor:
        return f(a, h) @ f(-b, h) + f(-a, h) @ f(b, h)

    halves = [
        by_loop(q, k, part, w, causal) for part, w in zip(v.chunk(2, -1), (same, opposite), strict=True)
    ]
    joined = torch.cat([sums / (totals + 1e-6) for sums, totals in halves], -1)
    assert_close(z.flatten(2), joined.flatten(2) * (x @ mixer.gate.weight.T + mixer.gate.bias))


def test_same_minus_opposite_is_the_product_of_query_and_key() -> None:
    """The identity of signs: with powers of 1, q . k = same - opposite."""
    mixer = model_with(Polar(max_power=0.0)).block(0).attn
    assert isinstance(mixer, PolarMixer)
    q, k, v = (torch.randn(2, 5, 4, 6, dtype=torch.float64) for _ in range(3))
    features, keys, _ = mixer._operands(q, k, v, None)
    same, opposite = (features @ keys.mT).chunk(2, 1)
    assert (same >= 0).all() and (opposite >= 0).all()
    assert_close(same - opposite, torch.einsum("bqhe,bkhe->bhqk", q, k))


def test_both_polar_patterns_are_sites_whose_rows_sum_to_one() -> None:
    model = model_with(Polar(chunk=4))
    pattern, v, gate, z = seen_in(
        model, some_tokens(), 1, *(f"attn.hook_{x}" for x in ("polar_pattern", "v", "gate", "z"))
    )
    assert (pattern >= 0).all() and pattern.shape == (3, 2, 4, 9, 9)
    values = v.unflatten(-1, (2, -1))
    assert_close(torch.einsum("bchqk,bkhcf->bqhcf", pattern, values).flatten(-2) * gate, z)
    rows = pattern[:, :, :, 2:].sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows), rtol=1e-2, atol=1e-2)


# --- forms --------------------------------------------------------------------------------------------------------


@given(
    n=st.integers(1, 13),
    chunk=st.integers(1, 15),
    cut=st.integers(0, 13),
    decayed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_chunk_and_every_cut_gives_the_sums_of_the_loop(
    n: int, chunk: int, cut: int, decayed: bool, seed: int
) -> None:
    """Parallel, chunked and recurrent forms, with gaps in the positions as padding leaves them."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 3, n, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    places = torch.randint(0, 2, (2, n), generator=generator).cumsum(1)
    rates = torch.rand(3, generator=generator, dtype=torch.float64)
    expected, states = (
        torch.zeros(2, 3, n, 4, dtype=torch.float64),
        torch.zeros(2, 3, 4, 4, dtype=torch.float64),
    )
    for i in range(n):
        for j in range(i + 1):
            left = (-rates * (places[:, i] - places[:, j])[:, None]).exp() if decayed else torch.ones(2, 3)
            expected[:, :, i] += (left * (q[:, :, i] * k[:, :, j]).sum(-1))[..., None] * v[:, :, j]
            if i == n - 1:
                states += left[..., None, None] * k[:, :, j, :, None] * v[:, :, j, None, :]
    state, found, cut = None, [], min(cut, n)
    for part in (slice(0, cut), slice(cut, n)):
        if part.start == part.stop:
            continue
        before = places[:, part.start - 1 : part.start] if part.start else places[:, :1]
        decay = Decay(rates, places[:, part], before, even=False) if decayed else None
        sums, state = causal_sums(
            q[:, :, part], k[:, :, part], v[:, :, part], chunk=chunk, state=state, decay=decay
        )
        found.append(sums)
    assert state is not None
    assert_close(torch.cat(found, 2), expected)
    assert_close(state, states)


@given(n=st.integers(1, 13), chunk=st.integers(1, 15), decayed=st.booleans(), seed=st.integers(0, 99))
def test_sums_over_all_keys_are_those_of_the_loop(n: int, chunk: int, decayed: bool, seed: int) -> None:
    """Both directions and what they share, with gaps in the positions as padding leaves them."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 3, n, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    places = torch.randint(0, 2, (2, n), generator=generator).cumsum(1)
    rates = torch.rand(3, generator=generator, dtype=torch.float64)
    expected = torch.zeros(2, 3, n, 4, dtype=torch.float64)
    for i, j in itertools.product(range(n), repeat=2):
        left = (-rates * (places[:, i] - places[:, j]).abs()[:, None]).exp() if decayed else torch.ones(2, 3)
        expected[:, :, i] += (left * (q[:, :, i] * k[:, :, j]).sum(-1))[..., None] * v[:, :, j]
    decay = Decay(rates, places, places[:, :1], even=False) if decayed else None
    assert_close(all_sums(q, k, v, chunk=chunk, decay=decay), expected)


@pytest.mark.parametrize("name", FAMILY)
def test_the_chunk_changes_no_number(name: str) -> None:
    model, tokens = build_mixed(name), some_tokens()
    plain = model(tokens)
    for chunk in (1, 2, 5, 64):
        mixers = tuple(m if isinstance(m, Softmax) else replace(m, chunk=chunk) for m in model.config.mixers)  # type: ignore[arg-type]
        other = Transformer(replace(model.config, mixer=mixers)).double().eval()
        other.load_state_dict(model.state_dict(), strict=False)
        assert_close(other(tokens), plain)


@pytest.mark.parametrize("name", FAMILY)
def test_texts_may_be_packed_and_padded_at_once(name: str) -> None:
    model, tokens = build_mixed(name), some_tokens()
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2]).expand(3, -1)
    keep = torch.tensor([[1, 1, 0, 1, 0, 1, 1, 1, 1]], dtype=torch.bool).expand(3, -1)
    packed = model(tokens, documents=documents, keep=keep)
    for text in range(3):
        real = (documents[0] == text) & keep[0]
        assert_close(packed[:, real], model(tokens[:, real]))


@pytest.mark.parametrize("name", [name for name in FAMILY if MIXERS[name].causal])
def test_the_state_is_kept_in_single_precision_at_least(name: str) -> None:
    model = build_mixed(name, torch.bfloat16)
    cache = empty_cache(model, 3)
    model(some_tokens(), cache=cache)
    states = [
        cache.states[layer] for layer, m in enumerate(model.config.mixers) if not isinstance(m, Softmax)
    ]
    assert states and all(state.dtype == torch.float32 for kept in states for state in kept)
    assert all(cache.keys[layer].numel() == 0 for layer in cache.states if isinstance(layer, int))


@pytest.mark.parametrize("name", ["linear-relu", "lightning-gated", "polar-rotary", "sana", "conv-softmax"])
def test_a_sweep_of_what_is_new_gives_the_numbers_of_the_loop(name: str) -> None:
    model, batch = build_mixed(name), asked()
    new = (
        "attn.hook_gate",
        "attn.out_norm.hook_scale",
        "hook_polar_pattern",
        "attn.hook_pattern",
        "mlp.hook_expanded",
    )
    inside = [
        site for site in sites.names(model.config) if site.startswith("blocks.0") and site.endswith(new)
    ]
    variants = [v for site in inside for v in cells(model, batch, site)]
    assert_close(Sweep(model, batch, variants).run(DIFFERENCE).values, loop(model, batch, variants))


# --- refusals -----------------------------------------------------------------------------------------------------

CONTRADICTIONS: dict[str, tuple[dict[str, object], str]] = {
    "a scale that cancels": (
        {"mixer": Linear(), "attn_scale": 0.3},
        "no attn_scale and no scale_by_layer under Linear",
    ),
    "a scale by layer": (
        {"mixer": Polar(), "scale_by_layer": True},
        "no attn_scale and no scale_by_layer under Polar",
    ),
    "rotation that rotates nothing": ({"mixer": Lightning(), "position": Rotary()}, "does not rotate"),
    "halves of an odd head": ({"mixer": Polar(), "d_head": 5}, "an even d_head under Polar"),
    "a chunk of nothing": ({}, "Linear requires chunk >= 1"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_refused(case: str) -> None:
    changes, message = CONTRADICTIONS[case]
    with pytest.raises(ValueError, match=message):
        replace(BASE, **changes) if changes else Linear(chunk=0)  # type: ignore[arg-type]


def test_a_hybrid_may_scale_and_rotate_its_softmax_layers() -> None:
    config: ModelConfig = replace(BASE, mixer=(Lightning(), Softmax()), attn_scale=0.3, position=Rotary())
    assert Transformer(config)(some_tokens()).isfinite().all()
