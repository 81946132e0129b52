"""The logit lens: the next-token prediction of the stream at each depth, as if the model stopped there.

logits_l = LN_f(x_l) W_U, the final norm RECOMPUTED on the state (nostalgebraist 2020); at the last depth these are the
model's own logits, their factor and soft cap included. It shows what a linear read-out finds, not what later layers
use.

Some rows of logits are held in whole, in memory that is used again for the next ones. Their products run in tiles of
the vocabulary, faster than as a whole; every further question about them costs one pass over a tile
(`experiments/bench/lens.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import listed
from interp.core.results import Score, check_result, labelled, numbers, scored
from interp.core.stats import POSITIVE, Moments, Partial, Rows, finite, upcast
from interp.core.transfers import check, to_device
from interp.data.answers import AnswerTokens
from interp.data.batch import Answers, Batch
from interp.data.text import Text
from interp.model.config import ModelConfig
from interp.model.layout import ByRole, PerRow, Places, several
from interp.model.parts import Part
from interp.model.sites import final_stream, find, full_name, names
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer, called, unembedded
from interp.passes.duration import announce_logits
from interp.passes.observe import Subject
from interp.passes.question import ByRow, NotFiniteError, Question, Reading
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr


COLUMNS = 1024
"""Width of a tile on a CPU: with 128 rows half a MiB in float32. An accelerator gets the vocabulary as one tile."""


class LogitTiles:
    """Logits of up to `rows` states: `values[t, r, c]` is that of token `t * width + c`, in float32 at least.

    Exactly what the model does after the stream: final norm, masked-LM head, factor, soft cap, of the widened state.
    Places after the last token hold -inf.
    """

    def __init__(self, model: Transformer, rows: int) -> None:
        self.model, self.rows = model, rows
        size = model.config.n_outputs
        self.width = min(size, COLUMNS if model.device.type == "cpu" else size)
        self.count = -(-size // self.width)
        dtype = torch.promote_types(model.dtype, torch.float32)
        self._memory = torch.empty(self.count * rows * self.width, dtype=dtype, device=model.device)
        self.values = self._memory.view(self.count, rows, self.width)
        self.largest = self.values.new_empty(rows, self.count)
        """The largest logit of each row in each tile."""

    def fill(self, state: Float[Tensor, "r d"]) -> None:
        """Compute the logits of these states; earlier ones are overwritten."""
        rows = len(state)
        logits_of = self._logits_function(state)
        self.values = self._memory[: self.count * rows * self.width].view(self.count, rows, self.width)
        self.largest = self.largest.new_empty(rows, self.count)
        for t in range(self.count):
            tokens = slice(t * self.width, (t + 1) * self.width)
            logits = logits_of(tokens)
            if logits.shape[1] < self.width:
                self.values[t].fill_(-torch.inf)
            self.tile(t).copy_(logits)
            torch.amax(logits.to(self.largest.dtype), 1, out=self.largest[:, t])

    def tile(self, t: int) -> Float[Tensor, "r c"]:
        """The logits of one tile, without the places after the last token."""
        return self.values[t, :, : self.model.config.n_outputs - t * self.width]

    def of(self, token: Int[Tensor, "r"]) -> Float[Tensor, "r"]:
        """One logit of every row."""
        row = torch.arange(len(token), device=token.device)
        return self.values[token // self.width, row, token % self.width]

    def top(self, k: int) -> tuple[Float[Tensor, "r k"], Int[Tensor, "r k"]]:
        """The k largest logits of every row in order, and their tokens.

        They lie in the k tiles of the row with the largest maxima; only those are searched.
        """
        tiles = self.largest.topk(min(k, self.count)).indices
        row = torch.arange(len(tiles), device=tiles.device)[:, None]
        best = self.values[tiles, row].flatten(1).topk(k)
        tile = tiles.gather(1, best.indices // self.width)
        return best.values, tile * self.width + best.indices % self.width

    def _logits_function(self, state: Float[Tensor, "r d"]) -> Callable[[slice], Tensor]:
        """A function from a slice of token ids to their logits `[r c]`; without `unembed` all are computed at once."""
        model = self.model
        if model.unembed is None:
            logits = model.read_out(upcast(state))
            return lambda tokens: logits[:, tokens]
        x, unembed = model.ln_final(upcast(state)), model.unembed
        x = x if model.mlm_head is None else called(model.mlm_head, x)
        return lambda tokens: self._scaled_and_capped_logits(unembedded(unembed, x, tokens))

    def _scaled_and_capped_logits(self, logits: Float[Tensor, "r c"]) -> Float[Tensor, "r c"]:
        """The logits with the model's factor and soft cap."""
        config = self.model.config
        if config.logit_scale != 1:
            logits = logits * config.logit_scale
        if config.logit_softcap is not None:
            logits = (logits / config.logit_softcap).tanh_().mul_(config.logit_softcap)
        return logits


@dataclass(frozen=True, eq=False)
class ReferenceDistribution:
    """Distributions that `statistics` compares with: exp(logit - largest logit), its sum over tokens, the entropy."""

    weights: Float[Tensor, "t r c"]
    total: Float[Tensor, "r"]
    entropy: Float[Tensor, "r"]

    @classmethod
    def like(cls, tiles: LogitTiles) -> "ReferenceDistribution":
        """An empty reference with memory for the rows of `tiles`."""
        rows = tiles.values.new_zeros(tiles.values.shape[1], dtype=torch.float64)
        return cls(torch.empty_like(tiles.values), rows, rows.clone())


def statistics(
    tiles: LogitTiles,
    target: Int[Tensor, "r"],
    top: int,
    reference: ReferenceDistribution,
    *,
    is_reference: bool = False,
    log_prob: bool = False,
) -> dict[str, Tensor]:
    """Top tokens, entropy, KL to a reference, and rank and probability of a target, per row of logits.

    The logits in `tiles` are overwritten. Row i is compared with row i of the reference; k times as many rows as the
    reference has are k repeats of its rows. Returned: `top_token`, `top_prob`, `entropy` and `kl` = KL(reference ||
    these) in nats, `target_rank` and `target_prob` (-1 and NaN where the target is negative), with `log_prob` also
    `target_log_prob`, which does not underflow. With `is_reference` the reference is filled from these rows and `kl`
    is 0. Sums over the vocabulary are taken in the logits' dtype within a tile, in float64 over tiles.
    """
    repeats = (-1, len(reference.total))
    known, of_target = target >= 0, tiles.of(target.clamp_min(0))[:, None]
    best, tokens = tiles.top(top)
    largest = best[:, :1]
    scratch, weight = torch.empty_like(tiles.values[0]), torch.empty_like(tiles.values[0])
    above, total, dot, cross = torch.zeros(4, len(target), dtype=torch.float64, device=target.device)
    for t in range(tiles.count):
        logits = tiles.tile(t)
        used = slice(0, logits.shape[1])
        space, ref_weights = scratch[:, used], reference.weights[t, :, used]
        exponentials = ref_weights if is_reference else weight[:, used]
        above += torch.gt(logits, of_target, out=space).sum(-1)
        torch.exp(logits.sub_(largest), out=exponentials)
        total += exponentials.sum(-1)
        dot += torch.mul(exponentials, logits, out=space).sum(-1)
        if not is_reference:
            products = torch.mul(ref_weights, logits.unflatten(0, repeats), out=space.unflatten(0, repeats))
            cross += products.sum(-1).flatten()
    entropy = total.log() - dot / total
    if is_reference:
        reference.total.copy_(total)
        reference.entropy.copy_(entropy)
        kl = torch.zeros_like(entropy)
    else:
        log_total, shared = (x.unflatten(0, repeats) for x in (total.log(), cross))
        kl = (log_total - shared / reference.total - reference.entropy).clamp_min(0.0).flatten()
    values = {
        "top_prob": (best - largest).exp() / total[:, None],
        "entropy": entropy,
        "kl": kl,
        "target_prob": ((of_target - largest).exp()[:, 0] / total).masked_fill(~known, torch.nan),
    }
    if log_prob:
        values["target_log_prob"] = ((of_target - largest)[:, 0] - total.log()).masked_fill(~known, torch.nan)
    narrow = {name: value.to(tiles.values.dtype) for name, value in values.items()}
    return {**narrow, "top_token": tokens, "target_rank": above.long().masked_fill(~known, -1)}


CHUNK = 128
"""Rows of logits held at a time: 25 MiB at a vocabulary of 50 257."""
STATES = (
    "resid_pre", "resid_pre_attn", "resid_mid", "resid_mid_cross", "resid_post", "normalized_resid_post",
)  # fmt: skip
"""The sites that hold the whole residual stream."""


@runtime_checkable
class Translators(Protocol):
    """A map from the state of a site to what the final norm reads: a `TunedLens`, or a `FittedJacobianLens`."""

    def __call__(self, site: str, state: Float[Tensor, "r d"]) -> Float[Tensor, "r d"]:
        """The state of a site in the terms of the last one."""
        ...

    def check(self, model: Transformer, sites: Sequence[str]) -> None:
        """Raise ValueError for a model that the lens was not made for, KeyError for a site without a translator."""
        ...


@dataclass(frozen=True)
class LogitLens(Question):
    """Next-token prediction at every depth and position, as if the model stopped there.

    It shows at which depth an answer appears, and what the model favours before.

    Each layer's state is read as if it were the last one: logits_l = LN_f(x_l) W_U, with the final norm computed on the
    state itself. At the last depth these are the model's own logits, their factor and soft cap included.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        answer: target at every position, as text or id, one for all prompts or one for each; None: each position's next
            token. An answer of several tokens is appended to the prompt but for its last token: the target is its first
            token up to the prompt's end, and then the token that follows.
        top: how many of the most probable tokens are listed; None: 10, or all of a smaller vocabulary.
        sites: states to read in every block, such as "resid_pre" or "resid_mid", or full names such as
            `blocks.3.hook_resid_mid`. A post-norm block's `resid_mid` and `resid_post` are sums before their norm.
        pos: which of each prompt's tokens, one or several, negative from its end; None: all. Several are several of
            every prompt, and their numbers become the coordinate `pos`; `PerRow([3, 4])` is one for each prompt,
            numbered by the coordinate `position` (`PerRow([(2, 3), (4,)])` several of each, NaN and -1 beyond).
        translators: a lens that states go through before the final norm: a `TunedLens`, or a `FittedJacobianLens` with
            `sites="resid_post"`; None: the logit lens.

    Returns:
        Dataset[prompt, depth, pos]. Depths are parts: `L0.resid` is the stream that enters layer 0, and the last one
        the model's own answer. The coordinate `token` is the text of every token read. Padded positions hold NaN.

        - `top_token`, its text `word`, `top_prob` [prompt, depth, pos, rank]: the most probable tokens, in order.
        - `entropy`: of the distribution, in nats.
        - `kl`: KL(final || depth) in nats.
        - `target_rank`, `target_prob`: rank (0 = most probable) and probability of the target; -1 and NaN where there
          is none.
        - `answer_log_prob`, `answer_worst_rank` [prompt, depth], of answers of several tokens: the sum of their
          log-probabilities, each token predicted after those before it, and the largest of their ranks: 0 where the
          answer is what the depth says greedily.

    Raises:
        ValueError: a site that does not hold the stream, translators of another model, or a model without an
            unembedding.
        KeyError: a site that the model lacks.
        IndexError: a position that a prompt lacks.

    Caveats:
        It shows what a linear read-out finds, not what later layers use. In float32 `kl` is exact to about 1e-6 nats.

    Memory:
        No more than 128 rows of logits, and as many of the last depth's, exist at a time.

    Source:
        nostalgebraist 2020, "interpreting GPT: the logit lens".

    See Also:
        `by_depth`: curves over depth of many prompts. `train_tuned_lens`, `jacobian_lens`: lenses that translate states
        first. `output_lens`: what a single head or MLP writes.

    Example:
        >>> interp.logit_lens(model, prompt, answer=" Mary")
        >>> interp.logit_lens(model, prompt, sites=("resid_pre", "resid_mid"), pos=-1).depth.values[1]
        'L0.resid_mid'
    """

    of_layers: ClassVar[bool] = False

    _: KW_ONLY
    answer: Answers | None = None
    top: int | None = None
    sites: str | Sequence[str] = "resid_pre"
    pos: Places | None = None
    translators: Translators | None = None

    def bind(self, model: Subject) -> ByRow:
        """The states to read, and the statistics of their logits."""
        config, rows = model.transformer.config, self.reading(model)
        chosen = None if self.pos is None else several(self.pos)
        sites = tuple(read.site for read in rows.reads)
        return ByRow(
            self.name,
            rows,
            Rows,
            partial(_finish, name=self.name, config=config, sites=sites, positions=chosen, text=model.text),
            AnswerTokens.of(model.text, self.answer, several=True),
            prompts=len(chosen) if isinstance(chosen, PerRow) else None,
        )

    def reading(self, model: Subject) -> Reading:
        """The reads of a pass, and the numbers of every state.

        Raises:
            ValueError, KeyError: as `logit_lens`.
        """
        config = model.transformer.config
        top = listed(self.top, 10, config.n_outputs)
        if not config.unembed:
            raise ValueError("a lens requires an unembedding; this model ends in its residual stream")
        states = lens_sites(config, self.sites)
        if self.translators is not None:
            self.translators.check(model.transformer, states[:-1])
        chosen = None if self.pos is None else several(self.pos)
        compute = partial(_compute, sites=states, positions=chosen, translators=self.translators, top=top)
        return Reading([Read(site) for site in states], compute)


logit_lens = of_data(LogitLens)


def lens_sites(config: ModelConfig, sites: str | Sequence[str]) -> tuple[str, ...]:
    """Full names of the states that a lens reads, in the order of the pass; the last is the model's final stream.

    Raises:
        ValueError: a site that does not hold the stream.
        KeyError: one the model lacks.
    """
    chosen: set[str] = set()
    for name in [sites] if isinstance(sites, str) else sites:
        if name.rpartition("hook_")[2] not in STATES:
            raise ValueError(
                f"a lens reads the whole residual stream: {', '.join(STATES)} or a full name of one is required, "
                f"got {name!r} (what a head or an MLP writes: output_lens)"
            )
        layers = range(config.n_layers)
        chosen |= {name} if "hook_" in name else {full_name(name, layer) for layer in layers}
    for name in chosen:
        find(name, config)
    final = final_stream(config)
    return (*(name for name in names(config) if name in chosen and name != final), final)


@public()
def by_depth(result: xr.Dataset) -> xr.Dataset:
    """Logit lens of many prompts as curves over depth: the mean over each prompt's positions, then over prompts.

    Args:
        result: what `logit_lens` returned.

    Returns:
        Dataset[depth, score] for the scores `kl`, `entropy` (nats) and `target_prob`. Positions without the number
        (padding, no target) and prompts that have none are left out.

        - `value`: the mean.
        - `low`, `high`: 95 % over prompts; NaN for fewer than three, but of `target_prob`, a share.
        - `n`: number of prompts.

    Example:
        >>> by_depth(interp.logit_lens(model, [prompt, "The cat sat on the"])).value.sel(score="kl")
    """
    check_result("result", result, ("prompt", "depth", "pos", "kl", "entropy", "target_prob"), "logit_lens")
    scores: dict[str, Score] = {}
    for name in ("kl", "entropy", "target_prob"):
        rows = numbers(name, result[name], ("prompt", "depth", "pos")).nanmean(-1)
        moments, unit = Moments.of(rows[~rows.isnan().any(1)]), result[name].attrs["unit"]
        scores[name] = Score.of(moments, unit, share=name == "target_prob", within=POSITIVE)
    attrs = {**result.attrs, "interval": "95 % over prompts"}
    depths = [str(depth) for depth in result.depth.values]
    return scored("lens_by_depth", scores, ("depth",), coords={"depth": depths}, attrs=attrs)


@torch.no_grad()
def _compute(
    trace: Trace,
    batch: Batch,
    model: Transformer,
    sites: tuple[str, ...],
    positions: Places | None,
    translators: Translators | None,
    top: int,
) -> Mapping[str, Tensor]:
    """The statistics of every read state by name, `[b depth n ...]` for n positions, with NaN and -1 at padding."""
    columns, real = columns_of(batch.host(), positions)
    count = columns.shape[1]
    if batch.forced is not None:  # an answer of several tokens: also where they are predicted
        columns = torch.cat((columns, batch.host().answer_columns()), 1)
        real = torch.cat((real, batch.host().answer_tokens()[1]), 1)
    flat, device = real.flatten().nonzero()[:, 0], batch.tokens.device
    cells, row, column = to_device(
        torch.stack((flat, flat // columns.shape[1], columns.flatten()[flat])), device
    )
    columns, real = to_device(columns, device), to_device(real, device)
    target = targets(batch, model.config)[row, column]
    announce_logits("a lens", len(cells) * len(sites), model.config, device)
    chunks: list[dict[str, Tensor]] = []
    tiles = LogitTiles(model, min(CHUNK, len(cells) * len(sites)))
    for at_row, at_column, chunk_target in zip(*(x.split(CHUNK) for x in (row, column, target)), strict=True):
        states = {site: trace[Read(site)][at_row, at_column] for site in sites}
        check(finite(states.values()), partial(not_finite, states))
        if translators is not None:
            states |= {site: translators(site, state) for site, state in states.items() if site != sites[-1]}
        chunks.append(
            _depth_statistics(
                list(states.values()), chunk_target, tiles, top, log_prob=batch.forced is not None
            )
        )
    out = {}
    for name in chunks[0]:
        value = torch.cat([chunk[name] for chunk in chunks], 1)  # [depth cell ...]
        missing = torch.nan if value.is_floating_point() else -1
        padded = value.new_full((len(sites), real.numel(), *value.shape[2:]), missing)
        padded[:, cells] = value
        out[name] = padded.unflatten(1, tuple(real.shape)).movedim(0, 2)  # [depth b n ...] -> [b n depth ...]
    of_answer = _of_whole_answer({name: value[:, count:] for name, value in out.items()}, real[:, count:])
    out = {name: value[:, :count] for name, value in out.items() if name != "target_log_prob"}
    columns, real = columns[:, :count], real[:, :count]
    out["token"] = batch.tokens.gather(1, columns).masked_fill(~real, -1)
    if isinstance(positions, PerRow | ByRole):
        found = batch.tokens_at(positions)
        out["position"] = found.places if found.present is None else found.places.where(found.present, -1)
    if positions is None:
        out = {
            name: batch.by_text(value, real, torch.nan if value.is_floating_point() else -1)
            for name, value in out.items()
        }
    by_depth = {
        name: value if name in ("token", "position") else value.movedim(2, 1) for name, value in out.items()
    }
    return by_depth | of_answer


def _of_whole_answer(
    values: Mapping[str, Shaped[Tensor, "b k depth ..."]], present: Bool[Tensor, "b k"]
) -> dict[str, Shaped[Tensor, "b depth"]]:
    """Log-probability and worst rank of answers of k tokens at every depth; nothing for answers of one token."""
    if not present.shape[1]:
        return {}
    log_probs = values["target_log_prob"].masked_fill(~present[..., None], 0)
    return {"answer_log_prob": log_probs.sum(1), "answer_worst_rank": values["target_rank"].amax(1)}


def not_finite(states: Mapping[str, Tensor]) -> NotFiniteError | None:
    """The error for states of which one is NaN or infinite; None where all are finite."""
    if all(bool(x.isfinite().all()) for x in states.values()):
        return None
    return NotFiniteError("the residual stream of some prompt is NaN or infinite")


def _depth_statistics(
    states: Sequence[Float[Tensor, "r d"]],
    target: Int[Tensor, "r"],
    tiles: LogitTiles,
    top: int,
    *,
    log_prob: bool,
) -> dict[str, Tensor]:
    """Statistics of some rows at every depth, `[depth r ...]`; the prediction of the last state is the KL's reference.

    If the rows are few, several depths are computed together in one set of tiles.
    """
    *before, end = states
    tiles.fill(end)
    reference = ReferenceDistribution.like(tiles)
    last = statistics(tiles, target, top, reference, is_reference=True, log_prob=log_prob)
    by_group, depths_at_once = [], tiles.rows // len(target)
    for first in range(0, len(before), depths_at_once):
        group = before[first : first + depths_at_once]
        tiles.fill(torch.cat(group))
        by_group.append(statistics(tiles, target.repeat(len(group)), top, reference, log_prob=log_prob))
    return {
        name: torch.cat([block[name] for block in (*by_group, last)]).unflatten(0, (len(states), -1))
        for name in last
    }


def columns_of(batch: Batch, positions: Places | None) -> tuple[Int[Tensor, "b n"], Bool[Tensor, "b n"]]:
    """The column of every chosen position, and whether a token stands there."""
    tokens = batch.tokens
    if positions is None:
        return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), batch.real
    batch.require_one_text("chosen positions")
    cells = batch.tokens_at(positions)
    everywhere = torch.ones_like(cells.columns, dtype=torch.bool)
    return cells.columns, everywhere if cells.present is None else cells.present


def targets(batch: Batch, config: ModelConfig) -> Int[Tensor, "b p"]:
    """The answer everywhere, or each position's next token; -1 where there is none, or where outputs are no tokens.

    Of an answer of several tokens the first one, up to the prompt's end, and after that the token that follows.
    """
    if batch.answer is not None:
        tokens, _ = batch.answer_tokens()
        first = tokens[:, :1].expand_as(batch.tokens)
        return first if batch.forced is None else first.scatter(1, batch.answer_columns(), tokens)
    target = torch.full_like(batch.tokens, -1)
    if config.d_vocab_out is not None:
        return target
    target[:, :-1] = batch.tokens[:, 1:]
    known = batch.predicted
    if known is not None:
        target[:, :-1][~known] = -1
    return target


def _finish(
    merged: Partial,
    name: str,
    config: ModelConfig,
    sites: tuple[str, ...],
    positions: Places | None,
    text: Text,
) -> xr.Dataset:
    """The Dataset[prompt, depth, pos] of all rows, with the texts of the tokens."""
    assert isinstance(merged, Rows)
    dims, rows = ("prompt", "depth", "pos"), dict(merged.rows)
    token = rows.pop("token")
    chosen: dict[str, object] = {"pos": list(positions)} if isinstance(positions, tuple) else {}
    if "position" in rows:
        chosen = {"position": (("prompt", "pos"), rows.pop("position"))}
    probabilities = dict.fromkeys(("top_prob", "target_prob"), "probability")
    result = labelled(
        name,
        {name: ((*dims, "rank") if v.ndim == 4 else dims[: v.ndim], v) for name, v in rows.items()},
        coords={
            "depth": [str(Part.of(site)) for site in sites],
            "token": text.token_words(token),
            **chosen,
        },
        units={
            **probabilities,
            **dict.fromkeys(("entropy", "kl", "answer_log_prob"), "nats"),
        },
        attrs={"kl": "KL(final || depth)"},
    )
    return text.of_outputs.worded(result, word="top_token")
