"""The coordinate `role` of results about chats: whose message each token of the coordinate `token` belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Shaped

from interp.data.batch import Batch
from interp.data.chats import is_chats
from interp.data.stream import GivenBatches, PromptBatches
from interp.data.text import Text

if TYPE_CHECKING:
    import xarray as xr

ROLE = "role"
"""Name of the coordinate."""
ChatRows = Mapping[int, tuple[Shaped[np.ndarray, "n"], Shaped[np.ndarray, "n"]]]
"""By the number of a prompt: the text and the role of each of its tokens."""


def chat_rows(data: object, text: Text) -> ChatRows:
    """The tokens of chats and their roles; none for other data, and for batches that cannot be gone through again."""
    rows: dict[int, tuple[Shaped[np.ndarray, "n"], Shaped[np.ndarray, "n"]]] = {}
    for batch in _batches(data, text):
        if batch.turns is None or batch.documents is not None:
            continue
        on_host = batch.host().numbered()
        roles, numbers = on_host.roles, on_host.row
        assert roles is not None and numbers is not None
        words, real = text.words(on_host.tokens.numpy()), on_host.real.numpy()
        rows |= {number: (words[i, real[i]], roles[i, real[i]]) for i, number in enumerate(numbers.tolist())}
    return rows


def _batches(data: object, text: Text) -> Sequence[Batch]:
    if is_chats(data):
        return [text.batch(data)]
    if isinstance(data, PromptBatches):
        return [data.prompts]
    given = data.batches if isinstance(data, GivenBatches) else [data]
    return [each for each in given if isinstance(each, Batch)] if isinstance(given, Sequence) else []


def with_roles(result: xr.Dataset, rows: ChatRows) -> xr.Dataset:
    """A result with the coordinate `role` beside `token`; as it is where a token is not the chats' at its position."""
    token = result.coords.get("token")
    if (
        not rows
        or token is None
        or token.dims != ("prompt", "pos")
        or ROLE in (*result.dims, *result.variables)
    ):
        return result
    numbers = result.prompt.values if "prompt" in result.coords else np.arange(result.sizes["prompt"])
    roles = np.full(token.shape, "", dtype=object)
    for i, number in enumerate(numbers.tolist()):
        if number not in rows:
            return result
        words, spoken = rows[number]
        shown = np.flatnonzero(token.values[i] != "")
        places = _places(result, i)[shown]
        inside = (places >= -len(words)) & (places < len(words))
        if not inside.all() or not (words[places] == token.values[i, shown]).all():
            return result
        roles[i, shown] = spoken[places]
    return result.assign_coords({ROLE: (("prompt", "pos"), roles)})


def _places(result: xr.Dataset, prompt: int) -> Shaped[np.ndarray, "n"]:
    """The positions of the tokens that a result shows of a prompt."""
    if "position" in result.variables:
        return np.asarray(result.position.values[prompt])
    return np.asarray(result.pos.values) if "pos" in result.coords else np.arange(result.sizes["pos"])
