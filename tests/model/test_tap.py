"""Reads and edits as data: what they keep, that they do not alias, when they refuse."""

import re

import pytest
import torch
from torch import Tensor

from interp.data.batch import Batch, Side
from interp.model import Edit, Read, Tap, Trace
from interp.model.edits import Add, Change, Project, Set, Swap
from interp.model.tap import compact
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

Z = "blocks.0.attn.hook_z"
PRE, POST = "blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"


def double(x: Tensor) -> Tensor:
    return 2 * x


def zero_in_place(x: Tensor) -> Tensor:
    return x.zero_()


# --- reads --------------------------------------------------------------------------------------------------------


def test_a_reduction_runs_at_the_site() -> None:
    plain, reduced = Read(Z), Read(Z, via=lambda z: z.square().sum((1, 3)))
    tap = Tap([plain, reduced])
    build("gpt2")(some_tokens(), tap)
    assert tap.values[reduced].shape == (3, 4)
    assert_close(tap.values[reduced], tap.values[plain].square().sum((1, 3)))


def test_two_reads_of_one_site_coexist_and_the_same_read_twice_is_one() -> None:
    tap = Tap([Read(Z), Read(Z, via=double), Read(Z)])
    build("gpt2")(some_tokens(), tap)
    assert len(tap.values) == 2
    assert_close(tap.values[Read(Z, via=double)], 2 * tap.values[Read(Z)])


@over("name", ["gpt2", "llama-gqa", "gpt-oss", "gemma2", "bloom"])
@over("side", ["left", "right", None])
def test_patterns_read_by_row_come_in_parts_with_the_same_numbers(name: str, side: Side | None) -> None:
    model, tokens = perturbed(CONFIGS[name]), some_tokens()
    batch = Batch(tokens) if side is None else Batch.of([[1, 2, 3], [4, 5, 6, 7, 8], [9]], side=side)
    weights = torch.rand(len(batch.tokens), 1)
    pattern, seen = "blocks.0.attn.hook_pattern", []

    def via(rows: Tensor, weight: Tensor) -> Tensor:
        seen.append(len(rows))
        return (rows.square().sum((2, 3)) * weight).clone()

    whole, late = Read(pattern, via=lambda rows: rows.square().sum((2, 3)) * weights), Read(POST)
    apart = Read(pattern, via, by_row=(weights,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("interp.model.attention.PART", 1)
        taps = [Tap([first, late]) for first in (whole, apart)]
        logits = [model(batch.tokens, tap, keep=batch.keep) for tap in taps]
    assert_close(taps[0].values[whole], taps[1].values[apart])
    assert_close(taps[0].values[late], taps[1].values[late])
    assert_close(*logits)
    assert seen == [1] * len(batch.tokens)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors agree to rounding; AssertionError that says by how much they do not."""
    assert_close(found, expected)
    return True


@over("name", ["gpt2", "llama-gqa", "gemma2", "gpt-oss"])
@over("rows", [1, 2, 3])
def test_patterns_written_over_their_scores_are_those_under_gradients(name: str, rows: int) -> None:
    """Bit by bit where the same rows go through together, else to rounding; a read of the scores gets the scores."""
    model, tokens = perturbed(CONFIGS[name]), some_tokens()
    scores, pattern = "blocks.0.attn.hook_attn_scores", "blocks.0.attn.hook_pattern"
    own = Tap([Read(scores), Read(pattern), Read(POST)])
    logits = model(tokens, own)  # gradients: a pattern of its own, all rows at once
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("interp.model.attention.PART", rows * model.config.n_heads * tokens.shape[1] ** 2)
        for sites in ([pattern], [scores], [scores, pattern]):
            for by_row in (None, ()):
                tap = Tap([Read(POST), *(Read(site, by_row=by_row) for site in sites)])
                same = torch.equal if rows == len(tokens) else close
                assert same(model(tokens, tap), logits)
                for read, value in tap.values.items():
                    assert same(value, own.values[Read(read.site)])


def test_patterns_that_somebody_else_wants_whole_or_edits_come_whole() -> None:
    pattern = "blocks.0.attn.hook_pattern"
    apart = Read(pattern, via=lambda rows: rows.sum((2, 3)), by_row=())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("interp.model.attention.PART", 1)
        for tap in (Tap([apart, Read(pattern)]), Tap([apart], [Edit(pattern, double)])):
            build("gpt2")(some_tokens(), tap)
            assert tap.values[apart].shape == (3, 4)


def test_a_read_by_row_has_an_answer_for_each_row() -> None:
    read = Read("blocks.0.attn.hook_pattern", via=lambda rows: rows.sum((0, 1))[:0], by_row=())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("interp.model.attention.PART", 1)
        with pytest.raises(ValueError, match="an answer for each of the 1 rows that its via gets, got 0"):
            build("gpt2")(some_tokens(), Tap([read]))


def test_a_small_answer_does_not_keep_a_large_tensor_alive() -> None:
    last = Read("blocks.0.attn.hook_pattern", via=lambda pattern: pattern[:, :, -1])
    tap = Tap([last])
    build("gpt2")(some_tokens(), tap)
    answer = tap.values[last]
    assert answer.untyped_storage().nbytes() == answer.nbytes
    whole = torch.randn(3, 4)
    assert compact(whole) is whole
    assert compact(whole[0]).untyped_storage().nbytes() == 4 * 4


def test_queries_do_not_keep_keys_and_values_alive() -> None:
    """q, k and v leave one fused matrix product; each answer has memory of its own."""
    tap = Tap([Read("blocks.0.attn.hook_q"), Read("blocks.0.attn.hook_v")])
    build("llama-gqa")(some_tokens(), tap)
    for value in tap.values.values():
        assert value.untyped_storage().nbytes() == value.nbytes


def test_answers_carry_no_graph() -> None:
    model = perturbed(CONFIGS["gpt2"]).requires_grad_(True)
    tap = Tap([Read(Z), Read(Z, via=double)])
    assert model(some_tokens(), tap).requires_grad
    assert not any(value.requires_grad for value in tap.values.values())


def test_a_tap_used_again_holds_the_answers_of_the_last_pass() -> None:
    model, tap = build("gpt2"), Tap([Read(POST)])
    model(some_tokens(), tap)
    first = tap.values[Read(POST)]
    model(some_tokens(seed=1), tap)
    assert not torch.equal(tap.values[Read(POST)], first)
    fresh = Tap([Read(POST)])
    model(some_tokens(), fresh)
    assert torch.equal(first, fresh.values[Read(POST)])


def test_a_trace_is_indexed_by_read_or_by_an_unambiguous_name() -> None:
    tap = Tap([Read(PRE), Read(Z), Read(Z, via=double)])
    build("gpt2")(some_tokens(), tap)
    trace = Trace(tap.values)
    assert trace[PRE] is tap.values[Read(PRE)]
    assert trace[Read(Z, via=double)] is tap.values[Read(Z, via=double)]
    assert len(trace) == 3
    assert set(trace) == set(tap.reads)
    with pytest.raises(KeyError, match=r"2 reads of .*: index by the Read itself"):
        trace[Z]
    with pytest.raises(KeyError, match=f"nothing was read at '{POST}'; nearest: {PRE}"):
        trace[POST]
    with pytest.raises(KeyError, match="nobody asked for"):
        trace[Read(POST)]


# --- edits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [None, (0, 2)])
def test_an_edit_in_place_does_not_reach_what_was_read_before(rows: tuple[int, ...] | None) -> None:
    """The stream leaving block 0 is the tensor that enters block 1; writing into the second must spare the first."""
    model, tokens = build("gpt2"), some_tokens()
    before = Tap([Read(POST), Read("hook_embed")])
    model(tokens, before)
    tap = Tap(before.reads, [Edit("blocks.1.hook_resid_pre", zero_in_place, rows=rows)])
    after = model(tokens, tap)
    for read in before.reads:
        assert torch.equal(tap.values[read], before.values[read])
    assert not torch.allclose(after, model(tokens))


def test_an_edit_in_place_of_an_embedding_leaves_the_weights_alone() -> None:
    model, tokens = perturbed(CONFIGS["gpt2"]), some_tokens()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    edits = [Edit(site, zero_in_place) for site in ("hook_embed", "hook_pos_embed", "blocks.0.hook_q_input")]
    model(tokens, Tap(edits=edits))
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_edits_of_one_site_apply_in_the_order_given() -> None:
    model, tokens = build("gpt2"), some_tokens()
    tap = Tap([Read(POST)], [Edit(POST, double), Edit(POST, lambda x: x + 1)])
    plain = Tap([Read(POST)])
    model(tokens, tap)
    model(tokens, plain)
    assert_close(tap.values[Read(POST)], 2 * plain.values[Read(POST)] + 1)


def test_different_rows_can_carry_different_edits() -> None:
    model, tokens = build("gpt2"), some_tokens(rows=1).expand(3, -1)
    changes = {0: double, 2: zero_in_place}
    packed = model(tokens, Tap(edits=[Edit(Z, change, rows=(row,)) for row, change in changes.items()]))
    for row, change in changes.items():
        assert_close(packed[row], model(tokens[:1], Tap(edits=[Edit(Z, change)]))[0])
    assert_close(packed[1], model(tokens[:1])[0])


def test_an_edit_that_returns_another_dtype_is_cast_back() -> None:
    model, tokens = build("gpt2"), some_tokens()
    assert_close(model(tokens, Tap(edits=[Edit(Z, lambda z: z.float())])), model(tokens), torch.float32)
    assert model(tokens, Tap(edits=[Edit(Z, lambda z: z.float())])).dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda z: z[:, :, :2],
            "must return shape [3, 9, 4, 6], cells of [batch row, position, query head, per-head width]",
        ),
        (lambda z: z[0], "got [9, 4, 6]"),
        (lambda z: z.mean(), "got []"),
        (lambda z: None, "got NoneType"),
    ],
)
def test_an_edit_that_returns_something_else_is_refused(change: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build("gpt2")(some_tokens(), Tap(edits=[Edit(Z, change)]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Add(torch.ones(5)), "values for blocks.0.attn.hook_z must fit its cells"),
        (Set(torch.ones(2, 8)), "values for blocks.0.attn.hook_z must fit its cells"),
        (Project(torch.eye(7)[:2]), "directions for blocks.0.attn.hook_z must fit its cells"),
        (Swap(torch.eye(7)[:2], 0.0), "directions for blocks.0.attn.hook_z must fit its cells"),
    ],
)
def test_what_a_change_brings_in_another_size_is_refused_by_name(change: Change, message: str) -> None:
    with pytest.raises(ValueError, match=rf"{re.escape(message)}.* of shape \[3, 9, 4, 6\], got \["):
        build("gpt2")(some_tokens(), Tap(edits=[Edit(Z, change)]))


def test_a_read_whose_function_returns_no_tensor_is_refused() -> None:
    read = Read(Z, lambda z: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=rf"via of a read must return a tensor, got int at '{Z}'"):
        build("gpt2")(some_tokens(), Tap([read]))


def test_an_error_inside_an_edit_names_the_site_and_keeps_its_cause() -> None:
    with pytest.raises(
        RuntimeError, match=re.escape(f"the edit of {Z} failed on shape [3, 9, 4, 6]")
    ) as caught:
        build("gpt2")(some_tokens(), Tap(edits=[Edit(Z, lambda z: z @ torch.zeros(5, 5))]))
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("rows", [(), (3,), (-1,), (0, 7)])
def test_an_edit_of_rows_that_are_not_there_is_refused(rows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"names rows .*, the batch has rows 0 to 2"):
        build("gpt2")(some_tokens(), Tap(edits=[Edit(Z, double, rows=rows)]))


@pytest.mark.parametrize(
    ("site", "options"),
    [
        ("blocks.1.attn.hook_z", {"stop": 1}),
        ("ln_final.hook_scale", {"stop": 2}),
        ("blocks.0.attn.hook_z", {"start": 1}),
        ("hook_embed", {"start": 1}),
    ],
)
@pytest.mark.parametrize("kind", ["reads", "edits"])
def test_a_site_outside_the_pass_is_refused(kind: str, site: str, options: dict[str, int]) -> None:
    model = build("gpt2")
    tokens = model(some_tokens(), stop=1) if "start" in options else some_tokens()
    tap = Tap([Read(site)]) if kind == "reads" else Tap(edits=[Edit(site, double)])
    with pytest.raises(ValueError, match=f"{kind.title()[:-1]} of '{re.escape(site)}' would never run"):
        model(tokens, tap, **options)


# --- sites with arithmetic of their own ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "mqa", "no-norm", "attention-only-rotary"])
@over("part", ["q", "k", "v"])
def test_an_edited_split_input_reaches_only_its_own_head(name: str, part: str) -> None:
    """Oracle: the projection of head 0 recomputed from the edited residual, by hand."""
    model, tokens = build(name), some_tokens()
    site, block = f"blocks.1.hook_{part}_input", model.blocks[1]
    pre, before = Read("blocks.1.hook_resid_pre"), Read(f"blocks.1.attn.hook_{part}")
    plain = Tap([pre, before])
    model(tokens, plain)

    def shift_head_0(copies: Tensor) -> Tensor:
        copies[:, :, 0] += torch.linspace(-1, 1, copies.shape[-1], dtype=copies.dtype)
        return copies

    edited = Tap([before], [Edit(site, shift_head_0)])
    model(tokens, edited)
    shifted = plain.values[pre] + torch.linspace(-1, 1, model.config.d_model, dtype=torch.float64)
    widths = [n * model.config.head_width for n in (model.config.n_heads, *2 * [model.config.kv_heads])]
    first = sum(widths[: "qkv".index(part)])
    by_hand = block.attn.qkv(block.ln1(shifted))[..., first : first + model.config.head_width]
    assert_close(edited.values[before][:, :, 0], by_hand)
    assert_close(edited.values[before][:, :, 1:], plain.values[before][:, :, 1:])


def test_split_inputs_and_their_norm_cannot_be_edited_together() -> None:
    edits = [Edit("blocks.0.hook_q_input", double), Edit("blocks.0.ln1.hook_scale", double)]
    with pytest.raises(ValueError, match="cannot be edited or differentiated in the same pass"):
        build("gpt2")(some_tokens(), Tap(edits=edits))


@pytest.mark.parametrize("name", ["gpt2", "attention-only", "llama-gqa"])
def test_head_results_and_the_bias_sum_to_what_attention_adds(name: str) -> None:
    model = build(name)
    result, out = Read("blocks.0.attn.hook_result"), Read("blocks.0.hook_attn_out")
    tap = Tap([result, out])
    model(some_tokens(), tap)
    bias = model.blocks[0].attn.out.bias
    summed = tap.values[result].sum(2)
    assert_close(summed if bias is None else summed + bias, tap.values[out])


@pytest.mark.parametrize("name", ["gpt2", "attention-only", "llama-gqa"])
def test_zeroing_the_result_of_a_head_equals_zeroing_its_z(name: str) -> None:
    def without_head_1(x: Tensor) -> Tensor:
        x[:, :, 1] = 0
        return x

    model, tokens = build(name), some_tokens()
    by_result, by_z = (
        model(tokens, Tap(edits=[Edit(f"blocks.0.attn.hook_{site}", without_head_1)]))
        for site in ("result", "z")
    )
    assert_close(by_result, by_z)
    assert not torch.allclose(by_z, model(tokens))


def test_an_edited_pattern_is_used_as_it_is() -> None:
    """Attention to the first token only: z is the first value, whatever the scores said."""
    model = build("gpt2")

    def only_first(pattern: Tensor) -> Tensor:
        pattern.zero_()
        pattern[..., 0] = 1
        return pattern

    tap = Tap([Read(Z), Read("blocks.0.attn.hook_v")], [Edit("blocks.0.attn.hook_pattern", only_first)])
    model(some_tokens(), tap)
    z, v = (tap.values[read] for read in tap.reads)
    assert_close(z, v[:, :1].expand_as(z))


def test_a_doubled_norm_scale_halves_the_norm() -> None:
    model = build("rms-plain")
    normed = Read("blocks.0.ln1.hook_normalized")
    plain, halved = Tap([normed]), Tap([normed], [Edit("blocks.0.ln1.hook_scale", double)])
    model(some_tokens(), plain)
    model(some_tokens(), halved)
    assert_close(halved.values[normed], plain.values[normed] / 2)
