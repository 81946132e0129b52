"""A neural long-term memory beside attention to a few tokens, in the three arrangements of Titans.

Behrouz et al. 2024, "Titans: Learning to Memorize at Test Time", section 4: memory as a context, as a gate, as a layer.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from interp.model.attention import Attention, Pass
from interp.model.config import ModelConfig
from interp.model.mask import picked
from interp.model.mixer_variants import LongTermMemory
from interp.model.mixers.neural_memory import Held, Lesson, learn, read
from interp.model.mixers.texts import Texts, texts
from interp.model.norm import Normalize
from interp.model.tap import Scope, at

_PROJECTIONS = {"context": 5, "gate": 0, "layer": 3}
"""Matrices within a head. context: reading to key and value; attention's output to key, value and query of the memory.
layer: the memory's reading to attention's query, key and value."""
Values = dict[str, Tensor]
"""What the sites within the recurrence hold, text by text."""
State = tuple[Tensor, ...]
_RATES = ("momentum", "step", "forget")
T = TypeVar("T")


class MemoryMixer(Attention):
    """Attention to persistent vectors and a segment or window, and a memory that learns while the text is read.

    Memory and attention are those of a head by itself, e wide: M maps keys to values of the head, as `neural_memory`
    says, and is read after the token's own step, M_t(q_t). As in section 4.4, queries, keys and values pass SiLU before
    the memory, and queries and keys are divided by their norm; momentum, step and forgetting are sigmoids of three
    numbers per head made from x (`rates`), which begin at 1/2, 1/4 and 1/100. The step is divided by `chunk`: as the
    gradients of a chunk are taken at one network, the steps of a linear memory do not overshoot together.
    Attention's keys and values of the `n_persistent` vectors are trained as they are. A text's segments are counted
    from its first kept token.

    gate (equations 26-28): z = a * sigmoid(gamma m): a attention to the last `segment` tokens, m the memory's reading;
    both have the block's q, k and v.
    layer (29-31): q, k, v are the memory's; z is attention to the last `segment` tokens over its readings.
    context (21-25): attention sees the readings of its segment, made by the memory as the segment found it, and the
    segment, both up to the query; the memory learns from attention's output a_t, then z = a * sigmoid(gamma M_t(a_t)).

    Where the paper has convolutions behind the projections there are none here, nor a gate before W_O. Rotary positions
    rotate the queries and keys of attention (not of the memory, nor of readings and persistent vectors).
    """

    def _build(self, config: ModelConfig) -> None:
        super()._build(config)
        kind = config.mixers[self.layer]
        assert isinstance(kind, LongTermMemory)
        self.kind = kind
        heads, e = config.n_heads, self.d_head
        self.memory = nn.Parameter(torch.randn(kind.depth, heads, e, e))
        self.rates = nn.Linear(config.d_model, 3 * heads)
        begin = torch.tensor([0.5, 0.25, 0.01]).logit()
        self.rates.bias = nn.Parameter(begin.repeat_interleave(heads))
        self.persistent = nn.Parameter(torch.randn(2, kind.n_persistent, heads, e))
        inner = _PROJECTIONS[kind.arrangement]
        self.inner = nn.Parameter(torch.randn(inner, heads, e, e)) if inner else None
        self.gamma = nn.Parameter(torch.ones(heads * e)) if kind.arrangement != "layer" else None

    def forward(
        self,
        x: Float[Tensor, "b p d"],
        source: tuple[Float[Tensor, "b p d"], Normalize],
        shared: Pass,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """z W_O + b_O; the sums of memory and attention run in float32 at least."""
        q, k, v = self._project(x, source, tap)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, tap), self.k_norm(k, tap)
        momentum, step, forget = rearrange(self.rates(x).sigmoid(), "b p (r h) -> r b p h", r=3)
        rates = (momentum, step / self.kind.chunk, forget)
        given = {name: at(tap, f"attn.hook_{name}", rate) for name, rate in zip(_RATES, rates, strict=True)}
        (rows, n), segment = x.shape[:2], self.kind.segment
        where = shared.once(("texts", segment), lambda: texts(shared, rows, n, segment))
        state = () if shared.cache is None else shared.cache.states.get(self.layer, ())
        wide = torch.promote_types(x.dtype, torch.float32)
        given = {name: where.apart(rate.to(wide)) for name, rate in given.items()}
        mix = self._context if self.kind.arrangement == "context" else self._beside
        with torch.autocast(x.device.type, enabled=False):
            z, state = mix((q.to(wide), k.to(wide), v.to(wide)), given, where, state, shared, tap)
        if shared.cache is not None:
            shared.left[self.layer] = state
        z = z.to(v.dtype) if only is None else picked(z.to(v.dtype), only)
        return self._write(at(tap, "attn.hook_z", z), tap)

    def _beside(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        rates: Values,
        where: Texts,
        state: State,
        shared: Pass,
        tap: Scope | None,
    ) -> tuple[Float[Tensor, "b p h e"], State]:
        """The memory over the whole text, and attention beside it (gate) or over its readings (layer)."""
        q, k, v = qkv
        segment = self.kind.segment
        held = self._held(state, where, v)

        def learned(given: Values) -> tuple[Values, State]:
            lesson = _lesson([where.apart(part) for part in qkv], rates | given, where.present)
            found = learn(lesson, held, self.kind.chunk, where.span)
            values = {"surprise": _by_column(found.surprise), "memory_read": _by_column(found.reading)}
            return values, (found.after.base, found.after.now, found.after.speed)

        values, after = _observed(learned, ("surprise",), where, tap)
        reading = at(tap, "attn.hook_memory_read", where.together(values["memory_read"]))
        if self.inner is not None:
            q, k, v = (_within_heads(reading, weight) for weight in self.inner)
        q, k = self._placed(q, k, shared.everywhere, shared, tap)
        q, k, v = (where.apart(part) for part in (q, k, v))
        past = state[3:] if state else (torch.zeros_like(k[:, :1]).expand(-1, 2 * segment, -1, -1),) * 2
        k, v = (
            torch.cat((old[:, :segment], _filled(old[:, segment:], new, where)), 1)
            for old, new in zip(past, (k, v), strict=True)
        )
        mask = _window_mask(where, segment)

        def attended(given: Values) -> tuple[Values, Tensor]:
            a, pattern = self._segments(q, _two(k, segment), _two(v, segment), mask, given, _patterned(tap))
            return {"window_pattern": pattern}, a

        _, a = _observed(attended, ("window_pattern",), where, tap)
        kept = (_last(x, where, segment, 2 * segment) for x in (k, v))
        return self._gated(where.together(a), reading, tap), (*after, *kept)

    def _context(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        rates: Values,
        where: Texts,
        state: State,
        shared: Pass,
        tap: Scope | None,
    ) -> tuple[Float[Tensor, "b p h e"], State]:
        """Segment by segment: what the memory says, attention to it and to the segment, and what the memory learns."""
        segment, width = self.kind.segment, where.source.shape[1]
        ask = where.apart(_query(qkv[0]))
        q, k = (where.apart(x) for x in self._placed(*qkv[:2], shared.everywhere, shared, tap))
        v = where.apart(qkv[2])
        held = self._held(state, where, v)
        past = state[4:] if state else (torch.zeros_like(v[:, :1]).expand(-1, segment, -1, -1),) * 4
        k, v = (_filled(old, new, where) for old, new in zip(past[2:], (k, v), strict=True))
        mask = torch.ones(segment, segment, dtype=torch.bool, device=k.device).tril().repeat(1, 2)
        assert self.inner is not None
        read_k, read_v, to_k, to_v, to_q = self.inner.to(v)
        shown = ("memory_read", "window_pattern", "surprise")

        def run(given: Values) -> tuple[Values, State]:
            now, net = held, state[3] if state else held.now
            found: list[Values] = []
            for first in range(0, width, segment):
                part = slice(first, first + segment)
                here = {name: x[:, part] for name, x in (rates | given).items()}
                net = torch.where(where.present[:, first, None, None, None, None], now.now, net)
                reading = here.get("memory_read", _by_column(read(net, _by_head(ask[:, part]))))
                said = [_within_heads(reading, weight) for weight in (read_k, read_v)]
                if first == 0:
                    said = [_filled(old, new, where) for old, new in zip(past[:2], said, strict=True)]
                keys, values = (torch.cat((a, b[:, part]), 1) for a, b in zip(said, (k, v), strict=True))
                a, pattern = self._segments(
                    q[:, part], keys[:, None], values[:, None], mask, here, _patterned(tap)
                )
                told = [_within_heads(a, weight) for weight in (to_q, to_k, to_v)]
                lesson = _lesson(told, here, where.present[:, part])
                span = max(0, where.span[0] - first), min(segment, where.span[1] - first)
                learned = learn(lesson, now, self.kind.chunk, span)
                now, gate = learned.after, _by_column(learned.reading)
                each = (reading, pattern, _by_column(learned.surprise), a, gate, *said)
                found.append(dict(zip((*shown, "a", "gate", "said_k", "said_v"), each, strict=True)))
            whole = {name: torch.cat([one[name] for one in found], 1) for name in found[0]}
            return whole, (now.base, now.now, now.speed, net, whole["said_k"], whole["said_v"])

        values, after = _observed(run, shown, where, tap)
        kept = (_last(x, where, segment, segment) for x in (*after[4:], k, v))
        z = self._gated(where.together(values["a"]), where.together(values["gate"]), tap)
        return z, (*after[:4], *kept)

    def _held(self, state: State, where: Texts, like: Tensor) -> Held:
        """The memory that an earlier pass left, or as it begins."""
        if state:
            return Held(*state[:3])
        begin = self.memory.to(like).expand(len(where.source), *self.memory.shape)
        return Held(begin, begin, torch.zeros_like(begin))

    def _segments(
        self,
        q: Float[Tensor, "r t h e"],
        k: Float[Tensor, "r s c h e"],
        v: Float[Tensor, "r s c h e"],
        mask: Bool[Tensor, "*rows q c"],
        given: Values,
        patterned: bool,
    ) -> tuple[Float[Tensor, "r t h e"], Float[Tensor, "r t h _"]]:
        """Attention of the queries of each segment to the persistent vectors and these keys; the pattern (empty unless
        `patterned`).
        """
        rows, n_segments = k.shape[:2]
        q = rearrange(q, "r (s q) h e -> (r s) h q e", s=n_segments)
        before = [x.to(k)[None].expand(rows * n_segments, -1, -1, -1) for x in self.persistent]
        k, v = (
            torch.cat((p, x.flatten(0, 1)), 1).transpose(1, 2) for p, x in zip(before, (k, v), strict=True)
        )
        allowed = F.pad(mask, (self.kind.n_persistent, 0), value=True)
        if allowed.ndim > 2:
            allowed = allowed.expand(rows, -1, -1, -1).flatten(0, 1)[:, None]
        if not patterned:
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scale)
            pattern = a[..., :0]
        else:
            pattern = ((q * self.scale) @ k.mT).masked_fill(~allowed, -torch.inf).softmax(-1)
            if "window_pattern" in given:
                pattern = rearrange(given["window_pattern"], "r (s q) h c -> (r s) h q c", s=n_segments)
            a = pattern @ v
        whole = "(r s) h q x -> r (s q) h x"
        return rearrange(a, whole, s=n_segments), rearrange(pattern, whole, s=n_segments)

    def _gated(
        self, a: Float[Tensor, "b p h e"], reading: Float[Tensor, "b p h e"], tap: Scope | None
    ) -> Float[Tensor, "b p h e"]:
        """Attention's output times what the memory lets through."""
        if self.gamma is None:
            return a
        return a * at(tap, "attn.hook_gate", (self.gamma.to(a).view(a.shape[2:]) * reading).sigmoid())


def _observed(
    run: Callable[[Values], tuple[Values, T]], names: Sequence[str], where: Texts, tap: Scope | None
) -> tuple[Values, T]:
    """What `run` gives, its values shown to their sites; altered ones are given to it, and it runs again.

    A recurrence has no moment at which a whole site is known. So an edit gets the values of a run without it (but with
    the edits of the sites named before), and then every column uses what the edit returned.
    """
    given: Values = {}
    values, result = run(given)
    if tap is None:
        return values, result
    for name in names:
        site = f"attn.hook_{name}"
        if not tap.wants(site):
            continue
        shown = where.together(values[name])
        turned = name == "window_pattern"  # queries stand behind heads
        shown = at(tap, site, shown.transpose(1, 2) if turned else shown)
        if tap.alters(site):
            given = given | {name: where.apart(shown.transpose(1, 2) if turned else shown)}
            values, result = run(given)
    return values, result


def _patterned(tap: Scope | None) -> bool:
    return tap is not None and tap.wants("attn.hook_window_pattern")


def _by_head(x: Shaped[Tensor, "r t h *rest"]) -> Shaped[Tensor, "r h t *rest"]:
    return x.transpose(1, 2)


_by_column = _by_head
"""The way back, `[r h t]` to `[r t h]`."""


def _within_heads(x: Float[Tensor, "b p h e"], weight: Float[Tensor, "h e f"]) -> Float[Tensor, "b p h f"]:
    return einsum(x, weight.to(x), "b p h e, h e f -> b p h f")


def _query(x: Float[Tensor, "*b e"]) -> Float[Tensor, "*b e"]:
    """What a memory is asked, or learns a value under."""
    return F.normalize(F.silu(x), dim=-1)


def _lesson(qkv: Sequence[Tensor], given: Values, present: Bool[Tensor, "r t"]) -> Lesson:
    """Queries, keys and values `[r t h e]` as a memory takes them, with rates and perhaps surprise `[r t h]`."""
    rates = {name: _by_head(given[name]) for name in (*_RATES, "surprise") if name in given}
    q, k, v = (_by_head(x) for x in (_query(qkv[0]), _query(qkv[1]), F.silu(qkv[2])))
    return Lesson(q, k, v, present=present, **rates)


def _filled(
    old: Float[Tensor, "r c h e"], new: Float[Tensor, "r t h e"], where: Texts
) -> Float[Tensor, "r t h e"]:
    """`new` with the columns of its first segment that an earlier pass computed."""
    segment = old.shape[1]
    earlier = torch.arange(segment, device=new.device) < where.start[:, None]
    return torch.cat((torch.where(earlier[..., None, None], old, new[:, :segment]), new[:, segment:]), 1)


def _last(x: Float[Tensor, "r _ h e"], where: Texts, segment: int, n: int) -> Float[Tensor, "r n h e"]:
    """The `n` columns that a pass that goes on from here begins with: up to the end of the unfinished segment."""
    begin = (where.start + where.present.sum(1)) // segment * segment
    columns = begin[:, None] + torch.arange(n, device=x.device)
    return picked(F.pad(x, (0, 0, 0, 0, 0, segment)), columns)


def _two(x: Float[Tensor, "r _ h e"], segment: int) -> Float[Tensor, "r s c h e"]:
    """For each segment but the first the one before and itself."""
    each = x.unflatten(1, (-1, segment))
    return torch.cat((each[:, :-1], each[:, 1:]), 2)


def _window_mask(where: Texts, segment: int) -> Bool[Tensor, "r s q c"]:
    """Whether a query sees a key of the segment before, and of its own: the last `segment` tokens."""
    own = torch.ones(segment, segment, dtype=torch.bool, device=where.start.device).tril()
    n_segments = where.source.shape[1] // segment
    there = torch.arange(n_segments, device=own.device) > 0
    before = ~own & (there | where.begun[:, None])[..., None, None]
    return torch.cat((before, own.expand_as(before)), -1)
