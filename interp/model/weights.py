"""The weights in the field's layout, such as `[layer, head, d_model, d_head]`, read from the fused parameters.

`layer(i)` gives views without a copy; the stacked properties build a fresh tensor at each access, so they are never
stale after `.to(...)`. Under grouped-query attention W_K and W_V keep their key/value heads; `OV` and `QK` expand
them. In Macaron blocks W_in, W_gate and W_out are those of the MLP after attention; `layer(i, before=True)` has the
others.
"""

from collections.abc import Callable, Iterable
from functools import cached_property

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.core.boundary import public
from interp.core.factored import FactoredMatrix
from interp.model.attention import Attention
from interp.model.block import FeedForward
from interp.model.config import MLP, Learned
from interp.model.transformer import Transformer


class LayerWeights:
    """Views of one block's weights; a bias the model lacks is zeros, a matrix it lacks is None (and its bias too).

    Each view is made at its first use.
    """

    def __init__(self, model: Transformer, layer: int, attn: Attention, *, before: bool) -> None:
        """The weights of one block.

        Args:
            attn: attention of the block, or its cross-attention.
            before: whether the MLP is the one before attention.
        """
        self._model, self._attn = model, attn
        block, traits = model.block(layer), model.config.mixers[layer].traits
        cross = attn is not block.attn
        self._has = "qkv" if cross or traits.queries else "v" if traits.values else ""
        mlp, kind = block.mlps().get("mlp_before" if before else "mlp"), model.config.mlp
        self._mlp = mlp if isinstance(mlp, FeedForward) and isinstance(kind, MLP) else None
        self._gated = isinstance(kind, MLP) and kind.gated

    @cached_property
    def W_Q(self) -> Float[Tensor, "h d e"] | None:
        """Query weights [h, d, e]: from the normed stream to the queries."""
        return self._matrix("q")

    @cached_property
    def W_K(self) -> Float[Tensor, "g d e"] | None:
        """Key weights [g, d, e]: from the normed stream to the keys."""
        return self._matrix("k")

    @cached_property
    def W_V(self) -> Float[Tensor, "g d e"] | None:
        """Value weights [g, d, e]: from the normed stream to the values."""
        return self._matrix("v")

    @cached_property
    def W_O(self) -> Float[Tensor, "h e d"]:
        """Output weights [h, e, d]: from z of each head to the stream."""
        return self._on_model_device(
            rearrange(self._attn.out.weight, "d (h e) -> h e d", e=self._attn.d_head)
        )

    @cached_property
    def b_Q(self) -> Float[Tensor, "h e"] | None:
        """Query biases [h, e]."""
        return self._bias("q")

    @cached_property
    def b_K(self) -> Float[Tensor, "g e"] | None:
        """Key biases [g, e]."""
        return self._bias("k")

    @cached_property
    def b_V(self) -> Float[Tensor, "g e"] | None:
        """Value biases [g, e]."""
        return self._bias("v")

    @cached_property
    def b_O(self) -> Float[Tensor, "d"]:
        """Bias [d] of the output of attention."""
        return self._bias_or_zeros(self._attn.out.bias, self._attn.out.weight, self._model.config.d_model)

    @cached_property
    def W_gate(self) -> Float[Tensor, "d m"] | None:
        """Gate weights [d, m]: from the normed stream to the gates of neurons."""
        into = self._into
        return self._on_model_device(into.weight.chunk(2)[0].mT) if into is not None and self._gated else None

    @cached_property
    def W_in(self) -> Float[Tensor, "d m"] | None:
        """Input weights [d, m]: from the normed stream to the neurons."""
        into = self._into
        if into is None:
            return None
        return self._on_model_device((into.weight.chunk(2)[1] if self._gated else into.weight).mT)

    @cached_property
    def W_out(self) -> Float[Tensor, "m d"] | None:
        """Output weights [m, d]: from the neurons to the stream."""
        return None if self._mlp is None else self._on_model_device(self._mlp.out.weight.mT)

    @cached_property
    def b_gate(self) -> Float[Tensor, "m"] | None:
        """Gate biases [m]."""
        return self._b_into.chunk(2)[0] if self._b_into is not None and self._gated else None

    @cached_property
    def b_in(self) -> Float[Tensor, "m"] | None:
        """Neuron biases [m]."""
        return self._b_into.chunk(2)[1] if self._b_into is not None and self._gated else self._b_into

    @cached_property
    def b_out(self) -> Float[Tensor, "d"] | None:
        """Bias [d] of the output of the MLP."""
        out = None if self._mlp is None else self._mlp.out
        return None if out is None else self._bias_or_zeros(out.bias, out.weight, self._model.config.d_model)

    @cached_property
    def _into(self) -> nn.Linear | None:
        return None if self._mlp is None else self._mlp.into

    @cached_property
    def _b_into(self) -> Tensor | None:
        into = self._into
        return None if into is None else self._bias_or_zeros(into.bias, into.weight, len(into.weight))

    def _matrix(self, name: str) -> Tensor | None:
        if name not in self._has:
            return None
        return self._on_model_device(rearrange(self._attn.part(name)[0], "h e d -> h d e"))

    def _bias(self, name: str) -> Tensor | None:
        if name not in self._has:
            return None
        weight, bias = self._attn.part(name)
        return self._on_model_device(weight.new_zeros(weight.shape[:2]) if bias is None else bias)

    def _bias_or_zeros(self, bias: Tensor | None, weight: Tensor, size: int) -> Tensor:
        """The bias; `size` zeros in the dtype of `weight` if there is none."""
        return self._on_model_device(weight.new_zeros(size) if bias is None else bias)

    def _on_model_device(self, value: Tensor) -> Tensor:
        """The tensor itself; a copy if the block is on another device than the embedding."""
        return value.to(self._model.device)


@public(plain_pass=True)
class Weights:
    """Read-only views of a model's parameters in the field's layout."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.config = model.config

    def layer(self, layer: int, *, cross: bool = False, before: bool = False) -> LayerWeights:
        """One block's weights as views (copies only of a block that lives on another device than the embedding).

        Args:
            layer: number of the block.
            cross: True: the weights of its cross-attention.
            before: True: those of the MLP before attention, in a Macaron block; else of the MLP after it.

        Raises:
            IndexError: no such layer.
            ValueError: no cross-attention, or no such MLP.
        """
        if not 0 <= layer < self.config.n_layers:
            raise IndexError(f"layers are 0 to {self.config.n_layers - 1}, got {layer}")
        block = self.model.block(layer)
        attn = block.cross_attn if cross else block.attn
        if attn is None:
            raise ValueError("this model has no cross-attention")
        if before and "mlp_before" not in self.config.mlps:
            raise ValueError(f"this model has no MLP before attention: block={self.config.block}")
        return LayerWeights(self.model, layer, attn, before=before)

    def _stack(self, pick: Callable[[LayerWeights], Tensor | None], name: str) -> Tensor:
        parts = [pick(self.layer(i)) for i in range(self.config.n_layers)]
        present = [p for p in parts if p is not None]
        if len(present) != len(parts):
            raise AttributeError(
                f"this model has no {name}: mlp={self.config.mlp}, mixer={self.config.mixer}"
            )
        if len({p.shape for p in present}) > 1:
            raise AttributeError(
                f"this model has no {name} of one shape in all layers: ask `layer(i)` for each"
            )
        return torch.stack(present)

    @property
    def W_E(self) -> Float[Tensor, "v d"]:
        """Token embedding [v, d]. AttributeError where no multiple of it enters the first block."""
        if why := self.config.block.why_not("embed"):
            raise AttributeError(f"this model has no known W_E: {why}")
        return self.model.embed.weight

    @property
    def W_pos(self) -> Float[Tensor, "p d"]:
        """Position embedding, row 0 that of position 0; AttributeError without learned positions."""
        kind = self.config.position
        if self.model.pos_embed is None or not isinstance(kind, Learned):
            raise AttributeError(f"this model has no W_pos: position={kind}, not {Learned()}")
        return self.model.pos_embed.weight[kind.offset :]

    @property
    def W_U(self) -> Float[Tensor, "d v"]:
        """Unembedding; AttributeError for a model that ends in its residual stream, or has another output layer."""
        return self._unembed.weight.mT

    @property
    def _unembed(self) -> nn.Linear:
        if self.model.unembed is None:
            has_unembed = self.config.unembed
            what = (
                f"its output layer is {self.config.output}"
                if has_unembed
                else "it ends in its residual stream"
            )
            raise AttributeError(f"this model has no W_U: {what}")
        return self.model.unembed

    @property
    def b_U(self) -> Float[Tensor, "v"]:
        """Unembedding bias; zeros if the model has none."""
        bias = self._unembed.bias
        return self.W_U.new_zeros(self.config.n_outputs) if bias is None else bias

    @property
    def final_beta(self) -> Float[Tensor, "d"]:
        """Beta of the final norm; zeros where there is none (RMSNorm, no norm)."""
        bias = self.model.ln_final.bias
        return self.model.embed.weight.new_zeros(self.config.d_model) if bias is None else bias

    @property
    def W_Q(self) -> Float[Tensor, "l h d e"]:
        """Query weights."""
        return self._stack(lambda w: w.W_Q, "W_Q")

    @property
    def W_K(self) -> Float[Tensor, "l g d e"]:
        """Key weights, one per key/value head."""
        return self._stack(lambda w: w.W_K, "W_K")

    @property
    def W_V(self) -> Float[Tensor, "l g d e"]:
        """Value weights, one per key/value head."""
        return self._stack(lambda w: w.W_V, "W_V")

    @property
    def W_O(self) -> Float[Tensor, "l h e d"]:
        """Output weights."""
        return self._stack(lambda w: w.W_O, "W_O")

    @property
    def b_Q(self) -> Float[Tensor, "l h e"]:
        """Query biases; zeros if the model has none."""
        return self._stack(lambda w: w.b_Q, "b_Q")

    @property
    def b_K(self) -> Float[Tensor, "l g e"]:
        """Key biases; zeros if the model has none."""
        return self._stack(lambda w: w.b_K, "b_K")

    @property
    def b_V(self) -> Float[Tensor, "l g e"]:
        """Value biases; zeros if the model has none."""
        return self._stack(lambda w: w.b_V, "b_V")

    @property
    def b_O(self) -> Float[Tensor, "l d"]:
        """Output biases; zeros if the model has none."""
        return self._stack(lambda w: w.b_O, "b_O")

    @property
    def W_in(self) -> Float[Tensor, "l d m"]:
        """MLP input weights; AttributeError for an attention-only model."""
        return self._stack(lambda w: w.W_in, "W_in")

    @property
    def W_gate(self) -> Float[Tensor, "l d m"]:
        """MLP gate weights; AttributeError unless the MLP is gated."""
        return self._stack(lambda w: w.W_gate, "W_gate")

    @property
    def W_out(self) -> Float[Tensor, "l m d"]:
        """MLP output weights; AttributeError for an attention-only model."""
        return self._stack(lambda w: w.W_out, "W_out")

    @property
    def b_in(self) -> Float[Tensor, "l m"]:
        """MLP input biases; AttributeError for an attention-only model."""
        return self._stack(lambda w: w.b_in, "b_in")

    @property
    def b_out(self) -> Float[Tensor, "l d"]:
        """MLP output biases; AttributeError for an attention-only model."""
        return self._stack(lambda w: w.b_out, "b_out")

    def kv_head(self) -> Int[Tensor, "h"]:
        """The key/value head that each query head reads: `h // (n_heads / n_kv_heads)`."""
        group = self.config.n_heads // self.config.kv_heads
        return torch.arange(self.config.n_heads, device=self.model.device) // group

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O of every head `[layer, head, d, d]`, row convention: what a head writes is `x @ OV`."""
        self.require("moves", "OV circuit")
        return FactoredMatrix(self.W_V[:, self.kv_head()], self.W_O)

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T of every head `[layer, head, d, d]`, query on the rows, without the softmax scale.

        Under rotary positions this is the content term at offset 0 only; the circuit depends on the offset.
        """
        self.require("bilinear", "QK circuit")
        return FactoredMatrix(self.W_Q, self.W_K[:, self.kv_head()].mT)

    def require(self, trait: str, circuit: str, layers: Iterable[int] | None = None) -> None:
        """AttributeError unless the mixers of these layers (None: all) have a trait that a circuit is built on."""
        for layer in range(self.config.n_layers) if layers is None else layers:
            mixer = self.config.mixers[layer]
            if not getattr(mixer.traits, trait):
                raise AttributeError(f"layer {layer} has no {circuit}: it mixes positions by {mixer}")
