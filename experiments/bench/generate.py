"""Claim: greedy generation with the key/value cache is no slower than Hugging Face's, and 5x faster than without.

One prompt of 16 tokens, 100 new ones, GPT-2 small's shape, float32; every system must produce the same tokens.
"""

from collections.abc import Callable

import torch
import tyro
from measure import cpu_seconds, memory, report, timing, work
from subjects import Pair, gpt2_small
from torch import Tensor

PROMPT, NEW = 16, 100
CLAIM = 1.0
CLAIM_UNCACHED = 5.0


@torch.no_grad()
def main(repeats: int = 7) -> None:
    """Measure Hugging Face, ours, and ours without the cache.

    Args:
        repeats: timed rounds per system; the uncached run, five times longer, gets a third of them.
    """
    torch.set_num_threads(1)
    calls = _calls(gpt2_small())
    expected = calls["hf"]()
    for system, call in calls.items():
        if not torch.equal(call(), expected):
            raise RuntimeError(f"{system} produced other tokens than Hugging Face")
    seconds = cpu_seconds({name: calls[name] for name in ("hf", "interp")}, repeats)
    slow = cpu_seconds({name: calls[name] for name in ("interp", "interp_uncached")}, max(repeats // 3, 1))
    what = f"greedy, {PROMPT} + {NEW} tokens"
    for system in ("hf", "interp"):
        measured = work(calls[system]), memory(calls[system])
        report("generate", system, what, timing(seconds, system, "hf"), *measured, claim=CLAIM)
    against = timing(slow, "interp_uncached", "interp")
    report("generate", "interp_uncached", what, against, work(calls["interp_uncached"]), claim=CLAIM_UNCACHED)


def _calls(pair: Pair) -> dict[str, Callable[[], Tensor]]:
    prompt = pair.tokens(1, PROMPT)
    settings = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "use_cache": True}
    everything = torch.ones_like(prompt)
    return {
        "hf": lambda: pair.hf.generate(prompt, attention_mask=everything, **settings),  # type: ignore[operator]
        "interp": lambda: pair.ours.generate(prompt, NEW).tokens,
        "interp_uncached": lambda: pair.ours.generate(prompt, NEW, use_past_kv_cache=False).tokens,
    }


if __name__ == "__main__":
    tyro.cli(main)
