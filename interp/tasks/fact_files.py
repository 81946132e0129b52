"""Facts of a user's own, read from files in which they are usually kept: tables, and the lists of well-known papers.

Every layout becomes one kind of row: a prompt, its answer, and where there are such the subject, a wrong answer and a
corrupted prompt. Nothing in a file is trusted: what is malformed is refused in one sentence with the file's name and
the row's number. What only a tokenizer can tell, such as a word without tokens of its own, leaves a row out with a
note.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import overload

import numpy as np
import torch

from interp.core.boundary import public
from interp.core.files import json_contents, regular, text_contents
from interp.core.notes import note
from interp.core.wording import nearest, value_text
from interp.data.batch import Batch
from interp.data.chats import token_characters
from interp.data.text import Text
from interp.data.tokenizers import Tokenizer
from interp.tasks.facts import SpelledFact, swapped_pair
from interp.tasks.pairs import (
    MergedTokensError,
    Pair,
    TaskPairs,
    WordRow,
    pairs_of,
    row_of,
    spells,
    tokens_after,
)

COLUMNS = ("prompt", "answer", "wrong", "subject", "corrupt", "relation")
"""Columns of a table of facts; `prompt` and `answer` are required, others may be empty, and more are ignored."""
QUESTION = "Q: {}\nA:"
"""The template of lists of inputs and outputs, in the words of Todd et al. 2024, "Function Vectors in LLMs"."""
SUFFIXES = (".csv", ".json", ".jsonl")
HOLE = "{}"


@public()
@dataclass(frozen=True)
class GivenFact:
    """One fact: a prompt and the answer that follows it."""

    prompt: str
    """The text before the answer, without a space at its end."""
    answer: str
    """The right continuation, leading space included."""
    subject: str | None = None
    """What the prompt is about, as the prompt spells it."""
    start: int | None = None
    """The character of the prompt at which the subject begins; None without a subject."""
    wrong: str | None = None
    """The continuation that the answer is contrasted with."""
    corrupt: str | None = None
    """The prompt once more, with what decides its answer changed."""
    relation: str = ""
    """The name of what answers are to their subjects."""
    row: int = 0
    """Number of the row in its file, from 0."""

    @property
    def phrasing(self) -> str:
        """The prompt with `{subject}` in place of the subject."""
        if self.subject is None or self.start is None:
            return _escaped(self.prompt)
        end = self.start + len(self.subject)
        return f"{_escaped(self.prompt[: self.start])}{{subject}}{_escaped(self.prompt[end:])}"


@public()
@dataclass(frozen=True, repr=False)
class GivenFacts(Sequence[GivenFact]):
    """Facts of a file, in its order; any function of data takes them, with their subjects and answers.

    Example:
        >>> facts = interp.tasks.GivenFacts("mine", (GivenFact("The capital of France is", " Paris", "France", 15),))
        >>> facts.prompts, facts[0].phrasing
        (['The capital of France is'], 'The capital of {subject} is')
    """

    source: str
    """The file's name, for messages."""
    facts: tuple[GivenFact, ...]

    def __len__(self) -> int:
        return len(self.facts)

    @overload
    def __getitem__(self, index: int) -> GivenFact: ...
    @overload
    def __getitem__(self, index: slice) -> GivenFacts: ...
    def __getitem__(self, index: int | slice) -> GivenFact | GivenFacts:
        if isinstance(index, slice):
            return GivenFacts(self.source, self.facts[index])
        return self.facts[index]

    def __repr__(self) -> str:
        relations = len({fact.relation for fact in self.facts})
        return f"GivenFacts({self.source!r}, {len(self)} facts of {relations} relations)"

    @property
    def prompts(self) -> list[str]:
        """The prompt of every fact."""
        return [fact.prompt for fact in self.facts]

    @property
    def answers(self) -> list[str]:
        """The answer of every fact, leading space included."""
        return [fact.answer for fact in self.facts]

    @public()
    def asked(self, text: Text) -> AskedFacts:
        """The facts in a model's tokens: what functions of data are given.

        Facts with words that have no tokens of their own are left out with a note.

        Args:
            text: the model's tokenisation, `model.text`.

        Returns:
            The batch with the first token of each answer, the tokens of each subject, and the whole answers, which
            functions of data are about where they take answers of several tokens.

        Raises:
            ValueError: no fact that the tokenizer can spell.
        """
        rows, left_out = list[_SpelledRow](), list[str]()
        for fact in self.facts:
            try:
                rows.append(_spelled_row(text, fact))
            except MergedTokensError as cause:
                left_out.append(f"row {fact.row}, {cause}")
        self._say(rows, left_out)
        batch = Batch.of([row.ids for row in rows], pad_id=text.pad_id, bos=all(row.bos for row in rows))
        wrong = [row.wrong for row in rows]
        batch = batch.with_answers(
            torch.tensor([row.answer[0] for row in rows]),
            None if None in wrong else torch.tensor([tokens[0] for tokens in wrong if tokens is not None]),
        ).numbered()
        if None in wrong and (n := len(rows) - wrong.count(None)):
            note(
                f"{self.source}: {n} of {len(rows)} facts have a wrong answer; for all to be compared alike none has"
            )
        subjects = [row.subject for row in rows]
        return AskedFacts(
            batch,
            None if None in subjects else tuple(filter(None, subjects)),
            tuple(row.answer for row in rows),
            None if None in wrong else tuple(filter(None, wrong)),
            self.source,
        )

    @public()
    def pairs(
        self, tokenizer: Tokenizer, *, rows: int | None = None, seed: int = 0, whole: bool = False
    ) -> TaskPairs:
        """Prompts and their corruptions, aligned token by token: those of the file, or about another subject of it.

        A fact without a corrupted prompt is paired with another of its phrasing whose subject has as many tokens and
        whose answer begins with another token, so that the answers change places. Facts that nothing fits are left out
        with a note. Roles: subject (all its tokens) and subject_last where the pairs exchange it, changed (from the
        first to the last token that differs) where the file has corrupted prompts; end.

        Args:
            tokenizer: the tokenizer of the model.
            rows: number of facts drawn; None: every fact once, in the file's order.
            seed: seed of the draws.
            whole: whether answers are told apart as wholes, of which none may begin with the other of its pair, and
                not by their first tokens: the pairs have `answers` and `wrongs`, which
                `interp.metrics.log_prob_difference` compares whatever their lengths. Where all answers are of one token
                there is no difference.

        Returns:
            `TaskPairs`, whose `task` is the file's name.

        Raises:
            ValueError: facts with corrupted prompts beside facts without, no facts that fit.
        """
        given = [fact.corrupt is not None for fact in self.facts]
        if any(given) and not all(given):
            lacking = self.facts[given.index(False)].row
            raise ValueError(f"{self.source}: row {lacking} has no corrupted prompt, others have")
        generator, left_out = np.random.default_rng(seed), list[str]()
        make = _given_pairs if any(given) else _swaps
        fitting = make(tokenizer, self.facts, left_out, whole)
        self._say(fitting, left_out)
        chosen = (
            range(len(fitting)) if rows is None else generator.integers(0, len(fitting), size=rows).tolist()
        )
        pairs = [fitting[i](generator) for i in chosen]
        if not whole or all(pair.wholes is None or max(map(len, pair.wholes)) == 1 for pair in pairs):
            pairs = [replace(pair, wholes=None) for pair in pairs]
        return pairs_of(self.source, pairs, changes=("changed" if any(given) else "subject",))

    def _say(self, kept: Sequence[object], left_out: Sequence[str]) -> None:
        """A note about facts left out; ValueError where none is kept."""
        if not kept:
            why = left_out[0] if left_out else "there is none"
            raise ValueError(
                f"{self.source}: a fact that the tokenizer can spell is required, got none: {why}"
            )
        if left_out:
            more = f", and {len(left_out) - 1} more of {len(self)}" if len(left_out) > 1 else ""
            note(f"{self.source}: left out {left_out[0]}{more}")


@dataclass(frozen=True, eq=False)
class AskedFacts:
    """Facts in the tokens of one model."""

    batch: Batch
    """The prompts with their answers."""
    subjects: tuple[range, ...] | None
    """The tokens of each subject, BOS counted; None where a fact has none."""
    answers: tuple[tuple[int, ...], ...]
    """All tokens of each answer."""
    wrong: tuple[tuple[int, ...], ...] | None
    """All tokens of each wrong answer; None where a fact has none."""
    source: str
    """The file's name, for messages."""

    @property
    def several(self) -> int:
        """Number of facts with more than one token in an answer."""
        both = zip(self.answers, self.answers if self.wrong is None else self.wrong, strict=True)
        return sum(max(len(right), len(wrong)) > 1 for right, wrong in both)

    def first_token_note(self, question: str) -> str:
        """Note that a question is about the first token of answers that have several."""
        return (
            f"{self.source}: {self.several} of {len(self.answers)} facts have answers of several tokens; {question} is "
            "about the first token of each"
        )


@public()
def read_facts(
    path: Path | str, *, prompts: str | None = None, template: str | None = None, space: bool = True
) -> GivenFacts:
    """The facts in a file of any of the usual layouts, which is told by its contents.

    - A table (`.csv`, `.jsonl`, or `.json` of a list of objects): `prompt` and `answer`, and where wanted `wrong`,
      `subject`, `corrupt`, `relation`. A `{}` in a prompt is filled with the subject.
    - known-1000 of ROME (`known_id`, `subject`, `attribute`, `template`, `prompt`).
    - CounterFact (`requested_rewrite` with `prompt`, `subject`, `target_true`, `target_new`): the wrong answer is the
      new target.
    - Relations of Hernandez et al. (an object with `name`, `prompt_templates` and `samples` of `subject`, `object`):
      every sample in every template.
    - Lists of function vectors (`input`, `output`), each put into `template`.

    Args:
        path: the file.
        prompts: which prompts of a file that has several kinds: "prompt_templates" or "prompt_templates_zs" of
            relations, "requested_rewrite", "paraphrase_prompts" or "neighborhood_prompts" of CounterFact (the last are
            about other subjects, so that they have none); None: the first.
        template: the prompt with `{}` for the input, of lists of function vectors; None: `QUESTION`.
        space: whether an answer without white space before it gets a space, after a prompt without one at its end.

    Returns:
        The facts, in the file's order.

    Raises:
        ValueError: a file of another layout, and a malformed row: the message has the file's name and the row's number.
        OSError: a file that cannot be read.

    Source:
        Meng et al. 2022 (known-1000, CounterFact); Hernandez et al. 2024 (relations); Todd et al. 2024 (lists).

    Example:
        >>> import json, pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "mine.json"
        >>> row = {"prompt": "The capital of {} is", "subject": "France", "answer": "Paris"}
        >>> _ = file.write_text(json.dumps([row]))
        >>> interp.tasks.read_facts(file)[0].prompt
        'The capital of France is'
    """
    file = regular(path)
    layout = _layout(file, _contents(file))
    reading = _Reading(file.name, layout.name, prompts, template, space)
    found = tuple(layout.read(reading, layout.rows))
    if not found:
        raise ValueError(f"{file.name}: at least one fact is required, got none")
    return GivenFacts(file.name, found)


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


# --- files ----------------------------------------------------------------------------------------------------------


Row = Mapping[str, object]


@dataclass(frozen=True)
class _Reading:
    """How a file is read, and what its messages name."""

    source: str
    layout: str
    prompts: str | None
    template: str | None
    space: bool

    def chosen(self, known: Sequence[str]) -> str:
        """Which prompts are read, of those that the layout knows; ValueError for others."""
        if self.prompts is not None and self.prompts not in known:
            raise ValueError(
                f"prompts must be one of {', '.join(known) or 'none'} of {self.layout} ({self.source}), got "
                f"{self.prompts!r}; {nearest(self.prompts, known)}"
            )
        return known[0] if self.prompts is None else self.prompts

    def refuse(self, row: int, message: str) -> ValueError:
        """The error about a row."""
        return ValueError(f"{self.source}: row {row} ({self.layout}): {message}")

    def text(self, row: int, record: object, name: str) -> str:
        """A text of a row that must be there and not be empty."""
        value = record.get(name) if isinstance(record, Mapping) else None
        if isinstance(value, str) and value.strip():
            return value
        known = ", ".join(map(str, record)) if isinstance(record, Mapping) else type(record).__name__
        got = (
            f"got {value_text(value)}"
            if isinstance(record, Mapping) and name in record
            else f"it has {known}"
        )
        raise self.refuse(row, f"{name!r} must be a text, {got}")

    def optional(self, row: int, record: Row, name: str) -> str | None:
        """A text of a row that may be missing or empty."""
        return None if record.get(name) in (None, "") else self.text(row, record, name)

    def answer(self, prompt: str, answer: str) -> str:
        """An answer as it follows a prompt."""
        spaced = answer[:1].isspace() or prompt[-1:].isspace() or not self.space
        return answer if spaced else f" {answer}"

    def fact(
        self, row: int, prompt: str, answer: str, subject: str | None = None, wrong: str | None = None,
        corrupt: str | None = None, relation: str = "",
    ) -> GivenFact:  # fmt: skip
        """The fact of a row, its template filled and its subject found."""
        prompt, start = self._filled(row, prompt, subject)
        right = self.answer(prompt, answer)
        false = None if wrong is None else self.answer(prompt, wrong)
        if false == right:
            raise self.refuse(row, f"the answer and the wrong answer must differ, both are {answer!r}")
        if corrupt == prompt:
            raise self.refuse(row, f"the corrupted prompt must differ from the prompt, both are {prompt!r}")
        if corrupt is not None and false is None:
            raise self.refuse(row, "a corrupted prompt requires a wrong answer, which it makes right")
        return GivenFact(prompt, right, subject, start, false, corrupt, relation, row)

    def _filled(self, row: int, prompt: str, subject: str | None) -> tuple[str, int | None]:
        """The prompt with its subject, and the character at which it begins."""
        holes = prompt.count(HOLE)
        if subject is None:
            if holes:
                raise self.refuse(row, f"a subject is required for the {HOLE} in {prompt!r}, got none")
            return prompt, None
        if holes > 1:
            raise self.refuse(row, f"a template has one {HOLE}, got {holes} in {prompt!r}")
        if holes:
            start = prompt.index(HOLE)
            return prompt.replace(HOLE, subject), start
        starts = [i for i in range(len(prompt)) if prompt.startswith(subject, i)]
        if len(starts) != 1:
            how = "does not hold" if not starts else f"holds {len(starts)} times"
            raise self.refuse(
                row,
                f"the prompt {prompt!r} {how} the subject {subject!r}: once is required, or {HOLE} in its place",
            )
        start, end = starts[0], starts[0] + len(subject)
        if prompt[start - 1 : start].isalnum() or (
            prompt[end : end + 1].isalnum() and subject[-1:].isalnum()
        ):
            raise self.refuse(row, f"the subject {subject!r} stands in the middle of a word in {prompt!r}")
        return prompt, start


@dataclass(frozen=True)
class _Layout:
    """A layout, the function that reads it, and the rows."""

    name: str
    read: Callable[[_Reading, Sequence[Row]], Iterator[GivenFact]] = field(repr=False)
    rows: Sequence[Row] = field(repr=False, default=())


def _contents(file: Path) -> object:
    """The contents of a file: rows of a table, of lines, or whatever its JSON holds."""
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(
            f"{file.name}: a file of facts ends in {', '.join(SUFFIXES)}, got {suffix or 'no suffix'}"
        )
    return _table(file) if suffix == ".csv" else json_contents(file)


def _table(file: Path) -> list[Row]:
    """The rows of a CSV file by column."""
    source = file.name
    reader = csv.DictReader(io.StringIO(text_contents(file), newline=""), strict=True)
    rows: list[Row] = []
    try:
        for row, record in enumerate(reader):
            if None in record:
                raise ValueError(
                    f"{source}: row {row} has more values than the first line has columns, "
                    f"{len(reader.fieldnames or ())}"
                )
            rows.append(dict(record))
    except csv.Error as cause:
        raise ValueError(f"{source}: row {len(rows)} is not readable CSV: {cause}") from cause
    return rows


def _layout(file: Path, contents: object) -> _Layout:
    """The layout of a file, by its first row."""
    if isinstance(contents, Mapping) and "samples" in contents:
        return _Layout("a relation", _relation, [contents])
    if isinstance(contents, list) and contents and isinstance(contents[0], Mapping):
        first = contents[0]
        for key, name, read in LAYOUTS:
            if key in first:
                return _Layout(name, read, contents)
        known = ", ".join(map(str, first)) or "nothing"
        raise ValueError(
            f"{file.name}: rows with one of {', '.join(repr(key) for key, *_ in LAYOUTS)} are required, "
            f"row 0 has {known}"
        )
    if contents == []:
        raise ValueError(f"{file.name}: at least one fact is required, got none")
    raise ValueError(
        f"{file.name}: a list of facts as objects, or a relation with 'samples', is required, got "
        f"{value_text(contents)}"
    )


def _plain(reading: _Reading, rows: Sequence[Row]) -> Iterator[GivenFact]:
    reading.chosen(("prompt",))
    for i, row in enumerate(rows):
        prompt, answer = reading.text(i, row, "prompt"), reading.text(i, row, "answer")
        wrong, subject, corrupt, relation = (reading.optional(i, row, name) for name in COLUMNS[2:])
        yield reading.fact(i, prompt, answer, subject, wrong, corrupt, relation or "")


def _known(reading: _Reading, rows: Sequence[Row]) -> Iterator[GivenFact]:
    reading.chosen(("template",))
    for i, row in enumerate(rows):
        subject, answer, template = (
            reading.text(i, row, name) for name in ("subject", "attribute", "template")
        )
        found = reading.fact(
            i, template, answer, subject, relation=reading.optional(i, row, "relation_id") or ""
        )
        whole = reading.optional(i, row, "prompt")
        if whole is not None and whole != found.prompt:
            raise reading.refuse(
                i, f"its prompt {whole!r} is not its template with the subject, {found.prompt!r}"
            )
        yield found


def _counterfact(reading: _Reading, rows: Sequence[Row]) -> Iterator[GivenFact]:
    which = reading.chosen(("requested_rewrite", "paraphrase_prompts", "neighborhood_prompts"))
    for i, row in enumerate(rows):
        rewrite = row.get("requested_rewrite") if isinstance(row, Mapping) else None
        if not isinstance(rewrite, Mapping):
            raise reading.refuse(i, f"'requested_rewrite' must be an object, got {value_text(rewrite)}")
        right, false = (reading.text(i, rewrite.get(name), "str") for name in ("target_true", "target_new"))
        subject, prompt = (reading.text(i, rewrite, name) for name in ("subject", "prompt"))
        relation = reading.optional(i, rewrite, "relation_id") or ""
        if which == "requested_rewrite":
            yield reading.fact(i, prompt, right, subject, false, relation=relation)
            continue
        listed = row.get(which)
        if not isinstance(listed, list) or not all(isinstance(each, str) and each.strip() for each in listed):
            raise reading.refuse(i, f"{which!r} must be a list of texts, got {value_text(listed)}")
        own = subject if which == "paraphrase_prompts" else None
        for each in listed:
            yield reading.fact(i, each, right, own, false, relation=relation)


def _relation(reading: _Reading, rows: Sequence[Row]) -> Iterator[GivenFact]:
    which, record = reading.chosen(("prompt_templates", "prompt_templates_zs")), rows[0]
    templates, samples, name = record.get(which), record.get("samples"), record.get("name")
    if (
        not isinstance(templates, list)
        or not templates
        or not all(isinstance(each, str) for each in templates)
    ):
        raise ValueError(
            f"{reading.source}: {which!r} must be a list of templates, got {value_text(templates)}"
        )
    if bare := [each for each in templates if each.count(HOLE) != 1]:
        raise ValueError(f"{reading.source}: a template has one {HOLE} for the subject, got {bare[0]!r}")
    if not isinstance(samples, list):
        raise ValueError(f"{reading.source}: 'samples' must be a list, got {value_text(samples)}")
    for i, sample in enumerate(samples):
        subject, answer = reading.text(i, sample, "subject"), reading.text(i, sample, "object")
        for template in templates:
            yield reading.fact(i, template.rstrip(" "), answer, subject, relation=str(name or reading.source))


def _inputs(reading: _Reading, rows: Sequence[Row]) -> Iterator[GivenFact]:
    reading.chosen(("input",))
    template = QUESTION if reading.template is None else reading.template
    if template.count(HOLE) != 1:
        raise ValueError(f"a template has one {HOLE} for the input, got {template!r}")
    for i, row in enumerate(rows):
        yield reading.fact(
            i,
            template,
            reading.text(i, row, "output"),
            reading.text(i, row, "input"),
            relation=Path(reading.source).stem,
        )


LAYOUTS = (
    ("requested_rewrite", "CounterFact", _counterfact),
    ("known_id", "known-1000", _known),
    ("attribute", "known-1000", _known),
    ("input", "inputs and outputs", _inputs),
    ("prompt", "a table", _plain),
    ("answer", "a table", _plain),
)
"""Key by which the rows of a list are recognised, name of the layout, and the function that reads it."""


# --- tokens ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SpelledRow:
    """A fact in tokens."""

    ids: list[int]
    bos: bool
    answer: tuple[int, ...]
    wrong: tuple[int, ...] | None
    subject: range | None


def _spelled_row(text: Text, fact: GivenFact) -> _SpelledRow:
    """A fact in tokens; MergedTokensError for words without tokens of their own, and answers that begin alike."""
    own, ids = text.tokenizer.encode(fact.prompt), text.ids(fact.prompt)
    shift = len(ids) - len(own)
    right = tokens_after(text.tokenizer, fact.prompt, fact.answer)
    false = None if fact.wrong is None else tokens_after(text.tokenizer, fact.prompt, fact.wrong)
    if false is not None and right[:1] == false[:1]:
        raise MergedTokensError(
            f"the answers {fact.answer!r} and {fact.wrong!r} begin with the same token after {fact.prompt!r}"
        )
    subject = None
    if fact.subject is not None and fact.start is not None:
        columns = _columns(text.tokenizer, own, fact)
        subject = range(columns.start + shift, columns.stop + shift)
    bos = bool(ids) and ids[0] == text.bos_id
    return _SpelledRow(ids, bos, tuple(right), None if false is None else tuple(false), subject)


def _columns(tokenizer: Tokenizer, ids: Sequence[int], fact: GivenFact) -> range:
    """The tokens of a fact's subject, with the space before it; MergedTokensError where others share them."""
    assert fact.subject is not None and fact.start is not None
    places, end = token_characters(tokenizer, ids, fact.prompt), fact.start + len(fact.subject)
    if places is None:
        raise MergedTokensError(f"the tokens do not add up to {fact.prompt!r}")
    own = [i for i, (first, last) in enumerate(places) if first < end and last > fact.start]
    before = fact.prompt[places[own[0]][0] : fact.start]
    if before.strip() or places[own[-1]][1] > end:
        raise MergedTokensError(
            f"the subject {fact.subject!r} shares a token with its neighbour in {fact.prompt!r}"
        )
    return range(own[0], own[-1] + 1)


MakePair = Callable[[np.random.Generator], Pair]


def _swaps(
    tokenizer: Tokenizer, facts: Sequence[GivenFact], left_out: list[str], whole: bool
) -> list[MakePair]:
    """For each fact that another one fits, the function that draws its pair; the others are added to `left_out`."""
    pools: dict[str, list[tuple[GivenFact, SpelledFact]]] = defaultdict(list)
    ordered: list[tuple[GivenFact, SpelledFact]] = []
    for fact in facts:
        found = _spelled_fact(tokenizer, fact)
        if found is None:
            left_out.append(f"row {fact.row}, whose subject or answer has no tokens of its own")
        else:
            pools[found.group].append((fact, found))
            ordered.append((fact, found))
    made: list[MakePair] = []
    for fact, found in ordered:
        others = [
            other
            for _, other in pools[found.group]
            if _told_apart(found.whole, other.whole, whole=whole) and other.row.ids != found.row.ids
        ]
        if others:
            made.append(_swap(found, others))
        else:
            left_out.append(f"row {fact.row}, whose subject no other of its phrasing has as many tokens as")
    return made


def _spelled_fact(tokenizer: Tokenizer, fact: GivenFact) -> SpelledFact | None:
    """A fact in tokens for an exchange of subjects; None where its subject or answer has no tokens of its own."""
    if fact.subject is None:
        return None
    try:
        row = row_of(tokenizer, fact.phrasing, {"subject": fact.subject})
        answer = tokens_after(tokenizer, row.text, fact.answer)
    except MergedTokensError:
        return None
    subject = row.columns["subject"]
    if not spells(tokenizer, row.ids[subject.start : subject.stop], fact.subject):
        return None
    group = f"{fact.phrasing} (subject of {len(subject)}, {len(row.ids)} tokens)"
    return SpelledFact(row, answer[0], group, tuple(answer))


def _told_apart(answer: Sequence[int], other: Sequence[int], *, whole: bool) -> bool:
    """Whether two answers begin with different tokens, or as wholes, none begins with the other."""
    shortest = min(len(answer), len(other)) if whole else 1
    return answer[:shortest] != other[:shortest]


def _swap(found: SpelledFact, others: Sequence[SpelledFact]) -> MakePair:
    def drawn(generator: np.random.Generator) -> Pair:
        other = others[int(generator.integers(0, len(others)))]
        return replace(swapped_pair(found, other), wholes=(found.whole, other.whole))

    return drawn


def _given_pairs(
    tokenizer: Tokenizer, facts: Sequence[GivenFact], left_out: list[str], whole: bool
) -> list[MakePair]:
    """The pairs of facts with corrupted prompts; those that do not align are added to `left_out`."""
    made: list[MakePair] = []
    for fact in facts:
        try:
            pair = _given_pair(tokenizer, fact, whole)
        except MergedTokensError as cause:
            left_out.append(f"row {fact.row}, {cause}")
        else:
            made.append(lambda _, pair=pair: pair)  # type: ignore[misc]
    return made


def _given_pair(tokenizer: Tokenizer, fact: GivenFact, whole: bool) -> Pair:
    """The pair of one fact with a corrupted prompt; MergedTokensError where the two do not align."""
    assert fact.corrupt is not None and fact.wrong is not None
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    clean, corrupt = ([*start, *tokenizer.encode(text)] for text in (fact.prompt, fact.corrupt))
    if len(clean) != len(corrupt):
        raise MergedTokensError(
            f"whose corrupted prompt has {len(corrupt)} tokens, and the prompt {fact.prompt!r} {len(clean)}"
        )
    differ = [i for i, (one, other) in enumerate(zip(clean, corrupt, strict=True)) if one != other]
    answer, wrong = (tuple(tokens_after(tokenizer, fact.prompt, text)) for text in (fact.answer, fact.wrong))
    if not _told_apart(answer, wrong, whole=whole) or not differ:
        raise MergedTokensError("whose two prompts, or two answers, are the same in tokens")
    changed = range(differ[0], differ[-1] + 1)
    rows = [
        WordRow(text, tuple(ids), MappingProxyType({}))
        for text, ids in ((fact.prompt, clean), (fact.corrupt, corrupt))
    ]
    group = f"{len(clean)} tokens, changed at {changed.start} to {changed.stop - 1}"
    wholes = (answer, wrong)
    return Pair(rows[0], rows[1], answer[0], wrong[0], {"changed": changed}, group, wholes)
