"""Head scores token by token, straight from their definitions: what the fast kernels are held against."""

import math

from torch import Tensor


def slow_scores(pattern_qk: Tensor, tokens: list[int]) -> tuple[dict[str, float], int]:
    """Every score of a pattern; column 0 is BOS. Also how many queries have an earlier copy."""
    queries = range(1, len(tokens))
    period = next(i for i in range(2, len(tokens)) if tokens[i] == tokens[1]) - 1
    near = range(min(5, period - 1))
    lists: dict[str, list[float]] = {
        "previous_token": [float(pattern_qk[i, i - 1]) for i in queries],
        "duplicate_token": [],
        "induction": [],
        "current_token": [float(pattern_qk[i, i]) for i in queries],
        "first_token": [float(pattern_qk[i, 0]) for i in queries],
        "local": [sum(float(pattern_qk[i, i - d]) for d in near if i - d >= 1) for i in queries],
        "entropy": [_entropy(pattern_qk[i].tolist()) / math.log(i + 1) for i in queries],
    }
    for i in queries:
        copies = [j for j in range(1, i) if tokens[j] == tokens[i]]
        if copies:
            lists["duplicate_token"].append(sum(float(pattern_qk[i, j]) for j in copies))
            lists["induction"].append(sum(float(pattern_qk[i, j + 1]) for j in copies))
    return {name: sum(x) / len(x) for name, x in lists.items()}, len(lists["induction"])


def causal(weights: Tensor) -> Tensor:
    """The weights as a causal pattern."""
    return weights.tril() / weights.tril().sum(-1, keepdim=True)


def tokens_of(period: int, n: int) -> list[int]:
    """BOS and a repeat of `period` tokens, n in all."""
    return [0, *(1 + i % period for i in range(n - 1))]


def _entropy(row: list[float]) -> float:
    whole = sum(row)
    return -sum(a / whole * math.log(a / whole) for a in row if a > 0)
