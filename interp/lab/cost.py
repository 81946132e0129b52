"""Costs of an architecture before it is built: parameters and floating-point operations, part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from interp.core.boundary import public
from interp.core.results import labelled
from interp.model.config import ModelConfig
from interp.model.transformer import Transformer

if TYPE_CHECKING:
    import xarray as xr

OUTSIDE = ("embed", "positions", "norms", "unembed")


@public()
def cost(config: ModelConfig, length: int) -> xr.Dataset:
    """Parameters and floating-point operations of one pass of `length` tokens, for every part of a model.

    An operation is a multiplication or an addition within a product of matrices: [a b] @ [b c] has 2 a b c. Each
    record of the config says its own (`Mixer.flops`, `AnyMLP.flops`, `Output.flops`), for the pass without reads or
    edits and without a cache: what its kernel computes, masked or filled-up pairs included. Sums, norms, activations,
    convolutions, look-ups and triangular solves are not counted. Parameters are those of the model built without
    memory (on torch's "meta" device), a tied unembedding once, as the embedding, shared blocks as those of layer 0.

    Args:
        config: the model's config.
        length: tokens of the pass, 1 to n_ctx.

    Returns:
        Dataset[part]; parts are `embed`, `positions`, `L0.attn`, `L0.mlp` (both MLPs of a Macaron block), ...,
        `norms`, `unembed` (with BERT's head):

        - `parameters` [part]: how many numbers the part has.
        - `flops` [part]: operations.

    Raises:
        ValueError: a length outside [1, n_ctx], cross-attention, whose memory has a length of its own, or a record
            that does not say what it costs.

    Caveat:
        Operations are not seconds, which memory traffic or a loop over chunks may decide.

    See Also:
        `costs`: totals of several models at several lengths.

    Example:
        >>> found = cost(interp.lab.training.attention_only(1, 100, 64), 10)
        >>> float(found.flops.sel(part="unembed"))  # 2 tokens d_model d_vocab
        128000.0
    """
    if not 1 <= length <= config.n_ctx:
        raise ValueError(f"a length in [1, n_ctx = {config.n_ctx}] is required, got {length}")
    if config.cross_attention:
        raise ValueError(
            "a cost requires a model without cross-attention, whose memory has a length of its own"
        )
    flops, parameters = _flops(config, length), _parameters(config)
    parts = ["embed", "positions", *_layered(config), "norms", "unembed"]
    values = {
        name: (["part"], torch.tensor([each.get(part, 0) for part in parts], dtype=torch.float64))
        for name, each in {"parameters": parameters, "flops": flops}.items()
    }
    units = {"parameters": "numbers", "flops": "operations"}
    return labelled("cost", values, coords={"part": parts}, units=units, attrs={"length": length})


@public()
def costs(configs: Mapping[str, ModelConfig], lengths: Sequence[int]) -> xr.Dataset:
    """Total parameters and operations of several models at several lengths, to be drawn against each other.

    Args:
        configs: the models' configs, by the name under which they are shown.
        lengths: tokens of a pass.

    Returns:
        Dataset:

        - `flops` [model, length]: operations of a pass, all parts together.
        - `parameters` [model]: how many numbers the model has.

    Raises:
        ValueError: no models, no lengths, or as `cost`.

    See Also:
        `cost`: one model part by part.

    Example:
        >>> of = interp.lab.training.attention_only
        >>> found = costs({"one layer": of(1, 100, 64), "two": of(2, 100, 64)}, [16, 32, 64])
        >>> dict(found.flops.sizes)
        {'model': 2, 'length': 3}
    """
    if not configs or not lengths:
        raise ValueError(f"a config and a length are required, got {len(configs)} and {len(lengths)}")
    each = [[cost(config, length) for length in lengths] for config in configs.values()]
    flops = torch.tensor([[float(found.flops.sum()) for found in row] for row in each], dtype=torch.float64)
    parameters = torch.tensor([float(row[0].parameters.sum()) for row in each], dtype=torch.float64)
    return labelled(
        "costs",
        {"flops": (["model", "length"], flops), "parameters": (["model"], parameters)},
        coords={"model": list(configs), "length": list(lengths)},
        units={"parameters": "numbers", "flops": "operations"},
    )


def _layered(config: ModelConfig) -> list[str]:
    kinds = ("attn", "mlp") if config.mlp is not None else ("attn",)
    return [f"L{layer}.{kind}" for layer in range(config.n_layers) for kind in kinds]


def _flops(config: ModelConfig, n: int) -> dict[str, int]:
    d, found = config.d_model, {}
    for layer, mixer in enumerate(config.mixers):
        found[f"L{layer}.attn"] = mixer.flops(config, layer, n)
        if config.mlp is not None:
            found[f"L{layer}.mlp"] = len(config.mlps) * config.mlp.flops(d, layer, n)
    if config.unembed:
        head = 2 * n * d * d if config.mlm_head else 0
        found["unembed"] = head + config.output.flops(config, n)
    return found


def _parameters(config: ModelConfig) -> dict[str, int]:
    with torch.device("meta"):
        model = Transformer(config)
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = _part(name)
        found[part] = found.get(part, 0) + parameter.numel()
    return found


def _part(name: str) -> str:
    """The part that a parameter counts to."""
    first, *rest = name.split(".")
    if first == "blocks":
        kind = rest[1].removesuffix("_before")
        return f"L{rest[0]}.{kind}" if kind in ("attn", "mlp") else "norms"
    places = {"embed": "embed", "type_embed": "embed", "pos_embed": "positions", "score_bias": "positions"}
    ends = {"unembed": "unembed", "output": "unembed", "mlm_head": "unembed"}
    return (places | ends).get(first, "norms")
