"""Layers over several devices."""

import pytest
import torch

from interp.data.batch import Batch
from interp.model import Read, Transformer, sites
from interp.model.transformer import layer_devices
from interp.passes.generate import generate
from interp.passes.observe import observe
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.tolerances import assert_close

CPU, META = torch.device("cpu"), torch.device("meta")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a second device, here a GPU")


@pytest.mark.parametrize(
    ("n_layers", "runs"), [(2, [1, 1]), (5, [3, 2]), (6, [2, 2, 2]), (7, [4, 3]), (1, [1, 0]), (3, [3])]
)
def test_layers_go_in_consecutive_runs_of_equal_length(n_layers: int, runs: list[int]) -> None:
    devices = [torch.device("cpu", i) for i in range(len(runs))]
    expected = [device for device, n in zip(devices, runs, strict=True) for _ in range(n)]
    assert list(layer_devices(n_layers, devices)) == expected


def test_without_a_device_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one device is required"):
        layer_devices(2, [])


@pytest.mark.parametrize("name", ["gpt2", "tied", "bloom", "masked-lm"])
def test_blocks_stand_where_they_were_put_and_the_rest_on_the_first_device(name: str) -> None:
    model = Transformer(CONFIGS[name])
    model.place([CPU, META])
    for key, parameter in model.named_parameters():
        assert parameter.device == (META if key.startswith("blocks.1.") else CPU), key
    assert not CONFIGS[name].tied or model.unembed.weight is model.embed.weight


@needs_gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_every_site_generation_and_gradient_are_those_of_one_device(name: str) -> None:
    model, spread = build(name), perturbed(CONFIGS[name])
    spread.load_state_dict(model.state_dict())
    spread.place([torch.device("cuda"), CPU])
    keep = torch.ones(3, 9, dtype=torch.bool)
    keep[1, :4] = False
    batch = Batch(some_tokens(), keep)
    reads = [Read(site) for site in sites.names(CONFIGS[name], on_demand=True)]
    expected, found = observe(model, batch, reads), observe(spread, batch, reads)
    assert_close(found.output.cpu(), expected.output)
    for read in reads:
        assert found.trace[read].device.type == "cuda", read.site
        assert_close(found.trace[read].cpu(), expected.trace[read])
    gradient = Read("hook_embed", grad=True)

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits.square().mean()

    ours = observe(spread, batch, [gradient], metric=metric).trace[gradient]
    assert_close(ours.cpu(), observe(model, batch, [gradient], metric=metric).trace[gradient])
    if CONFIGS[name].causal:
        assert generate(spread, batch, 5).tokens.tolist() == generate(model, batch, 5).tokens.tolist()
