"""One head, one sign: every causal question gives the same head effects of one sign, and of one size where it must.

An effect is metric(with the intervention) - metric(the same run without it). Clean values that raise the answer in the
corrupted run (denoise) are those whose loss lowers it in the clean one (noise).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import torch

import interp
from interp import HookedTransformer, logit_difference
from interp.causal import ablate, attribution_patch, patch, path_patch
from interp.data.batch import Batch
from interp.edits import Resample
from interp.metrics import Metric
from interp.model.parts import Part
from interp.zoo.planted import PLANTED

Direction = Literal["denoise", "noise"]
PROMPT = "When Mary and John went to the store, John gave a drink to"


@dataclass(frozen=True, eq=False)
class Case:
    """A head, and pairs of prompts on which it matters."""

    model: HookedTransformer
    clean: Batch
    corrupt: Batch
    metric: Metric
    head: str
    raises: bool
    """Whether what the head says on the clean prompts raises the answer."""


HEADS = {
    "demo-4l": ("L3H5", True),
    "two_hop": ("L1H0", True),
    "induction": ("L1H2", True),
    "fact_memory": ("L0H1", True),
    "backup": ("L1H1", False),
}
"""The demo's name mover, planted heads that write the answer or pass it on, and one that holds it back."""
LAST = [name for name in HEADS if name != "fact_memory"]
"""Those in the last layer."""


@functools.cache
def case(name: str) -> Case:
    head, raises = HEADS[name]
    if name == "demo-4l":
        model = HookedTransformer.from_pretrained(name, dtype=torch.float64)
        clean, corrupt = (model.to_batch(text) for text in (PROMPT, PROMPT.replace("John gave", "Mary gave")))
        return Case(model, clean, corrupt, logit_difference(" Mary", " John"), head, raises)
    planted = PLANTED[name]()
    metric = logit_difference(planted.answer, planted.wrong)
    model = HookedTransformer(planted.model.double())
    return Case(model, Batch(planted.clean), Batch(planted.corrupt), metric, head, raises)


def by_patch(a: Case, direction: Direction) -> np.ndarray:
    part = Part.of(a.head)
    found = patch(a.model, a.clean, a.corrupt, "z", metric=a.metric, direction=direction)
    return found["each"].sel(layer=part.layer, head=part.index).values


def by_gradient(a: Case, direction: Direction) -> np.ndarray:
    part, by = Part.of(a.head), ("layer", "head")
    found = attribution_patch(a.model, a.clean, a.corrupt, "z", metric=a.metric, direction=direction, by=by)
    return found["each"].sel(layer=part.layer, head=part.index).values


def by_path(a: Case, direction: Direction) -> np.ndarray:
    found = path_patch(a.model, a.clean, a.corrupt, metric=a.metric, direction=direction, senders=[a.head])
    return found["each"].sel(part=a.head).values


def by_ablation(a: Case, direction: Direction) -> np.ndarray:
    own, other = (a.corrupt, a.clean) if direction == "denoise" else (a.clean, a.corrupt)
    found = ablate(a.model, own, [a.head], change=Resample(), reference=other, metric=a.metric)
    return found["each"].sel(part=a.head).values


ASKED: dict[str, Callable[[Case, Direction], np.ndarray]] = {
    "patch": by_patch,
    "attribution_patch": by_gradient,
    "path_patch": by_path,
    "ablate": by_ablation,
    # EDGES JOIN HERE: interp.circuits, the effect and the attribution of the head's edge to the logits.
}
"""The effects of the case's head in every pair, by the question asked."""


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", HEADS)
def test_every_question_gives_one_head_one_sign(name: str, asked: str) -> None:
    a, sign = case(name), 1 if HEADS[name][1] else -1
    for direction, wanted in (("denoise", sign), ("noise", -sign)):
        effect = ASKED[asked](a, direction)  # type: ignore[arg-type]
        assert effect.mean() * wanted > 0.01, (direction, effect.mean())


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("name", HEADS)
def test_a_patched_head_is_a_head_resampled_from_the_other_prompt(name: str, direction: Direction) -> None:
    np.testing.assert_allclose(
        by_ablation(case(name), direction), by_patch(case(name), direction), rtol=1e-12
    )


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("name", LAST)
def test_path_of_a_last_layer_head_to_the_logits_is_all_that_follows_it(
    name: str, direction: Direction
) -> None:
    np.testing.assert_allclose(by_path(case(name), direction), by_patch(case(name), direction), rtol=1e-12)


@pytest.mark.parametrize("function", [patch, attribution_patch, path_patch])
def test_denoising_is_what_is_asked_unless_said_otherwise(function: Callable[..., object]) -> None:
    a = case("two_hop")
    found = function(a.model, a.clean, a.corrupt, metric=a.metric)
    assert found.attrs["direction"] == "denoise"  # type: ignore[attr-defined]
    assert found.attrs["effect"] == interp.causal.effects.SIGN  # type: ignore[attr-defined]
