"""The OV and QK circuits of heads (what a head moves, and where it attends), as factored matrices.

Row convention, as in `x @ M`: a head writes `x_source @ OV`, and scores `x_query @ QK @ x_key`. Elhage et al. 2021, "A
Mathematical Framework for Transformer Circuits". Circuits are those of the model's weights, without its edits of
activations.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from interp.core.boundary import public
from interp.core.factored import FactoredMatrix
from interp.core.stats import upcast
from interp.core.transfers import to_device
from interp.model.attention import Attention, CrossAttention
from interp.model.config import MLPS, Learned, ModelConfig, Rotary, Sinusoidal
from interp.model.edits import Edit, Zero
from interp.model.norm import HeadNorm
from interp.model.parts import Part, PartName, as_part
from interp.model.position import Rotation, depends_on_length, sinusoids
from interp.model.sites import embedding_parts
from interp.model.tap import Tap
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.frozen import final_norm, input_norm, output_norm
from interp.passes.observe import Model, as_network
from interp.runs.provenance import tensors_hash

Embedding = Literal["token", "effective"]
Term = Literal["token", "position"]
Offset = int | Sequence[int] | None
CHUNK = 4096
"""Vocabulary entries whose embedding is computed at once."""
WIDENED = 8192
"""Vocabulary entries that are converted to float32 at once."""
_CIRCUITS = ("head", "cross_head", "attn", "cross_attn")
"""The kinds of part that have circuits: heads, and all heads of a layer."""


class _CachedTable(NamedTuple):
    """A cached effective embedding, a hash of the weights that it was computed from, and its tensor version."""

    content: str
    table: Float[Tensor, "v d"]
    version: int


_TABLES: MutableMapping[Tensor, _CachedTable] = WeakTensorKeyDictionary()
"""Effective embeddings of models in memory, by their embedding parameter (a weak key)."""


@public()
@dataclass(frozen=True, eq=False)
class HeadCircuits:
    """The QK and OV circuits of one model's heads, under one set of conventions.

    Row convention: a head writes `x_source @ OV` and scores `x_query @ QK @ x_key`. Circuits are factored: nothing of
    size d x d or V x V is formed. Weights are read as they are, without edits of activations.

    Args:
        model: a `HookedTransformer` or a `Transformer`. Heads are named `L1H2`, those of cross-attention `L1X2`.
        folded: whether norms are part of the circuit, at scale 1: gamma and LayerNorm's centring of what a head reads,
            the norm of what it adds, query and key norms, the final norm, and the family's constant factors on the
            stream and the logits.
        biases: whether what is read gets a constant 1 appended, and the circuit a last row (QK: row and column) for it:
            b_V, b_Q, b_K, and, with `folded`, beta. b_O belongs to no head.
        scaled: whether QK carries the factor between q . k and the attention score.
        embedding: what a vocabulary entry puts on the stream: "token", its embedding (normed where the family norms
            embeddings), or "effective", that plus what the MLP (the MLPs) of block 0 make of it while attention is
            silent.

    Raises:
        ValueError: another embedding, or what is no model.

    Source:
        Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".

    Example:
        >>> circuits = HeadCircuits(model, folded=True)
        >>> circuits.ov("L1H0").eigenvalues().shape
        torch.Size([6])
    """

    model: Model
    folded: bool = False
    biases: bool = False
    scaled: bool = False
    embedding: Embedding = "token"

    def __post_init__(self) -> None:
        if self.embedding not in ("token", "effective"):
            raise ValueError(f"embedding must be token or effective, got {self.embedding!r}")
        as_network(self.model)  # refuses what is no model

    @cached_property
    def network(self) -> Transformer:
        """The model's network, without any edits of activations."""
        return as_network(self.model).unedited

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self.network.config

    @public()
    def ov(self, heads: PartName | None = None) -> FactoredMatrix:
        """OV circuits W_V W_O, source on the rows.

        Args:
            heads: a head (`"L1H2"`) or the heads of a layer (`"L1.attn"`), of cross-attention `"L1X2"` and
                `"L1.cross_attn"`; None: all of self-attention.

        Returns:
            FactoredMatrix `[d d]` of a head, `[h d d]` of a layer's heads, `[l h d d]` of all.

        Raises:
            IndexError: a layer or head that does not exist.
            KeyError: cross-attention that the model lacks.
            ValueError: a part that is neither a head nor attention.
            AttributeError: a layer whose mixer has no such circuit.
        """
        chosen = self._circuit_part(heads)
        return self._circuits_of(chosen, lambda layer: self._ov(layer, cross=_is_cross(chosen)))

    @public()
    def qk(self, heads: PartName | None = None, *, offset: Offset = None) -> FactoredMatrix:
        """QK circuits W_Q W_K^T, query on the rows, key on the columns.

        It is the content's part of the attention score: ALiBi, relative buckets and soft caps come on top.

        Args:
            heads: a head, the heads of a layer, or None for all, as in `ov`.
            offset: under rotary positions, how many tokens before the query the key stands (None: 0): W_Q R(offset)
                W_K^T. Several offsets are one more axis in front.

        Returns:
            FactoredMatrix `[d d]`, `[h d d]` or `[l h d d]`, as in `ov`.

        Raises:
            IndexError, KeyError, AttributeError: as in `ov`.
            ValueError: as in `ov`; an offset under other positions or outside the context.
        """
        chosen = self._circuit_part(heads)
        cross = _is_cross(chosen)
        offsets = self.checked_offsets(offset, cross=cross)
        return self._circuits_of(chosen, lambda layer: self._qk(layer, offsets, cross=cross))

    @public()
    def full_ov(self, head: PartName) -> FactoredMatrix:
        """The full OV circuit W_E OV W_U: how a source token, once attended to, moves each logit.

        The final norm is put on W_O's side, so that no second array of W_U's size is made.

        Args:
            head: by name, such as `"L1H2"`.

        Returns:
            FactoredMatrix `[source token, output token]`, in float32 at least.

        Raises:
            ValueError: as `ov` and `unembedding`.
        """
        ov = self.ov(head).wide()
        return FactoredMatrix(
            upcast(self.embedded) @ ov.A, self.before_unembedding(ov.B) @ upcast(self.bare_unembedding)
        )

    @public()
    def full_qk(
        self, head: PartName, *, offset: Offset = None, query: Term = "token", key: Term = "token"
    ) -> FactoredMatrix:
        """The full QK circuit W_E QK W_E^T between vocabulary entries, or position embeddings.

        For learned positions (and sinusoids) the four choices of `query` and `key` are the terms of the score; with
        `biases` the constant goes with the tokens, so that the four sum to the whole.

        Args:
            head: by name, such as `"L1H2"`.
            offset: under rotary positions, how many tokens before the query the key stands, as in `qk`.
            query, key: what stands on the side: "token", each vocabulary entry, or "position", each position embedding.

        Returns:
            FactoredMatrix `[query token, key token]`, in float32 at least.

        Raises:
            ValueError: as `qk`; another side, or positions that are not added to the stream.
        """
        sides = {"token": lambda: self.embedded, "position": lambda: self.positions}
        if bad := [term for term in (query, key) if term not in sides]:
            raise ValueError(f"query and key must be token or position, got {bad[0]!r}")
        circuit = self.qk(head, offset=offset).wide()
        return FactoredMatrix(upcast(sides[query]()) @ circuit.A, circuit.B @ upcast(sides[key]()).mT)

    def direct(self) -> FactoredMatrix:
        """The direct path W_E W_U `[token, output token]` past every layer: a bigram table (zero-layer transformer)."""
        rows, unembedding = self.embedded[:, : self.config.d_model], self.unembedding
        return FactoredMatrix(rows.to(unembedding.dtype), unembedding)

    @cached_property
    def embedded(self) -> Float[Tensor, "v d"]:
        """Contribution of each vocabulary entry to the stream, without position; with `biases` plus a last column of 1.

        The effective embedding is kept on the host as long as the model's embedding lives and nothing it follows from
        has changed, by a hash of the contents (0.1 s where the table takes 7, on GPT-2's shape).
        """
        if self._is_bare():
            return self._with_constant(self.network.embed.weight, 1.0)
        return self._with_constant(self._cached_table(), 1.0)

    def _cached_table(self) -> Float[Tensor, "v d"]:
        """The table of `embedded`, from the cache if it has it; on a GPU always computed, since hashing is slower."""
        network, weight = self.network, self.network.embed.weight
        if self.embedding == "token" or self.config.block.proven or network.device.type != "cpu":
            return self._table()
        follows = {
            name: tensor
            for name, tensor in network.state_dict().items()
            if name.startswith("blocks.0.") or not name.startswith(("blocks.", "unembed.", "ln_final."))
        }
        content = f"{self.config} {tensors_hash(follows)}"
        known = _TABLES.get(weight)
        if known is None or (known.content, known.table._version) != (content, known.version):
            table = self._table()
            if table.requires_grad:
                return table
            known = _CachedTable(content, table, table._version)
            _TABLES[weight] = known
        return known.table

    def _table(self) -> Float[Tensor, "v d"]:
        """The contribution of each vocabulary entry to the stream, computed `CHUNK` entries at a time."""
        ids = torch.arange(self.config.d_vocab, device=self.network.device)
        table = torch.empty(len(ids), self.config.d_model, dtype=self.network.dtype, device=ids.device)
        for start in range(0, len(ids), CHUNK):  # in place: the table never exists twice
            chunk = slice(start, start + CHUNK)
            table[chunk] = self._token_streams(ids[chunk])
        return table

    def embedded_tokens(self, ids: Int[Tensor, "n"]) -> Float[Tensor, "n d"]:
        """The rows of `embedded` of these vocabulary entries, without the work for all others."""
        ids = to_device(ids, self.network.device)
        return self._with_constant(
            self.network.embed.weight[ids] if self._is_bare() else self._token_streams(ids), 1.0
        )

    @cached_property
    def positions(self) -> Float[Tensor, "p d"]:
        """Contribution of each position to the stream; with `biases` plus a column of 0. ValueError if none is."""
        kind, config = self.config.position, self.config
        if isinstance(kind, Learned):
            vectors = Weights(self.network).W_pos
        elif isinstance(kind, Sinusoidal):
            all_positions = torch.arange(config.n_ctx, device=self.network.device)[None]
            vectors = sinusoids(kind, all_positions, config.d_model, self.network.dtype)[0]
        else:
            raise ValueError(
                f"position terms require positions that are added to the stream, not {_position_kind(kind)}"
            )
        return self._with_constant(vectors, 0.0)

    @cached_property
    def unembedding(self) -> Float[Tensor, "d v"]:
        """W_U; with `folded` after the final norm at scale 1 and times the factor on the logits.

        Raises:
            AttributeError: a model without an unembedding.
            ValueError: a model with a masked-LM head, which is not linear.
        """
        W_U = self.bare_unembedding
        if not self.folded:
            return W_U
        return final_norm(self.network).reading(W_U) * self.config.logit_scale

    @property
    def bare_unembedding(self) -> Float[Tensor, "d v"]:
        """W_U itself, not copied, whatever the conventions; errors as `unembedding`."""
        if self.network.mlm_head is not None:
            raise ValueError(
                "this model computes its logits by a non-linear masked-LM head: no circuit ends in it"
            )
        return Weights(self.network).W_U

    def before_unembedding(self, written: Float[Tensor, "*h d"]) -> Float[Tensor, "*h d"]:
        """Writes to the final stream as W_U reads them: with `folded` after the final norm at scale 1."""
        if not self.folded:
            return written
        return final_norm(self.network).through(written) * self.config.logit_scale

    def around(self, written: Float[Tensor, "*h d"]) -> Float[Tensor, "*h d"]:
        """What heads write, times W_U and then W_E: written @ (W_U W_E), which makes an OV circuit a square matrix.

        The product W_U W_E over the vocabulary is computed once.
        """
        return self.before_unembedding(upcast(written)) @ self._around

    @cached_property
    def _around(self) -> Float[Tensor, "d d"]:
        return over_vocabulary(self.bare_unembedding, self.embedded)

    # one layer, all heads

    def _ov(self, layer: int, *, cross: bool) -> FactoredMatrix:
        out = self.writing(layer, cross=cross)  # raises for a mixer without an OV circuit
        value = self.reading(layer, "v", cross=cross)
        return FactoredMatrix(upcast(value) if self.folded else value, out)

    def _qk(self, layer: int, offsets: Tensor | None, *, cross: bool) -> FactoredMatrix:
        """QK circuits of a layer's heads, `[*offset h d d]`; queries are rotated by offsets above 0, keys by others."""
        if not cross:
            Weights(self.network).require("bilinear", "QK circuit", [layer])
        query, key = (upcast(self.reading(layer, part, cross=cross)) for part in "qk")
        rotary, back = self.rotary(layer, cross=cross), torch.tensor(0) if offsets is None else offsets
        if rotary is None:  # the same circuit at every offset
            query, key = (matrix.expand(*back.shape, *matrix.shape) for matrix in (query, key))
        else:
            query = _rotated(query, rotary, back.clamp_min(0))
            key = _rotated(key, rotary, (-back).clamp_min(0))
        if self.scaled:
            query = query * self._mixer(layer, cross=cross).scale
        return FactoredMatrix(query, key.mT)

    @public()
    def writing(self, layer: int, *, cross: bool = False) -> Float[Tensor, "h e d"]:
        """The map from the z of each head to what it adds to the stream.

        Args:
            layer: the layer of the heads.
            cross: whether they are those of cross-attention.

        Returns:
            [h e d]; with `folded` after the norm of what attention adds.

        Raises:
            IndexError: a layer that does not exist.
            AttributeError: a layer whose mixer has no OV circuit.
        """
        weights = Weights(self.network)
        of_layer = weights.layer(layer, cross=cross)
        if not cross:
            weights.require("moves", "OV circuit", [layer])
        out = of_layer.W_O
        return output_norm(self.network, layer, _sublayer(cross)).through(upcast(out)) if self.folded else out

    def reading(self, layer: int, part: str, *, cross: bool = False) -> Float[Tensor, "h d e"]:
        """The map from the stream to the queries, keys or values of each query head.

        Args:
            layer: the layer of the heads.
            part: "q", "k" or "v".
            cross: whether they are those of cross-attention.

        Returns:
            [h d e]; with `folded` after the norm before attention, and with `biases` one more row.
        """
        weights, mixer = Weights(self.network).layer(layer, cross=cross), self._mixer(layer, cross=cross)
        matrix, bias = getattr(weights, f"W_{part.upper()}"), getattr(weights, f"b_{part.upper()}")
        if self.folded and (
            part == "q" or not cross
        ):  # no norm stands before the keys and values of the memory
            norm = input_norm(self.network, layer, _sublayer(cross))
            matrix, bias = upcast(matrix), upcast(bias)
            if norm.beta is not None:
                bias = bias + norm.beta.to(matrix) @ matrix
            matrix = norm.reading(matrix)
        if self.biases:
            matrix = torch.cat((matrix, bias[:, None]), 1)
        head_norm = {"q": mixer.q_norm, "k": mixer.k_norm}.get(part)
        if self.folded and head_norm is not None:
            matrix = _through_head_norm(head_norm, upcast(matrix))
        return matrix if part == "q" else matrix[Weights(self.network).kv_head()]

    def _mixer(self, layer: int, *, cross: bool) -> Attention | CrossAttention:
        block = self.network.block(layer)
        mixer = block.cross_attn if cross else block.attn
        assert mixer is not None  # `Weights` has raised for a layer without it
        return mixer

    def rotary(self, layer: int, *, cross: bool = False) -> Rotary | None:
        """The rotation of a layer's queries and keys; None where they are not rotated."""
        config = self.config
        kind = (config.local_position or config.position) if config.is_local(layer) else config.position
        turned = self.config.mixers[layer].traits.rotated and not cross
        return kind if isinstance(kind, Rotary) and turned else None

    def _circuit_part(self, heads: PartName | None) -> Part | None:
        """The head or sublayer of this name, which must have circuits; None for all of self-attention."""
        part = None if heads is None else as_part(heads, self.config)
        if part is not None and part.kind not in _CIRCUITS:
            raise ValueError(
                f"a head is required, such as L1H2, or all heads of a layer, L1.attn, got {part}"
            )
        return part

    def _circuits_of(self, chosen: Part | None, make: Callable[[int], FactoredMatrix]) -> FactoredMatrix:
        """The circuits `make(layer)` of all layers, `[*offset layer head d d]`, or a copy of those of `chosen`."""
        if chosen is None:
            by_layer = [make(layer) for layer in range(self.config.n_layers)]
            a, b = (torch.stack(side, -4) for side in ([m.A for m in by_layer], [m.B for m in by_layer]))
            return FactoredMatrix(a, b)
        assert chosen.layer is not None
        circuits, head = make(chosen.layer), slice(None) if chosen.index is None else chosen.index
        return FactoredMatrix(circuits.A[..., head, :, :].clone(), circuits.B[..., head, :, :].clone())

    def checked_offsets(self, offset: Offset, *, cross: bool = False) -> Int[Tensor, "..."] | None:
        """The offsets of a QK circuit as a tensor.

        Raises:
            ValueError: as `qk`.
        """
        if offset is None:
            return None
        config = self.config
        if cross or not isinstance(config.position, Rotary):
            what = "cross-attention" if cross else _position_kind(config.position)
            raise ValueError(f"an offset requires rotary positions: under {what} QK does not depend on it")
        offsets = torch.tensor(offset if isinstance(offset, int) else list(offset), dtype=torch.int64)
        original = depends_on_length(config.position)
        most = config.n_ctx if original is None else original
        least = 0 if config.causal else 1 - most
        if offsets.numel() == 0 or int(offsets.min()) < least or int(offsets.max()) >= most:
            raise ValueError(f"offsets (query minus key) of {least} to {most - 1} are required, got {offset}")
        return offsets

    def _token_streams(self, ids: Int[Tensor, "n"]) -> Float[Tensor, "n d"]:
        """The stream of each token without positions: after its embedding, or after block 0 with attention set to 0."""
        parts = [site for site in embedding_parts(self.config) if site != "hook_embed"]
        if self.embedding == "effective" and self.config.block.proven:  # its MLP cannot be run by itself
            others = [f"blocks.0.hook_{name}" for name in self.config.sublayers if name not in MLPS]
            silent = [Edit(site, Zero()) for site in (*parts, *others)]
            return self.network(ids[:, None], Tap(edits=silent), stop=1)[:, 0]
        alone = self.network(ids[:, None], Tap(edits=[Edit(site, Zero()) for site in parts]), stop=0)
        if self.embedding == "effective":
            alone = (
                self.network.block(0)
                .without_attention(alone.to(self._device_of_layer(0)))
                .to(self.network.device)
            )
        return alone[:, 0]

    def _is_bare(self) -> bool:
        """Whether the contribution of a vocabulary entry to the stream is its row of W_E itself."""
        config = self.config
        untouched = self.embedding == "token" or (config.mlp is None and not config.norms_sum)
        return untouched and not config.embed_norm and config.embed_scale == 1

    def _device_of_layer(self, layer: int) -> torch.device:
        return self.network.device if self.network.devices is None else self.network.devices[layer]

    def _with_constant(self, rows: Float[Tensor, "n d"], constant: float) -> Float[Tensor, "n _"]:
        return torch.cat((rows, rows.new_full((len(rows), 1), constant)), 1) if self.biases else rows


def over_vocabulary(left: Float[Tensor, "c v"], right: Float[Tensor, "v d"]) -> Float[Tensor, "c d"]:
    """The product left @ right over the vocabulary, in float32 at least, `WIDENED` entries at a time."""
    total = upcast(left.new_zeros(len(left), right.shape[1]))
    for columns, rows in zip(left.split(WIDENED, 1), right.split(WIDENED), strict=True):
        total = torch.addmm(total, upcast(columns), upcast(rows))
    return total


def as_circuits(circuits: Model | HeadCircuits) -> HeadCircuits:
    """The given circuits, or a model's circuits with norms folded in, QK scaled and the effective embedding.

    Raises:
        ValueError: neither a model nor circuits.
    """
    if isinstance(circuits, HeadCircuits):
        return circuits
    return HeadCircuits(circuits, folded=True, scaled=True, embedding="effective")


def head_names(config: ModelConfig) -> list[str]:
    """The names of all heads of self-attention, layer by layer."""
    layers, heads = range(config.n_layers), range(config.n_heads)
    return [str(Part("head", layer, head)) for layer in layers for head in heads]


def by_layer(config: ModelConfig) -> tuple[tuple[str, str], list[list[str]]]:
    """The coordinate `part` of a result by layer and head."""
    names, width = head_names(config), config.n_heads
    return ("layer", "head"), [names[i : i + width] for i in range(0, len(names), width)]


def _sublayer(cross: bool) -> str:
    return "cross_attn_out" if cross else "attn_out"


def _is_cross(chosen: Part | None) -> bool:
    return chosen is not None and chosen.kind.startswith("cross")


def _rotated(
    matrix: Float[Tensor, "h d e"], rotary: Rotary, positions: Int[Tensor, "*n"]
) -> Float[Tensor, "*n h d e"]:
    """Maps from the stream to queries or keys, followed by the rotary rotation of each position."""
    h, d, e = matrix.shape
    turn = Rotation.at(rotary, e, positions.reshape(1, -1).to(matrix.device), matrix.dtype)
    flat = rearrange(matrix, "h d e -> 1 1 (h d) e").expand(-1, positions.numel(), -1, -1)
    return turn.apply(flat).reshape(*positions.shape, h, d, e)


def _through_head_norm(norm: HeadNorm, matrix: Float[Tensor, "h d e"]) -> Float[Tensor, "h d e"]:
    """A map from the stream to queries or keys, followed by the linear part of their norm at scale 1."""
    scale, heads = matrix.new_ones(1), matrix.shape[0]
    if not norm.whole:
        by_head = rearrange(matrix, "h d e -> d h e")
        return rearrange(norm.norm.frozen(by_head, scale), "d h e -> h d e")
    flat = norm.norm.frozen(rearrange(matrix, "h d e -> d (h e)"), scale)
    return rearrange(flat, "d (h e) -> h d e", h=heads)


def _position_kind(position: object) -> str:
    return type(position).__name__
