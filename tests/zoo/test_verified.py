"""The numerical contract of every embedded model."""

import pytest
import torch

from interp import DEMOS, HookedTransformer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", DEMOS)
def test_an_embedded_model_keeps_the_contract(name: str, dtype: torch.dtype) -> None:
    found = HookedTransformer.from_pretrained(name, dtype=dtype).verify()
    assert found.passed, str(found)
    unmeasured = {line.claim for line in found.lines if line.passed is None}
    assert unmeasured <= {"logits = reference", "gradients = autograd on the reference"}
    assert not unmeasured or name != "demo-4l"  # the one of a family that Hugging Face has too
