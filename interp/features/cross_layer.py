"""Dictionaries of several layers or models at once: cross-layer transcoders and crosscoders.

A cross-layer transcoder has features in each layer, which write to that layer and to every later one. Its weights stay
in its files, as they do not fit a laptop: what a call needs is read, of decoders the directions of active features. In
a model (`model.with_dictionaries`) its features and errors are sites: `_Split` is one pass of it.
A crosscoder has one set of features for all layers or models that it reads, which are known after the last of them: its
features are edited by two passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.stats import narrowed
from interp.data.batch import Batch, Prompts
from interp.features.activations import DictionaryKind, Gated, JumpReLU, MatchingPursuit, NormTopK, activated
from interp.features.dictionary import (
    FeatureChange,
    across,
    check_changed,
    check_ends,
    check_width,
    vectors_of,
)
from interp.model.config import Json
from interp.model.edits import Add, Edit, PositionIndex, RowChoice, Set
from interp.model.mounted import ERROR, FEATURES, SitesOfBlock, Taps
from interp.model.sites import axes_of
from interp.model.tap import Read
from interp.passes.observe import Model, as_network, deepest, observe

AT_ONCE = 1024
"""Features whose directions are read together: at 26 layers of width 2304 in float32 these are 0.25 GB."""
Encoder = Callable[[], Mapping[str, Tensor]]
Directions = Callable[[list[int]], Tensor]


@dataclass(frozen=True)
class LayerWeights:
    """One layer of a cross-layer transcoder: its widths, and how its weights are read.

    Args:
        shape: width of what it reads, number of features, width of what they write.
        encoder: reads `W_enc` [d s] and `b_enc` [s]; of JumpReLU `threshold` [s] too, of NormTopK `norm` [s].
        directions: reads the directions [a layers o] of some features into this layer and each later one.
        skip: reads `W_skip` [d o], by which the input reaches the output of its own layer; None: there is none.
    """

    shape: tuple[int, int, int]
    encoder: Encoder
    directions: Directions
    skip: Callable[[], Tensor] | None = None


@public()
@dataclass(frozen=True, eq=False)
class CrossLayerTranscoder:
    """Features of each layer that write to it and to every later layer; weights are read from files when needed.

    In a model, `model.with_dictionaries([clt])`, the features of layer i are parts, `L3F17`, and so is what it leaves
    unexplained of each layer's output, `L3.error`: y_j - b_dec_j - the sum over i <= j of what f_i say of layer j (and
    the skip). An edited feature moves the output of its layer and of every later one by its directions there; later
    layers compute their own features, and what they write, from the stream that it has moved.

    f_i = act(x_i W_enc_i + b_enc_i) are the features of layer i, and y_j = b_dec_j + the sum over i <= j of f_i times
    the decoder from i into j; with a skip, y_j has x_j W_skip_j too. `load` opens those of circuit-tracer,
    llamascopium and Gemma Scope 2, whose weakly causal crosscoders are of this form too.

    Args:
        kind: the activation function, of each layer by itself.
        layers: the weights, by layer.
        b_dec: what each layer's output has without any feature, [o] by layer.
        reads: full name of the site that each layer's features read, by layer; empty: not known.
        writes: full name of the site of each layer's output, by layer; empty: not known.
        metadata: what else the files say; no number depends on it.
        dtype: of weights and features; None: that of the files.
        device: where weights are put after they are read.

    Raises:
        ValueError: layers that differ between the arguments, sites of other blocks than their layer, or a kind that is
            Gated or MatchingPursuit.
        KeyError: a site that no model has.

    Caveats:
        Later MLPs answer an edited feature too, beside what its directions say that they would have written: with
        patterns and later outputs held, effects are others. Of a set that writes the residual stream (Gemma Scope 2's
        crosscoders), later layers hold what was added at earlier ones already, so that a change is counted twice there.

    Memory:
        In a pass the features of each layer that is looked at, [b p s], one encoder at a time, the directions of
        `AT_ONCE` features, and one tensor like the stream for each layer that moved features write to. An error takes
        the features of its layer and of all earlier ones, one layer after the other. Encoders are read in each pass
        that asks for features, decoders of features that are changed (for an error: that are active); a gradient with
        respect to features reads every decoder of their layer, piece by piece, and holds the encoders of all of them.
        A pass begins at the first block, so what a sweep saves are columns alone.

    Source:
        Ameisen et al. 2025, "Circuit Tracing: Revealing Computational Graphs in Language Models"
        (transformer-circuits.pub/2025/attribution-graphs/methods.html).

    See Also:
        `Crosscoder`: one set of features for all that is read. `Dictionary`: of one layer.

    Example:
        >>> eye, zero = torch.eye(2), torch.zeros(2)
        >>> def layer(i):
        ...     ones = torch.ones(2, 2 - i, 2)
        ...     return LayerWeights((2, 2, 2), lambda: {"W_enc": eye, "b_enc": zero}, lambda active: ones[active])
        >>> clt = CrossLayerTranscoder(interp.features.ReLU(), {0: layer(0), 1: layer(1)}, {0: zero, 1: zero})
        >>> clt({0: torch.tensor([[1.0, -1.0]]), 1: torch.tensor([[0.0, 2.0]])})[1].tolist()
        [[3.0, 3.0]]
    """

    kind: DictionaryKind
    layers: Mapping[int, LayerWeights]
    b_dec: Mapping[int, Tensor]
    reads: Mapping[int, str] = field(default_factory=dict)
    writes: Mapping[int, str] = field(default_factory=dict)
    metadata: Json = field(default_factory=dict)
    dtype: torch.dtype | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        if not self.layers or set(self.layers) != set(self.b_dec):
            raise ValueError(
                f"b_dec of the layers {sorted(self.layers)} is required, got {sorted(self.b_dec)}"
            )
        for sites in (self.reads, self.writes):
            if sites and set(sites) != set(self.layers):
                raise ValueError(
                    f"sites of the layers {sorted(self.layers)} are required, got {sorted(sites)}"
                )
            for layer, site in sites.items():
                axes_of(site)
                if not site.startswith(f"blocks.{layer}."):
                    raise ValueError(f"a site of block {layer} is required for layer {layer}, got {site!r}")

    @property
    def taps(self) -> tuple[Taps, ...]:
        """The sites that it reads and writes, and its number of features, by layer."""
        return tuple(
            Taps(self.reads.get(layer), self.writes.get(layer), self.layers[layer].shape[1])
            for layer in sorted(self.layers)
        )

    @property
    def in_one_block(self) -> bool:
        """False: its features write to later blocks too."""
        return False

    def bias(self, layer: int | None = None) -> Float[Tensor, "o"]:
        """The b_dec of a layer."""
        assert layer is not None
        return self._put(self.b_dec[layer])

    def constants(self, layer: int | None = None) -> Float[Tensor, "s"]:
        """The b_enc of a layer: what its active features are where it reads 0."""
        assert layer is not None
        return self._put(self._layer(layer).encoder()["b_enc"])

    def splits(self, places: Mapping[int, SitesOfBlock], blocks: range) -> list[Edit]:
        """The edits by which a model's features and errors are sites (`Transformer.with_dictionaries`).

        Args:
            places: its blocks whose features or errors are read or edited.
            blocks: those that the pass runs through.

        Raises:
            ValueError: an error in a pass that begins after a layer whose features it depends on.
        """
        return _Split(self, places, blocks).edits()

    @public()
    def later(self, layer: int) -> list[int]:
        """The layers that features of a layer write to, in order, itself first. ValueError for no layer of it."""
        self._layer(layer)
        return [each for each in sorted(self.layers) if each >= layer]

    @public()
    def encode(self, layer: int, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n s"]:
        """The features of vectors of one layer; its encoder is read for it.

        Args:
            layer: one of `layers`.
            x: [*n d], what this layer's site holds.

        Raises:
            ValueError: no such layer, a width that differs, or files that are damaged.
        """
        weights = {name: self._put(weight) for name, weight in self._layer(layer).encoder().items()}
        check_ends(f"x of layer {layer}", x, len(weights["W_enc"]))
        z = x.to(weights["W_enc"]) @ weights["W_enc"] + weights["b_enc"]
        return activated(self.kind, z, weights)

    @public()
    def directions(self, layer: int, features: list[int]) -> Float[Tensor, "a l o"]:
        """The directions of some features of a layer into it and each later one, in the order of `later`.

        Args:
            layer: one of `layers`.
            features: their indices, of which no more is read from safetensors.

        Raises:
            ValueError: no such layer or feature, or files that are damaged.
        """
        weights = self._layer(layer)
        if features and not 0 <= min(features) <= max(features) < weights.shape[1]:
            raise ValueError(f"features of layer {layer} are 0 to {weights.shape[1] - 1}, got {features[:3]}")
        return self._put(weights.directions(features))

    @public()
    def decode(
        self, features: Mapping[int, Tensor], x: Mapping[int, Tensor] | None = None
    ) -> dict[int, Tensor]:
        """What features say about the output of every layer.

        Args:
            features: [*n s] by layer; those of layers that are left out count as 0.
            x: [*n d] by layer, the inputs that were encoded; required of every layer where there is a skip.

        Returns:
            [*n o] by layer.

        Raises:
            ValueError: no features at all, no such layer, or inputs that are missing.
        """
        if not features:
            raise ValueError("features of one layer at least are required, got none")
        rows = next(iter(features.values())).shape[:-1]
        found = {layer: self._put(bias).expand(*rows, -1) for layer, bias in self.b_dec.items()}
        for layer, given in features.items():
            check_ends(f"features of layer {layer}", given, self._layer(layer).shape[1])
            later = self.later(layer)
            for target, part in zip(later, self.written(layer, given, later), strict=True):
                found[target] = found[target] + part
        for layer, weights in self.layers.items():
            if weights.skip is not None:
                found[layer] = found[layer] + self._skipped(layer, weights.skip, x)
        return found

    def __call__(self, x: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """What it says that each layer writes, [*n o] by layer, of what every layer reads, [*n d] by layer."""
        return self.decode({layer: self.encode(layer, given) for layer, given in x.items()}, x)

    @public()
    def fitted_to(self, model: Model) -> CrossLayerTranscoder:
        """Itself, once it is checked that its sites exist in this model and have its widths.

        Raises:
            ValueError: a width that differs, and sites that are not known.
            KeyError: a site that this model lacks.
        """
        config = as_network(model).config
        for word, sites, place in (("reads", self.reads, 0), ("writes", self.writes, 2)):
            if not sites:
                raise ValueError(f"these files do not say which sites it {word}")
            for layer, site in sites.items():
                check_width(site, self.layers[layer].shape[place], config)
        return self

    def _layer(self, layer: int) -> LayerWeights:
        if layer not in self.layers:
            raise ValueError(f"layer must be one of {sorted(self.layers)}, got {layer}")
        return self.layers[layer]

    def _put(self, weight: Tensor) -> Tensor:
        """A weight in the dtype and at the place of the computation; ValueError for NaN and infinite numbers."""
        if not bool(weight.isfinite().all()):
            raise ValueError("the weights hold NaN or infinite numbers")
        return narrowed(weight, self.dtype or weight.dtype, "the weights").to(self.device)

    def written(
        self, layer: int, features: Float[Tensor, "*n s"], into: Sequence[int]
    ) -> Float[Tensor, "l *n o"]:
        """What features of one layer add to some of the layers that they write to, differentiable in the features.

        Args:
            layer: one of `layers`.
            features: [*n s]; of those that are 0 everywhere no direction is read but for a gradient.
            into: layers out of `later(layer)`.
        """
        places = [self.later(layer).index(each) for each in into]
        return _Written.apply(features, _Decoder(self, layer, places))  # type: ignore[no-untyped-call]

    def explained(self, layer: int, said: Tensor, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n o"]:
        """What it says about the output of a layer.

        Args:
            layer: one of `layers`.
            said: the sum of what features add to this layer.
            x: what this layer reads.
        """
        given = said + self._put(self.b_dec[layer]).to(said)
        skip = self._layer(layer).skip
        return given if skip is None else given + self._skipped(layer, skip, {layer: x}).to(given)

    def _skipped(
        self, layer: int, skip: Callable[[], Tensor], x: Mapping[int, Tensor] | None
    ) -> Float[Tensor, "*n o"]:
        if x is None or layer not in x:
            raise ValueError(f"decoding with a skip requires what layer {layer} reads")
        check_ends(f"x of layer {layer}", x[layer], self.layers[layer].shape[0])
        weight = self._put(skip())
        return x[layer].to(weight) @ weight


class _Decoder(NamedTuple):
    """The directions of all features of a layer into some of the layers that they write to, read as they are needed."""

    clt: CrossLayerTranscoder
    layer: int
    places: Sequence[int]
    """Of these layers, in the order of `later`."""

    def pieces(self, features: Int[Tensor, "n"]) -> Iterator[tuple[Tensor, Float[Tensor, "a l o"]]]:
        """The features some after the other, and their directions."""
        for some in features.split(AT_ONCE) if len(features) else ():
            yield some, self.clt.directions(self.layer, some.tolist())[:, self.places]


class _Written(torch.autograd.Function):
    """Sums of directions of active features, whose gradient reads directions again instead of keeping them."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, features: Float[Tensor, "*n s"], decoder: _Decoder
    ) -> Float[Tensor, "l *n o"]:
        ctx.decoder = decoder  # type: ignore[attr-defined]
        ctx.width = features.shape[-1]  # type: ignore[attr-defined]
        active = (features != 0).reshape(-1, features.shape[-1]).any(0).nonzero()[:, 0]
        o = decoder.clt.layers[decoder.layer].shape[2]
        found = features.new_zeros(len(decoder.places), *features.shape[:-1], o)
        for some, directions in decoder.pieces(active):
            found += einsum(features[..., some], directions.to(features), "... a, a l o -> l ... o")
        return found

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Float[Tensor, "l *n o"]) -> tuple[Tensor, None]:
        every = torch.arange(ctx.width)  # type: ignore[attr-defined]
        slopes = [
            # products of matrices, which batches of gradients know
            torch.stack(
                [row @ into.mT for row, into in zip(grad, directions.to(grad).unbind(1), strict=True)]
            ).sum(0)
            for _, directions in ctx.decoder.pieces(every)  # type: ignore[attr-defined]
        ]
        return torch.cat(slopes, -1), None


class _Split:
    """One pass of a model with a cross-layer transcoder: what features say so far, and how far edits have moved it.

    With y_j the output of layer j, f_i its features and f_i' those after the edits of their site, y_j becomes
    y_j + the sum over i <= j of what f_i' - f_i say of layer j, + e_j' - e_j; y_j itself where nothing is edited.
    """

    def __init__(self, clt: CrossLayerTranscoder, places: Mapping[int, SitesOfBlock], blocks: range) -> None:
        self.clt, self.places = clt, places
        run = [layer for layer in sorted(clt.layers) if layer in blocks]
        self.errors = [layer for layer in run if layer in places and places[layer].wants(ERROR)]
        if self.errors and (missing := [layer for layer in sorted(clt.layers) if layer < blocks.start]):
            raise ValueError(
                f"the error of block {self.errors[0]} depends on the features of block {missing[0]}, and this pass "
                f"begins at block {blocks.start}"
            )
        features = [layer for layer in run if layer in places and places[layer].wants(FEATURES)]
        altered = [layer for layer in features if places[layer].alters(FEATURES)]
        self.encoded = {*features, *(layer for layer in run if layer <= max(self.errors, default=-1))}
        self.moves = [layer for layer in run if altered and layer >= min(altered)]
        self.said: dict[int, Tensor] = {}
        """What features, before their edits, add to layers whose error is asked for."""
        self.moved: dict[int, Tensor] = {}
        """What the change of features adds to each layer."""

    def edits(self) -> list[Edit]:
        """The edits of the pass, of the layers that need one."""
        return [
            edit
            for layer in sorted({*self.encoded, *self.moves})
            for edit in (
                across(self.clt.reads[layer], self.clt.writes[layer], partial(self._split, layer))
                if layer in self.encoded
                else [Edit(self.clt.writes[layer], partial(self._carried, layer))]
            )
        ]

    def _split(self, layer: int, read: Float[Tensor, "b ..."], written: Float[Tensor, "b ..."]) -> Tensor:
        """The output of a layer after the edits of features, its own and those of earlier layers, and of its error."""
        x = vectors_of(read, self.clt.layers[layer].shape[0])
        features = self.clt.encode(layer, x).to(written.device)
        place = self.places.get(layer)
        seen = features if place is None else place.visit(FEATURES, features)
        self._add(self.said, layer, features, self.errors)
        if seen is not features:
            self._add(self.moved, layer, seen - features, self.moves)
        if layer not in self.errors:
            return self._carried(layer, written)
        assert place is not None
        given = self.clt.explained(layer, self.said.pop(layer).to(written.device), x)
        error = written.reshape(given.shape) - given
        rest = place.visit(ERROR, error)
        return self._carried(layer, written, None if rest is error else rest - error)

    def _add(self, sums: dict[int, Tensor], layer: int, features: Tensor, layers: Sequence[int]) -> None:
        """Add what features of a layer say of some later ones to the sums."""
        if into := [each for each in layers if each >= layer]:
            for each, part in zip(into, self.clt.written(layer, features, into), strict=True):
                sums[each] = sums[each] + part.to(sums[each]) if each in sums else part

    def _carried(
        self, layer: int, written: Float[Tensor, "b ..."], also: Float[Tensor, "b ..."] | None = None
    ) -> Tensor:
        """The output of a layer with what changed features, and `also` a change of its error, add to it."""
        changes = [part for part in (self.moved.pop(layer, None), also) if part is not None]
        if not changes:
            return written
        total = sum(changes[1:], changes[0]).to(written.device)
        return (written.reshape(total.shape) + total).view_as(written).to(written.dtype)


@public()
class Crosscoder(nn.Module):
    """One set of features for several layers or models, which it reads together and reconstructs each, frozen.

    z = the sum over sources l of (x_l - shift_l) scale_l W_enc_l, plus b_enc, f = act(z), and
    y_l = (f W_dec_l + b_dec_l) / unscale_l + shift_l.

    `features(model, batch)` are those of a model that holds all sources, and `edits(model, batch, change)` change them:
    two passes, as the features of all sources are known after the last of them.

    Args:
        kind: the activation function. Of JumpReLU `threshold` may be one for each feature, or for each source too;
            NormTopK takes the norms of each source's own directions. Where it depends on the source, so do features.
        weights: by name, `W_enc` [l d s], `b_enc` [s], `W_dec` [l s d], `b_dec` [l d]; JumpReLU has `threshold` [s]
            or [l s]. `shift` [l d], `scale` [l] and `unscale` [l] only where it was made for scaled activations.
        reads: full names of the sites of its sources, in order, None for those not known.
        metadata: what else its file says; no number depends on it.

    Raises:
        ValueError: weights that are missing, unknown, of a wrong shape or not finite, or of no source.
        KeyError: a site that no model has.

    Source:
        Lindsey et al. 2024, "Sparse Crosscoders for Cross-Layer Features and Model Diffing"
        (transformer-circuits.pub/2024/crosscoders). Minder et al. 2025 (arXiv:2504.02922) for two models.

    See Also:
        `CrossLayerTranscoder`: features of one layer each. `Dictionary`: of one source.

    Example:
        >>> eye = torch.eye(2).expand(2, 2, 2)
        >>> weights = {"W_enc": eye, "b_enc": torch.zeros(2), "W_dec": eye, "b_dec": torch.zeros(2, 2)}
        >>> both = Crosscoder(interp.features.ReLU(), weights)
        >>> both.encode(torch.tensor([[[1.0, -1.0], [2.0, 0.0]]])).tolist()
        [[3.0, 0.0]]
        >>> both.relative_decoder_norm(0, 1).tolist()
        [0.5, 0.5]
    """

    W_enc: nn.Parameter
    b_enc: nn.Parameter
    W_dec: nn.Parameter
    b_dec: nn.Parameter

    def __init__(
        self,
        kind: DictionaryKind,
        weights: Mapping[str, Tensor],
        *,
        reads: tuple[str | None, ...] = (),
        metadata: Json | None = None,
    ) -> None:
        super().__init__()
        _check_weights(kind, weights)
        self.kind = kind
        self.reads = reads or (None,) * len(weights["W_enc"])
        if len(self.reads) != len(weights["W_enc"]):
            raise ValueError(
                f"reads must name {len(weights['W_enc'])} sites, one per source, got {len(reads)}"
            )
        for site in filter(None, self.reads):
            axes_of(site)
        self.metadata: Json = dict(metadata or {})
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight.detach().clone(), requires_grad=False))

    @property
    def n_sources(self) -> int:
        """Number of layers or models that it reads and writes."""
        return len(self.W_enc)

    @property
    def d_in(self) -> int:
        """Width of the vectors of each source."""
        return self.W_enc.shape[1]

    @property
    def d_sae(self) -> int:
        """Number of features."""
        return self.W_enc.shape[2]

    @property
    def by_source(self) -> bool:
        """Whether each source has features of its own, as the rule looks at its own directions."""
        threshold = self._parameters.get("threshold")
        return isinstance(self.kind, NormTopK) or (threshold is not None and threshold.ndim == 2)

    @public()
    def before(self, x: Float[Tensor, "*n l d"]) -> Float[Tensor, "*n s"]:
        """Pre-activations: the sum over sources, plus b_enc. ValueError for vectors of other sources or widths."""
        check_ends("x", x, self.n_sources, self.d_in)
        x = x.to(self.W_enc)
        if "shift" in self._parameters:
            x = x - self.get_parameter("shift")
        if "scale" in self._parameters:
            x = x * self.get_parameter("scale")[:, None]
        return einsum(x, self.W_enc, "... l d, l d s -> ... s") + self.b_enc

    @public()
    def encode(self, x: Float[Tensor, "*n l d"]) -> Float[Tensor, "*n s"] | Float[Tensor, "*n l s"]:
        """The features of what the sources hold: [*n s], and [*n l s] where they differ by source (`by_source`)."""
        z = self.before(x)
        threshold = self._parameters.get("threshold")
        if not self.by_source:
            return activated(self.kind, z, {} if threshold is None else {"threshold": threshold})
        each = [
            {"norm": self.W_dec[source].norm(dim=-1)}
            if threshold is None
            else {"threshold": threshold[source]}
            for source in range(self.n_sources)
        ]
        return torch.stack([activated(self.kind, z, weights) for weights in each], -2)

    @public()
    def decode(self, features: Float[Tensor, "*m s"]) -> Float[Tensor, "*n l d"]:
        """The reconstruction of every source.

        Args:
            features: [*n s], or [*n l s] where they differ by source.

        Raises:
            ValueError: features of another number, or of other sources.
        """
        check_ends("features", features, *((self.n_sources,) if self.by_source else ()), self.d_sae)
        pattern = "... l s, l s d -> ... l d" if self.by_source else "... s, l s d -> ... l d"
        found = einsum(features.to(self.W_dec), self.W_dec, pattern) + self.b_dec
        if "unscale" in self._parameters:
            found = found / self.get_parameter("unscale")[:, None]
        return found + self.get_parameter("shift") if "shift" in self._parameters else found

    def forward(self, x: Float[Tensor, "*n l d"]) -> Float[Tensor, "*n l d"]:
        """The reconstruction of what the sources hold."""
        return self.decode(self.encode(x))

    @public()
    def features(
        self, model: Model, batch: Batch | Prompts
    ) -> Float[Tensor, "b p s"] | Float[Tensor, "b p l s"]:
        """The features of a batch, from one pass of the model that holds all its sources.

        Args:
            model: the model whose sites it reads.
            batch: a batch, or prompts as the model tokenises them.

        Returns:
            [b p s], and [b p l s] where they differ by source (`by_source`).

        Raises:
            ValueError: sites that are not known, or of two models, and a width that differs.
            KeyError: a site that this model lacks.
        """
        return self.encode(self._sources(model, batch)[0])

    @public()
    def edits(
        self,
        model: Model,
        batch: Batch | Prompts,
        change: FeatureChange,
        *,
        error: bool = True,
        at: Mapping[str, PositionIndex] = MappingProxyType({}),
        rows: RowChoice | None = None,
    ) -> list[Edit]:
        """The edits of a second pass over a batch that change features at all sources; they belong together.

        Its features depend on the last source, so that they are known only when a pass is beyond the first ones: one
        pass without these edits finds f, and the edits put what `change` makes of them into the next, y_l +
        decode(f')_l - decode(f)_l at the site of each source l. What earlier sources move reaches the later ones as
        well, whose values are read after it: the features of the second pass are others than f'.

        Args:
            model: the model whose sites it reads.
            batch: the rows that the edits are for, of the same tokens.
            change: gets the features `[b p s]` (`[b p l s]` by source) and returns them changed.
            error: whether what is not explained stays as it is, so that a change of nothing changes no bit. Without
                it the values are decode(f')_l alone, and nothing reaches later sources from earlier ones.
            at, rows: the tokens and rows whose sources are changed, as in `Edit`.

        Returns:
            One edit for each source. They hold values of each token, so generated tokens have none.

        Raises:
            ValueError: as `features`, and a change to another shape.
            KeyError: a site that this model lacks.

        Caveats:
            Later sources of one residual stream hold what was added at earlier ones already, so that a change is
            counted twice there; with `error=False` each holds what is said of it alone.

        Example:
            >>> eye = torch.eye(24).expand(2, 24, 24)
            >>> weights = {"W_enc": eye, "b_enc": torch.zeros(24), "W_dec": eye, "b_dec": torch.zeros(2, 24)}
            >>> reads = ("blocks.0.hook_resid_post", "blocks.1.hook_resid_post")
            >>> both = Crosscoder(interp.features.ReLU(), weights, reads=reads)
            >>> doubled = both.edits(model, tokens, lambda features: 2 * features)
            >>> interp.observe(model, tokens, edits=doubled).output.shape == model(tokens).shape
            True
        """
        values, sites = self._sources(model, batch)
        features = self.encode(values)
        before = self.decode(features)  # now: `change` may write into `features`
        shape = features.shape
        changed = change(features)
        check_changed(changed, shape)
        after = self.decode(changed)
        put = (after - before if error else after).unbind(-2)
        return [
            Edit(read.site, (Add if error else Set)(each.reshape(like)), at=at, rows=rows)
            for (read, like), each in zip(sites.items(), put, strict=True)
        ]

    def _sources(
        self, model: Model, batch: Batch | Prompts
    ) -> tuple[Float[Tensor, "b p l d"], dict[Read, torch.Size]]:
        """What the sources hold in a pass, and the reads of them with the shape of each site."""
        sites = [site for site in self.fitted_to(model).reads if site is not None]
        if len(set(sites)) < len(sites):
            raise ValueError(
                f"sources that are sites of one model are required, got the same one twice: {sites}, as of two models"
            )
        reads = [Read(site) for site in sites]
        trace = observe(
            model, batch, reads, stop=deepest(sites, as_network(model).config), answers_only=True
        ).trace
        values = torch.stack([vectors_of(trace[read], self.d_in) for read in reads], -2)
        return values, {read: trace[read].shape for read in reads}

    def relative_decoder_norm(self, one: int, other: int) -> Float[Tensor, "s"]:
        """Length of each feature's direction in one source's `other`, as a share of its length in both.

        Near 0 it is of source `one` alone, near 1 of `other` alone, near 1/2 shared; 1/2 where both are 0. Lengths are
        those of the file, of activations scaled as it was trained on.

        Raises:
            ValueError: no such source.

        Caveats:
            Crosscoders trained with L1 invent features of one model alone, whose direction in the other shrinks.
        """
        first, second = (self._directions(source).norm(dim=-1) for source in (one, other))
        both = first + second
        return torch.where(both > 0, second / both.where(both > 0, 1.0), 0.5)

    def decoder_cosine(self, one: int, other: int) -> Float[Tensor, "s"]:
        """Cosine between each feature's directions in two sources; 0 where one of them is 0. ValueError for none."""
        return nn.functional.cosine_similarity(self._directions(one), self._directions(other), dim=-1)

    @public()
    def fitted_to(self, model: Model) -> Crosscoder:
        """Itself, once it is checked that its sites exist in this model and have its width.

        Raises:
            ValueError: a width that differs, and sites that are not known.
            KeyError: a site that this model lacks.
        """
        for site in self.reads:
            if site is None:
                raise ValueError("these files do not say which sites it reads")
            check_width(site, self.d_in, as_network(model).config)
        return self

    def _directions(self, source: int) -> Float[Tensor, "s d"]:
        if not 0 <= source < self.n_sources:
            raise ValueError(f"a source is 0 to {self.n_sources - 1}, got {source}")
        return self.W_dec[source]

    def extra_repr(self) -> str:
        """The kind, the widths and the sites, for `print`."""
        sites = [f"reads={self.reads}"] if any(self.reads) else []
        return ", ".join(
            [f"{self.kind}, n_sources={self.n_sources}, d_in={self.d_in}, d_sae={self.d_sae}", *sites]
        )


def _check_kind(kind: DictionaryKind) -> None:
    """ValueError for kinds whose features are not those of one pre-activation each."""
    if isinstance(kind, Gated | MatchingPursuit):
        raise ValueError(f"a kind of one pre-activation is required, got {kind}")


def _check_weights(kind: DictionaryKind, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `weights` are those of a crosscoder of the kind, with matching shapes, and finite."""
    _check_kind(kind)
    shape = weights["W_enc"].shape if "W_enc" in weights else ()
    if len(shape) != 3 or 0 in shape:
        raise ValueError(f"the weights must hold W_enc [sources, d, s], got {shape_text(shape)}")
    n, d, s = shape
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "W_enc": ((n, d, s),), "b_enc": ((s,),), "W_dec": ((n, s, d),), "b_dec": ((n, d),),
        **({"threshold": ((s,), (n, s))} if isinstance(kind, JumpReLU) else {}),
    }  # fmt: skip
    scaling: dict[str, tuple[tuple[int, ...], ...]] = {
        "shift": ((n, d),), "scale": ((n,),), "unscale": ((n,),),
    }  # fmt: skip
    shapes |= {name: allowed for name, allowed in scaling.items() if name in weights}
    if set(weights) != set(shapes) or ("scale" in weights) != ("unscale" in weights):
        raise ValueError(f"{kind} requires the weights {sorted(shapes)}, got {sorted(weights)}")
    for name, weight in weights.items():
        if tuple(weight.shape) not in shapes[name]:
            wanted = " or ".join(shape_text(each) for each in shapes[name])
            raise ValueError(f"{name} must have shape {wanted}, got {shape_text(weight.shape)}")
        if not bool(weight.isfinite().all()):
            raise ValueError(f"{name} holds NaN or infinite numbers")
