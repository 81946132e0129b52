"""Head scores: equal to a slow loop, exact on ideal patterns, and right on a model whose circuit is known."""

import pytest
import torch
from torch import Tensor

import interp
from interp import HookedTransformer, RepeatedTokens
from interp.analyses.heads import SCORES, repeat_scores
from interp.zoo.groundtruth import INDUCTION, PREVIOUS
from tests.configs import build
from tests.tolerances import assert_close

N, PERIOD = 101, 25
SMALL = RepeatedTokens(period=6, repeats=3, rows=7)


def slow_scores(pattern_qk: Tensor, tokens: list[int]) -> tuple[list[float], int]:
    """The definitions token by token; column 0 is BOS. Also how many queries have an earlier copy."""
    n = len(tokens)
    previous = [float(pattern_qk[i, i - 1]) for i in range(1, n)]
    duplicate, induction = [], []
    for i in range(1, n):
        copies = [j for j in range(1, i) if tokens[j] == tokens[i]]
        if copies:
            duplicate.append(sum(float(pattern_qk[i, j]) for j in copies))
            induction.append(sum(float(pattern_qk[i, j + 1]) for j in copies))
    means = [sum(x) / len(x) for x in (previous, duplicate, induction)]
    return means, len(induction)


def causal(weights: Tensor) -> Tensor:
    return weights.tril() / weights.tril().sum(-1, keepdim=True)


def tokens_of(period: int, n: int) -> list[int]:
    return [0, *(1 + i % period for i in range(n - 1))]


@pytest.mark.parametrize(("n", "period"), [(101, 25), (19, 6), (15, 6), (9, 2)])
def test_scores_equal_the_definition_token_by_token(n: int, period: int) -> None:
    pattern = causal(torch.rand(n, n, dtype=torch.float64))
    expected, _ = slow_scores(pattern, tokens_of(period, n))
    assert_close(
        repeat_scores(pattern[None, None], period)[0, 0].double(),
        torch.tensor(expected).double(),
        torch.float32,
    )


def test_an_ideal_induction_head_scores_one_over_75_of_101_queries() -> None:
    tokens = tokens_of(PERIOD, N)
    pattern = torch.zeros(N, N)
    for i in range(N):
        targets = [j + 1 for j in range(1, i) if tokens[j] == tokens[i]] or [0]
        pattern[i, targets] = 1 / len(targets)
    assert slow_scores(pattern, tokens)[1] == 75
    previous, duplicate, induction = repeat_scores(pattern[None, None], PERIOD)[0, 0].tolist()
    assert induction == pytest.approx(1.0) and duplicate == 0.0 and previous < 0.02


def test_uniform_attention_scores_the_chance_level_of_about_three_per_cent() -> None:
    uniform = causal(torch.ones(N, N))
    assert float(repeat_scores(uniform[None, None], PERIOD)[0, 0, 2]) == pytest.approx(0.031, abs=5e-4)
    table = interp.heads(HookedTransformer(build("gpt2")), SMALL)
    n = SMALL.length
    expected, _ = slow_scores(causal(torch.ones(n, n, dtype=torch.float64)), tokens_of(6, n))
    found = [float(table[f"{name}_null"]) for name in SCORES]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_the_table_is_the_mean_over_rows_of_the_models_own_patterns(name: str) -> None:
    model = HookedTransformer(build(name))
    table = interp.heads(model, SMALL, batch_size=3)
    tokens = SMALL.tokens(model.cfg.d_vocab, 0)
    cache = model.run_with_cache(tokens, "blocks.*.attn.hook_pattern")[1]
    for layer in range(2):
        for head in range(4):
            rows = [slow_scores(cache["pattern", layer][b, head], tokens[b].tolist())[0] for b in range(7)]
            for i, score in enumerate(SCORES):
                values = torch.tensor([row[i] for row in rows]).double()
                cell = table.isel(layer=layer, head=head)
                half = 1.959964 * values.std() / 7**0.5
                assert float(cell[score]) == pytest.approx(float(values.mean()), rel=1e-5)
                assert float(cell[f"{score}_high"]) == pytest.approx(float(values.mean() + half), rel=1e-4)
                assert float(cell[f"{score}_low"]) == pytest.approx(float(values.mean() - half), rel=1e-4)


def test_scores_and_intervals_do_not_depend_on_the_batch_split() -> None:
    model = HookedTransformer(build("gpt2"))
    tables = [interp.heads(model, SMALL, batch_size=size) for size in (1, 4, 7)]
    for other in tables[1:]:
        for name in tables[0].data_vars:
            assert_close(
                torch.tensor(other[name].values), torch.tensor(tables[0][name].values), torch.float64
            )


def test_repeated_rows_have_distinct_tokens_and_really_repeat() -> None:
    tokens = RepeatedTokens(period=5, repeats=3, rows=40).tokens(9, bos=4)
    assert (tokens[:, 0] == 4).all() and (tokens[:, 1:] != 4).all()
    body = tokens[:, 1:].view(40, 3, 5)
    assert (body == body[:, :1]).all()
    assert all(len(set(row.tolist())) == 5 for row in body[:, 0])
    assert set(tokens.unique().tolist()) == set(range(9))


def test_the_hand_built_model_shows_exactly_its_two_planted_heads() -> None:
    table = interp.heads(HookedTransformer.from_pretrained("groundtruth-induction"))
    planted = {"previous_token": PREVIOUS, "induction": INDUCTION, "duplicate_token": None}
    for score, where in planted.items():
        for layer in range(2):
            for head in range(4):
                value = float(table[score].sel(layer=layer, head=head))
                assert value > 0.95 if (layer, head) == where else value < 0.2


def test_the_hand_built_model_predicts_the_repeat_and_one_layer_cannot() -> None:
    model = HookedTransformer.from_pretrained("groundtruth-induction")
    tokens = RepeatedTokens(period=25, repeats=4, rows=4).tokens(model.cfg.d_vocab, 0)
    loss = model(tokens, return_type="loss", loss_per_token=True)
    assert isinstance(loss, Tensor)
    assert float(loss[:, 26:].mean()) < 0.01 < 3.0 < float(loss[:, :24].mean())

    def silence(z: Tensor, hook: object) -> Tensor:
        z[:, :, PREVIOUS[1]] = 0.0
        return z

    broken = model.run_with_hooks(tokens, [("blocks.0.attn.hook_z", silence)], return_type="loss")
    assert isinstance(broken, Tensor) and float(broken) > 3.0


def test_rows_that_do_not_fit_and_models_that_see_ahead_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 101 tokens do not fit the context of 24"):
        interp.heads(HookedTransformer(build("gpt2")))
    with pytest.raises(ValueError, match="causal"):
        interp.heads(HookedTransformer(build("bidirectional")), SMALL)
    with pytest.raises(ValueError, match="40 distinct tokens besides BOS are required"):
        RepeatedTokens(period=40).tokens(31, 0)
    with pytest.raises(ValueError, match="at least two repeats"):
        repeat_scores(torch.zeros(1, 1, 6, 6), 5)
