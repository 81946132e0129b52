"""ROME: the rank-one change of an MLP's output matrix that stores one association and disturbs the others least.

Meng et al. 2022, "Locating and Editing Factual Associations in GPT" (arXiv:2202.05262), section 3.1. In the row
convention, with keys k (post-activations), K those of the text and V what W makes of them:
min |K W' - V| so that k* W' = v*   is   W' = W + C^-1 k*^T (v* - k* W) / (k* C^-1 k*^T),   C = E[k^T k].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.covariance import Covariance, Covariances
from interp.core.factored import FactoredMatrix
from interp.core.kinds import NotNegative, Number, Positive, PositiveCount
from interp.core.transfers import ended, to_device
from interp.core.viewer import Brief
from interp.core.wording import value_text
from interp.data.batch import Batch
from interp.data.sources import Data
from interp.data.stream import DataSource, prompt_source
from interp.data.text import Text
from interp.editing.editors import edit_batch, entering
from interp.editing.weight_edit import WeightEdit, own_matrix_place
from interp.model.edits import Edit
from interp.model.tap import Read, Tap, Trace
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.observe import Model, as_model, observe
from interp.passes.question import ByRow, NotFiniteError, Reading
from interp.runs.over_data import reduced_over
from interp.weights.matrices import ends


@public()
@dataclass(frozen=True, eq=False, repr=False)
class Keys(Brief):
    """Uncentred second moment C = E[k^T k] of one MLP's post-activations, its keys, over the tokens of a text.

    Raises:
        ValueError: a moment that is not square, not float64 or not finite.
    """

    layer: int
    """Layer of the MLP."""
    moment: Float[Tensor, "m m"]
    """C, float64."""
    tokens: int
    """Number of tokens that C was averaged over."""

    def __post_init__(self) -> None:
        if self.moment.dtype != torch.float64 or not bool(self.moment.isfinite().all()):
            raise ValueError(
                f"moment must be finite numbers in float64, got {value_text(self.moment)} with "
                f"{int((~self.moment.isfinite()).sum())} that are NaN or infinite"
            )

    def solved(self, key: Float[Tensor, "m"], ridge: float) -> Float[Tensor, "m"]:
        """(C + ridge tr(C)/m I)^-1 k, float64. ValueError where that matrix is not positive definite."""
        m = len(self.moment)
        damped = self.moment + ridge * self.moment.trace() / m * torch.eye(m).to(self.moment)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if bool(failed) or not bool(factor.isfinite().all()):
            raise ValueError(
                f"C of {m} neurons over {self.tokens} tokens is singular: more text or a larger ridge is required, "
                f"got ridge={ridge}"
            )
        return torch.cholesky_solve(key.to(damped)[:, None], factor)[:, 0]


@public()
@dataclass(frozen=True)
class Rome:
    """Settings of the search for the value v*; the defaults are those of the paper's released code for GPT-2 XL."""

    prefixes: tuple[str, ...] = ("",)
    """Texts put before the prompt, so that k* and v* do not depend on one context; they are means over these."""
    essence: str | None = "{subject} is a"
    """A prompt whose next-token distribution should stay as it is (None: no such term)."""
    steps: PositiveCount = 20
    """Adam steps at most; the search ends early once the loss is below `enough`."""
    rate: Positive = 0.5
    """Learning rate of the value."""
    kl: NotNegative = 0.0625
    """Weight of KL(edited || original) on the essence prompt."""
    decay: NotNegative = 0.5
    """Weight of |change of v| / |v|^2."""
    reach: Positive = 4.0
    """The change of v is kept shorter than this many times |v|."""
    enough: Number = 0.05
    """Loss in nats at which the search ends."""
    ridge: NotNegative = 1e-4
    """Added to C's diagonal, as a share of its mean."""

    def __post_init__(self) -> None:
        if not self.prefixes:
            raise ValueError("prefixes require at least one text, such as '', got none")
        try:
            (self.essence or "").format(subject="")
        except (ValueError, LookupError, AttributeError) as cause:
            raise ValueError(
                f"essence must be a text with {{subject}} as its only field, or None, got {self.essence!r}"
            ) from cause


@public()
def key_moment(
    model: Model,
    data: DataSource | Data,
    *,
    layer: int,
    edits: Sequence[Edit] = (),
    prepend_bos: bool | None = None,
    batch_size: int = 32,
) -> Keys:
    """Second moment C = E[k^T k] of one MLP's post-activations over every real token, for `rome_edit` and `memit_edit`.

    Args:
        data: texts or ids, of any size.
        layer: whose MLP.
        edits: interventions that every pass runs under.
        prepend_bos: whether texts begin with BOS; None: as the model does by default.
        batch_size: the most rows of a pass, of prompts in memory.

    Returns:
        Keys, with C [m m], accumulated in float64, and the number of tokens.

    Raises:
        ValueError: a layer without one MLP matrix W_out.
        IndexError: a layer that does not exist.

    Example:
        >>> key_moment(model, [prompt, "The cat sat"], layer=1).moment.shape
        torch.Size([40, 40])
    """
    subject = as_model(model, edits)
    own_matrix_place(subject.transformer, f"blocks.{layer}.mlp.W_out")
    read = Read(f"blocks.{layer}.mlp.hook_post")
    analysis = ByRow("key_moment", Reading([read], partial(_keys, read=read)), Covariances("key"))
    source = prompt_source(data, subject.text, prepend_bos=prepend_bos, batch_size=batch_size)
    covariance = reduced_over(analysis, subject, source)
    assert isinstance(covariance, Covariance)
    moment = covariance.scatter / covariance.n + torch.outer(covariance.mean, covariance.mean)
    return Keys(layer, moment, int(covariance.n))


def _keys(trace: Trace, batch: Batch, model: Transformer, read: Read) -> Mapping[str, Tensor]:
    """The post-activations at every real token, NaN elsewhere."""
    keys, real = trace[read], batch.real
    if not bool(keys[real].isfinite().all()):
        raise NotFiniteError("the post-activations of some prompt are NaN or infinite")
    return {"key": batch.by_text(keys, real, torch.nan)}


@public()
def rome_edit(
    model: Model,
    prompt: str,
    *,
    answer: str | int,
    subject: str,
    keys: Keys,
    rome: Rome | None = None,
    prepend_bos: bool | None = None,
) -> WeightEdit:
    """ROME: a rank-one change of an MLP's W_out that stores one association and disturbs other keys least.

    k*: mean post-activation at the last token of the subject's last mention, over the prefixes. v* = k* W + b + delta,
    with delta sought by gradient at that token (an `Edit` of the MLP's output; no weight is touched): mean over
    prefixes of -log P(answer | prefix + prompt), + kl KL(P'(. | essence) || P(. | essence)), + decay |delta| / |v|^2.
    That decay, the clamp and the early end are the released code's. Then k* W' + b = v* exactly, and a key with k C^-1
    k*^T = 0 (C with its ridge) keeps its value. Where the family scales what the MLP adds, v is the unscaled output.

    Args:
        prompt: the prompt to edit on, which mentions the subject.
        answer: what it should give, as text or id. Of several tokens the mean of their -log P, each predicted after
            those before it, as the released code has it.
        subject: the entity that the prompt is about, as it stands in the prompt.
        keys: C of the layer that is changed, from `key_moment`.
        rome: how the value is sought; None: the defaults of `Rome`.
        prepend_bos: whether texts begin with BOS; None: as the model does by default.

    Returns:
        WeightEdit of `blocks.<keys.layer>.mlp.W_out`, of rank 1.

    Raises:
        ValueError: as `shift_edit`; a subject that the prompt does not mention, a subject before the last token in the
            last block (where it reaches no logit), a singular C, keys of another width, and families that norm what the
            MLP adds (its raw output is no site).

    Source:
        Meng et al. 2022, "Locating and Editing Factual Associations in GPT" (arXiv:2202.05262), section 3.1 and
        equation 4.

    See Also:
        `memit_edit`: many facts in several layers. `edit_table`: what an edit is worth.

    Example:
        >>> keys = key_moment(model, [prompt, "The cat sat on the mat"], layer=1)
        >>> rome_edit(model, prompt, answer=" cat", subject="John", keys=keys, rome=Rome(ridge=0.1)).rank
        1
    """
    editable, rome = as_model(model), rome or Rome()
    network = editable.transformer
    name = f"blocks.{keys.layer}.mlp.W_out"
    weight = own_matrix_place(network, name).in_(network)
    if keys.moment.shape[0] != weight.shape[0]:
        raise ValueError(
            f"keys of {weight.shape[0]} neurons are required, got C of {shape_text(keys.moment.shape)}"
        )
    ends(network.config, name)
    texts = [f"{prefix}{prompt}" for prefix in rome.prefixes]
    extra = [] if rome.essence is None else [rome.essence.format(subject=subject)]
    batch = edit_batch(editable, texts, answer, others=extra, prepend_bos=prepend_bos)
    where = mention_mask(editable.text, batch, subject)
    check_reaches_logits(network, batch, where, keys.layer)
    read = Read(f"blocks.{keys.layer}.mlp.hook_post")
    posts = observe(network, batch, [read], stop=keys.layer + 1, answers_only=True).trace[read]
    key = at_mention(posts, where)[: len(texts)].double().mean(0)
    bias = Weights(network).layer(keys.layer).b_out
    assert bias is not None
    value = key @ weight.to(key) + bias.to(key)
    delta = find_delta(network, batch, where, DeltaSearch(keys.layer, len(texts), value.norm(), rome))
    solved = to_device(keys.solved(key, rome.ridge), key.device)
    return WeightEdit(name, FactoredMatrix((solved / (key @ solved))[:, None], delta[None].to(key)))


@dataclass(frozen=True, eq=False)
class DeltaSearch:
    """Settings of the search for delta, besides the batch."""

    layer: int
    """Layer of the MLP whose output is changed."""
    prompts: int
    """Number of rows whose next token should be the answer; the row after them is the essence prompt."""
    size: Float[Tensor, ""]
    """|v| before the edit."""
    rome: Rome
    """How to search."""


@torch.enable_grad()
def find_delta(
    model: Transformer, batch: Batch, where: Bool[Tensor, "b p"], search: DeltaSearch
) -> Float[Tensor, "d"]:
    """The delta at the MLP's output that makes the rows' answers likely, as in `rome_edit`.

    Once the loss is below `enough`, delta stays fixed on the device; the loop may end a few steps later.

    Args:
        where: on the host, the tokens of each row at which delta is added.
    """
    rome, route = search.rome, ends(model.config, f"blocks.{search.layer}.mlp.W_out")
    wide = torch.promote_types(model.dtype, torch.float32)
    delta = torch.zeros(model.config.d_model, dtype=wide, device=model.device, requires_grad=True)
    size, where = search.size.to(delta), to_device(where, model.device)
    optimiser = torch.optim.Adam([delta], lr=rome.rate)
    edit = Edit(route.writes, lambda y: y + route.factor * (where[..., None] * delta).to(y.device))
    stream, columns = entering(model, batch, search.layer), batch.answer_columns()
    original: Tensor | None = None
    done = torch.zeros((), dtype=torch.bool, device=model.device)
    for step in range(rome.steps):
        logits = model(stream, Tap(edits=[edit]), search.layer, logits_at=columns, **batch.inputs)
        logp = logits.to(wide).log_softmax(-1)
        original = logp.detach() if original is None else original  # delta is still 0
        loss = _loss(logp, original, batch, search) + rome.decay * delta.norm() / size.square()
        done = done | (loss.detach().double() < rome.enough)
        if ended(done, step):
            break
        before = delta.detach().clone()
        delta.grad = torch.autograd.grad(loss, delta)[0]
        optimiser.step()
        with torch.no_grad():
            delta.mul_((rome.reach * size / delta.norm()).clamp(max=1))
            delta.copy_(torch.where(done, before, delta))
    return delta.detach()


def _loss(
    logp: Float[Tensor, "b k v"], original: Float[Tensor, "b k v"], batch: Batch, search: DeltaSearch
) -> Float[Tensor, ""]:
    """Mean -log p of the answers' tokens, plus `kl` times KL(edited || original) on the essence prompt."""
    n, (tokens, present) = search.prompts, batch.answer_tokens()
    loss = -(logp[:n].gather(2, tokens[:n, :, None])[..., 0] * present[:n]).sum() / present[:n].sum()
    if n == len(logp):
        return loss
    divergence = F.kl_div(original[n:, 0], logp[n:, 0], reduction="batchmean", log_target=True)
    return loss + search.rome.kl * divergence


def check_reaches_logits(model: Transformer, batch: Batch, where: Bool[Tensor, "b p"], layer: int) -> None:
    """ValueError if a change at the subject in this layer's MLP cannot reach the logits of the prompt's last token."""
    subject, last = int(where[0].int().argmax()), int(batch.host().prompt_ends()[0])
    if layer == model.config.n_layers - 1 and subject < last:
        raise ValueError(
            f"in the last block only the last token ({last}) reaches the logits, and the subject ends at token "
            f"{subject}: a layer below {layer} is required"
        )


def mention_mask(text: Text, batch: Batch, subject: str) -> Bool[Tensor, "b p"]:
    """Mask (on the CPU) of the last token of each row's last mention of the subject. ValueError for a row without."""
    batch = batch.host()
    mask = torch.zeros_like(batch.tokens, dtype=torch.bool)
    for row in range(len(batch)):
        columns = torch.arange(mask.shape[1])[batch.prompt_tokens[row]]
        pieces = text.pieces(batch.tokens[row, columns])
        written = "".join(pieces)
        start = written.rfind(subject)
        if not subject or start < 0:
            raise ValueError(f"the prompt must mention the subject {subject!r}, got {written!r}")
        reached = torch.tensor([len(piece) for piece in pieces]).cumsum(0) >= start + len(subject)
        mask[row, columns[int(reached.int().argmax())]] = True
    return mask


def at_mention(value: Float[Tensor, "b p m"], where: Bool[Tensor, "b p"]) -> Float[Tensor, "b m"]:
    """The value at the one token of each row where the mask is True.

    Args:
        where: mask of one token of each row, on the CPU.
    """
    rows, columns = (to_device(index, value.device) for index in where.nonzero().T)
    return value[rows, columns]
