"""Sites against what Hugging Face's modules take and give: all of GPT-2's and Llama's, most of the others'."""

from collections.abc import Iterator

import pytest
import torch
import transformers.models.llama.modeling_llama as hf_llama
from einops import rearrange
from torch import Tensor

from interp.model import Read, Tap, sites
from tests.families.cases_decoders import AFTER_GPT2, GPT2S, LLAMAS, RELATIVES
from tests.families.oracle import Recorder, hf_model, some_tokens
from tests.families.pair import largest, network
from tests.loops import over

NOT_EXPOSED = ("hook_attn_scores", "hook_scale")
"""Sites that Hugging Face computes inside an expression; tests/model checks them against the formulas."""
LAYERS = {
    "gpt_neo": "transformer.h", "gptj": "transformer.h", "bloom": "transformer.h", "gpt_neox": "gpt_neox.layers",
    "opt": "model.decoder.layers", "gpt_bigcode": "transformer.h", "codegen": "transformer.h",
    "falcon": "transformer.h", "mpt": "transformer.blocks",
}  # fmt: skip
"""Where a family keeps its blocks, if not in `model.layers`."""
ATTENTION_OUT = {
    "gpt_neo": "attn.attention.out_proj", "gptj": "attn.out_proj", "bloom": "self_attention.dense",
    "gpt_neox": "attention.dense", "opt": "self_attn.out_proj", "phi": "self_attn.dense",
    "gpt_bigcode": "attn.c_proj", "codegen": "attn.out_proj", "falcon": "self_attention.dense", "mpt": "attn.out_proj",
}  # fmt: skip
"""The matrix that writes what attention adds, if not `self_attn.o_proj`."""
MLP_OUT = {
    "gpt_neo": "mlp.c_proj", "gptj": "mlp.fc_out", "bloom": "mlp.dense_4h_to_h", "gpt_neox": "mlp.dense_4h_to_h",
    "opt": "fc2", "phi": "mlp.fc2", "gpt_bigcode": "mlp.c_proj", "codegen": "mlp.fc_out",
    "falcon": "mlp.dense_4h_to_h", "mpt": "ffn.down_proj",
}  # fmt: skip
"""The matrix that writes what the MLP adds, if not `mlp.down_proj`."""
NORMS = ("input_layernorm", "ln_1", "norm_1", "ln_attn", "self_attn_layer_norm")
"""The names of the norm before attention."""
OUTER = {
    "glm4": ("post_self_attn_layernorm", "post_mlp_layernorm"),
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "olmo2", "olmo3"), ("post_attention_layernorm", "post_feedforward_layernorm")
    ),
}  # fmt: skip
"""Families that norm what a sublayer adds, and the norms of what attention and the MLP add."""


def exposed(name: str) -> dict[str, Tensor]:
    """The sites of the residual stream, of attention and of the norms that the modules of any family expose."""
    model = hf_model(name)
    kind = model.config.model_type
    seen, out = _recorded(model, some_tokens())
    into, outof = seen.inputs, seen.outputs
    found: dict[str, Tensor] = {}
    for layer in range(network(name).config.n_layers):
        theirs, block = f"{LAYERS.get(kind, 'model.layers')}.{layer}", f"blocks.{layer}"
        attention = f"{theirs}.{ATTENTION_OUT.get(kind, 'self_attn.o_proj')}"
        mlp = f"{theirs}.{MLP_OUT.get(kind, 'mlp.down_proj')}"
        writers = {"attn": attention, "mlp": mlp}
        if kind in OUTER:
            writers = dict(zip(("attn", "mlp"), (f"{theirs}.{norm}" for norm in OUTER[kind]), strict=True))
            found[f"{block}.ln1_post.hook_normalized"] = outof[writers["attn"]]
            found[f"{block}.ln2_post.hook_normalized"] = outof[writers["mlp"]]
        factor = getattr(model.config, "residual_multiplier", 1.0)
        if network(name).config.norm_place != "output":
            norm = next(norm for norm in NORMS if f"{theirs}.{norm}" in outof)
            found[f"{block}.ln1.hook_normalized"] = outof[f"{theirs}.{norm}"]
        for part in "qk":
            for own in (f"{theirs}.self_attn.{part}_{norm}" for norm in ("norm", "layernorm")):
                if own in outof:
                    found[f"{block}.attn.{part}_norm.hook_normalized"] = outof[own]
        last = "hook_normalized_resid_post" if network(name).config.norms_sum else "hook_resid_post"
        found |= {
            f"{block}.hook_resid_pre": into[theirs],
            f"{block}.attn.hook_pattern": out.attentions[layer],
            f"{block}.attn.hook_z": into[attention],
            f"{block}.hook_attn_out": outof[writers["attn"]] * factor,
            f"{block}.mlp.hook_post": into[mlp],
            f"{block}.hook_mlp_out": outof[writers["mlp"]] * factor,
            f"{block}.{last}": outof[theirs],
        }
    return found


@pytest.mark.parametrize("name", [*AFTER_GPT2, *RELATIVES])
def test_stream_heads_neurons_and_norms_equal_hugging_faces_modules(name: str) -> None:
    expected = exposed(name)
    tap = Tap([Read(site) for site in expected])
    network(name)(some_tokens(), tap)
    for read, value in tap.values.items():
        theirs = expected[read.site]
        if theirs.ndim == 4 and theirs.shape[1:3] == value.shape[2:0:-1] and "norm" in read.site:
            theirs = theirs.transpose(1, 2)  # heads before positions
        assert largest(value, theirs.reshape(value.shape)) <= 1e-4, read.site


def gpt2_sites(model: torch.nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Every site that the oracle's modules expose, under our names."""
    seen, out = _recorded(model, tokens)
    into, outof = seen.inputs, seen.outputs
    n_heads = model.config.n_head
    found = {"hook_embed": outof["transformer.wte"], "ln_final.hook_normalized": outof["transformer.ln_f"]}
    found["hook_pos_embed"] = outof["transformer.wpe"].expand_as(found["hook_embed"])
    for layer in range(model.config.n_layer):
        theirs, block = f"transformer.h.{layer}", f"blocks.{layer}"
        heads = outof[f"{theirs}.attn.c_attn"].chunk(3, -1)
        found |= {
            f"{block}.hook_resid_pre": into[theirs],
            f"{block}.ln1.hook_normalized": outof[f"{theirs}.ln_1"],
            **{f"{block}.attn.hook_{p}": _split(x, n_heads) for p, x in zip("qkv", heads, strict=True)},
            f"{block}.attn.hook_pattern": out.attentions[layer],
            f"{block}.attn.hook_z": _split(into[f"{theirs}.attn.c_proj"], n_heads),
            f"{block}.hook_attn_out": outof[f"{theirs}.attn.c_proj"],
            f"{block}.hook_resid_mid": into[f"{theirs}.ln_2"],
            f"{block}.ln2.hook_normalized": outof[f"{theirs}.ln_2"],
            f"{block}.mlp.hook_pre": outof[f"{theirs}.mlp.c_fc"],
            f"{block}.mlp.hook_post": into[f"{theirs}.mlp.c_proj"],
            f"{block}.hook_mlp_out": outof[f"{theirs}.mlp.c_proj"],
            f"{block}.hook_resid_post": outof[theirs],
        }
    return found


def llama_sites(
    model: torch.nn.Module, tokens: Tensor, rotated: list[tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """The same for Llama; `rotated` holds what its rotary function returned, layer by layer."""
    seen, out = _recorded(model, tokens)
    into, outof = seen.inputs, seen.outputs
    n_heads, n_kv = model.config.num_attention_heads, model.config.num_key_value_heads
    found = {"hook_embed": outof["model.embed_tokens"], "ln_final.hook_normalized": outof["model.norm"]}
    for layer in range(model.config.num_hidden_layers):
        theirs, block = f"model.layers.{layer}", f"blocks.{layer}"
        for part, n in {"q": n_heads, "k": n_kv, "v": n_kv}.items():
            found[f"{block}.attn.hook_{part}"] = _split(outof[f"{theirs}.self_attn.{part}_proj"], n)
        for part, x in zip("qk", rotated[layer], strict=True):
            found[f"{block}.attn.hook_rot_{part}"] = x.transpose(1, 2)
        found |= {
            f"{block}.hook_resid_pre": into[theirs],
            f"{block}.ln1.hook_normalized": outof[f"{theirs}.input_layernorm"],
            f"{block}.attn.hook_pattern": out.attentions[layer],
            f"{block}.attn.hook_z": _split(into[f"{theirs}.self_attn.o_proj"], n_heads),
            f"{block}.hook_attn_out": outof[f"{theirs}.self_attn.o_proj"],
            f"{block}.hook_resid_mid": into[f"{theirs}.post_attention_layernorm"],
            f"{block}.ln2.hook_normalized": outof[f"{theirs}.post_attention_layernorm"],
            f"{block}.mlp.hook_pre": outof[f"{theirs}.mlp.gate_proj"],
            f"{block}.mlp.hook_pre_linear": outof[f"{theirs}.mlp.up_proj"],
            f"{block}.mlp.hook_post": into[f"{theirs}.mlp.down_proj"],
            f"{block}.hook_mlp_out": outof[f"{theirs}.mlp.down_proj"],
            f"{block}.hook_resid_post": outof[theirs],
        }
    return found


def _split(x: Tensor, n: int) -> Tensor:
    return rearrange(x, "b p (h e) -> b p h e", h=n)


def _recorded(model: torch.nn.Module, tokens: Tensor) -> tuple[Recorder, object]:
    recorder = Recorder(model)
    try:
        with torch.no_grad():
            out = model(tokens, output_attentions=True, output_hidden_states=True)
    finally:
        recorder.close()
    return recorder, out


@pytest.fixture
def rotated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """What Hugging Face's Llama gets from its rotary function, call by call."""
    calls: list[tuple[Tensor, Tensor]] = []
    original = hf_llama.apply_rotary_pos_emb

    def noting(*args: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        calls.append(original(*args, **options))
        return calls[-1]

    monkeypatch.setattr(hf_llama, "apply_rotary_pos_emb", noting)
    return calls


@pytest.mark.parametrize("name", [*GPT2S, *LLAMAS])
def test_every_site_that_hugging_face_exposes_is_equal(
    name: str, rotated: list[tuple[Tensor, Tensor]]
) -> None:
    model, tokens = hf_model(name), some_tokens()
    expected = gpt2_sites(model, tokens) if name in GPT2S else llama_sites(model, tokens, rotated)
    mine = network(name)
    every = {n for n in sites.names(mine.config) if not n.endswith(NOT_EXPOSED)}
    assert every == expected.keys(), "the test must cover every site that is not known to be hidden"
    tap = Tap([Read(site) for site in expected])
    mine(tokens, tap)
    for read, value in tap.values.items():
        assert largest(value, expected[read.site]) <= 1e-4, read.site


@over("name", [*GPT2S, *LLAMAS, "qwen3", "phi", "gpt-neo"])
def test_hidden_states_are_the_residual_stream_with_the_last_one_normed(name: str) -> None:
    """Trap: `hidden_states[-1]` has been through the final norm; a lens must not norm it again."""
    with torch.no_grad():
        hidden = hf_model(name)(some_tokens(), output_hidden_states=True).hidden_states
    model = network(name)
    tap = Tap(
        [Read("blocks.0.hook_resid_pre"), Read("blocks.1.hook_resid_pre"), Read("ln_final.hook_normalized")]
    )
    model(some_tokens(), tap)
    for read, expected in zip(tap.reads, hidden, strict=True):
        assert largest(tap.values[read], expected) <= 1e-4
    final = model(some_tokens(), stop=2)
    assert largest(final, hidden[-1]) > 0.1, "the state before the norm is something else"
    assert largest(model.ln_final(final), hidden[-1]) <= 1e-4
