"""The MLP of a block, plain or gated, and the mixture of experts that may stand in its place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from interp.model.records import AnyMLP, at_least_one
from interp.model.sites import Site
from interp.model.tap import Scope, at

if TYPE_CHECKING:
    from interp.model.config import ModelConfig

Activation = Literal["gelu", "gelu_new", "quick_gelu", "relu", "silu"]
"""`gelu` is exact (erf), `gelu_new` its tanh approximation, `quick_gelu` x sigmoid(1.702 x)."""

NEXT_ROW = "ln2_post.hook_scale"
"""The row of the table of sites that those of an MLP stand before."""
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
        _check(self, self.act)

    @property
    def width(self) -> int:
        """Multiplications of one token, in units of d_model."""
        return self.d_mlp * (3 if self.gated else 2)

    def sites(self, config: "ModelConfig") -> tuple[Site, ...]:
        """The neurons, before and after; with a gate its linear branch."""
        return tuple(site for site in self.own_sites if self.gated or not site.name.endswith("_linear"))

    def build(self, d_model: int, layer: int, name: str) -> "FeedForward":
        """The module."""
        return FeedForward(self, d_model, name)


@dataclass(frozen=True)
class MoE(AnyMLP):
    """A mixture of gated experts: a router picks `top_k` of them per token and weighs their outputs."""

    n_experts: int
    top_k: int
    d_mlp: int
    """Neurons of one expert."""
    act: Activation = "silu"
    bias: bool = False
    """Whether the experts' matrices have biases."""
    router_bias: bool = False
    renormalise: bool = True
    """Whether the chosen experts' weights sum to 1; False: they keep their share of the softmax over all experts."""
    clamp: float | None = None
    """Gate values are cut at this number, linear ones at plus and minus it (GPT-OSS)."""
    linear_offset: float = 0.0
    """Added to the linear branch before it multiplies the gate (GPT-OSS: 1)."""

    words: ClassVar[str] = "a mixture of experts"
    no_matrices: ClassVar[str | None] = "a mixture of experts, whose matrices see only some tokens each"
    own_sites = (
        Site("mlp.hook_router_logits", "b p x", "the router's score of every expert", before=NEXT_ROW),
        Site(
            "mlp.hook_expert_weights",
            "b p x",
            "the weight of every expert, 0 where not chosen",
            before=NEXT_ROW,
        ),
        Site(
            "mlp.hook_expert_out", "b p x d", "each expert's weighted output", on_demand=True, before=NEXT_ROW
        ),
    )

    def __post_init__(self) -> None:
        _check(self, self.act)
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"MoE requires 1 <= top_k <= n_experts, got {self.top_k} and {self.n_experts}")

    @property
    def width(self) -> int:
        """Multiplications of one token, in units of d_model."""
        return 3 * self.d_mlp * self.top_k

    def build(self, d_model: int, layer: int, name: str) -> "Experts":
        """The module."""
        return Experts(self, d_model, name)


def _check(record: AnyMLP, act: str) -> None:
    at_least_one(record, "d_mlp")
    if act not in get_args(Activation):
        kind, known = type(record).__name__, ", ".join(get_args(Activation))
        raise ValueError(f"{kind} has no activation {act!r}; known: {known}")


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
            post = self.act(gate) * at(tap, f"{self.name}.hook_pre_linear", linear)
        else:
            post = self.act(at(tap, f"{self.name}.hook_pre", self.into(x)))
        return self.out(at(tap, f"{self.name}.hook_post", post))


class Experts(nn.Module):
    """sum over the chosen experts of weight_x * expert_x(x), every expert a gated MLP.

    The router's softmax over its `top_k` largest logits weighs them (Shazeer et al. 2017); without `renormalise` they
    keep their share of the softmax over all. Matrices are stacked `[expert, out, in]`, rows ordered gate, in. Sites
    begin with `name`.
    """

    def __init__(self, moe: MoE, d_model: int, name: str = "mlp") -> None:
        super().__init__()
        self.name = name
        self.kind = moe
        self.act = ACTIVATIONS[moe.act]
        self.router = nn.Linear(d_model, moe.n_experts, bias=moe.router_bias)
        self.into = nn.Parameter(torch.empty(moe.n_experts, 2 * moe.d_mlp, d_model))
        self.out = nn.Parameter(torch.empty(moe.n_experts, d_model, moe.d_mlp))
        biases = [torch.zeros(moe.n_experts, 2 * moe.d_mlp), torch.zeros(moe.n_experts, d_model)]
        into_bias, out_bias = [nn.Parameter(b) if moe.bias else None for b in biases]
        self.into_bias, self.out_bias = into_bias, out_bias

    def forward(self, x: Float[Tensor, "b p d"], tap: Scope | None = None) -> Float[Tensor, "b p d"]:
        """The mixture's output; only experts with a weight other than 0 are computed, unless all are observed."""
        logits = at(tap, f"{self.name}.hook_router_logits", self.router(x))
        shares_site, out_site = f"{self.name}.hook_expert_weights", f"{self.name}.hook_expert_out"
        weights = at(tap, shares_site, self.weights(logits))
        if tap is not None and (tap.wants(out_site) or tap.alters(shares_site)):
            outs = torch.stack([self.expert(i, x) for i in range(self.kind.n_experts)], 2)
            return at(tap, out_site, outs * weights[..., None]).sum(2)
        flat, shares = x.flatten(0, 1), weights.flatten(0, 1)
        out = torch.zeros_like(flat)
        for i in range(self.kind.n_experts):
            rows = shares[:, i].nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, self.expert(i, flat[rows]) * shares[rows, i, None])
        return out.view_as(x)

    def weights(self, logits: Float[Tensor, "b p x"]) -> Float[Tensor, "b p x"]:
        """The weight of every expert, 0 for those not chosen; the softmax runs in float32 at least."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        chosen = wide.topk(self.kind.top_k, -1)
        share = chosen.values.softmax(-1)
        if not self.kind.renormalise:
            share = wide.softmax(-1).gather(-1, chosen.indices)
        return torch.zeros_like(wide).scatter(-1, chosen.indices, share).to(logits.dtype)

    def expert(self, i: int, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """The output of one expert, unweighted."""
        bias = None if self.into_bias is None else self.into_bias[i]
        gate, linear = F.linear(x, self.into[i], bias).chunk(2, -1)
        if self.kind.clamp is not None:
            gate, linear = gate.clamp(max=self.kind.clamp), linear.clamp(-self.kind.clamp, self.kind.clamp)
        post = self.act(gate) * (linear + self.kind.linear_offset if self.kind.linear_offset else linear)
        return F.linear(post, self.out[i], None if self.out_bias is None else self.out_bias[i])
