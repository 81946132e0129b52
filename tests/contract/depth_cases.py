"""The depth diagnostics and the flow routes in the table of analyses."""

from functools import partial

from interp.attention.attention_rows import head_entropy, weights_by_keys
from interp.dynamics.consensus import ANGLES, token_angles
from interp.dynamics.rank_collapse import residuals
from interp.tokens.flow_routes import flow_shares
from tests.contract.case import ENDS, Case, Dims


def _with_ends(names: tuple[str, ...], dims: tuple[str, ...]) -> Dims:
    return {f"{name}{end}": dims for name in names for end in ENDS}


_HEADS = _with_ends(("entropy", "relative", "max_weight"), ("layer", "head"))
_KEYS: Dims = {
    **_with_ends(("max_weight", "entropy", "gap", "upper", "lower"), ("layer", "head", "n_keys")),
    "count": ("n_keys",),
}
_BOTH = ("left", "right")
_FLOW: Dims = {
    "attention": ("prompt", "layer", "head", "query", "key"),
    **dict.fromkeys(("residual", "bias"), ("prompt", "layer", "query")),
}
DEPTH_CASES = {
    "flow_routes": Case(
        flow_shares,
        {**_FLOW, **dict.fromkeys(("mlp", "residual_mid"), ("prompt", "layer", "query"))},
        _BOTH,
        needs_mlp=True,
    ),
    "flow_routes-attention-only": Case(flow_shares, _FLOW, _BOTH, needs_no_mlp=True),
    "rank_collapse": Case(residuals, _with_ends(("residual",), ("line", "depth")), _BOTH),
    "consensus": Case(token_angles, _with_ends(ANGLES, ("depth",)), _BOTH),
    "consensus-iterated": Case(
        partial(token_angles, block=1, repeats=3), _with_ends(ANGLES, ("depth",)), _BOTH
    ),
    "consensus-no-mlp": Case(
        partial(token_angles, repeats=2, mlp=False), _with_ends(ANGLES, ("depth",)), _BOTH, needs_mlp=True
    ),
    "attention_entropy": Case(head_entropy, _HEADS, _BOTH),
    "attention_entropy-log-n": Case(partial(head_entropy, train_length=6), _HEADS, _BOTH),
    "dispersion": Case(weights_by_keys, _KEYS, _BOTH),
    "dispersion-log-n": Case(partial(weights_by_keys, train_length=6), _KEYS, _BOTH),
}
