"""Which heads read what earlier heads write: Q-, K- and V-composition of all pairs, from the weights, against a null.

Elhage et al. 2021, "Composition of attention heads": a pair's score is ||W1 W2|| / (||W1|| ||W2||), Frobenius norms, in
row convention with W1 = OV of the source and W2 = QK (Q), QK^T (K) or OV (V) of the destination. A ratio says little by
itself: random heads have 1/sqrt(d), most trained ones less (Elhage et al.). So it comes with the law it has by chance.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from interp.core.factored import FactoredMatrix
from interp.core.haar import Nakagami, concentration, gaussian_concentration, overlap_null
from interp.core.precision import wide
from interp.core.results import labelled
from interp.model.variants import Rotary
from interp.passes.observe import Subject
from interp.weights.head_circuits import Circuits

if TYPE_CHECKING:
    import xarray as xr

Kind = Literal["Q", "K", "V"]
Null = Literal["spectrum", "shape"]
Head = tuple[int, int]
"""Layer and head."""
DIMS = ("src_layer", "src_head", "dst_layer", "dst_head")
NULLS = {
    "spectrum": "independent random frames, the heads' own singular values",
    "shape": "Gaussian factors of the heads' shapes",
}


def composition(
    model: Subject,
    kind: Kind = "K",
    *,
    folded: bool = True,
    null: Null = "spectrum",
    offset: int | None = None,
) -> "xr.Dataset":
    """How strongly every head composes with every head of a later layer, and how far that is from chance.

    Returns Dataset[src_layer, src_head, dst_layer, dst_head], NaN where the source is not in an earlier layer:
    `raw` in [0, 1], ||W1 W2|| / (||W1|| ||W2||), as in `composition_scores`;
    `null`, its mean under the null; `excess` = raw - null (the paper's baseline subtraction under null="shape");
    `z` = excess in standard deviations of the ratio (not of its square) under the null; `p`, one-sided, the chance of a
    ratio at least as large, 0 below 1e-308.

    null="spectrum" keeps each head's singular values and draws their frames at random (Haar); "shape" draws heads with
    Gaussian W_Q, W_K, W_V, W_O. Mean and variance of ratio^2 are exact in closed form (`interp.core.haar`), those of
    the ratio and p are of the Gamma law with them: p is good to a tenth at 0.05, and an order of magnitude far out
    (`interp.core.haar.Nakagami`). Trained heads differ from either in bulk: rank pairs, and read z as a distance, since
    thousands of pairs are tested at once.

    folded: norms are part of the heads, as in `Circuits`. offset: under rotary positions QK, and with it Q- and
    K-composition, holds for a key that many tokens before the query (None: 0). A previous-token head's is 1; an
    induction head's distance is that between repeats, so look at several. Grouped queries: every query head counts,
    with the key and value weights of its group.

    Caveats: it says what can be read, not what is: attention may never look there. Only self-attention within one stack
    composes here; of an encoder-decoder, give one side's `Circuits` to `composition_scores`. In post-norm models the
    stream also passes norms between the layers, which belong to no head and are left out. z and p are NaN for a head
    that is a multiple of an orthogonal matrix (it composes alike with all), everything is NaN for a head of zeros.
    Errors: ValueError for an unknown kind or null, an encoder-decoder, a single layer, and an offset for V, outside the
    context, or under other positions.

    Example:
        >>> scores = interp.composition(model, "K")
        >>> scores.z.argmax(...)
    """
    if not isinstance(model, Subject):
        raise ValueError(
            "composition requires one stack of layers with one residual stream, such as HookedTransformer, got "
            f"{type(model).__name__}: heads of two streams do not compose"
        )
    config = model.transformer.config
    if config.n_layers < 2:
        raise ValueError(f"composition requires at least two layers, got {config.n_layers}")
    circuits = Circuits(model.transformer, folded=folded)
    raw, law = against_null(circuits, kind, null=null, offset=offset)
    exists, mean = raw.isfinite(), law.mean()
    values = {
        "raw": raw, "null": mean, "excess": raw - mean, "z": (raw - mean) / law.sd(), "p": law.upper(raw)
    }  # fmt: skip
    counts = (config.n_layers, config.n_heads) * 2
    return labelled(
        "composition",
        {name: (DIMS, torch.where(exists, value, torch.nan)) for name, value in values.items()},
        coords={dim: range(n) for dim, n in zip(DIMS, counts, strict=True)},
        attrs=_attrs(circuits, kind, null, offset),
    )


def composition_scores(
    circuits: Circuits, kind: Kind, *, offset: int | None = None
) -> Float[Tensor, "l h l h"]:
    """||W1 W2|| / (||W1|| ||W2||) of every pair: source layer and head, destination layer and head.

    W1 = OV; W2 = QK for Q, QK^T for K, OV for V. NaN where the source is not in an earlier layer, or a head is zero.
    With W = A B, ||A1 B1 A2 B2|| = ||(R B1) (A2 S^T)|| for the triangular factors R of A1 and S of B2^T: one product
    of thin matrices per pair of layers, and nothing of size d x d. 15 times as fast as TransformerLens'
    all_composition_scores (experiments/bench/composition.py).
    Errors: ValueError as in `composition`, and for circuits with biases, whose last row is no direction of the stream.

    Example:
        >>> composition_scores(interp.Circuits(model.transformer), "V").shape
        torch.Size([3, 8, 3, 8])
    """
    return _ratios(*_halves(circuits, kind, offset))


def against_null(
    circuits: Circuits, kind: Kind, *, null: Null = "spectrum", offset: int | None = None
) -> tuple[Float[Tensor, "l h l h"], Nakagami]:
    """The scores of every pair in float64 on the host, and the law of each under the null; see `composition`."""
    if null not in NULLS:
        raise ValueError(f"null must be one of {', '.join(NULLS)}, got {null!r}")
    sources, destinations = _halves(circuits, kind, offset)
    config = circuits.model.config
    if null == "shape":
        a = b = gaussian_concentration(config.d_model, config.head_width)
    else:
        a, b = concentration(sources).cpu()[:, :, None, None], concentration(destinations).cpu()
    raw = _ratios(sources, destinations).cpu().double()
    return raw, overlap_null(a, b, config.d_model)


def virtual_heads(circuits: Circuits, src: Head, dst: Head) -> FactoredMatrix:
    """OV1 @ OV2 of two heads (layer, head): what the pair moves when the second attends to what the first moved.

    Elhage et al. 2021, "Virtual attention heads"; its pattern is A2 A1. In float32 at least.
    Errors: IndexError for a head that does not exist, ValueError unless the source is in an earlier layer.

    Example:
        >>> virtual_heads(interp.Circuits(model.transformer), (0, 1), (2, 3)).trace()
    """
    return _product(circuits, "V", src, dst, None)


@dataclass(frozen=True, eq=False)
class Directions:
    """The singular triples of W1 W2, strongest first; every direction has length 1.

    The three directions of a row have one arbitrary sign in common (`between` follows `left`); rows of equal share
    may be rotated among each other.
    """

    left: Float[Tensor, "k d"]
    """What the source has to read."""
    between: Float[Tensor, "k d"]
    """What it then writes: left @ W1, as a direction. Not orthogonal to each other."""
    right: Float[Tensor, "k d"]
    """What the destination makes of it: Q, the key it then looks for; K, the query that finds it; V, what it writes."""
    share: Float[Tensor, "k"]
    """Of ||W1 W2||^2; all shares sum to 1. NaN for a product of zeros."""


def composition_directions(
    circuits: Circuits, kind: Kind, src: Head, dst: Head, k: int | None = None, *, offset: int | None = None
) -> Directions:
    """Which directions carry the composition of two heads: the k strongest singular triples of W1 W2 (None: all).

    Errors: as in `virtual_heads` and `composition`, and ValueError for a k that is not 1 to d_head.

    Example:
        >>> composition_directions(interp.Circuits(model.transformer), "K", (0, 1), (1, 2), k=3).share
    """
    most = min(circuits.model.config.head_width, circuits.model.config.d_model)
    if k is not None and not 1 <= k <= most:
        raise ValueError(f"1 to {most} directions are required, got {k}")
    left, s, right = _product(circuits, kind, src, dst, offset).svd()
    source = circuits.ov(*src).wide()
    written = left.mT[:k] @ source.A @ source.B
    power = s.square()
    return Directions(
        left.mT[:k], torch.nn.functional.normalize(written, dim=-1), right.mT[:k], power[:k] / power.sum()
    )


def _attrs(circuits: Circuits, kind: Kind, null: Null, offset: int | None) -> dict[str, str | int]:
    config = circuits.model.config
    attrs: dict[str, str | int] = {
        "kind": kind, "null": NULLS[null], "folded": int(circuits.folded), "d_model": config.d_model,
        "unit": "ratio of Frobenius norms (raw, null, excess), standard deviations of the ratio (z)",
    }  # fmt: skip
    if isinstance(config.position, Rotary) and kind != "V":
        attrs["offset"] = offset or 0
    return attrs


def _product(circuits: Circuits, kind: Kind, src: Head, dst: Head, offset: int | None) -> FactoredMatrix:
    """W1 W2 of one pair."""
    first, second = circuits.ov(*src), _read(circuits, kind, *dst, offset=offset)
    if src[0] >= dst[0]:
        raise ValueError(
            "a source in an earlier layer than the destination is required, got "
            f"{src[0]}.{src[1]} -> {dst[0]}.{dst[1]}"
        )
    return first.wide() @ second.wide()


def _read(
    circuits: Circuits, kind: Kind, layer: int, head: int | None = None, *, offset: int | None = None
) -> FactoredMatrix:
    """W2: what the destination reads with, the side in question on the rows."""
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    if circuits.biases:
        raise ValueError("composition requires circuits without biases: their last row is no direction")
    if kind == "V":
        if offset is not None:
            raise ValueError(f"V-composition does not depend on an offset, got {offset}")
        return circuits.ov(layer, head)
    qk = circuits.qk(layer, head, offset=offset)
    return qk if kind == "Q" else qk.T


@torch.no_grad()
def _halves(
    circuits: Circuits, kind: Kind, offset: int | None
) -> tuple[Float[Tensor, "l h e d"], Float[Tensor, "l h e d"]]:
    """Of every head as source and as destination, a half: ||W1 W2|| / (||W1|| ||W2||) = ||half1 @ half2^T||."""
    layers = range(circuits.model.config.n_layers)
    read = [_half(_read(circuits, kind, layer, offset=offset).T) for layer in layers]
    written = [_half(circuits.ov(layer)) for layer in layers]
    return torch.stack(written), torch.stack(read)


def _half(matrix: FactoredMatrix) -> Float[Tensor, "h e d"]:
    """The thin matrix with the Gram matrix of W / ||W||: R B for W = A B and A = (orthonormal) R. NaN for W = 0."""
    half = torch.linalg.qr(wide(matrix.A), mode="r")[1] @ wide(matrix.B)
    return half / half.norm(dim=(-2, -1), keepdim=True)


def _ratios(
    sources: Float[Tensor, "l h e d"], destinations: Float[Tensor, "l h e d"]
) -> Float[Tensor, "l h l h"]:
    """||half1 @ half2^T|| of every pair, one product per pair of layers; NaN unless the source is in an earlier one."""
    n, heads, width, _ = sources.shape
    written, read = (rearrange(x, "l h e d -> l (h e) d") for x in (sources, destinations))
    squares = sources.new_full((n, heads, n, heads), torch.nan)
    for first in range(n):
        for second in range(first + 1, n):
            entries = (written[first] @ read[second].mT).square_()
            rows = rearrange(entries, "(h e) c -> h e c", h=heads).sum(1)  # contiguous first: half the time
            squares[first, :, second] = rearrange(rows, "h (g e) -> h g e", e=width).sum(-1)
    return squares.sqrt()
