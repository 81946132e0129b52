"""Effects of heads and of function vectors against one edited pass per head and prompt, and against a planted task."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import interp
from interp import Edit, HookedTransformer
from interp.causal import Subspace, average_indirect_effect, function_vectors
from interp.causal.function_vectors import change_interval, head_outputs
from interp.core.stats import Moments, Rows, share_interval
from interp.data.batch import Batch
from interp.edits import Add, Set
from interp.families.tokenizer import HuggingFaceTokenizer
from interp.model import Transformer
from interp.model.config import LayerNorm, ModelConfig, NoNorm, NoPosition
from interp.model.tap import Read
from interp.passes.frozen import output_scale
from interp.passes.observe import observe
from interp.passes.question import ByRow
from interp.tasks import PairLists
from interp.zoo.groundtruth import noisy, plant_head
from tests.configs import CAUSAL, CONFIGS, build, perturbed, some_tokens
from tests.contract.case import kept_by_hand
from tests.loops import over
from tests.tiny import backend, gpt2_tokenizer
from tests.tolerances import assert_close

LISTS = PairLists(shots=3, rows=4, template="{input}: {output}", separator=", ", seed=1)
WORDS = ["cat", "dog", "mat", "Mary", "John", "shop", "drink", "France", "Paris", "Italy", "Rome", "capital"]
TEXTS = {
    "next": list(zip(WORDS, [*WORDS[1:], WORDS[0]], strict=True)),
    "back": list(zip(WORDS, [WORDS[-1], *WORDS[:-1]], strict=True)),
}
IDS = {"next": [([i], [i + 1]) for i in range(3, 15)], "two": [([i], [i + 1, i + 2]) for i in range(3, 15)]}


@functools.cache
def model() -> HookedTransformer:
    """A model with a tokenizer and room for lists of words, which are of one token or several."""
    config = replace(CONFIGS["gpt2"], n_ctx=64, d_vocab=backend().get_vocab_size())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = perturbed(config)
    return HookedTransformer(network, HuggingFaceTokenizer(gpt2_tokenizer()))


def tokens_of(network: HookedTransformer, prompt: object, answer: object) -> tuple[list[int], list[int]]:
    """The ids of a prompt, BOS included where the model wants it, and of its answer."""
    ids = network.text.batch([prompt]).tokens[0].tolist()
    return ids, network.text.continuations([answer])[0]


def probability(
    network: HookedTransformer, prompt: object, answer: object, edits: list[Edit]
) -> tuple[float, float]:
    """p(answer), and whether greedy decoding writes it: token by token, with the edits at the prompt's last token."""
    ids, rest = tokens_of(network, prompt, answer)
    end, product, greedy = len(ids) - 1, 1.0, 1.0
    at_end = [replace(edit, at={**edit.at, "pos": end}) for edit in edits]
    for token in rest:
        logits = observe(network, torch.tensor([ids]), edits=at_end).output[0, -1]
        product *= float(logits.softmax(-1)[token])
        greedy *= float(logits.argmax() == token)
        ids = [*ids, token]
    return product, greedy


def slow_outputs(network: HookedTransformer, prompts: object, layer: int) -> Tensor:
    """The mean output z of every head of a layer at the last token of the prompts, one pass each."""
    site = f"blocks.{layer}.attn.hook_z"
    rows = []
    for prompt in prompts:  # type: ignore[attr-defined]
        tokens = network.text.batch([prompt]).tokens
        rows.append(observe(network, tokens, [Read(site)]).trace[Read(site)][0, -1])
    return torch.stack(rows).mean(0)


@pytest.mark.parametrize("tasks", [TEXTS, IDS], ids=["texts", "ids"])
def test_effects_are_those_of_one_edited_pass_per_head_and_list(tasks: dict[str, list]) -> None:  # type: ignore[type-arg]
    network, config = model(), model().cfg
    found = average_indirect_effect(network, tasks, lists=LISTS)
    for task, pairs in tasks.items():
        asked = LISTS.lists(pairs, "effect", shuffled=True)
        base = [probability(network, *row, [])[0] for row in zip(*asked, strict=True)]
        assert float(found.shuffled.sel(task=task)) == pytest.approx(np.mean(base), rel=1e-9)
        right = LISTS.lists(pairs, "effect")
        clean = [probability(network, *row, [])[0] for row in zip(*right, strict=True)]
        assert float(found.correct.sel(task=task)) == pytest.approx(np.mean(clean), rel=1e-9)
        for layer in range(config.n_layers):
            z = slow_outputs(network, LISTS.lists(pairs, "mean").prompts, layer)
            for head in range(config.n_heads):
                edit = [Edit(f"L{layer}H{head}", Set(z[head]))]
                moved = [probability(network, *row, edit)[0] for row in zip(*asked, strict=True)]
                expected = np.mean(np.subtract(moved, base))
                assert float(found.by_task.sel(task=task)[layer, head]) == pytest.approx(expected, abs=1e-12)
    np.testing.assert_allclose(found.value, found.by_task.mean("task"), atol=1e-12)
    assert found.part.values[1, 2] == "L1H2" and set(found.n.values.flat) == {8}


def test_the_null_puts_in_the_mean_of_shuffled_lists() -> None:
    network, pairs = model(), TEXTS["next"]
    found = average_indirect_effect(
        network, {"next": pairs}, metric=interp.metrics.answer_log_probability(), lists=LISTS
    )
    asked = LISTS.lists(pairs, "effect", shuffled=True)
    z = slow_outputs(network, LISTS.lists(pairs, "mean", shuffled=True).prompts, 1)
    edit = [Edit("L1H2", Set(z[2]))]
    moved = [
        np.log(probability(network, *row, edit)[0] / probability(network, *row, [])[0])
        for row in zip(*asked, strict=True)
    ]
    assert float(found.null[1, 2]) == pytest.approx(np.mean(moved), abs=1e-9)
    assert found.attrs["unit"] == "nats"
    np.testing.assert_allclose(found.beyond.sel(estimate="value"), found.value - found.null, atol=1e-12)


@over("name", CAUSAL)
def test_what_heads_add_sums_to_what_their_sublayer_adds(name: str) -> None:
    """But for what the sublayer adds without heads: its bias, carried through the same norm."""
    network, tokens = build(name), some_tokens(3, 7)
    keep = torch.ones(3, 7, dtype=torch.bool)
    keep[1, 5:] = False
    kept = kept_by_hand(ByRow("heads", head_outputs, Rows), network, [Batch(tokens, keep=keep)])
    assert isinstance(kept, Rows)
    added = kept.rows["added"].sum(2)  # [b l h d] -> [b l d]
    for layer in range(network.config.n_layers):
        site = f"blocks.{layer}.hook_attn_out"
        reads = [Read(site), *(Read(scale) for scale in output_scale(network.config, layer, "attn_out"))]
        trace = observe(network, Batch(tokens, keep=keep), reads).trace
        out, *scales = (trace[read][torch.arange(3), torch.tensor([6, 4, 6])] for read in reads)
        assert_close(added[:, layer] + beta(network, layer, added, *scales), out)


def beta(network: Transformer, layer: int, like: Tensor, scale: Tensor | None = None) -> Tensor:
    """What the sublayer adds without heads: attention's bias, through an output norm of this scale, and its beta."""
    block, factor = network.block(layer), network.config.factor("attn_out")
    bias = torch.zeros_like(like[:, 0]) if block.attn.out.bias is None else block.attn.out.bias
    if scale is None or block.ln1_post is None:
        return bias * factor
    centred = bias - bias.mean() if isinstance(network.config.norm, LayerNorm) else bias
    beyond = 0 if block.ln1_post.bias is None else block.ln1_post.bias
    return (centred / scale * block.ln1_post.gamma + beyond) * factor


def test_a_vector_sums_what_the_heads_of_largest_effect_add() -> None:
    network, lists = model(), LISTS
    found = function_vectors(network, TEXTS, top=3, random=2, layers=[0, 1], lists=lists)
    effects = average_indirect_effect(network, TEXTS, lists=lists)
    ranked = interp.frame(effects).sort_values("value", ascending=False).part.tolist()[:3]
    assert found.heads.values.tolist() == ranked
    for task, pairs in TEXTS.items():
        total = torch.zeros(network.cfg.d_model, dtype=torch.float64)
        for part in ranked:
            layer, head = int(part[1]), int(part[3])
            z = slow_outputs(network, lists.lists(pairs, "mean").prompts, layer)
            total += z[head] @ network.W_O[layer, head]
        assert_close(torch.from_numpy(found.directions.sel(task=task).values[1, 0]), total)


@pytest.mark.parametrize("tasks", [TEXTS, IDS], ids=["texts", "ids"])
def test_scores_are_those_of_one_edited_pass_per_prompt(tasks: dict[str, list]) -> None:  # type: ignore[type-arg]
    network = model()
    templates = ["The {input} is"] if tasks is TEXTS else []
    found = function_vectors(
        network, tasks, heads=["L0H1", "L1H2"], layers=[1], random=3, lists=LISTS, templates=templates
    )
    for task, pairs in tasks.items():
        steer = Subspace.of_result(found.sel(task=task), layer=1)
        other = Subspace.of_result(found.drop_sel(task=task).isel(task=0), layer=1)
        settings = {
            "zero-shot": LISTS.zero_shot(pairs),
            "shuffled labels": LISTS.lists(pairs, "test", shuffled=True),
        }
        settings |= {template: LISTS.zero_shot(pairs, template) for template in templates}
        for setting, asked in settings.items():
            edits = {"none": [], "function vector": [steer.add()], "other tasks": [other.add()]}
            for vector, its in edits.items():
                rows = [probability(network, *row, its) for row in zip(*asked, strict=True)]
                cell = found.sel(task=task, setting=setting, layer=1, vector=vector)
                expected = np.mean(rows, 0)
                got = cell.value.sel(score=["probability", "accuracy"]).values
                np.testing.assert_allclose(got, expected, atol=1e-12)
                change = float(cell.value.sel(score="probability_change"))
                none = found.sel(task=task, setting=setting, layer=1, vector="none", score="probability")
                assert change == pytest.approx(expected[0] - float(none.value), abs=1e-12)
                assert int(cell.n.sel(score="accuracy")) == len(rows)


def test_interval_of_a_change_is_that_of_the_share_it_is_made_of() -> None:
    changes = torch.rand(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    low, high = change_interval(Moments.of(changes))
    shares = (1 + changes) / 2
    expected = share_interval(shares.mean(0), 9, shares.var(0, correction=0))
    assert_close(torch.stack((low, high)), 2 * torch.stack(expected) - 1)
    found = average_indirect_effect(model(), TEXTS, lists=LISTS)
    assert bool(((found.low < found.value) & (found.value < found.high)).all())


def test_random_heads_are_other_heads_at_the_length_of_the_vector() -> None:
    network, pairs = model(), TEXTS["next"]
    found = function_vectors(network, {"next": pairs}, heads=["L0H1"], layers=[0], random=40, lists=LISTS)
    length = float(np.linalg.norm(found.directions))
    asked, possible = LISTS.zero_shot(pairs), []
    for layer, head in [(layer, head) for layer in range(2) for head in range(4) if (layer, head) != (0, 1)]:
        z = slow_outputs(network, LISTS.lists(pairs, "mean").prompts, layer)
        vector = z[head] @ network.W_O[layer, head]
        edit = [Edit("blocks.0.hook_resid_post", Add(vector * length / vector.norm()))]
        possible.append(np.mean([probability(network, *row, edit)[0] for row in zip(*asked, strict=True)]))
    draws = found.random.sel(task="next", setting="zero-shot", layer=0, score="probability").values
    nearest = np.abs(draws[:, None] - np.array(possible)).min(1)
    assert nearest.max() < 1e-12 and len(set(draws.round(9))) > 4
    null = found.null.sel(task="next", setting="zero-shot", layer=0, score="probability", vector="none")
    assert float(null) == pytest.approx(draws.mean())


# --- a planted task ---------------------------------------------------------------------------------------------------

INPUTS, KINDS = 12, ("first", "second")


def planted() -> HookedTransformer:
    """A model that answers input i with output i of the kind that its list shows, which head L0H0 carries.

    Ids: inputs 0 to 11, outputs of the first kind from 12, of the second from 24. The stream holds which input or
    output a token is, and its kind; head L0H0 moves the mean kind to every later token.
    """
    width = 3 * INPUTS + 2 * len(KINDS)
    config = ModelConfig(
        n_layers=1, d_model=width, n_heads=4, d_head=len(KINDS), n_ctx=64, d_vocab=3 * INPUTS,
        position=NoPosition(), norm=NoNorm(), final_norm=False, qkv_bias=False, out_bias=False, attn_scale=1.0,
    )  # fmt: skip
    network = noisy(config, 0.0, torch.Generator().manual_seed(0)).double()
    own, moved = torch.eye(width, dtype=torch.float64)[3 * INPUTS :].split(len(KINDS))
    embedding = torch.zeros(3 * INPUTS, width, dtype=torch.float64)
    unembedding = torch.zeros(3 * INPUTS, width, dtype=torch.float64)
    for i in range(INPUTS):
        embedding[i, i] = 1.0
        for kind in range(len(KINDS)):
            output = (1 + kind) * INPUTS + i
            embedding[output] = own[kind]
            unembedding[output, i] = 10.0
            unembedding[output] += 20.0 * moved[kind]
    network.embed.weight.copy_(embedding)
    assert network.unembed is not None
    network.unembed.weight.copy_(unembedding)
    nothing = torch.zeros(width, len(KINDS), dtype=torch.float64)
    plant_head(network, (0, 0), query=nothing, key=nothing, value=own.T, out=moved)
    return HookedTransformer(network)


def test_a_planted_head_carries_the_task_and_no_other_does() -> None:
    tasks = {
        name: [([i], [(1 + kind) * INPUTS + i]) for i in range(INPUTS)] for kind, name in enumerate(KINDS)
    }
    found = function_vectors(
        planted(), tasks, heads=["L0H0"], layers=[0], random=5, lists=PairLists(shots=4, rows=3)
    )
    accuracy = found.value.sel(score="accuracy", setting="zero-shot", layer=0)
    assert accuracy.sel(vector="function vector").values.tolist() == [1.0, 1.0]
    assert accuracy.sel(vector="other tasks").values.tolist() == [0.0, 0.0]
    probability = found.value.sel(score="probability", setting="zero-shot", layer=0)
    np.testing.assert_allclose(probability.sel(vector="none"), 0.5, atol=2e-3)
    assert bool((found.random.sel(score="probability_change") == 0).all())  # silent heads have nothing to add
    assert float(np.linalg.norm(found.directions, axis=-1).min()) > 0


def test_silent_heads_have_no_effect() -> None:
    tasks = {"first": [([i], [INPUTS + i]) for i in range(INPUTS)]}
    found = average_indirect_effect(planted(), tasks, lists=PairLists(shots=4, rows=3))
    assert bool((found.value[0, 1:] == 0).all()) and found.correct.values > 0.9


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"tasks": {}}, ValueError, "at least one task"),
        ({"tasks": {"next": TEXTS["next"][:3]}}, ValueError, "'next': more than 3 pairs"),
        ({"top": 5}, ValueError, "at most half of the model's 8 heads"),
        ({"heads": ["L0.mlp"]}, ValueError, "the name of a head is required"),
        ({"heads": ["L0H1", "L0H1"]}, ValueError, "none twice"),
        ({"heads": ["L7H1"]}, IndexError, "layer"),
        ({"top": 2, "layers": [2]}, IndexError, "layer must be in"),
        ({"top": 2, "templates": ["no input"]}, ValueError, r"with \{input\}"),
        ({"top": 2, "templates": ["a {input}", "a {input}"]}, ValueError, "that differ"),
        ({"top": 2, "metric": interp.logit_difference(3, 4)}, ValueError, "answers that the pairs bring"),
        ({"top": 2, "metric": interp.metrics.kl_divergence()}, ValueError, "compares two runs"),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        function_vectors(model(), **{"tasks": TEXTS, "lists": LISTS, **fields})  # type: ignore[arg-type]
