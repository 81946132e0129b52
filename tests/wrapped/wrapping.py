"""Tiny perturbed Hugging Face decoders, each wrapped once; shared between tests, so never write to them."""

import functools

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from experiments.every_decoder import EveryDecoder, some_tokens, tiny
from interp import HookedTransformer
from interp.wrapped import Wrapped, wrap
from tests.tiny import gpt2_tokenizer

KINDS = (
    "cohere", "falcon", "olmo3", "smollm3", "deepseek_v3", "qwen3_5_text", "mamba", "falcon_h1", "gemma4_text",
)  # fmt: skip
"""Parallel, adding in place, normed outputs, layers without positions, latent heads and experts, gated delta nets, no
attention, attention beside a state, three writers."""


@functools.cache
def network(kind: str) -> PreTrainedModel:
    """The Hugging Face model."""
    return tiny(kind)


@functools.cache
def wrapped(kind: str) -> Wrapped:
    """The same, wrapped."""
    return wrap(network(kind))


def tokens() -> Int[Tensor, "b p"]:
    """Two rows of random tokens."""
    return some_tokens(EveryDecoder())


@functools.cache
def spoken(kind: str) -> HookedTransformer:
    """A wrapped model that speaks the tests' tokenizer."""
    with torch.random.fork_rng():
        fields = {"vocab_size": 400, "max_position_embeddings": 128}
        more = {"vocab_size_per_layer_input": 400} if kind == "gemma4_text" else {}
        made = tiny(kind, **fields, **more)
    return HookedTransformer.from_pretrained(made, tokenizer=gpt2_tokenizer(), wrapped=True)
