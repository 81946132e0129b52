"""The table of papers: every paper in a small setting, the closed forms among them as they must be."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.papers import PAPERS, as_result, measured, reproduce
from experiments.papers.__main__ import main

QUICK = ("su-2021", "dong-2021")
EXACT = {
    "elhage-2021": {"without the direct path", "are taken away"},
    "meng-2022": {"indirect effect minus total effect", "before the subject"},
    "geva-2021": {"sum of its values"},
    "katz-2024": {"last layer is 1", "outer products", "forward pass shift"},
    "elhage-2022": set(),
    "gurnee-2023": {"shift 1 sd"},
    "dong-2021": {"bidirectional", "causal", "without skips"},
    "geshkovski-2023": {"one hemisphere", "causal mask", "values that repel"},
    "su-2021": {"ahead of 4095", "without the factor"},
    "ye-2024": {"lambda_init", "rows of a trained pattern"},
}
"""By paper, what the texts of claims say that are identities: they hold however little is spent on them."""


@pytest.mark.slow
@pytest.mark.parametrize("paper", PAPERS)
def test_every_paper_in_a_small_setting(paper: str) -> None:
    rows = list(measured([paper], effort=0.02))
    assert len({row.claim.text for row in rows}) == len(rows) >= 3
    for row in rows:
        ours = row.claim.ours
        assert row.claim.published
        assert row.claim.region is not None
        if ours is None:
            assert row.claim.note
        elif not math.isnan(ours.low):
            assert ours.low <= ours.value <= ours.high
    for said in EXACT.get(paper, ()):
        (one,) = (row.claim for row in rows if said in row.claim.text)
        assert one.verdict == "holds", one


def test_the_table_is_a_result_with_every_number_in_words() -> None:
    rows = list(measured(QUICK, effort=0.1))
    found = as_result(rows)
    assert found.sizes["claim"] == len(rows)
    assert found.verdict.values.tolist() == [row.claim.verdict for row in rows]
    assert set(found.paper.values) == set(QUICK)
    for name in ("value", "low", "high"):
        np.testing.assert_array_equal(found[name], [getattr(row.claim.ours, name) for row in rows])
    again = reproduce(QUICK, effort=0.1)
    np.testing.assert_array_equal(again.value, found.value)


def test_what_cannot_be_tested_stays_in_the_table_without_a_number() -> None:
    from experiments.papers import Row
    from experiments.papers.claim import untestable

    found = as_result([Row("ye-2024", untestable("two thirds", "65 %", "scale"), 0.0)])
    assert np.isnan(found.value.item())
    assert (found.verdict.item(), found.note.item()) == ("not testable here", "scale")


def test_errors_name_the_nearest_paper_and_the_range_of_effort() -> None:
    with pytest.raises(KeyError, match="unknown paper 'olson-2022'; nearest: olsson-2022"):
        measured(["olson-2022"])
    with pytest.raises(ValueError, match=r"effort must be above 0 and at most 1, got 1\.5"):
        measured(effort=1.5)
    with pytest.raises(ValueError, match="at least one of rows is required, got none"):
        as_result([])


def test_the_command_prints_every_claim_and_writes_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tmp_path / "t.csv", tmp_path / "t.json"
    assert main(["su-2021", "--effort", "0.1", "--csv", str(files[0]), "--json", str(files[1])]) == 0
    said = capsys.readouterr().out
    table, records = pd.read_csv(files[0]), json.loads(files[1].read_text())
    assert len(table) == len(records) == 5
    for row in records:
        assert row["text"] in said
        assert row["command"] == "python -m experiments.papers su-2021"
    assert "does not hold" in said.splitlines()[-1]


def test_the_command_refuses_an_unknown_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["su-2012"]) == 2
    assert "error: unknown paper 'su-2012'; nearest: su-2021" in capsys.readouterr().err
