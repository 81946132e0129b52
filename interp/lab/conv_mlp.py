"""An MLP with a convolution over the tokens just before: Sana's Mix-FFN in one dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from interp.model.attention import PassState
from interp.model.block import NEURONS, NEXT_ROW
from interp.model.config import ModelConfig
from interp.model.convolution import convolved
from interp.model.records import AnyMLP, at_least_one, requires
from interp.model.sites import Site
from interp.model.tap import Scope, at


@dataclass(frozen=True)
class ConvMLP(AnyMLP):
    """An MLP with a depthwise convolution over neighbouring tokens between its matrices (Sana's Mix-FFN)."""

    d_mlp: int
    kernel: int = 3
    """Number of tokens that the convolution sees, the own one last."""
    centred: bool = False
    """Whether the own token stands in the middle, in a bidirectional model (Sana itself)."""

    words: ClassVar[str] = "an MLP with a convolution"
    no_matrices: ClassVar[str | None] = "a convolution in its MLP"
    pointwise: ClassVar[bool] = False
    own_sites = (
        Site(
            "mlp.hook_expanded",
            "b p m",
            "the gate's branch before its convolution, after SiLU",
            before=NEXT_ROW,
        ),
        Site(
            "mlp.hook_expanded_linear",
            "b p m",
            "the linear branch before its convolution, after SiLU",
            before=NEXT_ROW,
        ),
        *NEURONS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "d_mlp", "kernel")

    @property
    def width(self) -> int:
        """Multiplications of one token, in units of d_model."""
        return 3 * self.d_mlp

    def check(self, config: ModelConfig) -> None:
        """ValueError for a convolution that looks ahead in a causal model, or does not in a bidirectional one."""
        which = f"got {self} in a {'causal' if config.causal else 'bidirectional'} model"
        requires(self.centred != config.causal, f"centred=True under ConvMLP for causal=False alone, {which}")
        requires(not self.centred or self.kernel % 2 == 1, f"an odd kernel for a centred ConvMLP, {which}")

    def build(self, d_model: int, layer: int, name: str) -> ConvFeedForward:
        """The module."""
        return ConvFeedForward(self, d_model, layer)


class ConvFeedForward(nn.Module):
    """`(c_in * silu(c_gate)) W_out`, c = depthwise(silu(x W + b)) + b_conv, for each of the two branches in and gate.

    The Mix-FFN of Sana (Xie et al. 2024, section 2.2 and released code) in one dimension: the convolution sees a token
    and the `kernel - 1` kept ones of its text before it (centred: as many on either side). Not per position: it keeps a
    state for generation. Branches share one matrix, rows ordered gate, in; `kernel [t, f]`, the own token's weights
    last (centred: in the middle). W_out has no bias.
    """

    def __init__(self, mlp: ConvMLP, d_model: int, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.ahead = mlp.kernel // 2 if mlp.centred else 0
        self.into = nn.Linear(d_model, 2 * mlp.d_mlp)
        self.kernel = nn.Parameter(torch.zeros(mlp.kernel, 2 * mlp.d_mlp))
        self.bias = nn.Parameter(torch.zeros(2 * mlp.d_mlp))
        self.out = nn.Linear(mlp.d_mlp, d_model, bias=False)

    def forward(
        self, x: Float[Tensor, "b p d"], tap: Scope | None, shared: PassState
    ) -> Float[Tensor, "b p d"]:
        """The MLP's output."""
        expanded = F.silu(self.into(x))
        if tap is not None:
            gate, linear = expanded.chunk(2, -1)
            gate, linear = at(tap, "mlp.hook_expanded", gate), at(tap, "mlp.hook_expanded_linear", linear)
            expanded = torch.cat((gate, linear), -1)
        place = (self.layer, "mlp")
        mixed = convolved(expanded, self.kernel, shared, place, self.bias, ahead=self.ahead)
        gate, linear = mixed.chunk(2, -1)
        post = F.silu(at(tap, "mlp.hook_pre", gate)) * at(tap, "mlp.hook_pre_linear", linear)
        return self.out(at(tap, "mlp.hook_post", post))
