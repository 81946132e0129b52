"""Quantised checkpoints: matrices stored in 8 or 4 bits are dequantised as they are read.

MXFP4 (GPT-OSS), float8 with a scale per block, row or tensor (DeepSeek, Qwen, FBGEMM, compressed-tensors), int8 with
a scale per row, group or tensor (LLM.int8 of bitsandbytes, compressed-tensors), and the 4-bit formats of
bitsandbytes.
Only weights are quantised here; kernels that also quantise activations give slightly different outputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from interp.core.axes import shape_text
from interp.core.wording import nearest
from interp.families.stored import Tensors
from interp.model.mapped import MappedFile

FP4_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the first eight codes of a 4-bit float; the other eight are their negatives (OCP MX, table 5)."""
KEYS = ("quantization_config", "compression_config")
"""Config keys that describe how the weights are quantised."""
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OF_ACTIVATIONS = ("input_scale", "activation_scale", "activation_scale_inv", "k_scale", "v_scale")
"""Endings of the names of activation scales, which are left out, since activations are not quantised here."""


# --- one stored matrix, in float32 --------------------------------------------------------------------------------


def from_mxfp4(
    blocks: UInt8[Tensor, "x out g byte"], scales: UInt8[Tensor, "x out g"]
) -> Float[Tensor, "x i out"]:
    """Experts' matrices of GPT-OSS, `[expert, in, out]`: two codes per byte, low half first, times 2^(scale - 127)."""
    table = torch.tensor((*FP4_E2M1, *(-value for value in FP4_E2M1)), device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return torch.ldexp(table[codes.int()], scales.int()[..., None] - 127).flatten(-2).mT


def from_scaled(
    weight: Tensor, scale: Tensor, block: tuple[int, int] | None = None
) -> Float[Tensor, "*x out i"]:
    """A matrix of float8 or int8 numbers times its scales: one scale for all, one per row, or one per block.

    Scales of one byte are powers of two, 2^(scale - 127).

    Args:
        block: rows and columns of a block, which may be cut off at the edge; None: the size follows from the number
            of scales, which must divide the matrix evenly.

    Raises:
        ValueError: scales that do not fit.
    """
    factor = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()
    if factor.numel() == 1:
        return weight.float() * factor.view(())
    if factor.ndim == 1:
        factor = factor.view(-1, *[1] * (weight.ndim - 1))
    for axis in (-2, -1):
        size, count = weight.shape[axis], factor.shape[axis]
        block_size = -(-size // count) if block is None else block[axis]
        fits = size % count == 0 if block is None else -(-size // block_size) == count
        if count not in (1, size) and not fits:
            raise ValueError(
                f"scales {shape_text(scale.shape)} do not fit a matrix {shape_text(weight.shape)}"
                + ("" if block is None else f" in blocks of {block[0]} x {block[1]}")
            )
        if count not in (1, size):
            factor = factor.repeat_interleave(block_size, axis).narrow(axis, 0, size)
    return weight.float() * factor


def from_llm_int8(weight: Int[Tensor, "out i"], largest: Float[Tensor, "out"]) -> Float[Tensor, "out i"]:
    """The matrix weight * largest / 127, with one `largest` per row (Dettmers et al. 2022, LLM.int8, equation 2)."""
    return weight * largest.view(-1, 1).float() * 7.874015718698502e-3  # 1/127, as bitsandbytes writes it


@dataclass(frozen=True)
class FourBit:
    """How bitsandbytes stored one 4-bit matrix (Dettmers et al. 2023, QLoRA, section 3)."""

    shape: tuple[int, ...]
    block: int
    """Number of consecutive entries that share a scale."""
    nested: tuple[int, float] | None
    """Number of consecutive scales that share a scale of their own, and the offset added to them; None where the scales
    are not quantised.
    """

    @classmethod
    def read(cls, state: UInt8[Tensor, "n"]) -> FourBit:
        """The record stored as JSON bytes in the tensor `quant_state.bitsandbytes__nf4` (or `fp4`)."""
        state_record = json.loads(bytes(state.tolist()))
        nested = "nested_blocksize" in state_record
        return cls(
            tuple(state_record["shape"]),
            state_record["blocksize"],
            (state_record["nested_blocksize"], state_record["nested_offset"]) if nested else None,
        )

    def matrix(
        self, packed: UInt8[Tensor, "n 1"], absmax: Tensor, table: Float[Tensor, "16"], *nested: Tensor
    ) -> Float[Tensor, "out i"]:
        """The matrix: two codes per byte, high half first, looked up in `table`, times the scale of their block.

        Args:
            nested: table and scales of the quantised scales `absmax`; empty where those are not quantised.
        """
        if self.nested is not None:
            codes, (size, offset) = nested, self.nested
            absmax = _times_block_scales(codes[0][absmax.int()], codes[1], size) + offset
        codes_n = torch.stack((packed >> 4, packed & 15), -1).flatten()
        size = torch.Size(self.shape).numel()
        return _times_block_scales(table[codes_n.int()][:size], absmax, self.block).view(self.shape)


def _times_block_scales(
    values: Float[Tensor, "n"], scales: Float[Tensor, "t"], block: int
) -> Float[Tensor, "n"]:
    """The values, each multiplied by the scale of its block of `block` consecutive entries."""
    return values * scales.repeat_interleave(block)[: len(values)]


# --- what a checkpoint holds --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """How one matrix is dequantised: the names of its stored tensors, and the function of them."""

    parts: tuple[str, ...]
    matrix: Callable[..., Tensor]


Finder = Callable[[Tensors], tuple[dict[str, Made], set[str]]]
"""Function of stored tensors: name in an unquantised checkpoint -> its matrix, and names of tensors to leave out."""


@dataclass(frozen=True)
class Quantisation:
    """The quantisation of a checkpoint: its name in words, and the function that finds its matrices."""

    words: str
    find: Finder


def method_of(values: Mapping[str, object]) -> str | None:
    """The `quant_method` of a config; None for weights that are not quantised, or were dequantised from GGUF."""
    entry = _quantisation_entry(values)
    if entry is None:
        return "mlx" if _is_mlx(values) else None
    stated = entry.get("quant_method") if isinstance(entry, Mapping) else entry
    method = str(getattr(stated, "value", stated))  # a live config has a member of an enumeration
    if method == "None" and _is_mlx(values):
        return "mlx"
    return None if method == "gguf" else method


def _is_mlx(values: Mapping[str, object]) -> bool:
    """Whether a config has MLX's quantisation table (`bits` and `group_size`)."""
    entry = values.get("quantization")
    return isinstance(entry, Mapping) and {"bits", "group_size"} <= set(entry)


def _quantisation_entry(values: Mapping[str, object]) -> object:
    return next((values[key] for key in KEYS if values.get(key)), None)


def quantisation_of(values: Mapping[str, object], family: str) -> Quantisation | None:
    """The quantisation in a config; None for ordinary weights. ValueError naming a format that is not read."""
    entry, method = _quantisation_entry(values), method_of(values)
    if method is None:
        return None
    if not isinstance(entry, Mapping) and method != "mlx":
        raise ValueError(f"{family}: config requires an object for quantization_config, got {entry!r}")
    if method not in METHODS:
        raise ValueError(
            f"{family}: config asks for quantization_config ({method}), which cannot be read; read are "
            f"{', '.join(METHODS)} ({nearest(method, METHODS)}); load the original checkpoint, or one that was "
            "dequantised and saved again"
        )
    assert isinstance(entry, Mapping)  # MLX is none of the methods
    try:
        return METHODS[method](entry)
    except ValueError as cause:
        raise ValueError(f"{family}: quantization_config ({method}): {cause}") from cause


def _mxfp4(entry: Mapping[str, object]) -> Quantisation:
    def find(stored: Tensors) -> tuple[dict[str, Made], set[str]]:
        ends = ("_blocks", "_scales")
        names = [name.removesuffix(ends[0]) for name in stored if name.endswith(ends[0])]
        matrices = {name: Made((name + ends[0], name + ends[1]), from_mxfp4) for name in names}
        return matrices, {part for matrix in matrices.values() for part in matrix.parts}

    return Quantisation("mxfp4", find)


def _fp8(entry: Mapping[str, object]) -> Quantisation:
    block = _block_size(entry.get("weight_block_size"))
    if entry.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise ValueError(f"fmt e4m3 is required, got {entry['fmt']!r}")
    words = "fp8" if block is None else f"fp8 in blocks of {block[0]} x {block[1]}"
    return Quantisation(words, partial(_find_scaled, suffix="_scale_inv", block=block))


def _fbgemm(entry: Mapping[str, object]) -> Quantisation:
    return Quantisation("fp8 by rows (fbgemm)", partial(_find_scaled, suffix="_scale", block=None))


def _compressed(entry: Mapping[str, object]) -> Quantisation:
    kind = str(entry.get("format"))
    known = ("float-quantized", "int-quantized", "naive-quantized")
    if kind not in known:
        raise ValueError(f"a format among {', '.join(known)} is required, got {kind!r}")
    for key in ("transform_config", "sparsity_config"):
        if unread := {k: v for k, v in _table(entry.get(key)).items() if v and (k, v) != ("format", "dense")}:
            raise ValueError(f"no {key} is required, got {unread!r}")
    blocks, groups = set(), _table(entry.get("config_groups"))
    for group in groups.values():
        weights = _table(_table(group).get("weights"))
        blocks.add(_block_size(weights.get("block_structure")))
        if weights.get("num_bits", 8) != 8 or not weights.get("symmetric", True):
            raise ValueError(f"symmetric weights of 8 bits are required, got {weights!r}")
    if len(blocks) > 1:
        raise ValueError(f"one size of blocks is required, got {sorted(map(str, blocks))}")
    words = f"{'int8' if kind.startswith('int') else 'fp8'} (compressed-tensors, {kind})"
    return Quantisation(words, partial(_find_scaled, suffix="_scale", block=next(iter(blocks), None)))


def _find_scaled(
    stored: Tensors, suffix: str, block: tuple[int, int] | None
) -> tuple[dict[str, Made], set[str]]:
    """The matrices that have a tensor of scales, and the names to leave out (scales, also those of activations)."""
    skipped = {name for name in stored if name.endswith(OF_ACTIVATIONS)}
    names = [name.removesuffix(suffix) for name in stored if name.endswith(suffix) and name not in skipped]
    matrices = {name: Made((name, name + suffix), partial(from_scaled, block=block)) for name in names}
    for name in names:
        if name in stored and stored[name].dtype not in (*FLOAT8, torch.int8):
            raise ValueError(f"{name}: a tensor of float8 or int8 is required, got {stored[name].dtype}")
    return matrices, skipped | {name + suffix for name in names}


def _bitsandbytes(entry: Mapping[str, object]) -> Quantisation:
    if entry.get("load_in_4bit"):
        return Quantisation(f"{entry.get('bnb_4bit_quant_type', 'fp4')} (bitsandbytes)", _find_four_bit)
    if not entry.get("load_in_8bit"):
        raise ValueError("load_in_8bit or load_in_4bit is required, got neither")
    return Quantisation("int8 (bitsandbytes)", _find_eight_bit)


def _find_eight_bit(stored: Tensors) -> tuple[dict[str, Made], set[str]]:
    names = [name.removesuffix("SCB") + "weight" for name in stored if name.endswith(".SCB")]
    skipped = {name for name in stored if name.endswith((".SCB", ".weight_format"))}
    if other_formats := [name for name in skipped if name.endswith("format") and int(stored[name]) != 0]:
        raise ValueError(
            f"{other_formats[0]}: matrices stored by rows (0) are required, got {int(stored[other_formats[0]])}"
        )
    matrices = {name: Made((name, name.removesuffix("weight") + "SCB"), from_llm_int8) for name in names}
    return matrices, skipped


def _find_four_bit(stored: Tensors) -> tuple[dict[str, Made], set[str]]:
    matrices: dict[str, Made] = {}
    skipped: set[str] = set()
    for state in (name for name in stored if ".quant_state.bitsandbytes__" in name):
        name = state.partition(".quant_state.")[0]
        how = FourBit.read(stored[state])
        ends = ("absmax", "quant_map", *(() if how.nested is None else ("nested_quant_map", "nested_absmax")))
        scales = tuple(f"{name}.{end}" for end in ends)
        matrices[name] = Made((name, *scales), how.matrix)
        skipped |= {state, *scales}
    return matrices, skipped


METHODS: dict[str, Callable[[Mapping[str, object]], Quantisation]] = {
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
}
"""`quant_method` of a config -> the function that reads its table."""


def _table(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _block_size(entry: object) -> tuple[int, int] | None:
    """Rows and columns of a block, where a config gives them."""
    if entry is None:
        return None
    sizes = entry if isinstance(entry, list | tuple) else ()
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"rows and columns of a block are required, got {entry!r}")
    return sizes[0], sizes[1]


# --- reading ------------------------------------------------------------------------------------------------------


class Dequantised(Tensors):
    """The tensors of a quantised checkpoint, dequantised, under the names of an unquantised checkpoint.

    A matrix is computed in float32 and rounded once, to `dtype`; the last one read is kept in memory.

    Raises:
        ValueError: naming a tensor that lacks a part or does not fit its scales.
    """

    def __init__(self, stored: Tensors, how: Quantisation, dtype: torch.dtype) -> None:
        self._stored, self._dtype = stored, dtype
        self._made, skipped = how.find(stored)
        for name, recipe in self._made.items():
            if missing := [part for part in recipe.parts if part not in stored]:
                raise ValueError(f"{name} is stored as {how.words}, and the checkpoint lacks {missing[0]!r}")
        self._names = [name for name in stored if name not in skipped]
        self._names += [name for name in self._made if name not in stored]
        self._last: tuple[str, Tensor] | None = None
        message = (
            f"weights dequantised at load from {how.words}: {len(self._made)} of {len(self._names)} tensors"
        )
        self.notes = (*stored.notes, message)

    def outline(self, name: str) -> Tensor:
        """The tensor on "meta", without reading its numbers."""
        recipe = self._made.get(name)
        if recipe is None:
            return self._stored.outline(name)
        return self._dequantised(name, [self._stored.outline(part) for part in recipe.parts])

    def release(self, read: int) -> None:
        """Count the bytes that were read; the tensor dequantised last stays until another one is read."""
        self._stored.release(read)

    def mapped(self, names: tuple[str, ...]) -> Tensor | None:
        """The mapped view of tensors that are not quantised; None if one of them is."""
        return None if any(name in self._made for name in names) else self._stored.mapped(names)

    def mapped_files(self, model: nn.Module) -> tuple[MappedFile, ...]:
        """The files of which parameters of this model are views."""
        return self._stored.mapped_files(model)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            return self._stored[name]
        if self._last is None or self._last[0] != name:
            self._last = None  # freed before the next is computed, so that one is in memory at a time
            self._last = (
                name,
                self._dequantised(name, [self._stored[part] for part in self._made[name].parts]),
            )
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _dequantised(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        try:
            return self._made[name].matrix(*parts).to(self._dtype)
        except (ValueError, RuntimeError, IndexError) as cause:
            shapes = ", ".join(shape_text(part.shape) for part in parts)
            raise ValueError(f"{name} cannot be dequantised from tensors {shapes}: {cause}") from cause


def ordinary(
    stored: Tensors, values: Mapping[str, object], family: str, dtype: torch.dtype | None
) -> Tensors:
    """A checkpoint's tensors, dequantised to `dtype`; `stored` itself where nothing is quantised.

    dtype None: the config's dtype, else that of the first tensor that is stored in a floating-point dtype.
    """
    how = quantisation_of(values, family)
    return stored if how is None else Dequantised(stored, how, dtype or _own_dtype(stored, values))


def _own_dtype(stored: Tensors, values: Mapping[str, object]) -> torch.dtype:
    dtype_name = str(values.get("dtype") or values.get("torch_dtype") or "").removeprefix("torch.")
    by_name = {str(dtype).removeprefix("torch."): dtype for dtype in ORDINARY}
    if dtype_name in by_name:
        return by_name[dtype_name]
    kinds = (stored.outline(name).dtype for name in stored)
    return next((kind for kind in kinds if kind in ORDINARY[:3]), torch.float32)


ORDINARY = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
