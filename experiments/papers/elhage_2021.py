"""Elhage et al. 2021, A Mathematical Framework for Transformer Circuits: zero, one and two layers of attention."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from experiments.papers.claim import Claim, Measured, above, near
from experiments.papers.effort import Effort
from interp.attention import heads
from interp.data.batch import Batch
from interp.hooked import HookedTransformer
from interp.lab.training import FixedRows, Training, train
from interp.model import ModelConfig, NoPosition, Rotary, Transformer
from interp.residual import paths, term_importance
from interp.tasks import Examples, IndirectObjects, RepeatedTokens, RepeatingChain
from interp.weights import composition, copying

SYMBOLS = 16
"""Token ids of the chain whose bigrams the model without layers learns."""


def elhage_2021(effort: Effort) -> Iterator[Claim]:
    """Bigrams without layers, copying heads with one, composition with two."""
    yield from _no_layers(effort)
    yield from _one_layer(effort)
    yield from _two_layers(effort)


def bigrams(seed: int) -> tuple[Examples, Float[Tensor, "v v"]]:
    """Rows of a random chain, and how often each token of theirs is followed by each other one."""
    generator = np.random.default_rng(seed)
    chain = generator.dirichlet(np.full(SYMBOLS, 0.3), size=SYMBOLS)
    tokens = np.empty((128, 24), dtype=np.int64)
    tokens[:, 0] = generator.integers(SYMBOLS, size=len(tokens))
    for i in range(1, tokens.shape[1]):
        draws = generator.random((len(tokens), 1))
        tokens[:, i] = (chain[tokens[:, i - 1]].cumsum(1) < draws).sum(1).clip(max=SYMBOLS - 1)
    rows = torch.from_numpy(tokens)
    counts = torch.zeros(SYMBOLS, SYMBOLS, dtype=torch.float64)
    counts.index_put_((rows[:, :-1], rows[:, 1:]), torch.ones((), dtype=torch.float64), accumulate=True)
    return Examples(Batch(rows)), counts


def _no_layers(effort: Effort) -> Iterator[Claim]:
    config = ModelConfig(0, 2 * SYMBOLS, 1, 24, SYMBOLS, position=NoPosition())
    divergences, errors = [], []
    for seed in range(effort.of(5)):
        rows, counts = bigrams(seed)
        plan = Training(
            steps=effort.of(1500, least=200),
            rows=128,
            learning_rate=2e-2,
            weight_decay=0.0,
            final_share=0.0,
            seed=seed,
        )
        model = train(config, FixedRows(rows, rows), plan).model
        assert isinstance(model, Transformer)
        with torch.no_grad():
            told = model(torch.arange(SYMBOLS)[:, None])[:, 0].double().log_softmax(-1)
        share = counts / counts.sum(1, keepdim=True)
        each = torch.special.xlogy(share, share).sum(1) - (share * told).sum(1)
        divergences.append(float((each * counts.sum(1)).sum() / counts.sum()))
        found = paths(model, rows.batch.rows(torch.arange(4)), 1, 2)
        errors.append(float(abs(found.value.sum("path") - found.total).max() / abs(found.total).max()))
    yield Claim(
        "no layers: divergence of the model from the bigram table of what it was trained on",
        "bigram statistics; closed form: 0",
        Measured.mean(divergences, "seeds"),
        near(0.0, 0.01),
        "nats per token",
    )
    yield Claim(
        "no layers: what is left of its logits without the direct path, relatively",
        "T = W_U W_E; closed form: 0",
        Measured.exact(max(errors)),
        near(0.0, 1e-5),
    )


def _one_layer(effort: Effort) -> Iterator[Claim]:
    task, copies, every = RepeatingChain(32, 32, low=8, high=12), 0, 0
    for seed in range(effort.of(4)):
        plan = Training(
            steps=effort.of(800, least=50),
            rows=32,
            learning_rate=5e-3,
            warm_up=50,
            log_every=10_000,
            seed=seed,
        )
        model = train(ModelConfig(1, 32, 4, 32, 32, position=Rotary()), task, plan).model
        assert isinstance(model, Transformer)
        score = copying(model, ranks=False).sel(score="eigenvalue")
        copies += int(((score.p < 0.05) & (score.value > 0)).sum())
        every += score.value.size
    yield Claim(
        "one layer, trained on a chain that repeats: share of heads that copy (eigenvalue score above 0, p < 0.05)",
        "10 of 12 heads",
        Measured.share(copies, every, "heads"),
        above(0.5),
        note="region: most heads",
    )


def _two_layers(effort: Effort) -> Iterator[Claim]:
    model = HookedTransformer.from_pretrained("demo-attn-2l")
    rows = effort.of(64, least=8)
    asked = IndirectObjects(rows, held_out=True)
    sentences = model.text.batch([s.text for s in asked.sentences(np.random.default_rng(0))])
    repeats = Batch(RepeatedTokens(rows=rows).tokens(model.cfg.d_vocab, model.text.bos_id or 0), bos=True)
    question = paths(
        model, [s.prompt for s in asked.sentences(np.random.default_rng(0))][:8], " Mary", " John"
    )
    yield Claim(
        "two layers: what is left of the logits when direct path, heads and virtual heads are taken away, relatively",
        "closed form (path expansion with frozen patterns): 0",
        Measured.exact(float(question.attrs["completeness_error"])),
        near(0.0, 1e-4),
    )
    for name, batch in (("sentences", sentences), ("repeated tokens", repeats)):
        worth = term_importance(model, batch)
        yield Claim(
            f"two layers, {name}: nats of single heads minus nats of virtual heads",
            "virtual heads small beside single heads (about 5.2 and 0.3)",
            _apart(
                worth.sel(term="order 1", score="reduction"),
                worth.sel(term="order 2", score="reduction"),
                rows,
            ),
            above(0.0),
            "nats per token",
        )
        late, early = (worth.sel(term=f"L{layer}.attn", score="given_others") for layer in (1, 0))
        yield Claim(
            f"two layers, {name}: what heads of layer 1 are worth beside the others, minus those of layer 0",
            "the second layer's heads dominate (about 4.0 and 0.05)",
            _apart(late, early, rows),
            above(0.0),
            "nats per token",
        )
    yield from _induction(model)


def _apart(one: xr.Dataset, other: xr.Dataset, n: int) -> Measured:
    """The difference of two estimates, between the farthest ends of their intervals."""
    return Measured(
        float(one.value - other.value), float(one.low - other.high), float(one.high - other.low), n, "rows"
    )


def _induction(model: HookedTransformer) -> Iterator[Claim]:
    """The strongest induction head and the strongest previous-token head, by their weights."""
    scores = heads(model)
    previous = scores.value.sel(score="previous_token")
    early = str(scores.part.values[0, int(previous[0].values.argmax())])
    induction = scores.value.sel(score="induction")[1]
    late = str(scores.part.values[1, int(induction.values.argmax())])
    table = composition(model, "K")
    into = table.excess.sel(dst=late).dropna("src")
    yield Claim(
        f"two layers: K-composition of {early} (previous token) into {late} (induction), above the next head",
        "only K-composition stands out, with one head of the first layer",
        Measured.exact(float(into.sel(src=early) - into.drop_sel(src=early).max())),
        above(0.0),
        "ratio of Frobenius norms",
    )
    found = copying(model, ranks=False, previous=previous)
    best = int(induction.values.argmax())
    corner = [float(found.value.sel(score=name)[1, best]) for name in ("eigenvalue", "matching")]
    yield Claim(
        f"two layers: {late}, the smaller of its copying and matching scores",
        "induction heads stand in the extreme corner, +1 and +1",
        Measured.exact(min(corner)),
        above(0.5),
        "sum of eigenvalues over sum of their moduli",
    )
    yield Claim(
        "two layers: that K-composition, by the ratio of random directions",
        "above random",
        Measured.exact(float((table.value / table.null).sel(src=early, dst=late))),
        above(1.0),
        "times",
    )
