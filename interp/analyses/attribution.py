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
from interp.model.config import MLP, LayerNorm, ModelConfig, NoNorm
from interp.model.sites import embedding_parts, final_stream
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.model.weights import Weights

if TYPE_CHECKING:
    import xarray as xr

_SOURCES = {"attn_out": ("by_source", "source"), "cross_attn_out": ("by_memory", "memory")}
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
    `by_source[prompt, layer, head, source]`, each head split by the position it moved from (`by_memory` for the heads
    of cross-attention).
    Components: embed, pos_embed, heads `L0H3` (cross-attention: `L0X3`) or sublayers `0_attn_out`, biases, betas of
    norms that stand in the stream (`0_ln1_bias`), `final_bias` (beta W_U + b_U). Logits are those before a soft cap.
    Errors: ValueError for answers that are not one token, and for models without logits linear in the normed stream;
    IncompleteSumError if the parts do not sum.

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
    if by == "neuron" and not isinstance(config.mlp, MLP):
        kind = "a mixture of experts" if config.mlp else "attention-only"
        raise ValueError(f"by='neuron' requires a plain or gated MLP, this model is {kind}")
    if not config.unembed or config.mlm_head:
        raise ValueError(
            "attribution requires logits that are linear in the normed stream (no masked-LM head)"
        )
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
    names = [site.removeprefix("hook_") for site in embedding_parts(config)]
    names += ["embed_bias"] if config.embed_norm and _has_beta(config) else []
    for layer in range(config.n_layers):
        names += [f"{layer}_block"] if by == "layer" else _layer_labels(config, by, layer)
    return (*names, "final_bias")


def _layer_labels(config: ModelConfig, by: By, layer: int) -> list[str]:
    names: list[str] = []
    norms = {"attn_out": "ln1", "cross_attn_out": "ln_cross", "mlp_out": "ln2"}
    for sublayer in config.sublayers:
        letter = {"attn_out": "H", "cross_attn_out": "X"}.get(sublayer)
        if letter and by in ("head", "source"):
            names += [f"L{layer}{letter}{h}" for h in range(config.n_heads)]
            names += [f"{layer}_{sublayer.removesuffix('_out')}_bias"]
        elif by == "neuron" and sublayer == "mlp_out" and isinstance(config.mlp, MLP):
            names += [f"L{layer}N{u}" for u in range(config.mlp.d_mlp)] + [f"{layer}_mlp_bias"]
        else:
            names.append(f"{layer}_{sublayer}")
        if config.norm_place == "post" and _has_beta(config):
            names.append(f"{layer}_{norms[sublayer]}_bias")
    return names


def _has_beta(config: ModelConfig) -> bool:
    return isinstance(config.norm, LayerNorm)


def _last(x: Tensor) -> Tensor:
    return x[:, -1]


def _last_query(pattern_bhqk: Tensor) -> Tensor:
    return pattern_bhqk[:, :, -1]


def _site(layer: int, name: str) -> str:
    return f"blocks.{layer}.{name}"


def _layer_reads(config: ModelConfig, by: By, layer: int) -> Iterable[Read]:
    for sublayer in config.sublayers:
        mixer = sublayer.removesuffix("_out")
        if sublayer != "mlp_out" and by in ("head", "source"):
            yield Read(_site(layer, f"{mixer}.hook_z"), _last)
            if by == "source":
                yield Read(_site(layer, f"{mixer}.hook_pattern"), _last_query)
                yield Read(_site(layer, f"{mixer}.hook_v"))
        elif sublayer == "mlp_out" and by == "neuron":
            yield Read(_site(layer, "mlp.hook_post"), _last)
        else:
            yield Read(_site(layer, f"hook_{sublayer}"), _last)
    if config.norm_place == "post":
        names = {"attn_out": "ln1", "cross_attn_out": "ln_cross", "mlp_out": "ln2"}
        for sublayer in config.sublayers:
            yield Read(_site(layer, f"{names[sublayer]}.hook_scale"), _last)


def _reads(config: ModelConfig, by: By) -> tuple[Read, ...]:
    reads = [Read(site, _last) for site in embedding_parts(config)]
    if config.embed_norm and not isinstance(config.norm, NoNorm):
        reads.append(Read("ln_embed.hook_scale", _last))
    for layer in range(config.n_layers):
        reads += _layer_reads(config, by, layer)
    return (*reads, Read(final_stream(config), _last), Read(_logits(config), _last))


def _logits(config: ModelConfig) -> str:
    """The logits as a sum of parts sees them: before their soft cap."""
    return "unembed.hook_out" if config.logit_softcap is None else "unembed.hook_uncapped"


def _compute(trace: Trace, batch: Batch, model: Transformer, by: By) -> Mapping[str, Tensor]:
    """Contributions `[b c]` by folding the logit direction backwards, so nothing per head is as wide as d_model."""
    if batch.answer is None:
        raise ValueError("attribution requires batches with answers (Batch.with_answers)")
    if batch.keep is not None and not bool(batch.keep[:, -1].all()):
        raise ValueError("attribution requires rows that end in the last column (Batch.left_aligned)")
    wide = torch.promote_types(model.dtype, torch.float32)
    last = {read.site: trace[read].to(wide) for read in _reads(model.config, by)}
    direction, constant = logit_direction(model, batch.answer, batch.wrong)
    scale = model.ln_final.scale(last[final_stream(model.config)])
    folded = _Folded(model, last, model.ln_final.pull_back(direction.to(wide), scale))
    columns = folded.embeddings()
    extra: dict[str, Tensor] = {}
    for layer in range(model.config.n_layers):
        parts, sources = folded.block(layer, by)
        columns += [torch.cat(parts, 1).sum(1, keepdim=True)] if by == "layer" else parts
        extra |= sources
    values = torch.cat((*columns, constant[:, None].to(wide)), 1)
    whole, scale = _whole(last[_logits(model.config)], batch)
    error = (values.sum(1) - whole).abs() / torch.maximum(values.abs().amax(1), scale)
    if not bool((error <= TOLERANCE[model.dtype]).all()):
        raise IncompleteSumError(
            f"attribution by {by}: components miss the logits by {float(error.max()):.2e} relative",
            float(error.max()),
        )
    return {"logits": values, "total": whole, "error": error, **extra}


class _Folded:
    """A direction at the end of the stream, carried back to where each sublayer writes.

    `last` holds the activations at the last position. In pre-norm models the direction is the same everywhere; each
    norm of the stream (post-norm) or of a sublayer's output (sandwich) that lies in between is pulled back through at
    its frozen scale, and its beta becomes a column.
    """

    def __init__(self, model: Transformer, last: Mapping[str, Tensor], end: Float[Tensor, "b d"]) -> None:
        self.model, self.last, self.weights = model, last, Weights(model)
        self.at: dict[tuple[int, str], Float[Tensor, "b d"]] = {}
        self.betas: dict[tuple[int, str], Float[Tensor, "b 1"]] = {}
        for layer in reversed(range(model.config.n_layers)):
            for sublayer in reversed(model.config.sublayers):
                norm = model.block(layer).sum_norm(sublayer)
                if norm is not None:
                    if norm.bias is not None:
                        self.betas[layer, sublayer] = _dot(end, norm.bias.to(end))
                    end = norm.pull_back(end, last[_site(layer, f"{norm.name}.hook_scale")])
                self.at[layer, sublayer] = end
        self.end = end

    def embeddings(self) -> list[Float[Tensor, "b 1"]]:
        """The embeddings' columns, and beta of the norm behind them."""
        norm, direction, beta = self.model.ln_embed, self.end, []
        if norm is not None:
            beta = [] if norm.bias is None else [_dot(direction, norm.bias.to(direction))]
            direction = norm.pull_back(direction, self.last["ln_embed.hook_scale"])
        return [_dot(self.last[name], direction) for name in embedding_parts(self.model.config)] + beta

    def block(self, layer: int, by: By) -> tuple[list[Float[Tensor, "b c"]], dict[str, Tensor]]:
        """The columns of one block at this grain, and each head split by source if that is asked."""
        columns: list[Tensor] = []
        extra: dict[str, Tensor] = {}
        for sublayer in self.model.config.sublayers:
            if sublayer != "mlp_out" and by in ("head", "source"):
                found, sources = self._heads(layer, sublayer, by)
                columns += found
                extra |= {} if sources is None else {f"{sublayer}_{layer}": sources}
            elif sublayer == "mlp_out" and by == "neuron":
                columns += self._neurons(layer)
            else:
                columns.append(_dot(self.last[_site(layer, f"hook_{sublayer}")], self.at[layer, sublayer]))
            if (layer, sublayer) in self.betas:
                columns.append(self.betas[layer, sublayer])
        return columns, extra

    def _heads(
        self, layer: int, sublayer: str, by: By
    ) -> tuple[list[Float[Tensor, "b c"]], Float[Tensor, "b h k"] | None]:
        """The heads' columns and their bias'; with `by="source"` also each head's by source."""
        mixer = sublayer.removesuffix("_out")
        w = self.weights.layer(layer, cross=sublayer == "cross_attn_out")
        z = self.last[_site(layer, f"{mixer}.hook_z")]
        output = einsum(z, w.W_O.to(z), "b h e, h e d -> b d") + w.b_O.to(z)
        direction, beta = self._behind(layer, sublayer, output)
        folded = einsum(w.W_O.to(z), direction, "h e d, b d -> b h e")
        heads = (z * folded).sum(-1)
        columns = [heads, _dot(direction, w.b_O.to(z)) + beta]
        if by == "head":
            return columns, None
        v = self.last[_site(layer, f"{mixer}.hook_v")][:, :, self.weights.kv_head()]
        pattern = self.last[_site(layer, f"{mixer}.hook_pattern")]
        sources = einsum(v, folded, "b k h e, b h e -> b h k") * pattern
        check_sum(sources.movedim(-1, 0), heads, f"sources of layer {layer}", self.model.dtype)
        return columns, sources

    def _neurons(self, layer: int) -> list[Float[Tensor, "b c"]]:
        """Every neuron's column, and the bias'."""
        w, post = self.weights.layer(layer), self.last[_site(layer, "mlp.hook_post")]
        assert w.W_out is not None and w.b_out is not None
        direction, beta = self._behind(layer, "mlp_out", post @ w.W_out.to(post) + w.b_out.to(post))
        return [post * (direction @ w.W_out.to(post).mT), _dot(direction, w.b_out.to(post)) + beta]

    def _behind(
        self, layer: int, sublayer: str, output: Float[Tensor, "b d"]
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b 1"] | float]:
        """The direction at a sublayer's bare output, and what beta of the norm behind it adds."""
        norm = self.model.block(layer).post_norm(sublayer)
        direction = self.at[layer, sublayer] * self.model.config.residual_scale
        if norm is None:
            return direction, 0.0
        beta = 0.0 if norm.bias is None else _dot(direction, norm.bias.to(direction))
        return norm.pull_back(direction, norm.scale(output)), beta


def _dot(x: Float[Tensor, "b d"], y: Float[Tensor, "*#b d"]) -> Float[Tensor, "b 1"]:
    return (x * y).sum(-1, keepdim=True)


def _whole(logits: Float[Tensor, "b v"], batch: Batch) -> tuple[Float[Tensor, "b"], Float[Tensor, "b"]]:
    """The logit (difference) that the parts must sum to, and the largest logit it is made of."""
    assert batch.answer is not None
    answer = logits.gather(1, batch.answer[:, None])[:, 0]
    if batch.wrong is None:
        return answer, answer.abs()
    wrong = logits.gather(1, batch.wrong[:, None])[:, 0]
    return answer - wrong, torch.maximum(answer.abs(), wrong.abs())


def _finish(merged: Means | Rows, config: ModelConfig, by: By) -> "xr.Dataset":
    assert isinstance(merged, Rows)
    rows = merged.rows
    values: dict[str, tuple[Sequence[str], Tensor]] = {
        "logits": (("prompt", "component"), rows["logits"]),
        "total": (("prompt",), rows["total"]),
    }
    if by == "source":
        for sublayer, (name, dim) in _SOURCES.items():
            if sublayer in config.sublayers:
                each = [rows[f"{sublayer}_{layer}"] for layer in range(config.n_layers)]
                values[name] = (("prompt", "layer", "head", dim), torch.stack(each, 1))
    unit = "logits" if config.logit_softcap is None else "logits before the soft cap"
    return labelled(
        values,
        coords={"component": labels(config, by)},
        attrs={"by": by, "unit": unit, "completeness_error": float(rows["error"].max())},
    )
