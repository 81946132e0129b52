"""The Jacobian lens: how a small change of the stream after each block arrives at the final stream, on average.

J_l = mean over prompts and over source positions s of sum_t d x_final[t] / d x_l[s], with s and t among the positions
that count: all but the first `skip` (early positions carry outsize norms) and the last. In the column convention, so
that the lens reads unembed(LN_f(J_l x)) (Gurnee et al. 2026, transformer-circuits.pub/2026/workspace).

One row of J is one vector-Jacobian product. A prompt runs alone, as many copies of it at a time as rows of J are
computed together, so that no number depends on the batch; what is kept are sums over groups of prompts, which merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from interp.core.boundary import public
from interp.core.kinds import Count, Positive
from interp.core.results import labelled
from interp.core.stats import Partial, upcast
from interp.core.transfers import to_device
from interp.data.batch import Answers, Batch
from interp.data.sources import Data
from interp.data.stream import DataSource, PromptBatches, Stream, prompt_source
from interp.data.text import Text
from interp.lenses.fitted_jacobian_lens import FittedJacobianLens, token_directions
from interp.model.config import ModelConfig
from interp.model.kv_cache import KVCache, Prefix
from interp.model.sites import stream_after
from interp.model.tap import Read, Tap
from interp.model.transformer import Transformer
from interp.passes.duration import announce
from interp.passes.observe import Model, Subject, as_model
from interp.passes.question import ByRow, Question, Unshared
from interp.passes.rules import Rules, rules_attrs, under_rules
from interp.passes.sweep import continues
from interp.runs.run import answered

if TYPE_CHECKING:
    import xarray as xr

FEWEST = 16
"""Fewest prompts after which the fit may stop. If a quarter of the prompts has a J ten times as large as the others', a
fit that may stop after 8 prompts stops too early in 8 % of their orders, one that may stop after 16 in 2 %
(`experiments/jacobian_lens.py`)."""
TOGETHER, TOGETHER_ON_GPU = 2**9, 2**14
"""Most tokens of one pass, over all copies of a prompt, on a CPU and on a GPU: more tokens overflow a CPU's cache
(`experiments/bench/jacobian_lens.py`); the number for a GPU is not measured."""


@dataclass(frozen=True)
class JacobianLens(Question):
    """Fit the Jacobian lens: the mean Jacobian from the stream after each block to the final stream.

    J_l = mean over prompts and source positions s of sum_t d x_final[t] / d x_l[s]; s and t are the positions from
    `skip` on but for the last. It is in the column convention, so that the lens reads unembed(LN_f(J_l x)). Every
    prompt counts the same, however long; prompts without a position that counts are left out.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        layers: the blocks after which the stream is read; None: all but the last, whose J is the identity.
        tokens: only the rows of J for these tokens, as texts or ids; None: the whole of J. That is one vector-Jacobian
            product for each token, the gradient of its logit at final norm scale 1, instead of one for each dimension:
            enough for `directions`, `steer` and `swap`.
        precision: relative standard error of J at which the fit stops asking for prompts; None: all prompts are used.
            The error is taken over prompts: the root of its sum of squares over all entries of J, divided by the norm
            of J, in the worst layer. It is checked after every 8 prompts, from 16 on (in a stream after each of its
            windows). `about["ended"]` says whether the data ended before, `error` how precise J is: NaN for one prompt.
        skip: how many of each prompt's first positions do not count, since early positions carry outsize norms; the
            last never does.
        groups: into how many groups the prompts fall, by row number modulo `groups`; resampling draws groups.
        rules: backward rules under which the model is differentiated, or a preset, as in `interp.attribution_patch`;
            none: as it is.

    Returns:
        FittedJacobianLens. The question `interp.run([JacobianLens(...)], model, data)` gives the same as a Dataset, of
        data of any size, resumable and in shards; `FittedJacobianLens.of_result` makes the lens of it.

    Raises:
        ValueError: no prompt with a position that counts, or tokens in a model without an unembedding.
        IndexError: a layer that does not exist.
        NotFiniteError: a prompt whose J is NaN or infinite.

    Caveats:
        J is a mean of linear maps: what is special to one prompt is averaged away. The standard error speaks of prompts
        like those seen: a fit that stops has not met the rare prompt whose J is a hundred times as large, and which
        would dominate the mean.

    Memory:
        8 layers d^2 bytes for each group, and 4 to 8 for each of 8 prompts.

    Cost:
        A backward pass over the positions that count for each row of J, d_model of them or one for each of `tokens`,
        for every prompt: a fit of more than about a minute says before it begins how many.

    Source:
        Gurnee et al. 2026, transformer-circuits.pub/2026/workspace.

    See Also:
        `train_tuned_lens`: an affine lens trained on the model's own answers. `compare_lenses`: how far lenses are from
        them.

    Example:
        >>> lens = jacobian_lens(model, [prompt, "The cat sat on the mat"], skip=1)
        >>> lens.read(prompt).top_token.dims
        ('prompt', 'depth', 'pos', 'rank')
    """

    rows_together: ClassVar[int] = 8

    layers: Sequence[int] | None = None
    tokens: Answers | None = None
    precision: Positive | None = 0.05
    skip: Count = 16
    groups: Count = 16
    rules: Rules = ()

    def bind(self, model: Subject) -> ByRow:
        """A forward and some backward passes per prompt."""
        config = under_rules(model.transformer, self.rules).config
        layers = chosen(config, self.layers)
        if self.skip < 0 or self.groups < 1:
            raise ValueError(
                f"skip >= 0 positions and groups >= 1 are required, got skip={self.skip}, groups={self.groups}"
            )
        tokens = None if self.tokens is None else tuple(model.text.outputs(self.tokens).tolist())
        if tokens is not None:
            token_directions(model.transformer, tokens)
        return ByRow(
            self.name,
            Unshared(partial(_compute, layers=layers, tokens=tokens, skip=self.skip, rules=self.rules)),
            JacobianGroups(self.groups),
            partial(_finish, question=self, layers=layers, tokens=tokens, text=model.text),
            enough=None if self.precision is None else partial(_is_precise, precision=self.precision),
        )


@public()
def jacobian_lens(
    model: Model,
    data: DataSource | Data,
    layers: Sequence[int] | None = None,
    tokens: Answers | None = None,
    precision: Positive | None = 0.05,
    *,
    skip: Count = 16,
    groups: Count = 16,
    rules: Rules = (),
) -> FittedJacobianLens:
    """Fit the Jacobian lens: the mean Jacobian from the stream after each block to the final stream.

    J_l = mean over prompts and source positions s of sum_t d x_final[t] / d x_l[s]; s and t are the positions from
    `skip` on but for the last. It is in the column convention, so that the lens reads unembed(LN_f(J_l x)). Every
    prompt counts the same, however long; prompts without a position that counts are left out.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        layers: the blocks after which the stream is read; None: all but the last, whose J is the identity.
        tokens: only the rows of J for these tokens, as texts or ids; None: the whole of J. That is one vector-Jacobian
            product for each token, the gradient of its logit at final norm scale 1, instead of one for each dimension:
            enough for `directions`, `steer` and `swap`.
        precision: relative standard error of J at which the fit stops asking for prompts; None: all prompts are used.
            The error is taken over prompts: the root of its sum of squares over all entries of J, divided by the norm
            of J, in the worst layer. It is checked after every 8 prompts, from 16 on (in a stream after each of its
            windows). `about["ended"]` says whether the data ended before, `error` how precise J is: NaN for one prompt.
        skip: how many of each prompt's first positions do not count, since early positions carry outsize norms; the
            last never does.
        groups: into how many groups the prompts fall, by row number modulo `groups`; resampling draws groups.
        rules: backward rules under which the model is differentiated, or a preset, as in `interp.attribution_patch`;
            none: as it is.

    Returns:
        FittedJacobianLens. The question `interp.run([JacobianLens(...)], model, data)` gives the same as a Dataset, of
        data of any size, resumable and in shards; `FittedJacobianLens.of_result` makes the lens of it.

    Raises:
        ValueError: no prompt with a position that counts, or tokens in a model without an unembedding.
        IndexError: a layer that does not exist.
        NotFiniteError: a prompt whose J is NaN or infinite.

    Caveats:
        J is a mean of linear maps: what is special to one prompt is averaged away. The standard error speaks of prompts
        like those seen: a fit that stops has not met the rare prompt whose J is a hundred times as large, and which
        would dominate the mean.

    Memory:
        8 layers d^2 bytes for each group, and 4 to 8 for each of 8 prompts.

    Cost:
        A backward pass over the positions that count for each row of J, d_model of them or one for each of `tokens`,
        for every prompt: a fit of more than about a minute says before it begins how many.

    Source:
        Gurnee et al. 2026, transformer-circuits.pub/2026/workspace.

    See Also:
        `train_tuned_lens`: an affine lens trained on the model's own answers. `compare_lenses`: how far lenses are from
        them.

    Example:
        >>> lens = jacobian_lens(model, [prompt, "The cat sat on the mat"], skip=1)
        >>> lens.read(prompt).top_token.dims
        ('prompt', 'depth', 'pos', 'rank')
    """
    subject, question = as_model(model), JacobianLens(layers, tokens, precision, skip, groups, rules)
    source = prompt_source(data, subject.text, batch_size=question.rows_together)
    if isinstance(source, Stream) and source is not data:
        source = replace(source, rows_per_window=question.rows_together)
    if isinstance(source, PromptBatches):
        _announce(question, subject, source.prompts)
    return FittedJacobianLens.of_result(answered(question, subject, source), subject)


def _announce(question: JacobianLens, subject: Subject, prompts: Batch) -> None:
    """Write a note before a fit of more than about a minute: how much work it is, and which arguments reduce it."""
    model, layers = subject.transformer, chosen(subject.transformer.config, question.layers)
    n_layers, d = model.config.n_layers, model.config.d_model
    products = d if question.tokens is None else len(subject.text.outputs(question.tokens))
    counted = (prompts.lengths.cpu() - 1 - question.skip).clamp_min(0)
    cells = products * int(counted.sum()) * (n_layers - min(layers) - 1)
    plain = cells / (int(prompts.lengths.sum()) * n_layers)
    most = "" if question.precision is None else "at most "
    fewer = "" if question.tokens is not None else f"tokens=[...] takes one for each token instead of {d}, "
    announce(
        f"jacobian_lens: {most}{products} vector-Jacobian products for each of {int((counted > 0).sum())} prompts, the "
        f"work of about {plain:.0f} passes over them",
        cells * sum(x.numel() for x in model.blocks.parameters()) / n_layers,
        model.device,
        f"{fewer}later layers and shorter prompts take less",
    )


def chosen(config: ModelConfig, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The layers to fit, in order.

    Args:
        config: of the model.
        layers: numbers of the layers; None: all but the last.

    Returns:
        The numbers, ascending.

    Raises:
        IndexError: a layer that does not exist.
        ValueError: no layer, or one twice.
    """
    if layers is None:
        return tuple(range(max(1, config.n_layers - 1)))
    if bad := [layer for layer in layers if not 0 <= layer < config.n_layers]:
        raise IndexError(f"layers are 0 to {config.n_layers - 1}, got {bad[0]}")
    if not layers or len(set(layers)) < len(layers):
        raise ValueError(f"at least one layer is required, each once, got {list(layers)}")
    return tuple(sorted(layers))


# --- one prompt ---------------------------------------------------------------------------------------------------


def _compute(
    model: Transformer,
    batch: Batch,
    layers: Sequence[int],
    tokens: Sequence[int] | None,
    skip: int,
    rules: Rules,
) -> Mapping[str, Tensor]:
    """The Jacobian of every text `[t l r d]`, and the number of its positions that count `[t]`.

    No other question shares these passes: each text runs alone, as copies of one prompt, one copy for each row of J
    that is differentiated in the same backward pass, and starts from the keys and values of the skipped positions.
    """
    model = under_rules(model, rules)
    d = model.config.d_model
    rows = torch.eye(d, device=model.device) if tokens is None else token_directions(model, tokens)
    texts = list(_single_texts(batch.host()))
    counts = [max(0, text.tokens.shape[1] - 1 - skip) for text in texts]
    zero = upcast(torch.empty(0, dtype=model.dtype)).new_zeros(len(layers), len(rows), d, device=model.device)
    total = len(rows) * sum(count > 0 for count in counts)
    with tqdm(total=total, desc="vector-Jacobian products", delay=1, leave=False) as bar:
        jacobians = [
            prompt_jacobian(model, text.to(model.device), layers, rows, skip, bar.update) if count else zero
            for text, count in zip(texts, counts, strict=True)
        ]
    return {"jacobian": torch.stack(jacobians), "positions": torch.tensor(counts)}


def _single_texts(batch: Batch) -> Iterator[Batch]:
    """Each text alone, without padding, in the order of `Batch.identities`."""
    number = batch.text_numbers
    for i in range(int(number.max()) + 1):
        cells = number == i
        (row,) = cells.any(1).nonzero()[0].tolist()
        types = None if batch.types is None else batch.types[cells][None]
        memory = batch.rows(torch.tensor([row])).memory
        yield Batch(batch.tokens[cells][None], types=types, memory=memory)


@torch.enable_grad()
def prompt_jacobian(
    model: Transformer,
    text: Batch,
    layers: Sequence[int],
    rows: Float[Tensor, "r d"],
    skip: int,
    done: Callable[[int], object] = int,
) -> Float[Tensor, "l r d"]:
    """Rows of the Jacobian of one text: mean over source positions s of sum_t rows . d x_final[t] / d x_l[s].

    The forward pass runs copies of the text, one for each row that is differentiated at once; each block of rows takes
    one backward pass. Both passes run over the counted columns only, where the model allows it (`_pass_columns`).

    Args:
        text: a batch of one text, without padding.
        layers: the blocks after which the stream is differentiated.
        rows: [r d], directions of the final stream.
        skip: how many of the first positions do not count; the last never does.
        done: called with the number of rows after each backward pass.

    Returns:
        [l r d], in float32 at least.
    """
    room = TOGETHER if model.device.type == "cpu" else TOGETHER_ON_GPU
    columns, before = _pass_columns(model, text, skip)
    n = columns.stop - columns.start
    parts = -(-len(rows) // max(1, room // n))
    size = -(-len(rows) // parts)
    copies = text.rows(torch.zeros(size, dtype=torch.long))
    reads = [Read(stream_after(model.config, layer), grad=True) for layer in layers]
    tap = Tap(reads)
    final = model(
        copies.tokens[:, columns], tap, stop=model.config.n_layers, memory=copies.memory,
        types=None if copies.types is None else copies.types[:, columns],
        cache=None if before is None else Prefix(before, columns.start, size),
    )  # fmt: skip
    last = text.tokens.shape[1] - 1 - columns.start
    sources, counted = [tap.live[read] for read in reads], slice(skip - columns.start, last)
    row_blocks = []
    pieces = rows.to(final).split(size)
    for piece in pieces:
        cotangents = torch.zeros_like(final)
        cotangents[: len(piece), counted] = piece[:, None]
        grads = torch.autograd.grad(final, sources, cotangents, retain_graph=piece is not pieces[-1])
        mean = [upcast(grad[: len(piece), counted]).mean(1).to(model.device) for grad in grads]
        row_blocks.append(torch.stack(mean))
        done(len(piece))
    tap.close()
    return torch.cat(row_blocks, 1)


def _pass_columns(model: Transformer, text: Batch, skip: int) -> tuple[slice, KVCache | None]:
    """The columns of a text that the passes run over, and the keys and values of the columns before them (None: none).

    In a causal model they are the columns that count: the skipped ones are constants, and no derivative reaches the
    last one. Otherwise they are all columns.
    """
    all_columns, config, n = slice(0, text.tokens.shape[1]), model.config, text.tokens.shape[1]
    if model.edits or text.memory is not None or not continues(config, n):
        return all_columns, None
    if not skip:
        return slice(0, n - 1), None
    skipped = text.tokens[:, :skip], None if text.types is None else text.types[:, :skip]
    cache = model.new_cache(1, skip)
    if not isinstance(cache, KVCache):
        return all_columns, None
    with torch.no_grad():
        model(skipped[0], stop=config.n_layers, types=skipped[1], cache=cache)
    return slice(skip, n - 1), cache


# --- many prompts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class JacobianSums:
    """Sums of the Jacobians of some prompts by group, in float64, and of their squared norms."""

    group: Int[Tensor, "g"]
    """The numbers of the groups that have prompts."""
    prompts: Int[Tensor, "g"]
    total: Float[Tensor, "g l r d"]
    squares: Float[Tensor, "l"]
    """The sum of |J|^2 over prompts."""
    left_out: Int[Tensor, ""]
    """Prompts without a position that counts."""

    def merge(self, other: JacobianSums) -> JacobianSums:
        """The sums over the prompts of `self` and of `other`."""
        group = torch.cat((self.group, other.group)).unique()
        prompts, total = (
            self.prompts.new_zeros(len(group)),
            self.total.new_zeros(len(group), *self.total.shape[1:]),
        )
        for sums in (self, other):
            place = torch.searchsorted(group, sums.group)
            prompts.index_add_(0, place, sums.prompts)
            total.index_add_(0, place, sums.total)
        return JacobianSums(
            group, prompts, total, self.squares + other.squares, self.left_out + other.left_out
        )

    def mean(self) -> Float[Tensor, "l r d"]:
        """J, the mean over prompts."""
        return self.total.sum(0) / self.prompts.sum()

    def error(self) -> Float[Tensor, "l"]:
        """The standard error of J over prompts, relative to its norm; NaN for fewer than two prompts."""
        n, norm = self.prompts.sum().double(), self.mean().square().sum((1, 2))
        spread = (self.squares - n * norm).clamp_min(0) / (n - 1) / n
        return (spread / norm).sqrt().masked_fill(n < 2, torch.nan)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by name."""
        return dict(vars(self))


@dataclass(frozen=True)
class JacobianGroups:
    """A reduction: sums of Jacobians over groups of prompts, by the prompts' numbers."""

    count: int
    refuses_nan: ClassVar[bool] = True

    def of(self, values: Mapping[str, Tensor], rows: Int[Tensor, "n"] | None = None) -> JacobianSums:
        """The sums of one batch; prompts without row numbers are numbered by their place in the batch."""
        positions, jacobian = values["positions"], values["jacobian"]
        counts = positions > 0
        number = torch.arange(len(counts)) if rows is None else rows
        group, place = (number.to(counts.device)[counts] % self.count).unique(return_inverse=True)
        jacobians = jacobian[to_device(counts.nonzero()[:, 0], jacobian.device)].double()
        total = jacobians.new_zeros(len(group), *jacobians.shape[1:]).index_add_(
            0, to_device(place, jacobians.device), jacobians
        )
        prompts = torch.bincount(place, minlength=len(group))
        return JacobianSums(group, prompts, total, jacobians.square().sum((0, 2, 3)), (~counts).sum())

    def load(self, tensors: Mapping[str, Tensor]) -> JacobianSums:
        """The sums from what `tensors` returned."""
        return JacobianSums(**tensors)


def _is_precise(merged: Partial, precision: float) -> bool:
    """Whether the relative standard error of J is at most `precision` in every layer, after enough prompts."""
    assert isinstance(merged, JacobianSums)
    return int(merged.prompts.sum()) >= FEWEST and float(merged.error().max()) <= precision


def _finish(
    merged: Partial, question: JacobianLens, layers: Sequence[int], tokens: Sequence[int] | None, text: Text
) -> xr.Dataset:
    """The Dataset with J, its error and the groups' means; raises ValueError if no prompt has a counted position."""
    assert isinstance(merged, JacobianSums)
    n = int(merged.prompts.sum())
    if not n:
        raise ValueError(
            f"prompts of at least {question.skip + 2} tokens are required, with skip={question.skip} of them and the "
            "last that do not count; got none"
        )
    error, precision = merged.error(), question.precision
    reached = precision is not None and _is_precise(merged, precision)
    row = "out" if tokens is None else "token"
    cells = ("layer", row, "in")
    named: dict[str, object] = {} if tokens is None else {
        "token": list(tokens), "word": ("token", text.of_outputs.pieces(list(tokens))),
    }  # fmt: skip
    means = merged.total / merged.prompts[:, None, None, None]
    return labelled(
        question.name,
        {
            "value": (cells, merged.mean()), "error": (("layer",), error),
            "by_group": (("group", *cells), means), "prompts": (("group",), merged.prompts),
        },
        coords={"layer": list(layers), "group": merged.group.tolist(), **named},
        units={"value": "change per change", "by_group": "change per change", "error": "share of the norm of J"},
        attrs={
            "prompts": n, "left_out": int(merged.left_out), "skip": question.skip,
            "precision": "none asked for" if precision is None else precision,
            "ended": "precise enough" if reached else "at the end of the data", **rules_attrs(question.rules),
        },
    )  # fmt: skip
