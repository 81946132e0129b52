"""The backward lens' readings: equal to slow loops over cells, honest about zeros, blind to padding and batches."""

from functools import cache

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from interp import Batch, HookedTransformer
from interp.core import tiles
from interp.lenses.backward_lens import NO_UPDATE, BackwardLens, backward_lens
from interp.model import Transformer
from tests.configs import CONFIGS, build, some_tokens
from tests.loops import over
from tests.model.slow import slow_read_out
from tests.tiny import CORPUS, hooked
from tests.tolerances import assert_close

ANSWERS = [3, 14, 7]
READABLE = ("gpt2", "llama-gqa", "gemma2", "no-final-norm", "attention-only-rotary", "masked-lm", "gptj")
RAGGED = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]]
PROMPT = CORPUS[0].removesuffix(" Mary.")


@cache
def lens(name: str) -> BackwardLens:
    return backward_lens(HookedTransformer(build(name)), some_tokens(), ANSWERS)


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
    found, model = lens(name), build(name)
    for matrix, side in (("W_O", 1), ("W_V", 0)):
        table = found.project(matrix, k=3, projection=projection)
        for cell in np.ndindex(3, 2, 9):
            row, layer, pos = cell
            x, delta = found.factors[f"blocks.{layer}.attn.{matrix}"]
            if not delta[row, pos].any():
                assert table.target_rank.values[cell] == -1
                continue
            logits = slow_logits(model, (x, delta)[side][row, pos], projection)
            order = logits.argsort(descending=True).tolist()
            assert table.top_token.values[cell].tolist() == order[:3]
            assert table.bottom_token.values[cell].tolist() == order[:-4:-1]
            assert table.target_rank.values[cell] == order.index(ANSWERS[row])


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_norms_are_those_of_the_outer_products(name: str) -> None:
    found = lens(name)
    norms = found.norms("W_in")
    products = torch.stack(
        [
            torch.einsum("bpi,bpo->bpio", *found.factors[f"blocks.{i}.mlp.W_in"]).flatten(2).norm(dim=-1)
            for i in (0, 1)
        ],
        1,
    )
    assert_close(of(norms.relative_update.values), products / products.amax((1, 2), keepdim=True))
    assert_close(of((norms.x * norms.delta).values), products)
    assert norms["last"].values.tolist() == [8, 8, 8]


@pytest.mark.parametrize("name", [name for name, c in CONFIGS.items() if c.causal])
def test_ranks_are_those_of_the_gradients(name: str) -> None:
    model = build(name)
    found = lens(name)
    for matrix in ("W_O", "W_Q") if model.config.mlp is None else ("W_O", "W_V"):
        ours = found.gradient_rank(matrix)
        for layer in range(2):
            x, delta = found.factors[f"blocks.{layer}.attn.{matrix}"]
            gradients = torch.einsum("bpi,bpo->bio", x, delta)
            assert (
                ours.gradient_rank.values[:, layer].tolist() == torch.linalg.matrix_rank(gradients).tolist()
            )


def test_the_rank_is_the_number_of_tokens_but_one_in_the_last_block() -> None:
    for matrix in ("W_in", "W_out"):
        found = lens("gpt2").gradient_rank(matrix)
        assert found.gradient_rank.values.tolist() == [[9, 1]] * 3
        assert found.tokens.values.tolist() == [9] * 3
    assert lens("gpt2").gradient_rank("W_out", tolerance=1.0).gradient_rank.values.max() == 0


def test_a_zero_vjp_says_no_update_in_every_projection() -> None:
    model = hooked("gpt2")
    found = backward_lens(model, PROMPT, " Mary")
    n = found.batch.tokens.shape[1]
    for projection in ("normalised", "final_norm", "raw"):
        for matrix in ("W_in", "W_out"):
            table = found.table(matrix, projection=projection, k=2)  # type: ignore[arg-type]
            silent = table[(table["layer"] == 1) & (table["pos"] < n - 1)]
            assert len(silent) == n - 1
            assert set(silent["top"]) == set(silent["bottom"]) == {NO_UPDATE}
            assert set(silent["target_rank"]) == {-1}
            assert NO_UPDATE not in set(table.drop(silent.index)["top"])


def test_updates_below_the_threshold_are_left_out() -> None:
    found, share = lens("gpt2"), lens("gpt2").norms().relative_update.values
    cut = float(np.median(share[share > 0]))
    ranks = found.ranks(threshold=cut).target_rank.values
    assert ((ranks == -1) == (share <= cut)).all() and (ranks == -1).any() and (ranks >= 0).any()


def test_cosines_are_those_of_the_last_tokens_vectors() -> None:
    found = backward_lens(HookedTransformer(build("gpt2")), Batch.of(RAGGED), [3, 5])  # type: ignore[arg-type]
    for matrix, side, part in (("W_out", 1, "mlp"), ("W_in", 0, "mlp"), ("W_O", 1, "attn")):
        cosines = found.cosines(matrix).cosine
        for row, last in ((0, 4), (1, 7)):
            a, b = (found.factors[f"blocks.{i}.{part}.{matrix}"][side][row, last] for i in (0, 1))
            expected = float(a @ b / (a.norm() * b.norm()))
            assert float(cosines.sel(layer=0, other_layer=1)[row]) == pytest.approx(expected, rel=1e-9)
    assert_close(of(cosines.sel(layer=1, other_layer=1).values), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_holds_nothing_and_changes_nothing(name: str, side: str) -> None:
    model = HookedTransformer(build(name))
    padded = backward_lens(model, Batch.of(RAGGED, side=side), [3, 5])  # type: ignore[arg-type]
    alone = backward_lens(model, torch.tensor(RAGGED[0]), 3)
    real = slice(0, 5) if side == "right" else slice(3, 8)
    cells, expected = padded.project("W_in").isel(prompt=0), alone.project("W_in").isel(prompt=0)
    for value in ("x", "delta", "relative_update"):
        assert_close(of(cells[value].values[:, real]), of(expected[value].values))
    for value in ("top_token", "bottom_token", "target_rank"):
        assert (cells[value].values[:, real] == expected[value].values).all()
    hidden = [i for i in range(8) if i not in range(8)[real]]
    assert np.isnan(cells.delta.values[:, hidden]).all() and (cells.target_rank.values[:, hidden] == -1).all()
    assert padded.gradient_rank("W_in").gradient_rank.values[0].tolist() == [5, 1]
    assert len(padded.table("W_in")) == 2 * (5 + 8)
    assert padded.norms()["last"].values.tolist() == ([4, 7] if side == "right" else [7, 7])


def test_the_size_of_batches_and_tiles_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = lens("gpt2")
    split = backward_lens(HookedTransformer(build("gpt2")), some_tokens(), ANSWERS, batch_size=2)
    for name in whole.factors:
        for ours, theirs in zip(split.factors[name], whole.factors[name], strict=True):
            assert_close(ours, theirs)
    assert split.factors.error("blocks.0.mlp.W_in") < 1e-10
    before = whole.project(k=4)
    monkeypatch.setattr(tiles, "TILE", 100)
    assert whole.project(k=4).equals(before)


def test_the_layers_and_matrices_asked_for_are_recorded_and_no_others() -> None:
    found = backward_lens(
        HookedTransformer(build("llama-gqa")), some_tokens(), ANSWERS, layers=[1], matrices=["W_gate"]
    )
    assert list(found.factors) == ["blocks.1.mlp.W_gate"]
    assert repr(found) == "BackwardLens(Factors(1 matrices, 3 rows of 9 tokens: blocks.1.mlp.W_gate, ...))"
    assert found.norms("W_gate")["layer"].values.tolist() == [1]
    with pytest.raises(KeyError, match="no factors of 'W_out' were recorded; recorded: W_gate"):
        found.norms()


def test_the_table_names_prompt_layer_token_and_words() -> None:
    model = hooked("gpt2")
    found = backward_lens(model, [PROMPT, "The cat sat on the"], [" Mary", " cat"], matrices=["W_out"])
    table, cells = found.table(k=2), found.project(k=2)
    row = table[(table["prompt"] == 1) & (table["layer"] == 0) & (table["pos"] == 2)].iloc[0]
    assert row["token"] == model.text.pieces(found.batch.tokens[1].tolist())[2]
    ids = cells.bottom_token.sel(layer=0).values[1, 2].tolist()
    assert row["bottom"] == " | ".join(model.text.pieces(ids)) and row["matrix"] == "W_out"
    assert row["delta"] == cells.delta.sel(layer=0).values[1, 2]
    assert (cells.attrs["side"], cells.attrs["read"]) == ("delta", "bottom")
    assert cells.attrs["null"] == f"target_rank: {(model.cfg.d_vocab - 1) / 2}"


def test_a_contrast_leaves_out_what_both_answers_share() -> None:
    model = HookedTransformer(build("gpt2"))
    both = backward_lens(model, some_tokens(), ANSWERS, wrong=ANSWERS, matrices=["W_out"])
    x, delta = both.factors["blocks.0.mlp.W_out"]
    assert bool(x.any()) and not delta.any()
    assert (both.ranks().target_rank.values == -1).all()
    other = backward_lens(model, some_tokens(), ANSWERS, wrong=[1, 2, 3], matrices=["W_out"])
    assert (other.ranks().target_rank.values[:, 1, -1] >= 0).all()


def test_half_precision_is_read_in_float32() -> None:
    half = backward_lens(HookedTransformer(build("gemma2", torch.bfloat16)), some_tokens(), ANSWERS)
    exact = lens("gemma2")
    assert half.norms().delta.dtype == np.float32
    error = (
        abs(half.norms().delta.values - exact.norms().delta.values).max() / exact.norms().delta.values.max()
    )
    assert error < 0.1
    last = half.ranks().target_rank.values[:, 1, -1]
    assert (abs(last - exact.ranks().target_rank.values[:, 1, -1]) <= 2).all()


def test_bad_targets_are_refused() -> None:
    model = hooked("gpt2")
    with pytest.raises(ValueError, match=r"' Mary went' must be a single token, got 2: \[' Mary', ' went'\]"):
        backward_lens(model, PROMPT, " Mary went")
    with pytest.raises(ValueError, match=r"answer tokens must be in \[0, \d+\], got 5000"):
        backward_lens(model, PROMPT, 5000)
    with pytest.raises(ValueError, match="one answer per prompt is required, got 2 answers for 1 prompts"):
        backward_lens(model, PROMPT, [" Mary", " John"])
    with pytest.raises(ValueError, match="no factors of W_out: this model is attention-only"):
        backward_lens(hooked("attention-only"), PROMPT, " Mary", matrices=["W_out"])


def test_bad_readings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"k must be in \[1, 31\], got 32"):
        lens("gpt2").project(k=32)
    with pytest.raises(
        ValueError, match=r"threshold, a share of the largest update, must be in \[0, 1\), got -0.5"
    ):
        lens("gpt2").ranks(threshold=-0.5)
    with pytest.raises((ValueError, TypeCheckError), match="projection"):
        lens("gpt2").project(projection="unit")  # type: ignore[arg-type]
