"""The MLP of a block, plain or gated, and the mixture of experts that may stand in its place."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.model.attention import Pass
from interp.model.config import MLP, ConvMLP, MoE
from interp.model.mask import picked
from interp.model.tap import Scope, at


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


class ConvFeedForward(nn.Module):
    """`(c_in * silu(c_gate)) W_out`, c = depthwise(silu(x W + b)) + b_conv, for each of the two branches in and gate.

    The Mix-FFN of Sana (Xie et al. 2024, section 2.2 and released code) in one dimension: the convolution sees a token
    and the `kernel - 1` kept ones of its text before it. Not per position: it keeps a state for generation. Branches
    share one matrix, rows ordered gate, in; `kernel [t, f]`, the own token's weights last. W_out has no bias.
    """

    def __init__(self, mlp: ConvMLP, d_model: int, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.into = nn.Linear(d_model, 2 * mlp.d_mlp)
        self.kernel = nn.Parameter(torch.zeros(mlp.kernel, 2 * mlp.d_mlp))
        self.bias = nn.Parameter(torch.zeros(2 * mlp.d_mlp))
        self.out = nn.Linear(mlp.d_mlp, d_model, bias=False)

    def forward(self, x: Float[Tensor, "b p d"], tap: Scope | None, shared: Pass) -> Float[Tensor, "b p d"]:
        """The MLP's output."""
        expanded = F.silu(self.into(x))
        if tap is not None:
            gate, linear = expanded.chunk(2, -1)
            gate, linear = at(tap, "mlp.hook_expanded", gate), at(tap, "mlp.hook_expanded_linear", linear)
            expanded = torch.cat((gate, linear), -1)
        gate, linear = self._convolved(expanded, shared).chunk(2, -1)
        post = F.silu(at(tap, "mlp.hook_pre", gate)) * at(tap, "mlp.hook_pre_linear", linear)
        return self.out(at(tap, "mlp.hook_post", post))

    def _convolved(self, x: Float[Tensor, "b p f"], shared: Pass) -> Float[Tensor, "b p f"]:
        """sum_t kernel_t x_(i-t) + bias over the kept tokens of each row, which are moved together for it."""
        n, back, cache = x.shape[1], len(self.kernel) - 1, shared.cache
        keep, documents = shared.layout.keep, shared.layout.documents
        order: Int[Tensor, "b p"] | None = None
        if keep is not None:
            keep = keep[:, -n:]
            order = (~keep).int().argsort(dim=1, stable=True)
            x = picked(x, order)
            documents = None if documents is None else picked(documents, order)
        before = () if cache is None else cache.states.get((self.layer, "mlp"), ())
        past = torch.cat((before[0] if before else x.new_zeros(len(x), back, x.shape[2]), x), 1)
        if cache is not None:
            shared.left[self.layer, "mlp"] = (_last(past, back, keep, n),)
        found = self.bias + self.kernel[back] * x
        for t in range(1, back + 1):
            earlier = past[:, back - t : back - t + n]
            if documents is not None:
                earlier = earlier.masked_fill(_other_text(documents, t)[..., None], 0)
            found = found + self.kernel[back - t] * earlier
        return found if order is None else picked(found, order.argsort(1))


def _last(
    past: Float[Tensor, "b k f"], back: int, keep: Bool[Tensor, "b p"] | None, n: int
) -> Float[Tensor, "b t f"]:
    """The last `back` kept columns; the kept ones of the last `n` stand before the others."""
    if keep is None:
        return past[:, n:]
    return picked(past, keep.sum(1, keepdim=True) + torch.arange(back, device=past.device))


def _other_text(documents: Int[Tensor, "b p"], t: int) -> Bool[Tensor, "b p"]:
    """Whether the column `t` places before belongs to another text, or to none."""
    other = torch.ones_like(documents, dtype=torch.bool)
    other[:, t:] = documents[:, t:] != documents[:, :-t]
    return other


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
