"""Checkpoints in: one file per architecture family, converted to our config and parameters."""

from interp.families.load import FAMILIES, config_of, from_folder, from_hf_model, save, tokenizer_of

__all__ = ["FAMILIES", "config_of", "from_folder", "from_hf_model", "save", "tokenizer_of"]
