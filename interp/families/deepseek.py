"""DeepSeek V2 and V3 (and R1): latent attention, shared experts, dense layers first.

V2 weighs experts by a softmax and picks them within the groups of the best expert; V3 by sigmoids, within the groups of
the two best, with a correction of the scores for the choice alone. Checkpoints in blocks of 8 bits, as the originals of
V3 are, are refused like all quantised ones.
"""

from collections.abc import Mapping
from dataclasses import replace

from interp.families import experts, llama_like
from interp.families.rope import yarn_score_factor
from interp.families.spec import Family, Settings, TensorRule
from interp.families.table import modules
from interp.model.config import Latent, ModelConfig, MoE, Rotary, Router

Sizes = Mapping[str, int | float]
V2: Sizes = {
    "max_position_embeddings": 2048, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0, "routed_scaling_factor": 1.0,
}  # fmt: skip
V3: Sizes = {
    "max_position_embeddings": 4096, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
}  # fmt: skip
DERIVED = ("head_dim", "qk_head_dim")
"""Widths that are computed from other keys, so that their values in a config are ignored."""


def config(settings: Settings) -> ModelConfig:
    """Our config of a DeepSeek checkpoint."""
    return _v2(settings) if settings.get("model_type") == "deepseek_v2" else _v3(settings)


def _v2(settings: Settings) -> ModelConfig:
    settings.require("mlp_bias", False, None)
    settings.require("topk_method", "greedy", "group_limited_greedy", None)
    grouped = settings.text("topk_method", "greedy") == "group_limited_greedy"
    settings.present(("n_group", "topk_group"))
    router = Router(
        groups=settings.count("n_group", 1) if grouped else 1,
        top_groups=settings.count("topk_group", 1) if grouped else 1,
        factor=settings.real("routed_scaling_factor", V2["routed_scaling_factor"]),
        wide=True,
    )
    return _body(settings, router, V2, renormalise=False)


def _v3(settings: Settings) -> ModelConfig:
    router = sigmoids(settings, groups=8, top_groups=4, factor=V3["routed_scaling_factor"])
    body = _body(settings, router, V3, renormalise=settings.flag("norm_topk_prob", True))
    settings.present(experts.PREDICTORS)
    if settings.flag("rope_interleave", True):
        return body
    assert isinstance(body.position, Rotary)
    return replace(body, position=replace(body.position, interleaved=False))


def sigmoids(settings: Settings, *, groups: int, top_groups: int, factor: float) -> Router:
    """V3's router; groups, top_groups, factor: a family's values of missing keys."""
    return Router(
        scores="sigmoid",
        correction=True,
        groups=settings.count("n_group", groups),
        top_groups=settings.count("topk_group", top_groups),
        best=2,
        factor=settings.real("routed_scaling_factor", factor),
        wide=True,
    )


def _body(settings: Settings, router: Router, sizes: Sizes, *, renormalise: bool) -> ModelConfig:
    settings.ignored(DERIVED)
    heads, d_head = settings.count("num_attention_heads"), settings.count("v_head_dim", 128)
    turned, content = settings.count("qk_rope_head_dim", 64), settings.count("qk_nope_head_dim", 128)
    settings.require("num_key_value_heads", heads, None)
    d_mlp = settings.count("moe_intermediate_size", int(sizes["moe_intermediate_size"]))
    moe = MoE(
        n_experts=settings.count("n_routed_experts", int(sizes["n_routed_experts"])),
        top_k=settings.count("num_experts_per_tok", 8),
        d_mlp=d_mlp,
        renormalise=renormalise,
        router=router,
        shared=d_mlp * settings.count("n_shared_experts", int(sizes["n_shared_experts"])),
    )
    defaults = {"head_dim": turned, "max_position_embeddings": sizes["max_position_embeddings"]}
    dense = experts.first_dense(settings, int(sizes["first_k_dense_replace"]))
    body = experts.decoder(settings, moe, defaults, dense)
    assert isinstance(body.position, Rotary)
    low = settings.optional_integer("q_lora_rank", 1536)
    rank = settings.count("kv_lora_rank", 512)
    factor = yarn_score_factor(settings)
    return replace(
        body,
        d_head=d_head,
        mixer=Latent(rank, content, low),
        position=replace(body.position, dim=turned, interleaved=True),
        attn_scale=None if factor == 1 else (content + turned) ** -0.5 * factor,
    )


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    (latent,) = set(config.mixers)
    assert isinstance(latent, Latent)
    inside = {"kv_into": "kv_a_proj_with_mqa", "out": "o_proj"}
    plain = {"kv_latent_norm": "kv_a_layernorm", "kv": "kv_b_proj", "q": "q_proj"}
    if latent.query_rank is not None:
        inside["q_into"] = "q_a_proj"
        plain |= {"q_latent_norm": "q_a_layernorm", "q": "q_b_proj"}
    ours, theirs = "blocks.{l}.attn.", f"{experts.BLOCK}self_attn."
    return (
        *llama_like.outside_rules(config),
        *modules(inside, ours=ours, theirs=theirs, bias=config.qkv_bias),
        *modules(plain, ours=ours, theirs=theirs, bias=False),
        *experts.shared_rules(config),
    )


FAMILY = Family(
    name="DeepSeek",
    model_types=("deepseek_v2", "deepseek_v3"),
    config=config,
    rules=rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
    wide=(r"blocks\.\d+\.mlp\.(router\.weight|correction)",),
    unused=(r"model\.layers\.61\..*",),  # V3's predictor of a second token, which transformers leaves out too
)
