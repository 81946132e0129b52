"""What is built of the package: what is in it, and that type checkers find it where it is installed editably."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import interp

ROOT = Path(__file__).parents[2]
BESIDE = (
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
    "requirements-lean.txt",
)
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # which setuptools changes
for build in (build_meta.build_editable, build_meta.build_wheel, build_meta.build_sdist):
    build(f"{out}/{build.__name__}")
"""
USES = """
import interp

model = interp.HookedTransformer.from_pretrained("demo-4l")
interp.heads(model, random=8)
reveal_type(model)
interp.heads(model, randm=8)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package's files in `clone`, and what setuptools builds of it, in a folder for each kind."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(
        ROOT / "interp", folder / "clone" / "interp", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(ROOT / "tests" / "contract", folder / "clone" / "tests" / "contract")
    for name in BESIDE:
        shutil.copy(ROOT / name, folder / "clone")
    for name in ("build_editable", "build_wheel", "build_sdist"):
        (folder / name).mkdir()
    command = [sys.executable, "-c", BUILD, str(folder)]
    subprocess.run(command, cwd=folder / "clone", check=True, capture_output=True)
    return folder


def files_of_package() -> set[str]:
    return {
        str(each.relative_to(ROOT))
        for each in (ROOT / "interp").rglob("*")
        if each.is_file() and "__pycache__" not in each.parts
    }


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = (built / "build_wheel").iterdir()
    assert wheel.name == f"interp-{interp.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == files_of_package()
    assert {"interp/py.typed", "interp/findings/paragraphs.txt"} <= names


@pytest.mark.slow
def test_the_source_distribution_has_what_builds_the_package_and_no_tests(built: Path) -> None:
    (source,) = (built / "build_sdist").iterdir()
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert files_of_package() | {*BESIDE} <= names
    assert {name.partition("/")[0] for name in names} == {
        "", "interp", "interp.egg-info", "PKG-INFO", "setup.cfg", *BESIDE,
    }  # fmt: skip


@pytest.mark.slow
def test_mypy_finds_what_is_installed_editably(built: Path, tmp_path: Path) -> None:
    """And refuses a parameter that there is not."""
    (wheel,) = (built / "build_editable").iterdir()
    venv.create(tmp_path / "env")
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    assert [each.read_text().strip() for each in packages.glob("*.pth")] == [str(built / "clone")]
    file = tmp_path / "uses.py"
    file.write_text(USES)
    python = ["--python-executable", str(tmp_path / "env" / "bin" / "python")]
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        *python,
        "--cache-dir",
        str(tmp_path / "cache"),
        str(file),
    ]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert 'Revealed type is "interp.hooked.HookedTransformer"' in said
    assert said.count("error:") == 1 and 'uses.py:7: error: Unexpected keyword argument "randm"' in said


def test_extras_of_the_developers_hold_what_the_package_asks_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert {*extras["gguf"], *extras["ode"], *extras["peft"], *extras["serve"]} <= {*extras["dev"]}
