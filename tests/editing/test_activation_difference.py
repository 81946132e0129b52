"""The mean difference of two streams: its lengths by the plain formula, the tokens of a direction that was added."""

import numpy as np
import pytest
import torch
from torch import Tensor

import interp
from interp import Edit, Read
from interp.editing import activation_difference
from interp.edits import Add
from interp.model import Transformer, Weights
from tests.configs import build, some_tokens
from tests.editing.test_difference import other, ragged
from tests.loops import over
from tests.tiny import hooked

LENGTHS = (9, 6, 4)


def stream(network: Transformer, tokens: Tensor, depth: int) -> Tensor:
    """What enters a block, or leaves the last, `[pos, d]`."""
    last = "hook_normalized_resid_post" if network.config.norms_sum else "hook_resid_post"
    read = Read("blocks.0.hook_resid_pre" if depth == 0 else f"blocks.{depth - 1}.{last}")
    return interp.observe(network, tokens[None], [read]).trace[read][0]


@over("pos", ["last", "all"])
@over("name", ["gpt2", "llama-gqa", "post-norm"])
def test_lengths_are_those_of_the_streams_row_by_row(pos: str, name: str) -> None:
    found = activation_difference(build(name), ragged(), other(name), pos=pos, top=3)  # type: ignore[arg-type]
    for depth in range(3):
        steps, lengths, relative = [], [], []
        for row, n in zip(ragged().tokens, LENGTHS, strict=True):
            own, its = (stream(network, row[:n], depth) for network in (build(name), other(name)))
            kept = slice(n - 1, n) if pos == "last" else slice(None)
            step = (its - own)[kept]
            steps.append(step.mean(0))
            lengths.append(step.norm(dim=-1).mean())
            relative.append((step.norm(dim=-1) / own[kept].norm(dim=-1)).mean())
        mean = torch.stack(steps).mean(0)
        cell = found.isel(depth=depth)
        np.testing.assert_allclose(cell.value.sel(score="relative"), torch.stack(relative).mean(), rtol=1e-9)
        length = torch.stack(lengths).mean()
        np.testing.assert_allclose(cell.value.sel(score="common"), mean.norm() / length, rtol=1e-9)
        null = torch.stack(steps).square().sum(-1).mean().div(3).sqrt() / length
        np.testing.assert_allclose(cell.null.sel(score="common"), null, rtol=1e-9)
        listed = interp.weights.directions(build(name), mean, top=3)
        np.testing.assert_allclose(cell.logits, listed.value[0], rtol=1e-9)
        assert (cell.token.values == listed.token[0].values).all()


def test_a_direction_that_was_added_is_read_as_its_token_from_its_layer_on() -> None:
    model, token = hooked(), 40
    direction = Weights(model.transformer).W_U[:, token]
    tuned = model.edited(Edit("L1.resid", Add(5 * direction / direction.norm())))
    found = activation_difference(model, ["The cat sat on the mat", "The dog sat"], tuned, top=1)
    assert found.value.sel(depth="L0.resid", score="relative") == 0
    after = found.sel(depth="L1.resid")
    assert float(after.value.sel(score="common")) == pytest.approx(1, abs=1e-9)
    scores = interp.weights.directions(model, direction, top=1)
    assert int(after.token_id.sel(end="top", rank=0)) == int(
        scores.token_id.sel(direction=0, end="top", rank=0)
    )


def test_without_a_difference_there_is_nothing_common() -> None:
    found = activation_difference(build("gpt2"), some_tokens(5, 4), build("gpt2"), top=1)
    assert bool((found.value.sel(score="relative") == 0).all())
    assert bool(found.value.sel(score="common").isnull().all())


def test_models_that_are_not_alike_are_refused_by_what_differs() -> None:
    with pytest.raises(ValueError, match="two models of one config are required"):
        activation_difference(build("gpt2"), some_tokens(), build("llama-gqa"))
    with pytest.raises(ValueError, match="top must be in"):
        activation_difference(build("gpt2"), some_tokens(), other("gpt2"), top=1000)
