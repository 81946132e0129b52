"""The residual stream taken apart: what every part wrote, direct logit attribution, paths."""

from interp.residual.activation_cache import ActivationCache
from interp.residual.attribution import Attribute, attribute
from interp.residual.decomposition import IncompleteSumError, Parts
from interp.residual.paths import orders, path_matrix, paths, term_importance

__all__ = [
    "ActivationCache",
    "Attribute",
    "IncompleteSumError",
    "Parts",
    "attribute",
    "orders",
    "path_matrix",
    "paths",
    "term_importance",
]
