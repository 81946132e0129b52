"""From a checkpoint's tensors to our parameters, with every tensor accounted for before any is read."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from interp.core.boundary import nearest
from interp.families.fill import Plan, fill, plan
from interp.families.spec import AnyFamily, Rule
from interp.families.stored import Tensors, equal
from interp.model.config import AnyConfig, EncoderDecoderConfig, ModelConfig
from interp.model.encoder_decoder import EncoderDecoder, build
from interp.model.transformer import Transformer, layer_devices

AnyModel = Transformer | EncoderDecoder


def to_model(
    family: AnyFamily,
    config: AnyConfig,
    tensors: Tensors,
    *,
    dtype: torch.dtype | None,
    devices: Sequence[torch.device],
) -> AnyModel:
    """A frozen model in eval mode whose parameters are filled from `tensors`, each allocated once and in its place.

    dtype None keeps the checkpoint's. Layer i of n stands on `devices[i * len(devices) // n]`, the rest on the first.
    Errors: ValueError for missing, extra, mis-shaped or non-finite tensors, and for a dtype a device does not have.
    """
    _check_counts(config, len(tensors))
    with torch.device("meta"), _Unfilled():
        model = build(config)
    every = dict(model.named_parameters(remove_duplicate=False))
    rules, duplicates = family.table(config)
    names = _located(family, tensors)
    names |= {
        first: names[copy] for copy, first in duplicates.items() if copy in names and first not in names
    }
    chosen = [_chosen(rule, names) for rule in expanded(rules, config)]
    _account(family, chosen, names, duplicates, tensors)
    plans = [
        _planned(rule, every, names, tensors, config, dtype, _device_of(rule.ours, config, devices))
        for rule in chosen
    ]
    made = {id(every[p.ours]): nn.Parameter(fill(p, tensors), requires_grad=False) for p in plans}
    if bare := sorted(name for name, parameter in every.items() if id(parameter) not in made):
        raise ValueError(
            f"{family.name}: no rule makes {bare[0]!r} and {len(bare) - 1} more of our parameters"
        )
    # a tied parameter has several names and stays one object
    model.load_state_dict({name: made[id(p)] for name, p in every.items()}, assign=True)
    for side in (model,) if isinstance(model, Transformer) else (model.encoder, model.decoder):
        side.files, side.dequantised = tensors.mapped_files(side), tensors.dequantised
        if len(devices) > 1:
            side.devices = layer_devices(side.config.n_layers, devices)
    return model.requires_grad_(False).eval()


def _check_counts(config: AnyConfig, stored: int) -> None:
    """ValueError for more layers than tensors, each of which has some of its own: before a layer is built."""
    sides = (config.encoder, config.decoder) if isinstance(config, EncoderDecoderConfig) else (config,)
    if (n := max(side.n_layers for side in sides)) > stored:
        raise ValueError(f"the config says {n} layers, the checkpoint holds {stored} tensors for all of them")


class _Unfilled(TorchFunctionMode):
    """Leaves random numbers out of new parameters; on "meta" they alone would import torch's compiler (a second)."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init" and "tensor" in kwargs:
            return kwargs["tensor"]
        return func(*args, **kwargs)


def _side(ours: str, config: AnyConfig) -> ModelConfig:
    """The config of the stack that a parameter stands in."""
    if isinstance(config, EncoderDecoderConfig):
        return config.encoder if ours.startswith("encoder.") else config.decoder
    return config


def expanded(rules: Sequence[Rule], config: AnyConfig) -> Iterator[Rule]:
    """The rules with layers and experts written out."""
    for rule in rules:
        side = _side(rule.ours, config)
        experts = getattr(side.mlp, "n_experts", 1)
        for layer in range(side.n_layers) if "{l}" in rule.ours else (0,):
            yield _written_out(rule, layer, experts)


def _written_out(rule: Rule, layer: int, experts: int) -> Rule:
    per_expert = range(experts) if any("{x}" in name for name in rule.theirs) else (0,)
    return replace(
        rule,
        ours=rule.ours.replace("{l}", str(layer)),
        theirs=tuple(
            name.replace("{l}", str(layer)).replace("{x}", str(x)) for x in per_expert for name in rule.theirs
        ),
        otherwise=rule.otherwise and _written_out(rule.otherwise, layer, experts),
    )


def _chosen(rule: Rule, names: Mapping[str, str]) -> Rule:
    """The first of a rule and its alternatives whose first tensor is there; if none, the one that lacks least."""
    ways = [rule]
    while (other := ways[-1].otherwise) is not None:
        ways.append(other)
    return max(ways, key=lambda way: (way.theirs[0] in names, sum(n in names for n in way.theirs)))


def _located(family: AnyFamily, tensors: Tensors) -> dict[str, str]:
    """The family's name of each tensor -> its name in this checkpoint (which may be older, or lack the prefix)."""
    renamed = {name: family.rename(name) for name in tensors}
    bare = family.prefix and not any(name.startswith(family.prefix) for name in renamed.values())
    found: dict[str, str] = {}
    for name, new in renamed.items():
        full = family.prefix + new if bare and not new.startswith(family.outside) else new
        if full in found:
            raise ValueError(f"{family.name}: {found[full]!r} and {name!r} are two names of one tensor")
        found[full] = name
    return found


def _account(
    family: AnyFamily,
    rules: Sequence[Rule],
    names: Mapping[str, str],
    duplicates: Mapping[str, str],
    tensors: Tensors,
) -> None:
    """Nothing missing, nothing left over; a second copy that is stored must equal the first."""
    used = {name for rule in rules for name in rule.theirs}
    if missing := sorted(used - set(names)):
        raise ValueError(
            f"{family.name}: the checkpoint lacks {len(missing)} of {len(used)} tensors, first {missing[0]!r}; "
            f"{nearest(missing[0], names)}"
        )
    known = (*family.buffers, *family.unused)
    extra = {n for n in set(names) - used - set(duplicates) if not any(re.fullmatch(p, n) for p in known)}
    if extra:
        raise ValueError(
            f"{family.name}: {len(extra)} tensors are not understood, first {sorted(extra)[0]!r}"
        )
    for copy, first in duplicates.items():
        if copy in names and not equal(tensors, names[copy], names[first]):
            raise ValueError(f"{family.name}: config says tied, but {copy} differs from {first}")


def _planned(
    rule: Rule,
    every: Mapping[str, nn.Parameter],
    names: Mapping[str, str],
    tensors: Tensors,
    config: AnyConfig,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Plan:
    if rule.ours not in every:
        raise ValueError(
            f"a rule makes {rule.ours!r}, which is no parameter of ours; {nearest(rule.ours, every)}"
        )
    parts = tuple(names[name] for name in rule.theirs)
    side = _side(rule.ours, config)
    return plan(rule, every[rule.ours].shape, parts, tensors, side, dtype, device)


def _device_of(ours: str, config: AnyConfig, devices: Sequence[torch.device]) -> torch.device:
    layer = re.match(r"(?:encoder\.|decoder\.)?blocks\.(\d+)\.", ours)
    if layer is None:
        return devices[0]
    return layer_devices(_side(ours, config).n_layers, devices)[int(layer[1])]
