"""Backward rules on wrapped networks: those of our own code to the number, no bit of a pass moved, or a refusal."""

import functools

import pytest
import torch

import interp
from interp import HookedTransformer, Read, observe
from interp.data.batch import Batch
from interp.model.transformer import Transformer
from interp.passes.rules import completeness, under_rules
from interp.wrapped.rules import RuleMode
from tests.loops import over
from tests.tiny import gpt2_tokenizer
from tests.wrapped.test_analyses import CLEAN, CORRUPT, METRIC
from tests.wrapped.wrapping import spoken, tokens, wrapped

LINEAR_KINDS = (
    "llama",
    "gpt2",
    "qwen3",
    "olmo3",
    "cohere",
    "falcon",
    "deepseek_v3",
    "smollm3",
    "gemma4_text",
)
OTHERS = ("qwen3_5_text", "mamba", "falcon_h1")
"""Gated delta nets, and states: products of tensors that both depend on the stream."""


@functools.cache
def ruled(kind: str) -> Transformer:
    return under_rules(wrapped(kind), "relp")


@pytest.mark.slow
@over("kind", LINEAR_KINDS)
def test_no_number_of_a_pass_moves_a_bit(kind: str) -> None:
    assert torch.equal(wrapped(kind)(tokens()), ruled(kind)(tokens()))
    layer = wrapped(kind).config.n_layers - 1
    reads = [Read("blocks.0.hook_resid_pre", grad=True), Read(f"blocks.{layer}.hook_resid_post")]
    plain, other = (
        observe(m, Batch(tokens()), reads, metric=torch.sum) for m in (wrapped(kind), ruled(kind))
    )
    assert torch.equal(plain.output, other.output)
    assert torch.equal(plain.trace[reads[1]], other.trace[reads[1]])
    assert not torch.allclose(plain.trace[reads[0]], other.trace[reads[0]])


@pytest.mark.slow
@over("kind", LINEAR_KINDS)
def test_relevances_sum_to_the_final_stream(kind: str) -> None:
    under = ruled(kind)
    stream = under(tokens(), stop=under.config.n_layers).detach()
    along = torch.randn(stream.shape, generator=torch.Generator().manual_seed(3))
    assert float(completeness(under, Batch(tokens()), stream, along)["completeness_error"].max()) < 2.5e-5


@pytest.mark.slow
@over("kind", OTHERS)
def test_networks_that_rules_do_not_make_linear_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"could not be proven of this wrapped network.* should sum to"):
        under_rules(wrapped(kind), "relp")


@over("rules", ["cp-lrp", "attnlrp", ("norm",), ("activation", "gate", "pattern")])
def test_rules_whose_sum_cannot_be_checked_are_refused(rules: str | tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="only norm, activation, gate, pattern together can be proven, not"):
        under_rules(wrapped("olmo3"), rules)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_attribution_patching_under_rules_is_that_of_our_own_code(kind: str) -> None:
    model = spoken(kind)
    origin = model.transformer.wrapped  # type: ignore[attr-defined]
    ours = HookedTransformer.from_pretrained(origin, tokenizer=gpt2_tokenizer(), wrapped=False)
    for site in ("z", "resid_pre", "mlp_out"):
        found, expected = (
            interp.attribution_patch(m, CLEAN, CORRUPT, site, metric=METRIC, rules="relp", agreement=4)
            for m in (model, ours)
        )
        assert found.attrs["completeness_error"] < 2.5e-5
        for name in (
            "value",
            "each",
            *["agreement"] * (site == "z"),
        ):  # of z, every cell drawn differs in both
            mine, theirs = (torch.from_numpy(x[name].values) for x in (found, expected))
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, equal_nan=True)


def test_each_operator_gets_the_derivative_of_its_rule() -> None:
    x = torch.tensor([0.5, -1.5, 2.0], dtype=torch.float64, requires_grad=True)
    w, b = torch.tensor([1.5, 0.5, -1.0]).double(), torch.tensor([0.1, 0.2, 0.3]).double()
    size, middle = x.detach().square().mean(), x.detach() - x.detach().mean()
    std = (middle.square().mean() + 1e-5).sqrt()
    f = torch.nn.functional
    cases = {  # what is computed, and the same as a function that is linear or halved by hand
        "silu": (lambda: f.silu(x), lambda: x * (f.silu(x) / x).detach()),
        "product": (lambda: x * (2 * x), lambda: x * (2 * x) / 2 + (x * (2 * x) / 2).detach()),
        "rms": (lambda: x * torch.rsqrt(x.pow(2).mean()), lambda: x / size.sqrt()),
        "quotient": (lambda: x / x.pow(2).mean().sqrt(), lambda: x / size.sqrt()),
        "layer norm": (lambda: f.layer_norm(x, (3,), w, b), lambda: (x - x.mean()) / std * w + b),
        "rms norm": (lambda: f.rms_norm(x, (3,), w, 1e-5), lambda: x / (size + 1e-5).sqrt() * w),
        "sigmoid": (lambda: x * torch.sigmoid(x), lambda: x * torch.sigmoid(x).detach()),
        "softmax": (lambda: x * x.softmax(-1), lambda: x * x.softmax(-1).detach()),
    }
    for name, (computed, by_hand) in cases.items():
        with RuleMode():
            value = computed()
        assert torch.equal(value, computed()), name
        (found,), (expected,) = (torch.autograd.grad((v * w).sum(), x) for v in (value, by_hand()))
        torch.testing.assert_close(found, expected, msg=name)
