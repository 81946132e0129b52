"""What the tests of the sites share: one plain and one fully observed pass per config, and a fixed perturbation."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from interp.model import Read, Tap, sites
from tests.configs import CONFIGS, build, some_tokens


def site_of_each_row(name: str) -> Iterator[str]:
    """A site of every table row that a config has, the layers that have it taking turns: their code is the same."""
    config = CONFIGS[name]
    rows = [sites.block_rows(config.at_layer(layer)) for layer in range(config.n_layers)]
    for turn, row in enumerate(sites.block_rows(config)):
        having = [layer for layer, there in enumerate(rows) if row in there]
        yield f"blocks.{having[turn % len(having)]}.{row.name}"
    yield from (row.name for row in sites.MODEL_SITES if row.present(config))


@functools.cache
def plain_logits(name: str) -> Tensor:
    """Logits of `some_tokens()` without a tap."""
    return build(name)(some_tokens())


@functools.cache
def everything(name: str) -> dict[str, Tensor]:
    """Every site of the model, on-demand ones included, on `some_tokens()`."""
    tap = Tap([Read(site) for site in sites.names(CONFIGS[name], on_demand=True)])
    build(name)(some_tokens(), tap)
    return {read.site: value for read, value in tap.values.items()}


def noise(like: Tensor) -> Tensor:
    """A fixed random tensor, different at every entry, so that no norm or softmax is blind to it."""
    return 0.5 * torch.randn(like.shape, generator=torch.Generator().manual_seed(1), dtype=like.dtype)
