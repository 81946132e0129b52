"""Q-, K- and V-composition of all pairs of heads, from the weights, as effect sizes.

Elhage et al. 2021, "Composition of attention heads": a pair's score is ||W1 W2|| / (||W1|| ||W2||), Frobenius norms, in
row convention with W1 = OV of the source and W2 = QK (Q), QK^T (K) or OV (V) of the destination. A ratio says little by
itself: random heads have 1/sqrt(d), and where the dimensions of the stream differ in scale all pairs have more. So the
result also has that null, and the ratio relative to the ratios of both heads with the other heads of their layers.

There is no p: no null distribution that we tried was calibrated on eight kinds of random weights without composition
(`experiments/bench/composition_nulls.py`). The one from the heads' singular values called every pair significant where
the dimensions of the stream differ in scale.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from interp.core.boundary import public
from interp.core.factored import FactoredMatrix
from interp.core.results import labelled
from interp.core.stats import upcast
from interp.core.viewer import Brief
from interp.model.config import Rotary
from interp.model.parts import Part, PartName, as_part
from interp.passes.observe import Model, Subject
from interp.passes.question import Question, WithoutData
from interp.runs.functions import of_weights
from interp.weights.head_circuits import HeadCircuits, as_circuits, head_names

if TYPE_CHECKING:
    import xarray as xr

CompositionKind = Literal["Q", "K", "V"]
RATIO = "ratio of Frobenius norms"
NULL = "1 / sqrt(d_model): heads in random directions"
FACTOR = "times the medians of the two layers"
"""The unit of `relative`."""


@dataclass(frozen=True)
class Composition(Question):
    """Composition score of every head with every head of a later layer, from the weights alone.

    Two heads compose if one reads what the other writes; the weights alone say how well that fits.

    Args:
        kind: what the destination reads the source with: its queries ("Q"), keys ("K") or values ("V").
        folded: whether norms are part of the heads, as in `HeadCircuits`.
        offset: under rotary positions, how many tokens before the query the key of QK stands, for kinds Q and K; None:
            0. A previous-token head's is 1; an induction head's distance is that between repeats, so look at several.

    Returns:
        Dataset[src, dst], heads by name, with the coordinates `src_layer` and `dst_layer`; NaN where the source is not
        in an earlier layer. Of grouped queries every query head counts, with the key and value weights of its group.

        - `value`: ||W1 W2|| / (||W1|| ||W2||), between 0 and 1, as in `composition_scores`.
        - `null`: 1 / sqrt(d_model), the root mean square of that ratio between random directions, exact whatever the
          heads' singular values.
        - `excess`: value - null.
        - `relative`: value times the median of its two layers, divided by the medians of both heads in them (what
          medians of rows and columns leave, Tukey's median polish): 1 for a pair as its heads are with the others of
          these layers.

        All are effect sizes, none is a test. In a model whose stream has a few large dimensions every pair is above the
        null, for all heads write and read those. `relative` leaves out what is common to the heads of a layer; it
        cannot see a head that composes with more than half of them, nor anything with one head a layer. Read both.

    Raises:
        ValueError: an unknown kind, a single layer, and an offset for V, outside the context, or under other positions.
        AttributeError: a layer whose heads have no such circuit.

    Caveats:
        It says what can be read, not what is: attention may never look there. A pair below the null can still be the
        mechanism, where the directions that matter are a small part of both norms: look at the circuit between tokens.
        Only self-attention within one stack composes here; of an encoder-decoder, ask about one side. In post-norm
        models the stream also passes norms between the layers, which belong to no head and are left out. Everything is
        NaN for a head of zeros.

    Source:
        Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", section "Composition of attention
        heads". Tukey 1977, median polish.

    See Also:
        `composition_scores`: the ratios as a tensor. `composition_directions`: which directions carry one pair.

    Example:
        >>> scores = interp.composition(model, "K")
        >>> 0 < float(scores.value.sel(src="L0H1", dst="L1H2")) < 1
        True
        >>> interp.frame(scores).nlargest(3, "excess")[["src", "dst", "value", "relative"]]
    """

    kind: CompositionKind = "K"
    _: KW_ONLY
    folded: bool = True
    offset: int | None = None
    of_weights: ClassVar[bool] = True

    def bind(self, model: Subject) -> WithoutData:
        """Products of thin matrices, no pass."""
        circuits = HeadCircuits(model, folded=self.folded)
        if circuits.config.n_layers < 2:
            raise ValueError(f"composition requires at least two layers, got {circuits.config.n_layers}")
        _check(circuits, self.kind, self.offset)
        return WithoutData(self.name, partial(_pair_table, circuits, self))


composition = of_weights(Composition)


@public()
def composition_scores(
    circuits: Model | HeadCircuits, kind: CompositionKind, *, offset: int | None = None
) -> Float[Tensor, "l h l h"]:
    """Ratios ||W1 W2|| / (||W1|| ||W2||) of every source head and destination head.

    W1 = OV of the source; W2 = QK of the destination for Q, QK^T for K, OV for V. With W = A B, ||A1 B1 A2 B2|| = ||(R
    B1) (A2 S^T)|| for the triangular factors R of A1 and S of B2^T: one product of thin matrices per pair of layers,
    and nothing of size d x d. 15 times as fast as TransformerLens' all_composition_scores
    (experiments/bench/composition.py).

    Args:
        circuits: a model (norms folded in), or circuits under other conventions.
        kind: what the destination reads the source with: its queries ("Q"), keys ("K") or values ("V").
        offset: under rotary positions, how many tokens before the query the key of QK stands; None: 0.

    Returns:
        [l h l h], source layer and head, then destination layer and head, between 0 and 1. NaN where the source is not
        in an earlier layer, or a head is zero.

    Raises:
        ValueError: as in `composition`, and for circuits with biases, whose last row is no direction of the stream.

    Source:
        Elhage et al. 2021, "Composition of attention heads".

    See Also:
        `composition`: the same ratios with their chance level, as a table.

    Example:
        >>> composition_scores(model, "V").shape
        torch.Size([3, 8, 3, 8])
    """
    circuits = as_circuits(circuits)
    _check(circuits, kind, offset)
    return _ratios(*_normalised_halves(circuits, kind, offset))


def relative_scores(ratio: Float[Tensor, "l h m g"]) -> Float[Tensor, "l h m g"]:
    """Each ratio times the median of its two layers, divided by the medians of its two heads in them.

    A head's median is over the heads of the other layer. The layers' median is the median of the heads' medians, the
    mean of those of source and destination. All are medians of logarithms. So the result is 1 everywhere if each ratio
    is a factor of its source times a factor of its destination. NaN where a ratio is NaN or a median is 0.

    Example:
        >>> alike = torch.tensor([0.1, 0.2, 0.4])[:, None] * torch.tensor([1.0, 2.0])
        >>> relative_scores(alike[None, :, None]).unique()
        tensor([1.])
    """
    size = ratio.double().log()
    # [l h m g]: the median of a source head over g, and of a destination head over h
    source, target = (size.nanquantile(0.5, dim=dim, keepdim=True) for dim in (3, 1))
    layers = (source.nanquantile(0.5, dim=1, keepdim=True) + target.nanquantile(0.5, dim=3, keepdim=True)) / 2
    expected = source + target - layers
    return (size - expected.masked_fill(expected.isinf(), torch.nan)).exp().to(ratio)


@public()
def virtual_heads(circuits: Model | HeadCircuits, src: PartName, dst: PartName) -> FactoredMatrix:
    """The virtual head OV1 @ OV2 of two heads: its OV circuit, when the second reads what the first wrote.

    Its attention pattern is A2 A1.

    Args:
        circuits: a model (norms folded in), or circuits under other conventions.
        src, dst: heads by name, such as "L0H1"; the source in an earlier layer than the destination.

    Returns:
        FactoredMatrix [d d], what the source reads on the rows, in float32 at least.

    Raises:
        IndexError: a head that does not exist.
        ValueError: a source that is not in an earlier layer.

    Source:
        Elhage et al. 2021, "Virtual attention heads".

    Example:
        >>> virtual_heads(model, "L0H1", "L2H3").trace()
    """
    return _product(as_circuits(circuits), "V", src, dst, None)


@dataclass(frozen=True, eq=False, repr=False)
class SingularTriples(Brief):
    """Singular triples of the product W1 W2 of two heads, strongest first; every direction has length 1.

    The three directions of a row have one arbitrary sign in common (`between` follows `left`); rows of equal share may
    be rotated among each other.
    """

    left: Float[Tensor, "k d"]
    """Directions that the source reads."""
    between: Float[Tensor, "k d"]
    """Directions that the source then writes: left @ W1. They are not orthogonal to each other."""
    right: Float[Tensor, "k d"]
    """Directions on the destination's other side: Q, of the key that matches; K, of the query; V, of its output."""
    share: Float[Tensor, "k"]
    """Share of each triple in ||W1 W2||^2; all shares sum to 1. NaN for a product of zeros."""


@public()
def composition_directions(
    circuits: Model | HeadCircuits,
    kind: CompositionKind,
    src: PartName,
    dst: PartName,
    *,
    top: int | None = None,
    offset: int | None = None,
) -> SingularTriples:
    """Directions that carry the composition of two heads: the strongest singular triples of W1 W2.

    They are tensors, so that they can be read on: `directions(model, result.between)` lists them as tokens.

    Args:
        circuits: a model (norms folded in), or circuits under other conventions.
        kind: what the destination reads the source with: its queries ("Q"), keys ("K") or values ("V").
        src, dst: heads by name, such as "L0H1"; the source in an earlier layer than the destination.
        top: how many triples, at most d_head; None: all.
        offset: under rotary positions, how many tokens before the query the key of QK stands; None: 0.

    Returns:
        SingularTriples, [k d] each: what the source reads, what it then writes, what the destination makes of it, and
        the share of each triple in ||W1 W2||^2.

    Raises:
        IndexError: a head that does not exist.
        ValueError: as in `virtual_heads` and `composition`; a `top` that is not 1 to d_head.

    See Also:
        `composition`: the scores of all pairs.

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


def _pair_table(circuits: HeadCircuits, question: Composition) -> xr.Dataset:
    """The result of `composition`: ratio, null, excess and relative ratio of every pair of heads, by name."""
    ratio = composition_scores(circuits, question.kind, offset=question.offset).double()
    null = torch.full_like(ratio, circuits.config.d_model**-0.5)
    values = {"value": ratio, "null": null, "excess": ratio - null, "relative": relative_scores(ratio)}
    heads = head_names(circuits.config)
    layers = [Part.of(head).layer for head in heads]
    n = len(heads)
    cells = {
        name: torch.where(ratio.isfinite(), array, torch.nan).reshape(n, n) for name, array in values.items()
    }
    return labelled(
        question.name,
        {name: (("src", "dst"), array) for name, array in cells.items()},
        coords={"src": heads, "dst": heads, "src_layer": ("src", layers), "dst_layer": ("dst", layers)},
        units={
            **dict.fromkeys(("value", "null", "excess"), RATIO),
            "relative": FACTOR,
        },
        attrs=_attrs(circuits, question),
    )


def _attrs(circuits: HeadCircuits, question: Composition) -> dict[str, str | int]:
    config = circuits.config
    attrs: dict[str, str | int] = {
        "kind": question.kind, "null": NULL, "folded": int(question.folded), "d_model": config.d_model,
        "unit": RATIO,
    }  # fmt: skip
    if isinstance(config.position, Rotary) and question.kind != "V":
        attrs["offset"] = question.offset or 0
    return attrs


def _check(circuits: HeadCircuits, kind: CompositionKind, offset: int | None) -> None:
    """Refuse kinds, circuits and offsets that have no composition."""
    if kind not in get_args(CompositionKind):
        raise ValueError(f"kind must be one of {', '.join(get_args(CompositionKind))}, got {kind!r}")
    if circuits.biases:
        raise ValueError("composition requires circuits without biases: their last row is no direction")
    if kind == "V" and offset is not None:
        raise ValueError(f"V-composition does not depend on an offset, got {offset}")
    circuits.checked_offsets(offset)


def _product(
    circuits: HeadCircuits, kind: CompositionKind, src: PartName, dst: PartName, offset: int | None
) -> FactoredMatrix:
    """W1 W2 of one pair of heads."""
    _check(circuits, kind, offset)
    source, destination = (_as_head(circuits, head) for head in (src, dst))
    assert source.layer is not None and destination.layer is not None
    if source.layer >= destination.layer:
        raise ValueError(
            f"a source in an earlier layer than the destination is required, got {source} -> {destination}"
        )
    return circuits.ov(source).wide() @ _reading_matrix(circuits, kind, destination, offset).wide()


def _as_head(circuits: HeadCircuits, name: PartName) -> Part:
    """The named head of self-attention; ValueError for another part."""
    part = as_part(name, circuits.config)
    if part.kind != "head":
        raise ValueError(f"a head of self-attention is required, such as L1H2, got {part}")
    return part


def _reading_matrix(
    circuits: HeadCircuits, kind: CompositionKind, heads: Part, offset: int | None
) -> FactoredMatrix:
    """W2, the circuit of the destination, with the side that reads the source on its rows."""
    if kind == "V":
        return circuits.ov(heads)
    qk = circuits.qk(heads, offset=offset)
    return qk if kind == "Q" else qk.T


@torch.no_grad()
def _normalised_halves(
    circuits: HeadCircuits, kind: CompositionKind, offset: int | None
) -> tuple[list[Float[Tensor, "h e d"]], list[Float[Tensor, "h e d"]]]:
    """For each layer, small matrices with ||W1 W2|| / (||W1|| ||W2||) = ||half1 @ half2^T||, as source and destination.

    The layers are not stacked, since that would take half as long as their QR decompositions.
    """
    written, read = [], []
    for layer in (Part("attn", layer) for layer in range(circuits.config.n_layers)):
        reads = None if kind == "V" else _reading_matrix(circuits, kind, layer, offset)
        ov = circuits.ov(layer)
        written.append(_normalised_half(ov))
        read.append(_normalised_half((ov if reads is None else reads).T))
    return written, read


def _normalised_half(matrix: FactoredMatrix) -> Float[Tensor, "h e d"]:
    """H with H^T H = W^T W / ||W||^2: H = R B / ||W|| for W = A B and the QR factor R of A; NaN for W = 0."""
    half = torch.linalg.qr(upcast(matrix.A), mode="r")[1] @ upcast(matrix.B)
    return half.div_(half.norm(dim=(-2, -1), keepdim=True))


def _ratios(
    sources: list[Float[Tensor, "h e d"]], destinations: list[Float[Tensor, "h e d"]]
) -> Float[Tensor, "l h l h"]:
    """||half1 @ half2^T|| of every pair of heads; NaN unless the source is in an earlier layer."""
    n, (heads, width, _) = len(sources), sources[0].shape
    written, read = ([half.flatten(0, 1) for half in side] for side in (sources, destinations))
    squares = sources[0].new_full((n, heads, n, heads), torch.nan)
    for first in range(n):
        for second in range(first + 1, n):
            entries = (written[first] @ read[second].mT).square_()
            rows = rearrange(entries, "(h e) c -> h e c", h=heads).sum(1)  # this axis first: half the time
            squares[first, :, second] = rearrange(rows, "h (g e) -> h g e", e=width).sum(-1)
    return squares.sqrt()
