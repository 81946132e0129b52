"""What is claimed of an accelerator can be measured: the script runs on the host, and its two ways agree there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.books
def test_the_script_for_an_accelerator_runs_on_the_host() -> None:
    command = [
        sys.executable, "experiments/bench/accelerator.py", "--few", "--rounds", "1", "--dtypes", "float32",
        "--claims", "forward", "edges", "training",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"BENCH_NARROW": "1"}, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["what"].partition(":")[0], line["system"]) for line in lines] == [
        ("forward", "hf"), ("forward", "interp"), ("edges", "plain passes"), ("edges", "interp"),
        ("training", "bare loop"), ("training", "interp"),
    ]  # fmt: skip
    assert all(line["ratio"] > 0 and line["hardware"] == "host" for line in lines)
