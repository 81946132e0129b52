"""Parameters in TransformerLens' layout on the native model's memory: writes, optimisers, stacks, copies."""

import copy
import io

import pytest
import torch
from torch import nn

from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.hooked_transformer import HookedTransformer
from tests.compat.transformer_lens.lens_fixture import CASES, oracle

NATIVE = [name for name in CASES if name not in ("solu", "shortformer", "moe")]


def shared(model: HookedTransformer) -> bool:
    """Whether every linked parameter is a view of the native weights."""
    engine = model.engine
    assert engine.shared is not None and engine.native is not None
    native = {p.untyped_storage().data_ptr() for p in engine.native.parameters()}
    leaves = [leaf for link in engine.shared.links for leaf in link.leaves()]
    return engine.shared.whole and {leaf.untyped_storage().data_ptr() for leaf in leaves} <= native


@pytest.mark.parametrize("name", [name for name in NATIVE if name != "ungrouped"])
def test_every_parameter_lives_in_the_native_model(name: str) -> None:
    model = oracle(name).model()
    linked = {id(leaf) for link in model.engine.shared.links for leaf in link.leaves()}
    bare = [n for n, p in model.named_parameters() if id(p) not in linked]
    assert shared(model) and bare == (["pos_embed.W_pos"] if name == "bloom" else [])


@pytest.mark.parametrize("name", ["ln", "ungrouped", "gemma", "bloom", "sinks"])
@torch.no_grad()
def test_any_write_to_a_parameter_reaches_the_next_pass(name: str) -> None:
    """In place, by `.data`, by assignment: as in a model that was loaded with these numbers."""
    model, fresh, tokens = oracle(name).model(), oracle(name).model(), oracle(name)["tokens"]
    for way in ("in place", "data", "assigned"):
        new = {path: p.detach().clone() * 1.2 + 0.1 for path, p in model.named_parameters()}
        fresh.load_state_dict(new, strict=False)
        for path, value in new.items():
            owner, _, attr = path.rpartition(".")
            module = model.get_submodule(owner)
            if way == "in place":
                getattr(module, attr).copy_(value)
            elif way == "data":
                getattr(module, attr).data = value
            else:
                setattr(module, attr, nn.Parameter(value))
        torch.testing.assert_close(model(tokens), fresh(tokens), msg=lambda m, w=way: f"{w}: {m}")


def test_a_parameter_elsewhere_still_gets_its_gradient() -> None:
    model, tokens = oracle("ln").model(), oracle("ln")["tokens"]
    model.unembed.W_U = nn.Parameter(model.unembed.W_U.detach().clone())
    model(tokens, return_type="loss").backward()
    torch.testing.assert_close(model.unembed.W_U.grad, oracle("ln").group("grads")["unembed.W_U"])


def test_tied_parameters_stay_tied() -> None:
    model, tokens = oracle("ln").model(), oracle("ln")["tokens"]
    model.unembed.W_U.data = model.embed.W_E.data.T
    before = model(tokens)
    with torch.no_grad():
        model.embed.W_E.mul_(2)
    _, cache = model.run_with_cache(tokens)
    want = cache["unembed.hook_in"] @ model.embed.W_E.T + model.b_U
    torch.testing.assert_close(model(tokens), want)
    assert not torch.allclose(before, want)


@pytest.mark.parametrize("name", ["ln", "llama", "ungrouped"])
def test_training_takes_the_steps_that_the_modules_alone_take(name: str) -> None:
    models = [oracle(name).model() for _ in range(2)]
    models[1].embed.register_forward_hook(lambda module, args, out: None)  # module by module
    losses: list[list[float]] = [[], []]
    for model, kept in zip(models, losses, strict=True):
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(4):
            loss = model(oracle(name)["tokens"], return_type="loss")
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            kept.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9) and losses[0][-1] < losses[0][0]


def test_two_passes_may_share_a_backward_pass() -> None:
    model, tokens = oracle("llama").model(), oracle("llama")["tokens"]
    (model(tokens, return_type="loss") + model(tokens, return_type="loss")).backward()
    for name, grad in oracle("llama").group("grads").items():
        torch.testing.assert_close(model.get_parameter(name).grad, 2 * grad)


def test_frozen_parameters_get_no_gradient_and_activations_do() -> None:
    model, tokens, seen = oracle("ln").model(), oracle("ln")["tokens"], []
    for p in model.parameters():
        p.requires_grad_(False)
    assert not model(tokens).requires_grad
    model.blocks[1].attn.W_V.requires_grad_(True)
    with model.hooks(bwd_hooks=[("blocks.1.attn.hook_v", lambda grad, hook: seen.append(grad.clone()))]):
        model(tokens, return_type="loss").backward()
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["blocks.1.attn.W_V"]
    assert seen[0].any()


@pytest.mark.parametrize("name", ["ln", "llama"])
def test_copies_are_of_their_own(name: str) -> None:
    model, tokens = oracle(name).model(), oracle(name)["tokens"]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert shared(other) and torch.equal(other(tokens), model(tokens))
        with torch.no_grad():
            other.blocks[0].attn.W_Q.zero_()
        assert not torch.allclose(other(tokens), model(tokens))


def test_casting_keeps_the_memory_shared() -> None:
    model = oracle("llama").model()
    assert model.to(torch.float32, print_details=False) is model
    assert model.cfg.dtype == torch.float32 and shared(model)
    assert model(oracle("llama")["tokens"]).dtype == torch.float32
    assert model.cpu() is model and model.cfg.device == "cpu"


def test_state_dicts_load_back(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model, tokens = oracle("neox").model(), oracle("neox")["tokens"]
    torch.save(model.state_dict(), tmp_path / "w.pt")
    other = oracle("neox").fresh()
    assert not torch.allclose(other(tokens), model(tokens))
    other.load_state_dict(torch.load(tmp_path / "w.pt"))
    assert torch.equal(other(tokens), model(tokens))


@pytest.mark.parametrize("name", ["ln", "llama"])
def test_stacks_are_the_layers_weights(name: str) -> None:
    model = oracle(name).model()
    for part, weights in {
        "attn": ["W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"],
        "mlp": ["W_in", "W_out"],
    }.items():
        for weight in weights:
            want = [getattr(getattr(block, part), weight) for block in model.blocks]
            assert torch.equal(getattr(model, weight), torch.stack(want)), weight
    assert torch.equal(model.OV[1, 0].AB, model.W_V[1, 0] @ model.W_O[1, 0])
    assert torch.equal(model.QK[1, 0].AB, model.W_Q[1, 0] @ model.W_K[1, 0].T)
    assert (model.W_gate is None) == (name == "ln") and model.W_E is model.embed.W_E
    assert model.n_params_total == sum(p.numel() for p in model.parameters())
    assert model.all_head_labels()[-1] == f"L1H{model.cfg.n_heads - 1}"
    if name == "ln":
        assert torch.equal(model.W_E_pos, torch.cat([model.W_E, model.W_pos]))


def test_accumulated_bias_is_what_a_zero_stream_collects() -> None:
    model = oracle("ln").model()
    b_O, b_out = model.b_O, model.b_out
    torch.testing.assert_close(model.accumulated_bias(2), b_O.sum(0) + b_out.sum(0))
    torch.testing.assert_close(model.accumulated_bias(1, mlp_input=True), b_O.sum(0) + b_out[0])
    torch.testing.assert_close(model.accumulated_bias(2, include_mlp_biases=False), b_O.sum(0))
    with pytest.raises(AssertionError, match="below 2"):
        model.accumulated_bias(2, mlp_input=True)


@pytest.mark.parametrize("mode", ["Q", "K", "V"])
def test_composition_scores_are_norms_of_products(mode: str) -> None:
    model = oracle("ln").model()
    scores = model.all_composition_scores(mode)
    left = model.W_V[0, 1] @ model.W_O[0, 1]
    right = {"Q": model.QK, "K": model.QK.T, "V": model.OV}[mode][1, 0].AB
    want = (left @ right).norm() / (left.norm() * right.norm())
    torch.testing.assert_close(scores[0, 1, 1, 0], want)
    assert not scores[1].any() and not scores[0, :, 0].any()
    with pytest.raises(ValueError, match="mode must be one of"):
        model.all_composition_scores("X")


@pytest.mark.parametrize("name", ["ln", "llama", "attn_only", "gemma"])
@torch.no_grad()
def test_processed_weights_keep_the_probabilities_and_the_shared_memory(name: str) -> None:
    model, tokens = oracle(name).model(), oracle(name)["tokens"]
    before = model(tokens).log_softmax(-1)
    model.process_weights_()
    torch.testing.assert_close(model(tokens).log_softmax(-1), before, rtol=1e-8, atol=1e-8)
    assert shared(model)
    if name != "gemma":
        assert model.cfg.normalization_type in ("LNPre", "RMSPre")
        assert not any(n.endswith(("ln1.w", "ln_final.w")) for n in model.state_dict())
    once = model(tokens)
    model.process_weights_()
    torch.testing.assert_close(model(tokens), once, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "mode", ["gpt2", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "muP"]
)
def test_initialisation_has_the_spread_it_says(mode: str) -> None:
    d, m = 64, 192
    cfg = HookedTransformerConfig(
        n_layers=1, d_model=d, d_head=16, n_ctx=8, d_vocab=100, d_mlp=m, act_fn="relu", init_mode=mode, seed=0,
        device="cpu",
    )  # fmt: skip
    model = HookedTransformer(cfg)
    want = {
        "gpt2": 0.8 / d**0.5, "xavier_uniform": (2 / (d + m)) ** 0.5, "xavier_normal": (2 / (d + m)) ** 0.5,
        "kaiming_uniform": (2 / d) ** 0.5, "kaiming_normal": (2 / d) ** 0.5, "muP": d**-0.5,
    }[mode]  # fmt: skip
    assert float(model.W_in.std()) == pytest.approx(want, rel=0.05)
    assert not model.b_in.any() and torch.equal(HookedTransformer(cfg).W_in, model.W_in)


def test_configs_are_checked_as_theirs() -> None:
    base = {"n_layers": 1, "d_model": 8, "d_head": 4, "n_ctx": 4, "act_fn": "relu", "device": "cpu"}
    with pytest.raises(AssertionError, match="d_vocab"):
        HookedTransformer(base)
    with pytest.raises(AssertionError, match="act_fn"):
        HookedTransformerConfig(**base | {"act_fn": "tanh"})
    with pytest.raises(ValueError, match="divisible"):
        HookedTransformerConfig(**base | {"d_head": 3})
    with pytest.raises(TypeError):
        HookedTransformerConfig.from_dict(base | {"no_such_field": 1})
    with pytest.raises(ValueError, match="load_in_4bit is not supported"):
        HookedTransformer(base | {"d_vocab": 5, "load_in_4bit": True})
    with pytest.raises(ValueError, match="init_mode"):
        HookedTransformer(base | {"d_vocab": 5, "init_mode": "zeros"})
    cfg = HookedTransformerConfig.unwrap(base | {"d_vocab": 5})
    assert (cfg.n_heads, cfg.d_mlp, cfg.d_vocab_out, cfg.to_dict() is cfg.__dict__) == (2, 32, 5, True)
    assert repr(cfg).startswith("HookedTransformerConfig:\n{")
