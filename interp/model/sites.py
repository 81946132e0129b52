"""The one table of sites: every place in a forward pass that can be read or edited.

Names and axis orders are TransformerLens' (`blocks.3.attn.hook_pattern`, `[batch, head, query, key]`), which the
field knows. A site exists only if its model has the part (no `mlp.hook_post` without an MLP). Sites marked
`on_demand` are computed only when they are read by name; reading "everything" skips them.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from interp.core.wording import nearest
from interp.model.records import ConfigRecord, all_records

if TYPE_CHECKING:
    from interp.model.config import ModelConfig

DIMS = {
    "p": "pos", "h": "head", "g": "kv_head", "q": "query", "k": "key", "m": "neuron", "x": "expert", "s": "source",
    "n": "value_head", "j": "key_head", "y": "feature",
}  # fmt: skip
"""Word for each axis along which cells of a site are told apart; the others hold vectors."""
WORDS = {
    **DIMS,
    "d": "d_model",
    "e": "d_head",
    "r": "d_key",
    "f": "d_value",
    "w": "d_latent",
    "u": "channel",
    "v": "vocabulary",
    "c": "half",
}
"""The word for every axis of a site but the batch row."""


@dataclass(frozen=True)
class Site:
    """One row of the table of sites: its name, its axes, what it holds, and which models have it."""

    name: str
    axes: str
    meaning: str
    present: Callable[[ModelConfig], bool] = lambda config: True
    on_demand: bool = False
    before: str = ""
    """Row of the table that a record's site (`ConfigRecord.sites`) stands before."""


def _trait(name: str) -> Callable[[ModelConfig], bool]:
    """Function that says whether a config's mixer has a trait (`Traits`), in hybrid stacks in any layer."""
    return lambda c: any(getattr(mixer.traits, name) for mixer in c.mixers)


_queries, _valued = _trait("queries"), _trait("valued")


def _has_mlp(c: ModelConfig) -> bool:
    return c.mlp is not None


def _has_cross_attention(c: ModelConfig) -> bool:
    return c.cross_attention


def _has_rotary(c: ModelConfig) -> bool:
    return c.rotary_dim > 0 and any(m.traits.queries and m.traits.rotated for m in c.mixers)


def norm_sites(
    name: str,
    place: str,
    present: Callable[[ModelConfig], bool] = lambda config: True,
    axes: tuple[str, str] = ("b p 1", "b p d"),
    *,
    before: str = "",
) -> tuple[Site, Site]:
    """The two sites of a norm: what it divides by, and what comes out."""
    scale = Site(f"{name}.hook_scale", axes[0], f"what the norm {place} divides by", present, before=before)
    meaning = f"output of the norm {place}, gamma and beta applied"
    return scale, Site(f"{name}.hook_normalized", axes[1], meaning, present, before=before)


def _head_norm(part: str, letter: str) -> tuple[Site, ...]:
    """The sites of the norm of queries or keys; one scale per head, or one for all heads together."""

    def rows(scale: str, *kinds: str) -> tuple[Site, Site]:
        return norm_sites(
            f"attn.{part}_norm",
            f"of {part}",
            lambda c: not c.qk_norms.isdisjoint(kinds),
            (scale, f"b p {letter} e"),
        )

    return (*rows(f"b p {letter} 1", "head", "each"), *rows("b p 1 1", "width"))


_ATTENTION = (
    Site("attn.hook_q", "b p h e", "queries, before norm and rotation", _queries),
    Site("attn.hook_k", "b p g e", "keys, before norm and rotation", _queries),
    Site("attn.hook_v", "b p g e", "values", _valued),
    Site(
        "attn.hook_attn_scores",
        "b h q k",
        "scaled scores with their bias, -inf where the mask forbids",
        _trait("scored"),
    ),
    Site(
        "attn.hook_pattern",
        "b h q k",
        "attention pattern; rows sum to 1 (with sinks to less; without a softmax to anything)",
        _trait("patterned"),
    ),
    Site("attn.hook_z", "b p h e", "pattern @ values, per head (normed, in mixers that do so)"),
    Site("attn.hook_result", "b p h d", "each head's z @ W_O, no bias, before any norm", on_demand=True),
)


def _cross_attention_site(site: Site) -> Site:
    """The site of cross-attention that belongs to one of self-attention; its keys stand at source positions."""
    axes = site.axes.replace("k", "s")
    if site.name in ("attn.hook_k", "attn.hook_v"):
        axes = axes.replace("p", "s")
    return replace(site, name=f"cross_{site.name}", axes=axes, present=_has_cross_attention)


BLOCK_SITES: tuple[Site, ...] = (
    Site("hook_resid_pre", "b p d", "residual stream entering the block"),
    *norm_sites(
        "ln1", "before attention (post-norm: after it)", lambda c: c.normed and c.norm_place != "output"
    ),
    Site("hook_q_input", "b p h d", "residual read by each head's query, before ln1", _queries, on_demand=True),
    Site("hook_k_input", "b p g d", "residual read by each head's key, before ln1", _queries, on_demand=True),
    Site(
        "hook_v_input", "b p g d", "residual read by each head's value, before ln1", _trait("values"), on_demand=True
    ),
    *_ATTENTION[:3],
    *_head_norm("q", "h"),
    *_head_norm("k", "g"),
    Site("attn.hook_rot_q", "b p h e", "queries after rotation", _has_rotary),
    Site("attn.hook_rot_k", "b p g e", "keys after rotation", _has_rotary),
    *_ATTENTION[3:],
    *norm_sites(
        "ln1_post", "of attention's output", lambda c: c.normed and c.norms_output
    ),
    Site("hook_attn_out", "b p d", "what attention adds to the stream, bias, norm and factor included"),
    Site(
        "hook_resid_mid", "b p d", "residual stream after attention",
        lambda c: (_has_mlp(c) or c.cross_attention) and not c.parallel,
    ),
    *norm_sites(
        "ln_cross", "before cross-attention (post-norm: after it)", lambda c: c.normed and _has_cross_attention(c)
    ),
    *(_cross_attention_site(site) for site in _ATTENTION),
    Site("hook_cross_attn_out", "b p d", "what cross-attention adds to the stream", _has_cross_attention),
    Site(
        "hook_resid_mid_cross", "b p d", "residual stream after cross-attention",
        lambda c: _has_cross_attention(c) and _has_mlp(c),
    ),
    Site("hook_mlp_in", "b p d", "residual read by the MLP, before ln2", _has_mlp, on_demand=True),
    *norm_sites(
        "ln2", "before the MLP (post-norm: after it)",
        lambda c: _has_mlp(c) and c.normed and not c.shared_norm and c.norm_place != "output",
    ),
    *norm_sites(
        "ln2_post", "of the MLP's output",
        lambda c: _has_mlp(c) and c.normed and c.norms_output,
    ),
    Site("hook_mlp_out", "b p d", "what the MLP adds to the stream, bias, norm and factor included", _has_mlp),
    Site("hook_resid_post", "b p d", "residual stream leaving the block (post-norm: before its last norm)"),
    Site(
        "hook_normalized_resid_post", "b p d", "residual stream leaving a post-norm block",
        lambda c: c.norms_sum,
    ),
)  # fmt: skip

MODEL_SITES: tuple[Site, ...] = (
    Site("hook_embed", "b p d", "token embeddings, scaled where the family does so"),
    Site("hook_pos_embed", "b p d", "position embeddings", lambda c: c.position_embedded),
    Site("hook_type_embed", "b p d", "token type embeddings", lambda c: c.n_token_types > 0),
    *norm_sites("ln_embed", "after the embeddings", lambda c: c.embed_norm and c.normed),
    Site("hook_stream", "b p d", "residual stream of a model without blocks", lambda c: c.n_layers == 0),
    *norm_sites("ln_final", "before the unembedding", lambda c: c.final_norm and c.normed),
    Site(
        "unembed.hook_uncapped", "b p v", "logits before their soft cap",
        lambda c: c.logit_softcap is not None, on_demand=True,
    ),
    Site("unembed.hook_out", "b p v", "logits", lambda c: c.unembed, on_demand=True),
)  # fmt: skip

GATE = Site("attn.hook_gate", "b p h e", "what z is multiplied by", before="attn.hook_z")
"""Site of the gate, which several mixers have."""
MEMORY = (
    Site("attn.hook_memory_q", "b p j r", "queries (Mamba-2: C) after convolution and SiLU", before="attn.hook_z"),
    Site("attn.hook_memory_k", "b p j r", "keys (Mamba-2: B) after convolution and SiLU", before="attn.hook_z"),
    Site("attn.hook_memory_v", "b p n f", "values (Mamba-2: x) after convolution and SiLU", before="attn.hook_z"),
)  # fmt: skip
"""Sites of the mixers that keep a memory of keys' values."""
LOG_DECAY = Site(
    "attn.hook_log_decay", "b p n", "log of the share of the memory that is kept", before="attn.hook_z"
)
READ = Site(
    "attn.hook_read",
    "b p n f",
    "what the memory returns for the query (Mamba-2: and D x)",
    before="attn.hook_z",
)

EMBEDDING_SITES = tuple(s.name for s in MODEL_SITES if s.name.startswith(("hook_", "ln_embed")))
_BLOCK_NAME = re.compile(r"blocks\.(-?\d+)\.(.+)")


def block_rows(config: ModelConfig | None = None) -> tuple[Site, ...]:
    """The sites of a block of this model in the order of the forward pass; of any model, if none is given."""
    return _rows_of_any(tuple(all_records().values())) if config is None else _rows_of(config)


@functools.lru_cache(2)
def _rows_of_any(records: tuple[type[ConfigRecord], ...]) -> tuple[Site, ...]:
    return _rows_with(site for record in records for site in record.any_sites())


@functools.lru_cache(1024)
def _rows_of(config: ModelConfig) -> tuple[Site, ...]:
    rows = _rows_with(site for record in config.records for site in record.sites(config))
    return tuple(site for site in rows if _is_present(site, config))


def _is_present(site: Site, config: ModelConfig) -> bool:
    """Whether this model has the site, and its blocks offer it."""
    return site.present(config) and config.block.offers(site.name, config)


def _rows_with(more: Iterable[Site]) -> tuple[Site, ...]:
    """The table of block sites with further rows, each before the row that it names (`Site.before`)."""
    before: dict[str, dict[Site, None]] = defaultdict(dict)
    for site in more:
        before[site.before][site] = None
    rows = tuple(row for site in BLOCK_SITES for row in (*before.pop(site.name, ()), site))
    for place, lost in before.items():
        known_rows = [site.name for site in BLOCK_SITES]
        raise ValueError(
            f"{next(iter(lost)).name} must stand before a row, {place!r} is none; {nearest(place, known_rows)}"
        )
    return rows


def _row_named(rows: Iterable[Site], name: str) -> Site | None:
    return next((site for site in rows if site.name == name), None)


@functools.lru_cache(8192)
def find(name: str, config: ModelConfig) -> tuple[Site, int | None]:
    """The table row of a full site name and its layer (None outside the blocks).

    Raises:
        KeyError: an unknown name, or a site that this model lacks; the message names the nearest that it has.
    """
    match = _BLOCK_NAME.fullmatch(name)
    layer, short = (int(match[1]), match[2]) if match else (None, name)
    has_layer = layer is not None and 0 <= layer < config.n_layers
    if layer is None:
        site = _row_named((row for row in MODEL_SITES if _is_present(row, config)), short)
    else:
        site = _row_named(block_rows(config.at_layer(layer)), short) if has_layer else None
    if site is None:
        any_row = _row_named(MODEL_SITES if layer is None else block_rows(), short)
        if any_row is not None and layer is not None and not config.n_layers:
            why = config.block.why_not("blocks")
            raise KeyError(f"{name!r}: this model has no blocks{why and f': {why}'}")
        if any_row is not None and layer is not None and not has_layer:
            raise KeyError(f"{name!r}: layers are 0 to {config.n_layers - 1} in this model, got {layer}")
        hint = nearest(name, names(config, on_demand=True))
        if any_row is None:
            raise KeyError(f"unknown site {name!r}; {hint}")
        why = config.block.why_not(name)
        raise KeyError(f"this model has no {name!r} ({any_row.meaning}){why and f': {why}'}; {hint}")
    return site, layer


def is_late(name: str) -> bool:
    """Whether a site comes after the last block: the final norm, the logits."""
    return _BLOCK_NAME.fullmatch(name) is None and name not in EMBEDDING_SITES


def is_of_block(name: str) -> bool:
    """Whether the blocks of any model have a site of this name (`attn.hook_q`)."""
    return _of_any_block(name) is not None


def _of_any_block(name: str) -> Site | None:
    """The site of this name in the blocks of any model.

    The usual rows are searched first: `block_rows` imports `interp.lab`.
    """
    return _row_named(BLOCK_SITES, name) or _row_named(block_rows(), name)


@functools.cache
def axes_of(name: str) -> str:
    """The axes of a full site name, whatever the model; KeyError for a name that no model has."""
    match = _BLOCK_NAME.fullmatch(name)
    short = match[2] if match else name
    found = _of_any_block(short) if match else _row_named(MODEL_SITES, short)
    if found is None:
        table = block_rows() if match else MODEL_SITES
        raise KeyError(f"no model has {name!r}; {nearest(short, [site.name for site in table])}")
    return found.axes


def names(config: ModelConfig, *, on_demand: bool = False) -> tuple[str, ...]:
    """Every site of this model in the order of the forward pass; `on_demand` adds those computed only when asked."""
    outside = [s.name for s in MODEL_SITES if _is_present(s, config) and (on_demand or not s.on_demand)]
    first = [n for n in outside if n in EMBEDDING_SITES]
    blocks = [
        f"blocks.{layer}.{site.name}"
        for layer in range(config.n_layers)
        for site in block_rows(config.at_layer(layer))
        if on_demand or not site.on_demand
    ]
    return (*first, *blocks, *(n for n in outside if n not in EMBEDDING_SITES))


def of_layers(short: str, config: ModelConfig) -> tuple[str, ...]:
    """The full names of a block's site in every layer that has it; KeyError where none has."""
    having = tuple(
        f"blocks.{layer}.{short}"
        for layer in range(config.n_layers)
        if _row_named(block_rows(config.at_layer(layer)), short) is not None
    )
    if not having:
        find(f"blocks.0.{short}", config)  # which says what the model has
    return having


def embedding_parts(config: ModelConfig) -> tuple[str, ...]:
    """The sites whose sum enters the first block (through the norm after the embeddings, where there is one)."""
    return tuple(s.name for s in MODEL_SITES if s.name.endswith("embed") and s.present(config))


def first_stream(config: ModelConfig) -> str:
    """The site of the residual stream that the embeddings leave: what enters the first block, if there are blocks."""
    return "blocks.0.hook_resid_pre" if config.n_layers else "hook_stream"


def final_stream(config: ModelConfig) -> str:
    """The site of the residual stream that the final norm reads: what leaves the last block, if there are blocks."""
    if config.n_layers == 0:
        return "hook_stream"
    return stream_after(config, config.n_layers - 1)


def stream_after(config: ModelConfig, layer: int) -> str:
    """The site of the residual stream that leaves a block."""
    last = "hook_normalized_resid_post" if config.norms_sum else "hook_resid_post"
    return f"blocks.{layer}.{last}"


def attention_input(config: ModelConfig, layer: int) -> str:
    """The site of the residual stream that attention of a block reads, before its norm."""
    return f"blocks.{layer}.{config.block.attention_reads}"


def full_name(short: str, layer: int | None = None, part: str | None = None) -> str:
    """The full name of a shorthand: `("pattern", 3)`, `("resid_post", 0)`, `("scale", 3, "ln1")`, `("embed",)`."""
    if "hook_" in short:
        return short
    inner = _inner(short) if part is None else f"{part}.hook_{short}"
    outside = any(site.name == inner for site in MODEL_SITES)
    return inner if layer is None or outside else f"blocks.{layer}.{inner}"


@functools.cache
def _inner(short: str) -> str:
    if (name := _by_shorthand(BLOCK_SITES).get(short)) is None:
        known_shorts = _by_shorthand(block_rows())
        if (name := known_shorts.get(short)) is None:
            raise KeyError(f"unknown site shorthand {short!r}; {nearest(short, known_shorts)}")
    return name


@functools.lru_cache(2)
def _by_shorthand(of_block: tuple[Site, ...]) -> dict[str, str]:
    """Shorthand (the name after `hook_`) -> site name; the first site if several share a shorthand."""
    names: dict[str, str] = {}
    for site in (*of_block, *MODEL_SITES):
        of_norm = "ln" in site.name or "norm." in site.name
        if not of_norm and not site.name.startswith(("cross_", "mlp_before.", "mlp.shared.")):
            names.setdefault(site.name.rpartition("hook_")[2], site.name)
    return names
