"""Claim: recording everything costs at most 7 % over a plain forward and no memory beyond what is returned + 60 MiB.

8 x 128 tokens, GPT-2 small's shape, float32, logits included, against Hugging Face's plain forward, which records
nothing. Recording `resid_post` alone costs at most 2 %.
"""

from collections.abc import Callable

import torch
import tyro
from measure import cpu_seconds, distinct_mib, memory, report, timing, work
from subjects import gpt2_small
from torch import Tensor

from interp.residual import ActivationCache

ROWS, COLUMNS = 8, 128
CLAIMS = {"everything": 1.07, "resid_post": 1.02}
CLAIM_EXTRA_MIB = 60


@torch.no_grad()
def main(repeats: int = 9) -> None:
    """Measure both.

    Args:
        repeats: timed rounds per system.
    """
    torch.set_num_threads(1)
    pair = gpt2_small()
    tokens = pair.tokens(ROWS, COLUMNS)
    recorded: dict[str, Callable[[], tuple[Tensor, ActivationCache]]] = {
        "everything": lambda: pair.ours.run_with_cache(tokens),
        "resid_post": lambda: pair.ours.run_with_cache(tokens, "blocks.*.hook_resid_post"),
    }
    plain = {"hf": lambda: pair.hf_logits(tokens), "interp": lambda: pair.ours.transformer(tokens)}
    seconds = cpu_seconds(plain | recorded, repeats)
    for system, call in plain.items():
        report("cache", system, "plain forward", timing(seconds, system, "hf"), work(call), memory(call))
    for what, call in recorded.items():
        logits, cache = call()
        returned = distinct_mib((logits, *cache.values()))
        taken, entries = memory(call), len(cache)
        del logits, cache
        report(
            "cache", "interp", f"record {what}", timing(seconds, what, "hf"), work(call), taken,
            entries=entries, returned_mib=returned, extra_allocated_mib=round(taken.allocated_mib - returned, 1),
            extra_resident_mib=None if taken.resident_mib is None else round(taken.resident_mib - returned, 1),
            claim=CLAIMS[what], claim_extra_mib=CLAIM_EXTRA_MIB,
        )  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main)
