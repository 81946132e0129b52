"""A small language of programs over sequences, after RASP (Weiss et al. 2021, arXiv:2106.06981), and their evaluation.

A program computes one value per position from the tokens and their positions. What it is made of:

    Tokens, Positions        what is given
    Constant                 the same everywhere
    Map                      a function of one variable, or of several, position by position
    select, &, .best         which positions look at which: by a predicate of their variables, by several, the best only
    Aggregate                the mean over the selected positions (of a categorical variable: what they agree on)
    selector_width           how many are selected
    Sum                      numbers added up; or, as the output, votes for its value

A variable is categorical, one of finitely many values of any kind, or numeric. Both have a `domain`, the values that it
can take on sequences of at most `length` tokens, known before any input is. `interp.lab.rasp.compile` writes a program
as the weights of a Transformer; here it is evaluated position by position, in exact fractions: the oracle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import cached_property
from itertools import product
from math import prod
from types import MappingProxyType
from typing import TypeVar

from interp.core.boundary import public
from interp.core.wording import nearest, value_text

Value = object
"""Value of a variable at one position: anything hashable for a categorical one, a Fraction for a numeric one."""
Values = TypeVar("Values", tuple[Value, ...], set[Fraction])
Track = Sequence[Value]
"""A variable's value at every position."""
MOST_VALUES, MOST_COMBINATIONS = 1000, 100_000
"""Values of one domain, and combinations that one map tells apart: more are taken for a mistake."""


@dataclass(frozen=True, eq=False)
class Variable(ABC):
    """One value per position. Every object is a variable of its own: one that is used twice is computed once."""

    name: str = field(default="", kw_only=True)
    """Name of the variable; "": by its kind, and numbered where there are several."""

    @cached_property
    def inputs(self) -> tuple[Variable, ...]:
        """The variables that it is computed from: those that its fields hold."""
        held = [getattr(self, each.name) for each in fields(self)]
        each = [item for value in held for item in (value if isinstance(value, tuple) else (value,))]
        return tuple(v for item in each for v in (item.inputs if isinstance(item, Selector) else (item,))
                     if isinstance(v, Variable))  # fmt: skip

    @cached_property
    @abstractmethod
    def domain(self) -> tuple[Value, ...]:
        """The values that it can take; of a numeric one in ascending order."""

    @abstractmethod
    def along(self, known: Mapping[Variable, Track], *, causal: bool) -> Track:
        """The variable's values, given those of its inputs."""

    @property
    def numeric(self) -> bool:
        """Whether it is a number on one dimension, and not one of its values each on a dimension of its own."""
        return False

    @cached_property
    def length(self) -> int:
        """The most tokens that a sequence may have."""
        return max((each.length for each in self.inputs), default=0)

    @property
    def label(self) -> str:
        """The variable's name or its kind."""
        return self.name or type(self).__name__.lower()


@public()
@dataclass(frozen=True, eq=False)
class Tokens(Variable):
    """The tokens: one of these symbols at each of at most `most` positions."""

    symbols: str | Sequence[str]
    most: int

    def __post_init__(self) -> None:
        if len(set(self.symbols)) < max(len(self.symbols), 1):
            raise ValueError(f"different symbols are required, at least one, got {value_text(self.symbols)}")
        if self.most < 1:
            raise ValueError(f"sequences of at least 1 token are required, got {self.most}")

    @cached_property
    def domain(self) -> tuple[Value, ...]:
        """The symbols."""
        return tuple(self.symbols)

    @cached_property
    def length(self) -> int:
        """`most`."""
        return self.most

    def along(self, known: Mapping[Variable, Track], *, causal: bool) -> Track:
        """The sequence itself, which is given."""
        return known[self]


@public()
@dataclass(frozen=True, eq=False)
class Positions(Variable):
    """The index of every token, from 0."""

    tokens: Tokens

    @cached_property
    def domain(self) -> tuple[Value, ...]:
        """0 to the last."""
        return tuple(range(self.length))

    def along(self, known: Mapping[Variable, Track], *, causal: bool) -> Track:
        """0, 1, 2, ..."""
        return tuple(range(len(known[self.tokens])))


@public()
@dataclass(frozen=True, eq=False)
class Constant(Variable):
    """A value that is alike everywhere: what a head moves to say no more than that it found something."""

    value: Value
    number: bool = False

    @property
    def numeric(self) -> bool:
        """`number`."""
        return self.number

    @cached_property
    def domain(self) -> tuple[Value, ...]:
        """The value."""
        return _domain([self.value], numeric=self.number)

    def along(self, known: Mapping[Variable, Track], *, causal: bool) -> Track:
        """The value, at every position there is."""
        return self.domain * max((len(track) for track in known.values()), default=0)


@public()
@dataclass(frozen=True, eq=False)
class Map(Variable):
    """A function of one variable, or of several categorical ones; `number`: its values are numbers on one dimension."""

    function: Callable[..., Value]
    of: Variable | tuple[Variable, ...]
    number: bool = False

    def __post_init__(self) -> None:
        if not self.inputs or any(isinstance(each, Constant) for each in self.inputs):
            raise ValueError(
                "a Map of a variable is required, got one of nothing or of a Constant: write its value"
            )
        for each in self.inputs if len(self.inputs) > 1 else ():
            _categorical(
                each, "a Map of several variables reads categorical ones (a Map makes one of a number)"
            )

    @property
    def numeric(self) -> bool:
        """`number`."""
        return self.number

    @cached_property
    def domain(self) -> tuple[Value, ...]:
        """The function's image over all combinations."""
        return _domain([self(*each) for each in self.combinations], numeric=self.number)

    @cached_property
    def combinations(self) -> tuple[Track, ...]:
        """Every combination of values that the function may meet."""
        if (count := prod(len(each.domain) for each in self.inputs)) > MOST_COMBINATIONS:
            raise ValueError(
                f"a Map of at most {MOST_COMBINATIONS} combinations of values is required, got {count}"
            )
        return tuple(product(*(each.domain for each in self.inputs)))

    def along(self, known: Mapping[Variable, Track], *, causal: bool) -> Track:
        """The function, position by position."""
        return tuple(self(*each) for each in zip(*(known[v] for v in self.inputs), strict=True))

    def __call__(self, *values: Value) -> Value:
        """The function's value."""
        return _exact(self.function(*values), numeric=self.number)


@public()
@dataclass(frozen=True, eq=False)
class Condition:
    """Which keys a query selects, by a variable of each."""

    keys: Variable
    queries: Variable
    predicate: Callable[..., bool]

    def __post_init__(self) -> None:
        for each in (self.keys, self.queries):
            _categorical(each, "select compares categorical variables")


@public()
@dataclass(frozen=True, eq=False)
class Selector:
    """The positions that each position looks at: those that fulfil every condition and, of these, the best.

    Aggregates of one selector are one attention head.
    """

    conditions: tuple[Condition, ...]
    preferred: Variable | None = None
    """Variable with the largest value at the chosen keys, of those that fulfil the conditions; None: all of them."""

    def __post_init__(self) -> None:
        if self.preferred is not None:
            _categorical(
                self.preferred, "the best are those with the largest value of a categorical variable"
            )
            try:
                sorted(self.preferred.domain)  # type: ignore[type-var]
            except TypeError:
                raise ValueError(
                    f"values with an order are required to prefer some, got {self.preferred.domain}"
                ) from None

    def __and__(self, other: Selector) -> Selector:
        """The selector of the positions that both select."""
        if None not in (self.preferred, other.preferred):
            raise ValueError("only one of two selectors may have a preference")
        return Selector(self.conditions + other.conditions, self.preferred or other.preferred)

    def best(self, variable: Variable) -> Selector:
        """The selector of the selected positions with the largest value of a categorical variable."""
        return Selector(self.conditions, variable)

    @property
    def inputs(self) -> tuple[Variable, ...]:
        """Every variable that it reads."""
        each = [variable for c in self.conditions for variable in (c.queries, c.keys)]
        return (*each, *(() if self.preferred is None else (self.preferred,)))

    def chosen(self, known: Mapping[Variable, Track], *, n: int, causal: bool) -> list[list[int]]:
        """The selected positions of every position."""
        found = []
        for query in range(n):
            keys = [
                key
                for key in range(query + 1 if causal else n)
                if all(c.predicate(known[c.keys][key], known[c.queries][query]) for c in self.conditions)
            ]
            if self.preferred is not None and keys:
                values = known[self.preferred]
                most = max(values[key] for key in keys)  # type: ignore[type-var]
                keys = [key for key in keys if values[key] == most]
            found.append(keys)
        return found


@public()
def select(keys: Variable, queries: Variable, predicate: Callable[..., bool]) -> Selector:
    """The selector of the keys for which `predicate(key's value, query's value)` holds.

    Args:
        keys: variable at the positions that are attended to.
        queries: variable at the position that attends.
        predicate: function of a key's and a query's value.

    Returns:
        `Selector`.
    """
    return Selector((Condition(keys, queries, predicate),))


def everything() -> Selector:
    """The selector of every position (that comes no later, in a causal program).

    Returns:
        `Selector`.
    """
    return Selector(())


@public()
@dataclass(frozen=True, eq=False)
class Aggregate(Variable):
    """The mean of a number over the selected positions, or the common value of a categorical variable.

    Where nothing is selected it is `default`; None, for a categorical variable that only votes, is no value at all.
    """

    selector: Selector
    values: Variable
    default: Value

    def __post_init__(self) -> None:
        if isinstance(self.values, Sum) and not self.values.numeric:
            raise ValueError("votes can only be the output of a program")

    @property
    def numeric(self) -> bool:
        """Whether what is moved is a number."""
        return self.values.numeric

    @cached_property
    def domain(self) -> tuple[Value, ...]:
        """The values that may be moved and the default; of numbers every mean of at most `length`."""
        default = () if self.default is None else (self.default,)
        if not self.numeric:
            return _domain([*self.values.domain, *default], numeric=False)
        sums, means = {Fraction(0)}, {_number(self.default)}
        for count in range(1, self.length + 1):
            sums = {total + _number(value) for total in _few(sums) for value in self.values.domain}
            means |= {total / count for total in sums}
        return _domain(list(means), numeric=True)

    def along(self, known: Mapping[Variable, Track], *, causal: bool) -> Track:
        """The mean or the one value; ValueError where the selected positions disagree on a categorical one."""
        values = known[self.values]
        chosen = self.selector.chosen(known, n=len(values), causal=causal)
        return tuple(self._one([values[key] for key in keys]) for keys in chosen)

    def _one(self, values: list[Value]) -> Value:
        if not values:
            return _exact(self.default, numeric=self.numeric)
        if self.numeric:
            return sum(map(_number, values), Fraction(0)) / len(values)
        if len(set(values)) > 1:
            raise ValueError(
                f"{self.label} requires that selected positions agree on a categorical variable, got "
                f"{', '.join(map(str, dict.fromkeys(values)))}: choose among them by Selector.best"
            )
        return values[0]


@public()
@dataclass(frozen=True, eq=False)
class Share(Variable):
    """1 / (1 + the number of selected positions): the share of attention for one more position that is always there."""

    selector: Selector
    tokens: Tokens

    def __post_init__(self) -> None:
        if self.selector.preferred is not None:
            raise ValueError("the width of a selector without a preference is required")

    @property
    def numeric(self) -> bool:
        """True."""
        return True

    @cached_property
    def domain(self) -> tuple[Value, ...]:
        """1, 1/2, 1/3, ..."""
        return _domain([Fraction(1, 1 + n) for n in range(self.length + 1)], numeric=True)

    def along(self, known: Mapping[Variable, Track], *, causal: bool) -> Track:
        """The shares."""
        chosen = self.selector.chosen(known, n=len(known[self.tokens]), causal=causal)
        return tuple(Fraction(1, 1 + len(keys)) for keys in chosen)


@public()
def selector_width(selector: Selector, tokens: Tokens, name: str = "") -> Map:
    """How many positions are selected, a categorical variable: a head and, to invert its share, an MLP.

    Args:
        selector: which positions.
        tokens: the program's input.
        name: the variable's name; "": its default.

    Returns:
        `Map`, an integer at every position.
    """
    return Map(lambda share: int(1 / share) - 1, Share(selector, tokens), name=name)


@public()
@dataclass(frozen=True, eq=False)
class Sum(Variable):
    """Weighted numbers added up; or weighted votes for categorical values, of which the winner is the output.

    It has no place in the stream: what reads it reads all its terms.
    """

    terms: tuple[Variable, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.terms) != len(self.weights) or not self.terms:
            raise ValueError(
                f"one weight per term is required, got {len(self.terms)} terms and {len(self.weights)} weights"
            )
        if len({each.numeric for each in self.terms}) > 1 or any(isinstance(t, Sum) for t in self.terms):
            raise ValueError("a Sum is one of numbers or of votes, and its terms are no sums")
        if any(isinstance(each, Constant) for each in self.terms):
            raise ValueError("a Sum of variables is required, got a Constant among its terms")

    @property
    def numeric(self) -> bool:
        """Whether its terms are numbers."""
        return self.terms[0].numeric

    @cached_property
    def domain(self) -> tuple[Value, ...]:
        """Every sum, or every value with a vote."""
        if not self.numeric:
            return _domain([value for term in self.terms for value in term.domain], numeric=False)
        sums = {Fraction(0)}
        for weight, term in zip(self.weights, self.terms, strict=True):
            sums = {
                total + Fraction(weight) * _number(value) for total in _few(sums) for value in term.domain
            }
        return _domain(list(sums), numeric=True)

    def along(self, known: Mapping[Variable, Track], *, causal: bool) -> Track:
        """The sums, or the most voted values; ValueError for votes without a winner."""
        rows = zip(*(known[term] for term in self.terms), strict=True)
        return tuple((self._total if self.numeric else self._winner)(row) for row in rows)

    def _total(self, row: Sequence[Value]) -> Value:
        return sum((Fraction(w) * _number(x) for w, x in zip(self.weights, row, strict=True)), Fraction(0))

    def _winner(self, row: Sequence[Value]) -> Value:
        votes: dict[Value, Fraction] = dict.fromkeys(self.domain, Fraction(0))
        for weight, value in zip(self.weights, row, strict=True):
            if value is not None:
                votes[value] += Fraction(weight)
        most = max(votes.values())
        winners = [value for value, vote in votes.items() if vote == most]
        if len(winners) > 1:
            raise ValueError(
                f"{self.label} requires a winner, got as many votes for {winners[0]} as {winners[1]}"
            )
        return winners[0]


@public()
@dataclass(frozen=True, eq=False)
class Program:
    """A program: the variable `output`, computed at every position, with everything that it is computed from.

    Example:
        >>> tokens = Tokens("abc", 4)
        >>> positions = Positions(tokens)
        >>> before = select(positions, positions, lambda key, query: key == query - 1)
        >>> Program("shift", Aggregate(before, tokens, default="-")).evaluate("cab")
        ('-', 'c', 'a')
    """

    name: str
    output: Variable
    causal: bool = True
    """Whether a position may look only at those before it and itself."""
    note: str = ""
    """The lesson of the program, in a sentence."""

    def __post_init__(self) -> None:
        if self.output.numeric:
            raise ValueError(
                f"a categorical output is required, got the numbers of {self.output.label}: Map them"
            )
        given = [each for each in self.variables.values() if isinstance(each, Tokens)]
        if len(given) != 1:
            raise ValueError(f"a program of one Tokens is required, got {len(given)}")
        every = self.variables.values()
        silent = {each for each in every if isinstance(each, Aggregate) and each.default is None}
        votes = {each for each in every if isinstance(each, Sum) and not each.numeric}
        if self.output in silent:
            raise ValueError(
                f"an Aggregate with default None can only vote, {self.output.label} is the output"
            )
        for name, each in self.variables.items():
            read = () if isinstance(each, Sum) else each.inputs
            if silent.intersection(read):
                raise ValueError(f"an Aggregate with default None can only vote, {name} reads one")
            if votes.intersection(read):
                raise ValueError(f"votes can only be the output of a program, {name} reads some")

    @cached_property
    def variables(self) -> Mapping[str, Variable]:
        """Every variable by name, each after those that it is computed from. ValueError for a name that two have."""
        order = list(_leading_to(self.output, {}))
        found: dict[str, Variable] = {}
        for each in order:
            alike = [other for other in order if other.label == each.label]
            if each.name and len(alike) > 1:
                raise ValueError(f"different names are required, {each.name!r} is that of several variables")
            name = each.label if len(alike) == 1 else f"{each.label}_{alike.index(each) + 1}"
            found[name] = each
        return MappingProxyType(found)

    @property
    def tokens(self) -> Tokens:
        """The input of the program."""
        (found,) = (each for each in self.variables.values() if isinstance(each, Tokens))
        return found

    def check_tokens(self, tokens: str | Sequence[str]) -> None:
        """ValueError for symbols that the program does not know, for none, or for too many."""
        source = self.tokens
        if bad := [symbol for symbol in tokens if symbol not in source.domain]:
            raise ValueError(f"symbols {', '.join(source.symbols)} are required, got {bad[0]!r}")
        if not 1 <= len(tokens) <= source.length:
            raise ValueError(f"1 to {source.length} tokens are required, got {len(tokens)}")

    def trace(
        self, tokens: str | Sequence[str], given: Mapping[str, Track] | None = None
    ) -> Mapping[str, Track]:
        """Every variable at every position, by name.

        Args:
            given: variables that are set to these values instead, all that depends on them follows.

        Raises:
            ValueError: other symbols, or too many.
            KeyError: a variable that the program does not have.
        """
        self.check_tokens(tokens)
        for name in given or {}:
            if name not in self.variables:
                raise KeyError(f"no variable {name!r} in {self.name}; {nearest(name, self.variables)}")
        for name, track in (given or {}).items():
            if len(track) != len(tokens):
                raise ValueError(
                    f"{len(tokens)} values of {name}, one per token, are required, got {len(track)}"
                )
        known: dict[Variable, Track] = {self.tokens: tuple(tokens)}
        for name, each in self.variables.items():
            if given is not None and name in given:
                known[each] = tuple(given[name])
            else:
                known[each] = each.along(known, causal=self.causal)
        return {name: known[each] for name, each in self.variables.items()}

    def evaluate(self, tokens: str | Sequence[str], given: Mapping[str, Track] | None = None) -> Track:
        """The output of the program at every position.

        Args:
            tokens: the input.
            given: variables that are set to these values instead, as in `trace`.

        Raises:
            ValueError, KeyError: as `trace`.
        """
        (name,) = (name for name, each in self.variables.items() if each is self.output)
        return self.trace(tokens, given)[name]


def _leading_to(variable: Variable, found: dict[Variable, None]) -> dict[Variable, None]:
    """The variables found so far, then all that a variable is computed from, then the variable, each once."""
    for each in variable.inputs:
        if each not in found:
            _leading_to(each, found)
    found[variable] = None
    return found


def _number(value: Value) -> Fraction:
    if not isinstance(value, int | float | Fraction):
        raise ValueError(f"a number is required, got {value!r}")
    return Fraction(value)


def _exact(value: Value, *, numeric: bool) -> Value:
    return _number(value) if numeric else value


def _domain(values: Sequence[Value], *, numeric: bool) -> tuple[Value, ...]:
    """The different values, in order."""
    try:
        found = tuple(dict.fromkeys(_exact(value, numeric=numeric) for value in values))
    except TypeError as error:
        raise ValueError(f"values that can be told apart are required: {error}") from error
    return tuple(sorted(_few(found), key=_number)) if numeric else _few(found)


def _few(values: Values) -> Values:
    """The values; ValueError if they are too many for one variable."""
    if len(values) > MOST_VALUES:
        raise ValueError(f"a variable of at most {MOST_VALUES} values is required, got {len(values)}")
    return values


def _categorical(variable: Variable, why: str) -> None:
    if variable.numeric or isinstance(variable, Sum):
        raise ValueError(f"{why}, got {'numbers' if variable.numeric else 'votes'}: {variable.label}")
