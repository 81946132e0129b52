"""Mixtures of experts against Hugging Face beyond `test_parity`: routers, sinks, padding, and the names on disk."""

import functools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from interp.families.load import config_of, from_folder, from_hf_model
from interp.model import ModelConfig, MoE, Read, Rotary, Tap, Transformer
from tests.families.cases_others import CASES, EXPERTS
from tests.families.oracle import hf_logits, hf_model, some_tokens
from tests.tolerances import assert_close

EVERY = pytest.mark.parametrize("name", EXPERTS)
ONE_EACH = pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss-yarn"])


@functools.cache
def ours(name: str, dtype: torch.dtype = torch.float64) -> Transformer:
    return from_hf_model(hf_model(name, dtype))


def answers(name: str, *sites: str) -> list[Tensor]:
    tap = Tap([Read(site) for site in sites])
    ours(name)(some_tokens(), tap)
    return [tap.values[read] for read in tap.reads]


def routed(name: str) -> list[int]:
    """The layers that have experts."""
    config = ours(name).config
    assert isinstance(config.mlp, MoE)
    return [layer for layer in range(config.n_layers) if layer not in config.mlp.dense_layers]


@EVERY
def test_router_logits_equal_hugging_faces(name: str) -> None:
    with torch.no_grad():
        expected = hf_model(name, torch.float64)(some_tokens(), output_router_logits=True).router_logits
    found = answers(name, *(f"blocks.{i}.mlp.hook_router_logits" for i in routed(name)))
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine.flatten(0, 1), theirs)


@EVERY
def test_patterns_and_hidden_states_equal_hugging_faces(name: str) -> None:
    with torch.no_grad():
        out = hf_model(name, torch.float64)(some_tokens(), output_attentions=True, output_hidden_states=True)
    blocks = [f"blocks.{i}." for i in range(ours(name).config.n_layers)]
    found = answers(name, *(b + "attn.hook_pattern" for b in blocks), *(b + "hook_resid_pre" for b in blocks))
    for mine, theirs in zip(found, (*out.attentions, *out.hidden_states[:-1]), strict=True):
        assert_close(mine, theirs)


@EVERY
def test_chosen_experts_alone_have_weights_and_sum_to_the_mixture(name: str) -> None:
    sites = ("hook_expert_weights", "hook_expert_out")
    layer, kind = routed(name)[-1], ours(name).config.mlp
    assert isinstance(kind, MoE)
    weights, outs = answers(name, *(f"blocks.{layer}.mlp.{site}" for site in sites))
    assert bool(((weights != 0).sum(-1) == kind.top_k).all())
    added = answers(name, f"blocks.{layer}.hook_mlp_out")[0]
    (shared,) = answers(name, f"blocks.{layer}.mlp.hook_shared_out") if kind.shared else (0,)
    assert_close((outs.sum(2) + shared) * ours(name).config.factor("mlp_out"), added)
    if kind.renormalise:
        assert_close(weights.sum(-1), torch.full_like(weights[..., 0], kind.router.factor))
    elif kind.router.scores == "softmax":
        assert bool((weights.sum(-1) < kind.router.factor).all())


def test_a_pattern_with_sinks_sums_to_less_than_one() -> None:
    (pattern,) = answers("gpt-oss", "blocks.0.attn.hook_pattern")
    assert bool((pattern.sum(-1) < 1).all())
    assert float(pattern.sum(-1).min()) < 0.9, "some sink takes a good part"


@ONE_EACH
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_give_hugging_faces_logits(name: str, side: str) -> None:
    tokens, keep = some_tokens(), torch.arange(20) < torch.tensor([[20], [13], [6]])
    keep = keep if side == "right" else keep.flip(1)
    positions = (keep.cumsum(1) - 1).clamp_min(0)
    model = hf_model(name, torch.float64)
    expected = hf_logits(model, tokens, attention_mask=keep.long(), position_ids=positions)
    assert_close(ours(name)(tokens, keep=keep)[keep], expected[keep])


@EVERY
def test_a_saved_folder_with_its_own_names_gives_the_same_numbers(name: str, tmp_path: Path) -> None:
    """Transformers writes one matrix per expert where it keeps them fused in memory."""
    hf_model(name, torch.float64).save_pretrained(tmp_path)
    found = from_folder(tmp_path)
    for (label, mine), theirs in zip(found.named_parameters(), ours(name).parameters(), strict=True):
        assert torch.equal(mine, theirs), label


@pytest.mark.parametrize(
    ("name", "part"), [("mixtral", "block_sparse_moe.experts.4.w3"), ("qwen3-moe", "mlp.experts.4.up_proj")]
)
def test_names_on_disk_are_not_those_in_memory(name: str, part: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    hf_model(name, torch.float64).save_pretrained(tmp_path)
    stored = set(safe_open(tmp_path / "model.safetensors", "pt").keys())
    assert f"model.layers.1.{part}.weight" in stored
    assert "model.layers.1.mlp.experts.gate_up_proj" not in stored


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3-moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("gpt-oss", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0"),
        ("gpt-oss", {"layer_types": ["full_attention", "linear"]}, "layer_types"),
    ],
)
def test_what_we_do_not_do_is_refused_by_name(name: str, change: dict[str, object], message: str) -> None:
    values = json.loads(CASES[name].config().to_json_string(use_diff=False))
    config_of(values)
    with pytest.raises(ValueError, match=message):
        config_of({**values, **change})


@pytest.mark.parametrize(
    "values",
    [
        {
            "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "attention_bias": True, "head_dim": 64,
            "experts_per_token": 4, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
            "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128,
            "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
            "num_hidden_layers": 2, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
            "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "swiglu_limit": 7.0,
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                "rope_type": "yarn", "truncate": False,
            },
            "tie_word_embeddings": False, "vocab_size": 201088,
        },
        {
            "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
            "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
            "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
            "use_sliding_window": False, "vocab_size": 151936, "tie_word_embeddings": False,
        },
        {
            "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
            "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
            "tie_word_embeddings": False, "vocab_size": 32000,
        },
    ],
    ids=["gpt-oss", "qwen3-moe", "mixtral"],
)  # fmt: skip
def test_the_keys_that_published_configs_have_are_understood(values: dict[str, object]) -> None:
    config = config_of(values)[1]
    assert isinstance(config, ModelConfig) and isinstance(config.position, Rotary)
    assert config.position.base == values["rope_theta"]
    assert (config.position.scaling is None) == (values.get("rope_scaling") is None)
