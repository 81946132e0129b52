"""A tokenizer that travels with what was trained on its ids: from a file, or learned from texts here."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from interp.core.boundary import public
from interp.core.files import regular
from interp.core.kinds import Count
from interp.core.viewer import Brief
from interp.families.native import BOS
from interp.families.tokenizer import FileTokenizer


@dataclass(frozen=True, repr=False)
class Vocabulary(Brief):
    """A `tokenizer.json` as text, with a beginning-of-text token, `<|bos|>`."""

    json: str

    @classmethod
    @public()
    def read(cls, path: Path | str) -> "Vocabulary":
        """The vocabulary of a file.

        Raises:
            FileNotFoundError: no such file.
            ValueError: a file without the token.
        """
        try:
            found = cls(regular(path).read_text(encoding="utf-8"))
            found.tokenizer  # noqa: B018 - it refuses what is no tokenizer of ours
        except ValueError as cause:
            raise ValueError(f"{path} is no vocabulary: {cause}") from cause
        return found

    @classmethod
    @public()
    def learned(cls, texts: Iterable[str], size: Count) -> "Vocabulary":
        """A byte-level BPE vocabulary learned from texts, with which every text can be encoded.

        Args:
            texts: the texts.
            size: the most tokens.

        Raises:
            ValueError: fewer than 257 tokens, all bytes and the beginning.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        if size < 257:
            raise ValueError(
                f"a vocabulary of at least 257 tokens is required (all bytes, {BOS}), got {size}"
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[BOS],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer.to_str(pretty=False))

    @cached_property
    def tokenizer(self) -> FileTokenizer:
        """The tokenizer; ValueError if it has no `<|bos|>`."""
        import tokenizers

        try:
            found = tokenizers.Tokenizer.from_str(self.json)
        except Exception as cause:  # the library raises Exception itself
            raise ValueError(f"a tokenizer as JSON is required: {cause}") from cause
        return FileTokenizer(found, BOS)

    @property
    def size(self) -> int:
        """How many token ids there are."""
        return self.tokenizer.n_ids

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.json.encode()).hexdigest()
