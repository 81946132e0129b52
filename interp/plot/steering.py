"""Effects of steering by its strength, next to those of random directions of equal length, or random features."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.plot.canvas import axes, legend, score_of

WORDS = {"kl": "KL divergence from the model without it", "loss": "change of loss on other texts"}
"""Names of the scores other than the effect."""


@public()
def steering_curve(result: xr.Dataset, score: str = "effect", *, ax: Axes | None = None) -> Axes:
    """A score of `steering_curve` by strength, a line with 95 % intervals per layer; dotted, random directions' band.

    The band has the colour of its layer: the middle 95 % of the effects of random directions of equal length. Of a
    feature it is that of random features, and dashed lines are the ends of that of random directions; the plain prompt
    is the line at 0.

    Args:
        result: what `interp.causal.steering_curve` returned.
        score: "effect", "kl" or, where other texts were given, "loss".
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: a score that is not there.

    Example:
        >>> each = [interp.causal.Subspace("blocks.0.hook_resid_post", torch.eye(model.cfg.d_model)[:1])]
        >>> metric = interp.logit_difference(" Mary", " John")
        >>> ax = steering_curve(interp.causal.steering_curve(model, prompt, each, metric=metric, random=2))
    """
    some = score_of(result, score).sortby("strength")
    layers, features = some.layer.values.tolist(), "feature" in some.coords
    ax = axes(ax, 6.4, 4.0)
    colours = plt.get_cmap("viridis")(np.linspace(0.0, 0.85, len(layers)))
    for layer, colour in zip(layers, colours, strict=True):
        line = some.sel(layer=layer)
        low, high = line.band.sel(end=["low", "high"]).transpose("end", "strength").to_numpy()
        ax.fill_between(line.strength, low, high, color=colour, alpha=0.08, linewidth=0)
        ax.plot(line.strength, np.stack((low, high), 1), color=colour, linestyle=":", linewidth=1)
        if features:
            other = line.bands.sel(beside="random directions", end=["low", "high"]).transpose(
                "strength", "end"
            )
            ax.plot(line.strength, other, color=colour, linestyle="--", linewidth=0.8)
        ends = np.abs(np.stack((line.low, line.high)) - line.value.to_numpy())
        ax.errorbar(
            line.strength, line.value, yerr=ends, color=colour, marker="o", markersize=3.5, capsize=2,
            linewidth=1.4, label=str(line.feature.item() if features else layer),
        )  # fmt: skip
    ax.axhline(0, color="black", linewidth=0.8)
    unit = str(some["unit"].item())
    ax.set_xlabel(f"strength ({_of_features(result.attrs) if features else 'times the direction'})")
    ax.set_ylabel(f"{WORDS.get(score, 'change of ' + str(result.attrs['metric']))} ({unit})")
    beside = "random features, dashed: directions" if features else "random directions"
    ax.set_title(f"dotted: {result.sizes['draw']} {beside}; n = {int(some.n.max())}")
    legend(ax, title="feature" if features else "layer")
    return ax


def _of_features(attrs: Mapping[str, object]) -> str:
    """What a strength of a feature is, in words."""
    unit = attrs["strength_unit"]
    return (
        f"{attrs['mode']}, times the {unit} activation"
        if isinstance(unit, str)
        else f"{attrs['mode']}, times {unit:g}"
    )
