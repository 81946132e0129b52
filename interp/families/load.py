"""Loading: a folder, a file or a live Hugging Face model becomes a `Transformer`, every tensor accounted for.

Nothing here executes code from a checkpoint: configs are JSON, weights are safetensors, or pickles read by torch's
weights-only unpickler; remote code is never asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from interp.core.boundary import public
from interp.core.files import json_object, made_folder, write_atomically
from interp.core.kinds import Device
from interp.core.wording import nearest
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
    gguf,
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
    nanogpt,
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
from interp.families.adapters import (
    adapter_of,
    adapters_of,
    folder_of,
    merge_live,
    merged,
    opener_of_base,
    options_of_base,
    require_peft,
    shapes_of,
    with_adapter,
)
from interp.families.comparison import require_same
from interp.families.convert import AnyModel, to_model
from interp.families.fill import DTYPES
from interp.families.gguf_keys import check_agreement, check_agreement_with_theirs
from interp.families.hub import download as download, located
from interp.families.live import inside
from interp.families.places import Devices, places_of
from interp.families.quantised import KEYS, ordinary, quantisation_of
from interp.families.spec import AnyFamily, Settings, UnsupportedError
from interp.families.stored import (
    FOREIGN,
    LiveTensors,
    StoredTensors,
    Tensors,
    foreign_format,
    listing,
    require_whole,
    saved_beside,
    weight_files,
    weights_of,
)
from interp.families.theirs import (
    can_wrap,
    network_of_folder,
    network_of_gguf,
    opener_of,
    refuse_quantised,
    wrapped as wrapped_network,
)
from interp.families.tokenizer import StoredTokenizer, tokenizer_in
from interp.model.config import AnyConfig, EncoderDecoderConfig
from interp.model.live_modules import note_hooks
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
    nanogpt.FAMILY,
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
class ConfigReading:
    """A checkpoint's config as this package understands it."""

    family: AnyFamily
    config: AnyConfig
    inert: tuple[str, ...]
    """Keys that change nothing, since transformers does not read them for this `model_type` either; a key of a table
    inside the config is `table.key`."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the config (`Transformer.opened`)."""
        return (
            (f"config keys that transformers does not read either: {', '.join(self.inert)}",)
            if self.inert
            else ()
        )


@public()
def config_of(values: Mapping[str, object]) -> tuple[AnyFamily, AnyConfig]:
    """Family and `ModelConfig` for a checkpoint's config; ValueError for a feature that this package lacks."""
    reading = reading_of(values)
    return reading.family, reading.config


def reading_of(values: Mapping[str, object]) -> ConfigReading:
    """Family, config and inert keys of a checkpoint's config.

    Raises:
        ValueError: a damaged config or a `model_type` without a file here.
        UnsupportedError: the config requires a feature that transformers has and the family's file lacks, so that the
            model can be wrapped.
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
        numbers = ", ".join(f"{key}={value}" for key, value in settings.numbers().items())
        raise ValueError(f"{family.name}: {cause}; the config says {numbers}") from cause
    return ConfigReading(family, config, settings.finish())


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

    Wrappers of torch (`compile`, `DataParallel`, `DistributedDataParallel`), of PEFT (merged in a copy) and value
    heads are looked through. Hooks on its modules are no part of the copy, and a `Note` names them. What both give for
    a few tokens is compared, so that a forward or a setting that the config does not say is found: ValueError.

    Args:
        devices: several to spread the layers over, in consecutive runs, or "auto" for the accelerators of this
            machine by their free memory; what stands outside the layers goes to the first.
        wrapped: True wraps the network's own code (on its own tensors, unless they are cast or moved), False never
            does; None wraps a decoder whose family has no file here.
    """
    return _as_transformer(
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
    """A model of either kind made from a live one of transformers, an encoder-decoder included."""
    live, live_notes = inside(hf_model)
    _require_in_memory(live)
    note_hooks(live)
    network, owned = live, bool(adapters_of(live))
    if owned:
        network, notes = merge_live(live)
        live_notes = (*live_notes, *notes)
    model = _from_network(network, live_notes, owned, places_of(dtype, device, devices), dtype, wrapped)
    if not (isinstance(model, Transformer) and model.config.block.proven):  # whose code is the network's own
        require_same(live, model)
    return model


def _require_in_memory(network: nn.Module) -> None:
    """ValueError for a live network with parameters on the "meta" device (offloaded or never loaded)."""
    bare = [name for name, value in network.named_parameters() if value.is_meta]
    if bare:
        raise ValueError(
            f"a live model with all its parameters in memory is required, {len(bare)} of this one are offloaded or "
            f"were never loaded, first {bare[0]!r}: load it without offloading, or give the folder of its checkpoint"
        )


def _from_network(
    network: nn.Module,
    notes: tuple[str, ...],
    owned: bool,
    places: Sequence[torch.device],
    dtype: torch.dtype | None,
    wrapped: bool | None,
) -> AnyModel:
    """The model of a transformers network; `owned`: the network has no other user, so its tensors need no copy."""
    config = getattr(network, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise ValueError(f"a Hugging Face model with a config is required, got {type(network).__name__}")
    # the config may still hold the class and the dtype of the checkpoint that it was saved from
    values: dict[str, object] = {**config.to_dict(), "architectures": [type(network).__name__], "dtype": None}
    reading = _read_config(values, wrapped, live=True)
    if not isinstance(reading, ConfigReading):
        refuse_quantised(values)
        return wrapped_network(network, (*notes, *reading), dtype=dtype, device=_only_device(places))
    state = LiveTensors(network.state_dict(), owned=owned, notes=(*notes, *reading.notes))
    if owned:  # other references to the network must not keep its tensors alive
        for module in network.modules():
            module._parameters.clear()
    return _converted_model(reading, state, values, dtype, places)


def _converted_model(
    reading: ConfigReading,
    stored: Tensors,
    values: Mapping[str, object],
    dtype: torch.dtype | None,
    places: Sequence[torch.device],
) -> AnyModel:
    tensors = ordinary(stored, values, reading.family.name, dtype)
    return to_model(
        reading.family, reading.config, tensors, dtype=dtype, devices=places, may_lack_head=_may_lack_head(values),
        stated=_stated_dtype(values),
    )  # fmt: skip


def _stated_dtype(values: Mapping[str, object]) -> torch.dtype | None:
    """The dtype of the parameters according to a config; None if it has none."""
    name = str(values.get("dtype") or values.get("torch_dtype")).removeprefix("torch.")
    return next((kind for kind in DTYPES if str(kind) == f"torch.{name}"), None)


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
    """The model of a local folder (`config.json` next to the weights), or of one file of weights in such a folder.

    A folder with safetensors and a config that we know is read directly; a GGUF file, an adapter and its base, and
    what is wrapped, by transformers. A file may also be what a training script saved, with the state dict under a
    name.

    Args:
        config: the config's file, where it is not beside the weights.
        devices: several to spread the layers over, in consecutive runs, or "auto" for the accelerators of this
            machine by their free memory; what stands outside the layers goes to the first.
        wrapped: as in `from_hf_model`; transformers opens the folder then.
    """
    return _as_transformer(
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
    """A model of either kind opened from a folder, an encoder-decoder included."""
    places = places_of(dtype, device, devices)
    if (file := gguf_in(path)) is not None:
        return _from_gguf(file, places, dtype, wrapped)
    if adapter_of(path) is not None:
        network, notes = merged_folder(path, dtype)
        return _from_network(network, notes, True, places, dtype, wrapped)
    values = values_of(path, config)
    reading = _read_config(values, wrapped)
    if not isinstance(reading, ConfigReading):
        if path.is_file() or config is not None:
            why = f"; it is {reading[0]}" if reading else ""
            raise ValueError(
                f"a wrapped model requires the folder of its checkpoint, config and weights together{why}"
            )
        if not can_wrap(values):
            kind = values.get("model_type")
            raise ValueError(f"model_type {kind!r} cannot be wrapped: transformers has no causal model of it")
        try:
            network, notes = network_of_folder(path, values, opener_of(values), dtype, whole=True)
        except ValueError as cause:
            if not reading:
                raise
            raise ValueError(f"{cause}; it is {reading[0]}") from cause
        return wrapped_network(network, (*notes, *reading), dtype=None, device=_only_device(places))
    with StoredTensors([path] if path.is_file() else weight_files(path)) as stored:
        stored.notes = (*native.opened(values), *reading.notes)
        return _converted_model(reading, stored, values, dtype, places)


def _from_gguf(
    path: Path, places: Sequence[torch.device], dtype: torch.dtype | None, wrapped: bool | None
) -> AnyModel:
    file = gguf.read(path)
    values: dict[str, object] = file.config.to_dict()
    reading = _read_config(values, wrapped)
    if not isinstance(reading, ConfigReading):
        if not can_wrap(values):
            raise ValueError(
                f"{path}: {values.get('model_type')!r} cannot be wrapped: one stack of layers is required"
            )
        check_agreement_with_theirs(file, file.config)
        network, notes = network_of_gguf(file, dtype, on_ours=True)
        return wrapped_network(network, (*notes, *reading), dtype=None, device=_only_device(places))
    try:
        check_agreement(file, reading.config)
        tensors = gguf.GgufTensors(file, dtype)
        return to_model(reading.family, reading.config, tensors, dtype=dtype, devices=places)
    except ValueError as cause:
        raise ValueError(str(cause) if str(path) in str(cause) else f"{path}: {cause}") from cause


def merged_folder(
    path: Path, dtype: torch.dtype | None, above: tuple[Path, ...] = ()
) -> tuple[nn.Module, tuple[str, ...]]:
    """The transformers network of an adapter's base with the adapter merged, and notes about it."""
    network, notes = adapted_folder(path, dtype, above)
    adapter = adapter_of(path) or {}
    at = f" at revision {adapter['revision']}" if adapter.get("revision") else ""
    network, more = merged(network, f"{adapter.get('base_model_name_or_path')}{at}")
    return network, (*notes, *more)


def adapted_folder(
    path: Path, dtype: torch.dtype | None, above: tuple[Path, ...] = ()
) -> tuple[nn.Module, tuple[str, ...]]:
    """PEFT's network of an adapter and its base, the adapter not merged, and notes about changes of the base.

    A base that is itself an adapter is first merged into its own base. `above`: folders of the adapters that led here.
    """
    require_peft(path)
    folder, adapter = folder_of(path), adapter_of(path) or {}
    base = base_of(folder, adapter)
    above = (*above, folder.resolve())
    if folder_of(base).resolve() in above and adapter_of(base) is not None:
        raise ValueError(f"{folder}: adapter_config.json names the adapter itself as its base, {base}")
    shapes = shapes_of(folder)
    if adapter_of(base) is not None:
        network, notes = merged_folder(base, dtype, above)
    else:
        network, notes = _base_network(folder, adapter, base, shapes, dtype), ()
    adapted, more = with_adapter(network, folder, shapes)
    return adapted, (*notes, *more)


def _base_network(
    folder: Path,
    adapter: Mapping[str, object],
    base: Path,
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype | None,
) -> nn.Module:
    """The transformers network of an adapter's base, of the class that the adapter was trained on."""
    values = values_of(base)
    opener = opener_of_base(folder, adapter, values, shapes)
    if (file := gguf_in(base)) is None:
        options = options_of_base(opener, shapes)
        return network_of_folder(base, values, opener, dtype, brought=tuple(shapes), **options)[0]
    network, _ = network_of_gguf(gguf.read(file), dtype, on_ours=True)
    if opener not in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", type(network).__name__):
        raise ValueError(
            f"{folder}: a GGUF file as the base of an adapter has a language model, not {opener}"
        )
    return network


def base_of(folder: Path, adapter: Mapping[str, object]) -> Path:
    """The folder or GGUF file of an adapter's base.

    The name is tried as a path, as a path beside the adapter, and on the hub at the adapter's revision.
    """
    name = adapter.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"{folder}: adapter_config.json must name its base under base_model_name_or_path, got {name!r}"
        )
    for path in (Path(name), folder / name, folder.parent / name):
        if path.exists():
            return _usable_base(folder, path)
    revision = adapter.get("revision")
    try:
        return located(name, None if revision is None else str(revision), "an adapter needs its base")
    except (ValueError, FileNotFoundError) as cause:
        has_weights = (folder / "config.json").is_file()
        remedy = (
            "; to open the weights beside it without it, give their own path, or move adapter_config.json away"
            if has_weights
            else "; write its path under base_model_name_or_path"
        )
        raise ValueError(
            f"{folder} is an adapter of {name!r}, which is not found: {cause}{remedy}"
        ) from cause


def _usable_base(folder: Path, path: Path) -> Path:
    """The path of an adapter's base: a folder, a GGUF file or another adapter; for a weight file its folder."""
    if path.is_dir() or gguf_in(path) is not None or adapter_of(path) is not None:
        return path
    if path.name.startswith(("model.", "model-", "pytorch_model")) and path in weight_files(path.parent):
        return path.parent
    raise ValueError(
        f"{folder}: the base of an adapter is a folder with config.json and weights, or a GGUF file; "
        f"adapter_config.json names {path}"
    )


def values_of(path: Path, config: Path | None = None) -> dict[str, object]:
    """The config of a folder, a file of weights or a GGUF file; for an adapter, the config of its base.

    Looked for in this order: the header of a GGUF file, the base of an adapter, config.json beside the weights (or
    `config`), and the arguments that nanoGPT keeps inside its one checkpoint file.

    Raises:
        FileNotFoundError: no config was found.
        ValueError: a format that is not read.
    """
    if (file := gguf_in(path)) is not None:
        gguf_values: dict[str, object] = gguf.read(file).config.to_dict()
        return gguf_values
    folder = path if path.is_dir() else path.parent
    if (adapter := adapter_of(path)) is not None:
        return values_of(base_of(folder, adapter))
    if path.is_file() and path.suffix in FOREIGN:
        raise ValueError(foreign_format(path))
    if path.is_file():
        require_whole(path)
    config_file = config or folder / "config.json"
    if config_file.is_file():
        return dict(json_object(config_file))
    trained = [path] if path.is_file() else sorted(folder.glob("*.pt"))
    if len(trained) == 1 and (values := nanogpt.values(saved_beside(trained[0]))) is not None:
        return values
    steps = sorted(file.parent.name for file in folder.glob("*/config.json"))
    more = f"; give the path of one of its checkpoints, {', '.join(steps[:8])}, or revision=" if steps else ""
    raise FileNotFoundError(
        f"{config_file} is required beside the weights; the source {folder} holds {listing(folder)}{more}"
    )


def gguf_in(path: Path) -> Path | None:
    """The GGUF file of a path: the path itself, or the only weights in the folder; None where there is none."""
    if path.is_file():
        return path if gguf.is_gguf(path) else None
    files = sorted(p for p in path.glob("*") if p.suffix.lower() == gguf.SUFFIX)
    if not files or any(weights_of(path, ".safetensors")) or any(path.glob("pytorch_model*.bin")):
        return None
    if len(files) > 1:
        raise ValueError(
            f"{path} holds {len(files)} GGUF files, {', '.join(f.name for f in files[:4])}; give the path of one"
        )
    return files[0]


def _may_lack_head(values: Mapping[str, object]) -> bool:
    """Whether a checkpoint may lack an unembedding: True unless its class is that of a language model."""
    names = values.get("architectures")
    names = [str(name) for name in names] if isinstance(names, list) else []
    if values.get("model_type") in (native.MODEL_TYPE, nanogpt.MODEL_TYPE):
        return False
    return not any(
        re.search(r"For\w*LM$|LMHead|ForConditionalGeneration|DoubleHeads", name) for name in names
    )


@public()
def is_encoder_decoder(path: Path) -> bool:
    """Whether the checkpoint in a folder (or a file of one) is an encoder-decoder, by its config."""
    try:
        values = values_of(path)
    except FileNotFoundError:
        return False
    reading = _read_config(values, None)
    return isinstance(reading, ConfigReading) and isinstance(reading.config, EncoderDecoderConfig)


def _read_config(
    values: Mapping[str, object], wrapped: bool | None, *, live: bool = False
) -> ConfigReading | tuple[str, ...]:
    """The family and `ModelConfig` of a config; or, where the model is to be wrapped, notes about that.

    It is wrapped if `wrapped` is True, or if it is None and only transformers supports the config.

    Args:
        live: the network is in memory already, so transformers need not be able to open its type.

    Raises:
        ValueError: a damaged config, or one that is not supported.
    """
    if wrapped:
        return ()
    known = any(values.get("model_type") in family.model_types for family in FAMILIES)

    def possible() -> bool:  # which imports transformers, so it is asked where there is a reason only
        return wrapped is None and (live or can_wrap(values))

    if not known and possible():
        return ()
    try:
        reading = reading_of(values)
    except UnsupportedError as cause:
        if possible():
            return (f"wrapped, since our own code does not do what its config asks ({cause})",)
        raise
    pair = isinstance(reading.config, EncoderDecoderConfig)
    if pair and values.get("is_encoder_decoder") is False and possible():
        return ("wrapped: the decoder of a type whose encoder and decoder our own code has together",)
    return reading


def _only_device(places: Sequence[torch.device]) -> torch.device:
    if len(set(places)) != 1:
        raise ValueError(f"a wrapped model stands on one device, got {len(set(places))}: give device=")
    return places[0]


def _as_transformer(model: AnyModel) -> Transformer:
    if not isinstance(model, Transformer):
        raise ValueError(
            "one stack of layers is required, this checkpoint is an encoder-decoder: "
            "interp.HookedEncoderDecoder.from_pretrained opens it"
        )
    return model


@public()
def tokenizer_for(path: Path) -> StoredTokenizer | None:
    """The tokenizer of a checkpoint, not read yet, as `tokenizer_in`; an adapter without one has its base's."""
    tokenizer = tokenizer_in(path)
    if tokenizer is None and (adapter := adapter_of(path)) is not None:
        return tokenizer_for(base_of(folder_of(path), adapter))
    return tokenizer


@public()
def ends_of(source: Path | nn.Module) -> tuple[int, ...]:
    """The ids at which a model's own generation ends, as transformers reads them.

    They come from `generation_config.json`, or else from the config. Empty where neither has them, and for GGUF files,
    whose tokenizer has them.
    """
    if isinstance(source, nn.Module):
        network, _ = inside(source)
        configs = [getattr(network, name, None) for name in ("generation_config", "config")]
        return next(filter(None, (_ids(getattr(config, "eos_token_id", None)) for config in configs)), ())
    if gguf_in(source) is not None:
        return ()
    folder = source if source.is_dir() else source.parent
    stated = folder / "generation_config.json"
    if stated.is_file() and (ids := _ids(json_object(stated).get("eos_token_id"))):
        return ids
    if (adapter := adapter_of(source)) is not None:
        return ends_of(base_of(folder, adapter))
    return (
        _ids(json_object(folder / "config.json").get("eos_token_id"))
        if (folder / "config.json").is_file()
        else ()
    )


def _ids(value: object) -> tuple[int, ...]:
    """The token ids in a config's value, which is an id or a list of ids; empty for anything else."""
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(i for i in items if type(i) is int)


@public()
def save(model: AnyModel, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` in this package's layout; a tied unembedding is stored once."""
    from safetensors.torch import save_file

    made_folder(folder)
    state = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    first = model if isinstance(model, Transformer) else model.encoder
    values = native.values(model.config, first.opened)
    write_atomically(folder / "model.safetensors", lambda p: save_file(state, p, metadata={"format": "pt"}))
    write_atomically(folder / "config.json", lambda p: _write_text(p, json.dumps(values, indent=2) + "\n"))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
