"""Compiled programs: a model, the program that it computes, and where in the model everything is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from types import MappingProxyType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import PositiveCount
from interp.core.memory import check_memory
from interp.lab.rasp.language import Program, Track
from interp.model.edits import Add, Edit
from interp.model.parts import Edge, Part
from interp.model.sites import final_stream
from interp.model.tap import Read, Tap
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.zoo.groundtruth import SYMBOLS, Alphabet
from interp.zoo.planted import Planted, generator_of

START = SYMBOLS[0]
"""The symbol that begins every sequence, and the name of its dimension."""


@dataclass(frozen=True)
class Exactness:
    """Accuracy of a model on the inputs of its program."""

    inputs: int
    """Number of inputs tried."""
    exhaustive: bool
    """Whether all inputs were tried."""
    wrong: float
    """Share of inputs for which the program's output is not the most likely at every position; a tie is wrong."""
    margin: float
    """The smallest lead, in logits, of the program's output over any other; negative where one is wrong."""


@dataclass(frozen=True, eq=False, repr=False)
class Compiled:
    """A program and the model that computes it, with every edge and every variable's place known by construction.

    Nodes and edges are named as in `EdgeGraph`. Tokens are ids of `text`; every sequence begins with 0, and the logits
    at each later position are those of the program's output there.
    """

    program: Program
    model: Transformer
    text: Alphabet
    """Symbols and ids: the beginning of sequence, the program's tokens, and its other answers."""
    carries: Mapping[str, tuple[str, ...]]
    """Edge -> the variables that the receiver reads of what the sender writes; `<|bos|>` marks the first position."""
    writers: Mapping[str, str]
    """Variable -> the node that writes it."""
    directions: Mapping[str, Float[Tensor, "k d"]]
    """Variable -> one row per value of its domain, or one for a number."""

    def __repr__(self) -> str:
        config = self.model.config
        sizes = f"n_layers={config.n_layers}, n_heads={config.n_heads}, d_model={config.d_model}"
        return f"Compiled({self.program.name}: {sizes}, {len(self.edges)} edges)"

    @property
    def edges(self) -> frozenset[str]:
        """Every edge by which the receiver reads what the sender writes."""
        return frozenset(self.carries)

    @property
    def stream(self) -> tuple[str, ...]:
        """The sites of the stream, each once, in order."""
        config = self.model.config
        middle = ["resid_mid"] if config.mlp is not None else []
        inside = [f"L{layer}.{site}" for layer in range(config.n_layers) for site in ("resid", *middle)]
        return (*inside, f"L{config.n_layers - 1}.resid_post")

    @property
    def subspaces(self) -> Mapping[str, Mapping[str, Float[Tensor, "k d"]]]:
        """Directions of each variable by site of the stream: variable -> site -> directions."""
        found = {}
        for name in self.directions:
            part = Part.of(self.writers[name])
            before = self.stream.index(f"L{part.layer}.resid")
            first = before + {"resid": 0, "head": 1, "mlp": 2}[part.kind]
            found[name] = MappingProxyType(dict.fromkeys(self.stream[first:], self.directions[name]))
        return MappingProxyType(found)

    @public()
    def evaluate(self, tokens: str | Sequence[str], given: Mapping[str, Track] | None = None) -> Track:
        """The output of the program, not of the model, at every position.

        Args:
            tokens: the input.
            given: variables that are set to these values instead, as in `Program.trace`.
        """
        return self.program.evaluate(tokens, given)

    @public()
    def ids(self, tokens: str | Sequence[str]) -> Int[Tensor, "p"]:
        """A sequence as the model takes it, the beginning first; errors as in `Program.trace`."""
        self.program.check_tokens(tokens)
        return torch.tensor([0, *map(self.text.symbols.index, tokens)])

    @public()
    def expected(self, tokens: Int[Tensor, "n p"]) -> Int[Tensor, "n a"]:
        """Ids of the program's answers, at every position but the first."""
        answers = [self.evaluate(self.symbols(row)) for row in tokens]
        return torch.tensor([[self.text.symbols.index(str(value)) for value in row] for row in answers])

    @public()
    def inputs(self, most: int = 10_000, seed: int = 0) -> list[Int[Tensor, "n p"]]:
        """Every input of the program, as ids, by length; if there are more than `most`, so many random ones.

        Args:
            most: the most inputs.
            seed: seed of the random ones.

        Returns:
            A list of [n, p], one for each length.
        """
        source = self.program.tokens
        count, lengths = len(source.symbols), range(1, source.length + 1)
        total = sum(count**length for length in lengths)
        if total <= most:
            return [begun(torch.tensor(list(product(range(1, count + 1), repeat=n)))) for n in lengths]
        generator = generator_of(seed, most)
        drawn = [max(1, round(most * count**n / total)) for n in lengths]
        return [
            begun(torch.randint(1, count + 1, (rows, n), generator=generator))
            for rows, n in zip(drawn, lengths, strict=True)
        ]

    @public()
    def check(self, most: int = 10_000, seed: int = 0) -> Exactness:
        """How often and how clearly the model answers as the program does, on its `inputs`.

        Args:
            most: the most inputs.
            seed: seed of the inputs, where there are more.

        Returns:
            `Exactness`.
        """
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

    @public()
    def without(
        self, edge: str | Edge, tokens: Int[Tensor, "n p"], other: Int[Tensor, "n p"] | None = None
    ) -> Float[Tensor, "n p v"]:
        """The logits when one edge carries nothing or, with `other`, what its sender says on these tokens.

        Raises:
            KeyError, IndexError: parts that the model lacks.
            ValueError: an edge that leads backwards.
        """
        cut = Edge.of(edge)
        sender, receiver = (
            _time(part.within(self.model.config), self.model) for part in (cut.sender, cut.receiver)
        )
        if not 0 <= sender <= receiver:
            raise ValueError(f"an edge that leads forwards is required, such as L0H1->L1H2.k, got {cut}")
        said = -_written_by(self.model, cut.sender, tokens)
        if other is not None:
            try:
                said = said + _written_by(self.model, cut.sender, other)
            except ValueError as cause:
                raise ValueError(f"other: {cause}") from cause
        end = cut.receiver
        where = final_stream(self.model.config) if end.kind == "logits" else end
        heads = self.model.config.n_heads
        change = Add(said[:, :, None].expand(-1, -1, heads, -1) if end.axis else said)
        return self.model(tokens, Tap(edits=[Edit(where, change)]))

    @cached_property
    def redundant(self) -> frozenset[str]:
        """The edges that can be lost without changing an output of at most 1000 inputs.

        What they carry is there by construction only.

        Each is lost alone, as `without` does it: of two edges that do each other's work both are here.
        """
        some = [(tokens, self.model(tokens).argmax(-1)[:, 1:]) for tokens in self.inputs(1000)]
        return frozenset(
            edge
            for edge in self.edges
            if all(torch.equal(self.without(edge, each).argmax(-1)[:, 1:], answers) for each, answers in some)
        )

    @public()
    def planted(self, n: PositiveCount = 16, seed: int = 0) -> Planted:
        """The model with pairs of prompts, as every method of circuit discovery takes it.

        The pairs are random inputs of the full length whose outputs at the last position differ. `edges` are those that
        carry a variable which differs between the two prompts of some pair; `hidden` are those of them whose exchange
        alone moves the logit difference of no pair by a twentieth. ValueError if no such pairs were found.
        """
        clean, corrupt = self._pairs(n, seed)
        answer, wrong = (self.expected(tokens)[:, -1] for tokens in (clean, corrupt))
        traces = [[self.program.trace(self.symbols(row)) for row in each] for each in (clean, corrupt)]
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

    @public()
    def symbols(self, row: Int[Tensor, "p"]) -> list[str]:
        """The tokens of a sequence of ids, without its beginning. ValueError for tokens beyond the vocabulary."""
        count = len(self.text.symbols)
        if len(row) and not 0 <= int(row.min()) <= int(row.max()) < count:
            raise ValueError(f"row must be ids of the {count} symbols, got {row.tolist()}")
        return [self.text.symbols[i] for i in row[1:].tolist()]

    def _pairs(self, n: int, seed: int) -> tuple[Int[Tensor, "n p"], Int[Tensor, "n p"]]:
        generator, source = generator_of(seed, n), self.program.tokens
        shape = (2, 100 * n, source.length)
        check_memory(
            f"{n} pairs (n), found among {2 * shape[1]} inputs",
            40 * math.prod(shape),
            torch.device("cpu"),
            "fewer take less",
        )
        clean, corrupt = map(begun, torch.randint(1, len(source.symbols) + 1, shape, generator=generator))
        found = (self.expected(clean)[:, -1] != self.expected(corrupt)[:, -1]).nonzero()[:n, 0]
        if len(found) < n:
            raise ValueError(
                f"{n} pairs with different outputs are required, {len(found)} of {shape[1]} random pairs of "
                f"{self.program.name} have them"
            )
        return clean[found], corrupt[found]


def begun(rows: Int[Tensor, "n a"]) -> Int[Tensor, "n p"]:
    """Sequences with their beginning, id 0."""
    return torch.cat((torch.zeros_like(rows[:, :1]), rows), 1)


def _time(part: Part, model: Transformer) -> int:
    """The time at which a node writes or an input reads.

    Layer l reads the stream at 2 l, its MLP at 2 l + 1; -1 for other parts.
    """
    if part.kind == "logits":
        return 2 * model.config.n_layers
    late = {"resid": 0, "query": 0, "key": 0, "value": 0, "head": 1, "mlp_input": 1, "mlp": 2}.get(part.kind)
    return -1 if late is None or part.layer is None else 2 * part.layer + late


def _written_by(model: Transformer, sender: Part, tokens: Int[Tensor, "n p"]) -> Float[Tensor, "n p d"]:
    """The term that a node adds to the stream."""
    read = Read(sender.site)
    tap = Tap(reads=[read])
    model(tokens, tap)
    value = tap.values[read]
    if sender.kind != "head":
        return value
    assert sender.layer is not None and sender.index is not None
    return value[:, :, sender.index] @ Weights(model).layer(sender.layer).W_O[sender.index]
