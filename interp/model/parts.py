"""One name for every piece of a model: heads, sublayers, neurons, the stream, constants; and edges between them.

`Part` is what every analysis takes, prints and stores: `L3H5` is head 5 of layer 3, `L3.mlp` its MLP, `L3N17` a
neuron, `L3.resid` the stream that enters it, `embed` the token embeddings. `Edge` joins two: `L0H1->L1H2.k` is what
head 1 of layer 0 adds to the keys of head 2 of layer 1. There is one table of kinds and one parser; the parser also
takes the spellings of other tools and of this package's first edition.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, SupportsIndex, TypeGuard

from interp.core.hints import Required
from interp.core.results import PLACE_OF
from interp.core.wording import nearest
from interp.model import sites

if TYPE_CHECKING:
    from interp.model.config import ModelConfig


@dataclass(frozen=True)
class PartKind:
    """One row of the table of kinds."""

    form: str
    """Spelling of a part of this kind: `L{layer}H{index}`."""
    site: str | None
    """Site of its value, inside its block or the model; None for a kind that is no activation, such as a bias."""
    axis: str | None = None
    """The axis of the site that tells the members of the kind apart."""
    older: tuple[str, ...] = ()
    """Other spellings that are read, never written."""


KINDS: Mapping[str, PartKind] = MappingProxyType(
    {
        "head": PartKind("L{layer}H{index}", "attn.hook_z", "h", ("a{layer}.h{index}", "{layer}.{index}")),
        "cross_head": PartKind("L{layer}X{index}", "cross_attn.hook_z", "h"),
        "neuron": PartKind("L{layer}N{index}", "mlp.hook_post", "m", ("m{layer}.n{index}",)),
        "neuron_before": PartKind("L{layer}B{index}", "mlp_before.hook_post", "m", ("b{layer}.n{index}",)),
        "feature": PartKind("L{layer}F{index}", "hook_features", "y"),
        "expert": PartKind("L{layer}E{index}", "mlp.hook_expert_out", "x"),
        "attn": PartKind("L{layer}.attn", "hook_attn_out", None, ("a{layer}", "{layer}_attn_out")),
        "cross_attn": PartKind("L{layer}.cross_attn", "hook_cross_attn_out", None, ("{layer}_cross_attn_out",)),
        "mlp": PartKind("L{layer}.mlp", "hook_mlp_out", None, ("m{layer}", "{layer}_mlp_out")),
        "mlp_before": PartKind(
            "L{layer}.mlp_before", "hook_mlp_before_out", None, ("b{layer}", "{layer}_mlp_before_out")
        ),
        "more": PartKind("L{layer}.more", "hook_more_out"),
        "error": PartKind("L{layer}.error", "hook_error"),
        "resid": PartKind("L{layer}.resid", "hook_resid_pre", None, ("r{layer}", "L{layer}.resid_pre", "input")),
        "query": PartKind("L{layer}H{index}.q", "hook_q_input", "h", ("a{layer}.h{index}<q>",)),
        "key": PartKind("L{layer}H{index}.k", "hook_k_input", "g", ("a{layer}.h{index}<k>",)),
        "value": PartKind("L{layer}H{index}.v", "hook_v_input", "g", ("a{layer}.h{index}<v>",)),
        "group_key": PartKind("L{layer}G{index}.k", "hook_k_input", "g", ("a{layer}.g{index}<k>",)),
        "group_value": PartKind("L{layer}G{index}.v", "hook_v_input", "g", ("a{layer}.g{index}<v>",)),
        "mlp_input": PartKind("L{layer}.mlp_in", "hook_mlp_in"),
        "mlp_before_input": PartKind("L{layer}.mlp_before_in", "hook_mlp_before_in"),
        "block": PartKind("L{layer}", None, None, ("{layer}_block",)),
        **{
            name: PartKind(f"L{{layer}}.{name}", None, None, (f"{{layer}}_{name}",))
            for name in (
                "attn_bias", "cross_attn_bias", "mlp_bias", "mlp_before_bias", "mlp_rest", "mlp_before_rest",
                "feature_bias", "feature_skip", "feature_rest",
                "ln1_bias", "ln_cross_bias", "ln2_bias", "q_bias", "k_bias",
            )
        },
        **{
            name: PartKind(f"L{{layer}}.{name}", None)
            for name in ("attn_rest", "ln0", "ln1", "ln1_post", "ln_cross", "ln2", "ln2_post")
        },
        "embed": PartKind("embed", "hook_embed"),
        "pos_embed": PartKind("pos_embed", "hook_pos_embed"),
        "type_embed": PartKind("type_embed", "hook_type_embed"),
        "logits": PartKind("logits", "unembed.hook_out"),
        "embed_bias": PartKind("embed_bias", None),
        "final_bias": PartKind("final_bias", None),
        "rounding": PartKind("rounding", None),
        **{
            name: PartKind(name, None)
            for name in ("ln_embed", "score_bias", "ln_final", "mlm_head", "unembed", "output")
        },
    }
)  # fmt: skip
"""Every kind of part that has a name of its own; any other site of a block is written `L3.pattern`."""

EXAMPLES = "L3H5 (head), L3.attn, L3.mlp, L3N17 (neuron), L3.resid, embed, logits"


@dataclass(frozen=True)
class Part:
    """A piece of a model, by kind, layer and index; `str(part)` is its one name.

    A head is `L3H5`, an MLP `L2.mlp`, a neuron `L3N17`, an edge `L0H1->L1H2.k`; every analysis says it so.

    Args:
        kind: a key of `KINDS`, or the name of a site inside a block or outside the blocks. `L1H2.k` counts key/value
            heads where every query head has its own; where heads share them (grouped-query attention) it is `L1G0.k`,
            group g serving the query heads h with h // (n_heads / n_kv_heads) = g.
        layer: number of the block; None outside the blocks.
        index: number of the head, neuron or expert; None for kinds without one.

    Example:
        >>> str(Part("head", 3, 5)), Part.of("a3.h5") == Part.of((3, 5)) == Part("head", 3, 5)
        ('L3H5', True)
    """

    kind: str
    layer: int | None = None
    index: int | None = None

    @classmethod
    def of(cls, given: Part | str | tuple[int, int]) -> Part:
        """The part that a name, a site, a pair of layer and head, or a `Part` means.

        Raises:
            KeyError: a name that no part has.
            ValueError: anything else.
        """
        if isinstance(given, Part):
            return given
        if isinstance(given, str):
            return _part_named(given)
        if _is_pair(given):
            layer, head = (operator.index(i) for i in given)
            return cls("head", layer, head)
        raise ValueError(f"a part is required, {EXAMPLES} or (layer, head), got {given!r}")

    def __str__(self) -> str:
        if self.kind not in KINDS and self.layer is None:
            return self.kind
        form = KINDS[self.kind].form if self.kind in KINDS else "L{layer}." + _short(self.kind)
        return form.format(layer=self.layer, index=self.index)

    @property
    def site(self) -> str:
        """The full name of the site that holds its value. ValueError for a part that is no activation."""
        inner = KINDS[self.kind].site if self.kind in KINDS else self.kind
        if inner is None:
            raise ValueError(
                f"{self} is not an activation of one site: it can be reported, not read or edited"
            )
        return inner if self.layer is None else f"blocks.{self.layer}.{inner}"

    @property
    def axis(self) -> str | None:
        """The axis letter of its site that `index` counts along; None for a whole site."""
        return KINDS[self.kind].axis if self.kind in KINDS else None

    @property
    def at(self) -> dict[str, int]:
        """The part's place in a value of its site, by axis letter; empty for the whole site."""
        return {} if self.axis is None or self.index is None else {self.axis: self.index}

    def within(self, config: ModelConfig) -> Part:
        """The part itself, once it is checked that a model of this config has it.

        Raises:
            KeyError: a kind that the model lacks.
            IndexError: a layer or index beyond its size.
        """
        if self.layer is not None and not 0 <= self.layer < config.n_layers:
            raise IndexError(f"{self}: layers are 0 to {config.n_layers - 1} in this model")
        if self.kind in KINDS and KINDS[self.kind].site is None:
            return self
        shared = config.kv_heads < config.n_heads
        if self.kind in ("key", "value") and shared:
            group = Part(
                f"group_{self.kind}", self.layer, (self.index or 0) // (config.n_heads // config.kv_heads)
            )
            raise KeyError(f"{self}: heads share keys and values in this model; this head's are {group}")
        if self.kind in ("group_key", "group_value") and not shared:
            return Part(self.kind.removeprefix("group_"), self.layer, self.index).within(config)
        sites.find(self.site, config)
        if self.axis is not None and self.index is not None:
            size = axis_size(self.axis, config if self.layer is None else config.at_layer(self.layer))
            if not 0 <= self.index < size:
                raise IndexError(f"{self}: the index of a {self.kind} is 0 to {size - 1} in this model")
        return self


@dataclass(frozen=True)
class Edge:
    """An edge: what one part adds to the input of another through the residual stream, `L0H1->L1H2.k`.

    Example:
        >>> str(Edge.of("a0.h1->a1.h2<k>"))
        'L0H1->L1H2.k'
    """

    sender: Part
    receiver: Part

    @classmethod
    def of(cls, given: Edge | str) -> Edge:
        """The edge that a text or an `Edge` means.

        Raises:
            ValueError: a text without `->`.
            KeyError: an unknown end.
        """
        if isinstance(given, Edge):
            return given
        ends = given.split("->") if isinstance(given, str) else []
        if len(ends) != 2:
            raise ValueError(f"an edge is required, such as L0H1->L1H2.k, got {given!r}")
        receiver = Part.of(ends[1])
        if receiver.kind in ("mlp", "mlp_before"):
            receiver = Part(f"{receiver.kind}_input", receiver.layer)
        return cls(Part.of(ends[0]), receiver)

    def __str__(self) -> str:
        receiver = str(self.receiver)
        if self.receiver.kind in ("mlp_input", "mlp_before_input"):
            receiver = receiver.removesuffix("_in")
        return f"{self.sender}->{receiver}"


def place_of(name: object) -> tuple[int | None, int | None, str | None]:
    """Layer, head and kind of a part by its name; for parts joined by "+" the layer they share, None and "set".

    All are None for a text that names no part.

    Example:
        >>> place_of("L3H5"), place_of("L0.mlp"), place_of("embed"), place_of("L1H0+L1.mlp")
        ((3, 5, 'head'), (0, None, 'mlp'), (None, None, 'embed'), (1, None, 'set'))
    """
    try:
        parts = [Part.of(part_name) for part_name in str(name).split("+")]
    except (KeyError, ValueError):
        return None, None, None
    if len(parts) > 1:
        layers = {part.layer for part in parts}
        return (layers.pop() if len(layers) == 1 else None), None, "set"
    (part,) = parts
    return part.layer, part.index if part.kind in KINDS and KINDS[part.kind].axis == "h" else None, part.kind


PLACE_OF["part"] = place_of


def _no_part(value: object) -> str | None:
    """None for a value that may name a part (not checked against a model); else ""."""
    return None if isinstance(value, str | Part) or _is_pair(value) else ""


PartName = Annotated[Part | str | tuple[int, int], Required("a part such as L3H5 or L3.mlp", _no_part)]
"""Names of a part: a `Part`, its text, or the layer and head of a head."""


def _is_pair(value: object) -> TypeGuard[tuple[SupportsIndex, SupportsIndex]]:
    """Whether a value is a tuple of two whole numbers of any type: layer and head."""
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_index, value))


def _is_index(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, bool)


def is_part(given: object) -> TypeGuard[PartName]:
    """Whether a value is one part (a name, a `Part`, or a pair of layer and head) instead of a sequence of parts."""
    numbers = (
        isinstance(given, tuple) and len(given) == 2 and not any(isinstance(i, str | Part) for i in given)
    )
    return isinstance(given, str | Part) or numbers


def as_part(given: PartName, config: ModelConfig) -> Part:
    """The part of this model that a name means.

    Raises:
        KeyError, ValueError, IndexError: as `Part.of` and `Part.within`; the message names what was given.
    """
    part = Part.of(given)
    try:
        return part.within(config)
    except (IndexError, KeyError) as error:
        if not isinstance(given, str) or given in error.args[0]:
            raise
        raise type(error)(f"{given!r} means {error.args[0]}") from None


def as_parts(
    given: PartName | Sequence[PartName], config: ModelConfig, kinds: Sequence[str], such: str
) -> list[Part]:
    """The parts that one or several names mean, all of `kinds`; `such` names these kinds in errors, "a head (L1H2)".

    Raises:
        ValueError: as `as_part`; none, or a part of another kind.
    """
    every = [given] if is_part(given) else list(given)  # type: ignore[arg-type]  # a tuple of two may be either
    parts = [as_part(name, config) for name in every]  # type: ignore[arg-type]
    wrong = [str(part) for part in parts if part.kind not in kinds]
    if wrong or not parts:
        raise ValueError(f"{such} is required, or several, got {wrong[0] if wrong else 'none'}")
    return parts


def as_site(given: Part | str, config: ModelConfig) -> str:
    """The full name of a site, given by its name or by a part that is a whole site, such as `L1.resid`.

    Raises:
        KeyError: a name that the model lacks.
        IndexError: a layer that it lacks.
        ValueError: a part that is one member of its site, such as a head.
    """
    if isinstance(given, str) and "hook_" in given:
        sites.find(given, config)
        return given
    part = Part.of(given).within(config)
    if part.axis is not None:
        raise ValueError(f"a whole site is required, {part} is one of several at {part.site!r}")
    return part.site


def axis_size(axis: str, config: ModelConfig) -> int:
    """Number of members of an axis that tells parts apart: heads, key/value heads, neurons or experts."""
    mlp = config.mlp
    sizes = {
        "h": config.n_heads,
        "g": config.kv_heads,
        "m": getattr(mlp, "d_mlp", 0),
        "x": getattr(mlp, "n_experts", 0),
        "y": 0 if config.features is None else max(config.features.by_layer),
    }
    return sizes[axis]


def _pattern(form: str) -> re.Pattern[str]:
    numbers = re.escape(form).replace(r"\{layer\}", r"(?P<layer>\d+)")
    return re.compile(numbers.replace(r"\{index\}", r"(?P<index>\d+)"))


_PATTERNS = [(name, _pattern(form)) for name, kind in KINDS.items() for form in (kind.form, *kind.older)]
_OUTSIDE = {site.name for site in sites.MODEL_SITES}
_WHOLE = {kind.site: name for name, kind in KINDS.items() if kind.axis is None and kind.site}
_ANY_SITE = re.compile(r"(?:L|blocks\.)(\d+)\.(.+)")


def _part_named(name: str) -> Part:
    """The part that a text names; KeyError if there is none."""
    for kind, pattern in _PATTERNS:
        if match := pattern.fullmatch(name):
            numbers = match.groupdict()
            layer, index = (int(numbers[n]) if n in numbers else None for n in ("layer", "index"))
            return Part(kind, 0 if name == "input" else layer, index)
    if name in _OUTSIDE:
        return Part(_WHOLE.get(name, name))
    if (match := _ANY_SITE.fullmatch(name)) and (inner := _inner(match[2])) is not None:
        return Part(_WHOLE.get(inner, inner), int(match[1]))
    layer, index, *_ = [*re.findall(r"\d+", name), 0, 0]
    known = [kind.form.format(layer=layer, index=index) for kind in KINDS.values()]
    raise KeyError(f"no part {name!r}: parts are written {EXAMPLES}; {nearest(name, known)}")


def _inner(short: str) -> str | None:
    """The site of a block that a short name stands for; None if there is none."""
    try:
        inner = sites.full_name(short)
    except KeyError:
        return None
    return inner if sites.is_of_block(inner) else None


def _short(inner: str) -> str:
    """The short name of a site of a block where it has one of its own, else the whole."""
    short = inner.rpartition("hook_")[2]
    return short if _inner(short) == inner else inner
