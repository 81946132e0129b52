"""Metrics of dictionaries: sparsity, reconstruction, loss of the model, match with true directions.

Everything is a sum over vectors that merges: the mean of the explained variance is that of the whole evaluation set,
whatever the batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.covariance import Covariance, Covariances
from interp.core.named import Parts, Several
from interp.core.results import Score, labelled, scored
from interp.core.stats import FEWEST, Partial, if_at_least, t95
from interp.core.transfers import check, to_device
from interp.core.wording import value_text
from interp.data.batch import Batch
from interp.data.pairs import Pairs
from interp.data.sources import Data
from interp.data.stream import DataSource, prompt_source
from interp.data.text import Text
from interp.features.dictionary import Dictionary, Vectors, across
from interp.model.edits import Edit
from interp.model.loss import next_token_loss
from interp.model.parts import as_site
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.metrics import LogitFunction, Metric, Outcome, as_metric
from interp.passes.needs import Steps, recorded, swept
from interp.passes.observe import Model, Subject, text_of
from interp.passes.question import Ask, ByRow, NotFiniteError, Question, Reading, Staged, Values
from interp.passes.variants import Variant
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr

RUNS = ("clean", "dictionary", "zero", "mean")
"""The runs by what the site holds: its own value, its reconstruction, 0, or its mean over the reference data."""
FEWEST_TEXTS = 128
"""Fewest texts for an interval of a loss."""
FEWEST_RECOVERED = 8
"""Fewest texts for an interval of a recovered share (`experiments/bench/coverage_ratio.py`)."""
NO_MEAN = "no reference data to take the mean of"


@dataclass(frozen=True, eq=False)
class Reconstruction(Question):
    """How sparse and how exact a dictionary is where it belongs, over data of any size.

    Several dictionaries share a pass: `interp.run({"a": Reconstruction(...), ...}, model, data)`.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        dictionary: the dictionary, on the device of the model.
        site: the site that an SAE reads, its full name or a part that is a whole one, such as `L1.resid`; None: the
            sites that the dictionary names, of a transcoder the one that it reads and the one that it writes.
        skip_bos: whether a BOS in front of a text is left out, as in `dictionary_quality`.

    Returns:
        Dataset[score] of `reconstruction_quality`, for the activations of the site at every token that counts.

    Raises:
        KeyError: an unknown site.
        ValueError: a dictionary that does not fit the site, or no vectors.

    See Also:
        `reconstruction_quality`: of activations that are there already. `dictionary_quality`: also what a model loses.

    Example:
        >>> eye, zero = torch.eye(24), torch.zeros(24)
        >>> weights = {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero}
        >>> dictionary = Dictionary(interp.features.ReLU(), weights)
        >>> found = reconstruction(model, [prompt, "The cat sat on the mat"], dictionary, "L1.resid")
        >>> found.value.sel(score="l0").dims
        ()
    """

    of_layers: ClassVar[bool] = False

    dictionary: Dictionary
    site: str | None = None
    _: KW_ONLY
    skip_bos: bool = True

    def bind(self, model: Subject) -> ByRow:
        """A read of the site, reduced to sums over the vectors of every text."""
        sums = TextSums.of(self, model)
        return ByRow(self.name, Reading(sums.needed, sums), Fit, partial(_finish, name=self.name))


@dataclass(frozen=True, eq=False)
class DictionaryQuality(Question):
    """Quality of a sparse autoencoder at a site: its reconstruction, and the loss of the model that runs on it.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        dictionary: the dictionary, on the device of the model.
        site: the site that an SAE reads, its full name or a part that is a whole one, such as "L1.resid"; None: the
            sites that the dictionary names. A transcoder's output is put in place of what its layer writes.
        reference: data over which the mean of the site is taken; None: the data themselves, which are read twice. (In
            `interp.run`, without it, there is no mean and attrs["no_mean"] says so.) Padding never counts.
        skip_bos: whether a BOS in front of a text keeps its value and does not count: its activations are unlike all
            others. It is the first token of a text, where the batch says that one was prepended, or where it has the
            tokenizer's BOS id; attrs["skipped"] says how many there were.
        metric: another number per text in place of the loss, at its own position; None: the next-token loss. For a
            model that is right at one place only, such as `answer_loss`. The scores are then `metric_clean`, ...,
            `metric_recovered_zero`, ....

    Returns:
        Dataset[score] with `value`, `low`, `high`, `null`, `n` and the coordinate `unit`, and `density` [feature] and
        `mean` [coordinate], as in `reconstruction_quality`, whose scores come first. Then:

        - `ce_clean`, `ce_dictionary`, `ce_zero`, `ce_mean`: next-token loss in nats per predicted token with the site
          as it is, replaced by its reconstruction, by 0, or by its mean.
        - `loss_recovered_zero`, `loss_recovered_mean`: (CE_ablated - CE_dictionary) / (CE_ablated - CE_clean) for
          either ablation: 1 = nothing is lost, 0 (the null) = as bad as the ablation.

        Intervals are 95 % over texts: of losses that of a ratio of sums, linearised, NaN below 128 texts; of recovered
        shares Fieller's, NaN below 8. Where an ablation lowers the loss there is nothing to recover: the share is NaN,
        and attrs such as `no_loss_recovered_zero` say so; `unsure_loss_recovered_zero` where the interval of what it
        costs holds 0, so that the share's own may be infinite.

    Raises:
        ValueError: a model that is not causal or has no unembedding, a dictionary that does not fit the site, and an
            iterator without reference data.
        KeyError: an unknown site.

    Caveat:
        Zero-ablating a residual stream ruins the model, so that any dictionary recovers almost everything; the mean is
        the stricter null.

    See Also:
        `reconstruction`: the reconstruction alone, from one pass.

    Example:
        >>> eye, zero = torch.eye(24), torch.zeros(24)
        >>> weights = {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero}
        >>> dictionary = Dictionary(interp.features.ReLU(), weights)
        >>> found = dictionary_quality(model, [prompt, "The cat sat on the mat"], dictionary, "blocks.1.hook_resid_pre")
        >>> found.value.sel(score="loss_recovered_mean").dims
        ()
    """

    of_layers: ClassVar[bool] = False

    dictionary: Dictionary
    site: str | None = None
    _: KW_ONLY
    reference: DataSource | Data | None = None
    skip_bos: bool = True
    metric: Metric | LogitFunction | None = None

    def with_data(
        self, model: Model, data: DataSource | Data | Pairs
    ) -> tuple[Question, DataSource | Data | Pairs]:
        """This question with the data as its reference if none is named, so that the data are read twice."""
        if self.reference is not None:
            return self, data
        source = prompt_source(data, text_of(model))
        if source.windows is None:
            raise ValueError(
                "the mean over the data requires reading them twice, an iterator gives every row once: name reference "
                "data"
            )
        return replace(self, reference=source), source

    def bind(self, model: Subject) -> ByRow | Staged:
        """The sums of `Reconstruction`, and a sweep of every batch with the site replaced, after the mean is known."""
        config = model.transformer.config
        if not config.causal or not config.unembed:
            raise ValueError("the loss a dictionary costs requires a causal model with an unembedding")
        sums = TextSums.of(self, model)
        metric = SUMMED_LOSS if self.metric is None else as_metric(self.metric, model.text)
        bound = partial(self._question, model.text, sums, metric)
        if self.reference is None:
            return bound(None)
        source = prompt_source(self.reference, model.text)
        reference = ByRow("reference", Reading(sums.needed, sums), Fit)

        def with_mean(fit: Partial) -> ByRow:
            assert isinstance(fit, Fit)
            return bound(fit.checked().mean)

        return Staged.after(self.name, Ask(reference, source), with_mean)

    def _question(self, text: Text, sums: TextSums, metric: Metric, mean: Float[Tensor, "d"] | None) -> ByRow:
        """The bound question; `mean` replaces the site's value in the run `ce_mean`, which None leaves out."""
        runs = RUNS if mean is not None else RUNS[:3]
        return ByRow(
            self.name,
            _SumsAndLosses(sums, mean, metric),
            Several({"fit": Fit, "losses": Covariances("losses")}),
            partial(_finish_quality, name=self.name, runs=runs, metric=metric),
            answers=metric.answers(text),
        )


reconstruction = of_data(Reconstruction)


dictionary_quality = of_data(DictionaryQuality)


@dataclass(frozen=True)
class Fit:
    """A reduction: sums over vectors y and what a dictionary gives for them; `merge` is exact to rounding.

    Squared deviations are taken from the mean of each part, and moved to the joint mean when parts are merged (Chan's
    update).
    """

    refuses_nan: ClassVar[bool] = True
    vectors: Int[Tensor, ""]
    mean: Float[Tensor, "d"]
    spread: Float[Tensor, ""]
    """Sum of ||y - mean||^2."""
    error: Float[Tensor, ""]
    """Sum of ||y - y_hat||^2."""
    active: Int[Tensor, "s"]
    """Number of vectors on which each feature is active."""

    @classmethod
    def of(cls, values: Mapping[str, Tensor], rows: Int[Tensor, "n"] | None = None) -> Fit:
        """The sums over some rows, from each row's own sums as `fitted` returns them."""
        vectors, means = values["vectors"], values["mean"]
        total = vectors.sum()
        weight = vectors.to(means.dtype)
        mean = weight @ means / weight.sum().clamp_min(1)
        spread = values["spread"].sum() + weight @ (means - mean).square().sum(1)
        return cls(total, mean, spread, values["error"].sum(), values["active"].sum(0))

    def merge(self, other: Fit) -> Fit:
        """The sums over the vectors of `self` and of `other`."""
        mine, theirs = self.tensors(), other.tensors()
        return Fit.of({name: torch.stack((mine[name], theirs[name])) for name in mine})

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by name."""
        return dict(vars(self))

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> Fit:
        """The sums from what `tensors` returned."""
        return cls(**tensors)

    def checked(self) -> Fit:
        """The same sums; raises ValueError if they are of no vectors, or hold NaN."""
        if int(self.vectors) == 0:
            raise ValueError("activations: at least one vector is required, got none")
        if not bool(self.error.isfinite()):
            raise ValueError("finite activations are required, some are NaN or infinite")
        return self

    def scores(self) -> dict[str, Score]:
        """The scores of the reconstruction, without intervals; n counts vectors, and of `dead_fraction` features."""
        n, d_in, d_sae = int(self.vectors), len(self.mean), len(self.active)
        density, spread = self.active.double() / n, self.spread.where(self.spread > 0, torch.nan)
        return {
            "l0": _bare_score(density.sum(), n, "active features per vector"),
            "mse": _bare_score(self.error / (n * d_in), n, "squared units of the site per coordinate"),
            "explained_variance": _bare_score(1 - self.error / spread, n, "share of the variance", 0.0),
            "dead_fraction": _bare_score((self.active == 0).double().mean(), d_sae, "share of features"),
        }

    def result(self, name: str, more: Mapping[str, Score], attrs: Mapping[str, str | int]) -> xr.Dataset:
        """The Dataset of `reconstruction_quality` with the scores in `more` added; raises ValueError as `checked`."""
        self.checked()
        density = self.active.double() / self.vectors
        return scored(
            name,
            {**self.scores(), **more},
            (),
            coords={"feature": range(len(density)), "coordinate": range(len(self.mean))},
            others={"density": (("feature",), density), "mean": (("coordinate",), self.mean)},
            units={"density": "share of vectors", "mean": "units of the site"},
            attrs={
                "vectors": int(self.vectors),
                "explained_variance": "1 - sum ||x - x_hat||^2 / sum ||x - mean||^2, mean over all vectors",
                "dead": "active on none of these vectors",
                "null": "explained variance 0: the mean alone",
                **attrs,
            },
        )


@torch.no_grad()
def fitted(
    dictionary: Dictionary,
    x: Float[Tensor, "n d"],
    row: Int[Tensor, "n"],
    rows: int,
    y: Float[Tensor, "n o"] | None = None,
) -> dict[str, Tensor]:
    """The sums of each row for `Fit`, in float64; vector x[i] belongs to row number row[i] of `rows`.

    `y` is what the dictionary should give for each x; None: x itself, as of an SAE.
    """
    features = dictionary.encode(x)
    y64, count = (x if y is None else y).double(), torch.bincount(row, minlength=rows)
    error = (y64 - dictionary.decode(features, x).double()).square().sum(1)

    def summed(values: Tensor) -> Tensor:
        return values.new_zeros(rows, *values.shape[1:]).index_add(0, row, values)

    mean = summed(y64) / count.clamp_min(1)[:, None]
    return {
        "vectors": count,
        "mean": mean,
        "spread": summed((y64 - mean[row]).square().sum(1)),
        "error": summed(error),
        "active": summed((features != 0).long()),
    }


@public()
def reconstruction_quality(dictionary: Dictionary, activations: Vectors | Iterable[Vectors]) -> xr.Dataset:
    """How sparse and how exact a dictionary is on given activations.

    Args:
        dictionary: the dictionary.
        activations: [n d], a tensor or a stream of chunks; of a transcoder pairs of what it reads [n d] and what it
            should write [n o].

    Returns:
        Dataset[score] with the coordinate `unit`, about the vectors y that it should give: those that it reads, or that
        it should write. The scores are `l0`, active features per vector; `mse`, mean squared error per coordinate;
        `explained_variance` = 1 - sum ||y - y_hat||^2 / sum ||y - mean||^2 with the mean over all vectors (null: 0; NaN
        of vectors that are all alike); `dead_fraction`, the share of features active on none.

        - `value`, `n`: the score and the number of vectors (of features for `dead_fraction`). They have no interval:
          `low` and `high` are NaN.
        - `density` [feature]: share of vectors on which the feature is active.
        - `mean` [coordinate]: mean of the vectors y.

    Raises:
        ValueError: no vectors, vectors of another width, and NaN.

    See Also:
        `reconstruction`: at a site of a model. `dictionary_quality`: also what the model loses.

    Example:
        >>> eye, zero = torch.eye(3), torch.zeros(3)
        >>> weights = {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero}
        >>> dictionary = Dictionary(interp.features.ReLU(), weights)
        >>> found = reconstruction_quality(dictionary, torch.rand(10, 3))
        >>> round(float(found.value.sel(score="explained_variance")), 6)
        1.0
    """
    fit: Fit | None = None
    whole = isinstance(activations, Tensor | tuple)
    for chunk in (activations,) if whole else activations:
        x, y = (each.to(dictionary.W_enc.device) for each in _checked_vectors(dictionary, chunk))
        row = torch.zeros(len(x), dtype=torch.long, device=x.device)
        chunk_fit = Fit.of(fitted(dictionary, x, row, 1, y))
        fit = chunk_fit if fit is None else fit.merge(chunk_fit)
    if fit is None:
        raise ValueError("activations: at least one vector is required, got none")
    return fit.result("reconstruction", {}, {})


def _checked_vectors(dictionary: Dictionary, chunk: object) -> tuple[Tensor, Tensor]:
    """What the dictionary reads and what it should write; ValueError unless both are vectors of its widths."""
    widths, apart = (dictionary.d_in, dictionary.d_out), dictionary.transcodes
    given = chunk if isinstance(chunk, tuple) else (chunk,) if apart else (chunk, chunk)
    if tuple(map(_width, given)) != widths or len(given[0]) != len(given[1]):
        both = f"pairs of vectors [n, {widths[0]}] and [n, {widths[1]}]"
        wanted = both if apart else f"vectors [n, {widths[0]}]"
        raise ValueError(f"activations must be {wanted}, or chunks of them, got {value_text(chunk)}")
    return given


def _width(x: object) -> int | None:
    """The width of vectors [n, width]; None for anything else."""
    return x.shape[1] if isinstance(x, Tensor) and x.ndim == 2 else None


@public()
def dictionary_match(W_dec: Float[Tensor, "s d"], truth: Float[Tensor, "t d"]) -> xr.Dataset:
    """Match learned features with true directions, by the cosine of their directions.

    Args:
        W_dec: [s d], the features' directions.
        truth: [t d], the true directions.

    Returns:
        Dataset[true]. Cosines have a sign: features are active upwards only.

        - `feature`, `cosine`: the one-to-one assignment with the greatest sum of cosines (Hungarian method); -1 and NaN
          for true directions left without a feature.
        - `best_feature`, `best_cosine`: the nearest feature, which several may share.

    Raises:
        ValueError: directions of another width, a zero vector, or numbers that are not finite.

    Example:
        >>> dictionary_match(torch.eye(3).flip(0), torch.eye(3)).feature.values.tolist()
        [2, 1, 0]
    """
    from scipy.optimize import linear_sum_assignment

    if truth.shape[-1] != W_dec.shape[-1]:
        raise ValueError(f"truth must have the width of W_dec, {W_dec.shape[-1]}, got {truth.shape[-1]}")
    cosines = _unit_rows(truth) @ _unit_rows(W_dec).mT
    row, column = (torch.from_numpy(index) for index in linear_sum_assignment(-cosines.numpy()))
    feature = torch.full((len(truth),), -1).index_copy(0, row, column)
    cosine = cosines.new_full((len(truth),), torch.nan).index_copy(0, row, cosines[row, column])
    best = cosines.max(1)
    columns = {"feature": feature, "cosine": cosine, "best_feature": best.indices, "best_cosine": best.values}
    return labelled(
        "dictionary_match",
        {name: (("true",), value) for name, value in columns.items()},
        coords={"true": range(len(truth))},
        units="cosine",
        attrs={"unit": "cosine", "assignment": "one to one, greatest sum"},
    )


def counted_tokens(batch: Batch, bos_id: int | None, skip_bos: bool) -> Bool[Tensor, "b p"]:
    """Mask of the real tokens; with `skip_bos` without a BOS in front of a text."""
    if not skip_bos:
        return batch.real
    is_bos = torch.full_like(batch.real, batch.bos)
    if bos_id is not None:
        is_bos = is_bos | (batch.tokens == bos_id)
    return batch.real & ~((batch.places == 0) & is_bos)


def ratio(
    sums: Covariance,
    top: Float[Tensor, "f"],
    bottom: Float[Tensor, "f"],
    unit: str,
    null: float = torch.nan,
    *,
    fewest: int = FEWEST,
) -> Score:
    """sum(x . top) / sum(x . bottom) over rows x, with its 95 % interval (linearised, Student's t; NaN below `fewest`).

    The residuals x . r with r = top - value bottom sum to 0, so the sum of their squares is r^T scatter r.
    """
    n, mean = sums.n, sums.mean
    top, bottom = top.to(mean), bottom.to(mean)
    value, denominator = (mean @ top) / (mean @ bottom), (n * (mean @ bottom)).abs()
    residual = top - value * bottom
    squares = (residual @ sums.scatter @ residual).clamp_min(0.0)
    half = t95(n.double(), fewest) * (squares * n / (n - 1)).sqrt() / denominator
    return Score(value, value - half, value + half, n, torch.full_like(value, null), unit)


def recovered_share(
    sums: Covariance, top: Float[Tensor, "f"], bottom: Float[Tensor, "f"], unit: str, *, fewest: int
) -> Score:
    """sum(x . top) / sum(x . bottom) over rows x with Fieller's 95 % interval: the ratios that no t test refutes.

    Fieller 1954: r is inside if |mean of x . (top - r bottom)| is within t standard errors of it. Infinite ends where
    the sum of x . bottom may be 0; NaN below `fewest` rows. Its null is 0.
    """
    n, mean = sums.n, sums.mean
    top, bottom = top.to(mean), bottom.to(mean)
    squared = (t95(n.double(), fewest) ** 2 / (n * (n - 1))).to(mean)
    above, below = mean @ top, mean @ bottom
    a = below.square() - squared * (bottom @ sums.scatter @ bottom)
    b = above * below - squared * (top @ sums.scatter @ bottom)
    c = above.square() - squared * (top @ sums.scatter @ top)
    root = (b.square() - a * c).clamp_min(0.0).sqrt()

    def end(sign: float) -> Tensor:
        return torch.where(a > 0, (b + sign * root) / a, sign * torch.inf).where(~a.isnan(), torch.nan)

    value = above / below
    return Score(value, end(-1.0), end(1.0), n, torch.zeros_like(value), unit)


def _bare_score(value: Float[Tensor, ""], n: int, unit: str, null: float = torch.nan) -> Score:
    """A score without an interval."""
    nan = torch.full_like(value, torch.nan)
    return Score(value, nan, nan, torch.tensor(n), torch.full_like(value, null), unit)


def placed(dictionary: Dictionary, site: str | None, network: Transformer) -> Dictionary:
    """The dictionary fitted to a model, where it names its sites.

    Args:
        dictionary: the dictionary.
        site: another site of one's own choice, for an SAE; None: those that the dictionary names.
        network: the model.

    Raises:
        KeyError, ValueError: as `as_site` and `Dictionary.fitted_to`.
    """
    if site is not None:
        dictionary.check_autoencoder("a site of one's own choice")
        dictionary = dictionary.moved(as_site(site, network.config))
    return dictionary.fitted_to(network)


@dataclass(frozen=True, eq=False)
class TextSums:
    """A function from the sites of a dictionary to the sums of every text over its vectors that count (`fitted`)."""

    dictionary: Dictionary
    """The dictionary, fitted to the model."""
    skip_bos: bool
    bos_id: int | None

    @classmethod
    def of(cls, question: Reconstruction | DictionaryQuality, model: Subject) -> TextSums:
        """The sums for a question.

        Raises:
            KeyError, ValueError: as `as_site` and `Dictionary.fitted_to`.
        """
        dictionary = placed(question.dictionary, question.site, model.transformer)
        return cls(dictionary, question.skip_bos, model.text.bos_id)

    @property
    def reads(self) -> str:
        """The site that the dictionary reads."""
        assert self.dictionary.reads is not None
        return self.dictionary.reads

    @property
    def writes(self) -> str:
        """The site that it should reconstruct."""
        assert self.dictionary.writes is not None
        return self.dictionary.writes

    @property
    def needed(self) -> list[Read]:
        """What is read in the pass."""
        return [Read(site) for site in dict.fromkeys((self.reads, self.writes))]

    def __call__(self, trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
        """The sums of every text of the batch."""
        vectors, home = self.dictionary.vectors(trace[Read(self.reads)]), batch.host()
        counted, text = counted_tokens(home, self.bos_id, self.skip_bos), home.text_numbers
        row = text[counted].repeat_interleave(vectors[0, 0].numel() // self.dictionary.d_in)
        place, row = (to_device(x, vectors.device) for x in (counted.flatten().nonzero()[:, 0], row))

        def chosen(value: Tensor) -> Tensor:
            return value.flatten(0, 1)[place].flatten(0, -2)

        written = None if self.writes == self.reads else chosen(self._as_written(trace[Read(self.writes)]))
        return fitted(self.dictionary, chosen(vectors), row, int(text.max()) + 1, written)

    def _as_written(self, value: Float[Tensor, "b p ..."]) -> Float[Tensor, "b p ... o"]:
        """The vectors at the site that a transcoder writes."""
        return value if value.shape[-1] == self.dictionary.d_out else value.flatten(2)


@dataclass(frozen=True, eq=False)
class _SumsAndLosses:
    """A function from a batch to the sums of every text, and to the metric of every text with the site replaced.

    `losses` `[text run + 2]`: the metric of each run, the number of predicted tokens, and the number of skipped BOS.
    """

    sums: TextSums
    mean: Float[Tensor, "d"] | None
    metric: Metric

    def __call__(self, model: Transformer, batch: Batch) -> Steps[Values]:
        """The sums and the losses of every text."""
        sums, texts = self.sums, one_text_per_row(batch)
        recording = yield from recorded(batch, sums.needed)
        fit_sums = sums(recording.trace, batch, model)
        counted = counted_tokens(texts, sums.bos_id, sums.skip_bos)
        losses = yield from self._losses(texts, counted)
        unlike = f"finite losses are required, some are NaN or infinite with {sums.writes} replaced"
        check(losses.isfinite().all(), partial(NotFiniteError, unlike))
        known = texts.predicted
        tokens = torch.ones_like(texts.tokens[:, 1:]) if known is None else known
        number = tokens.sum(1) if self.metric == SUMMED_LOSS else torch.ones(len(texts), dtype=torch.long)
        counts = torch.stack((number.to(tokens.device), (texts.real & ~counted).sum(1)))
        return {**fit_sums, "losses": torch.cat((losses.double(), counts.to(losses.device))).mT}

    def _losses(self, batch: Batch, at: Bool[Tensor, "b p"]) -> Steps[Float[Tensor, "r b"]]:
        """The metric of every row in each run, in the order of `RUNS`; without a mean, the last run is left out."""
        sums, mean = self.sums, self.mean

        def placed(value: Tensor, new: Tensor) -> Tensor:
            new = new.reshape(value.shape).to(value)
            return torch.where(at.view(*at.shape, *[1] * (value.ndim - 2)), new, value)

        def reconstructed(read: Tensor, value: Tensor) -> Tensor:
            return placed(value, sums.dictionary(sums.dictionary.vectors(read)))

        def with_mean(value: Tensor) -> Tensor:
            assert mean is not None
            repeated = value[0, 0].numel() // len(mean)
            return placed(
                value, to_device(mean, value.device).repeat(repeated).expand(value.flatten(2).shape)
            )

        replaced = [
            across(sums.reads, sums.writes, reconstructed),
            [Edit(sums.writes, lambda value: placed(value, torch.zeros_like(value)))],
            *([] if mean is None else [[Edit(sums.writes, with_mean)]]),
        ]
        if self.metric == SUMMED_LOSS and batch.tokens.shape[1] < 2:  # single tokens: nothing is predicted
            return torch.zeros(1 + len(replaced), len(batch), device=batch.tokens.device)
        variants = [Variant(edits) for edits in replaced]
        outcomes = yield from swept(batch, variants, self.metric)
        return torch.cat((outcomes.base[None], outcomes.values))


def one_text_per_row(batch: Batch) -> Batch:
    """The batch with one text per row: packed rows are split into their texts, in order."""
    if batch.documents is None:
        return batch
    home = batch.host()
    tokens = home.by_text(home.tokens, home.real, -1)
    keep = tokens >= 0
    texts = Batch(tokens.clamp_min(0), None if bool(keep.all()) else keep, batch.bos, row=batch.identities())
    return texts.to(batch.tokens.device)


def _finish(merged: Partial, name: str) -> xr.Dataset:
    assert isinstance(merged, Fit)
    return merged.result(name, {}, {})


def _finish_quality(merged: Partial, name: str, runs: Sequence[str], metric: Metric) -> xr.Dataset:
    """The Dataset of `dictionary_quality`: reconstruction scores, the metric of each run, and the recovered shares."""
    assert isinstance(merged, Parts)
    fit, sums = merged.parts["fit"], merged.parts["losses"]
    assert isinstance(fit, Fit) and isinstance(sums, Covariance)
    of_loss = metric == SUMMED_LOSS
    stem, unit = ("ce", "nats per predicted token") if of_loss else ("metric", metric.unit)
    recovered, of_what = ("loss_recovered", "the loss") if of_loss else ("metric_recovered", metric.name)
    basis = dict(zip((*runs, "tokens", "skipped"), torch.eye(len(runs) + 2).double(), strict=True))
    fewest = FEWEST_TEXTS if of_loss else max(FEWEST_TEXTS, metric.fewest)
    scores = {f"{stem}_{run}": ratio(sums, basis[run], basis["tokens"], unit, fewest=fewest) for run in runs}
    reasons = {}
    for run in runs[2:]:
        top, bottom = basis[run] - basis["dictionary"], basis[run] - basis["clean"]
        enough = FEWEST_RECOVERED if of_loss else max(FEWEST_RECOVERED, metric.fewest)
        share = recovered_share(sums, top, bottom, f"share of {of_what}", fewest=enough)
        cost = ratio(sums, basis[run] - basis["clean"], basis["tokens"], unit)
        if of_loss and float(cost.value) <= 0:
            nan = torch.full_like(share.value, torch.nan)
            share = share._replace(value=nan, low=nan, high=nan)
            reasons[f"no_{recovered}_{run}"] = (
                f"{of_what} is no greater with {run} at the site: {float(cost.value):+.3g}"
            )
        elif not (float(cost.low) > 0 or float(cost.high) < 0):
            ends = f"[{float(cost.low):.3g}, {float(cost.high):.3g}]"
            reasons[f"unsure_{recovered}_{run}"] = f"what {run} at the site costs may be nothing: {ends}"
        scores[f"{recovered}_{run}"] = share
    tokens, skipped = (round(float(sums.mean[i] * sums.n)) for i in (-2, -1))
    return fit.result(
        name,
        scores,
        {
            "skipped": skipped,
            **({"predicted_tokens": tokens} if of_loss else {"metric": metric.name}),
            "interval": f"95 % over texts, of {of_what}; of what is recovered {if_at_least(FEWEST_RECOVERED)}",
            **reasons,
            **({} if "mean" in runs else {"no_mean": NO_MEAN}),
        },
    )


def _summed_loss(outcome: Outcome) -> Float[Tensor, "r"]:
    batch = outcome.batch
    return next_token_loss(outcome.logits(), batch.tokens, batch.keep, batch.documents).sum(1)


SUMMED_LOSS = Metric("summed next-token loss", "nats", _summed_loss, everywhere=True)


def _unit_rows(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """The rows divided by their norms, in float64 on the host; raises ValueError for zero or non-finite rows."""
    directions = rows.detach().cpu().double()
    if not directions.numel() or not bool(directions.isfinite().all()):
        raise ValueError(f"directions of finite numbers are required, got {value_text(rows)}")
    norm = directions.norm(dim=1, keepdim=True)
    if bool((norm == 0).any()):
        raise ValueError("directions must not be zero vectors")
    return directions / norm
