"""Labels follow their stated rules: what each asks of its scores, how sure it is, and which stands first."""

import numpy as np
import pytest
import xarray as xr
from scipy.stats import t

from interp.attention.heads import confidences, labels
from interp.attention.labels import NONE, RULES, SURE, Beyond, Evidence, Odds, PartOf, Rare, ScoreByHead

SCORES = sorted({name for rule in RULES for e in rule.evidence for name in e.scores})
NULL, ROWS, HALF = 0.1, 32, 0.01


def table(**scores: float) -> xr.Dataset:
    """One head whose scores have these values, each with the interval `HALF` to either side; others lie at the null.

    `p` is that of a score among random heads: how far out any but the null is.
    """
    value = np.array([scores.get(name, NULL) for name in SCORES])
    cells = {
        "value": value, "low": value - HALF, "high": value + HALF, "null": np.full(len(SCORES), NULL),
        "n": np.full(len(SCORES), ROWS), "p": np.where(value == NULL, 1.0, 0.01),
    }  # fmt: skip
    dims = ("layer", "head", "score")
    return xr.Dataset({name: (dims, each[None, None]) for name, each in cells.items()}, {"score": SCORES})


def label(**scores: float) -> str:
    return str(labels(confidences(table(**scores))).item())


def enough(evidence: Evidence, beyond: float) -> dict[str, float]:
    """Scores that meet what the evidence requires with the near end of their interval, and `beyond` more."""
    match evidence:
        case Odds(score, times):
            odds = times * NULL / (1 - NULL)
            return {score: odds / (1 + odds) + HALF + beyond}
        case Beyond(score, margin):
            return {score: NULL + margin + np.sign(margin) * (HALF + beyond)}
        case PartOf(score, share, None):
            return {score: share + HALF + beyond}
        case PartOf(score, share, str(whole)):
            return {whole: 0.6, score: share * 0.6 + HALF + share * HALF + beyond}
        case Rare(score, sign):
            return {score: NULL + sign * 0.3 * np.sign(beyond)}
    raise TypeError(evidence)


def all_of(evidence: tuple[Evidence, ...], beyond: float, weak: Evidence | None = None) -> dict[str, float]:
    """All of it, each score as large as all of its evidence asks; the weak one by `beyond` too little."""
    found: dict[str, float] = {}
    for each in evidence:
        if each is not weak:
            for name, value in enough(each, beyond).items():
                found[name] = max(found.get(name, value), value, key=lambda x: abs(x - NULL))
    return found | (enough(weak, -beyond) if weak is not None else {})


@pytest.mark.parametrize("rule", RULES, ids=[rule.label for rule in RULES])
def test_a_label_is_given_when_all_its_evidence_is_sure_and_not_before(rule) -> None:  # type: ignore[no-untyped-def]
    sure = confidences(table(**all_of(rule.evidence, 1e-6))).sel(called=rule.label)
    assert sure.item() >= SURE
    for weak in rule.evidence:
        unsure = confidences(table(**all_of(rule.evidence, 1e-6, weak))).sel(called=rule.label)
        assert unsure.item() < SURE


def test_confidence_is_the_share_of_students_t_beyond_what_is_required() -> None:
    error = HALF / t.ppf(0.975, ROWS - 1)
    least = 5 * NULL / (1 + 4 * NULL)
    for score in (0.3, least, least + 0.003, 0.9):
        found = confidences(table(induction=score)).sel(called="induction")
        assert found.item() == pytest.approx(t.cdf((score - least) / error, ROWS - 1), abs=1e-12)


def test_first_sure_rule_names_the_head_and_the_others_are_there_too() -> None:
    both = table(induction=0.9, copying=0.9, copying_weights=0.9)
    found = confidences(both)
    assert labels(found).item() == "induction"
    assert found.sel(called="copying").item() > SURE and found.sel(called="induction").item() > SURE
    assert label(copying=0.9, copying_weights=0.9) == "copying"


def test_a_score_without_an_interval_or_with_a_wide_one_names_nothing() -> None:
    wide = table(induction=0.6)
    wide["low"].loc[{"score": "induction"}] = 0.2
    assert labels(confidences(wide)).item() == NONE
    wide["low"].loc[{"score": "induction"}] = np.nan
    assert labels(confidences(wide)).item() == NONE
    assert confidences(wide).sel(called="induction").isnull().all()


def test_rules_about_absent_scores_are_passed_over() -> None:
    short = table(name_mover=1.0, to_receiver=0.9)
    assert labels(confidences(short)).item() == "name mover"
    found = confidences(short.drop_sel(score="name_mover"))
    assert labels(found).item() == NONE and found.sel(called="name mover").isnull().all()


def test_same_attention_stands_out_of_a_small_null_and_not_of_a_large_one() -> None:
    """0.29 is 8 times the odds of 0.05 and twice those of 0.17: what is rare by chance needs less to be clear."""
    two = xr.concat([table(induction=0.29)] * 2, "layer")
    two["null"].loc[{"layer": 0}], two["null"].loc[{"layer": 1}] = 0.05, 0.17
    found = labels(confidences(two))
    assert found.dims == ("layer", "head") and found[:, 0].values.tolist() == ["induction", NONE]


def test_head_over_the_last_tokens_is_local_and_no_previous_token_head() -> None:
    assert label(previous_token=0.4, local=0.9) == "local"
    assert label(previous_token=0.6, local=0.9) == "previous token"


def test_anti_copying_needs_the_lower_side_of_the_random_heads() -> None:
    assert label(copying=0.0, copying_weights=-0.5) == "anti-copying"
    assert label(copying=0.0, copying_weights=0.5) == NONE
    cell = {
        "copying_weights": ScoreByHead(*np.array([-0.5, -0.51, -0.49, NULL, 0.01, ROWS]).reshape(6, 1, 1))
    }
    assert Rare("copying_weights", -1).confidence(cell).item() == 0.99
    assert Rare("copying_weights", 1).confidence(cell).item() == 0
