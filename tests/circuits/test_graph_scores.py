"""Replacement and completeness over prompts: those of the graphs one by one, with their interval."""

import numpy as np
import pytest
import torch

from interp.circuits import attribution_graph, graph_scores
from interp.core.stats import share_interval
from interp.features import Dictionary, ReLU
from interp.model import Weights
from tests.circuits.test_attribution_graph import PROMPT, model, with_features
from tests.circuits.test_graph_attention import relu

PROMPTS = [PROMPT, [2, 7, 1, 8], [1, 6, 1, 8, 0, 3, 3], [5, 7]]


def test_scores_are_those_of_the_graphs_one_by_one() -> None:
    subject = with_features()
    found = graph_scores(subject, PROMPTS, most=12)
    graphs = [attribution_graph(subject, prompt, most=12) for prompt in PROMPTS]
    for i, name in enumerate(found.score.values):
        each = np.array([graph.attrs[name] for graph in graphs])
        np.testing.assert_allclose(found.each.values[:, i], each, rtol=1e-10)
        own = found.sel(score=name)
        mean, variance = torch.tensor(each.mean()), torch.tensor(each.var())
        low, high = share_interval(mean, len(each), variance)
        np.testing.assert_allclose([own.value, own.low, own.high], [mean, low, high], rtol=1e-9)
        assert int(own.n) == 4 and 0 < own.low < own.high < 1


def transcoder(layer: int, *, silent: bool) -> Dictionary:
    """The neurons of a block as features, which is all that it computes; or features that are never active."""
    own = Weights(relu().transformer).layer(layer)
    b_enc = own.b_in - (1e3 if silent else 0.0)
    weights = {"W_enc": own.W_in, "b_enc": b_enc, "W_dec": own.W_out, "b_dec": own.b_out}
    return Dictionary(
        ReLU(), {name: x.detach().clone() for name, x in weights.items()}, reads=f"blocks.{layer}.hook_resid_mid",
        writes=f"blocks.{layer}.hook_mlp_out", apply_b_dec_to_input=False,
    )  # fmt: skip


def test_features_that_are_all_score_one_and_silent_ones_less() -> None:
    layers = range(relu().cfg.n_layers)
    whole, none = (
        graph_scores(
            relu().with_dictionaries([transcoder(i, silent=silent) for i in layers]), PROMPTS, most=200
        )
        for silent in (False, True)
    )
    np.testing.assert_allclose(whole.value, 1.0, rtol=1e-12)
    assert (none.value < 0.8).all()


def test_models_without_dictionaries_and_no_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="a model with dictionaries is required"):
        graph_scores(model(), PROMPTS)
    with pytest.raises(ValueError, match="at least one"):
        graph_scores(with_features(), [])
