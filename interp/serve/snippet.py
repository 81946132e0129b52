"""The page's edits as Python: a script on the public interface that gives the same numbers.

It is written, never run here. What comes from a request enters as a literal (`repr`), so no text can become code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from interp.model.edits import Add, Edit, Mean, Resample
from interp.passes.edit_text import change_to_python, edit_to_python
from interp.serve.asks import EditedPrompt
from interp.serve.changes import part_of

SHOWN = 10
"""Tokens that the script prints."""
PRINTED = (
    f"for token in edited.topk({SHOWN}).indices.tolist():",
    '    print(f"{model.to_string(token)!r:>16} {clean[token]:.4f} -> {edited[token]:.4f}")',
)
"""The lines that print the most probable tokens."""


@dataclass(frozen=True)
class Origin:
    """How the model was opened: what a script needs to open it again."""

    source: str
    device: str = "cpu"
    revision: str | None = None
    dtype: str | None = None
    directions: Mapping[str, str] = field(default_factory=dict)
    """The file of the direction of each site that has one."""
    prepend_bos: bool | None = None

    @property
    def call(self) -> str:
        """The line of Python."""
        arguments = {
            "revision": self.revision, "dtype": self.dtype, "device": self.device,
            "default_prepend_bos": self.prepend_bos,
        }  # fmt: skip
        usual = {"revision": None, "dtype": None, "device": "cpu", "default_prepend_bos": None}
        options = "".join(f", {name}={value!r}" for name, value in arguments.items() if value != usual[name])
        return f"interp.HookedTransformer.from_pretrained({self.source!r}{options})"


def python(ask: EditedPrompt, origin: Origin, position: int, answer: Sequence[int] = ()) -> str:
    """A script that prints the probabilities of the token after `position`, clean and edited, and keeps them.

    Args:
        answer: the tokens of an answer of several, which follow the prompt but for the last one; the script then prints
            the log-probability of all of them too.
    """
    several = len(answer) > 1
    lines = ["import interp", "", f"model = {origin.call}", f"prompt = {ask.prompt!r}"]
    if several:
        lines += [f"answer = {list(answer)}", _row("row", "prompt")]
    if ask.averaged:
        lines.append(f"_, reference = model.run_with_cache(prompt, {_sites(ask, Mean)!r})")
    if ask.resampled:
        donor = "second_row" if several else "second"
        lines += [
            f"second = {ask.second!r}",
            *([_row(donor, "second")] if several else []),
            f"_, donor = model.run_with_cache({donor}, {_sites(ask, Resample)!r})",
        ]
    edits = [f"    {_edit(edit, origin)}," for edit in ask.edits]
    lines += ["", "edits = [", *edits, "]"] if edits else ["", "edits = []"]
    return "\n".join([*lines, *(_answered_end(position) if several else _end(position))]) + "\n"


def _row(name: str, prompt: str) -> str:
    """The line that makes the ids of a prompt and its answer's tokens before the last one."""
    return f"{name} = [[*model.to_tokens({prompt})[0].tolist(), *answer[:-1]]]"


def _sites(ask: EditedPrompt, kind: type[Mean | Resample]) -> list[str]:
    """The sites at which values of one kind of edit are looked up."""
    return sorted({edit.site for edit in ask.edits if isinstance(edit.change, kind)})


def _edit(edit: Edit, origin: Origin) -> str:
    """The edit, with values that are looked up in place of a change that stands for them."""
    text = edit_to_python(edit)
    if isinstance(edit.change, Add):
        file = origin.directions[edit.site]
        values = f"interp.causal.Subspace.load({file!r}, model).directions[0], {edit.change.scale:g}"
        return text.replace(change_to_python(edit.change), f"interp.edits.Add({values})")
    unit = part_of(edit).index
    if isinstance(edit.change, Mean):
        values = f"reference[{edit.site!r}][0].mean(0)" + ("" if unit is None else f"[{unit}]")
    elif isinstance(edit.change, Resample):
        given = edit.at.get("pos")
        at = ":" if given is None else str(list(given) if isinstance(given, tuple) else given)
        cells = f"0, {at}" if unit is None else f"0, {at}, {unit}"
        values = f"donor[{edit.site!r}][{cells}]"
    else:
        return text
    return text.replace(change_to_python(edit.change), f"interp.edits.Set({values})")


def _end(position: int) -> list[str]:
    return [
        f"position = {position}",
        "clean = model(prompt)[0, position].double().softmax(-1)",
        "edited = model.edited(edits)(prompt)[0, position].double().softmax(-1)",
        *PRINTED,
    ]


def _answered_end(position: int) -> list[str]:
    """The lines about a row that holds an answer: the token after the position, and log p of the answer."""
    return [
        f"position = {position}",
        "logits = [each(row)[0].double() for each in (model, model.edited(edits))]",
        "clean, edited = (each[position].softmax(-1) for each in logits)",
        *PRINTED,
        "end = len(row[0]) - len(answer)  # the position of the prompt's last token",
        "clean_answer, edited_answer = (",
        "    sum(float(each[end + i].log_softmax(-1)[token]) for i, token in enumerate(answer)) for each in logits",
        ")",
        'print(f"log p of {model.to_string(answer)!r}: {clean_answer:.4f} -> {edited_answer:.4f}")',
    ]
