"""A planned sweep gives the numbers of the naive loop: one pass per variant with ordinary edits."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.core.notes import Note
from interp.data.batch import Batch
from interp.model import sites
from interp.model.attention import Memory
from interp.model.edits import Add, Edit, Project, Scale, Set, Swap, Zero
from interp.model.tap import Read, Tap
from interp.model.transformer import Transformer
from interp.passes.duration import announce, minutes
from interp.passes.metrics import Metric, kl_divergence, logit_difference, next_token_loss, of_logits
from interp.passes.observe import observe
from interp.passes.sweep import Sweep, SweepPass
from interp.passes.variants import Variant
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.tolerances import assert_close

FAMILIES = ("gpt2", "llama-gqa", "window", "bidirectional", "parallel", "gemma2", "post-norm", "bloom", "t5")
DIFFERENCE = logit_difference()


def asked(columns: int = 9, rows: int = 3) -> Batch:
    """Some examples with a right and a wrong answer."""
    generator = torch.Generator().manual_seed(5)
    answer, wrong = torch.randint(31, (2, rows), generator=generator)
    return Batch(some_tokens(rows, columns)).with_answers(answer, wrong)


def padded(side: str) -> Batch:
    """Examples of 9, 6 and 7 tokens."""
    batch = asked()
    rows = [row[:n].tolist() for row, n in zip(batch.tokens, (9, 6, 7), strict=True)]
    return Batch.of(rows, side=side).with_answers(batch.answer, batch.wrong)


def donors(model: Transformer, batch: Batch, names: Sequence[str], seed: int = 1) -> dict[str, Tensor]:
    """What these sites hold for other tokens at the same places."""
    other = replace(batch, tokens=some_tokens(*batch.tokens.shape, seed=seed))
    return {n: observe(model, other, [Read(n)], answers_only=True).trace[n] for n in names}


def put(site: str, donor: Tensor, at: Mapping[str, int] = MappingProxyType({}), first: int = 0) -> Edit:
    """The donor's cells at these indices, by axis letter."""
    return Edit(site, Set(donor, first), {sites.WORDS[axis]: i for axis, i in at.items()})


def by_hand(edit: Edit, batch: Batch) -> Edit:
    """The same as a function of the whole value, cell by cell; what is no such edit stays what it is."""
    examples = len(batch)
    letters = sites.axes_of(edit.site).split()[1:]
    values = edit.change.values if isinstance(edit.change, Set) else None
    if not isinstance(values, Tensor) or values.ndim <= len(letters):
        return edit
    columns = [row.nonzero()[:, 0].tolist() for row in batch.real]  # of the tokens of each row

    def index_of(row: int) -> tuple[int | slice, ...]:
        at = {letter: columns[row][i] if letter in "pqk" else i for letter, i in edit.cells.items()}
        return tuple(at.get(letter, slice(None)) for letter in letters)

    donor, first = values, edit.change.first

    def change(value: Tensor) -> Tensor:
        for row in range(examples):
            source, index = donor[0 if len(donor) == 1 else first + row], index_of(row)
            value[row][index] = source[index].to(value)
        return value

    return Edit(edit.site, change)


def naive(
    model: Transformer, batch: Batch, variant: Variant, metric: Metric, reads: Sequence[Read] = ()
) -> tuple:
    """One full pass with the edits, and the metric of all its logits."""
    edits = [by_hand(edit, batch) for edit in variant.edits]
    seen = observe(model, batch, reads, edits)
    last = batch.last()
    logits = seen.output if metric.everywhere else seen.output[torch.arange(len(batch)), last][:, None]
    return seen, logits


def difference(batch: Batch, logits: Tensor) -> Tensor:
    """logit(answer) - logit(wrong), off whole logits."""
    rows = torch.arange(len(batch))
    return logits[rows, -1, batch.answer] - logits[rows, -1, batch.wrong]


def loop(model: Transformer, batch: Batch, variants: Sequence[Variant]) -> Tensor:
    """The oracle of a logit difference."""
    return torch.stack([difference(batch, naive(model, batch, v, DIFFERENCE)[1]) for v in variants])


def in_rows(model: Transformer, batch: Batch, variants: Sequence[Variant]) -> Tensor:
    """The same numbers from one pass, in which every variant has rows of its own."""
    n = len(batch.tokens)
    edits = [
        replace(by_hand(edit, batch), rows=tuple(range(i * n, (i + 1) * n)))
        for i, variant in enumerate(variants)
        for edit in variant.edits
    ]
    logits = model(batch.tokens.repeat(len(variants), 1), Tap(edits=edits))[:, -1:]
    return torch.stack([difference(batch, part) for part in logits.split(n)])


def cells(model: Transformer, batch: Batch, site: str) -> list[Variant]:
    """Puts of the whole value, of slices along every axis, and along two."""
    donor = donors(model, batch, [site])[site]
    letters = site_letters(site)
    sizes = dict(zip(letters, donor.shape[1:], strict=True))
    sizes |= {letter: int(batch.lengths.min()) for letter in "pqk" if letter in sizes}
    found = [Variant([put(site, donor)])]
    letters = [letter for letter in letters if letter in sites.WORDS]
    for letter in letters:
        found += [Variant([put(site, donor, {letter: i})]) for i in {sizes[letter] // 3, sizes[letter] - 1}]
    if len(letters) > 2:
        a, b = letters[:2]
        found += [Variant([put(site, donor, {a: i, b: -1})]) for i in range(0, sizes[a], 4)]
        found += [Variant([put(site, donor, {b: sizes[b] // 2, letters[-1]: 0})])]
    return found


def site_letters(site: str) -> list[str]:
    """The axes of a site but for the batch."""
    return sites.axes_of(site).split()[1:]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_site_gives_the_numbers_of_the_loop(name: str) -> None:
    model, batch = build(name), asked()
    inside = [
        s for s in sites.names(model.config, on_demand=True) if "ln_final" not in s and "unembed" not in s
    ]
    split = [s for s in inside if s.endswith("_input")]
    # The loop is slow: each family takes a third of the variants, and together the families take all.
    share = FAMILIES.index(name) % 3
    for some in (split, [s for s in inside if s not in split]):
        variants = [v for site in some for v in cells(model, batch, site)][share::3]
        found = Sweep(model, batch, variants).run(DIFFERENCE)
        assert_close(found.values, loop(model, batch, variants))
        assert (found.values != found.base).any()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "window", "bidirectional"])
def test_padded_examples(name: str, side: str) -> None:
    model, batch = build(name), padded(side)
    variants = [
        v for s in ("blocks.0.hook_resid_pre", "blocks.1.attn.hook_z") for v in cells(model, batch, s)
    ]
    assert_close(Sweep(model, batch, variants).run(DIFFERENCE).values, loop(model, batch, variants))


@pytest.mark.parametrize("memory", [1, 20_000, 10**9])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_the_packing_changes_nothing(name: str, memory: int) -> None:
    model, batch = build(name), asked()
    variants = [v for s in ("hook_embed", "blocks.1.hook_resid_mid") for v in cells(model, batch, s)]
    sweep = Sweep(model, batch, variants, memory=memory)
    assert (memory > 1) or len(sweep.plan().packs) >= len(variants) - sum(s.idle for s in sweep.plan().starts)
    assert_close(sweep.run(DIFFERENCE).values, Sweep(model, batch, variants).run(DIFFERENCE).values)


def test_several_edits_are_carried_out_in_their_order() -> None:
    model, batch = build("gpt2"), asked()
    z = "blocks.0.attn.hook_z"
    mine, other = donors(model, batch, [z])[z], donors(model, batch, [z], seed=2)[z]
    frozen = observe(model, batch, [Read("blocks.1.attn.hook_z")]).trace
    freeze = put("blocks.1.attn.hook_z", frozen["blocks.1.attn.hook_z"])
    variants = [
        Variant([put(z, mine), put(z, other, {"h": 1})]),
        Variant([put(z, other, {"h": 1}), put(z, mine)]),
        Variant([put(z, mine, {"p": 4}), put(z, other, {"p": 4, "h": 0}), freeze]),
        Variant([freeze, put(z, torch.cat((other, mine)), {"h": 2}, first=3)]),
    ]
    assert_close(Sweep(model, batch, variants).run(DIFFERENCE).values, loop(model, batch, variants))


def test_functions_and_common_edits() -> None:
    model, batch = build("gpt2"), asked()
    noise = torch.randn(3, 9, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    site = "blocks.1.hook_resid_mid"
    donor = donors(model, batch, [site])[site]
    common = Variant([put("hook_embed", noise), Edit("blocks.0.hook_mlp_out", lambda x: x * 2)])
    variants = [
        Variant([put(site, donor, {"p": 7})]),
        Variant([Edit("blocks.1.attn.hook_z", lambda x: -x)]),
        Variant([put(site, donor, {"p": 2}), Edit("blocks.1.hook_mlp_out", lambda x: x + noise)]),
    ]
    whole = [Variant([*common.edits, *v.edits]) for v in variants]
    found = Sweep(model, batch, variants, common).run(DIFFERENCE)
    assert_close(found.values, loop(model, batch, whole))
    assert_close(found.base, loop(model, batch, [common])[0])


def test_a_variant_that_changes_nothing_is_said_to() -> None:
    model, batch = build("gpt2"), asked()
    site = "blocks.0.hook_resid_pre"
    own = observe(model, batch, [Read(site)]).trace[site]
    donor = own.clone()
    donor[1, 4, 0] += 1  # of one dimension: a norm takes away what all have in common
    found = Sweep(model, batch, [Variant([put(site, donor, {"p": p})]) for p in range(9)]).run(DIFFERENCE)
    expected = torch.zeros(9, 3, dtype=torch.bool)
    expected[4, 1] = True
    assert torch.equal(found.changed, expected)
    assert torch.equal(found.values[~expected], found.base.expand(9, 3)[~expected])
    assert found.values[4, 1] != found.base[1]


def test_columns_after_the_watched_one_do_not_matter_in_a_causal_model() -> None:
    model, batch = build("gpt2"), asked()
    site = "blocks.0.hook_resid_pre"
    donor, at = torch.ones(1, 9, 24, dtype=torch.float64), torch.tensor([2, 5, 8])
    variants = [Variant([put(site, donor, {"p": p})]) for p in range(9)]
    found = Sweep(model, batch, variants, at=at[:, None]).run(DIFFERENCE)
    logits = [naive(model, batch, v, DIFFERENCE)[0].output[torch.arange(3), at][:, None] for v in variants]
    assert_close(found.values, torch.stack([difference(batch, each) for each in logits]))
    assert torch.equal(found.changed, torch.arange(9)[:, None] <= at)


def test_a_metric_of_every_column_and_one_that_compares() -> None:
    model, batch = build("llama-gqa"), asked()
    site = "blocks.1.hook_resid_pre"
    donor = donors(model, batch, [site])[site]
    variants = [Variant([put(site, donor, {"p": p})]) for p in (0, 4, 8)]
    losses, divergences = [], []
    clean = model(batch.tokens).log_softmax(-1)
    for variant in variants:
        logits = naive(model, batch, variant, next_token_loss())[0].output.log_softmax(-1)
        taken = logits[:, :-1].gather(2, batch.tokens[:, 1:, None])[..., 0]
        losses.append(-taken.mean(1))
        divergences.append((clean[:, -1].exp() * (clean[:, -1] - logits[:, -1])).sum(-1))
    sweep = Sweep(model, batch, variants)
    assert_close(sweep.run(next_token_loss()).values, torch.stack(losses))
    assert_close(sweep.run(kl_divergence()).values, torch.stack(divergences))


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "bidirectional", "post-norm"])
def test_reads_give_whole_values_of_every_variant(name: str) -> None:
    model, batch = build(name), asked()
    z = "blocks.0.attn.hook_z"
    donor = donors(model, batch, [z])[z]
    variants = [Variant([put(z, donor, {"p": p, "h": 1})]) for p in (0, 5, 8)]
    post = [Variant([put("blocks.0.hook_resid_post", torch.zeros(1, 9, 24), {"p": 4})])]
    reads = [
        Read(f"blocks.{layer}.{s}")
        for layer in range(2)
        for s in ("attn.hook_q", "attn.hook_pattern", "hook_resid_post", "hook_mlp_out")
    ]
    found = Sweep(model, batch, variants + post).read(reads)
    for i, variant in enumerate(variants + post):
        seen = naive(model, batch, variant, DIFFERENCE, reads)[0].trace
        for read in reads:
            assert_close(found[read][i], seen[read])


def test_the_plan_says_what_is_saved() -> None:
    model, batch = build("gpt2"), asked()
    site = "blocks.1.hook_resid_pre"
    donor = donors(model, batch, [site])[site]
    plan = Sweep(model, batch, [Variant([put(site, donor, {"p": p})]) for p in range(9)]).plan()
    assert all(start.layer == 1 for start in plan.starts)
    assert [start.column for start in plan.starts] == list(range(9))
    assert plan.cost < plan.naive_cost / 2
    assert "9 variants of 3 examples" in plan.explain()


BAD = {
    "KeyError: unknown site": (KeyError, put("blocks.0.hook_resid_pree", torch.zeros(3, 9, 24))),
    "IndexError": (IndexError, put("blocks.0.hook_resid_pre", torch.zeros(3, 9, 24), {"p": 9})),
    "too few columns": (ValueError, put("blocks.0.hook_resid_pre", torch.zeros(3, 8, 24))),
    "too few rows": (ValueError, put("blocks.0.hook_resid_pre", torch.zeros(2, 9, 24))),
    "after the blocks": (ValueError, put("ln_final.hook_normalized", torch.zeros(3, 9, 24))),
}


@pytest.mark.parametrize("case", BAD)
def test_values_that_do_not_fit_are_refused(case: str) -> None:
    error, edit = BAD[case]
    with pytest.raises(error, match=edit.site.split(".")[-1]):
        Sweep(build("gpt2"), asked(), [Variant([edit])]).run(DIFFERENCE)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "bidirectional", "post-norm"])
def test_every_closed_change_gives_the_numbers_of_a_pass_with_that_edit(name: str) -> None:
    model, batch = build(name), asked()
    generator = torch.Generator().manual_seed(2)
    vector, basis, other = (torch.randn(n, 24, generator=generator, dtype=torch.float64) for n in (1, 2, 27))
    whole = other.reshape(3, 9, 24)
    changes = [
        Zero(), Set(0.5), Set(vector[0]), Set(whole), Add(vector[0], 2.0), Add(whole), Add(1.0), Scale(-0.5),
        Scale(1.0), Project(basis), Project(vector[0], keep=True), Swap(basis, whole), Swap(basis, 0.0),
    ]  # fmt: skip
    ats: list[dict[str, int]] = [{}, {"pos": 4}, {"pos": -1}]
    variants = [
        Variant([Edit(f"blocks.{layer}.hook_resid_pre", change, at), Edit(f"L{layer}.attn", Scale(2.0))])
        for layer in (0, 1) for change in changes for at in ats
    ]  # fmt: skip
    heads = [
        Variant([Edit("L0H1", change, at)])
        for change in (Zero(), Set(1.0), Scale(3.0), Add(0.1))
        for at in ats
    ]
    common = Variant([Edit("L0.mlp", Scale(0.5)), Edit("L1H0", Zero(), {"pos": 3})])
    found = Sweep(model, batch, variants + heads, common).run(DIFFERENCE)
    every = [Variant([*common.edits, *v.edits]) for v in variants + heads]
    assert_close(found.values, loop(model, batch, every))
    idle = [i for i, v in enumerate(variants) if v.edits[0].change == Scale(1.0)]
    assert len(idle) == 6 and found.changed[idle].all()  # the second edit changes something
    alone = Sweep(model, batch, [Variant([Edit("L1.resid", Scale(1.0))])], common).run(DIFFERENCE)
    assert not alone.changed.any()


def test_the_models_own_edits_come_first_and_are_in_every_run() -> None:
    model, batch = build("llama-gqa"), asked()
    edits = [Edit("L0H1", Zero()), Edit("blocks.1.hook_mlp_out", lambda x: x * 2, {"pos": 5})]
    variants = [Variant([Edit("L1.resid", Add(0.3), {"pos": p})]) for p in (2, 8)]
    found = Sweep(model.edited(edits), batch, variants).run(DIFFERENCE)
    assert_close(found.values, loop(model, batch, [Variant([*edits, *v.edits]) for v in variants]))
    assert_close(found.base, loop(model, batch, [Variant(edits)])[0])
    assert model.edits == ()


@pytest.mark.parametrize("name", ["gpt2", "post-norm", "parallel", "macaron"])
def test_an_edit_of_the_stream_where_a_variant_enters_is_carried_out_once(name: str) -> None:
    """Doubling is not idempotent, so that a second time would show."""
    metric, batch = logit_difference(), Batch(some_tokens()).with_answers(*torch.tensor([[3] * 3, [5] * 3]))
    last = "hook_normalized_resid_post" if name == "post-norm" else "hook_resid_post"
    for where in ("L1.resid", "blocks.0.hook_resid_post", f"blocks.0.{last}"):
        steered = build(name).edited([Edit(where, Scale(2.0))])
        found = Sweep(steered, batch, [Variant([Edit("L1H1", Zero())]), Variant([Edit("L0H1", Zero())])]).run(
            metric
        )
        for value, part in zip(found.values, ("L1H1", "L0H1"), strict=True):
            logits = steered.edited([Edit(part, Zero())])(batch.tokens)[:, -1]
            assert_close(value, logits[:, 3] - logits[:, 5])


def test_the_axes_of_an_edit_are_known_by_its_site() -> None:
    with pytest.raises(KeyError, match="has the dims pos, d_model, not 'head'"):
        put("blocks.0.hook_resid_pre", torch.zeros(3, 9, 24), {"h": 0})


def test_a_metric_of_the_wrong_shape_is_refused() -> None:
    model, batch = build("gpt2"), asked()
    bad = Metric("sum", "logits", lambda outcome: outcome.logits().sum())
    with pytest.raises(ValueError, match="one number per row"):
        Sweep(model, batch, [Variant()]).run(bad)


@pytest.mark.kinds
@pytest.mark.parametrize("ask", [interp.ablate, interp.patch])
def test_a_metric_of_complex_numbers_is_refused(ask: Callable[..., object]) -> None:
    model, turned = HookedTransformer(build("gpt2")), of_logits(lambda logits: logits[:, -1, 0] * 1j)
    given = {"change": Zero()} if ask is interp.ablate else {"corrupt": [[4, 5, 6]], "site": "z"}
    with pytest.raises(ValueError, match=r"one number per row, \[1\], got \[1\] of complex numbers"):
        ask(model, [[1, 2, 3]], metric=turned, **given)


def test_every_config_is_swept() -> None:
    for name in CONFIGS:
        model, batch = build(name), asked()
        if model.unembed is None:
            continue
        site = "blocks.1.attn.hook_v"
        donor = donors(model, batch, [site])[site]
        variants = [Variant([put(site, donor, {"p": p})]) for p in (1, 6)]
        assert_close(Sweep(model, batch, variants).run(DIFFERENCE).values, loop(model, batch, variants))


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "bidirectional", "parallel", "gemma2"])
def test_behind_the_last_keys_a_column_reaches_no_other(name: str) -> None:
    model, batch = build(name), asked()
    at = torch.tensor([2, 5, 8])
    for short in (
        "attn.hook_z",
        "attn.hook_pattern",
        "hook_attn_out",
        "mlp.hook_post",
        "hook_resid_post",
        "attn.hook_q",
    ):
        site = f"blocks.1.{short}"
        donor = donors(model, batch, [site])[site]
        axis = "q" if short.endswith("pattern") else "p"
        variants = [Variant([put(site, donor, {axis: p})]) for p in range(9)] + [Variant([put(site, donor)])]
        found = Sweep(model, batch, variants, at=at[:, None]).run(DIFFERENCE)
        logits = [
            naive(model, batch, v, DIFFERENCE)[0].output[torch.arange(3), at][:, None] for v in variants
        ]
        assert_close(found.values, torch.stack([difference(batch, each) for each in logits]))
        elsewhere = torch.arange(9)[:, None] != at
        assert not found.changed[:9][elsewhere].any()
        assert found.changed[9].any()


def test_a_pack_that_does_not_fit_is_halved_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build("gpt2"), asked()
    site = "blocks.0.hook_resid_pre"
    donor = donors(model, batch, [site])[site]
    sweep = Sweep(model, batch, [Variant([put(site, donor, {"p": p})]) for p in range(9)])
    expected, final, room = sweep.run(DIFFERENCE).values, SweepPass.final, 2

    def tight(one: SweepPass, at: Tensor | None) -> Tensor:
        if len(one.pack.variants) > room:
            raise torch.OutOfMemoryError("no room")
        return final(one, at)

    monkeypatch.setattr(SweepPass, "final", tight)
    assert_close(sweep.run(DIFFERENCE).values, expected)
    room = 0
    with pytest.raises(MemoryError, match="fewer examples"):
        sweep.run(DIFFERENCE)


def test_a_decoder_that_reads_a_memory() -> None:
    model = perturbed(replace(CONFIGS["gpt2"], cross_attention=True), torch.float64)
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(3, 6, 24, generator=generator, dtype=torch.float64)
    keep = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    batch = replace(asked(), memory=Memory(states, keep))
    for short in ("cross_attn.hook_z", "cross_attn.hook_v", "cross_attn.hook_pattern", "hook_resid_mid"):
        site = f"blocks.1.{short}"
        donor = donors(model, batch, [site])[site]
        donor = donor + torch.randn(donor.shape, generator=generator, dtype=donor.dtype)
        first = site_letters(site)[0]
        variants = [Variant([put(site, donor, {first: i})]) for i in (0, donor.shape[1] - 1)]
        assert_close(Sweep(model, batch, variants).run(DIFFERENCE).values, loop(model, batch, variants))


def test_a_sweep_of_more_than_a_minute_says_so_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every MLP's output zeroed in the last block's: two variants of one row, the base run and one block each."""
    model = build("gpt2")
    variants = [Variant([Edit(f"blocks.1.hook_{part}_out", Zero())]) for part in ("mlp", "attn")]
    sweep, seen = Sweep(model, asked(rows=1), variants), []
    monkeypatch.setattr(
        "interp.passes.sweep.announce", lambda what, products, *_: seen.append((what, products))
    )
    sweep.run(DIFFERENCE)
    ((what, products),) = seen
    assert what == "logit difference of 2 variants of 1 rows, the work of 1 passes over them"
    blocks = sum(x.numel() for x in model.blocks.parameters() if x.ndim > 1) / 2
    head = model.config.n_outputs * model.config.d_model
    columns = sum((sweep.plan().columns - pack.column) * len(pack.variants) for pack in sweep.plan().packs)
    assert products == pytest.approx((2 * 9 + columns) * blocks + 3 * head)


def test_what_takes_less_than_a_minute_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interp.passes.duration.A_MINUTE", 1e6)
    threads, cpu = torch.get_num_threads(), torch.device("cpu")
    assert minutes(3e6 * threads, cpu) == 3.0
    with pytest.warns(Note, match="a sweep: about 30 min on such a device; less takes less"):
        announce("a sweep", 3.14e7 * threads, cpu, "less takes less")
    with warnings.catch_warnings():
        warnings.simplefilter("error", Note)
        announce("another sweep", 0.9e6 * threads, cpu, "less takes less")
