"""Every pair is aligned, its answers are single tokens and its roles name the words they say, for any tokenizer."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from interp import tasks
from interp.data.text import Text
from interp.tasks import TASKS, Facts, GreaterThan, IndirectObjects, Task, TaskPairs
from interp.tasks.greater_than import CENTURIES, YEARS
from interp.tasks.indirect_objects import is_held_out
from interp.tasks.lists import DocstringArguments
from tests.loops import over
from tests.tasks.speakers import SPEAKERS, UNKNOWN, Spoken, demo, tiny, words_without_bos

N = 24
TINY = functools.partial(
    Facts,
    table=(tasks.Fact("capital", "France", "Paris"), tasks.Fact("capital", "Italy", "Rome")),
    phrasings={"capital": ["The capital of {subject} is"]},
)
MAKERS: dict[str, Callable[..., Task]] = {
    **TASKS,
    "facts": functools.partial(Facts, phrasings={"capital": tasks.TRAINED_PHRASINGS["capital"]}),
    "abc": IndirectObjects,
    "held out": functools.partial(IndirectObjects, held_out=True),
    "swap": DocstringArguments,
}
HOW = {"abc": {"corruption": "abc"}, "swap": {"corruption": "swap"}}
CASES: dict[tuple[str, str], Callable[..., Task]] = {
    (speaker, task): maker
    for speaker in SPEAKERS
    for task, maker in MAKERS.items()
    if task != "greater_than" or speaker == "words"
} | {("tiny", "facts"): TINY}
every_case = over("case", CASES)


def draw(case: tuple[str, str], seed: int) -> TaskPairs:
    return CASES[case](rows=N, seed=seed).pairs(tokenizer_of(case), **HOW.get(case[1], {}))


drawn = functools.cache(functools.partial(draw, seed=0))


def tokenizer_of(case: tuple[str, str]) -> Spoken:
    return tiny() if case[0] == "tiny" else SPEAKERS[case[0]]()


def real(found: TaskPairs, row: int, twin: str = "clean") -> list[int]:
    tokens = getattr(found, f"{twin}_tokens")[row]
    return (tokens if found.keep is None else tokens[found.keep[row]]).tolist()


def spoken(case: tuple[str, str], role: str, twin: str = "clean") -> list[str]:
    """What stands at a role, row by row."""
    found, tokenizer = drawn(case), tokenizer_of(case)
    tokens = getattr(found, f"{twin}_tokens")
    return [tokenizer.decode(t[m].tolist()).strip() for t, m in zip(tokens, found.spans[role], strict=True)]


def answers(case: tuple[str, str], which: str = "answer") -> list[str]:
    return [tokenizer_of(case).decode([int(i)]).strip() for i in getattr(drawn(case), which)]


def cases(*names: str) -> pytest.MarkDecorator:
    chosen = [case for case in CASES if case[1] in names]
    return pytest.mark.parametrize("case", chosen, ids="-".join)


@pytest.mark.slow
@every_case
def test_clean_and_corrupt_differ_exactly_at_the_roles_of_the_task(case: tuple[str, str]) -> None:
    found = drawn(case)
    differ = found.clean_tokens != found.corrupt_tokens
    roles = torch.stack([found.spans[role] for role in found.changes]).any(0)
    assert not (differ & ~roles).any() and differ.any(1).all()
    if case[1] != "facts":  # two subjects of several tokens may share some
        assert torch.equal(differ, roles)


@every_case
@over("twin", ["clean", "corrupt"])
def test_tokenising_the_texts_gives_the_tokens(case: tuple[str, str], twin: str) -> None:
    found, text = drawn(case), Text(tokenizer_of(case), n_ctx=512, d_vocab=10**6)
    assert len(found) == N == len(found.clean)
    for row, prompt in enumerate(getattr(found, twin)):
        assert text.ids(prompt) == real(found, row, twin)


@every_case
def test_answers_are_single_tokens_that_differ_and_continue_the_text(case: tuple[str, str]) -> None:
    found, encode = drawn(case), tokenizer_of(case).encode
    assert (found.answer != found.wrong).all()
    space = "" if case[1] == "greater_than" else " "
    for prompt, *words in zip(found.clean, answers(case), answers(case, "wrong"), strict=True):
        ids = [encode(f"{prompt}{space}{word}") for word in words]
        assert [i[:-1] for i in ids] == [encode(prompt)] * 2
    for row, word in enumerate(answers(case)):
        assert encode(f"{found.clean[row]}{space}{word}")[-1] == found.answer[row]


@every_case
def test_the_end_is_the_last_real_column(case: tuple[str, str]) -> None:
    found = drawn(case)
    assert found.columns("end").tolist() == [len(real(found, row)) - 1 for row in range(N)]


@every_case
def test_rows_of_one_group_are_aligned_with_each_other(case: tuple[str, str]) -> None:
    found = drawn(case)
    for group in set(found.groups):
        rows = [row for row in range(N) if found.groups[row] == group]
        for mask in found.spans.values():
            assert (mask[rows] == mask[rows[0]]).all()
        assert len({len(real(found, row)) for row in rows}) == 1


@every_case
def test_no_drawn_word_is_unknown_to_the_tokenizer(case: tuple[str, str]) -> None:
    found = drawn(case)
    for text in (*found.clean, *found.corrupt):
        assert case[0] in {"demo", "tiny"} or not set(re.findall(r"\w+", text)) & UNKNOWN
    for role in found.changes:
        assert "<unk>" not in spoken(case, role) + spoken(case, role, "corrupt")


@pytest.mark.slow
@every_case
def test_rows_follow_the_seed(case: tuple[str, str]) -> None:
    again = draw(case, seed=0)
    assert again.clean == drawn(case).clean and again.corrupt == drawn(case).corrupt
    assert torch.equal(again.answer, drawn(case).answer) and torch.equal(again.wrong, drawn(case).wrong)
    other = draw(case, seed=1)
    assert (other.clean, other.corrupt) != (again.clean, again.corrupt)


@pytest.mark.slow
def test_another_process_draws_the_same_rows() -> None:
    say = (  # a fresh interpreter: a fork would share what its hashes begin with
        "from interp.families import tokenizer_of; from interp.tasks import TASKS; from interp.zoo import catalog;"
        "t = tokenizer_of(catalog.WEIGHTS / 'demo-4l');"
        "drawn = [f(rows=5).pairs(t) for n, f in TASKS.items() if n != 'greater_than'];"
        "print([[p.clean, p.corrupt] for p in drawn])"
    )
    said = subprocess.run([sys.executable, "-c", say], capture_output=True, text=True, check=True).stdout
    mine = [f(rows=5).pairs(demo()) for n, f in TASKS.items() if n != "greater_than"]
    assert ast.literal_eval(said) == [[each.clean, each.corrupt] for each in mine]


@cases("indirect_objects", "abc", "held out")
def test_roles_of_indirect_objects_are_the_names_of_the_sentence(case: tuple[str, str]) -> None:
    found = drawn(case)
    io, s1, s2 = (spoken(case, role) for role in ("IO", "S1", "S2"))
    for row, prompt in enumerate(found.clean):
        people = [word for word in re.findall(r"\w+", prompt) if word in tasks.NAMES]
        assert sorted(people) == sorted([io[row], s1[row], s2[row]]) and s1[row] == s2[row] == people[2]
        assert found.groups[row].startswith("ABBA" if people[0] == io[row] else "BABA")
        assert is_held_out(io[row], s1[row]) == (case[1] == "held out")
    assert (io, s1) == (answers(case), answers(case, "wrong"))
    assert torch.equal(found.columns("S1+1"), found.columns("S1") + 1)
    assert bool((found.columns("S1") < found.columns("S2")).all())
    assert {group[:4] for group in found.groups} == {"ABBA", "BABA"}


@cases("indirect_objects", "held out")
def test_a_swapped_giver_is_the_receiver_of_the_clean_sentence(case: tuple[str, str]) -> None:
    assert spoken(case, "S2", "corrupt") == spoken(case, "IO") == spoken(case, "IO", "corrupt")


@cases("abc")
def test_three_unrelated_names_replace_the_two(case: tuple[str, str]) -> None:
    roles = ("IO", "S1", "S2")
    corrupt = [spoken(case, role, "corrupt") for role in roles]
    clean = [spoken(case, role) for role in roles]
    for before, after in zip(zip(*clean, strict=True), zip(*corrupt, strict=True), strict=True):
        assert len({*after}) == 3 and not {*after} & {*before} and {*after} <= {*tasks.NAMES}


@cases("facts")
def test_a_fact_and_its_twin_have_their_own_objects(case: tuple[str, str]) -> None:
    found = drawn(case)
    asked = TINY() if case[0] == "tiny" else Facts()
    book = {prompt.prompt: prompt for prompt in asked.prompts}
    for twin, which in (("clean", "answer"), ("corrupt", "wrong")):
        subjects, objects = spoken(case, "subject", twin), answers(case, which)
        for text, subject, start in zip(getattr(found, twin), subjects, objects, strict=True):
            assert book[text].fact.subject == subject and book[text].fact.object.startswith(start)
    for clean, corrupt in zip(found.clean, found.corrupt, strict=True):
        assert book[clean].phrasing == book[corrupt].phrasing
    last = [mask.nonzero()[-1].item() for mask in found.spans["subject"]]
    assert found.columns("subject_last").tolist() == last


def test_the_demo_tokenizer_has_pairs_for_every_relation() -> None:
    asked = {phrasing for phrasings in tasks.TRAINED_PHRASINGS.values() for phrasing in phrasings}
    assert {group.rpartition(" (")[0] for group in Facts(400).pairs(demo()).groups} == asked


def test_right_years_are_those_above_the_first_year() -> None:
    case = ("words", "greater_than")
    found, decode = drawn(case), words_without_bos().decode
    assert found.options is not None and found.right is not None
    assert [decode([i]) for i in found.options.tolist()] == [f"{year:02}" for year in range(100)]
    for row, prompt in enumerate(found.clean):
        century, year, last = re.fullmatch(r".* (\d\d)(\d\d) to the year (\d\d)", prompt).groups()  # type: ignore[union-attr]
        assert century == last == spoken(case, "XX")[row] == spoken(case, "end")[row]
        assert year == spoken(case, "YY")[row]
        assert found.right[row].tolist() == [ending > int(year) for ending in range(100)]
        assert (answers(case)[row], answers(case, "wrong")[row]) == (
            f"{int(year) + 1:02}",
            f"{int(year) - 1:02}",
        )
        assert spoken(case, "noun")[row] == prompt.split()[1]
    assert set(spoken(case, "YY", "corrupt")) == {"01"}


def test_only_years_of_two_tokens_are_drawn() -> None:
    """Every other year is a whole token; a century whose 01 is one has no corrupted twin."""
    split = {"1201", "1203", "1250", "1501", "1598", "1620"}
    whole = [f"{century}{year}" for century in CENTURIES for year in YEARS]
    tokenizer = words_without_bos(tuple(f" {year}" for year in whole if year not in split))
    years = {re.findall(r"\d{4}", prompt)[0] for prompt in GreaterThan(60).pairs(tokenizer).clean}
    assert years == {"1203", "1250", "1598"}


@cases("repeated_sequences")
def test_the_twin_of_a_repeat_lacks_the_match_and_keeps_the_answer(case: tuple[str, str]) -> None:
    found = drawn(case)
    bos = tokenizer_of(case).bos_id is not None
    for row in range(N):
        clean, corrupt = real(found, row)[bos:], real(found, row, "corrupt")[bos:]
        answer, period = int(found.answer[row]), (len(clean) + 1) // 2
        assert [*clean, answer] == clean[:period] * 2 and len({*clean}) == period
        assert clean.index(clean[-1]) + bos == found.columns("match")[row]
        assert clean.index(answer) + bos == found.columns("source")[row] == corrupt.index(answer) + bos
        assert corrupt.count(corrupt[-1]) == 1 and corrupt[period - 2] not in clean
        assert clean[: period - 2].count(int(found.wrong[row])) == 1


@cases("copy")
def test_the_word_to_copy_is_the_next_of_the_list(case: tuple[str, str]) -> None:
    found = drawn(case)
    for twin, which in (("clean", "answer"), ("corrupt", "wrong")):
        for row, prompt in enumerate(getattr(found, twin)):
            listed, again = re.fullmatch(r"List: (.*)\. Again: (.*)", prompt).groups()  # type: ignore[union-attr]
            words, written = listed.split(), again.split()
            assert words[: len(written)] == written and len({*words}) == len(words) == 6
            assert words[len(written)] == answers(case, which)[row] == spoken(case, "source", twin)[row]
            assert spoken(case, "match", twin)[row] == written[-1] == spoken(case, "end", twin)[row]
    assert len({*found.groups}) == 5


@cases("docstring_arguments", "swap")
def test_the_answer_is_the_third_argument_of_a_function_that_python_parses(case: tuple[str, str]) -> None:
    found = drawn(case)
    definitions = ("A_def", "B_def", "C_def", "D_def")
    for row in range(N):
        clean, corrupt = (
            ast.parse(f'{text} x: y\n    """').body[0] for text in (found.clean[row], found.corrupt[row])
        )
        assert isinstance(clean, ast.FunctionDef) and isinstance(corrupt, ast.FunctionDef)
        _, *names = (a.arg for a in clean.args.args)
        _, *others = (a.arg for a in corrupt.args.args)
        documented = re.findall(r":param (\w+): \w+\n", ast.get_docstring(clean) or "")
        assert documented == names[:2] == [spoken(case, role)[row] for role in ("A_doc", "B_doc")]
        assert ast.get_docstring(clean) == ast.get_docstring(corrupt)
        assert names == [spoken(case, role)[row] for role in definitions]
        assert names[2:] == [answers(case)[row], answers(case, "wrong")[row]]
        swapped = [*names[:2], names[3], names[2]]
        assert others == swapped if case[1] == "swap" else not {*others} & {*names}
