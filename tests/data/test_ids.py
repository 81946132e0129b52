"""What a tokenizer of transformers returns is a prompt: its mask is the padding, its ids stay, all else is refused."""

import re

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

import interp
from interp import HookedTransformer
from interp.data.batch import Batch, encoded, is_prompts
from interp.data.text import Text
from tests.families.oracle import hf_model
from tests.tiny import gpt2_tokenizer, hooked
from tests.tolerances import assert_close

IDS = [[5, 6, 7], [8, 9, 0]]
MASK = [[1, 1, 1], [1, 1, 0]]
LEFT = {"input_ids": [[5, 6, 7], [0, 8, 9]], "attention_mask": [[1, 1, 1], [0, 1, 1]]}


def same(found: Batch, wanted: Batch) -> bool:
    """Whether tokens, padding and types are the same."""
    values = ((getattr(each, name) for name in ("tokens", "keep", "types")) for each in (found, wanted))
    return all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(*values, strict=True)
    )


def test_an_encoding_of_any_library_is_the_batch_made_by_hand() -> None:
    wanted = Batch(torch.tensor(IDS), torch.tensor(MASK) == 1)
    for kind in (
        list, np.array, torch.tensor, lambda x: np.array(x, np.int32), lambda x: torch.tensor(x, dtype=torch.int32),
        lambda x: [torch.tensor(row) for row in x], lambda x: tuple(map(tuple, x)),
    ):  # fmt: skip
        given = {"input_ids": kind(IDS), "attention_mask": kind(MASK)}
        for each in (given, BatchEncoding(given)):
            assert is_prompts(each)
            assert same(encoded(each), wanted)
    for truth in (torch.tensor(MASK) == 1, np.array(MASK) == 1, [[True] * 3, [True, True, False]]):
        assert same(encoded({"input_ids": IDS, "attention_mask": truth}), wanted)


def test_one_prompt_may_stand_without_an_axis_of_prompts() -> None:
    assert same(encoded({"input_ids": [5, 6], "attention_mask": [1, 1]}), Batch(torch.tensor([[5, 6]])))
    assert same(encoded({"input_ids": torch.tensor([5, 6])}), Batch(torch.tensor([[5, 6]])))


def test_padding_stays_on_its_side_and_none_is_no_mask() -> None:
    left = encoded(LEFT)
    assert left.keep is not None
    assert left.keep.tolist() == [[True] * 3, [False, True, True]]
    assert encoded({"input_ids": IDS, "attention_mask": torch.ones(2, 3)[:, :].long()}).keep is None


def test_rows_of_other_lengths_are_padded_where_asked() -> None:
    given = {
        "input_ids": [[5, 6, 7], [8]],
        "attention_mask": [[1, 1, 0], [1]],
        "token_type_ids": [[0, 1, 0], [1]],
    }
    for side in ("left", "right"):
        wanted = Batch.of([[5, 6], [8]], side=side)
        found = encoded(given, side=side)
        assert same(Batch(found.tokens, found.keep), wanted)
        assert found.types is not None
        assert found.types.tolist() == [[0, 1], [0, 1] if side == "left" else [1, 0]]


def test_token_types_of_0_everywhere_are_none() -> None:
    assert encoded({"input_ids": IDS, "token_type_ids": torch.zeros(2, 3).long()}).types is None
    assert encoded({"input_ids": IDS, "token_type_ids": MASK}).types is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": IDS, "attention_masks": MASK}, "got 'attention_masks' too; nearest: attention_mask"),
        ({"input_ids": IDS, "labels": IDS}, "input_ids, attention_mask and token_type_ids are prompts, got 'labels'"),
        ({"attention_mask": MASK}, "input_ids is required of what a tokenizer returns, got attention_mask"),
        ({"input_ids": IDS, "attention_mask": MASK[:1]}, "must have the shape of input_ids, rows of [3, 3], got [3]"),
        ({"input_ids": IDS, "token_type_ids": [[0], [0]]}, "token_type_ids must have the shape of input_ids"),
        ({"input_ids": IDS, "attention_mask": [[1, 1, 1], [0, 0, 0]]}, "attention_mask has none in row 1"),
        ({"input_ids": IDS, "attention_mask": [[1, 1, 1], [1, 0, 1]]}, "not between them, got 0 in row 1 at pos"),
        ({"input_ids": IDS, "attention_mask": [[1, 1, 2], [1, 1, 1]]}, "must be of 0 and 1, got 2 in row 0"),
        ({"input_ids": IDS, "attention_mask": torch.rand(2, 3)}, "attention_mask must be whole numbers"),
        ({"input_ids": [["a"]]}, "input_ids must be whole numbers"),
        ({"input_ids": []}, "input_ids must be whole numbers [pos] or [prompt, pos], at least one in each row"),
        ({"input_ids": [[5], []]}, "input_ids must be whole numbers"),
        ({"input_ids": "The cat"}, "input_ids must be whole numbers"),
        ({"input_ids": torch.zeros(1, 1, 1).long()}, "input_ids must be whole numbers"),
    ],
)  # fmt: skip
def test_what_is_no_encoding_is_refused_by_its_key(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        encoded(given)


def test_a_mapping_without_ids_is_no_prompt() -> None:
    with pytest.raises(ValueError, match="a mapping requires 'input_ids', as a tokenizer returns it"):
        hooked().to_batch({"text": ["The cat"]})  # type: ignore[dict-item]
    assert not is_prompts({"text": ["The cat"]})


def test_nothing_is_prepended_and_ids_are_checked() -> None:
    text = Text(None, 4, 8)
    batch = text.batch({"input_ids": [[5, 6]]}, prepend_bos=True)
    assert batch.tokens.tolist() == [[5, 6]]
    assert not batch.bos
    with pytest.raises(ValueError, match=r"in \[0, 7\], got 9; at position 1 of prompt 1"):
        text.batch({"input_ids": IDS, "attention_mask": MASK})


def test_what_the_models_tokenizer_returns_gives_the_numbers_of_its_texts() -> None:
    texts, theirs = ["The cat sat on the mat", "The cat"], gpt2_tokenizer()
    theirs.pad_token = theirs.eos_token
    model = hooked()
    wanted = interp.attribute(model, model.to_batch(texts, prepend_bos=False), 5, 6).value
    for side in ("left", "right"):
        given = theirs(texts, padding=True, padding_side=side, return_tensors="pt")
        batch = model.to_batch(texts, prepend_bos=False, padding_side=side)
        assert same(model.to_batch(given), Batch(batch.tokens, batch.keep))
        found = interp.attribute(model, given, 5, 6).value
        assert_close(torch.tensor(found.values), torch.tensor(wanted.values))
    source = interp.data.open_source(theirs(texts))
    assert list(source.rows(0, 2)) == [theirs.encode(text) for text in texts]


@pytest.mark.parametrize("given", [LEFT, {"input_ids": IDS, "attention_mask": MASK}], ids=["left", "right"])
def test_logits_are_those_of_transformers_with_the_mask(given: dict[str, list[list[int]]]) -> None:
    theirs = hf_model("llama", torch.float64)
    ours = HookedTransformer.from_pretrained(theirs)
    tensors = {name: torch.tensor(value) for name, value in given.items()}
    with torch.no_grad():
        wanted = theirs(**tensors).logits
    real = tensors["attention_mask"] == 1
    assert_close(
        ours(tensors)[real], wanted[real], torch.float32
    )  # in which transformers computes its angles
