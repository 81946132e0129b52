"""The circuit that the page draws, as a file for other viewers of attribution graphs."""

from pathlib import Path

from interp.causal import EdgeGraph
from interp.circuits import Circuit, CircuitProtocol, GraphPrompt, write_attribution_graph
from interp.pages.corrupted import METHOD
from interp.pages.report import Report
from interp.pages.view_circuit import STEPS
from interp.passes.metrics import logit_difference

GRAPH = "attribution_graph.json"
"""The file's name beside the page."""


def write_graph(report: Report, folder: Path) -> list[Path]:
    """Write the edges that the page can draw as an attribution graph; nothing for a page without edges."""
    table, contrast = report.tables.get("edges"), report.contrast
    if table is None or contrast is None:
        return []
    shown = table.head(STEPS[-1])
    wrong = None if contrast.wrong is None else contrast.wrong.token
    metric = logit_difference(contrast.answer.token, wrong)
    how = CircuitProtocol(metric.name, metric.unit, METHOD, "top_n", "resample", n=1)
    scores = dict(zip(shown.edge, shown.value.tolist(), strict=True))
    circuit = Circuit(EdgeGraph.of(report.config), scores, report.about.name, report.question.prompt, how)
    tokens = tuple(report.tables["tokens"].token)
    asked = GraphPrompt(report.question.prompt, tokens, contrast.answer.token, contrast.answer.prob, wrong)
    write_attribution_graph(circuit, asked, folder / GRAPH)
    return [folder / GRAPH]
