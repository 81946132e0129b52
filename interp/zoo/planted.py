"""Hand-built models with known circuits: what a method of circuit discovery should find in them is written down.

Five small models, weights in closed form, with noise in every head and neuron that is not planted. `PLANTED` is the
table of them; each is a function of the seed and of the number of pairs of prompts. What each edge is worth is verified
by brute force in the tests, one exchange of each edge's sender at a time.
"""

from typing import Protocol, runtime_checkable

import torch

from interp.zoo import groundtruth
from interp.zoo.planted_facts import fact_memory, two_hop
from interp.zoo.planted_parts import BOS, NOISE, Planted, different, generator_of
from interp.zoo.planted_redundancy import backup, either

__all__ = ["PLANTED", "Planted", "backup", "either", "fact_memory", "induction", "two_hop"]

_PERIOD = 8


def induction(seed: int = 0, n: int = 16, *, noise: float = NOISE) -> Planted:
    """Induction by K-composition, the model of `groundtruth.induction`: eight symbols, then one of them again.

    L0H1 writes the previous symbol, L1H2 looks for the place where it is the present one. The corrupted prompt
    has eight other symbols and repeats one from another place; it answers `wrong`.

    >>> induction(n=4).clean.shape
    torch.Size([4, 10])
    """
    generator = generator_of(seed, n)
    model = groundtruth.induction(noise=noise, seed=seed).eval()
    symbols = torch.rand(n, len(groundtruth.SYMBOLS) - 1, generator=generator).argsort(1) + 1
    once = symbols[:, : 2 * _PERIOD].split(_PERIOD, 1)
    where = different(generator, n, torch.arange(_PERIOD - 1))[..., None]
    start = torch.full((n, 1), BOS)
    clean, corrupt = (torch.cat((start, s, s.gather(1, at)), 1) for s, at in zip(once, where, strict=True))
    answer, wrong = (s.gather(1, at + 1)[:, 0] for s, at in zip(once, where, strict=True))
    edges = {
        "L0.resid->L0H1.v", "L0H1->L1H2.k", "L0.resid->L1H2.q", "L0.resid->L1H2.v", "L1H2->logits",
    }  # fmt: skip
    note = (
        "K-composition: every edge is needed and each shows alone. L0H1 finds the previous token by its position, "
        "alike in both prompts, so its queries and keys carry no part of the difference. The softmax of L1H2 is "
        "saturated: gradients at either prompt are 0 on its queries and keys"
    )
    return Planted("induction", model, frozenset(edges), clean, corrupt, answer, wrong, note)


@runtime_checkable
class Build(Protocol):
    """A function that builds one of the models."""

    def __call__(self, seed: int = 0, n: int = 16, *, noise: float = NOISE) -> Planted:
        """The model, and n pairs of prompts; n does not change the weights."""
        ...


PLANTED: dict[str, Build] = {
    "induction": induction, "fact_memory": fact_memory, "two_hop": two_hop, "backup": backup, "either": either,
}  # fmt: skip
"""The five models by name."""
