"""Training a dictionary on activations: one loop for every way to train, which differ in what they minimise.

Inside, what is read and what is written are each scaled to a mean square norm of their width, so that a sparsity, a
bandwidth or a learning rate means the same at every layer of every model (Anthropic, April 2024); the factors are
divided out of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.kinds import Count, Device, PositiveCount, require_device
from interp.core.results import labelled
from interp.core.wording import odd_value
from interp.features.activations import JumpReLU, ReLU, TopK
from interp.features.dictionary import Dictionary, Vectors
from interp.features.objectives import BatchTopK, Matryoshka, OfBatch, TrainedKind, objective
from interp.features.training_state import DictionaryState, kept
from interp.model.config import Json
from interp.runs.state_file import checksum

if TYPE_CHECKING:
    import xarray as xr

WARM_UP, DECAY = 0.05, 0.2
"""Shares of the steps: the rate and the sparsity grow over the first, the rate falls to 0 over the last."""
SETTLED = 0.05
"""Share of the steps, the last ones, over which the threshold of features that a batch chooses is averaged."""
RESAMPLED = 0.2
"""Norm of a resampled feature's encoder, as a share of the mean norm of living ones (Bricken et al. 2023)."""
COLUMNS = {
    **dict.fromkeys(("loss", "error", "penalty"), "unit of training, per vector"),
    "l0": "active features per vector", "dead": "share of features", "smallest": "unit of training",
}  # fmt: skip
"""The columns of the history, in their order, and their units; `smallest` where features are chosen over a batch."""
ARCHITECTURE = {BatchTopK: "batchtopk", Matryoshka: "matryoshka_batchtopk"}
"""SAELens' names of the ways to train of which the file of a dictionary says no more than a threshold."""
SAMPLE = 4096
"""Vectors from which the scale and the first b_dec are estimated."""


Rows = tuple[Tensor, ...]
"""A batch: what is read [n d], and of a transcoder what is to be written [n o]."""


class _Sites(NamedTuple):
    """Where a dictionary belongs, and whether it adds a linear map of what it reads."""

    reads: str | None
    writes: str | None
    skip: bool

    @property
    def pairs(self) -> bool:
        """Whether it is a transcoder."""
        return self.writes not in (None, self.reads)


AUTOENCODER = _Sites(None, None, skip=False)
"""An autoencoder that does not know its site."""


@public(unchecked=("activations",))
def train_dictionary(
    activations: Vectors | Iterable[Vectors],
    kind: TrainedKind,
    d_sae: Count,
    *,
    steps: Count,
    sparsity: float | None = None,
    lr: float = 1e-3,
    batch_size: PositiveCount = 1024,
    dead_after: PositiveCount = 200,
    seed: int = 0,
    reads: str | None = None,
    writes: str | None = None,
    skip: bool = False,
    out: Path | str | None = None,
    resume: bool = False,
    device: Device | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Dictionary, xr.Dataset]:
    """Train a sparse autoencoder or a transcoder on activations.

    Minimises, per vector and with E ||y||^2 = o, ||y - y_hat||^2 + sparsity * P, where y is x itself or what a layer
    writes for it, and P the L1 norm of the features (ReLU) or their number (JumpReLU). The others take no sparsity,
    their k is one; there 1/32 of the error that dead features leave of the error is added, and of Matryoshka the errors
    of all nested dictionaries. Adam; the decoder's directions have norm 1, and the gradient along them is removed;
    b_dec begins at the geometric median of y. In the first half of training, every `dead_after` steps, dead ReLU and
    JumpReLU features restart at vectors drawn with probability ~ (squared error)^2. The same seed gives the same bits
    on the same machine.

    Args:
        activations: [n d], a tensor, shuffled in every epoch, or chunks (`store.batches(site, size, epochs=None)`, a
            list, a generator), each shuffled when it comes; they are gone through again if they can be. Of a transcoder
            a pair (what is read [n d], what is written [n o]), or chunks that are pairs.
        kind: the way to train: `ReLU()`, `TopK(k)`, `JumpReLU()`, `BatchTopK(k)` or `Matryoshka(k, sizes)`. The
            bandwidth of a JumpReLU and the threshold it begins with, as large, are in training's unit.
        d_sae: number of features.
        steps: number of batches.
        sparsity: weight of the penalty; None: of the ways with a k, which take none.
        lr: learning rate.
        batch_size: vectors of a step.
        dead_after: steps of silence after which a feature is dead.
        seed: of the initial directions, the shuffles and the restarts.
        reads: full name of the site that was read, for the result; None: not said.
        writes: full name of the site that was written, of a transcoder.
        skip: whether a transcoder adds x W_skip, which is trained too and begins at 0.
        out: a folder where the state of training is kept twice a minute; None: nothing is kept.
        resume: go on with the training of that folder, if there is one: the same bits as without the interruption.
            Activations are gone through again up to where it stood, so that a generator cannot be.
        device: where it is trained; None: that of the activations.
        dtype: in which it is trained.

    Returns:
        The `Dictionary`, in the unit of the activations, and Dataset[step], the history of its training in training's
        unit; attrs["scale"] is the factor between them, of a transcoder's output attrs["scale_written"].

        - `loss`: what is minimised.
        - `error`: mean ||y - y_hat||^2, of d_out.
        - `penalty`: P, before its weight.
        - `l0`: active features per vector.
        - `dead`: share of features that are dead.
        - `smallest`: of BatchTopK and Matryoshka, the smallest feature that was kept.

    Raises:
        ValueError: a missing or surplus sparsity, no steps, activations of a wrong shape, a stream that ends before the
            steps do, losses that are NaN or infinite, pairs without two sites, a folder of another training, and one
            that holds a training unless `resume`.
        KeyError: a site that no model has.
        OSError: a full disk or a place that may not be written to; `resume=True` goes on from what was kept last.

    Source:
        Bricken et al. 2023 (ReLU, restarts); Gao et al. 2024 (TopK); Rajamanoharan et al. 2024 (JumpReLU); Bussmann et
        al. 2024 and 2025 (BatchTopK, Matryoshka); Dunefsky et al. 2024 (transcoders); Paulo et al. 2025 (skip).

    See Also:
        `dictionary_quality`: what a trained one is worth. `save`: keeps it.

    Example:
        >>> dictionary, history = train_dictionary(torch.randn(256, 8), TopK(2), 16, steps=3)
        >>> history.error.dims
        ('step',)
        >>> pair = torch.randn(256, 8), torch.randn(256, 6)
        >>> reads, writes = "blocks.0.hook_mlp_in", "blocks.0.hook_mlp_out"
        >>> transcoder, _ = train_dictionary(pair, TopK(2), 16, steps=3, reads=reads, writes=writes)
        >>> transcoder(torch.randn(5, 8)).shape
        torch.Size([5, 6])
    """
    sites = _Sites(reads, writes, skip)
    _check_arguments(activations, kind, d_sae, steps, sparsity, batch_size, lr)
    _check_sites(activations, sites, out)
    if device is not None:
        require_device(device)
    batches = _batches(activations, batch_size, seed, pairs=sites.pairs)
    first = list(islice(batches, min(steps, -(-SAMPLE // batch_size))))
    sample, scales = _sample(first, device, dtype)
    state = _fresh(sample, scales, kind, d_sae, seed, sites, lr)
    settings: dict[str, str | float | int] = {
        "kind": repr(kind), "sparsity": sparsity or 0.0, "lr": lr, "batch_size": batch_size, "seed": seed,
    }  # fmt: skip
    more: Json = {
        "d_sae": d_sae,
        "steps": steps,
        "dead_after": dead_after,
        "dtype": str(dtype),
        **sites._asdict(),
    }
    drawn = checksum({str(i): each for i, each in enumerate(sample)}, {}) if out is not None else ""
    with kept(out, {**settings, **more, "activations": drawn}, state, resume=resume) as keep:
        todo = islice(chain(first, batches), len(state.history), steps)
        scaled = (_scaled(rows, sample, scales) for rows in todo)
        for _ in _training(state, kind, scaled, steps, sparsity or 0.0, lr, dead_after):
            keep(len(state.history) == steps)
    history = _history_columns(state.history, steps, kind)
    attrs = settings | {
        f"scale{end}": float(each) for end, each in zip(("", "_written"), scales, strict=False)
    }
    unit = "that of training: activations times scale, mean square norm d_in"
    return _folded(state, kind, scales, history), labelled(
        "train_dictionary",
        {name: (("step",), value) for name, value in history.items()},
        coords={"step": range(steps)},
        units=COLUMNS,
        attrs={**attrs, "unit": unit},
    )


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
    if isinstance(kind, TopK | OfBatch):
        if sparsity is not None:
            raise ValueError(
                f"the sparsity of {type(kind).__name__} is its k; got sparsity={sparsity} as well"
            )
    elif sparsity is None or sparsity < 0:
        raise ValueError(f"{type(kind).__name__} requires a sparsity of at least 0, got {sparsity}")
    _check_numbers_of_features(kind, d_sae)


def _check_numbers_of_features(kind: TrainedKind, d_sae: int) -> None:
    """Raise ValueError for a way to train that does not fit a dictionary of so many features."""
    if isinstance(kind, OfBatch) and kind.k > d_sae:
        raise ValueError(f"k must be at most d_sae = {d_sae}, got {kind.k}")
    if isinstance(kind, Matryoshka) and kind.sizes[-1] != d_sae:
        raise ValueError(f"the last of the sizes must be d_sae = {d_sae}, got {kind.sizes}")
    if isinstance(kind, TopK) and not kind.relu:
        raise ValueError(f"TopK is trained with its ReLU: TopK({kind.k}) is required, got {kind}")


def _check_sites(activations: object, sites: _Sites, out: Path | str | None) -> None:
    """Raise ValueError for activations, sites and a folder that do not belong together."""
    if sites.pairs and sites.reads is None:
        raise ValueError(
            f"a transcoder reads at one site and writes at another: reads=... beside {sites.writes!r}"
        )
    if sites.skip and not sites.pairs:
        raise ValueError("a skip belongs to a transcoder, which names the two sites: reads=..., writes=...")
    if isinstance(activations, tuple) and not sites.pairs:
        raise ValueError(
            "a tuple is a pair of what a transcoder reads and writes, which names the two sites: reads=..., "
            "writes=...; chunks of an autoencoder are given as a list"
        )
    if out is not None and isinstance(activations, Iterator):
        raise ValueError(
            "activations that can be read again are required for a training that can go on, an iterator gives every "
            "chunk once: give a tensor, a list, or out=None"
        )


def _batches(
    activations: Vectors | Iterable[Vectors], size: int, seed: int, *, pairs: bool = False
) -> Iterator[Rows]:
    """Endless batches of exactly `size` shuffled rows; an iterator is read only once, and ends them."""
    generator = torch.Generator().manual_seed(seed)
    pending: list[Rows] = []
    waiting = 0  # rows of `pending`, fewer than `size`
    whole = isinstance(activations, Tensor | tuple)
    repeatable = whole or not isinstance(activations, Iterator)
    while True:
        seen = 0
        for chunk in (activations,) if whole else activations:
            rows = _checked(chunk, pending[0] if pending else None, pairs)
            order = torch.randperm(len(rows[0]), generator=generator)
            pending.append(tuple(each.detach()[order.to(each.device)] for each in rows))
            seen, waiting = seen + len(order), waiting + len(order)
            if waiting < size:
                continue  # joined once, not at every chunk: small data may come round many times
            rows = pending[0] if len(pending) == 1 else tuple(map(torch.cat, zip(*pending, strict=True)))
            full = waiting // size * size
            for start in range(0, full, size):
                yield tuple(each[start : start + size] for each in rows)
            pending, waiting = [tuple(each[full:] for each in rows)], waiting - full
        if not repeatable or not seen:
            return


def _checked(chunk: object, before: Rows | None, pairs: bool) -> Rows:
    """The tensors of a chunk; ValueError unless they are floating-point [n, d], as wide as those before, and pairs."""
    rows = chunk if isinstance(chunk, tuple) else (chunk,)
    if len(rows) != 1 + pairs:
        raise ValueError(
            "a transcoder is trained on pairs, vectors [n, d] that are read and [n, o] that are written, or chunks "
            f"that are such pairs; an autoencoder on vectors alone; got {len(rows)} for a chunk"
        )
    for each, earlier in zip(rows, before or (None,) * len(rows), strict=True):
        _check_chunk(each, None if earlier is None else earlier.shape[1])
    if len(rows[0]) != len(rows[-1]):
        raise ValueError(f"pairs of as many vectors are required, got {len(rows[0])} and {len(rows[-1])}")
    return rows


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


def _sample(first: list[Rows], device: Device | None, dtype: torch.dtype) -> tuple[Rows, Rows]:
    """The vectors of the first batches, and the factor that makes the mean square norm of each kind its width."""
    if not first:
        raise ValueError("at least one vector of activations is required, got none")
    where = device or first[0][0].device
    sample = tuple(torch.cat(each).to(where, dtype) for each in zip(*first, strict=True))
    if not all(bool(each.isfinite().all()) and bool(each.any()) for each in sample):
        raise ValueError("activations of finite numbers, not all 0, are required")
    return sample, tuple((each.shape[1] / each.square().sum(1).mean()) ** 0.5 for each in sample)


def _scaled(rows: Rows, like: Rows, scales: Rows) -> Rows:
    """The rows in training's unit, device and dtype."""
    return tuple(
        each.to(one.device, one.dtype) * scale for each, one, scale in zip(rows, like, scales, strict=True)
    )


def _fresh(
    sample: Rows, scales: Rows, kind: TrainedKind, d_sae: int, seed: int, sites: _Sites, lr: float
) -> DictionaryState:
    """The state before the first step."""
    dictionary = _initial(_scaled(sample, sample, scales), kind, d_sae, seed, sites)
    return DictionaryState(
        dictionary,
        torch.optim.Adam(dictionary.requires_grad_(True).parameters(), lr),
        torch.Generator().manual_seed(seed),
        torch.zeros(d_sae, dtype=torch.long, device=dictionary.W_enc.device),
    )


def _initial(
    sample: Rows, kind: TrainedKind, d_sae: int, seed: int, sites: _Sites = AUTOENCODER
) -> Dictionary:
    """An untrained dictionary: random unit directions, and b_dec the geometric median of what is to be written.

    W_enc is the transpose of W_dec, of a transcoder other directions; z is 0 at the geometric median of what is read.
    """
    x, y, generator = sample[0], sample[-1], torch.Generator().manual_seed(seed)
    W_dec = _unit_directions(d_sae, y, generator)
    W_enc = (_unit_directions(d_sae, x, generator) if sites.pairs else W_dec).mT.contiguous()
    b_enc = -(geometric_median(x) @ W_enc) if sites.pairs else W_dec.new_zeros(d_sae)
    weights = {"W_enc": W_enc, "b_enc": b_enc, "W_dec": W_dec, "b_dec": geometric_median(y)}
    if isinstance(kind, JumpReLU):
        weights["threshold"] = W_dec.new_full((d_sae,), kind.bandwidth)
    if sites.skip:
        weights["W_skip"] = W_dec.new_zeros(x.shape[1], y.shape[1])
    meanwhile = ReLU() if isinstance(kind, OfBatch) else kind
    return Dictionary(meanwhile, weights, reads=sites.reads, writes=sites.writes)


def _unit_directions(
    number: int, like: Float[Tensor, "n d"], generator: torch.Generator
) -> Float[Tensor, "s d"]:
    """Random directions of norm 1, drawn in float64."""
    directions = torch.randn(number, like.shape[1], generator=generator, dtype=torch.float64)
    return (directions / directions.norm(dim=1, keepdim=True)).to(like)


def _training(
    state: DictionaryState,
    kind: TrainedKind,
    batches: Iterable[Rows],
    steps: int,
    sparsity: float,
    lr: float,
    dead_after: int,
) -> Iterator[None]:
    """Train the state's dictionary in place, a step at a time, each with its row in the history."""
    done = len(state.history)
    bar = tqdm(batches, desc="dictionary", initial=done, total=steps, delay=1, leave=False)
    for n, rows in enumerate(bar, done + 1):
        _update(
            state,
            kind,
            rows,
            sparsity * min(1.0, n / (WARM_UP * steps)),
            lr * _rate_factor(n - 1, steps),
            dead_after,
        )
        if n % dead_after == 0 and n <= steps // 2 and isinstance(kind, ReLU | JumpReLU):
            _resample(state, rows, dead_after)
        yield


@torch.enable_grad()
def _update(
    state: DictionaryState, kind: TrainedKind, rows: Rows, sparsity: float, lr: float, dead_after: int
) -> None:
    """One step: the weights, the silent steps and the history."""
    dictionary, dead = state.dictionary, state.idle >= dead_after
    terms = objective(kind, dictionary, rows[0], rows[-1], sparsity, dead)
    for group in state.optimiser.param_groups:
        group["lr"] = lr
    state.optimiser.zero_grad()
    terms.loss.backward()
    _drop_radial_gradient(dictionary)
    state.optimiser.step()
    _normalise_weights(dictionary)
    state.idle = torch.where(terms.fired, 0, state.idle + 1)
    share = (state.idle >= dead_after).to(rows[0].dtype).mean()
    columns = (terms.loss, terms.error, terms.penalty, terms.l0, share, terms.smallest)
    state.history.append(torch.stack(columns).detach())


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
def _resample(state: DictionaryState, rows: Rows, dead_after: int) -> None:
    """Restart dead features at vectors with a large error, and their silent steps at 0.

    A feature of a transcoder reads the direction of the vector, from the mean, and writes that of its error.
    """
    dictionary, x = state.dictionary, rows[0]
    dead = (state.idle >= dead_after).nonzero()[:, 0]
    if len(dead) == 0:
        return
    error = rows[-1] - dictionary(x)
    weight = error.square().sum(1).square().double().cpu()
    drawn = weight.multinomial(len(dead), replacement=True, generator=state.generator).to(x.device)
    centre = dictionary.b_dec if dictionary.apply_b_dec_to_input else x.mean(0)
    read = _normalised(x[drawn] - centre)
    living = (state.idle < dead_after).nonzero()[:, 0]
    norm = dictionary.W_enc[:, living].norm(dim=0).mean() if len(living) else dictionary.W_enc.new_ones(())
    dictionary.W_dec[dead] = _normalised(error[drawn]) if dictionary.transcodes else read
    dictionary.W_enc[:, dead] = RESAMPLED * norm * read.mT
    dictionary.b_enc[dead] = 0.0 if dictionary.apply_b_dec_to_input else -(centre @ dictionary.W_enc[:, dead])
    for parameter, where in (
        (dictionary.W_dec, (dead,)),
        (dictionary.W_enc, (slice(None), dead)),
        (dictionary.b_enc, (dead,)),
    ):
        for moment in ("exp_avg", "exp_avg_sq"):
            state.optimiser.state[parameter][moment][where] = 0.0
    state.idle = state.idle.index_fill(0, dead, 0)


def _normalised(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """The rows divided by their norms; rows of 0 stay 0."""
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)


def _history_columns(history: list[Tensor], steps: int, kind: TrainedKind) -> dict[str, Tensor]:
    """The columns of the training history by name; raises ValueError if steps are missing, or a number not finite."""
    if len(history) < steps:
        raise ValueError(f"the stream of activations ended after {len(history)} of {steps} steps")
    table = torch.stack(history)
    bad = (~table.isfinite().all(1)).nonzero()
    if len(bad):
        raise ValueError(
            f"the loss is NaN or infinite from step {int(bad[0])} on: look at the activations, or lower lr"
        )
    columns = dict(zip(COLUMNS, table.unbind(1), strict=True))
    return columns if isinstance(kind, OfBatch) else {k: v for k, v in columns.items() if k != "smallest"}


@torch.no_grad()
def _folded(
    state: DictionaryState, kind: TrainedKind, scales: Rows, history: dict[str, Tensor]
) -> Dictionary:
    """The trained dictionary for activations that are not scaled; the directions keep norm 1.

    With x and y multiplied by c and e in training, f W_dec + b_dec + c x W_skip = e y holds for features in e's unit,
    and the activation functions are homogeneous: f / e = act((c / e) x W_enc + b_enc / e) with thresholds divided by e.
    """
    read, written = scales[0], scales[-1]
    dictionary, ratio = state.dictionary, read / written
    weights = {
        name: weight
        if name == "W_dec"
        else weight * ratio
        if name in ("W_enc", "W_skip")
        else weight / written
        for name, weight in dictionary.named_parameters()
    }
    metadata: Json = {}
    if isinstance(kind, OfBatch):
        last = max(1, round(SETTLED * len(state.history)))
        threshold = history["smallest"][-last:].mean() / written
        weights["threshold"] = threshold.expand(dictionary.d_sae)
        sizes = {"sizes": list(kind.sizes)} if isinstance(kind, Matryoshka) else {}
        metadata = {"training_architecture": ARCHITECTURE[type(kind)], "k": kind.k, **sizes}
    answering = JumpReLU() if isinstance(kind, OfBatch) else kind
    return Dictionary(answering, weights, reads=dictionary.reads, writes=dictionary.writes, metadata=metadata)
