"""TransformerLens 3 on the native model: code written for `HookedTransformer` runs with this import instead.

```python
from interp.compat.transformer_lens import HookedTransformer, HookedTransformerConfig

model = HookedTransformer.from_pretrained("gpt2")
logits, cache = model.run_with_cache("The cat sat")
```

Names, arguments, shapes and labels are those of TransformerLens 3.9. What is not offered says where it is natively.
"""

import importlib
from typing import Any

from interp.compat.transformer_lens.install import NOT_OFFERED, expose, instead
from interp.core.wording import nearest

_WHERE = {
    "HookedTransformer": "hooked_transformer", "HookedTransformerConfig": "config", "HookedRootModule": "root_module",
    "ActivationCache": "activation_cache", "FactoredMatrix": "factored_matrix", "SVDInterpreter": "svd_interpreter",
    "TransformerLensKeyValueCache": "cache", "TransformerLensKeyValueCacheEntry": "cache", "HookPoint": "hook_points",
}  # fmt: skip
_MODULES = {
    **{
        name: name
        for name in (
            "components", "config", "evals", "factories", "head_detector", "hook_points", "loading_from_pretrained",
            "patching", "train", "utils",
        )
    },
    "conversion_utils": "conversions", "loading": "loading_from_pretrained", "tools": "direct_path_patching",
    "supported_models": "loading_from_pretrained", "utilities": "utils",
}  # fmt: skip
__all__ = [*_WHERE, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    if name in NOT_OFFERED:
        raise ImportError(instead(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; {nearest(name, __all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


expose()
