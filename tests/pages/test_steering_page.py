"""The page of a steering curve: its numbers and its lines are those of the result, and it opens anywhere."""

import re
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import xarray as xr

from interp.causal import Subspace, steering_curve
from interp.hooked import HookedTransformer
from interp.pages import steering_page
from interp.pages.steering_page import HEIGHT, WIDTH
from interp.passes.metrics import logit_difference
from tests.pages.looks import faults
from tests.pages.visits import needs_browser, visit

if TYPE_CHECKING:
    from playwright import sync_api

STRENGTHS = [2.0, -1.0, 0.0]


@pytest.fixture(scope="module")
def curve() -> xr.Dataset:
    model = HookedTransformer.from_pretrained("groundtruth-induction")
    tokens = torch.randint(1, 60, (20, 8), generator=torch.Generator().manual_seed(0))
    vectors = torch.randn(2, 1, model.cfg.d_model, generator=torch.Generator().manual_seed(1))
    unembedding = model.transformer.unembed.weight
    vectors[1] = 3 * (unembedding[5] - unembedding[6])  # what the metric reads, as no random direction does
    each = [Subspace(f"blocks.{layer}.hook_resid_post", vectors[layer]) for layer in (0, 1)]
    return steering_curve(
        model, tokens, each, strengths=STRENGTHS, metric=logit_difference(5, 6), random=39, loss_on=tokens[:4]
    )


def test_tables_hold_every_number_and_mark_what_no_random_direction_does(curve: xr.Dataset) -> None:
    page = steering_page(curve)
    for score in ("effect", "kl", "loss"):
        section = page.partition(f'<section id="{score}">')[2].partition("</section>")[0]
        rows = re.findall(
            r'<tr( class="outside")?><th scope="row">(\d)</th>((?:<td>.*?</td>)+)</tr>', section
        )
        assert len(rows) == 6
        for outside, layer, cells in rows:
            strength, value, _, band, p = (
                unescape(cell).replace("−", "-") for cell in re.findall(r"<td>(.*?)</td>", cells)
            )
            one = curve.sel(score=score, layer=int(layer), strength=float(strength))
            assert float(value) == pytest.approx(float(one.value), abs=6e-4)
            assert float(p) == pytest.approx(float(one.p), abs=6e-4)
            low, high = one.band.values
            assert [float(end) for end in band.split(" to ")] == pytest.approx([low, high], abs=6e-4)
            assert bool(outside) == bool((one.value < low) | (one.value > high))
    assert 'class="outside"' in page


def test_the_lines_are_the_values_on_one_scale_in_order_of_strength(curve: xr.Dataset) -> None:
    effect = curve.sel(score="effect").sortby("strength")
    ends = np.concatenate([effect[name].values.ravel() for name in ("value", "low", "high", "band")])
    low, high = min(0.0, np.nanmin(ends)), max(0.0, np.nanmax(ends))
    section = steering_page(curve).partition('<section id="effect">')[2].partition("</section>")[0]
    for layer, line in enumerate(re.findall(r'class="curve" points="(.*?)"', section)):
        points = np.array([[float(x) for x in point.split(",")] for point in line.split()])
        assert points[:, 0] == pytest.approx(WIDTH * (np.sort(STRENGTHS) + 1) / 3, abs=0.06)
        values = high - points[:, 1] / HEIGHT * (high - low)
        assert values == pytest.approx(effect.value.sel(layer=layer).values, abs=1e-3 * (high - low))


def test_another_result_is_refused(curve: xr.Dataset) -> None:
    with pytest.raises(
        ValueError, match=r"result must be a result of interp\.causal\.steering_curve, which has band"
    ):
        steering_page(curve.drop_vars("band"))


@needs_browser
@pytest.mark.parametrize("width", [400, 1400])
def test_it_fits_its_window_and_fetches_nothing(
    width: int, curve: xr.Dataset, tmp_path: Path, browser: "sync_api.Browser"
) -> None:
    (tmp_path / "index.html").write_text(steering_page(curve), encoding="utf-8")
    seen = visit(browser, tmp_path, width)
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    overflow, panels = seen.page.evaluate(wide), seen.page.locator(".panels svg").count()
    assert faults(seen.page) == []
    seen.page.close()
    assert overflow <= 0 and panels == 6
    assert seen.complaints == []
    assert all(url.startswith(("file://", "data:")) for url in seen.requests)
