"""A few directions at one site of a model, found by any method, and the edits that use them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.boundary import public
from interp.core.files import write_atomically
from interp.core.kinds import Values
from interp.core.results import numbers
from interp.core.viewer import Brief
from interp.model.edits import Add, Edit, PositionIndex, Project, Swap, orthonormal
from interp.model.fitted_file import fitted_file, is_of, sample_of
from interp.model.sites import find
from interp.passes.observe import Model, as_network

if TYPE_CHECKING:
    import xarray as xr

FORMAT = "interp subspace 1"


@public()
@dataclass(frozen=True, eq=False, repr=False)
class Subspace(Brief):
    """Directions at one site, to add, to remove, or to swap between two runs.

    Args:
        site: full name of the site, whose last axis is as wide as the directions.
        directions: one per row, [k, d]; they need not be orthogonal nor of length 1 (`add` adds them as they are).
        at: cells of the site, as in `Edit`: `{"pos": -1}`; all, where nothing is named.
        about: attributes that say how the directions were found.

    Example:
        >>> found = Subspace("blocks.0.hook_resid_post", torch.eye(model.cfg.d_model)[:1], {"pos": -1})
        >>> model.edited([found.add(3.0)])(tokens).shape == model(tokens).shape
        True
    """

    site: str
    directions: Float[Tensor, "k d"]
    at: Mapping[str, PositionIndex] = field(default_factory=dict)
    about: Mapping[str, str | int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.directions) or not bool(self.directions.isfinite().all()):
            raise ValueError("at least one direction, of finite numbers, is required")

    @classmethod
    @public()
    def of_result(cls, result: xr.Dataset, **cell: int | str) -> Subspace:
        """The subspace of one cell of a result that holds `directions` and the coordinate `site`.

        Args:
            cell: the label of the cell along each dim that tells cells apart: `layer=2, pos=5`.

        Raises:
            ValueError: a result without directions, or a cell that is not named in full.
        """
        if "directions" not in result or "site" not in result.coords:
            raise ValueError(
                "a result that holds directions is required, such as that of `interp.causal.align`"
            )
        cell_result = result[["directions"]].sel(cell)
        cell_dims = [dim for dim in cell_result.directions.dims if dim not in ("direction", "d_model")]
        if cell_dims:
            raise ValueError(f"one cell is required: name its {', '.join(map(str, cell_dims))}")
        several = {"direction": None} if "direction" in cell_result.directions.dims else {}
        named = "d_model" in cell_result.coords
        along = {**several, "d_model": range(cell_result.sizes["d_model"]) if named else None}
        rows = torch.atleast_2d(numbers("directions", cell_result.directions, along))
        places: dict[str, PositionIndex] = {dim: int(index) for dim, index in cell.items() if dim != "layer"}
        if "column" in result.coords:
            places["pos"] = tuple(result.column.to_numpy().tolist())
        about = {name: value for name, value in result.attrs.items() if isinstance(value, str | int | float)}
        return cls(str(cell_result.site.values), rows, places, about)

    @cached_property
    def basis(self) -> Float[Tensor, "k d"]:
        """Orthonormal rows that span the subspace."""
        return orthonormal(self.directions)

    @public()
    def add(self, strength: float = 1.0) -> Edit:
        """The edit that adds `strength` times the direction: steering. ValueError for several directions."""
        if len(self.directions) > 1:
            raise ValueError(f"one direction is required to add, got {len(self.directions)}")
        return Edit(self.site, Add(self.directions[0], strength), self.at)

    def remove(self) -> Edit:
        """The edit that removes the part of a state in the subspace."""
        return Edit(self.site, Project(self.directions), self.at)

    @public()
    def swap(self, values: Values) -> Edit:
        """The edit that replaces the part of a state in the subspace by that of other values.

        Args:
            values: as in `interp.edits.Set`.
        """
        return Edit(self.site, Swap(self.directions, values), self.at)

    @public()
    def angles(self, other: Subspace) -> Float[Tensor, "k"]:
        """Principal angles between two subspaces of one space, ascending, in radians.

        Example:
            >>> one, two = (Subspace("blocks.0.hook_resid_post", torch.eye(4)[i : i + 2]) for i in (0, 1))
            >>> [round(angle, 3) for angle in one.angles(two).tolist()]
            [0.0, 1.571]
        """
        overlaps = torch.linalg.svdvals(self.basis.double() @ other.basis.double().mT)
        return overlaps.clamp(0, 1).arccos()

    @public()
    def save(self, path: Path | str, model: Model) -> None:
        """Write the subspace to a safetensors file, with a sample that its model is recognised by."""
        from safetensors.torch import save_file

        tensors = {"directions": self.directions, "sample": sample_of(as_network(model))}
        flat = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        about = {"site": self.site, "at": dict(self.at), "about": dict(self.about)}
        header = {"format": FORMAT, "subspace": json.dumps(about)}
        write_atomically(Path(path), lambda file: save_file(flat, file, metadata=header))

    @classmethod
    @public()
    def load(cls, path: Path | str, model: Model) -> Subspace:
        """The subspace of a file that `save` wrote. ValueError if it is none, is damaged, or belongs to another model.

        Example:
            >>> found = Subspace("blocks.0.hook_resid_post", torch.eye(model.cfg.d_model)[:1])
            >>> from tempfile import TemporaryDirectory
            >>> with TemporaryDirectory() as folder:
            ...     found.save(f"{folder}/direction.safetensors", model)
            ...     again = Subspace.load(f"{folder}/direction.safetensors", model)
            >>> again.site
            'blocks.0.hook_resid_post'
        """
        network = as_network(model)
        with fitted_file(path, "subspace", FORMAT, network.device) as (header, tensors):
            about, sample, directions = (
                json.loads(header["subspace"]),
                tensors["sample"],
                tensors["directions"],
            )
            if not is_of(network, sample):
                raise ValueError(f"{path} is a subspace of another model: its parameters differ")
            find(about["site"], network.config)
            if directions.ndim != 2:
                got = list(directions.shape)
                raise ValueError(f"{path}: directions one per row are required, got shape {got}")
            at = {dim: tuple(i) if isinstance(i, list) else i for dim, i in about["at"].items()}
            return cls(about["site"], directions, at, about["about"])
