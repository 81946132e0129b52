"""The models of the board: programs compiled to Transformers among random heads, hand-built ones, and trained ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from interp.core.wording import nearest
from interp.lab.rasp import programs
from interp.lab.rasp.compiler import compile
from interp.lab.rasp.interchange_training import InterchangeTraining, interchange_trained
from interp.lab.rasp.programs import Write
from interp.lab.rasp.variants import rotated, with_noise_heads
from interp.zoo.planted import PLANTED, Planted

HEADS = 2
"""Random heads beside those of a program in every layer."""
SPILL = 0.1
"""What they write at most to the dimensions of the variables, beside variables of size 1; halved until `SURE` holds."""
SURE = 0.75
"""The share of its lead over the next answer that a program's model keeps among random heads, on its closest input."""
INPUTS = 1000
"""How many inputs that is looked up on; all, where there are no more."""
WITHOUT_PAIRS = ("length", "position_parity")
"""Programs whose answer is the same for all inputs of one length: no pair of prompts can show their circuit."""
LEARNED = ("shift", "reverse", "induction", "two_hop", "backup", "suppression")
"""Programs with a trained equivalent: some of those of which training finds every part (of `either` it does not)."""
MOST_SEEDS, MOST_PAIRS = 1000, 10_000
"""More are taken for a mistake."""
Build = Callable[[int, int], Planted]
"""From a seed and a number of pairs to a model with its circuit and so many pairs."""


def _compiled(write: Write, seed: int, pairs: int) -> Planted:
    """A program's model in a random basis of the stream, among random heads that write to it a little.

    As much as leaves the answers what they are: what these heads say is no part of the circuit.
    """
    exact, spill = compile(write()), SPILL
    lead = SURE * exact.check(INPUTS).margin
    while (among := with_noise_heads(exact, HEADS, spill=spill, seed=seed)).check(INPUTS).margin < lead:
        spill /= 2
    return rotated(among, seed).planted(pairs, seed)


PROGRAMS: Mapping[str, Build] = MappingProxyType(
    {
        name: partial(_compiled, write)
        for name, write in programs.PROGRAMS.items()
        if name not in WITHOUT_PAIRS
    }
    | {f"planted {name}": build for name, build in PLANTED.items()}
)
"""What builds each model of the board, by name: compiled programs, and the five models of `zoo.planted`."""


def _trained(write: Write, seed: int, pairs: int) -> Planted:
    """A model trained to compute a program by the same parts; seeds draw its weights, too."""
    return interchange_trained(compile(write()), InterchangeTraining(seed=seed)).planted(pairs, seed)


TRAINED: Mapping[str, Build] = MappingProxyType(
    {f"trained {name}": partial(_trained, programs.PROGRAMS[name]) for name in LEARNED}
)
"""Trained equivalents of some programs: a minute each, so they are judged only where they are asked for by name."""


@dataclass(frozen=True, eq=False)
class Case:
    """One model of the board: which program, which seed, and the model with its circuit and pairs of prompts."""

    program: str
    seed: int
    planted: Planted
    """Of twice as many pairs as score the edges: the second half judges."""


def cases(programs: Sequence[str] | None = None, *, seeds: int = 3, pairs: int = 16) -> Iterator[Case]:
    """The models one by one: every program with every seed, which draws the basis, the random heads and the pairs.

    programs: names out of `PROGRAMS` or `TRAINED`; None: all of `PROGRAMS`. pairs: how many score the edges; as many
    others judge.
    Errors: KeyError for a program that the board lacks; ValueError for no programs, fewer than 1 seed or
    2 pairs, or far too many.

    Example:
        >>> next(experiments.board.cases(["two_hop"], pairs=4)).planted.clean.shape[0]
        8
    """
    known = {**PROGRAMS, **TRAINED}
    names = list(PROGRAMS) if programs is None else list(programs)
    for name in names:
        if name not in known:
            raise KeyError(f"unknown program {name!r}; {nearest(name, known)}; there are {', '.join(known)}")
    if not names:
        raise ValueError("at least one of programs is required, got none")
    if not 1 <= seeds <= MOST_SEEDS or not 2 <= pairs <= MOST_PAIRS:
        raise ValueError(
            f"1 to {MOST_SEEDS} seeds and 2 to {MOST_PAIRS} pairs are required, got seeds={seeds} and pairs={pairs}"
        )
    return (Case(name, seed, known[name](seed, 2 * pairs)) for name in names for seed in range(seeds))
