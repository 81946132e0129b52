"""A checkpoint's tensors by name: in files, which are memory-mapped piece by piece, or in a live module."""

import json
import re
import zipfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor, nn

from interp.core.files import json_object, named_path, regular
from interp.core.wording import value_text
from interp.model.mapped import FileMap, MappedFile

CHUNK = 4 * 2**20
"""Number of bytes that are read, tested and copied at a time: small enough for a processor's cache."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
"""Suffixes of files that torch's weights-only unpickler reads."""
FOREIGN = {
    ".h5": "TensorFlow", ".keras": "Keras", ".msgpack": "Flax", ".ot": "rust-bert", ".onnx": "ONNX", ".npz": "NumPy",
    ".tflite": "TensorFlow Lite", ".gguf": "GGUF",
}  # fmt: skip
"""Suffixes of weight files of other programs -> the program."""
STATES = ("model", "state_dict", "model_state_dict", "module", "model_state", "weights")
"""Keys under which training scripts save the state dict."""
BESIDE = re.compile(
    r"(training_args|optimizer|scheduler|scaler|sampler|rng_state|random_states|dl_state)(_\d+)*"
)
"""Matches names, without suffix, of files of a training run that hold no weights of the model."""
SHARD = re.compile(r".*-\d+-of-(\d+)")
"""Matches names, without suffix, of files that hold a part of the weights."""
POINTER = b"version https://git-lfs"
"""First bytes of a Git LFS pointer, in place of a file that was not fetched."""
MAPPED = 16 * 2**20
"""Number of bytes that are read before the files are unmapped."""


class Tensors(Mapping[str, Tensor]):
    """A checkpoint's tensors by name; read a tensor before calling `release`, which may unmap its file."""

    notes: tuple[str, ...] = ()
    """Notes about steps that were needed to read the tensors (`Transformer.opened`)."""

    def outline(self, name: str) -> Tensor:
        """The tensor on the "meta" device, which has its shape and dtype."""
        return torch.empty_like(self[name], device="meta")

    @abstractmethod
    def release(self, read: int) -> None:
        """Note that `read` more bytes were read and are no longer needed."""

    def drop(self, names: tuple[str, ...]) -> None:
        """Note that these tensors will not be read again."""

    @abstractmethod
    def mapped(self, names: tuple[str, ...]) -> Tensor | None:
        """The tensors as one flat private view of their file; None where they are not stored one after the other.

        Writing to the view changes neither the file nor another view (copy on write).
        """

    def taken(self, name: str) -> Tensor | None:
        """The tensor itself, to be kept, where it has no other user; None where it must be copied."""
        return None

    def mapped_files(self, model: nn.Module) -> tuple[MappedFile, ...]:
        """The files of which parameters of this model are views."""
        return ()


class LiveTensors(Tensors):
    """The tensors of a module in memory.

    Args:
        owned: no one else uses the tensors: a tensor that fits becomes a parameter without a copy, and copied tensors
            are freed.
    """

    def __init__(
        self, state: Mapping[str, Tensor], *, owned: bool = False, notes: tuple[str, ...] = ()
    ) -> None:
        self._state, self._owned, self.notes = dict(state), owned, notes

    def release(self, read: int) -> None:
        """Do nothing: a tensor that was copied may still be needed for a tied parameter."""

    def taken(self, name: str) -> Tensor | None:
        """The tensor itself, if it is owned, contiguous and the only one in its storage; else None."""
        tensor = self._state[name].detach()
        fills_storage = (
            tensor.is_contiguous()
            and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        )
        return tensor if self._owned and fills_storage else None

    def drop(self, names: tuple[str, ...]) -> None:
        """Free owned tensors, which are copied already."""
        if self._owned:
            for name in names:
                self._state.pop(name, None)

    def mapped(self, names: tuple[str, ...]) -> None:
        """None: a live module's memory is its own."""

    def __getitem__(self, name: str) -> Tensor:
        return self._state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


class StoredTensors(Tensors):
    """The tensors of some files; ValueError naming a file that cannot be read.

    Files are unmapped after every 16 MiB read, so that tensors that were copied do not take memory twice.
    """

    def __init__(self, files: list[Path]) -> None:
        self._where: dict[str, Path] = {}
        self._open: dict[Path, Mapping[str, Tensor]] = {}
        self._tensor_offsets: dict[Path, dict[str, int]] = {}
        self._maps: dict[Path, FileMap] = {}
        self._read = 0
        for file in files:
            for name in self._tensors_of(file):
                if name in self._where:
                    places = f"{self._where[name].name} and in {file.name}"
                    raise ValueError(
                        f"{file.parent}: tensor {name!r} is in {places}; one set of weights is required"
                    )
                self._where[name] = file

    def __enter__(self) -> "StoredTensors":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._maps.clear()

    def release(self, read: int) -> None:
        """Unmap the files whenever enough was read; they are mapped again when needed."""
        self._read += read
        if self._read >= MAPPED:
            self._open.clear()
            self._read = 0

    def mapped(self, names: tuple[str, ...]) -> Tensor | None:
        """The view, if the tensors are stored one after the other in one safetensors file with one dtype; else None."""
        file = self._where[names[0]]
        if file.suffix in PICKLES or any(self._where[name] != file for name in names):
            return None
        if file not in self._tensor_offsets:
            self._tensor_offsets[file] = _tensor_offsets(file)
        begins = self._tensor_offsets[file]
        tensors = [self[name] for name in names]
        end = start = begins[names[0]]
        for name, tensor in zip(names, tensors, strict=True):
            if begins[name] != end or tensor.dtype != tensors[0].dtype or start % tensor.element_size():
                return None
            end += tensor.numel() * tensor.element_size()
        if file not in self._maps:
            self._maps[file] = FileMap(file)
        dtype = tensors[0].dtype
        return self._maps[file].view(dtype, start, (end - start) // dtype.itemsize)

    def taken(self, name: str) -> Tensor | None:
        """The tensor itself, to be kept, where it has no other user; None where it must be copied."""
        return None

    def mapped_files(self, model: nn.Module) -> tuple[MappedFile, ...]:
        """The files that parameters of this model are views of, each in its state when mapped, with their offsets."""
        files = [file_map.file_of(model.named_parameters()) for file_map in self._maps.values()]
        return tuple(file for file in files if file is not None)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors_of(self._where[name])[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def _tensors_of(self, file: Path) -> Mapping[str, Tensor]:
        if file not in self._open:
            require_contents(file)
            self._open[file] = _unpickled_tensors(file) if file.suffix in PICKLES else _Safetensors(file)
        return self._open[file]


class _Safetensors(Mapping[str, Tensor]):
    """One open safetensors file: its tensors are views of the mapped file."""

    def __init__(self, file: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._file, self._error = file, SafetensorError
        try:
            self._handle = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as cause:
            raise ValueError(f"{file} is not a readable safetensors file (truncated?): {cause}") from cause
        self._names = tuple(self._handle.keys())

    def __getitem__(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._handle.get_tensor(name)
        except self._error as cause:
            raise ValueError(f"{self._file}: tensor {name!r} cannot be read: {cause}") from cause
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _tensor_offsets(file: Path) -> dict[str, int]:
    """Offset of each tensor in a safetensors file, in bytes.

    Tensors follow 8 bytes with the header's length, and the header.
    """
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(length))
    header.pop("__metadata__", None)
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}


def _unpickled_tensors(file: Path) -> Mapping[str, Tensor]:
    """The tensors of a pickled file, read by torch's weights-only unpickler, which runs no code of the file."""
    try:
        mapped = zipfile.is_zipfile(file)  # files of before torch 1.6 are bare pickles and cannot be mapped
        contents = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except UnpicklingError as cause:
        forbidden = re.search(r"GLOBAL ([\w.]+)", str(cause))
        why = (
            f"it holds {forbidden[1]} beside tensors"
            if forbidden
            else "it is damaged, or no pickle of tensors"
        )
        raise ValueError(
            f"{file} is refused, and nothing in it was run: {why}; what is read is a state dict: "
            "torch.save(model.state_dict(), file)"
        ) from cause
    except Exception as cause:  # of many kinds: a pickle may be damaged anywhere
        raise ValueError(f"{file} is not a readable file of weights (truncated?): {cause}") from cause
    return state_in(contents, file)


def saved_beside(file: Path) -> Mapping[str, object]:
    """Entries that a training script saved next to the state dict in one file, such as its options.

    Empty for a bare state dict.
    """
    if file.suffix not in PICKLES:
        return {}
    contents = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    return contents if isinstance(contents, Mapping) and state_in(contents, file) is not contents else {}


def state_in(contents: object, file: Path) -> Mapping[str, Tensor]:
    """The state dict in the contents of a file: the contents themselves, or the entry under one of `STATES`."""
    inside = contents
    while isinstance(inside, Mapping):
        if inside and all(isinstance(value, Tensor) for value in inside.values()):
            return inside
        inside = next((inside[key] for key in STATES if isinstance(inside.get(key), Mapping)), None)
    keys = (
        ", ".join(map(str, list(contents)[:8])) if isinstance(contents, Mapping) else type(contents).__name__
    )
    raise ValueError(f"{file} must hold a dict of tensors, or one under {', '.join(STATES)}; it holds {keys}")


def require_contents(file: Path) -> None:
    """ValueError for a Git LFS pointer in place of weights, and errors for a missing or irregular file."""
    with regular(file).open("rb") as content:
        if content.read(len(POINTER)) == POINTER:
            raise ValueError(f"{file} is a pointer of Git LFS and not the weights; fetch them: git lfs pull")


def require_whole(file: Path) -> None:
    """ValueError for a file that does not hold all weights: one of several shards, or a JSON file."""
    shard = SHARD.fullmatch(file.stem)
    if shard and int(shard[1]) > 1:
        raise ValueError(f"{file} is one of {int(shard[1])} parts of the weights; give its folder")
    if file.suffix == ".json":
        raise ValueError(f"{file} holds no weights; give its folder")


def row_slices(tensor: Tensor) -> Iterator[slice]:
    """Slices of the first axis that hold at most a chunk each, or one row."""
    rows = max(1, CHUNK * len(tensor) // max(1, tensor.numel() * tensor.element_size()))
    return (slice(first, first + rows) for first in range(0, len(tensor), rows))


def equal(tensors: Tensors, a: str, b: str) -> bool:
    """Whether two tensors have equal shape, dtype and values, read a few mebibytes at a time."""
    first, second = tensors[a], tensors[b]
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.data_ptr() == second.data_ptr() and first.device == second.device:
        return True
    for rows in row_slices(first):
        if not torch.equal(tensors[a][rows], tensors[b][rows]):
            return False
        tensors.release(2 * first[rows].numel() * first.element_size())
    return True


def weight_files(folder: Path) -> list[Path]:
    """The files of weights, in the order of preference of transformers.

    One file comes before an index of shards, and safetensors before pickles; then any other single set of weights is
    taken.
    """
    for kind in ("model.safetensors", "pytorch_model.bin"):
        if (folder / kind).is_file():
            return [folder / kind]
        index = folder / f"{kind}.index.json"
        if index.is_file():
            return _of_index(folder, index)
    for suffix in (".safetensors", *PICKLES):
        files = weights_of(folder, suffix)
        shards = [p for p in files if SHARD.fullmatch(p.stem)]
        if shards and len(shards) == len(files) == int(shards[0].stem.rpartition("-")[2]):
            return files
        if len(files) > 1:
            raise ValueError(
                f"{folder} holds {len(files)} sets of weights, {', '.join(p.name for p in files[:4])}, and none of the "
                "names that are looked for first (model.safetensors, pytorch_model.bin); give the path of one"
            )
        if files:
            return files
    foreign = [p for p in sorted(folder.iterdir()) if p.suffix in FOREIGN] if folder.is_dir() else []
    if foreign:
        raise ValueError(foreign_format(foreign[0]))
    raise FileNotFoundError(
        f"{folder} holds no *.safetensors file and no pytorch_model.bin; it holds {listing(folder)}"
    )


def weights_of(folder: Path, suffix: str) -> list[Path]:
    """The files of a folder with this suffix that may hold the model's weights, sorted by name."""
    return [p for p in sorted(folder.glob(f"*{suffix}")) if not BESIDE.fullmatch(p.stem)]


def _of_index(folder: Path, index: Path) -> list[Path]:
    table = json_object(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise ValueError(f"{index}: weight_map must name a file for every tensor, got {value_text(table)}")
    files = [named_path(folder / name) for name in sorted(set(table.values()))]
    if missing := [f.name for f in files if not f.is_file()]:
        raise FileNotFoundError(f"{folder}: the index names {missing[0]}, which is not there")
    return files


def foreign_format(file: Path) -> str:
    """The error message about a weight file of another program."""
    return (
        f"{file} holds weights for {FOREIGN[file.suffix]}, which are not read; open it with a version of transformers "
        "that reads it and save it again as safetensors: model.save_pretrained(folder)"
    )


def listing(folder: Path) -> str:
    """The first files of a folder, for messages."""
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    return ", ".join(names[:8]) or "nothing"
