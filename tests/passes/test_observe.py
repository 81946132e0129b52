"""One pass with its questions: gradients against autograd on Hugging Face, and how deep a pass has to go."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from interp.data.batch import Batch
from interp.families import from_hf_model
from interp.model import Edit, Read, sites
from interp.passes.observe import deepest, observe
from tests.configs import CONFIGS, build, some_tokens
from tests.families.oracle import hf_model, new_hf_model, some_tokens as hf_tokens
from tests.loops import over
from tests.tolerances import assert_close

POST, Z = "blocks.0.hook_resid_post", "blocks.1.attn.hook_z"


def mean_loss(tokens: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda logits: F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def total(logits: Tensor) -> Tensor:
    return logits.square().sum()


class Kept:
    """Inputs and outputs of the oracle's modules with their gradients, by "in name" and "out name"."""

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            module.register_forward_hook(self._keeping(name))

    def _keeping(self, name: str) -> Callable[[nn.Module, tuple[object, ...], object], None]:
        def keep(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            first = output[0] if isinstance(output, tuple) else output
            for key, value in (("in " + name, args[0] if args else None), ("out " + name, first)):
                if isinstance(value, Tensor) and value.requires_grad:
                    value.retain_grad()
                    self.values[key] = value

        return keep


GPT2_NAMES = {
    "hook_resid_pre": "in transformer.h.{}",
    "ln1.hook_normalized": "out transformer.h.{}.ln_1",
    "attn.hook_z": "in transformer.h.{}.attn.c_proj",
    "hook_attn_out": "out transformer.h.{}.attn.c_proj",
    "hook_resid_mid": "in transformer.h.{}.ln_2",
    "mlp.hook_pre": "out transformer.h.{}.mlp.c_fc",
    "mlp.hook_post": "in transformer.h.{}.mlp.c_proj",
    "hook_mlp_out": "out transformer.h.{}.mlp.c_proj",
    "hook_resid_post": "out transformer.h.{}",
}
LLAMA_NAMES = {
    "hook_resid_pre": "in model.layers.{}",
    "attn.hook_q": "out model.layers.{}.self_attn.q_proj",
    "attn.hook_k": "out model.layers.{}.self_attn.k_proj",
    "attn.hook_v": "out model.layers.{}.self_attn.v_proj",
    "attn.hook_z": "in model.layers.{}.self_attn.o_proj",
    "hook_attn_out": "out model.layers.{}.self_attn.o_proj",
    "ln2.hook_normalized": "out model.layers.{}.post_attention_layernorm",
    "mlp.hook_pre": "out model.layers.{}.mlp.gate_proj",
    "mlp.hook_pre_linear": "out model.layers.{}.mlp.up_proj",
    "mlp.hook_post": "in model.layers.{}.mlp.down_proj",
    "hook_resid_post": "out model.layers.{}",
}


@pytest.mark.parametrize(("name", "names"), [("gpt2", GPT2_NAMES), ("llama-llama3-rope", LLAMA_NAMES)])
def test_gradients_are_autograds_on_the_hugging_face_model(name: str, names: dict[str, str]) -> None:
    tokens, theirs = hf_tokens(rows=2, n=9), new_hf_model(name, torch.float64, "sdpa")
    kept = Kept(theirs).values
    mean_loss(tokens)(theirs(tokens, use_cache=False).logits).backward()
    reads = [Read(f"blocks.{layer}.{site}", grad=True) for layer in range(2) for site in names]
    trace = observe(from_hf_model(theirs), Batch(tokens), reads, metric=mean_loss(tokens)).trace
    for read in reads:
        _, layer, site = read.site.split(".", 2)
        expected = kept[names[site].format(layer)].grad
        assert expected is not None and expected.abs().max() > 1e-6
        got = trace[read]
        assert_close(got if got.ndim == 3 else rearrange(got, "b p h e -> b p (h e)"), expected)


def test_the_gradient_of_a_pattern_is_autograds() -> None:
    """Eager GPT-2 returns the very tensors it uses, so they can be differentiated."""
    tokens, theirs = hf_tokens(rows=2, n=9), hf_model("gpt2", torch.float64)
    out = theirs(tokens, output_attentions=True)
    expected = torch.autograd.grad(mean_loss(tokens)(out.logits), out.attentions)
    reads = [Read(f"blocks.{layer}.attn.hook_pattern", grad=True) for layer in range(2)]
    trace = observe(from_hf_model(theirs), Batch(tokens), reads, metric=mean_loss(tokens)).trace
    for read, grad in zip(reads, expected, strict=True):
        assert_close(trace[read], grad)


def test_a_reduction_of_a_gradient_reduces_the_gradient() -> None:
    whole, reduced = Read(Z, grad=True), Read(Z, via=lambda g: g.sum((1, 3)), grad=True)
    batch = Batch(some_tokens())
    expected = observe(build("gpt2"), batch, [whole], metric=total).trace[whole].sum((1, 3))
    assert_close(observe(build("gpt2"), batch, [reduced], metric=total).trace[reduced], expected)


def test_values_and_gradients_of_one_site_come_from_one_pass() -> None:
    value, grad = Read(POST), Read(POST, grad=True)
    batch = Batch(some_tokens())
    both = observe(build("gpt2"), batch, [value, grad], metric=total)
    assert_close(both.trace[value], observe(build("gpt2"), batch, [value]).trace[value])
    assert_close(both.trace[grad], observe(build("gpt2"), batch, [grad], metric=total).trace[grad])
    assert not both.output.requires_grad


def test_the_gradient_at_a_site_before_the_edit_flows_through_the_edit() -> None:
    grad = Read("blocks.0.hook_resid_pre", grad=True)
    cut = Edit("blocks.1.hook_resid_pre", lambda x: 0 * x)
    trace = observe(build("gpt2"), Batch(some_tokens()), [grad], [cut], metric=total).trace
    assert not trace[grad].any()
    assert observe(build("gpt2"), Batch(some_tokens()), [grad], metric=total).trace[grad].any()


def test_gradients_at_chosen_logits_are_those_of_the_chosen_logits() -> None:
    grad, at = Read(POST, grad=True), torch.tensor([[8], [3], [5]])
    batch = Batch(some_tokens())
    expected = observe(
        build("gpt2"), batch, [grad], metric=lambda x: total(x[torch.arange(3)[:, None], at])
    ).trace[grad]
    assert_close(observe(build("gpt2"), batch, [grad], logits_at=at, metric=total).trace[grad], expected)


def test_no_parameter_gets_a_gradient_and_grad_mode_is_left_as_it_was() -> None:
    model = build("gpt2")
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            observe(model, Batch(some_tokens()), [Read(POST, grad=True)], metric=total)
            assert torch.is_grad_enabled() is mode
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())


def test_a_pass_without_a_metric_keeps_no_graph() -> None:
    seen = observe(build("gpt2").requires_grad_(False), Batch(some_tokens()), [Read(POST)])
    assert not seen.output.requires_grad
    assert not seen.trace[POST].requires_grad


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (None, r"Read\(grad=True\) requires a metric to differentiate"),
        (lambda logits: logits.sum((1, 2)), r"must return one number, got shape \[3\]|Type-check"),
        (lambda logits: torch.tensor(1.0), "does not depend on any site that is read with grad=True"),
    ],
)
def test_a_gradient_nobody_can_give_is_refused(
    metric: Callable[[Tensor], Tensor] | None, message: str
) -> None:
    with pytest.raises(Exception, match=message):
        observe(build("gpt2"), Batch(some_tokens()), [Read(POST, grad=True)], metric=metric)


# --- depth --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "stop"),
    [
        ((), 0),
        (("hook_embed", "hook_pos_embed"), 0),
        (("blocks.0.hook_resid_pre",), 1),
        (("hook_embed", "blocks.1.attn.hook_q", "blocks.0.hook_resid_post"), 2),
        (("ln_final.hook_scale",), None),
        (("hook_embed", "unembed.hook_out"), None),
    ],
)
def test_a_pass_goes_as_deep_as_the_deepest_site(names: tuple[str, ...], stop: int | None) -> None:
    assert deepest(names, CONFIGS["gpt2"]) == stop


@over("site", sites.names(CONFIGS["gpt2"], on_demand=True))
def test_the_depth_found_answers_the_site(site: str) -> None:
    batch, model = Batch(some_tokens()), build("gpt2")
    stop = deepest([site], CONFIGS["gpt2"])
    got = observe(model, batch, [Read(site)], stop=stop)
    assert_close(got.trace[site], observe(model, batch, [Read(site)]).trace[site])
    if stop is not None:
        assert got.output.shape == (3, 9, 24)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "parallel", "gemma2"])
def test_gradient_of_the_mlps_input_is_the_mlps_whatever_else_is_asked(name: str) -> None:
    model, batch = build(name), Batch(some_tokens())
    inner, earlier = Read("blocks.1.hook_mlp_in", grad=True), Read("blocks.0.hook_resid_pre", grad=True)

    def total(logits: Tensor) -> Tensor:
        return logits[:, -1, 3].sum()

    alone = observe(model, batch, [inner], metric=total).trace[inner]
    beside = observe(model, batch, [earlier, inner], metric=total).trace[inner]
    assert_close(beside, alone)
    step = torch.randn(alone.shape, generator=torch.Generator().manual_seed(0), dtype=alone.dtype)
    ends = [
        total(observe(model, batch, edits=[Edit(inner.site, lambda x, s=sign: x + s * 1e-5 * step)]).output)
        for sign in (1, -1)
    ]
    slope = (ends[0] - ends[1]) / 2e-5  # central differences are exact to the square of the step
    assert float(slope) == pytest.approx(float((alone * step).sum()), rel=1e-6)
