"""Learning rates and checkpoints against closed forms."""

import math

import pytest

from interp.lab.training.schedule import Training


def test_the_rate_rises_by_equal_steps_and_then_falls_along_a_cosine() -> None:
    plan = Training(steps=110, warm_up=10, learning_rate=2.0, final_share=0.25)
    assert [plan.rate(step) for step in range(10)] == pytest.approx([0.2 * n for n in range(1, 11)])
    assert plan.rate(10) == pytest.approx(2.0)
    assert plan.rate(60) == pytest.approx((2.0 + 0.5) / 2)
    assert plan.rate(35) == pytest.approx(0.5 + 1.5 * (1 + math.cos(math.pi / 4)) / 2)
    assert plan.rate(110) == pytest.approx(0.5)
    falling = [plan.rate(step) for step in range(10, 111)]
    assert falling == sorted(falling, reverse=True)


def test_the_rate_under_inverse_sqrt_is_that_of_the_first_transformer() -> None:
    """Vaswani et al. 2017, equation 3, whose steps begin at 1."""
    d_model, warm_up = 512, 40
    plan = Training(schedule="inverse_sqrt", warm_up=warm_up, learning_rate=(d_model * warm_up) ** -0.5)
    wanted = [d_model**-0.5 * min(n**-0.5, n * warm_up**-1.5) for n in range(1, 500)]
    assert [plan.rate(step) for step in range(499)] == pytest.approx(wanted)


def test_checkpoints_stand_in_equal_ratios() -> None:
    assert Training(steps=10_000, checkpoints=6).checkpoint_steps == (0, 1, 10, 100, 1000, 10_000)
    assert Training(steps=3, checkpoints=50).checkpoint_steps == (0, 1, 2, 3)
    assert Training(steps=3, checkpoints=2).checkpoint_steps == (0, 1, 3)
    assert Training(steps=3).checkpoint_steps == ()


def test_every_checkpoint_and_the_end_have_a_row_in_the_log() -> None:
    plan = Training(steps=25, log_every=10, checkpoints=3)
    assert [step for step in range(26) if plan.is_logged(step)] == [0, 1, 10, 20, 25]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps >= 1, got 0"),
        ({"warm_up": -1}, "warm_up >= 0, got -1"),
        ({"clip": 0.0}, "clip must be a number above 0, .* got 0.0"),
        ({"checkpoints": 1}, "two checkpoints or more"),
        ({"final_share": 2.0}, "final_share must be a number from 0 to 1, got 2.0"),
        ({"beta2": 1.0}, r"beta2 in \[0, 1\), got 1.0"),
        ({"label_smoothing": 1.0}, r"label_smoothing in \[0, 1\), got 1.0"),
        pytest.param(
            {"schedule": "linear"},
            "schedule must be 'cosine' or 'inverse_sqrt', got 'linear'",
            marks=pytest.mark.kinds,
        ),
        pytest.param(
            {"initial": "zeros"},
            "initial must be 'gpt2' or 'xavier', got 'zeros'",
            marks=pytest.mark.kinds,
        ),
        ({"schedule": "inverse_sqrt", "warm_up": 0}, "warm_up >= 1 under inverse_sqrt, got 0"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Training(**given)  # type: ignore[arg-type]
