"""The parameter that holds each named weight matrix, and the sites of the matrix' input and output.

Matrices have TransformerLens-like names (`blocks.3.mlp.W_out`) and the row convention `x @ W`, whatever the layout of
the parameter: W_Q, W_K and W_V share one parameter, W_gate and W_in another, and W_U may be the parameter of W_E.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from interp.core.factored import FactoredMatrix
from interp.core.wording import nearest
from interp.model.config import MLP, Learned, ModelConfig, MoE, NoNorm
from interp.model.sites import attention_input
from interp.model.transformer import Transformer

_NAME = re.compile(r"blocks\.(-?\d+)\.(attn|cross_attn|mlp|mlp_before)\.(W_\w+)")


@dataclass(frozen=True)
class MatrixPlace:
    """Name of the parameter that holds a matrix, and the function from that parameter to a view of the matrix."""

    parameter: str
    view: Callable[[Tensor], Tensor]

    def in_(self, model: Transformer) -> Float[Tensor, "*h i o"]:
        """The matrix of this model as a view: writing into it writes into the parameter."""
        return self.view(model.get_parameter(self.parameter))


def matrix_place(model: Transformer, name: str) -> MatrixPlace:
    """The parameter and view that hold the matrix of this name.

    Raises:
        KeyError: an unknown name.
        IndexError: a layer that does not exist.
        ValueError: a matrix that this model lacks, or has several of (a mixture of experts).
    """
    config, match = model.config, _NAME.fullmatch(name)
    if match is None:
        return _place_outside_blocks(config, name)
    layer, part, matrix = int(match[1]), match[2], match[3]
    if matrix not in _MATRICES[part]:
        raise KeyError(f"unknown matrix {name!r}; {nearest(name, _matrix_names(layer))}")
    if not 0 <= layer < config.n_layers:
        raise IndexError(f"{name!r}: layers are 0 to {config.n_layers - 1} in this model, got {layer}")
    if part == "attn":
        parameter = f"blocks.{layer}.attn.{'out' if matrix == 'W_O' else 'qkv'}.weight"
        if parameter not in dict(model.named_parameters()):
            raise ValueError(f"{name!r}: {config.mixers[layer]} has no such matrix of its own")
        return MatrixPlace(parameter, _head_view(config, matrix))
    if part == "cross_attn":
        if not config.cross_attention:
            raise ValueError(f"{name!r}: this model has no cross-attention")
        return MatrixPlace(
            f"blocks.{layer}.cross_attn.{_CROSSED[matrix]}.weight", _cross_view(config, matrix)
        )
    return _mlp_place(config, name, layer, part, matrix)


def _mlp_place(config: ModelConfig, name: str, layer: int, part: str, matrix: str) -> MatrixPlace:
    """The place of an MLP's matrix; ValueError for a model without it, or with several."""
    mlp = config.mlp
    if isinstance(mlp, MoE):
        raise ValueError(f"{name!r}: this model has a mixture of {mlp.n_experts} experts, not one matrix")
    if mlp is not None and not isinstance(mlp, MLP):
        raise ValueError(f"{name!r}: this model has {config.mlp_in_words}, whose matrices have no such names")
    if mlp is None or (matrix == "W_gate" and not mlp.gated):
        raise ValueError(f"{name!r}: this model has no {'MLP' if mlp is None else 'gate in its MLP'}")
    if part not in config.mlps:
        raise ValueError(f"{name!r}: this model has no MLP before attention")
    return MatrixPlace(
        f"blocks.{layer}.{part}.{'out' if matrix == 'W_out' else 'into'}.weight", _mlp_view(mlp, matrix)
    )


def side_by_side(weight: Float[Tensor, "*h i e"], name: str) -> Float[Tensor, "rows columns"]:
    """The matrix with all heads in its columns (of W_O: in its rows); a matrix without heads is returned as it is."""
    if weight.ndim == 2:
        return weight
    return rearrange(weight, "h e d -> (h e) d" if name.endswith("W_O") else "h d e -> d (h e)")


def by_head(
    left: Float[Tensor, "i r"], right: Float[Tensor, "r o"], name: str, heads: int | None
) -> FactoredMatrix:
    """The product left @ right, of factors in the layout of `side_by_side`, split by head (None: no heads)."""
    if heads is None:
        return FactoredMatrix(left, right)
    if name.endswith("W_O"):
        return FactoredMatrix(rearrange(left, "(h e) r -> h e r", h=heads), right)
    return FactoredMatrix(left, rearrange(right, "r (h e) -> h r e", h=heads))


@dataclass(frozen=True)
class Ends:
    """Sites of a matrix' input x and output y = factor * (x W + ...); `axes`: the einsum of x A B for W = A B."""

    reads: str
    writes: str
    axes: str
    factor: float = 1.0


def ends(config: ModelConfig, name: str) -> Ends:
    """The sites of a block matrix' input and output.

    Raises:
        ValueError: a matrix outside the blocks, and for W_out or W_O in families that norm what the sublayer adds:
            there the site holds the normed output.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"a matrix of a block is required, whose input and output are sites; got {name!r}")
    reads, writes = between(config, name)
    part, matrix = match[2], match[3]
    if matrix not in ("W_out", "W_O"):
        axes = "b p i, h i r, h r o -> b p h o" if part in _ATTENTIONS else "b p i, i r, r o -> b p o"
        return Ends(reads, writes, axes)
    if config.norms_output:
        raise ValueError(
            f"{name!r}: this family norms what the sublayer adds, so the matrix' own output is no site; "
            "change the weight itself (`applied`, `finetune_edit`)"
        )
    axes = "b p i, i r, r o -> b p o" if matrix == "W_out" else "b p h i, h i r, h r o -> b p o"
    return Ends(reads, writes, axes, config.factor(f"{part}_out"))


def between(config: ModelConfig, name: str) -> tuple[str, str]:
    """The sites of a block matrix' input and output; for W_out and W_O the output is what is added to the stream.

    Raises:
        ValueError: W_K and W_V of cross-attention, which read the memory: it is no site of the decoder.
    """
    if reads_memory(name):
        raise ValueError(f"{name!r} reads the encoder's final states, which are no site of this model")
    prefix, part, matrix = name.rsplit(".", 2)
    reads = {"W_O": f"{part}.hook_z", "W_out": f"{part}.hook_post"}
    source = reads.get(matrix) or _read_through(config, part)
    return f"{prefix}.{source}", given_at(config, name)


def given_at(config: ModelConfig, name: str) -> str:
    """The site of a block matrix' output; of W_out and W_O, of what is added to the stream."""
    prefix, part, matrix = name.rsplit(".", 2)
    gated = isinstance(config.mlp, MLP) and config.mlp.gated
    sites = {
        **{f"W_{letter}": f"{part}.hook_{letter.lower()}" for letter in "QKV"},
        **dict.fromkeys(("W_O", "W_out"), f"hook_{part}_out"),
        "W_gate": f"{part}.hook_pre", "W_in": f"{part}.hook_pre{'_linear' if gated else ''}",
    }  # fmt: skip
    return f"{prefix}.{sites[matrix]}"


def reads_memory(name: str) -> bool:
    """Whether a matrix reads the encoder's states, and not the stream: W_K and W_V of cross-attention."""
    return name.endswith(("cross_attn.W_K", "cross_attn.W_V"))


def _read_through(config: ModelConfig, part: str) -> str:
    """The input site of a sublayer's first matrices: the normed stream, or the stream where no norm precedes."""
    if part == "cross_attn":
        unnormed = isinstance(config.norm, NoNorm) or config.norm_place == "output"
        norm = "ln1" if config.norms_sum else "ln_cross"
        return "hook_resid_mid" if unnormed else f"{norm}.hook_normalized"
    if isinstance(config.norm, NoNorm) or not config.norms_input:
        return attention_input(config, 0).rpartition(".")[2] if part == "attn" else f"hook_{part}_in"
    norm = "ln1" if config.shared_norm else {"attn": "ln1", "mlp": "ln2", "mlp_before": "ln0"}[part]
    return f"{norm}.hook_normalized"


_ATTENTIONS = ("attn", "cross_attn")
_CROSSED = {"W_Q": "q", "W_K": "kv", "W_V": "kv", "W_O": "out"}
"""The parameter of cross-attention that holds each of its matrices."""
_MATRICES = {
    **dict.fromkeys(_ATTENTIONS, ("W_Q", "W_K", "W_V", "W_O")),
    **dict.fromkeys(("mlp", "mlp_before"), ("W_in", "W_gate", "W_out")),
}
_OUTSIDE = ("embed.W_E", "pos_embed.W_pos", "unembed.W_U")


def _matrix_names(layer: int = 0) -> Sequence[str]:
    return [*(f"blocks.{layer}.{part}.{m}" for part, ms in _MATRICES.items() for m in ms), *_OUTSIDE]


def _place_outside_blocks(config: ModelConfig, name: str) -> MatrixPlace:
    """The place of W_E, W_pos or W_U; KeyError for any other name, ValueError for a matrix that the model lacks."""
    if name not in _OUTSIDE:
        raise KeyError(f"unknown matrix {name!r}; {nearest(name, _matrix_names())}")
    kind = config.position
    if name == "embed.W_E":
        return MatrixPlace("embed.weight", lambda t: t)
    if name == "unembed.W_U" and config.unembed:
        return MatrixPlace("unembed.weight", lambda t: t.mT)
    if name == "pos_embed.W_pos" and isinstance(kind, Learned):
        return MatrixPlace("pos_embed.weight", lambda t: t[kind.offset :])
    raise ValueError(f"{name!r}: this model has no such matrix (unembed={config.unembed}, position={kind})")


def _head_view(config: ModelConfig, matrix: str) -> Callable[[Tensor], Tensor]:
    width, bounds = config.head_width, [0, config.n_heads, config.kv_heads, config.kv_heads]
    if matrix == "W_O":
        return lambda t: rearrange(t, "d (h e) -> h e d", h=config.n_heads)
    i = "QKV".index(matrix[2:])
    heads = slice(sum(bounds[: i + 1]), sum(bounds[: i + 2]))
    return lambda t: rearrange(t, "(n e) d -> n d e", e=width)[heads]


def _cross_view(config: ModelConfig, matrix: str) -> Callable[[Tensor], Tensor]:
    if matrix in ("W_Q", "W_O"):
        return _head_view(config, matrix)
    width, i = config.head_width, "KV".index(matrix[2:])
    return lambda t: rearrange(t, "(two g e) d -> two g d e", two=2, e=width)[i]


def _mlp_view(mlp: MLP, matrix: str) -> Callable[[Tensor], Tensor]:
    if matrix == "W_out" or not mlp.gated:
        return lambda t: t.mT
    rows = slice(None, mlp.d_mlp) if matrix == "W_gate" else slice(mlp.d_mlp, None)
    return lambda t: t[rows].mT
