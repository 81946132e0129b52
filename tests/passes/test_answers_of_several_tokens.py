"""Answers of several tokens: log p(answer) under teacher forcing, against passes over the joined rows."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import interp
from interp import Edit, HookedTransformer
from interp.causal import ablate, attribution_patch, patch
from interp.data.answers import AnswerTokens
from interp.data.batch import Batch
from interp.data.text import Text
from interp.edits import Add, Zero
from interp.metrics import answer_log_probability, answer_loss, answer_probability, kl_divergence
from interp.model.tap import Read
from interp.passes.metrics import Metric, next_token_loss
from interp.passes.observe import observe
from tests.configs import build
from tests.loops import over
from tests.tiny import hooked
from tests.tolerances import assert_close

MODELS = ("gpt2", "llama-gqa", "window", "parallel", "gemma2")
CLEAN = [[3, 4, 5, 6, 7], [8, 2, 9], [1, 2, 3, 4, 5, 6, 7]]
CORRUPT = [[3, 9, 5, 2, 7], [8, 7, 9], [1, 2, 8, 4, 5, 1, 7]]
ANSWERS = [(4, 6, 2), (5,), (9, 1)]


def subject(name: str) -> HookedTransformer:
    return HookedTransformer(build(name), None, name=name)


def summed(model: HookedTransformer, prompt: list[int], answer: tuple[int, ...], edits: tuple = ()) -> Tensor:
    """log p(answer), from one pass over one joined row without padding."""
    joined = torch.tensor([[*prompt, *answer]])
    logits = observe(model, Batch(joined[:, :-1]), edits=edits).output.log_softmax(-1)[0]
    return sum(logits[len(prompt) - 1 + i, token] for i, token in enumerate(answer))  # type: ignore[return-value]


@pytest.mark.parametrize("name", MODELS)
def test_a_log_probability_is_the_sum_over_the_answers_tokens(name: str) -> None:
    model = subject(name)
    expected = torch.stack([summed(model, *each) for each in zip(CLEAN, ANSWERS, strict=True)])
    for metric, change in {
        answer_log_probability: lambda x: x, answer_loss: torch.neg, answer_probability: torch.exp,
    }.items():  # fmt: skip
        found = ablate(model, CLEAN, "mlp", change=Zero(), metric=metric(ANSWERS))
        assert_close(torch.from_numpy(found.base.values), change(expected))
    lengths = torch.tensor([len(answer) for answer in ANSWERS])
    for of, sign in ((answer_log_probability, 1), (answer_loss, -1)):
        found = ablate(model, CLEAN, "mlp", change=Zero(), metric=of(ANSWERS, per_token=True))
        assert_close(torch.from_numpy(found.base.values), sign * expected / lengths)
        assert found.attrs["unit"] == "nats per token"


@pytest.mark.parametrize("name", MODELS)
@over("direction", ["denoise", "noise"])
def test_every_patched_cell_is_what_passes_over_joined_rows_give(name: str, direction: str) -> None:
    model = subject(name)
    found = patch(
        model, CLEAN, CORRUPT, "resid_pre", metric=answer_log_probability(ANSWERS), direction=direction
    ).each
    for i, (clean, corrupt, answer) in enumerate(zip(CLEAN, CORRUPT, ANSWERS, strict=True)):
        own, other = (corrupt, clean) if direction == "denoise" else (clean, corrupt)
        before = summed(model, own, answer)
        for layer, p in itertools.product(range(2), range(len(own) + len(answer) - 1)):
            site = f"blocks.{layer}.hook_resid_pre"
            given = observe(model, Batch(torch.tensor([[*other, *answer[:-1]]])), [Read(site)]).trace[site]
            after = summed(model, own, answer, (Edit(site, interp.edits.Set(given[:, p]), {"pos": p}),))
            assert_close(torch.tensor(found.values[i, layer, p]), after - before)


def test_the_probabilities_of_all_answers_of_two_tokens_sum_to_one() -> None:
    model = subject("gpt2")
    every = list(itertools.product(range(model.cfg.d_vocab), repeat=2))
    found = ablate(
        model, [CLEAN[0]] * len(every), ["L0.mlp"], change=Zero(), metric=answer_probability(every)
    )
    assert_close(torch.tensor(found.base.values.sum()), torch.tensor(1.0, dtype=torch.float64))


def test_splitting_an_answer_takes_away_the_log_probability_of_its_part() -> None:
    model = subject("llama-gqa")
    base = lambda prompt, answer: float(  # noqa: E731
        ablate(model, [prompt], ["L0.mlp"], change=Zero(), metric=answer_log_probability([answer])).base[0]
    )
    whole = base(CLEAN[0], (4, 6, 2))
    first = base(CLEAN[0], (4,))
    assert whole == pytest.approx(first + base([*CLEAN[0], 4], (6, 2)), rel=1e-12)


def test_a_gradient_towards_an_answer_is_that_of_the_sum() -> None:
    model = subject("gpt2")
    site = "blocks.1.hook_resid_pre"
    found = attribution_patch(
        model, CLEAN, CORRUPT, "resid_pre", metric=answer_log_probability(ANSWERS), agreement=0
    ).each
    for i, (clean, corrupt, answer) in enumerate(zip(CLEAN, CORRUPT, ANSWERS, strict=True)):
        rows = [torch.tensor([[*own, *answer[:-1]]]) for own in (clean, corrupt)]

        def value(logits: Tensor, n: int = len(clean), answer: tuple[int, ...] = answer) -> Tensor:
            return sum(logits[0, n - 1 + j].log_softmax(-1)[token] for j, token in enumerate(answer))  # type: ignore[return-value]

        own = observe(model, Batch(rows[1]), [Read(site), Read(site, grad=True)], metric=value).trace
        other = observe(model, Batch(rows[0]), [Read(site)]).trace[site]
        expected = ((other - own[Read(site)]) * own[Read(site, grad=True)]).sum(-1)[0]
        assert_close(torch.from_numpy(found.values[i, 1, : expected.shape[0]]), expected)


def test_answers_are_compared_at_the_first_token_in_which_they_differ() -> None:
    model, prompts = subject("gpt2"), [[3, 4, 5], [6, 7]]
    two = interp.logit_difference([(4, 6, 2), (1, 2)], [(4, 7, 2), (1, 3)])
    with pytest.warns(interp.Note, match="compared at the first token in which they differ"):
        found = ablate(model, prompts, "head", change=Zero(), metric=two)
    joined = [[3, 4, 5, 4], [6, 7, 1]]
    one = ablate(model, joined, "head", change=Zero(), metric=interp.logit_difference([6, 2], [7, 3]))
    assert_close(torch.from_numpy(found.base.values), torch.from_numpy(one.base.values))
    assert_close(torch.from_numpy(found.each.values), torch.from_numpy(one.each.values))
    assert found.attrs["unit"] == "logits"


def test_a_logit_of_several_tokens_is_their_log_probability_and_says_so() -> None:
    model = subject("gpt2")
    asked, meant = (
        patch(model, CLEAN, CORRUPT, "resid_pre", metric=metric(ANSWERS))
        for metric in (interp.logit_difference, answer_log_probability)
    )
    assert (asked.attrs["metric"], asked.attrs["unit"]) == ("log probability", "nats")
    assert asked.identical(meant)


def test_answers_of_one_token_in_a_list_have_the_bits_of_single_ones() -> None:
    model = subject("gpt2")
    one, other = (
        patch(model, CLEAN, CORRUPT, "z", metric=answer_log_probability(answers))
        for answers in ([4, 5, 9], [(4,), (5,), (9,)])
    )
    assert one.identical(other)


def test_ids_of_one_axis_are_an_answer_each_and_of_two_several_tokens() -> None:
    model = subject("gpt2")
    ask = lambda answers: ablate(  # noqa: E731
        model, CLEAN, "head", change=Zero(), metric=answer_log_probability(answers)
    )
    assert ask(torch.tensor([4, 5, 9])).identical(ask([4, 5, 9]))
    assert ask(torch.tensor([4, 5, 9]).numpy()).identical(ask([4, 5, 9]))
    two = [(4, 6), (5, 1), (9, 2)]
    assert ask(torch.tensor(two)).identical(ask(two))


def test_position_minus_one_is_the_last_token_of_the_prompt() -> None:
    model = subject("gpt2")
    metric, direction = answer_log_probability(ANSWERS), torch.ones(24, dtype=torch.float64)
    edited = model.edited([Edit("L1.resid_pre", Add(direction), {"pos": -1})])
    found = ablate(edited, CLEAN, "mlp", change=Zero(), metric=metric)
    steered = patch(edited, CLEAN, CORRUPT, "resid_pre", metric=metric)
    for i, (prompt, answer) in enumerate(zip(CLEAN, ANSWERS, strict=True)):
        expected = summed(
            model, prompt, answer, (Edit("L1.resid_pre", Add(direction), {"pos": len(prompt) - 1}),)
        )
        assert_close(torch.tensor(found.base.values[i]), expected)
        assert_close(torch.tensor(steered.clean.values[i]), expected)


def test_metrics_that_ask_for_no_answer_see_the_prompt_alone() -> None:
    """Rows followed by their answers: a KL at the prompt's end, a loss over the prompt's tokens."""
    model = build("llama-gqa")
    plain = Batch.of(CLEAN).numbered()
    posed = AnswerTokens.of(Text(None, 99, 30), ANSWERS, several=True)
    assert posed is not None
    followed = posed.on(plain)

    def value(metric: Metric, batch: Batch) -> Tensor:
        from interp.passes.sweep import Sweep

        change = interp.edits.Variant([Edit("L0.mlp", Zero())])
        return Sweep(model, batch, [change]).run(metric).values

    for metric in (kl_divergence(), next_token_loss()):
        assert_close(value(metric, followed), value(metric, plain))


def test_answers_that_cannot_be_asked_are_refused() -> None:
    ask = lambda model, answers, wrong=None: ablate(  # noqa: E731
        model, CLEAN, "mlp", change=Zero(), metric=interp.logit_difference(answers, wrong)
    )
    with pytest.raises(ValueError, match="requires a causal model"):
        ask(subject("bidirectional"), ANSWERS)
    with pytest.raises(ValueError, match="must differ before one of them ends"):
        ask(subject("gpt2"), [(4, 6)], [(4,)])
    with pytest.raises(ValueError, match="must fit into the context"):
        ask(subject("gpt2"), [tuple([4] * 100)])
    with pytest.raises(ValueError, match="at least one token"):
        ask(subject("gpt2"), [()])
    with pytest.raises(ValueError, match="must be in"):
        ask(subject("gpt2"), [(4, 1000)])


def test_a_text_of_several_tokens_is_its_tokens() -> None:
    model = hooked()
    ids = model.text.tokenizer.encode(" Mary and John")
    assert len(ids) > 1
    one, other = (
        ablate(
            model, "When Mary and John went to the shop,", "head", change=Zero(), metric=answer_loss(answer)
        )
        for answer in (" Mary and John", [ids])
    )
    assert_close(torch.from_numpy(one.base.values), torch.from_numpy(other.base.values))
    logits = model("When Mary and John went to the shop, Mary and John")[0].double()
    row = model.to_tokens("When Mary and John went to the shop, Mary and John")[0]
    assert row[-len(ids) :].tolist() == ids
    expected = F.cross_entropy(logits[-len(ids) - 1 : -1], row[-len(ids) :], reduction="sum")
    assert_close(torch.tensor(float(one.base[0]), dtype=torch.float64), expected.reshape(()))
