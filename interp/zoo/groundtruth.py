"""Models with weights written by hand: their circuit is known, so every method can be scored on it."""

import math
import re
import string
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import NotNegative, PositiveCount
from interp.model.block import FeedForward
from interp.model.config import Learned, ModelConfig, NoNorm
from interp.model.transformer import Transformer

PREVIOUS = (0, 1)
"""Layer and head that attend to the previous token."""
INDUCTION = (1, 2)
"""Layer and head that do induction."""
SYMBOLS = ("<|bos|>", *string.ascii_letters, *string.digits, " ")
WIDTH = 64
"""Width of each of the four subspaces of the stream, and of a head."""
SHARPNESS = 60.0
"""Gap between the attention score of the planted target and all other scores; softmax leaves e^-60 elsewhere."""


class Alphabet:
    """A tokenizer with one token per symbol; id 0 is BOS, which no text contains."""

    bos_id: int | None = 0
    eos_id: int | None = 0
    pad_id: int = 0

    def __init__(self, symbols: Sequence[str] = SYMBOLS) -> None:
        """symbols: all symbols in the order of their ids; by default BOS, letters, digits and space."""
        self.symbols = tuple(symbols)
        self._ids = {symbol: i for i, symbol in enumerate(self.symbols)}
        longest_first = sorted(self.symbols[1:], key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, read with the longest symbol that matches at each place; ValueError where none does."""
        ids, at = [], 0
        while at < len(text):
            match = self._pattern.match(text, at)
            if match is None:
                usual = self.symbols == SYMBOLS
                known = "letters, digits and spaces" if usual else f"symbols {', '.join(self.symbols[1:])}"
                raise ValueError(f"{known} are required, got {text[at]!r}")
            ids.append(self._ids[match[0]])
            at = match.end()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The symbols of these ids."""
        return "".join(self.symbols[int(i)] for i in ids)

    def piece(self, token: int) -> str:
        """The symbol of one id."""
        return self.symbols[int(token)]


@public()
def induction(n_ctx: PositiveCount = 128, noise: NotNegative = 0.02, seed: int = 0) -> Transformer:
    """A 2-layer attention-only model with one previous-token head and one induction head by K-composition.

    The stream has four subspaces: the token (one-hot), the position, the previous token, the prediction. L0H1
    matches a query's position rotated back by one to the key's position and copies the token into "previous token".
    L1H2 matches the query's token with the key's previous token and copies the key's token into "prediction",
    which is all that the unembedding reads. The other heads are Gaussian noise of std `noise`.
    """
    config = ModelConfig(
        n_layers=2, d_model=4 * WIDTH, n_heads=4, d_head=WIDTH, n_ctx=n_ctx, d_vocab=len(SYMBOLS),
        position=Learned(), norm=NoNorm(), final_norm=False, qkv_bias=False, out_bias=False, attn_scale=1.0,
    )  # fmt: skip
    model = noisy(config, noise, torch.Generator().manual_seed(seed))
    token, position, previous, prediction = torch.eye(4 * WIDTH).split(WIDTH)
    names = config.d_vocab
    model.embed.weight.copy_(token[:names])
    assert model.pos_embed is not None
    model.pos_embed.weight.copy_(_position_codes(n_ctx) @ position)
    assert model.unembed is not None
    model.unembed.weight.copy_(20.0 * prediction[:names])
    back = _rotation(-1) * (SHARPNESS / (WIDTH / 2))
    plant_head(model, PREVIOUS, query=position.T @ back, key=position.T, value=token.T, out=previous)
    plant_head(model, INDUCTION, query=token.T * SHARPNESS, key=previous.T, value=token.T, out=prediction)
    return model


def _frequencies() -> Float[Tensor, "half"]:
    """Frequencies w of the position code: sum_w cos(w n) is WIDTH/2 at n = 0, -WIDTH/2 at n = WIDTH, else 0."""
    half = WIDTH // 2
    return math.pi * (torch.arange(half) + 0.5) / half


def _position_codes(n: int) -> Float[Tensor, "n e"]:
    """Position codes, cosines then sines of w i; the dot product of two of them depends only on their distance."""
    angle = torch.arange(n)[:, None] * _frequencies()
    return torch.cat((angle.cos(), angle.sin()), 1)


def _rotation(steps: int) -> Float[Tensor, "e e"]:
    """The rotation that takes the code of position i to that of position i + steps, in row convention."""
    angle = _frequencies() * steps
    cos, sin = torch.diag(angle.cos()), torch.diag(angle.sin())
    return torch.cat((torch.cat((cos, sin), 1), torch.cat((-sin, cos), 1)), 0)


# --- writing weights by hand ------------------------------------------------------------------------------------------


def noisy(config: ModelConfig, noise: float, generator: torch.Generator) -> Transformer:
    """A frozen model with every parameter drawn from N(0, noise^2)."""
    with torch.random.fork_rng(devices=[]):  # which the first weights, overwritten here, would move on
        model = Transformer(config).requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * noise)
    return model


def plant_head(
    model: Transformer,
    where: tuple[int, int],
    *,
    query: Float[Tensor, "d e"],
    key: Float[Tensor, "d e"],
    value: Float[Tensor, "d e"],
    out: Float[Tensor, "e d"],
) -> None:
    """Write W_Q, W_K, W_V and W_O (row convention) of the head at (layer, head) into the fused parameters."""
    layer, head = where
    attn = model.block(layer).attn
    for name, matrix in zip("qkv", (query, key, value), strict=True):
        attn.part(name)[0][head].copy_(matrix.T)
    columns = slice(head * attn.d_head, (head + 1) * attn.d_head)
    attn.out.weight[:, columns].copy_(out.T)


def plant_neurons(
    model: Transformer,
    layer: int,
    *,
    into: Float[Tensor, "d m"],
    bias: Float[Tensor, "m"],
    out: Float[Tensor, "m d"],
    offset: Float[Tensor, "d"] | None = None,
) -> None:
    """Write the first m neurons of a layer's MLP, `act(x into + bias) out`, and add `offset` to what the layer writes.

    The other neurons keep their weights.
    """
    mlp = model.block(layer).mlp
    assert isinstance(mlp, FeedForward)
    n = len(bias)
    mlp.into.weight[:n].copy_(into.T)
    mlp.into.bias[:n].copy_(bias)
    mlp.out.weight[:, :n].copy_(out.T)
    if offset is not None:
        mlp.out.bias.add_(offset)
