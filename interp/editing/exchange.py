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
"""The site that a kind of part writes, and the axis along which several parts share it."""


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
"""Numbers that are widened together where two models are compared: 32 MiB in float64."""


@dataclass(frozen=True, eq=False)
class PieceChange:
    """The difference between one model's piece and another's, on the host."""

    differs: bool
    """Whether any number differs."""
    squares: Float[Tensor, "2"]
    """Summed squares of the change, and of the first model's numbers, float64."""


@dataclass(frozen=True)
class Other:
    """The model that another is compared with, in that one's dtype: a network, and its edits."""

    network: Transformer
    edits: tuple[Edit, ...]

    @classmethod
    def of(cls, given: Model, model: Subject) -> Other:
        """The model to compare with.

        Raises:
            ValueError: as `check_alike`.
        """
        network = as_network(given)
        check_alike(model, network, text_of(given))
        mine = dict(model.transformer.named_parameters())
        cast = {
            name: nn.Parameter(value.to(mine[name].dtype), requires_grad=False)
            for name, value in network.named_parameters()
            if value.dtype != mine[name].dtype
        }
        return cls((network.with_parameters(cast) if cast else network).unedited, network.edits)

    def on_device_of(self, model: Transformer) -> Transformer:
        """This model on the device of the given one, under its own edits."""
        moved = self.network
        if moved.device != model.device:
            if model.device not in self._elsewhere:
                self._elsewhere[model.device] = copy.deepcopy(moved).to(model.device, non_blocking=True)
            moved = self._elsewhere[model.device]
        return moved.edited(self.edits) if self.edits else moved

    @cached_property
    def _elsewhere(self) -> dict[torch.device, Transformer]:
        """Copies on other devices, made once for all batches."""
        return {}


def check_alike(model: Subject, tuned: Transformer, text: Text) -> None:
    """ValueError, naming what differs, for a model of another config, other parameters or another vocabulary."""
    ours, theirs = model.transformer, tuned
    differing = [
        f.name for f in fields(ours.config) if getattr(ours.config, f.name) != getattr(theirs.config, f.name)
    ]
    if differing:
        what = "; ".join(
            f"{n}: {getattr(ours.config, n)} and {getattr(theirs.config, n)}" for n in differing[:3]
        )
        raise ValueError(f"two models of one config are required, these differ in {what}")
    mine, its = ({name for name, _ in network.named_parameters()} for network in (ours, theirs))
    if mine != its:
        raise ValueError(f"two models of the same parameters are required, only one has {min(mine ^ its)}")
    if not (model.text.has_tokenizer and text.has_tokenizer) or model.text.tokenizer is text.tokenizer:
        return
    for token in range(ours.config.d_vocab):
        one, other = (each.pieces([token])[0] for each in (model.text, text))
        if one != other:
            raise ValueError(
                f"two models of one tokenizer are required, token {token} is {one!r} and {other!r}"
            )


def pieces_of(network: Transformer, grain: ExchangeGrain) -> dict[Part, tuple[ParameterPiece, ...]]:
    """The pieces of parameters that every part owns, in the order of a pass; together all parameters, each once.

    Raises:
        ValueError: a wrapped network, whose parameters are those of other modules.
    """
    if not network.restarts:
        raise ValueError(
            "this is a wrapped network: which part each of its parameters belongs to is not known"
        )
    found: dict[Part, list[ParameterPiece]] = {}
    for name, _ in network.named_parameters():
        for part, piece in _owners(network, name, grain):
            found.setdefault(part, []).append(piece)
    return {part: tuple(found[part]) for part in sorted(found, key=_order)}


def named_part(given: PartName, parts: Sequence[Part]) -> Part:
    """The part of this name. KeyError for any other name."""
    wanted = str(Part.of(given))
    by_name = {str(part): part for part in parts}
    if wanted not in by_name:
        raise KeyError(f"no parameter belongs to a part {wanted!r} of this model; {nearest(wanted, by_name)}")
    return by_name[wanted]


def first_block(part: Part, config: ModelConfig) -> int:
    """The first block that a part's weights affect: 0 for embeddings, n_layers for parts after the blocks."""
    if part.layer is not None:
        return part.layer
    return config.n_layers if part.kind in LAST else 0


def written_at(part: Part, config: ModelConfig) -> tuple[str, dict[str, int]] | None:
    """The site that a part writes, and its place there; None where the model has no such site."""
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
    one: Transformer, other: Transformer, pieces: Iterable[ParameterPiece]
) -> dict[ParameterPiece, PieceChange]:
    """The differences of these pieces between two models, fetched from a device at once."""
    found: dict[tuple[ParameterPiece, bool], Tensor] = {}
    for piece in pieces:
        mine, its = (piece.of(net.get_parameter(piece.parameter)).detach() for net in (one, other))
        its = its.to(mine.device)
        found[piece, False] = (mine != its).any()
        found[piece, True] = _squares(mine, its)
    on_host = to_host(found)
    return {
        piece: PieceChange(bool(on_host[piece, False]), on_host[piece, True])
        for piece, squares in on_host
        if squares
    }


def _squares(mine: Tensor, its: Tensor) -> Float[Tensor, "2"]:
    """Summed squares of the change and of the first model's numbers, in float64, a tile of rows at a time."""
    rows = max(1, AT_ONCE * len(mine) // mine.numel()) if mine.ndim and mine.numel() else 1
    tiles = zip(torch.atleast_1d(mine).split(rows), torch.atleast_1d(its).split(rows), strict=True)
    total = torch.zeros(2, dtype=torch.float64, device=mine.device)
    for one, other in tiles:
        before = one.double()
        total += torch.stack(((other - before).square().sum(), before.square().sum()))
    return total


def moved(changed: Iterable[PieceChange]) -> float:
    """Length of the change of these pieces, by their length in the first model; 0 for no change."""
    squares = torch.zeros(2, dtype=torch.float64)
    for each in changed:
        squares += each.squares
    return float((squares[0] / squares[1]).sqrt()) if squares[0] else 0.0


def exchanged(into: Transformer, source: Transformer, pieces: Sequence[ParameterPiece]) -> Transformer:
    """A model with these pieces of another; everything else is shared with the first, bit for bit."""
    found: dict[str, Tensor] = {}
    for piece in pieces:
        own, other = (net.get_parameter(piece.parameter).detach() for net in (into, source))
        if piece.axis is None:
            found[piece.parameter] = other.to(own.device)
            continue
        value = found.setdefault(piece.parameter, own.clone())
        piece.of(value).copy_(piece.of(other))
    return into.with_parameters(found)


def _owners(network: Transformer, name: str, grain: ExchangeGrain) -> list[tuple[Part, ParameterPiece]]:
    """The parts that own a parameter, with the piece of each."""
    first, _, rest = name.partition(".")
    if first != "blocks":
        return [(Part(first), ParameterPiece(name))]
    number, child, inner = rest.split(".", 2)
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
    """The heads that own a parameter of attention; what belongs to no head belongs to the rest."""
    (heads, groups, _), width = attn.heads, attn.d_head
    kinds = ("head", "head", "head") if heads == groups else ("head", "group_key", "group_value")
    if inner in ("qkv.weight", "qkv.bias"):
        owners = [Part(kind, layer, i) for kind, n in zip(kinds, attn.heads, strict=True) for i in range(n)]
        return [
            (part, ParameterPiece(name, 0, (n * width, (n + 1) * width))) for n, part in enumerate(owners)
        ]
    if inner == "out.weight":
        each = [ParameterPiece(name, 1, (i * width, (i + 1) * width)) for i in range(heads)]
    elif inner == "sinks":
        each = [ParameterPiece(name, 0, (i, i + 1)) for i in range(heads)]
    else:
        return [(Part("attn_rest", layer), ParameterPiece(name))]
    return [(Part("head", layer, i), piece) for i, piece in enumerate(each)]


_WITHIN = (
    "ln0", "mlp_before", "ln1", *WITHIN_ATTENTION, "attn", "ln1_post", "ln_cross",
    "cross_attn", "ln2", "mlp", "ln2_post",
)  # fmt: skip
_BEFORE = ("embed", "pos_embed", "type_embed", "ln_embed", "score_bias")


def _order(part: Part) -> tuple[int, int, int, int]:
    """The place of a part in a pass."""
    if part.layer is not None:
        return 1, part.layer, _WITHIN.index(part.kind), part.index or 0
    stage, kinds = (2, LAST) if part.kind in LAST else (0, _BEFORE)
    return stage, 0, kinds.index(part.kind), 0
