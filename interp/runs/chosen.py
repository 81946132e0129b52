"""One number of a run by name: a scalar result, a cell of a labelled one, or a mean over the cells that are left."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interp.core.wording import nearest
from interp.runs.comparison import as_dataset

if TYPE_CHECKING:
    import xarray as xr

    from interp.runs.record import Record

FORM = "STEP.VARIABLE or STEP.VARIABLE:DIM=LABEL,..."


@dataclass(frozen=True)
class ResultChoice:
    """A number of a result: a variable of a step, at a label of some dims; over the other dims its mean is taken."""

    text: str
    """How it was written."""
    step: str
    variable: str
    labels: Mapping[str, str]

    @classmethod
    def of(cls, text: str) -> "ResultChoice":
        """The choice that a text such as `heads.value:score=induction,layer=1` describes; ValueError if it is none."""
        name, colon, cell = text.partition(":")
        step, dot, variable = name.partition(".")
        pairs = [pair.partition("=") for pair in cell.split(",")] if colon else []
        if not (step and dot and variable) or any(
            not (dim and equals and label) for dim, equals, label in pairs
        ):
            raise ValueError(f"a result is {FORM}, got {text!r}")
        return cls(text, step, variable, {dim: label for dim, _, label in pairs})

    def value(self, record: "Record") -> float:
        """The number in one run; NaN where a cell of those that are averaged is NaN.

        Raises:
            KeyError: a step, variable, dim or label that this run does not have, naming those that it has.
            ValueError: texts, which are no numbers.
        """
        _require(self.step, record.run.steps, f"{self.text}: run {record.folder.name} has no step")
        result = as_dataset(record.result(self.step))
        _require(
            self.variable,
            [str(name) for name in result.data_vars],
            f"{self.text}: {self.step} has no variable",
        )
        values = result[self.variable]
        for dim, label in self.labels.items():
            values = self._at(values, dim, label)
        if values.dtype.kind not in "iufb":
            raise ValueError(f"{self.text}: numbers are required, {self.variable} has texts")
        return float(values.astype(float).mean(skipna=False))

    def _at(self, values: "xr.DataArray", dim: str, label: str) -> "xr.DataArray":
        """The values at one label of a dim, or at an index of a dim without labels."""
        _require(dim, [str(each) for each in values.dims], f"{self.text}: {self.variable} has no dim")
        known = [str(each) for each in values[dim].to_numpy().tolist()]
        _require(label, known, f"{self.text}: {dim} has no label")
        return values.isel({dim: known.index(label)})


def chosen(choices: "list[ResultChoice]", records: "list[Record]") -> "list[dict[str, float | None]]":
    """The numbers of every run by the text of the choice; None where a run has none of that name.

    Raises:
        KeyError: no run has a result of that name; named is what the one with most steps has.
        ValueError: texts.
    """
    rows: list[dict[str, float | None]] = [{} for _ in records]
    for choice in choices:
        missing: dict[int, KeyError] = {}  # by the number of steps that the run has
        for row, record in zip(rows, records, strict=True):
            try:
                row[choice.text] = choice.value(record)
            except KeyError as cause:
                row[choice.text] = None
                missing[len(record.run.steps)] = cause
        if missing and all(row[choice.text] is None for row in rows):
            raise missing[max(missing)]
    return rows


def _require(name: str, known: "Mapping[str, object] | list[str]", lacks: str) -> None:
    """Raise KeyError unless a name is among those that are known."""
    if name not in known:
        there = list(known)
        shown = ", ".join(there[:12]) + (", ..." if len(there) > 12 else "")
        raise KeyError(f"{lacks} {name!r}; {nearest(name, there)}; it has {shown or 'none'}")
