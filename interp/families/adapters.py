"""PEFT adapters (LoRA and others), in a folder or a live network: every tensor is checked, then merged into the base.

After each merge the outputs on a few tokens are compared with those of PEFT's own network with the adapter unmerged.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from interp.core.files import json_object
from interp.families.comparison import PROBED, apart
from interp.families.stored import StoredTensors
from interp.families.theirs import base_prefix, quiet
from interp.model.live_modules import bare_copy

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer

CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""PEFT's names of the files of an adapter's weights."""
TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM", "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM", "FEATURE_EXTRACTION": "AutoModel",
    "SEQ_CLS": "AutoModelForSequenceClassification", "TOKEN_CLS": "AutoModelForTokenClassification",
}  # fmt: skip
"""`task_type` of an adapter -> the class of transformers that opens its base model."""
HEADS = ("score", "classifier", "classifier.out_proj")
"""Names of classifier heads, which an adapter may bring for a base without one."""
SHARED = re.compile(r"vblora_vector_bank|prompt_encoder|\.tinylora_v\.|\.unilora_theta_d\.")
"""Tensors that PEFT reports as missing in layers, since they are stored once for all of them."""


# --- what a folder says -------------------------------------------------------------------------------------------


def adapter_of(path: Path) -> dict[str, object] | None:
    """The contents of `adapter_config.json` for the folder, or the weight file, of an adapter.

    None where the path is not that of an adapter.

    Raises:
        FileNotFoundError: an adapter's weights without that file.
        ValueError: the file holds no JSON object.
    """
    folder = folder_of(path)
    if path.is_file() and path.name not in FILES:
        return None
    file = folder / CONFIG
    if file.is_file():
        return json_object(file)
    bare = path.is_file() or not (folder / "config.json").exists()
    if bare and any((folder / name).is_file() for name in FILES):
        raise FileNotFoundError(
            f"{file} is required beside the weights of an adapter: it names their base and how they are scaled"
        )
    return None


def folder_of(path: Path) -> Path:
    """The folder of an adapter: the path itself, or the folder of its weight file."""
    return path if path.is_dir() else path.parent


def shapes_of(folder: Path) -> dict[str, torch.Size]:
    """The shapes of an adapter's tensors, by name in the base model where the base has the tensor or its module."""
    files = [folder / name for name in FILES if (folder / name).is_file()][:1]
    if not files:
        raise FileNotFoundError(f"{folder} holds {CONFIG}, but neither of {' and '.join(FILES)}")
    with StoredTensors(files) as stored:
        return {_base_name(name): stored[name].shape for name in stored}


def _base_name(name: str) -> str:
    """The name in the base model of a tensor that an adapter stores in full, such as a trained head."""
    short = name.removeprefix("base_model.model.")
    return re.sub(r"\.(base_layer|original_module|modules_to_save(\.default)?)(?=\.)", "", short)


def opener_of_base(
    folder: Path, config: Mapping[str, object], values: Mapping[str, object], shapes: Mapping[str, torch.Size]
) -> str:
    """The name of the class of transformers that opens an adapter's base model.

    It follows from the adapter's task, or the class it was trained on, or else from its tensors' names.

    Args:
        values: the base's config.
    """
    import transformers

    task, trained = config.get("task_type"), config.get("auto_mapping")
    if task is not None:
        if task not in TASKS:
            raise ValueError(f"{folder}: adapters for {', '.join(TASKS)} are read, this one is for {task}")
        return TASKS[str(task)]
    known = isinstance(trained, Mapping) and str(trained.get("parent_library")).startswith("transformers.")
    if known and hasattr(transformers, name := str(trained["base_model_class"])):  # type: ignore[index]
        return name
    if values.get("is_encoder_decoder"):
        return "AutoModelForSeq2SeqLM"
    if any(f"{head}.weight" in shapes for head in HEADS):
        return "AutoModelForSequenceClassification"
    causal_prefixes = (base_prefix(values), "lm_head.")
    return "AutoModelForCausalLM" if any(name.startswith(causal_prefixes) for name in shapes) else "AutoModel"


def options_of_base(opener: str, shapes: Mapping[str, torch.Size]) -> dict[str, Any]:
    """Options for opening a base model: for a classifier the number of labels in the adapter's head."""
    if not opener.endswith("Classification"):
        return {}
    labels = [shapes[f"{head}.weight"][0] for head in HEADS if f"{head}.weight" in shapes]
    return {"num_labels": labels[0]} if labels else {}


# --- opening ------------------------------------------------------------------------------------------------------


def require_peft(where: Path | str) -> None:
    """ValueError where the package peft is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError as cause:
        raise ValueError(f"{where}: an adapter requires the package peft: pip install peft") from cause


def with_adapter(
    base: nn.Module, folder: Path, shapes: Mapping[str, torch.Size]
) -> tuple[nn.Module, tuple[str, ...]]:
    """PEFT's network of a base and a folder's adapter, not yet merged, and notes about changes of the base.

    Raises:
        ValueError: a tensor of the adapter has no place in the base, or one that the adapter requires is not in its
            file.
    """
    import peft

    notes = _resize(base, folder, shapes)
    how: dict[str, Any] = {
        "torch_device": "cpu",
        "key_mapping": getattr(base, "_checkpoint_conversion_mapping", {}),
    }
    try:
        with _without_warnings():
            network = peft.PeftModel.from_pretrained(base, str(folder), **how)
            report = network.load_adapter(
                str(folder), "default", **how
            )  # which `from_pretrained` does not give
            adapter_state = peft.get_peft_model_state_dict(network, save_embedding_layers=False)
    except Exception as cause:  # of many kinds: the files may be damaged anywhere, or belong to another base
        raise ValueError(f"{folder}: its adapter does not fit its base: {_one_line(cause)}") from cause
    biases = {_base_name(name) for name in adapter_state if name.endswith(".bias")} - set(shapes)
    missing = sorted({name for name in report.missing_keys if not SHARED.search(name)} | biases)
    unused = sorted(report.unexpected_keys)
    if missing or unused:
        counts = [
            f"{len(names)} {what}, first {names[0]!r}"
            for names, what in (
                (missing, "tensors that it requires are missing"),
                (unused, "have no place there"),
            )
            if names
        ]
        raise ValueError(
            f"{folder}: its adapter does not fit its base, {type(base).__name__}: {'; '.join(counts)}; it was trained "
            "on another base or class, or its file is incomplete"
        )
    return network, notes


def _resize(base: nn.Module, folder: Path, shapes: Mapping[str, torch.Size]) -> tuple[str, ...]:
    """Resize a base's embeddings to the number of tokens of the adapter's embeddings; returns notes about it."""
    ends = {
        name: module
        for name, module in base.named_modules()
        if module in (base.get_input_embeddings(), base.get_output_embeddings())  # type: ignore[operator]
    }
    names = {f"{name}.weight": getattr(module, "weight", None) for name, module in ends.items()}
    rows = {name: shapes[name][0] for name in names if name in shapes}
    before = {name: weight.shape[0] for name, weight in names.items() if weight is not None}
    sizes = set(rows.values()) - set(before.values())
    if not sizes:
        return ()
    tied = len({id(weight) for weight in names.values()}) == 1
    if len(set(rows.values())) > 1 or not (tied or set(rows) == set(names)):
        lacks = sorted(set(names) - set(rows))
        raise ValueError(
            f"{folder}: its adapter has another vocabulary than its base ({max(before.values())} tokens), "
            f"{', '.join(f'{name} {n}' for name, n in rows.items())}, "
            + (f"and not the new rows of {lacks[0]}" if lacks else "and no one number of tokens")
        )
    (n,) = sizes
    with _without_warnings():
        base.resize_token_embeddings(n, mean_resizing=False)  # type: ignore[operator]
    return (f"vocabulary of {n} tokens from the adapter, its base has {max(before.values())}",)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress PEFT's warnings, which are errors or notes here, and progress bars."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _one_line(cause: Exception) -> str:
    """The message of an error in one line of at most 400 characters."""
    text = " ".join(str(cause).split())
    return f"it lacks {text}" if isinstance(cause, KeyError) else text[:400]


# --- live networks ------------------------------------------------------------------------------------------------


def adapters_of(network: nn.Module) -> Mapping[str, object]:
    """The configs of a live network's adapters, by adapter name; empty where it has none."""
    if "peft" not in sys.modules:  # nothing of it can be in the network then
        return {}
    configs = getattr(network, "peft_config", None)
    if isinstance(configs, Mapping) and any(hasattr(config, "peft_type") for config in configs.values()):
        return dict(configs)
    return {name: None for layer in _layers(network) for name in layer.active_adapters}


def inner(network: nn.Module) -> nn.Module:
    """The transformers network inside a PEFT network, with the adapters in its layers."""
    base = network.get_base_model() if hasattr(network, "get_base_model") else network  # type: ignore[operator]
    assert isinstance(base, nn.Module)
    return base


def merge_live(network: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """A copy of a live network, without hooks and with its active adapters merged (`merged`), and notes about it."""
    return merged(bare_copy(network, {}), "the live model")


# --- merging ------------------------------------------------------------------------------------------------------


def merged(network: nn.Module, into: str) -> tuple[nn.Module, tuple[str, ...]]:
    """A network with its active adapters merged into its matrices, in place, and notes about the merge.

    Adapters that are disabled or inactive are left out, as in the network's own passes. Matrices that the base shares
    between layers are separated where an adapter changes one of them.

    Args:
        network: the network with its adapters.
        into: name of the base for the notes.

    Raises:
        ValueError: the adapters are no change of matrices (trained prompts), or what is merged gives other numbers.
    """
    kinds, active = adapters_of(network), _active_names(network)
    for name, config in kinds.items():
        _require_mergeable(network, name, config)
    try:
        with torch.no_grad(), _without_warnings():
            before = _probe_output(network)
            separate, same_change = (
                _separate_shared_matrices(network, kinds),
                _has_same_change_at_both_ends(network),
            )
            plain = _merged_base(network)
            untied = _retie_or_untie(plain, separate, same_change)
            after = _probe_output(plain)
    except Exception as cause:  # code of many kinds of adapters
        raise ValueError(
            f"{into}: an adapter ({', '.join(map(_adapter_kind, kinds.values()))}) cannot be merged: {_one_line(cause)}"
        ) from cause
    error, allowed = apart(after, before, (p.dtype for p in plain.parameters()))
    if not error <= allowed:
        raise ValueError(
            f"{into}: merged into its matrices, an adapter ({', '.join(map(_adapter_kind, kinds.values()))}) gives "
            f"other numbers than beside them, by {error:.1e} of the largest ({allowed:.0e} allowed); it is not opened"
        )
    return plain, (_merge_text(kinds, active, into), *untied)


def _layers(network: nn.Module) -> list[BaseTunerLayer]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in network.modules() if isinstance(module, BaseTunerLayer)]


def _active_names(network: nn.Module) -> list[str]:
    """The names of the adapters that a network's passes use."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    wrappers = (m for m in network.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper))
    on = [module for module in wrappers if not module.disable_adapters]
    return list(dict.fromkeys(name for m in on for name in (m.merged_adapters or m.active_adapters)))


def _adapter_kind(config: object) -> str:
    kind = getattr(config, "peft_type", "adapter")
    return str(getattr(kind, "value", kind))


def _require_mergeable(network: nn.Module, name: str, config: object) -> None:
    if hasattr(network, "get_base_model") and not hasattr(network.base_model, "merge_and_unload"):
        raise ValueError(f"an adapter of type {_adapter_kind(config)} changes no matrix and cannot be merged")
    if getattr(config, "alora_invocation_tokens", None):
        raise ValueError(
            f"adapter {name!r} is an activated LoRA: it changes what comes after its invocation tokens alone, which no "
            "matrix does, and cannot be merged"
        )


def _probe_output(network: nn.Module) -> Float[Tensor, "..."]:
    """The output of a network for a few random tokens: logits, or the last hidden states where it has no head."""
    base = inner(network)
    size = base.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(size, (1, PROBED), generator=draw).to(next(base.parameters()).device)
    pair = {"decoder_input_ids": tokens} if base.config.is_encoder_decoder else {}  # type: ignore[union-attr]
    output = network(input_ids=tokens, **pair)
    values = next(
        output[key] for key in ("logits", "prediction_logits", "last_hidden_state") if key in output
    )
    assert isinstance(values, Tensor)
    return values


def _separate_shared_matrices(network: nn.Module, kinds: Mapping[str, object]) -> list[nn.Parameter]:
    """Copy a shared matrix for each of its layers where an adapter changes one of them; returns those matrices.

    All shared matrices are copied where an adapter repeats layers of its base (`layer_replication`).
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners[id(parameter)].append((module, name))
    repeated = any(getattr(config, "layer_replication", None) for config in kinds.values())
    adapted = {id(module) for layer in _layers(network) for module in layer.get_base_layer().modules()}
    were_shared = []
    for places in owners.values():
        if len(places) > 1 and (repeated or any(id(module) in adapted for module, _ in places)):
            shared = places[0][0]._parameters[places[0][1]]
            assert shared is not None
            were_shared.append(shared)
            for module, name in places[1:]:
                module._parameters[name] = nn.Parameter(shared.detach().clone(), requires_grad=False)
    return were_shared


def _merged_base(network: nn.Module) -> nn.Module:
    """The transformers network inside a PEFT network, with every adapted layer replaced by its merged layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    base = inner(network)
    merged_layers: dict[int, nn.Module] = {}
    done: tuple[str, ...] = ()
    for name, module in list(base.named_modules(remove_duplicate=False)):
        if name.startswith(done) or not isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            continue
        parent, _, last = name.rpartition(".")
        if id(module) not in merged_layers:
            merged_layers[id(module)] = _merged_layer(module)
        setattr(base.get_submodule(parent), last, merged_layers[id(module)])
        done = (*done, f"{name}.")
    if hasattr(base, "peft_config"):
        del base.peft_config
    return base.eval()


def _merged_layer(module: object) -> nn.Module:
    """An adapted layer as a plain layer: active adapters are merged, inactive ones removed."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    layer = module
    while True:
        if isinstance(layer, ModulesToSaveWrapper):
            names = layer.active_adapters
            on = not layer.disable_adapters and names and all(name in layer.modules_to_save for name in names)
            layer = layer.modules_to_save[names[0]] if on else layer.original_module
        elif isinstance(layer, TrainableTokensWrapper):
            layer = layer.token_adapter
        elif isinstance(layer, BaseTunerLayer):
            off = layer.disable_adapters
            if off and layer.merged:
                layer.unmerge()
            merge = not off and not layer.merged
            if hasattr(layer, "unload_and_optionally_merge_module"):
                layer = layer.unload_and_optionally_merge_module(
                    merge=merge, safe_merge=True, adapter_names=None
                )
                continue
            if merge:
                layer.merge(safe_merge=True)
            layer = layer.base_layer  # type: ignore[attr-defined]
        else:
            assert isinstance(layer, nn.Module)
            return layer


def _has_same_change_at_both_ends(network: nn.Module) -> bool:
    """Whether an adapter adds one and the same matrix to the embedding and the unembedding, up to rounding.

    Each is computed as a product of its own, which may be rounded differently.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = inner(network)
    ends = base.get_input_embeddings(), base.get_output_embeddings()  # type: ignore[operator]
    if not all(isinstance(end, BaseTunerLayer) and hasattr(end, "get_delta_weight") for end in ends):
        return False
    first, last = ends
    if first.active_adapters != last.active_adapters:
        return False
    pairs = [[end.get_delta_weight(name) for end in ends] for name in first.active_adapters]
    return all(a.shape == b.shape and _rounding_apart(a, b) for a, b in pairs)


def _rounding_apart(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors differ by at most 16 eps of the largest entry, as sums in different order do."""
    allowed = 16 * torch.finfo(a.dtype).eps * float(a.abs().max())
    return bool((a - b).abs().max() <= allowed)


def _retie_or_untie(network: nn.Module, shared: Sequence[nn.Parameter], same_change: bool) -> tuple[str, ...]:
    """Tie embedding and unembedding again if they are still equal; else set the config to untied and return a note.

    Args:
        shared: the matrices that were shared before the merge.
        same_change: whether the adapter adds the same matrix to both.
    """
    first, last = network.get_input_embeddings(), network.get_output_embeddings()  # type: ignore[operator]
    if last is None or not any(first.weight is each or last.weight is each for each in shared):
        return ()
    if torch.equal(first.weight, last.weight) or (same_change and _rounding_apart(first.weight, last.weight)):
        last.weight = first.weight
        return ()
    config = network.config
    for each in (config, config.get_text_config()):  # type: ignore[union-attr, operator]
        setattr(each, "tie_word_embeddings", False)  # noqa: B010
    return ("embedding and unembedding, tied in the base, are apart: the adapter changes one of them",)


def _merge_text(kinds: Mapping[str, object], active: Sequence[str], into: str) -> str:
    """The note about the adapters that were merged, and about those that are inactive."""
    of_each = []
    for name in active:
        config = kinds.get(name)
        r = getattr(config, "r", 0)  # some kinds have none, or say 0
        rank = f", rank {r}" if r else ""
        layers = getattr(config, "layer_replication", None)
        of_each.append(f"{_adapter_kind(config)} {name!r}{rank}{f', layers {layers}' if layers else ''}")
    if not active:
        return "adapters, which are switched off, left out"
    off = [repr(name) for name in kinds if name not in active]
    inactive = f"; not active, left out: {', '.join(off)}" if off else ""
    return f"adapter merged into {into}: {'; '.join(of_each)}{inactive}"
