"""The axis alphabet and the words in error messages."""

import pytest
import torch

from interp.core.axes import AXES, describe, shape_text
from interp.core.wording import nearest
from interp.model.sites import MODEL_SITES, block_rows


def test_shapes_are_written_the_same_whatever_they_came_in() -> None:
    assert {shape_text(s) for s in (torch.Size((2, 7)), (2, 7), [2, 7], torch.tensor([2, 7]).tolist())} == {
        "[2, 7]"
    }
    assert shape_text(()) == "[]"


def test_axes_are_described_in_words() -> None:
    assert describe("b h q k") == "[batch row, query head, query position, key position]"
    with pytest.raises(KeyError):
        describe("b z")


def test_every_site_uses_the_alphabet() -> None:
    assert {axis for site in block_rows() + MODEL_SITES for axis in site.axes.split()} <= AXES.keys()


def test_a_hint_names_the_closest_first_and_invents_nothing() -> None:
    known = ["blocks.0.attn.hook_pattern", "blocks.0.attn.hook_q", "hook_embed"]
    assert nearest("blocks.0.attn.hook_patern", known).startswith("nearest: blocks.0.attn.hook_pattern")
    assert nearest("zzz", known) == "no name is close"
    assert nearest("zzz", []) == "no name is close"
