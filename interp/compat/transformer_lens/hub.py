"""The Hugging Face hub under TransformerLens' names: files, patience, refusals. And small questions about libraries."""

import importlib.util
import inspect
import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor, nn

from interp.compat.transformer_lens.tokenization import keep_single_column

__all__ = [
    "call_hf_with_retry", "clear_huggingface_cache", "download_file_from_hf", "enable_hf_retry", "get_dataset",
    "get_hf_token", "get_rotary_pct_from_config", "is_library_available", "keep_single_column",
    "select_compatible_kwargs", "temporarily_swap_parameter",
]  # fmt: skip
Answer = TypeVar("Answer")
LONGEST_WAIT = 120.0
"""Seconds between two attempts, unless the server demands more."""
_log = logging.getLogger(__name__)


def call_hf_with_retry(
    func: Callable[..., Answer], *args: Any, max_attempts: int = 3, base_delay: float = 10.0, **kwargs: Any
) -> Answer:
    """`func(*args, **kwargs)`, called again after a pause while the hub answers 429 (too many requests).

    The pause: what the answer's `Retry-After` says, else base_delay 2^attempt seconds give or take a fifth, at most
    two minutes. Any other error is raised at once, and the 429 of the last attempt.
    """
    for attempt in range(max_attempts - 1):
        try:
            return func(*args, **kwargs)
        except Exception as error:
            answer = getattr(error, "response", None)
            if getattr(answer, "status_code", None) != 429:
                raise
            pause = min(base_delay * 2**attempt, LONGEST_WAIT) * (0.8 + 0.4 * random.random())
            pause = _asked_for(answer, pause)
            _log.warning("the hub answers 429 (attempt %d): asked again in %.1f s", attempt + 1, pause)
            time.sleep(pause)
    return func(*args, **kwargs)


def _asked_for(answer: object, otherwise: float) -> float:
    """The seconds that `Retry-After` names, if it names seconds."""
    try:
        return float((getattr(answer, "headers", None) or {})["Retry-After"])
    except (KeyError, TypeError, ValueError):
        return otherwise


def enable_hf_retry() -> None:
    """From now on transformers' `Auto....from_pretrained` wait out a 429, as `call_hf_with_retry` does.

    What somebody put in the place of one, such as a function in a test, stays as it is.
    """
    import transformers

    for name in ("AutoConfig", "AutoModel", "AutoTokenizer", "AutoProcessor", "AutoFeatureExtractor"):
        auto = getattr(transformers, name)
        load = getattr(auto.from_pretrained, "__func__", None)
        if inspect.isfunction(load) and not hasattr(load, "waits_out_429"):
            auto.from_pretrained = classmethod(_patient(load))


def _patient(load: Callable[..., Answer]) -> Callable[..., Answer]:
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Answer:
        return call_hf_with_retry(load, cls, *args, **kwargs)

    from_pretrained.waits_out_429 = True  # type: ignore[attr-defined]
    return from_pretrained


def get_hf_token() -> str | None:
    """The environment's `HF_TOKEN`, None where it is not set."""
    return os.environ.get("HF_TOKEN") or None


def download_file_from_hf(
    repo_name: str,
    file_name: str,
    subfolder: str = ".",
    cache_dir: Path | str | None = None,
    force_is_torch: bool = False,
    **kwargs: Any,
) -> Any:
    """The contents of a file of the hub: tensors of a `.pth`, values of a `.json`; of other files the path.

    A torch file is read weights only: nothing in it is run. kwargs: those that `hf_hub_download` knows.
    """
    options: dict[str, Any] = select_compatible_kwargs(kwargs, hf_hub_download)
    path = call_hf_with_retry(
        hf_hub_download, repo_id=repo_name, filename=file_name, subfolder=subfolder, cache_dir=cache_dir, **options
    )  # fmt: skip
    if path.endswith(".pth") or force_is_torch:
        return torch.load(path, map_location="cpu", weights_only=True)
    return json.loads(Path(path).read_text(encoding="utf-8")) if path.endswith(".json") else path


def get_dataset(dataset_name: str, **kwargs: object) -> NoReturn:
    """Not offered: NotImplementedError naming the native way."""
    raise NotImplementedError(
        f"the dataset {dataset_name!r} is not downloaded here; use datasets.load_dataset, or a local text file with "
        "interp.data.open_source"
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
    """The parameter with other values within the `with`, written in place, so that every holder of it sees them.

    Raises:
        TypeError: what is no parameter or no plain tensor.
        ValueError: another shape or dtype.
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
