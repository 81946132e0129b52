"""Numbers and labels: nothing in here has ever heard of a transformer."""

from interp.core.factored import FactoredMatrix
from interp.core.permutation import permutation_test
from interp.core.results import frame

__all__ = ["FactoredMatrix", "frame", "permutation_test"]
