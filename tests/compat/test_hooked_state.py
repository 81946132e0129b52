"""HookedTransformers as our models: logits of a slow reference, of TransformerLens itself, and what is refused."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from interp import HookedTransformer
from interp.compat import from_hooked_transformer, to_hooked_state
from interp.model import MLP, LayerNorm, RMSNorm
from tests.compat.slow_hooked import BASE, CASES, RMS, Fields, random_state, slow_logits
from tests.compat.transformer_lens.lens_fixture import oracle
from tests.loops import over
from tests.tiny import END, backend, gpt2_tokenizer
from tests.tolerances import assert_close

TOKENS = torch.randint(0, 31, (11,), generator=torch.Generator().manual_seed(0))
IDLE: Fields = {
    "device": "cuda", "dtype": torch.float16, "seed": 3, "model_name": "solo", "tokenizer_name": "gpt2",
    "init_mode": "gpt2", "n_params": 544, "use_split_qkv_input": True, "default_prepend_bos": False, "d_vocab_out": -1,
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_slow_reference(name: str) -> None:
    fields = CASES[name]
    state = random_state(fields)
    ours = from_hooked_transformer(state, fields)
    rotary = fields.get("positional_embedding_type") == "rotary"  # our angles are float32 in any dtype
    close = name == "gelu-fast" or rotary
    assert_close(
        ours(TOKENS)[0], slow_logits(fields, state, TOKENS), torch.float32 if close else torch.float64
    )


NATIVE = (
    "layer-norm",
    "folded",
    "no-norm-relu",
    "rms-gated",
    "grouped",
    "partial-halves",
    "attention-only",
    "bidirectional",
)
"""What TransformerLens 4 can build without Hugging Face."""


@pytest.mark.parametrize("name", NATIVE)
def test_logits_are_those_of_transformer_lens_native_bridge(name: str) -> None:
    bridge = pytest.importorskip("transformer_lens.model_bridge").TransformerBridge
    conversion = pytest.importorskip("transformer_lens.utilities.tl_checkpoint_conversion")  # of version 4
    from transformer_lens.config import TransformerBridgeConfig

    fields = {
        key: value for key, value in CASES[name].items() if value is not None or key == "normalization_type"
    }
    fields |= {
        "d_head": 6,
        "rotary_adjacent_pairs": True,
    }  # its heads are d_model / n_heads wide, rotated in pairs
    state = random_state(fields)
    if fields.get("gated_mlp"):  # its gated MLPs have no biases
        state |= {n: torch.zeros_like(w) for n, w in state.items() if n.endswith(("mlp.b_in", "mlp.b_out"))}
    config = TransformerBridgeConfig(
        **fields, dtype=torch.float64, device="cpu", architecture="TransformerLensNative"
    )
    theirs = bridge.boot_native(config, dtype=torch.float64, device="cpu")
    converted = conversion.convert_tl_checkpoint(state, config)
    theirs.load_state_dict({n: w for n, w in converted.items() if "IGNORE" not in n}, strict=False)
    with torch.no_grad():
        expected = theirs(TOKENS[None])
    assert_close(from_hooked_transformer(state, fields)(TOKENS), expected.double(), torch.float32)


def test_a_file_written_by_transformer_lens_3_gives_its_logits() -> None:
    """`tests/compat/data/README.md` says how it was made."""
    from interp.compat import load_hooked

    path = Path(__file__).parent / "data" / "hooked_transformer_3_9.pt"
    model = load_hooked(path)
    sample = torch.load(path.with_name("hooked_transformer_3_9_logits.pt"), weights_only=True)
    assert model.cfg.kv_heads == 1 and model.name == "custom"
    assert_close(model(sample["tokens"]), sample["logits"])


BUFFERS = ("mask", "IGNORE", "rotary_sin", "rotary_cos")


@over("name", ["attn_only", "ln", "llama", "lnpre", "none", "local", "gemma", "olmo2", "sinks"])
def test_logits_are_those_of_transformer_lens_3(name: str) -> None:
    """`attn_only` has 5 outputs for 7 tokens. `tests/compat/oracle/make_core.py` wrote them."""
    theirs = oracle(name)
    fields = {key: value for key, value in theirs.said["config"].items() if key != "dtype"}
    model = from_hooked_transformer(theirs.group("state"), fields)
    rotary = fields.get("positional_embedding_type") == "rotary"
    assert_close(model(theirs["tokens"]), theirs["logits"], torch.float32 if rotary else torch.float64)
    state, again = to_hooked_state(model)
    assert again["d_vocab_out"] == model.cfg.n_outputs == theirs["logits"].shape[-1]
    stored = theirs.group("state")
    assert stored.keys() <= state.keys() | {n for n in stored if n.rpartition(".")[2] in BUFFERS}
    assert all(state[name].shape == stored[name].shape for name in stored.keys() & state.keys())


def test_folded_norms_have_gamma_one_and_beta_zero() -> None:
    folded = CASES["folded"]
    block = from_hooked_transformer(random_state(folded), folded).transformer.block(1)
    assert block.ln1.kind == LayerNorm(1e-5)
    assert torch.equal(block.ln1.weight, torch.ones(24).double()) and not block.ln1.bias.any()
    rms = CASES["rms-folded"]
    assert from_hooked_transformer(random_state(rms), rms).cfg.norm == RMSNorm(1e-5)


def test_weights_are_copied_bit_by_bit() -> None:
    state = random_state(CASES["grouped"], torch.float32)
    ours = from_hooked_transformer(state, CASES["grouped"])
    for name in ("W_Q", "W_O", "b_Q"):
        assert torch.equal(getattr(ours, name)[1], state[f"blocks.1.attn.{name}"])
    for name in ("W_K", "b_V"):
        assert torch.equal(getattr(ours, name)[1], state[f"blocks.1.attn._{name}"])
    assert torch.equal(ours.W_gate[0], state["blocks.0.mlp.W_gate"])
    assert torch.equal(ours.b_U, state["unembed.b_U"])
    state["embed.W_E"].zero_()
    assert ours.W_E.any()


def test_a_config_may_be_an_object_and_its_idle_fields_change_nothing() -> None:
    state = random_state(BASE)
    plain = from_hooked_transformer(state, BASE)
    config = BASE | IDLE | {"attn_scale": np.sqrt(10), "tokenizer_prepends_bos": None}
    for given in (config, SimpleNamespace(**config), SimpleNamespace(to_dict=lambda: config)):
        model = from_hooked_transformer(state, given)
        assert model.cfg == plain.cfg and model.name == "solo"
        assert torch.equal(model(TOKENS), plain(TOKENS))
    with pytest.raises(ValueError, match=r"a HookedTransformerConfig or its dict is required, got int"):
        from_hooked_transformer(state, 3)


def test_a_tokenizer_comes_along() -> None:
    fields = BASE | {"d_vocab": backend().get_vocab_size()}
    model = from_hooked_transformer(random_state(fields), fields, tokenizer=gpt2_tokenizer())
    assert isinstance(model, HookedTransformer)
    assert model.to_string(model.to_tokens("cat")[0]) == END + "cat"


LACKING = {
    "none": (),
    "unembedding": ("b_U",),
    "values": ("b_V",),
    "attention": ("b_Q", "b_K", "b_V", "b_O"),
    "mlp": ("b_in", "b_out"),
    "inner": ("b_in",),
    "all": ("b_Q", "b_K", "b_V", "b_O", "b_in", "b_out", "b_U"),
}
"""Kinds of biases that a file may be without."""


def lacking(state: dict[str, torch.Tensor], kinds: tuple[str, ...]) -> list[str]:
    """The names of a state dict's biases of these kinds."""
    return [name for name in state if name.rpartition(".")[2].removeprefix("_") in kinds]


@over("what", LACKING)
@pytest.mark.parametrize("name", ["layer-norm", "classifier", "grouped", "gated-layer-norm"])
def test_biases_that_no_layer_has_are_zero(name: str, what: str) -> None:
    """As in TransformerLens, whose `load_state_dict(strict=False)` leaves them at the zeros that they began with."""
    fields, full = CASES[name], random_state(CASES[name])
    gone = lacking(full, LACKING[what])
    model = from_hooked_transformer({n: w for n, w in full.items() if n not in gone}, fields)
    expected = slow_logits(fields, full | {n: torch.zeros_like(full[n]) for n in gone}, TOKENS)
    rotary = fields.get("positional_embedding_type") == "rotary"
    assert_close(model(TOKENS)[0], expected, torch.float32 if rotary else torch.float64)
    again = from_hooked_transformer(*to_hooked_state(model))
    assert_close(again(TOKENS), model(TOKENS))


def test_a_model_without_biases_has_none() -> None:
    """Not zeros that training would move, and attribution would list."""
    full = random_state(BASE)
    gone = lacking(full, LACKING["all"])
    cfg = from_hooked_transformer({n: w for n, w in full.items() if n not in gone}, BASE).cfg
    assert not (cfg.qkv_bias or cfg.out_bias or cfg.unembed_bias)
    assert isinstance(cfg.mlp, MLP) and not cfg.mlp.bias


REFUSED = {
    "act_fn='solu_ln'": {"act_fn": "solu_ln"},
    "d_vocab_out >= 1, got 0": {"d_vocab_out": 0},
    "positional_embedding_type='shortformer'": {"positional_embedding_type": "shortformer"},
    "positional_embedding_type='relative_positional_bias'": {
        "positional_embedding_type": "relative_positional_bias"
    },
    "alibi requires a power of two": {"positional_embedding_type": "alibi", "n_heads": 3},
    "post_embedding_ln requires LayerNorm": {"post_embedding_ln": True},
    "final_rms=True": {"final_rms": True},
    "normalization_type='BN'": {"normalization_type": "BN"},
    "use_normalization_before_and_after requires RMS": {"use_normalization_before_and_after": True},
    "queries and keys are normed by RMS": {"use_qk_norm": True},
    "clip_qkv=8.0": {"clip_qkv": 8.0},
    "use_logn_attn=True": {"use_logn_attn": True},
    "use_dynamic_ntk_rope=True": {"use_dynamic_ntk_rope": True},
    "load_in_4bit=True": {"load_in_4bit": True},
    "attention_dir='backwards'": {"attention_dir": "backwards"},
    "use_local_attn has no effect": {"use_local_attn": True, "attention_dir": "bidirectional"},
    "use_local_attn requires attn_types": {"use_local_attn": True, "window_size": 3, "attn_types": ["local"]},
    "does not go with Olmo2 or Olmo3": RMS
    | {"use_normalization_before_and_after": True, "original_architecture": "Olmo2ForCausalLM"},
    "use_qk_norm does not go": RMS | {"use_qk_norm": True, "original_architecture": "OlmoeForCausalLM"},
    "experts of original_architecture": RMS
    | {"num_experts": 4, "experts_per_token": 2, "original_architecture": "GptOssForCausalLM"},
    "requires a number for n_layers": {"n_layers": None},
    "config keys not understood: warp_drive": {"warp_drive": True},
    "requires an MLP|an MLP": {"attn_only": True, "parallel_attn_mlp": True},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_config_that_asks_for_something_else_is_refused_by_name(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hooked_transformer(random_state(BASE), BASE | REFUSED[message])


def test_every_tensor_is_accounted_for() -> None:
    state = random_state(BASE)
    lacking = {name: w for name, w in state.items() if name != "blocks.1.attn.b_K"}
    with pytest.raises(ValueError, match=r"lacks 1 of \d+ tensors, first 'blocks.1.attn.b_K'"):
        from_hooked_transformer(lacking, BASE)
    with pytest.raises(ValueError, match=r"1 tensors are not understood, first 'blocks.0.attn.W_X'"):
        from_hooked_transformer(state | {"blocks.0.attn.W_X": torch.zeros(1)}, BASE)
    with pytest.raises(
        ValueError, match=r"blocks.0.attn.W_Q requires shape \[4, 24, 10\], got \[4, 10, 24\]"
    ):
        from_hooked_transformer(state | {"blocks.0.attn.W_Q": state["blocks.0.attn.W_Q"].mT}, BASE)
    with pytest.raises(ValueError, match=r"blocks.0.ln1.b does not go with this config"):
        from_hooked_transformer(state, BASE | {"normalization_type": "LNPre"})
    gated = random_state(CASES["gated-layer-norm"])
    with pytest.raises(ValueError, match=r"blocks.0.mlp.b_gate does not go with this config"):
        from_hooked_transformer(gated | {"blocks.0.mlp.b_gate": torch.zeros(20)}, CASES["gated-layer-norm"])
    with pytest.raises(ValueError, match=r"unembed.b_U: the checkpoint holds NaN"):
        from_hooked_transformer(state | {"unembed.b_U": torch.full((31,), torch.nan)}, BASE)
