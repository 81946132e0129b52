"""The front door: a model, its tokenizer, and the things people type in a notebook. No logic of its own."""

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp import families, zoo
from interp.analyses.activation_cache import ActivationCache
from interp.core.factored import FactoredMatrix
from interp.core.shapes import nearest
from interp.engine.batch import Batch, Side
from interp.engine.generate import Sampling, generate
from interp.engine.observe import deepest, observe
from interp.engine.text import Prompts, Text, Tokenizer
from interp.families.load import download
from interp.families.tokenizer import HuggingFaceTokenizer, TransformersTokenizer
from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.tap import Edit, Read, Tap
from interp.model.transformer import Transformer, mean_next_token_loss, next_token_loss
from interp.model.weights import Weights

ReturnType = Literal["logits", "loss", "both"]
Names = str | Sequence[str] | Callable[[str], bool] | re.Pattern[str] | None


@dataclass
class HookPoint:
    """What a hook function is told about where it is: the site's name, and a dict of its own for one pass."""

    name: str
    ctx: dict[str, object] = field(default_factory=dict)

    def layer(self) -> int:
        """The block this site is in; ValueError outside the blocks."""
        found = re.match(r"blocks\.(\d+)\.", self.name)
        if found is None:
            raise ValueError(f"{self.name!r} is not inside a block")
        return int(found[1])


HookFunction = Callable[[Tensor, HookPoint], Tensor | None]
Hook = tuple[Names, HookFunction]


class HookedTransformer:
    """A `Transformer` with its tokenizer, under the names TransformerLens made common.

    Attributes: `transformer` (the network), `text` (tokenisation), `weights` (stacked views), `cfg` (its config).
    Parameters are frozen; call `model.transformer.requires_grad_(True)` to train.
    """

    def __init__(
        self, transformer: Transformer, tokenizer: Tokenizer | None = None, *, name: str = "custom"
    ) -> None:
        self.transformer = transformer
        self.text = Text(tokenizer, transformer.config.n_ctx, transformer.config.d_vocab)
        self.weights = Weights(transformer)
        self.name = name
        self._hooks: list[tuple[Hook, Literal["fwd", "bwd"]]] = []

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path | nn.Module,
        *,
        tokenizer: Tokenizer | TransformersTokenizer | None = None,
        revision: str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> "HookedTransformer":
        """The model of a demo name (`interp.DEMOS`), local folder, safetensors file, hub name or live HF model.

        Weights are never folded or centred. dtype None keeps the checkpoint's. A bare transformers tokenizer is
        accepted too. Errors: ValueError or FileNotFoundError naming what is unknown, missing or not understood.
        """
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            tokenizer = HuggingFaceTokenizer(tokenizer)
        if isinstance(source, nn.Module):
            model = families.from_hf_model(source, dtype=dtype, device=device)
            return cls(model, tokenizer, name=type(source).__name__)
        if str(source) in zoo.DEMOS:
            model, found = zoo.load(str(source), revision=revision, dtype=dtype, device=device)
            return cls(model, tokenizer or found, name=str(source))
        path = _located(source, revision)
        model = families.from_folder(path, dtype=dtype, device=device)
        folder = path if path.is_dir() else path.parent
        return cls(model, tokenizer or families.tokenizer_of(folder), name=str(source))

    @property
    def cfg(self) -> ModelConfig:
        """The model's config."""
        return self.transformer.config

    def __repr__(self) -> str:
        c = self.cfg
        size = sum(p.numel() for p in self.transformer.parameters())
        return (
            f"HookedTransformer({self.name!r}: {c.n_layers} layers, {c.n_heads} heads, d_model {c.d_model}, "
            f"vocabulary {c.d_vocab}, {size / 1e6:.1f} M parameters)"
        )

    def to(self, target: torch.device | str | torch.dtype) -> "HookedTransformer":
        """Move or cast the parameters in place; returns self."""
        self.transformer.to(target)
        return self

    # text

    def to_tokens(
        self, text: str | Sequence[str], *, prepend_bos: bool = True, padding_side: Side = "right"
    ) -> Int[Tensor, "b p"]:
        """Token ids of one or several texts, BOS first unless switched off; shorter rows are padded.

        The padding is not visible in the ids alone: use `to_batch` where rows differ in length.
        """
        return self.to_batch(text, prepend_bos=prepend_bos, padding_side=padding_side).tokens

    def to_batch(self, prompts: Prompts, *, prepend_bos: bool = True, padding_side: Side = "right") -> Batch:
        """Prompts as a batch with its keep-mask; `batch.bos` says whether BOS was prepended."""
        return self.text.batch(prompts, prepend_bos=prepend_bos, side=padding_side)

    def to_string(self, tokens: Int[Tensor, "p"] | Sequence[int] | int) -> str:
        """The text of a row of ids."""
        ids = [tokens] if isinstance(tokens, int) else [int(t) for t in tokens]
        return self.text.tokenizer.decode(ids)

    def to_str_tokens(self, prompt: str | Int[Tensor, "p"], *, prepend_bos: bool = True) -> list[str]:
        """The text of each token of one prompt."""
        batch = self.to_batch(prompt, prepend_bos=prepend_bos)
        if len(batch) != 1:
            raise ValueError(f"one prompt is required, got {len(batch)}")
        return self.text.pieces(batch.tokens[0])

    def to_single_token(self, text: str) -> int:
        """The id of a text that is one token; ValueError naming the tokens if it is several."""
        return self.text.single(text)

    # passes

    def __call__(
        self,
        prompts: Prompts,
        *,
        return_type: ReturnType = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool = True,
        padding_side: Side = "right",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits `[b p v]`, the loss in nats (mean, or `[b p-1]`), or both; hooks of an enclosing `hooks()` apply."""
        batch = self.to_batch(prompts, prepend_bos=prepend_bos, padding_side=padding_side)
        batch = batch.to(self.transformer.device)
        edits = self._hook_edits(differentiable=torch.is_grad_enabled())
        tap = Tap(edits=edits) if edits else None
        logits = self.transformer(batch.tokens, tap, keep=batch.keep)
        if return_type == "logits":
            return logits
        loss = (next_token_loss if loss_per_token else mean_next_token_loss)(logits, batch.tokens, batch.keep)
        if return_type not in ("loss", "both"):
            raise ValueError(f"return_type must be logits, loss or both, got {return_type!r}")
        return loss if return_type == "loss" else (logits, loss)

    def run_with_cache(
        self,
        prompts: Prompts,
        names: Names = None,
        *,
        stop_at_layer: int | None = None,
        pos_slice: slice | int | None = None,
        device: torch.device | str | None = None,
        prepend_bos: bool = True,
        padding_side: Side = "right",
    ) -> tuple[Tensor, ActivationCache]:
        """The output and the activations of every matching site (None: all that are not on demand).

        names: a site name, several, a glob such as `"blocks.*.hook_resid_post"`, a compiled regular expression, or a
        predicate. With `stop_at_layer` the output is the residual stream entering that block. `pos_slice` keeps some
        positions of every axis that counts queries. No gradients are kept.
        """
        batch = self.to_batch(prompts, prepend_bos=prepend_bos, padding_side=padding_side)
        wanted = self._matching(names, stop_at_layer)
        reads = [Read(name, _position_filter(name, self.cfg, pos_slice)) for name in wanted]
        seen = observe(self.transformer, batch, reads, self._hook_edits(stop_at_layer), stop=stop_at_layer)
        values = {read.site: value for read, value in seen.trace.items()}
        if device is not None:
            values = {name: value.to(device) for name, value in values.items()}
        return seen.output, ActivationCache(values, self.transformer)

    def run_with_hooks(
        self,
        prompts: Prompts,
        fwd_hooks: Sequence[Hook] = (),
        bwd_hooks: Sequence[Hook] = (),
        *,
        return_type: ReturnType = "logits",
        prepend_bos: bool = True,
        padding_side: Side = "right",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One pass with functions `fn(tensor, hook) -> tensor | None` at sites; they are gone afterwards.

        A returned tensor replaces the site's value (None: what the function wrote in place, if anything). Backward
        hooks get gradients when the output is differentiated.
        """
        with self.hooks(fwd_hooks, bwd_hooks):
            return self(prompts, return_type=return_type, prepend_bos=prepend_bos, padding_side=padding_side)

    @contextmanager
    def hooks(
        self, fwd_hooks: Sequence[Hook] = (), bwd_hooks: Sequence[Hook] = ()
    ) -> Iterator["HookedTransformer"]:
        """Hooks for every pass inside the `with`; nests; vanishes on leaving, also by an exception."""
        before = list(self._hooks)
        for hook in (*fwd_hooks, *bwd_hooks):
            self._matching(hook[0], None)
        added = [(h, "fwd") for h in fwd_hooks] + [(h, "bwd") for h in bwd_hooks]
        try:
            self._hooks = before + added  # type: ignore[operator]
            yield self
        finally:
            self._hooks = before

    def generate(
        self,
        prompts: Prompts,
        max_new_tokens: int = 20,
        *,
        sampling: Sampling | None = None,
        stop_at_eos: bool = True,
        use_past_kv_cache: bool = True,
        prepend_bos: bool = True,
    ) -> Batch:
        """Prompts continued greedily, or by `sampling`; left-padded rows, `batch.keep` marks the real tokens.

        `model.to_texts(batch)` gives the strings. Hooks of an enclosing `hooks()` apply at every step: with the cache
        they see the prompt first and then one new token at a time.
        """
        batch = self.to_batch(prompts, prepend_bos=prepend_bos, padding_side="left")
        stop = self.text.eos_id if stop_at_eos else None
        return generate(
            self.transformer,
            batch,
            max_new_tokens,
            sampling=sampling,
            stop_token=stop,
            use_cache=use_past_kv_cache,
            edits=self._hook_edits(),
        )

    def to_texts(self, batch: Batch) -> list[str]:
        """The text of every row of a batch, padding and the prepended BOS left out."""
        texts = []
        for i, row in enumerate(batch.tokens):
            ids = row if batch.keep is None else row[batch.keep[i]]
            texts.append(self.to_string(ids[1:] if batch.bos else ids))
        return texts

    # weights

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O of every head, `[layer, head, d_model, d_model]`, factored."""
        return self.weights.OV

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T of every head (rotary: at offset 0), unscaled, factored."""
        return self.weights.QK

    def __getattr__(self, name: str) -> Float[Tensor, "..."]:
        """Weight stacks by their TransformerLens names: `W_Q`, `W_O`, `b_in`, `W_E`, ..."""
        if re.fullmatch(r"[Wb]_\w+", name) and isinstance(getattr(Weights, name, None), property):
            return getattr(self.weights, name)
        raise AttributeError(f"HookedTransformer has no attribute {name!r}; {nearest(name, dir(type(self)))}")

    # hooks as edits

    def _matching(self, names: Names, stop: int | None) -> list[str]:
        """Sites that a filter selects; KeyError if it selects none."""
        known = sites.names(self.cfg)
        every = sites.names(self.cfg, on_demand=True)
        if names is None:
            found = [n for n in known if _within(n, self.cfg, stop)]
        elif isinstance(names, str) and not set(names) & set("*?["):
            sites.find(names, self.cfg)
            found = [names]
        elif isinstance(names, str | re.Pattern) or callable(names):
            accept = _predicate(names)
            found = [n for n in every if accept(n) and _within(n, self.cfg, stop)]
        else:
            found = [match for each in names for match in self._matching(each, stop)]
        if not found:
            hint = nearest(names, every) if isinstance(names, str) else f"sites are named like {every[3]}"
            raise KeyError(f"{names!r} matches no site of this model; {hint}")
        return list(dict.fromkeys(found))

    def _hook_edits(self, stop: int | None = None, *, differentiable: bool = False) -> list[Edit]:
        edits = []
        for (names, function), direction in self._hooks:
            if direction == "bwd" and not differentiable:
                raise ValueError("backward hooks require a pass that keeps gradients; this one runs without")
            for name in self._matching(names, stop):
                point = HookPoint(name)
                make = _forward_change if direction == "fwd" else _backward_change
                edits.append(Edit(name, make(function, point)))
        return edits


def _forward_change(function: HookFunction, point: HookPoint) -> Callable[[Tensor], Tensor]:
    def change(value: Tensor) -> Tensor:
        new = function(value, point)
        return value if new is None else new

    return change


def _backward_change(function: HookFunction, point: HookPoint) -> Callable[[Tensor], Tensor]:
    def change(value: Tensor) -> Tensor:
        value = value if value.requires_grad else value.detach().requires_grad_()
        value.register_hook(lambda grad: function(grad, point))
        return value

    return change


def _predicate(names: str | re.Pattern[str] | Callable[[str], bool]) -> Callable[[str], bool]:
    if isinstance(names, str):
        pattern = names
        return lambda name: fnmatch.fnmatchcase(name, pattern)
    if isinstance(names, re.Pattern):
        regex = names
        return lambda name: regex.fullmatch(name) is not None
    return names


def _within(name: str, config: ModelConfig, stop: int | None) -> bool:
    if stop is None:
        return True
    need = deepest([name], config)
    return need is not None and need <= stop


def _position_filter(
    name: str, config: ModelConfig, pos_slice: slice | int | None
) -> Callable[[Tensor], Tensor] | None:
    """The `via` that keeps some positions: axis 1, or the query axis of scores and patterns."""
    if pos_slice is None:
        return None
    keep = slice(pos_slice, pos_slice + 1 or None) if isinstance(pos_slice, int) else pos_slice
    site, _ = sites.find(name, config)
    axis = 2 if site.axes == "b h q k" else 1

    def kept(value: Tensor) -> Tensor:
        part = value[(slice(None),) * axis + (keep,)]
        if part.shape[axis] == 0:
            raise ValueError(f"pos_slice {pos_slice} keeps none of the {value.shape[axis]} positions")
        return part

    return kept


def _located(source: str | Path, revision: str | None) -> Path:
    """A local path, or the downloaded copy of a hub repository."""
    path = Path(source)
    if path.exists():
        return path
    looks_local = isinstance(source, Path) or path.is_absolute() or str(source).startswith((".", "~"))
    hint = f"demo models: {', '.join(zoo.DEMOS)} ({nearest(str(source), zoo.DEMOS)})"
    if looks_local:
        raise FileNotFoundError(
            f"{source} does not exist; give a folder with config.json and safetensors, or a name; {hint}"
        )
    try:
        return download(str(source), revision)
    except Exception as cause:
        raise ValueError(
            f"unknown model {str(source)!r}: no such folder, no demo model, and the hub did not give it "
            f"({type(cause).__name__}); {hint}"
        ) from cause
