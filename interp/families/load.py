"""Loading: a folder, a file or a live Hugging Face model becomes a `Transformer`, every tensor accounted for.

Nothing here executes code from a checkpoint: configs are JSON, weights are safetensors, remote code is never asked for.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from interp.core.results import write_atomically
from interp.core.shapes import nearest
from interp.families import gpt2, llama, native
from interp.families.convert import to_model
from interp.families.spec import Family, Settings
from interp.families.tokenizer import FileTokenizer, HuggingFaceTokenizer
from interp.model.config import ModelConfig
from interp.model.transformer import Transformer

FAMILIES: tuple[Family, ...] = (gpt2.FAMILY, llama.FAMILY, native.FAMILY)
TokenizerAdapter = FileTokenizer | HuggingFaceTokenizer


def family_of(values: Mapping[str, object]) -> Family:
    """The family of a config by its `model_type`; ValueError naming the supported ones."""
    kind = str(values.get("model_type"))
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    known = [t for family in FAMILIES for t in family.model_types]
    raise ValueError(
        f"model_type {kind!r} is not supported; supported: {', '.join(known)} ({nearest(kind, known)})"
    )


def config_of(values: Mapping[str, object]) -> tuple[Family, ModelConfig]:
    """Family and our config of a checkpoint's config; ValueError for anything it asks that we do not do."""
    family = family_of(values)
    settings = Settings(values, family.name)
    config = family.config(settings)
    settings.finish()
    return family, config


def from_hf_model(
    hf_model: nn.Module, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Transformer:
    """Our copy of a live Hugging Face model; the original is not touched and shares no memory."""
    config = getattr(hf_model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise ValueError(f"a Hugging Face model with a config is required, got {type(hf_model).__name__}")
    values: dict[str, object] = config.to_dict()
    family, ours = config_of(values)
    return to_model(family, ours, hf_model.state_dict(), dtype=dtype, device=torch.device(device))


def from_folder(
    path: Path,
    *,
    config: Path | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Transformer:
    """The model of a local folder (`config.json` beside safetensors), or of one safetensors file in such a folder.

    config: the config's file, where it is not beside the weights.
    """
    folder = path if path.is_dir() else path.parent
    config_file = config or folder / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(
            f"{config_file} is required beside the weights; {folder} holds {_listing(folder)}"
        )
    family, ours = config_of(_json(config_file))
    files = [path] if path.is_file() else _weight_files(folder)
    with StoredTensors(files) as tensors:
        return to_model(family, ours, tensors, dtype=dtype, device=torch.device(device))


def tokenizer_of(folder: Path) -> TokenizerAdapter | None:
    """The tokenizer stored in a folder, or None if there is none."""
    native_file = folder / "tokenizer.json"
    config = _json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if config.get("model_type") == native.MODEL_TYPE:
        return FileTokenizer.read(native_file, native.BOS) if native_file.is_file() else None
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if not any((folder / name).is_file() for name in names):
        return None
    import transformers

    found = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    return HuggingFaceTokenizer(found)


def download(name: str, revision: str | None) -> Path:
    """The local copy of a hub repository: configs, tokenizer and safetensors only, never code or pickles."""
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt"]
    return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def save(model: Transformer, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` in our own layout; a tied unembedding is stored once."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    values = {"model_type": native.MODEL_TYPE, **model.config.to_dict()}
    write_atomically(folder / "model.safetensors", lambda p: save_file(state, p, metadata={"format": "pt"}))
    write_atomically(folder / "config.json", lambda p: _write_text(p, json.dumps(values, indent=2) + "\n"))


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of some safetensors files, read one at a time; ValueError naming a file that cannot be read."""

    def __init__(self, files: list[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self._error = SafetensorError
        self._where: dict[str, Path] = {}
        self._open = {}
        for file in files:
            try:
                handle = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as cause:
                raise ValueError(
                    f"{file} is not a readable safetensors file (truncated?): {cause}"
                ) from cause
            self._open[file] = handle
            for name in handle.keys():  # noqa: SIM118 - a handle is no mapping
                if name in self._where:
                    both = f"{self._where[name].name} and in {file.name}"
                    raise ValueError(
                        f"{file.parent}: tensor {name!r} is in {both}; one set of weights is required"
                    )
                self._where[name] = file

    def __enter__(self) -> "StoredTensors":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def __getitem__(self, name: str) -> Tensor:
        file = self._where[name]
        try:
            tensor: Tensor = self._open[file].get_tensor(name)
            return tensor
        except self._error as cause:
            raise ValueError(f"{file}: tensor {name!r} cannot be read: {cause}") from cause

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        table = _json(index).get("weight_map")
        names = sorted(set(table.values())) if isinstance(table, dict) else []
        files = [folder / str(name) for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if missing := [f.name for f in files if not f.is_file()]:
        raise FileNotFoundError(f"{folder}: the index names {missing[0]}, which is not there")
    if not files:
        raise FileNotFoundError(
            f"{folder} holds no *.safetensors file (pickled weights are never loaded); it holds {_listing(folder)}"
        )
    return files


def _listing(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    return ", ".join(names[:8]) or "nothing"


def _json(path: Path) -> dict[str, object]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as cause:
        raise ValueError(f"{path} is not readable JSON: {cause}") from cause
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
