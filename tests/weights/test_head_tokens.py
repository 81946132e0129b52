"""What heads write and look for, token by token: the rows of the full circuits, and the planted circuit's own words."""

import pytest
import torch

import interp
from interp import HookedTransformer
from interp.weights import HeadCircuits, head_tokens
from tests.configs import CONFIGS, D_VOCAB, build
from tests.loops import over
from tests.tolerances import assert_close

TOKENS = torch.tensor([7, 3, 30, 12])
NAMES = ("gpt2", "llama-gqa", "gemma2", "attention-only-rotary", "olmo2", "bloom")


def circuits(name: str, **changes: bool) -> HeadCircuits:
    return HeadCircuits(build(name), **{"folded": True, "scaled": True, "embedding": "effective", **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_lists_are_the_ends_of_the_full_circuits_rows(name: str) -> None:
    found = head_tokens(HookedTransformer(build(name)), TOKENS, top=3)
    for layer in range(2):
        for head in range(CONFIGS[name].n_heads):
            full = circuits(name).full_ov((layer, head))
            ov = (full.A @ full.B)[TOKENS]
            ov = ov - ov.mean(-1, keepdim=True)
            at = found.sel(layer=layer, head=head)
            for sign, end in ((1, "raises"), (-1, "lowers")):
                order = (sign * ov).argsort(-1, descending=True)[:, :3]
                assert torch.equal(torch.tensor(at.word_id.sel(list=end).values), order)
                assert_close(torch.tensor(at.value.sel(list=end).values), ov.gather(1, order))
            qk = circuits(name).full_qk((layer, head))
            scores = (qk.A @ qk.B)[TOKENS][:, TOKENS]
            scores = scores - scores.mean(-1, keepdim=True)
            order = scores.argsort(-1, descending=True)[:, :3]
            assert torch.equal(torch.tensor(at.word_id.sel(list="seeks").values), TOKENS[order])
            assert_close(torch.tensor(at.value.sel(list="seeks").values), scores.gather(1, order))
            assert str(at.part.values) == f"L{layer}H{head}"


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "attention-only-rotary"])
@over("embedding", ["token", "effective"])
@over("biases", [False, True])
def test_some_tokens_are_embedded_as_among_all(name: str, embedding: str, biases: bool) -> None:
    made = HeadCircuits(build(name), biases=biases, embedding=embedding)  # type: ignore[arg-type]
    assert_close(made.embedded_tokens(TOKENS), made.embedded[TOKENS])


def test_the_largest_entry_of_a_row_is_that_of_top_pairs() -> None:
    model = HookedTransformer(build("gpt2"))
    pairs = interp.weights.top_pairs(model, "L1H2", top=1).isel(part=0, rank=0)
    found = (
        head_tokens(model, [int(pairs.source_id)], top=1).sel(layer=1, head=2, list="raises").isel(token=0)
    )
    assert int(found.word_id[0]) == int(pairs.output_id)
    assert str(found.word[0].values) == str(pairs.output.values)
    assert float(found.value[0]) == pytest.approx(float(pairs.value))


def test_other_conventions_change_the_rows_they_concern() -> None:
    model = HookedTransformer(build("gpt2"))
    plain = HeadCircuits(model)
    found = head_tokens(model, TOKENS, top=2, folded=False, scaled=False, embedding="token")
    full = plain.full_ov("L1H1")
    expected = (full.A @ full.B)[TOKENS]
    expected = (expected - expected.mean(-1, keepdim=True)).topk(2, -1)
    assert_close(torch.tensor(found.value.sel(layer=1, head=1, list="raises").values), expected.values)


def test_the_planted_copying_head_writes_the_token_that_it_attends_to() -> None:
    model = HookedTransformer.from_pretrained("groundtruth-induction")
    found = head_tokens(model, list("abcd"), top=1).sel(layer=1, head=2, list="raises")
    assert found.word.values[:, 0].tolist() == found.token.values.tolist() == list("abcd")


def test_there_are_as_many_matches_as_tokens_at_most() -> None:
    found = head_tokens(HookedTransformer(build("gpt2")), TOKENS[:2], top=D_VOCAB)
    known = found.value.notnull().sum("rank")
    assert bool(
        (known.sel(list="seeks") == 2).all() and (known.sel(list=["raises", "lowers"]) == D_VOCAB).all()
    )
    absent = found.sel(list="seeks").isel(rank=slice(2, None))
    assert set(absent.word_id.values.ravel()) == {-1} and set(absent.word.values.ravel()) == {""}


@pytest.mark.parametrize(
    ("tokens", "top", "words"),
    [
        ([], 1, "at least one token"),
        ([3, 3], 1, "different tokens"),
        ([3], 0, "tokens per list, got 0"),
        ([3], 32, "got 32"),
    ],
)
def test_what_cannot_be_listed_is_refused(tokens: list[int], top: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        head_tokens(HookedTransformer(build("gpt2")), tokens, top=top)


def test_a_model_whose_logits_are_not_linear_is_refused() -> None:
    with pytest.raises(ValueError, match="masked-LM"):
        head_tokens(HookedTransformer(build("masked-lm")), TOKENS)
