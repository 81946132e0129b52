"""Segments with a constant past against Transformer-XL written out, against autograd, and against whole rows."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from interp.data.batch import Batch
from interp.lab import Linear, Segments
from interp.lab.training import Training, mean_loss, train
from interp.lab.training.dropout import Dropout
from interp.lab.training.losses import logits
from interp.lab.training.presets import encoder_decoder
from interp.lab.training.segments import logits_by_segment
from interp.model import (
    Edit,
    EncoderDecoder,
    ModelConfig,
    NoPosition,
    Rotary,
    Softmax,
    Tap,
    Transformer,
)
from interp.tasks import RepeatedSequences, SequencePairs
from interp.tasks.examples import Examples, Place
from tests.configs import build, perturbed, some_tokens
from tests.loops import over
from tests.mixers import CAUSAL_MIXERS, MIXERS, build_mixed
from tests.tolerances import assert_close

SEGMENT, MEMORY, N = 3, 4, 11
CONFIG = replace(MIXERS["segments"], mixer=Softmax(sparsity=Segments(SEGMENT, MEMORY)))


def trainable(config: ModelConfig = CONFIG) -> Transformer:
    return perturbed(config).requires_grad_(True)


def gradients(loss: Tensor, model: Transformer) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def transformer_xl(model: Transformer, tokens: Tensor) -> list[Tensor]:
    """Logits of each segment of one row, its blocks called with the memory's keys and values put before its own.

    Attention is written out for a query at a time; norms and MLPs are those of the model.
    """
    memories: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * 2
    found = []
    for begin in range(0, len(tokens), SEGMENT):
        own = tokens[begin : begin + SEGMENT]
        x = model.embed(own)
        for layer in range(2):
            block = model.block(layer)
            parts = block.ln1(x) @ block.attn.qkv.weight.T
            q, k, v = parts.unflatten(-1, (-1, block.attn.d_head)).split([4, 2, 2], -2)
            before = memories[layer]
            if before[0].numel():
                k_all, v_all = torch.cat((before[0], k)), torch.cat((before[1], v))
            else:
                k_all, v_all = k, v
            held, z = len(k_all) - len(own), []
            for i in range(len(own)):
                heads = []
                for h in range(4):
                    scores = k_all[: held + i + 1, h // 2] @ q[i, h] / block.attn.d_head**0.5
                    heads.append(scores.softmax(0) @ v_all[: held + i + 1, h // 2])
                z.append(torch.stack(heads))
            memories[layer] = (k_all[-MEMORY:].detach(), v_all[-MEMORY:].detach())
            x = x + block.attn.out(torch.stack(z).flatten(1))
            x = x + block.mlp(block.ln2(x)[None])[0]
        found.append(model.unembed(model.ln_final(x)))
    return found


def test_values_and_gradients_are_those_of_transformer_xl_written_out() -> None:
    model = trainable(replace(CONFIG, position=NoPosition()))
    tokens = some_tokens(1, N)
    written = torch.cat(transformer_xl(model, tokens[0]))
    examples = Examples(Batch(tokens))
    assert_close(logits_by_segment(model, examples.batch, SEGMENT)[0], written)
    loss = torch.nn.functional.cross_entropy(written[:-1], tokens[0, 1:])
    wanted = gradients(loss, model)
    found = gradients(mean_loss(model, examples, segment=SEGMENT), model)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_close(found[name], gradient)


@over("name", [name for name in CAUSAL_MIXERS if "memory" not in name])
def test_the_loss_of_any_model_is_that_of_whole_rows(name: str) -> None:
    model, tokens = build_mixed(name), some_tokens(2, N)
    keep = torch.arange(N)[None] < torch.tensor([[N], [7]])
    for batch in (Batch(tokens), Batch(tokens, keep)):
        whole = mean_loss(model, Examples(batch))
        assert_close(mean_loss(model, Examples(batch), segment=4), whole)


def test_a_segment_as_long_as_the_row_has_the_gradients_of_the_row() -> None:
    model, examples = trainable(), Examples(Batch(some_tokens(2, N)))
    whole, one = (gradients(mean_loss(model, examples, segment=n), model) for n in (None, N))
    cut = gradients(mean_loss(model, examples, segment=SEGMENT), model)
    for name, gradient in whole.items():
        assert_close(one[name], gradient)
    assert any((cut[name] - gradient).abs().max() > 1e-6 for name, gradient in whole.items())


@pytest.mark.parametrize("memory", [N, 3 * N])
def test_a_memory_as_long_as_the_row_is_full_attention(memory: int) -> None:
    model = perturbed(replace(CONFIG, mixer=Softmax(sparsity=Segments(SEGMENT, memory))))
    plain = perturbed(replace(CONFIG, mixer=Softmax()))
    plain.load_state_dict(model.state_dict())
    assert_close(model(some_tokens(2, N)), plain(some_tokens(2, N)))


def stream_gradients(model: Transformer, column: int, segment: int | None) -> Tensor:
    """By column, the largest gradient of the log-probability at one column with respect to the embeddings."""
    leaves: list[Tensor] = []

    def leaf(x: Tensor) -> Tensor:
        leaves.append(x.detach().requires_grad_())
        return leaves[-1]

    found = logits(
        model, Examples(Batch(some_tokens(1, N))), [Edit("blocks.0.hook_resid_pre", leaf)], segment
    )
    found[0, column].log_softmax(-1)[0].backward()
    each = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return torch.cat(each, 1)[0].abs().amax(-1)


def test_the_gradient_stops_at_the_segment_and_the_value_does_not() -> None:
    model, column = trainable(), 7  # of the segment 6, 7, 8
    assert (stream_gradients(model, column, None)[:6] > 0).any()
    cut = stream_gradients(model, column, SEGMENT)
    assert (cut[:6] == 0).all() and (cut[8:] == 0).all() and (cut[6:8] > 0).all()
    tokens = some_tokens(1, N)
    other = tokens.clone()
    other[0, 5] = (other[0, 5] + 1) % 31
    changed = [logits_by_segment(model, Batch(x), SEGMENT)[0, column] for x in (tokens, other)]
    assert not torch.allclose(*changed)


def test_two_layers_reach_two_memories_back() -> None:
    """Dai et al. 2019, section 3.2: the reach grows with the number of layers; a third memory is out of reach."""
    model = perturbed(replace(CONFIG, mixer=Softmax(sparsity=Segments(2, 2)))).requires_grad_(True)
    reached = stream_gradients(model, 8, None) > 0  # of the segment 8, 9; memories 6, 7 and 4, 5
    assert reached.tolist() == [False] * 4 + [True] * 5 + [False] * (N - 9)


# --- training -----------------------------------------------------------------------------------------------------

DATA = RepeatedSequences(d_vocab=20, width=12, low=4, high=5)
SMALL = ModelConfig(1, 16, 2, 12, 20, position=Rotary(), mixer=Softmax(sparsity=Segments(4, 4)))


@pytest.mark.parametrize("changes", [{}, {"dropout": Dropout(0.1, 0.1, 0.1)}, {"precision": "bfloat16"}])
def test_a_model_is_trained_by_segments(changes: dict[str, object]) -> None:
    training = Training(steps=12, rows=8, log_every=12, learning_rate=1e-2, warm_up=2, segment=4, **changes)  # type: ignore[arg-type]
    trained = train(SMALL, DATA, training)
    assert trained.log.held_out_loss.iloc[-1] < trained.log.held_out_loss.iloc[0]
    whole = train(SMALL, DATA, replace(training, segment=None))
    weights: Sequence[Tensor] = [each.model.block(0).attn.qkv.weight for each in (trained, whole)]  # type: ignore[union-attr]
    assert not torch.equal(*weights)


def test_a_state_is_a_constant_too() -> None:
    model = trainable(replace(CONFIG, mixer=Linear(chunk=2)))
    assert (stream_gradients(model, 7, SEGMENT)[:6] == 0).all()
    assert (stream_gradients(model, 7, None)[:6] > 0).all()


def test_dropout_of_each_segment_is_drawn_by_itself() -> None:
    """Edits are asked once a segment; their generator goes on."""
    seen: list[Tensor] = []
    drop = Dropout(embedding=0.5).edits(SMALL, 0, 0)[0].change

    def noted(x: Tensor) -> Tensor:
        seen.append(drop(x) != 0)
        return x

    tap = Tap(edits=[Edit("hook_embed", noted)])
    logits_by_segment(Transformer(SMALL), Batch(torch.ones(1, 12, dtype=torch.int64)), 4, tap)
    assert len(seen) == 3 and not torch.equal(seen[0], seen[1])


def test_what_has_no_segments_is_refused() -> None:
    model = build("llama-gqa")
    with pytest.raises(ValueError, match="a pass by segments requires one text per row"):
        mean_loss(model, Examples(Batch.packed([[1, 5, 7], [1, 8, 8]], 8)), segment=2)
    with pytest.raises(ValueError, match="requires a causal model"):
        mean_loss(build_mixed("segments-bidirectional"), Examples(Batch(some_tokens())), segment=2)
    pair = EncoderDecoder(encoder_decoder(9, 7, d_model=16, n_heads=2))
    with pytest.raises(ValueError, match="not an encoder-decoder"):
        mean_loss(pair, SequencePairs(9, 2, 5).batch(Place(0, 0), 2), segment=2)
    with pytest.raises(ValueError, match="segment must be a whole number from 1"):
        mean_loss(model, Examples(Batch(some_tokens())), segment=0)
    with pytest.raises(ValueError, match="Training requires segment >= 1 or None, got 0"):
        Training(segment=0)
    with pytest.raises(ValueError, match="Segments requires memory finite and 0 or more, got -1"):
        Segments(2, -1)
