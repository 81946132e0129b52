"""Training a sparse autoencoder on activations: one loop for the three kinds, which differ in their penalty.

Inside, activations are scaled to a mean square norm of d_in, so that a sparsity, a bandwidth or a learning rate means
the same at every layer of every model (Anthropic, April 2024); the factor is divided out of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx
from tqdm import tqdm

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.kinds import Count, Device, PositiveCount, require_device
from interp.core.results import labelled
from interp.core.wording import odd_value
from interp.features.activations import JumpReLU, ReLU, TopK, step
from interp.features.dictionary import Dictionary

if TYPE_CHECKING:
    import xarray as xr

TrainedKind = ReLU | TopK | JumpReLU
"""The kinds that are trained here."""
WARM_UP, DECAY = 0.05, 0.2
"""Shares of the steps: the rate and the sparsity grow over the first, the rate falls to 0 over the last."""
AUX_COEFFICIENT = 1 / 32
"""Weight of the dead features' reconstruction of the error (Gao et al. 2024)."""
RESAMPLED = 0.2
"""Norm of a resampled feature's encoder, as a share of the mean norm of living ones (Bricken et al. 2023)."""
UNITS = {
    **dict.fromkeys(("loss", "error", "penalty"), "unit of training, per vector"),
    "l0": "active features per vector", "dead": "share of features",
}  # fmt: skip
"""Units of the numbers of the history."""
SAMPLE = 4096
"""Vectors from which the scale and the first b_dec are estimated."""


class Terms(NamedTuple):
    """The terms of the loss of one batch, in the unit of training."""

    loss: Float[Tensor, ""]
    error: Float[Tensor, ""]
    """Mean of ||x - x_hat||^2."""
    penalty: Float[Tensor, ""]
    """Mean L1 norm of the features (ReLU), mean number of active features (JumpReLU), or `dead_error` (TopK)."""
    l0: Float[Tensor, ""]
    """Mean number of active features."""
    fired: Bool[Tensor, "s"]
    """Which features were active on any vector."""


@public(unchecked=("activations",))
def train_dictionary(
    activations: Tensor | Iterable[Tensor],
    kind: TrainedKind,
    d_sae: Count,
    *,
    steps: Count,
    sparsity: float | None = None,
    lr: float = 1e-3,
    batch_size: PositiveCount = 1024,
    dead_after: PositiveCount = 200,
    seed: int = 0,
    device: Device | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Dictionary, xr.Dataset]:
    """Train a sparse autoencoder on activations.

    Minimises, per vector and with E ||x||^2 = d, ||x - x_hat||^2 + sparsity * P, where P is the L1 norm of the features
    (ReLU) or their number (JumpReLU). TopK takes no sparsity, its k is one; there 1/32 of the error that dead features
    leave of the error is added. Adam; the decoder's directions have norm 1, and the gradient along them is removed;
    b_dec begins at the geometric median. In the first half of training, every `dead_after` steps, dead ReLU and
    JumpReLU features restart at inputs drawn with probability ~ (squared error)^2. The same seed gives the same bits on
    the same machine.

    Args:
        activations: [n d], a tensor, shuffled in every epoch, or chunks (`store.batches(site, size, epochs=None)`, a
            generator), each shuffled when it comes; they are gone through again if they can be.
        kind: the activation function: `ReLU()`, `TopK(k)` or `JumpReLU()`. The bandwidth of a JumpReLU and the
            threshold it begins with, as large, are in training's unit.
        d_sae: number of features.
        steps: number of batches.
        sparsity: weight of the penalty; None: of TopK, which takes none.
        lr: learning rate.
        batch_size: vectors of a step.
        dead_after: steps of silence after which a feature is dead.
        seed: of the initial directions, the shuffles and the restarts.
        device: where it is trained; None: that of the activations.
        dtype: in which it is trained.

    Returns:
        The `Dictionary`, in the unit of the activations, and Dataset[step], the history of its training in training's
        unit; attrs["scale"] is the factor between them.

        - `loss`: what is minimised.
        - `error`: mean ||x - x_hat||^2, of d_in.
        - `penalty`: P, before its weight.
        - `l0`: active features per vector.
        - `dead`: share of features that are dead.

    Raises:
        ValueError: a missing or surplus sparsity, no steps, activations of a wrong shape, a stream that ends before the
            steps do, and losses that are NaN or infinite.

    Source:
        Bricken et al. 2023 (ReLU, restarts); Gao et al. 2024 (TopK); Rajamanoharan et al. 2024 (JumpReLU).

    See Also:
        `dictionary_quality`: what a trained one is worth. `save`: keeps it.

    Example:
        >>> dictionary, history = train_dictionary(torch.randn(256, 8), TopK(2), 16, steps=3)
        >>> history.error.dims
        ('step',)
    """
    _check_arguments(activations, kind, d_sae, steps, sparsity, batch_size, lr)
    if device is not None:
        require_device(device)
    batches = _batches(activations, batch_size, seed)
    first = list(islice(batches, min(steps, -(-SAMPLE // batch_size))))
    if not first:
        raise ValueError("at least one vector of activations is required, got none")
    sample = torch.cat(first).to(device or first[0].device, dtype)
    if not bool(sample.isfinite().all()) or not bool(sample.any()):
        raise ValueError("activations of finite numbers, not all 0, are required")
    scale = (sample.shape[1] / sample.square().sum(1).mean()) ** 0.5
    dictionary = _initial(sample * scale, kind, d_sae, seed)
    scaled = (x.to(sample.device, dtype) * scale for x in islice(chain(first, batches), steps))
    terms = _train(dictionary, scaled, steps, sparsity or 0.0, lr, dead_after, seed)
    history = _history_columns(terms, steps)
    return _fold_scale(dictionary, scale), labelled(
        "train_dictionary",
        {name: (("step",), value) for name, value in history.items()},
        coords={"step": range(steps)},
        units=UNITS,
        attrs={
            "kind": repr(kind), "sparsity": sparsity or 0.0, "lr": lr, "batch_size": batch_size, "seed": seed,
            "scale": float(scale), "unit": "that of training: activations times scale, mean square norm d_in",
        },
    )  # fmt: skip


def objective(
    dictionary: Dictionary, x: Float[Tensor, "n d"], sparsity: float, dead: Bool[Tensor, "s"]
) -> Terms:
    """The differentiable loss of a batch: the mean of ||x - x_hat||^2 plus `sparsity` times the kind's penalty."""
    if isinstance(dictionary.kind, TopK):
        return _topk_objective(dictionary, dictionary.kind.k, x, dead)
    z = dictionary.before(x)
    features = dictionary.activate(z)
    error = (x - dictionary.decode(features)).square().sum(1).mean()
    if isinstance(dictionary.kind, ReLU):
        penalty = features.sum(1).mean()
    else:
        assert isinstance(dictionary.kind, JumpReLU)
        penalty = step(z, dictionary.thresholds, dictionary.kind.bandwidth).sum(1).mean()
    active = features.detach() > 0
    l0 = active.sum(dtype=x.dtype) / len(x)
    return Terms(error + sparsity * penalty, error, penalty, l0, active.any(0))


def _topk_objective(
    dictionary: Dictionary, k: int, x: Float[Tensor, "n d"], dead: Bool[Tensor, "s"]
) -> Terms:
    """The TopK objective; z is the only dense product, decoder and gradients use only the k active features' rows."""
    with torch.no_grad():
        z = dictionary.before(x)
        index = z.topk(k, sorted=False).indices
    values = _ChosenPreActivations.apply(
        x, dictionary.b_dec, dictionary.W_enc, dictionary.b_enc, z, index
    ).relu()  # type: ignore[no-untyped-call]
    guess = F.embedding_bag(index, dictionary.W_dec, per_sample_weights=values, mode="sum") + dictionary.b_dec
    residual = x - guess
    error = residual.square().sum(1).mean()
    penalty = dead_error(dictionary, x, residual.detach(), dead)
    active = values.detach() > 0
    counts = torch.zeros_like(dictionary.b_enc).index_add(0, index.flatten(), active.flatten().to(x.dtype))
    l0 = active.sum(dtype=x.dtype) / len(x)
    return Terms(error + AUX_COEFFICIENT * penalty, error, penalty, l0, counts > 0)


class _ChosenPreActivations(torch.autograd.Function):
    """z = (x - b_dec) W_enc + b_enc at k features of each vector, with the gradient of these k columns alone."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, b_dec: Tensor, W_enc: Tensor, b_enc: Tensor, z: Tensor, index: Tensor
    ) -> Float[Tensor, "n k"]:
        ctx.save_for_backward(x, b_dec, W_enc, index)
        return z.gather(1, index)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Float[Tensor, "n k"]) -> tuple[Tensor | None, ...]:
        x, b_dec, W_enc, index = ctx.saved_tensors  # type: ignore[attr-defined]
        order = index.flatten().argsort(stable=True)
        features = torch.arange(W_enc.shape[1], device=x.device)
        starts = torch.searchsorted(index.flatten()[order], features)
        of_feature = grad.flatten()[order]  # [(n k)], sorted by feature
        columns = F.embedding_bag(
            order // index.shape[1], x - b_dec, starts, per_sample_weights=of_feature, mode="sum"
        )
        bias = grad.new_zeros(W_enc.shape[1]).index_add(0, index.flatten(), grad.flatten())
        return None, -(W_enc @ bias), columns.mT.contiguous(), bias, None, None


def dead_error(
    dictionary: Dictionary, x: Float[Tensor, "n d"], residual: Float[Tensor, "n d"], dead: Bool[Tensor, "s"]
) -> Float[Tensor, ""]:
    """Mean of ||residual - sum of the dead features||^2 over the d/2 dead features of largest z; 0 if none is dead.

    Gao et al. 2024, appendix A.2. z enters without the ReLU, so a dead feature with z below 0 learns too.
    """
    dead_features = dead.nonzero()[:, 0]
    if not len(dead_features):
        return residual.new_zeros(())
    z = (x - dictionary.b_dec) @ dictionary.W_enc[:, dead_features] + dictionary.b_enc[dead_features]
    best = z.topk(min(max(1, dictionary.d_in // 2), len(dead_features)))
    guess = torch.zeros_like(z).scatter(1, best.indices, best.values) @ dictionary.W_dec[dead_features]
    return (residual - guess).square().sum(1).mean()


def geometric_median(x: Float[Tensor, "n d"], *, rounds: int = 100) -> Float[Tensor, "d"]:
    """The point whose summed distance to all vectors is least, by Weiszfeld's iteration from the mean.

    Example:
        >>> geometric_median(torch.tensor([[0.0], [1.0], [50.0]])).round().tolist()
        [1.0]
    """
    median = x.mean(0)
    for _ in range(rounds):
        weight = 1 / (x - median).norm(dim=1).clamp_min(torch.finfo(x.dtype).eps)
        median = (weight @ x) / weight.sum()
    return median


def _check_arguments(
    activations: object,
    kind: TrainedKind,
    d_sae: int,
    steps: int,
    sparsity: float | None,
    batch_size: int,
    lr: float,
) -> None:
    """Raise ValueError for an argument of `train_dictionary` that is out of range or does not fit the kind."""
    if not isinstance(activations, Tensor | Iterable):
        raise ValueError(
            "activations are required, a tensor [n, d] or chunks of it such as `store.batches(site, size)`, got "
            f"{type(activations).__name__}"
        )
    if not 0 < lr <= 1e6:
        raise ValueError(f"lr must be above 0 and at most 1e6, got {lr}")
    if min(d_sae, steps, batch_size) < 1:
        raise ValueError(
            f"at least one feature, step and row are required, got d_sae={d_sae}, steps={steps}, "
            f"batch_size={batch_size}"
        )
    if isinstance(kind, TopK):
        if sparsity is not None:
            raise ValueError(f"the sparsity of TopK is its k; got sparsity={sparsity} as well")
    elif sparsity is None or sparsity < 0:
        raise ValueError(f"{type(kind).__name__} requires a sparsity of at least 0, got {sparsity}")


def _batches(activations: Tensor | Iterable[Tensor], size: int, seed: int) -> Iterator[Tensor]:
    """Endless batches of exactly `size` shuffled rows; an iterator is read only once, and ends them."""
    generator = torch.Generator().manual_seed(seed)
    pending: list[Tensor] = []
    waiting = 0  # rows of `pending`, fewer than `size`
    repeatable = isinstance(activations, Tensor) or not isinstance(activations, Iterator)
    while True:
        seen = 0
        for chunk in (activations,) if isinstance(activations, Tensor) else activations:
            _check_chunk(chunk, pending[0].shape[1] if pending else None)
            pending.append(chunk.detach()[torch.randperm(len(chunk), generator=generator).to(chunk.device)])
            seen, waiting = seen + len(chunk), waiting + len(chunk)
            if waiting < size:
                continue  # joined once, not at every chunk: small data may come round many times
            rows = pending[0] if len(pending) == 1 else torch.cat(pending)
            full = len(rows) // size * size
            for start in range(0, full, size):
                yield rows[start : start + size]
            pending, waiting = [rows[full:]], len(rows) - full
        if not repeatable or not seen:
            return


def _check_chunk(chunk: object, width: int | None) -> None:
    """Raise ValueError unless the chunk is a floating-point tensor [n, d], with d the `width` of those before it."""
    if not isinstance(chunk, Tensor):
        raise ValueError(
            f"activations are required, a tensor [n, d] or chunks of it, got chunks of {type(chunk).__name__}"
        )
    odd = odd_value(chunk)
    if chunk.ndim != 2 or not chunk.is_floating_point() or odd:
        kind = odd or f"{chunk.dtype} {shape_text(chunk.shape)} on {chunk.device}"
        raise ValueError(f"activations of shape [n, d] are required, got {kind}")
    if width not in (None, chunk.shape[1]):
        raise ValueError(f"chunks of one width are required, got {chunk.shape[1]} after {width}")


def _initial(sample: Float[Tensor, "n d"], kind: TrainedKind, d_sae: int, seed: int) -> Dictionary:
    """An untrained one: W_dec of random unit directions, W_enc its transpose, b_dec the sample's geometric median."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(d_sae, sample.shape[1], generator=generator, dtype=torch.float64)
    W_dec = (directions / directions.norm(dim=1, keepdim=True)).to(sample)
    weights = {
        "W_enc": W_dec.mT.contiguous(),
        "b_enc": W_dec.new_zeros(d_sae),
        "W_dec": W_dec,
        "b_dec": geometric_median(sample),
    }
    if isinstance(kind, JumpReLU):
        weights["threshold"] = W_dec.new_full((d_sae,), kind.bandwidth)
    return Dictionary(kind, weights)


@torch.enable_grad()
def _train(
    dictionary: Dictionary,
    batches: Iterable[Tensor],
    steps: int,
    sparsity: float,
    lr: float,
    dead_after: int,
    seed: int,
) -> list[Tensor]:
    """Train `dictionary` in place; returns per step the loss, error, penalty, L0 and share of dead features, `[5]`."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(dictionary.requires_grad_(True).parameters(), lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda n: _rate_factor(n, steps))
    idle = torch.zeros(dictionary.d_sae, dtype=torch.long, device=dictionary.W_enc.device)
    history = []
    for n, x in enumerate(tqdm(batches, desc="dictionary", total=steps, delay=1, leave=False), 1):
        terms = objective(dictionary, x, sparsity * min(1.0, n / (WARM_UP * steps)), idle >= dead_after)
        optimiser.zero_grad()
        terms.loss.backward()
        _drop_radial_gradient(dictionary)
        optimiser.step()
        schedule.step()
        _normalise_weights(dictionary)
        idle = torch.where(terms.fired, 0, idle + 1)
        share = (idle >= dead_after).to(x.dtype).mean()
        history.append(torch.stack((terms.loss, terms.error, terms.penalty, terms.l0, share)).detach())
        if n % dead_after == 0 and n <= steps // 2 and not isinstance(dictionary.kind, TopK):
            idle = _resample(dictionary, optimiser, x, idle, dead_after, generator)
    dictionary.requires_grad_(False)
    return history


def _rate_factor(n: int, steps: int) -> float:
    """The factor on the learning rate at step n: linear warm-up, 1, linear decay."""
    return min(1.0, (n + 1) / (WARM_UP * steps), (steps - n) / (DECAY * steps))


@torch.no_grad()
def _drop_radial_gradient(dictionary: Dictionary) -> None:
    """Remove from the gradient of W_dec its component along each direction, because the norms are kept at 1."""
    grad = dictionary.W_dec.grad
    assert grad is not None
    grad -= (grad * dictionary.W_dec).sum(1, keepdim=True) * dictionary.W_dec


@torch.no_grad()
def _normalise_weights(dictionary: Dictionary) -> None:
    """Rescale the rows of W_dec to norm 1, and clamp thresholds to at least 0, in place."""
    dictionary.W_dec.div_(dictionary.W_dec.norm(dim=1, keepdim=True))
    if isinstance(dictionary.kind, JumpReLU):
        dictionary.get_parameter("threshold").clamp_(min=0.0)


@torch.no_grad()
def _resample(
    dictionary: Dictionary,
    optimiser: torch.optim.Optimizer,
    x: Float[Tensor, "n d"],
    idle: Int[Tensor, "s"],
    dead_after: int,
    generator: torch.Generator,
) -> Int[Tensor, "s"]:
    """Restart dead features at inputs with a large error; returns `idle` with 0 for the restarted features."""
    dead = (idle >= dead_after).nonzero()[:, 0]
    if len(dead) == 0:
        return idle
    weight = (x - dictionary(x)).square().sum(1).square().double().cpu()
    drawn = weight.multinomial(len(dead), replacement=True, generator=generator).to(x.device)
    directions = x[drawn] - dictionary.b_dec
    directions = directions / directions.norm(dim=1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    living = (idle < dead_after).nonzero()[:, 0]
    norm = dictionary.W_enc[:, living].norm(dim=0).mean() if len(living) else dictionary.W_enc.new_ones(())
    dictionary.W_dec[dead] = directions
    dictionary.W_enc[:, dead] = RESAMPLED * norm * directions.mT
    dictionary.b_enc[dead] = 0.0
    for parameter, where in (
        (dictionary.W_dec, (dead,)),
        (dictionary.W_enc, (slice(None), dead)),
        (dictionary.b_enc, (dead,)),
    ):
        for moment in ("exp_avg", "exp_avg_sq"):
            optimiser.state[parameter][moment][where] = 0.0
    return idle.index_fill(0, dead, 0)


def _history_columns(history: list[Tensor], steps: int) -> dict[str, Tensor]:
    """The columns of the training history by name; raises ValueError if steps are missing, or a number not finite."""
    if len(history) < steps:
        raise ValueError(f"the stream of activations ended after {len(history)} of {steps} steps")
    table = torch.stack(history)
    bad = (~table.isfinite().all(1)).nonzero()
    if len(bad):
        raise ValueError(
            f"the loss is NaN or infinite from step {int(bad[0])} on: look at the activations, or lower lr"
        )
    return dict(zip(("loss", "error", "penalty", "l0", "dead"), table.unbind(1), strict=True))


@torch.no_grad()
def _fold_scale(dictionary: Dictionary, scale: Float[Tensor, ""]) -> Dictionary:
    """The autoencoder changed in place to read unscaled activations; the directions keep norm 1."""
    for name, weight in dictionary.named_parameters():
        if name not in ("W_enc", "W_dec"):
            weight.div_(scale)
    return dictionary
