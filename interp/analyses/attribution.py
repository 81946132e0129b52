"""Direct logit attribution: which parts of the model wrote the answer at one position of each prompt.

With the final norm frozen at its actual scale, the logit of a token (or the difference of two) is a sum over what every
part added to the residual stream; so is the projection of the normed stream on any direction. `attribute` returns the
summands and checks the sum. It shows direct effects only: what a part does through later parts is credited to those.
Elhage et al. 2021; Ferrando et al. 2024, section 4.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from interp.analyses.folded import By, Folded, site
from interp.analyses.residual import TOLERANCE, IncompleteSumError, logit_direction, not_linear
from interp.core.results import labelled
from interp.core.shapes import shape_text
from interp.core.stats import Partial, Rows
from interp.engine.analysis import Analysis, run_batches
from interp.engine.batch import Batch
from interp.engine.observe import Subject
from interp.engine.text import Answers, Prompts
from interp.model.config import MLP, MLPS, LayerNorm, ModelConfig, NoNorm
from interp.model.mixer_variants import require
from interp.model.sites import embedding_parts, final_stream
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer

if TYPE_CHECKING:
    import xarray as xr

TOKENS = 512
"""Of one pass, unless told otherwise: as quick as 2048 in GPT-2 small, in 104 to 162 MiB instead of 242 to 254
(`experiments/bench/attribution.py`)."""
_LETTERS = {"mlp_before_out": "B", "mlp_out": "N"}
"""Of the neurons of each MLP."""
_SOURCES = {"attn_out": ("by_source", "source"), "cross_attn_out": ("by_memory", "memory")}


def attribute(
    model: Subject,
    prompts: Prompts,
    answer: Answers,
    wrong: Answers | None = None,
    *,
    by: By = "sublayer",
    pos: int | Sequence[int] = -1,
    top: int | None = None,
    prepend_bos: bool = True,
    batch_size: int | None = None,
) -> "xr.Dataset":
    """How much each part adds to the answer's logit (minus the wrong answer's) at one token of each prompt.

    Returns Dataset[prompt, component] with `logits`, in logit units; `attrs["completeness_error"]` is the largest
    relative difference between the sum over components and the model's own logits. With `by="source"` there is also
    `by_source[prompt, layer, head, source]`, each head split by the position it moved from (`by_memory` for the heads
    of cross-attention).
    Components: embed, pos_embed, heads `L0H3` (cross-attention: `L0X3`), neurons `L0N17` (of the MLP before attention
    in Macaron blocks: `L0B17`) or sublayers `0_attn_out`, biases, betas of norms that stand in the stream
    (`0_ln1_bias`), `final_bias` (beta W_U + b_U). Logits are those before a soft cap.
    answer: one token for all prompts or one each, as text or id; or a direction u at the output of the final norm, a
    floating tensor [d_model] or [prompt, d_model] (a probe, a feature). The total is then the model's normed final
    stream . u, `final_bias` beta . u, and the model needs no logits.
    pos: which token of each prompt (one number, or one per prompt), negative from its end; BOS counts. The prompt is
    cut behind it, and its sources number the tokens that are left.
    top: with `by="neuron"`, only so many neurons, those of the largest mean absolute value over the prompts; the others
    of each MLP are one component `0_mlp_rest` (`0_mlp_before_rest`).
    batch_size: prompts of one pass; None = as many as have 512 tokens together.
    Decoders of encoder-decoders: a `HookedTransformer` of `model.model.decoder`, and `model.given(source, target)`.
    Errors: ValueError for answers that are not one token, directions of another shape, a `pos` in a model that sees
    both ways, and models without logits linear in the normed stream; IndexError for a position that a prompt lacks;
    IncompleteSumError if the parts do not sum.

    Example:
        >>> interp.attribute(model, "When Mary and John went to the shop, John gave a drink to", " Mary", " John")
        >>> interp.attribute(model, prompt, model.W_U[:, 5] - model.W_U.mean(1), by="neuron", top=10, pos=3)
    """
    config = model.transformer.config
    batch = model.text.batch(prompts, prepend_bos=prepend_bos)
    batch = batch.left_aligned() if isinstance(pos, int) and pos == -1 else cut_behind(batch, pos, config)
    directions = _directions(answer, wrong, len(batch), config.d_model)
    if directions is None:
        foils = None if wrong is None else model.text.targets(wrong, len(batch))
        batch = batch.with_answers(model.text.targets(answer, len(batch)), foils)
    else:
        batch = batch.with_answers(torch.arange(len(batch)) % len(directions), None)
    analysis = attribution(config, by, top=top, directions=directions)
    rows = max(1, TOKENS // batch.tokens.shape[1]) if batch_size is None else batch_size
    return run_batches([analysis], model.transformer, batch.split(rows))["attribution"]


def attribution(
    config: ModelConfig,
    by: By,
    *,
    top: int | None = None,
    directions: Float[Tensor, "n d"] | None = None,
) -> Analysis:
    """The analysis behind `attribute`; batches must carry answers and end in their last column.

    directions: what the answers number instead of tokens: rows of this table, directions behind the final norm.
    """
    if by not in ("layer", "sublayer", "head", "source", "neuron"):
        raise ValueError(f"by must be layer, sublayer, head, source or neuron, got {by!r}")
    if by == "neuron" and not isinstance(config.mlp, MLP):
        raise ValueError(f"by='neuron' requires a plain or gated MLP, this model is {config.mlp_in_words}")
    if by == "source":
        require("additive", config.mixers, "by='source'")
    if directions is None and (what := not_linear(config)):
        raise ValueError(
            "attribution requires logits that are linear in the normed stream (no masked-LM head), or a direction; "
            f"this model {what}"
        )
    if top is not None:
        _check_top(top, config, by)
    return Analysis(
        name="attribution",
        reads=_reads(config, by=by, logits=directions is None),
        compute=partial(_compute, by=by, directions=directions),
        reduction=Rows,
        finish=partial(_finish, config=config, by=by, top=top, projected=directions is not None),
        last_only=True,
    )


def cut_behind(batch: Batch, pos: int | Sequence[int], config: ModelConfig) -> Batch:
    """Each row up to one of its real tokens, negative from its end, which then stands in the last column.

    In a causal model nothing behind a position changes what is computed there.
    Errors: ValueError for a model that is not causal, or another number of positions than of rows; IndexError for a
    position that a row lacks.
    """
    if not config.causal:
        raise ValueError("pos requires a causal model (the prompt is cut behind it), this one sees both ways")
    asked = torch.as_tensor(pos, device=batch.tokens.device).flatten()
    if len(asked) not in (1, len(batch)):
        raise ValueError(
            f"one position per prompt is required, got {len(asked)} positions for {len(batch)} prompts"
        )
    column, lengths = asked.expand(len(batch)), batch.lengths
    if bool(((column >= lengths) | (column < -lengths)).any()):
        raise IndexError(f"positions of prompts of {lengths.tolist()} tokens are required, got {pos}")
    column = torch.where(column < 0, column + lengths, column)
    keep = batch.real
    keep = keep & (keep.cumsum(1) <= column[:, None] + 1)
    aligned, width = replace(batch, keep=keep).left_aligned(), int(column.max()) + 1
    assert aligned.keep is not None
    keep, types = aligned.keep[:, -width:], aligned.types
    return replace(
        aligned,
        tokens=aligned.tokens[:, -width:],
        keep=None if bool(keep.all()) else keep,
        types=None if types is None else types[:, -width:],
    )


def _directions(
    answer: Answers, wrong: Answers | None, rows: int, d_model: int
) -> Float[Tensor, "n d_model"] | None:
    """One direction for all prompts as a table of one, or one for each; None where the answers are tokens."""
    floating = [x for x in (answer, wrong) if isinstance(x, Tensor) and x.is_floating_point()]
    if not floating:
        return None
    if wrong is not None:
        raise ValueError("a direction has no wrong answer: pass the difference of two directions")
    (directions,) = floating
    if directions.shape not in ((d_model,), (rows, d_model)):
        raise ValueError(
            f"a direction requires the shape [d_model] = [{d_model}] or [prompt, d_model] = [{rows}, {d_model}], "
            f"got {shape_text(directions.shape)}"
        )
    if not bool(directions.isfinite().all()):
        raise ValueError("a direction requires finite numbers, got infinity or NaN")
    return directions.detach().reshape(-1, d_model)


def _check_top(top: int, config: ModelConfig, by: By) -> None:
    if by != "neuron" or not isinstance(config.mlp, MLP):
        raise ValueError(f"top requires by='neuron', got by={by!r}")
    count = len(_mlps(config)) * config.mlp.d_mlp
    if not 1 <= top <= count:
        raise ValueError(f"top must be in [1, {count}] neurons, got {top}")


def labels(config: ModelConfig, by: By) -> tuple[str, ...]:
    """The components of one grain, in the order of the values."""
    names = [site.removeprefix("hook_") for site in embedding_parts(config)]
    names += ["embed_bias"] if config.embed_norm and _has_beta(config) else []
    for layer in range(config.n_layers):
        names += [f"{layer}_block"] if by == "layer" else _layer_labels(config, by, layer)
    return (*names, "final_bias")


def _layer_labels(config: ModelConfig, by: By, layer: int) -> list[str]:
    names: list[str] = []
    norms = {"attn_out": "ln1", "cross_attn_out": "ln_cross", "mlp_out": "ln2"}
    for sublayer in config.sublayers:
        letter = {"attn_out": "H", "cross_attn_out": "X"}.get(sublayer)
        if letter and by in ("head", "source"):
            names += [f"L{layer}{letter}{h}" for h in range(config.n_heads)]
            names += [f"{layer}_{sublayer.removesuffix('_out')}_bias"]
        elif by == "neuron" and sublayer in MLPS and isinstance(config.mlp, MLP):
            names += [f"L{layer}{_LETTERS[sublayer]}{u}" for u in range(config.mlp.d_mlp)]
            names.append(f"{layer}_{sublayer.removesuffix('_out')}_bias")
        else:
            names.append(f"{layer}_{sublayer}")
        if config.norm_place == "post" and _has_beta(config):
            names.append(f"{layer}_{norms[sublayer]}_bias")
    return names


def _mlps(config: ModelConfig) -> list[tuple[int, str]]:
    """Layer and sublayer of every MLP, in the order of the labels."""
    return [(layer, mlp) for layer in range(config.n_layers) for mlp in MLPS if mlp in config.sublayers]


def _has_beta(config: ModelConfig) -> bool:
    return isinstance(config.norm, LayerNorm)


def _last(x: Tensor) -> Tensor:
    return x[:, -1]


def _last_query(pattern_bhqk: Tensor) -> Tensor:
    return pattern_bhqk[:, :, -1]


def _layer_reads(config: ModelConfig, by: By, layer: int) -> Iterable[Read]:
    for sublayer in config.sublayers:
        mixer = sublayer.removesuffix("_out")
        if sublayer not in MLPS and by in ("head", "source"):
            yield Read(site(layer, f"{mixer}.hook_z"), _last)
            if by == "source":
                yield Read(site(layer, f"{mixer}.hook_pattern"), _last_query)
                yield Read(site(layer, f"{mixer}.hook_v"))
        elif sublayer in MLPS and by == "neuron":
            yield Read(site(layer, f"{mixer}.hook_post"), _last)
        else:
            yield Read(site(layer, f"hook_{sublayer}"), _last)
    if config.norm_place == "post":
        names = {"attn_out": "ln1", "cross_attn_out": "ln_cross", "mlp_out": "ln2"}
        for sublayer in config.sublayers:
            yield Read(site(layer, f"{names[sublayer]}.hook_scale"), _last)


def _reads(config: ModelConfig, by: By, logits: bool = True) -> tuple[Read, ...]:
    reads = [Read(site, _last) for site in embedding_parts(config)]
    if config.embed_norm and not isinstance(config.norm, NoNorm):
        reads.append(Read("ln_embed.hook_scale", _last))
    for layer in range(config.n_layers):
        reads += _layer_reads(config, by, layer)
    reads.append(Read(final_stream(config), _last))
    return (*reads, Read(_logits(config), _last)) if logits else tuple(reads)


def _logits(config: ModelConfig) -> str:
    """The logits as a sum of parts sees them: before their soft cap."""
    return "unembed.hook_out" if config.logit_softcap is None else "unembed.hook_uncapped"


def _compute(
    trace: Trace, batch: Batch, model: Transformer, by: By, directions: Float[Tensor, "n d"] | None
) -> Mapping[str, Tensor]:
    """Contributions `[b c]` by folding the direction backwards, so nothing per head or neuron is as wide as d_model."""
    if batch.answer is None:
        raise ValueError("attribution requires batches with answers (Batch.with_answers)")
    if batch.keep is not None and not bool(batch.keep[:, -1].all()):
        raise ValueError("attribution requires rows that end in the last column (Batch.left_aligned)")
    wide = torch.promote_types(model.dtype, torch.float32)
    last = {read.site: trace[read].to(wide) for read in _reads(model.config, by, directions is None)}
    target = (
        _of_logits(model, batch, last) if directions is None else _of_rows(model, batch, last, directions)
    )
    scale = model.ln_final.scale(last[final_stream(model.config)])
    folded = Folded(model, last, model.ln_final.pull_back(target.direction.to(wide), scale))
    columns = folded.embeddings()
    extra: dict[str, Tensor] = {}
    for layer in range(model.config.n_layers):
        parts, sources = folded.block(layer, by)
        columns += [torch.cat(parts, 1).sum(1, keepdim=True)] if by == "layer" else parts
        extra |= sources
    values = torch.cat((*columns, target.constant[:, None].to(wide)), 1)
    largest = torch.maximum(values.abs().amax(1), target.largest).clamp_min(torch.finfo(wide).tiny)
    error = (values.sum(1) - target.total).abs() / largest
    if not bool((error <= TOLERANCE[model.dtype]).all()):
        raise IncompleteSumError(
            f"attribution by {by}: components miss the total by {float(error.max()):.2e} relative",
            float(error.max()),
        )
    return {"logits": values, "total": target.total, "error": error, **extra}


@dataclass(frozen=True)
class _Target:
    """What the parts are to sum to."""

    direction: Float[Tensor, "b d"]
    """At the output of the final norm."""
    constant: Float[Tensor, "b"]
    """What is added behind the linear part of the final norm."""
    total: Float[Tensor, "b"]
    """The model's own number."""
    largest: Float[Tensor, "b"]
    """The largest term that the model sums or subtracts to get it; the rounding it carries."""


def _of_logits(model: Transformer, batch: Batch, last: Mapping[str, Tensor]) -> _Target:
    """The logit (difference) of each row."""
    assert batch.answer is not None
    logits = last[_logits(model.config)]
    direction, constant = logit_direction(model, batch.answer, batch.wrong)
    answer = logits.gather(1, batch.answer[:, None])[:, 0]
    if batch.wrong is None:
        return _Target(direction, constant, answer, answer.abs())
    wrong = logits.gather(1, batch.wrong[:, None])[:, 0]
    return _Target(direction, constant, answer - wrong, torch.maximum(answer.abs(), wrong.abs()))


def _of_rows(
    model: Transformer, batch: Batch, last: Mapping[str, Tensor], directions: Float[Tensor, "n d"]
) -> _Target:
    """The normed final stream on a direction: the row of the table that the answer numbers."""
    assert batch.answer is not None
    stream = last[final_stream(model.config)]
    direction = directions.to(stream)[batch.answer.to(stream.device)]
    gamma, beta = model.ln_final.weight, model.ln_final.bias
    normed = model.ln_final(stream.to(stream.device if gamma is None else gamma.device, model.dtype))
    terms = normed.to(stream) * direction
    constant = torch.zeros_like(terms[:, 0]) if beta is None else direction @ beta.to(direction)
    return _Target(direction, constant, terms.sum(1), terms.abs().amax(1))


def _finish(merged: Partial, config: ModelConfig, by: By, top: int | None, projected: bool) -> "xr.Dataset":
    assert isinstance(merged, Rows)
    rows, names = merged.rows, labels(config, by)
    found, names = (
        (rows["logits"], names) if top is None else _top_neurons(rows["logits"], names, config, top)
    )
    values: dict[str, tuple[Sequence[str], Tensor]] = {
        "logits": (("prompt", "component"), found),
        "total": (("prompt",), rows["total"]),
    }
    if by == "source":
        for sublayer, (name, dim) in _SOURCES.items():
            if sublayer in config.sublayers:
                each = [rows[f"{sublayer}_{layer}"] for layer in range(config.n_layers)]
                values[name] = (("prompt", "layer", "head", dim), torch.stack(each, 1))
    unit = "logits" if config.logit_softcap is None else "logits before the soft cap"
    unit = "projection on the direction" if projected else unit
    return labelled(
        "attribute",
        values,
        coords={"component": names},
        attrs={"by": by, "unit": unit, "completeness_error": float(rows["error"].max())},
    )


def _top_neurons(
    values: Float[Tensor, "b c"], names: tuple[str, ...], config: ModelConfig, top: int
) -> tuple[Float[Tensor, "b c2"], tuple[str, ...]]:
    """The columns with all but the largest neurons summed, one column per MLP."""
    assert isinstance(config.mlp, MLP)
    width, mlps = config.mlp.d_mlp, _mlps(config)
    starts = [names.index(f"L{layer}{_LETTERS[mlp]}0") for layer, mlp in mlps]
    neurons = torch.cat([values[:, start : start + width] for start in starts], 1)
    chosen = torch.zeros(neurons.shape[1], dtype=torch.bool, device=values.device)
    chosen[neurons.abs().mean(0).topk(top).indices] = True
    columns, kept, end = [], list[str](), 0
    for (layer, mlp), start, mask in zip(mlps, starts, chosen.split(width), strict=True):
        block = values[:, start : start + width]
        rest = block.masked_fill(mask, 0).sum(1, keepdim=True)
        columns += [values[:, end:start], block[:, mask], rest]
        kept += [*names[end:start], *(names[start + u] for u in mask.nonzero().flatten().tolist())]
        kept.append(f"{layer}_{mlp.removesuffix('_out')}_rest")
        end = start + width
    return torch.cat((*columns, values[:, end:]), 1), (*kept, *names[end:])
