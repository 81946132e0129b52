"""Claim: the un-hooked forward takes no longer than Hugging Face's with fused attention, for the same logits.

8 x 128 tokens, float32, all logits, on the shapes of GPT-2 small, Llama (grouped key/value heads), Gemma 2 (soft caps,
so Hugging Face's attention is its eager one) and GPT-NeoX (parallel blocks).
"""

from collections.abc import Callable
from functools import partial

import torch
import tyro
from measure import cpu_seconds, memory, report, timing, work
from subjects import Pair, gemma2_small, gpt2_small, largest_difference, llama_small, neox_small
from torch import Tensor

COLUMNS = 128
CLAIM = 1.0


@torch.no_grad()
def main(repeats: int = 9, rows: int = 8) -> None:
    """Measure every shape.

    Args:
        repeats: timed rounds per system.
        rows: texts of a pass.
    """
    torch.set_num_threads(1)
    pairs = [gpt2_small(), llama_small(), gemma2_small(), neox_small()]
    seconds = [cpu_seconds(_calls(pair, rows), repeats) for pair in pairs]
    for pair, times in zip(pairs, seconds, strict=True):
        calls = _calls(pair, rows)
        difference = largest_difference(calls["interp"](), calls["hf"]())
        for system, call in calls.items():
            report(
                "forward", system, f"{pair.name}, all logits", timing(times, system, "hf"), work(call), memory(call),
                claim=CLAIM, logit_difference=difference, rows=rows, columns=COLUMNS,
            )  # fmt: skip


def _calls(pair: Pair, rows: int) -> dict[str, Callable[[], Tensor]]:
    tokens = pair.tokens(rows, COLUMNS)
    return {"hf": partial(pair.hf_logits, tokens), "interp": partial(pair.ours.transformer, tokens)}


if __name__ == "__main__":
    tyro.cli(main)
