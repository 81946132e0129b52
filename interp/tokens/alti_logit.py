"""ALTI-Logit: contribution of each input token to a logit, through what attention moved at every layer.

Ferrando et al. 2023, "Explaining How Transformers Use Context to Build Predictions". Attention of layer l adds
Delta_l(j) to the logit by moving from source position j. M_(l-1)[j, s], ALTI's rollout over the earlier layers, is the
share of token s in the state at j. The contribution of token s is r_s = sum_l sum_j Delta_l(j) M_(l-1)[j, s], with
M_0 = I.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.transfers import check, to_device
from interp.data.batch import Batch
from interp.model.config import ModelConfig
from interp.model.parts import Part
from interp.model.tap import Trace
from interp.model.transformer import Transformer
from interp.passes.edited import after_pattern, edits_at, names_tokens, of_columns
from interp.passes.needs import Steps, recorded
from interp.passes.question import Reading
from interp.residual.attribution import attribution, labels
from interp.residual.decomposition import IncompleteSumError, bound, in_half
from interp.tokens.mixing import check_stream, contributions, layers_read

_KINDS = {
    **dict.fromkeys(("embed", "pos_embed", "type_embed", "embed_bias"), "initial"),
    **dict.fromkeys(("mlp", "mlp_before"), "mlp"),
    **dict.fromkeys(("head", "cross_head"), "moved"),
}
"""Group of each kind of part; all others are biases."""


@public()
@dataclass(frozen=True)
class AltiLogit:
    """Attention's contribution to the answer's logit, credited to the tokens by ALTI (Ferrando et al. 2023)."""


def check_alti_logit(model: Transformer) -> None:
    """Checks that the logits are a sum over parts of the stream, and that no edit breaks this.

    Under edits, the stream must still be the sum of what the model's parts wrote.

    Raises:
        ValueError: a model or an edit for which it does not hold, named in the message.
    """
    attribution(model.config, "source")  # raises where logits are no such sum
    check_stream(model, "ALTI-Logit")
    for layer in range(model.config.n_layers):
        after_z = [name for name in after_pattern(model.config, layer) if name != "attn.hook_z"]
        for edit in edits_at(model, layer, after_z):
            raise ValueError(
                f"ALTI-Logit splits what heads write by source; the edit of {edit.name} changes it afterwards: edit "
                f"heads (L{layer}H0), patterns or values instead"
            )


def alti_logit(model: Transformer, batch: Batch, at: Int[Tensor, "b"]) -> Steps[dict[str, Tensor]]:
    """ALTI-Logit of rows with answers, at column `at` of each: `value` [row, pos], and the terms of no token.

    The terms of no token are `initial` (the embeddings at the column `at`), `mlp` and `bias` (b_O, betas, b_U, and what
    the pass rounded off). With `value` they sum to `total`, the logit (difference) before a soft cap, up to the
    relative `error`. Delta is the affine variant: it includes b_V, weighted by attention, and passes the later norms at
    their frozen scales. Each row is cut after its column and run like that; its values are put back into its columns.

    Raises:
        ValueError: a column before the last token of a bidirectional model, and for edits of positions where the cut
            moves the columns.
        IncompleteSumError: if the parts do not sum.
    """
    on_host = batch.host()
    real = on_host.real
    before = torch.arange(real.shape[1]) <= at[:, None]
    keep = real & before
    if not model.config.causal and not bool((before | ~real).all()):
        raise ValueError("ALTI-Logit requires the last position in a bidirectional model: use pos=-1")
    if (edits := [*of_columns(model), *filter(names_tokens, model.edits)]) and not bool(keep.all()):
        raise ValueError(
            f"ALTI-Logit moves the tokens asked about to the last column, away from the positions of the edit of "
            f"{edits[0].name}: ask about the last token of prompts of one length"
        )
    on_device = replace(on_host, keep=keep).left_aligned().to(model.device)
    by_source = attribution(model.config, "source")
    reads = (*by_source.reads, *layers_read(model, "alti", range(model.config.n_layers - 1)))
    seen = yield from recorded(on_device, reads, last_only=True)
    values = credited(model, on_device, seen.trace, by_source)
    order = to_device(keep.int().argsort(dim=1, stable=True), values["value"].device)
    return {**values, "value": torch.zeros_like(values["value"]).scatter(1, order, values["value"])}


def credited(model: Transformer, batch: Batch, trace: Trace, by_source: Reading) -> dict[str, Tensor]:
    """The tensors of `alti_logit` at the last column of each row, from a recorded pass."""
    parts = by_source.compute(trace, batch, model)
    n = model.config.n_layers
    by_head = [parts[f"attn_out_{layer}"] for layer in range(n)]
    moved = [x.sum(1) for x in by_head]
    mixing = [contributions(model, layer, trace, "alti")[0] for layer in range(n - 1)]
    columns = parts["logits"]
    without_token = {
        name: columns[:, to_device(mask.nonzero()[:, 0], columns.device)].sum(1)
        for name, mask in _groups(model.config).items()
    }
    score, total = rolled_back(moved, mixing), parts["total"]
    missed = (score.sum(1) + torch.stack(list(without_token.values())).sum(0) - total).abs()
    largest = torch.maximum(columns.abs().amax(1), total.abs())
    size = torch.stack([x.abs().sum((1, 2)) for x in by_head]).sum(0) + columns.abs().sum(1) + total.abs()
    # Half precision rounds each head's sum over source tokens, independently for every head.
    lengths = torch.stack([x.flatten(1).norm(dim=1) for x in by_head]).norm(dim=0)
    allowed = bound(n + columns.shape[1], size, size.dtype) + in_half(model) * lengths
    check((missed <= allowed).all(), partial(_incomplete, missed / largest, allowed / largest))
    return {"value": score, **without_token, "total": total, "error": missed / largest + parts["error"]}


def _incomplete(error: Float[Tensor, "b"], allowed: Float[Tensor, "b"]) -> IncompleteSumError:
    worst = int((error / allowed).argmax())
    missed, explained = float(error[worst]), float(allowed[worst])
    return IncompleteSumError(
        f"ALTI-Logit: the parts miss the logits by {missed:.2e} of the largest, rounding explains {explained:.0e}",
        missed,
        explained,
    )


def rolled_back(
    moved: Sequence[Float[Tensor, "b k"]], mixing: Sequence[Float[Tensor, "b q k"]]
) -> Float[Tensor, "b k"]:
    """Contribution of each token: r = sum_l moved_l M_(l-1), with M_l = mixing_l M_(l-1) and M_0 = I.

    Args:
        moved: for each layer, what attention added by moving from each position.
        mixing: one matrix for every layer but the last. If its rows sum to 1, r has the same sum as `moved`.
    """
    credit = moved[-1]
    for step, matrix in zip(reversed(moved[:-1]), reversed(mixing), strict=True):
        credit = einsum(credit, matrix, "b q, b q k -> b k") + step
    return credit


def _groups(config: ModelConfig) -> Mapping[str, Tensor]:
    """Masks over `labels(config, "source")` of the parts that belong to no token: `initial`, `mlp` and `bias`."""
    groups = [_KINDS.get(Part.of(name).kind, "bias") for name in labels(config, "source")]
    return {kind: torch.tensor([group == kind for group in groups]) for kind in ("initial", "mlp", "bias")}
