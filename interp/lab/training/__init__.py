"""Training: one loop over any model config, data as a function of (seed, step), runs that go on after a kill."""

from interp.lab.training.beams import Beams, beam_search
from interp.lab.training.decoding import exactly_right
from interp.lab.training.dropout import Dropout
from interp.lab.training.initial import xavier
from interp.lab.training.leave_out import FixedRows, leave_out
from interp.lab.training.loop import Trained, train
from interp.lab.training.losses import Distillation, TrainingData, mean_loss, scores
from interp.lab.training.presets import PRESETS, attention_only, config_for, encoder_decoder
from interp.lab.training.pruning import Pruned, head_importance, prune_heads
from interp.lab.training.schedule import Training
from interp.lab.training.sentences import Sentences
from interp.lab.training.texts import PackedTexts
from interp.lab.training.vocabulary import Vocabulary

__all__ = [
    "PRESETS", "Beams", "Distillation", "Dropout", "FixedRows", "PackedTexts", "Pruned", "Sentences", "Trained",
    "Training", "TrainingData", "Vocabulary", "attention_only", "beam_search", "config_for", "encoder_decoder",
    "exactly_right", "head_importance", "leave_out", "mean_loss", "prune_heads", "scores", "train", "xavier",
]  # fmt: skip
