"""Direct logit attribution: how much each part of the model adds to the answer's logit at one position of each prompt.

With the final norm frozen at its actual scale, the logit of a token (or the difference of two) is a sum over what
every part added to the residual stream; so is the projection of the normed stream on any direction. `attribute`
returns the summands and checks the sum. It shows direct effects only: what a part does through later parts is credited
to those. Elhage et al. 2021; Ferrando et al. 2024, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.results import labelled
from interp.core.stats import WIDE, Partial, Rows, upcast
from interp.core.transfers import check, to_device
from interp.data.answers import AnswerTokens
from interp.data.batch import Answers, Batch
from interp.model.config import MLP, MLPS, WITH_HEADS, LayerNorm, ModelConfig
from interp.model.layout import PerRow, one_position
from interp.model.mounted import Shares
from interp.model.parts import Part
from interp.model.records import require
from interp.model.sites import embedding_parts, final_stream
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.answer_tokens import by_answer_token
from interp.passes.edited import edits_at, layer_of, names_tokens
from interp.passes.frozen import (
    SUM_NORMS,
    FrozenNorm,
    embedding_norm,
    embedding_scale,
    final_norm,
    output_norm,
    sum_norm,
    sum_scale,
)
from interp.passes.needs import Steps, recorded
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question, Reading, Values
from interp.residual.decomposition import (
    EPS,
    IncompleteSumError,
    StreamStart,
    bound,
    check_sum,
    in_half,
    logit_direction,
    not_linear,
    places_before_attention,
    rounded_off,
)
from interp.residual.edited_sums import head_shares
from interp.residual.feature_shares import (
    ACTIVE,
    Counted,
    Kept,
    Stand,
    Stands,
    dense_result,
    largest,
    rows_of,
)
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr

Grain = Literal["layer", "sublayer", "head", "source", "neuron", "feature"]
"""The grain of a decomposition."""


_SOURCES = {"attn_out": ("by_source", "source"), "cross_attn_out": ("by_memory", "memory")}
_NEURONS = {"mlp_before_out": "neuron_before", "mlp_out": "neuron"}
"""The kind of part of the neurons of each MLP."""


@dataclass(frozen=True, eq=False)
class Attribute(Question):
    """Direct logit attribution: how much each part adds to the answer's logit (minus the wrong answer's) at one token.

    The answer's logit is a sum over everything that was added to the stream, with the final norm frozen at its actual
    scale. Logits are those before a soft cap. Several grains share one pass (1.09 times one of them) as
    `interp.run({"head": Attribute(parts="head"), "neuron": Attribute(parts="neuron")}, model, data)`. Decoders of
    encoder-decoders: a `HookedTransformer` of `model.model.decoder`, and `model.given(source, target)`.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        answer: token whose logit is split, one for all prompts or one each, as text or id; None: the answers of the
            data. Of an answer of several tokens each logit is split, after the prompt and the tokens before it, along
            the dim `answer_token`; with a wrong answer the first tokens in which the two differ are compared. Or a
            direction u at the output of the final norm, a floating tensor [d] or [prompt, d] (a probe, a feature): the
            total is then the model's normed final stream . u, `final_bias` beta . u, and the model needs no logits.
        wrong: token that the answer is contrasted with, given like `answer`; None: none, or without `answer`
            that of the data.
        parts: grain of the split: "layer" (`L0`), "sublayer" (`L0.attn`, `L0.mlp`), "head" (`L0H3`, of cross-attention
            `L0X3`), "source", which also splits each head by the token it moved from, "neuron" (`L0N17`, of the MLP
            before attention in Macaron blocks `L0B17`), or "feature" (`L0F123`, of a model with dictionaries, see
            below).
        pos: token of each prompt, one for all or `PerRow([3, 4])` with one for each, negative from its end; BOS
            counts. The prompt is cut after it, and its sources number the tokens that are left.
        top: number of neurons or features kept with `parts="neuron"` and "feature", those of the largest mean absolute
            value over the prompts; the others of each MLP are one part `L0.mlp_rest` (`L0.mlp_before_rest`), of each
            dictionary `L0.feature_rest`. None: all neurons, and all features that are active on some prompt.

    With `parts="feature"` the dictionaries of `model.with_dictionaries([...])` split what they write: of an MLP's or
    attention's output (or the MLP's neurons, or the heads' z) f_i W_dec[i] of each active feature, `L0.feature_bias`
    (b_dec), `L0.feature_skip` (x W_skip) and `L0.error`, what the dictionary leaves unexplained. All other sublayers
    are whole. A dictionary of the residual stream splits no part but the sum of all parts before it: its features,
    bias and error stand in their place, those of the last such dictionary, and what comes after it is as elsewhere.
    For the features of an earlier layer, open the model with that dictionary alone.

    Returns:
        Dataset over `prompt` and `part`, in logits (in units of u for a direction). Further parts are `embed`,
        `pos_embed`, output biases `L0.attn_bias`, betas of norms that stand in the stream (`L0.ln1_bias`),
        `final_bias` (beta W_U + b_U), and last `rounding`.

        - `value` [prompt, part]: what each part adds. Over `part` it sums to `total`: `rounding` is what the pass
          rounded off where it added the others up. It is checked to be rounding, and `attrs["completeness_error"]` is
          the largest, relative to the largest part.
        - `total` [prompt]: the model's own number.
        - `by_source` [prompt, layer, head, source], with `parts="source"`: each head by the token it moved from,
          numbered from the prompt's first (`by_memory` for the heads of cross-attention); NaN at padding, and in layers
          that keep a state of the past instead of moving tokens.

    Raises:
        ValueError: answers of several tokens with a `pos`, directions of another shape, a `pos` in a model that sees
            both ways, and models without logits linear in the normed stream.
        IndexError: a position that a prompt lacks.
        IncompleteSumError: the parts do not sum, as under edits that add to the stream what no part wrote.

    Caveat:
        Direct effects only: what a part does through later parts is credited to those.

    Source:
        Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Ferrando et al. 2024, section 4.

    See Also:
        `ablate`, `patch`: total effects of a part. `logit_lens`: logits of the stream between the blocks.

    Example:
        >>> interp.attribute(model, "When Mary and John went to the store, John gave a drink to", " Mary", " John")
        >>> interp.attribute(model, prompt, model.W_U[:, 5] - model.W_U.mean(1), parts="neuron", top=10, pos=3)
    """

    of_layers: ClassVar[bool] = False

    answer: Answers | Float[Tensor, "d"] | Float[Tensor, "b d"] | None = None
    wrong: Answers | None = None
    _: KW_ONLY
    parts: Grain = "sublayer"
    pos: int | PerRow = -1
    top: int | None = None

    def bind(self, model: Subject) -> ByRow:
        """The direction's products with every part at the last row, or the same after cutting the prompts."""
        network, config = model.transformer, model.transformer.config
        directions = _directions(self.answer, self.wrong, config.d_model)
        answers = (
            None
            if directions is not None
            else AnswerTokens.of(model.text, self.answer, self.wrong, several=self.pos == -1)
        )
        stands = Stands.of(network) if self.parts == "feature" else None
        rows = attribution(config, self.parts, directions=directions, stands=stands)
        _check_top(config, self.parts, self.top, stands)
        if self.parts == "source":
            rows = replace(rows, compute=partial(_with_prompt_sources, inner=rows.compute))
        one_position(self.pos)
        options = {
            "answers": 1 if answers is None else answers.prompts or 1,
            "directions": 1 if directions is None else len(directions),
            "positions": 1 if isinstance(self.pos, int) else len(self.pos),
        }
        counts = {what: n for what, n in options.items() if n != 1}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{n} {what}" for what, n in counts.items())
            raise ValueError(f"one of each is required for every prompt, or one for all, got {listed}")
        last = isinstance(self.pos, int) and self.pos == -1
        top = None if self.parts == "feature" else self.top
        finish = partial(_finish, config=config, parts=self.parts, top=top, projected=directions is not None)
        names = labels(config, self.parts, stands)
        question = ByRow(
            self.name,
            rows if last else partial(_attribution_at, pos=self.pos, rows=rows),
            Rows,
            partial(finish, names=names),
            answers,
            prompts=next(iter(counts.values()), None),
        )
        if stands is None:
            return by_answer_token(question, model.text)
        dense = partial(
            dense_result, question=question, finish=finish, text=model.text, top=self.top, names=names,
            counted=tuple(Counted(stand.layer, stand.dictionary.d_sae) for stand in stands.splitting),
            notes=stands.left_out(network),
        )  # fmt: skip
        return replace(by_answer_token(question, model.text), result=dense)


def attribution(
    config: ModelConfig,
    parts: Grain,
    *,
    directions: Float[Tensor, "n d"] | None = None,
    summed: bool = True,
    stands: Stands | None = None,
) -> Reading:
    """The reads and the computation of `Attribute` for batches with answers, at the last token of each row.

    Args:
        directions: one for all prompts, or one for each, after the final norm, in place of tokens.
        summed: whether parts that do not sum to the total are an error; False for parts that are not those which wrote
            the stream, such as random heads.
        stands: the dictionaries of the model, for the grain "feature".
    """
    _check_parts(config, parts)
    if directions is None and (what := not_linear(config)):
        raise ValueError(
            "attribution requires logits that are linear in the normed stream (no masked-LM head), or a direction; "
            f"this model {what}"
        )
    compute = partial(_compute, parts=parts, directions=directions, summed=summed)
    return Reading(_reads(config, parts, stands), compute, last_only=True, ends_aligned=True)


attribute = of_data(Attribute, renamed={"by": "parts"})


def _check_parts(config: ModelConfig, parts: Grain) -> None:
    """ValueError for a grain that this model does not have."""
    if parts not in get_args(Grain):
        raise ValueError(f"parts must be one of {', '.join(get_args(Grain))}, got {parts!r}")
    if parts == "neuron" and not isinstance(config.mlp, MLP):
        raise ValueError(f"parts='neuron' requires a plain or gated MLP, this model is {config.mlp_in_words}")
    if parts == "source" and not any(mixer.traits.additive for mixer in config.mixers):
        require("additive", config.mixers, "parts='source'")


def _check_top(config: ModelConfig, parts: Grain, top: int | None, stands: Stands | None) -> None:
    """Raises a ValueError for a `top` of another grain, or for more neurons or features than the model has."""
    if top is None:
        return
    if stands is not None:
        count = sum(stand.dictionary.d_sae for stand in stands.splitting)
    elif parts == "neuron" and isinstance(config.mlp, MLP):
        count = len(_mlps(config)) * config.mlp.d_mlp
    else:
        raise ValueError(f"top requires parts='neuron' or parts='feature', got parts={parts!r}")
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= count:
        raise ValueError(f"top must be in [1, {count}] {parts}s, got {top!r}")


def _attribution_at(model: Transformer, batch: Batch, pos: int | PerRow, rows: Reading) -> Steps[Values]:
    """Attribution at `pos` of each prompt: the prompt is cut after that token, and the pass ends there.

    Whole prompts are run, and read at `pos` instead of the last column, where a position sees later tokens, and under
    edits that name tokens by their place in the whole prompt.
    """
    if model.config.causal and not any(map(names_tokens, model.edits)):
        return (yield from rows(model, cut_after(batch, pos)))
    aligned = batch.left_aligned()
    column = places_of(aligned, pos) + aligned.tokens.shape[1] - aligned.lengths
    read_at = {read: _read_at(read, column) for read in rows.reads}
    seen = (yield from recorded(aligned, list(read_at.values()))).trace
    return rows.compute(
        Trace({read: seen[moved_read] for read, moved_read in read_at.items()}), aligned, model
    )


def _read_at(read: Read, column: Int[Tensor, "b"]) -> Read:
    """A read of the last position as a read at each row's own column; reads of all positions stay as they are."""
    axis = 1 if read.via is _last else 2 if read.via is _last_query else None
    return read if axis is None else Read(read.site, partial(_columns_at, column=column, axis=axis))


def _columns_at(x: Tensor, column: Int[Tensor, "b"], axis: int) -> Tensor:
    """The values at one column of each row: `[b p ...] -> [b ...]`, with `axis` the axis of positions."""
    rows = torch.arange(len(column), device=x.device)
    return x.expand(len(column), *x.shape[1:]).movedim(axis, 1)[rows, column.to(x.device)]


def places_of(batch: Batch, pos: int | PerRow) -> Int[Tensor, "b"]:
    """Index of the token `pos` among the real tokens of each row; a negative `pos` counts from the row's end."""
    return to_device(batch.tokens_at(pos).places[:, 0], batch.tokens.device)


def cut_after(batch: Batch, pos: int | PerRow) -> Batch:
    """The batch with each row cut after its real token `pos` (negative: from its end), now in the last column.

    In a causal model later tokens do not change the activations there.

    Raises:
        ValueError: another number of positions than of rows.
        PositionError: a position that a row lacks.
    """
    device, batch = batch.tokens.device, batch.host()
    column, keep = places_of(batch, pos), batch.real
    keep = keep & (keep.cumsum(1) <= column[:, None] + 1)
    aligned, width = replace(batch, keep=keep).left_aligned(), int(column.max()) + 1
    assert aligned.keep is not None
    keep, types = aligned.keep[:, -width:], aligned.types
    cut = replace(
        aligned,
        tokens=aligned.tokens[:, -width:],
        keep=None if bool(keep.all()) else keep,
        types=None if types is None else types[:, -width:],
    )
    return cut.to(device)


def _with_prompt_sources(
    trace: Trace,
    batch: Batch,
    model: Transformer,
    inner: Callable[[Trace, Batch, Transformer], Mapping[str, Tensor]],
) -> Mapping[str, Tensor]:
    """The values of `inner`, with sources from each prompt's first token on; NaN after its last one."""
    values = inner(trace, batch, model)
    if batch.keep is None:
        return values
    order = batch.keep.int().argsort(dim=1, descending=True, stable=True)
    absent = ~batch.keep.gather(1, order)[:, None]

    def of_prompt(x: Tensor) -> Tensor:
        x = x.gather(-1, order.to(x.device)[:, None].expand(x.shape))
        return x.masked_fill(absent.to(x.device), torch.nan)

    by_source = {f"attn_out_{layer}" for layer in range(model.config.n_layers)}
    return {name: of_prompt(x) if name in by_source else x for name, x in values.items()}


def _directions(answer: object, wrong: object, d_model: int) -> Float[Tensor, "n d_model"] | None:
    """The directions `[1 d]` for all prompts, or `[prompt d]` for each; None where the answers are tokens."""
    floating = [x for x in (answer, wrong) if isinstance(x, Tensor) and x.is_floating_point()]
    if not floating:
        return None
    if wrong is not None:
        raise ValueError("a direction has no wrong answer: pass the difference of two directions")
    (directions,) = floating
    if directions.ndim not in (1, 2) or directions.shape[-1] != d_model:
        raise ValueError(
            f"a direction requires the shape [d_model] = [{d_model}] or [prompt, d_model] = [prompt, {d_model}], "
            f"got {shape_text(directions.shape)}"
        )
    if not bool(directions.isfinite().all()):
        raise ValueError("a direction requires finite numbers, got infinity or NaN")
    return directions.detach().reshape(-1, d_model)


def labels(config: ModelConfig, parts: Grain, stands: Stands | None = None) -> tuple[str, ...]:
    """The parts of one grain, in the order of the values; without the features themselves, with `stands`."""
    all_parts = _embedding_parts(config) if stands is None else _first_parts(config, stands)
    for layer in range(config.n_layers):
        block = [Part("block", layer)]
        sublayers = [s for s in config.sublayers if stands is None or stands.counts(layer, s)]
        pieces = (part for s in sublayers for part in _sublayer_parts(config, parts, layer, s, stands))
        all_parts += block if parts == "layer" else pieces
    return (*map(str, all_parts), "final_bias", "rounding")


def _first_parts(config: ModelConfig, stands: Stands) -> list[Part]:
    """The embeddings, or what a dictionary of the stream puts in place of them and of all that was added to them."""
    if stands.stream is None:
        return _embedding_parts(config)
    layer, sublayer = stands.start
    return [*stands.stream.parts, *([] if sublayer is None else _norm_bias(config, layer, sublayer))]


def labels_before_attention(config: ModelConfig, layer: int, parts: Grain) -> tuple[str, ...]:
    """The parts of one grain (`sublayer` or `head`) that were written before attention of a layer reads."""
    places = places_before_attention(config, layer)
    written = [part for place in places for part in _sublayer_parts(config, parts, *place)]
    return tuple(map(str, [*_embedding_parts(config), *written]))


def _embedding_parts(config: ModelConfig) -> list[Part]:
    bias = [Part("embed_bias")] if config.embed_norm and _has_beta(config) else []
    return [Part.of(site) for site in embedding_parts(config)] + bias


def _sublayer_parts(
    config: ModelConfig, grain: Grain, layer: int, sublayer: str, stands: Stands | None = None
) -> list[Part]:
    """The parts into which a grain splits one sublayer, then its bias and, in post-norm models, the norm's beta."""
    name = sublayer.removesuffix("_out")
    head = {"attn": "head", "cross_attn": "cross_head"}.get(name)
    pieces = [Part(name, layer)]
    if stands is not None and (stand := stands.sublayers.get((layer, sublayer))) is not None:
        inside = stand.inner != f"hook_{sublayer}"
        pieces = [*stand.parts, *([Part(f"{name}_bias", layer)] if inside else [])]
    elif head and grain in ("head", "source"):
        pieces = [Part(head, layer, h) for h in range(config.n_heads)] + [Part(f"{name}_bias", layer)]
    elif grain == "neuron" and sublayer in MLPS and isinstance(config.mlp, MLP):
        kind = _NEURONS[sublayer]
        pieces = [Part(kind, layer, u) for u in range(config.mlp.d_mlp)] + [Part(f"{name}_bias", layer)]
    return [*pieces, *_norm_bias(config, layer, sublayer)]


def _norm_bias(config: ModelConfig, layer: int, sublayer: str) -> list[Part]:
    """In post-norm models the beta of the norm of the stream after a sublayer."""
    post = config.norms_sum and _has_beta(config)
    return [Part(f"{SUM_NORMS[sublayer]}_bias", layer)] if post else []


def _mlps(config: ModelConfig) -> list[tuple[int, str]]:
    """Layer and sublayer of every MLP, in the order of the labels."""
    return [(layer, mlp) for layer in range(config.n_layers) for mlp in MLPS if mlp in config.sublayers]


def _has_beta(config: ModelConfig) -> bool:
    return isinstance(config.norm, LayerNorm) and config.norm.trained == "gamma and beta"


def _last(x: Tensor) -> Tensor:
    return x[:, -1]


def _last_query(pattern_bhqk: Tensor) -> Tensor:
    return pattern_bhqk[:, :, -1]


def _splits_by_source(config: ModelConfig, layer: int, sublayer: str) -> bool:
    """Whether the heads of a layer split by source: a mixer that keeps a state of the past does not."""
    return sublayer == "cross_attn_out" or config.mixers[layer].traits.additive


def _layer_reads(config: ModelConfig, parts: Grain, layer: int) -> Iterable[Read]:
    """Reads of one layer that attribution at this grain needs, at the last position where that suffices."""
    for sublayer in config.sublayers:
        mixer = sublayer.removesuffix("_out")
        if sublayer in WITH_HEADS and parts in ("head", "source"):
            yield Read(f"blocks.{layer}.{mixer}.hook_z", _last)
            if parts == "source" and _splits_by_source(config, layer, sublayer):
                yield Read(f"blocks.{layer}.{mixer}.hook_pattern", _last_query)
                yield Read(f"blocks.{layer}.{mixer}.hook_v")
        elif sublayer in MLPS and parts == "neuron":
            yield Read(f"blocks.{layer}.{mixer}.hook_post", _last)
        yield Read(f"blocks.{layer}.hook_{sublayer}", _last)
        yield from (Read(scale, _last) for scale in sum_scale(config, layer, sublayer))


def _reads(config: ModelConfig, parts: Grain, stands: Stands | None = None) -> tuple[Read, ...]:
    reads = [Read(site, _last) for site in (*embedding_parts(config), *embedding_scale(config))]
    for layer in range(config.n_layers):
        reads += _layer_reads(config, parts, layer)
    reads += [Read(site, _last) for site in ([] if stands is None else stands.sites)]
    return tuple(dict.fromkeys((*reads, Read(final_stream(config), _last))))


def _compute(
    trace: Trace,
    batch: Batch,
    model: Transformer,
    parts: Grain,
    directions: Float[Tensor, "n d"] | None,
    summed: bool,
) -> Mapping[str, Tensor]:
    """Contributions `[b c]` of all parts: dot products with the direction, carried back to each sublayer's output."""
    if batch.answer is None and directions is None:
        raise ValueError(
            "attribution requires an answer for every prompt, got none: name it, or bring it with the data"
        )
    if batch.keep is not None and not bool(batch.host().real[:, -1].all()):
        raise ValueError("attribution requires rows that end in the last column (padding on the left)")
    stands = Stands.of(model) if parts == "feature" else None
    last = {read.site: upcast(trace[read]) for read in _reads(model.config, parts, stands)}
    target = (
        _logit_target(model, batch, last)
        if directions is None
        else _direction_target(model, batch, last, directions)
    )
    folded = Folded(model, last, upcast(target.direction), checked=summed, stands=stands)
    columns = folded.first()
    extra: dict[str, Tensor] = {}
    for layer in range(model.config.n_layers):
        block_columns, sources = folded.block(layer, parts)
        columns += [torch.cat(block_columns, 1).sum(1, keepdim=True)] if parts == "layer" else block_columns
        extra |= sources
    values = torch.cat((*columns, upcast(target.constant)[:, None]), 1)
    if stands is not None:
        extra |= rows_of(folded.features, stands)
    every = torch.cat((values, extra["features"]), 1) if stands is not None else values
    rounding = target.total - every.sum(1)
    size = every.abs().sum(1) + folded.size + target.size
    allowed = bound(every.shape[1], size, every.dtype)
    if summed:
        known = folded.missed + folded.rounded_off()
        failure = partial(_incomplete, rounding, allowed, model, parts)
        check(((rounding - known).abs() <= allowed).all(), failure)
    scale = torch.maximum(every.abs().amax(1), target.largest).clamp_min(torch.finfo(values.dtype).tiny)
    logits = torch.cat((values, rounding[:, None]), 1)
    half = {} if model.dtype in WIDE else {"unseen": folded.unseen + allowed}
    return {"logits": logits, "total": target.total, "error": rounding.abs() / scale, **half, **extra}


def _incomplete(
    missed: Float[Tensor, "b"], allowed: Float[Tensor, "b"], model: Transformer, parts: str
) -> IncompleteSumError:
    worst = int((missed.abs() / allowed).argmax())
    error, most = float(missed[worst].abs()), float(allowed[worst])
    edited = ", ".join(edit.name for edit in model.edits)
    return IncompleteSumError(
        f"attribution by {parts}: parts miss the total by {error:.2e}, rounding explains {most:.0e}"
        + (f"; under the edits of {edited} the stream holds what none of them wrote" if edited else ""),
        error,
        most,
    )


@dataclass(frozen=True)
class _Target:
    """The logit (difference), or the projection on a direction, that the parts sum to."""

    direction: Float[Tensor, "b d"]
    """The direction at the output of the final norm: total = direction . norm(stream) without beta + constant."""
    constant: Float[Tensor, "b"]
    """What beta of the final norm (and b_U) add to the total."""
    total: Float[Tensor, "b"]
    """The number that the model computes."""
    largest: Float[Tensor, "b"]
    """The largest absolute term of the total: one of two logits, or of the products that a direction sums."""
    size: Float[Tensor, "b"]
    """Size that rounding is relative to: absolute logits, plus the length of the products that they sum."""


def _logit_target(model: Transformer, batch: Batch, last: Mapping[str, Tensor]) -> _Target:
    """The logit (difference) of each row, before a soft cap."""
    assert batch.answer is not None
    direction, constant = logit_direction(model, batch.answer, batch.wrong)
    answers = batch.answer[:, None] if batch.wrong is None else torch.stack((batch.answer, batch.wrong), 1)
    stream = last[final_stream(model.config)]
    logits = model.uncapped(stream.to(model.device), columns=answers).to(stream.device)
    total = logits[:, 0] if batch.wrong is None else logits[:, 0] - logits[:, 1]
    normed = upcast(model.ln_final(stream.to(model.device))).to(direction)
    size = logits.abs().sum(1) + (normed * direction).norm(dim=1)
    return _Target(direction, constant, total, logits.abs().amax(1), size)


def _direction_target(
    model: Transformer, batch: Batch, last: Mapping[str, Tensor], directions: Float[Tensor, "n d"]
) -> _Target:
    """The normed final stream's projection on a direction: one for each prompt, or one for all."""
    stream = last[final_stream(model.config)]
    direction_ids = (
        torch.zeros(len(batch), dtype=torch.long) if len(directions) == 1 or batch.row is None else batch.row
    )
    direction = directions.to(stream)[direction_ids.to(stream.device)]
    gamma, beta = model.ln_final.weight, model.ln_final.bias
    normed = model.ln_final(stream.to(stream.device if gamma is None else gamma.device))
    terms = normed.to(stream) * direction
    constant = torch.zeros_like(terms[:, 0]) if beta is None else direction @ beta.to(direction)
    return _Target(direction, constant, terms.sum(1), terms.abs().amax(1), terms.norm(dim=1))


class Folded:
    """A direction at the end of the stream, carried back through the frozen norms to the output of each sublayer.

    A head or a neuron adds along the direction its activation times a folded vector (the direction times W_O or
    W_out). So no head or neuron needs a vector of d_model of its own, as it would if its output went forwards.

    `last` holds the activations at the last position, `direction` is one at the output of the final norm. In pre-norm
    models it is the same at every depth of the stream. In post-norm models each norm's beta becomes a column.
    """

    def __init__(
        self,
        model: Transformer,
        last: Mapping[str, Tensor],
        direction: Float[Tensor, "b d"],
        *,
        checked: bool = False,
        stands: Stands | None = None,
    ) -> None:
        """The direction at every place.

        Args:
            checked: whether heads and neurons that do not sum to their sublayer's output are an error.
            stands: the dictionaries that split what they write.
        """
        self.model, self.last, self.weights, self.checked = model, last, Weights(model), checked
        self.stands = stands
        self.features: dict[int, Kept] = {}
        """The features of each dictionary that was split."""
        self.at: dict[tuple[int, str], Float[Tensor, "b d"]] = {}
        self.betas: dict[tuple[int, str], Float[Tensor, "b 1"]] = {}
        self.unseen = self.missed = self.size = torch.zeros_like(direction[:, 0])
        """`unseen`: the largest contribution that could be missing unnoticed. `missed`: contributions of all sublayers
        minus those of their pieces. `size`: sum over sublayers of the length of output * direction."""
        end = self.final = final_norm(model).of(last[final_stream(model.config)]).back(direction)
        self.entering = {model.config.n_layers: end}
        """The direction at the stream that enters each block, and at the final one."""
        for layer in reversed(range(model.config.n_layers)):
            for sublayer in reversed(model.config.sublayers):
                norm = sum_norm(model, layer, sublayer).recorded(last)
                if norm.beta is not None:
                    self.betas[layer, sublayer] = _dot(end, norm.beta.to(end))
                end = self.at[layer, sublayer] = norm.back(end)
            self.entering[layer] = end
        self.end = end

    def rounded_off(self) -> Float[Tensor, "b"]:
        """Contribution of what the pass rounded off when it summed the residual stream; checked to be rounding."""
        config, last = self.model.config, self.last[final_stream(self.model.config)]
        every = [(layer, sublayer) for layer in range(config.n_layers) for sublayer in config.sublayers]
        places = [place for place in every if self.stands is None or self.stands.counts(*place)]
        edited = ", ".join(edit.name for edit in self.model.edits)
        under = f"; under the edits of {edited} the stream holds what none of them wrote" if edited else ""
        lost, _ = rounded_off(
            self.last, self.model, places, last, f"the final stream{under}", start=self._stream_start()
        )
        if self.model.dtype not in WIDE:
            seen = EPS[self.model.dtype] * (last * self.final).norm(dim=1)
            self.unseen = torch.maximum(self.unseen, seen)
        return _dot(lost, self.final)[:, 0]

    def _stream_start(self) -> StreamStart | None:
        """The stream that a dictionary splits, and the norm of it that follows; None where none does."""
        if self.stands is None or self.stands.stream is None:
            return None
        layer, sublayer = self.stands.start
        norm = FrozenNorm(None) if sublayer is None else sum_norm(self.model, layer, sublayer)
        return StreamStart(self.last[self.stands.stream.writes], norm.recorded(self.last))

    def _add_missed(
        self,
        out: Float[Tensor, "b d"],
        direction: Float[Tensor, "b d"],
        pieces: Sequence[Float[Tensor, "b _"]],
        what: str,
        more: Float[Tensor, "b"] | float = 0.0,
    ) -> None:
        """Adds to `missed` what the pieces of a sublayer miss of it; IncompleteSumError if that is more than rounding.

        Half precision rounds each number of a sublayer's output independently. So the error along a direction is
        relative to the length of output * direction, not to the sum of its absolute values.

        Args:
            more: length of products that the pieces sum, and that may be larger than the output.
        """
        size, total = (out * direction).norm(dim=1), _dot(out, direction)[:, 0]
        values = torch.cat(list(pieces), 1)
        missed = total - values.sum(1)
        half = in_half(self.model) * size
        size = size + more
        allowed = bound(values.shape[1], values.abs().sum(1) + size, values.dtype) + half
        if self.checked:
            check((missed.abs() <= allowed).all(), partial(_incomplete, missed, allowed, self.model, what))
        self.missed, self.size = self.missed + missed, self.size + size
        self.unseen = torch.maximum(self.unseen, half)

    def first(self) -> list[Float[Tensor, "b 1"]]:
        """The embeddings' columns, or those of a dictionary that splits the stream in their place."""
        if self.stands is None or self.stands.stream is None:
            return self.embeddings()
        (layer, sublayer), stand = self.stands.start, self.stands.stream
        direction = self.entering[layer] if sublayer is None else self.at[layer, sublayer]
        shares, columns = self._split(stand, direction)
        pieces = [self.features[stand.layer].values, *columns]
        self._add_missed(self.last[stand.writes], direction, pieces, stand.writes, shares.size)
        beta = [] if sublayer is None else [self.betas.get((layer, sublayer))]
        return [*columns, *(column for column in beta if column is not None)]

    def embeddings(self) -> list[Float[Tensor, "b 1"]]:
        """The embeddings' columns, and beta of the norm after them."""
        norm = embedding_norm(self.model).recorded(self.last)
        direction = norm.back(self.end)
        beta = [] if norm.beta is None else [_dot(self.end, norm.beta.to(self.end))]
        return [_dot(self.last[name], direction) for name in embedding_parts(self.model.config)] + beta

    def block(self, layer: int, grain: Grain) -> tuple[list[Float[Tensor, "b c"]], dict[str, Tensor]]:
        """Contributions of one block's parts, and by `sublayer_layer` each head's by source if grain is "source"."""
        columns: list[Tensor] = []
        extra: dict[str, Tensor] = {}
        for sublayer in self.model.config.sublayers:
            out, direction = self.last[f"blocks.{layer}.hook_{sublayer}"], self.at[layer, sublayer]
            more: Tensor | float = 0.0
            by_number: list[Tensor] = []
            if self.stands is not None and not self.stands.counts(layer, sublayer):
                continue
            if self.stands is not None and (layer, sublayer) in self.stands.sublayers:
                by_number, pieces, more = self._features(layer, sublayer)
            elif sublayer in WITH_HEADS and grain in ("head", "source"):
                pieces, sources = self._heads(layer, sublayer, grain)
                extra |= {} if sources is None else {f"{sublayer}_{layer}": sources}
            elif sublayer in MLPS and grain == "neuron":
                pieces = self._neurons(layer, sublayer)
            else:
                pieces = [_dot(out, direction)]
            self._add_missed(out, direction, [*by_number, *pieces], f"{sublayer} of layer {layer}", more)
            columns += pieces
            if (layer, sublayer) in self.betas:
                columns.append(self.betas[layer, sublayer])
        return columns, extra

    def _heads(
        self, layer: int, sublayer: str, grain: Grain
    ) -> tuple[list[Float[Tensor, "b c"]], Float[Tensor, "b h k"] | None]:
        """Contributions of the heads and of b_O; with `grain="source"` also of each head by source token."""
        mixer = sublayer.removesuffix("_out")
        z, folded, bias = self._at_heads(layer, sublayer)
        heads = (z * folded).sum(-1)
        columns = [heads, bias]
        if grain == "head" or not _splits_by_source(self.model.config, layer, sublayer):
            return columns, None
        v = self.last[f"blocks.{layer}.{mixer}.hook_v"][:, :, self.weights.kv_head()]
        pattern = self.last[f"blocks.{layer}.{mixer}.hook_pattern"]
        if edits_at(self.model, layer, [f"{mixer}.hook_z"]):
            shares = head_shares(self.model, layer, pattern[:, :, None], v, z[:, None])
            pattern = pattern * shares[:, :, 0]
        sources = einsum(v, folded, "b k h e, b h e -> b h k") * pattern
        edited = [edit.name for edit in self.model.edits if layer_of(edit, self.model) == layer]
        under = f" under the edits of {', '.join(edited)}" if edited else ""
        size = einsum(pattern.abs(), v.abs(), folded.abs(), "b h k, b k h e, b h e -> b h")
        what, more = f"sources of layer {layer}{under}", in_half(self.model) * size
        check_sum(sources.movedim(-1, 0), heads, what, size=size, more=more)
        return columns, sources

    def _at_heads(
        self, layer: int, sublayer: str
    ) -> tuple[Float[Tensor, "b h e"], Float[Tensor, "b h e"], Float[Tensor, "b 1"]]:
        """The heads' z, the direction before W_O of each, and the contribution of b_O."""
        w = self.weights.layer(layer, cross=sublayer == "cross_attn_out")
        z = self.last[f"blocks.{layer}.{sublayer.removesuffix('_out')}.hook_z"]

        def output() -> Tensor:
            return einsum(z, w.W_O.to(z), "b h e, h e d -> b d") + w.b_O.to(z)

        direction, beta = self._at_output(layer, sublayer, output)
        folded = einsum(w.W_O.to(z), direction, "h e d, b d -> b h e")
        return z, folded, _dot(direction, w.b_O.to(z)) + beta

    def _neurons(self, layer: int, sublayer: str) -> list[Float[Tensor, "b c"]]:
        """Contributions of every neuron, and of b_out."""
        post, folded, bias = self._at_neurons(layer, sublayer)
        return [post * folded, bias]

    def _at_neurons(
        self, layer: int, sublayer: str
    ) -> tuple[Float[Tensor, "b m"], Float[Tensor, "b m"], Float[Tensor, "b 1"]]:
        """The neurons' activations, the direction before W_out of each, and the contribution of b_out."""
        w = self.weights.layer(layer, before=sublayer == "mlp_before_out")
        post = self.last[f"blocks.{layer}.{sublayer.removesuffix('_out')}.hook_post"]
        assert w.W_out is not None and w.b_out is not None
        out, bias = w.W_out.to(post), w.b_out.to(post)
        direction, beta = self._at_output(layer, sublayer, lambda: post @ out + bias)
        return post, direction @ out.mT, _dot(direction, bias) + beta

    def _features(
        self, layer: int, sublayer: str
    ) -> tuple[list[Float[Tensor, "b k"]], list[Float[Tensor, "b 1"]], Float[Tensor, "b"]]:
        """Contributions of a dictionary's largest features, of its other terms and of the bias after it; their size."""
        assert self.stands is not None
        stand, direction, after = (
            self.stands.sublayers[layer, sublayer],
            self.at[layer, sublayer],
            list[Tensor](),
        )
        if stand.inner.endswith("hook_z"):
            _, folded, bias = self._at_heads(layer, sublayer)
            direction, after = folded.flatten(1), [bias]
        elif stand.inner.endswith("hook_post"):
            _, direction, bias = self._at_neurons(layer, sublayer)
            after = [bias]
        shares, columns = self._split(stand, direction)
        return [self.features[stand.layer].values], [*columns, *after], shares.size

    def _split(
        self, stand: Stand, direction: Float[Tensor, "b o"]
    ) -> tuple[Shares, list[Float[Tensor, "b 1"]]]:
        """The terms of a dictionary: the columns but for its features, of which the largest are kept."""
        shares = stand.shares(direction, self.last)
        kept = self.features[stand.layer] = largest(shares, ACTIVE)
        skip = [] if shares.skip is None else [shares.skip]
        return shares, [kept.rest, shares.bias, *skip, shares.error]

    def _at_output(
        self, layer: int, sublayer: str, output: Callable[[], Tensor]
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b 1"] | float]:
        """The direction before the norm of a sublayer's output, and the contribution of that norm's beta."""
        norm, direction = output_norm(self.model, layer, sublayer).of(output), self.at[layer, sublayer]
        beta = 0.0 if norm.beta is None else _dot(direction, norm.beta.to(direction))
        return norm.back(direction), beta


def _dot(x: Float[Tensor, "b d"], y: Float[Tensor, "*#b d"]) -> Float[Tensor, "b 1"]:
    return (x * y).sum(-1, keepdim=True)


def _finish(
    merged: Partial,
    config: ModelConfig,
    parts: Grain,
    top: int | None,
    projected: bool,
    names: tuple[str, ...],
    notes: Sequence[str] = (),
) -> xr.Dataset:
    assert isinstance(merged, Rows)
    rows = merged.rows
    contributions, names = (
        (rows["logits"], names) if top is None else _top_neurons(rows["logits"], names, config, top)
    )
    values: dict[str, tuple[Sequence[str], Tensor]] = {
        "value": (("prompt", "part"), contributions),
        "total": (("prompt",), rows["total"]),
    }
    if parts == "source":
        for sublayer, (name, dim) in _SOURCES.items():
            if sublayer in config.sublayers:
                by_layer = [rows.get(f"{sublayer}_{layer}") for layer in range(config.n_layers)]
                missing = torch.full_like(
                    next(sources for sources in by_layer if sources is not None), torch.nan
                )
                all_layers = torch.stack([missing if sources is None else sources for sources in by_layer], 1)
                values[name] = (("prompt", "layer", "head", dim), all_layers)
    unit = "logits" if config.logit_softcap is None else "logits before the soft cap"
    return labelled(
        "attribute",
        values,
        coords={"part": names},
        units="projection on the direction" if projected else unit,
        attrs={"parts": parts, "completeness_error": float(rows["error"].max())},
        notes=[*notes, *_half_precision_notes(rows)],
    )


def _half_precision_notes(rows: Mapping[str, Tensor]) -> list[str]:
    """Note about the precision of the check under half precision; empty in float32."""
    if "unseen" not in rows:
        return []
    lost, unseen = (float(x.abs().max()) for x in (rows["logits"][:, -1], rows["unseen"]))
    return [
        f"half precision: the pass rounded off up to {lost:.2g} (the part `rounding`), and a part that wrote less than "
        f"about {unseen:.1g} could be missing unnoticed"
    ]


def _top_neurons(
    values: Float[Tensor, "b c"], names: tuple[str, ...], config: ModelConfig, top: int
) -> tuple[Float[Tensor, "b c2"], tuple[str, ...]]:
    """Contributions and names of parts, with the neurons outside the `top` largest summed, one column per MLP."""
    assert isinstance(config.mlp, MLP)
    width, mlps = config.mlp.d_mlp, _mlps(config)
    starts = [names.index(str(Part(_NEURONS[mlp], layer, 0))) for layer, mlp in mlps]
    neurons = torch.cat([values[:, start : start + width] for start in starts], 1)
    chosen = torch.zeros(neurons.shape[1], dtype=torch.bool, device=values.device)
    chosen[neurons.abs().mean(0).topk(top).indices] = True
    columns, kept_names, end = [], list[str](), 0
    for (layer, mlp), start, mask in zip(mlps, starts, chosen.split(width), strict=True):
        block = values[:, start : start + width]
        rest = block.masked_fill(mask, 0).sum(1, keepdim=True)
        columns += [values[:, end:start], block[:, mask], rest]
        kept_names += [*names[end:start], *(names[start + u] for u in mask.nonzero().flatten().tolist())]
        kept_names.append(str(Part(f"{mlp.removesuffix('_out')}_rest", layer)))
        end = start + width
    return torch.cat((*columns, values[:, end:]), 1), (*kept_names, *names[end:])
