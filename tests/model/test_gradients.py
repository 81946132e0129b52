"""Gradients as values: at every site against differences, at all sites at once, and against autograd's own."""

import pytest
import torch
from torch import Tensor

from interp.model import Edit, Read, Tap, sites
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.loops import over
from tests.model.observed import noise, plain_logits, site_of_each_row
from tests.tolerances import assert_close

Z, PRE, POST = "blocks.0.attn.hook_z", "blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"


def double(x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.parametrize("name", CONFIGS)
@over("site", site_of_each_row)
def test_gradient_equals_the_effect_of_a_small_edit(name: str, site: str) -> None:
    """Oracle: a central difference made with edits alone, along random steps that all raise the metric."""
    model, weight, step = build(name), noise(plain_logits(name)), 1e-6
    read = Read(site, grad=True)
    tap = Tap([read])
    (gradient,) = torch.autograd.grad((model(some_tokens(), tap) * weight).sum(), tap.live[read])

    direction = torch.where(gradient < 0, -noise(gradient).abs(), noise(gradient).abs())

    def metric(t: float) -> Tensor:
        moved = Edit(site, lambda x: x + t * direction)
        return (model(some_tokens(), Tap(edits=[moved])) * weight).sum()

    slope = (metric(step) - metric(-step)) / (2 * step)
    assert abs(slope) > 1e-3, "the direction is blind"
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_one_pass_equal_those_of_separate_passes(name: str) -> None:
    model, weight = build(name), noise(plain_logits(name))
    tap = Tap([Read(site, grad=True) for site in sites.names(CONFIGS[name]) if "blocks.1" not in site])
    metric = (model(some_tokens(), tap) * weight).sum()
    together = torch.autograd.grad(metric, [tap.live[read] for read in tap.reads])
    for read, gradient in zip(tap.reads, together, strict=True):
        alone = Tap([read])
        metric = (model(some_tokens(), alone) * weight).sum()
        (expected,) = torch.autograd.grad(metric, alone.live[read])
        assert_close(gradient, expected)


def test_gradient_at_the_embedding_scatters_into_autograds_weight_gradient() -> None:
    model, tokens = perturbed(CONFIGS["gpt2"]).requires_grad_(True), some_tokens()
    read = Read("hook_embed", grad=True)
    tap = Tap([read])
    metric = model(tokens, tap).square().mean()
    at_site, at_weight = torch.autograd.grad(metric, [tap.live[read], model.embed.weight])
    scattered = torch.zeros_like(at_weight).index_add(0, tokens.flatten(), at_site.flatten(0, 1))
    assert_close(scattered, at_weight)


def test_gradient_of_z_gives_autograds_gradient_of_the_output_weight() -> None:
    """d loss / d W_O[d, (h e)] = sum over b p of d loss / d attn_out[b p d] * z[b p h e]."""
    model, tokens = perturbed(CONFIGS["gpt2"]).requires_grad_(True), some_tokens()
    z, out = Read(Z), Read("blocks.0.hook_attn_out", grad=True)
    tap = Tap([z, out])
    metric = model(tokens, tap).square().mean()
    delta, expected = torch.autograd.grad(metric, [tap.live[out], model.blocks[0].attn.out.weight])
    assert_close(torch.einsum("bpd,bpc->dc", delta, tap.values[z].flatten(2)), expected)


def test_gradients_need_no_gradient_of_any_parameter_and_write_none() -> None:
    model = perturbed(CONFIGS["gpt2"])
    tap = Tap([Read(PRE, grad=True)])
    metric = model(some_tokens(), tap).sum()
    torch.autograd.grad(metric, tap.live[tap.reads[0]])
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())


def test_gradient_at_an_edited_site_is_that_of_the_new_value() -> None:
    model, tokens = build("gpt2"), some_tokens()
    plain, edited = Tap([Read(POST, grad=True)]), Tap([Read(POST, grad=True)], [Edit(POST, double)])
    model(tokens, plain)
    model(tokens, edited)
    assert_close(edited.live[Read(POST, grad=True)], 2 * plain.live[Read(POST, grad=True)])


def test_gradients_under_no_grad_are_refused() -> None:
    with torch.no_grad(), pytest.raises(ValueError, match=r"requires gradients.*no_grad"):
        build("gpt2")(some_tokens(), Tap([Read(PRE, grad=True)]))
