"""The passes that the pages on analyses state for a call, against passes counted while it runs, at two sizes."""

import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor

import interp
from interp.model import MLP, Learned, ModelConfig, Transformer
from interp.model.block import Block
from tests.contract.test_documents import ANALYSES, TEXTS
from tests.loops import over

ROWS = 16
"""So many prompts that a sweep gains nothing by running cells of several columns in one pass."""
SIZES = ({"L": 3, "H": 2, "T": 8}, {"L": 5, "H": 4, "T": 12})
HEAD = "| call | forward | backward |"
LINE = re.compile(r"^\| `((?:interp|model)\..*)` \| `(.*)` \| `(.*)` \|$", re.MULTILINE)
STATED = [(name.removeprefix("analyses/"), *line) for name in ANALYSES for line in LINE.findall(TEXTS[name])]


@dataclass
class Passes:
    """Columns of blocks that were computed, and columns through which a gradient came back."""

    forward: int = 0
    backward: int = 0


@contextmanager
def counted() -> Iterator[Passes]:
    """Counts while it is open."""
    seen, forward = Passes(), Block.forward

    def came_back(columns: int) -> None:
        seen.backward += columns

    def watched(self: Block, resid: Tensor, *rest: object, **more: object) -> Tensor:
        columns = resid.shape[0] * resid.shape[1]
        seen.forward += columns
        out = forward(self, resid, *rest, **more)  # type: ignore[arg-type]
        if out.requires_grad:
            out.register_hook(lambda _: came_back(columns))
        return out

    with mock.patch.object(Block, "forward", watched):
        yield seen


def given(layers: int, heads: int, columns: int) -> dict[str, object]:
    """What the calls name: a model, and prompts of one length that differ at every token and bring their answers."""
    draw = torch.Generator().manual_seed(0)
    tokens, others = torch.randperm(ROWS * columns * 2, generator=draw).reshape(2, ROWS, columns)
    tokens[:, -2] = tokens[:, 0]  # heads are asked where a token repeats
    answers = torch.full((ROWS,), 3), torch.full((ROWS,), 4)
    config = ModelConfig(
        layers, width := 8 * heads, heads, 64, ROWS * columns * 2, mlp=MLP(12), position=Learned()
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Transformer(config).requires_grad_(False).double()
    model = interp.HookedTransformer(network)
    prompts, corrupt = (interp.Batch(each).with_answers(*answers) for each in (tokens, others))
    features = {"W_enc": (width, 6), "b_enc": (6,), "W_dec": (6, width), "b_dec": (width,)}
    weights = {
        name: torch.randn(shape, dtype=torch.float64, generator=draw) for name, shape in features.items()
    }
    site = "blocks.1.hook_resid_post"
    return {
        "interp": interp, "model": model, "prompts": prompts, "clean": prompts, "corrupt": corrupt,
        "said": model(prompts.tokens)[:, -1].argmax(-1).tolist(), "site": site,
        "dictionary": interp.features.Dictionary(interp.features.TopK(2), weights, reads=site),
        "direction": interp.causal.Subspace(site, weights["W_dec"][:1]),
        "rows": interp.tasks.Examples(prompts), "other_prompt": torch.arange(4), "tuned": changed(model),
    }  # fmt: skip


def changed(model: interp.HookedTransformer) -> interp.HookedTransformer:
    """A copy with other weights everywhere."""
    network = copy.deepcopy(model.transformer)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1.1)
    return interp.HookedTransformer(network)


@over("name", ANALYSES)
def test_every_line_of_a_table_of_costs_is_read(name: str) -> None:
    lines = sum(
        len(table.split("\n\n")[0].splitlines())
        for table in TEXTS[name].split(f"{HEAD}\n|---|---|---|\n")[1:]
    )
    assert lines == sum(f"analyses/{page}" == name for page, *_ in STATED)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids=str)
@over("line", STATED)
def test_a_call_takes_the_passes_that_its_page_states(line: tuple[str, ...], size: dict[str, int]) -> None:
    _, call, *formulas = line
    names = given(*size.values())
    with warnings.catch_warnings(action="ignore"), counted() as seen:
        eval(call, names)
    whole = ROWS * size["T"] * size["L"]
    stated = [eval(formula, {**size}) for formula in formulas]
    assert [seen.forward / whole, seen.backward / whole] == pytest.approx(stated, abs=1e-9)
