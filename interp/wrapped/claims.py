"""The findings about a network as a config that claims all of it, before any of it is proven."""

from __future__ import annotations

from typing import Protocol, cast, runtime_checkable

from torch import Tensor, nn

from interp.model.config import Learned, ModelConfig, NoPosition
from interp.wrapped.network import Trees
from interp.wrapped.records import WrappedBlock, WrappedMixer, WrappedMLP
from interp.wrapped.search import Layer, NetworkPlan

HEADS = ("attn.hook_rot_q", "attn.hook_rot_k", "attn.hook_v", "attn.hook_attn_scores", "attn.hook_pattern")
"""The sites inside attention, scores and pattern last."""
LATE = ("ln_final.hook_scale", "ln_final.hook_normalized", "unembed.hook_out", "unembed.hook_uncapped")
"""The sites after the blocks."""
CONTEXTS = ("max_position_embeddings", "max_seq_len", "seq_length", "max_sequence_length")
"""Keys of configs for the context length."""
UNBOUNDED = 2**20
"""Context length of a network with a config that names none."""


@runtime_checkable
class NetworkConfig(Protocol):
    """Protocol of a Hugging Face config: the two methods that are called here."""

    def to_dict(self) -> dict[str, object]:
        """Every entry of the config."""
        ...

    def get_text_config(self) -> NetworkConfig:
        """The config of the text model, where the network also takes images or sound."""
        ...


def settings(network: nn.Module) -> NetworkConfig:
    """The config of a network."""
    return cast("NetworkConfig", network.config)


def claimed(trees: Trees, plan: NetworkPlan, registry: str) -> ModelConfig:
    """The config that claims every site found in `plan`; `registry`: why attention cannot be replaced, "" if it can."""
    theirs = settings(trees.plain).get_text_config()
    embedding = cast("nn.Embedding", trees.plain.get_input_embeddings()).weight  # type: ignore[operator]
    head = cast("nn.Linear", trees.plain.get_submodule(plan.head or ""))
    width = plan.width
    with_mlp = [layer for layer in plan.layers if "mlp_out" in layer.writers]
    middles = {layer.middle for layer in with_mlp}
    before = middles.pop() if len(middles) == 1 else ()
    sandwich = bool(with_mlp) and all(
        w.norm == plan.norm for layer in plan.layers for n, w in layer.writers.items() if n != "more_out"
    )
    heads = _heads(plan, theirs)
    widths = [layer.z_width for layer in plan.layers if layer.z_width]
    mlp = WrappedMLP(
        next((layer.mlp_width for layer in with_mlp if layer.mlp_width), 0),
        any(layer.writers["mlp_out"].mixes for layer in with_mlp),
    )
    return ModelConfig(
        n_layers=len(plan.layers), d_model=width, n_heads=heads[0], n_kv_heads=heads[1],
        n_ctx=_context(theirs, trees.plain, plan), d_vocab=embedding.shape[0],
        d_head=max(1, (widths[0] if widths else width) // heads[0]),
        mlp=mlp if with_mlp else None,
        mixer=tuple(_mixer(plan, layer, heads, before, sandwich) for layer in plan.layers) or WrappedMixer(),
        position=NoPosition() if plan.place is None else Learned(plan.place_offset),
        norm=plan.norm, norm_place="sandwich" if sandwich else "pre",
        parallel=bool(with_mlp) and not before and not sandwich, embed_scale=plan.embed_scale,
        embed_norm=plan.embed_norm is not None, block=_block(plan, registry, heads, before),
        d_vocab_out=None if len(head.weight) == len(embedding) else len(head.weight),
        unembed_bias=isinstance(getattr(head, "bias", None), Tensor), tied=head.weight is embedding,
        logit_scale=plan.logit_scale, logit_softcap=plan.softcap,
        mlm_head=None if plan.transform is None else plan.transform.act,
    )  # fmt: skip


def _block(plan: NetworkPlan, registry: str, heads: tuple[int, int], before: tuple[str, ...]) -> WrappedBlock:
    """The record of the blocks: their sublayers, the sites outside the blocks, and why other sites are not claimed."""
    if not plan.layers:
        return _block_without_layers(plan.reasons.get("blocks", ""))
    longest = list(max(plan.layers, key=lambda layer: len(layer.writers)).writers)
    every = dict.fromkeys([*longest, *(name for layer in plan.layers for name in layer.writers)])
    outside = [
        "hook_embed", *["hook_pos_embed"] * (plan.place is not None),
        *["ln_embed.hook_scale", "ln_embed.hook_normalized"] * (plan.embed_norm is not None),
        *LATE,
    ]  # fmt: skip
    refused = [
        (f"blocks.{i}.{site}", why)
        for i, layer in enumerate(plan.layers)
        for site, why in _reasons(layer, registry, heads).items()
    ]
    refused.append(
        ("matrices", "which matrices its MLPs have, and what its gradients meet there, is not known")
    )
    if plan.embed is None:
        refused.append(
            ("embed", "what enters the first block is no multiple of rows of the embedding matrix")
        )
    factors = tuple(_factor(plan, name) for name in every)
    return WrappedBlock(tuple(every), before, factors, tuple(outside), tuple(refused))


def _block_without_layers(why: str) -> WrappedBlock:
    """The record of a network in which no blocks were found: only the final stream and the logits are sites."""
    why = f"{why}; only the final stream is known (hook_stream)"
    names = ("embed", "hook_embed", "matrices", "start", "blocks")
    return WrappedBlock((), (), (), ("hook_stream", *LATE), tuple((name, why) for name in names))


def _factor(plan: NetworkPlan, name: str) -> float:
    return next(layer.writers[name].factor for layer in plan.layers if name in layer.writers)


def _heads(plan: NetworkPlan, theirs: object) -> tuple[int, int]:
    """Numbers of heads and of key/value heads: those of the recorded attention calls, else those of the config."""
    for layer in plan.layers:
        if (seen := layer.attended) is not None and seen.n_heads % seen.n_kv_heads == 0:
            return seen.n_heads, seen.n_kv_heads
    named = (getattr(theirs, name, None) for name in ("num_attention_heads", "num_heads", "n_heads"))
    count = next((n for n in named if isinstance(n, int) and n > 0), 1)
    return count, count


def _context(theirs: object, network: nn.Module, plan: NetworkPlan) -> int:
    if plan.place is not None:
        return int(network.get_parameter(f"{plan.place}.weight").shape[0]) - plan.place_offset
    named = (getattr(theirs, name, None) for name in CONTEXTS)
    return next((n for n in named if isinstance(n, int) and n > 0), UNBOUNDED)


def _mixer(
    plan: NetworkPlan, layer: Layer, heads: tuple[int, int], before: tuple[str, ...], sandwich: bool
) -> WrappedMixer:
    """The mixer record of one block, with the sites that `prove` then tests."""
    offered = ["hook_resid_pre", "hook_resid_post"]
    same = all(abs(w.factor / _factor(plan, n) - 1) < 1e-6 for n, w in layer.writers.items())
    if same:
        offered += [f"hook_{name}" for name in layer.writers]
        offered += ["hook_resid_mid"] if before and layer.middle == before else []
        if sandwich:
            offered += [f"{ln}.hook_{x}" for ln in ("ln1_post", "ln2_post") for x in ("scale", "normalized")]
        bare = (
            layer.writers
            and ("attn_out" in layer.writers)
            and (sandwich or layer.writers["attn_out"].norm is None)
        )
        if bare and layer.output is not None and layer.z_width % heads[0] == 0:
            offered += ["attn.hook_z", "attn.hook_result"]
    seen = layer.attended
    if seen is not None and seen.explained and seen.calls == 1 and (seen.n_heads, seen.n_kv_heads) == heads:
        offered += list(HEADS)
    elif seen is None and layer.mixer:
        offered += list(HEADS[3:])
    return WrappedMixer(tuple(offered))


def _reasons(layer: Layer, registry: str, heads: tuple[int, int]) -> dict[str, str]:
    """Why sites of a block are not claimed, by the site's short name."""
    reasons = dict(layer.reasons)
    no_heads = ""
    if registry:
        no_heads = registry
    elif layer.attended is None:
        no_heads = "what mixes positions here asks no attention of the registry"
    elif layer.attended.softmaxes != 1 or layer.attended.calls != 1:
        no_heads = f"it asks {layer.attended.calls} times for attention, whose written-out form takes "
        no_heads += f"{layer.attended.softmaxes} softmaxes over keys"
    elif not layer.attended.explained:
        no_heads = (
            "its scores are used beside the softmax, or it gives something else than pattern times values"
        )
    else:
        no_heads = "its heads are not as many as those of other layers" * (
            (layer.attended.n_heads, layer.attended.n_kv_heads) != heads
        )
    if no_heads:
        reasons |= dict.fromkeys(HEADS, no_heads)
    return reasons
