"""A tiny tokenizer of GPT-2's kind, and small random models that speak it."""

import functools
from dataclasses import replace

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from interp import HookedTransformer
from interp.families.tokenizer import HuggingFaceTokenizer
from tests.configs import CONFIGS, perturbed

END = "<|endoftext|>"
CORPUS = (
    "When Mary and John went to the shop, John gave a drink to Mary.",
    "The capital of France is Paris. The capital of Italy is Rome.",
    "The cat sat on the mat and the dog sat on the cat.",
)


@functools.cache
def backend() -> tokenizers.Tokenizer:
    """A byte-level byte-pair tokenizer trained on the corpus; id 0 is the end of text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def gpt2_tokenizer() -> PreTrainedTokenizerFast:
    """Like GPT-2's: an end of text and nothing else, neither a beginning nor padding."""
    found = PreTrainedTokenizerFast(tokenizer_object=backend(), eos_token=END)
    found.chat_template = "{% for one in messages %}{{ one.role[0] }}:{{ one.content }} {% endfor %}"
    return found


@functools.cache
def hooked(name: str = "gpt2", dtype: torch.dtype = torch.float64) -> HookedTransformer:
    """A model of one of the `CONFIGS` with the vocabulary of this tokenizer; shared, so never write to it."""
    config = replace(CONFIGS[name], d_vocab=backend().get_vocab_size())
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the same weights in every process
        network = perturbed(config, dtype)
    return HookedTransformer(network, HuggingFaceTokenizer(gpt2_tokenizer()), name=name)
