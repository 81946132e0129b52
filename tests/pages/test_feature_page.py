"""The page of features: every number of the result, nothing that breaks out, nothing fetched, all by keyboard."""

import re
from functools import cache
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import xarray as xr

from interp.features import Dictionary, ReLU, feature_cards
from interp.pages import feature_page
from interp.pages.feature_page import ATTRIBUTES
from tests.features.dictionary_cases import random_weights
from tests.pages.looks import faults
from tests.pages.visits import needs_browser, visit
from tests.tiny import hooked

if TYPE_CHECKING:
    from playwright import sync_api

TEXTS = [
    "The cat sat on the mat and the dog sat on Mary.",
    "John gave a drink to Mary.",
    "When Mary went, <b>it</b> sat.",
]
EVIL = "<script>alert(1)</script>\u202e\n"
FEATURES = [3, 0, 17]


@cache
def cards(site: str = "blocks.1.hook_resid_post") -> xr.Dataset:
    dictionary = Dictionary(ReLU(), random_weights(ReLU(), 24, 40), reads=site)
    return feature_cards(hooked("gpt2"), TEXTS, dictionary, features=FEATURES, top=3, context=(4, 2))


@cache
def with_effects() -> xr.Dataset:
    site = "blocks.1.attn.hook_z"
    dictionary = Dictionary(ReLU(), random_weights(ReLU(), 24, 40), reads=site)
    return feature_cards(
        hooked("gpt2"),
        TEXTS,
        dictionary,
        features=FEATURES,
        top=3,
        context=(1, 2),
        dfa=True,
        loss_effect=True,
    )


def article(page: str, feature: int) -> str:
    """The card of one feature, without the random direction's."""
    found = re.search(
        rf'<article class="card" id="feature-{feature}">(.*?)<details class="null">', page, re.DOTALL
    )
    assert found is not None
    return found[1]


def test_every_feature_has_a_line_in_the_list_and_a_card() -> None:
    page = feature_page(cards())
    links = re.findall(r'<li><a href="#(feature-\d+)"><span>(\d+)</span>', page)
    assert links == [(f"feature-{i}", str(i)) for i in FEATURES]
    assert re.findall(r'<article class="card" id="feature-(\d+)">', page) == [str(i) for i in FEATURES]


@pytest.mark.parametrize("feature", FEATURES)
def test_a_card_has_the_numbers_of_its_feature(feature: int) -> None:
    card, one = article(feature_page(cards()), feature), cards().sel(feature=feature, source="dictionary")
    heights = re.findall(r"<title>([^<]*): (\d+) tokens</title>", card)
    assert [int(n) for _, n in heights] == [n for n in one.counts.values.tolist() if n]
    facts = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*) <small>", card))
    density, largest = (float(one.value.sel(score=score)) for score in ("density", "max"))
    assert facts["active on"] == f"{100 * density:.3g} %" and facts["largest"] == f"{largest:.3g}"
    words = [unescape(word) for word in re.findall(r'<span class="tok">([^<]*)</span><b>', card)]
    assert len(words) == 20
    for name, tip in (("neighbour", "cosine"), ("partner", "correlation"), ("neuron", "alignment")):
        label = "L1N" if name == "neuron" else "feature "
        for i, value in zip(one[name].values, one[tip].values, strict=True):
            shown = f"{value:.2g}".replace("-", "−")
            if value != value:
                assert f">{label}{i}<" not in card.split("Active together")[1].split("<h4>")[0]
                continue
            assert re.search(rf">{label}{i}</(span|a)><b>{re.escape(shown)}</b>", card), (name, i)


def test_examples_are_shaded_by_their_share_of_the_largest_activation() -> None:
    card, one = article(feature_page(cards()), 3), cards().sel(feature=3, source="dictionary")
    values = re.findall(r"<li><b>([^<]*)</b><span class=\"run\">", card)
    top = [f"{x:.3g}" for x in one.peak.values if x == x]
    assert values[: len(top)] == top
    assert len(values) == len(top) + int((one.group_row >= 0).sum())
    assert re.findall(r'class="at[^"]*" style="--v:([^"]*)"', card)[0] == "1.0"


def test_features_that_have_a_card_are_links() -> None:
    page = feature_page(cards())
    linked = set(re.findall(r'<li class="" style="[^"]*"><a href="#feature-(\d+)">', page))
    assert linked and linked <= {str(i) for i in FEATURES}


def test_the_heads_of_a_dictionary_of_attention_are_shown_and_notes_stand_first() -> None:
    page = feature_page(cards("blocks.1.attn.hook_z").assign_attrs(notes=["so many are left out"]))
    assert page.count("<h4>Heads") == 2 * len(FEATURES)
    assert page.index("so many are left out") < page.index("stands a random direction")


@pytest.mark.parametrize("feature", FEATURES[:2])
def test_top_examples_say_where_they_come_from_and_what_the_loss_is_without_the_feature(feature: int) -> None:
    card, one = article(feature_page(with_effects()), feature), with_effects().sel(feature=feature)
    own = one.sel(source="dictionary")
    lines = re.findall(r'<span class="run signed sources">(.*?)</li>', card)
    there = [own.isel(rank=i) for i in range(3) if int(own.row[i]) >= 0]
    assert len(lines) == len(there) > 0
    for line, entry in zip(lines, there, strict=True):
        marks = re.findall(r'style="--v:([^"]*)" title="([^"]*)">([^<]*)<', line)
        beyond = float(entry.dfa_outside.sum())
        by_token = entry.dfa.sum("head").values[entry.tokens.values >= 0]
        every = [beyond, *by_token] if beyond else list(by_token)
        assert len(marks) == len(every) and (marks[0][2] == "…") == bool(beyond)
        for (level, tip, _), value in zip(marks, every, strict=True):
            assert float(level) == pytest.approx(abs(value) / max(map(abs, every)), abs=6e-4)
            assert f"{value:.3g}".replace("-", "−") in tip and re.search(r"through H\d$", tip)
    losses = [f"{x:+.2g}".replace("-", "−") for x in own.loss_effect.values if x == x]
    assert [x for x in re.findall(r">loss (\S*)</span>", card) if x != "–"] == losses
    scores = one.sel(score="loss_effect")
    facts = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*) <small>", card))
    shown = f"{float(scores.value):+.2g} nats".replace("-", "−")
    assert facts["loss without it"] == ("–" if scores.value.isnull() else shown)
    brought = (own.dfa.sum("offset") + own.dfa_outside).where(own.row >= 0).mean("rank")
    table = card.split("Heads that bring it")[1].split("</ol>")[0]
    shown_heads = re.findall(r"<span>H(\d)</span><b>([^<]*)</b>", table)
    assert shown_heads == [(str(i), f"{x:.3g}".replace("-", "−")) for i, x in enumerate(brought.values)]


def test_nothing_that_a_text_says_becomes_markup() -> None:
    evil = cards().copy(deep=True)
    for name in ("piece", "group_piece", "logit_word"):
        evil[name][:] = EVIL
    page = feature_page(evil.assign_attrs(site=f"site {EVIL}", dictionary=EVIL))
    assert "<script" not in page and "\u202e" not in page and "alert(1)" in page
    assert "default-src 'none'" in page and "http" not in page.replace("http-equiv", "")


def test_a_transposed_result_makes_the_same_page_and_another_result_is_refused() -> None:
    turned = cards().isel(source=[1, 0], rank=slice(None, None, -1)).transpose(..., "source", "feature")
    assert feature_page(turned) == feature_page(cards())
    with pytest.raises(ValueError, match=r"result must be a result of interp\.features\.feature_cards"):
        feature_page(cards().drop_vars("partner"))


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_result_without_an_attribute_that_the_page_says_is_refused(name: str) -> None:
    """Of some of them the template raised an error of its own."""
    lacking = cards().copy()
    del lacking.attrs[name]
    with pytest.raises(ValueError, match=f"without attrs\\['{name}'\\]"):
        feature_page(lacking)


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 768, 1400])
def test_the_page_fits_its_window_and_fetches_nothing(
    width: int, scheme: str, tmp_path: Path, browser: "sync_api.Browser"
) -> None:
    long = with_effects().copy(deep=True)
    long["piece"] = long.piece.str.cat("x" * 60)
    long["logit_word"] = long.logit_word.str.cat("y" * 40)
    (tmp_path / "index.html").write_text(feature_page(long), encoding="utf-8")
    seen = visit(browser, tmp_path, width, color_scheme=scheme)
    seen.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert seen.page.evaluate(overflow) <= 0
    assert faults(seen.page) == []
    assert seen.complaints == [] and len(seen.requests) == 1
    seen.page.close()


@needs_browser
def test_a_card_opens_from_the_list_by_keyboard_and_from_its_address(
    tmp_path: Path, browser: "sync_api.Browser"
) -> None:
    (tmp_path / "index.html").write_text(feature_page(cards()), encoding="utf-8")
    seen = visit(browser, tmp_path)
    shown = "[...document.querySelectorAll('.card')].filter(x => x.checkVisibility()).map(x => x.id)"
    assert seen.page.evaluate(shown) == ["feature-3"]
    seen.page.locator(".index a").nth(1).focus()
    seen.page.keyboard.press("Tab")
    seen.page.keyboard.press("Enter")
    assert seen.page.evaluate(shown) == ["feature-17"]
    seen.page.goto((tmp_path / "index.html").as_uri() + "#feature-0")
    assert seen.page.evaluate(shown) == ["feature-0"]
    seen.page.close()
