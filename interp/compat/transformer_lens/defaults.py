"""Defaults of a model that an argument may override for one call."""

from collections.abc import Mapping
from operator import attrgetter
from types import TracebackType
from typing import TypeVar

USE_DEFAULT_VALUE = None
"""An argument that is left to the model's default."""
Flag = TypeVar("Flag")


def get_nested_attr(obj: object, attr_str: str) -> object:
    """`obj.a.b.c` for "a.b.c"; AttributeError where it ends."""
    found: object = attrgetter(attr_str)(obj)
    return found


def set_nested_attr(obj: object, attr_str: str, value: object) -> None:
    """`obj.a.b.c = value` for "a.b.c"."""
    owner, _, name = attr_str.rpartition(".")
    setattr(get_nested_attr(obj, owner) if owner else obj, name, value)


def override_or_use_default_value(default_flag: Flag, override: Flag | None = None) -> Flag:
    """The override unless it is None, else the default."""
    return default_flag if override is None else override


_PLACES: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "prepend_bos": ("cfg.default_prepend_bos", (None, True, False)),
    "padding_side": ("tokenizer.padding_side", (None, "left", "right")),
}


class LocallyOverridenDefaults:
    """Within the `with`, `prepend_bos` and `padding_side` of a model have other values (None: as they were).

    A model without tokenizer has no padding side to override.

    Raises:
        AssertionError: another name (when made) or value (when entered).
    """

    def __init__(self, model: object, **overrides: object) -> None:
        self.model = model
        self.overrides = overrides
        self._before: dict[str, object] = {}
        for name in overrides:
            assert name in _PLACES, (
                f"{name} is not a valid parameter to override. Valid parameters are {_PLACES.keys()}."
            )

    def __enter__(self) -> None:
        for name, override in self.overrides.items():
            place, valid = _PLACES[name]
            if name == "padding_side" and getattr(self.model, "tokenizer", None) is None:
                continue
            assert override in valid, f"{name} must be one of {list(valid)}, but got {override}."
            self._before[place] = get_nested_attr(self.model, place)
            set_nested_attr(self.model, place, override_or_use_default_value(self._before[place], override))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for place, value in self._before.items():
            set_nested_attr(self.model, place, value)
        self._before.clear()
