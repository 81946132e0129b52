"""Draws `docs/pictures/architecture.svg`: what a patch goes through, room by room.

Run: `python docs/architecture_picture.py`.
"""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

PICTURE = Path(__file__).parent / "pictures" / "architecture.svg"
INK, LINE, FILL = "#20242b", "#8a94a6", "#f3f5f9"
WINGS, CORE = "#e6effb", "#eef6ec"
ROOMS = (
    ("cli · serve", "commands, the live page", FILL),
    ("pages · plot", "results as pages and pictures", FILL),
    (
        "attention · causal · circuits · lenses · residual · tokens\n"
        "weights · features · editing · dynamics · findings",
        "the questions",
        WINGS,
    ),
    ("runs", "windows of data, files, devices", FILL),
    ("passes", "needs, shared passes, planned sweeps, metrics", CORE),
    ("data · tasks · families · wrapped", "batches; checkpoints opened", CORE),
    ("model", "the Transformer, its sites, edits and reads", CORE),
    ("core", "statistics, labels, checks of arguments", CORE),
)  # fmt: skip
STEPS = (
    ('interp.patch(model, clean, corrupt, "z")', 2),
    ("Patch(site, metric).bind(model) → ByRow", 2),
    ("windows of batches of pairs", 3),
    ("needs: Pass(other run, reads)\nSweeping(own run, one variant per cell)", 4),
    ("packs of variants that fit the memory", 4),
    ("blocks from the edited one on", 6),
    ("metric of every variant − base", 4),
    ("moments merged → xarray Dataset", 7),
)
"""What happens, in order, and in which of the rooms."""
HIGH, WIDE, LEFT = 0.78, 5.6, 6.2
"""Of a room, and where the steps begin."""


def box(ax: Axes, x: float, y: float, width: float, height: float, fill: str) -> None:
    """A rounded box with its lower left corner there."""
    style = "round,pad=0,rounding_size=0.08"
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=fill, ec=LINE, lw=0.8))


def main() -> None:
    """Draw the rooms on the left, the highest first, and the steps of a patch on the right."""
    plt.rcParams["svg.hashsalt"], plt.rcParams["svg.fonttype"] = "interp", "none"
    fig, ax = plt.subplots(figsize=(11, 6.4))
    for i, (name, what, fill) in enumerate(ROOMS):
        y = len(ROOMS) - 1 - i
        box(ax, 0, y, WIDE, HIGH, fill)
        ax.text(0.15, y + HIGH / 2, name, size=8, weight="bold", color=INK, va="center")
        ax.text(WIDE - 0.15, y + HIGH / 2, what, size=7.2, color=INK, va="center", ha="right")
    for i, (step, room) in enumerate(STEPS):
        y, middle = len(STEPS) - 1 - i, len(ROOMS) - 1 - room + HIGH / 2
        box(ax, LEFT + 0.4, y, 4.2, HIGH, "white")
        ax.text(LEFT + 0.55, y + HIGH / 2, f"{i + 1}", size=9, weight="bold", color=LINE, va="center")
        ax.text(
            LEFT + 0.9,
            y + HIGH / 2,
            step,
            size=7.6,
            color=INK,
            va="center",
            family="monospace" if not i else None,
        )
        ax.plot([WIDE, LEFT + 0.4], [middle, y + HIGH / 2], color=LINE, lw=0.8, ls=":")
        if i:
            ax.annotate(
                "",
                (LEFT + 2.5, y + HIGH),
                (LEFT + 2.5, y + 1),
                arrowprops={"arrowstyle": "->", "color": INK, "lw": 0.9},
            )
    ax.set_xlim(-0.05, LEFT + 4.7)
    ax.set_ylim(-0.1, len(ROOMS) - 0.1)
    ax.axis("off")
    fig.savefig(PICTURE, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
