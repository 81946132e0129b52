"""A mixer and a form of block that the package has never heard of: defined here, and everything knows what to do."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.causal.graph import EdgeGraph
from interp.compat.hooked_export import to_hooked_state
from interp.families import load
from interp.model import Edit, ModelConfig, Read, Softmax, Tap, UsualBlock, Weights, sites
from interp.model.attention import Attention, Mask, PassState, attend_scores, picked
from interp.model.records import Mixer, Traits, require
from interp.model.sites import Site
from interp.model.tap import Scope, at
from interp.runs.tensor_parallel import check_tensor_parallel
from tests.configs import CONFIGS, perturbed, some_tokens
from tests.model.test_kv_cache import in_steps
from tests.tolerances import assert_close


@dataclass(frozen=True)
class Uniform(Mixer):
    """The mean of what a token sees, times a number."""

    loudness: float = 2.0

    traits = Traits(scaled=False, scored=True, distribution=True, additive=False)
    own_sites = (
        Site("attn.hook_loud_v", "b k h e", "values times a number", before="attn.hook_attn_scores"),
    )

    def build(self, config: ModelConfig, layer: int) -> Attention:
        return UniformAttention(config, layer)


class UniformAttention(Attention):
    def _mix(
        self,
        q: Float[Tensor, "b p h e"],
        k: Float[Tensor, "b p g e"],
        v: Float[Tensor, "b p g e"],
        mask: Mask,
        shared: PassState,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b n h e"]:
        n, n_heads = q.shape[1:3]
        if shared.cache is not None:
            k, v = shared.cache.append(self.layer, k, v)
        if only is not None:
            mask, q = mask.queries(only, n, k.shape[1]), picked(q, only)
        v = at(tap, "attn.hook_loud_v", 2 * v.repeat_interleave(n_heads // v.shape[2], 2))
        scores = q.new_zeros(len(q), n_heads, q.shape[1], k.shape[1])
        return attend_scores(scores, v.transpose(1, 2), mask, tap).transpose(1, 2)


@dataclass(frozen=True)
class Deep(UsualBlock):
    """What sublayers add is divided by the root of twice the depth."""

    unusual = "divides what its sublayers add"

    def factor(self, sublayer: str, config: ModelConfig) -> float:
        return (2 * config.n_layers) ** -0.5


MIXED = replace(CONFIGS["gpt2"], mixer=(Uniform(), Softmax()), d_head=10, n_kv_heads=2)
DEEP = replace(CONFIGS["gpt2"], block=Deep())


@pytest.mark.parametrize("config", [MIXED, DEEP])
def test_files_with_a_record_of_ones_own_are_read(config: ModelConfig, tmp_path: Path) -> None:
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    model = perturbed(config, torch.float32)
    load.save(model, tmp_path / "model")
    again = load.from_folder(tmp_path / "model")
    assert again.config == config
    assert torch.equal(again(some_tokens()), model(some_tokens()))


def test_sites_of_ones_own_stand_in_their_layers_and_are_read_and_edited() -> None:
    model, tokens, site = perturbed(MIXED), some_tokens(), "blocks.0.attn.hook_loud_v"
    names = sites.names(MIXED)
    assert names.index(site) == names.index("blocks.0.attn.hook_attn_scores") - 1
    assert "blocks.1.attn.hook_loud_v" not in names
    with pytest.raises(KeyError, match="values times a number"):
        sites.find("blocks.1.attn.hook_loud_v", MIXED)
    tap = Tap([Read(name) for name in names])
    assert_close(model(tokens, tap), model(tokens))
    values = {read.site: value for read, value in tap.values.items()}
    assert_close(values[site], 2 * values["blocks.0.attn.hook_v"].repeat_interleave(2, 2))
    assert_close(in_steps(model, tokens, [4, 5]), model(tokens))
    edited = model(tokens, Tap(edits=[Edit(site, lambda v: v / 2, at={"head": 0})]))
    assert float((edited - model(tokens)).abs().max()) > 1e-3
    assert_close(model(tokens, logits_at=torch.tensor([[8]] * 3))[:, 0], model(tokens)[:, -1])


def test_a_site_that_stands_nowhere_is_refused() -> None:
    @dataclass(frozen=True)
    class Lost(Uniform):
        def sites(self, config: ModelConfig) -> tuple[Site, ...]:
            return (Site("attn.hook_lost", "b p d", "nothing", before="attn.hook_patern"),)

    with pytest.raises(
        ValueError, match=r"attn.hook_lost must stand before a row.*nearest: attn.hook_pattern"
    ):
        sites.names(replace(MIXED, mixer=Lost()))


def test_the_mean_is_the_mean() -> None:
    model, tokens = perturbed(MIXED), some_tokens()
    tap = Tap([v := Read("blocks.0.attn.hook_v"), z := Read("blocks.0.attn.hook_z")])
    model(tokens, tap)
    mean = tap.values[v].cumsum(1) / torch.arange(1, 10)[:, None, None]
    assert_close(tap.values[z], 2 * mean.repeat_interleave(2, 2))


def test_analyses_ask_its_traits() -> None:
    model = HookedTransformer(perturbed(MIXED))
    answer, wrong = torch.tensor([3, 14, 7]), torch.tensor([5, 1, 30])
    found = interp.attribute(model, some_tokens(), answer, wrong, parts="head")
    last, rows = model.transformer(some_tokens())[:, -1], torch.arange(3)
    assert_close(torch.tensor(found.value.sum("part").values), last[rows, answer] - last[rows, wrong])
    with pytest.raises(AttributeError, match="no QK circuit: it mixes positions by Uniform"):
        _ = Weights(model.transformer).QK
    with pytest.raises(ValueError, match=r"Uniform(.*) has a pattern, but a norm or a gate stands"):
        require("additive", MIXED.mixers, "this")
    with pytest.raises(ValueError, match="no window under Uniform"):
        replace(MIXED, window=3)
    for config in (MIXED, DEEP):
        with pytest.raises(ValueError, match="cannot express"):
            to_hooked_state(perturbed(config))
        with pytest.raises(ValueError, match=r"Uniform|Deep"):
            check_tensor_parallel(config, 2)


def test_form_of_block_scales_what_is_added_and_refuses_in_its_words() -> None:
    model = perturbed(DEEP)
    scaled = perturbed(replace(CONFIGS["gpt2"], residual_scale=0.5))
    scaled.load_state_dict(model.state_dict())
    assert_close(model(some_tokens()), scaled(some_tokens()))
    with pytest.raises(ValueError, match="this model divides what its sublayers add"):
        EdgeGraph.of(DEEP)
