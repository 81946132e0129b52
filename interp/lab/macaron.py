"""Macaron blocks: half an MLP, attention, half an MLP."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from jaxtyping import Float
from torch import Tensor

from interp.model.block import Block, UsualBlock
from interp.model.config import ModelConfig
from interp.model.norm import Normalize
from interp.model.records import AnyMLP, all_records, requires
from interp.model.sites import Site, norm_sites
from interp.model.tap import Scope, at

_NEXT = "ln1.hook_scale"
_site = partial(Site, before=_NEXT)


def _renamed(site: Site) -> Site:
    """The site of the MLP before attention that corresponds to a site of the MLP after it."""
    return replace(site, name=f"mlp_before.{site.name.removeprefix('mlp.')}", before=_NEXT)


@dataclass(frozen=True)
class Macaron(UsualBlock):
    """Macaron blocks: a second MLP before attention; each of the two adds half of its output.

    Lu et al. 2019, "Understanding and Improving Transformer From a Multi-Particle Dynamic System Point of View".
    """

    unusual = "has two MLPs in a block (Macaron)"
    attention_reads = "hook_resid_pre_attn"
    own_sites = (
        _site("hook_mlp_before_in", "b p d", "residual read by the first MLP, before ln0", on_demand=True),
        *norm_sites("ln0", "before the first MLP", lambda c: c.normed, before=_NEXT),
        _site("hook_mlp_before_out", "b p d", "what the first MLP adds to the stream: half its output"),
        _site("hook_resid_pre_attn", "b p d", "residual stream after the first MLP, which attention reads"),
    )

    @classmethod
    def any_sites(cls) -> tuple[Site, ...]:
        """Sites of the block and of the first MLP, whatever it is."""
        mlps = [kind for kind in all_records().values() if issubclass(kind, AnyMLP) and kind.pointwise]
        return cls._around(site for kind in mlps for site in kind.any_sites())

    def sites(self, config: ModelConfig) -> tuple[Site, ...]:
        """Sites of the block and of the first MLP."""
        return self._around(() if config.mlp is None else config.mlp.sites(config))

    @classmethod
    def _around(cls, inner: Iterable[Site]) -> tuple[Site, ...]:
        return (*cls.own_sites[:3], *map(_renamed, inner), *cls.own_sites[3:])

    def check(self, config: ModelConfig) -> None:
        """ValueError for norms in other places, and for what has a place of its own in the block."""
        plain = config.norm_place == "pre" and config.mlp is not None and config.pointwise
        requires(
            plain and not config.cross_attention and not config.parallel,
            "norm_place 'pre', an MLP of single positions, no parallel and no cross-attention for Macaron blocks",
        )

    def sublayers(self, config: ModelConfig) -> dict[str, str]:
        """The sublayers of the block, `mlp_before_out` first."""
        return {"mlp_before_out": self.attention_reads, **super().sublayers(config)}

    def factor(self, sublayer: str, config: ModelConfig) -> float:
        """Factor on a sublayer's output: half for either MLP."""
        return config.residual_scale * (1.0 if sublayer == "attn_out" else 0.5)

    def build(self, config: ModelConfig, layer: int) -> Block:
        """The module of a layer."""
        return MacaronBlock(config, layer)


class MacaronBlock(Block):
    """A block in which another MLP, `mlp_before`, reads through ln0 and adds to the stream before attention."""

    def _build_first(self, layer: int) -> None:
        config = self.config
        assert config.mlp is not None
        self.ln0 = Normalize(config.norm, config.d_model, "ln0")
        self.mlp_before = config.mlp.build(config.d_model, layer, "mlp_before")

    def input_norm(self, sublayer: str) -> Normalize:
        """The norm before a sublayer: ln0 for the first MLP."""
        return self.ln0 if sublayer == "mlp_before_out" else super().input_norm(sublayer)

    def _before_attention(self, resid: Float[Tensor, "*b d"], tap: Scope | None) -> Float[Tensor, "*b d"]:
        normed = self.ln0(at(tap, "hook_mlp_before_in", resid), tap)
        resid = resid + self._added("mlp_before_out", self.mlp_before(normed, tap), tap)
        return at(tap, "hook_resid_pre_attn", resid)
