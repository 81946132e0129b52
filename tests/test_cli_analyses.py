"""The commands that print an analysis: every question that has one, heads over training, circuits of a task."""

import dataclasses
import importlib
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from xarray import Dataset

import interp
from interp import HookedTransformer, causal_trace, frame, heads, logit_difference, patch, zoo
from interp.circuits import Circuit  # fmt: skip
from interp.cli import ASKED, command, main, parsed
from interp.cli.asking import data_of, function_of, needs_data, option_of
from interp.cli.given import GIVEN
from interp.core.hints import hints_of
from interp.lenses import FittedJacobianLens, jacobian_lens
from interp.passes.question import function_name
from interp.tasks import IndirectObjects, RepeatedTokens
from tests.contract.calls import TOKENIZER


def test_models_lists_every_demo_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"value": 0.92, "n": 10, "definition": "d", "head": "L1H2"}
    monkeypatch.setattr(
        "interp.zoo.demos.card_of", lambda name: {"measured": {"best_score": entry}} if "4l" in name else {}
    )
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if not line.startswith(" ")] == [
        "demo-4l", "demo-attn-2l", "groundtruth-induction", "demo-mlp-2l", "demo-memory", "groundtruth-early-site",
        "groundtruth-late-suppression",
    ]  # fmt: skip
    assert out.count("best score") == 1
    assert "0.920  n = 10 (head L1H2)" in out


SCORES = ("induction", "previous_token", "duplicate_token")
CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = CLEAN.replace(", John", ", Mary")
ANSWERS = ["--answer", " Mary", "--wrong", " John"]


def demo(name: str = "demo-4l", revision: str | None = None) -> HookedTransformer:
    return HookedTransformer.from_pretrained(name, revision=revision)


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """The lines of a command that ends well."""
    assert main(argv) == 0
    return capsys.readouterr().out.splitlines()


def written(path: Path, result: Dataset) -> None:
    """The file holds the tidy table of the result."""
    table, there = frame(result), pd.read_csv(path, keep_default_na=False, na_values=[""])
    assert list(there) == list(table) and len(there) == len(table)
    for name in table:
        if table[name].dtype.kind in "fiu":
            np.testing.assert_allclose(there[name].astype(float), table[name].astype(float), rtol=1e-6)
        else:
            assert there[name].fillna("").astype(str).tolist() == table[name].astype(str).tolist()


# --- options ------------------------------------------------------------------------------------------------------


USUAL = {("ablate", "change"): interp.edits.Zero()}
"""What a command takes where its function must be told."""


@pytest.mark.parametrize("name", ASKED)
def test_the_options_are_the_fields_of_the_record_with_its_defaults(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = command(name)
    kind, options = made.question, {each.name: each for each in dataclasses.fields(made)}  # type: ignore[attr-defined]
    assert name == function_name(kind).replace("_", "-")
    with pytest.raises(SystemExit) as ended:
        parsed([name, "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert ended.value.code == 0
    hints, fields = hints_of(kind), {each.name: each for each in dataclasses.fields(kind)}
    said = {
        name for name in fields if name in GIVEN or (name in hints and option_of(hints[name]) is not None)
    }
    assert said <= set(options)
    for each in said - {"metric"}:
        doc = GIVEN[each].says if each in GIVEN else interp.runs.experiment.field_docs(kind)[each]
        assert f"--{each.replace('_', '-')}" in shown and doc.split("`")[0].split(";")[0][:25] in shown
        required = fields[each].default is dataclasses.MISSING
        assert (options[each].default is dataclasses.MISSING) == (required and (name, each) not in USUAL)
    given = {each: [" x"] if each == "data" else " x" for each in data_of(kind)}
    needed = {each for each in said if options[each].default is dataclasses.MISSING}
    asked = made(**given, **dict.fromkeys(needed, ("a",)))
    for each, value in asked.fields().items():
        if each not in needed:
            assert value == USUAL.get((name, each), fields[each].default)


def test_a_command_line_gives_a_list_a_word_or_a_named_change() -> None:
    command = parsed(["ablate", "a", "b", "--parts", "L0H1", "L1.mlp", "--change", "zero", "--by", "layer"])
    fields = command.fields()  # type: ignore[attr-defined]
    assert (fields["parts"], fields["change"], fields["by"]) == (
        ("L0H1", "L1.mlp"),
        interp.edits.Zero(),
        ("layer",),
    )
    one = parsed(["ablate", "a", "--parts", "mlp"]).fields()  # type: ignore[attr-defined]
    assert one["parts"] == "mlp" and one["metric"] is None
    watched = parsed(["ablate", "a", "--answer", " b", "--metric", "answer_loss"]).fields()["metric"]  # type: ignore[attr-defined]
    assert (watched.name, watched.answer) == ("loss", " b")


def test_data_may_be_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text(f"{CLEAN}\n{CORRUPT}\n")
    out = tmp_path / "table.csv"
    printed(
        capsys,
        "ablate",
        str(tmp_path / "texts.txt"),
        *ANSWERS,
        "--parts",
        "mlp",
        "--change",
        "zero",
        "--out",
        str(out),
    )
    metric = logit_difference(" Mary", " John")
    written(
        out, interp.ablate(demo(), tmp_path / "texts.txt", "mlp", change=interp.edits.Zero(), metric=metric)
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["patch", CLEAN, CORRUPT, "--metric", "kl_divergence", "--answer", " Mary"], "asks for no answer"),
        (["heads", "-m", "groundtruth-induction", "--scores", "inductoin"], "no score 'inductoin'; nearest: induction"),
        (["attribute", CLEAN, *ANSWERS, "--sort", "vlaue"], "no column 'vlaue'; nearest: value"),
        (["output-lens", CLEAN, "--part", "L9H9"], "L9H9"),
        (["patch", CLEAN, f"{CORRUPT} the", "--answer", " Mary"], "same length"),
        (["causal-trace", CLEAN, "--subject", "Spain", "--answer", " Mary"], "Spain"),
    ],
)  # fmt: skip
def test_what_a_question_refuses_is_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


# --- tables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        (["attribute", CLEAN, *ANSWERS, "--parts", "head"], {"answer": " Mary", "wrong": " John", "parts": "head"}),
        (["logit-lens", CLEAN, "--answer", " Mary", "--pos", "-1"], {"answer": " Mary", "pos": -1}),
        (["output-lens", CLEAN, "--part", "L3H5"], {"part": "L3H5"}),
        (["token-attribution", CLEAN, *ANSWERS], {"answer": " Mary", "wrong": " John"}),
        (["attribution-patch", CLEAN, CORRUPT, *ANSWERS], {"metric": logit_difference(" Mary", " John")}),
        (["path-patch", CLEAN, CORRUPT, *ANSWERS], {"metric": logit_difference(" Mary", " John")}),
        (["composition", "--model", "demo-4l", "--kind", "V"], {"kind": "V"}),
        (["copying", "--model", "demo-4l", "--no-ranks"], {"ranks": False}),
        (["head-tokens", "--tokens", " Mary", " John"], {"tokens": [" Mary", " John"]}),
        (["top-pairs", "--model", "demo-4l", "--head", "L1H7"], {"head": "L1H7"}),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)  # fmt: skip
def test_every_command_asks_the_function_of_its_name(
    argv: list[str], options: dict[str, object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "table.csv"
    lines = printed(capsys, *argv, "--out", str(out), "--most", "5")
    made = command(argv[0])
    data = [{"data": CLEAN, "clean": CLEAN, "corrupt": CORRUPT}[name] for name in data_of(made.question)]  # type: ignore[attr-defined]
    found = function_of(made.question)(demo(), *data, **options)  # type: ignore[attr-defined]
    written(out, found)
    assert lines[-1] == str(out)
    if len(frame(found)) > 5 and "score" not in found.dims:
        assert lines[-2].startswith("the first 5 of ")
        assert all(len(line) < 200 for line in lines)


def test_lens_is_printed_from_the_last_position_and_most_probable_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    head, *lines, cut, hint = printed(capsys, "logit-lens", CLEAN)
    assert "target_rank" in head and all(
        " -1 " not in line for line in lines
    )  # the last token is followed by none
    found = interp.logit_lens(demo(), CLEAN).isel(prompt=0, rank=0)
    order = [(pos, depth) for pos in found.pos.values[::-1] for depth in found.depth.values][:40]
    columns = head.split()
    for line, (pos, depth) in zip(lines, order, strict=True):
        assert line.split()[:3] == [str(depth), str(pos), "0"]
        assert line.endswith(repr(str(found.word.sel(pos=pos, depth=depth).item())))
    assert (
        columns[:3] == ["depth", "pos", "rank"] and cut.startswith("the first 40 of ") and "--pos -1" in hint
    )
    assert not any("--pos" in line for line in printed(capsys, "logit-lens", CLEAN, "--pos", "-1"))


def test_a_folder_is_no_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["logit-lens", str(tmp_path)]) == 2
    assert f"is a folder; a model is --model {tmp_path}" in capsys.readouterr().err


def test_heads_prints_every_head_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    *rows, last = [line.split() for line in printed(capsys, "heads", "--model", "groundtruth-induction")]
    assert " ".join(last) == "not in this table, but with --json: confidence"
    assert rows[0] == ["part", "label", *SCORES]
    assert rows[1][:3] == ["L1H2", "induction", "1.00"]
    assert [row[:3] for row in rows[1:-1] if row[1] == "previous"] == [["L0H1", "previous", "token"]]
    assert len(rows) == 2 * 4 + 2
    scores = [float(row[-9]) for row in rows[1:-1]]
    assert scores == sorted(scores, reverse=True)


def test_patch_prints_the_largest_effects_and_writes_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "map.csv"
    lines = printed(capsys, "patch", CLEAN, CORRUPT, *ANSWERS, "--out", str(out), "--most", "7")
    found = patch(demo(), CLEAN, CORRUPT, metric=logit_difference(" Mary", " John"))
    assert lines[0].split() == ["pos", "part", "token", "value", "changed", "normalised"]
    table = frame(found.isel(prompt=0))
    table = table.iloc[(-table.value.abs()).argsort(kind="stable")].head(7)
    for line, row in zip(lines[1:8], table.itertuples(), strict=True):
        numbers = [f"{row.value:.3f}", str(row.changed), f"{row.normalised:.3f}"]
        assert line.split()[:2] == [str(row.pos), row.part] and line.split()[-3:] == numbers
        assert repr(row.token) in line
    clean, corrupt = float(found.clean[0]), float(found.corrupt[0])
    assert lines[8] == f"logit difference: clean {clean:.3f}, corrupt {corrupt:.3f}"
    assert lines[9].startswith("logits; metric with the intervention minus metric of the same run without it")
    written(out, found)


def test_patch_by_layer_position_and_head_in_the_other_direction(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, by = tmp_path / "map.csv", ["--site", "z", "--by", "layer", "pos", "head", "--direction", "noise"]
    lines = printed(capsys, "patch", CLEAN, CORRUPT, *ANSWERS, *by, "--out", str(out), "--most", "15")
    assert len(lines) == 1 + 15 + 4
    metric = logit_difference(" Mary", " John")
    written(
        out, patch(demo(), CLEAN, CORRUPT, "z", by=("layer", "pos", "head"), direction="noise", metric=metric)
    )


def test_causal_trace_prints_what_the_function_finds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompt, out = "The name of France's capital is", tmp_path / "map.csv"
    argv = [
        "causal-trace",
        prompt,
        "--subject",
        "France",
        "--answer",
        " P",
        "--samples",
        "2",
        "--out",
        str(out),
    ]
    for options, more in ((["--severed", "mlp"], {"severed": "mlp"}), (["--seed", "5"], {"seed": 5})):
        lines = printed(capsys, *argv, *options)
        found = causal_trace(demo(), prompt, "France", " P", samples=2, **more)  # type: ignore[arg-type]
        written(out, found)
        one = found.isel(prompt=0)
        assert f"probability: clean {float(one.clean):.3f}, corrupt {float(one.corrupt):.3f}" in lines


def test_backward_lens_prints_what_the_table_holds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With a wrong token, too, which is improbable: the loss alone would hardly move it."""
    prompt, out = "The capital of France is", tmp_path / "table.csv"
    argv = [
        "backward-lens",
        prompt,
        "--answer",
        " R",
        "--matrices",
        "W_out",
        "--out",
        str(out),
        "--most",
        "100",
    ]
    for options, wrong in (([], None), (["--wrong", " the"], " the")):
        lines = printed(capsys, *argv, *options)
        found = interp.backward_lens(demo(), prompt, " R", wrong, matrices=["W_out"])
        written(out, found)
        table = frame(found.isel(prompt=0)).sort_values("relative_update", ascending=False, kind="stable")
        for line, row in zip(lines[1 : 1 + len(table)], table.itertuples(), strict=True):
            cells = line.split()
            assert cells[:4] == ["W_out", str(row.pos), "delta", row.part]
            assert f" {row.relative_update:.3f} " in line and line.endswith(repr(row.word))


# --- over training ------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Dataset]:
    """`interp.heads` on few rows and without sentences, in place of what the command line calls."""

    def few(model: HookedTransformer, data: None = None, *, repeats: None, **options: object) -> Dataset:
        return heads(model, repeats=RepeatedTokens(rows=3), sentences=None)

    monkeypatch.setattr(importlib.import_module("interp.attention.heads"), "heads", few)
    return few


def test_heads_over_checkpoints_prints_best_heads_and_the_phase_change(
    quick: Callable[..., Dataset], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, "heads", "--model", "demo-attn-2l", "--checkpoints", "step3250", "step1200")
    header, *steps, change, about = lines
    assert header.split() == ["step", *SCORES]
    tables = {}
    for line, step in zip(steps, (1200, 3250), strict=True):
        tables[step] = quick(demo("demo-attn-2l", f"step{step}"), repeats=None)
        cells = [str(step)]
        for score in SCORES:
            found = tables[step].sel(score=score)
            layer, head = divmod(int(found.value.values.argmax()), 8)
            value, low, high = (float(found[end][layer, head]) for end in ("value", "low", "high"))
            cells += [f"L{layer}H{head}", f"{value:.2f}", f"[{low:.2f},", f"{high:.2f}]"]
        assert line.split() == cells
    best = steps[1].split()[1]
    where = {"layer": int(best[1]), "head": int(best[3]), "score": "induction"}
    rise = float(tables[3250].value.sel(where) - tables[1200].value.sel(where))
    assert change == (
        f"induction of {best}, the best at the end, rises fastest between steps 1200 and 3250: {rise:+.2f}"
    )
    assert about == "attention mass; 95 % over rows; 3 rows of 25 x 4 random tokens"


def test_one_checkpoint_has_no_phase_change(
    quick: Callable[..., Dataset], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, "heads", "--model", "demo-attn-2l", "--checkpoints", "step1200")
    assert len(lines) == 3 and lines[1].split()[0] == "1200"


@pytest.mark.slow
def test_all_checkpoints_are_those_that_the_demo_model_ships(
    quick: Callable[..., Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parsed(["heads", "--model", "m", "--checkpoints", "a", "b"]) == command("heads")(
        model="m", checkpoints=("a", "b")
    )
    asked = parsed(["heads", "--model", "demo-attn-2l", "--checkpoints", "all"])
    planted = demo("groundtruth-induction")
    loaded: list[str | None] = []

    def remembered(name: str, *, revision: str | None, **options: object) -> HookedTransformer:
        loaded.append(revision)
        return planted

    monkeypatch.setattr("interp.HookedTransformer.from_pretrained", remembered)
    asked.run()
    assert loaded == zoo.revisions("demo-attn-2l") and len(loaded) > 1


def test_circuit_prints_edges_and_how_much_they_keep(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["circuit", "copy", "--edges", "12", "--pairs", "4", "--method", "eap", "--seed", "3"]
    assert main([*arguments, "--out", str(tmp_path / "circuit.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    circuit = Circuit.load(tmp_path / "circuit.json")
    assert len(lines) == len(circuit.edges) + 2
    listed = [line.split() for line in lines[:-2]]
    assert {edge: float(score) for score, edge in listed} == pytest.approx(dict(circuit.scores), abs=6e-4)
    sizes = [abs(float(score)) for score, _ in listed]
    assert sizes == sorted(sizes, reverse=True)
    assert lines[-2].startswith(f"{len(circuit.edges)} of {len(circuit.graph)} edges keep ")
    assert (circuit.task, circuit.model) == ("copy", "demo-4l")


def test_jacobian_lens_prints_what_the_fit_says_and_keeps_the_lens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    texts = [sentence.text for sentence in IndirectObjects(17).sentences()]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    out = tmp_path / "lens.safetensors"
    lines = printed(
        capsys, "jacobian-lens", str(tmp_path / "texts.txt"), "--model", "demo-attn-2l", "--skip", "4",
        "--precision", "None", "--prompt", CLEAN, "--top", "2", "--out", str(out),
    )  # fmt: skip
    lens = FittedJacobianLens.load(out, demo("demo-attn-2l"))
    own = jacobian_lens(demo("demo-attn-2l"), texts, skip=4, precision=None)
    assert torch.equal(lens.jacobian, own.jacobian) and lens.error is not None
    assert lines[:2] == [
        f"after block 0: standard error {float(lens.error[0]):.3f} of the norm of J",
        "17 prompts; ended at the end of the data",
    ]
    read = lens.read(CLEAN, top=2).isel(prompt=0, pos=-1)
    assert [line.split()[0] for line in lines[3:7]] == np.repeat(read.depth.values, 2).tolist()
    for line, stays in zip(lines[3:7], read.stays.values.flatten(), strict=True):
        assert line.endswith(f"{stays:.3f}")
    assert main(["jacobian-lens", "a text", "--sort", "value"]) == 2
    assert "leave --sort out" in capsys.readouterr().err


def test_attribution_patch_prints_how_well_it_agrees_with_patching(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ("--rules", "relp", "--by", "layer", "head", "--agreement", "12", *ANSWERS)
    lines = printed(capsys, "attribution-patch", CLEAN, CORRUPT, *asked)
    metric = logit_difference(" Mary", " John")
    found = interp.attribution_patch(
        demo(), CLEAN, CORRUPT, metric=metric, by=("layer", "head"), rules="relp", agreement=12
    )
    pearson, spearman = found.agreement.sel(estimate="value").values
    assert f"agreement with patching: pearson {pearson:.3f}, spearman {spearman:.3f}" in lines


def test_a_command_without_its_prompt_says_so_in_words_and_ends_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asks = [name for name in ASKED if needs_data(command(name).question)]
    assert {"attribute", "logit-lens", "backward-lens", "ablate", "token-attribution", "patch"} <= {*asks}
    for name in asks:
        try:
            code: object = main([name, "-m", "demo-attn-2l"])
        except SystemExit as ended:  # words of their own, such as CLEAN and CORRUPT, are tyro's to miss
            code = ended.code
        said = capsys.readouterr().err
        assert code == 2
        named = f"error: {name.replace('-', '_')} requires a prompt, a text or a file of texts, got none\n"
        assert said == named or "Required options" in said, said


# --- fields that are given by the name of a file ----------------------------------------------------------------------


def test_pairs_are_of_a_list_that_ships_or_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = interp.tasks.load_word_pairs()
    whole = tmp_path / "mine.csv"
    whole.write_text("input,output\nhot,cold\n")
    several = tmp_path / "several.csv"
    several.write_text("task,input,output\na,x,y\nb,u,v\na,z,w\n")
    read = GIVEN["tasks"].read
    asked, model = command("function-vectors")(tasks=()), demo()
    assert read(asked, model, ("antonym",)) == {"antonym": [*shipped["antonym"]]}
    assert read(asked, model, (str(whole),)) == {"mine": [("hot", "cold")]}
    assert read(asked, model, (str(several),)) == {"a": [("x", "y"), ("z", "w")], "b": [("u", "v")]}
    (tmp_path / "bad.csv").write_text("in,out\nhot,cold\n")
    (tmp_path / "empty.csv").write_text("")
    for name, message in (
        ("several.csv", "pairs of one task are required"),
        ("bad.csv", "bad.csv, line 2: the columns input and output are required"),
        ("empty.csv", "empty.csv has no pairs"),
        ("antonyms", "nearest: antonym"),
    ):
        path = tmp_path / name
        assert main(["linear-relation", "--pairs", str(path) if path.exists() else name]) == 2
        assert message in capsys.readouterr().err


def test_prompts_labels_and_models_of_files_are_those_of_the_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"{text} {i}" for i in range(8) for text in ("The cat sat", "When Mary went")]
    for name, lines in (
        ("texts", texts),
        ("yes", texts[::2]),
        ("no", texts[1::2]),
        ("labels", ["1", "0"] * 8),
    ):
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n")
    out = tmp_path / "table.csv"
    files = {name: str(tmp_path / f"{name}.txt") for name in ("texts", "yes", "no", "labels")}
    printed(capsys, "steering", "--positive", files["yes"], "--negative", files["no"], "--out", str(out))
    written(out, interp.causal.steering(demo(), texts[::2], texts[1::2]))
    argv = ("--labels", files["labels"], "--sizes", "1", "--shuffles", "1", "--out", str(out))
    printed(capsys, "probe-neurons", files["texts"], *argv)
    written(out, interp.features.probe_neurons(demo(), texts, [True, False] * 8, sizes=(1,), shuffles=1))
    assert main(["probe-neurons", *texts, "--labels", *("yes",) * 16]) == 2
    assert "labels must be 1 or 0 for each prompt, or a file of them, got 'yes'" in capsys.readouterr().err


def test_dictionaries_make_features_parts_of_any_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    d = demo().cfg.d_model
    weights = {"W_enc": torch.eye(d), "b_enc": torch.zeros(d), "W_dec": torch.eye(d), "b_dec": torch.zeros(d)}
    sae = interp.features.Dictionary(interp.features.ReLU(), weights, reads="blocks.1.hook_resid_post")
    interp.features.save(sae, tmp_path / "sae")
    out, argv = tmp_path / "table.csv", ("--parts", "L1F3", "L1F7", "--change", "zero", *ANSWERS)
    printed(capsys, "ablate", CLEAN, *argv, "--dictionaries", str(tmp_path / "sae"), "--out", str(out))
    model = demo().with_dictionaries([sae])
    metric = logit_difference(" Mary", " John")
    written(out, interp.ablate(model, CLEAN, ["L1F3", "L1F7"], change=interp.edits.Zero(), metric=metric))
    direction = interp.causal.Subspace("blocks.2.hook_resid_post", torch.eye(d)[:1])
    direction.save(tmp_path / "direction.safetensors", demo())
    argv = ("--directions", str(tmp_path / "direction.safetensors"), "--random", "2", *ANSWERS)
    printed(capsys, "steering-curve", CLEAN, *argv, "--out", str(out))
    written(out, interp.causal.steering_curve(demo(), CLEAN, [direction], random=2, metric=metric))


def test_diff_opens_the_tuned_model_as_its_own_and_watches_the_divergence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = demo("demo-attn-2l")
    early = interp.zoo.revisions("demo-attn-2l")[0]
    interp.families.save(demo("demo-attn-2l", early).transformer, tmp_path / "early")
    shutil.copy(TOKENIZER, tmp_path / "early" / "tokenizer.json")
    out = tmp_path / "table.csv"
    printed(
        capsys, "diff", CLEAN, "-m", str(tmp_path / "early"), "--tuned", "demo-attn-2l", "--out", str(out)
    )
    base = HookedTransformer.from_pretrained(tmp_path / "early")
    written(out, interp.editing.diff(base, [CLEAN], tuned))
