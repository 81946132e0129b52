"""The transformers network of a checkpoint, for wrapping, for adapters and for comparison.

Code from a checkpoint is never executed: remote code is never enabled.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from interp.families import gguf
from interp.families.convert import VALUE_HEADS, left_out
from interp.families.quantised import KEYS, method_of, ordinary
from interp.families.stored import StoredTensors, weight_files

if TYPE_CHECKING:
    from interp.wrapped import Wrapped

DEQUANTISING = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""Formats that transformers dequantises on a CPU -> its config class for that."""
READ = ("model.safetensors", "pytorch_model.bin")
"""The weight files (or their indices) that transformers looks for; weights under other names are read here."""
MOST_TIMES = 16
"""Most numbers of a network for each that its checkpoint holds; eight of four bits may be packed into one."""


def can_wrap(values: Mapping[str, object]) -> bool:
    """Whether transformers has a causal model, or one of images and text, for a config's `model_type`.

    Of a model of images and text only the text part is used. Code from the checkpoint does not count.
    """
    return any(str(values.get("model_type")) in names for names in _kinds().values())


def _kinds() -> dict[str, Mapping[str, object]]:
    """Class of transformers that opens checkpoints -> its model types, in the order in which they are tried."""
    from transformers.models.auto import modeling_auto as auto

    return {
        "AutoModelForCausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForImageTextToText": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }


def opener_of(values: Mapping[str, object]) -> str:
    """The name of the class of transformers that opens a config's `model_type`."""
    return next(name for name, known in _kinds().items() if str(values.get("model_type")) in known)


def base_prefix(values: Mapping[str, object]) -> str:
    """The prefix of the base model's tensors in a causal model, such as "model.".

    It is "" where there is none, or where transformers has no causal model for the config's `model_type`.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    if str(values.get("model_type")) not in _kinds()["AutoModelForCausalLM"]:
        return ""
    network_class: object = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[str(values["model_type"])]]
    prefix = getattr(network_class, "base_model_prefix", "")
    return f"{prefix}." if prefix else ""


# --- opening ------------------------------------------------------------------------------------------------------


def network_of_folder(
    folder: Path,
    values: Mapping[str, object],
    opener: str,
    dtype: torch.dtype | None,
    *,
    whole: bool = False,
    brought: Collection[str] = (),
    **options: Any,
) -> tuple[nn.Module, tuple[str, ...]]:
    """The transformers network of a folder, and notes about loading; `opener`: the name of a class of transformers.

    Args:
        whole: every tensor of the checkpoint must have a place in the network.
        brought: tensors that an adapter brings, which the checkpoint need not have.
        options: of the config, as an adapter requires them.

    Raises:
        ValueError: tensors that the checkpoint lacks, has in another shape, or has in addition (`whole`).
    """
    import transformers

    kind, how = getattr(transformers, opener), dict(options)
    method = method_of(values)
    _check_size(kind, folder)
    theirs = any((folder / f"{name}{end}").is_file() for name in READ for end in ("", ".index.json"))
    if not theirs or (method is not None and method not in DEQUANTISING):
        return on_our_numbers(
            _class_of(kind, folder), folder, values, dtype, whole=whole, brought=brought, **options
        )
    if method is not None:
        how["quantization_config"] = getattr(transformers, DEQUANTISING[method])(dequantize=True)
    network, notes = _network_and_notes(
        kind,
        str(folder),
        folder,
        whole=whole,
        brought=brought,
        dtype=dtype or "auto",
        trust_remote_code=False,
        **how,
    )
    if method is None:
        return network, notes
    # what was not quantised is left as it is stored
    network = network if dtype is None else network.to(dtype)
    return network, (f"weights dequantised at load from {method}", *notes)


def network_of_gguf(
    file: gguf.GgufFile, dtype: torch.dtype | None, *, on_ours: bool
) -> tuple[nn.Module, tuple[str, ...]]:
    """The transformers network of a GGUF file, with the config that we read from it, and notes about loading.

    Args:
        on_ours: whether its tensors are those that we read, and not those that transformers reads.
    """
    import transformers

    kind = (
        transformers.AutoModelForSeq2SeqLM
        if file.config.is_encoder_decoder
        else transformers.AutoModelForCausalLM
    )
    kept_dtype = dtype or gguf.own_dtype(file)
    tensors = gguf.GgufTensors(file, dtype)
    if not on_ours:
        folder, name = file.path.parent, file.path.name
        with gguf.read_in_seconds():
            network, _ = _network_and_notes(
                kind,
                str(folder),
                folder,
                gguf_file=name,
                config=file.config,
                dtype=kept_dtype,
                trust_remote_code=False,
            )
        return network, tensors.notes
    network_class = kind._model_mapping[type(file.config)]
    assert isinstance(network_class, type)
    state = {name: tensors.taken(name) for name in tensors}
    return _network_and_notes(
        network_class, None, file.path, config=file.config, state_dict=state, dtype=kept_dtype
    )[0], tensors.notes


def _network_and_notes(
    kind: type,
    folder: str | None,
    where: Path,
    *,
    whole: bool = False,
    brought: Collection[str] = (),
    **how: Any,
) -> tuple[nn.Module, tuple[str, ...]]:
    """The network that `from_pretrained` gives, and notes about tensors that were left out.

    ValueError where its loading report has missing or mismatched tensors, or with `whole` unexpected ones.

    Args:
        brought: tensors that an adapter brings, so that they may be missing or have another shape.
    """
    how |= {"ignore_mismatched_sizes": True} if brought else {}
    with quiet(), opening(where):
        network, report = kind.from_pretrained(folder, output_loading_info=True, **how)  # type: ignore[attr-defined]
    for trouble in ("missing_keys", "mismatched_keys"):
        keys = {key if isinstance(key, str) else str(key[0]) for key in report.get(trouble) or ()}
        if names := sorted(keys - set(brought)):
            raise ValueError(
                f"{where}: transformers found {len(names)} {trouble.replace('_', ' ')}, first {names[0]}, and would "
                "fill them with random numbers"
            )
    beyond = sorted(map(str, report.get("unexpected_keys") or ())) if whole else []
    if unplaced := [name for name in beyond if re.fullmatch(VALUE_HEADS, name) is None]:
        raise ValueError(
            f"{where}: {type(network).__name__}, as which this checkpoint would be wrapped, has no place for "
            f"{len(unplaced)} of its tensors, first {unplaced[0]!r}; a network is wrapped with its logits of tokens "
            "alone, so open it without its other head by transformers and give the live model"
        )
    return network.eval(), left_out(beyond)


@contextmanager
def opening(where: Path) -> Iterator[None]:
    """Raises a ValueError for what transformers cannot do, with the field for a value of a config that it refuses."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except StrictDataclassError as cause:
        why = str(cause).strip().splitlines()[-1].partition("Error: ")[2] or str(cause)
        raise ValueError(f"{where}: transformers does not take a value of its config: {why}") from cause
    except (KeyError, AttributeError, TypeError, IndexError, RuntimeError, ArithmeticError) as cause:
        raise ValueError(
            f"{where}: transformers fails to open it ({type(cause).__name__}: {_first_line(cause)})"
        ) from cause


def _check_size(kind: type, folder: Path) -> None:
    """ValueError for a config of far more than the checkpoint holds, before transformers draws numbers for it."""
    import transformers

    with StoredTensors(weight_files(folder)) as stored:
        tensors, held = len(stored), sum(stored.outline(name).numel() for name in stored)
    with opening(folder):
        config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
        if isinstance(layers, int) and layers > tensors:
            raise ValueError(
                f"{folder}: the config says {layers} layers, the checkpoint holds {tensors} tensors for all of them"
            )
        with torch.device("meta"):
            needed = sum(parameter.numel() for parameter in _class_of(kind, folder)(config).parameters())
    if needed > MOST_TIMES * held:
        raise ValueError(
            f"{folder}: the config is that of a network of {needed} numbers, the checkpoint holds {held}"
        )


def _first_line(cause: Exception) -> str:
    return (str(cause).strip().splitlines() or [""])[0]


def _class_of(kind: type, folder: Path) -> type[nn.Module]:
    """The model class that an Auto class of transformers uses for a folder; any other class itself."""
    import transformers

    if not hasattr(kind, "_model_mapping"):
        return kind
    with opening(folder):
        config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    network_class: type[nn.Module] = kind._model_mapping[type(config)]
    return network_class


def on_our_numbers(
    kind: type[nn.Module],
    folder: Path,
    values: Mapping[str, object],
    dtype: torch.dtype | None,
    *,
    whole: bool = False,
    brought: Collection[str] = (),
    **options: Any,
) -> tuple[nn.Module, tuple[str, ...]]:
    """The transformers network of a folder with the tensors that we read there, and notes about them."""
    with opening(folder):
        config = kind.config_class.from_pretrained(str(folder), **options)  # type: ignore[attr-defined]
    for key in KEYS:
        if hasattr(config, key):
            delattr(config, key)
    with StoredTensors(weight_files(folder)) as stored:
        tensors = ordinary(stored, values, str(values.get("model_type")), dtype)
        state = {name: tensors[name].clone() for name in tensors}
    kept_dtype = dtype or next(value.dtype for value in state.values() if value.is_floating_point())
    network, notes = _network_and_notes(
        kind, None, folder, whole=whole, brought=brought, config=config, state_dict=state, dtype=kept_dtype
    )
    return network, (*tensors.notes, *notes)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


# --- wrapping -----------------------------------------------------------------------------------------------------


def wrapped(
    network: nn.Module, notes: tuple[str, ...], *, dtype: torch.dtype | None, device: torch.device
) -> Wrapped:
    """The wrapped network, which shares its tensors unless they are cast or moved; `notes` become its `opened`."""
    from interp.wrapped import wrap

    model = wrap(network, dtype=dtype, device=device)
    noted = any(clause.startswith("wrapped") for clause in notes)
    model.opened = notes if noted else (*notes, "wrapped: every pass is computed by the network's own code")
    return model


def refuse_quantised(values: Mapping[str, object]) -> None:
    """ValueError for a live network with quantised weights, since its matrices are no linear maps."""
    if method := method_of(values):
        raise ValueError(
            f"{values.get('model_type')}: a live model with quantised weights ({method}) is not wrapped, since its "
            "matrices are no linear maps; give the folder of its checkpoint, whose weights are dequantised at load"
        )
