"""Causal tracing: which states, restored alone, bring back a fact whose subject was drowned in noise?

Meng et al. 2022, "Locating and Editing Factual Associations in GPT" (arXiv:2202.05262), section 2. Clean run ->
corrupted run (noise on the subject's token embeddings) -> corrupted run with clean values put back at one token: a
block's output, or a window of MLP or attention outputs. The corrupted run is the base run of a `Sweep`.

Beside the released code of the paper (ROME): its arrays named `scores` (and `differences`) hold the *restored*
probability, subtract its `low_score` for the indirect effect. It takes sigma from the subjects tokenised alone, gives
all prompts the same draws, and its averages over roles weigh tokens instead of prompts, count a subject of one token as
first and last, and one token after it as first after and last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from typing import TYPE_CHECKING

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.causal.spans import ROLES, Where, roles, spans, within
from interp.causal.tracing import Kind, Noised, Severed, Tracing
from interp.core.precision import wide
from interp.core.results import labelled
from interp.core.stats import Moments, Rows
from interp.data.batch import Batch
from interp.data.text import Answers, Prompts
from interp.model.mask import picked
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.metrics import Metric, Outcome, answer_probability
from interp.passes.observe import Subject, observe
from interp.passes.sweep import Sweep, Swept

if TYPE_CHECKING:
    import xarray as xr


def causal_trace(
    model: Subject,
    prompts: Prompts,
    subject: Where | Sequence[Where],
    answer: Answers,
    *,
    kind: Kind = "state",
    window: int = 10,
    noise: float = 3.0,
    samples: int = 10,
    seed: int = 0,
    metric: Metric | None = None,
    severed: Severed | None = None,
    prepend_bos: bool = True,
    batch_size: int = 8,
) -> "xr.Dataset":
    """How much of a fact comes back when one clean state is restored in a run whose subject is corrupted.

    Corrupted run: token embeddings of all subject tokens + noise * sigma * N(0, 1), sigma the standard deviation over
    all entries of the subjects' embeddings in the prompts given. Restored run: the same noise, and clean values at one
    token. Total effect = metric(clean) - metric(corrupted); indirect effect = metric(restored) - metric(corrupted),
    the mean over the noise samples of a prompt, then over prompts (Meng et al. 2022, section 2).
    Returns Dataset in the metric's unit, p(answer) by default; `_low` and `_high` are 95 % intervals over prompts.
    `effect` [layer, role], `total`: indirect and total effect. Roles: `spans.ROLES`, tokens of one role averaged inside
    a prompt; `prompts` [role] have it; `spread` [layer, role] is the pooled standard deviation over noise samples.
    `each`, `each_spread` [prompt, layer, pos]: the same per prompt, NaN at padding; `changed`, `changed_role`: whether
    restoring changed anything that reaches the metric (False: the effect is 0 by construction).
    `clean`, `corrupt` [prompt]; `token`, `subject` [prompt, pos] say which tokens; `prompt` counts the prompts given.
    subject: a word that the prompt holds once, `Mention(word, index)`, or a range of tokens (BOS counts); one for all
    prompts, or one for each. A token that holds any part of the word belongs to it.
    answer: facts whose answer is not the model's most probable next token are dropped; `attrs["dropped"]` counts them.
    kind: "state" restores the output of block l; "mlp" and "attn" the outputs, as added to the stream, of the layers
    max(0, l - w/2) .. min(L, l + w/2) - 1, all at that token. 10 at once are much in a small model: choose the window.
    severed: later MLPs (attention) that are not restored keep their corrupted outputs there; what is gone used them.
    metric: one that compares (KL divergence) compares with the clean run. Memory grows with batch_size * samples.
    Caveats: noise is unlike anything the model has seen. ROME's files hold restored values as `scores`, see above.
    Errors: ValueError for a subject not found or ambiguous, and if no fact is known; KeyError for parts it has not.

    Example:
        >>> best = int(model.transformer(model.to_tokens(prompt))[0, -1].argmax())
        >>> causal_trace(model, prompt, "Mary", best, samples=2).effect.dims
        ('layer', 'role')
    """
    tracing = Tracing(kind, window, noise, samples, seed, severed)
    metric = answer_probability() if metric is None else metric
    batch = _asked(model, prompts, answer, metric, prepend_bos=prepend_bos)
    return _traced(model.transformer, batch, spans(model.text, batch, subject), tracing, metric, batch_size)


def _traced(
    model: Transformer, batch: Batch, span: Int[Tensor, "b 2"], tracing: Tracing, metric: Metric, size: int
) -> "xr.Dataset":
    sigma = subject_spread(model, batch, within(batch, span), size)
    asked, known = len(batch), _known(model, batch, size)
    batch, span = batch.rows(known), span[known.to(span.device)]
    parts = [
        Rows.of(_some(model, some, where, sigma, tracing, metric))
        for some, where in zip(batch.split(size), span.split(size), strict=True)
    ]
    attrs = _attrs(tracing, metric, sigma, asked=asked, n=len(known))
    return _table(reduce(Rows.merge, parts).rows, batch, span, known, attrs)


def subject_spread(
    model: Transformer, batch: Batch, where: Bool[Tensor, "b p"], batch_size: int = 32
) -> float:
    """The standard deviation over all entries of the token embeddings of these tokens: the sigma of the noise."""
    embed = Read("hook_embed")
    found = [
        observe(model, some, [embed], answers_only=True).trace[embed][mine.to(model.device)]
        for some, mine in zip(batch.split(batch_size), where.split(batch_size), strict=True)
    ]
    return float(torch.cat(found).double().std())


def _asked(model: Subject, prompts: Prompts, answer: Answers, metric: Metric, *, prepend_bos: bool) -> Batch:
    """The prompts with their answers; ValueError if the metric brings others."""
    if not model.transformer.config.unembed:
        raise ValueError("causal tracing requires a model with an unembedding, to tell which facts it knows")
    batch = model.text.batch(prompts, prepend_bos=prepend_bos)
    answers, posed = model.text.targets(answer, len(batch)), metric.posed(batch, model.text)
    if metric.answer is not None and posed.answer is not None and not torch.equal(posed.answer, answers):
        raise ValueError(f"the metric {metric.name!r} brings other answers than those asked about")
    return posed.with_answers(answers, posed.wrong)


def _known(model: Transformer, batch: Batch, batch_size: int) -> Int[Tensor, "n"]:
    """Which prompts the model continues with their answer; ValueError if there is none."""
    assert batch.answer is not None
    best = torch.cat(
        [
            observe(model, some, logits_at=some.last()[:, None]).output[:, 0].argmax(-1).cpu()
            for some in batch.split(batch_size)
        ]
    )
    known = (best == batch.answer.cpu()).nonzero()[:, 0]
    if not len(known):
        raise ValueError(
            f"a fact that the model knows is required: of {len(best)} none has its answer as the most probable next "
            f"token; the first answer is {int(batch.answer[0])}, the model says {int(best[0])}"
        )
    return known


@torch.no_grad()
def _some(
    model: Transformer, batch: Batch, span: Int[Tensor, "b 2"], sigma: float, tracing: Tracing, metric: Metric
) -> dict[str, Tensor]:
    """Everything that is kept of some prompts, on the host, by row."""
    noised = Noised.of(model, batch, within(batch, span), tracing.noise * sigma, tracing)
    rows, config, layers = noised.batch, model.config, range(model.config.n_layers)
    restored = {name for layer in layers for name in tracing.restored(layer, config)}
    frozen = {name for layer in layers for name in tracing.frozen(layer, config)}
    clean = Sweep(model, rows, ()).recorded([Read("hook_embed"), *map(Read, sorted(restored))])
    common = noised.corrupted(clean.values["hook_embed"])
    corrupt = Sweep(model, rows, (), common).recorded([*map(Read, sorted(frozen))])
    cells = tracing.cells(config, clean.values, corrupt.values, rows.tokens.shape[1])
    home = clean.final if metric.everywhere else picked(clean.final, rows.last()[:, None])
    swept = Sweep(model, rows, cells, common=common).run(metric, home)
    swept = _isolated(swept, noised)
    example = torch.arange(len(rows), device=home.device)
    value = wide(metric.of(Outcome(model, home, rows, example, home)))
    n, p = tracing.samples, rows.tokens.shape[1]
    effect = rearrange(swept.values - swept.base, "(l p) (b n) -> b n l p", p=p, n=n)
    changed = rearrange(swept.changed, "(l p) (b n) -> b n l p", p=p, n=n).any(1)
    found = {
        **_by_token(effect, changed, batch.real.to(home.device)),
        **_by_role(effect, roles(batch, span).to(home.device)),
        "clean": value[::n],
        "corrupt": swept.base.unflatten(0, (-1, n)).mean(1),
    }
    return {name: value.cpu() for name, value in found.items()}


def _isolated(swept: Swept, noised: Noised) -> Swept:
    """The same where nothing can change, whatever rounding says: causal runs agree before the subject."""
    columns = torch.arange(noised.batch.tokens.shape[1], device=swept.base.device)[:, None]
    before = (columns < noised.noise.any(2).int().argmax(1)) & noised.model.config.causal
    same = before.repeat(len(swept.values) // len(before), 1)
    return Swept(torch.where(same, swept.base, swept.values), swept.base, swept.changed & ~same)


def _by_token(
    effect: Float[Tensor, "b n l p"], changed: Bool[Tensor, "b l p"], real: Bool[Tensor, "b p"]
) -> dict[str, Tensor]:
    """Mean and standard deviation over the samples at every token; NaN at padding."""
    padding = ~real[:, None]
    return {
        "each": effect.mean(1).masked_fill(padding, torch.nan),
        "each_spread": _variance(effect).sqrt().masked_fill(padding, torch.nan),
        "changed": changed & ~padding,
    }


def _by_role(effect: Float[Tensor, "b n l p"], role: Bool[Tensor, "b r p"]) -> dict[str, Tensor]:
    """Mean and variance over the samples of the mean over a role's tokens; NaN where a prompt has none."""
    share = role.to(effect) / role.sum(2, keepdim=True)
    by_role = einsum(effect, share, "b n l p, b r p -> b n l r")
    return {"by_role": by_role.mean(1), "role_variance": _variance(by_role)}


def _variance(samples: Float[Tensor, "b n *rest"]) -> Float[Tensor, "b *rest"]:
    """Over the samples; NaN for a single one."""
    return samples.var(1) if samples.shape[1] > 1 else torch.full_like(samples[:, 0], torch.nan)


def _over_prompts(by_role: Float[Tensor, "b l r"]) -> dict[str, tuple[Sequence[str], Tensor]]:
    """The moments of every role over the prompts that have it."""
    columns = [each[~each.isnan().any(1)] for each in by_role.unbind(2)]
    cells = [Moments.of(each).cells("effect", ("layer",)) for each in columns]
    return {
        **{name: (("layer", "role"), torch.stack([cell[name][1] for cell in cells], 1)) for name in cells[0]},
        "prompts": (("role",), torch.tensor([len(each) for each in columns])),
    }


def _table(
    found: Mapping[str, Tensor],
    batch: Batch,
    span: Int[Tensor, "b 2"],
    known: Int[Tensor, "b"],
    attrs: dict[str, str | float | int],
) -> "xr.Dataset":
    role = roles(batch, span).to(found["changed"].device)
    per_token, per_role = ("prompt", "layer", "pos"), ("layer", "role")
    reached = einsum(found["changed"].int(), role.int(), "b l p, b r p -> l r") > 0
    total = Moments.of(found["clean"] - found["corrupt"])
    return labelled(
        "causal_trace",
        {
            **_over_prompts(found["by_role"]),
            "spread": (per_role, found["role_variance"].double().nanmean(0).sqrt()),
            "changed_role": (per_role, reached),
            **{name: (per_token, found[name]) for name in ("each", "each_spread", "changed")},
            **{name: (("prompt",), found[name]) for name in ("clean", "corrupt")},
            **total.cells("total", ()),
            "token": (("prompt", "pos"), batch.tokens),
            "subject": (("prompt", "pos"), within(batch, span)),
        },
        coords={
            "layer": list(range(found["each"].shape[1])),
            "role": list(ROLES),
            "prompt": known.tolist(),
        },
        attrs=attrs,
    )


def _attrs(
    tracing: Tracing, metric: Metric, sigma: float, *, asked: int, n: int
) -> dict[str, str | float | int]:
    """The protocol and the conventions."""
    protocol = asdict(tracing) | {"severed": tracing.severed or "nothing"}
    if tracing.kind == "state":
        protocol["window"] = 1
    return {
        **protocol,
        "sigma": sigma,
        "metric": metric.name,
        "unit": metric.unit,
        "n": n,
        "dropped": asked - n,
        "effect": "indirect effect, restored - corrupted; ROME's result files hold the restored value itself",
        "interval": "95 % over prompts, normal approximation, after the mean over noise samples",
        "null": "0: what is restored brings nothing back",
        "roles": "every token has one at most; tokens of a role averaged inside a prompt",
    }
