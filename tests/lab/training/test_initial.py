"""Xavier's first weights: bounds and variances of every matrix, fused ones by their parts."""

import pytest
import torch

from interp.lab.training.initial import xavier
from interp.lab.training.loop import fresh_state
from interp.lab.training.presets import encoder_decoder, llama
from interp.lab.training.schedule import Training
from interp.model import MLP, ModelConfig, Transformer, build


def drawn(config: ModelConfig) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config)
    xavier(model)
    return model


def bounded(part: torch.Tensor) -> None:
    """Uniform within +-sqrt(6 / (rows + columns)): the largest nearly there, the variance 2 / (rows + columns)."""
    limit = (6 / sum(part.shape)) ** 0.5
    assert 0.97 * limit < float(part.detach().abs().max()) <= limit
    assert float(part.detach().var()) == pytest.approx(2 / sum(part.shape), rel=0.1)


def test_every_matrix_has_the_variance_of_its_own_rows_and_columns() -> None:
    model = drawn(llama(50, 16))
    block = model.block(0)
    q, k, v = block.attn.qkv.weight.split([128, 64, 64])
    gate, linear = block.mlp.into.weight.chunk(2)  # type: ignore[union-attr,operator]
    for part in (q, k, v, gate, linear, block.attn.out.weight, block.mlp.out.weight, model.embed.weight):  # type: ignore[union-attr]
        bounded(part)  # type: ignore[arg-type]


def test_gains_and_biases_stay_and_a_tied_matrix_is_drawn_once() -> None:
    config = ModelConfig(1, 32, 4, 16, 40, mlp=MLP(48), tied=True)
    model = drawn(config)
    assert model.unembed is not None and model.unembed.weight is model.embed.weight
    bounded(model.embed.weight)
    assert bool((model.ln_final.weight == 1).all())
    assert all(bool((p == 0).all()) for name, p in model.named_parameters() if name.endswith("bias"))


def test_keys_and_values_of_a_memory_are_matrices_by_themselves() -> None:
    torch.manual_seed(0)
    pair = build(encoder_decoder(30, 16, d_model=64))
    xavier(pair)
    crossed = pair.decoder.block(0).cross_attn  # type: ignore[union-attr]
    assert crossed is not None
    for part in (crossed.q.weight, *crossed.kv.weight.split(64)):
        bounded(part)


def test_a_run_begins_with_them_whatever_the_global_state() -> None:
    config, plan = ModelConfig(1, 32, 4, 16, 40), Training(initial="xavier")
    one = fresh_state(config, plan).model
    torch.manual_seed(5)
    before = torch.get_rng_state()
    other = fresh_state(config, plan).model
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    bounded(one.embed.weight)  # type: ignore[union-attr]
