"""The numbers of the lattice and of the large head are those of the analyses, for every kind of block."""

import base64
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import interp
from interp.core.visible import visible
from interp.data.batch import Batch
from interp.model import Read
from interp.model.weights import Weights
from interp.pages import page, view_lattice
from interp.pages.flow import FLOOR, LISTED, MOST_LISTED, listed
from interp.pages.report import About, ReportQuestion, report_of
from interp.pages.view_lattice import STEPS, STRONGEST
from interp.passes.observe import observe
from tests.pages.reports import ANSWER, PROMPT, WRONG, page_of, report
from tests.pages.test_report import payload
from tests.pages.test_sections import model_of, section
from tests.tiny import hooked

PLAIN = ["gpt2", "parallel", "attention-only", "gemma2", "llama-gqa"]


def unpacked(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind)


@pytest.mark.parametrize("name", PLAIN)
def test_the_table_of_shares_is_the_function_from_the_floor_on(name: str) -> None:
    table, found = (
        report(name).tables["flow_routes"],
        interp.tokens.flow_routes(hooked(name), PROMPT).isel(prompt=0),
    )
    moved = table[table.kind == "head"]
    assert len(moved) == int((found.value >= FLOOR).sum())
    at = found.value.values[moved.layer, moved["head"].astype(int), moved["query"], moved.key]
    np.testing.assert_allclose(moved.value, at, rtol=1e-12)
    for kind in set(found.data_vars) - {"value"}:
        part = table[table.kind == kind]
        np.testing.assert_allclose(part.value, found[kind].values.ravel(), rtol=1e-12)
        assert (part.key == part["query"]).all() and part["head"].isna().all()
        assert (part.part == [f"L{layer}.{kind}" for layer in part.layer]).all()


@pytest.mark.parametrize("name", ["gpt2", "parallel", "gemma2"])
def test_direct_effects_are_attributions_and_stand_at_the_last_token(name: str) -> None:
    table = report(name).tables["flow_routes"]
    found = interp.attribute(hooked(name), PROMPT, ANSWER, WRONG, parts="source").isel(prompt=0)
    last = table["query"].max()
    assert table.attribution[(table["query"] != last) | ~table.kind.isin(("head", "mlp"))].isna().all()
    moved = table[(table.kind == "head") & (table["query"] == last)]
    expected = found.by_source.values[moved.layer, moved["head"].astype(int), moved.key]
    np.testing.assert_allclose(moved.attribution, expected, rtol=1e-9)
    mlps = table[(table.kind == "mlp") & (table["query"] == last)]
    for name, logits in zip(mlps.part, mlps.attribution, strict=True):
        assert logits == pytest.approx(float(found.value.sel(part=name)))


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "post-norm"])
def test_value_norms_are_the_lengths_of_values_after_w_o(name: str) -> None:
    model = hooked(name)
    table, tokens = report(name).tables["value_norms"], model.text.batch(PROMPT).tokens
    config, n = model.cfg, tokens.shape[1]
    assert len(table) == config.n_layers * config.n_heads * n
    group = config.n_heads // config.kv_heads
    for layer in range(config.n_layers):
        read = Read(f"blocks.{layer}.attn.hook_v")
        v = observe(model.transformer, Batch(tokens), [read]).trace[read][0]
        out = Weights(model.transformer).layer(layer).W_O
        for head in range(config.n_heads):
            expected = (v[:, head // group] @ out[head]).norm(dim=-1)
            mine = table.query(f"layer == {layer} and head == {head}")
            np.testing.assert_allclose(mine.value, expected, rtol=1e-5)


def test_table_of_words_is_the_function_on_the_prompts_different_tokens() -> None:
    table, model = report("gpt2").tables["head_tokens"], hooked("gpt2")
    ids = torch.unique(model.text.batch(PROMPT).tokens)
    assert sorted(set(table.token_id)) == ids.tolist()
    found = interp.weights.head_tokens(model, ids, top=listed(model.cfg, len(ids)))
    for name in ("raises", "lowers", "seeks"):
        part, expected = table[table.list == name], found.sel(list=name)
        known = expected.word_id.values >= 0
        np.testing.assert_array_equal(part.word_id, expected.word_id.values[known])
        np.testing.assert_allclose(part.value, expected.value.values[known], rtol=1e-12)
    assert table.word.tolist() == model.text.pieces(table.word_id.tolist())
    assert table.token.tolist() == model.text.pieces(table.token_id.tolist())


@pytest.mark.parametrize("tokens", [1, 4, 64, 100_000])
def test_lists_are_shortened_so_that_the_page_stays_small(tokens: int) -> None:
    config = interp.model.ModelConfig(12, 768, 12, n_ctx=1024, d_vocab=50257)
    each = listed(config, tokens)
    assert 1 <= each <= LISTED
    assert each == 1 or 2 * 144 * tokens * each <= MOST_LISTED
    assert each == LISTED or 2 * 144 * tokens * (each + 1) > MOST_LISTED


@pytest.mark.parametrize("name", PLAIN)
def test_the_inline_numbers_are_the_tables(name: str) -> None:
    one = report(name)
    inline, tables, config = payload(page_of(one)), one.tables, one.config
    n = len(inline["names"])
    flows = tables["flow_routes"]
    lattice = inline["lattice"]
    edges = unpacked(lattice["edges"], "<u2").reshape(-1, 5)
    moved = flows[flows.kind == "head"]
    np.testing.assert_array_equal(edges[:, :4], moved[["layer", "head", "query", "key"]].astype(int))
    np.testing.assert_allclose(edges[:, 4] / 65535, moved.value, atol=1e-5)
    for kind, text in lattice["own"].items():
        np.testing.assert_allclose(unpacked(text, "<u2") / 65535, flows[flows.kind == kind].value, atol=1e-5)
    assert set(lattice["own"]) == set(flows.kind) - {"head"}
    lens = tables["logit_lens"].query("rank == 0")
    np.testing.assert_allclose(unpacked(lattice["answer"], "<u2") / 65535, lens.answer_prob, atol=1e-5)
    assert len(lens) == (config.n_layers + 1) * n
    norms = unpacked(inline["values"]["cells"], "<u2") / 65535 * inline["values"]["most"]
    np.testing.assert_allclose(norms, tables["value_norms"].value, atol=1e-4 * inline["values"]["most"])


def test_the_inline_words_are_the_table() -> None:
    one = report("gpt2")
    words, table = payload(page_of(one))["words"], one.tables["head_tokens"]
    ids = one.tables["tokens"].token_id.tolist()
    known = sorted(set(ids))
    assert [known[place] for place in words["tokens"]] == ids and words["count"] == len(known)
    for name, part in table.groupby("list"):
        stored = words[str(name)]
        said = [words["texts"][place] for place in unpacked(stored["ids"], "<u2")]
        assert said == [visible(word) for word in part.word]
        most = np.repeat(stored["most"], len(part) // len(stored["most"]))
        np.testing.assert_allclose(
            unpacked(stored["scores"], "<i2") / 32767 * most, part.value, atol=1e-4 * max(stored["most"])
        )
        assert stored["each"] == part["rank"].max() + 1


def test_the_table_without_a_script_lists_the_largest_shares() -> None:
    one = report("gpt2")
    text = section(page_of(one), "lattice")
    parts = one.tables["flow_routes"].query("kind in ('head', 'mlp')")
    assert text.count('<th scope="row">') == min(STRONGEST, len(parts))
    first = parts.loc[parts.value.idxmax()]
    assert f"{100 * first.value:.1f} %" in text.split("<tbody>")[1].split("</tr>")[0]
    assert f'max="{len(STEPS) - 1}"' in text


def test_a_model_without_routes_says_why_and_has_the_rest() -> None:
    one = report("post-norm")
    text = page_of(one)
    assert "flow_routes" not in one.tables and "lattice" not in payload(text)
    assert "norms the sum itself" in section(text, "lattice")
    assert 'name="weighting"' in section(text, "attention") and 'id="reading"' in section(text, "attention")


def test_a_model_without_logits_has_neither_lattice_nor_words() -> None:
    text = page(report_of(model_of({"unembed": False}), ReportQuestion(PROMPT), About("headless")))
    assert "no unembedding" in section(text, "lattice")
    assert "reading" not in section(text, "attention") and "weighting" not in section(text, "attention")
    assert not {"lattice", "values", "words"} & set(payload(text))


def test_a_model_without_mlps_has_no_shares_of_them(planted_folder: Path) -> None:
    flows = pd.read_parquet(planted_folder / "flow_routes.parquet")
    assert flows.value.between(0, 1).all() and set(flows.kind) == {"head", "attn_bias", "resid"}


@pytest.mark.parametrize(("edges", "opened"), [(400, 0.02), (401, 0.03), (10**5, 0.5)])
def test_the_lattice_opens_where_few_enough_edges_are_left(edges: int, opened: float) -> None:
    shares = np.full(edges, 0.9 if edges > 10**4 else 0.025)
    table = pd.DataFrame({"kind": ["head", "mlp"] * (edges // 2) + ["head"] * (edges % 2), "value": shares})
    assert view_lattice.opens(table) == opened
    assert view_lattice.opens(table.assign(kind="resid")) == view_lattice.OPENS
