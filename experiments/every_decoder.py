"""Which causal language models of transformers open here, and to which analyses? Every type, tiny and perturbed.

A model of a few thousand parameters is made of every type's config, all its parameters moved away from 0 and 1, and
wrapped. Every kind of site that it is offered at is edited once through us and once by hand in Hugging Face's own
written-out code (ordinary hooks on its modules, an attention function of one's own): the logits must be equal.

Run: `interp run experiments/every_decoder.py`, or `-p types=gemma4_text,mamba` for some.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import pandas as pd
import torch
import transformers
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import eager_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from interp import families
from interp.model.edits import Add, Edit, Scale
from interp.model.tap import Tap
from interp.runs.record import Record
from interp.wrapped import Wrapped, wrap

Sizes = dict[str, object]
KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Every causal type that transformers knows."""
LARGEST = 15_000_000
"""Parameters beyond which a type counts as not built: a default that no size here reaches."""
VOCABULARY = 131
SIZES: Sizes = {
    **dict.fromkeys(["hidden_size", "n_embd", "d_model"], 64),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"], 4),
    **dict.fromkeys(["num_decoder_layers", "num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "index_topk", "sliding_window", "attention_window_size"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_experts_per_tok", "encoder_layers", "num_encoder_layers"], 2),
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"], 96),
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], VOCABULARY),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_seq_length"], 64),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "image_size"], 32),
    **dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace"], 1),
    **dict.fromkeys(["qk_rope_head_dim", "hidden_size_per_layer_input", "patch_size"], 8),
    **dict.fromkeys(["kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "index_head_dim", "global_head_dim"], 16),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 16),
    "q_lora_rank": 24, "index_n_heads": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "hidden_size_global": 64, "encoder_hash_byte_group_vocab": 50,
}  # fmt: skip
"""What the fields of configs are set to, where a config has them."""
LATENT: Sizes = {"head_dim": 8, "num_key_value_heads": 4}
WITH_LATENTS = (
    "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3",
    "youtu", "bailing_hybrid", "sarvam_mla",
)  # fmt: skip
OWN_KEYS: Sizes = {
    "num_kv_shared_layers": 0, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2,
}  # fmt: skip
PLAIN_ROTARY: Sizes = {"rope_type": "default", "rope_theta": 10000.0}
COMPRESSED: Sizes = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 2, "hc_count": 2, "hc_lowrank": 16, "ngram_vocab_size_base": 50, "split_ngram_parts": 2,
    "make_ngram_vocab_size_divisible_by": 2, "head_dim": 16,
}  # fmt: skip
STATES: Sizes = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
MORE: Mapping[str, Sizes] = {
    "codegen": {"rotary_dim": 8}, "gptj": {"rotary_dim": 8},
    "mamba": {"state_size": 8, "time_step_rank": 8}, "falcon_mamba": {"state_size": 8, "time_step_rank": 8},
    **dict.fromkeys(WITH_LATENTS, LATENT),
    "kimi_linear": {**LATENT, "linear_num_heads": 4, "linear_head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16}, "ministral": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2}, "xmod": {"default_language": "en_XX"},
    "reformer": {
        "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 8], "attention_head_size": 16, "feed_forward_size": 96,
        "attn_layers": ["local", "local"], "local_attn_chunk_length": 4, "num_hidden_layers": 2, "hash_seed": 0,
    },
    **dict.fromkeys(["qwen4_exp", "qwen4_exp_text"], COMPRESSED),
    "inkling2_text": {
        "unpadded_vocab_size": VOCABULARY, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
        "swa_head_dim": 16, "rel_extent": 8, "d_rel": 8, "sliding_window_size": 4, "n_layers_per_attn_res_block": 2,
    },
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(["full_attention", "sliding_attention"], PLAIN_ROTARY)},
    "zamba": {
        "layers_block_type": ["mamba", "hybrid"] * 2, "attn_layer_period": 2, "attn_layer_offset": 1,
        "attention_hidden_size": 128, "attention_head_dim": 32, "mamba_d_state": 8, "mamba_dt_rank": 8,
        "n_mamba_heads": 2, "use_mamba_kernels": False,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 8},
    "zamba2": {
        "layer_types": ["mamba", "hybrid", "mamba", "hybrid"], "hybrid_layer_ids": [1, 3], "mamba_d_state": 8,
        "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 16, "chunk_size": 8, "adapter_rank": 8,
        "num_mem_blocks": 1,
    },
    "zaya": {"num_experts_per_tok": 1}, "dots1": {"n_shared_experts": 1},
    "longcat_flash": {
        **LATENT, "num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "cpmant": {"dim_head": 16, "dim_ff": 96, "prompt_types": 4, "prompt_length": 4, "segment_types": 4},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "mamba_num_heads": 8, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8,
    },
    "falcon_h1": {**STATES, "mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_n_groups": 1},
    "bamba": {**STATES, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        **STATES, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 32,
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "xlm": {"causal": True}, "xlnet": {"d_head": 16, "d_inner": 96, "attn_type": "uni"},
    "gemma4_text": OWN_KEYS, "gemma3n_text": OWN_KEYS,
    "recurrent_gemma": {"lru_width": 64, "block_types": ["recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 64},
    "dots3_note_text": {"num_key_value_heads": 4}, "lfm2": {"block_ff_dim": 96},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "xlstm": {"num_heads": 4, "chunk_size": 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
}  # fmt: skip
"""What single types require beside that."""


@dataclass(frozen=True)
class EveryDecoder:
    """Which types, and how much they are moved away from their initial parameters."""

    types: tuple[str, ...] = ()
    """None = all."""
    noise: float = 0.05
    """Standard deviation of what is added to every parameter."""
    seed: int = 0
    """Seed of the parameters, the noise and the tokens."""


OPENED = {
    "parts": "parts", "heads": "heads", "writes": "writes of heads", "ov": "OV circuits", "qk": "QK circuits",
}  # fmt: skip
"""The columns that count layers, and what they are open to."""


def main(job: EveryDecoder, record: Record) -> None:
    """Build, wrap and measure every type; keep the table, say the counts."""
    transformers.logging.set_verbosity_error()
    rows = []
    for kind in job.types or KINDS:
        began = time.perf_counter()
        rows.append(row(kind, job) | {"row_seconds": round(time.perf_counter() - began, 1)})
    table = pd.DataFrame(rows)
    record.table("decoders", table)
    record.figure("decoders", figure(table))
    record.say(summary(table))


def figure(table: pd.DataFrame) -> Figure:
    """How many types open to what, in all layers and in some."""
    opened = table[(table.state == "opens") & (table.layers > 0)]
    names = ["stream and lens", *OPENED.values()]
    columns = [opened.assign(stream=opened.layers)[name] for name in ("stream", *OPENED)]
    drawn, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    axes.barh(names, [int((column > 0).sum()) for column in columns], color="#c6d7ea", label="in some layers")
    every = [int((column == opened.layers).sum()) for column in columns]
    axes.barh(names, every, color="#2f6db0", label="in every layer")
    axes.invert_yaxis()
    axes.set_xlabel(f"types, of {len(table)}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return drawn


def summary(table: pd.DataFrame) -> str:
    """How many types open to what, and how far the worst edit is from the same edit by hand."""
    built, opened = table[table.state != "not built"], table[table.state == "opens"]
    blocks = opened.layers > 0
    every = {name: int((blocks & (opened[name] == opened.layers)).sum()) for name in OPENED}
    some = {name: int((opened[name] > 0).sum()) for name in OPENED}
    return "\n".join(
        [
            f"{len(table)} types, {len(built)} built, {len(opened)} open: stream and lens in all of them, of "
            f"{int((opened.layers == 0).sum())} the final stream alone",
            *(
                f"{OPENED[name]}: in every layer of {every[name]} types, in some of {some[name]}"
                for name in every
            ),
            f"edits by hand in {int((opened.edits > 0).sum())} types, {int(opened.edits.sum())} edits, "
            f"worst relative difference of the logits {opened.error.max():.1e}",
        ]
    )


# --- tiny models ----------------------------------------------------------------------------------------------------


def sizes(kind: str, base: transformers.PreTrainedConfig) -> Sizes:
    """The fields of a type's config that make it small, those of its parts included."""
    values = base.to_dict()
    known = set(values) | set(getattr(type(base), "attribute_map", {}))
    found = {name: size for name, size in SIZES.items() if name in known}
    if values.get("head_dim") is not None and "kv_lora_rank" not in known:
        found["head_dim"] = 16
    for name, value in values.items():
        if name.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= VOCABULARY:
            found[name] = 1
    if values.get("pad_token_id") is not None:
        found["pad_token_id"] = 0
    if layer_types := values.get("layer_types"):
        each = list(dict.fromkeys(layer_types))
        found["layer_types"] = [each[i % len(each)] for i in range(4)]
    for name in getattr(type(base), "sub_configs", {}):
        if isinstance(part := getattr(base, name, None), transformers.PreTrainedConfig):
            found[name] = sizes(part.model_type, part)
    return found | MORE.get(kind, {})


def tiny(kind: str, job: EveryDecoder = EveryDecoder(), **fields: object) -> transformers.PreTrainedModel:
    """A small perturbed model of a type, in eval mode.

    Errors: whatever transformers raises for its config; ValueError if it is large all the same.
    """
    made: Callable[..., transformers.PreTrainedConfig] = CONFIG_MAPPING[kind]
    try:
        base = sizes(kind, made())
    except Exception:  # some configs have no defaults
        base = SIZES | MORE.get(kind, {})
    config = made(**(base | fields))
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count / 1e6:.0f} M parameters")
    torch.manual_seed(job.seed)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(job.seed + 1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(job.noise * torch.randn(parameter.shape, generator=generator))
    return network


def some_tokens(job: EveryDecoder) -> Int[Tensor, "b p"]:
    """Two rows of random tokens, none of them a special one."""
    return torch.randint(3, VOCABULARY - 5, (2, 7), generator=torch.Generator().manual_seed(job.seed))


# --- the same edit twice --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ByHand:
    """An edit as somebody makes it who has only the network's own code."""

    edit: Edit
    hook: Callable[[nn.Module], None] | None = None
    """Puts ordinary hooks on the network's modules."""
    attention: Callable[..., tuple[Tensor, object]] | None = None
    """Or: what attention of the layer at hand does instead."""


def edits_by_hand(model: Wrapped, layer: int, seed: int) -> Iterator[ByHand]:
    """One edit for every kind of site that a layer is offered at."""
    plan, d, generator = model.plan.layers[layer], model.config.d_model, torch.Generator().manual_seed(seed)
    block, offered = model.plan.root(layer), model.config.mixers[layer].offered  # type: ignore[attr-defined]
    vector = 0.3 * torch.randn(d, generator=generator)

    def edit(site: str, change: Add | Scale, **at: int) -> Edit:
        return Edit(f"blocks.{layer}.{site}", change, at=at)

    yield ByHand(edit("hook_resid_pre", Add(vector), pos=2), _on_input(block, vector, 2))
    yield ByHand(edit("hook_resid_post", Add(vector), pos=2), _on_output(block, vector, 2))
    for name, writer in plan.writers.items():
        if f"hook_{name}" in offered:
            path = f"{block}.{writer.path}"
            yield ByHand(
                edit(f"hook_{name}", Add(vector), pos=2), _on_output(path, vector / writer.factor, 2)
            )
    if "attn.hook_z" in offered:
        width = plan.z_width // model.config.n_heads
        part = 0.3 * torch.randn(width, generator=generator)
        whole = torch.cat((torch.zeros(width), part, torch.zeros(plan.z_width)))[: plan.z_width]
        head = min(1, model.config.n_heads - 1)
        whole = whole if head else part
        yield ByHand(
            edit("attn.hook_z", Add(part), pos=2, head=head), _on_input(f"{block}.{plan.output}", whole, 2)
        )
    if plan.attended is not None:
        yield from (each for each in _inside(edit, generator) if each.edit.site.split(".", 2)[2] in offered)


def edits_of_stream(model: Wrapped, seed: int) -> Iterator[ByHand]:
    """The edit of a network whose blocks were not found: of its final stream."""
    assert model.plan.reader is not None
    vector = 0.3 * torch.randn(model.config.d_model, generator=torch.Generator().manual_seed(seed))
    edit = Edit("hook_stream", Add(vector), at={"pos": 2})
    yield ByHand(edit, _on_input(model.plan.reader, vector, 2))


def _inside(edit: Callable[..., Edit], generator: torch.Generator) -> Iterator[ByHand]:
    """Edits inside attention: of queries, values, scores and pattern of head 1."""

    def shifted(x: Tensor, amount: float) -> Tensor:
        return x + amount * torch.eye(x.shape[1])[-1][:, None, None]

    def with_q(usual: Usual, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: object) -> Out:
        return usual(shifted(q, 0.5), k, v, mask, **more)

    def with_v(usual: Usual, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: object) -> Out:
        return usual(q, k, shifted(v, 0.5), mask, **more)

    def with_scores(
        usual: Usual, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: object
    ) -> Out:
        to_first = torch.zeros(1, q.shape[1], q.shape[2], k.shape[2])
        to_first[:, 1, :, 0] = 3.0
        return usual(q, k, v, to_first if mask is None else mask + to_first, **more)

    def with_pattern(
        usual: Usual, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: object
    ) -> Out:
        _, pattern = usual(q, k, v, mask, **more)
        assert isinstance(pattern, Tensor)
        pattern = pattern.clone()
        pattern[:, 1] *= 0.5
        z = pattern @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        return z.transpose(1, 2).contiguous(), None

    yield ByHand(edit("attn.hook_rot_q", Add(0.5), head=-1), attention=with_q)
    yield ByHand(edit("attn.hook_v", Add(0.5), kv_head=-1), attention=with_v)
    yield ByHand(edit("attn.hook_attn_scores", Add(3.0), head=1, key=0), attention=with_scores)
    yield ByHand(edit("attn.hook_pattern", Scale(0.5), head=1), attention=with_pattern)


Out = tuple[Tensor, object]
Usual = Callable[..., Out]


def _on_input(path: str, vector: Float[Tensor, "d"], pos: int) -> Callable[[nn.Module], None]:
    """Adds a vector to the first tensor that a module is given."""

    def put(network: nn.Module) -> None:
        def hook(
            module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
        ) -> tuple[tuple[object, ...], dict[str, object]]:
            if args and isinstance(args[0], Tensor):
                return (_added(args[0], vector, pos), *args[1:]), kwargs
            given = kwargs["hidden_states"]
            assert isinstance(given, Tensor)
            return args, {**kwargs, "hidden_states": _added(given, vector, pos)}

        network.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)

    return put


def _on_output(path: str, vector: Float[Tensor, "d"], pos: int) -> Callable[[nn.Module], None]:
    """Adds a vector to what a module gives."""

    def put(network: nn.Module) -> None:
        def hook(module: nn.Module, args: object, out: object) -> object:
            if isinstance(out, Tensor):
                return _added(out, vector, pos)
            assert isinstance(out, tuple | list)
            return type(out)([_added(out[0], vector, pos), *out[1:]])

        network.get_submodule(path).register_forward_hook(hook)

    return put


def _added(x: Tensor, vector: Float[Tensor, "d"], pos: int) -> Tensor:
    rows = x.clone().reshape(2, -1, x.shape[-1])  # outputs of experts arrive flattened
    rows[:, pos] += vector
    return rows.reshape(x.shape)


def logits_by_hand(network: nn.Module, tokens: Tensor, by_hand: ByHand, attention: str | None) -> Tensor:
    """What the network's own code gives under an edit; `attention`: the module whose attention is edited."""
    edited = copy.deepcopy(network)
    if by_hand.hook is not None:
        by_hand.hook(edited)
        return edited(input_ids=tokens, use_cache=False).logits
    change = by_hand.attention
    assert change is not None and attention is not None
    inside = {id(m) for m in edited.get_submodule(attention).modules()}

    def function(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: object
    ) -> Out:
        eager = sys.modules[type(module).__module__].eager_attention_forward

        def usual(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: object) -> Out:
            return eager(module, q, k, v, mask, **more)

        return change(usual, q, k, v, mask, **more) if id(module) in inside else usual(q, k, v, mask, **more)

    AttentionInterface.register("by_hand", function)
    AttentionMaskInterface.register("by_hand", eager_mask)
    edited.set_attn_implementation("by_hand")  # type: ignore[operator]
    return edited(input_ids=tokens, use_cache=False).logits


@torch.no_grad()
def compared(network: nn.Module, model: Wrapped, tokens: Tensor, layers: Sequence[int]) -> dict[str, float]:
    """By site, how far an edit through us is from the same by hand, relative to what the edit changes at most.

    A change of less than one percent of the logits counts as one percent: rounding would be all that is compared.
    """
    plain, found = network(input_ids=tokens, use_cache=False).logits, {}
    for layer in layers:
        blocks = model.config.n_layers
        by_hand = edits_by_hand(model, layer, seed=layer) if blocks else edits_of_stream(model, seed=layer)
        for one in by_hand:
            theirs = logits_by_hand(network, tokens, one, model.plan.root(layer) if blocks else None)
            ours = model(tokens, Tap(edits=[one.edit]))
            changed = float((theirs - plain).abs().max())
            floor = 1e-2 * float(plain.abs().max())
            found[one.edit.site] = float((ours - theirs).abs().max()) / max(changed, floor)
    return found


def row(kind: str, job: EveryDecoder) -> dict[str, object]:
    """One line of the table."""
    native = any(kind in family.model_types for family in families.FAMILIES)
    empty: dict[str, object] = {
        "type": kind, "native": native, "state": "not built", "why": "", "layers": 0, "parts": 0, "heads": 0,
        "writes": 0, "ov": 0, "qk": 0, "sources": 0, "refuses": "", "edits": 0, "error": float("nan"),
    }  # fmt: skip
    try:
        network = tiny(kind, job)
        with torch.no_grad():  # some keep what they computed
            network(input_ids=some_tokens(job), use_cache=False)
    except Exception as failed:
        return empty | {"why": f"{type(failed).__name__}: {str(failed)[:90]}".replace("\n", " ")}
    try:
        model = wrap(network)
    except ValueError as refused:
        return empty | {"state": "refused", "why": str(refused)}
    mixers, n = model.config.mixers, model.config.n_layers
    offered = [mixer.offered for mixer in mixers]  # type: ignore[attr-defined]
    errors = compared(network, model, some_tokens(job), (n // 2, n - 1) if n > 1 else (0,))
    options = (
        "start",
        "left padding",
        "right padding",
        "documents",
        "cache",
        "cache of padded rows",
        "gradients",
    )
    return empty | {
        "state": "opens", "layers": n,
        "parts": sum("hook_attn_out" in each for each in offered),
        "heads": sum("attn.hook_pattern" in each for each in offered),
        "writes": sum("attn.hook_z" in each for each in offered),
        "ov": sum(mixer.traits.moves for mixer in mixers),
        "qk": sum(mixer.traits.bilinear for mixer in mixers),
        "sources": sum(mixer.traits.additive for mixer in mixers),
        "refuses": ", ".join(name for name in options if model.config.block.why_not(name)),
        "edits": len(errors), "error": max(errors.values()),
    }  # fmt: skip
