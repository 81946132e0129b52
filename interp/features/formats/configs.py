"""How configs of other tools are read: each key is understood, or known to change no number, or refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

import torch
from torch import Tensor

from interp.core.wording import nearest, value_text
from interp.features.formats.files import Facts
from interp.model.config import Json

Said = TypeVar("Said", int, float)
DTYPES = {
    "float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16,
}  # fmt: skip


def words(text: str) -> tuple[str, ...]:
    """The words of a text, such as the keys of a config."""
    return tuple(text.split())


def refuse_unknown(config: Json, known: Iterable[str], what: str = "") -> None:
    """Raise ValueError for a key that may change numbers and is not understood; `what`: of which config."""
    known = set(known)
    if unknown := sorted(set(config) - known):
        raise ValueError(f"unknown key {unknown[0]!r}{what} may change numbers; {nearest(unknown[0], known)}")


def flag(config: Json, key: str, usual: bool) -> bool:
    """True or false as the config says, `usual` where it says nothing; ValueError for anything else, such as 1.5."""
    value = config.get(key)
    if not isinstance(value, bool | None):
        raise ValueError(f"{key} must be true or false, got {value_text(value)}")
    return usual if value is None else value


def count(config: Json, key: str, least: int = 1) -> int | None:
    """The integer of at least `least` under a key, None where there is none; ValueError for anything else."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{key} must be {kind}, got {value_text(value)}")
    return value


def part(config: Json, key: str) -> Json:
    """The object under a key, {} where there is none; ValueError for anything else."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be a JSON object, got {type(value).__name__}")
    return value


def dtype_of(config: Json) -> torch.dtype:
    """The dtype that a config names, float32 where it names none."""
    name = str(config.get("dtype", "float32")).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def agreed(name: str, said: Said | None, given: Said | None) -> Said | None:
    """What the files say, or what the user says where they say nothing; ValueError where both say it and differ."""
    if said is not None and given is not None and said != given:
        raise ValueError(f"{name}={given} is given, and the files say {name}={said}")
    return given if said is None else said


def refuse_facts(facts: Facts, *names: Literal["layer", "k", "norm_scaling_factor"]) -> None:
    """Raise ValueError for a fact of the user that says nothing about these files."""
    for name in names:
        if (value := getattr(facts, name)) is not None:
            raise ValueError(
                f"{name} belongs to files that do not say it, and changes nothing here; got {value}"
            )


def check_keys(given: Iterable[str], required: Iterable[str], what: str = "the tensors") -> None:
    """Raise ValueError, which names one, unless the names are those required."""
    given, required = set(given), set(required)
    if missing := sorted(required - given):
        raise ValueError(f"{what} must hold {missing[0]!r}; {nearest(missing[0], given - required)}")
    if unknown := sorted(given - required):
        raise ValueError(
            f"{what} hold {unknown[0]!r}, which is not understood; {nearest(unknown[0], required)}"
        )


def widened(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in float32 or wider, in which constants are folded into them."""
    return {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in weights.items()}
