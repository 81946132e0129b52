"""The passes of a `HookedTransformer`: what goes in, and whether the native model or the modules compute it."""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from interp.compat.transformer_lens.cache import TransformerLensKeyValueCache
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.defaults import USE_DEFAULT_VALUE, LocallyOverridenDefaults
from interp.compat.transformer_lens.engine import Caching, ModelEngine, Passage
from interp.compat.transformer_lens.losses import lm_cross_entropy_loss
from interp.compat.transformer_lens.tokenization import get_attention_mask

SingleLoss = Float[Tensor, ""]
NOTHING = nullcontext()
LossPerToken = Float[Tensor, "b p"]
Loss = SingleLoss | LossPerToken


class Output(NamedTuple):
    """What `return_type="both"` gives."""

    logits: Float[Tensor, "b p v"]
    loss: Tensor


class Passes(nn.Module):
    """The forward pass in all its forms; a mixin of `HookedTransformer`."""

    cfg: HookedTransformerConfig
    tokenizer: Any
    engine: ModelEngine
    embed: Any
    pos_embed: Any
    hook_embed: Any
    hook_pos_embed: Any
    hook_tokens: Any
    blocks: Any
    ln_final: Any
    unembed: Any
    to_tokens: Any
    hooks: Any

    def forward(
        self,
        input: Any,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
        start_at_layer: int | None = None,
        tokens: Tensor | None = None,
        shortformer_pos_embed: Tensor | None = None,
        attention_mask: Tensor | None = None,
        stop_at_layer: int | None = None,
        past_kv_cache: TransformerLensKeyValueCache | None = None,
    ) -> Any:
        """Logits `[b p v]`, the loss in nats, both, or None, by `return_type`.

        input: tokens `[b p]` or `[p]`, a text or several; with `start_at_layer` the stream entering that layer. With
        `stop_at_layer` the result is the stream entering it; both may be negative. tokens: for a loss with
        `start_at_layer`. loss_per_token: `[b p-1]` instead of the mean. attention_mask: 1 at real tokens; without one
        it is made from the padding where the tokenizer pads on the left or a cache is given, which needs a tokenizer.
        """
        return self._pass(
            input, return_type, loss_per_token, prepend_bos, padding_side, start_at_layer, tokens,
            shortformer_pos_embed, attention_mask, stop_at_layer, past_kv_cache,
        )  # fmt: skip

    def _pass(
        self,
        input: Any,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
        start_at_layer: int | None = None,
        tokens: Tensor | None = None,
        shortformer_pos_embed: Tensor | None = None,
        attention_mask: Tensor | None = None,
        stop_at_layer: int | None = None,
        past_kv_cache: TransformerLensKeyValueCache | None = None,
        caching: Caching | None = None,
    ) -> Any:
        if start_at_layer is not None:
            assert isinstance(input, Tensor), (
                "start_at_layer requires the residual stream entering that layer"
            )
            x = input
        else:
            with self._overridden(prepend_bos, padding_side):
                x, attention_mask = self._prepared(input, attention_mask, past_kv_cache)
            tokens = x
        first, end, _ = slice(start_at_layer, stop_at_layer).indices(self.cfg.n_layers)
        passage = Passage(
            x, None if start_at_layer is None else first, None if stop_at_layer is None else max(first, end),
            attention_mask, past_kv_cache, return_type is not None, place=shortformer_pos_embed,
        )  # fmt: skip
        output = self._run(passage, caching)
        if stop_at_layer is not None or return_type == "logits":
            return output
        if return_type is None:
            return None
        assert tokens is not None, "tokens must be passed in if return_type is 'loss' or 'both'"
        mask = None if attention_mask is None else attention_mask[:, -tokens.shape[1] :]
        loss = self.loss_fn(output, tokens, mask, per_token=loss_per_token)
        if return_type in ("loss", "both"):
            return loss if return_type == "loss" else Output(output, loss)
        logging.warning("Invalid return_type passed in: %s", return_type)
        return None

    def _overridden(self, prepend_bos: bool | None, padding_side: str | None) -> AbstractContextManager[None]:
        if prepend_bos is None and padding_side is None:
            return NOTHING
        return LocallyOverridenDefaults(self, prepend_bos=prepend_bos, padding_side=padding_side)

    def _prepared(
        self, input: Any, mask: Tensor | None, past: TransformerLensKeyValueCache | None
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens `[b p]`, and which of them (and of the cache) are real; None: all."""
        if isinstance(input, (str, list)):
            assert self.tokenizer is not None, "Must provide a tokenizer if passing a string to the model"
            tokens = self.to_tokens(input)
        else:
            tokens = input.to(self.cfg.device)
        tokens = tokens[None] if tokens.ndim == 1 else tokens
        left = self.tokenizer is not None and self.tokenizer.padding_side == "left"
        if mask is None and not left and past is None:
            return tokens, None
        if mask is None:
            if self.tokenizer is None:
                raise ValueError("Cannot compute attention mask without a tokenizer.")
            mask = get_attention_mask(self.tokenizer, tokens, self.cfg.default_prepend_bos)
        assert mask.shape == tokens.shape, (
            f"Attention mask shape {mask.shape} does not match tokens shape {tokens.shape}"
        )
        mask = mask.to(self.cfg.device)
        return tokens, mask if past is None else past.append_attention_mask(mask)

    def _run(self, passage: Passage, caching: Caching | None = None) -> Any:
        """The output of a pass."""
        if passage.first is None and self.cfg.use_hook_tokens:
            passage = replace(passage, x=self.hook_tokens(passage.x))
            if caching is not None and "hook_tokens" in caching.names:
                caching.into["hook_tokens"] = caching.keep(passage.x, "hook_tokens")
                caching = replace(caching, names=tuple(n for n in caching.names if n != "hook_tokens"))
        return self.engine.run(passage, caching)

    def input_to_embed(
        self,
        input: Any,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
        attention_mask: Tensor | None = None,
        past_kv_cache: TransformerLensKeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The stream entering the first block, tokens, position vectors (shortformer only) and attention mask."""
        with LocallyOverridenDefaults(self, prepend_bos=prepend_bos, padding_side=padding_side):
            tokens, mask = self._prepared(input, attention_mask, past_kv_cache)
        offset = self.get_pos_offset(past_kv_cache, len(tokens))
        if self.cfg.use_hook_tokens:
            tokens = self.hook_tokens(tokens)
        resid, place = self.get_residual(
            self.hook_embed(self.embed(tokens)), offset, attention_mask=mask, tokens=tokens
        )
        return resid, tokens, place, mask

    def get_pos_offset(self, past_kv_cache: TransformerLensKeyValueCache | None, batch_size: int) -> int:
        """How many positions a cache holds."""
        if past_kv_cache is None:
            return 0
        rows, length = past_kv_cache[0].past_keys.shape[:2]
        assert rows == batch_size, f"the cache holds {rows} rows, the batch has {batch_size}"
        return length

    def get_residual(
        self,
        embed: Tensor,
        pos_offset: int,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        attention_mask: Tensor | None = None,
        tokens: Tensor | None = None,
        return_shortformer_pos_embed: bool = True,
        device: Any = None,
    ) -> Any:
        """The stream entering the first block from token embeddings, and position vectors for shortformer."""
        kind, place = self.cfg.positional_embedding_type, None
        if kind in ("standard", "shortformer"):
            rows = embed[..., 0].long() if tokens is None else tokens
            vectors = self.hook_pos_embed(self.pos_embed(rows, pos_offset, attention_mask))
            embed, place = (embed + vectors, None) if kind == "standard" else (embed, vectors)
        elif kind not in ("rotary", "alibi"):
            raise ValueError(f"Invalid positional_embedding_type passed in {kind}")
        return (embed, place) if return_shortformer_pos_embed else embed

    def loss_fn(
        self, logits: Tensor, tokens: Tensor, attention_mask: Tensor | None = None, per_token: bool = False
    ) -> Tensor:
        """The cross entropy of each next token, in nats: the mean over real ones, or `[b p-1]`."""
        return lm_cross_entropy_loss(logits, tokens.to(logits.device), attention_mask, per_token)
