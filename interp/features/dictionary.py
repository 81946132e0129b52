"""Dictionaries write a site's vectors as sums of few directions out of many; their features are read and edited.

f = act((x - b_dec) W_enc + b_enc), y = f W_dec + b_dec. A sparse autoencoder (SAE) gives back what it reads; a
transcoder reads what a layer reads and gives what the layer writes. What `act` is tells the kinds apart
(`activations`). Files of them are read by `formats`, training is in `training`, what a trained one is worth in
`dictionary_metrics`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.wording import value_text
from interp.features.activations import (
    AbsTopK,
    DictionaryKind,
    Gated,
    GroupMax,
    JumpReLU,
    MatchingPursuit,
    NormTopK,
    TopK,
    activated,
)
from interp.features.folding import shifted
from interp.model.config import Json, ModelConfig
from interp.model.edits import Edit, PositionIndex, Remember, RowChoice
from interp.model.mounted import ERROR, FEATURES, Shares, SitesOfBlock, Taps
from interp.model.norm import Normalize
from interp.model.parts import axis_size
from interp.model.sites import axes_of, find
from interp.model.tap import Read
from interp.passes.observe import Model, as_network

Normalisation = Literal["none", "layer_norm", "constant_norm_rescale"]
Vectors = Tensor | tuple[Tensor, Tensor]
"""Vectors [n d] that a dictionary reads; of a transcoder with those [n o] that it should write."""
FeatureChange = Callable[[Tensor], Tensor]
"""A function from features `[.. s]` to features of that shape; it gets a tensor of its own and may write into it."""
LAYER_NORM_EPS = 1e-5


class InputScaling(NamedTuple):
    """The shift and the divisor of an input before encoding, to be undone by `decode`."""

    shift: Float[Tensor, "*n 1"]
    scale: Float[Tensor, "*n 1"]


@public()
class Dictionary(nn.Module):
    """A dictionary of s features, frozen: a sparse autoencoder (SAE), or a transcoder.

    f = act((x - b_dec) W_enc + b_enc) are the features of x, and y = f W_dec + b_dec is what it says about them: x
    again for an SAE, the output of a layer whose input x is for a transcoder, which may add x W_skip.

    It intervenes through `Edit` alone: `dictionary.edits(change)` changes features where the dictionary belongs, and
    `Edit(site, dictionary.reconstruct)` puts an SAE's reconstruction in place of a site. What goes along decoder
    directions needs no encoder and is a closed change: `Add(dictionary.W_dec[7], scale=3.0)` steers with feature 7,
    `Project(dictionary.W_dec[7])` removes its direction, and `Swap(dictionary.W_dec[[3, 7]], values)` puts other values
    into the span of two.

    Args:
        kind: the activation function: `ReLU()`, `TopK(k)`, `NormTopK(k)`, `AbsTopK(k)`, `GroupMax(k)`, `JumpReLU()`,
            `Gated()` or `MatchingPursuit()`.
        weights: by name, `W_enc` [d s], `b_enc` [s], `W_dec` [s o], `b_dec` [o]. JumpReLU has `threshold` [s] too,
            Gated `b_gate`, `b_mag` and `r_mag` [s] in place of b_enc, MatchingPursuit no b_enc. `W_skip` [d o] only
            where there is a skip.
        reads: full name of the site whose vectors it encodes, such as "blocks.3.hook_resid_pre"; None: not known.
        writes: full name of the site that it reconstructs; None: the one that it reads, as an SAE does.
        before_gain: whether it reads the output of a norm before its gain and shift, as transcoders of Gemma Scope do;
            our site has both, and `fitted_to` folds them.
        apply_b_dec_to_input: whether b_dec is subtracted before encoding; None: of an SAE, and not of a transcoder.
        normalize_activations: scaling of each input by itself: "none", to mean 0 and standard deviation 1
            ("layer_norm", the n - 1 one, plus 1e-5) or to norm sqrt(d) ("constant_norm_rescale"). The reconstruction is
            brought back. Of SAEs alone.
        metadata: what else its file says, as SAELens keeps it (`model_name`, ...); no number depends on it.

    Raises:
        ValueError: weights that are missing, unknown, of a wrong shape or not finite, k > s, groups that do not divide
            s, and a transcoder that normalises or subtracts b_dec.
        KeyError: a site that no model has.

    Source:
        SAE: Bricken et al. 2023. Transcoder: Dunefsky et al. 2024 (arXiv:2406.11944), with a skip: Paulo et al. 2025
        (arXiv:2501.18823).

    See Also:
        `train_dictionary`, `load`: make one. `dictionary_quality`: what it is worth.

    Example:
        >>> eye, zero = torch.eye(24), torch.zeros(24)
        >>> weights = {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero}
        >>> sae = Dictionary(interp.features.ReLU(), weights, reads="blocks.2.hook_resid_post")
        >>> sae.encode(torch.arange(24.0) - 21).count_nonzero().item()
        2
        >>> steer = interp.Edit("L1.resid", interp.edits.Add(sae.W_dec[7], scale=3.0))
        >>> edits = [steer, *sae.edits(lambda features: 2 * features)]
        >>> interp.logit_lens(model.edited(edits), prompt).sizes["depth"]
        4
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
        reads: str | None = None,
        writes: str | None = None,
        before_gain: bool = False,
        apply_b_dec_to_input: bool | None = None,
        normalize_activations: Normalisation = "none",
        metadata: Json | None = None,
    ) -> None:
        super().__init__()
        _check_weights(kind, weights)
        for site in (reads, writes):
            if site is not None:
                axes_of(site)
        self.kind = kind
        self.reads = reads
        self.writes = reads if writes is None else writes
        self.before_gain = before_gain
        transcodes = (
            self.transcodes or "W_skip" in weights or weights["W_enc"].shape[0] != len(weights["b_dec"])
        )
        self.apply_b_dec_to_input = not transcodes if apply_b_dec_to_input is None else apply_b_dec_to_input
        self.normalize_activations = normalize_activations
        if transcodes and (self.apply_b_dec_to_input or normalize_activations != "none"):
            raise ValueError(
                "apply_b_dec_to_input and normalize_activations belong to an SAE, which gives back what it reads, and "
                "this is a transcoder"
            )
        self.metadata: Json = dict(metadata or {})
        for name, weight in weights.items():
            own = weight.detach().clone(memory_format=torch.contiguous_format)
            self.register_parameter(name, nn.Parameter(own, requires_grad=False))

    @property
    def d_in(self) -> int:
        """Width of the vectors that it reads."""
        return self.W_enc.shape[0]

    @property
    def d_sae(self) -> int:
        """Number of features."""
        return self.W_enc.shape[1]

    @property
    def d_out(self) -> int:
        """Width of the vectors that it writes."""
        return self.W_dec.shape[1]

    @property
    def skip(self) -> Float[Tensor, "d o"] | None:
        """The matrix `W_skip` of a dictionary that has one."""
        return self._parameters.get("W_skip")

    @property
    def transcodes(self) -> bool:
        """Whether it writes at another site than the one that it reads."""
        return self.writes != self.reads

    def encode(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n s"]:
        """The features of each vector, in the dictionary's dtype."""
        if isinstance(self.kind, MatchingPursuit):
            return self.kind.features(self._centred(x), self.W_dec)
        return self.activate(self.before(x))

    def before(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n s"]:
        """Pre-activations z = (x - b_dec) W_enc + b_enc (Gated: without b_enc). Not for x of another width."""
        z = self._centred(x) @ self.W_enc
        return z + self.b_enc if "b_enc" in self._parameters else z

    def _centred(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """Each vector as it is encoded: scaled, and without b_dec where that is subtracted."""
        self._check_input("x", x, self.d_in)
        shift, scale = self.scaling(x)
        eps = LAYER_NORM_EPS if self.normalize_activations == "layer_norm" else 0.0
        scaled = (x.to(self.W_enc.dtype) - shift) / (scale + eps)
        return scaled - self.b_dec if self.apply_b_dec_to_input else scaled

    def activate(self, z: Float[Tensor, "*n s"]) -> Float[Tensor, "*n s"]:
        """The features from the pre-activations. ValueError for matching pursuit, which has no such function."""
        norm = {"norm": self.W_dec.norm(dim=-1)} if isinstance(self.kind, NormTopK) else {}
        return activated(self.kind, z, {**dict(self.named_parameters(recurse=False)), **norm})

    def bias(self, layer: int | None = None) -> Float[Tensor, "o"]:
        """b_dec, the reconstruction without any feature or skip; `layer` is for dictionaries of several blocks."""
        return self.b_dec.detach()

    def constants(self, layer: int | None = None) -> Float[Tensor, "s"]:
        """The value at x = 0 of each feature as the linear function of x that it is where it is active.

        Args:
            layer: for dictionaries of several blocks; this one has one.

        Raises:
            ValueError: a dictionary that normalises, or matching pursuit, whose features are no such functions.
        """
        if self.normalize_activations != "none" or isinstance(self.kind, MatchingPursuit):
            normalised = f"the normalization {self.normalize_activations!r}"
            raise ValueError(
                "features that are linear in what the dictionary reads are required, this one has "
                + ("matching pursuit" if self.normalize_activations == "none" else normalised)
            )
        z = self.before(self.W_enc.new_zeros(1, self.d_in))[0]
        if isinstance(self.kind, Gated):
            z = z * self.get_parameter("r_mag").exp() + self.get_parameter("b_mag")
        return z.detach()

    def linear(
        self, x: Float[Tensor, "n d"], features: Int[Tensor, "c"]
    ) -> tuple[Float[Tensor, "c d"], Float[Tensor, "n"], Float[Tensor, "c"]]:
        """The pre-activations of some features as linear functions of x, at the scale that normalising gives each x.

        Returns:
            Directions D, a factor a of each x, and constants c, in float64: `before(x)` is a D x + c.

        Raises:
            ValueError: matching pursuit, whose features are no such functions.
        """
        self.check_linear("linear")
        directions = self.W_enc.detach()[:, features].double().mT
        constant = directions.new_zeros(len(features))
        if "b_enc" in self._parameters:
            constant = self.b_enc.detach()[features].double()
        if self.apply_b_dec_to_input:
            constant = constant - directions @ self.b_dec.detach().double()
        scale = self.scaling(x.double()).scale[..., 0].double()
        if self.normalize_activations == "layer_norm":
            # x loses its mean over coordinates
            scale = scale + LAYER_NORM_EPS
            directions = directions - directions.mean(1, keepdim=True)
        return directions, 1 / scale, constant

    @property
    def thresholds(self) -> Float[Tensor, "s"]:
        """Threshold of each feature that z must exceed for it to be active: trained for JumpReLU, else 0."""
        if not isinstance(self.kind, JumpReLU):
            return self.W_enc.new_zeros(self.d_sae)
        return self.kind.compared_with(self.get_parameter("threshold"))

    def decode(
        self, features: Float[Tensor, "*n s"], x: Float[Tensor, "*n d"] | None = None
    ) -> Float[Tensor, "*n o"]:
        """The sum of the features' directions plus b_dec, and the skip of x, in the dictionary's dtype.

        Args:
            features: [*n s].
            x: [*n d], the input that was encoded. A dictionary that normalises, or has a skip, requires it; the others
                ignore it.

        Raises:
            ValueError: no input for a dictionary that requires it, features of another number or on another device.
        """
        self._check_input("features", features, self.d_sae)
        directions = features @ self.W_dec + self.b_dec
        skip = self.skip
        if self.normalize_activations == "none" and skip is None:
            return directions
        if x is None:
            needs = self.normalize_activations if skip is None else "the skip"
            raise ValueError(f"decoding with {needs!r} requires the input that was encoded")
        if skip is not None:
            return directions + x.to(skip.dtype) @ skip
        shift, scale = self.scaling(x)
        return directions * scale + shift

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n o"]:
        """The reconstruction of each vector, or of a transcoder what it says that the layer writes."""
        return self.decode(self.encode(x), x)

    @public()
    def prefix(self, n: int) -> Dictionary:
        """The dictionary of its first n features, which of a Matryoshka dictionary is one by itself.

        Of the kinds that choose k features, the k largest are chosen among these.

        Raises:
            ValueError: n that is no number of features of it.

        Source:
            Bussmann et al. 2025, "Learning Multi-Level Features with Matryoshka Sparse Autoencoders"
            (arXiv:2503.17547).
        """
        if not 1 <= n <= self.d_sae:
            raise ValueError(f"n must be from 1 to {self.d_sae}, got {n}")
        columns = {"W_enc": (slice(None), slice(n)), "b_dec": (), "W_skip": ()}
        weights = {name: weight[columns.get(name, (slice(n),))] for name, weight in self.named_parameters()}
        return self._with(weights, before_gain=self.before_gain)

    def _with(self, weights: Mapping[str, Tensor], *, before_gain: bool) -> Dictionary:
        """The same dictionary with other weights."""
        return Dictionary(
            self.kind,
            weights,
            reads=self.reads,
            writes=self.writes,
            before_gain=before_gain,
            apply_b_dec_to_input=self.apply_b_dec_to_input,
            normalize_activations=self.normalize_activations,
            metadata=self.metadata,
        )

    @public()
    def moved(self, reads: str, writes: str | None = None, *, before_gain: bool = False) -> Dictionary:
        """The same dictionary, with the same weights in memory, at other sites; arguments as of `Dictionary`."""
        other = copy.copy(self)
        other.reads, other.writes = reads, reads if writes is None else writes
        other.before_gain = before_gain
        return other

    @public()
    def fitted_to(self, model: Model) -> Dictionary:
        """The dictionary for this model: its sites exist and have its widths, the gain of a norm is in its weights.

        With g and s the gain and shift of the norm, x g + s is what our site holds and x what the dictionary was made
        for: W_enc / g in place of W_enc, b_enc - (s / g) W_enc in place of b_enc, and the skip likewise.

        Raises:
            ValueError: a dictionary that does not know its site, a width that differs, and a gain of 0.
            KeyError: a site that this model lacks.
        """
        network = as_network(model)
        for word, site, width in (("reads", self.reads, self.d_in), ("writes", self.writes, self.d_out)):
            check_width(self._site(word, site), width, network.config)
        if not self.before_gain:
            return self
        assert self.reads is not None
        return self._with_gain(network.get_submodule(self.reads.removesuffix(".hook_normalized")))

    def _with_gain(self, norm: nn.Module) -> Dictionary:
        """The dictionary that reads the output of this norm with its gain and shift."""
        if not isinstance(norm, Normalize):
            raise ValueError(f"before_gain requires a dictionary that reads a norm, got {self.reads!r}")
        weights = {name: weight.detach() for name, weight in self.named_parameters()}
        gain, shift = norm.gamma, norm.bias
        if gain is not None and not bool(gain.all()):
            raise ValueError(f"a gain of the norm that is nowhere 0 is required at {self.reads!r}")
        for matrix in ("W_enc", "W_skip"):
            if gain is None or matrix not in weights:
                continue
            given = weights[matrix]
            weights[matrix] = (given / gain.to(given)[:, None]).to(given)
            if shift is None:
                continue
            without = -(shift.to(given) @ weights[matrix])
            weights = (
                shifted(weights, without)
                if matrix == "W_enc"
                else weights | {"b_dec": weights["b_dec"] + without}
            )
        return self._with(weights, before_gain=False)

    def _check_input(self, what: str, x: Tensor, width: int) -> None:
        """Raise ValueError for a tensor of another width, or on another device than the weights."""
        check_ends(what, x, width)
        if x.device != (device := self.W_enc.device):
            raise ValueError(
                f"a dictionary on the device of what it reads, {x.device}, is required; this one is on {device}: "
                f"dictionary.to({str(x.device)!r})"
            )

    def scaling(self, x: Float[Tensor, "*n d"]) -> InputScaling:
        """What is subtracted from each vector and what it is divided by, as `normalize_activations` says."""
        x = x.to(self.W_enc.dtype)
        match self.normalize_activations:
            case "layer_norm":
                return InputScaling(x.mean(-1, keepdim=True), x.std(-1, keepdim=True))
            case "constant_norm_rescale":
                return InputScaling(
                    torch.zeros_like(x[..., :1]), x.norm(dim=-1, keepdim=True) / self.d_in**0.5
                )
            case "none":
                return InputScaling(torch.zeros_like(x[..., :1]), torch.ones_like(x[..., :1]))

    @public()
    def read(self, site: str | None = None) -> Read:
        """A read of the features of a site: `[b p s]`, and `[b p h s]` for a dictionary of single heads.

        Of heads' sites it reads all heads of a position side by side (h slowest, as SAELens does) if they fit.

        Args:
            site: full name of the site; None: the one that the dictionary reads.

        Raises:
            ValueError: no site for a dictionary that does not know which it reads.

        Example:
            >>> eye, zero = torch.eye(24), torch.zeros(24)
            >>> sae = Dictionary(interp.features.ReLU(), {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero})
            >>> read = sae.read("blocks.1.hook_resid_pre")
            >>> interp.observe(model.transformer, model.text.batch(prompt), [read]).trace[read].shape[2]
            24
        """
        return Read(self._site("reads", self.reads) if site is None else site, via=self.features)

    @public()
    def edits(
        self,
        change: FeatureChange,
        *,
        error: bool = True,
        at: Mapping[str, PositionIndex] = MappingProxyType({}),
        rows: RowChoice | None = None,
    ) -> list[Edit]:
        """The edits of one pass that change features where the dictionary belongs; they belong together.

        Args:
            change: gets the features `[b p s]` and returns them changed.
            error: whether what the dictionary does not explain stays as it is: y + decode(changed) - decode(f) at the
                site that it writes, so that a change of nothing gives y back bit for bit. Without it, decode(changed)
                alone.
            at, rows: the tokens and rows whose features are changed, as in `Edit`.

        Returns:
            For an SAE the edit of its site; for a transcoder two, the first of which remembers what it reads.

        Raises:
            ValueError: a dictionary that does not know its site; when it runs, a change to another shape, or a site
                that does not fit.

        Example:
            >>> eye, zero = torch.eye(24), torch.zeros(24)
            >>> weights = {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero}
            >>> sites = {"reads": "blocks.1.hook_mlp_in", "writes": "blocks.1.hook_mlp_out"}
            >>> coder = Dictionary(interp.features.ReLU(), weights, **sites)
            >>> doubled = coder.edits(lambda features: 2 * features, at={"pos": -1})
            >>> interp.logit_lens(model.edited(doubled), prompt).sizes["prompt"]
            1
        """
        reads, writes = self._site("reads", self.reads), self._site("writes", self.writes)
        return across(reads, writes, partial(_changed, self, change, error), at=at, rows=rows)

    @property
    def taps(self) -> tuple[Taps, ...]:
        """The sites that it reads and writes, and its number of features."""
        return (Taps(self.reads, self.writes, self.d_sae),)

    @property
    def in_one_block(self) -> bool:
        """True: its features write one site."""
        return True

    def splits(self, places: Mapping[int, SitesOfBlock], blocks: range) -> list[Edit]:
        """The edits by which a model's features and errors are sites (`Transformer.with_dictionaries`).

        With y the value at the site that is written and f its features, it becomes y + decode(f') - decode(f) + e' - e
        where f' and e' are what features and error are after their sites; y itself where they are the same tensors.

        Args:
            places: its block.
            blocks: those that the pass runs through.
        """
        (place,) = places.values()

        def split(read: Tensor, written: Tensor) -> Tensor:
            x = self.vectors(read)
            features = self.encode(x)
            given = self.decode(features, x)
            error = written.reshape(given.shape) - given
            seen, rest = place.visit(FEATURES, features), place.visit(ERROR, error)
            if seen is features and rest is error:
                return written
            changed = written.reshape(given.shape) + (self.decode(seen, x) - given) + (rest - error)
            return changed.view_as(written).to(written.dtype)

        return across(self._site("reads", self.reads), self._site("writes", self.writes), split)

    def shares(
        self,
        direction: Float[Tensor, "b o"],
        read: Float[Tensor, "b ..."],
        written: Float[Tensor, "b ..."],
        features: Float[Tensor, "b s"] | None = None,
    ) -> Shares:
        """The terms of what stands at the site that it writes, along a direction there (`interp.model.mounted`).

        Raises:
            ValueError: edited features of a dictionary that normalises: the scale of what was read is gone.
        """
        if features is not None and self.normalize_activations != "none":
            raise ValueError(
                f"features that are not edited are required of a dictionary that normalises "
                f"({self.normalize_activations}): its scale is that of the value before the edit"
            )
        x = self.vectors(read[:, None])[:, 0].to(self.W_enc.device)
        f = (self.encode(x) if features is None else features).to(direction)
        shift, scale = (part.to(direction) for part in self.scaling(x))
        directions, skip = self.W_dec.to(direction), self.skip
        bias = self.b_dec.to(direction) * scale + shift
        terms = (f.abs() @ directions.abs()) * scale + bias.abs()
        given = (f @ directions) * scale + bias
        linear = None if skip is None else x.to(direction) @ skip.to(direction)
        if linear is not None:
            given, terms = given + linear, terms + linear.abs()
        return Shares(
            f * (direction @ directions.mT) * scale,
            (direction * bias).sum(-1, keepdim=True),
            None if linear is None else (direction * linear).sum(-1, keepdim=True),
            (direction * (written.reshape(given.shape).to(direction) - given)).sum(-1, keepdim=True),
            f != 0,
            (terms * direction).norm(dim=-1),
        )

    @public()
    def on_features(self, change: FeatureChange, *, error: bool = True) -> OnFeatures:
        """The change of an `Edit` of any site by way of the features that an SAE finds there; arguments as `edits`.

        Raises:
            ValueError: a transcoder; when it runs, a change to another shape, or a site that does not fit.

        Example:
            >>> eye, zero = torch.eye(24), torch.zeros(24)
            >>> sae = Dictionary(interp.features.ReLU(), {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero})
            >>> doubled = interp.Edit("L1.resid", sae.on_features(lambda features: 2 * features))
            >>> interp.logit_lens(model.edited(doubled), prompt).sizes["prompt"]
            1
        """
        self.check_autoencoder("on_features")
        return OnFeatures(self, change, error)

    def features(self, value: Float[Tensor, "b p ..."]) -> Float[Tensor, "b p ..."]:
        """The features of a site's value, as `read` takes them."""
        return self.encode(self.vectors(value))

    def reconstruct(self, value: Float[Tensor, "b p ..."]) -> Float[Tensor, "b p ..."]:
        """An SAE's reconstruction of a site's value, in its shape and dtype; its error is lost. Not of transcoders."""
        self.check_autoencoder("reconstruct")
        return self(self.vectors(value)).view_as(value).to(value.dtype)

    def check_autoencoder(self, what: str) -> None:
        """ValueError for a transcoder, of which this cannot be asked."""
        if self.transcodes or self.d_out != self.d_in:
            raise ValueError(
                f"{what} requires an SAE, which gives back what it reads; this is a transcoder: use edits(change)"
            )

    def check_linear(self, what: str) -> None:
        """ValueError for matching pursuit, whose features have no pre-activation."""
        if isinstance(self.kind, MatchingPursuit):
            raise ValueError(f"{what} requires features with a pre-activation, matching pursuit has none")

    def _site(self, word: str, site: str | None) -> str:
        if site is None:
            raise ValueError(
                f"this dictionary does not know its site: Dictionary(..., {word}='blocks.3.hook_resid_post')"
            )
        return site

    def _check_gain(self) -> None:
        if self.before_gain:
            raise ValueError(
                "this dictionary reads the output of a norm before its gain: dictionary.fitted_to(model) puts the gain "
                "into its weights"
            )

    def vectors(self, value: Float[Tensor, "b ..."]) -> Float[Tensor, "b ... d"]:
        """A site's value as vectors for the encoder: heads side by side where together they have its width.

        Cells of a site, such as one position of it, are read where they are vectors of that width.

        Raises:
            ValueError: a site that is neither so wide nor made of heads that are.
        """
        self._check_gain()
        if not isinstance(value, Tensor):
            raise ValueError(f"the value of a site is required, a tensor, got {value_text(value)}")
        return vectors_of(value, self.d_in)

    def extra_repr(self) -> str:
        """The kind, the widths and the sites, for `print`."""
        sites = [
            f"{word}={site!r}" for word, site in (("reads", self.reads), ("writes", self.writes)) if site
        ]
        return ", ".join(
            [f"{self.kind}, d_in={self.d_in}, d_sae={self.d_sae}", *sites[: 1 + self.transcodes]]
        )


def vectors_of(value: Float[Tensor, "b ..."], width: int) -> Float[Tensor, "b ... d"]:
    """A site's value as vectors of this width, heads side by side where together they have it. Not for others."""
    if value.ndim == 4 and value.shape[2] * value.shape[3] == width:
        return value.flatten(2)
    if value.ndim < 2 or value.shape[-1] != width:
        raise ValueError(
            f"this dictionary reads {width} numbers per position, the site has shape {shape_text(value.shape)}"
        )
    return value


@dataclass(frozen=True, eq=False)
class OnFeatures:
    """A change of a site by way of the features that an SAE finds there, as `Dictionary.on_features` describes."""

    dictionary: Dictionary
    change: FeatureChange
    error: bool = True
    """Whether what the dictionary does not explain is kept."""

    def __call__(self, cells: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
        """The cells with their features changed."""
        return _changed(self.dictionary, self.change, self.error, cells, cells)


def across(
    reads: str,
    writes: str,
    change: Callable[[Tensor, Tensor], Tensor],
    *,
    at: Mapping[str, PositionIndex] = MappingProxyType({}),
    rows: RowChoice | None = None,
) -> list[Edit]:
    """The edits of one pass that change a site by what another one holds, or itself: change(read, written)."""
    if reads == writes:
        return [Edit(writes, partial(_of_itself, change), at=at, rows=rows)]
    read = Remember()
    return [Edit(reads, read, at=at, rows=rows), Edit(writes, _Across(read, change), at=at, rows=rows)]


def _of_itself(change: Callable[[Tensor, Tensor], Tensor], cells: Tensor) -> Tensor:
    return change(cells, cells)


@dataclass(frozen=True, eq=False)
class _Across:
    """The change of a site by what another one held in the same pass."""

    read: Remember
    change: Callable[[Tensor, Tensor], Tensor]

    def at_site(self, site: str, memory: dict[str, object]) -> Callable[[Tensor], Tensor]:
        """The change in one pass."""
        return lambda cells: self.change(self.read.value(memory), cells)


def check_changed(changed: object, shape: torch.Size) -> None:
    """ValueError unless what a `FeatureChange` returned are features of this shape."""
    if not isinstance(changed, Tensor) or changed.shape != shape:
        raise ValueError(
            f"the change must return features of shape {shape_text(shape)}, got {value_text(changed)}"
        )


def _changed(
    dictionary: Dictionary, change: FeatureChange, error: bool, source: Tensor, cells: Float[Tensor, "b ..."]
) -> Float[Tensor, "b ..."]:
    """The cells with the features of `source` changed; `error`: with what the dictionary leaves of them unexplained."""
    x = dictionary.vectors(source)
    features = dictionary.encode(x)
    before = dictionary.decode(features, x) if error else None  # now: `change` may write into `features`
    changed = change(features)
    check_changed(changed, features.shape)
    after = dictionary.decode(changed, x)
    if after.numel() != cells.numel():
        raise ValueError(
            f"this dictionary writes {dictionary.d_out} numbers per position, the site has shape "
            f"{shape_text(cells.shape)}"
        )
    return (after if before is None else cells.reshape(after.shape) + (after - before)).view_as(cells)


def _check_weights(kind: DictionaryKind, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `weights` are exactly those of the kind, with matching shapes and finite numbers."""
    shapes = _shapes(kind, weights)
    if set(weights) != set(shapes):
        raise ValueError(f"{kind} requires the weights {sorted(shapes)}, got {sorted(weights)}")
    for name, weight in weights.items():
        if weight.shape != shapes[name]:
            raise ValueError(
                f"{name} must have shape {shape_text(shapes[name])}, as W_enc is "
                f"{shape_text(weights['W_enc'].shape)}, got {shape_text(weight.shape)}"
            )
        if not bool(weight.isfinite().all()):
            raise ValueError(f"{name} holds NaN or infinite numbers")
    d_sae = shapes["W_enc"][1]
    if isinstance(kind, TopK | NormTopK | AbsTopK | GroupMax) and kind.k > d_sae:
        raise ValueError(f"k must be at most d_sae = {d_sae}, got {kind.k}")
    if isinstance(kind, MatchingPursuit) and not torch.equal(weights["W_enc"], weights["W_dec"].mT):
        raise ValueError(f"{kind} requires W_enc to be W_dec transposed")
    if isinstance(kind, GroupMax) and d_sae % kind.k:
        raise ValueError(f"{d_sae} features must fall into k groups of one size, got k={kind.k}")


def check_ends(what: str, x: object, *ends: int) -> None:
    """Raise ValueError unless this is a tensor whose last dims have these sizes."""
    if not isinstance(x, Tensor) or x.shape[-len(ends) :] != ends:
        sizes = ", ".join(["...", *map(str, ends)])
        raise ValueError(f"{what} must be a tensor of shape [{sizes}], got {value_text(x)}")


def check_width(site: str, width: int, config: ModelConfig) -> None:
    """ValueError unless the vectors of a site have this width, or those of all its heads together."""
    sizes = {"d": config.d_model, "e": config.d_head, "h": config.n_heads, "g": config.kv_heads}
    letters = find(site, config)[0].axes.split()[2:]
    known = [axis_size(letter, config) if letter == "m" else sizes.get(letter) for letter in letters]
    if None not in known and width not in (size := math.prod(filter(None, known)), known[-1]):
        raise ValueError(f"a dictionary of width {size} is required at {site!r} of this model, got {width}")


def _shapes(kind: DictionaryKind, weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of every weight of a dictionary of this kind, as `W_enc` and `b_dec` say."""
    shape = weights["W_enc"].shape if "W_enc" in weights else ()
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"the weights must hold W_enc [d_in, d_sae], got {shape_text(shape)}")
    d_in, d_sae = shape
    d_out = weights["b_dec"].shape[0] if "b_dec" in weights and weights["b_dec"].ndim == 1 else d_in
    per_feature = {
        JumpReLU: ("b_enc", "threshold"), Gated: ("b_gate", "b_mag", "r_mag"), MatchingPursuit: ()
    }.get(type(kind), ("b_enc",))  # fmt: skip
    skip = {"W_skip": (d_in, d_out)} if "W_skip" in weights else {}
    return {
        "W_enc": (d_in, d_sae), "W_dec": (d_sae, d_out), "b_dec": (d_out,), **skip,
        **dict.fromkeys(per_feature, (d_sae,)),
    }  # fmt: skip
