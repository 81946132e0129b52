"""Models of images and text: their text part opens, live and from a folder, or the refusal says why not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import interp
from interp import HookedTransformer, verify
from interp.wrapped import UnknownNetworkError, Wrapped
from tests.tiny import gpt2_tokenizer

TEXT = {
    "vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SEEN = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


def llava() -> PreTrainedModel:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT), vision_config=transformers.CLIPVisionConfig(**SEEN),
        image_token_index=399,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


def qwen() -> PreTrainedModel:
    scaling = {"type": "mrope", "mrope_section": [1, 1, 2]}
    seen = {
        "depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32, "patch_size": 8,
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(text_config=TEXT | {"rope_scaling": scaling}, vision_config=seen)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def paligemma() -> PreTrainedModel:
    config = transformers.PaliGemmaConfig(
        text_config=transformers.GemmaConfig(**TEXT, head_dim=8), vision_config=transformers.SiglipVisionConfig(**SEEN),
        image_token_index=399, projection_dim=32,
    )  # fmt: skip
    return transformers.PaliGemmaForConditionalGeneration(config)


def made(kind: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    network = kind().eval().requires_grad_(False)
    for parameter in network.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    return network


@pytest.mark.parametrize("kind", [llava, qwen])
def test_the_text_part_opens_live_and_from_a_folder(
    kind: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    theirs = made(kind)
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(3, 398, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(input_ids=tokens).logits
    for given in (theirs, tmp_path):
        model = HookedTransformer.from_pretrained(given, tokenizer=gpt2_tokenizer())
        assert isinstance(model.transformer, Wrapped)
        torch.testing.assert_close(model.transformer(tokens), expected, rtol=1e-5, atol=1e-5)
        assert verify.contract(model.transformer, "none").passed
        found = interp.attribute(model, "The cat sat", 5, 6, parts="head")
        logits = model.transformer(model.to_tokens("The cat sat"))[0, -1]
        assert float(found.value.sum()) == pytest.approx(float(logits[5] - logits[6]), abs=1e-4)


def test_a_text_part_that_sees_later_tokens_is_refused() -> None:
    with pytest.raises(UnknownNetworkError, match="depend on later tokens"):
        HookedTransformer.from_pretrained(made(paligemma), tokenizer=gpt2_tokenizer())
