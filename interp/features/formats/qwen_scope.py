"""Sparse autoencoders of Qwen Scope: `layer{n}.sae.pt` in a repository whose name says how many features are active."""

from __future__ import annotations

from interp.features.activations import TopK
from interp.features.formats.configs import agreed, check_keys, refuse_facts, refuse_unknown
from interp.features.formats.files import Facts, Files, Layout, Stored
from interp.features.formats.states import chosen, in_path, named, transposed

FILE = r"^(?:.*/)?layer(\d+)\.sae\.pt$"
REPOSITORY = r"SAE-Res-(.+)-W\d+K-L0_(\d+)"
NAMES = {name: name for name in ("W_enc", "b_enc", "W_dec", "b_dec")}


def _fits(files: Files) -> bool:
    return None not in (found := named(files, FILE)).values() and bool(found)


def _read(files: Files, facts: Facts) -> Stored:
    """The autoencoder in a file: of the stream after a layer, b_dec not subtracted."""
    refuse_facts(facts, "norm_scaling_factor")
    name, layer = chosen(files, FILE, facts)
    tensors = files.tensors(name)
    state = tensors.every()
    check_keys(state, NAMES.values(), name)
    refuse_unknown(dict(tensors.plain), ())
    repository = in_path(files, name, REPOSITORY)
    k = agreed("k", None if repository is None else int(repository[2]), facts.k)
    if k is None:
        raise ValueError("k is required: load(..., k=50), as no folder is named SAE-Res-<model>-W32K-L0_50")
    return Stored(
        TopK(k),
        transposed(state, NAMES),
        reads=f"blocks.{layer}.hook_resid_post",
        apply_b_dec_to_input=False,
        metadata={"model_name": None if repository is None else repository[1]},
    )


LAYOUT = Layout("Qwen Scope", _fits, _read)
