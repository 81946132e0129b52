"""Mixtures of experts: a router picks some gated MLPs per token and weighs them; in some models with a shared one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.model.block import ACTIVATIONS, MLP, NEXT_ROW, Activation, FeedForward
from interp.model.records import AnyMLP, ConfigRecord, at_least_one, not_negative, positive, requires
from interp.model.rules import NO_RULES, constant, kept, product, secant
from interp.model.sites import Site
from interp.model.tap import Scope, at

if TYPE_CHECKING:
    from interp.model.config import ModelConfig

SHARED = "mlp.shared"
"""Prefix of the sites of the shared expert."""
GROUPED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that torch multiplies by groups of rows in one kernel."""


@dataclass(frozen=True)
class Router(ConfigRecord):
    """How the logits of experts become a choice of some of them, each with a weight.

    The default: a softmax, and the experts of the largest shares.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How a logit becomes a score: its share of the softmax over all experts, or its own sigmoid (DeepSeek V3, Llama
    4).
    """
    correction: bool = False
    """Whether a trained number per expert is added to its score for the choice, and not for the weight (DeepSeek V3).
    """
    groups: int = 1
    """Number of groups of neighbouring experts, some of which are chosen first (DeepSeek V2, section 2.2.2)."""
    top_groups: int = 1
    """Number of groups that experts may come from."""
    best: int = 1
    """Number of best scores whose sum ranks a group: 1 in DeepSeek V2, 2 in V3."""
    factor: float = 1.0
    """Factor on the weights, applied last."""
    weighs: Literal["output", "input"] = "output"
    """Whether an expert's weight multiplies its output, or its input (Llama 4)."""
    wide: bool = False
    """Whether logits are computed in float32 at least, whatever the dtype of the model (DeepSeek)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "groups", "top_groups", "best")
        not_negative(self, "factor")
        if self.top_groups > self.groups:
            raise ValueError(f"Router requires top_groups <= groups, got {self.top_groups} and {self.groups}")

    @property
    def monotone(self) -> bool:
        """Whether the largest logits are those of the chosen experts and groups."""
        return not self.correction and self.best == 1


@dataclass(frozen=True)
class MoE(AnyMLP):
    """A mixture of gated experts: a router picks `top_k` of them per token and weighs them."""

    n_experts: int
    top_k: int
    d_mlp: int
    """Neurons of one expert."""
    act: Activation = "silu"
    bias: bool = False
    """Whether the experts' matrices have biases."""
    router_bias: bool = False
    renormalise: bool = True
    """Whether the chosen experts' weights sum to 1 (before the router's factor); False: they keep their scores."""
    clamp: float | None = None
    """Gate values are cut at this number, linear ones at plus and minus it (GPT-OSS)."""
    linear_offset: float = 0.0
    """Added to the linear branch before it multiplies the gate (GPT-OSS: 1)."""
    router: Router = Router()
    shared: int = 0
    """Neurons of the shared expert, a gated MLP through which every token passes as well; 0: none."""
    shared_gate: bool = False
    """Whether what the shared expert gives is multiplied by a sigmoid of its own, one number per token (Qwen3-Next)."""
    dense: MLP | None = None
    """MLP that stands in place of the experts in some layers."""
    dense_layers: tuple[int, ...] = ()
    """The layers in which the dense MLP stands."""

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
    shared_sites: ClassVar[tuple[Site, ...]] = (
        *(
            replace(
                site,
                name=site.name.replace("mlp.", f"{SHARED}.", 1),
                meaning=f"shared expert: {site.meaning}",
            )
            for site in MLP.own_sites
        ),
        Site(
            "mlp.hook_shared_weight", "b p 1", "the weight of the shared expert, a sigmoid", before=NEXT_ROW
        ),
        Site("mlp.hook_shared_out", "b p d", "the shared expert's output, weighted", before=NEXT_ROW),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "d_mlp")
        not_negative(self, "shared")
        positive(self, "clamp")
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"MoE requires 1 <= top_k <= n_experts, got {self.top_k} and {self.n_experts}")
        rule = self.router
        size, remainder = divmod(self.n_experts, rule.groups)
        if remainder or (rule.groups > 1 and (rule.best > size or self.top_k > rule.top_groups * size)):
            raise ValueError(
                f"MoE requires groups that divide {self.n_experts} experts, hold {rule.best} each and {self.top_k} "
                f"in {rule.top_groups} of them, got {rule.groups} groups"
            )
        if self.shared_gate and not self.shared:
            raise ValueError("MoE requires a shared expert for shared_gate, got shared=0")
        if rule.weighs == "input" and self.bias:
            raise ValueError("MoE requires experts without biases where weights multiply what they read")
        if bool(self.dense_layers) != (self.dense is not None):
            raise ValueError(
                f"MoE requires a dense MLP for dense_layers, got {self.dense} for {self.dense_layers}"
            )

    def check(self, config: ModelConfig) -> None:
        """ValueError for dense layers that the model lacks."""
        bad = [layer for layer in self.dense_layers if not 0 <= layer < config.n_layers]
        requires(not bad, f"dense_layers in [0, {config.n_layers - 1}], got {bad[:1]}")

    @property
    def width(self) -> int:
        """Multiplications of one token, in units of d_model, in the layers that have the most."""
        mixture = 3 * (self.d_mlp * self.top_k + self.shared)
        return mixture if self.dense is None else max(mixture, self.dense.width)

    def at_layer(self, layer: int) -> AnyMLP:
        """The MLP of a layer: the dense one where one stands in place of the experts, else the experts."""
        if self.dense is None:
            return self
        return self.dense if layer in self.dense_layers else replace(self, dense=None, dense_layers=())

    @classmethod
    def any_sites(cls) -> tuple[Site, ...]:
        """The sites that any layer may have, those of the shared expert too."""
        return (*cls.own_sites, *cls.shared_sites)

    def sites(self, config: ModelConfig) -> tuple[Site, ...]:
        """The sites of the experts, of the shared one, and of the dense MLP of some layers."""
        dense = () if self.dense is None else self.dense.sites(config)
        shared = [s for s in self.shared_sites if self.shared_gate or not s.name.endswith("shared_weight")]
        return (*dense, *self.own_sites, *(shared if self.shared else ()))

    def flops(self, d_model: int, layer: int, n: int) -> int:
        """The router, the chosen experts of each token and the shared one."""
        kind = self.at_layer(layer)
        if not isinstance(kind, MoE):
            return kind.flops(d_model, layer, n)
        gate = 1 if self.shared_gate else 0
        return 2 * n * d_model * (kind.width + self.n_experts + gate)

    def build(self, d_model: int, layer: int, name: str) -> nn.Module:
        """The module."""
        kind = self.at_layer(layer)
        return Experts(kind, d_model, name) if isinstance(kind, MoE) else kind.build(d_model, layer, name)


@dataclass(frozen=True)
class ExpertGroups:
    """Token rows sorted by their expert, so that the rows of one expert are consecutive.

    The host waits for the device at most once (`sizes`).
    """

    expert: Int[Tensor, "n"]
    """Number of each row's expert, ascending."""
    ends: Int[Tensor, "x"]
    """For every expert, one past its last row."""

    @classmethod
    def of(cls, expert: Int[Tensor, "n"], n_experts: int) -> ExpertGroups:
        """The groups of rows of these experts, which ascend."""
        every = torch.arange(n_experts, device=expert.device)
        return cls(expert, torch.searchsorted(expert, every, right=True, out_int32=True))

    @cached_property
    def sizes(self) -> list[int]:
        """Number of rows of every expert, on the host."""
        ends = [0, *self.ends.tolist()]
        return [end - start for start, end in pairwise(ends)]

    def product(
        self, x: Float[Tensor, "n i"], weight: Float[Tensor, "x o i"], bias: Float[Tensor, "x o"] | None
    ) -> Float[Tensor, "n o"]:
        """Every row through its expert's matrix, and its bias added.

        One kernel where torch has it: in float32 and below, rows of whole 16 bytes, and without a derivative (it has
        no second derivative, and no rule for batches of gradients). Else one product per expert that has rows, equal
        to rounding.
        """
        record = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        aligned = all(width * x.element_size() % 16 == 0 for width in weight.shape[1:])
        values = len(x) > 0 and not x.is_meta
        if values and aligned and not record and x.dtype == weight.dtype and x.dtype in GROUPED:
            out = F.grouped_mm(x, weight.mT, offs=self.ends)
        else:
            parts = zip(x.split(self.sizes), weight.unbind(), strict=True)
            none = x.new_zeros(0, weight.shape[1])
            out = torch.cat([none, *(F.linear(rows, matrix) for rows, matrix in parts if len(rows))])
        return out if bias is None else out + bias[self.expert]


class Experts(nn.Module):
    """sum over the chosen experts of weight_x * expert_x(x), every expert a gated MLP, plus the shared expert's output.

    By default the router's softmax over its `top_k` largest logits weighs them (Shazeer et al. 2017); without
    `renormalise` they keep their share of the softmax over all. `Router` has the other ways; where weights multiply
    what experts read the sum is of expert_x(weight_x * x). Matrices are stacked `[expert, out, in]`, rows ordered gate,
    in. Sites begin with `name`.
    """

    rules = NO_RULES

    def __init__(self, moe: MoE, d_model: int, name: str = "mlp") -> None:
        super().__init__()
        self.name = name
        self.kind = moe
        self.act = ACTIVATIONS[moe.act]
        self.router = nn.Linear(d_model, moe.n_experts, bias=moe.router_bias)
        self.correction = nn.Parameter(torch.zeros(moe.n_experts)) if moe.router.correction else None
        self.into = nn.Parameter(torch.empty(moe.n_experts, 2 * moe.d_mlp, d_model))
        self.out = nn.Parameter(torch.empty(moe.n_experts, d_model, moe.d_mlp))
        biases = [torch.zeros(moe.n_experts, 2 * moe.d_mlp), torch.zeros(moe.n_experts, d_model)]
        into_bias, out_bias = [nn.Parameter(b) if moe.bias else None for b in biases]
        self.into_bias, self.out_bias = into_bias, out_bias
        always = MLP(max(1, moe.shared), moe.act, gated=True, bias=False)
        self.shared = FeedForward(always, d_model, f"{name}.shared") if moe.shared else None
        self.shared_gate = nn.Linear(d_model, 1, bias=False) if moe.shared_gate else None

    def forward(self, x: Float[Tensor, "b p d"], tap: Scope | None = None) -> Float[Tensor, "b p d"]:
        """The mixture's output; only experts with a weight other than 0 are computed, unless all are observed."""
        weights = self.weights(at(tap, f"{self.name}.hook_router_logits", self.logits(x)))
        weights = constant(weights, self.rules)
        mixed = self._mixed(x, at(tap, f"{self.name}.hook_expert_weights", weights), tap)
        if self.shared is None:
            return mixed
        shared = self.shared(x, tap)
        if self.shared_gate is not None:
            share = constant(self.shared_gate(x).sigmoid(), self.rules)
            shared = shared * at(tap, f"{self.name}.hook_shared_weight", share)
        return mixed + at(tap, f"{self.name}.hook_shared_out", shared)

    def logits(self, x: Float[Tensor, "b p d"]) -> Float[Tensor, "b p x"]:
        """The router's logits."""
        if not self.kind.router.wide:
            return self.router(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.router.bias is None else self.router.bias.to(wide)
        return F.linear(x.to(wide), self.router.weight.to(wide), bias)

    def weights(self, logits: Float[Tensor, "b p x"]) -> Float[Tensor, "b p x"]:
        """The weight of every expert, 0 for those not chosen; scores are computed in float32 at least."""
        rule, wide = self.kind.router, logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = wide.sigmoid() if rule.scores == "sigmoid" else wide.softmax(-1)
        chosen = self._chosen_experts(wide if rule.monotone else scores)
        if not self.kind.renormalise:
            share = scores.gather(-1, chosen)
        elif rule.scores == "softmax":
            share = wide.gather(-1, chosen).softmax(-1)
        else:
            share = scores.gather(-1, chosen)
            share = share / (share.sum(-1, keepdim=True) + 1e-20)
        return torch.zeros_like(wide).scatter(-1, chosen, share * rule.factor).to(logits.dtype)

    def _chosen_experts(self, rank: Float[Tensor, "b p x"]) -> Int[Tensor, "b p k"]:
        """The `top_k` experts of highest rank within the `top_groups` best groups."""
        rule = self.kind.router
        rank = rank if self.correction is None else rank + self.correction
        if rule.groups > 1:
            grouped = rank.unflatten(-1, (rule.groups, -1))
            best = grouped.topk(rule.best, -1).values.sum(-1).topk(rule.top_groups, -1).indices
            shut = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
            rank = grouped.masked_fill(shut[..., None], -torch.inf).flatten(-2)
        return rank.topk(self.kind.top_k, -1).indices

    def _mixed(
        self, x: Float[Tensor, "b p d"], weights: Float[Tensor, "b p x"], tap: Scope | None
    ) -> Float[Tensor, "b p d"]:
        """The weighted sum of the experts' outputs."""
        shares_site, out_site = f"{self.name}.hook_expert_weights", f"{self.name}.hook_expert_out"
        if tap is not None and (tap.wants(out_site) or tap.alters(shares_site)):
            outs = torch.stack(
                [self._weighted(i, x, weights[..., i, None]) for i in range(self.kind.n_experts)], 2
            )
            return at(tap, out_site, outs.to(x.dtype)).sum(2)
        flat, shares = x.flatten(0, 1), weights.flatten(0, 1)  # [b p d] -> [token d], [b p x] -> [token x]
        chosen = shares.topk(self.kind.top_k, -1).indices.sort(-1).values
        order = chosen.flatten().argsort(stable=True)
        weight = shares.gather(-1, chosen).flatten()[order, None]
        groups = ExpertGroups.of(chosen.flatten()[order], self.kind.n_experts)
        out = self._grouped(flat[order // self.kind.top_k], weight, groups).to(x.dtype)
        back = torch.empty_like(out).index_copy(0, order, out)  # by expert -> [(token k) d]
        return back.view(*x.shape[:2], self.kind.top_k, x.shape[2]).sum(2)

    def _grouped(
        self, x: Float[Tensor, "n d"], weight: Float[Tensor, "n 1"], groups: ExpertGroups
    ) -> Float[Tensor, "n d"]:
        """The weighted outputs of token rows sorted by expert."""
        inside = self.kind.router.weighs == "input"
        hidden = groups.product((x * weight).to(x.dtype) if inside else x, self.into, self.into_bias)
        out = groups.product(self._gated_neurons(hidden), self.out, self.out_bias)
        return out if inside else out * weight

    def _weighted(
        self, i: int, x: Float[Tensor, "*b d"], weight: Float[Tensor, "*b 1"]
    ) -> Float[Tensor, "*b d"]:
        """The weighted output of one expert: the weight is a factor of its output or of its input."""
        if self.kind.router.weighs == "input":
            return self.expert(i, (x * weight).to(x.dtype))
        return self.expert(i, x) * weight

    def expert(self, i: int, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """The output of one expert, unweighted."""
        post = self._gated_neurons(
            F.linear(x, self.into[i], None if self.into_bias is None else self.into_bias[i])
        )
        return F.linear(post, self.out[i], None if self.out_bias is None else self.out_bias[i])

    def _gated_neurons(self, hidden: Float[Tensor, "*b m2"]) -> Float[Tensor, "*b m"]:
        """The activations of the experts' neurons: the activated gate times the linear branch."""
        gate, linear = hidden.chunk(2, -1)
        most, offset = self.kind.clamp, self.kind.linear_offset
        if most is not None:
            gate = secant(partial(torch.clamp, max=most), gate, self.rules)
            linear = secant(partial(torch.clamp, min=-most, max=most), linear, self.rules)
        act = secant(self.act, gate, self.rules)
        post = product(act, linear + offset if offset else linear, self.rules)
        if (
            offset and "gate" in self.rules
        ):  # the offset is a constant, so that its share goes to the gate alone
            post = kept(post, product(act, linear, self.rules) + act * offset)
        return post
