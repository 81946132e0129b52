"""`install()`: from then on `import transformer_lens` gives this package, for libraries that cannot be edited.

Nothing is imported until somebody imports `transformer_lens`. Then its module names are aliases of ours: the same
module objects, so a class is the same class under both names.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import MappingProxyType, ModuleType

from interp.core.shapes import nearest

THEIRS = "transformer_lens"
OURS = "interp.compat.transformer_lens"

_COMPONENTS = """
    abstract_attention attention embed grouped_query_attention layer_norm layer_norm_pre mlps mlps.can_be_used_as_mlp
    mlps.gated_mlp mlps.mlp mlps.moe pos_embed rms_norm rms_norm_pre transformer_block unembed
"""
_UTILITIES = """
    activation_functions attribute_utils components_utils defaults_utils devices exploratory_utils gpu_utils hf_utils
    initialization_utils library_utils lm_utils logits_utils matrix parameter_swap slice tensors tokenize_utils
"""
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "ActivationCache": "activation_cache",
        "FactoredMatrix": "factored_matrix",
        "HookedRootModule": "root_module",
        "HookedTransformer": "hooked_transformer",
        "HookedTransformerConfig": "config",
        "SVDInterpreter": "svd_interpreter",
        "cache": "cache",
        "cache.key_value_cache": "cache",
        "cache.key_value_cache_entry": "cache",
        "components": "components",
        **{f"components.{name}": "components" for name in _COMPONENTS.split()},
        "config": "config",
        "config.hooked_transformer_config": "config",
        "evals": "evals",
        "head_detector": "head_detector",
        "hook_points": "hook_points",
        "loading": "loading_from_pretrained",
        "loading_from_pretrained": "loading_from_pretrained",
        "past_key_value_caching": "cache",
        "patching": "patching",
        "supported_models": "model_names",
        "train": "train",
        "utilities": "utils",
        **{f"utilities.{name}": "utils" for name in _UTILITIES.split()},
        "utils": "utils",
        "weight_processing": "processing",
    }
)
"""TransformerLens' module names (of 2 and 3) and the module of ours that has what they have."""

_LOAD = "load the model with interp.HookedTransformer.from_pretrained"
NOT_OFFERED: Mapping[str, str] = MappingProxyType(
    {
        "BertNextSentencePrediction": _LOAD,
        "HookedAudioEncoder": "audio models are not supported",
        "HookedEncoder": _LOAD,
        "HookedEncoderDecoder": "load the model with interp.HookedEncoderDecoder",
        "TransformerBridge": f"{_LOAD}, or take a live one over with interp.compat.from_bridge",
        "TransformerBridgeConfig": "interp.compat.from_bridge takes over a TransformerBridge",
        "benchmarks": "measure a model against its reference with model.verify()",
        "conversion_utils": "interp.families reads checkpoints",
        "factories": "interp.families reads checkpoints",
        "lit": "interp.report draws results",
        "model_bridge": f"{_LOAD}, or take a live bridge over with interp.compat.from_bridge",
        "pretrained": "interp.families reads checkpoints",
        "tools": "interp.patch, interp.attribute, interp.logit_lens, ... do what the tools do",
    }
)
"""TransformerLens' names that are not here, and the native way."""


def instead(name: str) -> str:
    """What to say of a TransformerLens name that is not offered: the native way, or the nearest name."""
    known = NOT_OFFERED.get(name.partition(".")[0])
    return f"{THEIRS}.{name} is not offered by {OURS}: {known or nearest(name, ALIASES)}"


def expose(root: str) -> None:
    """Make TransformerLens' module names importable under `root`.

    They are entered into `sys.modules` at once: were they found one by one, each import of `HookedTransformer` would
    put the module where the package has the class of that name.
    """
    sys.modules |= {f"{root}.{name}": import_module(f"{OURS}.{ours}") for name, ours in ALIASES.items()}


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        """An empty module, soon replaced."""

    def exec_module(self, module: ModuleType) -> None:
        package = import_module(OURS)
        expose(THEIRS)
        sys.modules[THEIRS] = package


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, name = fullname.partition(".")
        if root != THEIRS:
            return None
        if not name:
            return spec_from_loader(THEIRS, _Loader())
        # Without `name=`, or `from transformer_lens import ...` would replace the message by its own.
        raise ModuleNotFoundError(instead(name))


_FINDER = _Finder()


def install() -> None:
    """Let `import transformer_lens` and its submodules resolve to this package, until `uninstall()`.

    Names that are not offered raise ModuleNotFoundError with the native way. A second call does nothing.
    Errors: RuntimeError if the real TransformerLens is already imported: whoever has its classes keeps them.

    In a fresh process: `install()`, then `from transformer_lens.utils import get_act_name`.
    """
    if _FINDER in sys.meta_path:
        return
    if THEIRS in sys.modules:
        raise RuntimeError(
            f"{THEIRS} is already imported from {getattr(sys.modules[THEIRS], '__file__', None)}: call install() "
            "before anything imports it, in a fresh process"
        )
    sys.meta_path.insert(0, _FINDER)


def uninstall() -> None:
    """Undo `install()`: the next `import transformer_lens` looks for the real one; what was imported stays as it is."""
    if _FINDER not in sys.meta_path:
        return
    sys.meta_path.remove(_FINDER)
    for name in [name for name in sys.modules if name == THEIRS or name.startswith(f"{THEIRS}.")]:
        del sys.modules[name]
