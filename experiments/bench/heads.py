"""Claim: the scores of all heads take at most 0.70x the time of TransformerLens' cached way, and 220 MiB.

16 rows of BOS and two copies of 63 random tokens (127 columns), 144 heads of GPT-2 small's shape. TransformerLens
records the attention patterns only, its cheapest way; the same three scores are then read off them.
"""

from collections.abc import Callable

import torch
import transformers
import tyro
from measure import cpu_seconds, memory, report, timing, work
from subjects import Pair, gpt2_small, largest_difference
from tokenizers import Tokenizer, models
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

import interp
from interp.analyses.heads import SCORES, repeat_scores

DATA = interp.RepeatedTokens(period=63, repeats=2, rows=16)
CLAIM = 0.70
CLAIM_MIB = 220


@torch.no_grad()
def main(repeats: int = 7) -> None:
    """Measure both.

    Args:
        repeats: timed rounds per system.
    """
    torch.set_num_threads(1)
    pair = gpt2_small()
    calls = {"transformer_lens": transformer_lens_scores(pair), "interp": lambda: ours(pair)}
    difference = largest_difference(calls["interp"](), calls["transformer_lens"]())  # type: ignore[no-untyped-call]
    if difference > 1e-4:
        raise RuntimeError(f"the scores differ by {difference}")
    seconds = cpu_seconds(calls, repeats)
    for system, call in calls.items():
        report(
            "heads", system, f"three scores of 144 heads, {DATA.rows} x {DATA.length}",
            timing(seconds, system, "transformer_lens"), work(call), memory(call),
            claim=CLAIM, claim_mib=CLAIM_MIB, score_difference=difference,
        )  # fmt: skip


def ours(pair: Pair) -> Tensor:
    """Mean scores `[layer, head, 3]` through the public door."""
    table = interp.heads(pair.ours, DATA, batch_size=DATA.rows)
    return torch.stack([torch.from_numpy(table[name].values) for name in SCORES], -1)


def transformer_lens_scores(pair: Pair) -> Callable[[], Tensor]:
    """The same through a cache of all patterns; the bridge takes over the Hugging Face model (eager attention)."""
    end = "<|endoftext|>"  # booting needs some tokenizer; the scores use none
    words = Tokenizer(models.WordLevel({end: 0}, unk_token=end))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end, unk_token=end)
    bridge = TransformerBridge.boot_transformers("gpt2", hf_model=pair.hf, tokenizer=tokenizer)
    tokens = DATA.tokens(pair.ours.cfg.d_vocab, 0)
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(pair.ours.cfg.n_layers)]

    def scores() -> Tensor:
        _, cache = bridge.run_with_cache(tokens, names_filter=names)
        return torch.stack([repeat_scores(cache[name], DATA.period).mean(0) for name in names])

    return scores


if __name__ == "__main__":
    tyro.cli(main)
