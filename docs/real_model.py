"""Runs the blocks of `howto/real_model.md` on a model, and puts what they print and draw under them.

Run: `python docs/real_model.py FOLDER [FOUND.csv [RANDOM.csv DEMO.csv]]`: the folder or file of SmolLM2, and what
`interp findings MODEL --out FILE.csv` wrote of it, of a random network of its shape and of demo-4l: the tables and the
picture are made of them.
"""

import re
import sys
from pathlib import Path
from textwrap import shorten

import matplotlib as mpl
import pandas as pd

sys.path.insert(0, str(Path(__file__).parent))
from blocks import drawn, run_block

from interp import plot
from interp.views.writing import short

PAGE = Path(__file__).parent / "howto" / "real_model.md"
PICTURES = PAGE.parents[1] / "pictures" / "real_model"
BLOCK = re.compile(
    r"^```py\n(.*?)^```$(?:\n\n```text\n.*?^```$)?(?:\n\n!\[[^\n]*)?", re.DOTALL | re.MULTILINE
)
"""A block that is not run at build, since it takes a real model, and what stands under it."""
OTHERS = re.compile(r"^\| claim of \|(?:.*\|\n)*.*\|$", re.MULTILINE)
TABLE = re.compile(r"^\| claim \|.*?\n\n!\[[^\n]*", re.DOTALL | re.MULTILINE)


def with_outputs(markdown: str, folder: Path) -> tuple[str, dict[str, bytes]]:
    """The page with what each block prints and draws under it, and the pictures by file name."""
    mpl.use("agg")
    names: dict[str, object] = {"__name__": "__main__", "FOLDER": folder}
    pictures: dict[str, bytes] = {}

    def extended(found: re.Match[str]) -> str:
        line = markdown[: found.start(1)].count("\n")
        shown = run_block(found[1], names, str(PAGE), line)
        said = re.sub(r"^```.*$", "", shown.text, flags=re.MULTILINE).strip("\n")
        parts = [f"```py\n{found[1]}```", *([f"```text\n{said}\n```"] if said else [])]
        for figure in shown.figures:
            name = f"{len(pictures) + 1}.png"
            parts.append(_picture(name, figure, pictures))
        return "\n\n".join(parts)

    return BLOCK.sub(extended, markdown), pictures


def with_findings(markdown: str, table: pd.DataFrame) -> tuple[str, dict[str, bytes]]:
    """The page with the table of claims, and its picture."""
    pictures: dict[str, bytes] = {}
    lines = ["| claim | verdict | number above its null | null | over | |", "|---|---|---|---|---|---|"]
    for row in table.fillna({"about": "", "over": ""}).itertuples():
        number = f"{short(row.value, 2)} [{short(row.low, 2)}, {short(row.high, 2)}] {row.unit}"
        cells = (
            (number, short(row.null, 2), f"{int(row.n)} {row.over}") if pd.notna(row.value) else ("–", "", "")
        )
        found = " | ".join((*cells, shorten(str(row.about), 60, placeholder=" …")))
        lines.append(f"| `{row.claim}` | {row.verdict} | {found} |")
    figure = plot.findings(table.set_index("claim").to_xarray()).get_figure()
    figure.set_size_inches(6.8, 6.8)
    lines += ["", _picture("findings.png", drawn(figure), pictures)]
    return TABLE.sub(lambda _: "\n".join(lines), markdown), pictures


def with_others(markdown: str, tables: dict[str, pd.DataFrame]) -> str:
    """The page with the verdicts of several models side by side."""
    lines = [f"| claim of | {' | '.join(tables)} |", "|---|" + "---|" * len(tables)]
    for rows in zip(*(table.itertuples() for table in tables.values()), strict=True):
        cells = [
            row.verdict + (f", {short(row.value, 2)}" if pd.notna(row.value) else ", not asked")
            for row in rows
        ]
        lines.append(f"| `{rows[0].claim}` | {' | '.join(cells)} |")
    return OTHERS.sub(lambda _: "\n".join(lines), markdown)


def _picture(name: str, figure: tuple[bytes, int, str], pictures: dict[str, bytes]) -> str:
    """The line that shows a picture, which is kept by its name."""
    png, width, title = figure
    pictures[name] = png
    return f'![{title}](../pictures/real_model/{name}){{ width="{width}" .figure }}'


if __name__ == "__main__":
    page, drawn_here = with_outputs(PAGE.read_text(encoding="utf-8"), Path(sys.argv[1]))
    tables = [pd.read_csv(file) for file in sys.argv[2:]]
    if tables:
        page, more = with_findings(page, tables[0])
        drawn_here |= more
    if len(tables) == 3:
        page = with_others(page, dict(zip(("SmolLM2", "random weights", "demo-4l"), tables, strict=True)))
    PICTURES.mkdir(exist_ok=True)
    for name, png in drawn_here.items():
        (PICTURES / name).write_bytes(png)
    PAGE.write_text(page, encoding="utf-8")
