"""How many prompts does a Jacobian lens need, and do its intervals hold?

Run: `interp run experiments/jacobian_lens.py -p model=demo-4l`

Two corpora of full rows: the package's sentences and facts, joined, and texts that the model writes itself. Every
prompt is a group of its own, so one fit gives the Jacobian of each. Needed for a precision p: var(J) / (p |J|)^2
prompts, var the summed variance over prompts. Then lenses of few prompts read held-out text: how often does the rank
of their top word under the lens of all other prompts lie where the interval of the few says (nominal: 95 %)?
And fits that stop by themselves, in random orders of the prompts: how far from the mean of all are they?
"""

from dataclasses import dataclass
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

import interp
from interp import tasks
from interp.lenses import FittedJacobianLens, JacobianLens
from interp.lenses.fitted_jacobian_lens import lens_ranks
from interp.lenses.jacobian_lens import FEWEST
from interp.model.sites import stream_after
from interp.opening import OfModel
from interp.passes import Sampling
from interp.runs.record import Record

PERCENT = 0.05


@dataclass(frozen=True)
class JacobianLensRun(OfModel):
    """Whose lens to fit, on how much text."""

    prompts: int = 96
    """Prompts of each corpus."""
    length: int = 64
    """Tokens per prompt."""
    skip: int = 16
    """First positions that do not count."""
    few: int = 16
    """Prompts of each of the small lenses whose intervals are checked."""
    read: int = 4
    """Held-out rows that are read."""
    orders: int = 300
    """Random orders of the prompts in which fits stop by themselves."""
    seed: int = 0
    """Seed of the texts and the orders."""


def main(job: JacobianLensRun, record: Record) -> None:
    """Fit on both corpora, check the intervals; the figure, and the tables in words."""
    model = job.opened()
    record.model(model)
    corpora = {"sentences": sentences(model, job), "its own texts": written(model, job)}
    fits = {
        name: record.step(f"fit-{i}", partial(fitted, model, rows[job.read :], job))
        for i, (name, rows) in enumerate(corpora.items())
    }
    needs = pd.concat([needed(name, fit) for name, fit in fits.items()], ignore_index=True)
    held = pd.concat(
        [checked(model, name, fit, corpora[name][: job.read], job) for name, fit in fits.items()],
        ignore_index=True,
    )
    stops = pd.DataFrame([s for name, fit in fits.items() for s in stopped(name, fit, job)])
    record.table("needed", needs)
    record.table("stops", stops)
    record.table("intervals", held)
    record.figure("jacobian_lens", figure(job.model, fits))
    record.say(needs.round(3).to_string(index=False))
    record.say(held.round(3).to_string(index=False))
    record.say(stops.round(3).to_string(index=False))


def sentences(model: interp.HookedTransformer, job: JacobianLensRun) -> Int[Tensor, "b p"]:
    """Rows of sentences and facts, drawn at random and joined."""
    generator, facts, rows = np.random.default_rng(job.seed), tasks.fact_prompts(), []
    for _ in range(job.prompts + job.read):
        ids = [] if model.text.bos_id is None else [model.text.bos_id]
        while len(ids) < job.length:
            sentence = tasks.IndirectObjects(1).sentences(generator)[0].text
            fact = facts[int(generator.integers(len(facts)))].text
            ids += model.text.ids(f"{sentence} {fact} ", prepend_bos=False)
        rows.append(ids[: job.length])
    return torch.tensor(rows)


def written(model: interp.HookedTransformer, job: JacobianLensRun) -> Int[Tensor, "b p"]:
    """Rows that the model samples from nothing."""
    first = torch.full((job.prompts + job.read, 1), model.text.bos_id or 0)
    found = model.generate(interp.Batch(first), job.length - 1, sampling=Sampling(seed=job.seed))
    return found.tokens[found.real.all(1)]


def fitted(model: interp.HookedTransformer, rows: Int[Tensor, "b p"], job: JacobianLensRun) -> xr.Dataset:
    """The Jacobian of every prompt, each a group of its own."""
    question = JacobianLens(skip=job.skip, precision=None, groups=len(rows))
    return interp.run([question], model, list(interp.Batch(rows).split(8)))["jacobian_lens"]


def needed(corpus: str, fit: xr.Dataset) -> pd.DataFrame:
    """Per layer: norms of single prompts, the variance between them, and the prompts that 5 % needs."""
    norms = np.sqrt((fit.by_group**2).sum(("out", "in")))
    whole = np.sqrt((fit.value**2).sum(("out", "in")))
    n = int(fit.sizes["group"])
    variance = n * fit.error**2
    return pd.DataFrame(
        {
            "corpus": corpus, "layer": fit.layer.values, "prompts": n, "norm": whole.values,
            "least_norm": norms.min("group").values, "median_norm": norms.median("group").values,
            "largest_norm": norms.max("group").values, "variance": variance.values, "error": fit.error.values,
            "needed": np.ceil(variance.values / PERCENT**2),
        }
    )  # fmt: skip


def stopped(corpus: str, fit: xr.Dataset, job: JacobianLensRun) -> list[dict[str, object]]:
    """Fits of the prompts in random orders that stop at a precision: after how many, and how far off they are.

    The distance is that to the mean of all prompts, relative to its norm, the largest over layers; divided by sqrt(1 -
    n / N), as it would be to the mean of infinitely many. "too_early": it is over twice the precision.
    """
    each = fit.by_group.transpose("layer", "group", "out", "in").values.astype(float)
    n, layers = each.shape[1], [layer.reshape(each.shape[1], -1) for layer in each]
    products = np.stack([flat @ flat.T for flat in layers])
    generator, found = np.random.default_rng(job.seed), []
    for precision in (PERCENT, 2 * PERCENT, 4 * PERCENT):
        ends = [_stop(products, generator.permutation(n), precision) for _ in range(job.orders)]
        off = np.array([distance for count, distance in ends if count < n])
        found.append(
            {
                "corpus": corpus, "precision": precision, "prompts": np.median([count for count, _ in ends]),
                "stopped": len(off) / len(ends), "distance": np.sqrt((off**2).mean()) if len(off) else np.nan,
                "too_early": (off > 2 * precision).sum() / len(ends),
            }
        )  # fmt: skip
    return found


def _stop(
    products: Float[np.ndarray, "l n n"], order: Int[np.ndarray, "n"], precision: float
) -> tuple[int, float]:
    """How many prompts of this order a fit takes, and its distance; all and NaN if it does not stop before the end."""
    whole, every = products.mean((1, 2)), len(order)
    for n in range(FEWEST, every, 8):
        seen = order[:n]
        square = products[:, seen][:, :, seen].mean((1, 2))
        spread = products[:, seen, seen].sum(1) - n * square
        if (np.sqrt(spread.clip(0) / (n - 1) / n / square) <= precision).all():
            apart = square - 2 * products[:, seen].mean((1, 2)) + whole
            return n, float(np.sqrt((apart.clip(0) / whole / (1 - n / every)).max()))
    return every, np.nan


def checked(
    model: interp.HookedTransformer,
    corpus: str,
    fit: xr.Dataset,
    text: Int[Tensor, "b p"],
    job: JacobianLensRun,
) -> pd.DataFrame:
    """Per layer: how often the other prompts' rank of the top word lies in the few's interval, and how wide that is.

    Beside it how often both lenses say the same word, and the share of the resampled lenses that do.
    """
    every = FittedJacobianLens.of_result(fit, model)
    assert every.by_group is not None
    found = []
    for start in range(0, len(every.by_group) - job.few, job.few):
        mine = torch.zeros(len(every.by_group), dtype=torch.bool)
        mine[start : start + job.few] = True
        few, others = (part(every, keep) for keep in (mine, ~mine))
        read = few.read(text, top=1)
        tokens = torch.from_numpy(read.top_token.values[..., 0])
        for depth, layer in enumerate(few.layers):
            site = stream_after(model.cfg, layer)
            state = interp.observe(model, text, [interp.Read(site)]).trace[site]
            told = tokens[:, depth].flatten()[:, None]
            ranks = lens_ranks(model.transformer, others, site, state.flatten(0, 1), told, _mean(others))
            cells, rank = read.isel(depth=depth, rank=0), ranks.flatten().numpy()
            low, high = (cells[name].values.flatten() for name in ("low", "high"))
            found.append(
                {
                    "corpus": corpus, "layer": layer, "within": ((low <= rank) & (rank <= high)).mean(),
                    "width": (high - low).mean(), "same_word": (rank == 0).mean(), "stays": float(cells.stays.mean()),
                }
            )  # fmt: skip
    return pd.DataFrame(found).groupby(["corpus", "layer"], as_index=False).mean()


def part(lens: FittedJacobianLens, keep: Tensor) -> FittedJacobianLens:
    """The lens of some of the groups."""
    assert lens.by_group is not None and lens.sizes is not None
    groups, sizes = lens.by_group[keep], lens.sizes[keep]
    return FittedJacobianLens(
        lens.model, lens.layers, groups.mean(0), len(groups), None, None, groups, sizes
    )  # fmt: skip


def _mean(lens: FittedJacobianLens) -> Tensor:
    """The weights of the groups that give the lens itself."""
    assert lens.by_group is not None
    return torch.full((1, len(lens.by_group)), 1 / len(lens.by_group), dtype=torch.float64)


def figure(name: str, fits: dict[str, xr.Dataset]) -> Figure:
    """The standard error by the number of prompts, as the spread of all says it, and the norms of single prompts."""
    picture, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for (corpus, fit), style in zip(fits.items(), ("-", "--"), strict=True):
        n = np.arange(2, fit.sizes["group"] + 1)
        for layer in fit.layer.values:
            whole = float(fit.error.sel(layer=layer)) * fit.sizes["group"] ** 0.5
            axes[0].loglog(
                n, whole / n**0.5, style, color=f"C{layer}", label=f"{corpus}, after block {layer}"
            )
            norms = np.sqrt((fit.by_group.sel(layer=layer) ** 2).sum(("out", "in")))
            axes[1].plot(np.sort(norms), np.linspace(0, 1, len(norms)), style, color=f"C{layer}")
    axes[0].axhline(PERCENT, color="grey", lw=0.8)
    axes[0].set(xlabel="prompts", ylabel="standard error / |J|")
    axes[0].legend(fontsize=7)
    axes[1].set(xlabel="|J| of a prompt", ylabel="share of prompts", xscale="log")
    picture.suptitle(name)
    return picture
