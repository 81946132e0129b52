"""Attention-only models as sums of paths: the direct path, single heads, virtual heads; and what each order is worth.

With frozen patterns and norm scales (`frozen`) the logits are a sum over the ways through the heads. Order k is
everything that passed exactly k of them. Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".

Freezing the patterns limits all this to V-composition: a head that serves another one's queries or keys (an induction
circuit's previous-token head) shows up in the pattern of that head, not as a path of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import comb, log
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.factored import FactoredMatrix
from interp.core.results import labelled
from interp.core.stats import Means, Partial, Rows
from interp.data.batch import Batch
from interp.data.text import Answers, Prompts
from interp.model.config import ModelConfig
from interp.model.loss import next_token_loss, predicted
from interp.model.tap import Trace
from interp.model.transformer import Transformer
from interp.passes.analysis import Analysis, run_batches
from interp.passes.observe import Subject, observe
from interp.residual.decomposition import check_sum, logit_direction
from interp.residual.frozen import Frozen, FrozenLayer, Readings, frozen_reads
from interp.weights.head_circuits import HeadCircuits

if TYPE_CHECKING:
    import xarray as xr

Head = tuple[int, int]
"""Layer and head."""
_NULL = "a uniform guess, log(d_vocab) nats"


def path_matrix(circuits: HeadCircuits, *heads: Head) -> FactoredMatrix:
    """W_E OV_1 OV_2 ... W_U `[source token, output token]`: what a path through these heads does to each logit.

    No head: the direct path, a bigram table. One: its full OV circuit. Two: a virtual head (Elhage et al. 2021, "Two-
    layer attention-only transformers"), whose pattern is the product of both patterns. The matrix is kept factored, the
    circuits' conventions (`folded`, `biases`: those of the first head) apply.
    Caveat: the norms of the stream itself, in post-norm models, are no part of it.
    Errors: IndexError for a head that does not exist, ValueError unless each head's layer is later than the one before.

    Example:
        >>> small = interp.HookedTransformer.from_pretrained("groundtruth-induction")
        >>> path_matrix(interp.weights.HeadCircuits(small), (0, 1), (1, 2))
        FactoredMatrix([64, 64], rank <= 64)
    """
    layers = [layer for layer, _ in heads]
    if any(later <= earlier for earlier, later in pairwise(layers)):
        raise ValueError(f"heads in the order of strictly rising layers are required, got {list(heads)}")
    if not heads:
        return circuits.direct()
    width, path = circuits.config.d_model, circuits.ov(heads[0])
    for head in heads[1:]:
        joined = path @ circuits.ov(head).rows(slice(width))  # what a head wrote carries no constant
        assert isinstance(joined, FactoredMatrix)
        path = joined
    return FactoredMatrix(circuits.embedded @ path.A, path.B @ circuits.unembedding)


def path_label(*heads: Head) -> str:
    """The name of a path in results: `direct`, `L0H1`, `L0H1>L1H2`."""
    return ">".join(f"L{layer}H{head}" for layer, head in heads) or "direct"


def orders(model: Subject, prompts: Prompts, *, prepend_bos: bool = True) -> "xr.Dataset":
    """Logits by order of V-composition, with patterns and norm scales frozen at those of the pass.

    Returns Dataset[order, prompt, pos, vocab] with `logits`; order k is what passed exactly k heads, 0 to n_layers.
    They sum to the model's logits (before a soft cap); `attrs["completeness_error"]`: by how much they miss, relative.
    The sum up to order k is what run k + 1 of Elhage et al.'s term-importance reruns gives: run 1 adds nothing to the
    stream, every later run adds what each layer's attention computed in the run before. So beta W_U + b_U (and, in
    post-norm models, the betas in the stream) are of order 0, b_V, b_O and the betas that heads read of order 1.
    Errors: ValueError for models with an MLP, cross-attention or a masked-LM head, or without logits;
    IncompleteSumError if the sum fails.

    Example:
        >>> small = interp.HookedTransformer.from_pretrained("groundtruth-induction")
        >>> dict(orders(small, "abcabc").sizes)
        {'order': 3, 'prompt': 1, 'pos': 7, 'vocab': 64}
    """
    batch = model.text.batch(prompts, prepend_bos=prepend_bos)
    reads = frozen_reads(model.transformer.config)
    frozen = Frozen(model.transformer, observe(model.transformer, batch, reads, answers_only=True).trace)
    values, error = order_logits(frozen)
    unit = "logits" if model.transformer.config.logit_softcap is None else "logits before the soft cap"
    return labelled(
        "orders",
        {"logits": (("order", "prompt", "pos", "vocab"), values)},
        coords={"order": range(len(values))},
        attrs={"unit": unit, "frozen": "patterns and norm scales", "completeness_error": error},
    )


@torch.no_grad()
def order_logits(frozen: Frozen) -> tuple[Float[Tensor, "order b p v"], float]:
    """Logits by order, and by how much their sum misses the model's (relative); IncompleteSumError if too much."""
    parts = frozen.part_logits(frozen.orders)
    parts = torch.cat((parts[:1] + frozen.constant, parts[1:]))
    whole = frozen.model.uncapped(frozen.final)
    return parts, check_sum(parts, whole, "logits by order", frozen.model.dtype)


def term_importance(
    model: Subject, data: Prompts, *, prepend_bos: bool = True, batch_size: int = 16
) -> "xr.Dataset":
    """The loss of an attention-only model with all terms up to each order, and by how much each order lowers it.

    Returns Dataset[order] in nats per token: `loss` with the terms of order 0 to k, `reduction` by order k given the
    lower ones (order 0: given a uniform guess), `terms` of that order (chains of k heads). Dataset[layer]: `alone`, the
    reduction by one layer's order-1 terms given order 0, and `given_others`, given all other terms of order <= 1. All
    with `_low` and `_high`, 95 % over rows; each row counts by its mean over predicted tokens. `uniform`: log(d_vocab).
    Patterns stay those of the whole model (Elhage et al. 2021, term importance): the effect of heads on patterns counts
    for nobody. Caveat: reductions depend on the order of adding; `alone` and `given_others` differ for that reason.
    Errors: as `orders`, and ValueError for a row that predicts no token.

    Example:
        >>> small = interp.HookedTransformer.from_pretrained("groundtruth-induction")
        >>> term_importance(small, ["abcdabcdabcd", "xyzwxyzwxyzw"]).terms.values.tolist()
        [1.0, 8.0, 16.0]
    """
    batch = model.text.batch(data, prepend_bos=prepend_bos)
    analysis = order_losses(model.transformer.config)
    return run_batches([analysis], model.transformer, batch.split(batch_size))[analysis.name]


def order_losses(config: ModelConfig) -> Analysis:
    """The analysis behind `term_importance`."""
    frozen_reads(config)  # refuses what cannot be expanded
    return Analysis(
        name="term_importance",
        reads=frozen_reads(config),
        compute=_losses,
        reduction=Means,
        finish=partial(_finish_losses, config=config),
    )


@torch.no_grad()
def _losses(trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
    frozen = Frozen(model, trace)
    check_sum(frozen.orders, frozen.final, "final stream by order", model.dtype)
    upto, first = frozen.orders.cumsum(0), frozen.first_order
    loss = torch.stack([_row_loss(frozen, batch, stream) for stream in upto], 1)
    single = torch.stack([_row_loss(frozen, batch, upto[0] + part) for part in first], 1)
    without = torch.stack([_row_loss(frozen, batch, upto[1] - part) for part in first], 1)
    uniform = torch.full_like(loss[:, :1], log(model.config.d_vocab))
    return {
        "loss": loss,
        "reduction": torch.cat((uniform, loss[:, :-1]), 1) - loss,
        "alone": loss[:, :1] - single,
        "given_others": without - loss[:, 1:2],
    }


def _row_loss(frozen: Frozen, batch: Batch, stream: Float[Tensor, "b p d"]) -> Float[Tensor, "b"]:
    """Each row's mean loss if this were the final stream, in nats; one stream at a time, as its logits are large."""
    logits, cap = frozen.logits(stream), frozen.model.config.logit_softcap
    if cap is not None:
        logits = cap * (logits / cap).tanh()
    loss = next_token_loss(logits, batch.tokens, batch.keep, batch.documents)
    counted = predicted(batch.keep, batch.documents)
    if counted is None:
        return loss.mean(1)
    if not bool(counted.any(1).all()):
        raise ValueError("term importance requires two neighbouring real tokens in every row")
    return loss.sum(1) / counted.sum(1)


def _finish_losses(merged: Partial, config: ModelConfig) -> "xr.Dataset":
    assert isinstance(merged, Means)
    n, h = config.n_layers, config.n_heads
    axis = {"loss": "order", "reduction": "order", "alone": "layer", "given_others": "layer"}
    values: dict[str, tuple[Sequence[str], Tensor]] = {}
    for name, moments in merged.moments.items():
        values |= moments.cells(name, (axis[name],))
    counts = torch.tensor(
        [float(comb(n, k) * h**k) for k in range(n + 1)], dtype=torch.float64
    )  # beyond int64 in deep models
    uniform = torch.tensor(log(config.d_vocab), dtype=torch.float64)
    return labelled(
        "term_importance",
        {**values, "terms": (("order",), counts), "uniform": ((), uniform)},
        coords={"order": range(n + 1), "layer": range(n)},
        attrs={
            "unit": "nats per token", "frozen": "patterns and norm scales", "interval": "95 % over rows",
            "null": _NULL, "rows": next(iter(merged.moments.values())).n,
        },
    )  # fmt: skip


def paths(
    model: Subject,
    prompts: Prompts,
    answer: Answers,
    wrong: Answers | None = None,
    *,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """What every path adds to the answer's logit (minus the wrong answer's) at the last token of each prompt.

    Returns Dataset[prompt, component] with `logits` in logit units (before a soft cap) and `total`, the model's own.
    Components: `direct` (the embeddings), `constant` (beta W_U + b_U; post-norm: also the betas in the stream), single
    heads `L0H3` on the direct stream with their constants (b_V, the beta they read), `0_attn_bias` (b_O), virtual heads
    `L0H3>L1H2`, of which the second acts linearly on what the first wrote, and `0_attn_bias>L1H2`. Models of more than
    two layers end in one `remainder`, all longer paths. The coordinate `order` counts heads (-1: the remainder).
    `attrs["completeness_error"]`: the largest relative difference between the sum and the model's own logits.
    Elhage et al. 2021, path expansion. Caveat: patterns are frozen, so Q- and K-composition is credited to nobody.
    Errors: as `orders`, and ValueError for answers that are not one token.

    Example:
        >>> small = interp.HookedTransformer.from_pretrained("groundtruth-induction")
        >>> table = paths(small, "abcdefabc", "d", "e")
        >>> str(table.component.values[table.logits.values.argmax()])
        'L1H2'
    """
    batch = model.text.batch(prompts, prepend_bos=prepend_bos).left_aligned()
    foils = None if wrong is None else model.text.targets(wrong, len(batch))
    batch = batch.with_answers(model.text.targets(answer, len(batch)), foils)
    analysis = path_expansion(model.transformer.config)
    return run_batches([analysis], model.transformer, batch.split(batch_size))[analysis.name]


def path_expansion(config: ModelConfig) -> Analysis:
    """The analysis behind `paths`; batches must carry answers and end in their last column."""
    frozen_reads(config)  # refuses what cannot be expanded
    return Analysis(
        name="paths",
        reads=frozen_reads(config),
        compute=_contributions,
        reduction=Rows,
        finish=partial(_finish_paths, config=config),
    )


@torch.no_grad()
def _contributions(trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
    if batch.answer is None:
        raise ValueError("path expansion requires batches with answers (Batch.with_answers)")
    if batch.keep is not None and not bool(batch.keep[:, -1].all()):
        raise ValueError("path expansion requires rows that end in the last column (Batch.left_aligned)")
    frozen = Frozen(model, trace)
    direction, constant = logit_direction(model, batch.answer, batch.wrong)
    last = torch.zeros_like(frozen.start[:, None, :, 0])
    last[..., -1] = 1
    end = Readings(last, direction.to(last)[:, None]).before(model.ln_final, frozen.scale)
    parts = path_logits(frozen, end)
    parts[()][:, 1] += constant.to(last)
    values = torch.cat([parts[key] for key in _grid(model.config)], 1)
    logits = model.uncapped(frozen.final[:, -1:])[:, 0].to(last)
    whole = terms = logits.gather(1, batch.answer[:, None])[:, 0]
    if batch.wrong is not None:
        foil = logits.gather(1, batch.wrong[:, None])[:, 0]
        whole, terms = whole - foil, torch.maximum(whole.abs(), foil.abs())
    error = check_sum(values.mT, whole, "paths", model.dtype, terms=terms)
    return {"logits": values, "total": whole, "error": torch.full_like(whole, error)}


def path_logits(frozen: Frozen, end: Readings) -> dict[tuple[int, ...], Float[Tensor, "b c"]]:
    """What `end`, one reading of the final stream, reads of every path, by the layers of its heads.

    (): direct, constant. (l,): heads, bias. (l1, l2): for each head of l2, heads and bias of l1. (-1,), in models of
    more than two layers: the remainder. The readings go back through the frozen maps, from the last block to the first.
    """
    found: dict[tuple[int, ...], Tensor] = {}
    later: dict[int, Readings] = {}
    remainder = end.of(frozen.orders[3:].sum(0)) if len(frozen.layers) > 2 else None
    constant = end.of_constant(end.direction.new_zeros(end.direction.shape[-1]))
    for index in reversed(range(len(frozen.layers))):
        layer = frozen.layers[index]
        if layer.sum_norm is not None and layer.sum_norm.bias is not None:
            constant = constant + end.of_constant(layer.sum_norm.bias)
        end = end.before(layer.sum_norm, layer.scale)
        later = {at: heads.before(layer.sum_norm, layer.scale) for at, heads in later.items()}
        z = layer.mixed(frozen.direct[index][None])[0]
        found[(index,)] = _written(layer, z, end)
        found |= {(index, at): _written(layer, z, heads) for at, heads in later.items()}
        at_output = end.times(layer.factor).before(layer.post, layer.post_scale)
        later[index] = at_output.through_heads(layer)
    found[()] = torch.cat((end.of(frozen.start), constant), 1)
    return found if remainder is None else found | {(-1,): remainder}


def _written(layer: FrozenLayer, z: Float[Tensor, "b p h e"], readings: Readings) -> Float[Tensor, "b n"]:
    """What each reading of the stream behind a block's heads reads of each head's z and, last, of the bias."""
    added = readings.times(layer.factor)
    inner = added.before(layer.post, layer.post_scale)
    bias = inner.of_constant(layer.weights.b_O)
    if layer.post is not None and layer.post.bias is not None:
        bias = bias + added.of_constant(layer.post.bias)
    return torch.cat((inner.of_heads(z, layer.weights.W_O), bias[..., None]), -1).flatten(1)


def _grid(config: ModelConfig) -> Iterator[tuple[int, ...]]:
    """The blocks of components in the order of the result."""
    layers = range(config.n_layers)
    yield ()
    yield from ((layer,) for layer in layers)
    yield from ((first, second) for second in layers for first in range(second))
    if config.n_layers > 2:
        yield (-1,)


def _labels(config: ModelConfig, key: tuple[int, ...]) -> list[str]:
    """The components of one block."""
    if key == ():
        return ["direct", "constant"]
    if key == (-1,):
        return ["remainder"]
    writes = [*(path_label((key[0], h)) for h in range(config.n_heads)), f"{key[0]}_attn_bias"]
    if len(key) == 1:
        return writes
    return [f"{first}>{path_label((key[1], h))}" for h in range(config.n_heads) for first in writes]


def _finish_paths(merged: Partial, config: ModelConfig) -> "xr.Dataset":
    assert isinstance(merged, Rows)
    grid = list(_grid(config))
    names = [label for key in grid for label in _labels(config, key)]
    depth = [-1 if key == (-1,) else len(key) for key in grid for _ in _labels(config, key)]
    unit = "logits" if config.logit_softcap is None else "logits before the soft cap"
    found = labelled(
        "paths",
        {"logits": (("prompt", "component"), merged.rows["logits"]), "total": (("prompt",), merged.rows["total"])},
        coords={"component": names},
        attrs={
            "unit": unit, "frozen": "patterns and norm scales",
            "completeness_error": float(merged.rows["error"].max()),
        },
    )  # fmt: skip
    return found.assign_coords(order=("component", depth))
