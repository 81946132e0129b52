"""Every result, damaged, in everything that shows one: picture, table, text, card and page."""

import functools
import re
from collections.abc import Callable, Iterator, Mapping

import xarray as xr
from matplotlib import pyplot

import interp.pages
import interp.plot
from interp.core.viewer import PICTURES, card
from tests.contract.calls import NOT_RUN, REFUSES, called, examples, model
from tests.fuzz.functions import FUNCTIONS, valid_of
from tests.fuzz.judge import Case
from tests.fuzz.values import Made, damaged

FAMILY = "damaged results"
Shown = Callable[[xr.Dataset], object]
EVERYWHERE: Mapping[str, Shown] = {
    "frame": lambda result: result.view.frame(), "text": lambda result: str(result.view), "card": card,
}  # fmt: skip
ONLY: Mapping[str, Mapping[str, Shown]] = {
    "backward_lens": {"curves": interp.plot.backward_lens_curves, "grid": interp.plot.backward_lens_grid},
    "causal_trace": {"curves": interp.plot.causal_trace_curves},
    "causal.recall": {"recall_map": interp.plot.recall_map},
    "causal.steering_curve": {"page": interp.pages.steering_page},
    "dynamics.influence": {"page": lambda result: interp.pages.influence_page(result, model(), examples(), examples())},
    "features.feature_cards": {"page": interp.pages.feature_page, "json": interp.features.neuronpedia_json},
    "features.top_examples": {"page": interp.pages.top_examples_page},
    "heads": {"head_labels": interp.plot.head_labels},
    "lab.depth.trajectories": {"particles": interp.plot.particles},
    "copying": {"copying_map": interp.plot.copying_map, "copying_plane": interp.plot.copying_plane},
    "weights.spectra": {"spectra_map": interp.plot.spectra_map},
}  # fmt: skip
"""What shows the result of this function, besides `.view`."""


def cases() -> Iterator[Case]:
    """Every damage to the result of every function in everything that shows it."""
    for name in names():
        result = result_of(name)
        for where, show in shown(name, result).items():
            for what, damaged_name, make in damaged(result):
                words = functools.partial(_words, damaged_name)
                yield Case(FAMILY, name, f"{where} {what}", functools.partial(_call, show, make), words)


def names() -> list[str]:
    """The functions whose valid call gives a labelled result."""
    return [
        name
        for name, function in FUNCTIONS.items()
        if name not in {*NOT_RUN, *REFUSES}
        and not isinstance(function, type)
        and isinstance(result_of(name), xr.Dataset)
    ]


@functools.cache
def result_of(name: str) -> object:
    """What the valid call of a function gives, made once."""
    return called(name, FUNCTIONS[name], valid_of(name))


def shown(name: str, result: xr.Dataset) -> dict[str, Shown]:
    picture: dict[str, Shown] = {"plot": lambda result: result.view.plot()} if PICTURES.of(result) else {}
    return {**picture, **EVERYWHERE, **ONLY.get(name, {})}


def _call(show: Shown, make: Made) -> object:
    try:
        return show(make())  # type: ignore[arg-type]
    finally:
        pyplot.close("all")


def _words(name: str) -> list[str]:
    """What a refusal may name: what was damaged, a dim, or that the undamaged result has no picture either."""
    return [
        rf"\b{re.escape(name)}\b", "must be a whole result, got one without", "is not a result of interp", r"\bNaN\b",
        "with variables is required", "without that dim", "two or three dimensions", "select from the others",
        "over one or two dims", "no part .0.", "rows and queries", "matrices of layers",
        "this prompt has 0 tokens",
    ]  # fmt: skip
