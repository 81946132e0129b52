"""Claims about attention heads: where they look, what feeds them, and what is lost without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from interp.causal import path_patch
from interp.core.results import frame
from interp.data.batch import Batch
from interp.findings.claim import Claim, Measured, Region
from interp.findings.setting import CHOOSING, PERIOD, Head, Setting
from interp.model.config import Rotary
from interp.model.edits import Edit, Zero
from interp.passes.metrics import logit_difference
from interp.weights import composition
from interp.weights.head_circuits import HeadCircuits
from interp.weights.successor import known_sequences, successor_hits

FEEDING = 6
"""Rows on which the head is found that feeds induction heads: every head before them is patched in each."""


def looks(setting: Setting, score: str, back: int, first: int) -> Measured:
    """The head that is best on other rows: its attention so many tokens back, from a column on, minus even attention.

    Args:
        setting: the model.
        score: the score of `interp.heads` by which the head is chosen.
        back: how many tokens back the attention counts.
        first: the first query, counted from the first random token.

    Returns:
        The mean over rows.
    """
    (head,) = setting.best(score)
    begin = setting.begins + first

    def attention(rows: int, seed: int) -> Float[Tensor, "n"]:
        return setting.pattern(head, setting.repeats(rows, seed), partial(_back, back=back, begin=begin))

    values = setting.by_seed(attention)
    queries = torch.arange(begin, setting.begins + 2 * PERIOD)
    return Measured.mean(values, "rows", null=float((1 / (queries + 1)).mean()), about=head.part)


def looks_at_copies(setting: Setting, score: str, back: int) -> Measured:
    """Attention of the head that is best on other rows so many tokens back, minus the same where nothing repeats.

    Without the second a head that looks so far back whatever stands there would count.

    Args:
        setting: the model.
        score: the score of `interp.heads` by which the head is chosen.
        back: how many tokens back the attention counts, from the second half of each row.

    Returns:
        The mean over rows.
    """
    (head,) = setting.best(score)
    begin = setting.begins + PERIOD
    reduce = partial(_back, back=back, begin=begin)

    def attention(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        batch = setting.repeats(rows, seed)
        tokens = batch.tokens.clone()
        tokens[:, begin:] = tokens[:, begin:].roll(1, 0)  # the second half of another row
        return setting.pattern(head, batch, reduce), setting.pattern(head, Batch(tokens), reduce)

    pairs = setting.by_seed(attention)
    return Measured.mean(
        [found for found, _ in pairs], "rows", null=[other for _, other in pairs], about=head.part
    )


def _back(batch: Batch, pattern: Float[Tensor, "b q k"], *, back: int, begin: int) -> Float[Tensor, "b"]:
    queries = torch.arange(begin, pattern.shape[1], device=pattern.device)
    return pattern[:, queries, queries - back].mean(1)


def carries(setting: Setting) -> Measured:
    """How much more the loss on what repeats rises without the few best induction heads than without as many others."""
    found = setting.best("induction", setting.few)
    others = _beside(setting, found)

    def rises(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        batch = setting.repeats(rows, seed)
        base = _second(setting, batch, ())
        return _second(setting, batch, found) - base, _second(setting, batch, others) - base

    pairs = setting.by_seed(rises)
    return Measured.mean(
        [found for found, _ in pairs], "rows", null=[other for _, other in pairs], about=_named(found)
    )


def _second(setting: Setting, batch: Batch, heads: Sequence[Head]) -> Float[Tensor, "b"]:
    """The loss of each row on the second half, but for its first token, with heads at 0."""
    edits = [Edit(head.part, Zero()) for head in heads]
    return setting.losses(batch, edits)[:, setting.begins + PERIOD :].mean(1)


def _beside(setting: Setting, heads: Sequence[Head]) -> list[Head]:
    """As many other heads, of the same layers where they have others, drawn at random."""
    draw, taken = np.random.default_rng(CHOOSING), {(head.layer, head.index) for head in heads}
    found = []
    for head in heads:
        layers = [head.layer, *draw.permutation(setting.model.cfg.n_layers).tolist()]
        free = (
            (layer, index)
            for layer in layers
            for index in draw.permutation(setting.model.cfg.n_heads).tolist()
            if (layer, index) not in taken
        )
        place = next(free, None)
        if place is None:
            raise ValueError(f"it has {setting.model.cfg.n_layers * setting.model.cfg.n_heads} heads")
        taken.add(place)
        found.append(Head(*place))
    return found


def _named(heads: Sequence[Head]) -> str:
    shown = [head.part for head in heads[:4]]
    return ", ".join(shown) + (f" and {len(heads) - len(shown)} more" if len(heads) > len(shown) else "")


def feeder(setting: Setting) -> tuple[Head, list[Head]]:
    """The head whose path into the keys of the best induction heads matters most for copying, and those heads."""
    return setting.shared("feeder", _feeder)


def _feeder(setting: Setting) -> tuple[Head, list[Head]]:
    induction = [head for head in setting.best("induction", setting.few) if head.layer > 0]
    if not induction:
        raise ValueError("its best induction head is in the first layer")
    clean, corrupt, answer, wrong = _interrupted(setting)
    groups = setting.model.cfg.n_heads // setting.model.cfg.kv_heads
    receivers = sorted(
        {f"L{head.layer}G{head.index // groups}.k" if groups > 1 else f"{head.part}.k" for head in induction}
    )
    senders = [
        f"L{layer}H{index}"
        for layer in range(max(head.layer for head in induction))
        for index in range(setting.model.cfg.n_heads)
    ]
    found = frame(
        path_patch(
            setting.model, clean, corrupt, receivers, senders=senders, direction="noise",
            metric=logit_difference(answer.tolist(), wrong.tolist()), each=False,
        )
    )  # fmt: skip
    return Head.of(found.sort_values("value").part.iloc[0]), induction


def _interrupted(setting: Setting) -> tuple[Batch, Batch, Tensor, Tensor]:
    """Repeated rows cut in the second half, the same with another token before the one that comes next, and answers."""
    rows = setting.repeats(FEEDING, CHOOSING).tokens
    end = setting.begins + PERIOD + PERIOD // 2
    before = end - PERIOD
    corrupt = rows[:, : end + 1].clone()
    corrupt[:, before] = rows[:, before - 3]
    answer, wrong = rows[:, before + 1], rows[:, before - 2]
    return Batch(rows[:, : end + 1]), Batch(corrupt), answer, wrong


def fed(setting: Setting) -> Measured:
    """How far the head that feeds the keys of the induction heads looks at the token before, minus even attention."""
    head, _ = feeder(setting)

    def attention(rows: int, seed: int) -> Float[Tensor, "n"]:
        batch = setting.repeats(rows, seed)
        return setting.pattern(head, batch, partial(_back, back=1, begin=setting.begins + 1))

    queries = torch.arange(setting.begins + 1, setting.begins + 2 * PERIOD)
    return Measured.mean(
        setting.by_seed(attention), "rows", null=float((1 / (queries + 1)).mean()), about=f"{head.part} feeds"
    )


def composes(setting: Setting) -> Measured:
    """Of the heads before each induction head, the share that compose less with its keys than the one that feeds it."""
    head, induction = feeder(setting)
    rotary = isinstance(setting.model.cfg.position, Rotary)
    scores = composition(setting.model, "K", offset=1 if rotary else None)["relative"]
    shares = []
    for other in (other for other in induction if other.layer > head.layer):
        mine = scores.sel(dst=other.part).dropna("src")
        rest = mine.drop_sel(src=head.part).values
        shares.append(float((rest < float(mine.sel(src=head.part))).mean()) if rest.size else np.nan)
    if len(shares) < 3:
        raise ValueError(f"it has {len(shares)} induction heads after the head that feeds them")
    return Measured.mean(shares, "induction heads", null=0.5, about=f"{head.part} into {_named(induction)}")


def succeeds(setting: Setting) -> Measured:
    """Share of ordinal items that the weights of one head map to the next, minus chance.

    The head is the best on every other item, and those between count.
    """
    without = np.isnan(setting.scores("successor"))
    circuits = HeadCircuits(setting.model.transformer, folded=True, embedding="effective")
    by_sequence = [
        successor_hits(circuits, ids).cpu() for ids in known_sequences(setting.model.text).values()
    ]
    hits = torch.cat(by_sequence)
    chance = torch.cat([torch.full((len(each),), 1 / len(each)) for each in by_sequence])
    best = hits[::2].double().mean(0).masked_fill(torch.from_numpy(without), -1.0).argmax()
    head = Head(*divmod(int(best), hits.shape[2]))
    counted = hits[1::2, head.layer, head.index]
    return Measured.share(
        int(counted.sum()), len(counted), "items", null=float(chance[1::2].mean()), about=head.part
    )


OLSSON = "Olsson et al. 2022, In-context Learning and Induction Heads"
EVEN = "attention spread evenly over what the head may see"
UNREPEATED = "attention as far back where nothing repeats"
CLAIMS: Mapping[str, Claim] = {
    "previous-token-heads": Claim(
        "A head attends to the token before, whatever it is.", "Elhage et al. 2021, A Mathematical Framework",
        "attention of the best head to the token before, on random tokens", EVEN, Region(0.4), "attention",
        lambda setting: looks(setting, "previous_token", 1, 1),
    ),
    "duplicate-token-heads": Claim(
        "A head attends from a token to its earlier occurrence.", "Wang et al. 2022, Interpretability in the Wild",
        "attention of the best head to the same token earlier, on repeated random tokens", UNREPEATED, Region(0.3),
        "attention", lambda setting: looks_at_copies(setting, "duplicate_token", PERIOD),
    ),
    "induction-heads": Claim(
        "A head attends to what followed the earlier occurrence of a token.", OLSSON,
        "attention of the best head to the token after the same token earlier, on repeated random tokens", UNREPEATED,
        Region(0.3), "attention", lambda setting: looks_at_copies(setting, "induction", PERIOD - 1),
    ),
    "induction-carries-copying": Claim(
        "Without its few induction heads a model no longer predicts what repeats.", OLSSON,
        "rise of the loss on the second half of repeated random tokens without the best 3 % of heads for induction",
        "without as many other heads of the same layers", Region(0.5), "nats", carries,
    ),
    "previous-token-heads-feed-induction": Claim(
        "The keys of induction heads are made by a previous-token head.", "Elhage et al. 2021; Olsson et al. 2022",
        "attention to the token before of the head whose path into the induction heads' keys matters most", EVEN,
        Region(0.3), "attention", fed,
    ),
    "composition-shows-what-feeds": Claim(
        "The weights alone show which head feeds an induction head: K-composition is largest.", "Elhage et al. 2021",
        "share of earlier heads that compose less with an induction head's keys than the one that feeds it",
        "half of them", Region(0.4), "share of heads", composes,
    ),
    "successor-heads": Claim(
        "A head maps an item of an ordered list to the next one.", "Gould et al. 2023, Successor Heads",
        "share of months, days, numbers and letters that the weights of the head that is best on the others map to the "
        "next one",
        "chance within the list", Region(0.4), "share of items", succeeds,
    ),
}  # fmt: skip
