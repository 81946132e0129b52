"""The largest entries of full circuits against the vocab x vocab matrices themselves, and the planted head's words."""

import functools

import pytest
import torch
import xarray as xr
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.weights import HeadCircuits, skip_trigrams, top_pairs
from interp.weights.token_pairs import SIDES
from interp.zoo import groundtruth
from tests.tables import PART_COLUMNS
from tests.tiny import hooked
from tests.tolerances import assert_close


def usual(model: HookedTransformer) -> HeadCircuits:
    return HeadCircuits(model, folded=True, scaled=True, embedding="effective")


def dense_ov(circuits: HeadCircuits, head: str) -> Tensor:
    """E W_V W_O U, `[source, output]`."""
    return circuits.embedded @ circuits.ov(head).AB @ circuits.unembedding


def dense_qk(circuits: HeadCircuits, head: str) -> Tensor:
    return circuits.embedded @ circuits.qk(head).AB @ circuits.embedded.mT


@functools.cache
def planted() -> HookedTransformer:
    return HookedTransformer.from_pretrained("groundtruth-induction")


@pytest.mark.parametrize("kind", ["OV", "QK"])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "granite-moe"])
def test_top_pairs_are_the_dense_circuits_extremes_less_row_means(
    name: str, kind: str, largest: bool
) -> None:
    model = hooked(name)
    full = (dense_ov if kind == "OV" else dense_qk)(usual(model), "L1H2")
    full = full - full.mean(-1, keepdim=True)
    order = full.flatten().argsort(descending=largest)[:7]
    found = top_pairs(model, "L1H2", kind, top=7, largest=largest)  # type: ignore[arg-type]
    assert found.value.dims == ("part", "rank") and found.part.values.tolist() == ["L1H2"]
    table = interp.frame(found)
    rows, columns = (table[f"{side}_id"].to_list() for side in SIDES[kind])
    assert (rows, columns) == ((order // len(full)).tolist(), (order % len(full)).tolist())
    assert_close(torch.tensor(table.value.to_list(), dtype=torch.float64), full.flatten()[order])
    assert table[SIDES[kind][0]].to_list() == model.text.pieces(rows)
    several = top_pairs(model, ["L0H1", "L1H2"], kind, top=7, largest=largest)  # type: ignore[arg-type]
    xr.testing.assert_identical(several.sel(part=["L1H2"]), found)


def test_skip_trigrams_join_the_strongest_pairs_with_what_they_raise() -> None:
    model = hooked("gpt2")
    circuits = usual(model)
    qk, ov = (m - m.mean(-1, keepdim=True) for m in (dense_qk(circuits, "L0H1"), dense_ov(circuits, "L0H1")))
    result = skip_trigrams(model, "L0H1", top=4, outputs=3)
    table = interp.frame(result)
    assert len(table.columns.difference(PART_COLUMNS)) <= 12
    order = qk.flatten().argsort(descending=True)[:4]
    expected = [
        (int(pair % len(qk)), int(pair // len(qk)), int(output))
        for pair in order
        for output in ov[pair % len(qk)].argsort(descending=True)[:3]
    ]
    found = list(table[["source_id", "destination_id", "output_id"]].itertuples(index=False, name=None))
    assert found == expected
    for row in table.itertuples():
        assert row.qk == pytest.approx(float(qk[row.destination_id, row.source_id]))
        assert row.ov == pytest.approx(float(ov[row.source_id, row.output_id]))


@pytest.mark.parametrize("sources", [["a", 7], "b"])
def test_skip_trigrams_of_given_sources_list_who_attends_to_them(sources: str | list[str | int]) -> None:
    model = hooked("gpt2")
    qk = dense_qk(usual(model), "L1H1")
    qk = qk - qk.mean(-1, keepdim=True)
    table = interp.frame(skip_trigrams(model, "L1H1", sources=sources, top=3, outputs=2))
    given = [model.text.single("a"), 7] if isinstance(sources, list) else [model.text.single("b")]
    assert table.source_id.to_list() == [s for s in given for _ in range(6)]
    for i, source in enumerate(given):
        destinations = table.destination_id.to_list()[6 * i : 6 * i + 6 : 2]
        assert destinations == qk[:, source].argsort(descending=True)[:3].tolist()


def test_planted_induction_head_reads_as_copying_what_follows_itself() -> None:
    """Head 1.2 alone: every source raises itself most."""
    table = interp.frame(top_pairs(planted(), groundtruth.INDUCTION, "OV", top=len(groundtruth.SYMBOLS)))
    assert table.source.to_list() == table.output.to_list()
    assert sorted(table.source) == sorted(groundtruth.SYMBOLS)


def test_other_conventions_give_the_entries_of_their_circuits() -> None:
    model = hooked("gpt2")
    plain = dense_ov(HeadCircuits(model), "L1H1")
    found = top_pairs(model, "L1H1", top=5, folded=False, scaled=False, embedding="token")
    expected = (plain - plain.mean(-1, keepdim=True)).flatten().topk(5).values
    assert_close(torch.from_numpy(found.value.values[0]), expected)


def test_what_has_no_meaning_is_refused_by_name() -> None:
    model, size = hooked("gpt2"), hooked("gpt2").cfg.d_vocab
    with pytest.raises(IndexError, match="L0H4: the index of a head is 0 to 3 in this model"):
        top_pairs(model, "L0H4")
    for ask in (top_pairs, skip_trigrams):
        with pytest.raises(ValueError, match=r"a head, such as L1H2, is required, or several, got L0.mlp"):
            ask(model, "L0.mlp")
        with pytest.raises(ValueError, match="a head, such as L1H2, is required, or several, got none"):
            ask(model, [])
        with pytest.raises(ValueError, match=r"top must be in \[1, "):
            ask(model, "L0H0", top=size**2 + 1)
    with pytest.raises(ValueError, match=rf"outputs must be in \[1, {size}\], got 0"):
        skip_trigrams(model, "L0H0", outputs=0)
    with pytest.raises(ValueError, match="at least one source is required, got none"):
        skip_trigrams(model, "L0H0", sources=[])
