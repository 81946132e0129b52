"""The identities of a short-circuit hold in every variant of the model; the question is a loop of edited passes."""

import numpy as np
import pytest
import torch
from torch import Tensor

from interp import HookedTransformer, observe
from interp.causal import identity, short_circuit
from interp.data.batch import Batch
from interp.model.tap import Edit, Read
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.generate import generate
from interp.passes.metrics import logit_difference, next_token_loss, of_logits
from tests.batches import in_batches
from tests.configs import CAUSAL, CONFIGS, build, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

TOKENS = some_tokens()
METRIC = logit_difference([3, 4, 5], [6, 7, 8])
WITH_LOGITS = [name for name in CONFIGS if build(name).unembed is not None]


def rewire(*layers: int) -> list[Edit]:
    """The one line of the manual."""
    return [Edit(f"L{layer}.pattern", identity) for layer in layers]


def rewired(model: Transformer, tokens: Tensor, layers: list[int]) -> Tensor:
    """Logits with the identity written over the pattern by hand, column by column."""

    def change(pattern: Tensor) -> Tensor:
        for q in range(pattern.shape[2]):
            for k in range(pattern.shape[3]):
                pattern[:, :, q, k] = float(q == k)
        return pattern

    edits = [Edit(f"blocks.{layer}.attn.hook_pattern", change) for layer in layers]
    return observe(model, Batch(tokens), edits=edits).output


@over("name", WITH_LOGITS)
def test_with_all_layers_logits_depend_on_token_and_position_alone(name: str) -> None:
    model, other = build(name), some_tokens(seed=1)
    other[:, 4] = TOKENS[:, 4]
    both = (observe(model, Batch(x), edits=rewire(0, 1)).output for x in (TOKENS, other))
    one, two = both
    assert_close(one[:, 4], two[:, 4])
    apart = (one - two).abs().amax(-1)[other != TOKENS]
    assert (apart > 1e-3).all()


@pytest.mark.parametrize("name", WITH_LOGITS)
def test_with_all_layers_the_metric_sees_the_last_token_alone(name: str) -> None:
    model = HookedTransformer(build(name), None)
    metric = of_logits(lambda logits: logits[:, -1, 3], name="a logit")
    other = some_tokens(seed=1)
    other[:, -1] = TOKENS[:, -1]
    found = [short_circuit(model, x, [range(2)], metric=metric) for x in (TOKENS, other)]
    one, two = ((x["each"].sel(part="L0.attn+L1.attn") + x.base).values for x in found)
    np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-9)
    assert not np.allclose(found[0].base, found[1].base)


@over("name", CAUSAL)
def test_the_first_position_of_a_causal_model_never_changes(name: str) -> None:
    model = build(name)
    before, after = (observe(model, Batch(TOKENS), edits=e).output for e in ((), rewire(0, 1)))
    assert (before[:, 1:] != after[:, 1:]).any()
    if CONFIGS[name].sinks:
        assert (before[:, 0] != after[:, 0]).any(), "the sink loses what it took"
    else:
        assert_close(after[:, 0], before[:, 0])


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "mqa", "parallel", "window", "bidirectional", "tied"])
def test_a_layer_adds_x_times_values_times_output_and_the_biases(name: str) -> None:
    model = build(name)
    reads = [Read("blocks.1.ln1.hook_normalized"), Read("blocks.1.hook_attn_out")]
    x, out = observe(model, Batch(TOKENS), reads, rewire(1)).trace.answers.values()
    weights = Weights(model)
    w = weights.layer(1)
    expected = w.b_O.expand(x.shape).clone()
    for head, kv in enumerate(weights.kv_head().tolist()):
        expected += (x @ w.W_V[kv] + w.b_V[kv]) @ w.W_O[head]
    assert_close(out, expected)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "parallel", "bidirectional", "gemma2", "gpt-oss"])
def test_the_effects_are_those_of_a_loop_of_edited_passes(name: str) -> None:
    model = HookedTransformer(build(name), None)
    found = short_circuit(model, in_batches(model, TOKENS, 2), [0, 1, range(2)], metric=METRIC)
    assert found.part.values.tolist() == ["L0.attn", "L1.attn", "L0.attn+L1.attn"] and found.changed.all()
    rows, answer, wrong = torch.arange(3), torch.tensor([3, 4, 5]), torch.tensor([6, 7, 8])

    def difference(layers: list[int]) -> Tensor:
        logits = rewired(model.transformer, TOKENS, layers)
        return logits[rows, -1, answer] - logits[rows, -1, wrong]

    assert_close(torch.from_numpy(found.base.values), difference([]))
    for i, layers in enumerate(([0], [1], [0, 1])):
        assert_close(torch.from_numpy(found["each"].values)[:, i], difference(layers) - difference([]))


def test_each_layer_alone_is_the_default_and_metrics_of_every_column_work() -> None:
    model = HookedTransformer(build("gpt2"), None)
    found = short_circuit(model, TOKENS, metric=next_token_loss())
    assert found.part.values.tolist() == ["L0.attn", "L1.attn"]
    for i in range(2):
        logits = [rewired(model.transformer, TOKENS, x).log_softmax(-1) for x in ([i], [])]
        taken = [-x[:, :-1].gather(2, TOKENS[:, 1:, None])[..., 0].mean(1) for x in logits]
        assert_close(torch.from_numpy(found["each"].values)[:, i], taken[0] - taken[1])


def test_a_prompt_of_one_token_is_unchanged_and_said_to_be() -> None:
    found = short_circuit(HookedTransformer(build("gpt2"), None), TOKENS[:, :1], metric=METRIC)
    assert not found.changed.any() and (found["each"] == 0).all()


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "window"])
def test_decoding_with_a_cache_attends_to_the_current_key(name: str) -> None:
    model, batch = build(name), Batch(TOKENS[:, :4])
    with_cache, without = (
        generate(model, batch, 4, edits=rewire(1), use_cache=cache).tokens for cache in (True, False)
    )
    assert torch.equal(with_cache, without)
    best = rewired(model, without, [1])[:, 3:-1].argmax(-1)
    assert torch.equal(best, without[:, 4:])


def test_the_identity_does_not_write_into_what_it_is_given() -> None:
    pattern = torch.rand(2, 3, 2, 5)
    before = pattern.clone()
    assert torch.equal(identity(pattern)[1, 2], torch.eye(5)[3:])
    assert torch.equal(pattern, before)


def test_what_has_no_meaning_is_refused_by_name() -> None:
    model = HookedTransformer(build("gpt2"), None)
    with pytest.raises(IndexError, match=r"layer must be in \[0, 1\], got 2"):
        short_circuit(model, TOKENS, [range(1, 3)], metric=METRIC)
    with pytest.raises(ValueError, match=r"got L1\.attn twice"):
        short_circuit(model, TOKENS, [1, range(1, 2)], metric=METRIC)
    for nothing in ([], [range(0)]):
        with pytest.raises(ValueError, match="at least one"):
            short_circuit(model, TOKENS, nothing, metric=METRIC)
