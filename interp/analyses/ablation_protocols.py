"""What stands in for an ablated part: nothing, a mean, or what the part says on another prompt.

The three answer different questions. Zero takes the part away, its mean included, which may leave a stream that the
model never sees; a mean takes away what the part says about this prompt and leaves the rest (per template and position,
as Wang et al. 2022, arXiv:2211.00593, also what the template says); resampling puts a value there that the model does
see. Which one was used belongs to the number, so it is a record that results carry.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.precision import wide
from interp.engine.batch import Batch
from interp.engine.observe import observe
from interp.model.edits import Mean, Over, Resample, Set, Zero
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer

Fill = Callable[[slice], Mapping[str, Set | Zero]]
"""From some consecutive prompts to what is put at every site: one row per prompt, or one for all."""


StandIn = Zero | Mean | Resample
"""The changes that take a part away."""


@dataclass(frozen=True, eq=False)
class Data:
    """The prompts of an ablation and what their substitutes come from, checked against what stands in.

    Errors: ValueError, by its name, for reference data or groups that it requires and did not get, or got
    and has no use for, and for rows that cannot stand in for each other.
    """

    change: StandIn
    batch: Batch
    reference: Batch | None = None
    groups: Sequence[str] | None = None
    """The template of each prompt, and of the reference prompt in the same row."""

    def __post_init__(self) -> None:
        name = f"{type(self.change).__name__}()"
        if isinstance(self.change, Mean):
            name = f"Mean(over={self.change.over!r})"
        if self.groups is not None and len(self.groups) != len(self.batch):
            raise ValueError(
                f"one group per prompt is required, got {len(self.groups)} for {len(self.batch)}"
            )
        if problem := self._missing() or self._useless():
            raise ValueError(f"{name} {problem}")

    def _missing(self) -> str | None:
        """What it requires and did not get."""
        if isinstance(self.change, Zero):
            return None
        over = self.change.over if isinstance(self.change, Mean) else None
        if over == "reference":
            return "requires reference prompts, got none" if self.reference is None else None
        if over == "template" and self.groups is None:
            return "requires the groups of the prompts, got none"
        if self.reference is not None:
            aligned = over != "position" and len(self.reference) != len(self.batch)
            return f"requires one reference prompt per prompt, got {len(self.reference)}" if aligned else None
        smallest = int(self.group_of_row.bincount().min())
        if smallest < 2:
            return "requires reference prompts, or two prompts in every group to take values from, got one"
        return None

    def _useless(self) -> str | None:
        """What it has no use for."""
        zero, over = isinstance(self.change, Zero), getattr(self.change, "over", None)
        if self.reference is not None and zero:
            return "takes no values from anywhere: reference prompts have no meaning"
        twins = isinstance(self.change, Resample) and self.reference is not None
        if self.groups is not None and (zero or twins or over in ("position", "reference")):
            return "has no use for groups"
        return None

    @property
    def group_of_row(self) -> Int[Tensor, "b"]:
        """The number of each row's group; one group where none are given."""
        groups = self.groups or [""] * len(self.batch)
        numbers = {name: i for i, name in enumerate(dict.fromkeys(groups))}
        return torch.tensor([numbers[name] for name in groups])

    def fill(self, model: Transformer, names: Sequence[str], *, batch_size: int = 32) -> Fill:
        """What to put at these sites, by prompts."""
        if isinstance(self.change, Resample):
            twins = self._twins(self.change.seed)
            return lambda rows: {
                name: Set(x)
                for name, x in _recorded(model, twins.rows(torch.arange(len(twins))[rows]), names).items()
            }
        if isinstance(self.change, Mean):
            means = self._means(model, names, self.change.over, batch_size)
            return lambda rows: {name: Set(x if len(x) == 1 else x[rows]) for name, x in means.items()}
        return lambda rows: dict.fromkeys(names, Zero())

    def _twins(self, seed: int) -> Batch:
        """The prompt that each row takes its values from."""
        twins = self.reference
        if twins is None:
            twins = self.batch.rows(other_rows(self.group_of_row, seed))
        if twins.tokens.shape != self.batch.tokens.shape or not torch.equal(twins.real, self.batch.real):
            raise ValueError(
                "Resample() requires prompts as long as those they stand in for, token for token, got "
                f"{self.batch.lengths.tolist()[:8]} and {twins.lengths.tolist()[:8]} tokens"
            )
        return twins

    def _means(
        self, model: Transformer, names: Sequence[str], over: Over, batch_size: int
    ) -> dict[str, Float[Tensor, "n p ..."]]:
        source = (self.reference or self.batch).to(torch.device("cpu"))
        columns, real = self.batch.tokens.shape[1], self.batch.real.cpu()
        width = max(columns, source.tokens.shape[1])
        slots = torch.zeros_like(source.tokens)
        groups = 1
        if over != "reference":
            _check_left(source, self.batch)
            slots = slots + torch.arange(source.tokens.shape[1])
        if over == "template":
            groups = int(self.group_of_row.max()) + 1
            slots = slots + self.group_of_row[:, None] * width
        means, counts = slot_means(model, source, names, slots, groups * width, batch_size=batch_size)
        if over == "reference":
            return {name: x[:1, None].expand(1, columns, *x.shape[1:]) for name, x in means.items()}
        which = self.group_of_row if over == "template" else torch.zeros(1, dtype=torch.long)
        known = counts.unflatten(0, (groups, width))[which, :columns] > 0
        if bool((real & ~known).any()):
            raise ValueError(
                f"Mean(over={over!r}) requires reference prompts that reach as far as the prompts, got "
                f"{int(source.lengths.max())} tokens for {int(self.batch.lengths.max())}"
            )
        return {name: x.unflatten(0, (groups, width))[which, :columns] for name, x in means.items()}


def other_rows(group_of_row: Int[Tensor, "b"], seed: int) -> Int[Tensor, "b"]:
    """For every row another row of its group, never itself; every row is taken once. Groups of at least two rows.

    Example:
        >>> sorted(other_rows(torch.tensor([0, 0, 0]), seed=1).tolist())
        [0, 1, 2]
    """
    dice = torch.Generator().manual_seed(seed)
    partner = torch.arange(len(group_of_row))
    for group in group_of_row.unique():
        rows = (group_of_row == group).nonzero()[:, 0]
        circle = rows[torch.randperm(len(rows), generator=dice)]
        partner[circle] = circle.roll(1)
    return partner


def slot_means(
    model: Transformer,
    batch: Batch,
    names: Sequence[str],
    slots: Int[Tensor, "b p"],
    count: int,
    *,
    batch_size: int = 32,
) -> tuple[dict[str, Float[Tensor, "n ..."]], Int[Tensor, "n"]]:
    """The mean of every site over the real tokens that fall into each slot, and how many did; 0 where none did."""
    totals: dict[str, Tensor] = {}
    for part, where in zip(batch.split(batch_size), slots.split(batch_size), strict=True):
        for name, value in _recorded(model, part, names).items():
            real = part.real.to(value.device)
            total = totals.setdefault(name, wide(value.new_zeros(count, *value.shape[2:])))
            total.index_add_(0, where.to(value.device)[real], value[real].to(total))
    counts = slots[batch.real].bincount(minlength=count)
    means = {
        name: x / counts.clamp_min(1).to(x).reshape(-1, *[1] * (x.ndim - 1)) for name, x in totals.items()
    }
    return means, counts


def clean_patterns(model: Transformer, batch: Batch) -> Mapping[str, Float[Tensor, "b h q k"]]:
    """The attention patterns of a run, by site."""
    kinds = ["attn", *["cross_attn"] * model.config.cross_attention]
    names = [
        f"blocks.{layer}.{kind}.hook_pattern" for layer in range(model.config.n_layers) for kind in kinds
    ]
    return _recorded(model, batch, names)


def _recorded(model: Transformer, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
    trace: Trace = observe(model, batch, [Read(name) for name in names], answers_only=True).trace
    return {name: trace[name] for name in names}


def _check_left(*batches: Batch) -> None:
    if not all(bool(batch.real[:, 0].all()) for batch in batches):
        raise ValueError(
            "means by position require prompts that begin in the first column (no padding on the left)"
        )
