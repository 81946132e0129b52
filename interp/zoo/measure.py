"""Measurements of small trained models: the numbers of their cards, each a plain function of model and data.

Text enters through `encode` (words -> ids, no BOS added), so any tokenizer will do. Every function runs without
gradients and in batches of `BATCH` rows; the batch size never changes a number.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp import tasks
from interp.core.patterns import induction_score
from interp.model import Read, Tap, Transformer, next_token_loss
from interp.model.parts import Part
from interp.tasks import FactPrompt, IndirectObject

BATCH = 64
"""Rows per forward pass."""

Encode = Callable[[str], Sequence[int]]
"""Words -> token ids, without BOS."""
CardEntry = dict[str, float | int | str]
"""One number of a card: `value`, `n`, `definition`."""


def prose_windows(tokens: Int[Tensor, "n"], *, width: int, stride: int, bos: int) -> Int[Tensor, "b p"]:
    """Rows `[bos, width - 1 consecutive tokens]`, one every `stride` tokens.

    With `stride = 20` the token at index 120 of one row stands at index 20 of the fifth row after it, so a difference
    between the two indices compares the same tokens with more and with less context.
    """
    if len(tokens) < width - 1:
        raise ValueError(f"at least {width - 1} tokens are required for one row, got {len(tokens)}")
    rows = tokens.unfold(0, width - 1, stride)
    return torch.cat([torch.full((len(rows), 1), bos), rows], dim=1)


@torch.inference_mode()
def token_losses(model: Transformer, tokens_bp: Int[Tensor, "b p"]) -> Float[Tensor, "b p-1"]:
    """Cross-entropy in nats of every token after the first; column i is the loss of token index i + 1."""
    return torch.cat([next_token_loss(model(rows), rows) for rows in tokens_bp.split(BATCH)])


def in_context_learning_score(losses: Float[Tensor, "b n"], *, late: int, early: int) -> float:
    """Mean loss at token index `late` minus at `early` (index 0 is BOS), in nats; negative = context helps.

    Olsson et al. 2022 use tokens 500 and 50 of 512. `losses` is the answer of `token_losses`.
    """
    return float(losses[:, late - 1].mean() - losses[:, early - 1].mean())


@torch.inference_mode()
def induction_scores(
    model: Transformer, tokens_bp: Int[Tensor, "b p"], *, period: int
) -> Float[Tensor, "l h"]:
    """`induction_score` of every head on `[bos, the same period distinct tokens over and over]`, mean over rows."""
    reads = [
        Read(f"blocks.{layer}.attn.hook_pattern", via=partial(induction_score, period=period))
        for layer in range(model.config.n_layers)
    ]
    parts = []
    for rows in tokens_bp.split(BATCH):
        tap = Tap(reads=reads)
        model(rows, tap)
        parts.append(torch.stack([tap.values[read] for read in reads], dim=1))
    return torch.cat(parts).mean(0)


@torch.inference_mode()
def completes(
    model: Transformer, encode: Encode, bos: int, prompts: Sequence[tuple[str, str]]
) -> Bool[Tensor, "c"]:
    """For each (prompt, continuation), whether greedy decoding of `bos + prompt` writes exactly the continuation.

    One teacher-forced pass decides it: greedy decoding writes these tokens if and only if each is the argmax after
    those before it.
    """
    encoded = [([bos, *encode(prompt)], list(encode(answer))) for prompt, answer in prompts]
    verdicts = []
    for group in _batches(encoded):
        tokens = _right_padded([prompt + answer for prompt, answer in group], bos)
        best = model(tokens).argmax(-1)
        for row, (prompt, answer) in enumerate(group):
            span = slice(len(prompt), len(prompt) + len(answer))
            verdicts.append(torch.equal(best[row, span.start - 1 : span.stop - 1], tokens[row, span]))
    return torch.tensor(verdicts)


def states(model: Transformer, encode: Encode, bos: int, prompts: Sequence[FactPrompt]) -> Bool[Tensor, "c"]:
    """For each fact prompt, whether greedy decoding writes exactly the object and a full stop."""
    return completes(model, encode, bos, [(p.prompt, f"{p.answer}.") for p in prompts])


@torch.inference_mode()
def answer_margins(
    model: Transformer, encode: Encode, bos: int, prompts: Sequence[IndirectObject]
) -> Float[Tensor, "c"]:
    """Logit of the answer minus logit of the wrong name, at the first token in which the two differ."""
    encoded = []
    for prompt in prompts:
        right, wrong = list(encode(prompt.answer)), list(encode(prompt.wrong))
        shared = next(i for i, (a, b) in enumerate(zip(right, wrong, strict=False)) if a != b)
        encoded.append(([bos, *encode(prompt.prompt), *right[:shared]], [right[shared], wrong[shared]]))
    margins = []
    for group in _batches(encoded):
        tokens = _right_padded([context for context, _ in group], bos)
        last = torch.tensor([[len(context) - 1] for context, _ in group])
        pair = torch.tensor([candidates for _, candidates in group])
        logits_bc = model(tokens, logits_at=last)[:, 0].gather(1, pair)
        margins.append(logits_bc[:, 0] - logits_bc[:, 1])
    return torch.cat(margins)


def card_numbers(
    model: Transformer, encode: Encode, validation: Int[Tensor, "n"], *, bos: int = 0
) -> dict[str, CardEntry]:
    """Every number of a model's card, by name: its value, the count n it was measured on, and its definition in words.

    `validation` is held-out prose as token ids; the other material comes from `interp.tasks` with fixed seeds.
    """
    return (
        _prose_numbers(model, validation, bos)
        | induction_number(model, bos)
        | task_numbers(model, encode, bos)
    )


def task_numbers(model: Transformer, encode: Encode, bos: int) -> dict[str, CardEntry]:
    """The numbers of the card about facts and indirect objects, which need no validation prose."""
    facts = tasks.load_facts()
    trained, held_out = tasks.fact_prompts(table=facts), tasks.fact_prompts(tasks.HELD_OUT_PHRASINGS, facts)
    distant = tasks.fact_prompts(tasks.DISTANT_PHRASINGS, facts)
    pairs = tasks.IndirectObjects(2000, held_out=True).sentences(np.random.default_rng(2))
    first = completes(model, encode, bos, [(p.prompt, p.answer) for p in pairs])
    return {
        "facts_trained_phrasings": _entry(
            states(model, encode, bos, trained).float().mean(),
            len(trained),
            "share of prompts after which greedy decoding writes exactly the object and a full stop; n = prompts, "
            f"{len(facts)} facts in 4 trained phrasings each",
        ),
        "facts_held_out_phrasing": _entry(
            states(model, encode, bos, held_out).float().mean(),
            len(held_out),
            "the same in a phrasing that training never contains for any fact (The name of X's capital is); n = "
            "prompts, one per fact",
        ),
        "facts_distant_phrasing": _entry(
            states(model, encode, bos, distant).float().mean(),
            len(distant),
            "the same in a harder unseen phrasing, the country far from the object (In X, the name of the capital is); "
            "n = prompts, one per fact",
        ),
        "indirect_object_unseen_pairs": _entry(
            (answer_margins(model, encode, bos, pairs) > 0).float().mean(),
            len(pairs),
            "share of sentences in which the receiver's logit is above the giver's, over name pairs that training "
            "never contains in either role; n = sentences",
        ),
        "indirect_object_unseen_pairs_top1": _entry(
            first.float().mean(),
            len(pairs),
            "the same, but the receiver must be the most likely next token of all",
        ),
    }


def _prose_numbers(model: Transformer, validation: Int[Tensor, "n"], bos: int) -> dict[str, CardEntry]:
    """The card's numbers on held-out prose: mean loss, and the in-context-learning score."""
    losses = token_losses(model, prose_windows(validation, width=128, stride=127, bos=bos))
    sliding = token_losses(model, prose_windows(validation, width=128, stride=20, bos=bos))
    return {
        "validation_loss": _entry(
            losses.mean(),
            losses.numel(),
            "mean loss in nats per token on held-out prose, in rows of BOS and 127 tokens; n = tokens",
        ),
        "in_context_learning_score": _entry(
            in_context_learning_score(sliding, late=120, early=20),
            len(sliding),
            "mean loss at token index 120 minus at token index 20 (BOS is index 0) on held-out prose, nats; negative "
            "= context helps; n = rows of 128, one every 20 tokens, so that both indices see the same tokens",
        ),
    }


def induction_number(model: Transformer, bos: int) -> dict[str, CardEntry]:
    """The card's number about repeated random tokens: the best prefix-matching score, and its head."""
    rows = tasks.RepeatedTokens(25, 4, 10).tokens(
        model.config.d_vocab, bos=bos, generator=np.random.default_rng(1)
    )
    scores_lh = induction_scores(model, rows, period=25)
    layer, head = divmod(int(scores_lh.argmax()), model.config.n_heads)
    definition = (
        "prefix-matching score of the best head on BOS and 25 distinct random tokens four times: attention to the "
        "tokens after earlier occurrences of the query's token, summed per query, mean over queries; n = rows"
    )
    return {
        "best_induction_score": {
            **_entry(scores_lh.max(), len(rows), definition),
            "head": str(Part("head", layer, head)),
        }
    }


def _entry(value: Tensor | float, n: int, definition: str) -> CardEntry:
    return {"value": round(float(value), 4), "n": n, "definition": definition}


def _batches(items: list[tuple[list[int], list[int]]]) -> Iterator[list[tuple[list[int], list[int]]]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


def _right_padded(rows: list[list[int]], fill: int) -> Int[Tensor, "b p"]:
    """The rows as one tensor, filled on the right; under a causal mask the fill cannot change a row's logits."""
    width = max(len(row) for row in rows)
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows])
