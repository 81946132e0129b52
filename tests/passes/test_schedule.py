"""Questions that intervene in one run: what each says alone, from as few passes as they can share."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import interp
from interp.attention import AttentionEntropy
from interp.causal import Ablate, KnockOut, Patch, ShortCircuit
from interp.causal.contrast import paired
from interp.data.stream import prompt_source
from interp.edits import Mean, Resample, Zero
from interp.lenses import LogitLens
from interp.metrics import kl_divergence, logit_difference, of_logits
from interp.model.transformer import Transformer
from interp.passes.question import Question
from interp.passes.sweep import Sweep
from interp.residual import Attribute
from tests.configs import build, some_tokens
from tests.loops import over

if TYPE_CHECKING:
    import xarray as xr

CLEAN, CORRUPT = some_tokens(), some_tokens(seed=1)
CORRUPT[:, :2] = CLEAN[:, :2]
METRIC = logit_difference([3, 4, 5], [6, 7, 8])
SAME: dict[str, Question] = {
    "z": Patch("z", METRIC),
    "resid_pre": Patch("resid_pre", METRIC),
    "noised z": Patch("z", METRIC, direction="noise"),
    "noised mlp": Patch("mlp_out", METRIC, direction="noise"),
    "zero": Ablate("head", Zero(), METRIC),
    "resampled": Ablate("mlp", Resample(), METRIC),
}
"""Of one metric."""
OTHER: dict[str, Question] = {
    "other answers": Patch("z", logit_difference([7, 8, 9], [1, 2, 3])),
    "one answer": Patch("z", logit_difference([3, 4, 5])),
    "function": Patch("z", lambda logits: logits[:, -1, 3]),
    "whole row": Ablate("head", Zero(), of_logits(lambda x: x[..., 2].mean(1), everywhere=True)),
    "divergence": Patch("z", kl_divergence()),
    "noised divergence": Patch("z", kl_divergence(), direction="noise"),
    "again": Patch("resid_pre", kl_divergence(), direction="noise"),
    "pattern": Patch("pattern", METRIC),
    "scores": Patch("attn_scores", METRIC, by=("layer", "query", "key")),
    "read by queries": Patch("q_input", METRIC),
    "read by the MLP": Patch("mlp_in", METRIC),
    "frozen": Ablate("mlp", Zero(), METRIC, freeze_patterns=True),
    "frozen head": Ablate("head", Zero(), METRIC, freeze_patterns=True),
    "mean": Ablate("mlp", Mean("position"), METRIC, reference=CORRUPT),
    "short": ShortCircuit(metric=METRIC),
    "knocked out": KnockOut(queries=(-1,), keys=range(3), metric=METRIC),
    "path": interp.causal.PathPatch(metric=METRIC),
    "by gradient": interp.causal.AttributionPatch("z", METRIC),
    "lens": LogitLens(),
    "entropy": AttentionEntropy(),
    "parts": Attribute([3, 4, 5], [6, 7, 8]),
    "edges": interp.circuits.EdgeEffects(METRIC),
}
"""Of others, or from another run."""


def answers(name: str, questions: Mapping[str, Question]) -> "Mapping[str, xr.Dataset]":
    network = build(name)
    text = interp.HookedTransformer(network, None).text
    source = prompt_source(paired(text, CLEAN, CORRUPT), text, prepend_bos=True, batch_size=2)
    return interp.run(questions, network, source)


def check_alike(found: "xr.Dataset", alone: "xr.Dataset") -> None:
    rounding = "completeness_error"  # by how much a sum is missed is the size of its rounding
    assert {**found.attrs, rounding: 0} == {**alone.attrs, rounding: 0}
    assert abs(found.attrs.get(rounding, 0.0) - alone.attrs.get(rounding, 0.0)) < 1e-14
    assert list(found.variables) == list(alone.variables)
    for name, value in alone.variables.items():
        mine = found.variables[name]
        if value.dtype.kind == "f":
            np.testing.assert_allclose(mine.values, value.values, rtol=1e-10, atol=1e-10, err_msg=str(name))
        else:
            np.testing.assert_array_equal(mine.values, value.values, err_msg=str(name))


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "bidirectional"])
def test_what_several_say_together_is_what_each_says_alone(name: str) -> None:
    every = {**SAME, **OTHER}
    together = answers(name, every)
    assert list(together) == list(every)
    for each, question in every.items():
        check_alike(together[each], answers(name, {each: question})[each])


class Counted:
    """Counts the passes through the whole model and the sweeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes = self.sweeps = 0
        forward, run = Transformer.forward, Sweep.run

        def counted(model: Transformer, source: torch.Tensor, *args: object, **named: object) -> torch.Tensor:
            self.passes += "stop" in named  # a sweep's own passes are block by block
            return forward(model, source, *args, **named)  # type: ignore[arg-type]

        def counted_run(sweep: Sweep, *args: object) -> object:
            self.sweeps += 1
            return run(sweep, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(Transformer, "forward", counted)
        monkeypatch.setattr(Sweep, "run", counted_run)


def counted(monkeypatch: pytest.MonkeyPatch, questions: Mapping[str, Question]) -> tuple[int, int]:
    """Passes and sweeps per batch."""
    with monkeypatch.context() as here:
        counts = Counted(here)
        answers("gpt2", questions)
    batches = 2
    return counts.passes // batches, counts.sweeps // batches


def test_questions_of_one_metric_take_one_sweep_of_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, sweeps = counted(monkeypatch, SAME)
    assert sweeps == 2  # of the corrupted run and of the clean one
    assert passes == 2  # one of each run: what it holds is put into the other, whose sweep departs from it


SHARING: dict[str, tuple[Sequence[str], int]] = {
    "other answers": (["z", "other answers"], 2),
    "no wrong answer": (["z", "one answer"], 2),
    "another metric": (["z", "divergence"], 2),
    "the run compared with": (["divergence", "noised divergence"], 2),
    "that run shared": (["noised divergence", "again"], 1),
    "what is frozen": (["zero", "frozen", "frozen head"], 3),
    "means": (["zero", "mean"], 1),
    "scores kept": (["z", "pattern", "scores"], 3),
    "heads apart": (["z", "read by queries"], 2),
    "what is watched": (["zero", "whole row"], 2),
}


@over("what", SHARING)
def test_a_sweep_is_shared_only_by_what_departs_from_one_run_and_is_judged_alike(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    names, wanted = SHARING[what]
    assert counted(monkeypatch, {name: {**SAME, **OTHER}[name] for name in names})[1] == wanted


READING: dict[str, tuple[Sequence[str], int]] = {
    "a lens and what is put from its run": (["lens", "z"], 2),
    "a lens and the sweep of its run": (["lens", "zero"], 1),
    "a lens and both": (["lens", "z", "noised z", "zero", "resampled"], 2),
    "parts and the sweep of their run": (["parts", "zero"], 1),
    "parts and what is put from their run": (["parts", "z"], 2),
    "scores and what is put": (["entropy", "z"], 3),
    "scores and scores": (["entropy", "scores"], 2),
}
"""How many passes, those that sweeps depart from among them; reading scores takes another path of attention."""


@over("what", READING)
def test_questions_that_read_and_questions_that_intervene_share_passes(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    names, wanted = READING[what]
    assert counted(monkeypatch, {name: {**SAME, **OTHER}[name] for name in names})[0] == wanted


def test_one_map_alone_takes_a_run_of_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(monkeypatch, {"z": SAME["z"]}) == (2, 1)
