"""`python -m tests.fuzz --cases 5000 --seed 1`: a larger budget than that of the test suite; counts by family and
function."""

import argparse
import collections
import os
import pickle
import random
import resource
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from tests.fuzz import commands, functions, loaders
from tests.fuzz.judge import Case, Ending, ended

AT_ONCE = 200
"""Cases that one process makes: what breaks it is a case of its own, and its memory is given back."""


def main() -> int:
    """Make a seeded sample of all cases; 1 if one is raw or slow."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=5000, help="of each family; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="text that the name of a case must hold")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    by_name: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    makers = (functions.cases, partial(loaders.cases, asked.seed), loaders.configs, commands.cases)
    every = (case for make in makers for case in make())
    chosen = [case for case in every if asked.only in str(case)]
    random.Random(asked.seed).shuffle(chosen)
    counts: collections.Counter[str] = collections.Counter()
    picked = []
    for case in chosen:
        counts[case.family] += 1
        if not asked.cases or counts[case.family] <= asked.cases:
            picked.append(case)
    picked.sort(key=lambda case: (case.family, case.name))
    for case, ending in made(picked):
        found[case.family][ending.kind] += 1
        by_name[case.name][ending.kind] += 1
        if ending.kind in ("raw", "slow"):
            print(f"{ending.kind} {case}: {' '.join(ending.problem.split())[:300]}", flush=True)
    for name, ends in sorted(by_name.items()):
        print(f"    {name}: {dict(sorted(ends.items()))}")
    for family, ends in found.items():
        print(f"{family}: {ends.total()} of {counts[family]} cases, {dict(sorted(ends.items()))}")
    return int(any(ends["raw"] + ends["slow"] for ends in found.values()))


def made(cases: Sequence[Case]) -> Iterator[tuple[Case, Ending]]:
    """The ends of calls, in processes that each make some of them; one that dies is raw, and the next one goes on."""
    done = 0
    while done < len(cases):
        for ending in _forked(cases[done : done + AT_ONCE]):
            yield cases[done], ending
            done += 1


def _forked(cases: Sequence[Case]) -> Iterator[Ending]:
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "wb") as out:
            for case in cases:
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
    if got < len(cases):
        yield Ending("raw", f"the process ends: status {status}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        sys.exit(main())
