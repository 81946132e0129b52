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

from experiments.board.cases import Case, cases
from experiments.board.judge import METHODS, MODES, SCORES, Method, judged, judgement
from interp.core.files import json_object, made_folder, write_atomically
from interp.core.results import labelled
from interp.core.stats import t95

if TYPE_CHECKING:
    import xarray as xr
KEPT = ("value", "found", "edges")
"""What a file of a folder holds of a model, beside what was asked."""
NO_INTERVAL = ("accuracy", "passes", "seconds")
"""Scores without an interval: accuracy's would hold .82 of the time with three seeds, costs are no estimates."""


def measured(
    programs: Sequence[str] | None = None,
    *,
    methods: Mapping[str, Method] = METHODS,
    seeds: int = 3,
    pairs: int = 16,
    folder: Path | str | None = None,
) -> Iterator[xr.Dataset]:
    """The models of the board one by one, each as soon as all methods were judged on it; `benchmark` has them all.

    folder: where each model's result is kept as a file, to go on from after an interruption: one that is there, with
    the same names of methods and number of pairs, is not measured again. None: nothing is kept.
    Errors: KeyError for a program that the board lacks; ValueError for fewer than 1 seed or 2 pairs, or far too many,
    or for a file of the folder that is not of this board.

    Example:
        >>> next(experiments.board.measured(["two_hop"], pairs=4)).attrs["program"]
        'two_hop'
    """
    every = cases(programs, seeds=seeds, pairs=pairs)
    if folder is None:
        return (judged(case, methods) for case in every)
    place = made_folder(folder)
    return (_kept(place, case, methods, pairs) for case in every)


def _kept(folder: Path, case: Case, methods: Mapping[str, Method], pairs: int) -> xr.Dataset:
    """What the folder has of a model, or what is measured and then kept there."""
    file = folder / f"{case.program.replace(' ', '_')}-{case.seed}-{pairs}.json"
    asked = {"methods": list(methods), "scores": list(SCORES), "modes": list(MODES)}
    if file.exists():
        held = json_object(file)
        if {name: held.get(name) for name in asked} == asked:
            try:
                return judgement(case.program, case.seed, list(methods), *(held[name] for name in KEPT))  # type: ignore[arg-type]
            except (ValueError, KeyError, TypeError, OverflowError, RuntimeError) as cause:
                raise ValueError(
                    f"{file} is no result of this board ({cause}); remove it to measure again"
                ) from cause
    found = judged(case, methods)
    text = json.dumps(asked | {name: found[name].values.tolist() for name in KEPT}, indent=1)
    write_atomically(file, lambda path: path.write_text(text, encoding="utf-8"))
    return found


def benchmark(
    programs: Sequence[str] | None = None,
    *,
    methods: Mapping[str, Method] = METHODS,
    seeds: int = 3,
    pairs: int = 16,
    folder: Path | str | None = None,
) -> xr.Dataset:
    """How well methods of circuit discovery find circuits that are known by construction.

    Returns Dataset: `value` [attribution, score] (`SCORES` says what each is), the mean over programs of the means
    over seeds, with `low` and `high`, its 95 % interval over seeds (Student's t, the programs being these; NaN for
    accuracy and costs, and where a program has one seed); `found` [attribution, mode], the mean over programs of the
    share found of the circuits' edges of each kind (`MODES`: plain, or one of four that make an edge hard to find),
    and `programs` [mode], how many have such edges; `each` [case, attribution, score], with `program` and `seed` of
    each case.
    programs: names out of `experiments.board.PROGRAMS` or `TRAINED`; None: all of `PROGRAMS`. methods: name -> function
    (model, clean, corrupt, metric) -> scores of all edges, see `Method`. pairs: how many score the edges; as many
    others judge. folder: where results are kept to go on from, see `measured`.
    Caveats: the models are written, not trained (but for `TRAINED`). The interval knows the chance of basis, random
    heads and pairs, not
    that of other programs: scores of single programs are mostly 1 or far below (`each`), and what is best on average
    need not be best on one of them. `seconds` depend on the machine and on what else it does.
    Errors: KeyError for a program that the board lacks; ValueError for fewer than 1 seed or 2 pairs, or far too many,
    or for methods whose scores are not finite numbers [sender, receiver].

    Example:
        >>> found = experiments.board.benchmark(["two_hop", "either"], seeds=1, pairs=4)
        >>> float(found.value.sel(attribution="exact", score="auroc")) > 0.9
        True
    """
    return as_result(list(measured(programs, methods=methods, seeds=seeds, pairs=pairs, folder=folder)))


def as_result(found: Sequence[xr.Dataset]) -> xr.Dataset:
    """Models judged one by one as the labelled result that `benchmark` describes. ValueError for none.

    Example:
        >>> some = list(experiments.board.measured(["two_hop"], seeds=1, pairs=4))
        >>> experiments.board.as_result(some).sizes["case"]
        1
    """
    if not found:
        raise ValueError("at least one of found is required, got none")
    names = [each.attrs["program"] for each in found]
    values = np.stack([each.value.values for each in found])
    shares = np.stack([each.found.values for each in found])
    value, low, high = _over_seeds(_by_program(values, names))
    share = torch.stack([rows.nanmean(0) for rows in _by_program(shares, names)])
    untold = torch.tensor([name in NO_INTERVAL for name in found[0].score.values.tolist()])
    low, high = low.masked_fill(untold, torch.nan), high.masked_fill(untold, torch.nan)
    first, scored, kinds = found[0], ("attribution", "score"), ("attribution", "mode")
    return labelled(
        "benchmark",
        {
            "value": (scored, value), "low": (scored, low), "high": (scored, high), "found": (kinds, share.nanmean(0)),
            "programs": (("mode",), (~share[:, 0].isnan()).sum(0)),
            "each": (("case", *scored), torch.from_numpy(values)),
        },
        coords={
            **{dim: first[dim].values for dim in ("attribution", "score", "mode")},
            "program": (("case",), names),
            "seed": (("case",), [int(each.attrs["seed"]) for each in found]),
        },
        attrs={"interval": "95 % over seeds, these programs", **_meanings()},
    )  # fmt: skip


def _meanings() -> dict[str, str]:
    """What each score and each kind of edge is, for a reader of the result."""
    return {
        f"{kind} {name}": said
        for kind, all_ in (("score", SCORES), ("mode", MODES))
        for name, said in all_.items()
    }


def _by_program(values: np.ndarray, names: Sequence[str]) -> list[Float[Tensor, "k *s"]]:
    """The rows of every program: one for each of its seeds."""
    every = torch.from_numpy(values)
    return [every[[other == name for other in names]] for name in dict.fromkeys(names)]


def _over_seeds(
    programs: Sequence[Float[Tensor, "_ *s"]],
) -> tuple[Float[Tensor, "*s"], Float[Tensor, "*s"], Float[Tensor, "*s"]]:
    """Mean over programs of the means over seeds, and the ends of its interval, the programs being these.

    The variance is the sum of the programs' own, s^2 / k over k seeds, divided by their number squared; degrees of
    freedom by Satterthwaite (1946). NaN where a program has a single seed.
    """
    mean = torch.stack([rows.mean(0) for rows in programs]).mean(0)
    counts = torch.tensor([len(rows) for rows in programs], dtype=torch.float64)
    if bool((counts < 2).any()):
        return mean, torch.full_like(mean, torch.nan), torch.full_like(mean, torch.nan)
    own = torch.stack([rows.var(0) / len(rows) for rows in programs])
    free = (counts - 1).reshape(-1, *[1] * mean.ndim)
    total = own.sum(0)
    degrees = total.square() / (own.square() / free).sum(0)
    width = t95(degrees.nan_to_num(1.0) + 1, 2) * total.sqrt() / len(programs)
    return mean, mean - width, mean + width
