"""Does a gradient under backward rules tell better what a patch would do? Four ways against exact patching.

Estimates of attribution patching (the plain gradient) and under the rules of RelP, AttnLRP and CP-LRP are correlated
with the effects of the patches themselves, prompt by prompt over all cells that differ: layers x positions of the
stream, of what attention adds and of what MLPs add; and all edges. Jafari et al. 2025 found rules to help most for the
MLPs and the stream of GPT-2 small, and to harm a little for attention.

Run: `interp run experiments/relevance_patching.py -p model=demo-4l`, or `-p model=deep` for a model of 12 layers, 64
wide, that is trained on indirect objects first (four minutes on one CPU).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure

import interp
from interp.causal import attribution_patch, batches
from interp.causal.effects import COEFFICIENTS, FEWEST_CORRELATIONS, fisher_z
from interp.circuits import edge_attribution, edge_effects
from interp.core.stats import Moments
from interp.data.batch import Batch
from interp.lab.training import Sentences, Training, Vocabulary, train
from interp.model import MLP, LayerNorm, Learned, ModelConfig, Transformer
from interp.opening import OfModel
from interp.runs.record import Record
from interp.tasks import IndirectObjects

DEEP = "deep"
SITES = {"resid_pre": "stream", "attn_out": "attention", "mlp_out": "MLPs"}
EDGES = "edges"
RULES = {"gradient": (), "relp": "relp", "attnlrp": "attnlrp", "cp-lrp": "cp-lrp"}
ALL = 10**6
TRAINING = Training(steps=3000)


@dataclass(frozen=True)
class RelevancePatching(OfModel):
    """Whose estimates to judge, and on how many prompts."""

    model: str = "demo-4l"
    """Demo name, local folder, safetensors file or hub name; `deep` is trained here."""
    prompts: int = 128
    """How many pairs of sentences are drawn; those of the most frequent length are used."""
    edges: bool = True
    """Whether edges are judged too: exact effects of all of them take most of the time."""
    seed: int = 0
    """Seed of the sentences."""
    layers: int = 12
    """Of the model that is trained."""
    training: Training = TRAINING
    """How it is trained."""


def main(job: RelevancePatching, record: Record) -> None:
    """Correlate, and keep the numbers as a table and a figure."""
    torch.set_num_threads(1)
    model = deep(job, record) if job.model == DEEP else job.opened()
    record.model(model)
    clean, corrupt = one_length(model, job)
    found = [
        record.step(f"agreement_{site}", partial(of_site, model, clean, corrupt, site)) for site in SITES
    ]
    if job.edges:
        found.append(record.step("agreement_edges", partial(of_edges, model, clean, corrupt)))
    table = interp.frame(xr.concat(found, "what", combine_attrs="override"))
    record.table("agreement", table)
    record.figure(
        "agreement", figure(xr.concat(found, "what", combine_attrs="override"), job.model, len(clean))
    )
    record.say(table.pivot_table("value", ["what", "score"], "rules", sort=False).round(3).to_string())


def deep(job: RelevancePatching, record: Record) -> interp.HookedTransformer:
    """A deep, narrow model of indirect objects, trained where the record is; it goes on after a kill."""
    texts = [sentence.text for sentence in IndirectObjects(5000).sentences()]
    vocabulary = Vocabulary.learned(texts, 600)
    data = Sentences(IndirectObjects(), vocabulary)
    config = ModelConfig(
        job.layers, 64, 4, data.width, data.d_vocab, position=Learned(), norm=LayerNorm(), mlp=MLP(256)
    )
    trained = train(config, data, job.training, out=record.stream_folder(DEEP), resume=True)
    assert isinstance(trained.model, Transformer)
    last = trained.log.iloc[-1]
    record.say(f"{DEEP}: held-out loss {last.held_out_loss:.4f}, answers right {last.accuracy:.3f}")
    return interp.HookedTransformer(trained.model, vocabulary.tokenizer)


def one_length(model: interp.HookedTransformer, job: RelevancePatching) -> tuple[Batch, Batch]:
    """Pairs of the most frequent length, names that were never together in training."""
    tokenizer = model.text.tokenizer
    assert tokenizer is not None
    task = IndirectObjects(job.prompts, job.seed, held_out=True)
    clean, corrupt = batches(model, task.pairs(tokenizer))
    rows = (clean.lengths == clean.lengths.mode().values).nonzero()[:, 0]
    n = int(clean.lengths.mode().values)
    found = []
    for batch in (clean.rows(rows), corrupt.rows(rows)):
        assert batch.answer is not None
        tokens = torch.stack([row[-n:] if batch.keep is None else row[keep] for row, keep in _rows(batch)])
        found.append(Batch(tokens, bos=True).with_answers(batch.answer, batch.wrong))
    return found[0], found[1]


def _rows(batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every row's tokens, and which of them are real."""
    return zip(batch.tokens, batch.real, strict=True)


def of_site(model: interp.HookedTransformer, clean: Batch, corrupt: Batch, site: str) -> xr.Dataset:
    """The agreement over all cells of a site, under each set of rules."""
    every = [
        attribution_patch(
            model, clean, corrupt, site, rules=rules, agreement=ALL, agreement_prompts=None, each=False
        ).agreement
        for rules in RULES.values()
    ]
    parts = [found.to_dataset("estimate").rename(coefficient="score") for found in every]
    joined = xr.concat(parts, "rules").assign_coords(rules=list(RULES), what=SITES[site])
    return joined.assign(n=((), len(clean)))


def of_edges(model: interp.HookedTransformer, clean: Batch, corrupt: Batch) -> xr.Dataset:
    """The agreement over all edges that change anything, under each set of rules."""
    exact = edge_effects(model, clean, corrupt, each=True)
    there = exact.changed.values.astype(bool)
    each = []
    for rules in RULES.values():
        ours = edge_attribution(model, clean, corrupt, each=True, rules=rules)
        pairs = zip(ours["each"].values, exact["each"].values, strict=True)
        each.append([fisher_z(*(torch.from_numpy(x[there]) for x in pair)) for pair in pairs])
    moments = Moments.of(torch.tensor(each, dtype=torch.float64).movedim(1, 0))
    low, high = moments.interval(fewest=FEWEST_CORRELATIONS)
    values = {
        name: (("rules", "score"), x.tanh())
        for name, x in (("value", moments.mean), ("low", low), ("high", high))
    }
    coords = {"rules": list(RULES), "score": list(COEFFICIENTS), "what": EDGES}
    return xr.Dataset(values, coords).assign(n=((), len(clean)))


def figure(result: xr.Dataset, model: str, n: int) -> Figure:
    """One panel per coefficient: a dot with its interval for every set of rules, by what is patched."""
    picture, axes = plt.subplots(1, 2, sharey=True, figsize=(9, 3.6), layout="constrained")
    what = [str(name) for name in result.what.values]
    for ax, score in zip(axes, COEFFICIENTS, strict=True):
        for i, rules in enumerate(RULES):
            cell = result.sel(score=score, rules=rules)
            place = np.arange(len(what)) + (i - 1.5) * 0.18
            ends = np.abs(np.stack((cell.low, cell.high)) - cell.value.values)
            ax.errorbar(cell.value, place, xerr=ends, fmt="o", markersize=4, capsize=2, label=rules)
        ax.set_yticks(range(len(what)), what)
        ax.set_xlabel(f"{score} correlation with exact patching")
        ax.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=8)
    picture.suptitle(f"{model}: do rules make gradients truer? {n} pairs, 95 % over prompts")
    return picture
