"""Writes what TransformerLens 3.9.0 says an `ActivationCache` is made of: tests/compat/data/activation_cache_3_9.pt.

Run from the root of the repository with TransformerLens 3.9.0 and the root on PYTHONPATH:
`python tests/compat/oracle/make_activation_cache.py`.
The tables are read by the tests as well, so nothing is imported here that CI has not got.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Call = tuple[str, dict[str, Any]]
FILE = Path(__file__).parents[1] / "data" / "activation_cache_3_9.pt"

BASE = {
    "n_layers": 2, "d_model": 6, "n_ctx": 5, "d_head": 3, "n_heads": 2, "d_vocab": 9, "d_mlp": 4,
    "act_fn": "gelu_new", "device": "cpu",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "layer-norm": BASE | {"use_attn_result": True},
    "folded": BASE | {"normalization_type": "LNPre"},
    "grouped": BASE | {
        "normalization_type": "RMS", "positional_embedding_type": "rotary", "act_fn": "silu", "gated_mlp": True,
        "n_key_value_heads": 1, "d_head": 2, "n_heads": 3,
    },
    "attention-only": BASE | {"attn_only": True, "normalization_type": "LNPre"},
    "parallel": BASE | {"parallel_attn_mlp": True},
    "no-norm": BASE | {"normalization_type": None},
}  # fmt: skip

STACKS: list[Call] = [
    ("accumulated_resid", {}),
    ("accumulated_resid", {"layer": 1, "incl_mid": True}),
    ("accumulated_resid", {"incl_mid": True, "apply_ln": True}),
    ("accumulated_resid", {"apply_ln": True, "pos_slice": -1}),
    ("accumulated_resid", {"layer": 1, "apply_ln": True, "pos_slice": (1, 3)}),
    ("accumulated_resid", {"layer": 1, "mlp_input": True, "apply_ln": True}),
    ("accumulated_resid", {"layer": 0, "pos_slice": [0, 2]}),
    ("decompose_resid", {}),
    ("decompose_resid", {"layer": 1, "mlp_input": True}),
    ("decompose_resid", {"layer": 1, "mlp_input": True, "apply_ln": True}),
    ("decompose_resid", {"layer": -1, "apply_ln": True, "pos_slice": -1}),
    ("decompose_resid", {"mode": "attn", "pos_slice": (2,)}),
    ("decompose_resid", {"mode": "mlp", "incl_embeds": False, "apply_ln": True}),
    ("decompose_resid", {"layer": 0}),
    ("decompose_resid", {"layer": 0, "incl_embeds": False}),
    ("decompose_resid", {"layer": 2, "mlp_input": True}),
    ("stack_head_results", {}),
    ("stack_head_results", {"layer": 1, "apply_ln": True}),
    ("stack_head_results", {"apply_ln": True, "incl_remainder": True, "pos_slice": -1}),
    ("stack_head_results", {"incl_remainder": True, "pos_slice": (0, 3, 2)}),
    ("stack_head_results", {"layer": 0}),
    ("stack_neuron_results", {"layer": -1}),
    ("stack_neuron_results", {"layer": 1, "apply_ln": True, "neuron_slice": [0, 3]}),
    ("stack_neuron_results", {"layer": 2, "apply_ln": True, "incl_remainder": True, "pos_slice": -1}),
    ("stack_neuron_results", {"layer": 2, "incl_remainder": True, "project_output_onto": "one"}),
    ("stack_neuron_results", {"layer": 1, "neuron_slice": (1, 4, 2), "project_output_onto": "two"}),
    ("stack_neuron_results", {"layer": 2, "apply_ln": True, "project_output_onto": "two"}),
    ("stack_neuron_results",
     {"layer": 2, "apply_ln": True, "incl_remainder": True, "pos_slice": 1, "project_output_onto": "one"}),
    ("stack_neuron_results", {"layer": 0, "neuron_slice": [1]}),
    ("get_full_resid_decomposition", {}),
    ("get_full_resid_decomposition", {"expand_neurons": False}),
    ("get_full_resid_decomposition", {"apply_ln": True, "pos_slice": -1}),
    ("get_full_resid_decomposition", {"expand_neurons": False, "apply_ln": True}),
    ("get_full_resid_decomposition", {"layer": 1, "mlp_input": True, "apply_ln": True}),
    ("get_full_resid_decomposition", {"layer": 0, "apply_ln": True}),
    ("get_full_resid_decomposition", {"project_output_onto": "one", "pos_slice": (1,)}),
    ("get_full_resid_decomposition", {"project_output_onto": "two", "apply_ln": True}),
    ("get_full_resid_decomposition",
     {"project_output_onto": "two", "apply_ln": True, "expand_neurons": False, "pos_slice": 0}),
    ("get_full_resid_decomposition", {"project_output_onto": "one", "apply_ln": True, "layer": 1}),
]  # fmt: skip
"""Called with `return_labels=True`; "one" and "two" stand for projections of the file."""

PLAIN: list[Call] = [
    ("stack_activation", {"activation_name": "q"}),
    ("stack_activation", {"activation_name": "scale", "layer": 1, "sublayer_type": "ln1"}),
    ("stack_activation", {"activation_name": "pattern", "layer": None}),
    ("get_neuron_results", {"layer": 0}),
    ("get_neuron_results", {"layer": 1, "neuron_slice": 2}),
    ("get_neuron_results", {"layer": 1, "neuron_slice": [0, 2], "pos_slice": -1}),
    ("get_neuron_results", {"layer": 0, "project_output_onto": "one"}),
    ("get_neuron_results", {"layer": 0, "project_output_onto": "two", "pos_slice": (2,)}),
]

STACKED: list[tuple[Call, Call]] = [
    (("decompose_resid", {}), ("apply_ln_to_stack", {})),
    (("decompose_resid", {}), ("apply_ln_to_stack", {"layer": 1, "mlp_input": True, "batch_slice": 1})),
    (("decompose_resid", {}), ("apply_ln_to_stack", {"recompute_ln": True, "batch_slice": [1]})),
    (("decompose_resid", {"pos_slice": -1}), ("apply_ln_to_stack", {"recompute_ln": True, "pos_slice": -1})),
    (("decompose_resid", {"pos_slice": 1}), ("apply_ln_to_stack", {"layer": 0, "pos_slice": 1})),
    (("decompose_resid", {}), ("logit_attrs", {"tokens": 3})),
    (("decompose_resid", {}), ("logit_attrs", {"tokens": "each", "incorrect_tokens": "other"})),
    (("decompose_resid", {"pos_slice": -1}), ("logit_attrs", {"tokens": "row", "pos_slice": -1})),
    (("decompose_resid", {}), ("logit_attrs", {"tokens": 1, "incorrect_tokens": 2, "batch_slice": 0})),
    (("decompose_resid", {}), ("logit_attrs", {"tokens": "row", "incorrect_tokens": 2})),
]
"""A stack, and what is asked about it; "each", "other" (per position) and "row" stand for tokens of the file."""

Answer = dict[str, Any]


def name_of(*calls: Call) -> str:
    """A readable name of a call (and of the call it is about)."""
    return " -> ".join(
        f"{method}({', '.join(f'{k}={v}' for k, v in given.items())})" for method, given in calls
    )


def inputs() -> dict[str, Tensor]:
    """Projections and tokens that the tables name."""
    draw = torch.Generator().manual_seed(3)
    return {
        "one": torch.randn(6, generator=draw, dtype=torch.float64),
        "two": torch.randn(6, 2, generator=draw, dtype=torch.float64),
        "each": torch.randint(0, 9, (2, 4), generator=draw),
        "other": torch.randint(0, 9, (2, 4), generator=draw),
        "row": torch.tensor([4, 5]),
    }


def filled(given: dict[str, Any], named: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments with tensors for the names of tensors."""
    return {
        key: named[value]
        if key in {"project_output_onto", "tokens", "incorrect_tokens"} and value in named
        else value
        for key, value in given.items()
        if not isinstance(value, Tensor)
    }


def ask(cache: Any, call: Call, *stack: Tensor, **more: object) -> Answer:
    """What a cache answers: {"value": ..., "labels": ...} or {"error": the name of its type}."""
    try:
        value = getattr(cache, call[0])(*stack, **filled(call[1], inputs()), **more)
    except (KeyError, ValueError, AttributeError, RuntimeError, AssertionError, IndexError) as error:
        return {"error": type(error).__name__}
    stack_, labels = value if isinstance(value, tuple) else (value, [])
    return {"value": stack_.detach().clone(), "labels": labels}


def answers(cache: Any) -> dict[str, Answer]:
    """Every answer of the tables."""
    found = {name_of(call): ask(cache, call, return_labels=True) for call in STACKS}
    found |= {name_of(call): ask(cache, call) for call in PLAIN}
    for first, then in STACKED:
        found[name_of(first, then)] = ask(cache, then, ask(cache, first)["value"])
    return found


def main() -> None:
    """Build every model, run it, and write weights, activations and answers."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    torch.set_default_dtype(torch.float64)  # accumulated_bias is of the default dtype
    file: dict[str, Any] = {}
    for name, fields in MODELS.items():
        torch.manual_seed(1)
        model = HookedTransformer(HookedTransformerConfig(**fields, dtype=torch.float64)).eval()
        with torch.no_grad():
            for p in model.parameters():
                p += 0.3 * torch.randn_like(p)
            _, cache = model.run_with_cache(torch.randint(0, 9, (2, 4)))
            file[name] = {
                "weights": dict(model.named_parameters()),
                "cache": dict(cache.items()),
                "answers": answers(cache),
                "row": answers(cache.apply_slice_to_batch_dim(1)) if name == "layer-norm" else {},
                "bias": [model.accumulated_bias(1), model.accumulated_bias(1, mlp_input=True)]
                if not fields.get("attn_only") else [],
            }  # fmt: skip
            file[name]["weights"] = {k: v.detach() for k, v in file[name]["weights"].items()}
    torch.save(file, FILE)


if __name__ == "__main__":
    main()
