"""Claim: the un-hooked forward takes no longer than Hugging Face's with fused attention, for the same logits.

8 x 128 tokens, float32, all logits, on GPT-2 small's shape and a Llama shape with grouped key/value heads.
"""

import torch
import tyro
from measure import cpu_seconds, memory, report, timing, work
from subjects import gpt2_small, largest_difference, llama_small

ROWS, COLUMNS = 8, 128
CLAIM = 1.0


@torch.no_grad()
def main(repeats: int = 9) -> None:
    """Measure both shapes.

    Args:
        repeats: timed rounds per system.
    """
    torch.set_num_threads(1)
    for build in (gpt2_small, llama_small):
        pair = build()
        tokens = pair.tokens(ROWS, COLUMNS)
        calls = {
            "hf": lambda pair=pair, tokens=tokens: pair.hf_logits(tokens),
            "interp": lambda pair=pair, tokens=tokens: pair.ours.transformer(tokens),
        }
        difference = largest_difference(calls["interp"](), calls["hf"]())
        seconds = cpu_seconds(calls, repeats)
        for system, call in calls.items():
            report(
                "forward", system, f"{pair.name}, all logits",
                timing(seconds, system, "hf"), work(call), memory(call),
                claim=CLAIM, logit_difference=difference, rows=ROWS, columns=COLUMNS,
            )  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main)
