"""Scores of attention mass where weights are no shares: proportions of all that a query weighs, against slow loops."""

import pytest
import torch
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.attention import attention_kernel
from interp.attention.sentences import MENTIONS, mention_masks, name_attention
from interp.attention.shares import signed_shares
from interp.data.batch import Batch
from interp.lenses import late_layers
from interp.model import Read, Tap
from interp.tasks import RepeatedTokens
from tests.configs import D_VOCAB, build, some_tokens
from tests.mixers import MIXERS, build_mixed
from tests.tolerances import assert_close

DATA = RepeatedTokens(period=6, repeats=3, rows=2)
SIGNED = ("differential", "lightning", "pool")


def patterns(name: str, tokens: Tensor, layer: int = 1) -> Tensor:
    tap = Tap([Read(f"blocks.{layer}.attn.hook_pattern")])
    build_mixed(name)(tokens, tap)
    return tap.values[tap.reads[0]]


def test_a_share_is_the_part_of_the_absolute_weight_with_its_sign() -> None:
    rows = torch.tensor([[0.5, -0.5, 1.0], [0.0, 0.0, 0.0], [0.25, 0.75, 0.0]])
    assert signed_shares(rows).tolist() == [[0.25, -0.25, 0.5], [0.0, 0.0, 0.0], [0.25, 0.75, 0.0]]
    assert_close(signed_shares(40 * rows), signed_shares(rows))


@pytest.mark.parametrize("name", SIGNED)
def test_scores_on_repeats_are_those_of_a_loop_over_shares(name: str) -> None:
    table = interp.heads(HookedTransformer(build_mixed(name)), repeats=DATA, sentences=None)
    tokens = DATA.tokens(D_VOCAB, 0)
    pattern, n = patterns(name, tokens), DATA.length
    for head in range(4):
        induction, previous = [], []
        for row in range(2):
            for i in range(1, n):
                share = pattern[row, head, i] / pattern[row, head, i].abs().sum()
                previous.append(float(share[i - 1]))
                followed = [j for j in range(2, i + 1) if tokens[row, j - 1] == tokens[row, i] and j - 1 < i]
                if i > DATA.period:
                    induction.append(sum(float(share[j]) for j in followed))
        cell = table.value.sel(layer=1, head=head)
        assert float(cell.sel(score="induction")) == pytest.approx(sum(induction) / len(induction), abs=1e-6)
        assert float(cell.sel(score="previous_token")) == pytest.approx(
            sum(previous) / len(previous), abs=1e-6
        )
    assert "layers 0, 1: weights that are no shares" in table.attrs["no_shares"]
    assert table.value.sel(score="entropy").isnull().all()
    for score in ("induction", "previous_token", "current_token", "first_token", "local", "duplicate_token"):
        assert float(abs(table.value.sel(score=score)).max()) <= 1


def test_pooling_has_the_scores_of_its_definition() -> None:
    """The mean of 0..i minus the token itself: 1 / (2 i) of the weight for an earlier token, -1/2 for its own."""
    table = interp.heads(HookedTransformer(build_mixed("pool")), repeats=DATA, sentences=None)
    expected = sum(1 / (2 * i) for i in range(1, DATA.length)) / (DATA.length - 1)
    assert table.value.sel(score="previous_token").values == pytest.approx(expected, rel=1e-5)
    assert table.value.sel(score="current_token").values == pytest.approx(-0.5, rel=1e-5)
    kernel = attention_kernel(HookedTransformer(build_mixed("pool")), DATA)
    assert kernel.value.sel(distance=0).values == pytest.approx(-0.5, rel=1e-5)


def test_layers_with_shares_are_left_as_they_are() -> None:
    table = interp.heads(HookedTransformer(build_mixed("pool-softmax")), repeats=DATA, sentences=None)
    assert table.attrs["no_shares"].startswith("layers 0:")
    assert table.value.sel(score="entropy").notnull().values.tolist() == [[False] * 4, [True] * 4]
    pattern = patterns("pool-softmax", DATA.tokens(D_VOCAB, 0))
    previous = pattern.diagonal(-1, -2, -1).mean((0, 2))
    found = table.value.sel(layer=1, score="previous_token")
    assert found.values == pytest.approx(previous.numpy(), abs=1e-6)
    assert (
        "no_shares" not in interp.heads(HookedTransformer(build("gpt2")), repeats=DATA, sentences=None).attrs
    )


@pytest.mark.parametrize("name", SIGNED)
def test_attention_of_the_last_token_counts_in_shares_too(name: str) -> None:
    tokens = some_tokens()
    share = signed_shares(patterns(name, tokens)[:, :, -1])
    late = late_layers(HookedTransformer(build_mixed(name)), tokens, [3, 14, 7])
    first = late.value.sel(score="first_attention").dropna("part")
    assert first.values == pytest.approx(share[:, :, 0].mean(0).numpy())
    batch = Batch(tokens).with_answers(tokens[:, 1], tokens[:, 3])
    found = interp.run([name_attention(MIXERS[name])], build_mixed(name), [batch])["name_attention"]
    for i, mention in enumerate(MENTIONS):
        expected = (share * mention_masks(batch)[:, i, None]).sum(-1)
        assert found[mention].sel(layer=1).values == pytest.approx(expected.numpy())
