"""Provenance: the same weights have the same hash, and everything needed to repeat a run is in its record."""

import copy
import json
import subprocess
from pathlib import Path

import pytest
import torch

import interp
from interp.runs.folder import file_hash, write_json
from interp.runs.provenance import (
    PACKAGES,
    git_dirty,
    git_revision,
    model_hash,
    provenance,
    question_of,
    versions,
)
from tests.configs import CONFIGS, build, perturbed


def test_the_same_weights_have_the_same_hash_and_any_change_another() -> None:
    model = perturbed(CONFIGS["gpt2"])
    again = copy.deepcopy(model)
    assert model_hash(model) == model_hash(again) != model_hash(build("llama-gqa"))
    for name, parameter in model.named_parameters():
        before = model_hash(model)
        kept = parameter.data.flatten()[-1].clone()
        parameter.data.view(-1)[-1] += 1
        assert model_hash(model) != before, name
        parameter.data.view(-1)[-1] = kept
        assert model_hash(model) == before
    assert model_hash(model.float()) != model_hash(again)


def test_versions_name_every_package_that_can_move_a_number() -> None:
    found = versions()
    assert found.keys() == {"python", "interp", *PACKAGES} and found["interp"] == interp.__version__
    assert found["torch"] == torch.__version__.split("+")[0] or torch.__version__.startswith(found["torch"])


def test_the_record_is_json_and_rebuilds_the_config(tmp_path: Path) -> None:
    record = provenance(build("llama3-scaled"), "mine", seed=3, parameters={"rows": 4, "sites": ["a"]})
    write_json(tmp_path / "run.json", record)
    again = json.loads((tmp_path / "run.json").read_text())
    assert again == json.loads(json.dumps(record))
    assert (again["model"], again["seed"], again["parameters"]["rows"]) == ("mine", 3, 4)
    assert type(CONFIGS["gpt2"]).from_dict(again["config"]) == CONFIGS["llama3-scaled"]
    assert again["dtype"] == "torch.float64"


def test_a_record_that_is_no_json_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_json(tmp_path / "run.json", {"x": torch.zeros(1)})
    assert list(tmp_path.iterdir()) == []


def test_there_is_no_revision_outside_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_revision() is None
    assert git_dirty() is None


def test_a_repository_is_dirty_once_a_tracked_file_differs_from_its_commit(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        user = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *user, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    file = tmp_path / "x.py"
    file.write_text('"""Why?"""\n')
    git("init", "-q")
    git("add", "x.py")
    git("commit", "-q", "-m", "first")
    (tmp_path / "untracked").write_text("y")
    assert (git_revision(tmp_path), git_dirty(tmp_path)) == (git("rev-parse", "HEAD"), False)
    before = file_hash(file)
    file.write_text('"""Why not?"""\n')
    assert git_dirty(tmp_path) is True
    assert file_hash(file) != before


@pytest.mark.parametrize(
    ("text", "question"), [('"""Why?\n\nSo."""\nx = 1', "Why?\n\nSo."), ("x = 1", ""), ("x = (", "")]
)
def test_the_question_of_a_file_is_its_docstring_read_without_running_it(
    text: str, question: str, tmp_path: Path
) -> None:
    (tmp_path / "x.py").write_text(text)
    assert question_of(tmp_path / "x.py") == question
