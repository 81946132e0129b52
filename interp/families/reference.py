"""Hugging Face's own implementation as the reference of the numerical contract (`verify`)."""

from pathlib import Path

import torch
from torch import nn

from interp.families import gguf, gpt2, llama, nanogpt, native
from interp.families.adapters import adapter_of, adapters_of, inner
from interp.families.comparison import BESIDE, NAME, HuggingFaceReference, compared
from interp.families.convert import expanded
from interp.families.live import inside
from interp.families.load import adapted_folder, gguf_in, values_of
from interp.families.quantised import method_of
from interp.families.spec import Family, Settings
from interp.families.stored import PICKLES
from interp.families.theirs import DEQUANTISING, network_of_folder, network_of_gguf
from interp.model.config import MLP, LayerNorm, ModelConfig, RMSNorm, Rotary
from interp.model.encoder_decoder import EncoderDecoder
from interp.model.live_modules import bare_copy, hooks_of, own_tensors
from interp.model.transformer import Transformer

ON_OURS = "Hugging Face on the numbers we read"
"""The reference for quantised checkpoints that transformers does not dequantise on a processor."""


def reference_of(
    source: nn.Module | Path, model: Transformer | EncoderDecoder, dtype: torch.dtype
) -> HuggingFaceReference | str:
    """The Hugging Face reference of a model loaded from `source`, or the reason why there is none.

    For our own format, and for files that a training script saved, it is a Hugging Face model of the config's family
    with our weights.
    """
    if isinstance(source, nn.Module):
        network, _ = inside(source)
        network = bare_copy(network, own_tensors(network)) if hooks_of(network) else network
        return compared(inner(network), model, BESIDE if adapters_of(network) else NAME)
    if (file := gguf_in(source)) is not None:
        opened = gguf.read(file)
        theirs = gguf.read_by_transformers(opened)
        network, _ = network_of_gguf(opened, dtype, on_ours=not theirs)
        return compared(network, model, NAME if theirs else ON_OURS)
    if adapter_of(source) is not None:
        return compared(inner(adapted_folder(source, dtype)[0]), model, BESIDE)
    values = values_of(source)
    if values.get("model_type") in (native.MODEL_TYPE, nanogpt.MODEL_TYPE) or source.suffix in PICKLES:
        return exported(model) if isinstance(model, Transformer) else "stored in our own format"
    import transformers

    names = values.get("architectures")
    if not isinstance(names, list) or not names:
        return "the config names no architecture"
    if not hasattr(transformers, str(names[0])):
        return f"transformers has no class {names[0]!r}"
    folder, method = source if source.is_dir() else source.parent, method_of(values)
    try:
        network, _ = network_of_folder(folder, values, str(names[0]), dtype)
    except ValueError as cause:
        return f"transformers does not open it: {cause}"
    return compared(network, model, NAME if method is None or method in DEQUANTISING else ON_OURS)


def exported(model: Transformer) -> HuggingFaceReference | str:
    """The Hugging Face model with the same arithmetic and copies of the model's weights, or why there is none."""
    import transformers

    kinds = {"GPT2LMHeadModel": (gpt2.FAMILY, _as_gpt2), "LlamaForCausalLM": (llama.FAMILY, _as_llama)}
    for kind, (family, written) in kinds.items():
        values = written(model.config)
        if values is None or family.config(Settings(values, family.name)) != model.config:
            continue
        theirs = getattr(transformers, kind)(getattr(transformers, kind).config_class(**values))
        _write_parameters(theirs.to(model.device, model.dtype), family, model)
        return HuggingFaceReference(theirs.eval())
    return "no Hugging Face family computes exactly this config"


@torch.no_grad()
def _write_parameters(theirs: nn.Module, family: Family[ModelConfig], model: Transformer) -> None:
    """Write our model's parameters into a Hugging Face network.

    A rule's layout is a view of the network's tensor, so copying into the view inverts the rule.
    """
    state, ours = theirs.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    for rule in expanded(family.rules(model.config), model.config):
        parts = [rule.layout(state[name], model.config) for name in rule.theirs]
        pieces = ours[rule.ours].split([len(part) for part in parts])
        for part, piece in zip(parts, pieces, strict=True):
            part.copy_(piece)


def _as_gpt2(c: ModelConfig) -> dict[str, object] | None:
    """The nearest GPT-2 config; the caller checks that it converts back to `c`."""
    if not isinstance(c.mlp, MLP) or not isinstance(c.norm, LayerNorm) or c.d_model % c.n_heads:
        return None
    return {
        "n_layer": c.n_layers, "n_embd": c.d_model, "n_head": c.n_heads, "n_positions": c.n_ctx,
        "vocab_size": c.d_vocab, "n_inner": c.mlp.d_mlp, "activation_function": c.mlp.act,
        "layer_norm_epsilon": c.norm.eps, "tie_word_embeddings": c.tied,
        "scale_attn_by_inverse_layer_idx": c.scale_by_layer, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def _as_llama(c: ModelConfig) -> dict[str, object] | None:
    """The nearest Llama config; the caller checks that it converts back to `c`."""
    plain = isinstance(c.position, Rotary) and c.position.scaling is None and c.d_model % c.n_heads == 0
    if not plain or not isinstance(c.mlp, MLP) or not isinstance(c.norm, RMSNorm):
        return None
    return {
        "num_hidden_layers": c.n_layers, "hidden_size": c.d_model, "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.kv_heads, "head_dim": c.head_width, "intermediate_size": c.mlp.d_mlp,
        "max_position_embeddings": c.n_ctx, "vocab_size": c.d_vocab, "rms_norm_eps": c.norm.eps,
        "hidden_act": c.mlp.act, "attention_bias": c.qkv_bias,
        "mlp_bias": c.mlp.bias, "tie_word_embeddings": c.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": getattr(c.position, "base", 0.0)},
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
