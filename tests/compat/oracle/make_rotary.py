"""Writes what TransformerLens 3.9.0 computes under each rule for rotary positions: data/rotary_3_9.pt.

Run from the root of the repository with TransformerLens 3.9.0 and the root on PYTHONPATH:
`python tests/compat/oracle/make_rotary.py`. The table is read by the tests as well.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = Path(__file__).parents[1] / "data" / "rotary_3_9.pt"

BASE: dict[str, Any] = {
    "n_layers": 2, "d_model": 8, "n_ctx": 24, "d_head": 8, "n_heads": 2, "d_vocab": 7, "d_mlp": 6, "act_fn": "gelu_new",
    "device": "cpu", "dtype": torch.float64, "seed": 3, "positional_embedding_type": "rotary", "rotary_dim": 6,
}  # fmt: skip
YARN = BASE | {
    "use_yarn_rope": True, "yarn_factor": 4.0, "yarn_attention_factor": 1.25, "yarn_beta_fast": 4.0,
    "yarn_beta_slow": 1.0, "yarn_original_max_position_embeddings": 6,
}  # fmt: skip
LOCAL = {"use_local_attn": True, "window_size": 5, "attn_types": ["global", "local"]}
CASES: dict[str, dict[str, Any]] = {
    "plain": BASE,
    "divided": BASE | {"rotary_scaling_factor": 4.0, "rotary_base_local": 100} | LOCAL,
    "by parts": BASE | {"use_NTK_by_parts_rope": True, "NTK_by_parts_factor": 8.0, "NTK_original_ctx_len": 6},
    "yarn": YARN,
    "yarn, not cut to whole pairs": YARN | {"yarn_truncate": False},
    "yarn in global layers": YARN | {"yarn_global_attn_only": True} | LOCAL,
    "dynamic ntk": BASE | {"use_dynamic_ntk_rope": True, "train_seq_length": 6},
    "log n": BASE | {"use_logn_attn": True, "train_seq_length": 6},
    "qwen": BASE | {"use_logn_attn": True, "use_dynamic_ntk_rope": True, "train_seq_length": 6},
}  # fmt: skip
TOKENS = torch.arange(40).reshape(2, 20) ** 2 % 7
MASK = torch.ones(2, 20, dtype=torch.long)
MASK[0, :3] = 0
CUT = 5
"""Tokens of the first of the two passes with a cache."""


def case(settings: dict[str, Any], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits of a model in eval mode: of all tokens, under a mask, and of the rest after a cache."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    model = HookedTransformer(HookedTransformerConfig(**settings)).eval()
    with torch.no_grad():
        if not state:
            state |= {
                name: weight + 0.5 * torch.randn_like(weight) for name, weight in model.named_parameters()
            }
        model.load_state_dict(state, strict=False)
        cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", len(TOKENS))
        full = torch.ones_like(MASK)
        model(TOKENS[:, :CUT], past_kv_cache=cache, attention_mask=full[:, :CUT])
        return {
            "logits": model(TOKENS),
            "masked": model(TOKENS, attention_mask=MASK),
            "after": model(TOKENS[:, CUT:], past_kv_cache=cache, attention_mask=full[:, CUT:]),
        }


def main() -> None:
    """Write the file."""
    torch.manual_seed(0)
    state: dict[str, Tensor] = {}
    found = {name: case(settings, state) for name, settings in CASES.items()}
    torch.save({"state": state, **found}, FILE)


if __name__ == "__main__":
    main()
