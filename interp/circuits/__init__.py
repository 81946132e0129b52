"""Circuits of edges: scoring, finding, running and evaluating them, and their files."""

from interp.circuits.attribution_graph import attribution_graph
from interp.circuits.circuit_evaluation import (
    MIB_FRACTIONS,
    CircuitCurve,
    EvaluateCircuit,
    circuit_curve,
    evaluate_circuit,
)
from interp.circuits.discovery import FindCircuit, find_circuit, score_edges
from interp.circuits.edge_attribution import EdgeAttribution, edge_attribution
from interp.circuits.edge_circuit import Circuit, CircuitProtocol
from interp.circuits.edge_effects import EdgeEffects, edge_effects
from interp.circuits.edge_rankings import edge_stability, recovery
from interp.circuits.feature_circuit import FeatureCircuit, feature_circuit
from interp.circuits.graph_attention import edge_heads, qk_attribution
from interp.circuits.graph_files import (
    AttributionGraph,
    GraphNode,
    GraphPrompt,
    read_attribution_graph,
    write_attribution_graph,
)
from interp.circuits.graph_influence import prune_graph
from interp.circuits.graph_interventions import graph_interventions
from interp.circuits.graph_qk import QKTracing
from interp.circuits.graph_scores import graph_scores
from interp.circuits.interchange import Interchange, interchange
from interp.circuits.mib_files import MibScores, read_mib, write_mib
from interp.model.parts import Edge

__all__ = [
    "MIB_FRACTIONS",
    "AttributionGraph",
    "Circuit",
    "CircuitCurve",
    "CircuitProtocol",
    "Edge",
    "EdgeAttribution",
    "EdgeEffects",
    "EvaluateCircuit",
    "FeatureCircuit",
    "FindCircuit",
    "GraphNode",
    "GraphPrompt",
    "Interchange",
    "MibScores",
    "QKTracing",
    "attribution_graph",
    "circuit_curve",
    "edge_attribution",
    "edge_effects",
    "edge_heads",
    "edge_stability",
    "evaluate_circuit",
    "feature_circuit",
    "find_circuit",
    "graph_interventions",
    "graph_scores",
    "interchange",
    "prune_graph",
    "qk_attribution",
    "read_attribution_graph",
    "read_mib",
    "recovery",
    "score_edges",
    "write_attribution_graph",
    "write_mib",
]
