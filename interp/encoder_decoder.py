"""Encoder-decoders (T5, BART, Marian) with their tokenizer: both sides of a model in one object, and its hooks.

No logic of its own.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp import families
from interp.core.boundary import public
from interp.core.entering import entering
from interp.core.kinds import Device, Precision, as_dtype
from interp.core.viewer import Shown, fitted
from interp.data.batch import Batch, Prompts, Side
from interp.data.text import Text
from interp.data.tokenizers import Tokenizer, UnreadTokenizer
from interp.families.hub import located
from interp.families.live import inside
from interp.families.places import Devices
from interp.families.reference import reference_of
from interp.families.tokenizer import HuggingFaceTokenizer, TransformersTokenizer
from interp.model.edits import Edit
from interp.model.encoder_decoder import SIDES, EncoderDecoder, edits_of, names as sites_of_pair
from interp.model.loss import mean_next_token_loss
from interp.model.tap import Read, Tap
from interp.model.transformer import Transformer
from interp.passes.generate import decode, encoded
from interp.passes.memory import check_recorded
from interp.passes.observe import (
    Hook,
    HookDirection,
    Hooked,
    Names,
    edits_in_force,
    matching,
    predicate,
    standing_edits,
)
from interp.passes.sampling import Sampling
from interp.residual.activation_cache import ActivationCache
from interp.verify import Contract, pair_contract


class HookedEncoderDecoder(Shown):
    """An `EncoderDecoder` with its tokenizer.

    It is for looking, not for training: the network is frozen, as that of a `HookedTransformer` is.

    Attributes: `model` (the network; `model.encoder` and `model.decoder` are Transformers), `text` (tokenisation of
    sources). A target is read as given and begins with the start token; `to_target` prepends it. Hooks and edits of an
    enclosing `with pair.hooks(...)` hold for every pass inside it, those of `pair.decoder` and `pair.given` too.
    """

    @public()
    def __init__(
        self,
        model: EncoderDecoder,
        tokenizer: Tokenizer | UnreadTokenizer | None = None,
        *,
        name: str = "custom",
        origin: Path | nn.Module | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        """A network with its tokenizer.

        Args:
            model: the network; its parameters require no gradient afterwards.
            tokenizer: its tokenizer; None: sources and targets are token ids.
            name: the model's name in results and pages.
            origin: what the weights came from, for `verify`; a live model is held weakly.
            ends: ids at which what is generated ends; none: the tokenizer's end of text.
        """
        self.model, self.name = model.requires_grad_(False), name
        encoder = model.config.encoder
        decoder = model.config.decoder
        self.text = Text(tokenizer, encoder.n_ctx, encoder.d_vocab, special=True, ends=ends)
        self._target = Text(tokenizer, decoder.n_ctx, decoder.d_vocab)
        self._origin = weakref.ref(origin) if isinstance(origin, nn.Module) else origin

    @classmethod
    @public()
    def from_pretrained(
        cls,
        source: str | Path | nn.Module,
        *,
        tokenizer: Tokenizer | TransformersTokenizer | None = None,
        revision: str | None = None,
        dtype: Precision | None = None,
        device: Device = "cpu",
        devices: Devices | None = None,
    ) -> HookedEncoderDecoder:
        """The model of a local folder, hub name or live Hugging Face model.

        Args:
            source: folder, hub name, or live model.
            tokenizer: a tokenizer, a bare transformers tokenizer too; None: that of the source.
            revision: a branch, tag or training checkpoint.
            dtype: dtype of the weights; None: the checkpoint's.
            device: where the weights go.
            devices: several to spread the layers over, or "auto".

        Returns:
            The model.

        Raises:
            ValueError: a model of one stack of layers, which is for `HookedTransformer`.
        """
        dtype = as_dtype(dtype)
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            tokenizer = HuggingFaceTokenizer(tokenizer)
        origin: Path | nn.Module
        if isinstance(source, nn.Module):
            origin, name = source, type(inside(source)[0]).__name__
            model = families.any_from_hf_model(source, dtype=dtype, device=device, devices=devices)
        else:
            origin, name = located(source, revision, "no encoder-decoder is embedded"), str(source)
            model = families.any_from_folder(origin, dtype=dtype, device=device, devices=devices)
        if isinstance(model, Transformer):
            raise ValueError(f"{name} is one stack of layers: use interp.HookedTransformer.from_pretrained")
        stored = families.tokenizer_for(origin) if isinstance(origin, Path) else None
        return cls(model, tokenizer or stored, name=name, origin=origin, ends=families.ends_of(origin))

    def __repr__(self) -> str:
        encoder, decoder = self.model.config.encoder, self.model.config.decoder
        size = sum(p.numel() for p in self.model.parameters())
        return (
            f"HookedEncoderDecoder({self.name!r}: {encoder.n_layers} + {decoder.n_layers} layers, "
            f"d_model {decoder.d_model}, vocabulary {decoder.d_vocab}, {size / 1e6:.1f} M parameters)"
        )

    def __str__(self) -> str:
        refused, opened = self.text.refused, self.model.encoder.opened
        notes = [] if refused is None else [refused]
        return fitted([repr(self), *(f"  {clause}" for clause in (*opened, *notes))])

    @public()
    def to_source(self, prompts: Prompts, *, padding_side: Side = "right") -> Batch:
        """Sources as a batch with its keep-mask, special tokens as the tokenizer adds them.

        Args:
            prompts: texts, token ids, or a batch.
            padding_side: side on which shorter rows are padded.

        Returns:
            The batch.
        """
        return self.text.batch(prompts, side=padding_side)

    @public()
    def to_target(self, prompts: Prompts) -> Batch:
        """Targets as the decoder reads them: the start token, then the tokens of each text.

        Ids and batches stay as they are.
        """
        if isinstance(prompts, Tensor | Batch | Mapping):
            return self._target.batch(prompts)
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        rows = [[self.model.config.start_token, *self.text.tokenizer.encode(text)] for text in texts]
        return Batch.of(rows, pad_id=self.text.pad_id)

    def _pair(self, source: Prompts, target: Prompts) -> tuple[Batch, Batch]:
        """Both sides as batches. ValueError unless they have as many rows."""
        given, read = self.to_source(source), self.to_target(target)
        if len(given) != len(read):
            raise ValueError(f"as many targets as sources are required, got {len(read)} and {len(given)}")
        return given, read

    @property
    def encoder(self) -> Transformer:
        """The encoder, under the hooks and edits that hold here and now."""
        return self._side("encoder")

    @property
    def decoder(self) -> Transformer:
        """The decoder, under the hooks and edits that hold here and now; its batches are those of `given`."""
        return self._side("decoder")

    def _side(self, side: str) -> Transformer:
        stack: Transformer = getattr(self.model, side)
        edits = edits_of(standing_edits(self.model), side)
        return stack.edited(edits) if edits else stack

    def __call__(self, source: Prompts, target: Prompts) -> Float[Tensor, "b p v"]:
        """Logits at every position of the target; hooks of an enclosing `hooks()` apply."""
        return self._logits(*self._pair(source, target))

    def _logits(self, source: Batch, target: Batch) -> Float[Tensor, "b p v"]:
        given, read = source.to(self.model.device), target.to(self.model.device)
        edits = standing_edits(self.model)
        tap = Tap(edits=edits) if edits else None
        return self.model(given.tokens, read.tokens, tap, source_keep=given.keep, target_keep=read.keep)

    @public()
    def loss(self, source: Prompts, target: Prompts) -> Float[Tensor, ""]:
        """Teacher-forced loss: mean nats per target token after the start token; padding does not count.

        Args:
            source: sources, as texts, token ids or a batch.
            target: targets, read as `to_target` gives them.

        Returns:
            One number, in nats.
        """
        given, read = (each.to(self.model.device) for each in self._pair(source, target))
        return mean_next_token_loss(self._logits(given, read), read.tokens, read.keep)

    @public(plain_pass=True)
    def run_with_cache(
        self, source: Prompts, target: Prompts, names_filter: Names = None
    ) -> tuple[Float[Tensor, "b p v"], dict[str, ActivationCache]]:
        """Logits, and the activations of either side: `cache["decoder"]["blocks.0.cross_attn.hook_pattern"]`.

        No gradients are kept.

        Args:
            source: sources, as texts, token ids or a batch.
            target: targets, read as given (`to_target`).
            names_filter: which sites, as in `HookedTransformer.run_with_cache`; applied to both sides.

        Returns:
            Logits [b, p, v] of the target, and the caches "encoder" and "decoder"; the residual accessors of each
            take that side apart.
        """
        wanted = self._sites(names_filter)
        given, read = (each.to(self.model.device) for each in self._pair(source, target))
        check_recorded(wanted["encoder"], self.model.encoder, *given.tokens.shape)
        check_recorded(wanted["decoder"], self.model.decoder, *read.tokens.shape)
        tap = Tap(
            [Read(f"{side}.{name}") for side in SIDES for name in wanted[side]], standing_edits(self.model)
        )
        with torch.no_grad():
            logits = self.model(given.tokens, read.tokens, tap, source_keep=given.keep, target_keep=read.keep)
        stacks = {"encoder": self.encoder, "decoder": self.decoder}
        return logits, {
            side: ActivationCache({n: tap.values[Read(f"{side}.{n}")] for n in wanted[side]}, stack)
            for side, stack in stacks.items()
        }

    @public(plain_pass=True)
    def run_with_hooks(
        self,
        source: Prompts,
        target: Prompts,
        fwd_hooks: Sequence[Hook] = (),
        bwd_hooks: Sequence[Hook] = (),
    ) -> Float[Tensor, "b p v"]:
        """Logits of one pass with functions `fn(tensor, hook) -> tensor | None` at sites of either side.

        A returned tensor replaces the site's value (None: what the function wrote in place, if anything).

        Args:
            source: sources, as texts, token ids or a batch.
            target: targets, read as `to_target` gives them.
            fwd_hooks: pairs of a site name (or filter) and a function of its value. Names begin with the side,
                `decoder.blocks.0.cross_attn.hook_pattern`, which filters see too, and so does `hook.name`.
            bwd_hooks: pairs of a site name (or filter) and a function of its gradient, called when the output is
                differentiated. The encoder's get theirs through cross-attention.

        Returns:
            Logits at every position of the target. For the loss: `with pair.hooks(...): pair.loss(source, target)`.

        Raises:
            KeyError: a name without a side, or one that no site has.

        Example:
            >>> pair = interp.HookedEncoderDecoder(interp.model.build(interp.lab.training.encoder_decoder(8, 8)))
            >>> silent = ("encoder.blocks.*.hook_mlp_out", lambda value, hook: 0 * value)
            >>> pair.run_with_hooks(torch.tensor([[3, 4, 5]]), torch.tensor([[0, 3]]), [silent]).shape
            torch.Size([1, 2, 8])
        """
        with self.hooks(fwd_hooks, bwd_hooks):
            return self(source, target)

    @public(plain_pass=True)
    @entering
    def hooks(
        self, fwd_hooks: Sequence[Hook] = (), bwd_hooks: Sequence[Hook] = (), *, edits: Sequence[Edit] = ()
    ) -> Iterator[HookedEncoderDecoder]:
        """Hooks and edits for every pass of this model inside the `with`.

        They hold for `given`, whose encoder's pass has those of the encoder, and for `pair.decoder` and `pair.encoder`
        taken inside of it, hence for analyses of them; `pair.model.decoder` is the network without any. They hold in
        this thread or task only, nest, and vanish on leaving, also by an exception.

        Args:
            fwd_hooks: pairs of a site name (or filter) and a function of its value, as in `run_with_hooks`.
            bwd_hooks: pairs of a site name (or filter) and a function of its gradient; they belong to passes that
                keep gradients, others refuse them.
            edits: interventions of every pass, whose sites begin with the side.

        Raises:
            KeyError: a name without a side, or one that no site has.
        """
        found = [*self._as_edits(fwd_hooks, "fwd"), *self._as_edits(bwd_hooks, "bwd"), *edits]
        for side in SIDES:  # refuses what a side lacks, before the block begins
            getattr(self.model, side).edited(edits_of(found, side))
        with edits_in_force(self.model, found):
            yield self

    def _as_edits(self, hooks: Sequence[Hook], direction: HookDirection) -> list[Edit]:
        """One edit for each hook and each site of either side that its names select."""
        return [
            Edit(f"{side}.{name}", Hooked(function, direction, f"{side}."))
            for names, function in hooks
            for side, name in self._with_sides(names)
        ]

    def _with_sides(self, names: Names) -> list[tuple[str, str]]:
        """The sites that names beginning with a side select, each as (side, name); KeyError if there is none."""
        if names is not None and not isinstance(names, str | re.Pattern) and not callable(names):
            return list(dict.fromkeys(site for name in names for site in self._with_sides(name)))
        config = self.model.config
        if isinstance(names, str) and not set(names) & set("*?["):
            side, _, name = names.partition(".")
            if side not in SIDES:
                raise KeyError(f"sites of an encoder-decoder begin with encoder. or decoder., got {names!r}")
            return [(side, site) for site in matching(name, getattr(config, side))]
        accept = (lambda name: True) if names is None else predicate(names)
        every = sites_of_pair(config, on_demand=names is not None)
        selected = [name for name in every if accept(name)]
        if not selected:
            raise KeyError(f"{names!r} matches no site of this model; sites are named like {every[3]}")
        return [(side, name) for side, _, name in (site.partition(".") for site in selected)]

    @public()
    def given(self, source: Prompts, target: Prompts) -> Batch:
        """The target as a batch of the decoder with the encoded source as its memory.

        A function that takes a model and a batch (`observe`, `run`, every analysis) takes `pair.decoder` and this
        batch, and so does `HookedTransformer(pair.decoder, pair.text.tokenizer)`: its passes, hooks and `generate`.

        Args:
            source: sources, as texts, token ids or a batch.
            target: targets, read as `to_target` gives them.

        Returns:
            The batch.
        """
        edits = edits_of(standing_edits(self.model), "encoder")
        return encoded(self.model, *self._pair(source, target), edits=edits)

    @public(plain_pass=True)
    def generate(
        self, source: Prompts, max_new_tokens: int = 20, *, sampling: Sampling | None = None,
        repetition_penalty: float = 1.0, stop_tokens: Collection[int] | None = None, use_cache: bool = True,
        edits: Sequence[Edit] = (),
    ) -> Batch:  # fmt: skip
        """The model's target for each source, token by token: the most probable tokens, or sampled ones.

        Args:
            source: sources, as texts, token ids or a batch.
            max_new_tokens: the most tokens of a target.
            sampling: how tokens are drawn; None: the most probable one.
            repetition_penalty: as `HookedTransformer.generate`.
            stop_tokens: ids that end a target; None: where the model's own generation ends
                (`generation_config.json`), or the tokenizer's end of text.
            use_cache: keep keys and values of earlier tokens instead of computing them again.
            edits: interventions on either side, whose name their sites begin with
                (`encoder.blocks.0.hook_resid_post`); those of the encoder act once, those of the decoder at every
                step, on the positions that are computed in it. Hooks of an enclosing `hooks()` act before them.

        Returns:
            Batch of targets, each beginning with the start token.

        Raises:
            KeyError: a site that the side lacks.
            ValueError: as `HookedTransformer.generate`.

        Example:
            >>> pair = interp.HookedEncoderDecoder(interp.model.build(interp.lab.training.encoder_decoder(8, 8)))
            >>> silent = interp.Edit("encoder.blocks.0.hook_mlp_out", interp.edits.Zero())
            >>> pair.generate(torch.tensor([[3, 4, 5]]), 4, edits=[silent]).tokens.shape
            torch.Size([1, 5])
        """
        return decode(
            self.model, self.to_source(source), max_new_tokens, sampling=sampling,
            repetition_penalty=repetition_penalty, stop_tokens=self._stops(stop_tokens), use_cache=use_cache,
            edits=[*standing_edits(self.model), *edits],
        )  # fmt: skip

    def _stops(self, stop_tokens: Collection[int] | None) -> Collection[int]:
        """The given ones, or those at which the model's own generation ends."""
        return self.text.end_ids if stop_tokens is None else stop_tokens

    @public()
    def to_texts(self, batch: Batch) -> list[str]:
        """The text of every row of a target, start token and padding left out."""
        return [
            self._text(row, None if batch.keep is None else batch.keep[i])
            for i, row in enumerate(batch.tokens)
        ]

    @public()
    def verify(self, reference: nn.Module | None = None) -> Contract:
        """The numerical contract of both sides, measured line by line: `print(model.verify())`.

        Args:
            reference: a live model to compare with; None: what this one was loaded from.

        Returns:
            `Contract`: one line per property that was measured.
        """
        origin = self._origin() if isinstance(self._origin, weakref.ref) else self._origin
        source = reference or origin
        other = (
            "nothing to compare with"
            if source is None
            else reference_of(source, self.model, self.model.dtype)
        )
        return pair_contract(self.model, other, name=self.name)

    def _sites(self, names: Names) -> dict[str, list[str]]:
        """The sites of each side that the names select; KeyError for a name that selects none on either."""
        one = names is None or isinstance(names, str | re.Pattern) or callable(names)
        each: Sequence[Names] = [names] if one else list(names)  # type: ignore[arg-type]
        found: dict[str, list[str]] = {side: [] for side in SIDES}
        for name in each:
            refused = []
            for side in SIDES:
                try:
                    found[side] += matching(name, getattr(self.model.config, side))
                except KeyError as cause:
                    refused.append(cause)
            if len(refused) == len(SIDES):
                raise refused[-1]
        return {side: list(dict.fromkeys(sites)) for side, sites in found.items()}

    def _text(self, row: Int[Tensor, "p"], keep: Tensor | None) -> str:
        ids = (row if keep is None else row[keep]).tolist()
        return self.text.tokenizer.decode(ids[1:])
