"""Claim: greedy generation with the key/value cache is no slower than Hugging Face's, and 5x faster than without.

GPT-2 small's shape with one prompt of 16 tokens and 100 new ones; both shapes with 1 and 8 prompts of 32 tokens and 32
new ones, also padded on the left; SmolLM2's shape, 30 layers, with one prompt of 15 and 60 new ones; float32. Every
system must produce the same tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import tyro
from measure import cpu_seconds, memory, report, timing, work
from subjects import Pair, gpt2_small, llama_small, smollm2
from torch import Tensor

from interp import Batch

CLAIM = 1.0
CLAIM_UNCACHED = 5.0


@dataclass(frozen=True)
class Case:
    """One workload: so many prompts, so long, continued so far."""

    pair: Pair
    rows: int = 1
    prompt: int = 32
    new: int = 32
    padded: bool = False
    """Whether row i begins with i columns of padding."""

    def __str__(self) -> str:
        padding = ", left-padded" if self.padded else ""
        return f"{self.pair.name}, greedy, {self.rows} x ({self.prompt} + {self.new}) tokens{padding}"

    def calls(self) -> dict[str, Callable[[], Tensor]]:
        """The systems; each returns all tokens."""
        prompt, new = self.pair.tokens(self.rows, self.prompt), self.new
        keep = torch.ones_like(prompt, dtype=torch.bool)
        if self.padded:
            keep = torch.arange(self.prompt)[None] >= torch.arange(self.rows)[:, None]
        batch = Batch(prompt, keep if self.padded else None)
        settings = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
        hf, ours = self.pair.hf, self.pair.ours
        return {
            "hf": lambda: hf.generate(prompt, attention_mask=keep.long(), **settings),  # type: ignore[operator]
            "interp": lambda: ours.generate(batch, new, stop_at_eos=False).tokens,
            "interp_uncached": lambda: (
                ours.generate(batch, new, stop_at_eos=False, use_past_kv_cache=False).tokens
            ),
        }


@torch.no_grad()
def main(repeats: int = 7, few: bool = False) -> None:
    """Measure Hugging Face, ours, and (on the first workload) ours without the cache, and the memory of both.

    Args:
        repeats: timed rounds per system; the uncached run, five times longer, gets a third of them.
        few: only with the cache and without memory, 16 new tokens for 8 padded prompts.
    """
    torch.set_num_threads(1)
    gpt2, llama = gpt2_small(), llama_small()
    first = Case(gpt2, prompt=16, new=100)
    if few:
        for pair in (gpt2, llama):
            _compare(Case(pair, 8, new=16, padded=True), repeats, ("hf", "interp"))
        return
    cases = [first, *(Case(pair, rows) for pair in (gpt2, llama) for rows in (1, 8))]
    cases += [Case(pair, 8, padded=True) for pair in (gpt2, llama)]
    cases.append(Case(smollm2(), prompt=15, new=60))
    for case in cases:
        _compare(case, repeats)
    compared_without_cache(first, repeats)
    calls = first.calls()
    for system in ("hf", "interp"):  # last: from here on the process allocates more slowly
        report("generate", system, str(first), memory(calls[system]))


def compared_without_cache(case: Case, repeats: int) -> None:
    """Ours without the cache beside ours with it."""
    calls = case.calls()
    slow = cpu_seconds({name: calls[name] for name in ("interp", "interp_uncached")}, max(repeats // 3, 1))
    against = timing(slow, "interp_uncached", "interp")
    report(
        "generate",
        "interp_uncached",
        str(case),
        against,
        work(calls["interp_uncached"]),
        claim=CLAIM_UNCACHED,
    )


def _compare(case: Case, repeats: int, systems: Sequence[str] = ("hf", "interp", "interp_uncached")) -> None:
    calls = case.calls()
    expected = calls["hf"]()
    for system in systems:
        if not torch.equal(calls[system](), expected):
            raise RuntimeError(f"{system} produced other tokens than Hugging Face: {case}")
    seconds = cpu_seconds({name: calls[name] for name in ("hf", "interp")}, repeats)
    for system in ("hf", "interp"):
        counts = work(calls[system])
        report("generate", system, str(case), timing(seconds, system, "hf"), counts, claim=CLAIM)


if __name__ == "__main__":
    tyro.cli(main)
