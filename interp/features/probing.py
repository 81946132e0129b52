"""Is a feature in a few neurons? k-sparse probes (Gurnee et al. 2023, "Finding neurons in a haystack").

A probe is a logistic regression on a few chosen neurons. Choosing and fitting see the training examples, scores come
from the test examples; a second number, with shuffled labels, says what the same procedure finds in noise. scikit-learn
does the statistics and the fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.axes import describe
from interp.core.boundary import public
from interp.core.kinds import Count, Seed
from interp.core.results import Score, scored
from interp.core.stats import Partial, Rows, upper_p, wilson
from interp.core.transfers import to_device
from interp.data.batch import Batch
from interp.features.best_subset import CANDIDATES, best_subsets, check_sizes
from interp.model.config import ModelConfig
from interp.model.parts import KINDS, Part, axis_size
from interp.model.sites import find, full_name
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.needs import Steps, recorded
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question, Values
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr
    from sklearn.linear_model import LogisticRegression
    from sklearn.svm import LinearSVC

Labels = Sequence[bool] | Sequence[int] | Tensor
"""Whether each example has the feature: booleans, or 0 and 1."""
ProbePosition = Literal["mean"] | int
"""The vector of a text: the mean over its tokens (BOS aside), or that of one token by number, negative from the end."""
SIZES = (1, 2, 4, 8, 16)
"""How many neurons the probes read by default."""
Selection = Literal[
    "mean_difference", "f_statistic", "mutual_information", "l1", "svm", "adaptive", "optimal", "random"
]
"""How neurons are chosen; `selected` describes each way."""
WEAKEST = 12
"""Doublings of the strongest L1 penalty's C after which the search for k surviving neurons ends."""
SCORES = ("f1", "precision", "recall", "accuracy", "balanced_accuracy", "mcc")
"""The keys of `scores`, in order."""
UNITS = {name: "correlation" if name == "mcc" else "share of test examples" for name in SCORES}
DRAWS = 2000
"""Bootstrap samples of the interval of the correlation (MCC)."""


@dataclass(frozen=True, eq=False)
class ProbeNeurons(Question):
    """How well a few neurons of each layer tell prompts with a feature from those without, by linear probes.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        labels: whether each prompt has the feature, one per prompt in the order of the data: booleans, or 0 and 1.
        site: a site with a vector per position in every layer: the neurons ("post") or a stream, whose dimensions then
            are the neurons.
        pos: the vector of a prompt: "mean", the mean over its tokens, or one token by number, negative from the end.
            The mean suits features of a whole text (its language), which is what Gurnee et al. do; the BOS that a batch
            has does not count. For labels of single tokens write the activations to a store and `probe` them.
        sizes: how many neurons the probes read, one probe for each size.
        select: how neurons are chosen: "mean_difference", "f_statistic", "mutual_information", "l1", "svm", "adaptive",
            "optimal" or "random", as in `probe`.
        test_share: share of each class that is set aside for the scores.
        shuffles: how often the procedure is repeated with shuffled training labels, for the null.
        seed: of the split, the shuffles and the bootstrap.

    Returns:
        Dataset[layer, n_neurons, score], with the variables of `probe` at every layer. The coordinate `part` [layer,
        n_neurons, rank] names the neurons chosen, where the site holds neurons.

    Raises:
        ValueError: as `probe`; packed rows, and sites without one vector per position.
        KeyError: a site that the model lacks.
        IndexError: a position that a prompt lacks.

    Source:
        Gurnee et al. 2023, "Finding neurons in a haystack".

    See Also:
        `probe`: the same of activations that are there already.

    Example:
        >>> texts = ["The cat sat on the mat", prompt] * 8
        >>> found = probe_neurons(model, texts, [True, False] * 8, sizes=(1, 2))
        >>> found.value.dims
        ('layer', 'n_neurons', 'score')
    """

    labels: Labels
    _: KW_ONLY
    site: str = "post"
    pos: ProbePosition = "mean"
    sizes: Sequence[int] = SIZES
    select: Selection = "mean_difference"
    test_share: float = 0.3
    shuffles: Count = 5
    seed: Seed = 0

    def bind(self, model: Subject) -> ByRow:
        """One vector per prompt and layer, reduced at the site; probes are fitted to all of them at the end."""
        config = model.transformer.config
        layers = range(config.n_layers)
        sites = [
            f"blocks.{i}.{self.site}" if "hook_" in self.site else full_name(self.site, i) for i in layers
        ]
        procedure = Procedure(tuple(self.sizes), self.select, self.test_share, self.shuffles, self.seed)
        labels = as_labels(self.labels)
        check_selection(self.sizes, self.select, _width(sites, config))
        held_out(labels, self.test_share, self.seed)
        return ByRow(
            self.name,
            partial(pooled, sites=sites, pos=self.pos),
            Rows,
            partial(
                _finish, name=self.name, sites=sites, labels=labels, procedure=procedure,
                attrs={"site": self.site, "pos": self.pos},
            ),
            prompts=len(labels),
        )  # fmt: skip


probe_neurons = of_data(ProbeNeurons)


@public()
def probe(
    activations: Float[Tensor, "n m"],
    labels: Labels,
    *,
    sizes: Sequence[int] = SIZES,
    select: Selection = "mean_difference",
    test_share: float = 0.3,
    shuffles: Count = 5,
    seed: Seed = 0,
) -> xr.Dataset:
    """How well linear probes on a few neurons find a feature in held-out examples.

    A probe is a logistic regression on a few chosen neurons. A `test_share` of each class is set aside; scaling, choice
    and fit see the rest. Classes weigh the same.

    Args:
        activations: [n m], one row per example, one column per neuron.
        labels: [n], whether each example has the feature: booleans, or 0 and 1.
        sizes: how many neurons the probes read, one probe for each size.
        select: how neurons are chosen, from the training examples alone. "mean_difference": |mean of the positive -
            mean of the negative examples|; "f_statistic": of the one-way analysis of variance; "mutual_information": of
            the neuron and the label; "l1": the coefficients that an L1 penalty leaves; "svm": the largest coefficients
            of a linear support vector machine; "adaptive": all neurons, then half as many, and so on; "optimal": the
            best subset of 50 candidates, up to 5 neurons; "random": any.
        test_share: share of each class that is set aside for the scores.
        shuffles: how often the whole procedure is repeated with shuffled training labels, for the null.
        seed: of the split, the shuffles and the bootstrap.

    Returns:
        Dataset[n_neurons, score]. Scores: `f1`, `precision`, `recall`, `accuracy`, `balanced_accuracy` and `mcc`
        (Matthews' correlation), 0 where undefined.

        - `value`: the score on the test examples.
        - `low`, `high`: 95 % interval, with the probe held fixed: Wilson's for the shares (of F1 by 2 j / (1 + j), j =
          TP / (TP + FP + FN)), Newcombe's for their mean (balanced accuracy), the bootstrap over test examples for MCC,
          which has no width where no example is wrong.
        - `null`, `null_sd`: mean and deviation over the `shuffles` repetitions.
        - `p`: one-sided, how often these score as high. An exact permutation test, at least 1 / (shuffles + 1): .05
          takes 19 shuffles; equal scores count against the probe.
        - `n`: number of test examples.
        - `neuron`, `weight` [n_neurons, rank]: the neurons chosen, best first, and their coefficients (log odds per
          standard deviation); -1 and NaN beyond the last.

    Raises:
        ValueError: labels other than true and false or one per example, a class without examples in one of the parts,
            sizes beyond the neurons, activations that are not finite.

    Caveats:
        Several neurons may carry the feature, and a size alone never says that none other does; what is found is a
        correlation: ablate the neurons to see whether the model uses them.

    Source:
        Gurnee et al. 2023, "Finding neurons in a haystack".

    See Also:
        `probe_neurons`: of prompts, at every layer. `interp.ablate`: whether the model uses the neurons.

    Example:
        >>> labels = torch.arange(40) % 2 == 0
        >>> neurons = torch.randn(40, 5)
        >>> neurons[:, 3] += 9 * labels
        >>> found = probe(neurons, labels, sizes=(1, 2))
        >>> found.neuron.values[0].tolist(), float(found.value.sel(score="f1")[0])
        ([3, -1], 1.0)
    """
    procedure = Procedure(tuple(sizes), select, test_share, shuffles, seed)
    return _probe_table("probe", [activations], as_labels(labels), procedure).isel(layer=0, drop=True)


def _width(sites: Sequence[str], config: ModelConfig) -> int:
    """Number of entries of a site at one position; raises ValueError for a site without one vector per position."""
    for site in sites:
        axes = find(site, config)[0].axes
        if axes not in ("b p m", "b p d"):
            raise ValueError(f"a site with one vector per position is required, {site!r} is {describe(axes)}")
    return axis_size("m", config) if axes.endswith("m") else config.d_model


@torch.no_grad()
def pooled(model: Transformer, batch: Batch, sites: Sequence[str], pos: ProbePosition) -> Steps[Values]:
    """One vector per prompt at each site, by site: the mean over its tokens, or one token's; reduced at the site.

    Raises:
        ValueError: packed rows.
        IndexError: a missing position.
    """
    share = to_device(_token_weights(batch, pos), model.device)
    reads = [Read(site, partial(_weighted_sum, share_bp=share)) for site in sites]
    trace = (yield from recorded(batch, reads)).trace
    return {read.site: trace[read] for read in reads}


def _token_weights(batch: Batch, pos: ProbePosition) -> Float[Tensor, "b p"]:
    """Weights `[b p]` with which each text's token vectors are summed to one; on the host."""
    batch.require_one_text("one vector per prompt")
    batch = batch.host()
    real, place = batch.real, batch.places
    if isinstance(pos, str):
        counted = real & (place > 0) if batch.bos else real
        if not bool(counted.any(1).all()):
            raise ValueError("a token besides BOS is required in every prompt to take the mean over")
        return counted.double() / counted.sum(1, keepdim=True)
    return torch.zeros(real.shape, dtype=torch.float64).scatter(1, batch.tokens_at(pos).columns, 1.0)


def _weighted_sum(value: Float[Tensor, "b p m"], *, share_bp: Float[Tensor, "b p"]) -> Float[Tensor, "b m"]:
    dtype = torch.promote_types(value.dtype, torch.float32)
    return torch.einsum("bpm, bp -> bm", value.to(dtype), share_bp.to(value.device, dtype))


def _finish(
    merged: Partial,
    name: str,
    sites: Sequence[str],
    labels: Bool[Tensor, "n"],
    procedure: Procedure,
    attrs: Mapping[str, str | int | float],
) -> xr.Dataset:
    """Probes of all prompts, layer by layer."""
    assert isinstance(merged, Rows)
    ids = torch.arange(len(merged.rows[sites[0]])) if merged.ids is None else merged.ids.cpu()
    if int(ids.max()) >= len(labels):
        raise ValueError(f"one label per prompt is required, got {len(labels)} for prompt {int(ids.max())}")
    neurons = Part.of(sites[0]).kind == KINDS["neuron"].site
    return _probe_table(
        name, [merged.rows[s] for s in sites], labels[ids], procedure, neurons=neurons, **attrs
    )


# --- the procedure ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Procedure:
    """How probes are made and scored; the fields are arguments of `probe`."""

    sizes: tuple[int, ...]
    select: Selection
    test_share: float
    shuffles: int
    seed: int

    def probed(self, activations: Float[Tensor, "n m"], labels: Bool[Tensor, "n"]) -> list[Probes]:
        """The probes of the examples, then as null the probes of every repetition with shuffled training labels.

        Raises:
            ValueError: as `probe`.
        """
        if self.shuffles < 0 or not self.sizes or min(self.sizes) < 1:
            raise ValueError(
                f"shuffles of 0 or more and sizes of at least one neuron are required, got shuffles={self.shuffles} "
                f"and sizes={list(self.sizes)}"
            )
        x = activations.detach().cpu()
        if len(labels) != len(x):
            raise ValueError(f"one label per example is required, got {list(labels.shape)} for {len(x)}")
        if not bool(x.isfinite().all()):
            raise ValueError("finite activations are required, got NaN or infinity")
        split = ExampleSplit.of(x, labels, self.test_share, self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        orders = [torch.randperm(len(split.train_y), generator=generator) for _ in range(self.shuffles)]
        nulls = [
            Probes.of(split._replace(train_y=split.train_y[order]), self, self.seed + i)
            for i, order in enumerate(orders)
        ]
        return [Probes.of(split, self, self.seed), *nulls]


class ExampleSplit(NamedTuple):
    """Examples to choose and fit on, and examples to score on."""

    train_x: Float[Tensor, "n m"]
    train_y: Bool[Tensor, "n"]
    test_x: Float[Tensor, "t m"]
    test_y: Bool[Tensor, "t"]

    @classmethod
    def of(cls, x: Float[Tensor, "n m"], y: Bool[Tensor, "n"], test_share: float, seed: int) -> ExampleSplit:
        """A random split with a share of each class as test examples; raises ValueError if a class has none left."""
        test = held_out(y, test_share, seed)
        return cls(x[~test], y[~test], x[test], y[test])


class Probes(NamedTuple):
    """One probe per size, made from the training examples alone, and its results on the test examples."""

    neuron: Int[Tensor, "s k"]
    """Numbers of the neurons that each probe reads, best first; -1 after the last."""
    weight: Float[Tensor, "s k"]
    """Coefficients of these neurons in the probe; NaN after the last."""
    confusion: Int[Tensor, "s 4"]
    """Test examples that are true positives, false positives, false negatives, true negatives."""

    @classmethod
    def of(cls, split: ExampleSplit, how: Procedure, seed: int) -> Probes:
        """One probe for each size of `how`, fitted on the training examples and counted on the test examples."""
        shape = len(how.sizes), max(how.sizes)
        neuron, weight, counts = torch.full(shape, -1), torch.full(shape, torch.nan).double(), []
        chosen = selected(split.train_x, split.train_y, how.sizes, select=how.select, seed=seed)
        for i, neurons in enumerate(chosen):
            train, test = (x[:, neurons].double() for x in (split.train_x, split.test_x))
            mean, spread = standard(train)
            weights, bias = logistic((train - mean) / spread, split.train_y)
            guess, truth = (test - mean) / spread @ weights + bias > 0, split.test_y
            pairs = [
                (guess, truth),
                (guess, ~truth),
                (~guess, truth),
                (~guess, ~truth),
            ]
            counts.append(torch.stack([(a & b).sum() for a, b in pairs]))
            neuron[i, : len(neurons)], weight[i, : len(neurons)] = neurons, weights
        return cls(neuron, weight, torch.stack(counts))


def held_out(labels: Bool[Tensor, "n"], test_share: float, seed: int) -> Bool[Tensor, "n"]:
    """Mask of the test examples, a random share of each class; raises ValueError if a class then has none left."""
    generator = torch.Generator().manual_seed(seed)
    if not 0 < test_share < 1:
        raise ValueError(f"test_share must be between 0 and 1, got {test_share}")
    test = torch.zeros_like(labels)
    for group in (labels.nonzero()[:, 0], (~labels).nonzero()[:, 0]):
        n = round(test_share * len(group))
        if not 1 <= n < len(group):
            raise ValueError(
                f"both classes must have examples to train on and to test on: {int(labels.sum())} positive and "
                f"{int((~labels).sum())} negative examples with a test share of {test_share} do not suffice"
            )
        test[group[torch.randperm(len(group), generator=generator)[:n]]] = True
    return test


def as_labels(labels: Labels) -> Bool[Tensor, "n"]:
    """Labels as booleans on the host; raises ValueError for anything but a list of true and false (1 and 0)."""
    values = torch.as_tensor(labels).detach().cpu()
    if values.ndim != 1:
        raise ValueError(f"one label per example is required, got {list(values.shape)}")
    if values.dtype != torch.bool and not bool(((values == 0) | (values == 1)).all()):
        raise ValueError(f"labels must be true or false (1 or 0), got {sorted(set(values.tolist()))[:5]}")
    return values.bool()


def _probe_table(
    name: str,
    activations: Sequence[Float[Tensor, "n m"]],
    labels: Bool[Tensor, "n"],
    procedure: Procedure,
    *,
    neurons: bool = False,
    **attrs: str | int | float,
) -> xr.Dataset:
    """The probes of the activations of every layer, as a Dataset.

    Args:
        neurons: whether the site holds neurons, which have names.
    """
    by_layer = [procedure.probed(x, labels) for x in activations]
    neuron, weight, _ = (
        torch.stack(values) for values in zip(*(probes[0] for probes in by_layer), strict=True)
    )
    # [repetition layer size 4]; the first repetition has the true labels
    confusion = torch.stack([torch.stack([probe.confusion for probe in probes]) for probes in by_layer], 1)
    table, null_sd, p = _scores(confusion, procedure.seed)
    dims = ("layer", "n_neurons")
    test = int(confusion[0, 0, 0].sum())
    return scored(
        name,
        table,
        dims,
        coords={
            "n_neurons": procedure.sizes, "rank": range(neuron.shape[-1]), "layer": range(len(by_layer)),
            **({"part": ((*dims, "rank"), _neuron_names(neuron))} if neurons else {}),
        },
        others={
            "null_sd": ((*dims, "score"), null_sd),
            "p": ((*dims, "score"), p),
            "neuron": ((*dims, "rank"), neuron),
            "weight": ((*dims, "rank"), weight),
        },
        units={"weight": "log odds per standard deviation"},
        attrs={
            "select": procedure.select, "train": len(labels) - test, "test": test,
            "positive_share": float(labels.double().mean()), "shuffles": procedure.shuffles, "seed": procedure.seed,
            "interval": "95 % over test examples: Wilson, balanced accuracy Newcombe, mcc bootstrap",
            "null": "mean with shuffled training labels", **attrs,
        },
    )  # fmt: skip


def _scores(
    confusion: Int[Tensor, "r l s 4"], seed: int
) -> tuple[dict[str, Score], Float[Tensor, "l s score"], Float[Tensor, "l s score"]]:
    """Every score of the first probes with the mean of the shuffled ones as null, the null's deviation, and p."""
    counts, shape = confusion[0], confusion.shape[1:-1]
    low, high = intervals(counts.flatten(0, 1), seed=seed)
    value, shuffled = scores(counts), scores(confusion[1:])
    nans = torch.full(shape, torch.nan, dtype=torch.float64)
    table = {
        name: Score(
            value[name], low[name].view(shape), high[name].view(shape), counts.sum(-1),
            shuffled[name].mean(0), UNITS[name],
        )
        for name in SCORES
    }  # fmt: skip
    spread = [x.std(0) if len(x) > 1 else nans for x in shuffled.values()]
    p = [upper_p(value[name], shuffled[name].movedim(0, -1)) for name in SCORES]
    return table, torch.stack(spread, -1), torch.stack(p, -1)


def _neuron_names(neuron: Int[Tensor, "l s k"]) -> list[list[list[str]]]:
    """The names of the chosen neurons by layer, size and rank, such as "L3N17"; "" where there is none."""
    return [
        [[str(Part("neuron", layer, i)) if i >= 0 else "" for i in ranks] for ranks in sizes]
        for layer, sizes in enumerate(neuron.tolist())
    ]


# --- which few neurons: the selectors of Gurnee et al., which see training examples only ------------------------------


def selected(
    activations: Float[Tensor, "n m"],
    labels: Bool[Tensor, "n"],
    sizes: Sequence[int],
    *,
    select: Selection = "mean_difference",
    seed: int = 0,
) -> list[Int[Tensor, "_"]]:
    """For each size k, the k neurons that separate the labels best, best first; ties go to the smaller number.

    Coefficients are those of activations in standard deviations. A constant neuron has difference, F and coefficient 0.

    Args:
        activations: [n m], of the training examples.
        labels: [n], whether each example has the feature.
        sizes: how many neurons.
        select: the criterion.
            mean_difference: |mean of the positive - mean of the negative examples|.
            f_statistic: of the one-way analysis of variance.
            mutual_information: of the neuron and the label (Kraskov's nearest-neighbour estimate, whose noise `seed`
                draws; slow, some 10 ms per neuron and thousand examples).
            l1: the largest coefficients at the strongest L1 penalty (of those that double C) that leaves k neurons.
            svm: the largest coefficients of a linear support vector machine (squared hinge loss, L2 penalty, C = 1).
            adaptive: a probe is fitted on all neurons, only the largest coefficients are kept, and so on with half as
                many, pausing at every size (adaptive thresholding; how fast to shrink is not in the paper).
            optimal: no other k of the 50 neurons of the largest mean difference (in standard deviations) fit the labels
                better by least squares (`best_subset.py`); up to k = 5, of fewer neurons more.
            random: k random neurons.
        seed: of random choices.

    Raises:
        ValueError: sizes outside 1 to m, an unknown selector, labels that are all the same.

    Example:
        >>> labels = torch.arange(20) % 2 == 0
        >>> neurons = torch.randn(20, 5)
        >>> neurons[:, 3] += 9 * labels
        >>> selected(neurons, labels, [1], select="f_statistic")[0].tolist()
        [3]
    """
    check_selection(sizes, select, activations.shape[1])
    if bool(labels.all()) or not bool(labels.any()):
        raise ValueError("examples with and without the feature are required, all labels are the same")
    if select == "l1":
        return _l1_selection(activations, labels, sizes)
    if select == "adaptive":
        return _adaptive_selection(activations, labels, sizes)
    if select == "optimal":
        return [subset.neurons for subset in best_subsets(activations, labels, sizes)]
    order = _descending_order(_SCORES[select](activations, labels, seed))
    return [order[:k] for k in sizes]


def check_selection(sizes: Sequence[int], select: str, neurons: int) -> None:
    """Raise ValueError for an unknown selector, or a size of a probe beyond the number of neurons."""
    if select not in get_args(Selection):
        raise ValueError(f"select must be one of {', '.join(get_args(Selection))}, got {select!r}")
    if not sizes or min(sizes) < 1 or max(sizes) > neurons:
        raise ValueError(f"sizes from 1 to {neurons}, the neurons there are, are required, got {list(sizes)}")
    if select == "optimal":
        check_sizes(sizes, min(neurons, CANDIDATES))


def standard(activations: Float[Tensor, "n m"]) -> tuple[Float[Tensor, "m"], Float[Tensor, "m"]]:
    """Mean and standard deviation of each neuron, in float64; 1 where it is constant, so that nothing divides by 0."""
    x = activations.double()
    spread = x.std(0, correction=0)
    constant = activations.amax(0) == activations.amin(0)
    return x.mean(0), spread.masked_fill(constant, 1.0)


def logistic(
    x: Float[Tensor, "n m"], labels: Bool[Tensor, "n"]
) -> tuple[Float[Tensor, "m"], Float[Tensor, ""]]:
    """Coefficients and intercept of a logistic regression, both classes weighing the same (L2 penalty, C = 1)."""
    from sklearn.linear_model import LogisticRegression

    return _coefficients(LogisticRegression(class_weight="balanced", max_iter=1000), x, labels)


def _mean_difference(x: Float[Tensor, "n m"], labels: Bool[Tensor, "n"], seed: int) -> Float[Tensor, "m"]:
    wide = x.double()
    return (wide[labels].mean(0) - wide[~labels].mean(0)).abs()


def _f_statistic(x: Float[Tensor, "n m"], labels: Bool[Tensor, "n"], seed: int) -> Float[Tensor, "m"]:
    """The F statistic of each neuron between the classes; 0 for a constant neuron."""
    import numpy as np
    from sklearn.feature_selection import f_classif

    varies = x.amax(0) > x.amin(0)
    scores = torch.zeros(x.shape[1], dtype=torch.float64)
    if bool(varies.any()):
        with np.errstate(divide="ignore"):  # a neuron that is constant within both classes scores infinity
            f_values, _ = f_classif(x[:, varies].double().numpy(), labels.numpy())
        scores[varies] = torch.from_numpy(f_values)
    return scores


def _mutual_information(x: Float[Tensor, "n m"], labels: Bool[Tensor, "n"], seed: int) -> Float[Tensor, "m"]:
    from sklearn.feature_selection import mutual_info_classif

    return torch.from_numpy(mutual_info_classif(x.double().numpy(), labels.numpy(), random_state=seed))


def _svm(x: Float[Tensor, "n m"], labels: Bool[Tensor, "n"], seed: int) -> Float[Tensor, "m"]:
    """The size of each neuron's coefficient in a linear support vector machine."""
    from sklearn.svm import LinearSVC

    mean, spread = standard(x)
    machine = LinearSVC(class_weight="balanced", dual="auto", random_state=seed, max_iter=10_000)
    return _coefficients(machine, (x.double() - mean) / spread, labels)[0].abs()


def _random(x: Float[Tensor, "n m"], labels: Bool[Tensor, "n"], seed: int) -> Float[Tensor, "m"]:
    return torch.rand(x.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


_SCORES: dict[str, Callable[[Tensor, Tensor, int], Float[Tensor, "m"]]] = {
    "mean_difference": _mean_difference,
    "f_statistic": _f_statistic,
    "mutual_information": _mutual_information,
    "svm": _svm,
    "random": _random,
}
"""The selectors that score each neuron by itself, by name."""


def _descending_order(scores: Float[Tensor, "m"]) -> Int[Tensor, "m"]:
    return scores.argsort(descending=True, stable=True)


def _l1_selection(
    x: Float[Tensor, "n m"], labels: Bool[Tensor, "n"], sizes: Sequence[int]
) -> list[Int[Tensor, "_"]]:
    """The k neurons of each size by the L1 penalty: the penalty is halved until k coefficients are not 0."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.svm import l1_min_c

    mean, spread = standard(x)
    z = (x.double() - mean) / spread
    # Where fewer than k coefficients are not 0 even at the weakest penalty, mean differences order those at 0.
    first = _descending_order(_mean_difference(z, labels, 0))
    strongest = l1_min_c(z.numpy(), labels.numpy(), loss="log")
    selected: dict[int, Tensor] = {}
    for doubling in range(WEAKEST + 1):
        model = LogisticRegression(
            C=strongest * 2**doubling, l1_ratio=1.0, solver="liblinear", class_weight="balanced",
            max_iter=1000, random_state=0,
        )  # fmt: skip
        size = _coefficients(model, z, labels)[0].abs()[first]
        order = first[_descending_order(size)]
        survivors = len(x[0]) if doubling == WEAKEST else int((size > 0).sum())
        selected |= {k: order[:k] for k in sizes if k <= survivors and k not in selected}
        if len(selected) == len(set(sizes)):
            break
    return [selected[k] for k in sizes]


def _adaptive_selection(
    x: Float[Tensor, "n m"], labels: Bool[Tensor, "n"], sizes: Sequence[int]
) -> list[Int[Tensor, "_"]]:
    """The k neurons of each size by repeated fits, each on the half with the largest coefficients of the fit before."""
    mean, spread = standard(x)
    z = (x.double() - mean) / spread
    survivors = torch.arange(x.shape[1])
    halves = {x.shape[1] >> i for i in range(1, x.shape[1].bit_length())}
    selected = {}
    for size in sorted(halves | set(sizes), reverse=True):
        if size < min(sizes):
            break
        weights, _ = logistic(z[:, survivors], labels)
        survivors = survivors[_descending_order(weights.abs())[:size]]
        selected[size] = survivors
    return [selected[k] for k in sizes]


def _coefficients(
    model: "LogisticRegression | LinearSVC", x: Float[Tensor, "n m"], labels: Bool[Tensor, "n"]
) -> tuple[Float[Tensor, "m"], Float[Tensor, ""]]:
    model.fit(x.numpy(), labels.numpy())
    return torch.from_numpy(model.coef_[0].copy()), torch.tensor(float(model.intercept_[0])).double()


# --- how well a yes-or-no guess did -----------------------------------------------------------------------------------


def scores(confusion: Int[Tensor, "... 4"]) -> dict[str, Float[Tensor, "..."]]:
    """F1, precision, recall, accuracy, balanced accuracy and MCC of counts TP, FP, FN, TN; 0 where undefined.

    Example:
        >>> float(scores(torch.tensor([3, 1, 1, 5]))["precision"])
        0.75
    """
    tp, fp, fn, tn = confusion.double().unbind(-1)
    recall, specificity = _share(tp, tp + fn), _share(tn, tn + fp)
    return {
        "f1": _share(2 * tp, 2 * tp + fp + fn),
        "precision": _share(tp, tp + fp),
        "recall": recall,
        "accuracy": _share(tp + tn, tp + fp + fn + tn),
        "balanced_accuracy": (recall + specificity) / 2,
        "mcc": _share(tp * tn - fp * fn, ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)).sqrt()),
    }


def intervals(
    confusion: Int[Tensor, "k 4"], *, draws: int = DRAWS, seed: int = 0
) -> tuple[dict[str, Float[Tensor, "k"]], dict[str, Float[Tensor, "k"]]]:
    """Low and high ends of the 95 % intervals of all `scores`, over test examples, of the kinds that `probe` names.

    F1 is 2 j / (1 + j) with j = TP / (TP + FP + FN), so the ends of j's Wilson interval give those of F1. Resampling
    examples with replacement draws their four counts from a multinomial distribution: that is the bootstrap of MCC.
    """
    tp, fp, fn, tn = confusion.double().unbind(-1)
    value = scores(confusion)
    counted = {"precision": tp + fp, "recall": tp + fn, "accuracy": tp + fp + fn + tn}
    ends = {name: wilson(value[name], n) for name, n in counted.items()}
    low, high = wilson(_share(tp, tp + fp + fn), tp + fp + fn)
    ends["f1"] = 2 * low / (1 + low), 2 * high / (1 + high)
    recall, specificity = value["recall"], _share(tn, tn + fp)
    (low_1, high_1), (low_0, high_0) = ends["recall"], wilson(specificity, tn + fp)
    balanced = value["balanced_accuracy"]
    ends["balanced_accuracy"] = (
        balanced - torch.hypot(recall - low_1, specificity - low_0) / 2,
        balanced + torch.hypot(recall - high_1, specificity - high_0) / 2,
    )
    drawn = torch.stack([_bootstrap_counts(counts, draws, seed) for counts in confusion], 1)
    low, high = torch.quantile(scores(drawn)["mcc"], torch.tensor([0.025, 0.975]).double(), dim=0)
    ends["mcc"] = low, high
    return {name: pair[0] for name, pair in ends.items()}, {name: pair[1] for name, pair in ends.items()}


def _share(numerator: Float[Tensor, "..."], denominator: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return torch.where(denominator > 0, numerator / denominator.where(denominator > 0, 1.0), 0.0)


def _bootstrap_counts(counts: Int[Tensor, "4"], draws: int, seed: int) -> Int[Tensor, "draws 4"]:
    """Confusion counts of bootstrap samples with as many examples as `counts` has."""
    import numpy as np

    n = int(counts.sum())
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.multinomial(n, counts.double().numpy() / n, size=draws))
