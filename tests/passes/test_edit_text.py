"""An edit written down and read again is the same edit, as JSON and as Python."""

import json

import pytest
import torch

import interp
from interp.model.edits import Add, Detach, Edit, Mean, Project, Resample, Scale, Set, Swap, Zero
from interp.passes.edit_text import (
    change_from_json,
    edit_from_json,
    edit_to_json,
    edit_to_python,
)
from tests.loops import over

VECTOR = torch.tensor([0.1, -2.5, 1e-30, 1e30])
HIDING = torch.tensor([0.1, -torch.inf])
WIDE = torch.randn(3, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
EDITS = [
    Edit("L3H5", Zero()), Edit((3, 5), Scale(0.1), {"pos": -1}), Edit("L2.mlp", Mean("template"), {"pos": (0, 3)}),
    Edit("L2N7", Resample(4), rows=(0, 2)), Edit("L0.resid", Add(VECTOR, 2.0)), Edit("L0.resid", Set(-1.5)),
    Edit("blocks.1.attn.hook_attn_scores", Set(-torch.inf), {"query": 5, "key": 1, "head": 2}),
    Edit("blocks.1.attn.hook_attn_scores", Add(HIDING)),
    Edit("L1.resid", Set(WIDE, first=2)), Edit("L1.resid", Project(WIDE, keep=True)), Edit("L1.resid", Detach()),
    Edit("L1.resid", Swap(WIDE, WIDE.half())), Edit("ln_final.hook_scale", Scale(2)),
]  # fmt: skip


def same(one: Edit, other: Edit) -> bool:
    if (one.name, dict(one.at), one.rows, type(one.change)) != (
        other.name, dict(other.at), other.rows, type(other.change),
    ):  # fmt: skip
        return False
    for name, value in vars(one.change).items():
        mine = getattr(other.change, name)
        if isinstance(value, torch.Tensor):
            if value.dtype != mine.dtype or not torch.equal(value, mine):
                return False
        elif value != mine:
            return False
    return True


@over("i", range(len(EDITS)))
def test_an_edit_reads_back_from_json_and_from_python_bit_for_bit(i: int) -> None:
    edit = EDITS[i]
    text = json.dumps(edit_to_json(edit), allow_nan=False)
    assert same(edit_from_json(json.loads(text)), edit)
    assert same(eval(edit_to_python(edit), {"interp": interp, "torch": torch}), edit)


BAD = {
    "no object": ([], "an edit as JSON is required"),
    "no part": ({"where": "L3Q5", "change": "zero"}, "no part 'L3Q5'"),
    "no change": ({"where": "L3H5"}, "the key 'change'"),
    "an unknown change": ({"where": "L3H5", "change": "zeros"}, "nearest: zero"),
    "an unknown field": ({"where": "L3H5", "change": "scale", "by": 2}, "has the fields factor, not 'by'"),
    "a missing field": ({"where": "L3H5", "change": "scale"}, "requires the fields factor"),
    "at": ({"where": "L3H5", "change": "zero", "at": 3}, "'at' holds an index by dim"),
    "rows": ({"where": "L3H5", "change": "zero", "rows": "all"}, "'rows' holds row numbers"),
    "a tensor": ({"where": "L3.resid", "change": "set", "values": {"dtype": "float32"}}, "dtype, shape and bytes"),
    "a dtype": (
        {"where": "L3.resid", "change": "set", "values": {"dtype": "load", "shape": [1], "bytes": ""}}, "unknown dtype",
    ),
}  # fmt: skip


@over("case", BAD)
def test_anything_else_is_refused(case: str) -> None:
    held, message = BAD[case]
    with pytest.raises((ValueError, KeyError), match=message):
        edit_from_json(held)


def test_a_function_is_not_written_down() -> None:
    with pytest.raises(ValueError, match="only closed changes"):
        edit_to_json(Edit("L0H1", torch.relu))
    with pytest.raises(ValueError, match="an object with the key 'change'"):
        change_from_json("zero")
