"""Comprehensiveness and sufficiency equal a loop of single erased prompts; a planted cause is found."""

from math import ceil

import numpy as np
import pytest
import torch
import xarray as xr

import interp
from interp import Batch, Edit, HookedTransformer
from interp.core.stats import Moments
from interp.core.viewer import notes_of
from interp.edits import Zero
from interp.model import Tap
from interp.tokens import (
    METHODS,
    IntegratedGradients,
    Mixing,
    compare_methods,
    erasure,
    token_attribution,
)
from interp.tokens.erasure import RANDOM, SCORES, random_values, top_share
from tests.configs import build, some_tokens
from tests.loops import over
from tests.tokens.edited import without
from tests.tolerances import assert_close

ROWS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [7, 9, 2]]
ANSWER, WRONG = [3, 14, 7], [5, 1, 30]


def model(name: str = "gpt2") -> HookedTransformer:
    return HookedTransformer(build(name))


def scored(values: torch.Tensor, batch: Batch | None = None) -> xr.Dataset:
    """The values as an attribution; NaN at the padding of a batch."""
    real = torch.ones_like(values).bool() if batch is None else batch.real
    return xr.Dataset({"value": (("prompt", "pos"), values.masked_fill(~real, torch.nan).numpy())})


def each(found: xr.Dataset, score: str) -> np.ndarray:
    """The numbers of every prompt."""
    return found["each"].sel(score=score).values


@over("bos", [False, True])
@over("measure", ["probability", "logits"])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "masked-lm"])
def test_both_equal_a_loop_over_prompts_and_shares(name: str, measure: str, bos: bool) -> None:
    batch, score = Batch.of(ROWS, bos=bos), torch.rand(3, 11)
    given, shares = scored(score, batch), (0.1, 0.5)
    found = erasure(
        model(name), batch, given, ANSWER, WRONG, shares=shares, replacement=6, measure=measure  # type: ignore[arg-type]
    )  # fmt: skip
    assert (found.unit == measure).all()
    assert [text for text in notes_of(found) if "wrong changed nothing" in text] == [
        text for text in notes_of(found) if measure == "probability"
    ] and bool(notes_of(found)) == (measure == "probability")

    def value(i: int, holes: set[int]) -> float:
        tokens = torch.tensor([[6 if j in holes else t for j, t in enumerate(ROWS[i])]])
        logits = build(name)(tokens)[0, -1]
        if measure == "probability":
            return float(logits.softmax(-1)[ANSWER[i]])
        return float(logits[ANSWER[i]] - logits[WRONG[i]])

    for i, row in enumerate(ROWS):
        ranked = sorted(range(int(bos), len(row)), key=lambda j: -float(score[i, j]))
        fall, rest = [], []
        for share in shares:
            top = set(ranked[: ceil(share * len(ranked))])
            fall.append(value(i, set()) - value(i, top))
            rest.append(value(i, set()) - value(i, set(ranked) - top))
        np.testing.assert_allclose(each(found, "comprehensiveness")[i], np.mean(fall), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(each(found, "sufficiency")[i], np.mean(rest), rtol=1e-9, atol=1e-9)


def test_means_over_prompts_have_their_interval() -> None:
    scores = token_attribution(model(), Batch.of(ROWS))
    few = erasure(model(), Batch.of(ROWS), scores, ANSWER)
    assert few.low.isnull().all() and few.high.isnull().all()
    found = erasure(model(), Batch.of(ROWS), scores, ANSWER, measure="logits")
    for name in SCORES:
        moments, row = Moments.of(torch.tensor(each(found, name))), found.sel(score=name)
        low, high = moments.interval()
        np.testing.assert_allclose([row.value, row.low, row.high], [moments.mean, low, high], rtol=1e-12)
        assert int(row.n) == 3


def test_the_mean_embedding_stands_in_without_moving_anybody() -> None:
    tokens, mean = some_tokens(1, 6), build("gpt2").embed.weight.mean(0)
    score = torch.tensor([[0.0, 9.0, 0.0, 0.0, 8.0, 0.0]])
    found = erasure(model(), tokens, scored(score), 3, shares=(1 / 3,), measure="logits")

    def replaced(value: torch.Tensor) -> torch.Tensor:
        value[:, [1, 4]] = mean
        return value

    whole, holes = (
        build("gpt2")(tokens, Tap(edits=e))[0, -1, 3] for e in ([], [Edit("hook_embed", replaced)])
    )
    assert_close(torch.tensor(each(found, "comprehensiveness")[0]), whole - holes)


def test_everything_removed_or_kept_is_the_same_for_every_ranking() -> None:
    batch = Batch.of(ROWS)
    found = [
        erasure(model(), batch, scored(torch.rand(3, 11), batch), ANSWER, shares=(1.0,)) for _ in range(2)
    ]
    removed, other = (each(one, "comprehensiveness") for one in found)
    np.testing.assert_allclose(removed, other, rtol=1e-12)
    assert float(abs(removed).min()) > 1e-6
    np.testing.assert_allclose(each(found[0], "sufficiency"), 0, atol=1e-12)


def test_shares_round_up_ties_go_to_the_earlier_and_fixed_tokens_stay() -> None:
    score = torch.tensor([[9.0, 1.0, 3.0, 3.0, 2.0, 3.0]])
    removable = torch.tensor([[False, True, True, True, True, True]])
    wanted = {0.01: [2], 0.2: [2], 0.21: [2, 3], 0.6: [2, 3, 5], 0.8: [2, 3, 4, 5], 1.0: [1, 2, 3, 4, 5]}
    for share, expected in wanted.items():
        assert top_share(score, removable, share)[0].nonzero()[:, 0].tolist() == expected
    with pytest.raises(ValueError, match="a score for every removable token is required, got NaN"):
        top_share(score / torch.tensor([[1.0, 1, 1, 1, 1, float("nan")]]) * float("nan"), removable, 0.5)


def test_a_prepended_bos_is_never_removed() -> None:
    batch = Batch(some_tokens(2, 6), bos=True)
    score = torch.zeros(2, 6)
    score[:, 0] = 5
    found = erasure(model(), batch, scored(score), 3, shares=(0.2,))
    score[:, 0], score[:, 1] = -5, 1
    same = erasure(model(), batch, scored(score), 3, shares=(0.2,))
    assert found.identical(same), "without BOS, token 1 is the first among equals"
    plain = erasure(model(), batch.tokens, scored(torch.eye(6)[:1].expand(2, 6)), 3, shares=(0.2,))
    assert abs(each(plain, "comprehensiveness") - each(found, "comprehensiveness")).min() > 1e-6


def test_the_token_that_causes_the_answer_is_worth_more_than_any_other() -> None:
    """The hand-built induction circuit: without the first `d`, or the `c` before it, it cannot answer `d`."""
    small = interp.HookedTransformer.from_pretrained("groundtruth-induction")
    prompt, falls = "abcdefghabc", {}
    for place in range(1, 12):
        one = torch.zeros(1, 12)
        one[0, place] = 1
        found = erasure(small, prompt, scored(one), "d", shares=(0.01,), replacement="zero")
        falls[place] = float(found.value.sel(score="comprehensiveness"))
    assert sorted(falls, key=lambda place: -falls[place])[:3] in ([3, 4, 11], [3, 11, 4], [4, 3, 11],
                                                                  [4, 11, 3], [11, 3, 4], [11, 4, 3])  # fmt: skip
    assert max(falls[place] for place in range(1, 11) if place not in (3, 4)) < 0.1 * min(falls[3], falls[4])


def test_comparison_has_every_method_its_interval_and_chance() -> None:
    batch = Batch.of(ROWS)
    methods = {"rollout": METHODS["rollout"], "mine": Mixing("values", 0), "ig": IntegratedGradients(steps=3)}
    result = compare_methods(model(), batch, ANSWER, WRONG, methods=methods, draws=2)
    assert list(result.attribution.values) == [*methods, RANDOM]
    for name, how in methods.items():
        found = token_attribution(model(), batch, ANSWER, WRONG, method=how)
        alone, row = erasure(model(), batch, found, ANSWER, WRONG), result.sel(attribution=name)
        np.testing.assert_allclose(row["each"], alone["each"])
        for end in ("value", "low", "high", "n"):
            np.testing.assert_allclose(row[end], alone[end])
        np.testing.assert_array_equal(row.null, result.value.sel(attribution=RANDOM))


def test_chance_is_the_mean_of_random_orders_and_repeats_with_its_seed() -> None:
    batch = Batch.of(ROWS)
    draws = [erasure(model(), batch, scored(value, batch), ANSWER) for value in random_values(batch, 3, 4)]
    found = compare_methods(model(), batch, ANSWER, methods=[], draws=3, seed=4)
    expected = np.mean([draw["each"] for draw in draws], axis=0)
    np.testing.assert_allclose(found["each"].sel(attribution=RANDOM), expected)
    other = compare_methods(model(), batch, ANSWER, methods=[], draws=3, seed=5)
    assert not np.allclose(other.value, found.value)


def test_random_orders_are_those_of_the_prompt_in_any_batch_and_padding() -> None:
    batch = Batch.of(ROWS).numbered()
    values = random_values(batch, 4, 7)
    assert values.shape == (4, 3, 11) and bool((values.isnan() == ~batch.real).all())
    left = random_values(Batch.of(ROWS, side="left").numbered(), 4, 7)
    assert torch.equal(left[:, 0, -5:], values[:, 0, :5])
    second = batch.rows(torch.tensor([1]))
    assert torch.equal(random_values(second, 4, 7)[:, 0], values[:, 1])
    assert len(values[~values.isnan()].unique()) == 4 * sum(map(len, ROWS))


def test_values_belong_to_tokens_and_not_to_columns() -> None:
    left, right = Batch.of(ROWS, side="left"), Batch.of(ROWS)
    given = token_attribution(model(), left)
    one, other = (erasure(model(), batch, given, ANSWER) for batch in (left, right))
    xr.testing.assert_allclose(one, other, rtol=1e-9)


@over("part", ["L0.mlp", "L1H2"])
def test_an_edited_model_is_the_model_with_those_weights(part: str) -> None:
    edits, batch = [Edit(part, Zero())], Batch.of(ROWS)
    other, methods = without("gpt2", part), ("rollout", "norm_rollout", "gradient_x_input", "alti_logit")
    given = token_attribution(model(), batch)
    found = erasure(model().edited(edits), batch, given, ANSWER)
    expected, plain = (erasure(m, batch, given, ANSWER) for m in (other, model()))
    np.testing.assert_allclose(found["each"], expected["each"], rtol=1e-9, atol=1e-12)
    assert not np.allclose(found["each"], plain["each"])
    found = compare_methods(model().edited(edits), batch, ANSWER, methods=methods)
    expected = compare_methods(other, batch, ANSWER, methods=methods)
    np.testing.assert_allclose(found["each"], expected["each"], rtol=1e-9, atol=1e-12)


def test_what_cannot_be_compared_is_refused_by_name() -> None:
    tokens = some_tokens()
    with pytest.raises(ValueError, match=r"unknown method 'rolout'.*rollout"):
        compare_methods(model(), tokens, 3, methods=["rolout"])
    with pytest.raises(ValueError, match="at least one random order is required, got draws=0"):
        compare_methods(model(), tokens, 3, draws=0)
    with pytest.raises(ValueError, match="one score per token is required, 9 for prompt 0, got 8"):
        erasure(model(), tokens, scored(torch.rand(3, 8)), 3)
    with pytest.raises(ValueError, match="erasure holds answers or labels for 2 prompts, got 3 rows of data"):
        erasure(model(), tokens, scored(torch.rand(2, 9)), 3)
    with pytest.raises(
        ValueError, match="answer and wrong are for all 3 prompts of the attribution, or one for each: got 4"
    ):
        erasure(model(), tokens, scored(torch.rand(3, 9)), [3, 4, 5, 6])
    with pytest.raises(ValueError, match=r"shares in \(0, 1\] are required, at least one, got \(1.5,\)"):
        erasure(model(), tokens, scored(torch.rand(3, 9)), 3, shares=(1.5,))
    with pytest.raises(ValueError, match="value of attribution must have 27 finite numbers, got 0"):
        erasure(model(), tokens, scored(torch.full((3, 9), torch.inf)), 3)
    with pytest.raises(ValueError, match="requires an answer to watch"):
        erasure(model(), tokens, scored(torch.rand(3, 9)))


def test_the_probability_of_several_tokens_is_that_of_the_whole() -> None:
    network, answers, shares = model("llama-gqa"), [(3, 2), (14,), (7, 1, 8)], (0.3,)
    batch, score = Batch.of(ROWS), torch.rand(3, 11)
    found = erasure(network, batch, scored(score, batch), answers, shares=shares, replacement=6)
    for row, (prompt, answer) in enumerate(zip(ROWS, answers, strict=True)):
        order = score[row, : len(prompt)].argsort(descending=True, stable=True)
        top = order[: ceil(0.3 * len(prompt))].tolist()
        rest = [place for place in range(len(prompt)) if place not in top]
        whole, without_top, only_top = (
            _whole_probability(
                network, [6 if i in holes else token for i, token in enumerate(prompt)], answer
            )
            for holes in ([], top, rest)
        )
        assert_close(torch.tensor(each(found, "comprehensiveness")[row]), whole - without_top)
        assert_close(torch.tensor(each(found, "sufficiency")[row]), whole - only_top)


def _whole_probability(
    network: HookedTransformer, prompt: list[int], answer: tuple[int, ...]
) -> torch.Tensor:
    """p(answer) after a prompt, from one pass over the joined row."""
    share = network(torch.tensor([[*prompt, *answer]]))[0].softmax(-1)
    return torch.stack([share[len(prompt) - 1 + j, token] for j, token in enumerate(answer)]).prod()


def test_a_logit_of_several_tokens_is_refused() -> None:
    batch = Batch.of(ROWS)
    with pytest.raises(ValueError, match="a logit is of one token, the answers are of several"):
        erasure(model(), batch, scored(torch.rand(3, 11), batch), [(3, 2)] * 3, measure="logits")
    with pytest.raises(ValueError, match="a logit is of one token, the answers are of several"):
        compare_methods(model(), batch, [(3, 2)] * 3, methods=["rollout"], measure="logits")


@over("method", ["rollout", "gradient_x_input", "alti_logit"])
def test_compared_values_are_summed_over_the_tokens_of_an_answer(method: str) -> None:
    network, answers, shares = model("llama-gqa"), [(3, 2), (14,), (7, 1, 8)], (0.3,)
    found = compare_methods(network, Batch.of(ROWS), answers, methods=[method], shares=shares, replacement=6)
    summed = torch.zeros(3, 11)
    for row, (prompt, answer) in enumerate(zip(ROWS, answers, strict=True)):
        for j, token in enumerate(answer):
            one = token_attribution(network, [[*prompt, *answer[:j]]], [token], method=method)
            summed[row, : len(prompt)] += torch.tensor(one["value"].values[0, : len(prompt)])
    expected = erasure(
        network, Batch.of(ROWS), scored(summed, Batch.of(ROWS)), answers, shares=shares, replacement=6
    )
    own = found["each"].sel(attribution=method).transpose("prompt", "score")
    assert_close(torch.tensor(own.values), torch.tensor(expected["each"].transpose("prompt", "score").values))
