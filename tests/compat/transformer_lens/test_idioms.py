"""What people do with parameters and hook points besides running passes: files, vectors, pruning, `torch.func`."""

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters

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


# flat views: of parameters as they are, and in memory of their own

AS = pytest.mark.parametrize("apart", [False, True])


def subject(kind: str, *, apart: bool) -> HookedTransformer:
    return separate(built(KINDS[kind])) if apart else built(KINDS[kind])


@AS
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_parameters_are_one_vector_and_back(kind: str, apart: bool) -> None:
    model, plain = subject(kind, apart=apart), built(KINDS[kind])
    vector = parameters_to_vector(model.parameters())
    assert torch.equal(vector, torch.cat([weight.reshape(-1) for weight in plain.parameters()]))
    assert vector.numel() == model.n_params_total
    assert torch.equal(model(TOKENS), plain(TOKENS))
    vector_to_parameters(vector / 2, model.parameters())
    for weight in plain.parameters():
        weight /= 2
    assert torch.equal(model(TOKENS), plain(TOKENS))


@AS
@torch.no_grad()
def test_a_flat_view_of_a_weight_is_that_weight(apart: bool) -> None:
    model, plain = subject("layer-norm", apart=apart), built(BASE)
    flat = model.blocks[0].attn.W_Q.view(-1)
    assert torch.equal(flat, plain.blocks[0].attn.W_Q.reshape(-1))
    flat[3] = 5.0
    plain.blocks[0].attn.W_Q[0, 0, 3] = 5.0
    assert torch.equal(model(TOKENS), plain(TOKENS))
    assert torch.equal(model.W_Q.view(-1), plain.W_Q.reshape(-1))
    for wrong in ((7, -1), (3, 3)):
        with pytest.raises(RuntimeError, match=r"shape .* is invalid for input of size"):
            built(BASE).blocks[0].attn.W_Q.view(*wrong)


@AS
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_files_of_safetensors_hold_the_state(kind: str, apart: bool, tmp_path: Path) -> None:
    model, other = subject(kind, apart=apart), built(KINDS[kind], seed=1)
    save_file(model.state_dict(), tmp_path / "file.safetensors")
    other.load_state_dict(load_file(tmp_path / "file.safetensors"))
    assert torch.equal(other(TOKENS), model(TOKENS))
    save_model(model, tmp_path / "model.safetensors")
    other = built(KINDS[kind], seed=1)
    assert load_model(other, tmp_path / "model.safetensors") == (set(), [])
    assert torch.equal(other(TOKENS), model(TOKENS))
    assert apart or model.engine.shared.whole, "the file had copies, the parameters stayed"


def test_a_state_dict_is_copied_and_written_as_tensors_of_torch() -> None:
    model, file = built(BASE), io.BytesIO()
    state = model.state_dict()
    with torch.no_grad():
        state["blocks.0.attn.W_Q"].mul_(2)
    assert torch.equal(model.blocks[0].attn.W_Q, 2 * built(BASE).blocks[0].attn.W_Q), (
        "it is the model's memory"
    )
    torch.save(state, file)
    file.seek(0)
    for found in (copy.deepcopy(state), torch.load(file, weights_only=True)):
        assert {type(weight) for weight in found.values()} == {Tensor}
        assert all(torch.equal(weight, state[name]) for name, weight in found.items())


@AS
def test_lbfgs_steps_are_those_of_plain_tensors(apart: bool) -> None:
    """The oracle: the same steps by weights of torch's own class, in a pass through `functional_call`."""
    model = subject("layer-norm", apart=apart)
    plain = {name: nn.Parameter(w.detach().clone(memory_format=torch.contiguous_format))
             for name, w in built(BASE).named_parameters()}  # fmt: skip
    still = built(BASE)

    def steps(weights: list[nn.Parameter], loss_of: Callable[[], Tensor]) -> list[float]:
        optimiser, losses = torch.optim.LBFGS(weights, max_iter=4, line_search_fn="strong_wolfe"), []

        def closure() -> Tensor:
            optimiser.zero_grad()
            loss = loss_of()
            loss.backward()
            losses.append(float(loss.detach()))
            return loss

        optimiser.step(closure)
        return losses

    found = steps([*model.parameters()], lambda: model(TOKENS, return_type="loss"))
    wanted = steps(
        [*plain.values()], lambda: functional_call(still, plain, (TOKENS,), {"return_type": "loss"})
    )
    assert found[-1] < found[0] and found == pytest.approx(wanted, rel=1e-9)


@AS
@pytest.mark.parametrize(("part", "name"), [("mlp", "W_in"), ("attn", "W_Q")])
def test_a_pruned_weight_is_what_passes_compute_with(part: str, name: str, apart: bool) -> None:
    model, other = subject("layer-norm", apart=apart), built(BASE)
    pruned, weight = getattr(model.blocks[0], part), getattr(getattr(other.blocks[0], part), name)
    prune.l1_unstructured(pruned, name, amount=0.5)
    kept = getattr(pruned, f"{name}_mask")
    least = weight.detach().abs().flatten().sort().values[weight.numel() // 2]
    assert torch.equal(kept.bool(), weight.detach().abs() >= least)
    with torch.no_grad():
        weight.mul_(kept)
    for m in (model, other):
        m(TOKENS, return_type="loss").backward()
    torch.testing.assert_close(model(TOKENS), other(TOKENS))
    torch.testing.assert_close(getattr(pruned, f"{name}_orig").grad, weight.grad * kept)
    prune.remove(pruned, name)
    torch.testing.assert_close(model(TOKENS), other(TOKENS))


@AS
def test_weights_are_pruned_together(apart: bool) -> None:
    model, plain = subject("layer-norm", apart=apart), built(BASE)
    chosen = [(block.attn, "W_Q") for block in model.blocks]
    prune.global_unstructured(chosen, pruning_method=prune.L1Unstructured, amount=0.3)
    sizes = torch.cat([block.attn.W_Q.detach().abs().flatten() for block in plain.blocks])
    least = sizes.sort().values[round(0.3 * len(sizes))]
    with torch.no_grad():
        for block in plain.blocks:
            block.attn.W_Q.mul_(block.attn.W_Q.abs() >= least)
        torch.testing.assert_close(model(TOKENS), plain(TOKENS))


def test_steps_of_adam_leave_parameters_in_the_native_model() -> None:
    models = [built(BASE), separate(built(BASE))]
    for model in models:
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimiser.zero_grad()
            model(TOKENS, return_type="loss").backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
    assert models[0].engine.shared.whole and not models[1].engine.shared.whole
    torch.testing.assert_close(models[0](TOKENS), models[1](TOKENS))


# what stands in the place of a part


@pytest.mark.parametrize("way", ["item", "list"])
def test_no_block_in_the_place_of_one_is_refused_in_words(way: str) -> None:
    model = built(BASE)
    if way == "item":
        model.blocks[1] = nn.Identity()
    else:
        model.blocks = nn.ModuleList([model.blocks[0], nn.Identity()])
    with pytest.raises(
        TypeError, match=r"blocks\.1 is now Identity, .*a block \(shortformer.*leave a block out, set"
    ):
        model(TOKENS)


def test_a_block_is_left_out_as_the_messages_say() -> None:
    """By zeros at what it adds, by a module that takes what a pass gives, or by ending before it."""

    class Nothing(nn.Module):
        def forward(self, x: Tensor, **kwargs: object) -> Tensor:
            return x

    model, other = built(BASE), built(BASE)
    other.blocks[1] = Nothing()
    silent = [(f"blocks.1.hook_{part}_out", lambda value, hook: 0 * value) for part in ("attn", "mlp")]
    found = model.run_with_hooks(TOKENS, fwd_hooks=silent)
    torch.testing.assert_close(other(TOKENS), found)
    torch.testing.assert_close(model.unembed(model.ln_final(model(TOKENS, stop_at_layer=1))), found)
    for change in (lambda m: setattr(m, "blocks", m.blocks[:1]), lambda m: m.blocks.__delitem__(1)):
        fewer = built(BASE)
        change(fewer)
        with pytest.raises(ValueError, match=r"blocks\.1 is gone, .*leave a block out.*config of its own"):
            fewer(TOKENS)
    model.blocks[0].attn = nn.Identity()
    with pytest.raises(
        TypeError, match=r"blocks\.0\.attn is now Identity, .*attention \(query, key and value inputs"
    ):
        model(TOKENS)


def test_an_error_inside_of_a_replaced_part_is_its_own() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor, **kwargs: object) -> Tensor:
            return x + None  # type: ignore[operator]

    model = built(BASE)
    model.blocks[1] = Wrong()
    with pytest.raises(TypeError, match="unsupported operand"):
        model(TOKENS)


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
