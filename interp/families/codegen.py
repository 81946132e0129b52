"""CodeGen: GPT-J's arithmetic; queries, values and keys stored in four parts, one for each core it was trained on."""

import torch
from einops import rearrange
from torch import Tensor

from interp.families import gptj
from interp.families.spec import Family, Settings, TensorRule
from interp.families.table import modules, tied_to
from interp.model.config import ModelConfig

CORES = 4


def config(settings: Settings) -> ModelConfig:
    """Our config of a CodeGen checkpoint."""
    body = gptj.config(settings)
    if body.n_heads % CORES:
        raise ValueError(f"CodeGen: config requires a multiple of {CORES} for n_head, got {body.n_heads}")
    return body


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    qkv = {"attn.qkv": "attn.qkv_proj"}
    return (
        *gptj.outside_qkv(config),
        *modules(qkv, ours="blocks.{l}.", theirs="transformer.h.{l}.", bias=False, layout=cores_apart),
    )


def cores_apart(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Rows stored core by core, each its queries, values and keys, reordered: all of q, k, v."""
    query, value, key = rearrange(tensor, "(core three r) d -> three (core r) d", core=CORES, three=3)
    return torch.cat((query, key, value))


FAMILY = Family(
    name="CodeGen",
    model_types=("codegen",),
    config=config,
    rules=rules,
    prefix="transformer.",
    duplicates=tied_to("transformer.wte.weight"),
    buffers=(*gptj.FAMILY.buffers, r".*\.attn\.causal_mask"),
)
