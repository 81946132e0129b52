"""Numbers and labels: nothing in here has ever heard of a transformer."""

from typing import TYPE_CHECKING

from interp.core.late import names_of

if TYPE_CHECKING:
    from interp.core.factored import FactoredMatrix
    from interp.core.permutation import permutation_test
    from interp.core.results import frame

__all__ = ["FactoredMatrix", "frame", "permutation_test"]

__getattr__ = names_of(
    "interp.core", {"FactoredMatrix": "factored", "frame": "results", "permutation_test": "permutation"}
)
