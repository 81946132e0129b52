"""The commands that print an analysis: models, heads (also over training) and the backward lens."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from xarray import Dataset

from interp import (
    Circuit,
    HookedTransformer,
    RepeatedTokens,
    backward_lens,
    causal_trace,
    frame,
    heads,
    logit_difference,
    patch,
    zoo,
)  # fmt: skip
from interp.cli import main, parsed
from interp.cli.commands import Heads


def test_models_lists_every_demo_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"value": 0.92, "n": 10, "definition": "d", "head": "L1H2"}
    monkeypatch.setattr(
        "interp.zoo.card", lambda name: {"measured": {"best_score": entry}} if "4l" in name else {}
    )
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if not line.startswith(" ")] == [
        "demo-4l", "demo-attn-2l", "groundtruth-induction",
    ]  # fmt: skip
    assert out.count("best score") == 1
    assert "0.920  n = 10 (head L1H2)" in out


def test_heads_prints_every_head_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["heads", "groundtruth-induction"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["layer", "head", "called", "induction", "previous_token", "duplicate_token"]
    assert rows[1][:4] == ["1", "2", "induction", "1.00"]
    assert [row[:4] for row in rows[1:-1] if row[2] == "previous"] == [["0", "1", "previous", "token"]]
    assert len(rows) == 2 * 4 + 2
    scores = [float(row[-9]) for row in rows[1:-1]]
    assert scores == sorted(scores, reverse=True)


def test_backward_lens_prints_what_the_table_holds(capsys: pytest.CaptureFixture[str]) -> None:
    prompt, target = "The capital of France is", " R"
    assert main(["backward-lens", prompt, "--target", target]) == 0
    rows = capsys.readouterr().out.splitlines()
    model = HookedTransformer.from_pretrained("demo-4l")
    found = backward_lens(model, prompt, target, matrices=["W_out"])
    table = frame(found)
    table["bottom"] = [" | ".join(row) for row in found.bottom_word.values[0, 0].reshape(-1, 5)]
    last = table[table.pos == table.pos.max()]
    assert len(rows) == 1 + 4 + 1
    for line, row in zip(rows[1:-1], last.itertuples(), strict=True):
        expected = [row.layer, row.pos, "' is'", f"{row.relative_update:.3f}", row.target_rank]
        before, after = line.split("' is'")
        assert [*before.split(), "' is'", *after.split()[:2]] == [str(cell) for cell in expected]
        assert line.endswith(repr(row.bottom))
    assert main(["backward-lens", prompt, "--target", target, "--matrix", "W_in", "--every-token"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 1 + len(table) + 1
    assert "top tokens" in rows[0] and "read the most probable" in rows[-1]


def test_backward_lens_with_a_wrong_token_is_that_of_the_difference(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The wrong token is improbable: the loss alone would hardly move it."""
    prompt, target, wrong = "The capital of France is", " R", " the"
    assert main(["backward-lens", prompt, "--target", target, "--wrong", wrong]) == 0
    rows = capsys.readouterr().out.splitlines()
    model = HookedTransformer.from_pretrained("demo-4l")
    table, without = (backward_lens(model, prompt, target, wrong=w).table("W_out") for w in (wrong, None))
    last = table[table.pos == table.pos.max()]
    assert not last.bottom.equals(without.bottom[last.index])
    for line, row in zip(rows[1:-1], last.itertuples(), strict=True):
        assert line.split("' is'")[1].split()[:2] == [f"{row.relative_update:.3f}", str(row.target_rank)]
        assert line.endswith(repr(row.bottom))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Dataset]:
    """`interp.heads` on few rows and without sentences, in place of the door that the command line opens."""

    def few(model: HookedTransformer, data: RepeatedTokens) -> Dataset:
        return heads(model, replace(data, rows=3), sentences=None)

    monkeypatch.setattr("interp.heads", few)
    return few


def test_heads_over_checkpoints_prints_the_best_head_of_each_and_the_phase_change(
    quick: Callable[..., Dataset], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["heads", "demo-attn-2l", "--checkpoints", "step3250", "step1200"]) == 0
    header, *steps, change, about = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "induction", "previous_token", "duplicate_token"]
    tables = {}
    for line, step in zip(steps, (1200, 3250), strict=True):
        model = HookedTransformer.from_pretrained("demo-attn-2l", revision=f"step{step}")
        table = tables[step] = quick(model, RepeatedTokens())
        cells = [str(step)]
        for score in ("induction", "previous_token", "duplicate_token"):
            layer, head = divmod(int(table[score].values.argmax()), 8)
            value, low, high = (float(table[f"{score}{end}"][layer, head]) for end in ("", "_low", "_high"))
            cells += [f"{layer}.{head}", f"{value:.2f}", f"[{low:.2f},", f"{high:.2f}]"]
        assert line.split() == cells
    best = steps[1].split()[1]
    where = {"layer": int(best[0]), "head": int(best[2])}
    rise = float(tables[3250].induction.sel(where) - tables[1200].induction.sel(where))
    assert change == (
        f"induction of head {best}, the best at the end, rises fastest between steps 1200 and 3250: {rise:+.2f}"
    )
    assert about == "attention mass, 95 % over 3 rows of 25 x 4 random tokens"


def test_one_checkpoint_has_no_phase_change(
    quick: Callable[..., Dataset], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["heads", "demo-attn-2l", "--checkpoints", "step1200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[1].split()[0] == "1200"


def test_all_checkpoints_are_those_that_the_demo_model_ships(
    quick: Callable[..., Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parsed(["heads", "m", "--checkpoints", "a", "b"]) == Heads("m", checkpoints=("a", "b"))
    command = parsed(["heads", "demo-attn-2l", "--checkpoints", "all"])
    assert isinstance(command, Heads)
    planted = HookedTransformer.from_pretrained("groundtruth-induction")
    loaded: list[str | None] = []

    def remembered(name: str, *, revision: str | None, device: str) -> HookedTransformer:
        loaded.append(revision)
        return planted

    monkeypatch.setattr("interp.HookedTransformer.from_pretrained", remembered)
    command.run()
    assert loaded == zoo.revisions("demo-attn-2l") and len(loaded) > 1


CLEAN = "When Mary and John went to the store, John gave a drink to"
TWIN = CLEAN.replace(", John", ", Mary")


def test_patch_prints_the_map_and_writes_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answers = ["--answer", " Mary", "--wrong", " John"]
    assert main(["patch", CLEAN, TWIN, *answers, "--out", str(tmp_path / "map.csv")]) == 0
    lines = capsys.readouterr().out.splitlines()
    model = HookedTransformer.from_pretrained("demo-4l")
    found = patch(model, CLEAN, TWIN, metric=logit_difference(" Mary", " John"))
    for layer, line in enumerate(lines[2:6]):
        shown = [
            f"{float(v):.2f}" if c else "."
            for v, c in zip(found.normalised[layer], found.changed[layer], strict=True)
        ]
        assert line.split() == [str(layer), *shown]
    written = pd.read_csv(tmp_path / "map.csv")
    assert np.allclose(written.effect, found.effect.values.ravel())


def test_patch_of_many_cells_prints_the_largest(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--answer", " Mary", "--wrong", " John", "--site", "z", "--by", "layer", "pos", "head"]
    assert main(["patch", CLEAN, TWIN, *arguments, "--direction", "noise"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 15 + 1
    assert lines[0].split() == ["normalised", "changed"]


def test_patch_of_prompts_that_do_not_align_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", CLEAN, f"{TWIN} the", "--answer", " Mary"]) == 2
    assert "same length" in capsys.readouterr().err


def test_trace_prints_the_map_of_the_door(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "The name of France's capital is"
    assert main(["trace", prompt, "--subject", "France", "--samples", "2", "--severed", "mlp"]) == 0
    lines = capsys.readouterr().out.splitlines()
    model = HookedTransformer.from_pretrained("demo-4l")
    answer = model.text.targets(" P", 1)
    found = causal_trace(model, prompt, "France", answer, samples=2, window=1, severed="mlp").isel(prompt=0)
    for layer, line in enumerate(lines[2:6]):
        pairs = zip(found.each.values[layer], found.changed.values[layer], strict=True)
        assert line.split() == [str(layer), *(f"{value:.2f}" if changed else "." for value, changed in pairs)]
    assert lines[6].startswith(f"p(' P'): clean {float(found.clean):.3f}")
    assert main(["trace", prompt, "--subject", "France", "--samples", "2", "--seed", "5"]) == 0
    again = capsys.readouterr().out.splitlines()
    found = causal_trace(model, prompt, "France", answer, samples=2, window=1, seed=5).isel(prompt=0)
    assert f"subject noised {float(found.corrupt):.3f}" in again[6] and again[6] != lines[6]
    assert main(["trace", prompt, "--subject", "Spain"]) == 2
    assert "Spain" in capsys.readouterr().err


def test_circuit_prints_edges_and_how_much_they_keep(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["circuit", "copy", "--edges", "12", "--pairs", "4", "--method", "eap", "--seed", "3"]
    assert main([*arguments, "--out", str(tmp_path / "circuit.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    circuit = Circuit.load(tmp_path / "circuit.json")
    assert len(lines) == len(circuit.edges) + 2
    printed = [line.split() for line in lines[:-2]]
    assert {edge: float(score) for score, edge in printed} == pytest.approx(dict(circuit.scores), abs=6e-4)
    sizes = [abs(float(score)) for score, _ in printed]
    assert sizes == sorted(sizes, reverse=True)
    assert lines[-2].startswith(f"{len(circuit.edges)} of {len(circuit.graph)} edges keep ")
    assert (circuit.task, circuit.model) == ("copy", "demo-4l")
