"""What each feature of a dictionary does, over data of any size: histogram, examples, logits, relatives, and a null.

Two passes over the data, each a mergeable reduction. The first finds each feature's density and range, and where a
random direction must begin to be active to be as rare; the second fills histograms and lists. Beside every feature
stands that random direction, read and written in its place: what a page shows of it, a page shows of anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.contexts import ContextExamples, TopInContext
from interp.core.covariance import Covariance, Covariances
from interp.core.extremes import Extremes, TopRows
from interp.core.kinds import PositiveCount, Seed
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
from interp.features.dictionary_metrics import counted_tokens, placed
from interp.features.top_examples import FEWEST_SUMS, FEWEST_TEXTS, IN_CONTEXT, per_token
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.observe import Subject
from interp.passes.question import Ask, ByRow, NotFiniteError, Question, Reading, Staged
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
        seed: of the random directions, and of which tokens of a group are listed.

    Returns:
        Dataset. `feature` are the features, `source` the dictionary or the random direction.

        - `value`, `low`, `high`, `null`, `n` [feature, score]: `density`, the share of tokens on which it is not 0, and
          `mean` over all tokens (95 % over texts; NaN below 256 and 16 texts); `max`; `purity`, the share of the top
          examples whose token is the commonest among them; `logit_kurtosis`, the excess kurtosis of its logits (0 of
          Gaussian ones). `null` is the number of the random direction.
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
          (Pearson), with the cosine of their activations, `partner_cosine`.
        - `neuron`, `alignment` [source, feature, neuron_rank]: neurons of the MLP that writes there (of the layer
          `neuron_layer`, an attribute) with the largest cosine of output and decoder row; `alignment_total` sums the
          sizes of all.
        - `head_share` [source, feature, head]: of a dictionary of `attn.hook_z`, each head's share of the norm.
        - `vector` [source, feature, coordinate]: the decoder row.

        Attributes count the tokens and those left out (`special`, `huge`), and name the sites.

    Raises:
        KeyError: an unknown site.
        ValueError: a dictionary that does not fit the site or reads head by head, a feature twice or not there, and
            data in which no token counts.

    Memory:
        Constant in the size of the data: 16 bytes per listed feature and feature of the dictionary for correlations,
        and 80 kB per listed feature in the first pass. A batch holds all features of its tokens.

    Source:
        The parts of SAEDashboard and Neuronpedia. The null: Heap et al. 2025, "Sparse Autoencoders Can Interpret
        Randomly Initialized Transformers" (arXiv:2501.17727).

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
    largest_norm: int | float | None = 10.0
    seed: Seed = 0

    def bind(self, model: Subject) -> Staged:
        """A pass for densities, ranges and thresholds, then one for histograms and lists."""
        dictionary = placed(self.dictionary, self.site, model.transformer)
        reads, writes = dictionary.reads, dictionary.writes
        assert reads is not None and writes is not None
        chosen = self._chosen(dictionary.d_sae)
        if len(self.context) != 2:
            raise ValueError(
                f"context must be how many tokens before and how many after, got {list(self.context)}"
            )
        if self.largest_norm is not None and not self.largest_norm > 0:
            raise ValueError(f"largest_norm must be above 0, got {self.largest_norm!r}")
        count = min(self.most, dictionary.d_sae) if chosen is None else len(chosen)
        null = _Random.of(dictionary, count, self.seed)
        tokens = _Tokens(dictionary, reads, _left_out(model.text, self.skip_bos), self.largest_norm)
        first = ByRow(
            "ranges", Reading([Read(reads)], partial(_ranges, tokens=tokens, null=null)), _range_reduction()
        )

        def second(kept: Partial) -> ByRow:
            scan = _Scan.of(tokens, null, kept, chosen, self.seed)
            finish = partial(_finish, question=self, scan=scan, writes=writes, model=model)
            return ByRow(self.name, Reading([Read(reads)], scan), self._reduction(dictionary.d_sae), finish)

        return Staged.after(self.name, Ask(first), second, again="a list of texts in place of an iterator")

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

    def _reduction(self, d_sae: int) -> Several:
        """The reductions of the second pass: lists, histograms, sums, correlations with blocks of the features."""
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
        })  # fmt: skip


feature_cards = of_data(FeatureCards)

EDGES = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)
"""Edges of the bins of a histogram, as shares of a feature's range."""


# --- which tokens count, and what is read there -----------------------------------------------------------------------


def _left_out(text: Text, skip_bos: bool) -> _LeftOut:
    """The rule for a tokenizer's tokens: with `skip_bos` BOS in front of a text, and ends of texts and turns."""
    marks = (text.eos_id, text.turn_end, *text.end_ids) if skip_bos else ()
    return _LeftOut(skip_bos, text.bos_id, tuple(sorted({i for i in marks if i is not None})))


@dataclass(frozen=True)
class _LeftOut:
    """Which tokens do not count by what they are."""

    skip_bos: bool
    bos_id: int | None
    ends: tuple[int, ...]

    def counted(self, batch: Batch) -> Bool[Tensor, "b p"]:
        """Mask of the tokens that count."""
        counted = counted_tokens(batch, self.bos_id, self.skip_bos)
        for end in self.ends:
            counted = counted & (batch.tokens != end)
        return counted


class _Texts(NamedTuple):
    """The vectors of a batch, text by text."""

    x: Float[Tensor, "t q d"]
    tokens: Int[Tensor, "t q"]
    counted: Bool[Tensor, "t q"]
    special: Int[Tensor, "t"]
    """How many tokens of each text are left out for what they are."""
    huge: Int[Tensor, "t"]
    """How many are left out for their norm."""


@dataclass(frozen=True, eq=False)
class _Tokens:
    """A function from a batch to the vectors at the tokens that count, by text."""

    dictionary: Dictionary
    site: str
    left_out: _LeftOut
    largest_norm: float | None

    def __call__(self, trace: Trace, batch: Batch) -> _Texts:
        x = self.dictionary.vectors(trace[Read(self.site)])
        if x.ndim != 3:
            raise ValueError("a dictionary of the whole site is required, got one that reads head by head")
        if not bool((x.isfinite().all(-1) | ~batch.real).all()):
            raise NotFiniteError(f"finite values are required, some at {self.site} are NaN or infinite")
        counted = self.left_out.counted(batch)
        by_text = batch.by_text(x, batch.real, 0.0)
        tokens = batch.by_text(batch.tokens, batch.real, -1)
        usual = batch.by_text(counted.long(), batch.real, 0).bool()
        huge = self._huge(by_text, usual)
        special = (tokens >= 0) & ~usual
        return _Texts(by_text, tokens, usual & ~huge, special.sum(1), huge.sum(1))

    def _huge(self, x: Float[Tensor, "t q d"], counted: Bool[Tensor, "t q"]) -> Bool[Tensor, "t q"]:
        """Mask of tokens whose vector is too long beside the median of its text (of two, the smaller one)."""
        if self.largest_norm is None:
            return torch.zeros_like(counted)
        norm = x.double().norm(dim=-1).masked_fill(~counted, torch.nan)
        return norm > self.largest_norm * norm.nanmedian(1, keepdim=True).values


@dataclass(frozen=True, eq=False)
class _Random:
    """Random unit vectors that are read and written in the place of features."""

    read: Float[Tensor, "c d"]
    written: Float[Tensor, "c o"]
    shift: Float[Tensor, "d"]
    """What is subtracted before reading, as the dictionary does."""

    @classmethod
    def of(cls, dictionary: Dictionary, count: int, seed: int) -> _Random:
        """So many directions for a dictionary; one that gives back what it reads writes along what it reads."""
        # not torch's generator: a dictionary that was trained with the same seed began with those directions
        rows = -1 - torch.arange(2 * count)
        read, written = (
            _unit_rows(mine, width, seed)
            for mine, width in zip(rows.chunk(2), (dictionary.d_in, dictionary.d_out), strict=True)
        )
        autoencoder = not dictionary.transcodes and dictionary.d_in == dictionary.d_out
        b_dec = dictionary.b_dec.detach().double().cpu()
        shift = (
            b_dec if dictionary.apply_b_dec_to_input else torch.zeros(dictionary.d_in, dtype=torch.float64)
        )
        return cls(read, read if autoencoder else written, shift)

    def cosines(self, x: Float[Tensor, "t q d"]) -> tuple[Float[Tensor, "t q c"], Float[Tensor, "t q 1"]]:
        """The cosine of every vector, shifted, with every direction (0 for a vector of zeros), and its norm."""
        shifted = x.double() - to_device(self.shift, x.device)
        norm = shifted.norm(dim=-1, keepdim=True)
        along = shifted @ to_device(self.read, x.device).mT
        return torch.where(norm > 0, along / norm, 0.0).clamp(-1.0, 1.0), norm


def _unit_rows(rows: Int[Tensor, "n"], width: int, seed: int) -> Float[Tensor, "n d"]:
    """A random direction for each row's number."""
    normal = torch.special.ndtri(uniforms(rows, width, seed).clamp_min(2.0**-54)).mT
    return torch.nn.functional.normalize(normal, dim=1)


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
    trace: Trace, batch: Batch, model: Transformer, tokens: _Tokens, null: _Random
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

    tokens: _Tokens
    null: _Random
    chosen: Int[Tensor, "c"]
    threshold: Float[Tensor, "c"]
    """Cosine above which each random direction is active."""
    scale: float
    """Mean norm of the vectors, in which activations of random directions are measured."""
    low: Float[Tensor, "w"]
    high: Float[Tensor, "w"]
    """Range of the activations, of features and then of random directions."""
    seed: int
    left_out: Mapping[str, int]
    """Numbers of texts, of tokens that count and of those that do not."""

    @classmethod
    def of(
        cls, tokens: _Tokens, null: _Random, kept: Partial, chosen: Sequence[int] | None, seed: int
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
        return cls(tokens, null, index, threshold, scale, torch.cat((low, torch.zeros_like(low))), high, seed,
                   {**numbers, "texts": texts})  # fmt: skip

    @torch.no_grad()
    def __call__(self, trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
        texts = self.tokens(trace, batch)
        features, out = self.tokens.dictionary.encode(texts.x), ~texts.counted[..., None]
        own = features[..., to_device(self.chosen, features.device)].double()
        both = torch.cat((own, self._random(texts.x)), -1).masked_fill(out, torch.nan)
        counted, active = texts.counted.sum(1).double(), ((both != 0) & ~out).sum(1).double()
        total, share = both.nansum(1), self._shares(both)
        return {
            "activation": both, "shown": both.masked_fill(both == 0, torch.nan), "share": share,
            "tokens": texts.tokens, "counted": counted, "active": active,
            "total": total, "active + counted": active + counted[:, None],
            "total + counted": total + counted[:, None], **self._draws(share, batch),
            **{f"features{i}": features[..., i : i + BLOCK] for i in range(0, features.shape[-1], BLOCK)},
        }  # fmt: skip

    def _random(self, x: Float[Tensor, "t q d"]) -> Float[Tensor, "t q c"]:
        """Activations of the random directions."""
        cosine, _ = self.null.cosines(x)
        return (cosine - to_device(self.threshold, x.device)).clamp_min(0.0) * self.scale

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


def _total(sums: Means, name: str) -> int:
    moments = sums.moments[name]
    return round(float(moments.mean) * moments.n)


# --- the result -------------------------------------------------------------------------------------------------------

OVER = ("source", "feature")
"""Dims of everything that is shown of a feature and of the random direction beside it."""
Variables = dict[str, tuple[tuple[str, ...], Tensor]]


def _finish(merged: Partial, question: FeatureCards, scan: _Scan, writes: str, model: Subject) -> xr.Dataset:
    """The Dataset of the lists, the histograms and what the weights say."""
    assert isinstance(merged, Parts)
    parts, network = merged.parts, model.transformer
    sums, histogram = parts["sums"], parts["histogram"]
    assert isinstance(sums, Means) and isinstance(histogram, Histogram)
    rows = _rows(scan)
    values: Variables = {
        **_examples(parts["top"], "", (*OVER, "rank")),
        **_groups([parts[f"group{g}"] for g in range(GROUPS)]),
        "counts": ((*OVER, "bin"), _split(histogram.counts)),
        "edges": ((*OVER, "edge"), _split(scan.low[:, None] + (scan.high - scan.low)[:, None] * EDGES)),
        "vector": ((*OVER, "coordinate"), _split(rows)),
    }  # fmt: skip
    relatives = _relatives(scan, parts, rows)
    written, notes = _written(network, writes, rows)
    layer = decoder_directions.neuron_layer(writes) or 0
    values |= relatives | written
    result = scored(
        question.name,
        _scores(sums, scan, values, question.context[0]),
        ("feature",),
        coords={"feature": scan.chosen.tolist(), "source": SOURCES, "end": ("top", "bottom"),
                "offset": range(-question.context[0], question.context[1] + 1)},
        others=values,
        units=dict.fromkeys(("peak", "activation", "edges", "group_peak", "group_activation"), UNIT)
        | {"logit": "logits before the final norm", "logit_edges": "logits before the final norm"},
        attrs=_attrs(question, scan, writes) | ({"neuron_layer": layer} if "neuron" in values else {}),
        notes=(*_huge_note(question, scan.left_out), *notes),
    )  # fmt: skip
    return _worded(result, model.text)


UNIT = "units of the site"


def _split(both: Tensor) -> Tensor:
    """Cells of features and then of random directions as an axis of sources and one of features."""
    return both.unflatten(0, (len(SOURCES), -1))


def _rows(scan: _Scan) -> Float[Tensor, "w o"]:
    """The decoder rows of the features, and the random directions at their norms, on the host in float64."""
    own = scan.tokens.dictionary.W_dec.detach()[to_device(scan.chosen, scan.tokens.dictionary.W_dec.device)]
    own = own.cpu().double()
    return torch.cat((own, scan.null.written * own.norm(dim=1, keepdim=True)))


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
    W_dec = scan.tokens.dictionary.W_dec.detach().cpu().double()
    blocks = [parts[f"pairs{i}"] for i in range(0, len(W_dec), BLOCK)]
    known = [block for block in blocks if isinstance(block, Covariance)]
    pairs, alike = (torch.cat([f(x) for x in known], 1) for f in (Covariance.correlation, _uncentred))
    near, partners = (_beside(x, scan.chosen) for x in (cosines(rows, W_dec), pairs))
    dims = (*OVER, "near")
    return {
        "neighbour": (dims, near.indices), "cosine": (dims, near.values),
        "partner": (dims, partners.indices), "correlation": (dims, partners.values),
        "partner_cosine": (dims, _split(alike).gather(2, partners.indices)),
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
        else (f"no logits: what stands at {writes} is not added to the stream as it is",)
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
    count = len(scan.chosen)
    exact = {"max": (_split(scan.high), UNIT), "purity": (_purity(listed), "share of the top examples")}
    if "kurtosis" in values:
        exact["logit_kurtosis"] = (values.pop("kurtosis")[1], "1")
    sampled = {
        "density": per_token(sums, "active", "share of tokens"),
        "mean": per_token(sums, "total", UNIT),
    }
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
        "site": scan.tokens.site, "writes": writes,
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
