"""Why a head attends, on the page: the numbers kept are those of `attention_attribution`, the largest of each score."""

import base64
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

import interp
from interp.attention import attention_attribution
from interp.attention.score_parts import every_score, score_reads
from interp.data.batch import Batch
from interp.lab import Differential
from interp.model import Softmax
from interp.model.tap import Trace
from interp.pages.absent import why_unsplit
from interp.pages.reasons import PAIRS, SIDES, reasons, splitting
from tests.configs import CONFIGS, build, some_tokens
from tests.tolerances import assert_close

NAMES = ["gpt2", "llama-gqa", "gemma2", "bloom", "t5", "window", "post-norm"]


def scores_of(model: interp.HookedTransformer, batch: Batch) -> Trace:
    network = model.transformer
    return interp.observe(network, batch, score_reads(network, splitting(model.cfg))).trace


@pytest.mark.parametrize("name", NAMES)
def test_every_score_of_a_layer_is_split_as_one_by_one(name: str) -> None:
    model, tokens = interp.HookedTransformer(build(name)), some_tokens(1, 6)
    told = []
    trace = interp.observe(model, tokens, score_reads(model.transformer, [1])).trace
    for layer, heads, found in every_score(model.transformer, Batch(tokens), [1], trace):
        assert layer == 1
        told += heads
        each = len(found.total) // len(heads)
        assert each > 6
        for row in range(0, len(found.total), 5):
            query, key = found.places[row].tolist()
            head = heads[row // each]
            one = attention_attribution(model, tokens, (1, head), query=query, key=key, by="head")
            assert_close(found.pairs[row], torch.tensor(one.value.values[0]))
            assert_close(found.total[row], torch.tensor(one.total.values[0]))
    assert sorted(told) == list(range(model.cfg.n_heads))


@pytest.mark.parametrize("tile", [1, 2**23])
def test_what_is_kept_are_the_largest_parts_of_every_score(
    tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interp.pages.reasons.tile_floats", lambda device: tile)
    model = interp.HookedTransformer.from_pretrained("demo-4l")
    prompt = "When Mary and John went to the store"
    batch = model.text.batch(prompt)
    found = {each.part: each for each in reasons(model.transformer, batch, None, scores_of(model, batch))}
    assert len(found) == 32 and len(found["L2H3"].cells) == 9 * 10 // 2
    for head, at in (("L0H2", 7), ("L1H5", 30), ("L3H5", 44)):
        why, row = found[head], found[head].cells[at]
        query, key = int(row[0]), int(row[1])
        one = attention_attribution(model, prompt, head, query=query, key=key, by="head").isel(prompt=0)
        close = {"abs": why.unit}
        assert row[2] * why.unit == pytest.approx(float(one.total), **close)
        assert row[3] == 0
        for start, other, names in (
            (4, "key_part", why.query_parts),
            (4 + 2 * SIDES, "query_part", why.key_parts),
        ):
            side = one.value.sum(other)
            order = np.abs(side.values).argsort()[::-1][:SIDES]
            assert [names[i] for i in row[start : start + SIDES]] == [
                str(x) for x in side[order].coords[side.dims[0]].values
            ]
            for value, expected in zip(
                row[start + SIDES : start + 2 * SIDES], side.values[order], strict=True
            ):
                assert value * why.unit == pytest.approx(float(expected), **close)
        last = 4 + 4 * SIDES
        for i in range(PAIRS):
            pair = one.value.sel(
                query_part=why.query_parts[row[last + i]], key_part=why.key_parts[row[last + PAIRS + i]]
            )
            assert row[last + 2 * PAIRS + i] * why.unit == pytest.approx(float(pair), **close)
        largest = np.sort(np.abs(one.value.values).ravel())[-PAIRS:]
        assert np.abs(row[last + 2 * PAIRS :]).min() * why.unit == pytest.approx(largest[0], **close)


def test_scores_of_a_trained_model_are_not_lost_to_their_own_check() -> None:
    """The check allowed the rounding of the parts' sum, not of the products behind each part: 4 of 60 such prompts."""
    model = interp.HookedTransformer.from_pretrained("demo-4l")
    for second, thing in product(("John", "Anna"), ("book", "drink")):
        batch = model.text.batch(f"When Mary and {second} went to the shop, {second} gave a {thing} to")
        assert len(reasons(model.transformer, batch, None, scores_of(model, batch))) == 32


def test_of_a_long_prompt_the_heads_that_write_the_answer_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    model = interp.HookedTransformer.from_pretrained("demo-4l")
    prompt = "When Mary and John went to the store, John gave a drink to"
    written = interp.attribute(model, prompt, " Mary", " John", parts="head")
    monkeypatch.setattr("interp.pages.reasons.MOST_SCORES", 3 * 15 * 16 // 2)
    batch = model.text.batch(prompt)
    found = [each.part for each in reasons(model.transformer, batch, written, scores_of(model, batch))]
    heads = written.value[0][[str(part).count("H") == 1 for part in written.part.values]]
    assert sorted(found) == sorted(map(str, heads.part.values[np.abs(heads.values).argsort()[::-1][:3]]))


def test_layers_whose_scores_are_no_such_product_are_left_out_in_words() -> None:
    plain = CONFIGS["gpt2"]
    assert why_unsplit(plain) is None and splitting(plain) == [0, 1]
    both = replace(plain, mixer=(Differential(), Softmax()))
    assert splitting(both) == [1]
    none = why_unsplit(replace(plain, mixer=Differential()))
    assert none is not None and "no scores that are one product of queries and keys" in none


@pytest.mark.parametrize("limit", ["MOST_SCORES", "MOST_PAIRS"])
def test_a_prompt_too_long_for_one_head_is_left_out_in_words(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"interp.pages.reasons.{limit}", 5)
    page = interp.report(interp.HookedTransformer.from_pretrained("groundtruth-induction"), "abcabc")
    assert page.report.reasons == []
    assert "Why a head looks there is left out: the scores of one head are more on this prompt" in page.html


def test_heads_with_more_pairs_than_are_left_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts before layer l of the demo, with the bias: 2 + 9 l at least, so layers 0 and 1 are cheap."""
    model = interp.HookedTransformer.from_pretrained("demo-4l")
    batch = model.text.batch("When Mary and John")
    scores = batch.tokens.shape[1] * (batch.tokens.shape[1] + 1) // 2
    trace = scores_of(model, batch)
    parts = [len(reason.query_parts) for reason in reasons(model.transformer, batch, None, trace)[::8]]
    assert parts == sorted(parts) and len(parts) == 4
    written = interp.attribute(model, batch, " Mary", parts="head")
    order = sorted(
        ((name, abs(float(x))) for name, x in zip(written.part.values, written.value[0], strict=True)
         if str(name)[2:3] == "H"),
        key=lambda pair: -pair[1],
    )  # fmt: skip
    limit = scores * (2 * parts[3] ** 2 + parts[1] ** 2)
    monkeypatch.setattr("interp.pages.reasons.MOST_PAIRS", limit)
    kept, left = set(), limit
    for name, _ in order:
        cost = scores * parts[int(str(name)[1])] ** 2
        if cost <= left:
            kept.add(name)
            left -= cost
    found = reasons(model.transformer, batch, written, trace)
    assert {reason.part for reason in found} == kept and len(kept) < 32


def test_the_page_gets_the_names_of_the_parts_that_occur() -> None:
    model = interp.HookedTransformer.from_pretrained("demo-4l")
    batch = model.text.batch("When Mary and John")
    for reason in reasons(model.transformer, batch, None, scores_of(model, batch)):
        data = reason.payload()
        cells = np.frombuffer(base64.b64decode(str(data["cells"])), "<i2").reshape(
            -1, int(str(data["width"]))
        )
        names = {"query": reason.query_parts, "key": reason.key_parts}
        for side, columns in (("query", [4, 5, 6, 16, 17, 18]), ("key", [10, 11, 12, 19, 20, 21])):
            kept = np.array(data[side])
            assert (kept[cells[:, columns]] == np.array(names[side])[reason.cells[:, columns]]).all()
            assert set(kept) == set(kept[cells[:, columns]].ravel())
        rest = [0, 1, 2, 3, 7, 8, 9, 13, 14, 15, 22, 23, 24]
        assert (cells[:, rest] == reason.cells[:, rest]).all()
