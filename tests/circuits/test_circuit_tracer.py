"""Attribution graphs of random models are those that circuit-tracer computed, node by node and edge by edge."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from interp import HookedTransformer
from interp.circuits import attribution_graph
from interp.features import CrossLayerTranscoder, Dictionary, JumpReLU, LayerWeights, ReLU
from tests.circuits.test_attribution_graph import places
from tests.configs import CONFIGS, perturbed
from tests.loops import over


@over("name", ["llama-gqa", "gpt2", "llama-gqa-clt", "gpt2-clt"])
def test_a_graph_is_that_of_circuit_tracer(name: str) -> None:
    with np.load(Path(__file__).parent / "peers" / f"{name}.npz") as held:
        theirs = dict(held)
    subject, tokens = peer(name, theirs), theirs["ids"].tolist()
    tolerance = (
        1e-12 if "gpt2" in name else 1e-6
    )  # our angles of rotary positions are float32, as in Hugging Face
    last = subject.transformer(torch.tensor([tokens]))[0, -1].numpy()
    np.testing.assert_allclose(last, theirs["logits"], rtol=0, atol=tolerance)
    graph = attribution_graph(subject, tokens, most=10_000, links=10_000)
    ours = np.zeros((graph.sizes["node"],) * 2)
    ours[places(graph, "target"), places(graph, "source")] = graph.weight.values
    logits = [place for place, kind in enumerate(graph.kind.values) if kind == "logit"]
    assert graph["index"].values[logits].tolist() == theirs["tokens"].tolist()
    layers = range(subject.cfg.n_layers)
    names = [f"L{layer}F{i}@{pos}" for layer, pos, i in theirs["features"].tolist()]
    features = range(len(names))
    names += [f"L{layer}.error@{pos}" for layer in layers for pos in range(len(tokens))]
    names += [f"embed@{pos}" for pos in range(len(tokens))] + [str(graph.node.values[i]) for i in logits]
    place = {str(node): i for i, node in enumerate(graph.node.values)}
    inside = [i for i, node in enumerate(names) if node in place]
    left = np.setdiff1d(range(len(names)), inside)
    assert not theirs["adjacency"][:, left].any() and set(left) <= set(features)  # they lead nowhere
    at = [place[names[i]] for i in inside]
    assert sorted(at) == list(range(graph.sizes["node"]))
    found, expected = ours[np.ix_(at, at)], theirs["adjacency"][np.ix_(inside, inside)]
    assert (expected != 0).sum() > 1000
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
    own = [i for i in inside if i in features]
    activations = graph.activation.sel(node=[names[i] for i in own])
    np.testing.assert_allclose(activations, theirs["activations"][own], rtol=0, atol=tolerance)
    np.testing.assert_allclose(graph.probability[logits], theirs["probabilities"], rtol=0, atol=tolerance)
    scores = [graph.attrs[key] for key in ("replacement", "completeness")]
    np.testing.assert_allclose(scores, theirs["scores"], rtol=0, atol=tolerance)


def peer(name: str, theirs: Mapping[str, np.ndarray]) -> HookedTransformer:
    """The model of a file of circuit-tracer's, with its transcoders."""
    plain = name.removesuffix("-clt")
    config = CONFIGS[plain] if plain == name else replace(CONFIGS[plain], n_layers=3)
    subject = HookedTransformer(perturbed(config, torch.float64))
    state = {key: torch.from_numpy(theirs[f"model.{key}"]) for key in subject.transformer.state_dict()}
    subject.transformer.load_state_dict(state)
    layers = range(config.n_layers)
    weights = {
        layer: {
            key.split(".")[2]: torch.from_numpy(x)
            for key, x in theirs.items()
            if key.startswith(f"W.{layer}.")
        }
        for layer in layers
    }
    if plain != name:
        return subject.with_dictionaries([cross_layer(weights)])
    return subject.with_dictionaries([
        Dictionary(
            ReLU(), weights[layer], reads=f"blocks.{layer}.ln2.hook_normalized",
            writes=f"blocks.{layer}.hook_mlp_out", apply_b_dec_to_input=False,
        )
        for layer in layers
    ])  # fmt: skip


def cross_layer(weights: Mapping[int, Mapping[str, Tensor]]) -> CrossLayerTranscoder:
    """A transcoder whose decoders [s layers d] lead from each layer to it and all later ones."""
    return CrossLayerTranscoder(
        JumpReLU() if "threshold" in weights[0] else ReLU(),
        {layer: layer_weights(own) for layer, own in weights.items()},
        {layer: own["b_dec"] for layer, own in weights.items()},
        {layer: f"blocks.{layer}.hook_resid_mid" for layer in weights},
        {layer: f"blocks.{layer}.hook_mlp_out" for layer in weights},
    )


def layer_weights(own: Mapping[str, Tensor]) -> LayerWeights:
    (d, width), encoder = own["W_enc"].shape, ("W_enc", "b_enc", "threshold")
    return LayerWeights(
        (d, width, d),
        lambda: {key: own[key] for key in encoder if key in own},
        lambda active: own["W_dec"][active],
        (lambda: own["W_skip"]) if "W_skip" in own else None,
    )
