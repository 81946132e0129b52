"""Every public function and record with every other value in every argument, one at a time."""

import functools
import inspect
import random
import re
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from interp.core.fitting import fits
from interp.core.hints import hints_of
from tests.contract.calls import (
    CALLS,
    NOT_RUN,
    REFUSES,
    called,
    public_methods,
    public_names,
    signature,
    valid,
)
from tests.fuzz.judge import Case
from tests.fuzz.values import DOUBTFUL, WRONG, near

FUNCTIONS = {**dict(public_names()), **dict(public_methods())}
KINDS, DOUBTS = "wrong kinds", "doubtful values"
OTHER_WORDS = {
    **dict.fromkeys(("data", "clean", "corrupt", "batch", "text", "prompts"),
    "prompt|row|token|batch|examples|vector|folder"),
    **dict.fromkeys(("answer", "wrong", "sources"), "token|answers"),
    **dict.fromkeys(("estimate", "exact"), "effects"),
    **dict.fromkeys(("heads", "where"), "a part is required"),
    "second": "conditions", "parts": "a neuron", "replacement": "a baseline", "entry": "(an edit|a change) as JSON",
    "values": "model_type|config keys", "d_model": "d_mlp", "scores": "sender", "labels": "classes|answers",
    "queries": "query",
    "at": "has the dims", "matrices": "at least one matrix", "planted": "an edge", "shard_entries": "per shard",
    "end": "finish with", "pairs": "at least one prompt",
    "path": "is no file|is a folder|beside the weights|a folder that is there",
    "tokenizer": "is no file|is a folder",
    "dtype": "is no file|is a folder", "device": "is no file|is a folder",
    **dict.fromkeys(("prompt", "reference", "subject", "pos", "span"), "prompt|token id|row|vector|mean prediction"),
    "layers": "variant", "state": "checkpoint", "tokens": "stream must",
    "truth": "directions", "W_dec": "directions",
}  # fmt: skip
"""What else messages call an argument."""
WHOLE = {("papers", "None"), ("programs", "None")}
"""Arguments that ask for everything there is, minutes of work, when they are left out."""


def cases() -> Iterator[Case]:
    """Every argument of every function with everything that is put there."""
    for name in FUNCTIONS:
        yield from cases_of(name)


def cases_of(name: str, draw: random.Random | None = None, each: int = 0) -> Iterator[Case]:
    """The same of one function; with `draw` so many of them, of arguments that are drawn."""
    arguments = [
        parameter
        for parameter in signature(FUNCTIONS[name]).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    if draw is not None:
        arguments = draw.choices(arguments, k=each) if arguments else []
    for parameter in arguments:
        usual = valid_of(name).get(parameter.name, parameter.default)
        values = [(KINDS, *every) for every in WRONG.items()]
        values += [(DOUBTS, *every) for every in (*DOUBTFUL.items(), *near(usual))]
        values = [each for each in values if (parameter.name, each[1]) not in WHOLE]
        for family, what, make in values if draw is None else [draw.choice(values)]:
            yield case(name, parameter.name, what, make, family)


def case(name: str, argument: str, what: str, make: Callable[[], object], family: str) -> Case:
    """The valid call of a function with another thing for one argument."""
    function = FUNCTIONS[name]
    return Case(
        family, name, f"{argument} = {what}",
        lambda: called(name, function, {**valid_of(name), argument: make()}),
        lambda: words_for(argument, make()),
        lambda: (f"{argument}(", "accept(") if callable(make()) else (),
        lambda: _is_answered(name, argument, make()),
    )  # fmt: skip


def _is_answered(name: str, argument: str, value: object) -> bool:
    """Whether this very call is that of `test_the_valid_call_is_valid`; of what takes long, whether it is let in."""
    if name in NOT_RUN:
        function = FUNCTIONS[name]
        hint = hints_of(function.__init__ if isinstance(function, type) else function).get(argument)
        return hint is not None and fits(value, hint)
    return name not in REFUSES and _stands_there(name, argument, value)


def words_for(argument: str, value: object) -> list[str]:
    """What a message may name: the argument, in any number, the value or what is in it, or its kind.

    Of a value of the right kind it may be another argument that it does not fit.
    """
    words = [argument, argument.rstrip("s"), type(value).__name__, getattr(value, "__name__", argument)]
    told = [rf"(?i)\b{re.escape(word)}" for word in words] + [OTHER_WORDS.get(argument, "^$")]
    inside = tuple(value) if isinstance(value, list | tuple | Mapping) and len(value) < 10 else ()
    for each in (value, *inside):
        if isinstance(each, str | Path):
            text = str(each)[:12]
            told.append(re.escape(text) if text.strip() else "empty")
        shown = re.escape(repr(each).strip().partition("\n")[0].strip("'")[:12])
        told.append(rf"(?<![\w.]){shown}")
    if isinstance(value, torch.Tensor):
        told.append(re.escape(str(list(value.shape))))
    return told


def _stands_there(name: str, argument: str, value: object) -> bool:
    """Whether the valid call has this very word, number or None there, said or by default."""
    usual = valid_of(name).get(argument, signature(FUNCTIONS[name]).parameters[argument].default)
    return type(value) is type(usual) and isinstance(value, str | float | int | None) and value == usual


@functools.cache
def valid_of(name: str) -> Mapping[str, object]:
    """The valid call of a function, made once."""
    return types.MappingProxyType(valid(name, FUNCTIONS[name]))


assert not set(CALLS) - set(FUNCTIONS), "a line of the table that is no public name"
