"""Mixtures of experts, encoders, and encoder-decoders of Hugging Face, and the options of each that we support.

Two layers a stack (the decoder of some has three, so that no stack can stand in for the other), 24 wide.
"""

import transformers as hf

from tests.families.case import N_CTX, Case, Options

# --- mixtures of experts ------------------------------------------------------------------------------------------

_DECODER: Options = {
    "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "intermediate_size": 14, "max_position_embeddings": N_CTX, "num_local_experts": 5, "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}  # fmt: skip
YARN: Options = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 16,
}  # fmt: skip
"""Of its five frequencies one is kept, two are mixed and two are divided."""
_MIXTRAL = Case(hf.MixtralConfig, hf.MixtralForCausalLM, _DECODER)
_QWEN = Case(hf.Qwen3MoeConfig, hf.Qwen3MoeForCausalLM, {
    **{k: v for k, v in _DECODER.items() if k != "num_local_experts"}, "num_experts": 5, "moe_intermediate_size": 14,
})  # fmt: skip
_GRANITE = Case(hf.GraniteMoeConfig, hf.GraniteMoeForCausalLM, {
    **{k: v for k, v in _DECODER.items() if k != "head_dim"}, "embedding_multiplier": 1.7, "logits_scaling": 0.6,
    "residual_multiplier": 0.4, "attention_multiplier": 0.3,
})  # fmt: skip
_WITHOUT = ("num_local_experts", "head_dim", "num_key_value_heads")
_ROUTED: Options = {
    **{k: v for k, v in _DECODER.items() if k not in _WITHOUT}, "num_hidden_layers": 3, "n_routed_experts": 6,
    "moe_intermediate_size": 10, "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
}  # fmt: skip
_LATENT: Options = {
    **_ROUTED, "kv_lora_rank": 12, "q_lora_rank": 14, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
_V2 = Case(hf.DeepseekV2Config, hf.DeepseekV2ForCausalLM, _LATENT)
_V3 = Case(hf.DeepseekV3Config, hf.DeepseekV3ForCausalLM, {**_LATENT, "n_group": 3, "topk_group": 2})
_GLM = Case(hf.Glm4MoeConfig, hf.Glm4MoeForCausalLM, {**_ROUTED, "num_key_value_heads": 2, "head_dim": 8})
_LLAMA4 = Case(hf.Llama4TextConfig, hf.Llama4ForCausalLM, {
    **_DECODER, "num_hidden_layers": 4, "head_dim": 8, "intermediate_size_mlp": 18, "attention_chunk_size": 6,
    "interleave_moe_layer_step": 2,
})  # fmt: skip
_GPT_OSS = Case(hf.GptOssConfig, hf.GptOssForCausalLM, {**_DECODER, "sliding_window": 6})
EXPERTS: dict[str, Case] = {
    "mixtral": _MIXTRAL,
    "mixtral-mqa": _MIXTRAL.but(num_key_value_heads=1),
    "mixtral-window": _MIXTRAL.but(sliding_window=6),
    "mixtral-tied": _MIXTRAL.but(tie_word_embeddings=True),
    "mixtral-one-expert": _MIXTRAL.but(num_experts_per_tok=1),
    "mixtral-all-experts": _MIXTRAL.but(num_experts_per_tok=5),
    "qwen3-moe": _QWEN,
    "qwen3-moe-renormalised": _QWEN.but(norm_topk_prob=True),
    "qwen3-moe-bias": _QWEN.but(attention_bias=True),
    "qwen3-moe-window": _QWEN.but(use_sliding_window=True, sliding_window=6),
    "qwen3-moe-tied": _QWEN.but(tie_word_embeddings=True, num_key_value_heads=1),
    "granite-moe": _GRANITE,
    "granite-moe-bias-tied": _GRANITE.but(attention_bias=True, tie_word_embeddings=True),
    "deepseek-v2": _V2,
    "deepseek-v2-grouped": _V2.but(
        topk_method="group_limited_greedy", n_group=3, topk_group=2, q_lora_rank=None
    ),
    "deepseek-v2-yarn": _V2.but(
        rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}, attention_bias=True
    ),
    "deepseek-v3": _V3,
    "deepseek-v3-yarn": _V3.but(
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        attention_bias=True,
        norm_topk_prob=False,
    ),
    "deepseek-v3-halves": _V3.but(
        rope_interleave=False,
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        tie_word_embeddings=True,
    ),
    "glm4-moe": _GLM,
    "glm4-moe-qk-norm": _GLM.but(
        use_qk_norm=True,
        attention_bias=True,
        n_group=2,
        topk_group=1,
        norm_topk_prob=False,
        first_k_dense_replace=2,
    ),
    "llama4": _LLAMA4,
    "llama4-tuned": _LLAMA4.but(
        floor_scale=3, attn_scale=0.7, no_rope_layers=[1, 0, 0, 1], moe_layers=[0, 3]
    ),
    "llama4-one-expert": _LLAMA4.but(
        num_experts_per_tok=1,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        interleave_moe_layer_step=1,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters=YARN,
    ),
    "gpt-oss": _GPT_OSS,
    "gpt-oss-yarn": _GPT_OSS.but(rope_parameters=YARN),
    "gpt-oss-no-rule": _GPT_OSS.but(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "gpt-oss-clamped": _GPT_OSS.but(swiglu_limit=0.3),
    "gpt-oss-layers": _GPT_OSS.but(layer_types=["full_attention", "sliding_attention"]),
    "gpt-oss-no-window": _GPT_OSS.but(layer_types=["full_attention", "full_attention"]),
    "gpt-oss-mqa": _GPT_OSS.but(num_key_value_heads=1, tie_word_embeddings=True),
}

# --- encoders -----------------------------------------------------------------------------------------------------

_ENCODER: Options = {
    "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 36,
    "max_position_embeddings": N_CTX, "type_vocab_size": 3,
}  # fmt: skip
_BERT = Case(hf.BertConfig, hf.BertForMaskedLM, _ENCODER)
_ROBERTA = Case(hf.RobertaConfig, hf.RobertaForMaskedLM, {**_ENCODER, "pad_token_id": 1})
_DISTILBERT = Case(
    hf.DistilBertConfig, hf.DistilBertForMaskedLM,
    {"n_layers": 2, "dim": 24, "n_heads": 4, "hidden_dim": 36, "max_position_embeddings": N_CTX},
)  # fmt: skip
ENCODERS: dict[str, Case] = {
    "bert": _BERT,
    "bert-no-head": Case(hf.BertConfig, hf.BertModel, _ENCODER),
    "bert-pretraining": Case(hf.BertConfig, hf.BertForPreTraining, _ENCODER),
    "bert-classifier": Case(hf.BertConfig, hf.BertForSequenceClassification, _ENCODER),
    "bert-untied": _BERT.but(tie_word_embeddings=False),
    "bert-relu": _BERT.but(hidden_act="relu"),
    "bert-eps": _BERT.but(layer_norm_eps=0.1),
    "roberta": _ROBERTA,
    "roberta-no-head": Case(hf.RobertaConfig, hf.RobertaModel, {**_ENCODER, "pad_token_id": 1}),
    "roberta-padding-id": _ROBERTA.but(pad_token_id=4),
    "roberta-relu": _ROBERTA.but(hidden_act="relu"),
    "roberta-untied": _ROBERTA.but(tie_word_embeddings=False),
    "xlm-roberta": Case(hf.XLMRobertaConfig, hf.XLMRobertaForMaskedLM, {**_ENCODER, "pad_token_id": 1}),
    "camembert": Case(hf.CamembertConfig, hf.CamembertForMaskedLM, {**_ENCODER, "pad_token_id": 1}),
    "distilbert": _DISTILBERT,
    "distilbert-no-head": Case(hf.DistilBertConfig, hf.DistilBertModel, _DISTILBERT.options),
    "distilbert-sinusoids": _DISTILBERT.but(sinusoidal_pos_embds=True),
    "distilbert-relu": _DISTILBERT.but(activation="relu"),
    "distilbert-untied": _DISTILBERT.but(tie_word_embeddings=False),
}

# --- encoder-decoders ---------------------------------------------------------------------------------------------

_T5 = Case(hf.T5Config, hf.T5ForConditionalGeneration, {
    "num_layers": 2, "num_decoder_layers": 3, "d_model": 24, "d_kv": 10, "num_heads": 4, "d_ff": 36,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0,
})  # fmt: skip
_STACKS: Options = {
    "encoder_layers": 2, "decoder_layers": 3, "d_model": 24, "encoder_attention_heads": 4, "encoder_ffn_dim": 36,
    "decoder_attention_heads": 3, "decoder_ffn_dim": 30, "max_position_embeddings": N_CTX,
    "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_BART = Case(hf.BartConfig, hf.BartForConditionalGeneration, _STACKS)
_MARIAN = Case(
    hf.MarianConfig, hf.MarianMTModel, {**_STACKS, "activation_function": "swish", "scale_embedding": True}
)
ENCODER_DECODERS: dict[str, Case] = {
    "t5": _T5,
    "t5-gated": _T5.but(feed_forward_proj="gated-gelu"),
    "t5-v1.1": _T5.but(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "t5-gated-silu": _T5.but(feed_forward_proj="gated-silu"),
    "t5-buckets": _T5.but(relative_attention_num_buckets=6, relative_attention_max_distance=40),
    "t5-eps": _T5.but(layer_norm_epsilon=0.1),
    "bart": _BART,
    "bart-scaled": _BART.but(scale_embedding=True),
    "bart-relu": _BART.but(activation_function="relu"),
    "bart-untied": _BART.but(tie_word_embeddings=False),
    "marian": _MARIAN,
    "marian-unscaled": _MARIAN.but(scale_embedding=False, activation_function="gelu"),
    "marian-two-vocabularies": _MARIAN.but(share_encoder_decoder_embeddings=False, decoder_vocab_size=41),
    "marian-untied": _MARIAN.but(tie_word_embeddings=False),
    "marian-all-apart": _MARIAN.but(share_encoder_decoder_embeddings=False, tie_word_embeddings=False),
}

CASES: dict[str, Case] = {**EXPERTS, **ENCODERS, **ENCODER_DECODERS}
