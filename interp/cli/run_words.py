"""Runs in words: one in full, two beside each other."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interp.runs.comparison import Difference
    from interp.runs.record import Record


def shown(record: "Record") -> Iterator[str]:
    """The lines of `interp show`."""
    from interp.runs.folder import flat
    from interp.runs.run_file import duration

    run, state = record.run, record.state
    yield f"{record.folder}: {state}, {duration(run.seconds)}"
    yield from (f"  {line}" for line in run.question.splitlines()[:1])
    if run.error:
        yield f"  {run.error}"
    if state in ("failed", "interrupted"):
        yield f"  to go on: {record.how_to_resume}"
    yield "parameters"
    yield from (f"  {name} = {value}" for name, value in flat(run.parameters).items())
    yield "provenance"
    yield from (f"  {name} = {value}" for name, value in flat(run.provenance).items())
    yield from (f"  warning: {line}" for line in run.warnings)
    yield "results"
    for name in run.steps:
        yield from _result(record, name)
    yield "files"
    for path in sorted(record.folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            yield f"  {path.relative_to(record.folder)}  {path.stat().st_size:,} bytes"


def compared_runs(first: "Record", second: "Record", largest: int) -> Iterator[str]:
    """The lines of `interp compare`."""
    from interp.runs.comparison import as_dataset, compared
    from interp.runs.folder import changes

    one, other = first.run, second.run
    yield f"first   {first.folder}: {first.state}"
    yield f"second  {second.folder}: {second.state}"
    for title, ours, theirs in (
        ("parameters", one.parameters, other.parameters),
        ("provenance", one.provenance, other.provenance),
    ):
        found = changes(ours, theirs)
        yield f"{title}: {'differ' if found else 'the same'}"
        yield from (f"  {name}: {was} -> {now}" for name, was, now in found)
    for name in dict.fromkeys([*one.steps, *other.steps]):
        if name not in one.steps or name not in other.steps:
            yield f"{name}: only in the {'first' if name in one.steps else 'second'} run"
            continue
        found_here = compared(
            as_dataset(first.result(name)), as_dataset(second.result(name)), largest=largest
        )
        same = not found_here.largest and not found_here.notes
        yield f"{name}: {'the same' if same else 'differs, largest first'}"
        yield from (f"  {_words(each)}" for each in found_here.largest)
        yield from (f"  {line}" for line in found_here.notes)


def _result(record: "Record", name: str) -> Iterator[str]:
    from interp.runs.comparison import as_dataset, headline, main_variables

    result = as_dataset(record.result(name))
    yield f"  {name}: {', '.join(f'{dim} {size}' for dim, size in result.sizes.items()) or 'no dims'}"
    yield from (f"    {variable}: {headline(result, variable)}" for variable in main_variables(result))


def _words(each: "Difference") -> str:
    place = f" at {each.where}" if each.where else ""
    text = f"{each.variable}{place}: {each.first} -> {each.second}, {each.change:+.4g}"
    if each.p == each.p:
        text += f", p {each.p:.2g}, {each.p_adjusted:.2g} with all cells tested"
    return text
