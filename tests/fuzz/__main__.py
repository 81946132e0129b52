"""`make test-fuzz`: a sample of all cases, drawn by the seed, for so many minutes; counts by family and function.

`python -m tests.fuzz --seed N --only NAME` makes every case of that name, the same ones again.
"""

import argparse
import collections
import os
import pickle
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from interp.core.files import removing_at_signals
from tests.fuzz import commands, functions, loaders, results
from tests.fuzz.judge import FINE, Case, Ending, ended

AT_ONCE = 50
"""Cases that one process makes: what breaks it is a case of its own, and its memory is given back."""


def main() -> int:
    """Make a seeded sample of all cases; 1 if one fails."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of the clock")
    parser.add_argument("--seed", default="0", help="what the sample and the damages are drawn by")
    parser.add_argument("--only", default="", help="text that the name of a case must hold")
    asked = parser.parse_args()
    print(f"--seed {asked.seed} --minutes {asked.minutes:g} --only {asked.only!r}", flush=True)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    families = drawn(asked.seed, asked.only)
    ends: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    names: dict[str, set[str]] = collections.defaultdict(set)
    for case, ending in made(families, begin + 60 * asked.minutes):
        ends[case.family][ending.kind] += 1
        names[case.family].add(case.name)
        if ending.kind not in FINE:
            again = f"--seed {asked.seed} --only {str(case)!r}"
            print(f"{ending.kind} {case}: {' '.join(ending.problem.split())[:300]}\n    {again}", flush=True)
    for family, cases in families.items():
        of = f"{len(names[family])} of {len({case.name for case in cases})} names"
        print(
            f"{family}: {ends[family].total()} of {len(cases)} cases, {of}, {dict(sorted(ends[family].items()))}"
        )
    total, every = sum(each.total() for each in ends.values()), sum(map(len, families.values()))
    print(f"{total} of {every} cases in {time.monotonic() - begin:.0f} s, seed {asked.seed}")
    return int(any(kind not in FINE for each in ends.values() for kind in each))


def drawn(seed: str, only: str = "") -> dict[str, list[Case]]:
    """The cases of every family whose name holds this text, in an order that the seed draws."""
    found = collections.defaultdict[str, list[Case]](list)
    makers = (functions.cases, partial(loaders.cases, seed), loaders.configs, commands.cases, results.cases)
    for case in (case for make in makers for case in make()):
        if only in str(case):
            found[case.family].append(case)
    for cases in found.values():
        random.Random(seed).shuffle(cases)
    return dict(found)


def made(families: Mapping[str, Sequence[Case]], until: float) -> Iterator[tuple[Case, Ending]]:
    """The ends of calls, some of each family in turn, until all are made or the clock says so.

    Each process makes some; one that dies is raw, and the next one goes on.
    """
    left = {family: [*cases] for family, cases in families.items()}
    while any(left.values()):
        for cases in left.values():
            some = sorted(cases[:AT_ONCE], key=lambda case: case.name)
            del cases[:AT_ONCE]
            while some and time.monotonic() < until:
                done = 0
                for ending in _forked(some, until):
                    yield some[done], ending
                    done += 1
                some = some[done:]
        if time.monotonic() >= until:
            return


def _forked(cases: Sequence[Case], until: float) -> Iterator[Ending]:
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "wb") as out:
            for case in cases:
                if time.monotonic() > until:
                    break
                os.chdir(tempfile.mkdtemp())
                content = pickle.dumps(ended(case))
                out.write(struct.pack("I", len(content)) + content)
                out.flush()
        os._exit(0)
    os.close(write)
    got = 0
    with os.fdopen(read, "rb") as come:
        while head := come.read(4):
            yield pickle.loads(come.read(struct.unpack("I", head)[0]))
            got += 1
    _, status = os.waitpid(child, 0)
    if got < len(cases) and status:
        yield Ending("raw", f"the process ends: status {status}")


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as folder,
        removing_at_signals(partial(shutil.rmtree, folder, ignore_errors=True)),
    ):
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        os.chdir(folder)
        sys.exit(main())
