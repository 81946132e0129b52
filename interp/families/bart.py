"""BART: post-norm encoder-decoder, learned positions from the third row on, a norm after the embeddings.

Where only the base model was saved, the logits are those of the tied embedding; a bias that is not stored is 0.
"""

from dataclasses import replace

import torch
from einops import rearrange
from torch import Tensor

from interp.families.activations import activation
from interp.families.spec import Family, Settings, TensorRule
from interp.families.table import modules
from interp.model.config import MLP, EncoderDecoderConfig, LayerNorm, Learned, ModelConfig, Position

LAYER: dict[str, str | tuple[str, ...]] = {
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.out": "self_attn.out_proj",
    "ln1": "self_attn_layer_norm",
    "mlp.into": "fc1",
    "mlp.out": "fc2",
    "ln2": "final_layer_norm",
}
CROSS: dict[str, str | tuple[str, ...]] = {
    "cross_attn.q": "encoder_attn.q_proj",
    "cross_attn.kv": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "cross_attn.out": "encoder_attn.out_proj",
    "ln_cross": "encoder_attn_layer_norm",
}
"""This package's modules of a block -> the checkpoint's, with those of cross-attention."""


def config(settings: Settings) -> EncoderDecoderConfig:
    """Our config of a BART checkpoint."""
    encoder, decoder = (stack(settings, side, Learned(offset=2)) for side in ("encoder", "decoder"))
    tied = settings.flag("tie_word_embeddings", True)
    return EncoderDecoderConfig(
        replace(encoder, embed_norm=True),
        replace(decoder, embed_norm=True, tied=tied),
        start_token=settings.integer("decoder_start_token_id", 2),
        shared_embedding=tied,
    )


def stack(settings: Settings, side: str, position: Position) -> ModelConfig:
    """The config of one stack: `side` is "encoder" or "decoder"."""
    decoder, d_model = side == "decoder", settings.count("d_model")
    return ModelConfig(
        n_layers=settings.count(f"{side}_layers") if decoder else _encoder_layers(settings),
        d_model=d_model,
        n_heads=settings.count(f"{side}_attention_heads"),
        n_ctx=settings.count("max_position_embeddings", 1024),
        d_vocab=settings.count("vocab_size"),
        mlp=MLP(settings.count(f"{side}_ffn_dim"), activation(settings, "activation_function", "gelu")),
        position=position,
        norm=LayerNorm(),
        norm_place="post",
        final_norm=False,
        causal=decoder,
        cross_attention=decoder,
        embed_scale=d_model**0.5 if settings.flag("scale_embedding", False) else 1.0,
        unembed=decoder,
        unembed_bias=decoder,
    )


def _encoder_layers(settings: Settings) -> int:
    """Number of encoder layers: `num_hidden_layers` if the config has it, else `encoder_layers`."""
    settings.present(("encoder_layers",))
    return settings.count(
        "encoder_layers" if settings.get("num_hidden_layers") is None else "num_hidden_layers"
    )


def rules(config: EncoderDecoderConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    extra = [
        TensorRule(f"{side}.pos_embed.weight", (f"model.{side}.embed_positions.weight",))
        for side in ("encoder", "decoder")
    ]
    norms = {f"{side}.ln_embed": f"model.{side}.layernorm_embedding" for side in ("encoder", "decoder")}
    return (*stack_rules(config), *extra, *modules(norms))


def stack_rules(config: EncoderDecoderConfig) -> tuple[TensorRule, ...]:
    """The part of the weight table that BART and Marian share."""
    layers = [
        rule
        for side, names in (("encoder", LAYER), ("decoder", {**LAYER, **CROSS}))
        for rule in modules(names, ours=f"{side}.blocks.{{l}}.", theirs=f"model.{side}.layers.{{l}}.")
    ]
    # a bias that is not stored is 0: as many as the embedding has rows
    absent = TensorRule("decoder.unembed.bias", (_embedding(config, "decoder"),), _zeros)
    table = [*layers, TensorRule("decoder.unembed.bias", ("final_logits_bias",), _row, otherwise=absent)]
    for side in ("decoder",) if config.shared_embedding else ("encoder", "decoder"):
        shared = TensorRule(f"{side}.embed.weight", ("model.shared.weight",))
        stored = (_embedding(config, side),)
        table.append(TensorRule(f"{side}.embed.weight", stored, otherwise=shared))
    if not config.decoder.tied:
        table.append(TensorRule("decoder.unembed.weight", ("lm_head.weight",)))
    return tuple(table)


def _embedding(config: EncoderDecoderConfig, side: str) -> str:
    return "model.shared.weight" if config.shared_embedding else f"model.{side}.embed_tokens.weight"


def _row(tensor: Tensor, config: ModelConfig) -> Tensor:
    """The only row of a matrix `[1, v]`."""
    return rearrange(tensor, "1 v -> v")


def _zeros(tensor: Tensor, config: ModelConfig) -> Tensor:
    """A vector of zeros, one for each row of a matrix."""
    return torch.zeros_like(tensor[:, 0])


def duplicates(config: EncoderDecoderConfig) -> dict[str, str]:
    """The shared embedding may be stored for each stack again, and as the unembedding where that is tied."""
    copies: list[str] = []
    if config.shared_embedding:
        copies += ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"]
    if config.decoder.tied:
        copies.append("lm_head.weight")
    return dict.fromkeys(copies, _embedding(config, "decoder"))


FAMILY = Family(
    name="BART",
    model_types=("bart",),
    config=config,
    rules=rules,
    prefix="model.",
    # untied, every stack reads its own embedding and nobody the shared one
    unused=(r"classification_head\..*", r"qa_outputs\..*", r"model\.shared\.weight"),
    outside=("lm_head.", "final_logits_bias", "classification_head.", "qa_outputs."),
    buffers=(r"model\.(encoder|decoder)\.version",),
    duplicates=duplicates,
)
