"""The page's edits as Python: a script on the public interface that gives the same numbers.

It is written, never run here. What comes from a request enters as a literal (`repr`), so no text can become code.
"""

from dataclasses import dataclass

from interp.serve.asks import Ask, Edge, EditAsk, Mean, Scale, Stream, Value, from_second
from interp.serve.changes import Place, place_of, said, site_of

SHOWN = 10
"""Tokens that the script prints."""


@dataclass(frozen=True)
class Origin:
    """How the model was opened: what a script needs to open it again."""

    source: str
    device: str = "cpu"

    @property
    def call(self) -> str:
        """The line of Python."""
        device = "" if self.device == "cpu" else f", device={self.device!r}"
        return f"interp.HookedTransformer.from_pretrained({self.source!r}{device})"


def python(ask: Ask, origin: Origin, columns: int, position: int) -> str:
    """A script that prints the probabilities of the next token, clean and edited, and leaves them in variables.

    columns: tokens of the prompt, BOS included.
    """
    donors = sorted({site_of(edit) for edit in ask.edits if from_second(edit)})
    lines = ["import interp", "", f"model = {origin.call}", f"prompt = {ask.prompt!r}"]
    if donors:
        lines += [f"second = {ask.second!r}", f"_, donor = model.run_with_cache(second, {donors!r})"]
    for number, edit in enumerate(ask.edits, 1):
        lines += ["", "", f"def edit_{number}(value, hook):", f"    # {said(edit)}", *_body(edit, columns)]
    hooks = [f"({site_of(edit)!r}, edit_{number})" for number, edit in enumerate(ask.edits, 1)]
    lines += ["", ""] if hooks else [""]
    lines += ["hooks = [", *(f"    {hook}," for hook in hooks), "]"] if hooks else ["hooks = []"]
    return "\n".join([*lines, *_end(position)]) + "\n"


def _end(position: int) -> list[str]:
    return [
        f"position = {position}",
        "clean = model(prompt)[0, position].double().softmax(-1)",
        "edited = model.run_with_hooks(prompt, hooks)[0, position].double().softmax(-1)",
        f"for token in edited.topk({SHOWN}).indices.tolist():",
        '    print(f"{model.to_string(token)!r:>16} {clean[token]:.4f} -> {edited[token]:.4f}")',
    ]


def _body(edit: EditAsk, columns: int) -> list[str]:
    if isinstance(edit, Edge):
        return _edge(edit)
    place = place_of(edit)
    here = _index(place)
    if from_second(edit):
        cells = _index(place, f":{columns}")
        return [f"    value{cells} = donor[{place.site!r}]{cells}"]
    assert not isinstance(edit, Stream)
    match edit.change:
        case Mean():
            whole = _index(Place(place.site, None, place.unit))
            return [f"    value{here} = value{whole}.mean(1, keepdim=True)"]
        case Scale(factor=factor):
            return [f"    value{here} *= {factor!r}"]
        case Value(value=number):
            return [f"    value{here} = {number!r}"]
        case _:
            return [f"    value{here} = 0.0"]


def _edge(edit: Edge) -> list[str]:
    row = f"value[:, {edit.head}, {edit.query}]"
    if not edit.renormalise:
        return [f"    {row}[:, {edit.key}] = 0.0"]
    return [
        f"    row = {row}",
        "    whole = row.sum(-1, keepdim=True)",
        f"    row[:, {edit.key}] = 0.0",
        "    row *= whole / row.sum(-1, keepdim=True)",
    ]


def _index(place: Place, every: str = ":") -> str:
    """The place as an index; `every` stands for all positions."""
    at = every if place.positions is None else str(list(place.positions))
    return f"[:, {at}]" if place.unit is None else f"[:, {at}, {place.unit}]"
