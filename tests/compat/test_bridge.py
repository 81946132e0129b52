"""A live TransformerBridge becomes our model with the bridge's own logits, its weights processed or not.

Where transformer-lens is older than 4 (beside SAELens), bridges with processed weights are refused.
"""

from importlib.metadata import version
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from interp.compat import bridge as reading, from_bridge
from tests.loops import over
from tests.tiny import CORPUS, gpt2_tokenizer
from tests.tolerances import assert_close

bridges = pytest.importorskip("transformer_lens.model_bridge", reason="transformer-lens is not installed")

READS_PROCESSED = int(version("transformer-lens").partition(".")[0]) >= reading.NAMES_WEIGHTS
needs_4 = pytest.mark.skipif(not READS_PROCESSED, reason="transformer-lens is older than 4")
TOKENS = torch.randint(0, 401, (2, 11), generator=torch.Generator().manual_seed(0))
SIZES: dict[str, Any] = {"n_layer": 2, "n_embd": 24, "n_head": 4, "n_positions": 32, "vocab_size": 401}
PROCESSING: dict[str, dict[str, bool] | None] = {
    "as-booted": None,
    "names-only": {"no_processing": True},
    "processed": {},
    "unfolded": {"fold_ln": False},
    "folded-only": {"center_writing_weights": False, "center_unembed": False, "fold_value_biases": False},
}


def hf_model(name: str) -> transformers.PreTrainedModel:
    """A perturbed random model, float64."""
    if name == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=2, hidden_size=24, num_attention_heads=4, num_key_value_heads=2, intermediate_size=36,
            vocab_size=401, max_position_embeddings=32,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.25 * torch.randn_like(parameter)
    return model.double().eval()


def boot(name: str) -> Any:
    return bridges.TransformerBridge.boot_transformers(
        name, hf_model=hf_model(name), tokenizer=gpt2_tokenizer(), dtype=torch.float64, device="cpu"
    )


UNPROCESSED = ("as-booted", "names-only")


@over("how", PROCESSING if READS_PROCESSED else UNPROCESSED)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_logits_are_the_bridges_own(name: str, how: str) -> None:
    bridge, options = boot(name), PROCESSING[how]
    if options is not None:
        bridge.enable_compatibility_mode(**options)
    with torch.no_grad():
        expected = bridge(TOKENS)
    ours = from_bridge(bridge)
    assert_close(ours(TOKENS), expected, torch.float64 if name == "gpt2" else torch.float32)
    assert ours.name == name
    assert torch.equal(ours.to_tokens(CORPUS[0]), bridge.to_tokens(CORPUS[0]))


def test_the_bridge_is_not_touched() -> None:
    bridge = boot("gpt2")
    before = {key: value.clone() for key, value in bridge.state_dict().items()}
    ours = from_bridge(bridge)
    ours.W_E.zero_()
    assert all(torch.equal(value, before[key]) for key, value in bridge.state_dict().items())


@needs_4
def test_processed_weights_are_those_of_the_folded_model() -> None:
    bridge = boot("gpt2")
    bridge.enable_compatibility_mode()
    ours = from_bridge(bridge)
    assert torch.equal(ours.W_Q, bridge.W_Q) and torch.equal(ours.b_U, bridge.b_U)
    assert torch.equal(ours.transformer.block(0).ln1.weight, torch.ones(24).double())
    assert_close(ours.W_U.mean(-1), torch.zeros(24).double(), torch.float32)


@needs_4
def test_processed_weights_that_would_give_other_logits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = boot("gpt2")
    bridge.enable_compatibility_mode()
    with torch.no_grad():
        bridge.original_model.config.layer_norm_epsilon = 10.0  # said of the model, and not done by it
    with pytest.raises(
        ValueError, match=r"give other logits in our model .* boot it again without processing"
    ):
        from_bridge(bridge)


def test_processed_weights_ask_for_version_4_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    if READS_PROCESSED:
        monkeypatch.setattr(reading, "version", lambda package: "3.9.0")
    bridge = boot("gpt2")
    from_bridge(bridge)
    bridge.enable_compatibility_mode()
    with pytest.raises(ImportError, match=r"require transformer-lens >= 4, got 3\.\d.*pip install"):
        from_bridge(bridge)


def test_what_is_no_bridge_or_wraps_no_hugging_face_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a TransformerBridge is required, got Linear"):
        from_bridge(nn.Linear(1, 1))
    fields = {
        "n_layers": 1,
        "d_model": 8,
        "n_ctx": 8,
        "d_head": 4,
        "n_heads": 2,
        "d_vocab": 5,
        "act_fn": "relu",
    }
    with pytest.raises(ValueError, match=r"around a Hugging Face model is required"):
        from_bridge(bridges.TransformerBridge.boot_native(fields))
