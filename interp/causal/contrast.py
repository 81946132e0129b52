"""Aligned pairs of prompts, and sites by short name, for questions that compare two runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from interp.core.boundary import public
from interp.data.batch import Batch
from interp.model import sites
from interp.model.config import ModelConfig
from interp.passes.observe import Model, text_of
from interp.tasks.pairs import TaskPairs

T = TypeVar("T")

Direction = Literal["denoise", "noise"]
"""denoise: clean activations into the corrupted run; noise: corrupted ones into the clean run."""


@runtime_checkable
class AlignedPairs(Protocol):
    """Clean and corrupted prompts as tokens, token for token; `interp.tasks` makes them."""

    @property
    def clean_tokens(self) -> Int[Tensor, "n p"]:
        """One clean prompt per row, BOS included."""
        ...

    @property
    def corrupt_tokens(self) -> Int[Tensor, "n p"]:
        """The corrupted prompts."""
        ...

    @property
    def keep(self) -> Bool[Tensor, "n p"] | None:
        """True at real tokens of both; None: no padding."""
        ...

    @property
    def answer(self) -> Int[Tensor, "n"]:
        """The clean prompts' answers."""
        ...

    @property
    def wrong(self) -> Int[Tensor, "n"]:
        """The wrong tokens that the answers are contrasted with."""
        ...


@public()
def batches(model: Model, pairs: AlignedPairs) -> tuple[Batch, Batch]:
    """The clean and the corrupted prompts of some pairs as two batches, both with the answers of the clean ones.

    Pairs whose answers are told apart as wholes (`TaskPairs.answers`) bring none: the metric does,
    `interp.metrics.log_prob_difference(pairs.answers, pairs.wrongs)`.

    Args:
        pairs: aligned pairs of token ids, as the tasks of `interp.tasks` make them.

    Returns:
        The clean and the corrupted batch.

    Example:
        >>> demo = interp.HookedTransformer.from_pretrained("demo-4l")
        >>> pairs = interp.tasks.IndirectObjects(4).pairs(demo.text.tokenizer)
        >>> interp.patch(demo, *batches(demo, pairs), "z").value.shape
        (4, 8)
    """
    first = torch.zeros_like(pairs.answer) if pairs.keep is None else pairs.keep.int().argmax(1)
    begins = pairs.clean_tokens.gather(1, first[:, None])
    start = text_of(model).bos_id
    bos = start is not None and bool((begins == start).all())
    clean, corrupt = (
        Batch(tokens, pairs.keep, bos).numbered() for tokens in (pairs.clean_tokens, pairs.corrupt_tokens)
    )
    if isinstance(pairs, TaskPairs) and pairs.answers is not None:
        return clean, corrupt
    return clean.with_answers(pairs.answer, pairs.wrong), corrupt.with_answers(pairs.answer, pairs.wrong)


@dataclass(frozen=True, eq=False)
class Contrast:
    """Pairs of prompts: the one that is intervened on, and the one that values come from; both have clean answers."""

    own: Batch
    """The rows that are intervened on."""
    other: Batch
    """The rows that values come from."""
    direction: Direction

    @classmethod
    def of(cls, batch: Batch, direction: Direction) -> Contrast:
        """The pairs in a batch with corrupted prompts."""
        clean, corrupt = batch.pair()
        return cls(corrupt, clean, direction) if direction == "denoise" else cls(clean, corrupt, direction)

    def runs(self, own: T, other: T) -> dict[str, T]:
        """Values of the own and the other run, under the keys "clean" and "corrupt" by which of the two each run is."""
        clean, corrupt = (other, own) if self.direction == "denoise" else (own, other)
        return {"clean": clean, "corrupt": corrupt}


def site_names(site: str, config: ModelConfig) -> tuple[str, ...]:
    """The full names of a site in every layer that has it, or the one name of a site outside the blocks.

    A full name with a layer stands for that layer alone. KeyError for sites that no layer has; ValueError for those
    after the final stream.
    """
    name = site if "hook_" in site else sites.full_name(site)
    if sites.is_of_block(name):
        return sites.of_layers(name, config)
    if sites.find(name, config)[1] is None and name not in sites.EMBEDDING_SITES:
        raise ValueError(f"a site before the final norm is required, {name!r} comes after it")
    return (name,)
