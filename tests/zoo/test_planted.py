"""The hand-built circuits are what they say: checked edge by edge, by a slow forward pass over the edge graph."""

import functools
import itertools
import re
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

import interp
from interp.model.config import ModelConfig
from interp.model.parts import Edge
from interp.model.transformer import Transformer
from interp.model.weights import LayerWeights, Weights
from interp.zoo.planted import PLANTED, Planted
from interp.zoo.shown import SHOWN
from tests.tolerances import assert_close

BUILT = PLANTED | SHOWN
Values = dict[str, Tensor]
"""What each node adds to the stream, `[n p d]`; of `logits`, the logits."""


@functools.cache
def planted(name: str, seed: int = 0) -> Planted:
    return BUILT[name](seed, 8)


def layers_of_nodes(config: ModelConfig) -> list[list[str]]:
    """The nodes in the order of the stream; those of one list do not feed each other."""
    found = [["L0.resid"]]
    for layer in range(config.n_layers):
        found.append([f"L{layer}H{head}" for head in range(config.n_heads)])
        found += [[f"L{layer}.mlp"]] if config.mlp else []
    return [*found, ["logits"]]


def senders(config: ModelConfig, node: str) -> list[str]:
    groups = layers_of_nodes(config)
    return [s for group in itertools.takewhile(lambda g: node not in g, groups) for s in group]


def all_edges(config: ModelConfig) -> set[str]:
    nodes = [node for group in layers_of_nodes(config)[1:] for node in group]
    ends = {node: [f"{node}.{x}" for x in "qkv"] if "H" in node else [node] for node in nodes}
    return {f"{s}->{end}" for node in nodes for s in senders(config, node) for end in ends[node]}


@functools.cache
def layers(model: Transformer) -> list[LayerWeights]:
    return [Weights(model).layer(layer) for layer in range(model.config.n_layers)]


def added(model: Transformer, node: str, read: Callable[[str], Tensor]) -> Tensor:
    """What a node adds to the stream, given what it reads on each of its inputs: the formulas, written out."""
    if node == "logits":
        return read(node) @ Weights(model).W_U
    layer = layers(model)[int(node[1])]
    if node.endswith(".mlp"):
        assert layer.W_in is not None and layer.b_in is not None and layer.W_out is not None
        return (read(node) @ layer.W_in + layer.b_in).relu() @ layer.W_out + layer.b_out
    h = int(node.partition("H")[2])
    matrices = zip("qkv", (layer.W_Q, layer.W_K, layer.W_V), strict=True)
    q, k, v = (read(f"{node}.{part}") @ matrix[h] for part, matrix in matrices)
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    return (q @ k.mT).masked_fill(future, -torch.inf).softmax(-1) @ v @ layer.W_O[h]


def forward(
    model: Transformer, tokens: Tensor, other: Values | None = None, lost: Iterable[str] = ()
) -> Values:
    """One pass over the edge graph, where each lost edge carries its sender's `other` value instead of this pass's."""
    lost, values = frozenset(lost), {"L0.resid": model.embed.weight[tokens]}
    if model.pos_embed is not None:
        values["L0.resid"] = values["L0.resid"] + model.pos_embed.weight[: tokens.shape[1]]
    for node in itertools.chain.from_iterable(layers_of_nodes(model.config)[1:]):

        def read(end: str, node: str = node) -> Tensor:
            found = [(values, other or {})[f"{s}->{end}" in lost][s] for s in senders(model.config, node)]
            return torch.stack(found).sum(0)

        values[node] = added(model, node, read)
    return values


def difference(circuit: Planted, values: Values) -> Tensor:
    """logit(answer) - logit(wrong) at the last symbol, per pair."""
    rows, last = torch.arange(len(circuit.answer)), values["logits"][:, -1]
    return last[rows, circuit.answer] - last[rows, circuit.wrong]


@functools.cache
def passes(name: str, seed: int = 0) -> tuple[Values, Values]:
    """The values of every node on the clean and on the corrupted prompts."""
    circuit = planted(name, seed)
    return forward(circuit.model, circuit.clean), forward(circuit.model, circuit.corrupt)


def left(name: str, lost: Iterable[str], seed: int = 0) -> Tensor:
    """The share of the clean logit difference, per pair, when these edges carry the corrupted prompt's values."""
    circuit, (clean, corrupt) = planted(name, seed), passes(name, seed)
    mixed = forward(circuit.model, circuit.clean, corrupt, lost)
    return difference(circuit, mixed) / difference(circuit, clean)


@functools.cache
def effects(name: str, seed: int = 0) -> dict[str, float]:
    """Edge -> the share of the logit difference that is lost with it alone, mean over the pairs."""
    return {
        e: 1 - float(left(name, [e], seed).mean())
        for e in sorted(all_edges(planted(name, seed).model.config))
    }


def without(name: str, *parts: str) -> Tensor:
    """What is `left` without these parts: edges, or nodes as a whole, that is every edge that leaves them."""
    edges = all_edges(planted(name).model.config)
    return left(name, {e for e in edges if e in parts or e.partition("->")[0] in parts})


@pytest.mark.parametrize("name", [*BUILT, *interp.zoo.DEMOS])
def test_a_model_of_the_zoo_leaves_the_random_state_of_torch(name: str) -> None:
    before = torch.get_rng_state()
    BUILT[name](1, 4) if name in BUILT else interp.zoo.load(name)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize(
    "wrong", [{"seed": "x"}, {"n": [1]}, {"n": 2.5}, {"noise": [1]}, {"noise": float("nan")}]
)
def test_a_setting_of_another_kind_is_refused_by_name(name: str, wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{name}: {next(iter(wrong))} must be"):
        BUILT[name](**wrong)  # type: ignore[arg-type]


every_model = pytest.mark.parametrize("name", BUILT)
every_seed = pytest.mark.parametrize("seed", [0, 1])


@every_model
@every_seed
def test_the_reference_pass_is_the_model(name: str, seed: int) -> None:
    circuit, (clean, corrupt) = planted(name, seed), passes(name, seed)
    assert_close(clean["logits"], circuit.model(circuit.clean))
    assert_close(corrupt["logits"], circuit.model(circuit.corrupt))
    lost_all = forward(circuit.model, circuit.clean, corrupt, all_edges(circuit.model.config))
    assert_close(lost_all["logits"], circuit.model(circuit.corrupt))


@every_model
def test_the_circuit_is_a_small_part_of_an_edge_graph_of_the_known_size(name: str) -> None:
    circuit = planted(name)
    heads, depth = circuit.model.config.n_heads, circuit.model.config.n_layers
    width = heads + (circuit.model.config.mlp is not None)  # nodes that a layer adds to the graph
    before = [1 + width * layer for layer in range(depth + 1)]
    into_mlp = sum(n + heads for n in before[:-1]) if width > heads else 0
    edges = all_edges(circuit.model.config)
    assert len(edges) == 3 * heads * sum(before[:-1]) + into_mlp + before[-1]
    assert circuit.hidden < circuit.edges < edges and len(circuit.edges) <= len(edges) / 8
    assert circuit.nodes == set(re.findall(r"L0\.resid|logits|L\dH\d|L\d\.mlp", " ".join(circuit.edges)))


@every_model
@every_seed
def test_it_answers_every_clean_prompt_and_no_corrupted_one(name: str, seed: int) -> None:
    circuit = BUILT[name](seed, 100)
    clean, corrupt = (circuit.model(tokens)[:, -1] for tokens in (circuit.clean, circuit.corrupt))
    assert circuit.clean.shape == circuit.corrupt.shape and (circuit.clean != circuit.corrupt).any(1).all()
    assert (clean.argmax(-1) == circuit.answer).all() and (circuit.answer != circuit.wrong).all()
    if name in ("backup", "either"):  # nothing to answer with
        gap = difference(circuit, {"logits": corrupt[:, None]}).abs()
        assert (gap < 0.2 * difference(circuit, {"logits": clean[:, None]})).all()
    else:
        assert (corrupt.argmax(-1) == circuit.wrong).all()


@every_model
@every_seed
def test_its_edges_alone_carry_the_whole_logit_difference(name: str, seed: int) -> None:
    circuit = planted(name, seed)
    kept = left(name, all_edges(circuit.model.config) - circuit.edges, seed)
    assert abs(float(kept.mean()) - 1) < 0.05 and float(kept.min()) > 0.9


@every_model
@every_seed
def test_every_edge_that_shows_alone_is_listed_and_no_other_one_shows(name: str, seed: int) -> None:
    circuit = planted(name, seed)
    shown = {edge for edge, effect in effects(name, seed).items() if abs(effect) > 0.25}
    assert shown == circuit.edges - circuit.hidden
    assert max(abs(effect) for edge, effect in effects(name, seed).items() if edge not in shown) < 0.05


@pytest.mark.parametrize("name", ["induction", "fact_memory", "two_hop", "early_site", "late_suppression"])
@every_seed
def test_in_a_chain_every_edge_is_essential(name: str, seed: int) -> None:
    assert not planted(name, seed).hidden
    assert min(effects(name, seed)[edge] for edge in planted(name, seed).edges) > 0.8


@pytest.mark.parametrize("name", ["backup", "either"])
@every_seed
def test_every_hidden_edge_is_essential_once_its_stand_in_is_gone(name: str, seed: int) -> None:
    hidden = planted(name, seed).hidden
    pairs = itertools.combinations(sorted(hidden), 2)
    dead = {edge for pair in pairs if left(name, pair, seed).mean() < 0.2 for edge in pair}
    assert dead == hidden


def test_either_lives_as_long_as_one_whole_branch_does() -> None:
    branches = [{e for e in planted("either").hidden if head in e} for head in ("L0H1", "L1H3")]
    assert [len(branch) for branch in branches] == [3, 3]
    for branch in branches:
        assert left("either", branch).min() > 0.95
    for pair in itertools.product(*branches):
        assert left("either", pair).mean().abs() < 0.1
    assert without("either", "L0H1").min() > 0.95 and without("either", "L1H3").min() > 0.95
    assert without("either", "L0H1", "L1H3").mean().abs() < 0.1


MOVER, NEGATIVE, BACKUP = "L0H3", "L1H1", "L1H2"


@pytest.mark.parametrize(
    ("parts", "share"),
    [
        ([MOVER], 1.0),  # the backup's 3/4 instead of 1 - 1/4
        ([BACKUP], 1.0),  # it rested
        ([MOVER, BACKUP], 0.0),
        ([NEGATIVE], 4 / 3),  # 1 instead of 3/4
        ([MOVER, NEGATIVE], 1.0),  # the backup's 3/4: the negative head had nothing to hold back
        ([f"{MOVER}->logits"], -1 / 3),  # the negative head's -1/4; the backup still hears the mover
        ([f"{MOVER}->{NEGATIVE}.q"], 4 / 3),
        ([f"{MOVER}->{BACKUP}.q"], 2.0),  # 1 - 1/4 + 3/4
    ],
)
def test_backup_is_worth_what_its_arithmetic_says(parts: list[str], share: float) -> None:
    assert float(without("backup", *parts).mean()) == pytest.approx(share, abs=0.05)


def first_order(name: str, edge: str, *, at: str) -> float:
    """The share of the logit difference lost with this edge, as the gradient at one of the two prompts predicts it."""
    circuit, (clean, corrupt), sender = planted(name), passes(name), edge.partition("->")[0]
    here, tokens = (clean, circuit.clean) if at == "clean" else (corrupt, circuit.corrupt)
    moving = here[sender].clone().requires_grad_()
    result = difference(circuit, forward(circuit.model, tokens, {sender: moving}, [edge]))
    (slope,) = torch.autograd.grad(result.sum(), moving)
    loss = ((clean[sender] - corrupt[sender]) * slope).sum((1, 2))
    return float((loss / difference(circuit, clean)).mean())


@pytest.mark.parametrize("edge", ["L0H1->L1.mlp", "L1H3->L1.mlp"])
def test_gradients_miss_either_where_saturated_and_see_it_where_empty(edge: str) -> None:
    assert abs(first_order("either", edge, at="clean")) < 0.02
    assert first_order("either", edge, at="corrupt") > 1
    assert first_order("either", "L1.mlp->logits", at="clean") == pytest.approx(
        effects("either")["L1.mlp->logits"], abs=1e-4
    )


@pytest.mark.parametrize("at", ["clean", "corrupt"])
def test_gradients_miss_the_saturated_softmax_of_induction(at: str) -> None:
    for edge in ("L0H1->L1H2.k", "L0.resid->L1H2.q"):
        assert abs(first_order("induction", edge, at=at)) < 0.001 < 0.8 < effects("induction")[edge]


@every_model
def test_nothing_is_silent_that_is_not_planted(name: str) -> None:
    circuit, (clean, corrupt) = planted(name), passes(name)
    same = {"L1H3", "L1.mlp"} if name == "late_suppression" else set()  # planted, and alike in both prompts
    for node in clean.keys() - {"logits"} - circuit.nodes - same:
        assert (clean[node] - corrupt[node])[:, -1].abs().amax(-1).min() > 1e-5, node


@pytest.mark.parametrize(("name", "kind"), [("induction", "K"), ("two_hop", "V"), ("backup", "Q")])
def test_edges_between_heads_are_the_compositions_of_the_weights(name: str, kind: str) -> None:
    circuit = planted(name)
    table = interp.frame(interp.composition(circuit.model, kind)).query("excess > 0.03")
    found = {
        str(Edge.of(f"{src}->{dst}.{kind.lower()}")) for src, dst in zip(table.src, table.dst, strict=True)
    }
    edges = [Edge.of(edge) for edge in circuit.edges]
    side = {"Q": "query", "K": "key", "V": "value"}[kind]
    listed = {str(e) for e in edges if (e.sender.kind, e.receiver.kind) == ("head", side)}
    assert found == listed and listed


@every_model
def test_more_examples_do_not_change_the_weights_and_another_seed_does(name: str) -> None:
    few, many, other = BUILT[name](0, 3), BUILT[name](0, 50), BUILT[name](1, 3)
    weights, same, changed = (list(c.model.parameters()) for c in (few, many, other))
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights, changed, strict=True))
    assert few.name == name and len(few.clean) == len(few.answer) == 3 and len(many.clean) == 50
    assert not few.model.training and not any(p.requires_grad for p in weights)


@every_model
def test_without_examples_there_is_no_circuit_to_show(name: str) -> None:
    with pytest.raises(ValueError, match="n >= 1 examples are required, got 0"):
        BUILT[name](n=0)
