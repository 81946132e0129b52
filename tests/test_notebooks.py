"""The notebooks run from top to bottom, use public names only, and are stored without outputs."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

import interp
from tests.loops import over

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="the kernel package ipykernel is not installed")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
PUBLIC = {
    "interp", *(f"interp.{wing}" for wing in interp.ROOMS),
    "interp.zoo.planted",
    # reductions that questions of one's own are made of
    "interp.core.extremes.TopRows", "interp.core.sketches.quantiles", "interp.core.stats.Bootstrap",
    "interp.core.stats.Means", "interp.core.stats.Rows",
}  # fmt: skip
"""What a notebook may import of the package."""
NAMES = {f"interp.{wing}.{name}" for wing in interp.ROOMS for name in import_module(f"interp.{wing}").__all__}
"""What the wings hold."""


def cells(name: str, kind: str) -> list[str]:
    return [cell.source for cell in nbformat.read(NOTEBOOKS[name], 4).cells if cell.cell_type == kind]


@pytest.mark.books
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_from_top_to_bottom(name: str) -> None:
    """And its maps of one quantity that stand in one figure have one colour scale."""
    notebook = nbformat.read(NOTEBOOKS[name], 4)
    first = f"import sys; sys.path.append({str(ROOT)!r}); from tests import scales; scales.watch()"
    watching, told = (nbformat.v4.new_code_cell(code) for code in (first, "print(scales.FOUND)"))
    notebook.cells = [watching, *notebook.cells, told]
    place = {"metadata": {"path": str(ROOT / "notebooks")}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    assert "".join(piece.text for piece in told.outputs) == "[]\n"  # what is printed may arrive in pieces


@over("name", NOTEBOOKS)
def test_a_notebook_is_stored_without_outputs(name: str) -> None:
    for cell in nbformat.read(NOTEBOOKS[name], 4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@over("name", NOTEBOOKS)
def test_a_notebook_asks_first_and_answers_last(name: str) -> None:
    texts = cells(name, "markdown")
    assert "**Question.**" in texts[0]
    assert "**Answer.**" in texts[-1]


@over("name", NOTEBOOKS)
def test_a_notebook_uses_public_names_and_defines_no_long_function(name: str) -> None:
    for source in cells(name, "code"):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                modules = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules = {f"{node.module}.{alias.name}" for alias in node.names} - NAMES
            else:
                modules = set()
            assert {module for module in modules if module.startswith("interp")} <= PUBLIC
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or node.lineno) - node.lineno < 10
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_"), f"{node.attr} is private"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_a_page_of_the_manual_with_a_picture_in_the_gallery(name: str) -> None:
    title = cells(name, "markdown")[0].splitlines()[0].removeprefix("# ")
    assert f'"{title}": notebooks/{name}.md' in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    gallery = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert f"[{title}](../notebooks/{name}.ipynb)" in gallery
    assert f"(pictures/notebooks/{name}.png)" in gallery
    assert (ROOT / "docs" / "pictures" / "notebooks" / f"{name}.png").stat().st_size < 100_000
