"""Two circuits that recall: a fact kept as key and value in an MLP, and a fact after a fact, one head for each."""

from string import ascii_lowercase, ascii_uppercase

import torch

from interp.zoo.planted_parts import (
    END,
    LENGTH,
    MOVED,
    NOISE,
    PREDICTION,
    TOKEN,
    Planted,
    becomes,
    blank,
    different,
    fillers,
    generator_of,
    looks,
    placed,
    rests,
    symbols,
)
from interp.zoo.planted_weights import plant_head, plant_neurons


def fact_memory(seed: int = 0, n: int = 16, *, noise: float = NOISE) -> Planted:
    """A key-value memory in an MLP: "...c...1" -> the object that relation 1 gives for subject c.

    Subjects are a to h, relations 0 to 2, objects capitals. L0H1 moves the subject to the relation, where MLP 1 has
    one neuron per fact: it recognises both, `relu(2 relation + 2 subject - 3)`, and writes the object. (MLPs as
    key-value memories: Geva et al. 2021, arXiv:2012.14913.)
    The corrupted prompt has another subject at another place, and another relation; it answers `wrong`.

    >>> fact_memory(n=4).clean.shape
    torch.Size([4, 9])
    """
    generator = generator_of(seed, n)
    model = blank(noise, generator)
    relations, subjects = symbols("012"), symbols("abcdefgh")
    capitals = symbols(ascii_uppercase)
    objects = capitals[torch.randperm(len(capitals), generator=generator)]
    facts = objects[: len(relations) * len(subjects)].reshape(len(relations), len(subjects))
    find = TOKEN.T @ (rests() + looks(relations, subjects))
    plant_head(model, (0, 1), query=find, key=TOKEN.T, value=TOKEN.T, out=MOVED)
    relation, subject = torch.cartesian_prod(relations, subjects).T
    into = 2.0 * (TOKEN[relation] + MOVED[subject]).T
    plant_neurons(model, 1, into=into, bias=-3.0 * torch.ones(facts.numel()), out=PREDICTION[facts.flatten()])

    who, what = (different(generator, n, torch.arange(len(of))) for of in (subjects, relations))
    where = different(generator, n, torch.arange(1, LENGTH - 1))
    tokens, last = fillers(generator, n, symbols("3456789")), torch.full((n,), LENGTH - 1)
    clean, corrupt = (
        placed(placed(tokens, at, subjects[s]), last, relations[r])
        for at, s, r in zip(where, who, what, strict=True)
    )
    answer, wrong = facts[what, who]
    edges = {
        "L0.resid->L0H1.k", "L0.resid->L0H1.v", "L0H1->L1.mlp", "L0.resid->L1.mlp", "L1.mlp->logits",
    }  # fmt: skip
    note = (
        "a head and an MLP in a row: every edge is needed and each shows alone; the memory is an AND of subject and "
        "relation, so half a key gives no object at all"
    )
    return Planted("fact_memory", model, frozenset(edges), clean, corrupt, answer, wrong, note)


def two_hop(seed: int = 0, n: int = 16, *, noise: float = NOISE) -> Planted:
    """A fact after a fact by V-composition: "..x..0.. " -> z, where L0H2 knows x -> y and L1H0 knows y -> z.

    x and y are small letters, z is a capital. L0H2 looks from the marker 0 at x and writes y there; L1H0 looks
    from the end at the marker and translates what was written. No head knows x -> z: only the virtual head, the product
    of both OV circuits, does (Elhage et al. 2021, "Virtual attention heads").
    The corrupted prompt has another x and has x and the marker at other places; it answers `wrong`.

    >>> sorted(two_hop(n=4).nodes)
    ['L0.resid', 'L0H2', 'L1H0', 'logits']
    """
    generator = generator_of(seed, n)
    model = blank(noise, generator)
    letters, capitals, marker = symbols(ascii_lowercase), symbols(ascii_uppercase), symbols("0")
    first, second = (torch.randperm(len(letters), generator=generator) for _ in range(2))
    hop = TOKEN.T @ becomes(letters, letters[first])
    find = TOKEN.T @ (rests() + looks(marker, letters))
    plant_head(model, (0, 2), query=find, key=TOKEN.T, value=hop, out=MOVED)
    hop = MOVED.T @ becomes(letters, capitals[second])
    find = TOKEN.T @ (rests() + looks(torch.tensor([END]), marker))
    plant_head(model, (1, 0), query=find, key=TOKEN.T, value=hop, out=PREDICTION)

    x = different(generator, n, torch.arange(len(letters)))
    early, late = (
        different(generator, n, torch.arange(1, 4)),
        different(generator, n, torch.arange(4, LENGTH - 1)),
    )
    tokens = fillers(generator, n, symbols("123456789"))
    clean, corrupt = (
        placed(placed(tokens, i, letters[x_i]), j, marker.expand(n))
        for i, j, x_i in zip(early, late, x, strict=True)
    )
    answer, wrong = capitals[second[first[x]]]
    edges = {
        "L0.resid->L0H2.q", "L0.resid->L0H2.k", "L0.resid->L0H2.v",
        "L0H2->L1H0.v", "L0.resid->L1H0.k", "L1H0->logits",
    }  # fmt: skip
    note = (
        "two heads in a row, the answer to the first question is the question of the second: every edge is needed and "
        "each shows alone; at the marker the stream holds y, which is neither in the prompt nor the answer"
    )
    return Planted("two_hop", model, frozenset(edges), clean, corrupt, answer, wrong, note)
