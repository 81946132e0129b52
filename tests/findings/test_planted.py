"""Every claim comes out as it is in a model in which it is true by construction, and in one in which it is false."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import pytest
import torch

from interp import HookedTransformer
from interp.findings import CLAIMS
from interp.findings.relations import TASKS
from interp.findings.setting import Setting, paragraphs
from interp.findings.table import rows, setting_of
from tests.findings import plants
from tests.findings.plants import Route, distinct_countries, facts

PROMPTS = 36
Make = Callable[[], HookedTransformer]
Case = tuple[Make, Callable[[], Sequence[str]]]


def induction() -> HookedTransformer:
    """The model of `plants.induction`."""
    return plants.induction().model()


def early() -> HookedTransformer:
    """Facts in MLP 1 at the country."""
    return facts(Route(found=1, moved=2))


def late() -> HookedTransformer:
    """Facts in MLP 3 at the end."""
    return facts(Route(found=3, moved=2))


def out_of_reach() -> HookedTransformer:
    """The country is moved to the end before the layer that is edited."""
    return facts(Route(found=2, moved=1))


def told() -> list[str]:
    """Texts of facts."""
    return plants.statements(distinct_countries())


repeated = partial(plants.texts_of, 40)
PLANTED: dict[str, tuple[Case, Case]] = {
    "previous-token-heads": ((induction, paragraphs), (plants.noise_alone, paragraphs)),
    "duplicate-token-heads": ((plants.duplicates, paragraphs), (induction, paragraphs)),
    "induction-heads": ((induction, paragraphs), (plants.duplicates, paragraphs)),
    "induction-carries-copying": (
        (induction, paragraphs), (lambda: plants.induction(writes=False).model(), paragraphs),
    ),
    "previous-token-heads-feed-induction": ((induction, paragraphs), (plants.by_pointer, paragraphs)),
    "composition-shows-what-feeds": (
        (partial(plants.composed, shown=True), paragraphs), (partial(plants.composed, shown=False), paragraphs),
    ),
    "successor-heads": ((partial(plants.successor, 1), paragraphs), (partial(plants.successor, 0), paragraphs)),
    "indirect-objects": (
        (partial(plants.names, moves=True), paragraphs), (partial(plants.names, moves=False, writes=0.5), paragraphs),
    ),
    "name-movers-look": (
        (partial(plants.names, moves=True), paragraphs), (partial(plants.names, moves=False, writes=-0.5), paragraphs),
    ),
    "name-movers-raise": (
        (partial(plants.names, moves=True), paragraphs), (partial(plants.names, moves=False, writes=-0.5), paragraphs),
    ),
    "suppression-lowers": (
        (partial(plants.names, moves=False, writes=-0.5), paragraphs), (partial(plants.names, moves=True), paragraphs),
    ),
    "self-repair": (
        (partial(plants.names, moves=True, repairs=True), paragraphs),
        (partial(plants.names, moves=True), paragraphs),
    ),
    "greater-than": ((partial(plants.years, 1.0), paragraphs), (partial(plants.years, -1.0), paragraphs)),
    "in-context-learning": (
        (induction, repeated), (lambda: plants.induction(writes=False).model(), repeated),
    ),
    "attention-sinks": ((partial(plants.sink, needed=False), repeated), (plants.noise_alone, repeated)),
    "sinks-are-needed": (
        (partial(plants.sink, needed=True), lambda: ["a" * 100] * 48),
        (partial(plants.sink, needed=False), lambda: ["a" * 100] * 48),
    ),
    "massive-activations": ((plants.massive, repeated), (plants.not_massive, repeated)),
    "logit-lens": (
        (partial(plants.cycle, early=True), plants.alphabets), (partial(plants.cycle, early=False), plants.alphabets),
    ),
    "copy-suppression": ((partial(plants.one_back, -1.0), repeated), (partial(plants.one_back, 1.0), repeated)),
    "neurons-say-what-follows": (
        (partial(plants.neurons, forward=True), plants.alphabets),
        (partial(plants.neurons, forward=False), plants.alphabets),
    ),
    "facts-in-early-mlps": ((early, told), (late, told)),
    "edits-work": ((early, told), (out_of_reach, told)),
    "edits-generalise": ((early, told), (out_of_reach, told)),
    "edits-keep-language": (
        (early, lambda: [*plants.alphabets(4), *plants.statements(distinct_countries(), 20)]),
        (lambda: facts(Route(found=0, moved=2), fires="every token"), told),
    ),
    "tracing-tells-where-to-edit": (
        (
            lambda: facts(
                {"capital": Route(1, 2), "language": Route(3, 1), "currency": Route(1, 2)}, layers=5
            ),
            told,
        ),
        (
            lambda: facts(
                {"capital": Route(0, 1), "language": Route(3, 4), "currency": Route(0, 1)}, layers=5
            ),
            told,
        ),
    ),
    "edits-are-specific": (
        (early, told), (lambda: facts(Route(found=0, moved=2), fires="any country", loud=2.0), told),
    ),
    "function-vectors": (
        (partial(plants.tasks, TASKS, told=True), paragraphs),
        (partial(plants.tasks, TASKS, told=False), paragraphs),
    ),
    "linear-relations": (
        (lambda: facts(Route(1, 2), countries=plants.every_country(), dtype=torch.float32), told),
        (lambda: facts(Route(3, 2), countries=plants.every_country(), dtype=torch.float32), told),
    ),
    "directions-steer": ((late, told), (early, told)),
    "gradients-imprint": (
        (partial(plants.written, flipped=False), paragraphs), (partial(plants.written, flipped=True), paragraphs),
    ),
}  # fmt: skip
"""Claim -> a model in which it is true and one in which it is false, each with the texts that it is asked on."""


@cache
def setting(make: Make, texts: Callable[[], Sequence[str]]) -> Setting:
    """The setting of a model and its texts; several claims are asked of it."""
    return setting_of(make(), list(PLANTED), PROMPTS, list(texts()))


LONG = ("edits-", "tracing-", "function-", "linear-")
"""Claims that take seconds: edits are sought by gradient, and Jacobians row by row."""


def asked() -> list[object]:
    """Every claim with each of its models."""
    return [
        pytest.param(name, true, marks=pytest.mark.slow if name.startswith(LONG) else ())
        for name in PLANTED
        for true in (True, False)
    ]


def test_every_claim_has_its_models() -> None:
    assert set(PLANTED) == set(CLAIMS)


@pytest.mark.parametrize(("name", "true"), asked())
def test_a_claim_comes_out_as_it_was_planted(name: str, true: bool) -> None:
    make, texts = PLANTED[name][not true]
    (row,) = rows(setting(make, texts), [name])
    assert row.verdict == ("holds" if true else "does not hold"), (row.measured, row.why)


LOOK_ALIKES: dict[str, Case] = {
    "duplicate-token-heads": (partial(plants.far_back, 25), paragraphs),
    "induction-heads": (partial(plants.far_back, 24), paragraphs),
    "greater-than": (partial(plants.years, 1.0, reads=False), paragraphs),
    "in-context-learning": (partial(plants.frequencies, answers=False), plants.rare_first),
    "logit-lens": (partial(plants.frequencies, answers=True), plants.common),
}
"""Claim -> a model of which it is false, though the number alone is high: a head that looks 24 tokens back, late years
whatever the first one is, late tokens that are common, a lens that knows no more than which tokens are common."""


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_high_number_alone_is_no_evidence(name: str) -> None:
    (row,) = rows(setting(*LOOK_ALIKES[name]), [name])
    assert row.verdict == "does not hold", (row.measured, row.why)


EVEN = sum(1 / (query + 1) for query in range(8, 128)) / 120
"""Attention to the first token, spread evenly, mean over the queries from 8 to 127."""
SURE = -math.log1p((plants.N_LETTERS - 1) * math.exp(-plants.GAIN))
"""Log-probability of a token with all of `GAIN` logits, the others with none."""


@pytest.mark.parametrize(
    ("name", "true", "value", "null"),
    [
        # queries from the second token on see two keys and more; the first random token of 50 is at column 1
        ("previous-token-heads", True, 1.0, sum(1 / (q + 1) for q in range(2, 51)) / 49),
        ("induction-heads", True, 1.0, None),
        ("duplicate-token-heads", True, 0.5, None),
        ("name-movers-look", True, 1.0, 0.0),
        ("name-movers-look", False, -1 / 3, 0.0),
        ("self-repair", True, 0.5, 0.0),
        ("self-repair", False, 0.0, 0.0),
        ("attention-sinks", True, 1.0, EVEN),
        # of 100 letters the first one is predicted at BOS itself, which sees itself and not what comes
        ("sinks-are-needed", True, 0.99 * (SURE + math.log(plants.N_LETTERS)), 0.0),
        ("logit-lens", True, 0.99 * SURE - 0.01 * math.log(plants.N_LETTERS), None),
        ("logit-lens", False, -math.log(plants.N_LETTERS), None),
        ("facts-in-early-mlps", True, 1.0, 0.0),
        ("facts-in-early-mlps", False, 0.0, 0.0),
        ("indirect-objects", True, 1.0, 0.5),
        ("in-context-learning", False, 0.0, None),
    ],
)
def test_the_number_is_that_of_the_weights(name: str, true: bool, value: float, null: float | None) -> None:
    make, texts = PLANTED[name][not true]
    (row,) = rows(setting(make, texts), [name])
    assert row.measured is not None
    noise = 0.02 if name in ("in-context-learning", "duplicate-token-heads") else 1e-5
    assert row.measured.value + row.measured.null == pytest.approx(value, abs=noise)
    assert null is None or row.measured.null == pytest.approx(null, abs=1e-5)
