"""What decoders with experts share: the config's keys, and where a checkpoint keeps the router and the experts.

Transformers 5 fuses the experts in memory; files hold each expert's three matrices.
"""

from collections.abc import Mapping
from dataclasses import replace

from interp.families import llama_like
from interp.families.spec import Rule, Settings
from interp.model.config import MLP, ModelConfig, MoE

TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
"""Keys about the router's loss and its noise in training."""
BLOCK = "model.layers.{l}."


def decoder(settings: Settings, moe: MoE, defaults: Mapping[str, int | float]) -> ModelConfig:
    """Llama's arithmetic with these experts, their non-linearity the config's; `defaults` as in `llama_like`."""
    settings.present(TRAINING)
    body = llama_like.decoder(settings, defaults)
    assert isinstance(body.mlp, MLP)
    return replace(body, mlp=replace(moe, act=body.mlp.act))


def rules(config: ModelConfig, stored: str, parts: tuple[str, str, str]) -> tuple[Rule, ...]:
    """The weight table: experts fused, or one by one under `stored` as the matrices gate, linear and out."""
    return (*llama_like.attention_rules(config), *mixture_rules(stored, parts))


def mixture_rules(stored: str, parts: tuple[str, str, str]) -> tuple[Rule, ...]:
    """The router and the experts of that table."""
    gate, linear, out = (f"{BLOCK}{stored}.experts.{{x}}.{part}.weight" for part in parts)
    sources = {
        "router.weight": ("gate.weight", (f"{BLOCK}{stored}.gate.weight",)),
        "into": ("experts.gate_up_proj", (gate, linear)),
        "out": ("experts.down_proj", (out,)),
    }
    table = []
    for ours, (fused, apart) in sources.items():
        name = f"blocks.{{l}}.mlp.{ours}"
        table.append(Rule(name, (f"{BLOCK}mlp.{fused}",), otherwise=Rule(name, apart)))
    return tuple(table)
