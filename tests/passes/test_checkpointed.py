"""Gradients by runs of blocks: those of one pass, in the room that there is."""

import pytest
import torch

import interp
from interp.data.batch import Batch
from interp.model.edits import Edit
from interp.model.sites import final_stream
from interp.model.tap import Read
from interp.passes import checkpointed
from interp.passes.checkpointed import ROOM, differentiated_in_runs, kept_bytes, rows_at_once, runs_of_blocks
from tests.configs import build, some_tokens
from tests.tolerances import assert_close


def test_a_passs_rows_follow_from_the_length_and_fit_the_room() -> None:
    model = build("gpt2")
    for width in (1, 10, 24):
        batch = Batch(torch.zeros(4, width, dtype=torch.long))
        rows = rows_at_once(model, batch, 10**9)
        assert rows * model.config.n_layers * kept_bytes(model, batch) <= ROOM
    assert rows_at_once(model, batch, 3) == 3


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "parallel", "gemma2", "olmo2"])
def test_what_is_read_by_runs_is_what_one_pass_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build(name), Batch.of([[1, 2, 3, 4, 5], [4, 5], [6, 2, 9]])
    config, edit = model.config, Edit("hook_embed", lambda value: 0.9 * value)
    end = Read(final_stream(config), grad=True)
    reads = [Read("hook_embed"), Read("hook_embed", grad=True), end]

    def number(stream: torch.Tensor) -> torch.Tensor:
        return stream[:, 0].square().sum() + stream[0, -1].sin().sum()

    monkeypatch.setattr(checkpointed, "ROOM", 1)
    runs = runs_of_blocks(model, batch)
    assert [len(run) for run in runs] == [1] * config.n_layers
    found, stream = differentiated_in_runs(model, batch, reads, [edit], number, runs)
    whole = interp.observe(model, batch, reads, [edit], stop=config.n_layers, metric=number)
    assert_close(stream, whole.output)
    assert set(found) == set(reads)
    for read in reads:
        assert_close(found[read], whole.trace[read])


def test_only_the_embeddings_are_read_and_edited_by_runs() -> None:
    model, batch = build("gpt2"), Batch(some_tokens())
    with pytest.raises(AssertionError, match="only the first run"):
        differentiated_in_runs(
            model, batch, [Read("blocks.1.hook_resid_pre", grad=True)], (), torch.sum, [range(1), range(1, 2)]
        )
