"""What all tests of plots need: a back end without windows, and no figure left over for the next test."""

from collections.abc import Iterator

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest


@pytest.fixture(autouse=True)
def _no_figures_left() -> Iterator[None]:
    mpl.use("agg")
    yield
    plt.close("all")
