"""The residual stream taken apart: what every part wrote, direct logit attribution, paths."""

from interp.residual.activation_cache import ActivationCache
from interp.residual.attribution import Attribute, attribute
from interp.residual.decomposition import Decomposition, IncompleteSumError
from interp.residual.paths import (
    Orders,
    Paths,
    TermImportance,
    orders,
    path_matrix,
    paths,
    term_importance,
)

__all__ = [
    "ActivationCache",
    "Attribute",
    "Decomposition",
    "IncompleteSumError",
    "Orders",
    "Paths",
    "TermImportance",
    "attribute",
    "orders",
    "path_matrix",
    "paths",
    "term_importance",
]
