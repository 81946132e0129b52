"""Bamba: Mamba-2 in most layers, attention with half of every head rotated in the others, and a plain gated MLP."""

from interp.families import llama_like, mamba2
from interp.families.rope import Wording
from interp.families.spec import Family, Settings, TensorRule
from interp.families.table import modules, norm_rules, unembedding
from interp.model.config import MLP, Mixer, ModelConfig, Softmax

DEFAULTS = {
    "vocab_size": 128_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262_144,
    "partial_rotary_factor": 0.5,
}
NOT_READ = ("num_logits_to_keep", "z_loss_coefficient")
"""Keys of generation, and of the loss in training."""
OURS, THEIRS = "blocks.{l}.", "model.layers.{l}."


def config(settings: Settings) -> ModelConfig:
    """Our config of a Bamba checkpoint. Outside the rotary table Hugging Face reads no share of rotated dimensions."""
    settings.require("hidden_act", "silu", "swish", None)
    settings.present(NOT_READ)
    body = llama_like.decoder(settings, DEFAULTS, biases=llama_like.BOTH, wording=Wording(share=None))
    states, attends = mamba2.state_space(settings, body), _attention(settings, body.n_layers)
    kinds: list[Mixer] = [Softmax() if layer in attends else states for layer in range(body.n_layers)]
    return llama_like.mixed(body, kinds)


def _attention(settings: Settings, n_layers: int) -> list[int]:
    """Indices of the attention layers (`attn_layer_indices`); ValueError if the config contradicts itself."""
    indices = settings.get("attn_layer_indices")
    layers = [] if indices is None else indices
    if not isinstance(layers, list | tuple) or any(layer not in range(n_layers) for layer in layers):
        raise ValueError(
            f"config requires layers from 0 to {n_layers - 1} in attn_layer_indices, got {indices!r}"
        )
    kinds = ["full_attention" if layer in layers else "linear_attention" for layer in range(n_layers)]
    for key in ("layers_block_type", "layer_types"):
        if settings.get(key) not in (None, kinds):
            raise ValueError(
                f"config requires {key} to agree with attn_layer_indices, got {settings.get(key)!r}"
            )
    return list(layers)


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    assert isinstance(config.mlp, MLP)
    mlp: dict[str, str | tuple[str, ...]] = {
        "mlp.into": ("feed_forward.gate_proj", "feed_forward.up_proj"),
        "mlp.out": "feed_forward.down_proj",
    }
    attention = [rule for rule in llama_like.attention_rules(config) if ".attn." in rule.ours]
    return (
        *modules({"embed": "model.embed_tokens", "ln_final": "model.final_layernorm"}, bias=False),
        *norm_rules(
            {"ln1": "input_layernorm", "ln2": "pre_ff_layernorm"}, config.norm, ours=OURS, theirs=THEIRS
        ),
        *modules(mlp, ours=OURS, theirs=THEIRS, bias=config.mlp.bias),
        *unembedding(config),
        *mamba2.hybrid_rules(config, attention),
    )


FAMILY = Family(
    name="Bamba",
    model_types=("bamba",),
    config=config,
    rules=rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
