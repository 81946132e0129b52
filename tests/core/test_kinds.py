"""Kinds of numbers: settings without a meaning are refused where a record is made, by the name of their field."""

import math
import re
from collections.abc import Callable

import pytest
import torch

from interp.causal.alignment import Descent
from interp.circuits import GraphPrompt
from interp.dynamics import Langevin
from interp.editing import FineTuning, Rome
from interp.features import JumpReLU
from interp.lab.linear import Linear
from interp.lab.polar import Polar
from interp.lab.sparsity import BigBird, Longformer
from interp.lab.temperature import LogN
from interp.model.edits import Add, Scale, Set
from interp.passes.metrics import Metric
from interp.passes.sampling import Sampling
from interp.tasks.repeats import RepeatingChain

NAN, INF = math.nan, math.inf
SETTINGS: tuple[tuple[Callable[..., object], str, tuple[float, ...]], ...] = (
    (Rome, "steps", (-20, 0)),
    (Rome, "rate", (NAN, INF, -1.0, 0.0)),
    (Rome, "kl", (NAN, INF, -1.0)),
    (Rome, "decay", (NAN, INF, -1.0)),
    (Rome, "reach", (NAN, INF, -4.0)),
    (Rome, "enough", (NAN,)),
    (Rome, "ridge", (NAN, INF, -1.0)),
    (FineTuning, "rate", (NAN, INF, 0.0, 1e300)),
    (Descent, "rate", (NAN, INF)),
    (Langevin, "step", (NAN, INF)),
    (Langevin, "localisation", (NAN, INF)),
    (Langevin, "inverse_temperature", (NAN, INF)),
    (JumpReLU, "bandwidth", (NAN, INF)),
    (RepeatingChain, "concentration", (NAN, INF)),
    (Sampling, "temperature", (NAN,)),
    (lambda **fields: GraphPrompt("a", ("a",), "b", **fields), "probability", (NAN, INF, -0.1, 1.1)),
    (lambda **fields: Metric("m", "", lambda run: run, **fields), "fewest", (-1, 0)),
    (lambda **fields: Add(1.0, **fields), "scale", (NAN, INF)),
    (Scale, "factor", (NAN, INF)),
    (Linear, "eps", (NAN, INF, -1.0)),
    (Polar, "eps", (NAN, INF, -1.0)),
    (Polar, "max_power", (NAN, INF, -1.0)),
    (lambda **fields: LogN(8, **fields), "floor", (NAN, INF)),
    (lambda **fields: Longformer(4, **fields), "n_global", (-1,)),
    (lambda **fields: BigBird(4, **fields), "n_global", (-1,)),
    (lambda **fields: BigBird(4, **fields), "n_random", (-1,)),
)


@pytest.mark.parametrize(
    ("record", "name", "value"),
    [(record, name, value) for record, name, values in SETTINGS for value in values],
)
def test_settings_without_a_meaning_are_refused(
    record: Callable[..., object], name: str, value: float
) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*{re.escape(str(value))}"):
        record(**{name: value})


def test_values_of_any_dtype_of_numbers_are_taken_and_truths_refused() -> None:
    for dtype in (
        torch.uint8,
        torch.int8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float8_e5m2,
        torch.half,
    ):
        assert Add(torch.ones(3).to(dtype)).values.dtype is dtype  # type: ignore[union-attr]
    for kind in (Add, Set):
        with pytest.raises(
            ValueError, match=r"values must be a number or a tensor of real numbers.*torch\.bool"
        ):
            kind(torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("record", "name", "value"),
    [
        (Rome, "enough", INF),  # ends at once
        (Rome, "kl", 0),
        (Rome, "rate", 1),
        (Sampling, "temperature", INF),  # draws uniformly
        (Scale, "factor", -1.0),
        (Linear, "eps", 0.0),
        (Polar, "max_power", 0.0),
    ],
)
def test_settings_at_the_ends_of_their_range_are_taken(
    record: Callable[..., object], name: str, value: float
) -> None:
    assert getattr(record(**{name: value}), name) == value
