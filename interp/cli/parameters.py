"""`-p key=value`: an experiment's parameters from the command line, typed by their dataclass."""

import contextlib
import io
import shlex
from collections.abc import Sequence
from dataclasses import make_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

if TYPE_CHECKING:
    from interp.runs.experiment import Experiment, Parameter


def filled(experiment: "Experiment", given: Sequence[str]) -> object:
    """The parameters of an experiment from `key=value` words; `a.b=1` reaches into a record.

    A sequence is given entry by entry, `-p layers=1 -p layers=2`, in place of the default one.

    Raises:
        ValueError: a word that is no `key=value`, an unknown key (naming the nearest), a key given twice, a missing
            one, or a value of another type.
    """
    known = _parameters_by_name(experiment)
    pairs = [_pair(word, experiment.file) for word in given]
    keys = [key for key, _ in pairs]
    for key in keys:
        _require_known(key, known, experiment.file)
        if keys.count(key) > 1 and known[key].sequence is None:
            raise ValueError(f"parameter {key!r} holds one value, it was given {keys.count(key)}")
    if missing := [
        name for name, parameter in known.items() if parameter.default is None and name not in keys
    ]:
        raise ValueError(f"{experiment.file} requires -p {missing[0]}=..., it has no default")
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message), contextlib.redirect_stdout(message):
            found = _parsed(experiment.kind, pairs)
            for key in dict.fromkeys(keys):
                values = [value for other, value in pairs if other == key]
                if known[key].sequence is not None and values != ["None"]:
                    found = _with_entries(found, key.split("."), known[key].sequence, values)
    except SystemExit as ended:
        raise ValueError(f"-p {shlex.join(given)}: {_message_text(message.getvalue())}") from ended
    return found


def _parsed(kind: type, pairs: Sequence[tuple[str, str]]) -> object:
    """The record of these `key=value` pairs; tyro adds the entries of a sequence to its default."""
    return tyro.cli(
        kind,
        args=[f"--{key}={value}" for key, value in pairs],
        config=(tyro.conf.FlagConversionOff, tyro.conf.UseAppendAction),
    )


def _with_entries(record: object, path: Sequence[str], kind: object, values: Sequence[str]) -> object:
    """The record with a sequence in it that holds these entries alone."""
    name, *inner = path
    if inner:
        value = _with_entries(getattr(record, name), inner, kind, values)
    else:
        alone = make_dataclass("Alone", [(name, kind)])
        value = getattr(_parsed(alone, [(name, entry) for entry in values]), name)
    return replace(record, **{name: value})  # type: ignore[type-var]


def given_in(folder: Path) -> tuple[str, ...]:
    """The `key=value` words that a run was started with."""
    from interp.runs.record import Record

    words = shlex.split(Record.open(folder).run.sessions[0].command)
    return tuple(word for flag, word in pairwise(words) if flag == "-p")


def merged(experiment: "Experiment", before: Sequence[str], now: Sequence[str]) -> tuple[str, ...]:
    """The words of the earlier session, those whose keys are given now replaced by the new words."""
    again = {_pair(word, experiment.file)[0] for word in now}
    return (*(word for word in before if _pair(word, experiment.file)[0] not in again), *now)


def listed(experiment: "Experiment") -> str:
    """The parameters of an experiment, one a line: name, type, default and what it means."""
    lines = [experiment.question.split("\n\n")[0]] if experiment.question else []
    for name, parameter in _parameters_by_name(experiment).items():
        default = "required" if parameter.default is None else f"default {parameter.default}"
        lines.append(
            f"  -p {name}=...  {parameter.type}, {default}{'. ' if parameter.doc else ''}{parameter.doc}"
        )
    return "\n".join(lines)


def _parameters_by_name(experiment: "Experiment") -> "dict[str, Parameter]":
    from interp.runs.experiment import parameters

    return {parameter.name: parameter for parameter in parameters(experiment.kind)}


def _pair(word: str, file: Path) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise ValueError(
            f"-p requires key=value, got {word!r}; `interp run {file} --parameters` lists the keys"
        )
    return key, value


def _require_known(key: str, known: "dict[str, Parameter]", file: Path) -> None:
    from interp.core.wording import nearest

    if key not in known:
        raise ValueError(f"{file} has no parameter {key!r}; {nearest(key, known)}; it has {', '.join(known)}")


def _message_text(message: str) -> str:
    """The text in the first box of tyro's error message, without the lines of the box."""
    lines = [line.strip(" │|") for line in message.splitlines()]
    rules = [i for i, line in enumerate(lines) if set(line) and set(line) <= set("-─╭╮╰╯")]
    inner = lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines
    return " ".join(" ".join(inner).split())
