"""`generate` and `generate_stream`: text continued token by token, hooks applied at every step.

The native key/value cache and last-column logits where the native model can run; else the modules and their cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.compat.transformer_lens.cache import TransformerLensKeyValueCache
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.defaults import USE_DEFAULT_VALUE, LocallyOverridenDefaults
from interp.compat.transformer_lens.engine import ModelEngine, Passage
from interp.compat.transformer_lens.losses import sample_logits
from interp.compat.transformer_lens.tokenization import get_attention_mask
from interp.model.kv_cache import KVCache

Prompt = str | list[str] | Int[Tensor, "b p"] | Float[Tensor, "b p d"]


@dataclass
class GenerateOutput:
    """Result of `generate(output_logits=True)`: the tokens, and the logits `[b v]` of every step."""

    sequences: Int[Tensor, "b p"]
    logits: tuple[Tensor, ...]


@dataclass(frozen=True)
class Choosing:
    """How the next token is chosen."""

    do_sample: bool
    top_k: int | None
    top_p: float | None
    temperature: float
    freq_penalty: float

    def __call__(self, logits: Float[Tensor, "b v"], before: Tensor | None) -> Int[Tensor, "b"]:
        """The next token of each row; `before` are those it has."""
        if not self.do_sample:
            return logits.argmax(-1)
        penalty = 0.0 if before is None else self.freq_penalty
        return sample_logits(
            logits, top_k=self.top_k, top_p=self.top_p, temperature=self.temperature, freq_penalty=penalty,
            tokens=before,
        )  # fmt: skip


class Generation(nn.Module):
    """The two methods; a mixin of `HookedTransformer`."""

    cfg: HookedTransformerConfig
    tokenizer: Any
    engine: ModelEngine
    embed: Any
    to_tokens: Any
    _run: Any

    @torch.no_grad()
    def generate(
        self,
        input: Prompt = "",
        max_new_tokens: int = 10,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        freq_penalty: float = 0.0,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
        return_type: str | None = "input",
        verbose: bool = True,
        **generation_kwargs: Any,
    ) -> Any:
        """The prompts and what the model continues them with: text, tokens or embeddings, as `return_type` says.

        freq_penalty is what each earlier occurrence of a token takes off its logit. A row that has ended is filled
        with EOS. `output_logits=True` gives a `GenerateOutput`. `verbose` is accepted; no progress bar is drawn.

        Raises:
            AssertionError: another kind of input or `return_type`, or no EOS to stop at.
        """
        output_logits, as_type = _checked(input, return_type, generation_kwargs)
        with LocallyOverridenDefaults(self, prepend_bos=prepend_bos, padding_side=padding_side):
            start, mask = self._prompt(input)
            ends = self._ends(stop_at_eos, eos_token_id)
            choosing = Choosing(do_sample, top_k, top_p, temperature, freq_penalty)
            room = max_new_tokens if use_past_kv_cache else None
            steps = list(self._steps(start, mask, max_new_tokens, room, ends, choosing))
        new = (
            torch.stack([token for token, _ in steps], 1) if steps else start.new_zeros(len(start), 0).long()
        )
        tokens = torch.cat((start, new), 1) if start.ndim == 2 else new
        if output_logits:
            return GenerateOutput(tokens, tuple(logits for _, logits in steps))
        if as_type == "str":
            assert self.tokenizer is not None, "return_type='str' requires a tokenizer"
            texts = [self.tokenizer.decode(row, skip_special_tokens=True) for row in tokens]
            return texts[0] if len(texts) == 1 else texts
        if as_type == "tokens":
            return tokens
        return torch.cat((start if start.ndim == 3 else self.embed(start), self.embed(new)), 1)

    @torch.no_grad()
    def generate_stream(
        self,
        input: str | Int[Tensor, "b p"] = "",
        max_new_tokens: int = 10,
        max_tokens_per_yield: int = 25,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        freq_penalty: float = 0.0,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
        return_type: str | None = "input",
        verbose: bool = True,
    ) -> Iterator[Int[Tensor, "b _"]]:
        """The tokens in pieces of at least `max_tokens_per_yield` as they come; the first begins with the prompt.

        Always tokens, whatever `return_type`, as in TransformerLens.
        """
        with LocallyOverridenDefaults(self, prepend_bos=prepend_bos, padding_side=padding_side):
            assert isinstance(input, str | Tensor), "Input must be a tensor when not a string"
            start, mask = self._prompt(input)
        ends = self._ends(stop_at_eos, eos_token_id)
        choosing = Choosing(do_sample, top_k, top_p, temperature, freq_penalty)
        room, held = max_new_tokens if use_past_kv_cache else None, [start]
        for token, _ in self._steps(start, mask, max_new_tokens, room, ends, choosing):
            held.append(token[:, None])
            if sum(part.shape[1] for part in held) >= max_tokens_per_yield:
                yield torch.cat(held, 1)
                held = []
        if held:
            yield torch.cat(held, 1)

    def _prompt(self, input: Prompt) -> tuple[Tensor, Tensor | None]:
        """Tokens or embeddings to begin with, and which of them are real; several texts are padded on the left."""
        if isinstance(input, Tensor) and input.ndim == 3:
            return input.to(self.cfg.device), None
        several = isinstance(input, list) and len(input) > 1
        tokens = input
        if not isinstance(input, Tensor):
            assert self.tokenizer is not None, "Must provide a tokenizer if passing a string to the model"
            tokens = self.to_tokens(input, padding_side="left" if several else None)
        assert isinstance(tokens, Tensor)
        tokens = tokens.to(self.cfg.device)
        if self.tokenizer is None:
            return tokens, None
        side = "left" if several else None
        return tokens, get_attention_mask(self.tokenizer, tokens, self.cfg.default_prepend_bos, side)

    def _ends(self, stop_at_eos: bool, eos: int | Sequence[int] | None) -> tuple[list[int], int]:
        """The tokens that end a row, and what fills it afterwards."""
        if not stop_at_eos:
            return [], 0
        own = None if self.tokenizer is None else self.tokenizer.eos_token_id
        eos = own if eos is None else eos
        assert eos is not None, (
            "Must pass a eos_token_id if stop_at_eos is True and tokenizer is None or has no eos_token_id"
        )
        if isinstance(eos, int):
            return [eos], eos
        return list(eos), eos[0] if own is None else own

    def _steps(
        self,
        start: Tensor,
        mask: Tensor | None,
        n: int,
        room: int | None,
        ends: tuple[list[int], int],
        choosing: Choosing,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Each new column of tokens, and the logits after it. room: new tokens a cache must hold; None: no cache."""
        stops, filler = torch.tensor(ends[0], device=start.device), ends[1]
        ended = torch.zeros(len(start), dtype=torch.bool, device=start.device)
        running = _Running(self, start, mask, room)
        so_far = start if start.ndim == 2 else None
        for _ in range(n):
            logits = running.next_logits()
            tokens = choosing(logits, so_far).masked_fill(ended, filler)
            yield tokens, logits
            if len(stops):
                ended = ended | torch.isin(tokens, stops)
                if bool(ended.all()):
                    return
            so_far = None if so_far is None else torch.cat((so_far, tokens[:, None]), 1)
            running.push(tokens)


class _Running:
    """The model as the loop sees it: tokens go in, the logits of the next column come out."""

    def __init__(self, model: Generation, start: Tensor, mask: Tensor | None, room: int | None) -> None:
        self._model, self._x, self._mask = model, start, mask
        self._past: KVCache | TransformerLensKeyValueCache | None = None
        embedded, native = start.ndim == 3, model.engine.native
        self._vectors = start if embedded else None
        if room is None or embedded:
            return
        if model.engine.active() is not None:
            size = start.shape[1] + room
            self._past = KVCache(native.config, len(start), size, device=native.device, dtype=native.dtype)
        else:
            self._past = TransformerLensKeyValueCache.init_cache(model.cfg, start.device, len(start))

    @torch.no_grad()
    def next_logits(self) -> Float[Tensor, "b v"]:
        """The logits of the next column."""
        x, place = self._x, None
        if self._vectors is not None:
            x, place = self._model.get_residual(self._vectors, 0, attention_mask=self._mask)  # type: ignore[operator]
        first = None if self._vectors is None else 0
        passage = Passage(x, first, None, mask=self._mask, past=self._past, last=True, place=place)
        return self._model._run(passage)[:, -1]

    def push(self, tokens: Int[Tensor, "b"]) -> None:
        """The column that the next pass is to see; without a cache it sees all before it again."""
        column = tokens[:, None]
        if self._vectors is not None:
            self._vectors = torch.cat((self._vectors, self._model.embed(column)), 1)
        elif self._past is not None:
            self._x = column
        else:
            self._x = torch.cat((self._x, column), 1)
        if isinstance(self._past, KVCache):  # which counts later tokens as real
            self._mask = None
        elif self._mask is not None:
            self._mask = torch.cat((self._mask, torch.ones_like(column, dtype=self._mask.dtype)), 1)


def _checked(input: Prompt, return_type: str | None, options: dict[str, Any]) -> tuple[bool, str]:
    """Whether logits are wanted, and the type of what is returned."""
    texts = isinstance(input, list) and all(isinstance(text, str) for text in input)
    assert isinstance(input, str | Tensor) or texts, "Input must be either string, torch.Tensor, or List[str]"
    kinds = ["input", "str", "tokens", "embeds"]
    assert return_type in kinds, f"return_type must be one of {kinds}"
    if unknown := sorted(set(options) - {"output_logits", "return_dict_in_generate"}):
        raise TypeError(
            f"generate has no options {unknown}; output_logits=True gives the logits of every step"
        )
    own = "str" if not isinstance(input, Tensor) else "tokens" if input.ndim == 2 else "embeds"
    return bool(options.get("output_logits")), own if return_type == "input" else str(return_type)
