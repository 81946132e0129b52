"""The table of papers: which there are, and what each of their claims comes to here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from experiments.papers.claim import Claim
from experiments.papers.dong_2021 import dong_2021
from experiments.papers.effort import Effort
from experiments.papers.elhage_2021 import elhage_2021
from experiments.papers.elhage_2022 import elhage_2022
from experiments.papers.geshkovski_2023 import geshkovski_2023
from experiments.papers.geva_2021 import geva_2021
from experiments.papers.gurnee_2023 import gurnee_2023
from experiments.papers.hanna_2024 import hanna_2024
from experiments.papers.katz_2024 import katz_2024
from experiments.papers.lau_2023 import lau_2023
from experiments.papers.meng_2022 import meng_2022
from experiments.papers.nanda_2023 import nanda_2023
from experiments.papers.olsson_2022 import olsson_2022
from experiments.papers.su_2021 import su_2021
from experiments.papers.wang_2022 import wang_2022
from experiments.papers.ye_2024 import ye_2024
from interp.core.results import labelled
from interp.core.wording import nearest

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class Paper:
    """A paper of the table: how it is cited, and the function that measures its claims."""

    citation: str
    measure: Callable[[Effort], Iterator[Claim]]


PAPERS: Mapping[str, Paper] = MappingProxyType(
    {
        "elhage-2021": Paper("Elhage et al. 2021, A Mathematical Framework for Transformer Circuits", elhage_2021),
        "olsson-2022": Paper("Olsson et al. 2022, In-context Learning and Induction Heads", olsson_2022),
        "wang-2022": Paper("Wang et al. 2022, Interpretability in the Wild", wang_2022),
        "meng-2022": Paper("Meng et al. 2022, Locating and Editing Factual Associations in GPT", meng_2022),
        "geva-2021": Paper("Geva et al. 2021, 2022, Feed-forward layers are key-value memories", geva_2021),
        "katz-2024": Paper("Katz et al. 2024, Backward Lens", katz_2024),
        "hanna-2024": Paper("Hanna et al. 2024, Have Faith in Faithfulness", hanna_2024),
        "elhage-2022": Paper("Elhage et al. 2022, Toy Models of Superposition", elhage_2022),
        "nanda-2023": Paper("Nanda et al. 2023, Progress measures for grokking", nanda_2023),
        "gurnee-2023": Paper("Gurnee et al. 2023, Finding Neurons in a Haystack", gurnee_2023),
        "dong-2021": Paper("Dong et al. 2021, Attention is not all you need", dong_2021),
        "geshkovski-2023": Paper("Geshkovski et al. 2023; Rodriguez Abella et al. 2024, clusters", geshkovski_2023),
        "su-2021": Paper("Su 2021, From entropy invariance to the scale of attention", su_2021),
        "ye-2024": Paper("Ye et al. 2024, Differential Transformer", ye_2024),
        "lau-2023": Paper("Lau et al. 2023; Hoogland et al. 2024, the local learning coefficient", lau_2023),
    }
)  # fmt: skip
"""Every paper by its name on the command line."""


@dataclass(frozen=True)
class Row:
    """A line of the table: a claim, the name of its paper, and how long it took."""

    paper: str
    claim: Claim
    seconds: float

    @property
    def command(self) -> str:
        """What makes this line again."""
        return f"python -m experiments.papers {self.paper}"


def measured(papers: Sequence[str] | None = None, *, effort: float = 1.0) -> Iterator[Row]:
    """The lines of the table one by one, each as soon as it is measured; `reproduce` has the whole table.

    Errors: KeyError for a paper that the table lacks; ValueError for no papers or an effort outside (0, 1].

    Example:
        >>> next(iter(experiments.papers.measured(["su-2021"]))).claim.verdict
        'holds'
    """
    scale = Effort(effort)
    names = list(PAPERS) if papers is None else list(papers)
    if not names:
        raise ValueError("at least one of papers is required, got none")
    for name in names:
        if name not in PAPERS:
            raise KeyError(f"unknown paper {name!r}; {nearest(name, PAPERS)}; there are {', '.join(PAPERS)}")
    return _measured(names, scale)


def _measured(names: Sequence[str], scale: Effort) -> Iterator[Row]:
    for name in names:
        begun = time.perf_counter()
        for claim in PAPERS[name].measure(scale):
            now = time.perf_counter()
            yield Row(name, claim, now - begun)
            begun = now


def reproduce(papers: Sequence[str] | None = None, *, effort: float = 1.0) -> xr.Dataset:
    """Claims of published papers at toy scale: the published number, ours with its interval, and a verdict.

    Returns Dataset[claim]: `value`, `low` and `high` (95 %, NaN for what cannot be tested here), `n`, the `lowest` and
    `highest` value at which the claim would hold, `seconds`; coordinates `paper`, `text`, `published`, `over` (what the
    interval is over), `unit`, `verdict`, `note`, `command`. Verdicts follow the one rule of `Claim`; a claim that fails
    stays in the table.
    papers: names out of `PAPERS`; None: all. effort: the share of rows, seeds and updates; claims are about 1, less is
    for trying.
    Caveats: models of a few thousand to a million parameters, trained on made-up languages. That a claim holds here
    does not show it at scale, and that it fails does not refute it there.
    Errors: KeyError for a paper that the table lacks; ValueError for no papers or an effort outside (0, 1].

    Example:
        >>> found = experiments.papers.reproduce(["su-2021"])
        >>> found.verdict.values[0]
        'holds'
    """
    return as_result(list(measured(papers, effort=effort)))


def as_result(rows: Sequence[Row]) -> xr.Dataset:
    """Lines of the table as the labelled result that `reproduce` describes. ValueError for none.

    Example:
        >>> experiments.papers.as_result(list(experiments.papers.measured(["su-2021"]))).sizes["claim"] > 0
        True
    """
    if not rows:
        raise ValueError("at least one of rows is required, got none")
    given = [row.claim.ours for row in rows]
    numbers = {
        name: [math.nan if ours is None else float(getattr(ours, name)) for ours in given]
        for name in ("value", "low", "high")
    }
    numbers |= {
        "lowest": [row.claim.region.lowest for row in rows],
        "highest": [row.claim.region.highest for row in rows],
        "seconds": [row.seconds for row in rows],
    }
    texts = {
        "paper": [row.paper for row in rows],
        **{name: [str(getattr(row.claim, name)) for row in rows] for name in TEXTS},
        "over": ["" if ours is None else ours.over for ours in given],
        "command": [row.command for row in rows],
    }
    return labelled(
        "reproduce",
        {
            **{name: (("claim",), torch.tensor(each, dtype=torch.float64)) for name, each in numbers.items()},
            "n": (("claim",), torch.tensor([0 if ours is None else ours.n for ours in given])),
        },
        coords={"claim": range(len(rows)), **{name: (("claim",), each) for name, each in texts.items()}},
        units={"seconds": "s"},
        attrs={"interval": "95 %, over what `over` says", "rule": RULE},
    )


TEXTS = ("text", "published", "unit", "verdict", "note")
"""What a claim says in words."""
RULE = "holds: the whole interval lies between lowest and highest"
"""The one rule of verdicts, in words."""
