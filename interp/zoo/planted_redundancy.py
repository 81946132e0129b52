"""Two circuits that hide from the ablation of one part: a head with a backup, and two heads of which one suffices."""

from string import ascii_lowercase, ascii_uppercase

import torch

from interp.zoo.planted_parts import (
    END,
    LENGTH,
    MOVED,
    NOISE,
    PREDICTION,
    SHARPNESS,
    TOKEN,
    Planted,
    becomes,
    blank,
    fillers,
    generator_of,
    looks,
    placed,
    rests,
    symbols,
)
from interp.zoo.planted_weights import plant_head, plant_neurons

NEGATIVE = 0.25
"""What the negative head takes back of a prediction of 1; the backup head writes the rest, 1 - NEGATIVE."""


def backup(seed: int = 0, n: int = 16, *, noise: float = NOISE) -> Planted:
    """A name mover, a negative head that holds back and a backup head that waits: "...k... " -> k.

    The roles of Wang et al. 2022 (arXiv:2211.00593, section 3.4). Names are small letters.

    - L0H3, the name mover, looks from the end at the name and writes it with weight 1.
    - L1H1, the negative head: its query is the prediction that L0H3 wrote, it looks for that name and writes -1/4 of it
      (copy suppression, McDougall et al. 2023, arXiv:2310.04625).
    - L1H2, the backup: it looks from the end at the name as L0H3 does, but its query subtracts the prediction that L0H3
      wrote: it rests while there is one. Where there is none it writes the name with weight 3/4.

    So the prediction is 3/4 with the name mover (1 - 1/4: the backup rests) and 3/4 without it (the negative head finds
    nothing to suppress, the backup speaks). The corrupted prompt has a digit, `wrong`, in place of the name: no head
    finds anything, all logits are 0 but for noise.

    >>> circuit = backup(n=4)
    >>> sorted(circuit.hidden)[:2]
    ['L0.resid->L0H3.k', 'L0.resid->L0H3.v']
    """
    generator = generator_of(seed, n)
    model = blank(noise, generator)
    names, end = symbols(ascii_lowercase), torch.tensor([END])
    find, name = TOKEN.T @ (rests() + looks(end, names)), TOKEN.T @ becomes(names, names)
    plant_head(model, (0, 3), query=find, key=TOKEN.T, value=name, out=PREDICTION)
    same = TOKEN.T @ rests() + SHARPNESS * PREDICTION.T @ becomes(names, names)
    plant_head(model, (1, 1), query=same, key=TOKEN.T, value=name, out=-NEGATIVE * PREDICTION)
    unless = find - PREDICTION.T @ looks(names, names)
    plant_head(model, (1, 2), query=unless, key=TOKEN.T, value=name, out=(1 - NEGATIVE) * PREDICTION)

    tokens = fillers(generator, n, symbols("0123456789"))
    where = torch.randint(1, LENGTH - 1, (n,), generator=generator)
    answer = names[torch.randint(len(names), (n,), generator=generator)]
    wrong = tokens[torch.arange(n), where]
    shown = {
        "L0H3->logits", "L0H3->L1H1.q", "L0H3->L1H2.q",
        "L0.resid->L1H1.k", "L0.resid->L1H1.v", "L1H1->logits",
    }  # fmt: skip
    hidden = {
        "L0.resid->L0H3.k", "L0.resid->L0H3.v", "L0.resid->L1H2.k", "L0.resid->L1H2.v", "L1H2->logits",
    }  # fmt: skip
    note = (
        "silencing the name mover changes nothing, because its backup takes over; silencing the backup changes "
        "nothing, because it rests; both together leave no answer. Single edges see more: without L0H3->logits the "
        "answer is held back only (the backup still hears the name mover), without L0H3->L1H2.q it doubles (both "
        "speak), without the negative head it rises by a third"
    )
    return Planted(
        "backup", model, frozenset(shown | hidden), placed(tokens, where, answer), tokens, answer, wrong, note,
        hidden=frozenset(hidden),
    )  # fmt: skip


def either(seed: int = 0, n: int = 16, *, noise: float = NOISE) -> Planted:
    """An OR of two heads: "..k..K.. " -> k, and either of the two letters would do.

    L0H1 looks from the end at the small letter, L1H3 at the capital; both move it, as a small letter. MLP 1
    clamps their sum x: `4/3 [relu(x + 1/4) - relu(x - 3/4)] - 1/3` rises from 0 at x = 0 to 1 at x = 3/4 and stays
    there. With one head x = 1, with both x = 2: the prediction is 1 all the same. The corrupted prompt has digits in
    place of both letters, the first of them is `wrong`; no head finds anything, all logits are 0 but for noise.

    >>> circuit = either(n=4)
    >>> sorted(circuit.edges - circuit.hidden)
    ['L1.mlp->logits']
    """
    generator = generator_of(seed, n)
    model = blank(noise, generator)
    small, capital, end = symbols(ascii_lowercase), symbols(ascii_uppercase), torch.tensor([END])
    for where, seen in (((0, 1), small), ((1, 3), capital)):
        find, name = TOKEN.T @ (rests() + looks(end, seen)), TOKEN.T @ becomes(seen, small)
        plant_head(model, where, query=find, key=TOKEN.T, value=name, out=MOVED)
    ones = torch.ones(len(small))
    plant_neurons(
        model, 1,
        into=torch.cat((MOVED[small], MOVED[small])).T,
        bias=torch.cat((ones / 4, -ones * 3 / 4)),
        out=torch.cat((PREDICTION[small], -PREDICTION[small])) * 4 / 3,
        offset=-PREDICTION[small].sum(0) / 3,
    )  # fmt: skip

    tokens = fillers(generator, n, symbols("0123456789"))
    early = torch.randint(1, 4, (n,), generator=generator)
    late = torch.randint(4, LENGTH - 1, (n,), generator=generator)
    which = torch.randint(len(small), (n,), generator=generator)
    clean = placed(placed(tokens, early, small[which]), late, capital[which])
    hidden = {
        "L0.resid->L0H1.k", "L0.resid->L0H1.v", "L0H1->L1.mlp",
        "L0.resid->L1H3.k", "L0.resid->L1H3.v", "L1H3->L1.mlp",
    }  # fmt: skip
    note = (
        "ablating one head, or any edge of its branch, changes nothing: the read-out is saturated; both branches "
        "together leave no answer. Gradients at the clean prompt are 0 on both branches, at the corrupted one they are "
        "not"
    )
    return Planted(
        "either", model, frozenset({"L1.mlp->logits", *hidden}), clean, tokens, small[which],
        tokens[torch.arange(n), early], note, hidden=frozenset(hidden),
    )  # fmt: skip
