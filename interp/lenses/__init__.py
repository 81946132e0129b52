"""Lenses, plain and fitted, which read states as tokens, and the factors of gradients, read likewise."""

from interp.lenses.backward_lens import (
    BackwardLens,
    GradientCosines,
    GradientRank,
    backward_lens,
    gradient_cosines,
    gradient_rank,
)
from interp.lenses.comparison import CompareLenses, compare_lenses
from interp.lenses.factors import GradientFactors, gradient_factors
from interp.lenses.fitted_jacobian_lens import FittedJacobianLens
from interp.lenses.imprint import imprint, shift
from interp.lenses.jacobian_lens import JacobianLens, jacobian_lens
from interp.lenses.late_layers import LateLayers, late_layers
from interp.lenses.lens import LogitLens, by_depth, logit_lens
from interp.lenses.output_lens import OutputLens, output_lens
from interp.lenses.patchscope import IDENTITY, Patchscope, patchscope
from interp.lenses.tuned_lens import TunedLens, train_tuned_lens

__all__ = [
    "IDENTITY",
    "BackwardLens",
    "CompareLenses",
    "FittedJacobianLens",
    "GradientCosines",
    "GradientFactors",
    "GradientRank",
    "JacobianLens",
    "LateLayers",
    "LogitLens",
    "OutputLens",
    "Patchscope",
    "TunedLens",
    "backward_lens",
    "by_depth",
    "compare_lenses",
    "gradient_cosines",
    "gradient_factors",
    "gradient_rank",
    "imprint",
    "jacobian_lens",
    "late_layers",
    "logit_lens",
    "output_lens",
    "patchscope",
    "shift",
    "train_tuned_lens",
]
