"""Scores of edges in the files of the MIB benchmark (Mueller et al. 2025, arXiv:2504.13151) and of the EAP-IG library.

A file is JSON (`cfg`, `nodes`, `edges`) or a torch file (`cfg`, `src_nodes`, `dst_nodes`, `edges_scores`,
`edges_in_graph`, `nodes_in_graph`). Their graph has an edge for the query, key and value of every head, and an MLP in
every layer: a score of keys or values that heads share is divided among these heads there, and the edges of an MLP that
the model lacks have score 0.
Scores have the same sign: positive where corrupting the edge lowers the metric.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.causal.graph import EdgeGraph
from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.files import json_object, regular, write_atomically
from interp.core.results import numbers
from interp.core.viewer import Brief
from interp.model.config import ModelConfig
from interp.model.parts import Part
from interp.passes.observe import Model, as_network

if TYPE_CHECKING:
    import xarray as xr

KEYS = ("cfg", "src_nodes", "dst_nodes", "edges_scores", "edges_in_graph", "nodes_in_graph")
"""Keys of a torch file."""


@public()
@dataclass(frozen=True, eq=False, repr=False)
class MibScores(Brief):
    """Scores and circuit of a file for every edge of a model, in the order of its `EdgeGraph`."""

    scores: Float[Tensor, "sender receiver"]
    kept: Bool[Tensor, "sender receiver"]
    """Whether an edge is in the circuit that the file names."""


@public()
def write_mib(
    path: Path | str,
    model: Model,
    scores: xr.Dataset | Float[Tensor, "sender receiver"],
    kept: Bool[Tensor, "sender receiver"] | None = None,
) -> None:
    """Write scores of edges in the format of MIB and the EAP-IG library: to `.json`, or to `.pt`.

    Args:
        path: file to write, ending in .json or .pt.
        scores: a table as `score_edges` gives it, or a matrix in the order of `EdgeGraph`. The score of an edge into
            keys or values that heads share is split evenly over them, as their graph has one edge per head.
        kept: edges of a circuit, such as `Circuit.mask()`; None: all.

    Raises:
        ValueError: another suffix, another shape or a score that is not finite.
        OSError: a file that cannot be written.

    Source:
        Mueller et al. 2025, arXiv:2504.13151 (MIB).

    Example:
        >>> metric = interp.logit_difference(" Mary", " John")
        >>> found = interp.circuits.score_edges(model, "The cat sat", "The dog sat", method="eap", metric=metric)
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     write_mib(f"{folder}/scores.json", model, found)
        ...     again = read_mib(f"{folder}/scores.json", model)
        >>> [tuple(each.shape) == found.value.shape for each in (again.scores, again.kept)]
        [True, True]
    """
    kind, config = _suffix(path), as_network(model).config
    layout = _Layout(EdgeGraph.of(config))
    graph = layout.graph
    if not isinstance(scores, Tensor) and "value" not in scores:
        raise ValueError(
            "scores must be a matrix, or a table as score_edges gives it; this one has no 'value'"
        )
    matrix = scores if isinstance(scores, Tensor) else numbers("scores", scores["value"], graph.labels)
    values, chosen = matrix.detach().cpu().double(), graph.exists if kept is None else kept.cpu()
    if values.shape != graph.exists.shape or chosen.shape != graph.exists.shape:
        raise ValueError(
            f"scores and kept must be {shape_text(graph.exists.shape)} of this model's edges, got "
            f"{shape_text(values.shape)} and {shape_text(chosen.shape)}"
        )
    chosen = chosen & graph.exists
    if not bool(values[graph.exists].isfinite().all()):
        raise ValueError("scores must be finite numbers for every edge, some are NaN or infinite")
    arrays = layout.to_file(values.masked_fill(~graph.exists, 0.0)), layout.to_file(chosen, split=False)
    record = _as_json(layout, config, *arrays) if kind == ".json" else _as_tensors(layout, config, *arrays)
    if kind == ".json":
        text = json.dumps(record)
        write_atomically(Path(path), lambda where: where.write_text(text, encoding="utf-8"))
    else:
        write_atomically(Path(path), lambda where: torch.save(record, where))


@public()
def read_mib(path: Path | str, model: Model) -> MibScores:
    """Edge scores in a file of MIB or the EAP-IG library (`.json` or `.pt`), in the order of `EdgeGraph`.

    The scores of heads that share keys or values are added up. A torch file is read without running code that it may
    contain.

    Args:
        path: the file.

    Returns:
        The scores, and the mask of the circuit.

    Raises:
        ValueError: a file of another format or another shape of model, an edge that this model lacks, a score that is
            no finite number, or a circuit that has only some heads of a group.
        OSError: a file that cannot be read.

    Source:
        Mueller et al. 2025, arXiv:2504.13151 (MIB).
    """
    kind, config = _suffix(path), as_network(model).config
    layout = _Layout(EdgeGraph.of(config))
    if kind == ".json":
        record = json_object(path)
        _check_shape(path, record, ("cfg", "nodes", "edges"), config)
        scores, kept = _scores_of_json(path, record["edges"], layout)
    else:
        try:
            record = torch.load(regular(path), weights_only=True, map_location="cpu")
        except FileNotFoundError:
            raise
        except Exception as cause:  # of many kinds: a pickle may be damaged anywhere
            raise ValueError(f"{path} is no torch file of tensors, numbers and names: {cause}") from cause
        _check_shape(path, record, KEYS, config)
        scores, kept = record["edges_scores"], record["edges_in_graph"]
        for name, value in (("edges_scores", scores), ("edges_in_graph", kept)):
            if not isinstance(value, Tensor) or value.shape != layout.file_graph.exists.shape:
                raise ValueError(
                    f"{path}: {name} of {shape_text(layout.file_graph.exists.shape)} is required"
                )
        scores, kept = scores.double(), kept.bool()
    if not bool(scores[layout.file_graph.exists].isfinite().all()):
        raise ValueError(f"{path}: a score is no finite number")
    return layout.from_file(
        path, scores.masked_fill(~layout.file_graph.exists, 0.0), kept & layout.file_graph.exists
    )


def _suffix(path: Path | str) -> str:
    kind = Path(path).suffix
    if kind not in (".json", ".pt"):
        raise ValueError(f"a path that ends in .json or .pt is required, got {str(path)!r}")
    return kind


class _Layout:
    """Mapping between edge matrices [sender, receiver] of a file and those of the model's graph."""

    def __init__(self, graph: EdgeGraph) -> None:
        if graph.mlp_before:
            raise ValueError(
                "files of MIB have one MLP in a layer, this model another one before attention (Macaron)"
            )
        self.graph = graph
        self.file_graph = EdgeGraph(graph.n_layers, graph.n_heads, graph.n_heads, True, graph.parallel)
        """The graph of the file: an MLP in every layer, a key and a value of every head."""

    @cached_property
    def senders(self) -> tuple[str, ...]:
        """Names of the senders in the file."""
        return tuple(_name(sender) for sender in self.file_graph.senders)

    @cached_property
    def receivers(self) -> tuple[str, ...]:
        """Names of the receivers in the file."""
        return tuple(_name(receiver) for receiver in self.file_graph.receivers)

    @cached_property
    def rows(self) -> Int[Tensor, "theirs"]:
        """Index in the model's graph of each sender of the file; -1 for an MLP that the model lacks."""
        index_of = {name: i for i, name in enumerate(self.graph.senders)}
        return torch.tensor([index_of.get(name, -1) for name in self.file_graph.senders])

    @cached_property
    def columns(self) -> Int[Tensor, "theirs"]:
        """Index in the model's graph of each receiver of the file; -1 for an MLP that the model lacks."""
        index_of = {name: i for i, name in enumerate(self.graph.receivers)}
        size, indices = self.graph.n_heads // self.graph.n_kv_heads, []
        for name in self.file_graph.receivers:
            part = Part.of(name)
            if part.kind in ("key", "value") and size > 1:
                assert part.index is not None
                name = str(Part(f"group_{part.kind}", part.layer, part.index // size))
            indices.append(index_of.get(name, -1))
        return torch.tensor(indices)

    def to_file(self, values: Tensor, *, split: bool = True) -> Tensor:
        """The model's edge matrix as the file's; `split` divides the value of a group among its heads."""
        matrix = values[self.rows][:, self.columns]
        matrix[self.rows < 0] = 0
        matrix[:, self.columns < 0] = 0
        if not split:
            return matrix
        counts = torch.bincount(self.columns[self.columns >= 0], minlength=len(self.graph.receivers))
        return matrix / counts[self.columns].clamp_min(1)

    def from_file(self, path: Path | str, scores: Tensor, kept: Tensor) -> MibScores:
        """The file's matrices as the model's. ValueError for edges of MLPs that the model lacks, and split groups."""
        lacking = (self.rows < 0)[:, None] | (self.columns < 0)
        if bool((scores[lacking] != 0).any()):
            raise ValueError(f"{path} scores edges of MLPs, and this model has none")
        real, rows, columns = ~lacking, self.rows.clamp_min(0), self.columns.clamp_min(0)
        cells = (rows[:, None] * len(self.graph.receivers) + columns)[real]
        size = self.graph.exists.numel()
        total, count, chosen = (
            torch.zeros(size, dtype=torch.float64).index_add_(0, cells, values[real].double())
            for values in (scores, torch.ones_like(scores), kept)
        )
        if bool(((chosen > 0) & (chosen < count)).any()):
            raise ValueError(
                f"{path} keeps some heads of a group that shares keys and values, and not the others"
            )
        shape = self.graph.exists.shape
        return MibScores(total.reshape(shape), (chosen > 0).reshape(shape) & self.graph.exists)


def _name(node: str) -> str:
    """Name that the file gives to a sender or receiver of the graph."""
    part = Part.of(node)
    if part.kind == "resid":
        return "input"
    if part.kind == "mlp":
        return f"m{part.layer}"
    if part.layer is None:
        return "logits"
    letter = {"query": "<q>", "key": "<k>", "value": "<v>"}.get(part.kind, "")
    return f"a{part.layer}.h{part.index}{letter}"


def _cfg(config: ModelConfig) -> dict[str, object]:
    """Numbers that the file's graph is made from."""
    return {
        "n_layers": config.n_layers, "n_heads": config.n_heads, "parallel_attn_mlp": config.parallel,
        "d_model": config.d_model,
    }  # fmt: skip


def _active_senders(layout: _Layout, kept: Tensor) -> list[bool]:
    """True for senders that are nodes of the circuit: the input, and both ends of its edges."""
    reads = {layout.receivers[i].partition("<")[0] for i in kept.any(0).nonzero()[:, 0].tolist()}
    sends = kept.any(1).tolist()
    return [name == "input" or sends[i] or name in reads for i, name in enumerate(layout.senders)]


def _as_json(layout: _Layout, config: ModelConfig, scores: Tensor, kept: Tensor) -> dict[str, object]:
    active = dict(zip(layout.senders, _active_senders(layout, kept), strict=True)) | {"logits": True}
    edges = {
        f"{layout.senders[s]}->{layout.receivers[r]}": {
            "score": float(scores[s, r]),
            "in_graph": bool(kept[s, r]),
        }
        for s, r in layout.file_graph.exists.nonzero().tolist()
    }
    return {"cfg": _cfg(config), "nodes": {n: {"in_graph": on} for n, on in active.items()}, "edges": edges}


def _as_tensors(layout: _Layout, config: ModelConfig, scores: Tensor, kept: Tensor) -> dict[str, object]:
    values = (
        _cfg(config), list(layout.senders), list(layout.receivers), scores.float(), kept.bool(),
        torch.tensor(_active_senders(layout, kept)),
    )  # fmt: skip
    return dict(zip(KEYS, values, strict=True))


def _check_shape(path: Path | str, record: object, keys: tuple[str, ...], config: ModelConfig) -> None:
    """ValueError unless the file holds these keys, and was made for a model of this shape."""
    if not isinstance(record, Mapping) or any(key not in record for key in keys):
        raise ValueError(
            f"{path} is not a file in the format of MIB: the keys {', '.join(keys)} are required"
        )
    file_config = record["cfg"]
    for name, own in _cfg(config).items():
        stored = file_config.get(name, own) if isinstance(file_config, Mapping) else None
        if stored != own:
            raise ValueError(f"{path} is of another model: its {name} is {stored!r}, this one's {own!r}")


def _scores_of_json(path: Path | str, record: object, layout: _Layout) -> tuple[Tensor, Tensor]:
    """Scores and circuit mask from the edges of a JSON file; an edge it leaves out has score 0 and is not kept."""
    rows, columns = (
        {name: i for i, name in enumerate(names)} for names in (layout.senders, layout.receivers)
    )
    scores = torch.zeros(layout.file_graph.exists.shape, dtype=torch.float64)
    kept = torch.zeros_like(layout.file_graph.exists)
    if not isinstance(record, Mapping):
        raise ValueError(f"{path} is not a file in the format of MIB: its edges must be named")
    for edge, entry in record.items():
        sender, _, receiver = str(edge).partition("->")
        place = rows.get(sender, -1), columns.get(receiver, -1)
        if min(place) < 0 or not bool(layout.file_graph.exists[place]):
            raise ValueError(f"{path} has the edge {str(edge)!r}, which this model lacks")
        score = entry.get("score") if isinstance(entry, Mapping) else None
        if (
            isinstance(score, bool)
            or not isinstance(score, int | float)
            or not abs(score) <= sys.float_info.max
        ):
            raise ValueError(f"{path}: a finite number is required as the score of {edge!r}, got {score!r}")
        scores[place], kept[place] = score, bool(entry.get("in_graph"))
    return scores, kept
