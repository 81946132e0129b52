"""Results as one self-contained HTML page that opens from disk, with every number also in a table."""

from interp.pages.feature_page import feature_page
from interp.pages.findings import Finding, PageCell, findings
from interp.pages.folder import replacing, write_report
from interp.pages.graph_page import graph_page
from interp.pages.influence_page import influence_page
from interp.pages.render import page
from interp.pages.report import (
    About,
    Corrupted,
    Report,
    ReportQuestion,
    TokenContrast,
    fitting_repeats,
    report_of,
)
from interp.pages.report_page import ReportPage
from interp.pages.run_page import run_page
from interp.pages.steering_page import steering_page
from interp.pages.top_examples import top_examples_page

__all__ = [
    "About",
    "Corrupted",
    "Finding",
    "PageCell",
    "Report",
    "ReportPage",
    "ReportQuestion",
    "TokenContrast",
    "feature_page",
    "findings",
    "fitting_repeats",
    "graph_page",
    "influence_page",
    "page",
    "replacing",
    "report_of",
    "run_page",
    "steering_page",
    "top_examples_page",
    "write_report",
]
