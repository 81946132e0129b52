"""Two passes against prompts answered one by one, and REINFORCE against the exact gradient of the expected reward."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from interp import HookedTransformer
from interp.data.batch import Batch
from interp.editing import Dispatch, FineTuning, SingularValues, adapted, reinforce_z, train_z, two_passes
from interp.editing.two_passes import policy_loss
from interp.editing.weight_edit import changed
from interp.model import Transformer
from interp.passes.generate import generate
from interp.passes.sampling import Sampling
from tests.configs import build
from tests.loops import over
from tests.tolerances import assert_close

ROWS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [2, 2, 2]]
NAMES = ["blocks.0.mlp.W_out", "blocks.1.attn.W_O"]
QUESTION, LABELS = (11, 12), {"red": 20, "blue": 21, "others": 22}


def subject() -> HookedTransformer:
    return HookedTransformer(build("gpt2"))


def some(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {name: SingularValues.of(subject(), name).sigma for name in NAMES}
    return {name: 2 * torch.rand(s.shape, generator=generator, dtype=s.dtype) for name, s in sizes.items()}


def alone(model: HookedTransformer, row: list[int], vectors: dict[str, Tensor]) -> Tensor:
    """The last logits of one prompt while the edits of some vectors are applied to the weights themselves."""
    edits = [SingularValues.of(model, name).edit(z) for name, z in vectors.items()]
    if not edits:
        return model.transformer(torch.tensor([row]))[0, -1]
    with edits[0].applied(model), edits[1].applied(model):
        return model.transformer(torch.tensor([row]))[0, -1].clone()


def test_an_adapted_model_is_the_edited_one_and_leaves_the_other_alone() -> None:
    model, before = subject(), {k: v.clone() for k, v in subject().transformer.state_dict().items()}
    found = adapted(model, some(1))(torch.tensor([ROWS[0]]))[0, -1]
    assert all(torch.equal(value, before[name]) for name, value in model.transformer.state_dict().items())
    assert_close(found, alone(HookedTransformer(perturbed_copy()), ROWS[0], some(1)))


def perturbed_copy() -> Transformer:
    """One whose weights may be written to."""
    return copy.deepcopy(build("gpt2"))


@over("trained", [False, True])
def test_both_passes_are_those_of_each_prompt_alone(trained: bool) -> None:
    model = HookedTransformer(perturbed_copy())
    dispatch = Dispatch(QUESTION, LABELS, z=some(7) if trained else None)
    vectors = {"red": some(1), "blue": some(2)}
    found = two_passes(model, Batch.of(ROWS), vectors, dispatch)
    for i, row in enumerate(ROWS):
        first = alone(model, [*row, *QUESTION], some(7) if trained else {})[[20, 21, 22]].softmax(-1)
        assert_close(found.probabilities[i], first)
        kind = list(LABELS)[int(first.argmax())]
        assert found.kinds[i] == kind
        assert_close(found.logits[i], alone(model, row, vectors.get(kind, {})))
    assert trained or len(set(found.kinds)) > 1, "prompts are of several kinds"


def test_a_trained_classifier_tells_kinds_apart_that_the_model_does_not() -> None:
    """Prompts that begin with 1 or 2: z of three matrices alone learns which."""
    model = HookedTransformer(build("gpt2"))
    generator = torch.Generator().manual_seed(0)
    rows = torch.cat(
        (torch.tensor([[1], [2]]).repeat(16, 1), torch.randint(3, 20, (32, 4), generator=generator)), 1
    )
    target = rows[:, 0] - 1
    dispatch = Dispatch((11,), {"one": 20, "two": 21})
    ids = dispatch.label_ids(model)

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, -1, ids], target)

    names = [f"blocks.{layer}.attn.{x}" for layer in (0, 1) for x in ("W_V", "W_O")] + ["blocks.1.mlp.W_out"]
    z, losses = train_z(
        model, dispatch.with_question(model, rows), loss, names, tuning=FineTuning(steps=120, rate=0.1)
    )
    before = (dispatch.probabilities(model, rows).argmax(-1) == target).double().mean()
    after = (replace(dispatch, z=z).probabilities(model, rows).argmax(-1) == target).double().mean()
    assert float(before) < 0.7 and float(after) > 0.95 and losses[-1] < losses[0] / 2


@over("kl", [0.0, 0.7])
def test_the_mean_gradient_of_reinforce_is_that_of_the_expected_reward(kl: float) -> None:
    """Every next token enumerated, each weighed by its probability: no sampling is left."""
    network = build("gpt2")
    v, row = network.config.d_vocab, torch.tensor([ROWS[0]])
    reward = torch.linspace(-1, 1, v, dtype=torch.float64)[
        torch.randperm(v, generator=torch.Generator().manual_seed(1))
    ]
    parts = {name: SingularValues.of(network, name) for name in NAMES}
    z = {name: some(3)[name].requires_grad_() for name in NAMES}
    policy = network.with_parameters(
        changed(network, {name: parts[name].change(z[name]).AB for name in NAMES})
    )
    tokens = torch.cat((row.expand(v, -1), torch.arange(v)[:, None]), 1)
    logits, base = policy(tokens), network(tokens)
    p = logits[0, -2].log_softmax(-1).exp()
    losses = policy_loss(logits, base, tokens, reward, 1, kl)
    found = torch.autograd.grad((p.detach() * losses).sum(), list(z.values()), retain_graph=True)
    far = (p * (p.log() - base[0, -2].log_softmax(-1))).sum()
    exact = torch.autograd.grad(-(p * reward).sum() + kl * far, list(z.values()))
    for one, other in zip(found, exact, strict=True):
        assert_close(one, other)


def test_one_step_is_the_mean_over_the_samples_that_were_drawn() -> None:
    """Plain descent of one step against the gradient of the same draws, made with `generate` here."""
    model, rate = subject(), 1e-2

    def reward(new: Tensor) -> Tensor:
        return (new.sum(1) % 3).double() - 1

    options = {"new_tokens": 2, "samples": 3, "kl": 0.3, "seed": 5}
    z, rewards = reinforce_z(
        model,
        Batch.of(ROWS[:2]),
        reward,
        NAMES,
        tuning=FineTuning(1, rate, "sgd"),
        **options,  # type: ignore[arg-type]
    )
    rows = Batch.of(ROWS[:2], side="left").numbered().rows(torch.tensor([0, 0, 0, 1, 1, 1]))
    drawn = generate(model.transformer, rows, 2, sampling=Sampling(seed=5))
    r = reward(drawn.tokens[:, -2:])
    assert rewards == [pytest.approx(float(r.mean()))]
    leaves = {name: torch.ones_like(z[name]).requires_grad_() for name in NAMES}
    network = model.transformer
    changes = {name: SingularValues.of(network, name).change(leaves[name]).AB for name in NAMES}
    logits = network.with_parameters(changed(network, changes))(drawn.tokens, keep=drawn.keep)
    said = logits[:, -3:-1].log_softmax(-1).gather(-1, drawn.tokens[:, -2:, None])[..., 0].sum(1)
    slopes = torch.autograd.grad(-(r * said).mean(), list(leaves.values()))  # at z = 1 the KL has no slope
    for name, slope in zip(NAMES, slopes, strict=True):
        assert_close(z[name], 1 - rate * slope)


def test_the_rewarded_token_becomes_more_probable_and_less_so_under_the_kl() -> None:
    model, row, wanted = subject(), torch.tensor([ROWS[0]]), 7

    def probability(z: dict[str, Tensor]) -> float:
        return float(adapted(model, z)(row)[0, -1].softmax(-1)[wanted])

    def reward(new: Tensor) -> Tensor:
        return 2.0 * (new[:, 0] == wanted) - 1.0

    tuning = FineTuning(steps=40, rate=0.05)
    found = [
        probability(reinforce_z(model, row, reward, NAMES, samples=64, kl=kl, tuning=tuning)[0])
        for kl in (0.0, 5.0)
    ]
    start = float(model.transformer(row)[0, -1].softmax(-1)[wanted])
    assert found[0] > 2 * start and found[0] > found[1]


def test_what_cannot_be_dispatched_or_rewarded_is_refused() -> None:
    model = subject()
    with pytest.raises(ValueError, match="vectors of 'rod' have no label; nearest: red"):
        two_passes(model, Batch.of(ROWS), {"rod": some(1)}, Dispatch(QUESTION, LABELS))
    with pytest.raises(ValueError, match="a label for each kind of prompt, got none"):
        Dispatch(QUESTION, {})
    with pytest.raises(ValueError, match="Dispatch: labels must be Mapping"):
        Dispatch(QUESTION, {"a": None})  # type: ignore[dict-item]
    for question in ([1, None], (1, None)):
        with pytest.raises(ValueError, match="Dispatch: question must be str or tuple"):
            Dispatch(question, LABELS)  # type: ignore[arg-type]
    for label in (-1, 10**9):
        with pytest.raises(ValueError, match=f"labels must be tokens from 0 to .*, got {label}"):
            Dispatch(QUESTION, {"a": label}).label_ids(model)
    with pytest.raises(ValueError, match="one finite number for each of 8 samples"):
        reinforce_z(model, Batch.of(ROWS[:1]), lambda new: new.double(), NAMES, new_tokens=2)
    for options in ({"samples": 0}, {"new_tokens": 0}, {"kl": -1.0}):
        with pytest.raises(ValueError, match="samples >= 1, new_tokens >= 1, kl >= 0 are required"):
            reinforce_z(model, Batch.of(ROWS[:1]), lambda new: new[:, 0].double(), NAMES, **options)  # type: ignore[arg-type]
    for samples in (10**9, 10**18):
        with pytest.raises(
            ValueError, match="reinforce_z: samples must be a whole number up to 10000000, got"
        ):
            reinforce_z(model, Batch.of(ROWS[:1]), lambda new: new[:, 0].double(), NAMES, samples=samples)
    with pytest.raises(
        ValueError, match=r"samples=10000000 of each prompt\) of 6 tokens: .* are free; fewer samples"
    ):
        reinforce_z(model, Batch.of(ROWS[:1]), lambda new: new[:, 0].double(), NAMES, samples=10**7)
    with pytest.raises(ValueError, match="distinct matrices"):
        reinforce_z(model, Batch.of(ROWS[:1]), lambda new: new[:, 0].double(), [])
