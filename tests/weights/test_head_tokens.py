"""What heads write and look for, token by token: the rows of the full circuits, and the planted circuit's own words."""

import pytest
import torch

import interp
from interp import Circuits, HookedTransformer
from interp.weights.head_tokens import head_tokens
from tests.configs import CONFIGS, D_VOCAB, build
from tests.loops import over
from tests.tolerances import assert_close

TOKENS = torch.tensor([7, 3, 30, 12])
NAMES = ("gpt2", "llama-gqa", "gemma2", "attention-only-rotary", "olmo2", "bloom")


def circuits(name: str, **changes: bool) -> Circuits:
    return Circuits(build(name), **{"folded": True, "scaled": True, "embedding": "effective", **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_lists_are_the_ends_of_the_full_circuits_rows(name: str) -> None:
    found = head_tokens(HookedTransformer(build(name)), TOKENS, top=3)
    for layer in range(2):
        for head in range(CONFIGS[name].n_heads):
            full = circuits(name).full_ov(layer, head)
            ov = (full.A @ full.B)[TOKENS]
            ov = ov - ov.mean(-1, keepdim=True)
            at = found.sel(layer=layer, head=head)
            for sign, end in ((1, "top"), (-1, "bottom")):
                order = (sign * ov).argsort(-1, descending=True)[:, :3]
                assert torch.equal(torch.tensor(at.written.sel(end=end).values), order)
                assert_close(torch.tensor(at.written_score.sel(end=end).values), ov.gather(1, order))
            qk = circuits(name).full_qk(layer, head)
            scores = (qk.A @ qk.B)[TOKENS][:, TOKENS]
            scores = scores - scores.mean(-1, keepdim=True)
            order = scores.argsort(-1, descending=True)[:, :3]
            assert torch.equal(torch.tensor(at.sought.values), order)
            assert_close(torch.tensor(at.sought_score.values), scores.gather(1, order))


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "attention-only-rotary"])
@over("embedding", ["token", "effective"])
@over("biases", [False, True])
def test_some_tokens_are_embedded_as_among_all(name: str, embedding: str, biases: bool) -> None:
    made = Circuits(build(name), biases=biases, embedding=embedding)  # type: ignore[arg-type]
    assert_close(made.embedded_tokens(TOKENS), made.embedded[TOKENS])


def test_the_largest_entry_of_a_row_is_that_of_top_pairs() -> None:
    model = HookedTransformer(build("gpt2"))
    pairs = interp.top_pairs(model, 1, 2, k=1)
    found = head_tokens(model, [int(pairs.source_id[0])], top=1).sel(layer=1, head=2).isel(token=0)
    assert int(found.written.sel(end="top")[0]) == pairs.output_id[0]
    assert float(found.written_score.sel(end="top")[0]) == pytest.approx(pairs.value[0])


def test_other_conventions_change_the_rows_they_concern() -> None:
    model = HookedTransformer(build("gpt2"))
    plain = Circuits(model.transformer)
    found = head_tokens(model, TOKENS, top=2, circuits=plain).sel(layer=1, head=1)
    full = plain.full_ov(1, 1)
    expected = (full.A @ full.B)[TOKENS]
    expected = (expected - expected.mean(-1, keepdim=True)).topk(2, -1)
    assert_close(torch.tensor(found.written_score.sel(end="top").values), expected.values)


def test_the_planted_copying_head_writes_the_token_that_it_attends_to() -> None:
    model = HookedTransformer.from_pretrained("groundtruth-induction")
    found = head_tokens(model, list("abcd"), top=1).sel(layer=1, head=2)
    assert found.written.sel(end="top").values[:, 0].tolist() == found.token.values.tolist()


def test_there_are_as_many_matches_as_tokens_at_most() -> None:
    found = head_tokens(HookedTransformer(build("gpt2")), TOKENS[:2], top=D_VOCAB)
    assert found.sizes["match"] == 2 and found.sizes["rank"] == D_VOCAB


@pytest.mark.parametrize(
    ("tokens", "top", "words"),
    [
        ([], 1, "at least one token"),
        ([3, 3], 1, "different tokens"),
        ([3], 0, "got top=0"),
        ([3], 32, "got top=32"),
    ],
)
def test_what_cannot_be_listed_is_refused(tokens: list[int], top: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        head_tokens(HookedTransformer(build("gpt2")), tokens, top=top)


def test_a_model_whose_logits_are_not_linear_is_refused() -> None:
    with pytest.raises(ValueError, match="masked-LM"):
        head_tokens(HookedTransformer(build("masked-lm")), TOKENS)
