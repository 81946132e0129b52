"""What a report finds on ten prompts of SmolLM2: every share it names is measured again with plain transformers.

The clean run's output of a head or an MLP, or its stream, is put into the corrupted run by a hook of torch, and the
logit difference of that run is compared with the sentence. Which sentences there must be was written down before the
first run of this test, after reading the ten reports.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import interp
from interp import HookedTransformer
from interp.pages import Finding, ReportPage

pytestmark = [pytest.mark.real, pytest.mark.slow]
HALF, WIDTH = 0.5, 64


@dataclass(frozen=True)
class Asked:
    """A question, and the sentences that must be there: the beginning of each."""

    prompt: str
    answer: str
    wrong: str | None = None
    corrupt: str | None = None
    begins: tuple[str, ...] = ()


QUESTIONS = (
    Asked(
        "When Mary and John went to the store, John gave a drink to", " Mary", " John",
        "When Mary and John went to the store, Mary gave a drink to",
        ("The model answers", "Head L23H3 adds most", "The same head", "What differs starts at", "The strongest"),
    ),
    Asked(
        "The capital of France is", " Paris", " Rome", "The capital of Italy is",
        ("The model answers", "Head L23H4 adds most", "The same head", "What differs starts at", "The strongest"),
    ),
    Asked(
        "The keys to the cabinet", " are", " is", "The key to the cabinet",
        ("The answer “·are” is not", "Head L26H0 adds most", "The same head", "What differs starts at"),
    ),
    Asked(
        "The opposite of hot is", " cold", " small", "The opposite of big is",
        ("The model answers", "The MLP of layer 29", "Head L22H8 brings", "What differs", "No small circuit was found"),
    ),
    Asked(
        "Monday, Tuesday, Wednesday, Thursday,", " Friday", " Saturday", "Monday, Tuesday, Wednesday, Friday,",
        ("The model answers", "Head L29H1 adds most", "Head L23H3 brings", "Head L17H5 is an induction head"),
    ),
    Asked(
        "Uno means one. Dos means two. Tres means", " three", " four", "Uno means one. Dos means two. Cuatro means",
        ("The model answers", "Head L23H0 adds most", "Head L1H0 brings", "Head L17H5 is an induction head"),
    ),
    Asked(
        "The pink cat met the blue dog. The colour of the dog was", " blue", " pink",
        "The blue cat met the pink dog. The colour of the dog was",
        ("The answer “·blue” is not", "The MLP of layer 22 adds most", "Head L23H0 brings", "What differs"),
    ),
    Asked(
        "She opened the door and saw that her brother had lost", " his", " her",
        "She opened the door and saw that her sister had lost",
        ("The model answers", "Head L26H2 adds most", "The MLP of layer 24 at", "What differs", "The strongest 100"),
    ),
    Asked(
        "def add(a, b):\n    return a +", " b", " c", "def add(a, c):\n    return a +",
        ("The model answers", "Head L29H1 adds most", "Head L23H0 brings", "What differs starts at"),
    ),
    Asked("Once upon a time there was a little", " girl", " town", begins=("The model answers", "The MLP of layer 29")),
)  # fmt: skip


@contextmanager
def instead(module: nn.Module, change: Callable[[Tensor], Tensor], *, inputs: bool) -> Iterator[None]:
    """A module whose first input, or whose output, is changed."""
    if inputs:
        handle = module.register_forward_pre_hook(lambda _, given: (change(given[0]), *given[1:]))
    else:
        handle = module.register_forward_hook(lambda _, given, out: change(out))
    with handle:
        yield


class Theirs:
    """Plain transformers on the two prompts of a question."""

    def __init__(self, network: PreTrainedModel, model: HookedTransformer, asked: Asked) -> None:
        self.network = network
        self.clean, self.corrupt = (
            model.to_tokens(text) for text in (asked.prompt, asked.corrupt or asked.prompt)
        )
        self.answer = model.to_single_token(asked.answer)
        self.wrong = None if asked.wrong is None else model.to_single_token(asked.wrong)

    def logits(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return self.network(tokens).logits[0, -1].double()

    def difference(self, tokens: Tensor) -> float:
        last = self.logits(tokens)
        return float(last[self.answer] - (0.0 if self.wrong is None else last[self.wrong]))

    def share(self, module: nn.Module, place: Callable[[Tensor], Tensor], *, inputs: bool) -> float:
        """How much of the difference between the prompts comes back with part of the clean run's value put in place."""
        kept: list[Tensor] = []

        def keep(value: Tensor) -> Tensor:
            kept.append(value.clone())
            return value

        def put(value: Tensor) -> Tensor:
            value = value.clone()
            place(value).copy_(place(kept[0]))
            return value

        with instead(module, keep, inputs=inputs):
            clean = self.difference(self.clean)
        with instead(module, put, inputs=inputs):
            patched = self.difference(self.corrupt)
        corrupt = self.difference(self.corrupt)
        return (patched - corrupt) / (clean - corrupt)

    def of_head(self, layer: int, head: int) -> float:
        module = self.network.model.layers[layer].self_attn.o_proj
        return self.share(module, lambda z: z[..., WIDTH * head : WIDTH * (head + 1)], inputs=True)

    def of_mlp(self, layer: int, pos: int) -> float:
        return self.share(self.network.model.layers[layer].mlp, lambda out: out[:, pos], inputs=False)

    def of_stream(self, layer: int) -> float:
        """Of the stream that enters a layer at the last token."""
        return self.share(self.network.model.layers[layer], lambda x: x[:, -1], inputs=True)


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def begun(found: tuple[Finding, ...]) -> list[str]:
    return [one.words for one in found]


@pytest.mark.parametrize("asked", QUESTIONS, ids=lambda asked: asked.answer.strip())
def test_the_findings_say_what_transformers_measures(
    asked: Asked, model: HookedTransformer, theirs: PreTrainedModel
) -> None:
    page: ReportPage = interp.report(model, asked.prompt, asked.answer, asked.wrong, corrupt=asked.corrupt)
    words, other = begun(page.findings), Theirs(theirs, model, asked)
    for beginning in asked.begins:
        assert any(one.startswith(beginning) for one in words), (beginning, words)

    # the first sentence: probability, rank and lead
    last = other.logits(other.clean)
    probability, rank = re.findall(r"probability ([\d.]+), rank (\d+)", words[0])[0]
    assert number(probability) == pytest.approx(float(last.softmax(-1)[other.answer]), abs=6e-4)
    assert int(rank) == 1 + int((last > last[other.answer]).sum())
    if lead := re.findall(r"([\d.]+) logits ahead", words[0]):
        assert number(lead[0]) == pytest.approx(abs(other.difference(other.clean)), abs=6e-3)
    if asked.corrupt is None:
        return

    # who brings the difference back: each share that is named
    for place in [place for one in page.findings if one.section == "patching" for place in one.places]:
        _, direction, site = place.view.split()
        if direction != "denoise" or site == "resid_pre":
            continue
        share = (other.of_head if site == "z" else other.of_mlp)(place.row, place.column)
        table = page.tables["patching"].query(
            "direction == 'denoise' and site == @site and layer == @place.row"
        )
        cell = table[(table["head"] if site == "z" else table.pos) == place.column].normalised.iloc[0]
        assert cell == pytest.approx(share, abs=5e-4)
    (cause,) = (one for one in words if "of the difference back" in one)
    assert number(re.findall(r"brings (−?\d+\.\d+)", cause)[0]) > 0.2

    # from which layer on the last token has it
    if layers := re.findall(r"at the last token from layer (\d+) on", " ".join(words)):
        layer = int(layers[0])
        assert other.of_stream(layer) >= HALF > other.of_stream(layer - 1)
