"""Katz et al. 2024 (arXiv:2402.12865), Backward Lens: what a gradient step writes, on the facts of demo-4l."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from experiments.papers.claim import Claim, Measured, above, near
from experiments.papers.effort import Effort
from interp.editing import shift_edit
from interp.hooked import HookedTransformer
from interp.lenses import backward_lens, gradient_cosines, gradient_factors, gradient_rank
from interp.lenses.factors import LensMatrix
from interp.model.tap import Read
from interp.passes import observe
from interp.tasks import fact_prompts

MATRICES: Sequence[LensMatrix] = ("W_in", "W_out")
ETA = 0.1


def katz_2024(effort: Effort) -> Iterator[Claim]:
    """The rank of a gradient, its factors, the rank of its target, and the step without a gradient."""
    model = HookedTransformer.from_pretrained("demo-4l")
    prompts, told = false_facts(model, effort.of(120, least=9))
    count = len(prompts)
    ranks = gradient_rank(model, prompts, told, matrices=MATRICES)
    full = ranks.value.isel(layer=slice(0, -1)) == ranks.tokens
    yield Claim(
        "rank of an MLP gradient = number of tokens, layers before the last: share of matrices",
        "above 98.5 %",
        Measured.share(int(full.sum()), full.size, "gradients"),
        above(0.985),
    )
    last = ranks.value.isel(layer=-1) == 1
    yield Claim(
        "rank of an MLP gradient in the last layer is 1: share of matrices",
        "only the last token reaches the loss; closed form: 1",
        Measured.exact(float(last.mean())),
        near(1.0, 1e-6),
    )
    factors = gradient_factors(model, prompts[:4], told[:4], matrices=MATRICES)
    errors = [
        factors.error(f"blocks.{layer}.mlp.{name}")
        for layer in range(model.cfg.n_layers)
        for name in MATRICES
    ]
    yield Claim(
        "sum of outer products x delta beside autograd's gradient: largest relative difference",
        "closed form: 0",
        Measured.exact(max(errors)),
        near(0.0, 1e-4),
    )
    lens = backward_lens(model, prompts, told, matrices=["W_out"])
    ends = torch.from_numpy(lens.token.values != "").sum(1) - 1
    at_end = torch.from_numpy(lens.target_rank.isel(matrix=0).values)[torch.arange(count), :, ends]
    low = at_end >= 0.9 * model.cfg.d_vocab
    yield Claim(
        "W_out, last token, a false answer: share of layers in which it is among the least probable tenth of delta",
        "the target among the least probable tokens at nearly all layers",
        Measured.share(int(low.sum()), low.numel(), "prompts and layers"),
        above(0.9),
    )
    yield from _neighbours(model, prompts, told)
    yield _shift(model, prompts[0], told[0])


def false_facts(model: HookedTransformer, count: int) -> tuple[list[str], list[int]]:
    """Prompts about facts, each with the answer of another fact of its kind that begins with another token."""
    every, generator = fact_prompts(), np.random.default_rng(0)
    prompts, told = [], []
    for i in generator.permutation(len(every)):
        asked = every[i]
        other = every[generator.integers(len(every))]
        mine, theirs = (model.text.tokenizer.encode(fact.answer)[0] for fact in (asked, other))
        if asked.fact.relation == other.fact.relation and mine != theirs:
            prompts.append(asked.prompt)
            told.append(theirs)
        if len(prompts) == count:
            break
    return prompts, told


def _neighbours(model: HookedTransformer, prompts: list[str], told: list[int]) -> Iterator[Claim]:
    """How alike the deltas of neighbouring layers are at the last token."""
    found = gradient_cosines(model, prompts, told, matrices=["W_out"]).value.isel(matrix=0)
    pairs = [found.sel(layer=i, other_layer=i + 1).values for i in range(model.cfg.n_layers - 1)]
    each = torch.from_numpy(np.stack(pairs))
    yield Claim(
        "deltas of W_out at the last token in neighbouring layers: cosine",
        "above 0.7 over ten layers of GPT-2 XL",
        Measured.mean(each.double().mean(0), "prompts"),
        above(0.7),
        "cosine",
    )


def _shift(model: HookedTransformer, prompt: str, answer: int) -> Claim:
    """The step without a gradient, beside its closed form."""
    layer = model.cfg.n_layers - 1
    edit = shift_edit(model, prompt, answer=answer, layer=layer, eta=ETA)
    read = Read(f"blocks.{layer}.mlp.hook_post")
    x = observe(model, model.to_tokens(prompt), [read]).trace[read][0, -1].double()
    column = model.W_U[:, answer].double()
    found = float(x @ edit.dense.double() @ column)
    known = float(ETA * x.square().sum() * column.square().sum())
    return Claim(
        "forward pass shift: change of the target's direct logit over eta |x|^2 |u|^2",
        "closed form: 1",
        Measured.exact(found / known),
        near(1.0, 1e-4),
    )
