"""What is fitted to SmolLM2, whose embedding is large, is saved and known again: a tuned lens, MEND, a direction."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import interp
from interp import HookedTransformer
from interp.causal import Subspace, steering
from interp.core.stats import ACCEPTED_MISS
from interp.editing import EditCase, FineTuning, Mend, mend_edit, train_mend
from interp.lenses import TunedLens, train_tuned_lens

pytestmark = pytest.mark.real
TEXTS = ["The capital of France is Paris.", "Water boils when it is hot enough."]


@pytest.fixture(scope="module")
def opened(folder: Path) -> HookedTransformer:
    return HookedTransformer.from_pretrained(folder)


@pytest.fixture(scope="module")
def other(folder: Path) -> HookedTransformer:
    """Another model: the last number of its embedding, beyond 2^24 of them, is another."""
    found = HookedTransformer.from_pretrained(folder)
    assert found.transformer.embed.weight.numel() > 2**24
    found.transformer.embed.weight.data[-1, -1] += 1
    return found


def test_a_tuned_lens_is_trained_saved_and_loaded(
    opened: HookedTransformer, other: HookedTransformer, tmp_path: Path
) -> None:
    lens = train_tuned_lens(opened, TEXTS, steps=2, batch_size=2)
    assert lens.losses is not None and bool(lens.losses.isfinite().all())
    lens.save(tmp_path / "lens.safetensors")
    found = TunedLens.load(tmp_path / "lens.safetensors", opened)
    assert torch.equal(found.weight, lens.weight) and torch.equal(found.bias, lens.bias)
    by_file = interp.logit_lens(opened, TEXTS[0], translators=found)
    assert by_file.equals(interp.logit_lens(opened, TEXTS[0], translators=lens))
    with pytest.raises(ValueError, match="another model"):
        TunedLens.load(tmp_path / "lens.safetensors", other)


def test_mend_is_trained_saved_and_loaded(
    opened: HookedTransformer, other: HookedTransformer, tmp_path: Path
) -> None:
    case = EditCase(
        "The Eiffel Tower is in", " Rome", "Eiffel", {"neighbourhood": (("The Louvre is in", " Paris"),)}
    )
    mend = train_mend(
        opened, [case], ["blocks.29.mlp.W_out"], tuning=FineTuning(steps=2), batch_size=1, rank=4
    )
    mend.save(tmp_path / "mend.safetensors")
    found = Mend.load(tmp_path / "mend.safetensors", opened)
    (one,), (two,) = (mend_edit(opened, case.prompt, answer=case.answer, mend=each) for each in (mend, found))
    assert torch.equal(one.change.A, two.change.A) and torch.equal(one.change.B, two.change.B)
    with pytest.raises(ValueError, match="another model"):
        Mend.load(tmp_path / "mend.safetensors", other)
    with pytest.raises(ValueError, match="another model"):
        replace(found, sample=found.sample + 1).check(opened.transformer)


def test_a_steering_direction_is_found_saved_and_loaded(
    opened: HookedTransformer, other: HookedTransformer, tmp_path: Path
) -> None:
    found = steering(
        opened, ["I love this film", "What joy"], ["I hate this film", "What misery"], test_share=0
    )
    direction = Subspace.of_result(found, layer=15)
    direction.save(tmp_path / "joy.safetensors", opened)
    loaded = Subspace.load(tmp_path / "joy.safetensors", opened)
    assert torch.equal(loaded.directions, direction.directions) and loaded.site == direction.site
    with pytest.raises(ValueError, match="another model"):
        Subspace.load(tmp_path / "joy.safetensors", other)


@pytest.mark.parametrize(
    ("prompt", "answer", "wrong"),
    [
        ("The capital of France is", " Paris", None),
        ("When Mary and John went to the store, John gave a drink to", " Mary", " John"),
    ],
)
def test_integrated_gradients_converge(
    opened: HookedTransformer, prompt: str, answer: str, wrong: str | None
) -> None:
    """The scores sum to the difference of the model's own logits on both ends of the line."""
    found = interp.token_attribution(opened, prompt, answer, wrong, method="integrated_gradients")
    assert float(found.error[0]) <= ACCEPTED_MISS and "notes" not in found.attrs
    ids = [int(opened.to_tokens(text, prepend_bos=False)[0, 0]) for text in (answer, wrong) if text]
    last = opened(opened.to_tokens(prompt))[0, -1]
    mean = interp.Edit("hook_embed", lambda x: opened.transformer.embed.weight.mean(0).expand_as(x))
    base = interp.observe(opened, opened.to_tokens(prompt), edits=[mean]).output[0, -1]
    there, here = (x[ids[0]] - (x[ids[1]] if wrong else 0) for x in (base, last))
    torch.testing.assert_close(torch.tensor(float(found.total[0])), here - there, rtol=1e-3, atol=1e-3)
    missed = abs(float(found.value[0].sum()) - float(here - there))
    assert missed <= ACCEPTED_MISS * abs(float(here - there))
