"""The shipped models do what their cards say: the numbers are measured again, and the required ones are reached."""

import pytest

from interp import tasks
from interp.model import Transformer
from interp.zoo import DEMOS, card, load, measure, revisions

TRAINED = [name for name, demo in DEMOS.items() if not demo.built and name != "demo-memory"]
Shipped = tuple[str, Transformer, measure.Encode]
BOTH = {"best_induction_score": 0.80, "indirect_object_unseen_pairs": 0.85}
REQUIRED = {
    "demo-attn-2l": BOTH,
    "demo-mlp-2l": {"best_induction_score": 0.5, "indirect_object_unseen_pairs": 0.85},
    "demo-4l": BOTH | {"facts_trained_phrasings": 0.95, "facts_held_out_phrasing": 0.90},
}


@pytest.fixture(scope="module", params=TRAINED)
def demo(request: pytest.FixtureRequest) -> Shipped:
    model, tokenizer = load(request.param)
    assert tokenizer is not None
    return request.param, model, tokenizer.encode


@pytest.mark.slow
def test_measuring_again_gives_the_numbers_of_the_card(demo: Shipped) -> None:
    name, model, encode = demo
    stated = card(name)["measured"]
    assert isinstance(stated, dict)
    for key, again in (measure.induction_number(model, 0) | measure.task_numbers(model, encode, 0)).items():
        assert again["value"] == pytest.approx(stated[key]["value"], abs=2e-3), key
        assert again["n"] == stated[key]["n"], key


def test_the_card_reaches_what_is_required(demo: Shipped) -> None:
    stated = card(demo[0])["measured"]
    assert isinstance(stated, dict)
    assert {
        key: stated[key]["value"] for key, least in REQUIRED[demo[0]].items() if stated[key]["value"] < least
    } == {}


def test_the_card_counts_the_parameters_of_the_weights(demo: Shipped) -> None:
    name, model, _ = demo
    assert card(name)["parameters"] == sum(p.numel() for p in model.parameters())


def test_every_name_is_one_token_with_its_leading_space(demo: Shipped) -> None:
    assert [name for name in tasks.NAMES if len(demo[2](f" {name}")) != 1] == []


def test_the_shipped_checkpoints_show_the_phase_change() -> None:
    steps = revisions("demo-attn-2l")
    scores = [_best(load("demo-attn-2l", revision=step)[0]) for step in steps]
    assert len(steps) >= 3
    assert scores[0] < 0.2 and max(scores) > 0.7


def _best(model: Transformer) -> float:
    return float(measure.induction_number(model, 0)["best_induction_score"]["value"])
