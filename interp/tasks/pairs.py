"""Clean and corrupted prompts, aligned column by column: the type, and how templates and words become its rows.

A causal experiment copies activations from one run into another column by column, so both runs must have the same
tokens at the same places except at the roles in `changes`. A pair that is not aligned is refused, never padded. The
columns of a word are found by counting the tokens of the text up to the word, so that any tokenizer will do.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import Formatter
from types import MappingProxyType

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from interp.core.boundary import check_fields, public
from interp.core.wording import nearest
from interp.data.tokenizers import Tokenizer

SHOWN = 12
"""Number of unsuitable words that an error message lists with their tokens."""


@dataclass(frozen=True, eq=False, repr=False)
class TaskPairs:
    """Clean and corrupted prompts, aligned column by column, with the answers and the columns of their words.

    Rows of one group have equal length and equal columns for every role, so that means over a group, per position,
    mean something.

    Raises:
        ValueError: a pair that differs nowhere, or outside the roles in `changes`, or a group with rows that are not
            aligned.

    Example:
        >>> tokenizer = interp.zoo.load("demo-4l")[1]
        >>> pairs = interp.tasks.IndirectObjects(4).pairs(tokenizer)
        >>> pairs
        TaskPairs('indirect_objects', 4 pairs, differing at S2; roles: IO, S1, S1+1, S2, end)
        >>> bool((pairs.clean_tokens[range(4), pairs.columns("IO")] == pairs.answer).all())
        True
    """

    task: str
    """Key of `TASKS`."""
    clean: tuple[str, ...]
    """The prompts that have the answer, without BOS; tokenising them gives `clean_tokens`."""
    corrupt: tuple[str, ...]
    """The prompts with the decisive words exchanged."""
    clean_tokens: Int[Tensor, "n p"]
    """Token ids, BOS first if the tokenizer has one, padded on the right."""
    corrupt_tokens: Int[Tensor, "n p"]
    """Token ids of the corrupted prompts; equal to the clean ones outside the roles of `changes`."""
    keep: Bool[Tensor, "n p"] | None
    """True at real tokens, in both; None = no padding anywhere."""
    answer: Int[Tensor, "n"]
    """The token that follows the clean prompt."""
    wrong: Int[Tensor, "n"]
    """The token that the answer is contrasted with; each task says which."""
    spans: Mapping[str, Bool[Tensor, "n p"]]
    """Role -> True at its columns; "end" is the last real token."""
    changes: tuple[str, ...]
    """The roles at which clean and corrupted prompts differ."""
    groups: tuple[str, ...]
    """The template of each row, and everything else that decides the columns of its words."""
    options: Int[Tensor, "c"] | None = None
    """Where the answer is a set: every token that is right or wrong for some row."""
    right: Bool[Tensor, "n c"] | None = None
    """True at options that are right after each clean prompt; the others are wrong."""
    answers: tuple[tuple[int, ...], ...] | None = None
    """All tokens of each answer, where answers are told apart as wholes; None: by the token `answer`.

    `answer` and `wrong` are then first tokens, which may be the same:
    `interp.metrics.log_prob_difference(pairs.answers, pairs.wrongs)` compares the wholes.
    """
    wrongs: tuple[tuple[int, ...], ...] | None = None
    """All tokens of each wrong answer, where there are `answers`."""

    def __post_init__(self) -> None:
        check_fields(self)
        allowed = torch.stack([self.spans[role] for role in self.changes]).any(0)
        for row in torch.nonzero((self.changed & ~allowed).any(1) | ~self.changed.any(1)).flatten().tolist():
            raise ValueError(
                f"a pair of {self.task} must differ, and only at {', '.join(self.changes)}, got "
                f"{self.clean[row]!r} and {self.corrupt[row]!r}"
            )
        layouts = torch.stack(list(self.spans.values()), 1)
        for group in dict.fromkeys(self.groups):
            first, *others = (row for row, name in enumerate(self.groups) if name == group)
            if not bool((layouts[others] == layouts[first]).all()):
                raise ValueError(f"rows of one group must have every role at the same columns, got {group!r}")

    @cached_property
    def changed(self) -> Bool[Tensor, "n p"]:
        """True where the clean and the corrupted token differ."""
        return self.clean_tokens != self.corrupt_tokens

    @public()
    def columns(self, role: str) -> Int[Tensor, "n"]:
        """The column of a role that is one token long, in each row.

        Raises:
            KeyError: an unknown role.
            ValueError: a role of several tokens, whose columns are in `spans`.
        """
        if role not in self.spans:
            raise KeyError(f"{self.task} has no role {role!r}; {nearest(role, self.spans)}")
        mask = self.spans[role]
        if bool((mask.sum(1) != 1).any()):
            raise ValueError(
                f"{role!r} is {int(mask.sum(1).min())} to {int(mask.sum(1).max())} tokens long, "
                "one column per row is required: use spans"
            )
        return mask.int().argmax(1)

    def __len__(self) -> int:
        return len(self.clean)

    def __repr__(self) -> str:
        return (
            f"TaskPairs({self.task!r}, {len(self)} pairs, differing at {', '.join(self.changes)}; "
            f"roles: {', '.join(self.spans)})"
        )


@dataclass(frozen=True)
class WordRow:
    """A text as token ids, and the columns of each of its words."""

    text: str
    """The prompt, without BOS."""
    ids: tuple[int, ...]
    """Token ids of the prompt, BOS first if the tokenizer has one."""
    columns: Mapping[str, range]
    """Field of the template -> the columns of its word."""


@dataclass(frozen=True)
class Pair:
    """One clean and one corrupted row, before they are padded to their neighbours."""

    clean: WordRow
    """The prompt that has the answer."""
    corrupt: WordRow
    """The prompt with the decisive words exchanged, of equal length."""
    answer: int
    """The token that follows the clean prompt."""
    wrong: int
    """The token that the answer is contrasted with."""
    roles: Mapping[str, range]
    """Role -> columns, in both rows; "end" is added."""
    group: str
    """Common key of all rows with these columns."""
    wholes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """All tokens of the answer and of the wrong one, where they are told apart as wholes."""


def pairs_of(task: str, pairs: Sequence[Pair], *, changes: tuple[str, ...]) -> TaskPairs:
    """Rows of any lengths as one `TaskPairs`, padded on the right.

    Raises:
        ValueError: no pair, and for one whose rows differ in length or in the columns of their words.
    """
    if not pairs:
        raise ValueError(f"{task} requires rows of at least 1, got 0")
    for pair in pairs:
        if len(pair.clean.ids) != len(pair.corrupt.ids) or pair.clean.columns != pair.corrupt.columns:
            raise ValueError(
                f"a pair of {task} must have the same tokens at the same columns, got {len(pair.clean.ids)} for "
                f"{pair.clean.text!r} and {len(pair.corrupt.ids)} for {pair.corrupt.text!r}"
            )
    lengths = torch.tensor([len(pair.clean.ids) for pair in pairs])
    keep = torch.arange(int(lengths.max())) < lengths[:, None]
    fill = pairs[0].clean.ids[0]  # any id will do, the same in both: `keep` says what is real
    wholes = [pair.wholes for pair in pairs if pair.wholes is not None]
    ends = [{**pair.roles, "end": range(len(pair.clean.ids) - 1, len(pair.clean.ids))} for pair in pairs]
    return TaskPairs(
        task=task,
        clean=tuple(pair.clean.text for pair in pairs),
        corrupt=tuple(pair.corrupt.text for pair in pairs),
        clean_tokens=_padded_ids([pair.clean.ids for pair in pairs], keep, fill),
        corrupt_tokens=_padded_ids([pair.corrupt.ids for pair in pairs], keep, fill),
        keep=None if bool(keep.all()) else keep,
        answer=torch.tensor([pair.answer for pair in pairs]),
        wrong=torch.tensor([pair.wrong for pair in pairs]),
        spans=MappingProxyType({role: _span_mask([row[role] for row in ends], keep) for role in ends[0]}),
        changes=changes,
        groups=tuple(pair.group for pair in pairs),
        answers=tuple(right for right, _ in wholes) or None,
        wrongs=tuple(false for _, false in wholes) or None,
    )


def _padded_ids(rows: Sequence[tuple[int, ...]], keep: Bool[Tensor, "n p"], fill: int) -> Int[Tensor, "n p"]:
    """The rows padded on the right with the id `fill`."""
    width = keep.shape[1]
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


def _span_mask(columns: Sequence[range], keep: Bool[Tensor, "n p"]) -> Bool[Tensor, "n p"]:
    """True at the columns of each row's range."""
    start, stop = (torch.tensor([getattr(c, end) for c in columns])[:, None] for end in ("start", "stop"))
    column = torch.arange(keep.shape[1])
    return (column >= start) & (column < stop)


class MergedTokensError(ValueError):
    """A token reaches over the end of a word, so that the word has no columns of its own."""


def filled(template: str, words: Mapping[str, str]) -> tuple[str, dict[str, tuple[int, int]]]:
    """A template with its fields filled in, and the characters of each word; a word owns the space before it.

    Example:
        >>> filled("the {noun} of", {"noun": "war"})
        ('the war of', {'noun': (3, 7)})
    """
    text, spans = "", {}
    for literal, field, _, _ in Formatter().parse(template):
        text += literal
        if field is not None:
            start = len(text.rstrip(" "))
            text += words[field]
            spans[field] = (start, len(text))
    return text, spans


def row_of(tokenizer: Tokenizer, template: str, words: Mapping[str, str]) -> WordRow:
    """The tokens of a filled template, with the columns of every word.

    Raises:
        MergedTokensError: where a word has no tokens of its own because they reach into its neighbours.
    """
    text, spans = filled(template, words)
    ids = tokenizer.encode(text)
    bos = [] if tokenizer.bos_id is None or ids[:1] == [tokenizer.bos_id] else [tokenizer.bos_id]
    columns = {
        field: range(*(len(bos) + _tokens_before(tokenizer, text, ids, end) for end in span))
        for field, span in spans.items()
    }
    return WordRow(text, (*bos, *ids), columns)


def _tokens_before(tokenizer: Tokenizer, text: str, ids: Sequence[int], end: int) -> int:
    """Number of tokens of the first `end` characters of a text; MergedTokensError if a token crosses that boundary."""
    before = tokenizer.encode(text[:end]) if end else []
    if list(ids[: len(before)]) != before:
        raise MergedTokensError(
            f"a token boundary is required after {text[:end]!r} in {text!r}, got {pieces(tokenizer, ids)}"
        )
    return len(before)


def tokens_after(tokenizer: Tokenizer, text: str, continuation: str) -> list[int]:
    """The tokens that a continuation adds to a text; MergedTokensError if it changes those of the text."""
    ids = tokenizer.encode(text + continuation)
    return ids[_tokens_before(tokenizer, text + continuation, ids, len(text)) :]


def next_token(tokenizer: Tokenizer, text: str, continuation: str) -> int:
    """The one token that a continuation adds to a text; ValueError if it adds several."""
    ids = tokens_after(tokenizer, text, continuation)
    if len(ids) != 1:
        raise ValueError(
            f"{continuation!r} must be a single token after {text!r}, got {pieces(tokenizer, ids)}"
        )
    return ids[0]


def single_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> dict[str, int]:
    """Word -> token id, for the words that are a single token after a space (the unknown-word token does not count)."""
    encoded = {word: _ids_after_space(tokenizer, word) for word in words}
    return {word: ids[0] for word, ids in encoded.items() if len(ids) == 1 and spells(tokenizer, ids, word)}


def spells(tokenizer: Tokenizer, ids: Sequence[int], word: str) -> bool:
    """Whether these tokens are the word and nothing else but spaces, as an unknown-word token never is."""
    return tokenizer.decode(ids).strip().casefold() == word.casefold()


def _ids_after_space(tokenizer: Tokenizer, word: str) -> list[int]:
    return tokens_after(tokenizer, "the", f" {word}")


def required_single_tokens(
    tokenizer: Tokenizer, words: Sequence[str], *, task: str, kind: str, at_least: int
) -> dict[str, int]:
    """`single_tokens`; ValueError naming the words that are not, and their tokens, if fewer than needed remain."""
    ids = single_tokens(tokenizer, words)
    if len(ids) < at_least:
        unfit = [word for word in words if word not in ids]
        shown = ", ".join(
            f"{word!r} is {pieces(tokenizer, _ids_after_space(tokenizer, word))}" for word in unfit[:SHOWN]
        )
        more = f" and {len(unfit) - SHOWN} more" if len(unfit) > SHOWN else ""
        raise ValueError(
            f"{task} requires at least {at_least} {kind} that are single tokens after a space, "
            f"got {len(ids)} {list(ids)}: {shown}{more}"
        )
    return ids


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token."""
    return [tokenizer.decode([i]) for i in ids]
