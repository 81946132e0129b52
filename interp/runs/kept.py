"""A cache of results computed from a model's weights alone, by their content: equal weights are not computed again.

A page, a notebook and a live view ask one model again and again, and what does not depend on a prompt is most of the
work. Weights are known by what they hold, not by which object holds them: after any change of any number, by training,
an edit or a load, everything is made anew.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar, cast

import torch
from jaxtyping import Int
from torch import Tensor

from interp.core.stats import bits, splitmix64
from interp.core.transfers import to_host
from interp.model.transformer import Transformer
from interp.passes.observe import Subject
from interp.runs.fingerprint import fingerprint, incomparable
from interp.runs.provenance import in_memory

T = TypeVar("T")
MOST = 64
"""The most answers that are cached, the last used."""
GROUP = 2**26
"""Bytes of weights that are looked at together."""


def cached_for_model(model: Subject, what: object, make: Callable[[], T]) -> T:
    """The value of `make` for these weights and this tokenizer; made again only where they, or `what`, differ.

    Args:
        what: everything else that decides it. A value that cannot be compared, such as an open file, is made each
            time.
    """
    mark = fingerprint(what)
    if next(incomparable(mark), None) is not None:
        return make()
    network = model.transformer.unedited
    # The slot holds the tokenizer, so that no other can get its identity.
    tokenizer = model.text.tokenizer if model.text.has_tokenizer else None
    with unchanged(network):
        weights = looked_at(network, "content", lambda: content(network))
        key = json.dumps(
            [
                weights,
                repr(network.config),
                repr(network.dtype),
                mark,
                id(tokenizer),
                fingerprint(model.text.settings),
            ]
        )
        slot = _slot(hashlib.sha256(key.encode()).digest())
        if not slot:
            slot += [make(), tokenizer]
    return cast(T, slot[0])


_LOOKED: ContextVar[tuple[Transformer, dict[str, object]] | None] = ContextVar("interp_looked", default=None)


@contextmanager
def unchanged(network: Transformer) -> Iterator[None]:
    """A promise that the weights of this network stay as they are inside, so that they are looked at once."""
    known = _LOOKED.get()
    token = _LOOKED.set(known if known is not None and known[0] is network else (network, {}))
    try:
        yield
    finally:
        _LOOKED.reset(token)


def looked_at(network: Transformer, what: str, look: Callable[[], T]) -> T:
    """The value of `look` for all weights; inside of `unchanged` it is computed once."""
    known = _LOOKED.get()
    if known is None or known[0] is not network:
        return look()
    if what not in known[1]:
        known[1][what] = look()
    return cast(T, known[1][what])


@functools.lru_cache(maxsize=MOST)
def _slot(key: bytes) -> list[object]:
    """Where the answer of this key is kept; empty at first."""
    return []


def forget() -> None:
    """Empty the cache, for measurements of time."""
    _slot.cache_clear()


def content(model: Transformer) -> str:
    """A fingerprint of all parameters and buffers, in a few letters; of an accelerator's in one look.

    In this process only: a CPU's bytes are hashed as Python hashes any bytes, in a third of the time of SHA-256.
    """
    state = model.state_dict()
    shapes = json.dumps([[name, str(x.dtype), list(x.shape), str(x.device)] for name, x in state.items()])
    if model.device.type == "cpu":
        in_bytes = map(in_memory, state.values())
        sums = [hash(bytes(each[i : i + GROUP])) for each in in_bytes for i in range(0, len(each), GROUP)]
    else:
        hashes = to_host({i: _hashed(group) for i, group in enumerate(_groups(state))})
        sums = [int(each) for each in hashes.values()]
    found = [shapes, *map(str, sums)]
    return hashlib.sha256(" ".join(found).encode()).hexdigest()


def _groups(state: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """The bytes of all tensors, in runs of one device of about `GROUP` bytes, each a whole number of int64."""
    run: list[Tensor] = []
    whole = (value.contiguous().reshape(-1).view(torch.uint8) for value in state.values())
    for part in (part for value in whole for part in value.split(GROUP)):
        if run and (run[0].device != part.device or sum(map(len, run)) + len(part) > GROUP):
            yield _whole(run)
            run = []
        run.append(part)
    if run:
        yield _whole(run)


def _whole(run: list[Tensor]) -> Tensor:
    short = -sum(map(len, run)) % 8
    return torch.cat([*run, run[0].new_zeros(short)]).view(torch.int64)


def _hashed(numbers: Int[Tensor, "n"]) -> Int[Tensor, ""]:
    """The sum modulo 2^64 of all numbers, each mixed with its place.

    Of a number times an odd one of its place the highest bit would always change the sum alike, so that an even number
    of changed signs would not be seen.
    """
    places = bits(torch.arange(len(numbers), device=numbers.device), 1, 0, 0)[0]
    return splitmix64(places, numbers).sum()
