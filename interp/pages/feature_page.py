"""The page of a dictionary's features: a list of them and a card for each, beside a random direction in its place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from interp.core.boundary import public
from interp.core.results import check_result, in_order
from interp.core.viewer import notes_of
from interp.core.visible import harmless
from interp.features.feature_cards import SOURCES
from interp.pages.templates import environment, own
from interp.pages.top_examples import TokenMark, marked, running
from interp.views.writing import count, short

if TYPE_CHECKING:
    import xarray as xr

NEEDED: Final = ("value", "null", "counts", "edges", "peak", "group_piece", "neighbour", "partner", "source")
ATTRIBUTES: Final = (
    "site", "writes", "dictionary", "special_tokens", "features", "groups", "logits", "null", "texts", "tokens_counted",
    "special", "huge",
)  # fmt: skip
"""Attributes of the result that the page says."""
SAYS: Final = {
    "density": "active on", "mean": "mean over tokens", "max": "largest", "purity": "commonest token",
    "logit_kurtosis": "kurtosis of logits", "loss_effect": "loss without it",
}  # fmt: skip
"""Names of the scores."""


@dataclass(frozen=True)
class HistogramPicture:
    """Bars of a histogram, each with its height as a share of the highest and what pointing at it says."""

    bars: list[tuple[float, str]]
    low: str
    high: str
    label: str


@dataclass(frozen=True)
class ExampleLine:
    """One example: its activation, its context, where it is, what attention brought there, and the change in loss."""

    value: str
    tokens: list[TokenMark]
    place: str
    sources: list[TokenMark]
    """The same tokens by what the heads bring from each; empty where it is not known."""
    loss: str
    """The change in loss without the feature; empty where it is not known."""


@dataclass(frozen=True)
class ExampleGroup:
    """Examples whose activations lie between two numbers, and how many tokens do."""

    says: str
    lines: list[ExampleLine]


@dataclass(frozen=True)
class Bar:
    """A line of a table: a name, its number, and its size as a share of the largest."""

    name: str
    value: str
    size: float
    link: str = ""
    more: str = ""


@dataclass(frozen=True)
class BarTable:
    """A table with a bar behind every number."""

    title: str
    unit: str
    bars: list[Bar]
    more: str = ""


@dataclass(frozen=True)
class SourceCard:
    """What is shown of a feature, and likewise of the random direction beside it."""

    histogram: HistogramPicture
    logits: HistogramPicture | None
    tables: list[BarTable]
    ends: list[BarTable]
    top: list[ExampleLine]
    groups: list[ExampleGroup]
    full: str
    """The activation at a full shade."""
    signed: bool


@dataclass(frozen=True)
class FeatureCard:
    """One feature: its line of the list, its numbers beside those of the random direction, and both cards."""

    name: str
    anchor: str
    density: str
    word: str
    facts: list[tuple[str, str, str]]
    own: SourceCard
    random: SourceCard


@public()
def feature_page(result: xr.Dataset) -> str:
    """A result of `interp.features.feature_cards` as one HTML page that opens from disk, without script.

    At the left the features, at the right the card of the one that is chosen: `page.html#feature-7` opens at feature 7.
    Of each: the histogram of its activations, top examples and examples of ten groups, the tokens whose logits it
    raises and lowers, its relatives, and at the end the same of the random direction beside it.

    Raises:
        ValueError: another result.

    Example:
        >>> eye, zero = torch.eye(24), torch.zeros(24)
        >>> weights = {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero}
        >>> dictionary = interp.features.Dictionary(interp.features.ReLU(), weights, reads="blocks.2.hook_resid_post")
        >>> cards = interp.features.feature_cards(model, [prompt], dictionary, features=[3, 7])
        >>> 'id="feature-7"' in feature_page(cards)
        True
    """
    check_result("result", result, NEEDED, "interp.features.feature_cards")
    ascending = ("rank", "offset", "group", "place", "bin", "edge", "near")
    result = in_order("result", result, {"source": SOURCES, **dict.fromkeys(ascending)})
    listed = set(result.feature.values.tolist())
    about = result.attrs
    if missing := [name for name in ATTRIBUTES if name not in about]:
        raise ValueError(f"result must be a whole result, got one without attrs[{missing[0]!r}]")
    return environment().get_template("features.html").render(
        css=own("report.css"),
        notes=notes_of(result),
        site=harmless(str(about["site"])),
        writes=harmless(str(about["writes"])),
        dictionary=harmless(str(about["dictionary"])),
        facts=_facts(result),
        about=about,
        sources="dfa" in result,
        losses="loss_effect" in result,
        summary=_summary(result),
        cards=[_card(result.isel(feature=i), listed) for i in range(result.sizes["feature"])],
    )  # fmt: skip


def _facts(result: xr.Dataset) -> list[tuple[str, str]]:
    known = {
        "texts": "texts", "tokens_counted": "tokens", "special": "special, left out", "huge": "huge, left out",
    }  # fmt: skip
    return [
        ("features here", count(result.sizes["feature"])),
        *((word, count(int(result.attrs[name]))) for name, word in known.items()),
    ]


def _summary(result: xr.Dataset) -> list[tuple[str, str, str]]:
    """Medians over the features of what tells them from random directions, beside those of the random ones."""
    found = []
    for name in ("purity", "logit_kurtosis"):
        if name in result.score.values:
            own_value, null = (float(result[x].sel(score=name).median()) for x in ("value", "null"))
            found.append((SAYS[name], _number(name, own_value), _number(name, null)))
    for variable, word in (("cosine", "nearest feature, cosine"), ("correlation", "partner, correlation")):
        if result.sizes["near"]:
            own_value, null = (float(x) for x in result[variable].isel(near=0).median("feature"))
            found.append((word, short(own_value, 2), short(null, 2)))
    return found


def _number(score: str, value: float) -> str:
    """A score as it is written, rare shares in per cent."""
    if math.isnan(value):
        return "–"
    if score == "loss_effect":
        return f"{short_change(value)} nats"
    return f"{100 * value:.3g} %" if score in ("density", "purity") else short(value)


def short_change(value: float) -> str:
    """A change as it is written, with its sign; an en dash where there is none."""
    return f"+{short(value, 2)}" if value > 0 else short(value, 2)


def _card(one: xr.Dataset, listed: set[int]) -> FeatureCard:
    name = int(one.feature)
    values, nulls = (
        dict(zip(one.score.values.tolist(), one[x].values.tolist(), strict=True)) for x in ("value", "null")
    )
    facts = [(SAYS[score], _number(score, values[score]), _number(score, nulls[score])) for score in values]
    own_card, random = (_source(one.sel(source=source), listed) for source in SOURCES)
    first = one.sel(source=SOURCES[0])
    at_entry = first.piece.sel(offset=0).isel(rank=0).item() if first.sizes["rank"] else ""
    return FeatureCard(
        f"feature {name}", f"feature-{name}", _number("density", values["density"]), str(at_entry) or "–",
        facts, own_card, random,
    )  # fmt: skip


def _source(one: xr.Dataset, listed: set[int]) -> SourceCard:
    ends = one["edges"].to_numpy()
    full = float(np.abs(ends[[0, -1]]).max())
    return SourceCard(
        _histogram(one, "", "tokens"),
        _histogram(one, "logit_", "tokens of the vocabulary") if "logit_counts" in one else None,
        _tables(one, listed),
        _logit_ends(one) if "logit" in one else [],
        _lines(one, "", "rank", full),
        _groups(one, full),
        short(full),
        bool(ends[0] < 0),
    )  # fmt: skip


def _histogram(one: xr.Dataset, prefix: str, what: str) -> HistogramPicture:
    counts, edges = one[f"{prefix}counts"].to_numpy(), one[f"{prefix}edges"].to_numpy()
    most = max(int(counts.max()), 1)
    bars = [
        (float(n) / most, f"{short(float(low))} to {short(float(high))}: {count(int(n))} {what}")
        for n, low, high in zip(counts, edges[:-1], edges[1:], strict=True)
    ]
    label = f"Histogram, {count(int(counts.sum()))} {what}, highest bin {count(most)}"
    return HistogramPicture(bars, short(float(edges[0])), short(float(edges[-1])), label)


def _lines(one: xr.Dataset, prefix: str, dim: str, full: float) -> list[ExampleLine]:
    return [
        _line(one.isel({dim: i}), prefix, full)
        for i in range(one.sizes[dim])
        if int(one[f"{prefix}row"].isel({dim: i})) >= 0
    ]


def _line(one: xr.Dataset, prefix: str, full: float) -> ExampleLine:
    activation = one[f"{prefix}activation"]
    known = not prefix and "loss_effect" in one
    return ExampleLine(
        short(float(activation.sel(offset=0))),
        marked(one, full, prefix),
        f"row {int(one[f'{prefix}row'])}, pos {int(one[f'{prefix}pos'])}",
        _sources(one) if not prefix and "dfa" in one else [],
        short_change(float(one.loss_effect)) if known else "",
    )


def _sources(one: xr.Dataset) -> list[TokenMark]:
    """The tokens of an example by what the heads bring from each; the first mark is all tokens beyond the context."""
    dfa, beyond = one.dfa.fillna(0.0).to_numpy(), one.dfa_outside.to_numpy()
    by_token, outside = dfa.sum(-1), float(beyond.sum())
    largest = float(max(np.abs(by_token).max(), abs(outside))) or 1.0
    marks = []
    if outside:
        marks.append(TokenMark("…", outside / largest, f"beyond these tokens {_through(beyond)}", False))
    columns = (one.piece.to_numpy(), one.tokens.to_numpy(), one.offset.to_numpy(), by_token, dfa)
    for piece, token, offset, value, heads in zip(*columns, strict=True):
        if token >= 0:
            marks.append(
                TokenMark(running(piece), float(value) / largest, _through(heads), bool(offset == 0))
            )
    return marks


def _through(heads: np.ndarray) -> str:
    """The sum over heads, and the head with the largest part in words."""
    best = int(np.abs(heads).argmax())
    return f"{short(float(heads.sum()))}, of it {short(float(heads[best]))} through H{best}"


def _groups(one: xr.Dataset, full: float) -> list[ExampleGroup]:
    """The groups from the largest activations down."""
    counts, edges, groups = one.counts.to_numpy(), one["edges"].to_numpy(), one.sizes["group"]
    width, total, found = len(counts) // groups, int(counts.sum()), []
    if not total:
        return []
    for g in reversed(range(groups)):
        low, high = (short(float(edges[i * width])) for i in (g, g + 1))
        inside = int(counts[g * width : (g + 1) * width].sum())
        says = f"{low} to {high}: {count(inside)} tokens, {100 * inside / total:.3g} % of the active ones"
        found.append(ExampleGroup(says, _lines(one.isel(group=g), "group_", "place", full)))
    return found


def _logit_ends(one: xr.Dataset) -> list[BarTable]:
    largest = float(np.abs(one.logit).max()) or 1.0
    titles = {"top": "Logits it raises", "bottom": "Logits it lowers"}
    return [
        BarTable(title, "logit", [
            Bar(str(word), short(value), value / largest)
            for word, value in zip(
                one.logit_word.sel(end=end).values.tolist(), one.logit.sel(end=end).values.tolist(), strict=True
            )
        ])
        for end, title in titles.items()
    ]  # fmt: skip


def _tables(one: xr.Dataset, listed: set[int]) -> list[BarTable]:
    """The relatives: features, neurons and heads, as far as the result has them."""
    near = _bars("feature", one.neighbour, one.cosine, listed)
    partners = _bars("feature", one.partner, one.correlation, listed)
    tables = [
        BarTable("Nearest decoder rows", "cosine", near),
        BarTable("Active together", "correlation", partners),
    ]
    if "neuron" in one:
        layer = one.attrs.get("neuron_layer", "")
        tables.append(
            BarTable(
                "Neurons that write alike", "cosine", _bars(f"L{layer}N", one.neuron, one.alignment, set())
            )
        )
    if "active_neuron" in one:
        layer = one.attrs.get("neuron_layer", "")
        active = _bars(f"L{layer}N", one.active_neuron, one.neuron_correlation, set())
        tables.append(BarTable("Neurons active together", "correlation", active))
    if "dfa" in one:
        brought = (one.dfa.sum("offset") + one.dfa_outside).where(one.row >= 0).mean("rank").to_numpy()
        most = float(np.nanmax(np.abs(brought), initial=0.0)) or 1.0
        bars = [Bar(f"H{i}", short(x), float(x) / most) for i, x in enumerate(brought) if not math.isnan(x)]
        tables.append(BarTable("Heads that bring it", "mean of the top examples", bars))
    if "head_share" in one:
        shares = one.head_share.to_numpy()
        bars = [
            Bar(f"H{i}", f"{100 * share:.3g} %", float(share) / (shares.max() or 1.0))
            for i, share in enumerate(shares)
        ]
        tables.append(BarTable("Heads", "share of the norm", bars))
    return tables


def _bars(word: str, names: xr.DataArray, values: xr.DataArray, listed: set[int]) -> list[Bar]:
    """A line for each of several features or neurons, with a link to those that have a card here."""
    space = " " if word.isalpha() and not word.startswith("L") else ""
    return [
        Bar(f"{word}{space}{name}", short(value, 2), value, f"feature-{name}" if name in listed else "")
        for name, value in zip(names.values.tolist(), values.values.tolist(), strict=True)
        if not math.isnan(value)
    ]  # fmt: skip
