"""The numerical contract: what must hold of every loaded model before anyone trusts a number of it, measured.

Each line compares two ways to the same number, one of them as direct as can be; the error is the largest absolute
difference relative to the largest absolute value (unless the line says otherwise).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.stats import WIDE
from interp.core.viewer import Brief, Viewable
from interp.data.batch import Batch, Side
from interp.model.config import ModelConfig
from interp.model.encoder_decoder import EncoderDecoder
from interp.model.sites import find, names
from interp.model.tap import Read, Tap
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.observe import Model, as_network, observe
from interp.residual.decomposition import Decomposition, IncompleteSumError, by_sublayer, head_parts

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Contract", "ContractLine", "PairReference", "Reference", "contract", "pair_contract"]

SAME = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Allowed relative difference between two ways of this package to one number."""
REFERENCE = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Allowed against the reference, which computes norms, softmax and angles in float32 even for float64 models.

A model in half precision is compared in float32."""
DRIFT = 1.5
"""Allowed loss of precision in half precision, in multiples of the reference's own."""


@runtime_checkable
class Reference(Protocol):
    """An independent implementation with the same weights; `families.comparison` adapts Hugging Face's."""

    name: str
    rounded: bool
    """Whether this package's weights are the reference's after one more rounding to their dtype: those of adapters
    that were merged.
    """

    def logits(self, tokens: Int[Tensor, "b p"]) -> Float[Tensor, "b p v"]:
        """The reference's logits for these tokens, in float32 at least."""
        ...

    def gradient(self, tokens: Int[Tensor, "b p"], probe: Float[Tensor, "b p v"]) -> Float[Tensor, "b p d"]:
        """d sum(probe * logits) / d (rows of the embedding matrix)."""
        ...

    def half_logits(self, tokens: Int[Tensor, "b p"]) -> Float[Tensor, "b p v"]:
        """Logits in half precision: those of the model, or bfloat16."""
        ...


@runtime_checkable
class PairReference(Protocol):
    """A reference for an encoder-decoder: `Reference` for two stacks."""

    name: str

    def pair_logits(self, source: Int[Tensor, "b s"], target: Int[Tensor, "b p"]) -> Float[Tensor, "b p v"]:
        """The reference's logits for a source and a target."""
        ...

    def pair_gradient(
        self, source: Int[Tensor, "b s"], target: Int[Tensor, "b p"], probe: Float[Tensor, "b p v"]
    ) -> Float[Tensor, "b s d"]:
        """d sum(probe * logits) / d (rows of the encoder's embedding matrix)."""
        ...


@dataclass(frozen=True)
class ContractLine:
    """One claim: the measured error and what is allowed; no error where the claim does not apply, with the reason."""

    claim: str
    error: float | None
    allowed: float = 0.0
    note: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether the line is fulfilled; None where it does not apply."""
        return None if self.error is None else self.error <= self.allowed


@dataclass(frozen=True, repr=False)
class Contract(Brief, Viewable):
    """The lines measured of one model."""

    model: str
    lines: tuple[ContractLine, ...]

    @property
    def passed(self) -> bool:
        """Whether no line failed and at least one was measured."""
        measured = [line.passed for line in self.lines if line.passed is not None]
        return bool(measured) and all(measured)

    def table(self) -> "pd.DataFrame":
        """One row per line: claim, error, allowed, passed, note."""
        import pandas as pd

        rows = [(x.claim, x.error, x.allowed, x.passed, x.note) for x in self.lines]
        return pd.DataFrame(rows, columns=["claim", "error", "allowed", "passed", "note"])

    def __str__(self) -> str:
        width = max(len(line.claim) for line in self.lines)
        rows = [f"{self.model}: {'every line holds' if self.passed else 'BROKEN'}"]
        for line in self.lines:
            mark = {True: "ok ", False: "RED", None: "-  "}[line.passed]
            size = " " * 17 if line.error is None else f"{line.error:8.1e} <= {line.allowed:.0e}"
            rows.append(f"  {mark}  {line.claim:<{width}}  {size}  {line.note}".rstrip())
        return "\n".join(rows)


@public()
def contract(
    model: Model, reference: Reference | str, *, name: str = "model", batch: Batch | None = None
) -> Contract:
    """Measure every line on random tokens.

    Args:
        model: with the interventions that hold here and now.
        reference: what to compare with, or the reason why there is nothing.
        batch: tokens to use instead (unpadded rows; a decoder with cross-attention requires one that carries its
            memory).
    """
    network = as_network(model)
    batch = (some_tokens(network) if batch is None else batch).to(network.device)
    with torch.no_grad():
        lines = tuple(_lines(network, reference, batch))
    return Contract(name, lines)


@public()
def pair_contract(model: EncoderDecoder, reference: PairReference | str, *, name: str = "model") -> Contract:
    """Measure an encoder-decoder: the whole against the reference, then every line of each side on its own."""
    source = some_tokens(model.encoder, n=10).to(model.device)
    target = some_tokens(model.decoder, n=7, seed=1).to(model.device)
    with torch.no_grad():
        lines = list(_pair_against(model, reference, source, target))
        memory = model.encode(source.tokens)
        for side, batch in (("encoder", source), ("decoder", replace(target, memory=memory))):
            stack = model.encoder if side == "encoder" else model.decoder
            alone = _lines(stack, "compared as a whole above", batch)
            lines += [replace(line, claim=f"{side}: {line.claim}") for line in alone]
    return Contract(name, tuple(line for line in lines if line.note != "compared as a whole above"))


def _pair_against(
    model: EncoderDecoder, reference: PairReference | str, source: Batch, target: Batch
) -> Iterator[ContractLine]:
    if isinstance(reference, str):
        yield ContractLine("logits = reference", None, note=reference)
        yield ContractLine("gradients = autograd on the reference", None, note=reference)
        return
    if model.dtype not in WIDE:
        model = copy.deepcopy(model).float()
    limit, read = REFERENCE[model.dtype], Read("encoder.hook_embed", grad=True)
    tap = Tap([read])
    with torch.enable_grad():
        logits = model(source.tokens, target.tokens, tap)
        probe = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits)
        (found,) = torch.autograd.grad((logits * probe).sum(), [tap.live[read]])
    given = reference.pair_logits(source.tokens, target.tokens)
    yield ContractLine(f"logits = {reference.name}", relative(logits.detach(), given), limit)
    ours = found * model.config.encoder.embed_scale
    theirs = reference.pair_gradient(source.tokens, target.tokens, probe)
    yield ContractLine(f"gradients = autograd on {reference.name}", relative(ours, theirs), limit)


def some_tokens(model: Transformer, rows: int = 3, n: int = 12, seed: int = 0) -> Batch:
    """Random tokens for a model, as many as its context takes up to `n`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, min(n, model.config.n_ctx))
    return Batch(torch.randint(0, model.config.d_vocab, shape, generator=generator))


def relative(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest absolute expected value; not a number if either is not."""
    wide = torch.promote_types(expected.dtype, torch.float32)
    actual, expected = actual.to(expected.device, wide), expected.to(wide)
    scale = expected.abs().max().clamp_min(torch.finfo(wide).tiny)
    return float((actual - expected).abs().max() / scale)


def _lines(model: Transformer, reference: Reference | str, batch: Batch) -> Iterator[ContractLine]:
    plain, tolerance = observe(model, batch).output, SAME[model.dtype]
    for clause in model.opened:
        yield ContractLine("checkpoint as opened", None, note=clause)
    yield from _against(model, reference, batch, plain)
    seen = _everything(model, batch)
    yield _parts(model, seen)
    mixers = ("attn", "cross_attn") if model.config.cross_attention else ("attn",)
    for mixer in mixers if model.config.n_layers else ():
        if _splitting(model, mixer):
            yield _values(model, seen, mixer)
        yield _heads(model, seen, mixer)
    yield ContractLine("fused pass = observed pass", relative(seen["output"], plain), tolerance)
    for side in ("left", "right"):
        padded = partial(_padded, model, batch, side)
        yield _option(model, f"padded on the {side} = unpadded", f"{side} padding", padded)
    yield _option(model, "packed texts = each alone", "documents", lambda: _packed(model, batch))
    rows = torch.cat([observe(model, row).output for row in batch.split(1)])
    yield ContractLine("batch row = single row", relative(plain, rows), tolerance)
    if model.config.causal:
        stepwise = partial(_stepwise, model, batch, plain)
        yield _option(model, "steps with a cache = one pass", "cache", stepwise)
    else:
        yield ContractLine("steps with a cache = one pass", None, note="not causal")
    if model.config.block.proven:
        yield from _open(model.config)


def _option(model: Transformer, claim: str, option: str, error: Callable[[], float]) -> ContractLine:
    """A line about an option of a pass, or why the model refuses it."""
    if why := model.config.block.why_not(option):
        return ContractLine(claim, None, note=f"refused: {why}")
    return ContractLine(claim, error(), SAME[model.dtype])


def _lacking(config: ModelConfig, short: str) -> dict[int, str]:
    """The layers without a site, and why."""
    found = {}
    for layer in range(config.n_layers):
        name = f"blocks.{layer}.{short}"
        try:
            find(name, config)
        except KeyError:
            found[layer] = config.block.why_not(name) or "it has no such part"
    return found


def _open(config: ModelConfig) -> Iterator[ContractLine]:
    """The line that lists the analyses open to a network with sites that are offered as far as they were proven."""
    if not config.n_layers:
        yield ContractLine("open to the final stream and its lens", None, note="yes")
        yield ContractLine("open to what is inside", None, note=f"no: {config.block.why_not('blocks')}")
        return
    for analyses, sites in {
        "stream, lenses, probes": ["hook_resid_pre", "hook_resid_post"],
        "attribution to sublayers": [f"hook_{name}" for name in config.sublayers] or ["hook_attn_out"],
        "scores of heads": ["attn.hook_pattern"],
        "writes of heads": ["attn.hook_z"],
        "heads by source token": ["attn.hook_pattern", "attn.hook_v", "attn.hook_z"],
    }.items():
        lacks = [(layer, why) for site in sites for layer, why in _lacking(config, site).items()]
        closed = sorted({layer for layer, _ in lacks})
        where = "in no layer" if len(closed) == config.n_layers else f"not in layers {closed}"
        yield ContractLine(
            f"open to {analyses}", None, note=f"{where}: {lacks[0][1]}" if lacks else "in every layer"
        )
    for option, analyses in {"gradients": "gradients", "start": "passes from a later block"}.items():
        why = config.block.why_not(option)
        yield ContractLine(f"open to {analyses}", None, note=f"no: {why}" if why else "yes")
    for circuit, trait, matrix in (("OV circuits", "moves", "W_V"), ("QK circuits", "bilinear", "W_Q")):
        closed = [layer for layer, mixer in enumerate(config.mixers) if not getattr(mixer.traits, trait)]
        reasons = [config.block.why_not(f"blocks.{layer}.attn.{matrix}") for layer in closed]
        where = "in no layer" if len(closed) == config.n_layers else f"not in layers {closed}"
        note = f"{where}: {reasons[0] or 'heads move values otherwise'}" if closed else "in every layer"
        yield ContractLine(f"open to {circuit}", None, note=note)


def _against(
    model: Transformer, reference: Reference | str, batch: Batch, plain: Float[Tensor, "b p v"]
) -> Iterator[ContractLine]:
    """Lines of the comparison with an independent implementation, and of the loss of precision in half precision.

    Of a model in half precision both are compared in float32, with the same weights, and each with its own float32:
    half precision moves logits by more than a small mistake does, and two roundings differ more than each does.
    """
    message, kind, drifted = "", torch.bfloat16, plain
    if model.dtype in WIDE:
        half = copy.deepcopy(model).bfloat16()
        drifted = observe(half, _like(batch, half)).output
    else:
        message, kind, model = "both in float32", model.dtype, copy.deepcopy(model).float()
        batch = _like(batch, model)
        plain = observe(model, batch).output
    drift, allowed = _spread(drifted, plain), 0.1
    half_name = str(kind).removeprefix("torch.")
    note = f"how far logits in {half_name} are from float32, the median over positions"
    if isinstance(reference, str):
        yield ContractLine("logits = reference", None, note=reference)
        yield ContractLine("gradients = autograd on the reference", None, note=reference)
    else:
        given, limit, apart = reference.logits(batch.tokens), REFERENCE[model.dtype], relative
        if reference.rounded and message:
            limit, apart = SAME[kind], _spread
            message += ", median over positions: merging rounded the weights once more"
        yield ContractLine(f"logits = {reference.name}", apart(plain, given), limit, message)
        probe = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1), dtype=plain.dtype)
        yield _gradients(model, batch, reference, probe.to(plain.device), limit, apart)
        base = _spread(reference.half_logits(batch.tokens), given)
        allowed = DRIFT * base + 1e-3
        note += f"; {reference.name} is {base:.1e} from its own, {DRIFT} times that and 0.001 are allowed"
    yield ContractLine(f"drift in {half_name}", drift, allowed, note)


def _gradients(
    model: Transformer,
    batch: Batch,
    reference: Reference,
    probe: Float[Tensor, "b p v"],
    limit: float,
    apart: Callable[[Tensor, Tensor], float],
) -> ContractLine:
    claim, config = f"gradients = autograd on {reference.name}", model.config
    if why := config.block.why_not("gradients") or config.block.why_not("embed"):
        return ContractLine(claim, None, note=f"refused: {why}")
    seen = observe(
        model, batch, [Read("hook_embed", grad=True)], metric=lambda logits: (logits * probe).sum()
    )
    ours = seen.trace["hook_embed"] * config.embed_scale
    return ContractLine(claim, apart(ours, reference.gradient(batch.tokens, probe)), limit)


def _like(batch: Batch, model: Transformer) -> Batch:
    """The batch with its memory, if it has one, in the model's dtype."""
    if batch.memory is None:
        return batch
    return replace(batch, memory=replace(batch.memory, states=batch.memory.states.to(model.dtype)))


def _worst(errors: Iterable[float]) -> float:
    """The largest of them, or not a number if one is not, which `max` would lose."""
    return float(torch.tensor([0.0, *errors], dtype=torch.float64).max())


def _spread(actual: Tensor, expected: Tensor) -> float:
    """Root mean square difference relative to that of the expected values: the median over positions.

    The median, since rounding may send a token to another expert, which is no loss of precision.
    """
    wide = torch.promote_types(expected.dtype, torch.float32)
    difference = actual.to(expected.device, wide) - expected.to(wide)
    each = difference.square().mean(-1) / expected.to(wide).square().mean(-1)
    return float(each.sqrt().median()) if bool(each.isfinite().all()) else math.nan


def _everything(model: Transformer, batch: Batch) -> dict[str, Tensor]:
    """Every site of one pass by name, on demand ones included, and its output."""
    seen = observe(model, batch, [Read(name) for name in names(model.config, on_demand=True)])
    return {read.site: value for read, value in seen.trace.items()} | {"output": seen.output}


def _summed(claim: str, sums: Iterable[Callable[[], Decomposition]]) -> ContractLine:
    """The sum that is nearest to what rounding explains, or beyond it; the accessors check them themselves."""
    worst = (0.0, 0.0)
    for made in sums:
        try:
            missed = made().missed
            found = (0.0, 0.0) if missed is None else (float(missed.error), float(missed.allowed))
        except IncompleteSumError as broken:
            return ContractLine(claim, broken.error, broken.allowed)
        if not found[0] * worst[1] <= worst[0] * found[1] or worst[1] == 0:
            worst = found
    return ContractLine(claim, *worst)


def _parts(model: Transformer, seen: dict[str, Tensor]) -> ContractLine:
    added = [f"hook_{name}" for name in model.config.sublayers]
    lacks = {layer: why for site in added for layer, why in _lacking(model.config, site).items()}
    if lacks or not added:
        block = model.config.block
        why = next(iter(lacks.values()), block.why_not("blocks.0.hook_attn_out") or block.why_not("blocks"))
        return ContractLine("residual parts sum", None, note=why)
    return _summed("residual parts sum", [lambda: by_sublayer(seen, model)])


def _heads(model: Transformer, seen: dict[str, Tensor], mixer: str) -> ContractLine:
    lacks = _lacking(model.config, f"{mixer}.hook_z")
    if len(lacks) == model.config.n_layers:
        return ContractLine(f"heads + bias = {mixer}_out", None, note=lacks[0])
    layers = [i for i in range(model.config.n_layers) if i not in lacks]
    cross = mixer == "cross_attn"
    return _summed(
        f"heads + bias = {mixer}_out", [partial(head_parts, seen, model, i, cross=cross) for i in layers]
    )


def _splitting(model: Transformer, mixer: str) -> list[int]:
    """The layers in which z is the pattern of their values."""
    mixers = enumerate(model.config.mixers)
    return [layer for layer, kind in mixers if mixer == "cross_attn" or kind.traits.additive]


def _values(model: Transformer, seen: dict[str, Tensor], mixer: str) -> ContractLine:
    heads, errors = Weights(model).kv_head(), []
    for i in _splitting(model, mixer):
        site = f"blocks.{i}.{mixer}.hook_"
        pattern, v = seen[f"{site}pattern"], seen[f"{site}v"][:, :, heads]
        z = einsum(pattern, v, "b h q k, b k h e -> b q h e")
        errors.append(relative(seen[f"{site}z"], z))
    return ContractLine(f"{mixer} pattern @ v = z", _worst(errors), SAME[model.dtype])


def _lengths(batch: Batch) -> list[int]:
    """Different lengths for the rows of a batch, the first one full."""
    n = batch.tokens.shape[1]
    return [max(1, n - 3 * i) for i in range(len(batch))]


def _padded(model: Transformer, batch: Batch, side: Side) -> float:
    lengths, errors = _lengths(batch), []
    rows = [row[:n].tolist() for row, n in zip(batch.tokens, lengths, strict=True)]
    padded = Batch.of(rows, side=side).to(model.device)
    output = observe(model, replace(padded, memory=batch.memory)).output
    for i, (row, n) in enumerate(zip(batch.split(1), lengths, strict=True)):
        alone = observe(model, replace(row, tokens=row.tokens[:, :n])).output[0]
        errors.append(relative(output[i, -n:] if side == "left" else output[i, :n], alone))
    return _worst(errors)


def _packed(model: Transformer, batch: Batch) -> float:
    """Error of two texts packed in each row against each text for itself; rows keep their memory."""
    n, errors = batch.tokens.shape[1], []
    cut = max(1, n // 3)
    documents = (torch.arange(n, device=batch.tokens.device) >= cut).long().expand_as(batch.tokens)
    packed = observe(model, replace(batch, documents=documents)).output
    for part in (slice(0, cut), slice(cut, n)):
        if batch.tokens[:, part].numel():
            alone = observe(model, replace(batch, tokens=batch.tokens[:, part])).output
            errors.append(relative(packed[:, part], alone))
    return _worst(errors)


def _stepwise(model: Transformer, batch: Batch, plain: Float[Tensor, "b p v"]) -> float:
    rows, n = batch.tokens.shape
    cache = model.new_cache(rows, n)
    outputs = []
    for part in batch.tokens.split([max(1, n // 2)] + [1] * (n - max(1, n // 2)), 1):
        outputs.append(model(part, cache=cache, memory=batch.memory))
    return relative(torch.cat(outputs, 1), plain)
