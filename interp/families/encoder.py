"""Post-norm encoders (BERT, RoBERTa, DistilBERT), with or without their masked-language-model head.

Without the head the model ends in its residual stream. Which of both a checkpoint is, its `architectures` say (a live
model is what its class says); without that key there is no head, and one that is stored after all is refused by name.
"""

from dataclasses import replace

from interp.families.spec import Settings, TensorRule
from interp.families.table import modules
from interp.model.config import Activation, ModelConfig

HEADS = ("ForMaskedLM", "ForPreTraining", "LMHeadModel")
"""How the classes with a masked-language-model head end."""
UNUSED = (r".*pooler\..*", r"(pre_)?classifier\..*", r"qa_outputs\..*")
"""Weights of parts that are not modelled: the pooler, and heads of classifiers and extractive question answering."""
BUFFERS = (r".*embeddings\.(position|token_type)_ids",)


def with_head(encoder: ModelConfig, settings: Settings, act: Activation) -> ModelConfig:
    """The encoder with the masked-language-model head that `architectures` promise, or without one."""
    found = settings.get("architectures")
    classes = found if isinstance(found, list | tuple) else ()
    tied = settings.flag("tie_word_embeddings", True)
    if not any(str(name).endswith(HEADS) for name in classes):
        return replace(encoder, unembed=False)
    return replace(encoder, unembed=True, unembed_bias=True, mlm_head=act, tied=tied)


def head_rules(
    config: ModelConfig, dense: str, norm: str, unembed: str, bias: str | None = None
) -> tuple[TensorRule, ...]:
    """The rules of the head, if there is one. `bias`: where the tied head keeps it, if not in `unembed` itself."""
    if not config.unembed:
        return ()
    table = modules({"mlm_head.dense": dense, "mlm_head.norm": norm})
    layer_bias, other = f"{unembed}.bias", bias or f"{unembed}.bias"
    if config.tied:
        return (*table, TensorRule("unembed.bias", (other,)))
    # untied, the reference adds the layer's own bias and never reads the other
    stored = TensorRule("unembed.bias", (layer_bias,), otherwise=TensorRule("unembed.bias", (other,)))
    return (*table, TensorRule("unembed.weight", (f"{unembed}.weight",)), stored)
