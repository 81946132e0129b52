"""An analysis as data, and the loop that runs any number of them over any number of batches in shared passes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from tqdm import tqdm

from interp.core.stats import Means, Rows
from interp.engine.batch import Batch
from interp.engine.observe import deepest, observe
from interp.model.config import ModelConfig
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class Analysis:
    """What to read, what to compute from it per row, how rows combine, and how the result is labelled.

    `compute` returns tensors whose first axis is the batch row; it knows neither device nor batch size, so splitting
    the data changes no number. `reduction` keeps every row (`Rows`) or only their moments (`Means`).
    """

    name: str
    reads: Callable[[ModelConfig], Sequence[Read]]
    compute: Callable[[Trace, Batch, Transformer], Mapping[str, Tensor]]
    reduction: type[Means] | type[Rows]
    finish: Callable[[Means | Rows], "xr.Dataset"]
    last_only: bool = False
    """Whether sites after the blocks (final norm, logits) are needed at the last real token only."""


def run(
    analyses: Sequence[Analysis],
    model: Transformer,
    batches: Iterable[Batch],
    *,
    total: int | None = None,
) -> dict[str, "xr.Dataset"]:
    """The result of every analysis by name, all answered by one forward pass per batch.

    The pass stops at the deepest block anybody reads; the logits are computed only if a read needs them.
    Errors: ValueError for no analyses, two of one name, or no batches.
    """
    names = [a.name for a in analyses]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"analyses with distinct names are required, got {names}")
    reads = {a.name: tuple(a.reads(model.config)) for a in analyses}
    union = [read for each in reads.values() for read in each]
    stop = deepest((read.site for read in union), model.config)
    last_only = all(analysis.last_only for analysis in analyses)
    partial: dict[str, Means | Rows] = {}
    for batch in tqdm(batches, desc=", ".join(names), total=total, delay=1, leave=False):
        batch = batch.to(model.device)
        where = batch.last()[:, None] if last_only and stop is None else None
        trace = observe(model, batch, union, stop=stop, logits_at=where, answers_only=True).trace
        for analysis in analyses:
            part = analysis.reduction.of(analysis.compute(trace, batch, model))
            before = partial.get(analysis.name)
            partial[analysis.name] = part if before is None else before.merge(part)  # type: ignore[arg-type]
    if not partial:
        raise ValueError("at least one batch is required, got none")
    return {a.name: a.finish(partial[a.name]) for a in analyses}
