"""How well a yes-or-no guess did: F1 and its relatives from four counts, with intervals over the examples.

Counts are true positives, false positives, false negatives, true negatives, in this order.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.intervals import wilson

SCORES = ("f1", "precision", "recall", "accuracy", "balanced_accuracy", "mcc")
"""What `scores` gives, in order."""
UNITS = {name: "correlation" if name == "mcc" else "share of test examples" for name in SCORES}
DRAWS = 2000
"""Bootstrap samples behind the interval of the correlation (MCC)."""


def scores(confusion: Int[Tensor, "... 4"]) -> dict[str, Float[Tensor, "..."]]:
    """F1, precision, recall, accuracy, balanced accuracy and MCC of counts TP, FP, FN, TN; 0 where undefined.

    Example:
        >>> float(scores(torch.tensor([3, 1, 1, 5]))["precision"])
        0.75
    """
    tp, fp, fn, tn = confusion.double().unbind(-1)
    recall, specificity = _share(tp, tp + fn), _share(tn, tn + fp)
    return {
        "f1": _share(2 * tp, 2 * tp + fp + fn),
        "precision": _share(tp, tp + fp),
        "recall": recall,
        "accuracy": _share(tp + tn, tp + fp + fn + tn),
        "balanced_accuracy": (recall + specificity) / 2,
        "mcc": _share(tp * tn - fp * fn, ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)).sqrt()),
    }


def intervals(
    confusion: Int[Tensor, "k 4"], *, draws: int = DRAWS, seed: int = 0
) -> tuple[dict[str, Float[Tensor, "k"]], dict[str, Float[Tensor, "k"]]]:
    """The low and the high ends of 95 % intervals of all `scores`, over test examples; `probe` says of which kind.

    F1 is 2 j / (1 + j) with j = TP / (TP + FP + FN), so the ends of j's Wilson interval give those of F1. Resampling
    examples with replacement draws their four counts from a multinomial distribution: that is the bootstrap of MCC.
    """
    tp, fp, fn, tn = confusion.double().unbind(-1)
    ends = {
        "precision": wilson(tp, tp + fp),
        "recall": wilson(tp, tp + fn),
        "accuracy": wilson(tp + tn, tp + fp + fn + tn),
    }
    low, high = wilson(tp, tp + fp + fn)
    ends["f1"] = 2 * low / (1 + low), 2 * high / (1 + high)
    value = scores(confusion)
    (low_1, high_1), (low_0, high_0) = ends["recall"], wilson(tn, tn + fp)
    recall, specificity = value["recall"], _share(tn, tn + fp)
    balanced = value["balanced_accuracy"]
    ends["balanced_accuracy"] = (
        balanced - torch.hypot(recall - low_1, specificity - low_0) / 2,
        balanced + torch.hypot(recall - high_1, specificity - high_0) / 2,
    )
    drawn = torch.stack([_resampled(counts, draws, seed) for counts in confusion], 1)
    low, high = torch.quantile(scores(drawn)["mcc"], torch.tensor([0.025, 0.975]).double(), dim=0)
    ends["mcc"] = low, high
    return {name: pair[0] for name, pair in ends.items()}, {name: pair[1] for name, pair in ends.items()}


def _share(part: Float[Tensor, "..."], whole: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return torch.where(whole > 0, part / whole.where(whole > 0, 1.0), 0.0)


def _resampled(counts: Int[Tensor, "4"], draws: int, seed: int) -> Int[Tensor, "draws 4"]:
    """The counts of bootstrap samples of as many examples."""
    import numpy as np

    n = int(counts.sum())
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.multinomial(n, counts.double().numpy() / n, size=draws))
