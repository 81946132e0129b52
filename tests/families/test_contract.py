"""The contract table of every family: what `model.verify()` measures, on random models, in two dtypes."""

import copy

import pytest
import torch

from interp import HookedEncoderDecoder, HookedTransformer
from tests.families.oracle import ENCODER_DECODERS, hf_model, new_hf_model

DTYPES = (torch.float32, torch.float64)
REPRESENTATIVES = (
    "gpt2", "gpt-neo", "gptj", "gpt-neox", "opt", "opt-post-norm", "bloom-6-heads", "phi", "llama", "llama-mqa",
    "llama-yarn-rope", "llama-long-rope", "mistral-window", "mistral-mqa-tied", "qwen2", "qwen3", "gemma", "gemma2",
    "gemma2-mqa-untied", "gemma3", "phi3", "phi3-tied-mqa", "olmo2", "granite", "mixtral", "mixtral-mqa", "qwen3-moe",
    "gpt-oss", "gpt-oss-mqa", "gpt-bigcode", "codegen", "falcon", "falcon-groups", "falcon-rw", "mpt",
    "olmo-clipped-tied", "olmo3-yarn", "smollm3", "cohere-qk-norm", "cohere2", "stablelm", "stablelm-12b",
    "granite-moe", "deepseek-v2-grouped", "deepseek-v3", "deepseek-v3-yarn", "glm4-moe-qk-norm", "llama4",
    "llama4-tuned", "llama4-one-expert", "glm4", "qwen3-next", "qwen3.5", "qwen3.5-moe", "lfm2", "mamba2",
    "mamba2-steps", "granite4", "granite4-rope", "granite4-moe", "bamba", "bert", "bert-no-head", "roberta",
    "distilbert", "t5", "t5-v1.1", "bart", "marian",
)  # fmt: skip
"""Every family, with one and with several key/value heads; logits and sites of every other case: `test_parity`."""

WITH_MEMORY = ("qwen3.5", "qwen3-next", "mamba2", "granite4", "bamba")
"""Families whose memory Hugging Face computes in float32 also within a float64 model."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_every_line_of_the_contract_holds(name: str, dtype: torch.dtype) -> None:
    if name.startswith(WITH_MEMORY) and dtype == torch.float64:
        source = new_hf_model(name, dtype)  # whose memory runs in float32 otherwise: gradients are 2e-5 off
        # a copy in bfloat16 would still run what was put into it; float32 measures the drift
    else:  # as a user has it: no detour through float32 is taken out
        source = copy.deepcopy(hf_model(name)).to(dtype)
    door = HookedEncoderDecoder if name in ENCODER_DECODERS else HookedTransformer
    found = door.from_pretrained(source).verify()
    measured = {line.claim for line in found.lines if line.error is not None}
    held = [line for line in found.lines if line.passed is not None]
    if name.startswith(WITH_MEMORY) and dtype == torch.float64:
        held = [line for line in held if line.claim != "drift in bfloat16"]
    assert all(line.passed for line in held), f"\n{found}"
    assert {"logits = Hugging Face", "gradients = autograd on Hugging Face"} <= measured
