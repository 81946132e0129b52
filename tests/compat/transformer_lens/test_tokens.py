"""Text to tokens and back, padding, and the loss and the text that come out. All of it holds for theirs too."""

import pytest
import torch

from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.hooked_transformer import HookedTransformer
from tests.tiny import backend, gpt2_tokenizer

WORDS = backend().get_vocab_size()


@pytest.fixture
def model() -> HookedTransformer:
    cfg = HookedTransformerConfig(
        n_layers=1, d_model=8, d_head=4, n_ctx=16, act_fn="gelu", seed=0, device="cpu", d_vocab=WORDS,
        dtype=torch.float64,
    )  # fmt: skip
    tokenizer = gpt2_tokenizer()
    tokenizer.padding_side = "right"
    return HookedTransformer(cfg, tokenizer)


def test_the_vocabulary_comes_from_the_tokenizer() -> None:
    cfg = HookedTransformerConfig(n_layers=1, d_model=8, d_head=4, n_ctx=16, attn_only=True, device="cpu")
    model = HookedTransformer(cfg, gpt2_tokenizer())
    assert (model.cfg.d_vocab, model.cfg.d_vocab_out, model.W_U.shape[1]) == (WORDS, WORDS, WORDS)
    assert model.cfg.tokenizer_prepends_bos is False
    assert model.tokenizer.bos_token_id == model.tokenizer.pad_token_id == model.tokenizer.eos_token_id


def test_bos_is_prepended_unless_told_otherwise(model: HookedTransformer) -> None:
    bos, text = model.tokenizer.bos_token_id, "the cat"
    plain = model.to_tokens(text, prepend_bos=False)
    assert model.to_tokens(text).tolist() == [[bos, *plain[0].tolist()]]
    model.cfg.default_prepend_bos = False
    assert torch.equal(model.to_tokens(text), plain) and model.to_tokens(text, prepend_bos=True)[0, 0] == bos


def test_rows_are_padded_on_the_side_asked_for_and_cut_at_the_context(model: HookedTransformer) -> None:
    pad, texts = model.tokenizer.pad_token_id, ["the cat sat on the mat", "the"]
    right = model.to_tokens(texts, prepend_bos=False)
    left = model.to_tokens(texts, prepend_bos=False, padding_side="left")
    assert right[1, -1] == pad and left[1, 0] == pad and model.tokenizer.padding_side == "right"
    assert model.to_tokens("the cat " * 30).shape == (1, 16)
    assert model.to_tokens("the cat " * 30, truncate=False).shape[1] > 16


def test_tokens_become_text_again(model: HookedTransformer) -> None:
    text = "the cat sat"
    tokens = model.to_tokens(text, prepend_bos=False)
    assert model.to_string(tokens[0]) == text and model.to_string(tokens) == [text]
    assert model.to_string(tokens[0].tolist()) == text and model.to_string(tokens[0].numpy()) == text
    pieces = model.to_str_tokens(text, prepend_bos=False)
    assert "".join(pieces) == text and pieces == model.to_str_tokens(tokens) == model.to_str_tokens(tokens[0])
    assert model.to_str_tokens([text, text]) == [model.to_str_tokens(text)] * 2
    with pytest.raises(ValueError, match="Invalid shape"):
        model.to_string(tokens[None])
    with pytest.raises(AssertionError, match="Invalid tokens"):
        model.to_str_tokens(torch.zeros(2, 2, dtype=torch.long))


def test_single_tokens(model: HookedTransformer) -> None:
    piece = model.to_str_tokens("the cat", prepend_bos=False)[0]
    token = model.to_single_token(piece)
    assert model.to_single_str_token(token) == piece
    with pytest.raises(AssertionError, match="is not a single token"):
        model.to_single_token("the cat sat on the mat")


def test_positions_of_a_token(model: HookedTransformer) -> None:
    tokens = torch.tensor([4, 5, 4, 6])
    assert (
        model.get_token_position(4, tokens) == 0
        and model.get_token_position(4, tokens[None], mode="last") == 2
    )
    with pytest.raises(AssertionError, match="does not occur"):
        model.get_token_position(7, tokens)
    with pytest.raises(ValueError, match="mode must be"):
        model.get_token_position(4, tokens, mode="middle")
    piece = model.to_str_tokens("the cat", prepend_bos=False)[0]
    assert model.get_token_position(piece, "the cat") == 1
    assert model.get_token_position(piece, "the cat", prepend_bos=False) == 0


def test_residual_directions_are_columns_of_the_unembedding(model: HookedTransformer) -> None:
    tokens = torch.tensor([[3, 4], [5, 6]])
    assert torch.equal(model.tokens_to_residual_directions(tokens)[1, 0], model.W_U[:, 5])
    for one in (5, torch.tensor(5), torch.tensor([5])):
        assert torch.equal(model.tokens_to_residual_directions(one), model.W_U[:, 5])


@torch.no_grad()
def test_left_padding_changes_neither_logits_nor_loss_of_the_real_tokens(model: HookedTransformer) -> None:
    texts = ["the cat sat on the mat", "the cat"]
    padded = model(texts, padding_side="left")
    alone = model(texts[1])
    torch.testing.assert_close(padded[1, -alone.shape[1] :], alone[0])
    per_token = model(texts, padding_side="left", return_type="loss", loss_per_token=True)
    want = model(texts[1], return_type="loss", loss_per_token=True)
    torch.testing.assert_close(per_token[1, -want.shape[1] :], want[0])
    assert not per_token[1, : -want.shape[1]].any()


def test_generation_from_text_gives_text(model: HookedTransformer) -> None:
    options = {"max_new_tokens": 3, "do_sample": False, "stop_at_eos": False, "verbose": False}
    one = model.generate("the cat", **options)
    both = model.generate(["the cat", "the cat sat on the mat"], **options)
    assert isinstance(one, str) and one.startswith("the cat") and both[0] == one
    tokens = model.generate("the cat", return_type="tokens", **options)
    assert torch.equal(tokens[:, :-3], model.to_tokens("the cat"))


def test_text_needs_a_tokenizer() -> None:
    cfg = HookedTransformerConfig(
        n_layers=1, d_model=8, d_head=4, n_ctx=4, attn_only=True, device="cpu", d_vocab=5
    )
    model = HookedTransformer(cfg)
    for call in (model.to_tokens, model, model.generate):
        with pytest.raises(AssertionError, match="tokenizer"):
            call("the cat")
    with pytest.raises(AssertionError, match="is not a supported tokenizer"):
        model.set_tokenizer("gpt2")


def test_one_text_needs_no_padding_token(model: HookedTransformer) -> None:
    before = model.to_tokens("The cat sat")
    tokenizer = model.tokenizer
    token, tokenizer.pad_token = tokenizer.pad_token, None
    try:
        assert torch.equal(model.to_tokens("The cat sat"), before)
        with pytest.raises(ValueError, match="padding"):
            model.to_tokens(["The cat", "The cat sat on"])
    finally:
        tokenizer.pad_token = token
