"""The parameters that each part of a model owns, and models with some parts' parameters from another model.

Every parameter belongs to exactly one part: a sublayer (attention, an MLP), a norm, an embedding, the unembedding.
Where queries, keys and values are rows of one matrix, attention is cut into heads too: what all share is its rest.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from interp.core.transfers import to_host
from interp.core.wording import nearest
from interp.data.text import Text
from interp.model import sites
from interp.model.attention import Attention
from interp.model.config import ModelConfig
from interp.model.edits import Edit
from interp.model.parts import Part, PartName
from interp.model.sites import WORDS
from interp.model.transformer import Transformer
from interp.passes.observe import Model, Subject, as_network, text_of

ExchangeGrain = Literal["sublayer", "head"]
"""How finely attention is cut into parts."""
WITHIN_ATTENTION = ("head", "group_key", "group_value", "attn_rest")
"""The parts that attention is cut into."""
LAST = ("ln_final", "mlm_head", "unembed", "output")
"""The parts after the last block."""
WRITES: Mapping[str, tuple[str, str | None]] = {
    "head": ("attn.hook_z", "h"),
    "group_key": ("attn.hook_k", "g"),
    "group_value": ("attn.hook_v", "g"),
    "attn": ("hook_attn_out", None),
    "cross_attn": ("hook_cross_attn_out", None),
    "mlp": ("hook_mlp_out", None),
    "mlp_before": ("hook_mlp_before_out", None),
    "embed": ("hook_embed", None),
    "pos_embed": ("hook_pos_embed", None),
    "type_embed": ("hook_type_embed", None),
}
"""The site that a kind of part writes, and the axis of that site along which the parts of a layer lie."""


@dataclass(frozen=True)
class ParameterPiece:
    """A parameter, or some rows or columns of it."""

    parameter: str
    axis: int | None = None
    span: tuple[int, int] = (0, 0)

    def of(self, value: Tensor) -> Tensor:
        """This piece of the parameter's value, as a view."""
        return (
            value if self.axis is None else value.narrow(self.axis, self.span[0], self.span[1] - self.span[0])
        )


AT_ONCE = 2**22
"""Numbers that are compared at once, widened to float64 (32 MiB)."""


@dataclass(frozen=True, eq=False)
class PieceChange:
    """How a piece of a parameter differs between two models, on the CPU."""

    differs: bool
    """Whether any number differs."""
    squares: Float[Tensor, "2"]
    """Summed squares of the change, and of the first model's numbers, float64."""


@dataclass(frozen=True)
class Other:
    """The second of two compared models, in the dtype of the first: its network without edits, and its edits."""

    network: Transformer
    edits: tuple[Edit, ...]

    @classmethod
    def of(cls, tuned: Model, model: Subject) -> Other:
        """The tuned model, cast to the dtypes of `model`.

        Raises:
            ValueError: as `check_alike`.
        """
        network = as_network(tuned)
        check_alike(model, network, text_of(tuned))
        own_parameters = dict(model.transformer.named_parameters())
        cast = {
            name: nn.Parameter(value.to(own_parameters[name].dtype), requires_grad=False)
            for name, value in network.named_parameters()
            if value.dtype != own_parameters[name].dtype
        }
        return cls((network.with_parameters(cast) if cast else network).unedited, network.edits)

    def on_device_of(self, model: Transformer) -> Transformer:
        """This network on the device of `model`, with its own edits."""
        moved = self.network
        if moved.device != model.device:
            if model.device not in self._copies:
                self._copies[model.device] = copy.deepcopy(moved).to(model.device, non_blocking=True)
            moved = self._copies[model.device]
        return moved.edited(self.edits) if self.edits else moved

    @cached_property
    def _copies(self) -> dict[torch.device, Transformer]:
        """Copies of the network by device, each made once for all batches."""
        return {}


def check_alike(model: Subject, tuned: Transformer, text: Text) -> None:
    """ValueError, naming what differs, for a model of another config, other parameters or another vocabulary."""
    ours, theirs = model.transformer, tuned
    differing = [
        f.name for f in fields(ours.config) if getattr(ours.config, f.name) != getattr(theirs.config, f.name)
    ]
    if differing:
        differences = "; ".join(
            f"{n}: {getattr(ours.config, n)} and {getattr(theirs.config, n)}" for n in differing[:3]
        )
        raise ValueError(f"two models of one config are required, these differ in {differences}")
    our_names, their_names = ({name for name, _ in network.named_parameters()} for network in (ours, theirs))
    if our_names != their_names:
        raise ValueError(
            f"two models of the same parameters are required, only one has {min(our_names ^ their_names)}"
        )
    if not (model.text.has_tokenizer and text.has_tokenizer) or model.text.tokenizer is text.tokenizer:
        return
    for token in range(ours.config.d_vocab):
        our_piece, their_piece = (vocabulary.pieces([token])[0] for vocabulary in (model.text, text))
        if our_piece != their_piece:
            raise ValueError(
                f"two models of one tokenizer are required, token {token} is {our_piece!r} and {their_piece!r}"
            )


def pieces_of(network: Transformer, grain: ExchangeGrain) -> dict[Part, tuple[ParameterPiece, ...]]:
    """The pieces of parameters that every part owns, in the order of a pass; together all parameters, each once.

    Raises:
        ValueError: a wrapped network, whose parameters are those of other modules.
    """
    if not network.with_dictionaries([]).restarts:
        raise ValueError(
            "this is a wrapped network: which part each of its parameters belongs to is not known"
        )
    pieces: dict[Part, list[ParameterPiece]] = {}
    for name, _ in network.named_parameters():
        for part, piece in _owners(network, name, grain):
            pieces.setdefault(part, []).append(piece)
    return {part: tuple(pieces[part]) for part in sorted(pieces, key=_sort_key)}


def named_part(name: PartName, parts: Sequence[Part]) -> Part:
    """The part of this name. KeyError for any other name."""
    spelled = str(Part.of(name))
    by_name = {str(part): part for part in parts}
    if spelled not in by_name:
        raise KeyError(
            f"no parameter belongs to a part {spelled!r} of this model; {nearest(spelled, by_name)}"
        )
    return by_name[spelled]


def first_block(part: Part, config: ModelConfig) -> int:
    """The first block that a part's weights affect: 0 for embeddings, n_layers for parts after the blocks."""
    if part.layer is not None:
        return part.layer
    return config.n_layers if part.kind in LAST else 0


def written_at(part: Part, config: ModelConfig) -> tuple[str, dict[str, int]] | None:
    """The site that a part writes, and its index there (`{"head": 3}`); None where the model has no such site."""
    if part.kind not in WRITES:
        return None
    inner, axis = WRITES[part.kind]
    name = inner if part.layer is None else f"blocks.{part.layer}.{inner}"
    try:
        sites.find(name, config)
    except KeyError:
        return None
    return name, {} if axis is None or part.index is None else {WORDS[axis]: part.index}


def changes(
    first: Transformer, second: Transformer, pieces: Iterable[ParameterPiece]
) -> dict[ParameterPiece, PieceChange]:
    """The change of each piece from the first model to the second, fetched to the CPU in one transfer."""
    on_device: dict[tuple[ParameterPiece, bool], Tensor] = {}
    for piece in pieces:
        first_value, second_value = (
            piece.of(net.get_parameter(piece.parameter)).detach() for net in (first, second)
        )
        second_value = second_value.to(first_value.device)
        on_device[piece, False] = (first_value != second_value).any()
        on_device[piece, True] = _squares(first_value, second_value)
    on_host = to_host(on_device)
    return {
        piece: PieceChange(bool(on_host[piece, False]), on_host[piece, True])
        for piece, squares in on_host
        if squares
    }


def _squares(first_value: Tensor, second_value: Tensor) -> Float[Tensor, "2"]:
    """Summed squares of the change and of the first value, in float64, over tiles of rows to save memory."""
    rows = (
        max(1, AT_ONCE * len(first_value) // first_value.numel())
        if first_value.ndim and first_value.numel()
        else 1
    )
    tiles = zip(
        torch.atleast_1d(first_value).split(rows), torch.atleast_1d(second_value).split(rows), strict=True
    )
    total = torch.zeros(2, dtype=torch.float64, device=first_value.device)
    for first_rows, second_rows in tiles:
        before = first_rows.double()
        total += torch.stack(((second_rows - before).square().sum(), before.square().sum()))
    return total


def moved(changed: Iterable[PieceChange]) -> float:
    """Norm of the change of all these pieces, divided by their norm in the first model; 0 for no change."""
    squares = torch.zeros(2, dtype=torch.float64)
    for change in changed:
        squares += change.squares
    return float((squares[0] / squares[1]).sqrt()) if squares[0] else 0.0


def exchanged(into: Transformer, source: Transformer, pieces: Sequence[ParameterPiece]) -> Transformer:
    """The model `into` with these pieces taken from `source`; all other parameters are shared with `into`."""
    parameters: dict[str, Tensor] = {}
    for piece in pieces:
        own_value, other_value = (net.get_parameter(piece.parameter).detach() for net in (into, source))
        if piece.axis is None:
            parameters[piece.parameter] = other_value.to(own_value.device)
            continue
        value = parameters.setdefault(piece.parameter, own_value.clone())
        piece.of(value).copy_(piece.of(other_value))
    return into.with_parameters(parameters)


def _owners(network: Transformer, name: str, grain: ExchangeGrain) -> list[tuple[Part, ParameterPiece]]:
    """The parts that own a parameter, with the piece of each."""
    first, _, path = name.partition(".")
    if first != "blocks":
        return [(Part(first), ParameterPiece(name))]
    number, child, inner = path.split(".", 2)
    layer = int(number)
    attn = network.block(layer).attn
    if child != "attn" or grain == "sublayer" or not _has_heads(attn):
        return [(Part(child, layer), ParameterPiece(name))]
    return _by_head(attn, layer, name, inner)


def _has_heads(attn: Attention) -> bool:
    """Whether queries, keys and values are rows of one matrix, head after head."""
    usual = type(attn).part is Attention.part and type(attn)._cut is Attention._cut
    qkv = getattr(attn, "qkv", None)
    return usual and qkv is not None and qkv.weight.shape[0] == sum(attn.heads) * attn.d_head


def _by_head(attn: Attention, layer: int, name: str, inner: str) -> list[tuple[Part, ParameterPiece]]:
    """The heads (or groups) that own a parameter of attention, with the piece of each; else the part `attn_rest`."""
    (heads, groups, _), width = attn.heads, attn.d_head
    kinds = ("head", "head", "head") if heads == groups else ("head", "group_key", "group_value")
    if inner in ("qkv.weight", "qkv.bias"):
        owners = [Part(kind, layer, i) for kind, n in zip(kinds, attn.heads, strict=True) for i in range(n)]
        return [
            (part, ParameterPiece(name, 0, (n * width, (n + 1) * width))) for n, part in enumerate(owners)
        ]
    if inner == "out.weight":
        pieces = [ParameterPiece(name, 1, (i * width, (i + 1) * width)) for i in range(heads)]
    elif inner == "sinks":
        pieces = [ParameterPiece(name, 0, (i, i + 1)) for i in range(heads)]
    else:
        return [(Part("attn_rest", layer), ParameterPiece(name))]
    return [(Part("head", layer, i), piece) for i, piece in enumerate(pieces)]


_WITHIN = (
    "ln0", "mlp_before", "ln1", *WITHIN_ATTENTION, "attn", "ln1_post", "ln_cross",
    "cross_attn", "ln2", "mlp", "ln2_post",
)  # fmt: skip
_BEFORE = ("embed", "pos_embed", "type_embed", "ln_embed", "score_bias")


def _sort_key(part: Part) -> tuple[int, int, int, int]:
    """Sort key of a part: its place in the forward pass."""
    if part.layer is not None:
        return 1, part.layer, _WITHIN.index(part.kind), part.index or 0
    stage, kinds = (2, LAST) if part.kind in LAST else (0, _BEFORE)
    return stage, 0, kinds.index(part.kind), 0
