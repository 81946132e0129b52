"""Do the tokens that an attribution names matter? Remove them, or keep nothing else, and watch the answer.

Comprehensiveness: how far the answer falls when the k % highest tokens are removed (high is good). Sufficiency: how far
it falls when only they are kept (low is good). Both as AOPC, the mean over k (DeYoung et al. 2020, "ERASER"; at 1, 5,
10, 20 and 50 % in Ferrando et al. 2022). Removed means that the embedding is replaced; positions stay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.precision import wide
from interp.core.results import labelled
from interp.core.shapes import nearest, shape_text
from interp.core.stats import Moments
from interp.data.batch import Batch
from interp.data.text import Answers, Prompts
from interp.model.tap import Edit
from interp.model.transformer import Transformer
from interp.passes.observe import Subject, observe
from interp.tokens.input_gradients import Baseline, answer_logits, baseline_embedding
from interp.tokens.mixing import check_tokens
from interp.tokens.token_attribution import METHODS, Method, columns, scores

if TYPE_CHECKING:
    import xarray as xr

RANDOM = "random"
"""The method that ranks tokens by chance: what every other one must beat."""
Measure = Literal["probability", "logits"]


@dataclass(frozen=True)
class Erasure:
    """How tokens are removed and what is watched."""

    shares: tuple[float, ...] = (0.01, 0.05, 0.1, 0.2, 0.5)
    """Of a prompt's removable tokens (all but a prepended BOS), rounded up to whole ones."""
    replacement: Baseline = "mean"
    """What stands in for a removed token."""
    measure: Measure = "probability"
    """The answer's probability, or its logit (minus the wrong answer's, before a soft cap)."""

    def __post_init__(self) -> None:
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise ValueError(f"shares in (0, 1] are required, at least one, got {self.shares}")
        if self.measure not in ("probability", "logits"):
            raise ValueError(f"measure must be 'probability' or 'logits', got {self.measure!r}")


@dataclass(frozen=True, eq=False)
class Faithfulness:
    """Both AOPC of some prompts."""

    comprehensiveness: Float[Tensor, "b"]
    sufficiency: Float[Tensor, "b"]


def faithfulness(
    model: Subject,
    prompts: Prompts,
    answer: Answers,
    wrong: Answers | None = None,
    *,
    attribution: "xr.Dataset",
    erasure: Erasure | None = None,
    pos: int = -1,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """Comprehensiveness and sufficiency of one attribution: Dataset[prompt], in the unit of `erasure.measure`.

    attribution: `score[prompt, pos]` of the same prompts, as `token_attribution` returns it; ranked from the highest,
    earlier tokens first among equals. Errors: ValueError for scores that do not fit the prompts.

    Example:
        >>> found = interp.tokens.token_attribution.token_attribution(model, prompt)
        >>> faithfulness(model, prompt, " Mary", attribution=found).comprehensiveness.dims
        ('prompt',)
    """
    batch = _asked(model, prompts, answer, wrong, prepend_bos)
    score = torch.tensor(attribution.score.transpose("prompt", "pos").to_numpy())
    how = erasure or Erasure()
    found = erased(model.transformer, batch, score, columns(batch, pos), how, batch_size=batch_size)
    values = {"comprehensiveness": found.comprehensiveness, "sufficiency": found.sufficiency}
    return labelled("faithfulness", {name: (("prompt",), x) for name, x in values.items()}, attrs=_attrs(how))


def comprehensiveness(whole: Float[Tensor, "b"], without_top: Float[Tensor, "s b"]) -> Float[Tensor, "b"]:
    """AOPC: the mean over shares of how far the answer falls without the highest tokens."""
    return (whole - without_top).mean(0)


def sufficiency(whole: Float[Tensor, "b"], only_top: Float[Tensor, "s b"]) -> Float[Tensor, "b"]:
    """AOPC: the mean over shares of how far the answer falls with nothing but the highest tokens."""
    return (whole - only_top).mean(0)


def compare_methods(
    model: Subject,
    prompts: Prompts,
    answer: Answers,
    wrong: Answers | None = None,
    *,
    methods: Sequence[str] | Mapping[str, Method] = tuple(METHODS),
    erasure: Erasure | None = None,
    pos: int = -1,
    draws: int = 5,
    seed: int = 0,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """Which attribution names the tokens that matter: comprehensiveness (high) and sufficiency (low) of each method.

    Returns Dataset[attribution] with both as means over prompts, their 95 % intervals `_low`, `_high` (NaN for one
    prompt), and both by prompt, `_each[attribution, prompt]`, for paired comparisons. The last is `random`: the mean
    over `draws` random orders per prompt. methods: names of `METHODS`, or records under names of your own.
    (A dim called `method` could not be selected from: xarray's `sel` has an option of that name.)
    Caveats: a prompt with holes is unlike any the model was trained on, and all methods meet the same holes; a score
    for the state at a position (ALTI) is asked here about the answer. Errors: as `token_attribution`, and ValueError
    for an unknown method or no draws.

    Example:
        >>> found = compare_methods(model, prompt, " Mary", methods=["attention", "alti"])
        >>> list(found.attribution.values)
        ['attention', 'alti', 'random']
    """
    if draws < 1:
        raise ValueError(f"at least one random order is required, got draws={draws}")
    batch, how = _asked(model, prompts, answer, wrong, prepend_bos), erasure or Erasure()
    at, network = columns(batch, pos), model.transformer
    measured = partial(erased, network, batch, at=at, how=how, batch_size=batch_size)
    each: dict[str, Faithfulness] = {}
    for name, method in _named(methods).items():
        result = scores(network, batch, method, pos=pos, batch_size=batch_size)
        each[name] = measured(torch.tensor(result.score.transpose("prompt", "pos").to_numpy()))
    dice = torch.Generator().manual_seed(seed)
    chance = [measured(torch.rand(batch.tokens.shape, generator=dice)) for _ in range(draws)]
    each[RANDOM] = Faithfulness(
        torch.stack([found.comprehensiveness for found in chance]).mean(0),
        torch.stack([found.sufficiency for found in chance]).mean(0),
    )
    return _compared(each, {**_attrs(how), "draws": draws, "seed": seed})


def erased(
    model: Transformer,
    batch: Batch,
    score: Float[Tensor, "b p"],
    at: Int[Tensor, "b"],
    how: Erasure,
    *,
    batch_size: int = 32,
) -> Faithfulness:
    """Both AOPC for tokens ranked by these scores; all removals of all prompts are rows, `batch_size` at a time."""
    if score.shape != batch.tokens.shape:
        raise ValueError(
            f"one score per token is required, {shape_text(batch.tokens.shape)}, got {shape_text(score.shape)}"
        )
    removable = _removable(batch).to(score.device)
    top = [top_share(score, removable, share) for share in how.shares]
    nothing = torch.zeros_like(removable)
    holes = torch.stack([nothing, *top, *(removable & ~kept for kept in top)])
    answers = _answers(model, batch, holes, at, how, batch_size)
    n = len(how.shares)
    return Faithfulness(
        comprehensiveness(answers[0], answers[1 : n + 1]), sufficiency(answers[0], answers[n + 1 :])
    )


def top_share(
    score: Float[Tensor, "b p"], removable: Bool[Tensor, "b p"], share: float
) -> Bool[Tensor, "b p"]:
    """The highest `share` of each row's removable tokens, rounded up; earlier ones first among equals.

    Errors: ValueError for a removable token without a score.
    """
    if bool(score[removable].isnan().any()):
        raise ValueError("a score for every removable token is required, got NaN")
    order = score.masked_fill(~removable, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(1)
    count = torch.tensor([ceil(share * int(n) - 1e-9) for n in removable.sum(1)], device=score.device)
    return (rank < count[:, None]) & removable


def _removable(batch: Batch) -> Bool[Tensor, "b p"]:
    """Every real token but a prepended BOS."""
    real = batch.real
    return real & (real.cumsum(1) > 1) if batch.bos else real


def _answers(
    model: Transformer,
    batch: Batch,
    holes: Bool[Tensor, "n b p"],
    at: Int[Tensor, "b"],
    how: Erasure,
    batch_size: int,
) -> Float[Tensor, "n b"]:
    """The measure for every prompt with each of its sets of holes."""
    base = baseline_embedding(model, how.replacement)
    flat = rearrange(holes, "n b p -> (n b) p").to(model.device)
    found = []
    for rows in torch.arange(len(flat)).split(batch_size):
        prompt = rows % len(batch)
        edit = Edit("hook_embed", partial(_replaced, base=base, holes=flat[rows.to(flat.device)]))
        some, place = batch.rows(prompt).to(model.device), at[prompt].to(model.device)
        stream = observe(model, some, edits=[edit], stop=model.config.n_layers).output
        found.append(_measured(model, stream, some, place, how.measure))
    return torch.cat(found).unflatten(0, holes.shape[:2])


def _replaced(
    value: Float[Tensor, "b p d"], base: Float[Tensor, "d"], holes: Bool[Tensor, "b p"]
) -> Float[Tensor, "b p d"]:
    return torch.where(holes[..., None], base.to(value), value)


@torch.no_grad()
def _measured(
    model: Transformer,
    stream: Float[Tensor, "b p d"],
    batch: Batch,
    at: Int[Tensor, "b"],
    measure: Measure,
) -> Float[Tensor, "b"]:
    if measure == "logits":
        return answer_logits(model, stream, batch, at)
    assert batch.answer is not None
    place = torch.arange(len(stream), device=stream.device)
    return wide(model.read_out(stream[place, at])).softmax(-1)[place, batch.answer]


def _asked(
    model: Subject, prompts: Prompts, answer: Answers, wrong: Answers | None, prepend_bos: bool
) -> Batch:
    check_tokens(model.transformer.config)
    if model.transformer.unembed is None:
        raise ValueError("faithfulness requires an unembedding; this model ends in its residual stream")
    batch = model.text.batch(prompts, prepend_bos=prepend_bos)
    foils = None if wrong is None else model.text.targets(wrong, len(batch))
    return batch.with_answers(model.text.targets(answer, len(batch)), foils)


def _named(methods: Sequence[str] | Mapping[str, Method]) -> Mapping[str, Method]:
    if isinstance(methods, Mapping):
        return methods
    if unknown := [name for name in methods if name not in METHODS]:
        raise ValueError(f"unknown method {unknown[0]!r}; {nearest(unknown[0], METHODS)}")
    return {name: METHODS[name] for name in methods}


def _attrs(how: Erasure) -> dict[str, str | float | int]:
    return {
        "unit": how.measure,
        "replacement": str(how.replacement),
        "shares": ", ".join(f"{share:g}" for share in how.shares),
        "removable": "every token but a prepended BOS",
    }


def _compared(each: Mapping[str, Faithfulness], attrs: Mapping[str, str | float | int]) -> "xr.Dataset":
    values: dict[str, tuple[Sequence[str], Tensor]] = {}
    for name in ("comprehensiveness", "sufficiency"):
        rows = torch.stack([getattr(found, name) for found in each.values()])
        values |= Moments.of(rows.mT).cells(name, ("attribution",))
        values[f"{name}_each"] = (("attribution", "prompt"), rows)
    return labelled("compare_methods", values, coords={"attribution": list(each)}, attrs=attrs)
