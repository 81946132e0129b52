"""How a pass of a wrapped network is watched: replaced forwards look up the running pass in one context variable.

The watched modules are a copy of the network's module tree on the same tensors; a pass stores nothing on them. They
visit the sites of `interp.model.sites` in the order in which the values are computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from einops import einsum
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from interp.model.norm import Norm, Normalize
from interp.model.tap import Scope, Tap, at

ATTENTION = "interp"
"""The name under which watched networks find this package's attention in the registry of transformers."""
HEAD_SITES = (
    "attn.hook_rot_q",
    "attn.hook_rot_k",
    "attn.hook_v",
    "attn.hook_attn_scores",
    "attn.hook_pattern",
)
"""Sites inside attention; where one is read or edited, attention runs in its eager (unfused) form."""
ModuleValue = object
"""The input or output of a module."""


class EndOfPass(Exception):  # noqa: N818  # no error: it carries the stream out of a pass that needs no more
    """Ends a pass from inside the network; `stream` is the residual stream at that point."""

    def __init__(self, stream: Tensor) -> None:
        super().__init__("the pass ended where it was asked to")
        self.stream = stream


@dataclass(frozen=True)
class Attended:
    """A call of the registry by the attention of a block."""

    n_heads: int
    n_kv_heads: int
    softmaxes: int
    """Number of softmaxes over keys in its eager (unfused) form; 0 where it has no such form."""
    calls: int = 1
    explained: bool = False
    """Whether its output is pattern @ v, and adding a tensor to its scores acts as adding the same to its mask."""


@dataclass
class Running:
    """One pass under way: its reads and edits, the blocks it runs, and the terms of the present block so far."""

    original: str
    """Name of the network's own attention implementation (such as "sdpa")."""
    tap: Tap | None = None
    start: int = 0
    stop: int | None = None
    """The block before which the pass ends; None: the pass runs through the whole network."""
    rows: int = 1
    entering: Tensor | None = None
    """The stream that enters block `start`, where `start` is not 0."""
    written_out: bool = False
    """Whether some layer's scores or pattern are read or edited, so that masks must be numeric."""
    scope: Scope | None = None
    """Reads and edits of the present block."""
    stream: Tensor | None = None
    """The stream that entered the present block."""
    added: dict[str, Tensor] = field(default_factory=dict)
    """What the sublayers of the present block have added to the stream so far, by name."""
    final: Tensor | None = None
    """The stream that left the last block that ran."""
    layer: int = 0
    """Index of the present block."""
    leaking: list[int] | None = None
    """Layers whose scores are used by more than the softmax, collected during the proof; None: not collected."""
    noted: list[Attended] | None = None
    """Calls of attention, recorded while a network is explored; None: not recorded."""

    def outside(self) -> Scope | None:
        """Reads and edits of the sites outside the blocks; None where the pass starts at a later block."""
        return None if self.tap is None or self.start else self.tap.scope()


RUNNING: ContextVar[Running | None] = ContextVar("interp_wrapped_pass", default=None)


def first_tensor(value: ModuleValue) -> Tensor | None:
    """The output of a module if it is a tensor, or its first element if that is one; else None."""
    first = value[0] if isinstance(value, tuple | list) and value else value
    return first if isinstance(first, Tensor) else None


def with_first(value: ModuleValue, new: Tensor) -> ModuleValue:
    """The output of a module with its (first) tensor replaced by `new`."""
    if isinstance(value, tuple | list):
        return type(value)([new, *value[1:]])
    return new


def stream_key(args: Sequence[ModuleValue], kwargs: Mapping[str, ModuleValue]) -> int | str | None:
    """Index or keyword of a module's first floating-point tensor argument; None if there is none."""
    if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
        return 0
    named = [k for k, v in kwargs.items() if isinstance(v, Tensor) and v.is_floating_point() and v.ndim >= 2]
    return "hidden_states" if "hidden_states" in named else named[0] if named else None


def given_to(args: Sequence[ModuleValue], kwargs: Mapping[str, ModuleValue]) -> Tensor | None:
    """The first floating-point tensor among a module's arguments; None if there is none."""
    key = stream_key(args, kwargs)
    value = None if key is None else args[0] if key == 0 else kwargs[str(key)]
    return value if isinstance(value, Tensor) else None


def replaced(
    args: Sequence[ModuleValue], kwargs: Mapping[str, ModuleValue], new: Tensor
) -> tuple[tuple[ModuleValue, ...], dict[str, ModuleValue]]:
    """The arguments with their first floating-point tensor replaced by `new`."""
    key = stream_key(args, kwargs)
    if key == 0:
        return (new, *args[1:]), dict(kwargs)
    return tuple(args), {**kwargs, str(key): new}


class Seam:
    """The forward of one watched module: its own, unless a pass reads or edits something here."""

    def __init__(self, inner: Callable[..., ModuleValue]) -> None:
        self.inner = inner

    def __call__(self, *args: ModuleValue, **kwargs: ModuleValue) -> ModuleValue:
        """The output of the module: its own, or that of `run` if a pass is under way."""
        run = RUNNING.get()
        if run is None:
            return self.inner(*args, **kwargs)
        return self.run(run, args, kwargs)

    def run(self, run: Running, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue]) -> ModuleValue:
        """The output of the module in this pass."""
        raise NotImplementedError


class BlockSeam(Seam):
    """A block: it is skipped before `start`, visits the stream at its two ends, and ends the pass before `stop`."""

    def __init__(
        self, inner: Callable[..., ModuleValue], layer: int, *, in_tuple: bool, embeds: bool
    ) -> None:
        super().__init__(inner)
        self.layer, self.in_tuple, self.embeds = layer, in_tuple, embeds

    def run(self, run: Running, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue]) -> ModuleValue:
        """The output of the block in this pass."""
        stream = given_to(args, kwargs)
        assert stream is not None
        if run.stop == 0:
            raise EndOfPass(self._embedded(run, stream))
        if self.layer < run.start:
            return (stream,) if self.in_tuple else stream
        stream = self._embedded(run, stream) if self.layer == 0 else stream
        if self.layer == run.start and run.entering is not None:
            stream = run.entering.clone()  # some blocks add in place
        scope = None if run.tap is None else run.tap.scope(self.layer)
        if scope is not None:
            stream = visited(scope, "hook_resid_pre", stream)
            self._end_if(run, stream, done=scope.finished)
        run.scope, run.stream, run.added, run.layer = scope, stream, {}, self.layer
        args, kwargs = replaced(args, kwargs, stream)
        out = self.inner(*args, **kwargs)
        run.scope = None
        stream = first_tensor(out)
        assert stream is not None
        if scope is not None and scope.wants("hook_resid_post"):
            stream = visited(scope, "hook_resid_post", stream)
            out = with_first(out, stream)
        run.final = stream
        self._end_if(run, stream, done=scope is not None and scope.finished)
        self._end_if(run, stream, done=run.stop == self.layer + 1)
        return out

    def _embedded(self, run: Running, stream: Tensor) -> Tensor:
        """The stream that enters the first block, after `hook_embed` where no embedding module visits that site."""
        return visited(run.outside(), "hook_embed", stream) if self.embeds else stream

    @staticmethod
    def _end_if(run: Running, stream: Tensor, *, done: bool) -> None:
        if done:
            raise EndOfPass(stream)


class ReaderSeam(Seam):
    """The reader of the final stream where no blocks were found: a pass ends here unless it fills a cache."""

    def run(self, run: Running, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue]) -> ModuleValue:
        """The output of the module in this pass."""
        stream = given_to(args, kwargs)
        assert stream is not None
        run.final = stream = visited(run.outside(), "hook_stream", stream)
        if run.stop is not None:
            raise EndOfPass(stream)
        args, kwargs = replaced(args, kwargs, stream)
        return self.inner(*args, **kwargs)


def visited(scope: Scope | None, name: str, value: Tensor) -> Tensor:
    """The value after the reads and edits of a site; a copy where there are some, since modules may write in place."""
    return value if scope is None or not scope.wants(name) else at(scope, name, value).clone()


class WriterSeam(Seam):
    """A module that adds its output, times a factor, to the stream; `norm` where the module is a norm itself.

    `hook_resid_mid` is computed as the block's input plus the outputs of the sublayers in `middle`, since not every
    family passes that sum to a module. An edit of it is added to the output of the last sublayer in `middle`.
    """

    def __init__(
        self,
        inner: Callable[..., ModuleValue],
        name: str,
        factor: float,
        middle: tuple[str, ...],
        norm: NormOf | None,
    ) -> None:
        super().__init__(inner)
        self.name, self.factor, self.middle, self.norm = name, factor, middle, norm

    def run(self, run: Running, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue]) -> ModuleValue:
        """The output of the module in this pass."""
        scope, norm_name = run.scope, {"attn_out": "ln1_post", "mlp_out": "ln2_post"}.get(self.name, "")
        scale, normalized = f"{norm_name}.hook_scale", f"{norm_name}.hook_normalized"
        wants_mid = scope is not None and self.name in self.middle and scope.wants("hook_resid_mid")
        if scope is None or not (wants_mid or scope.wants(f"hook_{self.name}", scale, normalized)):
            return self.inner(*args, **kwargs)
        out = self.inner(*args, **kwargs)
        before, stream = first_tensor(out), run.stream
        assert before is not None and stream is not None
        value = before if self.norm is None else normed(scope, norm_name, self.norm, args, kwargs, before)
        value = value.reshape(stream.shape)
        added = value if self.factor == 1 else value * self.factor
        changed = visited(scope, f"hook_{self.name}", added)
        alters = value is not before or scope.alters(f"hook_{self.name}")
        if wants_mid:
            run.added[self.name] = changed
            if self.name == self.middle[-1]:
                mid = stream + sum(run.added[name] for name in self.middle)
                new = visited(scope, "hook_resid_mid", mid)
                if scope.alters("hook_resid_mid"):
                    changed, alters = changed + (new - mid), True
        if not alters:
            return out
        return with_first(out, (changed if self.factor == 1 else changed / self.factor).reshape(before.shape))


class NormSeam(Seam):
    """The norm after the embeddings."""

    def __init__(self, inner: Callable[..., ModuleValue], name: str, norm: NormOf) -> None:
        super().__init__(inner)
        self.name, self.norm = name, norm

    def run(self, run: Running, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue]) -> ModuleValue:
        """The output of the norm in this pass."""
        scope, out = run.outside(), self.inner(*args, **kwargs)
        if scope is None:
            return out
        assert isinstance(out, Tensor)
        return normed(scope, self.name, self.norm, args, kwargs, out)


def normed(
    scope: Scope,
    norm_name: str,
    norm: NormOf,
    args: tuple[ModuleValue, ...],
    kwargs: dict[str, ModuleValue],
    out: Tensor,
) -> Tensor:
    """The output of a norm after its two sites, `{norm_name}.hook_scale` and `{norm_name}.hook_normalized`."""
    scale = f"{norm_name}.hook_scale"
    if scope.wants(scale):
        norm_input, ours = given_to(args, kwargs), norm.module()
        assert norm_input is not None
        divisor = at(scope, scale, ours.scale(norm_input))
        out = ours.linear(norm_input, divisor) if scope.alters(scale) else out
    return visited(scope, f"{norm_name}.hook_normalized", out)


class OutputSeam(Seam):
    """The output map (W_O) of attention: its input is z of all heads; `hook_result` is computed on demand."""

    def __init__(self, inner: Callable[..., ModuleValue], n_heads: int, weights: LinearView) -> None:
        super().__init__(inner)
        self.n_heads, self.weights = n_heads, weights

    def run(self, run: Running, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue]) -> ModuleValue:
        """The output of the module in this pass."""
        scope, flat_z = run.scope, given_to(args, kwargs)
        if scope is None or not scope.wants("attn.hook_z", "attn.hook_result"):
            return self.inner(*args, **kwargs)
        assert flat_z is not None and run.stream is not None
        z = flat_z.reshape(*run.stream.shape[:2], self.n_heads, -1)  # [b p h*e] -> [b p h e]
        z = visited(scope, "attn.hook_z", z)
        args, kwargs = replaced(args, kwargs, z.reshape(flat_z.shape))
        if scope.wants("attn.hook_result"):
            weight = self.weights.weight.unflatten(1, (self.n_heads, -1))  # [d h*e] -> [d h e]
            bias = self.weights.bias
            result = at(scope, "attn.hook_result", einsum(z, weight, "b p h e, d h e -> b p h d"))
            if scope.alters("attn.hook_result"):
                summed = result.sum(2) if bias is None else result.sum(2) + bias
                return summed.reshape(*flat_z.shape[:-1], -1)
        return self.inner(*args, **kwargs)


class EmbeddingSeam(Seam):
    """An embedding module (of tokens or positions): its output times a factor is added to the stream."""

    def __init__(self, inner: Callable[..., ModuleValue], name: str, factor: float) -> None:
        super().__init__(inner)
        self.name, self.factor = name, factor

    def run(self, run: Running, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue]) -> ModuleValue:
        """The output of the embedding in this pass."""
        scope, out = run.outside(), self.inner(*args, **kwargs)
        if scope is None or not scope.wants(self.name):
            return out
        value = first_tensor(out)
        assert value is not None
        value = value.expand(run.rows, *value.shape[-2:])
        new = visited(scope, self.name, value if self.factor == 1 else value * self.factor)
        return (
            with_first(out, new / self.factor if self.factor != 1 else new)
            if scope.alters(self.name)
            else out
        )


class MixerSeam(Seam):
    """An attention module (or another mixer of positions) that does not use the attention registry of transformers."""

    def run(self, run: Running, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue]) -> ModuleValue:
        """The output of the mixer in this pass."""
        scope = run.scope
        if scope is None or not scope.wants(*HEAD_SITES[3:]):
            return self.inner(*args, **kwargs)
        with SoftmaxMode(scope, counts=run.leaking is not None) as mode:
            out = self.inner(*args, **kwargs)
        if run.leaking is not None and (mode.leaks or mode.count > 1):
            run.leaking.append(run.layer)
        return out


class SoftmaxMode(TorchFunctionMode):
    """Visits scores and pattern at the one softmax over keys that runs in this context.

    Where a sink's column is concatenated to the scores before the softmax, the site has the scores without that column.
    """

    def __init__(self, scope: Scope | None, shift: Tensor | None = None, *, counts: bool = False) -> None:
        super().__init__()
        self.scope, self.shift, self.count, self.sunk = scope, shift, 0, False
        self.pattern: Tensor | None = None
        self.seen: list[Tensor] | None = [] if counts else None
        """Every 4-dimensional argument of a torch function, recorded during the proof; None: not recorded."""
        self.leaks = False
        """Whether a function besides the softmax was given the scores."""

    def __torch_function__(
        self,
        func: Callable[..., ModuleValue],
        types: Sequence[type],
        args: tuple[ModuleValue, ...] = (),
        kwargs: Mapping[str, ModuleValue] | None = None,
    ) -> ModuleValue:
        named = dict(kwargs or {})
        if self.seen is not None:
            self.seen += [x for x in (*args, *named.values()) if isinstance(x, Tensor) and x.ndim == 4]
        if (
            func in _SOFTMAXES
            and (scores := given_to(args, {"hidden_states": named.get("input")})) is not None
        ):
            if scores.ndim == 4:
                return self._softmax(scores, func, args, named)
        elif func in (torch.cat, torch.concat) and _joins_sink(args, named):
            parts: Sequence[Tensor] = args[0]  # type: ignore[assignment]
            self.sunk = True
            return torch.cat([self._scores(parts[0]), *parts[1:]], -1)
        return func(*args, **named)

    def _scores(self, scores: Tensor) -> Tensor:
        """The scores after their site, where masked scores are -inf; `shift` is added instead if it is given."""
        if self.shift is not None:
            return scores + self.shift
        if self.scope is None or not self.scope.wants("attn.hook_attn_scores"):
            return scores
        low = torch.finfo(scores.dtype).min
        new = at(self.scope, "attn.hook_attn_scores", scores.masked_fill(scores <= low / 2, -torch.inf))
        return (
            new.masked_fill(new == -torch.inf, low) if self.scope.alters("attn.hook_attn_scores") else scores
        )

    def _softmax(
        self,
        scores: Tensor,
        func: Callable[..., ModuleValue],
        args: tuple[ModuleValue, ...],
        named: dict[str, ModuleValue],
    ) -> Tensor:
        """The softmax of the scores over keys, with the pattern after its site."""
        self.count += 1
        if self.seen is not None:
            self.leaks = sum(x is scores for x in self.seen) > 1
        if not self.sunk:
            scores = self._scores(scores)
        dtype = torch.promote_types(scores.dtype, torch.float32)
        shares = F.softmax(scores, -1, dtype=dtype)
        pattern = self.pattern = shares[..., :-1] if self.sunk else shares
        if self.scope is not None and self.scope.wants("attn.hook_pattern"):
            pattern = visited(self.scope, "attn.hook_pattern", pattern.to(scores.dtype))
            shares = torch.cat((pattern, shares[..., -1:].to(pattern.dtype)), -1) if self.sunk else pattern
        return shares


_SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)


def _joins_sink(args: tuple[ModuleValue, ...], named: Mapping[str, ModuleValue]) -> bool:
    """Whether a concatenation adds one column (a sink) to scores `[b h q k]`."""
    parts, dim = args[0] if args else None, named.get("dim", args[1] if len(args) > 1 else 0)
    if (
        not isinstance(parts, tuple | list)
        or len(parts) != 2
        or not all(isinstance(p, Tensor) for p in parts)
    ):
        return False
    scores, sink = parts
    return bool(dim in (-1, 3) and scores.ndim == sink.ndim == 4 and sink.shape[-1] == 1 < scores.shape[-2])


class NormOf:
    """A norm module of the network as a `Normalize` of this package, on the same parameters."""

    def __init__(self, source: nn.Module, kind: Norm, name: str) -> None:
        self.source, self.kind, self.name = source, kind, name

    def module(self) -> Normalize:
        """The `Normalize`; gamma is 1 and beta 0 where the network's norm has none."""
        width = next((len(p) for p in self.source.parameters(recurse=False)), 1)
        norm = Normalize(self.kind, width, self.name).requires_grad_(False)
        for name in ("weight", "bias"):
            if isinstance(theirs := getattr(self.source, name, None), nn.Parameter):
                setattr(norm, name, theirs)
        return norm


class LinearView:
    """The matrix `[out, in]` and bias of a linear map of the network, whichever way round they are stored."""

    def __init__(self, module: nn.Module, transposed: bool) -> None:
        self.source, self.transposed = module, transposed

    @property
    def weight(self) -> Tensor:
        """The matrix W `[out, in]` in `x W^T + b`."""
        weight = self.source.get_parameter("weight")
        return weight.T if self.transposed else weight

    @property
    def bias(self) -> Tensor | None:
        """The bias b in `x W^T + b`; None where the map has none."""
        bias = getattr(self.source, "bias", None)
        return bias if isinstance(bias, Tensor) else None


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: ModuleValue
) -> ModuleValue:
    """Attention of a watched network: its own, or the family's eager form where a site inside is read or edited."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    run, written = RUNNING.get(), eager_of(module)
    assert run is not None, "a watched network runs only as part of a pass"
    scope = run.scope
    watched = scope is not None and scope.wants(*HEAD_SITES)
    if run.noted is not None and written is None:
        run.noted.append(Attended(query.shape[1], key.shape[1], 0))
    if (not watched and run.noted is None) or written is None:
        usual = written if run.original == "eager" else ALL_ATTENTION_FUNCTIONS[run.original]
        assert usual is not None
        return usual(module, query, key, value, mask, **options)
    q, k, v = (
        visited(scope, name, x.transpose(1, 2)).transpose(1, 2)
        for name, x in zip(HEAD_SITES, (query, key, value), strict=False)
    )
    with SoftmaxMode(scope) as mode:
        out = written(module, q, k, v, mask, **options)
    if run.noted is not None:
        holds = mode.count == 1 and _is_explained(written, module, (q, k, v, mask), options, mode.pattern)
        run.noted.append(Attended(query.shape[1], key.shape[1], mode.count, explained=holds))
    return out


def _is_explained(
    written: Callable[..., ModuleValue],
    module: nn.Module,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    options: Mapping[str, ModuleValue],
    pattern: Tensor | None,
) -> bool:
    """Whether attention's output is pattern @ v, and a tensor added to its scores acts as the same added to its mask.

    The second fails for networks that use their scores twice.
    """
    q, k, v, mask = inputs
    shift = torch.randn(*q.shape[:3], k.shape[2], generator=torch.Generator().manual_seed(13)).to(q)
    with SoftmaxMode(None, shift):
        ours = first_tensor(written(module, q, k, v, mask, **options))
    theirs = first_tensor(written(module, q, k, v, shift if mask is None else mask + shift, **options))
    plain = first_tensor(written(module, q, k, v, mask, **options))
    assert ours is not None and theirs is not None and plain is not None and pattern is not None
    moved = (pattern.to(v.dtype) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)).transpose(1, 2)
    pairs = ((ours, theirs), (moved.reshape(plain.shape), plain))
    return all(float((a - b).abs().max()) <= 1e-4 * float(b.abs().max()) for a, b in pairs)


def eager_of(module: nn.Module) -> Callable[..., ModuleValue] | None:
    """The `eager_attention_forward` of the Python module that defines an attention class; None if there is none."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    return None


def mask(*args: ModuleValue, **kwargs: ModuleValue) -> ModuleValue:
    """The mask of a pass: in the form of the network's own attention, or numeric where attention runs eagerly."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    run = RUNNING.get()
    assert run is not None, "a watched network runs only as part of a pass"
    name = "eager" if run.written_out or run.original not in ALL_MASK_ATTENTION_FUNCTIONS else run.original
    return ALL_MASK_ATTENTION_FUNCTIONS[name](*args, **kwargs)


def register() -> None:
    """Register this package's attention and masks with transformers, under a name that only watched copies use."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, mask)
