"""Which heads read what earlier heads write: Q-, K- and V-composition of all pairs, from the weights, against a null.

Elhage et al. 2021, "Composition of attention heads": a pair's score is ||W1 W2|| / (||W1|| ||W2||), Frobenius norms, in
row convention with W1 = OV of the source and W2 = QK (Q), QK^T (K) or OV (V) of the destination. A ratio says little by
itself: random heads have 1/sqrt(d), most trained ones less (Elhage et al.). So it comes with the law it has by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from interp.core.boundary import public
from interp.core.factored import FactoredMatrix
from interp.core.haar import Nakagami, concentration, gaussian_concentration, overlap_null
from interp.core.results import labelled
from interp.core.stats import wide
from interp.core.transfers import fetched
from interp.core.viewer import Brief
from interp.model.config import Rotary
from interp.model.parts import Named, Part, as_part
from interp.passes.analysis import Alone, Question
from interp.passes.observe import Model, Subject
from interp.runs.run import answered
from interp.weights.head_circuits import HeadCircuits, as_circuits, head_names

if TYPE_CHECKING:
    import xarray as xr

Kind = Literal["Q", "K", "V"]
Null = Literal["spectrum", "shape"]
NULLS = {
    "spectrum": "independent random frames, the heads' own singular values",
    "shape": "Gaussian factors of the heads' shapes",
}
RATIO = "ratio of Frobenius norms"


@dataclass(frozen=True)
class Composition(Question):
    """How strongly every head composes with every head of a later layer; `composition` describes the result."""

    kind: Kind = "K"
    """What the destination reads the source with: its queries, keys or values."""
    folded: bool = True
    """Whether norms are part of the heads, as in `HeadCircuits`."""
    null: Null = "spectrum"
    """What chance is: the heads' own singular values in random frames, or Gaussian heads of the shape."""
    offset: int | None = None
    """Under rotary positions, how many tokens before the query the key of QK stands (None: 0)."""
    of_weights: ClassVar[bool] = True

    def asked(self, model: Subject) -> Alone:
        """Products of thin matrices, no pass."""
        circuits = HeadCircuits(model, folded=self.folded)
        if circuits.config.n_layers < 2:
            raise ValueError(f"composition requires at least two layers, got {circuits.config.n_layers}")
        _check(circuits, self.kind, self.offset, self.null)
        return Alone(self.name, partial(_pairs, circuits, self))


@public()
def composition(
    model: Model,
    kind: Kind = "K",
    *,
    folded: bool = True,
    null: Null = "spectrum",
    offset: int | None = None,
) -> xr.Dataset:
    """How strongly every head composes with every head of a later layer, and how far that is from chance.

    Two heads compose if one reads what the other writes; the weights alone say how well that fits.

    Returns Dataset[src, dst], heads by name, with the coordinates `src_layer` and `dst_layer`; NaN where the source is
    not in an earlier layer:
    `value` in [0, 1], ||W1 W2|| / (||W1|| ||W2||), as in `composition_scores`;
    `null` and `null_sd`, its mean and standard deviation under the null; `excess` = value - null (the paper's baseline
    subtraction under null="shape"); `z` = excess / null_sd, of the ratio and not of its square; `p`, one-sided, the
    chance of a ratio at least as large, 0 below 1e-308.

    null="spectrum" keeps each head's singular values and draws their frames at random (Haar); "shape" draws heads with
    Gaussian W_Q, W_K, W_V, W_O. Mean and variance of ratio^2 are exact in closed form (`interp.core.haar`), those of
    the ratio and p are of the Gamma law with them: p is good to a tenth at 0.05, and an order of magnitude far out
    (`interp.core.haar.Nakagami`). Trained heads differ from either in bulk: rank pairs, and read z as a distance, since
    thousands of pairs are tested at once.

    folded: norms are part of the heads, as in `HeadCircuits`. offset: under rotary positions QK, and with it Q- and
    K-composition, holds for a key that many tokens before the query (None: 0). A previous-token head's is 1; an
    induction head's distance is that between repeats, so look at several. Grouped queries: every query head counts,
    with the key and value weights of its group.

    Caveats: it says what can be read, not what is: attention may never look there. A pair below its null (z far below
    0) can still be the mechanism, where the directions that matter are a small part of both norms: look at the circuit
    between tokens. Only self-attention within one stack
    composes here; of an encoder-decoder, ask about one side. In post-norm models the stream also passes norms between
    the layers, which belong to no head and are left out. z and p are NaN for a head that is a multiple of an orthogonal
    matrix (it composes alike with all), everything is NaN for a head of zeros.
    Errors: ValueError for an unknown kind or null, a single layer, and an offset for V, outside the context, or under
    other positions; AttributeError for a layer whose heads have no such circuit.

    Example:
        >>> scores = interp.composition(model, "K")
        >>> float(scores.z.sel(src="L0H1", dst="L1H2")) < 10
        True
        >>> interp.frame(scores).nlargest(3, "z")[["src", "dst", "value", "z"]]
    """
    return answered(Composition(kind, folded, null, offset), model)


@public()
def composition_scores(
    circuits: Model | HeadCircuits, kind: Kind, *, offset: int | None = None
) -> Float[Tensor, "l h l h"]:
    """||W1 W2|| / (||W1|| ||W2||) of every pair: source layer and head, destination layer and head.

    W1 = OV; W2 = QK for Q, QK^T for K, OV for V. NaN where the source is not in an earlier layer, or a head is zero.
    With W = A B, ||A1 B1 A2 B2|| = ||(R B1) (A2 S^T)|| for the triangular factors R of A1 and S of B2^T: one product
    of thin matrices per pair of layers, and nothing of size d x d. 15 times as fast as TransformerLens'
    all_composition_scores (experiments/bench/composition.py).
    circuits: a model (norms folded in), or circuits under other conventions.
    Errors: ValueError as in `composition`, and for circuits with biases, whose last row is no direction of the stream.

    Example:
        >>> composition_scores(model, "V").shape
        torch.Size([3, 8, 3, 8])
    """
    circuits = as_circuits(circuits)
    _check(circuits, kind, offset)
    return _ratios(*_halves(circuits, kind, offset))


def against_null(
    circuits: HeadCircuits, kind: Kind, *, null: Null = "spectrum", offset: int | None = None
) -> tuple[Float[Tensor, "l h l h"], Nakagami]:
    """The scores of every pair in float64 on the host, and the law of each under the null; see `composition`."""
    _check(circuits, kind, offset, null)
    sources, destinations = _halves(circuits, kind, offset)
    config = circuits.config
    found = {"ratio": _ratios(sources, destinations)}
    if null == "spectrum":
        halves = {"source": sources, "destination": destinations}
        found |= {name: torch.stack([concentration(half) for half in each]) for name, each in halves.items()}
    here = fetched(found)
    if null == "shape":
        a = b = gaussian_concentration(config.d_model, config.head_width)
    else:
        a, b = here["source"][:, :, None, None], here["destination"]
    ratios = here["ratio"].double()
    return ratios, overlap_null(a, b, config.d_model)


@public()
def virtual_heads(circuits: Model | HeadCircuits, src: Named, dst: Named) -> FactoredMatrix:
    """OV1 @ OV2 of two heads: what the pair moves when the second attends to what the first moved.

    Elhage et al. 2021, "Virtual attention heads"; its pattern is A2 A1. In float32 at least.
    circuits: a model (norms folded in), or circuits under other conventions. src, dst: heads by name.
    Errors: IndexError for a head that does not exist, ValueError unless the source is in an earlier layer.

    Example:
        >>> virtual_heads(model, "L0H1", "L2H3").trace()
    """
    return _product(as_circuits(circuits), "V", src, dst, None)


@dataclass(frozen=True, eq=False, repr=False)
class SingularTriples(Brief):
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


@public()
def composition_directions(
    circuits: Model | HeadCircuits,
    kind: Kind,
    src: Named,
    dst: Named,
    *,
    top: int | None = None,
    offset: int | None = None,
) -> SingularTriples:
    """Which directions carry the composition of two heads: the strongest singular triples of W1 W2 (top=None: all).

    They are tensors, so that they can be read on: `directions(model, found.between)` says them in tokens.
    circuits: a model (norms folded in), or circuits under other conventions. src, dst: heads by name.
    Errors: as in `virtual_heads` and `composition`, and ValueError for a `top` that is not 1 to d_head.

    Example:
        >>> composition_directions(model, "K", "L0H1", "L1H2", top=3).share
    """
    circuits = as_circuits(circuits)
    most = min(circuits.config.head_width, circuits.config.d_model)
    if top is not None and not 1 <= top <= most:
        raise ValueError(f"top must be in [1, {most}] directions, got {top}")
    left, s, right = _product(circuits, kind, src, dst, offset).svd()
    source = circuits.ov(src).wide()
    written = left.mT[:top] @ source.A @ source.B
    power = s.square()
    return SingularTriples(
        left.mT[:top],
        torch.nn.functional.normalize(written, dim=-1),
        right.mT[:top],
        power[:top] / power.sum(),
    )


def _pairs(circuits: HeadCircuits, asked: Composition) -> xr.Dataset:
    """The ratio of every pair against its null, heads by name."""
    ratio, law = against_null(circuits, asked.kind, null=asked.null, offset=asked.offset)
    mean, sd = law.mean(), law.sd()
    values = {
        "value": ratio, "null": mean, "null_sd": sd, "excess": ratio - mean, "z": (ratio - mean) / sd,
        "p": law.upper(ratio),
    }  # fmt: skip
    heads = head_names(circuits.config)
    layers = [Part.of(head).layer for head in heads]
    n = len(heads)
    cells = {
        name: torch.where(ratio.isfinite(), each, torch.nan).reshape(n, n) for name, each in values.items()
    }
    return labelled(
        asked.name,
        {name: (("src", "dst"), each) for name, each in cells.items()},
        coords={"src": heads, "dst": heads, "src_layer": ("src", layers), "dst_layer": ("dst", layers)},
        units={
            **dict.fromkeys(("value", "null", "null_sd", "excess"), RATIO),
            "z": "standard deviations of the ratio",
            "p": "probability",
        },
        attrs=_attrs(circuits, asked),
    )


def _attrs(circuits: HeadCircuits, asked: Composition) -> dict[str, str | int]:
    config = circuits.config
    attrs: dict[str, str | int] = {
        "kind": asked.kind, "null": NULLS[asked.null], "folded": int(asked.folded), "d_model": config.d_model,
        "unit": RATIO,
    }  # fmt: skip
    if isinstance(config.position, Rotary) and asked.kind != "V":
        attrs["offset"] = asked.offset or 0
    return attrs


def _check(circuits: HeadCircuits, kind: Kind, offset: int | None, null: Null = "spectrum") -> None:
    """Refuse what no composition is of."""
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    if null not in NULLS:
        raise ValueError(f"null must be one of {', '.join(NULLS)}, got {null!r}")
    if circuits.biases:
        raise ValueError("composition requires circuits without biases: their last row is no direction")
    if kind == "V" and offset is not None:
        raise ValueError(f"V-composition does not depend on an offset, got {offset}")
    circuits.checked_offsets(offset)


def _product(
    circuits: HeadCircuits, kind: Kind, src: Named, dst: Named, offset: int | None
) -> FactoredMatrix:
    """W1 W2 of one pair."""
    _check(circuits, kind, offset)
    source, destination = (_head(circuits, head) for head in (src, dst))
    assert source.layer is not None and destination.layer is not None
    if source.layer >= destination.layer:
        raise ValueError(
            f"a source in an earlier layer than the destination is required, got {source} -> {destination}"
        )
    return circuits.ov(source).wide() @ _read(circuits, kind, destination, offset).wide()


def _head(circuits: HeadCircuits, given: Named) -> Part:
    """A head of self-attention."""
    found = as_part(given, circuits.config)
    if found.kind != "head":
        raise ValueError(f"a head of self-attention is required, such as L1H2, got {found}")
    return found


def _read(circuits: HeadCircuits, kind: Kind, heads: Part, offset: int | None) -> FactoredMatrix:
    """W2: what the destination reads with, the side in question on the rows."""
    if kind == "V":
        return circuits.ov(heads)
    qk = circuits.qk(heads, offset=offset)
    return qk if kind == "Q" else qk.T


@torch.no_grad()
def _halves(
    circuits: HeadCircuits, kind: Kind, offset: int | None
) -> tuple[list[Float[Tensor, "h e d"]], list[Float[Tensor, "h e d"]]]:
    """Of every head as source and as destination, a half: ||W1 W2|| / (||W1|| ||W2||) = ||half1 @ half2^T||.

    Layer by layer: to stack them would take as long as half of their QR.
    """
    written, read = [], []
    for layer in (Part("attn", layer) for layer in range(circuits.config.n_layers)):
        reads = None if kind == "V" else _read(circuits, kind, layer, offset)
        ov = circuits.ov(layer)
        written.append(_half(ov))
        read.append(_half((ov if reads is None else reads).T))
    return written, read


def _half(matrix: FactoredMatrix) -> Float[Tensor, "h e d"]:
    """The thin matrix with the Gram matrix of W / ||W||: R B for W = A B and A = (orthonormal) R. NaN for W = 0."""
    half = torch.linalg.qr(wide(matrix.A), mode="r")[1] @ wide(matrix.B)
    return half.div_(half.norm(dim=(-2, -1), keepdim=True))


def _ratios(
    sources: list[Float[Tensor, "h e d"]], destinations: list[Float[Tensor, "h e d"]]
) -> Float[Tensor, "l h l h"]:
    """||half1 @ half2^T|| of every pair, one product per pair of layers; NaN unless the source is in an earlier one."""
    n, (heads, width, _) = len(sources), sources[0].shape
    written, read = ([half.flatten(0, 1) for half in each] for each in (sources, destinations))
    squares = sources[0].new_full((n, heads, n, heads), torch.nan)
    for first in range(n):
        for second in range(first + 1, n):
            entries = (written[first] @ read[second].mT).square_()
            rows = rearrange(entries, "(h e) c -> h e c", h=heads).sum(1)  # contiguous first: half the time
            squares[first, :, second] = rearrange(rows, "h (g e) -> h g e", e=width).sum(-1)
    return squares.sqrt()
