"""Which input tokens an answer rests on: mixing, gradients, flow routes."""

from interp.tokens.faithfulness import Erasure, compare_methods, faithfulness
from interp.tokens.flow_routes import flow_routes, routes
from interp.tokens.input_gradients import IntegratedGradients
from interp.tokens.token_attribution import Mixed, layer_mixing, token_attribution

__all__ = [
    "Erasure",
    "IntegratedGradients",
    "Mixed",
    "compare_methods",
    "faithfulness",
    "flow_routes",
    "layer_mixing",
    "routes",
    "token_attribution",
]
