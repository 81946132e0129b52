"""Hand-built models that show what the literature found in large models and the trained demo models do not show.

`groundtruth-early-site` keeps its facts in an early MLP at the last token of the subject (Meng et al. 2022), and
`groundtruth-late-suppression` holds its answers back in the last layer (Lv et al. 2024). They have the stream, the
noise and the records of `interp.zoo.planted`; what is known of them is tested. No word about large models follows from
them: they say what a method shows where a mechanism is there for certain.
"""

from __future__ import annotations

from string import ascii_uppercase

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import Count, NotNegative
from interp.zoo.groundtruth import SYMBOLS, plant_head, plant_neurons
from interp.zoo.planted import (
    BOS,
    END,
    LENGTH,
    MOVED,
    NOISE,
    PREDICTION,
    SHARPNESS,
    TOKEN,
    Build,
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

__all__ = ["SHOWN", "early_site", "frequencies", "late_suppression"]

EDGE = 16.0
"""Input gain of a fact's neuron in the early site: its activation is 1 for the whole key and 0 from 1/16 below. It is
steep so that noise on the subject's embeddings can remove the fact, as it does in a trained model."""
SMALL = 0.25
"""Length of an embedding in `early_site`, 1 in the other models: noise of three of its standard deviations hides a name
from its readers, but is small beside what heads and MLPs write at that position afterwards."""
CONFIDENT = 0.5
"""Size of the answer that the mover writes, 10 logits: about .997 of probability without the last layer."""
HELD_BACK = 0.12
"""The most that each of the two parts of the last layer adds to a frequent symbol, 2.4 logits."""


@public()
def early_site(seed: int = 0, n: Count = 16, *, noise: NotNegative = NOISE) -> Planted:
    """A planted model that looks facts up early: "37af92 " -> the object of a f, read at the subject's last token.

    A subject is a first name, a to d, and a last name, e to h. At the last name L0H1 fetches the first name, MLP 0
    has one neuron per pair of names and writes half of the object there; from the end L1H2 looks for the place where
    an object is written, and doubles it. So causal tracing has an early site at the last subject token, through the
    MLP, and a late one at the last token, through attention; and the gradient of the answer is longest at that token.

    Args:
        seed: seed of the noise, the facts and the prompts.
        n: number of prompt pairs.
        noise: standard deviation of all parameters before the circuit is written over some of them.

    Returns:
        `Planted`: the model, the edges that it uses, and n pairs of prompts. The corrupted prompt has another
        subject, both names changed; its answer is `wrong`.

    Example:
        >>> early_site(n=4).clean.shape
        torch.Size([4, 9])
    """
    generator = generator_of(seed, n)
    model = blank(noise, generator)
    first, last, capitals = symbols("abcd"), symbols("efgh"), symbols(ascii_uppercase)
    facts = capitals[torch.randperm(len(capitals), generator=generator)][:16].reshape(4, 4)
    model.embed.weight.copy_(SMALL * TOKEN)
    token = TOKEN / SMALL
    find = token.T @ (rests() + looks(last, first))
    plant_head(model, (0, 1), query=find, key=token.T, value=token.T, out=MOVED)
    first_name, last_name = torch.cartesian_prod(first, last).T
    into = EDGE * (MOVED[first_name] + token[last_name]).T
    written = PREDICTION[facts.flatten()] / 2 + MOVED[END]  # MOVED[END] marks that an object stands here
    plant_neurons(model, 0, into=into, bias=torch.full((16,), 1 - 2 * EDGE), out=written)
    mark, asks = torch.zeros_like(TOKEN.T), torch.zeros_like(TOKEN.T)
    mark[:, 0], asks[:, 0] = MOVED[END] + token[BOS] / 2, SHARPNESS * token[END]
    plant_head(model, (1, 2), query=asks, key=mark, value=2 * PREDICTION.T, out=PREDICTION)

    who = different(generator, n, torch.arange(4)), different(generator, n, torch.arange(4))
    where = torch.randint(1, LENGTH - 2, (n,), generator=generator)
    tokens = fillers(generator, n, symbols("23456789"))
    clean, corrupt = (
        placed(placed(tokens, where, first[a]), where + 1, last[b]) for a, b in zip(*who, strict=True)
    )
    answer, wrong = (facts[a, b] for a, b in zip(*who, strict=True))
    edges = {
        "L0.resid->L0H1.v", "L0H1->L0.mlp", "L0.resid->L0.mlp", "L0.mlp->L1H2.v", "L1H2->logits",
    }  # fmt: skip
    note = (
        "a fact is looked up where its subject ends, long before it is asked for: restoring the first block, or its "
        "MLP alone, at that token brings the answer back"
    )
    return Planted("early_site", model, frozenset(edges), clean, corrupt, answer, wrong, note)


@public()
def late_suppression(seed: int = 0, n: Count = 16, *, noise: NotNegative = NOISE) -> Planted:
    """A planted model with a last layer that lowers its answer: "..k... " -> k, less sure than the layer before was.

    L0H1 moves the letter to the end, with 10 logits. In the last layer L1H3 looks from the end at the first token and
    writes what stands there, the average token; MLP 1 adds as much of it once an answer is written. Both lower the
    answer, which is rare, and raise the digits and the space, which are frequent (`frequencies`).

    Args:
        seed: seed of the noise and the prompts.
        n: number of prompt pairs.
        noise: standard deviation of all parameters before the circuit is written over some of them.

    Returns:
        `Planted`: the model, the edges that it uses, and n pairs of prompts. The corrupted prompt has another letter
        at that place; its answer is `wrong`.

    Example:
        >>> late_suppression(n=4).clean.shape
        torch.Size([4, 9])
    """
    generator = generator_of(seed, n)
    model = blank(noise, generator)
    letters, digits, end = symbols("abcdefgh"), symbols("0123456789"), torch.tensor([END])
    find = TOKEN.T @ (rests() + looks(end, letters))
    written = becomes(letters, letters) @ (
        CONFIDENT * PREDICTION + MOVED[END]
    )  # MOVED[END] marks that an answer is written
    plant_head(model, (0, 1), query=find, key=TOKEN.T, value=TOKEN.T, out=written)
    counts = frequencies()
    average = counts - counts.mean()
    average = HELD_BACK * (average / average.max()) @ PREDICTION
    value, out = torch.zeros_like(TOKEN.T), torch.zeros_like(TOKEN)
    value[0, 0], out[0] = 1.0, average  # the beginning of sequence has id 0
    plant_head(model, (1, 3), query=TOKEN.T @ rests() * 2, key=TOKEN.T, value=value, out=out)
    plant_neurons(model, 1, into=2 * MOVED[END][:, None], bias=-torch.ones(1), out=average[None])

    which = different(generator, n, letters)
    where = torch.randint(1, LENGTH - 1, (n,), generator=generator)
    tokens = fillers(generator, n, digits)
    clean, corrupt = (placed(tokens, where, letter) for letter in which)
    edges = {"L0.resid->L0H1.v", "L0H1->logits"}
    note = (
        "the last layer lowers a right answer by pushing towards the average token: without its head, or its MLP, the "
        "answer is more probable. They do so in both prompts alike, so that no exchange between the two shows them"
    )
    answer, wrong = which
    return Planted("late_suppression", model, frozenset(edges), clean, corrupt, answer, wrong, note)


def frequencies() -> Float[Tensor, "v"]:
    """How often each symbol stands in a text of `late_suppression`: digits and the space ten times a letter.

    Returns:
        [v], sum 1.

    Example:
        >>> frequencies().shape
        torch.Size([64])
    """
    counts = torch.tensor([10.0 if symbol.isdigit() or symbol == " " else 1.0 for symbol in SYMBOLS])
    return counts / counts.sum()


SHOWN: dict[str, Build] = {"early_site": early_site, "late_suppression": late_suppression}
"""The models of this file by name; `python -m experiments.board` judges methods on those of `planted.PLANTED`."""
