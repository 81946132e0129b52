"""On which rows claims are asked, and that each ends in a verdict with a reason whatever the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from interp import HookedTransformer
from interp.data.batch import Batch
from interp.findings import CLAIMS, Measured, findings, paragraphs, sentences as about_names
from interp.findings.heads import carries, fed, looks_at_copies, succeeds
from interp.findings.setting import CHOOSING, SEEDS, Setting
from interp.findings.table import rows
from interp.weights.head_circuits import HeadCircuits
from interp.weights.successor import known_sequences, successor_hits
from tests.configs import CONFIGS, perturbed
from tests.findings import plants
from tests.mixers import MIXERS
from tests.tiny import hooked

TEXTS = [
    text[:size]
    for text, size in zip(
        plants.texts_of(40, rows=20, length=120),
        (120, 90, 111, 75, 84, 119, 80, 99, 78, 101) * 2,
        strict=True,
    )
]
"""Texts of unequal length."""
OF_TEXTS = ("in-context-learning", "attention-sinks", "sinks-are-needed", "massive-activations", "logit-lens")
"""Claims whose number is of each text alone."""


def exact(name: str = "gpt2") -> HookedTransformer:
    """A random model in float64 that reads letters."""
    config = replace(CONFIGS[name], n_ctx=128, d_vocab=plants.N_LETTERS)
    return HookedTransformer(perturbed(config), plants.alphabet())


def measured(setting: Setting, name: str) -> Measured:
    """What a claim comes to."""
    (row,) = rows(setting, [name])
    assert row.measured is not None, row.why
    return row.measured


@pytest.mark.parametrize("name", OF_TEXTS)
@pytest.mark.parametrize("model", ["gpt2", "llama-gqa"])
def test_the_number_of_a_text_does_not_depend_on_the_others_in_its_batch(name: str, model: str) -> None:
    together = Setting(exact(model), 12, TEXTS)
    found = measured(together, name)
    parts = together.counted_texts
    alone: list[list[float]] = [[] for _ in SEEDS]
    for place in range(len(parts[0])):
        single = Setting(together.model, 12, TEXTS)
        texts = [Batch.of([part.tokens[place][part.real[place]].tolist()]) for part in parts]
        single.__dict__["_text_batches"] = (together.choosing_texts, texts)
        for values, value in zip(alone, measured(single, name).seeds, strict=True):
            values.append(value)
    assert found.seeds == pytest.approx([sum(values) / len(values) for values in alone], abs=1e-10)


@pytest.mark.parametrize("name", [*OF_TEXTS, "copy-suppression", "neurons-say-what-follows"])
def test_padding_changes_nothing(name: str) -> None:
    plain = Setting(exact(), 12, TEXTS)
    padded = Setting(plain.model, 12, TEXTS)
    longest = [0] * 128

    def longer(batch: Batch) -> Batch:
        ids = [row[real].tolist() for row, real in zip(batch.tokens, batch.real, strict=True)]
        return Batch.of([*ids, longest]).rows(torch.arange(len(ids)))

    padded.__dict__["_text_batches"] = (
        longer(plain.choosing_texts), [longer(batch) for batch in plain.counted_texts],
    )  # fmt: skip
    one, other = measured(plain, name), measured(padded, name)
    assert padded.counted_texts[0].tokens.shape[1] == 128
    assert (one.value, one.low, one.high, *one.seeds) == pytest.approx(
        (other.value, other.low, other.high, *other.seeds), abs=1e-10
    )


def test_texts_that_choose_do_not_count() -> None:
    setting = Setting(exact(), 12, TEXTS)
    choosing, *counted = (
        {tuple(row[real].tolist()) for row, real in zip(batch.tokens, batch.real, strict=True)}
        for batch in (setting.choosing_texts, *setting.counted_texts)
    )
    assert choosing and all(len(texts) == 4 and not texts & choosing for texts in counted)
    assert len(set.union(*counted)) == 12


@pytest.mark.parametrize(
    ("measure", "drawn"),
    [
        (lambda setting: looks_at_copies(setting, "induction", 24), "repeats"),
        (carries, "repeats"),
        (about_names.raises, "sentences"),
        (about_names.looks_at_receiver, "sentences"),
        (about_names.made_up, "sentences"),
    ],
)
def test_heads_are_chosen_on_rows_that_do_not_count(
    measure: Callable[[Setting], Measured], drawn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plants.induction().model() if drawn == "repeats" else plants.names(moves=True)
    expected = measure(Setting(model, 12, TEXTS))
    make, seeds = getattr(Setting, drawn), []

    def counted(self: Setting, number: int, seed: int) -> object:
        seeds.append(seed)
        return make(self, number, seed if seed == CHOOSING else seed + 77)

    monkeypatch.setattr(Setting, drawn, counted)
    other = measure(Setting(model, 12, TEXTS))
    assert other.about == expected.about  # other rows count, the same head is chosen
    assert set(seeds) - {CHOOSING} == set(SEEDS)
    assert CHOOSING not in SEEDS


def test_the_feeding_head_is_found_on_rows_that_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    setting, seeds = Setting(plants.induction().model(), 12, TEXTS), []
    make = Setting.repeats

    def seen(self: Setting, number: int, seed: int) -> Batch:
        seeds.append(seed)
        return make(self, number, seed)

    monkeypatch.setattr(Setting, "repeats", seen)
    fed(setting)
    assert seeds == [CHOOSING, *SEEDS]


def test_the_successor_head_is_judged_on_items_that_did_not_choose_it() -> None:
    setting = Setting(plants.successor(1), 12, TEXTS)
    circuits = HeadCircuits(setting.model.transformer, folded=True, embedding="effective")
    items = torch.cat([successor_hits(circuits, ids) for ids in known_sequences(setting.model.text).values()])
    best = items[0::2].sum(0).argmax()
    layer, index = divmod(int(best), items.shape[2])
    found = succeeds(setting)
    assert found.about == f"L{layer}H{index}"
    assert found.value + found.null == pytest.approx(float(items[1::2, layer, index].double().mean()))


def test_rarity_is_the_share_of_each_token_among_all_texts() -> None:
    setting = Setting(exact(), 12, ["aab", "abbb"] * 6)
    first = setting.counted_texts[0]
    a, b = (-math.log(n / 7) for n in (3, 4))
    expected = {3: [a, a, b], 4: [a, b, b, b]}
    for row, real in zip(setting.rarity(first), first.real, strict=True):
        length = int(real.sum()) - 1
        assert row[:length].tolist() == pytest.approx(expected[length], abs=1e-12)
        assert row[length:].isnan().all()


def check(model: HookedTransformer) -> None:
    """Every claim ends in a verdict, with a number or a reason in words."""
    found = findings(model, prompts=12, texts=paragraphs()[:8])
    assert found.sizes["claim"] == len(CLAIMS)
    for claim in found.claim.values:
        one = found.sel(claim=claim)
        if not math.isfinite(float(one["value"])) or not math.isfinite(float(one.low)):
            assert one.verdict == "cannot be told"
            assert len(str(one.about.item())) > 10, (claim, one.about.item())
            assert "index 'score'" not in str(one.about.item())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_claim_ends_in_a_verdict_for_every_family(name: str) -> None:
    check(hooked(name))


@pytest.mark.parametrize("name", MIXERS)
def test_every_claim_ends_in_a_verdict_for_every_mixer(name: str) -> None:
    tiny = hooked("gpt2")
    config = replace(MIXERS[name], n_ctx=64, d_vocab=tiny.cfg.d_vocab)
    check(HookedTransformer(perturbed(config), tiny.text.tokenizer, name=name))


def test_every_claim_ends_in_a_verdict_without_a_tokenizer() -> None:
    model = HookedTransformer(perturbed(replace(CONFIGS["gpt2"], n_ctx=64)))
    found = findings(model, prompts=12)
    told = set(found.claim.values[found.verdict.values != "cannot be told"])
    assert told <= {
        "previous-token-heads", "duplicate-token-heads", "induction-heads", "induction-carries-copying",
        "previous-token-heads-feed-induction", "composition-shows-what-feeds",
    }  # fmt: skip
    assert "no tokenizer" in str(found.sel(claim="attention-sinks").about.item())


def test_every_claim_ends_in_a_verdict_with_a_context_of_32_tokens() -> None:
    config = replace(CONFIGS["llama-gqa"], n_ctx=32, d_vocab=hooked("llama-gqa").cfg.d_vocab)
    check(HookedTransformer(perturbed(config), hooked("llama-gqa").text.tokenizer))
