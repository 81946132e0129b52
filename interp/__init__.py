"""A hookable Transformer and the exact analyses that take it apart.

import interp
model = interp.HookedTransformer.from_pretrained("demo-4l")
interp.heads(model)
interp.attribute(model, "When Mary and John went to the shop, John gave a drink to", " Mary", " John")
"""

from typing import TYPE_CHECKING

from interp.attention import (
    IndirectObjects,
    RepeatedTokens,
    attention_entropy,
    attention_kernel,
    dispersion,
    heads,
)
from interp.causal.ablation import ablate
from interp.causal.agreement import agreement
from interp.causal.attribution_patching import attribution_patch
from interp.causal.causal_trace import causal_trace
from interp.causal.contrast import batches
from interp.causal.graph import EdgeGraph
from interp.causal.knockout import knock_out
from interp.causal.patching import patch, patch_preset
from interp.causal.path_patching import path_patch
from interp.causal.recall import recall
from interp.causal.short_circuit import short_circuit
from interp.causal.spans import Mention
from interp.circuits.circuit_evaluation import circuit_curve, evaluate_circuit
from interp.circuits.discovery import find_circuit
from interp.circuits.edge_attribution import edge_attribution
from interp.circuits.edge_circuit import Circuit
from interp.circuits.edge_effects import edge_effects
from interp.circuits.edge_rankings import edge_stability, recovery
from interp.circuits.graph_files import (
    AttributionGraph,
    GraphPrompt,
    read_attribution_graph,
    write_attribution_graph,
)
from interp.core.factored import FactoredMatrix
from interp.core.permutation import permutation_test
from interp.core.results import frame
from interp.data.batch import Batch
from interp.data.sources import open_source
from interp.data.stream import Stream
from interp.dynamics.checkpoints import over_checkpoints, per_token_loss_pca, phase_change
from interp.dynamics.consensus import consensus
from interp.dynamics.in_context import in_context, loss_map, one_token_losses
from interp.dynamics.rank_collapse import rank_collapse
from interp.editing.continuation import Continuation, ngram_entropy
from interp.editing.edit_scores import EditCase, edit_table
from interp.editing.editors import FineTuning, finetune_edit, gradient_edit, shift_edit
from interp.editing.rome import Rome, key_moment, rome_edit
from interp.editing.singular_values import SingularValues, interpolated, train_z
from interp.editing.weight_edit import WeightEdit
from interp.encoder_decoder import HookedEncoderDecoder
from interp.features.probing import probe, probe_neurons
from interp.features.sae import SAE, JumpReLU, ReLU, TopK
from interp.features.sae_files import load_sae, save_sae
from interp.features.sae_metrics import sae_quality
from interp.features.sae_training import train_sae
from interp.features.top_examples import top_examples
from interp.hooked import HookedTransformer
from interp.lenses.backward_lens import backward_lens
from interp.lenses.late_layers import late_layers
from interp.lenses.lens import logit_lens
from interp.lenses.output_lens import output_lens
from interp.lenses.tuned_lens import TunedLens, train_tuned_lens
from interp.model.config import ModelConfig
from interp.model.edits import Add, Detach, Edit, Mean, Project, Resample, Scale, Set, Swap, Zero
from interp.model.parts import Edge, Part
from interp.model.tap import Read, Tap, Trace
from interp.model.transformer import Transformer
from interp.passes.analysis import Analysis
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
from interp.residual.activation_cache import ActivationCache
from interp.residual.attribution import attribute
from interp.residual.decomposition import Decomposition, IncompleteSumError
from interp.residual.paths import orders, path_matrix, paths, term_importance
from interp.runs.record import Record
from interp.runs.run import Results, run
from interp.runs.store import ActivationStore
from interp.runs.store_writer import store_activations
from interp.tokens import (
    IntegratedGradients,
    Mixing,
    compare_methods,
    erasure,
    flow_routes,
    layer_mixing,
    routes,
    token_attribution,
)
from interp.verify import Contract
from interp.weights.bigrams import bigram_table
from interp.weights.composition import (
    composition,
    composition_directions,
    composition_scores,
    virtual_heads,
)
from interp.weights.copying import copying, eigenvalue_scores, matching_scores
from interp.weights.directions import directions, neurons, singular_directions
from interp.weights.head_circuits import HeadCircuits
from interp.weights.head_tokens import head_tokens
from interp.weights.spectra import spectra
from interp.weights.token_pairs import skip_trigrams, top_pairs
from interp.zoo import DEMOS

if TYPE_CHECKING:
    from interp.pages.report_page import report

__version__ = "0.1.0"

__all__ = [
    "DEMOS",
    "SAE",
    "ActivationCache",
    "ActivationStore",
    "Add",
    "Analysis",
    "AttributionGraph",
    "Batch",
    "Circuit",
    "Continuation",
    "Contract",
    "Decomposition",
    "Detach",
    "Edge",
    "EdgeGraph",
    "Edit",
    "EditCase",
    "FactoredMatrix",
    "FineTuning",
    "GraphPrompt",
    "HeadCircuits",
    "HookPoint",
    "HookedEncoderDecoder",
    "HookedTransformer",
    "IncompleteSumError",
    "IndirectObjects",
    "IntegratedGradients",
    "JumpReLU",
    "Mean",
    "Mention",
    "Metric",
    "Mixing",
    "ModelConfig",
    "Part",
    "Project",
    "ReLU",
    "Read",
    "Record",
    "RepeatedTokens",
    "Resample",
    "Results",
    "Rome",
    "Sampling",
    "Scale",
    "Set",
    "SingularValues",
    "Stream",
    "Swap",
    "Sweep",
    "Tap",
    "TopK",
    "Trace",
    "Transformer",
    "TunedLens",
    "Variant",
    "WeightEdit",
    "Zero",
    "ablate",
    "agreement",
    "answer_loss",
    "answer_probability",
    "attention_entropy",
    "attention_kernel",
    "attribute",
    "attribution_patch",
    "backward_lens",
    "batches",
    "bigram_table",
    "causal_trace",
    "choice_difference",
    "circuit_curve",
    "compare_methods",
    "composition",
    "composition_directions",
    "composition_scores",
    "consensus",
    "copying",
    "directions",
    "dispersion",
    "edge_attribution",
    "edge_effects",
    "edge_stability",
    "edit_table",
    "eigenvalue_scores",
    "erasure",
    "evaluate_circuit",
    "find_circuit",
    "finetune_edit",
    "flow_routes",
    "frame",
    "gradient_edit",
    "head_tokens",
    "heads",
    "in_context",
    "interpolated",
    "key_moment",
    "kl_divergence",
    "knock_out",
    "late_layers",
    "layer_mixing",
    "load_sae",
    "logit_difference",
    "logit_lens",
    "loss_map",
    "matching_scores",
    "neurons",
    "next_token_loss",
    "ngram_entropy",
    "observe",
    "of_logits",
    "one_token_losses",
    "open_source",
    "orders",
    "output_lens",
    "over_checkpoints",
    "patch",
    "patch_preset",
    "path_matrix",
    "path_patch",
    "paths",
    "per_token_loss_pca",
    "permutation_test",
    "phase_change",
    "probe",
    "probe_neurons",
    "rank_collapse",
    "read_attribution_graph",
    "recall",
    "recovery",
    "report",
    "rome_edit",
    "routes",
    "run",
    "sae_quality",
    "save_sae",
    "shift_edit",
    "short_circuit",
    "singular_directions",
    "skip_trigrams",
    "spectra",
    "store_activations",
    "term_importance",
    "token_attribution",
    "top_examples",
    "top_pairs",
    "train_sae",
    "train_tuned_lens",
    "train_z",
    "virtual_heads",
    "write_attribution_graph",
]


def __getattr__(name: str) -> object:
    """The report at its first use: pages need pandas, xarray and jinja2, which are slow to import."""
    if name == "report":
        from interp.pages.report_page import report

        return report
    raise AttributeError(f"module 'interp' has no attribute {name!r}")
