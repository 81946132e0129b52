"""Multi-head attention (grouped or not) with every part a site."""

from dataclasses import dataclass

from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from interp.model.attend import attend
from interp.model.config import ModelConfig
from interp.model.kv_cache import KVCache
from interp.model.mask import Mask
from interp.model.norm import Normalize
from interp.model.position import Rotation
from interp.model.tap import Scope, at

SPLIT_INPUTS = {"q": "hook_q_input", "k": "hook_k_input", "v": "hook_v_input"}


@dataclass(frozen=True)
class Pass:
    """What all blocks of one forward pass share."""

    mask: Mask
    rotation: Rotation | None
    cache: KVCache | None


class Attention(nn.Module):
    """Attention of one block. Queries, keys and values come from one fused matrix, rows ordered q, k, v."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = [config.n_heads, config.kv_heads, config.kv_heads]
        self.d_head = config.head_width
        self.scale = config.score_scale(layer)
        self.qkv = nn.Linear(config.d_model, sum(self.heads) * self.d_head, bias=config.qkv_bias)
        self.out = nn.Linear(config.n_heads * self.d_head, config.d_model, bias=config.out_bias)

    def forward(
        self, resid: Float[Tensor, "b p d"], norm: Normalize, shared: Pass, tap: Scope | None
    ) -> Float[Tensor, "b p d"]:
        """What attention adds to the residual stream, from the stream before the norm."""
        q, k, v = self._project(resid, norm, tap)
        if shared.rotation is not None:
            q = at(tap, "attn.hook_rot_q", shared.rotation.apply(q))
            k = at(tap, "attn.hook_rot_k", shared.rotation.apply(k))
        if shared.cache is not None:
            k, v = shared.cache.append(self.layer, k, v)
        z = at(tap, "attn.hook_z", attend(q, k, v, shared.mask, self.scale, tap))
        return at(tap, "hook_attn_out", self._write(z, tap))

    def _project(
        self, resid: Float[Tensor, "b p d"], norm: Normalize, tap: Scope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[b p h|g e]`, each a site."""
        qkv = rearrange(self.qkv(norm(resid, tap)), "b p (n e) -> b p n e", e=self.d_head)
        heads = dict(zip("qkv", qkv.split(self.heads, 2), strict=True))
        if tap is not None:
            heads = {part: self._from_split(part, x, resid, norm, tap) for part, x in heads.items()}
        q, k, v = (at(tap, f"attn.hook_{part}", heads[part]) for part in "qkv")
        return q, k, v

    def _from_split(
        self, part: str, x: Float[Tensor, "b p h e"], resid: Tensor, norm: Normalize, tap: Scope
    ) -> Float[Tensor, "b p h e"]:
        """Recompute one of q, k, v from per-head copies of the residual, if those are edited or differentiated."""
        site = SPLIT_INPUTS[part]
        if not tap.wants(site):
            return x
        copies = resid.unsqueeze(2).expand(-1, -1, x.shape[2], -1)
        alters = tap.alters(site)
        if alters and tap.alters(f"{norm.name}.hook_normalized", f"{norm.name}.hook_scale"):
            raise ValueError(
                f"{site} and the sites of {norm.name} cannot be edited or differentiated in the same pass and layer"
            )
        copies = at(tap, site, copies)
        if not alters:
            return x
        weight, bias = self.part(part)
        out = einsum(norm(copies), weight, "b p h d, h e d -> b p h e")
        return out if bias is None else out + bias

    def _write(self, z: Float[Tensor, "b p h e"], tap: Scope | None) -> Float[Tensor, "b p d"]:
        """z @ W_O + b_O; per-head results only where somebody asks for them."""
        if tap is not None and tap.wants("attn.hook_result"):
            weight = rearrange(self.out.weight, "d (h e) -> h d e", e=self.d_head)
            result = at(tap, "attn.hook_result", einsum(z, weight, "b p h e, h d e -> b p h d"))
            if tap.alters("attn.hook_result"):
                summed = result.sum(2)
                return summed if self.out.bias is None else summed + self.out.bias
        return self.out(rearrange(z, "b p h e -> b p (h e)"))

    def part(self, name: str) -> tuple[Float[Tensor, "h e d"], Float[Tensor, "h e"] | None]:
        """Weight `[h e d]` and bias `[h e]` of "q", "k" or "v" as views of the fused matrix."""
        i = "qkv".index(name)
        weight = rearrange(self.qkv.weight, "(n e) d -> n e d", e=self.d_head).split(self.heads)[i]
        if self.qkv.bias is None:
            return weight, None
        return weight, rearrange(self.qkv.bias, "(n e) -> n e", e=self.d_head).split(self.heads)[i]
