"""Tasks of copying: a list of words that is repeated, and a docstring that takes up the arguments of its function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from interp.core.boundary import public
from interp.core.kinds import PositiveCount, Seed
from interp.data.tokenizers import Tokenizer
from interp.tasks.indirect_objects import GIFTS, NAMES, PLACES
from interp.tasks.pairs import Pair, TaskPairs, next_token, pairs_of, required_single_tokens, row_of

WORDS: tuple[str, ...] = (*NAMES, *PLACES, *GIFTS)
"""Words that sequences are made of."""
ARGUMENTS: tuple[str, ...] = (
    "load", "size", "files", "last", "name", "path", "key", "value", "index", "data", "list", "user", "text",
    "count", "mode", "type", "line", "code", "time", "date", "page", "test", "host", "port", "role", "task",
    "step", "rate", "mask", "node", "tree", "root", "left", "right", "first", "head", "map", "part", "word",
    "letter", "book", "ring", "face", "hand", "life", "room", "long", "old", "man", "men", "day", "way",
)  # fmt: skip
"""Names of functions and arguments."""

DOCUMENTED = (
    "def {function}(self, {A_def}, {B_def}, {C_def}, {D_def}):\n"
    '    """The {about} {this}\n\n'
    "    :param {A_doc}: {A_text}\n"
    "    :param {B_doc}: {B_text}\n"
    "    :param"
)
"""Template of a function with a docstring that stops before its third argument, after Heimersheim and Janiak 2023."""

DEFINED: tuple[str, ...] = ("A_def", "B_def", "C_def", "D_def")
ArgumentCorruption = Literal["names", "swap"]


@public()
@dataclass(frozen=True)
class ListCopy:
    """A list of words that is repeated up to some word; the answer is the next word of the list.

    "List: key map ring cup. Again: key map" -> " ring".

    Raises:
        ValueError: lists of fewer than 2 words.
    """

    rows: PositiveCount = 32
    """Number of lists."""
    seed: Seed = 0
    """Seed of the draws."""
    words: int = 6
    """Words per list."""

    def __post_init__(self) -> None:
        if self.words < 2:
            raise ValueError(f"a list of at least 2 words is required, got {self.words}")

    @public()
    def pairs(self, tokenizer: Tokenizer) -> TaskPairs:
        """Lists and their corruptions with another word to be copied, at role source, which is `wrong`.

        The answers change places, and only what is copied differs, not where it is found (`RepeatedTokens.pairs` is
        the other way round).

        Roles: source, match (the word before it, in the first list), end. A group is a number of words already
        repeated, 1 to `words` - 1; rows are padded to the longest. Single tokens: all words.

        Args:
            tokenizer: the tokenizer of the model.

        Returns:
            `TaskPairs`.

        Raises:
            ValueError: too few words that are single tokens; the message names them.

        Example:
            >>> interp.tasks.ListCopy(5, words=4).pairs(interp.zoo.load("demo-4l")[1]).changes
            ('source',)
        """
        n = self.words
        known = [*required_single_tokens(tokenizer, WORDS, task="copy", kind="words", at_least=n + 1)]
        generator = np.random.default_rng(self.seed)
        written = generator.integers(1, n, size=self.rows).tolist()
        drawn = [generator.choice(len(known), n + 1, replace=False).tolist() for _ in range(self.rows)]
        pairs = [
            _list_pair(tokenizer, [known[i] for i in row], k) for row, k in zip(drawn, written, strict=True)
        ]
        return pairs_of("copy", pairs, changes=("source",))


def _list_pair(tokenizer: Tokenizer, drawn: Sequence[str], written: int) -> Pair:
    """One pair; `drawn` is the words of the list, then the word that replaces word `written` in the corrupted list."""
    *listed, replacement = drawn
    first = " ".join(f"{{w{i}}}" for i in range(len(listed)))
    again = " ".join(f"{{v{i}}}" for i in range(written))
    template = f"List: {first}. Again: {again}"
    words = {f"w{i}": word for i, word in enumerate(listed)} | {
        f"v{i}": word for i, word in enumerate(listed[:written])
    }
    clean = row_of(tokenizer, template, words)
    return Pair(
        clean=clean,
        corrupt=row_of(tokenizer, template, words | {f"w{written}": replacement}),
        answer=next_token(tokenizer, clean.text, f" {listed[written]}"),
        wrong=next_token(tokenizer, clean.text, f" {replacement}"),
        roles={"source": clean.columns[f"w{written}"], "match": clean.columns[f"w{written - 1}"]},
        group=f"{written} of {len(listed)} words written again",
    )


@public()
@dataclass(frozen=True)
class DocstringArguments:
    """A function of four arguments with a docstring that has described two; the answer is the third argument.

    After `def f(self, a, b, c, d):`, a summary, `:param a: ...` and `:param b: ...`, `:param` -> " c" (Heimersheim and
    Janiak 2023, "A circuit for Python docstrings in a 4-layer attention-only transformer").
    """

    rows: PositiveCount = 32
    """Number of functions."""
    seed: Seed = 0
    """Seed of the draws."""

    @public()
    def pairs(self, tokenizer: Tokenizer, *, corruption: ArgumentCorruption = "names") -> TaskPairs:
        """Functions and their corruptions with another definition; `wrong` is d, which is defined but not next.

        Roles: A_def, B_def, C_def, D_def (the definition), A_doc, B_doc (the docstring), end. One group. Single
        tokens: the function's name, its arguments and the words that describe them.

        Args:
            tokenizer: the tokenizer of the model.
            corruption: "names" puts four other names in the definition and leaves the docstring, so that there is no
                answer; "swap" exchanges c and d in the definition, so that the answers change places.

        Returns:
            `TaskPairs`.

        Raises:
            ValueError: too few words that are single tokens; the message names them.

        Example:
            >>> tokenizer = interp.zoo.load("demo-4l")[1]
            >>> interp.tasks.DocstringArguments(2).pairs(tokenizer, corruption="swap").changes
            ('C_def', 'D_def')
        """
        if corruption not in ("names", "swap"):
            raise ValueError(f"corruption must be one of names, swap, got {corruption!r}")
        task = "docstring_arguments"
        names = [*required_single_tokens(tokenizer, ARGUMENTS, task=task, kind="argument names", at_least=9)]
        words = [w for w in (*PLACES, *GIFTS) if w not in ARGUMENTS]
        words = [*required_single_tokens(tokenizer, words, task=task, kind="words", at_least=4)]
        generator = np.random.default_rng(self.seed)
        pairs = []
        for _ in range(self.rows):
            drawn = [names[i] for i in generator.choice(len(names), 9, replace=False).tolist()]
            about = [words[i] for i in generator.choice(len(words), 4, replace=False).tolist()]
            pairs.append(_docstring_pair(tokenizer, drawn, about, corruption))
        return pairs_of(task, pairs, changes=DEFINED if corruption == "names" else DEFINED[2:])


def _docstring_pair(
    tokenizer: Tokenizer, drawn: Sequence[str], about: Sequence[str], corruption: ArgumentCorruption
) -> Pair:
    """One pair; `drawn` is a function name, four arguments and four other names, `about` four docstring words."""
    function, a, b, c, d, *others = drawn
    words = {
        "function": function, **dict(zip(DEFINED, (a, b, c, d), strict=True)), "A_doc": a, "B_doc": b,
        **dict(zip(("about", "this", "A_text", "B_text"), about, strict=True)),
    }  # fmt: skip
    defined = others if corruption == "names" else (a, b, d, c)
    clean = row_of(tokenizer, DOCUMENTED, words)
    return Pair(
        clean=clean,
        corrupt=row_of(tokenizer, DOCUMENTED, words | dict(zip(DEFINED, defined, strict=True))),
        answer=next_token(tokenizer, clean.text, f" {c}"),
        wrong=next_token(tokenizer, clean.text, f" {d}"),
        roles={role: clean.columns[role] for role in (*DEFINED, "A_doc", "B_doc")},
        group=DOCUMENTED,
    )
