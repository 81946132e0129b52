"""Patchscopes: a state is put into the run of another prompt, whose next token is read.

A state of a source run (at one position and depth) takes the place of the state at one position and depth of the run
of a target prompt, and what the model then says at the end of that prompt is read (Ghandeharioun et al. 2024,
arXiv:2401.06102). A target prompt that repeats what it is given ("cat -> cat; ...") asks which token the state stands
for. At the deepest target there is nothing left to run: that column is the logit lens of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.kinds import listed
from interp.core.results import labelled
from interp.core.stats import Partial, Rows, finite, share_interval
from interp.core.transfers import check, to_device
from interp.core.wording import value_text
from interp.data.answers import AnswerTokens
from interp.data.batch import Answers, Batch
from interp.data.text import Text
from interp.lenses.lens import (
    CHUNK,
    LogitTiles,
    ReferenceDistribution,
    columns_of,
    lens_sites,
    not_finite,
    statistics,
)
from interp.model.edits import Edit, Set
from interp.model.parts import Part
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.metrics import answer_log_probability
from interp.passes.needs import Steps, swept, swept_final
from interp.passes.observe import Model, Subject, as_model
from interp.passes.question import ByRow, Question, ReadingThen, check_followed
from interp.passes.variants import Variant
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr

IDENTITY = "cat -> cat; 1135 -> 1135; hello -> hello; x"
"""A target prompt that asks a model to repeat a token: the identity prompt of the paper."""
Mapped = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Patchscope(Question):
    """Next-token prediction of a target prompt that holds a state of each source prompt, by source and target depth.

    The stream at token `pos` of the source run, as it enters a block, takes the place of the stream at `target_pos` of
    the target run, as it enters another, and the target run goes on from there. Its next token is read. A target prompt
    that repeats what it is given ("cat -> cat; ...") asks which token the state stands for.

    Args:
        data: source prompts, token ids, a batch, files or a stream of any size.
        target: prompt that a state is put into, and at whose last token the answer is read; by default the identity
            prompt of the paper.
        pos: token of the source prompts at which the state is taken, negative from the end.
        target_pos: token of the target prompt at which it is put, negative from the end.
        answer: continuation that is looked for, of one or several tokens, one for all prompts or one for each; None:
            what the source run says itself.
        into: model of the target prompt, with the same output tokens; None: that of the source prompts.
        mapping: function from states [b d] of the source model to states of the target's, where their widths or their
            meanings differ; None: as they are.
        top: how many of the most probable tokens are listed; None: 10, or all of a smaller vocabulary.

    Returns:
        Dataset[prompt, depth, target_depth]. The last target depth is the final stream: the logit lens of the state,
        with no target prompt in it. Two baselines to compare with are that column and `unpatched_prob`.

        - `top_token`, its text `word`, `top_prob` [prompt, depth, target_depth, rank]: the most probable next tokens.
        - `entropy`, `kl`: in nats, KL(the source run's own next token || these).
        - `target_rank`, `target_prob`: rank (0 = most probable) and probability of `answer`, by default of the token
          that the source run finds most probable itself.
        - `value` [depth, target_depth]: share of prompts whose answer comes first, with the ends `low` and `high` of
          its 95 % interval and `n`.
        - `unpatched_prob` [prompt]: probability of the answer in the target run as it is.

        Of an answer of several tokens the above are about its first one. `answer_log_prob` [prompt, depth,
        target_depth] is log p of the whole, each token predicted after the target prompt and those before it (NaN at
        the last target depth, where there is no prompt), and `unpatched_answer_log_prob` [prompt] that of the target
        run as it is.

    Raises:
        ValueError: models of other output tokens, or states of another width than the target's model has.
        IndexError: a position that a prompt lacks.

    Source:
        Ghandeharioun et al. 2024, "Patchscopes", arXiv:2401.06102.

    See Also:
        `logit_lens`: reads a state without a target prompt. `interp.patch`: patches between a prompt and its
        corruption.

    Example:
        >>> found = interp.lenses.patchscope(model, [prompt], prompt, top=3)
        >>> found.value.dims
        ('depth', 'target_depth')
    """

    target: str | Int[Tensor, "p"] = IDENTITY
    _: KW_ONLY
    pos: int = -1
    target_pos: int = -1
    answer: Answers | None = None
    into: Model | None = None
    mapping: Mapped | None = None
    top: int | None = None

    def bind(self, model: Subject) -> ByRow:
        """States to read, and one planned sweep over the target prompt per batch."""
        into = model if self.into is None else as_model(self.into)
        config, other = model.transformer.config, into.transformer.config
        if not (config.unembed and other.unembed and config.n_outputs == other.n_outputs):
            raise ValueError(
                "two models with an unembedding and as many output tokens are required, got "
                f"{config.n_outputs if config.unembed else 'none'} and {other.n_outputs if other.unembed else 'none'}"
            )
        try:
            batch = into.text.batch(self.target)
        except ValueError as cause:
            raise ValueError(f"target: {cause}") from cause
        where = int(columns_of(batch, (self.target_pos,))[0])
        sites, targets = lens_sites(config, "resid_pre"), lens_sites(other, "resid_pre")
        top = listed(self.top, 10, config.n_outputs)
        steps = partial(
            _steps, into=self.into, target=batch, sites=sites, targets=targets, pos=self.pos, where=where,
            mapping=self.mapping, top=top,
        )  # fmt: skip
        attrs: dict[str, str | int] = {
            "target": "".join(into.text.pieces(batch.tokens[0].tolist())),
            "target_pos": where,
        }
        finish = partial(_finish, name=self.name, sites=sites, targets=targets, text=model.text, attrs=attrs)
        rows = ReadingThen([Read(site) for site in sites], steps)
        answers = AnswerTokens.of(model.text, self.answer, several=True)
        answers = None if answers is None else replace(answers, follow=batch)
        return ByRow(self.name, rows, Rows, finish, answers)


patchscope = of_data(Patchscope)


@torch.no_grad()
def _steps(
    trace: Trace,
    batch: Batch,
    model: Transformer,
    into: Model | None,
    target: Batch,
    sites: tuple[str, ...],
    targets: tuple[str, ...],
    pos: int,
    where: int,
    mapping: Mapped | None,
    top: int,
) -> Steps[Mapping[str, Tensor]]:
    """Statistics of the patched target run for every source and target depth, `[b depth target_depth ...]`."""
    receiver = model if into is None else as_model(into).transformer
    column = to_device(columns_of(batch.host(), (pos,))[0], batch.tokens.device)
    states = [trace[Read(site)].gather(1, _gather_index(column, trace[Read(site)]))[:, 0] for site in sites]
    check(finite(states), partial(not_finite, dict(zip(sites, states, strict=True))))
    placed = [_target_states(state, mapping, receiver) for state in states]
    rows = target.rows(torch.zeros(len(batch), dtype=torch.long))
    columns = rows.tokens.shape[1]
    changes = [Set(state[:, None].expand(-1, columns, -1)) for state in placed]
    variants = [Variant([Edit(site, change, {"pos": where})]) for change in changes for site in targets[:-1]]
    plain, *patched = yield from swept_final(rows, [Variant([]), *variants], model=receiver)
    # [(depth target_depth) b e] -> [depth target_depth b e]; the states themselves are the last target depth
    by_depth = torch.stack(patched).unflatten(0, (len(sites), -1))
    cells = torch.cat((by_depth, torch.stack(placed)[:, None].to(by_depth)), 1).flatten(0, 1)
    first = None if batch.answer is None else batch.answer_tokens()[0][:, 0]
    statistics = _cell_stats(model, receiver, states[-1], torch.cat((cells, plain[None])), first, top)
    unpatched_prob = statistics["target_prob"][:, -1]
    out = {name: x[:, :-1].unflatten(1, (len(sites), len(targets))) for name, x in statistics.items()}
    out |= (
        {}
        if batch.forced is None
        else (yield from _whole_answers(batch, rows, placed, targets, where, receiver))
    )
    return {**out, "unpatched_prob": unpatched_prob}


def _whole_answers(
    batch: Batch,
    target: Batch,
    placed: Sequence[Float[Tensor, "b e"]],
    targets: Sequence[str],
    where: int,
    receiver: Transformer,
) -> Steps[dict[str, Tensor]]:
    """log p of every row's answer of several tokens after the patched target prompt, and after the prompt as it is.

    Args:
        batch: the source prompts with their answers.
        target: as many rows of the target prompt.
        placed: the states that are put into it, by source depth.
    """
    tokens, present = batch.answer_tokens()
    followed = target.followed_by(tokens[:, :-1].masked_fill(~present[:, 1:], -1))
    followed = followed.with_answers(to_device(batch.answer, followed.tokens.device), None)  # type: ignore[arg-type]
    check_followed(receiver.config, followed)
    columns = followed.tokens.shape[1]
    changes = [Set(state[:, None].expand(-1, columns, -1)) for state in placed]
    variants = [Variant([Edit(site, change, {"pos": where})]) for change in changes for site in targets[:-1]]
    sweep = yield from swept(followed, variants, answer_log_probability(), model=receiver)
    by_depth = sweep.values.mT.unflatten(
        1, (len(placed), -1)
    )  # [(depth target_depth) b] -> [b depth target_depth]
    nothing = by_depth.new_full(
        (*by_depth.shape[:2], 1), torch.nan
    )  # the state itself, after no target prompt
    return {"answer_log_prob": torch.cat((by_depth, nothing), 2), "unpatched_answer_log_prob": sweep.base}


def _gather_index(column: Int[Tensor, "b n"], stream: Float[Tensor, "b p d"]) -> Int[Tensor, "b n d"]:
    """The columns repeated along d, as `gather` takes them on the stream."""
    return column.to(stream.device)[:, :, None].expand(-1, -1, stream.shape[-1])


def _target_states(
    state: Float[Tensor, "b d"], mapping: Mapped | None, model: Transformer
) -> Float[Tensor, "b e"]:
    """The states that replace those of the target run; raises ValueError for another width than the model's."""
    mapped = state if mapping is None else mapping(state)
    shape = (len(state), model.config.d_model)
    if not isinstance(mapped, Tensor) or tuple(mapped.shape) != shape:
        got = shape_text(mapped.shape) if isinstance(mapped, Tensor) else value_text(mapped)
        raise ValueError(
            f"states of shape {shape_text(shape)} are required by the model of the target prompt, got {got}: give "
            "`mapping` where widths differ"
        )
    return mapped.to(model.embed.weight)


def _cell_stats(
    model: Transformer,
    receiver: Transformer,
    own: Float[Tensor, "b d"],
    cells: Float[Tensor, "c b e"],
    answer: Int[Tensor, "b"] | None,
    top: int,
) -> dict[str, Tensor]:
    """Statistics of every patched final state, `[b c ...]`; the final state of the source run is the KL's reference."""
    parts = []
    for prompts in torch.arange(len(own), device=own.device).split(CHUNK):
        tiles = LogitTiles(model, len(prompts))
        tiles.fill(own[prompts])
        token = tiles.top(1)[1][:, 0] if answer is None else answer[prompts].to(own.device)
        reference = ReferenceDistribution.like(tiles)
        statistics(tiles, token, top, reference, is_reference=True)
        states = cells[:, prompts].flatten(0, 1)
        prompt = torch.arange(len(prompts), device=own.device).repeat(len(cells))
        tiles, by_group = LogitTiles(receiver, min(CHUNK, len(states))), []
        for group in torch.arange(len(states), device=own.device).split(CHUNK):
            tiles.fill(states[group])
            prompt_of = prompt[group]
            reference_end = ReferenceDistribution(
                reference.weights[:, prompt_of], reference.total[prompt_of], reference.entropy[prompt_of]
            )
            by_group.append(statistics(tiles, token[prompt_of], top, reference_end))
        values = {name: torch.cat([block[name] for block in by_group]) for name in by_group[0]}
        parts.append({name: x.unflatten(0, (len(cells), -1)).movedim(0, 1) for name, x in values.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _finish(
    merged: Partial,
    name: str,
    sites: tuple[str, ...],
    targets: tuple[str, ...],
    text: Text,
    attrs: Mapping[str, str | int],
) -> xr.Dataset:
    """The Dataset[prompt, depth, target_depth] of all rows, with the share of prompts whose answer comes first."""
    assert isinstance(merged, Rows)
    cells, rows = ("depth", "target_depth"), dict(merged.rows)
    unpatched = rows.pop("unpatched_prob")
    of_prompts = {
        name: (("prompt",), rows.pop(name)) for name in ("unpatched_answer_log_prob",) if name in rows
    }
    agrees = (rows["target_rank"] == 0).double().mean(0)
    low, high = share_interval(agrees, len(unpatched))
    values = {
        word: (("prompt", *cells, "rank") if x.ndim == 4 else ("prompt", *cells), x)
        for word, x in rows.items()
    }
    shares = {"value": agrees, "low": low, "high": high}
    count = torch.full_like(rows["target_rank"][0], len(unpatched))
    probability = dict.fromkeys(("top_prob", "target_prob", "unpatched_prob"), "probability")
    result = labelled(
        name,
        {
            **values,
            **{word: (cells, x) for word, x in shares.items()},
            "n": (cells, count),
            "unpatched_prob": (("prompt",), unpatched),
            **of_prompts,
        },
        coords={
            "depth": [str(Part.of(site)) for site in sites],
            "target_depth": [str(Part.of(site)) for site in targets],
        },
        units={
            **dict.fromkeys(("entropy", "kl"), "nats"),
            **dict.fromkeys((name for name in rows if name == "answer_log_prob"), "nats"),
            **dict.fromkeys(of_prompts, "nats"),
            **probability,
            **dict.fromkeys(shares, "share of prompts"),
        },
        attrs={
            **attrs,
            "kl": "KL(the source run's own || these)",
            "interval": "95 % over prompts (`share_interval`)",
        },
    )
    return text.of_outputs.worded(result, word="top_token")
