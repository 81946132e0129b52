"""Configs as they lie on the hub, written by older libraries, and what each family refuses by name."""

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from interp import HookedTransformer
from interp.families import config_of
from interp.model import ModelConfig, Rotary
from tests.families.case import D_VOCAB, N_CTX
from tests.families.oracle import hf_config, hf_logits, hf_model, some_tokens
from tests.families.pair import largest, network

_TRAINED = {
    "initializer_range": 0.02,
    "use_cache": True,
    "transformers_version": "4.40.0",
    "torch_dtype": "float32",
}
_SIZES = {
    "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "intermediate_size": 36, "max_position_embeddings": N_CTX, "rms_norm_eps": 1e-6, "attention_dropout": 0.0,
}  # fmt: skip
_QWEN = {k: v for k, v in _SIZES.items() if k != "head_dim"} | {
    "hidden_act": "silu", "rope_theta": 1e6, "tie_word_embeddings": False, "use_sliding_window": False,
    "sliding_window": 7, "max_window_layers": 1,
}  # fmt: skip
_WINDOWED = ("use_sliding_window", "sliding_window", "max_window_layers")
_COHERE = {k: v for k, v in _QWEN.items() if k not in ("rms_norm_eps", *_WINDOWED, "tie_word_embeddings")} | {
    "layer_norm_eps": 1e-5, "logit_scale": 0.5, "rope_theta": 500.0, "rope_scaling": None, "attention_bias": False,
}  # fmt: skip
_FALCON = {
    "model_type": "falcon", "alibi": False, "apply_residual_connection_post_layernorm": False, "bias": False,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "hidden_size": 24, "ffn_hidden_size": 36,
    "layer_norm_epsilon": 1e-5, "num_attention_heads": 4, "num_hidden_layers": 2,
}  # fmt: skip
_GEMMA = {
    **_SIZES,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 10_000.0,
    "cache_implementation": "hybrid",
}
_LONG = {
    "original_max_position_embeddings": 16,  # the library of today requires it here for the oldest names
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.5],
    "long_factor": [1.2, 2.0, 3.5, 5.0, 9.0],
}
OLD: dict[str, tuple[str, dict[str, object]]] = {
    "gpt-neo": ("gpt-neo-mixed", {
        "model_type": "gpt_neo", "activation_function": "gelu_new", "attention_dropout": 0, "embed_dropout": 0,
        "attention_layers": ["local", "local", "global"], "attention_types": [[["local"], 2], [["global"], 1]],
        "gradient_checkpointing": False, "hidden_size": 24, "intermediate_size": None, "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": N_CTX, "num_heads": 4, "num_layers": 3, "resid_dropout": 0, "window_size": 6,
        "summary_type": "cls_index", "summary_use_proj": True,
    }),
    "gpt-j": ("gptj", {
        "model_type": "gptj", "activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "n_embd": 24,
        "gradient_checkpointing": False, "layer_norm_epsilon": 1e-5, "n_head": 2, "n_inner": None, "n_layer": 2,
        "n_positions": N_CTX, "resid_pdrop": 0.0, "rotary": True, "rotary_dim": 4, "scale_attn_weights": True,
        "tie_word_embeddings": False, "task_specific_params": {"text-generation": {"do_sample": True}},
        "tokenizer_class": "GPT2Tokenizer",
    }),
    "pythia": ("gpt-neox", {
        "model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 32, "intermediate_size": 36,
        "layer_norm_eps": 1e-5, "max_position_embeddings": N_CTX, "num_attention_heads": 2, "num_hidden_layers": 2,
        "rotary_emb_base": 500, "rotary_pct": 0.5, "tie_word_embeddings": False, "use_parallel_residual": True,
        "classifier_dropout": 0.1, "hidden_dropout": 0.0,
    }),
    "opt": ("opt", {
        "model_type": "opt", "activation_dropout": 0.0, "activation_function": "relu", "attention_dropout": 0.0,
        "do_layer_norm_before": True, "dropout": 0.1, "ffn_dim": 36, "hidden_size": 24, "init_std": 0.02,
        "layerdrop": 0.0, "max_position_embeddings": N_CTX, "num_attention_heads": 4, "num_hidden_layers": 2,
        "prefix": "</s>", "word_embed_proj_dim": 24, "_remove_final_layer_norm": False,
    }),
    "bloom": ("bloom", {
        "model_type": "bloom", "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "hidden_dropout": 0.0,
        "layer_norm_epsilon": 1e-5, "masked_softmax_fusion": True, "n_embed": 24, "n_layer": 2,
        "num_attention_heads": 4, "offset_alibi": 100, "pretraining_tp": 2, "seq_length": 2048,
        "skip_bias_add": True, "skip_bias_add_qkv": False, "unk_token_id": 0,
    }),
    "mistral 0.1": ("mistral", {
        **_SIZES, "model_type": "mistral", "hidden_act": "silu", "rope_theta": 10_000.0, "sliding_window": 6,
        "tie_word_embeddings": False,
    }),
    "qwen 2.5": ("qwen2", {**_QWEN, "model_type": "qwen2"}),
    "qwen 2.5 at length": ("qwen2", {
        **_QWEN, "model_type": "qwen2",
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    }),
    "qwen 3": ("qwen3", {
        **_QWEN, "head_dim": 10, "model_type": "qwen3", "attention_bias": False, "rope_scaling": None,
    }),
    "gemma, first release": ("gemma", {
        **_SIZES, "model_type": "gemma", "hidden_act": "gelu", "rope_theta": 10_000.0, "attention_bias": False,
    }),
    "gemma, corrected": ("gemma", {
        **_SIZES, "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh", "hidden_activation": None,
        "rope_scaling": None, "rope_theta": 10_000.0, "attention_bias": False,
    }),
    "gemma 2": ("gemma2", {
        **_GEMMA, "model_type": "gemma2", "num_hidden_layers": 3, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 7,
        "sliding_window": 6, "sliding_window_size": 6, "attention_bias": False,
    }),
    "gemma 3": ("gemma3", {
        **_GEMMA, "model_type": "gemma3_text", "num_hidden_layers": 3, "rope_theta": 1e6,
        "rope_local_base_freq": 50.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2, "sliding_window": 6, "query_pre_attn_scalar": 7,
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": False,
    }),
    "phi 2": ("phi", {
        "model_type": "phi", "embd_pdrop": 0.0, "hidden_act": "gelu_new", "hidden_size": 32, "intermediate_size": 36,
        "layer_norm_eps": 1e-5, "max_position_embeddings": N_CTX, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": None, "partial_rotary_factor": 0.25, "qk_layernorm": False, "resid_pdrop": 0.1,
        "rope_scaling": None, "rope_theta": 500.0, "tie_word_embeddings": False,
    }),
    **{
        f"phi 3, {kind}": ("phi3", {
            **{k: v for k, v in _SIZES.items() if k != "head_dim"}, "model_type": "phi3", "hidden_size": 40,
            "hidden_act": "silu", "embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 16,
            "rope_theta": 500.0, "rope_scaling": {"type": kind, **_LONG}, "sliding_window": 6,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "tie_word_embeddings": False,
        })
        for kind in ("su", "yarn", "longrope")
    },
    "phi 4 mini": ("phi3-partial", {
        **{k: v for k, v in _SIZES.items() if k != "head_dim"}, "model_type": "phi3", "hidden_size": 40,
        "hidden_act": "silu", "attention_bias": False, "full_attn_mod": 1, "interpolate_factor": 1,
        "lm_head_bias": False, "mlp_bias": False, "partial_rotary_factor": 0.6, "rope_theta": 500.0,
        "original_max_position_embeddings": 16, "tie_word_embeddings": False,
    }),
    "olmo 2": ("olmo2", {
        **_SIZES, "model_type": "olmo2", "hidden_act": "silu", "rope_scaling": None, "rope_theta": 500.0,
        "attention_bias": False, "tie_word_embeddings": False,
    }),
    "olmo 1.7": ("olmo-clipped-tied", {
        **{k: v for k, v in _QWEN.items() if k not in ("rms_norm_eps", *_WINDOWED)}, "model_type": "olmo",
        "clip_qkv": 0.5, "rope_scaling": None, "attention_bias": True, "tie_word_embeddings": True,
    }),
    "olmo 3": ("olmo3", {
        **{k: v for k, v in _QWEN.items() if k not in ("use_sliding_window", "max_window_layers")},
        "model_type": "olmo3", "num_hidden_layers": 4, "attention_bias": False, "rope_theta": 500_000,
        "rope_scaling": {
            "attention_factor": 1.2, "beta_fast": 32, "beta_slow": 1, "factor": 8.0, "rope_type": "yarn",
            "original_max_position_embeddings": 8,
        },
    }),
    "smollm 3": ("smollm3", {
        **_QWEN, "model_type": "smollm3", "num_hidden_layers": 4, "attention_bias": False, "mlp_bias": False,
        "layer_types": ["full_attention"] * 4, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 0, 1],
        "pretraining_tp": 2, "rope_scaling": None, "sliding_window": None, "max_window_layers": 28,
        "tie_word_embeddings": True,
    }),
    "command r": ("cohere", {
        **_COHERE, "model_type": "cohere", "model_max_length": 131_072, "use_qk_norm": False,
    }),
    "command r7b": ("cohere2", {
        **_COHERE, "model_type": "cohere2", "num_hidden_layers": 3, "cache_implementation": "hybrid", "layer_switch": 2,
        "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rotary_pct": 1.0,
        "sliding_window": 6, "sliding_window_pattern": 2, "use_embedding_sharing": True, "use_gated_activation": True,
        "use_parallel_block": True, "use_parallel_embedding": True, "head_dim": 6,
    }),
    "stablelm 2": ("stablelm", {
        **{k: v for k, v in _QWEN.items() if k not in ("rms_norm_eps", *_WINDOWED)}, "model_type": "stablelm",
        "hidden_size": 32, "hidden_dropout": 0.0, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
        "qk_layernorm": False, "use_parallel_residual": False, "use_qkv_bias": False, "rope_theta": 500.0,
    }),
    "falcon 7b": ("falcon", {
        **_FALCON, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True,
    }),
    "falcon 40b": ("falcon-groups", {
        **_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "parallel_attn": True, "multi_query": True,
    }),
    "mpt 7b": ("mpt", {
        "model_type": "mpt", "d_model": 24, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "expansion_ratio": 4,
        "attn_config": {
            "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "qk_ln": False,
            "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": 0.6, "prefix_lm": False,
            "softmax_scale": None,
        },
        "emb_pdrop": 0, "embedding_fraction": 1.0, "init_config": {"name": "kaiming_normal_"}, "init_device": "cpu",
        "learned_pos_emb": True, "logit_scale": None, "no_bias": True, "norm_type": "low_precision_layernorm",
        "resid_pdrop": 0, "tokenizer_name": "EleutherAI/gpt-neox-20b", "verbose": 0, "use_cache": False,
    }),
    "starcoder": ("gpt-bigcode", {
        "model_type": "gpt_bigcode", "activation_function": "gelu", "attention_softmax_in_fp32": True,
        "attn_pdrop": 0.1, "embd_pdrop": 0.1, "inference_runner": 0, "layer_norm_epsilon": 1e-5, "max_batch_size": None,
        "max_sequence_length": None, "multi_query": True, "n_embd": 24, "n_head": 4, "n_inner": 96, "n_layer": 2,
        "n_positions": N_CTX, "pad_key_length": True, "pre_allocate_kv_cache": False, "resid_pdrop": 0.1,
        "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "summary_activation": None,
        "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
        "summary_use_proj": True, "validate_runner_input": True,
    }),
    "codegen": ("codegen", {
        "model_type": "codegen", "activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0,
        "gradient_checkpointing": False, "layer_norm_epsilon": 1e-5, "n_ctx": N_CTX, "n_embd": 32, "n_head": 8,
        "n_inner": None, "n_layer": 2, "n_positions": N_CTX, "resid_pdrop": 0.0, "rotary_dim": 4,
        "scale_attn_weights": True, "summary_type": "cls_index", "tie_word_embeddings": False,
        "tokenizer_class": "GPT2Tokenizer",
    }),
    "glm 4 0414": ("glm4", {
        **_SIZES, "model_type": "glm4", "head_dim": 8, "hidden_act": "silu", "attention_bias": True,
        "partial_rotary_factor": 0.5, "rope_theta": 500.0, "tie_word_embeddings": False, "pad_token_id": 0,
    }),
    "granite 3": ("granite", {
        **_SIZES, "model_type": "granite", "hidden_act": "silu", "rope_scaling": None, "rope_theta": 500.0,
        "attention_bias": False, "mlp_bias": False, "attention_multiplier": 0.3, "embedding_multiplier": 12.0,
        "logits_scaling": 8.0, "residual_multiplier": 0.22, "tie_word_embeddings": False,
    }),
    "granite 4": ("granite4-moe", {
        **_SIZES, "model_type": "granitemoehybrid", "attention_bias": False, "attention_multiplier": 0.3,
        "embedding_multiplier": 12.0, "hidden_act": "silu", "init_method": "mup", "num_hidden_layers": 3,
        "intermediate_size": 16, "layer_types": ["mamba", "attention", "mamba"], "logits_scaling": 6.0,
        "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 6, "mamba_d_state": 5,
        "mamba_expand": 2, "mamba_n_groups": 2, "mamba_n_heads": 8, "mamba_proj_bias": False,
        "normalization_function": "rmsnorm", "num_experts_per_tok": 2, "num_local_experts": 5,
        "output_router_logits": False, "position_embedding_type": "nope", "residual_multiplier": 0.22,
        "rope_scaling": None, "rope_theta": 10000, "router_aux_loss_coef": 0.01, "shared_intermediate_size": 28,
        "tie_word_embeddings": False,
    }),
    "mamba 2": ("mamba2", {
        "model_type": "mamba2", "chunk_size": 256, "conv_kernel": 4, "expand": 2, "head_dim": 8, "hidden_act": "silu",
        "hidden_size": 24, "layer_norm_epsilon": 1e-5, "n_groups": 2, "norm_before_gate": True, "num_heads": 6,
        "num_hidden_layers": 2, "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True,
        "state_size": 5, "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_max": 0.1,
        "time_step_min": 0.001, "time_step_rank": 2, "time_step_limit": [0.0, float("inf")], "use_bias": False,
        "use_conv_bias": True,
    }),
    "bamba": ("bamba", {
        **_SIZES, "model_type": "bamba", "head_dim": 8, "attention_bias": False, "attn_layer_indices": [1],
        "attn_rotary_emb": 4, "hidden_act": "silu", "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4,
        "mamba_d_head": 6, "mamba_d_state": 5, "mamba_expand": 2, "mamba_n_groups": 2, "mamba_n_heads": 8,
        "mamba_proj_bias": False, "mlp_bias": False, "num_hidden_layers": 3, "num_logits_to_keep": 1,
        "tie_word_embeddings": False,
    }),
}  # fmt: skip
"""What it is -> the case with weights of its shapes, and its config."""


@pytest.mark.parametrize("kind", OLD)
def test_a_config_of_before_transformers_5_means_what_hugging_face_reads(kind: str, tmp_path: Path) -> None:
    """Oracle: Hugging Face reading the same file."""
    name, values = OLD[kind]
    hf_model(name).save_pretrained(tmp_path)
    shared = {"vocab_size": D_VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, **_TRAINED}
    (tmp_path / "config.json").write_text(json.dumps(shared | values))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    mine = HookedTransformer.from_pretrained(tmp_path).transformer
    assert largest(mine(some_tokens()), hf_logits(theirs, some_tokens())) <= 1e-4


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("gpt-neo", {"attention_types": [[["global"], 3]]}, "requires attention_types of 2 layers, global or local"),
        ("gpt-neo", {"attention_types": [[["sparse"], 2]]}, "requires attention_types of 2 layers, global or local"),
        ("gpt-neo", {"attention_types": [3]}, "requires pairs of kinds and a number"),
        ("gpt-neo", {"attention_layers": ["local", "local"]}, r"attention_layers=\['local', 'local'\]"),
        ("gpt-neox", {"hidden_act": "relu2"}, "asks for hidden_act='relu2'"),
        ("opt", {"layer_norm_elementwise_affine": False}, "asks for layer_norm_elementwise_affine=False"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "asks for apply_residual_connection_post_layer"),
        ("bloom", {"n_head": 4, "num_attention_heads": 6}, "asks for n_head=4 and num_attention_heads=6"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "not understood: layer_types"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "layer_types requires 2 of full_attention and sliding"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "have a sliding window, but sliding_window is None"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types requires 2 of full_attention and sliding"),
        ("gemma", {"use_bidirectional_attention": True}, "asks for use_bidirectional_attention=True"),
        ("gemma2", {"use_bidirectional_attention": True}, "asks for use_bidirectional_attention=True"),
        ("gemma2", {"sliding_window": None}, "have a sliding window, but sliding_window is None"),
        ("gemma3", {"use_bidirectional_attention": True}, "asks for use_bidirectional_attention=True"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "asks for attn_logit_softcapping=50.0, supported: None"),
        ("phi3-long", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "requires 5 numbers in a"),
        ("olmo", {"clip_qkv": -1.0}, "Softmax requires clip finite and above 0, got -1.0"),
        ("olmo3", {"rope_parameters": {"rope_type": "default"}}, "requires a table for each kind of layer, got 'rop"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers requires 0 or 1 for each of 4 layers"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "asks for parallel_attn=False"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "asks for num_ln_in_parallel_attn=2, supported: 1"),
        ("falcon-rw", {"num_kv_heads": 3}, "asks for num_kv_heads=3, supported: 12"),
        ("gpt-bigcode", {"add_cross_attention": True}, "asks for add_cross_attention=True"),
        ("mamba2", {"hidden_act": "gelu"}, "asks for hidden_act='gelu'"),
        ("mamba2", {"expand": 3}, r"requires expand \* hidden_size = num_heads \* head_dim, got 72 and 48"),
        ("mamba2", {"n_groups": 4}, "requires key_heads = 4 to divide value_heads = 6 under Mamba2"),
        ("mamba2", {"time_step_limit": [0.5, 0.1]}, r"in order for time_step_limit, got \[0.5, 0.1\]"),
        ("mamba2", {"time_step_limit": [0.0, 10**400]}, "two numbers from 0 on in order for time_step_limit"),
        ("mamba2", {"time_step_limit": ["a", "b"]}, "two numbers from 0 on in order for time_step_limit"),
        ("granite4", {"layer_types": ["mamba"] * 2}, "layer_types requires 3 of attention, full_attention, mamba"),
        ("granite4", {"layer_types": ["conv"] * 3}, "layer_types requires 3 of attention, full_attention, mamba"),
        ("granite4", {"position_embedding_type": "alibi"}, "asks for position_embedding_type='alibi'"),
        ("granite4", {"mamba_d_head": 7}, r"mamba_d_head = mamba_expand \* hidden_size = 48, got 56"),
        ("granite4", {"mamba_n_heads": 6, "mamba_d_head": 8}, "requires n_heads = 4 to divide value_heads = 6"),
        ("bamba", {"attn_layer_indices": [3]}, "requires layers from 0 to 2 in attn_layer_indices"),
        ("bamba", {"layer_types": ["linear_attention"] * 3}, "requires layer_types to agree with attn_layer_indices"),
        ("falcon", {"num_attention_heads": 0}, r"requires num_attention_heads in .*, got 0"),
        ("codegen", {"n_head": 2}, "requires a multiple of 4 for n_head, got 2"),
    ],
)  # fmt: skip
def test_what_a_family_does_not_do_is_refused_by_name(
    name: str, values: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(hf_config(name).to_dict() | values)


def test_defaults_of_a_config_that_says_little_are_hugging_faces() -> None:
    """Gemma 3's published configs leave out whatever is the library's default."""
    said = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
    }
    ours = config_of({**said, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})[1]
    theirs = config_of(hf.Gemma3TextConfig(**{k: v for k, v in said.items() if k != "model_type"}).to_dict())[
        1
    ]
    assert isinstance(ours, ModelConfig) and isinstance(theirs, ModelConfig)
    assert isinstance(ours.position, Rotary) and ours.position.scaling is not None
    differing = {k for k, v in ours.to_dict().items() if v != theirs.to_dict()[k]}
    assert differing == {"position"}
    assert (ours.kv_heads, ours.d_head, ours.window, ours.n_ctx) == (4, 256, 4096, 131_072)


@pytest.mark.parametrize("old", ["embed_out.weight", "lm_head.weight"])
def test_both_names_of_gpt_neoxs_unembedding_are_known(old: str, tmp_path: Path) -> None:
    hf_model("gpt-neox").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    head = {"embed_out.weight", "lm_head.weight"}
    save_file(
        {old if k in head else k: v for k, v in load_file(path).items()}, path, metadata={"format": "pt"}
    )
    mine = HookedTransformer.from_pretrained(tmp_path).transformer
    assert torch.equal(mine(some_tokens()), network("gpt-neox")(some_tokens()))


@pytest.mark.parametrize("how", ["live", "folder"])
def test_the_text_model_of_gemma_3_with_a_vision_tower_is_read(how: str, tmp_path: Path) -> None:
    vision = hf.SiglipVisionConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    config = hf.Gemma3Config(text_config=hf_config("gemma3"), vision_config=vision, mm_tokens_per_image=4)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = hf.Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    mine = HookedTransformer.from_pretrained(theirs if how == "live" else tmp_path).transformer
    assert mine.config == network("gemma3").config
    assert largest(mine(some_tokens()), hf_logits(theirs, some_tokens())) <= 1e-4
