"""Hand-built models with known circuits: what a method of circuit discovery should find in them is written down.

Five small models, weights in closed form, with noise in every head and neuron that is not planted. `PLANTED` is the
table of them; each is a function of the seed and of the number of pairs of prompts. What each edge is worth is verified
by brute force in the tests, one exchange of each edge's sender at a time.

The stream has three subspaces of one dimension per symbol: the token, what was moved from elsewhere, the prediction
(all that the unembedding reads). There are no positions and no norms. A prompt is a beginning of sequence, digits as
filler among which the content stands, and a last symbol that asks. A planted head is two tables over symbols: who looks
at whom, and what becomes of the symbol that it found. A query that finds nothing rests on the beginning of sequence,
which has no content.
"""

from dataclasses import dataclass, replace
from string import ascii_lowercase, ascii_uppercase
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import Count, NotNegative
from interp.core.viewer import Brief
from interp.model.config import MLP, ModelConfig, NoNorm, NoPosition
from interp.model.parts import Edge, Part
from interp.model.transformer import Transformer
from interp.zoo import groundtruth
from interp.zoo.groundtruth import SYMBOLS, noisy, plant_head, plant_neurons

NOISE = 0.02
"""Standard deviation of every weight that is not planted."""
SHARPNESS = 12.0
"""Attention score of a symbol that a head looks for; BOS gets half of it. Other positions then share 0.25 % of the
attention, and yet the softmax is not saturated: gradients see the score."""
GAIN = 20.0
"""Logits per unit of prediction."""
WIDTH = len(SYMBOLS)
TOKEN, MOVED, PREDICTION = torch.eye(3 * WIDTH).split(WIDTH)
BOS, END = 0, SYMBOLS.index(" ")
LENGTH = 9
"""Symbols of a prompt."""


@public()
@dataclass(frozen=True, eq=False, repr=False)
class Planted(Brief):
    """A model with a known circuit, and aligned pairs of prompts on which the circuit shows.

    Built by hand in this file, or compiled from a program (`interp.lab.rasp.Compiled.planted`).

    Nodes and edges are named as in `EdgeGraph`: `L0.resid` (the embeddings), `L0H1`, `L0.mlp`, `logits`; an edge into
    a head names the input that it receives on, `L0H1->L1H2.k`.

    An edge belongs to the circuit if what it carries differs between the two prompts of a pair and matters to the
    answer. What is alike on both sides (where a head stands, the symbol that asks) is no part of it: no exchange
    between the two prompts can show it.
    """

    name: str
    model: Transformer
    edges: frozenset[str]
    """Every edge that carries the behaviour, also those that only act when another edge is lost."""
    clean: Int[Tensor, "n p"]
    """Prompts with `answer` as their next token."""
    corrupt: Int[Tensor, "n p"]
    """Prompts of equally many symbols; the next token is `wrong`, or neither of the two."""
    answer: Int[Tensor, "n"]
    wrong: Int[Tensor, "n"]
    note: str
    """The lesson of the circuit: what an ablation of one part sees of it, and what it does not."""
    hidden: frozenset[str] = frozenset()
    """Edges of the circuit whose ablation alone has no effect, because other edges do their work."""

    @property
    def nodes(self) -> frozenset[str]:
        """Every node at an end of an edge of the circuit."""
        edges = [Edge.of(edge) for edge in self.edges]
        return frozenset(node for edge in edges for node in (str(edge.sender), _node(edge.receiver)))


def _node(receiver: Part) -> str:
    """The node that an edge's receiver belongs to: `L1H2` for the input `L1H2.k`."""
    kinds = {"query": "head", "key": "head", "value": "head", "mlp_input": "mlp"}
    return str(replace(receiver, kind=kinds.get(receiver.kind, receiver.kind)))


def generator_of(seed: int, n: int) -> torch.Generator:
    """The generator that a model and then its n pairs of prompts are drawn with; ValueError for fewer than one pair."""
    if n < 1:
        raise ValueError(f"n >= 1 examples are required, got {n}")
    return torch.Generator().manual_seed(seed)


def blank(noise: float, generator: torch.Generator) -> Transformer:
    """Two layers of four heads and an MLP, all noise, between a clean embedding and a clean unembedding."""
    config = ModelConfig(
        n_layers=2, d_model=3 * WIDTH, n_heads=4, d_head=WIDTH, n_ctx=128, d_vocab=WIDTH, mlp=MLP(WIDTH, act="relu"),
        position=NoPosition(), norm=NoNorm(), final_norm=False, qkv_bias=False, out_bias=False, attn_scale=1.0,
    )  # fmt: skip
    model = noisy(config, noise, generator).eval()
    model.embed.weight.copy_(TOKEN)
    assert model.unembed is not None
    model.unembed.weight.copy_(GAIN * PREDICTION)
    return model


def symbols(text: str) -> Int[Tensor, "n"]:
    """Token ids of the characters of a text."""
    return torch.tensor([SYMBOLS.index(c) for c in text])


def looks(readers: Int[Tensor, "r"], targets: Int[Tensor, "t"]) -> Float[Tensor, "v v"]:
    """Attention scores by query symbol and key symbol, SHARPNESS where a reader meets a target, else 0."""
    table = torch.zeros(WIDTH, WIDTH)
    table[readers[:, None], targets] = SHARPNESS
    return table


def rests() -> Float[Tensor, "v v"]:
    """Attention scores that every planted head has besides: half of SHARPNESS on BOS, whatever the query symbol."""
    return looks(torch.arange(WIDTH), torch.tensor([BOS])) / 2


def becomes(sources: Int[Tensor, "n"], images: Int[Tensor, "n"]) -> Float[Tensor, "v v"]:
    """The 0/1 matrix that maps each source symbol to its image, and every other symbol to zero."""
    table = torch.zeros(WIDTH, WIDTH)
    table[sources, images] = 1.0
    return table


def fillers(generator: torch.Generator, n: int, digits: Int[Tensor, "f"]) -> Int[Tensor, "n p"]:
    """Prompts without content: BOS, random digits, and the final symbol that asks."""
    tokens = digits[torch.randint(len(digits), (n, LENGTH), generator=generator)]
    tokens[:, 0], tokens[:, -1] = BOS, END
    return tokens


def different(generator: torch.Generator, n: int, choices: Int[Tensor, "c"]) -> Int[Tensor, "2 n"]:
    """Two different random choices per example: one for the clean prompt, one for the corrupted."""
    return choices[torch.rand(n, len(choices), generator=generator).argsort(1)[:, :2].T]


def placed(
    tokens: Int[Tensor, "n p"], at: Int[Tensor, "n"], what: Int[Tensor, "n"] | int
) -> Int[Tensor, "n p"]:
    """A copy of the prompts in which row i has the symbol `what` (one, or one per row) at position `at[i]`."""
    return tokens.scatter(1, at[:, None], torch.as_tensor(what).expand(len(at))[:, None])


__all__ = ["PLANTED", "Planted", "backup", "either", "fact_memory", "induction", "two_hop"]

_PERIOD = 8
NEGATIVE = 0.25
"""Share of a prediction of 1 that the negative head takes back; the backup head writes the rest, 1 - NEGATIVE."""


@public()
def induction(seed: int = 0, n: Count = 16, *, noise: NotNegative = NOISE) -> Planted:
    """Induction by K-composition, the model of `groundtruth.induction`: eight symbols, then one of them again.

    L0H1 writes the previous symbol, L1H2 looks for the place where it is the present one. The corrupted prompt
    has eight other symbols and repeats one from another place; it answers `wrong`.

    Example:
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


# --- recall: a fact kept as key and value in an MLP, and a fact after a fact, one head for each -----------------------


@public()
def fact_memory(seed: int = 0, n: Count = 16, *, noise: NotNegative = NOISE) -> Planted:
    """A key-value memory in an MLP: "...c...1" -> the object that relation 1 gives for subject c.

    Subjects are a to h, relations 0 to 2, objects capitals. L0H1 moves the subject to the relation, where MLP 1 has
    one neuron per fact: it recognises both, `relu(2 relation + 2 subject - 3)`, and writes the object. (MLPs as
    key-value memories: Geva et al. 2021, arXiv:2012.14913.)
    The corrupted prompt has another subject at another place, and another relation; it answers `wrong`.

    Example:
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


@public()
def two_hop(seed: int = 0, n: Count = 16, *, noise: NotNegative = NOISE) -> Planted:
    """A fact after a fact by V-composition: "..x..0.. " -> z, where L0H2 knows x -> y and L1H0 knows y -> z.

    x and y are small letters, z is a capital. L0H2 looks from the marker 0 at x and writes y there; L1H0 looks
    from the end at the marker and maps y to z. No single head maps x to z: only the virtual head does, the product of
    both OV circuits (Elhage et al. 2021, "Virtual attention heads").
    The corrupted prompt has another x and has x and the marker at other places; it answers `wrong`.

    Example:
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


# --- hidden from the ablation of one part: a head with a backup, and two heads of which one suffices ------------------


@public()
def backup(seed: int = 0, n: Count = 16, *, noise: NotNegative = NOISE) -> Planted:
    """A planted model with a name mover, a negative head, and a backup head that waits: "...k... " -> k.

    The roles of Wang et al. 2022 (arXiv:2211.00593, section 3.4). Names are small letters.

    - L0H3, the name mover, looks from the end at the name and writes it with weight 1.
    - L1H1, the negative head: its query is the prediction that L0H3 wrote, it looks for that name and writes -1/4 of it
      (copy suppression, McDougall et al. 2023, arXiv:2310.04625).
    - L1H2, the backup: it looks from the end at the name as L0H3 does, but its query subtracts the prediction that L0H3
      wrote: it rests while there is one. Where there is none it writes the name with weight 3/4.

    So the prediction is 3/4 with the name mover (1 - 1/4: the backup rests) and 3/4 without it (the negative head finds
    nothing to suppress, the backup speaks). The corrupted prompt has a digit, `wrong`, in place of the name: no head
    finds anything, all logits are 0 but for noise.

    Example:
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


@public()
def either(seed: int = 0, n: Count = 16, *, noise: NotNegative = NOISE) -> Planted:
    """An OR of two heads: "..k..K.. " -> k, and either of the two letters would do.

    L0H1 looks from the end at the small letter, L1H3 at the capital; both move it, as a small letter. MLP 1
    clamps their sum x: `4/3 [relu(x + 1/4) - relu(x - 3/4)] - 1/3` rises from 0 at x = 0 to 1 at x = 3/4 and stays
    there. With one head x = 1, with both x = 2: the prediction is 1 all the same. The corrupted prompt has digits in
    place of both letters, the first of them is `wrong`; no head finds anything, all logits are 0 but for noise.

    Example:
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


@runtime_checkable
class Build(Protocol):
    """A function that builds one of the models."""

    def __call__(self, seed: int = 0, n: int = 16, *, noise: float = NOISE) -> Planted:
        """The model and n pairs of prompts; `n` does not change the weights."""
        ...


PLANTED: dict[str, Build] = {
    "induction": induction, "fact_memory": fact_memory, "two_hop": two_hop, "backup": backup, "either": either,
}  # fmt: skip
"""The five models by name."""
