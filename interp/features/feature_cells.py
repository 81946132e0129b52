"""Features and random directions beside them: which tokens count, and what each one reads and writes there.

A random direction in a feature's place is read as relu(cos(x, r) - c) times the mean of ||x||, and written with the
norm of the feature's decoder row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.stats import uniforms
from interp.core.transfers import to_device
from interp.data.batch import Batch
from interp.data.text import Text
from interp.features.dictionary import Dictionary
from interp.features.dictionary_metrics import counted_tokens
from interp.model.tap import Read, Trace
from interp.passes.question import NotFiniteError


def left_out_of(text: Text, skip_bos: bool) -> LeftOut:
    """The rule for a tokenizer's tokens: with `skip_bos` BOS in front of a text, and ends of texts and turns."""
    marks = (text.eos_id, text.turn_end, *text.end_ids) if skip_bos else ()
    return LeftOut(skip_bos, text.bos_id, tuple(sorted({i for i in marks if i is not None})))


@dataclass(frozen=True)
class LeftOut:
    """Which tokens do not count by what they are."""

    skip_bos: bool
    bos_id: int | None
    ends: tuple[int, ...]

    def counted(self, batch: Batch) -> Bool[Tensor, "b p"]:
        """Mask of the tokens that count."""
        counted = counted_tokens(batch, self.bos_id, self.skip_bos)
        for end in self.ends:
            counted = counted & (batch.tokens != end)
        return counted


class CountedTexts(NamedTuple):
    """The vectors of a batch, text by text."""

    x: Float[Tensor, "t q d"]
    tokens: Int[Tensor, "t q"]
    counted: Bool[Tensor, "t q"]
    special: Int[Tensor, "t"]
    """How many tokens of each text are left out for what they are."""
    huge: Int[Tensor, "t"]
    """How many are left out for their norm."""


@dataclass(frozen=True, eq=False)
class CountedVectors:
    """A function from a batch to the vectors at the tokens that count, by text."""

    dictionary: Dictionary
    site: str
    left_out: LeftOut
    largest_norm: float | None

    def __call__(self, trace: Trace, batch: Batch) -> CountedTexts:
        """The vectors of a batch, by text.

        Raises:
            NotFiniteError: numbers that are NaN or infinite.
            ValueError: a dictionary that reads head by head.
        """
        x = self.dictionary.vectors(trace[Read(self.site)])
        if x.ndim != 3:
            raise ValueError("a dictionary of the whole site is required, got one that reads head by head")
        if not bool((x.isfinite().all(-1) | ~batch.real).all()):
            raise NotFiniteError(f"finite values are required, some at {self.site} are NaN or infinite")
        counted = self.left_out.counted(batch)
        by_text = batch.by_text(x, batch.real, 0.0)
        tokens = batch.by_text(batch.tokens, batch.real, -1)
        usual = batch.by_text(counted.long(), batch.real, 0).bool()
        huge = self._huge(by_text, usual)
        special = (tokens >= 0) & ~usual
        return CountedTexts(by_text, tokens, usual & ~huge, special.sum(1), huge.sum(1))

    def _huge(self, x: Float[Tensor, "t q d"], counted: Bool[Tensor, "t q"]) -> Bool[Tensor, "t q"]:
        """Mask of tokens whose vector is too long beside the median of its text (of two, the smaller one)."""
        if self.largest_norm is None:
            return torch.zeros_like(counted)
        norm = x.double().norm(dim=-1).masked_fill(~counted, torch.nan)
        return norm > self.largest_norm * norm.nanmedian(1, keepdim=True).values


@dataclass(frozen=True, eq=False)
class RandomDirections:
    """Random unit vectors that are read and written in the place of features."""

    read: Float[Tensor, "c d"]
    written: Float[Tensor, "c o"]
    shift: Float[Tensor, "d"]
    """What is subtracted before reading, as the dictionary does."""

    @classmethod
    def of(cls, dictionary: Dictionary, count: int, seed: int) -> RandomDirections:
        """So many directions for a dictionary; one that gives back what it reads writes along what it reads."""
        # not torch's generator: a dictionary that was trained with the same seed began with those directions
        rows = -1 - torch.arange(2 * count)
        read, written = (
            _unit_rows(mine, width, seed)
            for mine, width in zip(rows.chunk(2), (dictionary.d_in, dictionary.d_out), strict=True)
        )
        autoencoder = not dictionary.transcodes and dictionary.d_in == dictionary.d_out
        b_dec = dictionary.b_dec.detach().double().cpu()
        shift = (
            b_dec if dictionary.apply_b_dec_to_input else torch.zeros(dictionary.d_in, dtype=torch.float64)
        )
        return cls(read, read if autoencoder else written, shift)

    def cosines(self, x: Float[Tensor, "t q d"]) -> tuple[Float[Tensor, "t q c"], Float[Tensor, "t q 1"]]:
        """The cosine of every vector, shifted, with every direction (0 for a vector of zeros), and its norm."""
        shifted = x.double() - to_device(self.shift, x.device)
        norm = shifted.norm(dim=-1, keepdim=True)
        along = shifted @ to_device(self.read, x.device).mT
        return torch.where(norm > 0, along / norm, 0.0).clamp(-1.0, 1.0), norm


def _unit_rows(rows: Int[Tensor, "n"], width: int, seed: int) -> Float[Tensor, "n d"]:
    """A random direction for each row's number."""
    normal = torch.special.ndtri(uniforms(rows, width, seed).clamp_min(2.0**-54)).mT
    return torch.nn.functional.normalize(normal, dim=1)


@dataclass(frozen=True, eq=False)
class FeatureCells:
    """Features of a dictionary, and after them as many random directions in their place."""

    tokens: CountedVectors
    null: RandomDirections
    chosen: Int[Tensor, "c"]
    """The features."""
    threshold: Float[Tensor, "c"]
    """Cosine above which each random direction is active."""
    scale: float
    """Mean norm of the vectors, in which activations of random directions are measured."""

    @property
    def dictionary(self) -> Dictionary:
        """The dictionary, fitted to the model."""
        return self.tokens.dictionary

    def activations(
        self, features: Float[Tensor, "t q s"], x: Float[Tensor, "t q d"]
    ) -> Float[Tensor, "t q w"]:
        """The activations of the cells in float64, from all features of the dictionary and the vectors."""
        own = features[..., to_device(self.chosen, features.device)].double()
        cosine, _ = self.null.cosines(x)
        random = (cosine - to_device(self.threshold, x.device)).clamp_min(0.0) * self.scale
        return torch.cat((own, random), -1)

    def rows(self) -> Float[Tensor, "w o"]:
        """The decoder rows of the features, and the random directions at their norms, on the host in float64."""
        W_dec = self.dictionary.W_dec.detach()
        own = W_dec[to_device(self.chosen, W_dec.device)].cpu().double()
        return torch.cat((own, self.null.written * own.norm(dim=1, keepdim=True)))

    def linear(
        self, x: Float[Tensor, "n d"], cell: Int[Tensor, "n"]
    ) -> tuple[Float[Tensor, "w d"], Float[Tensor, "n"], Float[Tensor, "n"]]:
        """Each cell's pre-activation as a linear function of what is read, at the scale that each vector has.

        Args:
            x: vectors.
            cell: the cell that each vector is read by.

        Returns:
            Directions D of all cells, and a factor a and a constant c of each vector: the pre-activation of its cell is
            a D[cell] . x + c, in float64. Of a random direction it is the activation, before negative numbers are cut.

        Raises:
            ValueError: matching pursuit, whose features are no such functions.
        """
        device, random = x.device, cell >= len(self.chosen)
        own, size, constant = self.dictionary.linear(x, to_device(self.chosen, device))
        at = cell % len(self.chosen)
        read, shift = (to_device(each, device) for each in (self.null.read, self.null.shift))
        norm = (x.double() - shift).norm(dim=-1)
        factor = torch.where(norm > 0, self.scale / norm, 0.0)
        beyond = -factor * (read @ shift)[at] - self.scale * to_device(self.threshold, device)[at]
        return torch.cat((own, read)), factor.where(random, size), beyond.where(random, constant[at])
