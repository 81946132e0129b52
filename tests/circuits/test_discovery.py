"""Every search finds the circuits that were planted, and does what its name says."""

import functools
import pickle
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from jaxtyping import TypeCheckError
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.causal import EdgeGraph
from interp.circuits import Circuit, FindCircuit, edge_stability, find_circuit, interchange, score_edges
from interp.circuits.discovery import backwards, pruned
from interp.circuits.edge_circuit import connected
from interp.circuits.edge_rankings import largest, worth
from interp.core.notes import note
from interp.data.pairs import Pairs
from interp.passes.metrics import Metric, logit_difference, of_logits
from interp.zoo.planted import PLANTED, Planted
from tests.configs import CONFIGS, build, some_tokens

GRAPH = EdgeGraph.of(CONFIGS["llama-gqa"])
PAIRS = some_tokens(2, 6), some_tokens(2, 6, seed=1)


@functools.cache
def planted(name: str, n: int = 4) -> Planted:
    return PLANTED[name](0, n)


def metric_of(circuit: Planted) -> Metric:
    return logit_difference(circuit.answer, circuit.wrong)


def found(name: str, n: int = 4, **how: object) -> set[str]:
    c = planted(name, n)
    ask = functools.partial(find_circuit, HookedTransformer(c.model), c.clean, c.corrupt, metric=metric_of(c))
    return set(ask(**how).edges)  # type: ignore[arg-type]


# planted


@pytest.mark.parametrize("name", ["fact_memory", "two_hop"])
@pytest.mark.parametrize("search", ["top_n", "greedy"])
@pytest.mark.parametrize("method", ["exact", "eap-ig-inputs"])
def test_a_chain_is_found_edge_by_edge(name: str, search: str, method: str) -> None:
    edges = planted(name).edges
    assert found(name, edges=len(edges), search=search, method=method) == edges


def test_exact_effects_find_what_a_saturated_softmax_hides_from_gradients() -> None:
    edges = planted("induction").edges
    assert found("induction", edges=len(edges), method="exact") == edges
    assert "L0H1->L1H2.k" not in found("induction", edges=len(edges), method="eap")


@pytest.mark.parametrize("name", ["fact_memory", "two_hop"])
def test_a_threshold_between_the_planted_edges_and_the_rest_finds_them(name: str) -> None:
    """The planted edges are worth more than 5 of about 20 logits, all others less than 5 %."""
    assert found(name, threshold=5.0, search="threshold", method="exact") == planted(name).edges


@pytest.mark.slow
def test_the_iterative_search_finds_the_chain_and_one_branch_of_an_or() -> None:
    edges = planted("induction").edges
    assert found("induction", 2, edges=len(edges), search="iterative") == edges
    left = found("either", 2, threshold=5.0, search="iterative")
    branches = [{e for e in planted("either").hidden if head in e} for head in ("L0H1", "L1H3")]
    assert left in [branch | {"L1.mlp->logits"} for branch in branches]


# the searches themselves


def some_scores(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(GRAPH.exists.shape, generator=generator, dtype=torch.float64)
    return values.masked_fill(~GRAPH.exists, torch.nan)


def table_of(
    scores: Tensor, clean: float = 2.0, corrupt: float = 1.0, direction: str = "denoise"
) -> xr.Dataset:
    ends = {"clean": ("prompt", [clean]), "corrupt": ("prompt", [corrupt])}
    values = {"value": (("sender", "receiver"), scores.numpy())}
    return xr.Dataset({**values, **ends}, attrs={"direction": direction})


def test_the_largest_are_the_largest_and_ties_go_in_order() -> None:
    values = some_scores().abs().nan_to_num(nan=-torch.inf)
    order = sorted(((float(values[GRAPH.index(e)]), e) for e in GRAPH.names()), reverse=True)
    sizes = (0, 1, 17, len(GRAPH))
    for n, together in zip(sizes, largest(values, sizes), strict=True):
        assert set(GRAPH.names(largest(values, n))) == {e for _, e in order[:n]}
        assert torch.equal(largest(values, n), together)
    equal = torch.ones(GRAPH.exists.shape).masked_fill(~GRAPH.exists, -torch.inf)
    assert list(GRAPH.names(largest(equal, 5))) == list(GRAPH.names())[:5]


@pytest.mark.parametrize("n", [1, 2, 5, 30, 70])
def test_greedy_takes_the_largest_edge_into_the_circuit_each_time(n: int) -> None:
    """A slow search over all edges in each step."""
    values = some_scores(n).abs().nan_to_num(nan=-torch.inf)
    taken: list[str] = []
    for _ in range(n):
        inside = {"logits"} | {e.partition("->")[0] for e in taken}
        able = [
            e for e in GRAPH.names() if e not in taken and inside & set(GRAPH.nodes_of(GRAPH.index(e)[1]))
        ]
        taken.append(max(able, key=lambda e: float(values[GRAPH.index(e)])))
    assert set(GRAPH.names(backwards(GRAPH, values, n))) == set(taken)


def test_greedy_stops_when_it_has_everything_that_leads_to_the_logits() -> None:
    values = torch.zeros(GRAPH.exists.shape).masked_fill(~GRAPH.exists, -torch.inf)
    assert torch.equal(backwards(GRAPH, values, 10**6), GRAPH.exists)


@pytest.mark.parametrize(
    ("clean", "corrupt", "direction", "sign"),
    [(2.0, 1.0, "noise", -1), (1.0, 2.0, "noise", 1), (2.0, 1.0, "denoise", 1), (1.0, 2.0, "denoise", -1)],
)
def test_helpful_edges_are_those_whose_change_does_what_the_other_run_does(
    clean: float, corrupt: float, direction: str, sign: int
) -> None:
    scores = some_scores()
    table = table_of(scores, clean, corrupt, direction)
    here = GRAPH.exists
    assert torch.equal(worth(table, "helpful")[here], scores[here] * sign)
    assert torch.equal(worth(table)[here], scores[here].abs())
    assert bool(worth(table)[~here].isneginf().all())


def test_whittling_drops_the_least_needed_and_reports_what_is_left() -> None:
    model = HookedTransformer(build("attention-only"))
    graph = EdgeGraph.of(model.cfg)
    ask = functools.partial(interchange, model, *PAIRS, metric=logit_difference(3, 4))

    def run(masks: Tensor) -> Tensor:
        return torch.from_numpy(ask(masks)["each"].values.T)

    kept, scores = pruned(ask, graph, 60)
    assert 0 < int(kept.sum()) <= 60 and torch.equal(kept, connected(graph, kept))
    (here,) = run(kept[None]).mean(1)
    for s, r in kept.nonzero()[::7].tolist():
        without = kept.clone()
        without[s, r] = False
        change = run(without[None]).mean() - here
        assert float(scores[s, r]) == pytest.approx(float(change), abs=1e-9)
    full, empty = run(torch.stack((graph.exists, graph.exists & False))).mean(1)
    generator = np.random.default_rng(0)
    cells = graph.exists.nonzero()
    others = torch.zeros(20, *kept.shape, dtype=torch.bool)
    for other in others:
        chosen = cells[generator.permutation(len(cells))[: int(kept.sum())]]
        other[chosen[:, 0], chosen[:, 1]] = True
    away = (run(others).mean(1) - full).abs()
    # A random circuit may come near by effects that cancel; half of them do not.
    assert float((here - full).abs()) < min(float(away.median()), float((empty - full).abs()))
    for direction, sign in (("noise", 1), ("denoise", -1)):
        asked = {"metric": logit_difference(3, 4), "search": "iterative", "edges": 60, "direction": direction}
        circuit = find_circuit(model, *PAIRS, **asked)  # type: ignore[arg-type]
        assert torch.equal(circuit.mask(), kept)
        expected = {edge: sign * float(scores[graph.index(edge)]) for edge in circuit.edges}
        assert circuit.scores == pytest.approx(expected, abs=1e-9)
        assert circuit.protocol is not None
        assert (circuit.protocol.method, circuit.protocol.n) == ("exact", 2)
        assert circuit.protocol.direction == direction


def test_the_record_says_how_it_was_found() -> None:
    model = HookedTransformer(build("llama-gqa"), name="small")
    circuit = find_circuit(model, *PAIRS, metric=logit_difference(3, 4), edges=30, task="none", seed=7)
    how = circuit.protocol
    assert how is not None and (circuit.model, circuit.task) == ("small", "none")
    assert (how.metric, how.method, how.search, how.replacement, how.n, how.seed, how.direction) == (
        "logit difference", "eap-ig-inputs", "top_n", "resample", 2, 7, "denoise",
    )  # fmt: skip
    table = score_edges(model, *PAIRS, metric=logit_difference(3, 4))
    for edge, score in circuit.scores.items():
        sender, _, receiver = edge.partition("->")
        assert score == float(table.value.sel(sender=sender, receiver=receiver))


@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("eap", {"search": "top_n", "edges": 30}), ("exact", {"search": "greedy", "edges": 12}),
        ("eap-ig-inputs", {"search": "threshold", "threshold": 0.02}),
    ],
)  # fmt: skip
def test_a_run_finds_the_circuit_that_the_function_finds(method: str, how: dict[str, object]) -> None:
    model, metric = HookedTransformer(build("llama-gqa")), logit_difference(3, 4)
    circuit = find_circuit(model, *PAIRS, metric=metric, method=method, **how)  # type: ignore[arg-type]
    pairs = Pairs(*(tokens.tolist() for tokens in PAIRS))
    found = interp.run([FindCircuit(metric, method, **how)], model, pairs)["find_circuit"]  # type: ignore[arg-type]
    again = Circuit.of_result(found)
    assert circuit.protocol is not None
    assert again.edges == circuit.edges and again.protocol == replace(circuit.protocol, faithfulness=None)
    assert again.scores == pytest.approx(dict(circuit.scores), abs=1e-12)
    table = score_edges(model, *PAIRS, metric=metric, method=method)  # type: ignore[arg-type]
    np.testing.assert_allclose(found.value, table.value, atol=1e-12)
    rows = interp.frame(found)
    assert len(rows.columns) <= 12 and rows.edge[rows.kept].tolist() == list(circuit.edges)
    with pytest.raises(ValueError, match="the result of FindCircuit is required"):
        Circuit.of_result(table)


def test_both_directions_find_the_same_edges_with_opposite_scores() -> None:
    model, metric = HookedTransformer(build("gpt2")), logit_difference(3, 4)
    one, other = (
        find_circuit(model, *PAIRS, metric=metric, edges=25, direction=way)  # type: ignore[arg-type]
        for way in ("denoise", "noise")
    )
    assert one.edges == other.edges
    assert [*one.scores.values()] == [-score for score in other.scores.values()]


# how many edges, and what is said of them


@pytest.mark.parametrize("search", ["top_n", "greedy"])
@pytest.mark.parametrize("target", [None, 0.5, 0.95])
def test_without_a_limit_as_many_edges_are_kept_as_are_faithful_enough(
    search: str, target: float | None
) -> None:
    """Against a slow search over the same sizes."""
    model, metric = HookedTransformer(build("llama-gqa")), logit_difference(3, 4)
    circuit = find_circuit(model, *PAIRS, metric=metric, search=search, faithfulness=target)  # type: ignore[arg-type]
    values = torch.from_numpy(score_edges(model, *PAIRS, metric=metric, method="eap-ig-inputs").value.values)
    values = values.abs().nan_to_num(nan=-torch.inf)

    def share(n: int) -> float:
        picked = largest(values, n) if search == "top_n" else backwards(GRAPH, values, n)
        masks = torch.stack((GRAPH.exists, ~GRAPH.exists & False, picked & GRAPH.exists))
        full, empty, found = interchange(model, *PAIRS, masks, metric=metric).value.values
        return float((found - empty) / (full - empty))

    wanted = 0.8 if target is None else target
    sizes = [n for n in (4, 8, 16, 32, 64, 128, 256) if n < len(GRAPH)]
    coarse = next((n for n in sizes if share(n) >= wanted), len(GRAPH))
    below = max((n for n in (0, *sizes) if n < coarse), default=0)
    finer = [round(max(below, 1) * (coarse / max(below, 1)) ** (i / 4)) for i in (1, 2, 3)]
    n = next((n for n in finer if below < n < coarse and share(n) >= wanted), coarse)
    picked = largest(values, n) if search == "top_n" else backwards(GRAPH, values, n)
    assert set(circuit.edges) == set(GRAPH.names(connected(GRAPH, picked & GRAPH.exists)))
    assert circuit.protocol is not None
    assert circuit.protocol.faithfulness == pytest.approx(share(n), abs=1e-9) and share(n) >= wanted
    assert circuit.notes[0].startswith(f"{n} edges") and f"keep {wanted:.0%}" in circuit.notes[0]


def test_scores_that_only_rank_give_no_note_of_their_integral() -> None:
    model, ask = (
        HookedTransformer(build("gpt2")),
        {"metric": logit_difference(3, 4), "method": "eap-ig-inputs"},
    )
    assert score_edges(model, *PAIRS, **ask).attrs["notes"], "they have one"  # type: ignore[arg-type]
    note.cache_clear()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        circuit = find_circuit(model, *PAIRS, edges=9, **ask)  # type: ignore[arg-type]
    assert not any("integral" in str(each.message) for each in given)
    assert not any("integral" in text for text in circuit.notes)


def test_a_metric_that_nothing_changes_has_no_size_that_is_enough() -> None:
    model = HookedTransformer(build("llama-gqa"))
    same = of_logits(lambda logits: 0 * logits[:, -1, 3])
    with pytest.raises(ValueError, match=r"no edge at all have the same metric.*give edges=n"):
        find_circuit(model, *PAIRS, metric=same, method="exact")


def test_pruned_edges_are_named_with_the_strongest_and_what_they_change() -> None:
    c = planted("backup")
    circuit = find_circuit(
        HookedTransformer(c.model), c.clean, c.corrupt, metric=metric_of(c), method="exact", edges=10
    )
    (said,) = [text for text in circuit.notes if "pruned" in text]
    assert said.startswith("1 of 10 edges were pruned") and "L1H1->logits" in said
    assert "faithfulness before 1.00, after 1.00" in said and "search='greedy'" in said
    greedy = find_circuit(
        HookedTransformer(c.model), c.clean, c.corrupt, metric=metric_of(c), method="exact", edges=10,
        search="greedy",
    )  # fmt: skip
    assert not any("search='greedy'" in text for text in greedy.notes)


def test_a_direction_that_keeps_little_names_the_one_that_keeps_more() -> None:
    """Corrupting one branch of an OR changes nothing, so that direction finds neither branch."""
    c = planted("either")
    ask = functools.partial(
        find_circuit, HookedTransformer(c.model), c.clean, c.corrupt, metric=metric_of(c), method="exact",
        edges=7,
    )  # fmt: skip
    (said,) = [text for text in ask(direction="noise").notes if "direction" in text]
    assert "keep 0.00" in said and "direction='denoise' 1.00" in said and "each of which is enough" in said
    assert not any("direction=" in text for text in ask().notes)


def test_effects_that_cancel_over_the_prompts_are_named() -> None:
    """An edge that raises the metric in every other pair, and lowers it in the others: its mean is 0."""
    c = planted("two_hop", 4)
    model = HookedTransformer(c.model)
    turned = c.answer.clone(), c.wrong.clone()
    turned[0][1::2], turned[1][1::2] = c.wrong[1::2], c.answer[1::2]
    noise = find_circuit(model, c.clean, c.corrupt, metric=logit_difference(*turned), method="exact", edges=4)
    (said,) = [text for text in noise.notes if "cancel" in text]
    strongest = said.partition("the strongest is ")[2].partition(" ")[0]
    assert strongest in c.edges and strongest not in noise.edges
    plain = find_circuit(model, c.clean, c.corrupt, metric=metric_of(c), method="exact", edges=6)
    assert not any("cancel" in text for text in plain.notes)


def test_notes_and_faithfulness_survive_a_file_and_pickling(tmp_path: Path) -> None:
    circuit = find_circuit(HookedTransformer(build("llama-gqa")), *PAIRS, metric=logit_difference(3, 4))
    circuit.save(tmp_path / "circuit.json")
    for again in (Circuit.load(tmp_path / "circuit.json"), pickle.loads(pickle.dumps(circuit))):
        assert again == circuit and again.notes and again.protocol == circuit.protocol
    assert str(circuit).splitlines()[1].startswith("  note: ") and "faithfulness there" in str(circuit)


def test_a_search_without_its_limit_is_refused() -> None:
    ask = functools.partial(
        find_circuit, HookedTransformer(build("gpt2")), *PAIRS, metric=logit_difference(3, 4)
    )
    with pytest.raises(ValueError, match="one of edges, threshold and faithfulness is required"):
        ask(edges=3, faithfulness=0.5)
    with pytest.raises(ValueError, match="one of edges, threshold and faithfulness is required"):
        ask(search="threshold")
    with pytest.raises(ValueError, match=r"a faithfulness above 0 and at most 1 is required, got 1\.5"):
        ask(faithfulness=1.5)
    with pytest.raises(
        ValueError, match=r"edges=n or threshold=\.\.\. is required: how many edges are enough"
    ):
        FindCircuit().bind(HookedTransformer(build("gpt2")))
    with pytest.raises(ValueError, match=r"requires edges=n or threshold=\.\.\., got faithfulness"):
        ask(search="iterative", faithfulness=0.5)
    with pytest.raises(ValueError, match=r"search='threshold' requires threshold=... alone, got edges=3"):
        ask(search="threshold", edges=3)
    with pytest.raises(ValueError, match=r"edges=n or threshold=... alone"):
        ask(search="iterative", edges=3, threshold=0.1)
    with pytest.raises(ValueError, match=r"1 to \d+ edges are required, got 0"):
        ask(edges=0)
    with pytest.raises(ValueError, match="threshold must be a number above 0"):
        ask(search="threshold", threshold=0.0)
    with pytest.raises((ValueError, TypeCheckError), match="search"):
        ask(search="best", edges=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reference prompts belong to replacement='mean'"):
        ask(edges=3, reference=PAIRS[0])
    with pytest.raises(ValueError, match="asks the same prompts again in every round"):
        FindCircuit(search="iterative", edges=3).bind(HookedTransformer(build("gpt2")))
    with pytest.raises((ValueError, TypeCheckError), match="rank"):
        edge_stability(table_of(some_scores()), 3, rank="best")  # type: ignore[arg-type]
