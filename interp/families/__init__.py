"""Loading of checkpoints: one file per architecture family, converted to this package's config and parameters."""

from interp.families.load import (
    FAMILIES,
    any_from_folder,
    any_from_hf_model,
    config_of,
    ends_of,
    from_folder,
    from_hf_model,
    is_encoder_decoder,
    save,
    tokenizer_for,
)
from interp.families.state import load_state
from interp.families.tokenizer import SentencePieceTokenizer, StoredTokenizer, tokenizer_in, tokenizer_of

__all__ = [
    "FAMILIES",
    "SentencePieceTokenizer",
    "StoredTokenizer",
    "any_from_folder",
    "any_from_hf_model",
    "config_of",
    "ends_of",
    "from_folder",
    "from_hf_model",
    "is_encoder_decoder",
    "load_state",
    "save",
    "tokenizer_for",
    "tokenizer_in",
    "tokenizer_of",
]  # fmt: skip
