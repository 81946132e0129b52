"""Runs the blocks of `howto/real_model.md` on a model, and puts what they print under them.

Run: `python docs/real_model.py FOLDER`, the folder or file of SmolLM2.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from blocks import run_block

PAGE = Path(__file__).parent / "howto" / "real_model.md"
BLOCK = re.compile(r"^```py\n(.*?)^```$(?:\n\n```text\n.*?^```$)?", re.DOTALL | re.MULTILINE)
"""A block that is not run at build, since it takes a real model, and what stands under it."""


def with_outputs(markdown: str, folder: Path) -> str:
    """The page with what each block prints under it."""
    names: dict[str, object] = {"__name__": "__main__", "FOLDER": folder}

    def extended(found: re.Match[str]) -> str:
        line = markdown[: found.start(1)].count("\n")
        said = run_block(found[1], names, str(PAGE), line).text
        said = re.sub(r"^```.*$", "", said, flags=re.MULTILINE).strip("\n")
        return f"```py\n{found[1]}```" + (f"\n\n```text\n{said}\n```" if said else "")

    return BLOCK.sub(extended, markdown)


if __name__ == "__main__":
    PAGE.write_text(with_outputs(PAGE.read_text(encoding="utf-8"), Path(sys.argv[1])), encoding="utf-8")
