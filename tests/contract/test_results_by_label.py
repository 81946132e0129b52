"""A result that is given back is read by its labels: transposed or reversed it gives the same numbers, or is refused.

Every public function and class method that takes a result is found by its annotations, and every picture and page is
drawn from every result that it shows (`tests.fuzz.results`).
"""

import collections
import functools
import importlib
import inspect
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from matplotlib import pyplot
from matplotlib.axes import Axes

import interp
from interp.circuits import Circuit
from interp.lenses import FittedJacobianLens
from interp.passes.question import Question
from tests.contract.calls import METRIC, OTHERS, TOKENS, called, edges, model, plain, valid
from tests.fuzz.results import ONLY, names, result_of, shown
from tests.loops import every, over
from tests.tolerances import TOLERANCES

Change = Callable[[xr.Dataset], xr.Dataset]
Given = dict[str, object]


def calls() -> Mapping[str, Callable[[], Given]]:
    """The valid calls of what `tests.contract.calls` does not call, or calls without a result."""
    return {
        "copying": lambda: {"model": model(), "ranks": False, "previous": previous()},
        "dynamics.per_token_loss_pca": lambda: {"losses": losses()},
        "frame": lambda: {"result": result_of("heads")},
        "circuits.write_mib": lambda: {
            "path": Path(tempfile.mkdtemp()) / "scores.json", "model": plain(), "scores": edges()},
        "causal.Subspace.of_result": lambda: {"result": result_of("causal.steering"), "layer": 1},
        "circuits.AttributionGraph.of_result": lambda: {
            "result": interp.circuits.attribution_graph(
                model(), TOKENS[:1], [3, 4], nodes=["head", "neuron"], most=400
            ),
            "qk": [result_of("circuits.qk_attribution")],
        },
        "circuits.Circuit.of_result": lambda: {"result": found_circuit()},
        "lenses.FittedJacobianLens.of_result": lambda: {"result": jacobian(), "model": model()},
    }  # fmt: skip


@functools.cache
def previous() -> xr.DataArray:
    return interp.heads(model(), TOKENS, sentences=None).value.sel(score="previous_token")


@functools.cache
def losses() -> xr.DataArray:
    drawn = np.random.default_rng(0).random((5, 9))
    return xr.DataArray(drawn, dims=("step", "prompt"), coords={"step": range(5), "prompt": range(9)})


@functools.cache
def found_circuit() -> xr.Dataset:
    question = interp.circuits.FindCircuit(metric=METRIC["metric"](), edges=3)
    return interp.runs.answered(question, plain(), interp.data.Pairs(TOKENS, OTHERS))


@functools.cache
def jacobian() -> xr.Dataset:
    return interp.runs.answered(interp.lenses.JacobianLens(skip=1), model(), TOKENS)


def takers() -> dict[str, Callable[..., object]]:
    """The public functions and class methods with a parameter that is a result, by the name of `calls`; no pictures."""
    found: dict[str, Callable[..., object]] = {}
    for wing in ("", *(wing for wing in interp.ROOMS if wing not in ("plot", "pages", "serve", "cli"))):
        module = importlib.import_module(f"interp.{wing}" if wing else "interp")
        for name in getattr(module, "__all__", interp.HOMES) if wing else interp.HOMES:
            value = getattr(module, name)
            of_class = vars(value) if inspect.isclass(value) else {}
            methods = {
                f"{name}.{each}": getattr(value, each) for each in of_class if not each.startswith("_")
            }
            is_question = inspect.isclass(value) and issubclass(value, Question)  # its function is tried
            for each, function in ({} if is_question else {name: value, **methods}).items():
                if callable(function) and _results_of(function) and function not in found.values():
                    found[f"{wing}.{each}".lstrip(".")] = function
    return found


def _results_of(function: Callable[..., object]) -> list[str]:
    """The names of the parameters that are results."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    given = re.compile(r"^(Sequence\[|Mapping\[str, )?xr\.(Dataset|DataArray)")
    return [each.name for each in parameters if given.match(str(each.annotation).strip("'\""))]


def turned(result: xr.Dataset | xr.DataArray) -> Iterator[tuple[str, Change]]:
    """The ways in which a result is turned: transposed, and reversed along each of its dims."""
    yield "transposed", lambda x: x.transpose(*reversed([*x.dims]))
    for dim in map(str, result.dims):
        yield f"{dim} reversed", lambda x, dim=dim: x.isel({dim: slice(None, None, -1)})  # type: ignore[misc]


def same(found: object, wanted: object) -> None:
    """AssertionError unless both hold the same numbers under the same labels."""
    if isinstance(wanted, xr.Dataset):
        assert isinstance(found, xr.Dataset)
        found = found.transpose(*wanted.dims).sel(
            {dim: wanted[dim] for dim in wanted.dims if dim in wanted.coords}
        )
        for name in wanted.data_vars:
            same(found[name].transpose(*wanted[name].dims).to_numpy(), wanted[name].to_numpy())
    elif isinstance(wanted, pd.DataFrame):
        assert isinstance(found, pd.DataFrame)
        tables = [
            each.map(str).sort_values(list(wanted.columns), ignore_index=True)[list(wanted.columns)]
            for each in (found, wanted)
        ]
        pd.testing.assert_frame_equal(tables[0], tables[1])
    elif isinstance(wanted, FittedJacobianLens):
        assert isinstance(found, FittedJacobianLens)
        for layer in wanted.layers:
            site = f"blocks.{layer}.hook_resid_post"
            same(found.jacobian[found.place(site)], wanted.jacobian[wanted.place(site)])
    elif isinstance(wanted, interp.causal.Subspace):
        assert isinstance(found, interp.causal.Subspace)
        same(found.directions, wanted.directions)
    elif isinstance(wanted, Circuit):
        assert isinstance(found, Circuit)
        assert found.scores == wanted.scores
    else:
        one, other = np.asarray(found), np.asarray(wanted)
        if other.dtype.kind == "f":
            near = TOLERANCES[torch.float32 if other.dtype == np.float32 else torch.float64]
            np.testing.assert_allclose(one, other, rtol=near.rtol, atol=near.atol)
        else:
            np.testing.assert_array_equal(one, other)


def outcome(name: str, function: Callable[..., object], given: Given) -> object:
    """What the call gives; of `write_mib`, what it wrote."""
    found = called(name, function, given)
    if name == "features.neuronpedia_json":  # a list of features, in the order of the result
        return sorted(found, key=lambda one: one["feature_index"])  # type: ignore[call-overload]
    if name == "circuits.AttributionGraph.of_result":  # links stand in the order of the result
        assert isinstance(found, interp.circuits.AttributionGraph)
        pairs = [sorted(each.pairs) for each in found.qk.values()]
        return f"{found.nodes} {sorted(found.links.itertuples(index=False, name=None))} {pairs}"
    return given["path"].read_text() if name == "circuits.write_mib" else found  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(takers()))
def test_a_turned_result_gives_the_same_numbers_or_is_refused(name: str) -> None:
    function = takers()[name]
    given = calls()[name]() if name in calls() else valid(name, function)
    wanted = outcome(name, function, given)
    with every() as case:
        for argument in _results_of(function):
            result = given.get(argument)
            several = isinstance(result, list | tuple)
            first = result[0] if several else result  # type: ignore[index]
            assert isinstance(first, xr.Dataset | xr.DataArray), f"{name} is called without a result"
            for what, change in turned(first):
                with case(argument, what):
                    other = [change(each) for each in result] if several else change(first)  # type: ignore[union-attr,arg-type]
                    with words_of_ours(ValueError):
                        same(outcome(name, function, {**given, argument: other}), wanted)


# --- pictures and pages ------------------------------------------------------------------------------------------


@functools.cache
def pictured() -> list[str]:
    """The functions whose results have a picture or a page."""
    tables = {"frame", "text", "card"}
    return [name for name in names() if {*shown(name, result_of(name))} - tables]


PLACES = ("prompt",)
"""Dims of which a picture shows the entry at a place, `prompt=0`: reversed, it shows another."""
ORIENTED = ("ablate", "patch")
"""Maps that have the dims of their result: transposed, rows are columns."""


@contextmanager
def words_of_ours(*kinds: type[Exception]) -> Iterator[None]:
    """AssertionError for an error of one of these kinds that does not say what is required."""
    try:
        yield
    except kinds as error:
        if not re.search(r"must|required|no (score|matrix|part) |select", str(error)):
            raise AssertionError(f"{type(error).__name__}: {error}") from error


def looks(name: str, result: xr.Dataset) -> list[tuple[str, Callable[[xr.Dataset], object]]]:
    """The pictures and pages of a result."""
    return [each for each in shown(name, result).items() if each[0] not in ("frame", "text", "card")]


def drawn(look: Callable[[xr.Dataset], object], result: xr.Dataset) -> collections.Counter[object]:
    """All numbers and texts of a picture under the names of their rows and columns, or the pieces of a page."""
    pyplot.close("all")
    page = look(result)
    if isinstance(page, str):
        return collections.Counter(re.split(r">|</", page))
    return sum((_on(ax) for ax in pyplot.gcf().axes), collections.Counter[object]())


def _on(ax: Axes) -> collections.Counter[object]:
    names = [
        {
            round(float(place), 3): text.get_text()
            for place, text in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
        }
        for axis in (ax.xaxis, ax.yaxis)
    ]

    def point(x: object, y: object) -> tuple[str, ...]:
        at = [round(float(value), 3) for value in (x, y)]  # type: ignore[arg-type]
        return tuple(name.get(value, f"{value:.3f}") for name, value in zip(names, at, strict=True))

    maps: list[np.ndarray] = [
        np.ma.filled(np.ma.asarray(image.get_array(), float), np.nan) for image in ax.images
    ]
    cells = [
        ("cell", *point(j, i), f"{value:.4f}")
        for values in maps
        if values.ndim == 2
        for (i, j), value in np.ndenumerate(values)
    ]
    lines = [
        ("line", *sorted(point(*at) for at in np.broadcast(*line.get_data())))
        for line in ax.lines
        if line.get_transform() == ax.transData
    ]
    texts = [("text", text.get_text()) for text in ax.texts]
    return collections.Counter[object]([*cells, *lines, *texts, ("title", ax.get_title())])


@pytest.mark.slow
@over("name", pictured)
def test_a_turned_result_is_drawn_with_its_own_labels(name: str) -> None:
    result = result_of(name)
    assert isinstance(result, xr.Dataset)
    for where, look in looks(name, result):
        try:
            wanted = drawn(look, result)
        except ValueError as error:
            if "select from the others" not in str(error):
                raise
            continue
        for what, change in turned(result):
            with words_of_ours(ValueError):
                found = drawn(look, change(result))
                as_it_was = what.removesuffix(" reversed") in PLACES or (
                    name in ORIENTED and what == "transposed"
                )
                differ = [] if as_it_was else [*(found - wanted), *(wanted - found)]
                assert not differ, (where, what, differ[:6])
    pyplot.close("all")


@pytest.mark.parametrize("name", sorted(name for name, looks in ONLY.items() if "page" in looks))
def test_a_page_begins_with_the_notes_of_its_result(name: str) -> None:
    result = result_of(name)
    assert isinstance(result, xr.Dataset)
    noted = result.assign_attrs(notes=["a planted <sentence>"])
    page = ONLY[name]["page"](noted)
    assert isinstance(page, str)
    before, _, after = page.partition("a planted &lt;sentence&gt;")
    assert after and before.count("<section") <= 1


@pytest.mark.slow
@over("name", pictured)
def test_a_picture_of_lost_renamed_or_doubled_labels_says_so_in_one_sentence(name: str) -> None:
    result = result_of(name)
    assert isinstance(result, xr.Dataset)
    for _, look in looks(name, result):
        for dim in [str(dim) for dim in result.dims if dim in result.coords]:
            doubled = result.isel({dim: [*range(result.sizes[dim]), 0]})
            for other in (result.drop_vars(dim), result.rename({dim: f"{dim}_2"}), doubled):
                pyplot.close("all")
                with words_of_ours(ValueError, KeyError):
                    look(other)
    pyplot.close("all")


# --- numbers that were read by place ---------------------------------------------------------------------------------

TEXT = "When Mary and John went to the store, John gave a drink to"
OTHER = TEXT.replace("John gave", "Mary gave")


@functools.cache
def demo() -> interp.HookedTransformer:
    return interp.HookedTransformer.from_pretrained("demo-mlp-2l")


def test_erasure_takes_the_tokens_of_the_prompt_that_is_named() -> None:
    found = interp.token_attribution(demo(), [TEXT, OTHER], " Mary", method="gradient_x_input")
    for turn in (found, found.sortby("prompt", ascending=False), found.sortby("pos", ascending=False)):
        value = interp.tokens.erasure(demo(), [TEXT, OTHER], turn, " Mary", shares=(0.2,)).value
        np.testing.assert_allclose(value, [0.3831, 0.4983], atol=5e-5)  # four decimals are written here


def test_matching_scores_weigh_the_heads_that_are_named() -> None:
    given = interp.heads(demo(), sentences=None).value.sel(score="previous_token")
    for turn in (
        given,
        given.isel(head=[5, 4, 3, 2, 1, 0]),
        given.isel(layer=[1, 0]),
        given.transpose("head", "layer"),
    ):
        value = interp.copying(demo(), previous=turn, ranks=False).value.sel(score="matching", layer=1)
        assert value.to_numpy().round(2).tolist() == [0.89, 0.95, 0.90, 0.04, 0.73, 0.91]
    with pytest.raises(ValueError, match="previous must be a whole result, got one without head 5"):
        interp.copying(demo(), previous=given.assign_coords(head=[0, 1, 2, 3, 4, 6]), ranks=False)


def test_routes_go_from_the_last_layer_to_the_first() -> None:
    shares = interp.tokens.flow_routes(demo(), TEXT)
    for turn in (shares, shares.sortby("layer", ascending=False), shares.sortby("pos", ascending=False)):
        assert len(interp.tokens.routes(turn)) == 14


def test_a_direction_of_a_result_is_along_d_model() -> None:
    positive, negative = [TEXT, f"{TEXT} the"] * 3, [OTHER, f"{OTHER} a"] * 3
    found = interp.causal.steering(demo(), positive, negative, test_share=0.4)
    wanted = interp.causal.Subspace.of_result(found, layer=1).directions
    assert wanted.shape == (1, 96)
    for turn in (found.transpose(), found.isel(d_model=slice(None, None, -1))):
        assert torch.equal(interp.causal.Subspace.of_result(turn, layer=1).directions, wanted)
    with pytest.raises(ValueError, match="directions must be a whole result, got one without d_model 1"):
        interp.causal.Subspace.of_result(found.isel(d_model=[0, 2, 3]), layer=1)


def test_edges_of_a_table_are_found_whichever_way_it_lies() -> None:
    metric = interp.logit_difference(" Mary", " John")
    table = interp.circuits.edge_attribution(demo(), TEXT, OTHER, metric=metric)
    for planted in (["L0H1->logits", "L0.mlp->logits"], ["L0.resid->L0H0.q", "L0.resid->L0H1.k"]):
        wanted = interp.circuits.recovery([table], planted)
        for turn in (table.transpose("receiver", "sender"), table.isel(sender=slice(None, None, -1))):
            same(interp.circuits.recovery([turn], planted), wanted)
