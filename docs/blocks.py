"""Runs the Python blocks of the manual's pages: one namespace per page, from top to bottom.

At build it is an mkdocs hook: after every block it puts what the block printed, the value of its last expression and
the figures it left open, as files. In the tests the same functions run, and nothing is written. A block that raises
stops either. A page that takes names away from others runs in a process of its own and shows nothing. The notebooks,
which are stored without outputs, become pages as well. A build says which page it is at.
"""

import ast
import io
import json
import logging
import os
import posixpath
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
LOG = logging.getLogger("mkdocs.hooks.blocks")
DONE: list[str] = []
"""The pages that this build has begun."""
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
APART = {"migration.md"}
"""Pages with a process of their own: this one lets the name `transformer_lens` lead elsewhere for a while."""


@dataclass(frozen=True)
class Shown:
    """What a block shows: its output as markdown, and its figures as (PNG, width in pixels, description)."""

    text: str
    figures: list[tuple[bytes, int, str]]


def fenced(text: str) -> str:
    """Text as a block of output."""
    return f"``` {{.text .output}}\n{text.rstrip()}\n```\n" if text.strip() else ""


def displayed(value: object) -> str:
    """A value as a notebook would show it: tables as tables, plots and None not at all, all else by its repr."""
    if value is None or isinstance(value, Artist):
        return ""
    if isinstance(value, pd.Series):
        value = value.to_frame(value.name or "value")
    if isinstance(value, pd.DataFrame):
        unnamed = value.set_axis(value.columns.set_names([None] * value.columns.nlevels), axis=1)
        table = unnamed.to_html(border=0, justify="inherit", max_rows=20)
        return re.sub(r"\n *", "", table.replace(' class="dataframe"', "")) + "\n"
    return fenced(repr(value))


def drawn(figure: Figure) -> tuple[bytes, int, str]:
    """A figure as PNG at twice its size on the page, with the titles of its parts as description."""
    titles = [ax.get_title() or ax.get_xlabel() for ax in figure.axes if ax.get_label() != "<colorbar>"]
    description = "; ".join(title.replace("\n", ", ") for title in titles if title) or "figure"
    file = io.BytesIO()
    figure.savefig(file, dpi=160, bbox_inches="tight")
    return file.getvalue(), round(80 * figure.get_figwidth()), description


def as_page(notebook: Path) -> str:
    """The cells of a notebook as a page."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = [("".join(cell["source"]), cell["cell_type"]) for cell in cells]
    return (
        "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for text, kind in texts) + "\n"
    )


def run_block(code: str, names: dict[str, object], file: str, line: int) -> Shown:
    """Execute one block that begins on a line of a file, so that a traceback names the page and the line.

    A block of a notebook that ends with a result shows the result's picture, as the notebook does.
    """
    tree = ast.parse("\n" * line + code, file)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    said = io.StringIO()
    with redirect_stdout(said):
        exec(compile(tree, file, "exec"), names)
        value = eval(compile(ast.Expression(last.value), file, "eval"), names) if last else None
    if file.endswith(".ipynb") and hasattr(value, "view") and not plt.get_fignums():
        value = value.view.plot()
    figures = [drawn(plt.figure(number)) for number in plt.get_fignums()]
    plt.close("all")
    return Shown(fenced(said.getvalue()) + ("" if code.rstrip().endswith(";") else displayed(value)), figures)


def run_page(markdown: str, file: Path) -> list[Shown]:
    """What every Python block of a page shows, in order."""
    blocks = [(found[1], markdown[: found.start(1)].count("\n")) for found in BLOCK.finditer(markdown)]
    if file.name in APART:
        script = "\n".join(code for code, _ in blocks)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
        subprocess.run([sys.executable, "-"], input=script, text=True, env=environment, check=True)
        return [Shown("", []) for _ in blocks]
    mpl.use("agg")
    names: dict[str, object] = {"__name__": "__main__"}
    return [run_block(code, names, str(file), line) for code, line in blocks]


def with_output(markdown: str, shown: list[Shown], stem: str) -> tuple[str, dict[str, bytes]]:
    """The page with what its blocks show after each of them, and its pictures by file name, beginning with `stem`."""
    pictures: dict[str, bytes] = {}
    outputs = iter(shown)

    def extended(found: re.Match[str]) -> str:
        block = next(outputs)
        parts = [found[0], "\n\n", block.text]
        for png, width, title in block.figures:
            name = f"{stem}-{len(pictures) + 1}.png"
            pictures[name] = png
            parts.append(f'\n![{title}](figures/{name}){{ width="{width}" .figure }}\n')
        return "".join(parts)

    return BLOCK.sub(extended, markdown), pictures


def told(page: str, markdown: str, done: list[str], pages: int) -> str:
    """The line that a build prints before it runs a page: which, the how many-th of how many, and how many blocks.

    done: the pages before it, to which it is added.
    """
    done.append(page)
    blocks = len(BLOCK.findall(markdown))
    return f"[{len(done)}/{pages}] {page}" + (f": running {blocks} blocks" if blocks else "")


def on_files(files, config):  # noqa: D103
    from mkdocs.structure.files import File

    DONE.clear()
    for notebook in NOTEBOOKS:
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=as_page(notebook)))
    return files


def on_page_markdown(markdown, page, config, files):  # noqa: D103
    from mkdocs.structure.files import File

    of_notebook = ROOT / f"{page.file.src_uri.removesuffix('.md')}.ipynb"
    file = of_notebook if of_notebook in NOTEBOOKS else Path(page.file.abs_src_path)
    LOG.info(told(page.file.src_uri, markdown, DONE, len(files.documentation_pages())))
    markdown = re.sub(r"\]\(\.\./notebooks/(\w+)\.ipynb\)", r"](notebooks/\1.md)", markdown)
    text, pictures = with_output(markdown, run_page(markdown, file), file.stem)
    for name, png in pictures.items():
        place = posixpath.join(posixpath.dirname(page.file.src_uri), "figures", name)
        files.append(File.generated(config, place, content=png))
    return text
