"""Decoders of Hugging Face, and every option of each that we support.

Two layers (more where the layers form a pattern), 24 wide; windows of 6 in texts of 20.
"""

import transformers as hf

from tests.families.case import N_CTX, Case, Options

LLAMA3_ROPE: Options = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
"""Of its five frequencies one is kept, one is mixed and three are divided."""
LINEAR_ROPE: Options = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
DYNAMIC_ROPE: Options = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0}
YARN_ROPE: Options = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
LONG_ROPE: Options = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.1, 1.3, 1.7, 2.5],
    "long_factor": [1.2, 2.0, 3.5, 5.0, 9.0], "original_max_position_embeddings": 16,
}  # fmt: skip

# --- GPT-2 and what came of it ------------------------------------------------------------------------------------

_GPT2 = Case(
    hf.GPT2Config, hf.GPT2LMHeadModel, {"n_layer": 2, "n_embd": 24, "n_head": 4, "n_positions": N_CTX}
)
GPT2S: dict[str, Case] = {
    "gpt2": _GPT2,
    "gpt2-untied": _GPT2.but(tie_word_embeddings=False),
    "gpt2-inverse-layer": _GPT2.but(scale_attn_by_inverse_layer_idx=True),
    "gpt2-unscaled": _GPT2.but(scale_attn_weights=False),
    "gpt2-n-inner": _GPT2.but(n_inner=17),
    "gpt2-eps": _GPT2.but(layer_norm_epsilon=0.1),
    "gpt2-gelu": _GPT2.but(activation_function="gelu"),
    "gpt2-relu": _GPT2.but(activation_function="relu"),
    "gpt2-silu": _GPT2.but(activation_function="silu"),
    "gpt2-tanh": _GPT2.but(activation_function="gelu_pytorch_tanh"),
    "gpt2-fast": _GPT2.but(activation_function="gelu_fast"),
    "gpt2-quick": _GPT2.but(activation_function="quick_gelu"),
}
_NEO = Case(hf.GPTNeoConfig, hf.GPTNeoForCausalLM, {
    "num_layers": 2, "hidden_size": 24, "num_heads": 4, "max_position_embeddings": N_CTX, "window_size": 6,
    "attention_types": [[["global", "local"], 1]],
})  # fmt: skip
_J = Case(hf.GPTJConfig, hf.GPTJForCausalLM, {
    "n_layer": 2, "n_embd": 24, "n_head": 2, "n_positions": N_CTX, "rotary_dim": 4,
})  # fmt: skip
_NEOX = Case(hf.GPTNeoXConfig, hf.GPTNeoXForCausalLM, {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 36,
    "max_position_embeddings": N_CTX,
})  # fmt: skip
_OPT = Case(hf.OPTConfig, hf.OPTForCausalLM, {
    "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "ffn_dim": 36,
    "max_position_embeddings": N_CTX,
})  # fmt: skip
_BLOOM = Case(hf.BloomConfig, hf.BloomForCausalLM, {"n_layer": 2, "hidden_size": 24, "n_head": 4})
_PHI = Case(hf.PhiConfig, hf.PhiForCausalLM, {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 36,
    "max_position_embeddings": N_CTX,
})  # fmt: skip
_BIGCODE = Case(hf.GPTBigCodeConfig, hf.GPTBigCodeForCausalLM, _GPT2.options)
_CODEGEN = Case(hf.CodeGenConfig, hf.CodeGenForCausalLM, {
    "n_layer": 2, "n_embd": 32, "n_head": 8, "n_positions": N_CTX, "n_ctx": N_CTX, "rotary_dim": 2,
})  # fmt: skip
_FALCON = Case(hf.FalconConfig, hf.FalconForCausalLM, {
    "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "ffn_hidden_size": 36,
    "max_position_embeddings": N_CTX,
})  # fmt: skip
_FALCON_RW: Options = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
_MPT = Case(
    hf.MptConfig, hf.MptForCausalLM, {"n_layers": 2, "d_model": 24, "n_heads": 4, "max_seq_len": N_CTX}
)
AFTER_GPT2: dict[str, Case] = {
    "gpt-neo": _NEO,
    "gpt-neo-global": _NEO.but(attention_types=[[["global"], 2]]),
    "gpt-neo-mixed": _NEO.but(num_layers=3, attention_types=[[["local"], 2], [["global"], 1]]),
    "gpt-neo-untied": _NEO.but(tie_word_embeddings=False, intermediate_size=17, activation_function="relu"),
    "gptj": _J,
    "gptj-tied": _J.but(tie_word_embeddings=True, n_inner=17, layer_norm_epsilon=0.1),
    "gptj-whole-head": _J.but(rotary_dim=12),
    "gpt-neox": _NEOX,
    "gpt-neox-sequential": _NEOX.but(use_parallel_residual=False),
    "gpt-neox-no-attention-bias": _NEOX.but(attention_bias=False, tie_word_embeddings=True),
    "gpt-neox-half": _NEOX.but(
        rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5, "rope_type": "default"},
        hidden_act="gelu_fast", layer_norm_eps=0.1,
    ),
    "gpt-neox-linear-rope": _NEOX.but(rope_parameters=LINEAR_ROPE),
    "opt": _OPT,
    "opt-untied": _OPT.but(tie_word_embeddings=False, activation_function="gelu"),
    "opt-post-norm": _OPT.but(do_layer_norm_before=False),
    "opt-no-final-norm": _OPT.but(_remove_final_layer_norm=True),
    "opt-no-bias": _OPT.but(enable_bias=False),
    "opt-narrow": _OPT.but(word_embed_proj_dim=10, do_layer_norm_before=False),
    "opt-narrow-untied": _OPT.but(word_embed_proj_dim=10, tie_word_embeddings=False),
    "bloom": _BLOOM,
    "bloom-6-heads": _BLOOM.but(n_head=6),
    "bloom-untied": _BLOOM.but(tie_word_embeddings=False, layer_norm_epsilon=0.1),
    "phi": _PHI,
    "phi-qk-norm": _PHI.but(qk_layernorm=True),
    "phi-gqa": _PHI.but(num_key_value_heads=2, hidden_act="gelu"),
    "phi-mqa-tied": _PHI.but(num_key_value_heads=1, tie_word_embeddings=True),
    "phi-2-share": _PHI.but(hidden_size=40, partial_rotary_factor=0.4),
    "gpt-bigcode": _BIGCODE,
    "gpt-bigcode-heads": _BIGCODE.but(multi_query=False, n_inner=17, scale_attn_weights=False),
    "codegen": _CODEGEN,
    "falcon": _FALCON,
    "falcon-groups": _FALCON.but(new_decoder_architecture=True, num_kv_heads=2),
    "falcon-groups-one-norm": _FALCON.but(
        new_decoder_architecture=True, num_kv_heads=1, num_ln_in_parallel_attn=1, bias=True,
        tie_word_embeddings=False,
    ),
    "falcon-rw": _FALCON.but(**_FALCON_RW, num_attention_heads=12, max_position_embeddings=320),
    "mpt": _MPT,
    "mpt-6-heads-clipped": _MPT.but(n_heads=6, attn_config={"clip_qkv": 0.7, "softmax_scale": 0.3}),
}  # fmt: skip

# --- Llama and its relatives --------------------------------------------------------------------------------------

_BODY: Options = {
    "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "intermediate_size": 36, "max_position_embeddings": N_CTX,
}  # fmt: skip
_LLAMA = Case(hf.LlamaConfig, hf.LlamaForCausalLM, _BODY)
LLAMAS: dict[str, Case] = {
    "llama": _LLAMA,
    "llama-tied": _LLAMA.but(tie_word_embeddings=True),
    "llama-attention-bias": _LLAMA.but(attention_bias=True),
    "llama-mlp-bias": _LLAMA.but(mlp_bias=True),
    "llama-mha": _LLAMA.but(num_key_value_heads=4),
    "llama-mqa": _LLAMA.but(num_key_value_heads=1),
    "llama-eps": _LLAMA.but(rms_norm_eps=0.1),
    "llama-gelu": _LLAMA.but(hidden_act="gelu"),
    "llama-llama3-rope": _LLAMA.but(rope_parameters=LLAMA3_ROPE),
    "llama-linear-rope": _LLAMA.but(rope_parameters=LINEAR_ROPE),
}
ROPES: dict[str, Case] = {
    "llama-dynamic-rope": _LLAMA.but(rope_parameters=DYNAMIC_ROPE),
    "llama-dynamic-rope-beyond": _LLAMA.but(rope_parameters=DYNAMIC_ROPE, max_position_embeddings=12),
    "llama-yarn-rope": _LLAMA.but(rope_parameters=YARN_ROPE),
    "llama-yarn-rope-4096": _LLAMA.but(
        rope_parameters={
            **YARN_ROPE,
            "rope_theta": 10_000.0,
            "original_max_position_embeddings": 4096,
        }
    ),
    "llama-yarn-rope-whole": _LLAMA.but(rope_parameters={**YARN_ROPE, "truncate": False, "beta_fast": 8.0}),
    "llama-yarn-rope-mscale": _LLAMA.but(rope_parameters={**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.0}),
    "llama-yarn-rope-factor": _LLAMA.but(rope_parameters={**YARN_ROPE, "attention_factor": 1.3}),
    "llama-long-rope-beyond": _LLAMA.but(rope_parameters=LONG_ROPE),
    "llama-long-rope": _LLAMA.but(
        rope_parameters={**LONG_ROPE, "original_max_position_embeddings": 32, "attention_factor": 1.1}
    ),
}
_MISTRAL = Case(hf.MistralConfig, hf.MistralForCausalLM, {**_BODY, "sliding_window": None})
_QWEN = {k: v for k, v in _BODY.items() if k != "head_dim"}
_QWEN2 = Case(hf.Qwen2Config, hf.Qwen2ForCausalLM, _QWEN)
_QWEN3 = Case(hf.Qwen3Config, hf.Qwen3ForCausalLM, _BODY)
_WINDOW: Options = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
_GEMMA = Case(hf.GemmaConfig, hf.GemmaForCausalLM, _BODY)
_GEMMA2 = Case(hf.Gemma2Config, hf.Gemma2ForCausalLM, {
    **_BODY, "num_hidden_layers": 3, "sliding_window": 6, "query_pre_attn_scalar": 7,
})  # fmt: skip
_GEMMA3 = Case(hf.Gemma3TextConfig, hf.Gemma3ForCausalLM, {
    **_BODY, "num_hidden_layers": 3, "sliding_window": 6, "query_pre_attn_scalar": 7, "sliding_window_pattern": 3,
})  # fmt: skip
_PHI3 = Case(hf.Phi3Config, hf.Phi3ForCausalLM, {
    **_QWEN, "hidden_size": 40, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
})  # fmt: skip
_PHI3_LONG = _PHI3.but(
    rope_parameters={k: v for k, v in LONG_ROPE.items() if k != "original_max_position_embeddings"},
    original_max_position_embeddings=16,
)
_OLMO2 = Case(hf.Olmo2Config, hf.Olmo2ForCausalLM, _BODY)
_OLMO = Case(hf.OlmoConfig, hf.OlmoForCausalLM, _QWEN)
_OLMO3 = Case(hf.Olmo3Config, hf.Olmo3ForCausalLM, {**_QWEN, "num_hidden_layers": 4, "sliding_window": 6})
_SMOL = Case(hf.SmolLM3Config, hf.SmolLM3ForCausalLM, {**_QWEN, "num_hidden_layers": 4})
_COHERE = Case(hf.CohereConfig, hf.CohereForCausalLM, {**_QWEN, "logit_scale": 1.3})
_COHERE2 = Case(hf.Cohere2Config, hf.Cohere2ForCausalLM, {
    **_QWEN, "num_hidden_layers": 3, "sliding_window": 6, "logit_scale": 1.3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
})  # fmt: skip
_DELTA: Options = {
    **_BODY, "num_hidden_layers": 4, "head_dim": 12, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 5, "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
_QWEN35 = Case(hf.Qwen3_5TextConfig, hf.Qwen3_5ForCausalLM, {
    **_DELTA, "rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1],
        "mrope_interleaved": True,
    },
})  # fmt: skip
_EXPERTS: Options = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 14, "shared_expert_intermediate_size": 9,
    "experts_implementation": "eager",
}  # fmt: skip
_QWEN35_MOE = Case(hf.Qwen3_5MoeTextConfig, hf.Qwen3_5MoeForCausalLM, {
    **{k: v for k, v in _QWEN35.options.items() if k != "intermediate_size"}, **_EXPERTS,
})  # fmt: skip
_QWEN3_NEXT = Case(hf.Qwen3NextConfig, hf.Qwen3NextForCausalLM, {
    **_DELTA, **_EXPERTS, "rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5,
    },
})  # fmt: skip
_LFM2 = Case(hf.Lfm2Config, hf.Lfm2ForCausalLM, {
    **_QWEN, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8,
})  # fmt: skip
_MAMBA2 = Case(hf.Mamba2Config, hf.Mamba2ForCausalLM, {
    "num_hidden_layers": 2, "hidden_size": 24, "num_heads": 6, "head_dim": 8, "n_groups": 2, "state_size": 5,
    "chunk_size": 8,
})  # fmt: skip
_GRANITE4 = Case(hf.GraniteMoeHybridConfig, hf.GraniteMoeHybridForCausalLM, {
    **_BODY, "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "embedding_multiplier": 1.7,
    "logits_scaling": 0.6, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "shared_intermediate_size": 28,
    "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 8, "mamba_d_head": 6, "mamba_n_groups": 2,
    "mamba_d_state": 5, "mamba_chunk_size": 8,
})  # fmt: skip
_BAMBA = Case(hf.BambaConfig, hf.BambaForCausalLM, {
    **{k: v for k, v in _GRANITE4.options.items() if k in _BODY or k.startswith("mamba_")}, "head_dim": 8,
    "attn_layer_indices": [1],
})  # fmt: skip
_STABLELM = Case(hf.StableLmConfig, hf.StableLmForCausalLM, {**_QWEN, "hidden_size": 32})
_GLM = Case(hf.GlmConfig, hf.GlmForCausalLM, {**_BODY, "head_dim": 8})
_GRANITE = Case(hf.GraniteConfig, hf.GraniteForCausalLM, {
    **_BODY, "embedding_multiplier": 1.7, "logits_scaling": 0.6, "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
})  # fmt: skip
RELATIVES: dict[str, Case] = {
    "mistral": _MISTRAL,
    "mistral-window": _MISTRAL.but(sliding_window=6),
    "mistral-mqa-tied": _MISTRAL.but(num_key_value_heads=1, tie_word_embeddings=True, rms_norm_eps=0.1),
    "qwen2": _QWEN2,
    "qwen2-tied": _QWEN2.but(tie_word_embeddings=True, num_key_value_heads=1),
    "qwen2-window": _QWEN2.but(**_WINDOW),
    "qwen2-layer-types": _QWEN2.but(**_WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "qwen2-yarn": _QWEN2.but(rope_parameters=YARN_ROPE),
    "qwen3": _QWEN3,
    "qwen3-tied": _QWEN3.but(tie_word_embeddings=True, num_key_value_heads=1, rms_norm_eps=0.1),
    "qwen3-attention-bias": _QWEN3.but(attention_bias=True),
    "qwen3-window": _QWEN3.but(**_WINDOW),
    "gemma": _GEMMA,
    "gemma-old-gelu": _GEMMA.but(hidden_act="gelu", num_key_value_heads=1),
    "gemma-untied": _GEMMA.but(tie_word_embeddings=False, attention_bias=True, rms_norm_eps=0.1),
    "gemma2": _GEMMA2,
    "gemma2-uncapped": _GEMMA2.but(attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma2-tight-caps": _GEMMA2.but(attn_logit_softcapping=1.5, final_logit_softcapping=2.0),
    "gemma2-layer-types": _GEMMA2.but(
        layer_types=["full_attention", "sliding_attention", "sliding_attention"]
    ),
    "gemma2-mqa-untied": _GEMMA2.but(num_key_value_heads=1, tie_word_embeddings=False, attention_bias=True),
    "gemma3": _GEMMA3,
    "gemma3-every-6": _GEMMA3.but(sliding_window_pattern=6),
    "gemma3-full": _GEMMA3.but(layer_types=["full_attention"] * 3, num_key_value_heads=1),
    "gemma3-capped": _GEMMA3.but(final_logit_softcapping=2.0, tie_word_embeddings=False),
    "gemma3-ropes": _GEMMA3.but(
        rope_parameters={
            "full_attention": LINEAR_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        }
    ),
    "phi3": _PHI3,
    "phi3-window": _PHI3.but(sliding_window=6),
    "phi3-tied-mqa": _PHI3.but(tie_word_embeddings=True, num_key_value_heads=1, rms_norm_eps=0.1),
    "phi3-long": _PHI3_LONG,
    "phi3-long-within": _PHI3_LONG.but(original_max_position_embeddings=32),
    "phi3-partial": _PHI3.but(
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.6}
    ),
    "olmo2": _OLMO2,
    "olmo2-tied-mqa": _OLMO2.but(tie_word_embeddings=True, num_key_value_heads=1, rms_norm_eps=0.1),
    "olmo2-attention-bias": _OLMO2.but(attention_bias=True),
    "olmo": _OLMO,
    "olmo-clipped-tied": _OLMO.but(clip_qkv=0.7, tie_word_embeddings=True, attention_bias=True),
    "olmo3": _OLMO3,
    "olmo3-yarn": _OLMO3.but(
        rope_parameters={
            "full_attention": YARN_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        }
    ),
    "smollm3": _SMOL,
    "smollm3-window": _SMOL.but(
        no_rope_layers=[0, 1, 1, 0],
        use_sliding_window=True,
        sliding_window=6,
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
    ),
    "cohere": _COHERE,
    "cohere-qk-norm": _COHERE.but(use_qk_norm=True, layer_norm_eps=0.1, logit_scale=0.7, attention_bias=True),
    "cohere2": _COHERE2,
    "cohere2-untied": _COHERE2.but(tie_word_embeddings=False, num_key_value_heads=1),
    "stablelm": _STABLELM,
    "stablelm-12b": _STABLELM.but(
        use_parallel_residual=True,
        qk_layernorm=True,
        use_qkv_bias=True,
        tie_word_embeddings=True,
        layer_norm_eps=0.1,
    ),
    "glm": _GLM,
    "glm-no-bias-tied": _GLM.but(attention_bias=False, tie_word_embeddings=True, rope_parameters=LINEAR_ROPE),
    "glm4": Case(hf.Glm4Config, hf.Glm4ForCausalLM, _GLM.options),
    "granite": _GRANITE,
    "granite-biases-tied": _GRANITE.but(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
}
HYBRIDS: dict[str, Case] = {
    "qwen3-next": _QWEN3_NEXT,
    "qwen3-next-bias": _QWEN3_NEXT.but(
        layer_types=None,
        attention_bias=True,
        norm_topk_prob=False,
        linear_num_key_heads=8,
        tie_word_embeddings=True,
        num_key_value_heads=1,
        linear_conv_kernel_dim=3,
    ),
    "qwen3.5": _QWEN35,
    "qwen3.5-moe": _QWEN35_MOE,
    "lfm2": _LFM2,
    "lfm2-bias-untied": _LFM2.but(conv_bias=True, tie_word_embeddings=False, block_auto_adjust_ff_dim=False),
    "mamba2": _MAMBA2,
    "mamba2-biases-tied": _MAMBA2.but(
        use_bias=True, use_conv_bias=False, tie_word_embeddings=True, conv_kernel=3, n_groups=3,
        layer_norm_epsilon=0.1,
    ),
    "mamba2-steps": _MAMBA2.but(time_step_limit=[0.3, 1.1], n_groups=1, residual_in_fp32=False),
    "granite4": _GRANITE4,
    "granite4-rope": _GRANITE4.but(
        position_embedding_type="rope", rms_norm_eps=0.1, mamba_proj_bias=True, mamba_conv_bias=False,
        attention_bias=True, tie_word_embeddings=True, mamba_n_groups=1,
    ),
    "granite4-moe": _GRANITE4.but(
        num_local_experts=5, num_experts_per_tok=2, intermediate_size=16, experts_implementation="eager",
        time_step_limit=[0.2, 1.3],
    ),
    "granite4-states-alone": _GRANITE4.but(layer_types=None, num_hidden_layers=2, use_cache=False),
    "bamba": _BAMBA,
    "bamba-biases-tied": _BAMBA.but(
        mamba_proj_bias=True, mamba_conv_bias=False, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        mamba_n_groups=1, mamba_d_conv=3, time_step_limit=[0.2, 1.3],
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
}  # fmt: skip
"""Decoders whose layers are not all attention."""
CASES: dict[str, Case] = {**GPT2S, **AFTER_GPT2, **LLAMAS, **ROPES, **RELATIVES, **HYBRIDS}
