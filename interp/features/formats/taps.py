"""From the places that other tools name to our sites: hooks of TransformerLens, modules of Hugging Face."""

from __future__ import annotations

import re
from typing import NamedTuple

from interp.model.sites import axes_of

LENS = {
    "mlp.hook_in": "ln2.hook_normalized",
    "hook_mlp_in": "hook_mlp_in",
    "ln2_post.hook_normalized": "hook_mlp_out",
}
"""Hooks of TransformerLens in a block whose names, or places, differ from ours. Its `mlp.hook_in` is what the MLP
reads, gain included, which is our `ln2.hook_normalized`."""
BEFORE_GAIN = {"ln1.hook_normalized", "ln2.hook_normalized"}
"""Norms of TransformerLens whose hook stands before the gain; ours of the same name stands after it."""
MODULES = {
    "output": "hook_resid_post",
    "mlp.output": "hook_mlp_out",
    "mlp.input": "ln2.hook_normalized",
    "attn.output": "hook_attn_out",
    "attn.input": "ln1.hook_normalized",
    "attn.heads": "attn.hook_z",
    "post_feedforward_layernorm.output": "hook_mlp_out",
    "post_attention_layernorm.output": "hook_attn_out",
    "pre_feedforward_layernorm.output": "ln2.hook_normalized",
    "input": "hook_resid_pre",
}
"""Inputs and outputs of the modules of a Hugging Face block, by our sites of a block."""
_BLOCK = re.compile(r"(?:.*\.)?(?:layers|h|blocks|layer)\.(\d+)(?:\.(.+))?")
_ATTENTION = re.compile(r"\b(self_attn|attention|attn|self_attention)\b")
_HEADS = re.compile(r"attn\.(o_proj|c_proj|dense|out_proj)\.input")
_MLP = re.compile(r"\b(mlp|feed_forward|block_sparse_moe)\b")
_EMBED = re.compile(r"(?:.*\.)?(embed_tokens|wte|embed_in|word_embeddings)")


class Place(NamedTuple):
    """A site of ours, and whether what is meant is the output of a norm before its gain."""

    site: str
    before_gain: bool = False


def of_hook(name: str) -> Place | None:
    """The place of a hook of TransformerLens by its full name; None where we have no such site."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    short = match[2] if match else name
    ours = f"blocks.{match[1]}.{LENS.get(short, short)}" if match else name
    try:
        axes_of(ours)
    except KeyError:
        return None
    return Place(ours, short in BEFORE_GAIN)


def hook_of(place: Place) -> str | None:
    """The hook of TransformerLens at a site of ours; None where it has none."""
    match = re.fullmatch(r"(blocks\.\d+\.)(.+)", place.site)
    if match is None or match[2] not in BEFORE_GAIN or place.before_gain:
        return place.site
    hooks = [hook for hook, ours in LENS.items() if ours == match[2]]
    return match[1] + hooks[0] if hooks else None


def of_module(path: str, end: str = "output") -> Place | None:
    """The place of a module's input or output in a Hugging Face model; None where we have no such site.

    Args:
        path: such as "model.layers.5.mlp"; it may end in ".input" or ".output".
        end: "input" or "output", where the path does not say it.
    """
    if not path.endswith((".input", ".output")):
        path = f"{path}.{end}"
    if _EMBED.fullmatch(path.rsplit(".", 1)[0]):
        return Place("hook_embed") if path.endswith(".output") else None
    match = _BLOCK.fullmatch(path)
    if match is None or match[2] is None:
        return None
    inner = _MLP.sub("mlp", _ATTENTION.sub("attn", match[2]))
    ours = MODULES.get("attn.heads" if _HEADS.fullmatch(inner) else inner)
    return None if ours is None else Place(f"blocks.{match[1]}.{ours}")
