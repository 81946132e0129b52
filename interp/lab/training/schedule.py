"""The parameters of a training run as one record, and what follows from them: learning rates and checkpoints."""

import math
from dataclasses import dataclass
from typing import Literal

from interp.core.boundary import public
from interp.core.kinds import DeviceName, NotNegative, Positive, Probability
from interp.lab.training.dropout import Dropout

TrainingPrecision = Literal["auto", "float32", "bfloat16"]
Schedule = Literal["cosine", "inverse_sqrt"]
Initial = Literal["gpt2", "xavier"]
NO_DROPOUT = Dropout()


@public()
@dataclass(frozen=True)
class Training:
    """Parameters of a training run: AdamW, linear warm-up and then a falling rate, clipped gradients.

    The first Transformer's (Vaswani et al. 2017, section 5): `schedule="inverse_sqrt"`, `initial="xavier"`,
    `dropout=Dropout(0.1, 0.1, 0.1)`, `label_smoothing=0.1`, `weight_decay=0.0` and `learning_rate=(d_model * warm_up)
    ** -0.5`, with which `rate` is its equation 3.

    Raises:
        ValueError: parameters out of range.
    """

    steps: int = 2000
    """Updates of the weights."""
    rows: int = 32
    """Rows of one update."""
    learning_rate: Positive = 1e-3
    """The highest one, at the end of the warm-up."""
    warm_up: int = 100
    """Updates of linear warm-up."""
    schedule: Schedule = "cosine"
    """How the rate falls after the warm-up: along half a cosine, or as 1 / sqrt(updates) (Vaswani et al. 2017)."""
    final_share: Probability = 0.1
    """Learning rate at the end of the cosine, as a share of the highest."""
    weight_decay: NotNegative = 0.05
    """Weight decay of matrices; vectors (biases, gains) never decay."""
    beta1: float = 0.9
    """AdamW's decay rate of the mean gradient."""
    beta2: float = 0.98
    """AdamW's decay rate of the mean square."""
    clip: Positive = 1.0
    """The largest norm of all gradients together."""
    dropout: Dropout = NO_DROPOUT
    """Dropout in the passes of the updates, and in no other."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over all tokens (Szegedy et al. 2016); not in held-out losses."""
    segment: int | None = None
    """Columns after which gradients stop in the updates (`mean_loss`); None: nowhere."""
    initial: Initial = "gpt2"
    """The first weights: GPT-2's, or `interp.lab.training.xavier`."""
    determined_only: bool = False
    """Whether only the tokens that the context determines count in the loss; False: every token."""
    precision: TrainingPrecision = "auto"
    """bfloat16: products by autocast, weights in float32; auto: that on an accelerator, float32 on the CPU."""
    seed: int = 0
    """Seed of the first weights and of the data."""
    device: DeviceName = "cpu"
    """Where the model is trained."""
    log_every: int = 100
    """Updates between two rows of the log; every checkpoint has a row too."""
    checkpoints: int = 0
    """About how many models are kept on the way, log-spaced, the untrained and the last one among them; 0 = none."""
    evaluation_rows: int = 128
    """Held-out rows that each row of the log is measured on."""
    keep_seconds: NotNegative = 60.0
    """The least time between two writings of the state that a killed run goes on from."""

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "log_every", "evaluation_rows"):
            _require(getattr(self, name) >= 1, f"{name} >= 1", getattr(self, name))
        for name in ("warm_up", "checkpoints", "seed"):
            _require(getattr(self, name) >= 0, f"{name} >= 0", getattr(self, name))
        _require(self.checkpoints != 1, "two checkpoints or more, or 0 for none", self.checkpoints)
        _require(0 <= self.label_smoothing < 1, "label_smoothing in [0, 1)", self.label_smoothing)
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"{name} in [0, 1)", getattr(self, name))
        _require(self.segment is None or self.segment >= 1, "segment >= 1 or None", self.segment)
        rises = self.schedule == "cosine" or self.warm_up >= 1
        _require(rises, "warm_up >= 1 under inverse_sqrt", self.warm_up)

    def rate(self, step: int) -> float:
        """The learning rate of the update after `step` others.

        r min(1, (step + 1) / warm_up) during the warm-up; then from r to final_share r along half a cosine, or
        r sqrt(warm_up / (step + 1)).

        Example:
            >>> [round(Training(steps=3, warm_up=1, learning_rate=1.0, final_share=0.0).rate(s), 2) for s in range(3)]
            [1.0, 1.0, 0.5]
        """
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        if self.schedule == "inverse_sqrt":
            return self.learning_rate * math.sqrt(self.warm_up / (step + 1))
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        falling = 0.5 * (1 + math.cos(math.pi * done))
        return self.learning_rate * (self.final_share + (1 - self.final_share) * falling)

    @property
    def checkpoint_steps(self) -> tuple[int, ...]:
        """The steps whose models are kept: 0, then from 1 to the last in equal ratios, each once.

        Example:
            >>> Training(steps=100, checkpoints=4).checkpoint_steps
            (0, 1, 10, 100)
        """
        if self.checkpoints == 0:
            return ()
        gaps = max(1, self.checkpoints - 2)
        spaced = {round(self.steps ** (i / gaps)) for i in range(gaps + 1)}
        return tuple(sorted({0, *spaced, self.steps}))

    def is_logged(self, step: int) -> bool:
        """Whether the model is measured after this many updates."""
        return step % self.log_every == 0 or step == self.steps or step in self.checkpoint_steps


def _require(condition: bool, what: str, got: object) -> None:
    if not condition:
        raise ValueError(f"Training requires {what}, got {got}")
