"""Every speed claim and what every question costs, in two tables: runs the scripts and writes them into README.md.

`make bench` takes one round of each, GPT-2 narrower than it is (`measure.NARROW`; a quarter of an hour):
counts are exact, a ratio is that of one round. `--whole` takes the full shape and as many rounds as the scripts think
right, for hours. Lines are kept in a file (`--lines`); `--only forward heads` runs some scripts and takes the others'
lines from there.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tyro

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
README = HERE / "README.md"
BEGIN, END = "<!-- written by table.py: begin -->", "<!-- end -->"
Line = Mapping[str, object]
ONE = ("--repeats", "1")
QUICK: dict[str, tuple[str, ...]] = {
    "forward": (*ONE, "--rows", "2"),
    "cache": ONE,
    "heads": (*ONE, "--taxonomy-repeats", "0"),
    "generate": (*ONE, "--few"),
    "load": (*ONE, "--layers", "2"),
    "composition": ONE,
    "copying": ONE,
    "backward_lens": (*ONE, "--batch-repeats", "1"),
    "attribution": (*ONE, "--rows", "4"),
    "attribution_patching": ONE,
    "lens": ONE,
    "jacobian_lens": ONE,
    "patching": (*ONE, "--few"),
    "circuit_passes": ONE,
    "stream": ("--claims", "taxonomy", "five", "text", "--rounds", "1"),
    "causal_stream": ("--pairs", "100"),
    "sparse_attention": (*ONE, "--lengths", "8192"),
    "linear_attention": ONE,
    "heir": (*ONE, "--no-lens"),
    "wrapped": ONE,
    "training": ("--rounds", "1", "--steps", "16"),
    "sae": (*ONE, "--steps", "8"),
    "serve": ("--rounds", "3"),
    "imports": ONE,
    "questions": ONE,
}
"""What each script is told where little time is to be spent."""
SHOWN = (
    "bench",
    "system",
    "what",
    "claim",
    "ratio",
    "ratio_of_rounds",
    "operators",
    "gflop",
    "allocated_mib",
)
"""Fields with a column of their own."""
LEFT_OUT = {
    *SHOWN, "median_s", "reference_s", "rounds", "resident_mib", "kept_mib", "threads", "torch", "python",
    "cpu",
}  # fmt: skip
COSTS = (
    "ratio", "operators", "operators_of_forward", "gflop", "gflop_of_forward", "peak_kib", "kernels", "waits", "sent",
)  # fmt: skip


def main(whole: bool = False, only: tuple[str, ...] = (), lines: Path = ROOT / "out" / "bench.json") -> None:
    """Run the scripts and write the tables.

    Args:
        whole: as many rounds as each script takes by itself.
        only: these scripts alone; none = all.
        lines: where the lines of all scripts are kept, by script.
    """
    kept: dict[str, list[Line]] = json.loads(lines.read_text(encoding="utf-8")) if lines.exists() else {}
    if unknown := set(only) - set(QUICK):
        raise ValueError(f"no scripts {sorted(unknown)}; there are {', '.join(QUICK)}")
    lines.parent.mkdir(exist_ok=True)
    for script in only or QUICK:
        kept[script] = _ran(script, () if whole else QUICK[script])
        lines.write_text(json.dumps(kept), encoding="utf-8")
    write(tables([line for script in QUICK for line in kept.get(script, ())]), BEGIN)


def write(text: str, begin: str) -> None:
    """Put a text into README.md between a mark of its own and the next end."""
    before, mark, rest = README.read_text(encoding="utf-8").partition(begin)
    if not mark:
        raise ValueError(f"{README} has no line {begin}")
    README.write_text(f"{before}{begin}\n\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _ran(script: str, arguments: Sequence[str]) -> list[Line]:
    """The lines of one script; they are printed as they come."""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, HERE / f"{script}.py", *arguments], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"}
        | ({"BENCH_NARROW": "1"} if arguments else {}),
    )  # fmt: skip
    sys.stdout.write(done.stdout)
    sys.stderr.write(f"{script}: {time.monotonic() - begun:.0f} s\n")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def tables(lines: Iterable[Line]) -> str:
    """Both tables in Markdown, and the machine they were measured on."""
    lines = list(lines)
    claims = [line for line in lines if line["bench"] != "questions"]
    costs = [line for line in lines if line["bench"] == "questions"]
    first = lines[0]
    parts = [
        f"Measured on {first['cpu']}, torch {first['torch']}, Python {first['python']}, {first['threads']} thread.",
        "",
        *markdown(
            ("script", "system", "what", "asked", "ratio", "rounds", "operators", "GFLOP", "MiB allocated", "more"),
            (_claim(line) for line in claims),
        ),
        "",
        "## What every question costs",
        "",
        "On the models and rows of the contract tests (2 or 3 layers of width 24, 5 rows); `forwards` is the CPU time",
        "of the question over that of one plain forward of its rows.",
        "",
        *markdown(
            ("question", "forwards", "operators", "of a forward", "MFLOP", "of a forward", "KiB at most", "kernels",
             "waits", "sent"),
            ((str(line["system"]), *(_cost(line, name) for name in COSTS)) for line in costs),
        ),
        "",
    ]  # fmt: skip
    return "\n".join(parts)


def _claim(line: Line) -> list[str]:
    """The cells of a claim; what has no column of its own stands in the last."""
    rest = {name: value for name, value in line.items() if name not in LEFT_OUT and value is not None}
    shown = [_said(line.get(name)) for name in SHOWN]
    if line.get("rounds") == 1:
        shown[SHOWN.index("ratio_of_rounds")] = ""
    return [f"`{shown[0]}`", *shown[1:], "; ".join(f"{name} {_said(value)}" for name, value in rest.items())]


def _cost(line: Line, name: str) -> str:
    value = line[name]
    assert isinstance(value, int | float)
    return f"{1000 * value:.3g}" if name.startswith("gflop") else str(value)


def _said(value: object) -> str:
    """A number, some numbers or words as a cell."""
    match value:
        case None:
            return ""
        case float():
            return f"{value:.3g}"
        case list() | tuple():
            return ", ".join(_said(each) for each in value)
        case dict():
            return ", ".join(f"{name} {_said(each)}" for name, each in value.items())
        case _:
            return str(value).replace("|", "/").replace("\n", " ")


if __name__ == "__main__":
    tyro.cli(main)
