"""One block: attention and MLP (plain, gated, or another one) read the residual stream and add to it.

Norms stand where the family puts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.model.attention import CrossAttention, PassState, picked
from interp.model.norm import NoNorm, Normalize
from interp.model.records import AnyMLP, ConfigRecord, at_least_one
from interp.model.rules import NO_RULES, product, secant
from interp.model.sites import Site
from interp.model.tap import Scope, at

if TYPE_CHECKING:
    from interp.model.config import ModelConfig


Activation = Literal["gelu", "gelu_new", "quick_gelu", "relu", "silu"]
"""`gelu` is exact (erf), `gelu_new` its tanh approximation, `quick_gelu` x sigmoid(1.702 x)."""

NEXT_ROW = "ln2_post.hook_scale"
"""The row of the table of sites before which the sites of an MLP stand."""
NEURONS = (
    Site("mlp.hook_pre", "b p m", "neurons before the non-linearity (the gate, if gated)", before=NEXT_ROW),
    Site("mlp.hook_pre_linear", "b p m", "the linear branch that the gate multiplies", before=NEXT_ROW),
    Site("mlp.hook_post", "b p m", "neurons after the non-linearity (and the gate)", before=NEXT_ROW),
)


@dataclass(frozen=True)
class MLP(AnyMLP):
    """Two matrices with a non-linearity between them, optionally gated by a third."""

    d_mlp: int
    act: Activation = "gelu_new"
    gated: bool = False
    bias: bool = True

    words: ClassVar[str] = "a plain or gated MLP"
    own_sites = NEURONS

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "d_mlp")

    @property
    def width(self) -> int:
        """Multiplications of one token, in units of d_model."""
        return self.d_mlp * (3 if self.gated else 2)

    def sites(self, config: "ModelConfig") -> tuple[Site, ...]:
        """The sites of the neurons, before and after the activation; with a gate also its linear branch."""
        return tuple(site for site in self.own_sites if self.gated or not site.name.endswith("_linear"))

    def build(self, d_model: int, layer: int, name: str) -> "FeedForward":
        """The module."""
        return FeedForward(self, d_model, name)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """`act(x W_in + b_in) W_out + b_out`; gated: `act(x W_gate) * (x W_in + b_in) W_out + b_out`.

    A gated MLP keeps W_gate and W_in in one matrix, rows ordered gate, in. Its sites begin with `name`.
    """

    rules = NO_RULES

    def __init__(self, mlp: MLP, d_model: int, name: str = "mlp") -> None:
        super().__init__()
        self.name = name
        self.gated = mlp.gated
        self.act = ACTIVATIONS[mlp.act]
        self.into = nn.Linear(d_model, mlp.d_mlp * (2 if mlp.gated else 1), bias=mlp.bias)
        self.out = nn.Linear(mlp.d_mlp, d_model, bias=mlp.bias)

    def forward(self, x: Float[Tensor, "b p d"], tap: Scope | None = None) -> Float[Tensor, "b p d"]:
        """The MLP's output."""
        if self.gated:
            gate, linear = self.into(x).chunk(2, -1)
            gate = at(tap, f"{self.name}.hook_pre", gate)
            linear = at(tap, f"{self.name}.hook_pre_linear", linear)
            post = product(secant(self.act, gate, self.rules), linear, self.rules)
        else:
            post = secant(self.act, at(tap, f"{self.name}.hook_pre", self.into(x)), self.rules)
        return self.out(at(tap, f"{self.name}.hook_post", post))


@dataclass(frozen=True)
class UsualBlock(ConfigRecord):
    """Attention, then the MLP where there is one (or both at once, see `ModelConfig.parallel`)."""

    unusual: ClassVar[str | None] = None
    """Reason why an analysis of blocks of attention and one MLP refuses this block, after "this model"; None if it is
    such a block.
    """
    proven: ClassVar[bool] = False
    """Whether sites are offered only where they were measured to be what they say (`interp.wrapped`)."""
    attention_reads: ClassVar[str] = "hook_resid_pre"
    """The site of the stream that attention reads, before its norm."""

    def sublayers(self, config: ModelConfig) -> dict[str, str]:
        """The sublayers that add to the stream, in order, each with the site of the stream after it.

        `attn_out`, `cross_attn_out`, `mlp_out`; that of the last is `hook_resid_post`, of both in parallel blocks.
        """
        has = {"attn_out": True, "cross_attn_out": config.cross_attention, "mlp_out": config.mlp is not None}
        sums = {"attn_out": "hook_resid_mid", "cross_attn_out": "hook_resid_mid_cross"}
        names = [name for name, present in has.items() if present]
        return {
            name: "hook_resid_post" if config.parallel or name == names[-1] else sums[name] for name in names
        }

    def factor(self, sublayer: str, config: ModelConfig) -> float:
        """Factor on the output of a sublayer (`attn_out`, ...) before it is added to the stream."""
        return config.residual_scale

    def offers(self, name: str, config: ModelConfig) -> bool:
        """Whether a site that the config has may be read and edited."""
        return True

    def why_not(self, name: str) -> str:
        """Why a site is not offered, by its full name; empty if there is nothing to say."""
        return ""

    def build(self, config: ModelConfig, layer: int) -> Block:
        """The module of a layer."""
        return Block(config, layer)


class Block(nn.Module):
    """A sequential or parallel block, with or without an MLP and attention to a memory.

    ln1, ln_cross and ln2 norm what a sublayer reads ("pre", "sandwich") or the sum it leaves ("post", "output_post");
    ln1_post and ln2_post norm what it adds ("sandwich", "output", "output_post").
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        inner = NoNorm() if config.norm_place == "output" else config.norm
        outer = config.norms_output
        has_mlp, d = config.mlp is not None, config.d_model
        self._build_first(layer)
        self.ln1 = Normalize(inner, d, "ln1")
        self.attn = config.mixers[layer].build(config, layer)
        self.ln1_post = Normalize(config.norm, d, "ln1_post") if outer else None
        self.ln_cross = Normalize(inner, d, "ln_cross") if config.cross_attention else None
        self.cross_attn = CrossAttention(config, layer) if config.cross_attention else None
        self.ln2 = Normalize(inner, d, "ln2") if has_mlp and not config.shared_norm else None
        self.mlp = None if config.mlp is None else config.mlp.build(d, layer, "mlp")
        self.ln2_post = Normalize(config.norm, d, "ln2_post") if outer and has_mlp else None
        self._identity = Normalize(NoNorm(), d, "none")

    def _build_first(self, layer: int) -> None:
        """Make the sublayers that come before attention: none in this block."""

    def mlps(self) -> dict[str, nn.Module]:
        """The MLPs, by the name that their sites and parameters begin with."""
        return {name: self.get_submodule(name) for name in self.config.mlps}

    def forward(
        self,
        resid: Float[Tensor, "b p d"],
        shared: PassState,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """The residual stream after the block; before its MLP if the tap needs nothing after attention.

        Args:
            only: the columns of each row that are returned (None: all); at others only keys and values are computed.
        """
        if only is not None and not self.config.pointwise:  # such an MLP reads earlier columns too
            return picked(self(resid, shared, tap), only)
        resid = self._before_attention(at(tap, "hook_resid_pre", resid), tap)
        if tap is not None and tap.finished:
            return resid
        normed = self._attention_input(resid, tap)
        attn_out = self.attn(normed, (resid, self.reading(self.ln1)), shared, tap, only)
        if only is not None:
            resid, normed = picked(resid, only), picked(normed, only)
        x = resid + self._added("attn_out", attn_out, tap)
        if tap is not None and tap.finished:
            return x
        if self.cross_attn is not None and self.ln_cross is not None:
            x = self._summed(self.ln1, at(tap, "hook_resid_mid", x), tap)
            crossed = self.cross_attn(self.reading(self.ln_cross)(x, tap), shared, tap)
            x = x + self._added("cross_attn_out", crossed, tap)
        return self._through_mlp(x, resid, normed, tap, shared)

    def without_attention(self, resid: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """The residual stream after the block if attention added nothing; ValueError if its MLP sees other tokens."""
        if not self.config.pointwise:
            raise ValueError(
                f"a block by itself requires an MLP of single positions, this one has {self.config.mlp}"
            )
        resid = self._before_attention(resid, None)
        return self._through_mlp(resid, resid, self.reading(self.ln1)(resid), None, None)

    def _before_attention(self, resid: Float[Tensor, "*b d"], tap: Scope | None) -> Float[Tensor, "*b d"]:
        """The stream that attention reads, from the stream that enters the block."""
        return resid

    def _attention_input(self, resid: Float[Tensor, "b p d"], tap: Scope | None) -> Float[Tensor, "b p d"]:
        """The normed stream, which queries, keys and values are made from."""
        return self.reading(self.ln1)(resid, tap)

    def _through_mlp(
        self, x: Tensor, resid: Tensor, normed: Tensor, tap: Scope | None, shared: PassState | None
    ) -> Float[Tensor, "*b d"]:
        """The block's output, from the stream after attention.

        Args:
            x: the stream after attention.
            resid, normed: the stream that attention read, before its norm and after.
        """
        if self.mlp is not None:
            if self.config.parallel:
                mlp_in = self._parallel_input(resid, normed, tap)
            else:
                x = self._before_mlp(x, tap)
                mlp_in = self.reading(self.ln2)(at(tap, "hook_mlp_in", x), tap)
            also = () if self.config.pointwise else (shared,)
            x = x + self._added("mlp_out", self.mlp(mlp_in, tap, *also), tap)
        x = at(tap, "hook_resid_post", x)
        if not self.config.norms_sum:
            return x
        return at(tap, "hook_normalized_resid_post", self._last_norm()(x, tap))

    def reading(self, norm: Normalize | None) -> Normalize:
        """The norm through which a sublayer reads the stream: none at all in post-norm blocks."""
        return self._identity if norm is None or self.config.norms_sum else norm

    def input_norm(self, sublayer: str) -> Normalize:
        """The norm through which a sublayer (`attn_out`, ...) reads the stream."""
        mlp = self.ln1 if self.config.shared_norm else self.ln2
        norms = {"attn_out": self.ln1, "cross_attn_out": self.ln_cross, "mlp_out": mlp}
        return self.reading(norms[sublayer])

    def post_norm(self, sublayer: str) -> Normalize | None:
        """The norm of what a sublayer (`attn_out`, ...) adds, if it has one."""
        return {"attn_out": self.ln1_post, "mlp_out": self.ln2_post}.get(sublayer)

    def sum_norm(self, sublayer: str) -> Normalize | None:
        """The norm of the stream after a sublayer was added, in post-norm blocks."""
        if not self.config.norms_sum:
            return None
        return {"attn_out": self.ln1, "cross_attn_out": self.ln_cross, "mlp_out": self.ln2}[sublayer]

    def _added(self, sublayer: str, out: Float[Tensor, "*b d"], tap: Scope | None) -> Float[Tensor, "*b d"]:
        """The term that a sublayer adds to the stream (a site): its output, normed and scaled in some families."""
        norm = self.post_norm(sublayer)
        if norm is not None:
            out = norm(out, tap)
        factor = self.config.factor(sublayer)
        if factor != 1:
            out = out * factor
        return at(tap, f"hook_{sublayer}", out)

    def _before_mlp(self, x: Float[Tensor, "*b d"], tap: Scope | None) -> Float[Tensor, "*b d"]:
        """The stream between the last attention of the block and the MLP (a site), normed in post-norm blocks."""
        crossed = self.cross_attn is not None
        x = at(tap, "hook_resid_mid_cross" if crossed else "hook_resid_mid", x)
        return self._summed(self.ln_cross if crossed else self.ln1, x, tap)

    def _parallel_input(self, resid: Tensor, normed: Tensor, tap: Scope | None) -> Float[Tensor, "*b d"]:
        """The input of the MLP of a parallel block: attention's input where both share a norm."""
        read = at(tap, "hook_mlp_in", resid)
        if self.ln2 is not None:
            return self.ln2(read, tap)
        return self.ln1(read) if tap is not None and tap.alters("hook_mlp_in") else normed

    def _summed(self, norm: Normalize | None, x: Tensor, tap: Scope | None) -> Float[Tensor, "*b d"]:
        """The stream after a sublayer was added: normed in post-norm blocks, unchanged in others."""
        return x if norm is None or not self.config.norms_sum else norm(x, tap)

    def _last_norm(self) -> Normalize:
        """The norm after the last sublayer of a post-norm block."""
        norm = self.sum_norm(self.config.sublayers[-1])
        assert norm is not None
        return norm
