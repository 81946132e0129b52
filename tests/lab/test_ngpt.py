"""Blocks of nGPT against the equations of Loshchilov et al. 2024, with unit vectors as there."""

import json
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.lab import NGPT
from interp.lab.ngpt import _Step, _Turn
from interp.model import LayerNorm, ModelConfig, RMSNorm, Transformer, mean_next_token_loss
from interp.passes.sweep import Sweep
from tests.configs import CONFIGS, build, empty_cache, perturbed, some_tokens
from tests.passes.test_sweep import DIFFERENCE, asked, cells, loop
from tests.tolerances import assert_close

CONFIG = replace(CONFIGS["ngpt"], norm=RMSNorm(eps=0.0))


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def test_a_sublayer_turns_the_unit_stream_by_alpha() -> None:
    """h <- Norm(h + alpha (Norm(f(h)) - h)), equations 10 and 11, from the recorded outputs of attention and MLP."""
    network = perturbed(CONFIG)
    _, cache = HookedTransformer(network).run_with_cache(some_tokens())
    for layer in range(2):
        block, at = network.block(layer), f"blocks.{layer}."
        attended, fed = (
            block.attn.out(cache[at + "attn.hook_z"].flatten(-2)),
            block.mlp.out(cache["post", layer]),
        )
        streams = [
            cache[at + s] / 24**0.5
            for s in ("hook_resid_pre", "ln1.hook_normalized", "hook_normalized_resid_post")
        ]
        for norm, out, h, after in zip(
            (block.ln1, block.ln2), (attended, fed), streams, streams[1:], strict=False
        ):
            alpha = torch.sigmoid(norm.weight)
            assert_close(unit(h + alpha * (unit(out) - h)), after)


def test_the_stream_is_the_sum_of_what_is_written_to_it() -> None:
    _, cache = HookedTransformer(perturbed(CONFIG)).run_with_cache(some_tokens())
    assert_close(cache["resid_mid", 0], cache["resid_pre", 0] + cache["attn_out", 0])
    assert_close(cache["resid_post", 1], cache["blocks.1.ln1.hook_normalized"] + cache["mlp_out", 1])
    for parts in ("sublayer", "head", "neuron"):
        result = interp.attribute(HookedTransformer(perturbed(CONFIG)), some_tokens(), 3, 4, parts=parts)
        assert result.attrs["completeness_error"] < 1e-12


@pytest.mark.parametrize("rate", [0.05, 0.4])
def test_a_new_model_turns_by_its_rate(rate: float) -> None:
    block = Transformer(replace(CONFIG, block=NGPT(rate))).block(0)
    assert_close(torch.sigmoid(block.ln1.weight), torch.full((24,), rate))
    assert_close(block.ln2.gamma, torch.full((24,), 1 - rate))
    assert_close(block.ln2_post.gamma, torch.full((24,), rate / (1 - rate)))


def test_derivatives_of_the_norms_are_their_jacobians_transposed() -> None:
    generator = torch.Generator().manual_seed(0)
    turn = _Turn(RMSNorm(trained="nothing"), 6, "n", 0.3).double().requires_grad_(False)
    turn.weight += torch.randn(6, generator=generator)
    x, gradient = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    for norm in (turn, _Step(turn.kind, "m", turn)):
        jacobian = torch.autograd.functional.jacobian(norm, x)
        assert_close(norm.gradient(gradient, x), gradient @ jacobian)
        scale = norm.scale(x)
        assert_close(norm.linear(x, scale), norm(x))
        given = torch.autograd.functional.jacobian(lambda v, norm=norm, scale=scale: norm.linear(v, scale), x)
        assert_close(norm.pull_back(gradient, scale), gradient @ given)
        assert (norm.pull_back(gradient, scale) - gradient @ jacobian).abs().max() > 1e-2


def test_alpha_is_stored_once_and_every_parameter_is_trained() -> None:
    torch.manual_seed(0)
    model, tokens = Transformer(CONFIG).double(), some_tokens()
    assert [name for name in model.state_dict() if "ln" in name and "blocks.1" in name] == [
        "blocks.1.ln1.weight", "blocks.1.ln2.weight",
    ]  # fmt: skip
    before, losses = deepcopy(model.state_dict()), []
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        loss = mean_next_token_loss(model(tokens), tokens)
        losses.append(float(loss.detach()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[1] < losses[0]
    assert [name for name, value in model.state_dict().items() if torch.equal(value, before[name])] == []


def test_a_copy_has_steps_of_its_own() -> None:
    model = perturbed(CONFIG)
    other = deepcopy(model)
    other.block(0).ln1.weight.data.zero_()
    assert_close(other.block(0).ln1_post.gamma, torch.ones(24, dtype=torch.float64))
    assert not torch.allclose(model.block(0).ln1_post.gamma, other.block(0).ln1_post.gamma)


def test_generation_from_a_cache_and_sweeps_give_the_numbers_of_whole_passes() -> None:
    model, tokens = build("ngpt"), some_tokens()
    cache = empty_cache(model, len(tokens))
    assert_close(torch.cat([model(part, cache=cache) for part in tokens.split(4, 1)], 1), model(tokens))
    batch = asked()
    for site in ("hook_attn_out", "hook_resid_mid", "ln1.hook_normalized", "hook_normalized_resid_post"):
        variants = cells(model, batch, f"blocks.0.{site}")[-6:]
        assert_close(Sweep(model, batch, variants).run(DIFFERENCE).values, loop(model, batch, variants))


def test_the_config_survives_json() -> None:
    assert ModelConfig.from_dict(json.loads(json.dumps(CONFIG.to_dict()))) == CONFIG


@pytest.mark.parametrize("change", [{"norm_place": "post"}, {"norm": LayerNorm()}, {"cross_attention": True}])
def test_blocks_that_are_none_of_ngpt_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="nGPT"):
        replace(CONFIG, **({"qk_norm": None} | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1])
def test_a_rate_that_is_no_share_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="0 < rate < 1"):
        NGPT(rate)
