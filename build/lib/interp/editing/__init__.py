"""Changing weights: gradient, fine-tuning, shift and ROME edits, and what they are worth."""

from interp.editing.edit_scores import Continuation, EditCase, edit_table, ngram_entropy
from interp.editing.editors import FineTuning, finetune_edit, gradient_edit, shift_edit
from interp.editing.rome import Rome, key_moment, rome_edit
from interp.editing.singular_values import SingularValues, interpolated, train_z
from interp.editing.weight_edit import WeightEdit

__all__ = [
    "Continuation",
    "EditCase",
    "FineTuning",
    "Rome",
    "SingularValues",
    "WeightEdit",
    "edit_table",
    "finetune_edit",
    "gradient_edit",
    "interpolated",
    "key_moment",
    "ngram_entropy",
    "rome_edit",
    "shift_edit",
    "train_z",
]
