"""The waterfall and the backward lens on the page: their numbers are the functions', what is missing says so."""

import math
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, strategies as st

import interp
from interp.core.visible import visible
from interp.pages import (
    About,
    Report,
    ReportQuestion,
    absent,
    findings,
    page,
    report_of,
    view_attribution,
    view_lens,
)
from interp.pages.folder import write_report
from interp.pages.view_attribution import Waterfall, WaterfallStep
from interp.views import writing
from tests.configs import CONFIGS, perturbed
from tests.pages.conftest import PLANTED
from tests.pages.reports import ANSWER, PROMPT, WRONG, page_of, report
from tests.tiny import hooked

VARIANTS = [
    "gpt2",
    "attention-only",
    "llama-gqa",
    "parallel",
    "bloom",
    "gemma2",
    "olmo2",
    "post-norm",
    "gpt-oss",
]


def section(text: str, name: str) -> str:
    """The source of one section of the page."""
    return text.split(f'<section id="{name}"')[1].split("</section>")[0]


def steps_of(fall: Waterfall) -> list[WaterfallStep]:
    return [step for band in fall.bands for step in band.steps]


def model_of(config_changes: dict[str, object], *, unembedding: float = 1.0) -> interp.HookedTransformer:
    """A random model of GPT-2's kind with something changed."""
    config = replace(CONFIGS["gpt2"], d_vocab=hooked().cfg.d_vocab, **config_changes)
    model = perturbed(config)
    if config.unembed:
        model.unembed.weight.mul_(unembedding)
    return interp.HookedTransformer(model, hooked().text.tokenizer)


# --- the waterfall ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_each_grain_of_the_waterfall_is_the_function_at_that_grain(name: str) -> None:
    falls = view_attribution.attribution(report(name).tables["attribution"]).waterfalls
    by_sublayer, by_head = (
        interp.attribute(hooked(name), PROMPT, ANSWER, WRONG, parts=grain) for grain in ("sublayer", "head")
    )
    found = [step.value for step in steps_of(falls["sublayer"])]
    np.testing.assert_allclose(found, by_sublayer.value[0], rtol=1e-9, atol=1e-12)
    assert [step.part for step in steps_of(falls["sublayer"])] == by_sublayer.part.values.tolist()
    every = dict(zip(by_head.part.values.tolist(), by_head.value[0].values.tolist(), strict=True))
    steps = {step.part: step.value for step in steps_of(falls["part"])}
    named = {part: value for part, value in steps.items() if not part.endswith(" others")}
    assert list(named) == [part for part in every if part in named]
    np.testing.assert_allclose(list(named.values()), [every[part] for part in named], rtol=1e-9, atol=1e-12)
    for fall in falls.values():
        assert fall.total.value == pytest.approx(float(by_head.total[0]), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "post-norm"])
def test_steps_start_where_the_last_ended_and_end_at_the_total(name: str) -> None:
    for fall in view_attribution.attribution(report(name).tables["attribution"]).waterfalls.values():
        at = fall.zero
        for step in steps_of(fall):
            start, end = (step.bottom, step.bottom + step.height)[:: -1 if step.value < 0 else 1]
            assert start == pytest.approx(at, abs=1e-9)
            at = end
        assert at == pytest.approx(fall.goal, abs=1e-9)
        ends = sorted((fall.total.bottom, fall.total.bottom + fall.total.height))
        assert ends == pytest.approx(sorted((fall.zero, fall.goal)), abs=1e-9)


def test_layers_are_bands_between_what_stands_before_and_after_them() -> None:
    falls = view_attribution.attribution(report("gpt2").tables["attribution"]).waterfalls
    assert [band.name for band in falls["sublayer"].bands] == ["embed", "L0", "L1", "final"]
    assert [[step.part for step in band.steps] for band in falls["sublayer"].bands] == [
        ["embed", "pos_embed"], ["L0.attn", "L0.mlp"], ["L1.attn", "L1.mlp"], ["final_bias", "rounding"],
    ]  # fmt: skip
    bands = [band.name for band in falls["part"].bands]
    assert bands == [name for name in ["embed", "L0", "L1", "final", "rest"] if name in bands]


def test_a_step_says_its_amount_its_share_and_the_sum_so_far() -> None:
    table = report("gpt2").tables["attribution"]
    step = steps_of(view_attribution.attribution(table).waterfalls["sublayer"])[2]
    inside = table.part.str.match(r"L0H|L0.attn_bias")
    amount, before = table.value[inside].sum(), table.value[:2].sum()
    assert step.part == "L0.attn"
    assert f"{writing.number(amount, 3, sign=True)} logits" in step.tip
    assert f"{writing.number(100 * amount / table.value.sum(), 1)} % of the total" in step.tip
    sums = [writing.number(value, 3, sign=True) for value in (before, before + amount)]
    assert f"sum so far {sums[0]} → {sums[1]}" in step.tip
    largest = table[inside].loc[table.value[inside].abs().idxmax()]
    assert f"largest: {largest.part} {writing.number(largest.value, 3, sign=True)}" in step.tip


def test_the_table_adds_up_row_by_row() -> None:
    found = report("llama-gqa")
    table = found.tables["attribution"]
    np.testing.assert_allclose(table.running_sum, np.cumsum(table.value))
    assert found.contrast is not None
    assert table.running_sum.iloc[-1] == pytest.approx(found.contrast.total, rel=1e-9)


def test_the_sum_of_the_components_stands_beside_the_models_own_number(planted: Report) -> None:
    assert planted.contrast is not None
    note = re.search(r'id="complete">(.*?)</p>', page_of(planted))
    assert note is not None
    total = float(planted.tables["attribution"].value.sum())
    assert f"sum to {writing.number(total, 3, sign=True)};" in note[1]
    assert f"logit difference is {writing.number(planted.contrast.total, 3, sign=True)}." in note[1]
    error = planted.contrast.completeness_error
    assert (f"{error:.1e}".replace("-", "−") if error else "by 0 of") in note[1]


@given(st.floats(-1e4, 0), st.floats(0, 1e4))
def test_ticks_are_few_round_numbers_inside_the_range_with_zero_among_them(low: float, high: float) -> None:
    if high - low < 1e-6:
        high = low + 1.0
    ticks = view_attribution.round_ticks(low, high)
    values = [value for _, value in ticks]
    assert 1 <= len(ticks) <= 7
    assert 0 in values
    slack = 1e-6 * (high - low)
    assert all(low - slack <= value <= high + slack for value in values)
    assert [float(text.replace("−", "-")) for text, _ in ticks] == pytest.approx(values, abs=slack)
    if len(values) > 1:
        width = values[1] - values[0]
        mantissa = width / 10 ** math.floor(math.log10(width * (1 + 1e-9)))
        assert min(abs(mantissa - nice) for nice in (1, 2, 5)) < 1e-6


# --- the backward lens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_the_backward_lens_of_the_page_is_the_function(name: str) -> None:
    found = report(name).tables["backward_lens"]
    matrices = ["W_out", "W_in"] if name not in ("attention-only", "gpt-oss") else ["W_O", "W_V"]
    assert found.matrix.drop_duplicates().tolist() == matrices
    lens = interp.backward_lens(hooked(name), PROMPT, ANSWER, matrices=matrices)
    for matrix in matrices:
        expected, ours = lens.isel(prompt=0).sel(matrix=matrix), found[found.matrix == matrix]
        cells = ours[ours["rank"] == 0].reset_index(drop=True)
        shape = expected.delta.shape
        for column in ("x", "delta", "relative_update"):
            np.testing.assert_array_equal(cells[column], expected[column].values.ravel())
        assert (cells.layer.tolist(), cells.pos.tolist()) == tuple(
            each.ravel().tolist() for each in np.indices(shape)
        )
        assert cells.answer_rank.tolist() == expected.target_rank.values.ravel().tolist()
        assert cells.token.tolist() == expected.token.values.tolist() * shape[0]
        assert cells.part.tolist() == expected.part.values.repeat(shape[1]).tolist()
        for end in ("top", "bottom"):
            assert ours[f"{end}_token"].tolist() == expected[f"{end}_token"].values.ravel().tolist()
            pieces = hooked(name).text.pieces(ours[f"{end}_token"].clip(lower=0).tolist())
            said = [word if i >= 0 else "none" for i, word in zip(ours[f"{end}_token"], pieces, strict=True)]
            assert ours[f"{end}_word"].fillna("none").tolist() == said


def test_norms_are_those_of_autograd_at_the_output_of_the_mlp() -> None:
    model, table = hooked("gpt2"), report("gpt2").tables["backward_lens"]
    kept: list[torch.Tensor] = []

    def keep(value: torch.Tensor, hook: object) -> torch.Tensor:
        kept.append(value.detach().requires_grad_())
        return kept[-1]

    with torch.enable_grad():
        logits = model.run_with_hooks(PROMPT, fwd_hooks=[("blocks.0.hook_mlp_out", keep)])
        loss = -logits[0, -1].log_softmax(-1)[model.to_single_token(ANSWER)]
    (gradient,) = torch.autograd.grad(loss, kept[0])
    cells = table[(table.matrix == "W_out") & (table.layer == 0) & (table["rank"] == 0)]
    np.testing.assert_allclose(cells.delta, gradient[0].norm(dim=-1), rtol=1e-9)


@pytest.mark.parametrize("name", ["gpt2", "attention-only"])
def test_where_nothing_would_be_written_there_are_no_tokens(name: str) -> None:
    """In the last layer only the last token reaches the loss, except through keys and values."""
    found = report(name)
    table, writes = found.tables["backward_lens"], {"gpt2": "W_out", "attention-only": "W_O"}[name]
    idle = table[(table.matrix == writes) & (table.layer == 1) & (table.pos < table.pos.max())]
    assert (idle.delta == 0).all() and (idle.answer_rank == -1).all()
    assert idle.top_word.isna().all() and idle.bottom_word.isna().all() and (idle.top_token == -1).all()
    panel = view_lens.backward_lens(table, ANSWER, found.config.d_vocab)[0]
    *silent, last = panel.rows[1].cells
    assert {cell.text for cell in silent} == {"no update"}
    assert all("probable" not in cell.tip and "no update" in cell.tip for cell in silent)
    assert last.text != "no update"
    assert "least probable of δ" in last.tip
    text = section(page_of(found), "backward")
    assert text.count("<bdi>no update</bdi>") == (table["rank"] == 0)[table.answer_rank < 0].sum()


def test_a_cell_names_the_end_that_is_read_and_lists_both(planted: Report) -> None:
    table = planted.tables["backward_lens"]
    text = unescape(section(page_of(planted), "backward"))
    for matrix, end in (("W_O", "bottom"), ("W_V", "top")):
        rows = table[(table.matrix == matrix) & (table.layer == 0) & (table.pos == 15)]
        first = rows.iloc[0]
        tips = [rows[f"{side}_word"].map(visible).str.cat(sep=" ") for side in ("bottom", "top")]
        side = "δ" if matrix == "W_O" else "x"
        tip = (
            f"least probable of {side}: {tips[0]}\nmost probable of {side}: {tips[1]}\n"
            f"the answer d: rank {first.answer_rank + 1}"
        )
        panel = text.split(f'data-matrix="{matrix}"')[1]
        assert f'{tip}"><bdi>{visible(first[f"{end}_word"])}</bdi>' in panel  # letters: no whole words
        assert f"‖δ‖ {first.delta:.3g} (" in panel


def test_exactly_the_cells_that_name_the_answer_are_marked() -> None:
    found = report("gpt2")
    table, last = found.tables["backward_lens"], found.config.d_vocab - 1
    token = hooked("gpt2").to_single_token(ANSWER)
    extreme = {"W_out": ("bottom", last), "W_in": ("top", 0)}
    counts = []
    for panel in view_lens.backward_lens(table, ANSWER, last + 1):
        end, rank = extreme[panel.matrix]
        first = table[(table.matrix == panel.matrix) & (table["rank"] == 0)]
        marked = [cell.marked for row in panel.rows for cell in row.cells]
        assert marked == (first[f"{end}_token"] == token).tolist()
        assert marked == (first.answer_rank == rank).tolist()
        counts.append(sum(marked))
    assert counts[0] > 0


def test_certain_answer_leaves_nothing_to_write_and_the_page_says_so() -> None:
    model = model_of({}, unembedding=1e6)
    found = report_of(model, ReportQuestion(PROMPT), About("certain"))
    table = found.tables["backward_lens"]
    assert (table.delta == 0).all()
    text = section(page(found), "backward")
    assert text.count("Every δ is zero") == 2
    assert "nan" not in text.lower()
    assert text.count("<bdi>no update</bdi>") == (table["rank"] == 0).sum()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("attention-only", "This model is attention-only"),
        ("granite-moe", "a mixture of experts"),
        ("gpt2", None),
    ],
)
def test_a_model_whose_mlps_cannot_be_shown_says_why(name: str, words: str | None) -> None:
    text = section(page_of(report(name)), "backward")
    assert ("shown are the matrices of attention" in text) == (words is not None)
    assert words is None or words in text
    assert ('value="W_out"' in text) == (words is None)


# --- models without logits ----------------------------------------------------------------------------------------


def test_page_of_a_model_without_an_unembedding_says_what_it_leaves_out(tmp_path: Path) -> None:
    found = report_of(model_of({"unembed": False}), ReportQuestion(PROMPT), About("headless"))
    assert found.contrast is None and findings(found) == ()
    assert set(found.tables) == {"tokens", "heads", "composition", "attention"}
    assert found.tables["tokens"].loss_nats.isna().all()
    text = page(found)
    for name in ("attribution", "lens", "backward", "circuits"):
        assert absent.NO_LOGITS in section(text, name)
    for name in ("question", "tokens"):
        assert "no unembedding" in section(text, name)
    assert "data-grain" not in section(text, "attribution")
    assert 'class="thumb' in section(text, "attention")
    write_report(found, tmp_path)
    assert (
        pd.read_parquet(tmp_path / "tokens.parquet").token.tolist() == found.tables["tokens"].token.tolist()
    )


def test_an_answer_is_refused_where_there_are_no_logits() -> None:
    with pytest.raises(ValueError, match=r"an answer \('d'\) requires a model with logits"):
        report_of(model_of({"unembed": False}), ReportQuestion(PLANTED, "d"), About("x"))
