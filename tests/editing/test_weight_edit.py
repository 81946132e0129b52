"""Weight edits: the sum where it belongs, every byte back afterwards, and the same pass without touching a weight."""

import copy
import functools
import itertools
import random
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.core.factored import FactoredMatrix
from interp.editing import WeightEdit
from interp.model import Transformer, Weights
from interp.model.tap import Tap
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
BLOCK = ("attn.W_Q", "attn.W_K", "attn.W_V", "attn.W_O", "mlp.W_in", "mlp.W_gate", "mlp.W_out")


def writable(name: str, dtype: torch.dtype = torch.float64) -> HookedTransformer:
    model = HookedTransformer(copy.deepcopy(build(name, dtype)))
    model.transformer.tie()
    return model


def matrices(model: Transformer) -> dict[str, Tensor]:
    """Every matrix of a model by name, as `Weights` shows it."""
    weights, found = Weights(model), {}
    for layer in range(model.config.n_layers):
        views = weights.layer(layer)
        for name in BLOCK:
            if (value := getattr(views, name.partition(".")[2])) is not None:
                found[f"blocks.{layer}.{name}"] = value
        for name in BLOCK[4:] if "mlp_before" in model.config.mlps else ():
            part, _, matrix = name.partition(".")
            found[f"blocks.{layer}.{part}_before.{matrix}"] = getattr(
                weights.layer(layer, before=True), matrix
            )
    found |= {"embed.W_E": weights.W_E, "unembed.W_U": weights.W_U}
    return found if model.pos_embed is None else found | {"pos_embed.W_pos": weights.W_pos}


def some_change(like: Tensor, *, rank: int | None = 2, seed: int = 0) -> FactoredMatrix | Tensor:
    """A change of about the size of the entries, in float32 at least."""
    dtype, g = torch.promote_types(like.dtype, torch.float32), torch.Generator().manual_seed(seed)
    if rank is None:
        return torch.randn(like.shape, generator=g, dtype=dtype) * 0.2
    left = torch.randn(*like.shape[:-1], rank, generator=g, dtype=dtype) * 0.3
    return FactoredMatrix(left, torch.randn(*like.shape[:-2], rank, like.shape[-1], generator=g, dtype=dtype))


def state(model: HookedTransformer) -> dict[str, Tensor]:
    """The bits of every parameter."""
    return {n: p.detach().view(BITS[p.dtype]).clone() for n, p in model.transformer.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names whose bits differ."""
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in CONFIGS]
    + [(name, dtype) for name in ("gpt2", "gemma2", "gpt-oss") for dtype in (torch.float32, torch.bfloat16)],
)
def test_the_matrix_is_the_sum_inside_and_every_bit_is_back_outside(name: str, dtype: torch.dtype) -> None:
    model = writable(name, dtype)
    model.transformer.embed.weight[0, 0] = -0.0
    before = state(model)
    for matrix, value in matrices(model.transformer).items():
        for rank in (2, None):
            change = some_change(value, rank=rank)
            edit = WeightEdit(matrix, change)
            expected = (value.to(edit.dense.dtype) + edit.dense).to(dtype)
            with edit.applied(model):
                assert torch.equal(matrices(model.transformer)[matrix], expected)
                assert len(same(before, state(model))) == 1
            assert same(before, state(model)) == []


def test_other_parts_of_a_fused_parameter_stay_as_they_are() -> None:
    model = writable("llama-gqa")
    before = {name: value.clone() for name, value in matrices(model.transformer).items()}
    for matrix in ("blocks.1.attn.W_K", "blocks.0.mlp.W_gate"):
        with WeightEdit(matrix, some_change(before[matrix])).applied(model):
            now = matrices(model.transformer)
            assert [n for n in before if not torch.equal(now[n], before[n])] == [matrix]


@pytest.mark.parametrize("dtype", BITS)
def test_an_exception_and_nesting_leave_no_bit_behind(dtype: torch.dtype) -> None:
    model, name = writable("llama-gqa", dtype), "blocks.1.attn.W_V"
    before, value = state(model), matrices(model.transformer)[name].clone()
    first, second = (WeightEdit(name, some_change(value, seed=seed)) for seed in (1, 2))

    def nested() -> None:
        with first.applied(model):
            once = state(model)
            with second.applied(model):
                assert same(once, state(model))
            assert same(once, state(model)) == []
            with pytest.raises(KeyError), second.applied(model):
                raise KeyError
            assert same(once, state(model)) == []
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        nested()
    assert same(before, state(model)) == []


def opened(edits: list[WeightEdit], model: HookedTransformer) -> list[AbstractContextManager[None]]:
    blocks = [edit.applied(model) for edit in edits]
    for block in blocks:
        block.__enter__()
    return blocks


def with_only(edits: Iterable[WeightEdit], model: HookedTransformer) -> dict[str, Tensor]:
    """The bits of the parameters under these edits, nested in this order."""
    with ExitStack() as stack:
        for edit in edits:
            stack.enter_context(edit.applied(model))
        return state(model)


@pytest.mark.parametrize("dtype", BITS)
@over("order", list(itertools.permutations(range(4))))
def test_overlapping_blocks_may_be_left_in_any_order(dtype: torch.dtype, order: tuple[int, ...]) -> None:
    """Two changes of one matrix, one of its neighbour in the same parameter, one elsewhere: what is left is right."""
    model = writable("llama-gqa", dtype)
    before, values = state(model), matrices(model.transformer)
    names = ("blocks.1.attn.W_V", "blocks.1.attn.W_Q", "blocks.1.attn.W_V", "blocks.0.mlp.W_out")
    edits = [WeightEdit(name, some_change(values[name], seed=seed)) for seed, name in enumerate(names)]
    expected = {}
    for count in range(5):
        left = sorted(set(range(4)) - set(order[:count]))
        expected[count] = with_only((edits[i] for i in left), model)
    assert same(before, state(model)) == []
    blocks = opened(edits, model)
    assert same(expected[0], state(model)) == []
    for count, i in enumerate(order, 1):
        blocks[i].__exit__(None, None, None)
        assert same(expected[count], state(model)) == []
    assert same(before, state(model)) == []


def test_overlapping_blocks_of_edits_may_be_left_in_any_order() -> None:
    model = writable("bloom")
    before, weights = state(model), Weights(model.transformer)
    out, into = (
        WeightEdit(name, some_change(w))
        for name, w in (("unembed.W_U", weights.W_U), ("embed.W_E", weights.W_E))
    )
    only = with_only([into], model)
    first, second = opened([out, into], model)
    first.__exit__(None, None, None)
    assert same(only, state(model)) == []
    second.__exit__(None, None, None)
    assert same(before, state(model)) == []
    twice = opened([into, into], model)
    twice[0].__exit__(None, None, None)
    assert same(only, state(model)) == []
    twice[1].__exit__(None, None, None)
    assert same(before, state(model)) == []


@pytest.mark.slow
def test_thousand_random_nestings_with_exceptions_leave_the_open_sum() -> None:
    model, generator = writable("gpt2"), random.Random(0)
    values = matrices(model.transformer)
    names = ("blocks.0.attn.W_Q", "blocks.0.attn.W_K", "blocks.1.mlp.W_out")
    before = {name: values[name].clone() for name in names}
    edits = [WeightEdit(name, some_change(before[name], seed=i)) for i in range(4) for name in names]
    for _ in range(1000):
        standing = []
        for _ in range(8):
            if standing and generator.random() < 0.5:
                block, _ = standing.pop(generator.randrange(len(standing)))
                with suppress(ZeroDivisionError):
                    error = ZeroDivisionError() if generator.random() < 0.3 else None
                    block.__exit__(error and type(error), error, None)
            else:
                edit = generator.choice(edits)
                standing.append((opened([edit], model)[0], edit))
        for name in names:
            changes = (edit.dense for _, edit in standing if edit.name == name)
            assert torch.equal(values[name], functools.reduce(torch.add, changes, before[name]))
        for block, _ in standing:
            block.__exit__(None, None, None)
        assert all(torch.equal(values[name], before[name]) for name in names)


def test_edits_at_sites_remember_for_one_pass_alone() -> None:
    """A pass of another prompt between the two edits, as another thread may run one."""
    model = writable("gpt2")
    name, tokens = "blocks.0.mlp.W_out", some_tokens()
    edits = WeightEdit(name, some_change(matrices(model.transformer)[name])).as_edits(model)
    edited = model.transformer.edited(edits)

    def between(value: Tensor) -> Tensor:
        edited(tokens.flip(1))
        return value

    found = edited.edited(interp.Edit("blocks.0.mlp.hook_post", between))(tokens)
    assert torch.equal(found, edited(tokens))


def test_changed_weights_are_those_of_bare_and_edited_models_too() -> None:
    model = writable("gpt2")
    name = "blocks.0.mlp.W_out"
    edit = WeightEdit(name, some_change(matrices(model.transformer)[name]))
    with edit.applied(model):
        expected = state(model)
    other = model.edited(interp.Edit("L1H0", interp.edits.Zero()))
    for given in (model.transformer, other):
        with edit.applied(given):
            assert same(expected, state(model)) == []


def test_in_a_tied_model_the_unembedding_is_the_embedding() -> None:
    model = writable("bloom")
    before, weights = state(model), Weights(model.transformer)
    edit = WeightEdit("unembed.W_U", some_change(weights.W_U))
    expected = weights.W_E + edit.dense.mT
    with edit.applied(model), WeightEdit("embed.W_E", some_change(weights.W_E)).applied(model):
        assert torch.equal(weights.W_E, weights.W_U.mT) and not torch.equal(weights.W_E, expected)
    with edit.applied(model):
        assert torch.equal(weights.W_E, expected)
    assert same(before, state(model)) == []


def test_an_edit_trains_on_a_model_whose_parameters_want_gradients() -> None:
    model = writable("gpt2")
    model.transformer.requires_grad_(True)
    before = state(model)
    value = matrices(model.transformer)["blocks.0.mlp.W_out"]
    with WeightEdit("blocks.0.mlp.W_out", some_change(value.detach())).applied(model):
        model.transformer(some_tokens()).sum().backward()
    assert same(before, state(model)) == []


def normed(name: str, matrix: str) -> bool:
    """Whether the family norms what this matrix writes."""
    outer = CONFIGS[name].norms_output
    return outer and matrix.endswith(("W_O", "W_out"))


@pytest.mark.parametrize("name", CONFIGS)
def test_edits_at_sites_give_the_logits_of_the_changed_weights(name: str) -> None:
    model, tokens = writable(name), some_tokens()
    plain, checked = model.transformer(tokens), 0
    for i, (matrix, value) in enumerate(matrices(model.transformer).items()):
        if not matrix.startswith("blocks.1") or normed(name, matrix):
            continue
        edit = WeightEdit(matrix, some_change(value, rank=None if i % 3 == 0 else 2))
        with edit.applied(model):
            expected = model.transformer(tokens)
        assert not torch.allclose(expected, plain)
        some = model.transformer(tokens, Tap(edits=edit.as_edits(model, rows=(2, 0))))
        assert_close(some, torch.stack([expected[0], plain[1], expected[2]]))
        checked += 1
    assert checked >= 3


def test_one_batch_has_differently_edited_models_and_their_gradients() -> None:
    model, tokens = writable("gpt2"), some_tokens(1).expand(2, -1)
    values = matrices(model.transformer)
    names = ("blocks.0.mlp.W_out", "blocks.1.attn.W_Q")
    edits = [WeightEdit(n, some_change(values[n])) for n in names]
    packed = [each for row, edit in enumerate(edits) for each in edit.as_edits(model, rows=(row,))]
    logits = model.transformer(tokens, Tap(edits=packed))
    for row, edit in enumerate(edits):
        with edit.applied(model):
            assert_close(logits[row], model.transformer(tokens[:1])[0])
    left = edits[0].change.A.clone().requires_grad_()  # type: ignore[union-attr]
    moving = WeightEdit(names[0], FactoredMatrix(left, edits[0].change.B))  # type: ignore[union-attr]
    total = model.transformer(tokens, Tap(edits=moving.as_edits(model))).sum()
    assert float(torch.autograd.grad(total, left)[0].abs().max()) > 0


def test_half_precision_sites_agree_with_changed_weights_to_rounding() -> None:
    model, tokens = writable("llama-gqa", torch.bfloat16), some_tokens()
    value = matrices(model.transformer)["blocks.1.mlp.W_out"]
    edit = WeightEdit("blocks.1.mlp.W_out", some_change(value))
    with edit.applied(model):
        expected = model.transformer(tokens)
    assert_close(model.transformer(tokens, Tap(edits=edit.as_edits(model))), expected)


def test_a_change_of_rank_zero_changes_nothing() -> None:
    model, tokens = writable("gpt2"), some_tokens()
    edit = WeightEdit("blocks.0.mlp.W_out", FactoredMatrix(torch.zeros(40, 0), torch.zeros(0, 24)))
    plain = model.transformer(tokens)
    with edit.applied(model):
        assert torch.equal(model.transformer(tokens), plain)
    assert torch.equal(model.transformer(tokens, Tap(edits=edit.as_edits(model))), plain)
    assert edit.rank == 0


@pytest.mark.parametrize(
    ("model", "matrix", "error", "words"),
    [
        ("gpt2", "blocks.0.mlp.W_ou", KeyError, "nearest: blocks.0.mlp.W_out"),
        ("gpt2", "W_out", KeyError, "unknown matrix 'W_out'"),
        ("gpt2", "unembed.W_X", KeyError, "nearest: unembed.W_U"),
        ("gpt2", "blocks.2.mlp.W_out", IndexError, "layers are 0 to 1 in this model, got 2"),
        ("gpt2", "blocks.-1.mlp.W_out", IndexError, "layers are 0 to 1 in this model, got -1"),
        ("gpt2", "blocks.0.mlp.W_gate", ValueError, "no gate in its MLP"),
        ("attention-only", "blocks.0.mlp.W_out", ValueError, "this model has no MLP"),
        ("granite-moe", "blocks.0.mlp.W_out", ValueError, "a mixture of 4 experts, not one matrix"),
        ("llama-gqa", "pos_embed.W_pos", ValueError, "no such matrix"),
        ("gpt2", "blocks.0.attn.W_Q", ValueError, r"must have its shape \[4, 24, 6\], got \[3, 5\]"),
    ],
)
def test_what_cannot_be_changed_is_refused_by_name(
    model: str, matrix: str, error: type[Exception], words: str
) -> None:
    found, edit = writable(model), WeightEdit(matrix, torch.zeros(3, 5))
    with pytest.raises(error, match=words), edit.applied(found):
        pass
    with pytest.raises(error, match=words):
        edit.as_edits(found)


def test_nan_changes_nothing_and_sites_without_a_raw_output_are_named() -> None:
    model = writable("gemma2")
    before, values = state(model), matrices(model.transformer)
    with pytest.raises(ValueError, match="finite change"):
        WeightEdit("blocks.0.mlp.W_out", torch.full((36, 24), torch.nan))
    huge = FactoredMatrix(
        torch.full((36, 1), 1e30), torch.full((1, 24), 1e30)
    )  # finite until it is multiplied out
    with (
        pytest.raises(ValueError, match="finite change"),
        WeightEdit("blocks.0.mlp.W_out", huge).applied(model),
    ):
        pass
    assert same(before, state(model)) == []
    for matrix in ("blocks.0.mlp.W_out", "blocks.1.attn.W_O"):
        with pytest.raises(ValueError, match=re.escape(matrix) + ".*norms what the sublayer adds"):
            WeightEdit(matrix, some_change(values[matrix])).as_edits(model)
    with pytest.raises(ValueError, match="a matrix of a block is required"):
        WeightEdit("embed.W_E", some_change(values["embed.W_E"])).as_edits(model)


def test_a_factor_on_what_the_mlp_adds_is_a_factor_on_the_change() -> None:
    model = HookedTransformer(perturbed(replace(CONFIGS["gpt2"], residual_scale=0.5)))
    value = matrices(model.transformer)["blocks.0.mlp.W_out"]
    edit = WeightEdit("blocks.0.mlp.W_out", some_change(value))
    with edit.applied(model):
        expected = model.transformer(some_tokens())
    assert_close(model.transformer(some_tokens(), Tap(edits=edit.as_edits(model))), expected)
