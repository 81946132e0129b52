"""Maximum-activating examples: the lists are those of a slow loop over texts, whatever batches carry them."""

import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

import interp
from interp import Batch, HookedTransformer
from interp.core.contexts import ContextExamples
from interp.data.sources import open_source
from interp.data.stream import RowLayout, Stream
from interp.features import Dictionary, ReLU, TopExamples, examples_table, top_examples
from interp.features.top_examples import QUANTILES, RELATIVE_ERROR
from interp.model import Read
from tests.configs import CONFIGS, perturbed
from tests.loops import over
from tests.tiny import hooked
from tests.tolerances import student95

TEXTS = [
    f"{'bdfghjklmnprst'[i]} The cat sat on the mat and the dog sat on Mary."[: 4 + 7 * i % 26]
    for i in range(14)
]
"""Of many lengths; the first letter keeps two texts from having equal numbers anywhere but at BOS."""
MODULE = sys.modules["interp.features.top_examples"]  # the wing has the function under this name
TOP, BEFORE, AFTER = 4, 3, 2
BLOCK = "blocks.1."
CELLS = {"neuron": [3, 0, 17], "coordinate": [5, 2], "head": [1, 3], "kv_head": [1]}
SITES: dict[str, tuple[str, Callable[[Tensor], Tensor] | None]] = {
    "mlp.hook_post": ("neuron", None),
    "mlp.hook_pre": ("neuron", None),
    "hook_resid_mid": ("coordinate", None),
    "attn.hook_z": ("head", lambda z: (z * z).sum(-1).sqrt()),
    "attn.hook_result": ("head", lambda out: (out * out).sum(-1).sqrt()),
    "attn.hook_v": ("kv_head", lambda v: (v * v).sum(-1).sqrt()),
}
"""Sites, what their cells are called, and what their value is."""
Curves = list[tuple[list[int], Tensor]]


@pytest.fixture(autouse=True)
def intervals_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals of as few texts as there are here, whether they hold the mean or not."""
    monkeypatch.setattr(MODULE, "FEWEST_TEXTS", 3)
    monkeypatch.setattr(MODULE, "FEWEST_SUMS", 3)


@cache
def curves(site: str, bos: bool = True) -> Curves:
    """Token ids and the site's value `[p c]` of every text, each alone in its pass."""
    found = []
    for text in TEXTS:
        batch = model().text.batch(text, prepend_bos=bos)
        read = Read(BLOCK + site)
        value = interp.observe(model().transformer, batch, [read]).trace[read]
        kind = SITES[site][1] if site in SITES else None
        found.append((batch.tokens[0].tolist(), (value if kind is None else kind(value))[0]))
    return found


def model() -> HookedTransformer:
    return hooked("gpt2")


def stream(tokens: int = 64, window: int = 5, layout: RowLayout = "padded") -> Stream:
    source = open_source(TEXTS)
    return Stream(source, model().text, tokens_per_batch=tokens, rows_per_window=window, layout=layout)


def shares(top: Tensor, bottom: Tensor) -> list[float]:
    """A ratio of sums over texts and the ends of its interval, from the texts themselves."""
    value, n = float(top.sum() / bottom.sum()), len(top)
    squares = float((top - value * bottom).square().sum())
    half = student95(n) * (squares * n / (n - 1)) ** 0.5 / float(bottom.sum().abs())
    return [value, value - half, value + half]


def check(found: xr.Dataset, every: Curves, first: int = 1, largest: bool = True, once: bool = True) -> None:
    """The result against sorting every token of every text; `first`: the first position that counts."""
    dim = str(found.peak.dims[0])
    for cell in found[dim].values:
        one, sign = found.sel({dim: cell}), 1 if largest else -1
        scored = [
            (-sign * float(curve[p, cell]), n, p)
            for n, (ids, curve) in enumerate(every)
            for p in range(first, len(ids))
        ]
        kept: list[tuple[float, int, int]] = []
        for entry in sorted(scored):
            if not (once and entry[1] in [n for _, n, _ in kept]):
                kept.append(entry)
        kept = kept[: one.sizes["rank"]]
        assert list(zip(one.row.values, one.pos.values, strict=True)) == [(n, p) for _, n, p in kept]
        np.testing.assert_allclose(one.peak, [-sign * s for s, _, _ in kept], rtol=1e-9)
        for rank, (_, n, p) in enumerate(kept):
            ids, curve = every[n]
            around = [p + int(w) for w in one.offset]
            inside = [first <= q < len(ids) for q in around]
            expected = [ids[q] if 0 <= q < len(ids) else -1 for q in around]
            assert one.tokens[rank].values.tolist() == expected
            run = [float(curve[q, cell]) if good else np.nan for q, good in zip(around, inside, strict=True)]
            np.testing.assert_allclose(one.activation[rank], run, rtol=1e-9, atol=1e-12)
        for name, value in (("density", lambda x: x > 0), ("mean", lambda x: x)):
            sums = torch.tensor(
                [float(value(curve[first:, cell]).sum()) for _, curve in every], dtype=torch.float64
            )
            ends = shares(sums, torch.tensor([len(ids) - first for ids, _ in every], dtype=torch.float64))
            got = [float(one[variable].sel(score=name)) for variable in ("value", "low", "high")]
            np.testing.assert_allclose(got, ends, rtol=1e-9, atol=1e-12)
            assert int(one.n.sel(score=name)) == len(every)
        values = np.array([-sign * s for s, _, _ in scored])
        ends_at = float(one.peak[0])
        assert float(one.quantiles.max() if largest else -one.quantiles.min()) <= (
            ends_at if largest else -ends_at
        )
        assert float(one.value.sel(score="density")) == pytest.approx((values > 0).mean(), rel=1e-12)
        assert float(one.value.sel(score="mean")) == pytest.approx(values.mean(), rel=1e-9, abs=1e-12)
        assert float(one.value.sel(score="max" if largest else "min")) == pytest.approx(
            values.max() if largest else values.min()
        )
        for q in QUANTILES:
            true = float(np.quantile(values, q, method="inverted_cdf"))
            assert float(one.quantiles.sel(q=q)) == pytest.approx(true, rel=RELATIVE_ERROR * 1.0001, abs=1e-4)
    assert found.attrs["tokens_counted"] == sum(len(ids) - first for ids, _ in every)
    assert found.attrs["texts"] == len(every)


def asked(site: str, **options: object) -> xr.Dataset:
    dim = SITES[site][0] if site in SITES else "head"
    options = {"cells": CELLS[dim], "top": TOP, "context": (BEFORE, AFTER), "data": stream()} | options
    return top_examples(model(), site=BLOCK + site, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("site", SITES)
def test_the_lists_are_those_of_a_slow_loop(site: str) -> None:
    found = asked(site)
    assert found.peak.dims == (SITES[site][0], "rank")
    assert found.value.coords[SITES[site][0]].values.tolist() == CELLS[SITES[site][0]]
    check(found, curves(site))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("once", [True, False])
def test_the_smallest_and_several_of_a_row_are_listed_if_asked(largest: bool, once: bool) -> None:
    found = asked("mlp.hook_pre", largest=largest, once_per_row=once, cells=None)
    assert found.sizes["neuron"] == 40
    check(found.isel(neuron=slice(6)), curves("mlp.hook_pre"), largest=largest, once=once)


def test_a_pattern_gives_the_key_that_is_attended_most() -> None:
    found, every = asked("attn.hook_pattern"), curves("attn.hook_pattern")
    best = [(ids, pattern[:, :, 1:].max(-1).values.mT) for ids, pattern in every]
    check(found, best)
    for head in found["head"].values:
        one = found.sel(head=head)
        for rank in range(TOP):
            ids, pattern = every[int(one.row[rank])]
            key = 1 + int(pattern[head, int(one.pos[rank]), 1:].argmax())
            assert (int(one.key[rank]), int(one.key_token[rank])) == (key, ids[key])
            assert str(one.key_piece[rank].values) == model().text.pieces([ids[key]])[0]


# --- batches --------------------------------------------------------------------------------------------------------


@over("site", ["mlp.hook_post", "attn.hook_pattern"])
@over("layout", ["padded", "packed"])
@over("tokens, window", [(1, 3), (30, 100), (100, 4), (10_000, 100)])
@pytest.mark.slow
def test_no_batch_size_window_or_packing_changes_a_list(
    site: str, layout: RowLayout, tokens: int, window: int
) -> None:
    found, whole = asked(site, data=stream(tokens, window, layout)), asked(site)
    for name in whole.data_vars:
        if whole[name].dtype.kind == "f":
            np.testing.assert_allclose(found[name], whole[name], rtol=1e-9, atol=1e-12, err_msg=str(name))
        else:
            assert found[name].equals(whole[name]), name


@pytest.mark.parametrize("site", ["mlp.hook_post", "attn.hook_pattern"])
def test_padding_on_the_left_changes_nothing(site: str) -> None:
    found = asked(site, data=[model().text.batch(TEXTS, side="left")])
    whole = asked(site)
    for name in ("row", "pos", "tokens", *(["key"] if "key" in whole else [])):
        assert found[name].equals(whole[name])
    np.testing.assert_allclose(found.value, whole.value, rtol=1e-9)


def test_equal_values_go_to_the_smaller_row_and_the_smaller_position() -> None:
    """Every row twice, each in a batch of its own, so that equal texts have equal bits."""
    rows = [[5, 6, 5, 6], [9, 9, 8, 9], [5, 6, 5, 6], [9, 9, 8, 9]]
    data = [replace(Batch(torch.tensor([rows[i]])), row=torch.tensor([i])) for i in (3, 2, 1, 0)]
    found = top_examples(model(), data, "hook_embed", cells=[0, 1, 2, 3], top=4, skip_bos=False)
    for i in range(4):
        one = found.isel(coordinate=i)
        best = 5 if model().transformer.embed.weight[5, i] > model().transformer.embed.weight[6, i] else 6
        nine = 9 if model().transformer.embed.weight[9, i] > model().transformer.embed.weight[8, i] else 8
        places = {0: rows[0].index(best), 1: rows[1].index(nine)}
        ahead = float(model().transformer.embed.weight[best, i]) > float(
            model().transformer.embed.weight[nine, i]
        )
        assert one.row.values.tolist() == ([0, 2, 1, 3] if ahead else [1, 3, 0, 2])
        assert one.pos.values.tolist() == [places[r % 2] for r in one.row.values]


@pytest.mark.slow
def test_shards_and_a_journal_give_the_same_bits(tmp_path: Path) -> None:
    made = {
        "neurons": TopExamples(BLOCK + "mlp.hook_post", top=3),
        "heads": TopExamples("L1.pattern", top=2, once_per_row=False),
    }
    whole = interp.run(made, model(), stream())
    assert list(whole) == ["neurons", "heads"]
    for shard in ("0/2", "1/2"):
        interp.run(made, model(), stream(), out=tmp_path / "run", shard=shard)
    again = interp.run(made, model(), stream(), out=tmp_path / "run", resume=True)
    for name in whole:
        xr.testing.assert_identical(again[name], whole[name])


def test_cells_are_named_by_their_part_and_silent_ones_have_zeros() -> None:
    found = top_examples(model(), TEXTS, BLOCK + "mlp.hook_post", cells=[3, 17], top=2)
    assert found.part.values.tolist() == ["L1N3", "L1N17"]
    silent = [interp.Edit("L1.post", interp.edits.Zero())]
    edited = top_examples(model().edited(silent), TEXTS, "L1.post", cells=[3], top=2)
    assert (edited.peak == 0).all() and (edited.value == 0).all()


def test_chosen_cells_alone_leave_their_layer_and_travel_to_processes() -> None:
    made = TopExamples(BLOCK + "mlp.hook_post", cells=[3, 17], top=2).bind(model())
    analysis = pickle.loads(pickle.dumps(made))
    batch = model().text.batch(TEXTS[:3])
    (read,) = analysis.rows.reads
    trace = interp.observe(model().transformer, batch, [read]).trace
    assert trace[read].shape == (*batch.tokens.shape, 2)
    part = analysis.keep.of(analysis.rows.compute(trace, batch, model().transformer), batch.identities())
    assert isinstance(part.parts["examples"], ContextExamples)


# --- what counts ------------------------------------------------------------------------------------------------------


def test_lists_that_end_early_say_so() -> None:
    ask = partial(top_examples, hooked("gpt2"), TEXTS[:3], "blocks.1.mlp.hook_post", cells=[0, 3])
    (said,) = ask(top=4).attrs["notes"]
    assert said.startswith("3 places where 4 were asked for: a text is listed at its best token alone")
    assert "notes" not in ask(top=3).attrs and "notes" not in ask(top=4, once_per_row=False).attrs
    (said,) = ask(top=1000, once_per_row=False).attrs["notes"]
    assert "no more tokens count" in said


def test_a_bos_counts_only_if_asked() -> None:
    """On a coordinate that is further out at BOS than anywhere else."""
    site = "hook_resid_mid"
    every = curves(site)
    rest = torch.cat([curve[1:] for _, curve in every])
    at_bos = every[0][1][0]
    above, below = at_bos - rest.max(0).values, rest.min(0).values - at_bos
    largest = bool(above.max() > below.max())
    margin, cell = (above if largest else below).max(0)
    assert margin > 0, "BOS stands out"
    counted = asked(site, cells=[int(cell)], skip_bos=False, top=2, largest=largest)
    skipped = asked(site, cells=[int(cell)], top=2, largest=largest)
    assert (counted.attrs["bos"], skipped.attrs["bos"]) == ("counts", "does not count")
    assert counted.pos.values.tolist() == [[0, 0]] and not (skipped.pos == 0).any()
    np.testing.assert_allclose(counted.peak, float(at_bos[cell]), rtol=1e-9)
    both = torch.cat([curve[:, cell] for _, curve in every])
    for found, values in ((counted, both), (skipped, rest[:, cell])):
        assert found.attrs["tokens_counted"] == len(values)
        assert float(found.value.sel(score="mean")[0]) == pytest.approx(float(values.mean()), rel=1e-9)
        end, name = (values.max(), "max") if largest else (values.min(), "min")
        assert float(found.value.sel(score=name)[0]) == pytest.approx(float(end), rel=1e-9)


def test_a_bos_is_known_by_its_id_and_no_other_first_token_is_left_out() -> None:
    ids = [ids for ids, _ in curves("mlp.hook_post")]
    check(asked("mlp.hook_post", data=ids), curves("mlp.hook_post"))
    bare = asked("mlp.hook_post", data=[row[1:] for row in ids])
    check(bare, curves("mlp.hook_post", bos=False), first=0)


def test_features_of_an_autoencoder_are_found_where_they_were_planted() -> None:
    """Features that each stand for one token: 0.5 where the token is, 0 elsewhere."""
    rows = [[1, 2, 3, 4], [5, 3, 3, 6, 2], [7, 1, 6, 4, 5, 2], [1, 1, 1]]
    embedding = model().transformer.embed.weight[1:8]
    weights = {
        "W_enc": torch.linalg.pinv(embedding), "b_enc": torch.full((7,), -0.5, dtype=torch.float64),
        "W_dec": embedding.clone(), "b_dec": torch.zeros(24, dtype=torch.float64),
    }  # fmt: skip
    sae = Dictionary(ReLU(), weights, apply_b_dec_to_input=False)
    found = top_examples(
        model(), rows, "hook_embed", dictionary=sae, top=9, once_per_row=False, context=(1, 0)
    )
    assert found.peak.dims == ("feature", "rank")
    for token in range(1, 8):
        one = found.isel(feature=token - 1)
        active = one.peak.values > 0
        places = {(n, p) for n, row in enumerate(rows) for p, t in enumerate(row) if t == token}
        assert set(zip(one.row.values[active], one.pos.values[active], strict=True)) == places
        np.testing.assert_allclose(one.peak.values[active], 0.5, rtol=1e-9)
        assert set(one.tokens.values[active][:, 1]) == {token}
        assert float(one.value.sel(score="density")) == pytest.approx(len(places) / sum(map(len, rows)))
    some = top_examples(
        model(), rows, "hook_embed", dictionary=sae, top=9, cells=[2], once_per_row=False, context=(1, 0)
    )
    np.testing.assert_allclose(some.activation, found.activation.sel(feature=[2]), rtol=1e-9, atol=1e-12)


def test_few_texts_have_no_interval() -> None:
    with pytest.MonkeyPatch.context() as fewer:
        fewer.setattr(MODULE, "FEWEST_TEXTS", 8)
        fewer.setattr(MODULE, "FEWEST_SUMS", 4)
        for n, printed in ((3, [False, False]), (4, [False, True]), (8, [True, True])):
            found = top_examples(hooked(), TEXTS[:1] * n, "L1.post", cells=[0], top=1)
            ends = found[["low", "high"]].sel(score=["density", "mean"]).notnull()
            assert ends.low.values[0].tolist() == ends.high.values[0].tolist() == printed


def test_a_single_text_has_no_interval() -> None:
    found = asked("mlp.hook_post", data=TEXTS[:1])
    ends = found.sel(score=["density", "mean"])
    assert bool(ends.low.isnull().all() and ends.high.isnull().all())
    assert bool(found.value.notnull().all())


def test_a_text_shows_its_context_with_the_token_between_marks() -> None:
    found = asked("mlp.hook_post")
    for rank in range(TOP):
        one = found.isel(neuron=1, rank=rank)
        ids, at = curves("mlp.hook_post")[int(one.row)][0], int(one.pos)
        pieces = model().text.pieces(ids)
        before, after = pieces[max(0, at - BEFORE) : at], pieces[at + 1 : at + 1 + AFTER]
        assert str(one.text.values) == f"{''.join(before)}«{pieces[at]}»{''.join(after)}"
        assert "".join(one.piece.values) == "".join([*before, pieces[at], *after])


def test_the_table_has_a_line_for_every_entry_and_none_for_empty_places() -> None:
    found = asked("mlp.hook_post", top=20)
    assert (found.row.values[:, 14:] == -1).all() and (found.text.values[:, 14:] == "").all()
    table = examples_table(found)
    assert list(table.columns) == ["neuron", "rank", "peak", "row", "pos", "text"]
    assert len(table) == 3 * len(TEXTS)
    line = table[(table.neuron == 0) & (table["rank"] == 2)].iloc[0]
    one = found.sel(neuron=0, rank=2)
    assert (line.peak, line.row, line.pos, line.text) == (one.peak, one.row, one.pos, one.text)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("site", "options", "error", "message"),
    [
        ("blocks.1.mlp.hook_pst", {}, KeyError, "nearest: .*hook_post"),
        ("blocks.1.ln1.hook_scale", {}, ValueError, r"neurons, coordinates, heads .* has axes \[b p 1\]"),
        ("blocks.1.attn.hook_attn_scores", {}, ValueError, r"has axes \[b h q k\]"),
        ("blocks.1.mlp.hook_post", {"cells": []}, ValueError, r"at least one, are required, got \[\]"),
        ("blocks.1.mlp.hook_post", {"cells": [1, 1]}, ValueError, r"distinct.* got \[1, 1\]"),
        ("blocks.1.mlp.hook_post", {"cells": [40]}, ValueError, "cells are 0 to 39 at this site, got 40"),
        ("blocks.1.mlp.hook_post", {"cells": [-1]}, ValueError, "cells are 0 to 39 at this site, got -1"),
        (
            "blocks.1.mlp.hook_post",
            {"top": 0},
            ValueError,
            "top must be a number of places, at least 1, got 0",
        ),
        (
            "blocks.1.mlp.hook_post",
            {"data": [[0], [0]]},
            ValueError,
            "token that counts are required, got 2 of BOS",
        ),
    ],
)
def test_bad_questions_are_refused(
    site: str, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        top_examples(model(), site=site, **({"data": TEXTS} | options))  # type: ignore[arg-type]


def test_an_autoencoder_that_reads_head_by_head_is_refused() -> None:
    weights = {"W_enc": torch.eye(6), "b_enc": torch.zeros(6), "W_dec": torch.eye(6), "b_dec": torch.zeros(6)}
    sae = Dictionary(ReLU(), weights)
    with pytest.raises(ValueError, match="a dictionary of the whole site is required"):
        top_examples(model(), TEXTS, BLOCK + "attn.hook_z", dictionary=sae)


def test_a_row_whose_numbers_are_not_finite_is_set_aside() -> None:
    config = replace(CONFIGS["gpt2"], d_vocab=model().cfg.d_vocab)
    network = perturbed(config)
    with torch.no_grad():
        network.embed.weight[9] = torch.nan
    broken = HookedTransformer(network, model().text.tokenizer)
    rows = [[1, 2, 3], [4, 9, 5], [6, 7]]
    data = Stream(open_source(rows), broken.text, tokens_per_batch=9)
    found = top_examples(broken, data, BLOCK + "mlp.hook_post", cells=[3], top=5)
    assert found.attrs["rejected"] == 1 and found.attrs["texts"] == 2
    assert found.row.values[0].tolist()[:2] in ([0, 2], [2, 0]) and (found.row.values[0, 2:] == -1).all()


@over("once", [True, False])
def test_a_top_of_a_million_ends_with_what_there_is(once: bool) -> None:
    """The same entries in the same order as a list that has a place for each, whatever batches carry the texts."""
    model, texts = hooked(), TEXTS[:5]
    ask = partial(top_examples, site=f"{BLOCK}mlp.hook_post", cells=[3, 0], once_per_row=once)
    full = ask(model, texts, top=200)
    there = int((full.row >= 0).sum("rank").max())
    for data in (texts, Stream(open_source(texts), model.text, tokens_per_batch=40)):
        found = ask(model, data, top=10**6)
        assert found.sizes["rank"] == there and (there == 5) == once
        same = ("peak", "row", "pos", "activation", "text") if data is texts else ("row", "pos", "text")
        assert all(found[name].identical(full[name][:, :there]) for name in same)
