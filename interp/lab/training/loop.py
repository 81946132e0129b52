"""The training loop: one model, one source of rows, one record of parameters; it can be killed anywhere and go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from interp.core.boundary import public
from interp.families.convert import AnyModel
from interp.lab.training.initial import xavier
from interp.lab.training.losses import Distillation, TrainingData, mean_loss, scores
from interp.lab.training.presets import check_fits
from interp.lab.training.schedule import Training
from interp.lab.training.state import LogRow, TrainingFolder, TrainingState, log_table
from interp.lab.training.vocabulary import Vocabulary
from interp.model.config import AnyConfig, Json
from interp.model.encoder_decoder import build
from interp.passes.question import NotFiniteError
from interp.runs.provenance import tensors_hash
from interp.runs.run_file import plain
from interp.tasks.examples import Examples, Place

if TYPE_CHECKING:
    import pandas as pd

Evaluate = Callable[[AnyModel, int], Mapping[str, int | float]]
"""More columns of the log: from the model and the number of updates so far."""


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained model and what was measured on the way."""

    model: AnyModel
    log: pd.DataFrame
    """A row per measurement: step, tokens, loss, gradient_norm, learning_rate, held_out_loss, accuracy, and more."""


@runtime_checkable
class Described(Protocol):
    """Data that says in JSON what decides its rows."""

    @property
    def description(self) -> Json:
        """Equal where all rows are equal."""
        ...


@runtime_checkable
class WithVocabulary(Protocol):
    """Protocol of data with a tokenizer, which is then kept with the weights."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer."""
        ...


@public()
def train(
    config: AnyConfig,
    data: TrainingData,
    training: Training | None = None,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    evaluate: Evaluate | None = None,
    distillation: Distillation | None = None,
) -> Trained:
    """A model of a config, trained on data that are drawn as it goes.

    AdamW (Loshchilov and Hutter 2019) with decay of matrices only, linear warm-up and a falling rate, clipped
    gradients; mean cross-entropy in nats. Dropout acts in the updates alone: held-out losses, `evaluate` and the
    finished model have none. The global random state is left as it is.

    Args:
        config: the model's config.
        data: what draws the rows of each update, and the held-out rows.
        training: how long and how fast it trains; None: the defaults of `Training`.
        out: a folder for checkpoints, log and finished model (`training.state`); None: nothing is kept.
        resume: go on with the run of that folder, if there is one: the same bits as without the interruption, on one
            machine and thread count (on an accelerator under `torch.use_deterministic_algorithms`).
        evaluate: function for more columns of the log, next to `held_out_loss` and `accuracy` (`examples.scores`); it
            is called at every row of the log, checkpoints included.
        distillation: a teacher of the updates; held-out losses know nothing of it.

    Returns:
        `Trained`: the model and its log, in which `loss` and `gradient_norm` (before clipping) are means over the
        updates since the last row.

    Raises:
        ValueError: data that does not fit the model, a folder of another run or in which another process trains, or a
            kept state that is damaged.
        NotFiniteError: a loss that is not finite; the message names the step.
        OSError: a full disk or a place that may not be written to; `resume=True` goes on from what was kept last.

    Example:
        >>> from interp.tasks import RepeatedSequences
        >>> from interp.lab.training import attention_only
        >>> data = RepeatedSequences(d_vocab=20, width=12, low=4, high=5)
        >>> train(attention_only(1, 20, 12), data, Training(steps=2, rows=2)).log.step.tolist()
        [0, 2]
    """
    training = training or Training()
    check_fits(config, data)
    state = fresh_state(config, training)
    if out is None:
        return _trained(state, data, training, None, evaluate, distillation)
    with closing(_opened(Path(out), config, data, training, resume, distillation)) as folder:
        folder.restore(state)
        return _trained(state, data, training, folder, evaluate, distillation)


def _trained(
    state: TrainingState,
    data: TrainingData,
    training: Training,
    folder: TrainingFolder | None,
    evaluate: Evaluate | None,
    distillation: Distillation | None,
) -> Trained:
    """The model after all updates that are left, with everything that the folder keeps on the way."""
    held_out = data.batch(Place(training.seed, None), training.evaluation_rows)
    since: list[tuple[Tensor, Tensor]] = []
    tokens = 0 if not state.log else int(state.log[-1]["tokens"])
    bar = tqdm(initial=state.step, total=training.steps, desc="training", delay=1, mininterval=1, leave=False)
    while True:
        if training.is_logged(state.step) and (not state.log or state.log[-1]["step"] < state.step):
            row: LogRow = {"step": state.step, "tokens": tokens, **_since(since, state.step, training)}
            row |= scores(state.model, held_out, rows_at_once=training.rows)
            state.log.append(row | dict(evaluate(state.model, state.step) if evaluate else {}))
            since.clear()
            if folder is not None:
                if state.step in training.checkpoint_steps:
                    folder.checkpoint(state.model, state.step)
                folder.keep(state, last=state.step == training.steps)
        if state.step == training.steps:
            break
        examples = data.batch(Place(training.seed, state.step), training.rows)
        tokens += int(examples.batch.real.sum())
        since.append(update(state, examples, training, distillation))
        bar.update()
    bar.close()
    if folder is not None:
        folder.finish(state.model)
    return Trained(state.model, log_table(state.log))


@torch.enable_grad()
def update(
    state: TrainingState, examples: Examples, training: Training, distillation: Distillation | None = None
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """One update of the state; returns the loss before it and the norm of its gradients before clipping."""
    model, adam = state.model, state.adam
    for group in adam.param_groups:
        group["lr"] = training.rate(state.step)
    with _autocast(model.device, training):
        loss = mean_loss(
            model,
            examples.to(model.device),
            determined_only=training.determined_only,
            label_smoothing=training.label_smoothing,
            edits=training.dropout.edits(model.config, training.seed, state.step, model.device),
            segment=training.segment,
            distillation=distillation,
        )
    adam.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
    adam.step()
    state.step += 1
    return loss.detach(), norm


def fresh_state(config: AnyConfig, training: Training) -> TrainingState:
    """The untrained model and its optimiser; the same weights on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        model = build(config)
        if training.initial == "xavier":
            xavier(model)
    model.to(training.device)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (training.beta1, training.beta2)
    adam = torch.optim.AdamW(groups, lr=training.learning_rate, betas=betas, fused=True)
    return TrainingState(model, adam)


def _opened(
    out: Path,
    config: AnyConfig,
    data: TrainingData,
    training: Training,
    resume: bool,
    distillation: Distillation | None,
) -> TrainingFolder:
    described = data.description if isinstance(data, Described) else plain(data)
    question: Json = {"config": config.to_dict(), "data": described, "training": asdict(training)}
    if distillation is not None:
        question |= {"distillation": _described(distillation)}
    tokenizer = data.vocabulary.json if isinstance(data, WithVocabulary) else None
    return TrainingFolder.opened(
        out, question, resume=resume, tokenizer=tokenizer, keep_seconds=training.keep_seconds
    )


def _described(distillation: Distillation) -> Json:
    """What decides the targets of a teacher: its config, its weights by their digest, and the numbers."""
    return {
        "teacher": distillation.teacher.config.to_dict(),
        "weights": tensors_hash(distillation.teacher.state_dict()),
        "temperature": distillation.temperature,
        "share": distillation.share,
    }


def _since(since: list[tuple[Tensor, Tensor]], step: int, training: Training) -> dict[str, float]:
    """Columns about the updates since the last row, NaN before the first; one sync for all of them."""
    rate = training.rate(max(0, step - 1))
    if not since:
        return {"loss": float("nan"), "gradient_norm": float("nan"), "learning_rate": rate}
    loss, norm = torch.stack([torch.stack(each) for each in since]).double().mean(0).tolist()
    if not (abs(loss) < float("inf") and abs(norm) < float("inf")):
        raise NotFiniteError(
            f"a finite loss is required, it became {loss} (gradient norm {norm}) in the {len(since)} updates "
            f"before step {step}: lower the learning rate ({training.learning_rate}), or lengthen the warm-up "
            f"({training.warm_up})"
        )
    return {"loss": loss, "gradient_norm": norm, "learning_rate": rate}


def _autocast(device: torch.device, training: Training) -> AbstractContextManager[object]:
    low = training.precision == "bfloat16" or (training.precision == "auto" and device.type != "cpu")
    return torch.autocast(device.type, torch.bfloat16) if low else nullcontext()
