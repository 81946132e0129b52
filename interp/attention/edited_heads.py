"""What edits take from the scores that are read off weights: the heads that no longer do what their weights say."""

import torch
from jaxtyping import Bool
from torch import Tensor

from interp.model.edits import Edit
from interp.model.sites import EMBEDDING_SITES
from interp.model.transformer import Transformer
from interp.passes.edited import AFTER_PATTERN, edits_at, inner_site, layer_of

READ = ("ln1.hook_scale", "ln1.hook_normalized", "hook_v_input", "attn.hook_v")
"""Sites between the stream and the values of a block's heads."""
SILENT = ("hook_pos_embed", "hook_type_embed")
"""Embeddings that are no part of what a vocabulary entry puts on the stream."""


def rewritten(model: Transformer) -> Bool[Tensor, "l h"]:
    """The heads whose output an edit changes after their values: what they add is not their values' W_O."""
    return _touched(model, AFTER_PATTERN)


def unlike_weights(model: Transformer) -> Bool[Tensor, "l h"]:
    """The heads whose OV circuit is not that of the weights: edits change what they read, or what they write."""
    return _touched(model, (*READ, *AFTER_PATTERN))


def embedding_edits(model: Transformer) -> list[str]:
    """The edits of what a vocabulary entry puts on the stream: the embeddings, and block 0 outside its attention."""
    attention = ("attn.", "hook_attn_out", "hook_q_input", "hook_k_input", "hook_v_input", "ln1")
    found = []
    for edit in model.edits:
        inside = layer_of(edit, model) == 0 and not inner_site(edit).startswith(attention)
        if inside or (edit.site in EMBEDDING_SITES and edit.site not in SILENT):
            found.append(edit.name)
    return found


def _touched(model: Transformer, names: tuple[str, ...]) -> Bool[Tensor, "l h"]:
    config = model.config
    found = torch.zeros(config.n_layers, config.n_heads, dtype=torch.bool)
    for layer in range(config.n_layers):
        for edit in edits_at(model, layer, names):
            found[layer, _heads_of(edit)] = True
    return found


def _heads_of(edit: Edit) -> slice | list[int]:
    """The heads that an edit names; all of them where it names none."""
    given = edit.cells.get("h")
    return slice(None) if given is None else [given] if isinstance(given, int) else list(given)
