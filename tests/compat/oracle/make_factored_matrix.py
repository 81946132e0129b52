"""Writes what TransformerLens 3.9.0's FactoredMatrix and SVDInterpreter answer: data/factored_matrix_3_9.pt.

Run from the root of the repository with TransformerLens 3.9.0 and the root on PYTHONPATH:
`python tests/compat/oracle/make_factored_matrix.py`. The table is read by the tests as well.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = Path(__file__).parents[1] / "data" / "factored_matrix_3_9.pt"

EXPRESSIONS = """
flat; flat.AB; flat.T; flat.BA; square.BA; deep.AB; deep.T; square.eigenvalues.real.sort(); flat.eigenvalues
flat.svd()[1]; flat.S; deep.S; wide.S; flat.norm(); deep.norm(); square.norm(); flat.U.abs(); flat.V.abs()
flat.Vh.abs()
wide.U.abs(); wide.V.abs(); flat.make_even(); deep.make_even(); wide.make_even(); flat.collapse_l().abs()
flat.collapse_r().abs(); deep.collapse_r().abs(); flat.get_corner(); deep.get_corner(2); deep.get_corner(k=9)
flat.unsqueeze(0); deep.unsqueeze(1); flat.pair[0]; flat.pair[1]; deep.pair[1]; flat.ndim; deep.ndim; flat.shape
deep.shape; flat.has_leading_dims; deep.has_leading_dims; half.has_leading_dims; half; half.A; half.AB
flat.ldim; flat.mdim; flat.rdim; repr(deep); repr(flat)
flat * 2; 2.5 * flat; flat * torch.tensor(3.0); torch.tensor([3.0]) * flat; flat * torch.ones(2); flat / 2
flat @ torch.ones(6).double(); torch.ones(5).double() @ flat; deep @ torch.ones(6).double()
torch.ones(5).double() @ deep; flat @ b; b.mT @ flat.T; flat @ torch.ones(5, 2).double()
torch.ones(2, 4).double() @ flat
flat @ flat.T; flat.T @ flat; deep @ flat.T; flat.T @ deep; flat @ deep.T; wide @ wide.T; flat @ flat
flat @ torch.ones(3, 6, 2).double(); torch.ones(3, 2, 5).double() @ flat; wide @ b.mT[:4]
wide @ torch.ones(9, 1).double()
torch.ones(9).double() @ flat
deep[0]; deep[-1]; deep[1:]; deep[0, 1]; deep[:, 2]; deep[0, 1, 2]; deep[0, 1, -1]; deep[0, 1, 2, 3]; deep[0, 1, -1, -1]
deep[:, :, 1:3]; deep[:, :, 1:3, ::2]; deep[:, 0, 1, 2:]; deep[0, :, :, 3]; deep[None]; deep[:, None]; deep[None, 0]
deep[[1, 0]]; deep[torch.tensor([1, 1])]; deep[:, [0, 2]]; deep[0, 1, [0, 3]]; deep[0, 0, :, [1, 2]]; deep[...]
flat[0]; flat[-1]; flat[-2]; flat[:, 1]; flat[:, -1]; flat[1, 2]; flat[1:3]; flat[1:3, 2:]; flat[None]; flat[[0, 2]]
flat[()]; flat[0, 0, 0]; deep[0, 0, 0, 0, 0]; deep[5]
F(torch.ones(2, 3), torch.ones(4, 2)); F(torch.ones(2, 3, 4), torch.ones(3, 4, 2)); F(torch.ones(3), torch.ones(3))
F(torch.ones(1, 3, 4), torch.ones(2, 4, 2)); F(torch.ones(3, 1), torch.ones(1, 3))
F(torch.ones(0, 2), torch.ones(2, 3))
"""
TABLE = [line.strip() for line in EXPRESSIONS.replace("\n", ";").split(";") if line.strip()]


def names(cls: Any) -> dict[str, Any]:
    """The matrices and tensors that the table speaks of."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    return {
        "torch": torch, "F": cls, "b": random(6, 3),
        "flat": cls(random(5, 3), random(3, 6)), "deep": cls(random(2, 3, 5, 4), random(2, 3, 4, 6)),
        "square": cls(random(6, 3), random(3, 6)), "wide": cls(random(3, 7), random(7, 4)),
        "half": cls(random(5, 4), random(3, 4, 6)),
    }  # fmt: skip


def answer(cls: Any, expression: str) -> dict[str, Any]:
    """What an expression of the table gives: a factored matrix, a tensor, something plain or the type of an error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            found = eval(expression, names(cls))
    except (AssertionError, RuntimeError, ValueError, IndexError, TypeError) as error:
        return {"error": type(error).__name__, "message": str(error)}
    if isinstance(found, cls):
        return {"factored": repr(found), "leading": found.has_leading_dims, "value": found.AB}
    if isinstance(found, tuple) and not isinstance(found, torch.Size):
        found = found[0]
    return {"value": found} if isinstance(found, Tensor) else {"plain": repr(found)}


def main() -> None:
    """Evaluate the table, and the singular vectors of the model whose weights are in the other file."""
    from transformer_lens import FactoredMatrix, HookedTransformer, HookedTransformerConfig, SVDInterpreter

    from tests.compat.oracle.make_activation_cache import MODELS

    file: dict[str, Any] = {text: answer(FactoredMatrix, text) for text in TABLE}
    torch.manual_seed(1)
    model = HookedTransformer(HookedTransformerConfig(**MODELS["layer-norm"]))
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    found = SVDInterpreter(model).get_singular_vectors
    vectors = {
        "OV": found("OV", 1, 3, 1), "w_in": found("w_in", 0, 4), "w_out": found("w_out", 1, num_vectors=2),
    }  # fmt: skip
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.save(
        {"table": file, "weights": weights, "vectors": {k: v.detach() for k, v in vectors.items()}}, FILE
    )


if __name__ == "__main__":
    main()
