"""The output lens: what one head, MLP, attention layer or neuron wrote at each position, in words.

The part's write is carried to the logits by the linear part of every norm on its way, at the scale that norm really had
(a lens of a whole state recomputes the norm, a part of a state may not). So the logits of all parts and the biases sum
to the model's: it is direct logit attribution to every word of the vocabulary at once. Geva et al. 2022; Elhage et al.
2021. It shows what a part says directly, not what later parts make of it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.precision import wide
from interp.core.results import labelled
from interp.core.stats import Partial, Rows
from interp.core.tiles import row_tiles
from interp.data.batch import Batch
from interp.data.text import Prompts
from interp.lenses.lens import _targets
from interp.model.config import MLP, MLPS, ModelConfig, NoNorm
from interp.model.sites import final_stream
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.analysis import Analysis, run_batches
from interp.passes.observe import Subject
from interp.residual.decomposition import not_linear

if TYPE_CHECKING:
    import xarray as xr

_NORMS = {"attn_out": "ln1", "cross_attn_out": "ln_cross", "mlp_out": "ln2"}
_FORMS = (
    "L3H2 (a head; of cross-attention L3X2), L3N17 (a neuron; of the MLP before attention L3B17), 3_attn_out, "
    "3_mlp_out or 3_mlp_before_out"
)


@dataclass(frozen=True)
class Part:
    """One part of a model that writes to the residual stream."""

    layer: int
    sublayer: str
    """mlp_before_out, attn_out, cross_attn_out or mlp_out."""
    unit: int | None = None
    """The head or the neuron; None = the whole sublayer, biases included."""

    @classmethod
    def of(cls, label: str, config: ModelConfig) -> "Part":
        """The part behind a label of `attribute`: `L3H2`, `L3N17`, `3_mlp_out`.

        Errors: ValueError for another form or a part that such a model does not have, IndexError beyond its size.
        """
        if found := re.fullmatch(r"L(\d+)([HXNB])(\d+)", label):
            sublayer = {"H": "attn_out", "X": "cross_attn_out", "N": "mlp_out", "B": "mlp_before_out"}[
                found[2]
            ]
            part = cls(int(found[1]), sublayer, int(found[3]))
        elif found := re.fullmatch(r"(\d+)_((?:cross_)?attn_out|mlp_(?:before_)?out)", label):
            part = cls(int(found[1]), found[2])
        else:
            raise ValueError(f"a part is required, {_FORMS}; got {label!r}")
        if part.sublayer not in config.sublayers:
            raise ValueError(
                f"{label!r} requires a model with {part.sublayer}; this one has {config.sublayers}"
            )
        if not part.layer < config.n_layers:
            raise IndexError(f"layers are 0 to {config.n_layers - 1}, got {label!r}")
        if part.unit is not None:
            if part.sublayer in MLPS and not isinstance(config.mlp, MLP):
                raise ValueError(
                    f"{label!r}: neurons require a plain or gated MLP; this is {config.mlp_in_words}"
                )
            neurons = isinstance(config.mlp, MLP) and part.sublayer in MLPS
            size = config.mlp.d_mlp if neurons and config.mlp is not None else config.n_heads
            if not part.unit < size:
                raise IndexError(f"layer {part.layer} has units 0 to {size - 1}, got {label!r}")
        return part

    def reads(self, config: ModelConfig) -> tuple[Read, ...]:
        """What `write` needs: the part's own activations, and the scale of each norm between it and the end."""
        sites = [self._site(), final_stream(config)]
        if not isinstance(config.norm, NoNorm):
            if self.unit is not None and config.norm_place in ("sandwich", "output"):
                sites.append(f"blocks.{self.layer}.{self._own_norm()}.hook_scale")
            if config.norm_place == "post":
                later = [(self.layer, s) for s in config.sublayers[config.sublayers.index(self.sublayer) :]]
                later += [(i, s) for i in range(self.layer + 1, config.n_layers) for s in config.sublayers]
                sites += [f"blocks.{i}.{_NORMS[s]}.hook_scale" for i, s in later]
        return tuple(Read(site) for site in sites)

    def write(self, trace: Trace, model: Transformer) -> Float[Tensor, "b p d"]:
        """What the part wrote, behind the linear part of every norm up to the unembedding, in float32 at least."""
        out = self._added(trace, model)
        for layer in range(self.layer, model.config.n_layers):
            block, order = model.block(layer), model.config.sublayers
            first = order.index(self.sublayer) if layer == self.layer else 0
            for sublayer in order[first:]:
                norm = block.sum_norm(sublayer)
                if norm is not None and not isinstance(norm.kind, NoNorm):
                    out = norm.frozen(out, wide(trace[Read(f"blocks.{layer}.{norm.name}.hook_scale")]))
        return model.ln_final.frozen(out, model.ln_final.scale(wide(trace[Read(final_stream(model.config))])))

    def _added(self, trace: Trace, model: Transformer) -> Float[Tensor, "b p d"]:
        """What the part added to the stream."""
        found, config = wide(trace[Read(self._site())]), model.config
        if self.unit is None:
            return found
        cross, before = (self.sublayer == name for name in ("cross_attn_out", "mlp_before_out"))
        weights, neuron = Weights(model).layer(self.layer, cross=cross, before=before), self.sublayer in MLPS
        matrix = weights.W_out if neuron else weights.W_O
        assert matrix is not None
        rows = matrix[self.unit : self.unit + 1] if neuron else matrix[self.unit]
        chosen = found[..., self.unit, None] if neuron else found[:, :, self.unit]
        out = chosen @ rows.to(found)
        norm = model.block(self.layer).post_norm(self.sublayer)
        if norm is not None and not isinstance(norm.kind, NoNorm):
            out = norm.frozen(out, wide(trace[Read(f"blocks.{self.layer}.{norm.name}.hook_scale")]))
        return out * config.factor(self.sublayer)

    def _site(self) -> str:
        inner = f"hook_{self.sublayer}"
        if self.unit is not None:
            inner = f"{self.sublayer.removesuffix('_out')}.hook_{'post' if self.sublayer in MLPS else 'z'}"
        return f"blocks.{self.layer}.{inner}"

    def _own_norm(self) -> str:
        return {"attn_out": "ln1_post", "mlp_out": "ln2_post"}[self.sublayer]


def output_lens(
    model: Subject,
    prompts: Prompts,
    part: str,
    *,
    answer: str | int | Sequence[str | int] | None = None,
    top: int = 10,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """What one part of the model says at each position, in logits relative to their mean over the vocabulary.

    Returns Dataset[prompt, pos]: `top_token`, `top_logit`, `bottom_token`, `bottom_logit` [.., rank] (what it promotes
    and what it suppresses, strongest first), `vocabulary_mean` (what was subtracted), `target_logit` (of `answer`, else
    of the next token; NaN where there is none) and `norm` of the write as the unembedding reads it.
    part: a component as `attribute` names it, `L3H2`, `L3N17`, `3_attn_out`, `3_mlp_out` (with its biases); of the MLP
    before attention in Macaron blocks `L3B17`, `3_mlp_before_out`.
    target_logit + vocabulary_mean at the last position is the part's number in `attribute`. Logits are those before a
    soft cap, norms frozen at their real scale. Padded positions hold NaN and token -1.
    Errors: ValueError or IndexError for a part that the model lacks; ValueError without logits linear in the stream.

    Example:
        >>> found = output_lens(model, "When Mary and John went to the shop, John gave a drink to", "L2H3")
        >>> words = model.text.pieces(found.top_token.values[0, -1].tolist())
    """
    batch = model.text.batch(prompts, prepend_bos=prepend_bos)
    if answer is not None:
        batch = batch.with_answers(model.text.targets(answer, len(batch)), None)
    analysis = output(model.transformer.config, part, top=top)
    return run_batches([analysis], model.transformer, batch.split(batch_size))[analysis.name]


def output(config: ModelConfig, part: str, *, top: int = 10) -> Analysis:
    """The analysis behind `output_lens`."""
    if not 1 <= top <= config.d_vocab:
        raise ValueError(f"top must be in [1, {config.d_vocab}], got {top}")
    if what := not_linear(config):
        raise ValueError(
            "an output lens requires logits that are linear in the normed stream (no masked-LM head); "
            f"this model {what}"
        )
    chosen = Part.of(part, config)
    return Analysis(
        name="output_lens",
        reads=chosen.reads(config),
        compute=partial(_compute, part=chosen, top=top),
        reduction=Rows,
        finish=partial(_finish, config=config, part=part),
    )


@torch.no_grad()
def _compute(trace: Trace, batch: Batch, model: Transformer, part: Part, top: int) -> Mapping[str, Tensor]:
    written = part.write(trace, model)
    keep = batch.real
    found = spoken(written[keep], model, _targets(batch)[keep], top)
    out = {}
    for name, value in found.items():
        nothing = torch.nan if value.is_floating_point() else -1
        every = value.new_full((*keep.shape, *value.shape[1:]), nothing)
        every[keep] = value
        out[name] = every
    return out


def spoken(
    written: Float[Tensor, "n d"], model: Transformer, target: Tensor, top: int
) -> dict[str, Float[Tensor, "n ..."] | Tensor]:
    """The vocabulary's logits of writes that stand before the unembedding, and what `output_lens` says of them.

    No more than 64 MiB of logits exist at a time.
    """
    unembedding = Weights(model).W_U
    chunks: list[dict[str, Tensor]] = []
    for first, logits in row_tiles(written * model.config.logit_scale, unembedding):
        own = target[first : first + len(logits)]
        mean = logits.mean(-1, keepdim=True)
        logits -= mean
        best, worst = logits.topk(top), logits.topk(top, largest=False)
        of_target = logits.gather(1, own.clamp_min(0)[:, None])[:, 0]
        chunks.append(
            {
                "top_token": best.indices, "top_logit": best.values,
                "bottom_token": worst.indices, "bottom_logit": worst.values,
                "vocabulary_mean": mean[:, 0], "target_logit": of_target.masked_fill(own < 0, torch.nan),
            }
        )  # fmt: skip
    found = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    return {**found, "norm": written.norm(dim=-1)}


def _finish(merged: Partial, config: ModelConfig, part: str) -> "xr.Dataset":
    assert isinstance(merged, Rows)
    dims = ("prompt", "pos", "rank")
    unit = "logits" if config.logit_softcap is None else "logits before the soft cap"
    return labelled(
        "output_lens",
        {name: (dims[: value.ndim], value) for name, value in merged.rows.items()},
        attrs={
            "part": part, "unit": f"{unit}, relative to their mean over the vocabulary",
            "norms": "frozen at their real scale", "null": "0: the part says nothing about the token",
        },
    )  # fmt: skip
