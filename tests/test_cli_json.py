"""`--json`: every command that prints gives one JSON value on stdout, with every number that its lines have."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import interp
from interp.cli import COMMANDS, main
from interp.cli.as_json import text_of
from interp.families import save as save_model
from interp.features import Dictionary, ReLU, save
from interp.tasks import IndirectObjects
from tests.contract.calls import graph_file
from tests.fuzz.loaders import tokenized

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = CLEAN.replace(", John", ", Mary")
ANSWERS = ("--answer", " Mary", "--wrong", " John")
PROBED = [f"{text} {i}" for i in range(8) for text in ("The cat sat", "When Mary went")]
EXPERIMENT = '''"""Does it add up?"""
from dataclasses import dataclass

import xarray as xr

from interp.runs.record import Record


@dataclass(frozen=True)
class Job:
    steps: float = 3.25


def main(job: Job, record: Record) -> None:
    rows = {"x": job.steps / 3, "y": ("prompt", [0.125 * job.steps, job.steps, 7.0])}
    record.step("first", lambda: xr.Dataset(rows, coords={"prompt": range(3)}))
'''
ARGV: Mapping[str, tuple[str, ...]] = {
    "ablate": (CLEAN, "--parts", "L3H5", "L2.mlp", *ANSWERS),
    "attention-attribution": (CLEAN, "--head", "L3H5", "--key", "1"),
    "attribute": (CLEAN, *ANSWERS),
    "attribution-patch": (CLEAN, CORRUPT, *ANSWERS, "--agreement", "12"),
    "backward-lens": (CLEAN, "--answer", " Mary"),
    "causal-trace": ("The name of France's capital is", "--subject", "France", "--answer", " P"),
    "circuit": ("copy", "--pairs", "4", "--edges", "10"),
    "compare": ("last~1", "last"),
    "composition": ("-m", "demo-attn-2l"),
    "copying": ("-m", "demo-attn-2l"),
    "dictionary-quality": (CLEAN, "--dictionary", "dictionary"),
    "diff": (CLEAN, "-m", "model", "--tuned", "tuned"),
    "edge-attribution": (CLEAN, CORRUPT, *ANSWERS),
    "feature-cards": (CLEAN, "--dictionary", "dictionary"),
    "feature-circuit": (CLEAN, CORRUPT, *ANSWERS, "--dictionaries", "dictionary", "--draws", "1", "--most", "4"),
    "findings": ("demo-attn-2l", "--claims", "previous-token-heads", "--prompts", "12"),
    "function-vectors": ("--tasks", "country_capital", "--lists.shots", "2", "--lists.rows", "2", "--random", "3"),
    "graph": ("graph.json",),
    "head-tokens": ("--tokens", " Mary", " John"),
    "heads": ("-m", "demo-attn-2l"),
    "jacobian-lens": ("texts.txt", "-m", "demo-attn-2l", "--skip", "4", "--precision", "None", "--prompt", CLEAN),
    "linear-relation": ("--pairs", "country_capital", "--no-only-known"),
    "list": ("--results", "first.x", "first.y"),
    "logit-lens": (CLEAN, "--pos", "-1"),
    "models": (),
    "output-lens": (CLEAN, "--part", "L3H5"),
    "patch": (CLEAN, CORRUPT, *ANSWERS),
    "patchscope": (CLEAN,),
    "path-patch": (CLEAN, CORRUPT, *ANSWERS),
    "probe-neurons": (*PROBED, "--labels", *("1", "0") * 8, "--sizes", "1", "2"),
    "report": ("-m", "groundtruth-induction", "--prompt", "abcdefabcdefabc"),
    "run": ("adding.py", "--parameters"),
    "show": ("last",),
    "steering": ("--positive", *PROBED[::2], "--negative", *PROBED[1::2]),
    "steering-curve": (CLEAN, *ANSWERS, "--directions", "L1F3", "--dictionaries", "dictionary", "--random", "3"),
    "token-attribution": (CLEAN, *ANSWERS),
    "top-pairs": ("--head", "L1H7"),
    "verify": ("-m", "groundtruth-induction"),
}  # fmt: skip
"""A line of every command that prints what it found."""
SLOW = (
    "report",
    "linear-relation",
    "feature-circuit",
    "circuit",
    "probe-neurons",
    "feature-cards",
    "function-vectors",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models of a shape, a dictionary, texts, a graph, and two runs of an experiment."""
    path = tmp_path_factory.mktemp("home")
    model = interp.HookedTransformer.from_pretrained("demo-4l")
    d = model.cfg.d_model
    directions = torch.randn(d, 2 * d, generator=torch.Generator().manual_seed(0)) / d**0.5
    weights = {
        "W_enc": directions,
        "b_enc": torch.zeros(2 * d),
        "W_dec": directions.T.clone(),
        "b_dec": torch.zeros(d),
    }
    save(Dictionary(ReLU(), weights, reads="blocks.1.hook_resid_post"), path / "dictionary")
    (path / "model").mkdir()
    tokenized(path / "model", n_layers=2, n_ctx=128)
    shutil.copytree(path / "model", path / "tuned")
    tuned = interp.HookedTransformer.from_pretrained(path / "model").transformer
    with torch.no_grad():
        for parameter in tuned.blocks[1].parameters():
            parameter.mul_(1.5)
    save_model(tuned, path / "tuned")
    (path / "texts.txt").write_text("\n".join(sentence.text for sentence in IndirectObjects(17).sentences()))
    shutil.copy(graph_file(), path / "graph.json")
    (path / "adding.py").write_text(EXPERIMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        for steps in ("1.5", "2.5"):
            assert main(["run", "adding.py", "-p", f"steps={steps}"]) == 0
    return path


NUMBER = re.compile(r"(?<![\w.:-])[-+]?\d+\.\d+(?:e[-+]\d+)?(?![\w.:])")
"""A number with a point in a line, not one inside a name, a version or a time."""


def leaves(value: object) -> Iterator[object]:
    """The numbers and texts of a JSON value, names too."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    else:
        yield value


def as_printed(token: str, value: float) -> bool:
    """Whether a number is printed so, in as many digits."""
    digits = len(token.partition("e")[0].partition(".")[2])
    kinds = [f".{digits}f", f".{digits}e", *(f".{n}g" for n in (1, 2, 3, 4))]
    return any(format(value, kind) == token.removeprefix("+") for kind in kinds)


def test_every_command_that_prints_what_it_found_is_tried() -> None:
    assert {*ARGV} == {*COMMANDS} - {"serve"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in ARGV]
)
def test_json_has_the_numbers_that_are_printed(
    name: str, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    capsys.readouterr()
    code = main([name, *ARGV[name]])
    lines = capsys.readouterr().out
    assert main([name, *ARGV[name], "--json"]) == code == 0
    value = json.loads(capsys.readouterr().out, parse_constant=lambda odd: pytest.fail(f"{odd} is no JSON"))
    found = [*leaves(value)]
    numbers = np.array([each for each in found if isinstance(each, int | float)], dtype=float)
    words = {word for each in found if isinstance(each, str) for word in NUMBER.findall(each)}
    printed = {*NUMBER.findall(lines)} - words
    for token in printed:
        near = numbers[np.abs(numbers - float(token)) <= 0.06 * max(1.0, abs(float(token)))]
        assert any(as_printed(token, each) for each in near), f"{token} is printed"
    assert printed or name in ("graph", "run", "report")


def test_numbers_that_json_has_not_are_null_and_digits_are_all_there() -> None:
    value = {
        "a": [float("nan"), np.float32(0.1), float("-inf")],
        "b": np.arange(2),
        "c": Path("x"),
        "d": (None, True),
    }
    wanted = {"a": [None, float(np.float32(0.1)), None], "b": [0, 1], "c": "x", "d": [None, True]}
    assert json.loads(text_of(value)) == wanted
    assert json.loads(text_of(1 / 3)) == 1 / 3
    with pytest.raises(TypeError, match="got set"):
        text_of({"a": {1}})


def test_notes_and_written_files_are_on_stderr(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    argv = ["attribute", CLEAN, *ANSWERS, "--most", "2", "--out", "table.csv", "--json"]
    capsys.readouterr()
    assert main(argv) == 0
    said = capsys.readouterr()
    table = json.loads(said.out)["table"]
    assert said.err.splitlines()[-1] == "table.csv"
    rows = pd.read_csv("table.csv")
    assert [row["value"] for row in table] == pytest.approx(rows["value"].tolist(), rel=1e-6) and len(
        table
    ) > 2
    assert main(["attribute", "--json"]) == 2
    assert capsys.readouterr().out == ""
