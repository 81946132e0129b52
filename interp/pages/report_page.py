"""`interp.report(...)`: the analysis page of one prompt as an object that a notebook shows inline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from markupsafe import Markup

from interp.core.boundary import public
from interp.data.batch import Prompts
from interp.pages.findings import Finding, findings
from interp.pages.folder import replacing, write_report
from interp.pages.render import page
from interp.pages.report import About, FittedLens, Report, ReportQuestion, report_of
from interp.passes.observe import Model, text_of

if TYPE_CHECKING:
    import pandas as pd

HEIGHT = 720
"""Height of the page in a notebook, in pixels."""
OWN_BASE = '<base href="about:srcdoc">'
"""Makes the links of a page inside another one lead into itself, not into the page around it."""


@dataclass(frozen=True, eq=False)
class ReportPage:
    """The page of one prompt: shown inline in a notebook, `.save(folder)` writes it with its tables."""

    report: Report

    @cached_property
    def html(self) -> str:
        """The whole page, self-contained: it opens from disk and fetches nothing."""
        return page(self.report)

    @property
    def tables(self) -> Mapping[str, pd.DataFrame]:
        """Every number on the page, as tidy tables by name."""
        return self.report.tables

    @public()
    def save(self, folder: str | os.PathLike[str], *, csv: bool = False) -> Path:
        """Write `index.html`, `run.json` and every table as Parquet.

        Args:
            folder: a new or an empty folder, or one of an earlier report, which is replaced.
            csv: whether to write every table as CSV too.

        Returns:
            The path of the page.

        Raises:
            ValueError: a folder that holds anything that no report wrote.
            OSError: if it cannot be written to.
        """
        with replacing(Path(folder)) as fresh:
            write_report(self.report, fresh, csv=csv)
        return Path(folder) / "index.html"

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The findings, at most six sentences, the most important first; each with a doubt where there is one."""
        return findings(self.report)

    def __str__(self) -> str:
        return "\n".join([repr(self), *(f"- {one}" for one in self.findings)])

    def __repr__(self) -> str:
        question = self.report.question
        return f"ReportPage({self.report.about.name!r}, {question.prompt!r}, {len(self.tables)} tables)"

    def _repr_html_(self) -> str:
        """The page in a frame that may run the page's own script, and reach nothing else."""
        frame = Markup(
            '<iframe sandbox="allow-scripts" srcdoc="{}" title="{}" width="100%" height="{}" '
            'style="border:1px solid #8886;background:#fff"></iframe>'
        )
        framed = self.html.replace("<head>", f"<head>{OWN_BASE}", 1)
        return frame.format(framed, repr(self), HEIGHT)


@public()
def report(
    model: Model,
    prompt: Prompts,
    answer: str | None = None,
    wrong: str | None = None,
    corrupt: Prompts | None = None,
    *,
    about: About | None = None,
    seed: int = 0,
    lenses: Mapping[str, FittedLens] = MappingProxyType({}),
) -> ReportPage:
    """The analysis page of one prompt: every standard analysis of it, with tables and provenance.

    What was found in sentences, then every picture and number; shown in a notebook, or `.save(folder)`.

    Args:
        prompt: text, or the ids of one prompt, such as a conversation: `report(model, model.chat([...]))`.
        answer: the next token asked about, leading space included; None: the model's own most probable one.
        wrong: the token that the answer is contrasted with.
        corrupt: the prompt with what decides its answer changed, aligned token by token. With it the page has
            patching maps and a circuit.
        about: the model's name and what is known of it; None: its name only (what was measured of a checkpoint may no
            longer hold of a model in memory).
        seed: seed of the random tokens on which heads are scored.
        lenses: tuned and Jacobian lenses of this model, by the names under which the page shows them next to the
            logit lens.

    Returns:
        `ReportPage`: `.html`, and `.tables` by the name of their analysis.

    Raises:
        ValueError: a prompt or an answer that the model cannot take, a prompt too long for the page, a corrupted
            prompt that does not align with the prompt or that the model answers alike, or a model that is not causal.

    Example:
        >>> found = report(model, prompt, " Mary", " John")
        >>> "attribution" in found.tables, found.html.startswith("<!doctype html>")
        (True, True)
    """
    told = About(str(getattr(model, "name", "model"))) if about is None else about
    return ReportPage(
        report_of(
            model,
            ReportQuestion.of(text_of(model), prompt, answer, wrong, corrupt),
            told,
            seed=seed,
            lenses=lenses,
        )
    )
