"""Questions as a browser would send them, and hooks that should give the same numbers: slow loops, cell by cell."""

import functools
import json
from collections.abc import Callable
from threading import Event

import torch
from torch import Tensor

from interp import HookedTransformer
from interp.serve.answers import look
from interp.serve.asks import Look, parsed
from interp.serve.session import Session

PROMPT = "The cat sat on the mat and the dog"
SECOND = "The dog sat on the cat and the mat"
Hook = tuple[str, Callable[[Tensor, object], Tensor]]


def body(**changes: object) -> bytes:
    """A question about the prompt, with these keys changed or added."""
    return json.dumps({"tab": "t", "prompt": PROMPT} | changes).encode()


def asked(session: Session, **changes: object) -> dict[str, object]:
    """What the page would be told."""
    ask = parsed(Look, body(**changes))
    return look(session, ask, session.pair(ask, Event()))


def hooks_of(edits: list[dict[str, object]], model: HookedTransformer, second: str) -> list[Hook]:
    """The oracle: each edit as a loop over positions, written apart from what is tested."""
    return [_hook(edit, _cache_of(model, second)) for edit in edits]


@functools.cache
def _cache_of(model: HookedTransformer, text: str) -> object:
    return model.run_with_cache(text)[1]


def _hook(edit: dict, cache: object) -> Hook:
    part, layer = edit["part"], edit["layer"]
    if part == "edge":
        return f"blocks.{layer}.attn.hook_pattern", _cutting(edit)
    site = {
        "head": "attn.hook_z",
        "mlp": "hook_mlp_out",
        "neuron": "mlp.hook_post",
        "stream": "hook_resid_pre",
    }[part]
    name = f"blocks.{layer}.{site}"
    unit = edit.get("head", edit.get("neuron"))
    change = edit.get("change", {"to": "second"})

    def hook(value: Tensor, hook: object) -> Tensor:
        new = value.clone()
        n = value.shape[1]
        for pos in [edit["position"]] if part == "stream" else edit.get("positions") or range(n):
            old = value[0, pos] if unit is None else value[0, pos, unit]
            there = cache[name][0, pos % cache[name].shape[1]]
            there = there if unit is None else there[unit]
            every = [value[0, i] if unit is None else value[0, i, unit] for i in range(n)]
            put = {
                "zero": torch.zeros_like(old), "mean": sum(every) / n, "second": there,
                "scale": old * change.get("factor", 0), "value": torch.full_like(old, change.get("value", 0)),
            }[change["to"]]  # fmt: skip
            if unit is None:
                new[0, pos] = put
            else:
                new[0, pos, unit] = put
        return new

    return name, hook


def _cutting(edit: dict) -> Callable[[Tensor, object], Tensor]:
    def hook(pattern: Tensor, hook: object) -> Tensor:
        new = pattern.clone()
        row = [float(x) for x in pattern[0, edit["head"], edit["query"]]]
        rest = sum(row) - row[edit["key"]]
        for key, weight in enumerate(row):
            kept = 0.0 if key == edit["key"] else weight
            new[0, edit["head"], edit["query"], key] = (
                kept * sum(row) / rest if edit.get("renormalise") else kept
            )
        return new

    return hook
