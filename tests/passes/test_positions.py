"""A position is a token of its own row: numbers are those of each text alone, whatever padding, batch and cache.

The oracle is the text alone, unpadded and in a batch of its own, where a position is a column. In float64 a row of
another width differs from it by rounding of matrix products alone, which `assert_close` allows for.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch

import interp
from interp.data.batch import Batch, Side
from interp.data.stream import prompt_source
from interp.edits import Add, PerRow, Scale, Set, Zero
from interp.hooked import HookedTransformer
from interp.model.edits import Edit, PositionIndex
from interp.model.layout import PositionError
from interp.model.tap import Read
from interp.passes.generate import generate
from interp.passes.metrics import logit_difference
from interp.passes.observe import observe
from interp.passes.sweep import Sweep
from interp.passes.variants import Variant
from tests.batches import in_batches
from tests.configs import build
from tests.tolerances import assert_close

FAMILIES = ("gpt2", "llama-gqa", "bloom", "window")
SITES = ("L0.resid", "L1.mlp", "L0H1")
STREAM = "blocks.1.hook_resid_pre"


def texts(seed: int, rows: int = 4, most: int = 9) -> list[list[int]]:
    """Texts of random ids and of random lengths, no two alike."""
    generator = np.random.default_rng(seed)
    lengths = generator.permutation(np.arange(3, most + 1))[:rows]
    return [generator.integers(1, 31, n).tolist() for n in lengths]


def batches(rows: Sequence[Sequence[int]], side: Side, size: int) -> list[Batch]:
    """The texts in batches of this many, each padded to the longest of all."""
    return list(Batch.of(rows, side=side).with_answers(torch.tensor([3, 5, 7, 9]), None).split(size))


def own(at: PositionIndex, row: int, length: int) -> list[int]:
    """The columns of one text alone that positions name."""
    given = at.places[row] if isinstance(at, PerRow) else at
    every = given if isinstance(given, tuple) else (given,)
    return list(dict.fromkeys(i % length for i in every if isinstance(i, int)))


PLACES: tuple[PositionIndex, ...] = (
    0,
    2,
    -1,
    -3,
    (0, -1),
    (1, 2),
    PerRow([0, -1, 1, 2]),
    PerRow([-2, 0, -3, 1]),
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_an_edit_hits_the_tokens_that_it_hits_in_each_text_alone(family: str, side: Side) -> None:
    model = build(family)
    vector = torch.randn(24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for seed, where, at in zip(range(24), SITES * 8, PLACES * 3, strict=True):
        rows, change = texts(seed), Scale(-2.0) if "H" in where else Add(vector)
        alone = [
            observe(
                model, Batch.of([row]), edits=[Edit(where, change, {"pos": own(at, i, len(row))})]
            ).output[0]
            for i, row in enumerate(rows)
        ]
        found = observe(model, Batch.of(rows, side=side), edits=[Edit(where, change, {"pos": at})]).output
        for logits, mine, real in zip(alone, found, Batch.of(rows, side=side).real, strict=True):
            assert_close(mine[real], logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_cells_of_patterns_are_tokens_along_both_axes(side: Side) -> None:
    model, rows = build("gpt2"), texts(3)
    batch = Batch.of(rows, side=side)
    for query, key, head in (
        (-1, 0, 1),
        (2, (0, 1), 0),
        (PerRow([2, -1, 1, -2]), 0, (0, 2)),
        ((-1, 2), (0, 1), 3),
    ):
        edits = [Edit("L1.pattern", Zero(), {"query": query, "key": key, "head": head})]
        found = observe(model, batch, edits=edits).output
        for i, row in enumerate(rows):
            at = {"query": own(query, i, len(row)), "key": own(key, i, len(row)), "head": head}
            alone = observe(model, Batch.of([row]), edits=[Edit("L1.pattern", Zero(), at)]).output[0]
            assert_close(found[i][batch.real[i]], alone)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_reads_and_sweeps_find_the_tokens_of_each_text(side: Side, size: int) -> None:
    model = build("llama-gqa")
    for seed, at in enumerate(PLACES):
        rows, first = texts(seed), 0
        for batch in batches(rows, side, size):
            some = range(first, first + len(batch))
            mine = PerRow([at.places[i] for i in some]) if isinstance(at, PerRow) else at
            read = Read(STREAM, pos=mine)
            seen = observe(model, batch, [read]).trace[read]
            variants = [
                Variant([Edit(STREAM, Scale(3.0), {"pos": mine})]),
                Variant([Edit("L0H2", Zero(), {"pos": mine})]),
            ]
            swept = Sweep(model, batch, variants).run(logit_difference()).values
            for place, i in enumerate(some):
                row, columns = rows[i], own(at, i, len(rows[i]))
                one = Batch.of([row]).with_answers(torch.tensor([[3, 5, 7, 9][i]]), None)
                stream = observe(model, one, [Read(STREAM)]).trace[STREAM][0]
                assert_close(seen[place], stream[columns])
                for which, each in enumerate(("blocks.1.hook_resid_pre", "L0H2")):
                    change = Scale(3.0) if which == 0 else Zero()
                    logits = observe(model, one, edits=[Edit(each, change, {"pos": columns})]).output[0, -1]
                    assert_close(swept[which, place], logits[[3, 5, 7, 9][i]])
            first += len(batch)


@pytest.mark.parametrize("family", ["gpt2", "llama-gqa"])
@pytest.mark.parametrize("cached", [True, False])
def test_generation_edits_each_prompts_tokens_with_and_without_a_cache(family: str, cached: bool) -> None:
    model, rows = build(family), texts(5)
    vector = 2 * torch.randn(24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    places: tuple[PositionIndex, ...] = (
        *PLACES,
        "new",
        4,
        (1, 5),
        7,
    )  # the last three are generated in some of the rows
    for at, some in product(places, (rows, rows[:1])):
        if isinstance(at, PerRow) and some is not rows:
            continue
        edits = [Edit("L1.resid", Add(vector), {"pos": at})]
        found = generate(model, Batch.of(some), 4, use_cache=cached, edits=edits)
        for i, row in enumerate(some):
            text = list(row)
            for _ in range(4):  # one pass after the other, at the columns meant
                new = tuple(range(len(row), len(text)))
                ends = own(at, i, len(row)) if not isinstance(at, str) else []
                if isinstance(at, int | tuple):
                    ends = [p if p >= 0 else p + len(row) for p in (at if isinstance(at, tuple) else (at,))]
                columns = new if at == "new" else tuple(p for p in ends if p < len(text))
                mine = [Edit("L1.resid", Add(vector), {"pos": columns})] if columns else []
                text.append(int(observe(model, Batch.of([text]), edits=mine).output[0, -1].argmax()))
            assert found.tokens[i][found.real[i]].tolist() == text


def test_values_for_each_position_reach_theirs_while_a_text_grows() -> None:
    model, rows = build("gpt2"), texts(6)
    values = 3 * torch.randn(2, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    edits = [Edit("L1.resid", Set(values), {"pos": (1, 6)})]
    cached, plain = (
        generate(model, Batch.of(rows), 5, use_cache=each, edits=edits).tokens for each in (True, False)
    )
    assert torch.equal(cached, plain)


def test_packed_texts_count_their_own_tokens() -> None:
    model, rows = build("gpt2"), texts(7)
    packed = Batch.packed(rows, 14)
    for at in (0, 2, -1, (0, -1), (1, -2)):
        edit = Edit("L1.resid", Scale(-2.0), {"pos": at})
        found = packed.unpack(observe(model, packed, edits=[edit]).output)
        swept = Sweep(model, packed, [Variant([edit])]).read([Read("blocks.1.hook_mlp_out")])
        mlp = packed.unpack(next(iter(swept.values()))[0])
        for i, row in enumerate(rows):
            alone = observe(
                model, Batch.of([row]), [Read("blocks.1.hook_mlp_out")],
                [Edit("L1.resid", Scale(-2.0), {"pos": own(at, i, len(row))})],
            )  # fmt: skip
            assert_close(found[i], alone.output[0])
            assert_close(mlp[i], alone.trace["blocks.1.hook_mlp_out"][0])


def test_missing_position_names_the_row_its_length_and_what_was_asked() -> None:
    model, rows = build("gpt2"), [[1, 2, 3, 4, 5], [6, 7, 8]]
    said = r"position 4 .* row 1 has 3 tokens"
    edit = Edit("L0.mlp", Zero(), {"pos": 4})
    asks = {
        "edit": lambda batch: observe(model, batch, edits=[edit]),
        "read": lambda batch: observe(model, batch, [Read(STREAM, pos=4)]),
        "sweep": lambda batch: Sweep(model, batch, [Variant([edit])]).run(logit_difference()),
        "lens": lambda batch: interp.logit_lens(HookedTransformer(model), batch, pos=4),
        "attribution": lambda batch: interp.attribute(HookedTransformer(model), batch, pos=4),
    }
    for side, ask in product(("left", "right"), asks.values()):
        batch = Batch.of(rows, side=side).with_answers(torch.tensor([1, 2]), None)
        with pytest.raises(PositionError, match=said):
            ask(batch)
    with pytest.raises(ValueError, match="one position per row"):
        observe(model, batch, edits=[Edit("L0.mlp", Zero(), {"pos": PerRow([1, 2, 0])})])
    with pytest.raises(ValueError, match="generates none"):
        observe(model, batch, edits=[Edit("L0.mlp", Zero(), {"pos": "new"})])
    with pytest.raises(ValueError, match="rows of every batch alike"):
        model.edited([Edit("L0.mlp", Zero(), {"pos": PerRow([1, 2])})])
    with pytest.raises(ValueError, match="columns of another pass"):
        generate(model, batch, 2, edits=[Edit("L0.resid", Set(torch.zeros(2, 5, 24)), {"pos": 0})])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_maps_by_position_are_those_of_each_text_alone(side: Side, size: int) -> None:
    model, rows = HookedTransformer(build("gpt2")), texts(8)
    others = [[*row[:1], (row[1] + 5) % 31, *row[2:]] for row in rows]
    metric = logit_difference([3, 5, 7, 9], [4, 6, 8, 10])
    clean, corrupt = (Batch.of(each, side=side) for each in (rows, others))
    by = ("layer", "pos")
    calls = {
        "patch": lambda a, b, m: interp.patch(
            model, in_batches(model, a, size), in_batches(model, b, size), "resid_pre", metric=m
        ),
        "noise": lambda a, b, m: interp.patch(
            model,
            in_batches(model, a, size),
            in_batches(model, b, size),
            "z",
            by=by,
            metric=m,
            direction="noise",
        ),
        "first order": lambda a, b, m: interp.attribution_patch(
            model, in_batches(model, a, size), in_batches(model, b, size), "z", metric=m
        ),
        "ablate": lambda a, b, m: interp.ablate(
            model, in_batches(model, a, size), "mlp", change=Zero(), by=by, metric=m
        ),
    }
    for name, call in calls.items():
        found = call(clean, corrupt, metric)
        each = found["each"].transpose("prompt", "pos", ...)
        counts = torch.tensor([sum(len(row) > p for row in rows) for p in range(found.sizes["pos"])])
        for i, (row, other) in enumerate(zip(rows, others, strict=True)):
            one = logit_difference([3, 5, 7, 9][i], [4, 6, 8, 10][i])
            alone = call(Batch.of([row]), Batch.of([other]), one)["each"].transpose("prompt", "pos", ...)
            mine = torch.from_numpy(each.isel(prompt=i).values)
            assert_close(mine[: len(row)], torch.from_numpy(alone.isel(prompt=0).values)), name
            assert mine[len(row) :].isnan().all()
        n = torch.from_numpy(found.n.transpose("pos", ...).values).reshape(len(counts), -1)
        assert bool((n == counts[:, None]).all()), name
        mean = np.nanmean(each.values, 0)
        np.testing.assert_allclose(found.value.transpose("pos", ...).values, mean, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
def test_analyses_take_one_position_several_or_one_of_each_prompt(side: Side) -> None:
    model, rows = HookedTransformer(build("llama-gqa")), texts(9)
    batch, answers = Batch.of(rows, side=side), [3, 5, 7, 9]
    picked = PerRow([1, -1, 0, -2])
    for size in (1, 3, 4):
        lens = interp.logit_lens(model, in_batches(model, batch, size), answer=answers, pos=picked)
        parts = interp.attribute(model, in_batches(model, batch, size), answers, pos=picked)
        several = interp.logit_lens(model, in_batches(model, batch, size), answer=answers, pos=(0, -1))
        read = interp.metrics.logit_difference(answers).at(picked)
        ablated = interp.ablate(model, in_batches(model, batch, size), "attn", change=Zero(), metric=read)
        for i, row in enumerate(rows):
            place = own(picked, i, len(row))[0]
            one, until = Batch.of([row]), Batch.of([row[: place + 1]])
            alone = interp.logit_lens(model, one, answer=answers[i]).target_prob.values[0]
            np.testing.assert_allclose(lens.target_prob.values[i, :, 0], alone[:, place], rtol=1e-9)
            np.testing.assert_allclose(several.target_prob.values[i], alone[:, [0, -1]], rtol=1e-9)
            assert int(lens.position[i, 0]) == place
            theirs = interp.attribute(model, until, answers[i])
            np.testing.assert_allclose(parts.value.values[i], theirs.value.values[0], rtol=1e-8, atol=1e-12)
            drop = interp.ablate(model, until, "attn", change=Zero(), metric=logit_difference(answers[i]))
            np.testing.assert_allclose(
                ablated["each"].values[i], drop["each"].values[0], rtol=1e-8, atol=1e-12
            )


def test_questions_of_one_run_see_the_same_positions_whoever_shares_it() -> None:
    """Attribution reads the last column; a lens beside it must not get its padding on the left."""
    model, rows = HookedTransformer(build("gpt2")), texts(10)
    lens, both = interp.lenses.LogitLens(), interp.residual.Attribute([3, 5, 7, 9])
    together = interp.run([lens, both], model, rows)
    alone = interp.run([lens], model, rows)["logit_lens"]
    assert alone.token.values.tolist() == together["logit_lens"].token.values.tolist()
    np.testing.assert_allclose(together["logit_lens"].kl.values, alone.kl.values, rtol=1e-9, atol=1e-12)
    for i, row in enumerate(rows):
        assert bool(np.isnan(alone.kl.values[i, 0, len(row) :]).all()) and not np.isnan(
            alone.kl.values[i, 0, 0]
        )


def test_edited_model_answers_analyses_with_each_texts_own_numbers() -> None:
    rows, edits = texts(11), [Edit("L0.mlp", Zero(), {"pos": -1}), Edit("L1.attn", Scale(2.0), {"pos": 1})]
    model, answers = HookedTransformer(build("gpt2")).edited(edits), [3, 5, 7, 9]
    for side in ("left", "right"):
        batch = Batch.of(rows, side=side)
        lens = interp.logit_lens(model, batch, answer=answers)
        parts = interp.attribute(model, batch, answers, pos=1)
        for i, row in enumerate(rows):
            alone = interp.logit_lens(model, [row], answer=answers[i]).entropy.values[0]
            np.testing.assert_allclose(lens.entropy.values[i, :, : len(row)], alone, rtol=1e-9)
            theirs = interp.attribute(model, [row], answers[i], pos=1)
            np.testing.assert_allclose(parts.total.values[i], theirs.total.values[0], rtol=1e-9)


@pytest.mark.parametrize("side", ["left", "right"])
def test_paths_under_an_edit_at_a_position_are_those_of_each_text_alone(side: Side) -> None:
    rows, answers = texts(12), [3, 5, 7, 9]
    model = HookedTransformer(build("attention-only")).edited([Edit("L1H2", Zero(), {"pos": -1})])
    found = interp.residual.paths(model, Batch.of(rows, side=side), answers)
    for i, row in enumerate(rows):
        alone = interp.residual.paths(model, [row], answers[i])
        np.testing.assert_allclose(found.value.values[i], alone.value.values[0], rtol=1e-8, atol=1e-12)


def test_per_row_positions_are_written_down_and_read_back() -> None:
    edit = Edit("L1.mlp", Zero(), {"pos": PerRow([3, -1, None])})
    again = interp.edits.edit_from_json(interp.edits.edit_to_json(edit))
    assert again.at["pos"] == edit.at["pos"]
    assert eval(interp.edits.edit_to_python(edit), {"interp": interp}).at["pos"] == edit.at["pos"]
    assert (
        interp.edits.edit_from_json(interp.edits.edit_to_json(Edit("L1.mlp", Zero(), {"pos": "new"}))).at[
            "pos"
        ]
        == "new"
    )


def test_ids_of_texts_of_several_lengths_are_refused() -> None:
    model = HookedTransformer.from_pretrained("demo-2l") if "demo-2l" in interp.DEMOS else None
    model = model or HookedTransformer.from_pretrained(next(iter(interp.DEMOS)))
    with pytest.raises(ValueError, match=r"to_batch"):
        model.to_tokens(["The cat", "The cat sat on the mat"])
    assert model.to_tokens(["The cat", "The cat"]).shape[0] == 2


def test_prompts_are_computed_by_length_and_answered_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is that of the text alone, in the place of its prompt, with few cells of padding computed."""
    rows, model = texts(4, 7), HookedTransformer(build("llama-gqa"))
    cells = []

    def counting(tokens: torch.Tensor, *given: object, **more: object) -> torch.Tensor:
        cells.append(tokens.numel())
        return forward(tokens, *given, **more)

    forward = model.transformer.forward
    monkeypatch.setattr(model.transformer, "forward", counting)
    monkeypatch.setattr("interp.data.stream.PASS", 1)
    source = prompt_source(Batch.of(rows, side="left"), model.text, batch_size=3)
    found = interp.logit_lens(model, source, pos=-1)
    assert sum(cells) < 1.25 * sum(map(len, rows)) < len(rows) * max(map(len, rows))
    for i, row in enumerate(rows):
        alone = interp.logit_lens(model, Batch.of([row]), pos=-1)
        assert_close(torch.from_numpy(found.kl[i].values), torch.from_numpy(alone.kl[0].values))


def test_hooks_that_may_tell_columns_apart_see_the_prompts_as_given() -> None:
    rows = texts(5)
    model, seen = HookedTransformer(build("gpt2")), []

    def watch(value: torch.Tensor, hook: object) -> None:
        seen.append(value.shape[:2])

    given = Batch.of(rows, side="left")
    with model.hooks([("blocks.0.hook_resid_pre", watch)]):
        interp.logit_lens(model, in_batches(model, given, 3), pos=-1)
    width = given.tokens.shape[1]
    assert seen == [(3, width), (1, width)]


@pytest.mark.parametrize("edited", [False, True])
def test_a_prompt_that_is_too_short_is_named_by_its_place_among_all(edited: bool) -> None:
    model = HookedTransformer(build("gpt2"))
    rows = [[3, 1], [4, 1, 5, 9, 2], [6, 5, 3, 5]]
    edits = [Edit("L0.mlp", Zero(), at={"pos": 3})] if edited else []
    with pytest.raises(PositionError, match="position 3 is required of every row, but row 0 has 2 tokens"):
        interp.logit_lens(model.edited(edits), Batch.of(rows), pos=-1 if edited else 3)


SEVERAL = PerRow([(0, 1), (-1,), (2, 1, -0), ()])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_several_positions_of_each_row_are_those_of_each_text_alone(family: str, side: Side) -> None:
    model = build(family)
    vector = torch.randn(24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    changes = (Scale(-2.0), Add(vector), Zero(), lambda cells: cells.flip(-1))
    for seed, (where, change) in enumerate(product(("L0.resid", "L1.mlp"), changes)):
        rows = texts(seed)
        found = observe(
            model, Batch.of(rows, side=side), edits=[Edit(where, change, {"pos": SEVERAL})]
        ).output
        for i, (mine, real) in enumerate(zip(found, Batch.of(rows, side=side).real, strict=True)):
            at = own(SEVERAL, i, len(rows[i]))
            edits = [Edit(where, change, {"pos": at})] if at else []
            assert_close(mine[real], observe(model, Batch.of([rows[i]]), edits=edits).output[0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_sweeps_and_heads_take_several_positions_of_each_row(side: Side) -> None:
    model, rows = build("llama-gqa"), texts(5)
    batch = next(iter(batches(rows, side, 4)))
    edits = [Edit("blocks.0.attn.hook_z", Scale(3.0), {"pos": SEVERAL, "head": (0, 2)})]
    swept = Sweep(model, batch, [Variant(edits), Variant([Edit("L1.mlp", Zero(), {"pos": SEVERAL})])])
    values = swept.run(logit_difference()).values
    for which, each in enumerate((edits, [Edit("L1.mlp", Zero(), {"pos": SEVERAL})])):
        logits = observe(model, batch, edits=each).output
        last = logits[torch.arange(4), batch.last()]
        assert_close(values[which], last[torch.arange(4), torch.tensor([3, 5, 7, 9])])


def test_generation_with_a_cache_equals_that_without_at_several_positions_of_each_row() -> None:
    model, rows = build("llama-gqa"), texts(6)
    edits = [Edit("L1.resid", Scale(-2.0), {"pos": SEVERAL})]
    ways = [
        generate(model, Batch.of(rows), 4, use_cache=cached, edits=edits).tokens for cached in (True, False)
    ]
    assert ways[0].equal(ways[1])


def test_positions_of_each_row_are_written_alike_and_refused_in_words() -> None:
    assert PerRow([(1, 2), 3, None]) == PerRow([[1, 2], [3], []]) == PerRow([np.array([1, 2]), (3,), ()])
    assert PerRow([1, None]).several is False and PerRow([(1,), None]).several is True
    assert PerRow([(1, 2), (3,)]).of([1, 0]).places == ((3,), (1, 2))
    assert [one.places for one in PerRow([(1, 2), (3,)]).apart()] == [(1, 3), (2, None)]
    for wrong in ([(1, 1)], [(1, -1)], [(1.5,)], [("a",)], [[[1]]], "ab"):
        with pytest.raises(
            ValueError, match=r"one position for every row is required, .* or several that differ"
        ):
            PerRow(wrong)  # type: ignore[arg-type]
    model = build("gpt2")
    read = Read(STREAM, pos=PerRow([(0, 1), (1,)]))
    with pytest.raises(ValueError, match="a read requires as many of every row"):
        observe(model, Batch.of(texts(0, 2)), [read])
    equal = Read(STREAM, pos=PerRow([(0, 1), (1, 2)]))
    batch = Batch.of(texts(0, 2))
    seen, whole = (
        observe(model, batch, [equal, Read(STREAM)]).trace,
        observe(model, batch, [Read(STREAM)]).trace,
    )
    assert seen[equal][0].equal(whole[STREAM][0, [0, 1]]) and seen[equal][1].equal(whole[STREAM][1, [1, 2]])
    written = interp.edits.edit_to_json(Edit("L1.mlp", Zero(), {"pos": SEVERAL}))
    assert written["at"] == {"pos": {"per_row": [(0, 1), (-1,), (2, 1, 0), ()]}}
    assert interp.edits.edit_from_json(written).at["pos"] == SEVERAL
