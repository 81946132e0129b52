"""Tokenizers of different kinds that know the words of the tasks."""

import functools
import re
from collections.abc import Callable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from interp import tasks
from interp.families.tokenizer import FileTokenizer, HuggingFaceTokenizer
from interp.tasks import greater_than, lists
from interp.zoo import load
from tests.tiny import gpt2_tokenizer

KNOWN = [
    *("the List: Again:", lists.DOCUMENTED, greater_than.SPAN_OF_YEARS),
    *(*tasks.TEMPLATES, *greater_than.NOUNS, *lists.ARGUMENTS, *lists.WORDS),
    *(f"{prompt.prompt}{prompt.answer}" for prompt in tasks.fact_prompts()),
    *(f" {century}{year}" for century in greater_than.CENTURIES for year in greater_than.YEARS),
]
UNKNOWN = {"Lucy", "beach", "Italy", "Madrid"}
"""Words that the word-level tokenizers have no token for."""


def word_level(pieces: pre_tokenizers.PreTokenizer, special: list[str]) -> tokenizers.Tokenizer:
    """A tokenizer of whole words: those of the tables, each with the space before it."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pieces
    trainer = trainers.WordLevelTrainer(
        special_tokens=[*special, "<unk>"], show_progress=False, min_frequency=0
    )
    texts = [word for text in KNOWN for word in (text, f" {text}")]
    forget = re.compile("|".join(rf"\b{word}\b" for word in UNKNOWN))
    tokenizer.train_from_iterator([forget.sub("", text) for text in texts], trainer)
    return tokenizer


@functools.cache
def words_without_bos(whole_years: tuple[str, ...] = ()) -> HuggingFaceTokenizer:
    """Words with the space before them, two digits together, no BOS; the years named are one token each."""
    regex = tokenizers.Regex(r" ?\p{L}+| ?\d\d|\s|[^\s\p{L}\d]")
    tokenizer = word_level(pre_tokenizers.Split(regex, "isolated"), [])
    tokenizer.add_tokens(list(whole_years))
    tokenizer.decoder = decoders.Fuse()
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@functools.cache
def words_with_bos() -> FileTokenizer:
    """Like SentencePiece: a space is put before every text, and decoding drops it again."""
    marks = tokenizers.Regex(r"[^\s\p{L}\x{2581}]|\n+")
    steps = [pre_tokenizers.Metaspace(prepend_scheme="always"), pre_tokenizers.Split(marks, "isolated")]
    tokenizer = word_level(pre_tokenizers.Sequence(steps), ["<s>"])
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return FileTokenizer(tokenizer, "<s>")


@functools.cache
def demo() -> FileTokenizer:
    tokenizer = load("demo-4l")[1]
    assert isinstance(tokenizer, FileTokenizer)
    return tokenizer


def tiny() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(gpt2_tokenizer())


Spoken = FileTokenizer | HuggingFaceTokenizer
SPEAKERS: dict[str, Callable[[], Spoken]] = {
    "demo": demo,
    "words": words_without_bos,
    "sentencepiece": words_with_bos,
}
