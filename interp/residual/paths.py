"""Models as sums of paths: the direct path, single heads, virtual heads, what MLPs add; and the loss by order.

With its attention pattern A frozen, a head is the linear map A (x) W_V W_O: A mixes positions, W_V W_O maps vectors. A
norm with a frozen scale is affine. So the logits are a sum over paths through the heads; order k is the sum of all
paths through exactly k heads. Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits". What an MLP adds
to the stream is no linear map of it: it is taken as the pass has it, and paths begin there as they do at the embedding.

With frozen patterns only V-composition appears as paths. A head that another one's queries or keys read (the
previous-token head of an induction circuit) acts on that head's pattern, and is not a path of its own.

Tensors by order have the orders on their first axis, those of paths from the embedding before those of paths from MLPs.
Each head applies its constants (b_V, b_O, betas) to the first of them, and only its linear part to every other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from math import comb, log
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from interp.core.boundary import public
from interp.core.factored import FactoredMatrix
from interp.core.results import Score, labelled, scored
from interp.core.stats import WIDE, Means, Partial, Rows, upcast
from interp.data.answers import AnswerTokens
from interp.data.batch import Answers, Batch
from interp.data.text import Text
from interp.model.cells import Span, edited
from interp.model.config import FullSoftmax, ModelConfig
from interp.model.edits import Scale, Zero
from interp.model.layout import Layout
from interp.model.loss import next_token_loss
from interp.model.parts import Part, PartName, as_part
from interp.model.records import require
from interp.model.sites import final_stream, first_stream, names
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.model.weights import LayerWeights, Weights
from interp.passes.answer_tokens import by_answer_token
from interp.passes.frozen import (
    FrozenNorm,
    final_norm,
    input_norm,
    output_norm,
    output_scale,
    sum_norm,
    sum_scale,
)
from interp.passes.observe import Model, Subject
from interp.passes.question import ByRow, Question, Reading
from interp.residual.decomposition import (
    EPS,
    REMAINDER,
    bound,
    check_missed,
    check_sum,
    logit_direction,
    sum_error,
)
from interp.runs.functions import of_data
from interp.weights.head_circuits import HeadCircuits, as_circuits

if TYPE_CHECKING:
    import xarray as xr

_Z = "attn.hook_z"
_RECORDED = (
    "hook_q_input", "hook_k_input", "attn.hook_q", "attn.hook_k", "attn.q_norm", "attn.k_norm", "attn.hook_rot",
    "attn.hook_smeared_k", "attn.hook_attn_scores", "attn.hook_first_pattern", "attn.hook_pattern", "ln1.hook_scale",
    "ln1_post.hook_scale", "hook_mlp_in", "mlp.", "ln2", "hook_mlp_out", "hook_mlp_before", "mlp_before.", "ln0",
)  # fmt: skip
"""Prefixes of the sites of a block at which an edit acts through what is recorded only: patterns, norm scales, MLPs."""


@dataclass(frozen=True, eq=False)
class Paths(Question):
    """How much every path through the heads adds to the answer's logit (minus the wrong answer's) at the last token.

    Paths: `direct` (the embeddings), `constant` (beta W_U + b_U; post-norm: also the betas in the stream), single
    heads `L0H3` on the direct stream with their constants (b_V, the beta they read), `L0.attn_bias` (b_O), virtual
    heads `L0H3>L1H2`, of which the second acts linearly on what the first wrote, and `L0.attn_bias>L1H2`. In models
    with MLPs also what each MLP adds, `L0.mlp`, and heads on that, `L0.mlp>L1H2`. Where paths may be longer, all longer
    ones together are the `remainder`.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        answer: token whose logit is split, one for all prompts or one each, as text or id; of an answer of several
            tokens each, along the dim `answer_token` (NaN beyond its end); None: the answers of the data.
        wrong: token that the answer is contrasted with, given like `answer`; None: none, or without `answer` that of
            the data.

    Returns:
        Dataset over `prompt` and `path`, in logits (before a soft cap). The coordinate `order` counts heads (-1: the
        remainder); `mlps` says 1 where a path begins at an MLP, 0 elsewhere (-1: the remainder).

        - `value` [prompt, path]: what each path adds.
        - `total` [prompt]: the model's own number.
        - `rounding` [prompt]: what the pass rounded off: `total` minus the sum over paths.

        `attrs["completeness_error"]` is the largest relative difference between the sum and the model's own logits.

    Raises:
        ValueError: as in `orders`.
        IncompleteSumError: the sum fails.

    Caveat:
        Patterns are frozen, so Q- and K-composition is credited to no path. So are the outputs of MLPs: what a head
        wrote and an MLP answered to is the MLP's. `attribution_graph` follows it through the neurons.

    Source:
        Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", path expansion.

    See Also:
        `orders`: all paths of one length together. `attribute`: each part by itself.

    Example:
        >>> small = interp.HookedTransformer.from_pretrained("groundtruth-induction")
        >>> table = paths(small, "abcdefabc", "d", "e")
        >>> str(table.path.values[table.value.values.argmax()])
        'L1H2'
    """

    of_layers: ClassVar[bool] = False

    answer: Answers | None = None
    wrong: Answers | None = None

    def bind(self, model: Subject) -> ByRow:
        """The patterns and scales of a pass, and a reading carried back through them."""
        check_expandable(model.transformer)
        config = model.transformer.config
        question = ByRow(
            self.name,
            Reading(frozen_reads(config), _path_values, ends_aligned=True),
            Rows,
            partial(_finish_paths, name=self.name, config=config),
            AnswerTokens.of(model.text, self.answer, self.wrong, several=True),
        )
        return by_answer_token(question, model.text)


@dataclass(frozen=True)
class Orders(Question):
    """Logits by order of V-composition, with patterns and norm scales frozen at those of the pass.

    The sum up to order k is the logits of run k + 1 of Elhage et al.'s (2021) term-importance reruns: run 1 adds
    nothing to the stream, every later run adds what each layer's attention computed in the run before. So beta W_U +
    b_U (and, in post-norm models, the betas in the stream) are of order 0, b_V, b_O and the betas that heads read of
    order 1. What MLPs add is of order 0, too, as it was in the pass: an order counts heads after the embedding or an
    MLP.

    Args:
        data: prompts, token ids, a batch, files or a stream. Every logit of every order is kept: for prompts in
            memory.

    Returns:
        Dataset over `prompt`, `order`, `pos` and `vocab`; `token` is the text of every token.

        - `value`: logits (before a soft cap) of what passed exactly k heads, k from 0 to n_layers. Over orders they
          sum to the model's logits. Padded positions hold NaN.

        `attrs["completeness_error"]` says by how much they miss, relative.

    Raises:
        ValueError: models with cross-attention or a masked-LM head, without logits, or with mixers that are no patterns
            on values, and edits under which the model is no sum of paths (`Zero` and `Scale` of heads, and changes of
            patterns and of what MLPs do, are fine).
        IncompleteSumError: the sum fails.

    See Also:
        `term_importance`: the loss by order. `paths`: single paths, for one answer.

    Example:
        >>> small = interp.HookedTransformer.from_pretrained("groundtruth-induction")
        >>> dict(orders(small, "abcabc").sizes)
        {'prompt': 1, 'order': 3, 'pos': 7, 'vocab': 64}
    """

    of_layers: ClassVar[bool] = False

    def bind(self, model: Subject) -> ByRow:
        """The patterns and scales of a pass."""
        check_expandable(model.transformer)
        config = model.transformer.config
        finish = partial(_finish_orders, name=self.name, config=config, text=model.text)
        return ByRow(self.name, Reading(frozen_reads(config), _order_values), Rows, finish)


@dataclass(frozen=True)
class TermImportance(Question):
    """Loss by order of terms: how much each order of paths through heads, and each layer's heads, lower it.

    Patterns stay those of the whole model, and so does what MLPs add, which is of order 0: the effect of heads on
    patterns and on MLPs counts for no term.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.

    Returns:
        Dataset over `term` and `score`, in nats per token. Terms: `order 0`, `order 1`, ... (all chains of so many
        heads), and the chains of one head by layer, `L0.attn`, `L1.attn`; the coordinate `order` is their number of
        heads.

        - `value`: mean over rows, each of which counts by its mean over predicted tokens, with `low` and `high` (95 %
          over rows), and `n`. Scores: `loss`, with these terms and all those of lower orders; `reduction`, by how much
          these terms lower it given those of lower orders (order 0: given a uniform guess); `given_others`, the same
          given also all other terms of their own order.
        - `null`: for the loss that of a uniform guess, log(d_vocab); 0 for the others.
        - `terms` [term]: how many chains they are.

    Raises:
        ValueError: as in `orders`, and a row that predicts no token.
        IncompleteSumError: the sum fails.

    Caveat:
        Reductions depend on the order of adding; for a layer's heads the two differ for that reason.

    Source:
        Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", term importance.

    Example:
        >>> small = interp.HookedTransformer.from_pretrained("groundtruth-induction")
        >>> result = term_importance(small, ["abcdabcdabcd", "xyzwxyzwxyzw"])
        >>> dict(zip(result.term.values.tolist(), result.terms.values.tolist(), strict=True))
        {'order 0': 1.0, 'order 1': 8.0, 'order 2': 16.0, 'L0.attn': 4.0, 'L1.attn': 4.0}
    """

    of_layers: ClassVar[bool] = False

    def bind(self, model: Subject) -> ByRow:
        """The patterns and scales of a pass."""
        check_expandable(model.transformer)
        config = model.transformer.config
        finish = partial(_finish_losses, name=self.name, config=config)
        return ByRow(self.name, Reading(frozen_reads(config), _losses), Means, finish)


paths = of_data(Paths)


orders = of_data(Orders)


term_importance = of_data(TermImportance)


@public()
def path_matrix(circuits: Model | HeadCircuits, *heads: PartName) -> FactoredMatrix:
    """Matrix W_E OV_1 OV_2 ... W_U of a path through heads: effect of each source token on each logit.

    Without a head: the direct path, a bigram table. One: its full OV circuit. Two: a virtual head, whose pattern is
    the product of both patterns. The circuits' conventions (`folded`, `biases`: those of the first head) apply.

    Args:
        circuits: a model (norms folded in, effective embedding), or circuits under other conventions.
        heads: the heads, in the order of the path: "L0H1", or whatever else names a head.

    Returns:
        [source token, output token], kept factored.

    Raises:
        KeyError: an unknown part.
        IndexError: a head that does not exist.
        ValueError: a part that is no head, and heads whose layers do not rise strictly.

    Caveat:
        The norms of the stream itself, in post-norm models, are no part of it.

    Source:
        Elhage et al. 2021, "Two-layer attention-only transformers".

    Example:
        >>> small = interp.HookedTransformer.from_pretrained("groundtruth-induction")
        >>> path_matrix(small, "L0H1", "L1H2")
        FactoredMatrix([64, 64], rank <= 64)
    """
    circuits = as_circuits(circuits)
    chosen = [_head_index(as_part(head, circuits.config)) for head in heads]
    if any(later <= earlier for (earlier, _), (later, _) in pairwise(chosen)):
        named = ", ".join(path_name(head) for head in heads)
        raise ValueError(f"heads in the order of strictly rising layers are required, got {named}")
    if not chosen:
        return circuits.direct()
    width, path = circuits.config.d_model, circuits.ov(chosen[0]).wide()
    for place in chosen[1:]:
        joined = path @ circuits.ov(place).wide().rows(slice(width))  # what a head wrote carries no constant
        assert isinstance(joined, FactoredMatrix)
        path = joined
    return FactoredMatrix(upcast(circuits.embedded) @ path.A, path.B @ upcast(circuits.unembedding))


def _head_index(part: Part) -> tuple[int, int]:
    """Layer and index of a head. ValueError for any other part."""
    if part.kind != "head" or part.layer is None or part.index is None:
        raise ValueError(f"a path goes through heads of self-attention, such as L0H1, got {part}")
    return part.layer, part.index


def path_name(*parts: PartName) -> str:
    """The name of a path in results: `direct`, `L0H1`, `L0H1>L1H2`.

    Args:
        parts: the parts of the path, in order.

    Returns:
        The parts' names, joined by ">".
    """
    return ">".join(str(Part.of(part)) for part in parts) or "direct"


# --- by order -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _order_values(trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
    batch.require_one_text("path expansion")
    values, error = order_logits(Frozen(model, trace, batch.layout))
    by_row = values.movedim(1, 0).masked_fill(~batch.real[:, None, :, None], torch.nan)
    errors = torch.full_like(by_row[:, 0, 0, 0], error)
    return {"value": by_row, "token": batch.token_ids, "error": errors, **_half_error(model, errors)}


def _half_error(model: Transformer, error: Float[Tensor, "b"]) -> dict[str, Float[Tensor, "b"]]:
    """The error under the name that `_half_precision_notes` reads, in half precision; empty in float32."""
    return {} if model.dtype in WIDE else {"half": error}


def _half_precision_notes(rows: Mapping[str, Tensor]) -> list[str]:
    """Note about the precision of the check under half precision; empty in float32."""
    if "half" not in rows:
        return []
    return [
        f"half precision: the pass rounded off {float(rows['half'].max()):.1g} of the largest term; the terms were "
        "checked in float32, against the pass of the same patterns and scales"
    ]


@torch.no_grad()
def order_logits(frozen: Frozen) -> tuple[Float[Tensor, "order b p v"], float]:
    """Logits by order of V-composition, and the relative error of their sum against the model's logits.

    Args:
        frozen: a recorded pass.

    Returns:
        Logits [order, b, p, v], before a soft cap, and the relative error.

    Raises:
        IncompleteSumError: the error is more than rounding.
    """
    frozen.check("logits by order")
    parts = frozen.part_logits(frozen.orders)
    parts = torch.cat((parts[:1] + frozen.constant, parts[1:]))
    check_sum(parts, frozen.logits(frozen.again), "logits by order", size=frozen.logits_size)
    return parts, sum_error(parts, frozen.model.uncapped(upcast(frozen.final)))


def _finish_orders(merged: Partial, name: str, config: ModelConfig, text: Text) -> xr.Dataset:
    assert isinstance(merged, Rows)
    return labelled(
        name,
        {"value": (("prompt", "order", "pos", "vocab"), merged.rows["value"])},
        coords={"order": range(config.n_layers + 1), "token": text.token_words(merged.rows["token"])},
        units=_unit(config),
        attrs={"frozen": _frozen_words(config), "completeness_error": float(merged.rows["error"].max())},
        notes=_half_precision_notes(merged.rows),
    )


def _unit(config: ModelConfig) -> str:
    return "logits" if config.logit_softcap is None else "logits before the soft cap"


@torch.no_grad()
def _losses(trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
    """Every score `[b term]` of `term_importance`: first for each order, then for each layer's single heads."""
    model.config.require_next_token("a next-token loss")
    batch.require_one_text("path expansion")
    frozen = Frozen(model, trace, batch.layout)
    frozen.check("final stream by order")
    upto, first = frozen.orders.cumsum(0), frozen.first_order  # [order b p d], [l b p d]
    loss = torch.stack([_row_loss(frozen, batch, stream) for stream in upto], 1)
    # final streams with the heads of one layer only, and with those of all other layers
    heads = [(upto[0] + part, upto[1] - part) for part in first]
    alone = [torch.stack([_row_loss(frozen, batch, stream) for stream in pair], 1) for pair in heads]
    single, without = torch.stack(alone, 1).unbind(2) if alone else (loss[:, :0], loss[:, :0])
    uniform = torch.full_like(loss[:, :1], log(model.config.d_vocab))
    reduction = torch.cat((uniform, loss[:, :-1]), 1) - loss
    return {
        "loss": torch.cat((loss, single), 1),
        "reduction": torch.cat((reduction, loss[:, :1] - single), 1),
        "given_others": torch.cat((reduction, without - loss[:, 1:2]), 1),
    }


def _row_loss(frozen: Frozen, batch: Batch, stream: Float[Tensor, "b p d"]) -> Float[Tensor, "b"]:
    """Each row's mean next-token loss, in nats, with `stream` in place of the final residual stream."""
    logits, cap = frozen.logits(stream), frozen.model.config.logit_softcap
    if cap is not None:
        logits = cap * (logits / cap).tanh()
    loss = next_token_loss(logits, batch.tokens, batch.keep)
    counted = batch.predicted
    if counted is None:
        return loss.mean(1)
    if not bool(counted.any(1).all()):
        raise ValueError("term importance requires two neighbouring real tokens in every row")
    return loss.sum(1) / counted.sum(1)


def _finish_losses(merged: Partial, name: str, config: ModelConfig) -> xr.Dataset:
    assert isinstance(merged, Means)
    n, h = config.n_layers, config.n_heads
    nulls = {"loss": log(config.d_vocab), "reduction": 0.0, "given_others": 0.0}
    layers = [str(Part("attn", layer)) for layer in range(n)]
    counts = [float(comb(n, k) * h**k) for k in range(n + 1)]  # beyond int64 in deep models
    table = scored(
        name,
        {score: Score.of(merged.moments[score], "nats per token", null) for score, null in nulls.items()},
        ("term",),
        coords={
            "term": [*(f"order {k}" for k in range(n + 1)), *layers],
            "order": (("term",), [*range(n + 1), *[1] * n]),
        },
        others={"terms": (("term",), torch.tensor(counts + [float(h)] * n, dtype=torch.float64))},
        attrs={
            "frozen": _frozen_words(config), "interval": "95 % over rows", "rows": merged.moments["loss"].n,
            "null": "loss: a uniform guess; reductions: 0",
        },
    )  # fmt: skip
    table.terms.attrs["unit"] = "chains of heads"
    return table


# --- path by path ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def _path_values(trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
    """Contributions `[b path]` to the answer's logit (difference) at the last token, and their checked sum."""
    if batch.answer is None:
        raise ValueError(
            "path expansion requires an answer for every prompt, got none: name it, or bring it with the data"
        )
    if batch.keep is not None and not bool(batch.keep[:, -1].all()):
        raise ValueError("path expansion requires rows that end in the last column (padding on the left)")
    frozen = Frozen(model, trace, batch.layout)
    direction, constant = logit_direction(model, batch.answer, batch.wrong)
    last = torch.zeros_like(frozen.start[:, None, :, 0])  # [b 1 p]: 1 at the last position
    last[..., -1] = 1
    end = Readings(last, direction.to(last)[:, None]).before(frozen.ending)
    parts = path_logits(frozen, end)
    parts[()][:, 1] += constant.to(last)
    values = torch.cat([parts[key] for key in _path_blocks(model.config)], 1)
    logits = model.uncapped(upcast(frozen.final[:, -1:]))[:, 0].to(last)
    answers = batch.answer[:, None] if batch.wrong is None else torch.stack((batch.answer, batch.wrong), 1)
    answer_logits, exact = logits.gather(1, answers), end.of(frozen.again)[:, 0] + constant.to(last)
    total = answer_logits[:, 0] if batch.wrong is None else answer_logits[:, 0] - answer_logits[:, 1]
    frozen.check("paths")
    read = frozen.ending.size(frozen.size)[:, -1].norm(dim=-1) * direction.to(values).norm(dim=-1)
    size = read + constant.to(values).abs() + exact.abs() + answer_logits.abs().sum(1)
    check_sum(values.mT, exact, "paths", size=size)
    rounding = total - values.sum(1)
    largest = (
        torch.cat((values.abs(), answer_logits.abs()), 1).amax(1).clamp_min(torch.finfo(total.dtype).tiny)
    )
    error = rounding.abs() / largest
    return {
        "value": values,
        "total": total,
        "rounding": rounding,
        "error": error,
        **_half_error(model, error),
    }


PathKey = tuple[int | str, ...]
"""The layers of a path's heads; one that begins at an MLP begins with its sublayer and layer, as in `L0.mlp`."""


def path_logits(frozen: Frozen, end: Readings) -> dict[PathKey, Float[Tensor, "b c"]]:
    """Contribution of every path to a number that is linear in the final stream, by the layers of the path's heads.

    The linear map is carried back through the frozen blocks, from the last to the first.

    Args:
        frozen: a recorded pass.
        end: the linear map from the final stream to the number, such as a logit at one position.

    Returns:
        Contributions [b, c]. Key (): direct path, constant. (l,): heads, b_O. (l1, l2): for each head of l2, heads and
        b_O of l1. ("L0.mlp",): what the MLP adds. ("L0.mlp", l): heads on that. (-1,): the remainder, if there is one.
    """
    by_layers: dict[PathKey, Tensor] = {}
    later: dict[int, Readings] = {}
    remainder = end.of(frozen.longer) if (-1,) in _path_blocks(frozen.model.config) else None
    constant = end.of_constant(end.direction.new_zeros(end.direction.shape[-1]))
    for step in reversed(frozen.steps):
        if step.sum.beta is not None:
            constant = constant + end.of_constant(step.sum.beta)
        end = end.before(step.sum)
        later = {at: heads.before(step.sum) for at, heads in later.items()}
        if isinstance(step, Written):
            by_layers[(step.name,)] = end.of(step.value)
            by_layers |= {(step.name, at): heads.of(step.value) for at, heads in later.items()}
            continue
        z = step.mixed(frozen.direct[step.index][None])[0]
        by_layers[(step.index,)] = _head_readings(step, z, end)
        by_layers |= {(step.index, at): _head_readings(step, z, heads) for at, heads in later.items()}
        later[step.index] = end.before(step.output).through_heads(step)
    by_layers[()] = torch.cat((end.of(frozen.start), constant), 1)
    return by_layers if remainder is None else by_layers | {(-1,): remainder}


def _head_readings(
    layer: FrozenAttention, z: Float[Tensor, "b p h e"], readings: Readings
) -> Float[Tensor, "b n"]:
    """Contributions of each head's z and, last, of b_O, to the numbers read off the stream after the block."""
    inner = readings.before(layer.output)
    bias = inner.of_constant(layer.weights.b_O)
    if layer.output.beta is not None:
        bias = bias + readings.of_constant(layer.output.beta)
    return torch.cat((inner.of_heads(z, layer.weights.W_O), bias[..., None]), -1).flatten(1)


def _path_blocks(config: ModelConfig) -> list[PathKey]:
    """The keys of `path_logits`, in the order of the result: by heads on the path, those from MLPs last."""
    layers = range(config.n_layers)
    heads: list[PathKey] = [(layer,) for layer in layers]
    virtual: list[PathKey] = [(first, second) for second in layers for first in range(second)]
    written: list[PathKey] = []
    after: list[PathKey] = []
    for layer in layers:
        for sublayer in _written_sublayers(config):
            name = _written_name(layer, sublayer)
            reading = range(layer if _precedes_attention(config, sublayer) else layer + 1, config.n_layers)
            written.append((name,))
            after += [(name, reader) for reader in reading]
    longer = config.n_layers > 2 or any(sum(key[0] == first for key in after) > 1 for (first,) in written)
    remainder: list[PathKey] = [(-1,)] if longer else []
    return [(), *written, *heads, *after, *virtual, *remainder]


def _written_sublayers(config: ModelConfig) -> tuple[str, ...]:
    """The sublayers of a block whose outputs are taken as they are: its MLPs."""
    return tuple(f"{name}_out" for name in config.mlps)


def _written_name(layer: int, sublayer: str) -> str:
    """The name of an MLP as a part, `L0.mlp`."""
    return str(Part(sublayer.removesuffix("_out"), layer))


def _precedes_attention(config: ModelConfig, sublayer: str) -> bool:
    """Whether attention of the same block reads what this sublayer adds."""
    return config.sublayers.index(sublayer) < config.sublayers.index("attn_out")


def _block_paths(config: ModelConfig, key: PathKey) -> list[str]:
    """Names of the paths under one key of `path_logits`."""
    if key == ():
        return [path_name(), "constant"]
    if key == (-1,):
        return [REMAINDER]
    first, *rest = key
    if isinstance(first, str):
        origins = [Part.of(first)]
    else:
        origins = [*(Part("head", first, h) for h in range(config.n_heads)), Part("attn_bias", first)]
    if not rest:
        return [path_name(origin) for origin in origins]
    (last,) = rest
    assert isinstance(last, int)
    readers = [Part("head", last, h) for h in range(config.n_heads)]
    return [path_name(origin, reader) for reader in readers for origin in origins]


def _heads_on(key: PathKey) -> int:
    """How many heads a path has; -1 for the remainder."""
    return -1 if key == (-1,) else sum(isinstance(each, int) for each in key)


def _from_mlp(key: PathKey) -> int:
    """Whether a path begins at an MLP, 1 or 0; -1 for the remainder."""
    return -1 if key == (-1,) else sum(isinstance(each, str) for each in key)


def _finish_paths(merged: Partial, name: str, config: ModelConfig) -> xr.Dataset:
    assert isinstance(merged, Rows)
    grid = [(key, _block_paths(config, key)) for key in _path_blocks(config)]
    order, mlps = ([of(key) for key, names in grid for _ in names] for of in (_heads_on, _from_mlp))
    rows = merged.rows
    return labelled(
        name,
        {
            "value": (("prompt", "path"), rows["value"]),
            "total": (("prompt",), rows["total"]),
            "rounding": (("prompt",), rows["rounding"]),
        },
        coords={
            "path": [path for _, names in grid for path in names],
            "order": (("path",), order), "mlps": (("path",), mlps),
        },
        units=_unit(config),
        attrs={"frozen": _frozen_words(config), "completeness_error": float(rows["error"].max())},
        notes=_half_precision_notes(rows),
    )  # fmt: skip


# --- one pass as an affine map of its stream ------------------------------------------------------------------------


def check_expandable(model: Transformer) -> None:
    """Raises a ValueError unless the model with its edits is a sum over paths, given patterns and norm scales."""
    _check_config(model.config)
    for edit in model.edits:
        inner = edit.site.partition("blocks.")[2].partition(".")[2]
        recorded = inner.startswith(_RECORDED) and not (
            model.config.norms_sum and inner == "ln2.hook_normalized"  # the stream itself
        )
        scales = inner == _Z and isinstance(edit.change, Zero | Scale) and "e" not in edit.cells
        if inner and not scales and edit.site != first_stream(model.config) and not recorded:
            raise ValueError(
                f"path expansion under an edit of {edit.name} ({type(edit.change).__name__}): that model is no sum of "
                "paths; Zero or Scale of heads, and changes of patterns, queries, keys or embeddings leave it one"
            )


def _edited_pattern(
    pattern: Float[Tensor, "b h q k"], model: Transformer, layer: int, layout: Layout
) -> Float[Tensor, "b h q k"]:
    """The pattern times the factors that the model's edits put on each head's z at every position."""
    z_edits = [edit for edit in model.edits if edit.site == f"blocks.{layer}.{_Z}"]
    if not z_edits:
        return pattern
    factors = pattern.new_ones(pattern.shape[0], pattern.shape[2], pattern.shape[1], 1)
    for edit in z_edits:
        factors = edited(edit, factors, Span(layout=layout, width=factors.shape[1]))
    return pattern * factors.movedim(1, 2)


def _frozen_words(config: ModelConfig) -> str:
    """What is held as it was in the pass, in words."""
    return (
        "patterns, norm scales and what MLPs add"
        if _written_sublayers(config)
        else "patterns and norm scales"
    )


def frozen_reads(config: ModelConfig) -> tuple[Read, ...]:
    """The reads of a pass that are needed to freeze it.

    Args:
        config: the model's configuration.

    Returns:
        The reads: first stream, patterns, norm scales, what MLPs add, and final stream.

    Raises:
        ValueError: a model that is not affine given these (masked-LM head), that has cross-attention, or that has no
            logits.
    """
    _check_config(config)
    sites = [first_stream(config)]
    for layer in range(config.n_layers):
        sites += [f"blocks.{layer}.attn.hook_pattern", f"blocks.{layer}.ln1.hook_scale"]
        sites += [f"blocks.{layer}.hook_{sublayer}" for sublayer in _written_sublayers(config)]
        sites += output_scale(config, layer, "attn_out")
        sites += [site for sublayer in config.sublayers for site in sum_scale(config, layer, sublayer)]
    known = set(names(config))
    return tuple(Read(site) for site in dict.fromkeys((*sites, final_stream(config))) if site in known)


def _check_config(config: ModelConfig) -> None:
    """Raises a ValueError for a model whose logits are not affine in its stream, given what `_frozen_words` says."""
    problem = {
        "attends to the memory of an encoder": config.cross_attention,
        "is a wrapped network, whose norms are no sites": config.block.proven,
        "has no logits": not config.unembed,
        "has a non-linear masked-LM head": config.mlm_head is not None,
        f"has the output layer {config.output}": config.output != FullSoftmax(),
    }
    if reasons := [what for what, is_so in problem.items() if is_so]:
        raise ValueError(
            f"path expansion is exact for decoders and encoders with a plain unembedding; this model {reasons[0]}"
        )
    for trait in ("additive", "values"):
        require(trait, config.mixers, "path expansion")


class Frozen:
    """A recorded pass: the stream entering the first block, every sublayer as an affine map, and the final stream."""

    def __init__(self, model: Transformer, trace: Trace, layout: Layout | None = None) -> None:
        """layout: positions and padding of the recorded rows; None: no padding."""
        self.model, config = model, model.config
        check_expandable(model)
        seen = {read.site: upcast(trace[read]) for read in frozen_reads(config)}
        self.start: Float[Tensor, "b p d"] = seen[first_stream(config)]
        self.final: Float[Tensor, "b p d"] = trace[Read(final_stream(config))]
        """The final stream as recorded, in the model's dtype."""
        self.ending = final_norm(model).of(upcast(self.final))
        rows = layout or Layout()
        self.steps: tuple[FrozenAttention | Written, ...] = tuple(
            FrozenAttention(model, layer, seen, rows)
            if name == "attn_out"
            else Written.of(model, layer, name, seen)
            for layer in range(config.n_layers)
            for name in config.sublayers
        )
        """The sublayers, in order."""

    def _zeroth(self, *, written: bool) -> list[Float[Tensor, "b p d"]]:
        """The stream that has passed no head, as it enters each attention; with what MLPs add, or without."""
        stream, streams = self.start, []
        for step in self.steps:
            if isinstance(step, FrozenAttention):
                streams.append(stream)
            elif written:
                stream = stream + step.value
            stream = step.sum.split(stream[None], 0)[0]
        return streams

    @cached_property
    def direct(self) -> list[Float[Tensor, "b p d"]]:
        """What of the embedding's stream, constants included, enters each attention without passing anything."""
        return self._zeroth(written=False)

    @cached_property
    def again(self) -> Float[Tensor, "b p d"]:
        """The final stream computed again from what was recorded, in float32 at least."""
        stream = self.start
        for step in self.steps:
            more = step.value if isinstance(step, Written) else step.added(step.mixed(stream[None]))[0]
            stream = step.sum.split((stream + more)[None], 0)[0]
        return stream

    def check(self, what: str) -> None:
        """Raises an IncompleteSumError unless orders sum to `again`, and `again` equals the recorded final stream.

        The first sum is checked in float32 at least, whatever the model's dtype, so that a missing term is found. The
        second check allows for the rounding of the pass: attention rounds six times (normed stream, values, z, output,
        its norm, sum), an MLP's addition twice (sum, its norm), each time relative to the vector that it rounds.
        """
        size, dtype, final = self.size, self.model.dtype, upcast(self.final)
        check_sum(self.orders, self.again, what, size=size)
        roundings = sum(2 if isinstance(step, Written) else 6 for step in self.steps)
        allowed = EPS[dtype] / EPS[final.dtype] * bound(roundings, size, final.dtype)
        check_missed((self.again - final).abs(), allowed, size, what)

    @cached_property
    def orders(self) -> Float[Tensor, "order b p d"]:
        """The final stream by order, 0 to n_layers."""
        return self._orders[0].sum(0)

    @property
    def longer(self) -> Float[Tensor, "b p d"]:
        """What of the final stream passed more than two parts: three heads, or two after an MLP."""
        by_origin = self._orders[0]
        return torch.stack([each[3 - i :].sum(0) for i, each in enumerate(by_origin)]).sum(0)

    @property
    def size(self) -> Float[Tensor, "b p d"]:
        """Sum of the absolute terms of the orders: the size that their rounding is relative to.

        It may be much larger than the orders themselves, where heads cancel. A term is one element of a head's z W_O,
        bounded by sum_j |a_ij| |v_j| times the length of a column of W_O, or of what an MLP adds.
        """
        return self._orders[1]

    @cached_property
    def _orders(self) -> tuple[Float[Tensor, "origin order b p d"], Float[Tensor, "b p d"]]:
        """The final stream by origin (embedding; MLPs, if there are any) and order, and the size of its terms."""
        origins = 1 + bool(_written_sublayers(self.model.config))
        stack, size = self.start.new_zeros(origins, 1, *self.start.shape), self.start.abs()
        stack[0, 0] = self.start
        for step in self.steps:
            if isinstance(step, Written):
                stack[1, 0] += step.value
                size = step.sum.size(size + step.value.abs())
            else:
                values = step.values(stack.flatten(0, 1))
                more = step.added(step.mix(values)).unflatten(0, stack.shape[:2])
                zero = torch.zeros_like(stack[:, :1])
                size = step.sum.size(size + step.size(values))
                stack = torch.cat((stack, zero), 1) + torch.cat((zero, more), 1)
            stack = step.sum.split(stack.flatten(0, 1), 0).unflatten(0, stack.shape[:2])
        return stack, size

    @property
    def logits_size(self) -> Float[Tensor, "b p v"]:
        """The sum of the absolute terms of the logits by order."""
        normed = self.ending.size(self.size).norm(dim=-1, keepdim=True) * abs(self.model.config.logit_scale)
        return normed * Weights(self.model).W_U.to(normed).norm(dim=0) + self.constant.abs()

    @cached_property
    def first_order(self) -> Float[Tensor, "l b p d"]:
        """Order 1 of the final stream, split by the layer whose heads wrote it (b_O included)."""
        streams: list[Tensor] = []
        entering = iter(self._zeroth(written=True))
        for step in self.steps:
            if isinstance(step, FrozenAttention):
                streams.append(step.added(step.mixed(next(entering)[None]))[0])
            streams = [step.sum.through(old) for old in streams]
        return torch.stack(streams) if streams else self.start[None][:0]

    def logits(self, stream: Float[Tensor, "*n b p d"]) -> Float[Tensor, "*n b p v"]:
        """Logits of a final stream (before a soft cap), with the final norm's frozen scale."""
        return self._read_out(stream, self.constant)

    def part_logits(self, part: Float[Tensor, "*n b p d"]) -> Float[Tensor, "*n b p v"]:
        """Addition of a part of the stream to the logits: its frozen final norm times W_U, without constants."""
        return self._read_out(part, None)

    def _read_out(self, part: Tensor, constant: Tensor | None) -> Float[Tensor, "*n b p v"]:
        normed = self.ending.through(part) * self.model.config.logit_scale
        return F.linear(normed, Weights(self.model).W_U.mT.to(part), constant)

    @cached_property
    def constant(self) -> Float[Tensor, "v"]:
        """beta W_U + b_U, times the factor on the logits."""
        weights = Weights(self.model)
        total = weights.final_beta.to(self.start) @ weights.W_U.to(self.start) + weights.b_U.to(self.start)
        return total * self.model.config.logit_scale


@dataclass(frozen=True, eq=False)
class Written:
    """What an MLP added to the stream in the pass, and the norm of the sum."""

    name: str
    """`L0.mlp`."""
    value: Float[Tensor, "b p d"]
    sum: FrozenNorm

    @classmethod
    def of(cls, model: Transformer, layer: int, sublayer: str, seen: Mapping[str, Tensor]) -> Written:
        """The addition of one sublayer of a recorded pass."""
        value = seen[f"blocks.{layer}.hook_{sublayer}"]
        return cls(_written_name(layer, sublayer), value, sum_norm(model, layer, sublayer).recorded(seen))


class FrozenAttention:
    """One attention as an affine map: the addition of its heads to a stream, and the norm of the sum."""

    def __init__(self, model: Transformer, layer: int, seen: Mapping[str, Tensor], layout: Layout) -> None:
        self.index = layer
        weights = Weights(model)
        self.pattern: Float[Tensor, "b h q k"] = _edited_pattern(
            seen[f"blocks.{layer}.attn.hook_pattern"], model, layer, layout
        )
        """The recorded pattern, times the factors by which the model's edits scale each head."""
        self.reading, self.output, self.sum = (
            norm(model, layer, "attn_out").recorded(seen) for norm in (input_norm, output_norm, sum_norm)
        )
        self.weights: LayerWeights = weights.layer(layer)
        self.kv_head = weights.kv_head()

    def mixed(self, stack: Float[Tensor, "order b p d"]) -> Float[Tensor, "order b p h e"]:
        """z of every head by order: A N(x) W_V, with beta and b_V on order 0."""
        return self.mix(self.values(stack))

    def values(self, stack: Float[Tensor, "order b p d"]) -> Float[Tensor, "order b p h e"]:
        """N(x) W_V of every head by order, with beta and b_V on order 0."""
        w = self.weights
        assert w.W_V is not None and w.b_V is not None
        normed = self.reading.split(stack, 0)
        value = einsum(normed, w.W_V.to(stack), "o b p d, g d e -> o b p g e")
        return _with_constant(value, w.b_V)[:, :, :, self.kv_head]

    def mix(self, values: Float[Tensor, "order b p h e"]) -> Float[Tensor, "order b p h e"]:
        """z of every head by order: the pattern times the values."""
        return einsum(self.pattern, values, "b h q k, o b k h e -> o b q h e")

    def size(self, values: Float[Tensor, "order b p h e"]) -> Float[Tensor, "b p d"]:
        """Sum of the absolute terms of attention's addition to the stream, constants included."""
        lengths = einsum(self.pattern.abs(), values.norm(dim=-1), "b h q k, o b k h -> b q h")
        columns = self.weights.W_O.to(values).norm(dim=1)
        terms = einsum(lengths, columns, "b q h, h d -> b q d") + self.weights.b_O.to(values).abs()
        return self.output.size(terms)

    def added(self, z: Float[Tensor, "order b p h e"]) -> Float[Tensor, "order b p d"]:
        """Attention's addition to the stream: z W_O through its output norm and factor; constants on order 0."""
        out = _with_constant(
            einsum(z, self.weights.W_O.to(z), "o b p h e, h e d -> o b p d"), self.weights.b_O
        )
        return self.output.split(out, 0)


def _with_constant(stack: Float[Tensor, "order *n"], constant: Tensor) -> Float[Tensor, "order *n"]:
    """The terms by order, with a constant added to order 0."""
    return torch.cat((stack[:1] + constant.to(stack), stack[1:]))


@dataclass(frozen=True, eq=False)
class Readings:
    """Linear maps from a stream x to numbers `[b c]`: `sum_k weight[b,c,k] x[b,k] . direction[b,c]`.

    This is A (x) W of Elhage et al. 2021, from the output's side. Composed with a norm or a head it keeps this form, so
    no path needs a tensor of the stream's size.
    """

    weight: Float[Tensor, "b c k"]
    direction: Float[Tensor, "b c d"]

    def of(self, stream: Float[Tensor, "b k d"]) -> Float[Tensor, "b c"]:
        """The numbers read off this stream."""
        return ((self.weight @ stream) * self.direction).sum(-1)

    def of_constant(self, vector: Tensor) -> Float[Tensor, "b c"]:
        """The numbers read off a stream that is this vector at every position."""
        return self.weight.sum(-1) * (self.direction @ vector.to(self.direction))

    def of_heads(self, z: Float[Tensor, "b k h e"], out: Float[Tensor, "h e d"]) -> Float[Tensor, "b c h"]:
        """The numbers read off each head's z W_O."""
        mixed = einsum(self.weight, z, "b c k, b k h e -> b c h e")
        return (mixed * einsum(self.direction, out.to(z), "b c d, h e d -> b c h e")).sum(-1)

    def before(self, norm: FrozenNorm) -> "Readings":
        """The same numbers as functions of the stream before a norm and the factor after it, without its beta."""
        weight = self.weight if norm.factor == 1 else self.weight * norm.factor
        if norm.scale is not None:
            weight = weight / rearrange(norm.scale, "b k 1 -> b 1 k")
        return Readings(weight, replace(norm, factor=1.0, scale=None).back(self.direction))

    def through_heads(self, layer: FrozenAttention) -> "Readings":
        """The first number as a function of the stream that each head reads, `[b h]`, without constants."""
        w, weight = layer.weights, torch.einsum("bq,bhqk->bhk", self.weight[:, 0], layer.pattern)
        assert w.W_V is not None
        value = w.W_V[layer.kv_head].to(self.direction)
        direction = torch.einsum("bd,hed,hce->bhc", self.direction[:, 0], w.W_O.to(value), value)
        return Readings(weight, direction).before(layer.reading)
