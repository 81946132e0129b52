"""The house style as far as a parser can see it: short files, short functions, everything public documented."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = {str(p.relative_to(ROOT)): p for p in sorted((ROOT / "interp").rglob("*.py"))}
EVERYWHERE = PACKAGE | {
    str(p.relative_to(ROOT)): p
    for top in ("experiments", "tests")
    for p in sorted((ROOT / top).rglob("*.py"))
}
MAX_FILE, MAX_FUNCTION = 400, 60
Function = ast.FunctionDef | ast.AsyncFunctionDef


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> list[Function]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, Function)]


def public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Public functions and classes of a module or class body, with their dotted names."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{prefix}{node.name}.")


@pytest.mark.parametrize("name", EVERYWHERE)
def test_files_are_short_and_say_what_they_are(name: str) -> None:
    lines = EVERYWHERE[name].read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_FILE, f"{name} has {len(lines)} lines"
    assert not lines or ast.get_docstring(tree(EVERYWHERE[name])), (
        f"{name} does not open with what it is and why"
    )


@pytest.mark.parametrize("name", EVERYWHERE)
def test_functions_are_short(name: str) -> None:
    lengths = {
        f"{f.name}:{f.lineno}": (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions(EVERYWHERE[name])
    }
    assert {f: n for f, n in lengths.items() if n > MAX_FUNCTION} == {}


def test_ninety_five_percent_of_functions_have_at_most_45_lines() -> None:
    lengths = sorted(
        (f.end_lineno or f.lineno) - f.lineno + 1 for p in PACKAGE.values() for f in functions(p)
    )
    assert lengths[len(lengths) * 95 // 100] <= 45


@pytest.mark.parametrize("name", PACKAGE)
def test_everything_public_is_documented(name: str) -> None:
    bare = [n for n, node in public(tree(PACKAGE[name]).body) if not ast.get_docstring(node)]
    assert bare == []


@pytest.mark.parametrize("name", PACKAGE)
def test_only_the_command_line_prints(name: str) -> None:
    if name.startswith("interp/cli/"):
        return
    calls = [node for node in ast.walk(tree(PACKAGE[name])) if isinstance(node, ast.Call)]
    assert [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"] == []


@pytest.mark.parametrize("name", PACKAGE)
def test_every_parameter_and_result_of_a_function_is_typed(name: str) -> None:
    untyped = []
    for f in functions(PACKAGE[name]):
        parameters = [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]
        bare = [a.arg for a in parameters if a.annotation is None and a.arg not in {"self", "cls"}]
        if bare or f.returns is None:
            untyped.append(f"{f.name}:{f.lineno} {bare}")
    assert untyped == []
