"""Is what a model does from a subject to the object of a relation an affine map, and does its inverse change it?

For each relation the mean Jacobian of a few prompts makes the map (Hernandez et al. 2024), and all other subjects judge
it: does it give the model's own answer, and does an edit by its inverse make the model answer as for another subject?
Beside it stand the mean difference alone, the most frequent answer, the answer of another subject, the other subject's
state put in place, and a random direction of the edit's length.

Run: `interp run experiments/linear_relations.py -p model=FOLDER`, a minute or two of one CPU for each relation on
SmolLM2-135M. Other relations are JSON files as those of the paper (github.com/evandez/relations): `-p files=FILE`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
import xarray as xr
from matplotlib.figure import Figure

import interp
from interp import plot
from interp.causal import linear_relation
from interp.opening import OfModel
from interp.runs.record import Record
from interp.tasks import load_word_pairs

TEMPLATES: Mapping[str, str] = {
    "antonym": "The opposite of {input} is {output}",
    "country_capital": "The capital of {input} is {output}",
    "present_past": "The past tense of {input} is {output}",
    "singular_plural": "The plural of {input} is {output}",
}
"""How the relations of the package are stated."""
Relation = tuple[str, list[tuple[str, str]]]
"""Template, and pairs of subject and object."""


@dataclass(frozen=True)
class Relations(OfModel):
    """Which relations, and how the map is made."""

    tasks: tuple[str, ...] = ("country_capital",)
    """Relations of the package."""
    files: tuple[str, ...] = ()
    """JSON files with `samples` (subject, object) and `prompt_templates`, of which the first is taken."""
    most: int = 50
    """The most pairs of a relation."""
    depths: tuple[float, ...] = (1 / 3,)
    """After which blocks the subject is read, as shares of the depth."""
    examples: int = 8
    """Subjects from which the map is made."""
    beta: float = 1.0
    """Factor on W s."""
    only_known: bool = True
    """Whether only subjects count whose object the model gives."""
    seed: int = 0
    """Of the examples and the edits."""


def main(job: Relations, record: Record) -> None:
    """Fit and judge the map of every relation, and keep the numbers as a table and a figure."""
    torch.set_num_threads(1)
    model = job.opened()
    record.model(model)
    found = {
        name: record.step(name, partial(judged, model, job, relation))
        for name, relation in relations(job).items()
    }
    keys = ["value", "low", "high", "null", "n"]
    table = pd.concat(
        [interp.frame(result[keys]).assign(relation=name) for name, result in found.items()],
        ignore_index=True,
    )
    record.table("relations", table)
    record.figure("relations", figure(found))
    record.say(table.round(3).to_string())


def relations(job: Relations) -> dict[str, Relation]:
    """The relations by name."""
    known = {task: (TEMPLATES[task], list(load_word_pairs()[task][: job.most])) for task in job.tasks}
    return known | {Path(path).stem: read(Path(path), job.most) for path in job.files}


def read(path: Path, most: int) -> Relation:
    """The relation of a file of the paper."""
    found = json.loads(path.read_text(encoding="utf-8"))
    pairs = [(sample["subject"], sample["object"]) for sample in found["samples"]]
    return f"{found['prompt_templates'][0].replace('{}', '{input}')} {{output}}", pairs[:most]


def judged(model: interp.HookedTransformer, job: Relations, relation: Relation) -> xr.Dataset:
    """The map of one relation."""
    template, pairs = relation
    layers = sorted({int(share * model.cfg.n_layers) for share in job.depths})
    return linear_relation(
        model, pairs, template, layers=layers, examples=job.examples, beta=job.beta, only_known=job.only_known,
        seed=job.seed,
    )  # fmt: skip


def figure(found: Mapping[str, xr.Dataset]) -> Figure:
    """The scores of every relation, side by side."""
    picture, axes = plt.subplots(
        1, len(found), squeeze=False, figsize=(5.5 * len(found), 4.5), layout="constrained"
    )
    for ax, (name, result) in zip(axes[0], found.items(), strict=True):
        plot.linear_relation(result, ax=ax)
        ax.set_title(f"{name}: {ax.get_title()}", fontsize=10)
    return picture
