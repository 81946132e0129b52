"""A list of modules that says what they are."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


class TypedModuleList(nn.ModuleList, Generic[M]):
    """torch's `ModuleList`, generic in its elements; a slice is of the same class."""

    def __iter__(self) -> Iterator[M]:
        return super().__iter__()  # type: ignore[return-value]
