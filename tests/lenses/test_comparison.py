"""Lenses compared: by hand, position by position, against what `logit_lens` says of each of them."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr

import interp
from interp import HookedTransformer, plot
from interp.core.stats import share_interval
from interp.lenses import CompareLenses, TunedLens, compare_lenses, jacobian_lens
from interp.lenses.lens import Translators
from tests.batches import in_batches
from tests.configs import build, some_tokens
from tests.tiny import CORPUS, hooked
from tests.tolerances import student95

TEXTS = [*CORPUS, *(text[: len(text) // 2] for text in CORPUS)]


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return hooked("llama-gqa")


@pytest.fixture(scope="module")
def fits(model: HookedTransformer) -> tuple[Translators, Translators]:
    return tuple(jacobian_lens(model, TEXTS[i::2], skip=1, precision=None) for i in (0, 1))  # type: ignore[return-value]


def by_hand(
    model: HookedTransformer, lens: Translators | None, other: Translators | None = None
) -> dict[str, np.ndarray]:
    """Every prompt's scores at every depth, from its own lens alone."""
    rows: dict[str, list[np.ndarray]] = {"kl": [], "cross_entropy": [], "top_agreement": [], "stability": []}
    for text in TEXTS:
        found = interp.logit_lens(model, text, sites="resid_post", translators=lens).isel(prompt=0)
        top = found.top_token.isel(rank=0).values
        rows["kl"].append(found.kl.mean("pos").values)
        rows["cross_entropy"].append((found.kl + found.entropy.isel(depth=-1)).mean("pos").values)
        rows["top_agreement"].append((top == top[-1]).mean(1))
        if other is not None:
            again = interp.logit_lens(model, text, sites="resid_post", translators=other).isel(prompt=0)
            rows["stability"].append((top == again.top_token.isel(rank=0).values).mean(1))
    return {name: np.stack(values) for name, values in rows.items() if values}


def test_every_score_is_that_of_the_lenses_one_by_one(
    model: HookedTransformer, fits: tuple[Translators, Translators]
) -> None:
    first, second = fits
    found = compare_lenses(
        model,
        in_batches(model, TEXTS, 3),
        {"logit lens": None, "Jacobian lens": first},
        others={"Jacobian lens": second},
    )
    n = len(TEXTS)
    for name, scores in {
        "logit lens": by_hand(model, None), "Jacobian lens": by_hand(model, first, second)
    }.items():  # fmt: skip
        for score, rows in scores.items():
            cells = found.sel(lens=name, score=score)
            np.testing.assert_allclose(cells.value, rows.mean(0), rtol=1e-4, atol=1e-6)
            assert bool((cells.n == n).all())
            if score == "kl" and n < 16:
                assert bool(cells.low.isnull().all())
                continue
            high = rows.mean(0) + student95(n) * rows.std(0, ddof=1) / n**0.5
            if score in ("top_agreement", "stability"):
                high = share_interval(
                    *(torch.from_numpy(x) for x in (rows.mean(0), np.array(n), rows.var(0)))
                )[1]
            np.testing.assert_allclose(cells.high, high, rtol=1e-3, atol=1e-6)
    assert bool(found.value.sel(lens="logit lens", score="stability").isnull().all())
    assert found.depth.values.tolist() == ["L0.resid_post", "L1.resid_post"]


def test_the_last_depth_is_the_model_s_own_answer(
    model: HookedTransformer, fits: tuple[Translators, Translators]
) -> None:
    found = compare_lenses(model, TEXTS, {"a": fits[0]}, others={"a": fits[1]}).isel(depth=-1, lens=0).value
    assert found.sel(score=["kl", "top_agreement", "stability"]).values.tolist() == [0, 1, 1]


def test_a_lens_is_stable_against_itself(model: HookedTransformer) -> None:
    tuned = TunedLens.untrained(model, sites="resid_post")
    found = compare_lenses(model, TEXTS, {"tuned": tuned, "logit": None}, others={"tuned": tuned})
    assert bool((found.value.sel(lens="tuned", score="stability") == 1).all())
    xr.testing.assert_allclose(
        found.value.sel(lens="tuned", score="kl", drop=True),
        found.value.sel(lens="logit", score="kl", drop=True),
    )


def test_what_makes_no_sense_is_refused(
    model: HookedTransformer, fits: tuple[Translators, Translators]
) -> None:
    with pytest.raises(ValueError, match="lenses requires at least one"):
        compare_lenses(model, TEXTS, {})
    with pytest.raises(KeyError, match="another fit of 'b' requires that lens; there are a"):
        compare_lenses(model, TEXTS, {"a": None}, others={"b": fits[0]})
    with pytest.raises(ValueError, match="another model"):
        compare_lenses(HookedTransformer(build("llama-gqa")), some_tokens(), {"a": fits[0]})


def test_it_is_a_question_like_any_other(model: HookedTransformer) -> None:
    found = interp.run([CompareLenses({"logit lens": None})], model, TEXTS)["compare_lenses"]
    assert set(found.score.values) == {"kl", "cross_entropy", "top_agreement", "stability"}


def test_it_is_drawn_a_line_for_each_lens(
    model: HookedTransformer, fits: tuple[Translators, Translators]
) -> None:
    found = compare_lenses(model, TEXTS, {"logit": None, "jacobian": fits[0]}, others={"jacobian": fits[1]})
    ax = plot.lens_comparison(found)
    for line, lens in zip(ax.lines, found.lens.values, strict=True):
        np.testing.assert_allclose(
            np.asarray(line.get_ydata()), found.value.sel(lens=lens, score="cross_entropy").values
        )
    assert [line.get_label() for line in plot.lens_comparison(found, "stability").lines] == ["jacobian"]
    with pytest.raises(KeyError, match="no score 'kll' of lenses; nearest: kl"):
        plot.lens_comparison(found, "kll")
    assert found.view.plot() is not None
    plt.close("all")
