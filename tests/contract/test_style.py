"""The house style as far as a parser can see it and no linter does: what is public is documented, in plain words.

Each rule is one test, whose message lists every place that breaks it; `make lint` runs them too.
"""

import re

from tests.contract.sources import none, package, sources

RIDDLE = re.compile(
    r"(?:The same(?:[,.:]| (?:with|on|where|in|as|of|for|under|but)\b)|Those\b|That of\b|Who\b|What\b.*\bwhose\b)"
)
"""First lines that name nothing: a stranger would have to read the code to know what they speak of."""


def test_files_open_with_what_they_are_and_why() -> None:
    none([f"{s.path}:1: no docstring" for s in sources() if not s.has_docstring])


def test_ninety_five_percent_of_functions_have_at_most_45_lines() -> None:
    lengths = sorted(f.length for s in package() for f in s.functions)
    assert lengths[len(lengths) * 95 // 100] <= 45


def test_everything_public_is_documented() -> None:
    none([f"{s.path}:{line}: {name}" for s in package() for line, name in s.undocumented])


def test_first_lines_name_what_they_speak_of() -> None:
    written_here = [s for s in package() if not s.path.startswith(("interp/compat/", "interp/lab/"))]
    lines = [(s.path, line, doc.splitlines()[0]) for s in written_here for line, doc in s.docstrings]
    assert len(lines) > 1000
    none([f"{path}:{line}: {said}" for path, line, said in lines if RIDDLE.match(said)])


def test_only_the_command_line_prints() -> None:
    none([f"{s.path}:{line}" for s in package() if not s.path.startswith("interp/cli/") for line in s.prints])


def test_every_parameter_and_result_of_a_function_is_typed() -> None:
    each = [(s.path, f) for s in package() for f in s.functions]
    none([f"{path}:{f.line}: {f.name}, {f.untyped}" for path, f in each if f.untyped])
