"""The model: ordinary PyTorch whose forward takes one optional argument, `tap`."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.core.shapes import shape_text
from interp.model.attention import Pass
from interp.model.block import Block
from interp.model.config import Learned, ModelConfig, NoNorm, Rotary
from interp.model.kv_cache import KVCache
from interp.model.mask import attention_mask, position_ids
from interp.model.norm import Normalize
from interp.model.position import Rotation
from interp.model.tap import Scope, Tap, at

IGNORED = -100
"""A target that counts for nothing in `F.cross_entropy`."""


class Transformer(nn.Module):
    """A decoder (or, with `causal=False`, an encoder) whose every part can be read and edited.

    With `tap=None` no site exists and attention is the fused kernel.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.d_vocab, config.d_model)
        learned = isinstance(config.position, Learned)
        self.pos_embed = nn.Embedding(config.n_ctx, config.d_model) if learned else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        norm = config.norm if config.final_norm else NoNorm()
        self.ln_final = Normalize(norm, config.d_model, "ln_final")
        self.unembed = nn.Linear(config.d_model, config.d_vocab, bias=config.unembed_bias)
        if config.tied:
            self.unembed.weight = self.embed.weight
        self._initialise()

    def forward(
        self,
        tokens: Tensor,
        tap: Tap | None = None,
        start: int = 0,
        stop: int | None = None,
        *,
        keep: Bool[Tensor, "b p"] | None = None,
        cache: KVCache | None = None,
        logits_at: Int[Tensor, "b n"] | None = None,
    ) -> Tensor:
        """Logits `[b p v]`; or, with `stop`, the residual stream entering block `stop`, `[b p d]`.

        tokens: ids `[b p]`; with `start > 0` the residual stream entering block `start`, `[b p d]`.
        keep: True at real tokens; None = no padding. Positions count the kept tokens only.
        logits_at: columns of each row whose logits are wanted; the others are never computed, and the sites after the
        blocks (`ln_final.*`, `unembed.hook_out`) hold these n columns.
        Errors: ValueError for ids, shapes, lengths or layers that do not fit the model.
        """
        n_layers = self.config.n_layers
        last = n_layers if stop is None else stop
        self._check(tokens, start, last, keep, cache)
        if stop is not None and logits_at is not None:
            raise ValueError(f"logits_at requires a pass to the logits; this one stops before block {stop}")
        if tap is not None:
            tap.open(self.config, start, stop)
        outside = None if tap is None else tap.scope()
        shared, positions, seen = self._shared(tokens, keep, cache)
        resid = tokens if start else self._embedded(tokens, positions, outside)
        for layer in range(start, last):
            resid = self.blocks[layer](resid, shared, None if tap is None else tap.scope(layer))
            if tap is not None and tap.finished:
                return resid
        if cache is not None:
            cache.advance(tokens.shape[1], seen)
        if stop is not None:
            return resid
        if logits_at is not None:
            resid = resid[torch.arange(len(resid), device=resid.device)[:, None], logits_at]
        return self.read_out(resid, outside)

    def read_out(self, resid: Float[Tensor, "*b d"], tap: Scope | None = None) -> Float[Tensor, "*b v"]:
        """Logits of a residual stream: final norm (recomputed), then unembedding."""
        return at(tap, "unembed.hook_out", self.unembed(self.ln_final(resid, tap)))

    def block(self, layer: int) -> Block:
        """Block `layer`, typed."""
        block = self.blocks[layer]
        assert isinstance(block, Block)
        return block

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.embed.weight.dtype

    def _embedded(
        self, tokens: Int[Tensor, "b p"], positions: Int[Tensor, "#b p"], tap: Scope | None
    ) -> Float[Tensor, "b p d"]:
        resid = at(tap, "hook_embed", self.embed(tokens))
        if self.pos_embed is None:
            return resid
        place = self.pos_embed(positions)
        if tap is not None:
            place = at(tap, "hook_pos_embed", place.expand_as(resid))
        return resid + place

    def _shared(
        self, tokens: Tensor, keep: Bool[Tensor, "b p"] | None, cache: KVCache | None
    ) -> tuple[Pass, Int[Tensor, "b p"], Bool[Tensor, "b k"] | None]:
        """Mask and rotation of this pass, its position ids, and the keep-mask including the cache's past."""
        rows, n = tokens.shape[:2]
        past = 0 if cache is None else cache.length
        seen = keep if cache is None else cache.extended_keep(keep, rows, n)
        positions = position_ids(n, past, seen, tokens.device)
        rotary = self.config.position
        rotation = None
        if isinstance(rotary, Rotary):
            rotation = Rotation.at(rotary, self.config.rotary_dim, positions, self.dtype)
        mask = attention_mask(self.config, n, past, seen, tokens.device)
        return Pass(mask, rotation, cache), positions, seen

    def _check(
        self,
        tokens: Tensor,
        start: int,
        last: int,
        keep: Tensor | None,
        cache: KVCache | None,
    ) -> None:
        config = self.config
        if not 0 <= start <= last <= config.n_layers:
            raise ValueError(
                f"requires 0 <= start <= stop <= {config.n_layers} layers, got {start} and {last}"
            )
        if start:
            if tokens.ndim != 3 or tokens.shape[2] != config.d_model:
                raise ValueError(
                    f"with start={start} a residual stream [batch, pos, {config.d_model}] is required, "
                    f"got shape {shape_text(tokens.shape)}"
                )
        elif tokens.ndim != 2 or tokens.is_floating_point():
            raise ValueError(
                f"token ids [batch, pos] are required, got {tokens.dtype} of shape {shape_text(tokens.shape)}"
            )
        n = tokens.shape[1] + (0 if cache is None else cache.length)
        if tokens.shape[1] == 0 or tokens.shape[0] == 0:
            raise ValueError(f"at least one token is required, got shape {shape_text(tokens.shape)}")
        if n > config.n_ctx:
            raise ValueError(f"the context holds {config.n_ctx} tokens, got {n}")
        if keep is not None and keep.dtype != torch.bool:
            raise ValueError(f"keep must be boolean, True at real tokens, got {keep.dtype}")
        if keep is not None and keep.shape != tokens.shape[:2]:
            raise ValueError(
                f"keep must have the shape {shape_text(tokens.shape[:2])} of the tokens, got {shape_text(keep.shape)}"
            )
        if cache is not None:
            cache.room(*tokens.shape[:2])
        if not start:
            self._check_ids(tokens)

    def _check_ids(self, tokens: Int[Tensor, "b p"]) -> None:
        """Out-of-range ids fault asynchronously on a GPU; there the embedding's own assertion must do."""
        if tokens.device.type != "cpu":
            return
        low, high = (int(x) for x in torch.aminmax(tokens))
        if low < 0 or high >= self.config.d_vocab:
            raise ValueError(
                f"token ids must be in [0, {self.config.d_vocab - 1}], got {low if low < 0 else high}"
            )

    def _initialise(self) -> None:
        """GPT-2's scheme: normal(0, 0.02), writers scaled by 1/sqrt(2 layers), biases 0, norms 1."""
        blocks = [self.block(layer) for layer in range(self.config.n_layers)]
        writers = {id(b.attn.out) for b in blocks} | {id(b.mlp.out) for b in blocks if b.mlp}
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                narrow = (2 * self.config.n_layers) ** -0.5 if id(module) in writers else 1.0
                nn.init.normal_(module.weight, std=0.02 * narrow)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def next_token_loss(
    logits: Float[Tensor, "b p v"],
    tokens: Int[Tensor, "b p"],
    keep: Bool[Tensor, "b p"] | None = None,
) -> Float[Tensor, "b p-1"]:
    """Cross-entropy in nats of each token given those before it; 0 where the token or its predecessor is padding.

    Column i is the loss of token i + 1; ValueError for a single column, which predicts nothing. For a mean divide
    the sum by `(keep[:, 1:] & keep[:, :-1]).sum()`.
    """
    if tokens.shape[1] < 2:
        raise ValueError(f"a loss requires at least two tokens, got shape {shape_text(tokens.shape)}")
    wide = torch.promote_types(logits.dtype, torch.float32)
    target = F.pad(
        tokens[:, 1:], (0, 1), value=IGNORED
    )  # the last column predicts nothing; so no logits are copied
    flat = F.cross_entropy(
        logits.to(wide).flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="none"
    )
    loss = flat.view(tokens.shape)[:, :-1]
    return loss if keep is None else loss * (keep[:, 1:] & keep[:, :-1])


def mean_next_token_loss(
    logits: Float[Tensor, "b p v"],
    tokens: Int[Tensor, "b p"],
    keep: Bool[Tensor, "b p"] | None = None,
) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats per predicted token; padding does not count."""
    loss = next_token_loss(logits, tokens, keep)
    if keep is None:
        return loss.mean()
    count = (keep[:, 1:] & keep[:, :-1]).sum()
    if not bool(count):
        raise ValueError("a loss requires two neighbouring real tokens; the keep-mask leaves none")
    return loss.sum() / count
