"""The page's edits as `Edit`s of a pass: where each one acts, whether the model and the prompt have that, and in words.

Every edit but a cut edge is one assignment at one place: `value[:, positions, unit] = ...`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.tap import Edit
from interp.serve.asks import (
    Edge,
    EditAsk,
    Head,
    Mean,
    Mlp,
    Neuron,
    Scale,
    Second,
    Stream,
    Value,
    Zero,
    from_second,
)

Donors = Mapping[str, Tensor]
"""Site -> its value in the pass over the second prompt, one row."""
PATCHED = ("attn.hook_z", "hook_mlp_out", "mlp.hook_post", "hook_resid_pre")
"""The sites of a block that may be taken from the second prompt."""


@dataclass(frozen=True)
class Place:
    """Cells of a site `[b p ...]`: some positions (None: all), of one unit along the axis after (None: whole)."""

    site: str
    positions: tuple[int, ...] | None
    unit: int | None = None

    @property
    def index(self) -> tuple[slice | list[int] | int, ...]:
        """What a value of the site is indexed with."""
        at = slice(None) if self.positions is None else list(self.positions)
        return (slice(None), at) if self.unit is None else (slice(None), at, self.unit)

    @property
    def everywhere(self) -> tuple[slice | int, ...]:
        """The same at all positions."""
        return (slice(None), slice(None)) if self.unit is None else (slice(None), slice(None), self.unit)


@dataclass(frozen=True)
class Lengths:
    """Tokens of the prompt and of the second one, if there is one."""

    prompt: int
    second: int | None = None


def place_of(edit: Head | Mlp | Neuron | Stream) -> Place:
    """Where an edit acts."""
    block = f"blocks.{edit.layer}"
    match edit:
        case Head():
            return Place(f"{block}.attn.hook_z", edit.positions, edit.head)
        case Mlp():
            return Place(f"{block}.hook_mlp_out", edit.positions)
        case Neuron():
            return Place(f"{block}.mlp.hook_post", edit.positions, edit.neuron)
        case Stream():
            return Place(f"{block}.hook_resid_pre", (edit.position,))


def site_of(edit: EditAsk) -> str:
    """The site at which an edit acts."""
    return f"blocks.{edit.layer}.attn.hook_pattern" if isinstance(edit, Edge) else place_of(edit).site


def check(edits: Sequence[EditAsk], config: ModelConfig, lengths: Lengths) -> None:
    """ValueError or KeyError naming the first edit that this model or these prompts do not have."""
    for number, edit in enumerate(edits, 1):
        try:
            sites.find(site_of(edit), config)
            _check_unit(edit, config)
            _check_positions(edit, lengths)
        except (KeyError, ValueError) as cause:
            raise ValueError(f"edit {number} ({said(edit)}): {cause.args[0]}") from cause


def _check_unit(edit: EditAsk, config: ModelConfig) -> None:
    here = config.at_layer(edit.layer)
    if isinstance(edit, Head | Edge) and edit.head >= here.n_heads:
        raise ValueError(f"heads are 0 to {here.n_heads - 1} in this model")
    width = 0 if here.mlp is None else here.mlp.d_mlp
    if isinstance(edit, Neuron) and edit.neuron >= width:
        raise ValueError(f"neurons are 0 to {width - 1} in this model")


def _check_positions(edit: EditAsk, lengths: Lengths) -> None:
    if isinstance(edit, Edge):
        named: tuple[int, ...] | None = (edit.query, edit.key)
        if edit.key > edit.query:
            raise ValueError("the key stands behind the query, which sees nothing there")
    else:
        named = place_of(edit).positions
    if named is not None and len(set(named)) < len(named) and not isinstance(edit, Edge):
        raise ValueError("every position may be named once")
    if named is not None and max(named) >= lengths.prompt:
        raise ValueError(f"positions of this prompt are 0 to {lengths.prompt - 1}")
    if not from_second(edit):
        return
    assert lengths.second is not None  # a request with patches has a second prompt
    if named is None and lengths.second != lengths.prompt:
        raise ValueError(
            f"patching all positions requires prompts of one length, got {lengths.prompt} and {lengths.second} tokens; "
            "name positions"
        )
    if named is not None and max(named) >= lengths.second:
        raise ValueError(f"the second prompt has positions 0 to {lengths.second - 1}")


def edits_of(
    edits: Sequence[EditAsk], donors: Donors, lengths: Lengths, rows: tuple[int, ...] | None = None
) -> list[Edit]:
    """What these edits, checked before, do to the rows of a pass, in their order."""
    return [Edit(site_of(edit), _change(edit, donors, lengths), rows=rows) for edit in edits]


def _change(edit: EditAsk, donors: Donors, lengths: Lengths) -> Callable[[Tensor], Tensor]:
    if isinstance(edit, Edge):
        return _cut(edit)
    place = place_of(edit)
    if isinstance(edit, Stream) or isinstance(edit.change, Second):
        return _patched(place, donors[place.site], lengths.prompt)
    kind = edit.change

    def change(value: Tensor) -> Tensor:
        match kind:
            case Zero():
                value[place.index] = 0.0
            case Mean():
                value[place.index] = value[place.everywhere].mean(1, keepdim=True)
            case Scale(factor=factor):
                value[place.index] = value[place.index] * factor
            case Value(value=number):
                value[place.index] = number
        return value

    return change


def _patched(place: Place, donor: Tensor, columns: int) -> Callable[[Tensor], Tensor]:
    """All positions are those of the prompt: what is generated behind it has no counterpart."""
    at = place.positions or tuple(range(columns))
    index = Place(place.site, at, place.unit).index

    def change(value: Tensor) -> Tensor:
        value[index] = donor[index].to(value)
        return value

    return change


def _cut(edit: Edge) -> Callable[[Tensor], Tensor]:
    def change(pattern: Tensor) -> Tensor:
        row = pattern[:, edit.head, edit.query]
        whole = row.sum(-1, keepdim=True)
        row[:, edit.key] = 0.0
        if edit.renormalise:
            rest = row.sum(-1, keepdim=True)
            if bool((rest <= 0).any()):
                raise ValueError(
                    f"{said(edit)}: the query looks at nothing else, so no weight can be renormalised"
                )
            row *= whole / rest
        return pattern

    return change


def said(edit: EditAsk) -> str:
    """An edit in words, short: `head 1.5 → 0 at 3, 4`."""
    match edit:
        case Edge():
            how = "renormalised" if edit.renormalise else "not renormalised"
            return f"head {edit.layer}.{edit.head}: {edit.query} cut off from {edit.key}, {how}"
        case Stream():
            return f"stream into layer {edit.layer} ← second prompt at {edit.position}"
        case Head():
            name = f"head {edit.layer}.{edit.head}"
        case Mlp():
            name = f"MLP {edit.layer}"
        case Neuron():
            name = f"neuron {edit.layer}.{edit.neuron}"
    where = "" if edit.positions is None else f" at {', '.join(map(str, edit.positions))}"
    match edit.change:
        case Zero():
            what = "→ 0"
        case Mean():
            what = "→ its mean over positions"
        case Scale(factor=factor):
            what = f"× {factor:g}"
        case Value(value=value):
            what = f"= {value:g}"
        case Second():
            what = "← second prompt"
    return f"{name} {what}{where}"
