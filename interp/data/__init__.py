"""Prompts and where they come from: texts, token ids, files, streams, pairs, batches."""

from interp.data.batch import Batch
from interp.data.chats import read_chats
from interp.data.pairs import Pairs
from interp.data.sources import open_source
from interp.data.spellings import Spellings
from interp.data.stream import Stream

__all__ = [
    "Batch",
    "Pairs",
    "Spellings",
    "Stream",
    "open_source",
    "read_chats",
]
