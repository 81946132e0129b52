"""The reports that the tests of the page look at, each made once."""

from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from interp import HookedTransformer, families
from interp.model import MLP, ModelConfig, Transformer
from interp.pages import About, Question, Report, replacing, report_of, write_report

PLANTED = "abcdefabcdefabc"
SENTENCE = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="session")
def planted_model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("groundtruth-induction")


@pytest.fixture(scope="session")
def planted(planted_model: HookedTransformer) -> Report:
    """The hand-built model on a repeated word, its answer given."""
    about = About("groundtruth-induction", "hand-built")
    return report_of(planted_model, Question(PLANTED, "d", "e"), about, seed=3)


@pytest.fixture(scope="session")
def planted_folder(planted: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted") / "report"
    with replacing(folder) as fresh:
        write_report(planted, fresh)
    return folder


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights in the shape of demo-4l and a byte-pair tokenizer of its own."""
    folder = tmp_path_factory.mktemp("random-4l")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|bos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"{SENTENCE} Mary."] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(1)
    config = ModelConfig(4, 160, 8, n_ctx=128, d_vocab=tokenizer.get_vocab_size(), mlp=MLP(640))
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    families.save(model, folder)
    return folder
