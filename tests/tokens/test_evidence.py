"""Evidence: slow loops, closed forms of chance against drawn orders, and a model whose deciding token is planted."""

import copy
import itertools

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.tokens import evidence, token_attribution
from tests.configs import build, some_tokens
from tests.tiny import hooked


def result(value: Tensor) -> xr.Dataset:
    return xr.Dataset({"value": (("prompt", "pos"), value.numpy())})


def slow(value: list[float], known: list[bool]) -> tuple[float, float, float]:
    """The scores of one prompt, by walking down its order; equal values: others first."""
    order = sorted(range(len(value)), key=lambda i: (-value[i], known[i]))
    first = next(place for place, i in enumerate(order) if known[i])
    positive = [max(x, 0.0) for x in value]
    mass = sum(x for x, is_so in zip(positive, known, strict=True) if is_so)
    return (mass / sum(positive) if sum(positive) else 0.0, 1 / (first + 1), first)


def test_scores_are_those_of_a_slow_walk_padding_and_ties_included() -> None:
    g = torch.Generator().manual_seed(0)
    value = torch.randint(-3, 4, (40, 9), generator=g).double()
    value[::3, 7:] = torch.nan
    known = torch.rand(40, 9, generator=g) < 0.3
    known[:, 2] = True
    found = evidence(result(value), known)
    for row in range(40):
        n = 7 if row % 3 == 0 else 9
        expected = slow(value[row, :n].tolist(), known[row, :n].tolist())
        np.testing.assert_allclose(found.each[row], expected)
    np.testing.assert_allclose(found.value, found.each.mean("prompt"))
    assert found.n.values.tolist() == [40] * 3 and found.low.isnull().values.tolist() == [False, False, True]
    some = evidence(result(value), known, among=torch.arange(9).expand(40, 9) > 0)
    np.testing.assert_allclose(some.each[1], slow(value[1, 1:].tolist(), known[1, 1:].tolist()))


@pytest.mark.parametrize(("n", "m"), [(5, 1), (6, 2), (4, 4)])
def test_chance_is_the_mean_over_all_orders(n: int, m: int) -> None:
    orders = torch.tensor(list(itertools.permutations(range(1, n + 1)))).double()
    known = (torch.arange(n) < m).expand(len(orders), n)
    found = evidence(result(orders), known)
    np.testing.assert_allclose(found.value, found.null, rtol=1e-12)


@pytest.mark.parametrize("rows", [4, 511, 512])
def test_counts_of_probes_ask_for_more_prompts_before_an_interval(rows: int) -> None:
    value = torch.randn(rows, 6, generator=torch.Generator().manual_seed(0))
    found = evidence(result(value), (torch.arange(6) < 1).expand(rows, 6))
    assert found.low.notnull().values.tolist() == [True, True, rows >= 512], "of shares always"


def test_what_has_no_evidence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"known must have a place for every token, \[2, 3\], got \[2, 4\]"):
        evidence(result(torch.zeros(2, 3)), torch.ones(2, 4).bool())
    with pytest.raises(ValueError, match="requires evidence among its tokens"):
        evidence(result(torch.zeros(2, 3)), torch.zeros(2, 3).bool())
    with pytest.raises(ValueError, match="value of attribution must have 6 finite numbers, got 5"):
        evidence(result(torch.tensor([[0.0, torch.inf, 1.0], [0.0, 1.0, 2.0]])), torch.ones(2, 3).bool())


def test_the_token_that_a_model_without_layers_between_reads_is_on_top() -> None:
    """Attribution of a bigram model, all of whose answer comes from the last token."""
    model, tokens = HookedTransformer(copy.deepcopy(build("no-norm"))), some_tokens()
    network = model.transformer
    for layer in range(2):
        for parameter in network.block(layer).parameters():
            parameter.zero_()
    found = token_attribution(model, tokens, [3, 14, 7], method="gradient_x_input")
    last = (torch.arange(tokens.shape[1]) == tokens.shape[1] - 1).expand(tokens.shape)
    size = found.assign(value=abs(found.value))
    assert evidence(size, last).value.values.tolist() == [1.0, 1.0, 0.0]
    assert float(interp.tokens.evidence(size, ~last).value.sel(score="share")) == 0.0


def test_nan_at_a_token_is_no_padding() -> None:
    padded = token_attribution(hooked(), ["a cat sat", "a cat"], 3, method="gradient_x_input")
    known = torch.tensor([[False, True, False, False]] * 2)
    assert evidence(padded, known).sizes["prompt"] == 2 and bool(padded.value.isnull().any())
    hole = padded.where((padded.prompt != 0) | (padded.pos != 1))
    with pytest.raises(ValueError, match=r"value of attribution must have \d+ finite numbers, got"):
        evidence(hole, known)
