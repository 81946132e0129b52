"""What the process has imported from which tests fork theirs, see `tests/forking.py`.

Only imports, in one thread: a lock that another thread holds at a fork would never be released in the child.
"""

import torch

torch.set_num_threads(1)

import h5netcdf  # noqa: E402, F401
import matplotlib as mpl  # noqa: E402, F401
import pyarrow.parquet  # noqa: E402, F401
import torch.distributed.tensor  # noqa: E402

import interp  # noqa: E402
import interp.cli  # noqa: E402
import interp.engine.tensor_parallel  # noqa: E402
import interp.training  # noqa: E402
import tests.engine.killed  # noqa: E402
import tests.engine.killing  # noqa: E402
import tests.training.killed  # noqa: E402, F401

for name in interp.__all__:
    getattr(interp, name)
