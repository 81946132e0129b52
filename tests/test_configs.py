"""The models that tests share are the same, whatever torch is set to where one is asked for first."""

import torch

from tests.configs import build


def test_a_model_has_the_same_weights_whatever_torch_is_set_to() -> None:
    plain = build("gpt2").state_dict()
    torch.set_default_dtype(torch.float64)
    try:
        other = build.__wrapped__("gpt2").state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(other[name], x) for name, x in plain.items())
