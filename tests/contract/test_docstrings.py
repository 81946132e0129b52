"""Public docstrings have Google's sections, complete and in one order, so that a reader finds an argument at a glance.

Public is what the API reference names: the functions, the questions behind them, and the members of the modules there.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from interp.passes.question import Question, function_name
from tests.contract.sources import none, package

REFERENCE = Path(__file__).parents[2] / "docs" / "api"
ORDER = ["Args", "Returns", "Raises", "Caveat", "Caveats", "Memory", "Cost", "Source", "See Also", "Example"]
HEADING = re.compile(r"^([A-Z][a-z]+(?: [A-Z][a-z]+)?):$")
OLD = re.compile(r"^(Errors?|Returns|Variables|Sources?|Memory|Cost|Caveats?): \S")
"""Openings of a paragraph that are headings of sections now."""


def named() -> list[str]:
    """Every name of the API reference."""
    lines = [line for page in sorted(REFERENCE.glob("*.md")) for line in page.read_text("utf-8").splitlines()]
    return [line.removeprefix("::: ") for line in lines if line.startswith("::: ")]


def found(name: str) -> object:
    """The object of a dotted name."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            at: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            at = getattr(at, part)
        return at
    raise AssertionError(f"the reference names {name}, which is not there")


def functions() -> Iterator[tuple[str, Callable[..., object]]]:
    """Every public function, by its full name."""
    for name in named():
        each = found(name)
        if inspect.ismodule(each):
            for inner, value in vars(each).items():
                if not inner.startswith("_") and inspect.isfunction(value) and value.__module__ == name:
                    yield f"{name}.{inner}", value
        elif inspect.isfunction(each):
            yield name, each


def sections(doc: str) -> dict[str, list[str]]:
    """The lines under every heading of a docstring, in its order; what stands before the first is under ""."""
    made: dict[str, list[str]] = {"": []}
    at = ""
    for line in doc.splitlines():
        heading = HEADING.match(line)
        if heading and heading[1] in ORDER:
            at = heading[1]
            assert at not in made, f"{at} stands twice"
        made.setdefault(at, []).append(line)
    return made


def entries(lines: list[str]) -> list[str]:
    """The names that a section explains: `clean, corrupt: prompts` explains two."""
    heads = [re.match(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*): \S", line) for line in lines]
    return [name.strip("*") for head in heads if head for name in head[1].split(", ")]


def explained(function: Callable[..., object], section: str) -> list[str]:
    """The lines of one section of a function's docstring."""
    return sections(inspect.getdoc(function) or "").get(section, [])


def test_every_argument_is_explained_once_and_in_order() -> None:
    """Except a `model` or a `result`, which their types explain."""
    public, broken = dict(functions()), []
    assert len(public) > 200
    for name, function in public.items():
        taken = [each for each in inspect.signature(function).parameters if each not in ("model", "result")]
        said = [each for each in entries(explained(function, "Args")) if each not in ("model", "result")]
        if said != taken:
            broken.append(f"{name}: takes {', '.join(taken)}; explains {', '.join(said) or 'none'}")
    none(broken)


def test_what_a_function_returns_stands_under_returns() -> None:
    """Except of functions that draw: they return the axes that they have drawn on."""
    none([
        name
        for name, function in functions()
        if inspect.signature(function).return_annotation not in (None, "None", "Axes", "Axes | np.ndarray")
        and not explained(function, "Returns")
    ])  # fmt: skip


def test_sections_follow_one_order_and_none_is_a_paragraph() -> None:
    broken = []
    for source in package():
        for line, doc in source.docstrings:
            try:
                order = [ORDER.index(each) for each in sections(doc) if each]
            except AssertionError as twice:
                broken.append(f"{source.path}:{line}: {twice}")
                continue
            if order != sorted(order):
                broken.append(f"{source.path}:{line}: {[ORDER[i] for i in order]}")
            broken += [f"{source.path}:{line}: {old}" for old in doc.splitlines() if OLD.match(old)]
    none(broken)


def test_a_docstring_with_a_fault_is_found() -> None:
    doc = "Mean.\n\nArgs:\n    a, b: ends.\n        More: of it.\n    *rest: others.\n\nReturns:\n    [b], in bits.\n"
    assert [*sections(doc)] == ["", "Args", "Returns"]
    assert entries(sections(doc)["Args"]) == ["a", "b", "rest"]
    with pytest.raises(AssertionError, match="Args stands twice"):
        sections(doc + "\nArgs:\n    c: another.\n")
    assert OLD.match("Errors: ValueError for none.") and not OLD.match("Returns:")


def test_questions_are_explained_by_their_functions() -> None:
    """A question's record and its function share one docstring; the words of one written by hand name its function."""
    words = {function.__doc__ for _, function in functions()}
    for name in named():
        each = found(name)
        if inspect.isclass(each) and issubclass(each, Question) and each is not Question:
            doc = inspect.getdoc(each) or ""
            see = " ".join(sections(doc).get("See Also", []))
            assert each.__doc__ in words or f"`{function_name(each)}`: the function" in see, name
