"""Dictionaries of features in the blocks of a model: their features and errors are sites like all others.

Where a pass reads or edits neither, nothing is computed, and the model is bit for bit the one without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Bool, Float
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


class Shares(NamedTuple):
    """What each term of a dictionary's sum adds along a direction; the terms sum to the value of the site it writes."""

    features: Float[Tensor, "b s"]
    bias: Float[Tensor, "b 1"]
    skip: Float[Tensor, "b 1"] | None
    """None where there is no skip."""
    error: Float[Tensor, "b 1"]
    active: Bool[Tensor, "b s"]
    """Whether a feature is not 0."""
    size: Float[Tensor, "b"]
    """Length of the products that are summed, as rounding errors are relative to it."""


@runtime_checkable
class Mountable(Protocol):
    """A dictionary that can stand in a block: it reads a site of it, and writes the same or a later one."""

    reads: str | None
    writes: str | None
    b_dec: Tensor

    def constants(self) -> Tensor:
        """The value of each active feature at x = 0; ValueError where active features are not linear in x."""
        ...

    @property
    def d_sae(self) -> int:
        """Number of features."""
        ...

    @property
    def skip(self) -> Float[Tensor, "d o"] | None:
        """The matrix of a linear map of what it reads, where it adds one."""
        ...

    def fitted_to(self, model: Any) -> Mountable:
        """The dictionary for this model: its sites and widths are checked."""
        ...

    def splits(self, visit: Visit) -> list[Edit]:
        """The edits that split what it writes into features and an error, visit both, and put them together again."""
        ...

    def shares(
        self,
        direction: Float[Tensor, "b o"],
        read: Float[Tensor, "b ..."],
        written: Float[Tensor, "b ..."],
        features: Float[Tensor, "b s"] | None = None,
    ) -> Shares:
        """The terms of what stands at the site that it writes, along a direction there, in the direction's dtype.

        Args:
            direction: one for each row.
            read: the value at the site that it reads, at one position of each row.
            written: the value at the site that it writes.
            features: those of a pass in which they were edited; None: those of what is read.
        """
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
