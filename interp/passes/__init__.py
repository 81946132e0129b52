"""One pass or a planned sweep of them: observe, edit, measure, generate; questions as data."""

from interp.passes.analysis import Alone, Analysis, Question
from interp.passes.edit_text import edit_from_json, edit_to_json, edit_to_python
from interp.passes.hooks import HookPoint
from interp.passes.metrics import (
    Metric,
    answer_loss,
    answer_probability,
    choice_difference,
    kl_divergence,
    logit_difference,
    next_token_loss,
    of_logits,
)
from interp.passes.observe import observe
from interp.passes.sampling import Sampling
from interp.passes.sweep import Sweep
from interp.passes.variants import Variant

__all__ = [
    "Alone",
    "Analysis",
    "HookPoint",
    "Metric",
    "Question",
    "Sampling",
    "Sweep",
    "Variant",
    "answer_loss",
    "answer_probability",
    "choice_difference",
    "edit_from_json",
    "edit_to_json",
    "edit_to_python",
    "kl_divergence",
    "logit_difference",
    "next_token_loss",
    "observe",
    "of_logits",
]
