"""Questions that intervene in one run: what each says alone, from as few passes as they can share."""

import copy
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import interp
from interp.attention import AttentionEntropy
from interp.causal import Ablate, EdgeGraph, KnockOut, Patch, ShortCircuit
from interp.data.batch import Batch
from interp.data.pairs import paired
from interp.data.stream import prompt_source
from interp.edits import Edit, Mean, Resample, Variant, Zero
from interp.lenses import LateLayers, LogitLens, Patchscope
from interp.metrics import kl_divergence, logit_difference, of_logits
from interp.model import sites
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.needs import Pass, Steps, TowardLoss, TowardMetric, recorded, swept_final, swept_reads
from interp.passes.question import Question
from interp.passes.schedule import _slow_paths, answer_together, one_pass, run_steps
from interp.passes.sweep import Sweep
from interp.residual import Attribute
from tests.configs import CONFIGS, build, some_tokens
from tests.loops import over

if TYPE_CHECKING:
    import xarray as xr

CLEAN, CORRUPT = some_tokens(), some_tokens(seed=1)
CORRUPT[:, :2] = CLEAN[:, :2]
METRIC = logit_difference([3, 4, 5], [6, 7, 8])
SAME: dict[str, Question] = {
    "z": Patch("z", metric=METRIC),
    "resid_pre": Patch("resid_pre", metric=METRIC),
    "noised z": Patch("z", metric=METRIC, direction="noise"),
    "noised mlp": Patch("mlp_out", metric=METRIC, direction="noise"),
    "zero": Ablate("head", change=Zero(), metric=METRIC),
    "resampled": Ablate("mlp", change=Resample(), metric=METRIC),
}
"""Of one metric."""
OTHER: dict[str, Question] = {
    "other answers": Patch("z", metric=logit_difference([7, 8, 9], [1, 2, 3])),
    "one answer": Patch("z", metric=logit_difference([3, 4, 5])),
    "function": Patch("z", metric=lambda logits: logits[:, -1, 3]),
    "whole row": Ablate(
        "head", change=Zero(), metric=of_logits(lambda x: x[..., 2].mean(1), everywhere=True)
    ),
    "divergence": Patch("z", metric=kl_divergence()),
    "noised divergence": Patch("z", metric=kl_divergence(), direction="noise"),
    "again": Patch("resid_pre", metric=kl_divergence(), direction="noise"),
    "pattern": Patch("pattern", metric=METRIC),
    "scores": Patch("attn_scores", metric=METRIC, by=("layer", "query", "key")),
    "read by queries": Patch("q_input", metric=METRIC),
    "read by the MLP": Patch("mlp_in", metric=METRIC),
    "frozen": Ablate("mlp", change=Zero(), metric=METRIC, freeze_patterns=True),
    "frozen head": Ablate("head", change=Zero(), metric=METRIC, freeze_patterns=True),
    "mean": Ablate("mlp", change=Mean("position"), metric=METRIC, reference=CORRUPT),
    "short": ShortCircuit(metric=METRIC),
    "knocked out": KnockOut(queries=(-1,), keys=range(3), metric=METRIC),
    "path": interp.causal.PathPatch(metric=METRIC),
    "by gradient": interp.causal.AttributionPatch("z", metric=METRIC),
    "lens": LogitLens(),
    "entropy": AttentionEntropy(),
    "parts": Attribute([3, 4, 5], [6, 7, 8]),
    "edges": interp.circuits.EdgeEffects(METRIC),
}
"""Of others, or from another run."""


def answers(name: str, questions: Mapping[str, Question]) -> "Mapping[str, xr.Dataset]":
    network = build(name)
    text = interp.HookedTransformer(network, None).text
    source = prompt_source(paired(text, CLEAN, CORRUPT), text, batch_size=2)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "bidirectional"])
def test_what_several_say_together_is_what_each_says_alone(name: str) -> None:
    every = {**SAME, **OTHER}
    together = answers(name, every)
    assert list(together) == list(every)
    for each, question in every.items():
        check_alike(together[each], answers(name, {each: question})[each])


class Counted:
    """Counts the passes through the whole model, those back, the sweeps, and models made under backward rules."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes = self.back = self.sweeps = self.ruled = 0
        forward, run, backward, ruled = (
            Transformer.forward,
            Sweep._run_together,
            torch.autograd.grad,
            Transformer.ruled,
        )

        def counted(model: Transformer, source: torch.Tensor, *args: object, **named: object) -> torch.Tensor:
            self.passes += "stop" in named  # a sweep's own passes are block by block
            return forward(model, source, *args, **named)  # type: ignore[arg-type]

        def counted_run(sweep: Sweep, *args: object) -> object:
            self.sweeps += 1
            return run(sweep, *args)  # type: ignore[arg-type]

        def counted_back(*args: object, **named: object) -> object:
            self.back += 1
            return backward(*args, **named)  # type: ignore[arg-type]

        def counted_ruled(model: Transformer, *args: object) -> Transformer:
            self.ruled += 1
            return ruled(model, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(torch.autograd, "grad", counted_back)
        monkeypatch.setattr(Transformer, "ruled", counted_ruled)
        monkeypatch.setattr(Transformer, "forward", counted)
        monkeypatch.setattr(Sweep, "_run_together", counted_run)


BATCHES = 2


def counts_of(monkeypatch: pytest.MonkeyPatch, questions: Mapping[str, Question]) -> Counted:
    """What it takes to answer these in two batches."""
    with monkeypatch.context() as here:
        counts = Counted(here)
        answers("gpt2", questions)
    return counts


def counted(monkeypatch: pytest.MonkeyPatch, questions: Mapping[str, Question]) -> tuple[int, int]:
    """Passes and sweeps per batch."""
    counts = counts_of(monkeypatch, questions)
    return counts.passes // BATCHES, counts.sweeps // BATCHES


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
def test_sweep_is_shared_only_from_one_run_and_under_one_judgement(
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
    "what a knock-out sees and its sweep": (["knocked out"], 1),
    "a knock-out and scores": (["knocked out", "scores"], 2),
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


# gradients

SLOPES = partial(interp.causal.AttributionPatch, agreement=0)
GRADIENTS: dict[str, Question] = {
    "z": SLOPES("z", metric=METRIC),
    "streams": SLOPES("resid_pre", metric=METRIC),
    "noised z": SLOPES("z", metric=METRIC, direction="noise"),
    "patterns": SLOPES("pattern", metric=METRIC),
    "scales": SLOPES("ln2.hook_scale", metric=METRIC),
    "read by queries": SLOPES("q_input", metric=METRIC),
    "other answers": SLOPES("z", metric=logit_difference([7, 8, 9], [1, 2, 3])),
    "divergence of z": SLOPES("z", metric=kl_divergence()),
    "divergence of streams": SLOPES("resid_pre", metric=kl_divergence()),
    "edges": interp.circuits.EdgeAttribution(metric=METRIC),
    "edges by inputs": interp.circuits.EdgeAttribution(metric=METRIC, method="eap-ig-inputs", steps=3),
    "z under rules": SLOPES("z", metric=METRIC, rules="relp"),
    "edges under rules": interp.circuits.EdgeAttribution(metric=METRIC, rules="relp"),
    "z under others": SLOPES("z", metric=METRIC, rules=["norm"]),
    "circuits": interp.circuits.Interchange(torch.ones(1, 1, 1, dtype=torch.bool), metric=METRIC),
    "lens": interp.lenses.BackwardLens([3, 4, 5]),
    "rank": interp.lenses.GradientRank([3, 4, 5], matrices=["W_V", "W_out"]),
    "cosines": interp.lenses.GradientCosines([3, 4, 5], matrices=["W_O"]),
    "cosines of a difference": interp.lenses.GradientCosines([3, 4, 5], [6, 7, 8], matrices=["W_O"]),
    "cosines under rules": interp.lenses.GradientCosines([3, 4, 5], matrices=["W_O"], rules="relp"),
    "inputs": interp.tokens.TokenAttribution([3, 4, 5], method="gradient_x_input"),
    "other inputs": interp.tokens.TokenAttribution([3, 4, 5], method="gradient_x_input", pos=-2),
    "inputs under rules": interp.tokens.TokenAttribution([3, 4, 5], method="relp"),
    "along a line": interp.tokens.TokenAttribution([3, 4, 5], method=interp.tokens.IntegratedGradients(3)),
    "parts by token": interp.tokens.TokenAttribution([3, 4, 5], method="alti_logit"),
    "methods": interp.tokens.CompareMethods(
        [3, 4, 5], methods=["gradient_x_input", "alti_logit"], shares=[0.5], draws=1
    ),
}
BACK: dict[str, tuple[Sequence[str], int, int]] = {
    "one site": (["z"], 2, 1),
    "two sites": (["z", "streams"], 2, 1),
    "sites and edges": (["z", "streams", "edges"], 2, 1),
    "sites compared with the clean run": (["divergence of z", "divergence of streams"], 2, 1),
    "edges along a line": (["edges", "edges by inputs"], 4, 2),
    "from either side": (["z", "noised z"], 4, 2),
    "explicit attention": (["z", "patterns"], 4, 2),
    "scales that carry the pass": (["z", "scales"], 3, 2),
    "streams of every head": (["z", "read by queries"], 4, 2),
    "answers": (["z", "other answers"], 3, 2),
    "rules": (["z", "z under rules"], 5, 3),
    "the same rules": (["z under rules", "edges under rules"], 3, 2),
    "three rules and one": (["z under rules", "z under others"], 5, 3),
    "a lens": (["lens"], 1, 1),
    "a lens and the shapes of gradients": (["lens", "rank", "cosines"], 1, 1),
    "another loss": (["lens", "cosines of a difference"], 2, 2),
    "a lens and rules": (["lens", "cosines under rules"], 2, 2),
    "inputs at two places": (["inputs", "other inputs"], 2, 2),
    "parts": (["parts by token"], 1, 0),
    "methods compared": (["methods"], 3, 1),
    "methods and the first of them": (["methods", "inputs"], 3, 1),
}
"""Passes forward and back per batch. The check that relevances sum takes one of each."""


@over("what", BACK)
def test_gradients_towards_one_number_take_one_pass_forward_and_back(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    names, forward, back = BACK[what]
    counts = counts_of(monkeypatch, {name: GRADIENTS[name] for name in names})
    assert (counts.passes / BATCHES, counts.back / BATCHES) == (forward, back)


def test_a_model_under_rules_is_made_once_a_batch_for_all_who_name_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("z under rules", "edges under rules", "cosines under rules")
    questions = {name: GRADIENTS[name] for name in names}
    counts, bound = counts_of(monkeypatch, questions), len(names)  # `bind` looks at each question's own
    assert counts.ruled == BATCHES + bound


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2"])
def test_what_gradients_say_together_is_what_each_says_alone(name: str) -> None:
    whole = interp.circuits.Interchange(EdgeGraph.of(build(name).config).exists[None], metric=METRIC)
    every = {**GRADIENTS, "circuits": whole, "effects": SAME["z"], "reading": LogitLens()}
    together = answers(name, every)
    for each, question in every.items():
        check_alike(together[each], answers(name, {each: question})[each])


# needs one by one

READS = [Read("blocks.0.attn.hook_z"), Read("blocks.1.hook_resid_post"), Read("blocks.1.hook_mlp_out")]
SLOPE = Read("blocks.0.attn.hook_z", grad=True)


def doubled(value: torch.Tensor) -> torch.Tensor:
    return 2 * value


def posed() -> Batch:
    return Batch(CLEAN).with_answers(torch.tensor([3, 4, 5]), torch.tensor([6, 7, 8]))


def test_edited_pass_is_observes_and_shared_by_the_very_same_edits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch, edit = build("gpt2"), posed(), Edit("blocks.0.hook_mlp_out", doubled)
    needs = {
        "one": recorded(batch, READS[:1], edits=[edit], final=True),
        "other": recorded(batch, READS[1:], edits=[edit]),
        "plain": recorded(batch, READS),
        "edited above what is read": recorded(
            batch, READS[:1], edits=[Edit("blocks.1.hook_mlp_out", doubled)]
        ),
    }
    with monkeypatch.context() as here:
        counts = Counted(here)
        found = answer_together(model, needs)
    assert counts.passes == 3
    expected = interp.observe(model, batch, READS, [edit], stop=2)
    for each in ("one", "other"):
        assert all(torch.equal(value, expected.trace[read]) for read, value in found[each].trace.items())
    assert torch.equal(found["one"].end, expected.output)
    plain = interp.observe(model, batch, READS, stop=2).trace
    assert all(torch.equal(value, plain[read]) for read, value in found["plain"].trace.items())
    assert torch.equal(found["edited above what is read"].trace[READS[0]], plain[READS[0]])


def test_a_differentiated_pass_is_that_of_observe_to_the_bit() -> None:
    model, batch = build("gpt2"), posed()
    metric = kl_divergence()
    other = run_steps(model, recorded(Batch(CORRUPT), (), final=True))
    copies, example = batch.rows(torch.tensor([0, 0, 1, 1, 2, 2])), torch.tensor([0, 0, 1, 1, 2, 2])
    toward = TowardMetric(metric, other.reference(metric), example)
    found = run_steps(model, recorded(copies, [*READS, SLOPE], toward=toward))

    def divergence(stream: torch.Tensor) -> torch.Tensor:
        ends = other.end[:, -1][example]
        mine, theirs = (model.read_out(x[:, None])[:, 0].log_softmax(-1) for x in (stream[:, -1], ends))
        return (theirs.exp() * (theirs - mine)).sum()

    expected = interp.observe(model, copies, [*READS, SLOPE], stop=2, metric=divergence)
    assert all(torch.equal(found.trace[read], expected.trace[read]) for read in READS)
    assert torch.equal(found.end, expected.output)
    torch.testing.assert_close(found.trace[SLOPE], expected.trace[SLOPE], rtol=1e-10, atol=1e-12)
    assert float(found.trace[SLOPE].abs().max()) > 1e-4


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_loss_sees_the_logits_that_it_asks_for(everywhere: bool) -> None:
    model, batch = build("gpt2"), posed()

    def loss(logits: torch.Tensor, rows: Batch) -> torch.Tensor:
        assert logits.shape[1] == (CLEAN.shape[1] if everywhere else 1)
        return logits.logsumexp(-1).sum()

    found = run_steps(model, recorded(batch, [SLOPE], toward=TowardLoss(loss, everywhere)))
    columns = slice(None) if everywhere else slice(-1, None)
    expected = interp.observe(
        model, batch, [SLOPE], metric=lambda logits: logits[:, columns].logsumexp(-1).sum()
    )
    torch.testing.assert_close(found.trace[SLOPE], expected.trace[SLOPE], rtol=1e-10, atol=1e-12)


def test_sweeps_that_read_are_one_and_each_gets_its_own_variants() -> None:
    model, batch = build("gpt2"), Batch(CLEAN)
    heads = [Variant([Edit("L0H0", Zero())]), Variant([Edit("L0H1", Zero())])]
    both = [Variant([Edit("L0H0", Zero()), Edit("L0H1", Zero())])]
    one, other = swept_reads(batch, heads, READS[1:]), swept_reads(batch, both, READS[1:])
    found = answer_together(model, {"heads": one, "both": other})
    for name, variants in (("heads", heads), ("both", both)):
        for i, variant in enumerate(variants):
            expected = interp.observe(model, batch, READS[1:], variant.edits, stop=2).trace
            for read in READS[1:]:
                torch.testing.assert_close(found[name][read][i], expected[read], rtol=1e-10, atol=1e-12)
        assert len(found[name][READS[1]]) == len(variants)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "bidirectional"])
def test_sweeps_of_the_final_stream_over_the_same_tokens_are_one(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model, sweeps, final = build(name), [0], Sweep.final

    def counted_final(sweep: Sweep) -> torch.Tensor:
        sweeps[0] += 1
        return final(sweep)

    monkeypatch.setattr(Sweep, "final", counted_final)
    asked = {
        "head": [Variant([Edit("L0H1", Zero())])],
        "none, MLP": [Variant([]), Variant([Edit("L1.mlp", Zero())])],
    }
    steps = {each: swept_final(Batch(CLEAN.clone()), variants) for each, variants in asked.items()}
    found = answer_together(model, steps)
    assert sweeps == [1]
    for each, variants in asked.items():
        assert len(found[each]) == len(variants)
        for mine, variant in zip(found[each], variants, strict=True):
            expected = interp.observe(
                model, Batch(CLEAN), (), variant.edits, stop=model.config.n_layers
            ).output
            torch.testing.assert_close(mine, expected[:, -1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["patchscopes", "late layers", "a scope and its target", "two targets"])
def test_questions_that_look_at_final_streams_share_their_sweep(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    questions, wanted = {
        "patchscopes": ([Patchscope(CORRUPT[0]), Patchscope(CORRUPT[0].clone(), pos=-2)], 1),
        "late layers": ([LateLayers([3, 4, 5], frequencies=torch.arange(31) + x) for x in (1.0, 9.0)], 1),
        "a scope and its target": (
            [Patchscope(CORRUPT[0]), LateLayers([3, 4, 5], frequencies=torch.ones(31))],
            2,
        ),
        "two targets": ([Patchscope(row) for row in CORRUPT[:2]], 2),
    }[kind]
    sweeps, final = [0], Sweep.final

    def counted_final(sweep: Sweep) -> torch.Tensor:
        sweeps[0] += 1
        return final(sweep)

    every = dict(zip("ab", questions, strict=True))
    with monkeypatch.context() as here:
        here.setattr(Sweep, "final", counted_final)
        together = answers("gpt2", every)
    assert sweeps == [BATCHES * wanted]
    for each, question in every.items():
        check_alike(together[each], answers("gpt2", {each: question})[each])


def test_what_was_found_is_freed_when_the_question_lets_go_of_it() -> None:
    def steps() -> Steps[bool]:
        seen = yield from recorded(Batch(CLEAN), READS)
        value = weakref.ref(seen.trace[READS[0]])
        del seen
        return value() is None

    assert run_steps(build("gpt2"), steps())


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "parallel", "gpt-oss"])
@pytest.mark.parametrize("grad", [False, True])
def test_reads_that_move_a_bit_of_a_pass_are_on_a_path_of_their_own(name: str, grad: bool) -> None:
    """What is the same in both runs of a pair is 0 for sure only if nothing else that is read moves a bit."""
    model, batch, config = copy.deepcopy(build(name)).to(torch.bfloat16), posed(), CONFIGS[name]
    toward = TowardMetric(METRIC) if grad else None
    plain, moved = interp.observe(model, batch, stop=config.n_layers).output, []
    for site in sites.names(config, on_demand=True):
        if not site.startswith("blocks."):
            continue
        need = Pass(batch, [Read(site, grad=grad)], final=True, toward=toward)
        (_, end) = one_pass(model, [need])
        assert end is not None
        if not torch.equal(end, plain):
            assert _slow_paths(model, [need]), site
            moved.append(site)
    assert bool(moved) == (grad or name != "gemma2")  # whose capped scores are not fused anyway
