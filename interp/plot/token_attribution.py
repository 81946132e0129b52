"""Several attributions of one prompt, one strip of its tokens each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import xarray as xr
from jaxtyping import Shaped
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.core.results import in_order
from interp.passes.answer_tokens import TOKEN
from interp.plot.canvas import annotate, axes, heat_map, name_cells, printable
from interp.views.scale import ColourScale


@public()
def token_attribution(
    results: Mapping[str, xr.Dataset] | xr.Dataset, *, prompt: int = 0, ax: Axes | None = None
) -> Axes:
    """Tokens x methods, coloured by value relative to the largest of its row; the numbers are the values themselves.

    The methods' units differ (shares, logits), so rows are not to be compared by colour. Padding is left out. An answer
    of several tokens has a row for each of them.

    Args:
        results: what `token_attribution` returned, or several by method, of the same prompts: a Dataset per row of
            the picture.
        prompt: place among the prompts of the results.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        ValueError: no results, or results about different tokens.
        IndexError: a prompt that they do not hold.

    Example:
        >>> methods = ("attention", "rollout", "alti")
        >>> plot.token_attribution({name: interp.token_attribution(model, prompt, method=name) for name in methods})
    """
    if isinstance(results, xr.Dataset):
        results = {str(results.attrs.get("method", "score")): results}
    if not results:
        raise ValueError("at least one attribution is required, got none")
    results = {name: in_order("results", result, {"pos": None}) for name, result in results.items()}
    rows = {
        name: row for each, result in results.items() for name, row in _rows(each, result.isel(prompt=prompt))
    }
    first = next(iter(rows.values()))
    if other := [name for name, row in rows.items() if not np.array_equal(_tokens(row), _tokens(first))]:
        raise ValueError(f"attributions of the same tokens are required, {other[0]!r} has others")
    scores = np.stack([row["value"].to_numpy() for row in rows.values()])
    real = ~np.isnan(scores).all(0)
    scores = scores[:, real]
    tokens = [printable(str(token)) for token in _tokens(first)[real]]
    reach = np.abs(scores).max(1, keepdims=True)
    relative = np.divide(scores, reach, out=np.zeros_like(scores), where=reach > 0)
    ax = axes(ax, 2.4 + 0.5 * len(tokens), 1.6 + 0.36 * len(rows))
    scale = ColourScale.signed(np.ones(1), "value / largest of its row")
    image = heat_map(ax, relative, scale, title="token attribution")
    annotate(ax, image, [[f"{score:.2f}" for score in row] for row in scores], size=7.0)
    name_cells(ax, rows=list(rows), columns=tokens, turned=True)
    ax.set_xlabel("token")
    ax.set_ylabel("method")
    return ax


def _rows(method: str, result: xr.Dataset) -> Iterator[tuple[str, xr.Dataset]]:
    """The strips of one method about one prompt, with their names: one for each token of the answer."""
    if TOKEN not in result.dims:
        yield method, result
        return
    for place, word in enumerate(result["answer"].to_numpy()):
        if word:
            yield f"{method}: {printable(str(word))} ({place + 1})", result.isel({TOKEN: place})


def _tokens(row: xr.Dataset) -> Shaped[np.ndarray, "pos"]:
    """The text of each token."""
    return row["token"].to_numpy()
