"""Small random Hugging Face models of every option we support: the oracle of the tests in this folder.

Nothing is zero or one by default (norms and biases are perturbed too), heads are not d_model / n_heads wide where the
family allows it, the vocabulary is no multiple of 8. The models stand in `cases_decoders` and `cases_others`.
"""

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from tests.families import cases_decoders, cases_others
from tests.families.case import D_VOCAB, Case

CASES: dict[str, Case] = {**cases_decoders.CASES, **cases_others.CASES}
ENCODER_DECODERS = tuple(name for name, case in CASES.items() if case.config().is_encoder_decoder)
NAMES = tuple(name for name in CASES if name not in (*ENCODER_DECODERS, *cases_others.ENCODERS))
"""The decoders, with and without experts."""
STATES = ("Mamba2Mixer", "Mamba2Block", "Mamba2ForCausalLM", "GraniteMoeHybridMambaLayer", "BambaMixer")
"""Modules that compute in float32 in the middle of a Mamba-2 model in float64: states, norms, the stream, logits."""
SPREAD = 0.25
"""Standard deviation of what is added to every parameter."""


def hf_config(name: str) -> PreTrainedConfig:
    """The Hugging Face config of one of the `CASES`."""
    return CASES[name].config()


@functools.cache
def hf_model(name: str, dtype: torch.dtype = torch.float32, attention: str = "eager") -> PreTrainedModel:
    """A perturbed model in eval mode, the same numbers in every dtype; shared between tests, so never write to it."""
    return new_hf_model(name, dtype, attention)


def new_hf_model(name: str, dtype: torch.dtype = torch.float32, attention: str = "eager") -> PreTrainedModel:
    """The same for one test alone. In float64 all of it computes in float64 but the angles of rotary positions."""
    config = hf_config(name)
    config._attn_implementation = attention
    torch.manual_seed(zlib.crc32(name.encode()))
    model = CASES[name].model_class(config).double()
    with torch.no_grad():
        for weight in trained(model):
            weight += SPREAD * torch.randn(weight.shape, dtype=torch.float64)
    model = model.to(dtype).eval()
    for module in model.modules():
        if type(module).__name__ == "FalconAttention" and attention == "eager":
            module.forward = functools.partial(_one_alibi, module.forward)
    return widened(model) if dtype == torch.float64 else model


def widened(model: PreTrainedModel) -> PreTrainedModel:
    """A float64 model that computes in float64 wherever it may."""
    model.forward = _without_detours(model.forward)
    for module in model.modules():
        _widen(module)
    return model


def _one_alibi(
    forward: Callable[..., object], x: Tensor, alibi: Tensor | None = None, **options: object
) -> object:
    """Falcon's eager attention with the ALiBi that is in its mask, as in "sdpa", and not a second time beside it."""
    return forward(x, alibi=None if alibi is None else torch.zeros_like(alibi), **options)


def _widen(module: nn.Module) -> None:
    """Undo what rounds to float32, or to eight digits, within a float64 model."""
    name = type(module).__name__
    if name.endswith(("RMSNorm", "T5LayerNorm")):
        module.forward = functools.partial(_rms_norm, module)
    if name in ("OlmoLayerNorm", "CohereLayerNorm", "Cohere2LayerNorm"):
        module.forward = functools.partial(_layer_norm, module)
    if name.endswith("GatedDeltaNet") or name in STATES:  # cast vectors and rates too
        module.forward = _without_detours(module.forward, (1, 2, 3, 4))
    if name == "MarianSinusoidalPositionalEmbedding":
        module.weight.copy_(_sinusoids(*module.weight.shape))
    if name == "BloomGelu":  # writes sqrt(2/pi) with eight digits
        module.forward = functools.partial(nn.functional.gelu, approximate="tanh")
    if hasattr(module, "scalar_embed_scale"):
        module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)


def trained(model: nn.Module) -> list[Tensor]:
    """Every trained parameter, and what is trained but kept as a buffer: BART's bias of the logits, a router's."""
    kept = ("final_logits_bias", "e_score_correction_bias")
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith(kept)]
    return [*(p for p in model.parameters() if p.requires_grad), *biases]


def _sinusoids(n: int, d: int) -> Tensor:
    """Marian's table, all sines and then all cosines, which Hugging Face rounds to float32."""
    angles = [[p / 10_000 ** (2 * i / d) for i in range(d // 2)] for p in range(n)]
    return torch.tensor([[*map(math.sin, row), *map(math.cos, row)] for row in angles], dtype=torch.float64)


def _rms_norm(module: nn.Module, x: Tensor) -> Tensor:
    """Hugging Face's own formula without its detour through float32, which would hide errors below 1e-7."""
    eps = getattr(module, "eps", None) or module.variance_epsilon
    offset = 1 if type(module).__name__.startswith(("Gemma", "Qwen3Next", "Qwen3_5")) else 0
    return (offset + module.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _layer_norm(module: nn.Module, x: Tensor) -> Tensor:
    """The same for LayerNorms without beta, and without gamma where there is none."""
    gamma = getattr(module, "weight", None)
    normed = nn.functional.layer_norm(x, x.shape[-1:], eps=getattr(module, "variance_epsilon", 1e-5))
    return normed if gamma is None else gamma * normed


def _without_detours(forward: Callable[..., object], axes: Sequence[int] = (2, 4)) -> Callable[..., object]:
    @functools.wraps(forward)
    def wrapped(*args: object, **options: object) -> object:
        with _NoDetours(axes):
            return forward(*args, **options)

    return wrapped


class _NoDetours(TorchFunctionMode):
    """Leaves out what would compute in float32 within a float64 model: softmaxes, casts of queries, keys, routers.

    axes: of tensors whose casts are left out; the angles of rotary positions have 1 and 3.
    """

    def __init__(self, axes: Sequence[int]) -> None:
        super().__init__()
        self.axes = axes

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        options = dict(kwargs or {})
        x = args[0] if args else None
        if func is torch.polar:  # of angles in float32, where it rounds otherwise than cos and sin
            return torch.complex(args[0] * args[1].cos(), args[0] * args[1].sin())  # type: ignore[operator, attr-defined]
        if isinstance(x, Tensor) and x.dtype == torch.float64:
            if func is nn.functional.softmax or func is Tensor.softmax or func is torch.softmax:
                options.pop("dtype", None)
            if x.ndim in self.axes and (
                func is Tensor.float or (func in (Tensor.to, Tensor.type) and torch.float32 in args)
            ):
                return x
        return func(*args, **options)


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
                self.outputs[name] = first.clone()  # Falcon adds to it in place

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
