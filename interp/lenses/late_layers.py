"""Does the last layer lower the right answer? Effects of its attention, its MLP and its heads.

Lv et al. 2024 (arXiv:2403.19521), "anti-overconfidence": the last layer lowers the probability of the right answer, its
heads by looking at the first position and copying what stands there, its MLP by pushing the stream towards the average
token, sum_t p(t) of the token's direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.attention.sentences import last_attention
from interp.attention.shares import without_shares
from interp.core.results import Score, scored
from interp.core.stats import (
    ANYWHERE,
    FEWEST,
    FEWEST_LOSSES,
    FEWEST_PROBABILITIES,
    SIGNED,
    Means,
    Partial,
    two_sided_p,
    upcast,
)
from interp.core.viewer import Brief
from interp.data.answers import AnswerTokens
from interp.data.batch import Answers, Batch
from interp.data.sources import Data
from interp.data.stream import DataSource, prompt_source
from interp.lenses.lens import CHUNK
from interp.model.config import ModelConfig
from interp.model.edits import Edit, Zero
from interp.model.parts import Part
from interp.model.sites import final_stream
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.needs import Steps, swept_final
from interp.passes.observe import Subject
from interp.passes.question import Ask, ByRow, Question, Reading, ReadingThen, Staged, Values
from interp.passes.variants import Variant
from interp.residual.decomposition import not_linear
from interp.residual.written import check_arrives, reads_of, written_by
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr

PERMUTATIONS = 200
"""Random assignments of the frequencies to the words, for the null of the cosine."""
GIVEN = "given"
"""Attribute of results whose frequencies are not the model's own prediction."""
RANKS = "ranks"
SCORES = {
    "attribution": "logits relative to the vocabulary's mean", "cosine": "cosine", "log_prob_change": "nats",
    "rank_change": RANKS, "first_attention": "attention mass", "log_prob": "nats", "rank": RANKS,
}  # fmt: skip
"""The scores, each with its unit."""
SUMMED = ("log_prob", "log_prob_change")
"""The scores of which those of an answer's tokens sum to that of the answer."""
FEWEST_PROMPTS = {
    "attribution": 32, "log_prob_change": FEWEST_LOSSES, "log_prob": FEWEST_PROBABILITIES,
}  # fmt: skip
"""Fewest prompts for an interval, of scores that need more than the usual number."""


@dataclass(frozen=True, eq=False, repr=False)
class LateLayers(Brief, Question):
    """Effect of each part of the last layer on the right answer at the last token of each prompt.

    It asks whether the last layer holds the answer back: its heads by looking at the first position and copying what
    stands there, its MLP by pushing the stream towards the average token. The average token is sum_t p(t) W_U[:, t] -
    mean_t W_U[:, t]; the mean is removed because any model's words share a direction. Outputs are compared with it as
    the unembedding reads them, after the final norm's linear part.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        answer: right continuation of one or several tokens, as text or ids, one for all prompts or one for each; None:
            that of the data.
        frequencies: [v], counts p(t) of a corpus; None: the model's own mean prediction over the tokens of `reference`.
        reference: prompts over whose tokens the mean prediction is taken, where no frequencies are given; None: the
            data, which are then read twice.
        words: directions of the words, of which the average token is made: "unembedding" (W_U) or "embedding" (W_E).
            One and the same in tied models.

    Returns:
        Dataset[part, score]; NaN where a part has no such score.

        - `value`: mean over prompts.
        - `low`, `high`: 95 % interval over prompts; ranks have none: few prompts decide their mean, which Student's t
          of 4 to 32 prompts rarely holds.
        - `null`, `null_sd`: level without the effect, and of `cosine` its standard deviation.
        - `p`: of `cosine`, two-sided, the share of the permutations that are as far out. NaN unless frequencies are
          given, for the model's own prediction is made of what its last layer writes, so that a model nobody trained
          has p <= .05 in a fifth.
        - `n`: number of prompts.

        Scores of the last layer's heads `L3H0`, its sublayers `L3.attn`, `L3.mlp` (Macaron: and `L3.mlp_before`) and
        the whole layer `L3`:

        - `attribution`: to the answer, in logits relative to the vocabulary's mean at frozen norms (null 0).
        - `cosine`: of the output with the average token (null: under permuted frequencies).
        - `log_prob_change` (nats), `rank_change`: change of the answer's when the output is replaced by zero (null 0):
          positive and negative, respectively, where the part held the answer back.
        - `first_attention`, of heads: attention from the last token to the first (`signed_shares` where weights are
          none).

        Scores of the states `L3.resid`, `L3.resid_mid` (those that the layer has) and the final stream `L3.resid_post`:

        - `log_prob`, `rank` (0 = most probable): of the answer by the logit lens, the last ones those of the model
          itself.

        Of an answer of several tokens, each predicted after those before it, `log_prob` and `log_prob_change` are sums
        over the tokens, which are those of the whole answer; all other scores are means over them.

    Raises:
        ValueError: frequencies that do not fit, frequencies and a reference, an
            iterator without frequencies, models without logits linear in the normed stream, and edits that change what
            the last layer's parts wrote.

    Caveats:
        Zero is off-distribution, and a zeroed attention changes what the MLP after it reads; heads leave out b_O.

    Source:
        Lv et al. 2024 (arXiv:2403.19521), "anti-overconfidence".

    See Also:
        `logit_lens`: the answer at every depth. `interp.attribute`: attribution to parts of all layers.

    Example:
        >>> found = late_layers(model, [prompt, "The cat sat on"], [" Mary", " the"])
        >>> found.value.sel(score="log_prob_change").dropna("part").part.values[-3:].tolist()
        ['L2.attn', 'L2.mlp', 'L2']
    """

    answer: Answers | None = None
    _: KW_ONLY
    frequencies: Float[Tensor, "v"] | None = None
    reference: DataSource | Data | None = None
    words: Literal["unembedding", "embedding"] = "unembedding"

    def __post_init__(self) -> None:
        """ValueError for a field of the wrong kind, and two sources of one prediction."""
        super().__post_init__()
        if self.frequencies is not None and self.reference is not None:
            raise ValueError(
                "frequencies, or the reference prompts that they are taken from, are required, got both"
            )

    def bind(self, model: Subject) -> ByRow | Staged:
        """A sweep over the last layer without each of its parts, after the mean prediction where that is needed."""
        network = model.transformer
        config = network.config
        _check(config)
        for group in _groups(config).values():
            for part in group:
                check_arrives(part, network)
        answers = AnswerTokens.of(model.text, self.answer, several=True)
        if self.frequencies is not None:
            return self._question(config, answers, _token_shares(self.frequencies, config.n_outputs))
        predicted = _mean_prediction_question(config)
        source = None if self.reference is None else prompt_source(self.reference, model.text)
        return Staged.after(
            self.name,
            Ask(predicted, source),
            lambda sums: self._question(config, answers, _mean_distribution(sums)),
            again="frequencies" if source is None else "",
        )

    def _question(
        self, config: ModelConfig, answers: AnswerTokens | None, share: Float[Tensor, "v"]
    ) -> ByRow:
        """The bound question, once the share p(t) of every token is known."""
        origin = GIVEN if self.frequencies is not None else "the model's mean prediction on the reference"
        rows: Callable[[Transformer, Batch], Steps[Values]] = ReadingThen(
            _reads(config), partial(_row_scores, share=share, words=self.words), ends_aligned=True
        )
        if answers is not None and answers.several:
            rows = partial(_over_answer_tokens, rows=rows)
        return ByRow(
            self.name,
            rows,
            Means,
            partial(_finish, name=self.name, config=config, frequencies=origin, words=self.words),
            answers,
        )


late_layers = of_data(LateLayers)


def _mean_prediction_question(config: ModelConfig) -> ByRow:
    """The mean over all real tokens of the model's next-token distribution, in float64."""
    read = Read(final_stream(config))
    return ByRow("mean_prediction", Reading([read], partial(_prediction_sums, read=read)), Means)


def _mean_distribution(sums: Partial) -> Float[Tensor, "v"]:
    """The mean next-token distribution p(t), from the sums over all rows."""
    assert isinstance(sums, Means)
    return sums.moments["sum"].mean / sums.moments["count"].mean


@torch.no_grad()
def _prediction_sums(trace: Trace, batch: Batch, model: Transformer, read: Read) -> Mapping[str, Tensor]:
    """The next-token distributions summed over each row's tokens `[b v]`, and the number of tokens `[b]`."""
    cells = batch.real.nonzero()
    state = trace[read][batch.real]
    total = torch.zeros(len(batch), model.config.n_outputs, dtype=torch.float64, device=state.device)
    for states, row in zip(state.split(CHUNK), cells[:, 0].split(CHUNK), strict=True):
        total.index_add_(0, row, model.read_out(upcast(states)).softmax(-1).double())
    return {"sum": total, "count": batch.lengths.double()}


def _token_shares(frequencies: Float[Tensor, "v"], n_outputs: int) -> Float[Tensor, "v"]:
    """Frequencies as shares p(t) that sum to 1; raises ValueError unless every token has one, none negative."""
    shape = list(frequencies.shape)
    if shape != [n_outputs] or not bool((frequencies >= 0).all()) or not float(frequencies.sum()) > 0:
        raise ValueError(
            f"frequencies of all {n_outputs} words, none negative, some positive, are required; got {shape}"
        )
    return frequencies.double() / frequencies.double().sum()


def average_token(
    model: Transformer,
    share: Float[Tensor, "*n v"],
    words: Literal["unembedding", "embedding"] = "unembedding",
) -> Float[Tensor, "*n d"]:
    """Direction of the average token, sum_t p(t) w_t - mean_t w_t with w_t = W_U[:, t] or W_E[t].

    A stream that moves along it raises the logits of the frequent tokens.

    Args:
        share: [*n v], p(t), which sums to 1.
        words: whose directions w_t are: "unembedding" or "embedding".

    Returns:
        [*n d], in float32 at least.
    """
    weights = Weights(model)
    directions = upcast(weights.W_U.mT if words == "unembedding" else weights.W_E)
    return (share.to(directions) - 1 / share.shape[-1]) @ directions


def _groups(config: ModelConfig) -> dict[Part, tuple[Part, ...]]:
    """The parts of the last layer, and the sublayers that each consists of."""
    last = config.n_layers - 1
    heads = [Part("head", last, h) for h in range(config.n_heads)]
    sublayers = [Part(name.removesuffix("_out"), last) for name in config.sublayers]
    block = {Part("block", last): tuple(sublayers)} if len(sublayers) > 1 else {}
    return {part: (part,) for part in (*heads, *sublayers)} | block


def _check(config: ModelConfig) -> None:
    """Raise ValueError for a model whose logits are not linear in the normed stream, or with cross-attention."""
    if what := not_linear(config):
        raise ValueError(
            "a report on late layers requires logits that are linear in the normed stream (no masked-LM head); "
            f"this model {what}"
        )
    if config.cross_attention:
        raise ValueError("a report on late layers requires a model without cross-attention")


def _states(config: ModelConfig) -> tuple[str, ...]:
    """The sites of the stream before, within and after the last layer."""
    inner = [name for name in map(config.stream_after, config.sublayers) if name != "hook_resid_post"]
    names = (f"blocks.{config.n_layers - 1}.{name}" for name in ("hook_resid_pre", *inner))
    return (*names, final_stream(config))


def _reads(config: ModelConfig) -> tuple[Read, ...]:
    single = dict.fromkeys(part for group in _groups(config).values() for part in group)
    reads = [read for part in single for read in reads_of(part, config)]
    reads += [Read(site) for site in _states(config)]
    return (*dict.fromkeys(reads), last_attention(config, config.n_layers - 1))


def _over_answer_tokens(
    model: Transformer, batch: Batch, rows: Callable[[Transformer, Batch], Steps[Values]]
) -> Steps[Values]:
    """The scores of answers of several tokens: sums over the tokens of log-probabilities, means of the others."""
    _, present = batch.answer_tokens()
    by_token = yield from rows(model, batch.by_answer_token())
    scores = {}
    for name, values in by_token.items():
        values = values.unflatten(0, tuple(present.shape))  # [(b k) ...] -> [b k ...]
        mask = present.reshape(*present.shape, *[1] * (values.ndim - 2))
        total = values.masked_fill(~mask, 0).sum(1)
        scores[name] = total if name in SUMMED else total / mask.sum(1)
    return scores


@torch.no_grad()
def _row_scores(
    trace: Trace,
    batch: Batch,
    model: Transformer,
    share: Float[Tensor, "v"],
    words: Literal["unembedding", "embedding"],
) -> Steps[Mapping[str, Tensor]]:
    """The scores of every row: `[b part]` of what parts wrote, `[b head]` of attention, `[b state]` of the states."""
    if batch.answer is None:
        raise ValueError(
            "late layers require an answer for every prompt, got none: name it, or bring it with the data"
        )
    if batch.keep is not None and not bool(batch.keep[:, -1].all()):
        raise ValueError("late layers require rows that end in the last column (padding on the left)")
    config, groups = model.config, _groups(model.config)
    changes = yield from _ablation_changes(batch, model, list(groups.values()))
    single = dict.fromkeys(part for group in groups.values() for part in group)
    last = Trace({read: value[:, -1:] for read, value in trace.items()})  # the rest is not read
    written = {part: written_by(part, last, model)[:, -1] for part in single}
    written_bgd = torch.stack(
        [torch.stack([written[p] for p in group]).sum(0) for group in groups.values()], 1
    )
    unembedding = upcast(Weights(model).W_U)
    answer_direction = (unembedding.mT[batch.answer] - unembedding.mean(1)) * config.logit_scale
    states = torch.stack([trace[Read(site)][:, -1] for site in _states(config)], 1)
    log_prob, rank = _answer_statistics(model.read_out(upcast(states)), batch.answer)
    generator = torch.Generator().manual_seed(0)
    orders = torch.rand(PERMUTATIONS, len(share), generator=generator).argsort(1).to(share.device)
    average, permuted = (average_token(model, p.to(model.device), words) for p in (share, share[orders]))
    return {
        "attribution": torch.einsum("bcd,bd->bc", written_bgd, answer_direction),
        "cosine": torch.cosine_similarity(written_bgd, average.to(written_bgd)[None, None], dim=-1),
        "cosine_null": torch.nn.functional.normalize(written_bgd, dim=-1)
        @ torch.nn.functional.normalize(permuted).to(written_bgd).mT,
        **changes,
        "first_attention": _attention_to_first(upcast(trace[last_attention(config, config.n_layers - 1)]), batch),
        "log_prob": log_prob,
        "rank": rank.to(log_prob.dtype),
    }  # fmt: skip


def _ablation_changes(
    batch: Batch, model: Transformer, groups: Sequence[Sequence[Part]]
) -> Steps[Mapping[str, Tensor]]:
    """Changes of the answer's log probability and rank when the outputs of a group of parts are zero, `[b group]`.

    All groups are ablated in one pass through the last block, as copies of the rows (`Sweep`).
    """
    assert batch.answer is not None
    streams = yield from swept_final(
        batch, [Variant([]), *(Variant([Edit(part, Zero()) for part in group]) for group in groups)]
    )
    statistics = [
        _answer_statistics(model.read_out(upcast(stream[:, None])), batch.answer.to(stream.device))
        for stream in streams
    ]
    log_prob, rank = (torch.cat(column, 1) for column in zip(*statistics, strict=True))
    return {
        "log_prob_change": log_prob[:, 1:] - log_prob[:, :1],
        "rank_change": (rank[:, 1:] - rank[:, :1]).to(log_prob),
    }


def _answer_statistics(
    logits: Float[Tensor, "b n v"], answer: Int[Tensor, "b"]
) -> tuple[Float[Tensor, "b n"], Int[Tensor, "b n"]]:
    """Log probability and rank of each row's answer."""
    logp = upcast(logits).log_softmax(-1)
    answer_logp = logp.gather(-1, answer[:, None, None].expand(-1, logp.shape[1], 1))
    return answer_logp[..., 0], (logp > answer_logp).sum(-1)


def _attention_to_first(pattern: Float[Tensor, "b h k"], batch: Batch) -> Float[Tensor, "b h"]:
    """Attention of the last query position to each row's first real token."""
    if batch.keep is None:
        return pattern[..., 0]
    first = batch.keep.int().argmax(1)
    return pattern.gather(-1, first[:, None, None].expand(-1, pattern.shape[1], 1))[..., 0]


def _finish(merged: Partial, name: str, config: ModelConfig, frequencies: str, words: str) -> xr.Dataset:
    """The Dataset[part, score] from the means over prompts, with the null of each score."""
    assert isinstance(merged, Means)
    written, states = list(_groups(config)), [Part.of(site) for site in _states(config)]
    parts, heads = [*written, *states], config.n_heads
    indices = {
        "first_attention": range(heads),
        **dict.fromkeys(("log_prob", "rank"), range(len(written), len(parts))),
    }
    nulls = dict.fromkeys(("attribution", "log_prob_change", "rank_change"), 0.0)
    by_permutation = merged.moments["cosine_null"].mean
    shares = config.n_layers - 1 not in without_shares(config)
    scores = {}
    for score, unit in SCORES.items():
        null = by_permutation.mean(-1) if score == "cosine" else nulls.get(score, torch.nan)
        scores[score] = _score_of_all_parts(
            Score.of(
                merged.moments[score],
                unit,
                null,
                share=score == "first_attention" and shares,
                fewest=FEWEST_PROMPTS.get(score, FEWEST),
                within=SIGNED if score == "cosine" else ANYWHERE,
            ),
            indices.get(score, range(len(written))),
            len(parts),
        )
    sd, p = torch.full((2, len(parts), len(scores)), torch.nan, dtype=torch.float64)
    cosine_cells = slice(len(written)), list(scores).index("cosine")
    sd[cosine_cells] = by_permutation.std(-1).cpu()
    if frequencies == GIVEN:
        p[cosine_cells] = two_sided_p(merged.moments["cosine"].mean, by_permutation).cpu()
    return scored(
        name,
        scores,
        ("part",),
        coords={"part": [str(part) for part in parts]},
        others={"null_sd": (("part", "score"), sd), "p": (("part", "score"), p)},
        attrs={
            "change": "without the part minus with it; its output is zero", "frequencies": frequencies,
            "words": words,
            "null": f"changes and attribution: 0; cosine: {PERMUTATIONS} permutations of the frequencies",
            "interval": "95 % over prompts, where there are as many as a number needs",
            "prompts": merged.moments["log_prob"].n,
        },
    )  # fmt: skip


def _score_of_all_parts(score: Score, indices: range, count: int) -> Score:
    """The score with one entry for every part: NaN and n = 0 where a part has no such score; ranks get no interval."""
    if score.unit == RANKS:
        missing = torch.full_like(score.value, torch.nan)
        score = score._replace(low=missing, high=missing)

    def whole(values: Tensor, missing: float | int) -> Tensor:
        padded = values.new_full((count,), missing)
        padded[list(indices)] = values
        return padded

    value, low, high, chance = (whole(x, torch.nan) for x in (score.value, score.low, score.high, score.null))
    return Score(value, low, high, whole(score.n, 0), chance, score.unit)
