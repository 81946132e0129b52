"""Running with some edges only equals a slow pass over the graph, written out node by node."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

import interp
from interp import HookedTransformer, observe
from interp.causal.graph import EdgeGraph
from interp.circuits.edge_effects import edge_effects
from interp.circuits.interchange import Interchange, Replacement
from interp.data.batch import Batch
from interp.model import Tap, Transformer
from interp.model.config import ModelConfig
from interp.model.tap import Edit, Read
from interp.passes.metrics import kl_divergence, logit_difference, next_token_loss
from tests.causal.slow_edges import ANSWER, START, WRONG, difference, edges, exact, place, writes
from tests.causal.test_graph import SUMS
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.tolerances import assert_close

CLEAN, CORRUPT = some_tokens(3, 7), some_tokens(3, 7, seed=1)
METRIC = logit_difference(ANSWER, WRONG)
ONE_OF_EACH = ("gpt2", "llama-gqa", "attention-only-rotary", "parallel", "gemma2", "gpt-oss")
"""Groups, no MLP, parallel blocks, norms of what is added, experts."""


def task(model: Transformer, replacement: Replacement = "resample", **how: object) -> Interchange:
    return Interchange.of(
        HookedTransformer(model),
        CLEAN,
        CORRUPT,
        metric=METRIC,
        replacement=replacement,
        **how,  # type: ignore[arg-type]
    )


def some_circuits(graph: EdgeGraph, n: int, seed: int = 0, share: float = 0.5) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    return (torch.rand(n, *graph.exists.shape, generator=dice) < share) & graph.exists


def slowly(model: Transformer, kept: Tensor, other: dict[str, Tensor]) -> Tensor:
    """The metric of one circuit: input after input is corrected in the order of the pass, each in a pass of its own.

    A pass with all corrections so far says what the senders that the next inputs see say in the circuit.
    """
    graph, edits = EdgeGraph.of(model.config), []
    dropped = {e for e in edges(model.config) if not kept[graph.index(e)]}
    for group in groups(model.config):
        said = spoken(model, CLEAN, edits)
        for receiver in group:
            changes = [
                other[s] - said[s] for s in senders(receiver, model.config) if f"{s}->{receiver}" in dropped
            ]
            edits += [at(model.config, receiver, change) for change in changes]
    with torch.no_grad():
        return difference(model(CLEAN, Tap(edits=edits)))


def spoken(model: Transformer, tokens: Tensor, edits: list[Edit]) -> dict[str, Tensor]:
    """What every sender adds to the stream in a pass under edits: `writes`, with heads by the difference they make.

    A head's share is what its z W_O adds behind the layer's norm at that norm's scale, a linear map of it.
    """
    config, layers = model.config, range(model.config.n_layers)
    names = ["attn.hook_result", "hook_mlp_out", "ln1_post.hook_scale"]
    has = [True, config.mlp is not None, config.norm_place in ("sandwich", "output")]
    reads = [
        Read(START),
        *(Read(f"blocks.{i}.{n}") for i in layers for n, h in zip(names, has, strict=True) if h),
    ]
    seen = observe(model, Batch(tokens), reads, edits).trace
    found = {"input": seen[START]}
    for i in layers:
        shares = seen[f"blocks.{i}.attn.hook_result"]
        if has[2]:
            norm = model.block(i).ln1_post
            assert norm is not None and norm.gamma is not None
            shares = norm.centred(shares) * norm.gamma / seen[f"blocks.{i}.ln1_post.hook_scale"][:, :, None]
        found |= {f"a{i}.h{h}": x * config.residual_scale for h, x in enumerate(shares.unbind(2))}
        found |= {f"m{i}": seen[f"blocks.{i}.hook_mlp_out"]} if has[1] else {}
    return found


@functools.cache
def groups(config: ModelConfig) -> list[list[str]]:
    """Receivers in the order of the pass; those of one list see the same senders."""
    receivers = EdgeGraph.of(config).receivers
    return [list(group) for _, group in itertools.groupby(receivers, key=lambda r: r.partition(".")[0])]


@functools.cache
def senders(receiver: str, config: ModelConfig) -> list[str]:
    return [e.partition("->")[0] for e in edges(config) if e.partition("->")[2] == receiver]


def at(config: ModelConfig, receiver: str, change: Tensor) -> Edit:
    site, head = place(config, receiver)

    def corrected(x: Tensor) -> Tensor:
        if head is None:
            return x + change
        x[:, :, head] += change
        return x

    return Edit(site, corrected)


BIASED = replace(CONFIGS["gemma2"], out_bias=True)
"""Heads behind a norm of their sum, with a bias that belongs to none of them."""


# oracles


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_any_circuit_is_the_pass_written_out_node_by_node(name: str) -> None:
    model = build(name)
    interchange, other = task(model), writes(model, CORRUPT)
    masks = some_circuits(interchange.graph, 2)
    found = interchange.run(masks)
    for values, kept in zip(found, masks, strict=True):
        assert_close(values, slowly(model, kept, other), torch.float64)
    assert (found[0] - found[1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", [*SUMS, "biased"])
def test_all_edges_are_the_clean_run_and_none_the_corrupted_one(name: str) -> None:
    model = perturbed(BIASED) if name == "biased" else build(name)
    interchange = task(model)
    whole = interchange.graph.exists
    full, empty = interchange.run(torch.stack((whole, torch.zeros_like(whole))))
    assert (full - difference(model(CLEAN))).abs().max() <= 1e-9
    assert (empty - difference(model(CORRUPT))).abs().max() <= 1e-9


@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "attention-only"])
@pytest.mark.parametrize("replacement", ["mean", "zero"])
def test_means_and_zeros_replace_what_a_run_says(name: str, replacement: Replacement) -> None:
    model = build(name)
    interchange = task(model, replacement)
    masks = some_circuits(interchange.graph, 2)
    other = {s: x.mean(0, keepdim=True) for s, x in writes(model, CORRUPT).items()}
    if replacement == "zero":
        other = {s: torch.zeros_like(x) for s, x in other.items()}
    for values, kept in zip(interchange.run(masks), masks, strict=True):
        assert_close(values, slowly(model, kept, other), torch.float64)


def test_a_mean_is_over_the_reference_by_position_and_padding_does_not_count() -> None:
    model, width = build("llama-gqa"), CLEAN.shape[1]
    tokens = some_tokens(5, width, seed=3)
    keep = torch.ones_like(tokens, dtype=torch.bool)
    keep[0, 4:] = False
    interchange = task(model, "mean", reference=Batch(tokens, keep))
    whole, short = writes(model, tokens), writes(model, tokens[:1, :4])
    other = {}
    for s, x in whole.items():
        rest = x[1:].sum(0)
        rest[:4] += short[s][0]
        other[s] = (rest / keep.sum(0)[:, None])[None]
    (kept,) = some_circuits(interchange.graph, 1)
    assert_close(interchange.run(kept[None])[0], slowly(model, kept, other), torch.float64)
    small = replace(interchange, memory=1)
    assert_close(small.run(kept[None]), interchange.run(kept[None]))


# promises


@pytest.mark.parametrize("name", ["llama-gqa", "gemma2"])
def test_packing_and_padding_change_no_number(name: str) -> None:
    model = build(name)
    interchange = task(model)
    masks = some_circuits(interchange.graph, 4)
    plain = interchange.run(masks)
    assert_close(replace(interchange, memory=1).run(masks), plain)
    for side in ("left", "right"):
        batches = [padded(tokens, side) for tokens in (CLEAN, CORRUPT)]
        other = Interchange.of(HookedTransformer(model), *batches, metric=METRIC)
        assert_close(other.run(masks), plain)


def padded(tokens: Tensor, side: str) -> Batch:
    extra, hidden = torch.full((len(tokens), 2), 17), torch.zeros(len(tokens), 2, dtype=torch.bool)
    parts = [(tokens, torch.ones_like(tokens, dtype=torch.bool)), (extra, hidden)]
    values, keep = (torch.cat(x, 1) for x in zip(*(parts if side == "right" else parts[::-1]), strict=True))
    return Batch(values, keep)


def test_a_metric_that_compares_compares_with_the_clean_run() -> None:
    model = build("gpt2")
    interchange = Interchange.of(HookedTransformer(model), CLEAN, CORRUPT, metric=kl_divergence())
    whole = interchange.graph.exists
    masks = torch.stack((whole, torch.zeros_like(whole)))
    full, empty = interchange.run(masks)
    p, q = (model(x)[:, -1].log_softmax(-1) for x in (CLEAN, CORRUPT))
    assert full.abs().max() < 1e-12
    assert_close(empty, (p.exp() * (p - q)).sum(-1))
    assert_close(replace(interchange, memory=1).run(masks)[1], empty)


def test_a_metric_of_all_positions_sees_them_all() -> None:
    model = build("llama-gqa")
    interchange = Interchange.of(HookedTransformer(model), CLEAN, CORRUPT, metric=next_token_loss())
    (full,) = interchange.run(interchange.graph.exists[None])
    losses = model(CLEAN).log_softmax(-1)[:, :-1].gather(-1, CLEAN[:, 1:, None])
    assert_close(full, -losses[..., 0].mean(1))


def test_half_precision_is_near_and_keeps_the_ends() -> None:
    model = build("llama-gqa", torch.bfloat16)
    interchange = task(model)
    whole = interchange.graph.exists
    full, empty = interchange.run(torch.stack((whole, torch.zeros_like(whole))))
    assert_close(full, difference(model(CLEAN)).float(), torch.bfloat16)
    assert_close(empty, difference(model(CORRUPT)).float(), torch.bfloat16)


# edges one at a time


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_exact_effects_are_one_edge_corrupted_by_hand(name: str) -> None:
    model = build(name)
    table = edge_effects(HookedTransformer(model), CLEAN, CORRUPT, metric=METRIC, each=True)
    here, there = writes(model, CLEAN), writes(model, CORRUPT)
    change = {s: there[s] - here[s] for s in here}
    graph = EdgeGraph.of(model.config)
    each = torch.from_numpy(table["each"].values)
    for edge in list(edges(model.config))[::17]:
        s, r = graph.index(edge)
        assert_close(each[:, s, r], exact(model, CLEAN, edge, change), torch.float64)
    assert (torch.from_numpy(table.score.values).isnan() == ~graph.exists).all()
    assert_close(torch.from_numpy(table.score.values).nan_to_num(), each.nan_to_num().mean(0))
    assert_close(torch.from_numpy(table.clean.values), difference(model(CLEAN)))
    assert_close(torch.from_numpy(table.corrupt.values), difference(model(CORRUPT)))


@pytest.mark.parametrize("name", ["llama-gqa", "gptj"])
def test_circuits_that_lack_one_edge_are_the_exact_effects(name: str) -> None:
    model = build(name)
    interchange = task(model)
    graph = interchange.graph
    cells = graph.exists.nonzero()[::7]
    masks = graph.exists.repeat(len(cells), 1, 1)
    masks[torch.arange(len(cells)), cells[:, 0], cells[:, 1]] = False
    table = edge_effects(HookedTransformer(model), CLEAN, CORRUPT, metric=METRIC, each=True, batch_size=2)
    each = torch.from_numpy(table["each"].values)[:, cells[:, 0], cells[:, 1]]
    assert_close(interchange.run(masks) - difference(model(CLEAN)), each.T, torch.float64)


# refusals


def test_what_has_no_meaning_is_refused_by_name() -> None:
    model = HookedTransformer(build("gpt2"))
    ask = functools.partial(Interchange.of, model, CLEAN, CORRUPT, metric=METRIC)
    with pytest.raises((ValueError, TypeCheckError), match="replacement"):
        replace(ask(), replacement="noise")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reference prompts belong to replacement='mean', got 'zero'"):
        ask(replacement="zero", reference=CLEAN)
    with pytest.raises(ValueError, match="as long as the clean ones, got 5 positions for 7"):
        ask(replacement="mean", reference=CLEAN[:, :5])
    with pytest.raises((ValueError, TypeCheckError), match=r"masks \[circuit, sender, receiver\]"):
        ask().run(torch.ones(2, 11, 26, dtype=torch.bool))
    with pytest.raises(ValueError, match="norms the sum itself"):
        Interchange.of(HookedTransformer(build("post-norm")), CLEAN, CORRUPT, metric=METRIC)
    with pytest.raises(ValueError, match="must differ from its clean one"):
        edge_effects(model, CLEAN, CLEAN, metric=METRIC)


def test_nothing_of_a_pass_stays_behind() -> None:
    model = interp.HookedTransformer(build("gpt2"))
    interchange = task(model.transformer)
    masks = some_circuits(interchange.graph, 2)
    first = interchange.run(masks)
    interchange.run(~masks & interchange.graph.exists)
    assert torch.equal(interchange.run(masks), first)
