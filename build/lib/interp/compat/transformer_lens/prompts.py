"""`test_prompt`: what a model makes of a prompt and its answers, written to stdout."""

# ruff: noqa: PT028 - the name is upstream's; it is no test

import sys
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


def test_prompt(
    prompt: str,
    answer: str | list[str],
    model: Any,
    prepend_space_to_answer: bool = True,
    print_details: bool = True,
    prepend_bos: bool | None = None,
    top_k: int = 10,
) -> None:
    """Write rank, logit and probability of the answer's tokens after a prompt, and the `top_k` likeliest tokens.

    Of several answers only the first token of each is looked at. The numbers: `interp.logit_lens`, or the logits.

    prepend_space_to_answer: where it does not begin with one. prepend_bos: None = the model's default.
    """
    answers = [answer] if isinstance(answer, str) else answer
    if prepend_space_to_answer:
        answers = [text if text.startswith(" ") else f" {text}" for text in answers]
    several = len(answers) > 1
    after = model.to_tokens(answers, prepend_bos=False)
    after = after[:, :1] if several else after
    before = model.to_tokens(prompt, prepend_bos=prepend_bos).repeat(len(after), 1)
    tokens = torch.cat([before, after], dim=1)
    pieces = [model.to_str_tokens(text, prepend_bos=False) for text in answers]
    start = len(shown := model.to_str_tokens(prompt, prepend_bos=prepend_bos))
    if print_details:
        _write(f"Tokenized prompt: {shown}")
        _write(f"Tokenized answers: {pieces}" if several else f"Tokenized answer: {pieces[0]}")
    logits = model(tokens)
    ranks: list[list[tuple[str, int]]] = []
    for step in range(1 if several else len(pieces[0])):
        texts = [piece[step] for piece in pieces]
        found = _ranks(logits[:, start + step - 1], tokens[:, start + step])
        ranks.append(list(zip(texts, found, strict=True)))
        if print_details:
            _details(logits[:, start + step - 1], tokens[:, start + step], ranks[-1], top_k, model)
    _write(f"Ranks of the answer tokens: {ranks if several else [row[0] for row in ranks]}")


test_prompt.__test__ = False  # type: ignore[attr-defined]


def _ranks(logits: Float[Tensor, "b v"], tokens: Int[Tensor, "b"]) -> list[int]:
    """How many tokens come before each of these in the order of their probability."""
    order = logits.softmax(-1).argsort(descending=True)
    found: list[int] = order.argsort(-1)[torch.arange(len(tokens)), tokens.cpu()].tolist()
    return found


def _details(
    logits: Float[Tensor, "b v"],
    tokens: Int[Tensor, "b"],
    ranks: list[tuple[str, int]],
    top_k: int,
    model: Any,
) -> None:
    probs = logits.softmax(-1)
    _write(f"Performance on answer token{'s' if len(ranks) > 1 else ''}:")
    for i, (text, rank) in enumerate(ranks):
        logit, prob = float(logits[i, tokens[i]]), float(probs[i, tokens[i]])
        _write(f"Rank: {rank: <8} Logit: {logit:5.2f} Prob: {prob:6.2%} Token: |{text}|")
    best = probs[0].argsort(descending=True)[:top_k]
    for i, token in enumerate(best):
        logit, prob = float(logits[0, token]), float(probs[0, token])
        _write(f"Top {i}th token. Logit: {logit:5.2f} Prob: {prob:6.2%} Token: |{model.to_string(token)}|")


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
