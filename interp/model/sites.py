"""The one table of sites: every place in a forward pass that can be read or edited.

Names and axis orders are TransformerLens' (`blocks.3.attn.hook_pattern`, `[batch, head, query, key]`): the
field's common tongue. A site exists only if its model has the part (no `mlp.hook_post` without an MLP).
Sites marked `on_demand` are computed only when somebody asks for them by name; reading "everything" skips them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from interp.core.shapes import nearest
from interp.model.config import LayerNorm, Learned, ModelConfig, NoNorm, RMSNorm, Rotary


def _always(config: ModelConfig) -> bool:
    return True


def _has_mlp(config: ModelConfig) -> bool:
    return config.mlp is not None


def _has_norm(config: ModelConfig) -> bool:
    return isinstance(config.norm, (LayerNorm, RMSNorm))


@dataclass(frozen=True)
class Site:
    """One row of the table: where it is, its axes, what it holds, and which models have it."""

    name: str
    axes: str
    meaning: str
    present: Callable[[ModelConfig], bool] = _always
    on_demand: bool = False


BLOCK_SITES: tuple[Site, ...] = (
    Site("hook_resid_pre", "b p d", "residual stream entering the block"),
    Site("ln1.hook_scale", "b p 1", "what the norm before attention divides by", _has_norm),
    Site("ln1.hook_normalized", "b p d", "input of attention, after gamma and beta", _has_norm),
    Site("hook_q_input", "b p h d", "residual read by each head's query, before ln1", on_demand=True),
    Site("hook_k_input", "b p g d", "residual read by each head's key, before ln1", on_demand=True),
    Site("hook_v_input", "b p g d", "residual read by each head's value, before ln1", on_demand=True),
    Site("attn.hook_q", "b p h e", "queries, before rotation"),
    Site("attn.hook_k", "b p g e", "keys, before rotation"),
    Site("attn.hook_v", "b p g e", "values"),
    Site(
        "attn.hook_rot_q", "b p h e", "queries after rotation",
        lambda c: isinstance(c.position, Rotary),
    ),
    Site(
        "attn.hook_rot_k", "b p g e", "keys after rotation",
        lambda c: isinstance(c.position, Rotary),
    ),
    Site("attn.hook_attn_scores", "b h q k", "scaled scores, -inf where the mask forbids"),
    Site("attn.hook_pattern", "b h q k", "attention pattern; rows sum to 1"),
    Site("attn.hook_z", "b p h e", "pattern @ values, per head"),
    Site("attn.hook_result", "b p h d", "what each head writes (z @ W_O), no bias", on_demand=True),
    Site("hook_attn_out", "b p d", "what attention adds to the stream, bias included"),
    Site(
        "hook_resid_mid", "b p d", "residual stream between attention and MLP",
        lambda c: c.mlp is not None and not c.parallel,
    ),
    Site("hook_mlp_in", "b p d", "residual read by the MLP, before ln2", _has_mlp, on_demand=True),
    Site(
        "ln2.hook_scale", "b p 1", "what the norm before the MLP divides by",
        lambda c: _has_mlp(c) and _has_norm(c),
    ),
    Site(
        "ln2.hook_normalized", "b p d", "input of the MLP, after gamma and beta",
        lambda c: _has_mlp(c) and _has_norm(c),
    ),
    Site("mlp.hook_pre", "b p m", "neurons before the non-linearity (the gate, if gated)", _has_mlp),
    Site(
        "mlp.hook_pre_linear", "b p m", "the linear branch that the gate multiplies",
        lambda c: c.mlp is not None and c.mlp.gated,
    ),
    Site("mlp.hook_post", "b p m", "neurons after the non-linearity (and the gate)", _has_mlp),
    Site("hook_mlp_out", "b p d", "what the MLP adds to the stream, bias included", _has_mlp),
    Site("hook_resid_post", "b p d", "residual stream leaving the block"),
)  # fmt: skip

MODEL_SITES: tuple[Site, ...] = (
    Site("hook_embed", "b p d", "token embeddings"),
    Site(
        "hook_pos_embed", "b p d", "position embeddings",
        lambda c: isinstance(c.position, Learned),
    ),
    Site(
        "ln_final.hook_scale", "b p 1", "what the final norm divides by",
        lambda c: c.final_norm and not isinstance(c.norm, NoNorm),
    ),
    Site(
        "ln_final.hook_normalized", "b p d", "input of the unembedding",
        lambda c: c.final_norm and not isinstance(c.norm, NoNorm),
    ),
    Site("unembed.hook_out", "b p v", "logits", on_demand=True),
)  # fmt: skip

EMBEDDING_SITES = ("hook_embed", "hook_pos_embed")
_BLOCK = {site.name: site for site in BLOCK_SITES}
_MODEL = {site.name: site for site in MODEL_SITES}
_BLOCK_NAME = re.compile(r"blocks\.(-?\d+)\.(.+)")
_SHORT = {name.rpartition("hook_")[2]: name for name in (*_BLOCK, *_MODEL) if "ln" not in name}


def find(name: str, config: ModelConfig) -> tuple[Site, int | None]:
    """The table row of a full site name and its layer (None outside the blocks).

    KeyError if the name is unknown, or if this model has no such site; the message names the nearest that it has.
    """
    match = _BLOCK_NAME.fullmatch(name)
    layer = int(match[1]) if match else None
    site = _BLOCK.get(match[2]) if match else _MODEL.get(name)
    if site is None:
        hint = nearest(name, names(config, on_demand=True))
        raise KeyError(f"unknown site {name!r}; {hint}")
    if layer is not None and not 0 <= layer < config.n_layers:
        raise KeyError(f"{name!r}: layers are 0 to {config.n_layers - 1} in this model, got {layer}")
    if not site.present(config):
        hint = nearest(name, names(config, on_demand=True))
        raise KeyError(f"this model has no {name!r} ({site.meaning}); {hint}")
    return site, layer


def names(config: ModelConfig, *, on_demand: bool = False) -> tuple[str, ...]:
    """Every site of this model in the order of the forward pass; `on_demand` adds those computed only when asked."""

    def mine(table: tuple[Site, ...]) -> list[str]:
        return [s.name for s in table if s.present(config) and (on_demand or not s.on_demand)]

    outside = mine(MODEL_SITES)
    first = [n for n in outside if n in EMBEDDING_SITES]
    blocks = [f"blocks.{layer}.{n}" for layer in range(config.n_layers) for n in mine(BLOCK_SITES)]
    return (*first, *blocks, *(n for n in outside if n not in EMBEDDING_SITES))


def full_name(short: str, layer: int | None = None, part: str | None = None) -> str:
    """The full name behind a shorthand: `("pattern", 3)`, `("resid_post", 0)`, `("scale", 3, "ln1")`, `("embed",)`."""
    if "hook_" in short:
        return short
    if part is not None:
        inner = f"{part}.hook_{short}"
    elif short in _SHORT:
        inner = _SHORT[short]
    else:
        raise KeyError(f"unknown site shorthand {short!r}; {nearest(short, _SHORT)}")
    return inner if layer is None or inner in _MODEL else f"blocks.{layer}.{inner}"
