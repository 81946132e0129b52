"""Packed documents: texts side by side in one row give the numbers that each gives alone, at every site."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import interp
from interp import Batch, HookedTransformer
from interp.model import Read, Tap, Transformer, mean_next_token_loss, next_token_loss, sites
from interp.passes.observe import observe
from tests.configs import CONFIGS, build, empty_cache, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

TEXTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [5], [8, 9, 7, 9, 3], [2, 3, 8, 4]]
WIDTH = 9
EVERY = over("name", CONFIGS)


def packed() -> Batch:
    return Batch.packed(TEXTS, WIDTH, pad_id=30)


def alone(model: Transformer, text: list[int], reads: list[Read]) -> tuple[Tensor, Tap]:
    tap = Tap(reads)
    return model(torch.tensor([text]), tap)[0], tap


# --- how texts are packed -----------------------------------------------------------------------------------------


def test_texts_are_in_one_row_each_and_rows_as_few_as_first_fit_gives() -> None:
    batch = packed()
    assert [row.tolist() for row in batch.unpack(batch.tokens)] == TEXTS
    assert batch.documents is not None and batch.keep is not None
    assert batch.documents.tolist() == [
        [1] * 7 + [2, -1],
        [3] * 5 + [4] * 4,
        [0] * 3 + [-1] * 6,
    ]
    assert torch.equal(batch.keep, batch.documents >= 0)
    assert int(batch.keep.sum()) == sum(map(len, TEXTS))
    assert (batch.tokens[~batch.keep] == 30).all()


def test_texts_that_fill_their_rows_need_no_mask() -> None:
    batch = Batch.packed([[1, 2, 3], [4], [5, 6]], 3)
    assert batch.keep is None
    assert [row.tolist() for row in batch.unpack(batch.tokens)] == [[1, 2, 3], [4], [5, 6]]


@pytest.mark.parametrize("texts", [[], [[1], []], [[1, 2, 3, 4]]])
def test_texts_that_do_not_fit_are_refused_with_their_lengths(texts: list[list[int]]) -> None:
    lengths = [len(text) for text in texts]
    with pytest.raises(
        ValueError, match=re.escape(f"texts of 1 to 3 tokens are required, got lengths {lengths}")
    ):
        Batch.packed(texts, 3)


def test_what_needs_one_text_per_row_refuses_packed_rows() -> None:
    for call, what in ((packed().last, "the last token"), (packed().left_aligned, "alignment")):
        with pytest.raises(ValueError, match=f"{what} requires one text per row, this batch is packed"):
            call()
    with pytest.raises(ValueError, match="alignment requires one text per row"):
        interp.attribute(HookedTransformer(build("gpt2")), packed(), 3)
    with pytest.raises(ValueError, match="this batch is not packed"):
        Batch(some_tokens()).unpack(some_tokens())
    with pytest.raises(ValueError, match="a pass with documents takes no cache"):
        build("gpt2")(packed().tokens, documents=packed().documents, cache=empty_cache(build("gpt2"), 3))
    with pytest.raises(Exception, match=r"documents must have the shape \[3, 9\]|Type-check"):
        build("gpt2")(some_tokens(), documents=torch.zeros(3, 8, dtype=torch.long))


def test_parts_and_devices_of_a_packed_batch_keep_the_documents() -> None:
    parts = list(packed().to(torch.device("cpu")).split(2))
    joined = torch.cat([part.documents for part in parts if part.documents is not None])
    assert torch.equal(joined, packed().documents)


# --- equal to the texts alone -------------------------------------------------------------------------------------


@pytest.mark.slow
@EVERY
def test_packed_texts_give_the_logits_and_every_site_of_the_texts_alone(name: str) -> None:
    model, batch = build(name), packed()
    names = sites.names(CONFIGS[name], on_demand=True)
    reads = [Read(site) for site in names]
    seen = observe(model, batch, reads)
    fused = model(batch.tokens, keep=batch.keep, documents=batch.documents)
    texts = [alone(model, text, reads) for text in TEXTS]
    for values in (seen.output, fused):
        for found, (expected, _) in zip(batch.unpack(values), texts, strict=True):
            assert_close(found, expected)
    assert batch.documents is not None
    for read in reads:
        square = read.site.endswith(("pattern", "attn_scores"))
        for i, (_, tap) in enumerate(texts):
            row, columns = (x.tolist() for x in torch.where(batch.documents == i))
            value, expected = seen.trace[read][row[0]], tap.values[read][0]
            own = value[:, columns][:, :, columns] if square else value[columns]
            assert_close(own, expected)


@EVERY
def test_nothing_is_attended_to_outside_the_own_text(name: str) -> None:
    batch = packed()
    pattern = observe(build(name), batch, [Read("blocks.1.attn.hook_pattern")]).trace[
        "blocks.1.attn.hook_pattern"
    ]
    assert batch.documents is not None
    other = (batch.documents[:, :, None] != batch.documents[:, None]) | (batch.documents < 0)[:, None]
    assert (pattern.movedim(1, -1)[other] == 0).all()
    assert (pattern.movedim(1, -1)[~other & batch.keep[:, :, None]] != 0).any()  # type: ignore[index]


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "bloom", "t5", "post-norm"])
def test_positions_restart_with_each_text(name: str) -> None:
    """The same text twice in one row: twice the same numbers, which differ from those of one long text."""
    model, text = build(name), [3, 1, 4, 1]
    batch = Batch.packed([text, text], 8)
    logits = model(batch.tokens, documents=batch.documents)[0]
    assert_close(logits[:4], logits[4:])
    assert (logits[4:] - model(batch.tokens)[0, 4:]).abs().max() > 1e-3


def test_position_embeddings_of_each_text_are_the_first_rows_of_the_table() -> None:
    model, batch = build("gpt2"), packed()
    tap = Tap([Read("hook_pos_embed")])
    model(batch.tokens, tap, documents=batch.documents, keep=batch.keep)
    for text, found in zip(TEXTS, batch.unpack(tap.values[tap.reads[0]]), strict=True):
        assert_close(found, model.pos_embed.weight[: len(text)])


def test_the_window_counts_inside_a_text() -> None:
    batch = Batch.packed([[1, 2, 3, 4, 5, 6], [7, 8, 9]], 9)
    read = Read("blocks.0.attn.hook_pattern", via=lambda p: (p[0, 0] > 0).sum(-1))
    visible = observe(build("window"), batch, [read]).trace[read]
    assert visible.tolist() == [1, 2, 3, 4, 4, 4, 1, 2, 3]


def test_token_types_travel_with_their_columns() -> None:
    model, batch = build("masked-lm"), packed()
    types = torch.where(batch.keep, batch.tokens % 2, 0)  # type: ignore[arg-type]
    logits = observe(model, replace(batch, types=types)).output
    for text, found in zip(TEXTS, batch.unpack(logits), strict=True):
        assert_close(found, model(torch.tensor([text]), types=torch.tensor([text]) % 2)[0])


def test_gradients_stay_inside_their_text() -> None:
    batch, read = packed(), Read("hook_embed", grad=True)
    assert batch.documents is not None
    for name in ("gpt2", "gpt-oss", "bidirectional"):
        only_4 = batch.documents == 4
        trace = observe(
            build(name), batch, [read], metric=lambda x, only_4=only_4: x[only_4].square().sum()
        ).trace
        assert (trace[read][~only_4] == 0).all()
        assert (trace[read][only_4] != 0).any(-1).all()


# --- what counts over texts ---------------------------------------------------------------------------------------


def test_loss_of_packed_texts_is_that_of_the_texts_without_boundaries() -> None:
    model, batch = build("gpt2"), packed()
    logits = model(batch.tokens, keep=batch.keep, documents=batch.documents)
    each = [next_token_loss(alone(model, t, [])[0][None], torch.tensor([t]))[0] for t in TEXTS if len(t) > 1]
    whole = torch.cat(each)
    found = next_token_loss(logits, batch.tokens, batch.keep, batch.documents)
    assert int((found != 0).sum()) == len(whole)
    assert_close(found.sum(), whole.sum())
    assert_close(mean_next_token_loss(logits, batch.tokens, batch.keep, batch.documents), whole.mean())
    full = Batch.packed([[1, 2, 3], [4, 5, 6]], 6)
    found = next_token_loss(
        model(full.tokens, documents=full.documents), full.tokens, documents=full.documents
    )
    assert (found[0] == 0).tolist() == [False, False, True, False, False]


def test_lens_of_packed_texts_is_that_of_the_texts() -> None:
    subject, batch = HookedTransformer(build("gpt2")), packed()
    together = interp.logit_lens(subject, batch, top=2)
    assert together.sizes["prompt"] == len(TEXTS)
    for i, text in enumerate(TEXTS):
        one = interp.logit_lens(subject, torch.tensor(text), top=2)
        for name in ("entropy", "kl", "target_rank", "target_prob", "top_token"):
            found, expected = (
                torch.tensor(table[name].isel(pos=slice(len(text))).values).double().nan_to_num(-7.0)
                for table in (together.sel(prompt=[i]), one)
            )
            assert_close(found, expected)
        assert (together.token.sel(prompt=i).values[len(text) :] == "").all()


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "masked-lm"])
def test_changing_one_text_changes_no_number_of_its_neighbours(name: str) -> None:
    model = build(name)
    one = Batch.packed([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], 12)
    other = replace(one, tokens=torch.where(one.documents == 1, 30, one.tokens))  # type: ignore[arg-type]
    before, after = (model(b.tokens, documents=b.documents)[0] for b in (one, other))
    assert_close(before[[0, 1, 2, 3, 8, 9, 10, 11]], after[[0, 1, 2, 3, 8, 9, 10, 11]])
    assert (before[4:8] - after[4:8]).abs().max() > 1e-2
