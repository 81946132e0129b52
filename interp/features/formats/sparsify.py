"""Dictionaries of EleutherAI's sparsify: a folder with `cfg.json` and `sae.safetensors`, named after a module.

An SAE reads and rebuilds what the module gives; a transcoder reads what the module gets. Several seeds of one module
lie in folders `seed0`, `seed1`, ... in its folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from interp.core.axes import shape_text
from interp.features.activations import AbsTopK, DictionaryKind, GroupMax, TopK
from interp.features.folding import uncentred
from interp.features.formats.configs import (
    agreed,
    check_keys,
    count,
    flag,
    refuse_facts,
    refuse_unknown,
    widened,
    words,
)
from interp.features.formats.files import Facts, Files, Layout, Stored
from interp.features.formats.taps import Place, of_module
from interp.model.config import Json

CONFIG, WEIGHTS = "cfg.json", "sae.safetensors"
UNDERSTOOD = words("activation d_in expansion_factor k num_latents signed skip_connection transcode")
OF_TRAINING = words("multi_topk normalize_decoder")
"""Keys that say how the dictionary was trained; the stored weights show what they did."""


def _fits(files: Files) -> bool:
    return files.has(CONFIG, WEIGHTS)


def _read(files: Files, facts: Facts) -> Stored:
    """The dictionary of a folder; of an SAE with a skip the subtraction of b_dec is folded, as the skip reads x."""
    refuse_facts(facts, "layer", "norm_scaling_factor")
    config = files.json(CONFIG)
    refuse_unknown(config, (*UNDERSTOOD, *OF_TRAINING))
    transcode, skip = flag(config, "transcode", False), flag(config, "skip_connection", False)
    stored = files.tensors(WEIGHTS).every()
    weights = _oriented(stored, skip)
    _check_widths(config, weights)
    centred = not transcode
    if skip and centred:
        weights, centred = uncentred(widened(weights)), False
    module = _module(files.path)
    reads, writes = _places(module, transcode)
    return Stored(
        _kind(config, facts),
        weights,
        reads=None if reads is None else reads.site,
        writes=None if writes is None else writes.site,
        apply_b_dec_to_input=centred,
        metadata={"module": module, **config},
        dtype=next(iter(stored.values())).dtype,
    )


LAYOUT = Layout("sparsify", _fits, _read)


def _kind(config: Json, facts: Facts) -> DictionaryKind:
    """The kind that the config names."""
    activation = config.get("activation", "topk")
    k = agreed("k", count(config, "k"), facts.k)
    if k is None:
        raise ValueError("k is required, and cfg.json does not say it: load(..., k=32)")
    match activation, flag(config, "signed", False):
        case "topk", False:
            return TopK(k)
        case "topk", True:
            return AbsTopK(k)
        case "groupmax", False:
            return GroupMax(k)
    raise ValueError(f"activation must be topk or groupmax, and signed only with topk, got {activation!r}")


def _oriented(stored: Mapping[str, Tensor], skip: bool) -> dict[str, Tensor]:
    """The weights under our names and in our orientation; the older name of the decoder is that of a linear layer."""
    decoder = "decoder.weight" if "decoder.weight" in stored else "W_dec"
    check_keys(stored, ["encoder.weight", "encoder.bias", decoder, "b_dec", *["W_skip"] * skip], WEIGHTS)
    found = {
        "W_enc": stored["encoder.weight"].mT,
        "b_enc": stored["encoder.bias"],
        "W_dec": stored[decoder].mT if decoder == "decoder.weight" else stored[decoder],
        "b_dec": stored["b_dec"],
    }
    return found | ({"W_skip": stored["W_skip"].mT} if skip else {})


def _check_widths(config: Json, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the weights are as wide as the config says."""
    d, factor = count(config, "d_in"), count(config, "expansion_factor")
    latents = config.get("num_latents") or (d * factor if d and factor else None)
    shape = tuple(weights["W_enc"].shape)
    if len(shape) != 2 or d != shape[0] or latents not in (None, shape[1]):
        raise ValueError(
            f"the config says d_in={d} and {latents} latents, W_enc has shape {shape_text(shape)}"
        )


def _module(path: Path) -> str:
    """The module that a folder is named after."""
    path = path.absolute()
    return path.parent.name if re.fullmatch(r"seed\d+", path.name) else path.name


def _places(module: str, transcode: bool) -> tuple[Place | None, Place | None]:
    """Where a dictionary of a module reads and writes; None where we have no such site."""
    output = of_module(module, "output")
    if not transcode:
        return output, None
    source = of_module(module, "input")
    return (None, None) if source is None or output is None else (source, output)
