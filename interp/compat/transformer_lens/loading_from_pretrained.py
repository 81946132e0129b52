"""Names, configs and state dicts of pretrained models, under TransformerLens' names, read by `interp.families`.

Whatever `interp.HookedTransformer.from_pretrained` loads is loaded: a hub name, a local folder or file, a demo, a live
Hugging Face model. Nothing from a checkpoint is executed.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from interp import families, zoo
from interp.compat.hooked_config import WIDE_QK_NORM
from interp.compat.hooked_export import to_hooked_state
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.core.wording import nearest
from interp.families.hub import located
from interp.model.config import MLP, Learned, ModelConfig
from interp.model.transformer import Transformer

_PYTHIAS = {
    "14m": "", "31m": "", "70m": "19m", "160m": "125m", "410m": "350m", "1b": "800m", "1.4b": "1.3b",
    "2.8b": "2.7b", "6.9b": "6.7b", "12b": "13b",
}  # fmt: skip
"""Sizes, and what they were called before 2023."""
_STORIES = {
    "1M": "1M", "3M": "3M", "8M": "8M", "28M": "28M", "33M": "33M", "1L-21M": "1Layer-21M", "2L-33M": "2Layers-33M",
    **{f"instruct-{size}": f"Instruct-{size}" for size in ("1M", "3M", "8M", "28M", "33M")},
    "instruct-1L-21M": "Instuct-1Layer-21M", "instruct-2L-33M": "Instruct-2Layers-33M",
}  # fmt: skip
"""Sizes of TinyStories, and what the hub calls them, one misspelt."""
_CRFM = {
    "a": ("alias", "arwen", 21), "b": ("battlestar", "beren", 49), "c": ("caprica", "celebrimbor", 81),
    "d": ("darkmatter", "durin", 343), "e": ("expanse", "eowyn", 777),
}  # fmt: skip
"""Stanford's GPT-2s: the small and the medium one of each seed."""
_SAME = {
    "EleutherAI": ("gpt-neo-125M", "gpt-neo-1.3B", "gpt-neo-2.7B", "gpt-neox-20b"),
    "facebook": ("opt-125m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b", "opt-30b", "opt-66b"),
    "bigscience": ("bloom-560m", "bloom-1b1", "bloom-1b7", "bloom-3b", "bloom-7b1"),
    "google": (
        "gemma-2b", "gemma-2b-it", "gemma-7b", "gemma-7b-it", "gemma-2-2b", "gemma-2-2b-it", "gemma-2-9b",
        "gemma-2-9b-it", "gemma-2-27b", "gemma-2-27b-it", "gemma-3-270m", "gemma-3-270m-it", "gemma-3-1b-pt",
        "gemma-3-1b-it", "gemma-3-4b-pt", "gemma-3-4b-it", "gemma-3-12b-pt", "gemma-3-12b-it", "gemma-3-27b-pt",
        "gemma-3-27b-it", "medgemma-4b-pt", "medgemma-4b-it", "medgemma-27b-it", "medgemma-27b-text-it",
    ),
    "Qwen": (
        "Qwen2-0.5B", "Qwen2-1.5B", "Qwen2-7B", "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-7B",
        "Qwen2.5-14B", "Qwen2.5-32B", "Qwen2.5-72B", "Qwen2-0.5B-Instruct", "Qwen2-1.5B-Instruct",
        "Qwen2-7B-Instruct", "Qwen2.5-0.5B-Instruct", "Qwen2.5-1.5B-Instruct", "Qwen2.5-3B-Instruct",
        "Qwen2.5-7B-Instruct", "Qwen2.5-14B-Instruct", "Qwen2.5-32B-Instruct", "Qwen2.5-72B-Instruct",
        *(f"Qwen1.5-{size}{kind}" for size in ("0.5B", "1.8B", "4B", "7B", "14B") for kind in ("", "-Chat")),
        "Qwen3-0.6B", "Qwen3-0.6B-Base", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B",
    ),
    "microsoft": ("phi-1", "phi-1_5", "phi-2", "phi-4"),
    "01-ai": ("Yi-6B", "Yi-6B-Chat", "Yi-34B", "Yi-34B-Chat"),
    "ai-forever": ("mGPT",),
    "mistralai": ("Mistral-Nemo-Base-2407",),
    "openai": ("gpt-oss-20b",),
    "stabilityai": tuple(f"stablelm-{kind}-alpha-{size}" for kind in ("base", "tuned") for size in ("3b", "7b")),
}  # fmt: skip
"""Models by owner with a short name that is the hub's name without the owner."""
_OTHERS = {
    "gpt2": ["gpt2-small"],
    "distilgpt2": ["distillgpt2", "distill-gpt2", "distil-gpt2", "gpt2-xs"],
    "EleutherAI/gpt-neo-125M": ["gpt-neo-small", "neo-small", "neo"],
    "EleutherAI/gpt-neo-1.3B": ["gpt-neo-medium", "neo-medium"],
    "EleutherAI/gpt-neo-2.7B": ["gpt-neo-large", "neo-large"],
    "EleutherAI/gpt-j-6B": ["gpt-j-6B", "gpt-j", "gptj"],
    "EleutherAI/gpt-neox-20b": ["gpt-neox", "neox"],
    "EleutherAI/pythia-70m": ["pythia"],
    "EleutherAI/pythia-70m-v0": ["pythia-v0"],
    "facebook/opt-125m": ["opt-small", "opt"],
    "facebook/opt-1.3b": ["opt-medium"],
    "facebook/opt-2.7b": ["opt-large"],
    "facebook/opt-6.7b": ["opt-xl"],
    "facebook/opt-13b": ["opt-xxl"],
    "facebook/opt-30b": ["opt-xxxl"],
    "facebook/opt-66b": ["opt-xxxxl"],
    "codellama/CodeLlama-7b-hf": ["CodeLlamallama-2-7b"],
    "codellama/CodeLlama-7b-Python-hf": ["CodeLlama-7b-python"],
    "codellama/CodeLlama-7b-Instruct-hf": ["CodeLlama-7b-instruct"],
    "meta-llama/Llama-2-7b-hf": ["Llama-2-7b"],
    "meta-llama/Llama-2-7b-chat-hf": ["Llama-2-7b-chat"],
    "meta-llama/Llama-2-13b-hf": ["Llama-2-13b"],
    "meta-llama/Llama-2-13b-chat-hf": ["Llama-2-13b-chat"],
    "meta-llama/Llama-2-70b-chat-hf": ["Llama-2-70b-chat", "meta-llama-2-70b-chat-hf"],
    "microsoft/Phi-3-mini-4k-instruct": ["phi-3"],
    "mistralai/Mistral-7B-v0.1": ["mistral-7b"],
    "mistralai/Mistral-7B-Instruct-v0.1": ["mistral-7b-instruct"],
    "mistralai/Mixtral-8x7B-v0.1": ["mixtral", "mixtral-8x7b"],
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ["mixtral-instruct", "mixtral-8x7b-instruct"],
    "openai/gpt-oss-20b": ["gpt-oss"],
    "Qwen/QwQ-32B-Preview": ["qwen-32b-preview"],
    **{f"stabilityai/stablelm-{kind}-alpha-{size}": [f"stablelm-{kind}-{size}"]
       for kind in ("base", "tuned") for size in ("3b", "7b")},
    "allenai/OLMo-2-1124-7B": ["olmo-2-7b"],
    "allenai/OLMo-2-0425-1B": ["olmo-2-1b"],
}  # fmt: skip
_STATED = ("gpt2-medium", "gpt2-large", "gpt2-xl")
_LLAMAS = (
    "Meta-Llama-3-8B", "Meta-Llama-3-70B", "Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.2-1B", "Llama-3.2-3B",
    "Llama-3.3-70B",
)  # fmt: skip
"""Models of Meta that have no short name."""


def _aliases() -> dict[str, list[str]]:
    llamas = [f"meta-llama/{name}{kind}" for name in _LLAMAS for kind in ("", "-Instruct")]
    stated = (*zoo.DEMOS, "gpt2", *_STATED, *llamas, "mistralai/Mistral-Small-24B-Base-2501")
    found: dict[str, list[str]] = {name: [] for name in stated}
    for size, old in _PYTHIAS.items():
        for kind in ("", "-deduped", "-v0", "-deduped-v0") if old else ("",):
            names = [f"pythia-{s}{kind}" for s in (size, old) if s]
            found[f"EleutherAI/{names[0]}"] = [*names, *(f"EleutherAI/{n}" for n in names[1:])]
    for seed in (1, 2, 3):
        names = [f"pythia-{size}-seed{seed}" for size in ("160m", "125m")]
        found[f"EleutherAI/{names[0]}"] = [*names, f"EleutherAI/{names[1]}"]
    for letter, (small, medium, number) in _CRFM.items():
        for size, name, also in (("small", small, "mistral-small"), ("medium", medium, "medium-small")):
            full = f"{name}-gpt2-{size}-x{number}"
            others = (f"stanford-gpt2-{size}", f"gpt2-{also}", f"gpt2-stanford-{size}")
            found[f"stanford-crfm/{full}"] = [full, *(f"{other}-{letter}" for other in others)]
    for ours, theirs in _STORIES.items():
        found[f"roneneldan/TinyStories-{theirs}"] = [f"tiny-stories-{ours}"]
    for owner, models in _SAME.items():
        found |= {f"{owner}/{model}": [model] for model in models}
    for name in ("gpt2", *_STATED):
        found[name].append(f"openai-community/{name}")
    for name, more in _OTHERS.items():
        found[name] = found.get(name, []) + more
    return dict(sorted(found.items(), key=lambda pair: pair[0].casefold()))


MODEL_ALIASES: dict[str, list[str]] = _aliases()
"""The hub's name -> the short names that mean it."""
OFFICIAL_MODEL_NAMES: list[str] = list(MODEL_ALIASES)
"""Models with a short name, and the embedded demos; by far not all that load."""

TRANSFORMER_LENS_ONLY = ("gelu-", "solu-", "attn-only-", "redwood_attn", "othello-gpt", "NeelNanda/", "Baidicoot/",
                         "ArthurConmy/")  # fmt: skip
"""Beginnings of names of models that exist as TransformerLens' own files only."""

PYTHIA_CHECKPOINTS = [0, *(2**n for n in range(10)), *range(1000, 143_001, 1000)]
PYTHIA_V0_CHECKPOINTS = list(range(1000, 143_001, 1000))
STANFORD_CRFM_CHECKPOINTS = [
    *range(0, 100, 10), *range(100, 2000, 50), *range(2000, 20_000, 100), *range(20_000, 400_001, 1000),
]  # fmt: skip


__all__ = [
    "MODEL_ALIASES", "OFFICIAL_MODEL_NAMES", "PYTHIA_CHECKPOINTS", "PYTHIA_V0_CHECKPOINTS",
    "STANFORD_CRFM_CHECKPOINTS", "convert_hf_model_config", "convert_neel_model_config", "get_checkpoint_labels",
    "get_num_params_of_pretrained", "get_official_model_name", "get_pretrained_model_config",
    "get_pretrained_state_dict", "make_model_alias_map",
]  # fmt: skip
NO_BOS = ("gpt_neox", "bloom", "qwen2", "qwen3", "phi")
"""Model types with texts to which TransformerLens prepends no BOS by default."""
HARMLESS = (
    "trust_remote_code",
    "low_cpu_mem_usage",
    "use_safetensors",
    "attn_implementation",
    "local_files_only",
)
"""Options of Hugging Face's loader that change no weight; no remote code is run in any case."""
_log = logging.getLogger(__name__)


def make_model_alias_map() -> dict[str, str]:
    """Every short name and every name of the table, in lower case -> the hub's name."""
    pairs = [(alias, name) for name, more in MODEL_ALIASES.items() for alias in (name, *more)]
    return {alias.lower(): name for alias, name in pairs}


def get_official_model_name(model_name: str) -> str:
    """The hub's name of a model; a path, or an `owner/name` that is no alias, is returned as it is.

    Raises:
        ValueError: a bare name that is not in the table, or a model that only TransformerLens' own files hold.
    """
    known = make_model_alias_map()
    if model_name.startswith(TRANSFORMER_LENS_ONLY):
        raise ValueError(
            f"{model_name} exists as a file of TransformerLens' own only: download it and its config, and use "
            "HookedTransformer.load_hooked(file, config)"
        )
    if model_name.lower() in known:
        return known[model_name.lower()]
    if "/" in model_name or Path(model_name).exists():
        return model_name
    raise ValueError(
        f"{model_name} not found: give a hub name (owner/name), a folder, or one of the short names of "
        f"loading_from_pretrained.MODEL_ALIASES ({nearest(model_name, list(known))})"
    )


def get_pretrained_model_config(
    model_name: str,
    hf_cfg: dict[str, Any] | None = None,
    checkpoint_index: int | None = None,
    checkpoint_value: int | None = None,
    fold_ln: bool = False,
    device: str | torch.device | None = None,
    n_devices: int = 1,
    default_prepend_bos: bool | None = None,
    dtype: torch.dtype = torch.float32,
    first_n_layers: int | None = None,
    n_ctx: int | None = None,
    **kwargs: Any,
) -> HookedTransformerConfig:
    """The config of a pretrained model; no weight is read.

    Args:
        hf_cfg: `hf_model.config.to_dict()` of a live model, which then says everything; model_name only names it.

    Raises:
        ValueError: a model that cannot be expressed, or that TransformerLens does not know; the message names what.
    """
    check_options(kwargs)
    name = _named(model_name) if hf_cfg else get_official_model_name(model_name)
    fields: dict[str, Any] = _checkpoint(name, checkpoint_index, checkpoint_value)
    values = hf_cfg or _values(name, kwargs.get("revision") or revision_of(name, fields["checkpoint_value"]))
    fields |= _fields(values)
    fields |= {
        "model_name": name.rpartition("/")[2], "tokenizer_name": None if hf_cfg else name, "device": device,
        "n_devices": n_devices, "dtype": dtype,
        "default_prepend_bos": values.get("model_type") not in NO_BOS,
    }  # fmt: skip
    if default_prepend_bos is not None:
        fields["default_prepend_bos"] = default_prepend_bos
    if fold_ln and fields["normalization_type"] in ("LN", "RMS") and fields["original_architecture"] not in (
        "Olmo2ForCausalLM", "Olmo3ForCausalLM",
    ):  # fmt: skip
        fields["normalization_type"] += "Pre"
    return HookedTransformerConfig.from_dict(fields | _cut(fields, first_n_layers, n_ctx))


def get_pretrained_state_dict(
    official_model_name: str,
    cfg: HookedTransformerConfig,
    hf_model: nn.Module | None = None,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """The weights of a pretrained model in TransformerLens' layout, neither folded nor centred.

    `cfg` says how many layers and embedded positions are kept, and which checkpoint is meant.
    """
    check_options(kwargs)
    dtype = kwargs.get("torch_dtype", dtype)
    live = hf_model is not None
    name = official_model_name if live else get_official_model_name(official_model_name)
    revision = kwargs.get("revision") or revision_of(name, cfg.checkpoint_value)
    model = without_offset(_native(name, hf_model, dtype, revision))
    state, _ = to_hooked_state(model)
    kept = {
        n: w for n, w in state.items() if not n.startswith("blocks.") or int(n.split(".")[1]) < cfg.n_layers
    }
    if "pos_embed.W_pos" in kept:
        kept["pos_embed.W_pos"] = kept["pos_embed.W_pos"][: cfg.n_ctx]
    return {n: w.to(dtype) for n, w in kept.items()}


def get_num_params_of_pretrained(model_name: str) -> int:
    """How many weights attention and MLPs have, without biases, norms and embeddings."""
    count = get_pretrained_model_config(model_name).n_params
    assert count is not None
    return count


def get_checkpoint_labels(model_name: str, **kwargs: Any) -> tuple[list[int], str]:
    """The training steps at which a model was saved, and "step"; ValueError for a model without checkpoints."""
    name = get_official_model_name(model_name)
    if name in zoo.DEMOS and zoo.revisions(name):
        return [int(revision.removeprefix("step")) for revision in zoo.revisions(name)], "step"
    if name.startswith("stanford-crfm/"):
        return STANFORD_CRFM_CHECKPOINTS, "step"
    if name.startswith("EleutherAI/pythia"):
        return (PYTHIA_V0_CHECKPOINTS if "v0" in name else PYTHIA_CHECKPOINTS), "step"
    raise ValueError(
        f"Model {name} is not checkpointed: from_pretrained(..., revision=) takes a branch, tag or step of any model"
    )


def convert_hf_model_config(model_name: str, **kwargs: Any) -> dict[str, Any]:
    """The fields of `get_pretrained_model_config`, as a dict."""
    return dict(get_pretrained_model_config(model_name, **kwargs).to_dict())


def convert_neel_model_config(official_model_name: str, **kwargs: Any) -> NoReturn:
    """Not offered: ValueError naming the native way."""
    raise ValueError(
        f"{official_model_name}: files of TransformerLens are read by HookedTransformer.load_hooked(file, config)"
    )


def _named(model_name: str) -> str:
    """The hub's name of a model, the name itself where the table has none."""
    return make_model_alias_map().get(model_name.lower(), model_name)


def revision_of(name: str, checkpoint_value: int | None) -> str | None:
    """The branch or tag in which a model's training checkpoint is stored."""
    if checkpoint_value is None:
        return None
    return f"{'checkpoint-' if name.startswith('stanford-crfm/') else 'step'}{checkpoint_value}"


def check_options(options: Mapping[str, object]) -> None:
    """ValueError naming the first option of Hugging Face's loader that is not understood here."""
    given = [key for key in options if key not in (*HARMLESS, "torch_dtype", "revision")]
    if given:
        raise ValueError(
            f"from_pretrained takes torch_dtype and revision beside its own arguments, got {given[0]}; load the model "
            "with transformers and give it as hf_model=, or set HF_HOME and HF_TOKEN for cache and access"
        )


def without_offset(model: Transformer) -> Transformer:
    """The model with its positions embedded from row 0 (OPT's begin at row 2)."""
    position = model.config.position
    if not isinstance(position, Learned) or position.offset == 0:
        return model
    with torch.device("meta"):
        plain = Transformer(replace(model.config, position=Learned()))
    state = model.state_dict()
    state["pos_embed.weight"] = state["pos_embed.weight"][position.offset :][: model.config.n_ctx]
    plain.load_state_dict(state, assign=True)
    return plain


def _native(name: str, hf_model: nn.Module | None, dtype: torch.dtype, revision: str | None) -> Transformer:
    """In float32 where a gamma that is stored as gamma - 1 would otherwise be rounded twice."""

    def load(kind: torch.dtype) -> Transformer:
        if hf_model is not None:
            return families.from_hf_model(hf_model, dtype=kind)
        if name in zoo.DEMOS:
            return zoo.load(name, revision=revision, dtype=kind)[0]
        return families.from_folder(located(name, revision, _hint()), dtype=kind)

    model = load(dtype)
    offset = getattr(model.config.norm, "unit_offset", False) and dtype.itemsize < 4
    return load(torch.float32) if offset else model


def _values(name: str, revision: str | None) -> dict[str, Any]:
    """The `config.json` of a model; a demo's own config under "model_type" interp."""
    if name in zoo.DEMOS:
        return {"model_type": "interp", **zoo.load(name)[0].config.to_dict()}
    path = located(name, revision, _hint())
    file = (path if path.is_dir() else path.parent) / "config.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The config's fields by way of a model without memory; which bias a gate has changes none of them."""
    _, config = families.config_of(values)
    if not isinstance(config, ModelConfig):
        raise ValueError(
            "one stack of layers is required; interp.HookedEncoderDecoder loads encoder-decoders"
        )
    if isinstance(config.mlp, MLP) and config.mlp.gated:
        config = replace(config, mlp=replace(config.mlp, bias=False))
    if isinstance(config.position, Learned):
        config = replace(config, position=Learned())
    with torch.device("meta"):
        _, fields = to_hooked_state(Transformer(config))
    named = values.get("architectures") or [None]
    if fields["original_architecture"] is None and named[0] not in (*WIDE_QK_NORM, "GptOssForCausalLM"):
        fields["original_architecture"] = named[0]
    return fields


def _cut(fields: Mapping[str, Any], first_n_layers: int | None, n_ctx: int | None) -> dict[str, Any]:
    """The fields that fewer layers or another context length change."""
    found: dict[str, Any] = {}
    if first_n_layers is not None:
        if not 0 < first_n_layers <= fields["n_layers"]:
            raise ValueError(f"first_n_layers must be in [1, {fields['n_layers']}], got {first_n_layers}")
        found["n_layers"] = first_n_layers
        if fields.get("attn_types"):
            found["attn_types"] = fields["attn_types"][:first_n_layers]
    if n_ctx is not None:
        if n_ctx > fields["n_ctx"] and fields["positional_embedding_type"] == "standard":
            raise ValueError(f"n_ctx must be at most {fields['n_ctx']}, the positions embedded, got {n_ctx}")
        if n_ctx > fields["n_ctx"]:
            _log.warning("n_ctx=%d is longer than the %d that the model was made for", n_ctx, fields["n_ctx"])
        found["n_ctx"] = n_ctx
    return found


def _checkpoint(name: str, index: int | None, value: int | None) -> dict[str, Any]:
    """The fields about a training checkpoint. Steps of models without a list of steps are taken as given."""
    fields = {"from_checkpoint": value is not None or index is not None, "checkpoint_value": value}
    if index is None and (value is None or Path(name).exists()):
        return fields
    labels, kind = get_checkpoint_labels(name)
    if index is not None:
        value = labels[index]
    elif value not in labels:
        raise AssertionError(f"Checkpoint value {value} is not in list of available checkpoints")
    assert value is not None
    return fields | {
        "checkpoint_value": value, "checkpoint_index": labels.index(value), "checkpoint_label_type": kind,
    }  # fmt: skip


def _hint() -> str:
    return f"demo models: {', '.join(zoo.DEMOS)}; short names: loading_from_pretrained.MODEL_ALIASES"
