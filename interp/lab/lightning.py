"""Lightning attention: linear attention without a denominator, with a decay per head, its output normed.

TransNormer (Qin et al. 2022, equations 7 and 8: the norm in the place of the denominator), TransNormerLLM (Qin et al.
2023, equations 2 and 8: decay, SiLU on queries and keys) and MiniMax-01 (2025, section 2.2: seven such layers to one of
softmax attention).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.core.kinds import NotNegative
from interp.lab.linear import Decay, LinearMixer, OfSums, sums_flops
from interp.model.attention import Attention, PassState
from interp.model.config import ModelConfig, RMSNorm
from interp.model.norm import HeadNorm
from interp.model.position import alibi_slopes
from interp.model.records import Traits, maps_flops
from interp.model.sites import GATE, Site, norm_sites
from interp.model.tap import Scope, at


@dataclass(frozen=True)
class Lightning(OfSums):
    """Lightning attention (TransNormer): linear attention without a denominator, with decay, its output normed.

    Its positions are its decay: rotary ones are those of the other layers of a stack.
    """

    decay: bool = True
    """Whether weights fall by a fixed factor per position and head, ALiBi's slopes as exponents; less in deeper
    layers.
    """
    gate: bool = False
    """Whether the normed output is multiplied by a sigmoid gate, made from what the block reads (MiniMax-01)."""
    eps: NotNegative = 1e-6
    """Eps of the norm."""
    chunk: int = 64
    """Positions of a tile: within it (q k^T) v, between tiles q (k^T v)."""

    own_sites = (
        *norm_sites(
            "attn.out_norm", "of z, all heads together", axes=("b p 1 1", "b p h e"), before="attn.hook_z"
        ),
        GATE,
    )

    @property
    def traits(self) -> Traits:
        """The properties that the config, the model and the analyses rely on."""
        return Traits(
            reads_by_qkv=not self.gate,
            rotated=False,
            scaled=False,
            additive=False,
            beside=f"a norm {'and a gate follow' if self.gate else 'of z follows'} it",
            keyed=False,
            stateful=True,
        )

    def sites(self, config: ModelConfig) -> tuple[Site, ...]:
        """The norm of z, and the gate if there is one."""
        return self.own_sites if self.gate else self.own_sites[:-1]

    def flops(self, config: ModelConfig, layer: int, n: int) -> int:
        """Four maps, a gate if there is one, and sums in chunks."""
        h, e = config.n_heads, config.head_width
        gate = 2 * n * config.d_model * h * e if self.gate else 0
        sums = sums_flops(n, self.chunk, e, e, causal=config.causal, decays=self.decay)
        return maps_flops(config, n) + gate + h * sums

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """The module of a layer."""
        return LightningMixer(config, layer)


class LightningMixer(LinearMixer):
    """z_i = RMSNorm(sum_j exp(-s_h |p_i - p_j|) silu(q_i) . silu(k_j) v_j), j the kept tokens up to i.

    In a bidirectional model j are all kept tokens (TransNormer has both; the decay to both sides is ours).

    s_h: ALiBi's slope of the head times 1 - l / (L - 1 + 1e-5) + 1e-5 in layer l of L, as MiniMax-01's released code
    has it (TransNormerLLM's text: 1 - l / L). SiLU stands on queries and keys, as in TransNormerLLM; MiniMax-01 has it
    on values too, which would leave no OV circuit. The norm is one RMS over all heads with a trained gamma, as in
    MiniMax-01 (TransNormer's has none). Queries and keys are not rotated: the decay is their position, and rotary
    positions are those of the stack's other layers. The pattern is that of the sums before the norm.

    gate: z times sigmoid(x W_gate) after the norm (MiniMax-01); `gate.weight [h e, d]`, rows by head, no bias.
    """

    normalised = False

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        kind = config.mixers[layer]
        assert isinstance(kind, Lightning)
        width = config.n_heads * self.d_head
        self.out_norm = HeadNorm(RMSNorm(kind.eps), config.n_heads, self.d_head, "attn.out_norm", "width")
        self.gate = nn.Linear(config.d_model, width, bias=False) if kind.gate else None
        depth = 1 - layer / (config.n_layers - 1 + 1e-5) + 1e-5
        self.depth = depth if kind.decay else None

    def _feature(self, x: Float[Tensor, "b h p e"]) -> Float[Tensor, "b h p e"]:
        return F.silu(x)

    def _decay(self, shared: PassState, like: Float[Tensor, "b p g e"]) -> Decay | None:
        """The decay of this layer from the positions of the pass."""
        if self.depth is None:
            return None
        positions = shared.positions
        assert positions is not None
        wide = torch.promote_types(like.dtype, torch.float32)
        rates = self.depth * alibi_slopes(self.heads[0]).to(like.device, wide)
        before = shared.made_once("position before", lambda: _before(shared, positions))
        return Decay(rates, positions, before, even=shared.layout.keep is None)

    def _finished(
        self, z: Float[Tensor, "b n h e"], x: Float[Tensor, "b n d"], tap: Scope | None
    ) -> Float[Tensor, "b n h e"]:
        z = self.out_norm(z, tap)
        if self.gate is None:
            return z
        return z * at(tap, "attn.hook_gate", self.gate(x).sigmoid().unflatten(-1, (-1, self.d_head)))


def _before(shared: PassState, positions: Int[Tensor, "#b p"]) -> Int[Tensor, "#b 1"]:
    """The position of the last column before this pass; that of the first column where there is none."""
    past, keep = 0 if shared.cache is None else shared.cache.length, shared.layout.keep
    if past == 0:
        return positions[:, :1]
    if keep is None:
        return positions[:, :1] - 1
    return shared.layout.positions(keep.shape[1], 0, positions.device)[:, past - 1 : past]
