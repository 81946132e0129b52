"""Claims: patching sweeps of one clean/corrupted pair of 15 tokens, GPT-2 small's shape, are at least 11x (residual
stream, layer x position), 8x (every head's z) and 12x (every head at every position) faster than TransformerLens' loop,
in 60 MiB at most; 10 000 variants of a 2-layer model take at most 1.3x the time of plain passes over as many rows.

The loop runs the whole model and all logits once per cell; the planned sweep starts each cell at its layer and
position, in batches, and computes two logits of the last position. Both must give the same maps. The loop over heads
and positions is timed on one layer (a twelfth of its 2 160 cells, which all cost the same) and multiplied.
"""

from collections.abc import Callable, Sequence
from functools import partial

import pandas
import torch
import transformer_lens.patching
import transformers
import tyro
from measure import NARROW, cpu_seconds, memory, report, timing, work
from subjects import COLUMNS, Pair, gpt2_small, largest_difference
from tokenizers import Tokenizer, models
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.model_bridge import TransformerBridge

import interp
from interp import Edit
from interp.causal import patch
from interp.edits import Set, Variant
from interp.passes import Sweep

ANSWER, WRONG = 1000, 2000
METRIC = interp.logit_difference(ANSWER, WRONG)
CLAIM_MIB, CLAIM_MANY = 60, 1.3
MANY = 2_000 if NARROW else 10_000


@torch.no_grad()
def main(repeats: int = 2, few: bool = False) -> None:
    """Measure the claims.

    Args:
        repeats: timed rounds; TransformerLens' loops take about a minute in each.
        few: heads x positions alone, one in 60 of TransformerLens' cells instead of one in 12.
    """
    torch.set_num_threads(1)
    pair = gpt2_small()
    clean, corrupt = pair.prompts()
    sweeps = (
        ("residual stream, 12 x 15", "resid_pre", ("layer", "pos"), 11),
        ("z of 144 heads", "z", ("layer", "head"), 8),
        ("z of 144 heads x 15", "z", ("layer", "pos", "head"), 12),
    )
    for name, site, by, claim in sweeps[-1:] if few else sweeps:
        ours = partial(sweep, pair, clean, corrupt, site, by)
        theirs, share = loop(pair, clean, corrupt, by, range(0, COLUMNS, 5 if few else 1))
        if share == 1:
            difference = largest_difference(ours(), theirs())
            if difference > 1e-4:
                raise RuntimeError(f"the maps differ by {difference}")
        seconds = cpu_seconds({"interp": ours, "transformer_lens": theirs}, repeats)
        seconds["transformer_lens"] = [share * each for each in seconds["transformer_lens"]]
        report(
            "patching", "transformer_lens", name, timing(seconds, "transformer_lens", "interp"), work(theirs),
            claim=claim, cells_timed_one_in=share,
        )  # fmt: skip
        report(
            "patching", "interp", name, timing(seconds, "interp", "transformer_lens"), work(ours), memory(ours),
            claim=1 / claim, claim_mib=CLAIM_MIB,
        )  # fmt: skip
    many(repeats)


def sweep(pair: Pair, clean: Tensor, corrupt: Tensor, site: str, by: tuple[str, ...]) -> Tensor:
    """The map of logit differences."""
    found = patch(pair.ours, clean, corrupt, site, metric=METRIC, by=by)
    return torch.from_numpy((found.value + float(found.corrupt[0])).values)


def loop(
    pair: Pair, clean: Tensor, corrupt: Tensor, by: tuple[str, ...], positions: Sequence[int]
) -> tuple[Callable[[], Tensor], int]:
    """TransformerLens' sweep of the same map, and one in how many of its cells it runs.

    Of heads x positions: those of the first layer at these positions.
    """
    end = "<|endoftext|>"  # booting needs some tokenizer; the maps use none
    words = Tokenizer(models.WordLevel({end: 0}, unk_token=end))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end, unk_token=end)
    bridge = TransformerBridge.boot_transformers("gpt2", hf_model=pair.hf, tokenizer=tokenizer)
    _, cache = bridge.run_with_cache(clean)
    if by == ("layer", "pos", "head"):
        index = [(0, pos, head) for pos in positions for head in range(12)]
        return partial(cells, bridge, corrupt, cache, index), 12 * COLUMNS // len(positions)
    tools = transformer_lens.patching
    ready = (
        tools.get_act_patch_resid_pre if by == ("layer", "pos") else tools.get_act_patch_attn_head_out_all_pos
    )
    return lambda: ready(bridge, corrupt, cache, difference), 1


def cells(
    bridge: TransformerBridge, corrupt: Tensor, cache: ActivationCache, index: list[tuple[int, int, int]]
) -> Tensor:
    """Some cells of the sweep over heads and positions."""
    found: Tensor = transformer_lens.patching.generic_activation_patch(
        bridge, corrupt, cache, difference, transformer_lens.patching.layer_pos_head_vector_patch_setter, "z",
        index_df=pandas.DataFrame(index, columns=["layer", "pos", "head"]),
    )  # fmt: skip
    return found


def difference(logits: Tensor) -> Tensor:
    """The logit difference at the last position."""
    return logits[0, -1, ANSWER] - logits[0, -1, WRONG]


def many(repeats: int) -> None:
    """Many variants of a demo model against plain passes of as many rows, logits at the last position in both."""
    model = interp.HookedTransformer.from_pretrained("demo-attn-2l").transformer
    batch = interp.Batch(
        torch.randint(model.config.d_vocab, (1, COLUMNS), generator=torch.Generator().manual_seed(0))
    )
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(MANY, COLUMNS, model.config.d_model, generator=generator)
    site = "blocks.0.hook_resid_pre"
    variants = [Variant([Edit(site, Set(values, i), {"pos": i % COLUMNS})]) for i in range(MANY)]
    ids = torch.full((1,), 5)
    metric = interp.logit_difference()
    asked = batch.with_answers(ids, ids + 1)
    rows, last = batch.tokens.repeat(100, 1), torch.full((100, 1), COLUMNS - 1)

    def plain() -> None:
        for _ in range(MANY // 100):
            model(rows, logits_at=last)

    calls = {"plain passes": plain, "interp": lambda: Sweep(model, asked, variants).run(metric)}
    seconds = cpu_seconds(calls, repeats)
    for system, call in calls.items():
        report(
            "patching", system, f"{MANY} variants of a 2-layer model", timing(seconds, system, "plain passes"),
            work(call), memory(call), claim=CLAIM_MANY,
        )  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main)
