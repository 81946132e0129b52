"""Attention scores in files of attribution graphs: `qk_tracing_results`, as llamascopium and Neuronpedia have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from interp.core.boundary import public
from interp.core.kinds import Finite
from interp.core.wording import value_text
from interp.runs.folder import built

KEYS = {
    "pairs": "pair_wise_contributors",
    "queries": "top_q_marginal_contributors",
    "keys": "top_k_marginal_contributors",
}
"""Key of the file for each field."""


@public()
@dataclass(frozen=True)
class QKTracing:
    """One attention score as a sum over pairs of nodes, as a file of an attribution graph has it.

    Files by `AttributionGraph.of_result(graph, qk=...)` have all terms that are not 0, so that each list sums to the
    content of the score; those of other tools have the largest ones.
    """

    pairs: tuple[tuple[str, str, Finite], ...]
    """Names of a node that adds to the query and of one that adds to the key, and their term; largest size first."""
    queries: tuple[tuple[str, Finite], ...]
    """Names of nodes that add to the query, with the sum of their terms; largest size first."""
    keys: tuple[tuple[str, Finite], ...]
    """Names of nodes that add to the key, with the sum of their terms; largest size first."""
    about: Mapping[str, object] = field(default_factory=dict)
    """What else the file says of the score; ours the attributes of `qk_attribution`, such as `key` and `content`."""

    @property
    def names(self) -> set[str]:
        """The names of all nodes that terms are of."""
        pairs = {name for query, key, _ in self.pairs for name in (query, key)}
        return pairs | {name for name, _ in (*self.queries, *self.keys)}


def tracing_of(
    queries: Sequence[str], keys: Sequence[str], value: Float[np.ndarray, "q k"], about: Mapping[str, object]
) -> QKTracing:
    """The score whose terms are a matrix.

    Args:
        queries: names of the nodes of the rows.
        keys: names of the nodes of the columns.
        value: the terms.
        about: what else is noted.
    """
    pairs = [(query, key) for query in queries for key in keys]
    each = [(*pairs[i], term) for i, term in _falling(value.flatten())]
    sides = [
        tuple((names[i], term) for i, term in _falling(value.sum(axis)))
        for names, axis in ((queries, 1), (keys, 0))
    ]
    return QKTracing(tuple(each), sides[0], sides[1], about)


def _falling(terms: Float[np.ndarray, "n"]) -> list[tuple[int, float]]:
    """Places and values of the terms that are not 0, the largest size first."""
    order = np.argsort(-np.abs(terms), kind="stable").tolist()
    return [(i, float(terms[i])) for i in order if terms[i] != 0]


def tracing_record(tracing: QKTracing) -> dict[str, object]:
    """The object `qk_tracing_results` of a node, with what else is noted."""
    lists = {key: [list(entry) for entry in getattr(tracing, name)] for name, key in KEYS.items()}
    return {**lists, **tracing.about}


def read_tracing(record: object, where: object) -> QKTracing:
    """The score in an object `qk_tracing_results`.

    Args:
        record: the object.
        where: the node and the file, for messages.

    Raises:
        ValueError: anything but an object with three lists of names and finite numbers.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"qk_tracing_results of {where} must be an object, got {value_text(record)}")
    if missing := [key for key in KEYS.values() if key not in record]:
        raise ValueError(
            f"qk_tracing_results of {where} requires {', '.join(KEYS.values())}, lacks {missing[0]}"
        )
    lists = {name: _tuples(record[key]) for name, key in KEYS.items()}
    about = {key: value for key, value in record.items() if key not in KEYS.values()}
    try:
        return built(QKTracing, {**lists, "about": about})
    except ValueError as cause:
        raise ValueError(f"qk_tracing_results of {where} cannot be read: {cause}") from cause


def _tuples(record: object) -> object:
    """A list of lists as a tuple of tuples; anything else as it is."""
    if not isinstance(record, list):
        return record
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in record)
