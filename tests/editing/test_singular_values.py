"""Singular-value scaling: identities of its algebra, weights that come back bit for bit, and training of z alone."""

from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from interp import HookedTransformer
from interp.editing import FineTuning, SingularValues, WeightEdit, interpolated, train_z
from interp.model.weights import Weights
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

MATRICES = tuple(
    f"blocks.1.{n}" for n in ("attn.W_Q", "attn.W_K", "attn.W_V", "attn.W_O", "mlp.W_in", "mlp.W_out")
)
NAMES = (*MATRICES, "embed.W_E", "unembed.W_U")


def subject(name: str = "llama-gqa", dtype: torch.dtype = torch.float64) -> HookedTransformer:
    return HookedTransformer(perturbed(CONFIGS[name], dtype))


def joined(model: HookedTransformer, name: str) -> Tensor:
    """The matrix with its heads side by side, as `Weights` shows it."""
    weights, short = Weights(model.transformer), name.rpartition(".")[2]
    if not name.startswith("blocks"):
        return getattr(weights, short)
    found = getattr(weights.layer(int(name.split(".")[1])), short)
    if found.ndim == 2:
        return found
    return found.flatten(0, 1) if short == "W_O" else torch.cat(list(found), 1)


def state(model: HookedTransformer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.transformer.state_dict().items()}


def some_z(parts: SingularValues, seed: int = 0) -> Tensor:
    return (
        torch.rand(parts.sigma.shape, generator=torch.Generator().manual_seed(seed), dtype=parts.sigma.dtype)
        * 2
    )


@over("rescale", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_matrix_is_scaled_inside_and_every_bit_is_back_afterwards(name: str, rescale: bool) -> None:
    model = subject()
    before, parts = state(model), SingularValues.of(model, name)
    z = some_z(parts)
    u, s, vh = torch.linalg.svd(joined(model, name), full_matrices=False)
    factor = z * s.sum() / (s * z).sum() if rescale else z
    expected = u @ torch.diag(s * factor) @ vh
    with parts.edit(z, rescale=rescale).applied(model):
        assert_close(joined(model, name), expected)
        assert_close(parts.scaled(z, rescale=rescale), expected)
        assert not torch.allclose(joined(model, name), parts.scaled(torch.ones_like(z)))
    after = state(model)
    assert all(torch.equal(after[n].view(torch.uint8), before[n].view(torch.uint8)) for n in before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ones_change_no_bit_and_the_decomposition_is_the_matrix(dtype: torch.dtype) -> None:
    model = subject(dtype=dtype)
    before = state(model)
    for name in NAMES:
        parts = SingularValues.of(model, name)
        assert_close(parts.scaled(torch.ones_like(parts.sigma)).to(dtype), joined(model, name))
        with parts.edit(torch.ones_like(parts.sigma)).applied(model):
            assert all(torch.equal(value, before[n]) for n, value in model.transformer.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_one_hot_vectors_give_rank_one_parts_that_sum_to_the_matrix(name: str) -> None:
    model = subject()
    parts = SingularValues.of(model, name)
    terms = [parts.scaled(z) for z in torch.eye(len(parts.sigma), dtype=torch.float64)]
    assert all(int(torch.linalg.matrix_rank(term)) == 1 for term in terms)
    assert_close(torch.stack(terms).sum(0), joined(model, name))


@pytest.mark.parametrize("name", ["blocks.0.attn.W_O", "blocks.1.mlp.W_in"])
def test_with_rescale_a_constant_does_nothing_and_the_nuclear_norm_stays(name: str) -> None:
    model = subject()
    parts, before = SingularValues.of(model, name), joined(model, name)
    constant, z = torch.full_like(parts.sigma, 0.37), some_z(parts)
    assert_close(parts.scaled(constant, rescale=True), before)
    assert_close(parts.scaled(constant), 0.37 * before)
    nuclear = [
        float(torch.linalg.svdvals(m).sum()) for m in (before, parts.scaled(z, rescale=True), parts.scaled(z))
    ]
    assert nuclear[1] == pytest.approx(nuclear[0], rel=1e-10) and abs(nuclear[2] / nuclear[0] - 1) > 1e-3


def test_interpolation_is_linear_in_the_matrix_without_rescale_alone() -> None:
    model = subject()
    parts = SingularValues.of(model, "blocks.0.mlp.W_out")
    z, weights = [some_z(parts, seed) for seed in range(3)], [0.5, 0.8, -0.4]
    for rescale, linear in ((False, True), (True, False)):
        whole = parts.scaled(interpolated(z, weights), rescale=rescale)
        mixed = sum(w * parts.scaled(each, rescale=rescale) for w, each in zip(weights, z, strict=True))
        assert torch.allclose(whole, mixed, rtol=1e-9, atol=1e-9) == linear  # type: ignore[arg-type]


def all_of(edits: list[WeightEdit], model: HookedTransformer) -> ExitStack:
    """Inside `with`, the model has all of these changes."""
    with ExitStack() as stack:
        for edit in edits:
            stack.enter_context(edit.applied(model))
        return stack.pop_all()


def test_several_edits_stand_together_in_one_fused_parameter() -> None:
    model = subject()
    before = state(model)
    parts = [SingularValues.of(model, name) for name in MATRICES]
    edits = [each.edit(some_z(each, i)) for i, each in enumerate(parts)]
    with all_of(edits, model):
        for i, each in enumerate(parts):
            assert_close(joined(model, each.name), each.scaled(some_z(each, i)))
    with pytest.raises(RuntimeError, match="inside"), all_of(edits, model):
        raise RuntimeError("inside")
    assert all(torch.equal(value, before[name]) for name, value in model.transformer.state_dict().items())


@pytest.mark.parametrize("rescale", [False, True])
def test_the_first_step_follows_the_gradient_of_the_applied_edit(rescale: bool) -> None:
    """Finite differences of the loss with the edit really applied, against plain descent of one step."""
    model, tokens, rate, h = subject(), some_tokens(), 1e-3, 1e-5

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    names = ["blocks.0.mlp.W_out", "blocks.1.attn.W_Q", "blocks.1.attn.W_V", "blocks.0.attn.W_O"]
    z, losses = train_z(model, tokens, loss, names, rescale=rescale, tuning=FineTuning(1, rate, "sgd"))
    assert losses == [pytest.approx(float(loss(model.transformer(tokens))))]
    for name in names:
        parts = SingularValues.of(model, name)
        for i in (0, len(parts.sigma) // 2):
            ends = []
            for sign in (1, -1):
                moved = torch.ones_like(parts.sigma).index_add(
                    0, torch.tensor([i]), torch.tensor([sign * h]).double()
                )
                with parts.edit(moved, rescale=rescale).applied(model):
                    ends.append(float(loss(model.transformer(tokens))))
            slope = (ends[0] - ends[1]) / (2 * h)
            assert float(1 - z[name][i]) / rate == pytest.approx(slope, rel=1e-4, abs=1e-8), (name, i)


def test_training_lowers_the_loss_and_touches_nothing_but_z() -> None:
    model, tokens = subject("gpt2"), some_tokens()
    model.transformer.requires_grad_(True)
    before = state(model)

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    names = ["blocks.0.mlp.W_out", "blocks.1.attn.W_V", "unembed.W_U"]
    z, losses = train_z(model, tokens, loss, names, tuning=FineTuning(40, 0.02))
    assert losses[-1] < 0.8 * losses[0] and len(losses) == 40
    edits = [SingularValues.of(model, name).edit(value) for name, value in z.items()]
    with all_of(edits, model), torch.no_grad():
        assert float(loss(model.transformer(tokens))) < losses[-1]
    assert all(torch.equal(value, before[name]) for name, value in model.transformer.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.transformer.parameters())
    assert not any(value.requires_grad for value in z.values())


def test_what_cannot_be_scaled_or_trained_is_refused() -> None:
    model = HookedTransformer(build("gpt2"))
    parts = SingularValues.of(model, "blocks.0.mlp.W_out")
    with pytest.raises(
        ValueError, match=r"one entry per singular value of blocks.0.mlp.W_out, \[24\], got \[3\]"
    ):
        parts.edit(torch.ones(3))
    with pytest.raises(ValueError, match="sum\\(sigma z\\) other than 0"):
        parts.edit(torch.zeros(24), rescale=True)
    with pytest.raises(KeyError, match="unknown matrix"):
        SingularValues.of(model, "blocks.0.mlp.W_ou")
    with pytest.raises(ValueError, match="mixture of 4 experts"):
        SingularValues.of(HookedTransformer(build("granite-moe")), "blocks.0.mlp.W_out")
    with pytest.raises(ValueError, match="one weight per vector"):
        interpolated([torch.ones(2)], [1.0, 2.0])
    broken = subject("gpt2")
    broken.transformer.embed.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"a finite matrix is required, embed\.W_E"):
        SingularValues.of(broken, "embed.W_E")

    def infinite(logits: Tensor) -> Tensor:
        return logits.sum() / 0

    with pytest.raises(ValueError, match="one finite number"):
        train_z(model, some_tokens(), infinite, ["blocks.0.mlp.W_out"])
    with pytest.raises(ValueError, match="distinct matrices"):
        train_z(model, some_tokens(), infinite, [])
