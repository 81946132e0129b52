"""all-MiniLM-L6-v2, a BERT that people have: our states against transformers', and what verify says of it."""

from pathlib import Path

import pytest
import torch
import transformers

from interp import HookedTransformer
from tests.tolerances import assert_close

pytestmark = pytest.mark.real


def test_every_line_of_verify_holds(minilm: Path) -> None:
    found = HookedTransformer.from_pretrained(minilm).verify()
    assert found.passed, str(found)


def test_the_last_stream_of_a_text_is_that_of_transformers(minilm: Path) -> None:
    model = HookedTransformer.from_pretrained(minilm)
    text = "A sentence about the weather, and one more."
    ids = transformers.AutoTokenizer.from_pretrained(minilm)(text, return_tensors="pt").input_ids
    assert model.to_tokens(text).tolist() == ids.tolist()
    _, cache = model.run_with_cache(ids)
    with torch.no_grad():
        expected = transformers.AutoModel.from_pretrained(minilm).eval()(ids).last_hidden_state
    assert_close(cache["blocks.5.hook_normalized_resid_post"], expected)
