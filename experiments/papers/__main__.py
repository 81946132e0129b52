"""`python -m experiments.papers`: measures claims of published papers, and prints each as soon as it is known."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from experiments.papers import PAPERS, Row, as_result, measured
from interp.cli import ended
from interp.cli.opening import Common
from interp.core.files import check_replaceable, write_atomically
from interp.core.results import frame


@dataclass(frozen=True)
class Reproduce(Common):
    """Measure claims of published papers at toy scale: their numbers, ours with intervals, a verdict for each."""

    papers: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Papers such as olsson-2022; none: all of them, in about eight minutes."""
    effort: float = 1.0
    """Share of rows, seeds and updates that is spent; the claims are about 1, less is for trying."""
    csv: Path | None = None
    """File to write the table to."""
    json: Path | None = None
    """File to write the table to, a list of lines."""

    def run(self) -> None:
        """Measure, print, write; the files are tried before any work."""
        for file in (self.csv, self.json):
            if file is not None:
                check_replaceable(file)
        rows: list[Row] = []
        for row in measured(self.papers or None, effort=self.effort):
            if not rows or rows[-1].paper != row.paper:
                print(f"{row.paper}  {PAPERS[row.paper].citation}", flush=True)
            rows.append(row)
            print("\n".join(lines(row)), flush=True)
        verdicts = Counter(row.claim.verdict for row in rows)
        print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
        table = frame(as_result(rows)).drop(columns="claim")
        if self.csv is not None:
            write_atomically(self.csv, lambda path: table.to_csv(path, index=False))
        if self.json is not None:
            text = json.dumps(json.loads(table.to_json(orient="records")), indent=1, ensure_ascii=False)
            write_atomically(self.json, lambda path: path.write_text(text + "\n", encoding="utf-8"))


def lines(row: Row) -> Iterator[str]:
    """One claim in the terminal: the verdict and the numbers, what is claimed, what was published."""
    claim = row.claim
    ours = "" if claim.ours is None else f": {number(row)}, asked {claim.region}"
    yield f"  {claim.verdict}{ours}"
    yield f"    {claim.text}"
    yield f"    published: {claim.published}{f' ({claim.note})' if claim.note else ''}"


def number(row: Row) -> str:
    """The measured number with its interval, and over what that is."""
    ours = row.claim.ours
    assert ours is not None
    if ours.over == "exact":
        return f"{ours.value:.4g}"
    return f"{ours.value:.4g} [{ours.low:.4g}, {ours.high:.4g}] over {ours.n} {ours.over}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, as `interp.cli.ended`."""
    return ended(tyro.cli(Reproduce, args=argv, prog="python -m experiments.papers"))


if __name__ == "__main__":
    raise SystemExit(main())
