"""A causal question over a stream of pairs gives the same bits in memory, after kills, on two processes and on Ray."""

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import interp
from interp import Edit
from interp.causal import Patch, patch
from interp.data import Pairs
from interp.edits import Scale
from interp.runs import Results, workers
from tests.forking import PROCESSES, attempt
from tests.runs.killing import alone, model
from tests.runs.running import agree
from tests.runs.streaming import ASKED, BAD, CLEAN, CORRUPT, die, go_on, stream, whole

PATIENCE = 180.0


@pytest.fixture(scope="module")
def expected() -> Iterator[Results]:
    """The answers of one process and one thread, in memory."""
    threads = torch.get_num_threads()
    yield whole()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _one_thread_each() -> None:
    """Matrix products round differently on another number of threads."""
    torch.set_num_threads(1)


def test_a_stream_of_pairs_gives_the_effects_of_each_pair_asked_alone(expected: Results) -> None:
    found = expected["by_head"]
    assert expected.rows == len(CLEAN) - 1 and expected.rejected.row.tolist() == [BAD]
    for prompt in (0, 8, 39):
        ids = torch.tensor([CLEAN[prompt]]), torch.tensor([CORRUPT[prompt]])
        one = patch(model(), *ids, "z", metric=interp.logit_difference(3, 4))
        here = found.sel(prompt=prompt)
        np.testing.assert_allclose(here.each.values, one.each.values[0], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(here.clean, one.clean[0], rtol=1e-9)
    np.testing.assert_allclose(found.value, found.each.mean("prompt"), rtol=1e-12)


@pytest.mark.slow
def test_a_run_killed_at_many_entries_goes_on_to_the_same_bits(expected: Results, tmp_path: Path) -> None:
    folder, deaths = tmp_path / "run", 0
    while (code := attempt(partial(die, 1 + deaths, folder))) != 0:
        assert code == -signal.SIGKILL
        deaths += 1
        assert deaths < 100, "it gets nowhere"
    assert deaths >= 4, "it was hardly killed"
    again = interp.run(ASKED, model(), stream(), out=folder, resume=True)
    agree(again, expected)


@pytest.mark.slow
def test_two_processes_give_the_same_bits(expected: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.multiprocessing, "get_context", lambda method: PROCESSES)
    agree(interp.run(ASKED, model(), stream(), devices=["cpu", "cpu"]), expected)


@pytest.mark.ray
def test_two_actors_give_the_same_bits() -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'ray[data]'")
    code, said = alone(["-m", "tests.runs.streaming"], PATIENCE)
    assert code == 0, said


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"question": Patch("z", metric=interp.logit_difference(3, 5))}, "answers"),
        ({"question": Patch("z", metric=interp.metrics.answer_loss(3))}, "metric"),
        ({"question": Patch("z", metric=lambda logits: logits[:, -1, 3] - logits[:, -1, 5])}, "metric"),
        ({"question": Patch("z", metric=interp.logit_difference(3, 4), direction="noise")}, "direction"),
        ({"edits": [Edit("L1H1", Scale(0.5))]}, "edits"),
    ],
)
def test_another_question_or_another_edit_is_refused(
    change: dict[str, object], named: str, tmp_path: Path
) -> None:
    asked = Patch(
        "z", metric=(lambda logits: logits[:, -1, 3] - logits[:, -1, 4]) if named == "metric" else None
    )
    asked = asked if named == "metric" else Patch("z", metric=interp.logit_difference(3, 4))
    data = Pairs(CLEAN[:3], CORRUPT[:3])
    interp.run(asked, model(), data, out=tmp_path)
    interp.run(asked, model(), data, out=tmp_path, resume=True)
    question = change.get("question", asked)
    with pytest.raises(ValueError, match=rf"holds another run over data: .*{named}"):
        interp.run(question, model(), data, edits=change.get("edits", ()), out=tmp_path, resume=True)  # type: ignore[arg-type]


def test_a_question_is_written_down_by_its_fields(tmp_path: Path) -> None:
    go_on(tmp_path / "run")
    text = (tmp_path / "run" / "work.json").read_text()
    assert '"noise"' in text and " at 0x" not in text


def test_moments_by_position_are_those_of_the_prompts_that_have_it() -> None:
    kept, moments = (
        interp.run(
            [Patch("resid_pre", metric=interp.logit_difference(3, 4), each=each)], model(), stream(tokens=1)
        )["patch"]
        for each in (True, False)
    )
    rows = kept["each"].notnull().sum("prompt")
    assert len(set(rows.values.flatten().tolist())) > 1
    for found in (kept, moments):
        assert bool((found.n == rows).all())
        np.testing.assert_allclose(found.value, kept["each"].mean("prompt"), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(moments.normalised, kept.normalised, rtol=1e-9, atol=1e-12)
