"""Depth as time in a trained model: its blocks as shorter steps, and the error of splitting a block into sublayers.

A residual stack is Euler's scheme for x' = F(x), one step per block (Chen et al. 2018, arXiv:1806.07366); a block that
adds attention and then the MLP is a Lie-Trotter splitting of F = F_attention + F_mlp, and half an MLP, attention, half
an MLP (Macaron) a Strang splitting (Lu et al. 2019, arXiv:1906.02762). `refinement` halves the steps of the whole
stack, `splitting` measures the error of both schemes in one block, with exact flows between (orders 1 and 2) and with
Euler's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.core.kinds import Count
from interp.core.results import Score, labelled, scored
from interp.core.stats import FEWEST_LOSSES, POSITIVE, Means, Partial, over, upcast
from interp.data.batch import Batch
from interp.lab.depth.switched_blocks import entering, pass_through
from interp.model.config import ModelConfig
from interp.model.edits import Edit, Set, Zero
from interp.model.parts import Part
from interp.model.sites import final_stream
from interp.model.tap import Read, Tap, Trace
from interp.model.transformer import Transformer
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question, Reading
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr

TIMES = (1, 2, 4, 8)
"""Default numbers of steps into which a block, or its time, is cut."""
CHUNK = 128
"""Number of tokens with logits in memory at a time."""
Field = Callable[[Tensor], Tensor]
"""A function from a stream to what a sublayer adds to it."""


@dataclass(frozen=True)
class Refinement(Question):
    """How far predictions and stream change when every block is cut into `times` steps, each adding 1 / `times`.

    It is the stack of a model with `times` as many blocks and `residual_scale` / times, which uses each block's
    weights so often.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        times: numbers of steps into which each block is cut, ascending from 1 on; distances are to the last.

    Returns:
        Dataset[times, score]. Over texts, `value` is a mean with `low` and `high` (95 %) and `n`, of the scores

        - `kl`: KL(model || cut) of the next-token predictions, nats, mean over a text's tokens; 0 at times = 1.
        - `distance`: of the final stream to the one of the most steps, |X - X'| / |X'|; it halves as the steps double
          where the stack approximates a flow.

    Raises:
        ValueError: times that are not ascending from 1 on, models that norm the sum (post-norm: no step can be
            halved), without an unembedding or without layers, or packed rows.

    Caveats:
        A model is trained at times = 1 and owes the limit nothing: a large KL says that its blocks are steps of their
        own, not samples of a flow. An edit of the stream that enters a block but the first acts in every step.

    Source:
        Chen et al. 2018 (arXiv:1806.07366); Lu et al. 2019 (arXiv:1906.02762).

    See Also:
        `splitting`: the error of one block against the flow of its sublayers together.

    Example:
        >>> float(refinement(model, prompt, times=(1, 2)).value.sel(score="kl", times=1).round(6))
        0.0
    """

    _: KW_ONLY
    times: Sequence[Count] = TIMES

    def bind(self, model: Subject) -> ByRow:
        """The stack once per number of steps, each from the stream that enters the first block."""
        network = model.transformer
        config = network.config
        times = _ascending("times", self.times)
        steps_of_euler(config, "refinement")
        if not config.unembed:
            raise ValueError("refinement compares predictions: a model with an unembedding is required")
        return ByRow(
            self.name,
            Reading([Read(entering(0)), Read(final_stream(config))], partial(_refined, times=times)),
            Means,
            partial(_finish_refined, name=self.name, times=times),
        )


refinement = of_data(Refinement)


@torch.no_grad()
def _refined(trace: Trace, batch: Batch, model: Transformer, times: Sequence[int]) -> Mapping[str, Tensor]:
    batch.require_one_text("refinement")
    final, real = trace[final_stream(model.config)], batch.real.to(model.device)
    ends = [_through(model, batch, trace[entering(0)], cut) for cut in times]
    return {
        "kl": torch.stack([_divergence(model, final, end, real) for end in ends], 1),
        "distance": torch.stack([_distance(end, ends[-1], real) for end in ends], 1),
    }


def _through(
    model: Transformer, batch: Batch, stream: Float[Tensor, "b p d"], times: int
) -> Float[Tensor, "b p d"]:
    """The final stream with every block cut into so many steps."""
    for layer in range(model.config.n_layers):
        for _ in range(times):
            _, stream = pass_through(model, batch, range(layer, layer + 1), stream=stream, step=1 / times)
    return stream


def _divergence(
    model: Transformer,
    final: Float[Tensor, "b p d"],
    other: Float[Tensor, "b p d"],
    real: Bool[Tensor, "b p"],
) -> Float[Tensor, "b"]:
    """The mean over each row's tokens of KL(P || Q), nats, of the predictions from two final streams."""
    rows = real.nonzero()[:, 0]
    total = torch.zeros(len(real), dtype=torch.float64, device=final.device)
    parts = (final[real].split(CHUNK), other[real].split(CHUNK), rows.split(CHUNK))
    for mine, theirs, row in zip(*parts, strict=True):
        p, q = (model.read_out(upcast(stream)).log_softmax(-1) for stream in (mine, theirs))
        total.index_add_(0, row, (p.exp() * (p - q)).sum(-1).double())
    return total / real.sum(1)


def _distance(
    x: Float[Tensor, "b p d"], y: Float[Tensor, "b p d"], real: Bool[Tensor, "b p"]
) -> Float[Tensor, "b"]:
    """|X - Y| / |Y| over each row's tokens."""
    x, y = (upcast(each).masked_fill(~real[..., None], 0.0).flatten(1) for each in (x, y))
    return (x - y).norm(dim=1) / y.norm(dim=1)


def _finish_refined(merged: Partial, name: str, times: Sequence[int]) -> xr.Dataset:
    assert isinstance(merged, Means)
    units = {"kl": "nats", "distance": "relative distance"}
    return scored(
        name,
        {
            score: Score.of(merged.moments[score], unit, 0.0, fewest=FEWEST_LOSSES)
            for score, unit in units.items()
        },
        ("times",),
        coords={"times": list(times)},
        attrs={
            "rows": merged.moments["kl"].n,
            "interval": over("texts", FEWEST_LOSSES),
            "null": "0: a flow, cut finely enough",
        },
    )


# --- splitting ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Splitting(Question):
    """Error of a block that adds its sublayers in turn, against the flow of their sum, by scheme and number of steps.

    The flow is x' = attention(x) + mlp(x) for time 1 from the stream that enters the block, each a function of the
    stream with its norm. Schemes, over h = 1 / steps: "Lie": the flow of attention, then that of the MLP: order 1.
    "Strang": half the MLP's, attention's, half the MLP's: order 2. "block" and "Macaron": the same with one Euler
    step x + h f(x) for each flow, which is what a Transformer and a Macaron block compute: both of order 1, for
    Euler's step is.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        layer: number of the block.
        steps: numbers of steps into which the block's time is cut, ascending; each divides `fine`.
        fine: steps of the classical Runge-Kutta scheme that approximates an exact flow.

    Returns:
        Dataset[scheme, steps]:

        - `value`: |X - X*| / |X*| for X* the flow of the sum, mean over texts, with `low` and `high` (95 %) and `n`.
        - `order`: logarithm of the ratio of the error to that with the next number of steps, to the base of the ratio
          of the steps; NaN at the last.

        `attrs["floor"]` is the mean distance of the reference from that with half as many Runge-Kutta steps: an error
        near it says nothing, nor does its order.

    Raises:
        IndexError: a layer that does not exist.
        ValueError: blocks other than attention and one MLP, post-norm blocks, steps that do not divide `fine`, or
            packed rows.

    Source:
        Lu et al. 2019 (arXiv:1906.02762).

    See Also:
        `refinement`: shorter steps of the whole stack.

    Example:
        >>> splitting(model, prompt, 1, steps=(1, 2), fine=4).scheme.values.tolist()
        ['Lie', 'Strang', 'block', 'Macaron']
    """

    layer: int
    _: KW_ONLY
    steps: Sequence[Count] = TIMES
    fine: Count = 32

    def bind(self, model: Subject) -> ByRow:
        """The stream that enters the block, and its sublayers again and again."""
        config = model.transformer.config
        if not 0 <= self.layer < config.n_layers:
            raise IndexError(f"layers are 0 to {config.n_layers - 1} in this model, got {self.layer}")
        steps_of_euler(config, "splitting")
        if list(config.sublayers) != ["attn_out", "mlp_out"] or not config.pointwise:
            raise ValueError("splitting requires blocks of attention and one MLP of single positions")
        steps = _ascending("steps", self.steps)
        if self.fine < 1 or any(self.fine % each for each in steps):
            raise ValueError(
                f"fine must be a multiple of every number of steps, {steps}, and at least 1, got {self.fine}"
            )
        return ByRow(
            self.name,
            Reading(
                [Read(entering(self.layer))],
                partial(_splits, layer=self.layer, steps=steps, fine=self.fine),
            ),
            Means,
            partial(_finish_split, name=self.name, steps=steps),
        )


splitting = of_data(Splitting)


def runge_kutta(field: Field, x: Tensor, time: float, steps: int) -> Tensor:
    """The flow of x' = field(x) for a time, by the classical Runge-Kutta scheme of order 4.

    Args:
        field: what is added to x per unit of time.
        x: the start, of any shape.
        time: how long the flow goes.
        steps: steps of the scheme over that time.

    Returns:
        The end of the flow, in the shape of `x`.

    Example:
        >>> runge_kutta(lambda x: x, torch.ones(1), 1.0, 16)
        tensor([2.7183])
    """
    h = time / steps
    for _ in range(steps):
        a = field(x)
        b = field(x + h / 2 * a)
        c = field(x + h / 2 * b)
        x = x + h / 6 * (a + 2 * b + 2 * c + field(x + h * c))
    return x


def euler(field: Field, x: Tensor, time: float, steps: int) -> Tensor:
    """One step of Euler's scheme, x + time field(x).

    Args:
        field: what is added to x per unit of time.
        x: the start, of any shape.
        time: length of the step.
        steps: not used: it is always one step.

    Returns:
        The end of the step, in the shape of `x`.
    """
    return x + time * field(x)


SCHEMES: Mapping[str, tuple[tuple[tuple[int, float], ...], Callable[[Field, Tensor, float, int], Tensor]]] = {
    "Lie": (((0, 1.0), (1, 1.0)), runge_kutta),
    "Strang": (((1, 0.5), (0, 1.0), (1, 0.5)), runge_kutta),
    "block": (((0, 1.0), (1, 1.0)), euler),
    "Macaron": (((1, 0.5), (0, 1.0), (1, 0.5)), euler),
}
"""Which field moves for which share of a step, in order (0 attention, 1 the MLP), and how."""


def split(scheme: str, fields: tuple[Field, Field], x: Tensor, steps: int, fine: int) -> Tensor:
    """Where a splitting scheme takes a stream in time 1.

    Args:
        scheme: a name of `SCHEMES`.
        fields: what attention and the MLP add to a stream.
        x: the start, of any shape.
        steps: steps of the scheme over the whole time.
        fine: Runge-Kutta steps over the whole time.

    Returns:
        The end, in the shape of `x`.

    Example:
        >>> split("block", (lambda x: x, lambda x: -x), torch.ones(1), 1, 1)
        tensor([0.])
    """
    order, moved = SCHEMES[scheme]
    for _ in range(steps):
        for which, share in order:
            x = moved(fields[which], x, share / steps, max(1, fine // steps))
    return x


@torch.no_grad()
def _splits(
    trace: Trace, batch: Batch, model: Transformer, layer: int, steps: Sequence[int], fine: int
) -> Mapping[str, Tensor]:
    batch.require_one_text("splitting")
    start, real = upcast(trace[entering(layer)]), batch.real.to(model.device)
    fields = (
        partial(_added, model, batch, layer, "attn_out"),
        partial(_added, model, batch, layer, "mlp_out"),
    )

    def both(x: Tensor) -> Tensor:
        return fields[0](x) + fields[1](x)

    exact = runge_kutta(both, start, 1.0, fine)
    errors = [
        torch.stack([_distance(split(scheme, fields, start, n, fine), exact, real) for n in steps], 1)
        for scheme in SCHEMES
    ]
    coarse = runge_kutta(both, start, 1.0, max(1, fine // 2))
    return {"error": torch.stack(errors, 1), "floor": _distance(coarse, exact, real)}


def _added(
    model: Transformer, batch: Batch, layer: int, sublayer: str, stream: Float[Tensor, "b p d"]
) -> Float[Tensor, "b p d"]:
    """The term of a sublayer of the block where it reads this stream, nothing else having been added."""
    site = entering(layer)
    read = Read(f"blocks.{layer}.hook_{sublayer}")
    others = [
        Edit(Part.of(f"blocks.{layer}.hook_{name}"), Zero())
        for name in model.config.sublayers
        if name != sublayer
    ]
    tap = Tap([read], [Edit(site, Set(stream.to(model.dtype))), *others], answers_only=True)
    model(
        stream.to(model.dtype) if layer else batch.tokens,
        tap,
        layer,
        layer + 1,
        **batch.inputs,
    )
    found = upcast(tap.values[read])
    tap.close()
    return found


def _finish_split(merged: Partial, name: str, steps: Sequence[int]) -> xr.Dataset:
    assert isinstance(merged, Means)
    error, cut = merged.moments["error"], torch.tensor(steps, dtype=torch.float64)
    order = torch.full(error.mean.shape, torch.nan, dtype=torch.float64)
    mean = error.mean.double().cpu()
    order[:, :-1] = (mean[:, :-1] / mean[:, 1:]).log() / (cut[1:] / cut[:-1]).log()
    return labelled(
        name,
        error.estimate(("scheme", "steps"), null=0.0, fewest=FEWEST_LOSSES, within=POSITIVE)
        | {"order": (("scheme", "steps"), order)},
        coords={"scheme": list(SCHEMES), "steps": list(steps)},
        units={**dict.fromkeys(("value", "low", "high", "null"), "relative distance"), "order": "order"},
        attrs={
            "rows": error.n, "floor": float(merged.moments["floor"].mean), "unit": "relative distance",
            "interval": over("texts", FEWEST_LOSSES), "null": "0: the sublayers commute",
        },
    )  # fmt: skip


def steps_of_euler(config: ModelConfig, what: str) -> None:
    """Raises a ValueError for blocks that are no steps x + f(x).

    Args:
        config: the model's config.
        what: name of the analysis, for the message.

    Raises:
        ValueError: post-norm blocks.
    """
    if config.norms_sum:
        raise ValueError(
            f"{what} requires blocks that add to the stream; this model norms the sum (post-norm)"
        )


def _ascending(what: str, given: Sequence[int]) -> tuple[int, ...]:
    """Numbers of steps. ValueError unless they ascend from 1 or more."""
    found = tuple(given)
    if not found or found[0] < 1 or any(a >= b for a, b in pairwise(found)):
        raise ValueError(f"{what} must be ascending numbers of 1 or more, got {list(found)}")
    return found
