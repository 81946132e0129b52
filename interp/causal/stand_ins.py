"""Values that replace an ablated part: zero, a mean, or the part's values on another prompt.

The three answer different questions. Zero takes the part away, its mean included, which may leave a stream that the
model never sees; a mean takes away what the part says about this prompt and leaves the rest (per template and
position, as Wang et al. 2022, arXiv:2211.00593, also what the template says); resampling puts a value there that the
model does see. Which one was used belongs to the number, so it is a record that results carry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.stats import upcast
from interp.data.batch import Batch
from interp.model.edits import Mean, Resample, Zero
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.observe import observe

StandIn = Zero | Mean | Resample
"""The changes by which an ablation replaces a part."""
Recorder = Callable[[Transformer, Batch], Mapping[str, Float[Tensor, "b p ..."]]]
"""Function that records the activations [b, p, ...] of everything that may be ablated, by name, on some prompts."""


def stand_in_text(change: StandIn) -> str:
    """Name of a change in messages."""
    return f"Mean(over={change.over!r})" if isinstance(change, Mean) else f"{type(change).__name__}()"


def group_numbers(groups: Sequence[str]) -> Int[Tensor, "b"]:
    """The number of each row's group, in the order of their first rows."""
    numbers = {name: i for i, name in enumerate(dict.fromkeys(groups))}
    return torch.tensor([numbers[name] for name in groups])


def with_required_data(
    change: StandIn, batch: Batch, reference: Batch | None, groups: Sequence[str] | None
) -> tuple[Batch, Batch | None]:
    """Prompts in memory with the data that a change requires: corrupted prompts, or prompts to take means of.

    Returns:
        The prompts, with a corrupted prompt each for `Resample`, and the reference of `Mean` (the prompts themselves
        where none is given).

    Raises:
        ValueError: by the change's name, for reference prompts or groups that it requires and did not get, or got and
            has no use for, and for rows that cannot stand in for each other.
    """
    if groups is not None and len(groups) != len(batch):
        raise ValueError(f"one group per prompt is required, got {len(groups)} for {len(batch)}")
    if problem := _missing_data(change, batch, reference, groups) or unused_data_text(
        change, groups, has_reference=reference is not None
    ):
        raise ValueError(f"{stand_in_text(change)} {problem}")
    if isinstance(change, Resample):
        numbers = group_numbers(groups or [""] * len(batch))
        corrupted = batch.rows(other_rows(numbers, change.seed)) if reference is None else reference
        if corrupted.tokens.shape != batch.tokens.shape or not torch.equal(corrupted.real, batch.real):
            raise ValueError(
                "Resample() requires prompts as long as those they stand in for, token for token, got "
                f"{batch.lengths.tolist()[:8]} and {corrupted.lengths.tolist()[:8]} tokens"
            )
        return replace(batch, corrupt=corrupted.tokens.to(batch.tokens.device)), None
    return batch, (batch if reference is None else reference) if isinstance(change, Mean) else None


def _missing_data(
    change: StandIn, batch: Batch, reference: Batch | None, groups: Sequence[str] | None
) -> str | None:
    """Text about data that the change requires and did not get; None if nothing is missing."""
    if isinstance(change, Zero):
        return None
    over = change.over if isinstance(change, Mean) else None
    if over == "reference":
        return "requires reference prompts, got none" if reference is None else None
    if over == "template" and groups is None:
        return "requires the groups of the prompts, got none"
    if reference is not None:
        aligned = over != "position" and len(reference) != len(batch)
        return f"requires one reference prompt per prompt, got {len(reference)}" if aligned else None
    smallest = int(group_numbers(groups or [""] * len(batch)).bincount().min())
    if smallest < 2:
        return "requires reference prompts, or two prompts in every group to take values from, got one"
    return None


def unused_data_text(change: StandIn, groups: Sequence[str] | None, *, has_reference: bool) -> str | None:
    """Text about data that the change has no use for; None if there are none.

    Args:
        has_reference: whether there are reference prompts.
    """
    zero, over = isinstance(change, Zero), getattr(change, "over", None)
    if has_reference and zero:
        return "takes no values from anywhere: reference prompts have no meaning"
    if groups is not None and (
        zero or (isinstance(change, Resample) and has_reference) or over in ("position", "reference")
    ):
        return "has no use for groups"
    return None


@dataclass(frozen=True, eq=False)
class StandIns:
    """Values that replace ablated ones, batch by batch: zeros, or means."""

    change: StandIn
    means: Mapping[str, Float[Tensor, "group p ..."]] = field(default_factory=dict)
    """Mean activation of each group and column, by name; [1, 1, ...] if there is one mean for all."""
    known: Bool[Tensor, "group p"] | None = None
    """True where there was a token to take the mean of; None: the same mean everywhere."""
    group_of_row: Int[Tensor, "n"] | None = None

    @classmethod
    def of(
        cls,
        change: StandIn,
        model: Transformer,
        recorder: Recorder,
        reference: Batch | None,
        groups: Sequence[str] | None = None,
        *,
        batch_size: int = 32,
    ) -> StandIns:
        """The stand-ins of a change, with means over the reference prompts. ValueError for a mean without them."""
        if not isinstance(change, Mean):
            return cls(change)
        if reference is None:
            raise ValueError(f"{stand_in_text(change)} requires reference prompts, got none")
        if change.over == "template" and groups is None:
            raise ValueError(f"{stand_in_text(change)} requires the groups of the prompts, got none")
        numbers = group_numbers(groups) if change.over == "template" and groups is not None else None
        source = reference.to(torch.device("cpu")).right_aligned()
        width, slots, count = 1, torch.zeros_like(source.tokens), 1
        if change.over != "reference":
            width = source.tokens.shape[1]
            slots = slots + torch.arange(width)
        if numbers is not None:
            count = int(numbers.max()) + 1
            slots = slots + numbers[:, None] * width
        means, counts = slot_means(model, source, recorder, slots, count * width, batch_size=batch_size)
        by_group = {name: x.unflatten(0, (count, width)) for name, x in means.items()}
        known = None if change.over == "reference" else counts.unflatten(0, (count, width)) > 0
        return cls(change, by_group, known, numbers)

    def values(self, batch: Batch) -> Mapping[str, Float[Tensor, "#b p ..."]] | None:
        """The means that replace activations on these prompts, by name; None for `Zero`.

        For `Resample` there are none here: the question itself runs the corrupted prompts.

        Raises:
            ValueError: prompts that have tokens where the reference has none, or that are not as wide and have padding
                on the left.
        """
        if isinstance(self.change, Zero):
            return None
        columns = batch.tokens.shape[1]
        if self.known is None:
            return {name: x.expand(1, columns, *x.shape[2:]) for name, x in self.means.items()}
        group = torch.zeros(1, dtype=torch.long)
        if self.group_of_row is not None:
            assert batch.row is not None
            group = self.group_of_row[batch.row.cpu()]
        known, real = self.known[group], batch.real.cpu()
        width = known.shape[1]
        aligned = columns == width or bool(real[:, 0].all() and known[:, 0].all())
        if not aligned or bool(real[:, width:].any() or (real[:, :width] & ~known[:, :columns]).any()):
            raise ValueError(
                f"{stand_in_text(self.change)} requires reference prompts that reach as far as the prompts, got "
                f"{int(self.known.any(0).sum())} tokens for {int(batch.lengths.max())}"
            )
        return {name: _with_columns(x[group.to(x.device)], columns) for name, x in self.means.items()}


def _with_columns(value: Float[Tensor, "n p ..."], columns: int) -> Float[Tensor, "n q ..."]:
    """A value of exactly `columns` columns: cut, or extended by zeros, where the prompts have only padding."""
    missing = columns - value.shape[1]
    return F.pad(value, (*[0] * (2 * value.ndim - 3), missing)) if missing > 0 else value[:, :columns]


def check_left(change: StandIn, batch: Batch) -> None:
    """ValueError for padding on the left, where means are taken by position."""
    if isinstance(change, Mean) and change.over != "reference" and not bool(batch.real[:, 0].all()):
        raise ValueError(
            "means by position require prompts that begin in the first column (no padding on the left)"
        )


def other_rows(group_of_row: Int[Tensor, "b"], seed: int) -> Int[Tensor, "b"]:
    """For every row the index of another row of its group; each row is used once, so groups need two rows or more.

    Example:
        >>> sorted(other_rows(torch.tensor([0, 0, 0]), seed=1).tolist())
        [0, 1, 2]
    """
    generator = torch.Generator().manual_seed(seed)
    partner = torch.arange(len(group_of_row))
    for group in group_of_row.unique():
        rows = (group_of_row == group).nonzero()[:, 0]
        circle = rows[torch.randperm(len(rows), generator=generator)]
        partner[circle] = circle.roll(1)
    return partner


def slot_means(
    model: Transformer,
    batch: Batch,
    recorder: Recorder,
    slots: Int[Tensor, "b p"],
    count: int,
    *,
    batch_size: int = 32,
) -> tuple[dict[str, Float[Tensor, "n ..."]], Int[Tensor, "n"]]:
    """Mean of every activation over the tokens with each number in `slots`, and the number of those tokens."""
    totals: dict[str, Tensor] = {}
    for rows, where in zip(batch.split(batch_size), slots.split(batch_size), strict=True):
        for name, value in recorder(model, rows).items():
            real = rows.real.to(value.device)
            total = totals.setdefault(name, upcast(value.new_zeros(count, *value.shape[2:])))
            total.index_add_(0, where.to(value.device)[real], value[real].to(total))
    counts = slots[batch.real].bincount(minlength=count)
    means = {
        name: x / counts.clamp_min(1).to(x).reshape(-1, *[1] * (x.ndim - 1)) for name, x in totals.items()
    }
    return means, counts


def recorded(model: Transformer, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
    """Values of these sites in a run, by name."""
    trace = observe(model, batch, [Read(name) for name in names], answers_only=True).trace
    return {name: trace[name] for name in names}
