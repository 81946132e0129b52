"""Attribution of the model's state, or its answer, to the tokens of a prompt: twelve methods with one signature.

They answer different questions. Attention, rollout, flow, norms and ALTI give the share of each token in the state at
one position, whatever the model then predicts. ALTI-Logit and the gradients give each token's contribution to an
answer's logit. `compare_methods` measures which methods are faithful, by removing tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.results import labelled
from interp.core.stats import ACCEPTED_MISS, Partial, Rows
from interp.core.transfers import to_device, to_host
from interp.core.wording import nearest
from interp.data.answers import AnswerTokens
from interp.data.batch import Answers, Batch
from interp.data.text import Text
from interp.model.config import ModelConfig
from interp.model.edits import Add, Detach, Project, Scale
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.answer_tokens import by_answer_token
from interp.passes.needs import Steps
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question, Reading, ReadingThen, Unshared
from interp.passes.rules import promises, under_rules
from interp.passes.sweep import continues
from interp.runs.functions import of_data
from interp.tokens.alti_logit import AltiLogit, alti_logit, check_alti_logit
from interp.tokens.input_gradients import (
    GradientTimesInput,
    IntegratedGradients,
    baseline_embedding,
    gradient_x_input,
    gradients_of_answers,
    integrated_gradients,
)
from interp.tokens.mixing import (
    WITHOUT_RESIDUAL,
    Kernel,
    check_stream,
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


@public()
@dataclass(frozen=True)
class Mixing:
    """Attribution by the mixing of attention: a matrix per block, taken from one block or chained over all."""

    kernel: Kernel
    """How the matrix of a block is computed."""
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


TokenMethod = Mixing | AltiLogit | GradientTimesInput | IntegratedGradients
SINK = 0.9
"""Share of the first token above which a note is added: ten other tokens then have below 0.01 each on average."""
METHODS: dict[str, TokenMethod] = {
    "attention": Mixing("attention", -1),
    "values": Mixing("values", -1),
    "norms": Mixing("norms", -1),
    "rollout": Mixing("attention"),
    "flow": Mixing("attention", "flow"),
    "norm_rollout": Mixing("norms"),
    "alti": Mixing("alti"),
    "alti_logit": AltiLogit(),
    "gradient_x_input": GradientTimesInput(),
    "attnlrp": GradientTimesInput("attnlrp"),
    "relp": GradientTimesInput("relp"),
    "integrated_gradients": IntegratedGradients(),
}
"""Every method by name, with its usual settings."""


@dataclass(frozen=True, eq=False)
class TokenAttribution(Question):
    """How much each token of each prompt contributes to position `pos`, or to the answer predicted there.

    Which words made the model say it? Each method gives one number per token; what they sum to differs.

    The methods, and the sums of their values (also in `attrs["sums_to"]`):

    - attention, values, norms (last block), rollout, flow, norm_rollout, alti: shares of 1, whatever the answer (Abnar
      & Zuidema 2020; Kobayashi et al. 2020, 2021; Ferrando et al. 2022).
    - alti_logit (Ferrando et al. 2023): what attention added to the answer's logit (minus the wrong answer's); with
      `initial`, `mlp` and `bias` it makes `total`, the logit (difference).
    - integrated_gradients (Sundararajan et al. 2017): `total`, the logit's change from the baseline, up to `error`,
      which is below .05, or a note says that it is not.
    - gradient_x_input and attnlrp (Achtibat et al. 2024; its gradient under backward rules): nothing in particular.
    - relp (the rules of Jafari et al. 2025): with `bias`, `total`, the logit (difference).

    Logits are those before a soft cap. Under edits, patterns and values count as the edited pass has them; one that is
    zeroed or scaled counts by what is left of it. Edits that make the stream something else than what the model's
    parts wrote are refused by the methods that follow it through the layers.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        answer: what is attributed, one for all prompts or one for each; each token of an answer of several has an
            attribution of its own, along the dim `answer_token`, to the prompt and the tokens before it; None: those of
            the data.
            Methods that mix tokens (`Mixing`) have no use for one, and a note says so.
        wrong: token that the answer is contrasted with, given like `answer`; None: none, or without `answer` that of
            the data.
        method: a name of `METHODS`, or a record with settings of its own.
        pos: position of each prompt that is attributed, negative from its end; BOS counts.

    Returns:
        Dataset over `prompt` and `pos`; the coordinate `token` is each token's text. Padding is NaN.

        - `value` [prompt, pos]: contribution of each token, a share or in logits.
        - `total` [prompt], of methods that sum to it: the logit (difference), or its change from the baseline.
        - `initial`, `mlp`, `bias` [prompt], of alti_logit (relp: `bias`, the share of biases and positions): what
          belongs to no token.
        - `error` [prompt], of alti_logit and integrated_gradients: by how much the sum misses `total`, relative to the
          largest term or to `total`. `attrs["completeness_error"]` is the largest, or that of the rules under relp.

    Raises:
        ValueError: a method without the answer it needs, cross-attention, packed rows, ALTI-Logit before the last
            token of a bidirectional model, and edits that a method cannot see.
        IndexError: a position or layer that does not exist.
        IncompleteSumError: ALTI-Logit does not sum.

    Caveats:
        Attention to BOS is mostly a way to do nothing, and shares count it (a note says where it takes more than 0.9
        of them); mixing says nothing about the MLPs.

    See Also:
        `compare_methods`: which method names the tokens that matter. `layer_mixing`: the matrices of every block.

    Example:
        >>> token_attribution(model, prompt, " Mary", " John", method="alti_logit").value.dims
        ('prompt', 'pos')
    """

    answer: Answers | None = None
    wrong: Answers | None = None
    _: KW_ONLY
    method: str | TokenMethod = "alti"
    pos: int = -1

    def bind(self, model: Subject) -> ByRow:
        """The reads of mixing methods in the shared pass; passes of its own for the other methods."""
        network, how = model.transformer, as_method(self.method)
        rows, sums_to = self.reading(network)
        several = self.pos == -1
        answers = (
            None
            if isinstance(how, Mixing)
            else AnswerTokens.of(model.text, self.answer, self.wrong, several=several)
        )
        capped = network.config.logit_softcap is not None
        unit = "share" if isinstance(how, Mixing) else "logits before the soft cap" if capped else "logits"
        steps = how.steps if isinstance(how, IntegratedGradients) else 0
        attrs: dict[str, str | int | float] = {
            "method": self._method_name,
            "pos": self.pos,
            "sums_to": sums_to,
        }
        question = ByRow(
            self.name,
            rows,
            Rows,
            partial(
                _finish,
                name=self.name,
                unit=unit,
                attrs=attrs,
                text=model.text,
                steps=steps,
                notes=self._unused_answer_notes(how),
            ),
            answers,
        )
        return by_answer_token(
            question, model.text, partial(_answer_gradients, how=how, size=self.rows_together)
        )

    def reading(self, network: Transformer) -> tuple[ReadingThen, str]:
        """The reads and the computation of the values of every token, and the words for what these sum to."""
        how = as_method(self.method)
        check_tokens(network.config)
        reads, inner, sums_to = _method_steps(network, how, self.rows_together)
        method = None if isinstance(how, Mixing) else self._method_name
        return ReadingThen(reads, partial(_checked_values, inner=inner, pos=self.pos, method=method)), sums_to

    def _unused_answer_notes(self, how: TokenMethod) -> tuple[str, ...]:
        """A note about `answer` or `wrong`, if given to a method that does not use them."""
        unused = [name for name in ("answer", "wrong") if getattr(self, name) is not None]
        if not unused or not isinstance(how, Mixing):
            return ()
        return (
            f"method={self.method!r} is about the tokens that a position is made of, whatever follows: "
            f"{' and '.join(unused)} changed nothing; 'alti_logit' and 'gradient_x_input' attribute an answer",
        )

    @property
    def _method_name(self) -> str:
        return self.method if isinstance(self.method, str) else repr(self.method)


@dataclass(frozen=True)
class LayerMixing(Question):
    """Share of each position's state that came from each other position, in every block, by one kernel.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        kernel: how a block becomes a matrix: "attention", "values", "attn_norms", "attn_res_norms", "norms" or "alti".

    Returns:
        Dataset over `prompt`, `layer`, `query` and `key`; `token` is the text of every position. Padding is NaN.

        - `value`: share of each key; rows sum to 1 (attention with a sink: to less).
        - `mixing_ratio` [prompt, layer, query], in [0, 1]: how much of it came from elsewhere. For norms that is ||sum
          of the others|| / (||sum of the others|| + ||own||) (Kobayashi et al. 2021), else the others' share.

    Raises:
        ValueError: an unknown kernel, cross-attention, and edits that the kernel cannot see.

    See Also:
        `token_attribution`: such matrices chained over the blocks.

    Example:
        >>> layer_mixing(model, prompt, kernel="attn_res_norms").mixing_ratio.mean("query").dims
        ('prompt', 'layer')
    """

    _: KW_ONLY
    kernel: Kernel = "alti"

    def bind(self, model: Subject) -> ByRow:
        """The reads that the kernel needs of every block."""
        network = model.transformer
        return ByRow(
            self.name,
            Reading(
                layers_read(network, self.kernel, range(network.config.n_layers)),
                partial(_layer_matrices, kernel=self.kernel),
            ),
            Rows,
            partial(_finish_layers, question=self, config=network.config, text=model.text),
        )


token_attribution = of_data(TokenAttribution)


layer_mixing = of_data(LayerMixing)


def as_method(method: str | TokenMethod) -> TokenMethod:
    """The method of a name, or the method itself. ValueError for an unknown one."""
    if isinstance(method, TokenMethod):
        return method
    if method not in METHODS:
        raise ValueError(
            f"unknown method {method!r}; {nearest(str(method), METHODS)}; methods: {', '.join(METHODS)}"
        )
    return METHODS[method]


def columns(batch: Batch, pos: int) -> Int[Tensor, "b"]:
    """The column of each row's real token number `pos`, negative from its end; on the host.

    -1 is the row's last one, which may be of its answer (`Batch.forced`).

    Raises:
        PositionError: a row that is too short.
        ValueError: packed rows.
    """
    last = batch.host().last()
    return last if pos == -1 else batch.tokens_at(pos).columns[:, 0]


Inner = Callable[[Trace, Batch, Transformer, Int[Tensor, "b"]], Steps[dict[str, Tensor]]]
"""Steps from a recorded batch, with the column of each row that is attributed (on the host), to the values."""


def _method_steps(
    model: Transformer, how: TokenMethod, batch_size: int
) -> tuple[tuple[Read, ...], Inner, str]:
    """A method's reads in the shared pass, its computation, and words for the sum of its values."""
    if isinstance(how, Mixing):
        layers = how.layers(model.config)
        if isinstance(how.across, str):
            check_stream(model, f"{how.across} over layers", (Add, Scale, Project, Detach))
        sinks = how.kernel == "attention" and not isinstance(how.across, str) and model.config.sinks
        sums_to = "1, less what the sink takes" if sinks else "1"
        return layers_read(model, how.kernel, layers), partial(_mixed_values, how=how), sums_to
    if isinstance(how, AltiLogit):
        check_alti_logit(model)
        sums_to = "what attention added to the logit (difference); with initial, mlp and bias: total"
        return (), _alti_logit, sums_to
    if isinstance(how, GradientTimesInput):
        linear = promises(under_rules(model, how.rules))
        sums_to = "total, the logit (difference), with bias" if linear else "nothing in particular"
        return (), partial(_gradient_values, how=how, batch_size=batch_size), sums_to
    baseline_embedding(model, how.baseline)
    sums_to = "total, the logit (difference) minus that of the baseline, up to error"
    return (), partial(_integrated_values, how=how, batch_size=batch_size), sums_to


def _checked_values(
    trace: Trace, batch: Batch, model: Transformer, inner: Inner, pos: int, method: str | None
) -> Steps[Mapping[str, Tensor]]:
    """The values of a method, NaN at padding, with the token ids; method: its name, if it requires an answer."""
    at = columns(batch, pos)
    if method is not None and batch.answer is None:
        raise ValueError(f"{method} attributes the logit of an answer: an answer is required, got None")
    values = yield from inner(trace, batch, model, at)
    real = batch.real.to(values["value"].device)
    value = values["value"].masked_fill(~real, torch.nan)
    return {**values, "value": value, "token": batch.token_ids}


def _mixed_values(
    trace: Trace, batch: Batch, model: Transformer, at: Int[Tensor, "b"], how: Mixing
) -> Steps[dict[str, Tensor]]:
    """Share of each token `[b p]` in the state at column `at`, from the matrices of a kernel across the layers."""
    yield from ()  # no pass of its own: the shared pass has all reads
    layers = [contributions(model, layer, trace, how.kernel)[0] for layer in how.layers(model.config)]
    if how.kernel == "attention" and isinstance(how.across, str):
        layers = [with_residual(layer) for layer in layers]
    if how.across != "flow":
        return {"value": rolled_row(layers, to_device(at, layers[0].device))}
    stacked = torch.stack(layers, 1)
    on_host = to_host({"layers": stacked})["layers"]  # networkx searches edge by edge
    flows = [flow(row, i) for row, i in zip(on_host, at.tolist(), strict=True)]
    return {"value": shares(to_device(torch.stack(flows), stacked.device))}


def _alti_logit(
    trace: Trace, batch: Batch, model: Transformer, at: Int[Tensor, "b"]
) -> Steps[dict[str, Tensor]]:
    return alti_logit(model, batch, at)


def _gradient_values(
    trace: Trace,
    batch: Batch,
    model: Transformer,
    at: Int[Tensor, "b"],
    how: GradientTimesInput,
    batch_size: int,
) -> Steps[dict[str, Tensor]]:
    return gradient_x_input(model, batch, at, rules=how.rules, batch_size=batch_size)


def _answer_gradients(
    model: Transformer, batch: Batch, how: TokenMethod, size: int
) -> Steps[Mapping[str, Tensor]] | None:
    """Gradients of all tokens of the answers from one pass; None for other methods, and where one cannot give them."""
    if not isinstance(how, GradientTimesInput) or how.rules or promises(model):
        return None
    if model.unembed is None or not continues(model.config, batch.tokens.shape[1]):
        return None
    return Unshared(partial(gradients_of_answers, batch_size=size))(model, batch)


def _integrated_values(
    trace: Trace,
    batch: Batch,
    model: Transformer,
    at: Int[Tensor, "b"],
    how: IntegratedGradients,
    batch_size: int,
) -> Steps[dict[str, Tensor]]:
    integral = yield from integrated_gradients(model, batch, at, how, batch_size=batch_size)
    return {"value": integral.score, "total": integral.total, "error": integral.error}


def _finish(
    merged: Partial,
    name: str,
    unit: str,
    attrs: Mapping[str, str | int | float],
    text: Text,
    steps: int,
    notes: Sequence[str],
) -> xr.Dataset:
    """The result of `token_attribution`; steps: number of gradients of integrated gradients, 0 for other methods."""
    assert isinstance(merged, Rows)
    rows = dict(merged.rows)
    token = rows.pop("token")
    missed = rows.pop("completeness_error", rows.get("error"))
    error = {} if missed is None else {"completeness_error": float(missed.max())}
    units = dict.fromkeys(("value", "total", "initial", "mlp", "bias"), unit)
    return labelled(
        name,
        {
            name: (("prompt", "pos") if value.ndim == 2 else ("prompt",), value)
            for name, value in rows.items()
        },
        coords={"pos": range(token.shape[1]), "token": text.token_words(token)},
        units={**units, "error": "share of the total" if steps else "share of the largest term"},
        attrs={**attrs, **error, "unit": unit},
        notes=[
            *notes,
            *(_convergence_notes(rows["error"], steps) if steps else ()),
            *(_sink_notes(rows["value"]) if unit == "share" and attrs["pos"] != 0 else ()),
        ],
    )


def _convergence_notes(error: Float[Tensor, "n"], steps: int) -> tuple[str, ...]:
    """Note about prompts whose integrated gradients have an error above `ACCEPTED_MISS`."""
    off = int((error > ACCEPTED_MISS).sum())
    if not off:
        return ()
    return (
        f"integrated gradients did not converge on {off} of {len(error)} prompts: after {steps} gradients the scores "
        f"may miss the logit's change by {float(error.max()):.2g} of it ({ACCEPTED_MISS} is accepted); more "
        "(IntegratedGradients(steps=...)) come closer, unless the logit jumps or its numbers are in half precision",
    )


def _sink_notes(shares: Float[Tensor, "n p"]) -> tuple[str, ...]:
    """Note about prompts in which nearly all attribution goes to the first token."""
    known = ~shares.isnan()
    first = shares.gather(1, known.int().argmax(1, keepdim=True))[:, 0]
    sink_count, has_others = int((first > SINK).sum()), known.sum(1) > 1
    if not bool(((first > SINK) & has_others).any()):
        return ()
    return (
        f"in {sink_count} of {len(first)} prompts the first token has more than {SINK} of all shares, as an attention "
        "sink does: what the others have is what it leaves",
    )


def _layer_matrices(trace: Trace, batch: Batch, model: Transformer, kernel: Kernel) -> Mapping[str, Tensor]:
    by_layer = [contributions(model, layer, trace, kernel) for layer in range(model.config.n_layers)]
    matrix, ratio = (torch.stack(list(x), 1) for x in zip(*by_layer, strict=True))
    if batch.keep is not None:
        ratio = ratio.masked_fill(~batch.keep[:, None], torch.nan)
        real = batch.keep[:, :, None] & batch.keep[:, None, :]
        matrix = matrix.masked_fill(~real[:, None], torch.nan)
    return {"value": matrix, "mixing_ratio": ratio, "token": batch.token_ids}


def _finish_layers(merged: Partial, question: LayerMixing, config: ModelConfig, text: Text) -> xr.Dataset:
    assert isinstance(merged, Rows)
    dims = ("prompt", "layer", "query", "key")
    n = merged.rows["token"].shape[1]
    return labelled(
        question.name,
        {"value": (dims, merged.rows["value"]), "mixing_ratio": (dims[:3], merged.rows["mixing_ratio"])},
        coords={
            "layer": range(config.n_layers), "query": range(n), "key": range(n), "pos": range(n),
            "token": text.token_words(merged.rows["token"]),
        },
        units={"value": "share of the row", "mixing_ratio": "share"},
        attrs={"kernel": question.kernel, "unit": "share of the row"},
    )  # fmt: skip
