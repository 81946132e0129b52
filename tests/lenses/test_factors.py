"""The factors of weight gradients: their sums are autograd's and Hugging Face's gradients, matrix by matrix."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import TypeCheckError
from torch import Tensor

from interp import Batch
from interp.lenses import GradientFactors
from interp.lenses.factors import factors, present
from interp.model import MLP, LayerNorm, ModelConfig, NoNorm, RMSNorm, Transformer
from interp.model.norm import Normalize
from interp.runs.memory import LiveBytes
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.families.oracle import new_hf_model, some_tokens as hf_tokens
from tests.families.pair import network
from tests.loops import over
from tests.model.test_norm import NORMS
from tests.tolerances import assert_close

ANSWERS = torch.tensor([3, 14, 7])
RAGGED = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]]


def of(model: Transformer, tokens: Tensor | None = None, answers: Tensor = ANSWERS) -> GradientFactors:
    return factors(model, Batch(some_tokens() if tokens is None else tokens).with_answers(answers, None))


def answer_loss(model: Transformer, tokens: Tensor) -> Tensor:
    """The sum of -log p of the answers, from all logits at once."""
    return F.cross_entropy(model(tokens)[:, -1], ANSWERS, reduction="sum")


@cache
def weight_gradients(name: str) -> dict[str, Tensor]:
    """What backward() leaves on the parameters of a private copy, in the field's layout `[i, o]`."""
    config = CONFIGS[name]
    model = Transformer(config).double()
    model.load_state_dict(build(name).state_dict())
    answer_loss(model, some_tokens()).backward()  # type: ignore[no-untyped-call]
    found = {}
    heads, groups, e = config.n_heads, config.kv_heads, config.head_width
    for layer in range(config.n_layers):
        block, at = model.block(layer), f"blocks.{layer}"
        qkv = block.attn.qkv.weight.grad.split([heads * e, groups * e, groups * e])
        found |= {f"{at}.attn.W_{part}": w.T for part, w in zip("QKV", qkv, strict=True)}
        found[f"{at}.attn.W_O"] = block.attn.out.weight.grad.T
        for part in config.mlps if isinstance(config.mlp, MLP) else ():
            mlp = getattr(block, part)
            into = mlp.into.weight.grad.split(config.mlp.d_mlp)
            found |= {f"{at}.{part}.{n}": w.T for n, w in zip(("W_in", "W_gate"), into[::-1], strict=False)}
            found[f"{at}.{part}.W_out"] = mlp.out.weight.grad.T
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_outer_products_sum_to_what_backward_leaves_on_every_matrix(name: str) -> None:
    found, expected = of(build(name)), weight_gradients(name)
    assert set(found) == set(expected)
    for matrix, gradient in expected.items():
        ours = found.reconstruct(matrix)
        assert ours.shape == gradient.shape
        assert float((ours - gradient).abs().max() / gradient.abs().max()) < 1e-10, matrix


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "granite-moe", "parallel", "post-norm", "macaron"])
def test_the_returned_error_is_that_of_autograd_and_sees_a_wrong_factor(name: str) -> None:
    found = of(build(name))
    assert max(found.error(matrix) for matrix in found) < 1e-10
    matrix = "blocks.0.attn.W_O"
    x, delta = found[matrix]
    off = replace(found, pairs={**found.pairs, matrix: (x, 1.5 * delta)})
    assert off.error(matrix) == pytest.approx(0.5)


def hf_gradients(name: str) -> tuple[dict[str, Tensor], int]:
    """Every weight's `.grad` of the Hugging Face model after backward, and its number of heads."""
    model = new_hf_model(name, torch.float64)
    logits = model(hf_tokens(), use_cache=False).logits[:, -1]
    F.cross_entropy(logits, ANSWERS, reduction="sum").backward()  # type: ignore[no-untyped-call]
    named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return named, model.config.num_attention_heads


def conv1d(grads: dict[str, Tensor], layer: int, heads: int) -> dict[str, Tensor]:
    at = f"transformer.h.{layer}"
    qkv = grads[f"{at}.attn.c_attn.weight"].chunk(3, 1)
    rest = {"W_O": "attn.c_proj", "W_in": "mlp.c_fc", "W_out": "mlp.c_proj"}
    return dict(zip(("W_Q", "W_K", "W_V"), qkv, strict=True)) | {
        ours: grads[f"{at}.{theirs}.weight"] for ours, theirs in rest.items()
    }


def linears(grads: dict[str, Tensor], layer: int, heads: int) -> dict[str, Tensor]:
    modules = {
        **{f"W_{part.upper()}": f"self_attn.{part}_proj" for part in "qkvo"},
        "W_gate": "mlp.gate_proj", "W_in": "mlp.up_proj", "W_out": "mlp.down_proj",
    }  # fmt: skip
    return {ours: grads[f"model.layers.{layer}.{theirs}.weight"].T for ours, theirs in modules.items()}


def heads_apart(grads: dict[str, Tensor], layer: int, heads: int) -> dict[str, Tensor]:
    at = f"gpt_neox.layers.{layer}"
    fused = grads[f"{at}.attention.query_key_value.weight"]
    qkv = rearrange(fused, "(h three e) d -> three d (h e)", h=heads, three=3)
    rest = {"W_O": "attention.dense", "W_in": "mlp.dense_h_to_4h", "W_out": "mlp.dense_4h_to_h"}
    return dict(zip(("W_Q", "W_K", "W_V"), qkv, strict=True)) | {
        ours: grads[f"{at}.{theirs}.weight"].T for ours, theirs in rest.items()
    }


@pytest.mark.parametrize(
    ("name", "layout"),
    [("gpt2", conv1d), ("llama", linears), ("gemma2-tight-caps", linears), ("gpt-neox", heads_apart)],
)
def test_outer_products_sum_to_the_gradients_of_hugging_face(
    name: str, layout: Callable[[dict[str, Tensor], int, int], dict[str, Tensor]]
) -> None:
    model = network(name, torch.float64)
    found = of(model, hf_tokens())
    grads, heads = hf_gradients(name)
    for layer in range(model.config.n_layers):
        expected = layout(grads, layer, heads)
        assert set(expected) == set(present(model.config))
        for matrix, gradient in expected.items():
            part = "attn" if matrix in ("W_Q", "W_K", "W_V", "W_O") else "mlp"
            ours = found.reconstruct(f"blocks.{layer}.{part}.{matrix}")
            error = float((ours - gradient).abs().max() / gradient.abs().max())
            assert error < 1e-10, (matrix, layer)


@pytest.mark.parametrize("name", CONFIGS)
@over("side", ["left", "right"])
def test_padded_row_has_the_unpadded_factors_and_zero_deltas_at_padding(name: str, side: str) -> None:
    model, answers = build(name), torch.tensor([3, 5])
    padded = Batch.of(RAGGED, side=side).with_answers(answers, None)  # type: ignore[arg-type]
    found, alone = factors(model, padded), of(model, torch.tensor(RAGGED[:1]), answers[:1])
    real = slice(0, 5) if side == "right" else slice(3, 8)
    assert padded.keep is not None
    for matrix, (x, delta) in found.items():
        assert_close(x[0, real], alone[matrix][0][0])
        assert_close(delta[0, real], alone[matrix][1][0])
        assert not delta[~padded.keep].any()


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "gptj"])
def test_a_batch_has_the_factors_of_its_rows(name: str) -> None:
    whole, tokens = of(build(name)), some_tokens()
    for row in range(3):
        alone = of(build(name), tokens[row : row + 1], ANSWERS[row : row + 1])
        for matrix in whole:
            for together, single in zip(whole[matrix], alone[matrix], strict=True):
                assert_close(together[row], single[0])


def test_only_the_last_token_reaches_the_loss_through_the_last_block() -> None:
    found = of(build("llama-gqa"))
    for matrix in ("attn.W_Q", "attn.W_O", "mlp.W_in", "mlp.W_gate", "mlp.W_out"):
        delta = found[f"blocks.1.{matrix}"][1]
        assert not delta[:, :-1].any() and bool(delta[:, -1].any(-1).all())
    for matrix in ("attn.W_K", "attn.W_V"):
        assert bool(found[f"blocks.1.{matrix}"][1].any(-1).all())


def test_keys_and_values_have_one_delta_per_key_value_head() -> None:
    config, found = CONFIGS["llama-gqa"], of(build("llama-gqa"))
    widths = {m: found[f"blocks.0.attn.{m}"][1].shape[-1] for m in ("W_Q", "W_K", "W_V")}
    assert widths == {
        "W_Q": 4 * config.head_width,
        "W_K": 2 * config.head_width,
        "W_V": 2 * config.head_width,
    }


def test_with_wrong_answers_the_loss_is_their_logit_difference() -> None:
    model, wrong = build("gpt2"), torch.tensor([1, 2, 3])
    batch = Batch(some_tokens()).with_answers(ANSWERS, wrong)
    found = factors(model, batch, ["W_out"], [0])["blocks.0.mlp.W_out"][1]

    def difference(logits: Tensor) -> Tensor:
        rows = torch.arange(3)
        return (logits[rows, 0, wrong] - logits[rows, 0, ANSWERS]).sum()

    given = factors(model, Batch(some_tokens()), ["W_out"], [0], loss=difference)["blocks.0.mlp.W_out"][1]
    single = [of(model, answers=a)["blocks.0.mlp.W_out"][1] for a in (ANSWERS, wrong)]
    assert_close(found, given)
    assert_close(found, single[0] - single[1])


def test_the_model_keeps_its_flags_and_gets_no_gradient() -> None:
    model = perturbed(CONFIGS["gpt2"])
    of(model).error("blocks.0.mlp.W_in")
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    model.requires_grad_(True)
    found = of(model)
    assert found.error("blocks.1.attn.W_Q") < 1e-10
    assert all(p.grad is None for p in model.parameters())
    assert not any(t.requires_grad for pair in found.values() for t in pair)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a second device, here a GPU")
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "granite-moe", "olmo2"])
def test_layers_on_several_devices_give_the_factors_of_one(name: str) -> None:
    expected, spread = of(build(name)), perturbed(CONFIGS[name])
    spread.load_state_dict(build(name).state_dict())
    spread.place([torch.device("cuda"), torch.device("cpu")])
    found = of(spread)
    for matrix in expected:
        for ours, theirs in zip(found[matrix], expected[matrix], strict=True):
            assert ours.device.type == "cuda"
            assert_close(ours.cpu(), theirs)
        assert found.error(matrix) < 1e-10


def test_half_precision_factors_agree_with_float64() -> None:
    exact, half = of(build("gemma2")), of(build("gemma2", torch.bfloat16))
    for matrix in exact:
        expected, ours = exact.reconstruct(matrix), half.reconstruct(matrix)
        assert ours.dtype == torch.float32
        assert F.cosine_similarity(ours.flatten().double(), expected.flatten(), dim=0) > 0.98


@over("kind", NORMS.values())
def test_the_vjp_of_a_norm_is_its_jacobian_transposed(kind: LayerNorm | RMSNorm | NoNorm) -> None:
    norm = Normalize(kind, 6, "n").double().requires_grad_(False)
    x, gradient = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(norm, x)
    assert_close(norm.gradient(gradient, x), gradient @ jacobian)
    if not isinstance(kind, NoNorm):
        assert (norm.pull_back(gradient, norm.scale(x)) - gradient @ jacobian).abs().max() > 1e-2


def test_what_a_model_lacks_is_refused_by_name() -> None:
    def ask(name: str, matrix: str) -> None:
        batch = Batch(some_tokens()).with_answers(ANSWERS, None)
        factors(build(name), batch, [matrix])  # type: ignore[list-item]

    with pytest.raises(
        ValueError, match="no factors of W_in: this model is attention-only; it has W_Q, W_K, W_V"
    ):
        ask("attention-only", "W_in")
    with pytest.raises(ValueError, match="no factors of W_out: this model has a mixture of experts"):
        ask("gpt-oss", "W_out")
    with pytest.raises(ValueError, match="no factors of W_gate: this model has an MLP without a gate"):
        ask("gpt2", "W_gate")
    with pytest.raises((ValueError, TypeCheckError), match="matrices"):
        ask("gpt2", "W_up")
    assert present(CONFIGS["gpt-oss"]) == ("W_Q", "W_K", "W_V", "W_O")


def test_bad_questions_are_refused() -> None:
    model, batch = build("gpt2"), Batch(some_tokens()).with_answers(ANSWERS, None)
    with pytest.raises(IndexError, match="layers are 0 to 1, got 2"):
        factors(model, batch, layers=[0, 2])
    with pytest.raises(ValueError, match="at least one matrix and one layer are required"):
        factors(model, batch, layers=[])
    with pytest.raises(ValueError, match="an answer for every prompt is required, got none"):
        factors(model, Batch(some_tokens()))
    with pytest.raises(
        KeyError, match=r"no factors of 'blocks.0.mlp.W_up' were recorded; nearest: blocks.0.mlp.W_out"
    ):
        factors(model, batch)["blocks.0.mlp.W_up"]


def test_a_model_without_logits_is_refused() -> None:
    with pytest.raises(ValueError, match="requires logits; this model ends in its residual stream"):
        of(Transformer(replace(CONFIGS["gpt2"], unembed=False)))


def test_values_of_a_gradient_are_freed_as_the_backward_pass_goes_by() -> None:
    """The values themselves are asked by nobody: the peak is little above the factors, which are kept."""
    config = ModelConfig(n_layers=8, d_model=64, n_heads=4, d_vocab=50, n_ctx=64)
    batch = Batch(torch.arange(50)[None]).with_answers(torch.tensor([3]), None)
    model = Transformer(config)
    with LiveBytes() as live:
        found = factors(model, batch)
    kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for p in found.values() for x in p}
    assert live.peak < 1.25 * sum(kept.values())  # with the values held to the end: 1.6
