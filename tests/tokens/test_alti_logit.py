"""ALTI-Logit: with the parts that belong to no token it is the logit, and it equals its definition layer by layer."""

import pytest
import torch
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.data.batch import Batch
from interp.model import Read
from interp.model.weights import Weights
from interp.passes.observe import observe
from interp.residual.attribution import attribution
from interp.residual.decomposition import IncompleteSumError
from interp.tokens import layer_mixing, token_attribution
from interp.tokens.alti_logit import credited, rolled_back
from interp.tokens.mixing import layers_read
from tests.configs import CONFIGS, build, some_tokens
from tests.tolerances import assert_close

LINEAR = tuple(name for name, config in CONFIGS.items() if not config.mlm_head)
ANSWER, WRONG = torch.tensor([3, 14, 7]), torch.tensor([5, 1, 30])
PARTS = ("initial", "mlp", "bias")


def asked(name: str, dtype: torch.dtype = torch.float64, wrong: Tensor | None = WRONG):  # type: ignore[no-untyped-def]
    return token_attribution(
        HookedTransformer(build(name, dtype)), some_tokens(), ANSWER, wrong, method="alti_logit"
    )


@pytest.mark.parametrize("name", LINEAR)
def test_tokens_and_other_parts_sum_to_the_logit_difference(name: str) -> None:
    result = asked(name)
    last, cap = build(name)(some_tokens())[:, -1], CONFIGS[name].logit_softcap
    last = last if cap is None else cap * (last / cap).atanh()
    difference = (last.gather(1, ANSWER[:, None]) - last.gather(1, WRONG[:, None]))[:, 0]
    parts = result.value.sum("pos") + sum(result[part] for part in PARTS)
    assert_close(torch.tensor(parts.values), difference)
    assert_close(torch.tensor(result.total.values), difference)
    assert result.attrs["completeness_error"] <= 1e-11


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "post-norm"])
def test_completeness_error_is_below_1e_5_in_float32(name: str) -> None:
    assert asked(name, torch.float32).attrs["completeness_error"] <= 1e-5


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "parallel", "bloom", "gpt-oss"])
def test_scores_equal_each_layers_moves_rolled_back_by_those_before(name: str) -> None:
    """Pre-norm, two layers: Delta by a loop over sources, from block inputs and weights; M_1 = ALTI of block 0."""
    model, tokens = build(name), some_tokens()
    config, weights = model.config, Weights(model)
    sites = [f"blocks.{i}.{s}" for i in range(2) for s in ("hook_resid_pre", "attn.hook_pattern")]
    trace = observe(model, Batch(tokens), [Read(s) for s in (*sites, "blocks.1.hook_resid_post")]).trace
    final = trace["blocks.1.hook_resid_post"][:, -1]
    scale, direction = model.ln_final.scale(final), (weights.W_U.mT[ANSWER] - weights.W_U.mT[WRONG])
    moved = torch.zeros(2, 3, 9, dtype=torch.float64)
    for layer in range(2):
        w, x = weights.layer(layer), trace[f"blocks.{layer}.hook_resid_pre"]
        normed = model.block(layer).ln1(x)
        for h in range(4):
            g = h // (4 // config.kv_heads)
            f = (normed @ w.W_V[g] + w.b_V[g]) @ w.W_O[h]
            f = f * trace[f"blocks.{layer}.attn.hook_pattern"][:, h, -1, :, None]
            out = model.ln_final.frozen(f, scale[:, None]) * config.logit_scale
            moved[layer] += (out * direction[:, None]).sum(-1)
    mixed = layer_mixing(HookedTransformer(model), tokens, kernel="alti").value.sel(layer=0).values
    expected = moved[0] + torch.einsum("bj,bjs->bs", moved[1], torch.tensor(mixed))
    assert_close(torch.tensor(asked(name).value.values), expected)


def test_rolling_back_is_the_double_sum_of_the_definition() -> None:
    moved = [torch.randn(2, 4).double() for _ in range(3)]
    mixing = [torch.rand(2, 4, 4).double().tril().softmax(-1) for _ in range(2)]
    expected = torch.zeros(2, 4, dtype=torch.float64)
    through = torch.eye(4).double().expand(2, 4, 4)
    for layer, step in enumerate(moved):
        for s in range(4):
            expected[:, s] += sum(step[:, j] * through[:, j, s] for j in range(4))
        if layer < 2:
            through = mixing[layer] @ through
    assert_close(rolled_back(moved, mixing), expected)
    assert_close(rolled_back(moved, mixing).sum(-1), torch.stack(moved).sum((0, 2)))


def test_a_contrast_is_the_difference_of_two_logits() -> None:
    one, other = (
        asked("llama-gqa", wrong=None),
        token_attribution(HookedTransformer(build("llama-gqa")), some_tokens(), WRONG, method="alti_logit"),
    )
    for name in ("value", *PARTS, "total"):
        assert_close(torch.tensor(asked("llama-gqa")[name].values), torch.tensor((one - other)[name].values))


def test_an_induction_head_owes_its_answer_to_the_token_it_copies() -> None:
    """Built by hand: head 1.2 looks at the letter after the earlier `c`, which is the answer."""
    model = interp.HookedTransformer.from_pretrained("groundtruth-induction")
    result = token_attribution(model, "abcdefghabc", "d", "e", method="alti_logit")
    assert result.token.values[0, result.value.values[0].argmax()] == "d"
    assert float(result.value[0].max()) > 0.5 * float(result.total[0])


def test_parts_that_do_not_sum_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = interp.tokens.alti_logit.contributions

    def halved(*given: object) -> tuple[Tensor, Tensor]:
        matrix, ratio = broken(*given)  # type: ignore[arg-type]
        return matrix / 2, ratio

    monkeypatch.setattr("interp.tokens.alti_logit.contributions", halved)
    with pytest.raises(IncompleteSumError, match="ALTI-Logit: the parts miss the logits"):
        asked("gpt2")


def test_logits_that_are_not_linear_and_rows_that_end_early_are_refused() -> None:
    with pytest.raises(ValueError, match="linear in the normed stream"):
        asked("masked-lm")
    model, by_source = build("gpt2"), attribution(CONFIGS["gpt2"], "source")
    ragged = Batch.of([[1, 2, 3], [4, 5]]).with_answers(ANSWER[:2], None)
    trace = observe(model, ragged, [*by_source.reads, *layers_read(model, "alti", [0])]).trace
    with pytest.raises(ValueError, match="requires rows that end in the last column"):
        credited(model, ragged, trace, by_source)
