"""Names and shapes of TransformerLens' weights, and the parameter that each becomes."""

import re
from collections.abc import Iterator, Mapping

from einops import rearrange
from torch import Tensor

from interp.core.axes import shape_text
from interp.families.spec import Family, Settings, TensorRule, transposed
from interp.model.config import MLP, Alibi, LayerNorm, Learned, ModelConfig, MoE, NoNorm

BUFFERS = (r"blocks\.\d+\.attn\.(mask|IGNORE|rotary_sin|rotary_cos|alibi)",)
"""Masks and tables in a state dict; none is a weight."""


def heads_first(tensor: Tensor, config: ModelConfig) -> Tensor:
    """`[head, d_model, d_head]` as rows of the fused matrix."""
    return rearrange(tensor, "h d e -> (h e) d")


def heads_flat(tensor: Tensor, config: ModelConfig) -> Tensor:
    """`[head, d_head]`, or a stack of heads' outputs, as one vector."""
    return rearrange(tensor, "h e -> (h e)")


def heads_last(tensor: Tensor, config: ModelConfig) -> Tensor:
    """W_O `[head, d_head, d_model]` as `[d_model, head * d_head]`."""
    return rearrange(tensor, "h e d -> d (h e)")


def family(config: ModelConfig) -> Family[ModelConfig]:
    """The weight table of TransformerLens' layout for a `ModelConfig`.

    Under ALiBi a HookedTransformer keeps a position embedding that it never uses.
    """
    return Family(
        name="TransformerLens",
        model_types=(),
        config=_no_config,
        rules=lambda own: tuple(_rules(own)),
        prefix="",
        buffers=BUFFERS,
        unused=(r"pos_embed\.W_pos",) if isinstance(config.position, Alibi) else (),
        rename=plain_name,
    )


def plain_name(name: str) -> str:
    """The name without the underscore that grouped keys and values carry (`attn._W_K`)."""
    return re.sub(r"\.attn\._([Wb]_[KV])$", r".attn.\1", name)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """TransformerLens' name of every weight of a model -> its shape there."""
    d, e, h, g = config.d_model, config.head_width, config.n_heads, config.kv_heads
    found: dict[str, tuple[int, ...]] = {"embed.W_E": (config.d_vocab, d)}
    if isinstance(config.position, Learned):
        found["pos_embed.W_pos"] = (config.n_ctx, d)
    found |= {"unembed.W_U": (d, config.n_outputs), "unembed.b_U": (config.n_outputs,)}
    found |= {f"{norm}.{part}": (d,) for norm in norms(config) for part in norm_parts(config)}
    attn: dict[str, tuple[int, ...]] = {
        "W_Q": (h, d, e),
        "W_K": (g, d, e),
        "W_V": (g, d, e),
        "W_O": (h, e, d),
    }
    attn |= {"b_Q": (h, e), "b_K": (g, e), "b_V": (g, e), "b_O": (d,)}
    if config.sinks:
        attn["sinks"] = (h,)
    if config.qk_norm is not None:
        whole = config.qk_norm == "width"
        attn |= {"q_norm.w": (h * e if whole else e,), "k_norm.w": (g * e if whole else e,)}
    for layer in range(config.n_layers):
        found |= {f"blocks.{layer}.attn.{name}": shape for name, shape in attn.items()}
        found |= {f"blocks.{layer}.mlp.{name}": shape for name, shape in _mlp_shapes(config).items()}
    return found


def norms(config: ModelConfig) -> list[str]:
    """TransformerLens' names of all norms of a model but those of queries and keys."""
    if isinstance(config.norm, NoNorm):
        return []
    has_mlp, sandwich = config.mlp is not None, config.norm_place == "sandwich"
    block = ["ln1", *["ln2"] * has_mlp, *["ln1_post"] * sandwich, *["ln2_post"] * (has_mlp and sandwich)]
    outside = ["embed.ln"] * config.embed_norm + ["ln_final"]
    return outside + [f"blocks.{layer}.{name}" for layer in range(config.n_layers) for name in block]


def norm_parts(config: ModelConfig) -> tuple[str, ...]:
    """The parameters of each norm: `w`, and `b` for LayerNorm."""
    return ("w", "b") if isinstance(config.norm, LayerNorm) else ("w",)


def check_shapes(state: Mapping[str, Tensor], config: ModelConfig) -> None:
    """ValueError naming the first tensor with another shape than TransformerLens' for this config."""
    table = shapes(config)
    for name, tensor in state.items():
        wanted = table.get(plain_name(name))
        if wanted is not None and tuple(tensor.shape) != wanted:
            raise ValueError(
                f"TransformerLens: {name} requires shape {shape_text(wanted)}, got {shape_text(tensor.shape)}"
            )


def _no_config(settings: Settings) -> ModelConfig:
    raise AssertionError("the config of a HookedTransformer is read by `hooked_config`")


def _mlp_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, mlp = config.d_model, config.mlp
    if mlp is None:
        return {}
    assert isinstance(mlp, MLP | MoE)
    m = mlp.d_mlp
    if isinstance(mlp, MoE):
        table: dict[str, tuple[int, ...]] = {"W_gate.weight": (mlp.n_experts, d)}
        for x in range(mlp.n_experts):
            for name, shape in (("W_gate", (m, d)), ("W_in", (m, d)), ("W_out", (d, m))):
                table[f"experts.{x}.{name}.weight"] = shape
        return table
    gate = {"W_gate": (d, m)} if mlp.gated else {}
    return {"W_in": (d, m), "W_out": (m, d), "b_in": (m,), "b_out": (d,), **gate}


def _rules(config: ModelConfig) -> Iterator[TensorRule]:
    block, attn = "blocks.{l}.", "blocks.{l}.attn."
    yield TensorRule("embed.weight", ("embed.W_E",))
    if isinstance(config.position, Learned):
        yield TensorRule("pos_embed.weight", ("pos_embed.W_pos",))
    yield TensorRule("unembed.weight", ("unembed.W_U",), transposed)
    if config.unembed_bias:
        yield TensorRule("unembed.bias", ("unembed.b_U",))
    yield from _norm_rules(config)
    for part, name, layout in [("weight", "W", heads_first), ("bias", "b", heads_flat)][
        : 1 + config.qkv_bias
    ]:
        yield TensorRule(f"{attn}qkv.{part}", tuple(f"{attn}{name}_{x}" for x in "QKV"), layout)
    yield TensorRule(f"{attn}out.weight", (f"{attn}W_O",), heads_last)
    if config.out_bias:
        yield TensorRule(f"{attn}out.bias", (f"{attn}b_O",))
    if config.sinks:
        yield TensorRule(f"{attn}sinks", (f"{attn}sinks",))
    if config.qk_norm is not None:
        for name in ("q_norm", "k_norm"):
            yield TensorRule(f"{attn}{name}.norm.weight", (f"{attn}{name}.w",))
    assert isinstance(config.mlp, MLP | MoE | None)  # `hooked_export` has refused others
    yield from _mlp_rules(config.mlp, f"{block}mlp.")


def _norm_rules(config: ModelConfig) -> Iterator[TensorRule]:
    """Rules of the norms: `ln1` there norms a sublayer's output in models that norm only those, here `ln1_post`."""
    if isinstance(config.norm, NoNorm):
        return
    ours = {"embed.ln": "ln_embed"}
    if config.norm_place == "output":
        ours |= {"blocks.{l}.ln1": "blocks.{l}.ln1_post", "blocks.{l}.ln2": "blocks.{l}.ln2_post"}
    names = dict.fromkeys(re.sub(r"^blocks\.\d+", "blocks.{l}", name) for name in norms(config))
    for name in names:
        for mine, theirs in zip(("weight", "bias"), norm_parts(config), strict=False):
            yield TensorRule(f"{ours.get(name, name)}.{mine}", (f"{name}.{theirs}",))


def _mlp_rules(mlp: MLP | MoE | None, at: str) -> Iterator[TensorRule]:
    if isinstance(mlp, MoE):
        expert = f"{at}experts.{{x}}."
        yield TensorRule(f"{at}router.weight", (f"{at}W_gate.weight",))
        yield TensorRule(f"{at}into", (f"{expert}W_gate.weight", f"{expert}W_in.weight"))
        yield TensorRule(f"{at}out", (f"{expert}W_out.weight",))
    elif mlp is not None:
        joined = ("gate", "in") if mlp.gated else ("in",)
        yield TensorRule(f"{at}into.weight", tuple(f"{at}W_{name}" for name in joined), transposed)
        yield TensorRule(f"{at}out.weight", (f"{at}W_out",), transposed)
        if mlp.bias:
            yield TensorRule(f"{at}into.bias", tuple(f"{at}b_{name}" for name in joined))
            yield TensorRule(f"{at}out.bias", (f"{at}b_out",))
