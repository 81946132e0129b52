"""A compiler: a program (`interp.zoo.rasp`) as the weights of a Transformer whose circuit is known by construction.

The idea is Tracr's (Lindner et al. 2023, arXiv:2301.05062). Every variable has dimensions of the stream of its own, one
per value (one-hot), or a single one if it is a number. Every selector is an attention head, whose scores are so far
apart that attention is hard; ties share it equally, and what finds nothing rests on the beginning of sequence. Every
map is some neurons of an MLP. A variable is computed in the first layer in which its inputs are there.

The beginning of sequence is a position of its own, which no program sees. What stands there is the same for every
input, so keys and values of it are corrected, in closed form, to be exactly the score of "nothing" and the default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from types import MappingProxyType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.model.config import MLP, LayerNorm, Learned, ModelConfig, NoNorm, Norm, RMSNorm
from interp.model.edits import Add, Edit
from interp.model.norm import Normalize
from interp.model.parts import Edge, Part
from interp.model.sites import final_stream
from interp.model.tap import Read, Tap
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.zoo.groundtruth import Alphabet, plant_head, plant_neurons
from interp.zoo.planted import GAIN, Planted, generator_of
from interp.zoo.rasp import Aggregate, Constant, Map, Program, Selector, Sum, Track, Value, Variable
from interp.zoo.rasp import SequenceMap, Share, Tokens

__all__ = ["Compiled", "Exactness", "compile"]

START = "<|bos|>"
"""The symbol that begins every sequence, and the name of its dimension."""
GAP = 32.0
"""Between the score of a selected key and all others; softmax leaves e^-32 elsewhere."""


@dataclass(frozen=True)
class Exactness:
    """How a model fares on the inputs of its program."""

    inputs: int
    """How many were tried."""
    exhaustive: bool
    """Whether these are all that there are."""
    wrong: float
    """The share of them for which the output differs from the program's at any position."""
    margin: float
    """The smallest lead, in logits, of the program's output over any other; negative where one is wrong."""


@public()
@dataclass(frozen=True, eq=False)
class Compiled:
    """A program and the model that computes it: every edge, and every variable's place, known by construction.

    Nodes and edges are named as in `EdgeGraph`. Tokens are ids of `text`; every sequence begins with 0, and the logits
    at each later position are those of the program's output there.
    """

    program: Program
    model: Transformer
    text: Alphabet
    """Symbols and ids: the beginning of sequence, the program's tokens, what else it may answer."""
    carries: Mapping[str, tuple[str, ...]]
    """Edge -> the variables that the receiver reads of what the sender writes; `<|bos|>` marks the first position."""
    writers: Mapping[str, str]
    """Variable -> the node that writes it."""
    directions: Mapping[str, Float[Tensor, "k d"]]
    """Variable -> one row per value of its domain, or one for a number."""

    @property
    def edges(self) -> frozenset[str]:
        """Every edge by which the receiver reads what the sender writes."""
        return frozenset(self.carries)

    @property
    def subspaces(self) -> Mapping[str, Mapping[str, Float[Tensor, "k d"]]]:
        """Variable -> every site of the stream that holds it -> its directions there."""
        config, found = self.model.config, {}
        middle = ["resid_mid"] if config.mlp is not None else []
        stream = [f"L{layer}.{site}" for layer in range(config.n_layers) for site in ("resid", *middle)]
        stream.append(f"L{config.n_layers - 1}.resid_post")
        for name, writer in self.writers.items():
            part = Part.of(writer)
            first = 0 if part.kind == "resid" else stream.index(f"L{part.layer}.resid") + 1
            if part.kind == "mlp":
                first += 1
            found[name] = MappingProxyType(dict.fromkeys(stream[first:], self.directions[name]))
        return MappingProxyType(found)

    def evaluate(self, tokens: Sequence[str], given: Mapping[str, Track] | None = None) -> Track:
        """What the program, not the model, says at every position; `given` as in `Program.trace`."""
        return self.program.evaluate(tokens, given)

    def ids(self, tokens: Sequence[str]) -> Int[Tensor, "p"]:
        """A sequence as the model takes it, the beginning first."""
        return torch.tensor([0, *map(self.text.symbols.index, tokens)])

    def expected(self, tokens: Int[Tensor, "n p"]) -> Int[Tensor, "n a"]:
        """The ids that the program answers, at every position but the first."""
        rows = [[self.text.symbols[i] for i in row] for row in tokens[:, 1:].tolist()]
        answers = [self.evaluate(row) for row in rows]
        return torch.tensor([[self.text.symbols.index(str(value)) for value in row] for row in answers])

    def inputs(self, most: int = 10_000, seed: int = 0) -> list[Int[Tensor, "n p"]]:
        """Every input of the program, as ids, by length; if there are more than `most`, so many random ones."""
        source = self.program.tokens
        count, lengths = len(source.symbols), range(1, source.length + 1)
        total = sum(count**length for length in lengths)
        if total <= most:
            return [_begun(torch.tensor(list(product(range(1, count + 1), repeat=n)))) for n in lengths]
        generator = generator_of(seed, most)
        drawn = [max(1, round(most * count**n / total)) for n in lengths]
        return [
            _begun(torch.randint(1, count + 1, (rows, n), generator=generator))
            for rows, n in zip(drawn, lengths, strict=True)
        ]

    def check(self, most: int = 10_000, seed: int = 0) -> Exactness:
        """How often and how clearly the model answers as the program does, on its `inputs`."""
        leads = []
        for tokens in self.inputs(most, seed):
            right = self.expected(tokens)[..., None]
            logits = self.model(tokens)[:, 1:]
            others = logits.scatter(-1, right, -torch.inf).amax(-1)
            leads.append((logits.gather(-1, right)[..., 0] - others).amin(-1))
        lead, source = torch.cat(leads), self.program.tokens
        total = sum(len(source.symbols) ** n for n in range(1, source.length + 1))
        wrong = float((lead <= 0).double().mean())
        return Exactness(len(lead), total <= most, wrong, float(lead.min()))

    def without(
        self, edge: str | Edge, tokens: Int[Tensor, "n p"], other: Int[Tensor, "n p"] | None = None
    ) -> Float[Tensor, "n p v"]:
        """The logits when one edge carries nothing or, with `other`, what its sender says on these tokens."""
        cut = Edge.of(edge)
        said = -_said(self.model, cut.sender, tokens)
        if other is not None:
            said = said + _said(self.model, cut.sender, other)
        end = cut.receiver
        where = final_stream(self.model.config) if end.kind == "logits" else end
        heads = self.model.config.n_heads
        change = Add(said[:, :, None].expand(-1, -1, heads, -1) if end.axis else said)
        return self.model(tokens, Tap(edits=[Edit(where, change)]))

    @cached_property
    def redundant(self) -> frozenset[str]:
        """The edges whose loss changes no output of at most 1000 inputs: what they carry is there by construction only.

        Each is lost alone, as `without` does it: of two edges that do each other's work both are here.
        """
        some = [(tokens, self.model(tokens).argmax(-1)[:, 1:]) for tokens in self.inputs(1000)]
        return frozenset(
            edge
            for edge in self.edges
            if all(torch.equal(self.without(edge, each).argmax(-1)[:, 1:], answers) for each, answers in some)
        )

    @public()
    def planted(self, n: int = 16, seed: int = 0) -> Planted:
        """The model with pairs of prompts, as every method of circuit discovery takes it.

        The pairs are random inputs of the full length whose outputs at the last position differ. `edges` are those that
        carry a variable which differs between the two prompts of some pair; `hidden` are those of them whose exchange
        alone moves the logit difference of no pair by a twentieth. ValueError if no such pairs were found.
        """
        clean, corrupt = self._pairs(n, seed)
        answer, wrong = (self.expected(tokens)[:, -1] for tokens in (clean, corrupt))
        traces = [[self.program.trace(self._symbols(row)) for row in each] for each in (clean, corrupt)]
        differ = {
            name for pair in zip(*traces, strict=True) for name in pair[0] if pair[0][name] != pair[1][name]
        }
        edges = {edge for edge, names in self.carries.items() if differ.intersection(names)}

        def gap(logits: Float[Tensor, "n p v"]) -> Float[Tensor, "n"]:
            ends = logits[:, -1]
            return (ends.gather(1, answer[:, None]) - ends.gather(1, wrong[:, None]))[:, 0]

        whole = gap(self.model(clean))
        hidden = {
            edge
            for edge in edges
            if ((gap(self.without(edge, clean, corrupt)) - whole) / whole).abs().max() < 0.05
        }
        note = self.program.note or f"compiled from the program {self.program.name}"
        return Planted(
            self.program.name, self.model, frozenset(edges), clean, corrupt, answer, wrong, note, frozenset(hidden)
        )  # fmt: skip

    def _symbols(self, row: Int[Tensor, "p"]) -> list[str]:
        return [self.text.symbols[i] for i in row[1:].tolist()]

    def _pairs(self, n: int, seed: int) -> tuple[Int[Tensor, "n p"], Int[Tensor, "n p"]]:
        generator, source = generator_of(seed, n), self.program.tokens
        shape = (2, 100 * n, source.length)
        clean, corrupt = map(_begun, torch.randint(1, len(source.symbols) + 1, shape, generator=generator))
        found = (self.expected(clean)[:, -1] != self.expected(corrupt)[:, -1]).nonzero()[:n, 0]
        if len(found) < n:
            raise ValueError(
                f"{n} pairs with different outputs are required, {len(found)} of {shape[1]} random pairs of "
                f"{self.program.name} have them"
            )
        return clean[found], corrupt[found]


def _begun(rows: Int[Tensor, "n p"]) -> Int[Tensor, "n p"]:
    return torch.cat((torch.zeros_like(rows[:, :1]), rows), 1)


def _said(model: Transformer, sender: Part, tokens: Int[Tensor, "n p"]) -> Float[Tensor, "n p d"]:
    """What a node adds to the stream."""
    read = Read(sender.site)
    tap = Tap(reads=[read])
    model(tokens, tap)
    value = tap.values[read]
    if sender.kind != "head":
        return value
    assert sender.layer is not None and sender.index is not None
    return value[:, :, sender.index] @ Weights(model).layer(sender.layer).W_O[sender.index]


@public()
def compile(program: Program, *, norm: Norm = NoNorm()) -> Compiled:  # noqa: B008  # a frozen record
    """The model of a program, whose most likely token at every position is the program's output there.

    norm: what stands before each sublayer and the logits. The stream of a program without numbers has the same norm at
    every position that a program sees, so that the trained vectors of `RMSNorm()` or `LayerNorm()` undo it exactly.
    Errors: ValueError for a norm of a program with numbers (or with a default of None), and for outputs that are not
    told apart by `str`.

    Example:
        >>> from interp.zoo.programs import PROGRAMS
        >>> shift = compile(PROGRAMS["shift"]())
        >>> shift.model(shift.ids("cab")[None]).argmax(-1)[0, 1:].tolist() == shift.expected(shift.ids("cab")[None])[0].tolist()
        True
        >>> sorted(shift.edges)[0], shift.check().wrong
        ('L0.resid->L0H0.k', 0.0)
    """
    plan = Plan.of(program)
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

Where = tuple[int, int]
"""Layer and index of a head."""


@dataclass(frozen=True, eq=False)
class Plan:
    """When each variable is there, and who writes it: the stream before layer l is time 2 l, before its MLP 2 l + 1."""

    program: Program
    time: Mapping[Variable, int]
    heads: Mapping[Where, tuple[Variable, ...]]
    """The variables that each head writes: those of one selector that are ready in one layer."""

    @classmethod
    def of(cls, program: Program) -> Plan:
        """Everything as early as its inputs allow."""
        time: dict[Variable, int] = {}
        groups: dict[int, dict[tuple[Selector, type], list[Variable]]] = {}
        for each in program.variables.values():
            ready = max((time[read] for read in each.inputs), default=0)
            if isinstance(each, Aggregate | Share):
                ready += 1 + ready % 2
                groups.setdefault(ready // 2, {}).setdefault((each.selector, type(each)), []).append(each)
            elif isinstance(each, Map | SequenceMap):
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
        """As many as the last variable needs, at least one."""
        return max(1, -(-max(self.time.values()) // 2))

    @property
    def mlp(self) -> bool:
        """Whether anything is computed by neurons."""
        return any(isinstance(each, Map | SequenceMap) for each in self.time)

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
    plan: Plan, heads: Mapping[Where, Head], layers: Sequence[Neurons], d_vocab: int, norm: Norm
) -> ModelConfig:
    return ModelConfig(
        n_layers=plan.n_layers, d_model=plan.d_model, n_heads=1 + max((index for _, index in heads), default=0),
        d_head=max((head.width for head in heads.values()), default=1),
        n_ctx=plan.program.tokens.length + 1, d_vocab=d_vocab,
        mlp=MLP(max(1, *(len(each.bias) for each in layers)), act="relu") if plan.mlp else None,
        position=Learned(), norm=norm, final_norm=not isinstance(norm, NoNorm), out_bias=False, attn_scale=1.0,
        causal=plan.program.causal,
    )  # fmt: skip


def _write_ends(model: Transformer, plan: Plan, text: Alphabet, answers: Sequence[str]) -> None:
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


def _carries(model: Transformer, plan: Plan) -> dict[str, tuple[str, ...]]:
    """Edge -> the variables that it carries: those of whose dimensions any weight of the receiver is not 0."""
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
class Input:
    """What a head makes of the stream for its queries, keys or values: `x weight + bias`."""

    weight: Float[Tensor, "d e"]
    bias: Float[Tensor, "e"]

    def corrected(self, begun: Float[Tensor, "d"], wanted: Float[Tensor, "e"]) -> Input:
        """The same, but `wanted` at the beginning of sequence, where the stream is `begun`."""
        weight = self.weight.clone()
        weight[0] += (wanted - begun @ self.weight - self.bias) / begun[0]
        return Input(weight, self.bias)

    def beside(self, other: Input) -> Input:
        """Both, side by side."""
        return Input(torch.cat((self.weight, other.weight), 1), torch.cat((self.bias, other.bias)))


@dataclass(frozen=True)
class Head:
    """A head before it is written; `first` says what its queries, keys and values are at the beginning of sequence."""

    query: Input
    key: Input
    value: Input
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

    def write(self, model: Transformer, where: Where) -> None:
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


def _head(plan: Plan, where: Where) -> Head:
    """The head of some variables that are aggregates of one selector."""
    written = plan.heads[where]
    query, key, rest = _scores(plan, written[0])
    wanted = torch.zeros(len(query.bias))
    wanted[0] = rest
    first = None
    if (
        not plan.program.causal
    ):  # the beginning sees later positions too, and must not: its query is for itself
        itself = torch.eye(plan.d_model)[:, :1]
        query, key = (
            query.beside(Input(itself, torch.zeros(1))),
            key.beside(Input(0 * itself, torch.zeros(1))),
        )
        first = torch.tensor([0.0] * len(wanted) + [1.0])
        wanted = torch.cat((wanted, torch.tensor([2 * GAP])))
    moved = [_moved(plan, each) for each in written]
    value = Input(torch.cat([v.weight for v, _ in moved], 1), torch.cat([v.bias for v, _ in moved]))
    out = torch.cat([plan.place(each).mT for each in written])
    return Head(query, key, value, out, (first, wanted, torch.cat([default for _, default in moved])))


def _moved(plan: Plan, variable: Variable) -> tuple[Input, Float[Tensor, "k"]]:
    """The values of a head for one variable, and what they are at the beginning of sequence."""
    if isinstance(variable, Share):
        return Input(torch.zeros(plan.d_model, 1), torch.zeros(1)), torch.ones(1)
    assert isinstance(variable, Aggregate)
    turned = renamed(variable.values, variable.domain)
    read = _input(plan, variable.values, turned)
    return read, encoded(variable, variable.default)


def _input(plan: Plan, variable: Variable, matrix: Float[Tensor, "k e"]) -> Input:
    """A matrix applied to a variable's dimensions; those of a constant are a bias."""
    fixed = (
        encoded(variable, variable.value) if isinstance(variable, Constant) else torch.zeros(width(variable))
    )
    return Input(plan.place(variable) @ matrix, fixed @ matrix)


def _scores(plan: Plan, variable: Variable) -> tuple[Input, Input, float]:
    """Queries and keys of a selector, and the score of "nothing" that the beginning of sequence gets, in dimension 0.

    Every condition that holds adds `high`; a preference adds less than a quarter of it. So the keys that fulfil all c
    conditions have c high at least, all others (c - 3/4) high at most, and "nothing" has (c - 1/2) high; in a `Share`
    it has c high, as the selected.
    """
    assert isinstance(variable, Aggregate | Share)
    selector, d = variable.selector, plan.d_model
    ranks = [] if selector.preferred is None else sorted(selector.preferred.domain)  # type: ignore[type-var]
    high = max(4 * GAP * (len(ranks) - 1), 4 * GAP)
    plain = Input(torch.zeros(d, 1), torch.zeros(1))
    query, key, count = Input(plain.weight, torch.ones(1)), plain, 0
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
            read = _input(plan, condition.keys, high * table[:1].mT)
            key = Input(torch.cat((key.weight[:, :1] + read.weight, key.weight[:, 1:]), 1),
                        torch.cat((key.bias[:1] + read.bias, key.bias[1:])))  # fmt: skip
        elif bool((table == table[:, :1]).all()):  # the key does not
            query = query.beside(_input(plan, condition.queries, high * table[:, :1]))
            key = key.beside(Input(plain.weight, torch.ones(1)))
        else:
            wide = table.shape[0] < table.shape[1]
            kinds = torch.eye(min(table.shape))
            query = query.beside(_input(plan, condition.queries, high * (kinds if wide else table)))
            key = key.beside(_input(plan, condition.keys, table.mT if wide else kinds))
    if selector.preferred is not None:
        order = torch.tensor([[GAP * ranks.index(value)] for value in selector.preferred.domain])
        read = _input(plan, selector.preferred, order)
        key = Input(torch.cat((key.weight[:, :1] + read.weight, key.weight[:, 1:]), 1), key.bias)
    return query, key, high * (count if isinstance(variable, Share) else count - 0.5)


# --- neurons ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Neurons:
    """Neurons of one layer before they are written: `relu(x into + bias) out`, and what is added besides."""

    into: Float[Tensor, "d m"]
    bias: Float[Tensor, "m"]
    out: Float[Tensor, "m d"]
    offset: Float[Tensor, "d"]

    def write(self, model: Transformer, layer: int) -> None:
        """Put them into the model."""
        plant_neurons(model, layer, into=self.into, bias=self.bias, out=self.out, offset=self.offset)


def _neurons(plan: Plan, layer: int) -> Neurons:
    """The maps of one layer, side by side."""
    d = plan.d_model
    found = [Neurons(torch.zeros(d, 0), torch.zeros(0), torch.zeros(0, d), torch.zeros(d))]
    for each in plan.slices:
        if plan.time[each] == 2 * layer + 2 and isinstance(each, Map):
            found.append((_steps if each.of.numeric else _table)(plan, each))
        elif plan.time[each] == 2 * layer + 2 and isinstance(each, SequenceMap):
            found.append(_pairs(plan, each))
    return Neurons(
        torch.cat([n.into for n in found], 1),
        torch.cat([n.bias for n in found]),
        torch.cat([n.out for n in found]),
        torch.stack([n.offset for n in found]).sum(0),
    )


def _images(plan: Plan, variable: Variable, values: Sequence[Value]) -> Float[Tensor, "m d"]:
    """Values of a variable as they are written to the stream."""
    return torch.stack([encoded(variable, value) for value in values]) @ plan.place(variable).mT


def _table(plan: Plan, variable: Map) -> Neurons:
    """One neuron per image: `relu(2 x - 1)`, x the sum over the values that it is the image of."""
    images = [variable(value) for value in variable.of.domain]
    into = torch.tensor([[float(image == each) for each in variable.domain] for image in images])
    out = _images(plan, variable, variable.domain)
    return Neurons(2 * plan.place(variable.of) @ into, -torch.ones(len(out)), out, 0 * out.sum(0))


def _pairs(plan: Plan, variable: SequenceMap) -> Neurons:
    """One neuron per pair of values: `relu(2 a + 2 b - 3)`."""
    first, second = variable.first, variable.second
    count = width(first), width(second)
    a, b = torch.cartesian_prod(*map(torch.arange, count)).mT
    into = plan.place(first)[:, a] + plan.place(second)[:, b]
    images = [variable(x, y) for x, y in product(first.domain, second.domain)]
    out = _images(plan, variable, images)
    return Neurons(2 * into, -3 * torch.ones(len(out)), out, 0 * out.sum(0))


def _steps(plan: Plan, variable: Map) -> Neurons:
    """Two neurons per step between neighbouring numbers, which rise from 0 to 1 in the middle half of the gap.

    `relu(y + 1/2) - relu(y - 1/2)`, y = 2 (x - middle) / gap; the image of the smallest number is the offset.
    """
    numbers = [float(value) for value in variable.of.domain]  # type: ignore[arg-type]
    images = _images(plan, variable, [variable(value) for value in variable.of.domain])
    low, high = (torch.tensor(each, dtype=torch.float64) for each in (numbers[:-1], numbers[1:]))
    slope = (2 / (high - low)).float()
    centre = ((low + high) / (high - low)).float()
    into = (plan.place(variable.of) * slope).repeat(1, 2)
    bias = torch.cat((0.5 - centre, -0.5 - centre))
    out = torch.cat((images[1:] - images[:-1], images[:-1] - images[1:]))
    return Neurons(into, bias, out, images[0])


# --- norms that are undone --------------------------------------------------------------------------------------------


def _check_norm(norm: Norm, plan: Plan) -> None:
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


def _set_norm(norm: Normalize, plan: Plan, time: int) -> None:
    """The trained vectors that undo a norm of a stream with one 1 per variable."""
    if isinstance(norm.kind, NoNorm):
        return
    mean = plan.kinds(time) / plan.d_model
    centred = isinstance(norm.kind, LayerNorm)
    assert norm.weight is not None
    norm.weight.fill_(math.sqrt(mean - centred * mean**2 + norm.kind.eps))
    if norm.bias is not None:
        norm.bias.fill_(mean)
