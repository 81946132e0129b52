"""What a sparse autoencoder is worth: how sparse, how exact, what the model loses, which true directions it found.

Everything is a sum over vectors that merges: the mean of the explained variance is that of the whole evaluation set,
whatever the batches.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.results import labelled
from interp.core.stats import Z95, Partial
from interp.data.batch import Batch
from interp.data.text import Prompts
from interp.features.sae import SAE
from interp.model.loss import next_token_loss, predicted
from interp.model.mask import Layout
from interp.model.tap import Edit, Read, Trace
from interp.model.transformer import Transformer
from interp.passes.analysis import Analysis, run_batches
from interp.passes.metrics import Metric, Outcome
from interp.passes.observe import Subject
from interp.passes.sweep import Sweep
from interp.passes.variants import Variant

if TYPE_CHECKING:
    import xarray as xr

RUNS = ("clean", "sae", "zero", "mean")
"""What stands at the site: itself, its reconstruction, 0, or its mean over the evaluation set."""


@dataclass(frozen=True)
class Fit:
    """A reduction: sums over vectors x and their reconstructions; `merge` is exact for counts, else to rounding.

    Squared deviations are taken from the mean of the part and moved to that of the whole (Chan's update).
    """

    refuses_nan: ClassVar[bool] = True
    vectors: Int[Tensor, ""]
    mean: Float[Tensor, "d"]
    spread: Float[Tensor, ""]
    """Sum of ||x - mean||^2."""
    error: Float[Tensor, ""]
    """Sum of ||x - x_hat||^2."""
    active: Int[Tensor, "s"]
    """On how many vectors each feature is active."""

    @classmethod
    def of(cls, values: Mapping[str, Tensor], rows: Int[Tensor, "n"] | None = None) -> "Fit":
        """The sums over some rows, from those of each (`fitted`)."""
        vectors, means = values["vectors"], values["mean"]
        total = vectors.sum()
        weight = vectors.to(means.dtype)
        mean = weight @ means / weight.sum().clamp_min(1)
        spread = values["spread"].sum() + weight @ (means - mean).square().sum(1)
        return cls(total, mean, spread, values["error"].sum(), values["active"].sum(0))

    def merge(self, other: "Fit") -> "Fit":
        """The sums over both parts."""
        mine, theirs = self.tensors(), other.tensors()
        return Fit.of({name: torch.stack((mine[name], theirs[name])) for name in mine})

    def tensors(self) -> dict[str, Tensor]:
        """Everything it holds, by name."""
        return dict(vars(self))

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> "Fit":
        """The sums whose `tensors` these are."""
        return cls(**tensors)

    def result(self) -> "xr.Dataset":
        """The sums as labelled scores, see `reconstruction_quality`; ValueError for no vectors, or NaN."""
        n, d_in = int(self.vectors), len(self.mean)
        if n == 0:
            raise ValueError("at least one vector is required, got none")
        if not bool(self.error.isfinite()):
            raise ValueError("finite activations are required, some are NaN or infinite")
        density = self.active.double() / n
        return labelled(
            "reconstruction",
            {
                "l0": ((), density.sum()),
                "mse": ((), self.error / (n * d_in)),
                "explained_variance": ((), 1 - self.error / self.spread),
                "dead_fraction": ((), (self.active == 0).double().mean()),
                "density": (("feature",), density),
                "mean": (("coordinate",), self.mean),
            },
            coords={"feature": range(len(density)), "coordinate": range(d_in)},
            attrs={
                "vectors": n,
                "explained_variance": "1 - sum ||x - x_hat||^2 / sum ||x - mean||^2, mean over all vectors",
                "mse_per": "coordinate", "dead": "active on none of these vectors",
                "null": "explained variance 0: the mean alone",
            },
        )  # fmt: skip


@torch.no_grad()
def fitted(sae: SAE, x: Float[Tensor, "n d"], row: Int[Tensor, "n"], rows: int) -> dict[str, Tensor]:
    """What `Fit` needs of each row: its vectors are those of `x` where `row` says so. Sums in float64."""
    features = sae.encode(x)
    error = (x.double() - sae.decode(features, x).double()).square().sum(1)
    wide, count = x.double(), torch.bincount(row, minlength=rows)

    def summed(values: Tensor) -> Tensor:
        return values.new_zeros(rows, *values.shape[1:]).index_add(0, row, values)

    mean = summed(wide) / count.clamp_min(1)[:, None]
    return {
        "vectors": count,
        "mean": mean,
        "spread": summed((wide - mean[row]).square().sum(1)),
        "error": summed(error),
        "active": summed((features > 0).long()),
    }


def reconstruction_quality(sae: SAE, activations: Tensor | Iterable[Tensor]) -> "xr.Dataset":
    """How sparse and how exact an autoencoder is on activations `[n d]`, a tensor or a stream of chunks.

    Returns Dataset: `l0`, active features per vector; `mse`, mean squared error per coordinate; `explained_variance` =
    1 - sum ||x - x_hat||^2 / sum ||x - mean||^2 with the mean over all vectors; `density`[feature], the share of
    vectors on which it is active; `dead_fraction`, the share of features active on none; `mean`[coordinate].
    Errors: ValueError for no vectors, and NaN.

    Example:
        >>> eye, zero = torch.eye(3), torch.zeros(3)
        >>> sae = SAE(interp.features.sae.ReLU(), {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero})
        >>> float(reconstruction_quality(sae, torch.rand(10, 3)).explained_variance)
        1.0
    """
    found: Fit | None = None
    for chunk in (activations,) if isinstance(activations, Tensor) else activations:
        x = chunk.to(sae.W_enc.device)
        part = Fit.of(fitted(sae, x, torch.zeros(len(x), dtype=torch.long, device=x.device), 1))
        found = part if found is None else found.merge(part)
    if found is None:
        raise ValueError("at least one vector is required, got none")
    return found.result()


def reconstruction(sae: SAE, site: str, *, bos_id: int | None = None, skip_bos: bool = True) -> Analysis:
    """The analysis of `reconstruction_quality` at a site, for `interp.run`; see `sae_quality` for what is skipped.

    The autoencoder must be on the device of the model. Several in one pass need names of their own:
    `dataclasses.replace(analysis, name=...)`.

    Example:
        >>> eye, zero = torch.eye(24), torch.zeros(24)
        >>> sae = SAE(interp.features.sae.ReLU(), {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero})
        >>> batches = model.text.batch([prompt, "The cat sat on the mat"]).split(1)
        >>> found = run_batches([reconstruction(sae, "blocks.1.hook_resid_pre")], model.transformer, batches)
    """
    return Analysis(
        name="reconstruction",
        reads=(Read(site),),
        compute=partial(_by_text, sae=sae, site=site, bos_id=bos_id, skip_bos=skip_bos),
        reduction=Fit,
        finish=_finish,
    )


def sae_quality(
    model: Subject,
    sae: SAE,
    site: str,
    prompts: Prompts,
    *,
    skip_bos: bool = True,
    prepend_bos: bool = True,
    batch_size: int = 16,
) -> "xr.Dataset":
    """What an autoencoder is worth at a site: all of `reconstruction_quality`, and what the model loses by it.

    Returns Dataset: besides those, `ce_clean`, `ce_sae`, `ce_zero`, `ce_mean`, the next-token loss in nats per
    predicted token with the site as it is, replaced by its reconstruction, by 0, or by its mean over the whole
    evaluation set; `loss_recovered_zero` and `loss_recovered_mean`, (CE_ablated - CE_sae) / (CE_ablated - CE_clean) for
    either ablation: 1 = nothing is lost, 0 = as bad as the ablation. Each with `_low` and `_high`, 95 % over texts
    (of the ratio of sums, linearised; NaN for a single row). Zero-ablating a residual stream ruins the model, so
    that any autoencoder recovers almost everything; the mean is the stricter null.
    Padding never counts. With `skip_bos` a BOS in front of a text keeps its value and does not count: its activations
    are unlike all others. It is the first token of a text, where the batch says that one was prepended, or where it has
    the tokenizer's BOS id; attrs["skipped"] says how many there were.
    Errors: ValueError for a model that is not causal or has no unembedding, and where `sae` does not fit the site;
    KeyError for an unknown site.

    Example:
        >>> eye, zero = torch.eye(24), torch.zeros(24)
        >>> sae = SAE(interp.features.sae.ReLU(), {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero})
        >>> found = sae_quality(model, sae, "blocks.1.hook_resid_pre", [prompt, "The cat sat on the mat"])
        >>> found.loss_recovered_mean.dims
        ()
    """
    network = model.transformer
    if not network.config.causal or not network.config.unembed:
        raise ValueError("the loss an autoencoder costs requires a causal model with an unembedding")
    batch = model.text.batch(prompts, prepend_bos=prepend_bos).to(network.device)
    analysis = reconstruction(sae, site, bos_id=model.text.bos_id, skip_bos=skip_bos)
    found = run_batches([analysis], network, batch.split(batch_size))[analysis.name]
    mean = torch.tensor(found["mean"].to_numpy(), device=network.device)
    counted = counted_tokens(batch, model.text.bos_id, skip_bos)
    parts = zip(batch.split(batch_size), counted.split(batch_size), strict=True)
    losses = torch.cat([_losses(network, sae, site, part, at, mean) for part, at in parts], 1)
    known = predicted(batch.keep, batch.documents)
    tokens = torch.ones_like(batch.tokens[:, 1:]) if known is None else known
    scores = _scores(losses, tokens.sum(1))
    return found.merge(
        labelled("sae_quality", {name: ((), value) for name, value in scores.items()})
    ).assign_attrs(
        found.attrs,
        interp_analysis="sae_quality",
        skipped=int((batch.real & ~counted).sum()),
        predicted_tokens=int(tokens.sum()),
        unit="nats (ce), 1 (loss_recovered)",
        interval="95 % over rows",
    )


def dictionary_match(W_dec: Float[Tensor, "s d"], truth: Float[Tensor, "t d"]) -> "xr.Dataset":
    """Which feature is which true direction, by the cosine of their directions.

    Returns Dataset[true]: `feature` and `cosine` of the one-to-one assignment with the greatest sum (Hungarian method;
    -1 and NaN for true directions left without a feature), `best_feature` and `best_cosine` of the nearest one, which
    several may share. Cosines have a sign: features are active upwards only. Errors: ValueError for a zero vector.

    Example:
        >>> dictionary_match(torch.eye(3).flip(0), torch.eye(3)).feature.values.tolist()
        [2, 1, 0]
    """
    from scipy.optimize import linear_sum_assignment

    cosines = _directions(truth) @ _directions(W_dec).mT
    row, column = (torch.from_numpy(index) for index in linear_sum_assignment(-cosines.numpy()))
    feature = torch.full((len(truth),), -1).index_copy(0, row, column)
    cosine = cosines.new_full((len(truth),), torch.nan).index_copy(0, row, cosines[row, column])
    best = cosines.max(1)
    columns = {"feature": feature, "cosine": cosine, "best_feature": best.indices, "best_cosine": best.values}
    return labelled(
        "dictionary_match",
        {name: (("true",), value) for name, value in columns.items()},
        coords={"true": range(len(truth))},
        attrs={"unit": "cosine", "assignment": "one to one, greatest sum"},
    )


def counted_tokens(batch: Batch, bos_id: int | None, skip_bos: bool) -> Bool[Tensor, "b p"]:
    """The real tokens, but with `skip_bos` for a BOS in front of a text."""
    if not skip_bos:
        return batch.real
    layout = Layout(batch.keep, batch.documents)
    first = layout.positions(batch.tokens.shape[1], 0, batch.tokens.device) == 0
    is_bos = torch.full_like(batch.real, batch.bos)
    if bos_id is not None:
        is_bos = is_bos | (batch.tokens == bos_id)
    return batch.real & ~(first & is_bos)


def ratio(top: Float[Tensor, "n"], bottom: Float[Tensor, "n"]) -> Sequence[Float[Tensor, ""]]:
    """sum(top) / sum(bottom) over rows, and the ends of its 95 % interval (linearised; NaN for fewer than two rows)."""
    n, value = len(top), top.sum() / bottom.sum()
    if n < 2:
        return value, value.new_tensor(torch.nan), value.new_tensor(torch.nan)
    squares = (top - value * bottom).square().sum()
    half = Z95 * (squares * n / (n - 1)).sqrt() / bottom.sum().abs()
    return value, value - half, value + half


def _by_text(
    trace: Trace, batch: Batch, model: Transformer, sae: SAE, site: str, bos_id: int | None, skip_bos: bool
) -> Mapping[str, Tensor]:
    """The sums over the counted vectors of every text."""
    counted, text = counted_tokens(batch, bos_id, skip_bos), _text_of(batch)
    vectors = sae.vectors(trace[Read(site)])
    each = vectors[counted].flatten(0, -2)
    row = text[counted].repeat_interleave(vectors[0, 0].numel() // sae.d_in)
    return fitted(sae, each, row, int(text[batch.real].max()) + 1)


def _text_of(batch: Batch) -> Int[Tensor, "b p"]:
    """The number of each column's text in this batch, in the order in which they stand there."""
    if batch.documents is None:
        return torch.arange(len(batch), device=batch.tokens.device)[:, None].expand_as(batch.tokens)
    starts = torch.ones_like(batch.real)
    starts[:, 1:] = batch.documents[:, 1:] != batch.documents[:, :-1]
    return (starts & batch.real).flatten().cumsum(0).view_as(batch.tokens) - 1


def _finish(merged: Partial) -> "xr.Dataset":
    assert isinstance(merged, Fit)
    return merged.result()


def _losses(
    model: Transformer, sae: SAE, site: str, batch: Batch, at: Bool[Tensor, "b p"], mean: Float[Tensor, "d"]
) -> Float[Tensor, "4 b"]:
    """The summed next-token loss of every row, in the order of `RUNS`."""

    def placed(value: Tensor, new: Tensor) -> Tensor:
        return torch.where(at.view(*at.shape, *[1] * (value.ndim - 2)), new.to(value), value)

    def with_mean(value: Tensor) -> Tensor:
        return placed(value, mean.expand_as(sae.vectors(value)).reshape(value.shape))

    edits = [
        Edit(site, lambda value: placed(value, sae.reconstruction(value))),
        Edit(site, lambda value: placed(value, torch.zeros_like(value))),
        Edit(site, with_mean),
    ]
    swept = Sweep(model, batch, [Variant(edits=[edit]) for edit in edits]).run(SUMMED_LOSS)
    return torch.cat((swept.base[None], swept.values))


def _summed_loss(outcome: Outcome) -> Float[Tensor, "r"]:
    batch = outcome.batch
    return next_token_loss(outcome.logits(), batch.tokens, batch.keep, batch.documents).sum(1)


SUMMED_LOSS = Metric("summed next-token loss", "nats", _summed_loss, everywhere=True)


def _scores(losses: Float[Tensor, "4 b"], tokens: Int[Tensor, "b"]) -> dict[str, Tensor]:
    """The loss of every run and what the autoencoder recovers, each with the ends of its interval."""
    run = dict(zip(RUNS, losses.double(), strict=True))
    ratios = {f"ce_{name}": (loss, tokens.double()) for name, loss in run.items()}
    for name in ("zero", "mean"):
        ratios[f"loss_recovered_{name}"] = (run[name] - run["sae"], run[name] - run["clean"])
    ends = ("", "_low", "_high")
    return {
        name + end: value
        for name, pair in ratios.items()
        for end, value in zip(ends, ratio(*pair), strict=True)
    }


def _directions(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    wide = rows.detach().cpu().double()
    norm = wide.norm(dim=1, keepdim=True)
    if bool((norm == 0).any()):
        raise ValueError("directions must not be zero vectors")
    return wide / norm
