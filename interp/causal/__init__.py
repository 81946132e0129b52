"""Interventions and their effects: ablation, patching, path patching, tracing, knock-outs, in one effect table."""

from interp.causal.ablation import Ablate, ablate
from interp.causal.alignment import Descent, align
from interp.causal.attribution_patching import AttributionPatch, attribution_patch
from interp.causal.causal_trace import CausalTrace, causal_trace, subject_spread
from interp.causal.contrast import batches
from interp.causal.effects import RankAgreement, agreement
from interp.causal.feature_steering import feature_edits
from interp.causal.function_vectors import (
    AverageIndirectEffect,
    FunctionVectors,
    average_indirect_effect,
    function_vectors,
)
from interp.causal.graph import EdgeGraph
from interp.causal.knockout import KnockOut, knock_out
from interp.causal.linear_relations import LinearRelation, linear_relation
from interp.causal.missed_effects import MissedEffects, missed_effects
from interp.causal.patching import PRESETS, Patch, patch, patch_preset
from interp.causal.path_patching import PathPatch, path_patch
from interp.causal.recall import MEASURES, Recall, continuations, recall
from interp.causal.short_circuit import ShortCircuit, identity, short_circuit
from interp.causal.spans import ROLES, Mention
from interp.causal.steering import Steering, SteeringCurve, steering, steering_curve
from interp.causal.subspace import Subspace

__all__ = [
    "MEASURES",
    "PRESETS",
    "ROLES",
    "Ablate",
    "AttributionPatch",
    "AverageIndirectEffect",
    "CausalTrace",
    "Descent",
    "EdgeGraph",
    "FunctionVectors",
    "KnockOut",
    "LinearRelation",
    "Mention",
    "MissedEffects",
    "Patch",
    "PathPatch",
    "RankAgreement",
    "Recall",
    "ShortCircuit",
    "Steering",
    "SteeringCurve",
    "Subspace",
    "ablate",
    "agreement",
    "align",
    "attribution_patch",
    "average_indirect_effect",
    "batches",
    "causal_trace",
    "continuations",
    "feature_edits",
    "function_vectors",
    "identity",
    "knock_out",
    "linear_relation",
    "missed_effects",
    "patch",
    "patch_preset",
    "path_patch",
    "recall",
    "short_circuit",
    "steering",
    "steering_curve",
    "subject_spread",
]
