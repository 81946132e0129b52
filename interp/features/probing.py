"""Is a feature in a few neurons? k-sparse probes (Gurnee et al. 2023, "Finding neurons in a haystack").

A probe is a logistic regression on a few chosen neurons. Choosing and fitting see the training examples, scores come
from the test examples; a second number, with shuffled labels, says what the same procedure finds in noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import Seed
from interp.core.results import Score, scored
from interp.core.shapes import describe
from interp.core.stats import Partial, Rows
from interp.data.batch import Batch
from interp.data.sources import Data
from interp.data.stream import DataSource
from interp.features.neuron_selection import Selection, check_selection, logistic, selected, standard
from interp.features.probe_scores import SCORES, UNITS, intervals, scores
from interp.model.config import ModelConfig
from interp.model.edits import Edit
from interp.model.mask import Layout
from interp.model.parts import KINDS, Part, axis_size
from interp.model.sites import find, full_name
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.analysis import Analysis, Question
from interp.passes.observe import Model, Subject, deepest, observe
from interp.runs.run import answered

if TYPE_CHECKING:
    import xarray as xr

Labels = Sequence[bool] | Sequence[int] | Tensor
"""Whether each example has the feature: booleans, or 0 and 1."""
Position = Literal["mean"] | int
"""What stands for a text: the mean over its tokens (BOS aside), or one token by number, negative from the end."""
SIZES = (1, 2, 4, 8, 16)
"""How many neurons the probes read, unless told otherwise."""


@dataclass(frozen=True, eq=False)
class ProbeNeurons(Question):
    """How well a few neurons of each layer tell prompts with a feature from those without; see `probe_neurons`."""

    labels: Labels
    """Whether each prompt has the feature."""
    site: str = "post"
    """The site in every layer, with one vector per position."""
    pos: Position = "mean"
    """What stands for a prompt: the mean over its tokens, or one token, negative from the end."""
    sizes: Sequence[int] = SIZES
    """How many neurons the probes read."""
    select: Selection = "mean_difference"
    """How neurons are chosen."""
    test_share: float = 0.3
    """The share of each class that is set aside for the scores."""
    shuffles: int = 5
    """How often the procedure is repeated with shuffled training labels, for the null."""
    seed: Seed = 0
    """Of the split, the shuffles and the bootstrap."""

    def asked(self, model: Subject) -> Analysis:
        """One vector per prompt and layer, reduced where it arises; the probes are made of all of them at the end."""
        config = model.transformer.config
        layers = range(config.n_layers)
        sites = [
            f"blocks.{i}.{self.site}" if "hook_" in self.site else full_name(self.site, i) for i in layers
        ]
        if isinstance(self.pos, bool) or not (self.pos == "mean" or isinstance(self.pos, int)):
            raise ValueError(f"pos must be 'mean' or the number of a token, got {self.pos!r}")
        procedure = Procedure(tuple(self.sizes), self.select, self.test_share, self.shuffles, self.seed)
        labels = as_labels(self.labels)
        check_selection(self.sizes, self.select, _width(sites, config))
        held_out(labels, self.test_share, self.seed)
        return Analysis(
            self.name,
            partial(_compute, sites=sites, pos=self.pos),
            Rows,
            partial(
                _finish, name=self.name, sites=sites, labels=labels, procedure=procedure,
                attrs={"site": self.site, "pos": self.pos},
            ),
            rows=len(labels),
        )  # fmt: skip


@public()
def probe_neurons(
    model: Model,
    data: DataSource | Data,
    labels: Labels,
    *,
    site: str = "post",
    pos: Position = "mean",
    sizes: Sequence[int] = SIZES,
    select: Selection = "mean_difference",
    test_share: float = 0.3,
    shuffles: int = 5,
    seed: Seed = 0,
    edits: Sequence[Edit] = (),
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> xr.Dataset:
    """How well a few neurons of each layer tell prompts with a feature from those without.

    Returns Dataset[layer, n_neurons, score]: what `probe` gives, at every layer. The coordinate `part` names the
    neurons chosen, where the site holds neurons.
    labels: one per prompt, in the order of the data. site: one with a vector per position in every layer, the neurons
    ("post") or a stream, whose dimensions then are the neurons. pos: the mean over the tokens suits features of a whole
    text (its language), which is what Gurnee et al. do, and the BOS that a batch has does not count; or one token of
    each prompt. For labels of single tokens write the activations to a store and `probe` them.
    Errors: those of `probe`; KeyError for a site that the model lacks; IndexError for a position that a prompt lacks;
    ValueError for packed rows and sites without one vector per position.

    Example:
        >>> texts = ["The cat sat on the mat", "When Mary went to the shop"] * 8
        >>> found = probe_neurons(model, texts, [True, False] * 8, sizes=(1, 2))
        >>> found.value.dims
        ('layer', 'n_neurons', 'score')
    """
    question = ProbeNeurons(labels, site, pos, sizes, select, test_share, shuffles, seed)
    return answered(question, model, data, edits=edits, prepend_bos=prepend_bos, batch_size=batch_size)


@public()
def probe(
    activations: Float[Tensor, "n m"],
    labels: Labels,
    *,
    sizes: Sequence[int] = SIZES,
    select: Selection = "mean_difference",
    test_share: float = 0.3,
    shuffles: int = 5,
    seed: Seed = 0,
) -> xr.Dataset:
    """How well probes on a few of the neurons find the feature in examples they were not made from.

    Returns Dataset[n_neurons, score] for probes on so many neurons (`sizes`): `value`, `low`, `high` (95 %), `null` and
    `null_sd`, the mean and deviation over `shuffles` repetitions of the whole procedure with the training labels
    shuffled, and `n`, the test examples. Scores: `f1`, `precision`, `recall`, `accuracy`, `balanced_accuracy` and `mcc`
    (Matthews' correlation), 0 where undefined. `neuron` and `weight` [n_neurons, rank]: the neurons chosen, best first,
    and their coefficients (log odds per standard deviation); -1 and NaN beyond the last.

    A `test_share` of each class is set aside by `seed`; scaling, choice and fit see the rest. Classes weigh the same.
    Intervals: Wilson's for the shares (of F1 by 2 j / (1 + j), j = TP / (TP + FP + FN)), Newcombe's for their mean
    (balanced accuracy), the bootstrap over test examples for MCC, which has no width where no example is wrong. They
    hold the probe fixed. Caveats: several neurons may carry the feature, and a size alone never says that none other
    does; what is found is a correlation: ablate the neurons to see whether the model uses them.
    Errors: ValueError for labels other than true and false or one per example, a class without examples in one of the
    parts, sizes beyond the neurons, activations that are not finite.

    Example:
        >>> labels = torch.arange(40) % 2 == 0
        >>> neurons = torch.randn(40, 5)
        >>> neurons[:, 3] += 9 * labels
        >>> found = probe(neurons, labels, sizes=(1, 2))
        >>> found.neuron.values[0].tolist(), float(found.value.sel(score="f1")[0])
        ([3, -1], 1.0)
    """
    procedure = Procedure(tuple(sizes), select, test_share, shuffles, seed)
    return _table("probe", [procedure.probed(activations, as_labels(labels))], procedure, {})


@dataclass(frozen=True, eq=False)
class Probe:
    """A probe on a few neurons, and how it did on the test examples."""

    neurons: Int[Tensor, "k"]
    weights: Float[Tensor, "k"]
    confusion: Int[Tensor, 4]
    """Test examples that are true positives, false positives, false negatives, true negatives."""


@dataclass(frozen=True, eq=False)
class Split:
    """Examples to choose and fit on, and examples to score on."""

    train_x: Float[Tensor, "n m"]
    train_y: Bool[Tensor, "n"]
    test_x: Float[Tensor, "t m"]
    test_y: Bool[Tensor, "t"]

    @classmethod
    def of(cls, x: Float[Tensor, "n m"], y: Bool[Tensor, "n"], test_share: float, seed: int) -> Split:
        """A share of each class is set aside at random. Errors: ValueError if that leaves a class without examples."""
        test = held_out(y, test_share, seed)
        return cls(x[~test], y[~test], x[test], y[test])

    def shuffled(self, generator: torch.Generator) -> Split:
        """The same with the training labels in random order."""
        order = torch.randperm(len(self.train_y), generator=generator)
        return Split(self.train_x, self.train_y[order], self.test_x, self.test_y)

    def probes(self, sizes: Sequence[int], select: Selection, seed: int) -> list[Probe]:
        """One probe per size, made from the training examples alone."""
        chosen = selected(self.train_x, self.train_y, sizes, select=select, seed=seed)
        return [self._probe(neurons) for neurons in chosen]

    def _probe(self, neurons: Int[Tensor, "k"]) -> Probe:
        train, test = (part[:, neurons].double() for part in (self.train_x, self.test_x))
        mean, spread = standard(train)
        weights, bias = logistic((train - mean) / spread, self.train_y)
        guess = (test - mean) / spread @ weights + bias > 0
        pairs = [(guess, self.test_y), (guess, ~self.test_y), (~guess, self.test_y), (~guess, ~self.test_y)]
        return Probe(neurons, weights, torch.stack([(a & b).sum() for a, b in pairs]))


def held_out(labels: Bool[Tensor, "n"], test_share: float, seed: int) -> Bool[Tensor, "n"]:
    """Which examples are set aside, a share of each class. ValueError if that leaves a class without examples."""
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
    """Labels as booleans on the host. ValueError for anything but a list of true and false."""
    given = torch.as_tensor(labels).detach().cpu()
    if given.ndim != 1:
        raise ValueError(f"one label per example is required, got {list(given.shape)}")
    if given.dtype != torch.bool and not bool(((given == 0) | (given == 1)).all()):
        raise ValueError(f"labels must be true or false (1 or 0), got {sorted(set(given.tolist()))[:5]}")
    return given.bool()


@dataclass(frozen=True)
class Procedure:
    """How probes are made and judged; `probe` says what each field means."""

    sizes: tuple[int, ...]
    select: Selection
    test_share: float
    shuffles: int
    seed: int

    def probed(self, activations: Float[Tensor, "n m"], labels: Bool[Tensor, "n"]) -> Probed:
        """The probes of some examples, and those with shuffled labels. Errors: see `probe`."""
        x = activations.detach().cpu()
        if len(labels) != len(x):
            raise ValueError(f"one label per example is required, got {list(labels.shape)} for {len(x)}")
        if not bool(x.isfinite().all()):
            raise ValueError("finite activations are required, got NaN or infinity")
        split = Split.of(x, labels, self.test_share, self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        made = split.probes(self.sizes, self.select, self.seed)
        nulls = [
            split.shuffled(generator).probes(self.sizes, self.select, self.seed + i)
            for i in range(self.shuffles)
        ]
        return Probed(made, nulls, split)


@dataclass(frozen=True, eq=False)
class Probed:
    """The probes of one set of activations, by size, and those of every repetition with shuffled labels."""

    made: Sequence[Probe]
    nulls: Sequence[Sequence[Probe]]
    split: Split

    def chosen(self, width: int) -> tuple[Int[Tensor, "s k"], Float[Tensor, "s k"]]:
        """The neurons that each probe reads and their weights, -1 and NaN after the last."""
        neuron = torch.full((len(self.made), width), -1)
        weight = torch.full((len(self.made), width), torch.nan, dtype=torch.float64)
        for i, each in enumerate(self.made):
            neuron[i, : len(each.neurons)], weight[i, : len(each.neurons)] = each.neurons, each.weights
        return neuron, weight


def _table(
    name: str,
    found: Sequence[Probed],
    procedure: Procedure,
    attrs: Mapping[str, str | int | float],
    sites: Sequence[str] | None = None,
) -> xr.Dataset:
    """The scores of probes: of one set of activations, or of one per layer."""
    split, width = found[0].split, max(procedure.sizes)
    dims = ("layer", "n_neurons") if sites is not None else ("n_neurons",)
    neuron, weight = (torch.stack(each) for each in zip(*(one.chosen(width) for one in found), strict=True))
    coords: dict[str, object] = {"n_neurons": procedure.sizes, "rank": range(width)}
    if sites is None:
        neuron, weight = neuron[0], weight[0]
    else:
        coords["layer"] = range(len(sites))
        if Part.of(sites[0]).kind == KINDS["neuron"].site:
            coords["part"] = ((*dims, "rank"), _names(neuron))
    table, null_sd = _scores(found, procedure.seed, layered=sites is not None)
    y = torch.cat((split.train_y, split.test_y))
    return scored(
        name,
        table,
        dims,
        coords=coords,
        others={
            "null_sd": ((*dims, "score"), null_sd),
            "neuron": ((*dims, "rank"), neuron),
            "weight": ((*dims, "rank"), weight),
        },
        units={"weight": "log odds per standard deviation"},
        attrs={
            "select": procedure.select, "train": len(split.train_y), "test": len(split.test_y),
            "positive_share": float(y.double().mean()), "shuffles": procedure.shuffles, "seed": procedure.seed,
            "interval": "95 % over test examples: Wilson, balanced accuracy Newcombe, mcc bootstrap",
            "null": "mean with shuffled training labels", **attrs,
        },
    )  # fmt: skip


def _scores(
    found: Sequence[Probed], seed: int, *, layered: bool
) -> tuple[dict[str, Score], Float[Tensor, "..."]]:
    """Every score of the probes `[layer size]` (without layers `[size]`), and the deviation of its null."""
    counts = torch.stack([torch.stack([each.confusion for each in one.made]) for one in found])
    shape = counts.shape[:-1] if layered else counts.shape[1:-1]
    low, high = intervals(counts.flatten(0, 1), seed=seed)
    value = scores(counts)
    n = torch.full(shape, len(found[0].split.test_y))
    nothing = torch.full((1, *shape), torch.nan, dtype=torch.float64)
    shuffled = dict.fromkeys(SCORES, nothing)
    if found[0].nulls:
        nulls = [
            torch.stack([torch.stack([e.confusion for e in null]) for null in one.nulls]) for one in found
        ]
        shuffled = {name: x.reshape(-1, *shape) for name, x in scores(torch.stack(nulls, 1)).items()}
    table = {
        name: Score(
            value[name].reshape(shape), low[name].reshape(shape), high[name].reshape(shape), n,
            shuffled[name].mean(0), UNITS[name],
        )
        for name in SCORES
    }  # fmt: skip
    spread = {name: x.std(0) if len(x) > 1 else nothing[0] for name, x in shuffled.items()}
    return table, torch.stack(list(spread.values()), -1)


def _names(neuron: Int[Tensor, "l s k"]) -> list[list[list[str]]]:
    """The neurons of every layer by name, "" for none."""
    return [
        [[str(Part("neuron", layer, i)) if i >= 0 else "" for i in ranks] for ranks in sizes]
        for layer, sizes in enumerate(neuron.tolist())
    ]


def _width(sites: Sequence[str], config: ModelConfig) -> int:
    """How many neurons a site has at one position. ValueError for one without one vector per position."""
    for site in sites:
        axes = find(site, config)[0].axes
        if axes not in ("b p m", "b p d"):
            raise ValueError(f"a site with one vector per position is required, {site!r} is {describe(axes)}")
    return axis_size("m", config) if axes.endswith("m") else config.d_model


def _compute(
    trace: Trace, batch: Batch, model: Transformer, sites: Sequence[str], pos: Position
) -> Mapping[str, Tensor]:
    return pooled(model, batch, sites, pos)


@torch.no_grad()
def pooled(
    model: Transformer, batch: Batch, sites: Sequence[str], pos: Position
) -> dict[str, Float[Tensor, "b m"]]:
    """One vector per prompt at each site, by site: the mean over its tokens, or one token's; reduced at the site.

    Errors: ValueError for packed rows, IndexError for a missing position.

    Example:
        >>> site = "blocks.0.hook_resid_post"
        >>> pooled(model.transformer, model.text.batch(prompt), [site], -1)[site].shape
        torch.Size([1, 24])
    """
    share = _shares(batch, pos).to(model.device)
    reads = [Read(site, partial(_weighted, share_bp=share)) for site in sites]
    trace = observe(model, batch, reads, stop=deepest(sites, model.config), answers_only=True).trace
    return {read.site: trace[read] for read in reads}


def _shares(batch: Batch, pos: Position) -> Float[Tensor, "b p"]:
    """How much each token counts in the vector of its text."""
    if batch.documents is not None:
        raise ValueError("one vector per prompt requires one text per row, this batch is packed")
    tokens, real, length = batch.tokens, batch.real, batch.lengths[:, None]
    place = Layout(batch.keep).positions(tokens.shape[1], 0, tokens.device).expand_as(tokens)
    if isinstance(pos, str):
        counted = real & (place > 0) if batch.bos else real
        if not bool(counted.any(1).all()):
            raise ValueError("a token besides BOS is required in every prompt to take the mean over")
        return counted.double() / counted.sum(1, keepdim=True)
    if not -int(length.min()) <= pos < int(length.min()):
        raise IndexError(
            f"a position that every prompt has is required, the shortest has {int(length.min())} tokens; got {pos}"
        )
    return (real & (place == pos % length)).double()


def _weighted(value: Float[Tensor, "b p m"], *, share_bp: Float[Tensor, "b p"]) -> Float[Tensor, "b m"]:
    wide = torch.promote_types(value.dtype, torch.float32)
    return torch.einsum("bpm, bp -> bm", value.to(wide), share_bp.to(value.device, wide))


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
    found = [procedure.probed(merged.rows[site], labels[ids]) for site in sites]
    return _table(name, found, procedure, attrs, sites)
