"""Scores of attention in files of graphs: every term under the names that Neuronpedia looks up, and all back."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import xarray as xr

from interp.circuits import AttributionGraph, attribution_graph, qk_attribution, read_attribution_graph
from tests.circuits.test_attribution_graph import PROMPT, with_features
from tests.circuits.test_graph_files import SCHEMA, foreign, saved
from tests.loops import over

HEAD, QUERY, KEY, AGAINST = "L1H1", 5, 2, 4


@functools.cache
def graph() -> xr.Dataset:
    return attribution_graph(with_features(), PROMPT, 2, nodes=["head", "feature"], most=500, links=500)


def score(head: str = HEAD, *, prompt: list[int] = PROMPT, most: int = 6, **how: Any) -> xr.Dataset:
    return qk_attribution(with_features(), prompt, head, query=QUERY, key=KEY, most=most, **how)


def test_every_term_stands_in_the_file_under_the_names_of_its_nodes(tmp_path: Path) -> None:
    """Nodes that only a score has are told beside, as Neuronpedia's converter of llamascopium's graphs does."""
    scores = [score(against=AGAINST), score("L1H0", most=3)]
    made = AttributionGraph.of_result(graph(), qk=scores)
    made.write(tmp_path / "graph.json")
    record = json.loads((tmp_path / "graph.json").read_text())
    jsonschema.validate(record, SCHEMA)
    jsonschema.validate(record | {"nodes": list(record["qk_only_nodes"].values())}, SCHEMA)
    assert all("effect" in node for node in record["nodes"])
    labels = {node["node_id"]: node for node in record["nodes"]} | record["qk_only_nodes"]
    assert all(labels[name]["node_id"] == name for name in labels)
    held = {
        node["node_id"]: node["qk_tracing_results"]
        for node in record["nodes"]
        if "qk_tracing_results" in node
    }
    assert set(held) == {"L1H1_5", "L1H0_5"}
    own = dict(zip(graph().node.values.tolist(), (node.name for node in made.nodes), strict=True))
    for one in scores:
        found = held[f"{one.attrs['head']}_{QUERY}"]
        terms = {(query, key): term for query, key, term in found["pair_wise_contributors"]}
        sizes = np.abs(list(terms.values()))
        assert (np.diff(sizes) <= 0).all() and (sizes > 0).all()
        assert sum(terms.values()) == pytest.approx(one.attrs["content"], rel=1e-9)
        names = {
            side: {
                part: own.get(part, f"1_{part}_{one.attrs['head']}.{side}_{one.attrs[side]}")
                for part in one[f"{side}_part"].values.tolist()
            }
            for side in ("query", "key")
        }
        for query, name in names["query"].items():
            for key, other in names["key"].items():
                term = float(one.value.sel(query_part=query, key_part=key))
                assert terms.get((name, other), 0.0) == term
        for side, letter in (("query", "q"), ("key", "k")):
            marginal = dict(found[f"top_{letter}_marginal_contributors"])
            dim = "key_part" if side == "query" else "query_part"
            for part, name in names[side].items():
                total = float(one.value.sum(dim).sel({f"{side}_part": part}))
                assert marginal.get(name, 0.0) == pytest.approx(total, rel=1e-12)
            assert set(marginal) <= set(labels)
        assert all(found[name] == one.attrs[name] for name in ("head", "query", "key", "content", "score"))
    assert held["L1H1_5"]["against"] == AGAINST and "against" not in held["L1H0_5"]
    kinds = {name: node["feature_type"] for name, node in record["qk_only_nodes"].items()}
    assert kinds["1_bias_L1H1.query_5"] == "bias" and kinds["1_others_L1H0.key_2"] == "unknown"


def test_nodes_that_the_graph_left_out_are_told_beside(tmp_path: Path) -> None:
    few = attribution_graph(with_features(), PROMPT, 2, nodes=["head", "feature"], most=5)
    head, _, pos = str(few.node.values[few.kind.values == "head"][-1]).partition("@")
    found = qk_attribution(with_features(), PROMPT, head, query=int(pos), key=1, most=500)
    made = AttributionGraph.of_result(few, qk=found)
    whole = AttributionGraph.of_result(graph())
    known = {node.name: node for node in (*whole.nodes, *made.nodes)}
    beside = [node for node in made.qk_nodes if node.kind not in ("bias", "unknown")]
    assert len(beside) > 5
    for node in beside:
        if (same := known.get(node.name)) is not None:
            assert (same.kind, same.layer, same.position, same.label, same.feature) == (
                node.kind, node.layer, node.position, node.label, node.feature,
            )  # fmt: skip
    assert sum(node.name in known for node in beside) > 3
    made.write(tmp_path / "graph.json")
    read = read_attribution_graph(tmp_path / "graph.json")
    assert (read.qk, read.qk_nodes, read.nodes) == (made.qk, made.qk_nodes, made.nodes)


def theirs() -> dict[str, Any]:
    """A graph of llamascopium in Neuronpedia's form: an attention feature, and a bias that is no node."""
    record = foreign()
    bias = record["nodes"][0] | {"node_id": "3_bias_lorsa_bQ_1", "feature": None, "feature_type": "bias"}
    attends = record["nodes"][1] | {"node_id": "3_lor_7_1", "feature_type": "lorsa"}
    attends["qk_tracing_results"] = {
        "pair_wise_contributors": [["0_6200_1", "E_235274_1", 1.5], ["3_bias_lorsa_bQ_1", "0_6200_1", -0.5]],
        "top_q_marginal_contributors": [["0_6200_1", 1.25]],
        "top_k_marginal_contributors": [],
    }
    plain = record["nodes"][0] | {"qk_tracing_results": None}
    nodes = [plain, *record["nodes"][1:], attends]
    return record | {"nodes": nodes, "qk_only_nodes": {bias["node_id"]: bias}}


def test_scores_of_other_tools_are_kept(tmp_path: Path) -> None:
    given = theirs()
    found = read_attribution_graph(saved(given, tmp_path))
    assert list(found.qk) == ["3_lor_7_1"] and [node.kind for node in found.qk_nodes] == ["bias"]
    assert found.qk["3_lor_7_1"].pairs[1] == ("3_bias_lorsa_bQ_1", "0_6200_1", -0.5)
    found.write(tmp_path / "again.json")
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["nodes"][-1]["qk_tracing_results"] == given["nodes"][-1]["qk_tracing_results"]
    assert set(again["qk_only_nodes"]) == set(given["qk_only_nodes"])


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    record = theirs()
    change(record["nodes"][-1]["qk_tracing_results"])
    return record


@over(
    "record, match",
    [
        (broken(lambda qk: qk.pop("top_q_marginal_contributors")), "lacks top_q_marginal_contributors"),
        (broken(lambda qk: qk.update(pair_wise_contributors={})), "pairs must be"),
        (broken(lambda qk: qk["pair_wise_contributors"].append(["0_6200_1", 0.5])), "pairs must be"),
        (broken(lambda qk: qk["top_k_marginal_contributors"].append(["0_6200_1", "1"])), "keys must be"),
        (broken(lambda qk: qk["top_k_marginal_contributors"].append(["0_1_1", 1.0])), "'0_1_1' of 3_lor_7_1 is none"),
        (theirs() | {"qk_only_nodes": []}, "'3_bias_lorsa_bQ_1' of 3_lor_7_1 is none"),
        (theirs() | {"qk_only_nodes": [1]}, "qk_only_nodes of .* must be dict"),
    ],
)  # fmt: skip
def test_broken_scores_are_refused(record: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        read_attribution_graph(saved(record, tmp_path))


def test_scores_of_another_prompt_or_head_are_refused() -> None:
    neurons = attribution_graph(with_features(), PROMPT, 2, nodes="feature", most=5)
    for given, qk, match in (
        (graph(), score(prompt=[3, 1, 4, 1, 5, 2]), "qk must be of the prompt of the graph"),
        (neurons, score(), "must be of heads that are nodes of the graph .*, L1H1@5 is none"),
        (graph(), [score(), score(against=AGAINST)], "one score for each head and query, L1H1@5 has several"),
        (graph(), graph(), "qk must be a result of qk_attribution"),
        (graph(), score().drop_attrs(), "qk must have the attributes of qk_attribution, it lacks 'prompt'"),
    ):
        with pytest.raises(ValueError, match=match):
            AttributionGraph.of_result(given, qk=qk)
