"""The circuits of heads: what a head moves (OV) and where it looks (QK), as factored bilinear forms.

Row convention, as in `x @ M`: a head writes `x_source @ OV`, and scores `x_query @ QK @ x_key`. Elhage et al. 2021, "A
Mathematical Framework for Transformer Circuits".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.factored import FactoredMatrix
from interp.core.precision import wide
from interp.model.attention import Attention, CrossAttention
from interp.model.norm import HeadNorm, Normalize
from interp.model.position import Rotation, depends_on_length, sinusoids
from interp.model.sites import embedding_parts
from interp.model.tap import Edit, Tap
from interp.model.transformer import Transformer
from interp.model.variants import Learned, Rotary, Sinusoidal
from interp.model.weights import Weights

Embedding = Literal["token", "effective"]
Term = Literal["token", "position"]
Offset = int | Sequence[int] | None
CHUNK = 4096
"""Vocabulary entries embedded at once."""


@dataclass(frozen=True, eq=False)
class Circuits:
    """The circuits of one model's heads, under one set of conventions.

    folded: norms are part of the circuit at scale 1: gamma and LayerNorm's centring of what a head reads, the norm of
    what it adds, query and key norms, the final norm, and the family's constant factors on the stream and the logits.
    biases: what is read gets a constant 1 appended, and the circuit a last row (QK: row and column) for it: b_V, b_Q,
    b_K, and, with `folded`, beta. b_O belongs to no head.
    scaled: QK carries the factor between q . k and the attention score.
    embedding: what a vocabulary entry puts on the stream: "token", its embedding (normed where the family norms
    embeddings), or "effective", the same and what the MLP (the MLPs) of block 0 make of it while attention is silent.

    Example:
        >>> circuits = interp.Circuits(model.transformer, folded=True)
        >>> circuits.ov(1, 0).eigenvalues().shape
        torch.Size([6])
    """

    model: Transformer
    folded: bool = False
    biases: bool = False
    scaled: bool = False
    embedding: Embedding = "token"

    def __post_init__(self) -> None:
        if self.embedding not in ("token", "effective"):
            raise ValueError(f"embedding must be token or effective, got {self.embedding!r}")

    def ov(self, layer: int | None = None, head: int | None = None, *, cross: bool = False) -> FactoredMatrix:
        """W_V W_O of one head `[d d]`, of a layer's heads `[h d d]` or of all `[l h d d]`, source on the rows.

        Errors: IndexError for a layer or head that does not exist, ValueError for cross-attention a model lacks,
        AttributeError for a layer whose mixer has no such circuit.
        """
        return self._chosen(layer, head, lambda at: self._ov(at, cross=cross))

    def qk(
        self,
        layer: int | None = None,
        head: int | None = None,
        *,
        offset: Offset = None,
        cross: bool = False,
    ) -> FactoredMatrix:
        """W_Q W_K^T of one head, of a layer's or of all, as in `ov`; query on the rows, key on the columns.

        Under rotary positions it holds for a key that stands `offset` tokens before the query (None: 0): W_Q R(offset)
        W_K^T; several offsets are one more axis in front. It is the content's part of the score: ALiBi, relative
        buckets and soft caps come on top.
        Errors: as in `ov`, and ValueError for an offset under other positions or outside the context.
        """
        offsets = self._offsets(offset, cross=cross)
        return self._chosen(layer, head, lambda at: self._qk(at, offsets, cross=cross))

    def full_ov(self, layer: int, head: int) -> FactoredMatrix:
        """W_E OV W_U `[source token, output token]`: how a source token, once attended to, moves each logit.

        In float32 at least; the final norm is put on W_O's side, so that no second array of W_U's size is made.
        Errors: as `ov` and `unembedding`.
        """
        ov = self.ov(layer, head).wide()
        return FactoredMatrix(
            wide(self.embedded) @ ov.A, self.before_unembedding(ov.B) @ wide(self.bare_unembedding)
        )

    def full_qk(
        self, layer: int, head: int, *, offset: Offset = None, query: Term = "token", key: Term = "token"
    ) -> FactoredMatrix:
        """The QK circuit between vocabulary entries `[query token, key token]`, or position embeddings.

        For learned positions (and sinusoids) the four choices of `query` and `key` are the terms of the score; with
        `biases` the constant goes with the tokens, so that the four sum to the whole.
        """
        sides = {"token": lambda: self.embedded, "position": lambda: self.positions}
        if bad := [term for term in (query, key) if term not in sides]:
            raise ValueError(f"query and key must be token or position, got {bad[0]!r}")
        circuit = self.qk(layer, head, offset=offset)
        return FactoredMatrix(sides[query]() @ circuit.A, circuit.B @ sides[key]().mT)

    def direct(self) -> FactoredMatrix:
        """W_E W_U `[token, output token]`: the path past every layer, a bigram table (zero-layer transformer)."""
        rows = self.embedded[:, : self.model.config.d_model]
        return FactoredMatrix(rows, self.unembedding)

    @cached_property
    def embedded(self) -> Float[Tensor, "v d"]:
        """What each vocabulary entry puts on the stream, without position; with `biases` and a last column of 1."""
        if self._is_bare():
            return self._with_constant(self.model.embed.weight, 1.0)
        ids = torch.arange(self.model.config.d_vocab, device=self.model.device)
        found = torch.empty(len(ids), self.model.config.d_model, dtype=self.model.dtype, device=ids.device)
        for chunk in ids.split(CHUNK):  # in place: the table never exists twice
            found[chunk[0] : chunk[-1] + 1] = self._alone(chunk)
        return self._with_constant(found, 1.0)

    def embedded_tokens(self, ids: Int[Tensor, "n"]) -> Float[Tensor, "n d"]:
        """The rows of `embedded` of these vocabulary entries, without the work for all others."""
        ids = ids.to(self.model.device)
        return self._with_constant(self.model.embed.weight[ids] if self._is_bare() else self._alone(ids), 1.0)

    @cached_property
    def positions(self) -> Float[Tensor, "p d"]:
        """What each position puts on the stream; with `biases` and a last column of 0. ValueError if none is added."""
        kind, config = self.model.config.position, self.model.config
        if isinstance(kind, Learned):
            found = Weights(self.model).W_pos
        elif isinstance(kind, Sinusoidal):
            every = torch.arange(config.n_ctx, device=self.model.device)[None]
            found = sinusoids(kind, every, config.d_model, self.model.dtype)[0]
        else:
            raise ValueError(
                f"position terms require positions that are added to the stream, not {_kind(kind)}"
            )
        return self._with_constant(found, 0.0)

    @cached_property
    def unembedding(self) -> Float[Tensor, "d v"]:
        """W_U; with `folded` behind the final norm at scale 1 and times the factor on the logits.

        Errors: AttributeError without an unembedding, ValueError behind a masked-LM head, which is not linear.
        """
        found = self.bare_unembedding
        if not self.folded:
            return found
        return self._read_by(self.model.ln_final, found) * self.model.config.logit_scale

    @property
    def bare_unembedding(self) -> Float[Tensor, "d v"]:
        """W_U itself, not copied, whatever the conventions; errors as `unembedding`."""
        if self.model.mlm_head is not None:
            raise ValueError(
                "this model computes its logits by a non-linear masked-LM head: no circuit ends in it"
            )
        return Weights(self.model).W_U

    def before_unembedding(self, written: Float[Tensor, "*h d"]) -> Float[Tensor, "*h d"]:
        """What is written to the final stream, as W_U reads it: with `folded` behind the final norm at scale 1."""
        if not self.folded:
            return written
        return self.model.ln_final.frozen(written, written.new_ones(1)) * self.model.config.logit_scale

    # one layer, all heads

    def _ov(self, layer: int, *, cross: bool) -> FactoredMatrix:
        weights, block = Weights(self.model), self.model.block(layer)
        if not cross:
            weights.require("additive", "OV circuit", [layer])
        value, out = self._reading(layer, "v", cross=cross), weights.layer(layer, cross=cross).W_O
        if self.folded:
            sublayer = "cross_attn_out" if cross else "attn_out"
            norm = block.post_norm(sublayer)
            out = out if norm is None else norm.frozen(out, out.new_ones(1))
            out = out * self.model.config.factor(sublayer)
        return FactoredMatrix(value, out)

    def _qk(self, layer: int, offsets: Tensor | None, *, cross: bool) -> FactoredMatrix:
        if not cross:
            Weights(self.model).require("bilinear", "QK circuit", [layer])
        query, key = (self._reading(layer, part, cross=cross) for part in "qk")
        rotary = self._rotary(layer, cross=cross)
        if rotary is not None:
            back = torch.tensor(0) if offsets is None else offsets
            query = _rotated(query, rotary, back.clamp_min(0))
            key = _rotated(key, rotary, (-back).clamp_min(0))
        if self.scaled:
            query = query * self._mixer(layer, cross=cross).scale
        return FactoredMatrix(query, key.mT)

    def _reading(self, layer: int, part: str, *, cross: bool) -> Float[Tensor, "h d e"]:
        """What maps the stream to the queries, keys or values of each query head; with `biases` a last row."""
        weights, mixer = Weights(self.model).layer(layer, cross=cross), self._mixer(layer, cross=cross)
        matrix, bias = getattr(weights, f"W_{part.upper()}"), getattr(weights, f"b_{part.upper()}")
        if self.folded and (part == "q" or not cross):  # the memory is read as it is
            block = self.model.block(layer)
            norm = block.reading(block.ln_cross if cross else block.ln1)
            if norm.bias is not None:
                bias = bias + norm.bias.to(matrix.device) @ matrix
            matrix = self._read_by(norm, matrix)
        if self.biases:
            matrix = torch.cat((matrix, bias[:, None]), 1)
        head_norm = {"q": mixer.q_norm, "k": mixer.k_norm}.get(part)
        if self.folded and head_norm is not None:
            matrix = _head_normed(head_norm, matrix)
        return matrix if part == "q" else matrix[Weights(self.model).kv_head()]

    def _read_by(self, norm: Normalize, matrix: Float[Tensor, "*h d e"]) -> Float[Tensor, "*h d e"]:
        """A matrix that reads the stream, behind the linear part of a norm at scale 1."""
        return norm.pull_back(matrix.mT, matrix.new_ones(1)).mT.to(matrix.dtype)

    def _mixer(self, layer: int, *, cross: bool) -> Attention | CrossAttention:
        block = self.model.block(layer)
        mixer = block.cross_attn if cross else block.attn
        assert mixer is not None  # Weights has refused it
        return mixer

    def _rotary(self, layer: int, *, cross: bool) -> Rotary | None:
        config = self.model.config
        kind = (config.local_position or config.position) if config.is_local(layer) else config.position
        return kind if isinstance(kind, Rotary) and not cross else None

    def _chosen(
        self, layer: int | None, head: int | None, make: Callable[[int], FactoredMatrix]
    ) -> FactoredMatrix:
        """The circuits that `make` gives of whole layers, `[*offset layer head d d]`, with the chosen axes selected."""
        n_layers, n_heads = self.model.config.n_layers, self.model.config.n_heads
        if layer is not None and not 0 <= layer < n_layers:
            raise IndexError(f"layers are 0 to {n_layers - 1}, got {layer}")
        if head is not None and not 0 <= head < n_heads:
            raise IndexError(f"heads are 0 to {n_heads - 1}, got {head}")
        every = range(n_layers) if layer is None else [layer]
        made = [make(at) for at in every]
        a, b = (torch.stack(sides, -4) for sides in ([m.A for m in made], [m.B for m in made]))
        if head is not None:
            a, b = a[..., head, :, :], b[..., head, :, :]
        if layer is not None:
            axis = -4 if head is None else -3
            a, b = a.select(axis, 0), b.select(axis, 0)
        return FactoredMatrix(a, b)

    def _offsets(self, offset: Offset, *, cross: bool) -> Int[Tensor, "..."] | None:
        """The offsets, checked."""
        if offset is None:
            return None
        config = self.model.config
        if cross or not isinstance(config.position, Rotary):
            what = "cross-attention" if cross else _kind(config.position)
            raise ValueError(f"an offset requires rotary positions: under {what} QK does not depend on it")
        offsets = torch.tensor(offset if isinstance(offset, int) else list(offset), dtype=torch.int64)
        original = depends_on_length(config.position)
        most = config.n_ctx if original is None else original
        least = 0 if config.causal else 1 - most
        if offsets.numel() == 0 or int(offsets.min()) < least or int(offsets.max()) >= most:
            raise ValueError(f"offsets (query minus key) of {least} to {most - 1} are required, got {offset}")
        return offsets

    def _alone(self, ids: Int[Tensor, "n"]) -> Float[Tensor, "n d"]:
        """The stream of each token in a text of its own: after the embeddings, or after block 0 without attention."""
        parts = [site for site in embedding_parts(self.model.config) if site != "hook_embed"]
        alone = self.model(ids[:, None], Tap(edits=[Edit(site, torch.zeros_like) for site in parts]), stop=0)
        if self.embedding == "effective":
            alone = self.model.block(0).without_attention(alone.to(self._home(0))).to(self.model.device)
        return alone[:, 0]

    def _is_bare(self) -> bool:
        """Whether a vocabulary entry puts its row of W_E on the stream, and nothing is made of it."""
        config = self.model.config
        untouched = self.embedding == "token" or (config.mlp is None and config.norm_place != "post")
        return untouched and not config.embed_norm and config.embed_scale == 1

    def _home(self, layer: int) -> torch.device:
        return self.model.device if self.model.devices is None else self.model.devices[layer]

    def _with_constant(self, rows: Float[Tensor, "n d"], constant: float) -> Float[Tensor, "n _"]:
        return torch.cat((rows, rows.new_full((len(rows), 1), constant)), 1) if self.biases else rows


def _rotated(
    matrix: Float[Tensor, "h d e"], rotary: Rotary, positions: Int[Tensor, "*n"]
) -> Float[Tensor, "*n h d e"]:
    """What maps to queries or keys, followed by the rotation at each position."""
    h, d, e = matrix.shape
    turn = Rotation.at(rotary, e, positions.reshape(1, -1).to(matrix.device), matrix.dtype)
    flat = rearrange(matrix, "h d e -> 1 1 (h d) e").expand(-1, positions.numel(), -1, -1)
    return turn.apply(flat).reshape(*positions.shape, h, d, e)


def _head_normed(norm: HeadNorm, matrix: Float[Tensor, "h d e"]) -> Float[Tensor, "h d e"]:
    """What maps to queries or keys, followed by the linear part of their norm at scale 1."""
    one, heads = matrix.new_ones(1), matrix.shape[0]
    if not norm.whole:
        return norm.norm.frozen(matrix, one)
    flat = norm.norm.frozen(rearrange(matrix, "h d e -> d (h e)"), one)
    return rearrange(flat, "d (h e) -> h d e", h=heads)


def _kind(position: object) -> str:
    return type(position).__name__
