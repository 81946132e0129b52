"""Claims about sentences with two names: who gets the answer right, what writes it, and what makes up for its loss."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from interp.causal import ablate, batches
from interp.findings.claim import Claim, Measured, Region
from interp.findings.setting import CHOOSERS, CHOOSING, Head, Setting
from interp.model.edits import Zero
from interp.passes.metrics import logit_difference
from interp.residual import attribute
from interp.tasks import GreaterThan


def answers(setting: Setting) -> Measured:
    """Share of sentences in which the receiver is preferred to the giver, minus a half."""

    def right(rows: int, seed: int) -> Tensor:
        batch, _ = batches(setting.model, setting.sentences(rows, seed))
        assert batch.answer is not None and batch.wrong is not None
        ends = setting.ends(batch)
        row = torch.arange(len(batch))
        return ends[row, batch.answer.cpu()] > ends[row, batch.wrong.cpu()]

    return Measured.share(setting.by_seed(right), over="sentences", null=0.5)


def writer(setting: Setting) -> Head:
    """The head that adds most to the receiver's logit minus the giver's, on rows that do not count."""
    return setting.shared("writer", _writer)


def _writer(setting: Setting) -> Head:
    batch, _ = batches(setting.model, setting.sentences(CHOOSERS, CHOOSING))
    found = attribute(setting.model, batch, parts="head")["value"].mean("prompt")
    heads = [part for part in found.part.values if "H" in part]
    return Head.of(heads[int(np.argmax(found.sel(part=heads).values))])


def raises(setting: Setting) -> Measured:
    """By how much more the writer of the answer raises the receiver than it lowers the giver."""
    return setting.shared("raises", _raises)


def _raises(setting: Setting) -> Measured:
    head = writer(setting)
    unembed = setting.model.W_U
    mean = unembed.mean(1)

    def more(rows: int, seed: int) -> Tensor:
        batch, _ = batches(setting.model, setting.sentences(rows, seed))
        assert batch.answer is not None and batch.wrong is not None
        receiver, giver = (
            attribute(setting.model, batch, unembed[:, names].mT - mean, parts="head")["value"].sel(
                part=head.part
            )
            for names in (batch.answer, batch.wrong)
        )
        return (
            torch.from_numpy(receiver.values.copy()).double() + torch.from_numpy(giver.values.copy()).double()
        )

    return Measured.mean(setting.by_seed(more), "sentences", about=head.part)


def lowers(setting: Setting) -> Measured:
    """The same the other way round."""
    found = raises(setting)
    return Measured(
        -found.value, -found.high, -found.low, found.n, found.over, found.null, tuple(-seed for seed in found.seeds),
        found.about,
    )  # fmt: skip


def looks_at_receiver(setting: Setting) -> Measured:
    """How much more the writer of the answer attends from the end to the receiver than to the giver's two mentions."""
    head = writer(setting)

    def more(rows: int, seed: int) -> Tensor:
        pairs = setting.sentences(rows, seed)
        batch, _ = batches(setting.model, pairs)
        ends = setting.pattern(head, batch, lambda part, seen: seen[torch.arange(len(part)), part.last()])
        row = torch.arange(len(pairs))
        seen = {role: ends.cpu()[row, pairs.columns(role)] for role in ("IO", "S1", "S2")}
        return seen["IO"] - seen["S1"] - seen["S2"]

    return Measured.mean(setting.by_seed(more), "sentences", about=head.part)


def made_up(setting: Setting) -> Measured:
    """The share of the writer's direct effect that the rest of the model makes up for when it is set to 0."""
    head = writer(setting)
    metric = logit_difference()

    def losses(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        batch, _ = batches(setting.model, setting.sentences(rows, seed))
        direct = attribute(setting.model, batch, parts="head")["value"].sel(part=head.part)
        total = ablate(setting.model, batch, [head.part], change=Zero(), metric=metric)["each"]
        return tuple(torch.from_numpy(np.ravel(x).copy()).double() for x in (direct.values, -total.values))  # type: ignore[return-value]

    pairs = setting.by_seed(losses)
    size = float(torch.cat([direct for direct, _ in pairs]).mean())
    if size <= 0:
        raise ValueError("no head writes the answer")
    return Measured.mean([(direct - total) / size for direct, total in pairs], "sentences", about=head.part)


def later_years(setting: Setting) -> Measured:
    """Probability of years after the first one minus that of years before it, minus the same after a year 01."""

    def differences(rows: int, seed: int) -> list[Tensor]:
        pairs = GreaterThan(rows, seed).pairs(setting.tokenizer)
        assert pairs.options is not None and pairs.right is not None
        options, right = pairs.options, pairs.right
        ends = [setting.ends(batch).softmax(-1)[:, options] for batch in batches(setting.model, pairs)]
        return [torch.where(right, end, -end).sum(1) for end in ends]

    clean, from_01 = zip(*setting.by_seed(differences), strict=True)
    return Measured.mean(clean, "sentences", null=from_01)


WANG = "Wang et al. 2022, Interpretability in the Wild"
CLAIMS: Mapping[str, Claim] = {
    "indirect-objects": Claim(
        "The model prefers the receiver to the giver.", WANG, "share of sentences in which it does", "a half",
        Region(0.3), "share of sentences", answers,
    ),
    "name-movers-look": Claim(
        "The head that writes most of the answer attends to the receiver.", WANG,
        "attention from the end to the receiver minus that to the giver's two mentions", "0", Region(0.1), "attention",
        looks_at_receiver,
    ),
    "name-movers-raise": Claim(
        "The head that writes most of the answer raises the receiver rather than lowers the giver.", WANG,
        "what it adds to the receiver's logit, plus what it adds to the giver's, each minus the vocabulary's mean", "0",
        Region(0.2), "logits", raises,
    ),
    "suppression-lowers": Claim(
        "The head that writes most of the answer lowers the giver rather than raising the receiver.",
        "McDougall et al. 2023, Copy Suppression", "the same with the opposite sign", "0", Region(0.2), "logits",
        lowers,
    ),
    "self-repair": Claim(
        "When the head that writes most of the answer is taken out, later parts make up for some of it.",
        "McGrath et al. 2023, The Hydra Effect; Wang et al. 2022 (backup name movers)",
        "direct effect minus the effect of setting the head to 0, as a share of the direct effect", "0", Region(0.1),
        "share", made_up,
    ),
    "greater-than": Claim(
        "After 'from the year 1743 to the year 17' later years are likelier than earlier ones.",
        "Hanna et al. 2023, How does GPT-2 compute greater-than?",
        "probability of later years minus that of earlier ones", "the same after a year that ends in 01",
        Region(0.3), "probability", later_years,
    ),
}  # fmt: skip
