"""The picture of a score's pairs of parts shows the numbers it was given and names them."""

from collections.abc import Iterator

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest

from interp import plot
from interp.attention import attention_attribution
from tests.configs import build, some_tokens


@pytest.fixture(autouse=True)
def _no_figures_left() -> Iterator[None]:
    mpl.use("agg")
    yield
    plt.close("all")


def test_every_pair_is_a_named_cell() -> None:
    result = attention_attribution(build("gpt2"), some_tokens(2), "L1H2", query=6, key=3)
    ax = plot.attention_attribution(result, prompt=1)
    (image,) = ax.images
    np.testing.assert_allclose(np.asarray(image.get_array()), result.value[1])
    assert [t.get_text() for t in ax.get_yticklabels()] == result.query_part.values.tolist()
    assert [t.get_text() for t in ax.get_xticklabels()] == result.key_part.values.tolist()
    assert ax.get_xlabel() == "part at the key" and ax.get_ylabel() == "part at the query"
    assert ax.get_title().startswith("L1H2 from 6 to 3: score ")
    low, high = image.get_clim()
    assert low == -high


def test_only_the_largest_parts_are_drawn() -> None:
    result = attention_attribution(build("gpt2"), some_tokens(2), "L1H2", key=3, by="head")
    values = abs(result.value[0].values)
    ax = plot.attention_attribution(result, top=3)
    for names, dim, axis in (
        (ax.get_yticklabels(), "query_part", 1),
        (ax.get_xticklabels(), "key_part", 0),
    ):
        largest = result[dim].values[np.argsort(-values.max(axis))[:3]].tolist()
        assert {t.get_text() for t in names} == set(largest)
    with pytest.raises(IndexError):
        plot.attention_attribution(result, prompt=2)
