"""Every example in a docstring of the package, the board and the papers runs, and gives what it says."""

import ast
import doctest
import functools
import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Iterator
from dataclasses import replace

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

import experiments
import interp
from experiments import board, papers
from interp import HookedTransformer, plot
from interp.families.tokenizer import HuggingFaceTokenizer
from tests.configs import CONFIGS, perturbed
from tests.contract.case import discovered, function_of
from tests.tiny import CORPUS, backend, gpt2_tokenizer

PROMPT = CORPUS[0].removesuffix(" Mary.")


def documented() -> Iterator[tuple[str, str, str]]:
    """Module, name and docstring of everything in the package that shows an example."""
    walked = (pkgutil.walk_packages(each.__path__, f"{each.__name__}.") for each in (interp, board, papers))
    for info in itertools.chain.from_iterable(walked):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        seen = set()  # a question's function has the words of its record
        for finder in doctest.DocTestFinder(exclude_empty=True).find(module, module.__name__):
            if finder.examples and finder.docstring not in seen:
                seen.add(finder.docstring)
                yield info.name, finder.name, finder.docstring or ""


EXAMPLES = {name: (module, text) for module, name, text in documented()}


@functools.cache
def model() -> HookedTransformer:
    """Eight heads, a context that holds the default repeats, and the words of the examples."""
    torch.manual_seed(0)
    config = replace(CONFIGS["gpt2"], n_layers=3, n_heads=8, d_head=6, n_ctx=128)
    network = perturbed(replace(config, d_vocab=backend().get_vocab_size()), torch.float32)
    return HookedTransformer(network, HuggingFaceTokenizer(gpt2_tokenizer()))


@pytest.fixture(autouse=True)
def _no_figures_left() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_gives_what_it_says(name: str) -> None:
    mpl.use("Agg")
    module, text = EXAMPLES[name]
    of_the_network = module.startswith("interp.model")
    names: dict[str, object] = {
        **vars(importlib.import_module(module)),
        "interp": interp, "experiments": experiments, "plot": plot, "torch": torch, "np": np, "prompt": PROMPT,
        "model": model().transformer if of_the_network else model(),
        "tokens": torch.arange(12)[None],
    }  # fmt: skip
    for example in doctest.DocTestParser().get_examples(inspect.cleandoc(text)):
        if example.exc_msg is not None:
            with pytest.raises(Exception) as caught:  # noqa: PT011
                eval(example.source, names)
            assert f"{caught.typename}: {caught.value}" == example.exc_msg.strip()
        elif example.want:
            got = eval(example.source, names)
            assert repr(got) == example.want.strip() or got == ast.literal_eval(example.want)
        else:
            exec(example.source, names)


def test_the_function_of_every_question_shows_an_example() -> None:
    for question in discovered():
        assert ">>> " in (inspect.getdoc(function_of(question)) or ""), question.__name__
