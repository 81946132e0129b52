"""Gemma Scope, first release (Gemma 2): `layer_5/width_16k/average_l0_7/params.npz`, JumpReLU SAEs and transcoders.

The files hold weights alone: where they belong is in the name of the repository and of its folders.
"""

from __future__ import annotations

import re
from pathlib import Path

from interp.features.activations import JumpReLU
from interp.features.formats.configs import check_keys, refuse_facts
from interp.features.formats.files import Facts, Files, Layout, Stored
from interp.features.formats.taps import Place, of_hook
from interp.model.config import Json

PARAMS = "params.npz"
WEIGHTS = ("W_enc", "b_enc", "W_dec", "b_dec", "threshold")
SITES = {"res": "hook_resid_post", "mlp": "hook_mlp_out", "att": "attn.hook_z", "transcoders": "hook_mlp_out"}
"""What the dictionaries of a repository write, by the last word of its name."""
REPOSITORY = re.compile(r"gemma-scope-(\d+b)-(pt|it)-(res|mlp|att|transcoders)(?=[-/]|$)")


def _arrays(files: Files) -> str | None:
    """The name of the file of arrays: `params.npz`, or the only one; None where there is none."""
    if files.has(PARAMS):
        return PARAMS
    found = [name for name in files.names if name.endswith(".npz")]
    return found[0] if len(found) == 1 else None


def _fits(files: Files) -> bool:
    name = _arrays(files)
    return name is not None and {"W_enc", "W_dec"} <= set(files.tensors(name).shapes)


def _read(files: Files, facts: Facts) -> Stored:
    """The dictionary of one file of arrays, and where it belongs by the words of its path."""
    refuse_facts(facts, "k", "norm_scaling_factor")
    name = _arrays(files)
    assert name is not None
    weights = files.tensors(name).every()
    check_keys(weights, WEIGHTS, f"the arrays of {name}")
    path = files.place(name).absolute()
    if (
        "embedding" in path.parts
    ):  # made for rows of the embedding; ours are sqrt(d) times as long, as Gemma's are
        refuse_facts(facts, "layer")
        length = weights["W_enc"].shape[0] ** 0.5
        weights |= {
            "W_enc": weights["W_enc"] / length, "W_dec": weights["W_dec"] * length, "b_dec": weights["b_dec"] * length,
        }  # fmt: skip
        return Stored(JumpReLU(), weights, "hook_embed", apply_b_dec_to_input=False)
    reads, writes, metadata = _places(path, facts)
    return Stored(
        JumpReLU(),
        weights,
        reads=None if reads is None else reads.site,
        writes=None if writes is None else writes.site,
        before_gain=reads is not None and reads.before_gain,
        apply_b_dec_to_input=False,
        metadata=metadata,
    )


def _places(path: Path, facts: Facts) -> tuple[Place | None, Place | None, Json]:
    """What a dictionary reads and writes, and of which model, as far as its path says it."""
    repository = REPOSITORY.search(path.as_posix())
    if repository is None:
        refuse_facts(facts, "layer")
        return None, None, {}
    size, tuned, part = repository.groups()
    metadata: Json = {"model_name": f"gemma-2-{size}" + ("-it" if tuned == "it" else "")}
    layer = layer_of(path, facts)
    if layer is None:
        return None, None, metadata
    writes = of_hook(f"blocks.{layer}.{SITES[part]}")
    reads = of_hook(f"blocks.{layer}.ln2.hook_normalized") if part == "transcoders" else writes
    return reads, writes, metadata


def layer_of(path: Path, facts: Facts) -> int | None:
    """The layer that the folders of a path name, or the user; ValueError where they differ."""
    found = re.findall(r"(?:^|/)layer_(\d+)(?=[_/])", path.as_posix())
    said = int(found[-1]) if found else None
    if said is not None and facts.layer not in (None, said):
        raise ValueError(f"layer={facts.layer} is given, and the path says layer={said}")
    return facts.layer if said is None else said


LAYOUT = Layout("Gemma Scope", _fits, _read)
