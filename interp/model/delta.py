"""Gated delta net: a memory of keys' values that forgets and corrects itself, of a cost linear in the length.

Yang et al. 2024, "Gated Delta Networks", equation 10 and section 3.3 (chunks); as Qwen3-Next and Qwen3.5 have it, in
three of four layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.model.attention import Attention, PassState, picked
from interp.model.convolution import convolved
from interp.model.norm import Normalize, RMSNorm
from interp.model.records import Mixer, Traits, at_least_one, requires
from interp.model.sites import GATE, LOG_DECAY, MEMORY, READ, Site, norm_sites
from interp.model.tap import Scope, at

if TYPE_CHECKING:
    from interp.model.config import ModelConfig

EPS = 1e-6
"""Added to the squared length of queries and keys before its root divides them."""


@dataclass(frozen=True)
class GatedDelta(Mixer):
    """A gated delta net (Yang et al. 2024): each value head keeps a matrix that maps keys to values."""

    key_heads: int
    """Heads of queries and keys; value head n reads key head n // (value_heads / key_heads)."""
    value_heads: int
    """Number of memories. Head h of `z` is a run of neighbouring value heads: both have the same total width."""
    d_key: int
    d_value: int
    kernel: int = 4
    """Tokens that the convolution of queries, keys and values sees, the own one last."""
    eps: float = 1e-6
    """Eps of the norm of the memory's output."""
    chunk: int = 64
    """Tokens computed at once."""

    traits = Traits(
        queries=False, values=False, valued=False, reads_by_qkv=False, rotated=False, scaled=False, patterned=False,
        additive=False, keyed=False, stateful=True, ordered=True,
    )  # fmt: skip
    own_sites = (
        *MEMORY,
        Site(
            "attn.hook_strength", "b p n", "the share of a correction that is written", before="attn.hook_z"
        ),
        LOG_DECAY,
        READ,
        *norm_sites(
            "attn.read_norm", "of what the memory returns", axes=("b p n 1", "b p n f"), before="attn.hook_z"
        ),
        GATE,
    )

    def __str__(self) -> str:
        return "a gated delta net, which keeps a state of the past"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "key_heads", "value_heads", "d_key", "d_value", "kernel", "chunk")

    def check(self, config: ModelConfig) -> None:
        """ValueError unless value heads are runs of the config's heads, and key heads of value heads."""
        width, theirs = self.value_heads * self.d_value, config.n_heads * config.head_width
        requires(
            width == theirs, f"value_heads * d_value = n_heads * d_head = {theirs} under {self}, got {width}"
        )
        divides = config.head_width % self.d_value == 0
        requires(divides, f"d_value to divide d_head = {config.head_width} under {self}, got {self.d_value}")
        fits = self.value_heads % self.key_heads == 0
        requires(fits, f"key_heads to divide value_heads under {self}")

    def flops(self, config: ModelConfig, layer: int, n: int) -> int:
        """Maps, and the products of every chunk; the solution of its triangular system is not counted."""
        keys, values, r, f = (
            self.key_heads * self.d_key,
            self.value_heads * self.d_value,
            self.d_key,
            self.d_value,
        )
        c = min(self.chunk, n)
        maps = 2 * n * config.d_model * (2 * keys + 3 * values + 2 * self.value_heads)
        chunk = 4 * c * c * r + 2 * c * c * f + 6 * c * r * f
        return maps + self.value_heads * (-(-n // c) * chunk + 2 * c * r * f)

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """The module of a layer."""
        return GatedDeltaMixer(config, layer, self)


class GatedDeltaMixer(Attention):
    """z = RMSNorm(read) * silu(x W_gate), read_i = S_i^T q_i / sqrt(d_key), S the memory after token i.

    S_i = a_i S_(i-1) + b_i k_i (v_i - a_i S_(i-1)^T k_i)^T, k and q divided by their length; the strength
    b = sigmoid(x W_b); the log of the decay is log a = -exp(rate) softplus(x W_a + step). Queries, keys and values pass
    a causal convolution and SiLU first. Sums run in float32 at least. Padded columns leave the memory as it is.
    """

    def __init__(self, config: ModelConfig, layer: int, kind: GatedDelta) -> None:
        self.kind = kind
        super().__init__(config, layer)

    def _build(self, config: ModelConfig) -> None:
        kind, d = self.kind, config.d_model
        self.widths = (kind.key_heads * kind.d_key,) * 2 + (kind.value_heads * kind.d_value,)
        self.into = nn.Linear(d, sum(self.widths), bias=False)
        self.kernel = nn.Parameter(torch.zeros(kind.kernel, sum(self.widths)))
        self.gate = nn.Linear(d, self.widths[2], bias=False)
        self.rates = nn.Linear(d, 2 * kind.value_heads, bias=False)
        self.rate = nn.Parameter(torch.linspace(0.01, 16, kind.value_heads).log())
        self.step = nn.Parameter(torch.ones(kind.value_heads))
        self.read_norm = Normalize(RMSNorm(kind.eps), kind.d_value, "attn.read_norm")
        self.out = nn.Linear(self.widths[2], d, bias=False)

    def forward(
        self,
        x: Float[Tensor, "b p d"],
        source: tuple[Float[Tensor, "b p d"], Normalize],
        shared: PassState,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """The layer's output z W_O, with z the normed and gated read of the memory (formula at the class)."""
        mixed = F.silu(convolved(self.into(x), self.kernel, shared, (self.layer, "convolution")))
        widths = (self.kind.d_key, self.kind.d_key, self.kind.d_value)
        parts = zip("qkv", mixed.split(self.widths, -1), widths, strict=True)
        q, k, v = (at(tap, f"attn.hook_memory_{name}", x.unflatten(-1, (-1, e))) for name, x, e in parts)
        read = at(tap, "attn.hook_read", self._read(q, k, v, x, shared, tap))
        if only is not None:
            x, read = picked(x, only), picked(read, only)
        z = self.read_norm(read, tap).flatten(-2).unflatten(-1, (-1, self.d_head))
        gate = F.silu(self.gate(x)).unflatten(-1, (-1, self.d_head))
        return self._write(at(tap, "attn.hook_z", z * at(tap, GATE.name, gate)), tap)

    def _read(
        self,
        q: Float[Tensor, "b p j r"],
        k: Float[Tensor, "b p j r"],
        v: Float[Tensor, "b p n f"],
        x: Float[Tensor, "b p d"],
        shared: PassState,
        tap: Scope | None,
    ) -> Float[Tensor, "b p n f"]:
        """S_i^T q_i / sqrt(d_key) of each value head's memory S_i, at every token i."""
        wide = torch.promote_types(x.dtype, torch.float32)
        strength, step = self.rates(x).chunk(2, -1)
        strength = at(tap, "attn.hook_strength", strength.sigmoid()).to(wide)
        decay = -self.rate.to(wide).exp() * F.softplus(step.to(wide) + self.step.to(wide))
        decay = at(tap, "attn.hook_log_decay", decay)
        keep, documents, cache = shared.layout.keep, shared.layout.documents, shared.cache
        if keep is not None:
            hidden = ~keep[:, -x.shape[1] :, None]
            strength, decay = strength.masked_fill(hidden, 0), decay.masked_fill(hidden, 0)
        state = None if cache is None else next(iter(cache.states.get(self.layer, ())), None)
        same = None if documents is None else documents[:, :, None] == documents[:, None, :]
        group = self.kind.value_heads // self.kind.key_heads
        with torch.autocast(x.device.type, enabled=False):
            q, k = (_unit(heads.to(wide)).repeat_interleave(group, 2).transpose(1, 2) for heads in (q, k))
            read, after = gated_delta(
                q * self.kind.d_key**-0.5, k, v.to(wide).transpose(1, 2), strength.transpose(1, 2),
                decay.transpose(1, 2), chunk=self.kind.chunk, state=state, same=same,
            )  # fmt: skip
        if cache is not None:
            shared.left[self.layer] = (after,)
        return read.transpose(1, 2).to(x.dtype)

    def part(self, name: str) -> tuple[Float[Tensor, "h e d"], Float[Tensor, "h e"] | None]:
        """AttributeError: queries, keys and values are no linear maps of what a head reads."""
        raise AttributeError(f"a gated delta net has no matrix of {name!r}: a convolution follows it")


def _unit(x: Float[Tensor, "*b r"]) -> Float[Tensor, "*b r"]:
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


def gated_delta(
    q: Float[Tensor, "b n p r"],
    k: Float[Tensor, "b n p r"],
    v: Float[Tensor, "b n p f"],
    strength: Float[Tensor, "b n p"],
    log_decay: Float[Tensor, "b n p"],
    *,
    chunk: int,
    state: Float[Tensor, "b n r f"] | None = None,
    same: Bool[Tensor, "b p p"] | None = None,
) -> tuple[Float[Tensor, "b n p f"], Float[Tensor, "b n r f"]]:
    """S_i^T q_i for every i, and the memory after the last, S_i = a S_(i-1) + b k_i (v_i - a S_(i-1)^T k_i)^T.

    Within a chunk that begins with the memory S, with c_i the sum of log a up to i, the corrections u solve
        u_i = b_i (v_i - e^(c_i) S^T k_i - sum_(j<i) e^(c_i - c_j) (k_i . k_j) u_j);
    then S_i = e^(c_i) S + sum_(j<=i) e^(c_i - c_j) k_j u_j^T (Yang et al. 2024, section 3.3).

    Args:
        same: True at pairs of columns of one text, for packed rows; then all columns are one chunk, and there is no
            state.
    """
    n = q.shape[2]
    c = n if same is not None else min(chunk, n)
    fill = -n % c
    q, k, v = (F.pad(x, (0, 0, 0, fill)).unflatten(2, (-1, c)) for x in (q, k, v))
    strength, log_decay = (F.pad(x, (0, fill)).unflatten(2, (-1, c)) for x in (strength, log_decay))
    total = log_decay.cumsum(-1)  # c_i, [b n chunk c]
    later = torch.ones(c, c, dtype=torch.bool, device=q.device).triu(1)
    decay = (
        (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    )  # e^(c_i - c_j), j <= i
    if same is not None:
        decay = decay * same[:, None, None]
    since_start, width = total.exp()[..., None], v.shape[-1]  # e^(c_i)
    right = torch.cat((v, k * since_start), -1) * strength[..., None]
    system = (k @ k.mT) * decay * strength[..., None]
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    # u = own - earlier @ S: [b n chunk c f] and [b n chunk c r]
    own, earlier = solved[..., :width], solved[..., width:]
    scores, q = (q @ k.mT) * decay, q * since_start
    k, step = k * (total[..., -1:] - total).exp()[..., None], since_start[..., -1:, :]
    memory = torch.zeros_like(k[:, :, 0].mT @ v[:, :, 0]) if state is None else state
    outputs = []
    for t in range(q.shape[2]):
        u = own[:, :, t] - earlier[:, :, t] @ memory
        outputs.append(scores[:, :, t] @ u + q[:, :, t] @ memory)
        memory = step[:, :, t] * memory + k[:, :, t].mT @ u
    return torch.cat(outputs, 2)[:, :, :n], memory
