"""What holds for every test: no network (but pip's, for those marked `real`), one thread per worker, fixed seeds.

`make test-strict` sets INTERP_TEST_SHAPES, which checks the shapes of annotated calls (`shapes.py`), and
INTERP_TEST_DISTURBED, which rounds every matrix product as another machine might (`disturbed.py`).
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PYTHONPATH"] = str(
    Path(__file__).parents[1]
)  # what tests start imports this checkout, like they do
if "PYTEST_XDIST_WORKER" in os.environ:  # before torch starts its threads
    os.environ["OMP_NUM_THREADS"] = "1"

if "INTERP_TEST_DISTURBED" in os.environ:
    from tests import disturbed

    disturbed.install()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(disturbed.PLACE), os.environ["PYTHONPATH"]])
    sys.path.append(str(disturbed.PLACE))  # which is what a process that is spawned has for its path

if "INTERP_TEST_SHAPES" in os.environ:
    assert "interp" not in sys.modules, "the shape checks must be in place before interp is imported"
    from tests import shapes

    shapes.install()
    # what a function of ours says of a wrong kind cannot be heard: the shape checks refuse it before
    collect_ignore = [
        "contract/test_boundary.py",
        "contract/test_mistakes.py",
        "core/test_boundary.py",
        "fuzz/test_fuzz.py",
    ]

import hypothesis
import pytest
import torch

from tests import cases
from tests.loops import same_seeds

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
gc.disable()  # until all is collected: what imports leave is no garbage, and a third of their time went into looking
hypothesis.settings.register_profile("interp", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("interp")

os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # where pytest keeps its own last three
LEFT = tempfile.tempdir = tempfile.mkdtemp(prefix="interp-tests-")
"""The folder of what tests, and tables that they read when they are collected, make with `tempfile`; not TMPDIR, whose
sockets would have names that are too long."""
util.Finalize(
    None, shutil.rmtree, (LEFT,), {"ignore_errors": True}, exitpriority=-101
)  # after its own folder, -100


if TYPE_CHECKING:
    from playwright import sync_api


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `tests/cases.py` draws from."""
    parser.addoption(
        "--draw", metavar="SEED", help="run a sixteenth of the chosen tests, another one for another seed"
    )
    parser.addoption(
        "--changed",
        default="",
        metavar="FILES",
        help="beside a draw: books that run these files, ten at most",
    )


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What opens a page in a browser is marked so by the fixture that it asks for; see the markers `kinds`, `more`."""
    if "INTERP_TEST_SHAPES" in os.environ:
        items[:] = [item for item in items if "kinds" not in item.keywords]
    cases.mark(config, items)
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")


@pytest.hookimpl(
    specname="pytest_collection_modifyitems", trylast=True
)  # after they were chosen by their marks
def pytest_collection_chosen(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what is drawn, where a draw was asked for."""
    cases.draw(config, items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which real models were not opened, and why."""
    for line in cases.not_opened(terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(line)


def pytest_collection_finish() -> None:
    """From here on garbage is collected, but not looked for among modules and tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    same_seeds()


@pytest.fixture(scope="session")
def chromium() -> Iterator["sync_api.BrowserType"]:
    """What launches browsers; one for all tests, since two of its event loops cannot run in one thread."""
    from playwright import sync_api

    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium
