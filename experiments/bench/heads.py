"""Claims: the scores of all heads take at most 0.70x the time of TransformerLens' cached way, and 220 MiB; the whole
taxonomy takes at most 6 forward passes over its data.

16 rows of BOS and two copies of 63 random tokens (127 columns), 144 heads of GPT-2 small's shape. TransformerLens
records the attention patterns only, its cheapest way; the same scores of patterns are then read off them. The taxonomy
runs on its own data, 32 rows of 101 random tokens and 128 sentences, against plain passes (logits included) over them.
"""

from collections.abc import Callable

import torch
import transformers
import tyro
from measure import Calls, cpu_seconds, memory, report, timing, work
from subjects import Pair, gpt2_small, largest_difference
from tokenizers import Tokenizer, models
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

import interp
from interp.attention.heads import REPEATS, head_scores
from interp.core.patterns import SCORES, pattern_scores
from interp.core.stats import Means
from interp.data.stream import prompt_source
from interp.families.tokenizer import tokenizer_of
from interp.runs import kept
from interp.runs.over_data import reduced_over
from interp.tasks import SHORT_SENTENCES
from interp.zoo.demos import WEIGHTS

DATA = interp.tasks.RepeatedTokens(period=63, repeats=2, rows=16)
CLAIM, CLAIM_MIB, CLAIM_PASSES = 0.70, 220, 6.0
SPEAKER = "demo-4l"
"""Whose tokenizer the random model gets, so that the names of the sentences are single tokens."""


@torch.no_grad()
def main(repeats: int = 7, taxonomy_repeats: int = 3) -> None:
    """Measure both claims.

    Args:
        repeats: timed rounds per system, scores of patterns.
        taxonomy_repeats: timed rounds, the whole taxonomy; 0 leaves it out.
    """
    torch.set_num_threads(1)
    pair = gpt2_small()
    calls = {"transformer_lens": transformer_lens_scores(pair), "interp": lambda: ours(pair)}
    difference = largest_difference(calls["interp"](), calls["transformer_lens"]())  # type: ignore[no-untyped-call]
    if difference > 1e-4:
        raise RuntimeError(f"the scores differ by {difference}")
    seconds = cpu_seconds(calls, repeats)
    whole = taxonomy(pair) if taxonomy_repeats else {}
    whole_seconds = cpu_seconds(whole, taxonomy_repeats)
    for system, call in calls.items():
        report(
            "heads", system, f"scores of the patterns of 144 heads, {DATA.rows} x {DATA.length}",
            timing(seconds, system, "transformer_lens"), work(call), memory(call),
            claim=CLAIM, claim_mib=CLAIM_MIB, score_difference=difference,
        )  # fmt: skip
    for system, run_all in whole.items():
        report(
            "heads", system, "the whole taxonomy of 144 heads", timing(whole_seconds, system, "plain passes"),
            work(run_all), memory(run_all), claim=CLAIM_PASSES,
        )  # fmt: skip


def ours(pair: Pair) -> Tensor:
    """Mean scores `[layer, head, s]` of the patterns; copying and the kernel come with them."""
    batch = interp.Batch(DATA.tokens(pair.ours.cfg.d_vocab, 0), bos=True)
    source = prompt_source(batch, pair.ours.text, batch_size=DATA.rows)
    found = reduced_over(head_scores(pair.ours.cfg, DATA), pair.ours, source)
    assert isinstance(found, Means)
    return torch.stack([found.moments[name].mean for name in SCORES], -1)


def taxonomy(pair: Pair) -> Calls:
    """The whole table by the public function, and plain passes over the same rows."""
    model = interp.HookedTransformer(pair.ours.transformer, tokenizer_of(WEIGHTS / SPEAKER))
    said, unsaid = SHORT_SENTENCES.balanced(model.text)
    repeats = interp.Batch(REPEATS.tokens(model.cfg.d_vocab, 0), bos=True)
    parts = [part for batch in (repeats, said, unsaid) for part in batch.split(16)]
    found = interp.heads(model)
    missing = {"name_mover", "successor", "copying_weights"} - set(found.score.values.tolist())
    if missing:
        raise RuntimeError(f"the table lacks {missing}: {found.attrs}")

    def plain() -> None:
        for part in parts:
            interp.observe(model, part)

    def anew() -> None:
        kept.forget()
        interp.heads(model)

    return {"plain passes": plain, "interp": anew}


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
        return torch.stack([pattern_scores(cache[name], DATA.period).mean(0) for name in names])

    return scores


if __name__ == "__main__":
    tyro.cli(main)
