"""The mode of products in `make test-strict`: what it moves, how far, where it reaches; what it changes in a sweep."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor

import interp
from interp.causal.alignment import AlignedRuns, Descent
from interp.causal.contrast import Direction
from interp.passes.packs import SweepPlan
from interp.passes.sweep import Sweep
from tests import disturbed
from tests.configs import build, some_tokens
from tests.contract.case import agree
from tests.contract.cases import CASES
from tests.disturbed import BITS, machine
from tests.loops import over, same_seeds
from tests.tolerances import assert_close

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
X, W = torch.randn(40, 64, dtype=torch.float64), torch.randn(64, 50, dtype=torch.float64)
HEADS = torch.randn(2, 4, 9, 16, dtype=torch.float64)
PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda x: x @ W,
    "with a vector": lambda x: x @ W[:, 0],
    "of two vectors": lambda x: (x[0] @ x[1])[None],
    "linear": lambda x: F.linear(x, W.T, W[0]),
    "linear in three dims": lambda x: F.linear(x.unflatten(0, (2, -1)), W.T, W[0]),
    "einsum": lambda x: torch.einsum("nd,dk->kn", x, W),
    "batched": lambda x: x.unflatten(0, (2, -1)) @ W.expand(2, 64, 50),
    "added": lambda x: torch.baddbmm(W[:20], x.unflatten(0, (2, -1)), W.expand(2, 64, 50)),
    "in place": lambda x: torch.zeros(40, 50, dtype=x.dtype).addmm_(x, W),
    "into memory": lambda x: torch.mm(x, W, out=torch.zeros(40, 50, dtype=x.dtype)),
    "vmap": lambda x: torch.func.vmap(lambda row: row @ W)(x),
    "convolution": lambda x: F.conv1d(x[None], W.T[:40, :40, None].contiguous()),
    "fused attention": lambda x: F.scaled_dot_product_attention(HEADS * x[0, 0], HEADS, HEADS),
}


def units(one: Tensor, other: Tensor) -> Tensor:
    """By how many units in the last place the numbers differ."""
    whole, _ = BITS[one.dtype]
    return one.contiguous().view(whole) - other.contiguous().view(whole)


@over("name", list(PRODUCTS))
def test_every_product_of_matrices_is_moved_and_the_same_way_again(name: str) -> None:
    product = PRODUCTS[name]
    with machine(disturbed=False):
        exact = product(X)
    with machine(disturbed=True):
        found, again = product(X), product(X)
    assert torch.equal(found, again)
    if name != "of two vectors":  # one number, which the rule may leave
        assert not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_moves_by_one_unit_at_most_up_as_often_as_down(dtype: torch.dtype) -> None:
    x, w = X.to(dtype), W.to(dtype)
    with machine(disturbed=False):
        exact = x @ w
    with machine(disturbed=True):
        steps = units(x @ w, exact)
    shares = [float((steps == step).double().mean()) for step in (-1, 0, 1)]
    each = 1 / 3 if dtype.itemsize > 2 else 1 / 64
    assert int(steps.abs().max()) == 1 and all(abs(shares[i] / each - 1) < 0.4 for i in (0, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_another_number_have_other_bits(dtype: torch.dtype) -> None:
    x, w = X.to(dtype), W.to(dtype)
    with machine(disturbed=True):
        assert not torch.equal((x @ w)[:9], x[:9] @ w)
        assert not torch.equal(x.repeat(2, 1) @ w, (x @ w).repeat(2, 1))
        same = x[:1].repeat(9, 1) @ w
    assert not torch.equal(same[0], same[1]), "two equal rows of one product differ"


def test_what_is_not_rounded_stays() -> None:
    whole = torch.arange(-60, 60).remainder(17).float().view(10, 12)
    special = torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0], [0.0, 0.0]])
    with machine(disturbed=False):
        exact = whole @ whole.T, special @ special.T
    with machine(disturbed=True):
        found = whole @ whole.T, special @ special.T
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_whatever_its_bits(dtype: torch.dtype) -> None:
    whole, _ = BITS[dtype]
    every = torch.full((3000,), -1, dtype=whole).view(dtype)
    assert every.isnan().all() and disturbed.moved(every, 0).isnan().all()


def test_it_holds_in_threads_without_gradients_and_in_backward_passes() -> None:
    with machine(disturbed=True):
        found = X @ W
        with torch.inference_mode():
            assert torch.equal(X @ W, found)
        with ThreadPoolExecutor(2) as pool:
            assert all(torch.equal(each, found) for each in pool.map(lambda _: X @ W, range(4)))
        x = X.clone().requires_grad_()
        (x @ W).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.ones_like(found) @ W.T)
    with machine(disturbed=False):
        expected = torch.ones_like(found) @ W.T
    assert not torch.equal(x.grad, expected)
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_the_formula() -> None:
    with machine(disturbed=True):
        x, w = (each[:5, :5].clone().requires_grad_() for each in (X, W))
        assert torch.autograd.gradcheck(lambda x, w: (x @ w).tanh() @ w.T, (x, w))


CODE = "import torch; x = torch.linspace(-1, 1, 900).view(30, 30); print((x @ x).double().sum().item())"


@pytest.mark.slow
def test_another_process_has_the_rule_exactly_where_the_variable_is_set() -> None:
    x = torch.linspace(-1, 1, 900).view(30, 30)
    path = os.pathsep.join([str(disturbed.PLACE), os.environ["PYTHONPATH"]])
    for asked in (True, False):
        env = {name: value for name, value in os.environ.items() if name != disturbed.NAME}
        env |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | ({disturbed.NAME: "1"} if asked else {})
        said = subprocess.run(
            [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True
        )
        with machine(disturbed=asked):
            assert float(said.stdout) == (x @ x).double().sum().item()


def test_without_the_variable_products_are_those_of_pytorch() -> None:
    before = X @ W
    with machine(disturbed=disturbed.NAME in os.environ):
        assert torch.equal(X @ W, before)
    for _ in range(2):  # and are again after it
        with machine(disturbed=True):
            assert not torch.equal(X @ W, before) or disturbed.NAME in os.environ
        assert torch.equal(X @ W, before)


# --- what it changes in a sweep -----------------------------------------------------------------------------------


def planned_and_found(
    ask: Callable[[], xr.Dataset], monkeypatch: pytest.MonkeyPatch, *, disturbed: bool
) -> tuple[list[SweepPlan], xr.Dataset]:
    """The plan of every sweep that a question makes on a machine, and what it finds there."""
    plans: list[SweepPlan] = []
    plan = Sweep._planned

    def noted(*args: Any, **options: Any) -> SweepPlan:
        plans.append(plan(*args, **options))
        return plans[-1]

    with monkeypatch.context() as patch, machine(disturbed=disturbed):
        patch.setattr(Sweep, "_planned", noted)
        same_seeds()
        return plans, ask()


def reached(plans: list[SweepPlan]) -> tuple[int, int]:
    """How many variants change anything, of how many."""
    starts = [start for plan in plans for start in plan.starts]
    return sum(not start.idle for start in starts), len(starts)


SWEEPING = (
    "Patchscope", "LateLayers", "Ablate", "CausalTrace", "KnockOut", "Patch", "Patch heads", "PathPatch", "Recall",
    "ShortCircuit", "SteeringCurve", "EdgeEffects", "DictionaryQuality", "Diff", "Diff heads", "AttributionPatch",
    "AttributionPatch heads", "AverageIndirectEffect", "FunctionVectors", "LinearRelation",
    "MissedEffects", "FeatureCircuit",
)  # fmt: skip


def on_both_machines(name: str, monkeypatch: pytest.MonkeyPatch) -> list[list[SweepPlan]]:
    """The plans of a question's sweeps here and on the other machine, where it finds the same to rounding."""
    case = CASES[name]
    model = "llama-gqa" if "llama-gqa" in case.models else case.models[0]
    batches = [] if case.alone else [case.batch(model)]
    (here, one), (there, other) = (
        planned_and_found(lambda: case.result(model, *batches), monkeypatch, disturbed=x)
        for x in (False, True)
    )
    agree(one, other)
    return [here, there]


@over("name", SWEEPING)
def test_a_question_runs_the_same_cells_and_finds_the_same_to_rounding(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a variant changes is found by bits; both sides of it are the same passes of the same shapes."""
    here, there = on_both_machines(name, monkeypatch)
    assert here and [(plan.starts, plan.packs) for plan in there] == [
        (plan.starts, plan.packs) for plan in here
    ]


@pytest.mark.parametrize("name", sorted(CASES.keys() - set(SWEEPING)))
def test_a_question_without_a_sweep_finds_the_same_to_rounding(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = on_both_machines(name, monkeypatch)
    assert not here and not there, f"{name} sweeps: it belongs into SWEEPING, in this file"


@over("site", ["resid_pre", "mlp_out", "pattern"])
@over("direction", ["denoise", "noise"])
def test_patching_a_trained_model_runs_the_cells_that_differ_and_no_more(
    site: str, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sentences whose beginnings are the same words, so that most cells by position put what is there already."""
    demo = interp.HookedTransformer.from_pretrained("demo-4l")
    clean = ["When Mary and John went to the shop, Mary gave a drink to"] * 5
    corrupt = ["When Mary and John went to the shop, John gave a drink to"] * 5
    by = ["layer", "head", "query"] if site == "pattern" else ["layer", "pos"]
    asked = functools.partial(
        interp.patch, demo, clean, corrupt, site, by=by, direction=direction,
        metric=interp.logit_difference(" John", " Mary"),
    )  # fmt: skip
    (here, one), (there, other) = (planned_and_found(asked, monkeypatch, disturbed=x) for x in (False, True))
    few, every = reached(here)
    assert 0 < few < every and reached(there) == (few, every)
    assert [plan.cost for plan in there] == [plan.cost for plan in here]
    assert one.changed.equals(other.changed)
    for name in ("value", "clean", "corrupt"):
        assert_close(torch.from_numpy(other[name].values), torch.from_numpy(one[name].values), torch.float32)


def test_an_alignment_exchanges_the_cells_that_differ_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first four tokens are the same, so that no cell there can be told from its source."""
    base, source = some_tokens(8), some_tokens(8, seed=1)
    source[:, :4] = base[:, :4]
    differing_cells = AlignedRuns.differing_cells
    for disturbed_too in (False, True):
        found: list[dict[str, list[int]]] = []

        def noted(
            self: AlignedRuns, rows: Tensor, found: list[dict[str, list[int]]] = found
        ) -> dict[str, list[int]]:
            found.append(differing_cells(self, rows))
            return found[-1]

        with monkeypatch.context() as patch, machine(disturbed=disturbed_too):
            patch.setattr(AlignedRuns, "differing_cells", noted)
            interp.causal.align(
                build("gpt2"), base, source, answer=[3, 4] * 4, wrong=[7] * 8, descent=Descent(1), nulls=[],
                batch_size=3,
            )  # fmt: skip
        assert found and all(each == list(range(4, 9)) for cells in found for each in cells.values())
