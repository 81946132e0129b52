"""The attention pattern of one head, query by key."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from matplotlib.axes import Axes
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.plot.canvas import axes, heat_map, name_cells, printable
from interp.views.scale import ColourScale


@public()
def attention(
    pattern_qk: Float[Tensor, "*q k"], tokens: Sequence[str] | None = None, *, ax: Axes | None = None
) -> Axes:
    """One head's attention pattern: row = the token that looks, column = the token looked at, rows sum to 1.

    Args:
        pattern_qk: [q, k], attention probabilities of one head.
        tokens: the text of each position; positions are numbered without.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        ValueError: another number of tokens.

    Example:
        >>> _, cache = model.run_with_cache(prompt, "blocks.1.attn.hook_pattern")
        >>> plot.attention(cache["pattern", 1][0, 2], model.to_str_tokens(prompt))
    """
    if pattern_qk.ndim != 2:
        raise ValueError(
            f"a pattern [query, key] of one head is required, got shape {shape_text(pattern_qk.shape)}"
        )
    queries, keys = pattern_qk.shape
    if tokens is not None and not queries == keys == len(tokens):
        raise ValueError(f"{len(tokens)} tokens do not fit a pattern of shape {shape_text(pattern_qk.shape)}")
    ax = axes(ax, 2.2 + 0.24 * keys, 1.6 + 0.24 * queries)
    heat_map(
        ax,
        pattern_qk.detach().float().cpu().numpy(),
        ColourScale.mass("attention (rows sum to 1)"),
        title="attention",
    )
    if tokens is not None:
        names = [printable(token) for token in tokens]
        name_cells(ax, rows=names, columns=names, turned=True)
    ax.set_xlabel("key: the token looked at")
    ax.set_ylabel("query: the token that looks")
    return ax
