"""Conversion of a checkpoint's tensors to parameters, with every tensor accounted for before any is read."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from interp.core.wording import nearest
from interp.families.fill import ParameterPlan, fill, plan
from interp.families.spec import AnyFamily, TensorRule
from interp.families.stored import Tensors, equal
from interp.model.attention import Attention
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
    may_lack_head: bool = False,
    stated: torch.dtype | None = None,
) -> AnyModel:
    """A frozen model in eval mode with parameters filled from `tensors`, each allocated once and in its place.

    dtype None keeps the checkpoint's; of several, all become what the config says (`stated`), or else the widest. Layer
    i of n stands on `devices[i * len(devices) // n]`, the rest on the first.

    Args:
        may_lack_head: the checkpoint may be a base model, or one with another linear head (a classifier), and then
            ends in its residual stream, or in that head.

    Raises:
        ValueError: missing, extra, mis-shaped or non-finite tensors, and for a dtype a device does not have.
    """
    _check_counts(config, len(tensors))
    names = _located(family, config, tensors)
    config, rules, duplicates, notes = fitted(family, config, names, tensors, may_lack_head=may_lack_head)
    with torch.device("meta"), _Unfilled():
        model = build(config)
    every = dict(model.named_parameters(remove_duplicate=False))
    chosen = [_chosen(rule, names) for rule in expanded(rules, config)]
    left_out = _account(family, chosen, names, duplicates, tensors)
    plans = [
        _planned(rule, model, every, names, tensors, config, dtype, _device_of(rule.ours, config, devices))
        for rule in chosen
    ]
    if dtype is None:
        plans, cast = _of_one_dtype(family, plans, stated)
        notes = (*notes, *cast)
    last_use = {name: i for i, p in enumerate(plans) for name in p.parts}
    made: dict[int, nn.Parameter] = {}
    for i, each in enumerate(plans):
        made[id(every[each.ours])] = nn.Parameter(fill(each, tensors), requires_grad=False)
        tensors.drop(tuple(name for name in each.parts if last_use[name] == i))
    if bare := sorted(name for name, parameter in every.items() if id(parameter) not in made):
        raise ValueError(
            f"{family.name}: no rule makes {bare[0]!r} and {len(bare) - 1} more of our parameters"
        )
    # a tied parameter has several names and stays one object
    model.load_state_dict({name: made[id(p)] for name, p in every.items()}, assign=True)
    for side in (model,) if isinstance(model, Transformer) else (model.encoder, model.decoder):
        side.files, side.opened = tensors.mapped_files(side), (*tensors.notes, *notes, *left_out)
        if len(devices) > 1:
            side.devices = layer_devices(side.config.n_layers, devices)
    return model.requires_grad_(False).eval()


Fitted = tuple[AnyConfig, Sequence[TensorRule], Mapping[str, str], tuple[str, ...]]
"""A config as a checkpoint has it, the rules and duplicates of it, and what is to be said of it."""


def fitted(
    family: AnyFamily, config: AnyConfig, names: dict[str, str], tensors: Tensors, *, may_lack_head: bool
) -> Fitted:
    """The config corrected by the tensors that are stored.

    The unembedding is untied if it differs from the embedding; without one the model gets the classifier that is
    stored instead, or ends in its stream.

    Args:
        names: the names of the tensors; where only the second name of a tied tensor is stored, its first is added.

    Returns:
        The config, the rules and duplicates of its family's table, and notes for the user.
    """
    rules, duplicates = family.table(config)
    copies = [copy for copy, first in duplicates.items() if copy in names and first in names]
    differ = [c for c in copies if c in _UNEMBEDDINGS and not equal(tensors, names[c], names[duplicates[c]])]
    if differ and isinstance(config, ModelConfig):
        config = replace(config, tied=False)
        rules, duplicates = family.table(config)
        return (
            config,
            rules,
            duplicates,
            (f"{differ[0]} differs from the embedding, though the config says tied: untied",),
        )
    names |= {
        first: names[copy] for copy, first in duplicates.items() if copy in names and first not in names
    }
    if not (may_lack_head and isinstance(config, ModelConfig) and config.unembed):
        return config, rules, duplicates, ()
    head = [rule for rule in rules if rule.ours == "unembed.weight"]
    other = next((name for name in OTHER_HEADS if f"{name}.weight" in names), None)
    if other is None and (not head or any(_stored(rule, names) for rule in head)):  # tied, or of another kind
        return config, rules, duplicates, ()
    bare = replace(  # at once: a record is checked whenever it is made
        config,
        unembed=False,
        tied=False,
        unembed_bias=False,
        mlm_head=None,
        logit_softcap=None,
        logit_scale=1.0,
    )
    rules, duplicates = family.table(bare)
    rules = tuple(rule for rule in rules if not rule.ours.startswith("unembed."))
    if other is None:
        note = "no unembedding in the checkpoint: the model ends in its residual stream"
        return bare, rules, duplicates, (note,)
    n_outputs, biased = tensors.outline(names[f"{other}.weight"]).shape[0], f"{other}.bias" in names
    with_head = replace(bare, unembed=True, d_vocab_out=n_outputs, unembed_bias=biased)
    parts = ("weight", "bias") if biased else ("weight",)
    head = [TensorRule(f"unembed.{part}", (f"{other}.{part}",)) for part in parts]
    note = f"the head {other} is read as the unembedding: {n_outputs} outputs"
    return with_head, (*rules, *head), duplicates, (note,)


_UNEMBEDDINGS = ("lm_head.weight", "cls.predictions.decoder.weight", "embed_out.weight")
"""The checkpoint's names of an unembedding that may be the embedding."""
OTHER_HEADS = ("score", "classifier")
"""Linear maps of the final states that stand where an unembedding would: of classifiers and reward models."""
VALUE_HEADS = r"(v_head|value_head|reward_head|q_head|regression_head)\..*"
"""Tensors outside the model that tools for reinforcement learning save with it."""


ADAPTED = re.compile(r"\.(base_layer|original_module|modules_to_save)\.|\.lora_\w+\.")
"""In the names of tensors of a model inside PEFT."""


def _stored(rule: TensorRule, names: Mapping[str, str]) -> bool:
    return rule.theirs[0] in names or (rule.otherwise is not None and _stored(rule.otherwise, names))


def _check_counts(config: AnyConfig, stored: int) -> None:
    """ValueError for more layers than tensors, each of which has some of its own: before a layer is built."""
    sides = (config.encoder, config.decoder) if isinstance(config, EncoderDecoderConfig) else (config,)
    if (n := max(side.n_layers for side in sides)) > stored:
        raise ValueError(f"the config says {n} layers, the checkpoint holds {stored} tensors for all of them")


class _Unfilled(TorchFunctionMode):
    """A context that leaves random numbers out of new parameters.

    On "meta" they would import torch's compiler (a second).
    """

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


def expanded(rules: Sequence[TensorRule], config: AnyConfig) -> Iterator[TensorRule]:
    """The rules with layers and experts written out."""
    for rule in rules:
        side = _side(rule.ours, config)
        experts = getattr(side.mlp, "n_experts", 1)
        for layer in range(side.n_layers) if "{l}" in rule.ours else (0,):
            yield _written_out(rule, layer, experts)


def _written_out(rule: TensorRule, layer: int, experts: int) -> TensorRule:
    per_expert = range(experts) if any("{x}" in name for name in rule.theirs) else (0,)
    return replace(
        rule,
        ours=rule.ours.replace("{l}", str(layer)),
        theirs=tuple(
            name.replace("{l}", str(layer)).replace("{x}", str(x)) for x in per_expert for name in rule.theirs
        ),
        otherwise=rule.otherwise and _written_out(rule.otherwise, layer, experts),
    )


def _chosen(rule: TensorRule, names: Mapping[str, str]) -> TensorRule:
    """The first of a rule and its alternatives with a first tensor that exists; if none, the one that lacks least."""
    ways = [rule]
    while (other := ways[-1].otherwise) is not None:
        ways.append(other)
    return max(ways, key=lambda way: (way.theirs[0] in names, sum(n in names for n in way.theirs)))


WRAPPERS = ("module.", "model.", "base_model.", "pretrained_model.", "network.", "net.")
"""Prefixes that wrappers of a model and training loops put before the name of every tensor."""
INSIDE = re.compile(r"(?:^|(?<=\.))(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""Insertions of wrappers of modules (`torch.compile`, checkpointing, FSDP) anywhere in the names of tensors."""


def _located(family: AnyFamily, config: AnyConfig, tensors: Tensors) -> dict[str, str]:
    """The family's name of each tensor -> its name in this checkpoint, which may have more or less before its names.

    Of what is left when the wrappers' beginnings are taken off one by one, from most names or all, that with most names
    of the family.
    """
    rules, duplicates = family.table(config)
    wanted = {name for rule in expanded(rules, config) for name in rule.theirs} | set(duplicates)
    short: dict[str, str] = {}
    for name in tensors:
        if (other := short.setdefault(INSIDE.sub("", name), name)) != name:
            raise ValueError(f"{family.name}: {other!r} and {name!r} are two names of one tensor")
    best = _prefixed(family, short)
    while missing := wanted - set(best):
        begins = next((w for w in WRAPPERS if sum(_begins(name, w) for name in short) > len(short) / 2), None)
        bare = {name.removeprefix(begins or ""): full for name, full in short.items()}
        if begins is None or len(bare) < len(short):
            break
        short = bare
        found = _prefixed(family, short)
        best = found if len(wanted - set(found)) < len(missing) else best
    return best


def _begins(name: str, wrapper: str) -> bool:
    """Whether a name has a prefix; heads outside the model may stand outside its wrapper."""
    return name.startswith(wrapper) or re.fullmatch(VALUE_HEADS, name) is not None


def _prefixed(family: AnyFamily, stored: Mapping[str, str]) -> dict[str, str]:
    renamed = {full: family.rename(name) for name, full in stored.items()}
    bare = family.prefix and not any(name.startswith(family.prefix) for name in renamed.values())
    found: dict[str, str] = {}
    for name, new in renamed.items():
        outside = (*family.outside, *(f"{head}." for head in OTHER_HEADS))
        full = family.prefix + new if bare and not new.startswith(outside) else new
        if full in found:
            raise ValueError(f"{family.name}: {found[full]!r} and {name!r} are two names of one tensor")
        found[full] = name
    return found


def _account(
    family: AnyFamily,
    rules: Sequence[TensorRule],
    names: Mapping[str, str],
    duplicates: Mapping[str, str],
    tensors: Tensors,
) -> tuple[str, ...]:
    """Sentences about tensors that are left out.

    Nothing may be missing, nothing else left over, and a second copy that is stored must equal the first.
    """
    used = {name for rule in rules for name in rule.theirs}
    if adapted := sorted(name for name in tensors if ADAPTED.search(name)):
        raise ValueError(
            f"{family.name}: the checkpoint holds a model with an adapter of PEFT beside its matrices, first "
            f"{adapted[0]!r}; give the adapter's own folder (save_pretrained of the PEFT model), or save what "
            "merge_and_unload() gives"
        )
    if missing := sorted(used - set(names)):
        raise ValueError(
            f"{family.name}: the checkpoint lacks {len(missing)} of {len(used)} tensors, first {missing[0]!r}; "
            f"{nearest(missing[0], names)}"
        )
    unread = set(names) - used - set(duplicates)
    unused = sorted(n for n in unread if any(re.fullmatch(p, n) for p in (*family.unused, VALUE_HEADS)))
    extra = {n for n in unread - set(unused) if not any(re.fullmatch(p, n) for p in family.buffers)}
    if extra:
        raise ValueError(
            f"{family.name}: {len(extra)} tensors are not understood, first {sorted(extra)[0]!r}"
        )
    for copy, first in duplicates.items():
        if copy in names and not equal(tensors, names[copy], names[first]):
            raise ValueError(f"{family.name}: config says tied, but {copy} differs from {first}")
    return left_out(unused)


def left_out(names: Sequence[str]) -> tuple[str, ...]:
    """The sentence about a checkpoint's tensors that no part of the model is made of."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (f"left out, as parts that are not modelled: {names[0]}{more}",) if names else ()


def _planned(
    rule: TensorRule,
    model: nn.Module,
    every: Mapping[str, nn.Parameter],
    names: Mapping[str, str],
    tensors: Tensors,
    config: AnyConfig,
    dtype: torch.dtype | None,
    device: torch.device,
) -> ParameterPlan:
    if rule.ours not in every:
        raise ValueError(
            f"a rule makes {rule.ours!r}, which is no parameter of ours; {nearest(rule.ours, every)}"
        )
    parts = tuple(names[name] for name in rule.theirs)
    side = _side(rule.ours, config)
    whole = every[rule.ours].shape
    return plan(rule, whole, parts, tensors, side, dtype, device, _sizes(rule.ours, len(parts), whole, model))


def _of_one_dtype(
    family: AnyFamily, plans: list[ParameterPlan], stated: torch.dtype | None
) -> tuple[list[ParameterPlan], tuple[str, ...]]:
    """Cast all parameters to one dtype, as transformers does: a forward pass needs it.

    Parameters in `family.wide`, which the family computes with in float32, keep theirs.

    Returns:
        The plans, and at most one note for the user.
    """
    free = [each for each in plans if not any(re.fullmatch(name, each.ours) for name in family.wide)]
    counts = Counter(each.dtype for each in free)
    if len(counts) < 2:
        return plans, ()
    whole = stated or reduce(torch.promote_types, counts)
    castable = {id(each) for each in free}
    short = {kind: str(kind).removeprefix("torch.") for kind in (*counts, whole)}
    stored = ", ".join(f"{n} parameters in {short[kind]}" for kind, n in counts.most_common())
    found = [replace(each, dtype=whole) if id(each) in castable else each for each in plans]
    return found, (f"stored in several dtypes ({stored}): cast to {short[whole]}; dtype= says another",)


def _sizes(ours: str, n: int, whole: torch.Size, model: nn.Module) -> tuple[int, ...] | None:
    """Numbers of entries of each of the n parts of a parameter.

    Of queries, keys and values as their heads say, else as many each; None where queries, keys and values are stored
    in another number of parts.
    """
    if n == 1:
        return None
    owner, _, _ = ours.rpartition(".")
    mixer, _, name = owner.rpartition(".")
    if name != "qkv":
        return (whole.numel() // n,) * n
    attention = model.get_submodule(mixer)
    assert isinstance(attention, Attention)
    if n != len(attention.heads):
        return None
    return tuple(whole.numel() // whole[0] * heads * attention.d_head for heads in attention.heads)


def _device_of(ours: str, config: AnyConfig, devices: Sequence[torch.device]) -> torch.device:
    layer = re.match(r"(?:encoder\.|decoder\.)?blocks\.(\d+)\.", ours)
    if layer is None:
        return devices[0]
    return layer_devices(_side(ours, config).n_layers, devices)[int(layer[1])]
