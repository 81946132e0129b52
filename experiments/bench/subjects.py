"""The random models every claim is measured on: a Hugging Face model, and ours with the same weights."""

from dataclasses import dataclass

import torch
import transformers
from measure import NARROW
from torch import Tensor

import interp

D_MODEL, D_VOCAB = (384, 10_000) if NARROW else (768, 50_257)
COLUMNS, DIFFERING = 15, (2, 4, 9, 10)
SIZE = "narrow" if NARROW else "small"


@dataclass(frozen=True)
class Pair:
    """One set of weights in two implementations; `hf` runs its fused attention (SDPA) where it has it."""

    name: str
    hf: transformers.PreTrainedModel
    ours: interp.HookedTransformer

    def tokens(self, rows: int, columns: int) -> Tensor:
        """The same random tokens at every call."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self.ours.cfg.d_vocab, (rows, columns), generator=generator)

    def prompts(self) -> tuple[Tensor, Tensor]:
        """A clean prompt of `COLUMNS` tokens, and one that differs from it in four places."""
        clean = self.tokens(1, COLUMNS)
        corrupt = clean.clone()
        corrupt[0, list(DIFFERING)] = torch.arange(len(DIFFERING)) + 7
        return clean, corrupt

    def hf_logits(self, tokens: Tensor) -> Tensor:
        """Hugging Face's plain forward, without the key/value cache that nobody would read."""
        logits: Tensor = self.hf(tokens, use_cache=False).logits
        return logits


def gpt2_small() -> Pair:
    """12 layers, width 768, 12 heads, vocabulary 50257: GPT-2 small's shape; or the narrow one."""
    config = transformers.GPT2Config(
        n_embd=D_MODEL, n_inner=3072, vocab_size=D_VOCAB, bos_token_id=0, eos_token_id=None
    )
    return _pair(f"gpt2-{SIZE}", config)


def llama_small() -> Pair:
    """8 layers, width 512, 8 heads on 2 key/value heads, gated MLP of 1376, vocabulary 32000."""
    config = transformers.LlamaConfig(
        num_hidden_layers=8, hidden_size=512, intermediate_size=1376, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=_vocabulary(32000), max_position_embeddings=1024, eos_token_id=None,
    )  # fmt: skip
    return _pair(f"llama-{SIZE}", config)


def smollm2() -> Pair:
    """SmolLM2-135M's shape: 30 layers, width 576, 9 heads on 3 key/value heads, gated MLP of 1536, tied 49152."""
    config = transformers.LlamaConfig(
        num_hidden_layers=30, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=_vocabulary(49152), tie_word_embeddings=True, max_position_embeddings=2048, eos_token_id=None,
    )  # fmt: skip
    return _pair(f"smollm2-{SIZE}" if NARROW else "smollm2", config)


def gemma2_small() -> Pair:
    """8 layers, width 512, 8 heads of 64 on 4 key/value heads, soft caps, window 64 in every other layer."""
    config = transformers.Gemma2Config(
        num_hidden_layers=8, hidden_size=512, intermediate_size=2048, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, vocab_size=_vocabulary(32000), max_position_embeddings=1024, sliding_window=64,
        query_pre_attn_scalar=64, eos_token_id=None,
    )  # fmt: skip
    return _pair(f"gemma2-{SIZE}", config, attention="eager")  # with SDPA theirs would leave the soft cap out


def neox_small() -> Pair:
    """8 layers, width 512, 8 heads, a quarter of each rotated, parallel blocks: Pythia's shape."""
    config = transformers.GPTNeoXConfig(
        num_hidden_layers=8, hidden_size=512, intermediate_size=2048, num_attention_heads=8,
        vocab_size=_vocabulary(50304), max_position_embeddings=1024, eos_token_id=None,
    )  # fmt: skip
    return _pair(f"neox-{SIZE}", config)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference, relative to the largest absolute value of the second."""
    return float((a - b).abs().max() / b.abs().max())


def _vocabulary(size: int) -> int:
    return D_VOCAB if NARROW else size


def _pair(name: str, config: transformers.PreTrainedConfig, attention: str = "sdpa") -> Pair:
    """Norms and biases are perturbed, so that an implementation that drops or folds one wrongly would show."""
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    hf = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in hf.eval().requires_grad_(False).parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return Pair(name, hf, interp.HookedTransformer.from_pretrained(hf))
