"""Tries the lower bounds of pyproject.toml together: the oldest version of every dependency, in a fresh environment.

Resolved by `uv` with its `lowest-direct` rule, installed into a temporary folder that is deleted, and tried on some
tests. PyTorch stays the build that is installed here: older ones come with gigabytes of CUDA packages.

    python experiments/bench/lower_bounds.py tests/model tests/families     # exit code 0 if they pass
    python experiments/bench/lower_bounds.py --resolve                      # only whether they go together
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/core",
    "tests/model",
    "tests/families/test_state.py",
    "tests/families/test_hub_configs.py",
    "tests/families/test_gguf.py",
    "tests/families/test_sources.py",
    "tests/compat/test_bridge.py",
    "tests/compat/test_hooked_state.py",
    "tests/test_hooked.py",
    "tests/plot/test_cards.py",
)


def required() -> list[str]:
    """What the package and its tests require, as pyproject.toml says it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["dev"]]


def pinned(folder: Path) -> Path:
    """The file of the lowest versions that go together; CalledProcessError if there are none."""
    asked, chosen, found = folder / "asked.txt", folder / "torch.txt", folder / "pinned.txt"
    asked.write_text("\n".join(required()))
    chosen.write_text(f"torch=={torch.__version__}")
    rule = ["--resolution", "lowest-direct", "--override", str(chosen), "--python", sys.executable]
    uv(folder, "pip", "compile", *rule, *links(), "--quiet", str(asked), "--output-file", str(found))
    return found


def links() -> list[str]:
    """Where the build of PyTorch is found that is installed here: pip's own place for wheels, or PyTorch's."""
    local = torch.__version__.partition("+")[2]
    place = os.environ.get("PIP_FIND_LINKS", f"https://download.pytorch.org/whl/{local}/torch/")
    return ["--find-links", place] if local else []


def uv(folder: Path, *arguments: str) -> None:
    """Run uv, which is installed into the folder first; CalledProcessError if it fails."""
    tool = folder / "tool" / "bin" / "uv"
    if not tool.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / "tool")], check=True)
        subprocess.run([str(tool.parent / "pip"), "install", "--quiet", "uv"], check=True)
    subprocess.run([str(tool), *arguments], check=True)


def main() -> int:
    """Resolve, install, test; the exit code of the tests."""
    asked = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        versions = pinned(folder)
        print(versions.read_text(encoding="utf-8"))
        if asked == ["--resolve"]:
            return 0
        python = folder / "env" / "bin" / "python"
        uv(folder, "venv", "--quiet", "--python", sys.executable, str(folder / "env"))
        uv(
            folder,
            "pip",
            "install",
            "--quiet",
            "--python",
            str(python),
            "-r",
            str(versions),
            *links(),
            "--no-deps",
        )
        tests = [*(asked or TESTS), "-q", "-n", "1"]
        return subprocess.run([str(python), "-m", "pytest", *tests], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
