"""TransformerLens' module names: under this package always, under `transformer_lens` itself after `install()`.

`interp.compat.transformer_lens.HookedTransformer` or `transformer_lens.utilities.slice` are aliases of modules of ours:
the same module objects, so a class is the same class under all names. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import MappingProxyType, ModuleType

from interp.core.boundary import public
from interp.core.wording import nearest

THEIRS = "transformer_lens"
OURS = "interp.compat.transformer_lens"

_COMPONENTS = """
    abstract_attention attention embed grouped_query_attention layer_norm layer_norm_pre mlps mlps.can_be_used_as_mlp
    mlps.gated_mlp mlps.mlp mlps.moe pos_embed rms_norm rms_norm_pre transformer_block unembed
"""
_UTILITIES = """
    activation_functions attribute_utils components_utils defaults_utils devices exploratory_utils gpu_utils
    initialization_utils library_utils lm_utils logits_utils matrix parameter_swap slice tensors tokenize_utils
    typed_module_list
"""
_CONVERSIONS = """
    conversion_utils conversion_utils.conversion_steps conversion_utils.conversion_steps.base_tensor_conversion
"""
_FACTORIES = "factories factories.activation_function_factory factories.mlp_factory"
_TOOLS = "tools tools.analysis tools.analysis.direct_path_patching"
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
        "config.transformer_lens_config": "config",
        **dict.fromkeys(_CONVERSIONS.split(), "conversions"),
        "evals": "evals",
        **dict.fromkeys(_FACTORIES.split(), "factories"),
        "head_detector": "head_detector",
        "hook_points": "hook_points",
        "loading": "loading_from_pretrained",
        "loading_from_pretrained": "loading_from_pretrained",
        "past_key_value_caching": "cache",
        "patching": "patching",
        "supported_models": "loading_from_pretrained",
        **dict.fromkeys(_TOOLS.split(), "direct_path_patching"),
        "train": "train",
        "utilities": "utils",
        **{f"utilities.{name}": "utils" for name in _UTILITIES.split()},
        "utilities.architectures": "processing",
        "utilities.attention": "components",
        "utilities.cache": "cache",
        "utilities.hf_utils": "hub",
        "utils": "utils",
        "weight_processing": "processing",
    }
)
"""TransformerLens' module names (of 2 and 3) and the module of this package with their contents."""

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
    """The message for a TransformerLens name that is not offered: the native way, or the nearest name."""
    known = NOT_OFFERED.get(name.partition(".")[0])
    return f"{THEIRS}.{name} is not offered by {OURS}: {known or nearest(name, ALIASES)}"


class _Loader(Loader):
    """Loader that returns a module of this package under another name."""

    def __init__(self, ours: str) -> None:
        self._ours = ours

    def create_module(self, spec: ModuleSpec) -> None:
        """An empty module, soon replaced."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(self._ours)


class _Finder(MetaPathFinder):
    """Finder of TransformerLens' module names under a root: `transformer_lens`, or this package."""

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(
        self, fullname: str, path: Iterable[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == self._root:
            return spec_from_loader(fullname, _Loader(OURS))
        if not fullname.startswith(f"{self._root}."):
            return None
        name = fullname.removeprefix(f"{self._root}.")
        if name in ALIASES:
            return spec_from_loader(fullname, _Loader(f"{OURS}.{ALIASES[name]}"))
        # Without `name=`, or `from transformer_lens import ...` would replace the message by its own.
        raise ModuleNotFoundError(instead(name))


class Package(ModuleType):
    """The package as a module object: a submodule with the name of a class does not take the class' place.

    `from transformer_lens import HookedTransformer` gives the class, also after `import
    transformer_lens.HookedTransformer`, though every import of a submodule writes it into its package.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in self.__dict__["_WHERE"]):
            super().__setattr__(name, value)


def expose() -> None:
    """Make TransformerLens' module names importable under this package; called once, when that is imported.

    Found last: a file of ours comes before an alias.
    """
    sys.modules[OURS].__class__ = Package
    sys.meta_path.append(_Finder(OURS))


_FINDER = _Finder(THEIRS)


@public()
def install() -> None:
    """Let `import transformer_lens` and its submodules resolve to this package, until `uninstall()`.

    Names that are not offered raise ModuleNotFoundError with the native way. A second call does nothing. In a fresh
    process: `install()`, then `from transformer_lens.utils import get_act_name`.

    Raises:
        RuntimeError: the real TransformerLens is already imported, and what has its classes would keep them.
    """
    if _FINDER in sys.meta_path:
        return
    if THEIRS in sys.modules:
        raise RuntimeError(
            f"{THEIRS} is already imported from {getattr(sys.modules[THEIRS], '__file__', None)}: call install() "
            "before anything imports it, in a fresh process"
        )
    sys.meta_path.insert(0, _FINDER)


@public()
def uninstall() -> None:
    """Undo `install()`: the next `import transformer_lens` looks for the real one; what was imported stays as it is."""
    if _FINDER not in sys.meta_path:
        return
    sys.meta_path.remove(_FINDER)
    for name in [name for name in sys.modules if name == THEIRS or name.startswith(f"{THEIRS}.")]:
        del sys.modules[name]
