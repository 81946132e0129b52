"""What does every head of a model do? The whole table of heads as CSV, and a figure with a word for each.

Run: `interp run experiments/name_every_head.py --model demo-4l --out out/name_every_head`
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import tyro
import xarray as xr
from matplotlib.figure import Figure

import interp
from interp import plot
from interp.analyses.heads import attention_kernel
from interp.analyses.labels import RULES
from interp.core.results import write_atomically
from interp.plot.heads import head_labels

MAPS = ("induction", "previous_token", "copying_weights", "name_mover")


@dataclass(frozen=True)
class NameEveryHead:
    """Whose heads to name, and where to."""

    model: str = "demo-4l"
    """Demo name, local folder, safetensors file or hub name."""
    out: Path = Path("out/name_every_head")
    """Folder for heads.csv, kernel.csv and heads.png."""
    seed: int = 0
    """Seed of the repeated tokens and of the sentences."""


def main(job: NameEveryHead) -> Path:
    """Write both tables and the figure; print the heads that have a label, and why scores are absent."""
    model = interp.HookedTransformer.from_pretrained(job.model)
    data = interp.RepeatedTokens(seed=job.seed)
    table, kernel = interp.heads(model, data), attention_kernel(model, data)
    job.out.mkdir(parents=True, exist_ok=True)
    for name, result in (("heads", table), ("kernel", kernel)):
        write_atomically(job.out / f"{name}.csv", partial(interp.frame(result).to_csv, index=False))
    figure(job.model, table).savefig(job.out / "heads.png", dpi=150)
    for line in named(table):
        print(line)
    for key, reason in table.attrs.items():
        if str(key).startswith("no_"):
            print(f"{str(key).replace('_', ' ')}: {reason}")
    return job.out


def named(table: xr.Dataset) -> list[str]:
    """Each labelled head with the score behind its label, its 95 % interval and its null."""
    behind = {rule.label: rule.evidence[0].score for rule in RULES}
    cells = [table.sel(layer=layer, head=head) for layer in table.layer for head in table["head"]]
    lines = []
    for cell in (cell for cell in cells if cell.label.item() in behind):
        label = str(cell.label.item())
        score = behind[label]
        value, low, high, null = (float(cell[f"{score}{end}"]) for end in ("", "_low", "_high", "_null"))
        place = f"{int(cell.layer)}.{int(cell['head'])}"
        lines.append(f"{place:<6} {label:<16} {score} {value:.2f} [{low:.2f}, {high:.2f}], null {null:.2f}")
    return lines


def figure(name: str, table: xr.Dataset) -> Figure:
    """The labels on top, maps of four scores below."""
    n_layers, n_heads = table.sizes["layer"], table.sizes["head"]
    maps = [score for score in MAPS if score in table]
    rows = (len(maps) + 1) // 2
    size = (2.4 + 1.5 * n_heads, 1.4 + 0.6 * n_layers + rows * (1.2 + 0.42 * n_layers))
    picture = plt.figure(figsize=size, layout="constrained")
    grid = picture.add_gridspec(1 + rows, 2, height_ratios=[1.4, *[1.0] * rows])
    head_labels(table, ax=picture.add_subplot(grid[0, :]))
    for i, score in enumerate(maps):
        plot.heads(table, score, ax=picture.add_subplot(grid[1 + i // 2, i % 2]))
    picture.suptitle(name)
    return picture


if __name__ == "__main__":
    print(main(tyro.cli(NameEveryHead)))
