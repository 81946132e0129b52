"""The native model of a `HookedTransformer`: it computes every pass it can, with TransformerLens' hook points.

TransformerLens differs from us in where some points stand: `hook_normalized` before gamma and beta, the bias of a gated
MLP after the gate, `unembed.hook_out` before the soft cap. Parts of our own have those sites besides the native ones.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.compat import hooked_config
from interp.compat.transformer_lens.activations import SUPPORTED_ACTIVATIONS
from interp.compat.transformer_lens.attention import Attention
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.hook_tap import HookScope
from interp.compat.transformer_lens.rotary import ROWS
from interp.model.attention import Layout, Memory, Pass, View
from interp.model.block import FeedForward
from interp.model.config import MLP, ModelConfig, NoNorm, Norm
from interp.model.kv_cache import Past
from interp.model.norm import Normalize
from interp.model.position import Rotation
from interp.model.tap import Scope, at
from interp.model.transformer import Transformer


class LensNorm(Normalize):
    """A norm with the site `hook_divided` before gamma and beta, and one (`after`) after it."""

    def __init__(self, norm: Norm, d_model: int, name: str) -> None:
        super().__init__(norm, d_model, name)
        self.after = {"ln_final": "unembed.hook_in", "ln_embed": "hook_embed_normed"}.get(name)

    def forward(self, x: Float[Tensor, "*b d"], tap: Scope | None = None) -> Float[Tensor, "*b d"]:
        """The normalised input."""
        if tap is None:
            return x if isinstance(self.kind, NoNorm) else self._fused(x)
        stepwise = isinstance(tap, HookScope) and tap.stepwise and not isinstance(self.kind, NoNorm)
        if stepwise or tap.wants(f"{self.name}.hook_scale", f"{self.name}.hook_divided"):
            out = self._stepwise(x, tap)
        else:
            out = super().forward(x, tap)
        return out if self.after is None else at(tap, self.after, out)

    def _stepwise(self, x: Tensor, tap: Scope) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = at(tap, f"{self.name}.hook_scale", self.scale(wide))
        divided = at(tap, f"{self.name}.hook_divided", self.centred(wide) / scale).to(x.dtype)
        out = divided if self.gamma is None else divided * self.gamma
        out = out if self.bias is None else out + self.bias
        return at(tap, f"{self.name}.hook_normalized", out)


class LensGated(FeedForward):
    """`(act(x W_gate) * (x W_in) + b_in) W_out + b_out`."""

    def __init__(self, mlp: MLP, d_model: int) -> None:
        super().__init__(mlp, d_model)
        self.into.register_parameter("bias", None)
        self.inner_bias = nn.Parameter(torch.zeros(mlp.d_mlp))

    def forward(self, x: Float[Tensor, "b p d"], tap: Scope | None = None) -> Float[Tensor, "b p d"]:
        """The MLP's output."""
        gate, linear = self.into(x).chunk(2, -1)
        gate, linear = at(tap, "mlp.hook_pre", gate), at(tap, "mlp.hook_pre_linear", linear)
        return self.out(at(tap, "mlp.hook_post", self.act(gate) * linear + self.inner_bias))


class LensTransformer(Transformer):
    """The native model with these parts, and rotations from TransformerLens' tables."""

    tables: tuple[Attention | None, Attention | None] = (None, None)
    """A layer without the window and one with it, which keep the tables."""

    def read_out(
        self,
        resid: Float[Tensor, "*b d"],
        tap: Scope | None = None,
        *,
        columns: Int[Tensor, "*b k"] | None = None,
    ) -> Tensor:
        """Logits of a residual stream; the normed stream where nobody wants any."""
        if isinstance(tap, HookScope) and not tap.logits:
            return self.ln_final(resid, tap)
        return super().read_out(resid, tap, columns=columns)

    def _shared(
        self, tokens: Tensor, layout: Layout, cache: Past | None, memory: Memory | None
    ) -> tuple[Pass, Int[Tensor, "b p"]]:
        shared, places = super()._shared(tokens, layout, cache, memory)
        everywhere, local = (
            View(view.mask, self._rotation(view, source, places))
            for view, source in zip((shared.everywhere, shared.local), self.tables, strict=True)
        )
        return replace(shared, everywhere=everywhere, local=local), places

    def _rotation(self, view: View, source: Attention | None, places: Tensor) -> Rotation | None:
        return view.rotation if source is None or view.rotation is None else source.rotation(places)


def native_of(model: nn.Module, cfg: HookedTransformerConfig) -> LensTransformer | None:
    """The native model of a `HookedTransformer`'s config, its weights not yet filled; None where there is none."""
    config = native_config(cfg)
    if config is None:
        return None
    with torch.device("meta"):
        native = LensTransformer(config)
        for name, part in list(native.named_modules()):
            if isinstance(part, Normalize) and not name.endswith("_norm.norm"):
                native.set_submodule(name, LensNorm(part.kind, config.d_model, part.name))
        for layer in range(config.n_layers):
            if isinstance(config.mlp, MLP) and config.mlp.gated:
                native.block(layer).mlp = LensGated(config.mlp, config.d_model)
        native.unembed = nn.Linear(config.d_model, cfg.d_vocab_out)
    native.to(cfg.dtype).to_empty(device=cfg.device).requires_grad_(False).eval()
    for part in native.modules():
        if isinstance(part, Normalize) and part.weight is not None:  # stays so where the norm's were folded
            nn.init.ones_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        if isinstance(part, FeedForward):
            part.act = SUPPORTED_ACTIVATIONS[str(cfg.act_fn)]
    if cfg.positional_embedding_type == "rotary":
        parts = [block.attn for block in model.blocks]  # type: ignore[union-attr]
        first = {part.attn_type: part for part in reversed(parts) if isinstance(part, Attention)}
        native.tables = (first.get("global"), first.get("local", first.get("global")))
    return native


def native_config(cfg: HookedTransformerConfig) -> ModelConfig | None:
    """Our config for one of theirs; None for what only their modules compute."""
    values = dict(cfg.to_dict())
    if cfg.n_layers == 0 or ((cfg.normalization_type or "").startswith("LN") and cfg.final_rms):
        return None
    if not cfg.attn_only:
        if cfg.is_layer_norm_activation() or cfg.num_experts:
            return None
        if cfg.act_fn not in hooked_config.ACTIVATIONS:
            values["act_fn"] = "gelu_new"  # replaced in `native_of`
    try:
        return hooked_config.to_config({**values, "d_vocab_out": -1})
    except ValueError:
        return None


SAME = (
    "hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_q_input", "hook_k_input", "hook_v_input",
    "hook_attn_out", "hook_mlp_in", "hook_mlp_out", "attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_rot_q",
    "attn.hook_rot_k", "attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z", "attn.hook_result",
    "mlp.hook_pre", "mlp.hook_pre_linear", "mlp.hook_post",
)  # fmt: skip
"""Points of a block that are sites of the same name."""


def native_site(name: str, config: ModelConfig) -> str | None:
    """The site of a hook point in the native model; None for those that only the modules reach."""
    outside = {
        "hook_embed": "hook_embed_normed" if config.embed_norm else "hook_embed",
        "hook_pos_embed": "hook_pos_embed", "unembed.hook_in": "unembed.hook_in",
        "unembed.hook_out": "unembed.hook_out" if config.logit_softcap is None else "unembed.hook_uncapped",
        "embed.ln.hook_scale": "ln_embed.hook_scale", "embed.ln.hook_normalized": "ln_embed.hook_divided",
        "ln_final.hook_scale": "ln_final.hook_scale", "ln_final.hook_normalized": "ln_final.hook_divided",
    }  # fmt: skip
    if name in outside:
        return outside[name]
    found = re.fullmatch(r"(blocks\.\d+\.)(.+)", name)
    if found is None:
        return None
    block, inner = found.groups()
    if inner in SAME:
        return name
    norm = re.fullmatch(r"(ln[12](?:_post)?)\.hook_(scale|normalized)", inner)
    if norm is None:
        return None
    place = "_post" if config.norm_place == "output" else ""
    return f"{block}{norm[1]}{place}.hook_{'scale' if norm[2] == 'scale' else 'divided'}"


def outgrown(cfg: HookedTransformerConfig, blocks: Iterable[Any], total: int) -> None:
    """Lengthen the tables of rotations that end before `total` positions."""
    if cfg.positional_embedding_type != "rotary" or min(cfg.n_ctx, total) <= ROWS:
        return
    for block in blocks:
        block.attn.reach(total)
