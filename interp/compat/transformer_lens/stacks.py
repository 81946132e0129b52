"""Weights of all layers stacked, biases summed, and heads composed, as `HookedTransformer` offers them."""

from typing import Any, cast

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.factored_matrix import FactoredMatrix


class WeightStacks(nn.Module):
    """Properties that stack one weight over the layers, `[layer ...]`; each access builds a new tensor."""

    cfg: HookedTransformerConfig
    blocks: Any
    embed: Any
    unembed: Any

    def _stacked(self, part: str, name: str) -> Tensor:
        return torch.stack([getattr(getattr(block, part), name) for block in self.blocks])

    @property
    def n_params_total(self) -> int:
        """The number of all parameters; `cfg.n_params` counts the matrices of attention and MLPs only."""
        return sum(p.numel() for p in self.parameters())

    @property
    def W_U(self) -> Float[Tensor, "d v"]:
        """The unembedding."""
        return self.unembed.W_U

    @property
    def b_U(self) -> Float[Tensor, "v"]:
        """The bias of the unembedding."""
        return self.unembed.b_U

    @property
    def W_E(self) -> Float[Tensor, "v d"]:
        """The token embedding."""
        return self.embed.W_E

    @property
    def W_pos(self) -> Float[Tensor, "p d"]:
        """The position embedding; AttributeError in models that have none."""
        return cast(Tensor, cast(Any, self.pos_embed).W_pos)

    @property
    def W_E_pos(self) -> Float[Tensor, "v_and_p d"]:
        """Token and position embedding, one below the other."""
        return torch.cat([self.W_E, self.W_pos])

    @property
    def W_Q(self) -> Float[Tensor, "l h d e"]:
        """Query weights."""
        return self._stacked("attn", "W_Q")

    @property
    def W_K(self) -> Float[Tensor, "l h d e"]:
        """Key weights, once per query head."""
        return self._stacked("attn", "W_K")

    @property
    def W_V(self) -> Float[Tensor, "l h d e"]:
        """Value weights, once per query head."""
        return self._stacked("attn", "W_V")

    @property
    def W_O(self) -> Float[Tensor, "l h e d"]:
        """Output weights of attention."""
        return self._stacked("attn", "W_O")

    @property
    def b_Q(self) -> Float[Tensor, "l h e"]:
        """Query biases."""
        return self._stacked("attn", "b_Q")

    @property
    def b_K(self) -> Float[Tensor, "l h e"]:
        """Key biases, once per query head."""
        return self._stacked("attn", "b_K")

    @property
    def b_V(self) -> Float[Tensor, "l h e"]:
        """Value biases, once per query head."""
        return self._stacked("attn", "b_V")

    @property
    def b_O(self) -> Float[Tensor, "l d"]:
        """Output biases of attention."""
        return self._stacked("attn", "b_O")

    @property
    def W_in(self) -> Float[Tensor, "l d m"]:
        """Input weights of the MLPs."""
        return self._stacked("mlp", "W_in")

    @property
    def W_gate(self) -> Float[Tensor, "l d m"] | None:
        """Gate weights of the MLPs; None if they are not gated."""
        return self._stacked("mlp", "W_gate") if self.cfg.gated_mlp else None

    @property
    def W_out(self) -> Float[Tensor, "l m d"]:
        """Output weights of the MLPs."""
        return self._stacked("mlp", "W_out")

    @property
    def b_in(self) -> Float[Tensor, "l m"]:
        """Input biases of the MLPs."""
        return self._stacked("mlp", "b_in")

    @property
    def b_out(self) -> Float[Tensor, "l d"]:
        """Output biases of the MLPs."""
        return self._stacked("mlp", "b_out")

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T of every head, `[layer head d_model d_model]`, factored."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O of every head, `[layer head d_model d_model]`, factored."""
        return FactoredMatrix(self.W_V, self.W_O)

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, "d"]:
        """The sum of the output biases of all sublayers before `layer`.

        mlp_input: that of the attention of `layer` too. include_mlp_biases: False counts attention's only.
        """
        assert not mlp_input or layer < self.cfg.n_layers, (
            f"mlp_input requires a layer below {self.cfg.n_layers}, got {layer}"
        )
        total = torch.zeros(self.cfg.d_model, device=self.W_U.device, dtype=self.W_U.dtype)
        for block in self.blocks[:layer]:
            total = total + block.attn.b_O
            if include_mlp_biases and not self.cfg.attn_only:
                total = total + block.mlp.b_out
        return total + self.blocks[layer].attn.b_O if mlp_input else total

    def all_composition_scores(self, mode: str) -> Float[Tensor, "l h l h"]:
        """How strongly each head writes into what a later head reads: Q, K or V composition; 0 within a layer.

        Elhage et al. 2021, "A mathematical framework": |W_OV W|_F / (|W_OV|_F |W|_F).
        """
        read = {"Q": lambda: self.QK, "K": lambda: self.QK.T, "V": lambda: self.OV}.get(mode)
        if read is None:
            raise ValueError(f"mode must be one of ['Q', 'K', 'V'] not {mode}")
        left, right = self.OV.collapse_l(), read().collapse_r()
        whole, parts = right.norm(dim=(-2, -1)), left.norm(dim=(-2, -1))
        scores = left.new_zeros(*parts.shape, *whole.shape)
        for layer in range(self.cfg.n_layers - 1):  # the pairs of no later layer are half of the work
            product = einsum(left[layer], right[layer + 1 :], "h k d, l i d j -> h l i k j")
            norms = product.norm(dim=(-2, -1)) / whole[layer + 1 :]
            scores[layer, :, layer + 1 :] = norms / parts[layer][:, None, None]
        return scores

    def all_head_labels(self) -> list[str]:
        """Names of all heads: "L0H0", "L0H1", ..."""
        return [f"L{layer}H{head}" for layer in range(self.cfg.n_layers) for head in range(self.cfg.n_heads)]
