"""The same random model in TransformerLens: equal activations under equal names, equal writes of heads, equal edits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from interp import HookedTransformer, Part
from interp.compat.transformer_lens.activation_cache import ActivationCache
from interp.data.text import Text
from interp.families.tokenizer import HuggingFaceTokenizer
from interp.model import sites
from interp.passes import HookPoint
from tests.families.oracle import hf_model, new_hf_model, some_tokens
from tests.tiny import CORPUS, END, gpt2_tokenizer
from tests.tolerances import assert_close

bridges = pytest.importorskip("transformer_lens.model_bridge", reason="transformer-lens is not installed")

TOKENS = some_tokens(rows=2, n=11)
Z = "blocks.1.attn.hook_z"
OTHER_MEANING = "hook_normalized"
"""TransformerLens 4 puts it before gamma and beta; what its norm returns, `hook_out`, is our site."""
ON_DEMAND = ("hook_q_input", "hook_k_input", "hook_v_input", "hook_mlp_in", "unembed.hook_out")
"""Sites of ours that the bridge has only under flags which change how it computes."""
OURS = {
    "remainder": "remainder", "final_post": "L1.resid_post",
    "0_pre": "L0.resid", "1_pre": "L1.resid", "0_mid": "L0.resid_mid", "1_mid": "L1.resid_mid",
}  # fmt: skip
"""What we call what TransformerLens labels in a form that is no spelling of a part."""


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def both(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    """Our model, and TransformerLens' bridge around a copy of the same Hugging Face model; nothing is downloaded."""
    ours = HookedTransformer.from_pretrained(hf_model(request.param, torch.float64))
    theirs = bridges.TransformerBridge.boot_transformers(
        request.param,
        hf_model=new_hf_model(request.param, torch.float64),
        tokenizer=gpt2_tokenizer(),
        dtype=torch.float64,
        device="cpu",
    )
    theirs.set_use_attn_result(True)
    with torch.no_grad():
        logits, cache = theirs.run_with_cache(TOKENS)
    return ours, theirs, logits, cache


def equal(ours: Tensor, theirs: Tensor, what: str) -> None:
    """To float32's tolerance: the bridge runs eager attention, and Llama's takes its softmax in float32."""
    assert ours.shape == theirs.shape, what
    hidden = torch.isinf(ours)
    assert bool((theirs[hidden] < -1e4).all()), f"{what}: what the mask hides is hidden in both"
    assert_close(ours[~hidden], theirs[~hidden].detach(), torch.float32)


def test_logits_and_loss_are_equal(both) -> None:  # type: ignore[no-untyped-def]
    ours, theirs, logits, _ = both
    equal(ours(TOKENS), logits, "logits")
    with torch.no_grad():
        equal(ours(TOKENS, return_type="loss"), theirs(TOKENS, return_type="loss"), "loss")


def test_every_site_of_both_holds_the_same_under_the_same_name(both) -> None:  # type: ignore[no-untyped-def]
    """pattern, z, resid_post and head results among them."""
    ours, _, _, cache = both
    names = [n for n in sites.names(ours.cfg, on_demand=True) if not n.endswith((OTHER_MEANING, *ON_DEMAND))]
    _, mine = ours.run_with_cache(TOKENS, names)
    for name in names:
        equal(mine[name], cache[name], name)
    compared = {name.rpartition("hook_")[2] for name in names}
    assert {"pattern", "z", "resid_post", "result", "attn_scores", "q", "k", "v", "post", "scale"} <= compared


def test_a_norms_output_is_our_normalized(both) -> None:  # type: ignore[no-untyped-def]
    ours, _, _, cache = both
    _, mine = ours.run_with_cache(TOKENS, "*hook_normalized")
    for name, value in mine.items():
        equal(value, cache[name.replace(OTHER_MEANING, "hook_out")], name)


def test_stream_has_the_same_parts_under_names_that_say_the_same(both) -> None:  # type: ignore[no-untyped-def]
    ours, _, _, theirs = both
    _, mine = ours.run_with_cache(TOKENS)
    decompositions = {
        "heads": (
            mine.stack_head_results(),
            theirs.stack_head_results(-1, return_labels=True, incl_remainder=True),
        ),
        "sublayers": (mine.decompose_resid(), theirs.decompose_resid(return_labels=True)),
        "depths": (
            mine.accumulated_resid(incl_mid=True),
            theirs.accumulated_resid(return_labels=True, incl_mid=True),
        ),
    }
    for what, (parts, (values, labels)) in decompositions.items():
        assert list(parts.parts) == [OURS.get(label) or str(Part.of(label)) for label in labels], what
        equal(parts.values, values, what)


def test_weights_and_circuits_are_equal(both) -> None:  # type: ignore[no-untyped-def]
    ours, theirs, _, _ = both
    for name in ("W_E", "W_U", "W_Q", "W_K", "W_V", "W_O", "W_in", "W_out"):
        equal(getattr(ours, name), getattr(theirs, name), name)
    if ours.transformer.pos_embed is not None:
        equal(ours.W_pos, theirs.pos_embed.weight, "W_pos")
        for name in ("b_Q", "b_K", "b_V", "b_O", "b_in", "b_out"):
            equal(getattr(ours, name), getattr(theirs, name), name)
    for name in ("OV", "QK"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        equal(mine.AB, other.AB, name)
        equal(mine.norm(), other.norm(), f"norm of {name}")
        equal(mine.svd()[1], other.S, f"singular values of {name}")


def test_a_silenced_head_gives_the_same_logits(both) -> None:  # type: ignore[no-untyped-def]
    ours, theirs, logits, _ = both

    def silence(value: Tensor, hook: HookPoint) -> Tensor:
        value = value.clone()
        value[:, :, 2] = 0
        return value

    with torch.no_grad():
        expected = theirs.run_with_hooks(TOKENS, fwd_hooks=[(Z, silence)])
    equal(ours.run_with_hooks(TOKENS, [(Z, silence)]), expected, "logits")
    assert (expected - logits).abs().max() > 1e-2


def test_texts_become_the_same_tokens_save_that_bos_is_never_doubled(both) -> None:  # type: ignore[no-untyped-def]
    _, theirs, _, _ = both
    text = Text(HuggingFaceTokenizer(gpt2_tokenizer()), n_ctx=64, d_vocab=400)
    for prompt in CORPUS:
        for bos in (True, False):
            expected = theirs.to_tokens(prompt, prepend_bos=bos)
            assert torch.equal(text.batch(prompt, prepend_bos=bos).tokens, expected), (prompt, bos)
    doubled = theirs.to_tokens(END + CORPUS[0])
    assert doubled[0, :2].tolist() == [0, 0]
    assert torch.equal(text.batch(END + CORPUS[0]).tokens, doubled[:, 1:])


READINGS: dict[str, dict[str, Any]] = {
    "plain": {}, "one position": {"pos_slice": -1}, "some neurons": {"neuron_slice": (0, 7)},
    "one neuron": {"neuron_slice": 3}, "onto one": {"onto": 1}, "onto three": {"onto": 3},
}  # fmt: skip


def caches(dtype: torch.dtype) -> tuple[Any, Any]:
    """Their cache and ours of the same random activations, weights of three layers as ours keep them."""
    random = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    layers, b, p, m, d = 3, 2, 5, 23, 12
    blocks = [SimpleNamespace(mlp=SimpleNamespace(W_out=drawn(d, m).mT)) for _ in range(layers)]
    cfg = SimpleNamespace(n_layers=layers, d_mlp=m, n_heads=2, normalization_type="LN", attn_only=False)
    values = {}
    for layer in range(layers):
        values[f"blocks.{layer}.mlp.hook_post"] = drawn(b, p, m)
        values[f"blocks.{layer}.hook_resid_post"] = drawn(b, p, d)
    model: Any = SimpleNamespace(cfg=cfg, blocks=blocks)
    other = pytest.importorskip("transformer_lens.ActivationCache").ActivationCache
    return other(dict(values), model), ActivationCache(dict(values), model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reading", READINGS)
def test_neurons_and_their_remainder_are_the_same_bits(reading: str, dtype: torch.dtype) -> None:
    theirs, ours = caches(dtype)
    options = dict(READINGS[reading])
    if onto := options.pop("onto", None):
        shape = (12,) if onto == 1 else (12, onto)
        options["project_output_onto"] = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(
            dtype
        )
    for layer in (1, 3, -1):
        asked = {"layer": layer, "incl_remainder": True, "return_labels": True, **options}
        (want, labels), (found, mine) = (
            theirs.stack_neuron_results(**asked),
            ours.stack_neuron_results(**asked),
        )
        assert torch.equal(found, want) and labels == mine
    assert torch.equal(ours.stack_neuron_results(2, **options), theirs.stack_neuron_results(2, **options))
