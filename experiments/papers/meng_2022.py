"""Meng et al. 2022 (arXiv:2202.05262), section 2: causal tracing of facts, on the facts that demo-4l was taught."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from experiments.papers.claim import Claim, Measured, above, near
from experiments.papers.effort import Effort
from interp.causal import causal_trace
from interp.hooked import HookedTransformer
from interp.tasks import fact_prompts

EARLY, END = "last subject", "last token"
MOST = "means of probabilities have no interval below 512 facts, so facts are counted; region: most of them"


def meng_2022(effort: Effort) -> Iterator[Claim]:
    """Two identities, and the paper's findings: the early site, its MLPs, and the late site."""
    model = HookedTransformer.from_pretrained("demo-4l")
    every = fact_prompts()
    drawn = [every[i] for i in np.random.default_rng(0).permutation(len(every))[: effort.of(48, least=8)]]
    trace = partial(
        causal_trace,
        model,
        [fact.prompt for fact in drawn],
        [fact.fact.subject for fact in drawn],
        [model.text.tokenizer.encode(fact.answer)[0] for fact in drawn],
        samples=effort.of(10),
        window=1,
    )
    state, last = trace(), model.cfg.n_layers - 1
    end = torch.from_numpy(state["each"].isel(layer=last).values).double()
    whole = torch.from_numpy((state.clean - state.corrupt).values).double()
    lengths = (~end.isnan()).sum(1) - 1
    at_end = end[torch.arange(len(end)), lengths]
    yield Claim(
        "the last block restored at the last token: indirect effect minus total effect, largest size",
        "closed form: 0",
        Measured.exact(float((at_end - whole).abs().max())),
        near(0.0, 1e-5),
        "probability",
    )
    subject = torch.from_numpy(state.subject.values)
    before = (subject.cumsum(1) == 0)[:, None].expand(-1, state.sizes["layer"], -1)
    effects = torch.from_numpy(state["each"].transpose("prompt", "layer", "pos").values).double()
    yield Claim(
        "any state restored before the subject: largest effect",
        "closed form (causal attention): 0",
        Measured.exact(float(effects[before].nan_to_num().abs().max())),
        near(0.0, 1e-6),
        "probability",
    )
    yield Claim(
        "noise on the subject takes the fact away: share of facts that lose more than a tenth of probability",
        "total effect 18.6 % of probability",
        _share(whole > 0.1),
        above(0.5),
        note=f"mean total effect here {float(whole.mean()):.2f}; {MOST}",
    )
    yield from _sites(trace, state, last)


def _sites(trace: partial[xr.Dataset], state: xr.Dataset, last: int) -> Iterator[Claim]:
    """Early: the last subject token after the first block. Late: the last token before the last block."""
    early = by_fact(state, EARLY, 0)
    yield Claim(
        "early site: share of facts that the last subject token (block 0) brings back more of than the last token",
        "an early site at the last subject token (8.7 %)",
        _more(early, by_fact(state, END, 0)),
        above(0.5),
        note=f"means here {float(early.nanmean()):.3f} and {float(by_fact(state, END, 0).mean()):.3f}; {MOST}",
    )
    yield Claim(
        "late site: share of facts that the last token, before the last block, brings back more of than the subject",
        "a late site at the last token",
        _more(by_fact(state, END, last - 1), by_fact(state, EARLY, last - 1)),
        above(0.5),
        note=MOST,
    )
    mlp, attention = trace(kind="mlp"), trace(kind="attn")
    best = max(range(last + 1), key=lambda layer: float(by_fact(mlp, EARLY, layer).nanmean()))
    yield Claim(
        f"last subject token, layer {best}: share of facts that its MLP brings back more of than its attention",
        "6.6 % through MLPs, 1.6 % through attention",
        _more(by_fact(mlp, EARLY, best), by_fact(attention, EARLY, best)),
        above(0.5),
        note=f"one layer at a time, ten in the paper; the layer is the MLPs' best; {MOST}",
    )
    cut = {name: by_fact(trace(severed=name), EARLY, 0) for name in ("mlp", "attn")}
    yield Claim(
        "early site: share of facts of which more is left with attention severed than with MLPs severed",
        "severing MLPs removes the effect, severing attention does not",
        _more(cut["attn"], cut["mlp"]),
        above(0.5),
        note=MOST,
    )


def by_fact(found: xr.Dataset, role: str, layer: int) -> Float[Tensor, "n"]:
    """The effect of restoring one token of each fact; NaN for a fact without such a token."""
    each = torch.from_numpy(found["each"].transpose("prompt", "layer", "pos").values[:, layer]).double()
    subject = torch.from_numpy(found.subject.values)
    columns = torch.arange(subject.shape[1])
    ends = (~each.isnan()).sum(1) - 1 if role == END else (subject * columns).argmax(1)
    return each[torch.arange(len(each)), ends]


def _more(one: Float[Tensor, "n"], other: Float[Tensor, "n"]) -> Measured:
    """The share of facts in which the one effect is larger, of those that have both."""
    apart = one - other
    return _share(apart[~apart.isnan()] > 0)


def _share(hits: Bool[Tensor, "n"]) -> Measured:
    return Measured.share(int(hits.sum()), len(hits), "facts")
