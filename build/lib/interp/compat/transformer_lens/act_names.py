"""Shorthand for hook names: `get_act_name("k", 6)` is `"blocks.6.attn.hook_k"`."""

import re

_PARTS = {"a": "attn", "attention": "attn", "m": "mlp", "b": "", "block": "", "blocks": ""}
_ALIASES = {
    "attn": "pattern",
    "attn_logits": "attn_scores",
    "key": "k",
    "query": "q",
    "value": "v",
    "mlp_pre": "pre",
    "mlp_mid": "mid",
    "mlp_post": "post",
}
_OWNERS = {
    **dict.fromkeys(["k", "v", "q", "z", "rot_k", "rot_q", "result", "pattern", "attn_scores"], "attn"),
    **dict.fromkeys(["pre", "post", "mid", "pre_linear"], "mlp"),
}


def get_act_name(name: str, layer: int | str | None = None, layer_type: str | None = None) -> str:
    """The hook name that a shorthand stands for; full names stay as they are, unknown words become `hook_<word>`.

    Layer and part may stand in the name itself: the first digits are the layer, what follows is the part.

    Example:
        >>> get_act_name("scale4ln1"), get_act_name("normalized"), get_act_name("pre", 2)
        ('blocks.4.ln1.hook_scale', 'ln_final.hook_normalized', 'blocks.2.mlp.hook_pre')
    """
    if ("." in name or name.startswith("hook_")) and layer is None and layer_type is None:
        return name
    if found := re.match(r"([a-z]+)(\d+)([a-z]?.*)", name):
        name, layer, layer_type = found.groups()
    name = _ALIASES.get(name, name)
    part = _OWNERS.get(name) or _PARTS.get(layer_type or "", layer_type)
    block = "" if layer is None else f"blocks.{layer}."
    final = "ln_final." if layer is None and name in ("scale", "normalized") else ""
    return f"{final}{block}{part}.hook_{name}" if part else f"{final}{block}hook_{name}"
