"""Changing weights: gradient, fine-tuning, shift, ROME, MEND edits and their worth; what differs between two models."""

from interp.editing.activation_difference import ActivationDifference, activation_difference
from interp.editing.changed_tokens import ChangedTokens, changed_tokens
from interp.editing.difference import Diff, DiffInteractions, diff, diff_interactions
from interp.editing.edit_scores import Continuation, EditCase, edit_table, ngram_entropy
from interp.editing.editors import FineTuning, finetune_edit, gradient_edit, shift_edit
from interp.editing.memit import memit_edit
from interp.editing.mend import Mend, mend_edit, train_mend
from interp.editing.rome import Rome, key_moment, rome_edit
from interp.editing.singular_values import SingularValues, interpolated, train_z
from interp.editing.two_passes import Dispatch, TwoPasses, adapted, reinforce_z, two_passes
from interp.editing.weight_edit import WeightEdit

__all__ = [
    "ActivationDifference",
    "ChangedTokens",
    "Continuation",
    "Diff",
    "DiffInteractions",
    "Dispatch",
    "EditCase",
    "FineTuning",
    "Mend",
    "Rome",
    "SingularValues",
    "TwoPasses",
    "WeightEdit",
    "activation_difference",
    "adapted",
    "changed_tokens",
    "diff",
    "diff_interactions",
    "edit_table",
    "finetune_edit",
    "gradient_edit",
    "interpolated",
    "key_moment",
    "memit_edit",
    "mend_edit",
    "ngram_entropy",
    "reinforce_z",
    "rome_edit",
    "shift_edit",
    "train_mend",
    "train_z",
    "two_passes",
]
