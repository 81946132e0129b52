"""The board: every method on every model, means over programs with their intervals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from interp.board.cases import Case, cases
from interp.board.judge import METHODS, SCORES, Method, judged
from interp.core.boundary import Count, public
from interp.core.files import write_atomically
from interp.core.results import labelled
from interp.core.stats import t95

if TYPE_CHECKING:
    import xarray as xr

FEWEST = 8
"""Programs below which a mean has no interval: shares that are mostly 1 need that many."""


@public()
def measured(
    programs: Sequence[str] | None = None,
    *,
    methods: Mapping[str, Method] = METHODS,
    seeds: Count = 3,
    pairs: Count = 16,
    folder: Path | str | None = None,
) -> Iterator[xr.Dataset]:
    """The models of the board one by one, each as soon as all methods were judged on it; `benchmark` has them all.

    folder: where each model's result is kept as a file, to go on from after an interruption: one that is there, with
    the same names of methods and number of pairs, is not measured again. None: nothing is kept.
    Errors: KeyError for a program that the board lacks; ValueError for fewer than 1 seed or 2 pairs, or for a file of
    the folder that is not of this board.

    Example:
        >>> next(interp.board.measured(["two_hop"], pairs=4)).attrs["program"]
        'two_hop'
    """
    every = cases(programs, seeds=seeds, pairs=pairs)
    if folder is None:
        return (judged(case, methods) for case in every)
    Path(folder).mkdir(parents=True, exist_ok=True)
    return (_kept(Path(folder), case, methods, pairs) for case in every)


def _kept(folder: Path, case: Case, methods: Mapping[str, Method], pairs: int) -> xr.Dataset:
    """What the folder has of a model, or what is measured and then kept there."""
    import xarray as xr

    file = folder / f"{case.program.replace(' ', '_')}-{case.seed}-{pairs}.json"
    if file.exists():
        try:
            found = xr.Dataset.from_dict(json.loads(file.read_text(encoding="utf-8")))
            names = found.attribution.values.tolist()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} is no result of this board ({error}); remove it to measure again"
            ) from None
        if names == list(methods) and found.score.values.tolist() == list(SCORES):
            return found
    found = judged(case, methods)
    write_atomically(file, lambda path: path.write_text(json.dumps(found.to_dict()), encoding="utf-8"))
    return found


@public()
def benchmark(
    programs: Sequence[str] | None = None,
    *,
    methods: Mapping[str, Method] = METHODS,
    seeds: Count = 3,
    pairs: Count = 16,
    folder: Path | str | None = None,
) -> xr.Dataset:
    """How well methods of circuit discovery find circuits that are known by construction.

    Returns Dataset: `value` [attribution, score] (`SCORES` says what each is), the mean over programs of the means
    over seeds, with `low` and `high`, its 95 % interval over programs (Student's t, NaN below 8), and `n`, how many;
    `found` [attribution, mode], the share found of the circuits' edges of each kind (`MODES`: plain, or one of four
    that make an edge hard to find), with `found_low`, `found_high`, and `programs` [mode], how many have such edges;
    `each` [case, attribution, score], with `program` and `seed` of each case.
    programs: names out of `interp.board.PROGRAMS`; None: all. methods: name -> function (model, clean, corrupt,
    metric) -> scores of all edges, see `Method`. pairs: how many score the edges; as many others judge. folder: where
    results are kept to go on from, see `measured`.
    Caveats: the models are written, not trained; the interval is over programs as if they had been drawn at random.
    Errors: KeyError for a program that the board lacks; ValueError for fewer than 1 seed or 2 pairs, or for methods
    whose scores are not finite numbers [sender, receiver].

    Example:
        >>> found = interp.board.benchmark(["two_hop", "either"], seeds=1, pairs=4)
        >>> float(found.value.sel(attribution="exact", score="auroc")) > 0.9
        True
    """
    return as_result(list(measured(programs, methods=methods, seeds=seeds, pairs=pairs, folder=folder)))


@public()
def as_result(found: Sequence[xr.Dataset]) -> xr.Dataset:
    """Models judged one by one as the labelled result that `benchmark` describes. ValueError for none.

    Example:
        >>> some = list(interp.board.measured(["two_hop"], seeds=1, pairs=4))
        >>> interp.board.as_result(some).sizes["case"]
        1
    """
    if not found:
        raise ValueError("at least one judged model is required, got none")
    names = [each.attrs["program"] for each in found]
    values = np.stack([each.value.values for each in found])
    shares = np.stack([each.found.values for each in found])
    value, low, high, n = _over_programs(values, names)
    share, share_low, share_high, programs = _over_programs(shares, names)
    first, scored, kinds = found[0], ("attribution", "score"), ("attribution", "mode")
    return labelled(
        "benchmark",
        {
            "value": (scored, value), "low": (scored, low), "high": (scored, high), "n": (scored, n.long()),
            "found": (kinds, share), "found_low": (kinds, share_low), "found_high": (kinds, share_high),
            "programs": (("mode",), programs[0].long()),
            "each": (("case", *scored), torch.from_numpy(values)),
        },
        coords={
            **{dim: first[dim].values for dim in ("attribution", "score", "mode")},
            "program": (("case",), names),
            "seed": (("case",), [int(each.attrs["seed"]) for each in found]),
        },
        attrs={"interval": f"95 % over programs, from {FEWEST} on", **{f"score {k}": v for k, v in SCORES.items()}},
    )  # fmt: skip


def _over_programs(
    values: np.ndarray, names: Sequence[str]
) -> tuple[Float[Tensor, "*s"], Float[Tensor, "*s"], Float[Tensor, "*s"], Float[Tensor, "*s"]]:
    """Mean over programs of the means over seeds that are numbers, the ends of its interval, and how many programs."""
    every = torch.from_numpy(values)
    rows = torch.stack(
        [every[[other == name for other in names]].nanmean(0) for name in dict.fromkeys(names)]
    )
    n = (~rows.isnan()).sum(0).double()
    mean = rows.nanmean(0)
    spread = ((rows - mean).square().nansum(0) / (n - 1).clamp_min(1)).sqrt()
    half = t95(n, FEWEST) * spread / n.sqrt()
    return mean, mean - half, mean + half, n
