"""What is asked of an accelerator, measured on one: `python experiments/bench/accelerator.py --device cuda`.

forward  no more than 1.03x the time of Hugging Face's with fused attention, for the same logits
sweep    the logit difference over every head at every position, at least 100x faster than one forward for each
stream   the scores of all heads over 1 000 rows of 125 tokens, at 85 % or more of the tokens/s of plain passes
edges    attribution to every edge of a model of Llama 8B's shape, weights in half precision, on one card
training updates of a small model, at 90 % or more of the tokens/s of a bare loop

GPT-2 small's shape but for the last two. Seconds are of the clock, between points where the device has done all it was
given; memory is what the device's allocator counts. On the host (`--device cpu`: CPU seconds; `edges` of four narrow
layers) it says nothing of these claims, but that all of it runs and its numbers agree.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch
import tyro
from attribution_patching import ANSWER, LLAMA, LLAMA_8B, METRIC, WRONG, weight_bytes
from measure import MIB, Calls, device_memory, device_seconds, hardware, report, timing
from stream import BATCH_ROWS, ROWS, means
from subjects import COLUMNS, Pair, gpt2_small, largest_difference
from torch import Tensor, nn
from training import bare

import interp
from interp import Batch
from interp.attention.heads import head_scores
from interp.causal import EdgeGraph
from interp.circuits import edge_attribution
from interp.lab.training import Training, config_for, train
from interp.metrics import logit_difference
from interp.model import ModelConfig, Transformer
from interp.passes.question import ByRow
from interp.tasks import RepeatedSequences

Claim = Literal["forward", "sweep", "stream", "edges", "training"]
ALL: tuple[Claim, ...] = ("forward", "sweep", "stream", "edges", "training")
HEADS = 12
UPDATES, ROWS_OF_UPDATE = 32, 64
AGREE = {"float32": 1e-4, "bfloat16": 0.1}
"""How far numbers of two ways may be apart, relative to the largest: TF32 is off."""
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Setting:
    """Where and in which precision, and how often."""

    device: torch.device
    dtype: Precision
    rounds: int

    def said(
        self,
        claim: Claim,
        calls: Calls,
        what: str,
        asked: float | None,
        shares: Mapping[str, float] = MappingProxyType({}),
        **more: object,
    ) -> None:
        """Time the calls and print a line for each; the first is what the others are compared with.

        shares: what the time of a call is multiplied with where it does a part of the work.
        """
        seconds = device_seconds(calls, self.rounds, self.device)
        seconds = {name: [shares.get(name, 1) * each for each in found] for name, found in seconds.items()}
        reference = next(iter(calls))
        for name, call in calls.items():
            report(
                "accelerator", name, f"{claim}: {what}", timing(seconds, name, reference),
                device_memory(call, self.device), claim=asked, dtype=self.dtype, hardware=hardware(self.device), **more,
            )  # fmt: skip

    def agree(self, one: Tensor, other: Tensor) -> float:
        """How far they are apart; RuntimeError if that is more than rounding."""
        far = largest_difference(one.cpu().double(), other.cpu().double())
        if not far <= AGREE[self.dtype]:
            raise RuntimeError(f"the numbers of the two ways are {far} apart in {self.dtype}")
        return far


def main(
    device: str = "cpu",
    dtypes: tuple[Precision, ...] = ("float32", "bfloat16"),
    claims: tuple[Claim, ...] = ALL,
    rounds: int = 5,
    few: bool = False,
) -> None:
    """Measure the claims.

    Args:
        device: where; "cuda" is the first card.
        dtypes: in which precisions; `edges` is measured in half precision alone, `training` in single precision.
        claims: which of them.
        rounds: timed rounds per system.
        few: few rows, cells and updates, to see that all of it runs.
    """
    torch.set_num_threads(1)
    at = torch.device(device)
    models: dict[Claim, Callable[[Setting, Pair, bool], None]] = {
        "forward": forward, "sweep": sweep, "stream": stream,
    }  # fmt: skip
    for dtype in dtypes:
        setting = Setting(at, dtype, rounds)
        pair = gpt2_small()
        number = getattr(torch, dtype)
        pair = Pair(pair.name, pair.hf.to(number).to(at), pair.ours.to(number).to(at))
        for claim in claims:
            if claim in models:
                with torch.no_grad():
                    models[claim](setting, pair, few)
    if "edges" in claims:
        edges(Setting(at, "bfloat16", rounds))
    if "training" in claims:
        training(Setting(at, "float32", rounds), few)


def forward(setting: Setting, pair: Pair, few: bool) -> None:
    """The plain forward of few tokens and of many."""
    for rows, columns in ((1, 16),) if few else ((8, 128), (32, 512)):
        tokens = pair.tokens(rows, columns).to(setting.device)
        calls = {"hf": partial(pair.hf_logits, tokens), "interp": partial(pair.ours.transformer, tokens)}
        far = setting.agree(calls["interp"](), calls["hf"]())
        setting.said(
            "forward", calls, f"{pair.name}, {rows} x {columns}, all logits", 1.03, logit_difference=far
        )


# --- sweep --------------------------------------------------------------------------------------------------------


def sweep(setting: Setting, pair: Pair, few: bool) -> None:
    """The planned sweep against a forward for each cell, of which some are run."""
    clean, corrupt = pair.prompts()
    layers = (5,) if few else (0, 5, 11)
    cells = [
        (layer, pos, head) for layer in layers for pos in range(0, COLUMNS, 7) for head in range(0, HEADS, 5)
    ]

    def ours() -> Tensor:
        found = interp.patch(pair.ours, clean, corrupt, "z", metric=METRIC, by=("layer", "pos", "head"))
        return torch.from_numpy((found.value + float(found.corrupt[0])).values)

    written = [
        block.get_submodule("attn.c_proj") for block in pair.hf.get_submodule("transformer.h").children()
    ]
    known = entering(pair, clean.to(setting.device), written)
    loop = partial(one_by_one, pair, corrupt.to(setting.device), written, known, cells)
    whole = ours()
    far = setting.agree(torch.stack([whole[cell] for cell in cells]), loop())
    setting.said(
        "sweep", {"one forward for each cell": loop, "interp": ours}, f"z of {HEADS * HEADS} heads x {COLUMNS}", 0.01,
        map_difference=far, cells_timed=len(cells), shares={"one forward for each cell": whole.numel() / len(cells)},
    )  # fmt: skip


def entering(pair: Pair, tokens: Tensor, modules: Sequence[nn.Module]) -> list[Tensor]:
    """What enters each of these modules of Hugging Face's model, in one pass."""
    known: list[Tensor] = []
    handles = [
        module.register_forward_pre_hook(lambda _, given: known.append(given[0])) for module in modules
    ]
    pair.hf_logits(tokens)
    for handle in handles:
        handle.remove()
    return known


def one_by_one(
    pair: Pair,
    tokens: Tensor,
    written: Sequence[nn.Module],
    known: Sequence[Tensor],
    cells: Sequence[tuple[int, int, int]],
) -> Tensor:
    """The logit differences of Hugging Face's model with one head's z of another prompt at one position."""
    return torch.stack(
        [_with(pair, tokens, written[layer], known[layer], pos, head) for layer, pos, head in cells]
    )


def _with(pair: Pair, tokens: Tensor, module: nn.Module, z: Tensor, pos: int, head: int) -> Tensor:
    width = z.shape[-1] // HEADS
    own = slice(head * width, (head + 1) * width)

    def put(_: object, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = given[0].clone()
        changed[:, pos, own] = z[:, pos, own]
        return (changed,)

    handle = module.register_forward_pre_hook(put)
    try:
        logits = pair.hf_logits(tokens)[0, -1].float()
    finally:
        handle.remove()
    return logits[ANSWER] - logits[WRONG]


# --- stream, edges, training --------------------------------------------------------------------------------------


def stream(setting: Setting, pair: Pair, few: bool) -> None:
    """The scores of all heads over rows that stand on the host, against plain passes over them."""
    rows = replace(ROWS, rows=2 * BATCH_ROWS) if few else ROWS
    batch = Batch(rows.tokens(pair.ours.cfg.d_vocab, 0), bos=True)
    batches = list(batch.split(BATCH_ROWS))
    asked: ByRow = replace(head_scores(pair.ours.cfg, rows), result=partial(means, name="heads"))

    def plain() -> None:
        for part in batches:
            pair.ours.transformer(part.tokens.to(setting.device))

    calls: Calls = {"plain passes": plain, "interp": partial(interp.run, [asked], pair.ours, batches)}
    what = f"scores of {HEADS * HEADS} heads over {rows.rows} rows of {rows.length} tokens"
    setting.said("stream", calls, what, 1 / 0.85, tokens=batch.tokens.numel())


def edges(setting: Setting) -> None:
    """Attribution to edges of a model whose weights are random, beside plain passes over both prompts."""
    config = LLAMA if setting.device.type == "cpu" else LLAMA_8B
    torch.manual_seed(0)
    with setting.device:
        model = interp.HookedTransformer(Transformer(config).to(getattr(torch, setting.dtype)).eval())
    clean, corrupt = torch.randint(config.d_vocab, (2, 4, 64))
    both = torch.cat([clean, corrupt]).to(setting.device)
    metric = logit_difference(5, 6)
    calls: Calls = {
        "plain passes": partial(_plain, model, both),
        "interp": partial(edge_attribution, model, clean, corrupt, metric=metric),
    }
    what = f"{len(EdgeGraph.of(config))} edges, {config.n_layers} layers of {config.d_model}, 4 x 64 tokens"
    setting.said("edges", calls, what, None, weights_mib=round(weight_bytes(config) / MIB))


@torch.no_grad()
def _plain(model: interp.HookedTransformer, tokens: Tensor) -> Tensor:
    return model.transformer(tokens)


def training(setting: Setting, few: bool) -> None:
    """Updates of a small model against a bare loop."""
    data = RepeatedSequences(d_vocab=1024, width=128, low=8, high=60)
    config, steps = config_for("gpt-4l", data), 2 if few else UPDATES
    assert isinstance(config, ModelConfig)
    given = Training(
        steps=steps,
        rows=ROWS_OF_UPDATE,
        warm_up=0,
        log_every=steps // 2,
        evaluation_rows=8,
        device=str(setting.device),
    )
    calls: Calls = {
        "bare loop": partial(
            bare, config, data, steps, fused=True, rows=ROWS_OF_UPDATE, device=str(setting.device)
        ),
        "interp": partial(train, config, data, given),
    }
    setting.said(
        "training", calls, f"{steps} updates of {ROWS_OF_UPDATE} x {data.width} tokens", round(1 / 0.9, 3)
    )


if __name__ == "__main__":
    tyro.cli(main)
