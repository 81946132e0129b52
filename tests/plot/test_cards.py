"""Results know their picture: `.view`, `.plot()`, cards, and what a notebook makes of them."""

import base64
import io
import re
from collections.abc import Iterator

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib import image

import interp
from interp.causal import EdgeGraph
from interp.circuits import Circuit
from interp.core import accessor
from interp.core.viewer import PICTURES
from interp.lenses import LogitLens
from interp.plot import cards
from interp.runs.step_files import decoded, encoded
from interp.verify import ContractLine
from tests.configs import build, some_tokens
from tests.contract.test_pictures import PNG
from tests.tiny import hooked

PAIR = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])


@pytest.fixture(scope="module")
def model() -> interp.HookedTransformer:
    return interp.HookedTransformer(build("gpt2"))


@pytest.fixture(scope="module")
def result(model: interp.HookedTransformer) -> xr.Dataset:
    return interp.attribute(model, some_tokens(rows=2, n=6), 3, 4, parts="head")


@pytest.fixture
def shell() -> Iterator[object]:
    """A running IPython that knows our results, gone afterwards."""
    kind = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    made = kind.instance()
    made.display_formatter.active_types = ["text/plain", "text/html"]  # as a notebook's
    accessor._tell_notebook()
    yield made
    kind.clear_instance()


def html_of(shell: object, value: object) -> str:
    """What a notebook would show."""
    data, _ = shell.display_formatter.format(value)  # type: ignore[attr-defined]
    return str(data["text/html"])


def pictures(html: str) -> list[np.ndarray]:
    """The pictures in some HTML, decoded."""
    found = re.findall(r"data:image/png;base64,([^\"]+)", html)
    return [image.imread(io.BytesIO(base64.b64decode(data))) for data in found]


# --- the accessor -----------------------------------------------------------------------------------------------------


def test_a_result_is_drawn_by_the_function_that_suits_it(result: xr.Dataset) -> None:
    own, other = result.view.plot(top=3), interp.plot.attribution(result, top=3)
    assert [t.get_text() for t in own.get_yticklabels()] == [t.get_text() for t in other.get_yticklabels()]
    assert own.get_title() == other.get_title()


def test_the_text_of_a_result_is_short(result: xr.Dataset) -> None:
    text = str(result.view)
    assert text.startswith("attribute [") and "unit: logits" in text
    assert max(map(len, text.splitlines())) <= 80
    assert repr(result.view) == text


def test_the_text_of_a_result_says_its_largest_numbers(result: xr.Dataset) -> None:
    lines = str(result.view).splitlines()
    table = interp.frame(result)
    best = table.iloc[(-table.value.abs()).argsort(kind="stable")].head(5)
    said = [line.split() for line in lines[-5:]]
    assert [(part, int(prompt)) for part, prompt, _ in said] == list(zip(best.part, best.prompt, strict=True))
    assert [float(value) for _, _, value in said] == pytest.approx(best.value.tolist(), rel=1e-3)
    assert f"the largest of {len(table)}:" in lines[-7]
    one = result.isel(part=[2], prompt=[0])
    assert "all of it:" in str(one.view) and f"{float(one.value.squeeze()):.4g}" in str(one.view)
    empty = result.assign(value=result.value * float("nan"))
    assert "no values" in str(empty.view)
    number = xr.Dataset({"value": 0.25}, attrs={"interp_analysis": "attribute"})
    assert str(number.view).splitlines()[-1] == "  value: 0.25"


def test_the_text_of_a_lens_says_the_next_word_at_the_end_by_depth() -> None:
    model, texts = hooked(), ["The cat sat on", "The dog"]
    for data, where in ((texts[:1], ""), (texts[::-1], " of the first prompt")):
        found = interp.logit_lens(model, data)
        last = len(model.to_tokens(data[0])[0]) - 1
        token = found.token.values[0, last]
        title = f"the next word by depth after {token!r}, the last of {last + 1} positions{where}:"
        lines = str(found.view).splitlines()
        assert max(map(len, lines)) <= 80 and title in " ".join(str(found.view).split())
        start = next(i for i, line in enumerate(lines) if line.split()[:2] == ["word", "top_prob"])
        assert "target_prob" not in lines[start]
        for depth, line in zip(found.depth.values, lines[start + 1 :], strict=False):
            cell = found.isel(prompt=0, rank=0, pos=last).sel(depth=depth)
            assert line.split()[0] == depth and repr(str(cell.word.item())) in line
            assert float(line.split()[-1]) == pytest.approx(float(cell.kl), rel=1e-3)
    one = str(interp.logit_lens(model, texts[:1], answer=5, pos=1).view)
    assert "  the next word by depth after 'The':\n" in one and "word  top_prob  target_prob" in one


def test_text_of_scores_has_the_largest_of_each_and_of_words_their_range(
    model: interp.HookedTransformer,
) -> None:
    found = interp.heads(
        model, repeats=interp.tasks.RepeatedTokens(rows=4, period=5, repeats=3), sentences=None
    )
    text = str(found.view)
    scores = [name for name in found.score.values if bool(found.value.sel(score=name).notnull().any())][:5]
    for name, line in zip(scores, text.splitlines()[-5:], strict=True):
        value = found.value.sel(score=name)
        best = float(value.values.ravel()[np.nanargmax(np.abs(value.values))])
        assert name in line.split() and f"{best:.4g}" in line
    lens = interp.logit_lens(model, some_tokens(rows=2, n=6))
    assert f"entropy: {float(lens.entropy.min()):.4g} to {float(lens.entropy.max()):.4g} nats" in str(
        lens.view
    )
    note = [line for line in text.splitlines() if "note:" in line or "to say which token is BOS" in line]
    assert len(note) == 2, "of rows that begin with token 0"
    assert len(str(lens.view).splitlines()) < 15 and len(text.splitlines()) - len(note) < 15


def test_the_frame_of_a_result_is_that_of_the_function(result: xr.Dataset) -> None:
    assert result.view.frame().equals(interp.frame(result))


def test_xarrays_own_interpolation_is_left_alone(result: xr.Dataset) -> None:
    line = xr.Dataset({"y": ("x", [0.0, 1.0])}, coords={"x": [0.0, 1.0]})
    assert float(line.interp(x=0.25).y) == pytest.approx(0.25)


def test_a_dataset_of_others_has_no_plot_and_no_name() -> None:
    other = xr.Dataset({"t": ("x", [1.0, 2.0])})
    with pytest.raises(ValueError, match=r"not a result of interp; there is one for Circuit.*attribute"):
        other.view.plot()
    with pytest.raises(ValueError, match="required"):
        str(other.view)


def test_a_result_without_a_plot_says_which_have_one(model: interp.HookedTransformer) -> None:
    found = interp.weights.directions(model, torch.eye(model.cfg.d_model)[:2])
    with pytest.raises(ValueError, match=r"no plot for the result of directions; .*ablate"):
        found.view.plot()


def test_a_name_survives_files_selections_and_merges(result: xr.Dataset) -> None:
    stored = encoded(result).files
    back = decoded("dataset", next(iter(stored.values())))
    netcdf = xr.load_dataset(io.BytesIO(result.to_netcdf(engine="h5netcdf")))
    merged = result.merge(xr.Dataset({"more": ((), 1.0)}))
    for each in (back, netcdf, merged, result.isel(prompt=0), result[["value"]]):
        assert isinstance(each, xr.Dataset)
        assert each.view.analysis == "attribute"


def test_a_result_over_checkpoints_is_drawn_over_them(model: interp.HookedTransformer) -> None:
    rows = interp.tasks.RepeatedTokens(period=5, repeats=3, rows=2)
    found = interp.dynamics.over_checkpoints(
        {"step1": model, "step2": model}.__getitem__,
        ["step1", "step2"],
        lambda one: interp.heads(one, repeats=rows, sentences=None),
    )
    assert PICTURES.of(found) is interp.plot.heads_over_training
    with pytest.raises(ValueError, match="composition over training"):
        interp.composition(model).expand_dims(step=[1]).view.plot()


def test_a_result_made_of_another_has_a_name_and_a_picture_of_its_own(
    model: interp.HookedTransformer,
) -> None:
    found = interp.lenses.by_depth(interp.logit_lens(model, some_tokens(rows=3, n=6)))
    assert found.view.analysis == "lens_by_depth"
    assert found.view.plot("entropy").get_ylabel() == "entropy (nats)"


# --- cards ------------------------------------------------------------------------------------------------------------


def test_a_card_holds_a_picture_that_is_not_blank_and_leaves_no_figure(result: xr.Dataset) -> None:
    before = dict(plt.rcParams)
    html = cards.card(result)
    (pixels,) = pictures(html)
    assert pixels[..., :3].std() > 0.05
    assert plt.get_fignums() == [] and dict(plt.rcParams) == before
    width = int(re.search(r'width="(\d+)"', html)[1])  # type: ignore[index]
    assert width <= cards.WIDEST and pixels.shape[1] == pytest.approx(cards.SHARP * width, abs=2)
    assert "unit: logits" in html and "alt=" in html


def test_a_picture_that_cannot_be_drawn_says_why(result: xr.Dataset) -> None:
    html = cards.card(result.drop_vars("total"))
    assert (
        "no picture: ValueError: attribution: result must be a whole result, got one without &#39;total&#39;"
        in html
    )


@pytest.mark.slow
def test_what_a_result_says_is_escaped(result: xr.Dataset) -> None:
    evil = result.assign_attrs(unit="<script>alert(1)</script>")
    assert "<script" not in cards.card(evil) and "&lt;script" in cards.card(evil)
    contract = interp.verify.Contract("<b>m", (ContractLine("<i>claim", 0.5, 1.0),))
    assert "<b>m" not in contract._repr_html_() and "<i>claim" not in contract._repr_html_()


@pytest.mark.slow
def test_objects_have_a_text_a_plot_and_a_card(model: interp.HookedTransformer) -> None:
    circuit = interp.find_circuit(model, *PAIR, metric=interp.logit_difference(3, 4), edges=60)
    contract = interp.verify.Contract(
        "m",
        (ContractLine("a", 1e-6, 1e-4), ContractLine("b", 1.0, 0.0), ContractLine("c", None, note="x" * 99)),
    )
    backward = interp.backward_lens(model, some_tokens(rows=1, n=5), 3)
    assert len(pictures(cards.card(backward))) == 1 and backward.view.plot().has_data()
    for each in (circuit, contract, interp.weights.HeadCircuits(model.transformer).ov("L0H1")):
        if each is not contract:  # a line for each claim, as the command line prints it
            assert max(map(len, str(each).splitlines())) <= 80
        assert len(pictures(each._repr_html_())) == 1
        assert each.plot().has_data()
    assert circuit.edges[-1] in str(circuit) or "more" in str(circuit)


def test_a_broken_line_of_a_contract_is_drawn_red() -> None:
    found = interp.verify.Contract(
        "m",
        (
            ContractLine("good", 1e-6, 1e-4),
            ContractLine("bad", 1.0, 0.0),
            ContractLine("nan", float("nan"), 1e-4),
        ),
    )
    ax = found.plot()
    ends = [bar.get_width() for bar in ax.patches]
    assert ends[0] == pytest.approx(1e-2) and min(ends[1:]) > 1
    colours = [bar.get_facecolor() for bar in ax.patches]
    assert colours[1] == colours[2] != colours[0]


def test_the_plot_of_a_product_is_its_spectrum() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(7, 3).double(), torch.randn(3, 5).double()
    (line,) = interp.core.FactoredMatrix(a, b).plot().lines
    np.testing.assert_allclose(line.get_ydata(), torch.linalg.svdvals(a @ b)[:3], rtol=1e-6)


def test_the_checks_of_a_circuit_are_its_bars(model: interp.HookedTransformer) -> None:
    circuit = Circuit(EdgeGraph.of(model.cfg), {"L0.resid->L0.mlp": 1.0, "L0.mlp->logits": 1.0})
    metric = interp.logit_difference(3, 4)
    found = interp.evaluate_circuit(model, *PAIR, circuit, metric=metric, subsets=2, draws=1)
    bars = [bar.get_height() for bar in found.view.plot().patches]
    kinds = [kind for kind in found.circuit.values if kind in ("found", "random", "degree-matched")]
    whole = found.value.sel(score="faithfulness", circuit=kinds)
    nodes = found.value.sel(score="minimality", circuit=[f"without {node}" for node in found.part.values])
    np.testing.assert_allclose(bars, [*whole, *nodes])


def test_models_caches_and_runs_are_cards_of_text(model: interp.HookedTransformer) -> None:
    _, cache = model.run_with_cache(some_tokens(rows=1, n=4))
    assert "blocks.*.attn.hook_pattern" in str(cache) and "2 layers" in str(cache)
    batches = interp.Batch(some_tokens(rows=4, n=6)).numbered().split(2)
    found = interp.run([LogitLens()], model, list(batches))
    for each, says in ((model, "d_model"), (cache, "hook_pattern"), (found, "Results of")):
        assert says in each._repr_html_()
        assert max(map(len, str(each).splitlines())) <= 80
    assert len(pictures(found._repr_html_())) == 1


@pytest.mark.slow
def test_a_crowded_picture_has_no_words_and_a_plot_has_them(model: interp.HookedTransformer) -> None:
    found = interp.logit_lens(model, some_tokens(rows=1, n=8))
    few, many = (found.isel(pos=np.arange(n) % 8) for n in (8, 200))
    words = []
    for each in (few, many):
        cards.png(lambda ax, each=each: words.append(len(interp.plot.drawn(each, ax=ax).texts)))
    assert words == [few.depth.size * 8, 0]
    assert len(many.view.plot().texts) == many.depth.size * 200


def test_a_large_product_is_not_taken_apart_unasked() -> None:
    wide = torch.zeros(1, 1).expand(3_000_000, 5), torch.zeros(1, 1).expand(5, 3_000_000)
    assert "no picture unasked" in interp.core.FactoredMatrix(*wide)._repr_html_()


# --- in a notebook ----------------------------------------------------------------------------------------------------


def test_a_notebook_shows_a_result_with_its_picture_above_xarrays_view(
    shell: object, result: xr.Dataset
) -> None:
    html = html_of(shell, result)
    assert len(pictures(html)) == 1
    assert html.index("<img") < html.index("xr-wrap") and html.endswith(result._repr_html_()[-50:])
    assert plt.get_fignums() == []


def test_a_notebook_shows_a_dataset_of_others_as_always(shell: object) -> None:
    other = xr.Dataset({"t": ("x", [1.0, 2.0])}, attrs={"title": "weather", "analysis": "ERA5"})
    ids = r"[0-9a-f]{8}-[0-9a-f-]{27}"  # of its parts, drawn anew each time
    assert re.sub(ids, "", html_of(shell, other)) == re.sub(ids, "", other._repr_html_())


def test_a_printer_of_the_users_own_is_kept(shell: object, result: xr.Dataset) -> None:
    formatter = shell.display_formatter.formatters["text/html"]  # type: ignore[attr-defined]
    formatter.for_type(xr.Dataset, lambda _: "<p>mine</p>")
    accessor._tell_notebook()
    assert html_of(shell, result) == "<p>mine</p>"


def test_a_notebook_shows_our_objects_by_their_cards(shell: object) -> None:
    html = html_of(shell, interp.core.FactoredMatrix(torch.ones(4, 2), torch.rand(2, 3)))
    assert len(pictures(html)) == 1 and "FactoredMatrix" in html


def test_a_picture_is_a_png() -> None:
    data, width = cards.png(lambda ax: ax.plot([0, 1]))
    assert data.startswith(PNG) and 0 < width <= cards.WIDEST


def test_no_control_character_of_a_prompt_is_in_a_text_of_a_result() -> None:
    model, odd = interp.HookedTransformer.from_pretrained("demo-4l"), "When\x00 Mary\u202e and\u2066 John\x9b"
    found = interp.lenses.patchscope(model, "When Mary and John", target=odd)
    noted = interp.core.results.noted(found, f"of {odd}")
    texts = (
        found._repr_html_(),
        str(found),
        str(noted.view),
        accessor.dataset_html(noted),
        noted._repr_html_(),
    )
    assert all(
        not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", each) for each in texts
    )
    assert "␀" in found.attrs["target"] and "␀" in texts[2]
