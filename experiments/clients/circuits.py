"""circuit-tracer's TransformerLens back end on `interp.compat.transformer_lens`: attribution graphs that hold.

An edge of a graph is the effect of its source on its target while attention patterns, norm scales and the outputs of
MLPs stay as they are (Ameisen et al. 2025, "Circuit Tracing"). So each source is doubled, in a pass with those frozen:
every feature's input and every logit must move by exactly its edge. Every claim is an assertion; what is recorded is
compared with the real TransformerLens by `compare.py`.
"""

from functools import partial
from typing import Any

import subject
import torch
from torch import Tensor

WIDTH = 4
"""Features per dimension of the stream."""
GEMMA: dict[str, object] = {
    "n_layers": 3, "d_model": 16, "n_ctx": 64, "d_head": 8, "n_heads": 4, "n_key_value_heads": 2, "d_mlp": 32,
    "d_vocab": 40, "act_fn": "gelu_pytorch_tanh", "gated_mlp": True, "normalization_type": "RMS", "final_rms": True,
    "positional_embedding_type": "rotary", "rotary_dim": 8, "use_normalization_before_and_after": True,
    "use_local_attn": True, "window_size": 4, "attn_types": ["global", "local", "global"],
    "attn_scores_soft_cap": 50.0, "attn_scale": 4.0, "use_attn_scale": True, "model_name": "small",
    "original_architecture": "Gemma2ForCausalLM", "device": "cpu", "dtype": torch.float64, "seed": 0,
}  # fmt: skip
"""What Gemma 2 has that GPT-2 has not: norms after the sublayers, grouped keys, rotations, windows, soft caps."""


def transcoders(n_layers: int, d_model: int, threshold: float) -> Any:
    """Random transcoders, features on from `threshold`; they know nothing of the MLPs, so error nodes are large."""
    from circuit_tracer.transcoder.activation_functions import JumpReLU
    from circuit_tracer.transcoder.single_layer_transcoder import SingleLayerTranscoder, TranscoderSet

    generator = torch.Generator().manual_seed(0)
    made = {}
    for layer in range(n_layers):
        act = JumpReLU(torch.tensor(threshold), 0.1)
        coder = SingleLayerTranscoder(d_model, WIDTH * d_model, act, layer, dtype=torch.float64)
        with torch.no_grad():
            for weight in (coder.W_enc, coder.W_dec):
                weight.copy_(torch.randn(weight.shape, generator=generator) / d_model**0.5)
        made[layer] = coder
    hooks = {"feature_input_hook": "mlp.hook_in", "feature_output_hook": "mlp.hook_out"}
    return TranscoderSet(made, **hooks)


def replacement(config: dict[str, object], threshold: float, state: dict[str, Tensor] | None = None) -> Any:
    """circuit-tracer's replacement model of a config, with given or random weights."""
    from circuit_tracer import ReplacementModel
    from transformer_lens import HookedTransformerConfig

    cfg = HookedTransformerConfig(**config)
    coders = transcoders(cfg.n_layers, cfg.d_model, threshold)
    model = ReplacementModel.from_config(cfg, coders, tokenizer=subject.tokenizer())
    if state is None:
        generator = torch.Generator().manual_seed(1)
        own = model.state_dict()
        kept = ("mask", "IGNORE", "rotary_sin", "rotary_cos")
        state = {
            n: torch.rand(w.shape, generator=generator, dtype=w.dtype) - 0.5
            for n, w in own.items()
            if not n.endswith(kept) and not n.startswith("transcoders")
        }
    else:
        names = {
            n: n.replace(".mlp.", ".mlp.old_mlp.").replace("unembed.", "unembed.old_unembed.") for n in state
        }
        state = {names[n]: w for n, w in state.items()}
    unexpected = model.load_state_dict(state, strict=False).unexpected_keys
    assert not unexpected, unexpected
    return model


def shift(model: Any, graph: Any, hooks: list[Any]) -> Tensor:
    """Inputs of the active features, then demeaned logits of the targets, in a pass with these hooks."""
    inputs, reading = model._get_activation_caching_hooks(apply_activation_function=False)
    logits = model.run_with_hooks(graph.input_tokens, fwd_hooks=[*hooks, *reading])[0, -1]
    layer, pos, feature = graph.active_features.T
    targets = graph.logit_tokens
    return torch.cat([torch.stack(inputs)[layer, pos, feature], logits[targets] - logits.mean()]).detach()


def largest_error(model: Any, graph: Any, sampled: int = 40) -> tuple[Tensor, Tensor]:
    """How far edges are from the effects of doubling their sources, at most, and the largest effect.

    Sources: every error, every token, and `sampled` features spread over the graph; the first position is
    left out, as circuit-tracer does.
    """
    tokens = graph.input_tokens
    n_layers, n_pos, n_features = model.cfg.n_layers, len(tokens), len(graph.active_features)
    frozen = model.setup_intervention_with_freeze(tokens, constrained_layers=range(n_layers))[1]
    context, edges = model.setup_attribution(tokens), graph.adjacency_matrix
    before = shift(model, graph, frozen)
    rows = torch.cat(
        [torch.arange(n_features), torch.arange(len(edges) - len(graph.logit_tokens), len(edges))]
    )

    def add(value: Tensor, hook: Any, pos: int, more: Tensor) -> Tensor:
        return value.index_add(1, torch.tensor([pos]), more.to(value)[None, None].expand(len(value), 1, -1))

    sources: list[tuple[int, str, int, Tensor]] = []
    for layer in range(n_layers):
        for pos in range(1, n_pos):
            place = f"blocks.{layer}.{model.feature_output_hook}"
            sources.append((n_features + layer * n_pos + pos, place, pos, context.error_vectors[layer, pos]))
    for pos in range(1, n_pos):
        column = n_features + n_layers * n_pos + pos
        sources.append((column, "hook_embed", pos, context.token_vectors[pos]))
    for column in range(0, n_features, max(1, n_features // sampled)):
        layer, pos, _ = graph.active_features[column].tolist()
        written = context.decoder_vecs[context.encoder_to_decoder_map == column].sum(0)
        sources.append((column, f"blocks.{layer}.{model.feature_output_hook}", pos, written))
    errors, effects = [], []
    for column, place, pos, more in sources:
        effect = shift(model, graph, [*frozen, (place, partial(add, pos=pos, more=more))]) - before
        errors.append((effect - edges[rows, column]).abs().max())
        effects.append(effect.abs().max())
    return torch.stack(errors).max(), torch.stack(effects).max()


def traced(model: Any, prompt: Any, name: str) -> subject.Record:
    """The attribution graph of a prompt, checked, pruned and scored."""
    from circuit_tracer import attribute
    from circuit_tracer.graph import compute_graph_scores, prune_graph

    graph = attribute(prompt, model, batch_size=64)
    assert graph.adjacency_matrix.isfinite().all()
    assert len(graph.active_features) > 50, len(graph.active_features)
    error, effect = largest_error(model, graph)
    assert error < 1e-5 * effect, f"an edge misses the effect of its source by {error:.2g} of {effect:.2g}"
    pruned = prune_graph(graph)
    replaced, complete = compute_graph_scores(graph)
    logits, features = model.get_activations(graph.input_tokens)
    layer, pos, feature = graph.active_features[len(graph.active_features) // 2].tolist()
    off = [(layer, pos, feature, 0.0)]
    steered, _ = model.feature_intervention(graph.input_tokens, off)
    assert not torch.equal(steered, logits), "switching a feature off changed nothing"
    said = {
        "logits": logits, "features": features, "active features": graph.active_features,
        "edges": graph.adjacency_matrix, "target logits": graph.logit_tokens, "kept nodes": pruned.node_mask,
        "feature off": steered, "largest error of an edge": error, "largest effect": effect,
        "replacement score": torch.tensor(replaced), "completeness score": torch.tensor(complete),
    }  # fmt: skip
    return {f"{name} {part}": value.detach().clone() for part, value in said.items()}


def transcript() -> subject.Record:
    """A random small Gemma 2, and the demo model with a text: graphs, interventions, a text with a feature on."""
    found = traced(replacement(GEMMA, 0.4), torch.tensor([0, 3, 14, 15, 9, 26, 5, 35]), "gemma")
    state, config = subject.demo(torch.float64)
    model = replacement(config, 1.5, state)
    tokens = subject.tokenizer()("<|bos|>The capital of France is", return_tensors="pt").input_ids[0]
    found |= traced(model, tokens, "demo")
    written, logits, _ = model.feature_intervention_generate(
        tokens[None], [(1, slice(1, None), 7, 5.0)], do_sample=False, max_new_tokens=6, verbose=False
    )
    assert torch.equal(written[0, : len(tokens)], tokens) and len(written[0]) == len(tokens) + 6
    return found | {"demo generated": written, "demo generated logits": logits.detach()}


if __name__ == "__main__":
    subject.tell(transcript, "circuit-tracer")
