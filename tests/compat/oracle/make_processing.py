"""What TransformerLens 3.9 makes of random weights, step by step: writes tests/compat/data/processing_3_9.safetensors.

Run with TransformerLens 3.9.0 on the path: `PYTHONPATH=/tmp/tl39 python tests/compat/oracle/make_processing.py`.
A file of tensors `case/step/name` in float64; of a step's result only what it changed. The
configs are in the file's metadata.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.weight_processing import ProcessWeights

TARGET = Path(__file__).parents[1] / "data" / "processing_3_9.safetensors"
BASE = {
    "n_layers": 2, "d_model": 8, "n_ctx": 5, "d_head": 2, "n_heads": 4, "d_vocab": 9, "d_mlp": 7,
    "act_fn": "gelu_new", "device": "cpu",
}  # fmt: skip
ROTARY = {
    **BASE, "positional_embedding_type": "rotary", "rotary_dim": 2, "normalization_type": "RMS", "act_fn": "silu",
    "gated_mlp": True,
}  # fmt: skip
CASES = {
    "gpt2": BASE,
    "no-norm": {**BASE, "normalization_type": None},
    "attention-only": {**BASE, "attn_only": True},
    "neox": {**BASE, "positional_embedding_type": "rotary", "rotary_dim": 2, "parallel_attn_mlp": True},
    "gptj": {**BASE, "positional_embedding_type": "rotary", "rotary_dim": 2, "parallel_attn_mlp": True},
    "alibi": {**BASE, "positional_embedding_type": "alibi", "post_embedding_ln": True},
    "gated": {**BASE, "gated_mlp": True},
    "solu": {**BASE, "act_fn": "solu_ln"},
    "final-rms": {**BASE, "final_rms": True},
    "llama": {**ROTARY, "n_key_value_heads": 2},
    "gemma2": {**ROTARY, "n_key_value_heads": 2, "use_normalization_before_and_after": True},
    "gqa-layer-norm": {**BASE, "n_key_value_heads": 2},
    "experts": {**ROTARY, "num_experts": 2, "experts_per_token": 1},
    "olmo2": {**ROTARY, "original_architecture": "Olmo2ForCausalLM"},
}
BUFFERS = ("mask", "IGNORE", "rotary_sin", "rotary_cos", "alibi")


def weights(name: str, config: HookedTransformerConfig) -> dict[str, torch.Tensor]:
    """Random float64 weights, none of them 0 or 1 by default."""
    torch.manual_seed(sum(map(ord, name)))
    state = HookedTransformer(config).state_dict()
    names = [n for n in state if n.rpartition(".")[2] not in BUFFERS]
    if name == "gptj":
        names = [n for n in names if ".ln2." not in n]
    return {n: state[n].double() + 0.3 * torch.randn(state[n].shape, dtype=torch.float64) for n in names}


def results(name: str, config: HookedTransformerConfig, state: dict[str, torch.Tensor]) -> dict[str, object]:
    """The step's name -> the state after it, where TransformerLens does the step."""

    def copy() -> dict[str, torch.Tensor]:
        return {n: w.clone() for n, w in state.items()}

    p = ProcessWeights
    found = {
        "fold": p.fold_layer_norm(copy(), config),
        "fold_betas": p.fold_layer_norm(copy(), config, True, False),
        "fold_gammas": p.fold_layer_norm(copy(), config, False, False),
        "fold_centred": p.fold_layer_norm(copy(), config, False, True),
        "center_unembed": p.center_unembed(copy(), config),
        "fold_value_biases": p.fold_value_biases(copy(), config),
        "all": p.process_weights(copy(), config),
    }
    if name != "experts":  # it centres an expert along d_mlp
        found["center_writing_weights"] = p.center_writing_weights(copy(), config)
    if config.positional_embedding_type != "rotary" and config.n_key_value_heads is None:
        found["refactor"] = p.refactor_factored_attn_matrices(copy(), config)
    return found


def main() -> None:
    """Write the file."""
    tensors, configs = {}, {}
    for name, fields in CASES.items():
        config = HookedTransformerConfig(**fields, dtype=torch.float64, init_weights=True)
        configs[name] = {**fields, "n_key_value_heads": fields.get("n_key_value_heads")}
        state = weights(name, config)
        tensors |= {f"{name}/state/{n}": w for n, w in state.items()}
        for step, after in results(name, config, state).items():
            changed = {n: w for n, w in after.items() if n not in state or not torch.equal(w, state[n])}
            tensors |= {f"{name}/{step}/{n}": w.contiguous() for n, w in changed.items()}
    TARGET.unlink(missing_ok=True)
    save_file({n: w.clone() for n, w in tensors.items()}, TARGET, metadata={"configs": json.dumps(configs)})


if __name__ == "__main__":
    main()
