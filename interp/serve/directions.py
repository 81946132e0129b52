"""Directions that the page may add to the stream, and what random ones of their length do in their place.

Any long vector moves a model: what a direction does says something only beside others that know nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from jaxtyping import Float
from torch import Tensor

from interp.model.config import ModelConfig
from interp.model.edits import Add, Edit
from interp.model.parts import Part
from interp.model.sites import find

if TYPE_CHECKING:
    from interp.causal import Subspace

RANDOM: Final = 39
"""Number of random directions: the fewest whose smallest and largest effect are a band of 95 %, 1 - 2 / (39 + 1)."""
SEED: Final = 0
WRITTEN: Final = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out")
"""Sites at which what is added reaches the stream as it is, and no head or MLP counts it as its own."""

NamedDirections = Mapping[str, Float[Tensor, "d"]]
"""The direction of a site, by the site's full name."""


def by_site(subspaces: Sequence["Subspace"], config: ModelConfig) -> NamedDirections:
    """One direction per site. ValueError for several at one site, or one that is of chosen positions or not of a block.

    Example:
        >>> from interp.causal import Subspace
        >>> one = Subspace("blocks.1.hook_resid_post", torch.ones(1, model.cfg.d_model))
        >>> list(by_site([one], model.transformer.config))
        ['blocks.1.hook_resid_post']
    """
    found: dict[str, Tensor] = {}
    for each in subspaces:
        row, layer = find(each.site, config)
        if row.axes != "b p d" or layer is None:
            raise ValueError(f"a direction of one layer's stream is required, got one of {each.site}")
        if len(each.directions) > 1 or each.at or not bool(each.directions.any()):
            raise ValueError(
                f"one direction of some length is required at all positions, got {len(each.directions)} at "
                f"{each.site}, cells {dict(each.at)}"
            )
        if each.site in found:
            raise ValueError(f"one direction per site is required, got several at {each.site}")
        found[each.site] = each.directions[0].detach()
    return found


def check(edit: Edit, directions: NamedDirections) -> None:
    """ValueError for an edit that adds a direction where none was given."""
    if isinstance(edit.change, Add) and edit.site not in directions:
        given = ", ".join(str(Part.of(site)) for site in directions)
        raise ValueError(
            f"no direction is added there; {f'there are those of {given}' if given else 'start with --direction FILE'}"
        )


def resolved(edit: Edit, directions: NamedDirections) -> Edit:
    """The edit that adds the direction of its site."""
    assert isinstance(edit.change, Add)
    return replace(edit, change=replace(edit.change, values=directions[edit.site]))


def at_random(edits: Sequence[Edit], columns: int, rows: range) -> list[Edit]:
    """The change for some of `RANDOM` rows, where each row adds random directions of the length of those added."""
    draw = torch.Generator().manual_seed(SEED)
    return [_at_random(edit, columns, rows, draw) if isinstance(edit.change, Add) else edit for edit in edits]


def _at_random(edit: Edit, columns: int, rows: range, draw: torch.Generator) -> Edit:
    assert isinstance(edit.change, Add) and isinstance(edit.change.values, Tensor)
    direction = edit.change.values
    noise = torch.randn(RANDOM, len(direction), generator=draw, dtype=torch.float64)
    noise *= direction.double().norm().cpu() / noise.norm(dim=-1, keepdim=True)
    values = noise[rows.start : rows.stop].to(direction)[:, None].expand(-1, columns, -1)
    return replace(edit, change=replace(edit.change, values=values))


def added(edits: Sequence[Edit], position: int, columns: int, since: int) -> dict[str, Float[Tensor, "d"]]:
    """The vectors that edits add to the stream at a position, in layers from `since` on, by site."""
    found: dict[str, Tensor] = {}
    for edit in edits:
        part = edit.where
        if not isinstance(edit.change, Add) or not isinstance(part, Part) or (part.layer or 0) < since:
            continue
        at = edit.at.get("pos")
        edited_columns = range(columns) if at is None else at if isinstance(at, tuple) else (at,)
        if position in edited_columns and edit.site.rpartition(".")[2] in WRITTEN:
            assert isinstance(edit.change.values, Tensor)
            mine = edit.change.scale * edit.change.values.double()
            found[edit.site] = found[edit.site] + mine if edit.site in found else mine
    return found
