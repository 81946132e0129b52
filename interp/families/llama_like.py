"""What Llama and its many relatives share: the config's keys, and one weight table that follows from our config."""

from collections.abc import Mapping

from interp.families.activations import activation
from interp.families.rope import context, rotary
from interp.families.spec import Rule, Settings
from interp.families.table import modules, tied_to, unembedding
from interp.model.config import MLP, ModelConfig, MoE, NormPlace, RMSNorm

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
BUFFERS = (r".*\.rotary_emb\.inv_freq",)
"""Tensors of old checkpoints that are no weights."""
duplicates = tied_to("model.embed_tokens.weight")
JOINED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
"""The tensors that make our matrices `qkv` and `into`."""


def decoder(
    settings: Settings,
    defaults: Mapping[str, int | float] | None = None,
    *,
    act: tuple[str, str] = ("hidden_act", "silu"),
    part: str | None = None,
) -> ModelConfig:
    """The config that the shared keys describe: Llama's arithmetic.

    defaults: the family's values of missing keys, where they are not Llama's. act: the key of the non-linearity and
    its default. part: as `rope.rotary` has it.
    """
    given = {key: float(value) for key, value in (defaults or {}).items()}
    missing: dict[str, float] = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, **given}

    def whole(key: str) -> int:
        return settings.count(key, None if key not in missing else int(missing[key]))

    n_heads, d_model = whole("num_attention_heads"), whole("hidden_size")

    def said_or(key: str, usual: int) -> int:
        """A size that a config may leave to others by null; a missing key has the family's value."""
        return usual if settings.optional(key, missing.get(key)) is None else whole(key)

    d_head, n_kv_heads = said_or("head_dim", d_model // n_heads), said_or("num_key_value_heads", n_heads)
    bias = settings.flag("attention_bias", False)
    position = rotary(settings, d_head, base=missing["rope_theta"], part=part)
    mlp_bias = settings.flag("mlp_bias", False)
    return ModelConfig(
        n_layers=whole("num_hidden_layers"),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        n_ctx=context(settings, position, whole("max_position_embeddings")),
        d_vocab=whole("vocab_size"),
        mlp=MLP(whole("intermediate_size"), activation(settings, *act), gated=True, bias=mlp_bias),
        position=position,
        norm=RMSNorm(settings.real("rms_norm_eps", missing["rms_norm_eps"])),
        qkv_bias=bias,
        out_bias=bias,
        tied=settings.flag("tie_word_embeddings", bool(missing.get("tie_word_embeddings", False))),
    )


def without(settings: Settings, *keys: str) -> None:
    """ValueError if the config sets a switch that this family does not have."""
    for key in keys:
        settings.require(key, False, None)


def rules(config: ModelConfig) -> tuple[Rule, ...]:
    """The weight table; q, k, v and gate, up are joined into one matrix each."""
    return (*attention_rules(config), *mlp_rules(config))


def attention_rules(config: ModelConfig, qkv: str | tuple[str, ...] = JOINED[0]) -> tuple[Rule, ...]:
    """The weight table without the MLPs' matrices."""
    ours, theirs = "blocks.{l}.", "model.layers.{l}."
    outside = {"embed": "model.embed_tokens", "ln_final": "model.norm"}
    norms = dict(NORMS[config.norm_place])
    if config.qk_norm is not None:
        norms |= {f"attn.{part}_norm.norm": f"self_attn.{part}_norm" for part in "qk"}
    return (
        *modules(outside, bias=False),
        *modules(norms, ours=ours, theirs=theirs, bias=False),
        *modules({"attn.qkv": qkv}, ours=ours, theirs=theirs, bias=config.qkv_bias),
        *modules({"attn.out": "self_attn.o_proj"}, ours=ours, theirs=theirs, bias=config.out_bias),
        *unembedding(config),
    )


def mlp_rules(config: ModelConfig, into: str | tuple[str, ...] = JOINED[1]) -> tuple[Rule, ...]:
    """The MLPs' matrices."""
    assert isinstance(config.mlp, MLP | MoE)
    names = {"mlp.into": into, "mlp.out": "mlp.down_proj"}
    return modules(names, ours="blocks.{l}.", theirs="model.layers.{l}.", bias=config.mlp.bias)
