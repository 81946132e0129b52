"""Several reductions of the same values: each gives what it gives alone, under its own name."""

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from interp.core.extremes import TopRows
from interp.core.named import Only, Parts, Several
from interp.core.sketches import quantiles
from interp.core.stats import Means, Reduction, Rows
from tests.core.splits import CUTS, ORDERS, identical, merged, whole

REDUCTIONS: dict[str, Reduction] = {
    "top": TopRows(3, "x"),
    "spread": quantiles("x", cells=1),
}


def values() -> dict[str, Tensor]:
    return {"x": torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), "tokens": torch.arange(12)}


@settings(max_examples=30)
@given(cuts=CUTS, order=ORDERS)
def test_each_part_is_what_it_is_alone(cuts: list[int], order: list[int]) -> None:
    found = merged(Several(REDUCTIONS), values(), cuts, order)
    assert isinstance(found, Parts)
    for name, reduction in REDUCTIONS.items():
        assert identical(found.parts[name], whole(reduction, values()))


def test_only_some_of_the_values_are_reduced() -> None:
    found = Only(("x",), Means).of(values(), torch.arange(12))
    assert identical(found, Means.of({"x": values()["x"]}))


def test_parts_of_parts_and_of_any_tensor_names_survive_a_round_trip() -> None:
    """`Means` and `Rows` have names with "/" of their own."""
    inner = Several({"mean": Only(("x",), Means), "all": Rows})
    nested = Several({"a": inner, "b": quantiles("x")})
    found = nested.of(values(), torch.arange(12))
    assert len(found.tensors()) > 5
    assert identical(nested.load(found.tensors()), found)


def test_errors_say_what_is_required() -> None:
    for names in ([], [""], ["a/b"]):
        with pytest.raises(ValueError, match='reductions with names without "/" are required, got'):
            Several(dict.fromkeys(names, Means))
    with pytest.raises(ValueError, match=r"a value named 'y' is required, .*; got \['tokens', 'x'\]"):
        Only(("y",), Means).of(values())
    with pytest.raises(ValueError, match=r"a value named 'topp' is required, nearest: top"):
        Several(REDUCTIONS).load({"topp/rows": torch.ones(1)})
