"""Keys and values of the tokens already seen, so that generation computes each token once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import FromZero

if TYPE_CHECKING:
    from interp.model.config import ModelConfig


@runtime_checkable
class Past(Protocol):
    """Interface of what a pass needs of the tokens before it: their number, keys, values and states."""

    length: int
    """Number of tokens before the pass."""
    prompt: int | None
    """Number of columns of the first pass, which holds the prompts; None before it."""
    crossed: dict[int, tuple[Tensor, Tensor]]
    """Keys and values of a memory by layer, computed by the first pass that needs them."""
    states: dict[int | tuple[int, str], tuple[Tensor, ...]]
    """States that stateful mixers keep of the tokens before, by layer; those of stateful MLPs by `(layer, "mlp")`."""

    def room(self, rows: int, n: int) -> None:
        """ValueError unless a pass of this shape can go on from here."""
        ...

    def extended_keep(
        self, keep: Bool[Tensor, "b n"] | None, rows: int, n: int
    ) -> Bool[Tensor, "b k"] | None:
        """The keep-mask of everything seen once `n` more tokens are in; None as long as nothing is padded."""
        ...

    def append(
        self, layer: int, k: Float[Tensor, "b n g r"], v: Float[Tensor, "b n g e"]
    ) -> tuple[Float[Tensor, "b k g r"], Float[Tensor, "b k g e"]]:
        """One layer's keys and values of everything seen, these new ones last."""
        ...

    def advance(self, n: int, keep: Bool[Tensor, "b k"] | None) -> None:
        """Count `n` tokens as seen, once every layer has them."""
        ...


@public(plain_pass=True)
class KVCache:
    """Room for `n_max` tokens of every layer, filled from the front; keys are stored rotated.

    `keep` says which of them are real (None: all). The buffers are allocated once and written in place; `crossed`
    holds the keys and values of a memory, computed by the first pass; `states` what stateful mixers keep instead.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: FromZero,
        n_max: FromZero,
        *,
        device: torch.device | Sequence[torch.device],
        dtype: torch.dtype,
    ) -> None:
        if not config.causal:
            raise ValueError("a key/value cache requires a causal model: here earlier tokens see later ones")
        devices = [device] * config.n_layers if isinstance(device, torch.device) else device
        if len(devices) != config.n_layers:
            raise ValueError(
                f"one device, or one for each of {config.n_layers} layers, is required, got {device!r}"
            )
        self.rows, self.n_max = rows, n_max
        tokens = [n_max if mixer.traits.keyed else 0 for mixer in config.mixers]
        widths = (
            [mixer.query_width(config) for mixer in config.mixers],
            [config.head_width] * config.n_layers,
        )
        self.keys, self.values = (
            [
                torch.empty((rows, n, config.kv_heads, width), device=where, dtype=dtype)
                for n, width, where in zip(tokens, layer_widths, devices, strict=True)
            ]
            for layer_widths in widths
        )
        self.crossed: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[int | tuple[int, str], tuple[Tensor, ...]] = {}
        self.length = 0
        self.prompt: int | None = None
        self.keep: Bool[Tensor, "b k"] | None = None

    def room(self, rows: int, n: int) -> None:
        """ValueError unless `n` more tokens of this many rows fit."""
        if rows != self.rows:
            raise ValueError(
                f"the cache was made for {self.rows} rows, the batch has {rows}: make one of as many"
            )
        if self.length + n > self.n_max:
            raise ValueError(
                f"the cache holds {self.length} of {self.n_max} tokens; {n} more do not fit: make it of a larger n_max"
            )

    def extended_keep(
        self, keep: Bool[Tensor, "b n"] | None, rows: int, n: int
    ) -> Bool[Tensor, "b k"] | None:
        """The keep-mask of everything seen once `n` more tokens are in; None as long as nothing is padded."""
        if keep is None and self.keep is None:
            return None
        ones = torch.ones(rows, max(n, self.length), dtype=torch.bool, device=self.keys[0].device)
        past = ones[:, : self.length] if self.keep is None else self.keep
        return torch.cat((past, ones[:, :n] if keep is None else keep), 1)

    def append(
        self, layer: int, k: Float[Tensor, "b n g r"], v: Float[Tensor, "b n g e"]
    ) -> tuple[Float[Tensor, "b k g r"], Float[Tensor, "b k g e"]]:
        """Write one layer's new keys and values; returns views of everything seen so far."""
        end = self.length + k.shape[1]
        keys, values = self.keys[layer][:, :end], self.values[layer][:, :end]
        keys[:, self.length :], values[:, self.length :] = k, v
        return keys, values

    def advance(self, n: int, keep: Bool[Tensor, "b k"] | None) -> None:
        """Count `n` tokens as seen, once every layer has them."""
        self.prompt = self.prompt if self.length else n
        self.length += n
        self.keep = keep

    def of_rows(self, index: Int[Tensor, "n"]) -> KVCache:
        """The cache of some rows, in this order."""

        def rows(x: Tensor) -> Tensor:
            return x[index.to(x.device)]

        cache = self._with_tensors(*([rows(x) for x in tensors] for tensors in (self.keys, self.values)))
        cache.keep = None if self.keep is None else rows(self.keep)
        cache.crossed = {layer: (rows(k), rows(v)) for layer, (k, v) in self.crossed.items()}
        cache.states = {key: tuple(rows(x) for x in state) for key, state in self.states.items()}
        return cache

    @classmethod
    def joined(cls, parts: Sequence[KVCache]) -> KVCache:
        """One cache with the rows of several caches of equal length."""
        both = ([part.keys for part in parts], [part.values for part in parts])
        return parts[0]._with_tensors(
            *([torch.cat(each) for each in zip(*which, strict=True)] for which in both)
        )

    def _with_tensors(self, keys: list[Tensor], values: list[Tensor]) -> KVCache:
        cache = copy.copy(self)
        cache.keys, cache.values, cache.rows = keys, values, len(keys[0])
        return cache


class Prefix:
    """Keys and values of the first `length` columns of a finished run, which variants of its rows continue.

    The rows of a pass are `copies` times the run's rows in order. What a pass appends is not stored, so each block
    can be run separately.
    """

    def __init__(
        self, run: KVCache, length: int, copies: int, *, keep: Bool[Tensor, "b p"] | None = None
    ) -> None:
        self.length, self.copies = length, copies
        self.prompt: int | None = None
        self.crossed: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[int | tuple[int, str], tuple[Tensor, ...]] = {}
        self._run = run
        self._keep = None if keep is None else keep[:, :length].repeat(copies, 1)

    def room(self, rows: int, n: int) -> None:
        """ValueError unless the rows are copies of the run's."""
        if rows != self.copies * self._run.rows:
            raise ValueError(
                f"{self.copies} copies of {self._run.rows} rows are required, the batch has {rows}"
            )

    def extended_keep(
        self, keep: Bool[Tensor, "b n"] | None, rows: int, n: int
    ) -> Bool[Tensor, "b k"] | None:
        """The keep-mask of prefix and new tokens."""
        if keep is None or self._keep is None:
            return None
        return torch.cat((self._keep, keep), 1)

    def append(
        self, layer: int, k: Float[Tensor, "b n g r"], v: Float[Tensor, "b n g e"]
    ) -> tuple[Float[Tensor, "b k g r"], Float[Tensor, "b k g e"]]:
        """The run's keys and values of the prefix, repeated for each copy, followed by these."""
        return self._after_prefix(self._run.keys[layer], k), self._after_prefix(self._run.values[layer], v)

    def _after_prefix(self, before: Float[Tensor, "run p g e"], new: Float[Tensor, "b n g e"]) -> Tensor:
        known = before[:, : self.length].expand(self.copies, -1, -1, -1, -1)
        return torch.cat((known, new.unflatten(0, (self.copies, -1))), 2).flatten(0, 1)

    def advance(self, n: int, keep: Bool[Tensor, "b k"] | None) -> None:
        """Nothing: the next pass begins at the same column."""
