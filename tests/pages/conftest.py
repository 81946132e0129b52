"""The reports that the tests of the page look at, each made once."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from interp import HookedTransformer, families
from interp.cli import main
from interp.model import MLP, ModelConfig, Transformer
from interp.pages import About, Report, ReportQuestion, replacing, report_of, write_report
from tests.pages.visits import ARGS, BROWSER, NARROW, WIDE, Visit, visit

if TYPE_CHECKING:
    from playwright import sync_api

PLANTED, CORRUPTED = "abcdefabcdefabc", "abcedfabcedfabc"
SENTENCE = "When Mary and John went to the store, John gave a drink to"
LAYERS, HEADS = 30, 9
"""Of `deep`."""
SWAPPED = "When Mary and John went to the store, Mary gave a drink to"


@pytest.fixture(scope="session")
def planted_model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("groundtruth-induction")


@pytest.fixture(scope="session")
def planted(planted_model: HookedTransformer) -> Report:
    """The hand-built model on a repeated word, its answer given; corrupted, the word goes on with the wrong one."""
    about = About("groundtruth-induction", "hand-built")
    return report_of(planted_model, ReportQuestion(PLANTED, "d", "e", CORRUPTED), about, seed=3)


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


@pytest.fixture(scope="session")
def asked(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the random model on a sentence and its corrupted one, as the command writes it."""
    out = tmp_path_factory.mktemp("browser") / "report"
    argv = [
        "report",
        "--model",
        str(random_model),
        "--prompt",
        SENTENCE,
        "--corrupt",
        SWAPPED,
        "--out",
        str(out),
    ]
    assert main(argv) == 0
    return out


@pytest.fixture(scope="session")
def deep(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a random model of 30 layers of 9 heads."""
    small = HookedTransformer.from_pretrained(str(random_model))
    torch.manual_seed(2)
    network = Transformer(ModelConfig(LAYERS, 72, HEADS, n_ctx=64, d_vocab=small.cfg.d_vocab, mlp=MLP(96)))
    model = HookedTransformer(network, small.text.tokenizer)
    folder = tmp_path_factory.mktemp("deep")
    question = ReportQuestion.of(model.text, SENTENCE, corrupt=SWAPPED)
    write_report(report_of(model, question, About("/somewhere/deep-30l")), folder)
    return folder


@pytest.fixture(scope="session")
def browser(chromium: "sync_api.BrowserType") -> Iterator["sync_api.Browser"]:
    running = chromium.launch(executable_path=BROWSER, args=ARGS)
    yield running
    running.close()


@pytest.fixture(params=[NARROW, WIDE])
def seen(request: pytest.FixtureRequest, browser: "sync_api.Browser", asked: Path) -> Iterator[Visit]:
    """A fresh visit at each width; whatever a test does, nothing is fetched and nothing logged."""
    fresh = visit(browser, asked, request.param)
    yield fresh
    assert all(url.startswith("file://") for url in fresh.requests), fresh.requests
    assert len(fresh.requests) == 1
    assert fresh.complaints == []
    overflow = fresh.page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    assert overflow <= 0
    fresh.page.close()
