"""How far a metric moves under each variant of a sweep, as a table: what every ablation returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.core.results import labelled
from interp.core.stats import Moments
from interp.data.batch import Batch
from interp.model.transformer import Transformer
from interp.passes.metrics import Metric
from interp.passes.sweep import Sweep
from interp.passes.variants import Variant

if TYPE_CHECKING:
    import xarray as xr

Planned = Callable[[Batch, slice], tuple[Sequence[Variant], Variant]]
"""From some consecutive prompts (themselves, and where they stand) to their variants and what is common to them all."""
Metrics = Callable[[slice], Metric]
"""From where some consecutive prompts stand to their metric, for metrics that know each prompt by its number."""
SIGN = "metric with the intervention minus metric without; below 0: the part helped to keep the metric up"


@dataclass(frozen=True, eq=False)
class Effects:
    """What every variant does to the metric of every prompt."""

    effect: Float[Tensor, "b v"]
    changed: Bool[Tensor, "b v"]
    """Whether the variant changed anything that can reach the metric."""
    base: Float[Tensor, "b"]
    """The metric without any intervention."""

    @classmethod
    def joined(cls, parts: Sequence["Effects"]) -> "Effects":
        """The prompts of several, one after the other."""
        columns = ([getattr(part, name) for part in parts] for name in ("effect", "changed", "base"))
        return cls(*map(torch.cat, columns))

    def rows(self, order: Tensor) -> "Effects":
        """These prompts in this order."""
        return Effects(self.effect[order], self.changed[order], self.base[order])

    def table(
        self,
        analysis: str,
        coords: Mapping[str, Sequence[int] | Sequence[str]],
        metric: Metric,
        attrs: Mapping[str, str | int],
    ) -> "xr.Dataset":
        """The Dataset of this analysis: variants in the order of the `coords`.

        `effect`, `effect_low`, `effect_high` and `changed` over the coords, `each` [prompt, ...], `base` [prompt].
        """
        dims, sizes = tuple(coords), tuple(len(x) for x in coords.values())
        each, changed = (x.unflatten(1, sizes) if sizes else x[:, 0] for x in (self.effect, self.changed))
        return labelled(
            analysis,
            {
                **Moments.of(each).cells("effect", dims),
                "changed": (dims, changed.any(0)),
                "each": (("prompt", *dims), each),
                "base": (("prompt",), self.base),
            },
            coords=dict(coords),
            attrs={
                **attrs, "metric": metric.name, "unit": metric.unit, "sign": SIGN, "n": len(self.base),
                "interval": "95 % over prompts",
            },
        )  # fmt: skip


@torch.no_grad()
def effects(
    model: Transformer,
    batch: Batch,
    metric: Metric | Metrics,
    planned: Planned,
    *,
    batch_size: int = 32,
) -> Effects:
    """The effects of every prompt's variants. A metric that compares (KL) compares with the run without any."""
    parts, start = [], 0
    for some in batch.split(batch_size):
        rows = slice(start, start + len(some))
        variants, common = planned(some, rows)
        mine = metric if isinstance(metric, Metric) else metric(rows)
        found = Sweep(model, some, variants, common).run(mine)
        parts.append(Effects((found.values - found.base).mT, found.changed.mT, found.base))
        start += len(some)
    return Effects.joined(parts)


def alike(variants: Sequence[Variant]) -> Planned:
    """The same variants for all prompts, with nothing in common."""

    def planned(some: Batch, rows: slice) -> tuple[Sequence[Variant], Variant]:
        return variants, Variant()

    return planned


def chosen_layers(layers: Sequence[int] | None, n_layers: int) -> list[int]:
    """The layers asked for, all if None. IndexError for one that the model does not have, ValueError for none."""
    if layers is None:
        return list(range(n_layers))
    return chosen(layers, n_layers, "layer")


def chosen(given: Sequence[int], count: int, what: str) -> list[int]:
    """Indices counted from the front. IndexError for one outside, ValueError for none or one that comes twice."""
    if bad := [i for i in given if not -count <= i < count]:
        raise IndexError(f"{what} must be in [0, {count - 1}], got {bad[0]}")
    found = [i % count for i in given]
    if not found or len(set(found)) < len(found):
        raise ValueError(f"at least one {what} and none twice is required, got {list(given)}")
    return found
