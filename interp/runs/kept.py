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
"""How many results are cached, those that were used last."""
GROUP = 2**26
"""Bytes of weights that are hashed together."""


def cached_for_model(model: Subject, what: object, make: Callable[[], T]) -> T:
    """The value of `make` for the model's weights, its tokenizer and `what`; cached, so that equal ones reuse it.

    Args:
        what: everything else that decides the value. If `what` has no fingerprint (an open file), nothing is cached.
    """
    mark = fingerprint(what)
    if next(incomparable(mark), None) is not None:
        return make()
    network = model.transformer.unedited
    # The cache entry holds the tokenizer alive, so that its id() cannot be given to another one.
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
    """A context in which the caller promises not to change the network's weights, so that `looked_at` can cache."""
    known = _LOOKED.get()
    token = _LOOKED.set(known if known is not None and known[0] is network else (network, {}))
    try:
        yield
    finally:
        _LOOKED.reset(token)


def looked_at(network: Transformer, what: str, look: Callable[[], T]) -> T:
    """The value of `look`, a function of the network's weights; computed once inside a context of `unchanged`."""
    known = _LOOKED.get()
    if known is None or known[0] is not network:
        return look()
    if what not in known[1]:
        known[1][what] = look()
    return cast(T, known[1][what])


@functools.lru_cache(maxsize=MOST)
def _slot(key: bytes) -> list[object]:
    """The list that holds the cached value of a key; empty at first."""
    return []


def forget() -> None:
    """Empty the cache, for measurements of time."""
    _slot.cache_clear()


def content(model: Transformer) -> str:
    """A hash of all parameters and buffers, comparable within this process only; one synchronisation on a GPU.

    On a CPU the bytes are hashed by Python's `hash`, which differs between processes and takes a third of the time of
    SHA-256.
    """
    state = model.state_dict()
    shapes = json.dumps([[name, str(x.dtype), list(x.shape), str(x.device)] for name, x in state.items()])
    if model.device.type == "cpu":
        in_bytes = map(in_memory, state.values())
        sums = [hash(bytes(data[i : i + GROUP])) for data in in_bytes for i in range(0, len(data), GROUP)]
    else:
        hashes = to_host({i: _position_hash(group) for i, group in enumerate(_groups(state))})
        sums = [int(number) for number in hashes.values()]
    parts = [shapes, *map(str, sums)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _groups(state: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """The bytes of all tensors as int64 vectors of about `GROUP` bytes, each of tensors on one device."""
    run: list[Tensor] = []
    byte_vectors = (value.contiguous().reshape(-1).view(torch.uint8) for value in state.values())
    for piece in (piece for value in byte_vectors for piece in value.split(GROUP)):
        if run and (run[0].device != piece.device or sum(map(len, run)) + len(piece) > GROUP):
            yield _as_int64(run)
            run = []
        run.append(piece)
    if run:
        yield _as_int64(run)


def _as_int64(run: list[Tensor]) -> Tensor:
    short = -sum(map(len, run)) % 8
    return torch.cat([*run, run[0].new_zeros(short)]).view(torch.int64)


def _position_hash(numbers: Int[Tensor, "n"]) -> Int[Tensor, ""]:
    """The sum modulo 2^64 of all numbers, each hashed together with its position.

    A sum of numbers times odd position weights would not do: a flipped sign bit always changes it by 2^63, so that two
    flipped signs would cancel.
    """
    places = bits(torch.arange(len(numbers), device=numbers.device), 1, 0, 0)[0]
    return splitmix64(places, numbers).sum()
