"""Labels follow their stated rule: near end of the interval, margin, all evidence, priority."""

import numpy as np
import pytest
import xarray as xr

from interp.attention.heads import NONE, RULES, Evidence, labels

SCORES = sorted({e.score for rule in RULES for e in rule.evidence})


def table(**scores: tuple[float, float]) -> xr.Dataset:
    """One head whose scores have these ends of their intervals; every other score lies at its null of 0.1."""
    ends = np.array([scores.get(name, (0.1, 0.1)) for name in SCORES])
    cells = {"value": ends.mean(1), "low": ends[:, 0], "high": ends[:, 1], "null": np.full(len(SCORES), 0.1)}
    dims = ("layer", "head", "score")
    return xr.Dataset({name: (dims, value[None, None]) for name, value in cells.items()}, {"score": SCORES})


def label(**scores: tuple[float, float]) -> str:
    return str(labels(table(**scores)).item())


def at(evidence: Evidence, beyond: float) -> tuple[float, float]:
    """An interval whose near end is the margin, and `beyond` more of it."""
    end = 0.1 + evidence.margin + (beyond if evidence.margin > 0 else -beyond)
    return (end, end + 1) if evidence.margin > 0 else (end - 1, end)


@pytest.mark.parametrize("rule", RULES, ids=[rule.label for rule in RULES])
def test_a_label_is_given_when_all_its_evidence_is_past_the_margin_and_not_before(rule) -> None:  # type: ignore[no-untyped-def]
    assert label(**{e.score: at(e, 1e-6) for e in rule.evidence}) == rule.label
    for weak in rule.evidence:
        assert label(**{e.score: at(e, -1e-6 if e is weak else 1e-6) for e in rule.evidence}) == NONE


def test_the_first_rule_that_holds_names_the_head() -> None:
    strong = {e.score: at(e, 0.1) for rule in RULES for e in rule.evidence if e.margin > 0}
    for rule in RULES:
        if all(e.margin > 0 for e in rule.evidence):
            assert label(**strong) == rule.label
            strong = {name: v for name, v in strong.items() if name != rule.evidence[0].score}


def test_a_mean_far_from_chance_with_a_wide_interval_names_nothing() -> None:
    assert label(induction=(0.2, 1.0)) == NONE
    assert label(induction=(np.nan, np.nan)) == NONE


def test_rules_about_absent_scores_are_passed_over() -> None:
    short = table(induction=(0.1, 0.1), name_mover=(1.0, 2.0), to_receiver=(0.9, 1.0))
    assert labels(short).item() == "name mover"
    assert labels(short.drop_sel(score="name_mover")).item() == NONE


def test_nulls_may_differ_between_layers() -> None:
    two = xr.concat([table(induction=(0.4, 0.5))] * 2, "layer")
    two["null"].loc[{"layer": 1, "score": "induction"}] = 0.3
    found = labels(two)
    assert found.dims == ("layer", "head") and found[:, 0].values.tolist() == ["induction", NONE]
