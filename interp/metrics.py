"""Metrics of interventions: numbers of the answer's logits, and any function of logits as a metric."""

from interp.passes.metrics import (
    Metric,
    answer_log_probability,
    answer_loss,
    answer_probability,
    choice_difference,
    kl_divergence,
    log_prob_difference,
    logit_difference,
    next_token_loss,
    of_logits,
)

__all__ = [
    "Metric",
    "answer_log_probability",
    "answer_loss",
    "answer_probability",
    "choice_difference",
    "kl_divergence",
    "log_prob_difference",
    "logit_difference",
    "next_token_loss",
    "of_logits",
]
