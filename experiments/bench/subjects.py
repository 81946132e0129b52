"""The random models every claim is measured on: a Hugging Face model, and ours with the same weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

import interp


@dataclass(frozen=True)
class Pair:
    """One set of weights in two implementations; `hf` runs its fastest attention (SDPA)."""

    name: str
    hf: transformers.PreTrainedModel
    ours: interp.HookedTransformer

    def tokens(self, rows: int, columns: int) -> Tensor:
        """The same random tokens at every call."""
        dice = torch.Generator().manual_seed(1)
        return torch.randint(self.ours.cfg.d_vocab, (rows, columns), generator=dice)

    def hf_logits(self, tokens: Tensor) -> Tensor:
        """Hugging Face's plain forward, without the key/value cache that nobody would read."""
        logits: Tensor = self.hf(tokens, use_cache=False).logits
        return logits


def gpt2_small() -> Pair:
    """12 layers, width 768, 12 heads, vocabulary 50257: GPT-2 small's shape."""
    config = transformers.GPT2Config(attn_implementation="sdpa", bos_token_id=0, eos_token_id=None)  # type: ignore[call-arg]
    return _pair("gpt2-small", lambda: transformers.GPT2LMHeadModel(config))


def llama_small() -> Pair:
    """8 layers, width 512, 8 heads on 2 key/value heads, gated MLP, vocabulary 32000."""
    config = transformers.LlamaConfig(  # type: ignore[call-arg]
        num_hidden_layers=8, hidden_size=512, intermediate_size=1376, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=32000, max_position_embeddings=1024, attn_implementation="sdpa", eos_token_id=None,
    )  # fmt: skip
    return _pair("llama-small", lambda: transformers.LlamaForCausalLM(config))


def _pair(name: str, build: Callable[[], transformers.PreTrainedModel]) -> Pair:
    """Norms and biases are perturbed, so that an implementation that drops or folds one wrongly would show."""
    torch.manual_seed(0)
    hf = build().eval().requires_grad_(False)
    for module in hf.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    _silence_progress()
    return Pair(name, hf, interp.HookedTransformer.from_pretrained(hf))


def _silence_progress() -> None:
    transformers.utils.logging.set_verbosity_error()


def largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference, relative to the largest absolute value of the second."""
    return float((a - b).abs().max() / b.abs().max())


__all__ = ["Pair", "gpt2_small", "largest_difference", "llama_small", "nn"]
