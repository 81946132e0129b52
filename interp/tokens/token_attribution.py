"""Which tokens of a prompt the model's state, or its answer, rests on: ten ways behind one signature.

They answer different questions. Attention, rollout, flow, norms and ALTI say from where the state at one position was
mixed together, whatever comes of it; ALTI-Logit and the gradients say what an answer's logit owes to each token. Which
to trust is measured by removing tokens: `faithfulness.compare_methods`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.results import labelled
from interp.core.shapes import nearest
from interp.core.stats import Partial, Rows
from interp.data.batch import Batch
from interp.data.text import Answers, Prompts
from interp.model.config import ModelConfig
from interp.model.tap import Trace
from interp.model.transformer import Transformer
from interp.passes.analysis import Analysis, run_batches
from interp.passes.observe import Subject
from interp.tokens.alti_logit import alti_logit
from interp.tokens.input_gradients import IntegratedGradients, gradient_x_input, integrated_gradients
from interp.tokens.mixing import (
    WITHOUT_RESIDUAL,
    Kernel,
    check_tokens,
    contributions,
    flow,
    layers_read,
    rolled_row,
    shares,
    with_residual,
)

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class Mixed:
    """Attribution by what attention mixed: a matrix per block, taken from one block or chained over all."""

    kernel: Kernel
    """How a block becomes a matrix."""
    across: int | Literal["rollout", "flow"] = "rollout"
    """A single block (negative: from the last), the product over the blocks, or the maximum flow through them."""

    def __post_init__(self) -> None:
        if isinstance(self.across, str) and self.across not in ("rollout", "flow"):
            raise ValueError(f"across must be a layer, 'rollout' or 'flow', got {self.across!r}")
        if isinstance(self.across, str) and self.kernel in WITHOUT_RESIDUAL:
            raise ValueError(
                f"{self.across} over layers requires a kernel that counts the residual, got {self.kernel!r}"
            )

    def layers(self, config: ModelConfig) -> range:
        """The blocks that take part; IndexError for one that does not exist."""
        n = config.n_layers
        if isinstance(self.across, str):
            return range(n)
        if not -n <= self.across < n:
            raise IndexError(f"layers are {-n} to {n - 1}, got {self.across}")
        return range(self.across % n, self.across % n + 1)


@dataclass(frozen=True)
class AltiLogit:
    """What attention brought to the answer's logit, credited to the tokens by ALTI (`alti_logit`)."""


@dataclass(frozen=True)
class GradientTimesInput:
    """Embedding . gradient of the answer's logit (`input_gradients`)."""


Method = Mixed | AltiLogit | GradientTimesInput | IntegratedGradients
METHODS: dict[str, Method] = {
    "attention": Mixed("attention", -1),
    "values": Mixed("values", -1),
    "norms": Mixed("norms", -1),
    "rollout": Mixed("attention"),
    "flow": Mixed("attention", "flow"),
    "norm_rollout": Mixed("norms"),
    "alti": Mixed("alti"),
    "alti_logit": AltiLogit(),
    "gradient_x_input": GradientTimesInput(),
    "integrated_gradients": IntegratedGradients(),
}
"""Every method by name, with its usual settings."""


def token_attribution(
    model: Subject,
    prompts: Prompts,
    answer: Answers | None = None,
    wrong: Answers | None = None,
    *,
    method: str | Method = "alti",
    pos: int = -1,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """How much each token of each prompt has to do with position `pos` (or with the answer predicted there).

    Returns Dataset[prompt, pos] with `score`, and each token's text as the coordinate `token`; padding is NaN.
    method: a name of `METHODS` or a record with settings of its own. What the scores sum to is in `attrs["sums_to"]`:
    - attention, values, norms (last block), rollout, flow, norm_rollout, alti: shares of 1, no answer needed
      (Abnar & Zuidema 2020; Kobayashi et al. 2020, 2021; Ferrando et al. 2022);
    - alti_logit (Ferrando et al. 2023): what attention added to the answer's logit (minus the wrong answer's); with
      `initial`, `mlp` and `bias` it makes `total`, the logit (difference); `error` is by how much it misses, relative;
    - integrated_gradients (Sundararajan et al. 2017): `total`, the logit's change from the baseline, up to `error`,
      relative, which falls with the steps;
    - gradient_x_input: nothing in particular.
    Logits are those before a soft cap. pos: of each prompt, BOS counted; negative from its end.
    Caveats: attention to BOS is mostly a way to do nothing, and shares count it; mixing says nothing about the MLPs.
    Errors: ValueError for a method without the answer it needs, for cross-attention, packed rows, ALTI-Logit before
    the last token of a bidirectional model; IndexError for a position or layer that does not exist; IncompleteSumError
    where ALTI-Logit does not sum.

    Example:
        >>> token_attribution(model, prompt, " Mary", " John", method="alti_logit").score.dims
        ('prompt', 'pos')
    """
    how = _method(method)
    batch = model.text.batch(prompts, prepend_bos=prepend_bos)
    if not isinstance(how, Mixed):
        if answer is None:
            raise ValueError(f"{method} attributes the logit of an answer: an answer is required, got None")
        foils = None if wrong is None else model.text.targets(wrong, len(batch))
        batch = batch.with_answers(model.text.targets(answer, len(batch)), foils)
    result = scores(model.transformer, batch, how, pos=pos, batch_size=batch_size)
    name = method if isinstance(method, str) else repr(method)
    pieces = [model.text.pieces(row) for row in batch.tokens]
    return result.assign_coords(token=(("prompt", "pos"), pieces)).assign_attrs(method=name, position=pos)


def scores(
    model: Transformer, batch: Batch, how: Method, *, pos: int = -1, batch_size: int = 32
) -> "xr.Dataset":
    """`token_attribution` of a batch of tokens that carries its answers."""
    check_tokens(model.config)
    at = columns(batch, pos)
    if isinstance(how, Mixed):
        analysis = mixed_attribution(model.config, how, pos=pos)
        return run_batches([analysis], model, batch.split(batch_size))[analysis.name]
    if isinstance(how, AltiLogit):
        return _alti_logit(model, batch, at, batch_size)
    if isinstance(how, GradientTimesInput):
        score = gradient_x_input(model, batch, at, batch_size=batch_size)
        values, sums_to = {"score": score}, "nothing in particular"
    else:
        found = integrated_gradients(model, batch, at, how, batch_size=batch_size)
        values = {"score": found.score, "total": found.total, "error": found.error}
        sums_to = "total, the logit (difference) minus that of the baseline, up to error"
    values["score"] = _without_padding(values["score"], batch)
    dims = {"score": ("prompt", "pos"), "total": ("prompt",), "error": ("prompt",)}
    unit = "logits" if model.config.logit_softcap is None else "logits before the soft cap"
    attrs: dict[str, str | float | int] = {"unit": unit, "sums_to": sums_to}
    if "error" in values:
        attrs["completeness_error"] = float(values["error"].max())
    return labelled(
        "token_attribution", {name: (dims[name], value) for name, value in values.items()}, attrs=attrs
    )


def layer_mixing(
    model: Subject,
    prompts: Prompts,
    *,
    kernel: Kernel = "alti",
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """What each position took from each other one in every block, by one kernel.

    Returns Dataset[prompt, layer, query, key]: `contribution`, rows sum to 1 (attention with a sink: to less), and
    `mixing_ratio[prompt, layer, query]`, in [0, 1]: how much of it came from elsewhere. For norms that is
    ||sum of the others|| / (||sum of the others|| + ||own||) (Kobayashi et al. 2021), else the others' share.
    Padding is NaN. Errors: as `token_attribution`.

    Example:
        >>> layer_mixing(model, prompt, kernel="attn_res_norms").mixing_ratio.mean("query")
    """
    batch = model.text.batch(prompts, prepend_bos=prepend_bos)
    analysis = layer_matrices(model.transformer.config, kernel)
    return run_batches([analysis], model.transformer, batch.split(batch_size))[analysis.name]


def layer_matrices(config: ModelConfig, kernel: Kernel) -> Analysis:
    """The analysis behind `layer_mixing`."""
    return Analysis(
        name="layer_mixing",
        reads=layers_read(config, kernel, range(config.n_layers)),
        compute=partial(_matrices, kernel=kernel),
        reduction=Rows,
        finish=partial(_finish_layers, config=config, kernel=kernel),
    )


def mixed_attribution(config: ModelConfig, how: Mixed, *, pos: int = -1) -> Analysis:
    """The analysis behind the methods of `token_attribution` that need no answer."""
    reads = layers_read(config, how.kernel, how.layers(config))
    sinks = how == Mixed("attention", how.across) and not isinstance(how.across, str) and config.sinks
    attrs = {"unit": "share", "sums_to": "1, less what the sink takes" if sinks else "1"}
    return Analysis(
        name="token_attribution",
        reads=reads,
        compute=partial(_compute, how=how, pos=pos),
        reduction=Rows,
        finish=partial(_finish, attrs=attrs),
    )


def columns(batch: Batch, pos: int) -> Int[Tensor, "b"]:
    """The column of each row's real token number `pos`, negative from its end.

    Errors: IndexError for a row that is too short, ValueError for packed rows.
    """
    batch.last()
    lengths = batch.lengths
    place = lengths + pos if pos < 0 else torch.full_like(lengths, pos)
    if not bool(((place >= 0) & (place < lengths)).all()):
        raise IndexError(
            f"pos {pos} requires prompts of at least {pos + 1 if pos >= 0 else -pos} tokens, got "
            f"{int(lengths.min())}"
        )
    if batch.keep is None:
        return place
    return ((batch.keep.cumsum(1) == place[:, None] + 1) & batch.keep).int().argmax(1)


def _method(method: str | Method) -> Method:
    if not isinstance(method, str):
        return method
    if method not in METHODS:
        raise ValueError(
            f"unknown method {method!r}; {nearest(method, METHODS)}; methods: {', '.join(METHODS)}"
        )
    return METHODS[method]


def _compute(trace: Trace, batch: Batch, model: Transformer, how: Mixed, pos: int) -> Mapping[str, Tensor]:
    at = columns(batch, pos)
    layers = [contributions(model, layer, trace, how.kernel)[0] for layer in how.layers(model.config)]
    if how.kernel == "attention" and isinstance(how.across, str):
        layers = [with_residual(layer) for layer in layers]
    if how.across == "flow":
        stacked = torch.stack(layers, 1)
        score = shares(torch.stack([flow(row, int(i)) for row, i in zip(stacked, at, strict=True)]))
    else:
        score = rolled_row(layers, at)
    return {"score": _without_padding(score, batch)}


def _without_padding(score: Float[Tensor, "b p"], batch: Batch) -> Float[Tensor, "b p"]:
    return score if batch.keep is None else score.masked_fill(~batch.keep.to(score.device), torch.nan)


def _alti_logit(model: Transformer, batch: Batch, at: Int[Tensor, "b"], batch_size: int) -> "xr.Dataset":
    """ALTI-Logit of rows cut behind their position, put back into the columns they came from."""
    every = batch.real
    before = torch.arange(batch.tokens.shape[1], device=at.device) <= at[:, None]
    if not model.config.causal and not bool((before | ~every).all()):
        raise ValueError("ALTI-Logit requires the last position in a bidirectional model: use pos=-1")
    keep = every & before
    analysis = alti_logit(model.config)
    aligned = replace(batch, keep=keep).left_aligned()
    result = run_batches([analysis], model, aligned.split(batch_size))[analysis.name]
    found = torch.tensor(result.score.values)
    order = keep.int().argsort(dim=1, stable=True).to(found.device)
    score = _without_padding(torch.zeros_like(found).scatter(1, order, found), batch)
    return result.assign(score=(("prompt", "pos"), score.numpy()))


def _finish(merged: Partial, attrs: Mapping[str, str]) -> "xr.Dataset":
    assert isinstance(merged, Rows)
    return labelled("token_attribution", {"score": (("prompt", "pos"), merged.rows["score"])}, attrs=attrs)


def _matrices(trace: Trace, batch: Batch, model: Transformer, kernel: Kernel) -> Mapping[str, Tensor]:
    each = [contributions(model, layer, trace, kernel) for layer in range(model.config.n_layers)]
    matrix, ratio = (torch.stack(list(x), 1) for x in zip(*each, strict=True))
    if batch.keep is not None:
        ratio = ratio.masked_fill(~batch.keep[:, None], torch.nan)
        real = batch.keep[:, :, None] & batch.keep[:, None, :]
        matrix = matrix.masked_fill(~real[:, None], torch.nan)
    return {"contribution": matrix, "mixing_ratio": ratio}


def _finish_layers(merged: Partial, config: ModelConfig, kernel: Kernel) -> "xr.Dataset":
    assert isinstance(merged, Rows)
    dims: dict[str, Sequence[str]] = {
        "contribution": ("prompt", "layer", "query", "key"),
        "mixing_ratio": ("prompt", "layer", "query"),
    }
    return labelled(
        "layer_mixing",
        {name: (dims[name], value) for name, value in merged.rows.items()},
        coords={"layer": range(config.n_layers)},
        attrs={"kernel": kernel, "unit": "share of the row"},
    )
