"""Directions in the vocabulary against dense products, what a pass makes of them, and weights of known spectrum."""

import functools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

from interp import Batch, HookedTransformer, Read, observe
from interp.model import MLP, NoNorm, Transformer
from interp.weights import (
    HeadCircuits,
    directions,
    neurons,
    singular_directions,
)
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

WITH_NEURONS = [
    n for n, c in CONFIGS.items() if isinstance(c.mlp, MLP) and not c.mlm_head and "mlp_before" not in c.mlps
]
GATED = ("llama-gqa", "tied", "gemma2", "olmo2")
V = 31


@functools.cache
def model(name: str) -> HookedTransformer:
    return HookedTransformer(build(name))


def of_layer(layer: int, chosen: Iterable[int]) -> list[str]:
    """The names of neurons of one layer."""
    return [f"L{layer}N{i}" for i in chosen]


def whole(found: xr.Dataset) -> Tensor:
    """Every token's number in the order of the vocabulary, from a list as long as the vocabulary."""
    token, score = (torch.from_numpy(found[x].sel(end="top").values) for x in ("token_id", "value"))
    return torch.zeros_like(score).scatter(-1, token, score)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


@pytest.mark.parametrize(
    "name", ["gpt2", "gptj", "granite-dense", "rms-plain", "llama-gqa", "gemma2", "olmo2"]
)
def test_neurons_write_is_what_one_more_unit_adds_to_the_logits(name: str) -> None:
    """Autograd through the model's own MLP and final norm, whose scales are held at 1."""
    subject = model("llama-gqa" if name == "granite-dense" else name)
    if name == "granite-dense":
        config = replace(CONFIGS["llama-gqa"], residual_scale=0.3, logit_scale=0.6)
        subject = HookedTransformer(perturbed(config))
    network, layer, chosen = subject.transformer, 1, [2, 11]
    block, d = network.block(layer), subject.cfg.d_model
    found = whole(neurons(subject, of_layer(layer, chosen), top=V).sel(matrix="W_out"))

    def added(activation: Tensor) -> Tensor:
        assert block.mlp is not None
        out = block.mlp.out(activation)
        out = out if block.ln2_post is None else block.ln2_post.linear(out, torch.ones(1).to(out))
        stream = network.ln_final.linear(out * subject.cfg.residual_scale, torch.ones(1).to(out))
        assert network.unembed is not None
        return network.unembed(stream) * subject.cfg.logit_scale

    width = subject.weights.layer(layer).W_out.shape[0]  # type: ignore[union-attr]
    jacobian = torch.autograd.functional.jacobian(added, torch.zeros(width).double())
    assert jacobian.shape == (V, width) and d == 24
    assert_close(found, centred(jacobian.T[chosen]))


@over("name", WITH_NEURONS)
def test_what_a_neuron_reads_is_what_each_embedding_puts_into_it(name: str) -> None:
    """The neuron's own pre-activation, as a function of what stands on the stream at norm scale 1."""
    subject, layer = model(name), 0
    network, config = subject.transformer, subject.cfg
    block = network.block(layer)
    norm = block.reading(block.ln1 if config.shared_norm else block.ln2)
    ids = torch.arange(V)[:, None]
    bare = network.embed(ids)[:, 0] * config.embed_scale
    if network.ln_embed is not None:
        bare = network.ln_embed(bare)
    assert block.mlp is not None
    into = block.mlp.into  # type: ignore[union-attr]
    pre = into(norm.frozen(bare, torch.ones(1).to(bare)))
    pre = pre if into.bias is None else pre - into.bias
    gated = config.mlp.gated  # type: ignore[union-attr]
    parts = dict(zip(("W_gate", "W_in"), pre.chunk(2, -1), strict=True)) if gated else {"W_in": pre}
    result = neurons(subject, of_layer(layer, [0, 5, 7]), top=V)
    assert list(result.matrix.values) == [*parts, "W_out"]
    assert result.part.values.tolist() == ["L0N0", "L0N5", "L0N7"]
    for part, values in parts.items():
        assert_close(whole(result.sel(matrix=part)), values[:, [0, 5, 7]].T)


def test_the_neurons_writes_add_up_to_what_the_mlp_adds_to_the_logits() -> None:
    """sum_u n_u (w_out,u W_U) + b_out W_U = mlp_out W_U (FACTS, section 3), in a model without a final norm."""
    config = replace(CONFIGS["gpt2"], final_norm=False)
    subject = HookedTransformer(perturbed(config))
    reads = [Read("blocks.1.mlp.hook_post"), Read("blocks.1.hook_mlp_out")]
    post, out = (observe(subject.transformer, Batch(some_tokens()), reads).trace[r] for r in reads)
    found = whole(neurons(subject, of_layer(1, range(40)), top=V).sel(matrix="W_out"))
    w = subject.weights
    assert_close(post @ found + centred(w.b_out[1] @ w.W_U), centred(out @ w.W_U))


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "olmo2", "attention-only", "granite-moe"])
def test_singular_directions_rebuild_the_full_ov_circuit(name: str) -> None:
    """sum_i s_i (W_E u_i)(v_i W_U)^T = the folded full OV circuit, centred over the outputs."""
    k = min(CONFIGS[name].head_width, 24)
    result = singular_directions(model(name), "OV", "L1H3", count=k, top=V)
    s = torch.from_numpy(result.singular_value.values)
    read, written = (whole(result.sel(side=side)) for side in ("read", "written"))
    expected = HeadCircuits(build(name), folded=True).full_ov("L1H3").AB
    assert_close(torch.einsum("n,ns,no->so", s, read, written), centred(expected))
    assert bool((s.diff() <= 0).all())


@pytest.mark.parametrize(
    ("name", "offset"),
    [("gpt2", None), ("gemma2", 3), ("llama-gqa", 0), ("mqa", None), ("attention-only", None)],
)
def test_singular_directions_rebuild_the_full_qk_circuit(name: str, offset: int | None) -> None:
    """sum_i s_i (W_E u_i)(W_E v_i)^T = the folded full QK circuit, at an offset under rotary positions."""
    k = min(CONFIGS[name].head_width, 24)
    result = singular_directions(model(name), "QK", "L1H3", offset=offset, count=k, top=V)
    s = torch.from_numpy(result.singular_value.values)
    query, key = (whole(result.sel(side=side)) for side in ("query", "key"))
    expected = HeadCircuits(build(name), folded=True).full_qk("L1H3", offset=offset).AB
    assert_close(torch.einsum("n,nq,nk->qk", s, query, key), expected)


def test_an_offset_turns_the_directions() -> None:
    near, far = (singular_directions(model("llama-gqa"), "QK", "L1H3", offset=n) for n in (None, 5))
    at_zero = singular_directions(model("llama-gqa"), "QK", "L1H3", offset=0)
    np.testing.assert_array_equal(near.value, at_zero.value)
    assert not np.allclose(near.singular_value, far.singular_value)


@pytest.mark.parametrize("name", ["gpt2", "gptj", "rms-plain", "llama-gqa", "gemma2", "tied"])
def test_what_a_vector_writes_is_its_effect_on_the_logits_at_frozen_norm(name: str) -> None:
    """Autograd along each vector through the model's own final norm, held at scale 1, and unembedding."""
    subject = model(name)
    network, d = subject.transformer, subject.cfg.d_model
    assert network.unembed is not None
    vectors = torch.randn(3, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def logits(stream: Tensor) -> Tensor:
        normed = network.ln_final.linear(stream, torch.ones(1).to(stream))
        return network.unembed(normed) * subject.cfg.logit_scale  # type: ignore[misc]

    zero = torch.zeros(d).double()
    along = torch.stack([torch.autograd.functional.jvp(logits, zero, v)[1] for v in vectors])
    found = directions(subject, vectors, top=V)
    assert_close(whole(found), centred(along))
    assert_close(torch.from_numpy(found.norm.values), vectors.square().sum(-1).sqrt())
    one = directions(subject, vectors[1], top=V)
    assert_close(whole(one), whole(found)[1:2])


def test_biases_and_neurons_rows_are_read_as_the_neurons_are() -> None:
    """A row of W_out as a vector is what `neurons` says of that neuron, where no norm stands behind the MLP."""
    subject = model("gpt2")
    w = subject.weights.layer(1)
    assert w.W_out is not None and w.b_out is not None
    rows = directions(subject, w.W_out[[2, 11]], top=4)
    expected = neurons(subject, ["L1N2", "L1N11"], top=4).sel(matrix="W_out")
    for name in ("token", "token_id"):
        np.testing.assert_array_equal(rows[name].values, expected[name].values)
    np.testing.assert_allclose(rows.value, expected.value)
    bias = whole(directions(subject, w.b_out, top=V))[0]
    gamma = subject.transformer.ln_final.weight
    assert gamma is not None
    by_hand = ((w.b_out - w.b_out.mean()) * gamma) @ subject.weights.W_U
    assert_close(bias, centred(by_hand))


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "olmo2"])
def test_a_vector_that_is_read_scores_what_each_token_puts_on_the_stream(name: str) -> None:
    subject = model(name)
    vectors = torch.randn(
        2, subject.cfg.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    found = whole(directions(subject, vectors, side="read", top=V))
    for token in range(0, V, 5):
        embedded = observe(subject.transformer, Batch(torch.tensor([[token]])), [Read("hook_embed")])
        stream = embedded.trace[Read("hook_embed")][0, 0]
        assert_close(found[:, token], torch.stack([(stream * vector).sum() for vector in vectors]))


@over("matrix", ["W_in", "W_gate", "W_out"])
@pytest.mark.parametrize("name", GATED)
def test_singular_directions_of_mlp_matrices_have_the_gram_of_all_neurons(name: str, matrix: str) -> None:
    """M = U S V^T: the tokens' scores of the directions, weighted by s^2, are those of the neurons' own rows."""
    subject = model(name)
    result = singular_directions(subject, matrix, "L1.mlp", count=24, top=V)  # type: ignore[arg-type]
    assert list(result.side.values) == ["written" if matrix == "W_out" else "read"]
    scores, s = whole(result.isel(side=0)), torch.from_numpy(result.singular_value.values)
    count = subject.weights.layer(1).W_out.shape[0]  # type: ignore[union-attr]
    rows = whole(neurons(subject, of_layer(1, range(count)), top=V).sel(matrix=matrix))
    assert_close((scores * s[:, None] ** 2).T @ scores, rows.T @ rows)


@functools.cache
def planted() -> Transformer:
    """Identity embedding and unembedding, OV of head 0 = 3 |2><5| - 2 |7><1| (source, output)."""
    config = replace(CONFIGS["attention-only"], d_model=31, d_head=2, n_kv_heads=None, norm=NoNorm())
    network = Transformer(config).double().requires_grad_(False)
    network.embed.weight.copy_(torch.eye(31))
    assert network.unembed is not None
    network.unembed.weight.copy_(torch.eye(31))
    attn = network.block(1).attn
    value, out = torch.zeros(2, 31).double(), torch.zeros(31, 2).double()
    value[0, 2], value[1, 7] = 3, -2
    attn.part("v")[0][0].copy_(value)
    out[5, 0] = out[1, 1] = 1
    attn.out.weight[:, :2].copy_(out)
    return network


def test_planted_directions_are_found_with_their_signs() -> None:
    result = singular_directions(HookedTransformer(planted()), "OV", "L1H0", count=2, top=1)
    assert result.singular_value.values.tolist() == pytest.approx([3, 2])
    assert result.token_id.sel(side="written", end="top").values.ravel().tolist() == [5, 1]
    assert result.token_id[0].sel(side="read", end="top").item() == 2
    assert result.token_id[1].sel(side="read", end="bottom").item() == 7, "token 7 is written against token 1"
    assert result.token.sel(side="written", end="top").values.ravel().tolist() == ["<5>", "<1>"]


@pytest.mark.parametrize("name", ["attention-only", "llama-gqa", "mqa"])
def test_ov_directions_do_not_depend_on_how_the_product_is_split(name: str) -> None:
    """W_V -> W_V M, W_O -> M^-1 W_O for a random M, one for every key/value head."""
    before = singular_directions(model(name), "OV", "L1H1", count=4, top=V)
    other = perturbed(CONFIGS[name])
    other.load_state_dict(build(name).state_dict())
    mixing = torch.randn(CONFIGS[name].head_width, CONFIGS[name].head_width, dtype=torch.float64)
    w = HookedTransformer(other).weights
    group = int(w.kv_head()[1])
    value, out = other.block(1).attn.part("v")[0], other.block(1).attn.out.weight
    e = CONFIGS[name].head_width
    value[group] = mixing.T @ value[group]
    out[:, e : 2 * e] = out[:, e : 2 * e] @ torch.linalg.inv(mixing).T
    after = singular_directions(HookedTransformer(other), "OV", "L1H1", count=4, top=V)
    assert not torch.allclose(other.block(1).attn.out.weight, build(name).block(1).attn.out.weight)
    np.testing.assert_allclose(after.singular_value, before.singular_value, atol=1e-9)
    assert_close(whole(after), whole(before))


def test_the_sign_rule_and_both_ends_hold() -> None:
    result = singular_directions(model("gpt2"), "OV", "L0H2", count=6, top=V)
    written = result.value.sel(side="written")
    assert bool((written.sel(end="top", rank=0) >= -written.sel(end="bottom", rank=0)).all())
    np.testing.assert_array_equal(
        result.token_id.sel(end="top").values, result.token_id.sel(end="bottom").values[..., ::-1]
    )
    assert bool((np.diff(result.value.sel(end="top").values) <= 0).all())
    short = singular_directions(model("gpt2"), "OV", "L0H2", count=6, top=4)
    xr.testing.assert_identical(short, result.sel(rank=slice(0, 3)))


def test_half_precision_weights_are_read_in_single_precision() -> None:
    narrow = HookedTransformer(build("llama-gqa", torch.bfloat16))
    exact = HookedTransformer(Transformer(CONFIGS["llama-gqa"]).double())
    exact.transformer.load_state_dict({k: v.double() for k, v in narrow.transformer.state_dict().items()})
    for ask in (
        lambda m: neurons(m, "L1N3", top=V).isel(part=0),
        lambda m: singular_directions(m, "W_in", "L1.mlp", count=1, top=V),
        lambda m: directions(m, m.weights.layer(1).W_out[3], top=V),
    ):
        assert ask(narrow).value.dtype == np.float32
        assert_close(whole(ask(narrow)).double(), whole(ask(exact)), torch.bfloat16)


def test_what_has_no_meaning_is_refused_by_name() -> None:
    gpt2 = model("gpt2")
    with pytest.raises(ValueError, match=r"a head is required for OV, such as L1H2, got L0.attn"):
        singular_directions(gpt2, "OV", "L0.attn")
    with pytest.raises(ValueError, match=r"a head is required for QK, such as L1H2, got L0.mlp"):
        singular_directions(gpt2, "QK", "L0.mlp")
    with pytest.raises(ValueError, match="an offset requires QK, got OV"):
        singular_directions(gpt2, "OV", "L0H0", offset=1)
    with pytest.raises(ValueError, match="an offset requires rotary positions"):
        singular_directions(gpt2, "QK", "L0H0", offset=1)
    width = torch.zeros(24)
    for bad in (torch.zeros(23), torch.zeros(1, 1, 24), torch.zeros(0, 24), width.long(), width + torch.nan):
        with pytest.raises(
            ValueError, match=r"finite vectors of the stream, \[24\] or \[direction, 24\], are req"
        ):
            directions(gpt2, bad)
    with pytest.raises(ValueError, match=r"an MLP is required for W_in, such as L1.mlp, got L0H1"):
        singular_directions(gpt2, "W_in", "L0H1")
    with pytest.raises(
        ValueError, match="matrix must be OV, QK or, in this model, W_in, W_out, got 'W_gate'"
    ):
        singular_directions(gpt2, "W_gate", "L0.mlp")
    with pytest.raises(ValueError, match="1 to 6 singular directions, got count=7"):
        singular_directions(gpt2, "OV", "L0H0", count=7)
    with pytest.raises(ValueError, match=r"top must be in \[1, 31\], got 32"):
        neurons(gpt2, "L0N1", top=32)
    with pytest.raises(IndexError, match="L0H4: the index of a head is 0 to 3 in this model"):
        singular_directions(gpt2, "OV", "L0H4")
    with pytest.raises(IndexError, match="L2N0: layers are 0 to 1 in this model"):
        neurons(gpt2, "L2N0")
    with pytest.raises(IndexError, match="L0N40: the index of a neuron is 0 to 39 in this model"):
        neurons(gpt2, ["L0N3", "L0N40"])
    with pytest.raises(ValueError, match="a neuron, such as L0N17, is required, or several, got none"):
        neurons(gpt2, [])
    with pytest.raises(ValueError, match="a neuron, such as L0N17, is required, or several, got L0H1"):
        neurons(gpt2, ["L0N3", "L0H1"])
    for name, kind in {"attention-only": "attention-only", "gpt-oss": "a mixture of experts"}.items():
        with pytest.raises(ValueError, match=f"plain or gated MLP is required, this model is {kind}"):
            neurons(model(name), "L0N0")
        with pytest.raises(ValueError, match=f"this model is {kind}"):
            singular_directions(model(name), "W_out", "L0.mlp")


def test_neurons_of_several_layers_are_those_of_each_layer() -> None:
    subject = model("llama-gqa")
    names = ["L1N3", "L0N7", "L1N0"]
    found = neurons(subject, names, top=4)
    for name in names:
        xr.testing.assert_allclose(found.sel(part=[name]), neurons(subject, name, top=4), rtol=1e-12)
