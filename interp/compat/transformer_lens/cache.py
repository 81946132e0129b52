"""TransformerLens' key/value cache, and the face it shows to a native pass.

Keys are stored as the native model stores them, rotated; otherwise names and behaviour are TransformerLens'.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__path__: list[str] = []
"""To the import system a package: `cache.key_value_cache` is this module too (`install.ALIASES`)."""
Device = torch.device | str | None


@dataclass
class TransformerLensKeyValueCacheEntry:
    """Keys and values of one layer, `[batch, pos so far, head, d_head]`."""

    past_keys: Tensor
    past_values: Tensor
    frozen: bool = False

    @classmethod
    def init_cache_entry(
        cls, cfg: Any, device: Device, batch_size: int = 1
    ) -> "TransformerLensKeyValueCacheEntry":
        """An entry of no positions, in the dtype of the config."""
        whole = cfg.n_key_value_heads is None or getattr(cfg, "ungroup_grouped_query_attention", False)
        n_heads = cfg.n_heads if whole else cfg.n_key_value_heads
        shape = (batch_size, 0, n_heads, cfg.d_head)
        keys, values = (torch.empty(shape, device=device, dtype=cfg.dtype) for _ in range(2))
        return cls(keys, values)

    def append(self, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        """Everything with these at the end; kept unless the entry is frozen."""
        keys = torch.cat((self.past_keys, new_keys), 1)
        values = torch.cat((self.past_values, new_values), 1)
        if not self.frozen:
            self.past_keys, self.past_values = keys, values
        return keys, values


@dataclass
class TransformerLensKeyValueCache:
    """An entry for each layer, and the attention mask of what they hold.

    Frozen, it is read and not written: any number of inputs may follow the same prefix.
    """

    entries: list[TransformerLensKeyValueCacheEntry]
    previous_attention_mask: Tensor
    frozen: bool = False

    @classmethod
    def init_cache(cls, cfg: Any, device: Device, batch_size: int = 1) -> "TransformerLensKeyValueCache":
        """A cache of no positions."""
        device = cfg.device if device is None else device
        entry = TransformerLensKeyValueCacheEntry.init_cache_entry
        mask = torch.empty((batch_size, 0), device=device, dtype=torch.int)
        return cls([entry(cfg, device, batch_size) for _ in range(cfg.n_layers)], mask)

    def freeze(self) -> None:
        """Keep what is there from now on."""
        self._set_frozen(True)

    def unfreeze(self) -> None:
        """Take new positions again."""
        self._set_frozen(False)

    def _set_frozen(self, frozen: bool) -> None:
        self.frozen = frozen
        for entry in self.entries:
            entry.frozen = frozen

    def append_attention_mask(self, attention_mask: Tensor) -> Tensor:
        """The mask of everything with this at the end; kept unless frozen."""
        past = self.previous_attention_mask
        mask = torch.cat((past, attention_mask.to(past.device)), -1)
        if not self.frozen:
            self.previous_attention_mask = mask
        return mask

    def __getitem__(self, idx: int) -> TransformerLensKeyValueCacheEntry:
        return self.entries[idx]


def get_pos_offset(past_kv_cache: TransformerLensKeyValueCache | None, batch_size: int) -> int:
    """Number of positions in a cache; 0 without one. The batch size does not matter."""
    return 0 if past_kv_cache is None else past_kv_cache[0].past_keys.shape[1]


class CachedPast:
    """Entries of a `TransformerLensKeyValueCache` as the `Past` of a native pass."""

    def __init__(
        self, entry: Callable[[int], TransformerLensKeyValueCacheEntry], mask: Tensor | None = None
    ) -> None:
        """entry: that of a layer. mask: of everything, the new tokens included; None = all real."""
        rows, length = entry(0).past_keys.shape[:2]
        self.length: int = length
        self.prompt: int | None = length or None
        self.crossed: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[int | tuple[int, str], tuple[Tensor, ...]] = {}
        self._rows, self._entry, self._mask = rows, entry, mask

    def room(self, rows: int, n: int) -> None:
        """Any number of tokens of the cache's rows."""
        assert self._rows == rows, f"the cache holds {self._rows} rows, the batch has {rows}"

    def extended_keep(self, keep: Tensor | None, rows: int, n: int) -> Tensor | None:
        """The mask of everything."""
        return self._mask

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """One layer's keys and values of everything."""
        return self._entry(layer).append(k, v)

    def advance(self, n: int, keep: Tensor | None) -> None:
        """Nothing: the entries know how long they are."""
