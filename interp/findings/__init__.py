"""What the field reports of language models, as claims that are asked of any decoder: `interp findings MODEL`.

A claim says what is measured, what stands for nothing to it, and in which region the difference has to lie, before it
is measured. Heads and layers are chosen on rows that do not count.
"""

from interp.findings.claim import Claim, Measured, Region, verdict
from interp.findings.setting import paragraphs
from interp.findings.table import CLAIMS, findings

__all__ = [
    "CLAIMS",
    "Claim",
    "Measured",
    "Region",
    "findings",
    "paragraphs",
    "verdict",
]
