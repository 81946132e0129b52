"""Runs over data: no batch size, order, shard or restart changes a number; bad rows are set aside and counted."""

import importlib
import pickle
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings, strategies as st
from torch import Tensor

import interp
from interp import Batch, HookedTransformer
from interp.core.notes import note
from interp.core.results import labelled
from interp.core.stats import Partial, Rows, poisson_weights
from interp.core.viewer import notes_of
from interp.data.sources import open_source
from interp.data.stream import Stream
from interp.model import Trace, Transformer
from interp.passes.question import ByRow, Reading
from interp.runs import Results, journal as journals
from interp.runs.run import SomeQuestions
from interp.runs.workers import Worker
from tests.configs import build, some_tokens
from tests.runs.running import ASKED, READS, SITE, ByPosition, Kept, Norms, _finish_kept, _kept, agree
from tests.tiny import hooked
from tests.tolerances import student95

OVER_DATA = importlib.import_module("interp.runs.over_data")
"""The module: its face names the function."""
TEXTS = [("The cat sat on the mat. " * 3)[: 3 + 7 * i % 31] for i in range(40)]


def model() -> HookedTransformer:
    return hooked("gpt2")


def stream(texts: list[str] = TEXTS, tokens: int = 64, window: int = 7) -> Stream:
    return Stream(open_source(texts), model().text, tokens_per_batch=tokens, rows_per_window=window)


def slow(texts: list[str]) -> list[float]:
    """The mean norm of every text, each alone."""
    found = []
    for text in texts:
        cache = interp.observe(model().transformer, model().text.batch(text), [interp.Read(SITE)]).trace
        found.append(float(cache[SITE].norm(dim=-1).mean()))
    return found


def test_a_run_gives_what_a_slow_loop_over_the_rows_gives() -> None:
    found = interp.run(ASKED, model(), stream())
    values = slow(TEXTS)
    np.testing.assert_allclose(found["kept"].norm.values, values, rtol=1e-12)
    assert found["kept"].prompt.values.tolist() == list(range(len(TEXTS)))
    norm = found["norms"]
    assert float(norm.value) == pytest.approx(np.mean(values), rel=1e-12)
    half = student95(len(values)) * np.std(values, ddof=1) / len(values) ** 0.5
    assert float(norm.high - norm.value) == pytest.approx(half, rel=1e-9)
    assert found.rows == len(TEXTS) and len(found.rejected) == 0
    assert float(norm.value - norm.low) == pytest.approx(half, rel=1e-9) and int(norm.n) == len(TEXTS)
    lengths = torch.tensor([model().text.batch(text).tokens.shape[1] for text in TEXTS])
    counts = [int((lengths > pos).sum()) for pos in range(int(lengths.max()))]
    assert found["by_position"].n.values.tolist() == counts


def test_a_few_rows_are_run_once_and_not_to_plan_how_many_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("these rows are all there are")

    expected = interp.run(ASKED, model(), stream(TEXTS[:4]))
    monkeypatch.setattr(OVER_DATA, "memory_plan", refused)
    agree(interp.run(ASKED, model(), TEXTS[:4]), expected, 1e-9)
    with pytest.raises(AssertionError, match="all there are"):
        interp.run(ASKED, model(), TEXTS[:5])


@pytest.mark.slow
@settings(max_examples=12)
@given(st.integers(1, 200), st.integers(1, 50))
def test_no_batch_size_and_no_window_changes_a_number(tokens: int, window: int) -> None:
    whole = interp.run(ASKED, model(), stream(tokens=10_000, window=1000), bootstrap=50)
    agree(interp.run(ASKED, model(), stream(tokens=tokens, window=window), bootstrap=50), whole, 1e-9)


def test_the_bootstrap_is_that_of_weights_that_belong_to_the_row() -> None:
    found = interp.run([Norms()], model(), stream(), bootstrap=200, seed=3)["norms"]
    values = torch.tensor(slow(TEXTS), dtype=torch.float64)
    weights = poisson_weights(torch.arange(len(TEXTS)), 200, 3)
    n, missed = len(values), weights @ (values - values.mean())
    clusters = min(round(n**2 / float(weights.sum(1).var())), n)
    error = float(missed.square().mean().sqrt()) / n * (clusters / (clusters - 1)) ** 0.5
    assert float(found.high - found.value) == pytest.approx(student95(clusters) * error, rel=1e-9)
    assert float(found.value - found.low) == pytest.approx(student95(clusters) * error, rel=1e-9)
    plain = interp.run([Norms()], model(), stream())["norms"]
    assert float(found.high - found.low) == pytest.approx(float(plain.high - plain.low), rel=0.35)


def test_data_of_every_kind_give_the_same(tmp_path: Path) -> None:
    file = tmp_path / "rows.txt"
    file.write_text("\n".join(TEXTS))
    whole = interp.run(ASKED, model(), stream())
    for data in (TEXTS, file, str(file), iter(TEXTS)):
        agree(interp.run(ASKED, model(), data), whole, 1e-9)
    batches = list(stream().window(0).batches)
    agree(interp.run([Kept()], model(), batches), interp.run([Kept()], model(), iter(batches)))
    alone = Batch(some_tokens())
    assert interp.run([Norms()], build("gpt2"), alone).rows == len(alone)


def test_a_question_and_what_it_was_turned_into_are_both_good() -> None:
    made = Norms().bind(model())
    agree(interp.run([made], model(), TEXTS), interp.run([Norms()], model(), TEXTS))


# --- rows that are set aside --------------------------------------------------------------------------------------


def test_bad_rows_are_set_aside_with_reasons_and_the_rest_is_unchanged() -> None:
    texts = [*TEXTS[:10], "", *TEXTS[10:], "The cat " * 40]
    found = interp.run([Norms()], model(), stream(texts))
    assert found.rejected.row.tolist() == [10, 41]
    assert found.rejected.reason.tolist()[0] == "the row is empty"
    assert "the model's context holds 24" in found.rejected.reason.tolist()[1]
    assert found["norms"].value == pytest.approx(
        float(interp.run([Norms()], model(), stream())["norms"].value), rel=1e-12
    )


def test_every_result_says_how_many_rows_were_set_aside_and_the_first_why() -> None:
    texts = [*TEXTS[:10], "", *TEXTS[10:], "The cat " * 40]
    note.cache_clear()
    with pytest.warns(interp.Note, match="set aside") as caught:
        found = interp.run([Norms(), Kept()], model(), stream(texts))
    (said,) = {str(each.message) for each in caught if "set aside" in str(each.message)}
    assert (
        said
        == f"2 rows were set aside, the first of them: row {found.rejected.row[0]}, {found.rejected.reason[0]}"
    )
    assert len(caught) == 1 and {name: notes_of(each) for name, each in found.items()} == {
        "norms": (said,),
        "kept": (said,),
    }
    assert not any(notes_of(each) for each in interp.run([Norms(), Kept()], model(), stream()).values())


@pytest.mark.parametrize("tokens", [30, 1000])
def test_a_row_of_nan_is_set_aside_for_all_analyses(tokens: int) -> None:
    rows = [[1, 2, 3], [4, 9, 6, 7], [8, 9, 10], [11, 12]]
    source = Stream(open_source(rows), model().text, tokens_per_batch=tokens)
    found = interp.run([Norms(poison=9), Kept()], model(), source)
    assert found.rejected.row.tolist() == [1, 2]
    assert set(found.rejected.reason) == {"NaN or infinite: norms.norm"}
    assert found["kept"].prompt.values.tolist() == [0, 3] and found.rows == 2


def test_rows_that_are_all_bad_are_an_error_that_shows_the_first() -> None:
    with pytest.raises(ValueError, match="got 3 rows, all set aside: row 0: the row is empty"):
        interp.run([Norms()], model(), ["", "", ""])


def test_an_analysis_that_counts_rows_where_texts_are_packed_is_refused() -> None:
    packed = Stream(open_source(TEXTS), model().text, tokens_per_batch=48, layout="packed")
    with pytest.raises(ValueError, match=r"norms requires one value per row or packed text, \d+, got"):
        interp.run([Norms()], model(), packed)


def test_long_rows_are_cut_only_if_asked() -> None:
    long = ["The cat sat on the mat. " * 4]
    for how, rows in (("truncate", 1), ("split", None)):
        source = Stream(open_source(long), model().text, tokens_per_batch=100, too_long=how)  # type: ignore[arg-type]
        found = interp.run([Kept()], model(), source)
        assert found.cut == 1 and (rows is None or found.rows == rows)
        assert set(found["kept"].prompt.values) == {0}


# --- memory -------------------------------------------------------------------------------------------------------


class Tight(Worker):
    """A worker whose device holds so many tokens and no more."""

    most = 40

    def _reduced_answer(self, batch: Batch, values: object, checks: object) -> object:  # type: ignore[override]
        if batch.tokens.numel() > self.most:
            raise torch.OutOfMemoryError("no memory left")
        return super()._reduced_answer(batch, values, checks)  # type: ignore[arg-type]


def test_a_batch_that_does_not_fit_is_halved_and_the_numbers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = interp.run(ASKED, model(), stream(tokens=400))
    monkeypatch.setattr(OVER_DATA, "Worker", Tight)
    agree(interp.run(ASKED, model(), stream(tokens=400)), whole, 1e-9)


def test_a_row_that_does_not_fit_alone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OVER_DATA, "Worker", Tight)
    monkeypatch.setattr(Tight, "most", 3)
    with pytest.raises(MemoryError, match="one row of 24 tokens does not fit"):
        interp.run([Norms()], model(), Batch(torch.ones(1, 24, dtype=torch.long)))


# --- progress on disk ---------------------------------------------------------------------------------------------


class StopError(Exception):
    """What ends a run in these tests."""


def interrupted(
    folder: Path,
    after: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    asked: SomeQuestions = ASKED,
    bootstrap: int = 50,
) -> None:
    """A run that ends after so many batches."""
    write, count = journals.Journal.write, iter(range(after))

    def writing(self: journals.Journal, done: object) -> None:
        if next(count, None) is None:
            raise StopError
        write(self, done)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(journals.Journal, "write", writing)
        with pytest.raises(StopError):
            interp.run(asked, model(), stream(), out=folder, bootstrap=bootstrap)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 5, 7])
@pytest.mark.parametrize("least", [2**24, 1])
def test_a_run_goes_on_where_it_was_and_gives_the_same_bits(
    after: int, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """least=1: the journal is folded up all the time."""
    monkeypatch.setattr(journals, "_LEAST", least)
    whole = interp.run(ASKED, model(), stream(), bootstrap=50)
    folder = tmp_path / "run"
    interrupted(folder, after, monkeypatch)
    passes: list[Batch] = []
    reduced = Worker._reduced_answer
    monkeypatch.setattr(
        Worker, "_reduced_answer", lambda self, b, *v: (passes.append(b), reduced(self, b, *v))[1]
    )
    agree(interp.run(ASKED, model(), stream(), out=folder, bootstrap=50, resume=True), whole)
    batches = sum(len(stream().window(w).batches) for w in range(stream().windows or 0))
    assert len(passes) == batches - after, "no batch is done twice"
    agree(interp.run(ASKED, model(), stream(), out=folder, bootstrap=50, resume=True), whole)
    assert len(passes) == batches - after, "a finished run has nothing to do"


def test_a_torn_entry_costs_its_batch_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = interp.run(ASKED, model(), stream(), bootstrap=50)
    for cut in (1, 100, 5000):
        folder = tmp_path / str(cut)
        interrupted(folder, 6, monkeypatch)
        file = folder / "main.0.journal"
        file.write_bytes(file.read_bytes()[:-cut])
        agree(interp.run(ASKED, model(), stream(), out=folder, bootstrap=50, resume=True), whole)


def test_what_decides_a_number_must_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path / "run", 3, monkeypatch)
    again = partial(interp.run, out=tmp_path / "run", resume=True, bootstrap=50)
    with pytest.raises(ValueError, match=r"holds another run over data: model_sha256: was .\w+\.\.\., is ."):
        again(ASKED, hooked("tied"), stream())
    with pytest.raises(ValueError, match=r"data\.fingerprint: was"):
        again(ASKED, model(), stream(TEXTS[1:]))
    with pytest.raises(ValueError, match=r"data\.tokens_per_batch: was 64, is 32"):
        again(ASKED, model(), stream(tokens=32))
    with pytest.raises(ValueError, match=r"analyses\.norms\.keep\.replicates: was 50, is 60"):
        again(ASKED, model(), stream(), bootstrap=60)
    with pytest.raises(ValueError, match=r"analyses\.norms\.rows\.compute\.poison: was null, is 4"):
        again([Norms(poison=4), Kept(), ByPosition()], model(), stream())
    with pytest.raises(ValueError, match="resume=True goes on with it"):
        interp.run(ASKED, model(), stream(), out=tmp_path / "run", bootstrap=50)


def test_a_run_that_went_on_has_the_same_attributes_columns_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are named in another order than that of the alphabet or of their dtypes."""

    def compute(trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
        norm = trace[SITE].norm(dim=-1).mean(1)
        return {"z": norm, "b": batch.tokens[:, 0], "a": norm.float(), "m": norm.double()}

    def finish(merged: Partial) -> xr.Dataset:
        assert isinstance(merged, Rows)
        values = {name: (("prompt",), value) for name, value in merged.rows.items()}
        return labelled("norms", values, attrs={name: len(value[1]) for name, value in values.items()})

    asked = [ByRow("own", Reading(READS, compute), Rows, finish)]
    whole = interp.run(asked, model(), stream(), out=tmp_path / "whole")
    for least in (1, 2**24):
        monkeypatch.setattr(journals, "_LEAST", least)
        folder = tmp_path / str(least)
        interrupted(folder, 5, monkeypatch, asked=asked, bootstrap=0)
        again = interp.run(asked, model(), stream(), out=folder, resume=True)
        assert list(again["own"].data_vars) == list(whole["own"].data_vars)
        assert list(again["own"].attrs.items()) == list(whole["own"].attrs.items())
        assert interp.frame(again["own"]).equals(interp.frame(whole["own"]))
        for file in ("own.parquet", "rejected.parquet"):
            assert (folder / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_a_run_whose_own_function_changed_is_refused_by_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(factor: float) -> list[ByRow]:
        def compute(trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
            return {"norm": trace[SITE].norm(dim=-1).mean(1) * factor}

        return [ByRow("own", Reading(READS, compute), Rows, _finish_kept)]

    interrupted(tmp_path / "run", 3, monkeypatch, asked=asked(1.0), bootstrap=0)
    again = partial(interp.run, model=model(), data=stream(), out=tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match=r"analyses\.own\.rows\.compute\.factor: was 1\.0, is 2\.0"):
        again(asked(2.0))
    with pytest.raises(ValueError, match=r"analyses\.own\.rows\.compute\.code: was"):
        again([replace(asked(1.0)[0], rows=Reading(READS, _kept))])


def test_what_nobody_can_compare_may_begin_a_run_and_not_go_on_with_one(tmp_path: Path) -> None:
    with (tmp_path / "open.txt").open("w") as file:

        def compute(trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
            file.write("seen")
            return {"norm": trace[SITE].norm(dim=-1).mean(1)}

        asked = [ByRow("own", Reading(READS, compute), Rows, lambda merged: xr.Dataset())]
        interp.run(asked, model(), stream(), out=tmp_path / "run")
        why = r"analyses\.own\.rows\.compute\.file \(cannot pickle '_io\.TextIOWrapper' object\)"
        with pytest.raises(ValueError, match=why):
            interp.run(asked, model(), stream(), out=tmp_path / "run", resume=True)
        with pytest.raises(ValueError, match=why):
            interp.run(asked, model(), stream(), out=tmp_path / "new", shard="0/2")


def test_folders_that_are_no_runs_and_iterators_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        ValueError, match=r"a new or empty folder is required, or that of a run over data; .* holds notes.txt"
    ):
        interp.run([Norms()], model(), TEXTS, out=tmp_path)
    with pytest.raises(ValueError, match="requires data that can be read again"):
        interp.run([Norms()], model(), iter(TEXTS), out=tmp_path / "new")
    with pytest.raises(ValueError, match="resume and shard require a folder"):
        interp.run([Norms()], model(), TEXTS, resume=True)


def test_results_lie_in_the_folder(tmp_path: Path) -> None:
    import pandas as pd

    found = interp.run(ASKED, model(), [*TEXTS, ""], out=tmp_path / "run")
    stored = xr.load_dataset(tmp_path / "run" / "norms.nc", engine="h5netcdf")
    assert float(stored.value) == float(found["norms"].value)
    assert pd.read_parquet(tmp_path / "run" / "rejected.parquet").row.tolist() == [len(TEXTS)]


# --- shards and processes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("done", [(0, 1, 2), (2, 0), (1,), ()])
def test_shards_in_any_order_and_the_rest_give_the_bits_of_one_run(
    done: tuple[int, ...], tmp_path: Path
) -> None:
    whole = interp.run(ASKED, model(), stream(), bootstrap=50)
    for count, i in enumerate(done, 1):
        so_far = interp.run(ASKED, model(), stream(), bootstrap=50, out=tmp_path / "run", shard=f"{i}/3")
        assert whole.rows * (count - 1) / 3 < so_far.rows <= whole.rows * (count + 1) / 3
    agree(interp.run(ASKED, model(), stream(), bootstrap=50, out=tmp_path / "run", resume=True), whole)


def test_an_empty_share_is_no_error_and_the_others_do_all_rows(tmp_path: Path) -> None:
    """One window for two jobs: the first has none, before and after the second has done it."""
    asked, batch = [Norms()], [Batch(some_tokens(rows=3, n=9))]
    out, whole = tmp_path / "run", interp.run(asked, model(), batch)
    empty = interp.run(asked, model(), batch, out=out, shard="0/2")
    assert (empty.rows, empty.complete, dict(empty), len(empty.rejected)) == (0, False, {}, 0)
    agree(interp.run(asked, model(), batch, out=out, shard="1/2"), whole)
    agree(interp.run(asked, model(), batch, out=out, shard="0/2"), whole)
    agree(interp.run(asked, model(), batch, out=out, resume=True), whole)


def test_rows_that_are_all_set_aside_are_an_error_once_all_shares_are_done(tmp_path: Path) -> None:
    tokens = some_tokens(rows=3, n=9)
    batches = [Batch(tokens), Batch(tokens)]
    tokens[:, 1] = 5
    out, asked = tmp_path / "run", [Norms(5)]
    first = interp.run(asked, model(), batches, out=out, shard="0/2")
    assert (first.rows, first.complete, len(first.rejected)) == (0, False, 3)
    with pytest.raises(
        ValueError, match="some rows that can be used are required, got 6 rows, all set aside"
    ):
        interp.run(asked, model(), batches, out=out, shard="1/2")


@pytest.mark.parametrize("given", ["3/3", "1", "a/b", "-1/2"])
def test_shards_that_are_none_are_refused(given: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a shard"):
        interp.run([Norms()], model(), TEXTS, out=tmp_path / "run", shard=given)


def test_two_processes_cannot_write_one_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    interrupted(tmp_path / "run", 2, monkeypatch)
    with (tmp_path / "run" / ".main.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is working on this run"):
            interp.run(ASKED, model(), stream(), out=tmp_path / "run", bootstrap=50, resume=True)


def test_what_goes_to_other_processes_can_be_pickled() -> None:
    for question in ASKED:
        analysis = question.bind(model())
        assert isinstance(analysis, ByRow)
        assert pickle.loads(pickle.dumps(analysis)).name == analysis.name


def test_results_print_what_they_are_made_of() -> None:
    found = interp.run([Norms(), Kept()], model(), [*TEXTS, ""])
    assert isinstance(found, Results)
    assert repr(found).startswith(f"Results of 40 rows, {found.tokens} tokens, 1 rows set aside, 0 cut")
