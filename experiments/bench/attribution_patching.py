"""Claims: attribution patching of all heads and positions takes at most 1.15x the time of one forward and one backward
of activations alone, and edge attribution of all 32 491 edges at most 1.5x; its memory does not grow with the heads.

GPT-2 small's shape, one pair of prompts of 15 tokens, the difference of two logits. The reference is Hugging Face with
frozen parameters, asked for all logits and the gradient at its embeddings; `by hand` is attribution patching with its
own hooks (two forwards, one backward), whose numbers ours are checked against. The memory of edge attribution is
measured with 12 heads of 64 and with 48 of 16, which have the same heads * d_head. On a small Llama shape (4 query
heads to a key/value head, bfloat16) it is held against a formula, whose value for the shape of Llama 8B is reported.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import tyro
from measure import Calls, cpu_seconds, distinct_mib, memory, report, timing, work
from subjects import Pair, gpt2_small, largest_difference
from torch import Tensor

import interp
from interp.causal import EdgeGraph, attribution_patch
from interp.circuits import edge_attribution
from interp.circuits.edge_scores import Gradients, SenderChange
from interp.metrics import logit_difference
from interp.model import MLP, ModelConfig, RMSNorm, Rotary, Transformer
from interp.passes.needs import TowardMetric, recorded
from interp.passes.schedule import run_steps

COLUMNS, ANSWER, WRONG = 15, 1000, 2000
CLAIM, CLAIM_EDGES = 1.15, 1.5
METRIC = logit_difference(ANSWER, WRONG)
LLAMA = ModelConfig(
    4, 512, 8, 256, 1024, n_kv_heads=2, mlp=MLP(1792, act="silu", gated=True, bias=False), position=Rotary(),
    norm=RMSNorm(), qkv_bias=False, out_bias=False,
)  # fmt: skip
LLAMA_8B = replace(
    LLAMA, n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, d_head=128, d_vocab=128256,
    mlp=MLP(14336, act="silu", gated=True, bias=False),
)  # fmt: skip


def main(repeats: int = 7) -> None:
    """Measure the claims.

    Args:
        repeats: timed rounds per system.
    """
    torch.set_num_threads(1)
    pair = gpt2_small()
    clean, corrupt = pair.tokens(2, COLUMNS).split(1)
    calls: Calls = {
        "forward + backward": activations_only(pair, clean),
        "the same, last logits": activations_only(pair, clean, last=1),
        "by hand": lambda: by_hand(pair, clean, corrupt),
        "interp, heads": lambda: attribution_patch(
            pair.ours, clean, corrupt, "z", metric=METRIC, agreement=0
        ),
        "interp, edges": lambda: edge_attribution(pair.ours, clean, corrupt, metric=METRIC),
    }
    ours = attribution_patch(pair.ours, clean, corrupt, "z", metric=METRIC, agreement=0)["each"].values
    error = largest_difference(torch.from_numpy(ours), by_hand(pair, clean, corrupt))
    if error > 1e-4:
        raise RuntimeError(f"the estimates differ by {error}")
    seconds = cpu_seconds(calls, repeats)
    for system, call in calls.items():
        report(
            "attribution_patching", system, f"12 x 12 heads, 1 x {COLUMNS}",
            timing(seconds, system, "forward + backward"), work(call), memory(call),
            claim=CLAIM_EDGES if "edges" in system else CLAIM, difference=error,
        )  # fmt: skip
    memory_of_heads()
    memory_of_groups()


def activations_only(pair: Pair, tokens: Tensor, last: int = 0) -> Callable[[], Tensor]:
    """Hugging Face's forward and the gradient at its embeddings; `last`: how many positions have logits, 0 = all."""
    embedded = pair.hf.get_input_embeddings()(tokens).detach()

    def call() -> Tensor:
        leaf = embedded.clone().requires_grad_()
        logits = pair.hf(inputs_embeds=leaf, use_cache=False, logits_to_keep=last).logits[:, -1]
        (found,) = torch.autograd.grad((logits[:, ANSWER] - logits[:, WRONG]).sum(), leaf)
        return found

    return call


def by_hand(pair: Pair, clean: Tensor, corrupt: Tensor) -> Tensor:
    """Attribution patching of z in Hugging Face with hooks on the output projections, `[prompt layer pos head]`."""
    seen: list[Tensor] = []

    def watch(module: object, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        z = inputs[0] if inputs[0].requires_grad else inputs[0].detach().requires_grad_()
        seen.append(z)
        return (z,)

    blocks = pair.hf.get_submodule("transformer.h").children()
    handles = [block.get_submodule("attn.c_proj").register_forward_pre_hook(watch) for block in blocks]
    with torch.no_grad():
        pair.hf_logits(clean)
    there, own = list(seen), seen
    own.clear()
    logits = pair.hf_logits(corrupt)[:, -1]
    gradients = torch.autograd.grad((logits[:, ANSWER] - logits[:, WRONG]).sum(), own)
    for handle in handles:
        handle.remove()
    products = [(a - b) * g for a, b, g in zip(there, own, gradients, strict=True)]
    return torch.stack([x.detach().unflatten(-1, (12, -1)).sum(-1) for x in products], 1)


def memory_of_heads() -> None:
    """12 heads of 64 and 48 of 16: the same heads * d_head."""
    torch.manual_seed(0)
    for heads in (12, 48):
        config = ModelConfig(12, 768, heads, 1024, 5000, mlp=MLP(3072))
        model = interp.HookedTransformer(Transformer(config).requires_grad_(False).eval())
        pair = torch.randint(5000, (2, 1, 256))
        found = memory(lambda model=model, pair=pair: edge_attribution(model, *pair, metric=METRIC))  # type: ignore[misc]
        report("attribution_patching", "interp, edges", f"12 x {heads} heads, 1 x 256", found)


def memory_of_groups() -> None:
    """What edge attribution keeps on a small Llama shape, against the formula; the formula for 8B."""
    torch.manual_seed(0)
    model = Transformer(LLAMA).to(torch.bfloat16).requires_grad_(False).eval()
    clean, corrupt = torch.randint(1024, (2, 4, 64))
    batch = interp.Batch(clean).with_answers(torch.full((4,), 5), torch.full((4,), 6))
    layers, toward = range(LLAMA.n_layers), TowardMetric(logit_difference())
    reads = SenderChange.reads(model)
    there = run_steps(model, recorded(interp.Batch(corrupt), reads, final=True)).trace
    slopes = [*reads, *Gradients.reads(model, layers, {"mlp": layers})]
    here = run_steps(model, recorded(batch, slopes, toward=toward)).trace
    change, gradients = SenderChange.between(model, here, there), Gradients.of(model, here, torch.ones(1))
    kept = [*there.values(), *here.values(), change.start, *change.z, *change.mlps["mlp"], gradients.end]
    kept += [x for part in (gradients.heads, gradients.stream, gradients.mlps) for x in part.values()]
    report(
        "attribution_patching", "interp, edges", "kept by 4 x 64 tokens, small Llama shape, bfloat16",
        measured_mib=distinct_mib(kept), formula_mib=round(kept_bytes(LLAMA, 4 * 64) / 2**20, 1),
    )  # fmt: skip
    report(
        "attribution_patching", "formula", "4 x 64 tokens, shape of Llama 8B, bfloat16",
        kept_mib=round(kept_bytes(LLAMA_8B, 4 * 64) / 2**20), tile_mib=512, edges=len(EdgeGraph.of(LLAMA_8B)),
        weights_mib=round(weight_bytes(LLAMA_8B) / 2**20), scores_mib=round(score_bytes(LLAMA_8B, 4) / 2**20),
        dense_mib=round(4 * 64 * 32 * (2 * 32 + 2 * 8) * 4096 * 2 / 2**20),
    )  # fmt: skip


def kept_bytes(config: ModelConfig, positions: int) -> int:
    """What both runs leave in half precision, and its differences and gradients in float32: all at once.

    Half: z and the MLP's output twice, the stream, the gradients of q, k, v and the MLP's input. Float32: the changes
    of z and of the MLP, the gradients of q, k, v, the stream and the gradient of the MLP's input. Besides: the stream
    that enters the first block (twice, and its change) and the gradient at the last (twice).
    """
    heads, groups = (n * config.head_width for n in (config.n_heads, config.kv_heads))
    d = config.d_model
    half = 2 * heads + 2 * d + d + (heads + 2 * groups) + d
    full = heads + d + (heads + 2 * groups) + d + d
    return positions * (config.n_layers * (2 * half + 4 * full) + 2 * d + 4 * d + 2 * d + 4 * d)


def weight_bytes(config: ModelConfig) -> int:
    """The weights in half precision."""
    assert isinstance(config.mlp, MLP)
    d, qkvo = config.d_model, 2 * (config.n_heads + config.kv_heads) * config.head_width
    return 2 * (config.n_layers * d * (qkvo + 3 * config.mlp.d_mlp) + 2 * d * config.d_vocab)


def score_bytes(config: ModelConfig, prompts: int) -> int:
    """The scores of some prompts in float32."""
    graph = EdgeGraph.of(config)
    return 4 * prompts * len(graph.senders) * len(graph.receivers)


if __name__ == "__main__":
    tyro.cli(main)
