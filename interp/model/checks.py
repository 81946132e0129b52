"""What a forward pass requires of its inputs; every error comes before any arithmetic."""

import torch
from jaxtyping import Int
from torch import Tensor

from interp.core.shapes import shape_text
from interp.model.attention import Memory
from interp.model.config import ModelConfig, Rotary
from interp.model.kv_cache import Past
from interp.model.position import depends_on_length


def check_pass(
    config: ModelConfig,
    tokens: Tensor,
    layers: tuple[int, int],
    keep: Tensor | None,
    cache: Past | None,
    documents: Tensor | None,
) -> None:
    """ValueError for tokens, layers, masks or a cache that do not fit the model or each other."""
    start, last = layers
    if not 0 <= start <= last <= config.n_layers:
        raise ValueError(f"requires 0 <= start <= stop <= {config.n_layers} layers, got {start} and {last}")
    _check_tokens(config, tokens, start)
    n = tokens.shape[1] + (0 if cache is None else cache.length)
    if n > config.n_ctx:
        raise ValueError(f"the context holds {config.n_ctx} tokens, got {n}")
    if keep is not None and keep.dtype != torch.bool:
        raise ValueError(f"keep must be boolean, True at real tokens, got {keep.dtype}")
    for name, given in (("keep", keep), ("documents", documents)):
        if given is not None and given.shape != tokens.shape[:2]:
            wanted = shape_text(tokens.shape[:2])
            raise ValueError(
                f"{name} must have the shape {wanted} of the tokens, got {shape_text(given.shape)}"
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
    elif tokens.ndim != 2 or tokens.is_floating_point():
        raise ValueError(
            f"token ids [batch, pos] are required, got {tokens.dtype} of shape {shape_text(tokens.shape)}"
        )
    if tokens.shape[1] == 0 or tokens.shape[0] == 0:
        raise ValueError(f"at least one token is required, got shape {shape_text(tokens.shape)}")
    if not start:
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
        needs = "requires a memory to attend to" if config.cross_attention else "has no cross-attention"
        raise ValueError(f"this model {needs}; memory: {'none' if memory is None else 'given'}")
    if memory is None:
        return
    states, wanted = memory.states, (len(tokens), config.d_model)
    if states.ndim != 3 or (states.shape[0], states.shape[2]) != wanted:
        raise ValueError(
            f"a memory [{wanted[0]}, source position, {wanted[1]}] is required, got {shape_text(states.shape)}"
        )
    if memory.keep is not None and memory.keep.shape != states.shape[:2]:
        raise ValueError(
            f"the memory's keep must have shape {shape_text(states.shape[:2])}, got {shape_text(memory.keep.shape)}"
        )


def _check_ids(what: str, ids: Int[Tensor, "b p"], count: int) -> None:
    """Out-of-range ids fault asynchronously on a GPU; there the embedding's own assertion must do."""
    if ids.device.type != "cpu":
        return
    low, high = (int(x) for x in torch.aminmax(ids))
    if low < 0 or high >= count:
        raise ValueError(f"{what} must be in [0, {count - 1}], got {low if low < 0 else high}")


def _check_packed(config: ModelConfig, n: int) -> None:
    """A row has one set of rotary frequencies; where they depend on the length, its texts may need different ones."""
    for rotary in (config.position, config.local_position):
        limit = depends_on_length(rotary) if isinstance(rotary, Rotary) else None
        if limit is not None and n > limit:
            raise ValueError(
                f"packed rows of {n} tokens have no common rotary frequencies in this model, "
                f"whose frequencies depend on the length beyond {limit} tokens: run its texts unpacked"
            )


def _check_frequencies(config: ModelConfig, past: int, total: int) -> None:
    """Cached keys were rotated for the length at their time; they are wrong once the frequencies change."""
    for rotary in (config.position, config.local_position):
        limit = depends_on_length(rotary) if isinstance(rotary, Rotary) else None
        if limit is not None and past > 0 and total > limit:
            raise ValueError(
                f"beyond {limit} tokens the rotary frequencies of this model depend on the length, "
                f"and the {past} cached keys do not fit: run without a cache"
            )
