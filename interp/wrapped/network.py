"""A decoder of transformers as a `Transformer`: its own code, watched, with the sites that were proven.

A pass without reads or edits runs the network itself. Any other pass runs a copy of its module tree on the same
tensors, whose modules visit their sites (`interp.wrapped.seams`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.model.attention import Attention, Memory, picked
from interp.model.block import Block
from interp.model.cells import Span
from interp.model.config import ModelConfig
from interp.model.kv_cache import Past
from interp.model.layout import Layout
from interp.model.live_modules import bare_copy, kept, own_tensors
from interp.model.norm import NoNorm, Normalize
from interp.model.rules import Rule
from interp.model.tap import Tap
from interp.model.transformer import (
    MaskedHead,
    Transformer,
    check_branched,
    check_extras,
    check_pass,
    prompt_of,
)
from interp.wrapped.maps import StreamReading
from interp.wrapped.records import WrappedBlock
from interp.wrapped.rules import RuleMode, lay
from interp.wrapped.seams import (
    ATTENTION,
    HEAD_SITES,
    RUNNING,
    BlockSeam,
    EmbeddingSeam,
    EndOfPass,
    LinearView,
    MixerSeam,
    NormOf,
    NormSeam,
    OutputSeam,
    ReaderSeam,
    Running,
    WriterSeam,
    register,
)
from interp.wrapped.search import NetworkPlan, Transform

LinearMap = tuple[Tensor, Tensor | None]
"""A matrix `[h e d]` and its bias `[h e]`."""
PASTS = ("cache", "past_key_values", "cache_params", "state")  # the first from transformers 5.24 on
"""Names that networks give to the argument for their cache of earlier tokens."""


def _is_padded(cache: Past) -> bool:
    return isinstance(cache, WrappedCache) and cache.keep is not None


class KnownMaps(Attention):
    """The attention of a wrapped block, as far as its matrices are known: W_O, and W_Q, W_K and W_V of its heads."""

    def __init__(
        self,
        out: LinearView | None,
        layer: int,
        n_heads: int,
        why: str,
        maps: Mapping[str, LinearMap],
        scale: float,
    ) -> None:
        nn.Module.__init__(self)
        self.layer, self._out, self._n_heads, self._why, self._maps = layer, out, n_heads, why, dict(maps)
        self.sinks, self.q_norm, self.k_norm, self.scale = None, None, None, scale

    @property
    def out(self) -> LinearView:  # type: ignore[override]
        """The output map (W_O). AttributeError where none was proven."""
        if self._out is None:
            raise AttributeError(f"layer {self.layer} of this wrapped network has no known W_O: {self._why}")
        return self._out

    @property
    def d_head(self) -> int:  # type: ignore[override]
        """Columns of z that belong to a head."""
        return self.out.weight.shape[1] // self._n_heads

    def part(self, name: str) -> LinearMap:
        """The matrix and bias of queries, keys or values. AttributeError where they were not proven."""
        if name not in self._maps:
            raise AttributeError(
                f"this is a wrapped network: W_{name.upper()} of layer {self.layer} was not proven to be a linear map "
                "of the normed stream alone"
            )
        return self._maps[name]


class KnownBlock(Block):
    """A wrapped block as analyses see it: its config, its known attention matrices and its norms."""

    def __init__(
        self, config: ModelConfig, attn: KnownMaps, norms: Mapping[str, NormOf], before: Normalize | None
    ) -> None:
        nn.Module.__init__(self)
        self.config, self.attn, self._norms = config, attn, dict(norms)
        self.cross_attn, self._before = None, before

    def mlps(self) -> dict[str, nn.Module]:
        """The MLPs with known matrices: none."""
        return {}

    def post_norm(self, sublayer: str) -> Normalize | None:
        """The norm of what a sublayer adds, if it has one."""
        return self._norms[sublayer].module() if sublayer in self._norms else None

    def sum_norm(self, sublayer: str) -> Normalize | None:
        """None: what wrapped blocks add is a sum."""
        return None

    def input_norm(self, sublayer: str) -> Normalize:
        """The norm that queries, keys and values read. ValueError where that was not proven, and for MLPs."""
        if sublayer == "attn_out" and self._before is not None:
            return self._before
        raise ValueError(
            "this is a wrapped network: through which norm its blocks read the stream was not proven"
        )

    def without_attention(self, resid: Tensor) -> Tensor:
        """ValueError: a wrapped block cannot be run by itself."""
        raise ValueError("this is a wrapped network: its blocks cannot be run without attention")


class WrappedCache:
    """The network's own cache of earlier tokens, in the form that a pass takes (`held` is the network's object)."""

    def __init__(self, rows: int, n_max: int) -> None:
        self.rows, self.n_max, self.length = rows, n_max, 0
        self.prompt: int | None = None
        self.keep: Bool[Tensor, "b k"] | None = None
        self.held: object = None
        self.crossed: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[int | tuple[int, str], tuple[Tensor, ...]] = {}

    def room(self, rows: int, n: int) -> None:
        """ValueError unless `n` more tokens of this many rows fit."""
        if rows != self.rows:
            raise ValueError(
                f"the cache was made for {self.rows} rows, the batch has {rows}: make one of as many"
            )
        if self.length + n > self.n_max:
            raise ValueError(
                f"the cache holds {self.length} of {self.n_max} tokens; {n} more do not fit: make it of a larger n_max"
            )

    def extended_keep(
        self, keep: Bool[Tensor, "b n"] | None, rows: int, n: int
    ) -> Bool[Tensor, "b k"] | None:
        """The keep-mask `[b k]` of all cached tokens and `n` new ones; None as long as no row is padded."""
        if keep is None and self.keep is None:
            return None
        like = keep if keep is not None else self.keep
        assert like is not None
        past = like.new_ones(rows, self.length) if self.keep is None else self.keep
        return torch.cat((past, like.new_ones(rows, n) if keep is None else keep), 1)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """NotImplementedError: the network keeps its own keys and values."""
        raise NotImplementedError("a wrapped network keeps its own keys and values")

    def advance(self, n: int, keep: Bool[Tensor, "b k"] | None) -> None:
        """Count `n` tokens as seen."""
        self.prompt = self.prompt if self.length else n
        self.length += n
        self.keep = keep


@dataclass(frozen=True)
class Trees:
    """Two copies of a network's modules on the same tensors: `plain` runs unchanged, `watched` visits sites."""

    plain: nn.Module
    watched: nn.Module
    original: str
    """Name of the network's own attention implementation (such as "sdpa")."""


def copied(network: nn.Module, dtype: torch.dtype | None, device: torch.device | None) -> nn.Module:
    """A copy of the network's modules, in eval mode and without hooks, on its tensors.

    The tensors are cast or moved where that is requested; none requires a gradient.
    """
    tensors: dict[int, object] = {}
    for tensor in (*network.parameters(), *network.buffers()):
        moved = tensor.detach().to(device=device)
        moved = moved.to(dtype) if dtype is not None and moved.is_floating_point() else moved
        parameter = isinstance(tensor, nn.Parameter)
        tensors[id(tensor)] = nn.Parameter(moved, requires_grad=False) if parameter else moved
    return bare_copy(network, tensors)


def trees_of(plain: nn.Module, *, registry: bool = True) -> Trees:
    """The network and a copy of it that uses this package's attention; without `registry` the copy keeps its own."""
    register()
    watched = copy.deepcopy(plain, kept(plain) | own_tensors(plain))
    original = str(getattr(plain.config, "_attn_implementation", None) or "eager")
    if registry:
        configs = {id(c): c for m in watched.modules() if (c := getattr(m, "config", None)) is not None}
        for config in configs.values():
            if hasattr(config, "_attn_implementation"):
                config._attn_implementation_internal = ATTENTION
    return Trees(plain, watched, original)


def install(trees: Trees, plan: NetworkPlan, config: ModelConfig) -> None:
    """Put a seam into every module of the watched tree that has a site."""
    tree = trees.watched
    for index, layer in enumerate(plan.layers):
        block = tree.get_submodule(plan.root(index))
        if layer.output is not None:
            module = block.get_submodule(layer.output)
            module.forward = OutputSeam(module.forward, config.n_heads, LinearView(module, layer.transposed))
        for name, writer in layer.writers.items():
            module = block.get_submodule(writer.path)
            norm = None if writer.norm is None else NormOf(module, writer.norm, "norm")
            module.forward = WriterSeam(module.forward, name, writer.factor, layer.middle, norm)
        if layer.attended is None and layer.mixer:
            module = block.get_submodule(layer.mixer)
            module.forward = MixerSeam(module.forward)
        block.forward = BlockSeam(block.forward, index, in_tuple=plan.in_tuple, embeds=plan.embed is None)
    if plan.reader is not None:
        module = tree.get_submodule(plan.reader)
        module.forward = ReaderSeam(module.forward)
    if plan.embed_norm is not None:
        module = tree.get_submodule(plan.embed_norm)
        module.forward = NormSeam(module.forward, "ln_embed", NormOf(module, plan.norm, "ln_embed"))
    for name, path, factor in (
        ("hook_embed", plan.embed, plan.embed_factor),
        ("hook_pos_embed", plan.place, 1.0),
    ):
        if path is not None:
            module = tree.get_submodule(path)
            module.forward = EmbeddingSeam(module.forward, name, factor)


class Wrapped(Transformer):
    """A Hugging Face decoder under the names, questions and interventions of this package.

    Its config lists the sites that were proven. A `KeyError` for another site, and a `ValueError` for an option of a
    pass that was not proven, say why. `wrapped` is the network's own module tree, which computes every pass without
    reads or edits.
    """

    def __init__(
        self,
        trees: Trees,
        plan: NetworkPlan,
        config: ModelConfig,
        readings: Mapping[int, StreamReading] | None = None,
    ) -> None:
        nn.Module.__init__(self)
        assert isinstance(config.block, WrappedBlock)
        self.readings = dict(readings or {})
        install(trees, plan, config)
        self.config, self.plan, self.original = config, plan, trees.original
        self.wrapped, self.watched = trees.plain, trees.watched
        self.edits, self.files, self.devices = (), (), None
        self.dictionaries = {}
        self.leaking: list[int] | None = None
        """During the proof: the layers whose scores are used by more than the softmax; None afterwards."""
        self.output, self.type_embed, self.score_bias = None, None, None
        self._accepted = frozenset(inspect.signature(trees.plain.forward).parameters)
        self.embed = self._table(plan.embed)
        self.pos_embed = self._table(plan.place) if plan.place is not None else None
        self.ln_embed = self._norm(plan.embed_norm, config, "ln_embed") if config.embed_norm else None
        self.ln_final = self._norm(plan.final_norm, config, "ln_final")
        self.mlm_head = None if plan.transform is None else self._transform(plan.transform)
        self.unembed = self._linear(plan.head) if config.unembed else None
        self.blocks = nn.ModuleList(self._known_block(i) for i in range(config.n_layers))
        self.eval()

    def _table(self, path: str | None) -> nn.Embedding:
        """An embedding table on the network's own parameter; the token embeddings where `path` is None."""
        module = self.wrapped.get_submodule(path) if path is not None else self.wrapped.get_input_embeddings()  # type: ignore[operator]
        weight = module.get_parameter("weight")
        table = nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
        table.weight = weight
        return table

    def _linear(self, path: str | None) -> nn.Linear:
        assert path is not None
        module = self.wrapped.get_submodule(path)
        weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        linear.weight = weight
        if isinstance(bias, nn.Parameter):
            linear.bias = bias
        return linear

    def _transform(self, transform: Transform) -> MaskedHead:
        """The map between the final stream and the unembedding, on the network's own parameters."""
        with torch.device("meta"):
            head = MaskedHead(transform.act, transform.kind, 1)
        head.dense = self._linear(transform.dense)
        head.norm = NormOf(self.wrapped.get_submodule(transform.norm), transform.kind, "mlm_head").module()
        return head

    def _norm(self, path: str | None, config: ModelConfig, name: str) -> Normalize:
        if path is None:
            return Normalize(NoNorm(), config.d_model, name)
        source = self.wrapped.get_submodule(path)
        norm = NormOf(source, config.norm, name).module()
        if norm.weight is not None and len(norm.weight) != config.d_model:  # a norm without parameters
            norm = Normalize(config.norm, config.d_model, name).to(self.wrapped.dtype).requires_grad_(False)  # type: ignore[arg-type]
        return norm

    def _known_block(self, index: int) -> KnownBlock:
        layer, config = self.plan.layers[index], self.config
        block = self.wrapped.get_submodule(self.plan.root(index))
        offered = "attn.hook_z" in config.mixers[index].offered  # type: ignore[attr-defined]
        out = None
        if layer.output is not None and offered:
            out = LinearView(block.get_submodule(layer.output), layer.transposed)
        why = config.block.why_not(f"blocks.{index}.attn.hook_z")
        names = {"attn_out": "ln1_post", "mlp_out": "ln2_post"}
        norms = {
            name: NormOf(block.get_submodule(w.path), w.norm, names[name])
            for name, w in layer.writers.items()
            if w.norm is not None and config.norm_place == "sandwich" and name in names
        }
        stream_reading = self.readings.get(index)
        maps = (
            {}
            if stream_reading is None
            else {name: head_map.of(block) for name, head_map in stream_reading.maps.items()}
        )
        before: Normalize | None = None
        scale = 1.0
        if stream_reading is not None:
            before = stream_reading.before(block, config.d_model).to(self.wrapped.dtype)  # type: ignore[arg-type]
            scale = stream_reading.scale
        return KnownBlock(config, KnownMaps(out, index, config.n_heads, why, maps, scale), norms, before)

    def forward(
        self,
        tokens: Tensor,
        tap: Tap | None = None,
        start: int = 0,
        stop: int | None = None,
        *,
        keep: Bool[Tensor, "b p"] | None = None,
        cache: Past | None = None,
        logits_at: Int[Tensor, "b n"] | None = None,
        documents: Int[Tensor, "b p"] | None = None,
        types: Int[Tensor, "b p"] | None = None,
        memory: Memory | None = None,
        branches: Int[Tensor, "b k"] | None = None,
    ) -> Tensor:
        """As `Transformer.forward`. ValueError also for options that were not proven of this network."""
        config, n_layers = self.config, self.config.n_layers
        last = n_layers if stop is None else stop
        check_pass(config, tokens, (start, last), keep, cache, documents)
        check_branched(config, (len(tokens), tokens.shape[1]), documents, branches)
        check_extras(config, tokens, types, memory)
        wants = tap is not None and any(read.grad for read in tap.reads)
        self._check_options(start, keep, cache, documents, gradients=wants)
        if last < n_layers and logits_at is not None:
            raise ValueError(
                f"logits_at requires a pass through every block; this one stops before block {stop}"
            )
        tap = Tap(prompt=prompt_of(cache, tokens)) if tap is None and self.edits else tap
        if tap is not None:
            past, (rows, n) = 0 if cache is None else cache.length, tokens.shape[:2]
            layout = Layout(keep if cache is None else cache.extended_keep(keep, rows, n), documents)
            span = Span(past, layout, only=logits_at, width=past + n)
            tap.open(config, start, stop, standing=self.edits, dictionaries=self.dictionaries, span=span)
        inputs = self._inputs(tokens, start, keep, cache, documents)
        if tap is None and start == 0 and stop is None:
            return self._logits(inputs, cache, tokens.shape[1], logits_at)
        assert cache is None or isinstance(cache, WrappedCache)
        run = Running(
            self.original, tap, start, last if cache is None else None, len(tokens),
            entering=tokens if start else None, written_out=self._written_out(tap),
            leaking=self.leaking,
        )  # fmt: skip
        stream = self._run(run, inputs, cache, tokens.shape[1])
        if tap is not None and tap.finished:
            return stream
        if logits_at is not None:
            stream = picked(stream, logits_at)
        if stop is not None:
            return stream
        return self.read_out(stream, None if tap is None else tap.scope())

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> Transformer:
        """As `Transformer.with_parameters`; what modules keep of their last pass is copied."""
        memo: dict[int, object] = {
            id(shared): shared for shared in (self.config, self.edits, self.dictionaries)
        }
        memo |= kept(self) | own_tensors(self)
        memo |= {id(self.get_parameter(name)): value for name, value in parameters.items()}
        return copy.deepcopy(self, memo)

    def ruled(self, rules: Collection[Rule]) -> Transformer:
        """As `Transformer.ruled`, by the operators that the network calls."""
        model = super().ruled(rules)
        assert isinstance(model, Wrapped)
        for tree in (model.wrapped, model.watched):
            lay(rules, tree)
        return model

    def _run(
        self, run: Running, inputs: dict[str, object], cache: WrappedCache | None, n: int
    ) -> Float[Tensor, "b p d"]:
        """The residual stream at the end of the pass, from the watched copy."""
        if run.start == self.config.n_layers and run.start:
            assert run.entering is not None
            return run.entering
        token = RUNNING.set(run)
        try:
            with RuleMode() if self.rules else nullcontext():
                output = self.watched(**inputs)
        except EndOfPass as end:
            return end.stream
        finally:
            RUNNING.reset(token)
        if cache is not None:
            self._keep(cache, output, n, inputs)
        assert run.final is not None
        return run.final

    def _logits(
        self, inputs: dict[str, object], cache: Past | None, n: int, logits_at: Tensor | None
    ) -> Tensor:
        """The network's own logits, at the columns `logits_at` or at all of them."""
        only_last = logits_at is not None and logits_at.shape[1] == 1 and bool((logits_at == n - 1).all())
        if only_last and "logits_to_keep" in self._accepted:
            inputs, logits_at = {**inputs, "logits_to_keep": 1}, None
        with RuleMode() if self.rules else nullcontext():
            output = self.wrapped(**inputs)
        if cache is not None:
            assert isinstance(cache, WrappedCache)
            self._keep(cache, output, n, inputs)
        logits: Tensor = output.logits
        return logits if logits_at is None else picked(logits, logits_at)

    def _keep(
        self, cache: WrappedCache, output: Mapping[str, object], n: int, inputs: dict[str, object]
    ) -> None:
        cache.held = next(output[name] for name in PASTS if output.get(name) is not None)
        seen = inputs.get("attention_mask")
        cache.advance(n, seen.bool() if isinstance(seen, Tensor) else None)

    def _inputs(
        self, tokens: Tensor, start: int, keep: Tensor | None, cache: Past | None, documents: Tensor | None
    ) -> dict[str, object]:
        """The arguments for a call of the network; zeros as ids where the pass starts at a later block."""
        rows, n = tokens.shape[:2]
        past = 0 if cache is None else cache.length
        full_keep = keep if cache is None else cache.extended_keep(keep, rows, n)
        ids = tokens.new_zeros(rows, n, dtype=torch.long) if start else tokens
        inputs: dict[str, object] = {"input_ids": ids, "use_cache": cache is not None}
        if full_keep is not None:
            inputs["attention_mask"] = full_keep.long()
        if (full_keep is not None or documents is not None) and "position_ids" in self._accepted:
            positions = Layout(full_keep, documents).positions(n, past, tokens.device).expand(rows, n)
            inputs["position_ids"] = positions + self.plan.first_position
        if isinstance(cache, WrappedCache) and cache.held is not None:
            inputs[next(name for name in PASTS if name in self._accepted)] = cache.held
        return inputs

    def _written_out(self, tap: Tap | None) -> bool:
        """Whether masks must be numeric: `tap` reads a layer's scores, or a layer's attention is not the registry's."""
        if any(layer.attended is None for layer in self.plan.layers):
            return True
        if tap is None:
            return False
        scopes = (tap.scope(layer) for layer in range(self.config.n_layers))
        return any(scope is not None and scope.wants(*HEAD_SITES) for scope in scopes)

    def _check_options(
        self,
        start: int,
        keep: Tensor | None,
        cache: Past | None,
        documents: Tensor | None,
        *,
        gradients: bool,
    ) -> None:
        """ValueError for an option that was not proven of this network."""
        requested = {
            "start": bool(start),
            "cache": cache is not None,
            "cache of padded rows": cache is not None and (keep is not None or _is_padded(cache)),
            "documents": documents is not None,
            "left padding": keep is not None and not bool(keep[:, 0].all()),
            "right padding": keep is not None and not bool(keep[:, -1].all()),
        }
        for name, is_requested in requested.items():
            if is_requested and (why := self.config.block.why_not(name)):
                raise ValueError(f"this wrapped network takes no {name}: {why}")
        if gradients and (why := self.config.block.why_not("gradients")):
            raise ValueError(f"this wrapped network gives no gradients: {why}")
        if cache is not None and not isinstance(cache, WrappedCache):
            raise ValueError("a wrapped network has a cache of its own: model.new_cache(rows, n_max)")

    def new_cache(self, rows: int, n_max: int) -> WrappedCache:
        """An empty cache for `rows` texts of at most `n_max` tokens: the network fills it itself."""
        return WrappedCache(rows, n_max)

    @property
    def by_block(self) -> bool:
        """False: every pass goes through the network's own code before and after its blocks."""
        return False

    @property
    def restarts(self) -> bool:
        """Whether a pass may begin at a later block, as `Transformer.restarts`, and the network's code takes one."""
        return super().restarts and not self.config.block.why_not("start")

    @property
    def device(self) -> torch.device:
        """Where the embedding is."""
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding."""
        return self.embed.weight.dtype
