"""TransformerLens' `ActivationCache`: the activations of a pass by name, and the residual stream taken apart.

Names, labels, arguments and numbers are those of TransformerLens 3.9; the residual stream is read by `Reading`.
"""

import logging
import warnings
from collections import Counter
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import chain
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.compat.transformer_lens.act_names import get_act_name
from interp.compat.transformer_lens.tensors import Slice, SliceInput


@dataclass(frozen=True, eq=False)
class Reading:
    """The linear map `x -> (x - mean x) @ projection / scale`; each of the three steps may be absent."""

    centre: bool = False
    """Whether the mean over d_model is taken off."""
    scale: Float[Tensor, "*#batch 1"] | None = None
    """The divisor, per row and position."""
    projection: Float[Tensor, "d o"] | None = None
    """Directions to read; None keeps the whole vector."""

    @cached_property
    def directions(self) -> Float[Tensor, "d o"] | None:
        """The projection, centred if vectors are to be: `(x - mean x) @ p = x @ (p - mean p)`."""
        if self.projection is None or not self.centre:
            return self.projection
        return self.projection - self.projection.mean(0)

    def unscaled(self, vectors: Float[Tensor, "... d"]) -> Float[Tensor, "... o"]:
        """Everything but the division: what a writing weight (its rows are vectors) becomes."""
        vectors = self._widened(vectors)
        if self.directions is not None:
            return vectors @ self.directions.to(vectors.dtype)
        return vectors - vectors.mean(-1, keepdim=True) if self.centre else vectors

    def __call__(self, vectors: Float[Tensor, "*stack d"]) -> Float[Tensor, "*out o"]:
        """The vectors as read; leading dimensions beyond the scale's are components."""
        read = self.unscaled(vectors)
        return read if self.scale is None else read / self.scale

    def heads(
        self, z: Float[Tensor, "*batch h e"], w_out: Float[Tensor, "h e d"]
    ) -> Float[Tensor, "h *batch o"]:
        """The vectors that heads write, as read: one einsum."""
        scaled = z if self.scale is None else z / self.scale[..., None]
        writes = self.unscaled(w_out)
        return torch.einsum("...he,heo->h...o", scaled.to(writes.dtype), writes)

    def neurons(
        self, post: Float[Tensor, "*batch m"], w_out: Float[Tensor, "m d"]
    ) -> Float[Tensor, "m *batch o"]:
        """The vectors that neurons write, as read."""
        scaled = post if self.scale is None else post / self.scale
        writes = self.unscaled(w_out)
        return scaled.movedim(-1, 0)[..., None] * writes.reshape(
            len(writes), *(1,) * (post.ndim - 1), writes.shape[-1]
        )

    def dots(
        self, stack: Float[Tensor, "*stack d"], directions: Float[Tensor, "... d"]
    ) -> Float[Tensor, "*out"]:
        """The products of vectors as read (without a projection) with directions."""
        dots = torch.einsum("...d,...d->...", self._widened(stack), self.unscaled(directions))
        return dots if self.scale is None else dots / self.scale[..., 0]

    def _widened(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """In the widest dtype of those concerned: the scale of a 16-bit model is float32, and so is what it divides."""
        for other in (self.scale, self.projection):
            x = x if other is None else x.to(torch.promote_types(x.dtype, other.dtype))
        return x


def joined(
    parts: Iterator[Float[Tensor, "_ ..."]], n: int, *, rows_inside: bool = False
) -> Float[Tensor, "n ..."]:
    """A copy of the parts in one tensor of n rows; without gradients at most one other part is in memory.

    rows_inside: whether the rows are next to the last axis in memory, as in a stack of TransformerLens.
    """
    first = next(parts)
    if first.requires_grad:
        if rows_inside:
            return torch.cat([part.movedim(0, -2) for part in chain([first], parts)], -2).movedim(-2, 0)
        return torch.cat([first, *parts])
    whole, start = first.new_empty((n, *first.shape[1:])), len(first)
    if rows_inside:
        whole = first.new_empty((*first.shape[1:-1], n, first.shape[-1])).movedim(-2, 0)
    whole[:start] = first
    for part in parts:
        whole[start : start + len(part)] = part
        start += len(part)
    return whole


def with_remainder(
    rows: Iterator[Float[Tensor, "_ ..."]], rest: Float[Tensor, "..."], n: int
) -> Float[Tensor, "n ..."]:
    """The rows, and last what is left of `rest` without them, as TransformerLens computes it to the bit.

    It sums all rows at once, next to the last axis in memory, which decides the order of the sum.
    """
    if n == 1:
        return rest[None]
    stack = joined(rows, n - 1, rows_inside=True)
    return torch.cat((stack, (rest - stack.sum(0))[None]))


logger = logging.getLogger(__name__)

Slices = Slice | SliceInput
"""A `Slice` or what makes one."""
Key = str | tuple[Any, ...]
"""A full name, a shorthand ("k6") or `(name, layer, sublayer)`; layers may be any kind of integer."""
Store = TypeVar("Store", bound="CachedActivations")


class CachedActivations:
    """Tensors by name, as a dictionary: `cache["blocks.3.attn.hook_pattern"]`, `cache["pattern", 3]`, `cache["k6"]`.

    `cache_dict` holds the tensors, `model` the model (set it to None to let go of it), `has_batch_dim` whether they
    still have a batch dimension.
    """

    def __init__(self, cache_dict: dict[str, Tensor], model: Any, has_batch_dim: bool = True) -> None:
        self.cache_dict = cache_dict
        self.model = model
        self.has_batch_dim = has_batch_dim
        self.has_embed = "hook_embed" in cache_dict
        self.has_pos_embed = "hook_pos_embed" in cache_dict

    def __getattr__(self, name: str) -> Any:
        """Only reached for what is not there. AttributeError."""
        why = ": it is about state-space layers, which our models do not have" if "ssm" in name else ""
        raise AttributeError(f"{type(self).__name__} has no {name!r}{why}")

    def __repr__(self) -> str:
        return f"{type(self).__name__} with keys {list(self.cache_dict)}"

    def __getitem__(self, key: Key) -> Tensor:
        """The activation of a name or shorthand; negative layers count from the end. KeyError if it is not cached."""
        if key in self.cache_dict:
            return self.cache_dict[key]
        if isinstance(key, str):
            name = get_act_name(key)
        else:
            layer = key[1] if len(key) > 1 else None
            if layer is not None and layer < 0:
                key = (key[0], self.model.cfg.n_layers + layer, *key[2:])
            name = get_act_name(*key)
        if name not in self.cache_dict:
            near = get_close_matches(name, self.cache_dict, n=1)
            raise KeyError(
                f"{name} was not cached" + (f"; the nearest that was is {near[0]}" if near else "")
            )
        return self.cache_dict[name]

    def __len__(self) -> int:
        return len(self.cache_dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.cache_dict)

    def keys(self) -> KeysView[str]:
        """The full names."""
        return self.cache_dict.keys()

    def values(self) -> ValuesView[Tensor]:
        """The tensors."""
        return self.cache_dict.values()

    def items(self) -> ItemsView[str, Tensor]:
        """Names with tensors."""
        return self.cache_dict.items()

    def to(self: Store, device: str | torch.device, move_model: bool = False) -> Store:
        """This cache, its tensors moved to a device (and the model too, a deprecated option of older releases)."""
        self.cache_dict = {name: value.to(device) for name, value in self.cache_dict.items()}
        if move_model:
            warnings.warn("move_model is deprecated: call model.to", DeprecationWarning, stacklevel=2)
            self.model.to(device)
        return self

    def toggle_autodiff(self, mode: bool = False) -> None:
        """Switch gradients on or off for the whole process (`torch.no_grad()` around the code does less harm)."""
        logger.warning("Changed the global state, set autodiff to %s", mode)
        torch.set_grad_enabled(mode)

    def _batch_size(self) -> int:
        """The commonest leading size: some entries are shared by the batch and have none."""
        counts = Counter(value.shape[0] for value in self.cache_dict.values() if value.ndim)
        return counts.most_common(1)[0][0] if counts else 1

    def remove_batch_dim(self: Store) -> Store:
        """This cache without its batch dimension. AssertionError for more than one row; a warning the second time."""
        if not self.has_batch_dim:
            logger.warning("Tried removing batch dimension after already having removed it.")
            return self
        if (size := self._batch_size()) != 1:
            raise AssertionError(f"Cannot remove batch dimension from cache with batch size {size}")
        for name, value in self.cache_dict.items():
            if value.ndim and len(value) == 1:
                self.cache_dict[name] = value[0]
        self.has_batch_dim = False
        return self

    def apply_slice_to_batch_dim(self: Store, batch_slice: Slices) -> Store:
        """A new cache with these rows (views); one row given as a number drops the dimension.

        Raises:
            AssertionError: a cache without a batch dimension.
        """
        rows = as_slice(batch_slice)
        if not self.has_batch_dim:
            raise AssertionError("Cannot index into a cache without a batch dim")
        size = self._batch_size()
        chosen = {
            name: rows.apply(value, dim=0) if value.ndim and len(value) == size else value
            for name, value in self.cache_dict.items()
        }
        return type(self)(chosen, self.model, has_batch_dim=rows.mode != "int")


def as_slice(given: Slices) -> Slice:
    """The `Slice` of what makes one; an int drops the axis."""
    return given if isinstance(given, Slice) else Slice(given)


Stack = Tensor | tuple[Tensor, list[str]]
"""Components `[component *batch_and_pos d_model]`, with their labels if `return_labels`."""
Projection = Float[Tensor, "d"] | Float[Tensor, "d o"]
"""One direction of the residual stream, or several in columns."""
Tokens = str | int | Int[Tensor, "..."]
"""One token as a number, a string or a tensor of one; or one per row, or per row and position."""

NORMALIZED, CENTRED = ("LN", "LNPre", "RMS", "RMSPre"), ("LN", "LNPre")


class ActivationCache(CachedActivations):
    """The activations of a pass, by name or shorthand, and the terms that its residual stream is the sum of.

    Example: `logits, cache = model.run_with_cache(tokens)`; `stack, labels = cache.stack_head_results(pos_slice=-1,
    return_labels=True)`; `cache.logit_attrs(stack, answer, pos_slice=-1)`.

    Parts are what each component wrote into the residual stream, and sum to it. As in TransformerLens that fails if
    blocks norm what a sublayer adds (Gemma 2 and 3, OLMo 2): there `stack_head_results`, `stack_neuron_results` and
    `get_full_resid_decomposition` give what heads and neurons write before that norm; `interp.attribute` gives what
    arrives.
    """

    def accumulated_resid(
        self,
        layer: int | None = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Slices = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Stack:
        """The residual stream before each layer up to `layer` (-1, None: all, with the final one): the logit lens.

        Labels "0_pre", "0_mid" (with `incl_mid`, or for `layer` itself with `mlp_input`), ..., "final_post". With
        `apply_ln` the final norm computes its statistics for every state; for another `layer` the states are divided
        by the cached scale of that layer's norm.

        Raises:
            KeyError: mid states of blocks that have none (attention only, parallel).

        See Also:
            `interp.logit_lens`: reads every state a model has.
        """
        upto, pos = self._layer(layer), as_slice(pos_slice)
        n_layers = self.model.cfg.n_layers
        keys: dict[str, Key] = {}
        for at in range(upto + 1):
            if at == n_layers:
                keys["final_post"] = ("resid_post", n_layers - 1)
                continue
            keys[f"{at}_pre"] = ("resid_pre", at)
            if (incl_mid and at < upto) or (mlp_input and at == upto):
                keys[f"{at}_mid"] = ("resid_mid", at)
        stack = torch.stack([pos.apply(self[key], dim=-2) for key in keys.values()])
        if apply_ln:
            stack = self.apply_ln_to_stack(
                stack, upto, mlp_input, pos, has_batch_dim=self.has_batch_dim, recompute_ln=upto == n_layers
            )
        return _labelled(stack, list(keys), return_labels)

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: Literal["all", "mlp", "attn"] = "all",
        apply_ln: bool = False,
        pos_slice: Slices = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Stack:
        """The terms of the embeddings and each sublayer before `layer` (-1, None: all); they sum to its input.

        Labels "embed", "pos_embed", "0_attn_out", "0_mlp_out", ...; `mode` keeps one kind of sublayer; `mlp_input` adds
        the attention of `layer` itself; `apply_ln` reads them as that layer's norm does, with its cached scale.
        """
        if mode not in ("all", "mlp", "attn"):
            raise ValueError(f"mode must be 'all', 'mlp' or 'attn', got {mode!r}")
        upto, pos = self._layer(layer), as_slice(pos_slice)
        keys = self._embeds() if incl_embeds else {}
        kinds = [
            k for k in ("attn", "mlp") if mode in ("all", k) and not (k == "mlp" and self.model.cfg.attn_only)
        ]
        keys |= {f"{at}_{kind}_out": (f"{kind}_out", at) for at in range(upto) for kind in kinds}
        if mlp_input and "attn" in kinds:
            keys[f"{upto}_attn_out"] = ("attn_out", upto)
        stack = torch.stack([pos.apply(self[key], dim=-2) for key in keys.values()])
        if apply_ln:
            stack = self._reading(upto, mlp_input, pos, apply_ln=True)(stack)
        return _labelled(stack, list(keys), return_labels)

    def compute_head_results(self) -> None:
        """Cache `attn.hook_result` of every layer, `z @ W_O` per head; they sum to attn_out - b_O.

        A layer that has it keeps it (with a warning if all have).
        """
        missing = [at for at in range(self.model.cfg.n_layers) if self._result(at) is None]
        if not missing:
            logger.warning("Tried to compute head results when they were already cached")
        for at in missing:
            weight = self.model.blocks[at].attn.W_O
            self.cache_dict[_result_name(at)] = torch.einsum(
                "...he,hed->...hd", self["z", at, "attn"], weight
            )

    def stack_head_results(
        self,
        layer: int | None = -1,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: Slices = None,
        apply_ln: bool = False,
    ) -> Stack:
        """Output of each head before `layer` (-1, None: all), labelled "L0H0", ...; then "remainder" if requested.

        The remainder is the input of `layer` (0: the final stream) without the heads. Results that are cached are used;
        others are computed at the positions asked for and, unlike in TransformerLens, not put into the cache
        (`compute_head_results` does).
        """
        upto, pos = self._layer(layer), as_slice(pos_slice)
        reading = self._reading(upto, False, pos, apply_ln=apply_ln)
        rows, labels = self._head_rows(upto, reading, pos), self._head_labels(upto)
        stack = self._stacked(rows, labels, upto, reading, pos, incl_remainder)
        return _labelled(stack, labels, return_labels)

    def stack_activation(
        self, activation_name: str, layer: int | None = -1, sublayer_type: str | None = None
    ) -> Float[Tensor, "layers ..."]:
        """One activation of all layers before `layer` (-1, None: all), stacked."""
        return torch.stack([self[activation_name, at, sublayer_type] for at in range(self._layer(layer))])

    def get_neuron_results(
        self,
        layer: int,
        neuron_slice: Slices = None,
        pos_slice: Slices = None,
        project_output_onto: Projection | None = None,
    ) -> Float[Tensor, "..."]:
        """The output of each neuron of one layer `[*batch_and_pos d_mlp d_model]`, without b_out; not cached.

        With a projection the last dimension is o (absent for a vector), and nothing of d_mlp x d_model is formed
        per position.
        """
        neurons = as_slice(neuron_slice)
        post = neurons.apply(as_slice(pos_slice).apply(self["post", layer, "mlp"], dim=-2), dim=-1)
        writes = neurons.apply(self.model.blocks[layer].mlp.W_out, dim=0)
        if project_output_onto is not None:
            writes = writes @ project_output_onto
            if project_output_onto.ndim == 1:
                return post * writes
        return post[..., None] * writes

    def stack_neuron_results(
        self,
        layer: int | None,
        pos_slice: Slices = None,
        neuron_slice: Slices = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        apply_ln: bool = False,
        project_output_onto: Projection | None = None,
    ) -> Stack:
        """Output of each neuron before `layer` (-1, None: all), as "L0N0", ...; then "remainder" if requested.

        Large: `d_mlp x d_model` numbers per layer and position unless projected, which is done first. One neuron given
        as a number is a stack of one per layer.
        """
        upto, pos, neurons = self._layer(layer), as_slice(pos_slice), _several(neuron_slice)
        reading = self._reading(upto, False, pos, apply_ln=apply_ln, projection=project_output_onto)
        rows, labels = self._neuron_rows(upto, reading, pos, neurons), self._neuron_labels(upto, neurons)
        stack = self._stacked(rows, labels, upto, reading, pos, incl_remainder)
        return _labelled(_as_asked(stack, project_output_onto), labels, return_labels)

    def get_full_resid_decomposition(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        expand_neurons: bool = True,
        apply_ln: bool = False,
        pos_slice: Slices = None,
        return_labels: bool = False,
        project_output_onto: Projection | None = None,
    ) -> Stack:
        """Everything that was written into the input of `layer` (-1, None: the unembedding), in parts that sum to it.

        In this order: heads "L0H0", ..., neurons "L0N0", ... (or sublayers "0_mlp_out" without `expand_neurons`),
        "embed", "pos_embed" and "bias", the biases of the parts that were taken apart. `mlp_input` adds the heads of
        `layer` itself. A projection (and with it the norm of `apply_ln`) is applied before anything is expanded.
        """
        upto, pos = self._layer(layer), as_slice(pos_slice)
        reading = self._reading(upto, mlp_input, pos, apply_ln=apply_ln, projection=project_output_onto)
        expand_neurons = expand_neurons and not self.model.cfg.attn_only
        labels = self._head_labels(upto + mlp_input)
        if expand_neurons:
            labels += self._neuron_labels(upto, Slice())
        elif not self.model.cfg.attn_only:
            labels += [f"{at}_mlp_out" for at in range(upto)]
        labels += [*self._embeds(), "bias"]
        stack = joined(self._full_rows(upto, mlp_input, expand_neurons, reading, pos), len(labels))
        return _labelled(_as_asked(stack, project_output_onto), labels, return_labels)

    def apply_ln_to_stack(
        self,
        residual_stack: Float[Tensor, "*stack d"],
        layer: int | None = None,
        mlp_input: bool = False,
        pos_slice: Slices = None,
        batch_slice: Slices = None,
        has_batch_dim: bool = True,
        recompute_ln: bool = False,
    ) -> Float[Tensor, "*out d"]:
        """The components as the norm before `layer` (-1, None: the unembedding) reads them: linear, cached scale.

        Centred for LN, never for RMS, and divided by the scale of the whole stream, so that parts still sum; without
        gamma and beta, which folding puts into the weights after it. `pos_slice` is applied to the scale only,
        `batch_slice` to both. With `recompute_ln` the final norm (with gamma and beta) is applied to every component
        with its own statistics instead. A model without such norms returns the stack as it is.
        """
        upto, pos, rows = self._layer(layer), as_slice(pos_slice), as_slice(batch_slice)
        if self.model.cfg.normalization_type not in NORMALIZED:
            return residual_stack
        if has_batch_dim:
            residual_stack = rows.apply(residual_stack, dim=1)
        if recompute_ln and upto == self.model.cfg.n_layers and hasattr(self.model, "ln_final"):
            each = residual_stack.reshape(-1, 1, residual_stack.shape[-1])
            return self.model.ln_final(each).reshape(residual_stack.shape)
        return self._reading(upto, mlp_input, pos, rows, apply_ln=True)(residual_stack)

    def logit_attrs(
        self,
        residual_stack: Float[Tensor, "*stack d"],
        tokens: Tokens,
        incorrect_tokens: Tokens | None = None,
        pos_slice: Slices = None,
        batch_slice: Slices = None,
        has_batch_dim: bool = True,
    ) -> Float[Tensor, "*out"]:
        """Direct logit attribution `[component *batch_and_pos]`: normed components times the tokens' columns of W_U.

        With `incorrect_tokens` of the logit difference. Rows and positions are as in `apply_ln_to_stack`. Tokens of
        shape `[batch]` need components at one position. As in TransformerLens this is right for folded weights only:
        gamma, beta and b_U are left out; `interp.attribute` accounts for all of them.

        Raises:
            ValueError: tokens and incorrect tokens of different shapes.
        """
        directions = self.model.tokens_to_residual_directions(tokens)
        if incorrect_tokens is not None:
            right, wrong = _shape(tokens), _shape(incorrect_tokens)
            if right != wrong:
                raise ValueError(
                    "tokens and incorrect_tokens must have the same shape! "
                    f"(tokens.shape={right}, incorrect_tokens.shape={wrong})"
                )
            directions = directions - self.model.tokens_to_residual_directions(incorrect_tokens)
        pos, rows = as_slice(pos_slice), as_slice(batch_slice)
        reading = self._reading(self.model.cfg.n_layers, False, pos, rows, apply_ln=True)
        if has_batch_dim and self.model.cfg.normalization_type in NORMALIZED:
            residual_stack = rows.apply(residual_stack, dim=1)
        return reading.dots(residual_stack, directions)

    def _layer(self, layer: int | None) -> int:
        """The layer whose input counts; n_layers is the unembedding."""
        if layer is None or layer == -1:
            return int(self.model.cfg.n_layers)
        if layer < 0:
            raise ValueError(f"layer must be in [0, {self.model.cfg.n_layers}], -1 or None, got {layer}")
        return layer

    def _reading(
        self, layer: int, mlp_input: bool, pos: Slice, rows: Slice | None = None, *,
        apply_ln: bool, projection: Projection | None = None,
    ) -> Reading:  # fmt: skip
        """The norm before `layer` (if requested and there) and the projection, as a map of vectors."""
        if projection is not None and projection.ndim == 1:
            projection = projection[:, None]
        kind = self.model.cfg.normalization_type
        if not apply_ln or kind not in NORMALIZED:
            return Reading(projection=projection)
        final = layer == self.model.cfg.n_layers
        name = "ln_final.hook_scale" if final else f"blocks.{layer}.ln{1 + mlp_input}.hook_scale"
        if name not in self.cache_dict:
            raise KeyError(
                f"Cached LN scale not found at '{name}': reading through a norm requires it in the cache"
            )
        scale = pos.apply(self.cache_dict[name], dim=-2)
        if rows is not None and self.has_batch_dim:
            scale = rows.apply(scale)
        return Reading(kind in CENTRED, scale, projection)

    def _embeds(self) -> dict[str, Key]:
        present = {"embed": self.has_embed, "pos_embed": self.has_pos_embed}
        return {label: f"hook_{label}" for label, there in present.items() if there}

    def _head_labels(self, layers: int) -> list[str]:
        return [f"L{at}H{head}" for at in range(layers) for head in range(self.model.cfg.n_heads)]

    def _neuron_labels(self, layers: int, neurons: Slice) -> list[str]:
        chosen = neurons.indices(self.model.cfg.d_mlp)
        return [f"L{at}N{neuron}" for at in range(layers) for neuron in chosen]

    def _result(self, layer: int) -> Tensor | None:
        """The cached results of a layer's heads; None for a value without a head dimension."""
        found = self.cache_dict.get(_result_name(layer))
        return found if found is not None and found.ndim >= 3 + self.has_batch_dim else None

    def _head_rows(self, layers: int, reading: Reading, pos: Slice) -> Iterator[Tensor]:
        for at in range(layers):
            if (result := self._result(at)) is not None:
                yield reading(pos.apply(result, dim=-3).movedim(-2, 0))
            else:
                yield reading.heads(pos.apply(self["z", at, "attn"], dim=-3), self.model.blocks[at].attn.W_O)

    def _neuron_rows(self, layers: int, reading: Reading, pos: Slice, neurons: Slice) -> Iterator[Tensor]:
        for at in range(layers):
            post = neurons.apply(pos.apply(self["post", at, "mlp"], dim=-2), dim=-1)
            yield reading.neurons(post, neurons.apply(self.model.blocks[at].mlp.W_out))

    def _full_rows(
        self, upto: int, mlp_input: bool, expand_neurons: bool, reading: Reading, pos: Slice
    ) -> Iterator[Tensor]:
        heads = self._head_rows(upto + mlp_input, reading, pos)
        neurons = self._neuron_rows(upto if expand_neurons else 0, reading, pos, Slice())
        whole: list[Key] = list(self._embeds().values())
        if not (expand_neurons or self.model.cfg.attn_only):
            whole = [*(("mlp_out", at) for at in range(upto)), *whole]
        others = (reading(pos.apply(self[key], dim=-2))[None] for key in whole)
        part = None
        for part in chain(heads, neurons, others):
            yield part
        if part is None:
            raise KeyError("hook_embed was not cached: the input of layer 0 is nothing else")
        bias = self.model.accumulated_bias(upto, mlp_input, include_mlp_biases=expand_neurons)
        yield reading(bias.to(part.dtype)).expand(part.shape[1:])[None]

    def _input_of(self, layer: int, pos: Slice) -> Tensor:
        """The residual stream before a layer; for layer 0 the final one, as TransformerLens' own tests have it."""
        return pos.apply(self["resid_post", layer - 1], dim=-2)

    def _stacked(
        self,
        rows: Iterator[Tensor],
        labels: list[str],
        upto: int,
        reading: Reading,
        pos: Slice,
        incl_remainder: bool,
    ) -> Tensor:
        """The rows in one tensor, the remainder last; adds its label."""
        if not incl_remainder:
            if labels:
                return joined(rows, len(labels))
            shaped = self["hook_embed" if self.has_embed else ("resid_pre", 0)]
            return reading(pos.apply(shaped, dim=-2))[None][:0]
        labels.append("remainder")
        return with_remainder(rows, reading(self._input_of(upto, pos)), len(labels))


def _result_name(layer: int) -> str:
    return f"blocks.{layer}.attn.hook_result"


def _several(given: Slices) -> Slice:
    """The selection with the axis kept."""
    chosen = as_slice(given)
    return Slice([chosen.slice]) if isinstance(chosen.slice, int) else chosen


def _shape(tokens: Tokens) -> torch.Size:
    return tokens.shape if isinstance(tokens, Tensor) else torch.Size()


def _as_asked(stack: Tensor, projection: Projection | None) -> Tensor:
    """The stack without its last dimension if it was projected to one direction."""
    return stack.squeeze(-1) if projection is not None and projection.ndim == 1 else stack


def _labelled(stack: Tensor, labels: list[str], return_labels: bool) -> Stack:
    return (stack, labels) if return_labels else stack
