"""The page's edits before a pass: whether model and prompts have what they name, and the values they stand for.

A mean and a resampled value are looked up once, in the clean run and in that of the second prompt, and become `Set`;
the direction of a site is put into its `Add`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.edits import Add, Edit, Mean, PositionIndex, Resample, Scale, Set
from interp.model.parts import Part
from interp.serve import directions
from interp.serve.asks import CUT, PATTERN, SCORES
from interp.serve.directions import NamedDirections

DirectionValues = Mapping[str, Tensor]
"""Values by site, without the row of the batch."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the row of the prompt and of the second one, if there is one."""

    prompt: int
    second: int | None = None
    answer: int = 0
    """How many of them are the answer's, at the end of each row."""


def part_of(edit: Edit) -> Part:
    """The part that an edit changes; those of requests name one."""
    assert isinstance(edit.where, Part)
    return edit.where


def positions(edit: Edit, columns: int) -> tuple[int, ...]:
    """The positions at which an edit acts, of so many."""
    given = edit.at.get("pos")
    return tuple(range(columns)) if given is None else _several(given)


def _several(index: PositionIndex) -> tuple[int, ...]:
    assert isinstance(index, int | tuple)  # requests name no other positions
    return (index,) if isinstance(index, int) else index


def entry(edit: Edit) -> tuple[int, int, int]:
    """Head, query and key of the entry that a cut names."""
    head, query, key = (edit.at[dim] for dim in ("head", "query", "key"))
    assert isinstance(head, int) and isinstance(query, int) and isinstance(key, int)
    return head, query, key


def renormalises(config: ModelConfig, layer: int) -> bool:
    """Whether a layer's pattern is the softmax of its scores, so that a score of -inf cuts an entry."""
    names = sites.names(config)
    return f"blocks.{layer}.{SCORES}" in names and f"blocks.{layer}.attn.hook_first_pattern" not in names


# --- checks -----------------------------------------------------------------------------------------------------------


def check(edits: Sequence[Edit], config: ModelConfig, lengths: Lengths, given: NamedDirections) -> None:
    """ValueError naming the first edit that this model or these prompts do not have, and what they have."""
    cut: dict[tuple[int, int, int], set[int]] = {}
    for number, edit in enumerate(edits, 1):
        try:
            part_of(edit).within(config)
            directions.check(edit, given)
            _check_indices(edit, config, lengths)
            _check_cut(edit, config, cut)
            _check_second(edit, lengths)
        except (KeyError, IndexError, ValueError) as cause:
            raise ValueError(f"edit {number} ({edit_text(edit)}): {cause.args[0]}") from cause


def _check_indices(edit: Edit, config: ModelConfig, lengths: Lengths) -> None:
    for dim, index in edit.at.items():
        what, size = ("heads", config.n_heads) if dim == "head" else ("positions", lengths.prompt)
        if max(_several(index)) >= size:
            prompt = "prompt, with its answer's tokens but the last," if lengths.answer else "prompt"
            whose = "model" if dim == "head" else prompt
            raise IndexError(f"{what} of this {whose} are 0 to {size - 1}")


def _check_cut(edit: Edit, config: ModelConfig, cut: dict[tuple[int, int, int], set[int]]) -> None:
    """Refuse entries that the query does not see, and to renormalise a row of which nothing is left.

    Args:
        cut: the keys that earlier edits cut off with the rest renormalised, by layer, head and query.
    """
    part = part_of(edit)
    if part.kind not in CUT:
        return
    head, query, key = entry(edit)
    if key > query:
        raise ValueError("the key stands after the query, which sees nothing there")
    if part.kind == PATTERN:
        return
    assert part.layer is not None
    if not renormalises(config, part.layer):
        raise ValueError(
            f"the pattern of layer {part.layer} is refined after its softmax, so a score cuts nothing: "
            f"set the entry of L{part.layer}.pattern to 0"
        )
    gone = cut.setdefault((part.layer, head, query), set())
    gone.add(key)
    if gone >= set(range(query + 1)):
        raise ValueError("the query looks at nothing else, so no weight can be renormalised")


def _check_second(edit: Edit, lengths: Lengths) -> None:
    if not isinstance(edit.change, Resample):
        return
    assert lengths.second is not None  # a request with resampled values has a second prompt
    if "pos" not in edit.at and lengths.second != lengths.prompt:
        counts = [count - lengths.answer for count in (lengths.prompt, lengths.second)]
        raise ValueError(
            f"patching all positions requires prompts of one length, got {counts[0]} and {counts[1]} tokens; "
            "name positions"
        )
    if max(positions(edit, lengths.prompt)) >= lengths.second:
        raise ValueError(f"the second prompt has positions 0 to {lengths.second - 1}")


# --- values -----------------------------------------------------------------------------------------------------------


def resolved(
    edits: Sequence[Edit],
    means: DirectionValues,
    second: DirectionValues,
    given: NamedDirections,
    columns: int,
) -> list[Edit]:
    """The edits with the values of means and resampled parts looked up.

    Args:
        means: what the sites of means are on average over the clean run's positions.
        second: what those of resampled values are on the second prompt `[p ...]`; they are put at the prompt's
            `columns` only, since generated tokens have no counterpart in it.
        given: the directions by site.
    """
    return [
        directions.resolved(edit, given)
        if isinstance(edit.change, Add)
        else _with_values(edit, means, second, columns)
        for edit in edits
    ]


def _with_values(edit: Edit, means: DirectionValues, second: DirectionValues, columns: int) -> Edit:
    unit = part_of(edit).index
    if isinstance(edit.change, Mean):
        mean = means[edit.site]
        return replace(edit, change=Set(mean if unit is None else mean[unit]))
    if isinstance(edit.change, Resample):
        at = positions(edit, columns)
        values = second[edit.site][list(at)]
        return replace(edit, change=Set(values if unit is None else values[:, unit]), at={"pos": at})
    return edit


# --- words ------------------------------------------------------------------------------------------------------------


def edit_text(edit: Edit) -> str:
    """An edit in words, short: `L1H5 → 0 at 3, 4`."""
    part = part_of(edit)
    if part.kind in CUT:
        how = "renormalised" if part.kind == SCORES else "not renormalised"
        head, query, key = entry(edit)
        return f"{Part('head', part.layer, head)}: {query} cut off from {key}, {how}"
    match edit.change:
        case Mean():
            what = "→ its clean mean"
        case Scale(factor=factor):
            what = f"× {factor:g}"
        case Set(values=value):
            what = f"= {value:g}"
        case Add(scale=scale):
            what = f"+ {scale:g} × its direction"
        case Resample():
            what = "← second prompt"
        case _:
            what = "→ 0"
    where = f" at {', '.join(map(str, _several(edit.at['pos'])))}" if "pos" in edit.at else ""
    return f"{part} {what}{where}"
