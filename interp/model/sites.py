"""The one table of sites: every place in a forward pass that can be read or edited.

Names and axis orders are TransformerLens' (`blocks.3.attn.hook_pattern`, `[batch, head, query, key]`): the
field's common tongue. A site exists only if its model has the part (no `mlp.hook_post` without an MLP).
Sites marked `on_demand` are computed only when somebody asks for them by name; reading "everything" skips them.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from interp.core.shapes import nearest
from interp.model.config import MLP, ConvMLP, ModelConfig, MoE, NoNorm, Rotary, Softmax
from interp.model.mixer_variants import Differential, DualChunk, Lightning, LongTermMemory, Polar

DIMS = {
    "p": "pos", "h": "head", "g": "kv_head", "q": "query", "k": "key", "m": "neuron", "x": "expert", "s": "source",
}  # fmt: skip
"""The word for each axis along which cells of a site are told apart; the others hold vectors."""
WORDS = {**DIMS, "d": "d_model", "e": "d_head", "v": "vocabulary", "c": "half"}
"""The word for every axis of a site but the batch row."""


@dataclass(frozen=True)
class Site:
    """One row of the table: where it is, its axes, what it holds, and which models have it."""

    name: str
    axes: str
    meaning: str
    present: Callable[[ModelConfig], bool] = lambda config: True
    on_demand: bool = False


def _neurons(c: ModelConfig) -> bool:
    return isinstance(c.mlp, MLP | ConvMLP)


def _convolved(c: ModelConfig) -> bool:
    return isinstance(c.mlp, ConvMLP)


def _experts(c: ModelConfig) -> bool:
    return isinstance(c.mlp, MoE)


def _has_mlp(c: ModelConfig) -> bool:
    return c.mlp is not None


def _macaron(c: ModelConfig) -> bool:
    return c.macaron


def _normed(c: ModelConfig) -> bool:
    return not isinstance(c.norm, NoNorm)


def _cross(c: ModelConfig) -> bool:
    return c.cross_attention


def _rotary(c: ModelConfig) -> bool:
    return isinstance(c.position, Rotary) and any(m.traits.queries and m.traits.rotated for m in c.mixers)


def _trait(name: str) -> Callable[[ModelConfig], bool]:
    """Whether the mixer has this (`Traits`); hybrid stacks are asked layer by layer."""
    return lambda c: any(getattr(mixer.traits, name) for mixer in c.mixers)


_queries = _trait("queries")


def _lightning(c: ModelConfig) -> bool:
    return any(isinstance(mixer, Lightning) for mixer in c.mixers)


def _polar(c: ModelConfig) -> bool:
    return any(isinstance(mixer, Polar) for mixer in c.mixers)


def _gated(c: ModelConfig) -> bool:
    beside = ("context", "gate")
    return _polar(c) or any(
        (isinstance(mixer, Lightning) and mixer.gate)
        or (isinstance(mixer, LongTermMemory) and mixer.arrangement in beside)
        for mixer in c.mixers
    )


def _remembers(c: ModelConfig) -> bool:
    return any(isinstance(mixer, LongTermMemory) for mixer in c.mixers)


def _dual_chunk(c: ModelConfig) -> bool:
    return any(isinstance(mixer, DualChunk) for mixer in c.mixers)


def _differential(c: ModelConfig) -> bool:
    return any(isinstance(mixer, Differential) for mixer in c.mixers)


def _refined(c: ModelConfig) -> bool:
    return any(isinstance(mixer, Softmax) and mixer.refinement is not None for mixer in c.mixers)


def _smeared(c: ModelConfig) -> bool:
    return any(isinstance(mixer, Softmax) and mixer.smeared_keys for mixer in c.mixers)


def _norm_sites(
    name: str, place: str, present: Callable[[ModelConfig], bool], axes: tuple[str, str] = ("b p 1", "b p d")
) -> tuple[Site, Site]:
    """The two sites of a norm: what it divides by, and what comes out."""
    scale = Site(f"{name}.hook_scale", axes[0], f"what the norm {place} divides by", present)
    meaning = f"output of the norm {place}, gamma and beta applied"
    return scale, Site(f"{name}.hook_normalized", axes[1], meaning, present)


def _qk_norm(kind: str) -> Callable[[ModelConfig], bool]:
    return lambda c: _normed(c) and c.qk_norm == kind and _queries(c)


def _head_norm(part: str, letter: str) -> tuple[Site, ...]:
    """The sites of the norm of queries or keys; one scale per head, or one for all heads together."""
    axes = {"head": f"b p {letter} 1", "width": "b p 1 1"}
    rows = [
        _norm_sites(f"attn.{part}_norm", f"of {part}", _qk_norm(kind), (scale, f"b p {letter} e"))
        for kind, scale in axes.items()
    ]
    return (*rows[0], *rows[1])


_ATTENTION = (
    Site("attn.hook_q", "b p h e", "queries, before norm and rotation", _queries),
    Site("attn.hook_k", "b p g e", "keys, before norm and rotation", _queries),
    Site("attn.hook_v", "b p g e", "values"),
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


def _crossed(site: Site) -> Site:
    """The same site of cross-attention, whose keys stand at source positions."""
    axes = site.axes.replace("k", "s")
    if site.name in ("attn.hook_k", "attn.hook_v"):
        axes = axes.replace("p", "s")
    return replace(site, name=f"cross_{site.name}", axes=axes, present=_cross)


_MLP = (
    Site("mlp.hook_expanded", "b p m", "the gate's branch before its convolution, behind SiLU", _convolved),
    Site("mlp.hook_expanded_linear", "b p m", "the linear branch before its convolution, behind SiLU", _convolved),
    Site("mlp.hook_pre", "b p m", "neurons before the non-linearity (the gate, if gated)", _neurons),
    Site(
        "mlp.hook_pre_linear", "b p m", "the linear branch that the gate multiplies",
        lambda c: _convolved(c) or (isinstance(c.mlp, MLP) and c.mlp.gated),
    ),
    Site("mlp.hook_post", "b p m", "neurons after the non-linearity (and the gate)", _neurons),
    Site("mlp.hook_router_logits", "b p x", "the router's score of every expert", _experts),
    Site("mlp.hook_expert_weights", "b p x", "the weight of every expert, 0 where not chosen", _experts),
    Site("mlp.hook_expert_out", "b p x d", "each expert's weighted output", _experts, on_demand=True),
)  # fmt: skip


def _before(site: Site) -> Site:
    """The same site of the MLP before attention, in Macaron blocks."""
    return replace(
        site, name=f"mlp_before.{site.name.removeprefix('mlp.')}",
        present=lambda c: c.macaron and site.present(c),
    )  # fmt: skip


BLOCK_SITES: tuple[Site, ...] = (
    Site("hook_resid_pre", "b p d", "residual stream entering the block"),
    Site("hook_mlp_before_in", "b p d", "residual read by the first MLP, before ln0", _macaron, on_demand=True),
    *_norm_sites("ln0", "before the first MLP", lambda c: _normed(c) and c.macaron),
    *map(_before, _MLP[2:]),
    Site("hook_mlp_before_out", "b p d", "what the first MLP adds to the stream: half its output", _macaron),
    Site("hook_resid_pre_attn", "b p d", "residual stream after the first MLP, which attention reads", _macaron),
    *_norm_sites(
        "ln1", "before attention (post-norm: after it)", lambda c: _normed(c) and c.norm_place != "output"
    ),
    Site("hook_q_input", "b p h d", "residual read by each head's query, before ln1", _queries, on_demand=True),
    Site("hook_k_input", "b p g d", "residual read by each head's key, before ln1", _queries, on_demand=True),
    Site("hook_v_input", "b p g d", "residual read by each head's value, before ln1", on_demand=True),
    *_ATTENTION[:3],
    *_head_norm("q", "h"),
    *_head_norm("k", "g"),
    Site("attn.hook_smeared_k", "b p g e", "keys with a share of the key before, before rotation", _smeared),
    Site("attn.hook_momentum", "b p h", "the share of its last step that a memory takes again", _remembers),
    Site("attn.hook_step", "b p h", "the factor on a memory's gradient", _remembers),
    Site("attn.hook_forget", "b p h", "the share of a memory that is lost", _remembers),
    Site("attn.hook_surprise", "b p h", "norm of the gradient that a memory learns from", _remembers),
    Site("attn.hook_memory_read", "b p h e", "what a memory returns (context: what attention sees of it)", _remembers),
    Site("attn.hook_rot_q", "b p h e", "queries after rotation", _rotary),
    Site("attn.hook_rot_q_successive", "b p h e", "queries rotated for keys of the chunk before", _dual_chunk),
    Site("attn.hook_rot_q_inter", "b p h e", "queries rotated for keys of earlier chunks", _dual_chunk),
    Site("attn.hook_rot_k", "b p g e", "keys after rotation", _rotary),
    _ATTENTION[3],
    Site("attn.hook_first_pattern", "b h q k", "the pattern before its refinement; rows sum to 1", _refined),
    Site("attn.hook_pattern_1", "b h q k", "pattern of the first halves; rows sum to 1", _differential),
    Site("attn.hook_pattern_2", "b h q k", "pattern of the second halves, which is subtracted", _differential),
    _ATTENTION[4],
    Site(
        "attn.hook_polar_pattern", "b c h q k",
        "weights of the values' halves: same-sign (0), opposite-sign (1); rows sum to 1", _polar,
    ),
    Site(
        "attn.hook_window_pattern", "b h q c",
        "weights of the persistent vectors, then of the segment before (context: of the readings), then of the "
        "query's own segment; rows sum to 1", _remembers,
    ),
    *_norm_sites("attn.z_norm", "of z, each head alone", _differential, ("b p h 1", "b p h e")),
    *_norm_sites("attn.out_norm", "of z, all heads together", _lightning, ("b p 1 1", "b p h e")),
    Site("attn.hook_gate", "b p h e", "what z is multiplied by", _gated),
    *_ATTENTION[5:],
    *_norm_sites(
        "ln1_post", "of attention's output", lambda c: _normed(c) and c.norm_place in ("sandwich", "output")
    ),
    Site("hook_attn_out", "b p d", "what attention adds to the stream, bias, norm and factor included"),
    Site(
        "hook_resid_mid", "b p d", "residual stream after attention",
        lambda c: (_has_mlp(c) or c.cross_attention) and not c.parallel,
    ),
    *_norm_sites("ln_cross", "before cross-attention (post-norm: after it)", lambda c: _normed(c) and _cross(c)),
    *(_crossed(site) for site in _ATTENTION),
    Site("hook_cross_attn_out", "b p d", "what cross-attention adds to the stream", _cross),
    Site(
        "hook_resid_mid_cross", "b p d", "residual stream after cross-attention",
        lambda c: _cross(c) and _has_mlp(c),
    ),
    Site("hook_mlp_in", "b p d", "residual read by the MLP, before ln2", _has_mlp, on_demand=True),
    *_norm_sites(
        "ln2", "before the MLP (post-norm: after it)",
        lambda c: _has_mlp(c) and _normed(c) and not c.shared_norm and c.norm_place != "output",
    ),
    *_MLP,
    *_norm_sites(
        "ln2_post", "of the MLP's output",
        lambda c: _has_mlp(c) and _normed(c) and c.norm_place in ("sandwich", "output"),
    ),
    Site("hook_mlp_out", "b p d", "what the MLP adds to the stream, bias, norm and factor included", _has_mlp),
    Site("hook_resid_post", "b p d", "residual stream leaving the block (post-norm: before its last norm)"),
    Site(
        "hook_normalized_resid_post", "b p d", "residual stream leaving a post-norm block",
        lambda c: c.norm_place == "post",
    ),
)  # fmt: skip

MODEL_SITES: tuple[Site, ...] = (
    Site("hook_embed", "b p d", "token embeddings, scaled where the family does so"),
    Site("hook_pos_embed", "b p d", "position embeddings", lambda c: c.position_embedded),
    Site("hook_type_embed", "b p d", "token type embeddings", lambda c: c.n_token_types > 0),
    *_norm_sites("ln_embed", "after the embeddings", lambda c: c.embed_norm and _normed(c)),
    *_norm_sites("ln_final", "before the unembedding", lambda c: c.final_norm and _normed(c)),
    Site(
        "unembed.hook_uncapped", "b p v", "logits before their soft cap",
        lambda c: c.logit_softcap is not None, on_demand=True,
    ),
    Site("unembed.hook_out", "b p v", "logits", lambda c: c.unembed, on_demand=True),
)  # fmt: skip

EMBEDDING_SITES = tuple(s.name for s in MODEL_SITES if s.name.startswith(("hook_", "ln_embed")))
_BLOCK_NAME = re.compile(r"blocks\.(-?\d+)\.(.+)")
_SHORT = {
    s.name.rpartition("hook_")[2]: s.name
    for s in reversed((*BLOCK_SITES, *MODEL_SITES))
    if "ln" not in s.name and "norm." not in s.name
    and not s.name.startswith(("cross_", "mlp_before."))
}  # fmt: skip


def _by_name(table: tuple[Site, ...]) -> dict[str, list[Site]]:
    rows: dict[str, list[Site]] = {}
    for site in table:
        rows.setdefault(site.name, []).append(site)
    return rows


_BLOCK_ROWS, _MODEL_ROWS = _by_name(BLOCK_SITES), _by_name(MODEL_SITES)


def _row(name: str, table: dict[str, list[Site]], config: ModelConfig) -> Site | None:
    """The row of a name: the one this model has, where several models' rows share the name."""
    rows = table.get(name, [])
    return next((site for site in rows if site.present(config)), rows[0] if rows else None)


@functools.lru_cache(8192)
def find(name: str, config: ModelConfig) -> tuple[Site, int | None]:
    """The table row of a full site name and its layer (None outside the blocks).

    KeyError if the name is unknown, or if this model has no such site; the message names the nearest that it has.
    """
    match = _BLOCK_NAME.fullmatch(name)
    layer = int(match[1]) if match else None
    there = layer is not None and 0 <= layer < config.n_layers
    here = config.at_layer(layer) if layer is not None and there else config
    site = _row(match[2], _BLOCK_ROWS, here) if match else _row(name, _MODEL_ROWS, config)
    if site is None:
        hint = nearest(name, names(config, on_demand=True))
        raise KeyError(f"unknown site {name!r}; {hint}")
    if layer is not None and not there:
        raise KeyError(f"{name!r}: layers are 0 to {config.n_layers - 1} in this model, got {layer}")
    if not site.present(here):
        hint = nearest(name, names(config, on_demand=True))
        raise KeyError(f"this model has no {name!r} ({site.meaning}); {hint}")
    return site, layer


def is_late(name: str) -> bool:
    """Whether a site comes after the last block: the final norm, the logits."""
    return _BLOCK_NAME.fullmatch(name) is None and name not in EMBEDDING_SITES


@functools.cache
def axes_of(name: str) -> str:
    """The axes of a full site name, whatever the model; KeyError for a name that no model has."""
    match = _BLOCK_NAME.fullmatch(name)
    table, short = (BLOCK_SITES, match[2]) if match else (MODEL_SITES, name)
    found = next((site.axes for site in table if site.name == short), None)
    if found is None:
        raise KeyError(f"no model has {name!r}; {nearest(short, [site.name for site in table])}")
    return found


def names(config: ModelConfig, *, on_demand: bool = False) -> tuple[str, ...]:
    """Every site of this model in the order of the forward pass; `on_demand` adds those computed only when asked."""

    def mine(table: tuple[Site, ...], config: ModelConfig) -> list[str]:
        return [s.name for s in table if s.present(config) and (on_demand or not s.on_demand)]

    outside = mine(MODEL_SITES, config)
    first = [n for n in outside if n in EMBEDDING_SITES]
    layers = [config.at_layer(layer) for layer in range(config.n_layers)]
    each = {here: mine(BLOCK_SITES, here) for here in dict.fromkeys(layers)}
    blocks = [f"blocks.{layer}.{n}" for layer, here in enumerate(layers) for n in each[here]]
    return (*first, *blocks, *(n for n in outside if n not in EMBEDDING_SITES))


def embedding_parts(config: ModelConfig) -> tuple[str, ...]:
    """The sites whose sum enters the first block (through the norm after the embeddings, where there is one)."""
    return tuple(s.name for s in MODEL_SITES if s.name.endswith("embed") and s.present(config))


def final_stream(config: ModelConfig) -> str:
    """The site of the residual stream that leaves the last block."""
    last = "hook_normalized_resid_post" if config.norm_place == "post" else "hook_resid_post"
    return f"blocks.{config.n_layers - 1}.{last}"


def attention_input(config: ModelConfig, layer: int) -> str:
    """The site of the residual stream that attention of a block reads, before its norm."""
    return f"blocks.{layer}.hook_resid_pre{'_attn' if config.macaron else ''}"


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
    outside = any(site.name == inner for site in MODEL_SITES)
    return inner if layer is None or outside else f"blocks.{layer}.{inner}"
