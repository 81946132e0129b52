"""An encoder and a decoder that attends to it; one tap observes both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.core.boundary import public
from interp.model import sites
from interp.model.attention import Memory
from interp.model.config import AnyConfig, EncoderDecoderConfig
from interp.model.kv_cache import KVCache
from interp.model.tap import Edit, Read, Tap
from interp.model.transformer import Transformer

SIDES = ("encoder", "decoder")


@public(plain_pass=True)
class EncoderDecoder(nn.Module):
    """Two Transformers: `encode` a source into a memory, `decode` a target that attends to it.

    Sites are those of a Transformer with the side before them: `encoder.blocks.0.attn.hook_pattern`,
    `decoder.blocks.1.cross_attn.hook_z`. Either side alone is a Transformer like any other.
    """

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Transformer(config.encoder)
        self.decoder = Transformer(config.decoder)
        self.tie()

    def tie(self) -> None:
        """Make shared matrices one: both embeddings, and the unembedding where it is tied."""
        if self.config.shared_embedding:
            self.encoder.embed.weight = self.decoder.embed.weight
        self.decoder.tie()

    def forward(
        self,
        source: Int[Tensor, "b s"],
        target: Int[Tensor, "b p"],
        tap: Tap | None = None,
        *,
        source_keep: Bool[Tensor, "b s"] | None = None,
        target_keep: Bool[Tensor, "b p"] | None = None,
    ) -> Float[Tensor, "b p v"]:
        """Logits at every position of the target, which begins with the start token and is read as given.

        Args:
            source: [b, s], ids of the encoder's side.
            target: [b, p], ids of the decoder's side.
            tap: reads and edits of the pass, at sites of either side.
            source_keep: [b, s], True at real tokens; None: no padding.
            target_keep: [b, p], True at real tokens; None: no padding.

        Returns:
            [b, p, v].

        Raises:
            ValueError: ids, masks or lengths that do not fit.
            KeyError: sites without a side.
        """
        taps = {side: None if tap is None else _tap_of_side(tap, side) for side in SIDES}
        memory = self.encode(source, taps["encoder"], keep=source_keep)
        logits = self.decode(target, memory, taps["decoder"], keep=target_keep)
        if tap is not None:
            _gather_answers(tap, taps)
        return logits

    def encode(
        self, source: Int[Tensor, "b s"], tap: Tap | None = None, *, keep: Bool[Tensor, "b s"] | None = None
    ) -> Memory:
        """The encoder's final states, normed where it ends in a norm.

        Args:
            source: [b, s], ids.
            tap: reads and edits, at sites without the side in their names.
            keep: [b, s], True at real tokens; None: no padding.

        Returns:
            `Memory`: the states [b, s, d] and the mask.
        """
        return Memory(self.encoder(source, tap, keep=keep), keep)

    def decode(
        self,
        target: Int[Tensor, "b p"],
        memory: Memory,
        tap: Tap | None = None,
        *,
        keep: Bool[Tensor, "b p"] | None = None,
        cache: KVCache | None = None,
        logits_at: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b p v"]:
        """Logits of the target given a memory; with a cache, of the tokens that are new.

        Args:
            target: [b, p], ids.
            memory: what `encode` returned.
            tap: reads and edits, at sites without the side in their names.
            keep: [b, p], True at real tokens; None: no padding.
            cache: keys and values of earlier tokens.
            logits_at: [b, n], columns of each row whose logits are wanted; None: all.

        Returns:
            [b, p, v], or [b, n, v].
        """
        return self.decoder(target, tap, keep=keep, cache=cache, logits_at=logits_at, memory=memory)

    @property
    def device(self) -> torch.device:
        """Where the embeddings are."""
        return self.decoder.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.decoder.dtype


@public()
def build(config: AnyConfig) -> Transformer | EncoderDecoder:
    """The freshly initialised model that a config describes, of one stack or of an encoder and a decoder.

    Args:
        config: a `ModelConfig` or an `EncoderDecoderConfig`.

    Returns:
        `Transformer` for a `ModelConfig`, `EncoderDecoder` for an `EncoderDecoderConfig`.
    """
    return EncoderDecoder(config) if isinstance(config, EncoderDecoderConfig) else Transformer(config)


def names(config: EncoderDecoderConfig, *, on_demand: bool = False) -> tuple[str, ...]:
    """Every site of both sides in the order of the forward pass."""
    return tuple(
        f"{side}.{name}" for side in SIDES for name in sites.names(getattr(config, side), on_demand=on_demand)
    )


def edits_of(edits: Iterable[Edit], side: str) -> tuple[Edit, ...]:
    """The edits of one side, their sites without the prefix of the side.

    Raises:
        KeyError: an edit that names no side.
    """
    given = tuple(edits)
    _check_sides(given)
    return tuple(
        replace(e, where=e.site.removeprefix(f"{side}.")) for e in given if e.site.startswith(f"{side}.")
    )


def _check_sides(items: Iterable[Read | Edit]) -> None:
    if bad := [item.site for item in items if item.site.partition(".")[0] not in SIDES]:
        raise KeyError(f"sites of an encoder-decoder begin with encoder. or decoder., got {bad[0]!r}")


def _tap_of_side(tap: Tap, side: str) -> Tap:
    """A tap with the reads and edits of one side, their sites without the prefix of the side."""
    _check_sides(tap.reads)
    prefix = f"{side}."
    reads = [replace(r, site=r.site.removeprefix(prefix)) for r in tap.reads if r.site.startswith(prefix)]
    return Tap(reads, edits_of(tap.edits, side))


def _gather_answers(tap: Tap, taps: dict[str, Tap | None]) -> None:
    """Copy the values read on both sides into the tap of the whole model."""
    tap.values, tap.live = {}, {}
    for read in tap.reads:
        side, _, name = read.site.partition(".")
        side_tap = taps[side]
        assert side_tap is not None
        inner = replace(read, site=name)
        if inner in side_tap.values:
            tap.values[read] = side_tap.values[inner]
        if inner in side_tap.live:
            tap.live[read] = side_tap.live[inner]
