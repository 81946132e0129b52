"""Circuits of edges: scoring, finding, evaluating, and their files."""

from interp.circuits.circuit_evaluation import evaluate_circuit, faithfulness_curve
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
from interp.circuits.interchange import Interchange

__all__ = [
    "AttributionGraph",
    "Circuit",
    "GraphPrompt",
    "Interchange",
    "edge_attribution",
    "edge_effects",
    "edge_stability",
    "evaluate_circuit",
    "faithfulness_curve",
    "find_circuit",
    "read_attribution_graph",
    "recovery",
    "write_attribution_graph",
]
