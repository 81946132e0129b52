"""Which cases of each test the test suite runs, and which of all others a submission's CI draws.

`make test` runs one case of each test, `make test-more` the others; a file or a test that is named runs
with all of its cases. `--draw SEED` keeps a sixteenth of what was chosen: another one for another seed (CI gives the
commit's hash), and beside it ten at most of the notebooks, experiments and pages of the manual that `--changed` names.
"""

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

import pytest

SHARE = 16
"""One test in so many is drawn."""

CHANGED = 10
"""Books that changed are run beside a draw, so many at most."""

MOST = 1
"""Cases of each test that the test suite runs at most."""


def mark(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Mark as `more` what is left out where the whole suite was asked for, which no path on the command line
    means.
    """
    if config.args == config.getini("testpaths"):
        left = beyond(item.nodeid for item in items)
        for item in items:
            if item.nodeid in left:
                item.add_marker("more")


def beyond(nodes: Iterable[str], most: int = MOST) -> set[str]:
    """The cases left out where at most so many of each test are run, evenly apart.

    Which is the first differs by the test's name, so that not every test takes the same family.
    """
    cases: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        cases[node.partition("[")[0]].append(node)
    left: set[str] = set()
    for name, of_test in cases.items():
        step = -(-len(of_test) // most)
        left.update(set(of_test) - set(of_test[zlib.crc32(name.encode()) % step :: step]))
    return left


def drawn(nodes: Iterable[str], seed: str, share: int = SHARE) -> set[str]:
    """The tests of one draw: about one in `share`, the same for the same seed, each equally likely over all seeds."""
    return {node for node in nodes if _number(node, seed) % share == 0}


def some(nodes: Iterable[str], seed: str, most: int = CHANGED) -> set[str]:
    """As many of these tests at most, others for another seed."""
    return set(sorted(nodes, key=lambda node: _number(node, seed))[:most])


def _number(node: str, seed: str) -> int:
    return zlib.crc32(f"{seed} {node}".encode())


def runs_a_file(node: str, files: Iterable[str]) -> bool:
    """Whether a test of the books runs one of these files: its case is named by the file's path below the first
    folder.
    """
    case = PurePosixPath(node.partition("[")[2].removesuffix("]"))
    for file in map(PurePosixPath, files):
        below = PurePosixPath(*file.parts[1:])
        if not below.name:  # the README, whose test has no cases
            found = f"_{file.stem.lower()}_" in node
        else:
            found = bool(case.name) and case.with_suffix("") == below.with_suffix("")
        if found:
            return True
    return False


def not_opened(skipped: Iterable[pytest.TestReport | pytest.CollectReport]) -> list[str]:
    """A line for each reason why tests of real models were skipped, with how many there are."""
    real = [r for r in skipped if isinstance(r, pytest.TestReport) and "real" in r.keywords]
    said = [r.longrepr[2] if isinstance(r.longrepr, tuple) else str(r.longrepr) for r in real]
    reasons = Counter(reason.removeprefix("Skipped: ") for reason in said)
    return [f"real models: {n} skipped: {reason}" for reason, n in reasons.items()]


def draw(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that were drawn or run a file that changed, where a draw was asked for."""
    seed = config.getoption("--draw")
    if seed is None:
        return
    kept, changed = drawn((item.nodeid for item in items), seed), config.getoption("--changed").split()
    books = (item.nodeid for item in items if item.get_closest_marker("books"))
    kept |= some((node for node in books if runs_a_file(node, changed)), seed)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]
