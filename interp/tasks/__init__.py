"""Generated tasks with a known answer: one record per task, from which all its rows are drawn.

A record says what rows look like, how many, and their seed; the same rows come on every machine. `pairs(tokenizer)` are
clean and corrupted prompts, aligned column by column, for any tokenizer: words that it has no single token for are left
out, and where too few remain the error names words and tokens. `sentences()` are texts with their answers, to train on
or to ask; `batch(place, rows)` and `tokens(...)` are rows of ids. Rows are drawn independently: one may come twice.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol

from interp.data.tokenizers import Tokenizer
from interp.tasks.agreement import Agreement
from interp.tasks.examples import Examples, Place
from interp.tasks.fact_files import QUESTION, GivenFact, GivenFacts, read_facts
from interp.tasks.facts import (
    DISTANT_PHRASINGS,
    HELD_OUT_PHRASINGS,
    TRAINED_PHRASINGS,
    Fact,
    FactPrompt,
    Facts,
    fact_prompts,
    load_facts,
)
from interp.tasks.greater_than import GreaterThan
from interp.tasks.indirect_objects import (
    GIFTS,
    NAMES,
    PLACES,
    SHORT_SENTENCES,
    TEMPLATES,
    IndirectObject,
    IndirectObjects,
)
from interp.tasks.lists import DocstringArguments, ListCopy
from interp.tasks.pair_lists import PairLists, load_word_pairs
from interp.tasks.pairs import TaskPairs
from interp.tasks.repeats import RepeatedSequences, RepeatedTokens, RepeatingChain
from interp.tasks.sequences import AssociativeRecall, InContextRegression, SequencePairs

__all__ = [
    "DISTANT_PHRASINGS", "GIFTS", "HELD_OUT_PHRASINGS", "NAMES", "PLACES", "QUESTION", "SHORT_SENTENCES",
    "TASKS", "TEMPLATES", "TRAINED_PHRASINGS", "Agreement", "AssociativeRecall", "DocstringArguments",
    "Examples", "Fact", "FactPrompt", "Facts", "GivenFact", "GivenFacts", "GreaterThan", "InContextRegression",
    "IndirectObject", "IndirectObjects", "ListCopy", "PairLists", "Place", "RepeatedSequences",
    "RepeatedTokens", "RepeatingChain", "SequencePairs", "Task", "TaskPairs", "fact_prompts", "load_facts",
    "load_word_pairs", "read_facts",
]  # fmt: skip


class Task(Protocol):
    """Protocol of a task: a record that has pairs."""

    def pairs(self, tokenizer: Tokenizer) -> TaskPairs:
        """Clean and corrupted prompts; ValueError where the tokenizer lacks the words."""
        ...


TASKS: Mapping[str, Callable[..., Task]] = MappingProxyType(
    {
        "indirect_objects": IndirectObjects,
        "greater_than": GreaterThan,
        "facts": Facts,
        "repeated_sequences": partial(RepeatedTokens, 10, 2),
        "copy": ListCopy,
        "docstring_arguments": DocstringArguments,
    }
)
"""Tasks by name: a function of `rows` and `seed` that makes the task, as `interp circuit` takes it."""
