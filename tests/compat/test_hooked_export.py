"""Our models in TransformerLens' layout: the slow reference gets our logits from it, and reading it back is exact."""

import re
from dataclasses import replace

import pytest
import torch

from interp import HookedTransformer
from interp.compat import from_hooked_transformer, to_hooked_state
from interp.compat.hooked_export import inexpressible
from interp.model import (
    MLP,
    Learned,
    LinearScaling,
    ModelConfig,
    MoE,
    NoPosition,
    RMSNorm,
    Rotary,
    Transformer,
)
from interp.model.config import Alibi, Buckets, DynamicScaling, LayerNorm, Sinusoidal, Softmax, YarnScaling
from tests.compat.slow_hooked import slow_logits
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

GPT2, LLAMA = CONFIGS["gpt2"], CONFIGS["llama-gqa"]
OURS: dict[str, ModelConfig] = {
    name: config
    for name, config in CONFIGS.items()
    if name in (
        "gpt2", "llama-gqa", "llama3-scaled", "mqa", "attention-only", "attention-only-rotary", "parallel", "rms-plain",
        "no-norm", "window", "bidirectional", "scale-by-layer",
    )
}  # fmt: skip
"""The small models of the test suite that TransformerLens can express; the others are refused below."""
OURS |= {
    "alibi": replace(GPT2, position=Alibi(), embed_norm=True, tied=True),
    "local-rotary": replace(
        LLAMA, position=Rotary(1000.0, scaling=LinearScaling(8.0)), window=4, local_layers=(1,),
        local_position=Rotary(100.0), qk_norm="head", norm_place="sandwich",
    ),
    "yarn": replace(
        LLAMA, position=Rotary(500.0, scaling=YarnScaling(4.0, 8, 1.1)), window=4, local_layers=(0,),
        local_position=Rotary(500.0),
    ),
    "shared-norm": replace(GPT2, parallel=True, shared_norm=True, position=Rotary(dim=2, interleaved=True)),
    "output-normed": replace(LLAMA, d_head=6, norm_place="output", qk_norm="width"),
    "wide-qk-norm": replace(LLAMA, d_head=6, qk_norm="width"),
    "gemma": replace(LLAMA, norm=RMSNorm(1e-6, unit_offset=True), embed_scale=4.899, tied=True),
    "caps-and-sinks": replace(LLAMA, attn_softcap=2.0, logit_softcap=3.0, sinks=True, attn_scale=0.25),
    "norms-without-beta": replace(GPT2, norm=LayerNorm(trained="gamma")),
    "norms-without-weights": replace(GPT2, norm=LayerNorm(trained="nothing")),
    "experts": replace(LLAMA, mlp=MoE(4, 2, 20)),
    "experts-of-all": replace(LLAMA, mlp=MoE(4, 2, 20, "gelu", renormalise=False)),
}  # fmt: skip
SLOW = tuple(name for name in OURS if name not in ("yarn", "llama3-scaled"))
"""The slow reference has neither of these scaling rules; TransformerLens 3.9 agrees on both."""


@over("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", OURS)
def test_there_and_back_again_no_bit_of_the_export_changes_and_no_logit(
    name: str, dtype: torch.dtype
) -> None:
    """Biases that the export brings as zeros make another product, so that logits agree to rounding."""
    model = perturbed(OURS[name], dtype)
    state, config = to_hooked_state(model)
    back = from_hooked_transformer(state, config).transformer
    assert back.dtype == dtype
    assert_close(back(some_tokens()), model(some_tokens()))
    again, fields = to_hooked_state(back)
    assert fields == config and all(torch.equal(again[key], state[key]) for key in state | again)


@pytest.mark.parametrize("name", SLOW)
def test_the_layout_means_there_what_it_means_here(name: str) -> None:
    model = perturbed(OURS[name])
    state, config = to_hooked_state(HookedTransformer(model))
    tokens = some_tokens(rows=1)[0]
    rotary = isinstance(OURS[name].position, Rotary)  # our angles are float32 in any dtype
    expected = slow_logits(config, state, tokens)
    assert_close(model(tokens[None])[0], expected, torch.float32 if rotary else torch.float64)


def test_what_is_exported_shares_no_memory() -> None:
    model = perturbed(GPT2)
    before = model(some_tokens())
    for tensor in to_hooked_state(model)[0].values():
        tensor.zero_()
    assert torch.equal(model(some_tokens()), before)


REFUSED: dict[str, ModelConfig] = {
    r"position=NoPosition\(\)": replace(GPT2, position=NoPosition()),
    r"position=Sinusoidal": replace(GPT2, position=Sinusoidal()),
    r"position=Buckets": replace(GPT2, position=Buckets()),
    r"position=Learned\(offset=2\)": replace(GPT2, position=Learned(offset=2)),
    r"alibi with n_heads=3": replace(GPT2, d_head=8, n_heads=3, n_kv_heads=3, position=Alibi()),
    r"position=Alibi\(scaled=True": replace(GPT2, position=Alibi(scaled=True)),
    r"scaling=DynamicScaling": replace(LLAMA, position=Rotary(scaling=DynamicScaling(2.0, 8))),
    r"local_position=Rotary\(base=10.0, dim=4": replace(LLAMA, window=4, local_position=Rotary(10.0, dim=4)),
    r"local_position=None": replace(LLAMA, window=4, position=Rotary(scaling=LinearScaling(2.0))),
    r"norm_place='post'": replace(GPT2, norm_place="post"),
    r"norm_place='sandwich' with norm=LayerNorm": replace(GPT2, norm_place="sandwich"),
    r"norm_place='output' without qk_norm='width'": replace(LLAMA, norm_place="output"),
    r"norm_place='sandwich' with qk_norm='width'": replace(
        LLAMA, d_head=6, norm_place="sandwich", qk_norm="width"
    ),
    r"qk_norm='width' where heads together": replace(LLAMA, qk_norm="width"),
    r"final_norm=False": replace(GPT2, final_norm=False),
    r"embed_norm with norm=LayerNorm": replace(GPT2, embed_norm=True),
    r"qk_norm='head' with norm=LayerNorm": replace(GPT2, qk_norm="head"),
    r"qk_norm='each' with norm=RMSNorm": replace(LLAMA, qk_norm="each"),
    r"mixer=Softmax\(.*clip=2.0": replace(LLAMA, mixer=Softmax(clip=2.0)),
    r"a window without causal=True": replace(GPT2, causal=False, window=4),
    r"n_token_types=2": replace(GPT2, n_token_types=2),
    r"mlm_head='gelu'": replace(GPT2, mlm_head="gelu"),
    r"a model without an unembedding": replace(GPT2, unembed=False),
    r"cross_attention": replace(GPT2, cross_attention=True),
    r"residual_scale=0.5": replace(GPT2, residual_scale=0.5),
    r"logit_scale=0.5": replace(GPT2, logit_scale=0.5),
    r"act='quick_gelu'": replace(GPT2, mlp=MLP(40, "quick_gelu")),
    r"mlp=MoE\(.*router_bias=True": replace(LLAMA, mlp=MoE(4, 2, 20, router_bias=True)),
    r"biases of a gated MLP": CONFIGS["tied"],
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_transformer_lens_cannot_express_is_refused_by_name(what: str) -> None:
    with pytest.raises(ValueError, match=f"TransformerLens cannot express .*{what}"):
        to_hooked_state(perturbed(REFUSED[what]))


def test_gamma_minus_one_is_refused_where_gamma_would_be_rounded() -> None:
    config = replace(LLAMA, norm=RMSNorm(1e-6, unit_offset=True))
    with pytest.raises(ValueError, match=r"unit_offset=True.* in torch.bfloat16"):
        to_hooked_state(Transformer(config).to(torch.bfloat16))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_small_model_of_the_suite_is_exported_or_refused(name: str) -> None:
    if reason := inexpressible(build(name)):
        assert name not in OURS
        with pytest.raises(ValueError, match=f"TransformerLens cannot express {re.escape(reason)}"):
            to_hooked_state(build(name))
        return
    back = from_hooked_transformer(*to_hooked_state(build(name))).transformer
    assert_close(back(some_tokens()), build(name)(some_tokens()))


def test_the_config_has_the_names_of_transformer_lens() -> None:
    config = to_hooked_state(build("llama-gqa"))[1]
    assert config["n_key_value_heads"] == 2 and config["positional_embedding_type"] == "rotary"
    assert config["normalization_type"] == "RMS" and config["rotary_dim"] == 10
    assert to_hooked_state(build("gpt2"))[1]["normalization_type"] == "LN"
    assert to_hooked_state(build("llama3-scaled"))[1]["use_NTK_by_parts_rope"]
