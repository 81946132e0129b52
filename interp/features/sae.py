"""Sparse autoencoders write a site's vectors as sums of few directions out of many; their features are read and edited.

f = act((x - b_dec) W_enc + b_enc), x_hat = f W_dec + b_dec. What `act` is tells the kinds apart: ReLU (Bricken et al.
2023), TopK (Gao et al. 2024), JumpReLU (Rajamanoharan et al. 2024). Names and layouts are SAELens', so its files load
(`sae_files`); training is in `sae_training`, what a trained one is worth in `sae_metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.kinds import Positive
from interp.core.wording import value_text
from interp.model.config import Json
from interp.model.tap import Read

Normalisation = Literal["none", "layer_norm", "constant_norm_rescale"]
FeatureChange = Callable[[Tensor], Tensor]
"""A function from features `[.. s]` to features of that shape; it gets a tensor of its own and may write into it."""
LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True)
class ReLU:
    """Autoencoder kind with f = max(z, 0)."""


@public()
@dataclass(frozen=True)
class TopK:
    """Autoencoder kind with f = max(z, 0) for the k largest z of each vector, 0 for the others.

    Raises:
        ValueError: k below 1.
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}")


@public()
@dataclass(frozen=True)
class JumpReLU:
    """Autoencoder kind with f = z where z > threshold (one per feature, never below 0), 0 elsewhere.

    Raises:
        ValueError: a bandwidth that is not above 0 and finite.
    """

    bandwidth: Positive = 0.5
    """Width of the kernel that approximates the derivative of the jump; used in training alone."""


SaeKind = ReLU | TopK | JumpReLU


class _Jump(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, z: Tensor, threshold: Tensor, bandwidth: Tensor) -> Tensor:
        ctx.save_for_backward(z, threshold, bandwidth)
        return z * (z > threshold)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        z, threshold, bandwidth = ctx.saved_tensors  # type: ignore[attr-defined]
        to_threshold = -(threshold / bandwidth) * _rectangle(z, threshold, bandwidth) * grad
        return grad * (z > threshold), to_threshold.sum_to_size(threshold.shape), None


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, z: Tensor, threshold: Tensor, bandwidth: Tensor) -> Tensor:
        ctx.save_for_backward(z, threshold, bandwidth)
        return (z > threshold).to(z.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[None, Tensor, None]:
        z, threshold, bandwidth = ctx.saved_tensors  # type: ignore[attr-defined]
        to_threshold = -_rectangle(z, threshold, bandwidth) / bandwidth * grad
        return None, to_threshold.sum_to_size(threshold.shape), None


def _rectangle(z: Tensor, threshold: Tensor, bandwidth: Tensor) -> Tensor:
    return ((z - threshold).abs() < bandwidth / 2).to(z.dtype)


def jump_relu(
    z: Float[Tensor, "*n s"], threshold: Float[Tensor, "s"], bandwidth: float
) -> Float[Tensor, "*n s"]:
    """z where z > threshold, 0 elsewhere; differentiable in the threshold by a straight-through estimator.

    With g the gradient of the output: z receives g where it is active, the threshold receives
    -(threshold / bandwidth) 1[|z - threshold| < bandwidth / 2] g, summed over vectors (Rajamanoharan et al.
    2024).

    Example:
        >>> jump_relu(torch.tensor([[0.5, 2.0]]), torch.ones(2), 0.1).tolist()
        [[0.0, 2.0]]
    """
    return _Jump.apply(z, threshold, z.new_tensor(bandwidth))  # type: ignore[no-untyped-call]


def step(z: Float[Tensor, "*n s"], threshold: Float[Tensor, "s"], bandwidth: float) -> Float[Tensor, "*n s"]:
    """1 where z > threshold, 0 elsewhere; its sum over features is the L0 that a JumpReLU is trained on.

    With g the gradient of the output: the threshold receives -(1 / bandwidth) 1[|z - threshold| < bandwidth / 2] g,
    summed over vectors (Rajamanoharan et al. 2024); z receives none.

    Example:
        >>> step(torch.tensor([[0.5, 2.0]]), torch.ones(2), 0.1).sum().item()
        1.0
    """
    return _Step.apply(z, threshold, z.new_tensor(bandwidth))  # type: ignore[no-untyped-call]


class InputScaling(NamedTuple):
    """The shift and the divisor of an input before encoding, to be undone by `decode`."""

    shift: Float[Tensor, "*n 1"]
    scale: Float[Tensor, "*n 1"]


@public()
class SAE(nn.Module):
    """A sparse autoencoder, frozen: `W_enc [d s]`, `b_enc [s]`, `W_dec [s d]`, `b_dec [d]` (and `threshold [s]`).

    f = act((x - b_dec) W_enc + b_enc), x_hat = f W_dec + b_dec.

    It intervenes through `Edit` alone: `Edit(site, sae.reconstruct)` puts the reconstruction in place of a site, and
    `Edit(site, sae.on_features(change))` changes features. What goes along decoder directions needs no encoder and is a
    closed change: `Add(sae.W_dec[7], scale=3.0)` steers with feature 7, `Project(sae.W_dec[7])` removes its direction,
    and `Swap(sae.W_dec[[3, 7]], values)` puts other values into the span of two.

    Args:
        kind: the activation function: `ReLU()`, `TopK(k)` or `JumpReLU()`.
        weights: the weights by name, of the shapes above; `threshold` for JumpReLU alone.
        apply_b_dec_to_input: whether b_dec is subtracted before encoding.
        normalize_activations: scaling of each input by itself: "none", to mean 0 and standard deviation 1
            ("layer_norm", the n - 1 one, plus 1e-5) or to norm sqrt(d) ("constant_norm_rescale"). The reconstruction is
            brought back.
        metadata: where it belongs, as SAELens keeps it (`hook_name`, `model_name`, ...); no number depends on it.

    Raises:
        ValueError: weights that are missing, unknown, of a wrong shape or not finite, and k > s.

    Source:
        ReLU: Bricken et al. 2023. TopK: Gao et al. 2024. JumpReLU: Rajamanoharan et al. 2024.

    See Also:
        `train_sae`, `load_sae`: make one. `sae_quality`: what it is worth.

    Example:
        >>> eye, zero = torch.eye(24), torch.zeros(24)
        >>> sae = SAE(ReLU(), {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero})
        >>> sae.encode(torch.arange(24.0) - 21).count_nonzero().item()
        2
        >>> steer = interp.Edit("L1.resid", interp.edits.Add(sae.W_dec[7], scale=3.0))
        >>> edits = [steer, interp.Edit("L2.resid", sae.reconstruct)]
        >>> interp.logit_lens(model.edited(edits), prompt).sizes["depth"]
        4
    """

    W_enc: nn.Parameter
    b_enc: nn.Parameter
    W_dec: nn.Parameter
    b_dec: nn.Parameter

    def __init__(
        self,
        kind: SaeKind,
        weights: Mapping[str, Tensor],
        *,
        apply_b_dec_to_input: bool = True,
        normalize_activations: Normalisation = "none",
        metadata: Json | None = None,
    ) -> None:
        super().__init__()
        _check_weights(kind, weights)
        self.kind = kind
        self.apply_b_dec_to_input = apply_b_dec_to_input
        self.normalize_activations = normalize_activations
        self.metadata: Json = dict(metadata or {})
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight.detach().clone(), requires_grad=False))

    @property
    def d_in(self) -> int:
        """Width of the vectors that it reads."""
        return self.W_enc.shape[0]

    @property
    def d_sae(self) -> int:
        """Number of features."""
        return self.W_enc.shape[1]

    def encode(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n s"]:
        """The features of each vector, in the autoencoder's dtype."""
        return self.activate(self.before(x))

    def before(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n s"]:
        """Pre-activations z = (x - b_dec) W_enc + b_enc. ValueError for x of another width or on another device."""
        self._check_input("x", x, self.d_in)
        shift, scale = self._scaling(x)
        eps = LAYER_NORM_EPS if self.normalize_activations == "layer_norm" else 0.0
        scaled = (x.to(self.W_enc.dtype) - shift) / (scale + eps)
        centred = scaled - self.b_dec if self.apply_b_dec_to_input else scaled
        return centred @ self.W_enc + self.b_enc

    def activate(self, z: Float[Tensor, "*n s"]) -> Float[Tensor, "*n s"]:
        """The features from the pre-activations."""
        match self.kind:
            case ReLU():
                return z.relu()
            case TopK(k):
                values, index = z.topk(k)
                return torch.zeros_like(z).scatter(-1, index, values.relu())
            case JumpReLU(bandwidth):
                return jump_relu(z, self.thresholds, bandwidth)

    @property
    def thresholds(self) -> Float[Tensor, "s"]:
        """Threshold of each feature that z must exceed for it to be active: trained for JumpReLU, else 0."""
        if not isinstance(self.kind, JumpReLU):
            return torch.zeros_like(self.b_enc)
        return self.get_parameter("threshold").clamp_min(0.0)

    def decode(
        self, features: Float[Tensor, "*n s"], x: Float[Tensor, "*n d"] | None = None
    ) -> Float[Tensor, "*n d"]:
        """The sum of the features' directions plus b_dec, in the autoencoder's dtype.

        Args:
            features: [*n s].
            x: [*n d], the input that was encoded. An autoencoder that normalises requires it, to bring the result back
                to its scale; the others ignore it.

        Raises:
            ValueError: no input for an autoencoder that normalises, or features of another number or on another
                device.
        """
        self._check_input("features", features, self.d_sae)
        directions = features @ self.W_dec + self.b_dec
        if self.normalize_activations == "none":
            return directions
        if x is None:
            raise ValueError(
                f"decoding after {self.normalize_activations!r} requires the input that was encoded"
            )
        shift, scale = self._scaling(x)
        return directions * scale + shift

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """The reconstruction of each vector."""
        return self.decode(self.encode(x), x)

    def _check_input(self, what: str, x: Tensor, width: int) -> None:
        """Raise ValueError for a tensor of another width, or on another device than the weights."""
        if not isinstance(x, Tensor) or x.shape[-1:] != (width,):
            raise ValueError(
                f"{what} must be a tensor with {width} numbers in its last dim, got {value_text(x)}"
            )
        if x.device != (device := self.W_enc.device):
            raise ValueError(
                f"an autoencoder on the device of what it reads, {x.device}, is required; this one is on {device}: "
                f"sae.to({str(x.device)!r})"
            )

    def _scaling(self, x: Float[Tensor, "*n d"]) -> InputScaling:
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
    def read(self, site: str) -> Read:
        """A read of the features of a site: `[b p s]`, and `[b p h s]` for an autoencoder of single heads.

        Of heads' sites it reads all heads of a position side by side (h slowest, as SAELens does) if they fit.

        Example:
            >>> eye, zero = torch.eye(24), torch.zeros(24)
            >>> sae = SAE(ReLU(), {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero})
            >>> read = sae.read("blocks.1.hook_resid_pre")
            >>> interp.observe(model.transformer, model.text.batch(prompt), [read]).trace[read].shape[2]
            24
        """
        return Read(site, via=self.features)

    @public()
    def on_features(self, change: FeatureChange, *, error: bool = True) -> OnFeatures:
        """The change of an `Edit` that changes a site by way of its features.

        Args:
            change: gets the features `[b p s]` and returns them changed.
            error: whether what the autoencoder does not explain stays as it is: x + decode(changed) - decode(f), so
                that a change of nothing gives x back bit for bit. Without it, decode(changed) alone.

        Raises:
            ValueError: when it runs, a change to another shape, or a site that does not fit.

        Example:
            >>> eye, zero = torch.eye(24), torch.zeros(24)
            >>> sae = SAE(ReLU(), {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero})
            >>> doubled = interp.Edit("L1.resid", sae.on_features(lambda features: 2 * features))
            >>> interp.logit_lens(model.edited(doubled), prompt).sizes["prompt"]
            1
        """
        return OnFeatures(self, change, error)

    def features(self, value: Float[Tensor, "b p ..."]) -> Float[Tensor, "b p ..."]:
        """The features of a site's value, as `read` takes them."""
        return self.encode(self.vectors(value))

    def reconstruct(self, value: Float[Tensor, "b p ..."]) -> Float[Tensor, "b p ..."]:
        """The reconstruction of a site's value, in its shape and dtype; its error is lost."""
        return self(self.vectors(value)).view_as(value).to(value.dtype)

    def vectors(self, value: Float[Tensor, "b ..."]) -> Float[Tensor, "b ... d"]:
        """A site's value as vectors for the encoder: heads side by side where together they have its width.

        Cells of a site, such as one position of it, are read where they are vectors of that width.

        Raises:
            ValueError: a site that is neither so wide nor made of heads that are.
        """
        if not isinstance(value, Tensor):
            raise ValueError(f"the value of a site is required, a tensor, got {value_text(value)}")
        if value.ndim == 4 and value.shape[2] * value.shape[3] == self.d_in:
            return value.flatten(2)
        if value.ndim < 2 or value.shape[-1] != self.d_in:
            raise ValueError(
                f"this autoencoder reads {self.d_in} numbers per position, the site has shape {shape_text(value.shape)}"
            )
        return value

    def extra_repr(self) -> str:
        """The kind and the widths, for `print`."""
        return f"{self.kind}, d_in={self.d_in}, d_sae={self.d_sae}"


@dataclass(frozen=True, eq=False)
class OnFeatures:
    """A change of a site by way of the features that an autoencoder finds there, as `SAE.on_features` describes."""

    sae: SAE
    change: FeatureChange
    error: bool = True
    """Whether what the autoencoder does not explain is kept."""

    def __call__(self, cells: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
        """The cells with their features changed."""
        sae = self.sae
        x = sae.vectors(cells)
        features = sae.encode(x)
        before = sae.decode(features, x) if self.error else None  # now: `change` may write into `features`
        changed = self.change(features)
        if changed.shape != features.shape:
            raise ValueError(
                f"the change must return features of shape {shape_text(features.shape)}, "
                f"got {shape_text(changed.shape)}"
            )
        after = sae.decode(changed, x)
        return (after if before is None else x + (after - before)).view_as(cells)


def _check_weights(kind: SaeKind, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `weights` are exactly those of the kind, with matching shapes and finite numbers."""
    names = {"W_enc", "b_enc", "W_dec", "b_dec"} | ({"threshold"} if isinstance(kind, JumpReLU) else set())
    if set(weights) != names:
        raise ValueError(f"{kind} requires the weights {sorted(names)}, got {sorted(weights)}")
    shape = weights["W_enc"].shape
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"W_enc must have shape [d_in, d_sae], got {shape_text(shape)}")
    d_in, d_sae = shape
    shapes = {
        "W_dec": (d_sae, d_in),
        "b_enc": (d_sae,),
        "b_dec": (d_in,),
        "threshold": (d_sae,),
        "W_enc": shape,
    }
    for name, weight in weights.items():
        if weight.shape != shapes[name]:
            raise ValueError(
                f"{name} must have shape {shape_text(shapes[name])}, as W_enc is {shape_text(shape)}, "
                f"got {shape_text(weight.shape)}"
            )
        if not bool(weight.isfinite().all()):
            raise ValueError(f"{name} holds NaN or infinite numbers")
    if isinstance(kind, TopK) and kind.k > d_sae:
        raise ValueError(f"k must be at most d_sae = {d_sae}, got {kind.k}")
