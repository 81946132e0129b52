"""Loss by token index: equal to a slow loop and to closed forms, however the rows are batched, padded or packed."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

import interp
from interp import Batch, Edit, HookedTransformer, Stream, run
from interp.core.stats import MaskedMoments, Moments
from interp.data import open_source
from interp.data.stream import prompt_source
from interp.dynamics import InContext, OneTokenLosses, in_context, loss_map, one_token_losses
from interp.dynamics.in_context import compared_indices, log_index_slope
from interp.edits import Zero
from interp.lenses import LogitLens
from interp.model import NoPosition, Transformer
from interp.tasks import RepeatedTokens
from interp.zoo import groundtruth
from tests.batches import in_batches
from tests.configs import CONFIGS, D_VOCAB, build, perturbed, some_tokens
from tests.tiny import CORPUS, hooked
from tests.tolerances import assert_close, student95

EARLY, LATE = 2, 7
ROWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8], [1, 4, 1, 4, 2, 1, 3, 5, 6, 2, 3], [30, 11], [5] * 9]


def slow_losses(model: Transformer, row: list[int]) -> list[float]:
    """-log p of every token after the first, in a row that is alone; entry i is token index i + 1."""
    logits = model(torch.tensor([row]))[0]
    return [-float(logits[k - 1, row[k]] - logits[k - 1].exp().sum().log()) for k in range(1, len(row))]


def slow_curve(model: Transformer, rows: list[list[int]]) -> tuple[list[list[float]], list[float]]:
    """By index the losses of the rows that have it; and the paired differences."""
    losses = [slow_losses(model, row) for row in rows]
    longest = max(map(len, losses))
    by_index = [[each[i] for each in losses if len(each) > i] for i in range(longest)]
    return by_index, [each[LATE - 1] - each[EARLY - 1] for each in losses if len(each) >= LATE]


def interval(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return math.nan, math.nan
    half = student95(len(values)) * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return float(np.mean(values)) - half, float(np.mean(values)) + half


def agree(one: xr.Dataset, other: xr.Dataset) -> None:
    """The same numbers at every index that either has, and the same score."""
    assert one.sizes == other.sizes and one.attrs == other.attrs
    for name in one.data_vars:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-9, atol=1e-9, err_msg=str(name))


def loss_of(found: xr.Dataset, variable: str = "value") -> xr.DataArray:
    return found[variable].sel(score="loss")


def score_of(found: xr.Dataset, variable: str = "value") -> float:
    """The in-context-learning score, or an end of its interval."""
    return float(found[variable].sel(score="in_context", index=found.attrs["late"]))


def found_of(name: str, data: object) -> xr.Dataset:
    return in_context(HookedTransformer(build(name)), data, early=EARLY, late=LATE)  # type: ignore[arg-type]


# --- the numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "t5"])
def test_the_curve_is_the_mean_over_texts_of_each_text_alone(name: str) -> None:
    found = found_of(name, Batch.of(ROWS))
    by_index, differences = slow_curve(build(name), ROWS)
    assert found["index"].values.tolist() == list(range(1, 11))
    assert (
        loss_of(found, "n").values.tolist()
        == [len(each) for each in by_index]
        == [5, *[4] * 2, *[3] * 5, 1, 1]
    )
    np.testing.assert_allclose(loss_of(found), [np.mean(each) for each in by_index], rtol=1e-6)
    assert loss_of(found, "low").isnull().all() and loss_of(found, "high").isnull().all()
    assert score_of(found) == pytest.approx(np.mean(differences), rel=1e-6)
    assert (score_of(found, "low"), score_of(found, "high")) == pytest.approx(interval(differences), rel=1e-6)
    assert (found.attrs["rows"], found.attrs["early"], found.attrs["late"]) == (3, EARLY, LATE)


@pytest.mark.parametrize(
    "name", ["gemma2", "olmo2", "post-norm", "no-final-norm", "attention-only-rotary", "bloom", "gpt-oss"]
)
def test_every_read_out_of_the_stream_gives_the_loss_of_the_logits(name: str) -> None:
    tokens = some_tokens(rows=4)
    model = HookedTransformer(build(name))
    own = model(tokens, return_type="loss", loss_per_token=True)
    assert isinstance(own, Tensor)
    assert_close(torch.tensor(loss_of(found_of(name, tokens)).values), own.double().mean(0), torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_of_a_narrow_model_are_float32_and_averaged_in_float64(dtype: torch.dtype) -> None:
    tokens = some_tokens(rows=4)
    model = HookedTransformer(build("llama-gqa", dtype))
    found = loss_of(in_context(model, tokens, early=EARLY, late=LATE))
    logits = model(tokens)
    assert isinstance(logits, Tensor)
    own = -logits.float().log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    assert found.dtype == "float64"
    # The last norm sees the rows in another grouping, which may round half-precision logits differently.
    tolerance = torch.bfloat16 if dtype in (torch.bfloat16, torch.float16) else dtype
    assert_close(torch.tensor(found.values), own.double().mean(0), tolerance)


def test_uniform_logits_cost_log_v_at_every_index() -> None:
    network = perturbed(CONFIGS["gpt2"])
    assert network.unembed is not None
    network.unembed.weight.zero_()
    found = in_context(HookedTransformer(network), some_tokens(rows=5, n=20), early=3, late=15)
    np.testing.assert_allclose(loss_of(found), math.log(D_VOCAB), rtol=1e-12)
    assert loss_of(found, "low").isnull().all()  # five texts say too little of a mean loss
    assert score_of(found) == score_of(found, "low") == score_of(found, "high") == 0.0


def without_context() -> HookedTransformer:
    """A bigram model: it knows neither positions nor, since its heads write nothing, the tokens before the last."""
    network = perturbed(replace(CONFIGS["attention-only"], position=NoPosition(), n_ctx=64))
    for layer in range(2):
        network.block(layer).attn.out.weight.zero_()
    return HookedTransformer(network)


def test_model_without_context_scores_exactly_zero_on_the_same_tokens() -> None:
    rows = RepeatedTokens(period=10, repeats=4, rows=6).tokens(D_VOCAB, 0)
    found = in_context(without_context(), rows, early=5, late=35)
    assert abs(score_of(found)) < 1e-12 and score_of(found, "high") - score_of(found, "low") < 1e-12
    assert float(loss_of(found).std()) > 0.05, "its losses differ by token"


def test_model_without_context_scores_zero_within_the_interval() -> None:
    found = in_context(without_context(), some_tokens(rows=200, n=40), early=5, late=35)
    assert score_of(found, "low") < 0 < score_of(found, "high")
    assert 0 < score_of(found, "high") - score_of(found, "low") < 1


def test_planted_induction_head_is_at_chance_first_and_certain_second() -> None:
    """Without a match head 1.2 looks at all tokens alike and copies them: the logit of each is 20 / (how many).

    The k-th token of the first copy is new, so its loss is log of the sum of exp over the k seen tokens and the
    others at 0. In the second copy only the right token has a logit of 20, except for its first token, which nothing
    predicts.
    """
    period, vocabulary = 12, len(groundtruth.SYMBOLS)
    model = HookedTransformer(groundtruth.induction(noise=0.0))
    rows = RepeatedTokens(period=period, repeats=3, rows=8).tokens(vocabulary, 0)
    found = in_context(model, rows, early=period, late=2 * period)
    seen = np.arange(1, period + 2)
    total = np.log(seen * np.exp(20 / seen) + vocabulary - seen)
    total[-1] -= 20 / seen[-1]  # the first token of the second copy is among those seen
    certain = math.log1p((vocabulary - 1) * math.exp(-20))
    np.testing.assert_allclose(loss_of(found)[: period + 1], total, rtol=1e-4)
    np.testing.assert_allclose(loss_of(found)[period + 1 :], certain, atol=1e-6)
    assert score_of(found) == pytest.approx(certain - total[period - 1], rel=1e-4)
    assert score_of(found, "high") < -3.0


def test_noise_in_other_heads_leaves_the_planted_answer_a_silent_head_not() -> None:
    network = groundtruth.induction()
    rows = RepeatedTokens(period=8, repeats=2, rows=4).tokens(len(groundtruth.SYMBOLS), 0)
    found = in_context(HookedTransformer(network), rows, early=8, late=14)
    slow = np.mean([slow_losses(network, row) for row in rows.tolist()], axis=0)
    np.testing.assert_allclose(loss_of(found), slow, rtol=1e-4, atol=1e-5)
    assert float(loss_of(found)[9:].max()) < 0.01 and score_of(found, "high") < -3.0
    layer, head = groundtruth.INDUCTION
    network.block(layer).attn.out.weight[:, head * groundtruth.WIDTH : (head + 1) * groundtruth.WIDTH] = 0
    broken = in_context(HookedTransformer(network), rows, early=8, late=14)
    assert abs(score_of(broken)) < 0.5


# --- rows, padding, packing, batches ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_padding_packing_and_batches_of_any_width_change_no_number(name: str) -> None:
    whole = found_of(name, Batch.of(ROWS))
    agree(found_of(name, Batch.of(ROWS, side="left")), whole)
    agree(found_of(name, Batch.packed(ROWS, 24)), whole)
    agree(found_of(name, [Batch.of(ROWS[2:]), Batch.of(ROWS[:1]), Batch.of(ROWS[1:2])]), whole)
    agree(found_of(name, [Batch.packed(ROWS[:3], 24), Batch.of(ROWS[3:], side="left")]), whole)
    for size in (1, 3):
        model = HookedTransformer(build(name))
        agree(in_context(model, in_batches(model, Batch.of(ROWS), size), early=EARLY, late=LATE), whole)


def test_texts_get_bos_as_index_0_and_equal_their_token_ids() -> None:
    model = hooked()
    texts = list(CORPUS)
    rows = [model.text.ids(text) for text in texts]
    assert all(row[0] == 0 for row in rows)
    found = in_context(model, texts, early=1, late=8)
    agree(found, in_context(model, Batch.of(rows), early=1, late=8))
    first = [slow_losses(model.transformer, row[:2])[0] for row in rows]
    assert float(loss_of(found).sel(index=1)) == pytest.approx(np.mean(first))
    bare = in_context(model, model.to_batch(texts, prepend_bos=False), early=1, late=8)
    second = [slow_losses(model.transformer, row[1:3])[0] for row in rows]
    assert float(loss_of(bare).sel(index=1)) == pytest.approx(np.mean(second))


def test_one_text_has_a_curve_but_no_interval() -> None:
    found = found_of("gpt2", some_tokens(rows=1))
    assert loss_of(found).notnull().all() and found.attrs["rows"] == 1
    later = found.sel(index=slice(EARLY + 1, None))
    assert later.low.isnull().all() and later.high.isnull().all()


def test_the_loss_shares_its_pass_with_other_analyses() -> None:
    network, tokens = build("gpt2"), some_tokens(rows=5)
    calls = []
    network_hook = network.embed.register_forward_hook(lambda *_: calls.append(1))
    both = [InContext(early=EARLY, late=LATE), LogitLens(top=2)]
    found = run(both, network, Batch(tokens).split(2))
    network_hook.remove()
    assert len(calls) == 3
    alone = found_of("gpt2", tokens)
    agree(found["in_context"][list(alone.data_vars)], alone)


def test_masked_moments_are_those_of_each_entry_with_and_without_gaps() -> None:
    rows = torch.randn(7, 4, dtype=torch.float64) + 1e6
    plain, masked = Moments.of(rows), MaskedMoments.of(rows[:3]).merge(MaskedMoments.of(rows[3:]))
    assert_close(masked.mean, plain.mean)
    assert_close(masked.standard_error(), plain.standard_error())
    holes = rows.masked_fill(torch.rand(7, 4) < 0.4, torch.nan)
    holes[:, 3] = torch.nan
    narrow = MaskedMoments.of(holes[:2, :3]).merge(MaskedMoments.of(holes[2:]))
    for entry in range(3):
        there = holes[:, entry][~holes[:, entry].isnan()]
        assert int(narrow.counts[entry]) == len(there) >= 2
        assert float(narrow.mean[entry]) == pytest.approx(float(there.mean()), rel=1e-12)
        error = float(there.std()) / len(there) ** 0.5
        assert float(narrow.standard_error()[entry]) == pytest.approx(error, rel=1e-6)
    assert int(narrow.counts[3]) == 0 and bool(narrow.standard_error()[3].isnan())


# --- slope and map ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [1.1, 2.0, 50.0])
def test_the_slope_is_a_least_squares_fit_in_every_window(span: float) -> None:
    index = torch.arange(1, 41)
    loss = torch.randn(2, 40, dtype=torch.float64)
    loss[1, [5, 6, 30]] = torch.nan
    found = log_index_slope(loss, index, span=span)
    for row in range(2):
        for i in range(40):
            inside = [
                j for j in range(40)
                if (index[i] / span <= index[j] <= index[i] * span or abs(i - j) == 1) and not loss[row, j].isnan()
            ]  # fmt: skip
            if len(inside) < 2:
                assert bool(found[row, i].isnan())
                continue
            slope = np.polyfit(index[inside].double().log().numpy(), loss[row, inside].numpy(), 1)[0]
            assert float(found[row, i]) == pytest.approx(slope, rel=1e-6, abs=1e-9)


def test_loss_linear_in_the_log_of_the_index_has_that_slope_everywhere() -> None:
    index = torch.arange(1, 2049)
    loss = 5.0 - 0.3 * index.double().log()
    assert_close(log_index_slope(loss, index, span=1.5), torch.full_like(loss, -0.3))


def test_the_map_holds_the_curve_of_every_checkpoint_ascending() -> None:
    models = {"step30": hooked("gpt2"), "step4": hooked("llama-gqa")}

    def stream() -> Iterator[Batch]:
        yield Batch.of(ROWS[:2])
        yield Batch.of(ROWS[2:])

    found = loss_map(models.__getitem__, list(models), stream(), early=EARLY, late=LATE, span=3.0)
    assert found.step.values.tolist() == [4, 30]
    assert loss_of(found).dims == found.slope.dims == ("step", "index")
    for step, model in ((30, hooked("gpt2")), (4, hooked("llama-gqa"))):
        alone = in_context(model, Batch.of(ROWS), early=EARLY, late=LATE)
        np.testing.assert_allclose(loss_of(found).sel(step=step), loss_of(alone), rtol=1e-9)
        assert score_of(found.sel(step=step)) == pytest.approx(score_of(alone))
        slope = log_index_slope(torch.tensor(loss_of(alone).values), torch.arange(1, 11), span=3.0)
        np.testing.assert_allclose(found.slope.sel(step=step), slope, rtol=1e-9)
    assert found.attrs["span"] == 3.0 and found.attrs["unit"] == "nats"


# --- one token per example ----------------------------------------------------------------------------------------


def test_one_token_of_every_text_is_the_same_one_in_every_batch_and_model() -> None:
    rows = [row for row in ROWS if len(row) > 2]
    model = HookedTransformer(build("gpt2"))
    whole = one_token_losses(model, Batch.of(rows), seed=3)
    for index, loss, row in zip(whole["index"].values, whole.value.values, rows, strict=True):
        assert float(loss) == pytest.approx(slow_losses(build("gpt2"), row)[int(index) - 1])
    for other in (
        one_token_losses(model, in_batches(model, Batch.of(rows, side="left"), 1), seed=3),
        one_token_losses(model, [Batch.of([row]) for row in rows], seed=3),
    ):
        xr.testing.assert_allclose(other, whole)
    another = one_token_losses(HookedTransformer(build("llama-gqa")), Batch.of(rows), seed=3)
    np.testing.assert_array_equal(another["index"], whole["index"])


def test_the_chosen_tokens_reach_every_index_and_depend_on_the_seed() -> None:
    tokens = some_tokens(rows=200, n=6)
    found = [
        one_token_losses(HookedTransformer(build("gpt2")), tokens, seed=seed)["index"] for seed in (0, 1)
    ]
    counts = np.bincount(found[0].values, minlength=6)[1:]
    assert counts.sum() == 200 and counts.min() > 15, "about 40 of each of the five"
    assert (found[0] != found[1]).mean() > 0.5


# --- bad input ----------------------------------------------------------------------------------------------------


def test_what_has_no_answer_is_refused_by_name() -> None:
    model = HookedTransformer(build("gpt2"))
    with pytest.raises(ValueError, match=r"1 <= early < late < 24.*early=50, late=500"):
        in_context(model, some_tokens(), early=50, late=500)
    with pytest.raises(ValueError, match="got early=5, late=5"):
        in_context(model, some_tokens(), early=5, late=5)
    with pytest.raises(ValueError, match=r"token index 12 are required.*the longest ends at index 8"):
        in_context(model, some_tokens(), early=2, late=12)
    with pytest.raises(ValueError, match="the longest ends at index 0"):
        in_context(model, some_tokens(n=1), early=2, late=12)
    with pytest.raises(ValueError, match="at least one prompt is required"):
        in_context(model, [], early=2, late=5)
    with pytest.raises(ValueError, match="at least one row is required"):
        in_context(model, iter([]), early=2, late=5)
    with pytest.raises(ValueError, match="2 rows, all set aside: row 0: the row is int, neither a text"):
        in_context(model, iter([1, 2]), early=2, late=5)
    with pytest.raises(ValueError, match="requires a causal model"):
        in_context(HookedTransformer(build("bidirectional")), some_tokens(), early=2, late=5)
    with pytest.raises(ValueError, match="requires an unembedding"):
        in_context(perturbed(replace(CONFIGS["gpt2"], unembed=False)), some_tokens())
    with pytest.raises(ValueError, match="one token per example requires one text per row"):
        one_token_losses(model, Batch.packed(ROWS, 24))
    with pytest.raises(ValueError, match="got one of a single token"):
        one_token_losses(model, Batch.of([[1, 2], [3]]))
    with pytest.raises(ValueError, match="span must be greater than 1, got 1"):
        log_index_slope(torch.zeros(3), torch.arange(1, 4), span=1.0)


def test_a_model_of_nan_weights_is_an_error_and_not_a_gap() -> None:
    network = perturbed(CONFIGS["gpt2"])
    network.block(0).attn.out.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="finite losses are required"):
        in_context(HookedTransformer(network), some_tokens(), early=2, late=5)


# --- the indices that are compared --------------------------------------------------------------------------------


def test_unnamed_indices_are_an_eighth_from_the_ends_of_half_of_the_texts() -> None:
    model = HookedTransformer(build("gpt2"))  # a context of 24
    for lengths, pair in (
        ([24] * 3, (3, 21)), ([22] * 3, (3, 21)), ([21] * 3, (1, 11)), ([24, 24, 9, 9], (3, 21)),
        ([24, 9, 9, 9], (1, 5)), ([9] * 5, (1, 5)), ([4, 4, 4], (1, 2)), ([3], (1, 2)), ([24, 2, 2], (3, 21)),
    ):  # fmt: skip
        rows = [some_tokens(rows=1, n=n)[0].tolist() for n in lengths]
        found = in_context(model, rows)
        assert (found.attrs["early"], found.attrs["late"]) == pair, lengths
        named = in_context(model, rows, early=pair[0], late=pair[1])
        agree(found, named)
        assert found.attrs["rows"] == sum(n > pair[1] for n in lengths)
    with pytest.raises(ValueError, match="token index 21 are required"):
        in_context(model, [[1, 2], [3, 4]])


def test_an_index_that_is_named_brings_the_other() -> None:
    assert compared_indices(128, None, None)[:3] == [(16, 112), (8, 56), (4, 28)]
    assert compared_indices(128, None, 70) == [(10, 70)]
    assert compared_indices(128, 20, None) == [(20, 112), (20, 56), (20, 28)]
    assert compared_indices(128, 5, 9) == [(5, 9)]
    for early, late in ((0, 5), (5, 128), (None, 1), (127, None)):
        with pytest.raises(ValueError, match="1 <= early < late < 128"):
            compared_indices(128, early, late)


@pytest.mark.parametrize("name", interp.DEMOS)
def test_the_defaults_work_on_the_models_that_come_with_the_package(name: str) -> None:
    model = HookedTransformer.from_pretrained(name)
    n = model.cfg.n_ctx
    rows = torch.randint(1, model.cfg.d_vocab, (2, n))
    found = in_context(model, rows)
    assert (found.attrs["early"], found.attrs["late"]) == (n // 8, n - n // 8)
    assert one_token_losses(model, rows).value.notnull().all()


def test_the_function_is_the_record_applied_and_streams_give_the_same() -> None:
    model = hooked()
    texts = [f"{text}{' and the cat' * (i % 3)}" for i, text in enumerate(list(CORPUS) * 3)]
    batches = prompt_source(texts, model.text)
    found = in_context(model, texts)
    xr.testing.assert_identical(run([InContext()], model, batches)["in_context"], found)
    one = one_token_losses(model, texts, seed=2)
    xr.testing.assert_identical(run([OneTokenLosses(seed=2)], model, batches)["one_token_losses"], one)
    source = Stream(open_source(texts), model.text, tokens_per_batch=50, rows_per_window=4)
    agree(in_context(model, source), found)
    np.testing.assert_allclose(one_token_losses(model, source, seed=2).value, one.value, rtol=1e-9)
    drawn = run([InContext()], model, source, bootstrap=60)["in_context"]
    np.testing.assert_allclose(drawn.value, found.value, rtol=1e-9)
    bound = score_of(drawn, "low")
    assert bound <= score_of(drawn) and bound != score_of(found, "low")


def test_an_edited_model_pays_its_own_losses() -> None:
    network, tokens = build("gpt2"), some_tokens(rows=3)
    silent = [Edit("L1.mlp", Zero())]
    found = in_context(HookedTransformer(network).edited(silent), tokens, early=EARLY, late=LATE)
    expected = np.mean([slow_losses(network.edited(silent), row) for row in tokens.tolist()], 0)
    np.testing.assert_allclose(loss_of(found), expected, rtol=1e-6)
