"""A model larger than one device: heads and neurons spread over processes; every site and weight looks whole.

`tensor_parallel` gives each process of a mesh its heads and its neurons of every block (Shoeybi et al. 2019, section
3); embeddings, norms and unembedding are on all of them. Inside a spread part run the ordinary modules of
`interp.model` on plain tensors, a process's own heads only, so that attention stays the fused kernel. A site that is
read or edited is gathered: its reads and edits see all heads under their global numbers, in plain tensors, and only an
edited site is cut again. Nothing that a user writes ever meets a sharded tensor, so an edit by index assignment is
right by construction.

Tensors pass between the processes by torch's DTensor (`Team`), which knows the gradient of each passage. DTensors in
the whole forward pass would not do (torch 2.13): the fused attention kernel of CPUs has no sharding strategy, writing
into a key/value cache fails, and assignment to a sharded head is silently lost.

All processes run the same script on the same data, and each gets every result, to the same bits:

    # script.py, started by `torchrun --nproc-per-node 2 script.py`
    import os
    import interp
    from torch.distributed.device_mesh import init_device_mesh
    from interp.runs.tensor_parallel import tensor_parallel

    model = interp.HookedTransformer.from_pretrained("path/to/model")   # on the host, in every process
    mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))   # "cpu" where there is no GPU
    tensor_parallel(model.transformer, mesh)
    result = interp.attribute(model, "The capital of France is", " Paris", parts="head")
    if mesh.get_rank() == 0:
        result.to_netcdf("heads.nc")
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from interp.model import sites
from interp.model.attention import Attention, PassState, View
from interp.model.block import FeedForward
from interp.model.config import MLP, ModelConfig, Softmax, UsualBlock
from interp.model.kv_cache import Past
from interp.model.norm import Normalize
from interp.model.tap import Scope
from interp.model.transformer import Transformer

SPREAD_AXES = "hgm"
"""The axes of sites that are split over the processes: query heads, key/value heads, neurons."""


def tensor_parallel(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """The model itself, changed in place: each process of `mesh` keeps its heads and neurons, on the mesh's device.

    To be called by every process of the mesh, with the same weights; blocks move to the device one by one, so that
    only the host ever holds the whole model. Afterwards everything that takes a model takes this one, in all processes
    together: passes, gradients, sweeps, generation, weights (reading one gathers it), `model_hash`. Numbers are those
    of one process to rounding, and the same bits in every process, so long as edits and metrics do the same
    everywhere: random ones need the same seed. Parameters are frozen; only their own gradients are not to be had.

    Example (the team is one process):
        >>> from torch.distributed import HashStore, destroy_process_group, init_process_group
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        >>> network = Transformer(model.cfg)
        >>> tensor_parallel(network, init_device_mesh("cpu", (1,))) is network
        True
        >>> destroy_process_group()

    Args:
        mesh: of one dimension; of a larger one take a part, `mesh["tensor"]`.

    Raises:
        ValueError: what `check_tensor_parallel` refuses, another mesh, a model that is spread already, or weights
            that differ between the processes.

    Caveats:
        Embeddings, unembedding and the key/value cache are whole in every process. Writing into a block's weights is
        not possible. On GPUs, give a `Sweep` its `memory`: by itself each process would plan by its own free memory.
        An error in one process only (out of memory) leaves the others waiting until the process group's timeout.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"a mesh of one dimension is required, got {mesh.ndim}: take one, such as mesh['tensor']"
        )
    check_tensor_parallel(model.config, mesh.size())
    blocks = [model.block(layer) for layer in range(model.config.n_layers)]
    if model.devices is not None or any(isinstance(block.attn, SpreadAttention) for block in blocks):
        raise ValueError("a model on one device is required, this one is spread already")
    team = Team(mesh)
    _check_same_weights(model, team)
    for block in blocks:
        block.attn = SpreadAttention(block.attn, model.config, team)
        if isinstance(block.mlp, FeedForward) and isinstance(model.config.mlp, MLP):
            block.mlp = SpreadFeedForward(block.mlp, model.config.mlp, team)
        block.to(mesh.device_type)
    return model.to(mesh.device_type).requires_grad_(False)


def check_tensor_parallel(config: ModelConfig, processes: int) -> None:
    """Raise ValueError unless a model of this config can be spread over `processes`; needs no process group.

    Heads, key/value heads and neurons must divide evenly. Mixtures of experts, MLPs with a convolution, Macaron blocks,
    cross-attention, attention sinks, blocks that share their weights, norms over all heads together or with a gamma for
    each (`qk_norm="width"`, `"each"`) and mixers other than plain softmax attention are not supported.

    Example:
        >>> check_tensor_parallel(model.cfg, 2)
    """
    unsupported = {
        f"mlp={config.mlp}": not isinstance(config.mlp, MLP | None),
        f"block={config.block}": config.block != UsualBlock(),
        "cross_attention=True": config.cross_attention,
        "sinks=True": config.sinks,
        "shared_blocks=True": config.shared_blocks,
        f"mixer={config.mixer}": config.mixer != Softmax(),
        f"qk_norm={config.qk_norm!r}": config.qk_norm in ("width", "each"),
    }
    if names := [name for name, present in unsupported.items() if present]:
        raise ValueError(f"tensor parallel does not support models with {', '.join(names)}")
    counts = {"n_heads": config.n_heads, "n_kv_heads": config.kv_heads}
    if isinstance(config.mlp, MLP):
        counts["d_mlp"] = config.mlp.d_mlp
    if processes < 1 or any(n % processes for n in counts.values()):
        common = gcd(*counts.values())
        possible = [n for n in range(1, common + 1) if common % n == 0]
        raise ValueError(
            f"tensor parallel requires a number of processes that divides {_counts_text(counts)}, got {processes}; "
            f"possible: {', '.join(map(str, possible))}"
        )


def _counts_text(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}={n}" for name, n in counts.items())


@dataclass(frozen=True, eq=False)
class Team:
    """The processes that share a model, and the collective operations between parts of a tensor and the whole tensor.

    Every operation is differentiable: outside the spread modules all processes have the whole gradient, inside
    each has that of its own part. All processes must call the same operations in the same order.
    """

    mesh: DeviceMesh

    def entered(self, x: Shaped[Tensor, "*s"]) -> Shaped[Tensor, "*s"]:
        """A tensor that all processes have, as the input of a spread module: its gradient is summed over processes."""
        return self._as(x, Replicate()).to_local(grad_placements=(Partial(),)) if x.requires_grad else x

    def summed(self, x: Shaped[Tensor, "*s"]) -> Shaped[Tensor, "*s"]:
        """The sum of the tensors of all processes (all-reduce)."""
        return self._as(x, Partial()).full_tensor()

    def gathered(self, x: Shaped[Tensor, "*own"], axis: int) -> Shaped[Tensor, "*whole"]:
        """The tensors of all processes, concatenated along an axis in the order of the processes (all-gather)."""
        return self._as(x, Shard(axis)).full_tensor()

    def own(self, x: Shaped[Tensor, "*whole"], axis: int) -> Shaped[Tensor, "*own"]:
        """This process's chunk, along an axis, of a tensor that all processes have; a view."""
        if x.requires_grad:
            return self._as(x, Replicate()).redistribute(placements=[Shard(axis)]).to_local()
        return x.chunk(self.mesh.size(), axis)[self.mesh.get_local_rank()]

    def _as(self, x: Tensor, placement: Placement) -> DTensor:
        return DTensor.from_local(x, self.mesh, [placement], run_check=False)


@dataclass(frozen=True, eq=False)
class Cut:
    """How a weight is split along an axis of sections (queries, keys, values); a process has a chunk of each."""

    team: Team
    axis: int
    sections: Sequence[int]

    def own(self, whole: Shaped[Tensor, "*whole"]) -> Shaped[Tensor, "*own"]:
        """A copy of this process's chunks of a whole weight, concatenated."""
        parts = whole.detach().split(list(self.sections), self.axis)
        return torch.cat([self.team.own(part, self.axis) for part in parts], self.axis)

    def whole(self, piece: Shaped[Tensor, "*own"]) -> Shaped[Tensor, "*whole"]:
        """The whole weight, gathered from the pieces of all processes."""
        pieces = self.team.gathered(piece.detach()[None], 0)
        sections = pieces.split([n // len(pieces) for n in self.sections], self.axis + 1)
        return torch.cat([part for section in sections for part in section], self.axis)


class Joined(nn.Linear):
    """A linear map split over the processes, whose `weight` and `bias` are whole to other code: gathered when read.

    Split along its outputs, the bias is split with it. Split along its inputs, the outputs of the processes are summed,
    and the bias, which every process keeps, is added once.
    """

    def __init__(self, whole: nn.Linear, cut: Cut) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.cut = whole.in_features, whole.out_features, cut
        self.added: Tensor | None = None if cut.axis == 0 else whole.bias
        spread = None if whole.bias is None or cut.axis == 1 else cut.own(whole.bias)
        self.own = _linear(cut.own(whole.weight), spread)
        """This process's piece of the map, an ordinary linear map."""
        self.register_state_dict_post_hook(_write_whole_state)  # type: ignore[no-untyped-call]

    @property
    def weight(self) -> Float[Tensor, "o i"]:  # type: ignore[override]
        """The whole matrix."""
        return self.cut.whole(self.own.weight)

    @property
    def bias(self) -> Float[Tensor, "o"] | None:  # type: ignore[override]
        """The whole bias, if there is one."""
        return self.added if self.own.bias is None else self.cut.whole(self.own.bias)

    def summed(self, parts: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """The whole map's output: the processes' outputs summed, plus the bias."""
        out = self.cut.team.summed(parts)
        return out if self.added is None else out + self.added


def _write_whole_state(joined: nn.Module, state: dict[str, Tensor], prefix: str, _: object) -> None:
    """State-dict hook: store the whole weight and bias under their usual names, as for a model in one process."""
    assert isinstance(joined, Joined)
    for name in [name for name, _ in joined.named_parameters()]:
        del state[prefix + name]
    state[f"{prefix}weight"], bias = joined.weight, joined.bias
    if bias is not None:
        state[f"{prefix}bias"] = bias


def _linear(weight: Float[Tensor, "o i"], bias: Float[Tensor, "o"] | None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


class SpreadAttention(Attention):
    """Attention with heads split over the processes; to other code, attention with all its heads."""

    def __init__(self, whole: Attention, config: ModelConfig, team: Team) -> None:
        n = team.mesh.size()
        with torch.device("meta"):
            super().__init__(config, whole.layer)
            own_heads = replace(config, n_heads=config.n_heads // n, n_kv_heads=config.kv_heads // n)
            local = Attention(own_heads, whole.layer)
        self.team = team
        widths = [count * self.d_head for count in self.heads]
        self.qkv = into = Joined(whole.qkv, Cut(team, 0, widths))
        self.out = out = Joined(whole.out, Cut(team, 1, widths[:1]))
        self.q_norm, self.k_norm = local.q_norm, local.k_norm = whole.q_norm, whole.k_norm
        local.qkv, local.out = into.own, out.own
        self._own = (local,)  # in a tuple, so that its modules are not registered twice

    def forward(
        self,
        x: Float[Tensor, "b p d"],
        source: tuple[Float[Tensor, "b p d"], Normalize],
        shared: PassState,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """z W_O + b_O, summed over the heads of all processes."""
        resid, norm = source
        inside = None if tap is None else Inside(tap, self.team)
        entered = self.team.entered(x), (self.team.entered(resid), norm)
        assert isinstance(self.out, Joined)
        return self.out.summed(self._own[0](*entered, _own_pass(shared, self.team), inside, only))


class SpreadFeedForward(FeedForward):
    """An MLP with neurons split over the processes; to other code, an MLP with all its neurons."""

    def __init__(self, whole: FeedForward, kind: MLP, team: Team) -> None:
        d_model = whole.into.in_features
        with torch.device("meta"):
            super().__init__(kind, d_model)
            local = FeedForward(replace(kind, d_mlp=kind.d_mlp // team.mesh.size()), d_model)
        self.team = team
        self.into = into = Joined(whole.into, Cut(team, 0, [kind.d_mlp] * (2 if kind.gated else 1)))
        self.out = out = Joined(whole.out, Cut(team, 1, [kind.d_mlp]))
        local.into, local.out = into.own, out.own
        self._own = (local,)  # as in attention

    def forward(self, x: Float[Tensor, "b p d"], tap: Scope | None = None) -> Float[Tensor, "b p d"]:
        """The MLP's output, summed over the neurons of all processes."""
        inside = None if tap is None else Inside(tap, self.team)
        assert isinstance(self.out, Joined)
        return self.out.summed(self._own[0](self.team.entered(x), inside))


class Inside(Scope):
    """A layer's scope inside a spread module: edits and reads see the gathered value, the pass goes on with this part.

    Sites that are neither read nor edited are not gathered; a value that was only read is not split again.
    """

    def __init__(self, scope: Scope, team: Team) -> None:
        self._scope, self._team = scope, team

    def wants(self, *names: str) -> bool:
        """Whether any of these sites is read or edited."""
        return self._scope.wants(*names)

    def alters(self, *names: str) -> bool:
        """Whether any of these sites is edited or differentiated."""
        return self._scope.alters(*names)

    def by_row(self, *names: str) -> bool:
        """False: a value that is gathered from all processes is visited as a whole."""
        return False

    @property
    def finished(self) -> bool:
        """Whether no later site of this pass is read or edited."""
        return self._scope.finished

    def visit(self, name: str, value: Tensor) -> Tensor:
        """This process's part of the value, after the edits and reads of the site on the whole value."""
        if not self.wants(name):
            return value
        axis = _spread_axis(name)
        whole = self._scope.visit(name, self._team.gathered(value, axis))
        return self._team.own(whole, axis) if self.alters(name) else value


def _spread_axis(name: str) -> int:
    """The index of the axis along which a block's site is split over the processes."""
    axes = sites.axes_of(f"blocks.0.{name}").split()
    return next(i for i, axis in enumerate(axes) if axis in SPREAD_AXES)


def _own_pass(shared: PassState, team: Team) -> PassState:
    """The pass's shared values, with the attention-score bias and the key/value cache of this process's heads."""

    def own(view: View) -> View:
        bias = view.mask.bias
        return view if bias is None else replace(view, mask=replace(view.mask, bias=team.own(bias, 1)))

    cache = None if shared.cache is None else _own_past(shared.cache, team)
    return replace(shared, everywhere=own(shared.everywhere), local=own(shared.local), cache=cache)


@dataclass
class OwnPast:
    """A key/value cache seen by one process: `append` returns its own heads; `cache` itself stores all heads."""

    length: int
    prompt: int | None
    crossed: dict[int, tuple[Tensor, Tensor]]
    states: dict[int | tuple[int, str], tuple[Tensor, ...]]
    cache: Past
    team: Team

    def room(self, rows: int, n: int) -> None:
        """Raise ValueError unless `n` more tokens of `rows` rows fit into the cache."""
        self.cache.room(rows, n)

    def extended_keep(
        self, keep: Bool[Tensor, "b n"] | None, rows: int, n: int
    ) -> Bool[Tensor, "b k"] | None:
        """The keep-mask of everything seen once `n` more tokens are in."""
        return self.cache.extended_keep(keep, rows, n)

    def append(
        self, layer: int, k: Float[Tensor, "b n g e"], v: Float[Tensor, "b n g e"]
    ) -> tuple[Float[Tensor, "b k g e"], Float[Tensor, "b k g e"]]:
        """Append the keys and values of all heads; returns those of this process's heads for all tokens so far."""
        keys, values = self.cache.append(layer, self.team.gathered(k, 2), self.team.gathered(v, 2))
        return self.team.own(keys, 2), self.team.own(values, 2)

    def advance(self, n: int, keep: Bool[Tensor, "b k"] | None) -> None:
        """Count `n` tokens as seen, after every layer has appended them."""
        self.cache.advance(n, keep)


def _own_past(cache: Past, team: Team) -> OwnPast:
    return OwnPast(cache.length, cache.prompt, cache.crossed, cache.states, cache, team)


@torch.no_grad()
def _check_same_weights(model: Transformer, team: Team) -> None:
    """Raise ValueError unless every parameter has the same sum in all processes, up to rounding."""
    sums = torch.stack([p.sum(dtype=torch.float64).to(team.mesh.device_type) for p in model.parameters()])
    by_process = team.gathered(sums[None], 0)
    differ = ~torch.isclose(by_process, by_process[:1], rtol=1e-6, atol=1e-6, equal_nan=True).all(0)
    names = [name for name, _ in model.named_parameters()]
    if bool(differ.any()):
        raise ValueError(
            f"every process requires the same weights; {names[int(differ.nonzero()[0])]} differs between them"
        )
