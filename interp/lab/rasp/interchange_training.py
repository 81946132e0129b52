"""Trained equivalents of compiled models: equal variables at equal parts, learned instead of written.

Interchange intervention training (Geiger et al. 2022, arXiv:2112.00826), strict as in InterpBench (Gupta et al. 2024,
arXiv:2407.14494). What a head or an MLP says in another run is put in its place; the model must then answer as the
program does with the variables of that part taken from the other run. The parts of no variable are exchanged too, and
nothing may change. So the program's parts and edges are the circuit of a model whose weights descent has found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import trange

from interp.core.boundary import public
from interp.core.kinds import Count
from interp.core.results import labelled
from interp.core.stats import share_interval
from interp.lab.rasp.compiled import Compiled, begun
from interp.model.config import MLP, LayerNorm, ModelConfig
from interp.model.edits import Edit, Set
from interp.model.parts import Part
from interp.model.tap import Read, Tap
from interp.model.transformer import Transformer
from interp.runs.provenance import with_origin
from interp.zoo.planted import generator_of

if TYPE_CHECKING:
    import xarray as xr

BESIDE = 2
"""Number of parts without a variable that an update exchanges, in addition to all parts with some."""


@public()
@dataclass(frozen=True)
class InterchangeTraining:
    """The size of a trained equivalent, and how it is trained."""

    d_model: int = 64
    """Width of its stream."""
    d_head: int = 16
    """Width of its heads."""
    d_mlp: int = 128
    """Neurons of a layer. There are MLPs in every layer, also where the program needs none."""
    heads: int = 1
    """Number of heads in every layer beyond those that the program needs."""
    steps: int = 2000
    """Number of updates, by AdamW with a cosine from the learning rate to 0."""
    rows: int = 64
    """Pairs of sequences of an update; each part is exchanged in all of them."""
    pairs: int = 1024
    """Number of pairs of each length, from which updates draw."""
    learning_rate: float = 2e-3
    """Learning rate at its highest."""
    seed: int = 0
    """Seed of weights and pairs."""

    def __post_init__(self) -> None:
        for name in ("d_model", "d_head", "d_mlp", "steps", "rows", "pairs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} >= 1 is required, got {getattr(self, name)}")
        if self.heads < 0 or not 0 < self.learning_rate < 1:
            raise ValueError(
                "heads >= 0 and a learning_rate between 0 and 1 are required, got "
                f"{self.heads} and {self.learning_rate}"
            )


@public()
@torch.enable_grad()
def interchange_trained(compiled: Compiled, training: InterchangeTraining | None = None) -> Compiled:
    """A model trained to compute the program by the same parts, with the circuit of the compiled one.

    It has LayerNorm, softmax attention of the usual scale and MLPs, and at least the compiled model's layers and
    heads. `check()` of it says how often it answers as the program does, `interchange_accuracy` how far each part is
    the variables that it stands for. The global random state is left as it is.

    Args:
        compiled: the compiled program.
        training: the model's size and the training's length; None: the defaults of `InterchangeTraining`.

    Returns:
        `Compiled` with the trained model. Its variables have no known directions: `directions` and `subspaces` are
        empty.

    Source:
        Geiger et al. 2022, section 3, with all parts exchanged; Gupta et al. 2024, section 4.

    Example:
        >>> from interp.lab.rasp import PROGRAMS, compile
        >>> shift = interchange_trained(compile(PROGRAMS["shift"]("ab", 3)), InterchangeTraining(steps=2, pairs=8))
        >>> sorted(shift.edges) == sorted(compile(PROGRAMS["shift"]("ab", 3)).edges)
        True
    """
    training = training or InterchangeTraining()
    model = _untrained(compiled, training)
    found = replace(compiled, model=model, directions=MappingProxyType({}))
    generator = generator_of(training.seed, 1)
    pools = [
        _Pairs.drawn(found, training.pairs, n + 1, generator) for n in range(compiled.program.tokens.length)
    ]
    usual = torch.arange(1, len(pools) + 1, dtype=torch.float)  # long sequences are harder
    adam = torch.optim.AdamW(model.parameters(), training.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    plan = torch.optim.lr_scheduler.OneCycleLR(adam, training.learning_rate, training.steps, pct_start=0.05)
    for _ in trange(training.steps, desc=f"training {compiled.program.name}", delay=1, leave=False):
        pairs = pools[int(usual.multinomial(1, generator=generator))].some(training.rows, generator)
        adam.zero_grad()
        _loss(found, pairs, generator).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        plan.step()
    model.requires_grad_(False).eval()
    return found


@public()
def interchange_accuracy(compiled: Compiled, n: Count = 256, seed: int = 0) -> xr.Dataset:
    """How often exchanging a part's output for that of another run changes the answers as the program says.

    Args:
        compiled: the program and its model.
        n: pairs of random sequences.
        seed: seed of the sequences.

    Returns:
        Dataset[part] over all heads and MLPs. The coordinate `computes` names the variables of a part; parts without
        any should change nothing.

        - `value`: share of pairs of random sequences of the full length whose answers, at every position, are those
          of the program with the part's variables taken from the other sequence, with `low` and `high` (95 %).
        - `null`: share in which the answers without any exchange are these.
        - `n`: number of pairs; pairs for which the program has no answer are left out.

    Raises:
        ValueError: fewer than one pair.

    Example:
        >>> from interp.lab.rasp import PROGRAMS, compile
        >>> float(interchange_accuracy(compile(PROGRAMS["reverse"]()), 32).value.min())
        1.0
    """
    pairs = _Pairs.drawn(compiled, n, compiled.program.tokens.length, generator_of(seed, n))
    parts = [*pairs.wanted, *_others(compiled)]
    wanted = torch.stack([pairs.wanted.get(part, pairs.answers) for part in parts])
    valid = wanted[:, :, 0] >= 0
    with torch.no_grad():
        plain, swapped = _answers(compiled.model, pairs, parts)
    hits = (swapped[:, :, 1:].argmax(-1) == wanted).all(-1) & valid
    still = (plain[None, :, 1:].argmax(-1) == wanted).all(-1) & valid
    count = valid.sum(1)
    share = hits.sum(1).double() / count
    low, high = share_interval(share, count)
    result = labelled(
        "interchange_accuracy",
        {
            "value": (("part",), share), "low": (("part",), low), "high": (("part",), high),
            "null": (("part",), still.sum(1).double() / count), "n": (("part",), count),
        },
        coords={"part": parts, "computes": (("part",), [", ".join(_of(compiled, part)) for part in parts])},
        attrs={"program": compiled.program.name},
    )  # fmt: skip
    return with_origin(result, compiled.model)


def _untrained(compiled: Compiled, training: InterchangeTraining) -> Transformer:
    old = compiled.model.config
    heads = old.n_heads + training.heads
    config: ModelConfig = replace(
        old, d_model=training.d_model, d_head=training.d_head, n_heads=heads, n_kv_heads=heads, attn_scale=None,
        norm=LayerNorm(), final_norm=True, mlp=MLP(training.d_mlp, act="gelu_new"), qkv_bias=True, out_bias=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        return Transformer(config)


def _of(compiled: Compiled, part: str) -> tuple[str, ...]:
    """The variables that a part writes."""
    return tuple(name for name, writer in compiled.writers.items() if writer == part)


def _others(compiled: Compiled) -> list[str]:
    """Heads and MLPs that write no variable."""
    config = compiled.model.config
    heads = [f"L{layer}H{head}" for layer in range(config.n_layers) for head in range(config.n_heads)]
    mlps = [f"L{layer}.mlp" for layer in range(config.n_layers) if config.mlp is not None]
    return [part for part in (*heads, *mlps) if part not in compiled.writers.values()]


@dataclass(frozen=True)
class _Pairs:
    """Pairs of sequences, with the program's answers to the first, and with each part's variables exchanged."""

    base: Int[Tensor, "n p"]
    source: Int[Tensor, "n p"]
    answers: Int[Tensor, "n a"]
    wanted: Mapping[str, Int[Tensor, "n a"]]
    """Right answers by part; -1 where the program has no answer to such a mixture."""

    @classmethod
    def drawn(cls, compiled: Compiled, n: int, length: int, generator: torch.Generator) -> _Pairs:
        """Random pairs of this length."""
        symbols = len(compiled.program.tokens.symbols)
        drawn = torch.randint(1, symbols + 1, (2, n, length), generator=generator)
        base, source = map(begun, drawn)
        parts = dict.fromkeys(w for w in compiled.writers.values() if Part.of(w).kind in ("head", "mlp"))
        traces = [compiled.program.trace(compiled.symbols(row)) for row in source]
        wanted = {
            part: torch.stack(
                [
                    _mixture(compiled, row, {name: trace[name] for name in _of(compiled, part)})
                    for row, trace in zip(base, traces, strict=True)
                ]
            )
            for part in parts
        }
        return cls(base, source, compiled.expected(base), wanted)

    def some(self, n: int, generator: torch.Generator) -> _Pairs:
        """So many of them, drawn with replacement."""
        rows = torch.randint(len(self.base), (n,), generator=generator)
        wanted = {part: answers[rows] for part, answers in self.wanted.items()}
        return _Pairs(self.base[rows], self.source[rows], self.answers[rows], wanted)


def _mixture(
    compiled: Compiled, row: Int[Tensor, "p"], given: Mapping[str, Sequence[object]]
) -> Int[Tensor, "a"]:
    """The program's answers with some variables given; -1 where it has none (votes without a winner)."""
    try:
        said = compiled.evaluate(compiled.symbols(row), given)
    except ValueError:
        return torch.full((len(row) - 1,), -1)
    return torch.tensor([compiled.text.symbols.index(str(value)) for value in said])


def _answers(
    model: Transformer, pairs: _Pairs, parts: Sequence[str]
) -> tuple[Float[Tensor, "n p v"], Float[Tensor, "k n p v"]]:
    """The logits of the first sequences, and those with each part exchanged for what it says in the second ones."""
    n = len(pairs.base)
    reads = {part: Read(Part.of(part).site) for part in parts}
    tap = Tap(reads=list(dict.fromkeys(reads.values())))
    plain = model(torch.cat((pairs.base, pairs.source)), tap)[:n]
    edits = list(_edits(reads, tap.values, n))
    return plain, model(pairs.base.repeat(len(parts), 1), Tap(edits=edits)).unflatten(0, (len(parts), n))


def _edits(reads: Mapping[str, Read], values: Mapping[Read, Tensor], n: int) -> Iterator[Edit]:
    for group, (part, read) in enumerate(reads.items()):
        said, index = values[read][n:], Part.of(part).index
        rows = tuple(range(group * n, (group + 1) * n))
        yield Edit(part, Set(said if index is None else said[:, :, index]), rows=rows)


def _loss(compiled: Compiled, pairs: _Pairs, generator: torch.Generator) -> Float[Tensor, ""]:
    """Cross-entropy of the answers: without an exchange, with the circuit's parts exchanged, and with a few others."""
    others = _others(compiled)
    few = [others[i] for i in torch.randperm(len(others), generator=generator)[:BESIDE].tolist()]
    parts = [*pairs.wanted, *few]
    plain, swapped = _answers(compiled.model, pairs, parts)
    wanted = torch.stack([pairs.wanted.get(part, pairs.answers) for part in parts])
    groups = [(plain, pairs.answers), *zip(swapped, wanted, strict=True)]
    losses = [
        F.cross_entropy(logits[:, 1:].flatten(0, 1), answers.flatten(), ignore_index=-1)
        for logits, answers in groups
    ]
    return torch.stack(losses).nansum() / len(losses)  # NaN where no pair of a part has an answer
