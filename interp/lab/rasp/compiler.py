"""A compiler from programs (`interp.lab.rasp`) to weights of a Transformer with a circuit known by construction.

The idea is Tracr's (Lindner et al. 2023, arXiv:2301.05062). Every variable has dimensions of the stream of its own, one
per value (one-hot), or a single one if it is a number. Every selector is an attention head, whose scores are so far
apart that attention is hard; ties share it equally, and what finds nothing rests on the beginning of sequence. Every
map is some neurons of an MLP. A variable is computed in the first layer in which its inputs are there.

The beginning of sequence is a position of its own, which no program sees. What stands there is the same for every
input, so keys and values of it are corrected, in closed form, to be exactly the score of "nothing" and the default.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.boundary import public
from interp.lab.rasp.compiled import START, Compiled
from interp.lab.rasp.language import (
    Aggregate,
    Constant,
    Map,
    Program,
    Selector,
    Share,
    Sum,
    Tokens,
    Value,
    Variable,
)
from interp.model.config import MLP, LayerNorm, Learned, ModelConfig, NoNorm, Norm, RMSNorm
from interp.model.norm import Normalize
from interp.model.parts import Part
from interp.model.transformer import Transformer
from interp.zoo.groundtruth import Alphabet, plant_head, plant_neurons
from interp.zoo.planted import GAIN

__all__ = ["compile"]

GAP = 32.0
"""Difference of scores between a selected key and all others; softmax leaves e^-32 elsewhere."""


@public()
def compile(program: Program, *, norm: Norm = NoNorm()) -> Compiled:  # noqa: B008  # a frozen record
    """The model of a program: its most likely token at every position is the program's output there.

    Args:
        program: the RASP program.
        norm: the norm before each sublayer and the logits. The stream of a program without numbers has the same norm
            at every position that a program sees, so that the trained vectors of `RMSNorm()` or `LayerNorm()` undo it
            exactly.

    Returns:
        `Compiled`: the model, its symbols, its edges and where each variable is written.

    Raises:
        ValueError: a norm of a program with numbers (or with a default of None), or outputs that `str` does not tell
            apart.

    Example:
        >>> from interp.lab.rasp.programs import PROGRAMS
        >>> shift = compile(PROGRAMS["shift"]())
        >>> shift.text.decode(shift.model(shift.ids("cab")[None]).argmax(-1)[0, 1:].tolist())
        '-ca'
        >>> len(shift.edges), shift.check().wrong
        (4, 0.0)
    """
    plan = CompilePlan.of(program)
    if not isinstance(norm, NoNorm):
        _check_norm(norm, plan)
    symbols = [START, *program.tokens.symbols]
    answers = [str(value) for value in program.output.domain]
    if len(set(answers)) < len(answers) or START in symbols[1:] + answers:
        raise ValueError(
            f"outputs with different names, and none of them {START}, are required, got {answers}"
        )
    text = Alphabet(tuple(dict.fromkeys([*symbols, *answers])))
    heads = {where: _head(plan, where) for where in plan.heads}
    layers = [_neurons(plan, layer) for layer in range(plan.n_layers)]
    model = Transformer(_config(plan, heads, layers, len(text.symbols), norm)).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.zero_()
    _write_ends(model, plan, text, answers)
    for layer, neurons in enumerate(layers):
        _set_norm(model.block(layer).ln1, plan, 2 * layer)
        begun = model.block(layer).ln1(model(torch.zeros(1, 1, dtype=torch.long), stop=layer)[0, 0])
        for index in range(model.config.n_heads):
            if (layer, index) in heads:
                heads[layer, index].corrected(begun).write(model, (layer, index))
        if plan.mlp:
            _set_norm(model.block(layer).ln2, plan, 2 * layer + 1)
            neurons.write(model, layer)
    _set_norm(model.ln_final, plan, 2 * plan.n_layers)
    return Compiled(
        program, model, text, MappingProxyType(_carries(model, plan)), MappingProxyType(plan.writers),
        MappingProxyType({name: plan.place(each).mT.clone() for name, each in plan.written.items()}),
    )  # fmt: skip


# --- what is computed where -------------------------------------------------------------------------------------------

HeadPlace = tuple[int, int]
"""Layer and index of a head."""


@dataclass(frozen=True, eq=False)
class CompilePlan:
    """The time at which each variable is there, and the node that writes it.

    The stream before layer l is time 2 l, before its MLP 2 l + 1.
    """

    program: Program
    time: Mapping[Variable, int]
    heads: Mapping[HeadPlace, tuple[Variable, ...]]
    """The variables that each head writes: those of one selector that are ready in one layer."""

    @classmethod
    def of(cls, program: Program) -> CompilePlan:
        """The plan with everything as early as its inputs allow."""
        time: dict[Variable, int] = {}
        groups: dict[int, dict[tuple[Selector, type], list[Variable]]] = {}
        for each in program.variables.values():
            ready = max((time[read] for read in each.inputs), default=0)
            if isinstance(each, Aggregate | Share):
                ready += 1 + ready % 2
                groups.setdefault(ready // 2, {}).setdefault((each.selector, type(each)), []).append(each)
            elif isinstance(each, Map):
                ready += 2 - ready % 2
            time[each] = ready
        heads = {
            (layer, index): tuple(written)
            for layer, group in groups.items()
            for index, written in enumerate(group.values())
        }
        return cls(program, time, heads)

    @property
    def n_layers(self) -> int:
        """Number of layers that the last variable needs, at least one."""
        return max(1, -(-max(self.time.values()) // 2))

    @property
    def mlp(self) -> bool:
        """Whether anything is computed by neurons."""
        return any(isinstance(each, Map) for each in self.time)

    @cached_property
    def written(self) -> Mapping[str, Variable]:
        """The variables that have a place in the stream, in the order of time."""
        those = {name: v for name, v in self.program.variables.items() if not isinstance(v, Sum | Constant)}
        return dict(sorted(those.items(), key=lambda item: self.time[item[1]]))

    @cached_property
    def writers(self) -> Mapping[str, str]:
        """Variable -> the node that writes it."""
        owners = {each: str(Part("head", *where)) for where, group in self.heads.items() for each in group}
        return {
            name: owners.get(each, f"L{self.time[each] // 2 - 1}.mlp" if self.time[each] else "L0.resid")
            for name, each in self.written.items()
        }

    @cached_property
    def slices(self) -> Mapping[Variable, slice]:
        """The dimensions of each variable; 0 is that of the beginning of sequence."""
        found, start = {}, 1
        for each in self.written.values():
            found[each] = slice(start, start + width(each))
            start = found[each].stop
        return found

    @cached_property
    def d_model(self) -> int:
        """Dimensions of all variables together."""
        return 1 + sum(map(width, self.slices))

    def place(self, variable: Variable) -> Float[Tensor, "d k"]:
        """The columns that read a variable off the stream; those of a constant read nothing."""
        if isinstance(variable, Constant):
            return torch.zeros(self.d_model, 1)
        if not isinstance(variable, Sum):
            return torch.eye(self.d_model)[:, self.slices[variable]]
        terms = zip(variable.weights, variable.terms, strict=True)
        return sum(
            (w * self.place(term) @ renamed(term, variable.domain) for w, term in terms),
            torch.zeros(self.d_model, width(variable)),
        )

    def kinds(self, time: int) -> int:
        """How many variables there are at a time."""
        return sum(self.time[each] <= time for each in self.slices)


def width(variable: Variable) -> int:
    """Dimensions of a variable."""
    return 1 if variable.numeric else len(variable.domain)


def encoded(variable: Variable, value: Value) -> Float[Tensor, "k"]:
    """A value as it stands in the stream; None is nothing."""
    if variable.numeric:
        return torch.tensor([float(value)])  # type: ignore[arg-type]
    return torch.tensor([float(value == each) for each in variable.domain])


def renamed(variable: Variable, domain: Sequence[Value]) -> Float[Tensor, "k k2"]:
    """The matrix that turns a variable's dimensions into those of another domain that has its values."""
    if variable.numeric:
        return torch.ones(1, 1)
    return torch.tensor([[float(value == each) for each in domain] for value in variable.domain])


def _config(
    plan: CompilePlan,
    heads: Mapping[HeadPlace, Head],
    layers: Sequence[CompiledNeurons],
    d_vocab: int,
    norm: Norm,
) -> ModelConfig:
    return ModelConfig(
        n_layers=plan.n_layers, d_model=plan.d_model, n_heads=1 + max((index for _, index in heads), default=0),
        d_head=max((head.width for head in heads.values()), default=1),
        n_ctx=plan.program.tokens.length + 1, d_vocab=d_vocab,
        mlp=MLP(max(1, *(len(each.bias) for each in layers)), act="relu") if plan.mlp else None,
        position=Learned(), norm=norm, final_norm=not isinstance(norm, NoNorm), out_bias=False, attn_scale=1.0,
        causal=plan.program.causal,
    )  # fmt: skip


def _write_ends(model: Transformer, plan: CompilePlan, text: Alphabet, answers: Sequence[str]) -> None:
    """The embeddings of tokens and positions, and the unembedding of the output."""
    assert model.pos_embed is not None and model.unembed is not None
    model.embed.weight[0, 0] = 1
    for each, there in plan.slices.items():
        if isinstance(each, Tokens):
            model.embed.weight[1 : 1 + width(each), there] = torch.eye(width(each))
        elif plan.time[each] == 0:
            model.pos_embed.weight[1:, there] = torch.eye(width(each))
    ids = [text.symbols.index(name) for name in answers]
    model.unembed.weight[ids] = GAIN * plan.place(plan.program.output).mT


def _carries(model: Transformer, plan: CompilePlan) -> dict[str, tuple[str, ...]]:
    """Variables that each edge carries: those with dimensions at which any weight of the receiver is not 0."""
    variables = {START: ("L0.resid", slice(0, 1))}
    variables |= {name: (plan.writers[name], plan.slices[each]) for name, each in plan.written.items()}
    found: dict[str, tuple[str, ...]] = {}
    for receiver, weight in _receivers(model):
        for name, (writer, there) in variables.items():
            if bool(weight[:, there].any()):
                edge = f"{writer}->{receiver}"
                found[edge] = (*found.get(edge, ()), name)
    return found


def _receivers(model: Transformer) -> Iterator[tuple[str, Float[Tensor, "m d"]]]:
    """Everything that reads the stream, with its weights."""
    for layer in range(model.config.n_layers):
        attn = model.block(layer).attn
        for name in "qkv":
            for head, weight in enumerate(attn.part(name)[0]):
                yield f"L{layer}H{head}.{name}", weight
        if model.config.mlp is not None:
            yield f"L{layer}.mlp", model.get_parameter(f"blocks.{layer}.mlp.into.weight")
    yield "logits", model.get_parameter("unembed.weight")


# --- heads ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadInput:
    """The linear map from the stream to the queries, keys or values of a head: `x weight + bias`."""

    weight: Float[Tensor, "d e"]
    bias: Float[Tensor, "e"]

    def corrected(self, begun: Float[Tensor, "d"], wanted: Float[Tensor, "e"]) -> HeadInput:
        """This input, but `wanted` at the beginning of sequence, where the stream is `begun`."""
        weight = self.weight.clone()
        weight[0] += (wanted - begun @ self.weight - self.bias) / begun[0]
        return HeadInput(weight, self.bias)

    def plus(self, other: HeadInput) -> HeadInput:
        """This input with another one, of a single dimension, added to its first dimension."""
        weight, bias = self.weight.clone(), self.bias.clone()
        weight[:, :1] += other.weight
        bias[:1] += other.bias
        return HeadInput(weight, bias)

    def joined(self, other: HeadInput) -> HeadInput:
        """Both maps, side by side."""
        return HeadInput(torch.cat((self.weight, other.weight), 1), torch.cat((self.bias, other.bias)))


@dataclass(frozen=True)
class Head:
    """A head before it is written; `first` says what its queries, keys and values are at the beginning of sequence."""

    query: HeadInput
    key: HeadInput
    value: HeadInput
    out: Float[Tensor, "f d"]
    first: tuple[Float[Tensor, "e"] | None, Float[Tensor, "e"], Float[Tensor, "f"]]

    @property
    def width(self) -> int:
        """The larger one of queries and values."""
        return max(len(self.query.bias), len(self.value.bias))

    def corrected(self, begun: Float[Tensor, "d"]) -> Head:
        """The head for a stream that is `begun` at the beginning of sequence."""
        query, key, value = (
            each if wanted is None else each.corrected(begun, wanted)
            for each, wanted in zip((self.query, self.key, self.value), self.first, strict=True)
        )
        return Head(query, key, value, self.out, self.first)

    def write(self, model: Transformer, where: HeadPlace) -> None:
        """Put it into the model."""
        size, d = model.config.head_width, model.config.d_model
        each = {"query": self.query, "key": self.key, "value": self.value}
        wide = {name: torch.zeros(d, size) for name in each}
        for name, read in each.items():
            wide[name][:, : len(read.bias)] = read.weight
            bias = model.block(where[0]).attn.part(name[0])[1]
            assert bias is not None
            bias[where[1], : len(read.bias)] = read.bias
        out = torch.zeros(size, d)
        out[: len(self.out)] = self.out
        plant_head(model, where, query=wide["query"], key=wide["key"], value=wide["value"], out=out)


def _head(plan: CompilePlan, where: HeadPlace) -> Head:
    """The head of some variables that are aggregates of one selector."""
    written = plan.heads[where]
    query, key, rest = _scores(plan, written[0])
    wanted = torch.zeros(len(query.bias))
    wanted[0] = rest
    first = None
    if not plan.program.causal:
        # The beginning would see later positions, and what stands there depend on the input: it looks for itself.
        nothing, itself = torch.zeros(plan.d_model, 1), torch.eye(plan.d_model)[:, :1]
        query, key = (
            query.joined(HeadInput(itself, torch.zeros(1))),
            key.joined(HeadInput(nothing, torch.zeros(1))),
        )
        first = torch.tensor([0.0] * len(wanted) + [1.0])
        wanted = torch.cat((wanted, torch.tensor([2 * GAP])))
    moved = [_moved(plan, each) for each in written]
    value = HeadInput(torch.cat([v.weight for v, _ in moved], 1), torch.cat([v.bias for v, _ in moved]))
    out = torch.cat([plan.place(each).mT for each in written])
    return Head(query, key, value, out, (first, wanted, torch.cat([default for _, default in moved])))


def _moved(plan: CompilePlan, variable: Variable) -> tuple[HeadInput, Float[Tensor, "k"]]:
    """The values of a head for one variable, and what they are at the beginning of sequence."""
    if isinstance(variable, Share):
        return HeadInput(torch.zeros(plan.d_model, 1), torch.zeros(1)), torch.ones(1)
    assert isinstance(variable, Aggregate)
    turned = renamed(variable.values, variable.domain)
    read = _input(plan, variable.values, turned)
    return read, encoded(variable, variable.default)


def _input(plan: CompilePlan, variable: Variable, matrix: Float[Tensor, "k e"]) -> HeadInput:
    """A matrix applied to a variable's dimensions; those of a constant are a bias."""
    fixed = (
        encoded(variable, variable.value) if isinstance(variable, Constant) else torch.zeros(width(variable))
    )
    return HeadInput(plan.place(variable) @ matrix, fixed @ matrix)


def _scores(plan: CompilePlan, variable: Variable) -> tuple[HeadInput, HeadInput, float]:
    """Queries and keys of a selector, and the score of "nothing" that the beginning of sequence gets, in dimension 0.

    Every condition that holds adds `high`; a preference adds less than a quarter of it. So the keys that fulfil all c
    conditions have c high at least, all others (c - 3/4) high at most, and "nothing" has (c - 1/2) high; in a `Share`
    it has c high, as the selected.
    """
    assert isinstance(variable, Aggregate | Share)
    selector, d = variable.selector, plan.d_model
    ranks = [] if selector.preferred is None else sorted(selector.preferred.domain)  # type: ignore[type-var]
    high = max(4 * GAP * (len(ranks) - 1), 4 * GAP)
    plain = HeadInput(torch.zeros(d, 1), torch.zeros(1))
    query, key, count = HeadInput(plain.weight, torch.ones(1)), plain, 0
    for condition in selector.conditions:
        rows = [
            [float(condition.predicate(k, q)) for k in condition.keys.domain]
            for q in condition.queries.domain
        ]
        table = torch.tensor(rows)
        count += not bool(table.all())
        if bool((table == table[:1]).all()):  # the query does not matter
            if table.all() or not table.any():
                continue
            key = key.plus(_input(plan, condition.keys, high * table[:1].mT))
        elif bool((table == table[:, :1]).all()):  # the key does not
            query = query.joined(_input(plan, condition.queries, high * table[:, :1]))
            key = key.joined(HeadInput(plain.weight, torch.ones(1)))
        else:
            wide = table.shape[0] < table.shape[1]
            kinds = torch.eye(min(table.shape))
            query = query.joined(_input(plan, condition.queries, high * (kinds if wide else table)))
            key = key.joined(_input(plan, condition.keys, table.mT if wide else kinds))
    if selector.preferred is not None:
        order = torch.tensor([[GAP * ranks.index(value)] for value in selector.preferred.domain])
        key = key.plus(_input(plan, selector.preferred, order))
    return query, key, high * (count if isinstance(variable, Share) else count - 0.5)


# --- neurons ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompiledNeurons:
    """Neurons of one layer before they are written: `relu(x into + bias) out`, and what is added besides."""

    into: Float[Tensor, "d m"]
    bias: Float[Tensor, "m"]
    out: Float[Tensor, "m d"]
    offset: Float[Tensor, "d"]

    def write(self, model: Transformer, layer: int) -> None:
        """Put them into the model."""
        plant_neurons(model, layer, into=self.into, bias=self.bias, out=self.out, offset=self.offset)


def _neurons(plan: CompilePlan, layer: int) -> CompiledNeurons:
    """The maps of one layer, side by side."""
    d = plan.d_model
    found = [CompiledNeurons(torch.zeros(d, 0), torch.zeros(0), torch.zeros(0, d), torch.zeros(d))]
    for each in plan.slices:
        if plan.time[each] == 2 * layer + 2 and isinstance(each, Map):
            found.append((_steps if each.inputs[0].numeric else _table)(plan, each))
    return CompiledNeurons(
        torch.cat([n.into for n in found], 1),
        torch.cat([n.bias for n in found]),
        torch.cat([n.out for n in found]),
        torch.stack([n.offset for n in found]).sum(0),
    )


def _images(plan: CompilePlan, variable: Variable, values: Sequence[Value]) -> Float[Tensor, "m d"]:
    """Values of a variable as they are written to the stream."""
    return torch.stack([encoded(variable, value) for value in values]) @ plan.place(variable).mT


def _table(plan: CompilePlan, variable: Map) -> CompiledNeurons:
    """One neuron per combination of n values: `relu(2 (x_1 + ... + x_n) - 2 n + 1)`."""
    n = len(variable.inputs)
    which = torch.tensor(list(product(*(range(width(each)) for each in variable.inputs))))
    into = sum(
        (plan.place(each)[:, i] for each, i in zip(variable.inputs, which.mT, strict=True)), torch.zeros(())
    )
    out = _images(plan, variable, [variable(*each) for each in variable.combinations])
    return CompiledNeurons(2 * into, (1.0 - 2 * n) * torch.ones(len(out)), out, 0 * out.sum(0))


def _steps(plan: CompilePlan, variable: Map) -> CompiledNeurons:
    """Two neurons per step between neighbouring numbers, which rise from 0 to 1 in the middle half of the gap.

    `relu(y + 1/2) - relu(y - 1/2)`, y = 2 (x - middle) / gap; the image of the smallest number is the offset.
    """
    (source,) = variable.inputs
    numbers = [float(value) for value in source.domain]  # type: ignore[arg-type]
    images = _images(plan, variable, [variable(value) for value in source.domain])
    low, high = (torch.tensor(each, dtype=torch.float64) for each in (numbers[:-1], numbers[1:]))
    slope = (2 / (high - low)).float()
    centre = ((low + high) / (high - low)).float()
    into = (plan.place(source) * slope).repeat(1, 2)
    bias = torch.cat((0.5 - centre, -0.5 - centre))
    out = torch.cat((images[1:] - images[:-1], images[:-1] - images[1:]))
    return CompiledNeurons(into, bias, out, images[0])


# --- norms that are undone --------------------------------------------------------------------------------------------


def _check_norm(norm: Norm, plan: CompilePlan) -> None:
    """ValueError where the norm of the stream is not the same at every position, or not undone by trained vectors."""
    usual = RMSNorm if isinstance(norm, RMSNorm) else LayerNorm
    if isinstance(norm, NoNorm) or norm != usual(norm.eps):
        raise ValueError(f"RMSNorm or LayerNorm with all their trained vectors are required, got {norm}")
    for name, each in plan.written.items():
        if each.numeric or (isinstance(each, Aggregate) and each.default is None):
            what = "a number" if each.numeric else "nothing at some positions"
            raise ValueError(
                f"a norm is exact where every variable is one-hot; {name} of {plan.program.name} is {what}"
            )


def _set_norm(norm: Normalize | None, plan: CompilePlan, time: int) -> None:
    """The trained vectors that undo a norm of a stream with one 1 per variable."""
    if norm is None or isinstance(norm.kind, NoNorm):
        return
    mean = plan.kinds(time) / plan.d_model
    centred = isinstance(norm.kind, LayerNorm)
    assert norm.weight is not None
    norm.weight.fill_(math.sqrt(mean - centred * mean**2 + norm.kind.eps))
    if norm.bias is not None:
        norm.bias.fill_(mean)
