"""Aligned pairs of sequences: repeats, copied lists, the arguments of a documented function."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from interp.zoo import tasks
from interp.zoo.pair_rows import Pair, TaskPairs, pairs_of
from interp.zoo.pair_tokens import Row, Tokenizer, next_token, required_single_tokens, row_of

WORDS: tuple[str, ...] = (*tasks.NAMES, *tasks.PLACES, *tasks.GIFTS)
"""Words that sequences are made of."""

ARGUMENTS: tuple[str, ...] = (
    *(
        "load",
        "size",
        "files",
        "last",
        "name",
        "path",
        "key",
        "value",
        "index",
        "data",
        "list",
        "user",
        "text",
    ),
    *(
        "count",
        "mode",
        "type",
        "line",
        "code",
        "time",
        "date",
        "page",
        "test",
        "host",
        "port",
        "role",
        "task",
    ),
    *(
        "step",
        "rate",
        "mask",
        "node",
        "tree",
        "root",
        "left",
        "right",
        "first",
        "head",
        "map",
        "part",
        "word",
    ),
    *("letter", "book", "ring", "face", "hand", "life", "room", "long", "old", "man", "men", "day", "way"),
)
"""Names of functions and arguments."""

DOCUMENTED = (
    "def {function}(self, {A_def}, {B_def}, {C_def}, {D_def}):\n"
    '    """The {about} {this}\n\n'
    "    :param {A_doc}: {A_text}\n"
    "    :param {B_doc}: {B_text}\n"
    "    :param"
)
"""A function whose docstring stops before its third argument, after Heimersheim and Janiak 2023."""

DEFINED: tuple[str, ...] = ("A_def", "B_def", "C_def", "D_def")
ArgumentCorruption = Literal["names", "swap"]


def repeated_sequences(
    tokenizer: Tokenizer, n: int, *, seed: int = 0, period: int = 10, ids: Sequence[int] | None = None
) -> TaskPairs:
    """Random tokens twice over, up to the last token of the second copy: which one is it?

    [t_1 .. t_period, t_1 .. t_(period-1)] -> t_period (Olsson et al. 2022: induction). In the corrupted one the first
    occurrence of the last token, at role match, is another token from outside the row: the answer is still there,
    but nothing says that it follows. `wrong` is another token of the row, there twice, the answer once.

    ids: the tokens to draw from; by default the words of `zoo.tasks` that are single tokens. A row is decoded to its
    text, which tokenises to the same ids only where the tokenizer does so for any tokens, as it does for whole words.

    Roles: match, source (the first occurrence of the answer, after match), end. One group. A caveat: the answer
    always stands `period` columns before its place, so attention by position alone can find it, in both prompts.
    Errors: ValueError for a period under 3, or for fewer than period + 1 tokens.

    Example:
        >>> pairs = repeated_sequences(model.text.tokenizer, 2, period=3, ids=[7, 8, 9, 10])
        >>> bool((pairs.clean_tokens[:, 3] == pairs.answer).all())
        True
    """
    if period < 3:
        raise ValueError(f"a period of at least 3 tokens is required, got {period}")
    known = _drawable(tokenizer, period + 1) if ids is None else sorted({*ids} - {tokenizer.bos_id})
    if len(known) <= period:
        raise ValueError(
            f"at least {period + 1} different ids are required for period {period}, got {len(known)}"
        )
    generator = np.random.default_rng(seed)
    bos = tokenizer.bos_id
    rows = tasks.repeated_tokens(generator, n, period=period, repeats=2, vocab=known, bos=bos).tolist()
    first = int(bos is not None)
    pairs = [_repeat(generator, tokenizer, row, known, first) for row in rows]
    return pairs_of("repeated_sequences", pairs, changes=("match",))


def _drawable(tokenizer: Tokenizer, least: int) -> list[int]:
    found = required_single_tokens(tokenizer, WORDS, task="repeated_sequences", kind="words", at_least=least)
    return sorted(found.values())


def _repeat(
    generator: np.random.Generator, tokenizer: Tokenizer, tokens: list[int], known: Sequence[int], first: int
) -> Pair:
    """One pair from BOS, if there is one, and a sequence twice over."""
    source = first + (len(tokens) - first) // 2 - 1
    row, answer = tokens[:-1], tokens[-1]
    fresh = [i for i in known if i not in row]
    other = [*row[: source - 1], fresh[int(generator.integers(0, len(fresh)))], *row[source:]]
    wrong = row[int(generator.integers(first, source - 1))]
    columns = {"match": range(source - 1, source), "source": range(source, source + 1)}
    clean, corrupt = (Row(tokenizer.decode(ids[first:]), tuple(ids), columns) for ids in (row, other))
    return Pair(clean, corrupt, answer, wrong, columns, group=f"twice {source + 1 - first} tokens")


def copy(tokenizer: Tokenizer, n: int, *, seed: int = 0, words: int = 6) -> TaskPairs:
    """A list of words that is written again up to some word: which one is next?

    "List: key map ring cup. Again: key map" -> " ring". In the corrupted one the word to be copied, at role source, is
    another one, which is `wrong`: the answers change places, and only what is copied differs, not where it is found
    (`repeated_sequences` is the other way round).

    Roles: source, match (the word before it, in the first list), end. A group is a number of words already written
    again, 1 to `words` - 1; rows are padded to the longest. Single tokens: all words.
    Errors: ValueError for lists of fewer than 2 words, or naming the words where too few are single tokens.

    Example:
        >>> copy(interp.zoo.load("demo-4l")[1], 5, words=4).changes
        ('source',)
    """
    if words < 2:
        raise ValueError(f"a list of at least 2 words is required, got {words}")
    known = [*required_single_tokens(tokenizer, WORDS, task="copy", kind="words", at_least=words + 1)]
    generator = np.random.default_rng(seed)
    written = generator.integers(1, words, size=n).tolist()
    drawn = [generator.choice(len(known), words + 1, replace=False).tolist() for _ in range(n)]
    pairs = [_copied(tokenizer, [known[i] for i in row], k) for row, k in zip(drawn, written, strict=True)]
    return pairs_of("copy", pairs, changes=("source",))


def _copied(tokenizer: Tokenizer, drawn: Sequence[str], written: int) -> Pair:
    """One pair from the words of the list and one more, which takes the place of word `written` in the other prompt."""
    *listed, other = drawn
    first = " ".join(f"{{w{i}}}" for i in range(len(listed)))
    again = " ".join(f"{{v{i}}}" for i in range(written))
    template = f"List: {first}. Again: {again}"
    words = {f"w{i}": word for i, word in enumerate(listed)} | {
        f"v{i}": word for i, word in enumerate(listed[:written])
    }
    clean = row_of(tokenizer, template, words)
    return Pair(
        clean=clean,
        corrupt=row_of(tokenizer, template, words | {f"w{written}": other}),
        answer=next_token(tokenizer, clean.text, f" {listed[written]}"),
        wrong=next_token(tokenizer, clean.text, f" {other}"),
        roles={"source": clean.columns[f"w{written}"], "match": clean.columns[f"w{written - 1}"]},
        group=f"{written} of {len(listed)} words written again",
    )


def docstring_arguments(
    tokenizer: Tokenizer, n: int, *, seed: int = 0, corruption: ArgumentCorruption = "names"
) -> TaskPairs:
    """A function of four arguments whose docstring has described two: which one is next?

    After `def f(self, a, b, c, d):`, a summary, `:param a: ...` and `:param b: ...`, `:param` -> " c" (Heimersheim and
    Janiak 2023, "A circuit for Python docstrings in a 4-layer attention-only transformer"). `wrong` is d, which is
    defined but not next.

    corruption: "names" puts four other names in the definition and leaves the docstring, so that there is no answer;
        "swap" exchanges c and d in the definition, so that the answers change places.

    Roles: A_def, B_def, C_def, D_def (the definition), A_doc, B_doc (the docstring), end. One group. Single tokens: the
    function's name, its arguments and the words that describe them.
    Errors: ValueError naming the words where too few are single tokens.

    Example:
        >>> docstring_arguments(interp.zoo.load("demo-4l")[1], 2, corruption="swap").changes
        ('C_def', 'D_def')
    """
    if corruption not in ("names", "swap"):
        raise ValueError(f"corruption must be one of names, swap, got {corruption!r}")
    task = "docstring_arguments"
    names = [*required_single_tokens(tokenizer, ARGUMENTS, task=task, kind="argument names", at_least=9)]
    words = [w for w in (*tasks.PLACES, *tasks.GIFTS) if w not in ARGUMENTS]
    words = [*required_single_tokens(tokenizer, words, task=task, kind="words", at_least=4)]
    generator = np.random.default_rng(seed)
    pairs = []
    for _ in range(n):
        drawn = [names[i] for i in generator.choice(len(names), 9, replace=False).tolist()]
        about = [words[i] for i in generator.choice(len(words), 4, replace=False).tolist()]
        pairs.append(_documented(tokenizer, drawn, about, corruption))
    return pairs_of(task, pairs, changes=DEFINED if corruption == "names" else DEFINED[2:])


def _documented(
    tokenizer: Tokenizer, drawn: Sequence[str], about: Sequence[str], corruption: ArgumentCorruption
) -> Pair:
    """One pair from the function's name, four arguments, four others, and four words."""
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
