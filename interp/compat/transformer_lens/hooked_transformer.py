"""`HookedTransformer`: TransformerLens' class, computed by a native `Transformer` wherever that can run the pass."""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from interp.compat.transformer_lens.activation_cache import ActivationCache
from interp.compat.transformer_lens.cache import TransformerLensKeyValueCache
from interp.compat.transformer_lens.components import (
    Embed,
    PosEmbed,
    RMSNorm,
    RMSNormPre,
    TransformerBlock,
    Unembed,
    norm_of,
)
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.defaults import USE_DEFAULT_VALUE, LocallyOverridenDefaults
from interp.compat.transformer_lens.devices import move_to_and_update_config
from interp.compat.transformer_lens.engine import Caching, ModelEngine, Passage, refuse_method, refuse_setting
from interp.compat.transformer_lens.generation import Generation
from interp.compat.transformer_lens.hook_points import DeviceType, HookFunction, HookPoint, NamesFilter
from interp.compat.transformer_lens.initialisation import initialise
from interp.compat.transformer_lens.losses import lm_cross_entropy_loss
from interp.compat.transformer_lens.pretrained import (
    DTYPE_FROM_STRING,
    from_pretrained as load,
    from_pretrained_no_processing as load_unprocessed,
    load_hooked,
    tokenizer_for,
)
from interp.compat.transformer_lens.processing import ProcessedWeights
from interp.compat.transformer_lens.root_module import HookedRootModule, kept
from interp.compat.transformer_lens.stacks import WeightStacks
from interp.compat.transformer_lens.tokenization import Tokenization, get_attention_mask

Predicate = Callable[[str], bool]
SingleLoss = Float[Tensor, ""]
NOTHING = nullcontext()
LossPerToken = Float[Tensor, "b p"]
Loss = SingleLoss | LossPerToken


class Output(NamedTuple):
    """Result with `return_type="both"`."""

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
        for name, method in UNCALLED.items():
            if getattr(type(self), name) is not method:
                refuse_method(type(self), name)
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
        engine = self.engine
        if passage.first is None and self.cfg.use_hook_tokens:
            passage = replace(passage, x=self.hook_tokens(passage.x))
            if caching is not None and "hook_tokens" in caching.names:
                caching.into["hook_tokens"] = caching.keep(passage.x, "hook_tokens")
                caching = replace(caching, names=tuple(n for n in caching.names if n != "hook_tokens"))
        return engine.run(passage, caching)

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
        """Number of positions in a cache."""
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


UNCALLED = {name: getattr(Passes, name) for name in ("input_to_embed", "get_residual")}
"""Methods that passes of TransformerLens call and native passes do not."""

__all__ = ["DTYPE_FROM_STRING", "HookedTransformer", "Loss", "LossPerToken", "Output", "SingleLoss"]
ON_DEMAND = {
    "hook_result": "use_attn_result", "hook_q_input": "use_split_qkv_input", "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input", "hook_mlp_in": "use_hook_mlp_in", "hook_attn_in": "use_attn_in",
}  # fmt: skip
"""Hook points that cost memory -> the flag under which predicates and "everything" include them."""


class HookedTransformer(HookedRootModule, Tokenization, WeightStacks, Generation, ProcessedWeights, Passes):
    """A transformer with a hook point at every interesting activation, as in TransformerLens 3.

    `engine.native` is the native model of it, on the same memory. It runs every pass, and calls a part of this tree in
    the place of its own where that part was replaced, has torch hooks, or is what only this tree has.
    """

    @classmethod
    def from_pretrained(cls, model_name: str, *args: Any, **options: Any) -> Any:
        """A pretrained model, its weights processed unless switched off; see `pretrained.from_pretrained`."""
        return load(cls, model_name, *args, **options)

    @classmethod
    def from_pretrained_no_processing(cls, model_name: str, *args: Any, **options: Any) -> Any:
        """A pretrained model with its weights as they are; see `pretrained.from_pretrained_no_processing`."""
        return load_unprocessed(cls, model_name, *args, **options)

    @classmethod
    def load_hooked(cls, path: Path | str, config: object = None, **options: Any) -> Any:
        """The model in a file of TransformerLens; see `pretrained.load_hooked`."""
        return load_hooked(cls, path, config, **options)

    def __init__(
        self,
        cfg: HookedTransformerConfig | dict[str, Any],
        tokenizer: Any = None,
        move_to_device: bool = True,
        default_padding_side: str | None = None,
    ) -> None:
        """A model with random weights (`cfg.init_mode`). Without a tokenizer `cfg.d_vocab` is required.

        Raises:
            ValueError: a string (use `from_pretrained`), or a field that asks for what is not supported.
        """
        super().__init__()
        if isinstance(cfg, str):
            raise ValueError(
                "a config or its dict is required; HookedTransformer.from_pretrained() loads a model by its name"
            )
        self.cfg = HookedTransformerConfig.unwrap(cfg)
        _refuse(self.cfg)
        self.tokenizer: Any = None
        if tokenizer is None and self.cfg.tokenizer_name is not None:
            tokenizer = tokenizer_for(self.cfg)
        if tokenizer is not None:
            self.set_tokenizer(tokenizer, default_padding_side=default_padding_side)
        else:
            assert self.cfg.d_vocab != -1, "Must provide a tokenizer if d_vocab is not provided"
            if default_padding_side is not None:
                logging.warning(
                    "default_padding_side is explicitly given but ignored because tokenizer is not set."
                )
        self._build()
        self.dataset: Any = None
        if move_to_device:
            nn.Module.to(self, self.cfg.device)
        self._share()
        if self.cfg.init_weights:
            self.init_weights()
        self.setup()

    def _build(self) -> None:
        cfg = self.cfg
        self.embed = Embed(cfg)
        self.hook_embed = HookPoint()
        if cfg.positional_embedding_type != "rotary":
            self.pos_embed = PosEmbed(cfg)
            self.hook_pos_embed = HookPoint()
        if cfg.use_hook_tokens:
            self.hook_tokens = HookPoint()
        self.blocks = nn.ModuleList(TransformerBlock(cfg, layer) for layer in range(cfg.n_layers))
        if cfg.normalization_type in ("LN", "LNPre") and cfg.final_rms:
            self.ln_final = RMSNorm(cfg) if cfg.normalization_type == "LN" else RMSNormPre(cfg)
        elif cfg.normalization_type is not None:
            self.ln_final = norm_of(cfg)
        self.unembed = Unembed(cfg)

    def init_weights(self) -> None:
        """Random weights by `cfg.init_mode` and `cfg.seed`."""
        initialise(self, self.cfg)

    # memory

    @property
    def engine(self) -> ModelEngine:  # type: ignore[override]
        """The native model of this one."""
        engine = self.__dict__["_engine"]
        assert isinstance(engine, ModelEngine)
        engine.current()
        return engine

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "cfg":
            refuse_setting(self, name, value)
        if name in UNCALLED:
            refuse_method(type(self), name)
        super().__setattr__(name, value)

    def _share(self) -> None:
        """A native model for the modules as they are, on the same memory as their parameters."""
        self.__dict__["_engine"] = ModelEngine(self, self.cfg)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.engine.shared.share(fresh=True)
        self.engine.adopt()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if "_engine" in self.__dict__:
            self.engine.native._apply(fn)
            self.engine.shared.share()
        return self

    def to(self, device_or_dtype: Any, print_details: bool = True) -> Any:  # type: ignore[override]
        """Move or cast in place, and say so in `cfg`."""
        return move_to_and_update_config(self, device_or_dtype, print_details)

    def cuda(self, device: int | torch.device | str | None = None) -> Any:
        """Move to a GPU."""
        return self.to("cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device)

    def cpu(self) -> Any:
        """Move to the CPU."""
        return self.to(torch.device("cpu"))

    def mps(self) -> Any:
        """Move to Apple's GPU."""
        return self.to(torch.device("mps"))

    # hooks

    def check_hooks_to_add(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: HookFunction,
        dir: str = "fwd",
        is_permanent: bool = False,
        prepend: bool = False,
    ) -> None:
        """AssertionError for a point whose flag is off, as in TransformerLens; `run_with_hooks` needs no flag."""
        flag = self._flag(hook_point_name)
        assert flag is None or getattr(self.cfg, flag), (
            f"Cannot add hook {hook_point_name} if {flag} is False"
        )

    def _flag(self, name: str) -> str | None:
        return ON_DEMAND.get(name.rpartition(".")[2])

    def _chosen(self, names: NamesFilter) -> list[str]:
        """Points by name or predicate, as in every root module.

        Predicates take points with flag off only if they take nothing else.
        """
        found = super()._chosen(names)
        if names is not None and not callable(names):
            return found
        return self._ready(found) or ([] if names is None else found)

    def _ready(self, names: Iterable[str]) -> list[str]:
        """The points with flag on."""
        return [name for name in names if (flag := self._flag(name)) is None or getattr(self.cfg, flag)]

    def _enable_hooks_for_points(
        self, hook_points: Iterable[tuple[str, HookPoint]], enabled: Predicate, hook: HookFunction, dir: str
    ) -> None:
        """At the points that a predicate accepts, by the rule of `_chosen`."""
        given = list(hook_points)
        found = [name for name, _ in given if enabled(name)]
        chosen = self._ready(found) or found
        super()._enable_hooks_for_points(given, chosen.__contains__, hook, dir)

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Whether `attn.hook_result` is cached without being named."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Whether the split inputs of queries, keys and values are cached without being named."""
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Whether `hook_mlp_in` is cached without being named."""
        assert not self.cfg.attn_only, "Can't use hook_mlp_in with attn_only model"
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Whether every head reads a copy of the stream of its own, `hook_attn_in`."""
        assert self.cfg.n_key_value_heads is None, (
            "Can't use attn_in with GroupedQueryAttention, please use split_qkv_input instead"
        )
        self.cfg.use_attn_in = use_attn_in

    def set_ungroup_grouped_query_attention(self, ungroup_grouped_query_attention: bool) -> None:
        """Whether keys and values of grouped attention are computed once per query head."""
        self.cfg.ungroup_grouped_query_attention = ungroup_grouped_query_attention

    def run_with_cache(
        self,
        *model_args: Any,
        return_cache_object: bool = True,
        remove_batch_dim: bool = False,
        names_filter: NamesFilter = None,
        device: DeviceType | str = None,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """The output, and an `ActivationCache` (or with `return_cache_object=False` a dict) of the values at points.

        names_filter: None = all whose flag is on; points named by a string or list need no flag. incl_bwd: calls
        `backward()` on the output, and keeps gradients as `<name>_grad`. Values are those after all hooks.
        """
        own = "forward" in self.__dict__ or type(self).forward is not HookedTransformer.forward
        plain = not own and reset_hooks_end and not incl_bwd
        if plain and not (self._forward_hooks or self._forward_pre_hooks):
            caching = Caching(
                tuple(self._chosen(names_filter)), kept(device, remove_batch_dim, pos_slice), {}
            )
            output = self._pass(*model_args, caching=caching, **model_kwargs)  # type: ignore[misc]
            cache = caching.into
            if clear_contexts:
                self.clear_contexts()
        else:
            output, cache = super().run_with_cache(
                *model_args, names_filter=names_filter, device=device, remove_batch_dim=remove_batch_dim,
                incl_bwd=incl_bwd, reset_hooks_end=reset_hooks_end, clear_contexts=clear_contexts,
                pos_slice=pos_slice, **model_kwargs,
            )  # fmt: skip
        if not return_cache_object:
            return output, cache
        return output, ActivationCache(cache, self, has_batch_dim=not remove_batch_dim)


def _refuse(cfg: HookedTransformerConfig) -> None:
    """ValueError for what neither the native model nor the modules compute."""
    wanted = {
        "load_in_4bit": cfg.load_in_4bit, "n_devices > 1": cfg.n_devices > 1,
    }  # fmt: skip
    for name, asked in wanted.items():
        if asked:
            raise ValueError(
                f"{name} is not supported here; interp.HookedTransformer.from_pretrained loads the model natively"
            )
