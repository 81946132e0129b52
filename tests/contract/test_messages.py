"""The pages of messages: every note, every class of errors, and every refusal that says no remedy itself is on them.

What a message says is read off the source: its constant text, with `…` where a value stands.
"""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.contract.sources import ROOT, none

PAGES = ("docs/howto/it_says.md", "docs/howto/it_refuses.md")
ROOMS = (
    *("opening.py", "hooked.py", "encoder_decoder.py", "families/", "wrapped/", "model/", "core/", "data/"),
    *("passes/", "runs/", "serve/", "pages/", "cli/", "tasks/", "features/formats/"),
)
"""Where models, prompts and files are opened, passes and runs made, and pages served."""

SAYS_WHAT_TO_DO = re.compile(
    r"\b(?:must|requires?|required|supported:|possible:|may be|pip install|it is called|it has)\b|, got\b"
    r"|\b(?:is|are) \d+ to\b"
    r"|[:;,] (?:or |perhaps |then )?(?:a new|accept|ask|call|choose|convert|cut|edit|fetch|finish|give|hand|index|leave"
    r"|load|make|merge|name|open|pass|put|run|say|select|set|start|store|take|try|use|write)\b"
)
"""Words of a refusal that says what was required, what there is or what to do."""

POINTERS = re.compile(r"nearest\(|hint|suggestion|remedy", re.IGNORECASE)
"""Names of what adds the nearest valid thing to a refusal."""

INTERNAL = {"AssertionError", "TypeCheckError", "EndOfPass"}
"""Errors that no user meets: they are caught inside, or a defect of this package."""

NOTES_BY = {"_changed_words", "_fails", "_fewest_edges", "_compared", "_doubts", "_first_token"}
"""Functions without "note" in their names that make sentences of notes."""
WORDS_OF_ITS_OWN = 3
"""Words of a refusal that is not the words of another with a name before them."""
SENTENCE = 5
"""Words from which on a text that makes notes is a sentence; shorter ones are parts of one."""


@dataclass(frozen=True)
class Message:
    """One message as it stands in a file."""

    place: str
    kind: str
    text: str
    """Its constant text, with `…` for what varies."""
    source: str
    """The expression that makes it."""


def text_of(node: ast.AST) -> str:
    """The constant text of an expression, `…` for what it does not know."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(text_of(value) if isinstance(value, ast.Constant) else "…" for value in values)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return text_of(left) + text_of(right)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(value)), attr="format")):
            return re.sub(r"\{.*?\}", "…", value)
    return "…"


def sentences(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and text of every outermost string in an expression or a statement, docstrings apart."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        yield node.lineno, text_of(node)
        return
    if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return
    for child in ast.iter_child_nodes(node):
        yield from sentences(child)


@functools.cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Every call, definition and assignment of the package with its file; records whose `notes` are fields apart."""
    root = ROOT / "interp"
    every = {str(path.relative_to(root)): path for path in sorted(root.rglob("*.py"))}
    kinds = (ast.Call, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.AugAssign)
    return [
        (name, node)
        for name, path in every.items()
        if not name.startswith(("zoo/", "lab/", "verify.py", "runs/comparison.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds)
    ]


def called(node: ast.expr) -> str:
    """The name that an expression ends in: "warn" of `warnings.warn`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@functools.cache
def notes() -> list[Message]:
    """Every sentence that a note gives: what is handed to `note`, `noted` and `warn`, and what makes `notes`."""
    found = {
        (f"interp/{name}:{line}", text)
        for name, node in nodes()
        for root, least in _of_notes(node)
        for line, text in sentences(root)
        if _words(text) >= least
    }
    return [Message(place, "note", text, text) for place, text in sorted(found)]


def _words(text: str) -> int:
    return len(re.findall(r"[^\W\d_]{2,}", text))


def _of_notes(node: ast.AST) -> list[tuple[ast.AST, int]]:
    """The expressions below a node that are notes, if it is one of these, and from how many words on they are."""
    if isinstance(node, ast.FunctionDef) and ("note" in node.name or node.name in NOTES_BY):
        return [(each, SENTENCE) for each in node.body]
    if isinstance(node, ast.Call):
        appended = isinstance(node.func, ast.Attribute) and called(node.func.value) == "notes"
        given = appended or called(node.func) in {"note", "noted", "warn"}
        by_name = [(each.value, SENTENCE) for each in node.keywords if each.arg == "notes"]
        return [*((each, 2) for each in node.args if given), *by_name]
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return [(node.value, SENTENCE)] if called(target) == "notes" else []
    return []


@functools.cache
def refusals() -> list[Message]:
    """Every error that is made with words."""
    return [
        Message(f"interp/{name}:{node.lineno}", kind, text, ast.unparse(node))
        for name, node in nodes()
        if isinstance(node, ast.Call) and node.args
        if (kind := called(node.func))[:1].isupper() and kind.endswith("Error") and kind not in INTERNAL
        for text in [" ".join(map(text_of, node.args))]
        if _words(text)
    ]


def says_what_to_do(message: Message) -> bool:
    """Whether the words of a refusal name what is required, what there is, or what to do."""
    return bool(SAYS_WHAT_TO_DO.search(message.text) or POINTERS.search(message.source))


def of_rooms(message: Message) -> bool:
    """Whether it is raised where models, prompts and files are opened, passes and runs made, and pages served."""
    return message.place.removeprefix("interp/").startswith(ROOMS)


def error_classes() -> list[str]:
    """The names of every class of errors and warnings that a user may meet."""
    return sorted(
        node.name
        for _, node in nodes()
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in INTERNAL
        if any(called(base).endswith(("Error", "Exception", "Warning")) for base in node.bases)
    )


@functools.cache
def quoted() -> tuple[str, ...]:
    """The beginnings that the pages quote: what stands in backticks in the first column of tables of what "it says"."""
    found: list[str] = []
    for page in PAGES:
        head = ""
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
            head = (head or line) if line.startswith("| ") else head if line.startswith("|") else ""
            if head.startswith("| it says |") and line is not head:
                found += re.findall(r"`([^`]+)`", line.split(" | ")[0])
    return tuple(found)


def fits(quote: str, text: str) -> bool:
    """Whether the pieces of a quotation, cut at `…`, stand in a text in their order."""
    at = 0
    for piece in map(str.strip, quote.split("…")):
        if (found := text.find(piece, at)) < 0:
            return False
        at = found + len(piece)
    return True


def missing(messages: list[Message]) -> list[str]:
    return [
        f"{each.place}: {each.kind}: {each.text}"
        for each in messages
        if not any(fits(quote, each.text) for quote in quoted())
    ]


def test_every_note_is_on_a_page_of_messages() -> None:
    found = notes()
    assert len(found) > 50
    none(missing(found))


def test_every_class_of_errors_is_on_a_page_of_messages() -> None:
    pages = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    assert len(error_classes()) > 10
    none([name for name in error_classes() if not re.search(rf"`(?:[\w.]+\.)?{name}`", pages)])


def test_every_refusal_that_says_no_remedy_is_on_a_page_of_messages() -> None:
    found = [each for each in refusals() if of_rooms(each) and _words(each.text) >= WORDS_OF_ITS_OWN]
    found = [each for each in found if not says_what_to_do(each)]
    assert len(found) > 100
    none(missing(found))


def test_every_quotation_is_of_a_message_that_there_is() -> None:
    every = [each.text for each in (*notes(), *refusals())]
    none([quote for quote in quoted() if not any(fits(quote, text) for text in every)])


def test_quotations_have_words_to_be_recognised_by() -> None:
    none([quote for quote in quoted() if len(re.findall(r"\w+", quote)) < 1 + ("…" not in quote)])
