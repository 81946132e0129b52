"""Claims: the factors of all MLP and attention matrices for one prompt take at most 0.35x the time of a Hugging Face
forward and full `.backward()`, and 12 MiB; for 32 prompts at most 1.1x a forward and a backward of activations alone.

GPT-2 small's shape, 72 matrices, prompts of 16 tokens, loss -log p(target) at the last token. The reference of the
second claim is Hugging Face with frozen parameters, asked for the gradient at its embeddings and the logits of the last
token only: what any backward lens has to run. One reconstructed gradient is checked against Hugging Face's first.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import tyro
from measure import Calls, cpu_seconds, memory, report, timing, work
from subjects import Pair, gpt2_small, largest_difference
from torch import Tensor

import interp
from interp.lenses import GradientFactors, gradient_factors

COLUMNS, MANY = 16, 32
CLAIM, CLAIM_MIB, CLAIM_MANY = 0.35, 12, 1.1


def main(repeats: int = 5, batch_repeats: int = 3) -> None:
    """Measure both claims.

    Args:
        repeats: timed rounds per system, one prompt.
        batch_repeats: timed rounds per system, 32 prompts.
    """
    torch.set_num_threads(1)
    pair = gpt2_small()
    theirs, ours = hugging_face(pair), lens(pair, 1)
    expected = theirs()["transformer.h.5.mlp.c_proj.weight"]
    error = largest_difference(ours().reconstruct("blocks.5.mlp.W_out"), expected)
    if error > 1e-4:
        raise RuntimeError(f"the gradients differ by {error}")
    one: Calls = {"hugging_face": theirs, "interp": ours}
    many: Calls = {"activations only": activations_only(pair, MANY), "interp": lens(pair, MANY)}
    one_seconds, many_seconds = cpu_seconds(one, repeats), cpu_seconds(many, batch_repeats)
    for system, call in one.items():
        report(
            "backward_lens", system, f"factors of 72 matrices, 1 x {COLUMNS}",
            timing(one_seconds, system, "hugging_face"), work(call), memory(call),
            claim=CLAIM, claim_mib=CLAIM_MIB, gradient_difference=error,
        )  # fmt: skip
    for system, call in many.items():
        report(
            "backward_lens", system, f"factors of 72 matrices, {MANY} x {COLUMNS}",
            timing(many_seconds, system, "activations only"), work(call), memory(call), claim=CLAIM_MANY,
        )  # fmt: skip


def targets(pair: Pair, rows: int) -> Tensor:
    """The same random targets at every call."""
    return pair.tokens(rows, 1)[:, 0]


def lens(pair: Pair, rows: int) -> Callable[[], GradientFactors]:
    """Ours: every matrix of every layer in one pass."""
    batch = interp.Batch(pair.tokens(rows, COLUMNS))
    return lambda: gradient_factors(pair.ours, batch, targets(pair, rows))


def hugging_face(pair: Pair) -> Callable[[], dict[str, Tensor]]:
    """A forward and `.backward()` with the gradients of all parameters, which are taken off the model again."""
    tokens, target = pair.tokens(1, COLUMNS), targets(pair, 1)

    def call() -> dict[str, Tensor]:
        pair.hf.requires_grad_(True)
        F.cross_entropy(pair.hf_logits(tokens)[:, -1], target).backward()
        found = {name: p.grad for name, p in pair.hf.named_parameters() if p.grad is not None}
        pair.hf.zero_grad(set_to_none=True)
        pair.hf.requires_grad_(False)
        return found

    return call


def activations_only(pair: Pair, rows: int) -> Callable[[], Tensor]:
    """Hugging Face's forward and the gradient at its embeddings: parameters frozen, logits of the last token only."""
    tokens, target = pair.tokens(rows, COLUMNS), targets(pair, rows)
    embedded = pair.hf.get_input_embeddings()(tokens).detach()

    def call() -> Tensor:
        leaf = embedded.clone().requires_grad_()
        logits = pair.hf(inputs_embeds=leaf, use_cache=False, logits_to_keep=1).logits[:, -1]
        (found,) = torch.autograd.grad(F.cross_entropy(logits, target, reduction="sum"), leaf)
        return found

    return call


if __name__ == "__main__":
    tyro.cli(main)
