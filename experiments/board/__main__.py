"""`python -m experiments.board`: judges methods of circuit discovery on models with known circuits."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd
import tyro
import xarray as xr

from experiments.board import METHODS, as_result, measured
from experiments.board.page import LESS, board_page
from interp.cli import ended
from interp.cli.opening import Common
from interp.core.files import check_replaceable, write_atomically
from interp.core.wording import nearest


@dataclass(frozen=True)
class Benchmark(Common):
    """Judge methods of circuit discovery on models whose circuits are known by construction: a table of scores."""

    programs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Programs such as two_hop; none: all of them, in about ten minutes."""
    methods: tuple[str, ...] = ()
    """Which methods; none: all of them."""
    seeds: int = 3
    """Models of every program."""
    pairs: int = 16
    """Pairs of prompts that score the edges; as many others judge."""
    folder: Path | None = None
    """Where results are kept model by model, to go on from after an interruption."""
    csv: Path | None = None
    """File to write every score of every model to."""
    html: Path | None = None
    """File to write the board's page to."""

    def run(self) -> None:
        """Measure and print model by model, then the two tables; the file is tried before any work."""
        for file in (self.csv, self.html):
            if file is not None:
                check_replaceable(file)
        for name in self.methods:
            if name not in METHODS:
                raise KeyError(
                    f"unknown method {name!r}; {nearest(name, METHODS)}; there are {', '.join(METHODS)}"
                )
        chosen = {name: METHODS[name] for name in self.methods or METHODS}
        found = []
        for each in measured(
            self.programs or None, methods=chosen, seeds=self.seeds, pairs=self.pairs, folder=self.folder
        ):
            scores = each.value.sel(score="auroc").to_series()
            told = ", ".join(f"{name} {value:.2f}" for name, value in scores.items())
            print(f"{each.attrs['program']}, seed {each.attrs['seed']}: AUROC {told}", flush=True)
            found.append(each)
        result = as_result(found)
        print("\n".join(tables(result)))
        if self.csv is not None:
            table = result["each"].rename("value").to_dataframe().reset_index()
            write_atomically(self.csv, lambda path: table.to_csv(path, index=False))
        if self.html is not None:
            text = board_page(result)
            write_atomically(self.html, lambda path: Path(path).write_text(text, encoding="utf-8"))
            print(self.html)


def tables(result: xr.Dataset) -> list[str]:
    """Both tables as lines: what each method scores, and which edges it finds."""
    order = result.value.sel(score="auroc").to_series().sort_values(ascending=False).index
    scores = {
        f"{score}{' (less is better)' if score in LESS else ''}": [
            _told(
                *(result[end].sel(attribution=name, score=score).item() for end in ("value", "low", "high"))
            )
            for name in order
        ]
        for score in result.score.values.tolist()
    }
    kinds = {
        f"{mode} ({result.programs.sel(mode=mode).item()} programs)": [
            _told(result.found.sel(attribution=name, mode=mode).item()) for name in order
        ]
        for mode in result.mode.values.tolist()
    }
    programs = len(set(result.program.values.tolist()))
    return [
        "",
        f"Means over {programs} programs; {result.attrs['interval']}:",
        pd.DataFrame(scores, index=list(order)).T.to_string(),
        "",
        "Share of the circuits' edges found, by what makes them hard to find:",
        pd.DataFrame(kinds, index=list(order)).T.to_string(),
    ]


def _told(value: float, low: float = float("nan"), high: float = float("nan")) -> str:
    """A number with its interval, where there is one."""
    if value != value:
        return "-"
    return f"{value:.2f}" + ("" if low != low else f" [{low:.2f}, {high:.2f}]")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, as `interp.cli.ended`."""
    return ended(tyro.cli(Benchmark, args=argv, prog="python -m experiments.board"))


if __name__ == "__main__":
    raise SystemExit(main())
