"""Which picture shows which result: `drawn(result)` is what `result.view.plot()` and a notebook's cards call."""

from __future__ import annotations

from collections.abc import Callable

import xarray as xr
from matplotlib.axes import Axes

from interp.circuits.edge_circuit import Circuit
from interp.core import accessor
from interp.core.boundary import public
from interp.core.factored import FactoredMatrix
from interp.plot.ablation import ablation, recall_curve
from interp.plot.attention_rows import attention_entropy, dispersion
from interp.plot.attribution import attribution
from interp.plot.backward_lens import backward_lens
from interp.plot.causal_trace import causal_trace
from interp.plot.circuit import circuit, circuit_checks, circuit_curve
from interp.plot.composition import composition
from interp.plot.copying import copying
from interp.plot.depth import consensus, rank_collapse
from interp.plot.heads import heads
from interp.plot.in_context import heads_over_training, loss_by_index, loss_map
from interp.plot.lens import lens_curve, logit_lens
from interp.plot.patching import patching
from interp.plot.paths import loss_by_order
from interp.plot.probing import probing
from interp.plot.spectra import factored_spectrum, singular_values
from interp.plot.token_attribution import token_attribution
from interp.plot.verify import contract
from interp.verify import Contract

Draw = Callable[..., Axes]
"""A function of `interp.plot`: from a result, options of its own and `ax` to the Axes."""


def _effects(result: xr.Dataset, *args: object, **options: object) -> Axes:
    return patching(result, *(args or ("value",)), **options)  # type: ignore[arg-type]


def _found(result: xr.Dataset, **options: object) -> Axes:
    return circuit(Circuit.of_result(result), **options)  # type: ignore[arg-type]


def _spectra(result: xr.Dataset, *args: object, **options: object) -> Axes:
    kinds = list(dict.fromkeys(result.kind.values.tolist()))
    first = "W_out" if "W_out" in kinds else str(kinds[0])
    return singular_values(result, *(args or (first,)), **options)  # type: ignore[arg-type]


def _strip(result: xr.Dataset, **options: object) -> Axes:
    return token_attribution({str(result.attrs.get("method", "score")): result}, **options)  # type: ignore[arg-type]


PLOTS: dict[str, Draw] = {
    "ablate": ablation,
    "attention_entropy": attention_entropy,
    "attribute": attribution,
    "attribution_patch": _effects,
    "backward_lens": backward_lens,
    "causal_trace": causal_trace,
    "circuit_curve": circuit_curve,
    "composition": composition,
    "consensus": consensus,
    "copying": copying,
    "dispersion": dispersion,
    "evaluate_circuit": circuit_checks,
    "find_circuit": _found,
    "heads": heads,
    "in_context": loss_by_index,
    "knock_out": ablation,
    "lens_by_depth": lens_curve,
    "logit_lens": logit_lens,
    "loss_map": loss_map,
    "patch": patching,
    "path_patch": patching,
    "paths": attribution,
    "probe": probing,
    "probe_neurons": probing,
    "rank_collapse": rank_collapse,
    "recall": recall_curve,
    "short_circuit": ablation,
    "spectra": _spectra,
    "term_importance": loss_by_order,
    "token_attribution": _strip,
}
"""The plot of every labelled result that has one, by the analysis that it names."""

OVER_TRAINING: dict[str, Draw] = {
    "heads": heads_over_training, "in_context": loss_map, "loss_map": loss_map,
}  # fmt: skip
"""The same for results with a `step` dim, those of `over_checkpoints`."""

OBJECTS: dict[type, Draw] = {
    Circuit: circuit,
    Contract: contract,
    FactoredMatrix: factored_spectrum,
}
"""The plot of every result that is an object of our own."""


def draw_of(result: object) -> Draw | None:
    """The function that draws this result; None if there is none."""
    if isinstance(result, xr.Dataset):
        over_training = OVER_TRAINING if "step" in result.dims else PLOTS
        return over_training.get(accessor.named(result) or "")
    return next((draw for kind, draw in OBJECTS.items() if isinstance(result, kind)), None)


@public()
def drawn(result: object, *args: object, **options: object) -> Axes:
    """The picture of a result, by the function that suits it, which takes the options (`ax` among them).

    Errors: ValueError for what has no picture, naming what has one; and those of the function.

    Example:
        >>> ax = drawn(interp.heads(model), "previous_token")
    """
    draw = draw_of(result)
    if draw is None:
        objects = [kind.__name__ for kind in OBJECTS]
        raise ValueError(
            f"no plot for {described(result)}; there is one for {', '.join(objects)}, and for the Datasets of "
            f"{', '.join(PLOTS)}"
        )
    return draw(result, *args, **options)


def described(result: object) -> str:
    """What a result is, in words."""
    if not isinstance(result, xr.Dataset):
        return f"a {type(result).__name__}"
    name = accessor.named(result)
    over = " over training" if "step" in result.dims else ""
    return "a Dataset that is not a result of interp" if name is None else f"the result of {name}{over}"
