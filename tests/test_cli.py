"""The command line: what a user got wrong is one line and exit code 2, and nothing half-written stays behind."""

import gc
import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch
import transformers
from torch import Tensor

import interp
from interp import cli
from interp.cli import COMMANDS, command, main, parsed
from interp.cli.commands import ANSWER, CORRUPT, PROMPT, WRONG, Models, ReportCommand, Verify
from interp.cli.opening import ModelCommand
from interp.cli.runs import Run
from interp.core.notes import note
from interp.model import KVCache
from interp.tasks import RepeatedTokens
from tests.contract.calls import graph_file
from tests.families.oracle import hf_model

MODEL = ["report", "--model", "groundtruth-induction"]
PLANTED = ["--model", "groundtruth-induction", "--prompt", "abcdefabcdefabc"]


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on stderr of a command that must fail, without progress bars."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, captured.err
    assert "Traceback" not in captured.err
    return lines[0]


# --- parsing ------------------------------------------------------------------------------------------------------


def test_the_defaults_ask_about_an_indirect_object() -> None:
    asked = parsed(["report"])
    assert asked == ReportCommand()
    assert isinstance(asked, ReportCommand)
    question = asked.question()
    assert (question.prompt, question.answer, question.wrong) == (PROMPT, ANSWER, WRONG)


def test_every_option_of_a_report_can_be_given() -> None:
    options = {
        "model": "m",
        "prompt": "p",
        "answer": " a",
        "wrong": " w",
        "out": "o",
        "seed": "3",
        "device": "cuda",
    }
    asked = parsed(["report", *(word for name, value in options.items() for word in (f"--{name}", value))])
    assert asked == ReportCommand(
        model="m", prompt="p", answer=" a", wrong=" w", out=Path("o"), seed=3, device="cuda"
    )


def test_other_commands() -> None:
    assert parsed(["models"]) == Models()
    heads = command("heads")
    asked = heads(model="demo-attn-2l", repeats=RepeatedTokens(seed=1))
    assert parsed(["heads", "--model", "demo-attn-2l", "--repeats.seed", "1"]) == asked
    assert parsed(["verify", "--model", "m", "--dtype", "float64"]) == Verify(model="m", dtype="float64")
    assert parsed(["run", "x.py", "-p", "a=3", "-p", "b=4"]) == Run(Path("x.py"), ("a=3", "b=4"))


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["reprot"],
        ["report", "--modle", "x"],
        ["run"],
        ["report", "--seed", "x"],
        ["verify", "m"],
        ["verify", "--model", "m", "--dtype", "int8"],
    ],
)
def test_what_cannot_be_parsed_ends_with_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2


# --- commands -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_report_is_written_and_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    for seed in ("1", "2"):
        assert main(["report", *PLANTED, "--out", str(out), "--seed", seed]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if not line.startswith("- ")] == [str(out / "index.html")] * 2
    assert said[0].startswith("- The model ") and len(said) > 4
    run = json.loads((out / "run.json").read_text())
    assert run["seed"] == 2
    assert run["files"] == sorted(path.name for path in out.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_without_options_the_trained_model_answers_its_own_question(tmp_path: Path) -> None:
    assert main(["report", "--out", str(tmp_path / "out")]) == 0
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    answer = run["parameters"]["contrast"]["answer"]
    assert (run["model"], answer["token"], answer["rank"]) == ("demo-4l", ANSWER, 0)
    page = (tmp_path / "out" / "index.html").read_text()
    assert "The model, measured" in page and "held-out material" in page
    assert len(page.encode()) < 3_000_000


def test_verify_prints_every_line_and_ends_with_code_0_where_all_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", "--model", "groundtruth-induction"]) == 0
    verdict, *lines = capsys.readouterr().out.splitlines()
    assert verdict == "groundtruth-induction: every line holds"
    assert {line.split()[0] for line in lines} == {"ok", "-"}
    assert sum("steps with a cache = one pass" in line for line in lines) == 1


def test_verify_ends_with_code_1_where_a_line_does_not_hold(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = KVCache.append

    def forgetful(self: KVCache, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = whole(self, layer, k, v)
        return keys, values * 0.9

    monkeypatch.setattr(KVCache, "append", forgetful)
    assert main(["verify", "--model", "groundtruth-induction"]) == 1
    captured = capsys.readouterr()
    verdict, *lines = captured.out.splitlines()
    assert verdict == "groundtruth-induction: BROKEN"
    broken = [line for line in lines if line.startswith("  RED")]
    assert len(broken) == 1 and "steps with a cache = one pass" in broken[0]
    assert captured.err == ""


@pytest.mark.parametrize(
    ("dtype", "allowed", "drift"),
    [
        ("float64", "1e-09", "ok"),
        ("float32", "1e-04", "ok"),
        ("bfloat16", "1e-01", "ok"),
        ("float16", "2e-02", "ok"),
    ],
)
def test_verify_loads_in_the_dtype_asked_for(
    dtype: str, allowed: str, drift: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--model", "groundtruth-induction", "--dtype", dtype]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[1] == "fused" and f"<= {allowed}" in line for line in lines)
    half = dtype if dtype.endswith("16") else "bfloat16"
    (about,) = [line for line in lines if f"drift in {half}" in line]
    assert about.split()[0] == drift


def test_verify_measures_both_sides_of_an_encoder_decoder_in_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf_model("bart").save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert main(["verify", "--model", str(path)]) == 0
        verdict, *lines = capsys.readouterr().out.splitlines()
        assert verdict == f"{path}: every line holds"
        for claim in (
            "logits = Hugging Face",
            "encoder: residual parts sum",
            "decoder: cross_attn pattern @ v = z",
        ):
            (line,) = [line for line in lines if claim in line]
            assert line.startswith("  ok ")


def test_verify_reads_the_training_checkpoint_that_the_revision_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf_model("gpt2").save_pretrained(tmp_path / "checkpoint-30")
    assert main(["verify", "--model", str(tmp_path), "--revision", "step30"]) == 0
    assert "ok   logits = Hugging Face" in capsys.readouterr().out
    assert "has no checkpoint 'step7'" in error_of(
        capsys, "verify", "--model", str(tmp_path), "--revision", "step7"
    )


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["report", "--model", "groundtruth-inductoin"], "'groundtruth-inductoin' is not in the local cache"),
        (["report", "--model", "./nowhere"], "./nowhere does not exist"),
        ([*MODEL, "--prompt", ""], "the prompt is empty"),
        ([*MODEL, "--prompt", "a" * 200], "201 tokens, the model's context holds 128"),
        ([*MODEL, "--prompt", "a-b"], "letters, digits and spaces are required, got '-'"),
        (["report", *PLANTED, "--wrong", "d"], "requires an answer"),
        ([*MODEL, "--prompt", "talk.json"], "of one chat (.json, .jsonl) is required, the file talk.json is not there"),
        (["serve", *PLANTED[2:], "--prompt", "text.txt"], "is required, the file text.txt is not there"),
        (["report", *PLANTED, "--answer", "d", "--wrong", "d"], "must differ"),
        ([*MODEL, "--answer", "d"], "requires a prompt"),
        (["report", *PLANTED, "--chat"], "messages require a tokenizer with a chat template"),
        (["report", *PLANTED, "--device", "abacus"], "device 'abacus' is not available"),
        (["heads", "--model", "groundtruth-inductoin"], "nearest: groundtruth-induction"),
        (["heads", "-m", "demo-attn-2l", "--checkpoints", "step7"], "has no revision 'step7'; it has ['step1200'"),
        (["heads", "-m", "demo-attn-2l", "--checkpoints", "main"], "names its step is required, such as 'step2850'"),
        (["heads", "-m", "demo-4l", "--checkpoints", "step1"], "demo-4l has no revision 'step1'"),
        (["heads", "-m", "demo-4l", "--checkpoints", "all"], "with checkpoints (demo-attn-2l), got 'demo-4l'"),
        (["heads", "-m", "./nowhere", "--checkpoints", "all"], "with checkpoints (demo-attn-2l), got './nowhere'"),
        (["heads", "-m", "./nowhere", "--checkpoints", "step1"], "./nowhere does not exist"),
        (["backward-lens", "abc", "--answer", "d", "--model", "groundtruth-induction", "--matrices", "W_out"],
         "no factors of W_out"),
        (["verify", "--model", "groundtruth-inductoin"], "'groundtruth-inductoin' is not in the local cache"),
        (["verify", "--model", "./nowhere"], "./nowhere does not exist"),
        (["verify", "--model", "."], "config.json is required beside the weights"),
        (["verify", "--model", "groundtruth-induction", "--revision", "step7"], "has no revision 'step7'"),
        (["verify", "--model", "groundtruth-induction", "--device", "abacus"], "device 'abacus' is not available"),
        (["run", "experiments/nowhere.py"], "experiments/nowhere.py does not exist"),
        (["heads", "--most", "-5"], "--most must be 1 or more, got -5"),
        (["circuit", "facts", "--most", "0"], "--most must be 1 or more, got 0"),
        (["jacobian-lens", "a", "--most", "0"], "--most must be 1 or more, got 0"),
        (["graph", "x.json", "--nodes", "-1"], "--nodes must be 1 or more, got -1"),
        (["compare", "a", "b", "--largest", "0"], "--largest must be 1 or more, got 0"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    argv: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in error_of(capsys, *argv)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    assert "not ours (thesis.tex)" in error_of(capsys, "report", *PLANTED, "--out", str(tmp_path))


def test_an_unwritable_folder_is_refused_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interp.HookedTransformer.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "file").write_text("x")
    message = error_of(capsys, "report", *PLANTED, "--out", str(tmp_path / "file" / "out"))
    assert "cannot make the folder" in message


@pytest.mark.slow
def test_nothing_stays_behind_after_a_failure_in_the_middle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(report: object) -> str:
        raise OSError("no space left on device")

    monkeypatch.setattr("interp.pages.folder.page", broken)
    assert "no space left" in error_of(capsys, "report", *PLANTED, "--out", str(tmp_path / "deep" / "out"))
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_where_it_was_raised(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        main(
            [
                "report",
                "--model",
                "groundtruth-induction",
                "--prompt",
                "",
                "--debug",
                "--out",
                str(tmp_path / "x"),
            ]
        )


def test_the_help_says_of_every_command_what_its_own_help_says() -> None:
    for name, entry in COMMANDS.items():
        assert entry.says == (inspect.getdoc(command(name)) or "").split("\n\n")[0], name


def test_the_version_is_said_with_those_of_what_it_stands_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and said.startswith(
        f"interp {interp.__version__}, torch {torch.__version__.split('+')[0]}"
    )
    assert said.count("\n") == 1


def test_help_models_and_wrong_usage_need_no_torch() -> None:
    """What a person waits for before anything is computed."""
    code = (
        "import sys; from interp.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'pandas', 'xarray'} & set(sys.modules), 'slow to import'"
    )
    for argv in (
        ["--help"],
        ["--version"],
        ["models"],
        ["modles"],
        ["report", "--help"],
        ["report", "--sed"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_a_command_collects_rarely_and_leaves_the_collector_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, seen = gc.get_threshold(), []

    def opened(self: ModelCommand, revision: str | None = None) -> None:
        seen.append(gc.get_threshold())
        raise ValueError("not here")

    monkeypatch.setattr(ModelCommand, "opened", opened)
    assert main(["heads"]) == 2
    assert seen[0][0] > before[0] and seen[0][1:] == before[1:]
    assert gc.get_threshold() == before


def test_passes_leave_no_tensors_to_the_collector() -> None:
    """Else a command that collects rarely would hold the memory of many passes."""
    model, metric = (
        interp.HookedTransformer.from_pretrained("demo-4l"),
        interp.logit_difference(ANSWER, WRONG),
    )

    def asked() -> None:
        interp.logit_lens(model, PROMPT)
        interp.attribution_patch(model, PROMPT, CORRUPT, metric=metric)
        interp.patch(model, PROMPT, CORRUPT, metric=metric)
        interp.path_patch(model, PROMPT, CORRUPT, metric=metric)

    asked()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        asked()
        gc.collect()
        held = [each for each in gc.garbage if isinstance(each, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not held


def test_a_command_that_there_is_not_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["modles"])
    assert ended.value.code == 2
    assert "there is no command 'modles'; nearest: models" in capsys.readouterr().err


def test_an_option_that_would_do_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    both = error_of(capsys, "heads", "-m", "demo-attn-2l", "--checkpoints", "all", "--revision", "step1200")
    assert "--checkpoints names the revisions: leave --revision out" in both
    assert "leave --sort out" in error_of(capsys, "circuit", "facts", "--sort", "value")


def test_every_model_command_loads_the_named_checkpoint_and_dtype() -> None:
    asked = parsed(["logit-lens", "a", "-m", "demo-attn-2l", "--revision", "step1200", "--dtype", "bfloat16"])
    model = asked.opened()  # type: ignore[attr-defined]
    assert model.transformer.dtype == torch.bfloat16
    same = interp.HookedTransformer.from_pretrained("demo-attn-2l", revision="step1200", dtype="bfloat16")
    assert torch.equal(model.W_E, same.W_E)


def test_every_model_command_leaves_bos_out_where_it_is_asked_to() -> None:
    asked = parsed(["logit-lens", "a", "-m", "demo-4l", "--prepend-bos", "False"])
    found, usual = (each.opened() for each in (asked, parsed(["logit-lens", "a"])))  # type: ignore[attr-defined]
    (without,), (bos, *rest) = (model.to_tokens("a")[0].tolist() for model in (found, usual))
    assert bos == usual.text.bos_id and rest == [without]


# --- early ends ---------------------------------------------------------------------------------------------------

HANGING = """
import os, signal, sys, time
from pathlib import Path
from interp import HookedTransformer, cli

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background and nohup start without these
signal.signal(signal.SIGHUP, signal.SIG_DFL)

def stopped(*given, **options):
    print(sorted(path.name[:5] for path in Path(sys.argv[1]).iterdir()), flush=True)
    os.kill(os.getpid(), int(sys.argv[2]))
    while True:  # a signal that another thread took interrupts no pause
        time.sleep(0.01)

HookedTransformer.from_pretrained = stopped
raise SystemExit(cli.main([*sys.argv[3:]]))
"""


def hanging(folder: Path, number: int, *argv: str) -> "subprocess.CompletedProcess[str]":
    """A command that gets a signal while it loads its model."""
    words = [sys.executable, "-c", HANGING, str(folder), str(int(number)), *argv]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.parametrize(
    "argv",
    [
        ["report", "--out"],
        *(pytest.param([name], marks=pytest.mark.slow) for name in ("heads", "verify", "serve")),
    ],
    ids=lambda argv: argv[0],
)
def test_ctrl_c_is_one_line_and_exit_code_130(argv: list[str], tmp_path: Path) -> None:
    out = [str(tmp_path / "out")] if argv[-1] == "--out" else []
    done = hanging(tmp_path, signal.SIGINT, *argv, *out)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGHUP", marks=pytest.mark.slow)])
def test_what_a_report_began_is_removed_at_a_signal_that_ends_it(name: str, tmp_path: Path) -> None:
    done = hanging(tmp_path, getattr(signal, name), "report", "--out", str(tmp_path / "out"))
    assert done.stdout == "['.out.']\n"
    assert done.returncode == -getattr(signal, name)
    assert list(tmp_path.iterdir()) == []


def test_what_a_library_makes_of_ctrl_c_is_still_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def converted(self: Models) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as cause:
            raise ImportError("a module could not be imported") from cause

    monkeypatch.setattr(Models, "run", converted)
    assert main(["models"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["--help"], ["heads", "--help"], ["models"]], ids=" ".join)
@pytest.mark.parametrize(
    ("to", "code", "err"),
    [("| true", 141, ""), (">&-", 0, ""), (">/dev/full", 2, "error: [Errno 28] No space left on device\n")],
)
def test_output_that_nobody_takes_is_no_traceback(argv: list[str], to: str, code: int, err: str) -> None:
    script = f'"$@" {to}; exit ${{PIPESTATUS[0]}}'
    words = ["bash", "-c", script, "bash", sys.executable, "-m", "interp", *argv]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr, done.stdout) == (code, err, "")


# --- start --------------------------------------------------------------------------------------------------------


def test_the_module_and_the_command_start_the_same_function() -> None:
    from interp.__main__ import main as started

    assert started is cli.main


def test_a_page_is_not_written_over_what_is_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device, a pipe and a link stay what they are; one line says why nothing was written."""
    (tmp_path / "kept").write_text("mine")
    (tmp_path / "link").symlink_to("kept")
    os.mkfifo(tmp_path / "pipe")
    for out, what in (("link", "a symbolic link to kept"), ("pipe", "a pipe"), ("/dev/null", "a device")):
        kind = (tmp_path / out).lstat().st_mode
        assert main(["graph", str(graph_file()), "--out", str(tmp_path / out)]) == 2
        assert f"{tmp_path / out} is {what}" in capsys.readouterr().err
        assert (tmp_path / out).lstat().st_mode == kind
    assert (tmp_path / "kept").read_text() == "mine"


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--strict",), 1)])
def test_a_note_is_a_line_on_stderr_and_under_strict_an_exit_code(
    options: tuple[str, ...],
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note.cache_clear()
    monkeypatch.setattr(Models, "run", lambda self: note("half of it"))
    assert main(["models", *options]) == code
    assert capsys.readouterr().err == "note: half of it\n"


def test_strict_without_notes_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--strict"]) == 0
    assert capsys.readouterr().err == ""


# --- files of chats and facts --------------------------------------------------------------------------------------


def chatting(tmp_path: Path) -> Path:
    """A folder with a small model whose tokenizer has a chat template."""
    from tests.data.templates import CHATML, backend, speaking

    config = transformers.GPT2Config(
        vocab_size=backend().get_vocab_size(), n_positions=128, n_embd=8, n_layer=1, n_head=2
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    speaking(CHATML).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_report_is_about_the_chat_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, talk = chatting(tmp_path), [{"role": "user", "content": "The cat"}]
    (tmp_path / "talk.json").write_text(json.dumps(talk))
    model = interp.HookedTransformer.from_pretrained(folder)
    options = ("--model", str(folder), "--prompt")
    question = ReportCommand(model=str(folder), prompt=str(tmp_path / "talk.json"))
    asked = question.as_conversation(model, question.question())
    assert asked.ids == tuple(model.to_batch(chat=talk).tokens[0].tolist())
    (tmp_path / "two.jsonl").write_text("\n".join([json.dumps({"messages": talk})] * 2))
    for name, content, message in (
        ("two.jsonl", None, "a file of one chat is required"),
        ("none.json", "[1]", "none.json: a list of messages with role and content"),
        ("bad.json", '[{"role": "user"}]', "bad.json 0, message 0: messages must be at least one"),
        ("talk.txt", "The cat", "talk.txt holds texts"),
    ):
        if content is not None:
            (tmp_path / name).write_text(content)
        found = error_of(capsys, "report", *options, str(tmp_path / name), "--out", str(tmp_path / "out"))
        assert message in found


def test_questions_are_asked_of_chats_and_facts_of_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, talk = chatting(tmp_path), [{"role": "user", "content": "The cat"}]
    (tmp_path / "talk.json").write_text(json.dumps({"messages": talk}))
    out = tmp_path / "a.csv"
    assert main(["logit-lens", str(tmp_path / "talk.json"), "--model", str(folder), "--out", str(out)]) == 0
    model = interp.HookedTransformer.from_pretrained(folder)
    words = set(pandas.read_csv(out).token.fillna(""))
    assert words >= set(model.to_str_tokens(model.to_batch(chat=talk).tokens)) - {"\n"}
    rows = [{"prompt": f"The {each} sat on the", "subject": each, "answer": "mat"} for each in ("cat", "dog")]
    (tmp_path / "facts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = [f"{row['prompt']},mat,{row['subject']}" for row in rows]
    (tmp_path / "facts.csv").write_text("\n".join(["prompt,answer,subject", *table]))
    lens = []
    for name in ("facts.jsonl", "facts.csv"):
        out = str(tmp_path / f"{name}.out.csv")
        assert main(["logit-lens", str(tmp_path / name), "--model", str(folder), "--out", out]) == 0
        lens.append(Path(out).read_text())
    assert lens[0] == lens[1]
    capsys.readouterr()
    assert "a fact that the model knows is required: of 2 none" in error_of(
        capsys, "causal-trace", str(tmp_path / "facts.csv"), "--model", str(folder)
    )


def test_a_circuit_is_found_on_the_facts_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capitals = [fact for fact in interp.tasks.load_facts() if fact.relation == "capital"]
    rows = [{"prompt": "The capital of {} is", "subject": f.subject, "answer": f.object} for f in capitals]
    (tmp_path / "facts.json").write_text(json.dumps(rows))
    assert main(["circuit", str(tmp_path / "facts.json"), "--pairs", "2", "--most", "3"]) == 0
    assert "edges keep" in capsys.readouterr().out
    assert "no task of this name" in error_of(capsys, "circuit", "indirect_object")
    (tmp_path / "one.json").write_text(json.dumps(rows[:1]))
    assert "others to try it on are required" in error_of(capsys, "circuit", str(tmp_path / "one.json"))


def test_the_live_page_begins_with_the_text_of_a_chat(tmp_path: Path) -> None:
    from interp.cli.commands import chat_text

    folder, talk = chatting(tmp_path), [{"role": "user", "content": "The cat"}]
    (tmp_path / "talk.json").write_text(json.dumps(talk))
    model = interp.HookedTransformer.from_pretrained(folder)
    with pytest.raises(ValueError, match="other tokens than the chat, whose template writes no BOS"):
        chat_text(model, str(tmp_path / "talk.json"))
    bare = interp.HookedTransformer.from_pretrained(folder, default_prepend_bos=False)
    written = chat_text(bare, str(tmp_path / "talk.json"))
    assert bare.to_batch(written).tokens.equal(bare.to_batch(chat=talk).tokens)
    assert chat_text(model, "The cat") == "The cat"


def test_findings_prints_every_claim_and_writes_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claims = ["induction-heads", "greater-than"]
    asked = ["findings", "demo-attn-2l", "--prompts", "12", "--claims", *claims]
    assert main([*asked, "--out", str(tmp_path / "it.csv")]) == 0
    said = capsys.readouterr().out
    assert "HOLDS           induction-heads: A head attends" in said
    assert "CANNOT BE TOLD  greater-than" in said and "1 holds, 1 cannot be told" in said
    table = pandas.read_csv(tmp_path / "it.csv")
    found = interp.findings.findings(
        interp.HookedTransformer.from_pretrained("demo-attn-2l"), claims, prompts=12
    )
    assert table.claim.tolist() == claims and table.verdict.tolist() == ["holds", "cannot be told"]
    assert table.value[0] == float(found["value"][0]) and table.lowest.tolist() == [0.3, 0.3]


def test_claims_are_listed_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["findings", "nowhere", "--only", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[::2]] == list(interp.findings.CLAIMS)
    error = error_of(capsys, "findings", "--only", "list", "--claims", "induction")
    assert error.startswith("error: unknown claim 'induction'; nearest: induction-heads")
