"""Attribution graphs in files: ours come back bit for bit, others keep their names, broken ones are refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from interp.causal import EdgeGraph
from interp.circuits import (
    Circuit,
    CircuitProtocol,
    GraphPrompt,
    read_attribution_graph,
    write_attribution_graph,
)

PROTOCOL = CircuitProtocol("logit difference", "logits", "eap-ig-inputs", "top_n", "resample", 1)
ASKED = GraphPrompt("When Mary", ("<bos>", "When", " Mary"), ' "quoted"', 0.25, " John")
SCORES = {
    "L0.resid->L0.mlp": 1.5, "L0.mlp->L1H1.q": -0.1, "L0.mlp->L1H1.k": -0.2, "L0.mlp->L1H1.v": 0.7,
    "L1H1->logits": 0.0, "L0.mlp->logits": 2.0,
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "required": ["metadata", "qParams", "nodes", "links"],
    "properties": {
        "metadata": {
            "required": ["slug", "scan", "prompt_tokens", "prompt"],
            "properties": {
                "slug": {"type": "string"},
                "scan": {"type": "string"},
                "prompt": {"type": "string"},
                "prompt_tokens": {"type": "array", "items": {"type": "string"}},
                "info": {"properties": {"description": {"type": "string"}, "generator": {"type": "object"}}},
                "generation_settings": {"type": "object"},
            },
        },
        "qParams": {
            "properties": {
                "pinnedIds": {"type": "array", "items": {"type": "string"}},
                "supernodes": {"type": "array"},
                "linkType": {"type": "string"},
                "clickedId": {"type": "string"},
                "sg_pos": {"type": "string"},
            }
        },
        "nodes": {
            "items": {
                "required": ["node_id", "feature", "layer", "ctx_idx", "feature_type", "jsNodeId", "clerp"],
                "properties": {
                    "feature": {"type": ["integer", "null"]},
                    "layer": {"type": ["string", "integer"]},
                    "ctx_idx": {"type": "integer"},
                    "influence": {"type": ["number", "null"]},
                    "activation": {"type": ["number", "null"]},
                    **{key: {"type": "string"} for key in ("node_id", "feature_type", "jsNodeId", "clerp")},
                },
            }
        },
        "links": {
            "items": {
                "required": ["source", "target", "weight"],
                "properties": {
                    "source": {"type": "string"},
                    "target": {"type": "string"},
                    "weight": {"type": "number"},
                },
            }
        },
    },
}
"""What Neuronpedia's published schema requires (`apps/webapp/app/api/graph/graph-schema.json`, version 1.0.0).

It forbids no other keys, of which ours has some, such as `effect` of a node.
"""


def circuit(graph: EdgeGraph | None = None, scores: dict[str, float] | None = None) -> Circuit:
    return Circuit(graph or EdgeGraph(2, 2, 2), scores or SCORES, "demo", "who gets it", PROTOCOL)


def written(found: Circuit, folder: Path) -> dict:
    write_attribution_graph(found, ASKED, folder / "graph.json")
    return json.loads((folder / "graph.json").read_text())


def foreign() -> dict:
    """As circuit-tracer writes them: features, an error, a token, a logit."""

    def node(name: str, kind: str, **more: object) -> dict:
        layer, number, place = name.split("_")
        return {
            "node_id": name, "feature": int(number), "layer": layer, "ctx_idx": int(place), "feature_type": kind,
            "token_prob": 0.0, "is_target_logit": False, "run_idx": 0, "reverse_ctx_idx": 0,
            "jsNodeId": f"{layer}_{number}-0", "clerp": "", "influence": None, "activation": None,
        } | more  # fmt: skip

    return {
        "metadata": {
            "slug": "count", "scan": "gemma-2-2b", "transcoder_list": [], "prompt_tokens": ["<bos>", "1"],
            "prompt": "<bos>1", "node_threshold": 0.5, "schema_version": 1,
            "generation_settings": {"max_n_logits": 5, "batch_size": 48},
        },
        "qParams": {
            "pinnedIds": [], "supernodes": [["numbers", "0_6200_1", "3_373_1"]], "linkType": "both",
            "clickedId": "", "sg_pos": "",
        },
        "nodes": [
            node("0_6200_1", "cross layer transcoder", activation=21.875, influence=0.25, clerp="the digit 1"),
            node("3_373_1", "cross layer transcoder"),
            node("3_-1_1", "mlp reconstruction error"),
            node("E_235274_1", "embedding"),
            node("27_235310_1", "logit", clerp='Output "4" (p=0.229)', is_target_logit=True),
        ],
        "links": [
            {"source": "E_235274_1", "target": "0_6200_1", "weight": 24.5},
            {"source": "0_6200_1", "target": "3_373_1", "weight": -27.5},
            {"source": "3_-1_1", "target": "27_235310_1", "weight": 3},
        ],
    }  # fmt: skip


def saved(held: object, folder: Path) -> Path:
    path = folder / "given.json"
    path.write_text(json.dumps(held))
    return path


@pytest.mark.parametrize(
    ("graph", "scores"),
    [
        (EdgeGraph(2, 2, 2), SCORES),
        (EdgeGraph(2, 4, 2), {"L0H3->L1G0.k": 1 / 3, "L0H3->L1G0.v": 2.0, "L1H1->logits": -1e-300}),
        (
            EdgeGraph(1, 2, 2, mlp_before=True),
            {"L0.resid->L0.mlp_before": 2.0, "L0.mlp_before->L0H1.q": -0.5, "L0H1->L0.mlp": 1.0},
        ),
        (EdgeGraph(1, 2, 2, mlp=False), {"L0.resid->L0H1.v": 0.1 + 0.2, "L0H1->logits": 3.0}),
    ],
)
def test_a_circuit_comes_back_as_it_was(graph: EdgeGraph, scores: dict[str, float], tmp_path: Path) -> None:
    given = circuit(graph, scores)
    written(given, tmp_path)
    found = read_attribution_graph(tmp_path / "graph.json")
    assert found.circuit() == given
    assert (found.prompt, found.tokens, found.model) == (ASKED.prompt, ASKED.tokens, "demo")
    for other in (
        replace(given, protocol=None),
        replace(given, protocol=replace(PROTOCOL, direction="noise")),
    ):
        written(other, tmp_path)
        assert read_attribution_graph(tmp_path / "graph.json").circuit() == other


def test_weights_speak_for_the_answer_in_both_directions(tmp_path: Path) -> None:
    plain = written(circuit(), tmp_path)
    corrupting = {edge: -score for edge, score in SCORES.items()}
    noise = replace(circuit(scores=corrupting), protocol=replace(PROTOCOL, direction="noise"))
    other = written(noise, tmp_path)
    assert [link["weight"] for link in other["links"]] == [link["weight"] for link in plain["links"]]
    told = [held["metadata"]["generation_settings"]["weight"] for held in (plain, other)]
    assert "clean prompt's value" in told[0] and told[1].startswith("minus") and "corrupted" in told[1]


def test_our_graphs_of_the_first_edition_are_read(tmp_path: Path) -> None:
    """Its nodes have their old names, and its weights are minus what corrupting an edge changes."""
    names = {"L0.resid": "input", "L0.mlp": "m0", "L1H1": "a1.h1", "L1G0": "a1.g0", "logits": "logits"}
    scores = {"L0.resid->L0.mlp": 1.5, "L0.mlp->L1G0.k": 0.5, "L1H1->logits": -0.25}
    for protocol in (replace(PROTOCOL, direction="noise"), None):
        given = replace(circuit(EdgeGraph(2, 4, 2), scores), protocol=protocol)
        text = json.dumps(written(given, tmp_path))
        for new, old in names.items():
            text = text.replace(f'"{new}"', f'"{old}"')
        held = json.loads(text)
        settings = held["metadata"]["generation_settings"]
        settings["format"] = 1
        if protocol is not None:
            del settings["protocol"]["direction"]
        found = read_attribution_graph(saved(held, tmp_path))
        assert {node.name for node in found.nodes} == set(names.values())
        expected = (
            given if protocol is not None else replace(given, scores={k: -v for k, v in scores.items()})
        )
        assert found.circuit() == expected


def test_a_written_graph_is_one_by_the_published_schema(tmp_path: Path) -> None:
    jsonschema.Draft7Validator(SCHEMA).validate(written(circuit(), tmp_path))
    jsonschema.Draft7Validator(SCHEMA).validate(foreign())


def test_links_are_unique_and_signed_sums_of_what_enters_a_head(
    tmp_path: Path,
) -> None:
    links = written(circuit(), tmp_path)["links"]
    weights = {(link["source"], link["target"]): link["weight"] for link in links}
    assert len(weights) == len(links) == 4
    assert weights["L0.mlp", "L1H1"] == pytest.approx(0.7 - 0.1 - 0.2)
    assert weights["L0.mlp", "logits"] == 2.0


def test_nodes_have_their_layers_and_nothing_that_they_are_not(tmp_path: Path) -> None:
    nodes = {node["node_id"]: node for node in written(circuit(), tmp_path)["nodes"]}
    assert list(nodes) == ["L0.resid", "L0.mlp", "L1H1", "logits"]
    assert [node["layer"] for node in nodes.values()] == ["E", "0", "1", "3"]
    assert [node["feature"] for node in nodes.values()] == [None, None, 1, None]
    assert {node["ctx_idx"] for node in nodes.values()} == {2}
    assert not {"influence", "activation"} & {key for node in nodes.values() for key in node}
    assert nodes["logits"]["clerp"].endswith("(p=0.250)") and nodes["logits"]["token_prob"] == 0.25


def test_a_graph_of_others_is_kept_by_its_names_and_is_no_circuit(tmp_path: Path) -> None:
    found = read_attribution_graph(saved(foreign(), tmp_path))
    table = found.table()
    assert table.weight.tolist() == [-27.5, 24.5, 3.0]
    assert table.source.tolist() == ["0_6200_1", "E_235274_1", "3_-1_1"]
    assert table.target_label.tolist() == ["3_373_1", "the digit 1", 'Output "4" (p=0.229)']
    first = found.nodes[0]
    assert (first.kind, first.layer, first.position, first.activation, first.influence) == (
        "cross layer transcoder", "0", 1, 21.875, 0.25,
    )  # fmt: skip
    assert found.supernodes == (("numbers", "0_6200_1", "3_373_1"),)
    with pytest.raises(ValueError, match=r"requires a graph written by interp.*2 x 'cross layer transcoder'"):
        found.circuit()


def broken(change: Callable[[dict], object], held: dict) -> dict:
    change(held)
    return held


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held.pop("links"), "lacks links"),
        (lambda held: held["metadata"].pop("prompt"), "lacks prompt"),
        (lambda held: held["nodes"][0].pop("layer"), "lacks layer"),
        (lambda held: held["nodes"].append(held["nodes"][0]), "'0_6200_1' comes twice"),
        (lambda held: held["links"][0].update(target="9_9_9"), "'9_9_9' is none"),
        (lambda held: held["links"][0].update(weight=float("nan")), "finite weight, .* has nan"),
        (lambda held: held["links"][0].update(weight="3"), "finite weight, .* has '3'"),
        (lambda held: held["links"][0].pop("weight"), "lacks weight"),
    ],
)
def test_what_is_no_graph_is_refused_with_the_reason(
    change: Callable[[dict], object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        read_attribution_graph(saved(broken(change, foreign()), tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held["links"][0].update(weight=5.0), "parts that sum to the weight"),
        (lambda held: held["links"][0].pop("parts"), "parts that sum to the weight"),
        (lambda held: held["metadata"]["generation_settings"].update(format=3), "in format 2 are read, .* 3"),
        (lambda held: held["metadata"]["generation_settings"].pop("graph"), "lacks graph"),
    ],
)
def test_a_graph_of_ours_that_was_changed_is_refused(
    change: Callable[[dict], object], message: str, tmp_path: Path
) -> None:
    held = written(circuit(), tmp_path)
    with pytest.raises(ValueError, match=message):
        read_attribution_graph(saved(broken(change, held), tmp_path))


def test_files_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    for content in (b"no JSON", b"\xff{}", b"[" * 100_000):
        (tmp_path / "text.json").write_bytes(content)
        with pytest.raises(ValueError, match="an attribution graph in JSON is required"):
            read_attribution_graph(tmp_path / "text.json")
        with pytest.raises(ValueError, match="a circuit in JSON is required"):
            Circuit.load(tmp_path / "text.json")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        read_attribution_graph(saved([1, 2], tmp_path))


def test_a_circuit_of_many_prompts_or_none_has_no_graph(tmp_path: Path) -> None:
    many = replace(circuit(), protocol=replace(PROTOCOL, n=20))
    with pytest.raises(ValueError, match="scored on 20 pairs"):
        write_attribution_graph(many, ASKED, tmp_path / "graph.json")
    with pytest.raises(ValueError, match="at least one token"):
        write_attribution_graph(circuit(), replace(ASKED, tokens=()), tmp_path / "graph.json")
    assert not list(tmp_path.iterdir())


def test_a_graph_whose_nodes_stand_beyond_its_tokens_is_refused(tmp_path: Path) -> None:
    graph = foreign()
    graph["metadata"]["prompt_tokens"] = graph["metadata"]["prompt_tokens"][1:]
    with pytest.raises(
        ValueError, match=r"must stand at one of its 1 prompt_tokens \(ctx_idx\), '0_6200_1' does not"
    ):
        read_attribution_graph(saved(graph, tmp_path))


def test_graphs_that_no_file_could_hold_are_refused_where_they_are_made(tmp_path: Path) -> None:
    """Such graphs were written and could not be read, or ended in errors of pandas and JSON."""
    graph = read_attribution_graph(saved(foreign(), tmp_path))
    weight = graph.links.weight
    for change, match in (
        ({"links": graph.links.assign(weight=weight.where(weight != weight[0]))}, "requires a finite weight"),
        ({"links": graph.links.drop(columns="weight")}, "got none of weight"),
        (
            {"links": graph.links.assign(target="nobody")},
            "links must join nodes of the graph, 'nobody' is none",
        ),
        ({"nodes": (*graph.nodes, graph.nodes[0])}, "comes twice"),
        ({"parts": ({},) * (len(graph.links) + 1)}, "parts of .* links are required"),
        ({"metadata": {"slug": "other"}}, "metadata must not have slug"),
    ):
        with pytest.raises(ValueError, match=match):
            replace(graph, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="metadata must hold what JSON can"):
        replace(graph, metadata={"made": {1, 2}}).write(tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists()
