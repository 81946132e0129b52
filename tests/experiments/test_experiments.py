"""Every experiment, made small, in its record: whole, and killed after the first thing it keeps, then gone on with."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.figure import Figure

from interp.cli.parameters import filled
from interp.opening import OfModel
from interp.runs.experiment import loaded
from interp.runs.record import Drawing, Record
from tests.scales import uneven

T = TypeVar("T")
FOLDER = Path(__file__).parents[2] / "experiments"
NO_RECORDS = {"train_zoo"}
"""It makes the weights of the package, and has a command line of its own."""
SMALL = {
    "attribution_faithfulness": "model=demo-attn-2l prompts=2",
    "backward_lens": "prompts=3 dtype=float64",
    "causal_tracing": "facts=3 samples=2 dtype=float64",
    "circuit_benchmark": ("model=demo-attn-2l tasks=copy pairs=2 draws=1 resamples=10"),
    "circuit_stability": "model=demo-attn-2l sentences=4 edges=6 draws=1 dtype=float64",
    "depth_diagnostics": "model=demo-attn-2l rows=2 length=12 repeats=2 steps=1",
    "copy_reverse": (
        "d_vocab=6 low=2 high=3 d_model=16 n_heads=2 n_layers=1 test_rows=4 training.steps=4 training.log_every=2"
    ),
    "edit_by_shift": "edits=2 tuning=1 neighbours=1 sentences=1 length=16 texts=2 steps=2 dtype=float64",
    "every_decoder": "types=arcee,mamba",
    "framework_one_two_layers": "rows=4 dtype=float64",
    "function_vectors": (
        "tasks=country_capital tasks=antonym pairs=10 shots=2 rows=3 top=2 draws=2 dtype=float64"
    ),
    "induction_phase_change": (
        "seeds=1 d_model=16 d_vocab=20 training.steps=2 training.rows=4 training.checkpoints=2"
        " training.evaluation_rows=4"
    ),
    "influence": "rows=8 queries=3 groups=3 seeds=2 d_vocab=8 width=6 training.steps=3 training.rows=4",
    "ioi": "model=demo-attn-2l prompts=2 dtype=float64",
    "jacobian_lens": "model=demo-attn-2l prompts=6 length=20 few=3 read=1 orders=3",
    "linear_relations": "most=6 examples=2 only_known=False dtype=float64",
    "memory_model": "strings=4 copying_steps=2 memory_steps=2 rows=4 tested=4",
    "minimal_pairs": "rows=4 training.steps=4 training.rows=4 training.log_every=2 training.evaluation_rows=4",
    "mixers_and_induction": (
        "seeds=2 only=softmax only=pooling d_vocab=43 training.steps=2 training.rows=4 training.evaluation_rows=4"
    ),
    "name_every_head": "model=groundtruth-induction",
    "phase_change": "",
    "probing_scale": "model=demo-mlp-2l smaller=demo-4l prompts=60 most=1 shuffles=1",
    "relevance_patching": "model=deep layers=2 prompts=32 training.steps=3 training.rows=4 training.evaluation_rows=4",
    "short_circuit_memorisation": "model=demo-attn-2l facts=4 sentences=2 repeats=2",
    "steering": "countries=12 draws=3 sentences=2 dtype=float64",
    "train": "task=recall d_vocab=20 training.steps=4 training.rows=4 training.evaluation_rows=4",
    "what_layers_know": "model=demo-mlp-2l words=6",
    "what_changed": "model=demo-attn-2l facts=3 steps=2 dtype=float64",
    "tuned_lens": "model=demo-attn-2l steps=2 sampled=4 sentences=4 held_out=3",
    "variables": "model=demo-attn-2l only=capital only=continent rank=1 pairs=5 steps=2 dtype=float64",
}
"""What to say to `-p` so that an experiment takes seconds."""


NO_MODEL = {"phase_change", "induction_phase_change", "influence", "mixers_and_induction", "every_decoder"}
"""The first reads a log; the others train their models themselves, from parameters and seeds alone."""
TRAINED_HERE = {"copy_reverse", "memory_model", "minimal_pairs", "train"}
"""They train what they ask about too, and keep it."""
TIMES = ("_seconds", "_ms")
"""Ends of columns that measure time, which no run repeats."""


class KilledError(BaseException):
    """The end of a process, as far as another run in this one can tell: nothing handles it."""


class KilledRecord(Record):
    """A record whose process ends when it would keep something else than it holds already."""

    def step(self, name: str, compute: Callable[[], T]) -> T:
        return super().step(name, compute if self._empty else self._die)

    def table(self, name: str, frame: pd.DataFrame) -> None:
        super().table(name, frame if self._empty else self._die())

    def figure(self, name: str, figure: Drawing) -> None:
        super().figure(name, figure if self._empty else self._die())

    @property
    def _empty(self) -> bool:
        return not (self.run.steps or self.run.tables or self.run.figures)

    def _die(self) -> NoReturn:
        raise KilledError


@pytest.fixture(autouse=True)
def _figures_are_closed() -> Iterator[None]:
    yield
    plt.close("all")


def kept(record: Record) -> list[str]:
    """Every file that the run lists, all of which are there."""
    run = record.run
    several = [*(step.files for step in run.steps.values()), *run.tables.values()]
    files = [file for files in several for file in files] + list(run.figures.values())
    assert all((record.folder / file).stat().st_size for file in files)
    return files


def results(record: Record) -> dict[str, bytes]:
    """The exact file of every step, and the tables, bit for bit, but for columns of times."""
    run = record.run
    files = [step.files[0] for step in run.steps.values()] + [files[1] for files in run.tables.values()]
    return {file: without_times(record.folder / file) for file in files}


def without_times(file: Path) -> bytes:
    """The bytes of a file; of a table with times, of the rest of it."""
    if file.suffix == ".parquet":
        table = pd.read_parquet(file)
        if any(column.endswith(TIMES) for column in table):
            return table[[c for c in table if not c.endswith(TIMES)]].to_parquet()
    return file.read_bytes()


def test_the_table_has_every_experiment() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == SMALL.keys() | NO_RECORDS


@pytest.mark.parametrize("name", sorted(SMALL.keys() - NO_MODEL - TRAINED_HERE))
def test_an_experiment_about_a_model_takes_its_device_and_precision(name: str, tmp_path: Path) -> None:
    file = FOLDER / f"{name}.py"
    with loaded(file) as experiment:
        assert issubclass(experiment.kind, OfModel)
        job = filled(experiment, ["device=nowhere", "dtype=bfloat16"])
        with (
            pytest.raises(ValueError, match="device 'nowhere' is not available"),
            Record.create(tmp_path, name, job, file=file) as record,
        ):
            experiment.main(job, record)


@pytest.mark.books
@pytest.mark.parametrize("name", SMALL)
def test_an_experiment_finishes_and_if_killed_goes_on_to_the_same_results(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And maps of one quantity in one of its figures have one colour scale."""
    file = FOLDER / f"{name}.py"
    found: list[str] = []
    keep = Record.figure

    def figure(self: Record, name: str, figure: Drawing) -> None:
        found.extend(uneven(figure) if isinstance(figure, Figure) else ())
        keep(self, name, figure)

    monkeypatch.setattr(Record, "figure", figure)
    with loaded(file) as experiment:
        job = filled(experiment, SMALL[name].split())
        with Record.create(tmp_path, name, job, file=file) as whole:
            experiment.main(job, whole)
        assert Record.open(whole.folder).state == "finished"
        assert kept(whole) and whole.run.figures
        assert whole.run.models or name in NO_MODEL

        killed = KilledRecord.create(tmp_path, name, job, file=file)
        with pytest.raises(KilledError):
            experiment.main(job, killed)
        killed.close()
        assert killed.state == "interrupted"
        (first,) = [*killed.run.steps, *killed.run.tables, *killed.run.figures]

        with Record.resume(killed.folder, job, file=file) as resumed:
            experiment.main(job, resumed)
    assert found == []
    assert Record.open(resumed.folder).state == "finished"
    assert kept(resumed) == kept(whole)
    assert results(resumed) == results(whole)
    if killed.run.steps:
        assert f"step {first}: loaded" in (resumed.folder / "log.txt").read_text()


@pytest.mark.books
def test_mixers_trained_in_several_runs_are_those_of_one_run(tmp_path: Path) -> None:
    file = FOLDER / "mixers_and_induction.py"
    small = [
        "only=pooling",
        "d_vocab=43",
        "training.steps=2",
        "training.rows=4",
        "training.evaluation_rows=4",
    ]

    def table(*said: str) -> Path:
        with loaded(file) as experiment:
            job = filled(experiment, [*small, *said])
            with Record.create(tmp_path, file.stem, job, file=file) as record:
                experiment.main(job, record)
        return record.folder

    apart = [table("seeds=1", f"training.seed={seed}") for seed in (0, 1)]
    joined = table("seeds=0", *(f"joined={folder}" for folder in apart))
    together = table("seeds=2")
    for name in ("runs", "mixers"):
        files = [folder / "tables" / f"{name}.parquet" for folder in (joined, together)]
        assert without_times(files[0]) == without_times(files[1])
