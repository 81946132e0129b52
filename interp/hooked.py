"""A model with its tokenizer, and what a notebook does with it: tokens, passes, hooks, generation.

No logic of its own.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp import families, zoo
from interp.core.boundary import public
from interp.core.entering import entering
from interp.core.factored import FactoredMatrix
from interp.core.kinds import Device, Precision, as_dtype, require_device
from interp.core.stats import narrowed
from interp.core.viewer import Shown, fitted
from interp.core.wording import NO_TEMPLATE, nearest
from interp.data.batch import Batch, Prompts, Side
from interp.data.chats import Chat, as_chats
from interp.data.text import Text
from interp.data.tokenizers import Tokenizer, UnreadTokenizer
from interp.families.fill import check_dtype
from interp.families.hub import located
from interp.families.live import inside
from interp.families.places import Devices, places_of
from interp.families.reference import exported, reference_of
from interp.families.tokenizer import HuggingFaceTokenizer, TransformersTokenizer, with_template
from interp.model.config import ModelConfig
from interp.model.edits import Edit
from interp.model.loss import mean_next_token_loss, next_token_loss
from interp.model.mounted import Mountable
from interp.model.tap import Read, Tap
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.edited import with_edits_in_batch
from interp.passes.generate import Stop, generate, stops_of, stream, streamed_text
from interp.passes.observe import (
    Hook,
    HookDirection,
    Names,
    as_edits,
    as_network,
    edits_in_force,
    matching,
    observe,
    position_filter,
    standing_edits,
)
from interp.passes.sampling import Sampling
from interp.residual.activation_cache import ActivationCache
from interp.verify import Contract, contract

ReturnType = Literal["logits", "loss", "both"]


class HookedTransformer(Shown):
    """A `Transformer` with its tokenizer, under the names TransformerLens made common.

    It is for looking, not for training: the network is frozen (its parameters require no gradient from here on). To
    train one, train the `Transformer` and wrap it afterwards, or undo it: `network.requires_grad_(True)`.

    Attributes: `transformer` (the network), `text` (tokenisation), `weights` (stacked views), `cfg` (its config).
    Hooks and edits of an enclosing `with model.hooks(...)` hold for every pass inside it, those of analyses too.
    """

    @public()
    def __init__(
        self,
        transformer: Transformer,
        tokenizer: Tokenizer | UnreadTokenizer | None = None,
        *,
        name: str = "custom",
        origin: Path | nn.Module | None = None,
        ends: Sequence[int] = (),
        default_prepend_bos: bool | None = None,
    ) -> None:
        """A network with its tokenizer.

        Args:
            transformer: the network; its parameters require no gradient afterwards.
            tokenizer: its tokenizer; None: prompts are token ids.
            name: the model's name in results and pages.
            origin: what the weights came from, for `verify`; a live model is held weakly.
            ends: ids at which what is generated ends; none: the tokenizer's end of text.
            default_prepend_bos: whether texts begin with BOS where a call does not say; None: they do if there is
                one.
        """
        config = transformer.config
        self._transformer = transformer.requires_grad_(False)
        self.text = Text(
            tokenizer, config.n_ctx, config.d_vocab, special=not config.causal, d_vocab_out=config.d_vocab_out,
            ends=ends, prepend_bos=default_prepend_bos is not False,
        )  # fmt: skip
        self._origin = weakref.ref(origin) if isinstance(origin, nn.Module) else origin
        self.weights = Weights(transformer)
        self.name = name

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
        wrapped: bool | None = None,
        default_prepend_bos: bool | None = None,
        chat_template: str | None = None,
    ) -> HookedTransformer:
        """The model of a demo name (`interp.DEMOS`), folder, file of weights, hub name or live Hugging Face model.

        A folder or file may hold safetensors, GGUF, an adapter (merged into its base) or what a training script
        saved; a live model may be compiled, parallel or adapted. What was done to open it stands in `print(model)`.
        Weights are never folded or centred.

        Args:
            source: name, path, or live model.
            tokenizer: a tokenizer, a bare transformers tokenizer too; None: that of the source.
            revision: a branch, tag or training checkpoint ("step3000"), on the hub or as a subfolder.
            dtype: torch.bfloat16, or "bfloat16"; None: the checkpoint's.
            device: where the weights go.
            devices: several to spread the layers over, or "auto"; inputs and what is recorded are on the first.
            wrapped: True takes Hugging Face's own code instead of this package's, with its activations as sites
                (`interp.wrapped`), False never does; None: where this package has none for the family.
            default_prepend_bos: whether texts begin with BOS, in every call that does not say it itself; None: they
                do where the tokenizer has a BOS. Token ids are taken as they are.
            chat_template: the Jinja template in which chats are written; None: that of the tokenizer.

        Returns:
            The model.

        Raises:
            ValueError, FileNotFoundError: what is unknown, missing or not understood; the message names it.
        """
        dtype = as_dtype(dtype)
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            tokenizer = HuggingFaceTokenizer(tokenizer)
        if chat_template is not None and tokenizer is not None:
            tokenizer = with_template(tokenizer, chat_template)
        if isinstance(source, nn.Module):
            if revision is not None:
                raise ValueError(f"a live model has the weights that it has: no revision, got {revision!r}")
            if tokenizer is None:
                _check_template(chat_template, "a live model")
            model = families.from_hf_model(
                source, dtype=dtype, device=device, devices=devices, wrapped=wrapped
            )
            ends = families.ends_of(source)
            name = type(inside(source)[0]).__name__
            return cls(
                model, tokenizer, name=name, origin=source, ends=ends, default_prepend_bos=default_prepend_bos
            )
        if str(source) in zoo.DEMOS:
            if wrapped:
                raise ValueError(f"{source} is a model of this package: there is no other code to wrap")
            places = places_of(dtype, device, devices)
            model, found = zoo.load(str(source), revision=revision, dtype=dtype, device=places[0])
            if len(places) > 1:
                model.place(places)
            if tokenizer is None:
                _check_template(chat_template, f"{source}, of this package,")
            return cls(model, tokenizer or found, name=str(source), default_prepend_bos=default_prepend_bos)
        hint = f"demo models: {', '.join(zoo.DEMOS)} ({nearest(str(source), zoo.DEMOS)})"
        path = located(source, revision, hint)
        model = families.from_folder(path, dtype=dtype, device=device, devices=devices, wrapped=wrapped)
        chosen_tokenizer = tokenizer or _tokenizer_in(path, chat_template)
        ends = families.ends_of(path)
        return cls(
            model,
            chosen_tokenizer,
            name=str(source),
            origin=path,
            ends=ends,
            default_prepend_bos=default_prepend_bos,
        )

    @public()
    def verify(self, reference: nn.Module | None = None) -> Contract:
        """The numerical contract of this model, measured line by line: `print(model.verify())`.

        Logits and gradients are compared with Hugging Face's implementation.

        Args:
            reference: a live model to compare with; None: what this one was loaded from (its folder is read a second
                time).

        Returns:
            `Contract`: one line per property that was measured.

        Raises:
            ValueError: the decoder of an encoder-decoder, which is verified with its encoder.
        """
        if self.cfg.cross_attention:
            raise ValueError(
                "a decoder that attends to a source is verified with its encoder: HookedEncoderDecoder.verify()"
            )
        origin = self._origin() if isinstance(self._origin, weakref.ref) else self._origin
        source = reference or origin
        other = (
            exported(self.transformer)
            if source is None
            else reference_of(source, self.transformer, self.transformer.dtype)
        )
        return contract(self.transformer, other, name=self.name)

    @property
    def transformer(self) -> Transformer:
        """The network, under the hooks and edits that hold here and now."""
        edits = standing_edits(self._transformer)
        return self._transformer.edited(edits) if edits else self._transformer

    @public()
    def edited(self, edits: Sequence[Edit] | Edit) -> HookedTransformer:
        """The model under interventions, as another model of the same parameters: every pass of it has these edits.

        Any analysis takes it. Means and resampled values need data: `ablate` looks them up.

        Args:
            edits: one edit or several.

        Returns:
            A `HookedTransformer` that shares its weights with this one.

        Raises:
            KeyError, IndexError: a part or site that the model lacks.
            ValueError: edits of some rows.

        Example:
            >>> without = model.edited([Edit("L1H2", interp.edits.Zero())])
            >>> interp.heads(without).attrs == interp.heads(model).attrs
            True
        """
        found = copy.copy(self)
        found._transformer = self.transformer.edited([edits] if isinstance(edits, Edit) else list(edits))
        return found

    @public()
    def with_dictionaries(self, dictionaries: Sequence[Mountable]) -> HookedTransformer:
        """The model with dictionaries in its blocks, as another model of the same parameters.

        Their features are parts like any other: `L5F123` is feature 123 of the dictionary in block 5, `L5.error` what
        the dictionary leaves unexplained of what it writes. Edits, reads, patching and ablation take them, and so do
        the sites `blocks.5.hook_features` and `blocks.5.hook_error`. A pass in which none of them is read or edited is
        bit for bit that of the model without dictionaries.

        Args:
            dictionaries: one for a block at most, each of which names its sites; on the device of the model. The gain
                of a norm that one reads without is put into its weights (`Dictionary.fitted_to`). A
                `CrossLayerTranscoder` stands in each of its blocks: an edited feature moves what this block and all
                later ones write, and passes begin at the first block, so that sweeps save less. A `Crosscoder`
                is none of these, as its features are known after its last source: `Crosscoder.edits`.

        Raises:
            ValueError: two for one block, one that does not name its sites, and a width that differs.
            KeyError: a site that the model lacks.

        Example:
            >>> eye, zero = torch.eye(24), torch.zeros(24)
            >>> weights = {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero}
            >>> sae = interp.features.Dictionary(interp.features.ReLU(), weights, reads="blocks.1.hook_resid_post")
            >>> split = model.with_dictionaries([sae])
            >>> silenced = split.edited(Edit("L1F7", interp.edits.Zero()))
            >>> silenced(tokens).shape == model(tokens).shape
            True
        """
        found = copy.copy(self)
        fitted = [dictionary.fitted_to(self._transformer) for dictionary in dictionaries]
        found._transformer = self._transformer.with_dictionaries(fitted)
        return found

    @property
    def cfg(self) -> ModelConfig:
        """The model's config."""
        return self._transformer.config

    def __repr__(self) -> str:
        c = self.cfg
        size = sum(p.numel() for p in self.transformer.parameters())
        return (
            f"HookedTransformer({self.name!r}: {c.n_layers} layers, {c.n_heads} heads, d_model {c.d_model}, "
            f"vocabulary {c.d_vocab}{_outputs(c)}, {size / 1e6:.1f} M parameters)"
        )

    def __str__(self) -> str:
        c = self.cfg
        position = "in the network's own code" if c.block.proven else type(c.position).__name__
        norm = type(c.norm).__name__
        size = sum(p.numel() for p in self.transformer.parameters())
        mlp = "none" if c.mlp is None else f"{c.mlp.d_mlp} neurons a layer"
        layers = f"no layers, d_model {c.d_model}"
        if c.n_layers:
            layers = f"{c.n_layers} layers of {c.n_heads} heads (d_head {c.d_head}), d_model {c.d_model}, MLP: {mlp}"
        where = f"{str(self.transformer.dtype).removeprefix('torch.')} on {self.transformer.device}"
        refused = self.text.refused
        return fitted(
            [
                f"HookedTransformer {self.name}: {size / 1e6:.1f} M parameters, {where}",
                f"  {layers}",
                f"  vocabulary {c.d_vocab}{_outputs(c)}, context {c.n_ctx}, positions {position}, norm {norm}",
                *(f"  {clause}" for clause in self.transformer.opened),
                *([] if refused is None else [f"  {refused}"]),
            ]
        )

    @public()
    def to(self, target: Device | torch.dtype) -> HookedTransformer:
        """Move or cast the parameters in place; returns self.

        Raises:
            ValueError: before any is moved or cast, for a device or dtype that parameters cannot have here, or a
                parameter that is too large for the dtype.
        """
        network = self.transformer
        if not isinstance(target, torch.dtype):
            check_dtype(network.dtype, torch.device(target))
        else:
            check_dtype(target, network.device)
            for name, weight in network.named_parameters():
                narrowed(weight.detach(), target, name)
        network.to(target)
        return self

    # text

    @public()
    def to_tokens(self, text: str | Sequence[str], *, prepend_bos: bool | None = None) -> Int[Tensor, "b p"]:
        """Token ids of one or several texts of one length, BOS first unless switched off.

        Args:
            text: one text or several.
            prepend_bos: whether texts begin with BOS; None: as the model does by default.

        Returns:
            [b, p].

        Raises:
            ValueError: texts of several lengths: ids do not say which are padding, `to_batch` does.
        """
        batch = self.to_batch(text, prepend_bos=prepend_bos)
        if batch.keep is not None:
            raise ValueError(
                f"texts of one length are required, got {batch.lengths.tolist()} tokens: ids alone do not say which "
                "are padding, so that what is computed of them would be wrong; model.to_batch(texts) does, and goes "
                "wherever texts go"
            )
        return batch.tokens

    @public()
    def to_batch(
        self,
        prompts: Prompts | None = None,
        *,
        chat: Chat | Sequence[Chat] | None = None,
        prepend_bos: bool | None = None,
        padding_side: Side = "right",
    ) -> Batch:
        """Prompts as a batch with its keep-mask; `batch.bos` says whether BOS was prepended.

        Chats are written in the chat template of the tokenizer, special tokens included, and nothing is prepended.
        After a last message of anyone but the assistant the answer's beginning follows, as the template writes it; a
        last message of the assistant is left open, to be continued.

        Args:
            prompts: texts, token ids, chats, or a batch.
            chat: one chat, a list of `{"role": "user", "content": "..."}` and so on, or several; every function that
                takes prompts takes these too.
            prepend_bos: whether texts begin with BOS; None: as the model does by default.
            padding_side: side on which shorter rows are padded.

        Returns:
            The batch; of chats, `batch.positions("user")` are the positions of a role, and `batch.roles` names that
            of each token.

        Raises:
            ValueError: prompts and a chat, or neither; a message that is none, a tokenizer without a chat template, or
                messages that its template refuses.

        Example:
            >>> model.to_batch(chat=[{"role": "user", "content": "The cat"}]).roles.tolist()
            [['template', 'template', 'user', 'user', 'template']]
        """
        if (prompts is None) == (chat is None):
            raise ValueError(f"prompts or a chat are required, got {'neither' if chat is None else 'both'}")
        if chat is not None:
            prompts = as_chats(chat)
        assert prompts is not None
        return self.text.batch(prompts, prepend_bos=prepend_bos, side=padding_side)

    @public()
    def chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> Int[Tensor, "1 p"]:
        """A conversation as token ids, in the chat template of the tokenizer; BOS where the template has one.

        Args:
            messages: `{"role": "user", "content": "..."}` and so on, in order.
            add_generation_prompt: end where the assistant's answer begins.

        Returns:
            [1, p]. The ids go wherever a prompt goes, and nothing is prepended to them. `to_batch(chat=...)` gives
            them with the role of each token, of several chats too, and lets the assistant's last message be continued.

        Raises:
            ValueError: no messages, a message without role or content, a tokenizer without a chat template, or
                messages that its template refuses.

        Example:
            >>> model.to_string(model.chat([{"role": "user", "content": "The cat"}]))
            'u:The cat '
        """
        if not messages or any({"role", "content"} - set(each) for each in messages):
            raise ValueError("messages must be at least one, each with a role and content")
        tokenizer = self.text.tokenizer
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise ValueError(NO_TEMPLATE)
        return torch.tensor([tokenizer.chat(messages, add_generation_prompt=add_generation_prompt)])

    @public()
    def to_string(
        self, tokens: Int[Tensor, "*p"] | Int[np.ndarray, "*p"] | Sequence[int] | int | np.integer
    ) -> str:
        """The text of a row of ids, or of one.

        Args:
            tokens: [p] ids, or one id.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        ids = torch.as_tensor(tokens).flatten().tolist()
        if bad := [i for i in ids if not 0 <= i < self.cfg.d_vocab]:
            raise ValueError(f"tokens must be in [0, {self.cfg.d_vocab - 1}], got {bad[0]}")
        return self.text.tokenizer.decode(ids)

    @public(unchecked=("prompt",))
    def to_str_tokens(self, prompt: Prompts, *, prepend_bos: bool | None = None) -> list[str]:
        """The text of each token of one prompt.

        Args:
            prompt: one text or row of ids.
            prepend_bos: whether a text begins with BOS; None: as the model does by default.

        Raises:
            ValueError: several prompts.
        """
        batch = self.to_batch(prompt, prepend_bos=prepend_bos)
        if len(batch) != 1:
            raise ValueError(f"one prompt is required, got {len(batch)}")
        return self.text.pieces(batch.tokens[0])

    @public()
    def to_single_token(self, text: str | int | np.integer) -> int:
        """The id of a text that is one token; an id is returned as it is.

        Raises:
            ValueError: a text of several tokens; the message names them.
        """
        return int(self.text.tokens(text)[0])

    # passes

    def __call__(
        self,
        prompts: Prompts,
        *,
        return_type: ReturnType = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: Side = "right",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits, the next-token loss, or both, of one pass; hooks of an enclosing `hooks()` apply.

        Args:
            prompts: texts, token ids, or a batch.
            return_type: "logits", "loss" or "both".
            loss_per_token: the loss of each token instead of their mean.
            prepend_bos: whether texts begin with BOS; None: as the model does by default.
            padding_side: side on which shorter rows are padded.

        Returns:
            Logits [b, p, v]; the loss in nats, one number or [b, p-1]; or the pair (logits, loss).

        Raises:
            ValueError: another `return_type`, or a loss of a model that does not predict the next token; a decoder
                that attends to a source, given without one (`HookedEncoderDecoder.given` makes its batches).
        """
        batch = self.to_batch(prompts, prepend_bos=prepend_bos, padding_side=padding_side)
        network = as_network(self)
        batch = batch.to(network.device)
        network, edits = with_edits_in_batch(network, batch)
        tap = Tap(edits=edits) if edits else None
        logits = network(batch.tokens, tap, **batch.inputs)
        if return_type == "logits":
            return logits
        self.cfg.require_next_token("a next-token loss")
        batch.require_one_continuation("a next-token loss")
        loss_of = next_token_loss if loss_per_token else mean_next_token_loss
        loss = loss_of(logits, batch.tokens, batch.keep, batch.documents)
        if return_type not in ("loss", "both"):
            raise ValueError(f"return_type must be logits, loss or both, got {return_type!r}")
        return loss if return_type == "loss" else (logits, loss)

    @public(plain_pass=True)
    def run_with_cache(
        self,
        prompts: Prompts,
        names_filter: Names = None,
        *,
        stop_at_layer: int | None = None,
        pos_slice: slice | int | None = None,
        device: Device | None = None,
        prepend_bos: bool | None = None,
        padding_side: Side = "right",
    ) -> tuple[Tensor, ActivationCache]:
        """The output and the activations of every matching site, of one pass without gradients.

        Args:
            prompts: texts, token ids, or a batch.
            names_filter: a site name, several, a glob such as `"blocks.*.hook_resid_post"`, a compiled regular
                expression, or a predicate; None: all sites that are not on demand.
            stop_at_layer: number of a block; the output is the residual stream entering it. None: the whole model.
            pos_slice: which positions are kept, of every axis that counts queries; None: all.
            device: where the activations go; None: they stay where they were computed.
            prepend_bos: whether texts begin with BOS; None: as the model does by default.
            padding_side: side on which shorter rows are padded.

        Returns:
            The logits [b, p, v], or with `stop_at_layer` the stream [b, p, d], and the cache by site name.

        Raises:
            ValueError: a `stop_at_layer` outside [0, n_layers].
            KeyError: a name that no site has.
        """
        if stop_at_layer is not None and not 0 <= stop_at_layer <= self.cfg.n_layers:
            raise ValueError(
                f"stop_at_layer must be in [0, {self.cfg.n_layers}] or None, got {stop_at_layer}"
            )
        if device is not None:
            require_device(device, numbers=False)
        batch = self.to_batch(prompts, prepend_bos=prepend_bos, padding_side=padding_side)
        wanted = matching(names_filter, self.cfg, stop_at_layer)
        reads = [Read(name, position_filter(name, self.cfg, pos_slice)) for name in wanted]
        seen = observe(self, batch, reads, stop=stop_at_layer)
        values = {read.site: value for read, value in seen.trace.items()}
        if device is not None:
            values = {name: value.to(device) for name, value in values.items()}
        return seen.output, ActivationCache(values, self.transformer)

    @public(plain_pass=True)
    def run_with_hooks(
        self,
        prompts: Prompts,
        fwd_hooks: Sequence[Hook] = (),
        bwd_hooks: Sequence[Hook] = (),
        *,
        return_type: ReturnType = "logits",
        prepend_bos: bool | None = None,
        padding_side: Side = "right",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The output of one pass with functions `fn(tensor, hook) -> tensor | None` at sites, removed afterwards.

        A returned tensor replaces the site's value (None: what the function wrote in place, if anything).

        Args:
            prompts: texts, token ids, or a batch.
            fwd_hooks: pairs of a site name (or filter) and a function of its value.
            bwd_hooks: pairs of a site name (or filter) and a function of its gradient, called when the output is
                differentiated.
            return_type: "logits", "loss" or "both".
            prepend_bos: whether texts begin with BOS; None: as the model does by default.
            padding_side: side on which shorter rows are padded.

        Returns:
            As `model(prompts)`.
        """
        with self.hooks(fwd_hooks, bwd_hooks):
            return self(prompts, return_type=return_type, prepend_bos=prepend_bos, padding_side=padding_side)

    @public(plain_pass=True)
    @entering
    def hooks(
        self, fwd_hooks: Sequence[Hook] = (), bwd_hooks: Sequence[Hook] = (), *, edits: Sequence[Edit] = ()
    ) -> Iterator[HookedTransformer]:
        """Hooks and edits for every pass inside the `with`, the passes of analyses included.

        They hold in this thread or task only, nest, may overlap, and vanish on leaving, also by an exception. Edits
        run after the hooks of the same block. What is returned may be entered again after it was left.

        Args:
            fwd_hooks: pairs of a site name (or filter) and a function of its value.
            bwd_hooks: pairs of a site name (or filter) and a function of its gradient; they belong to passes that
                keep gradients, others refuse them.
            edits: interventions of every pass.
        """
        hooks: list[tuple[Hook, HookDirection]] = [(h, "fwd") for h in fwd_hooks]
        hooks += [(h, "bwd") for h in bwd_hooks]
        found = [*as_edits(hooks, self.cfg), *edits]
        self._transformer.edited(found)  # refuses what the model lacks, before the block begins
        with edits_in_force(self._transformer, found):
            yield self

    @public(plain_pass=True)
    def generate(
        self, prompts: Prompts, max_new_tokens: int = 20, *, sampling: Sampling | None = None,
        repetition_penalty: float = 1.0, stop: Stop = (), stop_at_eos: bool = True,
        use_past_kv_cache: bool = True, edits: Sequence[Edit] = (), prepend_bos: bool | None = None,
    ) -> Batch:  # fmt: skip
        """Prompts with the model's continuation of each, greedy or sampled, in left-padded rows.

        The prompt and what is new may fill the context exactly. BOS by itself, as ids, is a prompt too: what the
        model says from nothing. `model.to_texts(batch)` gives the strings. Like every plain pass it follows
        `torch.autocast`, and says so by a `Note`: the tokens may be others.

        Args:
            prompts: texts, token ids, chats, or a batch, whose token types new tokens continue: they have that of their
                prompt's last token.
            max_new_tokens: the most tokens that are added to a row.
            sampling: how tokens are drawn; None: the most probable one.
            repetition_penalty: divides positive logits of tokens that are in the row, and multiplies negative ones;
                1: none.
            stop: what ends a row: a text that its new text contains, a token id, a function of its new text, or several
                of these. The row keeps the token that ended it.
            stop_at_eos: whether a row ends where the model's own generation does (`generation_config.json`, else the
                tokenizer's end of text), and of chats where the template ends the assistant's turn too.
            use_past_kv_cache: keep keys and values of earlier tokens instead of computing them again.
            edits: interventions at every step; hooks of an enclosing `hooks()` apply too. With the cache they see the
                prompt, then one new token at a time. Positions of an edit are each row's own: 0 is its first token,
                -1 the last of its prompt, and `{"pos": "new"}` every generated token.
            prepend_bos: whether texts begin with BOS; None: as the model does by default.

        Returns:
            Batch of prompts and continuations; `batch.keep` marks the real tokens.
        """
        batch = self.text.batch(prompts, prepend_bos=prepend_bos, side="left")
        stop_tokens, ends = stops_of(self.text, stop, eos=stop_at_eos, chat=batch.turns is not None)
        return generate(
            as_network(self), batch, max_new_tokens, sampling=sampling, repetition_penalty=repetition_penalty,
            stop_tokens=stop_tokens, ends=ends, use_cache=use_past_kv_cache, edits=edits,
        )  # fmt: skip

    @public(plain_pass=True)
    def stream(
        self, prompt: Prompts, max_new_tokens: int = 20, *, sampling: Sampling | None = None,
        repetition_penalty: float = 1.0, stop: Stop = (), stop_at_eos: bool = True,
        edits: Sequence[Edit] = (), prepend_bos: bool | None = None,
    ) -> Iterator[str]:  # fmt: skip
        """The text that `generate` adds to one prompt, in pieces of whole characters as soon as they are known.

        Hooks that are in place at the call apply to the whole stream.

        Args:
            prompt: one prompt; all other arguments are those of `generate`.
            max_new_tokens: the most tokens that are added.
            sampling: how tokens are drawn; None: the most probable one.
            repetition_penalty: as `generate`.
            stop: what ends the text, as `generate`.
            stop_at_eos: as `generate`.
            edits: interventions at every step.
            prepend_bos: whether a text begins with BOS; None: as the model does by default.

        Returns:
            Iterator of pieces of text.
        """
        batch = self.text.batch(prompt, prepend_bos=prepend_bos, side="left")
        stop_tokens, ends = stops_of(self.text, stop, eos=stop_at_eos, chat=batch.turns is not None)
        steps = stream(
            as_network(self), batch, max_new_tokens, sampling=sampling, repetition_penalty=repetition_penalty,
            stop_tokens=stop_tokens, ends=ends, edits=edits,
        )  # fmt: skip
        return streamed_text(batch, steps, self.text.tokenizer)

    @public()
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


def _tokenizer_in(path: Path, chat_template: str | None) -> UnreadTokenizer | None:
    """The tokenizer of a checkpoint, with another chat template if one is given."""
    stored = families.tokenizer_for(path)
    if stored is None:
        _check_template(chat_template, str(path))
        return None
    return stored if chat_template is None else replace(stored, chat_template=chat_template)


def _check_template(chat_template: str | None, source: str) -> None:
    """ValueError for a chat template where there is no tokenizer that could write chats in it."""
    if chat_template is not None:
        raise ValueError(
            f"{source} has no tokenizer of transformers, which a chat_template is for: give one, tokenizer=..."
        )


def _outputs(config: ModelConfig) -> str:
    """Words for outputs that are not the model's tokens."""
    return "" if config.d_vocab_out is None else f", {config.d_vocab_out} outputs"
