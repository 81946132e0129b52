"""The numerical contract: each line turns red for a defect of its claim, and for no other; NaN never passes."""

import copy
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from interp.data.batch import Batch
from interp.families.reference import exported
from interp.model import KVCache, attention
from interp.model.attention import Attention
from interp.model.block import Block
from interp.verify import (
    DRIFT as TIMES,
    Contract,
    ContractLine,
    PairReference,
    Reference,
    contract,
    relative,
    some_tokens,
)
from tests.configs import CONFIGS, build, perturbed
from tests.loops import over
from tests.suspects import (
    CLAIMS,
    DRIFT,
    FUSED,
    GRADIENTS,
    HEADS,
    INF,
    LEFT,
    LOGITS,
    NAN,
    PACKED,
    PARTS,
    RIGHT,
    ROWS,
    STEPS,
    VALUES,
    Exact,
    Suspect,
    Twisted,
    When,
    full_of,
    line,
    off,
    picking,
    red,
    suspect,
    truth,
    unpadded,
    with_one,
    with_row,
)

# --- a sound model --------------------------------------------------------------------------------------------------


def test_every_line_of_a_sound_model_holds_against_hugging_face() -> None:
    found = contract(build("gpt2"), truth(), name="sound")
    assert tuple(x.claim for x in found.lines) == CLAIMS
    assert found.passed and all(x.passed for x in found.lines)
    assert isinstance(truth(), Reference) and isinstance(truth(), PairReference)


@pytest.mark.parametrize(
    "name",
    [
        "llama-gqa", "attention-only-rotary", "no-norm", "window", "bidirectional", "gemma2", "post-norm", "masked-lm",
        "bloom", "t5", "gpt-oss", "granite-moe", "gptj",
    ],
)  # fmt: skip
def test_sound_models_of_other_shapes_hold_without_a_reference(name: str) -> None:
    found = contract(build(name), "no reference")
    assert found.passed, f"\n{found}"
    unmeasured = {x.claim for x in found.lines if x.passed is None}
    cached = set() if CONFIGS[name].causal else {STEPS}
    assert unmeasured == {"logits = reference", "gradients = autograd on the reference"} | cached


@pytest.mark.parametrize("n_ctx", [1, 2, 3])
def test_a_context_of_a_few_tokens_is_enough(n_ctx: int) -> None:
    assert contract(perturbed(replace(CONFIGS["gpt2"], n_ctx=n_ctx)), "no reference").passed


def test_the_model_is_left_as_it_was() -> None:
    model = copy.deepcopy(build("gpt2"))
    before = copy.deepcopy(model.state_dict())
    contract(model, truth())
    assert model.dtype == torch.float64
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())


def test_the_tokens_can_be_given() -> None:
    seen = []

    def note(logits: Tensor) -> Tensor:
        seen.append(tuple(logits.shape[:2]))
        return logits

    batch = Batch(torch.arange(10).view(2, 5))
    assert contract(build("gpt2"), Twisted(logits_by=note), batch=batch).passed
    assert contract(build("gpt2"), Twisted(logits_by=note)).passed
    assert seen == [(2, 5), (3, 12)]


def test_tokens_are_random_and_fit_the_model() -> None:
    model = perturbed(replace(CONFIGS["gpt2"], n_ctx=7))
    tokens = some_tokens(model).tokens
    assert tokens.shape == (3, 7)
    assert int(tokens.min()) >= 0 and int(tokens.max()) < model.config.d_vocab
    assert torch.equal(tokens, some_tokens(model).tokens)
    assert not torch.equal(tokens, some_tokens(model, seed=1).tokens)


# --- each line can fail, alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "claim"),
    [
        (Twisted(logits_by=off), LOGITS),
        (Twisted(gradient_by=off), GRADIENTS),
        (Exact(), DRIFT),
    ],
    ids=["logits", "gradients", "exact-in-half"],
)
def test_a_reference_that_disagrees_turns_its_own_line_red(reference: Twisted, claim: str) -> None:
    found = contract(build("gpt2"), reference)
    assert red(found) == {claim}
    assert not found.passed


def test_the_error_of_a_line_is_what_it_is_off_by() -> None:
    """x and 1.25 x differ by a fifth of the latter."""
    reference = Twisted(lambda logits: 1.25 * logits, lambda gradient: 2 * gradient)
    found = contract(build("gpt2"), reference)
    assert line(found, LOGITS).error == pytest.approx(0.2)
    assert line(found, GRADIENTS).error == pytest.approx(0.5)


PASSES: dict[str, tuple[When, set[str]]] = {
    "observed": (lambda tokens, tap, options: tap is not None, {FUSED}),
    "left": (lambda tokens, tap, options: not unpadded(options.get("keep"), 0), {LEFT}),
    "right": (lambda tokens, tap, options: not unpadded(options.get("keep"), -1), {RIGHT}),
    "packed": (lambda tokens, tap, options: options.get("documents") is not None, {PACKED}),
    "single": (lambda tokens, tap, options: len(tokens) == 1, {LEFT, RIGHT, ROWS}),
    "cached": (lambda tokens, tap, options: options.get("cache") is not None, {STEPS}),
}
"""Which passes are off, and the claims that compare one of them with another pass."""


@pytest.mark.parametrize("name", PASSES)
def test_pass_that_differs_by_1e_7_breaks_the_claims_about_it_alone(name: str) -> None:
    when, claims = PASSES[name]
    assert red(contract(suspect(picking(when)), truth())) == claims


@over("bad, row", [(NAN, 0), (NAN, -1), (INF, -1)])
@pytest.mark.parametrize("name", PASSES)
def test_row_not_finite_in_one_pass_breaks_the_claims_about_it_alone(name: str, bad: float, row: int) -> None:
    when, claims = PASSES[name]
    kind = picking(when, twist=with_row(bad, row))
    assert red(contract(suspect(kind), "no reference")) == claims


@pytest.mark.parametrize(
    ("config", "claims"),
    [("gpt2", {LEFT}), ("bidirectional", {LEFT, RIGHT})],
    ids=["causal", "bidirectional"],
)
def test_padding_that_is_not_masked_is_found(config: str, claims: set[str]) -> None:
    """On the right of a causal model padding comes after every real token and changes nothing."""
    leaky = type("Leaky", (Suspect,), {"left_out": ("keep",)})
    assert red(contract(suspect(leaky, config), "no reference")) == claims


@pytest.mark.parametrize("config", ["gpt2", "bidirectional"])
def test_packed_texts_that_see_one_another_are_found(config: str) -> None:
    leaky = type("Leaky", (Suspect,), {"left_out": ("documents",)})
    assert red(contract(suspect(leaky, config), "no reference")) == {PACKED}


def test_rows_that_influence_one_another_are_found() -> None:
    kind = picking(lambda *_: True, twist=lambda logits: logits + 1e-3 * logits.mean(0))
    assert red(contract(suspect(kind), truth())) == {LOGITS, GRADIENTS, LEFT, RIGHT, ROWS}


def test_a_cache_that_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = KVCache.append

    def forgetful(self: KVCache, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = whole(self, layer, k, v)
        return torch.cat((keys[:, :1] * 0.99, keys[:, 1:]), 1), values

    monkeypatch.setattr(KVCache, "append", forgetful)
    assert red(contract(build("gpt2"), truth())) == {STEPS}


def test_a_model_that_loses_more_precision_than_the_reference_is_found() -> None:
    """Five times as much; the bound that holds without a reference is a coarse one."""

    class Loses(Suspect):
        def forward(self, tokens: Tensor, tap: object = None, **options: object) -> Tensor:
            logits = super().forward(tokens, tap, **options)
            return logits * 1.05 if self.dtype == torch.bfloat16 else logits

    assert red(contract(suspect(Loses), truth())) == {DRIFT}
    found = line(contract(suspect(Loses), "no reference"), DRIFT)
    assert found.error is not None and 0.04 < found.error < found.allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_compared_in_float32_where_small_mistakes_show(
    dtype: torch.dtype,
) -> None:
    """A thousandth of the logits: less than either model's own rounding in bfloat16."""

    class Wrong(Suspect):
        def forward(self, tokens: Tensor, tap: object = None, **options: object) -> Tensor:
            return super().forward(tokens, tap, **options) * 1.001

    model = copy.deepcopy(build("gpt2")).to(dtype)
    theirs = exported(model)
    found = contract(model, theirs)
    assert found.passed and line(found, LOGITS).note == "both in float32"
    assert line(found, LOGITS).error <= 1e-6 and line(found, LOGITS).allowed == 1e-4  # type: ignore[operator]
    lost = line(found, f"drift in {dtype}".replace("torch.", ""))
    assert lost.error is not None and 1e-4 < lost.error <= lost.allowed
    half = str(dtype).removeprefix("torch.")
    assert lost.note.startswith(
        f"how far logits in {half} are from float32, the median over positions; Hugging Face is "
    )
    assert float(re.search(r"is (\S+) from its own", lost.note)[1]) == pytest.approx(  # type: ignore[index]
        (lost.allowed - 1e-3) / TIMES, rel=0.05
    ), "printed with two digits"
    wrong = copy.deepcopy(model)
    wrong.__class__ = Wrong
    assert LOGITS in red(contract(wrong, theirs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sublayer_that_writes_beside_its_site_is_found_in_half_too(dtype: torch.dtype) -> None:
    class Writes(Block):
        def forward(self, *args: object) -> Tensor:
            return super().forward(*args) * 1.02  # type: ignore[arg-type]

    model = copy.deepcopy(build("gpt2")).to(dtype)
    model.block(0).__class__ = Writes
    assert PARTS in red(contract(model, "nothing to compare with"))


def test_a_write_to_the_stream_that_is_no_part_is_found() -> None:
    class Writes(Block):
        def forward(self, *args: object) -> Tensor:
            return super().forward(*args) + 1e-8  # type: ignore[arg-type]

    model = copy.deepcopy(build("gpt2"))
    model.block(0).__class__ = Writes
    assert red(contract(model, truth())) == {PARTS}


def test_an_output_of_attention_that_no_head_wrote_is_found() -> None:
    class Adds(Attention):
        def _write(self, z: Tensor, tap: object) -> Tensor:
            return super()._write(z, tap) + 1e-8  # type: ignore[arg-type]

    for layer in range(2):
        model = copy.deepcopy(build("gpt2"))
        model.block(layer).attn.__class__ = Adds
        assert red(contract(model, truth())) == {HEADS}


@pytest.mark.parametrize("by", [1 + 1e-7, NAN, INF])
@pytest.mark.parametrize("layer", [0, 1])
def test_values_mixed_otherwise_than_the_pattern_says_are_found(
    layer: int, by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, whole = itertools.cycle(range(2)), attention.attend

    def mixed(*args: object, **options: object) -> Tensor:
        z = whole(*args, **options)  # type: ignore[arg-type]
        return z * by if next(layers) == layer else z

    monkeypatch.setattr(attention, "attend", mixed)
    found = red(contract(build("gpt2"), truth()))
    assert VALUES in found
    assert found == {VALUES} or not math.isfinite(by)


# --- nothing that is not a number passes ----------------------------------------------------------------------------


@over("change", [with_one(NAN), with_one(INF), full_of(INF)])
@over("which, claim", [("logits_by", LOGITS), ("gradient_by", GRADIENTS), ("half_by", DRIFT)])
def test_a_reference_that_is_not_finite_never_passes(
    which: str, claim: str, change: Callable[[Tensor], Tensor]
) -> None:
    found = contract(build("gpt2"), Twisted(**{which: change}))
    assert claim in red(found)
    assert red(found) <= {claim, DRIFT}, "drift is measured from the reference's logits too"


@pytest.mark.parametrize("bad", [NAN, INF])
def test_of_a_model_that_is_not_finite_no_line_holds(bad: float) -> None:
    model = copy.deepcopy(build("gpt2"))
    model.embed.weight.fill_(bad)
    assert red(contract(model, truth())) == set(CLAIMS)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_one_number_that_bfloat16_cannot_hold_is_a_loss_of_precision(bad: float) -> None:
    """A median over positions alone would overlook it."""

    class Overflows(Suspect):
        def forward(self, tokens: Tensor, tap: object = None, **options: object) -> Tensor:
            logits = super().forward(tokens, tap, **options)
            return with_one(bad)(logits) if self.dtype == torch.bfloat16 else logits

    assert red(contract(suspect(Overflows), truth())) == {DRIFT}


# --- what is measured -----------------------------------------------------------------------------------------------


def test_relative_error_is_the_largest_difference_over_the_largest_value() -> None:
    expected = torch.tensor([[1.0, -4.0], [0.5, 2.0]])
    actual = torch.tensor([[1.0, -4.0], [0.0, 3.0]])
    assert relative(actual, expected) == 0.25
    assert relative(expected, actual) == 0.25
    assert relative(2 * expected, expected) == 1.0
    assert relative(expected, expected) == 0.0


def test_relative_error_is_zero_for_zeros_and_huge_for_anything_else_there() -> None:
    zeros = torch.zeros(3)
    assert relative(zeros, zeros) == 0
    assert relative(torch.full((3,), 1e-9), zeros) > 1e9
    assert relative(zeros, torch.ones(3)) == 1


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_relative_error_is_no_small_number_where_anything_is_not_finite(bad: float) -> None:
    fine, broken = torch.ones(4), with_one(bad)(torch.ones(4))
    for actual, expected in ((broken, fine), (fine, broken), (broken, broken)):
        error = relative(actual, expected)
        assert not math.isfinite(error)
        assert ContractLine("x", error, 1e9).passed is False


def test_the_relative_error_is_computed_at_full_width() -> None:
    fine = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
    assert relative(fine, torch.ones(2, dtype=torch.float64)) == pytest.approx(1e-12, rel=1e-3)
    half = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert relative(half + 0.015625, half) == 0.0078125


# --- lines that do not apply, and how it reads ----------------------------------------------------------------------


def test_lines_that_do_not_apply_say_why_and_do_not_count() -> None:
    found = contract(build("bidirectional", torch.bfloat16), "nothing to compare with")
    notes = {x.claim: x.note for x in found.lines if x.error is None}
    assert notes == {
        "logits = reference": "nothing to compare with",
        "gradients = autograd on the reference": "nothing to compare with",
        STEPS: "not causal",
    }
    assert all(line(found, claim).passed is None for claim in notes)
    assert found.passed


def test_a_line_holds_up_to_what_is_allowed() -> None:
    assert ContractLine("x", 1.0, 1.0).passed is True
    assert ContractLine("x", 1.0 + 1e-9, 1.0).passed is False
    assert ContractLine("x", 0.0).passed is True
    assert ContractLine("x", None, 1.0).passed is None
    for error, allowed in ((NAN, 1.0), (0.5, NAN), (INF, 1.0), (NAN, INF)):
        assert ContractLine("x", error, allowed).passed is False


def test_a_contract_of_which_nothing_was_measured_does_not_pass() -> None:
    empty = ContractLine("x", None, note="no reference")
    assert not Contract("m", (empty, empty)).passed
    assert not Contract("m", ()).passed
    assert Contract("m", (empty, ContractLine("y", 0.0))).passed
    assert not Contract("m", (ContractLine("y", 0.0), ContractLine("z", 1.0, 0.5))).passed


MIXED = Contract(
    "tiny",
    (
        ContractLine("long claim", 2e-7, 1e-4, "why"),
        ContractLine("b", 1.0, 1e-4),
        ContractLine("c", None, note="not causal"),
    ),
)


def test_a_contract_prints_its_verdict_and_a_line_for_every_claim() -> None:
    assert str(MIXED).splitlines() == [
        "tiny: BROKEN",
        "  ok   long claim   2.0e-07 <= 1e-04  why",
        "  RED  b            1.0e+00 <= 1e-04",
        "  -    c                              not causal",
    ], "the notes stand in one column"
    assert str(Contract("tiny", MIXED.lines[:1])).splitlines()[0] == "tiny: every line holds"


def test_a_contracts_table_has_one_row_per_line() -> None:
    table = MIXED.table()
    assert list(table.columns) == ["claim", "error", "allowed", "passed", "note"]
    assert list(table["claim"]) == ["long claim", "b", "c"]
    assert list(table["passed"]) == [True, False, None]
    assert table["error"][:2].tolist() == [2e-7, 1.0] and math.isnan(table["error"][2])
    assert list(table["note"]) == ["why", "", "not causal"]
