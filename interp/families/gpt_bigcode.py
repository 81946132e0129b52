"""GPT-BigCode (SantaCoder, StarCoder 1): GPT-2 with one key/value head for all queries, or heads stored one by one."""

from dataclasses import replace

from interp.families import gpt2
from interp.families.spec import Family, Settings, TensorRule, same
from interp.families.table import heads_apart, tied_to
from interp.model.config import ModelConfig

PRECISION = ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
"""Keys for the precision of scores, which do not change the result."""


def config(settings: Settings) -> ModelConfig:
    """Our config of a GPT-BigCode checkpoint."""
    settings.present(PRECISION)
    shared = settings.flag("multi_query", True)
    body = gpt2.body(settings)
    return replace(body, n_kv_heads=1 if shared else body.n_heads)


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table: GPT-2's, every matrix stored `[out, in]`."""
    return gpt2.rules(config, heads_apart if config.kv_heads == config.n_heads else same, same)


FAMILY = Family(
    name="GPT-BigCode",
    model_types=("gpt_bigcode",),
    config=config,
    rules=rules,
    prefix="transformer.",
    duplicates=tied_to("transformer.wte.weight"),
    buffers=gpt2.FAMILY.buffers,
)
