"""Claim: a logit lens takes at most 1.1x the time of the unembedding products it needs, and at most 200 MiB.

13 residual states of 8 x 128 tokens, GPT-2 small's shape, top 10, target rank and probability, entropy and KL of every
state. The products alone: the final norm of every state and the unembedding as the model applies it, 1024 rows of
logits at a time, which are then thrown away. "In tiles": the same products in the lens' own tiles of 128 rows and 1024
words, which are faster. `logit_lens` adds one forward pass without logits to that; memory is its own, states included.
"""

import torch
import tyro
from measure import NARROW, Calls, cpu_seconds, memory, report, timing, work
from subjects import Pair, gpt2_small

import interp
from interp import observe
from interp.lenses import LogitLens
from interp.lenses.lens import CHUNK, LogitTiles

ROWS, LENGTH, TOP = 4 if NARROW else 8, 128, 10
CLAIM, CLAIM_MIB = 1.1, 200


@torch.no_grad()
def main(repeats: int = 5) -> None:
    """Measure the lens of 13 states.

    Args:
        repeats: timed rounds per system.
    """
    torch.set_num_threads(1)
    pair = gpt2_small()
    from_states, whole = of_states(pair), with_the_pass(pair)
    for calls in (from_states, whole):
        seconds, reference = cpu_seconds(calls, repeats), next(iter(calls))
        for system, call in calls.items():
            report(
                "lens", system, f"lens of 13 states of {ROWS} x {LENGTH} tokens, top {TOP}",
                timing(seconds, system, reference), work(call), claim=CLAIM,
            )  # fmt: skip
    report("lens", "interp", "memory of logit_lens", memory(whole["interp"]), claim_mib=CLAIM_MIB)


def of_states(pair: Pair) -> Calls:
    """The lens of states that are there already, the model's products and the same in tiles."""
    model = pair.ours.transformer
    reading, batch = LogitLens(top=TOP).reading(pair.ours), interp.Batch(pair.tokens(ROWS, LENGTH))
    trace = observe(model, batch, reading.reads).trace
    states = [value.flatten(0, 1) for value in trace.values()]

    def in_tiles() -> None:
        tiles = LogitTiles(model, CHUNK)
        for state in states:
            for rows in state.split(CHUNK):
                tiles.fill(rows)

    def products() -> None:
        for state in states:
            model.read_out(state)

    return {
        "products": products,
        "products in tiles": in_tiles,
        "interp, states given": lambda: reading.compute(trace, batch, model),
    }


def with_the_pass(pair: Pair) -> Calls:
    """The public function, and the pass and the products that it needs."""
    model, tokens = pair.ours.transformer, pair.tokens(ROWS, LENGTH)
    reads = LogitLens().reading(pair.ours).reads

    def needed() -> None:
        trace = observe(model, interp.Batch(tokens), reads, answers_only=True).trace
        for state in trace.values():
            model.read_out(state)

    return {"pass and products": needed, "interp": lambda: interp.logit_lens(pair.ours, tokens, top=TOP)}


if __name__ == "__main__":
    tyro.cli(main)
