"""How logits are read from the final stream of wrapped networks, and networks of which no more than that is known."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

import interp
from experiments.every_decoder import compared, tiny
from interp import verify
from interp.data.batch import Batch
from interp.model import sites
from interp.model.edits import Add, Edit
from interp.model.norm import NoNorm
from interp.model.tap import Read, Tap
from interp.passes.generate import generate
from interp.wrapped import UnknownNetworkError, Wrapped, wrap
from interp.wrapped.prove import some_tokens
from tests.loops import over
from tests.tolerances import assert_close
from tests.wrapped.wrapping import network, spoken, tokens, wrapped

WITH_MAPS = (
    "bert", pytest.param("electra", marks=pytest.mark.slow), pytest.param("camembert", marks=pytest.mark.slow),
    "modernbert-decoder",
)  # fmt: skip
"""A map, an activation and a norm before the unembedding: after normed sums, to another width, at positions that do not
begin at 0, and after a final norm."""
WITHOUT_BLOCKS = (
    "deepseek_v4", "hrm_text", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma3n_text", "xlm")),
)  # fmt: skip
"""Streams of several lanes, blocks that run many times, lanes before the position, blocks in several lists."""
BY_HAND = 2e-3
"""As in the tests of edits: rounding of float32, relative to what an edit changes."""


def with_final(kind: str, stream: Tensor) -> Tensor:
    """The logits of a network's own code with this in place of its last block's output."""
    theirs, root = network(kind), wrapped(kind).plan.root(-1)

    def hook(module: nn.Module, args: object, out: Tensor | tuple[Tensor, ...]) -> object:
        return stream if isinstance(out, Tensor) else (stream, *out[1:])

    handle = theirs.get_submodule(root).register_forward_hook(hook)
    with torch.no_grad():
        logits: Tensor = theirs(input_ids=tokens(), use_cache=False).logits
    handle.remove()
    return logits


# --- what stands before the unembedding -------------------------------------------------------------------------------


@pytest.mark.slow
@over("kind", ["bert", "electra", "nemotron", "gemma2"])
def test_any_final_stream_has_the_logits_of_the_networks_own_code(kind: str) -> None:
    model = wrapped(kind)
    for size in (0.3, 3.0):
        stream = size * torch.randn(2, 7, model.config.d_model, generator=torch.Generator().manual_seed(1))
        assert_close(model.read_out(stream), with_final(kind, stream))


@pytest.mark.parametrize("kind", WITH_MAPS)
def test_a_network_with_a_map_before_its_unembedding_opens(kind: str) -> None:
    model = wrapped(kind)
    assert model.config.mlm_head == "gelu"
    assert verify.contract(model, "compared in other tests").passed
    errors = compared(network(kind), model, tokens(), [model.config.n_layers - 1])
    assert {"attn.hook_rot_q", "attn.hook_pattern"} <= {name.split(".", 2)[2] for name in errors}
    assert max(errors.values()) < BY_HAND, errors


def test_map_before_the_unembedding_is_in_the_lens_and_not_in_attribution() -> None:
    model = spoken("modernbert-decoder")
    text = "When Mary and John went to the shop"
    lens = interp.logit_lens(model, text, answer=" Mary").isel(prompt=0, depth=-1, pos=-1)
    with torch.no_grad():
        logits = model.transformer(model.to_batch([text]).tokens)[0, -1]
    expected = float(logits.softmax(-1)[model.to_single_token(" Mary")])
    assert float(lens.target_prob) == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="masked-LM head"):
        interp.attribute(model, text, answer=" Mary")


def test_the_map_before_the_unembedding_follows_the_networks_parameters() -> None:
    model = wrapped("bert")
    assert model.mlm_head is not None
    name = next(n for n, p in model.named_parameters() if p is model.mlm_head.dense.weight)
    value = (2 * model.get_parameter(name)).requires_grad_()
    other = model.with_parameters({name: value})
    assert_close(other(tokens(), Tap([Read("blocks.0.hook_resid_post")])), other(tokens()))
    assert float((other(tokens()) - model(tokens())).detach().abs().max()) > 1e-2
    (gradient,) = torch.autograd.grad(other(tokens(), Tap([Read("blocks.0.hook_resid_post")])).sum(), [value])
    assert bool(gradient.any())


def test_a_map_that_is_none_of_ours_leaves_only_the_stream_after_it() -> None:
    made = tiny("bert", num_hidden_layers=1)
    made.cls.predictions.transform.transform_act_fn = nn.Softsign()
    model = wrap(made)
    assert model.config.n_layers == 0 and model.config.mlm_head is None
    assert model.plan.reader == "cls.predictions.transform.LayerNorm"
    with pytest.raises(
        KeyError, match="no blocks: the logits are not a norm and a linear map of the last stream"
    ):
        sites.find("blocks.0.hook_resid_pre", model.config)


def test_the_final_norm_may_store_gamma_minus_one() -> None:
    model = wrapped("nemotron")
    assert model.config.norm.unit_offset  # type: ignore[union-attr]
    assert model.ln_final.gamma is not None
    assert_close(model.ln_final.gamma, network("nemotron").model.norm.weight.detach() + 1)


class Clipped(nn.Module):
    """A norm that is one only of streams of usual size."""

    def __init__(self, inner: nn.Module, largest: float) -> None:
        super().__init__()
        self.weight, self.eps, self.inner, self.largest = inner.weight, 1e-6, inner, largest

    def forward(self, x: Tensor) -> Tensor:
        """The norm of what is clipped."""
        return self.inner(x.clamp(-self.largest, self.largest))


def test_a_norm_that_holds_for_the_networks_own_streams_alone_is_refused() -> None:
    made = tiny("llama", num_hidden_layers=1)
    stream = wrap(made)(some_tokens(made), stop=1)
    made.model.norm = Clipped(made.model.norm, 1.01 * float(stream.abs().max()))
    with pytest.raises(UnknownNetworkError, match="other final streams do not give the logits"):
        wrap(made)


# --- positions and blocks ---------------------------------------------------------------------------------------------


def test_positions_are_given_as_the_network_counts_them() -> None:
    assert wrapped("bert").plan.first_position == 0
    model, pad = wrapped("camembert"), network("camembert").config.pad_token_id
    assert model.plan.first_position == pad + 1
    rows = [[5, 6, 7, 8], [9, 10]]
    for side in ("left", "right"):
        batch = Batch.of(rows, side=side)
        logits = model(batch.tokens, keep=batch.keep)
        for row, found, there in zip(rows, logits, batch.keep, strict=True):
            with torch.no_grad():
                alone = network("camembert")(input_ids=torch.tensor([row])).logits[0]
            assert_close(found[there], alone)


def test_blocks_that_tokens_do_not_run_are_no_layers() -> None:
    model, theirs = wrapped("mllama"), network("mllama")
    ran = []
    handles = [
        block.register_forward_hook(lambda module, args, out, i=i: ran.append(i))
        for i, block in enumerate(theirs.model.layers)
    ]
    with torch.no_grad():
        theirs(input_ids=tokens(), use_cache=False)
    for handle in handles:
        handle.remove()
    assert model.plan.members == tuple(ran) and len(ran) < len(theirs.model.layers)
    assert model.config.n_layers == len(ran)
    errors = compared(theirs, model, tokens(), [len(ran) - 1])
    assert len(errors) > 5 and max(errors.values()) < BY_HAND, errors


# --- networks without blocks ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITHOUT_BLOCKS)
def test_without_blocks_the_final_stream_can_be_read_and_edited(kind: str) -> None:
    model, theirs = wrapped(kind), network(kind)
    assert model.config.n_layers == 0 and sites.final_stream(model.config) == "hook_stream"
    with torch.no_grad():
        expected = theirs(input_ids=tokens(), use_cache=False).logits
    assert torch.equal(model(tokens()), expected)
    tap = Tap([Read("hook_stream")])
    assert_close(model(tokens(), tap), expected)
    assert_close(model.read_out(tap.values[Read("hook_stream")]), expected)
    errors = compared(theirs, model, tokens(), [0])
    assert set(errors) == {"hook_stream"} and max(errors.values()) < BY_HAND
    assert isinstance(model.config.norm, NoNorm) is (kind == "hrm_text")  # whose last norm runs many times


@pytest.mark.parametrize("kind", WITHOUT_BLOCKS)
@pytest.mark.slow
def test_without_blocks_what_is_inside_is_refused_with_the_reason(kind: str) -> None:
    config = wrapped(kind).config
    inside = [name for name in sites.names(config) if name.startswith(("blocks", "hook_embed"))]
    assert not inside
    with pytest.raises(KeyError, match="this model has no blocks: no list of blocks was found"):
        sites.find("blocks.0.hook_resid_pre", config)
    with pytest.raises(
        KeyError, match="no list of blocks was found of which each is given the residual stream"
    ):
        sites.find("hook_embed", config)
    lines = {line.claim: line.note for line in verify.contract(wrapped(kind), "compared above").lines}
    assert lines["open to what is inside"].startswith("no: no list of blocks was found")


def gradient_by_hand(model: Wrapped, probe: Tensor) -> Tensor:
    """The gradient at what reads the final stream, by an ordinary hook on the network."""
    theirs, seen = model.wrapped, []

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(args[0].detach().clone().requires_grad_())
        return (seen[-1], *args[1:])

    assert model.plan.reader is not None
    handle = theirs.get_submodule(model.plan.reader).register_forward_pre_hook(hook)
    logits = theirs(input_ids=tokens(), use_cache=False).logits
    handle.remove()
    (found,) = torch.autograd.grad((logits * probe).sum(), seen)
    return found


@over("kind", ["deepseek_v4", "hrm_text"])
@pytest.mark.slow
def test_without_blocks_gradients_are_those_of_the_networks_own_code(kind: str) -> None:
    model, read = wrapped(kind), Read("hook_stream", grad=True)
    tap = Tap([read])
    logits = model(tokens(), tap)
    probe = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (found,) = torch.autograd.grad((logits * probe).sum(), [tap.live[read]])
    assert_close(found, gradient_by_hand(model, probe))


@pytest.mark.parametrize("kind", ["hrm_text", pytest.param("gemma3n_text", marks=pytest.mark.slow)])
def test_generation_without_blocks_is_the_same_with_the_networks_cache(kind: str) -> None:
    vector = torch.randn(64, generator=torch.Generator().manual_seed(3))
    batch = Batch.of([[5, 6, 7, 8], [9, 10, 11, 12]])
    for edits in ([], [Edit("hook_stream", Add(vector))]):
        cached, whole = (
            generate(wrapped(kind), batch, 4, edits=edits, use_cache=use) for use in (True, False)
        )
        assert torch.equal(cached.tokens, whole.tokens)


def test_a_network_that_its_own_code_cannot_run_is_named_with_its_folder(tmp_path: Path) -> None:
    """Phi with a rotary width of 3: transformers builds it, and fails in its first pass."""
    config = transformers.PhiConfig(
        vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=0, eos_token_id=0, rope_parameters={
            "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 3 / 8,
        },
    )  # fmt: skip
    transformers.PhiForCausalLM(config).save_pretrained(tmp_path)
    words = f"a network that runs is required, PhiForCausalLM of {tmp_path} fails in transformers' own code"
    with pytest.raises(ValueError, match=re.escape(words)):
        interp.HookedTransformer.from_pretrained(tmp_path, wrapped=True)
