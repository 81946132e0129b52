"""Post-norm encoders (BERT, RoBERTa, DistilBERT), with or without their masked-language-model head.

Without the head the model ends in its residual stream. `architectures` in the config (for a live model, its class) says
whether there is a head; without that key there is none, and a stored head is refused by name.
"""

from dataclasses import replace

from interp.families.spec import Settings, TensorRule
from interp.families.table import modules
from interp.model.config import Activation, ModelConfig

HEADS = ("ForMaskedLM", "ForPreTraining", "LMHeadModel")
"""Endings of the names of classes with a masked-language-model head."""
UNUSED = (r".*pooler\..*", r"(pre_)?classifier\..*", r"qa_outputs\..*")
"""Weights of parts that are not modelled: the pooler, and heads of classifiers and extractive question answering."""
BUFFERS = (r".*embeddings\.(position|token_type)_ids",)


def with_head(encoder: ModelConfig, settings: Settings, act: Activation) -> ModelConfig:
    """The encoder with the masked-language-model head that `architectures` promise, or without one."""
    architectures = settings.get("architectures")
    classes = architectures if isinstance(architectures, list | tuple) else ()
    tied = settings.flag("tie_word_embeddings", True)
    if not any(str(name).endswith(HEADS) for name in classes):
        return replace(encoder, unembed=False)
    return replace(encoder, unembed=True, unembed_bias=True, mlm_head=act, tied=tied)


def head_rules(
    config: ModelConfig, dense: str, norm: str, unembed: str, bias: str | None = None
) -> tuple[TensorRule, ...]:
    """The rules of the head, if there is one; `bias` is the name of a tied head's bias, if not `{unembed}.bias`."""
    if not config.unembed:
        return ()
    table = modules({"mlm_head.dense": dense, "mlm_head.norm": norm})
    layer_bias, tied_bias = f"{unembed}.bias", bias or f"{unembed}.bias"
    if config.tied:
        return (*table, TensorRule("unembed.bias", (tied_bias,)))
    # untied, the reference adds the layer's own bias and never reads the other
    stored = TensorRule("unembed.bias", (layer_bias,), otherwise=TensorRule("unembed.bias", (tied_bias,)))
    return (*table, TensorRule("unembed.weight", (f"{unembed}.weight",)), stored)
