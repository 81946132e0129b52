"""Memory: counted to the byte, predicted from shapes as it is then measured, and planned by arithmetic."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import interp
from interp.core.stats import Means
from interp.data.batch import Batch
from interp.model import ModelConfig, Read
from interp.model.experts import MoE
from interp.passes.observe import as_model
from interp.passes.question import ByRow, Questions, Reading
from interp.runs.memory import (
    MOST_ON_DEVICE,
    MOST_ON_HOST,
    LiveBytes,
    MemoryPlan,
    measured_row_bytes,
    memory_plan,
    predicted_row_bytes,
)
from tests.configs import CAUSAL, CONFIGS, build, some_tokens
from tests.runs.running import Norms
from tests.tiny import hooked

WIDTH = 13
ROUTED = [name for name in CAUSAL if isinstance(CONFIGS[name].mlp, MoE)]
DENSE = [
    "gpt2", "llama-gqa", "mqa", "attention-only", "attention-only-rotary", "parallel", "post-norm", "window",
    "gemma2", "bloom", "t5",
]  # fmt: skip
"""One of every way to attend and to add to the stream."""


def questions(name: str) -> Questions:
    return Questions.of([Norms().bind(as_model(build(name)))], CONFIGS[name])


# --- counting -------------------------------------------------------------------------------------------------------


def test_where_no_block_runs_a_window_is_one_pass_of_lookups_alone() -> None:
    """No pass of the size of forward passes, no mask, no position vector: one lookup for each batch."""
    network = build("gpt2")
    read = Read("hook_embed", via=lambda stream: stream.norm(dim=-1))
    rows = Reading([read], lambda trace, batch, model: {"norm": trace[read].sum(1)})
    norms = ByRow("norms", rows, Means)
    asked = Questions.of([norms], network.config)
    assert memory_plan(asked, network, 8).tokens_per_batch == MOST_ON_DEVICE > 8 * MOST_ON_HOST
    masked = Batch.of([[1, 2, 3], [4, 5]])
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        asked.values(network, masked)
    names = {event.key: event.count for event in seen.key_averages()}
    assert names["aten::embedding"] == 1
    assert not {"aten::tril", "aten::bitwise_and", "aten::add"} & names.keys()


def test_live_bytes_are_those_of_the_tensors_alive() -> None:
    before = torch.zeros(1000)
    with LiveBytes() as live:
        a = torch.zeros(100, dtype=torch.float64)
        assert (live.alive, live.peak) == (800, 800)
        views = [a[10:], a.view(10, 10).mT, before[:5], before.view(10, 100)]
        assert live.alive == 800, "views take nothing, neither of what is new nor of what was there"
        a += 1
        b = torch.ones(50, dtype=torch.int8)
        assert (live.alive, live.peak) == (850, 850)
        del a
        assert live.alive == 850, "its views keep it"
        del views
        assert (live.alive, live.peak) == (50, 850)
        c, d = torch.zeros(10, 2).max(1)
        assert live.alive == 50 + 10 * 4 + 10 * 8
        del b, c, d
        assert (live.alive, live.peak) == (0, 850)


def test_the_peak_counts_what_is_alive_only_within_an_expression() -> None:
    x = torch.zeros(250)
    with LiveBytes() as live:
        y = (x + 1) * 2  # the sum is alive until the product is there
    assert (live.alive, live.peak) == (1000, 2000)
    del y


# --- predicting and measuring ---------------------------------------------------------------------------------------


def row_bytes(name: str) -> float:
    """Bytes that a row adds, from runs of two and of six rows."""
    peaks = []
    for rows in (2, 6):
        with LiveBytes() as live:
            questions(name).values(build(name), Batch(some_tokens(rows, WIDTH)))
        peaks.append(live.peak)
    return (peaks[1] - peaks[0]) / 4


@pytest.mark.parametrize("name", DENSE)
def test_predicted_memory_is_what_a_row_takes_and_near_the_measured(name: str) -> None:
    predicted = predicted_row_bytes(questions(name), build(name), WIDTH)
    assert predicted == pytest.approx(row_bytes(name), rel=0.01)
    measured = measured_row_bytes(questions(name), build(name), Batch(some_tokens(4, WIDTH)))
    assert measured == pytest.approx(predicted, rel=0.25)


def whole_pattern(name: str, config: ModelConfig) -> ByRow:
    """A reduction at the site that cannot run without numbers, and keeps what it reads."""

    def via(pattern: Tensor) -> Tensor:
        return pattern if bool((pattern >= 0).all()) else -pattern

    read = Read("blocks.1.attn.hook_pattern", via)
    finish = lambda merged: None  # noqa: E731
    rows = Reading([read], lambda trace, batch, model: {"x": trace[read][:, 0]})
    return ByRow(name, rows, Means, finish)  # type: ignore[arg-type,return-value]


def test_a_reduction_that_needs_numbers_counts_as_its_whole_site() -> None:
    model = build("gpt2")
    asked = Questions.of([whole_pattern("pattern", model.config)], model.config)
    predicted = predicted_row_bytes(asked, model, WIDTH)
    pattern = model.config.n_heads * WIDTH**2 * 8  # a CPU writes it over its scores, the forecast counts both
    measured = measured_row_bytes(asked, model, Batch(some_tokens(4, WIDTH)))
    assert measured == pytest.approx(predicted - pattern, rel=0.25) and measured <= predicted
    assert predicted > pattern


@pytest.mark.parametrize("name", ROUTED)
def test_a_mixture_of_experts_is_measured_since_shapes_do_not_tell(name: str) -> None:
    plan = memory_plan(questions(name), build(name), WIDTH)
    assert plan.predicted != plan.predicted
    assert plan.measured == pytest.approx(row_bytes(name), rel=0.5)
    assert plan.tokens_per_batch % WIDTH == 0
    model = hooked(name)
    assert interp.run([Norms()], model, ["The cat", "The dog"]).rows == 2
    assert interp.run([Norms()], model, iter(["The cat", "The dog"])).rows == 2


# --- planning -------------------------------------------------------------------------------------------------------

PLAN = MemoryPlan(width=10, predicted=100.0, measured=float("nan"), room=1000, most=10_000)


@pytest.mark.parametrize(
    ("change", "tokens"),
    [
        ({}, 100),
        ({"room": 999}, 90),
        ({"room": 99}, 10),
        ({"room": 0}, 10),
        ({"measured": 200.0}, 50),
        ({"measured": 50.0}, 100),
        ({"predicted": float("nan"), "measured": 500.0}, 20),
        ({"most": 35}, 30),
        ({"most": 9}, 10),
    ],
)
def test_a_pass_takes_as_many_whole_rows_as_fit_and_at_least_one(
    change: dict[str, float], tokens: int
) -> None:
    assert replace(PLAN, **change).tokens_per_batch == tokens  # type: ignore[arg-type]


def test_a_plan_explains_itself() -> None:
    plan = MemoryPlan(width=10, predicted=2.0**20, measured=2.0**21, room=2**23, most=10_000)
    assert plan.explain() == (
        "40 tokens per pass: 1.00 MiB predicted and 2.00 MiB measured per row of 10, 8 MiB may be used"
    )
    assert "40 tokens per pass: 2.00 MiB measured per row" in replace(plan, predicted=float("nan")).explain()


def test_a_small_model_gets_the_most_that_is_any_use(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Batch(some_tokens(4, WIDTH))
    plan = memory_plan(questions("gpt2"), build("gpt2"), WIDTH, sample)
    assert plan.tokens_per_batch == MOST_ON_HOST // WIDTH * WIDTH
    assert plan.predicted != plan.predicted, "what was measured need not be predicted"
    monkeypatch.setattr("interp.runs.memory._room_bytes", lambda model: int(7.5 * plan.measured))
    assert memory_plan(questions("gpt2"), build("gpt2"), WIDTH, sample).tokens_per_batch == 7 * WIDTH
    narrow = Batch(some_tokens(4, 5))
    scaled = memory_plan(questions("gpt2"), build("gpt2"), WIDTH, narrow).measured
    assert scaled == pytest.approx(measured_row_bytes(questions("gpt2"), build("gpt2"), narrow) * WIDTH / 5)
