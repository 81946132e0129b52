"""The structure of a network, found from the recorded module calls of one pass: no family is known by name.

A hypothesis (these modules write to the stream, this is the embedding's factor) is accepted only where it reproduces
the recorded tensors. The result is a `NetworkPlan`, with a reason for every part that was not found.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.model.block import ACTIVATIONS, Activation
from interp.model.norm import LayerNorm, NoNorm, Norm, Normalize, RMSNorm
from interp.wrapped.seams import (
    RUNNING,
    Attended,
    LinearView,
    ModuleValue,
    NormOf,
    Running,
    first_tensor,
    given_to,
    replaced,
)

EQUAL = {torch.float64: 1e-9, torch.float32: 2e-6}
"""Tolerance between a sum of recorded tensors and the tensor it should equal, relative to its largest entry."""
NO_BLOCKS = (
    "no list of blocks was found of which each is given the residual stream [batch, pos, d_model] that the one "
    "before gave"
)
EARLIER = "what enters its first block mixes positions: the blocks before it were not found"
COMPUTED = 2e-5
"""Relative tolerance where a norm or softmax is recomputed: networks compute them in float32 whatever their dtype."""


@dataclass(frozen=True)
class Call:
    """Inputs and output of one module call; `given` and `gave` are copies, since some modules write in place."""

    order: int
    args: tuple[ModuleValue, ...]
    kwargs: Mapping[str, ModuleValue]
    given: Tensor | None
    gave: Tensor | None
    in_tuple: bool
    noted: slice
    """The entries of `Running.noted` (attention calls) that were made inside this call."""


Calls = Mapping[str, list[Call]]


@dataclass(frozen=True)
class Writer:
    """A module of a block that adds its output, times a factor, to the stream."""

    path: str
    factor: float = 1.0
    mixes: bool = False
    """Whether its output at one position depends on other positions."""
    norm: Norm | None = None
    """The norm, if the module is a norm (of the sublayer's output)."""


@dataclass(frozen=True)
class Layer:
    """The structure of one block; paths are relative to it."""

    writers: Mapping[str, Writer] = field(default_factory=dict)
    """Modules that add to the stream, by sublayer name, in the order in which they are computed."""
    middle: tuple[str, ...] = ()
    """Sublayers whose outputs, added to the block's input, make the stream that the MLP reads."""
    output: str | None = None
    """Path of the output map (W_O) of attention, or of another mixer of positions."""
    transposed: bool = False
    """Whether its matrix is stored `[in, out]`."""
    mixer: str | None = None
    """Path of the module that contains `output`: the attention module."""
    z_width: int = 0
    mlp_width: int = 0
    attended: Attended | None = None
    """The call by which its attention uses the registry; None where it uses none."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why something was not found, by the names of sites."""


@dataclass(frozen=True)
class Transform:
    """A map that some networks have between final norm and unembedding: a linear map, an activation, a norm."""

    dense: str
    """The linear map, with its matrix stored as `[out, in]`."""
    act: Activation
    norm: str
    kind: Norm


@dataclass(frozen=True)
class NetworkPlan:
    """The structure of a network; paths are relative to it."""

    blocks: str | None
    """Path of the list of blocks; None where no list was found in which each block's output is the next one's input."""
    members: tuple[int, ...] = ()
    """Indices of the blocks in that list that ran on tokens; blocks that run on images only are no layers."""
    in_tuple: bool = False
    """Whether blocks give a tuple that begins with the stream."""
    width: int = 0
    """Width of the residual stream."""
    layers: tuple[Layer, ...] = ()
    embed: str | None = None
    embed_scale: float = 1.0
    """Factor from rows of the embedding matrix to what they add to the stream."""
    embed_factor: float = 1.0
    """Factor from the output of the embedding module to what it adds to the stream."""
    place: str | None = None
    """Path of the learned position embeddings; the row for position i is `i + place_offset`."""
    place_offset: int = 0
    embed_norm: str | None = None
    final_norm: str | None = None
    norm: Norm = field(default_factory=NoNorm)
    head: str | None = None
    transform: Transform | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    first_position: int = 0
    """The network's own position of the first token, where positions can be given to it."""
    reader: str | None = None
    """Without blocks: path of the module whose input is the final stream, from which the logits are read."""
    reasons: Mapping[str, str] = field(default_factory=dict)

    def root(self, layer: int) -> str:
        """The path of the block of a layer."""
        return f"{self.blocks}.{self.members[layer]}"


class UnknownNetworkError(ValueError):
    """A network in which no residual stream was found; the message says what was looked for."""


def close(values: Tensor, expected: Tensor, allowed: float | None = None) -> bool:
    """Whether two tensors are equal up to `allowed`, relative to the largest entry of `expected`."""
    if values.shape != expected.shape or not bool(values.isfinite().all()):
        return False
    allowed = EQUAL[expected.dtype] if allowed is None else allowed
    return bool((values - expected).abs().max() <= allowed * expected.abs().max())


@torch.no_grad()
def recorded(
    network: nn.Module, tokens: Int[Tensor, "b p"], run: Running, **inputs: ModuleValue
) -> tuple[Calls, Tensor]:
    """The calls of every module in one pass, by module path, and the logits."""
    calls: dict[str, list[Call]] = {}
    counter, handles = itertools.count(), []

    def note(path: str) -> object:
        def hook(
            module: nn.Module, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue], out: ModuleValue
        ) -> None:
            gave = first_tensor(out)
            if gave is not None and gave.is_floating_point():
                given, began = before.get(path, (None, 0))
                inside = slice(began, len(run.noted or ()))
                in_tuple = isinstance(out, tuple | list)
                call = Call(next(counter), args, kwargs, given, gave.clone(), in_tuple, inside)
                calls.setdefault(path, []).append(call)

        return hook

    before: dict[str, tuple[Tensor | None, int]] = {}

    def keep(path: str) -> object:
        def hook(module: nn.Module, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue]) -> None:
            given = given_to(args, kwargs)
            before[path] = (None if given is None else given.clone(), len(run.noted or ()))

        return hook

    for path, module in network.named_modules():
        handles.append(module.register_forward_pre_hook(keep(path), with_kwargs=True))
        handles.append(module.register_forward_hook(note(path), with_kwargs=True))
    token = RUNNING.set(run)
    try:
        output = network(input_ids=tokens, use_cache=False, **inputs)
    finally:
        RUNNING.reset(token)
        for handle in handles:
            handle.remove()
    return calls, output.logits


def found_blocks(network: nn.Module, calls: Calls, shape: Sequence[int]) -> NetworkPlan:
    """The plan with the list of blocks: a `ModuleList` in which each module's output is the next one's input.

    Modules that did not run are left out. Without such a list the plan has `blocks=None`.
    """
    lists = [(name, m) for name, m in network.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    for name, members in sorted(lists, key=lambda pair: (pair[0].count("."), -len(pair[1]))):
        calls_of = {i: calls.get(f"{name}.{i}", []) for i in range(len(members))}
        ran = {i: runs for i, runs in calls_of.items() if runs}
        if not ran or any(len(runs) != 1 for runs in ran.values()):
            continue
        chain = [runs[0] for runs in ran.values()]
        streams = all(
            c.given is not None and c.gave is not None and c.given.ndim == 3 and c.gave.shape == c.given.shape
            and tuple(c.given.shape[:2]) == tuple(shape)
            for c in chain
        )  # fmt: skip
        if streams and all(torch.equal(a.gave, b.given) for a, b in itertools.pairwise(chain)):  # type: ignore[arg-type]
            assert chain[0].given is not None
            return NetworkPlan(name, tuple(ran), chain[0].in_tuple, chain[0].given.shape[-1])
    return NetworkPlan(None)


def norm_of(module: nn.Module, given: Tensor, gave: Tensor) -> Norm | None:
    """The norm that a module computes, or None; compared at two scales of the input, so that eps is told too."""
    weight = getattr(module, "weight", None)
    if weight is not None and (not isinstance(weight, Tensor) or weight.shape != given.shape[-1:]):
        return None
    known = [v for k, v in vars(module).items() if "eps" in k and isinstance(v, float)]
    kinds = [
        kind
        for eps in dict.fromkeys([*known, 1e-5, 1e-6])
        for kind in (
            RMSNorm(eps), RMSNorm(eps, unit_offset=True), LayerNorm(eps), LayerNorm(eps, unit_offset=True),
        )
    ]  # fmt: skip
    small = given * 1e-2
    for kind in kinds:
        if kind.unit_offset and weight is None:
            continue
        if isinstance(kind, RMSNorm) and getattr(module, "bias", None) is not None:
            continue
        ours = NormOf(module, kind, "norm").module().to(given.dtype)
        if weight is None:
            ours = _bare_norm(kind, given)
        if close(ours(given), gave, COMPUTED):
            theirs = first_tensor(module.forward(small))
            if theirs is not None and close(ours(small), theirs, COMPUTED):
                return kind
    return None


def _bare_norm(kind: Norm, like: Tensor) -> Normalize:
    return Normalize(kind, like.shape[-1], "norm").to(like)


# --- what a block adds ----------------------------------------------------------------------------------------------


def writers(calls: Mapping[str, Call], change: Float[Tensor, "b p d"]) -> dict[str, float] | None:
    """Factors of the smallest set of modules whose outputs sum to `change`, a block's output minus its input.

    Sets with all factors 1 come first, then sets with a fitted factor for each module. Of modules with equal outputs
    the outermost counts.
    """
    shaped: dict[str, Tensor] = {}
    for path, call in sorted(calls.items(), key=lambda item: (item[0].count("."), item[1].order)):
        if call.gave is not None and call.gave.numel() == change.numel():
            value = call.gave.reshape(change.shape)
            if bool(value.any()) and not any(torch.equal(value, earlier) for earlier in shaped.values()):
                shaped[path] = value
    largest = max(
        [change.abs().max(), *(v.abs().max() for v in shaped.values())], default=change.new_ones(())
    )
    scale = float(largest) * EQUAL[change.dtype] * 4
    for size in (1, 2, 3):
        for chosen in itertools.combinations(shaped, size):
            if float((sum(shaped[p] for p in chosen) - change).abs().max()) <= scale:
                return dict.fromkeys(chosen, 1.0)
    for size in (1, 2, 3):
        for chosen in itertools.combinations(shaped, size):
            columns = torch.stack([shaped[p].flatten() for p in chosen], 1)
            factors = torch.linalg.lstsq(columns, change.flatten()[:, None]).solution[:, 0]
            missed = (columns @ factors - change.flatten()).abs().max()
            if float(missed) <= scale and bool((factors > 1e-3).all()):
                return {p: float(f"{float(f):.7g}") for p, f in zip(chosen, factors, strict=True)}
    return None


@torch.no_grad()
def called(
    block: nn.Module, call: Call, stream: Tensor, pinned: Mapping[str, Tensor], names: Sequence[str]
) -> dict[str, Tensor]:
    """The outputs of the modules `names` when a block runs on `stream`, with other modules' outputs set by `pinned`."""
    outputs: dict[str, Tensor] = {}
    handles = []

    def hook(path: str) -> object:
        def change(module: nn.Module, args: ModuleValue, out: ModuleValue) -> ModuleValue:
            gave = first_tensor(out)
            assert gave is not None
            outputs[path] = gave.clone()
            if path not in pinned:
                return None
            new = pinned[path].reshape(gave.shape).clone()
            return type(out)([new, *out[1:]]) if isinstance(out, tuple | list) else new

        return change

    for path in {*names, *pinned}:
        handles.append(block.get_submodule(path).register_forward_hook(hook(path)))  # type: ignore[arg-type]
    token = RUNNING.set(Running("sdpa", written_out=True, noted=[]))
    try:
        args, kwargs = replaced(call.args, call.kwargs, stream)
        block(*args, **kwargs)
    finally:
        RUNNING.reset(token)
        for handle in handles:
            handle.remove()
    return outputs


def named_writers(
    block: nn.Module, call: Call, inner: Mapping[str, Call], factors: Mapping[str, float]
) -> tuple[dict[str, Writer], tuple[str, ...]]:
    """The writers by sublayer name in the order of computation, and the sublayers before the MLP (`Layer.middle`).

    A writer mixes positions if its output at later positions changes with the stream at position 0, while the outputs
    of the other writers are pinned.
    """
    assert call.given is not None
    order = sorted(factors, key=lambda path: inner[path].order)
    base = {path: inner[path].gave for path in order}
    stream = call.given
    noise = torch.randn(stream.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(
        stream
    )
    first = torch.zeros_like(stream)
    first[:, 0] = noise[:, 0]
    mixes = {}
    for path in order:
        others = {p: g for p, g in base.items() if p != path and g is not None}
        new = called(block, call, stream + first, others, [path])[path].reshape(stream.shape)
        old = inner[path].gave
        assert old is not None
        mixes[path] = not close(new[:, 1:], old.reshape(stream.shape)[:, 1:], COMPUTED)
    attends = [path for path in order if inner[path].noted.stop > inner[path].noted.start]
    mixing = sorted((path for path in order if mixes[path]), key=lambda path: path not in attends)
    pointwise = [path for path in order if not mixes[path]]
    if len(order) == 1:
        names = {"attn_out": order[0]}
    elif not mixing:
        names = {"attn_out": order[0], "mlp_out": order[1]}
    elif not pointwise:
        names = {"attn_out": mixing[0], "mlp_out": mixing[1]}
    else:
        names = {"attn_out": mixing[0], "mlp_out": pointwise[0]}
    more = [path for path in order if path not in names.values()]
    if more:
        names["more_out"] = more[0]
    names = dict(sorted(names.items(), key=lambda item: inner[item[1]].order))
    by_sublayer = {name: Writer(path, factors[path], mixes[path]) for name, path in names.items()}
    return by_sublayer, _middle_sublayers(block, call, base, by_sublayer, noise)


def _middle_sublayers(
    block: nn.Module,
    call: Call,
    base: Mapping[str, Tensor | None],
    by_sublayer: Mapping[str, Writer],
    noise: Tensor,
) -> tuple[str, ...]:
    """The sublayers before the MLP if the MLP reads only the block's input plus their outputs; else none.

    The MLP's output must stay the same if noise is added to the block's input and subtracted from the output of the
    last of these sublayers, and must change if it is only subtracted.
    """
    if "mlp_out" not in by_sublayer or "attn_out" not in by_sublayer or call.given is None:
        return ()
    before = tuple(itertools.takewhile(lambda name: name != "mlp_out", by_sublayer))
    if not before:
        return ()
    mlp, pinned = (
        by_sublayer["mlp_out"].path,
        {w.path: base[w.path] for n, w in by_sublayer.items() if n in before},
    )
    old = base[mlp]
    last = by_sublayer[before[-1]]
    pins = {path: value for path, value in pinned.items() if value is not None}
    shifted = {**pins, last.path: pins[last.path].reshape(noise.shape) - noise / last.factor}
    compensated = called(block, call, call.given + noise, shifted, [mlp])[mlp]
    uncompensated = called(block, call, call.given, shifted, [mlp])[mlp]
    assert old is not None
    return before if close(compensated, old, COMPUTED * 10) and not close(uncompensated, old, 1e-3) else ()


def output_map(block: nn.Module, inner: Mapping[str, Call], core: Tensor) -> tuple[str, bool] | None:
    """Path of the last linear map whose output is `core`, and whether its matrix is stored as `[in, out]`."""
    last = sorted(inner.items(), key=lambda item: -item[1].order)
    for path, call in last:
        if call.gave is None or call.given is None or call.gave.numel() != core.numel():
            continue
        if not torch.equal(call.gave.reshape(core.shape), core):
            continue
        module = block.get_submodule(path)
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
            continue
        for transposed in (False, True):
            view = LinearView(module, transposed)
            if view.weight.shape != (call.gave.shape[-1], call.given.shape[-1]):
                continue
            output = call.given @ view.weight.T
            if close(output if view.bias is None else output + view.bias, call.gave, COMPUTED):
                return path, transposed
    return None


def explored_layer(
    network: nn.Module, plan: NetworkPlan, calls: Calls, index: int, noted: Sequence[Attended]
) -> Layer:
    """The structure of one block: its writers, its output map, its attention call."""
    root = plan.root(index)
    block, call = network.get_submodule(root), calls[root][0]
    assert call.given is not None and call.gave is not None
    inner = {
        path.removeprefix(f"{root}."): runs[0]
        for path, runs in calls.items()
        if path.startswith(f"{root}.") and len(runs) == 1
    }
    factors = writers(inner, call.gave - call.given)
    seen = replace(noted[0], calls=len(noted)) if noted else None
    if factors is None:
        why = "no modules were found whose outputs sum to what it adds"
        lost = ("hook_attn_out", "hook_mlp_out", "hook_resid_mid", "attn.hook_z", "attn.hook_result")
        return Layer(attended=seen, reasons=dict.fromkeys(lost, why))
    by_sublayer, middle = named_writers(block, call, inner, factors)
    reasons: dict[str, str] = {}
    cores: dict[str, Tensor] = {}
    for name, writer in by_sublayer.items():
        writer_call = inner[writer.path]
        assert writer_call.gave is not None
        kind = (
            None
            if writer_call.given is None
            else norm_of(block.get_submodule(writer.path), writer_call.given, writer_call.gave)
        )
        if kind is not None and writer_call.given is not None:
            by_sublayer[name] = replace(writer, norm=kind)
            cores[name] = writer_call.given
        else:
            cores[name] = writer_call.gave
    output = (
        output_map(block, inner, cores["attn_out"].reshape(call.given.shape))
        if "attn_out" in by_sublayer
        else None
    )
    mlp = (
        output_map(block, inner, cores["mlp_out"].reshape(call.given.shape))
        if "mlp_out" in by_sublayer
        else None
    )
    if output is None:
        reasons["attn.hook_z"] = "no linear map was found whose output is what mixing positions adds"
    width = 0 if mlp is None or (given := inner[mlp[0]].given) is None else given.shape[-1]
    if output is None:
        return Layer(by_sublayer, middle, mlp_width=width, attended=seen, reasons=reasons)
    path, transposed = output
    read = inner[path].given
    assert read is not None
    return Layer(
        by_sublayer,
        middle,
        path,
        transposed,
        path.rpartition(".")[0] or None,
        read.shape[-1],
        width,
        seen,
        reasons,
    )


# --- before and after the blocks ------------------------------------------------------------------------------------


def fitted(target: Tensor, base: Tensor) -> float | None:
    """The positive factor c with `target = c * base`; None if there is none."""
    c = float((target * base).sum() / base.square().sum().clamp_min(torch.finfo(base.dtype).tiny))
    c = float(f"{c:.7g}")
    return c if c > 0 and close(c * base, target, COMPUTED) else None


def embeddings(
    network: nn.Module, plan: NetworkPlan, calls: Calls, tokens: Int[Tensor, "b p"]
) -> NetworkPlan:
    """The plan with the embedding modules, if their outputs were found to sum to the first block's input."""
    start = calls[plan.root(0)][0]
    stream = start.given
    table = network.get_input_embeddings()  # type: ignore[operator]
    path = next((name for name, m in network.named_modules() if m is table), "")
    weight = getattr(table, "weight", None)
    module_calls = calls.get(path, [])
    assert stream is not None
    if (
        not isinstance(weight, Tensor)
        or weight.ndim != 2
        or weight.shape[1] != stream.shape[-1]
        or len(module_calls) != 1
    ):
        return plan
    rows, gave = weight[tokens], module_calls[0].gave
    inside = None if gave is None else fitted(gave, rows)
    if inside is None or gave is None:
        return plan
    early = {
        name: runs[0]
        for name, runs in calls.items()
        if name and len(runs) == 1 and runs[0].order < start.order and not name.startswith(f"{plan.blocks}.")
    }
    for target, norm in _embedding_sum_candidates(network, early, stream, plan.norm):
        for place, added in _position_candidates(network, early, path, rows):
            outside = fitted(target - added, gave)
            if outside is not None:
                offset = _position_offset(network, place, added)
                if place is not None and offset is None:
                    continue
                return replace(
                    plan, embed=path, embed_scale=float(f"{inside * outside:.7g}"), embed_factor=outside,
                    place=place, place_offset=offset or 0, embed_norm=norm,
                )  # fmt: skip
    return plan


def _embedding_sum_candidates(
    network: nn.Module, early: Mapping[str, Call], stream: Tensor, kind: Norm
) -> Iterator[tuple[Tensor, str | None]]:
    """Candidates for the sum of embeddings: the first block's input, or the input of a norm that gives it."""
    yield stream, None
    for name, call in early.items():
        if call.given is None or call.gave is None or call.given.shape != stream.shape:
            continue
        same = call.gave.shape == stream.shape and torch.equal(call.gave, stream)
        if same and norm_of(network.get_submodule(name), call.given, stream) == kind:
            yield call.given, name


def _position_candidates(
    network: nn.Module, early: Mapping[str, Call], embed: str, rows: Tensor
) -> Iterator[tuple[str | None, Tensor]]:
    """Candidates for position embeddings: none (zeros), or the output of an embedding table besides the tokens'."""
    yield None, torch.zeros_like(rows[:1])
    for name, call in early.items():
        table = getattr(network.get_submodule(name), "weight", None)
        if name == embed or call.gave is None or not isinstance(table, Tensor) or table.ndim != 2:
            continue
        if call.gave.shape[-2:] == rows.shape[-2:] and call.gave.numel() in (rows.numel(), rows[0].numel()):
            yield name, call.gave.reshape(-1, *rows.shape[1:])


def _position_offset(network: nn.Module, place: str | None, added: Tensor) -> int | None:
    """The row of the position table that belongs to position 0; None if its rows were not added in order."""
    if place is None:
        return None
    table, n = network.get_parameter(f"{place}.weight"), added.shape[1]
    return next((k for k in range(5) if torch.equal(table[k : k + n], added[0])), None)


def numbers(values: object) -> Iterator[float]:
    """Every positive number in a config, nested ones included."""
    for value in (
        values.values() if isinstance(values, Mapping) else values if isinstance(values, list) else ()
    ):
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            yield float(value)
        elif isinstance(value, Mapping | list):
            yield from numbers(value)


def head(network: nn.Module, plan: NetworkPlan, calls: Calls, logits: Float[Tensor, "b p v"]) -> NetworkPlan:
    """The plan with the map from the final stream to the logits, where it was found.

    The map is a norm and a linear map, in some networks with a `Transform` between them.
    """
    module = network.get_output_embeddings()  # type: ignore[operator]
    path = next((name for name, m in network.named_modules() if m is module), "")
    module_calls = calls.get(path, [])
    if module is None or len(module_calls) != 1 or module_calls[0].given is None:
        return replace(plan, reasons={**plan.reasons, "ln_final.hook_scale": "no linear head was found"})
    for candidate, normed in _final_norm_candidates(network, plan, calls, module_calls[0]):
        for transform, read in _transform_candidates(network, calls, module_calls[0].given, normed):
            view = LinearView(module, transposed=False)
            if not isinstance(getattr(module, "weight", None), nn.Parameter) or (
                view.weight.shape[-1] != read.shape[-1]
            ):
                continue
            raw = read @ view.weight.T
            raw = raw if view.bias is None else raw + view.bias
            if raw.shape != logits.shape:
                continue
            ends = replace(candidate, head=path, transform=transform)
            if (scale := fitted(logits, raw)) is not None:
                return replace(ends, logit_scale=scale)
            for cap in dict.fromkeys(numbers(network.config.to_dict())):  # type: ignore[operator, union-attr]
                if close(cap * (raw / cap).tanh(), logits, COMPUTED):
                    return replace(ends, softcap=cap)
    why = "the logits are not a norm and a linear map of the last stream"
    return replace(plan, reasons={**plan.reasons, "ln_final.hook_scale": why})


def _final_norm_candidates(
    network: nn.Module, plan: NetworkPlan, calls: Calls, last: Call
) -> Iterator[tuple[NetworkPlan, Float[Tensor, "b p d"]]]:
    """Plans with a candidate for the final norm, each with that norm's output; without blocks also with a `reader`."""
    if plan.layers:
        stream = calls[plan.root(len(plan.layers) - 1)][0]
        if stream.gave is not None:
            for name, kind, normed in _norms_of_stream(network, calls, stream.gave, stream.order):
                yield replace(plan, final_norm=name, norm=kind), normed
        return
    for name, kind, given, normed in _norms_before_unembedding(network, calls, last):
        width = given.shape[-1]
        yield replace(plan, final_norm=name, norm=kind, reader=name, width=width), normed
    unembedding = next(name for name, runs in calls.items() if runs[-1] is last)
    if last.given is not None and last.given.ndim == 3:
        yield replace(plan, reader=unembedding, width=last.given.shape[-1]), last.given


def _norms_of_stream(
    network: nn.Module, calls: Calls, stream: Float[Tensor, "b p d"], order: int
) -> Iterator[tuple[str | None, Norm, Tensor]]:
    """Path, kind and output of each norm of `stream`; last the stream itself without a norm."""
    for name, call in ((name, runs[-1]) for name, runs in calls.items()):
        if call.order < order or call.given is None or call.gave is None:
            continue
        if call.given.shape == stream.shape and torch.equal(call.given, stream) and name:
            kind = norm_of(network.get_submodule(name), call.given, call.gave)
            if kind is not None:
                yield name, kind, call.gave
    yield None, NoNorm(), stream


def _norms_before_unembedding(
    network: nn.Module, calls: Calls, last: Call
) -> Iterator[tuple[str, Norm, Tensor, Tensor]]:
    """Path, kind, input and output of each norm that ran once and whose output a later module reads."""
    for name, runs in calls.items():
        call = runs[-1]
        if len(runs) != 1 or call.order > last.order or call.given is None or call.gave is None or not name:
            continue
        if call.given.ndim != 3 or call.gave.shape != call.given.shape:
            continue
        read = [
            later for many in calls.values() for later in many
            if later.given is not None and later.order > call.order and later.given.shape == call.gave.shape
            and torch.equal(later.given, call.gave)
        ]  # fmt: skip
        if read and (kind := norm_of(network.get_submodule(name), call.given, call.gave)) is not None:
            yield name, kind, call.given, call.gave


def _transform_candidates(
    network: nn.Module, calls: Calls, read: Tensor, normed: Float[Tensor, "b p d"]
) -> Iterator[tuple[Transform | None, Tensor]]:
    """Candidates for the map from `normed`, the final norm's output, to `read`, the input of the unembedding.

    None (the two are one), or a linear map of `normed`, an activation and a norm.
    """
    yield None, normed
    norms = {name: runs[0] for name, runs in calls.items() if len(runs) == 1 and _gives(runs[0], read)}
    maps = {name: runs[0] for name, runs in calls.items() if len(runs) == 1 and _reads(runs[0], normed)}
    for (name, norm), (dense, call) in itertools.product(norms.items(), maps.items()):
        module = network.get_submodule(dense)
        view = LinearView(module, transposed=False)
        weight = getattr(module, "weight", None)
        if norm.given is None or call.gave is None or call.gave.shape != norm.given.shape:
            continue
        if not isinstance(weight, nn.Parameter) or weight.shape != (call.gave.shape[-1], normed.shape[-1]):
            continue
        output = normed @ view.weight.T
        kind = norm_of(network.get_submodule(name), norm.given, read)
        if kind is None or not close(
            output if view.bias is None else output + view.bias, call.gave, COMPUTED
        ):
            continue
        act = _nearest_activation(call.gave, norm.given)
        if act is not None:
            yield Transform(dense, act, name, kind), read


def _gives(call: Call, value: Tensor) -> bool:
    return call.gave is not None and call.gave.shape == value.shape and torch.equal(call.gave, value)


def _reads(call: Call, value: Tensor) -> bool:
    return call.given is not None and call.given.shape == value.shape and torch.equal(call.given, value)


def _nearest_activation(given: Tensor, gave: Tensor) -> Activation | None:
    """The known activation f with `gave = f(given)`, the one with the least error; None if none agrees."""
    errors = {name: float((ours(given) - gave).abs().max()) for name, ours in ACTIVATIONS.items()}
    name = min(errors, key=errors.__getitem__)
    known = cast("Activation", name)
    return known if close(ACTIVATIONS[name](given), gave, COMPUTED) else None


@torch.no_grad()
def explored(network: nn.Module, tokens: Int[Tensor, "b p"], original: str) -> tuple[NetworkPlan, Tensor]:
    """The structure of a network, and its logits.

    Raises:
        UnknownNetworkError: a network without logits of each token.
    """
    run = Running(original, written_out=True, noted=[])
    calls, logits = recorded(network, tokens, run)
    if logits.shape[:2] != tokens.shape:
        raise UnknownNetworkError(
            f"its output has shape {list(logits.shape)}, which is not a logit for each token"
        )
    plan = found_blocks(network, calls, tokens.shape)
    if plan.blocks is None:
        return _plan_without_blocks(network, calls, logits, NO_BLOCKS), logits
    noted = run.noted or []
    layers = tuple(
        explored_layer(network, plan, calls, i, noted[calls[plan.root(i)][0].noted])
        for i in range(len(plan.members))
    )
    plan = head(network, replace(plan, layers=layers), calls, logits)
    if plan.head is None:
        return _plan_without_blocks(network, calls, logits, plan.reasons["ln_final.hook_scale"]), logits
    plan = embeddings(network, plan, calls, tokens)
    changed, _ = recorded(network, another(network, tokens, 0), Running(original, written_out=True, noted=[]))
    changed_input, plain_input = changed[plan.root(0)][0].given, calls[plan.root(0)][0].given
    assert changed_input is not None and plain_input is not None
    if plan.embed is None and not torch.equal(changed_input[:, 1:], plain_input[:, 1:]):
        return _plan_without_blocks(network, calls, logits, EARLIER), logits
    return plan, logits


def _plan_without_blocks(
    network: nn.Module, calls: Calls, logits: Float[Tensor, "b p v"], why: str
) -> NetworkPlan:
    """The plan without blocks: only the final stream and how logits are read from it."""
    return head(network, NetworkPlan(None, reasons={"blocks": why}), calls, logits)


def another(network: nn.Module, tokens: Int[Tensor, "b p"], column: int) -> Int[Tensor, "b p"]:
    """The tokens with each id in one column replaced by another id, never by the padding id."""
    changed, count = tokens.clone(), int(tokens.max() + 1)
    changed[:, column] = without_padding(network, (changed[:, column] + 1) % count, count)
    return changed


def without_padding(network: nn.Module, tokens: Int[Tensor, "*n"], count: int) -> Int[Tensor, "*n"]:
    """The tokens with the padding id replaced by the next id, since some networks give padding no position."""
    config = network.config.get_text_config()  # type: ignore[operator, union-attr]
    pad = getattr(config, "pad_token_id", None)
    return tokens if pad is None else torch.where(tokens == pad, (tokens + 1) % count, tokens)
