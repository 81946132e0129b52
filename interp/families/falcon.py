"""Falcon, all three forms of block.

Attention and MLP side by side after one norm, with one key/value head (7B); side by side after a norm each, with
several (40B, 180B); and one after the other, with ALiBi (RW).

Hugging Face computes Falcon's ALiBi in bfloat16, whatever the model's dtype, from the key's position, and so does
this package. Its attention "eager" adds it twice, "sdpa" (the default) once: the latter is what the models were
trained with.
"""

import torch
from einops import rearrange
from torch import Tensor

from interp.families.activations import activation
from interp.families.rope import Wording, context, rotary
from interp.families.spec import Family, Settings, TensorRule
from interp.families.table import heads_apart, modules, tied_to, unembedding
from interp.model.config import MLP, Alibi, LayerNorm, ModelConfig


def config(settings: Settings) -> ModelConfig:
    """Our config of a Falcon checkpoint."""
    d_model = settings.count("n_embed", settings.count("hidden_size"))
    n_heads = settings.count("num_attention_heads")
    bias = settings.flag("bias", False)
    n_ctx = settings.count("max_position_embeddings", 2048)
    alibi = settings.flag("alibi", False)
    position = rotary(settings, d_model // n_heads, n_ctx, wording=Wording(unused=alibi))
    parallel, shared_norm = _form(settings)
    return ModelConfig(
        n_layers=settings.integer("num_hidden_layers"),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=_kv_heads(settings, n_heads),
        n_ctx=context(n_ctx, position),
        d_vocab=settings.integer("vocab_size"),
        mlp=MLP(
            settings.integer("ffn_hidden_size", 4 * d_model),
            activation(settings, "activation", "gelu"),
            bias=bias,
        ),
        position=Alibi(scaled=True, rounded=True) if alibi else position,
        norm=LayerNorm(settings.real("layer_norm_epsilon", 1e-5)),
        parallel=parallel,
        shared_norm=shared_norm,
        qkv_bias=bias,
        out_bias=bias,
        tied=settings.flag("tie_word_embeddings", True),
    )


def _form(settings: Settings) -> tuple[bool, bool]:
    """Whether attention and MLP are parallel (both read the block's input), and whether they share a norm."""
    parallel, norms = settings.flag("parallel_attn", True), settings.get("num_ln_in_parallel_attn")
    if settings.flag("new_decoder_architecture", False):
        settings.require("parallel_attn", True, None)
        settings.require("num_ln_in_parallel_attn", 1, 2, None)
        return True, norms == 1
    settings.require("num_ln_in_parallel_attn", 1, None)
    return parallel, parallel


def _kv_heads(settings: Settings, n_heads: int) -> int:
    """Number of key/value heads: 1 with `multi_query`, else `num_kv_heads`."""
    stated, shared = settings.integer("num_kv_heads", n_heads), settings.flag("multi_query", True)
    if settings.flag("new_decoder_architecture", False):
        return stated  # whatever multi_query says
    if shared:
        return 1  # whatever num_kv_heads says
    settings.require("num_kv_heads", n_heads, None)
    return n_heads


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    ours, theirs = "blocks.{l}.", "transformer.h.{l}."
    norms = {"ln1": "input_layernorm"}
    if config.parallel and not config.shared_norm:
        norms = {"ln1": "ln_attn", "ln2": "ln_mlp"}
    elif not config.parallel:
        norms["ln2"] = "post_attention_layernorm"
    matrices = {
        "attn.out": "self_attention.dense",
        "mlp.into": "mlp.dense_h_to_4h",
        "mlp.out": "mlp.dense_4h_to_h",
    }
    qkv = {"attn.qkv": "self_attention.query_key_value"}
    layout = heads_apart if config.kv_heads == config.n_heads else groups_apart
    return (
        *modules({"embed": "transformer.word_embeddings"}, bias=False),
        *modules({"ln_final": "transformer.ln_f"}),
        *modules(norms, ours=ours, theirs=theirs),
        *modules(qkv, ours=ours, theirs=theirs, bias=config.qkv_bias, layout=layout),
        *modules(matrices, ours=ours, theirs=theirs, bias=config.out_bias),
        *unembedding(config),
    )


def groups_apart(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Rows stored group by group, each its queries, then its key and its value, reordered: all of q, k, v."""
    groups = rearrange(tensor, "(g n e) ... -> g n e ...", g=config.kv_heads, e=config.head_width)
    if config.kv_heads == 1:
        return groups[0]
    parts = groups.split([config.n_heads // config.kv_heads, 1, 1], 1)
    return torch.cat([part.flatten(0, 1) for part in parts])


FAMILY = Family(
    name="Falcon",
    model_types=("falcon",),
    config=config,
    rules=rules,
    prefix="transformer.",
    duplicates=tied_to("transformer.word_embeddings.weight"),
    buffers=(r".*\.rotary_emb\.inv_freq",),
)
