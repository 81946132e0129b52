"""Which cases of a test the test suite leaves to `make test-more`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import MOST, beyond

SUITE = {
    "pytest.ini": "[pytest]\ntestpaths = checks\naddopts = -m 'not more'\nmarkers =\n    more: the others\n",
    "checks/conftest.py": "from tests import cases\n\ndef pytest_collection_modifyitems(config, items):\n"
    "    cases.mark(config, items)\n",
    "checks/test_two.py": "import pytest\n\ndef test_alone():\n    pass\n\n"
    "@pytest.mark.parametrize('i', range(9))\ndef test_many(i):\n    pass\n",
}  # fmt: skip
"""A suite of two tests with ten cases."""


@pytest.mark.parametrize("n", range(1, 12))
@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("test", ["a.py::one", "a.py::two", "b.py::Kind::one"])
def test_of_every_test_one_case_is_run_and_no_more_than_asked(test: str, most: int, n: int) -> None:
    cases = [f"{test}[{i}]" for i in range(n)]
    left = beyond(cases, most)
    assert left < set(cases)
    assert min(n, most) - 1 <= n - len(left) <= most


def test_tests_do_not_count_for_one_another() -> None:
    first, second = ([f"a.py::{name}[{i}]" for i in range(9)] for name in ("one", "two"))
    assert beyond([*first, "a.py::alone", *second]) == beyond(first) | beyond(second)


@pytest.mark.parametrize(
    ("asked", "passed"),
    [
        ([], 1 + MOST),
        (["-m", "more"], 9 - MOST),
        (["-n", "1"], 1 + MOST),
        (["checks/test_two.py"], 10),
        (["checks"], 1 + MOST),
        (["checks/test_two.py::test_many[3]", "-n", "1"], 1),
    ],
)
def test_the_suite_runs_some_cases_and_whoever_names_a_place_all_of_them(
    tmp_path: Path, asked: list[str], passed: int
) -> None:
    for name, text in SUITE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *asked], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert re.search(rf"\b{passed} passed", run.stdout), run.stdout + run.stderr
