"""What is asked of the hub, and what is said when it has or gives nothing; nothing here reaches a network."""

import fnmatch
from collections.abc import Callable
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from interp.families.hub import at_revision, download

SAFE = (
    "config.json",
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "tokenizer.json",
    "merges.txt",
)
PICKLED = ("pytorch_model.bin", "pytorch_model-00001-of-00002.bin")
NEVER = ("modeling_x.py", "model.pt", "weights.pkl", "tf_model.h5", "training_args.bin", "onnx/config.json",
         "consolidated.safetensors")  # fmt: skip


@pytest.fixture
def hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[tuple[str, ...]], list[dict[str, object]]]:
    """A function that makes a hub of some files, and returns the list of what will have been asked of it."""

    def made(files: tuple[str, ...]) -> list[dict[str, object]]:
        asked: list[dict[str, object]] = []

        def snapshot_download(
            name: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
        ) -> str:
            asked.append({"name": name, "revision": revision})
            for file in files:
                allowed = any(fnmatch.fnmatch(file, p) for p in allow_patterns)
                if allowed and not any(fnmatch.fnmatch(file, p) for p in ignore_patterns):
                    (tmp_path / file).parent.mkdir(exist_ok=True)
                    (tmp_path / file).touch()
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name, revision: list(files))
        return asked

    return made


def fetched(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_download_never_asks_for_code_and_for_pickles_only_where_needed(
    hub: Callable[[tuple[str, ...]], list[dict[str, object]]],
) -> None:
    asked = hub((*SAFE, *PICKLED, *NEVER))
    assert fetched(download("someone/model", "step3000")) == set(SAFE)
    assert asked == [{"name": "someone/model", "revision": "step3000"}]


def test_pickled_weights_are_fetched_where_there_is_nothing_else(
    hub: Callable[[tuple[str, ...]], list[dict[str, object]]],
) -> None:
    hub((*PICKLED, "config.json", *NEVER))
    assert fetched(download("someone/model", None)) == {*PICKLED, "config.json"}


def test_gguf_file_of_a_repository_is_fetched_or_named(
    hub: Callable[[tuple[str, ...]], list[dict[str, object]]], tmp_path: Path
) -> None:
    hub(("model.Q4_K_M.gguf", "README.md"))
    assert download("someone/model", None) == tmp_path / "model.Q4_K_M.gguf"
    hub(("model.Q4_K_M.gguf", "model.Q8_0.gguf", "sub/model.gguf"))
    assert download("someone/model/model.Q8_0.gguf", None) == tmp_path / "model.Q8_0.gguf"
    assert (tmp_path / "model.Q8_0.gguf").is_file() and not (tmp_path / "sub").exists()
    with pytest.raises(
        ValueError, match=r"holds 2 GGUF files; name one: someone/model/model\.Q4_K_M\.gguf, someone"
    ):
        download("someone/model", None)


REPLY = httpx.Response(404, request=httpx.Request("GET", "https://hub"))


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (errors.LocalEntryNotFoundError("x"), r"^the hub cannot be reached.*, and 'a/b' at revision 'step1' is not in"),
        (errors.RevisionNotFoundError("x", response=REPLY), "the hub has no 'a/b' at revision 'step1'"),
        (errors.RepositoryNotFoundError("x", response=REPLY), "the hub has no 'a/b' at revision 'step1'"),
        (errors.GatedRepoError("x", response=REPLY), "'a/b' is gated"),
    ],
)  # fmt: skip
def test_a_hub_that_gives_nothing_is_explained(
    cause: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise cause

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ValueError, match=message):
        download("a/b", "step1")


@pytest.mark.parametrize("name", ["step3000", "checkpoint-3000"])
def test_a_revision_of_a_local_folder_is_the_training_checkpoint_in_it(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").touch()
    assert at_revision(tmp_path, "step3000") == tmp_path / name
    assert at_revision(tmp_path, None) == tmp_path
    with pytest.raises(ValueError, match=f"has no checkpoint 'step4'; it has {name}"):
        at_revision(tmp_path, "step4")
