"""What holds for every causal question: the function is the record run, and results are one tidy table."""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import interp
from interp import HookedTransformer, Read, causal
from interp.causal import (
    Ablate,
    AttributionPatch,
    CausalTrace,
    KnockOut,
    Patch,
    PathPatch,
    Recall,
    ShortCircuit,
)
from interp.data.batch import Batch
from interp.edits import Zero
from interp.model.edits import Edit, Scale
from interp.passes.question import Question
from tests.batches import in_batches
from tests.configs import build, some_tokens
from tests.tables import PART_COLUMNS

CLEAN, CORRUPT = some_tokens(rows=4), some_tokens(rows=4, seed=1)
METRIC = interp.logit_difference([3, 4, 5, 6], [6, 7, 8, 9])
SPAN = torch.zeros(4, 9, dtype=torch.bool)
SPAN[:, 5:] = True


@dataclass(frozen=True, eq=False)
class Asked:
    """A question and the function of its name."""

    question: Question
    function: Callable[..., xr.Dataset]
    required: tuple[str, ...] = ()
    """Fields that the function takes by position."""

    @property
    def pairs(self) -> bool:
        return isinstance(self.question, Patch | AttributionPatch | PathPatch)

    def called(self, size: int, *edits: Edit) -> xr.Dataset:
        given: dict[str, Any] = {f.name: getattr(self.question, f.name) for f in fields(self.question)}
        first = [given.pop(name) for name in self.required]
        prompts = (CLEAN, CORRUPT) if self.pairs else (CLEAN,)
        data = (in_batches(model(), each, size) for each in prompts)
        return self.function(model().edited(edits), *data, *first, **given)

    def run(self, batches: list[Batch], **how: object) -> xr.Dataset:
        (found,) = interp.run([self.question], model(), batches, **how).values()  # type: ignore[arg-type]
        return found


def model() -> HookedTransformer:
    return HookedTransformer(build("llama-gqa"))


def trace() -> CausalTrace:
    rows = model().transformer(CLEAN)[:, -1].argmax(-1)
    sigma = causal.subject_spread(model(), CLEAN, range(2, 4))
    return CausalTrace(range(2, 4), rows.tolist(), samples=2, sigma=sigma)


QUESTIONS: dict[str, Asked] = {
    "ablate": Asked(Ablate("head", change=Zero(), metric=METRIC), causal.ablate),
    "ablate by pos": Asked(Ablate(["L0H1", "L1.mlp"], change=Zero(), metric=METRIC, by=("part", "pos")), causal.ablate),
    "patch": Asked(Patch("z", metric=METRIC), causal.patch),
    "patch by pos": Asked(Patch("resid_pre", metric=METRIC, direction="noise"), causal.patch),
    "attribution_patch": Asked(AttributionPatch("z", metric=METRIC), causal.attribution_patch),
    "path_patch": Asked(PathPatch("L1G0.k", metric=METRIC), causal.path_patch),
    "path_patch by pos": Asked(PathPatch(metric=METRIC, by=("part", "pos")), causal.path_patch),
    "knock_out": Asked(
        KnockOut([-1], [1, 2], metric=METRIC, by=("layer", "head")), causal.knock_out, ("queries", "keys")
    ),
    "knock_out by key": Asked(
        KnockOut([-1], [1, 2], metric=METRIC, by=("key",)), causal.knock_out, ("queries", "keys")
    ),
    "short_circuit": Asked(ShortCircuit([0, range(2)], metric=METRIC), causal.short_circuit),
    "recall": Asked(Recall(SPAN, [1]), causal.recall, ("span",)),
    "causal_trace": Asked(trace(), causal.causal_trace, ("subject", "answer")),
}  # fmt: skip


def batches(size: int) -> list[Batch]:
    batch = Batch(CLEAN, corrupt=CORRUPT).numbered()
    return list(batch.split(size))


@pytest.mark.parametrize("name", [name for name in QUESTIONS if name != "causal_trace"])  # it has other facts
def test_edits_of_a_run_are_those_of_the_edited_model(name: str) -> None:
    asked, edits = QUESTIONS[name], [Edit("L0.mlp", Scale(0.5))]
    edited = asked.called(4, *edits)
    xr.testing.assert_identical(edited, asked.run(batches(4), edits=edits))
    assert float(abs(edited["each"] - asked.run(batches(4))["each"]).max()) > 1e-9


@pytest.mark.parametrize("name", QUESTIONS)
def test_results_are_one_tidy_table_with_a_label_for_every_dim(name: str) -> None:
    asked = QUESTIONS[name]
    for question in (asked.question, replace(asked.question, each=False)):  # type: ignore[call-arg]
        found = Asked(question, asked.function).run(batches(4))
        assert {"value", "low", "high", "n"} <= set(found.data_vars)
        assert not [x for x in found.data_vars if str(x).endswith(("_low", "_high", "_null", "_se"))]
        assert [dim for dim in found.dims if dim not in found.coords] == []
        assert all("unit" in x.attrs for x in found.data_vars.values() if x.dtype.kind == "f")
        table = interp.frame(found)
        assert len(table) == found.value.size and len(table.columns.difference(PART_COLUMNS)) <= 12
        assert ("each" in found) == getattr(question, "each")  # noqa: B009
    assert (found.n == 4).all() or name == "causal_trace"


@pytest.mark.parametrize("name", QUESTIONS)
def test_moments_alone_are_those_of_all_rows(name: str) -> None:
    asked = QUESTIONS[name]
    whole = asked.run(batches(4))
    small = Asked(replace(asked.question, each=False), asked.function).run(batches(1))  # type: ignore[call-arg]
    for variable in ("value", "low", "high", "n"):
        np.testing.assert_allclose(small[variable], whole[variable], rtol=1e-9, atol=1e-12)


def test_parts_have_their_one_name() -> None:
    network = model()
    heads = [[f"L{layer}H{h}" for h in range(4)] for layer in range(2)]
    for found in (
        causal.patch(network, CLEAN, CORRUPT, "z", metric=METRIC, by=("layer", "pos", "head")),
        causal.attribution_patch(network, CLEAN, CORRUPT, "z", metric=METRIC),
        causal.ablate(network, CLEAN, "head", change=Zero(), metric=METRIC),
        QUESTIONS["knock_out"].called(4),
    ):
        assert found.part.dims == ("layer", "head") and found.part.values.tolist() == heads
    for site, names in {
        "resid_pre": ["L0.resid", "L1.resid"], "attn_out": ["L0.attn", "L1.attn"], "mlp_out": ["L0.mlp", "L1.mlp"],
        "z": ["L0.z", "L1.z"], "pattern": ["L0.pattern", "L1.pattern"],
    }.items():  # fmt: skip
        found = causal.patch(network, CLEAN, CORRUPT, site, metric=METRIC, by=("layer",))
        assert found.part.values.tolist() == names
        assert all(
            interp.Part.of(name).site == Read(f"blocks.{i}.{inner(site)}").site
            for i, name in enumerate(names)
        )
    neurons = causal.patch(network, CLEAN, CORRUPT, "mlp.hook_post", metric=METRIC, by=("layer", "neuron"))
    assert str(neurons.part.sel(layer=1, neuron=7).values) == "L1N7"
    values = causal.patch(network, CLEAN, CORRUPT, "v_input", metric=METRIC, by=("layer", "kv_head"))
    assert str(values.part.sel(layer=1, kv_head=1).values) == "L1G1.v"
    assert "part" not in causal.patch(network, CLEAN, CORRUPT, "k", metric=METRIC).coords, "keys are no part"


def inner(site: str) -> str:
    return {"z": "attn.hook_z", "pattern": "attn.hook_pattern"}.get(site, f"hook_{site}")


@pytest.mark.parametrize("name", [name for name in QUESTIONS if hasattr(QUESTIONS[name].question, "by")])
def test_dims_are_a_list_of_known_words(name: str) -> None:
    asked = QUESTIONS[name]
    with pytest.raises(KeyError, match="not 'token'"):
        replace(asked.question, by=("token",)).bind(model())  # type: ignore[call-arg]


@pytest.mark.parametrize("name", QUESTIONS)
def test_rows_on_which_the_model_is_not_finite_are_set_aside(name: str) -> None:
    network = build("llama-gqa")
    poisoned = HookedTransformer(network.edited([Edit("embed", _poison)]))
    clean, corrupt = (tokens.masked_fill(tokens == 30, 29) for tokens in (CLEAN, CORRUPT))
    clean[2, 0] = corrupt[2, 0] = 30
    batch = Batch(clean, corrupt=corrupt).numbered()
    found = interp.run([QUESTIONS[name].question], poisoned, [batch])
    assert found.rejected["row"].tolist() == [2] and found.rows == 3


def _poison(value: torch.Tensor) -> torch.Tensor:
    """NaN where the embedding is that of token 30."""
    mark = build("llama-gqa").embed.weight[30]
    value[(value == mark).all(-1)] = torch.nan
    return value


CLOSED: dict[type[Question], dict[str, object]] = {
    Patch: {"site": "z", "by": ["layer"], "direction": "noise"},
    AttributionPatch: {"site": "resid_pre", "by": ["pos"]},
    PathPatch: {"receivers": ["L1H0.q", "L1G0.k"], "senders": ["L0H1", "L0.mlp"], "by": ["part", "pos"]},
    KnockOut: {"queries": [-1], "keys": [1, 2], "by": ["head"], "heads": [1, 3]},
    ShortCircuit: {"layers": [0, [0, 1]], "each": False},
    CausalTrace: {"subject": "cat", "answer": 5, "kind": "mlp", "sigma": 0.5, "severed": "attn"},
}


@pytest.mark.parametrize("kind", CLOSED, ids=lambda kind: kind.__name__)
def test_closed_fields_are_json(kind: type[Question]) -> None:
    given = CLOSED[kind]
    again = kind(**json.loads(json.dumps(given)))
    assert {name: getattr(again, name) for name in given} == given
    assert again.bind(model()).name == again.name
