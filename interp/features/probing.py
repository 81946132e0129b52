"""Is a feature in a few neurons? k-sparse probes (Gurnee et al. 2023, "Finding neurons in a haystack").

A probe is a logistic regression on k chosen neurons. Choosing and fitting see the training examples, scores come from
the test examples; a second number, with shuffled labels, says what the same procedure finds where there is nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.results import labelled
from interp.core.shapes import describe
from interp.data.batch import Batch
from interp.data.text import Prompts
from interp.features.neuron_selection import Selection, logistic, selected, standard
from interp.features.probe_scores import intervals, scores
from interp.model.mask import Layout
from interp.model.sites import find, full_name
from interp.model.tap import Read
from interp.passes.observe import Subject, deepest, observe

if TYPE_CHECKING:
    import xarray as xr

Labels = Sequence[bool] | Sequence[int] | Tensor
"""Whether each example has the feature: booleans, or 0 and 1."""
Position = Literal["mean", "last"] | int
"""What stands for a text: the mean over its tokens (BOS aside), the last, or one by number, negative from the end."""
KS = (1, 2, 4, 8, 16)
Variables = dict[str, tuple[Sequence[str], Tensor]]


def probe_neurons(
    model: Subject,
    prompts: Prompts,
    labels: Labels,
    *,
    site: str = "post",
    positions: Position = "mean",
    k: Sequence[int] = KS,
    select: Selection = "mean_difference",
    test_share: float = 0.3,
    shuffles: int = 5,
    seed: int = 0,
    batch_size: int = 32,
) -> "xr.Dataset":
    """How well k neurons of each layer tell prompts with a feature from those without: Dataset[layer, k].

    What `probe` gives, at every layer. site: one with a vector per position, `mlp.hook_post` or a stream, whose
    dimensions then are the neurons. positions: the mean over the tokens suits features of a whole text (its language),
    which is what Gurnee et al. do; the BOS that a batch has does not count. For labels of single tokens write the
    activations to a store and `probe` them. Errors: those of `probe`, KeyError for a site that the model lacks,
    IndexError for a position that a prompt lacks.

    Example:
        >>> texts = ["The cat sat on the mat", "When Mary went to the shop"] * 8
        >>> found = probe_neurons(model, texts, [True, False] * 8, k=(1, 2))
        >>> found.f1.dims
        ('layer', 'k')
    """
    import xarray as xr

    layers = range(model.transformer.config.n_layers)
    sites = [f"blocks.{i}.{site}" if "hook_" in site else full_name(site, i) for i in layers]
    values = pooled(model, prompts, sites, positions=positions, batch_size=batch_size)
    ask = partial(
        probe, labels=labels, k=k, select=select, test_share=test_share, shuffles=shuffles, seed=seed
    )
    parts = [ask(values[name]) for name in sites]
    joined = xr.concat(parts, dim="layer", combine_attrs="identical")
    return joined.assign_coords(layer=list(layers)).assign_attrs(
        interp_analysis="probe_neurons", site=site, positions=positions
    )


def probe(
    activations: Float[Tensor, "n m"],
    labels: Labels,
    *,
    k: Sequence[int] = KS,
    select: Selection = "mean_difference",
    test_share: float = 0.3,
    shuffles: int = 5,
    seed: int = 0,
) -> "xr.Dataset":
    """How well probes on k of the neurons find the feature in examples they were not made from: Dataset[k].

    Variables: `f1`, `precision`, `recall`, `accuracy`, `balanced_accuracy` and `mcc` (Matthews' correlation), all of
    the test examples, 0 where undefined; each with `_low` and `_high`, a 95 % interval, and `_null`, its mean over
    `shuffles` repetitions of the whole procedure with the training labels shuffled. `neuron` and `weight` [k, rank]:
    the neurons chosen, best first, and their coefficients (log odds per standard deviation); -1 and NaN beyond k.

    A `test_share` of each class is set aside by `seed`; scaling, choice and fit see the rest. Classes weigh the same.
    Intervals: Wilson's for the shares (of F1 by 2 j / (1 + j), j = TP / (TP + FP + FN)), Newcombe's for their mean
    (balanced accuracy), the bootstrap over test examples for MCC, which has no width where no example is wrong. They
    hold the probe fixed. Caveats: several neurons may carry the feature, and k alone never says that none other does;
    what is found is a correlation: ablate the neurons to see whether the model uses them.
    Errors: ValueError for labels other than true and false or one per example, a class without examples in one of the
    parts, k beyond the neurons, activations that are not finite.

    Example:
        >>> labels = torch.arange(40) % 2 == 0
        >>> neurons = torch.randn(40, 5)
        >>> neurons[:, 3] += 9 * labels
        >>> found = probe(neurons, labels, k=(1, 2))
        >>> found.neuron.values[0].tolist(), float(found.f1[0])
        ([3, -1], 1.0)
    """
    x, y = _checked(activations, labels)
    split = Split.of(x, y, test_share, seed)
    dice = torch.Generator().manual_seed(seed)
    made = split.probes(k, select, seed)
    nulls = [split.shuffled(dice).probes(k, select, seed + i) for i in range(shuffles)]
    return labelled(
        "probe",
        _scored(made, nulls, seed) | _choices(made, max(k)),
        coords={"k": list(k), "rank": range(max(k))},
        attrs={
            "select": select, "train": len(split.train_y), "test": len(split.test_y),
            "positive_share": float(y.double().mean()), "shuffles": shuffles, "seed": seed,
            "unit": "share of test examples; mcc a correlation; weight in log odds per standard deviation",
            "interval": "95 % over test examples: Wilson, balanced accuracy Newcombe, mcc bootstrap",
            "null": "mean with shuffled training labels",
        },
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Probe:
    """A probe on a few neurons, and how it did on the test examples."""

    neurons: Int[Tensor, "k"]
    weights: Float[Tensor, "k"]
    confusion: Int[Tensor, "4"]
    """Test examples that are true positives, false positives, false negatives, true negatives."""


@dataclass(frozen=True, eq=False)
class Split:
    """Examples to choose and fit on, and examples to score on."""

    train_x: Float[Tensor, "n m"]
    train_y: Bool[Tensor, "n"]
    test_x: Float[Tensor, "t m"]
    test_y: Bool[Tensor, "t"]

    @classmethod
    def of(cls, x: Float[Tensor, "n m"], y: Bool[Tensor, "n"], test_share: float, seed: int) -> "Split":
        """A share of each class is set aside at random. Errors: ValueError if that leaves a class without examples."""
        dice = torch.Generator().manual_seed(seed)
        test = torch.zeros_like(y)
        for group in (y.nonzero()[:, 0], (~y).nonzero()[:, 0]):
            n = round(test_share * len(group))
            if not 1 <= n < len(group):
                raise ValueError(
                    f"both classes must have examples to train on and to test on: {int(y.sum())} positive and "
                    f"{int((~y).sum())} negative examples with a test share of {test_share} do not suffice"
                )
            test[group[torch.randperm(len(group), generator=dice)[:n]]] = True
        return cls(x[~test], y[~test], x[test], y[test])

    def shuffled(self, dice: torch.Generator) -> "Split":
        """The same with the training labels in random order."""
        order = torch.randperm(len(self.train_y), generator=dice)
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


def _scored(made: Sequence[Probe], nulls: Sequence[Sequence[Probe]], seed: int) -> Variables:
    """The scores of some probes, the ends of their intervals, and what shuffled labels give on average."""
    counts = torch.stack([each.confusion for each in made])
    low, high = intervals(counts, seed=seed)
    columns = {"": scores(counts), "_low": low, "_high": high}
    if nulls:
        shuffled = torch.stack([torch.stack([each.confusion for each in null]) for null in nulls])
        columns["_null"] = {name: each.mean(0) for name, each in scores(shuffled).items()}
    return {name + end: (("k",), value) for end, found in columns.items() for name, value in found.items()}


def _choices(made: Sequence[Probe], width: int) -> Variables:
    """The neurons that each probe reads and their weights, -1 and NaN behind the last."""
    neuron = torch.full((len(made), width), -1)
    weight = torch.full((len(made), width), torch.nan, dtype=torch.float64)
    for i, each in enumerate(made):
        neuron[i, : len(each.neurons)], weight[i, : len(each.neurons)] = each.neurons, each.weights
    return {"neuron": (("k", "rank"), neuron), "weight": (("k", "rank"), weight)}


@torch.no_grad()
def pooled(
    model: Subject,
    prompts: Prompts,
    sites: Sequence[str],
    *,
    positions: Position = "mean",
    batch_size: int = 32,
) -> Mapping[str, Float[Tensor, "n m"]]:
    """One vector per prompt at each site, by site: the mean over its tokens, or one token's; reduced at the site.

    Errors: ValueError for packed rows and sites without one vector per position, IndexError for a missing position.

    Example:
        >>> pooled(model, prompt, ["blocks.0.hook_resid_post"], positions="last")["blocks.0.hook_resid_post"].shape
        torch.Size([1, 24])
    """
    config = model.transformer.config
    for site in sites:
        axes = find(site, config)[0].axes
        if axes not in ("b p m", "b p d"):
            raise ValueError(f"a site with one vector per position is required, {site!r} is {describe(axes)}")
    stop, parts = deepest(sites, config), []
    for batch in model.text.batch(prompts).split(batch_size):
        share = _shares(batch, positions).to(model.transformer.device)
        reads = [Read(site, partial(_weighted, share_bp=share)) for site in sites]
        trace = observe(model.transformer, batch, reads, stop=stop, answers_only=True).trace
        parts.append({read.site: trace[read].cpu() for read in reads})
    return {site: torch.cat([part[site] for part in parts]) for site in sites}


def _shares(batch: Batch, positions: Position) -> Float[Tensor, "b p"]:
    """How much each token counts in the vector of its text."""
    if batch.documents is not None:
        raise ValueError("one vector per prompt requires one text per row, this batch is packed")
    tokens, real, length = batch.tokens, batch.real, batch.lengths[:, None]
    place = Layout(batch.keep).positions(tokens.shape[1], 0, tokens.device).expand_as(tokens)
    if positions == "mean":
        counted = real & (place > 0) if batch.bos else real
        if not bool(counted.any(1).all()):
            raise ValueError("a token besides BOS is required in every prompt to take the mean over")
        return counted.double() / counted.sum(1, keepdim=True)
    wanted = -1 if positions == "last" else positions
    if isinstance(wanted, str):
        raise ValueError(f"positions must be mean, last or a number, got {wanted!r}")
    if not -int(length.min()) <= wanted < int(length.min()):
        raise IndexError(
            f"a position that every prompt has is required, the shortest has {int(length.min())} tokens; got {wanted}"
        )
    return (real & (place == wanted % length)).double()


def _weighted(value: Float[Tensor, "b p m"], *, share_bp: Float[Tensor, "b p"]) -> Float[Tensor, "b m"]:
    wide = torch.promote_types(value.dtype, torch.float32)
    return torch.einsum("bpm, bp -> bm", value.to(wide), share_bp.to(value.device, wide))


def _checked(activations: Float[Tensor, "n m"], labels: Labels) -> tuple[Tensor, Bool[Tensor, "n"]]:
    y = torch.as_tensor(labels).detach().cpu()
    if y.shape != activations.shape[:1]:
        raise ValueError(f"one label per example is required, got {list(y.shape)} for {len(activations)}")
    if y.dtype != torch.bool and not bool(((y == 0) | (y == 1)).all()):
        raise ValueError(f"labels must be true or false (1 or 0), got {sorted(set(y.tolist()))[:5]}")
    if not bool(activations.isfinite().all()):
        raise ValueError("finite activations are required, got NaN or infinity")
    return activations.detach().cpu(), y.bool()
