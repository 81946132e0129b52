"""Proofs about a wrapped network: every site is read and edited, and the consequences are compared with the rest.

A site is offered where the identities that give it its meaning hold in a pass that reads everything, and hold again
in passes that edit it (a pattern that was changed must give the z that follows from it, and so on). Options of a pass
(a later start, padding, packed documents, a cache, gradients) are offered where both ways to the same number agree.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from einops import einsum
from jaxtyping import Int
from torch import Tensor, nn

from interp.model.config import ModelConfig
from interp.model.edits import Edit
from interp.model.live_modules import note_hooks
from interp.model.sites import final_stream, names
from interp.model.tap import Read, Tap
from interp.wrapped.claims import HEADS, claimed, settings
from interp.wrapped.maps import StreamReading, agree, reading
from interp.wrapped.network import Trees, Wrapped, copied, trees_of
from interp.wrapped.records import WrappedBlock, WrappedMixer
from interp.wrapped.seams import ModuleValue, Running, first_tensor, given_to, replaced, with_first
from interp.wrapped.search import (
    COMPUTED,
    Calls,
    NetworkPlan,
    UnknownNetworkError,
    another,
    close,
    explored,
    fitted,
    numbers,
    recorded,
    without_padding,
)

SUMS, LOOSE = 1e-5, 1e-4
"""Allowed between sums of sites, and between whole passes computed in two ways (of float32, relative)."""
GRADIENT = 1e-3
"""Allowed between two gradients of float32, relative."""
_HOOKED = ("hook_stream", "hook_resid_pre", "hook_attn_out", "hook_mlp_out", "hook_more_out", "attn.hook_z")
"""The sites where an ordinary hook on the network's modules stands at the same tensor."""
MOST_STARTS = 6
"""Blocks at which a later start is tried."""
FIRSTS = 5
"""Positions that the first token is tried at."""
EMBEDDED = ("hook_embed", "hook_pos_embed")
SINGLE = 24
"""Number of texts of a single token, on which matrices of heads are found."""
NORMS = {"attn_out": "ln1_post", "mlp_out": "ln2_post"}
"""The norm of what a sublayer adds."""
SiteValues = Mapping[str, Tensor]
Law = tuple[str, Sequence[str], Callable[[], bool]]
"""What should hold: the site that follows from others, those that lose their meaning if it does not, the comparison."""
Reads = tuple[Read, ...]


def some_tokens(network: nn.Module, rows: int = 2, n: int = 7) -> Int[Tensor, "b p"]:
    """Random tokens of the network's vocabulary."""
    vocabulary = network.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    drawn = torch.randint(0, vocabulary, (rows, n), generator=torch.Generator().manual_seed(11))
    return without_padding(network, drawn, vocabulary).to(next(network.parameters()).device)


def wrap(
    network: nn.Module, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Wrapped:
    """A Hugging Face decoder as a `Transformer`, with the sites that were proven of it.

    The network itself is not touched; its tensors are shared, unless they are cast or moved. Hooks on its modules are
    left out, and a `Note` names them. In half precision the proof runs on a copy in float32, which is freed
    afterwards.

    Args:
        network: the decoder.
        dtype: dtype to cast to; None: the network's.
        device: device to move to; None: the network's.

    Raises:
        ValueError: a part that was not found; the message names it.
    """
    _check(network)
    note_hooks(network)
    plain = copied(network, dtype, device)
    half = next(plain.parameters()).dtype not in (torch.float32, torch.float64)
    precise = copied(plain, torch.float32, None) if half else plain
    with torch.no_grad():
        proof, registry = _proven(precise)
    trees = trees_of(plain, registry=registry)
    return Wrapped(trees, proof.plan, proof.config, proof.readings).requires_grad_(False)


def _check(network: nn.Module) -> None:
    config = getattr(network, "config", None)
    if config is None or not hasattr(network, "get_output_embeddings"):
        raise ValueError(f"a Hugging Face model with a config is required, got {type(network).__name__}")
    if getattr(config, "is_encoder_decoder", False):
        raise UnknownNetworkError(
            f"{type(network).__name__} is an encoder-decoder: only decoders are wrapped"
        )
    if network.get_output_embeddings() is None:  # type: ignore[operator]
        raise UnknownNetworkError(f"{type(network).__name__} gives no logits of tokens")


def _proven(plain: nn.Module) -> tuple[_Proof, bool]:
    """The proven properties, and whether this package's attention may be used."""
    tokens = some_tokens(plain)
    logits = plain(input_ids=tokens, use_cache=False).logits
    n = tokens.shape[1]
    for column in (n // 2, n - 1):
        changed = plain(input_ids=another(plain, tokens, column), use_cache=False).logits
        if not close(changed[:, :column], logits[:, :column], LOOSE):
            raise UnknownNetworkError("its logits depend on later tokens: only causal decoders are wrapped")
    why = ""
    for registry in (True, False):
        trees = trees_of(plain, registry=registry)
        try:
            plan, found = explored(trees.watched, tokens, trees.original)
        except UnknownNetworkError:
            raise
        except Exception as failed:
            if not registry:
                raise
            why = f"attention through the registry fails ({type(failed).__name__})"
            continue
        if close(found, logits, LOOSE):
            break
        why = "attention through the registry gives other logits"
    else:
        raise UnknownNetworkError("it gives other logits when it is watched")
    if plan.head is None:
        raise UnknownNetworkError(plan.reasons["ln_final.hook_scale"])
    plan = replace(plan, first_position=_first_position(plain, tokens, logits))
    proof = _Proof(trees, plan, claimed(trees, plan, why), tokens, logits)
    proof.sites()
    proof.matrices()
    proof.options()
    return proof, registry


def _first_position(network: nn.Module, tokens: Int[Tensor, "b p"], logits: Tensor) -> int:
    """The network's position of the first token: given these positions it has equal logits."""
    if "position_ids" not in inspect.signature(network.forward).parameters:
        return 0
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    for first in range(FIRSTS):
        try:
            found = network(input_ids=tokens, position_ids=places + first, use_cache=False).logits
        except Exception:  # left to the options of a pass, which are refused where it fails
            return 0
        if close(found, logits, LOOSE):
            return first
    return 0


# --- the proof ------------------------------------------------------------------------------------------------------


class _Proof:
    """A network with everything that was found, from which what does not hold is taken away."""

    def __init__(
        self, trees: Trees, plan: NetworkPlan, config: ModelConfig, tokens: Int[Tensor, "b p"], logits: Tensor
    ) -> None:
        self.trees, self.plan, self.config = trees, plan, config
        self.tokens, self.logits = tokens, logits
        self.model = Wrapped(trees, plan, config)
        self.numbers = list(dict.fromkeys(numbers(settings(trees.plain).to_dict())))
        self._sinks: dict[int, Tensor] = {}
        self._sums: dict[int, bool] = {}
        """Of every layer, whether z was the pattern times the values when nothing was edited."""
        self._scales: dict[tuple[int, float | None], float] = {}
        self.readings: dict[int, StreamReading] = {}
        """By layer, how its heads read the stream, where that is linear."""

    def sites(self) -> None:
        """Take away every site that does not hold, until a pass that reads all the others and those that edit do."""
        self.model.leaking = []
        base = self._readable()
        leaking, self.model.leaking = self.model.leaking, None
        if not close(base["logits"], self.logits, LOOSE):
            raise UnknownNetworkError("it gives other logits when everything is read")
        if not close(self.model(self.tokens, Tap([Read(final_stream(self.config))])), self.logits, LOOSE):
            raise UnknownNetworkError("it gives other logits when its stream is read")
        self._ends(base[final_stream(self.config)])
        for layer in set(leaking):
            self._drop(layer, HEADS[3:], "its scores are used beside the softmax")
        self._shapes(base)
        for layer in range(self.config.n_layers):
            self._laws(layer, base, edited=None)
        kinds = dict.fromkeys(site for m in self._mixers for site in m.offered)
        for kind in kinds:
            self._edited(kind, base)
        self._outside()
        self._traits(base)

    def _edited(self, kind: str, base: SiteValues) -> None:
        """Take away a site in the layers where an edit of it fails, breaks what follows from it, or changes nothing."""
        layers = [i for i, m in enumerate(self._mixers) if kind in m.offered]
        if not layers:
            return
        seen = self._passed([Edit(f"blocks.{i}.{kind}", _changed(kind)) for i in layers])
        for i in layers:
            if seen is None:
                self._drop(i, [kind], "an edit of it fails")
                continue
            self._laws(i, seen, edited=kind)
            if kind in self._mixers[i].offered:
                self._matters(i, kind, base)

    def _ends(self, stream: Tensor) -> None:
        """Refuse a network if its logits for other final streams, put there by hand, are not those read out."""
        noise = torch.randn(stream.shape, generator=torch.Generator().manual_seed(17)).to(stream)
        size = stream.square().mean().sqrt()
        for factor in (0.1, 4.0):
            new = factor * (stream + size * noise)
            if not close(self.model.read_out(new), self._from_final(new), LOOSE):
                raise UnknownNetworkError(
                    "other final streams do not give the logits that are read out of them"
                )

    def _from_final(self, stream: Tensor) -> Tensor:
        """The logits of the network's own code with this in place of its final stream, by an ordinary hook."""
        network, plan = self.trees.plain, self.plan
        if plan.reader is not None:
            handle = network.get_submodule(plan.reader).register_forward_pre_hook(
                lambda module, args, kwargs: replaced(args, kwargs, stream.clone()), with_kwargs=True
            )
        else:
            handle = network.get_submodule(plan.root(-1)).register_forward_hook(
                lambda module, args, out: with_first(out, stream.clone())
            )
        try:
            logits: Tensor = network(input_ids=self.tokens, use_cache=False).logits
        finally:
            handle.remove()
        return logits

    def _traits(self, base: SiteValues) -> None:
        """Say of each layer whether its pattern is made of shares, and whether z is the pattern times the values."""
        mixers = list(self._mixers)
        for layer, mixer in enumerate(mixers):
            pattern = base.get(f"blocks.{layer}.attn.hook_pattern")
            shares = pattern is not None and bool(
                (pattern >= 0).all() and (pattern.sum(-1) <= 1 + SUMS).all()
            )
            additive = {"attn.hook_pattern", "attn.hook_v", "attn.hook_z"} <= set(mixer.offered)
            mixers[layer] = replace(
                mixer, distribution=shares, additive=additive and self._sums.get(layer, False)
            )
        self._mix(mixers)

    def _readable(self) -> SiteValues:
        """A pass that reads everything; the sites of heads are given up where it fails."""
        seen = self._passed()
        for sites in (HEADS[:3], HEADS, ("attn.hook_z", "attn.hook_result")):
            if seen is not None:
                return seen
            for layer in range(self.config.n_layers):
                self._drop(layer, sites, "a pass that reads it fails")
            seen = self._passed()
        if seen is None:
            raise UnknownNetworkError("a pass that reads its stream fails")
        return seen

    def _shapes(self, base: SiteValues) -> None:
        """Heads of one count in all layers, and one row of the pattern for each token."""
        rows, n = self.tokens.shape
        for layer, mixer in enumerate(self._mixers):
            for site in mixer.offered:
                if f"blocks.{layer}.{site}" not in base:
                    self._drop(layer, [site], "what mixes positions here takes no softmax over keys")
            for site in set(HEADS[3:]) & set(self._mixers[layer].offered):
                if base[f"blocks.{layer}.{site}"].shape != (rows, self.config.n_heads, n, n):
                    self._drop(layer, HEADS, "it is no [head, query, key] of this network's heads and tokens")
            for site, axis in zip(
                HEADS[:3], (self.config.n_heads, self.config.kv_heads, self.config.kv_heads), strict=True
            ):
                if site in mixer.offered and base[f"blocks.{layer}.{site}"].shape[:3] != (rows, n, axis):
                    self._drop(layer, HEADS[:3], "it has another number of heads than other layers")

    def _laws(self, layer: int, seen: SiteValues, *, edited: str | None) -> None:
        """Compare every site with what it follows from, the edited one excepted; drop what does not agree."""
        laws = [*self._sums_of_the_stream(layer, seen), *self._within_attention(layer, seen)]
        if layer:
            before, after = (
                seen[f"blocks.{layer - 1}.hook_resid_post"],
                seen[f"blocks.{layer}.hook_resid_pre"],
            )
            laws.append(("hook_resid_pre", ["hook_resid_pre"], lambda: close(before, after, SUMS)))
        for target, sites, holds in laws:
            if target == edited or (target not in self._mixers[layer].offered and target != "stream"):
                continue
            if not holds():
                under = "" if edited is None else f" once {edited} is edited"
                gone = [edited] if edited is not None and edited not in ("hook_resid_pre",) else sites
                self._drop(layer, gone, f"{target} is not what follows from it{under}")

    def _sums_of_the_stream(self, layer: int, seen: SiteValues) -> Iterator[Law]:
        """The stream is what it was plus what is added to it, each through its norm."""

        def at(site: str) -> Tensor:
            return seen[f"blocks.{layer}.{site}"]

        has, block = set(self._mixers[layer].offered), self.config.block
        assert isinstance(block, WrappedBlock)
        sublayers = [n for n in block.added if f"hook_{n}" in has]
        written = [f"hook_{n}" for n in sublayers]
        if sublayers:
            middle = "hook_resid_mid" in has
            start = at("hook_resid_mid") if middle else at("hook_resid_pre")
            after = [n for n in sublayers if not middle or n not in block.before]
            yield (
                "hook_resid_post",
                [*written, "hook_resid_mid"],
                lambda: close(start + sum(at(f"hook_{n}") for n in after), at("hook_resid_post"), SUMS),
            )
            if middle:
                yield (
                    "hook_resid_mid",
                    ["hook_resid_mid"],
                    lambda: close(
                        at("hook_resid_pre") + sum(at(f"hook_{n}") for n in block.before), start, SUMS
                    ),
                )
        for name in sublayers:
            norm = f"{NORMS.get(name, '')}.hook_normalized"
            if norm in has:
                yield (
                    f"hook_{name}",
                    [norm],
                    lambda name=name, norm=norm: close(  # type: ignore[misc]
                        at(norm) * self.config.factor(name), at(f"hook_{name}"), SUMS
                    ),
                )

    def _within_attention(self, layer: int, seen: SiteValues) -> Iterator[Law]:
        """Scores follow from queries and keys, the pattern from scores, z from it and values, the output from z."""
        has = set(self._mixers[layer].offered)
        if "attn.hook_z" in has and "hook_attn_out" in has:
            normed = "ln1_post.hook_normalized" in has
            target = "ln1_post.hook_normalized" if normed else "hook_attn_out"
            yield target, ["attn.hook_z", "attn.hook_result"], lambda: self._written(layer, seen, target)
        if "attn.hook_pattern" in has and "attn.hook_attn_scores" in has:
            yield "attn.hook_pattern", HEADS[3:], lambda: self._softmaxed(layer, seen)
        if {"attn.hook_pattern", "attn.hook_v", "attn.hook_z"} <= has and self._additive(layer):
            yield "attn.hook_z", ["attn.hook_v"], lambda: self._moved(layer, seen)
        if {"attn.hook_attn_scores", *HEADS[:2]} <= has:
            yield "attn.hook_attn_scores", HEADS[:2], lambda: self._scored(layer, seen)

    def _written(self, layer: int, seen: SiteValues, target: str) -> bool:
        """Whether what attention writes is what its heads do, and its bias, through the norm where there is one."""
        out = self.model.block(layer).attn.out
        result = seen[f"blocks.{layer}.attn.hook_result"]
        found = result.sum(2) if out.bias is None else result.sum(2) + out.bias
        norm = self.model.block(layer).post_norm("attn_out")
        if norm is None:
            found = found * self.config.factor("attn_out")
        else:
            found = norm.linear(found, seen[f"blocks.{layer}.ln1_post.hook_scale"])
        return close(found, seen[f"blocks.{layer}.{target}"], 5 * COMPUTED)

    def _softmaxed(self, layer: int, seen: SiteValues) -> bool:
        """Whether the pattern is the softmax of the scores, or of them and one more score per head (a sink)."""
        scores, pattern = (seen[f"blocks.{layer}.{site}"] for site in HEADS[3:])
        sink = self._sinks.setdefault(layer, _sink(scores, pattern))
        more = sink[None, :, None, None].expand(*scores.shape[:3], 1)
        return close(torch.cat((scores, more), -1).softmax(-1)[..., :-1], pattern, LOOSE)

    def _additive(self, layer: int) -> bool:
        return self._sums.get(layer, True)

    def _moved(self, layer: int, seen: SiteValues) -> bool:
        """Whether z is pattern @ v; in layers where it never was, heads do not split by source."""
        v, pattern = seen[f"blocks.{layer}.attn.hook_v"], seen[f"blocks.{layer}.attn.hook_pattern"]
        z = seen[f"blocks.{layer}.attn.hook_z"]
        group = self.config.n_heads // self.config.kv_heads
        found = einsum(pattern, v.repeat_interleave(group, 2), "b h q k, b k h e -> b q h e")
        holds = found.shape == z.shape and close(found, z, LOOSE)
        if layer not in self._sums:
            self._sums[layer] = holds
            return True
        return holds

    def _scored(self, layer: int, seen: SiteValues) -> bool:
        """Whether scores are a factor times q . k, capped or not, where they are not masked."""
        scores = seen[f"blocks.{layer}.attn.hook_attn_scores"]
        q, k = (seen[f"blocks.{layer}.{site}"] for site in HEADS[:2])
        if q.shape[-1] != k.shape[-1]:
            return False
        k = k.repeat_interleave(self.config.n_heads // self.config.kv_heads, 2)
        raw = einsum(q, k, "b q h e, b k h e -> b h q k")
        finite = scores.isfinite()
        for cap in (None, *self.numbers):
            flat = scores[finite] if cap is None else (scores[finite] / cap).clamp(-1, 1).atanh() * cap
            if not bool(flat.isfinite().all()):
                continue
            c = self._scales.get((layer, cap)) or fitted(flat, raw[finite])
            if c is not None and close(c * raw[finite], flat, LOOSE):
                self._scales[layer, cap] = c
                return True
        return False

    def _matters(self, layer: int, kind: str, base: SiteValues) -> None:
        """Drop a site of attention if its edit changes nothing and no identity says what it should change."""
        if kind not in HEADS or (self._additive(layer) and "attn.hook_v" in self._mixers[layer].offered):
            return
        seen = self._passed([Edit(f"blocks.{layer}.{kind}", _changed(kind))])
        after = f"blocks.{layer}.hook_resid_post"
        if seen is None or close(seen[after], base[after], LOOSE):
            self._drop(layer, [kind], "an edit of it changes nothing")

    def _outside(self) -> None:
        """Test every site outside of the blocks, and refuse those that fail.

        A site passes if the logits change where it is edited and the embeddings still sum to what enters block 0.
        """
        for site in names(self.config, on_demand=True):
            if site.startswith("blocks."):
                continue
            seen = self._passed([Edit(site, _changed(site))])
            parts = [seen[s] for s in EMBEDDED if s in seen] if seen is not None else []
            good = seen is not None and not close(seen["logits"], self.logits, LOOSE)
            if good and seen is not None and parts:
                entered = sum(parts[1:], parts[0])
                norm = self.model.ln_embed
                if norm is not None and site != "ln_embed.hook_normalized":
                    entered = norm.linear(entered, seen["ln_embed.hook_scale"])
                elif norm is not None:
                    entered = seen[site]
                good = close(entered, seen["blocks.0.hook_resid_pre"], LOOSE)
            if not good:
                block = self.config.block
                assert isinstance(block, WrappedBlock)
                left = tuple(s for s in block.outside if s != site)
                more = (*block.refused, (site, "an edit of it does not do what it says"))
                self._use(replace(self.config, block=replace(block, outside=left, refused=more)))

    # --- the matrices of heads

    def matrices(self) -> None:
        """Find the matrices of queries, keys and values, where they are linear maps of the normed stream alone."""
        first = some_tokens(self.trees.plain, SINGLE, 1)
        alone, base = self._passed(tokens=first), self._passed()
        if alone is None or base is None:
            return
        calls, _ = recorded(self.trees.plain, first, Running(self.trees.original, noted=[]))
        mixers = list(self._mixers)
        for layer, mixer in enumerate(mixers):
            found = self._reading(layer, calls, alone, base)
            why = "it was not found among linear maps of the normed stream alone"
            if found is not None:
                self.readings[layer] = found
            maps = {} if found is None else found.maps
            mixers[layer] = replace(mixer, values="v" in maps, queries={"q", "k", "v"} <= set(maps))
            for name in "qkv":
                if name not in maps:
                    self._refuse(f"blocks.{layer}.attn.W_{name.upper()}", why)
        self._mix(mixers)

    def _reading(self, layer: int, calls: Calls, alone: SiteValues, base: SiteValues) -> StreamReading | None:
        """The maps of a layer: found on texts of a single token, and kept if they hold at every position."""
        wanted = {"v": "attn.hook_v"} | dict(zip("qk", HEADS[:2], strict=True))
        offered, root = self._mixers[layer].offered, self.plan.root(layer)
        seen = {name: alone[f"blocks.{layer}.{site}"] for name, site in wanted.items() if site in offered}
        stream = calls[root][0].given
        if not seen or stream is None:
            return None
        inner = {
            path.removeprefix(f"{root}."): one[0]
            for path, one in calls.items()
            if path.startswith(f"{root}.") and len(one) == 1
        }
        block = self.trees.plain.get_submodule(root)
        found = reading(block, inner, stream, seen)
        if found is None:
            return None
        before = found.before(block, stream.shape[-1]).to(stream)
        x = before(base[f"blocks.{layer}.hook_resid_pre"])
        made = {name: each.applied(block, x) for name, each in found.maps.items()}
        expected = {name: base[f"blocks.{layer}.{wanted[name]}"] for name in made}
        scale = next((c for (at, _), c in self._scales.items() if at == layer), None)
        turned = scale is not None and {"q", "k"} <= set(made)
        turned = turned and agree((made["q"], made["k"]), (expected["q"], expected["k"]))
        holds = {"v": "v" in made and close(made["v"], expected["v"], 5 * COMPUTED), "q": turned, "k": turned}
        maps = {name: each for name, each in found.maps.items() if holds[name]}
        return replace(found, maps=maps, scale=scale or 1.0) if maps else None

    # --- options of a pass

    def options(self) -> None:
        """Refuse, by name, every option of a pass for which two ways of computing disagree."""
        options: dict[str, Callable[[Reads], bool]] = {
            "start": self._starts, "left padding": partial(self._padded, left=True),
            "right padding": partial(self._padded, left=False), "documents": self._packed,
            "cache": partial(self._stepwise, padded=False),
            "cache of padded rows": partial(self._stepwise, padded=True),
        }  # fmt: skip
        for name, holds in options.items():
            try:
                why = "" if holds(()) and holds(self._last_sites) else "it was measured to give other numbers"
            except Exception as failed:
                why = f"the network fails with it ({type(failed).__name__}: {str(failed)[:80]})"
            if why:
                self._refuse(name, why)
        try:
            why = (
                ""
                if self._differentiates()
                else "autograd on the network's own code was measured to give others"
            )
        except RuntimeError as failed:
            why = f"it has none ({str(failed)[:80]})"
        if why:
            self._refuse("gradients", why)

    @property
    def _last_sites(self) -> Reads:
        """Every site of the last block: masks are written out where scores are read. Without blocks the stream."""
        if not self.config.n_layers:
            return (Read(final_stream(self.config)),)
        last = f"blocks.{self.config.n_layers - 1}."
        return tuple(Read(name) for name in names(self.config, on_demand=True) if name.startswith(last))

    def _starts(self, reads: Reads) -> bool:
        n = self.config.n_layers
        step = -(-(n - 1) // MOST_STARTS) or 1
        seen = self._passed()
        assert seen is not None
        for layer in range(1, n, step):
            found = self.model(seen[f"blocks.{layer}.hook_resid_pre"], Tap(reads), start=layer)
            middle = self.model(seen[f"blocks.{layer}.hook_resid_pre"], start=layer, stop=layer + 1)
            ends_match = close(middle, seen[f"blocks.{layer}.hook_resid_post"], LOOSE)
            if not (ends_match and close(found, self.logits, LOOSE)):
                return False
        return True

    def _padded(self, reads: Reads, *, left: bool) -> bool:
        n = self.tokens.shape[1] - 3
        keep = torch.ones_like(self.tokens, dtype=torch.bool)
        tokens, cut = self.tokens.clone(), slice(0, 3) if left else slice(n, None)
        keep[0, cut] = False
        if left:
            tokens[0, 3:] = self.tokens[0, :n]
        alone = self.model(self.tokens[:1, :n])
        found = self.model(tokens, Tap(reads) if reads else None, keep=keep)
        mine = found[:1, 3:] if left else found[:1, :n]
        return close(mine, alone, LOOSE) and close(found[1], self.logits[1], LOOSE)

    def _packed(self, reads: Reads) -> bool:
        documents = (torch.arange(self.tokens.shape[1], device=self.tokens.device) >= 3).long()
        found = self.model(
            self.tokens, Tap(reads) if reads else None, documents=documents.expand_as(self.tokens)
        )
        parts = [self.model(self.tokens[:, :3]), self.model(self.tokens[:, 3:])]
        return close(found, torch.cat(parts, 1), LOOSE)

    def _stepwise(self, reads: Reads, *, padded: bool) -> bool:
        keep = torch.ones_like(self.tokens, dtype=torch.bool)
        keep[0, :2] = not padded
        given = keep if padded else None
        cache, found = self.model.new_cache(*self.tokens.shape), []
        for part in (slice(0, 4), slice(4, 5), slice(5, 6), slice(6, 7)):
            mine = None if given is None or part.start else given[:, part]
            tap = Tap(reads) if reads else None
            found.append(self.model(self.tokens[:, part], tap, keep=mine, cache=cache))
        whole = self.model(self.tokens, keep=given)
        return close(torch.cat(found, 1)[keep], whole[keep], LOOSE)

    @torch.enable_grad()
    def _differentiates(self) -> bool:
        """Whether gradients are autograd's on the network itself, and those of scores and pattern follow from z's."""
        generator = torch.Generator().manual_seed(5)
        probe = torch.randn(self.logits.shape, generator=generator).to(self.logits)
        offered = [f"blocks.{i}.{site}" for i, mixer in enumerate(self._mixers) for site in mixer.offered]
        wanted = [n for n in offered if n.endswith((*_HOOKED, *HEADS[2:])) and "result" not in n]
        wanted = wanted if self.config.n_layers else [final_stream(self.config)]
        reads = [Read(name, grad=True) for name in wanted]
        tap = Tap([*reads, *(Read(name) for name in wanted)])
        found = torch.autograd.grad(
            (self.model(self.tokens, tap) * probe).sum(), [tap.live[r] for r in reads]
        )
        ours = dict(zip(wanted, found, strict=True))
        theirs = self._by_hooks([n for n in wanted if n.endswith(_HOOKED)], probe)
        same = all(close(ours[name], g.reshape(ours[name].shape), GRADIENT) for name, g in theirs.items())
        values = {read.site: value for read, value in tap.values.items()}
        inside = [
            i for i in range(self.config.n_layers) if self._sums.get(i) and f"blocks.{i}.attn.hook_v" in ours
        ]
        return same and all(self._inside_follows(i, ours, values) for i in inside)

    def _by_hooks(self, sites: Sequence[str], probe: Tensor) -> dict[str, Tensor]:
        """Gradients at ends of blocks, at what modules add and at z, by ordinary hooks on the network itself."""
        live: dict[str, Tensor] = {}
        network, handles, factors = self.trees.plain, [], {}

        def alias(name: str, value: Tensor) -> Tensor:
            live[name] = value.clone() if value.requires_grad else value.clone().requires_grad_()
            return live[name].clone()  # some modules write into what they are given

        def before(name: str) -> Callable[..., object]:
            def hook(
                module: nn.Module, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue]
            ) -> object:
                given = given_to(args, kwargs)
                assert given is not None
                return replaced(args, kwargs, alias(name, given))

            return hook

        def after(name: str) -> Callable[..., object]:
            def hook(module: nn.Module, args: ModuleValue, out: ModuleValue) -> object:
                first = first_tensor(out)
                assert first is not None
                return with_first(out, alias(name, first))

            return hook

        for name in sites:
            if self.plan.reader is not None:
                module = network.get_submodule(self.plan.reader)
                handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
                continue
            index, site = name.split(".", 2)[1:]
            layer, root = self.plan.layers[int(index)], self.plan.root(int(index))
            if site in ("hook_resid_pre", "attn.hook_z"):
                module = network.get_submodule(root if site == "hook_resid_pre" else f"{root}.{layer.output}")
                handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
            else:
                writer = layer.writers[site.removeprefix("hook_")]
                factors[name] = writer.factor
                handles.append(
                    network.get_submodule(f"{root}.{writer.path}").register_forward_hook(after(name))
                )
        try:
            logits = network(input_ids=self.tokens, use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()
        found = torch.autograd.grad((logits * probe).sum(), list(live.values()))
        return {name: g / factors.get(name, 1.0) for name, g in zip(live, found, strict=True)}

    def _inside_follows(self, layer: int, gradients: SiteValues, values: SiteValues) -> bool:
        """Whether the gradients of pattern, values and scores are those that z = pattern v and a softmax give them."""
        (v, scores, pattern), z = (
            (f"blocks.{layer}.{site}" for site in HEADS[2:]),
            f"blocks.{layer}.attn.hook_z",
        )
        group, g = self.config.n_heads // self.config.kv_heads, gradients[z]
        of_pattern = einsum(g, values[v].repeat_interleave(group, 2), "b q h e, b k h e -> b h q k")
        of_v = einsum(values[pattern], g, "b h q k, b q h e -> b k h e").unflatten(2, (-1, group)).sum(3)
        p = values[pattern]
        of_scores = p * (of_pattern - (p * of_pattern).sum(-1, keepdim=True))
        pairs = ((pattern, of_pattern), (v, of_v), (scores, of_scores))
        return all(name not in gradients or close(gradients[name], found, LOOSE) for name, found in pairs)

    # --- bookkeeping

    @property
    def _mixers(self) -> tuple[WrappedMixer, ...]:
        return self.config.mixers  # type: ignore[return-value]

    def _passed(self, edits: Sequence[Edit] = (), tokens: Tensor | None = None) -> dict[str, Tensor] | None:
        """Every site of a pass under these edits, and its logits; None if the network fails."""
        tap = Tap([Read(name) for name in names(self.config, on_demand=True)], edits)
        try:
            logits = self.model(self.tokens if tokens is None else tokens, tap)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            return None
        return {read.site: value for read, value in tap.values.items()} | {"logits": logits}

    def _drop(self, layer: int, sites: Sequence[str], why: str) -> None:
        """Take sites of a layer away, with the reason."""
        mixers, block = list(self._mixers), self.config.block
        assert isinstance(block, WrappedBlock)
        gone = set(sites) & set(mixers[layer].offered)
        if "attn.hook_z" in gone:
            gone |= {"attn.hook_result"} & set(mixers[layer].offered)
        mixers[layer] = replace(
            mixers[layer], offered=tuple(s for s in mixers[layer].offered if s not in gone)
        )
        refused = (*block.refused, *((f"blocks.{layer}.{site}", why) for site in sorted(gone)))
        self._use(replace(self.config, mixer=tuple(mixers), block=replace(block, refused=refused)))

    def _refuse(self, name: str, why: str) -> None:
        block = self.config.block
        assert isinstance(block, WrappedBlock)
        self._use(replace(self.config, block=replace(block, refused=(*block.refused, (name, why)))))

    def _mix(self, mixers: Sequence[WrappedMixer]) -> None:
        """Say of each layer what was found of it; a network without blocks has none to say it of."""
        if mixers:
            self._use(replace(self.config, mixer=tuple(mixers)))

    def _use(self, config: ModelConfig) -> None:
        self.config = self.model.config = config


def _sink(scores: Tensor, pattern: Tensor) -> Tensor:
    """The score of what takes the rest of each row's attention, by head; -inf where nothing is left."""
    rest = 1 - pattern.double().sum(-1)
    found = scores.double().logsumexp(-1) + (rest / (1 - rest)).clamp_min(0).log()
    found = torch.where(rest < 1e-5, torch.full_like(found, -torch.inf), found)
    return found.mean((0, 2)).to(scores.dtype)


def _changed(kind: str) -> Callable[[Tensor], Tensor]:
    """A change of a site that nothing else makes: noise of its own size; factors, where it is positive."""

    def change(cells: Tensor) -> Tensor:
        noise = torch.rand(cells.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(
            cells
        )
        if kind.endswith(("hook_pattern", "hook_scale")):
            return cells * (0.5 + noise)
        finite = cells.where(cells.isfinite(), torch.zeros_like(cells))
        return cells + (noise - 0.5) * finite.square().mean().sqrt()

    return change
