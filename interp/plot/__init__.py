"""Results as matplotlib pictures: each function takes a result and an optional Axes, and returns the Axes.

Nothing is computed here, nothing is shown, and no style is changed. Signed numbers get a diverging map centred on 0.
"""

from interp.circuits.edge_circuit import Circuit
from interp.core.factored import FactoredMatrix
from interp.core.viewer import PICTURES
from interp.plot.ablation import ablation, recall_curve, recall_map
from interp.plot.alignment import alignment
from interp.plot.attention import attention
from interp.plot.attention_attribution import attention_attribution, qk_attribution
from interp.plot.attention_by_depth import attention_by_depth
from interp.plot.attention_rows import attention_entropy, dispersion
from interp.plot.attribution import attribution, attribution_map
from interp.plot.attribution_graph import attribution_graph
from interp.plot.backward_lens import (
    backward_lens,
    backward_lens_curves,
    backward_lens_grid,
    gradient_cosines,
    gradient_rank,
)
from interp.plot.cards import card, drawn
from interp.plot.causal_trace import causal_trace, causal_trace_curves
from interp.plot.circuit import circuit, circuit_checks, circuit_curve, feature_circuit
from interp.plot.composition import composition
from interp.plot.copying import copying, copying_map, copying_plane, eigenvalue_disc
from interp.plot.cost import costs
from interp.plot.depth import consensus, late_layers, rank_collapse, refinement, splitting
from interp.plot.difference import diff
from interp.plot.findings import findings
from interp.plot.function_vectors import average_indirect_effect, function_vectors
from interp.plot.heads import head_labels, heads
from interp.plot.in_context import heads_over_training, loss_by_index, loss_map
from interp.plot.influence import influence
from interp.plot.learning_coefficient import learning_coefficient
from interp.plot.lens import lens_comparison, lens_curve, logit_lens, patchscope
from interp.plot.linear_relations import linear_relation
from interp.plot.paper import paper
from interp.plot.particles import particles, trajectories
from interp.plot.patching import patching
from interp.plot.paths import loss_by_order
from interp.plot.probing import probing
from interp.plot.same_scale import same_scale
from interp.plot.spectra import factored_spectrum, singular_values, spectra_map, superposition
from interp.plot.steering import steering_curve
from interp.plot.token_attribution import token_attribution
from interp.plot.verify import contract
from interp.verify import Contract

__all__ = [
    "ablation",
    "alignment",
    "attention",
    "attention_attribution",
    "attention_by_depth",
    "attention_entropy",
    "attribution",
    "attribution_graph",
    "attribution_map",
    "average_indirect_effect",
    "backward_lens",
    "backward_lens_curves",
    "backward_lens_grid",
    "causal_trace",
    "causal_trace_curves",
    "circuit",
    "circuit_checks",
    "circuit_curve",
    "composition",
    "consensus",
    "contract",
    "copying",
    "copying_map",
    "copying_plane",
    "costs",
    "diff",
    "dispersion",
    "drawn",
    "eigenvalue_disc",
    "factored_spectrum",
    "feature_circuit",
    "findings",
    "function_vectors",
    "gradient_cosines",
    "gradient_rank",
    "head_labels",
    "heads",
    "heads_over_training",
    "influence",
    "late_layers",
    "learning_coefficient",
    "lens_comparison",
    "lens_curve",
    "linear_relation",
    "logit_lens",
    "loss_by_index",
    "loss_by_order",
    "loss_map",
    "paper",
    "particles",
    "patching",
    "patchscope",
    "probing",
    "qk_attribution",
    "rank_collapse",
    "recall_curve",
    "recall_map",
    "refinement",
    "same_scale",
    "singular_values",
    "spectra_map",
    "splitting",
    "steering_curve",
    "superposition",
    "token_attribution",
    "trajectories",
]

PICTURES.card = card
PICTURES.paper = paper
PICTURES.draws |= {
    # objects of our own
    Circuit: circuit,
    Contract: contract,
    FactoredMatrix: factored_spectrum,
    # labelled results, by the analysis that they name
    "ablate": ablation,
    "align": alignment,
    "attention_attribution": attention_attribution,
    "qk_attribution": qk_attribution,
    "attention_by_depth": attention_by_depth,
    "attention_entropy": attention_entropy,
    "attribute": attribution,
    "attribution_patch": patching,
    "average_indirect_effect": average_indirect_effect,
    "backward_lens": backward_lens,
    "causal_trace": causal_trace,
    "attribution_graph": attribution_graph,
    "circuit_curve": circuit_curve,
    "compare_lenses": lens_comparison,
    "patchscope": patchscope,
    "composition": composition,
    "consensus": consensus,
    "copying": copying,
    "costs": costs,
    "diff": diff,
    "diff_interactions": diff,
    "dispersion": dispersion,
    "evaluate_circuit": circuit_checks,
    "feature_circuit": feature_circuit,
    "find_circuit": circuit,
    "findings": findings,
    "function_vectors": function_vectors,
    "gradient_cosines": gradient_cosines,
    "gradient_rank": gradient_rank,
    "heads": heads,
    "in_context": loss_by_index,
    "knock_out": ablation,
    "late_layers": late_layers,
    "lds": influence,
    "learning_coefficient": learning_coefficient,
    "lens_by_depth": lens_curve,
    "linear_relation": linear_relation,
    "logit_lens": logit_lens,
    "loss_map": loss_map,
    "patch": patching,
    "path_patch": patching,
    "paths": attribution,
    "probe": probing,
    "probe_neurons": probing,
    "rank_collapse": rank_collapse,
    "recall": recall_curve,
    "refinement": refinement,
    "short_circuit": ablation,
    "spectra": singular_values,
    "splitting": splitting,
    "steering_curve": steering_curve,
    "superposition": superposition,
    "term_importance": loss_by_order,
    "token_attribution": token_attribution,
    "trajectories": trajectories,
    # results with a `step` dim, those of `over_checkpoints`
    "heads over training": heads_over_training,
    "in_context over training": loss_map,
    "loss_map over training": loss_map,
}
