"""Data cut into batches, as a user cuts them: for tests that the cut changes no number."""

from interp.data.batch import Batch, Prompts
from interp.passes.observe import Model, text_of


def in_batches(model: Model, data: Prompts, rows: int) -> list[Batch]:
    """The prompts in their order, so many at a time."""
    return list(text_of(model).batch(data).split(rows))
