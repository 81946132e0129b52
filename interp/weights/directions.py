"""Weights read in the vocabulary: singular directions, single neurons, any vector of the stream, as lists of tokens.

A direction that is WRITTEN to the stream is read by what it adds to the logits, `d W_U`, the final norm at scale 1 and
centred over the vocabulary (logits have no zero of their own). A direction that is READ from the stream is scored by
every token's embedding, `W_E d`, the norm before it folded in. Geva et al. 2022 (value vectors); Dar et al. 2022,
"Analyzing Transformers in Embedding Space". Both ends of every list are given: activations can be negative.

Caveats: `W_E d` is an inner product. As coordinates of d in the vocabulary it uses W_E^T where a right inverse of W_E
belongs (Dar et al. justify it by the overlap of the top tokens). A late layer reads what earlier layers wrote, not bare
embeddings, and writes to be read by later ones: these lists see neither.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from interp.core.precision import wide
from interp.core.results import labelled
from interp.core.shapes import shape_text
from interp.model.weights import Weights
from interp.passes.observe import Subject
from interp.weights.head_circuits import Circuits

if TYPE_CHECKING:
    import xarray as xr

Matrix = Literal["OV", "QK", "W_in", "W_gate", "W_out"]
Side = Literal["read", "written"]
_CONVENTIONS = {
    "unit_read": "W_E . direction, the norm before it at scale 1",
    "unit_written": "logits, final norm at scale 1, centred over the vocabulary",
    "inverse": "W_E^T stands for the right inverse of W_E (Dar et al. 2022)",
}


def directions(
    model: Subject, vectors: Shaped[Tensor, "*n d"], *, side: Side = "written", top: int = 10
) -> "xr.Dataset":
    """Any vectors of the residual stream as lists of tokens: biases, embeddings, rows of a matrix, probes.

    side: "written", what a vector adds to the logits, v W_U with the final norm at scale 1, centred over the vocabulary
    (`model.b_out`, `model.b_O`, `model.W_pos`, `model.W_E[5]`, a neuron's row of `model.W_out[2]`); "read", every
    token's embedding along it, W_E v (a column of `model.W_Q[0, 1].mT`, a probe). Returns Dataset[direction, end,
    rank]: `token`, `text`, `score`, and `norm`[direction]; `end`: top and bottom, rank 0 the most extreme.
    Caveat: vectors are taken as they stand in the stream. The norm that a matrix reads through, or that its output
    passes (sandwich norms), is not folded in; `neurons` and `singular_directions` do that.
    Errors: ValueError for vectors that are not of floating type, finite and as wide as the stream, or more tokens than
    the vocabulary has.

    Example:
        >>> directions(model, model.b_out, top=5).text.sel(direction=0, end="top").shape
        (5,)
    """
    width = model.transformer.config.d_model
    fits = vectors.ndim in (1, 2) and vectors.shape[-1] == width and vectors.numel() > 0
    if not fits or not vectors.is_floating_point() or not bool(vectors.isfinite().all()):
        raise ValueError(
            f"finite vectors of the stream, [{width}] or [direction, {width}], are required, got {vectors.dtype} of "
            f"shape {shape_text(vectors.shape)}"
        )
    if side not in ("read", "written"):
        raise ValueError(f"side must be read or written, got {side!r}")
    circuits = Circuits(model.transformer, folded=True)
    rows = vectors.detach().reshape(-1, width).to(circuits.embedded.device, wide(circuits.embedded[:0]).dtype)
    found = labelled(
        "directions",
        {"norm": (("direction",), rows.norm(dim=-1))}
        | {
            name: (("direction", "end", "rank"), x)
            for name, x in _ends(_scores(circuits, rows, side), top).items()
        },
        coords={"direction": range(len(rows)), "end": ["top", "bottom"], "rank": range(top)},
        attrs={**_CONVENTIONS, "side": side},
    )
    return _with_text(found, model)


def singular_directions(
    model: Subject,
    matrix: Matrix = "OV",
    *,
    layer: int,
    head: int | None = None,
    offset: int | None = None,
    k: int = 10,
    top: int = 10,
) -> "xr.Dataset":
    """The k strongest singular directions of a head's OV or QK or a layer's MLP matrix, each as a list of tokens.

    M = sum_i s_i u_i v_i^T in row convention: along u_i the matrix reads, along v_i it writes, s_i times as much. QK
    writes nothing: a query along u_i looks for keys along v_i. With norms folded in (`Circuits(folded=True)`). Returns
    Dataset[direction, side, end, rank]: `token`, `text`, `score`, and `singular_value`[direction]. `side`: read and
    written for OV, query and key for QK, read for W_in and W_gate (a gated MLP's), written for W_out; `end`: top and
    bottom, rank 0 the most extreme.
    offset: under rotary positions, how many tokens before the query the key stands (None: 0), as in `Circuits.qk`.
    u_i and v_i have one common sign, which is arbitrary; here the token of the largest absolute score on the last side
    is positive. Directions of equal singular values are arbitrary up to rotation. Invariant to W_V -> W_V M, W_O ->
    M^-1 W_O.
    Errors: IndexError for a layer or head that does not exist; ValueError for a head missing (OV, QK) or superfluous
    (MLP), an offset without rotary QK, a matrix the model lacks, k beyond the rank's bound, or more tokens than the
    vocabulary has.

    Example:
        >>> found = singular_directions(model, "OV", layer=1, head=2, k=3, top=5)
        >>> found.text.sel(side="written", end="top").shape
        (3, 5)
    """
    if (matrix in ("OV", "QK")) != (head is not None):
        need = f"a head is required for {matrix}" if head is None else f"{matrix} has no heads"
        raise ValueError(f"{need}, got head={head}")
    if offset is not None and matrix != "QK":
        raise ValueError(f"an offset requires QK, got {matrix}")
    circuits = Circuits(model.transformer, folded=True)
    s, vectors = _singular(circuits, matrix, layer, head, offset)
    if not 1 <= k <= len(s):
        raise ValueError(f"{matrix} has 1 to {len(s)} singular directions, got k={k}")
    scores = torch.stack([_scores(circuits, x[:, :k].mT, side) for side, x in vectors.items()], 1)
    scores = scores * _sign(scores[:, -1])[:, None, None]
    ends = _ends(scores, top)
    found = labelled(
        "singular_directions",
        {"singular_value": (("direction",), s[:k])}
        | {name: (("direction", "side", "end", "rank"), value) for name, value in ends.items()},
        coords={"direction": range(k), "side": list(vectors), "end": ["top", "bottom"], "rank": range(top)},
        attrs={
            **_CONVENTIONS, "matrix": matrix, "layer": layer, **({} if head is None else {"head": head}),
            "sign": "the largest absolute score of the last side is positive",
        },
    )  # fmt: skip
    return _with_text(found, model)


def neurons(model: Subject, layer: int, index: int | Sequence[int], *, top: int = 10) -> "xr.Dataset":
    """What MLP neurons read and write, as lists of tokens.

    Neuron i reads the stream along column i of W_in (and of W_gate, if the MLP is gated) and writes n_i times row i of
    W_out: n_i (W_out[i] . W_U) is what it adds to the logits directly (Geva et al. 2022). Norms are folded in as in
    `Circuits(folded=True)`. Returns Dataset[neuron, part, end, rank]: `token`, `text`, `score`, and `norm`[neuron,
    part]; `part`: in (gate, in) and out; `end`: top and bottom, rank 0 the most extreme.
    Errors: IndexError for a layer or neuron that does not exist; ValueError for a model without neurons of its own
    (attention-only, mixture of experts), or more tokens than the vocabulary has.

    Example:
        >>> found = neurons(model, 0, [3, 17], top=5)
        >>> found.text.sel(neuron=17, part="out", end="bottom").shape
        (5,)
    """
    circuits = Circuits(model.transformer, folded=True)
    matrices = _mlp_matrices(circuits, layer)
    chosen = [index] if isinstance(index, int) else list(index)
    count = len(matrices["W_out"])
    if bad := [i for i in chosen if not 0 <= i < count]:
        raise IndexError(f"neurons are 0 to {count - 1}, got {bad[0]}")
    if not chosen:
        raise ValueError("at least one neuron is required, got none")
    rows = {name.removeprefix("W_"): (w if name == "W_out" else w.mT)[chosen] for name, w in matrices.items()}
    sides: dict[str, Side] = {part: "written" if part == "out" else "read" for part in rows}
    ends = _ends(torch.stack([_scores(circuits, row, sides[part]) for part, row in rows.items()], 1), top)
    norm = torch.stack([row.norm(dim=-1) for row in rows.values()], 1)
    found = labelled(
        "neurons",
        {"norm": (("neuron", "part"), norm)}
        | {name: (("neuron", "part", "end", "rank"), value) for name, value in ends.items()},
        coords={"neuron": chosen, "part": list(rows), "end": ["top", "bottom"], "rank": range(top)},
        attrs={**_CONVENTIONS, "layer": layer},
    )
    return _with_text(found, model)


def _singular(
    circuits: Circuits, matrix: Matrix, layer: int, head: int | None, offset: int | None
) -> tuple[Float[Tensor, "s"], dict[str, Float[Tensor, "d s"]]]:
    """Singular values and the vectors of every side, as columns."""
    if matrix in ("OV", "QK"):
        is_ov = matrix == "OV"
        u, s, v = (circuits.ov(layer, head) if is_ov else circuits.qk(layer, head, offset=offset)).svd()
        return s, dict(zip(("read", "written") if is_ov else ("query", "key"), (u, v), strict=True))
    matrices = _mlp_matrices(circuits, layer)
    if matrix not in matrices:
        raise ValueError(f"matrix must be OV, QK or, in this model, {', '.join(matrices)}, got {matrix!r}")
    u, s, vh = torch.linalg.svd(matrices[matrix], full_matrices=False)
    return s, {"written": vh.mT} if matrix == "W_out" else {"read": u}


def _mlp_matrices(circuits: Circuits, layer: int) -> Mapping[str, Float[Tensor, "_ _"]]:
    """W_gate (if gated) and W_in `[d m]` behind the norm they read through, W_out `[m d]` before the norm it passes."""
    config, weights = circuits.model.config, Weights(circuits.model).layer(layer)
    if config.macaron:
        raise ValueError("blocks with one MLP are required, those of this model have two (Macaron)")
    if weights.W_in is None or weights.W_out is None:
        raise ValueError(f"a plain or gated MLP is required, this model is {config.mlp_in_words}")
    block = circuits.model.block(layer)
    norm, post = block.reading(block.ln1 if config.shared_norm else block.ln2), block.post_norm("mlp_out")
    one = wide(weights.W_out).new_ones(1)
    out = wide(weights.W_out) if post is None else post.frozen(wide(weights.W_out), one)
    into = {"W_gate": weights.W_gate, "W_in": weights.W_in}
    folded = {name: norm.pull_back(wide(w.mT), one).mT for name, w in into.items() if w is not None}
    return {**folded, "W_out": out * config.factor("mlp_out")}


def _scores(circuits: Circuits, vectors: Float[Tensor, "n d"], side: str) -> Float[Tensor, "n v"]:
    """Every token's score for directions that are written, or (read, query, key) read."""
    if side != "written":
        return vectors @ wide(circuits.embedded).mT
    logits = vectors @ wide(circuits.unembedding)
    return logits - logits.mean(-1, keepdim=True)


def _sign(scores: Float[Tensor, "n v"]) -> Float[Tensor, "n"]:
    """1 or -1: what makes the largest absolute score of each row positive."""
    largest = scores.gather(1, scores.abs().argmax(1, keepdim=True))[:, 0]
    return torch.where(largest < 0, -1.0, 1.0).to(scores)


def _ends(
    scores: Float[Tensor, "*n v"], top: int
) -> dict[str, Float[Tensor, "*n 2 rank"] | Int[Tensor, "*n 2 rank"]]:
    """The `top` largest scores and the `top` smallest, most extreme first, and their tokens."""
    if not 1 <= top <= scores.shape[-1]:
        raise ValueError(f"top must be in [1, {scores.shape[-1]}], got {top}")
    ends = [scores.topk(top, largest=largest) for largest in (True, False)]
    return {
        "token": torch.stack([end.indices for end in ends], -2),
        "score": torch.stack([end.values for end in ends], -2),
    }


def _with_text(found: "xr.Dataset", model: Subject) -> "xr.Dataset":
    """The result with the text of every token."""
    ids = found.token
    pieces = np.array(model.text.pieces(ids.values.ravel().tolist())).reshape(ids.shape)
    return found.assign(text=(ids.dims, pieces))
