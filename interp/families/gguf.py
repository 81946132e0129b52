"""GGUF files, the format of llama.cpp: the config and the tensors that an ordinary checkpoint of the same model has.

transformers says which key of the file is which key of a config, and which tensor which; the package `gguf` turns
blocks of 4-bit numbers into ordinary ones. We read one tensor at a time, and account for what transformers passes
over without a
word: a tensor that it has no name for, and a key of the file that would change a number, are refused by name.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from interp.core.boundary import shape_text, shown
from interp.core.files import regular
from interp.families.stored import Tensors
from interp.model.config import AnyConfig, ModelConfig, Rotary

if TYPE_CHECKING:
    import gguf
    from transformers import PreTrainedConfig
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor

SUFFIX = ".gguf"
PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of tensors that hold ordinary numbers."""
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that holds what each rotary frequency is divided by (Llama 3.1)."""
INERT = (
    "context_length", "vocab_size", "tensor_data_layout", "pooling_type", "attention.causal", "rope.scaling.finetuned",
    "rope.scaling.attn_factor", "expert_group_count", "expert_group_used_count", "expert_weights_norm",
    "interleave_moe_layer_step", "nextn_predict_layers", "decoder_start_token_id", "token_shift_count",
)  # fmt: skip
"""Keys that name no size of a tensor and that no decoder read here computes with."""


@dataclass(frozen=True)
class File:
    """An open GGUF file: its own keys, its tensors, and transformers' config of it."""

    path: Path
    fields: Mapping[str, object]
    tensors: Mapping[str, gguf.ReaderTensor]
    config: PreTrainedConfig
    parsed: Mapping[str, object]
    """The config's keys as transformers read them from the file, before it adds defaults."""

    @property
    def architecture(self) -> str:
        """What llama.cpp calls this kind of model."""
        return str(self.fields["general.architecture"])

    def key(self, name: str) -> object:
        """A key of the architecture, such as "rope.freq_base"; None if the file lacks it."""
        return self.fields.get(f"{self.architecture}.{name}")


def read(path: Path) -> File:
    """The file, nothing of its tensors read yet.

    Raises:
        ValueError: the package `gguf` is missing, the file is damaged, transformers does not read its architecture,
        or the
            file asks for something that transformers passes over.
    """
    try:
        import gguf
    except ImportError as cause:
        raise ValueError(
            f"{path}: a GGUF file requires the package gguf: pip install 'interp[gguf]'"
        ) from cause
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    regular(path)
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: _contents(name, field) for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except Exception as cause:  # of many kinds: the file may be damaged anywhere
        raise ValueError(f"{path} is not a readable GGUF file (truncated?): {cause}") from cause
    if "split.count" in fields and fields["split.count"] not in (0, 1):
        raise ValueError(
            f"{path} is one of {fields['split.count']} parts; merge them first: llama-gguf-split --merge"
        )
    try:
        parsed = dict(load_gguf_checkpoint(str(path), return_tensors=False)["config"])
        values = {**parsed, **_rope(path, fields, tensors, parsed)}
        kind = str(values.pop("model_type"))
        values.pop("_model_name_or_path", None)  # the model's name in words
        config = transformers.AutoConfig.for_model(kind, **values)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as cause:
        said = fields.get("general.architecture")
        raise ValueError(
            f"{path}: transformers reads no config of architecture {said!r} from it: {cause}"
        ) from cause
    found = File(path, fields, tensors, config, parsed)
    _account(found)
    return found


def _contents(name: str, field: gguf.ReaderField) -> object:
    """The value of a key; long lists, which are the tokenizer's, are left where they are."""
    return None if name.startswith("tokenizer.") else field.contents()


def _rope(
    path: Path,
    fields: Mapping[str, object],
    tensors: Mapping[str, gguf.ReaderTensor],
    parsed: Mapping[str, object],
) -> dict[str, object]:
    """The config's keys of rotary scaling, which transformers leaves out: linear, or a factor for each frequency."""
    import gguf

    said = {
        key.partition(".rope.scaling.")[2]: value for key, value in fields.items() if ".rope.scaling." in key
    }
    kind = said.get("type", "none")
    theta = {"rope_theta": parsed["rope_theta"]} if "rope_theta" in parsed else {}
    if ROPE_FACTORS in tensors:
        stored = tensors[ROPE_FACTORS]
        factors = gguf.dequantize(stored.data, stored.tensor_type).tolist()
        if all(factor == 1 for factor in factors):
            return {}
        table = {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
        }
        original = {"original_max_position_embeddings": parsed["max_position_embeddings"]}
        return {"rope_parameters": {**table, **original, **theta}}
    if kind == "linear":
        return {"rope_parameters": {"rope_type": "linear", "factor": float(said["factor"]), **theta}}  # type: ignore[arg-type]
    if kind != "none" and "gpt-oss" not in str(
        fields.get("general.architecture")
    ):  # which transformers does read
        raise ValueError(f"rope.scaling.type {kind!r} is not read from GGUF; read are none and linear")
    return {}


def _account(file: File) -> None:
    """ValueError naming a key of the architecture that neither transformers nor we read."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    tables: Mapping[str, Mapping[str, str | None]] = GGUF_CONFIG_MAPPING  # type: ignore[assignment]
    kinds = (file.architecture, file.config.model_type.removesuffix("_text"))
    known = {key: theirs for kind in kinds for key, theirs in tables.get(kind, {}).items()}
    prefix = f"{file.architecture}."
    for name in (key.removeprefix(prefix) for key in file.fields if key.startswith(prefix)):
        read_by_them = known.get(name) is not None
        if not (read_by_them or name in CHECKED or name in INERT or name.startswith("rope.scaling.")):
            raise ValueError(f"{file.path}: key {prefix}{name} = {shown(file.key(name))} is not understood")


# --- what the file says, held against our config ------------------------------------------------------------------


def _rotated(config: ModelConfig) -> float | None:
    if not isinstance(config.position, Rotary):
        return None
    return config.head_width if config.position.dim is None else config.position.dim


def _base(config: ModelConfig) -> float | None:
    return config.position.base if isinstance(config.position, Rotary) else None


CHECKED: Mapping[str, Callable[[ModelConfig], float | None]] = {
    "attention.key_length": lambda c: c.head_width,
    "attention.value_length": lambda c: c.head_width,
    "attention.head_count": lambda c: c.n_heads,
    "rope.dimension_count": _rotated,
    "rope.freq_base": _base,
    "attention.sliding_window": lambda c: c.window,
    "attn_logit_softcapping": lambda c: c.attn_softcap,
    "final_logit_softcapping": lambda c: c.logit_softcap,
    "embedding_length": lambda c: c.d_model,
    "block_count": lambda c: c.n_layers,
    "use_parallel_residual": lambda c: c.parallel,
    "logit_scale": lambda c: c.logit_scale,
    "attention.layer_norm_rms_epsilon": lambda c: getattr(c.norm, "eps", None),
    "attention.layer_norm_epsilon": lambda c: getattr(c.norm, "eps", None),
}
"""Keys of the file that say a number of our config, which transformers reads, computes, or leaves at a default."""


def agrees(file: File, config: AnyConfig) -> None:
    """ValueError naming a key of the file that says another number than the config that was made of it."""
    if not isinstance(config, ModelConfig):
        return
    for name, ours in CHECKED.items():
        said, here = file.key(name), ours(config)
        if isinstance(said, list | tuple):
            continue  # a number for each layer: hybrids
        if isinstance(said, bool | int | float) and (
            here is None or abs(float(said) - float(here)) > 1e-6 * abs(said)
        ):
            if name == "attention.sliding_window" and ((here is None and said >= config.n_ctx) or said == 0):
                continue  # a window as long as the context is none
            raise ValueError(
                f"{file.path}: {file.architecture}.{name} is {said!r}, and the config that transformers reads from "
                f"this file makes it {here!r}"
            )


# --- tensors ------------------------------------------------------------------------------------------------------


class GgufTensors(Tensors):
    """The tensors of a GGUF file under the names of an ordinary checkpoint, dequantised as they are read.

    A matrix is computed in float32 and rounded once, to `dtype`. Errors: ValueError for tensors that transformers
    has no name for, for a type of blocks that `gguf` cannot dequantise, and for a shape that the config does not
    have.
    """

    def __init__(self, file: File, dtype: torch.dtype | None) -> None:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        self._file, self._dtype = file, dtype or own_dtype(file)
        network = meta_network(file.config)
        shapes = {name: value.shape for name, value in network.state_dict().items()}
        self._processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(  # type: ignore[no-untyped-call]
            config=dict(file.parsed)
        )
        self._mapping = _names(file, shapes, self._processor)
        self._last: tuple[str, Tensor] | None = None
        self._sources: dict[str, list[str]] = defaultdict(list)
        unknown = []
        for name in file.tensors:
            theirs = self._mapping.get(name) or self._mapping.get(re.sub(r"(_exps)\.weight$", r"\1", name))
            if theirs is None and name == "output.weight":
                theirs = "lm_head.weight"
            if theirs in shapes:
                self._sources[theirs].append(name)
            elif name != ROPE_FACTORS:
                unknown.append(name)
        if unknown:
            raise ValueError(
                f"{file.path}: transformers has no place for {len(unknown)} of {len(file.tensors)} tensors, first "
                f"{unknown[0]!r}"
            )
        self._shapes = {name: shapes[name] for name in self._sources}
        kinds = Counter(tensor.tensor_type.name for tensor in file.tensors.values())
        self.notes = (
            f"read from a GGUF file ({file.architecture}): "
            + ", ".join(f"{n} tensors of {kind}" for kind, n in kinds.most_common())
            + (
                ""
                if set(kinds) <= set(PLAIN)
                else f", dequantised to {str(self._dtype).removeprefix('torch.')}"
            ),
        )

    def outline(self, name: str) -> Tensor:
        """The tensor on "meta", without reading its numbers."""
        return torch.empty(self._shapes[name], dtype=self._dtype, device="meta")

    def release(self, read: int) -> None:
        """Nothing to let go of: what was dequantised belongs to whoever asked."""

    def mapped(self, names: tuple[str, ...]) -> None:
        """None: blocks of a file are no view of numbers."""

    def taken(self, name: str) -> Tensor:
        """The tensor, which nobody else has."""
        found, self._last = self[name], None
        return found

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is made, so that there is one at a time
            self._last = (name, self._made(name))
        return self._last[1]

    def _made(self, name: str) -> Tensor:
        import gguf

        made: dict[str, Tensor] = {}
        parsed = {"config": dict(self._file.parsed), "tensors": made}
        for source in self._sources[name]:
            stored = self._file.tensors[source]
            try:
                numbers = gguf.dequantize(stored.data, stored.tensor_type)
            except (NotImplementedError, ValueError, KeyError) as cause:
                raise ValueError(
                    f"{self._file.path}: {source!r} is stored as {stored.tensor_type.name}, which gguf cannot "
                    "dequantise"
                ) from cause
            result = self._processor.process(
                weights=numbers, name=source, tensor_key_mapping=self._mapping, parsed_parameters=parsed
            )
            if result.name is not None:
                made[name] = torch.from_numpy(np.require(result.weights, requirements=["C", "W"]))
        value = made.get(name)
        if value is None or value.shape != self._shapes[name]:
            raise ValueError(
                f"{self._file.path}: {name} requires shape {shape_text(self._shapes[name])}, "
                f"{' + '.join(self._sources[name])} gives "
                f"{'nothing' if value is None else shape_text(value.shape)}"
            )
        if value.data_ptr() and not value.is_floating_point():
            raise ValueError(f"{self._file.path}: {name} holds {value.dtype}, floating point is required")
        return value.to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _names(file: File, shapes: Mapping[str, torch.Size], processor: TensorProcessor) -> dict[str, str]:
    """The file's name of each tensor -> an ordinary checkpoint's, which may have the name of a part of the network
    only.
    """
    import gguf

    arch = next((arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture), None)
    if arch is None:
        raise ValueError(f"{file.path}: the package gguf knows no architecture {file.architecture!r}")
    layers = file.key("block_count")
    table = gguf.get_tensor_name_map(arch, layers if isinstance(layers, int) else 0)
    found: dict[str, str] = {}
    whole = {name: processor.preprocess_name(name) for name in shapes}
    for depth in range(max(name.count(".") for name in shapes)):
        for full, name in whole.items():
            above, inner = name.split(".")[:depth], ".".join(name.split(".")[depth:])
            stem, dot, kind = inner.rpartition(".")
            stem, kind = (stem, dot + kind) if kind in ("weight", "bias") else (inner, "")
            theirs = table.get_name(stem)
            if theirs is not None:
                found.setdefault(theirs + kind, full)
                continue
            missed: dict[str, str] = {}
            processor.perform_fallback_tensor_mapping(
                missed, kind, "".join(f"{part}." for part in above), inner
            )
            for gguf_name, hf_name in missed.items():
                found.setdefault(gguf_name, hf_name)
    return found


def own_dtype(file: File) -> torch.dtype:
    """The dtype that the matrices are stored in, where all have one; float32 for blocks of fewer bits."""
    kinds = {tensor.tensor_type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return PLAIN.get(kinds.pop(), torch.float32) if len(kinds) == 1 else torch.float32


def meta_network(config: PreTrainedConfig) -> nn.Module:
    """transformers' network of a config, without numbers; an encoder-decoder where it is one."""
    import transformers

    opener = (
        transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    )
    with torch.device("meta"):
        network: nn.Module = opener.from_config(config)  # type: ignore[no-untyped-call]
    return network
