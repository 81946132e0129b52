"""Published claims at toy scale: what each paper says, what comes out here with its interval, and whether it holds."""

from experiments.papers.claim import Claim, Measured, Region
from experiments.papers.table import PAPERS, Paper, Row, as_result, measured, reproduce

__all__ = ["PAPERS", "Claim", "Measured", "Paper", "Region", "Row", "as_result", "measured", "reproduce"]
