"""Live networks whose numbers their config and parameters do not say: each is refused, or opened as its own code.

The oracle is the network's own pass.
"""

import copy
import types
import warnings
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn

from interp import HookedTransformer
from interp.core.notes import Note, note
from interp.families import any_from_hf_model
from tests.families.oracle import hf_model, some_tokens
from tests.families.test_sources import llama, logits
from tests.tolerances import assert_close


class Louder(transformers.LlamaForCausalLM):
    """A model with a forward of its own."""

    def forward(self, *given: object, **options: object) -> object:
        """Llama's pass with logits twice as large."""
        found = super().forward(*given, **options)  # type: ignore[arg-type]
        found.logits = found.logits * 2
        return found


def silent(mlp: nn.Module, x: Tensor) -> Tensor:
    return x * 0


def _config(network: nn.Module, **values: object) -> None:
    for key, value in values.items():
        setattr(network.config, key, value)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "activation": lambda n: setattr(n.model.layers[0].mlp, "act_fn", nn.ReLU()),  # type: ignore[union-attr, index]
    "forward": lambda n: setattr(n.model.layers[1].mlp, "forward", types.MethodType(silent, n.model.layers[1].mlp)),  # type: ignore[union-attr, index]
    "class": lambda n: setattr(n, "__class__", Louder),
    "scaling": lambda n: setattr(n.model.layers[0].self_attn, "scaling", 0.1),  # type: ignore[union-attr, index]
    "angles": lambda n: n.model.rotary_emb.inv_freq.mul_(0.5),  # type: ignore[union-attr, operator]
    "config": lambda n: _config(n, rms_norm_eps=0.5),
    "rope": lambda n: _config(n, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
}  # fmt: skip
"""What a user does to a network that its config and parameters do not say."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_network_that_computes_what_its_config_does_not_say_is_refused(change: str) -> None:
    network = llama()
    CHANGES[change](network)
    for wrapped in (None, False):
        with pytest.raises(
            ValueError, match=r"its own pass gives other numbers .* wrapped=True takes its own code"
        ):
            HookedTransformer.from_pretrained(network, wrapped=wrapped)


@pytest.mark.parametrize("change", ["activation", "class", "scaling"])
def test_wrapped_takes_its_own_code(change: str) -> None:
    network = llama()
    CHANGES[change](network)
    model = HookedTransformer.from_pretrained(network, wrapped=True)
    assert torch.equal(model.transformer(some_tokens()), logits(network))


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "gemma2", "mixtral", "bert", "roberta", "t5", "bart", "mamba2"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untouched_network_opens_without_a_word(name: str, dtype: torch.dtype) -> None:
    """In either dtype, and cast while it is opened; in training mode, in which it stays."""
    network = copy.deepcopy(hf_model(name)).to(dtype).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", Note)
        for asked in (None, torch.bfloat16):
            any_from_hf_model(network, dtype=asked)
    assert network.training


def test_network_whose_own_pass_fails_opens_and_says_it_was_not_compared() -> None:
    network = llama()
    expected = logits(network)

    def broken(*_: object, **__: object) -> object:
        raise OSError("no such device")

    network.forward = broken
    note.cache_clear()
    with pytest.warns(
        Note, match=r"not compared with our copy's, since it fails \(OSError: no such device\)"
    ):
        model = HookedTransformer.from_pretrained(network)
    assert_close(model.transformer(some_tokens()), expected)


def test_hooks_do_not_count_as_its_own_pass_and_their_state_is_not_copied() -> None:
    class Counting:
        def __init__(self) -> None:
            self.seen = 0

        def __call__(self, module: nn.Module, given: object, output: Tensor) -> Tensor:
            self.seen += 1
            return output * 0

        def __deepcopy__(self, memo: object) -> object:
            raise AssertionError("a hook of the user's is copied")

    network, counting = llama(), Counting()
    expected = logits(network)
    network.model.layers[0].register_forward_hook(counting)  # type: ignore[union-attr, index]
    model = HookedTransformer.from_pretrained(network)
    assert_close(model.transformer(some_tokens()), expected)
    assert model.verify().passed
    assert counting.seen == 0


def test_what_has_no_logits_of_tokens_is_nothing_to_compare_with() -> None:
    said = str(HookedTransformer.from_pretrained(llama()).verify(nn.Linear(2, 2)))
    assert "Linear gives no logits of tokens" in said


@pytest.mark.parametrize("where", ["meta", "offloaded"])
def test_a_network_whose_parameters_are_not_here_is_refused(where: str) -> None:
    network = llama()
    if where == "meta":
        network.to("meta")
    else:
        pytest.importorskip("accelerate").cpu_offload(network)
    with pytest.raises(
        ValueError, match=r"all its parameters in memory is required, 21 of this one are offloaded"
    ):
        HookedTransformer.from_pretrained(network)


def test_an_adapter_is_compared_unmerged() -> None:
    peft = pytest.importorskip("peft", reason="the extra peft is not installed")
    network = peft.get_peft_model(
        llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    expected = logits(network.eval())
    assert_close(HookedTransformer.from_pretrained(network).transformer(some_tokens()), expected)
    for module in network.modules():
        if hasattr(module, "scaling") and isinstance(module.scaling, dict):
            forward = module.forward
            module.forward = lambda *given, own=forward, **options: own(*given, **options) * 1.5
    with pytest.raises(ValueError, match=r"an adapter .* gives other numbers than beside"):
        HookedTransformer.from_pretrained(network)


def test_a_module_that_is_compiled_inside_a_network_opens_as_itself() -> None:
    network = llama()
    expected = logits(network)
    network.model.layers[0] = torch.compile(network.model.layers[0])  # type: ignore[union-attr, index, operator]
    assert_close(HookedTransformer.from_pretrained(network).transformer(some_tokens()), expected)
