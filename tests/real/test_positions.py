"""Positions on SmolLM2: an edit at a token changes the same numbers whatever stands beside the text in its batch."""

import numpy as np
import pytest
import torch

import interp
from interp import Edit, HookedTransformer
from interp.data.batch import Side
from interp.edits import PerRow, Scale, Zero
from interp.model.edits import PositionIndex

pytestmark = pytest.mark.real

NOISE = 2 * 4.6e-5
"""What a logit difference moves in float32 where its text stands in a batch of another width (REAL_MODELS.md), twice:
an effect is a difference of two."""
TEXTS = (
    "Mary gave a drink to",
    "When Mary and John went to the store, John gave a drink to",
    "The Eiffel Tower is in the city of Paris. " * 8 + "It",
)


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_edit_at_a_position_gives_the_numbers_of_each_text_alone(
    model: HookedTransformer, side: Side
) -> None:
    """Both totals are sums of the parts, each rounded by eps (8 + sqrt(parts)) of their absolute sum."""
    for at in (-1, 1, (0, -2)):
        edits = [Edit("L2.mlp", Zero(), {"pos": at})]
        batch = model.to_batch(TEXTS, padding_side=side)
        found = interp.attribute(model.edited(edits), batch, " Mary", " John")
        for i, text in enumerate(TEXTS):
            alone = interp.attribute(model.edited(edits), text, " Mary", " John")
            size = float(abs(alone.value[0]).sum())
            bound = 2 * torch.finfo(torch.float32).eps * (8 + alone.sizes["part"] ** 0.5) * size
            assert abs(float(found.total[i]) - float(alone.total[0])) <= bound
            assert abs(float(found.total[i]) - _unedited(model, text)) > 10 * bound


def _unedited(model: HookedTransformer, text: str) -> float:
    return float(interp.attribute(model, text, " Mary", " John").total[0])


def test_generation_edits_each_prompt_where_it_edits_it_alone(model: HookedTransformer) -> None:
    def texts(prompts: list[str], at: PositionIndex, cached: bool = True) -> list[str]:
        edits = [Edit("L12.resid", Scale(3.0), {"pos": at})]
        return model.to_texts(model.generate(prompts, 6, edits=edits, use_past_kv_cache=cached))

    both = list(TEXTS[:2])
    for at in (2, -1, "new", PerRow([1, -1])):
        own = [PerRow([place]) for place in at.places] if isinstance(at, PerRow) else [at, at]
        alone = [text for prompt, mine in zip(both, own, strict=True) for text in texts([prompt], mine)]
        assert texts(both, at) == texts(both, at, cached=False) == alone  # type: ignore[arg-type]


def test_a_map_of_texts_of_several_lengths_has_the_cells_of_each(model: HookedTransformer) -> None:
    ask = {
        "change": Zero(),
        "by": ("layer", "pos"),
        "layers": [2],
        "metric": interp.logit_difference(" Mary", " John"),
    }
    found = interp.ablate(model, list(TEXTS[:2]), "mlp", **ask)  # type: ignore[arg-type]
    lengths = [len(model.text.ids(text)) for text in TEXTS[:2]]
    assert found["each"].notnull().isel(layer=0).sum("pos").values.tolist() == lengths
    for i, text in enumerate(TEXTS[:2]):
        alone = interp.ablate(model, text, "mlp", **ask)["each"].values[0]  # type: ignore[arg-type]
        np.testing.assert_allclose(found["each"].values[i, :, : lengths[i]], alone, rtol=0, atol=NOISE)
