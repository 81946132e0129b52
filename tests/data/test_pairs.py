"""Pairs of prompts stream like any rows: aligned, with their answers, and with the bits of the prompts in memory."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import interp
from interp.causal.patching import Patch, patch
from interp.data.batch import Batch
from interp.data.pairs import Pairs
from interp.data.stream import GivenBatches, Stream
from tests.batches import in_batches
from tests.tiny import hooked

CLEAN = ["The cat sat on the mat", "The dog sat on the cat", "Mary gave a drink", "The cat"]
CORRUPT = ["The dog sat on the mat", "The cat sat on the cat", "John gave a drink", "The dog"]
ANSWERS, WRONG = [5, 6, 7, 8], [9, 10, 11, 12]


def pairs(**given: object) -> Pairs:
    return Pairs(**{"clean": CLEAN, "corrupt": CORRUPT, "answer": ANSWERS, "wrong": WRONG, **given})  # type: ignore[arg-type]


def windows(data: Pairs, tokens: int = 64) -> list[Batch]:
    stream = Stream(data.source(), hooked().text, tokens_per_batch=tokens, rows_per_window=2)
    return [batch for w in range(stream.windows or 0) for batch in stream.window(w).batches]


def test_rows_keep_corrupted_prompt_and_answers_when_sorted_and_padded() -> None:
    text, seen = hooked().text, 0
    for batch in windows(pairs()):
        clean, corrupt = batch.pair()
        for i, row in enumerate(batch.row.tolist()):  # type: ignore[union-attr]
            real = batch.real[i]
            assert clean.tokens[i][real].tolist() == text.ids(CLEAN[row])
            assert corrupt.tokens[i][real].tolist() == text.ids(CORRUPT[row])
            assert (int(batch.answer[i]), int(batch.wrong[i])) == (ANSWERS[row], WRONG[row])  # type: ignore[index]
            seen += 1
    assert seen == 4


def same(one: xr.Dataset, other: xr.Dataset) -> None:
    assert one.data_vars.keys() == other.data_vars.keys()
    for name in one.data_vars:
        np.testing.assert_array_equal(one[name].values, other[name].values, err_msg=str(name))


def test_a_run_over_pairs_is_the_function_at_equal_batches_bit_for_bit() -> None:
    model = hooked()
    asked = Patch("z", direction="noise")
    one = windows(pairs())
    run = interp.run([asked], model, one)["patch"]
    stream = Stream(pairs().source(), model.text, tokens_per_batch=64, rows_per_window=2)
    same(interp.run([asked], model, stream)["patch"].sortby("prompt"), run.sortby("prompt"))
    metric = interp.logit_difference(torch.tensor(ANSWERS), torch.tensor(WRONG))
    function = patch(model, CLEAN[:2], CORRUPT[:2], "z", metric=interp.logit_difference(ANSWERS[:2], WRONG[:2]),
                     direction="noise")  # fmt: skip
    same(interp.run([asked], model, one[:1])["patch"], function)
    whole = patch(
        model,
        in_batches(model, CLEAN, 2),
        in_batches(model, CORRUPT, 2),
        "z",
        metric=metric,
        direction="noise",
    )
    np.testing.assert_allclose(
        whole["each"].values, run.sortby("prompt")["each"].values, rtol=1e-9, atol=1e-12
    )


def test_moments_alone_are_those_of_all_rows() -> None:
    model = hooked()
    whole = interp.run([Patch("z")], model, pairs())["patch"]
    small = interp.run([Patch("z", each=False)], model, pairs())["patch"]
    for name in ("value", "low", "high", "n", "normalised", "changed"):
        np.testing.assert_allclose(small[name].values, whole[name].values, rtol=1e-9)
    assert "each" not in small and small.clean.dims == ()


def test_files_of_pairs_are_read_row_by_row(tmp_path: Path) -> None:
    lines = [json.dumps({"clean": a, "corrupt": b}) for a, b in zip(CLEAN, CORRUPT, strict=True)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    from interp.data.sources import open_source

    parts = [list(open_source(file, field=name).rows(0, 4)) for name in ("clean", "corrupt")]
    one, other = windows(pairs()), windows(pairs(clean=parts[0], corrupt=parts[1]))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(one, other, strict=True))


def test_what_is_no_pair_is_set_aside_with_the_reason() -> None:
    clean = [*CLEAN, "The cat sat", "The cat", "", "The cat", "The dog"]
    corrupt = [*CORRUPT, "The", "The cat", "The dog", "The dog", "The cat"]
    data = Pairs(clean, corrupt, [*ANSWERS, 5, 5, 5, "two whole words", 5])
    found = interp.run([Patch("z", metric=interp.metrics.answer_probability())], hooked(), data)
    reasons = dict(zip(found.rejected["row"], found.rejected["reason"], strict=True))
    assert reasons[4].startswith("the clean prompt has") and "equally long" in reasons[4]
    assert reasons[5] == "both prompts are the same"
    assert reasons[6] == "the row is empty"
    assert "single token" in reasons[7]
    assert found.rows == 5 and set(found["patch"].prompt.values) == {0, 1, 2, 3, 8}


def test_parts_of_different_lengths_and_prompts_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="4 of clean, 3 of corrupt"):
        pairs(corrupt=CORRUPT[:3]).source()
    with pytest.raises(ValueError, match=r"patch compares two runs.*Pairs\(clean, corrupt\)"):
        interp.run([Patch("z", metric=interp.logit_difference(5, 6))], hooked(), CLEAN)
    with pytest.raises(ValueError, match="corrupted prompts are required, got none"):
        hooked().to_batch(CLEAN).pair()
    with pytest.raises(ValueError, match="answers or labels for 4 prompts, got 2 rows"):
        interp.run(
            [Patch("z", metric=interp.logit_difference(ANSWERS, WRONG))], hooked(),
            Pairs(CLEAN[:2], CORRUPT[:2]),
        )  # fmt: skip


def test_batches_in_memory_carry_their_pairs_through_splits() -> None:
    batch = Batch(torch.arange(12).reshape(4, 3), corrupt=torch.arange(12, 24).reshape(4, 3)).numbered()
    source = GivenBatches(list(batch.split(3)))
    assert [tuple(b.corrupt.shape) for w in range(2) for b in source.window(w).batches] == [(3, 3), (1, 3)]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="corrupt must have the tokens' shape"):
        Batch(torch.zeros(2, 3, dtype=torch.long), corrupt=torch.zeros(2, 4, dtype=torch.long))
