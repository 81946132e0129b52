"""A table of all attention heads: attention on repeated tokens, copying, attention to names, and a label for each.

Olsson et al. 2022 for repeats and copying, Wang et al. 2022 for names, Gould et al. 2023 for successors. Every pattern
is reduced to scores inside the pass, and is not kept.

Mixers whose weights may be negative and have any sum (differential, lightning, pooling) have their weights divided by
the sum of absolute values (`shares`), so that their attention mass compares with that of others. `sentences` computes
the scores on sentences, `labels` the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.attention.labels import confidences, labels
from interp.attention.sentences import head_names, sentence_scores
from interp.attention.shares import (
    NO_SHARES,
    in_every_layer,
    signed_shares,
    with_pattern,
    without_pattern,
    without_shares,
)
from interp.core.axes import shape_text
from interp.core.patterns import (
    SCORES,
    copy_keys,
    copy_scores,
    distance_kernel,
    even_attention,
    even_copy_scores,
    pattern_scores,
)
from interp.core.results import Score, labelled, scored
from interp.core.stats import SIGNED, MaskedMeans, Means, Moments, Partial, two_sided_p
from interp.core.transfers import to_device, to_host
from interp.data.batch import Batch
from interp.data.stream import ROWS, DataSource, prompt_source
from interp.data.text import Text
from interp.model.config import ModelConfig
from interp.model.edits import Edit
from interp.model.records import why_not_additive
from interp.model.sites import EMBEDDING_SITES
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.duration import announce
from interp.passes.edited import after_pattern, edits_at, inner_site, layer_of
from interp.passes.needs import Steps, recorded
from interp.passes.observe import Studied, Subject
from interp.passes.packs import block_products
from interp.passes.question import Ask, ByRow, Question, Reading, Staged, Stages, Values
from interp.residual.decomposition import IncompleteSumError, not_linear
from interp.runs.functions import of_own_rows, of_weights
from interp.runs.kept import cached_for_model
from interp.tasks import SHORT_SENTENCES, IndirectObjects, RepeatedTokens
from interp.weights.copying import (
    RandomHeads,
    against_random,
    chance_copying,
    copying_scores,
)
from interp.weights.head_circuits import HeadCircuits
from interp.weights.random_heads import random_heads
from interp.weights.successor import known_sequences, successor_hits

if TYPE_CHECKING:
    import xarray as xr


REPEATS = RepeatedTokens()
"""The default rows of repeated tokens, used besides `SHORT_SENTENCES`."""
HEAD = ("layer", "head")
SCORED, DRAWN = 1000, 600
"""Multiplications that take as long as the scores of an attention weight, and as drawing a row from one more id
(measured on a CPU, 30 and 20 ns)."""
BY_PATTERN = (*SCORES, "peak_distance", "to_receiver", "to_giver", "s_inhibition")
"""The scores of attention patterns, which say where heads look."""
MASS = "attention mass"
TO_VALUES = ("ln1.hook_scale", "ln1.hook_normalized", "hook_v_input", "attn.hook_v")
"""Sites between the stream and the values of a block's heads."""
SILENT = ("hook_pos_embed", "hook_type_embed")
"""Sites of embeddings that do not depend on which token it is."""


@dataclass(frozen=True)
class Heads(Question):
    """A table of every attention head: scores with 95 % intervals and chance levels, and a label in plain words.

    Where a head looks on repeated random tokens, what it copies and which names it attends to and writes tell its
    role. `interp.run([Heads()], model, texts, out=...)` does it on a corpus, journalled and resumable.

    Args:
        data: prompts of your own instead of repeated random tokens, of any size; None: repeated random tokens. With
            your own prompts `duplicate_token` and `induction` are means over the tokens that repeat an earlier one,
            rows without any do not count, and there is no `copying` and no `peak_distance`.
        repeats: the rows of repeated random tokens; None: `RepeatedTokens()`, where there are no data.
        sentences: the sentences about names; None leaves their scores out.
        copies: function of a batch of your own rows that says which earlier tokens each token repeats [b q k] (keys
            before the query); None: those with the same id.
        random: how many models with random heads get the same scores, as the null of `p`. Each costs what the heads'
            own scores cost. Random heads are those of `interp.weights.random_heads`, turned weights on this model's
            own streams, so the null is a head without purpose; from even attention every head departs.

    Returns:
        Dataset over `layer`, `head` and `score`, with the coordinate `unit`:

        - `value`, with `low` and `high`, its 95 % interval (over rows, draws of a sentence, or items), and `n`.
        - `null`: a level to compare with.
        - `p`: two-sided, how often a random head of the same layer is as far out, among n = `random` times its heads:
          at least 2 / (n + 1), and calibrated on models that nobody trained (`docs/intervals.md`). NaN for
          `peak_distance`, and without `random`, but for `copying_weights`, which has its p always.
        - `label` [layer, head]: the first label that is sure.
        - `confidence` [layer, head, called]: how sure each label is; several may hold at once.

        Scores on repeated random tokens, in [0, 1]; null: attention spread evenly over what the layer may see:

        - `previous_token`, `current_token`, `first_token`: mean attention there.
        - `duplicate_token`, `induction`: attention summed over all earlier copies, or over what followed them, mean
          over the queries that have one; the second is the prefix-matching score.
        - `local`: attention to the last 5 tokens. `entropy`: H_i / log(i + 1).
        - `peak_distance`: how far back `attention_kernel` is largest, in tokens.
        - `copying`: of what a head raises when it attends to a token, the token's own part (Olsson et al. 2022, -1 to
          1; chance is about -0.86).

        Scores from the weights:

        - `copying_weights`: copying by eigenvalues (exact: its interval is itself, n = 0; chance is the mean of random
          heads).
        - `successor`: share of items (numbers, months, letters, ...) that the weights map to the next one.

        Scores on indirect-object sentences: `to_receiver`, `to_giver`, `name_mover` (logits), `s_inhibition`.

        Where weights may be negative or sum to anything (differential, lightning, pooling) they count as shares of all
        that a query weighs, a_ij / sum_j |a_ij|, scores lie in [-1, 1], `entropy` is NaN, and `attrs["no_shares"]`
        names the layers. Layers that mix positions without attention (a state, a convolution) are NaN in all scores
        about where heads look, and `attrs["no_pattern"]` names them. Scores that the model does not allow are absent,
        and `no_copying`, `no_sentences`, `no_successor` in attrs say why. Under edits everything is measured in the
        edited model: scores read off weights (`copying`, `copying_weights`, `successor`) are NaN for a head whose
        values or output are edited, and the last two are absent where embeddings or the MLP of block 0 are;
        `name_mover` is absent where heads and MLPs are not all that writes the stream.

    Raises:
        ValueError: rows that do not fit the context, a model that is not causal or has no layer with a pattern,
            `copies` together with `repeats`; with `random`, edits and heads that read the stream otherwise than by
            queries, keys and values.

    Caveat:
        Attention says where a head looks, not what it does; direct effects leave out what goes through later parts.

    Source:
        Olsson et al. 2022 for repeats and copying, Wang et al. 2022 for names, Gould et al. 2023 for successors.

    See Also:
        `attention_kernel`: attention by distance. `interp.copying`: copying scores from the weights alone.

    Example:
        >>> table = interp.heads(model)
        >>> table.label.sel(layer=1).values
        >>> interp.frame(table).query("score == 'induction'").nlargest(3, "value")
    """

    _: KW_ONLY
    repeats: RepeatedTokens | None = None
    sentences: IndirectObjects | None = SHORT_SENTENCES
    copies: Callable[[Batch], Bool[Tensor, "b q k"]] | None = None
    random: int = 0

    def bind(self, model: Subject) -> Staged:
        """Passes over the rows and the sentences, again for every random head, and the weights."""
        _check(model.transformer.config, self.repeats)
        random_heads(model.transformer, self.random)  # refuses what it cannot do
        if self.repeats is not None and self.copies is not None:
            raise ValueError(
                "copies are said of rows of your own; RepeatedTokens knows where its tokens repeat"
            )
        return Staged(
            self.name,
            partial(_heads_table, model, self),
            data="optional" if self.repeats is None else "none",
            of_model=None if model.transformer.edits else replace(self, repeats=self.repeats or REPEATS),
        )


@dataclass(frozen=True)
class AttentionKernel(Question):
    """Mean attention of each head by distance on random tokens, before anything repeats at that distance.

    Args:
        repeats: the rows of repeated random tokens.

    Returns:
        Dataset over `layer`, `head` and `distance`, in attention mass; distances end 2 short of the period.

        - `value`: mean attention to the token `distance` before the query, over the queries for which that token exists
          and is not BOS, with `low` and `high` (95 % over rows), and `n`. NaN in layers without a pattern.
        - `null`: the same for attention spread evenly over what the layer may see.

    Raises:
        ValueError: rows that do not fit the context, a model that is not causal or has no layer with a pattern.

    Example:
        >>> interp.attention.attention_kernel(model).value.sel(layer=0, head=1, distance=1)
    """

    repeats: RepeatedTokens = REPEATS

    def bind(self, model: Subject) -> Staged:
        """A pass over rows of its own making."""
        _check(model.transformer.config, self.repeats)
        known = None if model.transformer.edits else self
        return Staged(self.name, partial(_kernel_table, model, self), data="none", of_model=known)


heads = of_own_rows(Heads)


attention_kernel = of_weights(AttentionKernel)


def _check(config: ModelConfig, data: RepeatedTokens | None) -> None:
    """Raises a ValueError for a model without causal attention patterns, or with a context shorter than the rows."""
    if not config.causal:
        raise ValueError("head scores on repeats require a causal model")
    if not with_pattern(config):
        why = (
            config.block.why_not("blocks.0.attn.hook_pattern") or f"positions are mixed by {config.mixers[0]}"
        )
        raise ValueError(
            f"head scores require an attention pattern, and no layer of this model has one: {why}"
        )
    if isinstance(data, RepeatedTokens) and data.length > config.n_ctx:
        repeats = min(data.repeats, (config.n_ctx - 1) // 2)
        fit = f"; period={(config.n_ctx - 1) // repeats}, repeats={repeats} do" if repeats > 1 else ""
        raise ValueError(f"rows of {data.length} tokens do not fit the context of {config.n_ctx}{fit}")


def _heads_table(model: Subject, question: Heads, has_data: bool) -> Stages[xr.Dataset]:
    """The table of `Heads`: scores of the model's own heads, then their p from the same scores of random heads."""
    network, config = model.transformer, model.transformer.config
    rows = _Rows.of(question, config, has_data=has_data)
    (scores, attrs, peak), (notes, why_not) = yield from _measured_scores(model, question, rows)
    asked_of = (_weight_scores.__qualname__, unlike_weights(network), embedding_edits(network))
    from_weights, why, random = cached_for_model(
        model, asked_of, partial(_weight_scores, network, model.text)
    )
    scores |= notes | from_weights | peak
    attrs |= why_not | why
    no_pattern = without_pattern(config)
    if no_pattern.any():
        unseen_layers = no_pattern[:, 0].nonzero().flatten().tolist()
        attrs["no_pattern"] = f"layers {', '.join(map(str, unseen_layers))} mix positions without attention"
        scores |= {name: _nan_at(scores[name], no_pattern) for name in BY_PATTERN if name in scores}
    if signed_layers := without_shares(config):
        attrs["no_shares"] = f"layers {', '.join(map(str, signed_layers))}: {NO_SHARES}"
        is_signed = torch.zeros(config.n_layers, 1, dtype=torch.bool)
        is_signed[list(signed_layers)] = True
        scores["entropy"] = _nan_at(scores["entropy"], is_signed)
    chance = yield from _random_scores(model, question, rows)
    p = {name: two_sided_p(scores[name].value.cpu(), values) for name, values in chance.items()}
    if random is not None:
        p["copying_weights"] = random.p(scores["copying_weights"].value)
    missing = torch.full((config.n_layers, config.n_heads), torch.nan, dtype=torch.float64)
    table = scored(
        question.name,
        scores,
        HEAD,
        coords=_coords(config),
        others={"p": ((*HEAD, "score"), torch.stack([p.get(name, missing) for name in scores], -1))},
        attrs=attrs,
        notes=() if rows.repeats is None else _first_token(model.text)[1],
    )
    confidence = confidences(table)
    return table.assign(label=labels(confidence), confidence=confidence.assign_attrs(unit="probability"))


def _random_scores(model: Subject, question: Heads, rows: _Rows) -> Stages[dict[str, Float[Tensor, "l 1 n"]]]:
    """By score, its values for the n random heads that replaced each layer's heads; empty without random heads.

    `copying_weights` is not among them: `against_random` compares it with random heads of its own.
    """
    by_score: dict[str, list[Tensor]] = {}
    for network in random_heads(model.transformer, question.random):
        random_model = Studied(network, model.text)
        (scores, _, _), (notes, _) = yield from _measured_scores(random_model, question, rows, summed=False)
        scores |= notes
        if _why_not_copied(network.config) is None:
            circuits = HeadCircuits(network, folded=True, embedding="effective")
            scores |= _successor_score(to_host(_successor_hits(circuits, model.text)[0]))
        for name, score in scores.items():
            by_score.setdefault(name, []).append(score.value.cpu())
    # by model [l h] -> [l (model h)] -> [l 1 n]
    return {name: torch.stack(values, 1).flatten(1)[:, None] for name, values in by_score.items()}


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows on which attention patterns are scored, and the question that scores them."""

    question: ByRow
    repeats: RepeatedTokens | None
    """The task that makes rows of repeated tokens; None: the rows are the data of the run."""

    @classmethod
    def of(cls, question: Heads, config: ModelConfig, *, has_data: bool) -> _Rows:
        """The rows of the run's data where it has data and `question.repeats` is None; else repeated tokens."""
        if has_data and question.repeats is None:
            copied = partial(_row_scores, copies=question.copies or same_token)
            return cls(ByRow("patterns", copied, MaskedMeans), None)
        repeats = question.repeats or REPEATS
        _check(config, repeats)
        return cls(head_scores(config, repeats), repeats)

    def ask(self, model: Subject) -> Ask:
        """The question that scores the patterns, with its rows, for one model."""
        source = None if self.repeats is None else _batches_of(self.repeats, model)
        return Ask(self.question, source, model)

    def found(self, merged: Partial, model: Subject) -> FoundScores:
        """The scores of the patterns, from the moments over all rows."""
        if self.repeats is None:
            return _data_scores(merged, model.transformer.config)
        return _repeat_scores(merged, self.repeats, model.transformer)


def _measured_scores(
    model: Subject, question: Heads, rows: _Rows, *, summed: bool = True
) -> Stages[tuple[FoundScores, tuple[dict[str, Score], dict[str, str | int]]]]:
    """Scores of the heads of one model from the patterns on the rows, and from indirect-object sentences."""
    (merged,) = yield [rows.ask(model)]
    width = 0 if rows.repeats is None else rows.repeats.length
    names = yield from _name_scores(model, question, width, summed=summed)
    return rows.found(merged, model), names


FoundScores = tuple[dict[str, Score], dict[str, str | int], dict[str, Score]]
"""Scores of patterns by name, attrs of the result, and the scores that come last in the table (`peak_distance`)."""


def _repeat_scores(merged: Partial, data: RepeatedTokens, network: Transformer) -> FoundScores:
    """Scores of the patterns, and of copying, on rows of repeated tokens."""
    assert isinstance(merged, Means)
    config, moments = network.config, dict(merged.moments)
    kernel, even = moments.pop("kernel"), _even_scores(config, data)
    scores = {name: _mass_score(moments[name], config, even[:, i, None]) for i, name in enumerate(SCORES)}
    if "copying" in moments:
        chance = chance_copying(data.sample)
        copying = Score.of(moments["copying"], "copying score", chance, within=SIGNED)
        scores["copying"] = _nan_at(copying, rewritten(network))
    return scores, _attrs(data, kernel.n), {"peak_distance": _peak_score(kernel, even[:, len(SCORES) :])}


def _mass_score(moments: Moments, config: ModelConfig, null: Tensor) -> Score:
    """A score in attention mass, with its interval as a share's unless a layer's weights may be negative."""
    return Score.of(moments, MASS, null, share=not without_shares(config), within=SIGNED)


def same_token(batch: Batch) -> Bool[Tensor, "b q k"]:
    """Default `copies`: a token repeats the earlier tokens of its row that have the same id."""
    tokens, place = batch.tokens, batch.places
    return (tokens[:, :, None] == tokens[:, None, :]) & (place[:, None, :] < place[:, :, None])


def _data_scores(merged: Partial, config: ModelConfig) -> FoundScores:
    """Scores of `SCORES` on the user's rows; the null of each is that of attention spread evenly over visible keys."""
    assert isinstance(merged, MaskedMeans)
    moments = merged.moments
    scores = {
        name: _mass_score(moments[name], config, moments[f"{name}_null"].mean[:, None]) for name in SCORES
    }
    if not int(scores["induction"].n.max()):
        raise ValueError("data must have rows in which a token repeats an earlier one; no row has any")
    attrs: dict[str, str | int] = {
        "rows": moments["local"].n, "interval": "95 % over rows",
        "null": "attention spread evenly over what the layer may see",
        "no_copying": "asked of rows of your own",
    }  # fmt: skip
    return scores, attrs, {}


def _row_scores(
    model: Transformer, batch: Batch, copies: Callable[[Batch], Bool[Tensor, "b q k"]]
) -> Steps[Values]:
    """Scores `[b l h]` of every head on each of the user's rows, and their nulls `[b l]` under even attention."""
    batch.require_one_text("head scores")
    config, real = model.config, batch.real
    place = batch.places.masked_fill(~real, -1)
    repeats, places = copies(batch).to(place.device), place if batch.keep is not None else place[:1]
    back = places[:, :, None] - places[:, None, :]
    expected = torch.Size((*place.shape, place.shape[1]))
    if repeats.shape == expected and repeats.dtype == torch.bool and batch.keep is not None:
        repeats = repeats & real[:, :, None] & real[:, None, :]
    if repeats.shape != expected or repeats.dtype != torch.bool or bool((repeats & (back <= 0)).any()):
        raise ValueError(
            f"copies must be True or False for each query and key {shape_text(expected)}, and True for earlier keys "
            f"only, got {repeats.dtype} of shape {shape_text(repeats.shape)}"
        )
    keys = copy_keys(repeats, places)
    vias = (
        _signed_copy_scores if layer in without_shares(config) else copy_scores
        for layer in with_pattern(config)
    )
    reads = [
        Read(f"blocks.{layer}.attn.hook_pattern", via, by_row=(keys, place))
        for layer, via in zip(with_pattern(config), vias, strict=True)
    ]
    seen = (yield from recorded(batch, reads)).trace
    windows = _windows(config)
    chance = {window: even_copy_scores(keys, place, window) for window in set(windows)}
    values = in_every_layer(torch.stack([seen[read] for read in reads], 1), config)
    nulls = torch.stack([chance[window] for window in windows], 1)
    table = dict(zip(SCORES, values.unbind(-1), strict=True))
    return table | {f"{name}_null": null for name, null in zip(SCORES, nulls.unbind(-1), strict=True)}


def _signed_copy_scores(
    pattern_bhqk: Float[Tensor, "b h q k"], keys: Float[Tensor, "b s q k"], place: Int[Tensor, "b q"]
) -> Float[Tensor, "b h n"]:
    """`copy_scores` of `signed_shares`, which have no entropy: NaN in the table."""
    scores = copy_scores(signed_shares(pattern_bhqk), keys, place)
    scores[..., SCORES.index("entropy")] = 0.0
    return scores


def _peak_score(kernel: Moments, even: Float[Tensor, "l n"]) -> Score:
    """Score: the distance, in tokens, at which a head's attention kernel is largest, without an interval."""
    value, null = kernel.mean.argmax(-1).double(), even.argmax(-1, keepdim=True).double()
    missing, count = torch.full_like(value, torch.nan), kernel.count()[..., 0]
    return Score(value, missing, missing, count, null.to(value).expand_as(value), "tokens back")


def _nan_at(score: Score, heads: Bool[Tensor, "l h"]) -> Score:
    """The score with value and interval set to NaN for these heads."""
    ends = {name: getattr(score, name) for name in ("value", "low", "high")}
    return score._replace(
        **{name: x.masked_fill(to_device(heads, x.device), torch.nan) for name, x in ends.items()}
    )


def _coords(config: ModelConfig) -> dict[str, object]:
    return {
        "layer": range(config.n_layers), "head": range(config.n_heads), "part": (HEAD, head_names(config)),
    }  # fmt: skip


def _kernel_table(model: Subject, question: AttentionKernel, has_data: bool) -> Stages[xr.Dataset]:
    config, data = model.transformer.config, question.repeats
    (merged,) = yield [Ask(head_scores(config, data), _batches_of(data, model), model)]
    assert isinstance(merged, Means)
    kernel = merged.moments["kernel"]
    null = _even_scores(config, data)[:, None, len(SCORES) :]
    table = labelled(
        question.name,
        kernel.estimate((*HEAD, "distance"), null=null, share=not without_shares(config), within=SIGNED),
        coords={**_coords(config), "distance": range(data.farthest + 1)},
        units=MASS,
        attrs=_attrs(data, kernel.n),
        notes=_first_token(model.text)[1],
    )
    seen = table.layer.isin(with_pattern(config))
    return table.assign({name: table[name].where(seen) for name in ("value", "low", "high")})


def _attrs(data: RepeatedTokens, rows: int) -> dict[str, str | int]:
    return {
        "rows": rows, "period": data.period, "repeats": data.repeats, "seed": data.seed,
        "interval": "95 % over rows",
        "null": "attention spread evenly over what the layer may see; copying: Gaussian logits",
    }  # fmt: skip


def _even_scores(config: ModelConfig, data: RepeatedTokens) -> Float[Tensor, "l s"]:
    """Every score of `SCORES`, then the kernel, under attention spread evenly over the keys each layer may see."""
    windows = _windows(config)
    even = {
        window: _scores_and_kernel(even_attention(data.length, window), data)[0, 0] for window in set(windows)
    }
    return torch.stack([even[window] for window in windows])


def _windows(config: ModelConfig) -> list[int | None]:
    """Number of keys that each layer's queries see; None: all up to the query."""
    return [config.window if config.is_local(layer) else None for layer in range(config.n_layers)]


def _batches_of(data: RepeatedTokens, model: Subject) -> DataSource:
    """The rows of repeated tokens; a `Note` before they are drawn where the passes over them take minutes."""
    network = model.transformer
    config = network.config
    weights = config.n_layers * config.n_heads * data.length**2
    each = data.length * config.n_layers * block_products(config) + SCORED * weights + DRAWN * config.d_vocab
    announce(
        f"{data.rows} rows of {data.length} repeated tokens", data.rows * each, network.device,
        "fewer rows, RepeatedTokens(rows=...), take less",
    )  # fmt: skip
    tokens = data.tokens(config.d_vocab, _first_token(model.text)[0])
    return prompt_source(Batch(tokens, bos=True), model.text)


def _first_token(text: Text) -> tuple[int, tuple[str, ...]]:
    """Id of the first token of the rows of repeated tokens (BOS, else 0), and a note where it is not BOS."""
    if text.bos_id is not None:
        return text.bos_id, ()
    why = (
        "its tokenizer has no BOS" if text.has_tokenizer else "it has no tokenizer to say which token is BOS"
    )
    return 0, (f"the rows of repeated tokens begin with token 0 for this model, since {why}",)


def head_scores(config: ModelConfig, data: RepeatedTokens) -> ByRow:
    """The question of `heads` and `attention_kernel` on rows of repeated tokens: moments of every score over rows."""
    layers, first = with_pattern(config), partial(_first_values, n=data.sample)
    plain, signed = (partial(_scores_and_kernel, data=data, signed=signed) for signed in (False, True))
    vias = [signed if layer in without_shares(config) else plain for layer in layers]
    patterns = [
        Read(f"blocks.{layer}.attn.hook_pattern", via, by_row=())
        for layer, via in zip(layers, vias, strict=True)
    ]
    values = [
        Read(f"blocks.{layer}.attn.hook_v", first)
        for layer in range(config.n_layers)
        if _why_not_copied(config) is None
    ]
    compute = partial(_compute, patterns=patterns, values=values, data=data)
    return ByRow("patterns", Reading((*patterns, *values), compute), Means)


def _why_not_copied(config: ModelConfig) -> str | None:
    """Reason why heads have no copying scores: no OV circuit, or no unembedding after it; None if they have."""
    if what := not_linear(config):
        return f"this model {what}"
    if config.d_vocab_out is not None:
        return f"the {config.d_vocab_out} outputs of this model are not its tokens"
    if all(mixer.traits.additive for mixer in config.mixers):
        bare = next((layer for layer, mixer in enumerate(config.mixers) if not mixer.traits.values), None)
        if bare is None:
            return None
        why = config.block.why_not(f"blocks.{bare}.attn.W_V") or str(config.mixers[bare])
        return f"there is no W_V in layer {bare}: {why}"
    return why_not_additive(next(mixer for mixer in config.mixers if not mixer.traits.additive))


def _scores_and_kernel(
    pattern_bhqk: Float[Tensor, "b h q k"], data: RepeatedTokens, *, signed: bool = False
) -> Float[Tensor, "b h s"]:
    """Every score of `SCORES`, then the kernel, of a pattern, or of its `signed_shares` if `signed`."""
    pattern_bhqk = signed_shares(pattern_bhqk) if signed else pattern_bhqk
    kernel = distance_kernel(pattern_bhqk, data.farthest)
    return torch.cat((pattern_scores(pattern_bhqk, data.period, kernel), kernel), -1)


def _first_values(v: Float[Tensor, "b p g e"], n: int) -> Float[Tensor, "b s g e"]:
    """The value vectors of the first n tokens after BOS."""
    return v[:, 1 : 1 + n]


def _compute(
    trace: Trace,
    batch: Batch,
    model: Transformer,
    patterns: Sequence[Read],
    values: Sequence[Read],
    data: RepeatedTokens,
) -> Mapping[str, Tensor]:
    """Scores `[b l h]` of rows of repeated tokens, the kernel `[b l h distance]` and, given values, `copying`."""
    if batch.keep is not None or batch.documents is not None:
        raise ValueError("head scores require the plain rows of RepeatedTokens, got a padded or packed batch")
    numbers = in_every_layer(torch.stack([trace[read] for read in patterns], 1), model.config)
    scores, kernel = numbers[..., : len(SCORES)], numbers[..., len(SCORES) :]
    # Weights that are no shares have no entropy: NaN in the table, which a mean over rows would refuse.
    if signed := without_shares(model.config):
        scores[:, to_device(signed, scores.device), :, SCORES.index("entropy")] = 0.0
    by_score = dict(zip(SCORES, scores.unbind(-1), strict=True)) | {"kernel": kernel}
    if values:
        first = batch.tokens[:, 1 : 1 + data.sample]
        by_score["copying"] = copying_scores([trace[read] for read in values], first, model)
    return by_score


def _name_scores(
    model: Subject, question: Heads, longest: int, *, summed: bool = True
) -> Stages[tuple[dict[str, Score], dict[str, str | int]]]:
    """Scores on indirect-object sentences, and attrs: the number of sentences, or why there are no scores.

    Args:
        longest: tokens in a row of repeated tokens; a pass of sentences has as many tokens as a pass of those rows.
    """
    if question.sentences is None:
        return {}, {"no_sentences": "not asked for"}
    try:
        batches = question.sentences.balanced(model.text)
    except ValueError as cause:
        return {}, {"no_sentences": str(cause)}
    width = batches[0].tokens.shape[1]
    rows = ROWS * max(longest, width) // width
    reasons: dict[str, str | int] = {"sentences": len(batches[0])}
    try:
        name_moments = yield from sentence_scores(model, batches, rows, summed=summed)
    except IncompleteSumError as cause:
        if not model.transformer.edits:
            raise
        reasons["no_name_mover"] = f"under these edits heads are not all that writes the stream: {cause}"
        name_moments = yield from sentence_scores(model, batches, rows, direct=False)
    scores = {
        name: Score.of(moments, "logits", null.to(moments.mean))
        if name == "name_mover"
        else _mass_score(moments, model.transformer.config, null.to(moments.mean))
        for name, (moments, null) in name_moments.items()
    }
    return scores, reasons


def _weight_scores(
    model: Transformer, text: Text
) -> tuple[dict[str, Score], dict[str, str | int], RandomHeads | None]:
    """Scores computed from the weights, attrs that say why some are missing, and the random heads for comparison.

    Heads of `unlike_weights`, whose values or output an edit changes, are NaN.
    """
    if why := _why_not_copied(model.config):
        return {}, {"no_copying": why, "no_successor": why}, None
    if edited := embedding_edits(model):
        why = f"these scores are read off embeddings and weights, and {', '.join(edited)} is edited"
        return {}, {"no_copying_weights": why, "no_successor": why}, None
    circuits = HeadCircuits(model.unedited, folded=True, embedding="effective")
    others, (hits, reasons) = unlike_weights(model), _successor_hits(circuits, text)
    copying, random, hits = against_random(circuits, without=others, extra=hits)
    scores = {"copying_weights": Score.exact(copying, "copying score", random.mean), **_successor_score(hits)}
    return {name: _nan_at(score, others) for name, score in scores.items()}, reasons, random


def _successor_hits(
    circuits: HeadCircuits, text: Text
) -> tuple[dict[str, Bool[Tensor, "pair l h"]], dict[str, str | int]]:
    """Successor hits of each sequence whose items are single tokens, and attrs about them or why there are none."""
    try:
        sequences = known_sequences(text)
    except ValueError as cause:
        return {}, {"no_successor": str(cause)}
    listed = ", ".join(f"{len(ids)} {name}" for name, ids in sequences.items())
    return {name: successor_hits(circuits, ids) for name, ids in sequences.items()}, {
        "successor_items": listed
    }


def _successor_score(hits: Mapping[str, Bool[Tensor, "pair l h"]]) -> dict[str, Score]:
    """The successor score, over the items of all sequences, under its name; empty without sequences.

    Its null is that of a head that maps each of n items to a random other one: 1 / (n - 1), mean over all items.
    """
    if not hits:
        return {}
    chance = float(
        torch.cat([torch.full((len(pair_hits),), 1 / len(pair_hits)) for pair_hits in hits.values()]).mean()
    )
    score = Score.of(
        Moments.of(torch.cat(list(hits.values())).double()), "share of items", chance, share=True
    )
    return {"successor": score}


# --- heads for which edits invalidate the scores from weights ----------------------------------------------------


def rewritten(model: Transformer) -> Bool[Tensor, "l h"]:
    """Mask of the heads whose pattern-weighted values or output an edit changes: they do not write values times W_O."""
    return _edited_heads(model)


def unlike_weights(model: Transformer) -> Bool[Tensor, "l h"]:
    """Mask of the heads whose OV circuit is not that of the weights: edits change what they read or write."""
    return _edited_heads(model, TO_VALUES)


def embedding_edits(model: Transformer) -> list[str]:
    """Names of the edits that change a token's effective embedding: at embeddings, or in block 0 outside attention."""
    attention = ("attn.", "hook_attn_out", "hook_q_input", "hook_k_input", "hook_v_input", "ln1")
    edit_names = []
    for edit in model.edits:
        inside = layer_of(edit, model) == 0 and not inner_site(edit).startswith(attention)
        if inside or (edit.site in EMBEDDING_SITES and edit.site not in SILENT):
            edit_names.append(edit.name)
    return edit_names


def _edited_heads(model: Transformer, also: tuple[str, ...] = ()) -> Bool[Tensor, "l h"]:
    """Mask of the heads that an edit changes after their pattern and values, or at the sites `also` of their block."""
    config = model.config
    mask = torch.zeros(config.n_layers, config.n_heads, dtype=torch.bool)
    for layer in range(config.n_layers):
        for edit in edits_at(model, layer, (*also, *after_pattern(config, layer))):
            mask[layer, _edited_indices(edit)] = True
    return mask


def _edited_indices(edit: Edit) -> slice | list[int]:
    """Index of the heads that an edit names; a slice of all heads where it names none."""
    indices = edit.cells.get("h")
    return (
        list(indices)
        if isinstance(indices, tuple)
        else [indices]
        if isinstance(indices, int)
        else slice(None)
    )
