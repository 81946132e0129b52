"""Without the package ray, asking for its engine says which package to install."""

import sys

import pytest

import interp
from tests.tiny import hooked


def test_the_engine_ray_without_the_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ImportError, match=r"engine='ray' requires the package ray: pip install 'ray\[data\]'"
    ):
        interp.run([interp.lenses.LogitLens()], hooked(), ["The cat sat"], engine="ray")
