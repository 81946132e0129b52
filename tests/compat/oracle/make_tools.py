"""Writes `tests/compat/data/tools_3_9.pt`: what TransformerLens 3.9.0 says of patching, heads, and the small tools.

Run it with that version on the path: `PYTHONPATH=<transformer-lens 3.9.0> python tests/compat/oracle/make_tools.py`.
"""

import contextlib
import io
import itertools
import json
import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor

warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
from transformer_lens import (  # noqa: E402
    FactoredMatrix,
    HookedTransformer,
    HookedTransformerConfig,
    head_detector,
    patching,
    utilities,
)

OUT = Path(__file__).parents[1] / "data" / "tools_3_9.pt"
BASE = {
    "n_layers": 2, "d_model": 12, "n_ctx": 16, "d_head": 4, "n_heads": 4, "d_vocab": 17, "d_mlp": 16,
    "act_fn": "gelu_new",
    "device": "cpu", "dtype": torch.float64, "seed": 0,
}  # fmt: skip
GQA = dict(
    BASE, positional_embedding_type="rotary", normalization_type="RMS", act_fn="silu", gated_mlp=True,
    n_key_value_heads=2,
)  # fmt: skip
ATTENTION_ONLY = dict(BASE, attn_only=True, normalization_type="LNPre")
SWEEPS = [name for name in dir(patching) if name.startswith("get_act_patch_")]


def model_of(settings: dict[str, object]) -> HookedTransformer:
    """A random model whose biases are not zero."""
    torch.manual_seed(1)
    model = HookedTransformer(HookedTransformerConfig(**settings)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.25 * torch.randn(p.shape, dtype=p.dtype)
    return model


def metric(logits: Tensor) -> Tensor:
    """A difference of logits at the last token, mean over the batch."""
    return (logits[:, -1, 3] - logits[:, -1, 5]).mean()


def everywhere(logits: Tensor) -> Tensor:
    """One that looks at every position and mixes the rows."""
    return logits.softmax(-1).square().sum() / logits[0].abs().max()


def sweeps(settings: dict[str, object]) -> dict[str, object]:
    """A model, two batches, and every ready sweep of one into the other."""
    torch.set_default_dtype(torch.float64)
    model = model_of(settings)
    clean = torch.randint(0, 17, (3, 6), generator=torch.Generator().manual_seed(0))
    corrupted = torch.randint(0, 17, (3, 6), generator=torch.Generator().manual_seed(1))
    corrupted[:, 0] = clean[:, 0]
    _, cache = model.run_with_cache(clean)
    found = {}
    for name in SWEEPS:
        if settings.get("attn_only") and ("mlp" in name or "mid" in name or "block" in name):
            continue
        found[name] = getattr(patching, name)(model, corrupted, cache, metric)
    everywhere_z = patching.get_act_patch_attn_head_out_by_pos(model, corrupted, cache, everywhere)
    torch.set_default_dtype(torch.float32)
    return {
        "state": model.state_dict(), "cfg": settings, "clean": clean, "corrupted": corrupted, "sweeps": found,
        "everywhere": everywhere_z,
    }  # fmt: skip


def heads() -> dict[str, object]:
    """Scores of the detector for every kind of head and all options, on two prompts given as rows of ids."""
    model = model_of(BASE)
    prompts = {"a": torch.tensor([[1, 4, 7, 2, 4, 7, 9]]), "b": torch.tensor([[1, 3, 3, 5, 6, 5, 6, 5]])}
    model.to_tokens = lambda seq: prompts[seq] if isinstance(seq, str) else prompts["a"]
    scores = {}
    for kind, measure, bos, current in itertools.product(
        head_detector.HEAD_NAMES, ("mul", "abs"), (False, True), (False, True)
    ):
        options = {"error_measure": measure, "exclude_bos": bos, "exclude_current_token": current}
        for seq in ("a", "b", ["a", "b"]):
            scores[kind, measure, bos, current, str(seq)] = head_detector.detect_head(
                model, seq, kind, **options
            )
    some = head_detector.detect_head(model, "a", "induction_head", [(0, 1), (1, 3)])
    return {
        "state": model.state_dict(), "cfg": BASE, "prompts": prompts, "scores": scores, "some": some,
        "patterns": {
            kind: getattr(head_detector, f"get_{kind}_detection_pattern")(prompts["b"])
            for kind in head_detector.HEAD_NAMES
        },
    }  # fmt: skip


def names() -> dict[str, str]:
    """`get_act_name` of words, layers and parts."""
    words = [
        "embed",
        "pos_embed",
        "resid_pre",
        "resid_post",
        "attn_out",
        "mlp_out",
        "q",
        "k",
        "v",
        "z",
        "result",
        "rot_q",
        "rot_k",
        "pattern",
        "attn",
        "attn_scores",
        "attn_logits",
        "key",
        "query",
        "value",
        "pre",
        "mid",
        "post",
        "pre_linear",
        "mlp_pre",
        "mlp_post",
        "scale",
        "normalized",
        "tokens",
        "k6",
        "pre5",
        "scale4ln1",
        "z2",
        "normalized27ln2",
        "resid_pre3",
        "hook_embed",
        "blocks.0.attn.hook_q",
        "ln_final.hook_scale",
    ]
    parts = (None, "a", "m", "b", "block", "attention", "ln1", "ln2", "mlp")
    cases = itertools.product(words, (None, 0, 3), parts)
    return {json.dumps(case): utilities.get_act_name(*case) for case in cases}


def printed(function: object, *args: object, **kwargs: object) -> str:
    """What a call writes to stdout."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        function(*args, **kwargs)
    return out.getvalue()


def tools() -> dict[str, object]:
    """Small functions on random input, seeded alike on both sides."""
    make = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 5, 11, generator=make, dtype=torch.float64) * 3
    tokens = torch.randint(0, 11, (3, 5), generator=make)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    samples = {}
    for options in (
        {}, {"top_k": 3}, {"top_k": 99}, {"top_p": 0.6}, {"temperature": 0.0}, {"temperature": 0.5},
        {"freq_penalty": 1.5}, {"repetition_penalty": 1.7}, {"repetition_penalty": 3.0, "temperature": 0.0},
        {"top_k": 4, "temperature": 2.0, "freq_penalty": 0.3, "repetition_penalty": 1.2},
    ):  # fmt: skip
        torch.manual_seed(7)
        draws = [utilities.sample_logits(logits[:, 0], tokens=tokens, **options) for _ in range(20)]
        samples[json.dumps(options)] = torch.stack(draws)
    drawn = {}
    for name in ("xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal"):
        for shape in ((5,), (4, 6), (2, 4, 6)):
            torch.manual_seed(5)
            param = torch.empty(shape, dtype=torch.float64)
            drawn[name, shape] = getattr(utilities, f"init_{name}_")(param, gain=1.3)
    left = FactoredMatrix(torch.randn(2, 5, 2, generator=make), torch.randn(2, 2, 5, generator=make))
    right = FactoredMatrix(torch.randn(3, 4, 5, 2, generator=make), torch.randn(3, 4, 2, 5, generator=make))
    one, other = torch.randn(4, 4, generator=make), torch.randn(4, 4, generator=make)
    return {
        "logits": logits, "tokens": tokens, "mask": mask, "samples": samples, "init": drawn,
        "loss": [
            utilities.lm_cross_entropy_loss(logits, tokens, attention_mask=m, per_token=each)
            for m in (None, mask, mask.bool()) for each in (False, True)
        ],
        "accuracy": [utilities.lm_accuracy(logits, tokens, per_token=each) for each in (False, True)],
        "left": (left.A, left.B), "right": (right.A, right.B),
        "composition": utilities.composition_scores(left, right),
        "activations": {n: getattr(utilities, n)(logits) for n in ("gelu_new", "gelu_fast", "solu")},
        "positions": utilities.get_offset_position_ids(2, mask),
        "structure": {
            verbose: [printed(utilities.check_structure, one, b, verbose=verbose) for b in (one, other, one.T)]
            for verbose in (False, True)
        },
        "matrices": (one, other),
    }  # fmt: skip


if __name__ == "__main__":
    found = {
        "sweeps": {"ln": sweeps(BASE), "gqa": sweeps(GQA), "attention only": sweeps(ATTENTION_ONLY)},
        "heads": heads(),
        "names": names(),
        "tools": tools(),
    }
    torch.save(found, OUT)
