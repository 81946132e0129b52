"""transformers' own network of a checkpoint: to be wrapped, merged with an adapter, or compared with ours.

Nothing here executes code from a checkpoint: remote code is never asked for.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from interp.families import gguf
from interp.families.convert import VALUE_HEADS, left_out
from interp.families.quantised import KEYS, method_of, ordinary
from interp.families.stored import StoredTensors, weight_files

if TYPE_CHECKING:
    from interp.wrapped import Wrapped

DEQUANTISING = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""The formats that transformers dequantises on a processor, with the class that says so."""
READ = ("model.safetensors", "pytorch_model.bin")
"""The files of weights that transformers looks for, or their indices; under any other name we read them for it."""
TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM", "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM", "FEATURE_EXTRACTION": "AutoModel",
    "SEQ_CLS": "AutoModelForSequenceClassification", "TOKEN_CLS": "AutoModelForTokenClassification",
}  # fmt: skip
"""`task_type` of an adapter -> what opens its base."""


def can_wrap(values: Mapping[str, object]) -> bool:
    """Whether transformers itself, without code from a checkpoint, has a causal model of a config's `model_type`, or
    one of images and text, of which the text part is meant.
    """
    return any(str(values.get("model_type")) in names for names in _kinds().values())


def _kinds() -> dict[str, Mapping[str, object]]:
    """The model types that each way to open a checkpoint knows, in the order in which they are tried."""
    from transformers.models.auto import modeling_auto as auto

    return {
        "AutoModelForCausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForImageTextToText": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }


def opener_of(values: Mapping[str, object]) -> str:
    """What opens a config's `model_type`."""
    return next(name for name, known in _kinds().items() if str(values.get("model_type")) in known)


# --- opening ------------------------------------------------------------------------------------------------------


def network_of_folder(
    folder: Path,
    values: Mapping[str, object],
    opener: str,
    dtype: torch.dtype | None,
    *,
    whole: bool = False,
) -> tuple[nn.Module, tuple[str, ...]]:
    """transformers' network of a folder, and what was done; opener: the name of a class of transformers.

    whole: every tensor of the checkpoint must have a place in the network.
    Errors: ValueError naming the tensors that the checkpoint lacks, has in another shape, or has beyond it (`whole`).
    """
    import transformers

    kind, how = getattr(transformers, opener), {}
    method = method_of(values)
    theirs = any((folder / f"{name}{end}").is_file() for name in READ for end in ("", ".index.json"))
    if not theirs or (method is not None and method not in DEQUANTISING):
        return on_our_numbers(_class_of(kind, folder), folder, values, dtype, whole=whole)
    if method is not None:
        how["quantization_config"] = getattr(transformers, DEQUANTISING[method])(dequantize=True)
    network, left = _reported(
        kind, str(folder), folder, whole=whole, dtype=dtype or "auto", trust_remote_code=False, **how
    )
    if method is None:
        return network, left
    # what was not quantised is left as it is stored
    network = network if dtype is None else network.to(dtype)
    return network, (f"weights dequantised at load from {method}", *left)


def network_of_gguf(
    file: gguf.File, dtype: torch.dtype | None, *, on_ours: bool
) -> tuple[nn.Module, tuple[str, ...]]:
    """transformers' network of a GGUF file, on the config that we read from it; and what was done.

    on_ours: with the tensors that we read, and not those that transformers reads.
    """
    import transformers

    kind = (
        transformers.AutoModelForSeq2SeqLM
        if file.config.is_encoder_decoder
        else transformers.AutoModelForCausalLM
    )
    kept = dtype or gguf.own_dtype(file)
    tensors = gguf.GgufTensors(file, dtype)
    if not on_ours:
        folder, name = file.path.parent, file.path.name
        network, _ = _reported(
            kind, str(folder), folder, gguf_file=name, config=file.config, dtype=kept, trust_remote_code=False
        )
        return network, tensors.notes
    found = kind._model_mapping[type(file.config)]
    assert isinstance(found, type)
    state = {name: tensors.taken(name) for name in tensors}
    return _reported(found, None, file.path, config=file.config, state_dict=state, dtype=kept)[
        0
    ], tensors.notes


def _reported(
    kind: type, folder: str | None, where: Path, *, whole: bool = False, **how: object
) -> tuple[nn.Module, tuple[str, ...]]:
    """What `from_pretrained` gives, and what was left out; ValueError where its report of loading names a trouble."""
    try:
        with quiet():
            network, report = kind.from_pretrained(folder, output_loading_info=True, **how)  # type: ignore[attr-defined]
    except (
        KeyError,
        AttributeError,
        TypeError,
        IndexError,
        RuntimeError,
    ) as cause:  # what it cannot do
        raise ValueError(
            f"{where}: transformers fails to open it ({type(cause).__name__}: {_first_line(cause)})"
        ) from cause
    for trouble in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, report.get(trouble) or ())):
            raise ValueError(
                f"{where}: transformers found {len(names)} {trouble.replace('_', ' ')}, first {names[0]}, and would "
                "fill them with random numbers"
            )
    beyond = sorted(map(str, report.get("unexpected_keys") or ())) if whole else []
    if other := [name for name in beyond if re.fullmatch(VALUE_HEADS, name) is None]:
        raise ValueError(
            f"{where}: {type(network).__name__}, as which this checkpoint would be wrapped, has no place for "
            f"{len(other)} of its tensors, first {other[0]!r}; a network is wrapped with its logits of tokens alone, "
            "so open it without its other head by transformers and give the live model"
        )
    return network.eval(), left_out(beyond)


def _first_line(cause: Exception) -> str:
    return (str(cause).strip().splitlines() or [""])[0]


def _class_of(kind: type, folder: Path) -> type[nn.Module]:
    """The class that an opener takes for a folder."""
    import transformers

    if not hasattr(kind, "_model_mapping"):
        return kind
    config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    found: type[nn.Module] = kind._model_mapping[type(config)]
    return found


def on_our_numbers(
    kind: type[nn.Module],
    folder: Path,
    values: Mapping[str, object],
    dtype: torch.dtype | None,
    *,
    whole: bool = False,
) -> tuple[nn.Module, tuple[str, ...]]:
    """transformers' network of a folder on the numbers that we read there; and how they are stored."""
    config = kind.config_class.from_pretrained(str(folder))  # type: ignore[attr-defined]
    for key in KEYS:
        if hasattr(config, key):
            delattr(config, key)
    with StoredTensors(weight_files(folder)) as stored:
        tensors = ordinary(stored, values, str(values.get("model_type")), dtype)
        state = {name: tensors[name].clone() for name in tensors}
    kept = dtype or next(value.dtype for value in state.values() if value.is_floating_point())
    network, left = _reported(kind, None, folder, whole=whole, config=config, state_dict=state, dtype=kept)
    return network, (*tensors.notes, *left)


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own progress bars."""
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
    """A network, wrapped on its own tensors where they are not cast or moved."""
    from interp.wrapped import wrap

    found = wrap(network, dtype=dtype, device=device)
    said = any(clause.startswith("wrapped") for clause in notes)
    found.opened = notes if said else (*notes, "wrapped: every pass is computed by the network's own code")
    return found


def refuse_quantised(values: Mapping[str, object]) -> None:
    """ValueError for a live network with quantised weights, whose matrices are no linear maps."""
    if method := method_of(values):
        raise ValueError(
            f"{values.get('model_type')}: a live model with quantised weights ({method}) is not wrapped, since its "
            "matrices are no linear maps; give the folder of its checkpoint, whose weights are dequantised at load"
        )


# --- adapters -----------------------------------------------------------------------------------------------------


def adapter_of(folder: Path) -> dict[str, object] | None:
    """What a folder's `adapter_config.json` says; None where there is none."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    said = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(said, dict):
        raise ValueError(f"{file}: an object is required, got {type(said).__name__}")
    return said


def merge_live(network: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """A copy of a live network with its active adapters (PEFT) merged into their matrices; the network is not touched.

    Adapters that are switched off are left out, as in the network's own passes.
    Errors: ValueError for adapters that are no change of matrices, such as trained prompts.
    """
    import copy

    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    kinds, copied = adapters_of(network), copy.deepcopy(network)
    layers = [module for module in copied.modules() if isinstance(module, BaseTunerLayer)]
    off = bool(layers) and all(layer.disable_adapters for layer in layers)
    said = "adapters, which are switched off, left out" if off else _said(kinds, "the live model")
    if isinstance(copied, peft.PeftModel):
        return (copied.unload() if off else _merged(copied)), (said,)
    done: list[str] = []
    for name, module in list(copied.named_modules()):
        if any(name.startswith(f"{outer}.") for outer in done):
            continue
        found: object = module
        while isinstance(found, BaseTunerLayer):
            if not off:
                found.merge()
            found = found.get_base_layer()
        if isinstance(found, ModulesToSaveWrapper):
            saved = not off and isinstance(found.active_adapter, str)
            found = found.modules_to_save[str(found.active_adapter)] if saved else found.original_module
        if found is not module:
            parent, _, last = name.rpartition(".")
            setattr(copied.get_submodule(parent), last, found)
            done.append(name)
    return copied, (said,)


def adapters_of(network: nn.Module) -> Mapping[str, object]:
    """The configs of a live network's adapters, by their names; empty where it has none."""
    if "peft" not in sys.modules:  # nothing of it can be in the network then
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    found = getattr(network, "peft_config", None)
    if isinstance(found, Mapping) and any(hasattr(each, "peft_type") for each in found.values()):
        return dict(found)
    layers = (module for module in network.modules() if isinstance(module, BaseTunerLayer))
    return {name: None for layer in layers for name in layer.active_adapters}


def merge_folder(
    base: nn.Module, folder: Path, said: Mapping[str, object]
) -> tuple[nn.Module, tuple[str, ...]]:
    """A network of transformers with the adapter of a folder merged into its matrices, in place."""
    require_peft(folder)
    import peft

    try:
        with quiet():
            found = peft.PeftModel.from_pretrained(base, str(folder))
    except Exception as cause:  # of many kinds: the files may be damaged anywhere, or belong to another base
        raise ValueError(f"{folder}: its adapter does not fit its base: {cause}") from cause
    kinds = dict(found.peft_config)
    return _merged(found), (_said(kinds, str(said.get("base_model_name_or_path"))),)


def require_peft(where: Path | str) -> None:
    """ValueError where the package peft is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError as cause:
        raise ValueError(
            f"{where}: an adapter requires the package peft: pip install 'interp[peft]'"
        ) from cause


def _merged(network: nn.Module) -> nn.Module:
    if not hasattr(network.base_model, "merge_and_unload"):
        kind = next(iter(network.peft_config.values())).peft_type  # type: ignore[operator]
        raise ValueError(
            f"an adapter of type {getattr(kind, 'value', kind)} changes no matrix and cannot be merged"
        )
    merged = network.merge_and_unload(safe_merge=True)  # type: ignore[operator]
    assert isinstance(merged, nn.Module)
    return merged.eval()


def _said(kinds: Mapping[str, object], base: str) -> str:
    of_each = []
    for name, config in kinds.items():
        kind = getattr(config, "peft_type", "adapter")
        rank = f", rank {config.r}" if hasattr(config, "r") else ""
        of_each.append(f"{getattr(kind, 'value', kind)} {name!r}{rank}")
    return f"adapter merged into {base}: {'; '.join(of_each)}"
