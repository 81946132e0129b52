"""Adaptive and hierarchical softmax against their definitions, and what the rest of the toolkit makes of them."""

import copy
import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.compat.hooked_export import to_hooked_state
from interp.data.batch import Batch
from interp.families import load
from interp.lab import AdaptiveSoftmax, HierarchicalSoftmax
from interp.lab.output import AdaptiveOutput, TreeOutput
from interp.lab.training.losses import mean_loss
from interp.lenses import late_layers, output_lens
from interp.lenses.imprint import top_vjp
from interp.model import Edit, FullSoftmax, ModelConfig, Read, Tap, Transformer, Weights
from interp.model.loss import next_token_loss, next_token_loss_of
from interp.residual.decomposition import logit_direction
from interp.residual.paths import frozen_reads
from interp.tasks.examples import Examples
from tests.configs import CONFIGS, D_VOCAB, perturbed, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

COUNTS = tuple(1000 // (1 + (7 * i) % D_VOCAB) for i in range(D_VOCAB))
"""Counts that fall as Zipf's law has them, in another order than the ids."""
KINDS = {
    "adaptive": replace(CONFIGS["gpt2"], output=AdaptiveSoftmax((10, 20), 2.0)),
    "adaptive-one": replace(CONFIGS["llama-gqa"], output=AdaptiveSoftmax((1,)), unembed_bias=True),
    "tree": replace(CONFIGS["llama-gqa"], output=HierarchicalSoftmax()),
    "tree-bias": replace(CONFIGS["gpt2"], output=HierarchicalSoftmax(), unembed_bias=True),
    "huffman": replace(CONFIGS["gpt2"], output=HierarchicalSoftmax(COUNTS), unembed_bias=True),
}
EVERY = pytest.mark.parametrize("name", KINDS)


def built(name: str, dtype: torch.dtype = torch.float64) -> Transformer:
    torch.manual_seed(0)
    return perturbed(KINDS[name], dtype)


def slow_adaptive(model: Transformer, x: Tensor) -> Tensor:
    """Grave et al. 2017, section 4: p(w) = p_head(w), or p_head(cluster) p(w | cluster) behind a narrower matrix."""
    assert isinstance(model.output, AdaptiveOutput)
    layer, found = model.output.layer, []
    head = layer.head.weight @ x + (0 if layer.head.bias is None else layer.head.bias)
    shares = head.exp() / head.exp().sum()
    first, n_clusters = layer.cutoffs[0], len(layer.cutoffs) - 1
    found += list(shares[:first])
    for i in range(n_clusters):
        narrow, wide = layer.tail[i].parameters()
        scores = (wide @ (narrow @ x)).exp()
        found += list(shares[first + i] * scores / scores.sum())
    return torch.stack(found)


def slow_huffman(counts: Sequence[int]) -> list[tuple[float, tuple[int, ...]]]:
    """Nodes as sets of tokens, joined until one is left: of each inner node the total, and its two sets, + first."""
    open_, joined = [(count, i, (i,)) for i, count in enumerate(counts)], []
    while len(open_) > 1:
        open_.sort()
        rare, other = open_[:2]
        joined.append((other[2], rare[2]))
        open_ = [*open_[2:], (rare[0] + other[0], len(counts) + len(joined), (*other[2], *rare[2]))]
    return joined[::-1]  # type: ignore[return-value]


def slow_huffman_softmax(model: Transformer, x: Tensor) -> Tensor:
    """Each token's probability as the product over the nodes whose sets hold it."""
    assert isinstance(model.output, TreeOutput)
    found, nodes = torch.ones(D_VOCAB, dtype=x.dtype), model.output.nodes
    for node, (plus, minus) in enumerate(slow_huffman(COUNTS)):
        up = (nodes.weight[node] @ x + nodes.bias[node]).sigmoid()
        found[list(plus)] *= up  # type: ignore[call-overload]
        found[list(minus)] *= 1 - up  # type: ignore[call-overload]
    return found


def slow_tree(model: Transformer, x: Tensor) -> Tensor:
    """A walk from the root to every leaf."""
    assert isinstance(model.output, TreeOutput)
    nodes, found = model.output.nodes, {}
    waiting = [(0, torch.ones((), dtype=x.dtype))]
    while waiting:
        node, p = waiting.pop()
        if node >= D_VOCAB - 1:
            found[node - D_VOCAB + 1] = p
            continue
        left = (nodes.weight[node] @ x + (0 if nodes.bias is None else nodes.bias[node])).sigmoid()
        waiting += [(2 * node + 1, p * left), (2 * node + 2, p * (1 - left))]
    return torch.stack([found[w] for w in range(D_VOCAB)])


@EVERY
def test_probabilities_are_those_of_the_definition(name: str) -> None:
    model, normed = built(name), Read("ln_final.hook_normalized")
    tap = Tap([normed])
    found = model(some_tokens(), tap).exp()
    slow = {"adaptive": slow_adaptive, "huffman": slow_huffman_softmax}.get(name.partition("-")[0], slow_tree)
    for row, column in product(range(3), (0, 4, 8)):
        assert_close(found[row, column], slow(model, tap.values[normed][row, column]))


@EVERY
def test_probabilities_sum_to_one_and_are_their_own_softmax(name: str) -> None:
    logits = built(name)(some_tokens())
    assert_close(logits.exp().sum(-1), torch.ones(3, 9, dtype=torch.float64))
    assert_close(logits.log_softmax(-1), logits)


@pytest.mark.parametrize("d_vocab", [2, 3, 4, 5, 8, 9, 33])
def test_a_tree_of_any_size_is_complete(d_vocab: int) -> None:
    torch.manual_seed(0)
    layer, x = TreeOutput(6, d_vocab, bias=True).double(), torch.randn(4, 6, dtype=torch.float64)
    logits = layer(x)
    assert_close(logits.exp().sum(-1), torch.ones(4, dtype=torch.float64))
    for target in range(d_vocab):
        assert_close(layer.loss(x, torch.full((4,), target)), -logits[:, target])


def mean_depth(counts: Sequence[int]) -> float:
    """Nodes on the way to a token, in the mean over the counts."""
    layer = TreeOutput(4, len(counts), bias=False, counts=counts)
    torch.nn.init.zeros_(layer.nodes.weight)
    depth = (-layer(torch.ones(4)) / math.log(2)).tolist()
    return sum(n * d for n, d in zip(counts, depth, strict=True)) / sum(counts)


@functools.cache
def shortest(counts: tuple[int, ...]) -> int:
    """The smallest sum of counts times depths of any binary tree over these tokens, by trying every split."""
    if len(counts) == 1:
        return 0
    first, rest, best = counts[0], counts[1:], math.inf
    for chosen in product((True, False), repeat=len(rest)):
        if not all(chosen):
            with_first = (first, *(c for c, here in zip(rest, chosen, strict=True) if here))
            without = tuple(c for c, here in zip(rest, chosen, strict=True) if not here)
            best = min(best, shortest(tuple(sorted(with_first))) + shortest(tuple(sorted(without))))
    return sum(counts) + int(best)


@pytest.mark.parametrize(
    "counts", [(5, 1, 1), (8, 4, 2, 1, 1), (3, 3, 3, 3, 3), (9, 1, 7, 2, 8, 3), (0, 0, 5)]
)
def test_no_tree_has_shorter_ways_than_huffmans(counts: tuple[int, ...]) -> None:
    assert mean_depth(counts) == pytest.approx(shortest(counts) / sum(counts), rel=1e-5)


def test_frequent_tokens_have_short_ways_within_a_bit_of_the_entropy() -> None:
    """Huffman 1952: H <= mean length < H + 1 bit; the complete tree needs log2(V) whatever the counts."""
    share = torch.tensor(COUNTS) / sum(COUNTS)
    entropy = -float((share * share.log2()).sum())
    assert entropy <= mean_depth(COUNTS) < min(entropy + 1, math.log2(D_VOCAB))


def test_another_number_of_counts_than_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="a count for each of 31 tokens, got 3"):
        replace(CONFIGS["gpt2"], output=HierarchicalSoftmax((1, 2, 3)))
    with pytest.raises(ValueError, match="counts >= 0, got -1"):
        HierarchicalSoftmax((1, -1))


def test_a_tree_without_opinions_halves_at_every_node() -> None:
    """Zero weights: 8 tokens have probability 1/8 each."""
    layer = TreeOutput(6, 8, bias=True).double()
    torch.nn.init.zeros_(layer.nodes.weight)
    torch.nn.init.zeros_(layer.nodes.bias)
    assert_close(
        layer(torch.ones(1, 6, dtype=torch.float64)).exp(), torch.full((1, 8), 0.125, dtype=torch.float64)
    )


@EVERY
@over("marked", ["all", "padded", "packed"])
def test_the_loss_of_the_targets_alone_is_that_of_the_whole_row(name: str, marked: str) -> None:
    model, tokens = built(name), some_tokens()
    keep = torch.arange(9).expand(3, -1) >= torch.tensor([[0], [2], [4]]) if marked == "padded" else None
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2]).expand(3, -1) if marked == "packed" else None
    stream = model(tokens, stop=2, keep=keep, documents=documents)
    expected = next_token_loss(model.read_out(stream), tokens, keep, documents)
    assert_close(next_token_loss_of(model, stream, tokens, keep, documents), expected)


@EVERY
def test_both_losses_train_the_same_parameters_alike(name: str) -> None:
    found = []
    for alone in (True, False):
        model, tokens = built(name).requires_grad_(True), some_tokens()
        stream = model(tokens, stop=2)
        loss = (
            next_token_loss_of(model, stream, tokens)
            if alone
            else next_token_loss(model.read_out(stream), tokens)
        )
        found.append(torch.autograd.grad(loss.sum(), list(model.parameters())))
    for one, other in zip(*found, strict=True):
        assert_close(one, other)


def test_the_loss_from_the_stream_of_a_full_softmax_is_the_usual_one() -> None:
    model, tokens = perturbed(CONFIGS["gpt2"]), some_tokens()
    assert_close(
        next_token_loss_of(model, model(tokens, stop=2), tokens), next_token_loss(model(tokens), tokens)
    )
    with pytest.raises(ValueError, match="at least two tokens"):
        next_token_loss_of(built("tree"), built("tree")(tokens[:, :1], stop=2), tokens[:, :1])
    bare = perturbed(replace(CONFIGS["gpt2"], unembed=False))
    with pytest.raises(ValueError, match="ends in its residual stream"):
        next_token_loss_of(bare, bare(tokens, stop=2), tokens)


@EVERY
def test_some_columns_are_those_of_all(name: str) -> None:
    model, tokens = built(name), some_tokens()
    stream = model(tokens, stop=2)
    columns = torch.tensor([3, 30, 0]).expand(3, 9, -1)
    assert_close(model.read_out(stream, columns=columns), model(tokens).gather(-1, columns))


@EVERY
def test_logits_are_a_site_and_half_precision_is_near(name: str) -> None:
    model, site = built(name), Read("unembed.hook_out")
    tap = Tap([site], [Edit("unembed.hook_out", lambda x: 2 * x)])
    doubled = model(some_tokens(), tap)
    assert_close(doubled, 2 * model(some_tokens()))
    assert_close(tap.values[site], doubled)
    low = built(name, torch.bfloat16)(some_tokens())
    assert low.dtype == torch.bfloat16
    assert_close(low.double(), model(some_tokens()), torch.bfloat16)
    narrow = built(name, torch.bfloat16)
    stream, columns = narrow(some_tokens(), stop=2).float(), torch.tensor([3, 30, 0]).expand(3, 9, -1)
    exact = copy.deepcopy(narrow).float().read_out(stream)
    assert_close(narrow.read_out(stream), exact)
    assert_close(narrow.read_out(stream, columns=columns), exact.gather(-1, columns))


@EVERY
def test_a_lens_reads_probabilities_and_its_last_depth_is_the_model(name: str) -> None:
    model, tokens = built(name, torch.float32), some_tokens()
    lens = interp.logit_lens(HookedTransformer(model), tokens, top=3)
    target = model(tokens)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0].exp()
    assert_close(torch.tensor(lens["target_prob"].values)[:, -1, :-1].float(), target)
    assert torch.equal(torch.tensor(lens["top_token"].values)[:, -1, :, 0], model(tokens).argmax(-1))


@EVERY
def test_what_needs_an_unembedding_says_why_it_is_not_there(name: str) -> None:
    model = built(name)
    with pytest.raises(AttributeError, match=r"no W_U: its output layer is"):
        _ = Weights(model).W_U
    with pytest.raises(ValueError, match="logits"):
        interp.attribute(HookedTransformer(model), some_tokens(), torch.tensor([3, 14, 7]))


@EVERY
def test_a_model_is_stored_and_loaded(name: str, tmp_path: Path) -> None:
    model = built(name, torch.float32)
    assert ModelConfig.from_dict(json.loads(json.dumps(model.config.to_dict()))) == model.config
    load.save(model, tmp_path / "model")
    assert torch.equal(load.from_folder(tmp_path / "model")(some_tokens()), model(some_tokens()))


@pytest.mark.slow
def test_training_lowers_the_loss_of_either_layer() -> None:
    for name in KINDS:
        torch.manual_seed(0)
        model, tokens = Transformer(KINDS[name]), some_tokens()
        optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
        for _ in range(40):
            loss = next_token_loss_of(model, model(tokens, stop=2), tokens).mean()
            losses.append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert losses[-1] < 0.75 * losses[0], name
        assert F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) < losses[-1]


@EVERY
@pytest.mark.parametrize("determined_only", [False, True])
def test_training_s_loss_is_that_of_all_log_probabilities(name: str, determined_only: bool) -> None:
    model, generator = built(name), torch.Generator().manual_seed(0)
    keep = torch.arange(9)[None] < torch.tensor([9, 6, 4])[:, None]
    determined = (torch.rand(3, 8, generator=generator) < 0.5) & keep[:, 1:]
    examples = Examples(Batch(some_tokens(), keep), determined)
    counted = determined if determined_only else keep[:, 1:]
    said = model(some_tokens(), keep=keep)[:, :-1].log_softmax(-1)
    said = said.gather(-1, some_tokens()[:, 1:, None])[..., 0]
    assert_close(mean_loss(model, examples, determined_only=determined_only), -said[counted].mean())


def test_training_never_makes_a_row_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("tree")
    monkeypatch.setattr(model, "read_out", None)
    assert bool(mean_loss(model, Examples(Batch(some_tokens()))).isfinite())


LINEAR: dict[str, Callable[[HookedTransformer], object]] = {
    "attribution": lambda model: interp.attribute(model, some_tokens(), [3, 14, 7]),
    "output lens": lambda model: output_lens(model, some_tokens(), "L0H1"),
    "late layers": lambda model: late_layers(model, some_tokens(), [3, 14, 7]),
    "one direction": lambda model: logit_direction(model.transformer, torch.tensor([3]), None),
    "top VJP": lambda model: top_vjp(model.transformer, torch.zeros(1, D_VOCAB), torch.tensor([3])),
    "path expansion": lambda model: frozen_reads(replace(model.cfg, mlp=None)),
    "TransformerLens": lambda model: to_hooked_state(model.transformer),
}


@pytest.mark.parametrize("door", LINEAR)
def test_what_needs_linear_logits_names_the_output_layer(door: str) -> None:
    with pytest.raises(ValueError, match=r"(this model|this one|express).*AdaptiveSoftmax\(cutoffs"):
        LINEAR[door](HookedTransformer(built("adaptive")))


def test_head_scores_leave_out_what_needs_linear_logits() -> None:
    data = interp.tasks.RepeatedTokens(period=6, repeats=3, rows=2)
    table = interp.heads(HookedTransformer(built("adaptive")), repeats=data, sentences=None)
    assert not {"copying", "copying_weights"} & set(table.score.values.tolist())
    assert "AdaptiveSoftmax" in table.attrs["no_copying"]
    assert bool(table.value.sel(score="induction").notnull().all())


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "a tied embedding": ({"tied": True}, "no tied"),
    "a cap on log-probabilities": ({"logit_softcap": 3.0}, "no tied, mlm_head, logit_softcap"),
    "no logits": ({"unembed": False}, "unembed, no tied"),
    "clusters beyond the vocabulary": ({"output": AdaptiveSoftmax((10, 31))}, "cutoffs below d_vocab"),
    "a cluster without a width": ({"output": AdaptiveSoftmax((4, 8, 12), 3.0)}, "d_model >= div_value"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_that_contradict_themselves_are_refused(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        replace(KINDS["adaptive"], **changes)  # type: ignore[arg-type]
    assert CONFIGS["gpt2"].output == FullSoftmax()


@pytest.mark.parametrize("cutoffs", [(), (5, 5), (7, 3), (0, 2)])
def test_clusters_must_begin_one_after_the_other(cutoffs: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rising cutoffs"):
        AdaptiveSoftmax(cutoffs)
