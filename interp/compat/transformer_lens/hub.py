"""What TransformerLens downloads: refused, with what to use instead. And small questions about libraries."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor, nn


def download_file_from_hf(repo_name: str, file_name: str, *args: object, **kwargs: object) -> NoReturn:
    """Not offered: NotImplementedError naming the native way."""
    raise NotImplementedError(
        f"downloading {file_name!r} of {repo_name!r} is not offered here; use huggingface_hub.hf_hub_download, or "
        "interp.HookedTransformer.from_pretrained for a model"
    )


def get_dataset(dataset_name: str, **kwargs: object) -> NoReturn:
    """Not offered: NotImplementedError naming the native way."""
    raise NotImplementedError(
        f"the dataset {dataset_name!r} is not downloaded here; use datasets.load_dataset, or a local text file with "
        "interp.text_file"
    )


def clear_huggingface_cache() -> NoReturn:
    """Not offered: NotImplementedError naming the native way."""
    raise NotImplementedError(
        "use `hf cache prune`, or huggingface_hub.scan_cache_dir().delete_revisions(...)"
    )


def get_rotary_pct_from_config(config: object) -> float:
    """The share of each head that is rotated, by a Hugging Face config: 1.0 where it says nothing."""
    if (share := getattr(config, "rotary_pct", None)) is not None:
        return float(share)
    rope = getattr(config, "rope_parameters", None)
    return float(rope.get("partial_rotary_factor", 1.0)) if isinstance(rope, dict) else 1.0


def select_compatible_kwargs(
    kwargs_dict: Mapping[str, object], callable: Callable[..., object]
) -> dict[str, object]:
    """The entries that are positional parameters of the function."""
    names = inspect.getfullargspec(callable).args
    return {name: value for name, value in kwargs_dict.items() if name in names}


def is_library_available(name: str) -> bool:
    """Whether a package is imported or could be, found out without importing it."""
    return name in sys.modules or importlib.util.find_spec(name) is not None


@contextmanager
def temporarily_swap_parameter(parameter: nn.Parameter, new_value: Tensor) -> Iterator[nn.Parameter]:
    """The parameter with other values within the `with`; written in place, so everybody who holds it sees them.

    Errors: TypeError for what is no parameter or no plain tensor, ValueError for another shape or dtype.
    """
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(f"parameter must be a torch.nn.Parameter; got {type(parameter).__name__}")
    if isinstance(new_value, nn.Parameter) or not isinstance(new_value, Tensor):
        raise TypeError(f"new_value must be a plain torch.Tensor; got {type(new_value).__name__}")
    if new_value.shape != parameter.shape:
        raise ValueError(
            f"new_value shape {tuple(new_value.shape)} must match parameter shape {tuple(parameter.shape)}"
        )
    if new_value.dtype != parameter.dtype:
        raise ValueError(f"new_value dtype {new_value.dtype} must match parameter dtype {parameter.dtype}")
    before = parameter.detach().clone()
    try:
        with torch.no_grad():
            parameter.copy_(new_value)
        yield parameter
    finally:
        with torch.no_grad():
            parameter.copy_(before)
