"""Claim: a wrapped network's plain forward costs at most 1.02x Hugging Face's, since it is theirs.

Beside it what our own code costs, and what a sweep costs in both: the residual stream of one pair of 15 tokens patched
over layers and positions. A small Llama shape.
"""

from functools import partial

import torch
import tyro
from measure import cpu_seconds, report, timing, work
from subjects import Pair, largest_difference, llama_small
from torch import Tensor

import interp

CLAIM, DIFFERING = 1.02, (2, 4, 9, 10)
METRIC = interp.logit_difference(1000, 2000)


@torch.no_grad()
def main(repeats: int = 9) -> None:
    """Measure the claim.

    Args:
        repeats: timed rounds.
    """
    torch.set_num_threads(1)
    pair = llama_small()
    wrapped = interp.HookedTransformer.from_pretrained(pair.hf, wrapped=True)
    tokens = pair.tokens(4, 128)
    forwards = {
        "hf": partial(pair.hf_logits, tokens),
        "wrapped": partial(wrapped.transformer, tokens),
        "interp": partial(pair.ours.transformer, tokens),
    }
    seconds = cpu_seconds(forwards, repeats)
    for system, call in forwards.items():
        spent = timing(seconds, system, "hf")
        report("wrapped", system, "plain forward, 4 x 128", spent, work(call), claim=CLAIM)
    clean = pair.tokens(1, 15)
    corrupt = clean.clone()
    corrupt[0, list(DIFFERING)] = (clean[0, list(DIFFERING)] + 1) % pair.ours.cfg.d_vocab
    sweeps = {
        name: partial(patched, model, clean, corrupt)
        for name, model in (("interp", pair.ours), ("wrapped", wrapped))
    }
    if (difference := largest_difference(sweeps["wrapped"](), sweeps["interp"]())) > 1e-4:
        raise RuntimeError(f"the maps differ by {difference}")
    plain = {"plain": partial(rows, pair, clean)} | sweeps
    seconds = cpu_seconds(plain, max(2, repeats // 3))
    for system, call in plain.items():
        report("wrapped", system, "residual stream, 8 x 15", timing(seconds, system, "interp"), work(call))


def patched(model: interp.HookedTransformer, clean: Tensor, corrupt: Tensor) -> Tensor:
    """The map of a sweep."""
    found = interp.patch(model, clean, corrupt, "resid_pre", metric=METRIC)
    return torch.from_numpy(found.value.values)


def rows(pair: Pair, clean: Tensor) -> Tensor:
    """Hugging Face's plain passes over as many rows as the sweep has cells."""
    return pair.hf_logits(clean.expand(8 * clean.shape[1], -1))


if __name__ == "__main__":
    tyro.cli(main)
