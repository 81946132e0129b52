"""Dictionaries of features in the blocks of a model: their features and errors are sites like all others.

Where a pass reads or edits neither, nothing is computed, and the model is bit for bit the one without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from interp.model.records import ConfigRecord
from interp.model.sites import Site, find

if TYPE_CHECKING:
    from interp.model.config import ModelConfig
    from interp.model.edits import Edit

FEATURES, ERROR = "hook_features", "hook_error"
"""Sites of the features of a block's dictionary, and of what it does not explain of the site that it writes."""
Visit = Callable[[str, Tensor], Tensor]
"""A function from a site of a block and its value to the value that the pass goes on with."""


@runtime_checkable
class Mountable(Protocol):
    """A dictionary that can stand in a block: it reads a site of it, and writes the same or a later one."""

    reads: str | None
    writes: str | None

    @property
    def d_sae(self) -> int:
        """Number of features."""
        ...

    def fitted_to(self, model: Any) -> Mountable:
        """The dictionary for this model: its sites and widths are checked."""
        ...

    def splits(self, visit: Visit) -> list[Edit]:
        """The edits that split what it writes into features and an error, visit both, and put them together again."""
        ...


@dataclass(frozen=True)
class FeatureSites(ConfigRecord):
    """How many features the dictionary of every block has; 0 for a block without one."""

    by_layer: tuple[int, ...]

    own_sites: ClassVar[tuple[Site, ...]] = (
        Site(
            FEATURES, "b p y", "features of the block's dictionary", on_demand=True, before="hook_resid_post"
        ),
        Site(
            ERROR, "b p d", "what the dictionary leaves unexplained of what it writes", on_demand=True,
            before="hook_resid_post",
        ),
    )  # fmt: skip

    def sites(self, config: ModelConfig) -> tuple[Site, ...]:
        """The two sites, where any block of these has a dictionary."""
        return self.own_sites if any(self.by_layer) else ()

    def at_layer(self, layer: int) -> FeatureSites:
        """The record of a model in which every block has the dictionary of this one."""
        return FeatureSites((self.by_layer[layer],) * len(self.by_layer))


def mounted(dictionaries: Sequence[Mountable], config: ModelConfig) -> dict[int, Mountable]:
    """The dictionaries by block.

    Raises:
        ValueError: one that does not know its site, reads and writes in two blocks or outside of them, or is the second
            of its block.
        KeyError: a site that the model lacks.
    """
    found: dict[int, Mountable] = {}
    for dictionary in dictionaries:
        if dictionary.reads is None or dictionary.writes is None:
            raise ValueError(
                "a dictionary that knows its site is required: Dictionary(..., reads='blocks.3...')"
            )
        layer, other = (find(site, config)[1] for site in (dictionary.reads, dictionary.writes))
        if layer is None or other != layer:
            raise ValueError(
                f"a dictionary of one block is required, got one that reads {dictionary.reads} and writes "
                f"{dictionary.writes}"
            )
        if layer in found:
            raise ValueError(f"one dictionary for each block is required, got two for block {layer}")
        found[layer] = dictionary
    return found
