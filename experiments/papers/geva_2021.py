"""Geva et al. 2021 (arXiv:2012.14913) and 2022 (arXiv:2203.14680): MLPs as memories of keys and values, in demo-4l."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from experiments.papers.claim import Claim, Measured, above, near
from experiments.papers.effort import Effort
from interp.data.batch import Batch
from interp.hooked import HookedTransformer
from interp.model.tap import Read
from interp.passes import observe
from interp.tasks import IndirectObjects, fact_prompts
from interp.weights import directions


def geva_2021(effort: Effort) -> Iterator[Claim]:
    """Outputs as sums over memories, and whether a value says what follows its key's strongest trigger."""
    model = HookedTransformer.from_pretrained("demo-4l")
    batch = texts(model, effort.of(600, least=24))
    last = model.cfg.n_layers - 1
    yield Claim(
        "an MLP's output minus the sum of its values times their coefficients, and the bias: largest relative size",
        "closed form: 0",
        Measured.exact(max(_rest(model, batch.rows(torch.arange(8)), layer) for layer in range(last + 1))),
        near(0.0, 1e-5),
    )
    agree = {layer: agreement(model, batch, layer) for layer in range(last + 1)}
    hits, chance = agree[last]
    count = len(hits)
    share = Measured.share(int(hits.sum()), count, "neurons")
    yield Claim(
        "last layer: share of values whose top token follows their key's strongest trigger, minus that of random pairs",
        "upper layers: far above chance (3.5 % at most, chance 0.0004 %)",
        Measured(share.value - chance, share.low - chance, share.high - chance, count, "neurons"),
        above(0.0),
    )
    halves = [torch.cat([agree[layer][0] for layer in layers]) for layers in ((0, 1), (last - 1, last))]
    lower, upper = (Measured.share(int(half.sum()), len(half), "neurons") for half in halves)
    yield Claim(
        "the same share in the upper two layers minus that in the lower two",
        "hardly any agreement in lower layers, rising in upper ones",
        Measured(
            upper.value - lower.value, upper.low - lower.high, upper.high - lower.low, 2 * count, "neurons"
        ),
        above(0.0),
    )
    yield _composed(model, batch, last)


def texts(model: HookedTransformer, count: int) -> Batch:
    """Sentences about facts and about people, as many of each."""
    facts, generator = fact_prompts(), np.random.default_rng(0)
    drawn = [facts[i] for i in generator.permutation(len(facts))[: count // 2]]
    people = IndirectObjects(count // 2).sentences(np.random.default_rng(1))
    return model.text.batch([*(f"{fact.prompt}{fact.answer}." for fact in drawn), *(s.text for s in people)])


def agreement(model: HookedTransformer, batch: Batch, layer: int) -> tuple[Tensor, float]:
    """For every neuron whether its value's top token follows its strongest trigger; how often it would by chance."""
    read = Read(f"blocks.{layer}.mlp.hook_post")
    post = observe(model, batch, [read], stop=layer + 1).trace[read][:, :-1]
    real = batch.real[:, 1:]
    flat = post.masked_fill(~real[..., None], -torch.inf).flatten(0, 1)
    follows = batch.tokens[:, 1:].flatten()[flat.argmax(0)]
    says = top_tokens(model, model.W_out[layer])
    return says == follows, _chance(says, follows, model.cfg.d_vocab)


def top_tokens(model: HookedTransformer, vectors: Float[Tensor, "n d"]) -> Int[Tensor, "n"]:
    """The token that each vector promotes most."""
    found = directions(model, vectors, top=1).token_id.sel(end="top").isel(rank=0)
    return torch.from_numpy(found.values)


def _chance(one: Int[Tensor, "n"], other: Int[Tensor, "n"], vocabulary: int) -> float:
    """How often two random members of these lists are the same token."""
    shares = [torch.bincount(tokens, minlength=vocabulary).double() / len(tokens) for tokens in (one, other)]
    return float((shares[0] * shares[1]).sum())


def _rest(model: HookedTransformer, batch: Batch, layer: int) -> float:
    reads = Read(f"blocks.{layer}.mlp.hook_post"), Read(f"blocks.{layer}.hook_mlp_out")
    post, out = (x for x in map(observe(model, batch, list(reads)).trace.__getitem__, reads))
    summed = torch.einsum("bpm,md->bpd", post.double(), model.W_out[layer].double()) + model.b_out[layer]
    return float((out - summed).abs().max() / out.abs().max())


def _composed(model: HookedTransformer, batch: Batch, layer: int) -> Claim:
    """How often the layer says something that none of its ten largest memories says."""
    reads = Read(f"blocks.{layer}.mlp.hook_post"), Read(f"blocks.{layer}.hook_mlp_out")
    trace = observe(model, batch, list(reads)).trace
    post, out = (trace[read][batch.real] for read in reads)
    keep = torch.randperm(len(post), generator=torch.Generator().manual_seed(0))[:400]
    values = model.W_out[layer]
    size = post[keep].abs() * values.norm(dim=1)
    ten = top_tokens(model, values)[size.topk(10, dim=1).indices]
    other = (ten != top_tokens(model, out[keep])[:, None]).all(1)
    return Claim(
        "last layer: share of tokens at which its top token is that of none of its ten largest memories",
        "at least 68 %: predictions are composed",
        Measured.share(int(other.sum()), len(other), "tokens"),
        above(0.5),
        note="the paper compares with all active memories; region: more than half",
    )
