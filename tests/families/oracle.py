"""Small random Hugging Face models of every option we support: the oracle of the tests in this folder.

Two layers, nothing zero or one by default (norms and biases are perturbed too), heads not d_model / n_heads wide where
the family allows it, a vocabulary that is no multiple of 8.
"""

import functools
import zlib
from collections.abc import Callable, Mapping

import torch
import transformers
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

D_VOCAB, N_CTX = 53, 64
SPREAD = 0.25
"""Standard deviation of what is added to every parameter."""
Options = Mapping[str, object]

_GPT2: Options = {"n_layer": 2, "n_embd": 24, "n_head": 4, "n_positions": N_CTX}
_LLAMA: Options = {
    "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "intermediate_size": 36, "max_position_embeddings": N_CTX,
}  # fmt: skip
LLAMA3_ROPE: Options = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
"""Of its five frequencies one is kept, one is mixed and three are divided."""
LINEAR_ROPE: Options = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}

GPT2S: dict[str, Options] = {
    "gpt2": {},
    "gpt2-untied": {"tie_word_embeddings": False},
    "gpt2-inverse-layer": {"scale_attn_by_inverse_layer_idx": True},
    "gpt2-unscaled": {"scale_attn_weights": False},
    "gpt2-n-inner": {"n_inner": 17},
    "gpt2-eps": {"layer_norm_epsilon": 0.1},
    "gpt2-gelu": {"activation_function": "gelu"},
    "gpt2-relu": {"activation_function": "relu"},
    "gpt2-silu": {"activation_function": "silu"},
    "gpt2-tanh": {"activation_function": "gelu_pytorch_tanh"},
}
LLAMAS: dict[str, Options] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-attention-bias": {"attention_bias": True},
    "llama-mlp-bias": {"mlp_bias": True},
    "llama-mha": {"num_key_value_heads": 4},
    "llama-mqa": {"num_key_value_heads": 1},
    "llama-eps": {"rms_norm_eps": 0.1},
    "llama-llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "llama-linear-rope": {"rope_parameters": LINEAR_ROPE},
}
NAMES = (*GPT2S, *LLAMAS)


def hf_config(name: str) -> GPT2Config | LlamaConfig:
    """The Hugging Face config of one entry of `NAMES`."""
    shared = {"vocab_size": D_VOCAB, "bos_token_id": 0, "eos_token_id": 0}
    if name in GPT2S:
        return GPT2Config(**{**_GPT2, **shared, **GPT2S[name]})
    return LlamaConfig(**{**_LLAMA, **shared, **LLAMAS[name]})


@functools.cache
def hf_model(name: str, dtype: torch.dtype = torch.float32, attention: str = "eager") -> PreTrainedModel:
    """A perturbed model in eval mode, the same numbers in every dtype; shared between tests, so never write to it."""
    return new_hf_model(name, dtype, attention)


def new_hf_model(name: str, dtype: torch.dtype = torch.float32, attention: str = "eager") -> PreTrainedModel:
    """The same for one test alone. In float64 all of it computes in float64, Llama's norm included."""
    config = hf_config(name)
    config._attn_implementation = attention
    torch.manual_seed(zlib.crc32(name.encode()))
    model = (GPT2LMHeadModel if name in GPT2S else LlamaForCausalLM)(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += SPREAD * torch.randn(parameter.shape, dtype=torch.float64)
    model = model.to(dtype).eval()
    for module in model.modules():
        if dtype == torch.float64 and type(module).__name__ == "LlamaRMSNorm":
            module.forward = functools.partial(_rms_norm, module)
    return model


def _rms_norm(module: nn.Module, x: Tensor) -> Tensor:
    """Hugging Face's own formula without its detour through float32, which would hide errors below 1e-7."""
    return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))


def some_tokens(rows: int = 3, n: int = 20, seed: int = 0) -> Tensor:
    """Random token ids `[rows, n]`; never 0, which ends a text."""
    return torch.randint(1, D_VOCAB, (rows, n), generator=torch.Generator().manual_seed(seed))


def hf_logits(model: PreTrainedModel, tokens: Tensor, **inputs: Tensor) -> Tensor:
    """The oracle's logits `[b p v]`."""
    with torch.no_grad():
        return model(tokens, **inputs).logits


class Recorder:
    """The inputs and outputs of a model's modules in one forward pass, by module name."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self._handles = [m.register_forward_hook(self._noting(n)) for n, m in model.named_modules()]

    def _noting(self, name: str) -> Callable[[nn.Module, tuple[object, ...], object], None]:
        def note(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if args and isinstance(args[0], Tensor):
                self.inputs[name] = args[0]
            if isinstance(first, Tensor):
                self.outputs[name] = first

        return note

    def close(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()


def quiet() -> None:
    """No progress bars or advice from the oracle in the test log."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


quiet()
