"""Small random HookedTransformers of TransformerLens 3.9 with all they compute.

Run where TransformerLens 3.9 is installed: `python tests/compat/oracle/make_core.py`; it writes
`tests/compat/data/core_3_9.safetensors.gz`.
"""

import gzip
import json
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

BASE = {
    "n_layers": 2, "d_model": 4, "n_ctx": 8, "d_head": 2, "n_heads": 2, "d_vocab": 7, "d_mlp": 6, "act_fn": "gelu_new",
    "device": "cpu", "dtype": torch.float64, "seed": 3,
}  # fmt: skip
ROTARY = BASE | {"d_head": 4, "positional_embedding_type": "rotary"}
LLAMA = BASE | {
    "positional_embedding_type": "rotary", "normalization_type": "RMS", "act_fn": "silu", "gated_mlp": True,
    "n_heads": 4, "n_key_value_heads": 2, "rotary_dim": 2,
}  # fmt: skip
CASES = {
    "ln": BASE,
    "llama": LLAMA,
    "ungrouped": LLAMA | {"ungroup_grouped_query_attention": True},
    "neox": ROTARY | {"rotary_dim": 2, "parallel_attn_mlp": True, "act_fn": "gelu"},
    "gptj": ROTARY | {"rotary_adjacent_pairs": True, "act_fn": "gelu_fast"},
    "attn_only": BASE | {"attn_only": True, "d_vocab_out": 5},
    "lnpre": BASE | {"normalization_type": "LNPre", "act_fn": "relu", "final_rms": False},
    "none": BASE | {"normalization_type": None, "act_fn": "gelu_new"},
    "bloom": BASE | {"positional_embedding_type": "alibi", "post_embedding_ln": True},
    "local": BASE | {"use_local_attn": True, "window_size": 3, "attn_types": ["global", "local"]},
    "gemma": LLAMA | {
        "use_normalization_before_and_after": True, "attn_scores_soft_cap": 2.0, "output_logits_soft_cap": 3.0,
        "use_qk_norm": True, "rotary_base_local": 100, "use_local_attn": True, "window_size": 3,
        "attn_types": ["local", "global"],
    },
    "olmo2": LLAMA | {"original_architecture": "Olmo2ForCausalLM", "n_heads": 2, "n_key_value_heads": 1},
    "solu": BASE | {"act_fn": "solu_ln"},
    "shortformer": BASE | {"positional_embedding_type": "shortformer"},
    "sinks": BASE | {"use_attention_sinks": True},
    "split": BASE | {"use_split_qkv_input": True, "use_attn_result": True, "use_hook_mlp_in": True},
    "attn_in": BASE | {"use_attn_in": True},
    "moe": LLAMA | {"num_experts": 3, "experts_per_token": 2, "norm_topk_prob": True, "dtype": torch.float32},
}  # fmt: skip
BUFFERS = ("mask", "IGNORE", "rotary_sin", "rotary_cos")
TOKENS = torch.tensor([[1, 4, 2, 6, 0], [5, 5, 3, 1, 2]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def case(settings: dict[str, object]) -> tuple[dict[str, Tensor], dict[str, object]]:
    """What one model computes, and what it says of itself."""
    model = HookedTransformer(HookedTransformerConfig(**settings))
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, dtype=p.dtype)
    tokens = TOKENS % model.cfg.d_vocab_out
    loss, cache = model.run_with_cache(tokens, return_type="loss", incl_bwd=True, return_cache_object=False)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        logits = model(tokens)
        masked = model(tokens, attention_mask=MASK)
        masked_loss = model(tokens, attention_mask=MASK, return_type="loss")
        middle = model(tokens, stop_at_layer=1)
        late = model(middle, start_at_layer=1)
        per_token = model(tokens, return_type="loss", loss_per_token=True)
        later = logits
        if not model.cfg.ungroup_grouped_query_attention:  # which their cache cannot do
            past = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 2)
            model(tokens[:, :3], past_kv_cache=past, attention_mask=MASK[:, :3])
            later = model(tokens[:, 3:], past_kv_cache=past, attention_mask=torch.ones(2, 2, dtype=torch.int))
    tensors = {
        "tokens": tokens, "mask": MASK, "loss": loss, "logits": logits, "masked": masked, "masked_loss": masked_loss,
        "middle": middle, "late": late, "per_token": per_token, "later": later,
    }  # fmt: skip
    groups = {
        "first": {n: w for n, w in first.items() if "blocks.1.attn.W_" in n},
        "state": {n: w for n, w in model.state_dict().items() if not n.endswith(BUFFERS)},
        "cache": cache,
        "grads": grads,
    }
    for group, found in groups.items():
        tensors |= {f"{group}/{n}": w for n, w in found.items()}
    said = {
        "config": {k: v for k, v in settings.items() if k != "dtype"}, "double": model.cfg.dtype == torch.float64,
        "keys": list(model.state_dict()), "hooks": list(model.hook_dict), "modules": list(model.mod_dict),
        "n_params": model.cfg.n_params, "scale": float(model.cfg.attn_scale), "order": list(cache),
    }  # fmt: skip
    return tensors, said


def main() -> None:
    """Write every case."""
    tensors, said = {}, {}
    for name, settings in CASES.items():
        found, said[name] = case(settings)
        tensors |= {f"{name}/{n}": w.detach().contiguous().clone() for n, w in found.items()}
    content = gzip.compress(save(tensors, {"said": json.dumps(said)}), mtime=0)
    Path("tests/compat/data/core_3_9.safetensors.gz").write_bytes(content)


if __name__ == "__main__":
    assert Path("tests/compat/data").is_dir(), "run it in the root of the repository"
    main()
