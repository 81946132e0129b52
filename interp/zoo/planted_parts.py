"""What the hand-built circuits are made of: their record, their stream and alphabet, and the tables of their heads.

The stream has three subspaces of one dimension per symbol: the token, what was moved from elsewhere, the prediction
(all that the unembedding reads). There are no positions and no norms. A prompt is a beginning of sequence, digits as
filler among which the content stands, and a last symbol that asks. A planted head is two tables over symbols: who looks
at whom, and what becomes of the symbol that it found. A query that finds nothing rests on the beginning of sequence,
which has no content.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.model.config import MLP, ModelConfig, NoNorm, NoPosition
from interp.model.parts import Edge, Part
from interp.model.transformer import Transformer
from interp.zoo.groundtruth import SYMBOLS, noisy

NOISE = 0.02
"""Standard deviation of every weight that is not planted."""
SHARPNESS = 12.0
"""Score of a symbol that a head looks for; rest gets half. Sharp (0.25 % elsewhere), yet gradients see the score."""
GAIN = 20.0
"""Logits per unit of prediction."""
WIDTH = len(SYMBOLS)
TOKEN, MOVED, PREDICTION = torch.eye(3 * WIDTH).split(WIDTH)
BOS, END = 0, SYMBOLS.index(" ")
LENGTH = 9
"""Symbols of a prompt."""


@dataclass(frozen=True, eq=False)
class Planted:
    """A model with a known circuit, and aligned pairs of prompts on which the circuit shows.

    Nodes and edges are named as in `EdgeGraph`: `L0.resid` (the embeddings), `L0H1`, `L0.mlp`, `logits`; an edge into
    a head names the input that it receives on, `L0H1->L1H2.k`.

    An edge belongs to the circuit if what it carries differs between the two prompts of a pair and matters to the
    answer. What is alike on both sides (where a head stands, the symbol that asks) is no part of it: no exchange
    between the two prompts can show it.
    """

    name: str
    model: Transformer
    edges: frozenset[str]
    """Every edge that carries the behaviour, those that only stand in for another one included."""
    clean: Int[Tensor, "n p"]
    """Prompts whose next token is `answer`."""
    corrupt: Int[Tensor, "n p"]
    """The same number of symbols; the next token is `wrong`, or neither of the two."""
    answer: Int[Tensor, "n"]
    wrong: Int[Tensor, "n"]
    note: str
    """What the circuit teaches: what an ablation of one part sees of it, and what it does not."""
    hidden: frozenset[str] = frozenset()
    """Edges of the circuit whose loss alone changes nothing, because others do their work."""

    @property
    def nodes(self) -> frozenset[str]:
        """Every node at an end of an edge of the circuit."""
        edges = [Edge.of(edge) for edge in self.edges]
        return frozenset(node for edge in edges for node in (str(edge.sender), _node(edge.receiver)))


def _node(receiver: Part) -> str:
    """The node that reads an input."""
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
    """Ids of these characters."""
    return torch.tensor([SYMBOLS.index(c) for c in text])


def looks(readers: Int[Tensor, "r"], targets: Int[Tensor, "t"]) -> Float[Tensor, "v v"]:
    """Scores of a head by the symbols of query and key: every reader looks at every target."""
    table = torch.zeros(WIDTH, WIDTH)
    table[readers[:, None], targets] = SHARPNESS
    return table


def rests() -> Float[Tensor, "v v"]:
    """Scores that every planted head has besides: half a look at the beginning of sequence, whatever the symbol."""
    return looks(torch.arange(WIDTH), torch.tensor([BOS])) / 2


def becomes(sources: Int[Tensor, "n"], images: Int[Tensor, "n"]) -> Float[Tensor, "v v"]:
    """The matrix that turns each source symbol into its image and every other one into nothing."""
    table = torch.zeros(WIDTH, WIDTH)
    table[sources, images] = 1.0
    return table


def fillers(generator: torch.Generator, n: int, digits: Int[Tensor, "f"]) -> Int[Tensor, "n p"]:
    """Prompts without content: a beginning of sequence, random digits, the symbol that asks."""
    tokens = digits[torch.randint(len(digits), (n, LENGTH), generator=generator)]
    tokens[:, 0], tokens[:, -1] = BOS, END
    return tokens


def different(generator: torch.Generator, n: int, choices: Int[Tensor, "c"]) -> Int[Tensor, "2 n"]:
    """Two different random choices per example: one for the clean prompt, one for the corrupted."""
    return choices[torch.rand(n, len(choices), generator=generator).argsort(1)[:, :2].T]


def placed(
    tokens: Int[Tensor, "n p"], at: Int[Tensor, "n"], what: Int[Tensor, "n"] | int
) -> Int[Tensor, "n p"]:
    """The prompts with this symbol at this place."""
    return tokens.scatter(1, at[:, None], torch.as_tensor(what).expand(len(at))[:, None])
