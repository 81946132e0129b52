"""What TransformerLens 3.9 computed (`tests/compat/oracle/make_core.py`), and our model with the same weights."""

import gzip
import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.hooked_transformer import HookedTransformer

FILE = Path(__file__).parents[1] / "data" / "core_3_9.safetensors.gz"


@dataclass
class Oracle:
    """One model of theirs."""

    said: dict[str, Any]
    tensors: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def group(self, name: str) -> dict[str, Tensor]:
        """The tensors under `name/`."""
        return {n.partition("/")[2]: w for n, w in self.tensors.items() if n.startswith(f"{name}/")}

    @property
    def close(self) -> dict[str, float]:
        """How near equal numbers are."""
        return {"rtol": 1e-10, "atol": 1e-10} if self.said["double"] else {"rtol": 1e-4, "atol": 1e-5}

    @cached_property
    def shared(self) -> HookedTransformer:
        """Our model with its weights, for tests that leave them and its parts alone."""
        return self.model()

    def fresh(self, **changes: object) -> HookedTransformer:
        """Our model of its config, weights as initialised."""
        dtype = torch.float64 if self.said["double"] else torch.float32
        return HookedTransformer(HookedTransformerConfig(**self.said["config"] | {"dtype": dtype} | changes))

    def model(self, **changes: object) -> HookedTransformer:
        """Our model with its weights."""
        model = self.fresh(**changes)
        missing, unexpected = model.load_state_dict(self.group("state"), strict=False)
        assert not unexpected
        assert all(name.endswith(("mask", "IGNORE", "rotary_sin", "rotary_cos")) for name in missing)
        return model


@cache
def _read() -> tuple[dict[str, Any], dict[str, Tensor]]:
    content = gzip.decompress(FILE.read_bytes())
    size = int.from_bytes(content[:8], "little")
    said = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["said"])
    return said, load(content)


CASES = tuple(_read()[0])


@cache
def oracle(name: str) -> Oracle:
    """The oracle of this name."""
    said, tensors = _read()
    return Oracle(
        said[name], {n.partition("/")[2]: w for n, w in tensors.items() if n.startswith(f"{name}/")}
    )
