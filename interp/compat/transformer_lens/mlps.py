"""The MLPs of a block as modules with TransformerLens' parameters and hook points."""

from typing import cast

import torch
from torch import Tensor, nn

from interp.compat.transformer_lens.activations import SUPPORTED_ACTIVATIONS
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.engine import Part
from interp.compat.transformer_lens.hook_points import HookPoint
from interp.compat.transformer_lens.layers import Config, LayerNorm, LayerNormPre
from interp.compat.transformer_lens.native import blueprint, filled, native_mlp
from interp.model.config import ModelConfig


class CanBeUsedAsMLP(Part):
    """What stands at a block's `mlp`: reads the normed stream `[b p d]`, gives what is added to it."""

    def __init__(self, cfg: Config) -> None:
        """Errors: ValueError for a config without `d_mlp`."""
        super().__init__()
        self.cfg = HookedTransformerConfig.unwrap(cfg)
        if self.cfg.d_mlp is None:
            raise ValueError("d_mlp must be set to use an MLP")
        self.d_mlp: int = self.cfg.d_mlp

    def select_activation_function(self) -> None:
        """Set `act_fn`, and after an activation called `..._ln` also `hook_mid` and the norm `ln`."""
        self.act_fn = SUPPORTED_ACTIVATIONS[cast(str, self.cfg.act_fn)]
        if self.cfg.is_layer_norm_activation():
            self.hook_mid = HookPoint()
            weighted = self.cfg.normalization_type == "LN"
            self.ln = LayerNorm(self.cfg, self.d_mlp) if weighted else LayerNormPre(self.cfg)

    def forward(self, x: Tensor) -> Tensor:
        """The input itself; for subclasses."""
        return x


class MLP(CanBeUsedAsMLP):
    """`act(x W_in + b_in) W_out + b_out`, with a norm after an activation called `..._ln`."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.select_activation_function()
        self._build(self.cfg.d_model, self.d_mlp, self.cfg.dtype)

    def _build(self, d: int, m: int, dtype: torch.dtype) -> None:
        self.W_in = nn.Parameter(torch.empty(d, m, dtype=dtype))
        self.b_in = nn.Parameter(torch.zeros(m, dtype=dtype))
        self.W_out = nn.Parameter(torch.empty(m, d, dtype=dtype))
        self.b_out = nn.Parameter(torch.zeros(d, dtype=dtype))
        self.hook_pre = HookPoint()
        self.hook_post = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        """The output `[b p d]`."""
        return self.computed(lambda native, scope: native(x, scope), x)

    def _own_path(self) -> str:
        return "blocks.0.mlp"

    def _native(self, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, ModelConfig]:
        with torch.device("meta"):
            native = native_mlp(self.cfg, gated="W_gate" in self._parameters)
        return filled(native, self.cfg, device, dtype), blueprint(self.cfg).config


class GatedMLP(MLP):
    """`(act(x W_gate) * (x W_in) + b_in) W_out + b_out`."""

    def _build(self, d: int, m: int, dtype: torch.dtype) -> None:
        self.W_in = nn.Parameter(torch.empty(d, m, dtype=dtype))
        self.W_out = nn.Parameter(torch.empty(m, d, dtype=dtype))
        self.W_gate = nn.Parameter(torch.empty(d, m, dtype=dtype))
        self.b_in = nn.Parameter(torch.zeros(m, dtype=dtype))
        self.b_out = nn.Parameter(torch.zeros(d, dtype=dtype))
        self.hook_pre = HookPoint()
        self.hook_pre_linear = HookPoint()
        self.hook_post = HookPoint()


class Expert(nn.Module):
    """One expert of a mixture: a gated MLP without biases; here `hook_pre` is the linear branch."""

    def __init__(self, cfg: HookedTransformerConfig) -> None:
        super().__init__()
        d, m = cfg.d_model, cast(int, cfg.d_mlp)
        self.W_in = nn.Linear(d, m, bias=False, dtype=cfg.dtype)
        self.W_out = nn.Linear(m, d, bias=False, dtype=cfg.dtype)
        self.W_gate = nn.Linear(d, m, bias=False, dtype=cfg.dtype)
        self.hook_gate = HookPoint()
        self.hook_pre = HookPoint()
        self.hook_post = HookPoint()
        self.act_fn = SUPPORTED_ACTIVATIONS[cast(str, cfg.act_fn)]

    def forward(self, x: Tensor) -> Tensor:
        """The unweighted output for the tokens `[n d]` that chose this expert."""
        gate, linear = self.hook_gate(self.W_gate(x)), self.hook_pre(self.W_in(x))
        return self.W_out(self.hook_post(self.act_fn(gate) * linear))


class MoE(CanBeUsedAsMLP):
    """The weighted sum of the experts that a router chooses for each token."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        assert self.cfg.num_experts and self.cfg.experts_per_token, (
            "num_experts and experts_per_token required"
        )
        assert self.cfg.experts_per_token <= self.cfg.num_experts, (
            f"experts_per_token={self.cfg.experts_per_token} is more than num_experts={self.cfg.num_experts}"
        )
        self.num_experts, self.experts_per_token = self.cfg.num_experts, self.cfg.experts_per_token
        self.experts = nn.ModuleList(Expert(self.cfg) for _ in range(self.num_experts))
        self.W_gate = nn.Linear(self.cfg.d_model, self.num_experts, bias=False, dtype=self.cfg.dtype)
        self.hook_expert_weights = HookPoint()
        self.hook_expert_indices = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        """The output `[b p d]`."""
        flat = x.flatten(0, 1)
        wide = torch.promote_types(x.dtype, torch.float32)
        shares = self.hook_expert_weights(self.W_gate(flat).softmax(-1, dtype=wide))
        weights, chosen = shares.topk(self.experts_per_token, -1)
        if self.cfg.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        chosen, weights = self.hook_expert_indices(chosen), weights.to(x.dtype)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            place, rows = (i == chosen.T).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return out.view_as(x)


def mlp_of(cfg: HookedTransformerConfig) -> nn.Module:
    """The MLP that a config asks for."""
    if cfg.num_experts:
        return MoE(cfg)
    return GatedMLP(cfg) if cfg.gated_mlp else MLP(cfg)
