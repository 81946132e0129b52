"""A subspace as edits: against the same numbers written out."""

import numpy as np
import pytest
import torch
import xarray as xr

from interp.causal import Subspace
from interp.model.tap import Read
from interp.passes.observe import observe
from tests.configs import build, some_tokens

SITE = "blocks.0.hook_resid_post"


def result(**attrs):
    directions = np.arange(24.0).reshape(2, 3, 1, 4)
    return xr.Dataset(
        {"directions": (("layer", "pos", "direction", "d_model"), directions)},
        coords={"layer": [0, 1], "pos": [0, 1, 2], "site": (("layer",), [SITE, SITE.replace("0", "1")])},
        attrs=attrs,
    )


def test_a_cell_of_a_result_is_a_subspace_of_its_site_and_position():
    found = Subspace.of_result(result(method="das"), layer=1, pos=2)
    assert (
        found.site == SITE.replace("0", "1") and found.at == {"pos": 2} and found.about == {"method": "das"}
    )
    assert found.directions.tolist() == [[20.0, 21.0, 22.0, 23.0]]


def test_a_cell_that_is_not_named_in_full_is_refused():
    with pytest.raises(ValueError, match="one cell is required: name its pos"):
        Subspace.of_result(result(), layer=1)


def test_its_edits_add_remove_and_swap_what_lies_in_it():
    model, tokens = build("gpt2"), some_tokens(1)
    x = observe(model, tokens, [Read(SITE)]).trace[Read(SITE)]
    rows = torch.randn(2, x.shape[-1], generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    found, q = Subspace(SITE, rows, {"pos": 3}), torch.linalg.qr(rows.mT).Q.mT
    other = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    wanted = {
        "remove": x[:, 3] - x[:, 3] @ q.mT @ q,
        "swap": x[:, 3] + (other[:, 3] - x[:, 3]) @ q.mT @ q,
        "add": x[:, 3] + 2.5 * rows[0],
    }
    edits = {
        "remove": found.remove(), "swap": found.swap(other), "add": Subspace(SITE, rows[:1], {"pos": 3}).add(2.5),
    }  # fmt: skip
    for name, edit in edits.items():
        after = observe(model, tokens, [Read(SITE)], [edit]).trace[Read(SITE)]
        torch.testing.assert_close(after[:, 3], wanted[name], msg=name)
        assert torch.equal(after[:, :3], x[:, :3])


def test_several_directions_cannot_be_added():
    with pytest.raises(ValueError, match="one direction is required to add, got 2"):
        Subspace(SITE, torch.eye(4)[:2]).add()


def test_angles_are_those_of_a_rotation():
    angle = torch.tensor(0.3).double()
    turned = torch.stack((angle.cos(), angle.sin(), torch.zeros(()).double()))[None]
    one, two = Subspace(SITE, torch.eye(3).double()[:1]), Subspace(SITE, turned)
    torch.testing.assert_close(one.angles(two), angle[None])
