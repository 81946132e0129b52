"""Programs over sequences: what they evaluate to, against plain functions of the sequence; and what is refused."""

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product

import pytest

from interp.lab.rasp.language import (
    Aggregate,
    Constant,
    Map,
    Positions,
    Program,
    Sum,
    Tokens,
    Variable,
    everything,
    select,
    selector_width,
)
from interp.lab.rasp.programs import PROGRAMS
from tests.loops import over

Answer = Callable[[str, int], object]
"""What stands at position i of a text, in a program that sees the text up to i, or, if it is not causal, all of it."""


def after(text: str, what: str) -> str:
    """What follows the latest place of a symbol, "-" if nothing does."""
    places = [j for j in range(1, len(text)) if text[j - 1] == what]
    return text[places[-1]] if places else "-"


def balanced(text: str) -> str:
    while "()" in text:
        text = text.replace("()", "")
    return "no" if text else "yes"


def new(text: str, i: int) -> bool:
    return text[i] not in text[:i]


def indirect_object(text: str, i: int) -> str:
    seen = text[: i + 1]
    doubled = [c for j, c in enumerate(seen) if c != "." and c in seen[:j]]
    others = [c for c in seen if c not in (".", *doubled[-1:])]
    return others[-1] if others else "-"


def addition(text: str, i: int, half: int = 3) -> str:
    """By the integers themselves."""
    if i < half:
        return "-"
    columns = i - half + 1
    numbers = [int(text[start : start + columns][::-1], 2) for start in (0, half)]
    return f"{sum(numbers):0{columns + 1}b}"[::-1][columns - 1]


def suppression(text: str, i: int) -> str:
    repeated = i > 0 and text[i] == text[0]
    return text[i - 1] if repeated and i > 0 else text[0]


MEANT: dict[str, Answer] = {
    "copy": lambda t, i: t[i],
    "shift": lambda t, i: t[i - 1] if i else "-",
    "first": lambda t, i: t[0],
    "last": lambda t, i: t[-1],
    "reverse": lambda t, i: t[::-1][i],
    "sort": lambda t, i: sorted(t)[i],
    "max": lambda t, i: max(t[: i + 1]),
    "min": lambda t, i: min(t[: i + 1]),
    "most_frequent": lambda t, i: Counter(t).most_common(1)[0][0],
    "length": lambda t, i: len(t),
    "count": lambda t, i: t[: i + 1].count("a"),
    "histogram": lambda t, i: t.count(t[i]),
    "distinct": lambda t, i: len(set(t[: i + 1])),
    "parity": lambda t, i: ["even", "odd"][t[: i + 1].count("1") % 2],
    "position_parity": lambda t, i: ["even", "odd"][i % 2],
    "majority": lambda t, i: {1: "more", 0: "half", -1: "less"}[
        (d := t[: i + 1].count("a") - t[: i + 1].count("b")) // max(abs(d), 1)
    ],
    "duplicates_removed": lambda t, i: t[i] if new(t, i) else "-",
    "is_sorted": lambda t, i: "yes" if sorted(t[: i + 1]) == list(t[: i + 1]) else "no",
    "palindrome": lambda t, i: "yes" if t == t[::-1] else "no",
    "brackets": lambda t, i: balanced(t[: i + 1]),
    "skip_trigram": lambda t, i: "c" if t[i] == "b" and "a" in t[:i] else "-",
    "induction": lambda t, i: after(t[: i + 1], t[i]),
    "pointer_induction": lambda t, i: after(t[: i + 1], t[i]),
    "two_hop": lambda t, i: after(t[: i + 1], after(t[: i + 1], t[i])),
    "indirect_object": indirect_object,
    "addition": addition,
    "backup": lambda t, i: (["-", *t[: i + 1].replace(".", "")])[-1],
    "either": lambda t, i: "yes" if "a" in t[: i + 1] else "no",
    "suppression": suppression,
}


def texts(program: Program) -> list[str]:
    source = program.tokens
    return ["".join(t) for n in range(1, source.length + 1) for t in product(source.symbols, repeat=n)]


def test_every_program_is_checked() -> None:
    assert MEANT.keys() == PROGRAMS.keys() and len(PROGRAMS) >= 20


@over("name", PROGRAMS)
def test_program_says_what_it_is_meant_to_at_every_position(name: str) -> None:
    program = PROGRAMS[name]()
    for text in texts(program):
        assert program.evaluate(text) == tuple(MEANT[name](text, i) for i in range(len(text))), text
    assert program.note


@over("name", [name for name in PROGRAMS if PROGRAMS[name]().causal])
def test_a_causal_program_does_not_see_what_comes_later(name: str) -> None:
    program = PROGRAMS[name]()
    for text in texts(program)[:60]:
        assert program.evaluate(text)[:1] == program.evaluate(text[:1])


def test_what_a_variable_is_lies_in_its_domain() -> None:
    for name, write in PROGRAMS.items():
        program = write()
        for text in texts(program):
            for variable, track in program.trace(text).items():
                domain = program.variables[variable].domain
                assert {*track} - {None} <= {*domain}, (name, variable)


def test_addition_carries_over_any_number_of_columns() -> None:
    program = PROGRAMS["addition"]("0123456789", 8)
    assert "".join(map(str, program.evaluate("99991000"))) == "----0000"
    assert "".join(map(str, program.evaluate("32104555"))) == "----7765"


TOKENS = Tokens("ab", 3)
PLACES = Positions(TOKENS)


def numbers() -> Map:
    return Map({"a": 1, "b": 3}.__getitem__, TOKENS, number=True)


def test_a_mean_of_numbers_is_exact_and_its_domain_has_every_mean() -> None:
    mean = Aggregate(everything(), numbers(), 0)
    assert mean.domain == (0, 1, Fraction(5, 3), 2, Fraction(7, 3), 3)
    program = Program("mean", Map(str, mean, name="shown"))
    assert program.evaluate("aab") == ("1", "1", "5/3")


def test_a_width_counts_the_selected_and_nothing_selected_is_zero() -> None:
    earlier = select(PLACES, PLACES, lambda key, query: key < query)
    assert Program("before", selector_width(earlier, TOKENS)).evaluate("aba") == (0, 1, 2)


def test_a_variable_can_be_set_and_all_that_depends_on_it_follows() -> None:
    program = PROGRAMS["reverse"]()
    assert program.evaluate("abc", {"length": (2, 2, 2)}) == ("b", "a", "-")
    assert program.evaluate("abc", {"opposite": (0, 0, 1)}) == ("a", "a", "b")
    with pytest.raises(KeyError, match=r"no variable 'lenght' in reverse; nearest: length"):
        program.trace("abc", {"lenght": (1, 1, 1)})
    with pytest.raises(ValueError, match=r"3 values of length, one per token, are required, got 2"):
        program.trace("abc", {"length": (1, 1)})


def test_variables_are_named_by_kind_and_numbered_where_several() -> None:
    one = Map(str, PLACES)
    program = Program("names", Map(lambda a, b: a + b, (one, TOKENS)))
    assert list(program.variables) == ["tokens", "positions", "map_1", "map_2"]
    assert program.variables["map_1"] is one


def agrees() -> Variable:
    return Aggregate(everything(), TOKENS, "-")


@over(
    "text, match",
    [
        ("ac", r"symbols a, b are required, got 'c'"),
        ("", r"1 to 3 tokens are required, got 0"),
        ("abab", r"1 to 3 tokens are required, got 4"),
    ],
)
def test_a_sequence_that_is_none_is_refused(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Program("copy", TOKENS).evaluate(text)


def test_disagreeing_positions_and_tied_votes_are_refused_when_met() -> None:
    program = Program("any", agrees())
    assert program.evaluate("aaa") == ("a", "a", "a")
    with pytest.raises(
        ValueError, match=r"agree on a categorical variable, got a, b: choose .* Selector.best"
    ):
        program.evaluate("ab")
    tie = Program("tie", Sum((TOKENS, Map({"a": "b", "b": "a"}.__getitem__, TOKENS)), (1, 1)))
    with pytest.raises(ValueError, match=r"sum requires a winner, got as many votes for a as b"):
        tie.evaluate("a")


@over(
    "made, match",
    [
        (lambda: Tokens("aa", 3), r"different symbols are required, at least one, got 'aa'"),
        (lambda: Tokens("", 3), r"different symbols are required"),
        (lambda: Tokens("ab", 0), r"at least 1 token are required, got 0"),
        (
            lambda: Program("n", numbers()),
            r"a categorical output is required, got the numbers of map: Map them",
        ),
        (
            lambda: Map(str, Constant("a")),
            r"a Map of a variable is required, got one of nothing or of a Constant",
        ),
        (lambda: Map(str, ()), r"a Map of a variable is required"),
        (
            lambda: Map(max, (TOKENS, numbers())),
            r"of several variables reads categorical ones .*, got numbers: map",
        ),
        (lambda: select(numbers(), TOKENS, max), r"select compares categorical variables, got numbers: map"),
        (
            lambda: everything().best(numbers()),
            r"the best are those with the largest value .*, got numbers: map",
        ),
        (lambda: everything().best(TOKENS) & everything().best(PLACES), r"only one of two selectors"),
        (lambda: selector_width(everything().best(PLACES), TOKENS), r"a selector without a preference"),
        (lambda: Sum((TOKENS,), (1.0, 2.0)), r"one weight per term is required, got 1 terms and 2 weights"),
        (lambda: Sum((TOKENS, numbers()), (1.0, 2.0)), r"a Sum is one of numbers or of votes"),
        (lambda: Sum((Constant("a"),), (1.0,)), r"a Sum of variables is required, got a Constant"),
        (lambda: Aggregate(everything(), Sum((TOKENS,), (1.0,)), "-"), r"votes can only be the output"),
        (
            lambda: Program("v", Map(str, Sum((TOKENS,), (1.0,)))),
            r"votes can only be the output .*, map reads some",
        ),
        (
            lambda: Program("v", Map(str, Aggregate(everything(), TOKENS, None))),
            r"default None can only vote, map",
        ),
        (lambda: Program("v", Aggregate(everything(), TOKENS, None)), r"default None can only vote"),
        (
            lambda: Program("t", Map(max, (TOKENS, Tokens("ab", 3)))),
            r"a program of one Tokens is required, got 2",
        ),
        (
            lambda: Program("n", Map(max, (Map(str, TOKENS, name="x"), Map(str, TOKENS, name="x")))),
            r"different names are required, 'x' is that of several variables",
        ),
        (lambda: Map(str, Tokens("ab", 3), number=True).domain, r"a number is required, got 'a'"),
        (
            lambda: Map(lambda *x: x, (Positions(Tokens("a", 40)),) * 2).domain,
            r"at most 1000 values .*, got 1600",
        ),
    ],
)
def test_what_is_no_program_is_refused(made: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        made()


def test_a_preference_among_values_without_an_order_is_refused() -> None:
    mixed: Sequence[object] = ("a", 1)
    with pytest.raises(ValueError, match=r"values with an order are required .* got \('a', 1\)"):
        everything().best(Map(lambda i: mixed[i % 2], PLACES))
