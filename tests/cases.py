"""Which cases of each test the test suite runs; `make test-more` runs the others.

Whoever names a file or a test gets all of its cases.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest

MOST = 2
"""Cases of each test that the test suite runs at most."""


def mark(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Mark as `more` what is left out where the whole suite was asked for, which no path on the command line means."""
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
