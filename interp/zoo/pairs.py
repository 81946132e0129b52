"""Generated clean and corrupted prompts, aligned column by column, for any tokenizer: what causal analyses run on.

Every task is a pure function of tokenizer, number of pairs and seed, with the same rows on every machine. It draws
from tables of candidate words, keeps those that this tokenizer has as single tokens, and refuses, naming words and
tokens, where too few remain. TaskPairs are drawn independently, so that one may come twice.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from interp.zoo.pair_facts import facts
from interp.zoo.pair_rows import TaskPairs
from interp.zoo.pair_sentences import greater_than, indirect_objects
from interp.zoo.pair_sequences import copy, docstring_arguments, repeated_sequences
from interp.zoo.pair_tokens import Tokenizer

__all__ = [
    "TASKS",
    "Task",
    "TaskPairs",
    "Tokenizer",
    "copy",
    "docstring_arguments",
    "facts",
    "greater_than",
    "indirect_objects",
    "repeated_sequences",
]


class Task(Protocol):
    """A tokenizer, a number of pairs and a seed -> the pairs."""

    def __call__(self, tokenizer: Tokenizer, n: int, *, seed: int = 0) -> TaskPairs:
        """`n` pairs; ValueError where the tokenizer lacks the words."""
        ...


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "indirect_objects": indirect_objects,
        "greater_than": greater_than,
        "facts": facts,
        "repeated_sequences": repeated_sequences,
        "copy": copy,
        "docstring_arguments": docstring_arguments,
    }
)
"""Name -> task, as `interp` commands and report pages ask for one."""
