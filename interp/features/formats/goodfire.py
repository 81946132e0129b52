"""Sparse autoencoders of Goodfire: one `.pt` or `.pth`, whose name ends in the layer (`-l19`)."""

from __future__ import annotations

from interp.features.activations import ReLU
from interp.features.formats.configs import check_keys, refuse_facts, refuse_unknown
from interp.features.formats.files import Facts, Files, Layout, Stored
from interp.features.formats.states import chosen, named, transposed

FILE = r"-l(\d+)\.pth?$"
NAMES = {
    "W_enc": "encoder_linear.weight", "b_enc": "encoder_linear.bias", "W_dec": "decoder_linear.weight",
    "b_dec": "decoder_linear.bias",
}  # fmt: skip


def _fits(files: Files) -> bool:
    found = named(files, FILE)
    return bool(found) and "encoder_linear.weight" in files.tensors(next(iter(found)))


def _read(files: Files, facts: Facts) -> Stored:
    """The autoencoder in a file: of the stream after a layer, b_dec not subtracted."""
    refuse_facts(facts, "k", "norm_scaling_factor")
    name, layer = chosen(files, FILE, facts)
    tensors = files.tensors(name)
    state = tensors.every()
    check_keys(state, NAMES.values(), name)
    refuse_unknown(dict(tensors.plain), ())
    return Stored(
        ReLU(),
        transposed(state, NAMES),
        reads=None if layer is None else f"blocks.{layer}.hook_resid_post",
        apply_b_dec_to_input=False,
        metadata={"file": name},
    )


LAYOUT = Layout("Goodfire", _fits, _read)
