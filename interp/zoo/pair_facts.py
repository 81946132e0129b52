"""Aligned pairs of facts: the same question about two subjects of as many tokens."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from interp.core.shapes import nearest
from interp.zoo import tasks
from interp.zoo.pair_rows import Pair, TaskPairs, pairs_of
from interp.zoo.pair_tokens import (
    SHOWN,
    MergedTokensError,
    Row,
    Tokenizer,
    pieces,
    row_of,
    spells,
    tokens_after,
)


@dataclass(frozen=True)
class _Asked:
    """A fact put as a question, in tokens."""

    row: Row
    answer: int
    """First token of the object."""
    group: str


def facts(
    tokenizer: Tokenizer,
    n: int,
    *,
    seed: int = 0,
    phrasings: Mapping[str, Sequence[str]] | None = None,
    table: Sequence[tasks.Fact] | None = None,
) -> TaskPairs:
    """Facts with their subject exchanged: what is the object?

    "The capital of France is" -> " Paris"; in the corrupted prompt the subject is another one of as many tokens, same
    relation and phrasing, and `wrong` is that subject's object: the answers change places.

    phrasings: relation to ask about -> prompts with `{subject}` open; by default every relation of the table, in the
        phrasings that the demo models were trained on.
    table: the facts; those of the package by default.

    `answer` and `wrong` are the first tokens of the objects, which need not be single, only different. Facts that no
    other fact fits are left out, and those with words that the tokenizer does not know. Roles: subject (all its
    tokens), subject_last, end. A group is a phrasing with subjects of one length.

    Errors: ValueError for a relation without facts, a phrasing without a subject, or where no two facts fit, naming
    subjects, objects and their tokens.

    Example:
        >>> capitals = facts(interp.zoo.load("demo-4l")[1], 3, phrasings={"capital": ["The capital of {subject} is"]})
        >>> len(capitals), capitals.changes
        (3, ('subject',))
    """
    known = tasks.load_facts() if table is None else tuple(table)
    questions = _questions(phrasings, known)
    pools: dict[tuple[str, str], list[_Asked]] = defaultdict(list)
    for fact in known:
        for phrasing in questions.get(fact.relation, ()):
            if asked := _asked(tokenizer, tasks.FactPrompt(fact, phrasing)):
                pools[fact.relation, asked.group].append(asked)
    fitting = [
        (asked, others)
        for pool in pools.values()
        for asked in pool
        if (others := [other for other in pool if other.answer != asked.answer])
    ]
    if not fitting:
        raise ValueError(_no_two_fit(tokenizer, known))
    generator = np.random.default_rng(seed)
    pairs = []
    for index in generator.integers(0, len(fitting), size=n).tolist():
        asked, others = fitting[index]
        pairs.append(_swapped(asked, others[int(generator.integers(0, len(others)))]))
    return pairs_of("facts", pairs, changes=("subject",))


def _questions(
    phrasings: Mapping[str, Sequence[str]] | None, known: Sequence[tasks.Fact]
) -> Mapping[str, Sequence[str]]:
    """The phrasings, checked, or the trained ones."""
    relations = list(dict.fromkeys(fact.relation for fact in known))
    if phrasings is None:
        if bare := [relation for relation in relations if relation not in tasks.TRAINED_PHRASINGS]:
            raise ValueError(f"phrasings are required for the relation {bare[0]!r}")
        return {relation: tasks.TRAINED_PHRASINGS[relation] for relation in relations}
    for relation, prompts in phrasings.items():
        if relation not in relations:
            raise ValueError(f"there is no fact of the relation {relation!r}; {nearest(relation, relations)}")
        if isinstance(prompts, str):
            raise ValueError(f"a list of phrasings of {relation!r} is required, got the text {prompts!r}")
        if bare := [prompt for prompt in prompts if "{subject}" not in prompt]:
            raise ValueError(f"a phrasing requires {{subject}}, got {bare[0]!r}")
    return phrasings


def _asked(tokenizer: Tokenizer, prompt: tasks.FactPrompt) -> _Asked | None:
    """The tokens of a fact; None where its subject or object has no tokens of its own that spell it."""
    fact = prompt.fact
    try:
        row = row_of(tokenizer, prompt.phrasing, {"subject": fact.subject})
        answer = tokens_after(tokenizer, row.text, prompt.answer)
    except MergedTokensError:
        return None
    subject = row.columns["subject"]
    if not (
        spells(tokenizer, row.ids[subject.start : subject.stop], fact.subject)
        and spells(tokenizer, answer, fact.object)
    ):
        return None
    group = f"{prompt.phrasing} (subject of {len(subject)}, {len(row.ids)} tokens)"
    return _Asked(row, answer[0], group)


def _swapped(asked: _Asked, other: _Asked) -> Pair:
    subject = asked.row.columns["subject"]
    roles = {"subject": subject, "subject_last": subject[-1:]}
    return Pair(asked.row, other.row, asked.answer, other.answer, roles, asked.group)


def _no_two_fit(tokenizer: Tokenizer, known: Sequence[tasks.Fact]) -> str:
    shown = "; ".join(
        f"{fact.subject!r} is {pieces(tokenizer, tokens_after(tokenizer, 'the', f' {fact.subject}'))}, "
        f"{fact.object!r} is {pieces(tokenizer, tokens_after(tokenizer, 'the', f' {fact.object}'))}"
        for fact in known[:SHOWN]
    )
    return (
        "facts requires two facts of one relation whose subjects have as many tokens and whose objects begin with "
        f"different tokens, got none among {len(known)}: {shown}"
    )
