"""The native model of a `HookedTransformer`: the one place where its numbers are computed.

TransformerLens differs from us in where some points stand (`hook_normalized` before gamma and beta, the bias of a gated
MLP after the gate, `unembed.hook_out` before the soft cap) and knows a few options that we do not. Parts of our own
have those. The modules that users see call these parts (`engine.Part`); they have no arithmetic beside them.
"""

import re
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.compat import hooked_config
from interp.compat.transformer_lens.activations import SUPPORTED_ACTIVATIONS
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.hook_tap import HookScope, HookTap
from interp.model.attention import SPLIT_INPUTS, Attention, Mask, Memory, PassState, View
from interp.model.block import Block, FeedForward
from interp.model.config import MLP, Alibi, LayerNorm, ModelConfig, NoNorm, Norm, RMSNorm
from interp.model.kv_cache import Past
from interp.model.layout import Layout
from interp.model.norm import HeadNorm, Normalize
from interp.model.position import Rotation
from interp.model.tap import Scope, Tap, at
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
        watched = stepwise or tap.wants(*self.sites)
        out = self._stepwise(x, tap) if watched else super().forward(x, tap)
        return out if self.after is None else at(tap, self.after, out)

    @property
    def sites(self) -> tuple[str, str]:
        """The sites of its two hook points."""
        return f"{self.name}.hook_scale", f"{self.name}.hook_divided"

    def _stepwise(self, x: Tensor, tap: Scope) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = at(tap, self.sites[0], self.scale(wide))
        divided = at(tap, self.sites[1], self.centred(wide) / scale).to(x.dtype)
        out = divided if self.gamma is None else divided * self.gamma
        out = out if self.bias is None else out + self.bias
        return at(tap, f"{self.name}.hook_normalized", out)


class LensMLP(FeedForward):
    """`act(x W_in + b_in) W_out + b_out`; gated: `(act(x W_gate) * (x W_in) + b_in) W_out + b_out`.

    With `eps` a LayerNorm follows the activation, and a gated MLP does not use its linear branch at all.
    """

    def __init__(self, mlp: MLP, d_model: int, eps: float | None) -> None:
        super().__init__(mlp, d_model)
        if mlp.gated:
            self.into.register_parameter("bias", None)
            self.inner_bias = nn.Parameter(torch.zeros(mlp.d_mlp))
        self.ln = None if eps is None else LensNorm(LayerNorm(eps), mlp.d_mlp, "mlp.ln")

    def forward(self, x: Float[Tensor, "b p d"], tap: Scope | None = None) -> Float[Tensor, "b p d"]:
        """The MLP's output."""
        pre, *linear = self.into(x).chunk(2, -1) if self.gated else (self.into(x),)
        post = self.act(at(tap, "mlp.hook_pre", pre))
        if self.ln is not None:
            post = self.ln(at(tap, "mlp.hook_mid", post), tap)
        elif linear:
            post = post * at(tap, "mlp.hook_pre_linear", linear[0]) + self.inner_bias
        return self.out(at(tap, "mlp.hook_post", post))


class Elsewhere(nn.Module):
    """Placeholder for a part that only a module of TransformerLens' form computes.

    Every pass puts a call of that module here.
    """


class LensBlock(Block):
    """A block with attention that norms its inputs itself under split inputs."""

    def __init__(self, config: ModelConfig, layer: int, cfg: HookedTransformerConfig) -> None:
        super().__init__(config, layer)
        self.cfg = cfg

    def _attention_input(self, resid: Float[Tensor, "b p d"], tap: Scope | None) -> Float[Tensor, "b p d"]:
        """The normed stream; under split inputs that are watched the stream itself (`LensAttention._split`)."""
        apart = tap is not None and split_inputs(self.cfg)
        return resid if apart else super()._attention_input(resid, tap)


Inputs = Tensor | tuple[Tensor, Tensor, Tensor]
"""The inputs of queries, keys and values: one normed stream, or three, each `[b p d]` or for every head `[b p h d]`.
"""
Source = tuple[Tensor | None, Normalize | None, Tensor | None]
"""Where they come from: the stream, its norm, and the position vectors that queries and keys get (shortformer)."""


class LensAttention(Attention):
    """Attention with TransformerLens' options.

    An input for each of q, k, v, positions added to those of q and k (shortformer), clipping, log-n scaling, and keys
    that are rotated only after the cache (dynamic NTK).

    `owner` has the config, the tables of rotations and the training mode: the module that users see.
    """

    owner: tuple[Any, ...] = ()

    def __init__(self, config: ModelConfig, layer: int, cfg: HookedTransformerConfig) -> None:
        super().__init__(config, layer)
        self.config, self.cfg = config, cfg
        wide = cfg.original_architecture in hooked_config.WIDE_QK_NORM
        if not (cfg.use_qk_norm or wide):
            self.q_norm = self.k_norm = None
            return
        for part, n_heads in zip("qk", self.heads, strict=False):
            norm = HeadNorm(
                RMSNorm(cfg.eps),
                n_heads,
                self.d_head,
                f"attn.{part}_norm",
                "head" if cfg.use_qk_norm else "width",
            )
            norm.norm = LensNorm(norm.norm.kind, len(norm.norm.weight), norm.name)  # type: ignore[arg-type]
            setattr(self, f"{part}_norm", norm)

    def forward(
        self,
        x: Inputs,
        source: tuple[Tensor | None, Normalize | None],
        shared: PassState,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """z W_O + b_O; see `Attention`. Without a stream in `source` there are no sites of split inputs."""
        heads = self.heads_of(x, tap, (*source, place_of(shared)))
        return self._output(*heads, x if isinstance(x, Tensor) else x[0], shared, tap, only)

    def _project(  # type: ignore[override]
        self, x: Inputs, source: Source, tap: Scope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = three = self.inputs(x, source, tap)
        if q is k is v and q.ndim == 3:
            fused = rearrange(self.qkv(q), "b p (n e) -> b p n e", e=self.d_head)
            heads = list(fused.split(self.heads, 2))
        else:
            heads = [projected(y, *self._for_heads(part, y)) for part, y in zip("qkv", three, strict=True)]
        if self._ungrouped:
            heads = [head.repeat_interleave(self.heads[0] // head.shape[2], 2) for head in heads]
        return tuple(at(tap, f"attn.hook_{part}", head) for part, head in zip("qkv", heads, strict=True))  # type: ignore[return-value]

    def inputs(self, x: Inputs, source: Source, tap: Scope | None) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of queries, keys and values, from the normed stream; `source`: stream, norm, position vectors."""
        resid, norm, place = source
        inputs = dict(zip("qkv", x if isinstance(x, tuple) else (x, x, x), strict=True))
        if tap is not None and resid is not None and norm is not None:
            inputs |= self._split(resid, norm, tap)
        if place is not None:
            for part in "qk":
                inputs[part] = inputs[part] + (place if inputs[part].ndim == 3 else place[:, :, None])
        return inputs["q"], inputs["k"], inputs["v"]

    def heads_of(
        self, inputs: Inputs, tap: Scope | None, source: Source = (None, None, None)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, normed where the config says so."""
        q, k, v = self._project(inputs, source, tap)
        if self.q_norm is None or self.k_norm is None:
            return q, k, v
        return self.q_norm(q, tap), self.k_norm(k, tap), v

    @property
    def _ungrouped(self) -> bool:
        return bool(self.cfg.ungroup_grouped_query_attention)

    def _for_heads(self, part: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weight `[h e d]` and bias of q, k or v, once for every head that `x` has an input for."""
        weight, bias = self.part(part)
        assert bias is not None
        times = x.shape[2] // len(weight) if x.ndim == 4 else 1
        return weight.repeat_interleave(times, 0), bias.repeat_interleave(times, 0)

    def _split(self, resid: Tensor, norm: Normalize, tap: Scope) -> dict[str, Tensor]:
        """Normed inputs of q, k and v that are a copy of the stream for each head.

        All three under split inputs, where each has a norm of its own; else those that a hook may change.
        """
        apart, h = split_inputs(self.cfg), self.heads[0]
        base = self._one_input(resid, tap) if self.cfg.use_attn_in or tap.wants("hook_attn_in") else resid
        values: dict[str, Tensor] = {}
        for part, site in SPLIT_INPUTS.items():
            stream = resid if self.cfg.use_split_qkv_input else base
            if apart or tap.wants(site):
                n = h if self._ungrouped else self.heads["qkv".index(part)]
                stream = at(tap, site, copies(stream, n) if stream.ndim == 3 else stream)
            if apart or tap.alters(site, "hook_attn_in"):
                values[part] = stream
        shown = apart or tap.alters(f"{norm.name}.hook_scale", f"{norm.name}.hook_divided")
        return {part: norm(value, tap if shown else None) for part, value in values.items()}

    def _one_input(self, resid: Tensor, tap: Scope) -> Tensor:
        """The stream as every head reads it, before queries, keys and values part."""
        if self.heads[1] != self.heads[0] and not self._ungrouped:
            raise ValueError(
                "hook_attn_in has one input per query head; for grouped keys use hook_k_input and others"
            )
        return at(tap, "hook_attn_in", copies(resid, self.heads[0]))

    def _placed(
        self, q: Tensor, k: Tensor, view: View, shared: PassState, tap: Scope | None
    ) -> tuple[Tensor, Tensor]:
        q, k = self._clipped(q), self._clipped(k)
        if self._rotates_late(shared) and view.rotation is not None:
            q = at(tap, "attn.hook_rot_q", view.rotation.apply(q))
        else:
            q, k = super()._placed(q, k, view, shared, tap)
        if self.cfg.use_logn_attn and not self.owner[0].training:
            q = self.owner[0]._apply_logn_scaling(q, 0 if shared.cache is None else shared.cache.length)
        return q, k

    def _mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        shared: PassState,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None,
    ) -> Tensor:
        v = self._clipped(v)
        if not self._rotates_late(shared):
            return super()._mix(q, k, v, mask, shared, tap, only)
        assert shared.cache is not None
        k, v = shared.cache.append(self.layer, k, v)
        places = shared.layout.positions(k.shape[1], 0, k.device)
        k = at(tap, "attn.hook_rot_k", self.owner[0].rotation_for(places, k.shape[1]).apply(k))
        return super()._mix(q, k, v, mask, replace(shared, cache=None), tap, only)

    def _rotates_late(self, shared: PassState) -> bool:
        """Whether the rotation of cached keys depends on the tokens after them."""
        return self.cfg.use_dynamic_ntk_rope and shared.cache is not None

    def _clipped(self, x: Tensor) -> Tensor:
        clip = self.cfg.clip_qkv
        return x if clip is None else x.clamp(-clip, clip)


def projected(x: Tensor, weight: Float[Tensor, "h e d"], bias: Float[Tensor, "h e"]) -> Tensor:
    """`[b p h e]` from one input for all heads, `[b p d]`, or one for each, `[b p h d]`."""
    if x.ndim == 4:
        return einsum(x, weight, "b p h d, h e d -> b p h e") + bias
    flat = F.linear(x, rearrange(weight, "h e d -> (h e) d"), bias.flatten())
    return rearrange(flat, "b p (h e) -> b p h e", h=len(weight))


def split_inputs(cfg: HookedTransformerConfig) -> bool:
    """Whether queries, keys and values have inputs, and norms of them, of their own for each head."""
    return cfg.use_split_qkv_input or cfg.use_attn_in


def copies(resid: Tensor, n_heads: int) -> Tensor:
    """`[b p h d]`, memory of its own for each head."""
    return torch.stack([resid] * n_heads, 2)


def place_of(shared: PassState) -> Tensor | None:
    """The position vectors that queries and keys read besides the stream: of a shortformer, else None."""
    return shared.made_once("place", lambda: None)


def alibi_multipliers(n_heads: int, device: torch.device | str | None = None) -> Tensor:
    """Each head's factor on distances: 2^(-8 i / h) for i = 1 ... h."""
    return 2.0 ** (-8 / n_heads * torch.arange(1, n_heads + 1, device=device))


class LensBias(nn.Module):
    """The bias of ALiBi as in TransformerLens: its slopes for any number of heads, nothing for keys ahead."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads

    def forward(
        self, query: Int[Tensor, "b q"], key: Int[Tensor, "b k"], dtype: torch.dtype
    ) -> Float[Tensor, "b h q k"]:
        """The bias between queries and keys at these positions."""
        distance = (query[:, :, None] - key[:, None, :]).clamp_min(0)
        slopes = alibi_multipliers(self.n_heads, key.device)
        return (-distance[:, None] * slopes[:, None, None]).to(dtype)


class LensTransformer(Transformer):
    """The native model with these parts, and rotations from TransformerLens' tables."""

    tables: tuple[Any, Any] = (None, None)
    """A layer without the window and one with it, which keep the tables."""
    shortformer = False

    like: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.register_buffer("like", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the model is, whatever stands in the place of its embedding."""
        return self.like.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its parameters."""
        return self.like.dtype

    def read_out(
        self,
        resid: Float[Tensor, "*b d"],
        tap: Scope | None = None,
        *,
        columns: Int[Tensor, "*b k"] | None = None,
    ) -> Tensor:
        """Logits of a residual stream; the normed stream where no logits are wanted."""
        if isinstance(tap, HookScope) and not tap.logits:
            return self.ln_final(resid, tap)
        return super().read_out(resid, tap, columns=columns)

    def _embedded(self, tokens: Tensor, positions: Tensor, types: Tensor | None, tap: Scope | None) -> Tensor:
        if isinstance(tap, HookScope) and tap.stream is not None:
            return tap.stream
        if self.shortformer:
            return at(tap, "hook_embed", self.embed(tokens))
        return super()._embedded(tokens, positions, types, tap)

    def _through(
        self, resid: Tensor, layers: range, shared: PassState, tap: Tap | None, only: Tensor | None
    ) -> tuple[Tensor, bool]:
        if self.shortformer:
            place, first = (tap.place, tap.stream is None) if isinstance(tap, HookTap) else (None, True)
            if first and layers.start == 0:
                assert shared.positions is not None
                vectors = self._position_vectors(shared.positions)
                assert vectors is not None
                outside = None if tap is None else tap.scope()
                place = at(outside, "hook_pos_embed", vectors.expand_as(resid))
            shared.made_once("place", lambda: place)
        return super()._through(resid, layers[: len(self.blocks)], shared, tap, only)

    def _shared(
        self, positions: Int[Tensor, "#b p"], layout: Layout, cache: Past | None, memory: Memory | None
    ) -> PassState:
        shared = super()._shared(positions, layout, cache, memory)
        total = positions.shape[1] + (0 if cache is None else cache.length)
        everywhere, local = (
            View(view.mask, self._rotation(view, source, positions, total))
            for view, source in zip((shared.everywhere, shared.local), self.tables, strict=True)
        )
        return replace(shared, everywhere=everywhere, local=local)

    def _rotation(self, view: View, source: Any, places: Tensor, total: int) -> Rotation | None:
        if source is None or view.rotation is None:
            return view.rotation
        rotation = source.rotation_for(places, total)
        assert isinstance(rotation, Rotation)
        return rotation


# from a config


@dataclass(frozen=True)
class Blueprint:
    """The `ModelConfig` for a config of TransformerLens, and the deviations of the native model from it."""

    config: ModelConfig
    usual: bool
    """Whether every pass is as the native planner and cache expect it of this config."""
    embeds: bool
    """Whether the embedding is native; else the module's, with a norm before positions or of another kind."""
    mlp: bool
    """Whether the MLP is native; else the module's, a mixture of experts."""


FIELDS = frozenset(field.name for field in fields(HookedTransformerConfig))


def blueprint(cfg: HookedTransformerConfig) -> Blueprint:
    """The `ModelConfig` for a config of TransformerLens.

    Raises:
        ValueError: fields that contradict each other.
    """
    given = {name: value for name, value in cfg.to_dict().items() if name in FIELDS}
    normed_embedding = _has_odd_embedding_norm(cfg)
    stray = _odd_layers(cfg) | _odd_positions(cfg) | _odd_attention(cfg) | _odd_mlp(cfg)
    if normed_embedding:
        stray["post_embedding_ln"] = False
    values = given | {"d_vocab_out": -1, "d_vocab": max(cfg.d_vocab, 1)} | stray
    if not (cfg.attn_only or cfg.is_layer_norm_activation() or cfg.act_fn in hooked_config.ACTIVATIONS):
        values["act_fn"] = "gelu_new"  # replaced in `filled`
    config = hooked_config.to_config(values)
    if _has_odd_alibi(cfg):
        config = replace(config, position=Alibi())
    if cfg.normalization_type and cfg.original_architecture in hooked_config.OUTPUT_NORMED:
        config = replace(config, norm_place="output")
    return Blueprint(config, not stray, not normed_embedding, not cfg.num_experts)


# Fields that our config has not, each with the nearest that it has; the module's own code then does what is asked.


def _odd_layers(cfg: HookedTransformerConfig) -> dict[str, object]:
    found: dict[str, object] = {"n_layers": 1} if cfg.n_layers == 0 else {}
    layer_norms = (cfg.normalization_type or "").startswith("LN")
    return found | ({"final_rms": False} if layer_norms and cfg.final_rms else {})


def _odd_positions(cfg: HookedTransformerConfig) -> dict[str, object]:
    if cfg.positional_embedding_type == "shortformer" or _has_odd_alibi(cfg):
        return {"positional_embedding_type": "standard"}
    return {}


def _odd_attention(cfg: HookedTransformerConfig) -> dict[str, object]:
    plain = {"clip_qkv": None, "use_logn_attn": False, "use_dynamic_ntk_rope": False}
    found: dict[str, object] = {name: value for name, value in plain.items() if getattr(cfg, name) != value}
    if cfg.use_local_attn and cfg.attention_dir != "causal":
        found["use_local_attn"] = False
    wide = cfg.original_architecture in hooked_config.WIDE_QK_NORM
    if (cfg.use_qk_norm or wide) and not (cfg.normalization_type or "").startswith("RMS"):
        found |= {"use_qk_norm": False, "original_architecture": None}
    return found


def _odd_mlp(cfg: HookedTransformerConfig) -> dict[str, object]:
    if cfg.attn_only:
        return {}
    experts = {"num_experts": None, "experts_per_token": None, "gated_mlp": False}
    return (experts if cfg.num_experts else {}) | (
        {"act_fn": "gelu_new"} if cfg.is_layer_norm_activation() else {}
    )


def _has_odd_alibi(cfg: HookedTransformerConfig) -> bool:
    """Whether distances are penalised otherwise than ours: both ways, or by heads that are no power of two."""
    odd = cfg.n_heads & (cfg.n_heads - 1) > 0 or cfg.attention_dir != "causal"
    return cfg.positional_embedding_type == "alibi" and odd


def _has_odd_embedding_norm(cfg: HookedTransformerConfig) -> bool:
    """Whether the embedding's norm is of another kind than ours, or comes before the positions."""
    before = cfg.positional_embedding_type in ("standard", "shortformer") or _has_odd_alibi(cfg)
    return cfg.post_embedding_ln and (not (cfg.normalization_type or "").startswith("LN") or before)


def native_of(cfg: HookedTransformerConfig, plan: Blueprint, device: Any) -> LensTransformer:
    """The native model of a config on a device, its weights not yet filled."""
    config = plan.config
    with torch.device("meta"):
        native = LensTransformer(config)
        native.shortformer = cfg.positional_embedding_type == "shortformer"
        native.blocks = nn.ModuleList(native_block(cfg, plan, layer) for layer in range(cfg.n_layers))
        if native.ln_embed is not None:
            native.ln_embed = LensNorm(config.norm, config.d_model, "ln_embed")
        final = RMSNorm(cfg.eps) if cfg.final_rms and cfg.normalization_type is not None else config.norm
        native.ln_final = LensNorm(final, config.d_model, "ln_final")
        if native.score_bias is not None:
            native.score_bias = LensBias(config.n_heads)  # type: ignore[assignment]
        native.unembed = nn.Linear(config.d_model, cfg.d_vocab_out)
        if not plan.embeds:
            native.embed = Elsewhere()  # type: ignore[assignment]
    return filled(native, cfg, device, cfg.dtype)


def native_block(cfg: HookedTransformerConfig, plan: Blueprint, layer: int) -> Block:
    """One block of it, on the device that is set."""
    config = plan.config
    block = LensBlock(config, layer, cfg)
    for name, part in list(block.named_children()):
        if isinstance(part, Normalize) and not name.startswith("_"):
            block.set_submodule(name, LensNorm(part.kind, config.d_model, part.name))
    block.attn = LensAttention(config, layer, cfg)
    if config.mlp is not None:
        block.mlp = native_mlp(cfg, gated=cfg.gated_mlp) if plan.mlp else Elsewhere()
    return block


def native_mlp(cfg: HookedTransformerConfig, *, gated: bool) -> LensMLP:
    """The MLP of every block, on the device that is set."""
    assert cfg.d_mlp is not None
    return LensMLP(
        MLP(cfg.d_mlp, gated=gated), cfg.d_model, cfg.eps if cfg.is_layer_norm_activation() else None
    )


def filled(native: Any, cfg: HookedTransformerConfig, device: Any, dtype: torch.dtype) -> Any:
    """A module made on "meta" on a device; its norms' weights are 1 and 0 for good where they were folded."""
    native.to(dtype).to_empty(device=device).requires_grad_(False).eval()
    for part in native.modules():
        if isinstance(part, Normalize) and part.weight is not None:
            nn.init.ones_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        if isinstance(part, FeedForward):
            part.act = SUPPORTED_ACTIVATIONS[str(cfg.act_fn)]
    return native


# names

SAME = (
    "hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_in", "hook_q_input", "hook_k_input",
    "hook_v_input", "hook_attn_out", "hook_mlp_in", "hook_mlp_out", "attn.hook_q", "attn.hook_k", "attn.hook_v",
    "attn.hook_rot_q", "attn.hook_rot_k", "attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z",
    "attn.hook_result", "mlp.hook_pre", "mlp.hook_pre_linear", "mlp.hook_mid", "mlp.hook_post",
)  # fmt: skip
"""Points of a block that are sites of the same name."""


def native_site(name: str, config: ModelConfig) -> str | None:
    """The site of a hook point in the native model; None for those that only their module calls."""
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
    norm = re.fullmatch(r"(ln[12](?:_post)?|mlp\.ln)\.hook_(scale|normalized)", inner)
    if norm is None:
        return None
    slot = native_path(f"{block}{norm[1]}", config)
    return f"{slot}.hook_{'scale' if norm[2] == 'scale' else 'divided'}"


def native_path(path: str, config: ModelConfig) -> str:
    """Where the native model keeps the part that a `HookedTransformer` keeps here."""
    if path == "embed.ln":
        return "ln_embed"
    if config.norm_place == "output" and re.fullmatch(r"blocks\.\d+\.ln[12]", path):
        return f"{path}_post"
    return path
