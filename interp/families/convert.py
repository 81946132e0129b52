"""Conversion of a checkpoint's tensors to parameters; names and shapes are checked before any tensor is read."""

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
    """A frozen model in eval mode with parameters filled from `tensors`, each allocated once, on its own device.

    With dtype None the checkpoint's dtype is kept; if there are several, all parameters get the config's (`stated`), or
    else the widest. Layer i of n is on `devices[i * len(devices) // n]`, everything else on the first device.

    A family has rules: each says from which tensors of the checkpoint a parameter is made, and how.

    Args:
        family: whose rules are followed.
        config: of the model that is built.
        tensors: the checkpoint's, by name; each is let go after its last use.
        dtype: of all parameters; None: the checkpoint's.
        devices: on which the layers are spread.
        may_lack_head: the checkpoint may be a base model, which ends in its residual stream, or one with another linear
            head (a classifier), which replaces the unembedding.
        stated: the dtype that the config names.

    Raises:
        ValueError: missing, extra, mis-shaped or non-finite tensors, and for a dtype a device does not have.
    """
    _check_counts(config, tensors)
    names = _stored_names(family, config, tensors)
    config, rules, duplicates, notes = fitted(family, config, names, tensors, may_lack_head=may_lack_head)
    with torch.device("meta"), _Unfilled():
        model = build(config)
    named = dict(model.named_parameters(remove_duplicate=False))
    chosen = [_rule_to_use(rule, names) for rule in expanded(rules, config)]
    left_out = _check_every_tensor(family, chosen, names, duplicates, tensors)
    plans = [
        _plan_of_rule(
            rule, model, named, names, tensors, config, dtype, _device_of(rule.ours, config, devices)
        )
        for rule in chosen
    ]
    if dtype is None:
        plans, cast = _plans_of_one_dtype(family, plans, stated)
        notes = (*notes, *cast)
    last_use = {name: i for i, p in enumerate(plans) for name in p.parts}
    parameters: dict[int, nn.Parameter] = {}
    for i, parameter_plan in enumerate(plans):
        parameters[id(named[parameter_plan.ours])] = nn.Parameter(
            fill(parameter_plan, tensors), requires_grad=False
        )
        tensors.drop(tuple(name for name in parameter_plan.parts if last_use[name] == i))
    if bare := sorted(name for name, parameter in named.items() if id(parameter) not in parameters):
        raise ValueError(
            f"{family.name}: no rule makes {bare[0]!r} and {len(bare) - 1} more of our parameters"
        )
    # a tied parameter has several names and stays one object
    model.load_state_dict({name: parameters[id(p)] for name, p in named.items()}, assign=True)
    for side in (model,) if isinstance(model, Transformer) else (model.encoder, model.decoder):
        side.files, side.opened = tensors.mapped_files(side), (*tensors.notes, *notes, *left_out)
        if len(devices) > 1:
            side.devices = layer_devices(side.config.n_layers, devices)
    return model.requires_grad_(False).eval()


Fitted = tuple[AnyConfig, Sequence[TensorRule], Mapping[str, str], tuple[str, ...]]
"""The config that fits a checkpoint, its rules and duplicates, and notes for the user."""


def fitted(
    family: AnyFamily, config: AnyConfig, names: dict[str, str], tensors: Tensors, *, may_lack_head: bool
) -> Fitted:
    """The config, corrected to fit the tensors that are stored.

    The unembedding is untied if it differs from the embedding. Without an unembedding the model gets the classifier
    that is stored instead, or ends in its residual stream.

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
    other_head = next((name for name in OTHER_HEADS if f"{name}.weight" in names), None)
    if other_head is None and (
        not head or any(_is_stored(rule, names) for rule in head)
    ):  # tied, or of another kind
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
    if other_head is None:
        note = "no unembedding in the checkpoint: the model ends in its residual stream"
        return bare, rules, duplicates, (note,)
    n_outputs, biased = tensors.outline(names[f"{other_head}.weight"]).shape[0], f"{other_head}.bias" in names
    with_head = replace(bare, unembed=True, d_vocab_out=n_outputs, unembed_bias=biased)
    parts = ("weight", "bias") if biased else ("weight",)
    head = [TensorRule(f"unembed.{part}", (f"{other_head}.{part}",)) for part in parts]
    note = f"the head {other_head} is read as the unembedding: {n_outputs} outputs"
    return with_head, (*rules, *head), duplicates, (note,)


_UNEMBEDDINGS = ("lm_head.weight", "cls.predictions.decoder.weight", "embed_out.weight")
"""The checkpoint's names of an unembedding that may be the embedding."""
OTHER_HEADS = ("score", "classifier")
"""Linear maps of the final states that stand where an unembedding would: of classifiers and reward models."""
VALUE_HEADS = r"(v_head|value_head|reward_head|q_head|regression_head)\..*"
"""Tensors outside the model that tools for reinforcement learning save with it."""


ADAPTED = re.compile(r"\.(base_layer|original_module|modules_to_save)\.|\.lora_\w+\.")
"""Matches names of tensors that were saved from inside a PEFT model."""


def _is_stored(rule: TensorRule, names: Mapping[str, str]) -> bool:
    """Whether the checkpoint has the first tensor of a rule or of one of its alternatives."""
    return rule.theirs[0] in names or (rule.otherwise is not None and _is_stored(rule.otherwise, names))


def _check_counts(config: AnyConfig, tensors: Tensors) -> None:
    """ValueError if the config has more layers or experts than the checkpoint can hold; checked before any is built."""
    sides = (config.encoder, config.decoder) if isinstance(config, EncoderDecoderConfig) else (config,)
    stored = len(tensors)
    if (n := max(1 if side.shared_blocks else side.n_layers for side in sides)) > stored:
        raise ValueError(f"the config says {n} layers, the checkpoint holds {stored} tensors for all of them")
    experts = max(getattr(side.mlp, "n_experts", 1) for side in sides)
    if experts <= stored:
        return
    rows = max((*tensors.outline(name).shape, 1)[0] for name in tensors)  # experts of one tensor
    if experts > rows:
        raise ValueError(
            f"the config says {experts} experts, the checkpoint holds {stored} tensors of at most {rows} rows"
        )


class _Unfilled(TorchFunctionMode):
    """A context in which `torch.nn.init` does nothing.

    On the "meta" device it would import torch's compiler, which takes a second.
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


def _stack_config(ours: str, config: AnyConfig) -> ModelConfig:
    """The config of the stack (encoder, decoder or the whole model) that holds the parameter `ours`."""
    if isinstance(config, EncoderDecoderConfig):
        return config.encoder if ours.startswith("encoder.") else config.decoder
    return config


def expanded(rules: Sequence[TensorRule], config: AnyConfig) -> Iterator[TensorRule]:
    """The rules with `{l}` and `{x}` replaced by the index of every layer and expert."""
    for rule in rules:
        side = _stack_config(rule.ours, config)
        experts = getattr(side.mlp, "n_experts", 1)
        for layer in range(side.n_layers) if "{l}" in rule.ours else (0,):
            yield _rule_for_layer(rule, layer, experts)


def _rule_for_layer(rule: TensorRule, layer: int, experts: int) -> TensorRule:
    per_expert = range(experts) if any("{x}" in name for name in rule.theirs) else (0,)
    return replace(
        rule,
        ours=rule.ours.replace("{l}", str(layer)),
        theirs=tuple(
            name.replace("{l}", str(layer)).replace("{x}", str(x)) for x in per_expert for name in rule.theirs
        ),
        otherwise=rule.otherwise and _rule_for_layer(rule.otherwise, layer, experts),
    )


def _rule_to_use(rule: TensorRule, names: Mapping[str, str]) -> TensorRule:
    """The first among a rule and its alternatives whose first tensor exists; if none, the one with most tensors."""
    ways = [rule]
    while (alternative := ways[-1].otherwise) is not None:
        ways.append(alternative)
    return max(ways, key=lambda way: (way.theirs[0] in names, sum(n in names for n in way.theirs)))


WRAPPERS = ("module.", "model.", "base_model.", "pretrained_model.", "network.", "net.")
"""Prefixes that wrappers of a model and training loops put before the name of every tensor."""
INSIDE = re.compile(r"(?:^|(?<=\.))(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""Insertions of wrappers of modules (`torch.compile`, checkpointing, FSDP) anywhere in the names of tensors."""


def _stored_names(family: AnyFamily, config: AnyConfig, tensors: Tensors) -> dict[str, str]:
    """The family's name of each tensor -> its name in this checkpoint, which may have another prefix.

    Prefixes of wrappers (`WRAPPERS`) are removed one by one while most names begin with one; the names that match most
    of the family's are returned.
    """
    rules, duplicates = family.table(config)
    family_names = {name for rule in expanded(rules, config) for name in rule.theirs} | set(duplicates)
    short: dict[str, str] = {}
    for name in tensors:
        if (earlier := short.setdefault(INSIDE.sub("", name), name)) != name:
            raise ValueError(f"{family.name}: {earlier!r} and {name!r} are two names of one tensor")
    best = _with_family_prefix(family, short)
    while missing := family_names - set(best):
        begins = next((w for w in WRAPPERS if sum(_begins(name, w) for name in short) > len(short) / 2), None)
        bare = {name.removeprefix(begins or ""): full for name, full in short.items()}
        if begins is None or len(bare) < len(short):
            break
        short = bare
        candidate = _with_family_prefix(family, short)
        best = candidate if len(family_names - set(candidate)) < len(missing) else best
    return best


def _begins(name: str, wrapper: str) -> bool:
    """Whether a name begins with a wrapper's prefix, or is that of a value head, which may be outside the wrapper."""
    return name.startswith(wrapper) or re.fullmatch(VALUE_HEADS, name) is not None


def _with_family_prefix(family: AnyFamily, stored: Mapping[str, str]) -> dict[str, str]:
    """The names with the family's prefix where the checkpoint lacks it -> the names in the checkpoint."""
    renamed = {full: family.rename(name) for name, full in stored.items()}
    bare = family.prefix and not any(name.startswith(family.prefix) for name in renamed.values())
    stored_names: dict[str, str] = {}
    for name, new in renamed.items():
        outside = (*family.outside, *(f"{head}." for head in OTHER_HEADS))
        full = family.prefix + new if bare and not new.startswith(outside) else new
        if full in stored_names:
            raise ValueError(
                f"{family.name}: {stored_names[full]!r} and {name!r} are two names of one tensor"
            )
        stored_names[full] = name
    return stored_names


def _check_every_tensor(
    family: AnyFamily,
    rules: Sequence[TensorRule],
    names: Mapping[str, str],
    duplicates: Mapping[str, str],
    tensors: Tensors,
) -> tuple[str, ...]:
    """Notes about tensors that are left out; ValueError unless every other tensor is used.

    No tensor may be missing or unknown, and a second copy of a tied tensor must equal the first.
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
    """The note about tensors of a checkpoint that the model does not use; empty if there are none."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (f"left out, as parts that are not modelled: {names[0]}{more}",) if names else ()


def _plan_of_rule(
    rule: TensorRule,
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    names: Mapping[str, str],
    tensors: Tensors,
    config: AnyConfig,
    dtype: torch.dtype | None,
    device: torch.device,
) -> ParameterPlan:
    if rule.ours not in named:
        raise ValueError(
            f"a rule makes {rule.ours!r}, which is no parameter of ours; {nearest(rule.ours, named)}"
        )
    parts = tuple(names[name] for name in rule.theirs)
    side = _stack_config(rule.ours, config)
    shape = named[rule.ours].shape
    return plan(
        rule, shape, parts, tensors, side, dtype, device, _part_sizes(rule.ours, len(parts), shape, model)
    )


def _plans_of_one_dtype(
    family: AnyFamily, plans: list[ParameterPlan], stated: torch.dtype | None
) -> tuple[list[ParameterPlan], tuple[str, ...]]:
    """The plans with all parameters in one dtype, as transformers has it: a forward pass needs that.

    Parameters in `family.wide`, which the family computes with in float32, keep their dtype.

    Returns:
        The plans, and at most one note for the user.
    """
    free = [p for p in plans if not any(re.fullmatch(name, p.ours) for name in family.wide)]
    counts = Counter(p.dtype for p in free)
    if len(counts) < 2:
        return plans, ()
    common = stated or reduce(torch.promote_types, counts)
    castable = {id(p) for p in free}
    short = {kind: str(kind).removeprefix("torch.") for kind in (*counts, common)}
    stored = ", ".join(f"{n} parameters in {short[kind]}" for kind, n in counts.most_common())
    cast_plans = [replace(p, dtype=common) if id(p) in castable else p for p in plans]
    return cast_plans, (f"stored in several dtypes ({stored}): cast to {short[common]}; dtype= says another",)


def _part_sizes(ours: str, n: int, shape: torch.Size, model: nn.Module) -> tuple[int, ...] | None:
    """Number of entries of each of the n parts of a parameter.

    For queries, keys and values it follows from their numbers of heads, else all parts are equal; None where queries,
    keys and values are stored in another number of parts.
    """
    if n == 1:
        return None
    owner, _, _ = ours.rpartition(".")
    mixer, _, name = owner.rpartition(".")
    if name != "qkv":
        return (shape.numel() // n,) * n
    attention = model.get_submodule(mixer)
    assert isinstance(attention, Attention)
    if n != len(attention.heads):
        return None
    return tuple(shape.numel() // shape[0] * heads * attention.d_head for heads in attention.heads)


def _device_of(ours: str, config: AnyConfig, devices: Sequence[torch.device]) -> torch.device:
    layer = re.match(r"(?:encoder\.|decoder\.)?blocks\.(\d+)\.", ours)
    if layer is None:
        return devices[0]
    return layer_devices(_stack_config(ours, config).n_layers, devices)[int(layer[1])]
