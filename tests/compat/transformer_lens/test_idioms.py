"""What people do with parameters and hook points besides running passes: files, vectors, pruning, `torch.func`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap
from torch.nn.utils import parameters_to_vector, parametrize, prune

from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.hooked_transformer import HookedTransformer
from interp.compat.transformer_lens.loading_from_pretrained import get_official_model_name
from tests.compat.slow_hooked import BASE, CASES, Fields, random_state

TOKENS = torch.tensor([[1, 5, 3, 9, 2], [7, 7, 0, 4, 11]])
KINDS = {"layer-norm": BASE, "grouped": CASES["grouped"]}


def built(fields: Fields, seed: int = 0) -> HookedTransformer:
    model = HookedTransformer(HookedTransformerConfig(**fields, dtype=torch.float64, device="cpu"))
    model.load_state_dict(random_state(fields, seed=seed), strict=False)
    return model


def separate(model: HookedTransformer) -> HookedTransformer:
    """Every parameter in memory of its own, as docs/migration.md says."""
    for weight in model.parameters():
        weight.data = weight.data.clone(memory_format=torch.contiguous_format)
    return model


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> HookedTransformer:
    return built(KINDS[request.param])


# parameters in memory of their own


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_separate_parameters_are_ordinary_tensors(kind: str, tmp_path: Path) -> None:
    model, plain = separate(built(KINDS[kind])), built(KINDS[kind])
    assert torch.equal(model(TOKENS), plain(TOKENS))
    vector = parameters_to_vector(model.parameters())
    assert vector.numel() == model.n_params_total == sum(w.view(-1).numel() for w in model.parameters())
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    plain.load_state_dict({name: 0 * weight for name, weight in model.state_dict().items()})
    plain.load_state_dict(load_file(tmp_path / "w.safetensors"))
    assert torch.equal(plain(TOKENS), model(TOKENS))


def test_lbfgs_steps_lower_the_loss_of_separate_parameters() -> None:
    model, losses = separate(built(BASE)), []

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = model(TOKENS, return_type="loss")
        loss.backward()
        losses.append(float(loss.detach()))
        return loss

    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    optimiser.step(closure)
    assert losses[-1] < losses[0]


def test_a_pruned_weight_is_what_passes_compute_with() -> None:
    model, other = separate(built(BASE)), built(BASE)
    prune.l1_unstructured(model.blocks[0].mlp, "W_in", amount=0.5)
    kept = model.blocks[0].mlp.W_in_mask
    with torch.no_grad():
        other.blocks[0].mlp.W_in.mul_(kept)
    for m in (model, other):
        m(TOKENS, return_type="loss").backward()
    torch.testing.assert_close(model(TOKENS), other(TOKENS))
    torch.testing.assert_close(model.blocks[0].mlp.W_in_orig.grad, other.blocks[0].mlp.W_in.grad * kept)
    prune.remove(model.blocks[0].mlp, "W_in")
    torch.testing.assert_close(model(TOKENS), other(TOKENS))


class Twice(nn.Module):
    """Twice the weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("kind", KINDS)
def test_a_parametrization_is_computed_at_every_pass(kind: str) -> None:
    model, other = built(KINDS[kind]), built(KINDS[kind])
    model(TOKENS)
    parametrize.register_parametrization(model.blocks[0].mlp, "W_in", Twice())
    for factor in (2, 6):
        with torch.no_grad():
            other.blocks[0].mlp.W_in.copy_(factor * built(KINDS[kind]).blocks[0].mlp.W_in)
        torch.testing.assert_close(model(TOKENS), other(TOKENS))
        torch.testing.assert_close(model.run_with_cache(TOKENS)[0], other(TOKENS))
        with torch.no_grad():
            model.blocks[0].mlp.parametrizations.W_in.original.mul_(3)
    model(TOKENS, return_type="loss").backward()
    assert model.blocks[0].mlp.parametrizations.W_in.original.grad.any()


# torch.func


@pytest.mark.parametrize("apart", [False, True])
def test_functional_gradients_are_those_of_a_backward_pass(model: HookedTransformer, apart: bool) -> None:
    model = separate(model) if apart else model
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    found = grad(lambda w: functional_call(model, w, (TOKENS,), {"return_type": "loss"}))(weights)
    model(TOKENS, return_type="loss").backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, msg=lambda m, n=name: f"{n}: {m}")


def test_gradients_of_single_rows_are_vmapped(model: HookedTransformer) -> None:
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(w: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(model, w, (row[None],), {"return_type": "loss"})

    rows = vmap(grad(loss), (None, 0))(weights, TOKENS)
    for name, of_rows in rows.items():
        want = grad(loss)(weights, TOKENS[1])[name]
        torch.testing.assert_close(of_rows[1], want, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("apart", [False, True])
def test_jacobians_of_weights_and_streams(model: HookedTransformer, apart: bool) -> None:
    model = separate(model) if apart else model
    bias = model.b_U.detach()
    found = jacrev(lambda b: functional_call(model, {"unembed.b_U": b}, (TOKENS,))[0, -1])(bias)
    torch.testing.assert_close(found, torch.eye(len(bias), dtype=bias.dtype))
    stream = model(TOKENS[:1], stop_at_layer=1).detach()

    def last(x: Tensor) -> Tensor:
        return model(x, start_at_layer=1)[0, -1]

    torch.testing.assert_close(jacrev(last)(stream), torch.autograd.functional.jacobian(last, stream))


def test_an_ensemble_is_vmapped_over_its_weights() -> None:
    models = [built(BASE, seed) for seed in range(2)]
    weights, buffers = stack_module_state(models)
    out = vmap(lambda w, b: functional_call(models[0], (w, b), (TOKENS,)))(weights, buffers)
    for model, logits in zip(models, out, strict=True):
        torch.testing.assert_close(logits, model(TOKENS))


# predicates, names of models

PREDICATES: dict[str, tuple[Callable[[str], bool], int]] = {
    "all": (lambda name: True, 40),
    "one that only opt-in points fulfil": (lambda name: name.endswith("hook_result"), 2),
}


@pytest.mark.parametrize("which", PREDICATES)
def test_a_predicate_takes_points_whose_flag_is_on(which: str) -> None:
    """40 points of two layers in TransformerLens 3.9; without its flag it silently calls no `hook_result`."""
    accepts, count = PREDICATES[which]
    model, seen = built(BASE), []
    plain = model(TOKENS, return_type="loss")
    out = model.run_with_hooks(
        TOKENS, return_type="loss", fwd_hooks=[(accepts, lambda x, hook: seen.append(hook.name))]
    )
    assert len(seen) == len(set(seen)) == count
    torch.testing.assert_close(out, plain)
    wanted, found = (torch.autograd.grad(loss, [*model.parameters()]) for loss in (plain, out))
    torch.testing.assert_close(found, wanted)
    model.set_use_attn_result(True)
    seen.clear()
    model.run_with_hooks(TOKENS, fwd_hooks=[(accepts, lambda x, hook: seen.append(hook.name))])
    assert sum(name.endswith("hook_result") for name in seen) == 2


def test_gpt2_is_found_by_the_name_that_the_hub_gives_it() -> None:
    for size in ("", "-medium", "-large", "-xl"):
        assert get_official_model_name(f"openai-community/gpt2{size}") == f"gpt2{size}"
