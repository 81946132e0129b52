"""`-p key=value`: an experiment's parameters from the command line, typed by their dataclass."""

import contextlib
import io
import re
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
    pairs = [(key, _as_python(value) if "bool" in known[key].type else value) for key, value in pairs]
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


def _as_python(value: str) -> str:
    """`true` and `false`, as files and tables have them, with Python's capitals; other words as they are."""
    return value.title() if value in ("true", "false") else value


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


def of_config(file: Path) -> tuple[str, ...]:
    """The `key=value` words of a config file: a table inside a table has dotted keys, a list one word for each entry.

    Raises:
        ValueError: a file that is no YAML, TOML or JSON with a table at its top, or an empty list.
    """
    words: list[str] = []

    def add(key: str, value: object) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                add(f"{key}.{name}" if key else str(name), inner)
        elif isinstance(value, list):
            if not value:
                raise ValueError(f"{file}: {key!r} is an empty list, which no parameter can be given as")
            for entry in value:
                add(key, entry)
        else:
            words.append(f"{key}={value}")

    table = _config_table(file)
    if not isinstance(table, dict):
        raise ValueError(f"{file} must hold a table of parameters, it holds {type(table).__name__}")
    add("", table)
    return tuple(words)


def _config_table(file: Path) -> object:
    """What a config file holds."""
    import tomllib

    import yaml

    from interp.core.files import json_contents, text_contents

    suffix = file.suffix.lower()
    if suffix == ".json":
        return json_contents(file)
    if suffix not in (".toml", ".yaml", ".yml"):
        raise ValueError(f"--config takes a .yaml, .toml or .json file, got {file}")
    text = text_contents(file)
    try:
        return tomllib.loads(text) if suffix == ".toml" else yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as cause:
        raise ValueError(f"{file} cannot be read: {' '.join(str(cause).split())}") from cause


def swept(experiment: "Experiment", words: Sequence[str]) -> list[tuple[str, ...]]:
    """The words of each run: one, or as many as a parameter has values with commas between them (`-p seed=1,2,3`).

    Only numbers, truth values and choices are split: in a text or a sequence a comma may belong to the value.

    Raises:
        ValueError: a word that is no `key=value`, or two parameters with several values.
    """
    known = _parameters_by_name(experiment)
    several = [
        (i, key, value.split(","))
        for i, (key, value) in enumerate(_pair(word, experiment.file) for word in words)
        if "," in value and key in known and _is_one_number(known[key])
    ]
    if len(several) > 1:
        raise ValueError(
            f"one parameter may have several values, got {', '.join(key for _, key, _ in several)}: a grid is a "
            "loop in the shell"
        )
    if not several:
        return [tuple(words)]
    ((at, key, values),) = several
    return [(*words[:at], f"{key}={value}", *words[at + 1 :]) for value in values]


def _is_one_number(parameter: "Parameter") -> bool:
    """Whether a parameter holds a number, a truth value or one of some choices, so that a comma cannot belong to it."""
    kinds = set(re.findall(r"\w+", parameter.type.partition("[")[0]))
    return parameter.sequence is None and kinds <= {"int", "float", "bool", "None", "Literal"}


def listed(experiment: "Experiment") -> str:
    """The parameters of an experiment, one a line: name, type, default and what it means."""
    lines = [experiment.question.split("\n\n")[0]] if experiment.question else []
    for name, parameter in _parameters_by_name(experiment).items():
        default = "required" if parameter.default is None else f"default {parameter.default}"
        lines.append(
            f"  -p {name}=...  {parameter.type}, {default}{'. ' if parameter.doc else ''}{parameter.doc}"
        )
    return "\n".join(lines)


def described(experiment: "Experiment") -> list[dict[str, str | None]]:
    """The parameters of an experiment by what `listed` says of them; a required one has the default None."""
    return [
        {"name": name, "type": parameter.type, "default": parameter.default, "doc": parameter.doc}
        for name, parameter in _parameters_by_name(experiment).items()
    ]


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
