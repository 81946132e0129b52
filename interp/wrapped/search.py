"""The structure of a network, found by looking at one pass of it: no family is known by name.

A hypothesis (these modules write to the stream, this is the embedding's factor) is accepted only where it reproduces
numbers; what is found is a `NetworkPlan`, and the reason for everything that was not.
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
"""Allowed between a sum of recorded tensors and the tensor it should be, relative to the largest number in it."""
NO_BLOCKS = (
    "no list of blocks was found of which each is given the residual stream [batch, pos, d_model] that the one "
    "before gave"
)
EARLIER = "what enters its first block mixes positions: the blocks before it were not found"
COMPUTED = 2e-5
"""Allowed where norms or softmaxes are computed again: networks compute them in float32 whatever their dtype."""


@dataclass(frozen=True)
class Call:
    """Inputs and output of one call of a module, copied at once: some modules write into their inputs."""

    order: int
    args: tuple[ModuleValue, ...]
    kwargs: Mapping[str, ModuleValue]
    given: Tensor | None
    gave: Tensor | None
    in_tuple: bool
    noted: slice
    """Which of the notes of attention were made inside."""


Calls = Mapping[str, list[Call]]


@dataclass(frozen=True)
class Writer:
    """A module of a block that adds its output, times a factor, to the stream."""

    path: str
    factor: float = 1.0
    mixes: bool = False
    """Whether it sees other positions."""
    norm: Norm | None = None
    """Record of the norm, if the module norms the output of another one."""


@dataclass(frozen=True)
class Layer:
    """The structure of one block; paths are relative to it."""

    writers: Mapping[str, Writer] = field(default_factory=dict)
    """Modules that add to the stream by sublayer, in the order in which they are computed."""
    middle: tuple[str, ...] = ()
    """Sublayers with outputs that the MLP reads, together with what entered the block."""
    output: str | None = None
    """The last linear map of what mixes positions."""
    transposed: bool = False
    """Whether its matrix is stored `[in, out]`."""
    mixer: str | None = None
    """The module around it."""
    z_width: int = 0
    mlp_width: int = 0
    attended: Attended | None = None
    """The call by which its attention uses the registry; None where it uses none."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why something was not found, by the names of sites."""


@dataclass(frozen=True)
class Transform:
    """A map between the last stream and the unembedding of some networks: a linear map, an activation, a norm."""

    dense: str
    """The linear map, with its matrix stored as `[out, in]`."""
    act: Activation
    norm: str
    kind: Norm


@dataclass(frozen=True)
class NetworkPlan:
    """The structure of a network; paths are relative to it."""

    blocks: str | None
    """The list of blocks; None where no list was found of which each is given what the one before gave."""
    members: tuple[int, ...] = ()
    """Which modules of the list run on tokens, in order: blocks that only images would run are no layers."""
    in_tuple: bool = False
    """Whether blocks give a tuple that begins with the stream."""
    width: int = 0
    """Width of the residual stream."""
    layers: tuple[Layer, ...] = ()
    embed: str | None = None
    embed_scale: float = 1.0
    """Factor between rows of the embedding matrix and what they add to the stream."""
    embed_factor: float = 1.0
    """Factor between what the embedding module gives and what it adds to the stream."""
    place: str | None = None
    """The module of learned positions, with the row for position i at `i + place_offset`."""
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
    """Where there are no blocks: the module that is given the final stream, from which the logits are read."""
    reasons: Mapping[str, str] = field(default_factory=dict)

    def root(self, layer: int) -> str:
        """The path of the block that is this layer."""
        return f"{self.blocks}.{self.members[layer]}"


class UnknownNetworkError(ValueError):
    """A network in which no residual stream was found; the message says what was looked for."""


def close(found: Tensor, wanted: Tensor, allowed: float | None = None) -> bool:
    """Whether two tensors are equal to rounding, relative to the largest number wanted."""
    if found.shape != wanted.shape or not bool(found.isfinite().all()):
        return False
    allowed = EQUAL[wanted.dtype] if allowed is None else allowed
    return bool((found - wanted).abs().max() <= allowed * wanted.abs().max())


@torch.no_grad()
def recorded(
    network: nn.Module, tokens: Int[Tensor, "b p"], run: Running, **inputs: ModuleValue
) -> tuple[Calls, Tensor]:
    """Every call of every module in one pass, by path, and the logits."""
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
                pair = isinstance(out, tuple | list)
                one = Call(next(counter), args, kwargs, given, gave.clone(), pair, inside)
                calls.setdefault(path, []).append(one)

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
    """The list of modules each of which is given what the one before gave, and whether they give tuples.

    Modules that did not run are left out. Without such a list the plan has no blocks, and says so.
    """
    lists = [(name, m) for name, m in network.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    for name, members in sorted(lists, key=lambda pair: (pair[0].count("."), -len(pair[1]))):
        each = {i: calls.get(f"{name}.{i}", []) for i in range(len(members))}
        ran = {i: one for i, one in each.items() if one}
        if not ran or any(len(one) != 1 for one in ran.values()):
            continue
        chain = [one[0] for one in ran.values()]
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
    """The norm that a module is, or None; compared at two sizes of its input, so that eps is seen."""
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
            ours = _plain(kind, given)
        if close(ours(given), gave, COMPUTED):
            theirs = first_tensor(module.forward(small))
            if theirs is not None and close(ours(small), theirs, COMPUTED):
                return kind
    return None


def _plain(kind: Norm, like: Tensor) -> Normalize:
    return Normalize(kind, like.shape[-1], "norm").to(like)


# --- what a block adds ----------------------------------------------------------------------------------------------


def writers(calls: Mapping[str, Call], change: Float[Tensor, "b p d"]) -> dict[str, float] | None:
    """The smallest set of modules with outputs that sum to a block's change of the stream; then with one factor each.

    Of modules that give the same the outermost counts, with parameters before one without.
    """
    shaped: dict[str, Tensor] = {}
    for path, call in sorted(calls.items(), key=lambda item: (item[0].count("."), item[1].order)):
        if call.gave is not None and call.gave.numel() == change.numel():
            value = call.gave.reshape(change.shape)
            if bool(value.any()) and not any(torch.equal(value, other) for other in shaped.values()):
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
            found = torch.linalg.lstsq(columns, change.flatten()[:, None]).solution[:, 0]
            missed = (columns @ found - change.flatten()).abs().max()
            if float(missed) <= scale and bool((found > 1e-3).all()):
                return {p: float(f"{float(f):.7g}") for p, f in zip(chosen, found, strict=True)}
    return None


@torch.no_grad()
def called(
    block: nn.Module, call: Call, stream: Tensor, pinned: Mapping[str, Tensor], names: Sequence[str]
) -> dict[str, Tensor]:
    """The outputs of some modules of a block called by itself on a stream, with the outputs of others pinned."""
    found: dict[str, Tensor] = {}
    handles = []

    def hook(path: str) -> object:
        def change(module: nn.Module, args: ModuleValue, out: ModuleValue) -> ModuleValue:
            gave = first_tensor(out)
            assert gave is not None
            found[path] = gave.clone()
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
    return found


def named_writers(
    block: nn.Module, call: Call, inner: Mapping[str, Call], factors: Mapping[str, float]
) -> tuple[dict[str, Writer], tuple[str, ...]]:
    """The writers by sublayer in the order of computation, and those that the MLP reads the stream after.

    What mixes positions is told by a change of the stream at the first column, while the other writers are held.
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
    rest = [path for path in order if not mixes[path]]
    if len(order) == 1:
        names = {"attn_out": order[0]}
    elif not mixing:
        names = {"attn_out": order[0], "mlp_out": order[1]}
    elif not rest:
        names = {"attn_out": mixing[0], "mlp_out": mixing[1]}
    else:
        names = {"attn_out": mixing[0], "mlp_out": rest[0]}
    more = [path for path in order if path not in names.values()]
    if more:
        names["more_out"] = more[0]
    names = dict(sorted(names.items(), key=lambda item: inner[item[1]].order))
    found = {name: Writer(path, factors[path], mixes[path]) for name, path in names.items()}
    return found, _middle(block, call, base, found, noise)


def _middle(
    block: nn.Module,
    call: Call,
    base: Mapping[str, Tensor | None],
    found: Mapping[str, Writer],
    noise: Tensor,
) -> tuple[str, ...]:
    """The writers before the MLP if it reads nothing but the sum of them and what entered the block, else none.

    Noise is added to what enters the block and taken from what the last of them adds: the MLP must not notice; and it
    must notice if it is added only.
    """
    if "mlp_out" not in found or "attn_out" not in found or call.given is None:
        return ()
    before = tuple(itertools.takewhile(lambda name: name != "mlp_out", found))
    if not before:
        return ()
    mlp, pinned = found["mlp_out"].path, {w.path: base[w.path] for n, w in found.items() if n in before}
    old = base[mlp]
    last = found[before[-1]]
    pins = {path: value for path, value in pinned.items() if value is not None}
    shifted = {**pins, last.path: pins[last.path].reshape(noise.shape) - noise / last.factor}
    same = called(block, call, call.given + noise, shifted, [mlp])[mlp]
    other = called(block, call, call.given, shifted, [mlp])[mlp]
    assert old is not None
    return before if close(same, old, COMPUTED * 10) and not close(other, old, 1e-3) else ()


def output_map(block: nn.Module, inner: Mapping[str, Call], core: Tensor) -> tuple[str, bool] | None:
    """The last linear map with the output `core`, and whether its matrix is stored as `[in, out]`."""
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
            made = call.given @ view.weight.T
            if close(made if view.bias is None else made + view.bias, call.gave, COMPUTED):
                return path, transposed
    return None


def explored_layer(
    network: nn.Module, plan: NetworkPlan, calls: Calls, index: int, noted: Sequence[Attended]
) -> Layer:
    """The structure of one block."""
    root = plan.root(index)
    block, call = network.get_submodule(root), calls[root][0]
    assert call.given is not None and call.gave is not None
    inner = {
        path.removeprefix(f"{root}."): one[0]
        for path, one in calls.items()
        if path.startswith(f"{root}.") and len(one) == 1
    }
    factors = writers(inner, call.gave - call.given)
    seen = replace(noted[0], calls=len(noted)) if noted else None
    if factors is None:
        why = "no modules were found whose outputs sum to what it adds"
        lost = ("hook_attn_out", "hook_mlp_out", "hook_resid_mid", "attn.hook_z", "attn.hook_result")
        return Layer(attended=seen, reasons=dict.fromkeys(lost, why))
    found, middle = named_writers(block, call, inner, factors)
    reasons: dict[str, str] = {}
    cores: dict[str, Tensor] = {}
    for name, writer in found.items():
        found_call = inner[writer.path]
        assert found_call.gave is not None
        kind = (
            None
            if found_call.given is None
            else norm_of(block.get_submodule(writer.path), found_call.given, found_call.gave)
        )
        if kind is not None and found_call.given is not None:
            found[name] = replace(writer, norm=kind)
            cores[name] = found_call.given
        else:
            cores[name] = found_call.gave
    output = (
        output_map(block, inner, cores["attn_out"].reshape(call.given.shape)) if "attn_out" in found else None
    )
    mlp = output_map(block, inner, cores["mlp_out"].reshape(call.given.shape)) if "mlp_out" in found else None
    if output is None:
        reasons["attn.hook_z"] = "no linear map was found whose output is what mixing positions adds"
    width = 0 if mlp is None or (given := inner[mlp[0]].given) is None else given.shape[-1]
    if output is None:
        return Layer(found, middle, mlp_width=width, attended=seen, reasons=reasons)
    path, transposed = output
    read = inner[path].given
    assert read is not None
    return Layer(
        found, middle, path, transposed, path.rpartition(".")[0] or None, read.shape[-1], width, seen, reasons
    )


# --- before and after the blocks ------------------------------------------------------------------------------------


def fitted(target: Tensor, base: Tensor) -> float | None:
    """The factor c with `target = c base`, or None."""
    c = float((target * base).sum() / base.square().sum().clamp_min(torch.finfo(base.dtype).tiny))
    c = float(f"{c:.7g}")
    return c if c > 0 and close(c * base, target, COMPUTED) else None


def embeddings(
    network: nn.Module, plan: NetworkPlan, calls: Calls, tokens: Int[Tensor, "b p"]
) -> NetworkPlan:
    """The plan with the embeddings, where they were found to sum to what enters the first block."""
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
        name: one[0]
        for name, one in calls.items()
        if name and len(one) == 1 and one[0].order < start.order and not name.startswith(f"{plan.blocks}.")
    }
    for target, norm in _before_norm(network, early, stream, plan.norm):
        for place, added in _places(network, early, path, rows):
            outside = fitted(target - added, gave)
            if outside is not None:
                offset = _offset(network, place, added)
                if place is not None and offset is None:
                    continue
                return replace(
                    plan, embed=path, embed_scale=float(f"{inside * outside:.7g}"), embed_factor=outside,
                    place=place, place_offset=offset or 0, embed_norm=norm,
                )  # fmt: skip
    return plan


def _before_norm(
    network: nn.Module, early: Mapping[str, Call], stream: Tensor, kind: Norm
) -> Iterator[tuple[Tensor, str | None]]:
    """Candidates for a sum of embeddings: the stream itself, or the input of a norm of the final one's kind."""
    yield stream, None
    for name, call in early.items():
        if call.given is None or call.gave is None or call.given.shape != stream.shape:
            continue
        same = call.gave.shape == stream.shape and torch.equal(call.gave, stream)
        if same and norm_of(network.get_submodule(name), call.given, stream) == kind:
            yield call.given, name


def _places(
    network: nn.Module, early: Mapping[str, Call], embed: str, rows: Tensor
) -> Iterator[tuple[str | None, Tensor]]:
    """Candidates for a term next to the token embeddings: nothing, or the output of another table."""
    yield None, torch.zeros_like(rows[:1])
    for name, call in early.items():
        table = getattr(network.get_submodule(name), "weight", None)
        if name == embed or call.gave is None or not isinstance(table, Tensor) or table.ndim != 2:
            continue
        if call.gave.shape[-2:] == rows.shape[-2:] and call.gave.numel() in (rows.numel(), rows[0].numel()):
            yield name, call.gave.reshape(-1, *rows.shape[1:])


def _offset(network: nn.Module, place: str | None, added: Tensor) -> int | None:
    """The row of the table of positions that belongs to position 0."""
    if place is None:
        return None
    table, n = network.get_parameter(f"{place}.weight"), added.shape[1]
    return next((k for k in range(5) if torch.equal(table[k : k + n], added[0])), None)


def numbers(values: object) -> Iterator[float]:
    """Every positive number of a config."""
    for value in (
        values.values() if isinstance(values, Mapping) else values if isinstance(values, list) else ()
    ):
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            yield float(value)
        elif isinstance(value, Mapping | list):
            yield from numbers(value)


def head(network: nn.Module, plan: NetworkPlan, calls: Calls, logits: Float[Tensor, "b p v"]) -> NetworkPlan:
    """The plan with the map from the last stream to the logits, where it was found.

    The map is a norm and a linear map, in some networks with another map between them.
    """
    module = network.get_output_embeddings()  # type: ignore[operator]
    path = next((name for name, m in network.named_modules() if m is module), "")
    module_calls = calls.get(path, [])
    if module is None or len(module_calls) != 1 or module_calls[0].given is None:
        return replace(plan, reasons={**plan.reasons, "ln_final.hook_scale": "no linear head was found"})
    for found, normed in _ends(network, plan, calls, module_calls[0]):
        for transform, read in _transforms(network, calls, module_calls[0].given, normed):
            view = LinearView(module, transposed=False)
            if not isinstance(getattr(module, "weight", None), nn.Parameter) or (
                view.weight.shape[-1] != read.shape[-1]
            ):
                continue
            raw = read @ view.weight.T
            raw = raw if view.bias is None else raw + view.bias
            if raw.shape != logits.shape:
                continue
            ends = replace(found, head=path, transform=transform)
            if (scale := fitted(logits, raw)) is not None:
                return replace(ends, logit_scale=scale)
            for cap in dict.fromkeys(numbers(network.config.to_dict())):  # type: ignore[operator, union-attr]
                if close(cap * (raw / cap).tanh(), logits, COMPUTED):
                    return replace(ends, softcap=cap)
    why = "the logits are not a norm and a linear map of the last stream"
    return replace(plan, reasons={**plan.reasons, "ln_final.hook_scale": why})


def _ends(
    network: nn.Module, plan: NetworkPlan, calls: Calls, last: Call
) -> Iterator[tuple[NetworkPlan, Float[Tensor, "b p d"]]]:
    """Candidates for the final norm, and its output; without blocks also for the final stream."""
    if plan.layers:
        stream = calls[plan.root(len(plan.layers) - 1)][0]
        if stream.gave is not None:
            for name, kind, normed in _final_norms(network, calls, stream.gave, stream.order):
                yield replace(plan, final_norm=name, norm=kind), normed
        return
    for name, kind, given, normed in _last_norms(network, calls, last):
        width = given.shape[-1]
        yield replace(plan, final_norm=name, norm=kind, reader=name, width=width), normed
    unembedding = next(name for name, one in calls.items() if one[-1] is last)
    if last.given is not None and last.given.ndim == 3:
        yield replace(plan, reader=unembedding, width=last.given.shape[-1]), last.given


def _final_norms(
    network: nn.Module, calls: Calls, stream: Float[Tensor, "b p d"], order: int
) -> Iterator[tuple[str | None, Norm, Tensor]]:
    for name, call in ((name, one[-1]) for name, one in calls.items()):
        if call.order < order or call.given is None or call.gave is None:
            continue
        if call.given.shape == stream.shape and torch.equal(call.given, stream) and name:
            kind = norm_of(network.get_submodule(name), call.given, call.gave)
            if kind is not None:
                yield name, kind, call.gave
    yield None, NoNorm(), stream


def _last_norms(network: nn.Module, calls: Calls, last: Call) -> Iterator[tuple[str, Norm, Tensor, Tensor]]:
    """The norms that ran once and give what the unembedding is given, or what a map before it is."""
    for name, one in calls.items():
        call = one[-1]
        if len(one) != 1 or call.order > last.order or call.given is None or call.gave is None or not name:
            continue
        if call.given.ndim != 3 or call.gave.shape != call.given.shape:
            continue
        read = [
            other for many in calls.values() for other in many
            if other.given is not None and other.order > call.order and other.given.shape == call.gave.shape
            and torch.equal(other.given, call.gave)
        ]  # fmt: skip
        if read and (kind := norm_of(network.get_submodule(name), call.given, call.gave)) is not None:
            yield name, kind, call.given, call.gave


def _transforms(
    network: nn.Module, calls: Calls, read: Tensor, normed: Float[Tensor, "b p d"]
) -> Iterator[tuple[Transform | None, Tensor]]:
    """Candidates for the map between the last stream and `read`, the input of the unembedding.

    Nothing, or a linear map of the stream, an activation and a norm.
    """
    yield None, normed
    norms = {name: one[0] for name, one in calls.items() if len(one) == 1 and _gives(one[0], read)}
    maps = {name: one[0] for name, one in calls.items() if len(one) == 1 and _reads(one[0], normed)}
    for (name, norm), (dense, call) in itertools.product(norms.items(), maps.items()):
        module = network.get_submodule(dense)
        view = LinearView(module, transposed=False)
        weight = getattr(module, "weight", None)
        if norm.given is None or call.gave is None or call.gave.shape != norm.given.shape:
            continue
        if not isinstance(weight, nn.Parameter) or weight.shape != (call.gave.shape[-1], normed.shape[-1]):
            continue
        made = normed @ view.weight.T
        kind = norm_of(network.get_submodule(name), norm.given, read)
        if kind is None or not close(made if view.bias is None else made + view.bias, call.gave, COMPUTED):
            continue
        act = _activation(call.gave, norm.given)
        if act is not None:
            yield Transform(dense, act, name, kind), read


def _gives(call: Call, value: Tensor) -> bool:
    return call.gave is not None and call.gave.shape == value.shape and torch.equal(call.gave, value)


def _reads(call: Call, value: Tensor) -> bool:
    return call.given is not None and call.given.shape == value.shape and torch.equal(call.given, value)


def _activation(given: Tensor, gave: Tensor) -> Activation | None:
    """The activation that made one of the other; of those that agree to rounding the nearest."""
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
        return _without_blocks(network, calls, logits, NO_BLOCKS), logits
    noted = run.noted or []
    layers = tuple(
        explored_layer(network, plan, calls, i, noted[calls[plan.root(i)][0].noted])
        for i in range(len(plan.members))
    )
    plan = head(network, replace(plan, layers=layers), calls, logits)
    if plan.head is None:
        return _without_blocks(network, calls, logits, plan.reasons["ln_final.hook_scale"]), logits
    plan = embeddings(network, plan, calls, tokens)
    changed, _ = recorded(network, another(network, tokens, 0), Running(original, written_out=True, noted=[]))
    changed_input, plain_input = changed[plan.root(0)][0].given, calls[plan.root(0)][0].given
    assert changed_input is not None and plain_input is not None
    if plan.embed is None and not torch.equal(changed_input[:, 1:], plain_input[:, 1:]):
        return _without_blocks(network, calls, logits, EARLIER), logits
    return plan, logits


def _without_blocks(
    network: nn.Module, calls: Calls, logits: Float[Tensor, "b p v"], why: str
) -> NetworkPlan:
    """The structure of a network without its blocks: the final stream, and how logits are read from it."""
    return head(network, NetworkPlan(None, reasons={"blocks": why}), calls, logits)


def another(network: nn.Module, tokens: Int[Tensor, "b p"], column: int) -> Int[Tensor, "b p"]:
    """The tokens with others in one column, none of them the one that stands for padding."""
    changed, count = tokens.clone(), int(tokens.max() + 1)
    changed[:, column] = without_padding(network, (changed[:, column] + 1) % count, count)
    return changed


def without_padding(network: nn.Module, tokens: Int[Tensor, "*n"], count: int) -> Int[Tensor, "*n"]:
    """The tokens with the next one in place of the one that stands for padding: some networks do not count it."""
    config = network.config.get_text_config()  # type: ignore[operator, union-attr]
    pad = getattr(config, "pad_token_id", None)
    return tokens if pad is None else torch.where(tokens == pad, (tokens + 1) % count, tokens)
