"""One Hugging Face model that a test loads: its classes, and the options that make it small and particular."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig, PreTrainedModel

D_VOCAB, N_CTX = 53, 64
"""Tokens, no multiple of 8, and positions of every case."""
Options = Mapping[str, object]


@dataclass(frozen=True)
class Case:
    """A config and a model class of Hugging Face, and keyword arguments of the config."""

    config_class: type[PreTrainedConfig]
    model_class: type[PreTrainedModel]
    options: Options

    def but(self, **changes: object) -> "Case":
        """The same with some options changed."""
        return replace(self, options={**self.options, **changes})

    def config(self) -> PreTrainedConfig:
        """A fresh config, which shares nothing with the options (Hugging Face writes into nested ones)."""
        shared = {"vocab_size": D_VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        return self.config_class(**copy.deepcopy({**shared, **self.options}))
