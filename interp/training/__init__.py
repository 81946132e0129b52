"""Training: one loop over any model config, data as a function of (seed, step), runs that go on after a kill."""

from interp.training.decoding import exactly_right
from interp.training.dropout import Dropout
from interp.training.initial import xavier
from interp.training.leave_out import FixedRows, leave_out
from interp.training.loop import Trained, train
from interp.training.losses import TrainingData, mean_loss, scores
from interp.training.presets import PRESETS, attention_only, config_for, encoder_decoder
from interp.training.schedule import Training
from interp.training.sentences import Sentences
from interp.training.texts import PackedTexts
from interp.training.vocabulary import Vocabulary

__all__ = [
    "PRESETS", "Dropout", "FixedRows", "PackedTexts", "Sentences", "Trained", "Training", "TrainingData", "Vocabulary",
    "attention_only", "config_for", "encoder_decoder", "exactly_right", "leave_out", "mean_loss", "scores", "train",
    "xavier",
]  # fmt: skip
