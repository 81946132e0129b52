"""Base classes of the records that a config holds, and the properties that the model and analyses ask of them.

One file holds all there is of an alternative: its record, what the record refuses, the sites it adds, and the module
that it builds. A record is known to config files from its class statement on; those that no released family needs are
in `interp.lab`, and users may write more.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.core import late
from interp.core.boundary import check_fields
from interp.core.hints import hints_of
from interp.core.kinds import MOST_NUMBER
from interp.core.wording import nearest, value_text

if TYPE_CHECKING:
    from interp.model.attention import Attention
    from interp.model.config import ModelConfig
    from interp.model.norm import Norm, NormedHeads
    from interp.model.sites import Site

Json = dict[str, object]
"""A JSON object, as `to_dict` writes it and `from_dict` reads it."""


MOST = 10**8
"""The largest width, vocabulary, context or other number of things: a matrix of two such has a size of 64 bits."""


class ConfigRecord:
    """A piece of a config: a frozen record. In JSON its fields, with its class name under `kind`."""

    own_sites: ClassVar[tuple["Site", ...]] = ()
    """Sites that the record may add to a block, each with the row of the table that it stands before (`Site.before`).
    """

    def __post_init__(self) -> None:
        """ValueError for a field of another kind than its annotation, or beyond 1e30; a record's own checks follow."""
        check_fields(self)
        hints = hints_of(type(self))  # type: ignore[arg-type]
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, counts = getattr(self, field.name), hints.get(field.name) in (int, int | None)
            if counts and value is not None and field.name != "seed" and abs(value) > MOST:
                raise ValueError(f"{type(self).__name__} requires {field.name} up to {MOST}, got {value}")
            numbers = value if isinstance(value, tuple) else (value,)
            if any(isinstance(number, float) and math.isnan(number) for number in numbers):
                raise ValueError(f"{type(self).__name__} requires a number as {field.name}, got {value}")
            if any(isinstance(number, int | float) and abs(number) > MOST_NUMBER for number in numbers):
                raise ValueError(
                    f"{type(self).__name__} requires {field.name} up to {MOST_NUMBER:g}, got {value_text(value)}: "
                    "products of larger numbers overflow"
                )

    @classmethod
    def today(cls, values: Json) -> Json:
        """The fields of a file of an earlier version, converted to those of this one."""
        return values

    @classmethod
    def any_sites(cls) -> tuple["Site", ...]:
        """The sites that the record adds to any model."""
        return cls.own_sites

    def sites(self, config: "ModelConfig") -> tuple["Site", ...]:
        """The sites that the record adds to the blocks of this model."""
        return self.own_sites

    def check(self, config: "ModelConfig") -> None:
        """ValueError for a config that the record does not fit into (`requires`)."""


R = TypeVar("R", bound=ConfigRecord)


@dataclass(frozen=True)
class Traits:
    """Properties of a mixer that the config, the model and the analyses rely on."""

    queries: bool = True
    """Whether there are matrices W_Q and W_K."""
    values: bool = True
    """Whether there is a matrix W_V."""
    valued: bool = True
    """Whether every key/value head has values, which are a site."""
    reads_by_qkv: bool = True
    """Whether queries, keys and values, linear in the normed stream, are all that its heads read of it: no gate, no
    memory, no other scores, no norm on the way.
    """
    bilinear: bool = False
    """Whether its weights come from q . k, so that there is a QK circuit."""
    rotated: bool = True
    """Whether rotary positions rotate its queries and keys."""
    scaled: bool = True
    """Whether `attn_scale` and `scale_by_layer` are factors on its scores."""
    scored: bool = False
    """Whether it has scores that a softmax turns into the pattern."""
    softmax: bool = False
    """Whether it takes the options of softmax attention: a window, sinks, a soft cap."""
    softmax_of_pairs: bool = False
    """Whether each score is of one query and one key, and the pattern is the softmax of the scores (and of sinks)."""
    patterned: bool = True
    """Whether it has an effective pattern: `[query, key]` weights of the values, whatever the kernel computes."""
    distribution: bool = False
    """Whether rows of the pattern are shares: never negative, of sum 1 (with sinks less, without any similarity 0).
    """
    additive: bool = True
    """Whether z = pattern @ values and nothing before or after it, so that heads split by source."""
    beside: str = "a norm or a gate stands beside it"
    """What else a mixer computes, where it has a pattern and is not additive."""
    halves: str = ""
    """The site `[b c h q k]` of two patterns, one for either half of the values, where there is no single one."""
    grouped: bool = True
    """Whether heads may share keys and values."""
    keyed: bool = True
    """Whether a cache keeps keys and values of every token for it."""
    separable: bool = False
    """Whether a score is one product of queries and keys at the positions of the config, times a factor that the
    number of keys of the query decides: parts on both sides sum to it.
    """
    stateful: bool = False
    """Whether it keeps a state of the past, so that a pass cannot go on from an arbitrary column of an earlier one.
    """
    masked: bool = False
    """Whether the mask of the pass and the positions of its tokens alone decide what a token sees, so that several
    continuations of a text can stand in one row.
    """
    ordered: bool = False
    """Whether it is defined by the order of tokens, so that there is no bidirectional form."""

    @property
    def moves(self) -> bool:
        """Whether what a head moves is one linear map of the normed stream: there is an OV circuit."""
        return self.additive and self.values


class Mixer(ConfigRecord):
    """Base class of the records of mixers: what mixes the positions of a block."""

    def __str__(self) -> str:
        """The mixer's name with its fields that are not the defaults: `Softmax(gate=True)`."""
        usual = {f.name: f.default for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        changed = [f"{name}={getattr(self, name)!r}" for name in usual if getattr(self, name) != usual[name]]
        return f"{type(self).__name__}({', '.join(changed)})" if changed else type(self).__name__

    @property
    def traits(self) -> Traits:
        """The properties that the config, the model and the analyses rely on."""
        return Traits()

    def qk_norm(self, config: "ModelConfig") -> "tuple[Norm, NormedHeads] | None":
        """The norm of queries and keys before rotation, and over which heads together: as the config says."""
        return None if config.qk_norm is None or not self.traits.queries else (config.norm, config.qk_norm)

    def query_width(self, config: "ModelConfig") -> int:
        """Width of a head's queries and keys; that of its values is `d_head`."""
        return config.head_width

    def z_width(self, config: "ModelConfig") -> int:
        """Width of a head's z: `d_head`, but in layers that are wider or narrower than attention."""
        return config.head_width

    def flops(self, config: "ModelConfig", layer: int, n: int) -> int:
        """Operations of a layer for a row of n tokens, as `interp.lab.cost` counts: 2 a b c for [a b] @ [b c]."""
        raise ValueError(f"{type(self).__name__} does not say what it costs: it has no method flops")

    def build(self, config: "ModelConfig", layer: int) -> "Attention":
        """The module of a layer: an `Attention` with its own `_mix`, matrices (`_build`) or `_project`."""
        raise NotImplementedError


def maps_flops(config: "ModelConfig", n: int) -> int:
    """Operations of W_Q, W_K, W_V and W_O for n tokens, every head as wide as the config says."""
    return 2 * n * config.d_model * config.head_width * 2 * (config.n_heads + config.kv_heads)


class AnyMLP(ConfigRecord):
    """Base class of the records of MLPs."""

    d_mlp: int
    words: ClassVar[str]
    """The name of the MLP in errors."""
    no_matrices: ClassVar[str | None] = None
    """Reason why there are no W_in, W_gate, W_out that map every token by itself, after "has"; None if there are."""
    pointwise: ClassVar[bool] = True
    """Whether every token is mapped by itself; else the MLP keeps a state of the past."""

    @property
    def width(self) -> int:
        """Multiplications of one token, in units of d_model."""
        raise NotImplementedError

    def at_layer(self, layer: int) -> "AnyMLP":
        """The MLP of one layer, where layers differ."""
        return self

    def flops(self, d_model: int, layer: int, n: int) -> int:
        """Operations of a layer and n tokens, as `interp.lab.cost` counts: products of matrices alone."""
        return 2 * n * d_model * self.at_layer(layer).width

    def build(self, d_model: int, layer: int, name: str) -> nn.Module:
        """The module, whose sites begin with `name`."""
        raise NotImplementedError


class OutputLayer(nn.Module):
    """Base class of modules that stand in the place of an unembedding."""

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        """Log-probabilities of all tokens."""
        raise NotImplementedError

    def loss(self, x: Float[Tensor, "n d"], target: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
        """-log p(target) in nats, computed for the targets only."""
        raise NotImplementedError


class Output(ConfigRecord):
    """Base class of records of how the final stream becomes probabilities."""

    def flops(self, config: "ModelConfig", n: int) -> int:
        """Operations of n rows of logits, as `interp.lab.cost` counts."""
        raise ValueError(f"{type(self).__name__} does not say what it costs: it has no method flops")

    def build(self, config: "ModelConfig") -> OutputLayer | None:
        """The output layer of a model that has no unembedding; None otherwise."""
        raise NotImplementedError


@dataclass(frozen=True)
class FullSoftmax(Output):
    """The usual output layer, the unembedding: one matrix, a logit for each token."""

    def flops(self, config: "ModelConfig", n: int) -> int:
        """Operations of one matrix."""
        return 2 * n * config.d_model * config.n_outputs

    def build(self, config: "ModelConfig") -> None:
        """Nothing: the unembedding is the model's."""


_LACKS = {
    "values": "a matrix W_V that makes values of the normed stream; there is none in {}",
    "separable": "scores that are one product of queries and keys, linear in the normed stream; not so of {}",
    "distribution": "weights that are shares; those of {} may be negative or sum to anything",
}


def require(trait: str, mixers: Iterable[Mixer], what: str) -> None:
    """ValueError for `what` unless all mixers have a trait: `additive`, `values`, `separable`, `distribution`.

    For analyses that multiply patterns and values, split scores, or read a pattern's rows as shares.
    """
    for mixer in mixers:
        if not getattr(mixer.traits, trait):
            why = why_not_additive(mixer) if trait == "additive" else _LACKS[trait].format(mixer)
            raise ValueError(f"{what} requires {why}")


def why_not_additive(mixer: Mixer) -> str:
    """Reason why z of this mixer is not its pattern times the values."""
    if mixer.traits.patterned:
        return f"z = pattern @ values alone; {mixer} has a pattern, but {mixer.traits.beside}"
    return f"z = pattern @ values; {mixer} makes no pattern of the values"


def requires(condition: object, what: str) -> None:
    """ValueError for a config that lacks something."""
    if not condition:
        raise ValueError(f"ModelConfig requires {what}")


def at_least_one(record: object, *names: str) -> None:
    """ValueError unless these fields are 1 or more."""
    for name in names:
        if getattr(record, name) < 1:
            raise ValueError(f"{type(record).__name__} requires {name} >= 1, got {getattr(record, name)}")


def positive(record: object, *names: str) -> None:
    """ValueError unless these fields are finite and above 0, or None where that is allowed."""
    for name in names:
        value = getattr(record, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{type(record).__name__} requires {name} finite and above 0, got {value!r}")


def not_negative(record: object, *names: str) -> None:
    """ValueError unless these fields are finite and 0 or more."""
    for name in names:
        if not 0 <= getattr(record, name) < math.inf:
            raise ValueError(
                f"{type(record).__name__} requires {name} finite and 0 or more, got {getattr(record, name)!r}"
            )


def all_records() -> dict[str, type[ConfigRecord]]:
    """Every record that exists, by the name under which a config file keeps it."""
    late.fill("records")
    return _imported_records()


def _imported_records() -> dict[str, type[ConfigRecord]]:
    """Class name -> record class, of the modules imported so far, which are enough for configs of usual models."""
    records: dict[str, type[ConfigRecord]] = {}
    todo: list[type[ConfigRecord]] = [ConfigRecord]
    while todo:
        kind = todo.pop(0)
        todo += kind.__subclasses__()
        if dataclasses.is_dataclass(kind):
            records[kind.__name__] = kind
    return records


def fields_as_json(record: object) -> Json:
    """The fields of a record, ready for JSON."""
    return {f.name: _value_as_json(getattr(record, f.name)) for f in dataclasses.fields(record)}  # type: ignore[arg-type]


def from_json(cls: type[R], values: Json) -> R:
    """The record that `fields_as_json` described.

    Raises:
        ValueError: no mapping, a key that the record lacks, one that is missing, or an unknown record.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{cls.__name__} requires its values by name, got {value_text(values)}")
    values = cls.today(values)
    fields = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := set(values) - fields:
        name = sorted(unknown)[0]
        raise ValueError(f"{cls.__name__} has no field {name!r}; {nearest(name, fields)}")
    needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]  # type: ignore[arg-type]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"{cls.__name__} requires {', '.join(missing)}")
    return cls(**{name: _value_from_json(f"{cls.__name__}: {name}", value) for name, value in values.items()})


def _value_as_json(value: object) -> object:
    if isinstance(value, tuple):
        return [_value_as_json(item) for item in value]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    return {"kind": type(value).__name__, **fields_as_json(value)}


def _value_from_json(where: str, value: object) -> object:
    if isinstance(value, list):
        return tuple(_value_from_json(where, item) for item in value)
    if not isinstance(value, dict):
        return value
    kind = str(value.get("kind"))
    record = _imported_records().get(kind) or all_records().get(kind)
    if record is None:
        raise ValueError(f"{where}: unknown record {value.get('kind')!r}; {nearest(kind, all_records())}")
    return from_json(record, {k: v for k, v in value.items() if k != "kind"})
