"""What stands in is a record that results carry; what it cannot mean is refused, and sets show redundant circuits."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

import interp
from interp import HookedTransformer
from interp.causal import Ablate, EdgeGraph, ablate
from interp.causal.stand_ins import other_rows, recorded, slot_means
from interp.data.batch import Batch
from interp.data.pairs import Pairs
from interp.model.edits import Mean, Resample, Zero
from interp.model.parts import Part
from interp.model.tap import Read
from interp.passes.edit_text import change_from_json
from interp.passes.metrics import logit_difference
from interp.passes.observe import observe
from interp.zoo.planted import PLANTED
from tests.causal.test_ablation import ANSWER, GROUPS, METRIC, OTHER, TOKENS, WRONG, padded, subject
from tests.configs import build
from tests.loops import over
from tests.tolerances import assert_close


def test_a_result_says_what_stood_in() -> None:
    found = ablate(subject("gpt2"), TOKENS, "mlp", change=Resample(7), metric=METRIC)
    assert change_from_json(json.loads(found.attrs["change"])) == Resample(7)
    assert json.loads(found.attrs["change"]) == {"change": "resample", "seed": 7}


def groupings() -> Iterator[list[int]]:
    yield from ([0, 0], [0] * 7, [0, 1, 0, 1, 1], [2, 0, 0, 2, 1, 1, 1, 1])


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_taken_once_within_their_group_and_never_by_themselves(seed: int) -> None:
    for groups in map(torch.tensor, groupings()):
        found = other_rows(groups, seed)
        assert not (found == torch.arange(len(groups))).any()
        assert sorted(found.tolist()) == list(range(len(groups)))
        assert torch.equal(groups[found], groups)


def test_means_of_half_precision_models_are_summed_in_float32() -> None:
    model, name = build("gpt2", torch.bfloat16), "blocks.0.attn.hook_z"
    slots = torch.arange(9).expand(4, 9)
    means, counts = slot_means(model, Batch(TOKENS), partial(recorded, names=[name]), slots, 9, batch_size=3)
    batches = Batch(TOKENS).split(3)  # in half precision other rows beside them round otherwise
    values = torch.cat([observe(model, batch, [Read(name)]).trace[name] for batch in batches])
    assert values.dtype == torch.bfloat16 and means[name].dtype == torch.float32
    assert_close(means[name], values.double().mean(0).float())
    assert counts.tolist() == [4] * 9
    found = ablate(HookedTransformer(model, None), TOKENS, change=Mean(), metric=METRIC)
    exact = ablate(subject("gpt2"), TOKENS, change=Mean(), metric=METRIC)
    assert_close(*(torch.from_numpy(x["each"].values).double() for x in (found, exact)), dtype=torch.bfloat16)


BAD: dict[str, tuple[type[Exception], str, dict[str, object]]] = {
    "mean of one prompt": (ValueError, r"Mean\(over='position'\) requires reference", {"change": Mean(), "n": 1}),
    "no groups": (ValueError, r"Mean\(over='template'\) requires the groups", {"change": Mean("template")}),
    "a group of one": (
        ValueError, "two prompts in every group",
        {"change": Mean("template"), "groups": ["a", "a", "a", "b"]},
    ),
    "no reference": (ValueError, r"Mean\(over='reference'\) requires reference", {"change": Mean("reference")}),
    "one row": (ValueError, r"Resample\(\) requires reference prompts", {"change": Resample(), "n": 1}),
    "another number of corrupted prompts": (
        ValueError, "one reference prompt per prompt, got 3", {"change": Resample(), "reference": OTHER[:3]},
    ),
    "shorter corrupted prompts": (ValueError, "token for token", {"change": Resample(), "reference": OTHER[:, :8]}),
    "short reference": (
        ValueError, "reach as far as the prompts, got 8 tokens for 9", {"change": Mean(), "reference": OTHER[:, :8]},
    ),
    "reference for nothing": (ValueError, r"Zero\(\) takes no values", {"change": Zero(), "reference": OTHER}),
    "groups for nothing": (ValueError, "no use for groups", {"change": Mean(), "groups": GROUPS}),
    "too few groups": (ValueError, "one group per prompt", {"change": Mean("template"), "groups": ["a"]}),
    "unknown kind": (ValueError, "nearest: head", {"change": Zero(), "parts": "heads"}),
    "unknown part": (KeyError, "no part 'L0Q1'", {"change": Zero(), "parts": [["L0Q1"]]}),
    "no such head": (IndexError, "the index of a head is 0 to 3", {"change": Zero(), "parts": ["L0H4"]}),
    "no such layer": (IndexError, r"layer must be in \[0, 1\], got 2", {"change": Zero(), "layers": [2]}),
    "no such layer in a set": (IndexError, "layers are 0 to 1", {"change": Zero(), "parts": [["L2.mlp"]]}),
    "empty set": (ValueError, "lists of at least one", {"change": Zero(), "parts": [[]]}),
    "layers of sets": (ValueError, "name their layers", {"change": Zero(), "parts": ["L0.mlp"], "layers": [0]}),
    "unknown dim": (KeyError, "nearest: pos", {"change": Zero(), "by": ("position",)}),
}  # fmt: skip


@over("case", BAD)
def test_what_has_no_meaning_is_refused_by_name(case: str) -> None:
    error, message, given = BAD[case]
    n = given.get("n", 4)
    rest = {key: value for key, value in given.items() if key != "n"}
    metric = logit_difference(ANSWER[:n], WRONG[:n])  # type: ignore[misc]
    with pytest.raises(error, match=message):
        ablate(subject("gpt2"), TOKENS[:n], metric=metric, **rest)  # type: ignore[arg-type,misc]


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (Ablate(change=Zero(), reference=OTHER), r"Zero\(\) takes no values"),
        (Ablate(change=Zero(), groups=GROUPS), "no use for groups"),
        (Ablate(change=Resample(), reference=OTHER), "from each prompt's corrupted one"),
        (Ablate(change=Mean("template"), reference=OTHER), "requires the groups of the prompts"),
    ],
)
def test_a_question_about_data_refuses_what_it_would_not_look_at(question: Ablate, message: str) -> None:
    pairs = Pairs(TOKENS, OTHER)
    with pytest.raises(ValueError, match=message):
        interp.run([replace(question, metric=METRIC)], subject("gpt2"), pairs)
    with pytest.raises(ValueError, match=message):
        ablate(
            subject("gpt2"),
            pairs,
            change=question.change,
            reference=question.reference,
            groups=question.groups,
            metric=METRIC,
        )


def test_prompts_of_several_lengths_have_cells_of_their_own_positions_only() -> None:
    model, batch = subject("gpt2"), padded(TOKENS, (9, 7, 8, 5))
    found = ablate(model, batch, change=Zero(), metric=METRIC, by=("layer", "pos"))
    assert found.n.isel(layer=0).values.tolist() == [4] * 5 + [3, 3, 2, 1]
    assert found["each"].notnull().isel(layer=0).sum("pos").values.tolist() == [9, 7, 8, 5]
    with pytest.raises(ValueError, match="token for token"):
        ablate(model, batch, change=Resample(), metric=METRIC)
    left, right = (Batch.of([[1, 2, 3], [4, 5], [6, 7], [8, 9]], side=side) for side in ("left", "right"))  # type: ignore[arg-type]
    means = [ablate(model, each, change=Mean(), metric=METRIC)["each"].values for each in (left, right)]
    assert_close(torch.from_numpy(means[0]), torch.from_numpy(means[1]))


def test_a_model_without_neurons_says_so() -> None:
    for name, kind in (("attention-only", "mlp"), ("gpt-oss", "neuron")):
        with pytest.raises(KeyError, match="this model has no"):
            ablate(subject(name), TOKENS, kind, change=Zero(), metric=METRIC)  # type: ignore[arg-type]


def test_the_spellings_of_other_tools_are_read() -> None:
    names = EdgeGraph.of(build("gpt2").config).senders
    assert [Part.of(name).site.split(".")[1] for name in names[1:]] == [name[1] for name in names[1:]]
    assert [str(Part.of(name)) for name in names] == list(names)
    found = ablate(
        subject("gpt2"),
        TOKENS,
        ["a0.h1", "m1", (1, 2), "blocks.0.hook_mlp_out"],
        change=Zero(),
        metric=METRIC,
    )
    assert found.part.values.tolist() == ["L0H1", "L1.mlp", "L1H2", "L0.mlp"]


# --- planted circuits -------------------------------------------------------------------------------------------------

HIDDEN = {"either": ("L0H1", "L1H3"), "backup": ("L0H3", "L1H2")}


@pytest.mark.parametrize("resampled", [False, True])
@pytest.mark.parametrize("name", HIDDEN)
def test_redundant_heads_show_nothing_singly_and_everything_together(name: str, resampled: bool) -> None:
    circuit = PLANTED[name](0, 16)
    model, heads = HookedTransformer(circuit.model, None), HIDDEN[name]
    metric = logit_difference(circuit.answer, circuit.wrong)
    given = {"change": Resample(), "reference": circuit.corrupt} if resampled else {"change": Zero()}
    found = ablate(model, circuit.clean, [[h] for h in heads] + [list(heads)], metric=metric, **given)  # type: ignore[arg-type]
    whole = float(found.base.mean())
    first, second, both = found.value.values
    assert abs(first) < 0.1 * whole and abs(second) < 0.1 * whole
    assert both < -0.9 * whole


def test_the_negative_head_is_the_one_whose_loss_raises_the_answer() -> None:
    circuit = PLANTED["backup"](0, 16)
    metric = logit_difference(circuit.answer, circuit.wrong)
    found = ablate(HookedTransformer(circuit.model, None), circuit.clean, change=Zero(), metric=metric)
    largest = found.stack(cell=("layer", "head"))
    assert largest.part[int(largest.value.values.argmax())] == "L1H1"
    assert float(found.low.sel(layer=1, head=1)) > 0
