"""A direction after the final norm carried back through the frozen norms to where each part of the model writes.

The transpose of pushing every part forwards: what a head or a neuron adds along the direction is then its activation
times one folded vector, and nothing per head or neuron is ever as wide as d_model.
"""

from collections.abc import Mapping
from typing import Literal

from einops import einsum
from jaxtyping import Float
from torch import Tensor

from interp.model.config import MLPS
from interp.model.sites import embedding_parts, final_stream
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.edited import edits_at, layer_of
from interp.passes.frozen import embedding_norm, final_norm, output_norm, sum_norm
from interp.residual.decomposition import check_sum
from interp.residual.edited_sums import head_shares

Grain = Literal["layer", "sublayer", "head", "source", "neuron"]
"""The grain of a decomposition."""


def site(layer: int, name: str) -> str:
    """The full name of a site of a block."""
    return f"blocks.{layer}.{name}"


class Folded:
    """A direction at the end of the stream, carried back to where each sublayer writes.

    `last` holds the activations at the last position, `direction` stands at the output of the final norm. In pre-norm
    models it is the same everywhere in the stream; the beta of a norm that lies in between becomes a column.
    """

    def __init__(
        self, model: Transformer, last: Mapping[str, Tensor], direction: Float[Tensor, "b d"]
    ) -> None:
        self.model, self.last, self.weights = model, last, Weights(model)
        self.at: dict[tuple[int, str], Float[Tensor, "b d"]] = {}
        self.betas: dict[tuple[int, str], Float[Tensor, "b 1"]] = {}
        end = final_norm(model).of(last[final_stream(model.config)]).back(direction)
        for layer in reversed(range(model.config.n_layers)):
            for sublayer in reversed(model.config.sublayers):
                norm = sum_norm(model, layer, sublayer).recorded(last)
                if norm.beta is not None:
                    self.betas[layer, sublayer] = _dot(end, norm.beta.to(end))
                end = self.at[layer, sublayer] = norm.back(end)
        self.end = end

    def embeddings(self) -> list[Float[Tensor, "b 1"]]:
        """The embeddings' columns, and beta of the norm after them."""
        norm = embedding_norm(self.model).recorded(self.last)
        direction = norm.back(self.end)
        beta = [] if norm.beta is None else [_dot(self.end, norm.beta.to(self.end))]
        return [_dot(self.last[name], direction) for name in embedding_parts(self.model.config)] + beta

    def block(self, layer: int, grain: Grain) -> tuple[list[Float[Tensor, "b c"]], dict[str, Tensor]]:
        """The columns of one block at this grain, and each head split by source if that is asked."""
        columns: list[Tensor] = []
        extra: dict[str, Tensor] = {}
        for sublayer in self.model.config.sublayers:
            if sublayer not in MLPS and grain in ("head", "source"):
                found, sources = self._heads(layer, sublayer, grain)
                columns += found
                extra |= {} if sources is None else {f"{sublayer}_{layer}": sources}
            elif sublayer in MLPS and grain == "neuron":
                columns += self._neurons(layer, sublayer)
            else:
                columns.append(_dot(self.last[site(layer, f"hook_{sublayer}")], self.at[layer, sublayer]))
            if (layer, sublayer) in self.betas:
                columns.append(self.betas[layer, sublayer])
        return columns, extra

    def _heads(
        self, layer: int, sublayer: str, grain: Grain
    ) -> tuple[list[Float[Tensor, "b c"]], Float[Tensor, "b h k"] | None]:
        """The heads' columns and their bias'; with `grain="source"` also each head's by source."""
        mixer = sublayer.removesuffix("_out")
        w = self.weights.layer(layer, cross=sublayer == "cross_attn_out")
        z = self.last[site(layer, f"{mixer}.hook_z")]
        output = einsum(z, w.W_O.to(z), "b h e, h e d -> b d") + w.b_O.to(z)
        direction, beta = self._at_output(layer, sublayer, output)
        folded = einsum(w.W_O.to(z), direction, "h e d, b d -> b h e")
        heads = (z * folded).sum(-1)
        columns = [heads, _dot(direction, w.b_O.to(z)) + beta]
        if grain == "head":
            return columns, None
        v = self.last[site(layer, f"{mixer}.hook_v")][:, :, self.weights.kv_head()]
        pattern = self.last[site(layer, f"{mixer}.hook_pattern")]
        if edits_at(self.model, layer, [f"{mixer}.hook_z"]):
            shares = head_shares(self.model, layer, pattern[:, :, None], v, z[:, None])
            pattern = pattern * shares[:, :, 0]
        sources = einsum(v, folded, "b k h e, b h e -> b h k") * pattern
        edited = [edit.name for edit in self.model.edits if layer_of(edit, self.model) == layer]
        under = f" under the edits of {', '.join(edited)}" if edited else ""
        check_sum(sources.movedim(-1, 0), heads, f"sources of layer {layer}{under}", self.model.dtype)
        return columns, sources

    def _neurons(self, layer: int, sublayer: str) -> list[Float[Tensor, "b c"]]:
        """Every neuron's column, and the bias'."""
        w = self.weights.layer(layer, before=sublayer == "mlp_before_out")
        post = self.last[site(layer, f"{sublayer.removesuffix('_out')}.hook_post")]
        assert w.W_out is not None and w.b_out is not None
        direction, beta = self._at_output(layer, sublayer, post @ w.W_out.to(post) + w.b_out.to(post))
        return [post * (direction @ w.W_out.to(post).mT), _dot(direction, w.b_out.to(post)) + beta]

    def _at_output(
        self, layer: int, sublayer: str, output: Float[Tensor, "b d"]
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b 1"] | float]:
        """The direction at a sublayer's bare output, and what beta of the norm after it adds."""
        norm, direction = output_norm(self.model, layer, sublayer).of(output), self.at[layer, sublayer]
        beta = 0.0 if norm.beta is None else _dot(direction, norm.beta.to(direction))
        return norm.back(direction), beta


def _dot(x: Float[Tensor, "b d"], y: Float[Tensor, "*#b d"]) -> Float[Tensor, "b 1"]:
    return (x * y).sum(-1, keepdim=True)
