"""Llama and its relatives: the config's keys, and one weight table that follows from the config."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from einops import rearrange
from torch import Tensor

from interp.families.activations import activation
from interp.families.rope import USUAL, Wording, context, rotary
from interp.families.spec import Settings, TensorRule, same
from interp.families.table import modules, norm_rules, tied_to, unembedding
from interp.model.config import MLP, Mixer, ModelConfig, MoE, Norm, NormPlace, RMSNorm, Softmax

NORMS: dict[NormPlace, dict[str, str]] = {
    "pre": {"ln1": "input_layernorm", "ln2": "post_attention_layernorm"},
    "output": {"ln1_post": "post_attention_layernorm", "ln2_post": "post_feedforward_layernorm"},
    "sandwich": {
        "ln1": "input_layernorm",
        "ln1_post": "post_attention_layernorm",
        "ln2": "pre_feedforward_layernorm",
        "ln2_post": "post_feedforward_layernorm",
    },
}
BOTH = ("attention_bias", "mlp_bias")
"""Llama's config keys that switch biases on."""
BUFFERS = (r".*\.rotary_emb\.inv_freq",)
"""Tensors of old checkpoints that are no weights."""
duplicates = tied_to("model.embed_tokens.weight")
JOINED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
"""The tensors that are joined to the matrices `qkv` and `into`."""


def decoder(
    settings: Settings,
    defaults: Mapping[str, int | float] | None = None,
    *,
    act: tuple[str, str] | None = ("hidden_act", "silu"),
    norm: Norm | None = None,
    biases: Sequence[str] = ("attention_bias",),
    wording: Wording = USUAL,
) -> ModelConfig:
    """The config of a decoder like Llama (RMSNorm, rotary positions, gated MLP), read from the keys all of them share.

    Args:
        defaults: the family's values for missing keys, where they differ from Llama's.
        act: the key of the non-linearity and its default; None = always silu.
        norm: the norm; None = an RMSNorm with the config's eps.
        biases: the keys among `attention_bias` and `mlp_bias` that the family has.
        wording: the keys that describe the rotation.
    """
    family_defaults = {key: float(value) for key, value in (defaults or {}).items()}
    missing: dict[str, float] = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, **family_defaults}

    def count_of(key: str) -> int:
        return settings.count(key, None if key not in missing else int(missing[key]))

    n_heads, d_model = count_of("num_attention_heads"), count_of("hidden_size")

    def count_or(key: str, usual: int) -> int:
        """The size under `key`; `usual` where the config says null, the family's default where the key is missing."""
        return usual if settings.optional(key, missing.get(key)) is None else count_of(key)

    d_head, n_kv_heads = count_or("head_dim", d_model // n_heads), count_or("num_key_value_heads", n_heads)
    bias, mlp_bias = (switch in biases and settings.flag(switch, False) for switch in BOTH)
    n_ctx, share = count_of("max_position_embeddings"), missing.get("partial_rotary_factor")
    position = rotary(settings, d_head, n_ctx, base=missing["rope_theta"], partial=share, wording=wording)
    curve = "silu" if act is None else activation(settings, *act)
    return ModelConfig(
        n_layers=count_of("num_hidden_layers"),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        n_ctx=context(n_ctx, position),
        d_vocab=count_of("vocab_size"),
        mlp=MLP(count_of("intermediate_size"), curve, gated=True, bias=mlp_bias),
        position=position,
        norm=norm or RMSNorm(settings.real("rms_norm_eps", missing["rms_norm_eps"])),
        qkv_bias=bias,
        out_bias=bias,
        tied=settings.flag("tie_word_embeddings", bool(missing.get("tie_word_embeddings", False))),
    )


def rotated(body: ModelConfig, layers: Sequence[bool]) -> ModelConfig:
    """The config with rotary positions only in the layers where `layers` is True; the others have no positions."""
    if all(layers):
        return body
    kind = body.mixers[0]
    assert isinstance(kind, Softmax)
    return mixed(body, [replace(kind, rotated=turned) for turned in layers])


def mixed(body: ModelConfig, mixers: Sequence[Mixer]) -> ModelConfig:
    """The config with these mixers, one per layer, stored as the shortest period that repeats to the full list."""
    n = len(mixers)
    if n != body.n_layers:
        raise ValueError(f"a mixer for each of {body.n_layers} layers is required, got {n}")
    period = next(p for p in range(1, n + 1) if all(mixers[i] == mixers[i % p] for i in range(n)))
    return replace(body, mixer=tuple(mixers[:period]))


def rotated_layers(settings: Settings, n_layers: int) -> list[bool]:
    """Whether each layer is rotated: `no_rope_layers` (1 means yes), or all but every `no_rope_layer_interval`-th.

    SmolLM3 and Llama 4 have these keys.
    """
    every = settings.count("no_rope_layer_interval", 4)
    flags = settings.get("no_rope_layers")
    if flags is None or flags == []:  # as the files of Llama 4 say it
        return [(layer + 1) % every != 0 for layer in range(n_layers)]
    if (
        not isinstance(flags, list | tuple)
        or len(flags) < n_layers
        or any(flag not in (0, 1) for flag in flags)
    ):
        raise ValueError(f"no_rope_layers requires 0 or 1 for each of {n_layers} layers, got {flags!r}")
    return [flag == 1 for flag in flags[:n_layers]]


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table; q, k, v and gate, up are joined into one matrix each."""
    return (*attention_rules(config), *mlp_rules(config))


def attention_rules(
    config: ModelConfig, qkv: str | tuple[str, ...] = JOINED[0], norms: Mapping[str, str] | None = None
) -> tuple[TensorRule, ...]:
    """The weight table without the MLPs' matrices; `norms`: names of the norms in a block, None = those of `NORMS`."""
    ours, theirs = "blocks.{l}.", "model.layers.{l}."
    return (
        *outside_rules(config, norms),
        *query_key_norms(config),
        *modules({"attn.qkv": qkv}, ours=ours, theirs=theirs, bias=config.qkv_bias),
        *modules({"attn.out": "self_attn.o_proj"}, ours=ours, theirs=theirs, bias=config.out_bias),
    )


def outside_rules(config: ModelConfig, norms: Mapping[str, str] | None = None) -> tuple[TensorRule, ...]:
    """The weight table outside attention and the MLPs: embedding, norms, unembedding."""
    inside = dict(norms or NORMS[config.norm_place])
    if config.shared_norm:
        del inside["ln2"]
    return (
        *modules({"embed": "model.embed_tokens"}, bias=False),
        *norm_rules({"ln_final": "model.norm"}, config.norm),
        *norm_rules(inside, config.norm, ours="blocks.{l}.", theirs="model.layers.{l}."),
        *unembedding(config),
    )


def query_key_norms(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weights of the norms of queries and keys, where there are any."""
    names = {f"attn.{part}_norm.norm": f"self_attn.{part}_norm" for part in "qk"}
    norm_names = {} if config.qk_norm is None else names
    layout = flat if config.qk_norm == "each" else same
    return modules(norm_names, ours="blocks.{l}.", theirs="model.layers.{l}.", bias=False, layout=layout)


def flat(tensor: Tensor, config: ModelConfig) -> Tensor:
    """A gamma for each head, `[head, d_head]`, as one vector."""
    return rearrange(tensor, "h e -> (h e)", e=config.head_width)


def mlp_rules(config: ModelConfig, into: str | tuple[str, ...] = JOINED[1]) -> tuple[TensorRule, ...]:
    """The MLPs' matrices."""
    assert isinstance(config.mlp, MLP | MoE)
    names = {"mlp.into": into, "mlp.out": "mlp.down_proj"}
    return modules(names, ours="blocks.{l}.", theirs="model.layers.{l}.", bias=config.mlp.bias)
