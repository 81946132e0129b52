"""Where a model goes: devices by hand, and by the memory that is free."""

import pytest
import torch

from interp import HookedTransformer
from interp.families.places import SLOTS, by_free_memory, places_of
from interp.model.transformer import layer_devices

A, B, C = (torch.device("cuda", i) for i in range(3))


@pytest.mark.parametrize(
    ("free", "layers", "runs"),
    [
        ({A: 40, B: 40}, 32, {A: 16, B: 16}),
        ({A: 10, B: 30}, 32, {A: 8, B: 24}),
        ({A: 80, B: 0, C: 80}, 32, {A: 16, C: 16}),
        ({A: 7}, 32, {A: 32}),
        ({A: 20, B: 30, C: 50}, 10, {A: 2, B: 3, C: 5}),
    ],
)
def test_layers_are_spread_by_the_memory_that_is_free(
    free: dict[torch.device, int], layers: int, runs: dict[torch.device, int]
) -> None:
    found = layer_devices(layers, by_free_memory(free))
    assert found == tuple(
        sorted(found, key=lambda device: device.index)
    )  # consecutive runs, in the order given
    for device in free:
        assert abs(found.count(device) - runs.get(device, 0)) <= layers / SLOTS + 1


def test_auto_is_every_accelerator_here_or_else_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert places_of(None, "cpu", "auto") == (torch.device("cpu"),)
    model = HookedTransformer.from_pretrained("groundtruth-induction", devices="auto")
    assert model.transformer.device == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: ((30, 80), (10, 80))[i])
    monkeypatch.setattr("interp.families.places.check_dtype", lambda dtype, place: None)
    found = places_of(None, "cpu", "auto")
    assert (found.count(A), found.count(B)) == (3 * SLOTS // 4, SLOTS // 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="an accelerator is here")
@pytest.mark.parametrize("model", ["groundtruth-induction", "demo-attn-2l"])
def test_a_device_that_is_not_here_is_named(model: str) -> None:
    for where in ({"device": "cuda"}, {"devices": ["cuda:0", "cuda:1"]}):
        with pytest.raises(ValueError, match=r"float32 on cuda(:0)? is not possible here"):
            HookedTransformer.from_pretrained(model, **where)
