"""An edit changes the cells that it names, by what it says, and nothing else; partial passes do what whole ones do."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from interp.model.cells import Span, edited
from interp.model.edits import Add, Detach, Edit, Mean, Project, Resample, Scale, Set, Swap, Zero
from interp.model.kv_cache import KVCache
from interp.model.tap import Read, Tap
from tests.configs import CONFIGS, build, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

STREAM, Z = "blocks.1.hook_resid_pre", "blocks.1.attn.hook_z"
DICE = torch.Generator().manual_seed(4)
VALUE = torch.randn(3, 9, 24, generator=DICE, dtype=torch.float64)
HEADS = torch.randn(3, 9, 4, 6, generator=DICE, dtype=torch.float64)
VECTOR = torch.randn(24, generator=DICE, dtype=torch.float64)
BASIS = torch.randn(2, 24, generator=DICE, dtype=torch.float64)
OTHER = torch.randn(3, 9, 24, generator=DICE, dtype=torch.float64)


def along(x: Tensor) -> Tensor:
    """The part of each vector in the span of the basis, by least squares."""
    return (torch.linalg.lstsq(BASIS.mT, x.reshape(-1, 24).mT).solution.mT @ BASIS).reshape(x.shape)


BY_HAND: list[tuple[object, Callable[[Tensor], Tensor]]] = [
    (Zero(), lambda x: x * 0),
    (Set(2.5), lambda x: x * 0 + 2.5),
    (Set(VECTOR), lambda x: VECTOR.expand(x.shape)),
    (Add(VECTOR, -2.0), lambda x: x - 2 * VECTOR),
    (Add(0.25), lambda x: x + 0.25),
    (Scale(-3.0), lambda x: -3 * x),
    (Project(BASIS), lambda x: x - along(x)),
    (Project(BASIS, keep=True), along),
    (Swap(BASIS, 0.0), lambda x: x - along(x)),
    (Detach(), lambda x: x),
]


@over("case", range(len(BY_HAND)))
def test_a_change_does_what_it_says_to_its_cells_alone(case: int) -> None:
    change, by_hand = BY_HAND[case]
    given = VALUE.clone()
    for at, index in (
        ({}, (slice(None),)),
        ({"pos": 4}, (slice(None), 4)),
        ({"pos": (1, -1)}, (slice(None), [1, 8])),
    ):
        for rows in (None, (2, 0)):
            found = edited(Edit(STREAM, change, at, rows), given, Span())  # type: ignore[arg-type]
            expected = given.clone()
            for row in range(3) if rows is None else rows:
                expected[row][index[1:] or ...] = by_hand(given[row])[index[1:] or ...]
            assert_close(found, expected)
    assert torch.equal(given, VALUE)


def test_whole_values_are_taken_cell_by_cell() -> None:
    for change in (
        Set(OTHER),
        Set(torch.cat((OTHER * 0, OTHER)), first=3),
        Swap(torch.eye(24).double(), OTHER),
    ):
        found = edited(Edit(STREAM, change, {"pos": (2, 5)}), VALUE, Span())
        expected = VALUE.clone()
        expected[:, [2, 5]] = OTHER[:, [2, 5]]
        assert_close(found, expected)
    one = edited(Edit("L1H2", Set(HEADS[:1] * 2), {"pos": 3}), HEADS, Span())
    expected = HEADS.clone()
    expected[:, 3, 2] = 2 * HEADS[0, 3, 2]
    assert torch.equal(one, expected)


def test_several_indices_along_several_axes_are_all_combinations() -> None:
    found = edited(Edit(Z, Zero(), {"pos": (1, 2), "head": (0, 3)}), HEADS, Span())
    expected = HEADS.clone()
    for pos in (1, 2):
        for head in (0, 3):
            expected[:, pos, head] = 0
    assert torch.equal(found, expected)


def test_a_function_gets_the_cells_and_nothing_else() -> None:
    shapes: list[torch.Size] = []

    def change(cells: Tensor) -> Tensor:
        shapes.append(cells.shape)
        return cells * 2

    for edit in (Edit("L1H2", change), Edit("L1H2", change, {"pos": 3}), Edit(Z, change, {"pos": (0, 1)})):
        found = edited(edit, HEADS, Span())
        assert (found != HEADS).any() and torch.equal(found[:, 8, 3], HEADS[:, 8, 3])
    assert [tuple(shape) for shape in shapes] == [(3, 9, 6), (3, 6), (3, 2, 4, 6)]


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "window"])
def test_passes_with_a_cache_do_what_one_pass_does(name: str) -> None:
    model, tokens = build(name), some_tokens()
    edits = [
        Edit("L0H1", Zero(), {"pos": 4}), Edit("L1.resid", Add(VECTOR), {"pos": (2, 7)}), Edit("L0.mlp", Scale(0.5)),
        Edit("L1.resid", Set(OTHER), {"pos": 6}), Edit("L1H0", lambda z: -z, {"pos": 8}),
    ]  # fmt: skip
    whole = model(tokens, Tap(edits=edits))
    cache = KVCache(CONFIGS[name], 3, 9, device=model.device, dtype=model.dtype)
    steps = [
        model(tokens[:, a:b], Tap(edits=edits, prompt=9), cache=cache) for a, b in ((0, 3), (3, 7), (7, 9))
    ]
    assert_close(torch.cat(steps, 1), whole)
    assert (whole - model(tokens)).abs().max() > 1e-3


def test_an_edited_model_is_another_one_of_the_same_parameters() -> None:
    model, tokens = build("gpt2"), some_tokens()
    edit = Edit("L0H1", Zero())
    other = model.edited([edit])
    assert torch.equal(other(tokens), model(tokens, Tap(edits=[edit])))
    again = other.edited([Edit("L1.mlp", Zero())])
    assert torch.equal(again(tokens), model(tokens, Tap(edits=[edit, Edit("L1.mlp", Zero())])))
    assert (
        model.edits == ()
        and other.unedited.edits == ()
        and torch.equal(other.unedited(tokens), model(tokens))
    )
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    read = Read("blocks.0.attn.hook_z")
    tap = Tap([read], answers_only=True)
    other(tokens, tap)
    assert not tap.values[read][:, :, 1].any()
    partial = other(model(tokens, stop=1), start=1)  # block 0, where the edit is, does not run
    assert torch.equal(partial, model(model(tokens, stop=1), start=1))


def test_a_model_edited_after_its_last_block_reads_no_stream_out_by_itself() -> None:
    model, tokens = build("gpt2"), some_tokens()
    late = model.edited([Edit("unembed.hook_out", Scale(2.0))])
    assert torch.equal(late(tokens), 2 * model(tokens))
    with pytest.raises(ValueError, match=r"edited after its last block \(unembed"):
        late.read_out(model(tokens, stop=2))


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a class": (lambda: Edit("L0H1", Zero), ValueError, "a change is required"),
    "a word": (lambda: Edit("L0H1", "zero"), ValueError, "a change is required.*got 'zero'"),
    "no part": (lambda: Edit("L0Q1", Zero()), KeyError, "no part 'L0Q1'"),
    "no dim": (lambda: Edit("L0.mlp", Zero(), {"head": 1}), KeyError, "L0.mlp has the dims pos, d_model, not 'head'"),
    "a dim that is no word": (lambda: Edit("L0.mlp", Zero(), {None: None}), ValueError, "at must be indices by dim"),
    "named twice": (lambda: Edit("L0H1", Zero(), {"head": 1}), KeyError, "not 'head'"),
    "half an index": (lambda: Edit("L0.mlp", Zero(), {"pos": 1.5}), ValueError, "'pos' requires an index"),
    "an index twice": (lambda: Edit("L0.mlp", Zero(), {"pos": (1, 1)}), ValueError, "several that differ"),
    "outside": (
        lambda: edited(Edit(STREAM, Zero(), {"pos": 9}), VALUE, Span()), IndexError, "has 9 along 'pos', got index 9",
    ),
    "rows": (lambda: edited(Edit(STREAM, Zero(), rows=(3,)), VALUE, Span()), ValueError, "names rows"),
    "another shape": (
        lambda: edited(Edit(STREAM, lambda x: x[:, 1:]), VALUE, Span()), ValueError, "must return shape",
    ),
    "values": (lambda: edited(Edit(STREAM, Set(OTHER[:, 1:])), VALUE, Span()), ValueError, "values for .* must be"),
    "a mean": (lambda: edited(Edit(STREAM, Mean()), VALUE, Span()), ValueError, r"Mean\(\) .* hand it to"),
    "resampled": (lambda: edited(Edit(STREAM, Resample()), VALUE, Span()), ValueError, r"Resample\(\)"),
    "no direction": (lambda: Project(torch.zeros(24)), ValueError, "not all 0"),
    "over what": (lambda: Mean("columns"), ValueError, "over must be one of"),  # type: ignore[arg-type]
    "rows of a model": (lambda: build("gpt2").edited([Edit("L0H1", Zero(), rows=(0,))]), ValueError, "all rows"),
    "another model": (lambda: build("gpt2").edited([Edit("L5H1", Zero())]), KeyError, "layers are 0 to 1"),
}  # fmt: skip


@over("case", REFUSED)
def test_what_has_no_meaning_is_refused_by_name(case: str) -> None:
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        make()


def test_gradients_pass_through_closed_changes_and_stop_at_a_detached_one() -> None:
    model, tokens = build("gpt2"), some_tokens()
    seen = {}
    for name, change in (("scaled", Scale(2.0)), ("detached", Detach())):
        read = Read("blocks.0.hook_resid_pre", grad=True)
        tap = Tap([read], [Edit("L1.resid", change, {"pos": 8})])
        logits = model(tokens, tap)
        (seen[name],) = torch.autograd.grad(logits[:, 8, 3].sum(), tap.live[read], allow_unused=True)
    direct = seen["detached"]
    assert seen["scaled"][:, 8].abs().max() > 1e-3
    # at position 8 only the keys and values of earlier positions carry a gradient once its own stream is cut
    assert direct is None or not direct[:, 8].any()


COMPLEX = torch.ones(24, dtype=torch.complex128)


@pytest.mark.parametrize("make", [Set, Add, Project, lambda values: Swap(BASIS, values), Scale])
def test_complex_values_of_a_change_are_refused(make: Callable[[Tensor], object]) -> None:
    for values in (COMPLEX, 1j):
        with pytest.raises(ValueError, match=r"must be .*, got (Tensor of torch.complex128|1j)"):
            make(values)  # type: ignore[arg-type]


def test_a_function_that_returns_complex_numbers_is_refused() -> None:
    change = Edit(STREAM, lambda cells: cells * 1j)
    with pytest.raises(ValueError, match=r"must return real numbers, got torch.complex128"):
        edited(change, VALUE, Span())


@pytest.mark.parametrize("kind", [Set, Add])
def test_values_that_would_make_the_pass_nan_are_refused(kind: type[Set | Add]) -> None:
    for value in (math.nan, math.inf, 1e300, -1e300, torch.tensor([1.0, math.nan]), torch.tensor([1e35])):
        with pytest.raises(
            ValueError, match=r"values must be a number or a tensor of real numbers up to 1e\+30"
        ):
            kind(value)
    assert kind(1e30).values == 1e30


def test_only_attention_scores_may_be_set_to_minus_infinity() -> None:
    for value in (-math.inf, torch.tensor([0.0, -math.inf])):
        for change in (Set(value), Add(value)):
            assert Edit("blocks.0.attn.hook_attn_scores", change).change is change
            with pytest.raises(ValueError, match=r"values for L0\.resid must be finite, got -inf"):
                Edit("L0.resid", change)
        with pytest.raises(ValueError, match="must be finite, got -inf"):
            Edit("blocks.0.attn.hook_attn_scores", Swap(torch.ones(2), value))
