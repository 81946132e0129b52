"""Depth as time: a cut stack against the deeper model it is, splitting schemes against matrix exponentials."""

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import interp
from interp import Batch, HookedTransformer
from interp.lab import Macaron
from interp.lab.depth import refinement, splitting
from interp.lab.depth.refinement import SCHEMES, runge_kutta, split
from interp.model import Transformer
from tests.configs import CONFIGS, build, perturbed, some_tokens

LAYERS = 2


def deeper(network: Transformer, times: int) -> Transformer:
    """The model of `times` as many blocks, each adding a share, with each block's weights so often."""
    config = network.config
    deep = Transformer(
        replace(config, n_layers=LAYERS * times, residual_scale=config.residual_scale / times)
    ).double()
    mine = network.state_dict()
    state = dict[str, Tensor]()
    for name in deep.state_dict():
        head, _, rest = name.partition(".")
        if head == "blocks":
            layer, _, inner = rest.partition(".")
            name_here = f"blocks.{int(layer) // times}.{inner}"
        else:
            name_here = name
        state[name] = mine[name_here]
    deep.load_state_dict(state)
    return deep.requires_grad_(False).eval()


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "parallel", "gemma2", "attention-only"])
def test_a_cut_stack_is_the_deeper_model_with_smaller_steps(name: str) -> None:
    config = CONFIGS[name]
    if config.window is not None:
        config = replace(config, window=None, local_layers=None)
    network = perturbed(config)
    model, rows = HookedTransformer(network), some_tokens(rows=2)
    found = refinement(model, rows, times=(1, 3))
    logp = network(rows).log_softmax(-1)
    for times in (1, 3):
        cut = deeper(network, times)(rows).log_softmax(-1)
        kl = (logp.exp() * (logp - cut)).sum(-1).mean()
        assert float(found.value.sel(score="kl", times=times)) == pytest.approx(
            float(kl), rel=1e-7, abs=1e-12
        )
    ends = [deeper(network, times)(rows, stop=LAYERS * times) for times in (1, 3)]
    apart = ((ends[0] - ends[1]).flatten(1).norm(dim=1) / ends[1].flatten(1).norm(dim=1)).mean()
    assert float(found.value.sel(score="distance", times=1)) == pytest.approx(float(apart), rel=1e-8)


def test_the_distance_to_the_flow_halves_as_steps_double() -> None:
    model = HookedTransformer(build("gpt2"))
    found = refinement(model, some_tokens(rows=2), times=(8, 16, 512)).value.sel(score="distance").values
    # of order 1: d(n) ~ 1/n - 1/512
    assert found[0] / found[1] == pytest.approx((1 / 8 - 1 / 512) / (1 / 16 - 1 / 512), rel=0.05)


def linear(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    a, b, x = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return a / 2, b / 2, x


def field(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x @ matrix


def test_schemes_of_linear_fields_are_exponentials_with_orders_of_theory() -> None:
    a, b, x = linear(0)
    exact = x @ torch.linalg.matrix_exp(a + b)
    torch.testing.assert_close(runge_kutta(field(a + b), x, 1.0, 512), exact, rtol=1e-9, atol=1e-9)
    one, orders = torch.eye(4, dtype=torch.float64), {}
    for scheme in SCHEMES:
        errors = []
        for n in (64, 128):
            full, half = (torch.linalg.matrix_exp(m / n) for m in (a, b / 2))
            if scheme in ("block", "Macaron"):
                full, half = one + a / n, one + b / n / 2
            step = {
                "Lie": full @ half @ half, "Strang": half @ full @ half,
                "block": full @ (one + b / n), "Macaron": half @ full @ half,
            }[scheme]  # fmt: skip
            expected = x @ torch.linalg.matrix_power(step, n)
            found = split(scheme, (field(a), field(b)), x, n, 8 * n)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
            errors.append(float((found - exact).norm()))
        orders[scheme] = np.log2(errors[0] / errors[1])
    assert orders == pytest.approx({"Lie": 1, "Strang": 2, "block": 1, "Macaron": 1}, abs=0.05)


def test_fields_that_commute_are_split_without_error() -> None:
    a, _, x = linear(1)
    for scheme in ("Lie", "Strang"):
        found = split(scheme, (field(a), field(a @ a)), x, 1, 256)
        torch.testing.assert_close(found, x @ torch.linalg.matrix_exp(a + a @ a), rtol=1e-8, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2"])
def test_the_block_and_the_macaron_block_are_one_step_of_their_schemes(name: str) -> None:
    """The error of one step is the distance of the real block's output from the reference; Macaron has two MLPs."""
    network = build(name)
    model, rows = HookedTransformer(network), some_tokens(rows=2)
    found = splitting(model, rows, 1, steps=(1, 2), fine=16)
    start, whole = network(rows, stop=1), network(rows, stop=2)

    def added(sublayer: str) -> Callable[[Tensor], Tensor]:
        other = "mlp" if sublayer == "attn" else "attn"

        def of(x: Tensor) -> Tensor:
            silent = interp.Edit(f"L1.{other}", interp.edits.Zero())
            return network.edited(silent)(x, None, 1, 2) - x

        return of

    attention, mlp = added("attn"), added("mlp")
    exact = runge_kutta(lambda x: attention(x) + mlp(x), start, 1.0, 16)

    def apart(x: Tensor) -> float:
        return float(((x - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).mean())

    first = found.value.sel(steps=1)
    assert float(first.sel(scheme="block")) == pytest.approx(apart(whole), rel=1e-7)
    if name != "gemma2":  # whose blocks norm what they add: not a Macaron block of ours
        assert float(first.sel(scheme="Macaron")) == pytest.approx(
            apart(macaron(network)(start, None, 1, 2)), rel=1e-7
        )
    half = start + mlp(start) / 2
    half = half + attention(half)
    assert float(first.sel(scheme="Macaron")) == pytest.approx(apart(half + mlp(half) / 2), rel=1e-7)


def macaron(network: Transformer) -> Transformer:
    """The same model with Macaron blocks whose two MLPs, and their norms, are the MLP of each block."""
    other = Transformer(replace(network.config, block=Macaron())).double()
    state = dict(network.state_dict())
    for name in other.state_dict():
        state.setdefault(
            name, state.get(name.replace("mlp_before", "mlp").replace("ln0", "ln2"), torch.empty(0))
        )
    other.load_state_dict(state)
    return other.requires_grad_(False).eval()


@pytest.mark.slow
def test_the_orders_in_a_model_are_those_of_theory() -> None:
    network = copy.deepcopy(build("gpt2"))
    for block in network.blocks:
        for name in ("attn", "mlp"):
            for parameter in block.get_submodule(name).parameters():
                parameter.mul_(0.5)  # smooth enough for steps of 1/8 to be short
    found = splitting(HookedTransformer(network), some_tokens(rows=2), 0, steps=(8, 16, 32), fine=64)
    orders = found.order.isel(steps=1).to_series().to_dict()
    assert found.attrs["floor"] < float(found.value.min()) / 10
    assert orders == pytest.approx({"Lie": 1, "Strang": 2, "block": 1, "Macaron": 1}, abs=0.1)


@pytest.mark.slow
def test_numbers_do_not_depend_on_padding_or_batches() -> None:
    model, rows = HookedTransformer(build("llama-gqa")), [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]]
    for ask in (
        lambda data: refinement(model, data, times=(1, 2)),
        lambda data: splitting(model, data, 0, fine=8),
    ):
        both = ask(Batch.of(rows)).value
        alone = [ask(torch.tensor([row])).value for row in rows]
        np.testing.assert_allclose(both, (alone[0] + alone[1]) / 2, rtol=1e-7, atol=1e-12)


def test_what_is_no_step_is_refused() -> None:
    plain, tokens = HookedTransformer(build("gpt2")), some_tokens()
    with pytest.raises(ValueError, match="this model norms the sum"):
        refinement(HookedTransformer(build("post-norm")), tokens)
    with pytest.raises(ValueError, match=r"times must be ascending numbers of 1 or more, got \[2, 1\]"):
        refinement(plain, tokens, times=(2, 1))
    with pytest.raises(IndexError, match="layers are 0 to 1 in this model, got 2"):
        splitting(plain, tokens, 2)
    for fine in (12, 0, -8):
        with pytest.raises(ValueError, match="fine must be a multiple of every number of steps"):
            splitting(plain, tokens, 0, fine=fine)
    with pytest.raises(ValueError, match="attention and one MLP"):
        splitting(HookedTransformer(build("attention-only")), tokens, 0)
    with pytest.raises(ValueError, match="one text per row"):
        refinement(plain, Batch.packed([[1, 2, 3], [4, 5]], 5))
