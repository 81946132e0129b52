"""Analyses on wrapped networks: those of our own code's twin to the number, or a refusal that says why."""

import pytest
import torch
from markupsafe import escape

import interp
from interp import HookedTransformer, lenses
from interp.model.edits import Edit, Set
from interp.model.tap import Read, Tap
from interp.pages.tables import UNITS
from tests.tiny import gpt2_tokenizer
from tests.wrapped.wrapping import spoken

CLEAN = ["When Mary and John went to the shop", "When Mary and John sat on the mat"]
CORRUPT = ["When John and Mary went to the shop", "When John and Mary sat on the mat"]
METRIC = interp.logit_difference([" Mary"], [" John"])
"""Of these the tests' tokenizer makes one token each."""

ANALYSES = {
    "lens": lambda m: interp.logit_lens(m, CLEAN, answer=" Mary"),
    "sublayers": lambda m: interp.attribute(m, CLEAN, answer=" Mary", parts="sublayer"),
    "heads": lambda m: interp.attribute(m, CLEAN, answer=" Mary", parts="head"),
    "sources": lambda m: interp.attribute(m, CLEAN, answer=" Mary", parts="source"),
    "patterns": lambda m: interp.heads(m),
    "patching": lambda m: interp.patch(m, CLEAN, CORRUPT, "resid_pre", metric=METRIC),
    "patching heads": lambda m: interp.patch(m, CLEAN, CORRUPT, "z", metric=METRIC),
    "attribution patching": lambda m: interp.attribution_patch(m, CLEAN, CORRUPT, "z", metric=METRIC),
    "attribution patching, layers dropped": lambda m: interp.attribution_patch(
        m, CLEAN, CORRUPT, "z", metric=METRIC, grad_drop=True
    ),
    "ablation": lambda m: interp.ablate(m, CLEAN, ["L1H2", "L0.mlp"], change=interp.edits.Zero(), metric=METRIC),
    "a stream": lambda m: interp.run([lenses.LogitLens(top=3)], m, CLEAN)["logit_lens"],
}  # fmt: skip


@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_of_a_wrapped_network_is_that_of_our_own_code(name: str) -> None:
    wrapped = spoken("llama")
    origin = wrapped.transformer.wrapped  # type: ignore[attr-defined]
    ours = HookedTransformer.from_pretrained(origin, tokenizer=gpt2_tokenizer(), wrapped=False)
    found, expected = (ANALYSES[name](model) for model in (wrapped, ours))  # type: ignore[no-untyped-call]
    if "score" in expected.dims:  # without those that are read off matrices, and what is concluded from all
        expected = expected.sel(score=found.score)[["value", "low", "high", "null"]]
        found = found[["value", "low", "high", "null"]]
    assert set(found.data_vars) == set(expected.data_vars)
    for variable in expected.data_vars:
        if expected[variable].dtype.kind == "f":
            torch.testing.assert_close(
                torch.tensor(found[variable].values), torch.tensor(expected[variable].values),
                rtol=1e-3, atol=2e-4, equal_nan=True,
            )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5_text", "falcon_h1", "gemma4_text"])
def test_patching_is_one_pass_a_cell_with_and_without_entering_blocks(kind: str) -> None:
    model = spoken(kind)
    found = interp.patch(model, CLEAN[:1], CORRUPT[:1], "resid_pre", metric=METRIC).value
    clean, corrupt = (model.to_batch(each) for each in (CLEAN[:1], CORRUPT[:1]))
    mary, john = (model.to_single_token(word) for word in (" Mary", " John"))

    def difference(tap: Tap | None) -> float:
        with torch.no_grad():
            logits = model.transformer(corrupt.tokens, tap)[0, -1]
        return float(logits[mary] - logits[john])

    for layer in (0, 2):
        read = Read(f"blocks.{layer}.hook_resid_pre")
        tap = Tap([read])
        model.transformer(clean.tokens, tap)
        for pos in (1, clean.tokens.shape[1] - 1):
            edit = Edit(read.site, Set(tap.values[read]), at={"pos": pos})
            expected = difference(Tap(edits=[edit])) - difference(None)
            mine = float(found.isel(layer=layer, pos=pos).squeeze())
            assert mine == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_a_sweep_says_what_it_costs_that_no_later_block_can_be_entered() -> None:
    model = spoken("gemma4_text")
    variants = [interp.edits.Variant([Edit(f"L{layer}.mlp", interp.edits.Zero())]) for layer in (1, 3)]
    from interp.passes.sweep import Sweep

    plan = Sweep(model, model.to_batch(CLEAN[0]), variants).plan()
    assert "takes no later start: every pack runs through all of its blocks" in plan.explain()
    assert [start.layer for start in plan.starts] == [0, 0]


def test_what_needs_unproven_matrices_is_refused_by_name() -> None:
    model = spoken("gemma4_text")
    with pytest.raises(AttributeError, match="no QK circuit"):
        interp.composition(model)
    with pytest.raises(ValueError, match="is a wrapped network"):
        interp.find_circuit(model, CLEAN, CORRUPT, metric=METRIC, edges=3)
    with pytest.raises(AttributeError, match="no OV circuit: it mixes positions by a wrapped network"):
        interp.copying(model)
    with pytest.raises(ValueError, match="requires known matrices; this model is a wrapped network"):
        interp.backward_lens(model, CLEAN[0], " Mary")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5_text", "deepseek_v3", "gemma4_text", "falcon_h1"])
def test_an_indirect_object_study_runs_from_the_lens_to_the_page(kind: str) -> None:
    """As `from_pretrained` opens them, wrapped or in our own code: each result against a plain pass."""
    theirs = spoken(kind).transformer.wrapped  # type: ignore[attr-defined]
    model = HookedTransformer.from_pretrained(theirs, tokenizer=gpt2_tokenizer())
    clean, corrupt = (model.to_batch(each[:1]).tokens for each in (CLEAN, CORRUPT))
    mary, john = (model.to_single_token(word) for word in (" Mary", " John"))
    with torch.no_grad():
        logits = [theirs(input_ids=each, use_cache=False).logits[0, -1] for each in (clean, corrupt)]
    before, after = (float(each[mary] - each[john]) for each in logits)
    parts = interp.attribute(model, CLEAN[0], " Mary", " John", parts="head")
    assert float(parts.value.sum()) == pytest.approx(before, abs=1e-4)
    lens = interp.logit_lens(model, CLEAN[0], answer=" Mary").isel(prompt=0, depth=-1, pos=-1)
    assert float(lens.target_prob) == pytest.approx(float(logits[0].softmax(-1)[mary]), abs=1e-5)
    last = interp.patch(model, CLEAN[0], CORRUPT[0], "resid_pre", metric=METRIC).value
    assert float(last.isel(layer=0).sum("pos")) != 0
    final = interp.patch(model, CLEAN[0], CORRUPT[0], "resid_post", metric=METRIC).value.isel(
        layer=-1, pos=-1
    )
    assert float(final) == pytest.approx(before - after, abs=1e-4)
    table = interp.heads(model)
    known = table.value.sel(score="induction").notnull().any("head").values
    assert known.tolist() == [mixer.traits.patterned for mixer in model.cfg.mixers]
    page = interp.report(model, CLEAN[0], " Mary", " John", CORRUPT[0])
    assert page.report.contrast is not None
    assert page.report.contrast.total == pytest.approx(before, abs=1e-4)
    assert {"patching", "attribution", "ablation", "logit_lens", "heads"} <= set(page.tables)


PAGES = {
    "gemma4_text": {"circuits", "composition", "head_tokens", "backward_lens", "flow_routes", "flow_neurons", "edges",
        "faithfulness"},
    "jamba": {"value_norms"},
    "mamba": {"attention", "heads", "attribution_sources", "value_norms", "flow_neurons"},
}  # fmt: skip
"""What pages of wrapped networks lack: matrices everywhere, values or patterns in some layers or in all."""


@pytest.mark.parametrize("kind", ["gemma4_text", pytest.param("jamba", marks=pytest.mark.slow), "mamba"])
def test_page_of_a_wrapped_network_has_what_was_proven_and_says_why(kind: str) -> None:
    model = spoken(kind)
    found = interp.report(model, CLEAN[0], " Mary", " John", CORRUPT[0])
    absent, tables = found.report.absent, found.tables
    assert set(absent) == PAGES["gemma4_text"] | PAGES[kind]
    assert all(str(escape(why)) in found.html for name, why in absent.items() if name != "faithfulness")
    assert not set(absent) & set(tables) and set(absent) | set(tables) == set(UNITS) - {"fitted_lenses"}
    expected = interp.attribute(model, CLEAN[0], " Mary", " John", parts="head")
    assert tables["attribution"].value.to_numpy() == pytest.approx(expected.value.values[0], abs=1e-5)
    assert tables["attribution"].value.sum() == pytest.approx(float(expected.total[0]), abs=1e-4)
    patched = interp.patch(model, CLEAN[0], CORRUPT[0], "z", metric=METRIC).value.values.ravel()
    drawn = tables["patching"].query("direction == 'denoise' and site == 'z'").value.to_numpy()
    assert drawn == pytest.approx(patched, abs=1e-5)
