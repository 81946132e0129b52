"""One question over the checkpoints of a training run: a result with a `step` axis, and what changes along it.

Olsson et al. 2022 found induction heads by watching many small results over training; every question that gives a
Dataset can be watched so. Models are loaded one after the other, and each is released before the next.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from interp.core.boundary import check, public
from interp.core.results import labelled, numbers
from interp.data.pairs import Pairs
from interp.data.sources import Data
from interp.data.stream import DataSource
from interp.passes.observe import Model
from interp.passes.question import Askable
from interp.runs.run import answered

if TYPE_CHECKING:
    import xarray as xr

_STEP = re.compile(r"(?:step|checkpoint)[-_]?(\d+)(?!\d)")


@public()
def over_checkpoints(
    load: Callable[[str], Model],
    revisions: Sequence[str],
    question: Askable | Callable[[Model], xr.Dataset],
    data: DataSource | Data | Pairs | None = None,
) -> xr.Dataset:
    """Results of one question at every checkpoint of a training run, along a new first dim `step`.

    Models are loaded one after the other, and each is released before the next.

    Args:
        load: function from a revision ("step2850") to its model.
        revisions: names of the checkpoints; each names its step.
        question: a record such as `Heads()`, asked as `interp.run` asks it, or any function from a model to a Dataset,
            for what is made of several results.
        data: what a record is asked about: prompts, token ids, a batch, files or a stream; None: a record that needs
            none, or a function.

    Returns:
        Dataset of the question, with the dim `step`, ascending, in every variable. Attributes that all results share
        stay attributes; one that differs (say a completeness error) becomes a variable over `step`, so nothing is
        dropped.

    Raises:
        ValueError: no or repeated revisions, a name without a step, an iterator as data of several checkpoints, data
            and a function, and results whose coordinates differ; everything `load` and the question refuse.

    Source:
        Olsson et al. 2022, who found induction heads in such series.

    See Also:
        `phase_change`: where a number rises fastest. `loss_map`: the loss by index and step.

    Example:
        >>> from interp.attention import Heads
        >>> table = over_checkpoints({"step10": model, "step20": model}.__getitem__, ["step10", "step20"], Heads())
        >>> table.value.dims
        ('step', 'layer', 'head', 'score')
    """
    steps = [step_of(revision) for revision in revisions]
    if not steps or len(set(steps)) != len(steps):
        raise ValueError(f"revisions: checkpoints with distinct steps are required, got {list(revisions)}")
    record = isinstance(question, Askable)
    if not record and data is not None:
        raise ValueError("data belong to a question as a record; a function of the model brings its own")
    if isinstance(data, Iterator) and len(steps) > 1:
        raise ValueError(
            "an iterator gives every row once: a list is required, which lasts for every checkpoint"
        )

    def result(revision: str) -> xr.Dataset:
        if not isinstance(question, Askable):
            return question(_load_model(load, revision))
        return answered(question, _load_model(load, revision), data)

    order = sorted(range(len(steps)), key=steps.__getitem__)
    bar = tqdm([revisions[i] for i in order], desc="checkpoints", delay=1, leave=False)
    return _along_step([result(revision) for revision in bar], [steps[i] for i in order])


def _load_model(load: Callable[[str], Model], revision: str) -> Model:
    """The model of a revision. ValueError if `load` returns something else."""
    model = load(revision)
    check(f"load({revision!r})", model, Model)
    return model


def step_of(revision: str) -> int:
    """The training step in the name of a revision: "step2850", "checkpoint-3000", "step1000-tokens4B".

    Raises:
        ValueError: a name without a step.

    Example:
        >>> step_of("step2850")
        2850
    """
    match = _STEP.search(revision)
    if match is None:
        raise ValueError(f"a revision that names its step is required, such as 'step2850', got {revision!r}")
    return int(match[1])


@public()
def phase_change(series: xr.DataArray) -> xr.Dataset:
    """Neighbouring checkpoints between which a number rises fastest, for every cell (head, ...) of a series.

    Args:
        series: any result with a dim `step`, such as `table.value.sel(score="induction")`; pass `-series` to find the
            steepest fall.

    Returns:
        Dataset over the other dims of the series; the earliest of equal gaps counts.

        - `before`, `after`: the two steps.
        - `rise`: in the series' unit.
        - `rate`: rise per training step, the largest over the gaps.

    Raises:
        ValueError: a series without a `step` dim, with fewer than two checkpoints, steps that do not ascend, or a
            value that is missing or infinite.

    Caveat:
        Checkpoints far apart hide how steep a rise is inside the gap, and a series that never rises gets its slowest
        fall (`rise` <= 0).

    See Also:
        `over_checkpoints`: makes such a series.

    Example:
        >>> load = {"step10": model, "step20": model}.__getitem__
        >>> table = over_checkpoints(load, ["step10", "step20"], interp.heads)
        >>> phase_change(table.value.sel(score="induction")).sel(layer=1, head=2).attrs["of"]
        'induction'
    """
    if series.sizes.get("step", 0) < 2:
        raise ValueError(
            f"a dim 'step' with at least two checkpoints is required, got {dict(series.sizes)} in {series.name!r}"
        )
    others = [str(dim) for dim in series.dims if dim != "step"]
    values = numbers("series", series, ("step", *others)).double()
    steps = numbers("steps", series["step"], ("step",))
    steps = steps.long() if series["step"].dtype.kind in "iu" else steps
    if bool((steps.diff() <= 0).any()) or bool(values.isnan().any()):
        raise ValueError(f"ascending steps and a value at each are required, got steps {steps.tolist()}")
    if not bool(values.isfinite().all()):
        raise ValueError(
            "finite values are required, got some that are infinite: no rise to them can be compared"
        )
    of, unit = (_scalar_label(series, name) for name in ("score", "unit"))
    unit = unit or str(series.attrs.get("unit", "that of the series"))
    dims = tuple(others)
    cells = {name: (dims, cell) for name, cell in _steepest(values, steps).items()}
    result = labelled(
        "phase_change",
        cells,
        units={"rise": unit, "rate": f"{unit} per step"},
        attrs={"of": of or str(series.name), "unit": unit},
    )
    coords = {
        str(name): coord for name, coord in series.coords.items() if coord.ndim and "step" not in coord.dims
    }
    return result.assign_coords(coords)


def _scalar_label(series: xr.DataArray, name: str) -> str | None:
    """The label that a selection left on a series, such as the selected score; None where there is none."""
    return str(series[name].item()) if name in series.coords and series[name].ndim == 0 else None


@public()
def per_token_loss_pca(losses: xr.DataArray, *, components: int = 2) -> xr.Dataset:
    """Main components of per-token losses over snapshots of training: one PCA of all snapshots jointly.

    With X = losses - mean over snapshots = U S V^T. Trajectories turn at the phase change.

    Args:
        losses: dims (..., prompt), the `value` of `one_token_losses` at several checkpoints, in nats; all other dims
            (`step`, or `model` and `step`) count snapshots.
        components: how many components.

    Returns:
        Dataset; signs: the entry of largest magnitude of every direction is positive. Components of equal variance are
        an arbitrary basis of their space.

        - `projection` [..., component]: U S, in nats.
        - `direction` [component, prompt]: V^T, of unit length.
        - `explained` [component]: share of the variance, S^2 / sum S^2.
        - `mean` [prompt]: mean loss over snapshots, in nats.

    Raises:
        ValueError: more components than snapshots - 1 or prompts, or missing losses.

    Source:
        Olsson et al. 2022, of one token of each of 10 000 texts.

    See Also:
        `one_token_losses`: the losses of one checkpoint.

    Example:
        >>> import xarray as xr
        >>> losses = xr.DataArray(np.random.rand(5, 30), dims=("step", "prompt"))
        >>> per_token_loss_pca(losses, components=1).projection.dims
        ('step', 'component')
    """
    if "prompt" not in losses.dims:
        raise ValueError(f"losses with a dim 'prompt' are required, got dims {list(losses.dims)}")
    others = [str(dim) for dim in losses.dims if dim != "prompt"]
    values = numbers("losses", losses, (*others, "prompt")).double()
    snapshots = values.reshape(math.prod(values.shape[:-1]), values.shape[-1])
    most = min(len(snapshots) - 1, snapshots.shape[1])
    if not 1 <= components <= most or not bool(snapshots.isfinite().all()):
        raise ValueError(
            f"finite losses and 1 to {most} components are required for {len(snapshots)} snapshots of "
            f"{snapshots.shape[1]} prompts, got {components} components"
        )
    projection, direction, explained = principal_components(snapshots)
    result = labelled(
        "per_token_loss_pca",
        {
            "projection": (
                (*others, "component"),
                projection[:, :components].reshape(*values.shape[:-1], -1),
            ),
            "direction": (("component", "prompt"), direction[:components]),
            "explained": (("component",), explained[:components]),
            "mean": (("prompt",), snapshots.mean(0)),
        },
        coords={"component": range(1, components + 1)},
        units={"projection": "nats", "mean": "nats", "explained": "share of the variance"},
        attrs={"unit": "nats", "signs": "the largest entry of every direction is positive"},
    )
    return result.assign_coords({str(name): at for name, at in losses.coords.items()})


def principal_components(
    rows_se: Float[Tensor, "s e"],
) -> tuple[Float[Tensor, "s c"], Float[Tensor, "c e"], Float[Tensor, "c"]]:
    """Projections, unit directions and explained shares of centred rows; the largest entry of a direction is positive.

    Without any variance the shares are 0.
    """
    u, s, vt = torch.linalg.svd(rows_se - rows_se.mean(0), full_matrices=False)
    largest = vt.gather(1, vt.abs().argmax(1, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0).to(vt.dtype)
    share = s.square() / s.square().sum().clamp_min(torch.finfo(s.dtype).tiny)
    return u * s * sign.mT, vt * sign, share


def _steepest(values: Float[Tensor, "s ..."], steps: Tensor) -> dict[str, Tensor]:
    """For every cell, the neighbouring steps between which the value rises fastest, the rise and the rise per step."""
    rise = values.diff(dim=0)
    rate = rise / steps.diff().reshape(-1, *[1] * (values.ndim - 1))
    gap = rate.argmax(0)
    return {
        "before": steps[gap],
        "after": steps[gap + 1],
        "rise": rise.gather(0, gap[None])[0],
        "rate": rate.gather(0, gap[None])[0],
    }


def _along_step(results: Sequence[xr.Dataset], steps: Sequence[int]) -> xr.Dataset:
    """The results of all checkpoints, concatenated along `step`; attributes that differ become variables over it."""
    import xarray as xr

    names = [set(map(str, result.variables)) for result in results]
    if missing := sorted(names[0] ^ next((n for n in names if n != names[0]), names[0])):
        raise ValueError(
            f"results with the same variables at every step are required; only some have {missing}"
        )
    try:
        series = xr.concat(
            list(results), "step", join="exact", data_vars="all", coords="minimal", compat="equals",
            combine_attrs="override",
        )  # fmt: skip
    except ValueError as cause:
        raise ValueError(f"results with the same coordinates at every step are required: {cause}") from cause
    attrs = {
        str(name): [result.attrs.get(name) for result in results]
        for result in results
        for name in result.attrs
    }
    differing = {
        name: by_step for name, by_step in attrs.items() if any(value != by_step[0] for value in by_step)
    }
    if taken := sorted(names[0] & set(differing)):
        raise ValueError(
            f"attributes that differ by step become variables, but {taken} are variables already"
        )
    series = series.assign_coords(step=list(steps)).assign({k: ("step", v) for k, v in differing.items()})
    series.attrs = {name: by_step[0] for name, by_step in attrs.items() if name not in differing}
    return series
