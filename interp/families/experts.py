"""Decoders with experts: the config's keys, and where a checkpoint keeps the router and the experts.

Transformers 5 fuses the experts in memory; files hold each expert's three matrices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from interp.families import llama_like
from interp.families.rope import USUAL, Wording
from interp.families.spec import Settings, TensorRule, in_layers
from interp.families.table import modules
from interp.model.config import MLP, ModelConfig, MoE

BLOCK = "model.layers.{l}."
PARTS = ("gate_proj", "up_proj", "down_proj")
"""The matrices gate, linear and out of an expert."""
PREDICTORS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys for the number of speculative-decoding modules after the layers, which no forward pass here uses."""


def decoder(
    settings: Settings,
    moe: MoE,
    defaults: Mapping[str, int | float],
    dense_layers: tuple[int, ...] = (),
    *,
    biases: Sequence[str] = ("attention_bias",),
    wording: Wording = USUAL,
) -> ModelConfig:
    """Llama's arithmetic with these experts, their non-linearity the config's.

    Args:
        defaults, biases, wording: as in `llama_like`.
        dense_layers: the layers with the config's plain MLP in place of the experts.
    """
    body = llama_like.decoder(settings, defaults, biases=biases, wording=wording)
    assert isinstance(body.mlp, MLP)
    dense = body.mlp if dense_layers else None
    return replace(body, mlp=replace(moe, act=body.mlp.act, dense=dense, dense_layers=dense_layers))


def rules(config: ModelConfig, stored: str, parts: tuple[str, str, str] = PARTS) -> tuple[TensorRule, ...]:
    """The weight table: experts fused, or one by one under `stored` as the matrices gate, linear and out."""
    return (*llama_like.attention_rules(config), *mixture_rules(stored, parts))


def mixture_rules(stored: str, parts: tuple[str, str, str] = PARTS) -> tuple[TensorRule, ...]:
    """The rules of the router and the experts, stored fused or one by one."""
    gate, linear, out = (f"{BLOCK}{stored}.experts.{{x}}.{part}.weight" for part in parts)
    sources = {
        "router.weight": ("gate.weight", (f"{BLOCK}{stored}.gate.weight",)),
        "into": ("experts.gate_up_proj", (gate, linear)),
        "out": ("experts.down_proj", (out,)),
    }
    table = []
    for ours, (fused, apart) in sources.items():
        name = f"blocks.{{l}}.mlp.{ours}"
        table.append(TensorRule(name, (f"{BLOCK}mlp.{fused}",), otherwise=TensorRule(name, apart)))
    return tuple(table)


def shared_rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The rules of MLPs with a shared expert, an expert's correction and dense layers (DeepSeek, GLM-4.5)."""
    moe = config.mlp
    assert isinstance(moe, MoE)
    table = [*mixture_rules("mlp")]
    if moe.router.correction:
        table.append(TensorRule("blocks.{l}.mlp.correction", (f"{BLOCK}mlp.gate.e_score_correction_bias",)))
    if moe.shared:
        table += gated_rules("mlp.shared", "mlp.shared_experts.")
    return some_dense(config, table, gated_rules("mlp", "mlp."))


def some_dense(
    config: ModelConfig, mixture: Sequence[TensorRule], dense: Sequence[TensorRule]
) -> tuple[TensorRule, ...]:
    """The rules of the layers with experts, and of those with a dense MLP in their place."""
    assert isinstance(config.mlp, MoE)
    layers = config.mlp.dense_layers
    routed = [layer for layer in range(config.n_layers) if layer not in layers]
    return (*in_layers(mixture, routed), *in_layers(dense, layers))


def gated_rules(ours: str, theirs: str) -> tuple[TensorRule, ...]:
    """The rules of a gated MLP without biases."""
    gate, linear, out = (f"{theirs}{part}" for part in PARTS)
    names: dict[str, str | tuple[str, ...]] = {f"{ours}.into": (gate, linear), f"{ours}.out": out}
    return modules(names, ours="blocks.{l}.", theirs=BLOCK, bias=False)


def first_dense(settings: Settings, default: int) -> tuple[int, ...]:
    """The first layers, `first_k_dense_replace` of them, which have a dense MLP in place of the experts."""
    first = settings.integer("first_k_dense_replace", default)
    return tuple(range(min(max(first, 0), settings.count("num_hidden_layers"))))
