"""Causal traces equal the slow loop, one pass per cell and draw, and find the planted path of a fact."""

import functools
import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

import interp
from interp import Batch, HookedTransformer
from interp.causal import CausalTrace, causal_trace, subject_spread
from interp.causal.causal_trace import Noised, usual_window
from interp.causal.spans import ROLES, spans, within
from interp.core import memory
from interp.data.batch import Side
from interp.model.edits import Edit, Scale, Set, Zero
from interp.model.layout import each_position
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.metrics import answer_probability, kl_divergence, logit_difference
from interp.passes.observe import observe
from interp.passes.sweep import Sweep
from interp.passes.variants import Variant
from interp.zoo.planted import PLANTED
from tests.batches import in_batches
from tests.configs import CONFIGS, build, some_tokens
from tests.tiny import hooked
from tests.tolerances import assert_close, student95

SUBJECTS = [range(2, 5), range(1, 2), range(3, 5)]
"""Of prompts of 8, 5 and 6 tokens: the last has no token between its subject and its end."""
LENGTHS = (8, 5, 6)
SAMPLES, NOISE = 3, 2.0


@dataclass(frozen=True)
class Asked:
    """Prompts, and what the model says next: facts that it knows, all but those made wrong."""

    model: HookedTransformer
    rows: list[Tensor]
    answers: list[int]

    def batch(self, side: Side = "right") -> Batch:
        return Batch.of([row.tolist() for row in self.rows], side=side)

    def trace(self, side: Side = "right", **how: object) -> xr.Dataset:
        given: dict = {"samples": SAMPLES, "noise": NOISE} | how
        data = in_batches(self.model, self.batch(side), 3)
        return causal_trace(self.model, data, SUBJECTS, self.answers, **given)


FROM_THREE = replace(answer_probability(), fewest=3)
"""The usual metric with intervals of a few prompts, whose formula is tested."""


def asked(name: str, wrong: tuple[int, ...] = (), dtype: torch.dtype = torch.float64) -> Asked:
    model = build(name, dtype)
    rows = [row[:n] for row, n in zip(some_tokens(3, 8, seed=4), LENGTHS, strict=True)]
    answers = [int(model(row[None])[0, -1].argmax()) for row in rows]
    answers = [(a + 1) % 31 if i in wrong else a for i, a in enumerate(answers)]
    return Asked(HookedTransformer(model), rows, answers)


def probability(model: Transformer, row: Tensor, answer: int, edits: list[Edit]) -> Tensor:
    """Of every draw of one prompt."""
    return observe(model, Batch(row.repeat(SAMPLES, 1)), edits=edits).output[:, -1].softmax(-1)[:, answer]


def put(site: str, value: Tensor, column: int) -> Edit:
    """The vector of one token, as an ordinary edit."""

    def change(x: Tensor) -> Tensor:
        x[:, column] = value[:, column]
        return x

    return Edit(site, change)


def block_output(model: Transformer) -> str:
    return "hook_normalized_resid_post" if model.config.norms_sum else "hook_resid_post"


Tracing = functools.partial(CausalTrace, "the subject", None)


def slow(
    a: Asked, i: int, tracing: CausalTrace, windows: dict[int, list[int]]
) -> tuple[Tensor, float, float]:
    """The indirect effects `[sample, layer, pos]` of one prompt, and the metric of its clean and corrupted runs."""
    model, row, answer, where = a.model.transformer, a.rows[i], a.answers[i], SUBJECTS[i]
    part = {"state": block_output(model), "mlp": "hook_mlp_out", "attn": "hook_attn_out"}
    names = [f"blocks.{layer}.{site}" for layer in range(2) for site in part.values()]
    clean = observe(model, Batch(row[None]), [Read(name) for name in names]).trace
    entries = torch.cat(
        [
            model.embed(other)[sub.start : sub.stop].flatten() * model.config.embed_scale
            for other, sub in zip(a.rows, SUBJECTS, strict=True)
        ]
    )
    mask = torch.zeros(1, len(row), dtype=torch.bool)
    mask[0, list(where)] = True
    noise = Noised.of(model, Batch(row[None]), mask, NOISE * float(entries.std()), tracing).noise
    corrupted = Edit("hook_embed", lambda x: x + noise)
    drawn = Batch(row.repeat(SAMPLES, 1))
    base = observe(model, drawn, [Read(name) for name in names], [corrupted]).trace
    low = probability(model, row, answer, [corrupted])
    effects = torch.zeros(SAMPLES, 2, len(row), dtype=torch.float64)
    for layer, column in itertools.product(range(2), range(len(row))):
        edits = [corrupted]
        for k in windows[layer]:
            name = f"blocks.{k}.{part[tracing.kind]}"
            edits.append(put(name, clean[name], column))
        if tracing.severed:  # as ROME's code does, in every layer: those below hold these values anyway
            restored = {edit.site for edit in edits}
            names = [f"blocks.{k}.{part[tracing.severed]}" for k in range(2)]
            edits += [put(name, base[name], column) for name in names if name not in restored]
        effects[:, layer, column] = probability(model, row, answer, edits) - low
    return effects, float(probability(model, row, answer, [])[0]), float(low.mean())


FAMILIES = ("gpt2", "llama-gqa", "gemma2")
ALONE, BOTH = {0: [0], 1: [1]}, {0: [0, 1], 1: [0, 1]}
CASES: dict[str, tuple[CausalTrace, dict[int, list[int]]]] = {
    "state": (Tracing(samples=SAMPLES), ALONE),
    "state without MLPs": (Tracing(samples=SAMPLES, severed="mlp"), ALONE),
    "state without attention": (Tracing(samples=SAMPLES, severed="attn"), ALONE),
    "one MLP": (Tracing(kind="mlp", window=1, samples=SAMPLES), ALONE),
    "one MLP without attention": (Tracing(kind="mlp", window=1, samples=SAMPLES, severed="attn"), ALONE),
    "one MLP without MLPs": (Tracing(kind="mlp", window=1, samples=SAMPLES, severed="mlp"), ALONE),
    "one attention without MLPs": (Tracing(kind="attn", window=1, samples=SAMPLES, severed="mlp"), ALONE),
    "two MLPs without attention": (
        Tracing(kind="mlp", window=2, samples=SAMPLES, severed="attn"),
        {0: [0], 1: [0, 1]},
    ),
    "two MLPs": (Tracing(kind="mlp", window=2, samples=SAMPLES), {0: [0], 1: [0, 1]}),
    "three attentions": (Tracing(kind="attn", window=3, samples=SAMPLES), BOTH),
    "all attentions": (Tracing(kind="attn", window=10, samples=SAMPLES), BOTH),
}


@pytest.mark.parametrize(
    ("name", "case"),
    [(n, c) for i, c in enumerate(CASES) for j, n in enumerate(FAMILIES) if c == "state" or i % 3 == j],
)
def test_every_cell_is_that_of_the_slow_loop(name: str, case: str) -> None:
    tracing, windows = CASES[case]
    a = asked(name)
    found = a.trace(kind=tracing.kind, window=tracing.window, severed=tracing.severed)
    for i, n in enumerate(LENGTHS):
        effects, clean, corrupt = slow(a, i, tracing, windows)
        each = torch.from_numpy(found.each.values[i])
        assert_close(each[:, :n], effects.mean(0))
        assert each[:, n:].isnan().all() and not found.each_changed.values[i, :, n:].any()
        assert_close(torch.from_numpy(found.each_spread.values[i, :, :n]), effects.std(0))
        assert (float(found.clean[i]), float(found.corrupt[i])) == pytest.approx((clean, corrupt), abs=1e-9)
    assert abs(found.each).max() > 1e-4


@pytest.mark.parametrize("name", ["post-norm", "bidirectional", "parallel", "window"])
def test_other_families_and_left_padding(name: str) -> None:
    a, tracing = asked(name), Tracing(samples=SAMPLES, severed="mlp")
    found = a.trace("left", severed="mlp")
    for i, n in enumerate(LENGTHS):
        assert_close(torch.from_numpy(found.each.values[i, :, :n]), slow(a, i, tracing, ALONE)[0].mean(0))


def test_the_layers_of_a_window_are_those_of_the_paper() -> None:
    """max(0, l - 5) .. min(L, l + 5) - 1 for a window of 10."""
    wide = Tracing(kind="mlp", window=10)
    for layer in range(48):
        assert wide.layers(layer, 48) == range(max(0, layer - 5), min(48, layer + 5))
    assert Tracing(kind="attn", window=1).layers(7, 48) == range(7, 8)
    assert Tracing(kind="state", window=10).layers(7, 48) == range(7, 8)


def test_the_usual_window_is_a_fifth_of_the_layers_as_in_the_paper() -> None:
    assert [usual_window(n) for n in (1, 2, 4, 12, 48)] == [1, 1, 1, 2, 10]
    a = asked("gpt2")
    xr.testing.assert_identical(a.trace(kind="mlp"), a.trace(kind="mlp", window=1))
    names = [a.trace(kind=kind, window=2).part.values.tolist() for kind in ("state", "mlp")]
    assert names == [["L0.resid_post", "L1.resid_post"], ["L0.mlp", "L0.mlp+L1.mlp"]]


@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if c.unembed])
def test_the_subjects_embeddings_together_bring_everything_back(name: str) -> None:
    a = asked(name)
    model, batch = a.model.transformer, a.batch().with_answers(torch.tensor(a.answers), None)
    span = spans(a.model.text, batch, SUBJECTS)
    noised = Noised.of(model, batch, within(batch, span), 1.0, Tracing(samples=2))
    rows, embed = noised.batch, Read("hook_embed")
    clean = observe(model, rows, [embed]).trace[embed]
    restored = [
        Variant([Edit("embed", Set(clean), {"pos": p}) for p in each_position(rows.lengths, 8)[some]])
        for some in (slice(8), slice(1, 5), slice(4, 5))
    ]
    found = Sweep(model, rows, restored, common=noised.corrupted(clean)).run(answer_probability())
    logits = model(rows.tokens, keep=rows.keep)[torch.arange(6), rows.last()]
    full = logits.softmax(-1)[torch.arange(6), rows.answer]
    for values in found.values[:2]:
        assert_close(values, full)
    assert (found.values[2][:2] - full[:2]).abs().max() > 1e-6, "one token of three is not enough"


@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if c.unembed])
def test_the_last_state_is_everything_and_what_cannot_reach_it_nothing(name: str) -> None:
    found = asked(name).trace(metric=FROM_THREE)
    causal = CONFIGS[name].causal
    total = found.clean - found.corrupt
    for i, (n, subject) in enumerate(zip(LENGTHS, SUBJECTS, strict=True)):
        assert float(found.each[i, -1, n - 1]) == pytest.approx(float(total[i]), abs=1e-9)
        assert (found.each[i, -1, : n - 1] == 0).all() and not found.each_changed[i, -1, : n - 1].any()
        before = found.each[i, 0, : subject.start]
        assert bool((before == 0).all()) is causal
        assert bool(found.each_changed[i, 0, : subject.start].any()) is not causal
        assert found.each_changed[i, 0, subject.start]
    last = found.sel(role="last token", layer=1)
    assert found.estimate.values.tolist() == ["value", "low", "high"]
    for name in found.estimate.values:
        assert float(last[name]) == pytest.approx(float(found.total.sel(estimate=name)), abs=1e-9)
    assert not found.changed.sel(layer=1, role="first subject") and last.changed


def test_few_prompts_give_no_interval_of_a_probability() -> None:
    found = asked("gpt2").trace()
    assert (found.n == 3).any() and found.low.isnull().all() and found.high.isnull().all()
    assert found.total.isnull().values.tolist() == [False, True, True]
    assert found.attrs["interval"] == "95 % over prompts, if at least 512; of means over noise samples"


def test_roles_are_means_inside_a_prompt_then_over_prompts() -> None:
    found = asked("gpt2").trace(metric=FROM_THREE)
    columns = {
        "first subject": [[2], [], [3]], "middle subject": [[3], [], []], "last subject": [[4], [1], [4]],
        "first after": [[5], [2], []], "further": [[6], [3], []], "last token": [[7], [4], [5]],
    }  # fmt: skip
    assert tuple(columns) == ROLES
    for role, each in columns.items():
        rows = np.stack([found.each.values[i][:, c].mean(1) for i, c in enumerate(each) if c])
        cell = found.sel(role=role)
        np.testing.assert_allclose(cell.value, rows.mean(0), atol=1e-12)
        assert (cell.n == len(rows)).all()
        if len(rows) > 1:
            half = student95(len(rows)) * rows.std(0, ddof=1) / len(rows) ** 0.5
            np.testing.assert_allclose(cell.high - cell.value, half, rtol=1e-6, atol=1e-12)
            np.testing.assert_allclose(cell.value - cell.low, half, rtol=1e-6, atol=1e-12)
        else:
            assert cell.low.isnull().all()
    spread = [found.each_spread.values[i][:, c[0]] for i, c in enumerate(columns["last token"])]
    np.testing.assert_allclose(
        found.spread.sel(role="last token"), np.sqrt(np.square(spread).mean(0)), atol=1e-12
    )


def test_noise_is_normal_on_subjects_alone_and_hangs_on_tokens_and_seed() -> None:
    model, batch = build("gpt2"), Batch(torch.cat((some_tokens(2, 9), some_tokens(1, 9))))
    where = torch.zeros(3, 9, dtype=torch.bool)
    where[:, 2:6] = True
    tracing = Tracing(samples=400)
    noise = Noised.of(model, batch, where, 0.7, tracing).noise.unflatten(0, (3, 400))
    assert not noise[:, :, ~where[0]].any()
    drawn = noise[:, :, where[0]].double()
    count = drawn[0].numel()
    assert abs(float(drawn[0].mean())) < 4 * 0.7 / count**0.5
    assert float(drawn[0].std()) == pytest.approx(0.7, rel=4 / (2 * count) ** 0.5)
    assert torch.equal(noise[0], noise[2]) and not torch.equal(noise[0], noise[1])
    padded = Batch.of([batch.tokens[1].tolist(), [1] * 12], side="left")
    moved = torch.zeros(2, 12, dtype=torch.bool)
    moved[0, 5:9] = True
    alone = Noised.of(model, padded, moved, 0.7, tracing).noise.unflatten(0, (2, 400))
    assert torch.equal(alone[0, :, 3:], noise[1])
    other = Noised.of(model, batch, where, 0.7, Tracing(samples=400, seed=1)).noise
    assert not torch.equal(other, noise.flatten(0, 1))


def test_sigma_is_that_of_all_entries_of_the_subjects() -> None:
    a = asked("gemma2")
    span = spans(a.model.text, a.batch(), SUBJECTS)
    found = subject_spread(a.model, in_batches(a.model, a.batch(), 2), SUBJECTS)
    assert int(within(a.batch(), span).sum()) == 6
    weights = a.model.transformer.embed.weight * 24**0.5
    parts = [weights[row[sub.start : sub.stop]] for row, sub in zip(a.rows, SUBJECTS, strict=True)]
    assert found == pytest.approx(float(torch.cat(parts).std()), rel=1e-12)
    assert a.trace().attrs["sigma"] == pytest.approx(found, rel=1e-12)


def test_facts_that_the_model_gets_wrong_are_dropped_and_counted() -> None:
    whole, some = asked("gpt2").trace(), asked("gpt2", wrong=(1,)).trace()
    assert some.attrs["dropped"] == 1 and int(some.n.max()) == 2 and whole.attrs["dropped"] == 0
    assert some.prompt.values.tolist() == [0, 2]
    np.testing.assert_allclose(some.each, whole.each[[0, 2]], atol=1e-12)
    assert some.attrs["sigma"] == whole.attrs["sigma"], "the fact set is what was given"
    with pytest.raises(ValueError, match="of 3 none has its answer as the most probable next token"):
        asked("gpt2", wrong=(0, 1, 2)).trace()


def test_answer_of_several_tokens_is_traced_as_a_whole() -> None:
    """By a loop over draws, layers and columns; the noise is that of the prompt, whatever is said after it."""
    model, prompt = (
        HookedTransformer(build("llama-gqa", torch.float64)),
        some_tokens(1, 6, seed=4)[0].tolist(),
    )
    said = model.generate([prompt], 3, stop_at_eos=False).tokens[0, -3:].tolist()
    asked = functools.partial(causal_trace, model, [prompt], range(1, 3), samples=SAMPLES, sigma=0.5)
    found, single = asked([tuple(said)]), asked(said[0])
    row = torch.tensor([[*prompt, *said[:-1]]]).repeat(SAMPLES, 1)

    def probability(edits: list[Edit]) -> Tensor:
        logits = observe(model.transformer, Batch(row), edits=edits).output[:, -3:].log_softmax(-1)
        return logits.gather(2, torch.tensor(said).expand(SAMPLES, 3)[..., None])[..., 0].sum(1).exp()

    mask = torch.zeros(1, len(prompt), dtype=torch.bool)
    mask[0, 1:3] = True
    tracing = CausalTrace("the subject", samples=SAMPLES)
    noise = Noised.of(model.transformer, Batch(torch.tensor([prompt])), mask, 1.5, tracing).noise
    noise = torch.nn.functional.pad(noise, (0, 0, 0, 2))
    corrupted = Edit("hook_embed", lambda x: x + noise)
    clean = observe(
        model.transformer, Batch(row), [Read(f"blocks.{i}.hook_resid_post") for i in range(2)]
    ).trace
    low = probability([corrupted])
    for layer, column in itertools.product(range(2), range(row.shape[1])):
        site = f"blocks.{layer}.hook_resid_post"
        effect = (probability([corrupted, put(site, clean[site], column)]) - low).mean()
        assert float(found.each[0, layer, column]) == pytest.approx(float(effect), abs=1e-12)
    assert float(found.clean[0]) == pytest.approx(float(probability([])[0]), abs=1e-12)
    assert single.role.values.tolist() == found.role.values.tolist()
    last = found.value.sel(role="last token")
    np.testing.assert_allclose(last, found.each[0, :, len(prompt) - 1], atol=1e-12)
    other = [*said[:2], (said[2] + 1) % 31]
    with pytest.raises(ValueError, match=f"the first answer is {other[2]}, the model says {said[2]}"):
        asked([tuple(other)])


def test_other_metrics_are_watched_and_compared_with_the_clean_run() -> None:
    a = asked("gpt2")
    found = a.trace(metric=kl_divergence())
    np.testing.assert_allclose(found.clean, 0, atol=1e-12)
    assert (found.corrupt > 0).all() and found.attrs["unit"] == "nats"
    assert float(found.each[0, 1, 7]) == pytest.approx(-float(found.corrupt[0]), abs=1e-9)
    wrong = [(answer + 1) % 31 for answer in a.answers]
    found = a.trace(metric=logit_difference(torch.tensor(a.answers), torch.tensor(wrong)))
    logits = a.model.transformer(a.rows[0][None])[0, -1]
    assert float(found.clean[0]) == pytest.approx(float(logits[a.answers[0]] - logits[wrong[0]]), abs=1e-9)
    with pytest.raises(ValueError, match="brings other answers"):
        a.trace(metric=answer_probability(torch.tensor(wrong)))


def test_the_question_has_the_numbers_of_the_function_over_any_data() -> None:
    a = asked("gpt2", wrong=(1,))
    whole = a.trace()
    question = CausalTrace(SUBJECTS, a.answers, samples=SAMPLES, noise=NOISE, sigma=whole.attrs["sigma"])
    xr.testing.assert_identical(
        interp.run([question], a.model, in_batches(a.model, a.batch(), 3))["causal_trace"], whole
    )
    rows = [row.tolist() for row in a.rows]
    stream = interp.Stream(interp.data.open_source(rows), a.model.text, tokens_per_batch=8)
    assert subject_spread(a.model, stream, SUBJECTS) == pytest.approx(question.sigma, rel=1e-12)
    kept = interp.run([question], a.model, stream)["causal_trace"]
    assert kept.prompt.values.tolist() == [0, 2] and kept.attrs["dropped"] == 1
    np.testing.assert_allclose(kept["each"], whole["each"], rtol=1e-9, atol=1e-12)
    small = interp.run([replace(question, each=False)], a.model, stream)["causal_trace"]
    for found in (kept, small):
        for name in ("value", "low", "high", "n", "spread", "changed", "total"):
            np.testing.assert_allclose(found[name], whole[name], rtol=1e-9, atol=1e-12, err_msg=name)
    assert "each" not in small and small.attrs["dropped"] == 1
    own = interp.run([replace(question, sigma=None)], a.model, a.batch())["causal_trace"]
    assert own.attrs["sigma"] == pytest.approx(question.sigma, rel=1e-12)
    np.testing.assert_allclose(own["each"], whole["each"], rtol=1e-9, atol=1e-12)
    with pytest.raises(
        ValueError, match=r"subjects and answers of the same prompts are required, got \[2, 3\]"
    ):
        interp.run([replace(question, answer=a.answers[:2])], a.model, rows)
    with pytest.raises(ValueError, match="got an iterator; or say sigma"):
        causal_trace(a.model, iter(rows), SUBJECTS, a.answers)


def test_answers_may_come_with_the_data() -> None:
    a = asked("gpt2")
    batch = a.batch().with_answers(torch.tensor(a.answers), None)
    found = causal_trace(a.model, in_batches(a.model, batch, 3), SUBJECTS, samples=SAMPLES, noise=NOISE)
    xr.testing.assert_identical(found, a.trace())
    with pytest.raises(ValueError, match="requires the answer of every prompt, got none"):
        causal_trace(a.model, a.batch(), SUBJECTS)


def test_an_edited_model_has_its_own_facts_and_its_own_sigma() -> None:
    a, edits = asked("gpt2"), [Edit("embed", Scale(2.0)), Edit("L0.mlp", Zero())]
    network = a.model.transformer.edited(edits)
    answers = [int(network(row[None])[0, -1].argmax()) for row in a.rows]
    found = causal_trace(a.model.edited(edits), a.batch(), SUBJECTS, answers, samples=SAMPLES)
    assert found.attrs["sigma"] == pytest.approx(2 * a.trace().attrs["sigma"], rel=1e-12)
    xr.testing.assert_identical(found, causal_trace(network, a.batch(), SUBJECTS, answers, samples=SAMPLES))
    assert abs(found["each"] - a.trace(noise=3.0)["each"]).max() > 1e-6


def test_float32_agrees_with_float64() -> None:
    narrow, whole = asked("gpt2", dtype=torch.float32).trace(), asked("gpt2").trace()
    np.testing.assert_allclose(narrow.each, whole.each, rtol=1e-4, atol=2e-5)
    np.testing.assert_array_equal(narrow.each_changed, whole.each_changed)
    np.testing.assert_array_equal(narrow.changed, whole.changed)


def test_the_path_of_a_planted_fact_is_found() -> None:
    """A head moves the subject to the last token, where an MLP of the next layer knows the object."""
    planted = PLANTED["fact_memory"](0, 4)
    model = HookedTransformer(planted.model)
    differs = [(row >= 1) & (row <= 8) for row in planted.clean]
    subjects = [range(i := int(d.int().argmax()), i + 1) for d in differs]

    def at_end(**how: object) -> list[float]:
        given: dict = {"noise": 20.0, "samples": 4, "metric": FROM_THREE} | how
        found = causal_trace(model, planted.clean, subjects, planted.answer, **given)
        assert found.attrs["dropped"] == 0 and float(found.total.sel(estimate="low")) > 0.3
        return (found.value.sel(role="last token") / found.total.sel(estimate="value")).values.tolist()

    assert at_end() == pytest.approx([1, 1], abs=0.05)
    assert at_end(severed="attn") == pytest.approx([1, 1], abs=0.05)
    assert at_end(severed="mlp") == pytest.approx([0, 1], abs=0.05)
    assert at_end(kind="attn", window=1) == pytest.approx([1, 0], abs=0.05)
    assert at_end(kind="mlp", window=1) == pytest.approx([0, 1], abs=0.05)


def test_a_single_draw_or_prompt_has_no_spread_or_interval() -> None:
    a = asked("gpt2", wrong=(0, 2))
    found = a.trace(samples=1)
    assert found.spread.isnull().all() and found.low.isnull().all() and found.sizes["prompt"] == 1
    assert found.value.sel(role="last token").notnull().all()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"samples": 0}, "samples=0"),
        ({"noise": 0.0}, "noise=0.0"),
        ({"noise": float("nan")}, "noise=nan"),
        ({"noise": float("inf")}, "noise=inf"),
        ({"noise": 1e300}, r"is NaN or infinite in a corrupted run: noise=1e\+300 times sigma="),
        ({"window": 0, "kind": "mlp"}, "window=0"),
        ({"sigma": 0.0}, "sigma, .* must be above 0, .*got 0.0"),
        ({"kind": "neuron"}, "kind must be one of"),
    ],
)
def test_traces_without_a_meaning_are_refused(how: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asked("gpt2").trace(**how)


def test_missing_parts_are_refused_by_name() -> None:
    with pytest.raises(KeyError, match=r"no 'blocks\.0\.hook_mlp_out'"):
        asked("attention-only").trace(kind="mlp")
    with pytest.raises(KeyError, match=r"no 'blocks\.0\.hook_mlp_out'"):
        asked("attention-only").trace(severed="mlp")
    with pytest.raises(ValueError, match="must mention the subject 'Paul'"):
        causal_trace(hooked(), "The cat sat on the", "Paul", " mat")


def test_more_draws_of_noise_than_the_memory_holds_are_refused_before_they_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**33)
    model = hooked()
    best = model.to_string(model("When Mary and John")[0, -1].argmax())
    with pytest.raises(ValueError, match=r"causal_trace: samples\): .*GB of memory are required"):
        causal_trace(model, "When Mary and John", "Mary", best, noise=1.0, samples=10**7)
