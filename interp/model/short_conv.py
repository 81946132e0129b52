"""A gated short convolution in the place of attention: LFM2's mixer of the layers that have no attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.model.attention import Attention, PassState, picked
from interp.model.convolution import convolved
from interp.model.norm import Normalize
from interp.model.records import Mixer, Traits, at_least_one, requires
from interp.model.sites import GATE, Site
from interp.model.tap import Scope, at

if TYPE_CHECKING:
    from interp.model.config import ModelConfig


@dataclass(frozen=True)
class ShortConv(Mixer):
    """Gated short convolution in the place of attention (LFM2): depthwise, causal, without heads."""

    kernel: int = 3
    """Tokens that the convolution sees, the own one last."""
    bias: bool = False
    """Whether its two matrices and its convolution have biases."""

    traits = Traits(
        queries=False, values=False, valued=False, reads_by_qkv=False, rotated=False, scaled=False, patterned=False,
        additive=False, keyed=False, stateful=True, ordered=True,
    )  # fmt: skip
    own_sites = (
        Site("attn.hook_conv_in", "b p h e", "channels after the first gate", before="attn.hook_z"),
        Site("attn.hook_conv_out", "b p h e", "channels after the convolution", before="attn.hook_z"),
        GATE,
    )

    def __str__(self) -> str:
        return "a short convolution"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "kernel")

    def check(self, config: ModelConfig) -> None:
        """ValueError unless heads are runs of the channels, which are those of the stream."""
        fits = config.n_heads * config.head_width == config.d_model
        requires(fits, "n_heads * d_head = d_model under ShortConv")

    def flops(self, config: ModelConfig, layer: int, n: int) -> int:
        """Four maps; the convolution is no product of matrices."""
        return 8 * n * config.d_model**2

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """The module of a layer."""
        return ShortConvMixer(config, layer, self)


class ShortConvMixer(Attention):
    """z = c * conv(b * y), where b, c, y = x W + bias; z W_O + b_O. Head h of z is a run of d_head channels."""

    def __init__(self, config: ModelConfig, layer: int, kind: ShortConv) -> None:
        self.kind = kind
        super().__init__(config, layer)

    def _build(self, config: ModelConfig) -> None:
        d, bias = config.d_model, self.kind.bias
        self.into = nn.Linear(d, 3 * d, bias=bias)
        self.kernel = nn.Parameter(torch.zeros(self.kind.kernel, d))
        self.bias = nn.Parameter(torch.zeros(d)) if bias else None
        self.out = nn.Linear(d, d, bias=bias)

    def forward(
        self,
        x: Float[Tensor, "b p d"],
        source: tuple[Float[Tensor, "b p d"], Normalize],
        shared: PassState,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """z W_O + b_O."""
        parts = self.into(x).unflatten(-1, (3, -1, self.d_head))
        first, second, channels = parts.unbind(2)
        inner = at(tap, "attn.hook_conv_in", first * channels).flatten(-2)
        mixed = convolved(inner, self.kernel, shared, (self.layer, "convolution"), self.bias)
        mixed = at(tap, "attn.hook_conv_out", mixed.unflatten(-1, (-1, self.d_head)))
        z = mixed * at(tap, GATE.name, second)
        return self._write(at(tap, "attn.hook_z", z if only is None else picked(z, only)), tap)

    def part(self, name: str) -> tuple[Float[Tensor, "h e d"], Float[Tensor, "h e"] | None]:
        """AttributeError: nothing is a linear map of what a head reads."""
        raise AttributeError(f"a short convolution has no matrix of {name!r}")
