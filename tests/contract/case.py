"""One analysis as the contract sees it: how it is made, and what its door declares."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from interp.model import ModelConfig
from interp.passes.analysis import Analysis

Dims = Mapping[str, tuple[str, ...]]
ENDS = ("", "_low", "_high")


@dataclass(frozen=True)
class Case:
    """One analysis, the rows it is asked about, and what its door declares."""

    make: Callable[[ModelConfig], Analysis]
    dims: Dims
    padding: tuple[str, ...] = ()
    """Sides on which rows may be padded; none means that padding is refused."""
    needs_mlp: bool = False
    needs_no_mlp: bool = False

    @property
    def row_dim(self) -> str | None:
        """The dim with one entry per row, where the result keeps the rows."""
        return next((d for d in ("prompt", "example") if any(d in dims for dims in self.dims.values())), None)
