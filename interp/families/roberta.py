"""RoBERTa (also XLM-R and CamemBERT): BERT with positions that begin after the padding id, and with another head.

Its head's activation is gelu whatever the blocks have.
"""

from interp.families import bert
from interp.families.encoder import BUFFERS, UNUSED, head_rules, with_head
from interp.families.spec import Family, Settings, TensorRule
from interp.model.config import Learned, ModelConfig


def config(settings: Settings) -> ModelConfig:
    """Our config of a RoBERTa checkpoint; position 0 is the row after that of the padding id."""
    offset = settings.integer("pad_token_id", 1) + 1
    return with_head(bert.body(settings, Learned(offset)), settings, "gelu")


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    names = ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
    return (*bert.body_rules("roberta."), *head_rules(config, *names))


def duplicates(config: ModelConfig) -> dict[str, str]:
    """A tied head may be stored again, and so may its bias."""
    if not config.tied:
        return {}
    return {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }


FAMILY = Family(
    name="RoBERTa",
    model_types=("roberta", "xlm-roberta", "camembert"),
    config=config,
    rules=rules,
    prefix="roberta.",
    buffers=BUFFERS,
    unused=(*UNUSED, r"lm_head\.bias"),
    outside=("lm_head.", "classifier.", "qa_outputs."),
    duplicates=duplicates,
    rename=bert.rename,
)
