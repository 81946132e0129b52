"""Questions over data of any size: processes, shards, folders that are gone on with, records, stores."""

from interp.runs.record import Record
from interp.runs.run import Results, answered, run
from interp.runs.store import ActivationStore, store_activations

__all__ = [
    "ActivationStore",
    "Record",
    "Results",
    "answered",
    "run",
    "store_activations",
]
