"""Costs that configs say of themselves against torch's counter on the built model, and against published numbers."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from interp.lab import (
    AdaptiveSoftmax,
    DualChunk,
    HierarchicalSoftmax,
    Linear,
    Longformer,
    Macaron,
    Strided,
    cost,
    costs,
)
from interp.model import MLP, ModelConfig, RMSNorm, Rotary, Softmax, Transformer
from interp.model.records import Mixer
from interp.plot import costs as costs_plot
from tests.configs import CONFIGS
from tests.loops import over
from tests.mixers import MIXERS

PLAIN = ModelConfig(2, 24, 4, 1024, 31, mlp=MLP(40))
OTHERS = {
    "adaptive output": replace(PLAIN, output=AdaptiveSoftmax((8, 20), 2.0)),
    "tree output": replace(PLAIN, output=HierarchicalSoftmax()),
    "macaron": replace(PLAIN, block=Macaron()),
    "no unembedding": replace(PLAIN, unembed=False),
    "no layers": replace(PLAIN, n_layers=0),
    "sinks and a cap": replace(PLAIN, sinks=True, attn_softcap=3.0),
}
LONG = {
    "strided": replace(PLAIN, mixer=Softmax(sparsity=Strided(8))),
    "longformer": replace(PLAIN, mixer=Softmax(sparsity=Longformer(4, 1, 2)), causal=False),
    "strided, a window": replace(
        PLAIN, n_layers=2, mixer=Softmax(sparsity=Strided(8)), window=100, local_layers=(1,)
    ),
    "dual chunk": replace(PLAIN, mixer=DualChunk(300, 200), position=Rotary()),
}


@dataclass(frozen=True)
class Silent(Mixer):
    """A mixer that says nothing of its cost."""


@pytest.fixture(autouse=True)
def _no_figures_left() -> Iterator[None]:
    mpl.use("agg")
    yield
    plt.close("all")


def counted(config: ModelConfig, n: int) -> dict[str, int]:
    """What torch's counter counts of a pass of the built model, by module; attention by the kernel that it can see.

    In double precision, where experts are multiplied one by one: it knows no grouped product either.
    """
    tokens = torch.randint(0, config.d_vocab, (1, n), generator=torch.Generator().manual_seed(n))
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        Transformer(config).double()(tokens)
    found = {name: sum(each.values()) for name, each in counter.get_flop_counts().items()}
    parts = {
        "unembed": found["Global"]
        - sum(found.get(f"Transformer.blocks.{i}", 0) for i in range(config.n_layers))
    }
    for layer in range(config.n_layers):
        block = f"Transformer.blocks.{layer}"
        parts[f"L{layer}.attn"] = found.get(f"{block}.attn", 0)
        if config.mlp is not None:
            parts[f"L{layer}.mlp"] = found[f"{block}.mlp"] + found.get(f"{block}.mlp_before", 0)
    return parts


def said(config: ModelConfig, n: int) -> dict[str, int]:
    """The same as the config says it."""
    found = cost(config, n).flops
    every = {str(part): int(value) for part, value in zip(found.part.values, found.values, strict=True)}
    return {part: value for part, value in every.items() if part not in ("embed", "positions", "norms")}


@pytest.mark.slow
@over("name", [*MIXERS, *CONFIGS, *OTHERS])
def test_every_part_of_every_config_costs_what_torch_counts(name: str) -> None:
    config = {**CONFIGS, **MIXERS, **OTHERS}[name]
    for n in (2, 7, 24):
        assert said(config, n) == counted(config, n), n


@pytest.mark.parametrize("name", LONG)
def test_long_texts_cost_the_runs_of_queries_that_are_computed(name: str) -> None:
    assert said(LONG[name], 650) == counted(LONG[name], 650)


@over("name", [*MIXERS, *CONFIGS, *OTHERS])
def test_parameters_are_those_of_the_built_model(name: str) -> None:
    config = {**CONFIGS, **MIXERS, **OTHERS}[name]
    model, found = Transformer(config), cost(config, 4).parameters
    assert int(found.sum()) == sum(p.numel() for p in model.parameters())
    for layer in range(config.n_layers):
        own = [] if config.shared_blocks and layer else model.block(layer).attn.parameters()
        attention = sum(p.numel() for p in own)
        assert int(found.sel(part=f"L{layer}.attn")) == attention
    assert int(found.sel(part="embed")) >= config.d_vocab * config.d_model


def test_published_models_have_their_published_size() -> None:
    """GPT-2 small and Llama 2 7B, whose sizes their authors' checkpoints have; neither is ever allocated."""
    gpt2 = ModelConfig(12, 768, 12, 1024, 50257, mlp=MLP(3072), tied=True)
    llama = ModelConfig(
        32, 4096, 32, 4096, 32000, mlp=MLP(11008, act="silu", gated=True, bias=False), norm=RMSNorm(),
        position=Rotary(), qkv_bias=False, out_bias=False,
    )  # fmt: skip
    assert int(cost(gpt2, 1024).parameters.sum()) == 124_439_808
    assert int(cost(llama, 1).parameters.sum()) == 6_738_415_616
    matrices = 6_738_415_616 - 32000 * 4096 - 65 * 4096
    attention = 32 * 4 * 4096 * 4096**2  # layers, both products of 2 n^2 d
    assert int(cost(llama, 4096).flops.sum()) == 2 * 4096 * matrices + attention


def test_softmax_grows_with_the_squared_length_and_linear_with_the_length() -> None:
    def slope(mixer: Mixer) -> float:
        both = [float(cost(replace(PLAIN, n_ctx=1 << 20, mixer=mixer), 1 << p).flops.sum()) for p in (19, 20)]
        return float(np.log2(both[1] / both[0]))

    assert slope(Linear()) == pytest.approx(1.0)
    assert slope(Softmax()) == pytest.approx(2.0, abs=1e-3)


def test_several_models_stand_beside_each_other_and_are_drawn() -> None:
    models = {"softmax": PLAIN, "linear": replace(PLAIN, mixer=Linear())}
    found = costs(models, [64, 128, 512])
    for name, config in models.items():
        assert found.flops.sel(model=name).values.tolist() == [
            float(cost(config, n).flops.sum()) for n in (64, 128, 512)
        ]
    ax = costs_plot(found)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["softmax", "linear"]  # type: ignore[union-attr]
    drawn = {line.get_label(): line.get_ydata() for line in ax.lines}
    np.testing.assert_array_equal(drawn["linear"], found.flops.sel(model="linear"))  # type: ignore[arg-type]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("tokens of one text", "operations of one pass")


def test_what_has_no_cost_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"a length in \[1, n_ctx = 1024\] is required, got 0"):
        cost(PLAIN, 0)
    with pytest.raises(ValueError, match="a model without cross-attention"):
        cost(replace(PLAIN, cross_attention=True), 4)
    with pytest.raises(ValueError, match="Silent does not say what it costs"):
        cost(replace(PLAIN, mixer=Silent()), 4)
    with pytest.raises(ValueError, match="a config and a length are required, got 1 and 0"):
        costs({"one": PLAIN}, [])
