"""What the process has imported from which tests fork theirs, see `tests/forking.py`.

Only imports, in one thread: a lock that another thread holds at a fork would never be released in the child. Nothing
of `interp.compat`, whose tests look at what an import of it imports.
"""

from importlib import import_module

import torch

torch.set_num_threads(1)
for name in (
    *("h5netcdf.legacyapi", "matplotlib", "pyarrow.dataset", "pyarrow.parquet", "scipy.special"),
    "torch.distributed.tensor",
    *("interp.cli", "interp.runs.tensor_parallel", "interp.lab.training"),
    *("tests.runs.killed", "tests.runs.killing", "tests.families.memory", "tests.lab.training.killed"),
):
    import_module(name)

package = import_module("interp")
for name in (*package.HOMES, *package.WINGS):
    if name != "compat":
        getattr(package, name)
