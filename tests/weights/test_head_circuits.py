"""Circuits against what heads do: the forms, applied to a recorded stream, give the recorded scores and outputs."""

import copy
import functools
import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from interp import HookedTransformer
from interp.data.batch import Batch
from interp.model import Edit, Read, Rotary, Tap, sites
from interp.model.edits import Zero
from interp.model.parts import Part
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.observe import observe
from interp.weights import HeadCircuits
from tests.configs import CONFIGS, N_CTX, build, perturbed, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

LAYER = 1
ANGLE = 2e-6
ADDED = ("bloom", "t5")
"""Models whose scores have a part that depends on the distance alone."""


@functools.cache
def recorded(name: str) -> dict[str, Tensor]:
    reads = [Read(site) for site in sites.names(CONFIGS[name])]
    return {r.site: v for r, v in observe(build(name), Batch(some_tokens()), reads).trace.items()}


def with_one(x: Tensor) -> Tensor:
    return torch.cat((x, torch.ones_like(x[..., :1])), -1)


def stream(name: str, *, folded: bool) -> Tensor:
    """What the forms are applied to: what attention read behind its norm, or, folded, the stream over its scale."""
    seen, prefix = recorded(name), f"blocks.{LAYER}."
    raw = seen[f"{prefix}{CONFIGS[name].block.attention_reads}"]
    block = build(name).block(LAYER)
    norm = block.reading(block.ln1)
    return raw / norm.scale(raw) if folded else norm(raw)


def head_scale(name: str, part: str) -> Tensor:
    """What the query or key norm divided by, `[b p h 1]`."""
    found = recorded(name).get(f"blocks.{LAYER}.attn.{part}_norm.hook_scale", torch.ones(3, 9, 1, 1).double())
    if part == "k" and found.shape[2] > 1:
        found = found[:, :, Weights(build(name)).kv_head()]
    return found


@pytest.mark.parametrize("name", CONFIGS)
@over("folded", lambda name: [True] if CONFIGS[name].qk_norm else [False, True])  # a norm stands between
def test_qk_gives_the_recorded_scores_pair_by_pair(name: str, folded: bool) -> None:
    config, rotary = CONFIGS[name], isinstance(CONFIGS[name].position, Rotary)
    circuits = HeadCircuits(build(name), folded=folded, biases=True, scaled=True)
    x = with_one(stream(name, folded=folded))
    scores = recorded(name)[f"blocks.{LAYER}.attn.hook_attn_scores"]
    for query, key in [(8, 8), (8, 5), (4, 0), (2, 0), (7, 6)]:
        seen = scores[:, :, query, key]
        if not bool(seen.isfinite().all()):
            assert config.is_local(LAYER) and query - key >= config.window
            continue
        qk = circuits.qk(f"L{LAYER}.attn", offset=query - key if rotary else None)
        found = torch.einsum("bd,hde,hef,bf->bh", x[:, query], qk.A, qk.B, x[:, key])
        found = found / (head_scale(name, "q")[:, query, :, 0] * head_scale(name, "k")[:, key, :, 0])
        if config.attn_softcap is not None:
            found = config.attn_softcap * (found / config.attn_softcap).tanh()
        if name in ADDED:
            bias = build(name).score_bias(torch.arange(9)[None], torch.arange(9)[None], torch.float64)
            found = found + bias[:, :, query, key]
        if (
            rotary and key
        ):  # angles are float32 in every model: those of two positions differ by that of the offset
            torch.testing.assert_close(found, seen, rtol=ANGLE, atol=ANGLE)
        else:
            assert_close(found, seen)


@over("folded", [False, True])
@over("name", CONFIGS)
def test_ov_behind_the_recorded_pattern_gives_attentions_output(name: str, folded: bool) -> None:
    seen, prefix = recorded(name), f"blocks.{LAYER}."
    circuits, block = HeadCircuits(build(name), folded=folded, biases=True), build(name).block(LAYER)
    ov = circuits.ov(f"L{LAYER}.attn")
    moved = torch.einsum(
        "bhqk,bkd,hde,hef->bqf",
        seen[f"{prefix}attn.hook_pattern"],
        with_one(stream(name, folded=folded)),
        ov.A,
        ov.B,
    )
    bias = torch.zeros(24).double() if block.attn.out.bias is None else block.attn.out.bias
    post = block.post_norm("attn_out")
    if folded and post is not None:
        z = seen[f"{prefix}attn.hook_z"]
        moved = moved / post.scale(block.attn.out(z.flatten(2)))
        bias = post.frozen(bias.expand_as(moved), post.scale(block.attn.out(z.flatten(2))))
        bias = bias if post.bias is None else bias + post.bias
    whole = moved + (bias * CONFIGS[name].residual_scale if folded else bias)
    expected = seen[f"{prefix}hook_attn_out"]
    if not folded:
        expected = block.attn.out(seen[f"{prefix}attn.hook_z"].flatten(2))
    assert_close(whole, expected)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma3"])
def test_heads_and_layers_are_selections_of_all(name: str) -> None:
    circuits = HeadCircuits(build(name), folded=True)
    for make in (circuits.ov, circuits.qk):
        every = make()
        assert every.shape == (2, 4, 24, 24)
        assert_close(make("L1H2").AB, every.AB[1, 2])
        assert_close(make("L1.attn").AB, every.AB[1])
        for same in ("a1.h2", (1, 2), Part("head", 1, 2)):
            assert torch.equal(make(same).AB, make("L1H2").AB)


def test_several_offsets_are_an_axis_in_front_and_nothing_else() -> None:
    circuits = HeadCircuits(build("llama-gqa"))
    several = circuits.qk(offset=range(3))
    assert several.shape == (3, 2, 4, 24, 24)
    for offset in range(3):
        assert_close(several.AB[offset, 1, 2], circuits.qk("L1H2", offset=offset).AB)
    assert_close(circuits.qk("L1H2").AB, circuits.qk("L1H2", offset=0).AB)
    assert (several.AB[0] - several.AB[1]).abs().max() > 0.1


def test_a_layer_without_rotation_has_one_circuit_at_every_offset() -> None:
    several = HeadCircuits(build("cohere2"), folded=True).qk(offset=range(3))
    assert several.shape == (3, 2, 4, 24, 24)
    assert_close(several.AB[0, 0], several.AB[2, 0])
    assert (several.AB[0, 1] - several.AB[2, 1]).abs().max() > 0.1


def test_a_negative_offset_is_a_key_after_the_query() -> None:
    config = replace(CONFIGS["llama-gqa"], causal=False)
    circuits, x = HeadCircuits(perturbed(config), scaled=True), torch.randn(1, 9, 24).double()
    read = Read("blocks.0.attn.hook_attn_scores")
    tap = Tap([read], [Edit("blocks.0.ln1.hook_normalized", lambda _: x)])
    circuits.network(some_tokens(1), tap)
    found = torch.einsum("d,hde,e->h", x[0, 2], circuits.qk("L0.attn", offset=-4).AB, x[0, 6])
    torch.testing.assert_close(found, tap.values[read][0, :, 2, 6], rtol=ANGLE, atol=ANGLE)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "llama-gqa",
        "parallel",
        "gptj",
        "bloom",
        "gemma2",
        "granite-moe",
        "post-norm",
        "attention-only",
    ],
)
@over("embedding", ["token", "effective"])
def test_vocabulary_entry_writes_what_a_pass_with_silent_attention_leaves(name: str, embedding: str) -> None:
    """Oracle: the recorded stream of one-token texts, attention and positions zeroed by edits."""
    model, found = build(name), HeadCircuits(build(name), embedding=embedding).embedded
    silent = ["blocks.0.hook_attn_out"]
    silent += [s for s in ("hook_pos_embed",) if s in sites.names(CONFIGS[name])]
    entering = model(
        torch.arange(31)[:, None], Tap(edits=[Edit(s, torch.zeros_like) for s in silent]), stop=1
    )
    if embedding == "effective":
        assert_close(found, entering[:, 0])
    else:
        before = Tap(edits=[Edit(s, torch.zeros_like) for s in silent[1:]])
        assert_close(found, model(torch.arange(31)[:, None], before, stop=0)[:, 0])


def test_effective_embedding_is_computed_once_until_its_sources_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also by a write that torch does not count. What it does not follow from may change."""
    computed: list[int] = []
    alone = HeadCircuits._token_streams

    def counted(self: HeadCircuits, ids: Tensor) -> Tensor:
        computed.append(len(ids))
        return alone(self, ids)

    monkeypatch.setattr(HeadCircuits, "_token_streams", counted)
    model = copy.deepcopy(build("gpt2"))
    ids = torch.arange(model.config.d_vocab)

    def table(network: Transformer) -> Tensor:
        found = HeadCircuits(network, embedding="effective").embedded
        assert torch.equal(found, alone(HeadCircuits(network, embedding="effective"), ids))
        return found

    first, edited = table(model), model.edited([Edit("blocks.1.hook_mlp_out", Zero())])
    model.get_parameter("blocks.1.mlp.out.weight").data.mul_(2.0)
    model.get_parameter("unembed.weight").data.mul_(2.0)
    assert table(edited) is table(model) is first and len(computed) == 1
    for changed in ("embed.weight", "blocks.0.mlp.out.weight", "blocks.0.ln2.weight"):
        before = table(model)
        model.get_parameter(changed).data.mul_(2.0)
        assert not torch.equal(table(model), before)
    assert len(computed) == 4
    table(model).zero_()  # somebody wrote into what is kept
    table(model)
    other = model.with_parameters(
        {"blocks.0.mlp.out.weight": torch.zeros_like(model.blocks[0].mlp.out.weight)}
    )
    assert not torch.equal(table(other), table(model))


def test_what_is_kept_of_a_model_goes_with_it() -> None:
    model = copy.deepcopy(build("gpt2"))
    kept = weakref.ref(HeadCircuits(model, embedding="effective").embedded)
    assert kept() is not None
    del model
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("name", ["no-norm", "gpt2"])
def test_the_four_terms_of_learned_positions_sum_to_the_score(name: str) -> None:
    config = replace(CONFIGS[name], norm=CONFIGS["no-norm"].norm)
    model = perturbed(config)
    circuits = HeadCircuits(model, biases=True, scaled=True)
    terms = {
        (q, k): circuits.full_qk("L0H2", query=q, key=k).AB
        for q in ("token", "position")
        for k in ("token", "position")
    }
    read, tokens = Read("blocks.0.attn.hook_attn_scores"), some_tokens(1)
    tap = Tap([read])
    model(tokens, tap)
    t, i, j = tokens[0], 7, 3
    found = (
        terms["token", "token"][t[i], t[j]] + terms["token", "position"][t[i], j]
        + terms["position", "token"][i, t[j]] + terms["position", "position"][i, j]
    )  # fmt: skip
    assert_close(found, tap.values[read][0, 2, i, j])


def test_full_circuits_are_the_dense_products() -> None:
    model = build("gpt2")
    w, circuits = Weights(model), HeadCircuits(model)
    assert_close(circuits.full_ov("L1H2").AB, w.W_E @ w.W_V[1, 2] @ w.W_O[1, 2] @ w.W_U)
    assert_close(circuits.full_qk("L1H2").AB, w.W_E @ w.W_Q[1, 2] @ w.W_K[1, 2].mT @ w.W_E.mT)
    assert_close(circuits.direct().AB, w.W_E @ w.W_U)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "granite-moe"])
def test_the_final_norm_may_stand_on_either_side_of_the_full_ov_circuit(name: str) -> None:
    circuits = HeadCircuits(build(name), folded=True)
    expected = circuits.embedded @ circuits.ov("L1H2").AB @ circuits.unembedding
    assert_close(circuits.full_ov("L1H2").AB, expected)


def test_full_ov_circuit_of_half_precision_is_multiplied_in_float32() -> None:
    """Oracle: the same rounded weights in float64."""
    half = perturbed(CONFIGS["no-norm"], torch.bfloat16)
    found, w = HeadCircuits(half).full_ov("L1H2"), Weights(copy.deepcopy(half).double())
    assert found.A.dtype == found.B.dtype == torch.float32
    expected = w.W_E @ w.W_V[1, 2] @ w.W_O[1, 2] @ w.W_U
    torch.testing.assert_close(found.AB.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "granite-moe"])
def test_the_folded_unembedding_reads_the_stream_over_its_scale(name: str) -> None:
    model = build(name)
    final = model(some_tokens(), stop=2)
    found = final / model.ln_final.scale(final) @ HeadCircuits(model, folded=True).unembedding
    beta = 0 if model.ln_final.bias is None else model.ln_final.bias @ Weights(model).W_U
    assert_close(found + beta, model.uncapped(final))


def test_reparametrised_heads_have_the_same_circuits() -> None:
    model = perturbed(CONFIGS["gpt2"])
    before = HeadCircuits(model)
    ov, qk = before.ov("L0H1").AB, before.qk("L0H1").AB
    mix = torch.randn(6, 6).double() + 3 * torch.eye(6).double()
    w = Weights(model).layer(0)
    for into, out in ((w.W_V[1], w.W_O[1]), (w.W_Q[1], w.W_K[1].mT)):
        into.copy_(into @ mix)
        out.copy_(torch.linalg.inv(mix) @ out)
    assert_close(HeadCircuits(model).ov("L0H1").AB, ov)
    assert_close(HeadCircuits(model).qk("L0H1").AB, qk)


def test_what_does_not_exist_is_refused_by_name() -> None:
    gpt2, llama = HeadCircuits(build("gpt2")), HeadCircuits(build("llama-gqa"))
    with pytest.raises(IndexError, match=r"L2.attn: layers are 0 to 1 in this model"):
        gpt2.ov("L2.attn")
    with pytest.raises(IndexError, match="L0H4: the index of a head is 0 to 3 in this model"):
        gpt2.qk("L0H4")
    with pytest.raises(ValueError, match=r"an offset requires rotary positions: under Learned"):
        gpt2.qk("L0H1", offset=1)
    for wrong in (-1, N_CTX, []):
        with pytest.raises(
            ValueError, match=rf"offsets \(query minus key\) of 0 to {N_CTX - 1} are required"
        ):
            llama.qk("L0H1", offset=wrong)
    with pytest.raises(
        ValueError, match="position terms require positions that are added to the stream, not Rotary"
    ):
        llama.full_qk("L0H1", query="position")
    with pytest.raises(Exception, match="'pos'"):  # here the type checker is the first to say so
        llama.full_qk("L0H1", key="pos")
    for cross in ("L0X1", "L0.cross_attn"):
        with pytest.raises(KeyError, match=r"this model has no 'blocks.0.*cross_attn"):
            gpt2.ov(cross)
    for other in ("L0.mlp", "L0N3", "embed"):
        with pytest.raises(ValueError, match=f"a head is required, such as L1H2, .*got {other}"):
            gpt2.ov(other)
    with pytest.raises(ValueError, match="masked-LM head"):
        HeadCircuits(build("masked-lm")).full_ov("L0H0")


def test_the_scale_is_that_of_the_layer() -> None:
    model = build("scale-by-layer")
    plain, scaled = HeadCircuits(model).qk("L1H0").AB, HeadCircuits(model, scaled=True).qk("L1H0").AB
    assert_close(scaled, plain / math.sqrt(10) / 2)


def test_circuit_is_a_copy_of_the_weights_without_activation_edits() -> None:
    """The embeddings of the vocabulary run through the embedding and block 0, where edits could reach them."""
    network = perturbed(CONFIGS["gpt2"])
    model = HookedTransformer(network)
    plain = HeadCircuits(model, folded=True, embedding="effective")
    expected = plain.embedded.clone(), plain.ov("L1H2").AB, plain.unembedding.clone()
    zero = [Edit("hook_embed", Zero()), Edit("blocks.0.hook_mlp_out", Zero()), Edit("L1H2", Zero())]
    with model.hooks(edits=zero), model.hooks([("ln_final.hook_normalized", lambda x, hook: 0 * x)]):
        for same in (model, model.transformer):
            inside = HeadCircuits(same, folded=True, embedding="effective")
            found = inside.embedded, inside.ov("L1H2").AB, inside.unembedding
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    held = HeadCircuits(network).ov("L1H2")
    before = held.AB
    Weights(network).layer(1).W_O.zero_()
    assert torch.equal(held.AB, before)


def test_heads_of_cross_attention_are_named_and_read_the_memory() -> None:
    decoder = perturbed(replace(CONFIGS["gpt2"], cross_attention=True))
    w = Weights(decoder).layer(1, cross=True)
    circuits = HeadCircuits(decoder)
    assert_close(circuits.ov("L1X2").AB, w.W_V[2] @ w.W_O[2])
    assert_close(circuits.ov("L1.cross_attn").AB, w.W_V @ w.W_O)
    assert w.W_Q is not None and w.W_K is not None
    assert_close(circuits.qk("L1X2").AB, w.W_Q[2] @ w.W_K[2].mT)
