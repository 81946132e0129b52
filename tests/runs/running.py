"""What the tests of runs ask, of which rows: importable by worker processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from interp import Batch, Read
from interp.core.results import labelled
from interp.core.stats import MaskedMeans, Means, Partial, Rows
from interp.model import Trace, Transformer
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question, Reading
from interp.runs import Results

SITE = "blocks.1.hook_resid_post"
READS = (Read(SITE),)


@dataclass(frozen=True)
class Norms(Question):
    """Means of each row's mean norm; the row whose second token is `poison` is NaN."""

    poison: int | None = None

    def bind(self, model: Subject) -> ByRow:
        return norms_by(partial(_norms, poison=self.poison))


@dataclass(frozen=True)
class Kept(Question):
    """Every row's mean norm, and its width."""

    def bind(self, model: Subject) -> ByRow:
        return ByRow(self.name, Reading(READS, _kept), Rows, _finish_kept)


@dataclass(frozen=True)
class ByPosition(Question):
    """The norm at every position, over the rows that have it."""

    def bind(self, model: Subject) -> ByRow:
        return ByRow(self.name, Reading(READS, _by_position), MaskedMeans, _finish_by_position)


ASKED = (Norms(), Kept(), ByPosition())


def norms_by(compute: partial[Mapping[str, Tensor]]) -> ByRow:
    """Means of what a function computes as each row's mean norm."""
    return ByRow("norms", Reading(READS, compute), Means, _finish_norms)


def agree(one: Results, other: Results, tolerance: float = 0.0) -> None:
    """The same numbers, rows and counts; tolerance 0 = the same bits."""
    assert (one.rows, one.tokens, one.cut) == (other.rows, other.tokens, other.cut)
    assert one.rejected.equals(other.rejected)
    assert list(one) == list(other)
    for name in one:
        if tolerance == 0.0:
            xr.testing.assert_identical(one[name], other[name])
            continue
        for variable in one[name].data_vars:
            np.testing.assert_allclose(
                one[name][variable].values, other[name][variable].values, rtol=tolerance, atol=tolerance
            )


def _row_norms(trace: Trace, batch: Batch) -> Tensor:
    each = trace[SITE].norm(dim=-1)
    return (each * batch.real).sum(1) / batch.lengths


def _norms(trace: Trace, batch: Batch, model: Transformer, poison: int | None) -> Mapping[str, Tensor]:
    found = _row_norms(trace, batch)
    if poison is not None:
        found = found.masked_fill(batch.tokens[:, 1] == poison, torch.nan)
    return {"norm": found}


def _finish_norms(merged: Partial) -> xr.Dataset:
    assert isinstance(merged, Means)
    return labelled("norms", merged.moments["norm"].estimate(()), attrs={"n": merged.moments["norm"].n})


def _kept(trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
    return {"norm": _row_norms(trace, batch), "first": batch.tokens[:, :2]}


def _finish_kept(merged: Partial) -> xr.Dataset:
    assert isinstance(merged, Rows)
    return labelled(
        "norms",
        {"norm": (("prompt",), merged.rows["norm"]), "first": (("prompt", "pos"), merged.rows["first"])},
    )


def _by_position(trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
    return {"norm": trace[SITE].norm(dim=-1).masked_fill(~batch.real, torch.nan)}


def _finish_by_position(merged: Partial) -> xr.Dataset:
    assert isinstance(merged, MaskedMeans)
    return labelled("norms", merged.moments["norm"].estimate(("pos",)))
