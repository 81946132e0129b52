"""Dictionaries of features in the blocks of a model: their features and errors are sites like all others.

A `Mountable` stands in one block or in several, as a cross-layer transcoder does. Where a pass reads or edits neither
features nor errors, nothing is computed, and the model is bit for bit the one without them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeGuard, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from interp.model.records import ConfigRecord
from interp.model.sites import Site, find

if TYPE_CHECKING:
    from interp.model.config import ModelConfig
    from interp.model.edits import Edit

FEATURES, ERROR = "hook_features", "hook_error"
"""Sites of the features of a block's dictionary, and of what it does not explain of the site that it writes."""


@runtime_checkable
class SitesOfBlock(Protocol):
    """The sites of one block in one pass."""

    def wants(self, *names: str) -> bool:
        """Whether any of these sites is read or edited."""
        ...

    def alters(self, *names: str) -> bool:
        """Whether any of these sites is edited or differentiated, so that later values must depend on it."""
        ...

    def visit(self, name: str, value: Tensor) -> Tensor:
        """The value that the pass goes on with, from the value at a site."""
        ...


class Taps(NamedTuple):
    """The sites that a dictionary reads and writes in one block, and how many features it has there."""

    reads: str | None
    writes: str | None
    n_features: int


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
    """A dictionary that can stand in blocks: in each it reads a site, and writes the same or a later one."""

    @property
    def taps(self) -> tuple[Taps, ...]:
        """Where it stands, once for every block."""
        ...

    @property
    def in_one_block(self) -> bool:
        """Whether it is a `BlockDictionary`, whose features write in their own block alone."""
        ...

    def fitted_to(self, model: Any) -> Mountable:
        """The dictionary for this model: its sites and widths are checked."""
        ...

    def constants(self, layer: int | None = None) -> Tensor:
        """The value of each active feature of a block at x = 0; ValueError where active features are not linear in x.

        Args:
            layer: a block where it stands; a dictionary of one block needs none.
        """
        ...

    def bias(self, layer: int | None = None) -> Tensor:
        """What it says of the site that it writes in a block, [o], without any feature, skip or error."""
        ...

    def splits(self, places: Mapping[int, SitesOfBlock], blocks: range) -> list[Edit]:
        """The edits that split what it writes into features and an error, visit both, and put them together again.

        Args:
            places: those of its blocks whose features or error are read or edited in this pass, one at least.
            blocks: those that the pass runs through.
        """
        ...


@runtime_checkable
class BlockDictionary(Mountable, Protocol):
    """A dictionary of one block, which writes one site: a sum of its features, a bias, a skip and an error."""

    reads: str | None
    writes: str | None
    b_dec: Tensor

    @property
    def d_sae(self) -> int:
        """Number of features."""
        ...

    @property
    def skip(self) -> Float[Tensor, "d o"] | None:
        """The matrix of a linear map of what it reads, where it adds one."""
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


def mounted(dictionaries: Sequence[Mountable], config: ModelConfig) -> dict[int, tuple[Mountable, Taps]]:
    """The dictionary of each block and what it reads and writes there; one of several blocks is under each of them.

    Raises:
        ValueError: one that does not know its sites, reads and writes in two blocks or outside of them, or is the
            second of a block.
        KeyError: a site that the model lacks.
    """
    found: dict[int, tuple[Mountable, Taps]] = {}
    for dictionary, taps in [(each, taps) for each in dictionaries for taps in each.taps]:
        if taps.reads is None or taps.writes is None:
            raise ValueError(
                "a dictionary that knows its site is required: Dictionary(..., reads='blocks.3...')"
            )
        layer, other = (find(site, config)[1] for site in (taps.reads, taps.writes))
        if layer is None or other != layer:
            raise ValueError(
                f"a dictionary of one block is required, got one that reads {taps.reads} and writes {taps.writes}"
            )
        if layer in found:
            raise ValueError(f"dictionaries must be one for each block at most, got two for block {layer}")
        found[layer] = dictionary, taps
    return found


def in_one_block(dictionary: Mountable) -> TypeGuard[BlockDictionary]:
    """Whether this is a dictionary whose features write in their own block alone."""
    return dictionary.in_one_block


def of_one_block(dictionaries: Mapping[int, Mountable], what: str) -> dict[int, BlockDictionary]:
    """The dictionaries by block. ValueError for a cross-layer transcoder, of which `what` is not defined."""
    alone = {layer: each for layer, each in dictionaries.items() if in_one_block(each)}
    if others := sorted(dictionaries.keys() - alone):
        raise ValueError(
            f"{what} requires dictionaries whose features write in their own block, and those of blocks "
            f"{', '.join(map(str, others))} belong to a cross-layer transcoder, whose features write to later ones too"
        )
    return alone


def check_start(dictionaries: Mapping[int, Mountable], edited: Collection[str], start: int) -> None:
    """ValueError for a pass from block `start` on that would miss what edited features of earlier blocks write.

    Args:
        edited: full names of the sites that the model's own edits change.
    """
    for layer, dictionary in dictionaries.items():
        site = f"blocks.{layer}.{FEATURES}"
        if layer < start and site in edited and not dictionary.in_one_block:
            raise ValueError(
                f"a pass that begins at block {start} misses what the edited features of block {layer} write to later "
                "blocks: ask this of the model without edits of a cross-layer transcoder's features"
            )
