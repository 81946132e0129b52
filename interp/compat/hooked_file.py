"""Files in which tutorials and papers saved a HookedTransformer: a bare state dict, or a dict with it and its config.

They are pickles, read by torch's weights-only unpickler, which builds tensors, numbers and containers and runs nothing
else. Two kinds of object that such files often hold beside them are added, and neither runs code: numpy scalars, and a
pickled HookedTransformerConfig, of which only the fields are kept.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from interp.compat.hooked_state import AnyTokenizer, from_hooked_transformer, read_state
from interp.core.boundary import public
from interp.core.files import json_object, regular
from interp.core.kinds import Device
from interp.hooked import HookedTransformer

STATE_KEYS = ("model", "state_dict", "model_state_dict", "model_state")
CONFIG_KEYS = ("config", "cfg", "model_cfg", "model_config")
SAVE_AGAIN = (
    "where it was made: `old = torch.load(path, weights_only=False)` (runs the file's code), then "
    '`torch.save({"model": old["model"], "config": old["config"].to_dict()}, new_path)`; for a pickled model '
    '`torch.save({"model": old.state_dict(), "config": old.cfg.to_dict()}, new_path)`'
)


class _Fields:
    """Replacement of a pickled HookedTransformerConfig: an object with its fields, and none of its code."""


_MODULES = (
    "transformer_lens.HookedTransformerConfig",
    "transformer_lens.config.HookedTransformerConfig",
    "transformer_lens.config.hooked_transformer_config",
)
"""Where the class stood in versions 1, 2 and 3."""


@public()
def load_hooked(
    path: Path | str,
    config: object = None,
    *,
    tokenizer: AnyTokenizer | None = None,
    dtype: torch.dtype | None = None,
    device: Device = "cpu",
) -> HookedTransformer:
    """The model of a `.pt` or `.pth` file of a HookedTransformer.

    The file holds a state dict, or a dict with one under `model`, `state_dict` or `model_state_dict` and the config
    under `config` or `cfg`; what else is in such a dict (losses, optimiser) is not read.

    Args:
        path: the file.
        config: the HookedTransformerConfig or its dict, or the path of a JSON file with it; required for a bare state
            dict, and used instead of the file's own where both are there.
        tokenizer: the model's tokenizer, a bare transformers tokenizer too; None: the model takes ids.
        dtype: dtype of the weights; None: the file's.
        device: where the weights go.

    Returns:
        `HookedTransformer`.

    Raises:
        FileNotFoundError, ValueError: a file with anything that would have to run (the message says how to save it
            again), a file without a config, or one that `from_hooked_transformer` refuses.

    See Also:
        `interp.compat.transformer_lens.HookedTransformer.load_hooked(path)`: under TransformerLens' names and
        methods.
    """
    state, chosen = read_hooked(path, config)
    try:
        return from_hooked_transformer(state, chosen, tokenizer=tokenizer, dtype=dtype, device=device)
    except ValueError as cause:
        raise ValueError(f"{path}: {cause}") from cause


def read_hooked(path: Path | str, config: object = None) -> tuple[dict[str, Tensor], object]:
    """State dict and config of such a file; the config as it is there, or the one that is given.

    Raises:
        ValueError: as `load_hooked` for the file itself.
    """
    file = Path(path)
    state, found = _parts(file, _unpickled(file))
    if isinstance(config, str | Path):
        config = json_object(config)
    chosen = found if config is None else config
    if chosen is None:
        raise ValueError(
            f"{file} holds no config ({' or '.join(CONFIG_KEYS[:2])}): give one, "
            "load_hooked(path, config=cfg.to_dict())"
        )
    return state, chosen


def _unpickled(file: Path) -> object:
    regular(file)
    try:
        with torch.serialization.safe_globals(_allowed()):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as cause:
        reason = next((line for line in str(cause).splitlines() if "GLOBAL" in line), str(cause))
        reason = reason.partition(" Please use")[0].strip()
        raise ValueError(
            f"{file} is refused, and nothing in it was run: it is damaged, or holds more than tensors and plain "
            f"values ({reason}). Save it again {SAVE_AGAIN}"
        ) from cause
    except Exception as cause:  # of many kinds, and of none in particular: a pickle may be damaged anywhere
        raise ValueError(f"{file} is not a readable torch file (truncated?): {cause}") from cause


def _allowed() -> list[Callable[..., object] | tuple[Callable[..., object], str]]:
    """Classes that may be rebuilt besides tensors: numpy's scalars, and the fields of a config under its old names."""
    scalar = np.float64(0).__reduce__()[0]
    assert callable(scalar)
    names = {f"{module}.multiarray.scalar": scalar for module in ("numpy.core", "numpy._core")}
    names |= {f"{module}.HookedTransformerConfig": _Fields for module in _MODULES}
    kinds = [type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8", "bool")]
    return [np.dtype, *kinds, *((made, name) for name, made in names.items())]


def _parts(file: Path, found: object) -> tuple[dict[str, Tensor], object]:
    """State dict and config in the contents of a file."""
    if not isinstance(found, Mapping):
        raise ValueError(f"{file} must hold a state dict or a dict with one, got {type(found).__name__}")
    inner = [key for key in STATE_KEYS if isinstance(found.get(key), Mapping)]
    if not inner:
        return read_state(found, str(file)), None
    state = found[inner[0]]
    return read_state(state, f"{file}[{inner[0]!r}]"), next(
        (found[k] for k in CONFIG_KEYS if k in found), None
    )
