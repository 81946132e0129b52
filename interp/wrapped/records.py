"""The config of a wrapped network: which sites were proven, layer by layer, and why the others do not exist."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

from interp.model.attention import Attention
from interp.model.block import Block, UsualBlock
from interp.model.config import ModelConfig
from interp.model.mounted import ERROR, FEATURES
from interp.model.records import AnyMLP, Mixer, Traits
from interp.model.sites import Site

_site = partial(Site, before="attn.hook_attn_scores")


@dataclass(frozen=True)
class WrappedMixer(Mixer):
    """The attention (or other mixer of positions) of one wrapped block, and the proven sites of that block."""

    offered: tuple[str, ...] = ()
    """The sites of the block by their short names (`attn.hook_z`)."""
    distribution: bool = False
    """Whether each row of the pattern was seen to be nonnegative with a sum of at most 1."""
    additive: bool = False
    """Whether z is the pattern times the values and nothing after it."""
    values: bool = False
    """Whether values are a known linear map of the normed stream."""
    queries: bool = False
    """Whether queries and keys are too, and each score is a constant factor times q . k."""

    own_sites = (
        _site("attn.hook_rot_q", "b p h e", "wrapped queries as scores are made of them: normed and rotated"),
        _site("attn.hook_rot_k", "b p g e", "wrapped keys as scores are made of them: normed and rotated"),
    )

    @property
    def traits(self) -> Traits:
        """The traits that were proven; a sweep treats every wrapped mixer as one that keeps a state."""
        return Traits(
            queries=self.queries, values=self.values, bilinear=self.queries, reads_by_qkv=False, rotated=False,
            scored="attn.hook_attn_scores" in self.offered,
            patterned="attn.hook_pattern" in self.offered,
            distribution=self.distribution, additive=self.additive, keyed=False, stateful=True,
        )  # fmt: skip

    def __str__(self) -> str:
        return "a wrapped network's own code"

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """NotImplementedError: the module is the wrapped network's own."""
        raise NotImplementedError("a wrapped network is not built from its config")


@dataclass(frozen=True)
class WrappedMLP(AnyMLP):
    """What a wrapped block adds to the stream besides its attention: the MLP, of which only this is known."""

    d_mlp: int = 0
    """Input width of its last linear map; 0 where that is not known."""
    mixes: bool = False
    """Whether its output at one position depends on other positions."""

    words = "an MLP inside a wrapped network"
    no_matrices = "an MLP inside a wrapped network, whose matrices are not proven"

    @property
    def pointwise(self) -> bool:  # type: ignore[override]
        """Whether its output at each position depends on that position alone."""
        return not self.mixes

    @property
    def width(self) -> int:
        """Multiplications for one token in units of d_model, counted as for a gated MLP (three matrices)."""
        return 3 * self.d_mlp


@dataclass(frozen=True)
class WrappedBlock(UsualBlock):
    """A block of a wrapped network: what it adds to the stream, by which factors, and why a site is missing."""

    added: tuple[str, ...] = ("attn_out", "mlp_out")
    """Sublayers of the block, in the order in which they are computed."""
    before: tuple[str, ...] = ("attn_out",)
    """Sublayers included in `hook_resid_mid`; none in blocks without a middle."""
    factors: tuple[float, ...] = (1.0, 1.0)
    """Factor on the output of each sublayer."""
    outside: tuple[str, ...] = ()
    """The sites outside the blocks that were proven."""
    refused: tuple[tuple[str, str], ...] = ()
    """Sites (by full name) and options of a pass that are not offered, and why."""

    proven = True
    unusual = "is a wrapped network, of whose blocks only what they add is known"
    own_sites = (
        Site(
            "hook_more_out",
            "b p d",
            "what a third part of a wrapped block adds to the stream",
            lambda c: "more_out" in c.sublayers,
            before="hook_mlp_out",
        ),
    )

    def sublayers(self, config: ModelConfig) -> dict[str, str]:
        """The sublayers that were found to sum to the block's change of the stream."""
        return {name: "hook_resid_mid" if name in self.before else "hook_resid_post" for name in self.added}

    def factor(self, sublayer: str, config: ModelConfig) -> float:
        """The factor on a sublayer's output before it is added to the stream."""
        return self.factors[self.added.index(sublayer)]

    def offers(self, name: str, config: ModelConfig) -> bool:
        """Whether a site was proven, outside the blocks or in at least one layer, or is computed from others that were.

        The latter are features and errors of dictionaries, which are mounted at proven sites only.
        """
        return name in (FEATURES, ERROR, *self.outside) or any(
            isinstance(mixer, WrappedMixer) and name in mixer.offered for mixer in config.mixers
        )

    def why_not(self, name: str) -> str:
        """Why a site or an option of a pass is not offered; empty if that is not known."""
        return self._reasons.get(name, "")

    @cached_property
    def _reasons(self) -> dict[str, str]:
        return dict(self.refused)

    def build(self, config: ModelConfig, layer: int) -> Block:
        """NotImplementedError: the modules are the wrapped network's own."""
        raise NotImplementedError("a wrapped network is not built from its config")
