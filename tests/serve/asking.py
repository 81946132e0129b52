"""Questions as a browser would send them, and hooks that should give the same numbers: slow loops, cell by cell."""

import base64
import functools
import json
import re
from collections.abc import Callable
from itertools import islice
from threading import Event

import numpy as np
import torch
from torch import Tensor

from interp import HookedTransformer
from interp.serve.answers import look, steered
from interp.serve.asks import Look, RandomDirections, parsed
from interp.serve.session import Session

PROMPT = "The cat sat on the mat and the dog"
SECOND = "The dog sat on the cat and the mat"
Hook = tuple[str, Callable[[Tensor, object], Tensor]]


def body(**changes: object) -> bytes:
    """A question about the prompt, with these keys changed or added."""
    return json.dumps({"tab": "t", "prompt": PROMPT} | changes).encode()


def asked(session: Session, **changes: object) -> dict[str, object]:
    """What the page would be told."""
    ask = parsed(Look, body(**{"scores": True, "moved": True} | changes))
    found = look(session, ask, session.pair(ask, Event()), Event())
    return found | {"pattern": None if found["pattern"] is None else unpacked(found["pattern"])}


def beside_random(session: Session, **changes: object) -> dict[str, object]:
    """What the page would be told of random directions."""
    ask = parsed(RandomDirections, body(**changes))
    pair = session.pair(ask, Event())
    return steered(session, pair, session.random(pair, Event()), Event())


def unpacked(pattern: dict[str, object]) -> dict[str, object]:
    """The pattern of a head with a list for each query, as the page's script reads it."""
    return pattern | {run: _rows(pattern[run]) for run in ("clean", "edited")}


def _rows(text: str) -> list[list[float]]:
    weights = iter(np.frombuffer(base64.b64decode(text), "<f4").tolist())
    rows = iter(range(1, 10**6))
    found: list[list[float]] = []
    while row := list(islice(weights, next(rows))):
        found.append(row)
    return found


def hooks_of(
    edits: list[dict[str, object]],
    model: HookedTransformer,
    second: str,
    prompt: str = PROMPT,
    answer: tuple[int, ...] = (),
) -> list[Hook]:
    """The oracle: each edit as a loop over positions, written apart from what is tested.

    Both prompts are followed by the answer's tokens but the last, which no mean is taken over.
    """
    clean, other = (_cache_of(model, text, answer) for text in (prompt, second))
    return [
        _hook(edit, _cache_of(model, prompt, ()) if edit["change"] == "mean" else clean, other)
        for edit in edits
    ]


def row_of(model: HookedTransformer, prompt: str, answer: tuple[int, ...]) -> Tensor:
    """The ids of a prompt and of an answer's tokens but the last."""
    return torch.tensor([[*model.to_tokens(prompt)[0].tolist(), *answer[:-1]]])


@functools.cache
def _cache_of(model: HookedTransformer, text: str, answer: tuple[int, ...]) -> object:
    return model.run_with_cache(row_of(model, text, answer))[1]


SITES = {"H": "attn.hook_z", "N": "mlp.hook_post", ".mlp": "hook_mlp_out", ".resid": "hook_resid_pre"}


def _hook(edit: dict, clean: object, second: object) -> Hook:
    layer, kind, unit = re.fullmatch(r"L(\d+)(\.\w+|[HN])(\d+)?", edit["where"]).groups()
    if kind in (".pattern", ".attn_scores"):
        return f"blocks.{layer}.attn.hook_pattern", _cutting(edit["at"], kind == ".attn_scores")
    name = f"blocks.{layer}.{SITES[kind]}"
    at = edit.get("at", {}).get("pos")

    def cell(value: Tensor, pos: int) -> Tensor:
        return value[0, pos] if unit is None else value[0, pos, int(unit)]

    def hook(value: Tensor, hook: object) -> Tensor:
        new = value.clone()
        n, length = value.shape[1], clean[name].shape[1]
        for pos in range(n) if at is None else [at] if isinstance(at, int) else at:
            old = cell(value, pos)
            if edit["change"] == "resample" and pos >= length:
                continue
            if edit["change"] == "zero":
                put = torch.zeros_like(old)
            elif edit["change"] == "mean":
                put = sum(cell(clean[name], i) for i in range(length)) / length
            elif edit["change"] == "scale":
                put = old * edit["factor"]
            elif edit["change"] == "set":
                put = torch.full_like(old, edit["values"])
            else:
                put = cell(second[name], pos)
            if unit is None:
                new[0, pos] = put
            else:
                new[0, pos, int(unit)] = put
        return new

    return name, hook


def _cutting(at: dict, renormalise: bool) -> Callable[[Tensor, object], Tensor]:
    def hook(pattern: Tensor, hook: object) -> Tensor:
        new = pattern.clone()
        row = [float(x) for x in pattern[0, at["head"], at["query"]]]
        rest = 1.0 - row[at["key"]]  # a sink's share, which is in no pattern, grows like those of the keys
        for key, weight in enumerate(row):
            kept = 0.0 if key == at["key"] else weight
            new[0, at["head"], at["query"], key] = kept / rest if renormalise else kept
        return new

    return hook
