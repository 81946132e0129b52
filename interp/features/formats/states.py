"""Dictionaries that are one torch file each, without a config: which file is meant, and its weights as ours."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from interp.core.axes import shape_text
from interp.features.formats.configs import agreed
from interp.features.formats.files import Facts, Files


def named(files: Files, pattern: str) -> dict[str, int | None]:
    """The files of this name, with the layer that their names say.

    Args:
        files: a file, whose name need not fit, or a folder.
        pattern: of a file's name; its first group is the layer.
    """
    names = {name: re.search(pattern, name) for name in files.names}
    layers = {name: int(match[1]) for name, match in names.items() if match}
    if files.path.is_dir():
        return {**layers}
    return {name: layers.get(name) for name in files.names if name.endswith((".pt", ".pth"))}


def chosen(files: Files, pattern: str, facts: Facts) -> tuple[str, int | None]:
    """The file that is meant and its layer: the only one, or that of the layer which the user says."""
    layers = named(files, pattern)
    if len(layers) == 1:
        name, layer = next(iter(layers.items()))
        return name, agreed("layer", layer, facts.layer)
    fitting = [name for name, layer in layers.items() if layer == facts.layer]
    if facts.layer is None or len(fitting) != 1:
        known = sorted(layer for layer in layers.values() if layer is not None)
        raise ValueError(
            f"one layer of {known} is required: load(..., layer={known[0]}), got layer={facts.layer}"
        )
    return fitting[0], facts.layer


def in_path(files: Files, name: str, pattern: str) -> re.Match[str] | None:
    """Where a pattern fits in the path of a file, in the name that is nearest to the file."""
    found = (re.search(pattern, each) for each in reversed(files.place(name).absolute().parts))
    return next((match for match in found if match), None)


def transposed(stored: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """The weights under our names, the matrices of linear layers [out in] as ours [in out].

    Args:
        stored: the tensors by their names.
        names: by our name theirs.
    """
    found = {ours: stored[theirs] for ours, theirs in names.items()}
    for name in ("W_enc", "W_dec"):
        if found[name].ndim != 2:
            raise ValueError(f"{names[name]} must be a matrix, got shape {shape_text(found[name].shape)}")
        found[name] = found[name].mT
    return found
