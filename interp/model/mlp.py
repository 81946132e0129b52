"""The MLP of a block, plain or gated."""

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from interp.model.config import MLP
from interp.model.tap import Scope, at


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """`act(x W_in + b_in) W_out + b_out`; gated: `act(x W_gate) * (x W_in + b_in) W_out + b_out`.

    A gated MLP keeps W_gate and W_in in one matrix, rows ordered gate, in.
    """

    def __init__(self, mlp: MLP, d_model: int) -> None:
        super().__init__()
        self.gated = mlp.gated
        self.act = ACTIVATIONS[mlp.act]
        self.into = nn.Linear(d_model, mlp.d_mlp * (2 if mlp.gated else 1), bias=mlp.bias)
        self.out = nn.Linear(mlp.d_mlp, d_model, bias=mlp.bias)

    def forward(self, x: Float[Tensor, "b p d"], tap: Scope | None = None) -> Float[Tensor, "b p d"]:
        """What the MLP adds to the residual stream."""
        if self.gated:
            gate, linear = self.into(x).chunk(2, -1)
            gate = at(tap, "mlp.hook_pre", gate)
            post = self.act(gate) * at(tap, "mlp.hook_pre_linear", linear)
        else:
            post = self.act(at(tap, "mlp.hook_pre", self.into(x)))
        return at(tap, "hook_mlp_out", self.out(at(tap, "mlp.hook_post", post)))
