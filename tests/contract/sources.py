"""What the rules of the house ask of every Python file of the repository, read off the source in one pass.

Facts instead of trees: seven hundred trees would stay in memory, where every garbage collection walks them.
"""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Function:
    """One function or method, wherever it stands, and its parameters without a type ("return": its result)."""

    name: str
    line: int
    length: int
    """Lines without its docstring, which may be as long as a reader needs."""
    untyped: list[str]


@dataclass(frozen=True)
class Import:
    """One imported name, in full, wherever the statement stands; `from a import b` gives `a.b`."""

    name: str
    line: int
    relative: bool


@dataclass(frozen=True)
class Source:
    """One file, its path from the root."""

    path: str
    lines: int
    has_docstring: bool
    functions: list[Function]
    imports: list[Import]
    undocumented: list[tuple[int, str]]
    """Line and dotted name of public functions, classes and methods without a docstring."""
    prints: list[int]
    docstrings: list[tuple[int, str]]
    """Line of every function, class and method with a docstring, and the docstring without its indentation."""

    @property
    def module(self) -> str:
        """The dotted name from `interp` on: "core.axes" for interp/core/axes.py."""
        return self.path.removeprefix("interp/").removesuffix(".py").replace("/", ".")


def sources() -> list[Source]:
    """The package, the experiments and the tests."""
    return [source for top in ("interp", "experiments", "tests") for source in _under(top)]


def package() -> list[Source]:
    """The package alone."""
    return _under("interp")


@functools.cache
def _under(top: str) -> list[Source]:
    return [_read(path) for path in sorted((ROOT / top).rglob("*.py"))]


def none(broken: list[str]) -> None:
    """AssertionError that lists every place."""
    assert broken == [], "\n".join([f"{len(broken)} places break the rule:", *broken])


def _read(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    statements = list(_statements(tree))
    return Source(
        path=str(path.relative_to(ROOT)),
        lines=len(text.splitlines()),
        has_docstring=not text or ast.get_docstring(tree) is not None,
        functions=[_function(node) for node in statements if isinstance(node, Definition)],
        imports=[
            Import(
                alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}",
                node.lineno,
                relative,
            )
            for node in statements
            if isinstance(node, ast.Import | ast.ImportFrom)
            for relative in [isinstance(node, ast.ImportFrom) and bool(node.level)]
            for alias in node.names
        ],
        undocumented=[
            (node.lineno, name) for name, node in _public(tree.body) if not ast.get_docstring(node)
        ],
        prints=[node.lineno for node in ast.walk(tree) if _prints(node)] if "print" in text else [],
        docstrings=[
            (node.lineno, said)
            for node in statements
            if isinstance(node, Definition | ast.ClassDef) and (said := ast.get_docstring(node))
        ],
    )


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements inside, however deep: those of a block, of branches, of handlers and of cases."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, field, []) if not isinstance(node, ast.expr) else []:
            if isinstance(child, ast.stmt):
                yield child
            yield from _statements(child)


def _function(f: Definition) -> Function:
    parameters = [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]
    bare = [a.arg for a in parameters if a.annotation is None and a.arg not in {"self", "cls"}]
    untyped = bare + ["return"] * (f.returns is None)
    first = f.body[0]
    text = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    said = (first.end_lineno or first.lineno) - first.lineno + 1 if text else 0
    return Function(f.name, f.lineno, (f.end_lineno or f.lineno) - f.lineno + 1 - said, untyped)


def _public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Definition | ast.ClassDef]]:
    for node in body:
        if isinstance(node, Definition | ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body, f"{prefix}{node.name}.")


def _prints(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
