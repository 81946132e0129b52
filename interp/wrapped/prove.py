"""Proofs about a wrapped network: every site is read and edited, and compared with the sites that follow from it.

A site is offered where the identities that define it (z = pattern @ v, resid_post = resid_pre + attn_out + mlp_out,
...) hold in a pass that reads every site, and hold again in passes that edit it. Options of a pass (a later start,
padding, packed documents, a cache, gradients) are offered where two ways to compute the same numbers agree.
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
"""Relative tolerances in float32: between a sum of sites and its value, and between passes computed in two ways."""
GRADIENT = 1e-3
"""Relative tolerance between two gradients in float32."""
_HOOKED = ("hook_stream", "hook_resid_pre", "hook_attn_out", "hook_mlp_out", "hook_more_out", "attn.hook_z")
"""Sites whose value is also the input or output of a module, where an ordinary PyTorch hook can read it."""
MOST_STARTS = 6
"""At most about this many blocks are tried as a later start."""
FIRSTS = 5
"""Number of candidates for the network's position id of the first token: 0, 1, ..."""
EMBEDDED = ("hook_embed", "hook_pos_embed")
SINGLE = 24
"""Number of one-token texts on which the matrices of heads are found (at one position nothing is rotated)."""
NORMS = {"attn_out": "ln1_post", "mlp_out": "ln2_post"}
"""Name of the norm after each sublayer, in networks that have one."""
SiteValues = Mapping[str, Tensor]
Law = tuple[str, Sequence[str], Callable[[], bool]]
"""An identity: the site that it computes, the sites that are dropped if it fails, and the test."""
Reads = tuple[Read, ...]


def some_tokens(network: nn.Module, rows: int = 2, n: int = 7) -> Int[Tensor, "b p"]:
    """Random tokens of the network's vocabulary."""
    vocabulary = network.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    drawn = torch.randint(0, vocabulary, (rows, n), generator=torch.Generator().manual_seed(11))
    return without_padding(network, drawn, vocabulary).to(next(network.parameters()).device)


def wrap(
    network: nn.Module, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Wrapped:
    """A Hugging Face decoder as a `Transformer`, with the sites that were proven for it.

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
        proof, registry = _proof_of(precise)
    trees = trees_of(plain, registry=registry)
    return Wrapped(trees, proof.plan, proof.config, proof.readings).requires_grad_(False)


def _check(network: nn.Module) -> None:
    """ValueError unless the network is a Hugging Face decoder that gives logits of tokens."""
    config = getattr(network, "config", None)
    if config is None or not hasattr(network, "get_output_embeddings"):
        raise ValueError(f"a Hugging Face model with a config is required, got {type(network).__name__}")
    if getattr(config, "is_encoder_decoder", False):
        raise UnknownNetworkError(
            f"{type(network).__name__} is an encoder-decoder: only decoders are wrapped"
        )
    if network.get_output_embeddings() is None:  # type: ignore[operator]
        raise UnknownNetworkError(f"{type(network).__name__} gives no logits of tokens")


def _proof_of(plain: nn.Module) -> tuple[_Proof, bool]:
    """The finished proof, and whether the watched copy may use this package's attention."""
    tokens = some_tokens(plain)
    try:
        logits = plain(input_ids=tokens, use_cache=False).logits
    except (RuntimeError, LookupError, TypeError, ValueError, ArithmeticError) as cause:
        place = getattr(getattr(plain, "config", None), "_name_or_path", "")
        raise ValueError(
            f"a network that runs is required, {type(plain).__name__}{f' of {place}' if place else ''} fails in "
            f"transformers' own code, as its config makes it: {cause}"
        ) from cause
    n = tokens.shape[1]
    for column in (n // 2, n - 1):
        changed = plain(input_ids=another(plain, tokens, column), use_cache=False).logits
        if not close(changed[:, :column], logits[:, :column], LOOSE):
            raise UnknownNetworkError("its logits depend on later tokens: only causal decoders are wrapped")
    why = ""
    for registry in (True, False):
        trees = trees_of(plain, registry=registry)
        try:
            plan, watched_logits = explored(trees.watched, tokens, trees.original)
        except UnknownNetworkError:
            raise
        except Exception as failed:
            if not registry:
                raise
            why = f"attention through the registry fails ({type(failed).__name__})"
            continue
        if close(watched_logits, logits, LOOSE):
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
    """The network's position id of the first token: with ids counted from it the logits are those without ids."""
    if "position_ids" not in inspect.signature(network.forward).parameters:
        return 0
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    for first in range(FIRSTS):
        try:
            shifted_logits = network(input_ids=tokens, position_ids=places + first, use_cache=False).logits
        except Exception:  # left to the options of a pass, which are refused where it fails
            return 0
        if close(shifted_logits, logits, LOOSE):
            return first
    return 0


# --- the proof ------------------------------------------------------------------------------------------------------


class _Proof:
    """A network whose config claims every site that was found; each method drops the claims that fail."""

    def __init__(
        self, trees: Trees, plan: NetworkPlan, config: ModelConfig, tokens: Int[Tensor, "b p"], logits: Tensor
    ) -> None:
        self.trees, self.plan, self.config = trees, plan, config
        self.tokens, self.logits = tokens, logits
        self.model = Wrapped(trees, plan, config)
        self.numbers = list(dict.fromkeys(numbers(settings(trees.plain).to_dict())))
        self._sinks: dict[int, Tensor] = {}
        self._z_additive: dict[int, bool] = {}
        """By layer, whether z was pattern @ v in the pass without edits."""
        self._scales: dict[tuple[int, float | None], float] = {}
        self.readings: dict[int, StreamReading] = {}
        """By layer, the linear maps from the normed stream to q, k and v, where they were found."""

    def sites(self) -> None:
        """Drop every site whose identities fail, in a pass that reads all sites or in passes that edit one kind."""
        self.model.leaking = []
        base = self._values_of_all_sites()
        leaking, self.model.leaking = self.model.leaking, None
        if not close(base["logits"], self.logits, LOOSE):
            raise UnknownNetworkError("it gives other logits when everything is read")
        if not close(self.model(self.tokens, Tap([Read(final_stream(self.config))])), self.logits, LOOSE):
            raise UnknownNetworkError("it gives other logits when its stream is read")
        self._check_read_out(base[final_stream(self.config)])
        for layer in set(leaking):
            self._drop(layer, HEADS[3:], "its scores are used beside the softmax")
        self._check_shapes(base)
        for layer in range(self.config.n_layers):
            self._check_laws(layer, base, edited=None)
        kinds = dict.fromkeys(site for m in self._mixers for site in m.offered)
        for kind in kinds:
            self._test_edits(kind, base)
        self._test_outside_sites()
        self._set_traits(base)

    def _test_edits(self, kind: str, base: SiteValues) -> None:
        """Drop a site in the layers where an edit of it fails, breaks an identity or changes nothing."""
        layers = [i for i, m in enumerate(self._mixers) if kind in m.offered]
        if not layers:
            return
        seen = self._site_values([Edit(f"blocks.{i}.{kind}", _noise_edit(kind)) for i in layers])
        for i in layers:
            if seen is None:
                self._drop(i, [kind], "an edit of it fails")
                continue
            self._check_laws(i, seen, edited=kind)
            if kind in self._mixers[i].offered:
                self._drop_if_without_effect(i, kind, base)

    def _check_read_out(self, stream: Tensor) -> None:
        """UnknownNetworkError unless `read_out` gives the network's own logits for two other final streams."""
        noise = torch.randn(stream.shape, generator=torch.Generator().manual_seed(17)).to(stream)
        size = stream.square().mean().sqrt()
        for factor in (0.1, 4.0):
            new = factor * (stream + size * noise)
            if not close(self.model.read_out(new), self._logits_of_stream(new), LOOSE):
                raise UnknownNetworkError(
                    "other final streams do not give the logits that are read out of them"
                )

    def _logits_of_stream(self, stream: Tensor) -> Tensor:
        """The logits of the network's own code with `stream` as its final stream, by an ordinary PyTorch hook."""
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

    def _set_traits(self, base: SiteValues) -> None:
        """Record for each layer whether its pattern is a distribution over keys, and whether z = pattern @ v."""
        mixers = list(self._mixers)
        for layer, mixer in enumerate(mixers):
            pattern = base.get(f"blocks.{layer}.attn.hook_pattern")
            shares = pattern is not None and bool(
                (pattern >= 0).all() and (pattern.sum(-1) <= 1 + SUMS).all()
            )
            additive = {"attn.hook_pattern", "attn.hook_v", "attn.hook_z"} <= set(mixer.offered)
            mixers[layer] = replace(
                mixer, distribution=shares, additive=additive and self._z_additive.get(layer, False)
            )
        self._set_mixers(mixers)

    def _values_of_all_sites(self) -> SiteValues:
        """The values of all sites in one pass; sites inside attention are dropped while that pass fails."""
        seen = self._site_values()
        for sites in (HEADS[:3], HEADS, ("attn.hook_z", "attn.hook_result")):
            if seen is not None:
                return seen
            for layer in range(self.config.n_layers):
                self._drop(layer, sites, "a pass that reads it fails")
            seen = self._site_values()
        if seen is None:
            raise UnknownNetworkError("a pass that reads its stream fails")
        return seen

    def _check_shapes(self, base: SiteValues) -> None:
        """Drop sites inside attention with another number of heads or another shape than `[b h q k]`, `[b p h e]`."""
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

    def _check_laws(self, layer: int, seen: SiteValues, *, edited: str | None) -> None:
        """Test every identity of a layer, except that for the edited site; drop the sites for which one fails."""
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
        """Identities of the stream: resid_mid and resid_post as sums, and each sublayer's output through its norm."""

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
        """Identities of attention: q, k -> scores -> pattern; pattern, v -> z -> attention output."""
        has = set(self._mixers[layer].offered)
        if "attn.hook_z" in has and "hook_attn_out" in has:
            normed = "ln1_post.hook_normalized" in has
            target = "ln1_post.hook_normalized" if normed else "hook_attn_out"
            sites = ["attn.hook_z", "attn.hook_result"]
            yield target, sites, lambda: self._attention_output_follows(layer, seen, target)
        if "attn.hook_pattern" in has and "attn.hook_attn_scores" in has:
            yield "attn.hook_pattern", HEADS[3:], lambda: self._pattern_follows(layer, seen)
        if {"attn.hook_pattern", "attn.hook_v", "attn.hook_z"} <= has and self._is_additive(layer):
            yield "attn.hook_z", ["attn.hook_v"], lambda: self._z_follows(layer, seen)
        if {"attn.hook_attn_scores", *HEADS[:2]} <= has:
            yield "attn.hook_attn_scores", HEADS[:2], lambda: self._scores_follow(layer, seen)

    def _attention_output_follows(self, layer: int, seen: SiteValues, target: str) -> bool:
        """Whether attention's output is the sum of its heads' results plus the bias, through its norm if it has one."""
        out = self.model.block(layer).attn.out
        result = seen[f"blocks.{layer}.attn.hook_result"]
        added = result.sum(2) if out.bias is None else result.sum(2) + out.bias  # [b p h d] -> [b p d]
        norm = self.model.block(layer).post_norm("attn_out")
        if norm is None:
            added = added * self.config.factor("attn_out")
        else:
            added = norm.linear(added, seen[f"blocks.{layer}.ln1_post.hook_scale"])
        return close(added, seen[f"blocks.{layer}.{target}"], 5 * COMPUTED)

    def _pattern_follows(self, layer: int, seen: SiteValues) -> bool:
        """Whether the pattern is the softmax over keys of the scores, or of the scores and one sink score per head."""
        scores, pattern = (seen[f"blocks.{layer}.{site}"] for site in HEADS[3:])
        sink = self._sinks.setdefault(layer, _sink_scores(scores, pattern))
        more = sink[None, :, None, None].expand(*scores.shape[:3], 1)
        return close(torch.cat((scores, more), -1).softmax(-1)[..., :-1], pattern, LOOSE)

    def _is_additive(self, layer: int) -> bool:
        return self._z_additive.get(layer, True)

    def _z_follows(self, layer: int, seen: SiteValues) -> bool:
        """Whether z is pattern @ v; the first test of a layer (without edits) is only recorded and returns True."""
        v, pattern = seen[f"blocks.{layer}.attn.hook_v"], seen[f"blocks.{layer}.attn.hook_pattern"]
        z = seen[f"blocks.{layer}.attn.hook_z"]
        group = self.config.n_heads // self.config.kv_heads
        v_by_head = v.repeat_interleave(group, 2)  # [b k g e] -> [b k h e]
        expected_z = einsum(pattern, v_by_head, "b h q k, b k h e -> b q h e")
        holds = expected_z.shape == z.shape and close(expected_z, z, LOOSE)
        if layer not in self._z_additive:
            self._z_additive[layer] = holds
            return True
        return holds

    def _scores_follow(self, layer: int, seen: SiteValues) -> bool:
        """Whether unmasked scores are c * q . k, or cap * tanh(c * q . k / cap) with a cap from the config."""
        scores = seen[f"blocks.{layer}.attn.hook_attn_scores"]
        q, k = (seen[f"blocks.{layer}.{site}"] for site in HEADS[:2])
        if q.shape[-1] != k.shape[-1]:
            return False
        k = k.repeat_interleave(self.config.n_heads // self.config.kv_heads, 2)  # [b k g e] -> [b k h e]
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

    def _drop_if_without_effect(self, layer: int, kind: str, base: SiteValues) -> None:
        """Drop a site inside attention if an edit of it changes nothing and no identity about z tests it."""
        if kind not in HEADS or (self._is_additive(layer) and "attn.hook_v" in self._mixers[layer].offered):
            return
        seen = self._site_values([Edit(f"blocks.{layer}.{kind}", _noise_edit(kind))])
        after = f"blocks.{layer}.hook_resid_post"
        if seen is None or close(seen[after], base[after], LOOSE):
            self._drop(layer, [kind], "an edit of it changes nothing")

    def _test_outside_sites(self) -> None:
        """Test every site outside the blocks, and refuse those that fail.

        A site passes if an edit of it changes the logits and the embeddings still sum to the input of block 0.
        """
        for site in names(self.config, on_demand=True):
            if site.startswith("blocks."):
                continue
            seen = self._site_values([Edit(site, _noise_edit(site))])
            parts = [seen[s] for s in EMBEDDED if s in seen] if seen is not None else []
            holds = seen is not None and not close(seen["logits"], self.logits, LOOSE)
            if holds and seen is not None and parts:
                entered = sum(parts[1:], parts[0])
                norm = self.model.ln_embed
                if norm is not None and site != "ln_embed.hook_normalized":
                    entered = norm.linear(entered, seen["ln_embed.hook_scale"])
                elif norm is not None:
                    entered = seen[site]
                holds = close(entered, seen["blocks.0.hook_resid_pre"], LOOSE)
            if not holds:
                block = self.config.block
                assert isinstance(block, WrappedBlock)
                proven = tuple(s for s in block.outside if s != site)
                refused = (*block.refused, (site, "an edit of it does not do what it says"))
                self._set_config(replace(self.config, block=replace(block, outside=proven, refused=refused)))

    # --- the matrices of heads

    def matrices(self) -> None:
        """Find the matrices of queries, keys and values, where they are linear maps of the normed stream alone."""
        single_tokens = some_tokens(self.trees.plain, SINGLE, 1)
        alone, base = self._site_values(tokens=single_tokens), self._site_values()
        if alone is None or base is None:
            return
        calls, _ = recorded(self.trees.plain, single_tokens, Running(self.trees.original, noted=[]))
        mixers = list(self._mixers)
        for layer, mixer in enumerate(mixers):
            stream_reading = self._stream_reading(layer, calls, alone, base)
            why = "it was not found among linear maps of the normed stream alone"
            if stream_reading is not None:
                self.readings[layer] = stream_reading
            maps = {} if stream_reading is None else stream_reading.maps
            mixers[layer] = replace(mixer, values="v" in maps, queries={"q", "k", "v"} <= set(maps))
            for name in "qkv":
                if name not in maps:
                    self._refuse(f"blocks.{layer}.attn.W_{name.upper()}", why)
        self._set_mixers(mixers)

    def _stream_reading(
        self, layer: int, calls: Calls, alone: SiteValues, base: SiteValues
    ) -> StreamReading | None:
        """The maps from the normed stream to q, k and v of a layer, found on one-token texts and tested everywhere.

        `alone` has the site values of the one-token texts, `base` those of the longer ones.
        """
        site_of = {"v": "attn.hook_v"} | dict(zip("qk", HEADS[:2], strict=True))
        offered, root = self._mixers[layer].offered, self.plan.root(layer)
        seen = {name: alone[f"blocks.{layer}.{site}"] for name, site in site_of.items() if site in offered}
        stream = calls[root][0].given
        if not seen or stream is None:
            return None
        inner = {
            path.removeprefix(f"{root}."): runs[0]
            for path, runs in calls.items()
            if path.startswith(f"{root}.") and len(runs) == 1
        }
        block = self.trees.plain.get_submodule(root)
        candidate = reading(block, inner, stream, seen)
        if candidate is None:
            return None
        before = candidate.before(block, stream.shape[-1]).to(stream)
        x = before(base[f"blocks.{layer}.hook_resid_pre"])
        mapped = {name: head_map.applied(block, x) for name, head_map in candidate.maps.items()}
        expected = {name: base[f"blocks.{layer}.{site_of[name]}"] for name in mapped}
        scale = next((c for (at, _), c in self._scales.items() if at == layer), None)
        rotation_agrees = scale is not None and {"q", "k"} <= set(mapped)
        rotation_agrees = rotation_agrees and agree(
            (mapped["q"], mapped["k"]), (expected["q"], expected["k"])
        )
        v_agrees = "v" in mapped and close(mapped["v"], expected["v"], 5 * COMPUTED)
        holds = {"v": v_agrees, "q": rotation_agrees, "k": rotation_agrees}
        maps = {name: head_map for name, head_map in candidate.maps.items() if holds[name]}
        return replace(candidate, maps=maps, scale=scale or 1.0) if maps else None

    # --- options of a pass

    def options(self) -> None:
        """Refuse every option of a pass (start, padding, documents, cache, gradients) that changes the numbers."""
        options: dict[str, Callable[[Reads], bool]] = {
            "start": self._later_start_agrees, "left padding": partial(self._padding_agrees, left=True),
            "right padding": partial(self._padding_agrees, left=False), "documents": self._packing_agrees,
            "cache": partial(self._cache_agrees, padded=False),
            "cache of padded rows": partial(self._cache_agrees, padded=True),
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
                if self._gradients_agree()
                else "autograd on the network's own code was measured to give others"
            )
        except RuntimeError as failed:
            why = f"it has none ({str(failed)[:80]})"
        if why:
            self._refuse("gradients", why)

    @property
    def _last_sites(self) -> Reads:
        """Reads of every site of the last block, so that masks must be numeric; without blocks of the final stream."""
        if not self.config.n_layers:
            return (Read(final_stream(self.config)),)
        last = f"blocks.{self.config.n_layers - 1}."
        return tuple(Read(name) for name in names(self.config, on_demand=True) if name.startswith(last))

    def _later_start_agrees(self, reads: Reads) -> bool:
        """Whether passes that start at a later block, from its recorded input, give the same stream and logits."""
        n = self.config.n_layers
        step = -(-(n - 1) // MOST_STARTS) or 1
        seen = self._site_values()
        assert seen is not None
        for layer in range(1, n, step):
            logits = self.model(seen[f"blocks.{layer}.hook_resid_pre"], Tap(reads), start=layer)
            middle = self.model(seen[f"blocks.{layer}.hook_resid_pre"], start=layer, stop=layer + 1)
            ends_match = close(middle, seen[f"blocks.{layer}.hook_resid_post"], LOOSE)
            if not (ends_match and close(logits, self.logits, LOOSE)):
                return False
        return True

    def _padding_agrees(self, reads: Reads, *, left: bool) -> bool:
        """Whether a row with three columns of padding has the logits of the same tokens without padding."""
        n = self.tokens.shape[1] - 3
        keep = torch.ones_like(self.tokens, dtype=torch.bool)
        tokens, cut = self.tokens.clone(), slice(0, 3) if left else slice(n, None)
        keep[0, cut] = False
        if left:
            tokens[0, 3:] = self.tokens[0, :n]
        alone = self.model(self.tokens[:1, :n])
        logits = self.model(tokens, Tap(reads) if reads else None, keep=keep)
        unpadded = logits[:1, 3:] if left else logits[:1, :n]
        return close(unpadded, alone, LOOSE) and close(logits[1], self.logits[1], LOOSE)

    def _packing_agrees(self, reads: Reads) -> bool:
        """Whether two documents packed into each row have the logits that they have in passes of their own."""
        documents = (torch.arange(self.tokens.shape[1], device=self.tokens.device) >= 3).long()
        logits = self.model(
            self.tokens, Tap(reads) if reads else None, documents=documents.expand_as(self.tokens)
        )
        parts = [self.model(self.tokens[:, :3]), self.model(self.tokens[:, 3:])]
        return close(logits, torch.cat(parts, 1), LOOSE)

    def _cache_agrees(self, reads: Reads, *, padded: bool) -> bool:
        """Whether four passes with a cache, over consecutive columns, give the logits of one pass without."""
        keep = torch.ones_like(self.tokens, dtype=torch.bool)
        keep[0, :2] = not padded
        keep_or_none = keep if padded else None
        cache, step_logits = self.model.new_cache(*self.tokens.shape), []
        for columns in (slice(0, 4), slice(4, 5), slice(5, 6), slice(6, 7)):
            step_keep = None if keep_or_none is None or columns.start else keep_or_none[:, columns]
            tap = Tap(reads) if reads else None
            step_logits.append(self.model(self.tokens[:, columns], tap, keep=step_keep, cache=cache))
        logits = self.model(self.tokens, keep=keep_or_none)
        return close(torch.cat(step_logits, 1)[keep], logits[keep], LOOSE)

    @torch.enable_grad()
    def _gradients_agree(self) -> bool:
        """Whether gradients at sites equal those of hooks on the network, and those in attention follow from z's."""
        generator = torch.Generator().manual_seed(5)
        probe = torch.randn(self.logits.shape, generator=generator).to(self.logits)
        offered = [f"blocks.{i}.{site}" for i, mixer in enumerate(self._mixers) for site in mixer.offered]
        sites = [n for n in offered if n.endswith((*_HOOKED, *HEADS[2:])) and "result" not in n]
        sites = sites if self.config.n_layers else [final_stream(self.config)]
        reads = [Read(name, grad=True) for name in sites]
        tap = Tap([*reads, *(Read(name) for name in sites)])
        gradients = torch.autograd.grad(
            (self.model(self.tokens, tap) * probe).sum(), [tap.live[r] for r in reads]
        )
        ours = dict(zip(sites, gradients, strict=True))
        theirs = self._hook_gradients([n for n in sites if n.endswith(_HOOKED)], probe)
        same = all(close(ours[name], g.reshape(ours[name].shape), GRADIENT) for name, g in theirs.items())
        values = {read.site: value for read, value in tap.values.items()}
        inside = [
            i
            for i in range(self.config.n_layers)
            if self._z_additive.get(i) and f"blocks.{i}.attn.hook_v" in ours
        ]
        return same and all(self._attention_gradients_follow(i, ours, values) for i in inside)

    def _hook_gradients(self, sites: Sequence[str], probe: Tensor) -> dict[str, Tensor]:
        """Gradients at block inputs, sublayer outputs and z, by ordinary PyTorch hooks on the network itself."""
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
        gradients = torch.autograd.grad((logits * probe).sum(), list(live.values()))
        return {name: g / factors.get(name, 1.0) for name, g in zip(live, gradients, strict=True)}

    def _attention_gradients_follow(self, layer: int, gradients: SiteValues, values: SiteValues) -> bool:
        """Whether the gradients of pattern, v and scores follow from that of z = softmax(scores) @ v."""
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
        return all(
            name not in gradients or close(gradients[name], expected, LOOSE) for name, expected in pairs
        )

    # --- bookkeeping

    @property
    def _mixers(self) -> tuple[WrappedMixer, ...]:
        return self.config.mixers  # type: ignore[return-value]

    def _site_values(
        self, edits: Sequence[Edit] = (), tokens: Tensor | None = None
    ) -> dict[str, Tensor] | None:
        """The value of every site, and "logits", in a pass with these edits; None if the network raises an error."""
        tap = Tap([Read(name) for name in names(self.config, on_demand=True)], edits)
        try:
            logits = self.model(self.tokens if tokens is None else tokens, tap)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            return None
        return {read.site: value for read, value in tap.values.items()} | {"logits": logits}

    def _drop(self, layer: int, sites: Sequence[str], why: str) -> None:
        """Remove sites from the claims about a layer, with the reason."""
        mixers, block = list(self._mixers), self.config.block
        assert isinstance(block, WrappedBlock)
        gone = set(sites) & set(mixers[layer].offered)
        if "attn.hook_z" in gone:
            gone |= {"attn.hook_result"} & set(mixers[layer].offered)
        mixers[layer] = replace(
            mixers[layer], offered=tuple(s for s in mixers[layer].offered if s not in gone)
        )
        refused = (*block.refused, *((f"blocks.{layer}.{site}", why) for site in sorted(gone)))
        self._set_config(replace(self.config, mixer=tuple(mixers), block=replace(block, refused=refused)))

    def _refuse(self, name: str, why: str) -> None:
        block = self.config.block
        assert isinstance(block, WrappedBlock)
        self._set_config(replace(self.config, block=replace(block, refused=(*block.refused, (name, why)))))

    def _set_mixers(self, mixers: Sequence[WrappedMixer]) -> None:
        """Put the mixer record of each layer into the config; nothing for a network without blocks."""
        if mixers:
            self._set_config(replace(self.config, mixer=tuple(mixers)))

    def _set_config(self, config: ModelConfig) -> None:
        self.config = self.model.config = config


def _sink_scores(scores: Tensor, pattern: Tensor) -> Tensor:
    """The sink score of each head, from the attention that each row of the pattern lacks to 1; -inf without a sink."""
    missing = 1 - pattern.double().sum(-1)
    sink_scores = scores.double().logsumexp(-1) + (missing / (1 - missing)).clamp_min(0).log()
    sink_scores = torch.where(missing < 1e-5, torch.full_like(sink_scores, -torch.inf), sink_scores)
    return sink_scores.mean((0, 2)).to(scores.dtype)


def _noise_edit(kind: str) -> Callable[[Tensor], Tensor]:
    """The edit that adds random noise of the site's own size; positive sites are multiplied by random factors."""

    def change(cells: Tensor) -> Tensor:
        noise = torch.rand(cells.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(
            cells
        )
        if kind.endswith(("hook_pattern", "hook_scale")):
            return cells * (0.5 + noise)
        finite = cells.where(cells.isfinite(), torch.zeros_like(cells))
        return cells + (noise - 0.5) * finite.square().mean().sqrt()

    return change
