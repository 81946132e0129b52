"""The programs that come with the package, from the token before to addition with carry, by name: `PROGRAMS`.

Each is a function of its symbols and of the most tokens that a sequence may have, and small by default, so that every
input can be tried. All are total: whatever the input, the program has an answer at every position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from interp.lab.rasp.language import (
    Aggregate,
    Constant,
    Map,
    Positions,
    Program,
    Selector,
    Sum,
    Tokens,
    Variable,
    everything,
    select,
    selector_width,
)

NONE = "-"
"""Answer of a program where there is nothing."""


def _same(key: object, query: object) -> bool:
    return key == query


def _earlier(positions: Positions) -> Selector:
    return select(positions, positions, lambda key, query: key < query)


def _at(positions: Positions, where: Variable) -> Selector:
    """The selector of the position with the index in a variable."""
    return select(positions, where, _same)


def _before(tokens: Tokens, positions: Positions, name: str = "before") -> Aggregate:
    """The token before."""
    previous = select(positions, positions, lambda key, query: key == query - 1)
    return Aggregate(previous, tokens, NONE, name=name)


# --- moving tokens ----------------------------------------------------------------------------------------------------


def copy(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """The token itself: one edge, from the embeddings to the logits."""
    return Program("copy", Tokens(symbols, most), note="the direct path alone")


def shift(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """The token before: a previous-token head."""
    tokens = Tokens(symbols, most)
    return Program("shift", _before(tokens, Positions(tokens)), note="one head, by position")


def first(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """The first token: a head with constant queries."""
    tokens = Tokens(symbols, most)
    positions = Positions(tokens)
    start = select(positions, positions, lambda key, query: key == 0)
    return Program(
        "first", Aggregate(start, tokens, NONE), note="one head that looks at a place, whoever asks"
    )


def last(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """The last token, at every position."""
    tokens = Tokens(symbols, most)
    end = everything().best(Positions(tokens))
    return Program("last", Aggregate(end, tokens, NONE), causal=False, note="one head, by preference")


def reverse(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """The sequence backwards: its length, the opposite position, the token there."""
    tokens = Tokens(symbols, most)
    positions = Positions(tokens)
    return Program("reverse", _reversed(tokens, positions), causal=False, note="Q-composition through an MLP")


def _reversed(tokens: Tokens, positions: Positions) -> Aggregate:
    length = selector_width(everything(), tokens, name="length")
    opposite = Map(lambda n, i: n - 1 - i, (length, positions), name="opposite")
    return Aggregate(_at(positions, opposite), tokens, NONE, name="reversed")


def sort(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """The tokens in order: the rank of each, then the token with the rank of the position."""
    tokens = Tokens(symbols, most)
    positions = Positions(tokens)
    order = Map(lambda token, i: (token, i), (tokens, positions), name="order")
    rank = selector_width(select(order, order, lambda key, query: key < query), tokens, name="rank")
    there = select(rank, positions, _same)
    return Program("sort", Aggregate(there, tokens, NONE), causal=False, note="K-composition through MLPs")


def most_of(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """The largest token so far: a head that prefers."""
    tokens = Tokens(symbols, most)
    return Program("max", Aggregate(everything().best(tokens), tokens, NONE), note="one head, by preference")


def least_of(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """The smallest token so far."""
    tokens = Tokens(symbols, most)
    order = sorted(symbols, reverse=True)
    small = Map(order.index, tokens, name="smallness")
    return Program("min", Aggregate(everything().best(small), tokens, NONE), note="an MLP before a head")


def most_frequent(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """The most frequent token, of several the one that comes first."""
    tokens = Tokens(symbols, most)
    positions = Positions(tokens)
    count = selector_width(select(tokens, tokens, _same), tokens, name="count")
    merit = Map(lambda n, i: (n, -i), (count, positions), name="merit")
    best = everything().best(merit)
    return Program(
        "most_frequent", Aggregate(best, tokens, NONE), causal=False, note="a head by what others counted"
    )


# --- counting ---------------------------------------------------------------------------------------------------------


def length(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """How many tokens there are."""
    tokens = Tokens(symbols, most)
    return Program(
        "length", selector_width(everything(), tokens), causal=False, note="a uniform head, inverted"
    )


def count(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """How often the first symbol was seen so far."""
    tokens = Tokens(symbols, most)
    ours = select(tokens, tokens, lambda key, query: key == symbols[0])
    return Program(
        "count", selector_width(ours, tokens), note="ties share attention; an MLP inverts the share"
    )


def histogram(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """How often the token at each position occurs."""
    tokens = Tokens(symbols, most)
    alike = select(tokens, tokens, _same)
    return Program(
        "histogram", selector_width(alike, tokens), causal=False, note="a head that matches tokens"
    )


def distinct(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """How many different tokens were seen so far."""
    tokens = Tokens(symbols, most)
    seen = _seen(tokens, Positions(tokens))
    new = select(seen, tokens, lambda key, query: key == "no")
    return Program("distinct", selector_width(new, tokens), note="a head counts what another head found new")


def parity(symbols: str | Sequence[str] = "01", most: int = 5) -> Program:
    """Whether the last symbol was seen an even or an odd number of times so far."""
    tokens = Tokens(symbols, most)
    ones = selector_width(select(tokens, tokens, lambda key, query: key == symbols[-1]), tokens, name="ones")
    return Program("parity", Map(lambda n: "odd" if n % 2 else "even", ones), note="a head, then two MLPs")


def position_parity(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """Whether the position is even or odd: no head at all."""
    positions = Positions(Tokens(symbols, most))
    answer = Map(lambda i: "odd" if i % 2 else "even", positions)
    return Program("position_parity", answer, note="one MLP; the prompt does not matter")


def majority(symbols: str | Sequence[str] = "ab", most: int = 5) -> Program:
    """Whether the first symbol makes up more than half of what was seen so far, half of it, or less."""
    tokens = Tokens(symbols, most)
    ours = Map(lambda token: token == symbols[0], tokens, number=True, name="ours")
    share = Aggregate(everything(), ours, 0, name="share")
    answer = Map(lambda x: "half" if 2 * x == 1 else "more" if 2 * x > 1 else "less", share)
    return Program("majority", answer, note="a mean of numbers")


# --- relations --------------------------------------------------------------------------------------------------------


def duplicates_removed(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """The token where it is new, nothing where it was seen before."""
    tokens = Tokens(symbols, most)
    seen = _seen(tokens, Positions(tokens))
    answer = Map(lambda token, again: NONE if again == "yes" else token, (tokens, seen))
    return Program("duplicates_removed", answer, note="a duplicate-token head and an MLP")


def _seen(tokens: Tokens, positions: Positions) -> Aggregate:
    """Whether the token stands anywhere before."""
    alike = select(tokens, tokens, _same) & _earlier(positions)
    return Aggregate(alike, Constant("yes"), "no", name="seen")


def is_sorted(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """Whether the tokens so far are in order."""
    tokens = Tokens(symbols, most)
    before = _before(tokens, Positions(tokens))
    falls = Map(lambda old, new: old != NONE and old > new, (before, tokens), name="falls")
    answer = Aggregate(select(falls, tokens, lambda key, query: key), Constant("no"), "yes")
    return Program("is_sorted", answer, note="a head looks for what an MLP made of another head")


def palindrome(symbols: str | Sequence[str] = "ab", most: int = 5) -> Program:
    """Whether the sequence reads the same backwards."""
    tokens = Tokens(symbols, most)
    back = _reversed(tokens, Positions(tokens))
    differs = Map(lambda token, other: token != other, (tokens, back), name="differs")
    answer = Aggregate(select(differs, tokens, lambda key, query: key), Constant("no"), "yes")
    return Program("palindrome", answer, causal=False, note="six sublayers in a row")


def brackets(symbols: str | Sequence[str] = "()", most: int = 6) -> Program:
    """Whether the brackets so far are balanced: as many closed as opened, and never more."""
    tokens = Tokens(symbols, most)
    step = Map(lambda token: 1 if token == symbols[0] else -1, tokens, number=True, name="step")
    depth = Aggregate(everything(), step, 0, name="depth")
    level = Map(lambda x: "below" if x < 0 else "open" if x > 0 else "level", depth, name="level")
    below = select(level, tokens, lambda key, query: key == "below")
    ever = Aggregate(below, Constant("yes"), "no", name="ever_below")
    answer = Map(lambda now, bad: "yes" if (now, bad) == ("level", "no") else "no", (level, ever))
    return Program(
        "brackets", answer, note="depth as a mean of numbers, then a look for any that is negative"
    )


def skip_trigram(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """The last symbol where the token is the second and the first was seen anywhere before; else nothing."""
    tokens = Tokens(symbols, most)
    start, middle, end = symbols[0], symbols[1], symbols[-1]
    found = select(tokens, tokens, lambda key, query: (key, query) == (start, middle))
    return Program("skip_trigram", Aggregate(found, Constant(end), NONE), note="one head, by tokens alone")


# --- looking up in the context ----------------------------------------------------------------------------------------


def _after(tokens: Tokens, positions: Positions, before: Variable, what: Variable, name: str) -> Aggregate:
    """The token after the latest place where the token was the value of a variable; nothing is not looked up."""
    found = select(before, what, lambda key, query: key == query != NONE).best(positions)
    return Aggregate(found, tokens, NONE, name=name)


def induction(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """The token after the latest earlier occurrence of the token, by K-composition with a previous-token head."""
    tokens = Tokens(symbols, most)
    positions = Positions(tokens)
    answer = _after(tokens, positions, _before(tokens, positions), tokens, "after")
    return Program("induction", answer, note="a previous-token head and an induction head, by keys")


def pointer_induction(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """The token after the latest earlier occurrence of the token, by Q-composition (a pointer to the next position)."""
    tokens = Tokens(symbols, most)
    positions = Positions(tokens)
    alike = (select(tokens, tokens, _same) & _earlier(positions)).best(positions)
    where = Aggregate(alike, positions, NONE, name="where")
    following = Map(lambda i: NONE if i == NONE else i + 1, where, name="next")
    answer = Aggregate(_at(positions, following), tokens, NONE, name="after")
    return Program(
        "pointer_induction", answer, note="a position is moved, one is added, then it is looked up"
    )


def two_hop(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """Induction twice: the token after the latest occurrence of the token that induction answers."""
    tokens = Tokens(symbols, most)
    positions = Positions(tokens)
    before = _before(tokens, positions)
    once = _after(tokens, positions, before, tokens, "once")
    return Program("two_hop", _after(tokens, positions, before, once, "twice"), note="two look-ups in a row")


def indirect_object(symbols: str | Sequence[str] = "abc.", most: int = 4) -> Program:
    """The latest name that is not the one which stands there twice; the last symbol is no name.

    A duplicate-token head marks names that were seen before, an S-inhibition head moves the latest of them to where
    it is asked, a name mover looks for another name (Wang et al. 2022, arXiv:2211.00593).
    """
    tokens = Tokens(symbols, most)
    positions, blank = Positions(tokens), symbols[-1]
    seen = _seen(tokens, positions)
    again = select(seen, tokens, lambda key, query: key == "yes")
    names = select(tokens, tokens, lambda key, query: key != blank)
    subject = Aggregate((again & names).best(positions), tokens, NONE, name="subject")
    other = (names & select(tokens, subject, lambda key, query: key != query)).best(positions)
    return Program(
        "indirect_object", Aggregate(other, tokens, NONE, name="object"), note="what not to look at"
    )


def addition(symbols: str | Sequence[str] = "01", most: int = 6) -> Program:
    """The sum of two numbers of most / 2 digits, one after the other, the lowest digit first.

    In the second half each position finds its partner, and what the column adds up to. The carry is that of the latest
    column before which does not merely pass on what it gets.
    """
    tokens, half, base = Tokens(symbols, most), most // 2, len(symbols)
    positions = Positions(tokens)
    partner = Aggregate(
        select(positions, positions, lambda key, query: key == query - half), tokens, NONE, name="partner"
    )
    digit = {symbol: i for i, symbol in enumerate(symbols)}
    column = Map(lambda a, b: NONE if b == NONE else digit[a] + digit[b], (tokens, partner), name="column")
    decides = select(column, tokens, lambda key, query: key not in (NONE, base - 1)) & _earlier(positions)
    generates = Map(lambda n: "yes" if n != NONE and n >= base else "no", column, name="generates")
    carry = Aggregate(decides.best(positions), generates, "no", name="carry")
    answer = Map(
        lambda n, c: NONE if n == NONE else symbols[(n + (c == "yes")) % base], (column, carry), name="sum"
    )
    return Program("addition", answer, note="the carry is looked up, not passed along")


# --- hidden from the loss of one part ---------------------------------------------------------------------------------


def backup(symbols: str | Sequence[str] = "ab.", most: int = 4) -> Program:
    """The latest name; the last symbol is no name. A second head waits, should the first say nothing.

    The mover writes the name, and that it found one. Only where it did not, the backup looks for a name too; where it
    looks in vain it says nothing at all.
    """
    tokens = Tokens(symbols, most)
    positions = Positions(tokens)
    names = select(tokens, tokens, lambda key, query: key != symbols[-1]).best(positions)
    mover = Aggregate(names, tokens, NONE, name="mover")
    found = Aggregate(names, Constant(1, number=True), 0, name="found")
    awake = Map(lambda x: "asleep" if 2 * x > 1 else "awake", found, name="awake")
    wakes = select(tokens, awake, lambda key, query: query == "awake") & names
    stand_in = Aggregate(wakes, tokens, None, name="backup")
    return Program("backup", Sum((mover, stand_in), (1.0, 0.75)), note="without the mover its backup speaks")


def either(symbols: str | Sequence[str] = "ab", most: int = 4) -> Program:
    """Whether the first symbol was seen: two heads look for it, and one that finds it is enough."""
    tokens = Tokens(symbols, most)

    def looks(name: str) -> Aggregate:
        ours = select(tokens, tokens, lambda key, query: key == symbols[0])
        return Aggregate(ours, Constant(1, number=True), 0, name=name)

    both = Sum((looks("one"), looks("other")), (1.0, 1.0), name="both")
    answer = Map(lambda x: "yes" if 2 * x > 1 else "no", both)
    return Program("either", answer, note="what either of two heads writes can be lost")


def suppression(symbols: str | Sequence[str] = "abc", most: int = 4) -> Program:
    """The first token, unless the last one seen repeats it: then a negative head takes it back.

    One head votes for the first token, another with half the weight for the token before; where the token itself is
    the first one again, a third takes 3/4 of its vote back (copy suppression, McDougall et al. 2023, arXiv:2310.04625).
    """
    tokens = Tokens(symbols, most)
    positions = Positions(tokens)
    start = select(positions, positions, lambda key, query: key == 0)
    leader = Aggregate(start, tokens, NONE, name="leader")
    second = _before(tokens, positions, name="second")
    repeats = start & select(tokens, tokens, _same) & _earlier(positions)
    negative = Aggregate(repeats, tokens, None, name="negative")
    votes = Sum((leader, second, negative), (1.0, 0.5, -0.75))
    return Program("suppression", votes, note="a head whose output counts against what it looks at")


@runtime_checkable
class Write(Protocol):
    """A function that writes one of the programs."""

    def __call__(self, symbols: str | Sequence[str] = ..., most: int = ...) -> Program:
        """The program for these symbols and at most so many tokens."""
        ...


PROGRAMS: dict[str, Write] = {
    "copy": copy, "shift": shift, "first": first, "last": last, "reverse": reverse, "sort": sort, "max": most_of,
    "min": least_of, "most_frequent": most_frequent, "length": length, "count": count, "histogram": histogram,
    "distinct": distinct, "parity": parity, "position_parity": position_parity, "majority": majority,
    "duplicates_removed": duplicates_removed, "is_sorted": is_sorted, "palindrome": palindrome, "brackets": brackets,
    "skip_trigram": skip_trigram, "induction": induction, "pointer_induction": pointer_induction, "two_hop": two_hop,
    "indirect_object": indirect_object, "addition": addition, "backup": backup, "either": either,
    "suppression": suppression,
}  # fmt: skip
"""The programs by name."""
