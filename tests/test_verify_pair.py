"""The numerical contract of an encoder-decoder: the whole against its reference, and each side by itself."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from interp.families.load import any_from_hf_model
from interp.families.reference import HuggingFaceReference
from interp.model import EncoderDecoder
from interp.verify import (
    pair_contract,
)
from tests.families.oracle import hf_model
from tests.suspects import (
    CLAIMS,
    GRADIENTS,
    LOGITS,
    NAN,
    PACKED,
    STEPS,
    Suspect,
    off,
    red,
    same,
    with_one,
)


@functools.cache
def bart() -> EncoderDecoder:
    found = any_from_hf_model(hf_model("bart"), dtype=torch.float64)
    assert isinstance(found, EncoderDecoder)
    return found


@functools.cache
def bart_truth() -> HuggingFaceReference:
    return HuggingFaceReference(copy.deepcopy(hf_model("bart")).double())


@dataclass(frozen=True)
class TwistedPair:
    """The same as `Twisted` for an encoder-decoder."""

    logits_by: Callable[[Tensor], Tensor] = same
    gradient_by: Callable[[Tensor], Tensor] = same
    name: str = "Hugging Face"

    def pair_logits(self, source: Tensor, target: Tensor) -> Tensor:
        return self.logits_by(bart_truth().pair_logits(source, target))

    def pair_gradient(self, source: Tensor, target: Tensor, probe: Tensor) -> Tensor:
        return self.gradient_by(bart_truth().pair_gradient(source, target, probe))


ALONE = tuple(claim for claim in CLAIMS if claim not in (LOGITS, GRADIENTS))


def test_an_encoder_decoder_is_compared_as_a_whole_and_each_side_by_itself() -> None:
    found = pair_contract(bart(), bart_truth(), name="bart")
    assert found.passed and not red(found)
    crossed = ("cross_attn pattern @ v = z", "heads + bias = cross_attn_out")
    sides = [f"encoder: {x}" for x in ALONE] + [f"decoder: {x}" for x in (*ALONE, *crossed)]
    assert sorted(x.claim for x in found.lines) == sorted([LOGITS, GRADIENTS, *sides])
    assert {x.claim for x in found.lines if x.passed is None} == {f"encoder: {STEPS}"}


@pytest.mark.parametrize("change", [off, with_one(NAN)], ids=["off", "nan"])
@pytest.mark.parametrize(("which", "claim"), [("logits_by", LOGITS), ("gradient_by", GRADIENTS)])
def test_a_reference_that_disagrees_about_the_whole_turns_its_own_line_red(
    which: str, claim: str, change: Callable[[Tensor], Tensor]
) -> None:
    assert red(pair_contract(bart(), TwistedPair(**{which: change}))) == {claim}


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_defect_of_one_side_turns_the_lines_of_that_side_red(side: str) -> None:
    model = copy.deepcopy(bart())
    stack = model.encoder if side == "encoder" else model.decoder
    stack.__class__ = type("Leaky", (Suspect,), {"left_out": ("documents",)})
    assert red(pair_contract(model, bart_truth())) == {f"{side}: {PACKED}"}


def test_a_defect_of_cross_attention_turns_its_line_red() -> None:
    model = copy.deepcopy(bart())
    crossed = model.decoder.block(1).cross_attn
    assert crossed is not None

    class Adds(type(crossed)):
        def _write(self, z: Tensor, tap: object) -> Tensor:
            return super()._write(z, tap) + 1e-8

    crossed.__class__ = Adds
    assert red(pair_contract(model, bart_truth())) == {"decoder: heads + bias = cross_attn_out"}


def test_other_weights_than_the_references_turn_the_whole_red_and_no_side() -> None:
    model = copy.deepcopy(bart())
    model.encoder.block(0).attn.out.weight.mul_(1.01)
    assert red(pair_contract(model, bart_truth())) == {LOGITS, GRADIENTS}


def test_without_a_reference_the_whole_is_not_measured_and_says_why() -> None:
    found = pair_contract(bart(), "stored in our own format")
    assert [x.note for x in found.lines[:2]] == ["stored in our own format"] * 2
    assert [x.passed for x in found.lines[:2]] == [None, None]
    assert found.passed
    assert not any("as a whole" in x.note for x in found.lines)
