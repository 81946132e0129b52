"""T5, 1.0 (relu, tied) and 1.1 (gated gelu, untied): a trained bias per bucket of distance, RMSNorm, no biases.

The bias table of a stack stands in its first block and serves all of them; scores are not scaled by 1/sqrt(d_head).
"""

from dataclasses import replace

from interp.families.activations import ACTIVATIONS
from interp.families.spec import Family, Settings, TensorRule
from interp.families.table import modules
from interp.model.config import MLP, Buckets, EncoderDecoderConfig, ModelConfig, RMSNorm

UNLIMITED = 2**20
"""The bias knows no longest distance, so neither do we; `n_positions` is only what a checkpoint was trained on."""


def config(settings: Settings) -> EncoderDecoderConfig:
    """Our config of a T5 checkpoint."""
    n_layers = settings.count("num_layers")
    d_model = settings.count("d_model")
    encoder = ModelConfig(
        n_layers=n_layers,
        d_model=d_model,
        n_heads=settings.count("num_heads"),
        d_head=settings.count("d_kv"),
        n_ctx=UNLIMITED,
        d_vocab=settings.count("vocab_size"),
        mlp=_mlp(settings),
        position=Buckets(
            settings.count("relative_attention_num_buckets", 32),
            settings.count("relative_attention_max_distance", 128),
        ),
        norm=RMSNorm(settings.real("layer_norm_epsilon", 1e-6)),
        attn_scale=1.0,
        qkv_bias=False,
        out_bias=False,
        causal=False,
        unembed=False,
    )
    tied = _tied(settings)
    decoder = replace(
        encoder,
        n_layers=settings.count("num_decoder_layers", n_layers),
        causal=True,
        cross_attention=True,
        unembed=True,
        tied=tied,
        logit_scale=d_model**-0.5 if tied else 1.0,
    )
    start = settings.integer("decoder_start_token_id", settings.integer("pad_token_id", 0))
    return EncoderDecoderConfig(encoder, decoder, start_token=start)


def _tied(settings: Settings) -> bool:
    """Whether this is 1.0, which ties its unembedding and scales the logits by 1/sqrt(d_model); 1.1 does neither.

    1.1 says `tie_word_embeddings=False`; transformers 5 overwrites that with True and keeps `scale_decoder_outputs`.
    """
    tied = settings.get("tie_word_embeddings") is not False
    return settings.flag("scale_decoder_outputs", tied)


def _mlp(settings: Settings) -> MLP:
    kind = settings.text("feed_forward_proj", "relu")
    act = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    if act not in ACTIVATIONS:
        raise ValueError(
            f"T5: config asks for feed_forward_proj={kind!r}; supported: {', '.join(ACTIVATIONS)}, "
            "each also with gated- before it"
        )
    gated = kind.startswith("gated-")
    settings.require("is_gated_act", gated)
    settings.require("dense_act_fn", act)
    return MLP(settings.count("d_ff"), ACTIVATIONS[act], gated=gated, bias=False)


def rules(config: EncoderDecoderConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    table = [
        TensorRule("decoder.embed.weight", ("shared.weight",)),
        *_stack("encoder", config.encoder),
        *_stack("decoder", config.decoder),
    ]
    if not config.decoder.tied:
        # one that equals the embedding need not be stored
        same = TensorRule("decoder.unembed.weight", ("shared.weight",))
        table.append(TensorRule("decoder.unembed.weight", ("lm_head.weight",), otherwise=same))
    return tuple(table)


def _stack(side: str, config: ModelConfig) -> list[TensorRule]:
    last = len(config.sublayers) - 1
    assert isinstance(config.mlp, MLP)
    gate = ("wi_0", "wi_1") if config.mlp.gated else ("wi",)
    sources: dict[str, str | tuple[str, ...]] = {
        "attn.qkv": tuple(f"0.SelfAttention.{part}" for part in "qkv"),
        "attn.out": "0.SelfAttention.o",
        "ln1": "0.layer_norm",
        "mlp.into": tuple(f"{last}.DenseReluDense.{name}" for name in gate),
        "mlp.out": f"{last}.DenseReluDense.wo",
        "ln2": f"{last}.layer_norm",
    }
    if config.cross_attention:
        sources |= {
            "cross_attn.q": "1.EncDecAttention.q",
            "cross_attn.kv": ("1.EncDecAttention.k", "1.EncDecAttention.v"),
            "cross_attn.out": "1.EncDecAttention.o",
            "ln_cross": "1.layer_norm",
        }
    bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return [
        TensorRule(f"{side}.score_bias.table.weight", (bias,)),
        TensorRule(f"{side}.ln_final.weight", (f"{side}.final_layer_norm.weight",)),
        *modules(sources, ours=f"{side}.blocks.{{l}}.", theirs=f"{side}.block.{{l}}.layer.", bias=False),
    ]


def duplicates(config: EncoderDecoderConfig) -> dict[str, str]:
    """The shared embedding may be stored for each stack again, and as the unembedding where that is tied."""
    copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    return dict.fromkeys([*copies, *(["lm_head.weight"] if config.decoder.tied else [])], "shared.weight")


FAMILY = Family(
    name="T5",
    model_types=("t5",),
    config=config,
    rules=rules,
    prefix="",
    # stored by the first checkpoints, and never read: cross-attention has no bias
    unused=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    duplicates=duplicates,
)
