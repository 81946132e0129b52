"""Attribution of an answer to input tokens: mixing, gradients, flow routes."""

from interp.tokens.alti_logit import AltiLogit
from interp.tokens.erasure import CompareMethods, Erasure, compare_methods, erasure
from interp.tokens.evidence import evidence
from interp.tokens.flow_routes import FlowRoutes, flow_routes, routes
from interp.tokens.input_gradients import GradientTimesInput, IntegratedGradients
from interp.tokens.token_attribution import (
    METHODS,
    LayerMixing,
    Mixing,
    TokenAttribution,
    layer_mixing,
    token_attribution,
)

__all__ = [
    "METHODS",
    "AltiLogit",
    "CompareMethods",
    "Erasure",
    "FlowRoutes",
    "GradientTimesInput",
    "IntegratedGradients",
    "LayerMixing",
    "Mixing",
    "TokenAttribution",
    "compare_methods",
    "erasure",
    "evidence",
    "flow_routes",
    "layer_mixing",
    "routes",
    "token_attribution",
]
