"""Training: one loop over any model config, data as a function of (seed, step), runs that go on after a kill."""

from interp.lab.training.decoding import exactly_right
from interp.lab.training.dropout import Dropout
from interp.lab.training.initial import xavier
from interp.lab.training.leave_out import FixedRows, leave_out
from interp.lab.training.loop import Trained, train
from interp.lab.training.losses import TrainingData, mean_loss, scores
from interp.lab.training.presets import PRESETS, attention_only, config_for, encoder_decoder
from interp.lab.training.schedule import Training
from interp.lab.training.sentences import Sentences
from interp.lab.training.texts import PackedTexts
from interp.lab.training.vocabulary import Vocabulary

__all__ = [
    "PRESETS", "Dropout", "FixedRows", "PackedTexts", "Sentences", "Trained", "Training", "TrainingData", "Vocabulary",
    "attention_only", "config_for", "encoder_decoder", "exactly_right", "leave_out", "mean_loss", "scores", "train",
    "xavier",
]  # fmt: skip
