"""Direct logit attribution: which parts of the model wrote the answer at the last position.

With the final norm frozen at its actual scale, the logit of a token (or the difference of two) is a sum over what every
part added to the residual stream; `attribute` returns the summands and checks the sum. It shows direct effects only:
what a part does through later parts is credited to those. Elhage et al. 2021; Ferrando et al. 2024, section 4.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from interp.analyses.residual import TOLERANCE, IncompleteSumError, check_sum, logit_direction
from interp.core.results import labelled
from interp.core.stats import Means, Rows
from interp.engine.analysis import Analysis, run
from interp.engine.batch import Batch
from interp.engine.observe import Subject
from interp.engine.text import Prompts
from interp.model.config import Learned, ModelConfig
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.model.weights import Weights

if TYPE_CHECKING:
    import xarray as xr

By = Literal["layer", "sublayer", "head", "source", "neuron"]
Answers = str | int | Sequence[str | int] | Tensor


def attribute(
    model: Subject,
    prompts: Prompts,
    answer: Answers,
    wrong: Answers | None = None,
    *,
    by: By = "sublayer",
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """How much each part adds to the answer's logit (minus the wrong answer's) at the last token of each prompt.

    Returns Dataset[prompt, component] with `logits`, in logit units; `attrs["completeness_error"]` is the largest
    relative difference between the sum over components and the model's own logits. With `by="source"` there is also
    `by_source[prompt, layer, head, source]`, each head split by the position it moved from.
    Components: embed, pos_embed, heads `L0H3` or sublayers `0_attn_out`, biases, `final_bias` (beta W_U + b_U).
    Errors: ValueError for answers that are not one token; IncompleteSumError if the parts do not sum.

    Example:
        >>> interp.attribute(model, "When Mary and John went to the shop, John gave a drink to", " Mary", " John")
    """
    batch = model.text.batch(prompts, prepend_bos=prepend_bos).left_aligned()
    targets = model.text.targets(answer, len(batch))
    foils = None if wrong is None else model.text.targets(wrong, len(batch))
    batch = batch.with_answers(targets, foils)
    parts = batch.split(batch_size)
    return run([attribution(model.transformer.config, by)], model.transformer, parts)["attribution"]


def attribution(config: ModelConfig, by: By) -> Analysis:
    """The analysis behind `attribute`; batches must carry answers and end in their last column."""
    if by not in ("layer", "sublayer", "head", "source", "neuron"):
        raise ValueError(f"by must be layer, sublayer, head, source or neuron, got {by!r}")
    if by == "neuron" and config.mlp is None:
        raise ValueError("by='neuron' requires an MLP; this model is attention-only")
    return Analysis(
        name="attribution",
        reads=partial(_reads, by=by),
        compute=partial(_compute, by=by),
        reduction=Rows,
        finish=partial(_finish, config=config, by=by),
        last_only=True,
    )


def labels(config: ModelConfig, by: By) -> tuple[str, ...]:
    """The components of one grain, in the order of the values."""
    names = ["embed"] + (["pos_embed"] if isinstance(config.position, Learned) else [])
    for layer in range(config.n_layers):
        names += _layer_labels(config, by, layer)
    return (*names, "final_bias")


def _layer_labels(config: ModelConfig, by: By, layer: int) -> list[str]:
    if by == "layer":
        return [f"{layer}_block"]
    if by in ("head", "source"):
        attn = [f"L{layer}H{h}" for h in range(config.n_heads)] + [f"{layer}_attn_bias"]
    else:
        attn = [f"{layer}_attn_out"]
    if config.mlp is None:
        return attn
    if by == "neuron":
        return [*attn, *(f"L{layer}N{u}" for u in range(config.mlp.d_mlp)), f"{layer}_mlp_bias"]
    return [*attn, f"{layer}_mlp_out"]


def _last(x: Tensor) -> Tensor:
    return x[:, -1]


def _last_query(pattern_bhqk: Tensor) -> Tensor:
    return pattern_bhqk[:, :, -1]


def _site(layer: int, name: str) -> str:
    return f"blocks.{layer}.{name}"


def _layer_reads(config: ModelConfig, by: By, layer: int) -> Iterable[Read]:
    if by in ("head", "source"):
        yield Read(_site(layer, "attn.hook_z"), _last)
    else:
        yield Read(_site(layer, "hook_attn_out"), _last)
    if by == "source":
        yield Read(_site(layer, "attn.hook_pattern"), _last_query)
        yield Read(_site(layer, "attn.hook_v"))
    if config.mlp is not None:
        yield Read(_site(layer, "mlp.hook_post" if by == "neuron" else "hook_mlp_out"), _last)


def _reads(config: ModelConfig, by: By) -> tuple[Read, ...]:
    reads = [Read("hook_embed", _last)]
    if isinstance(config.position, Learned):
        reads.append(Read("hook_pos_embed", _last))
    for layer in range(config.n_layers):
        reads += _layer_reads(config, by, layer)
    final = Read(_site(config.n_layers - 1, "hook_resid_post"), _last)
    return (*reads, final, Read("unembed.hook_out", _last))


def _compute(trace: Trace, batch: Batch, model: Transformer, by: By) -> Mapping[str, Tensor]:
    """Contributions `[b c]` by folding the logit direction backwards, so nothing per head is as wide as d_model."""
    if batch.answer is None:
        raise ValueError("attribution requires batches with answers (Batch.with_answers)")
    if batch.keep is not None and not bool(batch.keep[:, -1].all()):
        raise ValueError("attribution requires rows that end in the last column (Batch.left_aligned)")
    weights, config = Weights(model), model.config
    wide = torch.promote_types(model.dtype, torch.float32)
    last = {read.site: trace[read].to(wide) for read in _reads(config, by)}
    direction, constant = logit_direction(weights, batch.answer, batch.wrong)
    scale = model.ln_final.scale(last[_site(config.n_layers - 1, "hook_resid_post")])
    pulled = model.ln_final.pull_back(direction.to(wide), scale)
    columns = [
        (last[n] * pulled).sum(-1, keepdim=True) for n in ("hook_embed", "hook_pos_embed") if n in last
    ]
    extra: dict[str, Tensor] = {}
    for layer in range(config.n_layers):
        attn, sources = _attention_columns(last, weights, pulled, layer, by)
        mlp = _mlp_columns(last, weights, pulled, layer, by)
        columns += [attn + mlp[0]] if by == "layer" and mlp else [attn, *mlp]
        if sources is not None:
            extra[f"source_{layer}"] = sources
    values = torch.cat((*columns, constant[:, None].to(wide)), 1)
    whole, scale = _whole(last["unembed.hook_out"], batch)
    error = (values.sum(1) - whole).abs() / torch.maximum(values.abs().amax(1), scale)
    if not bool((error <= TOLERANCE[model.dtype]).all()):
        raise IncompleteSumError(
            f"attribution by {by}: components miss the logits by {float(error.max()):.2e} relative"
        )
    return {"logits": values, "total": whole, "error": error, **extra}


def _whole(logits: Float[Tensor, "b v"], batch: Batch) -> tuple[Float[Tensor, "b"], Float[Tensor, "b"]]:
    """The logit (difference) that the parts must sum to, and the largest logit it is made of."""
    assert batch.answer is not None
    answer = logits.gather(1, batch.answer[:, None])[:, 0]
    if batch.wrong is None:
        return answer, answer.abs()
    wrong = logits.gather(1, batch.wrong[:, None])[:, 0]
    return answer - wrong, torch.maximum(answer.abs(), wrong.abs())


def _attention_columns(
    last: Mapping[str, Tensor], weights: Weights, pulled: Float[Tensor, "b d"], layer: int, by: By
) -> tuple[Float[Tensor, "b c"], Float[Tensor, "b h k"] | None]:
    """Attention's contributions of one layer: whole, or by head and bias; and each head by source if asked."""
    if by not in ("head", "source"):
        return (last[_site(layer, "hook_attn_out")] * pulled).sum(-1, keepdim=True), None
    w = weights.layer(layer)
    folded = einsum(w.W_O.to(pulled.dtype), pulled, "h e d, b d -> b h e")
    heads = (last[_site(layer, "attn.hook_z")] * folded).sum(-1)
    bias = einsum(w.b_O.to(pulled.dtype), pulled, "d, b d -> b")[:, None]
    columns = torch.cat((heads, bias), 1)
    if by == "head":
        return columns, None
    v = last[_site(layer, "attn.hook_v")][:, :, weights.kv_head()]
    sources = einsum(v, folded, "b k h e, b h e -> b h k") * last[_site(layer, "attn.hook_pattern")]
    check_sum(sources.movedim(-1, 0), heads, f"sources of layer {layer}", weights.model.dtype)
    return columns, sources


def _mlp_columns(
    last: Mapping[str, Tensor], weights: Weights, pulled: Float[Tensor, "b d"], layer: int, by: By
) -> list[Float[Tensor, "b c"]]:
    """The MLP's contributions of one layer: whole, or by neuron and bias; empty without an MLP."""
    if weights.config.mlp is None:
        return []
    if by != "neuron":
        return [(last[_site(layer, "hook_mlp_out")] * pulled).sum(-1, keepdim=True)]
    w = weights.layer(layer)
    assert w.W_out is not None and w.b_out is not None
    neurons = last[_site(layer, "mlp.hook_post")] * (pulled @ w.W_out.to(pulled.dtype).mT)
    return [neurons, (pulled @ w.b_out.to(pulled.dtype))[:, None]]


def _finish(merged: Means | Rows, config: ModelConfig, by: By) -> "xr.Dataset":
    assert isinstance(merged, Rows)
    rows = merged.rows
    values: dict[str, tuple[Sequence[str], Tensor]] = {
        "logits": (("prompt", "component"), rows["logits"]),
        "total": (("prompt",), rows["total"]),
    }
    if by == "source":
        sources = torch.stack([rows[f"source_{layer}"] for layer in range(config.n_layers)], 1)
        values["by_source"] = (("prompt", "layer", "head", "source"), sources)
    return labelled(
        values,
        coords={"component": labels(config, by)},
        attrs={"by": by, "unit": "logits", "completeness_error": float(rows["error"].max())},
    )
