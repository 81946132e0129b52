"""The backward lens' readings: equal to slow loops over cells, honest about zeros, blind to padding and batches."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import xarray as xr
from jaxtyping import TypeCheckError
from torch import Tensor

import interp
from interp import Batch, Edit, HookedTransformer
from interp.core import tiles
from interp.edits import Add, Scale, Zero
from interp.lenses import (
    GradientFactors,
    backward_lens,
    gradient_cosines,
    gradient_factors,
    gradient_rank,
)
from interp.lenses.backward_lens import NO_UPDATE
from interp.model import Transformer
from tests.configs import CONFIGS, build, some_tokens
from tests.disturbed import machine
from tests.edited import without_head
from tests.loops import over
from tests.model.slow import slow_read_out
from tests.tables import PART_COLUMNS
from tests.tiny import CORPUS, hooked
from tests.tolerances import assert_close

ANSWERS = [3, 14, 7]
READABLE = ("gpt2", "llama-gqa", "gemma2", "no-final-norm", "attention-only-rotary", "masked-lm", "gptj")
RAGGED = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]]
PROMPT = CORPUS[0].removesuffix(" Mary.")


@cache
def model_of(name: str) -> HookedTransformer:
    return HookedTransformer(build(name))


@cache
def recorded(name: str) -> GradientFactors:
    return gradient_factors(model_of(name), some_tokens(), ANSWERS)


def lens(name: str, *matrices: str, **options: object) -> xr.Dataset:
    """The lens of these matrices; of one matrix without that dim."""
    found = backward_lens(model_of(name), some_tokens(), ANSWERS, matrices=list(matrices), **options)  # type: ignore[arg-type]
    return found.isel(matrix=0) if len(matrices) == 1 else found


def of(values: np.ndarray) -> Tensor:
    return torch.tensor(values)


def slow_logits(model: Transformer, vector: Tensor, projection: str) -> Tensor:
    """The read-out of one vector of the stream."""
    if projection == "raw":
        assert model.unembed is not None
        return model.unembed.weight @ vector
    scaled = vector / vector.square().sum().sqrt() if projection == "normalised" else vector
    return slow_read_out(model, scaled[None])[0]


@over("projection", ["normalised", "final_norm", "raw"])
@pytest.mark.parametrize("name", READABLE)
def test_words_and_ranks_are_those_of_a_loop_over_cells(name: str, projection: str) -> None:
    found, model = recorded(name), build(name)
    every = lens(name, "W_O", "W_V", top=3, projection=projection)
    for matrix, side in (("W_O", 1), ("W_V", 0)):
        table = every.sel(matrix=matrix)
        for cell in np.ndindex(3, 2, 9):
            row, layer, pos = cell
            x, delta = found[f"blocks.{layer}.attn.{matrix}"]
            if not delta[row, pos].any():
                assert table.target_rank.values[cell] == -1
                continue
            logits = slow_logits(model, (x, delta)[side][row, pos], projection)
            order = logits.argsort(descending=True).tolist()
            assert table.top_token.values[cell].tolist() == order[:3]
            assert table.bottom_token.values[cell].tolist() == order[:-4:-1]
            assert table.target_rank.values[cell] == order.index(ANSWERS[row])
            extreme = order[-1] if matrix == "W_O" else order[0]
            assert str(table.word.values[cell]) == f"<{extreme}>"
            assert table.top_word.values[cell].tolist() == [f"<{i}>" for i in order[:3]]


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_norms_are_those_of_the_outer_products(name: str) -> None:
    norms = lens(name, "W_in")
    products = torch.stack(
        [
            torch.einsum("bpi,bpo->bpio", *recorded(name)[f"blocks.{i}.mlp.W_in"]).flatten(2).norm(dim=-1)
            for i in (0, 1)
        ],
        1,
    )
    assert_close(of(norms.relative_update.values), products / products.amax((1, 2), keepdim=True))
    assert_close(of((norms.x * norms.delta).values), products)


@pytest.mark.parametrize("name", [name for name, c in CONFIGS.items() if c.causal])
def test_ranks_are_those_of_the_gradients(name: str) -> None:
    matrices = ("W_O", "W_Q") if CONFIGS[name].mlp is None else ("W_O", "W_V")
    ours = gradient_rank(model_of(name), some_tokens(), ANSWERS, matrices=matrices)
    for matrix in matrices:
        for layer in range(2):
            x, delta = recorded(name)[f"blocks.{layer}.attn.{matrix}"]
            gradients = torch.einsum("bpi,bpo->bio", x, delta)
            ranks = ours.value.sel(matrix=matrix, layer=layer).values.tolist()
            assert ranks == torch.linalg.matrix_rank(gradients).tolist()


def test_the_rank_is_the_number_of_tokens_but_one_in_the_last_block() -> None:
    found = gradient_rank(model_of("gpt2"), some_tokens(), ANSWERS, matrices=["W_in", "W_out"])
    assert found.value.values.tolist() == [[[9, 1]] * 2] * 3
    assert found.tokens.values.tolist() == [9] * 3
    assert found.part.values.tolist() == [["L0.mlp", "L1.mlp"]] * 2
    all_of_it = gradient_rank(model_of("gpt2"), some_tokens(), ANSWERS, matrices=["W_out"], tolerance=1.0)
    assert all_of_it.value.values.max() == 0
    with pytest.raises(ValueError, match=r"tolerance, a share .* in \[0, 1\], got 2"):
        gradient_rank(model_of("gpt2"), some_tokens(), ANSWERS, tolerance=2.0)


def test_a_zero_vjp_says_no_update_in_every_projection() -> None:
    model = hooked("gpt2")
    for projection in ("normalised", "final_norm", "raw"):
        found = backward_lens(
            model,
            PROMPT,
            " Mary",
            matrices=["W_in", "W_out"],
            projection=projection,
            top=2,  # type: ignore[arg-type]
        )
        last = found.sizes["pos"] - 1
        table = interp.frame(found)
        for matrix in ("W_in", "W_out"):
            mine = table[table.matrix == matrix]
            silent = mine[(mine["layer"] == 1) & (mine["pos"] < last)]
            assert len(silent) == last
            assert set(silent["word"]) == {NO_UPDATE} and set(silent["target_rank"]) == {-1}
            assert NO_UPDATE not in set(mine.drop(silent.index)["word"])
        cells = found.isel(prompt=0).sel(layer=1, pos=slice(None, last - 1))
        for end in ("top", "bottom"):
            assert (cells[f"{end}_token"] == -1).all() and (cells[f"{end}_word"] == "").all()


def test_updates_below_the_threshold_are_left_out() -> None:
    share = lens("gpt2", "W_out").relative_update.values
    cut = float(np.median(share[share > 0]))
    ranks = lens("gpt2", "W_out", threshold=cut).target_rank.values
    assert ((ranks == -1) == (share <= cut)).all() and (ranks == -1).any() and (ranks >= 0).any()


def test_rounding_in_half_precision_is_no_update_whatever_the_machine() -> None:
    """The first token sees itself alone, so that its query has no gradient but what two kernels round differently."""
    model = HookedTransformer(build("gpt2", torch.bfloat16), None)
    with machine(disturbed=True):
        found = backward_lens(model, some_tokens(20), [3] * 20, matrices=["W_Q"]).sel(layer=0, pos=0)
    assert (found.relative_update > 1e-6).any() and (found.target_rank == -1).all()


def test_cosines_are_those_of_the_last_tokens_vectors() -> None:
    found = gradient_factors(model_of("gpt2"), Batch.of(RAGGED), [3, 5])
    every = gradient_cosines(model_of("gpt2"), Batch.of(RAGGED), [3, 5])
    for matrix, side, part in (("W_out", 1, "mlp"), ("W_in", 0, "mlp"), ("W_O", 1, "attn")):
        cosines = every.value.sel(matrix=matrix)
        for row, last in ((0, 4), (1, 7)):
            a, b = (found[f"blocks.{i}.{part}.{matrix}"][side][row, last] for i in (0, 1))
            expected = float(a @ b / (a.norm() * b.norm()))
            assert float(cosines.sel(layer=0, other_layer=1)[row]) == pytest.approx(expected, rel=1e-9)
    assert_close(of(cosines.sel(layer=1, other_layer=1).values), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_holds_nothing_and_changes_nothing(name: str, side: str) -> None:
    model = HookedTransformer(build(name))
    batch = Batch.of(RAGGED, side=side)  # type: ignore[arg-type]
    padded = backward_lens(model, batch, [3, 5], matrices=["W_in"])
    alone = backward_lens(model, torch.tensor(RAGGED[0]), 3, matrices=["W_in"])
    real = slice(0, 5)
    cells, expected = padded.isel(prompt=0, matrix=0), alone.isel(prompt=0, matrix=0)
    for value in ("x", "delta", "relative_update"):
        assert_close(of(cells[value].values[:, real]), of(expected[value].values))
    for value in ("top_token", "bottom_token", "target_rank", "word"):
        assert (cells[value].values[:, real] == expected[value].values).all()
    hidden = [i for i in range(8) if i not in range(8)[real]]
    assert np.isnan(cells.delta.values[:, hidden]).all() and (cells.target_rank.values[:, hidden] == -1).all()
    assert (cells.word.values[:, hidden] == "").all() and (cells.token.values[hidden] == "").all()
    ranks = gradient_rank(model, batch, [3, 5], matrices=["W_in"])
    assert ranks.value.values[0, 0].tolist() == [5, 1]
    table = interp.frame(padded)
    assert len(table.dropna(subset="delta")) == 2 * (5 + 8)
    ends = table[table.token != ""].groupby("prompt").pos.max().tolist()
    assert ends == [4, 7]


def test_the_size_of_batches_and_tiles_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = recorded("gpt2")
    split = gradient_factors(model_of("gpt2"), some_tokens(), ANSWERS, batch_size=2)
    for name in whole:
        for ours, theirs in zip(split[name], whole[name], strict=True):
            assert_close(ours, theirs)
    assert split.error("blocks.0.mlp.W_in") < 1e-10
    before = lens("gpt2", "W_out", "W_in", top=4)
    monkeypatch.setattr(tiles, "TILE", 100)
    assert lens("gpt2", "W_out", "W_in", top=4).equals(before)


def test_the_layers_and_matrices_asked_for_are_recorded_and_no_others() -> None:
    model, asked = model_of("llama-gqa"), {"layers": [1], "matrices": ["W_gate"]}
    found = gradient_factors(model, some_tokens(), ANSWERS, **asked)  # type: ignore[arg-type]
    assert list(found) == ["blocks.1.mlp.W_gate"] and found.recorded() == {"W_gate": [1]}
    assert repr(found) == "GradientFactors(1 matrices, 3 rows of 9 tokens: blocks.1.mlp.W_gate, ...)"
    lens_ = backward_lens(model, some_tokens(), ANSWERS, **asked)  # type: ignore[arg-type]
    assert lens_.layer.values.tolist() == [1] and lens_.matrix.values.tolist() == ["W_gate"]
    with pytest.raises(KeyError, match=r"no factors of 'blocks\.1\.mlp\.W_out' were recorded"):
        found.in_stream(1, "W_out")
    every = backward_lens(model, some_tokens(), ANSWERS, top=1)
    assert every.matrix.values.tolist() == ["W_in", "W_gate", "W_out", "W_Q", "W_K", "W_V", "W_O"]
    assert every.layer.values.tolist() == [0, 1]


def test_the_table_names_prompt_layer_token_and_words() -> None:
    model, prompts = hooked("gpt2"), [PROMPT, "The cat sat on the"]
    cells = backward_lens(model, prompts, [" Mary", " cat"], matrices=["W_out"], top=2)
    table = interp.frame(cells)
    assert len(table.columns.difference(PART_COLUMNS)) <= 12
    row = table[(table["prompt"] == 1) & (table["layer"] == 0) & (table["pos"] == 2)].iloc[0]
    tokens = model.text.batch(prompts).tokens
    assert row["token"] == model.text.pieces(tokens[1].tolist())[2]
    ids = cells.bottom_token.sel(layer=0).values[1, 0, 2].tolist()
    assert row["word"] == model.text.pieces(ids)[0] == cells.bottom_word.sel(layer=0).values[1, 0, 2, 0]
    assert (row["matrix"], row["part"], row["side"]) == ("W_out", "L0.mlp", "delta")
    assert row["delta"] == cells.delta.sel(layer=0).values[1, 0, 2]
    assert cells.attrs["null"] == f"target_rank: {(model.cfg.d_vocab - 1) / 2}"


def test_a_contrast_leaves_out_what_both_answers_share() -> None:
    """From one answer to another and on to a third is from the first to the third: what is between falls away."""
    model, between, third = HookedTransformer(build("gpt2", torch.float64)), [1, 2, 3], [20, 21, 22]

    def delta(answer: list[int], wrong: list[int]) -> Tensor:
        return gradient_factors(model, some_tokens(), answer, wrong)["blocks.0.mlp.W_out"][1]

    assert_close(delta(ANSWERS, between) + delta(between, third), delta(ANSWERS, third))
    assert_close(delta(between, ANSWERS), -delta(ANSWERS, between))
    with pytest.raises(ValueError, match="must be two tokens"):
        backward_lens(model, some_tokens(), ANSWERS, ANSWERS, matrices=["W_out"])
    other = backward_lens(model, some_tokens(), ANSWERS, between, matrices=["W_out"])
    assert (other.target_rank.values[:, 0, 1, -1] >= 0).all()


def test_half_precision_is_read_in_float32() -> None:
    narrow = HookedTransformer(build("gemma2", torch.bfloat16))
    half = backward_lens(narrow, some_tokens(), ANSWERS, matrices=["W_out"])
    exact = lens("gemma2", "W_out")
    assert half.delta.dtype == np.float32
    error = abs(half.delta.values[:, 0] - exact.delta.values).max() / exact.delta.values.max()
    assert error < 0.1
    last = half.target_rank.values[:, 0, 1, -1]
    assert (abs(last - exact.target_rank.values[:, 1, -1]) <= 2).all()


def test_bad_answers_are_refused() -> None:
    model = hooked("gpt2")
    with pytest.raises(ValueError, match=r"' Mary went' must be a single token, got 2: \[' Mary', ' went'\]"):
        gradient_factors(model, PROMPT, " Mary went")
    with pytest.raises(ValueError, match=r"answer tokens must be in \[0, \d+\], got 5000"):
        backward_lens(model, PROMPT, 5000)
    with pytest.raises(
        ValueError, match="backward_lens holds answers or labels for 2 prompts, got 1 rows of data"
    ):
        backward_lens(model, PROMPT, [" Mary", " John"])
    with pytest.raises(ValueError, match="no factors of W_out: this model is attention-only"):
        backward_lens(hooked("attention-only"), PROMPT, " Mary", matrices=["W_out"])
    with pytest.raises(
        ValueError,
        match="one answer for all prompts, or one for each, is required, got 2 answers for 1 prompts",
    ):
        gradient_factors(model, PROMPT, [" Mary", " John"])
    for ask in (backward_lens, gradient_rank, gradient_cosines, gradient_factors):
        with pytest.raises(ValueError, match="an answer for every prompt is required, got none"):
            ask(model, PROMPT)


def test_bad_readings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"top must be in \[1, 31\], got 32"):
        lens("gpt2", "W_out", top=32)
    with pytest.raises(
        ValueError, match=r"threshold, a share of the largest update, must be in \[0, 1\), got -0.5"
    ):
        lens("gpt2", "W_out", threshold=-0.5)
    with pytest.raises((ValueError, TypeCheckError), match="projection"):
        lens("gpt2", "W_out", projection="unit")


def test_answers_may_be_those_of_the_batch() -> None:
    with_answers = Batch(some_tokens()).with_answers(torch.tensor(ANSWERS), torch.tensor([1, 2, 3]))
    for function in (backward_lens, gradient_rank, gradient_cosines):
        found = function(model_of("gpt2"), some_tokens(), ANSWERS, [1, 2, 3])
        xr.testing.assert_identical(function(model_of("gpt2"), with_answers), found)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "olmo2", "post-norm", "parallel", "no-norm"])
def test_a_zeroed_head_gives_the_gradients_of_the_model_without_its_output(name: str) -> None:
    """But of that layer's W_O, whose input is the head's z: zero in one, and not in the other."""
    edits, copy = [Edit("L1H2", Zero())], HookedTransformer(without_head(name))
    found = gradient_factors(model_of(name), some_tokens(), ANSWERS, edits=edits)
    expected = gradient_factors(copy, some_tokens(), ANSWERS)
    for matrix in found:
        x, delta = found[matrix]
        assert_close(delta, expected[matrix][1])
        if matrix != "blocks.1.attn.W_O":
            assert_close(x, expected[matrix][0])
        assert found.error(matrix) < 1e-10
    kept = [m for m in found.recorded() if m != "W_O"]
    ours = backward_lens(model_of(name).edited(edits), some_tokens(), ANSWERS, matrices=kept)
    theirs = backward_lens(copy, some_tokens(), ANSWERS, matrices=kept)
    for value in ("x", "delta", "relative_update"):
        np.testing.assert_allclose(ours[value], theirs[value], rtol=1e-8, atol=1e-10)
    assert (ours.target_rank == theirs.target_rank).all() and (ours.word == theirs.word).all()
    plain = backward_lens(model_of(name), some_tokens(), ANSWERS, matrices=kept)
    assert float(abs(ours.delta - plain.delta).max()) > 1e-6


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "post-norm"])
def test_factors_under_edits_are_the_edited_models_gradients_or_refused(name: str) -> None:
    model, vector = model_of(name), torch.linspace(-1, 1, 24).double()
    for edit in (Edit("L1.resid", Add(vector)), Edit("L1.attn", Add(vector)), Edit("L0.resid", Scale(0.5)),
                 Edit("L1N3", Zero()), Edit("L1.pattern", Scale(0.7))):  # fmt: skip
        found = gradient_factors(model, some_tokens(), ANSWERS, edits=[edit])
        assert max(found.error(matrix) for matrix in found) < 1e-10, edit.name
    for where, matrix in (
        ("L1.attn", "W_O"),
        ("L0.mlp", "W_out"),
        ("L0.q", "W_Q"),
        ("L0.v", "W_V"),
        ("L0.pre", "W_in"),
    ):
        if name == "gemma2" and where == "L0.pre":
            continue
        for ask in (backward_lens, gradient_rank, gradient_cosines, gradient_factors):
            with pytest.raises(ValueError, match=f"the factors of {matrix} in layer . require what it gives"):
                ask(model.edited([Edit(where, Zero())]), some_tokens(), ANSWERS, matrices=[matrix])


def test_gradients_of_neighbouring_layers_are_alike_in_an_untrained_model() -> None:
    """So unrelated directions are no chance level of these cosines, and none is printed; the answer is delta's last."""
    torch.manual_seed(0)
    config = replace(CONFIGS["gpt2"], d_model=48, d_vocab=40)
    model, tokens = HookedTransformer(Transformer(config)), torch.randint(40, (3, 8))
    found = gradient_cosines(model, tokens, 5, matrices=["W_out"])
    assert (
        float(found.value.sel(layer=0, other_layer=1).mean()) > 0.5 > 3 / 48**0.5
        and "null" not in found.attrs
    )
    ranks = backward_lens(model, tokens, 5, matrices=["W_out"]).target_rank
    assert (ranks.isel(pos=-1) == 39).all()
