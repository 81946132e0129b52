"""The MLP with a depthwise convolution against a loop over the tokens, and what it is refused for."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.lab import ConvMLP
from interp.lab.conv_mlp import ConvFeedForward
from interp.lenses.factors import present
from interp.model import Edit, Read, Tap, Transformer, Weights
from interp.model.edits import Zero
from interp.runs.tensor_parallel import check_tensor_parallel
from interp.weights.matrices import matrix_place
from tests.configs import empty_cache, perturbed, some_tokens
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.passes.test_sweep import DIFFERENCE, asked
from tests.tolerances import assert_close

NAMES = [name for name, config in MIXERS.items() if isinstance(config.mlp, ConvMLP)]
CAUSAL = pytest.mark.parametrize("name", [name for name in NAMES if MIXERS[name].causal])
EVERY = pytest.mark.parametrize("name", NAMES)
BASE = MIXERS["conv-softmax"]


def seen_in(model: Transformer, tokens: Tensor, *names: str) -> list[Tensor]:
    reads = [Read(name) for name in names]
    tap = Tap(reads)
    model(tokens, tap)
    return [tap.values[read] for read in reads]


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


@over("kernel", [1, 3, 4])
@over("n", [1, 2, 3, 9])
def test_it_is_the_loop(n: int, kernel: int) -> None:
    """Sana's Mix-FFN: 1x1 convolution and SiLU, depthwise convolution, SiLU gate, 1x1 convolution."""
    torch.manual_seed(0)
    model = perturbed(replace(BASE, parallel=False, mlp=ConvMLP(16, kernel=kernel)))
    x, out = seen_in(model, some_tokens(2, n), "blocks.1.ln2.hook_normalized", "blocks.1.hook_mlp_out")
    mlp = model.block(1).mlp
    assert isinstance(mlp, ConvFeedForward)
    for b in range(2):
        expanded = [silu(mlp.into.weight @ x[b, i] + mlp.into.bias) for i in range(n)]
        for i in range(n):
            mixed = mlp.bias.clone()
            for back in range(min(kernel, i + 1)):
                mixed += mlp.kernel[kernel - 1 - back] * expanded[i - back]
            gate, linear = mixed[:16], mixed[16:]
            assert_close(out[b, i], mlp.out.weight @ (silu(gate) * linear))


@over("kernel", [1, 3, 5])
@over("n", [1, 2, 3, 9])
def test_a_centred_one_is_torchs_convolution_with_padding_on_both_sides(n: int, kernel: int) -> None:
    torch.manual_seed(0)
    mlp = ConvMLP(16, kernel=kernel, centred=True)
    model = perturbed(replace(BASE, parallel=False, causal=False, mlp=mlp))
    names = (f"blocks.1.mlp.hook_{x}" for x in ("expanded", "expanded_linear", "pre", "pre_linear"))
    expanded, linear, pre, pre_linear = seen_in(model, some_tokens(2, n), *names)
    module, joined = model.block(1).mlp, torch.cat((expanded, linear), -1).mT
    assert isinstance(module, ConvFeedForward)
    found = torch.nn.functional.conv1d(
        joined, module.kernel.T[:, None], module.bias, padding=kernel // 2, groups=joined.shape[1]
    ).mT
    assert_close(torch.cat((pre, pre_linear), -1), found)


def test_the_kernel_is_torchs_causal_convolution() -> None:
    mlp = build_mixed("sana").block(0).mlp
    assert isinstance(mlp, ConvFeedForward)
    back = len(mlp.kernel) - 1
    whole = torch.nn.functional.conv1d
    expanded, linear, pre, pre_linear = seen_in(
        build_mixed("sana"), some_tokens(),
        *(f"blocks.0.mlp.hook_{x}" for x in ("expanded", "expanded_linear", "pre", "pre_linear")),
    )  # fmt: skip
    joined = torch.nn.functional.pad(torch.cat((expanded, linear), -1).mT, (back, 0))
    found = whole(joined, mlp.kernel.T[:, None], mlp.bias, groups=joined.shape[1]).mT
    assert_close(torch.cat((pre, pre_linear), -1), found)


@EVERY
def test_a_token_reaches_just_the_kernels_length(name: str) -> None:
    model = build_mixed(name)
    kernel = model.config.mlp.kernel  # type: ignore[union-attr]
    site, out = "blocks.0.mlp.hook_expanded", "blocks.0.mlp.hook_pre"

    def moved(x: Tensor) -> Tensor:
        x[:, 2] += 1
        return x

    tap = Tap([Read(out)], [Edit(site, moved)])
    model(some_tokens(), tap)
    change = (tap.values[Read(out)] - seen_in(model, some_tokens(), out)[0]).abs().amax((0, 2)) > 0
    first = 2 - (kernel // 2 if model.config.mlp.centred else 0)  # type: ignore[union-attr]
    assert change.tolist() == [first <= i < first + kernel for i in range(9)]


@EVERY
def test_neurons_write_as_in_any_mlp(name: str) -> None:
    """mlp_out = post W_out, so what a neuron wrote is right at every position."""
    model = build_mixed(name)
    post, out = seen_in(model, some_tokens(), "blocks.1.mlp.hook_post", "blocks.1.hook_mlp_out")
    assert_close(post @ model.block(1).mlp.out.weight.T, out)  # type: ignore[union-attr]


@EVERY
def test_texts_may_be_packed_and_padded_at_once(name: str) -> None:
    model, tokens = build_mixed(name), some_tokens()
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2]).expand(3, -1)
    keep = torch.tensor([[1, 1, 0, 1, 0, 1, 1, 1, 1]], dtype=torch.bool).expand(3, -1)
    packed = model(tokens, documents=documents, keep=keep)
    for text in range(3):
        real = (documents[0] == text) & keep[0]
        assert_close(packed[:, real], model(tokens[:, real]))


@CAUSAL
def test_a_state_survives_steps_that_are_all_padding(name: str) -> None:
    model, tokens = build_mixed(name), some_tokens()
    keep = torch.tensor([[1, 1, 1, 0, 0, 1, 0, 1, 1]], dtype=torch.bool).expand(3, -1)
    cache = empty_cache(model, 3)
    steps = [
        model(tokens[:, a:b], keep=keep[:, a:b], cache=cache) for a, b in ((0, 3), (3, 5), (5, 7), (7, 9))
    ]
    assert_close(torch.cat(steps, 1)[keep], model(tokens[:, keep[0]]).flatten(0, 1))


def test_a_neuron_is_ablated_like_any_other() -> None:
    model, batch = build_mixed("sana"), asked()
    found = interp.ablate(
        HookedTransformer(model),
        batch,
        "neuron",
        change=Zero(),
        metric=DIFFERENCE,
        layers=[0],
        by=["layer", "neuron"],
    )
    rows, base = torch.arange(3), model(batch.tokens)[:, -1]

    def without(neuron: int) -> Tensor:
        def change(post: Tensor) -> Tensor:
            post[..., neuron] = 0
            return post

        return model(batch.tokens, Tap(edits=[Edit("blocks.0.mlp.hook_post", change)]))[:, -1]

    for neuron in range(16):
        moved = without(neuron) - base
        expected = moved[rows, batch.answer] - moved[rows, batch.wrong]
        assert_close(torch.tensor(found.each[:, 0, neuron].values), expected)


def test_what_takes_an_mlp_for_a_function_of_one_position_refuses_it() -> None:
    model = build_mixed("conv-softmax")
    hooked = HookedTransformer(model)
    with pytest.raises(ValueError, match="requires an MLP of single positions"):
        model.block(0).without_attention(torch.zeros(2, 24, dtype=torch.float64))
    with pytest.raises(ValueError, match="this model is an MLP with a convolution"):
        interp.attribute(hooked, some_tokens(), torch.tensor([1, 2, 3]), parts="neuron")
    with pytest.raises(ValueError, match="an MLP with a convolution, whose matrices"):
        matrix_place(model, "blocks.0.mlp.W_in")
    with pytest.raises(AttributeError, match="no W_in"):
        _ = Weights(model).W_in
    with pytest.raises(ValueError, match="tensor parallel does not support"):
        check_tensor_parallel(model.config, 2)
    assert not any(
        matrix.startswith("mlp") or matrix in ("W_in", "W_out") for matrix in present(model.config)
    )


def test_configs_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="centred=True under ConvMLP for causal=False alone"):
        replace(BASE, causal=False)
    with pytest.raises(ValueError, match="kernel >= 1"):
        ConvMLP(4, kernel=0)
