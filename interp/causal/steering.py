"""Steering: directions that tell two kinds of prompts apart, the effect of adding them, and what it costs elsewhere.

d_l = mean of the positive - mean of the negative states of layer l (Marks and Tegmark 2023; Rimsky et al. 2023), or
the same difference along one axis: a principal component (Zou et al. 2023), the normal of a probe, a feature's decoder
row. The effect of a dose is compared with that of random directions of the same length at the same place: any long
vector moves a model, and what it costs elsewhere is a number too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.causal.effects import SIGN, site_coords
from interp.causal.feature_steering import (
    NULLS,
    ActivationUnit,
    Activity,
    FeatureDoses,
    FeatureMode,
    Push,
    activity_rows,
)
from interp.causal.subspace import Subspace
from interp.core.axes import describe
from interp.core.kinds import Count, Finite, Seed
from interp.core.memory import check_memory
from interp.core.results import Score, labelled, scored
from interp.core.stats import Means, Moments, Partial, Rows, over, two_sided_p
from interp.core.transfers import check
from interp.core.viewer import Brief
from interp.data.batch import Batch, Prompts
from interp.data.sources import Data
from interp.data.stream import prompt_source
from interp.features.dictionary import Dictionary
from interp.features.probing import ProbePosition, held_out, intervals, logistic, pooled, scores, standard
from interp.model.config import ModelConfig
from interp.model.edits import Add, Edit, PositionIndex
from interp.model.parts import Part, PartName
from interp.model.sites import find, full_name
from interp.model.transformer import Transformer
from interp.passes.metrics import LogitFunction, Metric, as_metric, kl_divergence, next_token_loss
from interp.passes.needs import Steps, swept_by
from interp.passes.observe import Subject
from interp.passes.question import Ask, ByRow, NotFiniteError, Question, Staged, Stages, Values
from interp.passes.variants import Variant
from interp.runs.functions import of_data, of_weights

if TYPE_CHECKING:
    import xarray as xr

SteeringMethod = Literal["mean difference", "pca", "probe", "dictionary"]
"""How a direction is found; `steering` says what each is."""
STRENGTHS = (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0)
"""The default doses of a curve: multiples of the direction."""
RANDOM = 39
"""Default number of random directions: the fewest whose extremes are a band of 95 %, 1 - 2 / (39 + 1)."""


# --- the direction ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Steering(Brief, Question):
    """Steering direction of every layer from positive and negative prompts, and how well it separates held-out ones.

    With d = mean of the positive - mean of the negative states, and (d u) u its part along an axis u, the direction is

        mean difference  d
        pca              u = first principal component of the states about the midpoint of both means, each kind
                         weighing the same
        probe            u = normal of a logistic regression (L2, C = 1, states in standard deviations, balanced)
        dictionary       (difference of mean activations) W_dec[f], f the feature in which that difference is largest;
                         attrs `feature` names it

    so that adding 1 times the direction moves a negative state to where positive ones are, along u.

    Args:
        positive: prompts that have what is to be steered towards.
        negative: prompts that do not have it; they need not be aligned with the positive ones, nor as many.
        site: where states are read: a site in every layer, or one by its full name.
        method: how the direction is found: "mean difference", "pca", "probe" or "dictionary".
        pos: token whose state represents a prompt, or "mean": the mean over its tokens but BOS.
        dictionary: the dictionary of the site, for the method "dictionary".
        test_share: share of each kind set aside for the score; 0 uses all prompts for the direction and leaves no
            score (NaN).
        shuffles: number of directions that the method also finds with the two kinds of the same prompts shuffled. They
            depend on the prompts but not on what is to be steered: as `beside` of `steering_curve` they are a harder
            null than random directions. Not for "pca": there the kinds decide little but the sign of the component,
            and shuffled directions are nearly the direction itself.
        seed: seed of the split and of the shuffles.

    Returns:
        Dataset over `layer`; the coordinate `site` is the full name of each.

        - `directions` [layer, direction (one), d_model]: an edit is made by `Subspace.of_result(found, layer=2)`.
        - `value`: balanced accuracy: mean of the shares of both kinds set aside that lie on their side of the midpoint
          of the means; with `low` and `high` (95 %, Newcombe), `n`, and `null`, 0.5.
        - `norm`: length of the direction. `stream`: mean length of the states that it was found in.
        - `shuffled` [layer, draw, d_model], with `shuffles`: the directions of the shuffled prompts.

    Raises:
        ValueError: a site without one vector of the stream's width per position, too few prompts to set some aside, an
            unknown method, or a method without its dictionary.
        KeyError: an unknown site.

    Caveat:
        Prompts that differ in something else too, such as their last token, are told apart by that.

    Source:
        Mean differences: Marks and Tegmark 2023; Rimsky et al. 2023. Principal components: Zou et al. 2023.

    See Also:
        `steering_curve`: what adding the directions does, and what it costs.

    Example:
        >>> found = steering(model, ["The cat sat"] * 4, ["The dog ran"] * 4, test_share=0.25)
        >>> edit = Subspace.of_result(found, layer=1).add(2.0)
        >>> interp.observe(model, prompt, edits=[edit]).output.shape[-1] == model.cfg.d_vocab
        True
    """

    positive: Data
    negative: Data
    _: KW_ONLY
    site: str = "resid_post"
    method: SteeringMethod = "mean difference"
    pos: ProbePosition = -1
    dictionary: Dictionary | None = None
    test_share: float = 0.3
    shuffles: Count = 0
    seed: Seed = 0

    def bind(self, model: Subject) -> Staged:
        """A pass over the prompts of each kind, which stops at the deepest of the sites."""
        if self.method not in get_args(SteeringMethod):
            raise ValueError(
                f"method must be one of {', '.join(get_args(SteeringMethod))}, got {self.method!r}"
            )
        if not 0 <= self.test_share < 1:
            raise ValueError(f"test_share must be 0, or between 0 and 1, got {self.test_share}")
        _check_count("shuffles", self.shuffles)
        with _naming("site"):
            names = _sites(self.site, model.transformer.config)
        self._check_sae(names, model.transformer.config)
        return Staged(self.name, partial(_steering_result, model, self, names), data="none")

    def _check_sae(self, names: Sequence[str], config: ModelConfig) -> None:
        """ValueError for a method "dictionary" without a dictionary, and for one that does not fit the site."""
        if (self.dictionary is None) == (self.method == "dictionary"):
            raise ValueError("a dictionary (dictionary=) goes with method='dictionary', and with no other")
        if self.dictionary is None:
            return
        if len(names) > 1:
            raise ValueError(f"a dictionary is of one site: its full name is required, got {self.site!r}")
        if isinstance(self.pos, str):
            raise ValueError(f"features are read at one token: a position is required, got pos={self.pos!r}")
        if self.dictionary.d_in != config.d_model or self.dictionary.normalize_activations != "none":
            raise ValueError(
                f"a dictionary of {config.d_model} numbers that are not normalised is required, got one of "
                f"{self.dictionary.d_in} ({self.dictionary.normalize_activations})"
            )


steering = of_weights(Steering)


def _sites(site: str, config: ModelConfig) -> list[str]:
    """The site in every layer, or the one that is named in full; errors as in `steering`."""
    in_full = site.startswith(("blocks.", "L"))
    names = [Part.of(site).site] if in_full else [full_name(site, layer) for layer in range(config.n_layers)]
    for name in names:
        row, layer = find(name, config)
        if row.axes != "b p d" or layer is None:
            raise ValueError(
                f"a site of the blocks with one vector of the stream's width per position is required, "
                f"{name!r} is {describe(row.axes)}"
            )
    return names


class States(NamedTuple):
    """States of all prompts at every site, `labels` (True: positive) and `test` (True: set aside for the score)."""

    x: Float[Tensor, "n l d"]
    labels: Bool[Tensor, "n"]
    test: Bool[Tensor, "n"]

    @classmethod
    def of(cls, model: Subject, steering: Steering, names: Sequence[str]) -> Stages[States]:
        """States of all positive, then all negative prompts: at each site the vector at `pos`, or the tokens' mean."""
        states = []
        question = ByRow(steering.name, partial(pooled, sites=names, pos=steering.pos), Rows)
        for kind, data in (("positive", steering.positive), ("negative", steering.negative)):
            with _naming(kind):
                source = prompt_source(data, model.text)
                (merged,) = yield [Ask(question, source)]
            assert isinstance(merged, Rows)
            rows = merged.ordered().rows
            states.append(torch.stack([rows[name].double().cpu() for name in names], 1))
        labels = torch.arange(sum(map(len, states))) < len(states[0])
        nothing = torch.zeros_like(labels)
        test = held_out(labels, steering.test_share, steering.seed) if steering.test_share else nothing
        return cls(torch.cat(states), labels, test)

    def shuffled(self, generator: torch.Generator) -> States:
        """The same states with the labels of the training prompts permuted at random."""
        labels, train = self.labels.clone(), (~self.test).nonzero()[:, 0]
        labels[train] = labels[train[torch.randperm(len(train), generator=generator)]]
        return self._replace(labels=labels)

    @property
    def kinds(self) -> tuple[Float[Tensor, "p l d"], Float[Tensor, "q l d"]]:
        """The positive and the negative training states, from which directions are made."""
        return self.x[self.labels & ~self.test], self.x[~self.labels & ~self.test]

    def confusion(self, directions: Float[Tensor, "l d"]) -> Int[Tensor, "l 4"]:
        """Counts of the prompts set aside, by layer: true positives, false positives, false negatives, true negatives.

        A state is predicted positive if it lies beyond the midpoint of the two means, along the direction.
        """
        positive, negative = self.kinds
        midpoint = (positive.mean(0) + negative.mean(0)) / 2
        guess = torch.einsum("nld, ld -> nl", self.x[self.test] - midpoint, directions) > 0
        true = self.labels[self.test, None]
        cells = ((guess, true), (guess, ~true), (~guess, true), (~guess, ~true))
        return torch.stack([(a & b).sum(0) for a, b in cells], -1)


@contextmanager
def _naming(argument: str) -> Iterator[None]:
    """Context in which the message of a ValueError or KeyError gets the name of an argument in front."""
    try:
        yield
    except (ValueError, KeyError) as cause:
        kind = next(kind for kind in (NotFiniteError, ValueError, KeyError) if isinstance(cause, kind))
        raise kind(f"{argument}: {cause.args[0]}") from cause


def _check_count(name: str, count: int) -> None:
    if count < 0:
        raise ValueError(f"{name} must be a number of directions, at least 0, got {count}")


def _steering_result(
    model: Subject, question: Steering, names: Sequence[str], has_data: bool
) -> Stages[xr.Dataset]:
    """Dataset of `steering`: the direction of every layer, its separation score, its norm and shuffled directions."""
    states = yield from States.of(model, question, names)
    positive, negative = states.kinds
    attrs: dict[str, str | int | float] = {
        "method": question.method, "pos": question.pos, "train": len(positive) + len(negative),
        "seed": question.seed, "interval": "95 % over prompts set aside, Newcombe", "null": "it tells nothing apart",
    }  # fmt: skip
    directions, feature = _by_method(states, question)
    if feature is not None:
        attrs["feature"] = feature
    values: dict[str, tuple[Sequence[str], Tensor]] = {
        "directions": (("layer", "direction", "d_model"), directions[:, None]),
        **_separation(states, directions, question.seed),
        "norm": (("layer",), directions.norm(dim=-1)),
        "stream": (("layer",), torch.cat((positive, negative)).norm(dim=-1).mean(0)),
    }
    if question.shuffles:
        draw = torch.Generator().manual_seed(question.seed)
        others = [_by_method(states.shuffled(draw), question)[0] for _ in range(question.shuffles)]
        values["shuffled"] = (("layer", "draw", "d_model"), torch.stack(others, 1))
    coords = {**site_coords(names, ("layer",), model.transformer.config), "site": (("layer",), list(names))}
    units = {**dict.fromkeys(("value", "low", "high", "null"), "balanced accuracy")}
    return labelled(question.name, values, coords=coords, units=units, attrs=attrs)


def _by_method(states: States, question: Steering) -> tuple[Float[Tensor, "l d"], int | None]:
    """The direction of every layer, and the index of its feature for the method "dictionary"."""
    if question.dictionary is None:
        return direction(*states.kinds, question.method), None
    return by_feature(*states.kinds, question.dictionary)


def _separation(
    states: States, directions: Float[Tensor, "l d"], seed: int
) -> dict[str, tuple[Sequence[str], Tensor]]:
    """Separation of the prompts set aside: balanced accuracy, its interval, its rows and its null."""
    n, layers = int(states.test.sum()), len(directions)
    nothing = torch.full((layers,), torch.nan, dtype=torch.float64)
    value, low, high = nothing, nothing, nothing
    if n:
        confusion = states.confusion(directions)
        value = scores(confusion)["balanced_accuracy"]
        low, high = (ends["balanced_accuracy"] for ends in intervals(confusion, seed=seed))
    scores_by_name = {"value": value, "low": low, "high": high, "null": torch.full_like(nothing, 0.5)}
    return {
        name: (("layer",), values)
        for name, values in {**scores_by_name, "n": torch.full((layers,), n)}.items()
    }


def direction(
    positive: Float[Tensor, "p l d"], negative: Float[Tensor, "q l d"], method: SteeringMethod
) -> Float[Tensor, "l d"]:
    """The direction from negative to positive states in each layer, by one of the methods of `steering`.

    Args:
        positive: states of the positive prompts, [p, l, d].
        negative: states of the negative prompts, [q, l, d].
        method: "mean difference", "pca" or "probe".

    Returns:
        [l, d], in the units of the states.

    Example:
        >>> one, other = torch.tensor([[[2.0, 1.0]]]), torch.tensor([[[0.0, 0.0]]])
        >>> direction(one, other, "mean difference").tolist()
        [[2.0, 1.0]]
    """
    difference = positive.mean(0) - negative.mean(0)
    if method == "mean difference":
        return difference
    if method == "pca":
        axis = _component(positive, negative)
    else:
        axis = torch.stack(
            [_normal(*pair) for pair in zip(positive.unbind(1), negative.unbind(1), strict=True)]
        )
    length = axis.norm(dim=-1, keepdim=True)
    unit = axis / length.where(length > 0, 1.0)
    return (difference * unit).sum(-1, keepdim=True) * unit


def _component(positive: Float[Tensor, "p l d"], negative: Float[Tensor, "q l d"]) -> Float[Tensor, "l d"]:
    """The first principal component about the midpoint of the means, each kind weighing the same."""
    midpoint = (positive.mean(0) + negative.mean(0)) / 2
    rows = torch.cat([(x - midpoint) / len(x) ** 0.5 for x in (positive, negative)])
    return torch.linalg.svd(rows.transpose(0, 1), full_matrices=False).Vh[:, 0]


def _normal(positive: Float[Tensor, "p d"], negative: Float[Tensor, "q d"]) -> Float[Tensor, "d"]:
    """The normal of the plane of a logistic regression, in the units of the states."""
    x = torch.cat((positive, negative))
    mean, spread = standard(x)
    weights, _ = logistic((x - mean) / spread, torch.arange(len(x)) < len(positive))
    return weights / spread


def by_feature(
    positive: Float[Tensor, "p 1 d"], negative: Float[Tensor, "q 1 d"], dictionary: Dictionary
) -> tuple[Float[Tensor, "1 d"], int]:
    """Decoder row of the feature whose mean activation differs most, times the difference.

    Args:
        positive: states of the positive prompts at one layer, [p, 1, d].
        negative: states of the negative prompts, [q, 1, d].
        dictionary: the dictionary of the layer's site.

    Returns:
        The direction [1, d], and the index of the feature.
    """
    mean = [
        dictionary.encode(x[:, 0].to(dictionary.W_enc)).double().mean(0).cpu() for x in (positive, negative)
    ]
    difference = mean[0] - mean[1]
    feature = int(difference.abs().argmax())
    return difference[feature] * dictionary.W_dec[feature : feature + 1].double().cpu(), feature


# --- the curve --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SteeringCurve(Question):
    """Effect of steering by a direction or a feature in every layer, and its cost, compared with random ones.

    The null of a direction is a random one: isotropic, of the same length, added at the same place and strength to the
    same rows. Each score is compared with the mean of the same score over such directions. A feature of a model with
    dictionaries has three nulls: random features of its dictionary that are active on the texts, at its activation;
    random directions of the length of its decoder row, moved as far; and the plain prompt, from which effects count.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        directions: one `Subspace` per layer, as `Subspace.of_result` gives them,
            `[Subspace.of_result(found, layer=i) for i in ...]`. They are added at the cells that they name, else at
            every position, BOS included. Or features of a model with dictionaries, `["L5F123"]`, one per layer.
        strengths: multiples of each direction; 0 is no steering. Of features: multiples of `unit`, to which "clamp"
            sets them, so that 0 takes them out; factors for "orthogonal".
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            data's answers. `interp.metrics.next_token_loss()` asks how the prompts themselves suffer.
        loss_on: texts unrelated to the direction, on which the loss is measured too; None leaves `loss` out.
        random: number of random directions R of the same length for each direction; 0: no null, which is NaN. Of
            features: of random features, and of random directions; fewer, with a note, where fewer are active.
        mode: what is done with a feature: "add", "clamp", "cap" or "orthogonal", as `feature_edits` says.
        unit: activation of a feature that is strength 1: its "max" on the texts, the "mean" of its activations there,
            or a number.
        unit_on: texts on which features are measured, BOS left out; None: the prompts themselves.
        at: the tokens at which features are steered, as in `Edit`; all, where nothing is named.
        beside: directions that replace the random ones, one tensor [r, d] for each direction, which are scaled to its
            length, such as `shuffled` of `steering`, found on the same prompts with shuffled kinds (permutation test).
        seed: seed of the random directions.

    Returns:
        Dataset over `layer`, `strength` and `score`:

        - `value`: mean over rows, with the ends `low` and `high` of its 95 % interval (NaN for too few rows), `n`, and
          the coordinate `unit`.
        - `null`: mean over the random directions. `random` [..., draw]: each of them.
        - `band` [..., end]: ends of the middle 95 % of the random directions, the draws' 0.025 (R + 1)-th smallest and
          largest. With 39 draws it spans all of them, and another random direction lies outside 2 times in 40; with
          fewer draws it covers less, 1 - 2 / (R + 1).
        - `p`: two-sided, how often a random direction does as much; at least 2 / (R + 1).
        - `plain` [score]: the metric itself without steering, mean over rows; with `loss` the loss of those texts.
        - `norm` [layer]: length of the directions; of a feature of what strength 1 adds, at all sites together.

        Of features `null`, `random`, `band` and `p` are those of random features, the coordinate `feature` names each,
        and further:

        - `nulls`, `p_values` [..., beside], `bands` [..., beside, end]: the same for "random features", "random
          directions" and "plain prompt", whose effect is 0; against it stands the interval.
        - `draws` [..., beside, draw]: every random feature and direction.
        - `activation` [layer]: that of strength 1.

        Scores:

            effect  metric with the steering - metric without it
            kl      KL(without || with) of the next-token distributions at the last token, nats
            loss    with `loss_on`: mean next-token loss of those texts with the steering - without it, nats

    Raises:
        ValueError: several directions at one place or layer, outside the blocks, of length 0 in all layers, or at one
            position of prompts of several lengths. Of features: as `feature_edits`; directions among them; a feature
            that is never active on the texts; `beside`, which stands beside directions.

    Caveats:
        Effects on the prompts from which the direction was made are too large. A direction with an effect need not be
        what the model uses, and 1 of 20 random directions lies outside the band: of many layers and strengths, some do.

    See Also:
        `steering`: finds the directions. `feature_edits`: the edits of a feature, for generation.

    Example:
        >>> found = steering(model, ["The cat sat"] * 4, ["The dog ran"] * 4, test_share=0.0)
        >>> each = [Subspace.of_result(found, layer=layer) for layer in (0, 1)]
        >>> metric = interp.logit_difference(" Mary", " John")
        >>> steering_curve(model, prompt, each, strengths=[1.0, 2.0], metric=metric, random=2).value.dims
        ('layer', 'strength', 'score')
    """

    directions: Sequence[Subspace | PartName] | Part | str
    _: KW_ONLY
    strengths: Sequence[float] = STRENGTHS
    metric: Metric | LogitFunction | None = None
    loss_on: Prompts | None = None
    random: Count = RANDOM
    mode: FeatureMode = "add"
    unit: ActivationUnit | Finite = "max"
    unit_on: Prompts | None = None
    at: Mapping[str, PositionIndex] | None = None
    beside: Sequence[Float[Tensor, "_ d"]] | None = None
    seed: Seed = 0

    def bind(self, model: Subject) -> ByRow | Staged:
        """One planned sweep per batch and measure; stages before it measure features, and the loss on `loss_on`."""
        features = self._features(model.transformer)
        as_metric(self.metric, model.text)  # its errors are the caller's, before anything runs
        if features is None:
            return self._bound(model, Doses.of(self, model.transformer.config))
        layers = [part.layer for part in features if part.layer is not None]
        activity = ByRow(
            "activity", partial(activity_rows, layers=layers, bos_id=model.text.bos_id), Activity
        )
        source = None
        if self.unit_on is not None:
            with _naming("unit_on"):
                source = prompt_source(self.unit_on, model.text)

        def stages(has_data: bool) -> Stages[xr.Dataset]:
            (merged,) = yield [Ask(activity, source)]
            assert isinstance(merged, Activity)
            bound = self._bound(model, self._feature_doses(model.transformer, features, merged))
            result = yield from bound.stages(has_data)
            return result

        return Staged(self.name, stages, again="unit_on=texts goes through the prompts once")

    @property
    def given(self) -> list[Subspace | PartName]:
        """The directions or features, one or several."""
        return [self.directions] if isinstance(self.directions, str | Part) else list(self.directions)

    def _features(self, network: Transformer) -> list[Part] | None:
        """The features that are steered by, checked; None for directions."""
        given = [one for one in self.given if not isinstance(one, Subspace)]
        if not given:
            plain = (self.mode, self.unit) == ("add", "max") and self.unit_on is None and self.at is None
            if not plain:
                raise ValueError(
                    "mode, unit, unit_on and at go with features; directions are added at the cells that they name"
                )
            return None
        if len(given) < len(self.given):
            raise ValueError("directions must be Subspaces or features, got both")
        features = [Push.of(network, one).feature for one in given]
        _check_layers([part.layer for part in features])
        if self.beside is not None:
            raise ValueError(
                "beside stands beside directions; beside features stand random features (random=)"
            )
        Push.of(network, features[0]).edits(1.0, self.mode, self.at or {})
        if self.unit not in get_args(ActivationUnit) and (isinstance(self.unit, str) or not self.unit):
            raise ValueError(f'unit must be "max", "mean" or a number that is not 0, got {self.unit!r}')
        _doses_given(self.strengths)
        _check_count("random", self.random)
        return features

    def _feature_doses(
        self, network: Transformer, features: Sequence[Part], activity: Activity
    ) -> FeatureDoses:
        return FeatureDoses.of(
            network, features, activity, strengths=_doses_given(self.strengths), unit=self.unit, mode=self.mode,
            at=self.at or {}, random=self.random, seed=self.seed,
        )  # fmt: skip

    def _bound(self, model: Subject, doses: Doses | FeatureDoses) -> ByRow | Staged:
        """The curve of these doses."""
        metric = as_metric(self.metric, model.text)
        on_prompts, loss = {"effect": metric, "kl": kl_divergence()}, {"loss": next_token_loss()}

        def curve(loss_moments: Mapping[str, Moments]) -> ByRow:
            measures = {**on_prompts, **(loss if loss_moments else {})}
            label = partial(
                _curve, doses=doses, measures=measures, loss_moments=loss_moments, attrs=self._attributes
            )
            return ByRow(
                self.name,
                partial(_rows, doses=doses, measures=on_prompts),
                Means,
                partial(label, name=self.name),
                answers=metric.answers(model.text),
            )

        if self.loss_on is None:
            return curve({})
        with _naming("loss_on"):
            texts = prompt_source(self.loss_on, model.text)
        losses = ByRow("loss_on", partial(_rows, doses=doses, measures=loss), Means)

        def stages(has_data: bool) -> Stages[xr.Dataset]:
            with _naming("loss_on"):
                (merged,) = yield [Ask(losses, texts)]
            assert isinstance(merged, Means)
            return (yield from curve(merged.moments).stages(has_data))

        return Staged(self.name, stages)

    @property
    def _attributes(self) -> dict[str, str | int | float]:
        """Attrs of the result."""
        if not isinstance(self.given[0], Subspace):
            null = "random features of the dictionary that are active on the texts, at the same activation"
            unit = self.unit if isinstance(self.unit, str) else float(self.unit)
            return {"effect": SIGN, "null": null, "seed": self.seed, "mode": self.mode, "strength_unit": unit}
        kind = "random directions" if self.beside is None else "the directions that were given"
        return {"effect": SIGN, "null": f"{kind} of the same length at the same place", "seed": self.seed}


steering_curve = of_data(SteeringCurve)


@dataclass(frozen=True, eq=False)
class Doses:
    """The cells of a curve: vectors to add, their places and strengths, each with its random directions."""

    subspaces: tuple[Subspace, ...]
    layers: tuple[int, ...]
    strengths: tuple[float, ...]
    directions: Float[Tensor, "l r d"]
    """The direction of every layer, and after it the random ones of its length."""

    @property
    def vectors(self) -> int:
        """Number of directions of every layer."""
        return self.directions.shape[1]

    @property
    def sites(self) -> list[str]:
        """The site of every layer's direction."""
        return [subspace.site for subspace in self.subspaces]

    @property
    def norms(self) -> Float[Tensor, "l"]:
        """Length of the directions."""
        return self.directions[:, 0].norm(dim=-1)

    @classmethod
    def of(cls, question: SteeringCurve, config: ModelConfig) -> Doses:
        """The doses of `steering_curve`'s arguments, checked, with its errors."""
        layers = []
        subspaces = [one for one in question.given if isinstance(one, Subspace)]
        for subspace in subspaces:
            if len(subspace.directions) != 1:
                raise ValueError(
                    f"one direction in each layer is required, got {len(subspace.directions)} at {subspace.site}"
                )
            layer = find(subspace.site, config)[1]
            if layer is None:
                raise ValueError(
                    f"directions inside the blocks are required, {subspace.site!r} is outside of them"
                )
            layers.append(layer)
        _check_layers(layers)
        doses = _doses_given(question.strengths)
        _check_count("random", question.random)
        directions = torch.stack([subspace.directions[0].detach().double().cpu() for subspace in subspaces])
        if not bool(directions.any()):
            raise ValueError("a direction of some length is required, all are 0")
        noise = _comparison_vectors(question, directions)
        noise *= directions.norm(dim=-1)[:, None, None] / noise.norm(dim=-1, keepdim=True)
        return cls(tuple(subspaces), tuple(layers), doses, torch.cat((directions[:, None], noise), 1))

    def variants(self) -> list[Variant]:
        """One variant per layer, strength and vector, vectors fastest."""
        variants = []
        for subspace, vectors in zip(self.subspaces, self.directions, strict=True):
            variants += [
                Variant([Edit(subspace.site, Add(vector, strength), subspace.at)])
                for strength in self.strengths
                for vector in vectors
            ]
        return variants


def _check_layers(layers: Sequence[int | None]) -> None:
    if not layers or len(set(layers)) < len(layers):
        raise ValueError(f"directions of different layers are required, got those of layers {list(layers)}")


def _doses_given(strengths: Sequence[int | float]) -> tuple[float, ...]:
    """The strengths, checked."""
    doses = tuple(float(strength) for strength in strengths)
    if not doses or len(set(doses)) < len(doses) or not np.isfinite(doses).all():
        raise ValueError(
            f"at least one finite strength, and none twice, is required, got strengths={list(doses)}"
        )
    return doses


def _comparison_vectors(question: SteeringCurve, directions: Float[Tensor, "l d"]) -> Float[Tensor, "l r d"]:
    """Comparison vectors of every direction, of any length. ValueError for another shape, or a length of 0."""
    if question.beside is None:
        draw = torch.Generator().manual_seed(question.seed)
        check_memory(
            f"{question.random} random directions beside each (steering_curve: random)",
            16 * question.random * directions.numel(), torch.device("cpu"), "fewer take less",
        )  # fmt: skip
        return torch.randn(
            len(directions), question.random, directions.shape[1], generator=draw, dtype=torch.float64
        )
    beside = [vectors.detach().double().cpu() for vectors in question.beside]
    if (
        len({vectors.shape for vectors in beside}) != 1
        or beside[0].shape[1:] != directions.shape[1:]
        or len(beside) != len(directions)
    ):
        raise ValueError(
            f"beside each of {len(directions)} directions as many of {directions.shape[1]} numbers are required, got "
            f"{[list(vectors.shape) for vectors in beside]}"
        )
    if not bool(torch.stack(beside).any(-1).all()):
        raise ValueError("what stands beside a direction must have a length, got one that is 0")
    return torch.stack(beside)


@torch.no_grad()
def _rows(
    model: Transformer, batch: Batch, doses: Doses | FeatureDoses, measures: Mapping[str, Metric]
) -> Steps[Values]:
    """By measure: the change of every row in every cell, `[b l s]`, under the random ones `[b l s r]`, and its base."""
    sweeps = yield from swept_by(batch, doses.variants(), list(measures.values()))
    shape = (len(doses.layers), len(doses.strengths), doses.vectors)
    changes = {}
    for (name, metric), swept in zip(measures.items(), sweeps, strict=True):
        message = f"{metric.name} is NaN or infinite in the base run of some prompt"
        check(swept.base.isfinite().all(), partial(NotFiniteError, message))
        change = (swept.values - swept.base).mT.unflatten(
            1, shape
        )  # [(l s r) b] -> [b l s r]; r = 0: the direction
        changes[name], changes[f"{name} random"] = change[..., 0], change[..., 1:]
        changes[f"{name} plain"] = swept.base
    return changes


def _curve(
    merged: Partial,
    name: str,
    doses: Doses | FeatureDoses,
    measures: Mapping[str, Metric],
    loss_moments: Mapping[str, Moments],
    attrs: Mapping[str, str | int | float],
) -> xr.Dataset:
    """The curve of every measure with its null."""
    assert isinstance(merged, Means)
    moments, cells = {**merged.moments, **loss_moments}, ("layer", "strength", "score")
    every = torch.stack([moments[f"{score} random"].mean for score in measures], 2)
    chance = every if isinstance(doses, Doses) else every[..., : every.shape[-1] // 2]
    table = {
        score: Score.of(moments[score], metric.unit, chance[:, :, i].mean(-1), fewest=metric.fewest)
        for i, (score, metric) in enumerate(measures.items())
    }
    value = torch.stack([score.value for score in table.values()], 2)
    others: dict[str, tuple[Sequence[str], Tensor]] = {
        "p": (cells, two_sided_p(value, chance)),
        "band": ((*cells, "end"), band(chance)),
        "random": ((*cells, "draw"), chance),
        "plain": (("score",), torch.stack([moments[f"{score} plain"].mean for score in measures])),
        "norm": (("layer",), doses.norms),
    }
    coords: dict[str, object] = {"layer": doses.layers, "strength": doses.strengths, "end": ["low", "high"]}
    coords["site"] = (("layer",), doses.sites)
    if isinstance(doses, FeatureDoses):
        others |= _beside_features(value, every.unflatten(-1, (2, -1)), doses)
        coords |= {"feature": (("layer",), list(map(str, doses.parts))), "beside": list(NULLS)}
    metric = measures["effect"]
    known = {"metric": metric.name, "unit": metric.unit, "interval": over("rows", metric.fewest)}
    notes = doses.notes if isinstance(doses, FeatureDoses) else ()
    return scored(name, table, cells[:2], coords=coords, attrs={**known, **attrs}, others=others, notes=notes)


def _beside_features(
    value: Float[Tensor, "l s c"], draws: Float[Tensor, "l s c 2 r"], doses: FeatureDoses
) -> dict[str, tuple[Sequence[str], Tensor]]:
    """Each null of a feature: those of random features and directions, and of the plain prompt, whose effect is 0."""
    cells, plain = ("layer", "strength", "score"), torch.zeros_like(value)[..., None]
    unknown = torch.full_like(plain, torch.nan)
    each = value[..., None].expand(*value.shape, 2)
    return {
        "nulls": ((*cells, "beside"), torch.cat((draws.mean(-1), plain), -1)),
        "p_values": ((*cells, "beside"), torch.cat((two_sided_p(each, draws), unknown), -1)),
        "bands": ((*cells, "beside", "end"), torch.cat((band(draws), unknown[..., None].expand(*plain.shape, 2)), -2)),
        "draws": (
            (*cells, "beside", "draw"),
            torch.cat((draws, torch.full_like(draws[..., :1, :], torch.nan)), -2),
        ),
        "activation": (("layer",), torch.tensor(doses.units, dtype=torch.float64)),
    }  # fmt: skip


def band(draws: Float[Tensor, "*n r"]) -> Float[Tensor, "*n 2"]:
    """The middle 95 % of some draws: their 0.025 (r + 1)-th smallest and largest value.

    Between two neighbours it is interpolated in proportion; of fewer than 39 draws it is the smallest and largest
    themselves. One more draw lies outside 2 times in 40, for r = 39, 79, ... exactly (Weibull's plotting positions).

    Args:
        draws: values [..., r] of r draws.

    Returns:
        [..., 2], the lower and the upper end; NaN of no draws.

    Example:
        >>> band(torch.arange(1.0, 80.0)).tolist()
        [2.0, 78.0]
    """
    if not draws.shape[-1]:
        return torch.full((*draws.shape[:-1], 2), torch.nan, dtype=draws.dtype)
    values = draws.cpu().numpy()
    ends = [sign * np.quantile(sign * values, 0.025, axis=-1, method="weibull") for sign in (1.0, -1.0)]
    return torch.from_numpy(np.stack(ends, -1))
