"""The largest entries of heads' full circuits, as pairs of tokens: source -> output, query -> key, and skip-trigrams.

Row convention: the full OV circuit is E W_V W_O U `[source, output]`, the full QK circuit E W_Q W_K^T E^T `[query,
key]`. Entries are computed in tiles; neither matrix is formed as a whole. Elhage et al. 2021, "A Mathematical Framework
for Transformer Circuits"; Dar et al. 2022 (entries of both circuits).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.factored import FactoredMatrix
from interp.core.kinds import listed
from interp.core.results import labelled
from interp.core.transfers import to_host
from interp.data.batch import Answers
from interp.data.text import Text
from interp.model.parts import Part, PartName, as_parts
from interp.passes.observe import Subject
from interp.passes.question import Question, WithoutData
from interp.runs.functions import of_weights
from interp.weights.head_circuits import Embedding, HeadCircuits
from interp.weights.typical_scales import ABOUT, typical_factors, units

if TYPE_CHECKING:
    import xarray as xr

CircuitKind = Literal["OV", "QK"]
SIDES: Mapping[str, tuple[str, str]] = {"OV": ("source", "output"), "QK": ("query", "key")}
"""Names of the rows and the columns of a full circuit."""


@dataclass(frozen=True)
class TopPairs(Question):
    """The largest (or smallest) entries of heads' full circuits: source -> output (OV) or query -> key (QK).

    Args:
        head: the head by name, `"L1H2"`, or several: the embedding of the vocabulary is then made once.
        kind: which circuit: "OV", what a source token makes likely, or "QK", which key a query token attends to.
        top: how many pairs are listed; None: 20.
        largest: whether the largest entries are listed; False: the smallest.
        folded: whether norms are part of the circuits, as in `HeadCircuits`.
        scaled: whether QK carries the factor between q . k and the attention score.
        embedding: what a vocabulary entry puts on the stream: "token" or "effective", as in `HeadCircuits`.

    Returns:
        Dataset[part, rank]; rank 0 is the most extreme. All norms have the scale 1, so that entries of a real model are
        hundreds; the coordinate `factor` [part] is what an entry is multiplied by in a typical pass.

        - `value`: the entry minus the mean of its row, since a softmax over the columns does not see a constant. In
          logits (OV) or attention scores (QK), before the norms.
        - `source`, `output` (OV) or `query`, `key` (QK), coordinates: the tokens' text, with their ids as `source_id`
          and so on.

    Raises:
        IndexError: a head that does not exist.
        ValueError: another kind or more than V^2 entries.
        ValueError, AttributeError: a model in which no circuit ends in the logits.

    Caveat:
        QK entries of different queries have no common scale.

    Source:
        Dar et al. 2022, who read the uncentred forms.

    See Also:
        `head_tokens`: entries of given tokens, for all heads. `skip_trigrams`: both circuits combined.

    Example:
        >>> list(interp.frame(top_pairs(model, "L1H0", top=3)).columns)[4:]
        ['rank', 'factor', 'source', 'source_id', 'output', 'output_id', 'value']
    """

    head: PartName | Sequence[PartName]
    kind: CircuitKind = "OV"
    _: KW_ONLY
    top: int | None = None
    largest: bool = True
    folded: bool = True
    scaled: bool = True
    embedding: Embedding = "effective"
    of_weights: ClassVar[bool] = True

    def bind(self, model: Subject) -> WithoutData:
        """Products by tiles, and one pass over a few random tokens for the scales of norms."""
        circuits = HeadCircuits(model, self.folded, scaled=self.scaled, embedding=self.embedding)
        heads, most = _heads(self.head, circuits), circuits.config.d_vocab
        most *= circuits.config.n_outputs if self.kind == "OV" else most
        if self.kind not in SIDES:
            raise ValueError(f"kind must be OV or QK, got {self.kind!r}")
        question = replace(self, top=listed(self.top, 20, most, " pairs of tokens"))
        return WithoutData(self.name, partial(_top_pairs, circuits, model.text, heads, question))


@dataclass(frozen=True)
class SkipTrigrams(Question):
    """Skip-trigrams of heads, "source ... destination -> output", from their QK and OV circuits.

    Which destination attends to a source is read off QK, what the source then makes likely off OV: the (destination,
    source) pairs with the largest QK entries, and for each its source's largest OV entries, in that order. Every pair
    of a source is combined with all its outputs: the form cannot do otherwise (the "bugs" of the paper).

    Args:
        head: the head by name, `"L1H2"`, or several: the embedding of the vocabulary is then made once.
        sources: source tokens whose destinations are listed, single tokens as text or ids; None: those of the largest
            QK entries.
        top: how many (destination, source) pairs are listed, with `sources` how many destinations of each; None: 10.
        outputs: how many outputs of each source are listed.
        folded: whether norms are part of the circuits, as in `HeadCircuits`.
        scaled: whether QK carries the factor between q . k and the attention score.
        embedding: what a vocabulary entry puts on the stream: "token" or "effective", as in `HeadCircuits`.

    Returns:
        Dataset[part, pair, rank]; the coordinate `ov_factor` [part] is what OV entries are multiplied by in a typical
        pass, as in `top_pairs`.

        - `qk` [part, pair], `ov` [part, pair, rank]: entries of both circuits, each minus the mean of its row.
        - `source`, `destination` [part, pair], `output` [part, pair, rank], coordinates: the tokens' text, with their
          ids as `source_id` and so on.

    Raises:
        IndexError, AttributeError: as `top_pairs`.
        ValueError: as `top_pairs`; sources that are not single tokens, or more entries than the vocabulary has.

    Caveat:
        QK entries of different queries have no common scale.

    Source:
        Elhage et al. 2021, "Interpretation as Skip-Trigrams".

    See Also:
        `top_pairs`: the largest entries of one circuit.

    Example:
        >>> result = skip_trigrams(model, "L0H1", top=4, outputs=2)
        >>> len(interp.frame(result))
        8
    """

    head: PartName | Sequence[PartName]
    _: KW_ONLY
    sources: Answers | None = None
    top: int | None = None
    outputs: int = 5
    folded: bool = True
    scaled: bool = True
    embedding: Embedding = "effective"
    of_weights: ClassVar[bool] = True

    def bind(self, model: Subject) -> WithoutData:
        """Products by tiles, and one pass over a few random tokens for the scales of norms."""
        circuits = HeadCircuits(model, self.folded, scaled=self.scaled, embedding=self.embedding)
        heads, v = _heads(self.head, circuits), circuits.config.d_vocab
        if isinstance(self.sources, list | tuple) and not self.sources:
            raise ValueError("at least one source is required, got none")
        sources = None if self.sources is None else model.text.tokens(self.sources)
        question = replace(self, top=listed(self.top, 10, v if sources is not None else v * v))
        if not 1 <= self.outputs <= circuits.config.n_outputs:
            raise ValueError(f"outputs must be in [1, {circuits.config.n_outputs}], got {self.outputs}")
        return WithoutData(self.name, partial(_skip_trigrams, circuits, model.text, heads, sources, question))


top_pairs = of_weights(
    TopPairs, renamed={"circuits": "folded, scaled and embedding", "layer": "head, such as 'L3H5'"}
)


skip_trigrams = of_weights(
    SkipTrigrams, renamed={"circuits": "folded, scaled and embedding", "layer": "head, such as 'L3H5'"}
)


def _heads(names: PartName | Sequence[PartName], circuits: HeadCircuits) -> list[Part]:
    """The heads of these names. ValueError for none or a part that is no head, IndexError for one the model lacks."""
    return as_parts(names, circuits.config, ("head", "cross_head"), "a head, such as L1H2,")


@torch.no_grad()
def _top_pairs(circuits: HeadCircuits, text: Text, heads: Sequence[Part], question: TopPairs) -> xr.Dataset:
    assert question.top is not None
    ends = text.of_outputs if question.kind == "OV" else text
    entries = [
        _centred_circuit(circuits, question.kind, head).top_entries(question.top, largest=question.largest)
        for head in heads
    ]
    value, rows, columns = _stacked(entries)
    row, column = SIDES[question.kind]
    dims, unit = ("part", "rank"), units(circuits.config)[question.kind]
    return labelled(
        question.name,
        {"value": (dims, value)},
        coords={
            "part": list(map(str, heads)), "rank": range(question.top),
            "factor": _factors(circuits, heads, question.kind),
            **worded(text, row, rows, dims), **worded(ends, column, columns, dims),
        },
        units=unit,
        attrs={"kind": question.kind, "unit": unit, "factor": ABOUT, **_conventions(circuits)},
    )  # fmt: skip


@torch.no_grad()
def _skip_trigrams(
    circuits: HeadCircuits,
    text: Text,
    heads: Sequence[Part],
    sources: Int[Tensor, "n"] | None,
    question: SkipTrigrams,
) -> xr.Dataset:
    trigrams = [_head_trigrams(circuits, head, sources, question) for head in heads]
    qk, destination, source, ov, output = _stacked(trigrams)
    pairs = ("part", "pair")
    cells = (*pairs, "rank")
    return labelled(
        question.name,
        {"ov": (cells, ov), "qk": (pairs, qk)},
        coords={
            "part": list(map(str, heads)), "pair": range(qk.shape[1]), "rank": range(question.outputs),
            "ov_factor": _factors(circuits, heads, "OV"),
            **worded(text, "source", source, pairs), **worded(text, "destination", destination, pairs),
            **worded(text.of_outputs, "output", output, cells),
        },
        units={kind.lower(): unit for kind, unit in units(circuits.config).items()},
        attrs={"factor": ABOUT, **_conventions(circuits)},
    )  # fmt: skip


def _head_trigrams(
    circuits: HeadCircuits, head: Part, sources: Int[Tensor, "given"] | None, question: SkipTrigrams
) -> tuple[Float[Tensor, "n"], Int[Tensor, "n"], Int[Tensor, "n"], Float[Tensor, "n o"], Int[Tensor, "n o"]]:
    """For one head: QK entry, destination and source of each pair, then OV entries and outputs of the pair's source."""
    assert question.top is not None
    qk, ov = (_centred_circuit(circuits, kind, head) for kind in ("QK", "OV"))
    if sources is None:
        scores, destination, source = qk.top_entries(question.top)
    else:
        source_ids = sources.to(qk.A.device)
        entries, columns = qk.columns(source_ids).T.row_top(question.top)
        scores, destination, source = (
            entries.flatten(),
            columns.flatten(),
            source_ids.repeat_interleave(question.top),
        )
    rises, output = FactoredMatrix(ov.A[source], ov.B).row_top(question.outputs)
    return scores, destination, source, rises, output


def _stacked(by_head: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """What each head has, stacked over heads; all on the host, in one copy."""
    return list(to_host({i: torch.stack(each) for i, each in enumerate(zip(*by_head, strict=True))}).values())


def _centred_circuit(circuits: HeadCircuits, kind: str, head: Part) -> FactoredMatrix:
    """The head's full OV or QK circuit, minus the mean of each row."""
    full = circuits.full_ov(head) if kind == "OV" else circuits.full_qk(head)
    return FactoredMatrix(full.A, full.B - full.B.mean(-1, keepdim=True))


def _factors(circuits: HeadCircuits, heads: Sequence[Part], kind: str) -> tuple[str, Tensor]:
    """Coordinate over `part`: the factors of a typical pass on the circuit entries of these heads."""
    factors = typical_factors(circuits)
    by_layer = factors.moved if kind == "OV" else factors.sought
    return "part", by_layer[[head.layer or 0 for head in heads]]


def _conventions(circuits: HeadCircuits) -> dict[str, str | int]:
    return {"folded": int(circuits.folded), "scaled": int(circuits.scaled), "embedding": circuits.embedding}


def worded(text: Text, name: str, ids: Int[Tensor, "*n"], dims: Sequence[str]) -> dict[str, object]:
    """Two coordinates: the tokens' text under this name, their ids under `<name>_id`."""
    numbers = ids.cpu().numpy()
    return {name: (tuple(dims), text.words(numbers)), f"{name}_id": (tuple(dims), numbers)}
