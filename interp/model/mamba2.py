"""Mamba-2: a memory of keys' values that each head forgets at its own pace, of a cost linear in the length.

Dao & Gu 2024, "Transformers are SSMs": the recurrence of section 2.1, computed in chunks as in section 6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.model.attention import Attention, PassState, picked
from interp.model.convolution import convolved
from interp.model.norm import Normalize, RMSNorm
from interp.model.records import Mixer, Traits, at_least_one, not_negative, positive, requires
from interp.model.sites import GATE, LOG_DECAY, MEMORY, READ, Site, norm_sites
from interp.model.tap import Scope, at

if TYPE_CHECKING:
    from interp.model.config import ModelConfig

FASTEST = 0.1
SLOWEST = 0.001
"""Range of the step sizes that untrained heads begin with, as in the paper's own models."""


@dataclass(frozen=True)
class Mamba2(Mixer):
    """A selective state space (Mamba-2): each value head keeps a state that maps keys (B) to values (x)."""

    key_heads: int
    """Groups: heads of B and C; value head n reads group n // (value_heads / key_heads)."""
    value_heads: int
    """Number of states. Head h of `z` is a run of value_heads / n_heads neighbouring value heads."""
    d_key: int
    """Width of B and C, the state size N of the paper."""
    d_value: int
    """Channels of a value head, P of the paper."""
    kernel: int = 4
    """Tokens that the convolution of x, B and C sees, the own one last."""
    bias: bool = False
    """Whether the matrices that read the stream and write to it have biases."""
    conv_bias: bool = True
    eps: float = 1e-5
    """Eps of the norm of what is read and gated."""
    step_min: float = 0.0
    step_max: float | None = None
    """The largest step size; None: no limit."""
    chunk: int = 64
    """Tokens computed at once."""

    traits = Traits(
        queries=False, values=False, valued=False, reads_by_qkv=False, rotated=False, scaled=False, patterned=False,
        additive=False, keyed=False, stateful=True, ordered=True,
    )  # fmt: skip
    own_sites = (
        Site("attn.hook_channels_in", "b p u", "x, B and C before their convolution", before="attn.hook_z"),
        Site("attn.hook_channels_out", "b p u", "x, B and C after it, before SiLU", before="attn.hook_z"),
        *MEMORY,
        Site("attn.hook_step", "b p n", "step sizes, after softplus and their limits", before="attn.hook_z"),
        LOG_DECAY,
        READ,
        GATE,
        *norm_sites(
            "attn.gated_norm", "of what is read and gated", axes=("b p j 1", "b p j u"), before="attn.hook_z"
        ),
    )

    def __str__(self) -> str:
        return "Mamba-2, which keeps a state of the past"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "key_heads", "value_heads", "d_key", "d_value", "kernel", "chunk")
        not_negative(self, "eps", "step_min")
        positive(self, "step_max")
        if self.step_max is not None and self.step_max < self.step_min:
            raise ValueError(f"Mamba2 requires step_min <= step_max, got {self.step_min} and {self.step_max}")

    def z_width(self, config: ModelConfig) -> int:
        """Channels of the value heads that a head of `z` stands for."""
        return self.value_heads * self.d_value // config.n_heads

    def check(self, config: ModelConfig) -> None:
        """ValueError unless heads are runs of value heads, and groups too."""
        divides = self.value_heads % config.n_heads == 0
        requires(
            divides, f"n_heads = {config.n_heads} to divide value_heads = {self.value_heads} under Mamba2"
        )
        fits = self.value_heads % self.key_heads == 0
        requires(
            fits, f"key_heads = {self.key_heads} to divide value_heads = {self.value_heads} under Mamba2"
        )

    def flops(self, config: ModelConfig, layer: int, n: int) -> int:
        """Maps, and the products of every chunk, whose groups share those of queries and keys."""
        keys, values, r, f = (
            self.key_heads * self.d_key,
            self.value_heads * self.d_value,
            self.d_key,
            self.d_value,
        )
        c = min(self.chunk, n)
        maps = 2 * n * config.d_model * (2 * keys + 3 * values + self.value_heads)
        shared = self.key_heads * 2 * c * c * r
        return maps + -(-n // c) * (shared + self.value_heads * (2 * c * c * f + 4 * c * r * f))

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """The module of a layer."""
        return Mamba2Mixer(config, layer, self)


class Mamba2Mixer(Attention):
    """z = RMSNorm(y * silu(x W_gate)), group by group; y_i = S_i^T C_i + D x_i, S the state after token i.

    S_i = a_i S_(i-1) + t_i B_i x_i^T, with the step size t = softplus(x W_t + step) and the decay
    log a = -exp(rate) t. x, B and C pass a causal convolution and SiLU first. Sums run in float32 at least. Padded
    columns leave the state as it is.
    """

    def __init__(self, config: ModelConfig, layer: int, kind: Mamba2) -> None:
        self.kind = kind
        super().__init__(config, layer)

    def _build(self, config: ModelConfig) -> None:
        kind, d = self.kind, config.d_model
        values, keys = kind.value_heads * kind.d_value, kind.key_heads * kind.d_key
        self.widths = (values, keys, keys)
        self.into = nn.Linear(d, sum(self.widths), bias=kind.bias)
        self.kernel = nn.Parameter(torch.zeros(kind.kernel, sum(self.widths)))
        self.bias = nn.Parameter(torch.zeros(sum(self.widths))) if kind.conv_bias else None
        self.gate = nn.Linear(d, values, bias=kind.bias)
        self.rates = nn.Linear(d, kind.value_heads, bias=kind.bias)
        self.rate = nn.Parameter(torch.linspace(1, 16, kind.value_heads).log())
        steps = torch.logspace(math.log10(SLOWEST), math.log10(FASTEST), kind.value_heads)
        self.step = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # whose softplus is `steps`
        self.skip = nn.Parameter(torch.ones(kind.value_heads))
        self.gated_norm = Normalize(
            RMSNorm(kind.eps), values // kind.key_heads, "attn.gated_norm", kind.key_heads
        )
        self.out = nn.Linear(values, d, bias=kind.bias)

    def forward(
        self,
        x: Float[Tensor, "b p d"],
        source: tuple[Float[Tensor, "b p d"], Normalize],
        shared: PassState,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """z W_O + b_O."""
        kind = self.kind
        channels = at(tap, "attn.hook_channels_in", self.into(x))
        channels = convolved(channels, self.kernel, shared, (self.layer, "convolution"), self.bias)
        channels = F.silu(at(tap, "attn.hook_channels_out", channels))
        widths = (kind.d_value, kind.d_key, kind.d_key)
        parts = zip("vkq", channels.split(self.widths, -1), widths, strict=True)
        named = {name: part.unflatten(-1, (-1, width)) for name, part, width in parts}
        q, k, v = (at(tap, f"attn.hook_memory_{name}", named[name]) for name in "qkv")
        read = at(tap, READ.name, self._read(q, k, v, x, shared, tap))
        if only is not None:
            x, read = picked(x, only), picked(read, only)
        gate = at(tap, GATE.name, F.silu(self.gate(x)).unflatten(-1, (-1, self.d_head)))
        gated = (read.flatten(-2) * gate.flatten(-2)).unflatten(-1, (kind.key_heads, -1))
        z = self.gated_norm(gated, tap).flatten(-2).unflatten(-1, (-1, self.d_head))
        return self._write(at(tap, "attn.hook_z", z), tap)

    def _read(
        self,
        q: Float[Tensor, "b p j r"],
        k: Float[Tensor, "b p j r"],
        v: Float[Tensor, "b p n f"],
        x: Float[Tensor, "b p d"],
        shared: PassState,
        tap: Scope | None,
    ) -> Float[Tensor, "b p n f"]:
        """y_i = S_i^T C_i + D x_i of each value head at every token i."""
        wide = torch.promote_types(x.dtype, torch.float32)
        step = F.softplus(self.rates(x).to(wide) + self.step.to(wide))
        step = at(tap, "attn.hook_step", step.clamp(self.kind.step_min, self.kind.step_max))
        decay = at(tap, LOG_DECAY.name, -self.rate.to(wide).exp() * step)
        keep, documents, cache = shared.layout.keep, shared.layout.documents, shared.cache
        if keep is not None:
            keep = keep[:, -x.shape[1] :]
            step, decay = (rates.masked_fill(~keep[..., None], 0) for rates in (step, decay))
        if documents is not None:
            decay = decay.masked_fill(_text_starts(documents, keep)[..., None], -torch.inf)
        state = None if cache is None else next(iter(cache.states.get(self.layer, ())), None)
        with torch.autocast(x.device.type, enabled=False):
            q, k, v = q.to(wide), k.to(wide), v.to(wide)
            read, after = state_space(
                q.transpose(1, 2), k.transpose(1, 2), (v * step[..., None]).transpose(1, 2), decay.transpose(1, 2),
                chunk=self.kind.chunk, state=state,
            )  # fmt: skip
            read = read.transpose(1, 2) + self.skip.to(wide)[:, None] * v
        if cache is not None:
            shared.left[self.layer] = (after,)
        return read.to(x.dtype)

    def part(self, name: str) -> tuple[Float[Tensor, "h e d"], Float[Tensor, "h e"] | None]:
        """AttributeError: queries, keys and values are no linear maps of what a head reads."""
        raise AttributeError(f"Mamba-2 has no matrix of {name!r}: a convolution follows it")


def _text_starts(documents: Int[Tensor, "b p"], keep: Bool[Tensor, "b p"] | None) -> Bool[Tensor, "b p"]:
    """True at the first real column of each text but the first of the row."""
    real = torch.ones_like(documents, dtype=torch.bool) if keep is None else keep
    columns = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    last = columns.masked_fill(~real, -1).cummax(1).values
    before = F.pad(last[:, :-1], (1, 0), value=-1)
    return real & (before >= 0) & (documents != documents.gather(1, before.clamp_min(0)))


def state_space(
    q: Float[Tensor, "b j p r"],
    k: Float[Tensor, "b j p r"],
    v: Float[Tensor, "b n p f"],
    log_decay: Float[Tensor, "b n p"],
    *,
    chunk: int,
    state: Float[Tensor, "b n r f"] | None = None,
) -> tuple[Float[Tensor, "b n p f"], Float[Tensor, "b n r f"]]:
    """S_i^T q_i for every i, and the state after the last, S_i = a_i S_(i-1) + k_i v_i^T; n / j states share q and k.

    Within a chunk that begins with the state S, with c_ij the sum of log a from j + 1 to i,
        S_i^T q_i = sum_(j<=i) e^(c_ij) (q_i . k_j) v_j + e^(c_i) S^T q_i
    (Dao & Gu 2024, section 6). Sums c_ij are computed without differences, so that log a = -inf, where a text begins,
    clears the state.
    """
    n, groups = q.shape[2], q.shape[1]
    c = min(chunk, n)
    fill = -n % c
    q, k = (F.pad(x, (0, 0, 0, fill)).unflatten(2, (-1, c))[:, :, None] for x in (q, k))
    v = F.pad(v, (0, 0, 0, fill)).unflatten(2, (-1, c)).unflatten(1, (groups, -1))
    log_decay = F.pad(log_decay, (0, fill)).unflatten(2, (-1, c)).unflatten(1, (groups, -1))
    later = torch.ones(c, c, dtype=torch.bool, device=q.device).triu(1)
    diagonal = torch.eye(c, dtype=torch.bool, device=q.device)
    sums = log_decay[..., None].masked_fill(later | diagonal, 0).cumsum(-2)  # c_ij
    decay = sums.masked_fill(later, -torch.inf).exp()  # e^(c_ij), j <= i
    within = ((q @ k.mT) * decay) @ v
    written = k.mT @ (v * decay[..., -1, :, None])
    since_start = log_decay.cumsum(-1).exp()[..., None]
    memory = torch.zeros_like(written[:, :, :, 0]) if state is None else state.unflatten(1, (groups, -1))
    outputs = []
    for t in range(q.shape[3]):
        outputs.append(within[:, :, :, t] + since_start[:, :, :, t] * (q[:, :, :, t] @ memory))
        memory = since_start[:, :, :, t, -1:] * memory + written[:, :, :, t]
    return torch.cat(outputs, 3).flatten(1, 2)[:, :, :n], memory.flatten(1, 2)
