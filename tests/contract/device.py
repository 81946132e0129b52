"""What every question asks of a simulated accelerator, and the table of it.

`python -m tests.contract.device` renews the table, `python -m tests.contract.device NAME` the line of one.
`python -m tests.contract.device places NAME` says which lines ask.

Each is asked once before, so that what is made once in a process is made, and its numbers must be the host's; then it
is counted on one batch of 5 rows, with what is kept of weights (`interp.runs.kept`) made anew.
"""

import atexit
import collections
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import xarray as xr

import interp
from interp.passes.question import Question
from interp.runs import kept
from tests.configs import build
from tests.contract import calls
from tests.contract.case import agree, called, with_saes
from tests.contract.cases import CASES
from tests.contract.simulated import Simulated, on_device

TABLE, ROOT = Path(__file__).with_suffix(".csv"), Path(__file__).parents[2]
QUESTIONS = tuple(
    name for name, case in CASES.items() if isinstance(case.question_for(case.models[0]), Question)
)
FUNCTIONS = (
    "observe", "causal.align", "causal.patch_preset", "causal.subject_spread", "circuits.score_edges",
    "dynamics.influence", "editing.gradient_edit", "editing.key_moment", "editing.mend_edit", "editing.rome_edit",
    "editing.shift_edit", "editing.train_z", "lenses.train_tuned_lens", "runs.store_activations",
)  # fmt: skip
"""What else takes a model and computes; the functions of questions are counted as these."""


PROGRAM = """
import sys
from tests.contract.simulated import plugged_in
plugged_in()  # before anything is differentiated, which the table of questions is made of
from tests.contract import device
device.told(*sys.argv[1:])
"""


class Counts(NamedTuple):
    """What one call asks of the device."""

    kernels: int
    """Operators that compute something there."""
    waits: int
    """Times that the host waits for it."""
    sent: int
    """Copies to it that the host does not wait for."""


def measured(*names: str) -> dict[str, Counts]:
    """The counts of today (of all names, unless some are given), from a process that has the device."""
    return {name: Counts(*found) for name, found in _told("counts", *names).items()}


def places(name: str) -> dict[str, int]:
    """The lines of the package that ask for something there, the most frequent first."""
    return _told("places", name)


def page_waits() -> list[int]:
    """How often the host waits for the page of a prompt and its corrupted one, and for the same page once more."""
    return [counts[1] for counts in _told("page").values()]


def _told(*arguments: str) -> dict[str, Any]:
    """What `told` prints in a fresh interpreter."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert not done.returncode, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def known() -> dict[str, Counts]:
    """The counts of the table."""
    with TABLE.open(newline="") as file:
        return {
            row["name"]: Counts(*(int(row[field]) for field in Counts._fields))
            for row in csv.DictReader(file)
        }


def renew(found: Mapping[str, Counts]) -> None:
    """Write the table with these counts, and with those that it has of others."""
    counts = known() | found
    every = [name for name in (*QUESTIONS, *FUNCTIONS) if name in counts]
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("name", *Counts._fields))
        writer.writerows((name, *counts[name]) for name in every)


def _watched(names: Iterable[str], *, where: bool) -> Iterator[tuple[str, Simulated]]:
    warnings.simplefilter("ignore")
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    tempfile.tempdir = folder
    os.chdir(folder)
    functions = [name for name in names if name in FUNCTIONS]
    moved = _functions(functions) if functions else {}
    for name in names:
        call = moved[name] if name in moved else question(name)
        with Simulated():
            first = call()
        if isinstance(first, xr.Dataset) and name in CASES:
            same = question(name, on_host=True)()
            assert isinstance(same, xr.Dataset)
            agree(first, same)
        kept.forget()
        with Simulated(where=where) as found:
            call()
        yield name, found


def question(name: str, *, on_host: bool = False) -> Callable[[], object]:
    """A question of the table, its model and what it brings of weights on the device, unless they stay on the host."""
    case = CASES[name]
    model = case.models[0]
    question = case.record(model)
    batch = None if case.alone else case.batch(model)
    network = build(model)
    if not on_host:
        question = with_saes(question, on_device)
        network = on_device(network)
    if not on_host and network.dictionaries:
        network = network.with_dictionaries([on_device(each) for each in network.dictionaries.values()])
    return lambda: called(question, network, batch)


def _functions(names: Sequence[str]) -> dict[str, Callable[[], object]]:
    """The valid calls of functions, with models that are on the device: in this process, from now on."""
    own = {make: getattr(calls, make.__name__)() for make in (calls.model, calls.plain, calls.tuned)}
    there = {
        make: interp.HookedTransformer(on_device(each.transformer), each.text.tokenizer)
        for make, each in own.items()
    }
    for table in (calls.WORDS, *calls.CALLS.values()):
        assert isinstance(table, dict)
        table.update({word: partial(there.get, make) for word, make in table.items() if make in there})
    for make in there:
        setattr(calls, make.__name__, partial(there.get, make))
    public = dict(calls.public_names())
    return {name: partial(_call, name, public[name]) for name in names}


def _call(name: str, function: Callable[..., object]) -> object:
    return calls.called(name, function, calls.valid(name, function))


def _page() -> Iterator[tuple[str, Simulated]]:
    """The page of one prompt of `demo-4l`, twice."""
    demo = interp.HookedTransformer.from_pretrained("demo-4l")
    model = interp.HookedTransformer(on_device(demo.transformer), demo.text.tokenizer)
    prompt = "When Mary and John went to the store, {} gave a drink to"
    for name in ("first", "again"):
        with Simulated() as found:
            interp.report(model, prompt.format("John"), corrupt=prompt.format("Mary"))
        yield name, found


def told(what: str, *names: str) -> None:
    """Print the counts of these names, or of all, or of a page, or the places of one, as JSON; in a process that has
    the device.
    """
    every = names or (*QUESTIONS, *FUNCTIONS)
    found = dict(_page() if what == "page" else _watched(every, where=what == "places"))
    if what != "places":
        said = {name: (each.kernels, each.waits, each.sent) for name, each in found.items()}
    else:
        said = dict(collections.Counter.most_common(found[names[0]].places))
    sys.stdout.write(f"{json.dumps(said)}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["places"]:
        sys.stdout.writelines(f"{count:4} {place}\n" for place, count in places(sys.argv[2]).items())
    else:
        renew(measured(*sys.argv[1:]))
