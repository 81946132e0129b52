"""The tables of the page agree with the analyses, and the page with the tables."""

import base64
import dataclasses
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

import interp
from interp.model import Learned
from interp.pages import About, Report, ReportQuestion, page, report_of, tables
from interp.runs import kept
from interp.runs.provenance import model_hash
from interp.views import writing
from tests.configs import CONFIGS, perturbed
from tests.pages.conftest import CORRUPTED, PLANTED
from tests.pages.reports import page_of, payload
from tests.tiny import CORPUS, hooked
from tests.tolerances import TOLERANCES

TABLES = {
    "tokens",
    "next_tokens",
    "heads",
    "circuits",
    "composition",
    "attribution",
    "attribution_sources",
    "attention",
    "logit_lens",
    "backward_lens",
    "ablation",
    "patching",
    "edges",
    "flow_routes",
    "value_norms",
    "head_tokens",
    "faithfulness",
}


class Outline(HTMLParser):
    """What a page refers to, and its visible and embedded text by the tag that holds it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = ["html"]
        self.texts: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]

    def handle_data(self, data: str) -> None:
        self.texts[self.tags[-1]] = self.texts.get(self.tags[-1], "") + data


# --- the tables against the analyses ------------------------------------------------------------------------------


def test_losses_are_those_of_the_model(planted: Report, planted_model: interp.HookedTransformer) -> None:
    table = planted.tables["tokens"]
    loss = planted_model(PLANTED, return_type="loss", loss_per_token=True)[0]
    assert table.token.tolist() == ["<|bos|>", *PLANTED]
    np.testing.assert_allclose(table.loss_nats[1:], loss, rtol=1e-6)
    assert np.isnan(table.loss_nats[0])
    assert table["rank"][0] == -1
    np.testing.assert_allclose(table.prob[1:], np.exp(-table.loss_nats[1:]), rtol=1e-6)


def test_next_tokens_and_ranks_are_those_of_sorted_logits() -> None:
    model = hooked("gpt2")
    report = report_of(model, ReportQuestion("The cat sat"), About("tiny"))
    logits = model("The cat sat")[0]
    order = logits.argsort(-1, descending=True)
    table, ids = report.tables["next_tokens"], report.tables["tokens"].token_id.tolist()
    for pos, group in table.groupby("pos"):
        assert group.token_id.tolist() == order[pos, :10].tolist()
        np.testing.assert_allclose(group.prob, logits[pos].softmax(-1)[order[pos, :10]], rtol=1e-5)
    expected = [order[pos].tolist().index(token) for pos, token in enumerate(ids[1:])]
    assert report.tables["tokens"]["rank"].tolist() == [-1, *expected]


def test_head_scores_are_those_of_the_function(
    planted: Report, planted_model: interp.HookedTransformer
) -> None:
    scores = interp.heads(planted_model, repeats=interp.tasks.RepeatedTokens(seed=3))
    expected = interp.frame(scores)
    pd.testing.assert_frame_equal(planted.tables["heads"][expected.columns.tolist()], expected)


def test_exactly_the_planted_head_is_marked_as_induction_head(planted: Report) -> None:
    table = planted.tables["heads"]
    assert table[table.is_induction_head].part.unique().tolist() == ["L1H2"]


def test_a_head_is_not_marked_while_its_interval_reaches_down_to_the_null() -> None:
    cells = {"value": 0.5, "low": 0.02, "high": 0.98, "null": 0.03}
    result = interp.heads(hooked("gpt2"), repeats=interp.tasks.RepeatedTokens(period=5)).isel(
        layer=[0], head=[0]
    )
    shape = xr.zeros_like(result.value)
    assert not tables.heads(result.assign({k: v + shape for k, v in cells.items()})).is_induction_head.any()
    cells["low"] = 0.04
    assert tables.heads(result.assign({k: v + shape for k, v in cells.items()})).is_induction_head.all()


def test_attribution_is_the_functions_and_sums_to_the_logit_difference(
    planted: Report, planted_model: interp.HookedTransformer
) -> None:
    table = planted.tables["attribution"]
    result = interp.attribute(planted_model, PLANTED, "d", "e", parts="head")
    assert table.part.tolist() == result.part.values.tolist()
    a_unit = (
        np.finfo(np.float32).eps * np.abs(result.value[0]).max()
    )  # the parts are cut out of sums as large as this
    np.testing.assert_allclose(table.value, result.value[0], rtol=1e-5, atol=8 * a_unit)
    logits = planted_model(PLANTED)[0, -1]
    right, wrong = (planted_model.to_single_token(text) for text in "de")
    assert planted.contrast.total == pytest.approx(float(logits[right] - logits[wrong]), rel=1e-5)
    assert table.value.sum() == pytest.approx(planted.contrast.total, rel=1e-5)
    assert table.share.sum() == pytest.approx(1.0, rel=1e-5)
    head = table[table.part == "L1H2"].iloc[0]
    assert (head.kind, head.layer, head["head"]) == ("head", 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt2", "attention-only", "llama-gqa", "no-norm", "bloom", "gemma2", "olmo2", "gpt-oss"]
)
def test_every_part_has_a_kind_and_sources_sum_to_their_head(name: str) -> None:
    report = report_of(hooked(name), ReportQuestion("The cat sat on the mat"), About(name))
    parts = report.tables["attribution"]
    config = report.config
    counts = parts.kind.value_counts()
    assert counts["head"] == config.n_layers * config.n_heads
    assert counts.get("mlp", 0) == (config.n_layers if config.mlp else 0)
    assert counts["attn_bias"] == config.n_layers
    assert counts["final_bias"] == 1 and counts.get("embed_bias", 0) == (name == "bloom")
    assert counts["embed"] == 1 and counts.get("pos_embed", 0) == isinstance(config.position, Learned)
    assert page(report)
    sums = report.tables["attribution_sources"].groupby(["layer", "head"]).value.sum()
    heads = parts[parts.kind == "head"].set_index(["layer", "head"]).value
    np.testing.assert_allclose(sums, heads, rtol=1e-6, atol=1e-9)


def test_circuits_and_composition_are_those_of_the_functions(
    planted: Report, planted_model: interp.HookedTransformer
) -> None:
    found = planted.tables["circuits"].pivot(index="layer", columns=["score", "head"], values="value")
    expected = interp.copying(planted_model, ranks=False)
    np.testing.assert_allclose(found.eigenvalue, expected.value.sel(score="eigenvalue"), rtol=1e-6)
    assert found.matching.loc[0].isna().all() and found.matching.loc[1].idxmax() == 2
    pairs = planted.tables["composition"]
    assert pairs.kind.value_counts().to_dict() == {"Q": 16, "K": 16, "V": 16}
    best = pairs.loc[pairs.excess.idxmax()]
    assert tuple(best[["kind", "src", "dst"]]) == ("K", "L0H1", "L1H2")
    cell = interp.composition(planted_model, "K").sel(src="L0H1", dst="L1H2")
    assert best.relative == pytest.approx(float(cell.relative))


def test_a_single_layer_composes_with_nothing_and_says_so() -> None:
    config = replace(CONFIGS["gpt2"], n_layers=1, d_vocab=hooked().cfg.d_vocab)
    model = interp.HookedTransformer(perturbed(config), hooked().text.tokenizer)
    report = report_of(model, ReportQuestion("The cat sat"), About("one layer"))
    assert len(report.tables["composition"]) == 0
    assert "this model has no pairs" in page(report)


def test_a_report_looks_at_the_weights_once_and_names_their_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    model, looks, content = hooked("gpt2"), list[str](), kept.content
    monkeypatch.setattr(kept, "content", lambda network: looks.append(content(network)) or looks[-1])
    found = report_of(model, ReportQuestion("The cat sat"), About("gpt2"))
    assert len(looks) == 1
    assert found.provenance["model_sha256"] == model_hash(model.transformer)


def test_attention_is_the_recorded_pattern(planted: Report, planted_model: interp.HookedTransformer) -> None:
    table = planted.tables["attention"]
    _, cache = planted_model.run_with_cache(PLANTED, "blocks.*.attn.hook_pattern")
    patterns = torch.stack([cache["pattern", layer][0] for layer in range(2)])
    expected = patterns[tuple(table[name].tolist() for name in ("layer", "head", "query", "key"))]
    np.testing.assert_array_equal(table.value, expected)
    assert (table.key <= table["query"]).all()
    np.testing.assert_allclose(table.groupby(["layer", "head", "query"]).value.sum(), 1, rtol=1e-5)
    assert set(table[table.key == 1].key_token) == {"a"}


def agree(found: pd.Series, expected: pd.Series) -> None:
    """To rounding: beside it routes are asked for, which look at patterns, and those are rounded otherwise."""
    tolerance = TOLERANCES[torch.float32]
    np.testing.assert_allclose(found, expected, rtol=tolerance.rtol, atol=tolerance.atol)


def test_the_lens_is_that_of_the_function(planted: Report, planted_model: interp.HookedTransformer) -> None:
    table = planted.tables["logit_lens"]
    for target, answer in (("next", None), ("answer", "d")):
        expected = interp.frame(interp.logit_lens(planted_model, PLANTED, answer=answer, top=10))
        assert table[f"{target}_rank"].tolist() == expected.target_rank.tolist()
        agree(table[f"{target}_prob"], expected.target_prob)
    assert table.top_token.tolist() == expected.top_token.tolist()
    agree(table.kl, expected.kl)
    assert table.word.tolist() == planted_model.text.pieces(table.top_token.tolist())
    output = table[table.depth == "L1.resid_post"].reset_index(drop=True)
    assert output.word.tolist() == planted.tables["next_tokens"].token.tolist()


def test_fitted_lenses_stand_beside_the_logit_lens() -> None:
    model, prompt = hooked("gpt2"), "The cat sat"
    jacobian = interp.lenses.jacobian_lens(model, [*CORPUS, *CORPUS], skip=1)
    tuned = interp.lenses.TunedLens.untrained(model)
    report = report_of(
        model, ReportQuestion(prompt), About("tiny"), lenses={"Jacobian": jacobian, "untrained": tuned}
    )
    table = report.tables["fitted_lenses"]
    mine = {name: part.reset_index(drop=True) for name, part in table.groupby("lens", sort=False)}
    read = interp.frame(jacobian.read(prompt).isel(prompt=0).reset_coords("prompt", drop=True))
    for name in ("top_token", "kl", "low", "high", "stays"):
        np.testing.assert_array_equal(mine["Jacobian"][name], read[name])
    same = report.tables["logit_lens"]  # translators that change nothing
    pd.testing.assert_frame_equal(mine["untrained"][list(same)], same)
    assert mine["untrained"][["low", "high", "stays"]].isna().all(axis=None)
    text = page(report)
    assert re.findall(r'name="lens" value="(.*?)"', text) == ["Logit lens", "Jacobian", "untrained"]
    assert re.findall(r'data-lens="(.*?)"', text) == ["Logit lens", "Jacobian", "untrained"]
    first = mine["Jacobian"].iloc[0]
    said = f"rank {first.low + 1:.0f} to {first.high + 1:.0f}, listed by {100 * first.stays:.0f} %"
    assert said in text
    assert report.provenance["units"]["fitted_lenses"]["stays"] == "share of resamples"
    plain = page(report_of(model, ReportQuestion(prompt), About("tiny")))
    assert "data-lens" not in plain and 'name="lens"' not in plain


def test_a_lens_of_another_model_is_refused() -> None:
    other = interp.lenses.TunedLens.untrained(hooked("llama-gqa"))
    with pytest.raises((ValueError, KeyError), match="another model"):
        report_of(hooked("gpt2"), ReportQuestion("The cat sat"), About("tiny"), lenses={"x": other})


# --- questions ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_an_answer_the_models_first_two_tokens_are_compared(
    planted_model: interp.HookedTransformer,
) -> None:
    report = report_of(planted_model, ReportQuestion(PLANTED), About("x"))
    first, second = report.tables["next_tokens"].query("pos == 15").token.tolist()[:2]
    contrast = report.contrast
    assert contrast.wrong is not None
    assert (contrast.answer.token, contrast.wrong.token, contrast.chosen_by_model) == (first, second, True)
    assert (contrast.answer.rank, contrast.wrong.rank) == (0, 1)
    assert "came without an answer" in page(report)


@pytest.mark.slow
def test_without_a_wrong_answer_the_logit_itself_is_taken_apart(
    planted_model: interp.HookedTransformer,
) -> None:
    report = report_of(planted_model, ReportQuestion(PLANTED, "d"), About("x"))
    logit = planted_model(PLANTED)[0, -1, planted_model.to_single_token("d")]
    assert report.contrast.wrong is None
    assert report.contrast.total == pytest.approx(float(logit), rel=1e-6)
    assert "of the answer's logit alone" in page(report)


def test_questions_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="requires an answer"):
        ReportQuestion("abc", wrong="d")
    with pytest.raises(ValueError, match="must differ"):
        ReportQuestion("abc", "d", "d")


@pytest.mark.slow
def test_a_prompt_too_long_for_the_page_says_how_much_fits(
    planted_model: interp.HookedTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interp.pages.report.MOST_WEIGHTS", 400)
    with pytest.raises(ValueError, match="all 8 heads of this model for up to 9 tokens, the prompt has 16"):
        report_of(planted_model, ReportQuestion(PLANTED), About("x"))
    assert report_of(planted_model, ReportQuestion(PLANTED[:8]), About("x")).tables["tokens"].shape[0] == 9


@pytest.mark.slow
def test_a_single_token_is_enough_for_a_page(planted_model: interp.HookedTransformer) -> None:
    report = report_of(planted_model, ReportQuestion("a"), About("x"))
    assert report.tables["tokens"].token.tolist() == ["<|bos|>", "a"]
    assert "Tokens and losses" in page(report)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_tables(
    planted: Report, planted_model: interp.HookedTransformer
) -> None:
    again = report_of(planted_model, planted.question, planted.about, seed=3)
    for name, table in planted.tables.items():
        pd.testing.assert_frame_equal(again.tables[name], table)


# --- files --------------------------------------------------------------------------------------------------------


def test_every_table_is_written_as_parquet_and_as_csv_where_asked(
    planted: Report, planted_folder: Path, tmp_path: Path
) -> None:
    interp.pages.write_report(planted, tmp_path, csv=True)
    assert not list(planted_folder.glob("*.csv"))
    assert set(planted.tables) == TABLES
    for name, table in planted.tables.items():
        pd.testing.assert_frame_equal(
            pd.read_parquet(planted_folder / f"{name}.parquet"), table, check_dtype=False
        )
        csv = pd.read_csv(tmp_path / f"{name}.csv", keep_default_na=True)
        assert csv.columns.tolist() == table.columns.tolist()
        for column in table.select_dtypes("float"):
            np.testing.assert_allclose(csv[column], table[column], rtol=1e-6)


def test_the_run_file_says_what_ran_and_lists_what_was_written(planted: Report, planted_folder: Path) -> None:
    run = json.loads((planted_folder / "run.json").read_text())
    assert run["model"] == "groundtruth-induction"
    assert len(run["model_sha256"]) == 64
    assert run["seed"] == 3
    assert run["config"]["n_heads"] == 4
    assert run["parameters"]["prompt"] == PLANTED
    assert run["parameters"]["corrupt"] == CORRUPTED
    assert run["parameters"]["corrupted"]["total"] == planted.corrupted.total
    assert run["parameters"]["contrast"]["answer"]["token"] == "d"
    assert run["parameters"]["head_scores"] == dataclasses.asdict(planted.data)
    assert set(run["units"]) == set(planted.tables)
    for name, table in planted.tables.items():
        floats = {column for column in table if pd.api.types.is_float_dtype(table[column])} - {"n"}
        assert set(run["units"][name]) == floats, name
    assert run["versions"]["torch"] == torch.__version__
    assert sorted(run["files"]) == sorted(path.name for path in planted_folder.iterdir())


# --- the page -----------------------------------------------------------------------------------------------------


def test_the_page_refers_to_nothing_outside_its_folder(planted_folder: Path) -> None:
    text = (planted_folder / "index.html").read_text()
    outline = Outline(text)
    for link in outline.links:
        assert link.startswith("#") or (planted_folder / link).is_file(), link
    assert not {"img", "link", "iframe", "object", "embed"} & set(outline.tags)
    assert not re.search(r"url\(|@import", text)
    assert "default-src 'none'" in text


def test_the_numbers_are_on_the_page_without_any_script(planted: Report) -> None:
    outline = Outline(re.sub(r"<script.*?</script>", "", page_of(planted), flags=re.DOTALL))
    cells = outline.texts["td"] + outline.texts["button"] + outline.texts["small"] + outline.texts["dd"]
    head = planted.tables["attribution"].set_index("part").loc["L1H2"]
    assert f"+{head.value:.3f}" in cells
    assert f"{planted.contrast.total:.2f}" in cells
    for loss in planted.tables["tokens"].loss_nats[1:]:
        assert writing.number(loss) in cells
    assert planted.provenance["model_sha256"] in outline.texts["code"]


def test_attention_on_the_page_is_the_table_to_five_digits(planted: Report) -> None:
    packed = payload(page_of(planted))["attention"]
    assert packed["bytes"] == 2
    stored = np.frombuffer(base64.b64decode(packed["cells"]), "<u2") / 65535
    np.testing.assert_allclose(stored, planted.tables["attention"].value, atol=0.51 / 65535)


def test_many_weights_are_stored_in_one_byte_each(planted: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interp.pages.render.COARSE", 100)
    packed = payload(page(planted))["attention"]
    stored = np.frombuffer(base64.b64decode(packed["cells"]), "u1") / 255
    np.testing.assert_allclose(stored, planted.tables["attention"].value, atol=0.51 / 255)


def test_tokens_that_look_like_markup_are_shown_and_never_obeyed() -> None:
    prompt = "<b>&'\"\u202e\n</script>"
    text = page(report_of(hooked("gpt2"), ReportQuestion(prompt), About("<i>name</i>", "<u>summary</u>")))
    outline = Outline(text)
    assert "u" not in outline.tags
    assert "<i>name" not in text
    assert "\u202e" not in text
    assert "⟨U+202E⟩" in text
    assert text.count("</script>") == 2
    assert "".join(payload(text)["names"][1:]).startswith("<b>&")


def test_the_card_of_a_trained_model_is_shown_with_its_definitions(planted: Report) -> None:
    entry = {"value": 0.9231, "n": 10, "definition": "prefix-matching score", "head": "1.2"}
    about = About("x", "y", {"measured": {"best_induction_score": entry}})
    text = page(dataclasses.replace(planted, about=about))
    assert "best induction score" in text
    assert "0.923 (L1H2)" in text
    assert "prefix-matching score, n = 10" in text


@pytest.mark.slow
def test_a_full_context_of_a_demo_sized_model_stays_within_three_megabytes(random_model: Path) -> None:
    model = interp.HookedTransformer.from_pretrained(random_model)
    prompt = (" to the store" * 100)[: 13 * 36]
    report = report_of(model, ReportQuestion(prompt), About("random"))
    n = len(report.tables["tokens"])
    assert n > 100
    # Patching of every token would take long here: the maps of a short prompt, with their widest numbers.
    short = report_of(model, ReportQuestion(" to the store", corrupt=" to to store"), About("random"))
    cells = short.tables["patching"].assign(normalised=-0.123, value=-1.234, changed=True)
    by_token = cells[cells.pos == 0].drop(columns="pos").merge(pd.DataFrame({"pos": range(n)}), how="cross")
    patching = pd.concat([by_token, cells[cells["head"].notna()]])
    long = replace(
        report, corrupted=short.corrupted, tables={**short.tables, **report.tables, "patching": patching}
    )
    text = page(long)
    maps = text.split('<section id="patching"')[1].split("</section>")[0]
    assert maps.count('class="painted"') == 2 * 3 and maps.count('class="cell') == 2 * 4 * 8
    assert len(text.encode()) <= 2_000_000


def test_the_biases_of_norms_that_stand_in_the_stream_have_their_layer() -> None:
    parts = report_of(
        hooked("post-norm"), ReportQuestion("The cat sat on the mat"), About("post-norm")
    ).tables["attribution"]
    biases = parts[parts.kind.isin(("ln1_bias", "ln2_bias"))]
    assert biases.part.tolist() == ["L0.ln1_bias", "L0.ln2_bias", "L1.ln1_bias", "L1.ln2_bias"]
    assert biases.layer.tolist() == [0, 0, 1, 1]
