"""The long-term memory against a loop over tokens whose gradients autograd takes; its closed forms and its edges."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from interp.lab import LongTermMemory
from interp.lab.memory import Arrangement, KeptMemory, Lesson, MemoryMixer, learn, read
from interp.model import Edit, ModelConfig, NoPosition, Read, Tap, Transformer
from interp.model.config import Rotary
from interp.model.position import Rotation
from tests.configs import empty_cache, perturbed, some_tokens
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.tolerances import assert_close

BASE = MIXERS["memory-gate"]
KINDS = {
    "gate": LongTermMemory("gate", 4, 2, chunk=2),
    "gate-deep": LongTermMemory("gate", 3, 0, depth=3, chunk=3),
    "layer": LongTermMemory("layer", 4, 1, chunk=1),
    "layer-deep": LongTermMemory("layer", 6, 2, depth=2, chunk=3),
    "context": LongTermMemory("context", 4, 2, chunk=1),
    "context-deep": LongTermMemory("context", 4, 0, depth=2, chunk=4),
}


class SlowMemory:
    """Equations 12 to 14, token by token, for one head; gradients by autograd at the start of the chunk."""

    def __init__(self, layers: list[Tensor], chunk: int) -> None:
        self.now, self.chunk, self.seen = layers, chunk, 0
        self.speed = [torch.zeros_like(layer) for layer in layers]

    def learn(self, k: Tensor, v: Tensor, momentum: Tensor, step: Tensor, forget: Tensor) -> Tensor:
        """One token's step; returns its surprise."""
        if self.seen % self.chunk == 0:
            self.base = [layer.detach().requires_grad_() for layer in self.now]
        self.seen += 1
        with torch.enable_grad():
            loss = (ask(self.base, k) - v).square().sum()
            gradients = torch.autograd.grad(loss, self.base)
        self.speed = [momentum * s - step * g for s, g in zip(self.speed, gradients, strict=True)]
        self.now = [(1 - forget) * m + s for m, s in zip(self.now, self.speed, strict=True)]
        return torch.cat([g.flatten() for g in gradients]).norm()


def ask(layers: list[Tensor], q: Tensor) -> Tensor:
    for i, layer in enumerate(layers):
        q = (F.silu(q) if i else q) @ layer
    return q


def phi(x: Tensor) -> Tensor:
    return F.silu(x) / F.silu(x).norm()


class Head:
    """One head of a mixer: what it learned in training, and attention to a list of keys."""

    def __init__(self, mixer: MemoryMixer, h: int, turn: Rotation | None) -> None:
        self.memory = SlowMemory([layer[h] for layer in mixer.memory], mixer.kind.chunk)
        self.persistent = [list(x[:, h]) for x in mixer.persistent]
        self.inner = [] if mixer.inner is None else [weight[h] for weight in mixer.inner]
        self.gamma = torch.ones(1) if mixer.gamma is None else mixer.gamma.view(-1, mixer.d_head)[h]
        self.scale, self.turn = mixer.scale, turn

    def turned(self, x: Tensor, t: int) -> Tensor:
        if self.turn is None:
            return x
        here = replace(self.turn, cos=self.turn.cos[:, [t]], sin=self.turn.sin[:, [t]])
        return here.apply(x[None, None, None])[0, 0, 0]

    def attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        keys, values = self.persistent[0] + keys, self.persistent[1] + values
        weights = torch.stack([self.scale * q @ k for k in keys]).softmax(0)
        return sum((w * v for w, v in zip(weights, values, strict=True)), torch.zeros_like(q))


def slow_context(head: Head, qkv: list[Tensor], rates: list[Tensor], segment: int) -> tuple[Tensor, Tensor]:
    (q, k, v), inner, memory, zs, surprises = qkv, head.inner, head.memory, [], []
    for t in range(len(q)):
        if t % segment == 0:
            start, keys, values = memory.now, list[Tensor](), list[Tensor]()
        said = ask(start, phi(q[t]))
        keys += [said @ inner[0], head.turned(k[t], t)]
        values += [said @ inner[1], v[t]]
        a = head.attend(head.turned(q[t], t), keys, values)
        surprises.append(memory.learn(phi(a @ inner[2]), F.silu(a @ inner[3]), *(rate[t] for rate in rates)))
        zs.append(a * (head.gamma * ask(memory.now, phi(a @ inner[4]))).sigmoid())
    return torch.stack(zs), torch.stack(surprises)


def slow_beside(head: Head, qkv: list[Tensor], rates: list[Tensor], segment: int) -> tuple[Tensor, Tensor]:
    (q, k, v), memory, keys, values = qkv, head.memory, list[Tensor](), list[Tensor]()
    zs, surprises = [], []
    for t in range(len(q)):
        surprises.append(memory.learn(phi(k[t]), F.silu(v[t]), *(rate[t] for rate in rates)))
        said = ask(memory.now, phi(q[t]))
        three = [said @ weight for weight in head.inner] or [q[t], k[t], v[t]]
        keys, values = [*keys, head.turned(three[1], t)], [*values, three[2]]
        a = head.attend(head.turned(three[0], t), keys[-segment:], values[-segment:])
        zs.append(a if head.inner else a * (head.gamma * said).sigmoid())
    return torch.stack(zs), torch.stack(surprises)


def slow_z(model: Transformer, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """z `[p h e]` and surprise `[p h]` of block 0 for one row of tokens, head by head, token by token."""
    mixer, position = model.block(0).attn, model.config.position
    assert isinstance(mixer, MemoryMixer)
    tap = Tap([Read(f"blocks.0.attn.hook_{name}") for name in ("q", "k", "v", "momentum", "step", "forget")])
    model(tokens, tap)
    seen = [tap.values[read][0] for read in tap.reads]
    turn = None
    if isinstance(position, Rotary):
        turn = Rotation.at(position, mixer.d_head, torch.arange(tokens.shape[1])[None], model.dtype)
    slow = slow_context if mixer.kind.arrangement == "context" else slow_beside
    each = []
    for h in range(seen[0].shape[1]):
        parts = [x[:, h] for x in seen]
        each.append(slow(Head(mixer, h, turn), parts[:3], parts[3:], mixer.kind.segment))
    zs, surprises = zip(*each, strict=True)
    return torch.stack(zs, 1), torch.stack(surprises, 1)


@over("rotary", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_the_mixer_is_the_loop_over_tokens(name: str, rotary: bool) -> None:
    config = replace(BASE, n_layers=1, mixer=KINDS[name], position=Rotary(dim=4) if rotary else BASE.position)
    model = perturbed(config)
    for n in (1, KINDS[name].segment, KINDS[name].segment + 1, 9):
        tokens = some_tokens(1, n)
        z, surprise = Read("blocks.0.attn.hook_z"), Read("blocks.0.attn.hook_surprise")
        tap = Tap([z, surprise])
        model(tokens, tap)
        expected = slow_z(model, tokens)
        assert_close(tap.values[z][0], expected[0])
        assert_close(tap.values[surprise][0], expected[1])


def random_lesson(n: int, *, heads: int = 2, width: int = 5, seed: int = 0) -> Lesson:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, width, generator=generator, dtype=torch.float64) for _ in range(3))
    one, two, three = (torch.rand(1, heads, n, generator=generator, dtype=torch.float64) for _ in range(3))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return Lesson(q, k, v, one, two, three, torch.ones(1, n, dtype=torch.bool))


def blank(lesson: Lesson, depth: int = 1, size: float = 0.0) -> KeptMemory:
    heads, width = lesson.q.shape[1], lesson.q.shape[-1]
    generator = torch.Generator().manual_seed(3)
    begin = size * torch.randn(1, depth, heads, width, width, generator=generator, dtype=torch.float64)
    return KeptMemory(begin, begin, torch.zeros_like(begin))


def constant(lesson: Lesson, momentum: float, step: float, forget: float) -> Lesson:
    rates = {"momentum": momentum, "step": step, "forget": forget}
    return replace(lesson, **{name: torch.full_like(lesson.step, rate) for name, rate in rates.items()})


@over("packed", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_both_ways_are_the_mean_of_the_text_and_of_it_turned_round(name: str, packed: bool) -> None:
    """Oracle: the causal layer of the same parameters on the tokens, and on the tokens in the other order."""
    config = replace(BASE, n_layers=1, mixer=KINDS[name], position=NoPosition())
    causal, both = (perturbed(replace(config, causal=causal), seed=4) for causal in (True, False))
    both.load_state_dict(causal.state_dict())
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2]).expand(3, -1) if packed else None

    def z(model: Transformer, tokens: Tensor, documents: Tensor | None) -> Tensor:
        tap = Tap([read := Read("blocks.0.attn.hook_z")])
        model(tokens, tap, documents=documents)
        return tap.values[read]

    turned = None if documents is None else documents.flip(1)
    expected = (z(causal, some_tokens(), documents) + z(causal, some_tokens().flip(1), turned).flip(1)) / 2
    assert_close(z(both, some_tokens(), documents), expected)


def test_read_both_ways_every_token_reaches_every_other() -> None:
    model = build_mixed("memory-gate-bidirectional")
    other = some_tokens(1).clone()
    for place in (0, 8):
        moved = other.clone()
        moved[0, place] = (moved[0, place] + 1) % 31
        change = (model(moved) - model(other)).abs().amax(-1)[0]
        assert bool((change > 1e-9).all())


def test_a_full_step_of_a_linear_memory_stores_the_value() -> None:
    """Without momentum and forgetting, theta = 1/2 and |k| = 1: M_t(k_t) = v_t, the delta rule's fixed point."""
    lesson = constant(random_lesson(6), 0.0, 0.5, 0.0)
    lesson = replace(lesson, q=lesson.k)
    assert_close(learn(lesson, blank(lesson, size=1.0), 1).reading, lesson.v)


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_orthogonal_keys_are_all_recalled(chunk: int) -> None:
    lesson = constant(random_lesson(5), 0.0, 0.5, 0.0)
    lesson = replace(lesson, k=torch.eye(5, dtype=torch.float64).expand(1, 2, -1, -1))
    after = learn(lesson, blank(lesson), chunk).after
    assert_close(read(after.now, lesson.k), lesson.v)


def test_one_chunk_of_an_empty_linear_memory_is_linear_attention() -> None:
    """Gradients at M = 0 are -2 k v: y_t = 2 theta sum_{s <= t} (q_t . k_s) v_s."""
    lesson = constant(random_lesson(7), 0.0, 0.3, 0.0)
    expected = 0.6 * (lesson.q @ lesson.k.mT).tril() @ lesson.v
    assert_close(learn(lesson, blank(lesson), 7).reading, expected)


def test_momentum_alone_moves_a_geometric_sum() -> None:
    """One step, then only its momentum: M_t = M_1 (1 + eta + ... + eta^(t-1))."""
    lesson = constant(random_lesson(4), 0.5, 0.0, 0.0)
    lesson.step[:, :, 0] = 0.5
    same = replace(lesson, q=lesson.k[:, :, :1].expand_as(lesson.k))
    factor = torch.tensor([1.0, 1.5, 1.75, 1.875], dtype=torch.float64)[:, None]
    assert_close(learn(same, blank(lesson), 2).reading, factor * lesson.v[:, :, :1])


def test_total_forgetting_leaves_nothing() -> None:
    lesson = constant(random_lesson(4), 0.0, 0.0, 1.0)
    assert not learn(lesson, blank(lesson, size=1.0), 2).reading.any()


@over("depth", [1, 2, 3])
@over("sizes", [[1] * 9, [4, 5], [2, 1, 6], [3, 6]])
def test_a_lesson_may_be_taken_in_parts(depth: int, sizes: list[int]) -> None:
    """Parts that end within a chunk stand where the chunk left off, as the mixer's cache has it."""
    lesson, chunk = random_lesson(9), 3
    held = blank(lesson, depth, 0.5)
    whole, found, done = learn(lesson, held, chunk), [], 0
    for size in sizes:
        skip = done % chunk
        part = lesson.columns(done - skip, done + size)
        part = replace(part, present=torch.arange(skip + size)[None] >= skip)
        learned = learn(part, held, chunk)
        held, done = learned.after, done + size
        found.append(learned.reading[:, :, skip:])
    assert_close(torch.cat(found, 2), whole.reading)
    assert_close(held.now, whole.after.now)
    assert_close(held.speed, whole.after.speed)


def test_absent_columns_change_nothing() -> None:
    lesson = random_lesson(9)
    absent = replace(lesson, present=torch.arange(9)[None] < 5)
    held = blank(lesson, 2, 0.5)
    after, short = learn(absent, held, 3).after, learn(lesson.columns(0, 5), held, 3).after
    assert_close(after.now, short.now)
    assert_close(after.speed, short.speed)
    assert_close(after.base, short.base)


@pytest.mark.parametrize(("depth", "chunk"), [(1, 1), (2, 2)])
def test_gradients_pass_through_the_learning(depth: int, chunk: int) -> None:
    lesson = random_lesson(3, heads=1, width=2)
    begin = blank(lesson, depth, 0.5).now

    def reading(*parts: Tensor) -> Tensor:
        q, k, v, momentum, step, forget, memory = parts
        told = Lesson(q, k, v, momentum, step, forget, lesson.present)
        return learn(told, KeptMemory(memory, memory, torch.zeros_like(memory)), chunk).reading

    parts = (lesson.q, lesson.k, lesson.v, lesson.momentum, lesson.step, lesson.forget, begin)
    assert torch.autograd.gradcheck(reading, [x.clone().requires_grad_() for x in parts])


@pytest.mark.parametrize("name", ["gate", "gate-deep"])
def test_a_memory_that_is_never_surprised_is_the_one_it_began_as(name: str) -> None:
    model = perturbed(replace(BASE, n_layers=1, mixer=KINDS[name]))
    mixer, asked, answer = (
        model.block(0).attn,
        Read("blocks.0.attn.hook_q"),
        Read("blocks.0.attn.hook_memory_read"),
    )
    silent = [Edit(f"blocks.0.attn.hook_{site}", torch.zeros_like) for site in ("surprise", "forget")]
    tap = Tap([asked, answer], silent)
    model(some_tokens(), tap)
    assert isinstance(mixer, MemoryMixer)
    q = F.normalize(F.silu(tap.values[asked]), dim=-1).transpose(1, 2)
    assert_close(tap.values[answer], read(mixer.memory.expand(3, -1, -1, -1, -1), q).transpose(1, 2))


@pytest.mark.parametrize("arrangement", get_args(Arrangement))
def test_what_is_kept_does_not_grow_with_the_text(arrangement: Arrangement) -> None:
    config = replace(BASE, n_layers=1, mixer=replace(KINDS["gate"], arrangement=arrangement))
    model, sizes = perturbed(config), []
    for n in (2, 20):
        cache = empty_cache(model, 3)
        model(some_tokens(3, n), cache=cache)
        sizes.append([x.shape for x in cache.states[0]])
        assert cache.keys[0].numel() == 0
    assert sizes[0] == sizes[1]


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "shared value heads": ({"n_kv_heads": 2}, "as many value heads as heads under LongTermMemory"),
    "a window": ({"window": 4}, "no window under LongTermMemory"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_that_contradict_themselves_are_refused(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        replace(BASE, **changes)  # type: ignore[arg-type]


def test_chunks_that_do_not_fill_a_segment_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk to divide segment"):
        LongTermMemory("gate", segment=6, chunk=4)


def test_a_step_of_a_chunk_does_not_overshoot() -> None:
    """The same key and value throughout a chunk: the error of a linear memory never grows, whatever the rates."""
    model = perturbed(ModelConfig(1, 8, 1, 64, 5, mixer=LongTermMemory(chunk=16), norm=BASE.norm, mlp=None))
    surprise = Read("blocks.0.attn.hook_surprise")
    moving = [Edit(f"blocks.0.attn.hook_{site}", torch.zeros_like) for site in ("momentum", "forget")]
    same = [Edit(f"blocks.0.attn.hook_{x}", lambda x: x[:, :1].expand_as(x)) for x in "kv"]
    full = Edit("blocks.0.attn.hook_step", lambda x: torch.full_like(x, 1 / 16))
    tap = Tap([surprise], [*moving, *same, full])
    model(some_tokens(1, 64) % 5, tap)
    by_chunk = tap.values[surprise][0, ::16, 0]
    assert_close(by_chunk, by_chunk[:1].expand(4))
