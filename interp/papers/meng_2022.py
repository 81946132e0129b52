"""Meng et al. 2022 (arXiv:2202.05262), section 2: causal tracing of facts, on the facts that demo-4l was taught."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
import xarray as xr

from interp.causal import causal_trace
from interp.hooked import HookedTransformer
from interp.papers.claim import Claim, Measured, above, below, near
from interp.papers.effort import Effort
from interp.tasks import fact_prompts

EARLY, END = "last subject", "last token"


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
    total = state.total.values
    yield Claim(
        "noise on the subject takes the fact away: total effect",
        "18.6 % of probability",
        Measured(*(float(x) for x in total), len(end), "facts"),
        above(0.1),
        "probability",
        note="region: a tenth",
    )
    yield from _sites(trace, state, last)


def _sites(trace: "partial[xr.Dataset]", state: xr.Dataset, last: int) -> Iterator[Claim]:
    """Early: the last subject token after the first block. Late: the last token before the last block."""
    early = by_fact(state, EARLY, 0)
    yield Claim(
        "early site: the state of the last subject token after the first block, beside that of the last token",
        "an early site at the last subject token (8.7 %)",
        Measured.mean(_paired(early, by_fact(state, END, 0)), "facts"),
        above(0.0),
        "probability",
    )
    yield Claim(
        "late site: the state of the last token before the last block, beside that of the last subject token",
        "a late site at the last token",
        Measured.mean(_paired(by_fact(state, END, last - 1), by_fact(state, EARLY, last - 1)), "facts"),
        above(0.0),
        "probability",
    )
    mlp, attention = trace(kind="mlp"), trace(kind="attn")
    best = max(range(last + 1), key=lambda layer: float(by_fact(mlp, EARLY, layer).nanmean()))
    yield Claim(
        f"MLPs at the last subject token (layer {best}, the best): restored, beside attention restored there",
        "6.6 % through MLPs, 1.6 % through attention",
        Measured.mean(_paired(by_fact(mlp, EARLY, best), by_fact(attention, EARLY, best)), "facts"),
        above(0.0),
        "probability",
        note="one layer at a time, ten in the paper",
    )
    cut = {name: by_fact(trace(severed=name), EARLY, 0) for name in ("mlp", "attn")}
    yield Claim(
        "early site with later MLPs at that token severed: share of its effect that is left",
        "severing MLPs removes the effect",
        Measured.mean(cut["mlp"][~cut["mlp"].isnan()] / early.nanmean(), "facts"),
        below(0.5),
        note="region: half",
    )
    yield Claim(
        "early site: what severing attention leaves minus what severing MLPs leaves",
        "severing attention does not remove it",
        Measured.mean(_paired(cut["attn"], cut["mlp"]), "facts"),
        above(0.0),
        "probability",
    )


def by_fact(found: xr.Dataset, role: str, layer: int) -> torch.Tensor:
    """The effect of restoring one token of each fact; NaN for a fact without such a token."""
    each = torch.from_numpy(found["each"].transpose("prompt", "layer", "pos").values[:, layer]).double()
    subject = torch.from_numpy(found.subject.values)
    columns = torch.arange(subject.shape[1])
    ends = (~each.isnan()).sum(1) - 1 if role == END else (subject * columns).argmax(1)
    return each[torch.arange(len(each)), ends]


def _paired(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The difference for every fact that has both."""
    apart = one - other
    return apart[~apart.isnan()]
