"""The logit lens: what the model would answer if it stopped at each depth.

logits_l = LN_f(x_l) W_U, the final norm RECOMPUTED on the state (nostalgebraist 2020); at the last depth these are the
model's own logits. It shows what a linear read-out finds, not what later layers use.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.results import labelled
from interp.core.stats import Means, Rows
from interp.engine.analysis import Analysis, run
from interp.engine.batch import Batch
from interp.engine.observe import Subject
from interp.engine.text import Prompts
from interp.model.config import ModelConfig
from interp.model.loss import predicted
from interp.model.sites import final_stream
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer

if TYPE_CHECKING:
    import xarray as xr

CHUNK = 256
"""Rows of logits held at a time: 50 MB at a vocabulary of 50 257."""


def logit_lens(
    model: Subject,
    prompts: Prompts,
    *,
    answer: str | int | Sequence[str | int] | None = None,
    top: int = 10,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """The lens at every depth (`0_pre` ... `final_post`) and position.

    Returns Dataset[prompt, depth, pos]: `top_token`, `top_prob` [.., rank], `entropy` and `kl` = KL(final || depth) in
    nats, `target_rank` (0 = most probable) and `target_prob`. The target is `answer` at every position if given,
    else the next token of the prompt; rank -1 and probability NaN where there is none. Padded positions hold NaN.

    Example:
        >>> interp.logit_lens(model, "The capital of France is", answer=" Paris")
    """
    batch = model.text.batch(prompts, prepend_bos=prepend_bos)
    if answer is not None:
        batch = batch.with_answers(model.text.targets(answer, len(batch)), None)
    analysis = lens(model.transformer.config, top=top)
    return run([analysis], model.transformer, batch.split(batch_size))["logit_lens"]


def lens(config: ModelConfig, *, top: int = 10) -> Analysis:
    """The analysis behind `logit_lens`."""
    if not 1 <= top <= config.d_vocab:
        raise ValueError(f"top must be in [1, {config.d_vocab}], got {top}")
    if not config.unembed:
        raise ValueError("a lens requires an unembedding; this model ends in its residual stream")
    return Analysis(
        name="logit_lens",
        reads=_reads,
        compute=partial(_compute, top=top),
        reduction=Rows,
        finish=partial(_finish, config=config),
    )


def _reads(config: ModelConfig) -> tuple[Read, ...]:
    states = [f"blocks.{layer}.hook_resid_pre" for layer in range(config.n_layers)]
    return tuple(Read(s) for s in (*states, final_stream(config)))


@torch.no_grad()
def _compute(trace: Trace, batch: Batch, model: Transformer, top: int) -> Mapping[str, Tensor]:
    states = [trace[read] for read in _reads(model.config)]
    rows, n = batch.tokens.shape
    flat = [state.flatten(0, 1) for state in states]
    target = _targets(batch).flatten()
    chunks = []
    for start in range(0, rows * n, CHUNK):
        part = slice(start, start + CHUNK)
        chunks.append(_read_out([s[part] for s in flat], target[part], model, top))
    joined = {name: torch.cat([c[name] for c in chunks], 1) for name in chunks[0]}
    out = {name: v.unflatten(1, (rows, n)).movedim(0, 1) for name, v in joined.items()}
    if batch.keep is not None:
        hidden = ~batch.keep[:, None]
        for name, value in out.items():
            mask = hidden if value.ndim == 3 else hidden[..., None]
            out[name] = value.masked_fill(mask, torch.nan if value.is_floating_point() else -1)
    return out


def _read_out(
    states: Sequence[Float[Tensor, "r d"]], target: Int[Tensor, "r"], model: Transformer, top: int
) -> dict[str, Tensor]:
    """Every depth's statistics for some rows; the last state is the reference of the KL."""
    final = _log_probs(states[-1], model)
    known = target >= 0
    index = target.clamp_min(0)[:, None]
    kept: dict[str, list[Tensor]] = {}
    for i, state in enumerate(states):
        logp = final if i == len(states) - 1 else _log_probs(state, model)
        best = logp.topk(top)
        of_target = logp.gather(1, index)
        values = {
            "top_token": best.indices,
            "top_prob": best.values.exp(),
            "entropy": -(logp.exp() * logp).nan_to_num(0.0).sum(-1),
            "kl": (final.exp() * (final - logp)).nan_to_num(0.0).sum(-1),
            "target_rank": (logp > of_target).sum(-1).masked_fill(~known, -1),
            "target_prob": of_target[:, 0].exp().masked_fill(~known, torch.nan),
        }
        for name, value in values.items():
            kept.setdefault(name, []).append(value)
    return {name: torch.stack(each) for name, each in kept.items()}


def _log_probs(state: Float[Tensor, "r d"], model: Transformer) -> Float[Tensor, "r v"]:
    logits = model.read_out(state)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _targets(batch: Batch) -> Int[Tensor, "b p"]:
    """The answer everywhere, or each position's next token; -1 where there is none."""
    if batch.answer is not None:
        return batch.answer[:, None].expand_as(batch.tokens)
    target = torch.full_like(batch.tokens, -1)
    target[:, :-1] = batch.tokens[:, 1:]
    known = predicted(batch.keep, batch.documents)
    if known is not None:
        target[:, :-1][~known] = -1
    return target


def _finish(merged: Means | Rows, config: ModelConfig) -> "xr.Dataset":
    assert isinstance(merged, Rows)
    dims = ("prompt", "depth", "pos")
    names = [f"{layer}_pre" for layer in range(config.n_layers)] + ["final_post"]
    values = {name: ((*dims, "rank") if v.ndim == 4 else dims, v) for name, v in merged.rows.items()}
    return labelled(
        values, coords={"depth": names}, attrs={"entropy_unit": "nats", "kl": "KL(final || depth), nats"}
    )
