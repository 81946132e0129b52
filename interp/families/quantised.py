"""Quantised checkpoints: matrices stored in 8 or 4 bits become ordinary numbers as they are read.

MXFP4 (GPT-OSS), float8 with a scale per block, row or tensor (DeepSeek, Qwen, FBGEMM, compressed-tensors), int8 with
a scale per row, group or tensor (LLM.int8 of bitsandbytes, compressed-tensors), and the 4-bit formats of
bitsandbytes.
Only weights are meant: kernels that also quantise activations as they run compute something a little different.
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
"""The numbers of the first eight codes of a 4-bit float; the other eight are these below zero (OCP MX, table 5)."""
KEYS = ("quantization_config", "compression_config")
"""Where a config says how its weights are quantised."""
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OF_ACTIVATIONS = ("input_scale", "activation_scale", "activation_scale_inv", "k_scale", "v_scale")
"""Ends of names of scales of what kernels quantise as they run: we do not, so they are left out."""


# --- one stored matrix, in float32 --------------------------------------------------------------------------------


def from_mxfp4(
    blocks: UInt8[Tensor, "x out g byte"], scales: UInt8[Tensor, "x out g"]
) -> Float[Tensor, "x i out"]:
    """Experts' matrices of GPT-OSS, `[expert, in, out]`: two codes a byte, low half first, times 2^(scale - 127)."""
    table = torch.tensor((*FP4_E2M1, *(-value for value in FP4_E2M1)), device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return torch.ldexp(table[codes.int()], scales.int()[..., None] - 127).flatten(-2).mT


def from_scaled(
    weight: Tensor, scale: Tensor, block: tuple[int, int] | None = None
) -> Float[Tensor, "*x out i"]:
    """A matrix of float8 or int8 numbers times its scales: one in all, one along the first axis, or one per block.

    Scales of one byte are powers of two, 2^(scale - 127).

    Args:
        block: rows and columns of a block, the last ones cut off at the edge; None: as many as divide the matrix
            evenly.

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
        each = -(-size // count) if block is None else block[axis]
        fits = size % count == 0 if block is None else -(-size // each) == count
        if count not in (1, size) and not fits:
            raise ValueError(
                f"scales {shape_text(scale.shape)} do not fit a matrix {shape_text(weight.shape)}"
                + ("" if block is None else f" in blocks of {block[0]} x {block[1]}")
            )
        if count not in (1, size):
            factor = factor.repeat_interleave(each, axis).narrow(axis, 0, size)
    return weight.float() * factor


def from_llm_int8(weight: Int[Tensor, "out i"], largest: Float[Tensor, "out"]) -> Float[Tensor, "out i"]:
    """Rows of whole numbers, 127 of which are the row's largest (Dettmers et al. 2022, LLM.int8, equation 2)."""
    return weight * largest.view(-1, 1).float() * 7.874015718698502e-3  # 1/127, as bitsandbytes writes it


@dataclass(frozen=True)
class FourBit:
    """The description of one 4-bit matrix by bitsandbytes (Dettmers et al. 2023, QLoRA, section 3)."""

    shape: tuple[int, ...]
    block: int
    """Neighbours that share a scale."""
    nested: tuple[int, float] | None
    """Number of neighbours with scales that share a scale, and what is added to them; None where scales are stored as
    they are.
    """

    @classmethod
    def read(cls, state: UInt8[Tensor, "n"]) -> FourBit:
        """The record in the bytes of `quant_state.bitsandbytes__nf4` (or `fp4`), which are JSON."""
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
        """Two codes a byte, high half first, as the table says, times their block's scale.

        Args:
            nested: the table and the scales of the scales, where those are quantised too.
        """
        if self.nested is not None:
            codes, (size, offset) = nested, self.nested
            absmax = _blockwise(codes[0][absmax.int()], codes[1], size) + offset
        codes_n = torch.stack((packed >> 4, packed & 15), -1).flatten()
        size = torch.Size(self.shape).numel()
        return _blockwise(table[codes_n.int()][:size], absmax, self.block).view(self.shape)


def _blockwise(values: Float[Tensor, "n"], scales: Float[Tensor, "t"], block: int) -> Float[Tensor, "n"]:
    return values * scales.repeat_interleave(block)[: len(values)]


# --- what a checkpoint holds --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """One matrix to be made: from which stored tensors, and how."""

    parts: tuple[str, ...]
    matrix: Callable[..., Tensor]


Finder = Callable[[Tensors], tuple[dict[str, Made], set[str]]]
"""The matrices to be made, by the names under which an unquantised checkpoint has them; and names to leave out."""


@dataclass(frozen=True)
class Quantisation:
    """Storage of a checkpoint's quantised matrices."""

    words: str
    find: Finder


def method_of(values: Mapping[str, object]) -> str | None:
    """The `quant_method` of a config; None for one with ordinary weights, which those read from GGUF already are."""
    entry = _quantisation_entry(values)
    if entry is None:
        return "mlx" if _is_mlx(values) else None
    found = entry.get("quant_method") if isinstance(entry, Mapping) else entry
    method = str(getattr(found, "value", found))  # a live config has a member of an enumeration
    if method == "None" and _is_mlx(values):
        return "mlx"
    return None if method == "gguf" else method


def _is_mlx(values: Mapping[str, object]) -> bool:
    """Whether a config says, as MLX does, in how many bits and groups its weights are stored."""
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
        made = {name: Made((name + ends[0], name + ends[1]), from_mxfp4) for name in names}
        return made, {part for each in made.values() for part in each.parts}

    return Quantisation("mxfp4", find)


def _fp8(entry: Mapping[str, object]) -> Quantisation:
    block = _block(entry.get("weight_block_size"))
    if entry.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise ValueError(f"fmt e4m3 is required, got {entry['fmt']!r}")
    words = "fp8" if block is None else f"fp8 in blocks of {block[0]} x {block[1]}"
    return Quantisation(words, partial(_scaled, suffix="_scale_inv", block=block))


def _fbgemm(entry: Mapping[str, object]) -> Quantisation:
    return Quantisation("fp8 by rows (fbgemm)", partial(_scaled, suffix="_scale", block=None))


def _compressed(entry: Mapping[str, object]) -> Quantisation:
    kind = str(entry.get("format"))
    known = ("float-quantized", "int-quantized", "naive-quantized")
    if kind not in known:
        raise ValueError(f"a format among {', '.join(known)} is required, got {kind!r}")
    for key in ("transform_config", "sparsity_config"):
        if rest := {k: v for k, v in _table(entry.get(key)).items() if v and (k, v) != ("format", "dense")}:
            raise ValueError(f"no {key} is required, got {rest!r}")
    blocks, groups = set(), _table(entry.get("config_groups"))
    for group in groups.values():
        weights = _table(_table(group).get("weights"))
        blocks.add(_block(weights.get("block_structure")))
        if weights.get("num_bits", 8) != 8 or not weights.get("symmetric", True):
            raise ValueError(f"symmetric weights of 8 bits are required, got {weights!r}")
    if len(blocks) > 1:
        raise ValueError(f"one size of blocks is required, got {sorted(map(str, blocks))}")
    words = f"{'int8' if kind.startswith('int') else 'fp8'} (compressed-tensors, {kind})"
    return Quantisation(words, partial(_scaled, suffix="_scale", block=next(iter(blocks), None)))


def _scaled(stored: Tensors, suffix: str, block: tuple[int, int] | None) -> tuple[dict[str, Made], set[str]]:
    """Matrices with a tensor of scales; those of activations are left out."""
    out = {name for name in stored if name.endswith(OF_ACTIVATIONS)}
    names = [name.removesuffix(suffix) for name in stored if name.endswith(suffix) and name not in out]
    made = {name: Made((name, name + suffix), partial(from_scaled, block=block)) for name in names}
    for name in names:
        if name in stored and stored[name].dtype not in (*FLOAT8, torch.int8):
            raise ValueError(f"{name}: a tensor of float8 or int8 is required, got {stored[name].dtype}")
    return made, out | {name + suffix for name in names}


def _bitsandbytes(entry: Mapping[str, object]) -> Quantisation:
    if entry.get("load_in_4bit"):
        return Quantisation(f"{entry.get('bnb_4bit_quant_type', 'fp4')} (bitsandbytes)", _four_bit)
    if not entry.get("load_in_8bit"):
        raise ValueError("load_in_8bit or load_in_4bit is required, got neither")
    return Quantisation("int8 (bitsandbytes)", _eight_bit)


def _eight_bit(stored: Tensors) -> tuple[dict[str, Made], set[str]]:
    names = [name.removesuffix("SCB") + "weight" for name in stored if name.endswith(".SCB")]
    out = {name for name in stored if name.endswith((".SCB", ".weight_format"))}
    if other := [name for name in out if name.endswith("format") and int(stored[name]) != 0]:
        raise ValueError(f"{other[0]}: matrices stored by rows (0) are required, got {int(stored[other[0]])}")
    made = {name: Made((name, name.removesuffix("weight") + "SCB"), from_llm_int8) for name in names}
    return made, out


def _four_bit(stored: Tensors) -> tuple[dict[str, Made], set[str]]:
    made: dict[str, Made] = {}
    out: set[str] = set()
    for state in (name for name in stored if ".quant_state.bitsandbytes__" in name):
        name = state.partition(".quant_state.")[0]
        how = FourBit.read(stored[state])
        ends = ("absmax", "quant_map", *(() if how.nested is None else ("nested_quant_map", "nested_absmax")))
        scales = tuple(f"{name}.{end}" for end in ends)
        made[name] = Made((name, *scales), how.matrix)
        out |= {state, *scales}
    return made, out


METHODS: dict[str, Callable[[Mapping[str, object]], Quantisation]] = {
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
}
"""`quant_method` of a config -> what it says there."""


def _table(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _block(entry: object) -> tuple[int, int] | None:
    """Rows and columns of a block, where a config gives them."""
    if entry is None:
        return None
    sizes = entry if isinstance(entry, list | tuple) else ()
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"rows and columns of a block are required, got {entry!r}")
    return sizes[0], sizes[1]


# --- reading ------------------------------------------------------------------------------------------------------


class Dequantised(Tensors):
    """The tensors of a quantised checkpoint as an unquantised one has them: same names, ordinary numbers.

    A matrix is computed in float32 and rounded once, to `dtype`; the one asked for last is kept.

    Raises:
        ValueError: naming a tensor that lacks a part or does not fit its scales.
    """

    def __init__(self, stored: Tensors, how: Quantisation, dtype: torch.dtype) -> None:
        self._stored, self._dtype = stored, dtype
        self._made, out = how.find(stored)
        for name, made in self._made.items():
            if missing := [part for part in made.parts if part not in stored]:
                raise ValueError(f"{name} is stored as {how.words}, and the checkpoint lacks {missing[0]!r}")
        self._names = [name for name in stored if name not in out]
        self._names += [name for name in self._made if name not in stored]
        self._last: tuple[str, Tensor] | None = None
        message = (
            f"weights dequantised at load from {how.words}: {len(self._made)} of {len(self._names)} tensors"
        )
        self.notes = (*stored.notes, message)

    def outline(self, name: str) -> Tensor:
        """The tensor on "meta", without reading its numbers."""
        made = self._made.get(name)
        if made is None:
            return self._stored.outline(name)
        return self._computed(name, [self._stored.outline(part) for part in made.parts])

    def release(self, read: int) -> None:
        """Count the bytes that were read; the tensor dequantised last stays until another one is read."""
        self._stored.release(read)

    def mapped(self, names: tuple[str, ...]) -> Tensor | None:
        """The view of tensors that are stored as they are."""
        return None if any(name in self._made for name in names) else self._stored.mapped(names)

    def mapped_files(self, model: nn.Module) -> tuple[MappedFile, ...]:
        """The files of which parameters of this model are views."""
        return self._stored.mapped_files(model)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            return self._stored[name]
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is made, so that there is one at a time
            self._last = (name, self._computed(name, [self._stored[part] for part in self._made[name].parts]))
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _computed(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        try:
            return self._made[name].matrix(*parts).to(self._dtype)
        except (ValueError, RuntimeError, IndexError) as cause:
            shapes = ", ".join(shape_text(part.shape) for part in parts)
            raise ValueError(f"{name} cannot be dequantised from tensors {shapes}: {cause}") from cause


def ordinary(
    stored: Tensors, values: Mapping[str, object], family: str, dtype: torch.dtype | None
) -> Tensors:
    """A checkpoint's tensors as ordinary numbers, in `dtype`; itself where nothing is quantised.

    dtype None: what the config says, else that of the first tensor that is stored in one of ours.
    """
    how = quantisation_of(values, family)
    return stored if how is None else Dequantised(stored, how, dtype or _own_dtype(stored, values))


def _own_dtype(stored: Tensors, values: Mapping[str, object]) -> torch.dtype:
    dtype_name = str(values.get("dtype") or values.get("torch_dtype") or "").removeprefix("torch.")
    found = {str(each).removeprefix("torch."): each for each in ORDINARY}
    if dtype_name in found:
        return found[dtype_name]
    kinds = (stored.outline(name).dtype for name in stored)
    return next((kind for kind in kinds if kind in ORDINARY[:3]), torch.float32)


ORDINARY = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
