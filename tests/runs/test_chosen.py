"""One number of a run, chosen by name."""

from pathlib import Path

import numpy as np
import xarray as xr

from interp.cli.kept_runs import records_in
from interp.runs.chosen import ResultChoice
from interp.runs.record import Record
from tests.runs.test_record import Job


def test_a_mean_over_a_cell_without_a_number_is_none(tmp_path: Path) -> None:
    values = xr.Dataset(
        {"value": ("row", [1.0, 3.0, np.nan]), "whole": ("row", [1.0, 3.0, 5.0])}, {"row": [0, 1, 2]}
    )
    with Record.create(tmp_path, "one", Job()) as record:
        record.step("scores", lambda: values)
        assert np.isnan(ResultChoice.of("scores.value").value(record))
        assert ResultChoice.of("scores.whole").value(record) == 3.0
        assert ResultChoice.of("scores.value:row=1").value(record) == 3.0


def test_runs_of_one_second_are_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    begun = []
    for _ in range(8):
        with Record.create(tmp_path, "one", Job()) as record:
            begun.append(record.folder.name)
    assert [record.folder.name for record in records_in(tmp_path)[0]] == begun
