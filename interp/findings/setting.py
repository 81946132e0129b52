"""What the claims are asked of: a model, how many prompts, and what several claims share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from typing import TypeVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.attention import heads
from interp.core.stats import upcast
from interp.data.batch import Batch
from interp.data.tokenizers import Tokenizer
from interp.hooked import HookedTransformer
from interp.model.edits import Edit
from interp.model.parts import Part
from interp.model.tap import Read
from interp.passes.observe import observe
from interp.tasks import FactPrompt, IndirectObjects, RepeatedTokens, TaskPairs, fact_prompts

SEEDS = (0, 1, 2)
"""The rows that count are drawn with these seeds, a third with each."""
CHOOSING = 1000
"""Heads and layers are chosen on rows of this seed, which do not count."""
FEWEST_PROMPTS = 12
"""Rows of a claim at least."""
CHOOSERS = 24
"""Rows on which they are chosen."""
PERIOD = 25
"""Random tokens that a row of repeated tokens repeats once."""
LONGEST = 128
"""Tokens of a text that are read."""
AT_ONCE = 1024
"""Tokens of a pass."""
FEWEST_FACTS = 30
"""Facts that a model has to know for claims about facts."""
MOST_COPIED = 10**9
"""Parameters of a model of which a copy is made."""
T = TypeVar("T")


def paragraphs() -> tuple[str, ...]:
    """Ordinary English prose, on which claims about texts are asked where no texts are given.

    Returns:
        126 paragraphs of 100 to 170 words of Tolstoy's *War and Peace*, translated by L. and A. Maude (public domain).
    """
    return tuple(files(__package__).joinpath("paragraphs.txt").read_text(encoding="utf-8").splitlines())


@dataclass(frozen=True, eq=False)
class Head:
    """A head by its place."""

    layer: int
    index: int

    @property
    def part(self) -> str:
        """Its name, such as L5H3."""
        return f"L{self.layer}H{self.index}"

    @classmethod
    def of(cls, name: str) -> Head:
        """The head of a name."""
        part = Part.of(name)
        assert part.layer is not None and part.index is not None
        return cls(part.layer, part.index)


@dataclass(frozen=True, eq=False)
class Setting:
    """A model, and the prompts that claims are asked on; what several claims need is made once."""

    model: HookedTransformer
    prompts: int = 102
    """Rows of each claim that count, a third of each seed."""
    texts: Sequence[str] = field(default_factory=paragraphs)
    """Ordinary prose; the first `CHOOSERS` or a sixth choose, the others count."""
    _shared: dict[str, object] = field(default_factory=dict, repr=False)

    def by_seed(self, make: Callable[[int, int], T]) -> list[T]:
        """`make(rows, seed)` for the rows of every seed."""
        return [make(self.prompts // len(SEEDS), seed) for seed in SEEDS]

    def shared(self, name: str, make: Callable[[Setting], T]) -> T:
        """What several claims are read from, made once."""
        if name not in self._shared:
            self._shared[name] = make(self)
        return self._shared[name]  # type: ignore[return-value]

    # repeated random tokens

    def repeats(self, rows: int, seed: int) -> Batch:
        """Rows of random tokens that come twice, after BOS if there is one."""
        return Batch(RepeatedTokens(PERIOD, 2, rows, seed).tokens(self._vocabulary, bos=self._bos))

    @property
    def begins(self) -> int:
        """The column of the first random token."""
        return 0 if self._bos is None else 1

    @property
    def _bos(self) -> int | None:
        return self.model.text.bos_id if self.model.text.prepend_bos else None

    @property
    def _vocabulary(self) -> int:
        return self.model.cfg.d_vocab

    @cached_property
    def head_scores(self) -> xr.Dataset:
        """What every head does on repeated tokens of the choosing seed."""
        if not self.model.cfg.causal:
            raise ValueError("it is no decoder")
        return heads(self.model, repeats=RepeatedTokens(PERIOD, 2, 8, CHOOSING), sentences=None)

    def scores(self, score: str) -> Float[np.ndarray, "l h"]:
        """A score of every head; ValueError if they have no such score."""
        if score not in self.head_scores.score:
            raise ValueError(f"its heads have no score {score}")
        return self.head_scores["value"].sel(score=score).transpose("layer", "head").values.copy()

    def best(self, score: str, count: int = 1) -> list[Head]:
        """The heads of the highest score, first the best."""
        values = self.scores(score)
        order = np.argsort(-np.nan_to_num(values, nan=-np.inf), axis=None)[:count]
        return [Head(*map(int, np.unravel_index(i, values.shape))) for i in order]

    @property
    def few(self) -> int:
        """How many heads are called a few: 3 % of all, at least 3, but no more than a quarter."""
        count = self.model.cfg.n_layers * self.model.cfg.n_heads
        return max(1, min(count // 4, max(3, round(0.03 * count))))

    # passes

    def read(
        self, batch: Batch, reads: Sequence[Read], reduce: Callable[[Batch, list[Tensor]], Tensor]
    ) -> Tensor:
        """`reduce(batch, values)` of some rows at a time, joined along the rows; the pass ends with the last value."""
        found = []
        for part in self._parts(batch):
            seen = observe(self.model, part, list(reads), answers_only=True).trace
            found.append(reduce(part, [seen[read] for read in reads]))
        return torch.cat(found)

    def pattern(self, head: Head, batch: Batch, reduce: Callable[[Batch, Tensor], Tensor]) -> Tensor:
        """`reduce(batch, pattern)` with the pattern [b, q, k] of one head."""
        read = Read(f"blocks.{head.layer}.attn.hook_pattern")
        return self.read(batch, [read], lambda part, values: reduce(part, values[0][:, head.index].double()))

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        """Some rows at a time."""
        return batch.split(max(1, AT_ONCE // batch.tokens.shape[1]))

    def _check_predicts(self) -> None:
        """ValueError for a model that does not predict the next token."""
        if not (self.model.cfg.causal and self.model.cfg.unembed):
            raise ValueError("it does not predict the next token")

    def ends(self, batch: Batch, edits: Sequence[Edit] = ()) -> Float[Tensor, "b v"]:
        """The logits after the last token of each row, in float64 on the host; `edits` hold values of all rows."""
        self._check_predicts()
        logits = observe(self.model, batch, edits=list(edits), logits_at=batch.last()[:, None]).output
        return logits[:, 0].double().cpu()

    def losses(self, batch: Batch, edits: Sequence[Edit] = ()) -> Float[Tensor, "b n"]:
        """-log p of every token but the first, NaN at padding, in nats; `edits` hold values of no row."""
        self._check_predicts()
        found = []
        for part in self._parts(batch):
            logits = upcast(observe(self.model, part, edits=list(edits)).output[:, :-1])
            tokens, real = (x[:, 1:].to(logits.device) for x in (part.tokens, part.real))
            picked = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
            found.append((-picked).masked_fill(~real, torch.nan).double().cpu())
        return torch.cat(found)

    # ordinary text

    @cached_property
    def _text_rows(self) -> list[list[int]]:
        """The texts in tokens, cut to `LONGEST`."""
        longest = min(LONGEST, self.model.cfg.n_ctx)
        return [self.model.text.ids(text)[:longest] for text in self.texts]

    @cached_property
    def _text_batches(self) -> tuple[Batch, list[Batch]]:
        """The texts that choose, and those of every seed that count."""
        rows = self._text_rows
        choose = min(CHOOSERS, len(rows) // 6)
        counted = rows[choose:][: self.prompts]
        third = len(counted) // len(SEEDS)
        if choose < 1 or third < 1:
            raise ValueError(f"texts must be 8 or more, got {len(rows)}")
        parts = [counted[i * third : (i + 1) * third] for i in range(len(SEEDS))]
        return Batch.of(rows[:choose]), [Batch.of(part) for part in parts]

    @property
    def prose(self) -> Batch:
        """All texts."""
        return Batch.of(self._text_rows)

    @property
    def choosing_texts(self) -> Batch:
        """Texts on which heads are chosen."""
        return self._text_batches[0]

    @property
    def counted_texts(self) -> list[Batch]:
        """Texts that count, by seed."""
        return self._text_batches[1]

    @cached_property
    def text_losses(self) -> list[Tensor]:
        """The losses of every seed's texts."""
        return [self.losses(batch) for batch in self.counted_texts]

    def rarity(self, batch: Batch) -> Float[Tensor, "b n"]:
        """-log of the share that every token but the first has of all texts, NaN at padding, in nats."""
        every = torch.tensor([token for row in self._text_rows for token in row[1:]])
        shares = torch.bincount(every, minlength=self.model.cfg.d_vocab).double() / len(every)
        tokens, real = batch.tokens[:, 1:].cpu(), batch.real[:, 1:].cpu()
        return (-shares[tokens].log()).masked_fill(~real, torch.nan)

    # sentences about names

    def sentences(self, rows: int, seed: int) -> TaskPairs:
        """Indirect objects and their corruptions."""
        return IndirectObjects(rows, seed).pairs(self.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which claims about words need."""
        return self.model.text.tokenizer

    # facts

    @property
    def known(self) -> list[FactPrompt]:
        """Facts about countries that the model answers, in an order that a seed drew. ValueError for too few."""
        if len(self._known) < FEWEST_FACTS:
            raise ValueError(
                f"it knows {len(self._known)} facts about countries, {FEWEST_FACTS} are required"
            )
        return self._known

    @cached_property
    def _known(self) -> list[FactPrompt]:
        asked = list(fact_prompts())
        order = np.random.default_rng(CHOOSING).permutation(len(asked)).tolist()
        known: dict[object, FactPrompt] = {}
        for start in range(0, len(order), 64):
            some = [asked[i] for i in order[start : start + 64] if asked[i].fact not in known]
            if some:
                known |= {
                    fact.fact: fact for fact, right in zip(some, self._answered(some), strict=True) if right
                }
        return list(known.values())

    def answer_ids(self, facts: Sequence[FactPrompt]) -> Int[Tensor, "n"]:
        """The first token of each answer, as the prompt continues."""
        return torch.tensor([self.next_id(fact.prompt, fact.answer) for fact in facts])

    def next_id(self, prompt: str, answer: str) -> int:
        """The token that follows a prompt where an answer does."""
        encode = self.tokenizer.encode
        return encode(f"{prompt}{answer}")[len(encode(prompt))]

    def _answered(self, facts: Sequence[FactPrompt]) -> list[bool]:
        batch = self.model.text.batch([fact.prompt for fact in facts])
        right: Bool[Tensor, "n"] = self.ends(batch).argmax(-1) == self.answer_ids(facts)
        return right.tolist()

    # the same model without what it learned

    @property
    def is_small(self) -> bool:
        """Whether a copy of the model is little."""
        return sum(parameter.numel() for parameter in self.model.transformer.parameters()) < MOST_COPIED

    @cached_property
    def scrambled(self) -> HookedTransformer:
        """A copy whose weights are the same numbers in another order, each parameter for itself: nothing is learned."""
        generator = torch.Generator().manual_seed(CHOOSING)
        network = copy.deepcopy(self.model.transformer)
        with torch.no_grad():
            for parameter in network.parameters():
                order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
                parameter.copy_(parameter.flatten()[order].view_as(parameter))
        return HookedTransformer(network, name=f"{self.model.name}, scrambled")
