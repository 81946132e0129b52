"""Steering by features of a model's dictionaries: the edits, and what stands beside them.

A feature pushes a model along its decoder row. So would other features, and so does any vector of that length: the
effect of one feature is compared with random features at the same activation, with random directions of the same
length, and with the prompts as they are. Strength 1 is the feature's own activation on texts, its largest or its mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import Finite
from interp.core.stats import upcast
from interp.data.batch import Batch
from interp.features.cross_layer import CrossLayerTranscoder
from interp.features.dictionary import Dictionary, across
from interp.features.dictionary_metrics import counted_tokens
from interp.model.edits import Add, Edit, PositionIndex, Set
from interp.model.mounted import ERROR, FEATURES
from interp.model.parts import Part, PartName
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.needs import Steps, recorded
from interp.passes.observe import Model, as_network
from interp.passes.question import Values
from interp.passes.variants import Variant

FeatureMode = Literal["add", "clamp", "cap", "orthogonal"]
"""What is done with a feature; `feature_edits` says what each is."""
ActivationUnit = Literal["max", "mean"]
"""The activation of a feature that is strength 1: its largest on texts, or its mean where it is active."""
NULLS = ("random features", "random directions", "plain prompt")
"""What stands beside a feature."""


@public(unchecked=("at",))
def feature_edits(
    model: Model,
    feature: PartName,
    amount: Finite,
    mode: FeatureMode = "add",
    *,
    at: Mapping[str, PositionIndex] = MappingProxyType({}),
) -> list[Edit]:
    """The edits that steer by one feature of a model with dictionaries.

    With f the feature's activation at a token, W its decoder row and h the site that the dictionary writes (of a
    cross-layer transcoder all that the feature writes, each with its own row):

        add         h + amount W
        clamp       h + (amount - f) W: the feature becomes `amount`, the error and all other features stay
        cap         the part of h along W, in lengths of W, is at most `amount`
        orthogonal  the part of h along W is multiplied by `amount`: 0 takes it out, 1 changes nothing

    Args:
        model: a model with dictionaries (`model.with_dictionaries([...])`).
        feature: the feature, `"L5F123"`.
        amount: an activation; for "orthogonal" a factor.
        mode: "add", "clamp", "cap" or "orthogonal".
        at: the tokens, as in `Edit`; all, where nothing is named. `{"pos": "new"}` are those that are generated.

    Returns:
        The edits of one pass, for `model.edited`, `generate` or a sweep; several of them belong together.

    Raises:
        ValueError: a part that is no feature, a mode that is none, and a dictionary that normalises what it reads, as
            its directions have another length at each token. "cap" and "orthogonal" of a feature that writes several
            sites.
        KeyError, IndexError: a feature that the model lacks.

    Source:
        Templeton et al. 2024, "Scaling Monosemanticity" (clamping); Neuronpedia's steering (addition, cap, orthogonal).

    See Also:
        `steering_curve`: what they do, beside random features, random directions and the plain prompt.

    Example:
        >>> eye, zero = torch.eye(24), torch.zeros(24)
        >>> weights = {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero}
        >>> sae = interp.features.Dictionary(interp.features.ReLU(), weights, reads="blocks.1.hook_mlp_out")
        >>> split = model.with_dictionaries([sae])
        >>> steered = split.edited(feature_edits(split, "L1F7", 4.0, "clamp", at={"pos": -1}))
        >>> steered(tokens).shape == model(tokens).shape
        True
    """
    return Push.of(as_network(model), feature).edits(float(amount), mode, at)


@dataclass(frozen=True, eq=False)
class Push:
    """Directions that stand for a feature: its own decoder rows, those of another one, or any of the same lengths."""

    feature: Part
    """The feature whose activation is read."""
    writes: tuple[str, ...]
    """The sites that it writes: one, or of a cross-layer transcoder one of each layer from its own on."""
    vectors: tuple[Float[Tensor, "o"], ...]
    """The direction at each of them."""
    own: bool = True
    """Whether the vectors are the feature's own decoder rows."""

    @classmethod
    def of(cls, network: Transformer, feature: PartName) -> Push:
        """The push of a feature, with the errors of `feature_edits`."""
        part = Part.of(feature)
        if part.kind != "feature" or part.index is None:
            raise ValueError(f"a feature is required, such as L5F123, got {part}")
        rows = _decoder_rows(network, part)
        return cls(part, tuple(rows), tuple(row.detach().double().cpu() for row in rows.values()))

    def edits(self, amount: float, mode: FeatureMode, at: Mapping[str, PositionIndex]) -> list[Edit]:
        """The edits of one amount."""
        if mode not in get_args(FeatureMode):
            raise ValueError(f"mode must be one of {', '.join(get_args(FeatureMode))}, got {mode!r}")
        if mode == "clamp" and self.own:
            return [Edit(self.feature, Set(torch.tensor(amount, dtype=torch.float64)), at)]
        if mode == "clamp":
            features = f"blocks.{self.feature.layer}.{FEATURES}"
            return [
                edit
                for site, vector in self._places
                for edit in across(features, _error_of(site), _Towards(self, vector, amount), at=at)
            ]
        if mode == "add":
            return [
                Edit(site, (_Along if site.endswith("hook_z") else Add)(vector, amount), at)
                for site, vector in self._places
            ]
        if len(self.writes) > 1:
            raise ValueError(
                f"mode {mode!r} requires a feature that writes one site, and {self.feature} writes "
                f"{len(self.writes)}: use 'add' or 'clamp'"
            )
        change = _Capped if mode == "cap" else _Scaled
        return [Edit(site, change(vector, amount), at) for site, vector in self._places]

    @property
    def _places(self) -> list[tuple[str, Float[Tensor, "o"]]]:
        """Each site and the direction there."""
        return list(zip(self.writes, self.vectors, strict=True))


def _error_of(site: str) -> str:
    """The site of the error of the dictionary that writes a site of a block."""
    return ".".join([*site.split(".")[:2], ERROR])


def _decoder_rows(network: Transformer, part: Part) -> dict[str, Float[Tensor, "o"]]:
    """The direction of a feature at each site that it writes, with the errors of `feature_edits`."""
    part.within(network.config)
    assert part.layer is not None and part.index is not None
    dictionary = network.dictionaries.get(part.layer)
    if isinstance(dictionary, CrossLayerTranscoder):
        rows = dictionary.directions(part.layer, [part.index])[0]
        return {
            dictionary.writes[later]: row
            for later, row in zip(dictionary.later(part.layer), rows, strict=True)
        }
    if not isinstance(dictionary, Dictionary):
        raise ValueError(f"{part}: a Dictionary in its block is required, got {type(dictionary).__name__}")
    if dictionary.normalize_activations != "none":
        raise ValueError(
            f"{part}: a dictionary that does not normalise is required, got one with "
            f"{dictionary.normalize_activations!r}, whose directions have another length at each token"
        )
    assert dictionary.writes is not None
    return {dictionary.writes: dictionary.W_dec[part.index]}


def _vectors(cells: Float[Tensor, "b ..."], width: int) -> Float[Tensor, "n o"]:
    """Cells of a site as vectors: heads side by side."""
    return cells.reshape(-1, width)


def _split(
    cells: Float[Tensor, "b ..."], vector: Float[Tensor, "o"]
) -> tuple[Float[Tensor, "n o"], Float[Tensor, "o"], Float[Tensor, "n"]]:
    """Cells as vectors and the vector, in float32 at least, and the part of each along it, in its lengths."""
    x, vector = upcast(_vectors(cells, len(vector))), vector.to(upcast(cells))
    return x, vector, x @ vector / vector.square().sum()


@dataclass(frozen=True, eq=False)
class _Along:
    """The change that adds a vector to all heads of a position, side by side."""

    vector: Float[Tensor, "o"]
    amount: float

    def __call__(self, cells: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
        return (_vectors(cells, len(self.vector)) + self.amount * self.vector.to(cells)).view_as(cells)


@dataclass(frozen=True, eq=False)
class _Capped:
    """The change that limits the part along a vector, in lengths of the vector, from above."""

    vector: Float[Tensor, "o"]
    amount: float

    def __call__(self, cells: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
        x, vector, along = _split(cells, self.vector)
        return (x - (along - self.amount).clamp_min(0)[:, None] * vector).view_as(cells).to(cells)


@dataclass(frozen=True, eq=False)
class _Scaled:
    """The change that multiplies the part along a vector."""

    vector: Float[Tensor, "o"]
    amount: float

    def __call__(self, cells: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
        x, vector, along = _split(cells, self.vector)
        return (x + (self.amount - 1) * along[:, None] * vector).view_as(cells).to(cells)


@dataclass(frozen=True, eq=False)
class _Towards:
    """The change of an error by (amount - f) times a vector: as far as clamping the feature f moves, another way."""

    push: Push
    vector: Float[Tensor, "o"]
    amount: float

    def __call__(self, features: Float[Tensor, "b ... s"], error: Float[Tensor, "b ... o"]) -> Tensor:
        missing = self.amount - features[..., self.push.feature.index].unsqueeze(-1)
        return error + missing.to(error) * self.vector.to(error)


# --- what a feature does on texts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Activity:
    """How features are active on texts, by dictionary: a reduction over rows."""

    largest: Mapping[str, Float[Tensor, "s"]]
    total: Mapping[str, Float[Tensor, "s"]]
    active: Mapping[str, Float[Tensor, "s"]]
    """Number of tokens at which each is not 0."""

    @classmethod
    def of(cls, values: Mapping[str, Tensor], rows: Int[Tensor, "n"] | None = None) -> Activity:
        """The activity in one batch, of values [b 3 s]: largest, sum and number of active tokens of each row."""
        largest = {name: x[:, 0].double().amax(0) for name, x in values.items()}
        total, active = ({name: x[:, i].double().sum(0) for name, x in values.items()} for i in (1, 2))
        return cls(largest, total, active)

    def merge(self, other: Activity) -> Activity:
        """The activity in both."""
        largest = {name: torch.maximum(x, other.largest[name]) for name, x in self.largest.items()}
        total, active = (
            {name: x + theirs[name] for name, x in own.items()}
            for own, theirs in ((self.total, other.total), (self.active, other.active))
        )
        return Activity(largest, total, active)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by name."""
        return {f"{word}/{name}": x for word, named in vars(self).items() for name, x in named.items()}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> Activity:
        """The activity that was saved as these tensors."""
        named: dict[str, dict[str, Tensor]] = {"largest": {}, "total": {}, "active": {}}
        for key, x in tensors.items():
            word, name = key.split("/", 1)
            named[word][name] = x
        return cls(**named)

    def unit(self, part: Part, unit: ActivationUnit | int | float) -> float:
        """The activation of a feature that is strength 1. ValueError for a feature that is never active."""
        if not isinstance(unit, str):
            return float(unit)
        name, index = str(part.layer), part.index
        assert index is not None
        one = self.largest[name][index]
        if unit == "mean":
            one = self.total[name][index] / self.active[name][index]
        if not float(one.nan_to_num()):
            raise ValueError(
                f"{part} is active on no token of the data: name texts on which it is (unit_on=), or an activation "
                "that is strength 1 (unit=2.0)"
            )
        return float(one)

    def others(self, part: Part) -> Int[Tensor, "u"]:
        """Numbers of the other features of the dictionary that are active on some token, ascending."""
        numbers = self.active[str(part.layer)].cpu().nonzero()[:, 0]
        return numbers[numbers != part.index]


def activity_rows(
    model: Transformer, batch: Batch, layers: Sequence[int], bos_id: int | None
) -> Steps[Values]:
    """The largest value, the sum and the number of active tokens of each row, [b 3 s] by layer; BOS left out."""
    counted = counted_tokens(batch, bos_id, True)
    reads = [Read(f"blocks.{layer}.{FEATURES}", _summed, by_row=(counted,)) for layer in layers]
    seen = yield from recorded(batch, reads)
    return {str(layer): seen.trace[read] for layer, read in zip(layers, reads, strict=True)}


def _summed(features: Float[Tensor, "b p s"], counted: Tensor) -> Float[Tensor, "b 3 s"]:
    there = upcast(features).masked_fill(~counted[..., None], 0.0)
    return torch.stack((there.amax(1), there.sum(1), (there != 0).sum(1).to(there)), 1)


# --- doses ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FeatureDoses:
    """The cells of a curve by features: the pushes of each, its strengths, and what stands beside it."""

    pushes: tuple[tuple[Push, ...], ...]
    """Of each feature: its own, then those of random features, then random directions of its length."""
    strengths: tuple[float, ...]
    units: tuple[float, ...]
    """The activation of each feature that is strength 1."""
    mode: FeatureMode
    at: Mapping[str, PositionIndex]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        network: Transformer,
        features: Sequence[PartName],
        activity: Activity,
        *,
        strengths: tuple[float, ...],
        unit: ActivationUnit | int | float,
        mode: FeatureMode,
        at: Mapping[str, PositionIndex],
        random: int,
        seed: int,
    ) -> FeatureDoses:
        """The doses of some features, each with as many random features as the fewest active ones allow."""
        own = [Push.of(network, feature) for feature in features]
        others = [activity.others(push.feature) for push in own]
        count = min(random, *map(len, others))
        draw = torch.Generator().manual_seed(seed)
        pushes = []
        for push, candidates in zip(own, others, strict=True):
            chosen = candidates[torch.randperm(len(candidates), generator=draw)[:count]].tolist()
            noise = [_directions_like(vector, count, draw) for vector in push.vectors]
            by_feature = [Push.of(network, Part("feature", push.feature.layer, index)) for index in chosen]
            any_way = [
                Push(push.feature, push.writes, vectors, own=False) for vectors in zip(*noise, strict=True)
            ]
            pushes.append((push, *by_feature, *any_way))
        units = tuple(activity.unit(push.feature, unit) for push in own)
        fewer = f"{count} of {random} random features stand beside each: no more are active on the texts"
        return cls(tuple(pushes), strengths, units, mode, at, (fewer,) if count < random else ())

    @property
    def parts(self) -> list[Part]:
        """The features."""
        return [pushes[0].feature for pushes in self.pushes]

    @property
    def layers(self) -> tuple[int, ...]:
        """The block of each."""
        return tuple(part.layer for part in self.parts if part.layer is not None)

    @property
    def vectors(self) -> int:
        """Number of pushes of each."""
        return len(self.pushes[0])

    @property
    def sites(self) -> list[str]:
        """The site that each one's dictionary writes in its block."""
        return [pushes[0].writes[0] for pushes in self.pushes]

    @property
    def norms(self) -> Float[Tensor, "l"]:
        """Length of what strength 1 of each adds."""
        rows = [torch.cat(pushes[0].vectors).norm() for pushes in self.pushes]
        return torch.stack(rows) * torch.tensor(self.units, dtype=torch.float64).abs()

    def variants(self) -> list[Variant]:
        """One variant per feature, strength and push, pushes fastest."""
        return [
            Variant(
                push.edits(strength if self.mode == "orthogonal" else strength * unit, self.mode, self.at)
            )
            for pushes, unit in zip(self.pushes, self.units, strict=True)
            for strength in self.strengths
            for push in pushes
        ]


def _directions_like(vector: Float[Tensor, "o"], count: int, draw: torch.Generator) -> Float[Tensor, "n o"]:
    """Random directions of the length of a vector."""
    noise = torch.randn(count, len(vector), generator=draw, dtype=torch.float64)
    return noise * (vector.norm() / noise.norm(dim=-1, keepdim=True))
