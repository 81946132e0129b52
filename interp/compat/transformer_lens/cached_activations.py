"""Activations by name or shorthand, their batch dimension and device: the part of `ActivationCache` that is a dict."""

import logging
import warnings
from collections import Counter
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from difflib import get_close_matches
from typing import Any, TypeVar

import torch
from torch import Tensor

from interp.compat.transformer_lens.act_names import get_act_name
from interp.compat.transformer_lens.slices import Slice, SliceInput

logger = logging.getLogger(__name__)

Slices = Slice | SliceInput
"""A `Slice` or what makes one."""
Key = str | tuple[Any, ...]
"""A full name, a shorthand ("k6") or `(name, layer, sublayer)`; layers may be any kind of integer."""
Store = TypeVar("Store", bound="CachedActivations")


class CachedActivations:
    """Tensors by name, as a dictionary: `cache["blocks.3.attn.hook_pattern"]`, `cache["pattern", 3]`, `cache["k6"]`.

    `cache_dict` holds the tensors, `model` the model (set it to None to let go of it), `has_batch_dim` whether they
    still have a batch dimension.
    """

    def __init__(self, cache_dict: dict[str, Tensor], model: Any, has_batch_dim: bool = True) -> None:
        self.cache_dict = cache_dict
        self.model = model
        self.has_batch_dim = has_batch_dim
        self.has_embed = "hook_embed" in cache_dict
        self.has_pos_embed = "hook_pos_embed" in cache_dict

    def __getattr__(self, name: str) -> Any:
        """Only reached for what is not there. AttributeError."""
        why = ": it is about state-space layers, which our models do not have" if "ssm" in name else ""
        raise AttributeError(f"{type(self).__name__} has no {name!r}{why}")

    def __repr__(self) -> str:
        return f"{type(self).__name__} with keys {list(self.cache_dict)}"

    def __getitem__(self, key: Key) -> Tensor:
        """The activation of a name or shorthand; negative layers count from the end. KeyError if it is not cached."""
        if key in self.cache_dict:
            return self.cache_dict[key]
        if isinstance(key, str):
            name = get_act_name(key)
        else:
            layer = key[1] if len(key) > 1 else None
            if layer is not None and layer < 0:
                key = (key[0], self.model.cfg.n_layers + layer, *key[2:])
            name = get_act_name(*key)
        if name not in self.cache_dict:
            near = get_close_matches(name, self.cache_dict, n=1)
            raise KeyError(
                f"{name} was not cached" + (f"; the nearest that was is {near[0]}" if near else "")
            )
        return self.cache_dict[name]

    def __len__(self) -> int:
        return len(self.cache_dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.cache_dict)

    def keys(self) -> KeysView[str]:
        """The full names."""
        return self.cache_dict.keys()

    def values(self) -> ValuesView[Tensor]:
        """The tensors."""
        return self.cache_dict.values()

    def items(self) -> ItemsView[str, Tensor]:
        """Names with tensors."""
        return self.cache_dict.items()

    def to(self: Store, device: str | torch.device, move_model: bool = False) -> Store:
        """This cache, its tensors moved to a device (and the model too, a deprecated option of older releases)."""
        self.cache_dict = {name: value.to(device) for name, value in self.cache_dict.items()}
        if move_model:
            warnings.warn("move_model is deprecated: call model.to", DeprecationWarning, stacklevel=2)
            self.model.to(device)
        return self

    def toggle_autodiff(self, mode: bool = False) -> None:
        """Switch gradients on or off for the whole process (`torch.no_grad()` around the code does less harm)."""
        logger.warning("Changed the global state, set autodiff to %s", mode)
        torch.set_grad_enabled(mode)

    def _batch_size(self) -> int:
        """The commonest leading size: some entries are shared by the batch and have none."""
        counts = Counter(value.shape[0] for value in self.cache_dict.values() if value.ndim)
        return counts.most_common(1)[0][0] if counts else 1

    def remove_batch_dim(self: Store) -> Store:
        """This cache without its batch dimension. AssertionError for more than one row; a warning the second time."""
        if not self.has_batch_dim:
            logger.warning("Tried removing batch dimension after already having removed it.")
            return self
        if (size := self._batch_size()) != 1:
            raise AssertionError(f"Cannot remove batch dimension from cache with batch size {size}")
        for name, value in self.cache_dict.items():
            if value.ndim and len(value) == 1:
                self.cache_dict[name] = value[0]
        self.has_batch_dim = False
        return self

    def apply_slice_to_batch_dim(self: Store, batch_slice: Slices) -> Store:
        """A new cache with these rows (views); one row given as a number drops the dimension.

        Errors: AssertionError for a cache without a batch dimension.
        """
        rows = as_slice(batch_slice)
        if not self.has_batch_dim:
            raise AssertionError("Cannot index into a cache without a batch dim")
        size = self._batch_size()
        chosen = {
            name: rows.apply(value, dim=0) if value.ndim and len(value) == size else value
            for name, value in self.cache_dict.items()
        }
        return type(self)(chosen, self.model, has_batch_dim=rows.mode != "int")


def as_slice(given: Slices) -> Slice:
    """The `Slice` of what makes one; an int drops the axis."""
    return given if isinstance(given, Slice) else Slice(given)
