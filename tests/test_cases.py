"""Which cases of a test the test suite leaves to `make test-more`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import CHANGED, MOST, SHARE, beyond, drawn, not_opened, runs_a_file, some

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


def test_each_test_is_drawn_by_one_seed_in_so_many_and_repeatably() -> None:
    nodes, seeds = [f"a.py::test[{i}]" for i in range(200)], [str(seed) for seed in range(200)]
    draws = [drawn(nodes, seed) for seed in seeds]
    assert draws == [drawn(nodes, seed) for seed in seeds]
    mean, spread = 200 / SHARE, (200 / SHARE * (1 - 1 / SHARE)) ** 0.5  # binomial
    for counts in ([len(d) for d in draws], [sum(node in d for d in draws) for node in nodes]):
        assert abs(sum(counts) / 200 - mean) < 4 * spread / 200**0.5
        assert max(abs(count - mean) for count in counts) < 6 * spread


def test_of_many_books_that_changed_some_are_run_others_for_another_seed() -> None:
    nodes = [f"b.py::test_page[{i}.md]" for i in range(60)]
    draws = [some(nodes, str(seed)) for seed in range(200)]
    assert {len(d) for d in draws} == {CHANGED} and set().union(*draws) == set(nodes)
    assert some(nodes[:4], "7") == set(nodes[:4])


@pytest.mark.parametrize(
    ("node", "file", "runs"),
    [
        ("t.py::test_page[howto/runs.md]", "docs/howto/runs.md", True),
        ("t.py::test_page[howto/runs.md]", "docs/runs.md", False),
        ("t.py::test_notebook[08_runs]", "notebooks/08_runs.ipynb", True),
        ("t.py::test_experiment[ioi]", "experiments/ioi.py", True),
        ("t.py::test_experiment[ioi]", "experiments/steering.py", False),
        ("t.py::test_the_first_lines_of_the_readme_print", "README.md", True),
        ("t.py::test_the_first_lines_of_the_readme_print", "docs/index.md", False),
    ],
)
def test_a_changed_file_brings_the_test_that_runs_it(node: str, file: str, runs: bool) -> None:
    assert runs_a_file(node, [file]) is runs


def test_skipped_tests_of_real_models_are_counted_by_reason() -> None:
    def report(reason: str, *marks: str) -> pytest.TestReport:
        said = ("t.py", 1, f"Skipped: {reason}")
        return pytest.TestReport(
            "t.py::t", ("t.py", 1, "t"), dict.fromkeys(marks, 1), "skipped", said, "setup"
        )

    reports = [
        report("no index", "real"),
        report("no GPU"),
        report("no index", "real", "more"),
        report("no gguf", "real"),
    ]
    assert not_opened(reports) == [
        "real models: 2 skipped: no index",
        "real models: 1 skipped: no gguf",
    ]
    assert not_opened([report("no GPU")]) == []


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
