"""Models do on the clean prompts what they are known to do, and not on the corrupted ones."""

import torch
from jaxtyping import Float
from torch import Tensor

from interp.model.transformer import Transformer
from interp.tasks import Facts, IndirectObjects, ListCopy, RepeatedTokens, TaskPairs
from interp.zoo import card, groundtruth, load
from tests.tasks.speakers import demo

N = 200
MARGIN = 0.03
"""The standard error of a share of 0.98 among 200 is 0.01."""


@torch.inference_mode()
def margins(
    pairs: TaskPairs, model: Transformer | None = None
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    """logit(answer) - logit(wrong) after the clean and the corrupted prompts."""
    model, rows = model or load("demo-4l")[0], torch.arange(len(pairs))
    logits = [
        model(tokens, logits_at=pairs.columns("end")[:, None])[:, 0]
        for tokens in (pairs.clean_tokens, pairs.corrupt_tokens)
    ]
    clean, corrupt = (scores[rows, pairs.answer] - scores[rows, pairs.wrong] for scores in logits)
    return clean, corrupt


def measured(number: str) -> float:
    entry = card("demo-4l")["measured"][number]["value"]  # type: ignore[index]
    assert isinstance(entry, float)
    return entry - MARGIN


def share(margin: Float[Tensor, "n"]) -> float:
    return (margin > 0).float().mean().item()


def test_the_demo_model_finds_the_receiver_and_follows_the_swap() -> None:
    clean, corrupt = margins(IndirectObjects(N, held_out=True).pairs(demo()))
    assert share(clean) > measured("indirect_object_unseen_pairs")
    assert share(-corrupt) > measured("indirect_object_unseen_pairs")


def test_unrelated_names_leave_no_preference() -> None:
    """Three standard errors around even odds."""
    clean, corrupt = margins(IndirectObjects(N).pairs(demo(), corruption="abc"))
    assert share(clean) > measured("indirect_object_unseen_pairs")
    assert abs(share(corrupt) - 0.5) < 3 * 0.5 / N**0.5


def test_the_demo_model_states_the_fact_asked_for() -> None:
    clean, corrupt = margins(Facts(N).pairs(demo()))
    assert min(share(clean), share(-corrupt)) > measured("facts_trained_phrasings")


def test_the_demo_model_copies_the_word_that_is_there() -> None:
    """Its best induction head has a score of 0.99, and both twins are lists to copy."""
    clean, corrupt = margins(ListCopy(N).pairs(demo()))
    assert min(share(clean), share(-corrupt)) > measured("best_induction_score")


def test_planted_induction_head_copies_the_answer_of_the_clean_side_alone() -> None:
    """Without noise its attention is one key, or all 20 alike: one is the answer, two are the wrong token."""
    symbols = range(1, len(groundtruth.SYMBOLS))
    found = RepeatedTokens(10, 2, N).pairs(groundtruth.Alphabet(), ids=symbols)
    clean, corrupt = margins(found, groundtruth.induction(noise=0.0))
    torch.testing.assert_close(clean, torch.full_like(clean, 20.0))
    torch.testing.assert_close(corrupt, torch.full_like(clean, 20.0 * (1 - 2) / 20))
