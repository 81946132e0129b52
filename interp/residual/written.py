"""What one part adds to the residual stream, after every norm up to the unembedding with the scales of the pass.

A logit lens on the whole stream recomputes the final norm's scale. For a part of the stream the scale has to be that of
the pass: only then do the parts sum to the model's logits.
"""

from collections.abc import Iterator, Mapping

from jaxtyping import Float
from torch import Tensor

from interp.core.stats import upcast
from interp.model.config import MLP, MLPS, ModelConfig
from interp.model.edits import Add
from interp.model.parts import Part, PartName, as_part
from interp.model.sites import final_stream, names
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.edited import STREAM
from interp.passes.frozen import (
    OUTPUT_NORMS,
    SUM_NORMS,
    final_norm,
    onwards,
    output_norm,
    output_scale,
    sum_norm,
    sum_scale,
)

_UNITS = {
    "head": "attn_out", "cross_head": "cross_attn_out", "neuron": "mlp_out", "neuron_before": "mlp_before_out",
}  # fmt: skip
"""The sublayer whose output contains the parts of a kind."""
_WHOLE = ("attn", "cross_attn", "mlp", "mlp_before")


def as_writer(name: PartName, config: ModelConfig) -> Part:
    """The named part of this model, which is checked to write to the residual stream on its own.

    Raises:
        KeyError, IndexError: a part that the model lacks.
        ValueError: a part that is no head, neuron or whole sublayer, and a neuron of a mixture of experts or of an MLP
            with a convolution.
    """
    part = as_part(name, config)
    if part.kind not in (*_UNITS, *_WHOLE):
        raise ValueError(
            "a part that writes to the stream is required, L3H2 (a head; of cross-attention L3X2), L3N17 (a neuron; of "
            f"the MLP before attention L3B17), L3.attn, L3.mlp or L3.mlp_before, got {part}"
        )
    if _is_neuron(part) and not isinstance(config.mlp, MLP):
        raise ValueError(f"{part}: neurons require a plain or gated MLP; this is {config.mlp_in_words}")
    return part


def sublayer_of(part: Part) -> str:
    """The sublayer through which a part writes: `attn_out`, `cross_attn_out`, `mlp_out` or `mlp_before_out`."""
    return _UNITS.get(part.kind) or f"{part.kind}_out"


def reads_of(part: Part, config: ModelConfig) -> tuple[Read, ...]:
    """Reads that `written_by` needs: the part's own activations, and the scale of each norm after it."""
    assert part.layer is not None
    sites = [part.site, final_stream(config)]
    if part.kind in _UNITS:
        sites += output_scale(config, part.layer, sublayer_of(part))
    sites += [site for place in _sublayers_from(part, config) for site in sum_scale(config, *place)]
    return tuple(Read(site) for site in sites)


def written_by(part: Part, trace: Trace, model: Transformer) -> Float[Tensor, "b p d"]:
    """Addition of the part, after the linear part of every norm up to the unembedding, in float32 at least."""
    seen = {read.site: upcast(trace[read]) for read in reads_of(part, model.config)}
    out = _part_output(part, seen, model)
    for place in _sublayers_from(part, model.config):
        out = sum_norm(model, *place).recorded(seen).through(out)
    return final_norm(model).of(seen[final_stream(model.config)]).through(out)


def check_arrives(part: Part, model: Transformer) -> None:
    """Raises a ValueError for edits between the part and the final stream that change what the part wrote.

    Edits that add to the stream (`Add`) leave it as it is.
    """
    config, sublayer = model.config, sublayer_of(part)
    order = names(config, on_demand=True)
    after = order[order.index(part.site) + 1 :]
    own_sites = {
        f"blocks.{part.layer}.{s}"
        for s in (f"hook_{sublayer}", f"{OUTPUT_NORMS.get(sublayer)}.hook_normalized", "attn.hook_result")
    }
    stream = {site for site in after if site.rpartition(".")[2] in STREAM}
    if config.norms_sum:
        stream |= {
            f"blocks.{layer}.{SUM_NORMS[s]}.hook_normalized" for layer, s in _sublayers_from(part, config)
        }
    acting = [edit for edit in model.edits if edit.site in stream | (own_sites & set(after))]
    if acting := [edit for edit in acting if not isinstance(edit.change, Add)]:
        raise ValueError(
            f"what {part} wrote is changed on its way to the logits by the edit of {acting[0].name} "
            f"({type(acting[0].change).__name__}): under it the part has no direct words of its own"
        )


def _sublayers_from(part: Part, config: ModelConfig) -> Iterator[tuple[int, str]]:
    """Layer and name of every sublayer from the part's own to the last one."""
    assert part.layer is not None
    return onwards(config, part.layer, sublayer_of(part))


def _part_output(part: Part, seen: Mapping[str, Tensor], model: Transformer) -> Float[Tensor, "b p d"]:
    """Addition of the part to the stream."""
    activations = seen[part.site]
    if part.kind in _WHOLE:
        return activations
    assert part.layer is not None and part.index is not None
    weights = Weights(model).layer(
        part.layer, cross=part.kind == "cross_head", before=part.kind == "neuron_before"
    )
    if _is_neuron(part):
        assert weights.W_out is not None
        out = activations[..., part.index, None] @ weights.W_out[part.index : part.index + 1].to(activations)
    else:
        out = activations[:, :, part.index] @ weights.W_O[part.index].to(activations)
    return output_norm(model, part.layer, sublayer_of(part)).recorded(seen).through(out)


def _is_neuron(part: Part) -> bool:
    return part.kind in _UNITS and sublayer_of(part) in MLPS
