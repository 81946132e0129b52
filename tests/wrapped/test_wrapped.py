"""Wrapped decoders against the network's own code: logits, sites, edits made by hand, refusals, threads."""

import copy
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from experiments.every_decoder import compared, tiny
from interp import HookedTransformer, verify
from interp.core.notes import Note, note
from interp.data.batch import Batch
from interp.families import from_hf_model
from interp.model import sites
from interp.model.edits import Edit, Scale, Zero
from interp.model.tap import Read, Tap
from interp.passes.generate import generate
from interp.passes.observe import observe
from interp.wrapped import UnknownNetworkError, Wrapped, wrap
from tests.loops import over
from tests.tolerances import assert_close
from tests.wrapped.wrapping import KINDS, network, tokens, wrapped

BY_HAND = 2e-3
"""How far an edit through us may be from the same by hand, in float32, relative to what it changes (one percent of the
logits at least, so that this is rounding of theirs)."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_pass_is_the_networks_own_to_the_bit(kind: str) -> None:
    model = wrapped(kind)
    theirs = copy.deepcopy(network(kind)).requires_grad_(False)  # with gradients torch takes other kernels
    with torch.no_grad():
        expected = theirs(input_ids=tokens(), use_cache=False).logits
    assert torch.equal(model(tokens()), expected)
    assert_close(model(tokens(), logits_at=torch.full((2, 1), 6))[:, 0], expected[:, -1])


@pytest.mark.parametrize("kind", KINDS)
def test_sites_hold_what_ordinary_hooks_see(kind: str) -> None:
    model, layer, seen = wrapped(kind), wrapped(kind).config.n_layers - 1, dict[str, Tensor]()
    plan, theirs = model.plan, network(kind)
    found, block = plan.layers[layer], plan.root(layer)

    def kept(name: str, factor: float = 1.0) -> object:
        def hook(module: nn.Module, args: object, out: Tensor | tuple[Tensor, ...]) -> None:
            seen[name] = (out if isinstance(out, Tensor) else out[0]).clone() * factor

        return hook

    handles = [theirs.get_submodule(block).register_forward_hook(kept("hook_resid_post"))]  # type: ignore[arg-type]
    for name, writer in found.writers.items():
        module = theirs.get_submodule(f"{block}.{writer.path}")
        handles.append(module.register_forward_hook(kept(f"hook_{name}", writer.factor)))  # type: ignore[arg-type]
    with torch.no_grad():
        theirs(input_ids=tokens())
    for handle in handles:
        handle.remove()
    reads = [Read(f"blocks.{layer}.{name}") for name in seen]
    trace = observe(model, Batch(tokens()), reads).trace
    for read, (name, value) in zip(reads, seen.items(), strict=True):
        assert_close(trace[read], value.reshape(trace[read].shape)), name


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_is_the_same_edit_made_by_hand_in_the_networks_own_code(kind: str) -> None:
    model = wrapped(kind)
    errors = compared(network(kind), model, tokens(), [model.config.n_layers - 1])
    offered = {
        s
        for s in model.config.mixers[-1].offered
        if s.startswith(("hook_resid_p", "hook_attn", "attn.hook_z"))
    }
    assert {name.split(".", 2)[2] for name in errors} >= offered
    assert max(errors.values()) < BY_HAND, errors


@pytest.mark.parametrize("kind", KINDS)
def test_the_contract_holds_and_says_what_is_open(kind: str) -> None:
    found = verify.contract(wrapped(kind), "compared in other tests")
    assert found.passed, str(found)
    lines = {line.claim: line.note for line in found.lines}
    assert lines["open to stream, lenses, probes"] == "in every layer"
    mixers = wrapped(kind).config.mixers
    for circuit, trait in (("OV", "moves"), ("QK", "bilinear")):
        known = [layer for layer, mixer in enumerate(mixers) if getattr(mixer.traits, trait)]
        note = lines[f"open to {circuit} circuits"]
        assert note.startswith(
            "in every layer" if len(known) == len(mixers) else "not in" if known else "in no"
        )
    heads = {"mamba": "in no layer: ", "qwen3_5_text": "not in layers [0, 2]: "}
    assert lines["open to scores of heads"].startswith(heads.get(kind, "in every layer"))


NATIVE = (
    "llama", "gpt2", "gemma2", "gpt_neox", "gpt_oss", "mixtral", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next",
    "lfm2", "mamba2", "granitemoehybrid", "bamba", "deepseek_v2", "deepseek_v3", "glm4_moe", "llama4_text",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", NATIVE)
def test_wrapped_network_and_our_own_code_agree_at_every_shared_site(kind: str) -> None:
    ours, model = from_hf_model(network(kind)), wrapped(kind)
    mine = sites.names(model.config, on_demand=True)
    both = [name for name in sites.names(ours.config, on_demand=True) if name in mine]
    assert len(both) > (5 if ours.config.mlp is None else 9) * ours.config.n_layers
    more = [name for name in mine if name.endswith("hook_more_out")]
    seen = observe(model, Batch(tokens()), [Read(name) for name in (*both, *more)])
    expected = observe(ours, Batch(tokens()), [Read(name) for name in both])
    for name in both:
        mine = expected.trace[name]
        if (
            kind == "deepseek_v3" and "hook_rot" in name
        ):  # theirs: first dimensions of all pairs, then second ones
            turned = network(kind).config.qk_rope_head_dim
            start, pairs = mine[..., :-turned], mine[..., -turned:]
            mine = torch.cat((start, pairs[..., 0::2], pairs[..., 1::2]), -1)
        theirs = seen.trace[name]
        if (third := name.replace("mlp_out", "more_out")) in more and third != name:
            theirs = (
                theirs + seen.trace[third]
            )  # experts and the shared one beside them are two writers there
        assert_close(theirs, mine.expand(theirs.shape))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_was_not_proven_is_refused_by_name_with_the_reason() -> None:
    stream = torch.zeros(2, 7, 64)
    with pytest.raises(ValueError, match="takes no start: it was measured to give other numbers"):
        wrapped("gemma4_text")(stream, start=2)
    with pytest.raises(ValueError, match="takes no documents"):
        wrapped("mamba")(tokens(), documents=torch.zeros_like(tokens()))
    with pytest.raises(KeyError, match=r"hook_pattern.*takes no softmax over keys"):
        sites.find("blocks.0.attn.hook_pattern", wrapped("mamba").config)
    with pytest.raises(KeyError, match=r"hook_v.*asks no attention of the registry"):
        Tap([Read("blocks.0.attn.hook_v")]).open(wrapped("falcon").config, 0, None)
    with pytest.raises(AttributeError, match="W_V of layer 1 was not proven"):
        wrapped("gemma4_text").block(1).attn.part("v")  # values pass a norm
    with pytest.raises(UnknownNetworkError, match="depend on later tokens"):
        wrap(network("cpmant"))


class Squashed(nn.Module):
    """A map with something non-linear after it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """tanh of what the map gives."""
        return self.inner(x).tanh()


def test_heads_do_not_write_where_something_non_linear_follows() -> None:
    made = tiny("llama", num_hidden_layers=2)
    made.model.layers[1].self_attn.o_proj = Squashed(made.model.layers[1].self_attn.o_proj)
    first, second = (mixer.offered for mixer in wrap(made).config.mixers)  # type: ignore[attr-defined]
    assert {"attn.hook_z", "attn.hook_result", "hook_attn_out"} <= set(first)
    assert not {"attn.hook_z", "attn.hook_result"} & set(second)
    assert {"attn.hook_pattern", "hook_attn_out"} <= set(second)


def of_a_library(hook: Callable[..., object]) -> Callable[..., object]:
    """A hook as a library puts it there, which belongs to the network and is no user's."""
    hook.__module__ = "transformers.made_up"
    return hook


def test_a_block_that_scales_its_stream_adds_no_known_parts() -> None:
    made = tiny("llama", num_hidden_layers=2)
    made.model.layers[1].register_forward_hook(of_a_library(lambda module, args, out: out * 1.01))
    first, second = (mixer.offered for mixer in wrap(made).config.mixers)  # type: ignore[attr-defined]
    assert "hook_mlp_out" in first
    assert not {"hook_attn_out", "hook_mlp_out", "hook_resid_mid", "attn.hook_z"} & set(second)
    assert {"hook_resid_pre", "hook_resid_post"} <= set(second)


def test_a_hidden_change_of_the_pattern_takes_values_and_z_apart() -> None:
    made = tiny("llama", num_hidden_layers=2)
    attention = made.model.layers[0].self_attn
    factors = torch.linspace(0.5, 2, attention.o_proj.in_features)
    attention.o_proj.register_forward_pre_hook(of_a_library(lambda module, args: (args[0] * factors,)))
    first, second = (mixer.traits for mixer in wrap(made).config.mixers)
    assert second.additive
    assert not first.additive


# --- nothing is left behind -----------------------------------------------------------------------------------------


def test_the_network_itself_is_not_touched() -> None:
    theirs = network("cohere")
    assert wrapped("cohere").wrapped is not theirs
    assert not any("forward" in vars(module) for module in theirs.modules())
    assert all(parameter.requires_grad for parameter in theirs.parameters())
    assert theirs.config._attn_implementation == "sdpa"
    mine = {p.data_ptr() for p in wrapped("cohere").parameters()}
    assert {p.data_ptr() for p in theirs.parameters()} <= mine, "tensors are shared"


def test_passes_in_threads_do_not_see_each_other() -> None:
    model = wrapped("smollm3")
    edits = [Edit(f"L{layer}H{head}", Zero()) for layer in range(4) for head in range(4)]
    alone = [model(tokens(), Tap(edits=[edit])) for edit in edits]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda edit: model(tokens(), Tap(edits=[edit])), edits))
    for found, expected in zip(together, alone, strict=True):
        assert torch.equal(found, expected)


def test_other_parameters_make_another_network_differentiable_in_them() -> None:
    model = wrapped("smollm3")
    name = next(
        name for name, _ in model.named_parameters() if name.endswith("layers.1.mlp.down_proj.weight")
    )
    value = model.get_parameter(name).detach().clone().mul_(2).requires_grad_()
    other = model.with_parameters({name: value})
    doubled = model(tokens(), Tap(edits=[Edit("L1.mlp", Scale(2.0))]))
    assert_close(other(tokens()), doubled)
    assert_close(other(tokens(), Tap([Read("blocks.1.hook_mlp_out")])), doubled)
    (gradient,) = torch.autograd.grad(other(tokens()).square().sum(), [value])
    assert bool(gradient.any())


# --- passes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["smollm3", "qwen3_5_text", "falcon_h1"])
def test_generation_with_the_networks_cache_is_generation_without(kind: str) -> None:
    edit = [Edit("L1H2", Zero())]
    batch = Batch.of([[5, 6, 7, 8], [9, 10]], side="left")
    for edits in ([], edit):
        cached, whole = (
            generate(wrapped(kind), batch, 4, edits=edits, use_cache=use) for use in (True, False)
        )
        assert torch.equal(cached.tokens, whole.tokens)
    plain = generate(wrapped(kind), Batch(tokens()), 4)
    theirs = network(kind).generate(
        tokens(), max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(plain.tokens, theirs)


@pytest.mark.slow
@over("kind", ["cohere", "gemma4_text"])
def test_a_stream_that_is_given_to_a_later_block_goes_on_as_it_was(kind: str) -> None:
    model = wrapped(kind)
    middle = model(tokens(), stop=2)
    assert_close(model(tokens(), Tap([Read("blocks.1.hook_resid_post")])), model(tokens()))
    if model.restarts:
        assert_close(model(middle, start=2), model(tokens()))
    assert model.restarts is (kind == "cohere")


def test_half_precision_is_proven_in_float32_and_runs_as_it_is() -> None:
    model = wrap(network("smollm3"), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.config.mixers[0].offered == wrapped("smollm3").config.mixers[0].offered  # type: ignore[attr-defined]
    assert model(tokens(), Tap([Read("blocks.1.attn.hook_pattern")])).dtype == torch.bfloat16


def test_a_folder_is_wrapped_where_we_have_no_file_or_where_that_is_asked(tmp_path: Path) -> None:
    made = tiny("arcee", num_hidden_layers=1)
    made.save_pretrained(tmp_path)
    model = HookedTransformer.from_pretrained(tmp_path)
    assert torch.equal(model.transformer(tokens()), made(input_ids=tokens()).logits.detach())
    assert model.verify().passed
    with pytest.raises(ValueError, match="'arcee' is not supported"):
        HookedTransformer.from_pretrained(tmp_path, wrapped=False)
    with pytest.raises(ValueError, match="one device, got 2"):
        HookedTransformer.from_pretrained(tmp_path, devices=["cpu", "meta"])
    with pytest.raises(ValueError, match="there is no other code to wrap"):
        HookedTransformer.from_pretrained("demo-attn-2l", wrapped=True)
    values = json.loads((tmp_path / "config.json").read_text())
    for more, message in (
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"model_type": "interp"}, "'interp' cannot be wrapped"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(values | more))
        with pytest.raises(ValueError, match=message):
            HookedTransformer.from_pretrained(tmp_path, wrapped=True)


def test_attention_whose_scores_are_used_twice_has_no_heads() -> None:
    model = wrapped("granite_swa")
    assert "attn.hook_z" in model.config.mixers[0].offered  # type: ignore[attr-defined]
    for site in ("hook_attn_scores", "hook_pattern", "hook_v"):
        with pytest.raises(KeyError, match="its scores are used beside the softmax"):
            sites.find(f"blocks.0.attn.{site}", model.config)


def test_users_hooks_are_in_no_number_of_a_wrapped_network_and_stay() -> None:
    made = tiny("starcoder2")
    with torch.no_grad():
        plain = made(input_ids=tokens(), use_cache=False).logits
    layer = made.model.layers[0]
    layer.register_forward_hook(lambda module, args, out: out * 0.5)
    layer.mlp.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    note.cache_clear()
    with pytest.warns(Note, match=r"hooks on 2 modules .* first 'model\.layers\.0', are no part of our copy"):
        model = HookedTransformer.from_pretrained(made)
    assert isinstance(model.transformer, Wrapped)
    assert torch.equal(model.transformer(tokens()), plain)
    assert len(layer._forward_hooks) == len(layer.mlp._forward_pre_hooks) == 1
    found = model.verify()
    assert found.passed, f"\n{found}"


def test_a_module_that_is_compiled_inside_a_network_is_wrapped_as_itself() -> None:
    made = tiny("starcoder2")
    with torch.no_grad():
        plain = made(input_ids=tokens(), use_cache=False).logits
    made.model.layers[0] = torch.compile(made.model.layers[0])
    assert torch.equal(HookedTransformer.from_pretrained(made).transformer(tokens()), plain)


def test_a_wrapped_model_says_that_it_is_one() -> None:
    text = " ".join(str(HookedTransformer.from_pretrained(tiny("starcoder2"))).split())
    assert "wrapped: every pass is computed by the network's own code" in text
    assert "positions in the network's own code" in text and "NoPosition" not in text


@pytest.mark.parametrize("kind", ["bart", "bert", "emu3"])
def test_a_live_network_that_our_own_code_does_not_do_is_wrapped(kind: str) -> None:
    """The decoder of an encoder-decoder, an encoder as a decoder, a type that transformers has no opener for."""
    made = tiny(kind)
    model = HookedTransformer.from_pretrained(made)
    assert torch.equal(model.transformer(tokens()), made(input_ids=tokens(), use_cache=False).logits.detach())
    assert any(clause.startswith("wrapped") for clause in model.transformer.opened)
    with pytest.raises(ValueError, match=r"is_decoder=True|is not supported|the checkpoint lacks"):
        HookedTransformer.from_pretrained(made, wrapped=False)
