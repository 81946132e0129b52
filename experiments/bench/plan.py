"""What every question costs a model that does not fit here: blocks run and bytes held, planned on thin models.

Which blocks a question runs follows from layers, heads, positions and prompts, not from widths; and what it holds grows
with the widths along a line. So two thin models of the same layers and heads, whose packs are cut as those of the real
one would be, say both: token-layers exactly, bytes by the line through the two. The same is done for SmolLM2, which is
here, and compared with the model itself. Where the largest moment is a tile of fixed size, bytes are no line over
widths; those questions (`FIXED_TILES`) take it over layers, through two shallow models of the real widths.

    python experiments/bench/plan.py /tmp/real/smollm2        # writes plan.md beside this file, an hour
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated
from unittest import mock

import torch
import tyro
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.attention import AttentionAttribution, AttentionEntropy, Dispersion, Heads
from interp.causal import Ablate, AttributionPatch, CausalTrace, KnockOut, Patch, PathPatch, ShortCircuit
from interp.circuits import EdgeAttribution
from interp.data import Pairs
from interp.dynamics import InContext, OneTokenLosses
from interp.edits import Zero
from interp.features import TopExamples
from interp.lab.depth import Consensus, Refinement, Splitting
from interp.lenses import (
    BackwardLens,
    CompareLenses,
    GradientCosines,
    GradientRank,
    LateLayers,
    LogitLens,
    OutputLens,
    Patchscope,
)
from interp.metrics import logit_difference
from interp.model import MLP, ModelConfig, RMSNorm, Rotary, Transformer
from interp.model.block import Block
from interp.passes import memory as rooms, packs, sweep
from interp.passes.question import Question
from interp.residual import Attribute
from interp.runs.memory import LiveBytes
from interp.tokens import FlowRoutes, IntegratedGradients, LayerMixing, TokenAttribution

ROWS, TOKENS, PROMPTS = 2, 16, 1000
GB, MIB = 1e9, 2**20
ANSWER, WRONG = 5, 6
METRIC = logit_difference(ANSWER, WRONG)
QUESTIONS: Mapping[str, Question] = {
    "logit_lens": LogitLens(answer=ANSWER),
    "attribute heads": Attribute(ANSWER, WRONG, parts="head"),
    "attention_entropy": AttentionEntropy(),
    "flow_routes": FlowRoutes(),
    "late_layers": LateLayers(ANSWER),
    "heads of a corpus": Heads(sentences=None),
    "backward_lens": BackwardLens(ANSWER, WRONG),
    "token_attribution": TokenAttribution(ANSWER, WRONG),
    "attribution_patch z": AttributionPatch("z", metric=METRIC, agreement=0),
    "edge_attribution eap": EdgeAttribution(metric=METRIC),
    "edge_attribution ig": EdgeAttribution(metric=METRIC, method="eap-ig-inputs"),
    "patch resid_pre by position": Patch("resid_pre", metric=METRIC),
    "patch z by head": Patch("z", metric=METRIC, by=("layer", "head")),
    "ablate heads": Ablate(change=Zero(), metric=METRIC),
    "knock_out by layer": KnockOut([-1], [1], metric=METRIC),
    "path_patch to the logits": PathPatch(metric=METRIC),
    "causal_trace, 10 samples": CausalTrace(range(1, 3), ANSWER),
    "attribute sublayers": Attribute(ANSWER, WRONG),
    "attribute by source": Attribute(ANSWER, WRONG, parts="source"),
    "attribute neurons": Attribute(ANSWER, WRONG, parts="neuron", top=10),
    "attention_attribution": AttentionAttribution("L1H2", key=3, by="head"),
    "dispersion": Dispersion(),
    "layer_mixing": LayerMixing(kernel="norms"),
    "integrated_gradients, 3 steps": TokenAttribution(ANSWER, method=IntegratedGradients(steps=3)),
    "output_lens of a head": OutputLens("L0H1"),
    "compare_lenses": CompareLenses({"logit lens": None}),
    "patchscope": Patchscope(torch.tensor([3, 7, 5, 11])),
    "gradient_rank": GradientRank(ANSWER, WRONG, matrices=("W_O",)),
    "gradient_cosines": GradientCosines(ANSWER, WRONG, matrices=("W_O",)),
    "short_circuit by layer": ShortCircuit(metric=METRIC),
    "top_examples of a stream": TopExamples("blocks.1.hook_resid_pre"),
    "consensus": Consensus(),
    "in_context": InContext(early=2, late=6),
    "one_token_losses": OneTokenLosses(),
    "refinement": Refinement(times=(1, 2)),
    "splitting": Splitting(1, steps=(1, 2), fine=4),
}
SWEEPS = {
    "patch resid_pre by position": "2 passes + T sum of layers left",
    "patch z by head": "2 passes + H sum of layers left",
    "ablate heads": "1 pass + H sum of layers left",
}
"""Token-layers of a prompt on paper, in words."""
FIXED_TILES = (
    "logit_lens", "attention_entropy", "flow_routes", "heads of a corpus", "backward_lens", "edge_attribution eap",
    "edge_attribution ig", "causal_trace, 10 samples", "attention_attribution",
)  # fmt: skip
"""Questions whose bytes are a line over layers, not over widths."""
SHALLOW = (12, 20)
"""Layers of the two models of the real widths: from about ten on, what is kept of every layer is the largest moment."""


@dataclass(frozen=True)
class Shape:
    """A model as the plan knows it."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    width: int
    head: int
    mlp: int
    vocab: int
    dtype: torch.dtype
    room: int
    """Bytes that a pack of a sweep may hold."""
    device: str
    tied: bool = False
    """Whether the unembedding is the embedding."""

    def config(self, thin: int = 1) -> ModelConfig:
        """The configuration; thin: how many times narrower."""
        return ModelConfig(
            self.layers, self.width // thin, self.heads, 512, self.vocab // thin, d_head=self.head // thin,
            n_kv_heads=self.kv_heads, mlp=MLP(self.mlp // thin, act="silu", gated=True, bias=False),
            position=Rotary(), norm=RMSNorm(), qkv_bias=False, out_bias=False, tied=self.tied,
        )  # fmt: skip


def on_gpus(gib: float, weights: float) -> int:
    """What a pack may hold where weights of so many bytes lie on so much memory."""
    return int((gib * GB - weights) * rooms.DEVICE_ROOM)


SMOLLM2 = Shape(
    "SmolLM2-135M", 30, 9, 3, 576, 64, 1536, 49152, torch.float32, rooms.HOST_ROOM, "cpu", tied=True
)
EIGHT = Shape("8B", 32, 32, 8, 4096, 128, 14336, 128256, torch.bfloat16, on_gpus(80, 16e9), "cuda")
SEVENTY = Shape("70B", 80, 64, 8, 8192, 128, 28672, 128256, torch.bfloat16, on_gpus(80, 141e9 / 4), "cuda")
WIDE = ("SmolLM2-135M",)
"""Shapes of whose real widths some layers fit here."""
THIN: Mapping[str, tuple[int, int]] = {"SmolLM2-135M": (16, 8), "8B": (64, 32), "70B": (64, 32)}


@dataclass(frozen=True)
class Cost:
    """What a call does, and holds beside the weights."""

    passes: int
    """Calls of the first block."""
    blocks: int
    """Calls of any block."""
    token_layers: int
    peak: float
    seconds: float


@contextmanager
def cut_as(shape: Shape) -> Iterator[None]:
    """Sweeps are cut into the packs that a model of this shape would have, on its device."""
    real, device = shape.config(), torch.device(shape.device)
    item = torch.finfo(shape.dtype).bits // 8
    per_token, fixed = rooms.bytes_per_token, packs.fixed_cost(real, device)
    with ExitStack() as stack:
        for name, made in {
            "bytes_per_token": lambda config, columns, _, explicit: per_token(
                real, columns, item, explicit=explicit
            ),
            "that_fit": lambda model, each, given=None: max(1, shape.room // each),
            "fixed_cost": lambda config, where: fixed,
        }.items():
            stack.enter_context(mock.patch.object(sweep, name, made))
        yield


def cost_of(question: Question, model: HookedTransformer, shape: Shape) -> Cost:
    """What the question costs for `ROWS` prompts."""
    seen: list[tuple[int, int]] = []
    forward = Block.forward

    def watched(self: Block, resid: Tensor, *rest: object, **more: object) -> Tensor:
        seen.append((self is model.transformer.blocks[0], resid.shape[0] * resid.shape[1]))
        return forward(self, resid, *rest, **more)  # type: ignore[arg-type]

    gc.collect()
    start = time.process_time()
    with cut_as(shape), mock.patch.object(Block, "forward", watched), LiveBytes() as live:
        interp.run([question], model, data_of(question))
    first = sum(each for each, _ in seen)
    return Cost(first, len(seen), sum(n for _, n in seen), live.peak, time.process_time() - start)


def data_of(question: Question) -> Pairs | list[interp.Batch]:
    """Prompts, or pairs of them that differ in one early token."""
    dice = torch.Generator().manual_seed(0)
    clean = torch.randint(7, 60, (ROWS, TOKENS), generator=dice)
    corrupt = clean.clone()
    corrupt[:, 2] = 61
    if isinstance(question, AttributionPatch | EdgeAttribution | Patch | PathPatch):
        return Pairs(clean, corrupt)
    return [interp.Batch(clean)]


def model_of(config: ModelConfig, dtype: torch.dtype) -> HookedTransformer:
    """Random weights."""
    torch.manual_seed(0)
    return HookedTransformer(Transformer(config).requires_grad_(False).to(dtype))


def held_by_depth(shape: Shape, names: Sequence[str]) -> dict[str, float]:
    """Bytes that each question holds, by the line over layers through two shallow models of the real widths."""
    peaks: dict[str, list[float]] = {name: [] for name in names}
    for layers in SHALLOW:
        model = model_of(replace(shape, layers=layers).config(), shape.dtype)
        for name in names:
            peaks[name].append(cost_of(known(QUESTIONS[name], model), model, shape).peak)
        del model
    first, second = SHALLOW
    return {
        name: low + (high - low) / (second - first) * (shape.layers - first)
        for name, (low, high) in peaks.items()
    }


def known(question: Question, model: HookedTransformer) -> Question:
    """The question with the answer that the model gives: tracing drops facts that it does not know."""
    if not isinstance(question, CausalTrace):
        return question
    data = data_of(question)
    assert isinstance(data, list)
    return replace(question, answer=model.transformer(data[0].tokens)[:, -1].argmax(-1).tolist())


def planned(shape: Shape, names: Sequence[str]) -> dict[str, Cost]:
    """What each question costs a model of this shape, from two thin ones."""
    fixed = [name for name in names if name in FIXED_TILES and shape.name in WIDE]
    by_depth = held_by_depth(shape, fixed) if fixed else {}
    first, second = (model_of(shape.config(thin), shape.dtype) for thin in THIN[shape.name])
    found = {}
    for name in names:
        one, two = (cost_of(known(QUESTIONS[name], m), m, shape) for m in (first, second))
        assert (one.passes, one.token_layers) == (two.passes, two.token_layers), name
        thin, less = THIN[shape.name]
        slope = (two.peak - one.peak) / (1 / less - 1 / thin)
        peak = by_depth.get(name, one.peak + slope * (1 - 1 / thin))
        found[name] = replace(one, peak=peak, seconds=one.seconds + two.seconds)
        print(shape.name, name, found[name], flush=True)
    return found


def main(smollm2: Annotated[Path, tyro.conf.Positional], names: tuple[str, ...] = tuple(QUESTIONS)) -> None:
    """Plan all questions for three models, and measure one of them.

    Args:
        smollm2: the folder of SmolLM2-135M.
        names: which questions.
    """
    plans = {shape.name: planned(shape, names) for shape in (SMOLLM2, EIGHT, SEVENTY)}
    network = HookedTransformer.from_pretrained(str(smollm2)).transformer
    real = HookedTransformer(network)  # ids alone, as the thin ones
    lines = [
        "| question | passes | worth, a prompt | SmolLM2 holds, MiB: planned | measured | off | same blocks |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        plan, seen = plans["SmolLM2-135M"][name], cost_of(known(QUESTIONS[name], real), real, SMOLLM2)
        worth = plan.token_layers / (ROWS * TOKENS * SMOLLM2.layers)
        same = "yes" if (plan.blocks, plan.token_layers) == (seen.blocks, seen.token_layers) else "NO"
        off = plan.peak / seen.peak - 1
        held = f"{plan.peak / MIB:.1f} | {seen.peak / MIB:.1f} | {off:+.0%}"
        lines.append(f"| {name} | {plan.passes} | {worth:.1f} | {held} | {same} |")
        print(lines[-1], flush=True)
    lines += ["", *_large(plans, names)]
    Path(__file__).with_name("plan.md").write_text("\n".join(lines) + "\n")


def _large(plans: Mapping[str, Mapping[str, Cost]], names: Sequence[str]) -> list[str]:
    """The table of the large models, of 1 000 prompts."""
    lines = [
        "| question | 8B: token-layers | EFLOP | held, GB | 70B: token-layers | EFLOP | held, GB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        cells = []
        for shape in (EIGHT, SEVENTY):
            cost = plans[shape.name][name]
            layers = cost.token_layers * PROMPTS / ROWS
            flop = 2 * layers * packs.block_products(shape.config()) / 1e18
            known_bytes = name not in FIXED_TILES or shape.name in WIDE
            cells += [f"{layers:.2e}", f"{flop:.2g}", f"{cost.peak / GB:.2g}" if known_bytes else "?"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
