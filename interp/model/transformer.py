"""The model: ordinary PyTorch whose forward takes one optional argument, `tap`.

Its inputs are checked first: every error comes before any arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.kinds import Device
from interp.core.tiles import wide_product
from interp.core.transfers import to_device
from interp.core.wording import value_text
from interp.model import sites
from interp.model.attention import Memory, PassState, View, attention_mask, picked
from interp.model.block import ACTIVATIONS, Block
from interp.model.cells import Span
from interp.model.config import Alibi, Buckets, Learned, ModelConfig, NoNorm, Norm, Rotary, Sinusoidal
from interp.model.edits import Edit
from interp.model.kv_cache import KVCache, Past
from interp.model.layout import Layout
from interp.model.mapped import MappedFile
from interp.model.mounted import FeatureSites, Mountable, mounted
from interp.model.norm import Normalize
from interp.model.parts import Part
from interp.model.position import Rotation, ScoreBias, depends_on_length, sinusoids, table
from interp.model.rules import NO_RULES, Rule, secant
from interp.model.tap import Scope, Tap, at

T = TypeVar("T")
ID_TYPES = (torch.int64, torch.int32)
"""Dtypes of token ids that an embedding takes."""


def check_pass(
    config: ModelConfig,
    tokens: Tensor,
    layers: tuple[int, int],
    keep: Tensor | None,
    cache: Past | None,
    documents: Tensor | None,
) -> None:
    """ValueError for tokens, layers, masks or a cache that do not fit the model or each other."""
    if not isinstance(tokens, Tensor):
        raise ValueError(f"token ids in a Tensor, shape [batch, pos], are required, got {value_text(tokens)}")
    start, last = layers
    if not 0 <= start <= last <= config.n_layers:
        raise ValueError(f"requires 0 <= start <= stop <= {config.n_layers} layers, got {start} and {last}")
    _check_tokens(config, tokens, start)
    n = tokens.shape[1] + (0 if cache is None else cache.length)
    if n > config.n_ctx:
        raise ValueError(f"the context holds {config.n_ctx} tokens, got {n}")
    if keep is not None and keep.dtype != torch.bool:
        raise ValueError(f"keep must be boolean, True at real tokens, got {keep.dtype}")
    for name, mask in (("keep", keep), ("documents", documents)):
        if mask is not None and mask.shape != tokens.shape[:2]:
            shape = shape_text(tokens.shape[:2])
            raise ValueError(
                f"{name} must have the shape {shape} of the tokens, got {shape_text(mask.shape)}"
            )
    if documents is not None:
        _check_packed(config, n)
    if cache is None:
        return
    if documents is not None:
        raise ValueError("packed documents cannot be continued: a pass with documents takes no cache")
    cache.room(*tokens.shape[:2])
    _check_frequencies(config, cache.length, n)


def _check_tokens(config: ModelConfig, tokens: Tensor, start: int) -> None:
    if start:
        if tokens.ndim != 3 or tokens.shape[2] != config.d_model:
            raise ValueError(
                f"with start={start} a residual stream [batch, pos, {config.d_model}] is required, "
                f"got shape {shape_text(tokens.shape)}"
            )
    elif tokens.ndim != 2 or tokens.dtype not in ID_TYPES:
        raise ValueError(
            f"token ids [batch, pos] are required, got {tokens.dtype} of shape {shape_text(tokens.shape)}"
        )
    if tokens.shape[1] == 0 or tokens.shape[0] == 0:
        raise ValueError(f"at least one token is required, got shape {shape_text(tokens.shape)}")
    if not start and not is_functorch_wrapped_tensor(tokens):  # the values of such tensors cannot be read
        _check_ids("token ids", tokens, config.d_vocab)


def check_extras(config: ModelConfig, tokens: Tensor, types: Tensor | None, memory: Memory | None) -> None:
    """ValueError for token types or a memory that the model lacks, requires, or that do not fit."""
    if types is not None:
        if not config.n_token_types:
            raise ValueError("this model has no token types")
        if types.shape != tokens.shape[:2]:
            raise ValueError(
                f"types must have the shape {shape_text(tokens.shape[:2])}, got {shape_text(types.shape)}"
            )
        _check_ids("token types", types, config.n_token_types)
    if (memory is not None) != config.cross_attention:
        if memory is not None:
            raise ValueError("this model has no cross-attention, got a memory")
        raise ValueError(
            "this decoder requires a memory to attend to, its encoded source, got none: give it the batch of "
            "HookedEncoderDecoder.given(source, target), or memory=EncoderDecoder.encode(source)"
        )
    if memory is None:
        return
    states, shape = memory.states, (len(tokens), config.d_model)
    if states.ndim != 3 or (states.shape[0], states.shape[2]) != shape:
        raise ValueError(
            f"a memory [{shape[0]}, source position, {shape[1]}] is required, got {shape_text(states.shape)}"
        )
    if memory.keep is not None and memory.keep.shape != states.shape[:2]:
        raise ValueError(
            f"the memory's keep must have shape {shape_text(states.shape[:2])}, got {shape_text(memory.keep.shape)}"
        )


def _on_device(device: torch.device, value: T) -> T:
    """A tensor moved to this device; anything else unchanged."""
    if not isinstance(value, Tensor) or value.device == device:
        return value
    return to_device(value, device)  # type: ignore[return-value]


def _check_ids(what: str, ids: Int[Tensor, "b p"], count: int) -> None:
    """ValueError for ids out of range, on a CPU.

    They fault asynchronously on a GPU; there the embedding's own assertion must do.
    """
    if ids.device.type != "cpu":
        return
    low, high = (int(x) for x in torch.aminmax(ids))
    if low < 0 or high >= count:
        raise ValueError(f"{what} must be in [0, {count - 1}], got {low if low < 0 else high}")


def _check_packed(config: ModelConfig, n: int) -> None:
    """ValueError for packed texts that may need different rotary frequencies.

    A row has one set of rotary frequencies; where they depend on the length, its texts may need different ones.
    """
    for rotary in (config.position, config.local_position):
        limit = depends_on_length(rotary) if isinstance(rotary, Rotary) else None
        if limit is not None and n > limit:
            raise ValueError(
                f"packed rows of {n} tokens have no common rotary frequencies in this model, "
                f"whose frequencies depend on the length beyond {limit} tokens: run its texts unpacked"
            )


def check_branched(
    config: ModelConfig, shape: tuple[int, int], documents: Tensor | None, branches: Tensor | None
) -> None:
    """ValueError for rows `[b, k]` with several continuations, of a model that cannot keep them apart."""
    if branches is None:
        return
    if not config.branching:
        raise ValueError(
            "several continuations in one row require causal softmax attention in every layer, whose mask keeps them "
            "apart: this model has other layers, so ask for one continuation at a time"
        )
    if documents is not None:
        raise ValueError("rows are packed (documents) or have several continuations (branches), got both")
    if branches.shape != shape:
        raise ValueError(
            f"branches must have the shape {shape_text(shape)} of the tokens and those before them, got "
            f"{shape_text(branches.shape)}"
        )
    _check_packed(config, shape[1])


def _check_frequencies(config: ModelConfig, past: int, total: int) -> None:
    """ValueError for a pass that would change the rotary frequencies of cached keys.

    Cached keys were rotated for the length at their time; they are wrong once the frequencies change.
    """
    for rotary in (config.position, config.local_position):
        limit = depends_on_length(rotary) if isinstance(rotary, Rotary) else None
        if limit is not None and past > 0 and total > limit:
            raise ValueError(
                f"beyond {limit} tokens the rotary frequencies of this model depend on the length, "
                f"and the {past} cached keys do not fit: run without a cache"
            )


@public(plain_pass=True)
class Transformer(nn.Module):
    """A decoder (or, with `causal=False`, an encoder), every part of which can be read and edited.

    With `tap=None` no site exists and attention is the fused kernel.
    """

    opened: tuple[str, ...] = ()
    """Steps by which the checkpoint was opened, a clause each: its format where that is no plain safetensors, what
    was dequantised, merged or left out.
    """
    rules: frozenset[Rule] = NO_RULES
    """Backward rules of this model, set by `ruled`; empty otherwise."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        d = config.d_model
        self.embed = table(config.d_vocab, d)
        learned = config.position
        self.pos_embed = table(config.n_ctx + learned.offset, d) if isinstance(learned, Learned) else None
        self.type_embed = table(config.n_token_types, d) if config.n_token_types else None
        self.ln_embed = Normalize(config.norm, d, "ln_embed") if config.embed_norm else None
        biased = isinstance(config.position, Alibi | Buckets)
        self.score_bias = (
            ScoreBias(config.position, config.n_heads, config.head_width, causal=config.causal)  # type: ignore[arg-type]
            if biased
            else None
        )
        self.blocks = nn.ModuleList(config.block.build(config, layer) for layer in range(config.n_layers))
        self.ln_final = Normalize(config.norm if config.final_norm else NoNorm(), d, "ln_final")
        self.mlm_head = MaskedHead(config.mlm_head, config.norm, d) if config.mlm_head else None
        self.output = config.output.build(config)
        linear = config.unembed and self.output is None
        self.unembed = nn.Linear(d, config.n_outputs, bias=config.unembed_bias) if linear else None
        self.devices: tuple[torch.device, ...] | None = None
        self.edits: tuple[Edit, ...] = ()
        """Edits of every pass of this model, set by `edited`; empty otherwise."""
        self.dictionaries: Mapping[int, Mountable] = {}
        """The dictionary of each block that has one, set by `with_dictionaries`."""
        self.files: tuple[MappedFile, ...] = ()
        """Files of which parameters are views."""
        initialise(self)
        self.tie()

    def tie(self) -> None:
        """Make parameters one where they are: unembedding and embedding, the blocks'."""
        if self.config.tied and self.unembed is not None:
            self.unembed.weight = self.embed.weight
        if self.config.shared_blocks:
            for block in self.blocks[1:]:
                for name, module in self.blocks[0].named_modules():
                    for own, parameter in module.named_parameters(recurse=False):
                        setattr(block.get_submodule(name), own, parameter)

    @public()
    def place(self, devices: Sequence[Device]) -> None:
        """Spread the blocks over these devices; everything outside them stays on the first.

        What a pass returns and records is on the first device.

        Raises:
            ValueError: several devices for blocks that share their weights.
        """
        if self.config.shared_blocks and len(set(devices)) > 1:
            raise ValueError(f"blocks that share their weights require one device, got {len(set(devices))}")
        places = [torch.device(device) for device in devices]
        self.devices = layer_devices(self.config.n_layers, places)
        for name, module in self.named_children():
            if name != "blocks":
                module.to(places[0])
        for layer, device in enumerate(self.devices):
            self.block(layer).to(device)

    @public()
    def edited(self, edits: Sequence[Edit] | Edit) -> Transformer:
        """The model under interventions: another one of the same parameters, every pass of which has these edits.

        Raises:
            KeyError, IndexError: a part or site that the model lacks.
            ValueError: an edit of some rows.
        """
        added = (edits,) if isinstance(edits, Edit) else tuple(edits)
        for edit in added:
            sites.find(edit.site, self.config)
            if isinstance(edit.where, Part):
                edit.where.within(self.config)
            if edit.of_rows:
                raise ValueError(
                    f"an edited model is edited in all rows of every batch alike; the edit of {edit.name} names some, "
                    "or a position for each: hand it to one pass, as observe or generate"
                )
        return self._with_edits((*self.edits, *added))

    @public()
    def with_dictionaries(self, dictionaries: Sequence[Mountable]) -> Transformer:
        """The model with dictionaries in its blocks, in place of any that it has, and of the same parameters.

        Raises:
            KeyError, ValueError: as `interp.model.mounted.mounted`.
        """
        network = copy.copy(self)
        found = mounted(dictionaries, self.config)
        counts = tuple(
            found[layer][1].n_features if layer in found else 0 for layer in range(self.config.n_layers)
        )
        network.config = replace(self.config, features=FeatureSites(counts) if found else None)
        network.dictionaries = {layer: dictionary for layer, (dictionary, _) in found.items()}
        return network

    @property
    def unedited(self) -> Transformer:
        """The model without interventions."""
        return self._with_edits(()) if self.edits else self

    def check_files(self) -> None:
        """ValueError if a file of which parameters are views was overwritten in place."""
        for file in self.files:
            file.check(self)

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> Transformer:
        """The model with other tensors in place of some parameters, differentiable in them; all others are shared.

        Its modules are copies: the model itself is not touched, so passes of it in other threads stay as they are.

        Raises:
            AttributeError: a parameter that the model lacks.
        """
        shared: list[object] = [
            self.config,
            self.edits,
            self.dictionaries,
            *self.parameters(),
            *self.buffers(),
        ]
        memo = {id(each): each for each in shared}
        memo |= {id(self.get_parameter(name)): value for name, value in parameters.items()}
        return copy.deepcopy(self, memo)

    def ruled(self, rules: Collection[Rule]) -> Transformer:
        """The model under backward rules: another one of the same parameters, with other derivatives.

        `interp.passes.rules` says which models the rules are defined for.
        """
        network = self.with_parameters({})
        for module in network.modules():
            if hasattr(module, "rules"):
                module.rules = frozenset(rules)  # type: ignore[assignment]
        return network

    def _with_edits(self, edits: tuple[Edit, ...]) -> Transformer:
        network = copy.copy(self)
        network.edits = edits
        return network

    def forward(
        self,
        tokens: Tensor,
        tap: Tap | None = None,
        start: int = 0,
        stop: int | None = None,
        *,
        keep: Bool[Tensor, "b p"] | None = None,
        cache: Past | None = None,
        logits_at: Int[Tensor, "b n"] | None = None,
        documents: Int[Tensor, "b p"] | None = None,
        types: Int[Tensor, "b p"] | None = None,
        memory: Memory | None = None,
        branches: Int[Tensor, "b k"] | None = None,
    ) -> Tensor:
        """Logits `[b p v]`; or, with `stop`, the residual stream entering block `stop`, `[b p d]`.

        Token ids and what goes with them are brought to the model's device. A model without an unembedding returns
        its final residual stream.

        Args:
            tokens: ids [b, p]; with `start > 0` the residual stream entering block `start`, [b, p, d].
            tap: reads and edits of the pass; None: no site exists.
            start: number of the first block that runs.
            stop: number of the block before which the pass ends; None: the whole model.
            keep: [b, p], True at real tokens; None: no padding. Positions count the kept tokens only.
            cache: keys and values of earlier tokens, to which those of this pass are added.
            logits_at: [b, n], columns of each row whose logits are wanted; the others are never computed, and the
                sites after the blocks (`ln_final.*`, `unembed.hook_out`) hold these n columns. With `stop` = the
                number of blocks: the columns of the final stream that are wanted, [b, n, d].
            documents: [b, p], an id per column, where rows pack several texts; each sees itself only, its positions
                begin at 0.
            types: [b, p], token types of a model that has them; None: 0 everywhere.
            memory: what cross-attention reads, required by models that have it.
            branches: [b, k], the continuation of its row that each column belongs to, cached ones included: 0 for the
                columns that all of them share and see; those of 1, 2, ... see nothing of each other. None: one text.

        Raises:
            ValueError: ids, shapes, lengths or layers that do not fit, or weights whose file was overwritten.
        """
        self.check_files()
        tokens = tokens if start else _on_device(self.device, tokens)
        keep, documents, types, logits_at, branches = (
            _on_device(self.device, x) for x in (keep, documents, types, logits_at, branches)
        )
        last, past = self.config.n_layers if stop is None else stop, 0 if cache is None else cache.length
        check_pass(self.config, tokens, (start, last), keep, cache, documents)
        check_branched(self.config, (tokens.shape[0], past + tokens.shape[1]), documents, branches)
        check_extras(self.config, tokens, types, memory)
        if last < self.config.n_layers and logits_at is not None:
            raise ValueError(
                f"logits_at requires a pass through every block, not one that stops before {stop}"
            )
        tap = Tap(prompt=prompt_of(cache, tokens)) if tap is None and self.edits else tap
        full_keep = keep if cache is None else cache.extended_keep(keep, *tokens.shape[:2])
        layout = Layout(full_keep, documents, branches=branches)
        if tap is not None:
            span = Span(past, layout, _memory_layout(memory), logits_at, past + tokens.shape[1])
            tap.open(
                self.config,
                start,
                stop,
                self._device_of_answers,
                standing=self.edits,
                dictionaries=self.dictionaries,
                span=span,
            )
        outside = None if tap is None else tap.scope()
        positions = layout.positions(tokens.shape[1], past, tokens.device)
        resid = tokens if start else self._embedded(tokens, positions, types, outside)
        if tap is not None and tap.finished:
            return resid
        shared = self._shared(positions, layout, cache, memory)
        resid, trimmed = self._through(resid, range(start, last), shared, tap, logits_at)
        if tap is not None and tap.finished:
            return resid
        if cache is not None:
            cache.states.update(shared.left)
            cache.advance(tokens.shape[1], layout.keep)
        if logits_at is not None and not trimmed:
            resid = picked(resid, logits_at)
        return resid if stop is not None else self.read_out(resid, outside)

    def read_out(
        self,
        resid: Float[Tensor, "*b d"],
        tap: Scope | None = None,
        *,
        columns: Int[Tensor, "*b k"] | None = None,
    ) -> Float[Tensor, "*b v"]:
        """Logits of a residual stream: final norm (recomputed), unembedding, scale and soft cap.

        In the dtype of the stream: one in float32 has logits in float32 where the model is in half precision, whose
        own logits are rounded (those near 20 to eighths in bfloat16). Weights are widened a block at a time. For a
        model without an unembedding: the normed stream; with another output layer than the full softmax
        log-probabilities.

        Args:
            columns: tokens whose logits are wanted, `[*b k]` instead of `[*b v]`; the others are never computed. With
                another output layer than the full softmax it saves nothing.
        """
        if tap is None:
            self.check_read_out()
        logits, cap = self.uncapped(resid, tap, columns=columns), self.config.logit_softcap
        if not self.config.unembed:
            return logits
        if cap is not None and "activation" in self.rules:
            logits = at(tap, "unembed.hook_uncapped", logits)
            logits = secant(lambda x: (x / cap).tanh() * cap, logits, self.rules)
        elif cap is not None:  # step by step: never three arrays of logits at once
            logits = at(tap, "unembed.hook_uncapped", logits) / cap
            logits = logits.tanh()
            logits = logits * cap
        return at(tap, "unembed.hook_out", logits)

    def check_read_out(self) -> None:
        """ValueError if edits after the last block change the logits, which the stream alone does not tell."""
        if late := [e.name for e in self.edits if sites.is_late(e.site)]:
            raise ValueError(
                f"this model is edited after its last block ({', '.join(late)}); what reads the logits off a residual "
                "stream by itself would miss that: edit inside the blocks, or look at a whole pass"
            )

    def uncapped(
        self,
        resid: Float[Tensor, "*b d"],
        tap: Scope | None = None,
        *,
        columns: Int[Tensor, "*b k"] | None = None,
    ) -> Float[Tensor, "*b v"]:
        """Logits of a residual stream before their soft cap (where the model has one), in the dtype of the stream."""
        x = self.ln_final(resid, tap)
        if self.output is not None:
            log_probs = called(self.output, x)
            return log_probs if columns is None else log_probs.gather(-1, columns)
        if self.unembed is None:
            return x
        x = x if self.mlm_head is None else called(self.mlm_head, x)
        logits = unembedded(self.unembed, x) if columns is None else _some_logits(self.unembed, x, columns)
        return logits if self.config.logit_scale == 1 else logits * self.config.logit_scale

    def new_cache(self, rows: int, n_max: int) -> Past:
        """An empty cache for this many rows and tokens, on the device of each block."""
        where = self.device if self.devices is None else self.devices
        return KVCache(self.config, rows, n_max, device=where, dtype=self.dtype)

    @property
    def by_block(self) -> bool:
        """Whether a pass of one block costs no more than the block, so that a sweep may run one after the other."""
        return self.restarts

    @property
    def restarts(self) -> bool:
        """Whether a pass may begin at a later block: not where features of one block write to others."""
        return all(dictionary.in_one_block for dictionary in self.dictionaries.values())

    def block(self, layer: int) -> Block:
        """Block `layer`, typed."""
        block = self.blocks[layer]
        assert isinstance(block, Block)
        return block

    @property
    def _device_of_answers(self) -> torch.device | None:
        """The device of recorded values if layers are spread over devices; None otherwise."""
        return None if self.devices is None else self.device

    @property
    def device(self) -> torch.device:
        """The device of the embedding, and of what a pass returns."""
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.embed.weight.dtype

    def _embedded(
        self,
        tokens: Int[Tensor, "b p"],
        positions: Int[Tensor, "#b p"],
        types: Int[Tensor, "b p"] | None,
        tap: Scope | None,
    ) -> Float[Tensor, "b p d"]:
        """The stream entering the first block: token, position and type embeddings, normed in some families."""
        resid = self.embed(tokens)
        if self.config.embed_scale != 1:
            resid = resid * torch.tensor(self.config.embed_scale, dtype=resid.dtype, device=resid.device)
        resid = at(tap, "hook_embed", resid)
        if tap is not None and tap.finished:
            return resid
        place = self._position_vectors(positions)
        if place is not None:
            if tap is not None:
                place = at(tap, "hook_pos_embed", place.expand_as(resid))
            resid = resid + place
        if self.type_embed is not None:
            kinds = self.type_embed(torch.zeros_like(tokens) if types is None else types)
            resid = resid + at(tap, "hook_type_embed", kinds)
        resid = resid if self.ln_embed is None else self.ln_embed(resid, tap)
        return resid if len(self.blocks) else at(tap, "hook_stream", resid)

    def _position_vectors(self, positions: Int[Tensor, "#b p"]) -> Float[Tensor, "#b p d"] | None:
        kind = self.config.position
        if isinstance(kind, Sinusoidal):
            return sinusoids(kind, positions, self.config.d_model, self.dtype)
        if self.pos_embed is None or not isinstance(kind, Learned):
            return None
        return self.pos_embed(positions + kind.offset if kind.offset else positions)

    def _through(
        self,
        resid: Float[Tensor, "b p d"],
        layers: range,
        shared: PassState,
        tap: Tap | None,
        only: Int[Tensor, "b n"] | None,
    ) -> tuple[Float[Tensor, "b _ d"], bool]:
        """The stream after these blocks, and whether the last block returned the columns `only` alone.

        The stream moves to each block's device, and finally back to its own.
        """
        home, passes = resid.device, {resid.device: shared}
        trims = False
        for layer in layers:
            device = home if self.devices is None else self.devices[layer]
            if device not in passes:
                passes[device] = shared.to(device)
            scope = None if tap is None else tap.scope(layer)
            trims = only is not None and scope is None and layer == self.config.n_layers - 1
            columns = only.to(device) if trims and only is not None else None
            resid = self.blocks[layer](resid.to(device), passes[device], scope, columns)
            if tap is not None and tap.finished:
                break
        return resid.to(home), trims

    def _shared(
        self, positions: Int[Tensor, "#b p"], layout: Layout, cache: Past | None, memory: Memory | None
    ) -> PassState:
        """Masks and rotations of a pass over tokens at these positions."""
        n, past, device = positions.shape[1], 0 if cache is None else cache.length, positions.device
        config = self.config
        bias = None
        if self.score_bias is not None:
            bias = self.score_bias(positions, layout.positions(past + n, 0, device), self.dtype)

        def view(rotary: object, *, local: bool) -> View:
            mask = attention_mask(config, n, past, layout, device, local=local)
            turned = None
            if isinstance(rotary, Rotary):
                turned = Rotation.at(rotary, config.head_width, positions, self.dtype)
            return View(mask if bias is None else mask.with_bias(bias), turned)

        everywhere = view(config.position, local=False)
        local = everywhere
        if config.window is not None:
            local = view(config.local_position or config.position, local=True)
        return PassState(everywhere, local, cache, memory, layout, positions)


def _memory_layout(memory: Memory | None) -> Layout:
    """Layout of the rows that cross-attention reads."""
    return Layout(None if memory is None else memory.keep)


def prompt_of(cache: Past | None, tokens: Tensor) -> int | None:
    """Number of columns of the prompts: of the cache's first pass, which may be this one; None without a cache."""
    if cache is None:
        return None
    return cache.prompt or tokens.shape[1]


def layer_devices(n_layers: int, devices: Sequence[torch.device]) -> tuple[torch.device, ...]:
    """The device of every block, in consecutive runs of equal length; ValueError without any device."""
    if not devices:
        raise ValueError("at least one device is required, got none")
    return tuple(devices[layer * len(devices) // n_layers] for layer in range(n_layers))


def called(module: nn.Module, x: Float[Tensor, "*b d"]) -> Tensor:
    """The output of a module after the blocks for x, with its parameters in the dtype of x."""
    parameters = dict(module.named_parameters())
    if all(p.dtype == x.dtype for p in parameters.values()):
        output = module(x)
    else:
        output = torch.func.functional_call(
            module, {name: p.to(x.dtype) for name, p in parameters.items()}, x
        )
    assert isinstance(output, Tensor)
    return output


def unembedded(
    unembed: nn.Module, x: Float[Tensor, "*b d"], tokens: slice = slice(None)
) -> Float[Tensor, "*b v"]:
    """x W_U + b_U for consecutive tokens, in the dtype of x: narrower weights are widened a block at a time.

    Args:
        unembed: a linear map, or what stands in its place (compat puts a module of its own there).
    """
    if tokens == slice(None) and all(p.dtype == x.dtype for p in unembed.parameters()):
        logits: Tensor = unembed(x)
        return logits
    linear = cast(nn.Linear, unembed)
    weight, bias = linear.weight[tokens], None if linear.bias is None else linear.bias[tokens]
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    logits = wide_product(x, weight)
    return logits if bias is None else logits.add_(bias)


def _some_logits(
    unembed: nn.Module, x: Float[Tensor, "*b d"], columns: Int[Tensor, "*b k"]
) -> Float[Tensor, "*b k"]:
    """x W_U + b_U for these tokens only."""
    linear = cast(nn.Linear, unembed)
    logits = (linear.weight[columns].to(x.dtype) @ x[..., None])[..., 0]
    return logits if linear.bias is None else logits + linear.bias[columns]


class MaskedHead(nn.Module):
    """BERT's layers before its unembedding: a dense layer, an activation and a norm. Not linear in the stream."""

    rules = NO_RULES

    def __init__(self, act: str, norm: Norm, d_model: int) -> None:
        super().__init__()
        self.dense = nn.Linear(d_model, d_model)
        self.act = ACTIVATIONS[act]
        self.norm = Normalize(norm, d_model, "mlm_head")

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b e"]:
        """The input of the unembedding."""
        return self.norm(secant(self.act, self.dense(x), self.rules))


_ZERO_AT_FIRST = (
    "into.bias", "out.bias", "qkv.bias", "q.bias", "kv.bias", "unembed.bias", "dense.bias",
)  # fmt: skip


def initialise(model: nn.Module) -> None:
    """Initialise by GPT-2's scheme.

    normal(0, 0.02), what writes to the stream (`out`) scaled by 1/sqrt(2 layers), biases 0, norms 1. Vectors of other
    names, and what is drawn once and never trained, stay as their module made them. Parameters without storage (device
    "meta") are left alone.
    """
    n_layers = sum(isinstance(m, Block) for m in model.modules())
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.requires_grad:
            continue
        writes = name.endswith((".out", ".out.weight"))
        if name.endswith(".kernel"):  # a depthwise convolution: its fan-in is its length
            nn.init.normal_(parameter, std=len(parameter) ** -0.5)
        elif parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02 * ((2 * n_layers) ** -0.5 if writes else 1.0))
        elif name.endswith(_ZERO_AT_FIRST):
            nn.init.zeros_(parameter)
