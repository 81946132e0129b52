"""Attention as tokens that move on a sphere or an ellipsoid: their paths and where they end.

Geshkovski et al. 2023 (arXiv:2305.05465, arXiv:2312.10794) and Rodríguez Abella et al. 2024/25 read depth as time:
x' = Proj_x(U sum_j softmax_j(x^T P x_j) x_j), one head, no MLP. From a hemisphere tokens meet; under a causal mask they
go to the first token, which never moves; sharp attention keeps them in clusters for long. `consensus` measures models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.kinds import Cosine, FromZero, Positive, PositiveCount
from interp.core.results import Score, scored

if TYPE_CHECKING:
    import xarray as xr

UNITS = {
    "min_cosine": "cosine", "mean_cosine": "cosine", "to_first_start": "cosine", "potential": "exponential of a score",
    "clusters": "clusters",
}  # fmt: skip
"""Scores of `trajectories` at each time, with units."""
ROUNDINGS = 100
"""Roundings of the dtype up to which two matrices count as one: a matrix and its transpose, W U and a multiple of P."""


@public()
def flow(
    x: Float[Tensor, "n d"],
    *,
    qk: Float[Tensor, "d d"],
    ov: Float[Tensor, "d d"],
    ellipsoid: Float[Tensor, "d d"] | None = None,
    causal: bool = False,
    dt: Positive = 0.05,
    steps: FromZero = 4000,
) -> Float[Tensor, "n d"]:
    """Where tokens on the unit sphere are after `steps` Euler steps of the continuous dynamics, time dt * steps.

    x_i' = Proj_{x_i}(U sum_j softmax_j(x_i^T P x_j) x_j), Proj_x y = y - (x . y) x, each step brought back to the
    sphere; one head.

    Args:
        x: [n, d], the tokens at time 0; they are scaled to the sphere.
        qk: [d, d], P = Q^T K.
        ov: [d, d], U^T, so that a token moves by `x @ ov`.
        ellipsoid: [d, d], W, symmetric and positive definite: the tokens are on x^T W x = 1 and every product above
            but the scores' is x^T W y; None: the sphere.
        causal: token i sees tokens 0..i.
        dt: time of a step.
        steps: number of steps.

    Returns:
        [n, d], the tokens at time dt * steps.

    Raises:
        ValueError: tokens that are zero or not finite, dt <= 0, matrices of other shapes or dtypes, numbers so large
            that the tokens leave the sphere, or a W that is not symmetric and positive definite.

    Source:
        Rodríguez Abella et al. 2024/25, equation of motion; theorems 4.1 and 5.1 have U = 1.

    See Also:
        `trajectories`: the way there.

    Example:
        >>> x = torch.tensor([[1.0, 0.1], [1.0, -0.3], [0.9, 0.2]])
        >>> end = flow(x, qk=torch.eye(2), ov=torch.eye(2), steps=400)
        >>> bool((end @ end.T).min() > 0.999)
        True
    """
    motion = Motion.of(x, qk, ov, ellipsoid, causal, dt)
    return motion.on_surface(deque(motion.path(x, steps), maxlen=1).pop())


@public()
def trajectories(
    x: Float[Tensor, "n d"],
    *,
    qk: Float[Tensor, "d d"],
    ov: Float[Tensor, "d d"],
    ellipsoid: Float[Tensor, "d d"] | None = None,
    causal: bool = False,
    dt: Positive = 0.05,
    steps: FromZero = 400,
    every: PositiveCount = 10,
    linked: Cosine = 0.99,
) -> xr.Dataset:
    """Trajectories of tokens on the sphere under `flow`: positions, cosines between them, potential and clusters.

    Args:
        x: [n, d], the tokens at time 0, two at least; they are scaled to the sphere.
        qk: [d, d], P = Q^T K.
        ov: [d, d], U^T, so that a token moves by `x @ ov`.
        ellipsoid: [d, d], W as in `flow`; None: the sphere.
        causal: token i sees tokens 0..i.
        dt: time of a step.
        steps: number of steps.
        every: steps between two times that are kept; the last is kept too.
        linked: cosine above which two tokens count as one cluster.

    Returns:
        Dataset[time, score]. On an ellipsoid a cosine is x^T W y. `value` has exact numbers of one start (`low` and
        `high` are `value`, `n` is 0), of the scores

        - `min_cosine`, `mean_cosine`: over pairs of tokens.
        - `to_first_start`: mean cosine with the start of the first token.
        - `potential`: E = 1 / (2 n^2) sum_ij exp(x_i^T P x_j), beta times the interaction energy of Geshkovski et al.
          for P = beta 1. Where P is symmetric, W U = c P with c > 0 and nothing is masked, the motion never lowers
          it: dE/dt = sum_i Z_i / (c n^2) |x_i'|^2, Z_i the softmax's denominator. `attrs["climbs"]` is 1 if that is
          so, else 0: E may fall.
        - `clusters`: how many groups of tokens are linked by cosines above `linked`.

        And `position` [time, token, axis], the tokens; `ellipsoid` [axis, other_axis], the matrix W.

    Raises:
        ValueError: fewer than two tokens, every < 1, or as `flow`.

    Source:
        Geshkovski et al. 2023 (arXiv:2312.10794, section 3).

    Example:
        >>> x = torch.tensor([[1.0, 0.1], [1.0, -0.3], [0.9, 0.2]])
        >>> way = trajectories(x, qk=torch.eye(2), ov=torch.eye(2), steps=400, every=100)
        >>> way.position.sizes["time"], bool(way.value.sel(score="potential").diff("time").min() > -1e-6)
        (5, True)
    """
    motion = Motion.of(x, qk, ov, ellipsoid, causal, dt)
    if len(x) < 2 or every < 1:
        raise ValueError(f"x must hold two tokens or more, and every be 1 or more, got {len(x)} and {every}")
    kept = [(i, at) for i, at in enumerate(motion.path(x, steps)) if i % every == 0 or i == steps]
    motion.on_surface(kept[-1][1])
    x_tnd = torch.stack([at for _, at in kept])
    found = motion.measured(x_tnd, linked)
    return scored(
        "trajectories",
        {name: Score.exact(value.cpu(), UNITS[name]) for name, value in found.items()},
        ("time",),
        coords={"time": [i * dt for i, _ in kept]},
        others={
            "position": (("time", "token", "axis"), x_tnd),
            "ellipsoid": (("axis", "other_axis"), motion.metric),
        },
        attrs={
            "climbs": int(motion.climbs),
            "dt": dt,
            "linked": linked,
            "null": "min_cosine = 1: all tokens met",
        },
    )


@dataclass(frozen=True, eq=False)
class Motion:
    """The equation of motion of one head."""

    qk: Float[Tensor, "d d"]
    ov: Float[Tensor, "d d"]
    ellipsoid: Float[Tensor, "d d"] | None
    hidden: Bool[Tensor, "n n"] | None
    """Which keys a query does not see; None: it sees all."""
    dt: float

    @classmethod
    def of(
        cls,
        x: Float[Tensor, "n d"],
        qk: Float[Tensor, "d d"],
        ov: Float[Tensor, "d d"],
        ellipsoid: Float[Tensor, "d d"] | None,
        causal: bool,
        dt: float,
    ) -> Motion:
        """The motion of these tokens.

        Raises:
            ValueError: as `flow`.
        """
        if not bool(x.isfinite().all()) or not bool(x.norm(dim=-1).gt(0).all()):
            raise ValueError(f"finite tokens other than 0 are required, got {shape_text(x.shape)}")
        for name, matrix in {"qk": qk, "ov": ov, "ellipsoid": ellipsoid}.items():
            if matrix is not None and matrix.shape != (x.shape[-1], x.shape[-1]):
                raise ValueError(
                    f"{name} must have the width of x on both sides, {x.shape[-1]}, got {shape_text(matrix.shape)}"
                )
            if matrix is not None and matrix.dtype != x.dtype:
                raise ValueError(f"{name} must be of the dtype of x, {x.dtype}, got {matrix.dtype}")
            if matrix is not None and name != "ellipsoid" and not bool(matrix.isfinite().all()):
                raise ValueError(f"{name} must have finite numbers, got NaN or infinite ones")
        if ellipsoid is not None and not _positive_definite(ellipsoid):
            raise ValueError("ellipsoid must be symmetric and positive definite")
        hidden = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1) if causal else None
        return cls(qk.to(x), ov.to(x), None if ellipsoid is None else ellipsoid.to(x), hidden, dt)

    def path(self, x: Float[Tensor, "n d"], steps: int) -> Iterator[Float[Tensor, "n d"]]:
        """Where the tokens are at the start and after each of these steps."""
        x = self.back(x)
        yield x
        for _ in range(steps):
            x = self.back(x + self.dt * self.speed(x))
            yield x

    def speed(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """x', tangent to the surface at every token."""
        scores = x @ self.qk @ x.mT
        if self.hidden is not None:
            scores = scores.masked_fill(self.hidden, -torch.inf)
        pull = scores.softmax(-1) @ x @ self.ov
        return pull - self._product(pull, x) * x

    def back(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Every token along its ray to the surface."""
        return F.normalize(x, dim=-1) if self.ellipsoid is None else x / self._product(x, x).sqrt()

    def on_surface(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """The tokens themselves. ValueError for some that numbers too large for the dtype threw off the surface."""
        if not bool(((self._product(x, x) - 1).abs() < 0.5).all()):
            raise ValueError(
                f"finite matrices and a dt with which {x.dtype} can compute are required: the tokens have left the "
                f"surface, with dt={self.dt}, qk up to {float(self.qk.abs().max()):g} and ov up to "
                f"{float(self.ov.abs().max()):g}"
            )
        return x

    def measured(self, x_tnd: Float[Tensor, "t n d"], linked: float) -> dict[str, Float[Tensor, "t"]]:
        """The numbers of `UNITS` at every time."""
        cosine = x_tnd @ self.metric @ x_tnd.mT
        pairs = torch.ones_like(cosine[0], dtype=torch.bool).triu(1)
        return {
            "min_cosine": cosine[:, pairs].amin(1),
            "mean_cosine": cosine[:, pairs].mean(1),
            "to_first_start": (x_tnd[:, 1:] @ self.metric @ x_tnd[0, 0]).mean(1),
            "potential": (x_tnd @ self.qk @ x_tnd.mT).exp().mean((1, 2)) / 2,
            "clusters": linked_groups(cosine > linked).to(x_tnd),
        }

    def _product(self, x: Float[Tensor, "n d"], y: Float[Tensor, "n d"]) -> Float[Tensor, "n 1"]:
        left = x if self.ellipsoid is None else x @ self.ellipsoid
        return (left * y).sum(-1, keepdim=True)

    @property
    def metric(self) -> Float[Tensor, "d d"]:
        """W, the identity on the sphere."""
        return torch.eye(len(self.qk)).to(self.qk) if self.ellipsoid is None else self.ellipsoid

    @property
    def climbs(self) -> bool:
        """Whether the potential cannot fall: P symmetric, W U = c P with c > 0, no mask."""
        pull = self.metric @ self.ov.mT
        factor = (pull * self.qk).sum() / self.qk.square().sum()
        reach = ROUNDINGS * torch.finfo(self.qk.dtype).eps * self.qk.norm()
        one = (pull - factor * self.qk).norm() <= factor * reach
        return (
            self.hidden is None and bool(factor > 0) and bool(one & ((self.qk - self.qk.mT).norm() <= reach))
        )


def _positive_definite(matrix: Float[Tensor, "d d"]) -> bool:
    """Whether a matrix is symmetric, to the rounding of a product such as A A^T, and positive definite."""
    reach = ROUNDINGS * torch.finfo(matrix.dtype).eps * matrix.norm()
    return (
        bool(matrix.isfinite().all())
        and bool((matrix - matrix.mT).norm() <= reach)
        and not int(torch.linalg.cholesky_ex(matrix).info)
    )


def linked_groups(linked: Bool[Tensor, "t n n"]) -> Int[Tensor, "t"]:
    """How many groups of tokens there are at each time, two tokens in one group if links lead from one to the other.

    Example:
        >>> linked_groups(torch.tensor([[[1, 1, 0], [1, 1, 0], [0, 0, 1]]]).bool())
        tensor([2])
    """
    from scipy.sparse.csgraph import connected_components

    each = [connected_components(one, directed=False)[0] for one in linked.cpu().numpy()]
    return torch.tensor(each)
