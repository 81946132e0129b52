"""A compiled model computes its program, by the circuit that it says: every input, every edge, every subspace."""

import functools
import itertools
import random
import re
from typing import Literal

import pytest
import torch
from torch import Tensor

import interp
from interp.causal import EdgeGraph
from interp.circuits import interchange, recovery, score_edges
from interp.lab.rasp import PROGRAMS, Compiled, compile
from interp.lab.rasp.language import (
    Aggregate,
    Map,
    Positions,
    Program,
    Selector,
    Sum,
    Tokens,
    Variable,
    everything,
    select,
    selector_width,
)
from interp.metrics import logit_difference
from interp.model import LayerNorm, NoNorm, RMSNorm
from interp.model.edits import Edit, Swap
from interp.model.norm import Norm
from interp.model.parts import Part
from interp.model.tap import Read, Tap
from interp.zoo.planted import GAIN, induction
from tests.loops import over
from tests.tolerances import assert_close

VOTES = {"suppression": 0.25}
"""Smallest lead of a program whose output is voted on, in votes; a value has a whole one."""
NORMED = [
    "addition", "copy", "duplicates_removed", "first", "indirect_object", "induction", "is_sorted", "last", "max",
    "min", "pointer_induction", "position_parity", "shift", "skip_trigram", "two_hop",
]  # fmt: skip
"""Programs without a number."""


@functools.cache
def compiled(name: str) -> Compiled:
    return compile(PROGRAMS[name]())


def words(model: Compiled, ids: Tensor) -> list[str]:
    return [model.text.piece(i) for i in ids.tolist()]


every_program = pytest.mark.parametrize("name", PROGRAMS)


@every_program
def test_model_answers_as_the_program_does_at_every_position(name: str) -> None:
    model = compiled(name)
    source = model.program.tokens
    count = 0
    for n in range(1, source.length + 1):
        texts = list(itertools.product(source.symbols, repeat=n))
        logits = model.model(torch.stack([model.ids(text) for text in texts]))[:, 1:]
        said = [tuple(map(str, model.evaluate(text))) for text in texts]
        assert [tuple(words(model, row)) for row in logits.argmax(-1)] == said
        best = logits.topk(2).values
        assert float((best[..., 0] - best[..., 1]).min()) > GAIN * VOTES.get(name, 1.0) - 1e-3
        count += len(texts)
    found = model.check()
    assert (found.inputs, found.exhaustive, found.wrong) == (count, True, 0)
    assert found.margin == pytest.approx(GAIN * VOTES.get(name, 1.0), abs=1e-3)


LARGE = {
    "addition": ("0123456789", 6), "sort": ("abcdefg", 8), "most_frequent": ("abcde", 9), "two_hop": ("abcdef", 9),
    "brackets": ("()", 13), "histogram": ("abcdefgh", 16), "indirect_object": ("abcdef.", 12),
    "palindrome": ("ab", 10), "backup": ("abcdef.", 12),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_it_does_so_on_random_inputs_of_larger_domains(name: str) -> None:
    found = compile(PROGRAMS[name](*LARGE[name])).check(most=300, seed=1)
    assert not found.exhaustive and found.inputs >= 299 and found.wrong == 0
    assert found.margin > GAIN * VOTES.get(name, 1.0) - 1e-2


# --- programs that nobody wrote ---------------------------------------------------------------------------------------


def random_program(seed: int) -> Program:
    """A program of random selectors, aggregates and maps, up to a few layers deep."""
    draw = random.Random(seed)
    tokens = Tokens("abc"[: draw.randint(2, 3)], draw.randint(2, 4))
    positions = Positions(tokens)
    known: list[Variable] = [tokens, positions]
    numbers: list[Variable] = []

    def table(*domains: tuple[object, ...]) -> dict[tuple[object, ...], int]:
        return {key: draw.randint(0, 2) for key in itertools.product(*domains)}

    def selector() -> Selector:
        found = everything()
        for _ in range(draw.randint(0, 2)):
            keys, queries = draw.choice(known), draw.choice(known)
            holds = table(keys.domain, queries.domain)
            found &= select(keys, queries, lambda k, q, holds=holds: holds[k, q] > 0)
        return found

    for _ in range(draw.randint(2, 5)):
        kind = draw.choice(["map", "pair", "best", "width", "mean", "sum"])
        if kind in ("map", "pair"):
            of = tuple(draw.choice(known) for _ in range(1 + (kind == "pair")))
            values = table(*(each.domain for each in of))
            number = draw.random() < 0.3
            made = Map(lambda *x, values=values: values[x], of, number)
            (numbers if number else known).append(made)
        elif kind == "best":
            values_of = draw.choice(known)
            best = selector().best(Map(lambda i: -i, positions) if draw.random() < 0.5 else positions)
            known.append(Aggregate(best, values_of, draw.choice(values_of.domain)))
        elif kind == "width":
            known.append(selector_width(selector(), tokens))
        elif kind == "mean" and numbers:
            share = Aggregate(selector(), draw.choice(numbers), draw.randint(0, 2))
            known.append(Map(lambda x: "more" if x > 1 else "less", share))
        elif kind == "sum" and numbers:
            total = Sum((draw.choice(numbers), draw.choice(numbers)), (1.0, -0.5))
            known.append(Map(str, total))
    return Program(f"random {seed}", Map(str, known[-1]), causal=draw.random() < 0.5)


@over("seed", range(40))
def test_random_programs_compile_to_models_that_compute_them(seed: int) -> None:
    model = compile(random_program(seed))
    found = model.check(most=400)
    assert found.wrong == 0 and found.margin > GAIN - 1e-2


# --- attention --------------------------------------------------------------------------------------------------------


def pattern(model: Compiled, text: str) -> Tensor:
    read = Read("blocks.0.attn.hook_pattern")
    tap = Tap(reads=[read])
    model.model(model.ids(text)[None], tap)
    return tap.values[read][0, 0]


def test_ties_share_attention_equally_and_no_match_rests_on_the_beginning() -> None:
    found = pattern(compiled("either"), "abab")
    expected = [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5, 0]]
    assert_close(found, torch.tensor(expected))
    assert_close(pattern(compiled("shift"), "ab"), torch.eye(3)[[0, 0, 1]])


def test_width_leaves_a_share_to_the_beginning_which_sees_itself_only() -> None:
    found = pattern(compiled("histogram"), "aba")
    third, half = 1 / 3, 1 / 2
    rows = [[1, 0, 0, 0], [third, third, 0, third], [half, 0, half, 0], [third, third, 0, third]]
    assert_close(found, torch.tensor(rows))


def test_beginning_is_seen_by_no_program_although_an_encoder_shows_it() -> None:
    assert_close(pattern(compiled("last"), "ab"), torch.eye(3)[[0, 2, 2]])
    tokens = Tokens("ab", 4)
    length = selector_width(everything(), tokens, name="length")
    alike = select(length, length, lambda key, query: key == query)
    counted = compile(Program("alike", selector_width(alike, tokens), causal=False))
    assert counted.evaluate("aba") == (3, 3, 3) and counted.check().wrong == 0


# --- edges ------------------------------------------------------------------------------------------------------------

SMALL = [
    "shift",
    "reverse",
    "histogram",
    "induction",
    "duplicates_removed",
    "backup",
    "either",
    "suppression",
    "last",
]


def losses(model: Compiled, edge: str, tokens: Tensor) -> list[Tensor]:
    """The logits without an edge: of nothing, and of what the sender says on another input.

    And last with what it says on the same input, which is the same edited pass and takes nothing away.
    """
    others = (None, tokens.flip(0), tokens)
    return [model.without(edge, tokens, other) for other in others]


@pytest.mark.parametrize("name", SMALL)
def test_edge_not_listed_carries_nothing_and_a_needed_one_an_answer(
    name: str,
) -> None:
    model = compiled(name)
    graph = EdgeGraph.of(model.model.config)
    assert model.edges <= {*graph.names()} and model.redundant <= model.edges
    changed = dict.fromkeys(graph.names(), False)
    for tokens in model.inputs():
        logits, right = model.model(tokens), model.expected(tokens)
        for edge in changed:
            nothing, another, kept = losses(model, edge, tokens)
            assert_close(kept, logits)
            if edge not in model.edges:
                assert torch.equal(nothing, kept) and torch.equal(another, kept), edge
            else:
                changed[edge] |= bool((nothing.argmax(-1)[:, 1:] != right).any())
    assert {edge for edge, change in changed.items() if change} == model.edges - model.redundant


@pytest.mark.parametrize("name", ["reverse", "backup", "induction", "either"])
def test_a_pass_without_an_edge_is_that_of_the_circuit_of_all_others(name: str) -> None:
    """`interchange` computes it another way, and is tested on its own."""
    model = compiled(name)
    tokens = model.inputs()[-1][:12]
    first, second = len(model.text.symbols) - 1, len(model.text.symbols) - 2  # what the program may answer
    graph = EdgeGraph.of(model.model.config)
    kept = torch.stack([graph.exists & ~graph.chosen([edge]) for edge in sorted(model.edges)])
    kinds: tuple[Literal["zero", "resample"], ...] = ("zero", "resample")
    for replacement, other in zip(kinds, (None, tokens.flip(0)), strict=True):
        given = tokens.flip(0) if other is None else other
        found = interchange(
            model.model, tokens, given, kept, metric=logit_difference(first, second), replacement=replacement
        )
        for i, edge in enumerate(sorted(model.edges)):
            logits = model.without(edge, tokens, other)[:, -1]
            assert_close(torch.tensor(found.each.values[:, i]), logits[:, first] - logits[:, second])


def test_the_circuit_alone_computes_the_program() -> None:
    """All other edges at once carry what they carry on another input."""
    for name in SMALL:
        model = compiled(name)
        tokens, graph = model.inputs()[-1][:20], EdgeGraph.of(model.model.config)
        size = len(model.text.symbols)
        metric, other = logit_difference(size - 1, size - 2), tokens.flip(0)
        kept = torch.stack([graph.chosen(model.edges), graph.exists])
        found = interchange(model.model, tokens, other, kept, metric=metric).each
        assert_close(torch.tensor(found.values[:, 0]), torch.tensor(found.values[:, 1]))


def test_an_edge_carries_the_variables_that_the_program_reads_there() -> None:
    assert compiled("backup").carries == {
        "L0.resid->L0H0.k": ("<|bos|>", "tokens", "positions"),
        "L0.resid->L0H0.v": ("<|bos|>", "tokens"),
        "L0H0->L0.mlp": ("found",),
        "L0.mlp->L1H0.q": ("awake",),
        "L0.resid->L1H0.k": ("<|bos|>", "tokens", "positions"),
        "L0.resid->L1H0.v": ("tokens",),
        "L0H0->logits": ("mover",),
        "L1H0->logits": ("backup",),
    }
    assert compiled("backup").redundant == {
        "L0H0->L0.mlp", "L0.mlp->L1H0.q", "L0.resid->L1H0.k", "L0.resid->L1H0.v", "L1H0->logits",
    }  # fmt: skip
    assert compiled("either").redundant == {"L0H0->L0.mlp", "L0H1->L0.mlp"}


def test_without_the_mover_its_backup_speaks() -> None:
    model = compiled("backup")
    for tokens in model.inputs():
        silenced = model.model.edited(Edit("L0H0", interp.edits.Zero()))
        found = silenced(tokens).argmax(-1)[:, 1:]
        names = model.expected(tokens) < 3  # a or b: nobody else says that there is none
        assert torch.equal(found[names], model.expected(tokens)[names])


# --- subspaces --------------------------------------------------------------------------------------------------------


def stream(model: Compiled, site: str, tokens: Tensor) -> Tensor:
    read = Read(Part.of(site).site)
    tap = Tap(reads=[read])
    model.model(tokens, tap)
    return tap.values[read]


def one_hot(variable: Variable, value: object) -> list[float]:
    if variable.numeric:
        return [float(value)]  # type: ignore[arg-type]
    return [float(value == each) for each in variable.domain]


@pytest.mark.parametrize("name", ["reverse", "brackets", "two_hop", "backup", "addition", "either"])
def test_stream_has_every_variable_at_the_sites_and_directions_said(name: str) -> None:
    model = compiled(name)
    tokens = model.inputs()[-1]
    traces = [model.program.trace(words(model, row[1:])) for row in tokens]
    for variable, sites in model.subspaces.items():
        kind = model.program.variables[variable]
        held = torch.tensor([[one_hot(kind, value) for value in trace[variable]] for trace in traces])
        for site, directions in sites.items():
            found = stream(model, site, tokens)[:, 1:] @ directions.mT
            assert_close(found, held)
        for site in set(model.stream) - set(sites):
            assert float((stream(model, site, tokens) @ model.directions[variable].mT).abs().max()) == 0
    every = torch.cat([*model.directions.values()])
    assert torch.equal(every @ every.mT, torch.eye(len(every)))


@pytest.mark.parametrize(
    "name", ["reverse", "two_hop", "indirect_object", "sort", "pointer_induction", "brackets"]
)
def test_swapped_subspace_gives_the_program_with_that_variable(
    name: str,
) -> None:
    model = compiled(name)
    tokens = model.inputs()[-1]
    other = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))]
    names = [words(model, row[1:]) for row in tokens]
    there = [model.program.trace(words(model, row[1:])) for row in other]
    moved = 0
    for variable, sites in model.subspaces.items():
        site, directions = next(iter(sites.items()))
        swap = Edit(site, Swap(directions, stream(model, site, other)))
        found = model.model(tokens, Tap(edits=[swap])).argmax(-1)[:, 1:]
        for row, (text, trace) in enumerate(zip(names, there, strict=True)):
            try:
                wanted = model.evaluate(text, {variable: trace[variable]})
            except (
                ValueError
            ):  # with this variable the selected positions disagree: the program has no answer
                continue
            moved += wanted != model.evaluate(text)
            assert tuple(words(model, found[row])) == tuple(map(str, wanted)), variable
    assert moved > len(tokens)


# --- norms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [RMSNorm(), LayerNorm(), RMSNorm(eps=0.1)], ids=str)
@over("name", NORMED)
def test_behind_norms_that_are_undone_the_logits_are_the_same(name: str, norm: Norm) -> None:
    model = compile(PROGRAMS[name](), norm=norm)
    assert model.model.config.norm == norm and model.carries == compiled(name).carries
    for tokens in model.inputs(200):
        assert float((model.model(tokens) - compiled(name).model(tokens))[:, 1:].abs().max()) < 1e-4


def test_a_norm_is_refused_where_it_would_not_be_exact() -> None:
    refused = [name for name in PROGRAMS if name not in NORMED]
    for name in refused:
        with pytest.raises(ValueError, match=rf"of {name} is (a number|nothing at some positions)"):
            compile(PROGRAMS[name](), norm=RMSNorm())
    with pytest.raises(ValueError, match=r"with all their trained vectors are required, got RMSNorm"):
        compile(PROGRAMS["shift"](), norm=RMSNorm(trained="nothing"))
    with pytest.raises(ValueError, match=r"with all their trained vectors are required, got LayerNorm"):
        compile(PROGRAMS["shift"](), norm=LayerNorm(trained="gamma"))
    assert compile(PROGRAMS["sort"](), norm=NoNorm()).edges


# --- pairs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ("length", "position_parity")])
def test_planted_pairs_differ_and_exact_effects_rank_their_edges_first(name: str) -> None:
    pairs = compiled(name).planted(8, seed=1)
    for tokens, right in ((pairs.clean, pairs.answer), (pairs.corrupt, pairs.wrong)):
        assert torch.equal(pairs.model(tokens)[:, -1].argmax(-1), right)
    assert (pairs.answer != pairs.wrong).all()
    assert pairs.hidden <= pairs.edges <= compiled(name).edges
    metric = logit_difference(pairs.answer, pairs.wrong)
    exact = score_edges(
        pairs.model, pairs.clean, pairs.corrupt, metric=metric, method="exact", direction="noise"
    )
    (seen,) = recovery([exact], pairs.edges - pairs.hidden).value.sel(score="auroc").values
    assert seen > 0.95


@pytest.mark.slow
def test_the_compiled_induction_circuit_is_the_one_that_was_built_by_hand() -> None:
    places = {"L0H1": "L0H0", "L1H2": "L1H0"}
    by_hand = {re.sub(r"L0H1|L1H2", lambda found: places[found[0]], edge) for edge in induction(n=1).edges}
    pairs = compile(PROGRAMS["induction"]("abcdefgh", 8)).planted(64)
    assert pairs.edges == by_hand and not pairs.hidden
    assert compiled("shift").planted().edges == {"L0.resid->L0H0.v", "L0H0->logits"}


def test_pairs_are_refused_where_the_answer_is_always_the_same() -> None:
    with pytest.raises(
        ValueError, match=r"4 pairs with different outputs are required, 0 of 400 random pairs"
    ):
        compiled("position_parity").planted(4)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_outputs_that_look_alike_are_refused() -> None:
    tokens = Tokens("01", 2)
    mixed = Map(lambda token: 1 if token == "1" else "1", tokens)
    with pytest.raises(ValueError, match=r"outputs with different names, .* are required, got \['1', '1'\]"):
        compile(Program("mixed", mixed))
    with pytest.raises(ValueError, match=r"none of them <\|bos\|>, are required"):
        compile(Program("start", Tokens(["<|bos|>"], 2)))
    with pytest.raises(ValueError, match=r"compile: program must be"):
        compile("reverse")  # type: ignore[arg-type]


def test_edge_that_leads_backwards_and_tokens_of_others_are_refused() -> None:
    model = compiled("backup")
    tokens = model.inputs()[-1]
    for edge in ("L1H0->L0.mlp", "L0.mlp->L0H0.k", "L1.mlp->L1H0.q", "embed->logits"):
        with pytest.raises(ValueError, match=r"an edge that leads forwards is required, such as .*, got"):
            model.without(edge, tokens)
    with pytest.raises(IndexError, match=r"L1H1: the index of a head is 0 to 0"):
        model.without("L1H1->logits", tokens)
    with pytest.raises(ValueError, match=r"symbols a, b, \. are required, got 'c'"):
        model.ids("abc")
    with pytest.raises(ValueError, match=r"n must be a whole number from 1 to 10000000, got 0"):
        model.planted(0)


def test_the_text_of_a_model_takes_and_gives_its_symbols() -> None:
    text = compile(PROGRAMS["histogram"]("ab", 12)).text
    assert text.decode([2, *text.encode("ab10b")]) == "bab10b" and len(text.encode("ab10b")) == 4
    with pytest.raises(ValueError, match=r"symbols a, b, 12, 11, .* are required, got 'c'"):
        text.encode("abc")
    model = interp.HookedTransformer(compiled("shift").model, compiled("shift").text)
    assert model.to_str_tokens("cab") == ["<|bos|>", "c", "a", "b"]
    assert model.to_string(compiled("shift").model(model.to_tokens("cab")).argmax(-1)[0, 1:]) == "-ca"
