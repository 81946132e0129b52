"""A run on Ray gives the bits of one in this process, also when an actor is killed at work; readers keep a CPU."""

from pathlib import Path

import pytest

from interp.runs.ray_engine import READERS, _pool_options
from tests.runs.killing import alone

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'ray[data]'")
pytest.importorskip("ray.data", reason="ray.data is not installed: pip install 'ray[data]'")
PATIENCE = 180.0
"""Seconds after which the cluster counts as stuck; it takes about 20 on two cores."""


def test_two_actors_give_the_bits_of_one_process_though_one_is_killed(tmp_path: Path) -> None:
    code, said = alone(["-m", "tests.runs.killing", str(tmp_path)], PATIENCE)
    assert code == 0, said


@pytest.mark.parametrize("cpus", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("actors", [None, 2, 5])
def test_the_pool_leaves_the_readers_a_cpu(cpus: int, actors: int | None) -> None:
    pool = _pool_options({"CPU": float(cpus)}, 1000, actors)
    taken = pool["compute"].min_size * pool["num_cpus"]
    assert taken <= max(cpus - READERS, cpus / 2) and pool["num_cpus"] <= 1
    assert actors is None or pool["compute"].min_size == actors
    assert cpus < 3 or actors or taken == cpus - READERS, "all others are at work"


def test_there_are_no_more_actors_than_windows_and_one_for_each_gpu() -> None:
    assert _pool_options({"CPU": 64.0}, 3, None)["compute"].min_size == 3
    pool = _pool_options({"CPU": 64.0, "GPU": 8.0}, 1000, None)
    assert pool["compute"].min_size == 8 and pool["num_gpus"] == 1
