"""What do depth and length do to the tokens of a trained model, and what of it is the architecture alone?

Rank collapse with skips and MLPs on and off (Dong et al. 2021), angles between tokens as the stack is applied again and
again (Rodríguez Abella et al. 2024/25), attention entropy and dispersion with length (Veličković et al. 2024) with and
without log-n scaling, spectra of the weights, and singular-value scaling trained on the texts (Sun et al. 2025): on a
demo model and on the same architecture with random weights. Texts are the package's sentences joined to full rows.

Run: `interp run experiments/depth_diagnostics.py -p model=demo-4l`
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
import xarray as xr
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

import interp
from interp import plot, tasks
from interp.attention import attention_entropy, dispersion
from interp.editing import FineTuning, SingularValues, train_z
from interp.lab.depth import consensus, rank_collapse
from interp.opening import DType, OfModel
from interp.runs.record import Record
from interp.weights import spectra

TRAINED, RANDOM, UNMASKED = "trained", "random weights", "random weights, no causal mask"


@dataclass(frozen=True)
class DepthDiagnostics(OfModel):
    """Whose depth, over how much text."""

    model: str = "demo-4l"
    """A demo model."""
    dtype: DType | None = "float64"
    """Ranks and collapses are measured in double precision."""
    rows: int = 24
    """Rows of text; half as many again are kept for the test of singular-value scaling."""
    length: int = 128
    """Tokens per row."""
    repeats: int = 12
    """How often the stack is applied."""
    train_length: int = 32
    """m of log-n scaling: the length at which scores are left as they are."""
    steps: int = 15
    """Steps of training z."""
    seed: int = 0
    """Of the texts and of the random weights."""


def main(job: DepthDiagnostics, record: Record) -> None:
    """Every diagnostic on every model, three figures, one table; say the numbers that answer the question."""
    trained = job.opened()
    record.model(trained)
    tokens = rows_of_text(trained, job)
    models = {TRAINED: trained, RANDOM: untrained(trained, job.seed, causal=True)}
    every = {**models, UNMASKED: untrained(trained, job.seed, causal=False)}
    each = partial(over, record)
    collapse = each("collapse", every, lambda model: rank_collapse(model, tokens))
    meeting = each("consensus", every, lambda model: consensus(model, tokens, repeats=job.repeats))
    entropy = each("entropy", models, lambda model: attention_entropy(model, tokens))
    spread = each("dispersion", models, lambda model: dispersion(model, tokens))
    scaled = each(
        "dispersion_log_n", models, lambda model: dispersion(model, tokens, train_length=job.train_length)
    )
    weights = each("spectra", models, spectra)
    tuned = record.step("singular_values", lambda: scaling(trained, job))
    record.figure("depth", depth_figure(collapse, meeting, job))
    record.figure("attention", attention_figure(entropy, spread, scaled, job))
    record.figure("spectra", spectra_figure(weights))
    record.table("singular_value_scaling", tuned)
    for line in sentences(collapse, meeting, entropy, weights):
        record.say(line)
    record.say(tuned.round(4).to_string(index=False))


def over(
    record: Record,
    name: str,
    models: Mapping[str, interp.HookedTransformer],
    measure: Callable[[interp.HookedTransformer], xr.Dataset],
) -> dict[str, xr.Dataset]:
    """One result per model, each a step of the record."""
    return {
        kind: record.step(f"{name}-{kind.replace(',', '').replace(' ', '-')}", partial(measure, model))
        for kind, model in models.items()
    }


def rows_of_text(
    model: interp.HookedTransformer, job: DepthDiagnostics, *, fresh: bool = False
) -> Int[Tensor, "b p"]:
    """Rows of sentences and facts, drawn at random and joined; `fresh`: others than without."""
    generator = np.random.default_rng((job.seed, int(fresh)))
    facts = tasks.fact_prompts()
    bos, rows = model.text.bos_id, []
    for _ in range(job.rows // 2 if fresh else job.rows):
        ids: list[int] = [] if bos is None else [bos]
        while len(ids) < job.length:
            sentence = tasks.IndirectObjects(1, held_out=fresh).sentences(generator)[0].text
            fact = facts[int(generator.integers(len(facts)))].text
            ids += model.text.ids(f"{sentence} {fact} ", prepend_bos=False)
        rows.append(ids[: job.length])
    return torch.tensor(rows)


def untrained(model: interp.HookedTransformer, seed: int, *, causal: bool) -> interp.HookedTransformer:
    """The same architecture with the weights training began from, in float64; with or without its causal mask."""
    torch.manual_seed(seed)
    network = interp.model.Transformer(replace(model.transformer.config, causal=causal)).double().eval()
    return interp.HookedTransformer(network.requires_grad_(False))


def scaling(model: interp.HookedTransformer, job: DepthDiagnostics) -> pd.DataFrame:
    """The loss on the texts and on fresh ones before and after z was trained, both ways.

    z of every MLP matrix, as in the paper's released code; of W_V and W_O where there are no MLPs.
    """
    texts, fresh = rows_of_text(model, job), rows_of_text(model, job, fresh=True)
    kinds = ("attn.W_V", "attn.W_O") if model.cfg.mlp is None else ("mlp.W_in", "mlp.W_out")
    names = [f"blocks.{i}.{kind}" for i in range(model.cfg.n_layers) for kind in kinds]
    rows = [
        {
            "rescale": "untouched",
            "numbers": 0,
            "trained_on": loss_of(model, texts),
            "fresh": loss_of(model, fresh),
        }
    ]
    for rescale in (False, True):
        tuning = FineTuning(job.steps, 0.02)
        z, _ = train_z(model, texts, partial(loss, tokens=texts), names, rescale=rescale, tuning=tuning)
        edits = [SingularValues.of(model, name).edit(z[name], rescale=rescale) for name in names]
        with ExitStack() as stack:
            for edit in edits:
                stack.enter_context(edit.applied(model))
            after = {"trained_on": loss_of(model, texts), "fresh": loss_of(model, fresh)}
        rows.append({"rescale": str(rescale), "numbers": sum(len(x) for x in z.values()), **after})
    return pd.DataFrame(rows)


def loss(logits: Float[Tensor, "b p v"], tokens: Int[Tensor, "b p"]) -> Float[Tensor, ""]:
    """Next-token loss in nats."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def loss_of(model: interp.HookedTransformer, tokens: Int[Tensor, "b p"]) -> float:
    """The same of a model."""
    return float(loss(model.transformer(tokens), tokens))


def depth_figure(
    collapse: Mapping[str, xr.Dataset], meeting: Mapping[str, xr.Dataset], job: DepthDiagnostics
) -> Figure:
    """Above rank collapse, a panel per model; below three angles as the stack is iterated."""
    picture, axes = plt.subplots(2, 3, figsize=(13, 7.2), layout="constrained")
    for ax, (name, result) in zip(axes[0], collapse.items(), strict=True):
        plot.rank_collapse(result, title=name, ax=ax)
    for ax, score in zip(axes[1], ("min_cosine", "mean_cosine", "to_first_start"), strict=True):
        for name, result in meeting.items():
            plot.consensus(result, score, label=name, title=f"the stack applied {job.repeats} times", ax=ax)
    picture.suptitle(f"{job.model}: rank collapse and consensus; bands: 95 % over {job.rows} texts")
    return picture


def attention_figure(
    entropy: Mapping[str, xr.Dataset],
    spread: Mapping[str, xr.Dataset],
    scaled: Mapping[str, xr.Dataset],
    job: DepthDiagnostics,
) -> Figure:
    """Maps of relative entropy, and the sharpest and flattest head of each model by number of keys, with log-n."""
    picture, axes = plt.subplots(2, 3, figsize=(15, 7.2), layout="constrained")
    for row, name in zip(axes, entropy, strict=True):
        plot.attention_entropy(entropy[name], ax=row[0])
        row[0].set_title(f"{name}: attention entropy by head")
        heads = extremes(entropy[name])
        for ax, score in zip(row[1:], ("entropy", "max_weight"), strict=True):
            plot.dispersion(spread[name], score, heads=heads, ax=ax)
            for head in heads:
                one = scaled[name].sel(layer=[head.layer], head=[head.index])
                label = f", log n / log {job.train_length}"
                plot.dispersion(one, score, heads=[head], label=label, ax=ax)
            ax.set_title(f"{name}: {ax.get_title()}")
    picture.suptitle(
        f"{job.model}: sharpness of attention by head and by number of keys; grey: all other heads"
    )
    return picture


def extremes(entropy: xr.Dataset) -> list[interp.Part]:
    """The heads with the least and the most relative entropy."""
    relative = interp.frame(entropy.sel(score="relative")).set_index("part").value
    return [interp.Part.of(str(name)) for name in (relative.idxmin(), relative.idxmax())]


def spectra_figure(weights: Mapping[str, xr.Dataset]) -> Figure:
    """By model: singular values of W_out and OV, and effective ranks."""
    picture, axes = plt.subplots(2, 3, figsize=(14, 7.2), layout="constrained")
    for row, (name, result) in zip(axes, weights.items(), strict=True):
        plot.singular_values(result, "W_out" if "W_out" in result.kind.values else "W_O", ax=row[0])
        plot.singular_values(result, "OV", ax=row[1])
        plot.spectra_map(result, "effective_rank", ax=row[2])
        for ax in row:
            ax.set_title(f"{name}: {ax.get_title()}")
    plot.same_scale(axes[:, 2])
    return picture


def sentences(
    collapse: Mapping[str, xr.Dataset],
    meeting: Mapping[str, xr.Dataset],
    entropy: Mapping[str, xr.Dataset],
    weights: Mapping[str, xr.Dataset],
) -> list[str]:
    """The numbers at the ends of the curves."""
    found = []
    for name, result in collapse.items():
        ends = [f"{line} {float(result.value.sel(line=line)[-1]):.3g}" for line in result.line.values]
        found.append(f"{name}: relative residual after the last block: {', '.join(ends)}")
    for name, result in meeting.items():
        curves = {
            score: result.value.sel(score=score) for score in ("min_cosine", "mean_cosine", "to_first_start")
        }
        ends = [f"{score} {float(each[0]):.3f} to {float(each[-1]):.3f}" for score, each in curves.items()]
        found.append(f"{name}: over {result.sizes['depth'] - 1} blocks: {', '.join(ends)}")
    for name, result in entropy.items():
        relative = result.value.sel(score="relative")
        low, high = float(relative.min()), float(relative.max())
        found.append(f"{name}: entropy / log n of heads from {low:.3f} to {high:.3f}")
    for name, result in weights.items():
        ov = result.isel(matrix=result.kind.values == "OV")
        found.append(
            f"{name}: mean stable rank of OV {float(ov.stable_rank.mean()):.2f} of {int(ov['size'][0])}"
        )
    return found
