"""The fuzz, whole of functions, else a seeded part: nothing raw, slow, let in or NaN, nothing outside of a folder.

`make test-fuzz` makes others for five minutes, `make test-fuzz MINUTES=60` more of them.
"""

import collections
import contextlib
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import xarray as xr

from interp.core.kinds import Positive
from tests.contract.calls import NOT_RUN, REFUSES
from tests.fuzz import commands, functions, judge, loaders, results
from tests.fuzz.__main__ import drawn as drawn_by_seed, made
from tests.fuzz.judge import FINE, Case, Ending, ended
from tests.loops import every, over

ROOT = Path(__file__).parents[2]
SEED = 0


def drawn(cases: Iterator[Case], count: int) -> list[Case]:
    """So many of many cases, drawn by the seed."""
    return random.Random(SEED).sample([*cases], count)


PARTS = 20
"""The functions are tried in so many parts, of which processes take several at once."""


def of_functions(part: int) -> list[Case]:
    """Every argument of every twentieth function with every value."""
    return [case for name in [*functions.FUNCTIONS][part::PARTS] for case in functions.cases_of(name)]


FAMILIES: dict[str, tuple[Callable[[], list[Case]], int]] = {
    **{f"functions {part}": (partial(of_functions, part), 6000) for part in range(PARTS)},
    "files": (lambda: [*loaders.cases(SEED, 10)], 250),
    "configs": (lambda: drawn(loaders.configs(), 1000), 1000),
    "results": (lambda: drawn(results.cases(), 400), 400),
    "commands": (lambda: drawn((case for case in commands.cases() if case.name != "report"), 60), 60),
}
"""The cases of the suite, and how many there are at least."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for everything that calls write; what is home and temporary is in it too."""
    for name in ("HOME", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "TMPDIR"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file of the checkout, with its size and when it was changed."""
    left_out = {".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".venv"}
    found = {}
    for top, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in left_out]
        for name in files:
            about = (Path(top) / name).lstat()
            found[f"{top}/{name}"] = (about.st_size, about.st_mtime_ns)
    return found


@contextlib.contextmanager
def _folder_of_its_own() -> Iterator[None]:
    """Where a call finds nothing that another one wrote, here or beside."""
    before, outer = os.getcwd(), Path(tempfile.mkdtemp())
    (outer / "work").mkdir()
    os.chdir(outer / "work")
    try:
        yield
    finally:
        os.chdir(before)
        shutil.rmtree(outer, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_call_is_answered_or_refused_by_name_in_time(family: str, place: Path) -> None:
    make, least = FAMILIES[family]
    before, counts = state_of(ROOT / "interp"), collections.Counter[str]()
    with _folder_of_its_own(), every() as tried:
        for case in make():
            with tried(case), _folder_of_its_own():
                ending = ended(case)
                counts[ending.kind] += 1
                assert ending.kind in FINE, f"{ending.kind}: {ending.problem}"
    sys.stdout.write(f"{family}: {counts.total()} cases, {dict(sorted(counts.items()))}\n")
    assert counts.total() >= least and min(counts["answered"], counts["refused"]) > 0.02 * least
    assert state_of(ROOT / "interp") == before, "the package was written to"
    assert {each.name for each in place.iterdir()} == {"HOME", "TMPDIR"} and not any(
        (place / "HOME").iterdir()
    )


def test_every_reader_of_files_is_damaged() -> None:
    """The functions that write have their places changed as all functions have."""
    writers = {
        "circuits.write_attribution_graph", "circuits.write_mib", "families.save", "features.save",
        "features.train_dictionary",
    }  # fmt: skip
    covered = {name for loader in loaders.LOADERS.values() for name in loader.covers}
    assert set(loaders.readers()) - writers == covered


@over("name", loaders.LOADERS)
def test_files_without_a_damage_are_read(name: str) -> None:
    folder = Path(tempfile.mkdtemp()) / "it"
    shutil.copytree(loaders.whole(name), folder)
    loaders.LOADERS[name].read(folder)


@pytest.mark.slow
def test_changed_line_is_answered_and_every_option_of_it_is_changed(place: Path) -> None:
    found = collections.defaultdict[str, list[Case]](list)
    for case in commands.cases():
        found[case.name].append(case)
    assert found.keys() == commands.COMMANDS.keys()
    with every() as tried:
        for name in set(found) - {
            "report",
            "causal-trace",
        }:  # which take seconds, and have tests of their own
            with tried(name):
                assert ended(found[name][0]) == Ending("answered")
                assert len(found[name]) >= 5 + len(commands.TEXTS) * (name != "models")


def test_what_shows_one_result_alone_is_under_the_name_of_its_function() -> None:
    assert set(results.ONLY) <= set(results.names())


def test_functions_that_are_not_run_are_few() -> None:
    assert len({*NOT_RUN, *REFUSES}) < 0.03 * len(functions.FUNCTIONS)


def test_every_public_callable_is_tried_or_said_to_be_ours() -> None:
    ours = {name for names in functions.MADE_BY_US.values() for name in names.split()}
    names = {name for name, _ in functions.everything() if not name.startswith(("plot", "pages"))}
    assert names - ours == names & set(functions.FUNCTIONS), (
        "classes that check no field (interp.core.boundary), or names of MADE_BY_US (tests/fuzz/functions.py) that are "
        f"tried as well: {sorted((names - ours) ^ (names & set(functions.FUNCTIONS)))}"
    )
    assert {name for name in ours if name.count(".") < 2 and name not in names} == {
        "Batch.positions",
        "HookedEncoderDecoder.from_pretrained",
        "HookedEncoderDecoder.to_texts",
    }


@over("name", functions.NEW)
def test_the_valid_call_of_a_record_or_method_is_valid(name: str) -> None:
    functions.called(name, functions.FUNCTIONS[name], functions.valid_of(name))


def test_a_failing_case_is_made_again_by_its_seed_and_name(place: Path) -> None:
    only = "damaged files rows of txt(rows.txt: a bit"
    first, again = (sorted(map(str, drawn_by_seed("a", only)["damaged files"])) for _ in range(2))
    assert first == again != sorted(map(str, drawn_by_seed("b", only)["damaged files"]))
    (case,) = drawn_by_seed("a", first[0])["damaged files"]
    assert [ending.kind in FINE for _, ending in made({"": [case]}, time.monotonic() + 60)] == [True]
    assert [*made({"": [case]}, time.monotonic() - 1)] == []


# --- the judge ----------------------------------------------------------------------------------------------------

PLANTED = """
import os, socket, time
from pathlib import Path

def named(n): raise ValueError(f"n must be above 0, got {n}")
def nameless(n): raise ValueError("that is wrong")
def of_another_kind(n): raise RuntimeError(f"n must be above 0, got {n}")
def from_inside(n): return [1, 2][n]
def of_a_library(n): return int("n must be above 0")
def passed_on(n):
    try: int("n")
    except ValueError: raise
def wrapped(n):
    try: int("n")
    except ValueError as cause: raise ValueError(f"n must be a number, got {n}") from cause
def asserted(n): assert n > 10, f"n must be above 10, got {n}"
def endless(n):
    while True:
        try: n += 1
        except Exception: pass
def asleep(n): time.sleep(60)
def large(n): return bytearray(10**12)
def written(n): Path("/").joinpath("var/tmp/n").write_text("")
def called(n): socket.create_connection(("127.0.0.1", 9))
def fine(n): return n
"""
ENDS = {
    "named": "refused", "wrapped": "refused", "fine": "answered", "endless": "slow", "asleep": "slow",
    **dict.fromkeys(("nameless", "of_another_kind", "from_inside", "of_a_library", "passed_on", "asserted",
    "large"), "raw"),
    **dict.fromkeys(("written", "called"), "raw"),
}  # fmt: skip


ANSWERS: dict[str, tuple[object, object, str]] = {
    "a number in bounds": (0.5, 2.0, "answered"), "a number that the annotation excludes": (-1.0, 2.0, "let in"),
    "a truth": (True, 2.0, "let in"), "NaN of nothing": (0.5, math.nan, "nan"),
    "infinity of nothing": (0.5, [1.0, -math.inf], "nan"),
    "no interval": (0.5, xr.Dataset({"value": 1.0, "low": math.nan}), "answered"),
    "no value": (0.5, xr.Dataset({"value": math.nan}), "nan"),
}  # fmt: skip


@over("what", ANSWERS)
def test_an_answer_is_judged_by_what_was_asked(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, answer, kind = ANSWERS[what]

    def planted(share: Positive = 1.0) -> object:
        return 2.0 if share == 1.0 else answer

    monkeypatch.setitem(functions.FUNCTIONS, "planted", planted)
    functions.valid_of.cache_clear()
    functions._usual_odd.cache_clear()
    assert ended(functions.case("planted", "share", "it", lambda: value, "planted")).kind == kind


def test_nan_that_is_lost_on_the_way_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {"x": torch.ones(2)}
    for total, kind in ((torch.sum, "answered"), (torch.nansum, "let in")):
        monkeypatch.setitem(functions.FUNCTIONS, "planted", lambda x, total=total: total(x))
        monkeypatch.setattr(functions, "valid_of", lambda name: usual)
        functions._usual_odd.cache_clear()
        functions.signature.cache_clear()
        nan = lambda: torch.tensor([1.0, math.nan])  # noqa: E731
        assert ended(functions.case("planted", "x", "NaN", nan, "planted")).kind == kind


@over("name", ENDS)
def test_a_planted_error_is_told_from_a_refusal(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each function stands in a file that is taken for one of the package."""
    file = place / "planted.py"
    file.write_text(PLANTED)
    monkeypatch.setattr(judge, "PACKAGE", place)
    monkeypatch.setattr(judge, "WAITING", 0.9)
    space: dict[str, Callable[[int], object]] = {}
    exec(compile(PLANTED, str(file), "exec"), space)  # type: ignore[arg-type]
    judge._ours.cache_clear()
    try:
        begin = time.process_time()
        ending = ended(
            Case("planted", name, "n = 5", lambda: space[name](5), lambda: (r"\bn\b",), seconds=0.3)
        )
        assert ending.kind == ENDS[name], ending
        assert time.process_time() - begin < 2
    finally:
        judge._ours.cache_clear()
        Path("/var/tmp/n").unlink(missing_ok=True)
