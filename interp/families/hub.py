"""Finding a checkpoint's files: on the hub, or in a local folder, where a revision names a training checkpoint."""

from pathlib import Path

from interp.core.files import named_path

SAFE = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.spm", "*.tiktoken")
"""Patterns of configs, tokenizers and safetensors: files without code."""
PICKLED = ("pytorch_model*.bin", "adapter_model.bin")
"""Patterns of weights in repositories without safetensors; torch's weights-only unpickler reads them."""
COPIES = ("*/*", "consolidated*.safetensors")
"""Patterns of files with further copies of the weights, for other programs."""


class UnreachableError(ValueError):
    """The hub cannot be reached, and the requested files were never fetched."""


def located(source: str | Path, revision: str | None, hint: str) -> Path:
    """The local path of a checkpoint, downloaded if `source` is a hub repository; `revision`: a training checkpoint.

    Args:
        hint: suggestion of other names, for the error messages.

    Raises:
        FileNotFoundError: a path that does not exist.
        ValueError: a name that the hub does not have.
    """
    if not str(source):
        raise ValueError(f"the name or the path of a model is required, got an empty text; {hint}")
    path = named_path(source)
    path = path.expanduser() if path.parts[:1] == ("~",) else path
    if revision is not None:
        named_path(revision)
    if path.exists():
        return path if path.is_file() else at_revision(path, revision)
    looks_local = isinstance(source, Path) or path.is_absolute() or str(source).startswith((".", "~"))
    if looks_local:
        raise FileNotFoundError(
            f"{source} does not exist; give a folder with config.json and weights, or a name; {hint}"
        )
    try:
        return download(str(source), revision)
    except UnreachableError as cause:
        raise ValueError(f"{cause}; it is no folder and no demo model either; {hint}") from cause
    except Exception as cause:
        raise ValueError(
            f"unknown model {str(source)!r}: no such folder, no demo model, and the hub did not give it "
            f"({type(cause).__name__}: {cause}); {hint}"
        ) from cause


def download(name: str, revision: str | None) -> Path:
    """The local copy of a hub repository: configs, tokenizer and safetensors, or `.bin` where there are none.

    Args:
        name: "owner/model", or "owner/model/file.gguf" for one GGUF file of a repository that has several.
        revision: a branch, tag or commit, such as a training checkpoint "step3000". Code is never fetched.

    Raises:
        ValueError: if the hub has no such repository or revision, if it cannot be reached and nothing is cached, or
            if a repository holds nothing but GGUF files, several of them, and none is named.
    """
    if name.endswith(".gguf") and name.count("/") == 2:
        repository, _, file = name.rpartition("/")
        return _snapshot(repository, revision, (file,)) / file
    folder = _snapshot(name, revision, SAFE)
    if not any(folder.glob("*.safetensors")):
        folder = _snapshot(name, revision, (*SAFE, *PICKLED))
    if not any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
        files = _gguf_files(name, revision)
        if len(files) > 1:
            raise ValueError(
                f"{name!r} holds {len(files)} GGUF files; name one: "
                + ", ".join(f"{name}/{f}" for f in files[:6])
            )
        return _snapshot(name, revision, tuple(files)) / files[0] if files else folder
    return folder


def _gguf_files(name: str, revision: str | None) -> list[str]:
    """The GGUF files at the top of a hub repository; none where the hub cannot be reached."""
    import httpx
    from huggingface_hub import errors, list_repo_files

    try:
        files = list_repo_files(name, revision=revision)
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, httpx.HTTPError, OSError):
        return []
    return sorted(file for file in files if file.endswith(".gguf") and "/" not in file)


def at_revision(folder: Path, revision: str | None) -> Path:
    """The folder of a training checkpoint inside a local folder: `<revision>`, or `checkpoint-3000` for "step3000".

    Without a revision it is the folder itself. ValueError, with the checkpoints that exist, if this one does not.
    """
    if revision is None:
        return folder
    for name in (revision, f"checkpoint-{revision.removeprefix('step')}"):
        if (folder / name / "config.json").is_file():
            return folder / name
    revisions = sorted(file.parent.name for file in folder.glob("*/config.json"))
    raise ValueError(f"{folder} has no checkpoint {revision!r}; it has {', '.join(revisions) or 'none'}")


def _snapshot(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """The local folder with the files of a hub repository that match the patterns."""
    from huggingface_hub import constants, errors, snapshot_download

    at = repr(name) if revision is None else f"{name!r} at revision {revision!r}"
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(COPIES)
        )
    except errors.LocalEntryNotFoundError as cause:
        why = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        raise UnreachableError(
            f"the hub cannot be reached{why}, and {at} is not in the local cache"
        ) from cause
    except errors.GatedRepoError as cause:
        raise ValueError(f"{name!r} is gated: accept its terms on the hub and log in there") from cause
    except (errors.RevisionNotFoundError, errors.RepositoryNotFoundError) as cause:
        raise ValueError(f"the hub has no {at}") from cause
    return Path(folder)
