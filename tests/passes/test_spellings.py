"""Answers of several spellings and differences of whole answers, against one pass over each joined row."""

import itertools

import pytest
import torch
from torch import Tensor

import interp
from interp import Edit, HookedTransformer
from interp.causal import ablate, attribution_patch, patch, path_patch
from interp.data import Spellings
from interp.data.answers import AnswerTokens
from interp.data.batch import Batch
from interp.data.text import Text
from interp.edits import Zero
from interp.metrics import (
    answer_log_probability,
    answer_loss,
    answer_probability,
    log_prob_difference,
    logit_difference,
)
from interp.model.tap import Read
from interp.passes.observe import observe
from tests.configs import CONFIGS, build
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.passes.test_answers_of_several_tokens import CLEAN, CORRUPT, subject, summed
from tests.tolerances import assert_close

MODELS = ("gpt2", "llama-gqa", "window", "parallel", "gemma2", "gemma3")
SETS = [Spellings([(4, 6, 2), (4, 7), 5]), Spellings([5]), Spellings([(9, 1), (8, 1, 1), (9, 3)])]
WRONG = [(4, 8, 3, 1), Spellings([(7, 7), (7, 6, 2)]), (9, 2)]


def tokens_of(answers: object) -> list[tuple[int, ...]]:
    """The spellings of an answer as tuples of ids."""
    listed = answers.texts if isinstance(answers, Spellings) else [answers]
    return [item if isinstance(item, tuple) else (item,) for item in listed]  # type: ignore[misc]


def of_either(model: HookedTransformer, prompt: list[int], answers: object, edits: tuple = ()) -> Tensor:
    """log of the summed probabilities, one pass for each spelling."""
    return torch.stack([summed(model, prompt, tokens, edits) for tokens in tokens_of(answers)]).logsumexp(0)


def difference(model: HookedTransformer, row: int, prompt: list[int], edits: tuple = ()) -> Tensor:
    return of_either(model, prompt, SETS[row], edits) - of_either(model, prompt, WRONG[row], edits)


@pytest.mark.parametrize("name", MODELS)
def test_the_probability_of_spellings_is_the_sum_of_theirs(name: str) -> None:
    model = subject(name)
    expected = torch.stack([of_either(model, *each) for each in zip(CLEAN, SETS, strict=True)])
    for metric, change in {
        answer_log_probability: lambda x: x, answer_loss: torch.neg, answer_probability: torch.exp,
    }.items():  # fmt: skip
        found = ablate(model, CLEAN, "mlp" if model.cfg.mlp else "attn", change=Zero(), metric=metric(SETS))
        assert_close(torch.from_numpy(found.base.values), change(expected))
        edits = (Edit("L1.mlp", Zero()),)
        without = torch.stack([of_either(model, *each, edits) for each in zip(CLEAN, SETS, strict=True)])
        assert_close(
            torch.from_numpy(found.each.sel(part="L1.mlp").values), change(without) - change(expected)
        )


@pytest.mark.parametrize("name", MODELS)
@over("direction", ["denoise", "noise"])
def test_whole_answers_of_any_lengths_are_compared_as_two_passes_compare_them(
    name: str, direction: str
) -> None:
    model = subject(name)
    found = patch(
        model, CLEAN, CORRUPT, "resid_pre", metric=log_prob_difference(SETS, WRONG), direction=direction
    ).each
    for i, (clean, corrupt) in enumerate(zip(CLEAN, CORRUPT, strict=True)):
        own, other = (corrupt, clean) if direction == "denoise" else (clean, corrupt)
        before = difference(model, i, own)
        for layer, p in itertools.product(range(2), range(len(own))):
            site = f"blocks.{layer}.hook_resid_pre"
            given = observe(model, Batch(torch.tensor([other])), [Read(site)]).trace[site]
            edits = (Edit(site, interp.edits.Set(given[:, p]), {"pos": p}),)
            assert_close(torch.tensor(found.values[i, layer, p]), difference(model, i, own, edits) - before)


def test_all_spellings_of_a_toy_vocabulary_are_certain_together() -> None:
    model = subject("gpt2")
    v = model.cfg.d_vocab
    every = Spellings([*range(v - 1), *[(v - 1, token) for token in range(v)]])
    found = ablate(model, CLEAN, ["L0.mlp"], change=Zero(), metric=answer_log_probability(every))
    assert_close(torch.from_numpy(found.base.values), torch.zeros(len(CLEAN), dtype=torch.float64))
    assert_close(torch.from_numpy(found.each.values), torch.zeros(len(CLEAN), 1, dtype=torch.float64))


@over("answers", [[(4, 6, 2), 5, (9, 1)], [4, 5, 9]])
def test_one_spelling_has_the_bits_of_an_answer(answers: list[object]) -> None:
    model = subject("llama-gqa")
    one, other = (
        patch(model, CLEAN, CORRUPT, "z", metric=answer_log_probability(given))
        for given in (answers, [Spellings([item]) for item in answers])
    )
    assert one.identical(other)


def test_a_difference_of_single_tokens_is_their_logit_difference() -> None:
    model = subject("gpt2")
    one, other = (
        ablate(model, CLEAN, "head", change=Zero(), metric=of([4, 5, 9], [3, 2, 1]))
        for of in (log_prob_difference, logit_difference)
    )
    assert_close(torch.from_numpy(one.each.values), torch.from_numpy(other.each.values))
    assert one.attrs["unit"] == "nats"


def test_the_mean_over_tokens_is_taken_of_each_answer() -> None:
    model, right, wrong = subject("gpt2"), [(4, 6, 2)], [(5, 1)]
    found = ablate(
        model, CLEAN[:1], ["L0.mlp"], change=Zero(), metric=log_prob_difference(right, wrong, per_token=True)
    )
    expected = summed(model, CLEAN[0], right[0]) / 3 - summed(model, CLEAN[0], wrong[0]) / 2
    assert_close(torch.tensor(found.base.values[0]), expected)
    assert found.attrs["unit"] == "nats per token"


def test_gradients_are_those_of_the_joined_rows() -> None:
    model, site = subject("llama-gqa"), "blocks.1.hook_resid_pre"
    found = attribution_patch(
        model, CLEAN, CORRUPT, "resid_pre", metric=log_prob_difference(SETS, WRONG), agreement=0
    ).each
    for i, (clean, corrupt) in enumerate(zip(CLEAN, CORRUPT, strict=True)):
        start = observe(model, Batch(torch.tensor([corrupt])), [Read(site)]).trace[site]
        other = observe(model, Batch(torch.tensor([clean])), [Read(site)]).trace[site]
        moved = start.clone().requires_grad_()
        gradient = torch.autograd.grad(_continued(model, i, corrupt, moved), moved)[0]
        expected = ((other - start) * gradient).sum(-1)[0]
        assert_close(torch.from_numpy(found.values[i, 1, : len(clean)]), expected)


def _continued(model: HookedTransformer, row: int, prompt: list[int], stream: Tensor) -> Tensor:
    """The difference of a row where this stream of its prompt enters the second block."""
    sums = []
    for answers in (SETS[row], WRONG[row]):
        values = []
        for tokens in tokens_of(answers):
            joined = torch.tensor([[*prompt, *tokens[:-1]]])
            site = "blocks.1.hook_resid_pre"
            whole = observe(model, Batch(joined), [Read(site)]).trace[site]
            entering = torch.cat((stream, whole[:, len(prompt) :]), 1)
            logits = model.transformer(entering, start=1)[0].log_softmax(-1)
            values.append(sum(logits[len(prompt) - 1 + j, token] for j, token in enumerate(tokens)))
        sums.append(torch.stack(values).logsumexp(0))  # type: ignore[arg-type]
    return sums[0] - sums[1]


def test_rows_alone_and_together_have_the_same_values() -> None:
    model = subject("gpt2")
    metric = log_prob_difference(SETS, WRONG)
    together = path_patch(model, clean=CLEAN, corrupt=CORRUPT, senders=["L0H1", "L0.mlp"], metric=metric).each
    for i in range(len(CLEAN)):
        alone = path_patch(
            model, clean=CLEAN[i : i + 1], corrupt=CORRUPT[i : i + 1], senders=["L0H1", "L0.mlp"],
            metric=log_prob_difference(SETS[i], [WRONG[i]] if isinstance(WRONG[i], tuple) else WRONG[i]),
        ).each  # fmt: skip
        assert_close(torch.from_numpy(together.values[i]), torch.from_numpy(alone.values[0]))


def test_what_the_answers_share_stands_in_the_row_once() -> None:
    text = Text(None, 31, 24)
    asked = AnswerTokens.of_choices(text, [(4, 6, 2)], [(4, 7)])
    assert asked is not None and asked.forced is not None
    assert asked.forced.tolist() == [[4, 6]] and asked.branches is None
    apart = AnswerTokens.of_choices(text, [(4, 6, 2)], [(4, 7, 1, 1)])
    assert apart is not None and apart.forced is not None and apart.branches is not None
    assert apart.forced.tolist() == [[4, 7, 1, 6]] and apart.branches.tolist() == [[0, 1, 1, 2]]
    assert apart.choices is not None and apart.choices.steps.tolist() == [[[0, 1, 4, 0], [0, 1, 2, 3]]]


def test_an_answer_that_goes_on_is_compared_with_its_own_beginning() -> None:
    model = subject("gpt2")
    found = ablate(model, CLEAN[:1], ["L0.mlp"], change=Zero(), metric=log_prob_difference([(4, 6)], [(4,)]))
    expected = summed(model, [*CLEAN[0], 4], (6,))
    assert_close(torch.tensor(found.base.values[0]), expected)


@over("mixed", sorted({**MIXERS, **CONFIGS}))
def test_models_whose_layers_cannot_keep_continuations_apart_say_so(mixed: str) -> None:
    network = build_mixed(mixed) if mixed in MIXERS else build(mixed)
    config, prompt = network.config, [3, 4, 5]
    if (
        not (config.causal and config.unembed and config.n_outputs == config.d_vocab)
        or config.cross_attention
    ):
        return
    model = HookedTransformer(network, None, name=mixed)
    asked = log_prob_difference([(4, 6)], [(5, 7, 1)])
    if not config.branching:
        with pytest.raises(ValueError, match="causal softmax attention in every layer"):
            ablate(model, [prompt], ["L0.attn"], change=Zero(), metric=asked)
        return
    found = ablate(model, [prompt], ["L0.attn"], change=Zero(), metric=asked)
    expected = summed(model, prompt, (4, 6)) - summed(model, prompt, (5, 7, 1))
    assert_close(torch.tensor(found.base.values[0]), expected)


@over(
    "answers, words",
    [
        (Spellings([(4, 6), (4, 6, 2)]), "a spelling must not begin with another"),
        (Spellings([4, (4, 2)]), "a spelling must not begin with another"),
    ],
)
def test_a_spelling_that_begins_with_another_is_refused(answers: Spellings, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ablate(subject("gpt2"), CLEAN, ["L0.mlp"], change=Zero(), metric=answer_probability(answers))


def test_an_answer_that_is_the_wrong_one_is_refused() -> None:
    metric = log_prob_difference(Spellings([(4, 6), 5]), 5)
    with pytest.raises(ValueError, match="the answer and the wrong answer must differ"):
        ablate(subject("gpt2"), CLEAN, ["L0.mlp"], change=Zero(), metric=metric)


@over("given", [[], [4, 4], [""], [()], "Mary", [1.5]])
def test_spellings_are_texts_or_ids_that_differ(given: object) -> None:
    with pytest.raises(ValueError, match=r"spellings .*required|spellings as texts or ids"):
        Spellings(given)  # type: ignore[arg-type]


def test_what_is_of_one_answer_refuses_several_spellings() -> None:
    model, answer = subject("gpt2"), Spellings([4, 5])
    for call in (
        lambda: interp.attribute(model, CLEAN, answer),
        lambda: interp.logit_lens(model, CLEAN, answer=answer),
        lambda: interp.token_attribution(model, CLEAN, answer, method="gradient_x_input"),
        lambda: ablate(model, CLEAN, ["L0.mlp"], change=Zero(), metric=logit_difference(answer)),
        lambda: interp.causal_trace(model, CLEAN, subject=[range(1, 2)] * 3, answer=answer),
    ):
        with pytest.raises(ValueError, match="one spelling of an answer is required here"):
            call()
    with pytest.raises(ValueError, match="of one spelling"):
        answer_log_probability(answer, per_token=True)


def test_half_of_a_difference_is_refused() -> None:
    with pytest.raises(ValueError, match="an answer and a wrong answer are required"):
        log_prob_difference(4)
    with pytest.raises(ValueError, match="requires an answer and a wrong answer"):
        ablate(subject("gpt2"), Batch(torch.tensor(CLEAN[:1]), answer=torch.tensor([4])), ["L0.mlp"],
               change=Zero(), metric=log_prob_difference())  # fmt: skip
