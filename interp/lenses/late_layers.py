"""Does the last layer hold the answer back? Its attention and MLP, their heads, and what happens without them.

Lv et al. 2024 (arXiv:2403.19521), "anti-overconfidence": the last layer lowers the probability of the right answer, its
heads by looking at the first position and copying what stands there, its MLP by pushing the stream towards the average
token, sum_t p(t) of the token's direction.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.attention.shares import last_attention
from interp.core.precision import wide
from interp.core.results import labelled
from interp.core.stats import Means, Partial
from interp.data.batch import Batch
from interp.data.text import Answers, Prompts
from interp.lenses.lens import CHUNK
from interp.lenses.output_lens import Part
from interp.model.config import ModelConfig
from interp.model.sites import final_stream
from interp.model.tap import Edit, Read, Tap, Trace
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.analysis import Analysis, run_batches
from interp.passes.observe import Subject, observe
from interp.residual.decomposition import not_linear

if TYPE_CHECKING:
    import xarray as xr

PERMUTATIONS = 200
"""Random assignments of the frequencies to the words, for the null of the cosine."""


def late_layers(
    model: Subject,
    prompts: Prompts,
    answers: Answers,
    *,
    frequencies: Float[Tensor, "v"] | None = None,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """What the last layer does to the right answer at the last token: means over prompts, 95 % as `_low`, `_high`.

    Dataset[component], the last layer's heads `L3H0`, `3_attn_out`, `3_mlp_out` (Macaron: and `3_mlp_before_out`) and
    `3_block` (all of them): `attribution` to the answer, in logits relative to the vocabulary's mean at frozen norms;
    `cosine` of the output with the average token, `cosine_null_low` and `_high` (95 % of its mean under random
    frequencies); `log_prob_change` (nats) and `rank_change` of the answer when the output is replaced by zero: positive
    and negative, respectively, where the part held the answer back. Dataset[head]: `first_attention`, from the last
    token to the first (`signed_shares` where weights are none). Dataset[depth]: `lens_log_prob` of the answer by the
    logit lens before the last layer, within and behind it.
    Scalars: `log_prob`, `rank` (0 = most probable) of the answer.
    Average token: sum_t p(t) W_U[:, t] - mean_t W_U[:, t]; outputs are compared with it as the unembedding reads them,
    behind the final norm's linear part. The mean is removed because any model's words share a direction.
    frequencies: p(t), counts of a corpus; None = the model's own mean prediction over the tokens of these prompts.
    Caveats: zero is off-distribution, and a zeroed attention changes what the MLP behind it reads; heads leave out b_O.
    Errors: ValueError for answers that are not one token, frequencies that do not fit, and for models without logits
    linear in the normed stream.

    Example:
        >>> found = late_layers(model, ["The capital of France is", "The cat sat on"], [" Paris", " the"])
        >>> list(found.component.values[-3:])
        ['2_attn_out', '2_mlp_out', '2_block']
    """
    config = model.transformer.config
    _check(config)
    batch = model.text.batch(prompts, prepend_bos=prepend_bos).left_aligned()
    batch = batch.with_answers(model.text.targets(answers, len(batch)), None)
    given = frequencies is not None
    if frequencies is None:
        frequencies = mean_prediction(model.transformer, batch, batch_size)
    analysis = last_layer(config, frequencies)
    found = run_batches([analysis], model.transformer, batch.split(batch_size))[analysis.name]
    return found.assign_attrs(
        frequencies="given" if given else "the model's mean prediction on these prompts"
    )


def last_layer(config: ModelConfig, frequencies: Float[Tensor, "v"]) -> Analysis:
    """The analysis behind `late_layers`; batches must carry answers and end in their last column."""
    _check(config)
    shape = list(frequencies.shape)
    if shape != [config.d_vocab] or not bool((frequencies >= 0).all()) or not float(frequencies.sum()) > 0:
        raise ValueError(
            f"frequencies of all {config.d_vocab} words, none negative, some positive, are required; got {shape}"
        )
    share = frequencies.double() / frequencies.double().sum()
    return Analysis(
        name="late_layers",
        reads=_reads(config),
        compute=partial(_compute, share=share),
        reduction=Means,
        finish=partial(_finish, config=config),
    )


@torch.no_grad()
def mean_prediction(model: Transformer, batch: Batch, batch_size: int) -> Float[Tensor, "v"]:
    """The mean over all real tokens of a batch of the model's next-token distribution, in float64."""
    read, count = Read(final_stream(model.config)), 0
    total = torch.zeros(model.config.d_vocab, dtype=torch.float64, device=model.device)
    for part in batch.split(batch_size):
        state = observe(model, part, (read,), answers_only=True).trace[read]
        state = state.flatten(0, 1) if part.keep is None else state[part.keep.to(state.device)]
        count += len(state)
        for rows in state.split(CHUNK):
            total += wide(model.read_out(rows)).softmax(-1).sum(0)
    return total / count


def average_token(model: Transformer, share: Float[Tensor, "*n v"]) -> Float[Tensor, "*n d"]:
    """sum_t p(t) W_U[:, t] - mean_t W_U[:, t]: where the stream goes when it says the frequent words."""
    unembedding = wide(Weights(model).W_U)
    return (share.to(unembedding) - 1 / share.shape[-1]) @ unembedding.mT


def _labels(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The components, and which parts of the last layer each silences."""
    last = config.n_layers - 1
    heads = {f"L{last}H{h}": (f"L{last}H{h}",) for h in range(config.n_heads)}
    sublayers = tuple(f"{last}_{name}" for name in config.sublayers)
    block = {f"{last}_block": sublayers} if len(sublayers) > 1 else {}
    return heads | {name: (name,) for name in sublayers} | block


def _check(config: ModelConfig) -> None:
    if what := not_linear(config):
        raise ValueError(
            "a report on late layers requires logits that are linear in the normed stream (no masked-LM head); "
            f"this model {what}"
        )
    if config.cross_attention:
        raise ValueError("a report on late layers requires a model without cross-attention")


def _states(config: ModelConfig) -> dict[str, str]:
    """Depths of the last layer and their sites."""
    last = config.n_layers - 1
    inner = ["mid"] if config.mlp is not None and not config.parallel else []
    names = ["pre", *(["pre_attn"] if config.macaron else []), *inner]
    return {f"{last}_{n}": f"blocks.{last}.hook_resid_{n}" for n in names} | {
        "final_post": final_stream(config)
    }


def _reads(config: ModelConfig) -> tuple[Read, ...]:
    parts = {part for group in _labels(config).values() for part in group}
    reads = [read for part in sorted(parts) for read in Part.of(part, config).reads(config)]
    reads += [Read(site) for site in _states(config).values()]
    return (*dict.fromkeys(reads), _pattern(config))


def _pattern(config: ModelConfig) -> Read:
    return last_attention(config, config.n_layers - 1)


@torch.no_grad()
def _compute(
    trace: Trace, batch: Batch, model: Transformer, share: Float[Tensor, "v"]
) -> Mapping[str, Tensor]:
    if batch.answer is None or batch.documents is not None:
        raise ValueError("late layers require batches of one text per row with answers (Batch.with_answers)")
    if batch.keep is not None and not bool(batch.keep[:, -1].all()):
        raise ValueError("late layers require rows that end in the last column (Batch.left_aligned)")
    config, groups = model.config, _labels(model.config)
    single = {part: None for group in groups.values() for part in group}
    written = {part: Part.of(part, config).write(trace, model)[:, -1] for part in single}
    out = torch.stack([sum(written[p] for p in group) for group in groups.values()], 1)  # type: ignore[misc]
    unembedding = wide(Weights(model).W_U)
    towards = (unembedding.mT[batch.answer] - unembedding.mean(1)) * config.logit_scale
    states = torch.stack([trace[Read(site)][:, -1] for site in _states(config).values()], 1)
    lens, ranks = _said(model.read_out(states), batch.answer)
    removed, removed_ranks = _without(trace, batch, model)
    dice = torch.Generator().manual_seed(0)
    orders = torch.rand(PERMUTATIONS, len(share), generator=dice).argsort(1).to(share.device)
    axis, null = (average_token(model, p.to(model.device)) for p in (share, share[orders]))
    return {
        "attribution": torch.einsum("bcd,bd->bc", out, towards),
        "cosine": torch.cosine_similarity(out, axis.to(out)[None, None], dim=-1),
        "cosine_null": torch.nn.functional.normalize(out, dim=-1)
        @ torch.nn.functional.normalize(null).to(out).mT,
        "log_prob_change": removed - lens[:, -1:],
        "rank_change": (removed_ranks - ranks[:, -1:]).to(lens.dtype),
        "first_attention": _to_first(wide(trace[_pattern(config)]), batch),
        "lens_log_prob": lens,
        "log_prob": lens[:, -1],
        "rank": ranks[:, -1].to(lens.dtype),
    }


def _without(
    trace: Trace, batch: Batch, model: Transformer
) -> tuple[Float[Tensor, "b c"], Int[Tensor, "b c"]]:
    """Log probability and rank of the answer when each component's output is zero; only the last block runs again."""
    last, n = model.config.n_layers - 1, batch.tokens.shape[1]
    stream = trace[Read(f"blocks.{last}.hook_resid_pre")]
    where = torch.full((len(batch), 1), n - 1, device=stream.device)
    found = []
    for group in _labels(model.config).values():
        tap = Tap(edits=[_silenced(Part.of(part, model.config)) for part in group])
        logits = model(stream, tap, last, keep=batch.keep, logits_at=where)
        assert batch.answer is not None
        found.append(_said(logits, batch.answer))
    return torch.cat([log_prob for log_prob, _ in found], 1), torch.cat([rank for _, rank in found], 1)


def _silenced(part: Part) -> Edit:
    """Zero for what the part adds; a head's mixed values, so that its sublayer's own norm is recomputed."""
    if part.unit is None:
        return Edit(f"blocks.{part.layer}.hook_{part.sublayer}", torch.zeros_like)
    return Edit(f"blocks.{part.layer}.attn.hook_z", partial(_zero_head, head=part.unit))


def _zero_head(z_bphe: Tensor, head: int) -> Tensor:
    z_bphe[:, :, head] = 0
    return z_bphe


def _said(
    logits: Float[Tensor, "b n v"], answer: Int[Tensor, "b"]
) -> tuple[Float[Tensor, "b n"], Int[Tensor, "b n"]]:
    """Log probability and rank of each row's answer."""
    logp = wide(logits).log_softmax(-1)
    own = logp.gather(-1, answer[:, None, None].expand(-1, logp.shape[1], 1))
    return own[..., 0], (logp > own).sum(-1)


def _to_first(pattern: Float[Tensor, "b h k"], batch: Batch) -> Float[Tensor, "b h"]:
    """Attention to each row's first real token."""
    if batch.keep is None:
        return pattern[..., 0]
    first = batch.keep.int().argmax(1)
    return pattern.gather(-1, first[:, None, None].expand(-1, pattern.shape[1], 1))[..., 0]


def _finish(merged: Partial, config: ModelConfig) -> "xr.Dataset":
    assert isinstance(merged, Means)
    dims = {
        **dict.fromkeys(("attribution", "cosine", "log_prob_change", "rank_change"), ("component",)),
        "first_attention": ("head",), "lens_log_prob": ("depth",), "log_prob": (), "rank": (),
    }  # fmt: skip
    values: dict[str, tuple[Sequence[str], Tensor]] = {}
    for name, axes in dims.items():
        values |= merged.moments[name].cells(name, axes)
    null = merged.moments["cosine_null"]
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64, device=null.mean.device)
    low, high = null.mean.quantile(ends, dim=-1)
    values |= {"cosine_null_low": (("component",), low), "cosine_null_high": (("component",), high)}
    return labelled(
        "late_layers",
        values,
        coords={
            "component": list(_labels(config)), "head": range(config.n_heads), "depth": list(_states(config)),
        },
        attrs={
            "attribution_unit": "logits relative to the vocabulary's mean, norms frozen",
            "log_prob_unit": "nats", "change": "without the component minus with it; its output is zero",
            "null": f"changes and attribution: 0; cosine: {PERMUTATIONS} permutations of the frequencies",
            "interval": "95 % over prompts", "prompts": null.n,
        },
    )  # fmt: skip
