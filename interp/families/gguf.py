"""GGUF files, the format of llama.cpp: the config and the tensors that an ordinary checkpoint of the same model has.

transformers maps the file's keys to keys of a config, and its tensor names to those of a checkpoint; the package `gguf`
dequantises blocks of 4-bit numbers. One tensor is read at a time. A tensor without a name in transformers, and a key of
the file that would change a number, are refused by name, where transformers would ignore them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from einops import EinopsError, rearrange
from torch import Tensor, nn

from interp.core.axes import shape_text
from interp.families.gguf_keys import GgufContents, rope_tensors, values_of
from interp.families.stored import Tensors, require_contents

if TYPE_CHECKING:
    import gguf
    from numpy.typing import DTypeLike, NDArray
    from transformers import PreTrainedConfig
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor

SUFFIX = ".gguf"
PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""GGUF tensor types that are not quantised -> their dtypes."""


@dataclass(frozen=True)
class GgufFile(GgufContents):
    """An open GGUF file: its own keys, its tensors, and transformers' config of it."""

    config: PreTrainedConfig
    parsed: Mapping[str, object]
    """The config's keys as stored in the file, before transformers adds defaults."""


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, by its suffix or its first four bytes."""
    if not path.is_file():
        return False
    if path.suffix.lower() == SUFFIX:
        return True
    with path.open("rb") as content:
        return content.read(4) == b"GGUF"


def read(path: Path) -> GgufFile:
    """The file with its keys read, and its tensors not read yet.

    Raises:
        ValueError: the package `gguf` is missing, the file is damaged, transformers does not read its architecture,
            or the file asks for something that is not read.
    """
    import transformers

    _require_gguf(path)
    require_contents(path)
    try:
        reader = _reader(path)
        fields = {name: _field_value(name, field) for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except Exception as cause:  # of many kinds: the file may be damaged anywhere
        raise ValueError(f"{path} is not a readable GGUF file (truncated?): {cause}") from cause
    if fields.get("split.count", 0) not in (0, 1):
        raise ValueError(
            f"{path} is one of {fields['split.count']} parts; merge them first: llama-gguf-split --merge"
        )
    contents = GgufContents(path, fields, tensors)
    values = values_of(contents)
    kind, other_values = str(values["model_type"]), {k: v for k, v in values.items() if k != "model_type"}
    try:
        config = transformers.AutoConfig.for_model(kind, **other_values)
    except Exception as cause:  # of many kinds: whatever a damaged key may be
        raise ValueError(
            f"{path}: transformers makes no config of what this file of {contents.architecture!r} says: {cause}"
        ) from cause
    padding = getattr(config, "pad_token_id", None)
    if isinstance(padding, int) and padding >= config.vocab_size:
        config.pad_token_id = None  # a default of the family that this vocabulary does not have
    return GgufFile(path, fields, tensors, config, values)


def tokenizer_keys(path: Path) -> dict[str, object]:
    """The keys of a file about its tokenizer, without the prefix `tokenizer.ggml.`, and their values; lists left out.

    Raises:
        ValueError: the package `gguf` is missing, or the file is damaged.
    """
    _require_gguf(path)
    begins = "tokenizer.ggml."
    try:
        fields = {name: field for name, field in _reader(path).fields.items() if name.startswith(begins)}
        return {n.removeprefix(begins): f.contents() for n, f in fields.items() if not _is_list(f)}
    except Exception as cause:  # of many kinds: the file may be damaged anywhere
        raise ValueError(f"{path} is not a readable GGUF file (truncated?): {cause}") from cause


def _is_list(field: gguf.ReaderField) -> bool:
    """Whether the value of a key is a list."""
    return bool(field.types) and field.types[0].name == "ARRAY"


def _require_gguf(path: Path) -> None:
    """ValueError where the package gguf is not installed."""
    try:
        import gguf  # noqa: F401
    except ImportError as cause:
        raise ValueError(f"{path}: a GGUF file requires the package gguf: pip install gguf") from cause


def _reader(path: Path) -> gguf.GGUFReader:
    """The `gguf` reader of a file."""
    return _plain_reader()(path)


def _plain_reader() -> type[gguf.GGUFReader]:
    """The class of `gguf`'s reader on a plain array, which is faster and stops at the file's end.

    Small slices take a third of the time (a vocabulary has 100 000), and a damaged length does not make it read beyond
    the file's end.
    """
    from gguf import GGUFReader

    class Plain(GGUFReader):
        def _get(
            self,
            offset: int | np.integer,
            dtype: DTypeLike,
            count: int | np.integer = 1,
            override_order: Literal["I", "S", "<"] | None = None,
        ) -> NDArray[np.generic]:
            self.data = np.asarray(self.data)  # type: ignore[assignment]
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError(f"its {len(self.data)} bytes are fewer than it says")
            return super()._get(int(offset), dtype, int(count), override_order)

    return Plain


@contextmanager
def read_in_seconds() -> Iterator[None]:
    """Speed up transformers' own reading of a file: our faster reader, and a table of names that is built only once.

    The tensors are the same bits; SmolLM2's file (49 152 tokens, 272 tensors) takes 4 CPU seconds instead of 12.
    """
    import gguf

    usual = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    quick = {"GGUFReader": _plain_reader(), "get_tensor_name_map": cache(gguf.get_tensor_name_map)}
    for name, function in quick.items():
        setattr(gguf, name, function)
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(gguf, name, function)


def _field_value(name: str, field: gguf.ReaderField) -> object:
    """The value of a key; None for the tokenizer's keys, whose long lists are not read here."""
    if name.startswith("tokenizer."):
        return None
    value = field.contents()
    if isinstance(value, float) and np.float32(value) == value:
        return float(str(np.float32(value)))  # 1e-6 is stored as 9.99999997e-07
    return value


# --- tensors ------------------------------------------------------------------------------------------------------


class GgufTensors(Tensors):
    """The tensors of a GGUF file under the names of an ordinary checkpoint, dequantised as they are read.

    A matrix is computed in float32 and rounded once, to `dtype`.

    Raises:
        ValueError: tensors that transformers has no name for, a type of blocks that `gguf` cannot dequantise, or a
            shape that the config does not have.
    """

    def __init__(self, file: GgufFile, dtype: torch.dtype | None) -> None:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        self._file, self._dtype = file, dtype or own_dtype(file)
        network = meta_network(file.config)
        shapes = {name: value.shape for name, value in network.state_dict().items()}
        self._processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(  # type: ignore[no-untyped-call]
            config=dict(file.parsed)
        )
        self._mapping = _checkpoint_names(file, shapes, self._processor)
        self._last: tuple[str, Tensor] | None = None
        self._sources: dict[str, list[str]] = defaultdict(list)
        self._own = {name: layout for name in shapes if (layout := own_layout(file, name)) is not None}
        for name, layout in self._own.items():
            self._sources[name] += layout.sources
        ours, unknown = {source for layout in self._own.values() for source in layout.sources}, []
        for name in file.tensors.keys() - ours - {*rope_tensors(file)}:
            theirs = self._mapping.get(name) or self._mapping.get(re.sub(r"(_exps)\.weight$", r"\1", name))
            if theirs is None and name == "output.weight":
                theirs = "lm_head.weight"
            if theirs in shapes and theirs not in self._own:
                self._sources[theirs].append(name)
            else:
                unknown.append(name)
        if unknown:
            raise ValueError(
                f"{file.path}: transformers has no place for {len(unknown)} of {len(file.tensors)} tensors, first "
                f"{min(unknown)!r}"
            )
        self._shapes = {name: shapes[name] for name in self._sources}
        self.notes = (_summary(file, self._dtype),)

    def outline(self, name: str) -> Tensor:
        """The tensor on "meta", without reading its numbers."""
        return torch.empty(self._shapes[name], dtype=self._dtype, device="meta")

    def release(self, read: int) -> None:
        """Nothing to release: dequantised tensors belong to the caller."""

    def mapped(self, names: tuple[str, ...]) -> None:
        """None: quantised blocks of a file cannot be viewed as numbers."""

    def taken(self, name: str) -> Tensor:
        """The tensor, which has no other user."""
        tensor, self._last = self[name], None
        return tensor

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is made, so that there is one at a time
            self._last = (name, self._tensor_of(name))
        return self._last[1]

    def _tensor_of(self, name: str) -> Tensor:
        """The dequantised tensor under its ordinary name; ValueError if it has another shape than the config says."""
        layout, tensors = self._own.get(name), dict[str, Tensor]()
        if layout is not None:
            parts = [torch.from_numpy(dequantised(self._file, source)) for source in layout.sources]
            with suppress(RuntimeError, ValueError, EinopsError, IndexError):  # of other shapes: said below
                tensors[name] = layout.made(parts, self._file.config)
        parsed = {"config": dict(self._file.parsed), "tensors": tensors}
        for source in () if layout is not None else self._sources[name]:
            result = self._processor.process(
                weights=dequantised(self._file, source),
                name=source,
                tensor_key_mapping=self._mapping,
                parsed_parameters=parsed,
            )
            if result.name is not None:
                tensors[name] = torch.from_numpy(np.require(result.weights, requirements=["C", "W"]))
        value, required = tensors.get(name), self._shapes[name]
        if value is None or [n for n in value.shape if n != 1] != [n for n in required if n != 1]:
            shapes = {
                source: self._file.tensors[source].shape.tolist()[::-1] for source in self._sources[name]
            }
            raise ValueError(
                f"{self._file.path}: {name} requires shape {shape_text(required)}, this file gives "
                f"{' and '.join(f'{source} {shape_text(shape)}' for source, shape in shapes.items())}"
            )
        # an axis of one number may be left out of a file
        return value.reshape(required).to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def dequantised(file: GgufFile, source: str) -> NDArray[np.float32]:
    """A tensor of the file in float32; ValueError with its name and type where `gguf` cannot dequantise it."""
    import gguf

    stored = file.tensors[source]
    try:
        if stored.tensor_type == gguf.GGMLQuantizationType.F64:
            return stored.data.astype(np.float32)
        # as plain arrays: the file's own class of arrays makes its many small steps twice as slow
        numbers = gguf.dequantize(np.asarray(stored.data), stored.tensor_type)
    except (NotImplementedError, ValueError, KeyError) as cause:
        raise ValueError(
            f"{file.path}: {source!r} is stored as {stored.tensor_type.name}, which gguf cannot dequantise"
        ) from cause
    # plain numbers are a view of the file, which cannot be written to
    return numbers if numbers.flags.writeable else numbers.copy()


def _summary(file: GgufFile, dtype: torch.dtype) -> str:
    """The note about a file: its architecture, and how many tensors it has of each type."""
    kinds = Counter(tensor.tensor_type.name for tensor in file.tensors.values())
    stored = ", ".join(f"{n} tensors of {kind}" for kind, n in kinds.most_common())
    blocks = "" if set(kinds) <= set(PLAIN) else f", dequantised to {str(dtype).removeprefix('torch.')}"
    return f"read from a GGUF file ({file.architecture}): {stored}{blocks}"


# --- layouts that transformers does not read ------------------------------------------------------------------------


@dataclass(frozen=True)
class Own:
    """One tensor of an ordinary checkpoint: the file's tensors (`sources`), and the function that combines them."""

    sources: tuple[str, ...]
    made: Callable[[Sequence[Tensor], PreTrainedConfig], Tensor]


def own_layout(file: GgufFile, name: str) -> Own | None:
    """The layout of a tensor that transformers would read wrongly, or not at all; None for all others."""
    for pattern, sources, make in LAYOUTS.get(file.architecture, ()):
        if match := re.fullmatch(pattern, name):
            parts = tuple(source.format(*match.groups()) for source in sources)
            missing = [part for part in parts if part not in file.tensors]
            if missing and len(missing) < len(parts):
                raise ValueError(
                    f"{file.path}: {name} is made of {' and '.join(parts)}, and the file lacks {missing[0]}"
                )
            return None if missing else Own(parts, partial(make, *match.groups()[1:]))
    return None


def _unchanged(parts: Sequence[Tensor], config: PreTrainedConfig) -> Tensor:
    return parts[0]


def _interleaved_gates(parts: Sequence[Tensor], config: PreTrainedConfig) -> Tensor:
    """GPT-OSS: gates and linears, `[x m d]` each, as one `[x d 2m]` with alternating columns; biases likewise."""
    joined = torch.stack(tuple(parts), dim=2).flatten(1, 2)
    return joined.mT if joined.ndim == 3 else joined


def _transposed_matrices(parts: Sequence[Tensor], config: PreTrainedConfig) -> Tensor:
    return parts[0].mT


def _row_of_head(head: str, parts: Sequence[Tensor], config: PreTrainedConfig) -> Tensor:
    """StableLM: the gamma of one head, a row of the tensor `[head, d_head]`."""
    return parts[0][int(head)]


def _by_group(parts: Sequence[Tensor], config: PreTrainedConfig) -> Tensor:
    """Falcon: rows of all queries, all keys, all values, reordered by group: its queries, its key, its value."""
    groups = config.num_kv_heads if config.new_decoder_architecture else 1
    queries = config.num_attention_heads // groups
    sizes = [config.num_attention_heads * config.head_dim, *[groups * config.head_dim] * 2]
    parts_and_counts = zip(parts[0].split(sizes), (queries, 1, 1), strict=True)
    joined = [rearrange(part, "(g n e) ... -> g n e ...", g=groups, n=n) for part, n in parts_and_counts]
    return torch.cat(joined, 1).flatten(0, 2)


_LAYER = r"model\.layers\.(\d+)\."
LAYOUTS: Mapping[str, tuple[tuple[str, tuple[str, ...], Callable[..., Tensor]], ...]] = {
    "gpt-oss": (
        (_LAYER + r"mlp\.experts\.gate_up_proj", ("blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight"),
         _interleaved_gates),
        (_LAYER + r"mlp\.experts\.gate_up_proj_bias", ("blk.{}.ffn_gate_exps.bias", "blk.{}.ffn_up_exps.bias"),
         _interleaved_gates),
        (_LAYER + r"mlp\.experts\.down_proj", ("blk.{}.ffn_down_exps.weight",), _transposed_matrices),
        (_LAYER + r"mlp\.experts\.down_proj_bias", ("blk.{}.ffn_down_exps.bias",), _unchanged),
        (_LAYER + r"self_attn\.sinks", ("blk.{}.attn_sinks.weight",), _unchanged),
    ),
    "stablelm": tuple(
        (_LAYER + rf"self_attn\.{part}_layernorm\.norms\.(\d+)\.weight", (f"blk.{{}}.attn_{part}_norm.weight",),
         _row_of_head)
        for part in "qk"
    ),
    "falcon": tuple(
        (rf"transformer\.h\.(\d+)\.self_attention\.query_key_value\.{kind}", (f"blk.{{}}.attn_qkv.{kind}",), _by_group)
        for kind in ("weight", "bias")
    ),
}  # fmt: skip
"""By architecture: a pattern of the ordinary name (its first group is the layer), the names of the file's tensors, and
the function that combines them.
"""


def read_by_transformers(file: GgufFile) -> bool:
    """Whether transformers itself reads the tensors of a file correctly."""
    fused = file.architecture == "falcon" and file.key("attention.head_count_kv") not in (None, 1)
    norms = file.architecture == "stablelm" and file.has("attn_q_norm.weight")
    no_groups = file.architecture == "llama" and file.key("attention.head_count_kv") is None
    longer = file.key("decoder_block_count") not in (None, file.key("block_count"))
    return not (fused or norms or no_groups or longer or file.architecture == "gpt-oss")


def _checkpoint_names(
    file: GgufFile, shapes: Mapping[str, torch.Size], processor: TensorProcessor
) -> dict[str, str]:
    """The name of each tensor in GGUF files -> its name in an ordinary checkpoint.

    The table has all tensors of the network, of which the file may have only a part.
    """
    import gguf

    arch = next((arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture), None)
    if arch is None:
        raise ValueError(f"{file.path}: the package gguf knows no architecture {file.architecture!r}")
    layers = max(file.number("block_count"), file.number("decoder_block_count", 0))
    table = gguf.get_tensor_name_map(arch, int(layers))
    checkpoint_names: dict[str, str] = {}
    preprocessed = {name: processor.preprocess_name(name) for name in shapes}
    for depth in range(max(name.count(".") for name in shapes)):
        for full, name in preprocessed.items():
            above, inner = name.split(".")[:depth], ".".join(name.split(".")[depth:])
            stem, dot, kind = inner.rpartition(".")
            stem, kind = (stem, dot + kind) if kind in ("weight", "bias") else (inner, "")
            theirs = table.get_name(stem)
            if theirs is not None:
                checkpoint_names.setdefault(theirs + kind, full)
                continue
            missed: dict[str, str] = {}
            processor.perform_fallback_tensor_mapping(
                missed, kind, "".join(f"{part}." for part in above), inner
            )
            for gguf_name, hf_name in missed.items():
                checkpoint_names.setdefault(gguf_name, hf_name)
    return checkpoint_names


def own_dtype(file: GgufFile) -> torch.dtype:
    """The dtype of the matrices if all are stored in the same one; float32 if they are quantised or differ."""
    kinds = {tensor.tensor_type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return PLAIN.get(kinds.pop(), torch.float32) if len(kinds) == 1 else torch.float32


def meta_network(config: PreTrainedConfig) -> nn.Module:
    """The transformers network of a config on the "meta" device: a decoder or an encoder-decoder."""
    import transformers

    opener = (
        transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    )
    with torch.device("meta"):
        network: nn.Module = opener.from_config(config)  # type: ignore[no-untyped-call]
    return network
