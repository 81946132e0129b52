"""Relations against autograd, finite differences, one edited pass per subject, and a model in which they are affine."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

from interp import Edit, HookedTransformer
from interp.causal import linear_relation
from interp.causal.linear_relations import LinearRelation, RelationPrompts, low_rank_inverse, subject_jacobian
from interp.edits import Add
from interp.families.tokenizer import HuggingFaceTokenizer
from interp.model.config import NoPosition
from interp.model.sites import stream_after
from interp.model.tap import Read
from interp.passes.observe import observe
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.loops import over
from tests.tiny import backend, gpt2_tokenizer
from tests.tolerances import assert_close

WORDS = ["cat", "dog", "mat", "Mary", "John", "shop", "drink", "France", "Paris", "Italy", "Rome", "capital"]
PAIRS = list(zip(WORDS, [*WORDS[1:], WORDS[0]], strict=True))
IDS = [([i], [i + 1]) for i in range(3, 17)]
CUT = [(word, "cat") for word in ["capit", *WORDS]]
TEMPLATE = "the {input} is {output}"


def model_of(name: str, **changes: object) -> HookedTransformer:
    """A random model with a tokenizer and room for statements."""
    config = replace(CONFIGS[name], n_ctx=64, d_vocab=backend().get_vocab_size(), **changes)  # type: ignore[arg-type]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = perturbed(config)
    return HookedTransformer(network, HuggingFaceTokenizer(gpt2_tokenizer()))


@functools.cache
def model() -> HookedTransformer:
    return model_of("gpt2")


@functools.cache
def found() -> xr.Dataset:
    return linear_relation(
        model(), PAIRS, TEMPLATE, layers=[0], examples=4, beta=1.5, rank=6, only_known=False
    )


@functools.cache
def prompts() -> RelationPrompts:
    return RelationPrompts.of(LinearRelation(PAIRS, TEMPLATE, examples=4), model().text)


def state_and_end(
    network: HookedTransformer, ids: list[int], column: int, edits: list[Edit] = ()
) -> tuple[Tensor, Tensor, int]:  # type: ignore[assignment]
    """s, o and the top token of one prompt, by one pass."""
    reads = [Read("blocks.0.hook_resid_post"), Read("blocks.1.hook_resid_post")]
    run = observe(network, torch.tensor([ids]), reads, edits=edits)
    return run.trace[reads[0]][0, column], run.trace[reads[1]][0, -1], int(run.output[0, -1].argmax())


# --- the Jacobian -----------------------------------------------------------------------------------------------------


@over("name", CONFIGS)
def test_jacobian_is_that_of_autograd(name: str) -> None:
    """Of the pass with the state put in place, column by column, also where every token sees all others."""
    network, tokens = build(name), some_tokens(1, 8)[0]
    site = stream_after(network.config, 0)

    def end(state: Tensor) -> Tensor:
        edit = Edit(site, lambda cells: state.expand_as(cells), {"pos": 3})
        final = Read(stream_after(network.config, 1))
        return observe(network, tokens[None], [final], edits=[edit]).trace[final][0, -1]

    jacobian, s, o = subject_jacobian(network, tokens, 3, 0)
    assert_close(o, end(s))
    expected = numerical(end, s)
    assert float((jacobian - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


def numerical(function: object, s: Tensor, step: float = 1e-5) -> Tensor:
    """The Jacobian by central differences, whose error is of order step^2 and of rounding / step."""
    columns = [
        (function(s + step * unit) - function(s - step * unit)) / (2 * step)  # type: ignore[operator]
        for unit in torch.eye(len(s), dtype=s.dtype)
    ]
    return torch.stack(columns, 1)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2"])
def test_jacobian_equals_torch_func_jacrev(name: str) -> None:
    network, tokens = build(name), some_tokens(1, 8)[0]
    site = Read(stream_after(network.config, 1 - 1))
    stream = observe(network, tokens[None], [site]).trace[site]

    def end(state: Tensor) -> Tensor:
        entering = torch.cat((stream[:, :5], state[None, None], stream[:, 6:]), 1)
        return network(entering, start=1, stop=2)[0, -1]

    jacobian, s, _ = subject_jacobian(network, tokens, 5, 0)
    with torch.enable_grad():
        expected = torch.autograd.functional.jacobian(end, s)
    assert_close(jacobian, expected)


def test_weight_and_bias_are_means_over_the_examples() -> None:
    weights, biases = [], []
    for ids, column in zip(prompts().examples, prompts().example_columns, strict=True):
        jacobian, s, o = subject_jacobian(model().transformer, torch.tensor(ids), column, 0)
        own, end, _ = state_and_end(model(), ids, column)
        assert_close(s, own)
        assert_close(o, end)
        weights.append(jacobian)
        biases.append(end - jacobian @ own)
    assert_close(torch.from_numpy(found().weight.values[0]), torch.stack(weights).mean(0))
    assert_close(torch.from_numpy(found().bias.values[0]), torch.stack(biases).mean(0))


# --- the prompts ------------------------------------------------------------------------------------------------------


def test_prompts_state_the_examples_and_end_after_the_subject_asked() -> None:
    text, asked = model().text, prompts()
    subjects = found().subject.values.tolist()
    outputs = dict(PAIRS)
    for ids, column, subject, token in zip(
        asked.test, asked.test_columns, subjects, asked.objects, strict=True
    ):
        *stated, last = text.tokenizer.decode(ids).split("\n")
        assert last == f"the {subject} is" and len(stated) == 4
        assert all(outputs[line.split()[1]] == line.split()[3] for line in stated)
        assert text.tokenizer.decode(ids[: column + 1]).endswith(f"the {subject}")
        assert token == text.tokenizer.encode(f" {outputs[subject]}")[0]
    for ids, column in zip(asked.examples, asked.example_columns, strict=True):
        *stated, last = text.tokenizer.decode(ids).split("\n")
        subject = last.split()[1]
        assert (
            len(stated) == 3
            and subject not in subjects
            and not any(subject in line.split()[1] for line in stated)
        )
        assert text.tokenizer.decode(ids[: column + 1]).endswith(subject)


# --- the scores -------------------------------------------------------------------------------------------------------


def test_faithfulness_is_the_share_of_subjects_with_the_models_own_answer() -> None:
    network = model()
    weight, bias = (torch.from_numpy(found()[name].values[0]) for name in ("weight", "bias"))
    rows = [state_and_end(network, *row) for row in zip(prompts().test, prompts().test_columns, strict=True)]
    examples = [
        state_and_end(network, *row)
        for row in zip(prompts().examples, prompts().example_columns, strict=True)
    ]
    step = torch.stack([o - s for s, o, _ in examples]).mean(0)
    guesses = {
        "faithfulness": [1.5 * weight @ s + bias for s, _, _ in rows],
        "faithfulness_translation": [s + step for s, _, _ in rows],
    }
    own = [top for _, _, top in rows]
    assert found().answered.values.tolist() == own
    for name, states in guesses.items():
        tops = [int(network.transformer.read_out(state[None, None])[0, 0].argmax()) for state in states]
        hits = [guess == top for guess, top in zip(tops, own, strict=True)]
        assert float(found().value.sel(score=name, layer=0)) == pytest.approx(np.mean(hits))
        chance = [tops[i] == own[j] for i in range(len(own)) for j in range(len(own)) if i != j]
        if name == "faithfulness":
            assert found().predicted.values[0].tolist() == tops
            assert float(found().null.sel(score=name, layer=0)) == pytest.approx(np.mean(chance))
    assert set(found().n.sel(layer=0, score=list(guesses)).values.tolist()) == {len(own)}


def test_known_subjects_alone_are_judged() -> None:
    """Pairs whose objects are the model's own answers are known, all others are not."""
    own = found().answered.values.tolist()
    first = [
        model().text.tokenizer.encode(f" {dict(PAIRS)[subject]}")[0] for subject in found().subject.values
    ]
    assert found().known.values.tolist() == [a == b for a, b in zip(own, first, strict=True)]
    if not any(found().known.values):
        with pytest.raises(ValueError, match="knows none of the 8 subjects"):
            linear_relation(model(), PAIRS, TEMPLATE, layers=[0], examples=4)


def test_edits_are_those_of_one_edited_pass_per_subject() -> None:
    network, question = model(), LinearRelation(PAIRS, TEMPLATE, layers=[0], examples=4, only_known=False)
    weight = torch.from_numpy(found().weight.values[0])
    rows = [state_and_end(network, *row) for row in zip(prompts().test, prompts().test_columns, strict=True)]
    own, draw, hits = [top for _, _, top in rows], np.random.default_rng([question.seed, 1]), []
    for i, (s, o, top) in enumerate(rows):
        others = [j for j in range(len(rows)) if own[j] != top]
        if not others:
            continue
        other_s, other_o, wanted = rows[int(draw.choice(others))]
        moves = (torch.linalg.pinv(rank_of(weight, 6)) @ (other_o - o), other_s - s)
        ids, column = prompts().test[i], prompts().test_columns[i]
        site = "blocks.0.hook_resid_post"
        tops = [
            state_and_end(network, ids, column, [Edit(site, Add(move), {"pos": column})])[2] for move in moves
        ]
        hits.append([guess == wanted for guess in tops])
    assert len(hits) > 2
    scores = found().value.sel(layer=0, score=["causality", "causality_replaced"])
    np.testing.assert_allclose(scores, np.mean(hits, 0))


def test_layers_together_are_each_alone() -> None:
    network = model_of("gpt2", n_layers=3)
    how = {"template": TEMPLATE, "examples": 3, "only_known": False}
    both = linear_relation(network, PAIRS, layers=[1, 0], **how)  # type: ignore[arg-type]
    for layer in (0, 1):
        alone = linear_relation(network, PAIRS, layers=[layer], **how)  # type: ignore[arg-type]
        np.testing.assert_allclose(both.weight.sel(layer=layer), alone.weight[0], atol=1e-12)
        scores = [name for name in alone.score.values if name != "causality_random"]
        np.testing.assert_allclose(
            both.value.sel(layer=layer, score=scores), alone.value[0].sel(score=scores)
        )


def rank_of(matrix: Tensor, rank: int) -> Tensor:
    """The best approximation of this rank (Eckart and Young)."""
    u, sizes, v = torch.linalg.svd(matrix)
    return u[:, :rank] @ torch.diag(sizes[:rank]) @ v[:rank]


def test_low_rank_inverse_is_the_pseudo_inverse_of_the_best_approximation() -> None:
    matrix = torch.randn(7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for rank in (1, 3, 7):
        assert_close(low_rank_inverse(matrix, rank), torch.linalg.pinv(rank_of(matrix, rank), rtol=1e-12))
    matrix[:, 3] = matrix[:, 2]
    assert_close(low_rank_inverse(matrix, 7), torch.linalg.pinv(matrix))


# --- an affine model --------------------------------------------------------------------------------------------------


def affine() -> HookedTransformer:
    """A model whose final state is affine in the subject's: no norms, silent heads, neurons that are always active."""
    network = model_of("no-norm", position=NoPosition(), final_norm=False)
    with torch.no_grad():
        for layer in range(2):
            network.transformer.block(layer).attn.out.weight.zero_()
        network.transformer.embed.weight.mul_(3.0)
        mlp = network.transformer.block(1).mlp
        mlp.into.bias.fill_(1e3)
        mlp.out.bias.copy_(-1e3 * mlp.out.weight.sum(1))  # x W_in W_out is left
    return network


def test_an_affine_relation_is_faithful_and_causal() -> None:
    relation = linear_relation(affine(), IDS, layers=[0], examples=3, rank=24, only_known=False)
    values = relation.value.sel(layer=0).to_series()
    assert len(set(relation.answered.values.tolist())) > 3
    assert (
        values["faithfulness"] == 1.0 and values["causality"] == 1.0 and values["causality_replaced"] == 1.0
    )
    assert values["faithfulness_translation"] < 1.0 and values["faithfulness_most_frequent"] < 0.5
    assert values["causality_random"] < 0.5 and float(relation.null.sel(layer=0, score="faithfulness")) < 0.5
    lower = linear_relation(affine(), IDS, layers=[0], examples=3, rank=1, only_known=False)
    assert float(lower.value.sel(layer=0, score="causality")) < 1.0


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"layers": [1]}, ValueError, "a block before the last"),
        ({"layers": [2]}, IndexError, "layer must be in"),
        ({"rank": 25}, ValueError, "at most the width 24"),
        ({"template": "the {input} is"}, ValueError, "ends in {output}"),
        ({"pairs": PAIRS[:9]}, ValueError, "at least 10 are required"),
        ({"template": "the {input}al{output}", "pairs": CUT}, ValueError, "ends with a token"),
        ({"beta": 0.0}, ValueError, "above 0"),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, object], error: type[Exception], message: str) -> None:
    given = {"pairs": PAIRS, "template": TEMPLATE, "layers": [0], **fields}
    with pytest.raises(error, match=message):
        linear_relation(model(), **given)  # type: ignore[arg-type]
