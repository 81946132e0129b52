"""Backward rules by name, the models they are defined for, and the sum of relevances that holds under them.

Under the rules `norm`, `activation`, `gate` and `pattern` a model is linear: what its logits give for a direction is
the sum of (value . gradient) over its embeddings and its biases. `relevance` is that sum, from a pass of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType, NoneType
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.stats import upcast
from interp.core.wording import nearest
from interp.data.batch import Batch
from interp.model import sites
from interp.model.block import MLP
from interp.model.config import FullSoftmax, ModelConfig
from interp.model.edits import Project, Scale, Zero
from interp.model.experts import MoE
from interp.model.latent import Latent
from interp.model.records import Mixer
from interp.model.rules import Rule
from interp.model.softmax import Softmax
from interp.model.tap import Read, Tap
from interp.model.transformer import Transformer

LINEAR: tuple[Rule, ...] = ("norm", "activation", "gate", "pattern")
"""The rules under which a model is linear."""
PRESETS: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {"relp": LINEAR, "attnlrp": ("norm", "activation", "gate", "half"), "cp-lrp": ("norm", "pattern")}
)
"""relp: relevance patching (Jafari et al. 2025, arXiv 2508.21258), on edges EAP-RelP. attnlrp: Achtibat et al. 2024.
cp-lrp: conservative propagation (Ali et al. 2022).
"""
SUMMANDS = ("hook_embed", "hook_pos_embed", "hook_type_embed")
"""The sites whose sum enters the first block."""
ROUNDING, AT_MOST = 200, 0.2
"""How many times the precision of the model a sum may be off, relative to the size of its terms; and how far at most,
where that precision is low.
"""
Rules = str | Sequence[str]
"""Backward rules: the name of a preset, or a sequence of rules; an empty one for the ordinary gradient."""


def as_rules(given: Rules) -> tuple[Rule, ...]:
    """The rules that a preset's name or a sequence of rules means, in the order of `Rule`.

    Raises:
        ValueError: an unknown name, and for `half` beside `pattern`, which both speak of attention.
    """
    names = PRESETS.get(given, (given,)) if isinstance(given, str) else tuple(given)
    known = get_args(Rule)
    for name in names:
        if name not in known:
            hint = nearest(str(name), [*known, *PRESETS])
            raise ValueError(
                f"rules are {', '.join(known)}, or one of the presets {', '.join(PRESETS)}, got {name!r}; {hint}"
            )
    if {"half", "pattern"} <= set(names):
        raise ValueError(
            "the rules half and pattern exclude each other: both say what attention's gradient is"
        )
    return tuple(rule for rule in known if rule in names)


def under_rules(model: Transformer, given: Rules) -> Transformer:
    """The model under these rules; itself where there are none.

    Raises:
        ValueError: as `as_rules`; a model that they are not defined for.
    """
    rules = as_rules(given)
    if not rules:
        return model
    if why := _unreached_part(model.config, rules):
        raise ValueError(
            f"backward rules are defined for softmax attention and MLPs of single neurons: {why}"
        )
    under = model.ruled(rules)
    if model.config.block.proven and not model.rules:
        _check_rules_hold(under)
    return under


def _check_rules_hold(under: Transformer) -> None:
    """ValueError unless relevances of a wrapped network under the rules sum to its final stream, on random tokens."""
    drawn = torch.Generator().manual_seed(17)
    tokens = torch.randint(0, under.config.d_vocab, (2, 7), generator=drawn)
    bare = copy.copy(under)
    bare.edits = ()
    with torch.no_grad():
        stream = bare(tokens.to(bare.device), stop=bare.config.n_layers)
    try:
        for position in range(
            tokens.shape[1]
        ):  # one by one: a large term at one position could hide errors elsewhere
            along = torch.zeros(stream.shape)
            along[:, position] = torch.randn(stream.shape[-1], generator=drawn)
            completeness(bare, Batch(tokens), stream, along.to(stream))
    except ArithmeticError as missed:
        raise ValueError(
            f"backward rules could not be proven of this wrapped network, in whose code something is neither linear "
            f"nor known to a rule: {missed}"
        ) from missed


def rules_attrs(given: Rules) -> dict[str, str]:
    """Attributes of a result that name the backward rules of its gradients; empty where there are none."""
    rules = as_rules(given)
    return {"rules": ", ".join(rules)} if rules else {}


def _unreached_part(config: ModelConfig, rules: Sequence[Rule]) -> str | None:
    """The part of a model that the rules are not defined for, as an error names it; None if there is no such part."""
    if config.block.proven:
        if set(rules) == set(LINEAR):
            return None
        alone = ", ".join(rules)
        return f"this model is a wrapped network, where only {', '.join(LINEAR)} together can be proven, not {alone}"
    if config.cross_attention:
        return "this model attends to an encoder"
    if config.output != FullSoftmax():
        return f"this model ends in {config.output}"
    if not isinstance(config.mlp, MLP | MoE | NoneType):
        return f"this model has {config.mlp}"
    for layer, mixer in enumerate(config.mixers):
        if not _rules_reach(mixer, rules):
            return f"layer {layer} mixes positions by {mixer}"
    return None


def _rules_reach(mixer: Mixer, rules: Sequence[Rule]) -> bool:
    """Whether the rules are defined for this mixer."""
    if isinstance(mixer, Softmax):
        sharpened = mixer.temperature is not None and mixer.temperature.by_row
        plain = mixer.score == "dot" and mixer.refinement is None and not sharpened
        return plain or "half" not in rules
    return isinstance(mixer, Latent)


def rounding_of(dtype: torch.dtype) -> float:
    """How far sums of a pass in this dtype may be off, relative to the size of their terms."""
    return min(ROUNDING * torch.finfo(dtype).eps, AT_MOST)


def promises(model: Transformer) -> bool:
    """Whether the sum of relevances is known: under the rules of `LINEAR`, if no edit adds a constant."""
    linear = all(isinstance(edit.change, Zero | Scale | Project) for edit in model.edits)
    return linear and set(LINEAR) <= model.rules


def completeness(
    model: Transformer, batch: Batch, stream: Float[Tensor, "b p d"], gradient: Float[Tensor, "b p d"]
) -> dict[str, Float[Tensor, "b"]]:
    """Error of the sum of relevances, `completeness_error`, equal for every row of the batch.

    A relevance is value . gradient; those of all embeddings and biases sum to (final stream . gradient) under the rules
    of `LINEAR`. The error is relative to the sum of their absolute values. The dict is empty under other rules, and
    with edits that add constants.

    Args:
        model: a model under rules (`under_rules`), which is run once more.
        stream, gradient: its final stream, and d metric / d final stream.

    Raises:
        ArithmeticError: if the relevances miss the sum by more than rounding.
    """
    if not promises(model):
        return {}
    relevances = [upcast(x) * upcast(g) for x, g in _summand_gradients(model, batch, gradient)]
    parts, expected = (
        torch.stack([relevance.sum() for relevance in relevances]),
        (upcast(stream) * upcast(gradient)).sum(),
    )
    missed, scale = (parts.sum() - expected).abs(), parts.abs().sum()
    # Products that cancel within every part leave rounding of the size of their root sum of squares.
    squares = torch.stack([relevance.square().sum() for relevance in relevances]).sum()
    share = rounding_of(model.dtype)
    if not bool(missed <= share * torch.maximum(scale, squares.sqrt())):
        raise ArithmeticError(
            f"under the rules {', '.join(sorted(model.rules))} the relevances of embeddings and biases should sum to "
            f"{float(expected):.6g}, they sum to {float(parts.sum()):.6g}"
        )
    error = missed / scale.clamp_min(torch.finfo(scale.dtype).tiny)
    return {"completeness_error": error.expand(len(batch))}


def _summand_gradients(
    model: Transformer, batch: Batch, gradient: Float[Tensor, "b p d"]
) -> list[tuple[Tensor, Tensor]]:
    """(value, gradient) of every embedding and bias, given the gradient at the final stream."""
    leaves = {
        name: p.detach().requires_grad_()
        for name, p in model.named_parameters()
        if _is_bias(name, model.config)
    }
    site_names = sites.names(model.config)
    summands = ("blocks.0.hook_resid_pre",) if model.config.block.proven else SUMMANDS
    tap, batch = (
        Tap([Read(site, grad=True) for site in summands if site in site_names]),
        batch.to(model.device),
    )
    with torch.enable_grad():
        stream = model.with_parameters(leaves)(batch.tokens, tap, stop=model.config.n_layers, **batch.inputs)
        values = [*tap.live.values(), *leaves.values()]
        slopes = torch.autograd.grad(stream, values, gradient.to(stream), allow_unused=True)
    return [(x.detach(), g) for x, g in zip(values, slopes, strict=True) if g is not None]


def _is_bias(name: str, config: ModelConfig) -> bool:
    """Whether a parameter is a bias in a block or the embedding norm, whose relevance is part of the sum."""
    inside = config.block.proven or name.startswith(("blocks.", "ln_embed."))
    return inside and name.endswith("bias")
