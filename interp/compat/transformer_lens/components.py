"""The parts of a `HookedTransformer`: modules with TransformerLens' parameters and hook points, under its names.

In the order a tensor meets them: embeddings and norms, MLPs, tables of rotations, attention, the block. Only embeddings
and experts have arithmetic of their own; of the others the native part in their place computes (`engine.Part`).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from interp.compat.hooked_config import WIDE_QK_NORM
from interp.compat.transformer_lens.activations import SUPPORTED_ACTIVATIONS
from interp.compat.transformer_lens.cache import CachedPast, Device, TransformerLensKeyValueCacheEntry
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.engine import Part, Setting
from interp.compat.transformer_lens.factored_matrix import FactoredMatrix
from interp.compat.transformer_lens.hook_points import HookPoint
from interp.compat.transformer_lens.native import (
    LensAttention,
    LensBias,
    LensNorm,
    alibi_multipliers,
    blueprint,
    filled,
    native_block,
    native_mlp,
    projected,
)
from interp.model import config as ours
from interp.model.attention import Mask, PassState, View, attention_mask, hidden_scores
from interp.model.config import Llama3Scaling, ModelConfig, Rotary, RotaryScaling, YarnScaling
from interp.model.layout import Layout
from interp.model.position import Rotation, inverse_frequencies
from interp.model.tap import Scope

__path__: list[str] = []
"""To the import system a package: `components.mlps.mlp` is this module too (`install.ALIASES`)."""

# embeddings and norms

Config = HookedTransformerConfig | dict[str, Any]


class Embed(Part):
    """Token embeddings `W_E [v d]`, normed where the config says so."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = HookedTransformerConfig.unwrap(cfg)
        self.W_E = nn.Parameter(torch.empty(self.cfg.d_vocab, self.cfg.d_model, dtype=self.cfg.dtype))
        if self.cfg.post_embedding_ln:
            self.ln = LayerNorm(self.cfg)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[b p d]` of tokens `[b p]`."""
        vectors = self.W_E[tokens, :]
        return self.ln(vectors) if self.cfg.post_embedding_ln else vectors


class PosEmbed(Part):
    """Position embeddings `W_pos [n_ctx d]`; 0 at padding."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = HookedTransformerConfig.unwrap(cfg)
        self.W_pos = nn.Parameter(torch.empty(self.cfg.n_ctx, self.cfg.d_model, dtype=self.cfg.dtype))

    def forward(
        self, tokens: Tensor, past_kv_pos_offset: int = 0, attention_mask: Tensor | None = None
    ) -> Tensor:
        """`[b p d]` for the tokens after `past_kv_pos_offset`; attention_mask: of all, those before included."""
        rows, n = tokens.shape[0], tokens.shape[-1]
        if attention_mask is None:
            return self.W_pos[past_kv_pos_offset : past_kv_pos_offset + n].expand(rows, -1, -1).clone()
        places = Layout(attention_mask.bool()).positions(n, past_kv_pos_offset, tokens.device)
        padding = ~attention_mask.bool()[:, past_kv_pos_offset : past_kv_pos_offset + n, None]
        return self.W_pos[places].masked_fill(padding, 0)


class Unembed(Part):
    """Logits before their soft cap: `x W_U + b_U`, with `W_U [d v]`."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = HookedTransformerConfig.unwrap(cfg)
        width, dtype = self.cfg.d_vocab_out, self.cfg.dtype
        self.W_U = nn.Parameter(torch.empty(self.cfg.d_model, width, dtype=dtype))
        self.b_U = nn.Parameter(torch.zeros(width, dtype=dtype))
        self.hook_in = HookPoint()
        self.hook_out = HookPoint()

    def forward(self, residual: Tensor) -> Tensor:
        """`[b p v]` of a normed stream `[b p d]`."""
        return self.hook_out(F.linear(self.hook_in(residual), self.W_U.T, self.b_U))


def real_number(name: str, value: object) -> None:
    """ValueError for a value that is no number, such as a tensor, whose gradient would be lost."""
    if not isinstance(value, Real):
        raise ValueError(f"{name} of a module is a number, got {type(value).__name__}")


def function_of_tensors(name: str, value: object) -> None:
    """ValueError for what cannot be called."""
    if not callable(value):
        raise ValueError(f"{name} of a module is a function of a tensor, got {value!r}")


class LayerNormPre(Part):
    """The mean removed, divided by the standard deviation: LayerNorm whose weights were folded away."""

    kind: type[ours.LayerNorm | ours.RMSNorm] = ours.LayerNorm
    settable: ClassVar = {"eps": real_number}

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = HookedTransformerConfig.unwrap(cfg)
        self.eps = self.cfg.eps
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        """The normed input, times w and plus b where there are any; half precision is normed in float32."""
        return self.computed(lambda native, scope: native(x, scope), x).to(self.cfg.dtype)

    def attributes(self, native: nn.Module) -> Mapping[str, object]:
        """The norm with this `eps`."""
        return {"kind": self.kind(float(self.eps))}

    def _own_path(self) -> str:
        return "blocks.0.ln1"

    def _native(self, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, ours.ModelConfig]:
        with torch.device("meta"):
            width = next((len(weight) for weight in self.parameters()), self.cfg.d_model)
            native = LensNorm(self.kind(self.eps), width, "ln1")
        return filled(native, self.cfg, device, dtype), blueprint(self.cfg).config


class RMSNormPre(LayerNormPre):
    """Divided by the root mean square: RMSNorm whose weights were folded away."""

    kind = ours.RMSNorm


class LayerNorm(LayerNormPre):
    """LayerNorm with `w` and `b`; `hook_normalized` stands before them."""

    def __init__(self, cfg: Config, length: int | None = None) -> None:
        super().__init__(cfg)
        self.length = self.cfg.d_model if length is None else length
        self.w = nn.Parameter(torch.ones(self.length, dtype=self.cfg.dtype))
        self.b = nn.Parameter(torch.zeros(self.length, dtype=self.cfg.dtype))


class RMSNorm(RMSNormPre):
    """RMSNorm with `w`; `hook_normalized` stands before it."""

    def __init__(self, cfg: Config, length: int | None = None) -> None:
        super().__init__(cfg)
        self.length = self.cfg.d_model if length is None else length
        self.w = nn.Parameter(torch.ones(self.length, dtype=self.cfg.dtype))


NORMS: dict[str, type[LayerNormPre]] = {
    "LN": LayerNorm, "LNPre": LayerNormPre, "RMS": RMSNorm, "RMSPre": RMSNormPre,
}  # fmt: skip


def norm_of(cfg: HookedTransformerConfig) -> nn.Module:
    """The norm that a block reads the stream through; the identity without one. ValueError for an unknown type."""
    kind = cfg.normalization_type
    if kind is None:
        return nn.Identity()
    if kind not in NORMS:
        raise ValueError(f"Invalid normalization_type passed in: {kind}; known: {', '.join(NORMS)} and None")
    return NORMS[kind](cfg)


# MLPs


class CanBeUsedAsMLP(Part):
    """Base class of a block's `mlp`: reads the normed stream `[b p d]`, returns what is added to it."""

    def __init__(self, cfg: Config) -> None:
        """An MLP of the config's `d_mlp`; ValueError where it has none."""
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

    settable: ClassVar = {"act_fn": function_of_tensors}

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

    def attributes(self, native: nn.Module) -> Mapping[str, object]:
        """The activation."""
        return {"act": self.act_fn}

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
    """The MLP of a config."""
    if cfg.num_experts:
        return MoE(cfg)
    return GatedMLP(cfg) if cfg.gated_mlp else MLP(cfg)


# rotary positions

ROWS = 2048
"""Positions that a table begins with, if the context is longer."""


def rotary_table(
    cfg: HookedTransformerConfig, attn_type: str, rows: int | None = None, base: float | None = None
) -> tuple[Float[Tensor, "n rotated"], Float[Tensor, "n rotated"]]:
    """Sine and cosine of every position and rotated dimension; angles are float64 for a float64 model, else float32.

    base: instead of the config's. ValueError without a `rotary_dim`.
    """
    if cfg.rotary_dim is None:
        raise ValueError("Rotary dim must be provided for rotary positional embeddings")
    wide = torch.float64 if cfg.dtype == torch.float64 else torch.float32
    place = torch.arange(min(cfg.n_ctx, ROWS) if rows is None else rows, dtype=wide)
    local = attn_type == "local"
    base = _base(cfg, local) if base is None else base
    rule = _scaling(cfg, local)
    if rule is None:
        pair = torch.arange(cfg.rotary_dim // 2, dtype=wide)
        divisor = cfg.rotary_scaling_factor if not local else 1.0
        period = base ** (pair / (cfg.rotary_dim / 2)) * divisor
    else:
        rotary = Rotary(base, scaling=rule)
        precise = wide if isinstance(rule, YarnScaling) else torch.float32
        frequency = inverse_frequencies(rotary, cfg.rotary_dim, place.device, dtype=precise)[0]
        period = 1 / frequency.to(wide)
    period = period.repeat_interleave(2) if cfg.rotary_adjacent_pairs else period.repeat(2)
    angle = place[:, None] / period
    factor = rule.attention_factor if isinstance(rule, YarnScaling) else 1.0
    return angle.sin().to(cfg.dtype) * factor, angle.cos().to(cfg.dtype) * factor


def _base(cfg: HookedTransformerConfig, local: bool) -> float:
    return float(cfg.rotary_base_local if local and cfg.rotary_base_local is not None else cfg.rotary_base)


def _scaling(cfg: HookedTransformerConfig, local: bool) -> RotaryScaling | None:
    """The rule that bends the frequencies; None for those that a factor divides."""
    if cfg.use_NTK_by_parts_rope:
        return Llama3Scaling(
            cfg.NTK_by_parts_factor, cfg.NTK_by_parts_low_freq_factor, cfg.NTK_by_parts_high_freq_factor,
            cfg.NTK_original_ctx_len,
        )  # fmt: skip
    if cfg.use_yarn_rope and not (local and cfg.yarn_global_attn_only):
        return YarnScaling(
            cfg.yarn_factor, cfg.yarn_original_max_position_embeddings, cfg.yarn_attention_factor,
            cfg.yarn_beta_fast, cfg.yarn_beta_slow, cfg.yarn_truncate,
        )  # fmt: skip
    return None


class RotaryTables(Part):
    """The tables of one attention layer, which begin with `ROWS` positions at most and grow as they are needed."""

    cfg: HookedTransformerConfig
    attn_type: str
    rotary_sin: Tensor
    rotary_cos: Tensor
    _widening = 1.0

    def _build_tables(self) -> None:
        sin, cos = rotary_table(self.cfg, self.attn_type)
        self.register_buffer("rotary_sin", sin)
        self.register_buffer("rotary_cos", cos)

    def calculate_sin_cos_rotary(
        self, rotary_dim: int, n_ctx: int, base: float | int = 10000, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "n rotated"], Float[Tensor, "n rotated"]]:
        """Sine and cosine of `n_ctx` positions, by the config's rule for long contexts; nothing is stored."""
        cfg = HookedTransformerConfig.from_dict(
            self.cfg.to_dict() | {"rotary_dim": rotary_dim, "dtype": dtype, "device": "cpu"}
        )
        return rotary_table(cfg, self.attn_type, n_ctx, float(base))

    def apply_rotary(
        self, x: Tensor, past_kv_pos_offset: int = 0, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Queries or keys after `past_kv_pos_offset` rotated to their positions, which count real tokens."""
        n = x.shape[1]
        layout = Layout(None if attention_mask is None else attention_mask.bool())
        places = layout.positions(n, past_kv_pos_offset, x.device)
        return self.rotation_for(places, past_kv_pos_offset + n).apply(x)

    def rotation_for(self, places: Tensor, total: int) -> Rotation:
        """The rotation of these positions in a text of `total` tokens, from tables that suit it."""
        if self.cfg.use_dynamic_ntk_rope and not self.training:
            self._rescale_rotary_for_ntk(total)
        self.reach(total)
        return self.rotation(places)

    def rotation(self, places: Tensor) -> Rotation:
        """The rotation of these positions `[b p]`, from the layer's table."""
        pairs, half = self.cfg.rotary_adjacent_pairs, self.rotary_cos.shape[1] // 2
        keep = slice(None, None, 2) if pairs else slice(half)
        cos, sin = (table[:, keep][places][:, :, None] for table in (self.rotary_cos, self.rotary_sin))
        return Rotation(cos, sin, pairs)

    def reach(self, total: int) -> None:
        """Have at least `total` positions in the tables, and room for more; not beyond the context."""
        rows = self.rotary_cos.shape[0]
        if rows < min(self.cfg.n_ctx, total):
            self._extend_rotary_embeddings(min(self.cfg.n_ctx, max(total, 2 * rows)))

    def _extend_rotary_embeddings(self, new_size: int) -> None:
        base = _base(self.cfg, self.attn_type == "local")
        if self._widening > 1:
            base = self._widened(base)
        self._store(*rotary_table(self.cfg, self.attn_type, new_size, base))

    def _store(self, sin: Tensor, cos: Tensor) -> None:
        self.rotary_sin, self.rotary_cos = sin.to(self.rotary_sin.device), cos.to(self.rotary_cos.device)

    def _ntk_alpha(self, key_length: int, train_length: int) -> float:
        """Factor of dynamic NTK on the base: 1 up to the training length, then 3, 7, 15, ... at each doubling."""
        if key_length <= train_length:
            return 1.0
        return 2.0 ** math.ceil(math.log2(key_length / train_length) + 1) - 1

    def _rescale_rotary_for_ntk(self, key_length: int) -> None:
        """Have the tables of a context of this length."""
        alpha = self._ntk_alpha(key_length, self.cfg.train_seq_length or self.cfg.n_ctx)
        if alpha != self._widening:
            self._widening = alpha
            self._extend_rotary_embeddings(max(key_length, self.rotary_cos.shape[0]))

    def _widened(self, base: float) -> float:
        """base * alpha^(d / (d - 2)) for d rotated dimensions."""
        assert self.cfg.rotary_dim is not None
        return base * self._widening ** (self.cfg.rotary_dim / (self.cfg.rotary_dim - 2))


# attention

NO_STREAM = (None, None)
"""The stream of split inputs for a part that runs by itself."""


class Attention(RotaryTables):
    """One attention layer: `W_Q`, `W_K`, `W_V` `[h d e]`, `W_O` `[h e d]` and their biases."""

    settable: ClassVar = {"attn_scale": real_number}
    uncalled = frozenset(
        {
            "apply_causal_mask", "calculate_qkv_matrices", "calculate_attention_scores", "calculate_z_scores",
            "apply_rotary", "calculate_sin_cos_rotary", "rotate_every_two", "create_alibi_bias",
        }
    )  # fmt: skip

    W_K: Tensor
    W_V: Tensor
    b_K: Tensor
    b_V: Tensor
    hook_q: HookPoint
    hook_k: HookPoint
    hook_v: HookPoint
    hook_z: HookPoint
    hook_attn_scores: HookPoint
    hook_pattern: HookPoint
    hook_result: HookPoint
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    mask: Tensor

    def __init__(self, cfg: Config, attn_type: str = "global", layer_id: int | None = None) -> None:
        super().__init__()
        self.cfg = cfg = HookedTransformerConfig.unwrap(cfg)
        if attn_type not in ("global", "local"):
            raise ValueError(f"Invalid attention type: {attn_type}")
        if attn_type == "local" and not isinstance(cfg.window_size, int):
            raise ValueError("Window size must be an integer for local attention")
        if cfg.scale_attn_by_inverse_layer_idx and layer_id is None:
            raise ValueError("Layer ID must be provided to scale attention scores")
        self.attn_type, self.layer_id = attn_type, layer_id
        self.attn_scale = float(cfg.attn_scale) if cfg.use_attn_scale else 1.0
        if cfg.scale_attn_by_inverse_layer_idx:
            self.attn_scale *= cast(int, layer_id) + 1
        self._build_queries()
        self._build_norms()
        self.register_buffer("mask", torch.empty((0, 0), dtype=torch.bool))
        self.register_buffer("IGNORE", torch.tensor(-torch.inf))
        if cfg.use_attention_sinks:
            self.sinks = nn.Parameter(torch.zeros(cfg.n_heads, dtype=cfg.dtype))
        for name in ("k", "q", "v", "z", "attn_scores", "pattern", "result"):
            setattr(self, f"hook_{name}", HookPoint())
        if cfg.positional_embedding_type == "shortformer":
            self.hook_attn_input = HookPoint()
        elif cfg.positional_embedding_type == "rotary":
            self.hook_rot_k, self.hook_rot_q = HookPoint(), HookPoint()
            self._build_tables()
        self._build_keys()

    def _build_queries(self) -> None:
        c = self.cfg
        self.W_Q = nn.Parameter(torch.empty(c.n_heads, c.d_model, c.d_head, dtype=c.dtype))
        self.W_O = nn.Parameter(torch.empty(c.n_heads, c.d_head, c.d_model, dtype=c.dtype))
        self.b_Q = nn.Parameter(torch.zeros(c.n_heads, c.d_head, dtype=c.dtype))
        self.b_O = nn.Parameter(torch.zeros(c.d_model, dtype=c.dtype))

    def _build_keys(self, n_heads: int | None = None, prefix: str = "") -> None:
        c = self.cfg
        n_heads = c.n_heads if n_heads is None else n_heads
        for name in ("W_K", "W_V"):
            weight = torch.empty(n_heads, c.d_model, c.d_head, dtype=c.dtype)
            self.register_parameter(prefix + name, nn.Parameter(weight))
        for name in ("b_K", "b_V"):
            self.register_parameter(
                prefix + name, nn.Parameter(torch.zeros(n_heads, c.d_head, dtype=c.dtype))
            )

    def _build_norms(self) -> None:
        c, widths = self.cfg, None
        if c.use_qk_norm:
            widths = (c.d_head, c.d_head)
        elif c.original_architecture in WIDE_QK_NORM:
            widths = (c.d_model, c.d_model if c.n_key_value_heads is None else c.d_head * c.n_key_value_heads)
        norms = [None if widths is None else RMSNorm(c, widths[i]) for i in range(2)]
        self.q_norm, self.k_norm = norms

    @staticmethod
    def create_alibi_slope(n_ctx: int, device: Device = None) -> Tensor:
        """ALiBi's distances min(k - q, 0), `[q k]` (Press et al. 2022)."""
        place = torch.arange(n_ctx, device=device, dtype=torch.get_default_dtype())
        return (place - place[:, None]).clamp_max(0)

    @staticmethod
    def create_alibi_multipliers(n_heads: int, device: Device = None) -> Tensor:
        """Each head's factor on distances: 2^(-8 i / h) for i = 1 ... h."""
        return alibi_multipliers(n_heads, device)

    @staticmethod
    def create_alibi_bias(n_heads: int, n_ctx: int, device: Device = None) -> Tensor:
        """The bias of ALiBi on the scores, `[h q k]`."""
        slope, multipliers = Attention.create_alibi_slope, Attention.create_alibi_multipliers
        return slope(n_ctx, device) * multipliers(n_heads, device)[:, None, None]

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O of every head, factored."""
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T of every head, factored."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    def forward(
        self,
        query_input: Tensor,
        key_input: Tensor,
        value_input: Tensor,
        past_kv_cache_entry: TransformerLensKeyValueCacheEntry | None = None,
        additive_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        """The layer's output `[b p d]` from normed inputs `[b p d]`, or `[b p h d]` with one for each head.

        attention_mask: 1 at real tokens, those of the cache included. The other masks are added to the scores.
        """
        entry = past_kv_cache_entry
        shared = self.shared_pass(
            query_input, entry, attention_mask, (additive_attention_mask, position_bias)
        )
        inputs = (query_input, key_input, value_input)
        return self.computed(
            lambda native, scope: native(inputs, NO_STREAM, shared, scope), query_input, Setting(entry)
        )

    def calculate_qkv_matrices(
        self, query_input: Tensor, key_input: Tensor, value_input: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[b p h e]`, normed where the config says so."""
        inputs = (query_input, key_input, value_input)
        found: list[Tensor] = []

        def project(native: LensAttention, scope: Scope) -> Tensor:
            found.extend(native.heads_of(inputs, scope))
            return found[0]

        self.computed(project, query_input)
        q, k, v = found
        return q, k, v

    def shared_pass(
        self,
        x: Tensor,
        entry: TransformerLensKeyValueCacheEntry | None,
        real: Tensor | None,
        added: tuple[Tensor | None, ...] = (),
    ) -> PassState:
        """The values that blocks share in a pass of `x` by itself, after the contents of a cache entry."""
        n, past = x.shape[1], 0 if entry is None else entry.past_keys.shape[1]
        layout = Layout(None if real is None else real.to(x.device).bool())
        places = layout.positions(n, past, x.device)
        mask, bias = self._mask(n, past, layout, x.device), [part for part in added if part is not None]
        if self.cfg.positional_embedding_type == "alibi":
            every = layout.positions(past + n, 0, x.device)
            bias.append(LensBias(self.cfg.n_heads)(places, every, x.dtype))
        if bias:
            rows = 1 if mask.allowed is None else len(mask.allowed)
            summed = torch.stack(torch.broadcast_tensors(*(part.to(x) for part in bias))).sum(0)
            mask = mask.with_bias(summed.expand(max(rows, len(summed)), -1, n, past + n))
        rotary = self.cfg.positional_embedding_type == "rotary"
        view = View(mask, self.rotation_for(places, past + n) if rotary else None)
        cache = None if entry is None else CachedPast(lambda layer: entry)
        return PassState(view, view, cache, layout=layout, positions=places)

    def _mask(self, n: int, past: int, layout: Layout, device: torch.device) -> Mask:
        """The mask: which query sees which key."""
        local = self.attn_type == "local" and self.cfg.attention_dir == "causal"
        window = self.cfg.window_size if local else None
        config = replace(blueprint(self.cfg).config, window=window, local_layers=None, local_position=None)
        return attention_mask(config, n, past, layout, device, local=local)

    def attributes(self, native: nn.Module) -> Mapping[str, object]:
        """What scores are multiplied with."""
        return {"scale": 1 / float(self.attn_scale)}

    def _own_path(self) -> str:
        return "blocks.0.attn"

    def _native(self, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, ModelConfig]:
        grouped = self._parameters.get("_W_K")  # by the class; the config may say otherwise
        n_kv_heads = len(self.W_Q if grouped is None else grouped)
        config = replace(blueprint(self.cfg).config, n_kv_heads=n_kv_heads)
        with torch.device("meta"):
            native = LensAttention(config, self.layer_id or 0, self.cfg)
        return filled(native, self.cfg, device, dtype), config

    def _apply_logn_scaling(self, q: Tensor, kv_cache_pos_offset: int) -> Tensor:
        """Queries at position i (from 1) beyond the training length T times log_T(i), so that attention stays sharp."""
        length = self.cfg.train_seq_length or self.cfg.n_ctx
        place = torch.arange(1, q.shape[1] + 1, device=q.device, dtype=torch.float32) + kv_cache_pos_offset
        scale = (place.log() / math.log(length)).clamp_min(1).to(q.dtype)
        return q * scale[:, None, None]

    def apply_causal_mask(
        self, attn_scores: Tensor, past_kv_pos_offset: int = 0, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Scores `[b h q k]`, -inf where a query may not look: ahead, past the layer's window, at padding."""
        n, total = attn_scores.shape[-2:]
        if n + past_kv_pos_offset != total:
            raise ValueError(
                f"{n} queries after {past_kv_pos_offset} positions require as many keys, got {total}"
            )
        layout = Layout(None if attention_mask is None else attention_mask.to(attn_scores.device).bool())
        return hidden_scores(attn_scores.clone(), self._mask(n, total - n, layout, attn_scores.device))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **options: Any) -> None:
        """Tables of another length in a state dict are left aside: they follow from the config."""
        own = {f"{prefix}{name}": buffer for name, buffer in self.named_buffers(recurse=False)}
        for name, buffer in own.items():
            if name in state_dict and state_dict[name].shape != buffer.shape:
                state_dict[name] = buffer
        super()._load_from_state_dict(state_dict, prefix, *args, **options)


class GroupedQueryAttention(Attention):
    """Attention with fewer heads of keys and values, stored as `_W_K [g d e]`, ...; `W_K` repeats them `[h d e]`."""

    def _build_keys(self, n_heads: int | None = None, prefix: str = "") -> None:
        assert self.cfg.n_key_value_heads is not None, "n_key_value_heads required for grouped attention"
        self.repeat_kv_heads = self.cfg.n_heads // self.cfg.n_key_value_heads
        super()._build_keys(self.cfg.n_key_value_heads, "_")


def _repeated(name: str) -> property:
    """The grouped parameter `_name` once per query head; assigning sets the grouped one."""

    def get(self: GroupedQueryAttention) -> Tensor:
        return getattr(self, f"_{name}").repeat_interleave(self.repeat_kv_heads, 0)

    def put(self: GroupedQueryAttention, value: Any) -> None:
        setattr(self, f"_{name}", value)

    return property(get, put, doc=f"`_{name}`, once for each query head.")


for _name in ("W_K", "W_V", "b_K", "b_V"):
    setattr(GroupedQueryAttention, _name, _repeated(_name))


def simple_attn_linear(input: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """`[b p h e]` from one input for all heads, `[b p d]`, and `w` `[h d e]`, `b` `[h e]`."""
    return projected(input, w.mT, b)


def complex_attn_linear(input: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The linear map of queries, keys or values from one input for each head, `[b p h d]`."""
    return projected(input, w.mT, b)


# the block


class TransformerBlock(Part):
    """Attention and MLP that read the residual stream and add to it."""

    uncalled = frozenset({"apply_mlp"})

    ln1: nn.Module
    ln2: nn.Module

    def __init__(self, cfg: Config, block_index: int) -> None:
        super().__init__()
        self.cfg = cfg = HookedTransformerConfig.unwrap(cfg)
        self.normalization_type, self.layer = cfg.normalization_type, block_index
        self._build_norms()
        kind = "global" if not cfg.use_local_attn else (cfg.attn_types or ())[block_index]
        attention = Attention if cfg.n_key_value_heads is None else GroupedQueryAttention
        self.attn = attention(cfg, kind, block_index)
        if not cfg.attn_only:
            self.mlp = mlp_of(cfg)
        names = ["attn_in", "q_input", "k_input", "v_input", "mlp_in", "attn_out", "mlp_out", "resid_pre"]
        names += ["resid_mid"] * (not cfg.attn_only and not cfg.parallel_attn_mlp) + ["resid_post"]
        for name in names:
            setattr(self, f"hook_{name}", HookPoint())

    def _build_norms(self) -> None:
        cfg, both = self.cfg, self.cfg.use_normalization_before_and_after
        if both and (cfg.normalization_type or "RMS")[:3] != "RMS":
            raise ValueError(
                f"use_normalization_before_and_after requires RMS norms, got {cfg.normalization_type}"
            )
        for name in ["ln1"] if cfg.attn_only else ["ln1", "ln2"]:
            setattr(self, name, norm_of(cfg))
            if both:
                after = nn.Identity() if cfg.normalization_type is None else RMSNorm(cfg)
                setattr(self, f"{name}_post", after)

    def forward(
        self,
        resid_pre: Tensor,
        shortformer_pos_embed: Tensor | None = None,
        past_kv_cache_entry: TransformerLensKeyValueCacheEntry | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The residual stream `[b p d]` after the block.

        shortformer_pos_embed: what queries and keys read besides the normed stream. attention_mask: 1 at real tokens.
        """
        x, entry = resid_pre, past_kv_cache_entry
        if isinstance(self.attn, Attention):
            shared = self.attn.shared_pass(x, entry, attention_mask)
        else:
            view = View(Mask(causal=False, allowed=None), None)
            shared = PassState(view, view, None)
        shared.made_once("place", lambda: shortformer_pos_embed)
        return self.computed(
            lambda native, scope: native(x, shared, scope), x, Setting(entry, attention_mask)
        )

    def apply_mlp(self, normalized_resid: Tensor) -> Tensor:
        """The term that the MLP adds to the stream, from its normed input."""

        def added(native: Any, scope: Scope) -> Tensor:
            return cast(Tensor, native._added("mlp_out", native.mlp(normalized_resid, scope), scope))

        return self.computed(added, normalized_resid)

    def _own_path(self) -> str:
        return "blocks.0"

    def _native(self, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, ModelConfig]:
        plan = blueprint(self.cfg)
        with torch.device("meta"):
            native = native_block(self.cfg, plan, self.layer)
        return filled(native, self.cfg, device, dtype), plan.config


AbstractAttention = Attention
"""Base class of every attention."""
