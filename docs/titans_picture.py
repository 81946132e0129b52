"""Draws `docs/pictures/titans.svg`: the three places of a long-term memory beside attention (Titans, section 4).

Run: `python docs/titans_picture.py`.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

sys.path.insert(0, str(Path(__file__).parent))
from architecture_picture import CORE, FILL, INK, LINE, WINGS, box

PICTURE = Path(__file__).parent / "pictures" / "titans.svg"
WIDE, HIGH = 1.7, 0.62
PANELS = {
    "context": (
        {
            "x": (1.2, 0.0, "segment x", FILL), "M": (0.0, 1.5, "memory M\nreads q", CORE),
            "A": (1.2, 3.0, "attention to\npersistent | readings | segment", WINGS),
            "L": (2.4, 4.5, "memory M\nlearns and reads a", CORE), "z": (1.2, 6.0, "z = a · σ(γ m)", FILL),
        },
        ("x M", "x A", "M A readings", "A L a", "A z a", "L z m"),
    ),
    "gate": (
        {
            "x": (1.2, 0.0, "tokens x", FILL), "A": (0.0, 3.0, "attention to\npersistent | window", WINGS),
            "M": (2.4, 3.0, "memory M\nlearns and reads", CORE), "z": (1.2, 6.0, "z = a · σ(γ m)", FILL),
        },
        ("x A q k v", "x M q k v", "A z a", "M z m"),
    ),
    "layer": (
        {
            "x": (1.2, 0.0, "tokens x", FILL), "M": (1.2, 2.0, "memory M\nlearns and reads", CORE),
            "A": (1.2, 4.0, "attention to\npersistent | window", WINGS), "z": (1.2, 6.0, "z = a", FILL),
        },
        ("x M q k v", "M A readings as q k v", "A z a"),
    ),
}  # fmt: skip
"""Of each arrangement the boxes (middle, height, text, colour) and the arrows between them, with what goes there."""


def draw(ax: Axes, name: str) -> None:
    """One arrangement, from the input at the bottom to z at the top."""
    boxes, arrows = PANELS[name]
    for middle, low, text, fill in boxes.values():
        wide = WIDE + 0.9 * (len(max(text.split("\n"), key=len)) > 22)
        box(ax, middle - wide / 2, low, wide, HIGH, fill)
        ax.text(middle, low + HIGH / 2, text, size=8, color=INK, ha="center", va="center")
    for arrow in arrows:
        start, end, what = (*arrow.split(" ", 2), "")[:3]
        (x, low, *_), (to, high, *_) = boxes[start], boxes[end]
        style = {"arrowstyle": "-|>", "color": LINE, "shrinkA": 0, "shrinkB": 1}
        ax.annotate("", (to, high), (x, low + HIGH), arrowprops=style)
        beside, side = ("right", -0.1) if to > x else ("left", 0.1)
        ax.text(
            (x + to) / 2 + side, (low + HIGH + high) / 2, what, size=7.5, color=INK, va="center", ha=beside
        )
    ax.set(xlim=(-1.1, 3.5), ylim=(-0.2, 6.9), title=f'arrangement="{name}"')
    ax.title.set_size(9)
    ax.axis("off")


def main() -> None:
    """Draw the three side by side."""
    plt.rcParams["svg.hashsalt"], plt.rcParams["svg.fonttype"] = "interp", "none"
    fig, sides = plt.subplots(1, 3, figsize=(10, 4.4), layout="constrained")
    for ax, name in zip(sides, PANELS, strict=True):
        draw(ax, name)
    fig.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
