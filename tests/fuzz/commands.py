"""Every command with every option changed, one at a time: read off the commands themselves, so a new one is tried
too."""

import dataclasses
import functools
import os
import re
import shutil
import tempfile
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

import torch
import tyro

import interp
from interp.cli import COMMANDS, command, parsed
from interp.features import Dictionary, ReLU, save
from tests.contract.calls import graph_file
from tests.fuzz import loaders
from tests.fuzz.judge import REFUSED, SECONDS, Case

FAMILY = "command lines"
CLEAN, CORRUPT = "When Mary and John went to the shop", "When John and Mary went to the shop"
TEXTS = (
    "", " ", "x", "-1", "0", "3", "1.5", "nan", "inf", "-inf", "1000000000", "1000000000000000000", "None",
    "True", "[]", "{}", "null",
    "L9H9", "L0H1", "blocks.0.hook_resid_pre", "../..", "nowhere/at/all", "folder", "pipe", "loop", "text.txt",
    "bytes.json", "\x00",
    "\ud800", "a" * 5000, "-", "--", "--help", "éµ☃", "a=b", "1e-300", "1e300",
)  # fmt: skip
"""What is typed for every option: none of it is meant by anybody."""
EXPERIMENT = '''"""Does it add up?"""
from dataclasses import dataclass

import xarray as xr

from interp.runs.record import Record


@dataclass(frozen=True)
class Job:
    steps: int = 3
    """How many."""


def main(job: Job, record: Record) -> None:
    record.step("first", lambda: xr.Dataset({"x": float(job.steps)}))
'''
WORDS: Mapping[str, str] = {
    "model": "model", "prompt": CLEAN, "data": CLEAN, "clean": CLEAN, "corrupt": CORRUPT, "answer": " John",
    "wrong": " Mary",
    "name": "run", "first": "run", "others": "run", "runs": ".", "subject": "Mary", "part": "L0H1", "head": "L0H1",
    "tokens": " John", "site": "resid_pre", "task": "indirect_objects",
}  # fmt: skip
"""What a required option of this name is in a line that is right; of another name, something of its kind."""
NO = "--no"
"""In place of the word of an option that is true or false: it is switched off."""
OF: Mapping[str, Mapping[str, str]] = {
    "causal-trace": {"model": "demo-4l", "answer": "e", "subject": "Mary"},
    "circuit": {"edges": "5", "pairs": "2"}, "list": {"runs": "."},
    "diff": {"tuned": "tuned"}, "linear-relation": {"pairs": "pairs.csv", "only_known": NO, "examples": "2"},
    "function-vectors": {"tasks": "pairs.csv", "top": "1", "random": "1"},
    "feature-cards": {"dictionary": "dictionary"}, "dictionary-quality": {"dictionary": "dictionary"},
    "feature-circuit": {"dictionaries": "dictionary", "draws": "0", "node_threshold": "1e-9"},
    "steering-curve": {"dictionaries": "dictionary", "directions": "L0F3", "random": "2"},
    "steering": {"positive": CLEAN, "negative": CORRUPT, "test_share": "0"},
    "probe-neurons": {"data": "texts.txt", "labels": "labels.txt", "site": "resid_post", "sizes": "1", "shuffles": "1"},
    "attention-attribution": {"key": "1"},
    "findings": {"claims": "previous-token-heads", "prompts": "12"},
    "heads": {"data": f"{CLEAN} {CLEAN}"}, "jacobian-lens": {"skip": "1", "precision": "None"},
}  # fmt: skip
"""Options of one command: a trace requires a fact that the model knows, and that model says this; heads need tokens
that repeat; small numbers; one paper, one program."""
OTHER_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("data", "clean", "corrupt", "prompt"), "prompt|row"), "wrong": "an answer",
    **dict.fromkeys(("out", "csv", "json", "html"), "to write to|a folder that is there"),
    "part": "index of a head", "receivers": "index of a head", "by": "dims", "checkpoints": "revision",
    **dict.fromkeys(("first", "others", "name", "runs"), "folder of a run"), "reference": "prompt",
    "resume": "a run is required", "direction": "subspace|a regular file",
    "directions": "feature", "tuned": "model|config", "into": "model|config",
}  # fmt: skip
"""What else messages call an option."""
MEANT = frozenset({("runs", "../.."), ("folder", "../..")})
"""An option and a text that asks for what it says: a run that is to be written to that folder is written there."""
SLOW: Mapping[str, float] = {"report": 30.0}
"""Seconds of the processor for what takes some even for the smallest model."""
FILES: Mapping[str, str] = {"graph": "graph.json", "run": "adding.py"}


@functools.cache
def home() -> Path:
    """A folder with a model, a run, a graph, an experiment, and things that are no files."""
    path = Path(tempfile.mkdtemp())
    (path / "model").mkdir()
    loaders.tokenized(path / "model", n_layers=2, n_ctx=128)
    shutil.copytree(loaders.whole("a record") / "run", path / "run")
    shutil.copy(graph_file(), path / "graph.json")
    (path / "adding.py").write_text(EXPERIMENT)
    shutil.copytree(path / "model", path / "tuned")
    tuned = interp.HookedTransformer.from_pretrained(path / "model").transformer
    with torch.no_grad():
        for parameter in tuned.blocks[1].parameters():
            parameter.mul_(1.5)
    interp.families.save(tuned, path / "tuned")
    (path / "pairs.csv").write_text("input,output\n" + "".join(f"{a},{b}\n" for a in "xyz" for b in "uvwts"))
    texts = [f"{text} {number}" for number in range(6) for text in (CLEAN, CORRUPT)]
    (path / "texts.txt").write_text("\n".join(texts))
    (path / "labels.txt").write_text("1\n0\n" * 6)
    square = {name: torch.eye(8) for name in ("W_enc", "W_dec")}
    weights = {**square, **{name: torch.zeros(8) for name in ("b_enc", "b_dec")}}
    save(Dictionary(ReLU(), weights, reads="blocks.0.hook_resid_post"), path / "dictionary")
    (path / "text.txt").write_text(f"{CLEAN}\n")
    (path / "bytes.json").write_bytes(b"\xff\xfe{")
    (path / "folder").mkdir()
    return path


def cases() -> Iterator[Case]:
    """Every option of every command with every text; and lines with too much, too little, or the wrong things."""
    for name in COMMANDS:
        right, places = line(name, command(name))
        for what, changed in {
            "as it is": right, "with a word more": [*right, "nonsense"], "with an unknown option": [*right,
            "--nonsense", "1"],
            "without its last word": right[:-1], "twice": right * 2, "nothing": [],
        }.items():  # fmt: skip
            yield _case(name, what, changed, changed)
        for option, place in places.items():
            for text in TEXTS:
                if (option, text) in MEANT:
                    continue
                yield _case(
                    name, f"{option} = {text[:20]!r}", _with(right, place, option, text), [option, text]
                )


def line(name: str, command: type[object]) -> tuple[list[str], dict[str, int | None]]:
    """The words of a line that is right, and the place in it of every option; None for one that it leaves out."""
    words, places = [name], dict[str, int | None]()
    hints = typing.get_type_hints(command, include_extras=True)
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    fields = dataclasses.fields(command)  # type: ignore[arg-type]
    # positional ones first: an option of several words takes all that follow
    for field in sorted(fields, key=lambda field: tyro.conf.Positional not in marks[field.name]):
        positional = tyro.conf.Positional in marks[field.name]
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.name == "debug":
            continue
        if positional or needed or field.name in ("model", "answer", "prompt", *OF.get(name, {})):
            if not positional:
                words.append(f"--{field.name.replace('_', '-')}")
            if OF.get(name, {}).get(field.name) == NO:
                words[-1] = words[-1].replace("--", "--no-", 1)
                places[field.name] = None
                continue
            places[field.name] = len(words)
            special = OF.get(name, {}).get(field.name) or (FILES[name] if field.name == "file" else None)
            words.append(special or _word(field.name, hints[field.name]))
        else:
            places[field.name] = None
    return words, places


def _word(name: str, hint: object) -> str:
    """Something for an option: by its name, or the first of its words, or of its kind."""
    if name in WORDS:
        return WORDS[name]
    while typing.get_args(hint):
        if typing.get_origin(hint) is typing.Literal:
            return str(typing.get_args(hint)[0])
        hint = typing.get_args(hint)[0]
    return {int: "1", float: "0.5", bool: "True", Path: "text.txt"}.get(hint, "x")  # type: ignore[call-overload]


def _with(right: Sequence[str], place: int | None, option: str, text: str) -> list[str]:
    if place is None:
        return [*right, f"--{option.replace('_', '-')}", text]
    return [*right[:place], text, *right[place + 1 :]]


def _case(name: str, what: str, argv: Sequence[str], told: Sequence[str]) -> Case:
    return Case(
        FAMILY,
        name,
        what,
        functools.partial(_run, [*argv]),
        functools.partial(words, told),
        seconds=SLOW.get(name, SECONDS),
    )


def words(told: Sequence[str]) -> list[str]:
    """What a refusal may name: the option, or what was typed for it."""
    others = [OTHER_WORDS[text] for text in told if text in OTHER_WORDS]
    return [*others, *(r"(?i)" + each for text in told for each in _ways(text))]


def _ways(text: str) -> Iterator[str]:
    bare = text.removeprefix("--").replace("_", ".?")
    for each in {bare.rstrip("s"), repr(text[:30])[1:-1]}:
        if each.strip():
            yield re.escape(each).replace(r"\.\?", ".?")
    if not text.strip():
        yield f"empty|nothing|{text!r}"


def _run(argv: list[str]) -> object:
    """The command in a copy of `home`, its errors as they are raised; `serve` without its loop, which never ends."""
    folder = Path(tempfile.mkdtemp()) / "home"
    shutil.copytree(home(), folder)
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    before = os.getcwd()
    os.chdir(folder)
    try:
        with mock.patch("interp.serve.app.serve", return_value=None), mock.patch("webbrowser.open"):
            try:
                given = parsed(argv)
            except SystemExit as ending:  # of the parser, which has said why
                if ending.code not in (0, 2):
                    raise
                return REFUSED if ending.code else 0
            return given.run()
    finally:
        os.chdir(before)
