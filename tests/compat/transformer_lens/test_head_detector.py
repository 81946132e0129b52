"""The head detector: TransformerLens 3.9's scores with every option, its errors, and caches that stay as they were."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from interp.compat.transformer_lens import head_detector
from interp.compat.transformer_lens.head_detector import detect_head
from interp.compat.transformer_lens.hooked_transformer import HookedTransformer

SAVED: dict[str, Any] = torch.load(Path(__file__).parents[1] / "data" / "tools_3_9.pt", weights_only=True)[
    "heads"
]
PROMPTS = SAVED["prompts"]


class Detected(HookedTransformer):
    """A model whose texts are names of rows of ids."""

    def to_tokens(self, input: Any, *args: Any, **kwargs: Any) -> Tensor:
        return PROMPTS[input] if isinstance(input, str) else PROMPTS["a"]


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    made = Detected(SAVED["cfg"])
    made.load_state_dict(SAVED["state"])
    return made


def test_scores_are_theirs_with_every_option(model: HookedTransformer) -> None:
    for (kind, measure, bos, current, seq), expected in SAVED["scores"].items():
        prompts = ["a", "b"] if seq.startswith("[") else seq
        found = detect_head(
            model, prompts, kind, exclude_bos=bos, exclude_current_token=current, error_measure=measure
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_only_the_heads_asked_for_are_scored_in_both_spellings(model: HookedTransformer) -> None:
    by_pair = detect_head(model, "a", "induction_head", [(0, 1), (1, 3)])
    torch.testing.assert_close(by_pair, SAVED["some"], rtol=0, atol=1e-10)
    assert torch.equal(by_pair, detect_head(model, "a", "induction_head", {0: [1], 1: [3]}))
    assert (by_pair == -1).sum() == 6


@pytest.mark.parametrize("kind", head_detector.HEAD_NAMES)
def test_patterns_mark_the_keys_that_a_loop_marks(kind: str) -> None:
    row = PROMPTS["b"][0].tolist()
    rule = {
        "previous_token_head": lambda q, k: k == q - 1,
        "duplicate_token_head": lambda q, k: k < q and row[k] == row[q],
        "induction_head": lambda q, k: 0 < k <= q and k - 1 < q and row[k - 1] == row[q],
    }[kind]
    found = getattr(head_detector, f"get_{kind}_detection_pattern")(PROMPTS["b"])
    marked = [[float(rule(q, k)) for k in range(len(row))] for q in range(len(row))]
    assert found.tolist() == marked == SAVED["patterns"][kind].tolist()


@pytest.mark.parametrize("measure", ["mul", "abs"])
def test_a_cache_is_used_and_left_as_it_was(model: HookedTransformer, measure: Any) -> None:
    _, cache = model.run_with_cache(PROMPTS["a"], remove_batch_dim=True)
    before = {name: value.clone() for name, value in cache.items()}
    options = {"exclude_bos": True, "exclude_current_token": True, "error_measure": measure}
    found = detect_head(model, "a", "induction_head", cache=cache, **options)
    assert torch.equal(found, detect_head(model, "a", "induction_head", **options))
    assert all(torch.equal(cache[name], value) for name, value in before.items())


def test_bad_input_is_refused_by_name(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(PROMPTS["a"], remove_batch_dim=True)
    with pytest.raises(AssertionError, match="detection_pattern must be a Tensor or one of head names"):
        detect_head(model, "a", "no_such_head")
    with pytest.raises(ValueError, match="cannot be reused across multiple prompts"):
        detect_head(model, ["a", "b"], "induction_head", cache=cache)
    for pattern in (torch.ones(7, 7), torch.eye(6), torch.eye(7)[:6]):
        with pytest.raises(AssertionError, match=r"lower triangular .* sequence_length=7"):
            detect_head(model, "a", pattern)
    with pytest.raises(AssertionError, match="not square"):
        head_detector.compute_head_attention_similarity_score(
            torch.ones(2, 3),
            torch.ones(2, 3),
            exclude_bos=False,
            exclude_current_token=False,
            error_measure="mul",
        )


def test_a_pattern_of_fractions_is_warned_of_under_mul(
    model: HookedTransformer, caplog: pytest.LogCaptureFixture
) -> None:
    pattern = (torch.ones(7, 7) / 7).tril()
    detect_head(model, "a", pattern, error_measure="abs")
    assert not caplog.records
    detect_head(model, "a", pattern)
    assert "values other than 0 or 1" in caplog.text


def test_a_pattern_matches_itself_fully_whatever_is_left_out() -> None:
    pattern = torch.rand(6, 6).tril()
    pattern = pattern / pattern.sum(1, keepdim=True)
    for bos, current in itertools.product((False, True), repeat=2):
        options = {"exclude_bos": bos, "exclude_current_token": current}
        score = head_detector.compute_head_attention_similarity_score
        assert score(pattern, torch.ones(6, 6).tril(), error_measure="mul", **options) == pytest.approx(1)
        assert score(pattern, pattern, error_measure="abs", **options) == 1


def test_the_kinds_are_written_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    head_detector.get_supported_heads()
    assert capsys.readouterr().out == f"Supported heads: {head_detector.HEAD_NAMES}\n"
