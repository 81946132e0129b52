"""Claim: direct attribution by head, sublayer and neuron takes at most 1/6 of the time of TransformerLens' cached way,
1/1.9 of that of its newest tool, and 200 MiB.

A logit difference at the last position of 32 x 64 random tokens, GPT-2 small's shape: 144 heads, 24 sublayers, 36 864
neurons. Cached: everything is recorded, then stacks of heads, sublayers and neurons at the last position go through the
cached final norm. Newest: the same record, the neurons folded with the direction before they are written out. Both need
the final norm folded into the unembedding; nothing else is, so that all three systems must give the same numbers.
"""

import copy
from collections.abc import Callable, Mapping

import torch
import transformers
import tyro
from measure import cpu_seconds, memory, report, timing, work
from subjects import Pair, gpt2_small, largest_difference
from tokenizers import Tokenizer, models
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.model_bridge import TransformerBridge

import interp
from interp.residual import Attribute

COLUMNS, ANSWER, WRONG = 64, 1000, 2000
ROWS_OF_A_PASS = 8
HEADS, NEURONS = 144, 12 * 3072
CLAIM, CLAIM_NEWEST, CLAIM_MIB = 1 / 6, 1 / 1.9, 200
Columns = dict[str, Tensor]
"""Contributions `[part prompt]` by head, sublayer and neuron."""


@torch.no_grad()
def main(rows: int = 32, repeats: int = 3) -> None:
    """Measure the claim.

    Args:
        rows: prompts; the cached way takes some 450 MB for each.
        repeats: timed rounds per system.
    """
    torch.set_num_threads(1)
    pair = gpt2_small()
    tokens = pair.tokens(rows, COLUMNS)
    calls: dict[str, Callable[[], Columns]] = {
        "transformer_lens, cached": theirs(pair, tokens, cached),
        "transformer_lens, newest": theirs(pair, tokens, newest),
        "interp": lambda: ours(pair, tokens),
    }
    difference = compared(calls)
    seconds = cpu_seconds(calls, repeats)
    what = f"144 heads, 24 sublayers, 36864 neurons, {rows} x {COLUMNS}"
    for system in calls:
        report(
            "attribution", system, what, timing(seconds, system, "transformer_lens, cached"), claim=CLAIM,
            claim_newest=CLAIM_NEWEST, difference=difference,
            ratio_to_newest=timing(seconds, system, "transformer_lens, newest")["ratio"],
        )  # fmt: skip
    for system, call in reversed(calls.items()):
        report("attribution", system, what, work(call), memory(call), claim_mib=CLAIM_MIB)


def compared(calls: Mapping[str, Callable[[], Columns]]) -> float:
    """The largest difference to ours at any grain, relative; RuntimeError if the systems disagree."""
    found = {name: call() for name, call in calls.items()}
    mine = found.pop("interp")
    pairs = [(theirs[grain], mine[grain]) for theirs in found.values() for grain in mine]
    difference = max(largest_difference(*both) for both in pairs)
    if difference > 1e-4:
        raise RuntimeError(f"the attributions differ by {difference}")
    return difference


def ours(pair: Pair, tokens: Tensor) -> Columns:
    """All three grains in one pass; the numbers of `interp.attribute`."""
    wanted = {"head": r"L\d+H\d+$", "sublayer": r"L\d+\.(attn|mlp)$", "neuron": r"L\d+N\d+$"}
    questions = {grain: Attribute(ANSWER, WRONG, parts=grain) for grain in wanted}  # type: ignore[arg-type]
    tables = interp.run(questions, pair.ours, interp.Batch(tokens).split(ROWS_OF_A_PASS))
    found: Columns = {}
    for grain, pattern in wanted.items():
        table = tables[grain].value
        found[grain] = torch.from_numpy(table[:, table.part.str.match(pattern)].values.T)
    return found


def theirs(
    pair: Pair, tokens: Tensor, read_off: Callable[[ActivationCache, Tensor], Columns]
) -> Callable[[], Columns]:
    """A cache of everything and what is read off it; the bridge takes over a copy of the Hugging Face model."""
    end = "<|endoftext|>"  # booting needs some tokenizer; attribution uses none
    words = Tokenizer(models.WordLevel({end: 0}, unk_token=end))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end, unk_token=end)
    bridge = TransformerBridge.boot_transformers("gpt2", hf_model=copy.deepcopy(pair.hf), tokenizer=tokenizer)
    bridge.enable_compatibility_mode(
        disable_warnings=True, center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )
    direction = bridge.W_U[:, ANSWER] - bridge.W_U[:, WRONG]

    def columns() -> Columns:
        return read_off(bridge.run_with_cache(tokens)[1], direction)

    return columns


def cached(cache: ActivationCache, direction: Tensor) -> Columns:
    """Every part written out at the last position, through the cached final norm, on the direction."""
    stacks = {
        "head": cache.stack_head_results(pos_slice=-1, apply_ln=True),
        "sublayer": cache.decompose_resid(pos_slice=-1, apply_ln=True, incl_embeds=False),
    }
    found = {grain: projected(stack, direction) for grain, stack in stacks.items()}
    neurons = cache.stack_neuron_results(-1, pos_slice=-1, apply_ln=True)
    return found | {"neuron": projected(neurons, direction)}


def newest(cache: ActivationCache, direction: Tensor) -> Columns:
    """The same with the direction folded into each neuron first."""
    whole = cache.get_full_resid_decomposition(pos_slice=-1, apply_ln=True, project_output_onto=direction)
    sublayers = cache.decompose_resid(pos_slice=-1, apply_ln=True, incl_embeds=False)
    assert isinstance(whole, Tensor)
    return {
        "head": whole[:HEADS],
        "sublayer": projected(sublayers, direction),
        "neuron": whole[HEADS : HEADS + NEURONS],
    }


def projected(stack: object, direction: Tensor) -> Tensor:
    """Its stacks are a tensor, or with labels a pair."""
    assert isinstance(stack, Tensor)
    return stack @ direction


if __name__ == "__main__":
    tyro.cli(main)
