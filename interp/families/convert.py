"""From a checkpoint's tensors to our parameters, with every tensor accounted for."""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from interp.core.shapes import nearest, shape_text
from interp.families.spec import Family, Rule
from interp.model.config import ModelConfig
from interp.model.transformer import Transformer


def to_model(
    family: Family,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Transformer:
    """A frozen model in eval mode whose parameters are copies of `tensors`, converted one at a time.

    dtype None keeps the checkpoint's. Errors: ValueError for missing, extra, mis-shaped or non-finite tensors.
    """
    with torch.device("meta"):
        model = Transformer(config)
    wanted = dict(model.named_parameters())
    rules = list(_per_layer(family.rules(config), config))
    names = _located(family, tensors)
    _account(family, config, rules, names, tensors)
    state: dict[str, Tensor] = {}
    for rule in rules:
        state[rule.ours] = _made(rule, wanted[rule.ours], names, tensors, dtype, device)
    if config.tied:
        state["unembed.weight"] = state["embed.weight"]
    model.load_state_dict(state, assign=True)
    if config.tied:
        model.unembed.weight = model.embed.weight
    return model.requires_grad_(False).eval()


def _per_layer(rules: tuple[Rule, ...], config: ModelConfig) -> Iterator[Rule]:
    for rule in rules:
        for layer in range(config.n_layers) if "{l}" in rule.ours else (0,):
            theirs = tuple(name.replace("{l}", str(layer)) for name in rule.theirs)
            yield Rule(rule.ours.replace("{l}", str(layer)), theirs, rule.layout)


def _located(family: Family, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The family's name of each tensor -> its name in this checkpoint (which may lack the prefix)."""
    bare = family.prefix and not any(name.startswith(family.prefix) for name in tensors)
    keep = ("lm_head.",)
    return {(name if not bare or name.startswith(keep) else family.prefix + name): name for name in tensors}


def _account(
    family: Family,
    config: ModelConfig,
    rules: list[Rule],
    names: Mapping[str, str],
    tensors: Mapping[str, Tensor],
) -> None:
    """Nothing missing, nothing left over; a tied unembedding that is stored must equal the embedding."""
    used = {name for rule in rules for name in rule.theirs}
    if missing := sorted(used - set(names)):
        raise ValueError(
            f"{family.name}: the checkpoint lacks {len(missing)} of {len(used)} tensors, first {missing[0]!r}; "
            f"{nearest(missing[0], names)}"
        )
    extra = set(names) - used
    if config.tied and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")
        embedding = next(rule.theirs[0] for rule in rules if rule.ours == "embed.weight")
        if not torch.equal(tensors[names["lm_head.weight"]], tensors[names[embedding]]):
            raise ValueError(f"{family.name}: config says tied, but lm_head.weight differs from {embedding}")
    extra = {n for n in extra if not any(re.fullmatch(p, n) for p in family.buffers)}
    if extra:
        raise ValueError(
            f"{family.name}: {len(extra)} tensors are not understood, first {sorted(extra)[0]!r}"
        )


def _made(
    rule: Rule,
    wanted: Tensor,
    names: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    device: torch.device,
) -> Tensor:
    parts = []
    for name in rule.theirs:
        part = tensors[names[name]].detach()
        if not part.is_floating_point():
            raise ValueError(f"{name}: a floating point tensor is required, got {part.dtype}")
        if not bool(part.isfinite().all()):
            raise ValueError(f"{name}: the checkpoint holds NaN or infinite values")
        parts.append(part.mT if rule.layout == "transposed" else part)
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    if whole.shape != wanted.shape:
        raise ValueError(
            f"{rule.ours} requires shape {shape_text(wanted.shape)}, "
            f"{' + '.join(rule.theirs)} gives {shape_text(whole.shape)}"
        )
    copied = torch.empty(wanted.shape, dtype=dtype or whole.dtype, device=device)
    return copied.copy_(whole)
