"""Vectors of the residual stream (singular directions, neurons' weights, any others) as lists of tokens.

A direction that is WRITTEN to the stream is scored by what it adds to each token's logit, `d W_U`, with the final norm
at scale 1 and centred over the vocabulary (a constant on all logits has no effect). A direction that is READ from the
stream is scored by every token's embedding, `W_E d`, with the norm before it folded in. Geva et al. 2022 (value
vectors); Dar et al. 2022, "Analyzing Transformers in Embedding Space". Lists have the largest and the smallest scores,
since activations can be negative.

Caveats:
    `W_E d` is an inner product. As coordinates of d in the vocabulary it uses W_E^T in place of a right inverse of W_E
    (Dar et al. justify it by the overlap of the top tokens). A late layer also reads what earlier layers wrote, and
    early layers write for later ones to read: these lists show neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.kinds import listed
from interp.core.results import labelled
from interp.core.stats import upcast
from interp.core.viewer import Brief
from interp.data.text import Text
from interp.model.config import MLP, ModelConfig
from interp.model.parts import Part, PartName, as_part, as_parts
from interp.model.weights import Weights
from interp.passes.frozen import input_norm, output_norm
from interp.passes.observe import Subject
from interp.passes.question import Question, WithoutData
from interp.runs.functions import of_weights
from interp.weights.head_circuits import HeadCircuits
from interp.weights.token_pairs import worded
from interp.weights.typical_scales import ABOUT, logits_unit, typical_factors

if TYPE_CHECKING:
    import xarray as xr

DirectionMatrix = Literal["OV", "QK", "W_in", "W_gate", "W_out"]
DirectionSide = Literal["read", "written"]
ENDS = ("top", "bottom")
"""The two ends of a list: the largest scores and the smallest, rank 0 the most extreme."""
READ = "W_E . direction"
"""The unit of a token's score for a direction that is read, such as one of queries or keys."""
SEE_UNIT = "see the coordinate unit"
_CONVENTIONS = {
    "read": "W_E . direction, the norm before it at scale 1",
    "written": "final norm at scale 1, centred over the vocabulary",
    "inverse": "W_E^T stands for the right inverse of W_E (Dar et al. 2022)",
}


@dataclass(frozen=True, eq=False, repr=False)
class Directions(Brief, Question):
    """Vectors of the residual stream as lists of tokens: biases, embeddings, rows of a matrix, probes.

    Args:
        vectors: [d] or [n d], one vector of the stream or one per row.
        side: how a vector is scored: "written", by what it adds to the logits, or "read", by every token's embedding
            along it. Written: v W_U with the final norm at scale 1, centred over the vocabulary (`model.b_out`,
            `model.b_O`, `model.W_pos`, `model.W_E[5]`, a neuron's row of `model.W_out[2]`). Read: W_E v (a column of
            `model.W_Q[0, 1].mT`, a probe).
        top: how many tokens are listed at each end; None: 10.

    Returns:
        Dataset[direction, end, rank]; `end` is top or bottom, rank 0 the most extreme. Attribute `written_factor`: what
        numbers of written vectors are multiplied by in a typical pass.

        - `value`: the token's score, in logits (before the final norm), or W_E . direction.
        - `token`, `token_id` (coordinates): text and id of the token.
        - `norm` [direction]: length of the vector.

    Raises:
        ValueError: vectors that are not of floating type, finite and as wide as the stream, or a `top` beyond the
            vocabulary.

    Caveat:
        Vectors are taken as they stand in the stream. The norm that a matrix reads through, or that its output passes
        (sandwich norms), is not folded in; `neurons` and `singular_directions` do that.

    Source:
        Geva et al. 2022 (value vectors); Dar et al. 2022, "Analyzing Transformers in Embedding Space".

    See Also:
        `neurons`, `singular_directions`: the same lists of a model's own directions.

    Example:
        >>> directions(model, model.b_out, top=5).token.sel(direction=0, end="top").shape
        (5,)
    """

    of_layers: ClassVar[bool] = False

    vectors: Shaped[Tensor, "*n d"]
    _: KW_ONLY
    side: DirectionSide = "written"
    top: int | None = None
    of_weights: ClassVar[bool] = True

    def bind(self, model: Subject) -> WithoutData:
        """Products with the embedding or the unembedding, no pass."""
        circuits = HeadCircuits(model, folded=True)
        width = circuits.config.d_model
        vectors = torch.as_tensor(self.vectors)
        fits = vectors.ndim in (1, 2) and vectors.shape[-1] == width and vectors.numel() > 0
        if not fits or not vectors.is_floating_point() or not bool(vectors.isfinite().all()):
            raise ValueError(
                f"finite vectors of the stream, [{width}] or [direction, {width}], are required, got {vectors.dtype} "
                f"of shape {shape_text(vectors.shape)}"
            )
        most = circuits.config.n_outputs if self.side == "written" else circuits.config.d_vocab
        question = replace(self, top=listed(self.top, 10, most))
        return WithoutData(self.name, partial(_directions, circuits, model.text, question))


@dataclass(frozen=True)
class SingularDirections(Question):
    """The strongest singular directions of a head's OV or QK circuit or of an MLP's matrix, as lists of tokens.

    M = sum_i s_i u_i v_i^T in row convention: along u_i the matrix reads, along v_i it writes, s_i times as much. QK
    writes nothing: a query along u_i looks for keys along v_i. Norms are folded in (`HeadCircuits(folded=True)`).
    Invariant to W_V -> W_V M, W_O -> M^-1 W_O.

    Args:
        matrix: which matrix: OV or QK of a head, or W_in, W_gate or W_out of an MLP.
        part: the head (`"L1H2"`) or the MLP (`"L1.mlp"`) that has the matrix.
        offset: under rotary positions, how many tokens before the query the key of QK stands; None: 0.
        count: how many directions.
        top: how many tokens are listed at each end; None: 10.

    Returns:
        Dataset[direction, side, end, rank], directions by falling singular value. `side`: read and written for OV,
        query and key for QK, read for W_in and W_gate (a gated MLP's), written for W_out; `end`: top and bottom, rank 0
        the most extreme. u_i and v_i have one common sign, which is arbitrary; here the token of the largest absolute
        score on the last side is positive. Directions of equal singular values are arbitrary up to rotation.

        - `value`: the token's score, in the `unit` of its side.
        - `token`, `token_id` (coordinates): text and id of the token.
        - `singular_value` [direction].

    Raises:
        IndexError: a layer or head that does not exist.
        ValueError: a part that has no such matrix, an offset without rotary QK, more directions than the rank's bound,
            or a `top` beyond the vocabulary.

    Source:
        Dar et al. 2022, "Analyzing Transformers in Embedding Space".

    See Also:
        `directions`: the same lists of any vectors. `spectra`: the singular values of all matrices.

    Example:
        >>> result = singular_directions(model, "OV", "L1H2", count=3, top=5)
        >>> result.token.sel(side="written", end="top").shape
        (3, 5)
    """

    matrix: DirectionMatrix
    part: PartName
    _: KW_ONLY
    offset: int | None = None
    count: int = 10
    top: int | None = None
    of_weights: ClassVar[bool] = True

    def bind(self, model: Subject) -> WithoutData:
        """A decomposition of thin factors, no pass."""
        circuits = HeadCircuits(model, folded=True)
        if self.offset is not None and self.matrix != "QK":
            raise ValueError(f"an offset requires QK, got {self.matrix}")
        part, config = _owner(circuits.config, self.matrix, self.part), circuits.config
        circuits.checked_offsets(self.offset, cross=part.kind == "cross_head")
        width = config.head_width if part.index is not None else getattr(config.mlp, "d_mlp", 0)
        most = min(width, config.d_model)
        if not 1 <= self.count <= most:
            raise ValueError(f"{self.matrix} has 1 to {most} singular directions, got count={self.count}")
        config.require_tokens("what a matrix reads and writes as tokens, side by side,")
        question = replace(self, top=listed(self.top, 10, config.d_vocab))
        return WithoutData(self.name, partial(_singular_directions, circuits, model.text, part, question))


@dataclass(frozen=True)
class Neurons(Question):
    """Input and output directions of MLP neurons as lists of tokens.

    Neuron i reads the stream along column i of W_in (and of W_gate, if the MLP is gated) and writes n_i times row i of
    W_out: n_i (W_out[i] . W_U) is what it adds to the logits directly. Norms are folded in as in
    `HeadCircuits(folded=True)`.

    Args:
        parts: the neuron by name, `"L0N17"`, or several, of any layers.
        top: how many tokens are listed at each end; None: 10.

    Returns:
        Dataset[part, matrix, end, rank]. `part`: the neurons' names; `matrix`: W_in (W_gate, W_in) and W_out; `end`:
        top and bottom, rank 0 the most extreme.

        - `value`: the token's score, in the `unit` of its matrix.
        - `token`, `token_id` (coordinates): text and id of the token.
        - `norm` [part, matrix]: length of the neuron's row or column.

    Raises:
        IndexError: a layer or neuron that does not exist.
        ValueError: a model without neurons of its own (attention-only, mixture of experts, two MLPs in a block), or a
            `top` beyond the vocabulary.

    Source:
        Geva et al. 2022.

    See Also:
        `interp.features.top_examples`: the texts on which a neuron is largest.

    Example:
        >>> result = neurons(model, ["L0N3", "L0N17"], top=5)
        >>> result.token.sel(part="L0N17", matrix="W_out", end="bottom").shape
        (5,)
    """

    parts: PartName | Sequence[PartName]
    _: KW_ONLY
    top: int | None = None
    of_weights: ClassVar[bool] = True

    def bind(self, model: Subject) -> WithoutData:
        """Products with the embedding and the unembedding, no pass."""
        circuits = HeadCircuits(model, folded=True)
        config = circuits.config
        _check_mlp(config)
        chosen = as_parts(self.parts, config, ("neuron",), "a neuron, such as L0N17,")
        config.require_tokens("what neurons read and write as tokens, side by side,")
        question = replace(self, top=listed(self.top, 10, config.d_vocab))
        return WithoutData(self.name, partial(_neurons, circuits, model.text, chosen, question))


directions = of_weights(Directions)


singular_directions = of_weights(
    SingularDirections,
    renamed={"k": "count", "layer": "part, such as 'L3H5'", "head": "part, such as 'L3H5'"},
)


neurons = of_weights(Neurons, renamed={"layer": "parts, such as 'L3N17'", "index": "parts, such as 'L3N17'"})


@torch.no_grad()
def _directions(circuits: HeadCircuits, text: Text, question: Directions) -> xr.Dataset:
    embedded, unit = circuits.embedded, _unit(circuits, question.side)
    rows = question.vectors.detach().reshape(-1, circuits.config.d_model)
    rows = rows.to(embedded.device, upcast(embedded[:0]).dtype)
    vocabulary = text.of_outputs if question.side == "written" else text
    value, coords = _token_lists(
        _scores(circuits, rows, question.side), question.top, ("direction",), vocabulary
    )
    return labelled(
        question.name,
        {"value": value, "norm": (("direction",), rows.norm(dim=-1))},
        coords={"direction": range(len(rows)), **coords},
        units={"value": unit, "norm": "length"},
        attrs={"unit": unit, "side": question.side, **_conventions(circuits)},
    )


@torch.no_grad()
def _singular_directions(
    circuits: HeadCircuits, text: Text, part: Part, question: SingularDirections
) -> xr.Dataset:
    s, vectors = _singular_vectors(circuits, question.matrix, part, question.offset)
    scores = torch.stack(
        [_scores(circuits, x[:, : question.count].mT, side) for side, x in vectors.items()], 1
    )
    scores = scores * _sign(scores[:, -1])[:, None, None]
    value, coords = _token_lists(scores, question.top, ("direction", "side"), text)
    return labelled(
        question.name,
        {"value": value, "singular_value": (("direction",), s[: question.count])},
        coords={
            "direction": range(question.count), "side": list(vectors), **coords,
            "unit": ("side", [_unit(circuits, side) for side in vectors]),
        },
        units={"value": SEE_UNIT, "singular_value": "singular value"},
        attrs={
            **_conventions(circuits), "matrix": question.matrix, "part": str(part),
            "sign": "the largest absolute score of the last side is positive",
        },
    )  # fmt: skip


@torch.no_grad()
def _neurons(circuits: HeadCircuits, text: Text, chosen: Sequence[Part], question: Neurons) -> xr.Dataset:
    places = [(part.layer or 0, part.index or 0) for part in chosen]
    layers = {layer: _mlp_matrices(circuits, layer) for layer, _ in places}
    names = list(layers[places[0][0]])
    sides = ["written" if name == "W_out" else "read" for name in names]
    scores, norms = [], []
    for name, side in zip(names, sides, strict=True):
        vectors = {layer: w[name] if name == "W_out" else w[name].mT for layer, w in layers.items()}
        rows = torch.stack([vectors[layer][index] for layer, index in places])
        scores.append(_scores(circuits, rows, side))
        norms.append(rows.norm(dim=-1))
    value, coords = _token_lists(torch.stack(scores, 1), question.top, ("part", "matrix"), text)
    return labelled(
        question.name,
        {"value": value, "norm": (("part", "matrix"), torch.stack(norms, 1))},
        coords={
            "part": list(map(str, chosen)), "matrix": names, **coords,
            "unit": ("matrix", [_unit(circuits, side) for side in sides]),
        },
        units={"value": SEE_UNIT, "norm": "length"},
        attrs=_conventions(circuits),
    )  # fmt: skip


def _unit(circuits: HeadCircuits, side: str) -> str:
    """The unit of a token's score."""
    return logits_unit(circuits.config) if side == "written" else READ


def _conventions(circuits: HeadCircuits) -> dict[str, str | float]:
    """Attrs: the conventions of scores, and the factor of a typical pass on scores of written directions."""
    return {**_CONVENTIONS, "written_factor": typical_factors(circuits).written, "factor": ABOUT}


def _check_mlp(config: ModelConfig) -> None:
    """ValueError for a model whose neurons have no weights of their own, or that has two MLPs in a block."""
    if config.block.unusual is not None:
        raise ValueError(f"blocks with one MLP are required, this model {config.block.unusual}")
    if not isinstance(config.mlp, MLP):
        raise ValueError(f"a plain or gated MLP is required, this model is {config.mlp_in_words}")


def _owner(config: ModelConfig, matrix: DirectionMatrix, part: PartName) -> Part:
    """The head or the MLP that has the matrix. IndexError and ValueError as in `singular_directions`."""
    if matrix in ("OV", "QK"):
        owner = as_part(part, config)
        if owner.kind not in ("head", "cross_head"):
            raise ValueError(f"a head is required for {matrix}, such as L1H2, got {owner}")
        return owner
    _check_mlp(config)
    assert isinstance(config.mlp, MLP)
    known = ["W_gate"] * config.mlp.gated + ["W_in", "W_out"]
    if matrix not in known:
        raise ValueError(f"matrix must be OV, QK or, in this model, {', '.join(known)}, got {matrix!r}")
    owner = as_part(part, config)
    if owner.kind != "mlp":
        raise ValueError(f"an MLP is required for {matrix}, such as L1.mlp, got {owner}")
    return owner


def _singular_vectors(
    circuits: HeadCircuits, matrix: DirectionMatrix, part: Part, offset: int | None
) -> tuple[Float[Tensor, "s"], dict[str, Float[Tensor, "d s"]]]:
    """Singular values, and by side the singular vectors as columns."""
    if matrix in ("OV", "QK"):
        is_ov = matrix == "OV"
        u, s, v = (circuits.ov(part) if is_ov else circuits.qk(part, offset=offset)).svd()
        return s, dict(zip(("read", "written") if is_ov else ("query", "key"), (u, v), strict=True))
    assert part.layer is not None
    u, s, vh = torch.linalg.svd(_mlp_matrices(circuits, part.layer)[matrix], full_matrices=False)
    return s, {"written": vh.mT} if matrix == "W_out" else {"read": u}


def _mlp_matrices(circuits: HeadCircuits, layer: int) -> Mapping[str, Float[Tensor, "_ _"]]:
    """W_gate (if gated) and W_in `[d m]` after the norm before them, W_out `[m d]` before the norm of its output."""
    weights = Weights(circuits.network).layer(layer)
    assert weights.W_in is not None and weights.W_out is not None
    read, out = (norm(circuits.network, layer, "mlp_out") for norm in (input_norm, output_norm))
    into = {"W_gate": weights.W_gate, "W_in": weights.W_in}
    folded = {name: read.reading(upcast(w)) for name, w in into.items() if w is not None}
    return {**folded, "W_out": out.through(upcast(weights.W_out))}


def _scores(circuits: HeadCircuits, vectors: Float[Tensor, "n d"], side: str) -> Float[Tensor, "n v"]:
    """Every token's score for directions that are written, or read (`side` "read", "query" or "key")."""
    if side != "written":
        return vectors @ upcast(circuits.embedded).mT
    logits = vectors @ upcast(circuits.unembedding)
    return logits - logits.mean(-1, keepdim=True)


def _sign(scores: Float[Tensor, "n v"]) -> Float[Tensor, "n"]:
    """The sign, 1 or -1, that makes the largest absolute score of each row positive."""
    largest = scores.gather(1, scores.abs().argmax(1, keepdim=True))[:, 0]
    return torch.where(largest < 0, -1.0, 1.0).to(scores)


def _token_lists(
    scores: Float[Tensor, "*n v"], top: int | None, dims: Sequence[str], text: Text
) -> tuple[tuple[tuple[str, ...], Tensor], dict[str, object]]:
    """The `top` largest and smallest scores, over `dims`, `end` and `rank` (0: most extreme), and token coordinates."""
    assert top is not None
    ends = [scores.topk(top, largest=largest) for largest in (True, False)]
    cells = (*dims, "end", "rank")
    tokens = worded(text, "token", torch.stack([end.indices for end in ends], -2), cells)
    return (cells, torch.stack([end.values for end in ends], -2)), {
        "end": ENDS, "rank": range(top), **tokens,
    }  # fmt: skip
