"""Signs of superposition in weights: a slow loop over neurons, and a planted layer of shared ones."""

import copy

import numpy as np
import pytest
import torch

from interp import HookedTransformer, plot
from interp.weights import superposition
from tests.configs import build


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "parallel"])
def test_norms_and_biases_are_those_of_a_slow_loop(name: str, folded: bool) -> None:
    network = build(name)
    found = superposition(HookedTransformer(network), folded=folded)
    for layer in range(2):
        block = network.block(layer)
        norm = block.ln1 if network.config.shared_norm else block.ln2
        norms, biases = [], []
        for u in range(network.config.mlp.d_mlp):  # type: ignore[union-attr]
            into, bias = block.mlp.into.weight[u], block.mlp.into.bias[u]  # type: ignore[union-attr]
            if folded:
                bias = bias + norm.bias @ into  # type: ignore[union-attr, operator]
                into = norm.gamma * into  # type: ignore[union-attr, operator]
                into = into - into.mean()  # a LayerNorm subtracts the stream's mean
            norms.append(float(into.square().sum().sqrt()))
            biases.append(float(bias))
        np.testing.assert_allclose(found.neuron_norm[layer], norms, rtol=1e-9)
        np.testing.assert_allclose(found.neuron_bias[layer], biases, rtol=1e-9, atol=1e-12)
        expected = {
            "norm": np.mean(norms), "bias": np.mean(biases), "negative_bias": np.mean(np.array(biases) < 0),
            "norm_times_bias": np.mean(np.array(norms) * biases), "correlation": np.corrcoef(norms, biases)[0, 1],
        }  # fmt: skip
        for score, value in expected.items():
            assert float(found.value.sel(layer=layer, score=score)) == pytest.approx(value, rel=1e-8), score


def test_neurons_that_are_shared_by_design_show_in_every_score() -> None:
    """Toy models of superposition: the more a neuron reads, the more negative its bias."""
    network = copy.deepcopy(build("gpt2"))
    into = network.block(1).mlp.into  # type: ignore[union-attr]
    strength = torch.linspace(1, 5, len(into.weight)).double()  # type: ignore[union-attr, arg-type]
    into.weight.copy_(torch.nn.functional.normalize(into.weight, dim=1) * strength[:, None])  # type: ignore[union-attr, operator, arg-type]
    into.bias.copy_(-strength)  # type: ignore[union-attr, operator]
    found = superposition(HookedTransformer(network), folded=False).value.sel(layer=1)
    assert (
        float(found.sel(score="correlation")) == pytest.approx(-1)
        and float(found.sel(score="negative_bias")) == 1
    )
    assert float(found.sel(score="norm_times_bias")) == pytest.approx(-float(strength.square().mean()))


def test_the_picture_shows_every_neuron_by_layer() -> None:
    found = superposition(HookedTransformer(build("gpt2")))
    ax = plot.superposition(found)
    for layer in range(2):
        np.testing.assert_array_equal(ax.lines[layer].get_ydata(), found.neuron_bias[layer])
        assert ax.lines[layer].get_label() == f"layer {layer}"


def test_an_mlp_without_biases_of_its_own_is_refused() -> None:
    for name, what in (("llama-gqa", "gated"), ("attention-only", "attention-only")):
        with pytest.raises(ValueError, match=f"a plain MLP with biases.*{what}"):
            superposition(HookedTransformer(build(name)))
