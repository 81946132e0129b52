"""The manual: its code runs from top to bottom as a reader would type it, and every public name is in it."""

import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import matplotlib.pyplot as plt
import pytest

import interp
from tests.loops import over
from tests.scales import uneven

DOCS = Path(__file__).parents[2] / "docs"
TEXTS = {str(p.relative_to(DOCS)): p.read_text(encoding="utf-8") for p in sorted(DOCS.rglob("*.md"))}
ANALYSES = [name for name in TEXTS if name.startswith("analyses/")]
REFERENCE = "\n".join(text for name, text in TEXTS.items() if name.startswith("api/"))
PROSE = "\n".join(text for name, text in TEXTS.items() if not name.startswith("api/"))
ON_A_REAL_MODEL = "howto/real_model.md"
"""Its blocks run in `tests/real/test_chapter.py`."""
LAST = "What this number does not tell you"


def hook() -> ModuleType:
    """The file with which mkdocs runs the pages; it is in no package."""
    spec = importlib.util.spec_from_file_location("manual_blocks", DOCS / "blocks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


BLOCKS = hook()
EXECUTED = [name for name, text in TEXTS.items() if BLOCKS.BLOCK.search(text)]


@pytest.fixture(autouse=True)
def _no_figures_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    plt.close("all")


@pytest.mark.books
@pytest.mark.parametrize("name", EXECUTED)
def test_the_code_blocks_of_a_page_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And their maps of one quantity that stand in one figure have one colour scale."""
    found: list[str] = []
    drawn = BLOCKS.drawn
    monkeypatch.setattr(BLOCKS, "drawn", lambda figure: found.extend(uneven(figure)) or drawn(figure))
    shown = BLOCKS.run_page(TEXTS[name], DOCS / name)
    assert found == []
    assert len(shown) == len(BLOCKS.BLOCK.findall(TEXTS[name]))
    if name in ANALYSES:
        assert any(block.figures for block in shown), "a page on an analysis shows a picture"


@pytest.mark.books
def test_the_first_lines_of_the_readme_print_what_it_says() -> None:
    readme = DOCS.parent / "README.md"
    text = readme.read_text(encoding="utf-8")
    code, said = re.findall(
        r"^```python\n((?:(?!```).*\n)*)```\n\n```text\n((?:(?!```).*\n)*)```$", text, re.MULTILINE
    )[0]
    (shown,) = BLOCKS.run_page(f"```python\n{code}```\n", readme)
    assert shown.text == BLOCKS.fenced(said)


def test_lean_requirements_are_the_packages_without_transformer_lens() -> None:
    root = DOCS.parent
    every = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    lean = (root / "requirements-lean.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lean if not line.startswith("#")] == [
        each for each in every if not each.startswith("transformer-lens")
    ]


def test_every_link_of_the_readme_leads_to_a_file() -> None:
    root = DOCS.parent
    found = re.findall(r"\]\(([^)#]+)\)", (root / "README.md").read_text(encoding="utf-8"))
    assert len(found) > 20 and not [
        link for link in found if "://" not in link and not (root / link).exists()
    ]


def test_no_table_is_broken_in_two_by_an_empty_line() -> None:
    pages = {**TEXTS, "README.md": (DOCS.parent / "README.md").read_text(encoding="utf-8")}
    broken = re.compile(r"^\|.*\|\n\n(\|.*\|)\n(?!\| *:?-)", re.MULTILINE)
    assert {name: found[1] for name, text in pages.items() if (found := broken.search(text))} == {}


def test_every_target_of_make_in_the_readme_is_one_of_the_makefile() -> None:
    readme, targets = ((DOCS.parent / name).read_text(encoding="utf-8") for name in ("README.md", "Makefile"))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", readme, re.MULTILINE))
    assert len(named) > 10 and named <= set(re.findall(r"^([a-z-]+):", targets, re.MULTILINE))


def test_no_block_of_python_is_skipped() -> None:
    """One that is indented, not closed, or called by another name would not run."""
    for name, text in TEXTS.items():
        if name == ON_A_REAL_MODEL:
            assert {*re.findall(r"^\s*```(\S+)$", text, re.MULTILINE)} == {"py", "text"}
            continue
        fences = re.findall(r"^\s*(?:```|~~~)\s*\{?\.?(?:python|py|python3|pycon)\b", text, re.MULTILINE)
        assert len(fences) == len(BLOCKS.BLOCK.findall(text)), name


def test_a_block_that_raises_stops_the_page_and_is_named(tmp_path: Path) -> None:
    page = "A page.\n\n```python\nx = 1\n```\n\n```python\nx / 0\n```\n"
    with pytest.raises(ZeroDivisionError) as caught:
        BLOCKS.run_page(page, tmp_path / "page.md")
    assert (Path(caught.traceback[-1].path).name, caught.traceback[-1].lineno + 1) == ("page.md", 8)


def test_a_block_that_raises_stops_a_page_of_its_own_process(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="exit status 1"):
        BLOCKS.run_page("```python\n1 / 0\n```\n", tmp_path / "migration.md")


def test_a_build_says_at_which_page_of_how_many_it_is() -> None:
    done: list[str] = []
    page = "```python\n1\n```\n\n```python\n2\n```\n"
    assert BLOCKS.told("tour.md", page, done, 3) == "[1/3] tour.md: running 2 blocks"
    assert BLOCKS.told("api/index.md", "no code", done, 3) == "[2/3] api/index.md"


def test_output_stands_behind_its_block() -> None:
    page = (
        "```python\nprint('<b>')\n```\n\nText.\n\n```python\nimport matplotlib.pyplot as plt\n"
        "plt.plot([1, 2])\nplt.title('a line')\n```\n\n```python\n1 + 1;\n```\n"
    )
    text, pictures = BLOCKS.with_output(page, BLOCKS.run_page(page, Path("page.md")), "page")
    assert (
        text.index("{.text .output}\n<b>\n")
        < text.index("Text.")
        < text.index("![a line](figures/page-1.png)")
    )
    assert list(pictures) == ["page-1.png"] and pictures["page-1.png"].startswith(b"\x89PNG")
    assert text.endswith("1 + 1;\n```\n\n\n")


@over("name", ANALYSES)
def test_page_on_an_analysis_says_its_answer_source_cost_and_limits(
    name: str,
) -> None:
    text = TEXTS[name]
    assert all(f"**{word}.**" in text for word in ("Question", "Source", "Cost"))
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[-2:] == ["See also", LAST]


@over("name", ANALYSES)
def test_page_on_an_analysis_begins_with_what_its_reader_has_and_wants(name: str) -> None:
    opening = TEXTS[name].split("\n\n")[1]
    assert opening.startswith("You have ") and " want " in opening.replace("\n", " ")


@over("name", ANALYSES)
def test_page_on_an_analysis_names_two_to_four_neighbours(name: str) -> None:
    """Each a page that is there, with some words on when to go there."""
    neighbours = re.findall(
        r"^- \[[^\]]+\]\((\w+\.md)\) (.*)", TEXTS[name].split("\n## See also\n")[1], re.MULTILINE
    )
    assert 2 <= len(neighbours) <= 4 and len({page for page, _ in neighbours}) == len(neighbours)
    assert all((DOCS / "analyses" / page).exists() and len(when) > 40 for page, when in neighbours)


REFERRED = (
    *("attention", "causal", "circuits", "dynamics", "editing", "features", "lenses", "residual", "tokens"),
    *("weights", "edits", "metrics", "data", "model", "lab", "lab.depth", "lab.rasp", "lab.training"),
    *("passes", "runs", "core"),
)
"""The wings whose names, constants apart, all have their place in the reference."""


def test_every_public_name_is_in_the_reference() -> None:
    listed = re.findall(r"^::: interp\.([\w.]+)$", REFERENCE, re.MULTILINE)
    assert sorted(listed) == sorted(set(listed))
    found = {id(attrgetter(name)(interp)): name for name in listed}
    assert len(found) == len(listed), "one name for one thing"
    required = {name: getattr(interp, name) for name in interp.HOMES} | {
        f"{wing}.{name}": value
        for wing in REFERRED
        for name, value in ((n, attrgetter(f"{wing}.{n}")(interp)) for n in attrgetter(wing)(interp).__all__)
        if not name.isupper()
        and name != "AnyConfig"
        and not isinstance(value, ModuleType)  # a union of kinds
    }
    left = [f"::: interp.{name}" for name, value in sorted(required.items()) if id(value) not in found]
    assert not left, (
        "a page of docs/api lacks these lines (docs/api/questions.md has the records of questions, the page of its "
        f"subject all else): {', '.join(left)}"
    )


def of_subjects() -> dict[str, object]:
    """The functions of the top of the package and of the packages of subjects."""
    names = [f"{wing}.{name}" for wing in REFERRED[:10] for name in attrgetter(wing)(interp).__all__]
    return {
        name: attrgetter(name)(interp)
        for name in [*interp.HOMES, *names]
        if name.rpartition(".")[2].islower()
    }


def test_every_function_of_a_subject_is_in_the_table_of_the_reference() -> None:
    linked = re.findall(r"\]\[interp\.([\w.]+)\]", TEXTS["api/index.md"])
    found = {id(attrgetter(name)(interp)) for name in linked}
    left = [name for name, value in of_subjects().items() if id(value) not in found]
    assert not left, (
        "docs/api/index.md lacks links, written [`NAME`][interp.WHERE.NAME], in the row of their subject: "
        f"{', '.join(left)}"
    )


def test_every_public_name_is_on_a_page_outside_the_reference() -> None:
    """In its code or named as `name`: a reader meets it in use."""

    def met(name: str) -> bool:
        return (
            re.search(
                rf"\b{name}\(|interp\.([a-z]+\.)*{name}\b|`([a-z]+\.)*{name}\b|import .*\b{name}\b", PROSE
            )
            is not None
        )

    asked = {name for wing in REFERRED[:10] for name in getattr(interp, wing).__all__ if name.islower()}
    left = sorted(name for name in {*interp.HOMES, *asked} if not met(name))
    assert not left, (
        "no page outside docs/api calls these or names them in backticks (a line of docs/howto/by_example.md does, "
        f"or the page on their subject): {', '.join(left)}"
    )


def test_pages_of_the_manual_are_linked_from_its_contents() -> None:
    contents = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    left = [name for name in TEXTS if name not in contents]
    assert not left, f"the contents in mkdocs.yml lack a line of {', '.join(left)}"
