"""Files of MIB and the EAP-IG library: each cell where their formula has it, groups, MLPs, broken files."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from interp import HookedTransformer, logit_difference
from interp.causal import EdgeGraph
from interp.circuits import Circuit, read_mib, score_edges, write_mib
from tests.tiny import hooked

FORMATS = ("json", "pt")


def forward(name: str, heads: int) -> int:
    """Their row of a node, as the EAP-IG library counts."""
    if name == "input":
        return 0
    layer, head = re.fullmatch(r"[am](\d+)(?:\.h(\d+))?", name).groups()
    return 1 + int(layer) * (heads + 1) + (heads if head is None else int(head))


def backward(name: str, heads: int) -> int:
    """Their column of an input."""
    if name == "logits":
        return -1
    layer, head, letter = re.fullmatch(r"[am](\d+)(?:\.h(\d+)<([qkv])>)?", name).groups()
    first = int(layer) * (3 * heads + 1)
    return first + (3 * heads if head is None else "qkv".index(letter) * heads + int(head))


def ours(edge: str) -> str:
    """Our name of an edge of theirs."""
    sender, _, receiver = edge.partition("->")
    sender = "L0.resid" if sender == "input" else re.sub(r"^m(\d+)$", r"L\1.mlp", sender)
    sender = re.sub(r"^a(\d+)\.h(\d+)$", r"L\1H\2", sender)
    receiver = re.sub(r"^m(\d+)$", r"L\1.mlp", receiver)
    receiver = re.sub(r"^a(\d+)\.h(\d+)<(.)>$", r"L\1H\2.\3", receiver)
    return f"{sender}->{receiver}"


def drawn(model: HookedTransformer, seed: int = 0) -> tuple[EdgeGraph, Tensor, Tensor]:
    """A graph with a number and a choice for every edge."""
    graph = EdgeGraph.of(model.cfg)
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(graph.exists.shape, generator=draw, dtype=torch.float64).float().double()
    kept = (torch.rand(graph.exists.shape, generator=draw) < 0.3) & graph.exists
    return graph, scores.masked_fill(~graph.exists, 0.0), kept


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["gpt2", "parallel", "llama-gqa", "attention-only"])
def test_what_is_written_is_read_again(name: str, form: str, tmp_path: Path) -> None:
    model = hooked(name)
    graph, scores, kept = drawn(model)
    write_mib(tmp_path / f"a.{form}", model, scores, kept)
    found = read_mib(tmp_path / f"a.{form}", model)
    torch.testing.assert_close(found.scores, scores, rtol=1e-6, atol=1e-6)
    assert found.kept.equal(kept)
    circuit = Circuit.of(graph, found.kept, found.scores)
    assert circuit.mask().equal(kept)


def test_every_edge_stands_where_the_library_looks_for_it(tmp_path: Path) -> None:
    model = hooked("gpt2")
    graph, scores, kept = drawn(model)
    for form in FORMATS:
        write_mib(tmp_path / f"a.{form}", model, scores, kept)
    held, tensors = (
        json.loads((tmp_path / "a.json").read_text()),
        torch.load(tmp_path / "a.pt", weights_only=True),
    )
    heads, layers = model.cfg.n_heads, model.cfg.n_layers
    assert tensors["edges_scores"].shape == (1 + layers * (heads + 1), layers * (3 * heads + 1) + 1)
    assert held["cfg"] == tensors["cfg"] == {
        "n_layers": layers, "n_heads": heads, "parallel_attn_mlp": False, "d_model": model.cfg.d_model,
    }  # fmt: skip
    assert (
        len(held["edges"])
        == len(graph)
        == 3 * heads * (1 + 1 + heads + 1) + (1 + heads) + (1 + 2 * heads + 1) + (1 + 2 * (heads + 1))
    )
    assert tensors["src_nodes"][:2] == ["input", "a0.h0"] and tensors["dst_nodes"][-2:] == ["m1", "logits"]
    for edge, said in held["edges"].items():
        cell = graph.index(ours(edge))
        sender, _, receiver = edge.partition("->")
        place = forward(sender, heads), backward(receiver, heads)
        assert said["score"] == float(scores[cell]) == float(tensors["edges_scores"][place])
        assert said["in_graph"] == bool(kept[cell]) == bool(tensors["edges_in_graph"][place])
    used = {
        end.partition("<")[0]
        for edge, said in held["edges"].items()
        if said["in_graph"]
        for end in edge.split("->")
    }
    assert {node for node, said in held["nodes"].items() if said["in_graph"]} == used | {"input", "logits"}
    assert tensors["nodes_in_graph"].tolist() == [
        held["nodes"][node]["in_graph"] for node in tensors["src_nodes"]
    ]


def test_shared_keys_are_divided_among_their_heads_and_added_up_again(tmp_path: Path) -> None:
    model = hooked("llama-gqa")
    graph, scores, kept = drawn(model)
    write_mib(tmp_path / "a.json", model, scores, kept)
    held = json.loads((tmp_path / "a.json").read_text())
    size = model.cfg.n_heads // graph.n_kv_heads
    assert size > 1
    cell = graph.index("L0.mlp->L1G1.v")
    mine = [held["edges"][f"m0->a1.h{head}<v>"] for head in range(size, 2 * size)]
    assert [said["score"] for said in mine] == pytest.approx([float(scores[cell]) / size] * size)
    held["edges"][f"m0->a1.h{size}<v>"]["score"] += 2.5
    (tmp_path / "a.json").write_text(json.dumps(held))
    assert float(read_mib(tmp_path / "a.json", model).scores[cell]) == pytest.approx(
        float(scores[cell]) + 2.5
    )
    held["edges"][f"m0->a1.h{size}<v>"]["in_graph"] ^= True
    (tmp_path / "a.json").write_text(json.dumps(held))
    with pytest.raises(ValueError, match="keeps some heads of a group"):
        read_mib(tmp_path / "a.json", model)


def test_score_table_is_written_with_signs_and_keeps_all_without_a_circuit(
    tmp_path: Path,
) -> None:
    model = hooked("gpt2")
    found = score_edges(
        model,
        "The cat sat on the",
        "The dog sat on the",
        metric=logit_difference(5, 7),
        method="eap",
        direction="noise",
    )
    write_mib(tmp_path / "a.pt", model, found)
    again = read_mib(tmp_path / "a.pt", model)
    exists = EdgeGraph.of(model.cfg).exists
    torch.testing.assert_close(
        again.scores[exists], torch.from_numpy(found.value.values).double()[exists], rtol=1e-6, atol=1e-9
    )
    assert again.kept.equal(exists)


def test_edges_of_mlps_that_a_model_lacks_must_be_worth_nothing(tmp_path: Path) -> None:
    model = hooked("attention-only")
    graph, scores, _ = drawn(model)
    write_mib(tmp_path / "a.json", model, scores)
    held = json.loads((tmp_path / "a.json").read_text())
    assert held["edges"]["m0->logits"] == {"score": 0.0, "in_graph": False} and not graph.mlp
    held["edges"]["m0->logits"]["score"] = 1.0
    (tmp_path / "a.json").write_text(json.dumps(held))
    with pytest.raises(ValueError, match="scores edges of MLPs, and this model has none"):
        read_mib(tmp_path / "a.json", model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held.pop("edges"), "the keys cfg, nodes, edges are required"),
        (lambda held: held["cfg"].update(n_heads=9), "of another model: its n_heads is 9"),
        (lambda held: held["cfg"].update(parallel_attn_mlp=True), "of another model: its parallel_attn_mlp is True"),
        (lambda held: held["edges"].update({"m1->m0": {"score": 1.0}}), "has the edge 'm1->m0', which"),
        (lambda held: held["edges"].update({"m0->m1": {"score": None}}), "a finite number is required .* got None"),
        (lambda held: held["edges"].update({"m0->m1": 3}), "a finite number is required .* got None"),
        (lambda held: held.update(edges=[1]), "its edges must be named"),
        (lambda held: held.update(cfg=3), "of another model"),
    ],
)  # fmt: skip
def test_broken_files_are_refused_by_what_is_wrong(change: object, message: str, tmp_path: Path) -> None:
    model = hooked("gpt2")
    write_mib(tmp_path / "a.json", model, drawn(model)[1])
    held = json.loads((tmp_path / "a.json").read_text())
    change(held)
    (tmp_path / "a.json").write_text(json.dumps(held))
    with pytest.raises(ValueError, match=message):
        read_mib(tmp_path / "a.json", model)


def test_a_torch_file_of_noise_is_refused(tmp_path: Path) -> None:
    model, generator = hooked("gpt2"), np.random.default_rng(0)
    write_mib(tmp_path / "good.pt", model, drawn(model)[1])
    good = np.frombuffer((tmp_path / "good.pt").read_bytes(), np.uint8)
    at = bytes(good).index(b"data.pkl") + 60
    for noise in (b"\x80\x02X\x04\x00\x00\x00\xff\xfe\xfd\xfc.", *(generator.bytes(99) for _ in range(40))):
        damaged = good.copy()
        damaged[at : at + 99] = np.frombuffer(noise[:99].ljust(99, noise[:1]), np.uint8)
        for content in (noise, damaged.tobytes()):
            (tmp_path / "a.pt").write_bytes(content)
            with pytest.raises(ValueError, match=r"a\.pt") as refusal:
                read_mib(tmp_path / "a.pt", model)
            assert type(refusal.value) is ValueError


def test_a_torch_file_that_holds_code_or_other_shapes_is_refused(tmp_path: Path) -> None:
    model = hooked("gpt2")
    torch.save(Evil(), tmp_path / "a.pt")
    with pytest.raises(ValueError, match="is no torch file of tensors"):
        read_mib(tmp_path / "a.pt", model)
    write_mib(tmp_path / "b.pt", model, drawn(model)[1])
    held = torch.load(tmp_path / "b.pt", weights_only=True)
    torch.save(held | {"edges_scores": torch.ones(2, 2)}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"edges_scores of .* is required"):
        read_mib(tmp_path / "b.pt", model)
    held["edges_scores"][0, 0] = torch.nan
    torch.save(held, tmp_path / "b.pt")
    with pytest.raises(ValueError, match="a score is no finite number"):
        read_mib(tmp_path / "b.pt", model)


class Evil:
    """What must never run."""

    def __reduce__(self) -> tuple[object, ...]:
        return pytest.fail, ("it ran",)


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    model = hooked("gpt2")
    _, scores, _ = drawn(model)
    with pytest.raises(ValueError, match=r"ends in \.json or \.pt"):
        write_mib(tmp_path / "a.txt", model, scores)
    with pytest.raises(ValueError, match="scores and kept must be"):
        write_mib(tmp_path / "a.json", model, scores[1:])
    with pytest.raises(ValueError, match="scores must be finite"):
        write_mib(tmp_path / "a.json", model, torch.full_like(scores, torch.nan))
    assert not list(tmp_path.iterdir())
