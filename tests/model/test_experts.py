"""Mixtures of experts: what is computed, what is chosen, what edits and gradients of the router mean."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from interp.model import MLP, Edit, MoE, Read, Router, Tap, sites
from interp.model.experts import ExpertGroups, Experts
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.loops import over
from tests.model.observed import everything, noise, plain_logits
from tests.model.slow import slow_expert
from tests.tolerances import assert_close

MIXTURES = [name for name, config in CONFIGS.items() if isinstance(config.mlp, MoE)]
EVERY = pytest.mark.parametrize("name", MIXTURES)
PLAIN = pytest.mark.parametrize("name", ["gpt-oss", "granite-moe"])
"""Those whose largest logits are always those of the chosen experts; `slow` says what the other routers choose."""
LOGITS, WEIGHTS, OUT = (
    f"blocks.1.mlp.hook_{part}" for part in ("router_logits", "expert_weights", "expert_out")
)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Which expert is computed on how many tokens, call by call."""
    calls: list[tuple[int, int]] = []
    plain, grouped = Experts.expert, Experts._grouped

    def expert(self: Experts, i: int, x: Tensor) -> Tensor:
        calls.append((i, x[..., 0].numel()))
        return plain(self, i, x)

    def together(self: Experts, x: Tensor, weight: Tensor, groups: ExpertGroups) -> Tensor:
        assert len(x) == sum(groups.sizes)
        calls.extend((i, size) for i, size in enumerate(groups.sizes) if size)
        return grouped(self, x, weight, groups)

    with monkeypatch.context() as patch:
        patch.setattr(Experts, "expert", expert)
        patch.setattr(Experts, "_grouped", together)
        yield calls


def looped(experts: Experts, x: Tensor, weights: Tensor) -> Tensor:
    """The sum over the chosen experts, one after the other."""
    flat, shares = x.flatten(0, 1), weights.flatten(0, 1)
    out = torch.zeros_like(flat)
    for i in range(experts.kind.n_experts):
        rows = shares[:, i].nonzero()[:, 0]
        out = out.index_add(0, rows, experts._weighted(i, flat[rows], shares[rows, i, None]).to(out.dtype))
    return out.view_as(x)


GROUPED = {
    "plain": MoE(16, 4, 32),
    "biased": MoE(16, 4, 32, bias=True),
    "one of few": MoE(3, 1, 32),
    "wide router": MoE(16, 4, 32, router=Router(wide=True)),
    "odd widths": MoE(16, 4, 33),
    "inputs weighed": MoE(16, 4, 32, router=Router("sigmoid", weighs="input")),
}


def experts_of(moe: MoE) -> Experts:
    """Its module, with noise for weights, in float32."""
    generator = torch.Generator().manual_seed(0)
    experts = Experts(moe, 48).requires_grad_(False)
    for parameter in experts.parameters():
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return experts


def kind(name: str) -> MoE:
    found = CONFIGS[name].mlp
    assert isinstance(found, MoE)
    return found


def only(first: int) -> Edit:
    """Router logits under which every token chooses the experts from `first` on, in cyclic order."""

    def route(logits: Tensor) -> Tensor:
        n = logits.shape[-1]
        order = torch.tensor([-float((x - first) % n) for x in range(n)], dtype=logits.dtype)
        return 5.0 * order.expand_as(logits).clone()

    return Edit(LOGITS, route)


# --- what is computed ---------------------------------------------------------------------------------------------


@EVERY
def test_an_expert_is_computed_on_the_tokens_that_chose_it_and_no_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted(monkeypatch) as calls:
        build(name)(some_tokens())
    weights = torch.stack([everything(name)[f"blocks.{layer}.mlp.hook_expert_weights"] for layer in (0, 1)])
    chosen = [(x, n) for layer in weights for x, n in enumerate((layer != 0).sum((0, 1)).tolist()) if n]
    assert calls == chosen
    assert sum(n for _, n in calls) == 2 * 27 * kind(name).top_k


@PLAIN
def test_expert_that_no_token_chose_is_computed_only_if_observed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = sorted((1 + i) % kind(name).n_experts for i in range(kind(name).top_k))
    resid = build(name)(some_tokens(), stop=1)
    with counted(monkeypatch) as calls:
        build(name)(resid, Tap(edits=[only(1)]), start=1)
    assert calls == [(x, 27) for x in used]
    with counted(monkeypatch) as calls:
        build(name)(resid, Tap([Read(OUT)], [only(1)]), start=1)
    assert calls == [(x, 27) for x in range(kind(name).n_experts)]


@over("case", GROUPED)
@pytest.mark.parametrize("shape", [(3, 17), (1, 1)])
def test_experts_computed_together_give_what_one_after_the_other_gives(
    case: str, shape: tuple[int, int]
) -> None:
    """Also where somebody differentiates, which torch's kernel for groups is not asked to."""
    experts = experts_of(GROUPED[case])
    x = torch.randn(*shape, 48, generator=torch.Generator().manual_seed(1))
    weights = experts.weights(experts.logits(x))
    expected = looped(experts, x, weights)
    assert_close(experts(x), expected)
    assert experts(x[:, :0]).shape == (shape[0], 0, 48)
    experts.requires_grad_(True)
    parameters = [experts.into, experts.out]
    assert_close(experts(x), expected)
    found = torch.autograd.grad(experts(x).square().sum(), parameters)
    slow = torch.autograd.grad(looped(experts, x, weights).square().sum(), parameters)
    for one, other in zip(found, slow, strict=True):
        assert_close(one, other)


def test_nobody_waits_for_the_choice_of_experts() -> None:
    """Tensors without values stop at whatever asks for one, as a device does."""
    several = [
        experts_of(GROUPED[case]).to(torch.bfloat16)
        for case in ("plain", "biased", "wide router", "inputs weighed")
    ]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        x = torch.empty(2, 5, 48, dtype=torch.bfloat16)
        for experts in several:
            assert experts(x).shape == x.shape


def test_a_choice_needs_numbers() -> None:
    """So that a plan made from shapes alone says that it has none (`runs.memory`)."""
    for case in ("plain", "odd widths"):
        with pytest.raises(NotImplementedError):
            experts_of(GROUPED[case]).to("meta")(torch.empty(1, 3, 48, device="meta"))


# --- what is chosen -----------------------------------------------------------------------------------------------


@PLAIN
def test_chosen_experts_alone_have_weights_and_renormalised_sum_to_one(name: str) -> None:
    weights, logits = everything(name)[WEIGHTS], everything(name)[LOGITS]
    assert ((weights != 0).sum(-1) == kind(name).top_k).all()
    assert_close(logits.masked_fill(weights == 0, -torch.inf).amax(-1), logits.amax(-1))
    share = logits.exp() * (weights != 0)
    whole = share if kind(name).renormalise else logits.exp()
    assert_close(weights, share / whole.sum(-1, keepdim=True))
    assert bool((weights.sum(-1) < 1 - 1e-6).all()) is not kind(name).renormalise
    assert len((weights != 0).flatten(0, 1).unique(dim=0)) > 1, "all tokens choose alike"


@PLAIN
def test_router_edit_changes_the_choice_and_the_output_is_that_experts(name: str) -> None:
    """Oracle: the experts chosen by the edit, one token at a time."""
    moe, model = kind(name), build(name)
    parameters = dict(model.named_parameters())
    for first in range(moe.n_experts):
        out = Read("blocks.1.hook_mlp_out")
        normed = Read("blocks.1.ln2.hook_normalized")
        tap = Tap([out, Read(WEIGHTS), normed], [only(first)])
        model(some_tokens(), tap)
        weights = tap.values[Read(WEIGHTS)][0, 0]
        used = [(first + i) % moe.n_experts for i in range(moe.top_k)]
        assert (weights != 0).nonzero()[:, 0].tolist() == sorted(used)
        x = tap.values[normed][2, 4]
        mixture = sum(weights[e] * slow_expert(parameters, "blocks.1.mlp", moe, e, x) for e in used)
        assert_close(tap.values[out][2, 4], mixture * CONFIGS[name].residual_scale)


@EVERY
def test_weighted_outputs_of_the_experts_sum_to_what_the_mixture_adds(name: str) -> None:
    for layer in (0, 1):
        outs = everything(name)[f"blocks.{layer}.mlp.hook_expert_out"]
        weights = everything(name)[f"blocks.{layer}.mlp.hook_expert_weights"]
        shared = everything(name).get(f"blocks.{layer}.mlp.hook_shared_out", 0)
        added = (outs.sum(2) + shared) * CONFIGS[name].residual_scale
        assert_close(added, everything(name)[f"blocks.{layer}.hook_mlp_out"])
        assert (outs[weights == 0] == 0).all() and (outs[weights != 0] != 0).any(-1).all()


@PLAIN
def test_a_weight_may_be_given_to_an_expert_that_was_not_chosen(name: str) -> None:
    """Weights are edited after the choice: every expert with a weight takes part."""
    moe, model = kind(name), build(name)
    normed, out = Read("blocks.1.ln2.hook_normalized"), Read("blocks.1.hook_mlp_out")
    even = Edit(WEIGHTS, lambda weights: torch.full_like(weights, 0.25))
    tap = Tap([normed, out], [even])
    model(some_tokens(), tap)
    parameters, x = dict(model.named_parameters()), tap.values[normed][1, 3]
    mixture = sum(0.25 * slow_expert(parameters, "blocks.1.mlp", moe, e, x) for e in range(moe.n_experts))
    assert_close(tap.values[out][1, 3], mixture * CONFIGS[name].residual_scale)


# --- gradients ----------------------------------------------------------------------------------------------------


@EVERY
def test_gradient_at_every_weight_is_a_finite_difference_even_if_unchosen(name: str) -> None:
    model, direction, step = build(name), noise(plain_logits(name)), 1e-6
    read = Read(WEIGHTS, grad=True)
    tap = Tap([read])
    (gradient,) = torch.autograd.grad((model(some_tokens(), tap) * direction).sum(), tap.live[read])
    unchosen = everything(name)[WEIGHTS] == 0
    squared = kind(name).router.weighs == "input"  # twice a factor of both branches: flat at a weight of 0
    assert ((gradient[unchosen] == 0) == squared).all()

    def metric(x: int, by: float) -> Tensor:
        def change(weights: Tensor) -> Tensor:
            weights[1, 4, x] += by
            return weights

        return (model(some_tokens(), Tap(edits=[Edit(WEIGHTS, change)])) * direction).sum()

    for x in range(kind(name).n_experts):
        slope = (metric(x, step) - metric(x, -step)) / (2 * step)
        torch.testing.assert_close(gradient[1, 4, x], slope, rtol=1e-5, atol=1e-6)


@EVERY
def test_gradients_of_parameters_are_those_of_the_dense_sum(name: str) -> None:
    """The sparse sum over chosen rows and the dense one over all experts are one function of the parameters."""
    model = build(name)
    mlp = model.blocks[1].mlp
    assert isinstance(mlp, Experts)
    x = everything(name)["blocks.1.ln2.hook_normalized"]
    parameters = [
        p for part, p in mlp.named_parameters() if part != "correction"
    ]  # which the choice alone sees
    for parameter in parameters:
        parameter.requires_grad_(True)
    weights = mlp.weights(mlp.logits(x))
    inside = kind(name).router.weighs == "input"
    every = [(e, weights[..., e, None]) for e in range(kind(name).n_experts)]
    dense = sum(mlp.expert(e, x * weight) if inside else weight * mlp.expert(e, x) for e, weight in every)
    if mlp.shared is not None:
        dense = dense + mlp.shared(x) * (1 if mlp.shared_gate is None else mlp.shared_gate(x).sigmoid())
    try:
        found = torch.autograd.grad((mlp(x) * noise(x)).sum(), parameters)
        expected = torch.autograd.grad((dense * noise(x)).sum(), parameters)  # type: ignore[union-attr]
    finally:
        mlp.requires_grad_(False)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


# --- routers ------------------------------------------------------------------------------------------------------


def test_layers_with_a_dense_mlp_and_with_experts_have_their_own_sites() -> None:
    dense = MLP(9, "silu", gated=True, bias=False)
    config = replace(CONFIGS["glm4-moe"], mlp=replace(kind("glm4-moe"), dense=dense, dense_layers=(1,)))
    first, second = (
        {n.split(".", 2)[2] for n in sites.names(config) if f"blocks.{i}.mlp" in n} for i in (0, 1)
    )
    assert "mlp.hook_router_logits" in first and "mlp.hook_pre" not in first
    assert second == {"mlp.hook_pre", "mlp.hook_pre_linear", "mlp.hook_post"}
    model = perturbed(config)
    reads = [Read(name) for name in sites.names(config, on_demand=True)]
    tap = Tap(reads)
    assert_close(model(some_tokens(), tap), model(some_tokens()))
    assert tap.values[Read("blocks.1.mlp.hook_post")].shape[-1] == 9


CONTRADICTIONS = {
    "groups that do not divide": ({"router": Router(groups=4, top_groups=2)}, "groups that divide 6 experts"),
    "groups too small": ({"router": Router(groups=6, top_groups=6, best=2)}, "hold 2 each"),
    "too few in the groups": ({"top_k": 3, "router": Router(groups=3)}, "and 3 in 1 of them"),
    "a bias without an input": (
        {"bias": True, "router": Router("sigmoid", weighs="input")},
        "without biases",
    ),
    "a gate of no shared expert": ({"shared_gate": True}, "a shared expert for shared_gate"),
    "dense layers of nothing": ({"dense_layers": (0,)}, "a dense MLP for dense_layers"),
}


@over("case", CONTRADICTIONS)
def test_mixtures_that_contradict_themselves_are_refused(case: str) -> None:
    changes, message = CONTRADICTIONS[case]
    with pytest.raises(ValueError, match=message):
        replace(MoE(6, 2, 10), **changes)  # type: ignore[arg-type]
