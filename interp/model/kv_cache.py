"""Keys and values of the tokens already seen, so that generation computes each token once."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.model.config import ModelConfig


class KVCache:
    """Room for `n_max` tokens of every layer, filled from the front; keys are stored rotated.

    `keep` says which of them are real (None: all). The buffers are allocated once and written in place; `crossed`
    holds the keys and values of a memory, computed by the first pass.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        n_max: int,
        *,
        device: torch.device | Sequence[torch.device],
        dtype: torch.dtype,
    ) -> None:
        if not config.causal:
            raise ValueError("a key/value cache requires a causal model: here earlier tokens see later ones")
        devices = [device] * config.n_layers if isinstance(device, torch.device) else device
        shape = (rows, n_max, config.kv_heads, config.head_width)
        self.rows, self.n_max = rows, n_max
        self.keys = [torch.empty(shape, device=where, dtype=dtype) for where in devices]
        self.values = [torch.empty(shape, device=where, dtype=dtype) for where in devices]
        self.crossed: dict[int, tuple[Tensor, Tensor]] = {}
        self.length = 0
        self.keep: Bool[Tensor, "b k"] | None = None

    def room(self, rows: int, n: int) -> None:
        """ValueError unless `n` more tokens of this many rows fit."""
        if rows != self.rows:
            raise ValueError(f"the cache was made for {self.rows} rows, the batch has {rows}")
        if self.length + n > self.n_max:
            raise ValueError(f"the cache holds {self.length} of {self.n_max} tokens; {n} more do not fit")

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
        self, layer: int, k: Float[Tensor, "b n g e"], v: Float[Tensor, "b n g e"]
    ) -> tuple[Float[Tensor, "b k g e"], Float[Tensor, "b k g e"]]:
        """Write one layer's new keys and values; returns views of everything seen so far."""
        end = self.length + k.shape[1]
        keys, values = self.keys[layer][:, :end], self.values[layer][:, :end]
        keys[:, self.length :], values[:, self.length :] = k, v
        return keys, values

    def advance(self, n: int, keep: Bool[Tensor, "b k"] | None) -> None:
        """Count `n` tokens as seen, once every layer has them."""
        self.length += n
        self.keep = keep
