"""A neural long-term memory next to attention to a few tokens, in the three arrangements of Titans.

Behrouz et al. 2024, "Titans: Learning to Memorize at Test Time", section 4: memory as a context, as a gate, as a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from interp.model.attention import Attention, PassState, View, picked
from interp.model.config import ModelConfig
from interp.model.layout import Layout
from interp.model.norm import Normalize
from interp.model.position import Rotation
from interp.model.records import Mixer, Traits, at_least_one, maps_flops
from interp.model.sites import GATE, Site
from interp.model.tap import Scope, at

Arrangement = Literal["context", "gate", "layer"]
_PROJECTIONS = {"context": 5, "gate": 0, "layer": 3}
"""Matrices within a head. context: reading to key and value; attention's output to key, value and query of the memory.
layer: the memory's reading to attention's query, key and value."""
MemoryValues = dict[str, Tensor]
"""Values at the sites within the recurrence, text by text."""
MixerState = tuple[Tensor, ...]
_RATES = ("momentum", "step", "forget")
T = TypeVar("T")


@dataclass(frozen=True)
class LongTermMemory(Mixer):
    """Neural long-term memory (Titans): a network that learns keys' values while it reads, with local attention."""

    arrangement: Arrangement = "gate"
    """Whether the memory is a context of attention, a gate on its output, or a layer before it."""
    segment: int = 16
    """Tokens that attention sees at once; with `gate` and `layer` the width of its sliding window."""
    n_persistent: int = 4
    """Number of trained vectors before every segment."""
    depth: int = 1
    """Number of matrices of each head's network, SiLU between them; 1: a linear memory."""
    chunk: int = 16
    """Number of tokens with gradients taken at one network, that before the first of them; 1: each at its own."""

    traits = Traits(
        reads_by_qkv=False,
        patterned=False,
        additive=False,
        grouped=False,
        keyed=False,
        stateful=True,
    )
    own_sites = (
        Site(
            "attn.hook_momentum",
            "b p h",
            "the share of its last step that a memory takes again",
            before="attn.hook_rot_q",
        ),
        Site("attn.hook_step", "b p h", "the factor on a memory's gradient", before="attn.hook_rot_q"),
        Site("attn.hook_forget", "b p h", "the share of a memory that is lost", before="attn.hook_rot_q"),
        Site(
            "attn.hook_surprise",
            "b p h",
            "norm of the gradient that a memory learns from",
            before="attn.hook_rot_q",
        ),
        Site(
            "attn.hook_memory_read",
            "b p h e",
            "what a memory returns (context: what attention sees of it)",
            before="attn.hook_rot_q",
        ),
        Site(
            "attn.hook_window_pattern",
            "b h q c",
            "weights of the persistent vectors, then of the segment before (context: of the readings), then of the "
            "query's own segment; rows sum to 1",
            before="attn.hook_z",
        ),
        GATE,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "segment", "depth", "chunk")
        if self.n_persistent < 0 or self.segment % self.chunk:
            raise ValueError(
                f"LongTermMemory requires chunk to divide segment and n_persistent >= 0, got {self}"
            )

    def sites(self, config: ModelConfig) -> tuple[Site, ...]:
        """The sites of the memory and of its attention, and of the gate if there is one."""
        return self.own_sites[:-1] if self.arrangement == "layer" else self.own_sites

    def flops(self, config: ModelConfig, layer: int, n: int) -> int:
        """Maps, attention to two segments, and the chunks in which the memory is read and learns."""
        h, e, c, depth = config.n_heads, config.head_width, self.chunk, self.depth
        filled = -(-n // self.segment) * self.segment
        chunk = (12 * depth - 2) * c * e * e + 4 * depth * c * c * e + 2 * c * c * (c + 1)
        attended = 4 * filled * (self.n_persistent + 2 * self.segment) * e
        inner = {"gate": 0, "layer": 6 * n * e * e, "context": (2 * depth + 10) * filled * e * e}
        own = -(-n // c) * chunk + attended + inner[self.arrangement]
        ways = 1 if config.causal else 2
        return maps_flops(config, n) + 6 * n * config.d_model * h + ways * h * own

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """The module of a layer."""
        return MemoryMixer(config, layer)


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

    Where the paper has convolutions after the projections there are none here, nor a gate before W_O. Rotary positions
    rotate the queries and keys of attention (not of the memory, nor of readings and persistent vectors).

    In a bidirectional model, of which Titans says nothing, the text is also read from its end, by the same memory as it
    begins and the same matrices, and z is the mean of both readings: every token sees all before it in one and all
    after it in the other. q, k, v and the rates are made once; what is seen and edited within the recurrence is that of
    the reading from the beginning.
    """

    def _build(self, config: ModelConfig) -> None:
        super()._build(config)
        kind = config.mixers[self.layer]
        assert isinstance(kind, LongTermMemory)
        self.kind, self.causal = kind, config.causal
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
        shared: PassState,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """z W_O + b_O; the sums of memory and attention run in float32 at least."""
        q, k, v = self._normed(x, source, tap)
        momentum, step, forget = rearrange(self.rates(x).sigmoid(), "b p (r h) -> r b p h", r=3)
        rates = (momentum, step / self.kind.chunk, forget)
        given = {name: at(tap, f"attn.hook_{name}", rate) for name, rate in zip(_RATES, rates, strict=True)}
        z = self._read((q, k, v), given, shared, tap)
        if not self.causal:
            turned = {name: rate.flip(1) for name, rate in given.items()}
            back = self._read((q.flip(1), k.flip(1), v.flip(1)), turned, _turned(shared, x), None)
            z = (z + back.flip(1)) / 2
        z = z.to(v.dtype) if only is None else picked(z.to(v.dtype), only)
        return self._write(at(tap, "attn.hook_z", z), tap)

    def _read(
        self, qkv: tuple[Tensor, Tensor, Tensor], rates: MemoryValues, shared: PassState, tap: Scope | None
    ) -> Float[Tensor, "b p h e"]:
        """z before it is written, in float32 at least, of texts read from their first column on."""
        (rows, n), segment, like = qkv[0].shape[:2], self.kind.segment, qkv[2]
        where = shared.made_once(("texts", segment), lambda: texts(shared, rows, n, segment))
        state = () if shared.cache is None else shared.cache.states.get(self.layer, ())
        wide = torch.promote_types(like.dtype, torch.float32)
        given = {name: where.apart(rate.to(wide)) for name, rate in rates.items()}
        q, k, v = (x.to(wide) for x in qkv)
        mix = self._context if self.kind.arrangement == "context" else self._beside
        with torch.autocast(like.device.type, enabled=False):
            z, state = mix((q, k, v), given, where, state, shared, tap)
        if shared.cache is not None:
            shared.left[self.layer] = state
        return z

    def _beside(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        rates: MemoryValues,
        where: Texts,
        state: MixerState,
        shared: PassState,
        tap: Scope | None,
    ) -> tuple[Float[Tensor, "b p h e"], MixerState]:
        """The memory over the whole text, with attention to the text (gate) or to its readings (layer)."""
        q, k, v = qkv
        segment = self.kind.segment
        held = self._memory_before(state, where, v)

        def learned(given: MemoryValues) -> tuple[MemoryValues, MixerState]:
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

        def attended(given: MemoryValues) -> tuple[MemoryValues, Tensor]:
            a, pattern = self._segments(q, _two(k, segment), _two(v, segment), mask, given, _patterned(tap))
            return {"window_pattern": pattern}, a

        _, a = _observed(attended, ("window_pattern",), where, tap)
        kept = (_last(x, where, segment, 2 * segment) for x in (k, v))
        return self._gated(where.together(a), reading, tap), (*after, *kept)

    def _context(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        rates: MemoryValues,
        where: Texts,
        state: MixerState,
        shared: PassState,
        tap: Scope | None,
    ) -> tuple[Float[Tensor, "b p h e"], MixerState]:
        """z segment by segment: the memory's readings, attention to them and to the segment, and learning."""
        segment, width = self.kind.segment, where.source.shape[1]
        ask = where.apart(_query(qkv[0]))
        q, k = (where.apart(x) for x in self._placed(*qkv[:2], shared.everywhere, shared, tap))
        v = where.apart(qkv[2])
        held = self._memory_before(state, where, v)
        past = state[4:] if state else (torch.zeros_like(v[:, :1]).expand(-1, segment, -1, -1),) * 4
        k, v = (_filled(old, new, where) for old, new in zip(past[2:], (k, v), strict=True))
        mask = torch.ones(segment, segment, dtype=torch.bool, device=k.device).tril().repeat(1, 2)
        assert self.inner is not None
        read_k, read_v, to_k, to_v, to_q = self.inner.to(v)
        shown = ("memory_read", "window_pattern", "surprise")

        def run(given: MemoryValues) -> tuple[MemoryValues, MixerState]:
            now, net = held, state[3] if state else held.now
            found: list[MemoryValues] = []
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

    def _memory_before(self, state: MixerState, where: Texts, like: Tensor) -> KeptMemory:
        """The memory that an earlier pass left, or a new one."""
        if state:
            return KeptMemory(*state[:3])
        begin = self.memory.to(like).expand(len(where.source), *self.memory.shape)
        return KeptMemory(begin, begin, torch.zeros_like(begin))

    def _segments(
        self,
        q: Float[Tensor, "r t h e"],
        k: Float[Tensor, "r s c h e"],
        v: Float[Tensor, "r s c h e"],
        mask: Bool[Tensor, "*rows q c"],
        given: MemoryValues,
        patterned: bool,
    ) -> tuple[Float[Tensor, "r t h e"], Float[Tensor, "r t h _"]]:
        """Attention of the queries of each segment to the persistent vectors and these keys, and its pattern.

        The pattern is empty unless `patterned`.
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


def _turned(shared: PassState, like: Tensor) -> PassState:
    """The pass with its columns in the other order; rotations go with their tokens."""
    keep, documents = (
        None if x is None else x.flip(1) for x in (shared.layout.keep, shared.layout.documents)
    )
    layout, view = Layout(keep, documents), shared.everywhere
    if view.rotation is not None:
        cos, sin = (x.flip(1) for x in (view.rotation.cos, view.rotation.sin))
        view = View(view.mask, Rotation(cos, sin, view.rotation.interleaved))
    positions = layout.positions(like.shape[1], 0, like.device)
    return replace(shared, everywhere=view, local=view, layout=layout, positions=positions, left={}, _made={})


def _observed(
    run: Callable[[MemoryValues], tuple[MemoryValues, T]],
    names: Sequence[str],
    where: Texts,
    tap: Scope | None,
) -> tuple[MemoryValues, T]:
    """The output of `run`, with its values passed through their sites; edited ones go into a second run.

    A recurrence has no moment at which a whole site is known. So an edit gets the values of a run without it (but with
    the edits of the sites named before), and then every column uses what the edit returned.
    """
    given: MemoryValues = {}
    values, result = run(given)
    if tap is None:
        return values, result
    for name in names:
        site = f"attn.hook_{name}"
        if not tap.wants(site):
            continue
        shown = where.together(values[name])
        turned = name == "window_pattern"  # queries stand after heads
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
    """The key under which a memory is read, or learns a value."""
    return F.normalize(F.silu(x), dim=-1)


def _lesson(qkv: Sequence[Tensor], given: MemoryValues, present: Bool[Tensor, "r t"]) -> Lesson:
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
    """Each segment but the first, together with the one before."""
    each = x.unflatten(1, (-1, segment))
    return torch.cat((each[:, :-1], each[:, 1:]), 2)


def _window_mask(where: Texts, segment: int) -> Bool[Tensor, "r s q c"]:
    """Whether a query sees a key of the segment before, and of its own: the last `segment` tokens."""
    own = torch.ones(segment, segment, dtype=torch.bool, device=where.start.device).tril()
    n_segments = where.source.shape[1] // segment
    there = torch.arange(n_segments, device=own.device) > 0
    before = ~own & (there | where.begun[:, None])[..., None, None]
    return torch.cat((before, own.expand_as(before)), -1)


# The texts of a pass as rows by themselves, for a mixer that cuts a text into segments.


@dataclass(frozen=True)
class Texts:
    """Every text of a pass as a row by itself that begins where a segment does, its kept tokens side by side."""

    slot: Int[Tensor, "b p"]
    """Place of each column, counted over rows and columns; one beyond the end for those left out."""
    source: Int[Tensor, "r t"]
    """The column that stands there, counted over rows and columns of the pass; one beyond the end for none."""
    begun: Bool[Tensor, "r"]
    """Whether there are segments before the first one here."""
    start: Int[Tensor, "r"]
    """Place of the first new token."""
    span: tuple[int, int]
    """Range of places of all new tokens."""

    @property
    def present(self) -> Bool[Tensor, "r t"]:
        """True at the places of new tokens."""
        return self.source < self.slot.numel()

    def apart(self, x: Shaped[Tensor, "b p *rest"]) -> Shaped[Tensor, "r t *rest"]:
        """The values text by text, 0 where no token stands."""
        flat = torch.cat((x.flatten(0, 1), x.new_zeros(1, *x.shape[2:])))
        return flat[self.source]

    def together(self, x: Shaped[Tensor, "r t *rest"]) -> Shaped[Tensor, "b p *rest"]:
        """The values as the pass has them, 0 at tokens that are not kept."""
        flat = torch.cat((x.flatten(0, 1), x.new_zeros(1, *x.shape[2:])))
        return flat[self.slot]


def texts(shared: PassState, rows: int, n: int, segment: int) -> Texts:
    """The texts of a pass of `rows` and `n` columns; only rows that pack several cost a look at the numbers."""
    assert shared.positions is not None
    positions, layout = shared.positions.expand(rows, n), shared.layout
    past = 0 if shared.cache is None else shared.cache.length
    device = positions.device
    keep = (
        torch.ones(rows, n, dtype=torch.bool, device=device) if layout.keep is None else layout.keep[:, past:]
    )
    row = torch.arange(rows, device=device)[:, None]
    before = torch.full((rows,), past, device=device)
    if past and layout.keep is not None:
        before = layout.keep[:, :past].sum(1)
    start, n_texts = before % segment, rows
    first = past % segment if layout.keep is None else 0
    last = first + n if layout.keep is None or not past else segment - 1 + n
    local = positions - (before - start)[:, None]
    if layout.documents is not None:  # never with a cache
        opens = F.pad(layout.documents[:, 1:] != layout.documents[:, :-1], (1, 0), value=True)
        row = opens.flatten().cumsum(0).view(rows, n) - 1
        n_texts = int(row.max()) + 1
        start = before = before.new_zeros(n_texts)
        last = int(local.max()) + 1
    width = -(-last // segment) * segment
    slot = torch.where(keep, row * width + local, n_texts * width)
    source = torch.full((n_texts * width + 1,), rows * n, device=device)
    source[slot.flatten()] = torch.where(
        keep, torch.arange(rows * n, device=device).view(rows, n), rows * n
    ).flatten()
    return Texts(slot, source[:-1].view(n_texts, width), before >= segment, start, (first, last))


# A network that learns by gradient descent while it is read from: the memory of Titans, one for each head (equations 9
# to 17). Nothing from here on knows of attention.


@dataclass(frozen=True)
class KeptMemory:
    """State of a memory between passes; a network is its `l` matrices, silu between them, no bias."""

    base: Float[Tensor, "r l h e f"]
    """The network at the start of the present chunk, where gradients are taken."""
    now: Float[Tensor, "r l h e f"]
    """The network itself, M."""
    speed: Float[Tensor, "r l h e f"]
    """The momentum, S."""


@dataclass(frozen=True)
class Lesson:
    """Columns that a memory learns in order: value `v` under key `k`.

    `q` is read once the column's own step is taken.
    """

    q: Float[Tensor, "r h t e"]
    k: Float[Tensor, "r h t e"]
    v: Float[Tensor, "r h t e"]
    momentum: Float[Tensor, "r h t"]
    """eta, the share of the last step that is taken again."""
    step: Float[Tensor, "r h t"]
    """theta, the factor on the gradient."""
    forget: Float[Tensor, "r h t"]
    """alpha, the share of the network that is lost."""
    present: Bool[Tensor, "r t"]
    """True at columns that exist; the others change nothing."""
    surprise: Float[Tensor, "r h t"] | None = None
    """The norms that gradients are given; None = their own."""

    def columns(self, start: int, stop: int) -> "Lesson":
        """Some of the columns."""
        vectors = {name: getattr(self, name)[:, :, start:stop] for name in ("q", "k", "v", *_RATES)}
        surprise = None if self.surprise is None else self.surprise[:, :, start:stop]
        return replace(self, **vectors, present=self.present[:, start:stop], surprise=surprise)


@dataclass(frozen=True)
class LessonOutcome:
    """The results of a lesson: readings, surprise, and the memory afterwards."""

    reading: Float[Tensor, "r h t e"]
    surprise: Float[Tensor, "r h t"]
    """Norm of each column's gradient, all matrices together."""
    after: KeptMemory


def read(network: Float[Tensor, "r l h e f"], q: Float[Tensor, "r h t e"]) -> Float[Tensor, "r h t e"]:
    """M(q) for a network that is not changed."""
    return _through(list(network.unbind(1)), q)[1][-1]


def learn(lesson: Lesson, held: KeptMemory, chunk: int, span: tuple[int, int] | None = None) -> LessonOutcome:
    """M_t(q_t) of every column, where M_t is the network after the column's own step.

        g_t = gradient of |M(k_t) - v_t|^2 at M = base           equation 12; base: M at the start of the chunk, 16
        S_t = eta_t S_{t-1} - theta_t g_t                        equation 14
        M_t = (1 - alpha_t) M_{t-1} + S_t                        equation 13

    With `chunk` 1 the gradient is that of M_{t-1}, as in equation 10. Chunks begin at multiples of `chunk`; the
    columns of one are computed at once and exactly, whatever the depth: given the gradients, which are outer
    products, both recurrences are linear. span: the columns outside it are known to be absent.
    """
    n = lesson.present.shape[1]
    start, stop = (0, n) if span is None else (span[0] // chunk * chunk, min(n, -(-span[1] // chunk) * chunk))
    readings, surprises = [], []
    for first in range(start, stop, chunk):
        found = _chunk(lesson.columns(first, min(first + chunk, stop)), held)
        readings.append(found.reading)
        surprises.append(found.surprise)
        held = found.after
    reading = F.pad(torch.cat(readings, 2), (0, 0, start, n - stop))
    return LessonOutcome(reading, F.pad(torch.cat(surprises, 2), (start, n - stop)), held)


def _chunk(lesson: Lesson, held: KeptMemory) -> LessonOutcome:
    """`learn` within one chunk; one that begins with an absent column goes on from where an earlier pass left it."""
    begins = lesson.present[:, 0, None, None, None, None]
    base = torch.where(begins, held.now, held.base)
    layers = list(base.unbind(1))
    inputs, outputs = _through(layers, lesson.k)
    errors = _errors(layers, outputs, lesson.v)
    surprise = (
        sum(
            (x.square().sum(-1) * error.square().sum(-1) for x, error in zip(inputs, errors, strict=True)),
            torch.zeros_like(lesson.step),
        )
        .clamp_min(torch.finfo(lesson.step.dtype).tiny)
        .sqrt()
    )
    factor = lesson.step.masked_fill(~lesson.present[:, None], 0)
    if lesson.surprise is not None:
        factor = factor * lesson.surprise / surprise
    kept, since, steps = _shares(lesson)
    moved = [-factor[..., None] * error for error in errors]
    x = lesson.q
    now, speed, after, fast = held.now.unbind(1), held.speed.unbind(1), [], []
    for layer, (seen, move) in enumerate(zip(inputs, moved, strict=True)):
        x = F.silu(x) if layer else x
        x = (
            kept * (x @ now[layer])
            + since[..., :1] * (x @ speed[layer])
            + (since[..., 1:] * (x @ seen.mT)) @ move
        )
        last, momentum = since[..., -1, :, None], steps[..., -1, :, None]
        after.append(
            kept[..., -1:, :] * now[layer]
            + last[..., :1, :] * speed[layer]
            + seen.mT @ (last[..., 1:, :] * move)
        )
        fast.append(momentum[..., :1, :] * speed[layer] + seen.mT @ (momentum[..., 1:, :] * move))
    return LessonOutcome(x, surprise, KeptMemory(base, torch.stack(after, 1), torch.stack(fast, 1)))


def _shares(lesson: Lesson) -> tuple[Tensor, Tensor, Tensor]:
    """Shares of the chunk's start and of each step in M_t and S_t.

    How much of the chunk's start is left in M_t `[r h t 1]`; how much of S before (0) and of each step is in M_t, and
    in S_t `[r h t 1+t]`.
    """
    here = lesson.present[:, None]
    lost = _products((1 - lesson.forget).masked_fill(~here, 1))
    again = _products(lesson.momentum.masked_fill(~here, 1))
    return lost[..., :1], lost[..., 1:] @ (again * here[..., None]), again


def _products(x: Float[Tensor, "r h t"]) -> Float[Tensor, "r h t s"]:
    """x_{s+1} ... x_t for s = 0 to t, 0 beyond; exact also where a factor is 0."""
    n = x.shape[-1]
    seen = torch.ones(n, n + 1, dtype=torch.bool, device=x.device)
    factors = x[..., None].masked_fill(seen.triu(1), 1)
    return factors.cumprod(-2) * seen.tril(1)


def _through(layers: list[Tensor], x: Float[Tensor, "r h t e"]) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and outputs of each matrix of a network."""
    inputs, outputs = [x], [x @ layers[0]]
    for layer in layers[1:]:
        inputs.append(F.silu(outputs[-1]))
        outputs.append(inputs[-1] @ layer)
    return inputs, outputs


def _errors(layers: list[Tensor], outputs: list[Tensor], v: Float[Tensor, "r h t e"]) -> list[Tensor]:
    """The gradient of |M(k) - v|^2 at the output of each matrix: the gradient of a matrix is inputs^T errors."""
    errors = [2 * (outputs[-1] - v)]
    for layer, output in zip(layers[:0:-1], outputs[-2::-1], strict=True):
        s = output.sigmoid()
        errors.append((errors[-1] @ layer.mT) * s * (1 + output * (1 - s)))
    return errors[::-1]
