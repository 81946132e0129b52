"""The output lens: the write of one head, MLP, attention layer or neuron at each position, read as tokens.

The part's write is carried to the logits by the linear part of every norm on its way, at the scale that norm really had
(a lens of a whole state recomputes the norm, a part of a state may not). So the logits of all parts and the biases sum
to the model's: it is direct logit attribution to every word of the vocabulary at once. Geva et al. 2022; Elhage et al.
2021. It shows what a part says directly, not what later parts make of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.kinds import listed
from interp.core.results import labelled
from interp.core.stats import Partial, Rows
from interp.core.tiles import row_tiles
from interp.core.transfers import to_device
from interp.data.answers import AnswerTokens
from interp.data.batch import Answers, Batch
from interp.data.text import Text
from interp.lenses.lens import targets
from interp.model.config import ModelConfig
from interp.model.parts import Part, PartName
from interp.model.records import require
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question, Reading
from interp.residual.decomposition import not_linear
from interp.residual.written import as_writer, check_arrives, reads_of, written_by
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True, eq=False)
class OutputLens(Question):
    """Tokens that one part of the model promotes and suppresses at each position, by its direct effect on the logits.

    The part's write is carried to the logits by the linear part of every norm on its way, at the scale that the norm
    really had. So the logits of all parts and the biases sum to the model's: it is direct logit attribution to every
    word of the vocabulary at once. target_logit + vocabulary_mean at the last position is the part's number in
    `attribute`. Logits are those before a soft cap.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        part: a head, neuron or sublayer, `L3H2`, `L3N17`, `L3.attn`, `L3.mlp` (with its biases). Of the MLP before
            attention in Macaron blocks `L3B17`, `L3.mlp_before`; of cross-attention `L3X2`, `L3.cross_attn`.
        answer: target at every position, as text or id, one for all prompts or one each; of several tokens the first
            up to the prompt's end, and then the token that follows; None: the data's answers, else the next tokens.
        top: how many of the most promoted and of the most suppressed tokens are listed; None: 10, or all of fewer.
        source: of a head, the one token of each prompt from which its write is taken (0 the first, negative from the
            end); None: all tokens. Then the write at q is what the head moved from there, a_qs v_s W_O; the writes from
            all tokens sum to the head's. It is 0 (norm 0) where the head does not attend to that token.

    Returns:
        Dataset[prompt, pos]; the coordinate `token` is the text of every token. Padded positions hold NaN and token -1.

        - `norm`: length of the write as the unembedding reads it.
        - `target_logit`: logit of the target, relative to the mean; NaN where there is none.
        - `vocabulary_mean`: the mean that was subtracted, in logits.
        - `top_token`, `top_logit`, `bottom_token`, `bottom_logit` [prompt, pos, rank]: what it promotes and what it
          suppresses, strongest first, with the texts `top_word`, `bottom_word`.

    Raises:
        KeyError, IndexError: a part that the model lacks, and a source that a prompt lacks.
        ValueError: a part that does not write on its own, a model without logits linear in the stream, edits that
            change what the part wrote on its way, and a source of anything but a head whose z is pattern @ values.

    Caveat:
        It shows what a part says directly, not what later parts make of it.

    Source:
        Geva et al. 2022; Elhage et al. 2021.

    See Also:
        `interp.attribute`: the logit of one answer, split over all parts. `logit_lens`: what a whole state says.

    Example:
        >>> found = output_lens(model, "When Mary and John went to the store, John gave a drink to", "L2H3")
        >>> words = found.top_word.values[0, -1]
    """

    of_layers: ClassVar[bool] = False

    part: PartName
    _: KW_ONLY
    answer: Answers | None = None
    top: int | None = None
    source: int | None = None

    def bind(self, model: Subject) -> ByRow:
        """The part's activations, and the scale of every norm on its way."""
        network = model.transformer
        config = network.config
        top = listed(self.top, 10, config.n_outputs)
        if what := not_linear(config):
            raise ValueError(
                "an output lens requires logits that are linear in the normed stream (no masked-LM head); "
                f"this model {what}"
            )
        part = as_writer(self.part, config)
        check_arrives(part, network)
        moved = () if self.source is None else _head_reads(part, network)
        return ByRow(
            self.name,
            Reading(
                (*reads_of(part, config), *moved),
                partial(_compute, part=part, top=top, source=self.source),
            ),
            Rows,
            partial(_finish, name=self.name, config=config, part=part, source=self.source, text=model.text),
            AnswerTokens.of(model.text, self.answer, several=True),
        )


output_lens = of_data(OutputLens)


@torch.no_grad()
def _compute(
    trace: Trace, batch: Batch, model: Transformer, part: Part, top: int, source: int | None
) -> Mapping[str, Tensor]:
    """The numbers of the part's write at every position, `[b p ...]`, with NaN and -1 at padding."""
    written = written_by(
        part, trace if source is None else _source_trace(source, part, trace, batch, model), model
    )
    keep = batch.real
    row, column = to_device(batch.host().real.nonzero().T, keep.device)
    statistics = spoken(written[row, column], model, targets(batch, model.config)[row, column], top)
    out = {"token": batch.tokens.masked_fill(~keep, -1)}
    for name, value in statistics.items():
        missing = torch.nan if value.is_floating_point() else -1
        padded = value.new_full((*keep.shape, *value.shape[1:]), missing)
        padded[row, column] = value
        out[name] = padded
    return out


@dataclass(frozen=True)
class _AxisEntry:
    """A function that selects one index of one axis of a site's activation."""

    axis: int
    index: int

    def __call__(self, value: Tensor) -> Tensor:
        return value.select(self.axis, self.index)


def _head_reads(part: Part, model: Transformer) -> tuple[Read, Read]:
    """Reads of a head's pattern and of its values; raises ValueError unless the head's z is pattern @ values."""
    if part.kind != "head" or part.layer is None or part.index is None:
        raise ValueError(f"a source requires a head, which moves something from a token, got {part}")
    require("additive", model.config.mixers[part.layer : part.layer + 1], "what a head moved from a token")
    group = int(Weights(model).kv_head()[part.index])
    site = f"blocks.{part.layer}.attn.hook_"
    return (
        Read(f"{site}pattern", _AxisEntry(1, part.index)),
        Read(f"{site}v", _AxisEntry(2, group)),
    )


def _source_trace(source: int, part: Part, trace: Trace, batch: Batch, model: Transformer) -> Trace:
    """The trace in which the head's z at every query position is only what it moved from the source token."""
    length = batch.lengths[:, None]
    batch.require_one_text("a source")
    if not -int(length.min()) <= source < int(length.min()):
        raise IndexError(
            f"a source that every prompt has is required, the shortest has {int(length.min())} tokens; got {source}"
        )
    pattern, value = _head_reads(part, model)
    at_source = (batch.real & (batch.places == source % length)).to(trace[value])
    z = trace[Read(part.site)].clone()
    z[:, :, part.index] = torch.einsum(
        "bqk, bk, bke -> bqe", trace[pattern].to(at_source), at_source, trace[value]
    )
    return Trace({**trace, Read(part.site): z})


def spoken(
    written: Float[Tensor, "n d"], model: Transformer, target: Tensor, top: int
) -> dict[str, Float[Tensor, "n ..."] | Tensor]:
    """Logits of writes over the vocabulary, reduced to the numbers that `output_lens` reports.

    Args:
        written: [n d], writes as they stand before the unembedding.
        model: the model with the unembedding.
        target: [n], the token whose logit is reported; negative: none.
        top: how many tokens are listed at each end.

    Returns:
        By name, per write: `top_token`, `top_logit`, `bottom_token`, `bottom_logit` [n top]; `vocabulary_mean`,
        `target_logit` and `norm` [n]. Logits are relative to the vocabulary's mean.

    Memory:
        No more than 64 MiB of logits exist at a time.
    """
    unembedding = Weights(model).W_U
    chunks: list[dict[str, Tensor]] = []
    for first, logits in row_tiles(written * model.config.logit_scale, unembedding):
        targets = target[first : first + len(logits)]
        mean = logits.mean(-1, keepdim=True)
        logits -= mean
        best, worst = logits.topk(top), logits.topk(top, largest=False)
        of_target = logits.gather(1, targets.clamp_min(0)[:, None])[:, 0]
        chunks.append(
            {
                "top_token": best.indices, "top_logit": best.values,
                "bottom_token": worst.indices, "bottom_logit": worst.values,
                "vocabulary_mean": mean[:, 0], "target_logit": of_target.masked_fill(targets < 0, torch.nan),
            }
        )  # fmt: skip
    statistics = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    return {**statistics, "norm": written.norm(dim=-1)}


def _finish(
    merged: Partial, name: str, config: ModelConfig, part: Part, source: int | None, text: Text
) -> xr.Dataset:
    """The Dataset[prompt, pos] of all rows, with the texts of the tokens."""
    assert isinstance(merged, Rows)
    dims, rows = ("prompt", "pos", "rank"), dict(merged.rows)
    token = text.token_words(rows.pop("token"))
    unit = "logits" if config.logit_softcap is None else "logits before the soft cap"
    relative = f"{unit}, relative to their mean over the vocabulary"
    order = sorted(rows, key=lambda variable: rows[variable].ndim)  # [prompt, pos] first
    result = labelled(
        name,
        {variable: (dims[: rows[variable].ndim], rows[variable]) for variable in order},
        coords={"token": token},
        units={
            **dict.fromkeys(("top_logit", "bottom_logit", "target_logit"), relative),
            "vocabulary_mean": unit, "norm": "norm",
        },
        attrs={
            "part": str(part), "unit": relative,
            "source": "all tokens" if source is None else source, "norms": "frozen at their real scale",
            "null": "0: the part says nothing about the token",
        },
    )  # fmt: skip
    return text.of_outputs.worded(result, top_word="top_token", bottom_word="bottom_token")
