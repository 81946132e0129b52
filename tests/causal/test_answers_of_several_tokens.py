"""Every causal question about an answer of several tokens is the sum of the same question about each of its tokens.

The metric is linear in the log-probabilities of the tokens, so that what is asked of the prompt must be the sum over
the tokens of what is asked of the joined row, read at the one column where the token is predicted (`Metric.at`).
"""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
import xarray as xr

from interp import Batch, Edit, HookedTransformer
from interp.causal import (
    Ablate,
    AttributionPatch,
    KnockOut,
    Patch,
    PathPatch,
    ShortCircuit,
    SteeringCurve,
    Subspace,
)
from interp.causal.graph import EdgeGraph
from interp.circuits import EdgeAttribution, EdgeEffects, Interchange
from interp.data import Pairs
from interp.data.answers import AnswerTokens
from interp.edits import Mean, Resample, Set, Variant, Zero
from interp.metrics import answer_log_probability
from interp.passes.metrics import Metric
from interp.passes.question import Question
from interp.passes.sweep import Sweep
from interp.runs.run import answered
from tests.configs import build
from tests.loops import over
from tests.tolerances import assert_close

CLEAN, CORRUPT, ANSWER = [3, 4, 5, 6, 7], [3, 9, 5, 2, 7], (4, 6, 2)
Asking = Callable[[Metric], Question]


def masked(*places: int) -> torch.Tensor:
    """A mask over the prompt's columns, and over those of the joined row."""
    return torch.tensor([[i in places for i in range(len(CLEAN) + len(ANSWER) - 1)]])


QUESTIONS: Mapping[str, Asking] = {
    "ablate to zero": lambda m: Ablate("head", change=Zero(), metric=m),
    "ablate under frozen patterns": lambda m: Ablate("head", change=Zero(), metric=m, freeze_patterns=True),
    "resample": lambda m: Ablate("head", change=Resample(), metric=m),
    "patch heads": lambda m: Patch("z", metric=m),
    "patch patterns": lambda m: Patch("pattern", metric=m, direction="noise"),
    "paths": lambda m: PathPatch(metric=m, by=("part", "pos")),
    "paths into a query": lambda m: PathPatch(metric=m, receivers=["L1H0.q"]),
    "estimates": lambda m: AttributionPatch("z", metric=m, agreement=0),
    "edges by gradients": lambda m: EdgeAttribution(metric=m, method="eap", each=True),
    "edges by integrals": lambda m: EdgeAttribution(metric=m, method="eap-ig-inputs", each=True),
    "edges": lambda m: EdgeEffects(m, each=True),
    "knock out a mask": lambda m: KnockOut(masked(4), masked(0, 1), metric=m),
    "short circuit": lambda m: ShortCircuit(metric=m),
    "steer at the prompt's end": lambda m: SteeringCurve(
        [Subspace("blocks.1.hook_resid_pre", torch.ones(1, 24, dtype=torch.float64), {"pos": 4})],
        strengths=[1.0, 2.0], random=2, metric=m,
    ),
}  # fmt: skip


def effects(result: xr.Dataset) -> np.ndarray:
    """What is linear in the metric."""
    result = result.sel(score="effect") if "score" in result.dims else result
    return np.asarray((result["each"] if "each" in result else result["value"]).values)


def joined(prompt: list[int]) -> list[int]:
    return [*prompt, *ANSWER[:-1]]


def tokens() -> list[Metric]:
    """The log-probability of every token of the answer, in the joined row."""
    return [answer_log_probability(y).at(len(CLEAN) - 1 + i) for i, y in enumerate(ANSWER)]


@pytest.mark.slow
@over("asked", QUESTIONS)
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_a_question_about_an_answer_is_the_sum_over_its_tokens(name: str, asked: str) -> None:
    model, question = HookedTransformer(build(name), None, name=name), QUESTIONS[asked]
    whole = answered(question(answer_log_probability([ANSWER])), model, Pairs([CLEAN], [CORRUPT]))
    parts = [answered(question(m), model, Pairs([joined(CLEAN)], [joined(CORRUPT)])) for m in tokens()]
    np.testing.assert_allclose(effects(whole), sum(map(effects, parts)), rtol=1e-8, atol=1e-9)


def test_means_over_the_prompts_themselves_reach_as_far_as_their_answers() -> None:
    from interp.causal import ablate

    model, prompts = HookedTransformer(build("gpt2"), None), [CLEAN, CORRUPT]
    whole = ablate(model, prompts, "head", change=Mean(), metric=answer_log_probability([ANSWER]))
    parts = [ablate(model, [*map(joined, prompts)], "head", change=Mean(), metric=m) for m in tokens()]
    np.testing.assert_allclose(effects(whole), sum(map(effects, parts)), rtol=1e-8, atol=1e-9)


def test_circuits_whose_edges_carry_means_reach_as_far_as_the_answers() -> None:
    from interp.circuits import interchange

    model = HookedTransformer(build("gpt2"), None)
    graph = EdgeGraph.of(model.cfg)
    kept = graph.exists & (torch.rand(graph.exists.shape, generator=torch.Generator().manual_seed(2)) < 0.5)
    both = [CLEAN, CORRUPT], [CORRUPT, CLEAN]
    ask = lambda metric, pairs: interchange(  # noqa: E731
        model, *pairs, kept[None], metric=metric, replacement="mean"
    )
    whole = ask(answer_log_probability([ANSWER]), both)
    parts = [ask(m, [[*map(joined, some)] for some in both]) for m in tokens()]
    np.testing.assert_allclose(effects(whole), sum(map(effects, parts)), rtol=1e-8, atol=1e-9)
    assert isinstance(Interchange(kept[None]), Question)


def test_the_last_query_of_a_knock_out_is_the_prompts_last() -> None:
    from interp.causal import knock_out

    model, metric = HookedTransformer(build("gpt2"), None), answer_log_probability([ANSWER])
    last, fourth = (knock_out(model, [CLEAN], [q], [1], metric=metric) for q in (-1, 4))
    assert last.value.values.tolist() == fourth.value.values.tolist()
    short = torch.tensor([[False, True, False, False, False]])
    by_mask = knock_out(model, [CLEAN], [4], short, metric=metric)
    np.testing.assert_allclose(by_mask.value.values, fourth.value.values)


def test_the_last_position_of_a_sweeps_edit_is_the_prompts_last() -> None:
    """Whether the rows are padded or not, and however many tokens of the answer follow."""
    network, edit = build("gpt2"), torch.ones(6, dtype=torch.float64)
    for answers in ([ANSWER], [ANSWER, ANSWER[:2]]):
        batch = AnswerTokens.of(HookedTransformer(network).text, answers, several=True)
        assert batch is not None
        rows = batch.on(Batch.of([CLEAN] * len(answers)).numbered())
        ends = [
            Sweep(network, rows, [Variant([Edit("L0H1", Set(edit), {"pos": pos})])]).run(
                answer_log_probability()
            )
            for pos in (-1, len(CLEAN) - 1)
        ]
        assert bool(ends[0].changed.all()) and torch.equal(ends[0].values, ends[1].values)


def test_rows_of_a_slice_may_all_have_shorter_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are computed in slices of rows, as memory allows: here one by one."""
    network = build("gpt2")
    answers = AnswerTokens.of(HookedTransformer(network).text, [ANSWER, ANSWER[:1], ANSWER[:2]], several=True)
    assert answers is not None
    rows = answers.on(Batch.of([CLEAN] * 3).numbered())
    variants = [Variant([Edit(f"L{layer}.mlp", Zero())]) for layer in range(2)]
    whole = Sweep(network, rows, variants).run(answer_log_probability())
    monkeypatch.setattr("interp.passes.sweep.that_fit", lambda *_: 1)
    sliced = Sweep(network, rows, variants).run(answer_log_probability())
    assert_close(sliced.values, whole.values)
