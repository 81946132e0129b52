"""SmolLM2-135M-Instruct out of its GGUF file: our numbers against transformers' network of the same file.

Numbers that stand here were measured with transformers, or by transformers and us alike, when these tests were written.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
import xarray as xr
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

import interp
from interp import HookedTransformer
from interp.model.edits import Edit, Zero
from interp.tasks import RepeatedTokens

pytestmark = pytest.mark.real

PROMPT, ANSWER, WRONG = "When Mary and John went to the store, John gave a drink to", " Mary", " John"
DIFFERENCE = 5.287
INDUCTION: Mapping[int, Sequence[int]] = {17: (3, 4, 5), 18: (6, 7), 20: (6,), 23: (2, 7)}
"""The heads that continue repeated random tokens, by layer."""
CONTROL: Mapping[int, Sequence[int]] = {17: (0, 1, 2), 18: (0, 1), 20: (0,), 23: (0, 1)}
"""As many others in the same layers."""


@pytest.fixture(scope="module")
def scores(model: HookedTransformer) -> xr.Dataset:
    """What every head does, on few tokens."""
    return interp.heads(model, repeats=RepeatedTokens(period=25, repeats=2, rows=4), sentences=None)


def answer_ids(model: HookedTransformer) -> tuple[int, int]:
    right, wrong = (int(model.to_tokens(text, prepend_bos=False)[0, 0]) for text in (ANSWER, WRONG))
    return right, wrong


def zeros(heads: Mapping[int, Sequence[int]]) -> list[Edit]:
    return [Edit(f"L{layer}H{head}", Zero()) for layer, of_layer in heads.items() for head in of_layer]


@contextmanager
def silenced(network: PreTrainedModel, heads: Mapping[int, Sequence[int]]) -> Iterator[None]:
    """Transformers' network, with what these heads hand to their output matrices set to zero."""
    width = network.config.head_dim

    def silence(layer: int) -> RemovableHandle:
        def changed(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
            z = given[0].clone()
            for head in heads[layer]:
                z[..., head * width : (head + 1) * width] = 0
            return (z,)

        return network.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(changed)

    hooks = [silence(layer) for layer in heads]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def logits(network: PreTrainedModel, ids: Tensor) -> Tensor:
    found: Tensor = network(ids).logits
    return found


def test_texts_are_cut_as_the_file_says_digits_one_by_one(model: HookedTransformer) -> None:
    """`tokenizer.ggml.pre` is smollm; transformers takes GPT-2's rule for it, which cuts before the last space."""
    for text, pieces in {
        "x =  1": ["x", " =", "  ", "1"], "a\n  1.": ["a", "\n  ", "1", "."],
        "in 2024": ["in", " ", "2", "0", "2", "4"],
    }.items():  # fmt: skip
        assert model.to_str_tokens(text, prepend_bos=False) == pieces


def test_the_file_has_bit_for_bit_the_parameters_of_the_folder(
    model: HookedTransformer, folder: Path
) -> None:
    stored = HookedTransformer.from_pretrained(folder)
    ours, theirs = (
        model.cfg.norm.eps,
        stored.cfg.norm.eps,
    )  # one is the decimal number, one that number in float32
    assert ours == pytest.approx(theirs, rel=2**-24)
    assert replace(stored.cfg, norm=model.cfg.norm) == model.cfg
    given, saved = (dict(m.transformer.named_parameters()) for m in (model, stored))
    assert given.keys() == saved.keys()
    assert [name for name in given if not torch.equal(given[name], saved[name])] == []


def test_what_was_dequantised_is_said(model: HookedTransformer) -> None:
    assert "210 tensors of Q4_1" in " ".join(str(model).split())


def test_the_file_has_the_tokenizer_that_transformers_reads_from_it(
    model: HookedTransformer, folder: Path
) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in (PROMPT, " Mary", "Mary", "naïve\n\tdef f(x): 1234567", "<|im_start|>user\nHi<|im_end|>"):
        assert model.to_tokens(text, prepend_bos=False)[0].tolist() == theirs.encode(text)
    assert model.to_tokens(PROMPT)[0].tolist() == [theirs.bos_token_id, *theirs.encode(PROMPT)]


def test_logits_equal_those_of_transformers(model: HookedTransformer, theirs: PreTrainedModel) -> None:
    ids = model.to_tokens(PROMPT)
    ours, expected = model(ids), logits(theirs, ids)
    assert ids[0, 0] == 1
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
    right, wrong = answer_ids(model)
    assert expected[0, -1, right] - expected[0, -1, wrong] == pytest.approx(DIFFERENCE, abs=6e-4)


def test_verify_holds_against_transformers(model: HookedTransformer, theirs: PreTrainedModel) -> None:
    found = model.verify(theirs)
    assert found.passed, str(found)


def test_heads_and_mlps_sum_to_the_difference_and_l23h3_adds_most(model: HookedTransformer) -> None:
    frame = interp.frame(interp.attribute(model, PROMPT, ANSWER, WRONG, parts="head")).set_index("part")[
        "value"
    ]
    assert frame.sum() == pytest.approx(DIFFERENCE, abs=6e-4)
    assert frame.idxmax() == "L23H3"
    assert frame["L23H3"] == pytest.approx(2.57, abs=6e-3)


def test_l23h3_looks_at_john_and_writes_against_him(model: HookedTransformer, scores: xr.Dataset) -> None:
    ids = model.to_tokens(PROMPT)
    _, cache = model.run_with_cache(ids)
    second_john = int((ids[0] == answer_ids(model)[1]).nonzero()[-1])
    assert cache["pattern", 23][0, 3, -1, second_john] == pytest.approx(0.70, abs=6e-3)
    copying = scores.value.sel(layer=23, head=3, score="copying_weights").item()
    assert copying == pytest.approx(-0.985, abs=6e-4)


def test_zeroing_l23h3_does_what_it_does_in_transformers(
    model: HookedTransformer, theirs: PreTrainedModel
) -> None:
    metric = interp.logit_difference(ANSWER, WRONG)
    found = interp.ablate(model, PROMPT, ["L23H3"], change=Zero(), metric=metric)
    ids, (right, wrong) = model.to_tokens(PROMPT), answer_ids(model)
    whole = logits(theirs, ids)[0, -1]
    with silenced(theirs, {23: (3,)}):
        without = logits(theirs, ids)[0, -1]
    effect = (without[right] - without[wrong]) - (whole[right] - whole[wrong])
    assert found.value.item() == pytest.approx(float(effect), abs=1e-4)
    assert float(effect) == pytest.approx(-2.1584, abs=2e-4)


def test_the_logit_lens_gives_mary_little_until_the_last_layers(
    model: HookedTransformer, theirs: PreTrainedModel
) -> None:
    found: xr.DataArray = interp.logit_lens(model, PROMPT, answer=ANSWER, pos=-1).target_prob
    ids, right = model.to_tokens(PROMPT), answer_ids(model)[0]
    with torch.no_grad():
        states = theirs.model(ids, output_hidden_states=True).hidden_states
    for depth, known in {5: 3.5703e-14, 12: 4.963e-18, 23: 1.2573e-15, 28: 2.7618e-6}.items():
        ours = float(found.sel(depth=f"L{depth}.resid").squeeze())
        with torch.no_grad():
            expected = theirs.lm_head(theirs.model.norm(states[depth][0, -1])).double().softmax(-1)[right]
        assert ours == pytest.approx(float(expected), rel=1e-3)
        assert ours == pytest.approx(known, rel=1e-3)


def test_the_stream_of_bos_is_a_hundred_times_as_long_as_others(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(model.to_tokens(PROMPT))
    known = {
        "blocks.2.hook_resid_post": 810,
        "blocks.11.hook_resid_post": 25_102,
        "blocks.29.hook_resid_pre": 10_690,
    }
    for site, expected in known.items():
        bos, *others = cache[site][0].norm(dim=-1).tolist()
        assert bos == pytest.approx(expected, abs=1)
        assert min(others) > 35 and max(others) < 800


def test_the_eight_heads_of_highest_induction_score_are_the_known_ones(scores: xr.Dataset) -> None:
    best = interp.frame(scores.sel(score="induction")).nlargest(8, "value")["part"]
    assert {*best} == {f"L{layer}H{head}" for layer, heads in INDUCTION.items() for head in heads}


def test_without_the_induction_heads_repeated_tokens_are_no_longer_foreseen(
    model: HookedTransformer, theirs: PreTrainedModel
) -> None:
    period, rows = 40, 4
    block = torch.randint(3, model.cfg.d_vocab, (rows, period))
    ids = torch.cat([torch.ones(rows, 1, dtype=torch.long), block, block], dim=1)

    def losses(of: Tensor) -> tuple[float, float]:
        """Mean loss on the first halves, and on what repeats them."""
        each = F.cross_entropy(of[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(
            rows, -1
        )
        return float(each[:, :period].mean()), float(each[:, period:].mean())

    whole, without, control = (
        losses(m(ids)) for m in (model, model.edited(zeros(INDUCTION)), model.edited(zeros(CONTROL)))
    )
    with silenced(theirs, INDUCTION):
        assert without == pytest.approx(losses(logits(theirs, ids)), rel=1e-5)
    assert whole[1] == pytest.approx(3.16, abs=0.5) and without[1] == pytest.approx(12.21, abs=1)
    assert control[1] - whole[1] < 1
    assert whole[0] == pytest.approx(13.86, abs=1) and without[0] == pytest.approx(whole[0], abs=0.2)


def test_the_known_pairs_compose_by_keys_first_and_far_above_all_others(model: HookedTransformer) -> None:
    """L16H0 and L17H8 look at the previous token, L17H3-5 and L18H6-8 repeat: nine pairs of 39 150."""
    known = {("L16H0", f"L17H{head}") for head in (3, 4, 5)}
    known |= {(source, f"L18H{head}") for source in ("L16H0", "L17H8") for head in (6, 7, 8)}
    table = interp.frame(interp.composition(model, "K")).dropna(subset="value")
    first = table.nlargest(10, "relative")
    assert {(row.src, row.dst) for row in first.head(9).itertuples()} == known
    assert first.relative.iloc[8] > 6 > 3 > first.relative.iloc[9]
    assert len(known & {(row.src, row.dst) for row in table.nlargest(10, "value").itertuples()}) == 9


def test_intervals_of_shares_lie_between_0_and_1(scores: xr.Dataset) -> None:
    names = ["previous_token", "duplicate_token", "induction", "current_token", "first_token", "local"]
    shares = scores.sel(score=names)
    assert bool((shares.low >= 0).all() and (shares.high <= 1).all() and shares.low.notnull().all())
    copying = scores.sel(score="copying")
    assert bool((copying.low >= -1).all() and (copying.high <= 1).all())


def test_a_typical_pass_makes_a_logit_or_two_of_entries_of_hundreds(model: HookedTransformer) -> None:
    found = interp.weights.head_tokens(model, [" Mary", " John"], top=1).sel(list=["raises", "lowers"])
    assert set(found.unit.values.tolist()) == {"logits before the final norm"}
    largest, in_a_pass = float(abs(found.value).max()), float(abs(found.value * found.factor).max())
    assert largest > 300 and in_a_pass < 10
    assert 0 < float(found.factor.min()) < 0.002 < 0.1 < float(found.factor.max()) < 1


def test_an_answer_without_its_space_is_pointed_out(model: HookedTransformer) -> None:
    interp.core.notes.note.cache_clear()
    with pytest.warns(interp.Note, match="'Mary' has no leading space.*' Mary' is another token"):
        interp.attribute(model, PROMPT, "Mary", "John")


def test_answers_of_several_tokens_have_the_log_probability_that_transformers_gives(
    model: HookedTransformer, theirs: PreTrainedModel
) -> None:
    """Prompts of 7 and of some 400 tokens in one batch, answers of one to three tokens."""
    story = "The quick brown fox jumps over the lazy dog. " * 40
    prompts = [
        "The capital of Germany is",
        f"{story}The author of Pride and Prejudice is",
        "The man on the moon was",
    ]
    answers = [" Berlin", " Jane Austen", " Neil Armstrong,"]
    found = interp.ablate(
        model, prompts, ["L0.mlp"], change=Zero(), metric=interp.metrics.answer_log_probability(answers)
    )
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        before, said = (model.to_tokens(text, prepend_bos=j == 0) for j, text in enumerate((prompt, answer)))
        with torch.no_grad():
            logits = theirs(torch.cat((before, said), 1)).logits[0, before.shape[1] - 1 : -1]
        expected = -F.cross_entropy(logits, said[0], reduction="sum")
        assert float(found.base[i]) == pytest.approx(float(expected), abs=2e-4)
