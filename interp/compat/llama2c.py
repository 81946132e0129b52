"""Karpathy's llama2.c: a `.bin` file of float32 weights, and `tokenizer.bin`, become a model.

Formats: the legacy one (seven int32, then weights, read by run.c) and version 1 of export.py (magic "ak42", a header of
256 bytes). The network is Llama's with rotation of adjacent pairs; nothing is permuted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from interp.compat.llama2c_tokenizer import Llama2cTokenizer
from interp.core.boundary import public
from interp.core.files import regular
from interp.core.kinds import Device
from interp.families.convert import to_model
from interp.families.spec import Family, Settings, TensorRule
from interp.families.stored import LiveTensors
from interp.hooked import HookedTransformer
from interp.model.config import MLP, MOST_LAYERS, ModelConfig, RMSNorm, Rotary
from interp.model.records import MOST
from interp.model.transformer import Transformer

MAGIC = 0x616B3432
"""The first four bytes of files of version 1 and later; no legacy file has a width like that."""
HEADER_1 = 256
FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")


@dataclass(frozen=True)
class Header:
    """The header before the weights, and the offset at which they begin."""

    config: ModelConfig
    legacy: bool
    begin: int
    """Bytes before the first weight."""


@public()
def load_llama2c(
    path: Path | str,
    tokenizer: Path | str | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: Device = "cpu",
) -> HookedTransformer:
    """The model of a llama2.c `.bin` file.

    Args:
        path: the file of weights.
        tokenizer: its `tokenizer.bin`; None: the model takes ids.
        dtype: dtype of the weights; None: the file's.
        device: where the weights go.

    Returns:
        `HookedTransformer`, named as the file.

    Raises:
        FileNotFoundError, ValueError: an impossible header, a file that is too short or too long, quantised weights
            (version 2), or a tokenizer of another vocabulary; the message names the file and the number.
    """
    file = Path(path)
    header = read_header(file)
    text = None if tokenizer is None else Llama2cTokenizer.read(Path(tokenizer))
    if text is not None and len(text) != header.config.d_vocab:
        raise ValueError(f"{tokenizer} has {len(text)} tokens, {file} has {header.config.d_vocab}")
    tensors = LiveTensors(dict(_tensors(file, header)))
    model = to_model(_FAMILY, header.config, tensors, dtype=dtype, devices=(torch.device(device),))
    assert isinstance(model, Transformer)
    return HookedTransformer(model, text, name=file.stem)


def read_header(file: Path) -> Header:
    """The header of a file of either format; ValueError naming the file and the number that cannot be."""
    try:
        regular(file)
    except FileNotFoundError as cause:
        raise FileNotFoundError(f"{file} is no file: the path of a llama2.c .bin is required") from cause
    with file.open("rb") as content:
        start = content.read(HEADER_1)
    legacy = start[:4] != MAGIC.to_bytes(4, "little")
    if len(start) < (28 if legacy else HEADER_1):
        raise ValueError(f"{file} has {len(start)} bytes, too few for a header of llama2.c")
    version = 0 if legacy else int.from_bytes(start[4:8], "little", signed=True)
    if version not in (0, 1):
        raise ValueError(
            f"{file} is of version {version}; supported: legacy and 1 (2 holds quantised weights)"
        )
    values = dict(zip(FIELDS, np.frombuffer(start, "<i4", 7, 0 if legacy else 8).tolist(), strict=True))
    shared = values["vocab_size"] > 0 if legacy else bool(start[36])
    if legacy:
        values["vocab_size"] = abs(values["vocab_size"])
    return Header(_config(file, values, shared), legacy, 28 if legacy else HEADER_1)


def _config(file: Path, values: Mapping[str, int], shared: bool) -> ModelConfig:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{file}: the header requires {name} >= 1, got {value}")
        if value > MOST and name != "n_layers":
            raise ValueError(f"{file}: the header requires {name} <= {MOST}, got {value}")
    if values["n_layers"] > MOST_LAYERS:
        raise ValueError(f"{file}: the header requires n_layers <= {MOST_LAYERS}, got {values['n_layers']}")
    if values["dim"] % (2 * values["n_heads"]):
        raise ValueError(
            f"{file}: the header requires {values['n_heads']} heads of even width, got dim {values['dim']}"
        )
    if values["n_heads"] % values["n_kv_heads"]:
        raise ValueError(
            f"{file}: the header requires n_kv_heads to divide n_heads, "
            f"got {values['n_kv_heads']} and {values['n_heads']}"
        )
    try:
        return ModelConfig(
            n_layers=values["n_layers"], d_model=values["dim"], n_heads=values["n_heads"],
            n_kv_heads=values["n_kv_heads"], n_ctx=values["seq_len"], d_vocab=values["vocab_size"],
            mlp=MLP(values["hidden_dim"], "silu", gated=True, bias=False), position=Rotary(interleaved=True),
            norm=RMSNorm(1e-5), qkv_bias=False, out_bias=False, tied=shared,
        )  # fmt: skip
    except ValueError as cause:
        raise ValueError(f"{file}: {cause}") from cause


def _order(header: Header) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Name, shape and whether it is per layer, of every array in the order of the file; `skip` is no weight."""
    c = header.config
    assert c.mlp is not None
    d, q, kv, m = c.d_model, c.n_heads * c.head_width, c.kv_heads * c.head_width, c.mlp.d_mlp
    embed = ("embed", (c.d_vocab, d), False)
    attention = [("wq", (q, d), True), ("wk", (kv, d), True), ("wv", (kv, d), True), ("wo", (d, q), True)]
    forward = [("w1", (m, d), True), ("w2", (d, m), True), ("w3", (m, d), True)]
    norm1, norm2, final = ("norm1", (d,), True), ("norm2", (d,), True), ("final", (d,), False)
    if header.legacy:  # the tables of cosines and sines are of no use: the angles follow from the header
        yield from (embed, norm1, *attention, norm2, *forward, final)
        yield "skip", (2 * c.n_ctx * (c.head_width // 2),), False
    else:
        yield from (norm1, norm2, final, embed, *attention, *forward)
    if not c.tied:
        yield "unembed", (c.d_vocab, d), False


def _tensors(file: Path, header: Header) -> Iterator[tuple[str, Tensor]]:
    """Views of the mapped file, by name; the pages of a private map are read when their numbers are copied."""
    order = list(_order(header))
    layers = header.config.n_layers
    needed = header.begin + 4 * sum(
        int(np.prod(s, dtype=object)) * (layers if each else 1) for _, s, each in order
    )
    if file.stat().st_size != needed:
        raise ValueError(f"{file} has {file.stat().st_size} bytes, its header asks for {needed}")
    numbers = np.memmap(file, "<f4", mode="c", offset=header.begin)
    start = 0
    for name, shape, each in order:
        for layer in range(layers if each else 1):
            size = int(np.prod(shape))
            if name != "skip":
                part = torch.from_numpy(numbers[start : start + size])
                yield f"{name}.{layer}" if each else name, part.view(shape)
            start += size


def _rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    at = "blocks.{l}."
    rules = (
        TensorRule("embed.weight", ("embed",)),
        TensorRule(f"{at}ln1.weight", ("norm1.{l}",)),
        TensorRule(f"{at}attn.qkv.weight", ("wq.{l}", "wk.{l}", "wv.{l}")),
        TensorRule(f"{at}attn.out.weight", ("wo.{l}",)),
        TensorRule(f"{at}ln2.weight", ("norm2.{l}",)),
        TensorRule(f"{at}mlp.into.weight", ("w1.{l}", "w3.{l}")),
        TensorRule(f"{at}mlp.out.weight", ("w2.{l}",)),
        TensorRule("ln_final.weight", ("final",)),
    )
    return rules if config.tied else (*rules, TensorRule("unembed.weight", ("unembed",)))


def _no_config(settings: Settings) -> ModelConfig:
    raise AssertionError("the config of a llama2.c file is its header")


_FAMILY = Family(name="llama2.c", model_types=(), config=_no_config, rules=_rules, prefix="")
