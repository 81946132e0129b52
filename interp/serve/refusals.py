"""Sentences about what is wrong with a request, for the person at the page: which field, and what it requires."""

from collections.abc import Mapping
from typing import Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

FIELDS: Final[Mapping[str, str]] = {
    "tab": "the page's own name", "prompt": "the prompt", "second": "the second prompt", "edits": "the edits",
    "position": "the position", "answer": "the answer", "wrong": "the answer against it", "layer": "the layer",
    "head": "the head", "tokens": "the number of new tokens", "temperature": "the temperature", "top_k": "top k",
    "top_p": "top p", "seed": "the seed",
}  # fmt: skip
"""Names of the fields of a request on the page."""
INSIDE = ("where", "change", "over", "factor", "scale", "values", "at", "pos", "head", "query", "key")
"""The fields of an edit, as errors name them; whatever else stands on the way to an error is no field."""
REQUIRED: Final[Mapping[str, str]] = {
    "missing": "is required, none was given",
    "extra_forbidden": "is not known here",
    "string_type": "must be text",
    "string_too_short": "is empty: at least {min_length} character is required",
    "string_too_long": "is too long: at most {max_length} characters are read",
    "string_pattern_mismatch": "must be letters, digits, - and _",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "must be a smaller whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "too_short": "must name at least {min_length}",
    "too_long": "may hold at most {max_length}",
    "literal_error": "must be {expected}",
    "tuple_type": "must be a list",
    "model_type": "must be an object with named fields",
    "json_invalid": "is no JSON",
}
"""Text after the field's name, by the kind of error."""


def in_words(cause: ValidationError) -> str:
    """The first error as a sentence, and how many other fields are wrong too."""
    errors = cause.errors(include_url=False, include_input=False)
    first, places = errors[0], dict.fromkeys(_where(error) for error in errors)
    also = f" (and {len(places) - 1} more)" if len(places) > 1 else ""
    return _error_text(first) + also


def _error_text(error: ErrorDetails) -> str:
    where, kind = _where(error), error["type"]
    if kind == "value_error":
        return f"{where}: {error['msg'].removeprefix('Value error, ')}"
    return f"{where} {REQUIRED.get(kind, 'is of a kind that is not read').format_map(error.get('ctx', {}))}"


def _where(error: ErrorDetails) -> str:
    """The field, as the page calls it: the prompt, edit 2 (factor)."""
    if not error["loc"]:
        return "the request"
    first, *rest = error["loc"]
    inside = [str(step) for step in rest if step in INSIDE]
    if error["type"] == "extra_forbidden" and rest:
        inside.append(str(rest[-1]))
    name = FIELDS.get(str(first), f"{first!r}")
    if first == "edits" and rest and isinstance(rest[0], int):
        name = f"edit {rest[0] + 1}"
    return f"{name} ({', '.join(dict.fromkeys(inside))})" if inside else name
