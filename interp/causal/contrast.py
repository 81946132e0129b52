"""What causal comparisons of two runs share: aligned pairs of prompts, sites by short name, a watched metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.transfers import sent
from interp.data.batch import Batch, Prompts, Text, is_prompts
from interp.data.pairs import Pairs
from interp.data.sources import Data
from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.tap import Edit, Read
from interp.model.transformer import Transformer
from interp.passes.metrics import Metric, Outcome
from interp.passes.observe import Model, Observation, observe, text_of

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
        """True at real tokens of both; None = no padding."""
        ...

    @property
    def answer(self) -> Int[Tensor, "n"]:
        """The clean prompts' answers."""
        ...

    @property
    def wrong(self) -> Int[Tensor, "n"]:
        """The tokens they are contrasted with."""
        ...


@public()
def batches(model: Model, pairs: AlignedPairs) -> tuple[Batch, Batch]:
    """The clean and the corrupted prompts of some pairs as batches, both with the answers of the clean ones.

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
    both = (
        Batch(tokens, pairs.keep, bos).numbered() for tokens in (pairs.clean_tokens, pairs.corrupt_tokens)
    )
    clean, corrupt = (batch.with_answers(pairs.answer, pairs.wrong) for batch in both)
    return clean, corrupt


def paired(
    text: Text, clean: Prompts | Data, corrupt: Prompts | Data, *, prepend_bos: bool = True
) -> Batch | Pairs:
    """Clean and corrupted prompts as data: one batch that holds both, or `Pairs` of files and the like.

    Errors: ValueError for another number of prompts, prompts of different lengths or padding, or a pair whose two
    prompts are the same, so that no intervention could change anything.
    """
    if not (is_prompts(clean) and is_prompts(corrupt)):
        return Pairs(clean, corrupt)
    first, second = (text.batch(x, prepend_bos=prepend_bos) for x in (clean, corrupt))
    if len(first) != len(second):
        raise ValueError(
            f"one corrupted prompt per clean prompt is required, got {len(second)} for {len(first)}"
        )
    if first.tokens.shape != second.tokens.shape or not torch.equal(first.real, second.real):
        raise ValueError(
            "clean and corrupted prompts must have the same length, token for token: got "
            f"{first.lengths.tolist()[:8]} and {second.lengths.tolist()[:8]} tokens"
        )
    same = ((first.tokens == second.tokens) | ~first.real).all(1).nonzero().flatten().tolist()
    if same and first.memory is None:
        raise ValueError(
            f"a corrupted prompt must differ from its clean one, got the same in rows {same[:8]}"
        )
    return replace(first, corrupt=second.tokens)


@dataclass(frozen=True, eq=False)
class Contrast:
    """Pairs of prompts by what is done to them, both with the clean prompts' answers."""

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
        """What is known of the run that is intervened on, and of the other one, by their names: clean, corrupt."""
        clean, corrupt = (other, own) if self.direction == "denoise" else (own, other)
        return {"clean": clean, "corrupt": corrupt}


@dataclass(frozen=True, eq=False)
class Watched:
    """Passes to the final stream of one model, and the metric of their rows."""

    model: Transformer
    metric: Metric
    reference: Float[Tensor, "b n d"] | None = None
    """What a metric that compares compares with: the columns it sees of each example's clean run."""

    def value(
        self, stream: Float[Tensor, "r p d"], batch: Batch, example: Int[Tensor, "r"] | None = None
    ) -> Float[Tensor, "r"]:
        """The metric of every row; `example`: which pair it belongs to, None where row i is pair i."""
        whose = torch.arange(len(batch), device=stream.device) if example is None else example
        seen, batch = self.metric.sees(stream, batch), batch.to(stream.device)
        return self.metric.of(Outcome(self.model, seen, batch, sent(whose, stream.device), self.reference))

    def beside(self, stream: Float[Tensor, "r p d"], batch: Batch) -> Watched:
        """The same with the final stream of these rows' clean run, if the metric compares."""
        return replace(self, reference=self.metric.sees(stream, batch)) if self.metric.compares else self

    def recorded(self, batch: Batch, reads: Sequence[Read] = ()) -> Observation:
        """A pass without gradients."""
        return observe(self.model, batch, reads, stop=self.model.config.n_layers)

    def differentiated(
        self,
        batch: Batch,
        reads: Sequence[Read],
        edits: Sequence[Edit] = (),
        example: Int[Tensor, "r"] | None = None,
    ) -> Observation:
        """A pass with the gradients of the rows' metrics; rows do not meet, so their sum will do."""

        def total(stream: Tensor) -> Float[Tensor, ""]:
            return self.value(stream, batch, example).sum()

        stop = self.model.config.n_layers
        return observe(self.model, batch, reads, edits, stop=stop, metric=total)


def site_names(site: str, config: ModelConfig) -> tuple[str, ...]:
    """The full names of a site in every layer, or the one name of a site outside the blocks.

    A full name with a layer stands for that layer alone. KeyError for unknown sites; ValueError for those after the
    final stream.
    """
    name = site if "hook_" in site else sites.full_name(site)
    if sites.is_of_block(name):
        names = tuple(f"blocks.{layer}.{name}" for layer in range(config.n_layers))
        sites.find(names[0], config)
        return names
    if sites.find(name, config)[1] is None and name not in sites.EMBEDDING_SITES:
        raise ValueError(f"a site before the final norm is required, {name!r} comes after it")
    return (name,)
