"""Protocols are records that results carry, refuse what they cannot mean, and see redundant circuits in sets only."""

import json
from collections.abc import Iterator

import pytest
import torch

from interp import HookedTransformer
from interp.analyses.ablation import ablate, part_named
from interp.analyses.ablation_protocols import (
    Mean,
    Protocol,
    Resample,
    Zero,
    as_json,
    from_json,
    other_rows,
    slot_means,
)
from interp.analyses.graph import EdgeGraph
from interp.engine.batch import Batch
from interp.engine.metrics import logit_difference
from interp.engine.observe import observe
from interp.model.tap import Read
from interp.zoo.planted import PLANTED
from tests.analyses.test_ablation import ANSWER, GROUPS, METRIC, OTHER, TOKENS, WRONG, padded, subject
from tests.configs import build
from tests.tolerances import assert_close


@pytest.mark.parametrize("protocol", [Zero(True), Mean("template"), Mean("reference", True), Resample(7)])
def test_the_protocol_of_a_result_can_be_read_back(protocol: Protocol) -> None:
    assert from_json(as_json(protocol)) == protocol
    found = ablate(subject("gpt2"), TOKENS, "mlp", protocol=Zero(), metric=METRIC)
    assert from_json(found.attrs["protocol"]) == Zero()
    assert json.loads(found.attrs["protocol"]) == {"ablation": "zero", "freeze_patterns": False}


def groupings() -> Iterator[list[int]]:
    yield from ([0, 0], [0] * 7, [0, 1, 0, 1, 1], [2, 0, 0, 2, 1, 1, 1, 1])


@pytest.mark.parametrize("seed", range(5))
def test_no_row_takes_its_own_value_and_every_row_is_taken_within_its_group(seed: int) -> None:
    for groups in map(torch.tensor, groupings()):
        found = other_rows(groups, seed)
        assert not (found == torch.arange(len(groups))).any()
        assert sorted(found.tolist()) == list(range(len(groups)))
        assert torch.equal(groups[found], groups)


def test_means_of_half_precision_models_are_summed_in_float32() -> None:
    model, name = build("gpt2", torch.bfloat16), "blocks.0.attn.hook_z"
    slots = torch.arange(9).expand(4, 9)
    means, counts = slot_means(model, Batch(TOKENS), [name], slots, 9, batch_size=3)
    values = observe(model, Batch(TOKENS), [Read(name)]).trace[name]
    assert values.dtype == torch.bfloat16 and means[name].dtype == torch.float32
    assert_close(means[name], values.double().mean(0).float())
    assert counts.tolist() == [4] * 9
    found = ablate(HookedTransformer(model, None), TOKENS, protocol=Mean(), metric=METRIC)
    exact = ablate(subject("gpt2"), TOKENS, protocol=Mean(), metric=METRIC)
    assert_close(*(torch.from_numpy(x["each"].values).double() for x in (found, exact)), dtype=torch.bfloat16)


BAD: dict[str, tuple[type[Exception], str, dict[str, object]]] = {
    "mean of one prompt": (ValueError, r"Mean\(over='position'\) requires reference", {"protocol": Mean(), "n": 1}),
    "no groups": (ValueError, r"Mean\(over='template'\) requires the groups", {"protocol": Mean("template")}),
    "a group of one": (
        ValueError, "two prompts in every group",
        {"protocol": Mean("template"), "groups": ["a", "a", "a", "b"]},
    ),
    "no reference": (ValueError, r"Mean\(over='reference'\) requires reference", {"protocol": Mean("reference")}),
    "one row": (ValueError, r"Resample\(\) requires reference prompts", {"protocol": Resample(), "n": 1}),
    "another number of twins": (
        ValueError, "one reference prompt per prompt, got 3", {"protocol": Resample(), "reference": OTHER[:3]},
    ),
    "shorter twins": (ValueError, "token for token", {"protocol": Resample(), "reference": OTHER[:, :8]}),
    "short reference": (
        ValueError, "reach as far as the prompts, got 8 tokens for 9", {"protocol": Mean(), "reference": OTHER[:, :8]},
    ),
    "reference for nothing": (ValueError, r"Zero\(\) takes no values", {"protocol": Zero(), "reference": OTHER}),
    "groups for nothing": (ValueError, "no use for groups", {"protocol": Mean(), "groups": GROUPS}),
    "too few groups": (ValueError, "one group per prompt", {"protocol": Mean("template"), "groups": ["a"]}),
    "unknown kind": (KeyError, "nearest: head", {"protocol": Zero(), "what": "heads"}),
    "unknown part": (KeyError, "no part 'a0.n1'", {"protocol": Zero(), "what": [["a0.n1"]]}),
    "no such head": (IndexError, "4 along 'h', got index 4", {"protocol": Zero(), "what": [["a0.h4"]]}),
    "no such layer": (IndexError, r"layer must be in \[0, 1\], got 2", {"protocol": Zero(), "layers": [2]}),
    "no such layer in a set": (KeyError, "layers are 0 to 1", {"protocol": Zero(), "what": [["m2"]]}),
    "empty set": (ValueError, "sets of at least one name", {"protocol": Zero(), "what": [[]]}),
    "names without sets": (ValueError, "sets of at least one name", {"protocol": Zero(), "what": ["m0"]}),
    "layers of sets": (ValueError, "name their layers", {"protocol": Zero(), "what": [["m0"]], "layers": [0]}),
    "unknown dim": (KeyError, "nearest: pos", {"protocol": Zero(), "by": ("position",)}),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_has_no_meaning_is_refused_by_name(case: str) -> None:
    error, message, given = BAD[case]
    n = given.get("n", 4)
    rest = {key: value for key, value in given.items() if key != "n"}
    metric = logit_difference(ANSWER[:n], WRONG[:n])  # type: ignore[misc]
    with pytest.raises(error, match=message):
        ablate(subject("gpt2"), TOKENS[:n], metric=metric, **rest)  # type: ignore[arg-type,misc]


def test_prompts_of_several_lengths_have_no_cells_by_position_and_no_other_row() -> None:
    model, batch = subject("gpt2"), padded(TOKENS, (9, 7, 8, 5))
    with pytest.raises(ValueError, match="cells by pos require prompts of one length"):
        ablate(model, batch, protocol=Zero(), metric=METRIC, by=("layer", "pos"))
    with pytest.raises(ValueError, match="token for token"):
        ablate(model, batch, protocol=Resample(), metric=METRIC)
    left = Batch.of([[1, 2, 3], [4, 5], [6, 7], [8, 9]], side="left")
    with pytest.raises(ValueError, match="no padding on the left"):
        ablate(model, left, protocol=Mean(), metric=METRIC)


def test_a_model_without_neurons_says_so() -> None:
    for name, kind in (("attention-only", "mlp"), ("gpt-oss", "neuron")):
        with pytest.raises(KeyError, match="this model has no"):
            ablate(subject(name), TOKENS, kind, protocol=Zero(), metric=METRIC)  # type: ignore[arg-type]


def test_names_are_those_of_the_edge_graph() -> None:
    names = [n for n in EdgeGraph.of(build("gpt2").config).senders if n != "input"]
    assert [part_named(n).site.split(".")[1] for n in names] == [n[1] for n in names]
    assert part_named("input") == part_named("r0")


# --- planted circuits -------------------------------------------------------------------------------------------------

HIDDEN = {"either": ("a0.h1", "a1.h3"), "backup": ("a0.h3", "a1.h2")}


@pytest.mark.parametrize("twins", [False, True])
@pytest.mark.parametrize("name", HIDDEN)
def test_redundant_heads_show_nothing_singly_and_everything_together(name: str, twins: bool) -> None:
    circuit = PLANTED[name](0, 16)
    model, heads = HookedTransformer(circuit.model, None), HIDDEN[name]
    metric = logit_difference(circuit.answer, circuit.wrong)
    given = {"protocol": Resample(), "reference": circuit.corrupt} if twins else {"protocol": Zero()}
    found = ablate(model, circuit.clean, [[h] for h in heads] + [list(heads)], metric=metric, **given)  # type: ignore[arg-type]
    whole = float(found.base.mean())
    first, second, both = found.effect.values
    assert abs(first) < 0.1 * whole and abs(second) < 0.1 * whole
    assert both < -0.9 * whole


def test_the_negative_head_is_the_one_whose_loss_raises_the_answer() -> None:
    circuit = PLANTED["backup"](0, 16)
    metric = logit_difference(circuit.answer, circuit.wrong)
    found = ablate(HookedTransformer(circuit.model, None), circuit.clean, protocol=Zero(), metric=metric)
    largest = found.effect.stack(part=("layer", "head")).idxmax("part").item()
    assert largest == (1, 1)
    assert float(found.effect_low.sel(layer=1, head=1)) > 0
