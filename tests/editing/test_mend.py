"""MEND: the identity is a gradient step, the change a loop over tokens, and trained it disturbs less than any step."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from experiments.edit_by_shift import EditByShift, asked, fact_cases
from interp import HookedTransformer
from interp.editing import (
    EditCase,
    FineTuning,
    Mend,
    WeightEdit,
    edit_table,
    gradient_edit,
    mend_edit,
    train_mend,
)
from interp.editing.mend import GradientNetwork, _answer_logp, _TrainingCase
from interp.editing.weight_edit import changed
from interp.lenses.factors import factors
from interp.passes.observe import as_model
from interp.passes.question import NotFiniteError
from tests.configs import build, perturbed
from tests.editing.test_editors import TARGETS, model_of, ragged
from tests.loops import over
from tests.tiny import hooked
from tests.tolerances import assert_close

MATRICES = ("mlp.W_in", "mlp.W_out", "attn.W_Q", "attn.W_V", "attn.W_O")
NAMES = ["blocks.0.mlp.W_out", "blocks.1.mlp.W_out", "blocks.1.mlp.W_in"]
CASES = [
    EditCase(
        "The capital of France is", " Rome", "France",
        {"paraphrase": (("France has the capital", " Rome"),),
         "others": (("The cat sat on the", " mat"), ("The capital of Italy is", " Paris"))},
    ),
    EditCase("When Mary and John went to the", " cat", "John", {"others": (("The dog sat on the", " cat"),
                                                                          ("John gave a", " drink"))}),
]  # fmt: skip


def stirred(mend: Mend) -> Mend:
    """The same with random numbers everywhere: no part of it is the identity."""
    generator = torch.Generator().manual_seed(3)

    def other(name: str, value: Tensor) -> Tensor:
        drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        return 0.5 + drawn.abs() if name in ("std", "alpha") else value + 0.3 * drawn

    networks = [replace(each, **{k: other(k, x) for k, x in each.numbers.items()}) for each in mend.networks]
    return replace(mend, networks=tuple(networks))


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "olmo2", "parallel"])
@over("matrix", MATRICES)
def test_untrained_it_is_a_gradient_step_bit_for_bit(name: str, matrix: str) -> None:
    model, full = model_of(name), f"blocks.0.{matrix}"
    mend = Mend.untrained(model, [full], alpha=0.07)
    (edit,) = mend_edit(model, ragged(), answer=TARGETS, mend=mend)
    step = gradient_edit(model, ragged(), answer=TARGETS, layer=0, matrix=matrix, eta=0.07)
    assert edit.name == step.name == full and edit.rank == step.rank
    assert torch.equal(edit.dense, step.dense) and float(step.dense.abs().max()) > 0


def slow_change(network: GradientNetwork, name: str, u: Tensor, delta: Tensor) -> Tensor:
    """- alpha sum_i u~_i^T delta~_i, token by token and feature by feature, as the paper writes g."""
    m, i = network.names.index(name), u.shape[1]
    total = torch.zeros(i, delta.shape[1], dtype=u.dtype)
    for x, d in zip(u, delta, strict=True):
        if not bool(d.any()):
            continue
        raw = [*x.tolist(), *d.tolist()]
        z = torch.stack([(a - b) / c for a, b, c in zip(raw, network.mean, network.std, strict=True)])
        one = network.U[0].mT @ (network.V[0].mT @ z) + network.bias
        h = z + torch.relu(network.scale[m, 0] * one + network.shift[m, 0])
        two = network.U[1].mT @ (network.V[1].mT @ h)
        g = h + torch.relu(network.scale[m, 1] * two + network.shift[m, 1])
        total -= network.alpha[m] * torch.outer(g[:i], g[i:])
    return total


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_the_change_is_a_loop_over_tokens(name: str) -> None:
    """In the last layer delta is 0 at every token but the last, which no network may turn into something."""
    model, batch = model_of(name), ragged().with_answers(torch.tensor(TARGETS), None)
    mend = stirred(Mend.untrained(model, NAMES, rank=5))
    assert [each.names for each in mend.networks] == [tuple(NAMES[:2]), (NAMES[2],)]
    found = mend_edit(model, ragged(), answer=TARGETS, mend=mend)
    pairs = factors(model.transformer, batch, ["W_in", "W_out"], [0, 1])
    zero = ~pairs[NAMES[1]][1].any(-1)[batch.real]
    assert int(zero.sum()) == 16 and int((~zero).sum()) == 3
    for edit in found:
        x, delta = pairs[edit.name]
        network = next(each for each in mend.networks if edit.name in each.names)
        expected = slow_change(network, edit.name, x[batch.real], delta[batch.real])
        assert_close(edit.dense, expected)


SEVERAL = EditCase(
    "The capital of France is", " Mary and John", "France",
    {"paraphrase": (("France has the capital", " Mary and John"),), "others": (("The cat sat on the", " mat"),)},
)  # fmt: skip
"""A case whose answer is of three tokens."""


def losses_of(model: HookedTransformer, mend: Mend, case: EditCase) -> tuple[float, float]:
    """L_edit and L_loc with the edits written into the model, prompt by prompt."""
    mine = model.text.tokenizer.encode(str(case.answer))
    flat = [check for each in case.checks.values() for check in each]
    same = [prompt for prompt, answer in flat if answer == case.answer]
    prompts = [case.prompt, *same], [prompt for prompt, _ in flat if prompt not in same]

    def said(prompt: str, *more: int) -> Tensor:
        ids = [*model.text.batch(prompt).tokens[0].tolist(), *more]
        return model.transformer(torch.tensor([ids]))[0, -1].log_softmax(-1)

    before = [said(prompt) for prompt in prompts[1]]
    with ExitStack() as stack:
        for edit in mend_edit(model, case.prompt, answer=case.answer, mend=mend):
            stack.enter_context(edit.applied(model))
        edited = [
            -sum(float(said(prompt, *mine[:j])[token]) for j, token in enumerate(mine))
            for prompt in prompts[0]
        ]
        local = [
            float((old.exp() * (old - said(prompt))).sum())
            for old, prompt in zip(before, prompts[1], strict=True)
        ]
    return sum(edited) / len(edited), sum(local) / len(local)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_the_losses_are_those_of_the_edited_model(name: str) -> None:
    model = hooked(name)
    mend = stirred(Mend.untrained(model, NAMES, alpha=0.01, rank=3))
    for case in (*CASES, SEVERAL):
        posed = _TrainingCase.of(as_model(model), case, mend.names, prepend_bos=True)
        found = posed.losses(model.transformer, mend)
        assert_close(found, torch.tensor(losses_of(model, mend, case), dtype=torch.float64))
        assert float(found.min()) > 1e-3


@over("leaf", ("alpha", "U", "V", "bias", "scale", "shift"))
def test_the_gradient_of_the_losses_is_that_of_finite_differences(leaf: str) -> None:
    model = hooked()
    mend = stirred(Mend.untrained(model, NAMES, alpha=0.01, rank=3))
    posed = _TrainingCase.of(as_model(model), CASES[0], mend.names, prepend_bos=True)
    value = getattr(mend.networks[0], leaf)
    direction = torch.randn(value.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(step: Tensor) -> Tensor:
        moved = replace(mend.networks[0], **{leaf: value + step * direction})
        edit, local = posed.losses(model.transformer, replace(mend, networks=(moved, mend.networks[1])))
        return 0.1 * edit + local

    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(loss(step), step)
    h = 1e-6
    with torch.no_grad():
        expected = (loss(torch.tensor(h)) - loss(torch.tensor(-h))) / (2 * h)
    assert float(slope) == pytest.approx(float(expected), rel=1e-5) and abs(float(slope)) > 1e-6


def test_norms_are_of_training_edits_tokens_and_leave_constants_alone() -> None:
    model = hooked()
    mend = train_mend(model, CASES, NAMES[:2], tuning=FineTuning(steps=1, rate=1e-9))
    rows = []
    for case in CASES:
        batch = model.text.batch(case.prompt).with_answers(model.text.targets(case.answer, 1), None)
        for name, (x, delta) in factors(model.transformer, batch, ["W_out"], [0, 1]).items():
            assert name in NAMES
            rows += [torch.cat(pair) for pair in zip(x[0], delta[0], strict=True) if bool(pair[1].any())]
    (network,) = mend.networks
    every = torch.stack(rows)
    assert_close(network.mean, every.mean(0))
    assert_close(network.std, every.std(0, correction=0))
    u, delta = torch.zeros(2, 40).double(), torch.ones(2, 24).double()
    u[:, 0], u[:, 1] = torch.tensor([1.0, 2.0]), 3.0
    like = Mend.untrained(hooked(), NAMES[:1]).networks[0]
    assert like.normed([{NAMES[0]: (u, delta)}]).std.tolist() == [0.5] + 63 * [1.0]


def test_training_lowers_its_loss_moves_every_part_and_spares_the_model() -> None:
    """V is zero at first, where the derivative of `torch.relu` is 0: with it nothing but alpha would be trained."""
    model = HookedTransformer(perturbed(hooked().cfg, seed=4), hooked().text.tokenizer)
    state = {name: value.clone() for name, value in model.transformer.state_dict().items()}
    tuning = FineTuning(steps=40, rate=3e-3)
    one, two = (
        train_mend(model, CASES, NAMES, tuning=tuning, batch_size=2, rank=4, alpha=1e-4) for _ in range(2)
    )
    assert one.losses is not None
    total = one.losses @ torch.tensor([0.1, 1.0], dtype=torch.float64)
    assert float(total[-1]) < 0.8 * float(total[0])
    start = Mend.untrained(model, NAMES, rank=4, alpha=1e-4)
    for mine, again, first in zip(one.networks, two.networks, start.networks, strict=True):
        for name, value in mine.numbers.items():
            assert torch.equal(value, again.numbers[name]) and not value.requires_grad
            assert not torch.equal(value, first.numbers[name]), name
    assert all(torch.equal(value, state[name]) for name, value in model.transformer.state_dict().items())
    assert all(p.grad is None for p in model.transformer.parameters())


def test_every_case_comes_once_before_any_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    of, losses = _TrainingCase.of, _TrainingCase.losses
    names: dict[int, str] = {}

    def remembered(*given: object) -> _TrainingCase:
        found = of(*given)  # type: ignore[arg-type]
        names[id(found)] = given[1].prompt  # type: ignore[attr-defined]
        return found

    def told(self: _TrainingCase, model: object, mend: Mend) -> Tensor:
        seen.append(names[id(self)])
        return losses(self, model, mend)  # type: ignore[arg-type]

    monkeypatch.setattr(_TrainingCase, "of", remembered)
    monkeypatch.setattr(_TrainingCase, "losses", told)
    cases = [*CASES, replace(CASES[0], prompt="The capital of Italy is")]
    train_mend(hooked(), cases, NAMES[:1], tuning=FineTuning(steps=3), batch_size=2)
    assert len(seen) == 6 and {*seen[:3]} == {*seen[3:]} == {case.prompt for case in cases}


Score = tuple[float, float]
"""Share of the edits whose answer is the argmax, in the edited prompt and reworded; and the KL of others, in nats."""


def score(model: HookedTransformer, posed: list[_TrainingCase], mend: Mend) -> Score:
    """Over held-out edits, each on its own."""
    right, kl = [], []
    for case in posed:
        parameters = {n: x.AB for n, x in mend.changes(model.transformer, case.pairs).items()}
        logp = _answer_logp(
            model.transformer, case.batch, case.begin, case.layer, changed(model.transformer, parameters)
        )[:, 0]
        hit = (logp.argmax(-1) == case.batch.answer)[: case.asking].double()
        right.append(float(hit.mean()))
        kl.append(float((case.before.exp() * (case.before - logp[case.asking :])).sum(-1).mean()))
    return sum(right) / len(right), sum(kl) / len(kl)


@pytest.mark.slow
@torch.no_grad()
def test_trained_mend_makes_more_held_out_edits_than_gradient_steps() -> None:
    """Facts of demo-4l, 40 of which no training edit was about; steps of six sizes on the three best matrices."""
    model = HookedTransformer.from_pretrained("demo-4l")
    cases = fact_cases(model, asked(model), EditByShift(tuning=120, edits=40))
    train, test = cases[:120], cases[120:]
    mend = train_mend(model, train, ["blocks.3.mlp.W_out"], tuning=FineTuning(steps=150))

    def posed(names: tuple[str, ...]) -> list[_TrainingCase]:
        return [_TrainingCase.of(as_model(model), case, names, prepend_bos=True) for case in test]

    made, disturbed = score(model, posed(mend.names), mend)
    steps: dict[str, Score] = {}
    for name in ("blocks.2.mlp.W_out", "blocks.3.mlp.W_in", "blocks.3.mlp.W_out"):
        held_out = posed((name,))
        for eta in (0.03, 0.04, 0.05, 0.06, 0.075, 0.1):
            steps[f"{name} {eta}"] = score(model, held_out, Mend.untrained(model, [name], alpha=eta))
    beside = {name: share for name, (share, kl) in steps.items() if kl <= disturbed}
    beyond = [share for share, kl in steps.values() if kl > disturbed]
    assert min(len(beside), len(beyond)) > 5  # steps are tried on either side
    assert made > max(beside.values()) + 0.05, (made, disturbed, beside)


def test_the_table_takes_it() -> None:
    model = hooked()
    mend = Mend.untrained(model, NAMES, alpha=0.5)

    def editor(given: object, case: EditCase) -> list[WeightEdit]:
        return mend_edit(model, case.prompt, answer=case.answer, mend=mend)

    case = replace(CASES[0], checks={})
    table = edit_table(model, [case], {"MEND": editor})
    with ExitStack() as stack:
        for edit in editor(model, case):
            stack.enter_context(edit.applied(model))
        said = int(model.transformer(model.text.batch(case.prompt).tokens)[0, -1].argmax())
    expected = said == int(model.text.targets(case.answer, 1))
    assert bool(table.value.sel(editor="MEND", score="efficacy")) is expected
    assert expected


def test_a_saved_one_comes_back_as_it_was(tmp_path: Path) -> None:
    model, file = hooked("llama-gqa"), tmp_path / "mend.safetensors"
    mend = stirred(Mend.untrained(model, NAMES, rank=5))
    mend.save(file)
    again = Mend.load(file, model)
    assert [each.names for each in again.networks] == [each.names for each in mend.networks]
    numbers: Mapping[str, Tensor] = again.numbers
    assert all(torch.equal(value, numbers[name]) for name, value in mend.numbers.items())


def test_files_that_are_none_and_other_models_are_refused(tmp_path: Path) -> None:
    model, file = hooked(), tmp_path / "mend.safetensors"
    other = HookedTransformer(build("gpt2"))
    save_file({"0.U": torch.zeros(2)}, file)
    with pytest.raises(ValueError, match="format 'interp mend 1' is required, got None"):
        Mend.load(file, model)
    mend = Mend.untrained(model, NAMES[:1])
    mend.save(file)
    with pytest.raises(ValueError, match="another model"):
        Mend.load(file, other)
    with pytest.raises(ValueError, match="another model"):
        mend_edit(other, ragged(), answer=TARGETS, mend=mend)
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
    save_file({**mend.numbers, "0.mean": torch.zeros(63)}, file, metadata=header)
    with pytest.raises(ValueError, match=r"0.mean of shape \[64\] is required by this model, got \[63\]"):
        Mend.load(file, model)
    save_file({**mend.numbers, "0.mean": torch.full((64,), math.nan)}, file, metadata=header)
    with pytest.raises(NotFiniteError, match=r"a MEND of finite numbers is required, 0\.mean has some"):
        Mend.load(file, model)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a readable MEND"):
        Mend.load(file, model)


def test_what_cannot_be_trained_is_refused() -> None:
    model = hooked()
    with pytest.raises(ValueError, match=r"blocks.0.mlp.W_out.*no MLP"):
        train_mend(hooked("attention-only"), CASES, NAMES)
    with pytest.raises(KeyError, match=r"unknown matrix 'blocks.0.mlp.W_up'"):
        train_mend(model, CASES, ["blocks.0.mlp.W_up"])
    with pytest.raises(IndexError, match="layers are 0 to 1"):
        train_mend(model, CASES, ["blocks.7.mlp.W_out"])
    with pytest.raises(ValueError, match=r"a matrix of a block is required.*'embed.W_E'"):
        train_mend(model, CASES, ["embed.W_E"])
    with pytest.raises(ValueError, match="names of distinct matrices"):
        train_mend(model, CASES, [NAMES[0], NAMES[0]])
    with pytest.raises(ValueError, match="rank must be a whole number from 1"):
        Mend.untrained(model, NAMES, rank=0)
    with pytest.raises(ValueError, match="at least one case is required"):
        train_mend(model, [], NAMES)
    with pytest.raises(ValueError, match=r"c_edit must be a number above 0, .* got 0\.0"):
        train_mend(model, CASES, NAMES, c_edit=0.0)
    with pytest.raises(ValueError, match=r"c_edit must be a number above 0, .* got inf"):
        train_mend(model, CASES, NAMES, c_edit=math.inf)
    with pytest.raises(ValueError, match=r"alpha must be a number above 0, .* got inf"):
        Mend.untrained(model, NAMES, alpha=math.inf)
    alone = replace(CASES[0], checks={"paraphrase": CASES[0].checks["paraphrase"]})
    with pytest.raises(ValueError, match="a prompt to be left alone; that of 'The capital of France is' has"):
        train_mend(model, [CASES[1], alone], NAMES)
