"""Tokens under attention alone: the equation of motion, closed forms of its angles and potential, the ellipsoid."""

import itertools

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from interp.lab.depth import flow, trajectories

N, D = 10, 3
EYE = torch.eye(D, dtype=torch.float64)


def on_sphere(seed: int, *, hemisphere: bool) -> Tensor:
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = x / x.norm(dim=1, keepdim=True)
    return torch.cat((x[:, :1].abs().clamp_min(0.05), x[:, 1:]), 1) if hemisphere else x


def symmetric(seed: int) -> Tensor:
    half = torch.randn(D, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return half @ half.T + EYE


@pytest.mark.parametrize("seed", range(3))
def test_from_a_hemisphere_all_tokens_meet(seed: int) -> None:
    start = on_sphere(seed, hemisphere=True)
    end = flow(start, qk=symmetric(seed), ov=EYE)
    assert float((start @ start.T).min()) < 0.5
    assert float((end @ end.T).min()) > 0.9999


@pytest.mark.parametrize("seed", range(3))
def test_tokens_under_a_causal_mask_go_to_the_first_which_does_not_move(seed: int) -> None:
    start = on_sphere(seed, hemisphere=False)
    end = flow(start, qk=EYE, ov=EYE, causal=True)
    assert float((end @ start[0]).min()) > 0.9999 > float((start @ start[0]).min())
    torch.testing.assert_close(end[0], start[0], rtol=0, atol=1e-12)


def test_a_step_of_the_flow_is_the_equation_of_motion() -> None:
    x, dt = on_sphere(0, hemisphere=False), 1e-6
    g = torch.Generator().manual_seed(5)
    qk, u = (torch.randn(D, D, generator=g, dtype=torch.float64) for _ in range(2))
    speed = (flow(x, qk=qk, ov=u.T, dt=dt, steps=1) - x) / dt
    for i in range(N):
        weights = torch.stack([(x[i] @ qk @ x[j]).exp() for j in range(N)])
        pull = u @ sum(w * x[j] for j, w in enumerate(weights / weights.sum()))
        torch.testing.assert_close(speed[i], pull - (pull @ x[i]) * x[i], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sharpness", [1.0, 5.0])
def test_angle_of_equally_distant_tokens_closes_as_its_equation_says(sharpness: float) -> None:
    """Tokens that all have one cosine g keep having one: g' = 2 e^(bg) (1 - g) (1 + (n-1) g) / (e^b + (n-1) e^(bg))."""
    n, time = 6, 4.0
    eye = torch.eye(n, dtype=torch.float64)

    def slope(_: float, g: np.ndarray) -> np.ndarray:
        near = np.exp(sharpness * g)
        return 2 * near * (1 - g) * (1 + (n - 1) * g) / (np.exp(sharpness) + (n - 1) * near)

    exact = float(solve_ivp(slope, (0, time), [0.0], rtol=1e-11, atol=1e-12).y[0, -1])
    errors = []
    for steps in (400, 800):
        way = trajectories(eye, qk=sharpness * eye, ov=eye, dt=time / steps, steps=steps, every=steps)
        found = way.value.sel(score=["min_cosine", "mean_cosine"]).isel(time=-1).values
        assert found[0] == pytest.approx(found[1], abs=1e-12)
        errors.append(abs(found[0] - exact))
    assert 0.05 < exact < 0.999 and errors[0] < 0.01
    assert errors[0] / errors[1] == pytest.approx(2, abs=0.1)  # Euler's order


def energy(x: Tensor, qk: Tensor) -> float:
    pairs = itertools.product(range(len(x)), repeat=2)
    return float(sum((x[i] @ qk @ x[j]).exp() for i, j in pairs)) / (2 * len(x) ** 2)


@pytest.mark.parametrize("curved", [False, True])
def test_the_potential_rises_by_the_squared_speeds(curved: bool) -> None:
    x, qk, dt = on_sphere(4, hemisphere=False), symmetric(1), 1e-6
    metric = symmetric(2) if curved else EYE
    ov = (0.7 * torch.linalg.inv(metric) @ qk).T  # W U = 0.7 P
    way = trajectories(x, qk=qk, ov=ov, ellipsoid=metric if curved else None, dt=dt, steps=1, every=1)
    begin, end = (torch.tensor(way.position[i].values) for i in (0, 1))
    assert float(way.value.sel(score="potential")[0]) == pytest.approx(energy(begin, qk))
    speed = (end - begin) / dt
    z = (begin @ qk @ begin.T).exp().sum(1)
    rise = float((z * (speed @ metric * speed).sum(1)).sum() / (0.7 * N**2))
    slope = (energy(end, qk) - energy(begin, qk)) / dt
    assert way.attrs["climbs"] == 1 and slope == pytest.approx(rise, rel=1e-4)


def test_where_the_potential_need_not_rise_the_result_says_so() -> None:
    x = on_sphere(0, hemisphere=False)
    skew = EYE + torch.tensor([[0, 1.0, 0], [-1, 0, 0], [0, 0, 0]], dtype=torch.float64)
    asked = ({"qk": skew, "ov": skew}, {"qk": EYE, "ov": -EYE}, {"qk": EYE, "ov": EYE, "causal": True})
    for each in asked:
        assert trajectories(x, steps=2, **each).attrs["climbs"] == 0  # type: ignore[arg-type]
    falls = trajectories(x, qk=EYE, ov=-EYE).value.sel(score="potential")
    assert (falls.diff("time") <= 0).all() and float(falls[0] - falls[-1]) > 0.05


def test_an_ellipsoid_is_a_sphere_in_other_coordinates() -> None:
    metric, g = symmetric(7), torch.Generator().manual_seed(2)
    values, vectors = torch.linalg.eigh(metric)
    root, back = (vectors @ torch.diag(values**p) @ vectors.T for p in (0.5, -0.5))
    qk, u = (torch.randn(D, D, generator=g, dtype=torch.float64) for _ in range(2))
    x = on_sphere(1, hemisphere=False)
    curved = trajectories(x, qk=qk, ov=u.T, ellipsoid=metric, steps=200)
    round_ = trajectories(x @ root, qk=back @ qk @ back, ov=(root @ u @ back).T, steps=200)
    np.testing.assert_allclose(curved.position.values @ root.numpy(), round_.position, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(curved.value, round_.value, rtol=1e-8, atol=1e-10)
    on = np.einsum("tni, ij, tnj -> tn", curved.position, metric, curved.position)
    np.testing.assert_allclose(on, 1, rtol=1e-12)


def test_way_ends_where_the_flow_does_with_the_clusters_of_a_slow_walk() -> None:
    x = on_sphere(3, hemisphere=False)
    way = trajectories(x, qk=20 * EYE, ov=EYE, dt=0.02, steps=205, every=50, linked=0.9)
    np.testing.assert_allclose(way.time, [0, 1, 2, 3, 4, 4.1])
    end = flow(x, qk=20 * EYE, ov=EYE, dt=0.02, steps=205)
    np.testing.assert_array_equal(way.position[-1], end)
    for at, count in zip(way.position.values, way.value.sel(score="clusters").values, strict=True):
        groups: list[set[int]] = []
        for i in range(N):
            near = [group for group in groups if any(at[i] @ at[j] > 0.9 for j in group)]
            groups = [each for each in groups if each not in near] + [{i}.union(*near)]
        assert count == len(groups)
    assert (
        way.value.sel(score="clusters").values.tolist()
        == sorted(way.value.sel(score="clusters").values)[::-1]
    )
    first = [float(np.mean(at[1:] @ x[0].numpy())) for at in way.position.values]
    np.testing.assert_allclose(way.value.sel(score="to_first_start"), first)


def test_ellipsoid_may_be_symmetric_to_rounding_as_a_product_is() -> None:
    metric, x = symmetric(7), on_sphere(1, hemisphere=False)
    rounded = metric.clone()
    rounded[0, 1] = torch.nextafter(metric[0, 1], torch.tensor(torch.inf, dtype=torch.float64))
    assert not torch.equal(rounded, rounded.mT)
    found, expected = (
        trajectories(x, qk=EYE, ov=EYE, ellipsoid=each, steps=20) for each in (rounded, metric)
    )
    np.testing.assert_allclose(found.position, expected.position, rtol=1e-9, atol=1e-9)


NAN, INF = float("nan"), float("inf")
SENSELESS = {
    "dt": (1e300, "dt must be a number above 0"),
    "qk": (INF * torch.ones(3, 3), "qk must have finite numbers"),
    "ov": (NAN * torch.eye(3), "ov must have finite numbers"),
    "x": (torch.full((3, 3), 1e30), "the tokens have left the surface"),
    "steps": (-1, "steps must be a whole number from 0"),
    "every": (0, "every must be a whole number from 1"),
    "linked": (10.0, "linked must be a number from -1 to 1, got 10.0"),
}


@pytest.mark.parametrize("name", SENSELESS)
def test_a_setting_under_which_no_token_stays_is_refused_by_name(name: str) -> None:
    value, message = SENSELESS[name]
    given = {"x": torch.eye(3), "qk": torch.eye(3), "ov": torch.eye(3), "steps": 3, name: value}
    for ask in (flow, trajectories) if name not in ("every", "linked") else (trajectories,):
        with pytest.raises(ValueError, match=message):
            ask(**given)
    with pytest.raises(ValueError, match="linked must be"):
        trajectories(torch.eye(3), qk=torch.eye(3), ov=torch.eye(3), linked=NAN)


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="finite tokens other than 0"):
        flow(torch.zeros(2, 3), qk=torch.eye(3), ov=torch.eye(3))
    for dt in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match=f"dt must be a number above 0, .*got {dt}"):
            flow(torch.ones(2, 3), qk=torch.eye(3), ov=torch.eye(3), dt=dt)
    with pytest.raises(ValueError, match="ellipsoid must be symmetric and positive definite"):
        flow(torch.ones(2, 3), qk=torch.eye(3), ov=torch.eye(3), ellipsoid=-torch.eye(3))
    with pytest.raises(ValueError, match="ellipsoid must be symmetric and positive definite"):
        flow(
            torch.ones(2, 3),
            qk=EYE.float(),
            ov=EYE.float(),
            ellipsoid=torch.eye(3) + torch.eye(3)[[1, 2, 0]] / 1000,
        )
    with pytest.raises(ValueError, match="two tokens or more"):
        trajectories(torch.ones(1, 3), qk=torch.eye(3), ov=torch.eye(3))


@pytest.mark.kinds
def test_matrices_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ov must have the width of x on both sides, 3, got \[2, 2\]"):
        flow(torch.ones(2, 3), qk=torch.eye(3), ov=torch.eye(2))
