"""Loading: a folder, a file or a live Hugging Face model becomes a `Transformer`, every tensor accounted for.

Nothing here executes code from a checkpoint: configs are JSON, weights are safetensors, or pickles read by torch's
weights-only unpickler; remote code is never asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from interp.core.boundary import Device, nearest, public
from interp.core.files import json_object, made_folder, write_atomically
from interp.families import (
    bamba,
    bart,
    bert,
    bloom,
    codegen,
    cohere,
    cohere2,
    deepseek,
    distilbert,
    falcon,
    gemma,
    gemma2,
    gemma3,
    gemma3_text,
    glm,
    glm4_moe,
    gpt2,
    gpt_bigcode,
    gpt_neo,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granitemoe,
    granitemoehybrid,
    lfm2,
    llama,
    llama4_text,
    mamba2,
    marian,
    mistral,
    mixtral,
    mpt,
    native,
    olmo,
    olmo2,
    olmo3,
    opt,
    phi,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    roberta,
    smollm3,
    stablelm,
    t5,
)
from interp.families.convert import AnyModel, to_model
from interp.families.fill import check_dtype
from interp.families.hub import download as download
from interp.families.other import can_wrap, vocabulary, wrapped_folder, wrapped_model
from interp.families.quantised import KEYS, ordinary, quantisation_of
from interp.families.spec import AnyFamily, Settings, UnsupportedError
from interp.families.stored import LiveTensors, StoredTensors, listing, weight_files
from interp.families.tokenizer import FileTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, check_fit
from interp.model.config import AnyConfig, EncoderDecoderConfig
from interp.model.transformer import Transformer

FAMILIES: tuple[AnyFamily, ...] = (
    gpt2.FAMILY,
    llama.FAMILY,
    gpt_neo.FAMILY,
    gptj.FAMILY,
    gpt_neox.FAMILY,
    opt.FAMILY,
    bloom.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma.FAMILY,
    gemma2.FAMILY,
    gemma3_text.FAMILY,
    gemma3.FAMILY,
    glm.FAMILY,
    phi.FAMILY,
    phi3.FAMILY,
    olmo.FAMILY,
    olmo2.FAMILY,
    olmo3.FAMILY,
    granite.FAMILY,
    smollm3.FAMILY,
    cohere.FAMILY,
    cohere2.FAMILY,
    stablelm.FAMILY,
    falcon.FAMILY,
    mpt.FAMILY,
    gpt_bigcode.FAMILY,
    codegen.FAMILY,
    mixtral.FAMILY,
    qwen3_moe.FAMILY,
    qwen3_next.FAMILY,
    qwen3_5.FAMILY,
    lfm2.FAMILY,
    mamba2.FAMILY,
    granitemoehybrid.FAMILY,
    bamba.FAMILY,
    gpt_oss.FAMILY,
    granitemoe.FAMILY,
    deepseek.FAMILY,
    glm4_moe.FAMILY,
    llama4_text.FAMILY,
    bert.FAMILY,
    roberta.FAMILY,
    distilbert.FAMILY,
    t5.FAMILY,
    bart.FAMILY,
    marian.FAMILY,
    native.FAMILY,
)
Devices = Sequence[Device]
TokenizerAdapter = FileTokenizer | HuggingFaceTokenizer | SentencePieceTokenizer


def family_of(values: Mapping[str, object]) -> AnyFamily:
    """The family of a config by its `model_type`; ValueError naming the supported ones."""
    kind = str(values.get("model_type"))
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    known = [t for family in FAMILIES for t in family.model_types]
    raise ValueError(
        f"model_type {kind!r} is not supported; supported: {', '.join(known)} ({nearest(kind, known)})"
    )


@dataclass(frozen=True)
class Reading:
    """A checkpoint's config as this package understands it."""

    family: AnyFamily
    config: AnyConfig
    inert: tuple[str, ...]
    """Keys that change nothing, since transformers does not read them for this `model_type` either; one of a table
    inside the config is `table.key`. `verify()` lists them."""


@public()
def config_of(values: Mapping[str, object]) -> tuple[AnyFamily, AnyConfig]:
    """Family and our config of a checkpoint's config; ValueError for anything it asks that we do not do."""
    found = reading_of(values)
    return found.family, found.config


def reading_of(values: Mapping[str, object]) -> Reading:
    """Family, our config and the inert keys of a checkpoint's config.

    Errors: ValueError for a damaged config or a `model_type` without a file here; its kind `UnsupportedError` where the
    config asks for something that transformers does and the family's file does not, so that it can be wrapped.
    """
    family = family_of(values)
    quantisation_of(values, family.name)
    settings = Settings(values, family.name)
    settings.present(KEYS)
    try:
        config = family.config(settings)
    except ValueError as cause:
        if isinstance(cause, UnsupportedError) or settings.names(str(cause)):
            raise
        said = ", ".join(f"{key}={value}" for key, value in settings.numbers().items())
        raise ValueError(f"{family.name}: {cause}; the config says {said}") from cause
    return Reading(family, config, settings.finish())


@public()
def from_hf_model(
    hf_model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: Device = "cpu",
    devices: Devices | None = None,
    wrapped: bool | None = None,
) -> Transformer:
    """Our copy of a live Hugging Face model; the original is not touched and shares no memory.

    devices: several to spread the layers over, in consecutive runs; what stands outside them goes to the first.
    wrapped: True wraps the network's own code (on its own tensors, unless they are cast or moved), False never does;
    None wraps a decoder whose family has no file here.
    """
    return _one_stack(
        any_from_hf_model(hf_model, dtype=dtype, device=device, devices=devices, wrapped=wrapped)
    )


@public()
def any_from_hf_model(
    hf_model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: Device = "cpu",
    devices: Devices | None = None,
    wrapped: bool | None = None,
) -> AnyModel:
    """The same for a model of either kind, an encoder-decoder included."""
    if hasattr(hf_model, "original_model"):
        raise ValueError(f"{type(hf_model).__name__} wraps a model: interp.compat.from_bridge reads it")
    config = getattr(hf_model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise ValueError(f"a Hugging Face model with a config is required, got {type(hf_model).__name__}")
    # a config may still name the class it was saved from, one with a head, say
    values: dict[str, object] = {**config.to_dict(), "architectures": [type(hf_model).__name__]}
    places = _places(dtype, device, devices)
    if _wraps(values, wrapped):
        return wrapped_model(hf_model, values, dtype=dtype, device=_one_place(places))
    family, ours = config_of(values)
    tensors = ordinary(LiveTensors(hf_model.state_dict()), values, family.name, dtype)
    return to_model(family, ours, tensors, dtype=dtype, devices=places)


@public()
def from_folder(
    path: Path,
    *,
    config: Path | None = None,
    dtype: torch.dtype | None = None,
    device: Device = "cpu",
    devices: Devices | None = None,
    wrapped: bool | None = None,
) -> Transformer:
    """The model of a local folder (`config.json` beside the weights), or of one file of weights in such a folder.

    config: the config's file, where it is not beside the weights.
    devices: several to spread the layers over, in consecutive runs; what stands outside them goes to the first.
    wrapped: as in `from_hf_model`; transformers opens the folder then.
    """
    return _one_stack(
        any_from_folder(path, config=config, dtype=dtype, device=device, devices=devices, wrapped=wrapped)
    )


@public()
def any_from_folder(
    path: Path,
    *,
    config: Path | None = None,
    dtype: torch.dtype | None = None,
    device: Device = "cpu",
    devices: Devices | None = None,
    wrapped: bool | None = None,
) -> AnyModel:
    """The same for a model of either kind, an encoder-decoder included."""
    folder = path if path.is_dir() else path.parent
    config_file = config or folder / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(
            f"{config_file} is required beside the weights; the source {folder} holds {listing(folder)}"
        )
    values, places = json_object(config_file), _places(dtype, device, devices)
    if _wraps(values, wrapped):
        if path.is_file() or config is not None:
            raise ValueError(
                "a wrapped model requires the folder of its checkpoint, config and weights together"
            )
        if not can_wrap(values):
            kind = values.get("model_type")
            raise ValueError(f"model_type {kind!r} cannot be wrapped: transformers has no causal model of it")
        return wrapped_folder(folder, values, dtype=dtype, device=_one_place(places))
    family, ours = config_of(values)
    with StoredTensors([path] if path.is_file() else weight_files(folder)) as stored:
        if isinstance(said := values.get(native.DEQUANTISED), str):
            stored.dequantised = said
        tensors = ordinary(stored, values, family.name, dtype)
        return to_model(family, ours, tensors, dtype=dtype, devices=places)


@public()
def is_encoder_decoder(path: Path) -> bool:
    """Whether the checkpoint in a folder (or a file of one) is an encoder-decoder, by its config."""
    folder = path if path.is_dir() else path.parent
    config_file = folder / "config.json"
    if not config_file.is_file():
        return False
    values = json_object(config_file)
    return not _wraps(values, None) and isinstance(config_of(values)[1], EncoderDecoderConfig)


def _wraps(values: Mapping[str, object], wrapped: bool | None) -> bool:
    """Whether a checkpoint is to be wrapped: as it is asked, or where only transformers does what its config asks."""
    if wrapped is not None:
        return wrapped
    return not _does(values) and can_wrap(values)


def _does(values: Mapping[str, object]) -> bool:
    """Whether a file here knows the type of a config, and does what it asks."""
    if not any(values.get("model_type") in family.model_types for family in FAMILIES):
        return False
    try:
        reading_of(values)
    except UnsupportedError:
        return False
    except ValueError:
        return True  # a damaged config: what is wrong is said where it is read
    return True


def _one_place(places: Sequence[torch.device]) -> torch.device:
    if len(places) != 1:
        raise ValueError(f"a wrapped model stands on one device, got {len(places)}")
    return places[0]


def _places(dtype: torch.dtype | None, device: Device, devices: Devices | None) -> tuple[torch.device, ...]:
    """The devices to use, each checked for the dtype."""
    places = tuple(torch.device(d) for d in ([device] if devices is None else devices))
    if not places:
        raise ValueError("at least one device is required, got devices=[]")
    for place in places:
        check_dtype(dtype or torch.float32, place)
    return places


def _one_stack(model: AnyModel) -> Transformer:
    if not isinstance(model, Transformer):
        raise ValueError("one stack of layers is required, this checkpoint is an encoder-decoder")
    return model


@public()
def tokenizer_of(folder: Path) -> TokenizerAdapter | None:
    """The tokenizer stored in a folder, or None if there is none; ValueError if it does not fit the model."""
    tokenizer = _stored_tokenizer(folder)
    if tokenizer is not None and (folder / "config.json").is_file():
        values = json_object(folder / "config.json")
        if _wraps(values, None):
            size = vocabulary(values)
        else:
            config = config_of(values)[1]
            size = (config.decoder if isinstance(config, EncoderDecoderConfig) else config).d_vocab
        if size is not None:
            check_fit(tokenizer, size)
    return tokenizer


def _stored_tokenizer(folder: Path) -> TokenizerAdapter | None:
    native_file, pieces = folder / "tokenizer.json", folder / "tokenizer.model"
    if pieces.is_file() and not native_file.is_file():
        return SentencePieceTokenizer.read(pieces)
    config = json_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    if config.get("model_type") == native.MODEL_TYPE:
        return FileTokenizer.read(native_file, native.BOS) if native_file.is_file() else None
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if not any((folder / name).is_file() for name in names):
        return None
    return HuggingFaceTokenizer.read(folder)


@public()
def save(model: AnyModel, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` in our own layout; a tied unembedding is stored once."""
    from safetensors.torch import save_file

    made_folder(folder)
    state = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    first = model if isinstance(model, Transformer) else model.encoder
    values = native.values(model.config, first.dequantised)
    write_atomically(folder / "model.safetensors", lambda p: save_file(state, p, metadata={"format": "pt"}))
    write_atomically(folder / "config.json", lambda p: _write_text(p, json.dumps(values, indent=2) + "\n"))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
