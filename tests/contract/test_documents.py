"""The code in the documents runs from top to bottom, as a reader would type it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GIVEN = 'import interp\nmodel = interp.HookedTransformer.from_pretrained("demo-4l")\ndel interp\n'
"""What docs/migration.md says in words before its first block."""
DOCUMENTS = {"docs/migration.md": GIVEN}


def blocks(name: str) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(
        r"^```python\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_code_blocks_of_a_document_run(name: str, tmp_path: Path) -> None:
    """In a process of their own, since one of them takes the name `transformer_lens` for a while."""
    found = blocks(name)
    assert len(found) > 3
    script = tmp_path / "blocks.py"
    script.write_text(DOCUMENTS[name] + "\n".join(found), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_only_documents_that_show_code_are_listed_and_all_are_complete() -> None:
    """A block in another language, or one that is not closed, would be skipped without a word."""
    for name in DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert len(re.findall(r"^```python$", text, re.MULTILINE)) == len(blocks(name)), name
