"""What each feature of a dictionary does, over data of any size: histogram, examples, logits, relatives, and a null.

Two passes over the data, each a mergeable reduction. The first finds each feature's density and range, and where a
random direction must begin to be active to be as rare; the second fills histograms and lists. Beside every feature
stands that random direction, read and written in its place: what a page shows of it, a page shows of anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.contexts import ContextExamples, TopInContext
from interp.core.covariance import Covariance, Covariances
from interp.core.extremes import Extremes, TopRows
from interp.core.kinds import Positive, PositiveCount, Seed
from interp.core.named import Only, Parts, Several
from interp.core.results import Score, scored
from interp.core.sketches import Histogram, Histograms
from interp.core.stats import Means, Partial, Reduction, if_at_least, uniforms
from interp.core.transfers import to_device
from interp.data.batch import Batch
from interp.data.text import Text
from interp.features import decoder_directions
from interp.features.decoder_directions import Listed, cosines, largest
from interp.features.dictionary import Dictionary
from interp.features.dictionary_metrics import placed
from interp.features.example_effects import ExampleEffects, check_sources, effects_of, rest_words
from interp.features.feature_cells import CountedVectors, FeatureCells, RandomDirections, left_out_of
from interp.features.top_examples import FEWEST_SUMS, FEWEST_TEXTS, IN_CONTEXT, per_token
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.observe import Subject
from interp.passes.question import Ask, ByRow, Question, Reading, Staged, Stages
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr

BINS, GROUPS = 50, 10
"""Bins of a histogram, and the groups of examples, of `BINS / GROUPS` bins each."""
LISTED = 10
"""Tokens at each end of the logits, and relatives of each kind."""
SOURCES = ("dictionary", "random")
COSINES = 10_001
"""Edges of the histogram of cosines in which the thresholds of random directions are found."""
BLOCK = 4096
"""Features whose correlations are computed at once."""


@dataclass(frozen=True, eq=False)
class FeatureCards(Question):
    """What features of a dictionary do: when they are active, what they write, and which others are like them.

    Beside each feature stands a random direction in its place (`source` "random"): written with the norm of the
    feature's decoder row, and read as relu(cos(x, r) - c) times the mean of ||x||, with r a random unit vector and c
    such that it is active as often. Top examples of random directions can look like one topic too; a feature says
    something where it differs.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size, which are read twice.
        dictionary: the dictionary, on the device of the model.
        site: the site that an SAE reads, its full name or a part that is a whole one, such as `L1.resid`; None: the
            sites that the dictionary names.
        features: which features, in this order; None: those that are active on most tokens.
        most: how many features, where none are named.
        top: how many tokens of the largest activations are listed.
        per_group: how many tokens of each group are listed, drawn at random.
        context: how many tokens before and after each one are kept.
        skip_bos: whether BOS in front of a text and the tokenizer's ends of a text or a turn are left out.
        largest_norm: tokens whose vector is longer than so many times the median of its text are left out: a few
            tokens have a vector unlike all others, on which features are largest that say nothing else. None: none are.
        dfa: of a dictionary of `attn.hook_z`, whether direct feature attribution is computed: what each head brings
            from each token to a top example. It costs a third reading of the data, in which the model runs on the
            listed texts alone.
        loss_effect: whether every feature is set to 0 in each of its top examples, and the loss compared. It costs a
            third reading too, and a pass of a text for each entry: 2 * features * top of them.
        seed: of the random directions, and of which tokens of a group are listed.

    Returns:
        Dataset. `feature` are the features, `source` the dictionary or the random direction.

        - `value`, `low`, `high`, `null`, `n` [feature, score]: `density`, the share of tokens on which it is not 0, and
          `mean` over all tokens (95 % over texts; NaN below 256 and 16 texts); `max`; `purity`, the share of the top
          examples whose token is the commonest among them; `logit_kurtosis`, the excess kurtosis of its logits (0 of
          Gaussian ones); with `loss_effect` its mean over the top examples. `null` is the number of the random
          direction.
        - `edges` [source, feature, edge], `counts` [source, feature, bin]: the histogram of the activations that are
          not 0, between 0 and the largest.
        - `peak`, `row`, `pos`, `tokens`, `piece`, `activation`: the top examples as in `top_examples`, over source and
          feature, a text once.
        - `group_peak`, ... [source, feature, group, place]: examples from ten groups of equal width in activation,
          group 0 the smallest; -1 where a group has fewer texts.
        - `logit`, `logit_token`, `logit_word` [source, feature, end, logit_rank]: the highest and lowest logits of what
          it writes, through the final norm's gain at scale 1, centred over the vocabulary; `logit_edges` and
          `logit_counts`, the histogram of all of them.
        - `neighbour`, `cosine` [source, feature, near]: features whose decoder rows are nearest.
        - `partner`, `correlation` [source, feature, near]: features whose activations correlate most over tokens
          (Pearson), with the cosine of their activations, `partner_cosine`; NaN where either is constant or fewer vary.
        - `neuron`, `alignment` [source, feature, neuron_rank]: neurons of the MLP that writes there (of the layer
          `neuron_layer`, an attribute) with the largest cosine of output and decoder row; `alignment_total` sums the
          sizes of all.
        - `active_neuron`, `neuron_correlation`, `neuron_cosine` [source, feature, neuron_rank]: neurons of that layer
          whose activations correlate most with the feature's over tokens (Pearson), with the cosine of the two; NaN
          likewise.
        - `head_share` [source, feature, head]: of a dictionary of `attn.hook_z`, each head's share of the norm.
        - `dfa` [source, feature, rank, offset, head], with `dfa`: pattern x (v . W_enc), what the head brings from the
          token to the pre-activation of a top example; `dfa_outside` [source, feature, rank, head] sums the tokens
          beyond the context, and `dfa_bias` [source, feature, rank] is the biases' part. They sum to the
          pre-activation; the attribute `dfa` says how well, badly where z is edited. A dictionary that normalises is
          taken at its scale there; a random direction's is its activation before negative numbers are cut.
        - `loss_change` [source, feature, rank, offset], with `loss_effect`: how much the loss of the token after each
          token rises when the feature is set to 0 at every token of the text that counts, its error kept;
          `loss_effect` [source, feature, rank]: its mean from the entry's token to the end of the text. NaN where no
          token follows, or there is no example.
        - `vector` [source, feature, coordinate]: the decoder row.

        Attributes count the tokens and those left out (`special`, `huge`), and name the sites.

    Raises:
        KeyError: an unknown site.
        ValueError: a dictionary that does not fit the site or reads head by head, a feature twice or not there, data
            in which no token counts, `dfa` of another site, of a mixer whose z is not a pattern times values or of
            matching pursuit, and `loss_effect` of a model that does not predict the next token.

    Memory:
        Constant in the size of the data: 16 bytes per listed feature and feature of the dictionary or neuron for
        correlations, and 80 kB per listed feature in the first pass. A batch holds all features of its tokens.

    Source:
        The parts of SAEDashboard and Neuronpedia. The null: Heap et al. 2025, "Sparse Autoencoders Can Interpret
        Randomly Initialized Transformers" (arXiv:2501.17727). DFA: Kissane et al. 2024, "Interpreting Attention Layer
        Outputs with Sparse Autoencoders" (arXiv:2406.17759).

    See Also:
        `interp.pages.feature_page`: the page. `neuronpedia_json`: the export. `top_examples`: lists of any cells.

    Example:
        >>> eye, zero = torch.eye(24), torch.zeros(24)
        >>> weights = {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero}
        >>> dictionary = Dictionary(interp.features.ReLU(), weights, reads="blocks.2.hook_resid_post")
        >>> found = feature_cards(model, [prompt, "The cat sat on the mat"], dictionary, features=[3, 7])
        >>> found.counts.dims, found.logit_word.sizes["end"]
        (('source', 'feature', 'bin'), 2)
    """

    of_layers: ClassVar[bool] = False

    dictionary: Dictionary
    site: str | None = None
    _: KW_ONLY
    features: Sequence[int] | None = None
    most: PositiveCount = 20
    top: PositiveCount = 20
    per_group: PositiveCount = 5
    context: Sequence[int] = (10, 5)
    skip_bos: bool = True
    largest_norm: Positive | None = 10.0
    dfa: bool = False
    loss_effect: bool = False
    seed: Seed = 0

    def bind(self, model: Subject) -> Staged:
        """A pass for densities, ranges and thresholds, then one for histograms and lists."""
        dictionary = placed(self.dictionary, self.site, model.transformer)
        reads, writes = dictionary.reads, dictionary.writes
        assert reads is not None and writes is not None
        chosen = self._chosen(dictionary.d_sae)
        if len(self.context) != 2 or min(self.context) < 0:
            raise ValueError(
                f"context must be how many tokens before and how many after, got {list(self.context)}"
            )
        count = min(self.most, dictionary.d_sae) if chosen is None else len(chosen)
        if self.dfa:
            check_sources(model.transformer.config, reads)
            dictionary.check_linear("dfa=True")
        if self.loss_effect:
            model.transformer.config.require_next_token("loss_effect=True")
        null = RandomDirections.of(dictionary, count, self.seed)
        tokens = CountedVectors(dictionary, reads, left_out_of(model.text, self.skip_bos), self.largest_norm)
        first = ByRow(
            "ranges", Reading([Read(reads)], partial(_ranges, tokens=tokens, null=null)), _range_reduction()
        )

        neurons = decoder_directions.neuron_site(model.transformer, writes)
        reduction = self._reduction(dictionary.d_sae, neurons is not None)
        needed = [Read(site) for site in dict.fromkeys((reads, neurons)) if site is not None]

        def stages(has_data: bool) -> Stages[xr.Dataset]:
            (kept,) = yield [Ask(first)]
            scan = _Scan.of(tokens, null, kept, chosen, self.seed, neurons)
            finish = partial(_finish, question=self, scan=scan, writes=writes, model=model)
            second = ByRow(self.name, Reading(needed, scan), reduction, finish)
            if not self.dfa and not self.loss_effect:
                return (yield from second.stages(has_data))
            (lists,) = yield [Ask(replace(second, name="lists"))]
            before, after = self.context
            heads = model.transformer.config.n_heads if self.dfa else 0
            effects = ExampleEffects(scan.cells, _top(lists), before, after, heads, self.loss_effect)
            joined = partial(_with_effects, lists=lists, effects=effects, finish=finish)
            third = ByRow(self.name, effects, effects.reduction, joined)
            return (yield from third.stages(has_data))

        return Staged(self.name, stages, again="a list of texts in place of an iterator")

    def _chosen(self, d_sae: int) -> tuple[int, ...] | None:
        if self.features is None:
            return None
        chosen = tuple(int(i) for i in self.features)
        if not chosen or len(set(chosen)) < len(chosen):
            raise ValueError(
                f"features that are distinct, and at least one, are required, got {list(chosen)[:9]}"
            )
        if bad := [i for i in chosen if not 0 <= i < d_sae]:
            raise ValueError(f"features are 0 to {d_sae - 1} in this dictionary, got {bad[0]}")
        return chosen

    def _reduction(self, d_sae: int, neurons: bool) -> Several:
        """The reductions of the second pass: lists, histograms, sums, correlations with features and neurons."""
        before, after = self.context
        listed: dict[str, Reduction] = {
            f"group{g}": TopInContext(
                TopRows(self.per_group, f"draw{g}", before=before, after=after), IN_CONTEXT
            )
            for g in range(GROUPS)
        }
        top = TopRows(self.top, "shown", before=before, after=after)
        blocks = range(0, d_sae, BLOCK)
        return Several({
            "top": TopInContext(top, IN_CONTEXT), **listed,
            "histogram": Histograms("share", tuple(EDGES.tolist()), cells=1),
            "sums": Only(("counted", "active", "total", "active + counted", "total + counted"), Means),
            **{f"pairs{i}": Covariances("activation", f"features{i}") for i in blocks},
            **({"neurons": Covariances("activation", "neurons")} if neurons else {}),
        })  # fmt: skip


feature_cards = of_data(FeatureCards)

EDGES = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)
"""Edges of the bins of a histogram, as shares of a feature's range."""


# --- the first pass ---------------------------------------------------------------------------------------------------


def _range_reduction() -> Several:
    return Several({
        "sums": Only(("counted", "active", "special", "huge", "norm"), Means),
        "largest": TopRows(1, "largest"), "smallest": TopRows(1, "smallest", largest=False),
        "nearest": TopRows(1, "nearest"),
        "cosines": Histograms("cosines", tuple(torch.linspace(-1, 1, COSINES, dtype=torch.float64).tolist()), cells=1),
    })  # fmt: skip


@torch.no_grad()
def _ranges(
    trace: Trace, batch: Batch, model: Transformer, tokens: CountedVectors, null: RandomDirections
) -> Mapping[str, Tensor]:
    """By text: how often every feature is active, its largest and smallest value, and cosines of random directions."""
    texts = tokens(trace, batch)
    features, out = tokens.dictionary.encode(texts.x), ~texts.counted[..., None]
    ends = (features.masked_fill(out, sign * torch.inf) for sign in (-1, 1))
    largest, smallest = next(ends).amax(1), next(ends).amin(1)
    cosine, norm = null.cosines(texts.x)
    nearest = cosine.masked_fill(out, -torch.inf).amax(1)
    return {
        "counted": texts.counted.sum(1).double(), "special": texts.special.double(), "huge": texts.huge.double(),
        "active": ((features != 0) & ~out).sum(1).double(),
        "largest": largest.masked_fill(largest.isinf(), torch.nan),
        "smallest": smallest.masked_fill(smallest.isinf(), torch.nan),
        "cosines": cosine.masked_fill(out, torch.nan), "nearest": nearest.masked_fill(nearest.isinf(), torch.nan),
        "norm": norm.masked_fill(out, 0.0).sum((1, 2)),
    }  # fmt: skip


# --- the second pass --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Scan:
    """A function from a batch to the values of the second pass, by text: first the features, then random directions."""

    cells: FeatureCells
    low: Float[Tensor, "w"]
    high: Float[Tensor, "w"]
    """Range of the activations, of features and then of random directions."""
    seed: int
    left_out: Mapping[str, int]
    """Numbers of texts, of tokens that count and of those that do not."""
    neurons: str | None
    """The site of the neurons that features are correlated with."""

    @classmethod
    def of(
        cls,
        tokens: CountedVectors,
        null: RandomDirections,
        kept: Partial,
        chosen: Sequence[int] | None,
        seed: int,
        neurons: str | None,
    ) -> _Scan:
        """The second pass from what the first one kept."""
        assert isinstance(kept, Parts)
        sums, along = kept.parts["sums"], kept.parts["cosines"]
        largest, smallest, nearest = (_first(kept.parts[name]) for name in ("largest", "smallest", "nearest"))
        assert isinstance(sums, Means) and isinstance(along, Histogram)
        numbers = {name: _total(sums, name) for name in ("counted", "special", "huge")}
        if not numbers["counted"]:
            n, huge = int(sums.moments["counted"].n), numbers["huge"]
            raise ValueError(
                f"texts with a token that counts are required, got {n} in which largest_norm leaves out {huge} tokens"
            )
        active = sums.moments["active"].mean * sums.moments["active"].n
        order = active.sort(descending=True, stable=True).indices[: len(null.read)]
        index = order if chosen is None else torch.tensor(chosen)
        threshold = _thresholds(along, active[index].round().long())
        scale = float(sums.moments["norm"].mean / sums.moments["counted"].mean)
        low, farthest = smallest[index].clamp_max(0.0), (nearest - threshold) * scale
        high = torch.cat((largest[index], farthest)).clamp_min(0.0)
        texts = sums.moments["counted"].n
        cells, low = (
            FeatureCells(tokens, null, index, threshold, scale),
            torch.cat((low, torch.zeros_like(low))),
        )
        return cls(cells, low, high, seed, {**numbers, "texts": texts}, neurons)

    @torch.no_grad()
    def __call__(self, trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
        texts = self.cells.tokens(trace, batch)
        features, out = self.cells.dictionary.encode(texts.x), ~texts.counted[..., None]
        both = self.cells.activations(features, texts.x).masked_fill(out, torch.nan)
        neurons = {} if self.neurons is None else {"neurons": trace[Read(self.neurons)]}
        counted, active = texts.counted.sum(1).double(), ((both != 0) & ~out).sum(1).double()
        total, share = both.nansum(1), self._shares(both)
        return {
            "activation": both, "shown": both.masked_fill(both == 0, torch.nan), "share": share,
            "tokens": texts.tokens, "counted": counted, "active": active,
            "total": total, "active + counted": active + counted[:, None],
            "total + counted": total + counted[:, None], **self._draws(share, batch),
            **{f"features{i}": features[..., i : i + BLOCK] for i in range(0, features.shape[-1], BLOCK)},
            **{name: batch.by_text(value, batch.real, 0.0) for name, value in neurons.items()},
        }  # fmt: skip

    def _shares(self, activation: Float[Tensor, "t q w"]) -> Float[Tensor, "t q w"]:
        """Where in its range every activation that is not 0 lies, from 0 to 1; NaN for the others."""
        low, high = (to_device(x, activation.device) for x in (self.low, self.high))
        share = (activation - low) / (high - low)
        return share.masked_fill(activation == 0, torch.nan)

    def _draws(self, share: Float[Tensor, "t q w"], batch: Batch) -> dict[str, Float[Tensor, "t q w"]]:
        """A random number at every token of each group: the largest are listed, so that they are drawn evenly."""
        rows = batch.identities()
        if rows is None:
            raise ValueError("a list of rows requires rows with identities: number the batch (`Batch.row`)")
        edges = to_device(EDGES, share.device)
        bins = (torch.bucketize(share, edges, right=True) - 1).clamp_max(BINS - 1)
        group = torch.where(share.isnan(), -1, bins.div(BINS // GROUPS, rounding_mode="floor"))
        draw = uniforms(to_device(rows, share.device), share.shape[1], self.seed).mT[..., None]
        return {f"draw{g}": torch.where(group == g, draw, torch.nan) for g in range(GROUPS)}


def _thresholds(cosine: Histogram, active: Int[Tensor, "c"]) -> Float[Tensor, "c"]:
    """The cosine above which each random direction is active about as often as its feature.

    It is the edge of the histogram's bins above which the number of tokens is nearest to that of the feature.
    """
    above = cosine.counts.flip(-1).cumsum(-1).flip(-1)
    distance = (above - active[:, None]).abs()
    # of equally near edges the highest: nothing lies between them
    place = distance.shape[1] - 1 - distance.flip(-1).argmin(-1)
    return cosine.edges[place.where(active > 0, cosine.counts.shape[1])]


def _first(lists: Partial) -> Float[Tensor, "c"]:
    """The first entry of every list; 0 where there is none."""
    assert isinstance(lists, Extremes)
    return lists.values[:, 0].nan_to_num(nan=0.0)


def _top(lists: Partial) -> Extremes:
    """The list of the largest activations of the second pass, on the host."""
    assert isinstance(lists, Parts)
    top = lists.parts["top"]
    assert isinstance(top, ContextExamples)
    return top.top.rule.load({name: x.cpu() for name, x in top.top.tensors().items()})


def _total(sums: Means, name: str) -> int:
    moments = sums.moments[name]
    return round(float(moments.mean) * moments.n)


# --- the result -------------------------------------------------------------------------------------------------------

OVER = ("source", "feature")
"""Dims of everything that is shown of a feature and of the random direction beside it."""
Variables = dict[str, tuple[tuple[str, ...], Tensor]]


def _finish(
    merged: Partial,
    more: Mapping[str, Tensor] = MappingProxyType({}),
    *,
    question: FeatureCards,
    scan: _Scan,
    writes: str,
    model: Subject,
) -> xr.Dataset:
    """The Dataset of the lists, the histograms, what the weights say, and `more` about the top examples."""
    assert isinstance(merged, Parts)
    parts, network = merged.parts, model.transformer
    sums, histogram = parts["sums"], parts["histogram"]
    assert isinstance(sums, Means) and isinstance(histogram, Histogram)
    rows = scan.cells.rows()
    values: Variables = {
        **_examples(parts["top"], "", (*OVER, "rank")),
        **_groups([parts[f"group{g}"] for g in range(GROUPS)]),
        "counts": ((*OVER, "bin"), _split(histogram.counts)),
        "edges": ((*OVER, "edge"), _split(scan.low[:, None] + (scan.high - scan.low)[:, None] * EDGES)),
        "vector": ((*OVER, "coordinate"), _split(rows)),
        **{name: ((*OVER, *dims), _split(more[name])) for name, dims in effects_of(more).items()},
    }  # fmt: skip
    relatives = _relatives(scan, parts, rows)
    written, notes = _written(network, writes, rows)
    layer = decoder_directions.neuron_layer(writes) or 0
    values |= relatives | written
    result = scored(
        question.name,
        _scores(sums, scan, values, question.context[0]),
        ("feature",),
        coords={"feature": scan.cells.chosen.tolist(), "source": SOURCES, "end": ("top", "bottom"),
                "offset": range(-question.context[0], question.context[1] + 1)},
        others=values,
        units=dict.fromkeys(("peak", "activation", "edges", "group_peak", "group_activation"), UNIT)
        | dict.fromkeys(("logit", "logit_edges"), "logits before the final norm")
        | dict.fromkeys(("loss_change", "loss_effect"), LOSS_UNIT)
        | dict.fromkeys(("dfa", "dfa_outside", "dfa_bias"), "units of the pre-activation"),
        attrs=_attrs(question, scan, writes)
        | rest_words(more)
        | ({"neuron_layer": layer} if "neuron" in values else {}),
        notes=(*_huge_note(question, scan.left_out), *notes),
    )  # fmt: skip
    return _worded(result, model.text)


def _with_effects(
    merged: Partial, lists: Partial, effects: ExampleEffects, finish: Callable[..., xr.Dataset]
) -> xr.Dataset:
    """The Dataset of the second pass and the third."""
    return finish(lists, effects.found(merged))


UNIT, LOSS_UNIT = "units of the site", "nats per predicted token"


def _split(both: Tensor) -> Tensor:
    """Cells of features and then of random directions as an axis of sources and one of features."""
    return both.unflatten(0, (len(SOURCES), -1))


def _examples(lists: Partial, prefix: str, dims: tuple[str, ...]) -> Variables:
    """The variables of a list, by source and feature."""
    assert isinstance(lists, ContextExamples)
    top = lists.top
    peak = {"peak": top.values} if not prefix else {}
    whole = {**peak, "row": top.rows, "pos": top.positions}
    along = {f"{prefix}{name}": ((*dims, "offset"), _split(x)) for name, x in lists.along.items()}
    return {f"{prefix}{name}": (dims, _split(x)) for name, x in whole.items()} | along


def _groups(lists: Sequence[Partial]) -> Variables:
    """The examples of all groups, in the order of their activations."""
    each = [_examples(one, "group_", (*OVER, "place")) for one in lists]
    found: Variables = {}
    for name, (dims, _) in each[0].items():
        found[name] = ((*OVER, "group", *dims[2:]), torch.stack([one[name][1] for one in each], 2))
    return found


def _relatives(scan: _Scan, parts: Mapping[str, Partial], rows: Float[Tensor, "w o"]) -> Variables:
    """The features with the nearest decoder rows, and those that correlate most over tokens."""
    W_dec = scan.cells.dictionary.W_dec.detach().cpu().double()
    blocks = [parts[f"pairs{i}"] for i in range(0, len(W_dec), BLOCK)]
    known = [block for block in blocks if isinstance(block, Covariance)]
    pairs, alike = (torch.cat([f(x) for x in known], 1) for f in (Covariance.correlation, _uncentred))
    near, partners = (_beside(x, scan.cells.chosen) for x in (cosines(rows, W_dec), pairs))
    dims = (*OVER, "near")
    return {
        "neighbour": (dims, near.indices), "cosine": (dims, near.values),
        "partner": (dims, partners.indices), "correlation": (dims, partners.values),
        "partner_cosine": (dims, _split(alike).gather(2, partners.indices)),
        **_active_neurons(parts.get("neurons")),
    }  # fmt: skip


def _active_neurons(pairs: Partial | None) -> Variables:
    """The neurons whose activations correlate most with those of each cell; nothing where there are none."""
    if not isinstance(pairs, Covariance):
        return {}
    listed, dims = largest(pairs.correlation(), LISTED), (*OVER, "neuron_rank")
    return {
        "active_neuron": (dims, _split(listed.indices)), "neuron_correlation": (dims, _split(listed.values)),
        "neuron_cosine": (dims, _split(_uncentred(pairs).gather(1, listed.indices))),
    }  # fmt: skip


def _uncentred(pairs: Covariance) -> Float[Tensor, "f g"]:
    """The cosine of every two columns over the observations; NaN for a column of zeros."""
    products = pairs.scatter + pairs.n * pairs.mean[:, None] * pairs.mean_other
    squares = pairs.spread + pairs.n * pairs.mean.square()
    squares_other = pairs.spread_other + pairs.n * pairs.mean_other.square()
    return products / (squares[:, None] * squares_other).sqrt()


def _beside(values: Float[Tensor, "w s"], chosen: Int[Tensor, "c"]) -> Listed:
    """The largest values of each feature with the others, and of each random direction with all, as many."""
    own = largest(values[: len(chosen)], LISTED, own=chosen)
    random = largest(values[len(chosen) :], LISTED)
    count = own.values.shape[1]
    both = (torch.stack((mine, theirs[:, :count])) for mine, theirs in zip(own, random, strict=True))
    return Listed(*both)


def _written(
    network: Transformer, writes: str, rows: Float[Tensor, "w o"]
) -> tuple[Variables, tuple[str, ...]]:
    """Logits, neurons and heads of the rows, as far as the site has them, and sentences about what it has not."""
    values: Variables = {}
    added = decoder_directions.added_to_stream(network, writes, rows)
    logits = None if added is None else decoder_directions.added_logits(network, added)
    notes = (
        ()
        if logits is not None
        else (
            f"no logits: what stands at {writes} is not added to the stream itself, but passes a norm or matrix first",
        )
    )
    if logits is not None:
        values |= _logits(logits.double())
    neurons = decoder_directions.neuron_directions(network, writes)
    if neurons is not None:
        alike = cosines(rows, neurons.cpu())
        found = largest(alike, LISTED)
        values |= {
            "neuron": ((*OVER, "neuron_rank"), _split(found.indices)),
            "alignment": ((*OVER, "neuron_rank"), _split(found.values)),
            "alignment_total": (OVER, _split(alike.abs().sum(1))),
        }  # fmt: skip
    shares = decoder_directions.head_shares(network, writes, rows)
    return values | ({} if shares is None else {"head_share": ((*OVER, "head"), _split(shares))}), notes


def _logits(logits: Float[Tensor, "w v"]) -> Variables:
    """The ends of the logits, their histogram, and their excess kurtosis."""
    ends = [largest(sign * logits, LISTED) for sign in (1, -1)]
    tokens = torch.stack([end.indices for end in ends], 1)
    values = torch.stack([ends[0].values, -ends[1].values], 1)
    low, high = logits.amin(1, keepdim=True), logits.amax(1, keepdim=True)
    share = (logits - low) / (high - low).where(high > low, 1.0)
    spread = logits.square().mean(1)
    return {
        "logit": ((*OVER, "end", "logit_rank"), _split(values)),
        "logit_token": ((*OVER, "end", "logit_rank"), _split(tokens)),
        "logit_counts": ((*OVER, "bin"), _split(Histogram.of(share.mT.contiguous(), EDGES).counts)),
        "logit_edges": ((*OVER, "edge"), _split(low + (high - low) * EDGES)),
        "kurtosis": (OVER, _split(logits.pow(4).mean(1) / spread.square() - 3)),
    }  # fmt: skip


def _scores(sums: Means, scan: _Scan, values: Variables, before: int) -> dict[str, Score]:
    """The scores of the features, the random directions' as their nulls; before: how many tokens an entry follows."""
    listed = values["tokens"][1][..., before]
    count = len(scan.cells.chosen)
    exact = {"max": (_split(scan.high), UNIT), "purity": (_purity(listed), "share of the top examples")}
    if "kurtosis" in values:
        exact["logit_kurtosis"] = (values.pop("kurtosis")[1], "1")
    sampled = {
        "density": per_token(sums, "active", "share of tokens"),
        "mean": per_token(sums, "total", UNIT),
    }
    if "loss_effect" in values:
        exact["loss_effect"] = (values["loss_effect"][1].nanmean(-1), LOSS_UNIT)
    own = {name: _beside_null(score, count) for name, score in sampled.items()}
    return own | {name: Score.exact(both[0], unit, both[1]) for name, (both, unit) in exact.items()}


def _beside_null(both: Score, count: int) -> Score:
    """The score of the features, with the value of each random direction as its null."""
    value, low, high, n = (x[:count] for x in (both.value, both.low, both.high, both.n))
    return Score(value, low, high, n, both.value[count:], both.unit)


def _purity(tokens: Int[Tensor, "2 c k"]) -> Float[Tensor, "2 c"]:
    """The share of the listed tokens that are the commonest among them; NaN without any."""
    there = tokens >= 0
    alike = (tokens[..., :, None] == tokens[..., None, :]) & there[..., None]
    return alike.sum(-1).amax(-1).double() / there.sum(-1)


def _attrs(question: FeatureCards, scan: _Scan, writes: str) -> dict[str, str | float | int]:
    """What the result is of, and its conventions."""
    skipped = "left out: BOS in front of a text, ends of texts and turns" if question.skip_bos else "count"
    return {
        "site": scan.cells.tokens.site, "writes": writes,
        "dictionary": f"{question.dictionary.kind}, {question.dictionary.d_sae} features",
        "texts": scan.left_out["texts"], "tokens_counted": scan.left_out["counted"],
        "special": scan.left_out["special"], "huge": scan.left_out["huge"], "special_tokens": skipped,
        "features": "those named" if question.features is not None else "those active on most tokens",
        "groups": f"{GROUPS} of equal width from 0 to the largest activation; drawn at random, seed {question.seed}",
        "logits": "decoder row . W_U through the gain of the final norm at scale 1, centred over the vocabulary",
        "null": "a random direction of the decoder row's norm that is active as often",
        "interval": f"95 % over texts; of the density {if_at_least(FEWEST_TEXTS)}, of the mean {FEWEST_SUMS}",
    }  # fmt: skip


def _huge_note(question: FeatureCards, left_out: Mapping[str, int]) -> tuple[str, ...]:
    """A sentence where tokens are left out for their norm."""
    if not left_out["huge"]:
        return ()
    of = left_out["huge"] + left_out["counted"]
    return (
        f"{left_out['huge']} of {of} tokens are left out, whose vector is longer than {question.largest_norm:g} times "
        "the median of their text (largest_norm)",
    )


def _worded(result: xr.Dataset, text: Text) -> xr.Dataset:
    """The result with the text of every token."""
    words = text.worded(result, piece="tokens", group_piece="group_tokens")
    return text.of_outputs.worded(words, logit_word="logit_token") if "logit_token" in words else words
