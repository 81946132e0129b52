"""Files of lenses and directions that were fitted to one model: how they are opened and identify that model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.files import regular
from interp.core.stats import upcast
from interp.model.transformer import Transformer

SAMPLED = 16
"""How many numbers of each parameter identify a model."""


@contextmanager
def fitted_file(
    path: Path | str, what: str, form: str, device: torch.device
) -> Iterator[tuple[Mapping[str, str], dict[str, Tensor]]]:
    """Header and tensors of a safetensors file of format `form`; `what` names its content in errors.

    Raises:
        ValueError: a file of another format, a damaged one, or one in which the body of the `with` misses something.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(regular(path), framework="pt", device=str(device)) as file:
            header = file.metadata() or {}
            if header.get("format") != form:
                raise ValueError(
                    f"{path}: a file of format {form!r} is required, got {header.get('format')!r}"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        yield header, tensors
    except (SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError) as cause:
        raise ValueError(f"{path} is not a readable {what} (truncated?): {cause}") from cause


@torch.no_grad()
def sample_of(model: Transformer) -> Float[Tensor, "n"]:
    """A few evenly spaced numbers of every parameter, in float32 at least."""
    samples = []
    for _, parameter in sorted(model.named_parameters()):
        where = _spread(parameter.numel(), parameter.device)
        samples.append(upcast(parameter.flatten()[where].to(model.device)))
    return torch.cat(samples)


def _spread(n: int, device: torch.device | None = None) -> Int[Tensor, "s"]:
    """Evenly spaced indices from 0 to n - 1, in integers: no float is exact for every n."""
    return torch.arange(SAMPLED, device=device) * (n - 1) // (SAMPLED - 1)


def is_of(model: Transformer, sample: Float[Tensor, "n"]) -> bool:
    """Whether the stored numbers (`sample_of`) are those of this model, in its dtype or a narrower one."""
    theirs = sample_of(model)
    ours = sample.to(theirs.device, model.dtype).to(theirs.dtype)
    return ours.shape == theirs.shape and torch.equal(ours, theirs)
