"""The patching map shows the result's numbers, and says where nothing was changed."""

import numpy as np
import pytest
import torch

from interp import HookedTransformer, logit_difference, patch, path_patch, plot
from interp.views.writing import number
from tests.configs import build

CLEAN, CORRUPT = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[5, 9, 7, 8]])
FOUND = patch(HookedTransformer(build("gpt2"), None), CLEAN, CORRUPT, metric=logit_difference(3, 4))


@pytest.mark.parametrize("value", ["normalised", "value"])
def test_colours_and_words_are_the_numbers(value: str) -> None:
    ax = plot.patching(FOUND, value, tokens=["a", "b", "c", "$d"])
    expected = FOUND[value].to_numpy()
    drawn = np.ma.filled(ax.images[0].get_array(), np.nan)
    np.testing.assert_array_equal(drawn, np.where(FOUND.changed, expected, np.nan))
    words = np.array([text.get_text() for text in ax.texts]).reshape(2, 4)
    assert words[0].tolist() == ["–", number(expected[0, 1]), "–", "–"]
    assert words[1, 3] == number(expected[1, 3]) and words[1, 0] == "–"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b", "c", r"\$d"]
    assert ax.get_title() == "resid_pre: clean into corrupted"


def test_maps_can_share_their_colours() -> None:
    assert plot.patching(FOUND, reach=7.0).images[0].get_clim() == (-7.0, 7.0)


@pytest.mark.parametrize("value", ["normalised", "value"])
def test_clean_cell_that_speaks_for_the_metric_is_blue_either_way(value: str) -> None:
    how = {"metric": logit_difference(3, 4), "direction": "noise"}
    taken = patch(HookedTransformer(build("gpt2"), None), CLEAN, CORRUPT, **how)
    for found, sign in ((FOUND, 1), (taken, -1)):
        image = plot.patching(found, value).images[0]
        colours = image.to_rgba(np.asarray(image.get_array()))
        effect = sign * found.value.to_numpy()
        if value == "normalised":
            effect = found.normalised.to_numpy() if sign == 1 else 1 - found.normalised.to_numpy()
        for colour, one in zip(colours.reshape(-1, 4), effect.ravel(), strict=True):
            assert (colour[2] > colour[0]) == (one > 0) or abs(one) < 0.05 * np.abs(effect).max()
    assert plot.patching(taken, reach=0.5).images[0].get_clim() == (0.5, 1.5)


def test_what_is_no_map_is_refused() -> None:
    with pytest.raises(ValueError, match="'recovery'"):
        plot.patching(FOUND, "recovery")
    with pytest.raises(ValueError, match="two dims"):
        plot.patching(FOUND.isel(layer=0))
    with pytest.raises(ValueError, match="one token per position"):
        plot.patching(FOUND, tokens=["a"])


def test_senders_of_paths_are_laid_out_by_layer() -> None:
    model = HookedTransformer(build("gpt2"), None)
    found = path_patch(
        model, CLEAN, CORRUPT, metric=logit_difference(3, 4), senders=["L1H2", "L0H0", "L0.mlp"]
    )
    ax = plot.patching(found, "value")
    shown = np.ma.filled(np.ma.asarray(ax.images[0].get_array()), np.nan)
    head, early, mlp = found.value.values
    np.testing.assert_array_equal(shown, [[early, np.nan, mlp], [np.nan, head, np.nan]])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "2", "mlp"]
    words = [text.get_text() for text in ax.texts]
    assert words == [number(early), "", number(mlp), "", number(head), ""]
    assert ax.get_title() == "to logits: clean into corrupted" and ax.get_ylabel() == "layer"
    assert found.view.plot().images
