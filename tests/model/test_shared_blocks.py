"""Blocks that share their weights (ALBERT): one set of parameters, whose gradient is the sum over layers."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.editing import WeightEdit, diff, finetune_edit, gradient_edit, shift_edit
from interp.families import load
from interp.lab import Linear, cost
from interp.lab.training import Training, train
from interp.lab.training.presets import encoder_decoder
from interp.model import EncoderDecoder, ModelConfig, MoE, Rotary, Softmax, Transformer, mean_next_token_loss
from interp.model.block import MLP
from interp.tasks import RepeatedSequences
from interp.weights.random_heads import with_random_heads
from tests.configs import some_tokens
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.tolerances import assert_close

SHARED = [name for name in MIXERS if name.startswith("shared-blocks")]


def apart(model: Transformer) -> Transformer:
    """The model with the same values in parameters of each layer's own."""
    own = Transformer(replace(model.config, shared_blocks=False)).to(torch.float64)
    own.load_state_dict(model.state_dict())
    return own.requires_grad_(True)


@over("name", SHARED)
def test_every_layer_has_the_parameters_of_the_first(name: str) -> None:
    model = build_mixed(name)
    first = dict(model.block(0).named_parameters())
    assert first
    for layer in range(1, model.config.n_layers):
        assert all(p is first[own] for own, p in model.block(layer).named_parameters())


@over("name", SHARED)
def test_the_pass_is_that_of_equal_weights_in_every_layer(name: str) -> None:
    model = build_mixed(name)
    assert_close(apart(model)(some_tokens()), model(some_tokens()))


@over("name", SHARED)
def test_the_gradient_is_the_sum_over_layers(name: str) -> None:
    model = copy.deepcopy(build_mixed(name)).requires_grad_(True)
    own, tokens = apart(model), some_tokens()
    for each in (model, own):
        mean_next_token_loss(each(tokens), tokens).backward()
    layers = range(model.config.n_layers)
    for part, parameter in model.block(0).named_parameters():
        gradients = [own.block(layer).get_parameter(part).grad for layer in layers]
        assert all(gradient is not None for gradient in gradients)
        assert parameter.grad is not None
        assert_close(parameter.grad, sum(gradients, torch.zeros_like(parameter)))  # type: ignore[arg-type]


@over("name", SHARED)
def test_parameters_are_counted_once(name: str) -> None:
    config = MIXERS[name]
    found, own = (cost(each, 4) for each in (config, replace(config, shared_blocks=False)))
    per_layer = sum(p.numel() for p in Transformer(config).block(0).parameters())
    assert float(own.parameters.sum() - found.parameters.sum()) == (config.n_layers - 1) * per_layer
    assert float(found.flops.sum()) == float(own.flops.sum())


def test_a_copy_and_a_stored_model_share_still(tmp_path: Path) -> None:
    model = build_mixed("shared-blocks", torch.float32)
    load.save(model, tmp_path)
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    values = sum(p.numel() for p in model.parameters())
    assert values * 4 <= stored < values * 4 + 10_000  # and a header
    again = load.from_folder(tmp_path)
    assert isinstance(again, Transformer)
    for each in (again, copy.deepcopy(model), model.with_parameters({})):
        assert each.block(2).attn.qkv.weight is each.block(0).attn.qkv.weight
        assert torch.equal(each(some_tokens()), model(some_tokens()))


def test_other_tensors_for_a_shared_parameter_are_those_of_all_layers() -> None:
    model = build_mixed("shared-blocks")
    other = model.with_parameters(
        {"blocks.1.mlp.out.weight": torch.zeros_like(model.block(0).mlp.out.weight)}
    )
    assert all(not other.block(layer).mlp.out.weight.any() for layer in range(3))


DATA = RepeatedSequences(d_vocab=20, width=12, low=4, high=5)
SMALL = ModelConfig(3, 16, 2, 12, 20, position=Rotary(), mlp=MLP(16), shared_blocks=True)


class KilledError(Exception):
    """Ends a training from outside."""


def test_a_model_is_trained_with_one_block_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    plan = Training(steps=20, rows=8, log_every=10, learning_rate=1e-2, warm_up=2, keep_seconds=0.0)
    whole = train(SMALL, DATA, plan)
    assert whole.log.held_out_loss.iloc[-1] < whole.log.held_out_loss.iloc[0]

    def killing(model: object, step: int) -> dict[str, float]:
        if step == 20:
            raise KilledError
        return {}

    with pytest.raises(KilledError):
        train(SMALL, DATA, plan, out=tmp_path, evaluate=killing)
    again = train(SMALL, DATA, plan, out=tmp_path, resume=True)
    assert isinstance(again.model, Transformer) and isinstance(whole.model, Transformer)
    assert again.model.block(2).attn.qkv.weight is again.model.block(0).attn.qkv.weight
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


def test_an_encoder_decoder_may_share_either_side() -> None:
    config = encoder_decoder(9, 7, d_model=16, n_heads=2, n_layers=2)
    model = EncoderDecoder(replace(config, decoder=replace(config.decoder, shared_blocks=True)))
    assert model.decoder.block(1).mlp.out.weight is model.decoder.block(0).mlp.out.weight
    assert model.encoder.block(1).mlp.out.weight is not model.encoder.block(0).mlp.out.weight


def test_analyses_see_every_layer_by_itself() -> None:
    """Equal weights, other inputs: the effect of zeroing a head differs between layers."""
    model = interp.HookedTransformer(build_mixed("shared-blocks"))
    tokens: Tensor = some_tokens(1, 6)
    clean = model(tokens)
    changed = [
        model.edited(interp.edits.Edit(f"L{layer}H0", interp.edits.Zero()))(tokens) for layer in range(3)
    ]
    assert all(not torch.allclose(each, clean) for each in changed)
    assert not torch.allclose(changed[0], changed[1])


def test_what_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="one mixer and one MLP in all layers for shared_blocks"):
        replace(SMALL, mixer=(Linear(), Softmax()))
    with pytest.raises(ValueError, match="one mixer and one MLP in all layers for shared_blocks"):
        replace(SMALL, mlp=MoE(4, 2, 8, dense=MLP(8), dense_layers=(0,)))
    with pytest.raises(ValueError, match="blocks that share their weights require one device, got 2"):
        Transformer(SMALL).place(["cpu", "meta"])


@over("name", SHARED)
def test_random_heads_are_those_of_the_model_with_weights_of_its_own(name: str) -> None:
    model = build_mixed(name)
    found, expected = (
        with_random_heads(each, seed=3) for each in (model, apart(model).requires_grad_(False))
    )
    for layer in range(model.config.n_layers):
        for own, other in zip(
            found.block(layer).attn.parameters(), expected.block(layer).attn.parameters(), strict=True
        ):
            assert_close(own, other)


def test_an_edit_of_one_layer_s_matrices_is_refused() -> None:
    model = build_mixed("shared-blocks")
    tokens, network = some_tokens(), HookedTransformer(model)
    edit = WeightEdit("blocks.1.mlp.W_out", torch.zeros(network.cfg.mlp.d_mlp, network.cfg.d_model))
    words = "all layers share mlp.W_out in this model"
    with pytest.raises(ValueError, match=words), edit.applied(network):
        pass
    for ask in (
        lambda: edit.as_edits(network),
        lambda: gradient_edit(network, tokens, answer=[4] * len(tokens), layer=1, eta=0.1),
        lambda: finetune_edit(network, tokens, answer=[4] * len(tokens), layer=1),
        lambda: shift_edit(network, tokens, answer=[4] * len(tokens), layer=1, eta=0.1),
    ):
        with pytest.raises(ValueError, match=words):
            ask()
    moved = copy.deepcopy(model)
    with torch.no_grad():
        moved.block(0).attn.out.weight.mul_(2.0)
    with pytest.raises(ValueError, match=r"what=\('activations',\) is required"):
        diff(network, tokens, HookedTransformer(moved))
