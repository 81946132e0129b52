"""Claims about ordinary text: what context is worth, attention sinks, massive activations, depth, neurons."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from interp.data.batch import Batch
from interp.findings.claim import Claim, Measured, Region
from interp.findings.setting import Head, Setting
from interp.lenses import logit_lens
from interp.model.edits import Edit
from interp.model.tap import Read
from interp.residual import attribute
from interp.weights import directions

EARLY, LATE = slice(4, 16), slice(64, 127)
"""Losses of a text that are compared; the first is that of the second token."""
NEAR = 8
"""From this token on a query counts for what it attends to."""
OTHER = 4
"""Another early token than the first."""


def context(setting: Setting) -> Measured:
    """The loss of late tokens of a text minus that of early ones, minus the same of how rare these tokens are."""
    values, nulls = [], []
    for batch, losses in zip(setting.counted_texts, setting.text_losses, strict=True):
        if losses.shape[1] <= LATE.start + 8:
            raise ValueError(
                f"texts of {LATE.start + 9} tokens are required, the longest has {losses.shape[1] + 1}"
            )
        gap, of_rarity = (
            each[:, LATE].nanmean(1) - each[:, EARLY].nanmean(1) for each in (losses, setting.rarity(batch))
        )
        values.append(gap[~gap.isnan()])
        nulls.append(of_rarity[~gap.isnan()])
    return Measured.mean(values, "texts", null=nulls)


def sink(setting: Setting) -> Measured:
    """Attention to the first token, mean over the heads of the upper half and over queries, minus even attention."""
    config = setting.model.cfg
    layers = range(config.n_layers // 2, config.n_layers)
    reads = [Read(f"blocks.{layer}.attn.hook_pattern") for layer in layers]

    def first(batch: Batch, patterns: list[Tensor]) -> Float[Tensor, "b two"]:
        real = batch.real[:, NEAR:].to(patterns[0].device)
        seen = torch.stack([pattern[:, :, NEAR:, 0].double().mean(1) for pattern in patterns]).mean(0)
        seen_keys = torch.arange(NEAR + 1, batch.tokens.shape[1] + 1, device=real.device, dtype=torch.float64)
        even = 1 / (seen_keys if config.causal else batch.lengths.to(real.device).double()[:, None])
        return torch.stack([(seen * real).sum(1), (even * real).sum(1)], 1) / real.sum(1)[:, None]

    both = [setting.read(batch, reads, first) for batch in setting.counted_texts]
    return Measured.mean([each[:, 0] for each in both], "texts", null=[each[:, 1] for each in both])


def sink_needed(setting: Setting) -> Measured:
    """How much more the loss rises when no later token sees the first one, than when none sees another early one."""
    first, other = (
        [
            losses.nanmean(1) - base.nanmean(1)
            for losses, base in zip(_unseen(setting, key), setting.text_losses, strict=True)
        ]
        for key in (0, OTHER)
    )
    return Measured.mean(first, "texts", null=other)


def _unseen(setting: Setting, key: int) -> list[Float[Tensor, "b n"]]:
    """The losses of every seed's texts when no later token attends to one."""

    def hidden(scores: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
        scores[:, :, key + 1 :, key] = -torch.inf
        return scores

    edits = [
        Edit(f"blocks.{layer}.attn.hook_attn_scores", hidden) for layer in range(setting.model.cfg.n_layers)
    ]
    return [setting.losses(batch, edits) for batch in setting.counted_texts]


def massive(setting: Setting) -> Measured:
    """The largest over the median size in the stream at half of the depth, in decades, minus that of noise."""
    config = setting.model.cfg
    read = Read(f"blocks.{config.n_layers // 2}.hook_resid_pre")

    def ratio(batch: Batch, values: list[Tensor]) -> Float[Tensor, "b"]:
        found = []
        for row, real in zip(values[0].double().abs(), batch.real, strict=True):
            numbers = row[real.to(row.device)].flatten()
            found.append(torch.log10(numbers.max() / numbers.median()) - _of_noise(numbers.numel()))
        return torch.stack(found)

    return Measured.mean(
        [setting.read(batch, [read], ratio) for batch in setting.counted_texts],
        "texts",
    )


def _of_noise(count: int) -> float:
    """The decades between the largest and the median size of so many Gaussian numbers."""
    normal = torch.distributions.Normal(0.0, 1.0)
    top = normal.icdf(torch.tensor(1 - 1 / (2 * count), dtype=torch.float64))
    return math.log10(float(top / normal.icdf(torch.tensor(0.75, dtype=torch.float64))))


def read_early(setting: Setting) -> Measured:
    """By how much the logit lens at two thirds of the depth predicts the next token better than its frequency does."""
    config = setting.model.cfg
    if not config.unembed:
        raise ValueError("it has no logits")
    site = f"blocks.{2 * config.n_layers // 3}.hook_resid_pre"

    def says(batch: Batch) -> Float[Tensor, "b"]:
        found = logit_lens(setting.model, batch, sites=[site], top=1)["target_prob"].isel(depth=0).values
        least = np.finfo(found.dtype).tiny  # a probability that underflows is no more than that
        logs = np.log(np.maximum(found, least), dtype=np.float64)
        return torch.from_numpy(np.nanmean(logs, axis=1))

    texts = setting.counted_texts
    return Measured.mean(
        [says(batch) for batch in texts], "texts", null=[-setting.rarity(batch).nanmean(1) for batch in texts]
    )


def suppresses(setting: Setting) -> Measured:
    """What the head of the most negative copying adds to the logit of the token it looks at, minus a random token's."""
    scores = setting.scores("copying_weights")
    scores[: scores.shape[0] // 2] = np.nan
    if np.isnan(scores).all():
        raise ValueError("its heads have no copying score")
    head = Head(*map(int, np.unravel_index(np.nanargmin(scores), scores.shape)))

    def added(batch: Batch) -> Tensor:
        rows = torch.arange(len(batch))

        def looked_at(part: Batch, seen: Tensor) -> Tensor:
            ends = seen[torch.arange(len(part)), part.last()]
            ends[:, 0] = 0  # the sink
            return ends.argmax(1)

        columns = setting.pattern(head, batch, looked_at).cpu()
        answer = batch.tokens[rows, columns]
        other = answer.roll(1)
        told = (answer != other).nonzero()[:, 0]
        if not len(told):
            raise ValueError(f"{head.part} looks at the same token in all texts")
        found = attribute(
            setting.model, batch.rows(told), answer[told].tolist(), other[told].tolist(), parts="head"
        )
        return torch.from_numpy(found["value"].sel(part=head.part).values.copy()).double()

    return Measured.mean([added(batch) for batch in setting.counted_texts], "texts", about=head.part)


def says_what_follows(setting: Setting) -> Measured:
    """Share of upper neurons whose output promotes most what follows their strongest trigger, minus chance."""
    config, network = setting.model.cfg, setting.model.transformer
    layers = range(config.n_layers // 2, config.n_layers)
    outs = {}
    for layer in layers:
        out = setting.model.weights.layer(layer).W_out
        if out is None:
            raise ValueError(f"the MLP of layer {layer} has no W_out")
        outs[layer] = out
    best = {layer: torch.full((out.shape[0],), -torch.inf) for layer, out in outs.items()}
    follows = {layer: torch.zeros(out.shape[0], dtype=torch.long) for layer, out in outs.items()}
    reads = [Read(f"blocks.{layer}.mlp.hook_post") for layer in layers]
    for batch in (setting.choosing_texts, *setting.counted_texts):

        def trigger(part: Batch, values: list[Tensor]) -> Tensor:
            later = part.tokens[:, 1:].flatten()
            real = part.real[:, 1:].flatten()
            for layer, post in zip(layers, values, strict=True):
                flat = post[:, :-1].flatten(0, 1).float().cpu().masked_fill(~real[:, None], -torch.inf)
                top, place = flat.max(0)
                more = top > best[layer]
                best[layer][more], follows[layer][more] = top[more], later[place[more]]
            return torch.zeros(len(part))

        setting.read(batch, reads, trigger)
    hits, chance = [], []
    for layer in layers:
        says = torch.from_numpy(
            directions(network, outs[layer], top=1).token_id.sel(end="top").isel(rank=0).values
        )
        hits.append(says == follows[layer])
        chance.append(_alike(says, follows[layer], config.d_vocab))
    every = torch.cat(hits)
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))
    return Measured.share(
        [every[part] for part in order.tensor_split(3)], over="neurons", null=float(np.mean(chance))
    )


def _alike(one: Tensor, other: Tensor, vocabulary: int) -> float:
    """How often two random members of these lists are the same token."""
    shares = [torch.bincount(tokens, minlength=vocabulary).double() / len(tokens) for tokens in (one, other)]
    return float((shares[0] * shares[1]).sum())


CLAIMS: Mapping[str, Claim] = {
    "in-context-learning": Claim(
        "Late tokens of a text are predicted better than early ones.", "Olsson et al. 2022; Kaplan et al. 2020",
        f"loss of tokens {LATE.start + 1} to {LATE.stop} minus loss of tokens {EARLY.start + 1} to {EARLY.stop}",
        "the same of their frequencies in all texts", Region(highest=-0.1), "nats", context,
    ),
    "attention-sinks": Claim(
        "Heads of the upper half attend to the first token, whatever it is.",
        "Xiao et al. 2023, Streaming Language Models with Attention Sinks",
        "attention to the first token, mean over heads of the upper half", "attention spread evenly", Region(0.2),
        "attention", sink,
    ),
    "sinks-are-needed": Claim(
        "A model that cannot see its first token predicts badly.", "Xiao et al. 2023",
        "rise of the loss when no later token sees the first one", f"when none sees token {OTHER}", Region(0.1),
        "nats", sink_needed,
    ),
    "massive-activations": Claim(
        "A few numbers of the stream are hundreds of times the others.", "Sun et al. 2024, Massive Activations",
        "log10 of the largest over the median size in the stream at half of the depth", "of as many Gaussian numbers",
        Region(2.0), "decades", massive,
    ),
    "logit-lens": Claim(
        "What a model will say can be read from its stream by its own unembedding at two thirds of the depth.",
        "nostalgebraist 2020, interpreting GPT: the logit lens",
        "log-probability of the next token in the lens at two thirds of the depth",
        "that of its frequency in all texts", Region(1.0), "nats", read_early,
    ),
    "copy-suppression": Claim(
        "A late head lowers the logit of the token that it attends to.",
        "McDougall et al. 2023, Copy Suppression",
        "what the upper head of the most negative copying adds to the logit of the token it attends to most",
        "what it adds to another text's token", Region(highest=-0.1), "logits", suppresses,
    ),
    "neurons-say-what-follows": Claim(
        "In upper layers what a neuron writes promotes what follows its strongest trigger.",
        "Geva et al. 2021, Feed-forward layers are key-value memories",
        "share of neurons of the upper half whose top token follows their strongest trigger", "of random pairs",
        Region(0.002), "share of neurons", says_what_follows,
    ),
}  # fmt: skip
