"""A change of one weight matrix as data: put into the parameter and taken out again bit by bit, or made as `Edit`s.

A matrix is called what the field calls it (`blocks.3.mlp.W_out`) and stands in the row convention `x @ W`, whatever the
layout of the parameter that holds it: queries, keys and values share one parameter, gate and in another, and the
unembedding may be the embedding itself.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from interp.core.factored import FactoredMatrix
from interp.core.shapes import nearest, shape_text
from interp.engine.observe import Subject
from interp.model.config import MLP, Learned, ModelConfig, MoE, NoNorm
from interp.model.tap import Edit
from interp.model.transformer import Transformer

Change = FactoredMatrix | Float[Tensor, "*h i o"]
"""What is added to a matrix: two thin factors, or a tensor of its shape."""
_NAME = re.compile(r"blocks\.(-?\d+)\.(attn|mlp)\.(W_\w+)")


@dataclass(frozen=True)
class WeightEdit:
    """W' = W + change, for one matrix of a model.

    name: `blocks.<layer>.attn.W_Q|W_K|W_V|W_O`, `blocks.<layer>.mlp.W_in|W_gate|W_out`, `embed.W_E`,
    `pos_embed.W_pos` or `unembed.W_U`; in tied models the last is the first, transposed.
    change: as `FactoredMatrix` A B (A `[.. d_in r]`, B `[.. r d_out]`; rank 0 changes nothing) or dense, in the layout
    of `Weights`: heads in front, `[h d e]` for W_Q.

    Example:
        >>> edit = WeightEdit("blocks.1.mlp.W_out", FactoredMatrix(torch.ones(40, 1), torch.ones(1, 24)))
        >>> with edit.applied(model):
        ...     logits = model.transformer(model.to_tokens(prompt))
    """

    name: str
    change: Change

    @property
    def rank(self) -> int | None:
        """The inner size of the factors; None for a dense change."""
        return self.change.A.shape[-1] if isinstance(self.change, FactoredMatrix) else None

    @property
    def dense(self) -> Float[Tensor, "*h i o"]:
        """The change as one tensor."""
        return self.change.AB if isinstance(self.change, FactoredMatrix) else self.change

    @contextmanager
    def applied(self, model: Subject) -> Iterator[None]:
        """Inside `with`, the model has the changed weights; afterwards the old ones, bit for bit, whatever happened.

        The sum is formed in float32 at least and rounded once. Edits nest. The parameter itself is written, so a pass
        whose graph is still waiting for its backward must not span the block.
        Errors: KeyError, IndexError or ValueError for a matrix the model lacks, a change of another shape, NaN or inf.
        """
        network = model.transformer
        weight = held(network, self.name).in_(network)
        change = self._fitting(weight)
        wide = torch.promote_types(weight.dtype, change.dtype)
        with torch.no_grad():
            before = weight.clone()
            changed = (weight.to(wide) + change.to(weight.device)).to(weight.dtype)
        try:
            with torch.no_grad():
                weight.copy_(changed)
            yield
        finally:
            with torch.no_grad():
                weight.copy_(before)

    def as_edits(self, model: Subject, *, rows: tuple[int, ...] | None = None) -> tuple[Edit, Edit]:
        """The same change without touching a weight: y' = y + (x A) B at the site of the matrix' output.

        The first edit remembers x, the second adds to y; both belong into the same pass, `rows` limits them to some
        batch rows, so one batch can hold many edited models. They agree with `applied` to rounding. Edits of y's
        own site by others come before or after it in the order given.
        Errors: as `applied`; ValueError for the embeddings and the unembedding, whose ends are no sites, and for
        W_out or W_O where the family norms what the sublayer adds (the raw output is no site).
        """
        self._fitting(held(model.transformer, self.name).in_(model.transformer))
        change, route = self.change, ends(model.transformer.config, self.name)
        if not isinstance(change, FactoredMatrix):
            change = FactoredMatrix(change, torch.eye(change.shape[-1], dtype=change.dtype))
        latest: list[Tensor] = []

        def remember(x: Tensor) -> Tensor:
            latest[:] = [x]
            return x

        def add(y: Tensor) -> Tensor:  # takes x away: nothing of a pass stays behind
            return y + route.factor * _through(latest.pop(), change, route.axes)

        return Edit(route.reads, remember, rows), Edit(route.writes, add, rows)

    def _fitting(self, weight: Tensor) -> Tensor:
        """The change, dense and in float32 at least; ValueError unless it fits the matrix."""
        if self.change.shape != weight.shape:
            raise ValueError(
                f"a change of {self.name} must have its shape {shape_text(weight.shape)}, got "
                f"{shape_text(self.change.shape)}"
            )
        dense = self.dense
        dense = dense.to(torch.promote_types(dense.dtype, torch.float32))
        if not bool(dense.isfinite().all()):
            raise ValueError(f"a finite change of {self.name} is required, got NaN or inf")
        return dense


@dataclass(frozen=True)
class Held:
    """Where a matrix is: the parameter that holds it, and which part of a tensor like that parameter it is."""

    parameter: str
    view: Callable[[Tensor], Tensor]

    def in_(self, model: Transformer) -> Float[Tensor, "*h i o"]:
        """The matrix of this model as a view: what is written into it is written into the parameter."""
        return self.view(model.get_parameter(self.parameter))


def held(model: Transformer, name: str) -> Held:
    """Where the matrix of this name is in the model.

    Errors: KeyError for an unknown name, IndexError for a layer that does not exist, ValueError for a matrix that
    this model lacks, or has several of (a mixture of experts).
    """
    config, match = model.config, _NAME.fullmatch(name)
    if match is None:
        return _outside(config, name)
    layer, part, matrix = int(match[1]), match[2], match[3]
    if matrix not in _MATRICES[part]:
        raise KeyError(f"unknown matrix {name!r}; {nearest(name, _known(layer))}")
    if not 0 <= layer < config.n_layers:
        raise IndexError(f"{name!r}: layers are 0 to {config.n_layers - 1} in this model, got {layer}")
    if part == "attn":
        return Held(
            f"blocks.{layer}.attn.{'out' if matrix == 'W_O' else 'qkv'}.weight", _head_view(config, matrix)
        )
    mlp = config.mlp
    if isinstance(mlp, MoE):
        raise ValueError(f"{name!r}: this model has a mixture of {mlp.n_experts} experts, not one matrix")
    if mlp is None or (matrix == "W_gate" and not mlp.gated):
        raise ValueError(f"{name!r}: this model has no {'MLP' if mlp is None else 'gate in its MLP'}")
    return Held(f"blocks.{layer}.mlp.{'out' if matrix == 'W_out' else 'into'}.weight", _mlp_view(mlp, matrix))


@dataclass(frozen=True)
class Ends:
    """Between which sites a matrix stands: y = factor * (x W + ...), `axes` the product x A B as an einsum."""

    reads: str
    writes: str
    axes: str
    factor: float = 1.0


def ends(config: ModelConfig, name: str) -> Ends:
    """The sites of a block matrix' input and output.

    Errors: ValueError for a matrix outside the blocks, and for W_out or W_O in families that norm what the sublayer
    adds: there the site holds the normed output.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"a matrix of a block is required, whose input and output are sites; got {name!r}")
    prefix, part, matrix = f"blocks.{match[1]}.", match[2], match[3]
    if matrix not in ("W_out", "W_O"):
        target = {"W_in": "mlp.hook_pre", "W_gate": "mlp.hook_pre"}.get(
            matrix, f"attn.hook_{matrix[2:].lower()}"
        )
        if matrix == "W_in" and isinstance(config.mlp, MLP) and config.mlp.gated:
            target = "mlp.hook_pre_linear"
        axes = "b p i, i r, r o -> b p o" if part == "mlp" else "b p i, h i r, h r o -> b p h o"
        return Ends(prefix + _read_through(config, part), prefix + target, axes)
    if config.norm_place in ("sandwich", "output"):
        raise ValueError(
            f"{name!r}: this family norms what the sublayer adds, so the matrix' own output is no site; "
            "change the weight itself (`applied`, `finetune_edit`)"
        )
    site, axes = {
        "W_out": ("mlp.hook_post", "b p i, i r, r o -> b p o"),
        "W_O": ("attn.hook_z", "b p h i, h i r, h r o -> b p o"),
    }[matrix]
    return Ends(prefix + site, f"{prefix}hook_{part}_out", axes, config.residual_scale)


def _through(x: Tensor, change: FactoredMatrix, axes: str) -> Tensor:
    """x A B, in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.promote_types(change.A.dtype, torch.float32))
    return einsum(x.to(wide), change.A.to(x.device, wide), change.B.to(x.device, wide), axes)


def _read_through(config: ModelConfig, part: str) -> str:
    """The site of what a sublayer's first matrices read: the normed stream, or the stream where no norm precedes."""
    if isinstance(config.norm, NoNorm) or config.norm_place in ("output", "post"):
        return "hook_resid_pre" if part == "attn" else "hook_mlp_in"
    return "ln1.hook_normalized" if part == "attn" or config.shared_norm else "ln2.hook_normalized"


_MATRICES = {"attn": ("W_Q", "W_K", "W_V", "W_O"), "mlp": ("W_in", "W_gate", "W_out")}
_OUTSIDE = ("embed.W_E", "pos_embed.W_pos", "unembed.W_U")


def _known(layer: int = 0) -> Sequence[str]:
    return [*(f"blocks.{layer}.{part}.{m}" for part, ms in _MATRICES.items() for m in ms), *_OUTSIDE]


def _outside(config: ModelConfig, name: str) -> Held:
    if name not in _OUTSIDE:
        raise KeyError(f"unknown matrix {name!r}; {nearest(name, _known())}")
    kind = config.position
    if name == "embed.W_E":
        return Held("embed.weight", lambda t: t)
    if name == "unembed.W_U" and config.unembed:
        return Held("unembed.weight", lambda t: t.mT)
    if name == "pos_embed.W_pos" and isinstance(kind, Learned):
        return Held("pos_embed.weight", lambda t: t[kind.offset :])
    raise ValueError(f"{name!r}: this model has no such matrix (unembed={config.unembed}, position={kind})")


def _head_view(config: ModelConfig, matrix: str) -> Callable[[Tensor], Tensor]:
    width, bounds = config.head_width, [0, config.n_heads, config.kv_heads, config.kv_heads]
    if matrix == "W_O":
        return lambda t: rearrange(t, "d (h e) -> h e d", e=width)
    i = "QKV".index(matrix[2:])
    heads = slice(sum(bounds[: i + 1]), sum(bounds[: i + 2]))
    return lambda t: rearrange(t, "(n e) d -> n d e", e=width)[heads]


def _mlp_view(mlp: MLP, matrix: str) -> Callable[[Tensor], Tensor]:
    if matrix == "W_out" or not mlp.gated:
        return lambda t: t.mT
    rows = slice(None, mlp.d_mlp) if matrix == "W_gate" else slice(mlp.d_mlp, None)
    return lambda t: t[rows].mT
