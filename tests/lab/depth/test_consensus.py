"""Consensus: the angles of a model's tokens by depth against a slow loop."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from interp import Batch, Edit, HookedTransformer
from interp.edits import Add
from interp.lab.depth import consensus
from interp.lab.depth.consensus import ANGLES
from interp.model import Read, Tap, Transformer
from interp.passes import observe
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.tolerances import student95


def _put(x: Tensor, _: Tensor) -> Tensor:
    return x


def slow_streams(model: Transformer, tokens: Tensor, repeats: int) -> list[Tensor]:
    """The stream entering the first block and after every block, the stack applied `repeats` times."""
    config = model.config
    last = "normalized_resid_post" if config.norms_sum else "resid_post"
    sites = ["blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_{last}" for i in range(config.n_layers))]
    tap = Tap([Read(site) for site in sites])
    model(tokens, tap)
    found = [tap.values[read] for read in tap.reads]
    for _ in range(repeats - 1):
        again = Tap([Read(site) for site in sites], [Edit(sites[0], partial(_put, found[-1]))])
        model(tokens, again)
        found += [again.values[read] for read in again.reads][1:]
    return found


def slow_angles(x: np.ndarray, start: np.ndarray) -> list[float]:
    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    pairs = [cosine(a, b) for a, b in itertools.combinations(x, 2)]
    return [
        min(pairs), float(np.mean(pairs)),
        float(np.mean([cosine(a, x[0]) for a in x[1:]])), float(np.mean([cosine(a, start) for a in x[1:]])),
        float(np.mean([np.linalg.norm(a - x[0]) for a in x[1:]])), float(np.mean(np.linalg.norm(x, axis=1))),
    ]  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_angles_by_depth_are_those_of_a_slow_loop(name: str) -> None:
    network, rows = build(name), some_tokens(rows=2)
    found = consensus(HookedTransformer(network), rows, repeats=2)
    assert found.sizes["depth"] == 2 * network.config.n_layers + 1
    streams = [slow_streams(network, row[None], 2) for row in rows]
    for depth in range(found.sizes["depth"]):
        each = [slow_angles(s[depth][0].numpy(), s[0][0, 0].numpy()) for s in streams]
        for name_, expected in zip(ANGLES, np.mean(each, 0), strict=True):
            assert float(found.value.sel(score=name_)[depth]) == pytest.approx(
                expected, rel=1e-8, abs=1e-9
            ), name_


def test_one_block_iterated_is_that_block_and_no_other() -> None:
    network, rows = build("llama-gqa"), some_tokens(rows=2)
    found = consensus(HookedTransformer(network), rows, layer=1, repeats=3)
    x = network(rows, stop=1)
    starts = x[:, 0].numpy()
    for depth in range(4):
        each = [slow_angles(r.numpy(), s) for r, s in zip(x, starts, strict=True)]
        expected = np.mean(each, 0)
        np.testing.assert_allclose(found.value[depth].sel(score=list(ANGLES)), expected, rtol=1e-8)
        x = network(x, None, 1, 2)


def test_without_mlps_is_the_model_whose_mlps_write_nothing() -> None:
    network, rows = perturbed(CONFIGS["gpt2"]), some_tokens(rows=2)
    found = consensus(HookedTransformer(network), rows, repeats=2, mlp=False)
    before = consensus(HookedTransformer(network), rows, repeats=2)
    for layer in range(2):
        mlp = network.block(layer).mlp
        assert mlp is not None
        for parameter in mlp.out.parameters():  # type: ignore[union-attr]
            parameter.zero_()
    silent = consensus(HookedTransformer(network), rows, repeats=2)
    for name in ANGLES:
        mine, theirs, whole = (each.value.sel(score=name) for each in (found, silent, before))
        np.testing.assert_allclose(mine, theirs, rtol=1e-10)
        assert not np.allclose(mine[1:], whole[1:])


def test_intervals_are_over_texts() -> None:
    model, rows = HookedTransformer(build("gpt2")), some_tokens(rows=4)
    found = consensus(model, rows, layer=1, repeats=2)
    each = np.stack([consensus(model, row[None], layer=1, repeats=2).value for row in rows])
    half = student95(4) * each.std(0, ddof=1) / 2
    np.testing.assert_allclose(found.high - found.value, half, rtol=1e-6, atol=1e-12)
    assert (found.n == 4).all() and found.unit.sel(score="norm") == "units of the stream"


@pytest.mark.parametrize("layer", [0, 1])
def test_an_edited_model_is_the_one_that_is_applied_again_and_again(layer: int) -> None:
    """The streams of a slow loop with the same edit in every pass; an edit of the stream that enters acts once."""
    network, rows = build("llama-gqa"), some_tokens(rows=2)
    shift = torch.linspace(-1, 1, network.config.d_model, dtype=torch.float64)
    inside = Edit(f"L{layer}.mlp", Add(shift))
    entering = Edit(f"L{layer}.resid", Add(shift))
    for edits, first in (([inside], 0.0), ([entering], shift)):
        found = consensus(HookedTransformer(network).edited(edits), rows, layer=layer, repeats=3)
        site = f"blocks.{layer}.hook_resid_pre"
        x = observe(network, Batch(rows), [Read(site)]).trace[site] + first
        for depth in range(4):
            size = x.norm(dim=-1).mean()
            assert float(found.value.sel(score="norm")[depth]) == pytest.approx(float(size), rel=1e-9)
            put = Edit(site, partial(_put, x))
            again = [edit for edit in edits if edit is inside]
            x = observe(network, Batch(rows), edits=[put, *again], stop=layer + 1).output


def test_what_has_no_meaning_is_refused() -> None:
    plain, bare = HookedTransformer(build("gpt2")), HookedTransformer(build("attention-only"))
    with pytest.raises(IndexError, match="layers are 0 to 1 in this model, got 2"):
        consensus(plain, some_tokens(), layer=2)
    with pytest.raises(ValueError, match="repeats >= 1"):
        consensus(plain, some_tokens(), repeats=0)
    with pytest.raises(ValueError, match="this model is attention-only"):
        consensus(bare, some_tokens(), mlp=False)
    with pytest.raises(ValueError, match="rows of at least two are required"):
        consensus(plain, some_tokens(n=1))
    with pytest.raises(ValueError, match="one text per row"):
        consensus(plain, Batch.packed([[1, 2, 3], [4, 5]], 5))
