"""TransformerLens' `SVDInterpreter`: the directions a weight matrix writes or reads most, as tokens see them."""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from interp.compat.transformer_lens.factored_matrix import FactoredMatrix

VECTOR_TYPES = ["OV", "w_in", "w_out"]


class SVDInterpreter:
    """Singular vectors of the OV, w_in and w_out matrices of a model in the vocabulary.

    Signs are arbitrary: TransformerLens' may differ.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cfg = model.cfg
        self.params: dict[str, Tensor] = dict(model.named_parameters())

    def get_singular_vectors(
        self,
        vector_type: Literal["OV", "w_in", "w_out"] | str,
        layer_index: int,
        num_vectors: int = 10,
        head_index: int | None = None,
    ) -> Float[Tensor, "v 1 k"]:
        """The first right singular vectors times W_U, one column each.

        "OV" is `W_V W_O` of one head (a query head: grouped value heads are shared), "w_in" is `W_in` transposed,
        with the gamma of ln2 if it was not folded, "w_out" is `W_out`.

        Raises:
            AssertionError: "OV" without a head, or layers and heads that do not exist.
            ValueError: another type.
            IndexError: more vectors than there are.
        """
        if head_index is None and vector_type not in ("w_in", "w_out"):
            raise AssertionError(f"Head index optional only for w_in and w_out, got {vector_type}")
        if vector_type not in VECTOR_TYPES:
            raise ValueError(f"Vector type must be in {VECTOR_TYPES}, instead got {vector_type}")
        _require("Layer", layer_index, self.cfg.n_layers)
        block = f"blocks.{layer_index}."
        if head_index is not None and vector_type == "OV":
            vectors = self._ov(block + "attn.", head_index).V.mT
        else:
            matrix = self._w_in(block) if vector_type == "w_in" else self.params[block + "mlp.W_out"]
            vectors = torch.linalg.svd(matrix, full_matrices=False).Vh
        if num_vectors > len(vectors):
            raise IndexError(
                f"at most {len(vectors)} singular vectors are defined, got num_vectors={num_vectors}"
            )
        unembed = self.params["unembed.W_U"]
        return (vectors[:num_vectors].to(unembed.dtype) @ unembed).mT[:, None, :]

    def _ov(self, attention: str, head: int) -> FactoredMatrix:
        _require("Head", head, self.cfg.n_heads)
        values = self.params.get(attention + "W_V")
        if values is None:
            values = self.params[attention + "_W_V"]
        w_out = self.params[attention + "W_O"]
        return FactoredMatrix(values[head * len(values) // len(w_out)], w_out[head])

    def _w_in(self, block: str) -> Float[Tensor, "m d"]:
        w_in = self.params[block + "mlp.W_in"].mT
        gamma = self.params.get(block + "ln2.w")
        return w_in if gamma is None else w_in * gamma


def _require(what: str, index: int, n: int) -> None:
    if not 0 <= index < n:
        raise AssertionError(f"{what} index must be between 0 and {n - 1} but got {index}")
