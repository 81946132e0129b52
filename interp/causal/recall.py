"""Does a model still recite what it memorised? Given continuations, token by token, whole and short-circuited.

Memorised is what greedy decoding writes exactly (Carlini et al. 2023, arXiv:2202.07646). Under an intervention the
share of continuations that survive, and of their tokens, says how much of the memory needs what was taken away. Menta
et al. 2025 (arXiv:2501.05078) measure the same: exact match, token accuracy, entropy of the completion.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.causal.ablation_effects import Metrics, alike, effects
from interp.causal.short_circuit import INTERVENTION, Blocks, block_groups, block_variants
from interp.core.results import labelled
from interp.core.shapes import shape_text
from interp.core.stats import Moments
from interp.data.batch import Batch
from interp.data.text import Prompts
from interp.passes.metrics import Metric, Outcome
from interp.passes.observe import Subject

if TYPE_CHECKING:
    import xarray as xr


def recall(
    model: Subject,
    prompts: Prompts,
    span: Bool[Tensor, "b p"],
    blocks: Blocks | None = None,
    *,
    batch_size: int = 32,
) -> "xr.Dataset":
    """How well a model recites given continuations, whole and short-circuited: Dataset[block], the first block "none".

    For each of `MEASURES` its value, the mean over prompts, with `_low` and `_high`, 95 %; `_each` [prompt, block]; and
    `_change`, value minus that of the whole model, with the interval of that difference over prompts:

        exact_match     1 where every token of the continuation is the most probable one, else 0
        token_accuracy  the share of its tokens that are
        loss            the mean of -log p over its tokens, nats
        entropy         the mean entropy of the distributions that predict its tokens, nats

    The model reads the true continuation (teacher forcing); greedy decoding writes it exactly if `exact_match` is 1.
    prompts: with their continuations. span: `[prompt, pos]`, True at the continuation; `continuations` makes both.
    blocks: as in `short_circuit`.
    Errors: ValueError for a span of another shape, without a token in some prompt, in the first column or at padding;
    and those of `short_circuit`.

    Example:
        >>> found = recall(model, *continuations(model, [("The cat sat", " on the mat")]), blocks=[0, range(1, 3)])
        >>> found.exact_match.block.values.tolist()
        ['none', '0', '1-2']
    """
    network = model.transformer
    batch = model.text.batch(prompts)
    _check_span(span, batch)
    groups = block_groups(
        range(network.config.n_layers) if blocks is None else blocks, network.config.n_layers
    )
    variants = block_variants(groups, network.config.n_heads, batch.tokens.shape[1])
    table: dict[str, tuple[Sequence[str], Tensor]] = {}
    for name, measure in MEASURES.items():
        found = effects(
            network,
            batch,
            measure.of(span),
            alike(variants),
            batch_size=batch_size,
        )
        change = torch.cat((torch.zeros_like(found.effect[:, :1]), found.effect), 1)
        each = found.base[:, None] + change
        table |= {**Moments.of(each).cells(name, ("block",)), f"{name}_each": (("prompt", "block"), each)}
        table |= Moments.of(change).cells(f"{name}_change", ("block",))
    result = labelled(
        "recall",
        table,
        coords={"block": ["none", *groups]},
        attrs={"intervention": INTERVENTION, "n": len(batch), "interval": "95 % over prompts"},
    )
    for name, measure in MEASURES.items():
        result[name].attrs["unit"] = measure.unit
    return result


def continuations(model: Subject, pairs: Sequence[tuple[str, str]]) -> tuple[Batch, Bool[Tensor, "b p"]]:
    """Prompts with their continuations as one batch (BOS first), and where the continuations stand.

    Both are tokenised apart, as if the model had been given the prompt alone.

    Example:
        >>> batch, span = continuations(model, [("The cat sat", " on the mat")])
        >>> model.to_string(batch.tokens[0, span[0]])
        ' on the mat'
    """
    if not pairs or not all(text for _, text in pairs):
        raise ValueError("at least one prompt with a continuation is required, got none")
    rows = [(model.text.ids(prompt), model.text.tokenizer.encode(more)) for prompt, more in pairs]
    batch = model.text.batch(Batch.of([[*start, *more] for start, more in rows]))
    column = torch.arange(batch.tokens.shape[1])
    starts = torch.tensor([len(start) for start, _ in rows])[:, None]
    return batch, (column >= starts) & batch.real


@dataclass(frozen=True)
class Measure:
    """How well the tokens of a span are predicted: a score per token, and what becomes of the scores of a prompt."""

    unit: str
    score: Callable[[Float[Tensor, "r n v"], Int[Tensor, "r n"]], Float[Tensor, "r n"]]
    """From logits and the tokens that they should predict."""
    whole: bool = False
    """Whether the worst token counts instead of the mean."""

    def of(self, span: Bool[Tensor, "b p"]) -> Metrics:
        """The measure of any of the prompts with these spans."""
        return lambda rows: self.metric(span[rows])

    def metric(self, span: Bool[Tensor, "b p"]) -> Metric:
        """The measure as a metric of prompts with these spans."""

        def value(outcome: Outcome) -> Float[Tensor, "r"]:
            tokens = outcome.batch.tokens[:, 1:]
            inside = span.to(tokens.device)[outcome.example, 1:]
            scores = self.score(outcome.logits()[:, :-1], tokens)
            if self.whole:
                return scores.masked_fill(~inside, torch.inf).amin(1)
            return scores.masked_fill(~inside, 0.0).sum(1) / inside.sum(1)

        return Metric("recall", self.unit, value, everywhere=True)


def hits(logits: Float[Tensor, "r n v"], tokens: Int[Tensor, "r n"]) -> Float[Tensor, "r n"]:
    """1 where the token is the most probable one, else 0."""
    return (logits.argmax(-1) == tokens).to(logits)


def losses(logits: Float[Tensor, "r n v"], tokens: Int[Tensor, "r n"]) -> Float[Tensor, "r n"]:
    """-log p of every token, in nats."""
    return F.cross_entropy(logits.mT, tokens, reduction="none")


def entropies(logits: Float[Tensor, "r n v"], tokens: Int[Tensor, "r n"]) -> Float[Tensor, "r n"]:
    """The entropy over the vocabulary at every position, in nats; the tokens do not matter."""
    return torch.special.entr(logits.softmax(-1)).sum(-1)


MEASURES: Mapping[str, Measure] = MappingProxyType(
    {
        "exact_match": Measure("share of prompts", hits, whole=True),
        "token_accuracy": Measure("share of tokens", hits),
        "loss": Measure("nats per token", losses),
        "entropy": Measure("nats per token", entropies),
    }
)
"""What `recall` measures."""


def _check_span(span: Bool[Tensor, "b p"], batch: Batch) -> None:
    if span.dtype != torch.bool or span.shape != batch.tokens.shape:
        raise ValueError(
            f"a boolean span of shape {shape_text(batch.tokens.shape)} is required, got {span.dtype} of shape "
            f"{shape_text(span.shape)}"
        )
    before = (batch.real.roll(1, 1) & batch.real).to(span.device)
    before[:, 0] = False
    if not bool(span.any(1).all()) or bool((span & ~before).any()):
        raise ValueError(
            "a span of at least one token in every prompt is required, none of them the first or padding"
        )
