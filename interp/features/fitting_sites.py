"""Which site a dictionary was made for: how much it explains at the site that it names and at others near it.

Names of sites that differ little hide vectors that differ much: the stream, the stream after a norm, the same before
the norm's gain. A dictionary read at the wrong one gives numbers, but explains nothing and has far too many or too few
active features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from interp.core.named import Only, Parts, Several
from interp.core.results import Score, scored
from interp.core.stats import Partial
from interp.data.batch import Batch
from interp.features.dictionary import Dictionary
from interp.features.dictionary_metrics import Fit, TextSums
from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.tap import Trace
from interp.model.transformer import Transformer
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question, Reading, Values
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import xarray as xr

BEFORE_GAIN = " before its gain"
"""What follows the name of a norm's site where the norm's output before its gain is meant."""
OTHERS = ("attn.hook_z", "mlp.hook_post")
"""Sites that dictionaries are made for beside those of vectors of the model's width."""
NEAR = 1
"""Layers before and after the dictionary's own whose sites are tried."""
BETTER = 0.5
"""The named site is doubted where another one leaves at most this part of the variance unexplained that it leaves."""


class Tried(NamedTuple):
    """A site at which a dictionary is tried, and the dictionary that reads there."""

    name: str
    sums: TextSums


@dataclass(frozen=True, eq=False)
class FittingSites(Question):
    """How much of a model's activations a dictionary explains at its own site, and at the other sites near it.

    Every site of its width in its layer, the one before and the one after is tried in one pass; of a norm also the
    output before its gain. A transcoder is tried at what it reads; what it should write stays.

    Args:
        data: prompts, token ids, a batch, files or a stream; some hundred tokens of ordinary text are enough.
        dictionary: the dictionary, which names its sites; on the device of the model.
        skip_bos: whether a BOS in front of a text is left out, as in `dictionary_quality`.

    Returns:
        Dataset over `site` and `score`, the best site first: `value`, `n` and the coordinate `unit`, the scores of
        `reconstruction_quality` (NaN where vectors that are all alike have no variance). Coordinate `named` [site]:
        whether it is the dictionary's own. A note says where another site leaves half as much of the variance
        unexplained as the own one.

    Raises:
        ValueError: a dictionary that does not name its site or does not fit the model's width, or no vectors.
        KeyError: a site that the model lacks.

    Caveats:
        Explained variance at the stream is close to 1 wherever a few coordinates hold most of it: compare the sites of
        one layer, and look at the L0 that the dictionary was trained for.

    See Also:
        `load`: asks this where it is given a model and data. `dictionary_quality`: what the model loses.

    Example:
        >>> eye, zero = torch.eye(24), torch.zeros(24)
        >>> weights = {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero}
        >>> sae = Dictionary(interp.features.ReLU(), weights, reads="blocks.1.hook_resid_post")
        >>> found = fitting_sites(model, [prompt], sae)
        >>> found.value.dims
        ('site', 'score')
    """

    of_layers: ClassVar[bool] = False

    dictionary: Dictionary
    _: KW_ONLY
    skip_bos: bool = True

    def bind(self, model: Subject) -> ByRow:
        """One read of all sites, reduced to sums over the vectors of every text."""
        tried = list(_tried(self, model))
        reads = list(dict.fromkeys(read for each in tried for read in each.sums.needed))
        keep = Several({str(i): Only(_names(i), Numbered(i)) for i in range(len(tried))})
        names = [each.name for each in tried]
        return ByRow(
            self.name,
            Reading(reads, _SumsOfSites(tried)),
            keep,
            partial(_finish, name=self.name, names=names),
        )


fitting_sites = of_data(FittingSites)


@dataclass(frozen=True)
class Numbered:
    """A reduction: `Fit` of the values of one of several dictionaries, whose names carry its number."""

    number: int

    def of(self, values: Values, rows: Tensor | None = None) -> Partial:
        """The sums of one batch."""
        return Fit.of({name.partition(" ")[2]: value for name, value in values.items()}, rows)

    def load(self, tensors: Values) -> Partial:
        """The sums from what `tensors` returned."""
        return Fit.load(tensors)


def _names(i: int) -> list[str]:
    return [f"{i} {name}" for name in ("vectors", "mean", "spread", "error", "active")]


@dataclass(frozen=True, eq=False)
class _SumsOfSites:
    """A function from the sites to the sums of every text at each of them."""

    tried: Sequence[Tried]

    def __call__(self, trace: Trace, batch: Batch, model: Transformer) -> Values:
        return {
            f"{i} {name}": value
            for i, each in enumerate(self.tried)
            for name, value in each.sums(trace, batch, model).items()
        }


def _tried(question: FittingSites, model: Subject) -> Iterator[Tried]:
    """The sites at which the dictionary is tried, its own first."""
    dictionary, network = question.dictionary, model.transformer
    own = TextSums(dictionary.fitted_to(network), question.skip_bos, model.text.bos_id)
    named = dictionary.reads
    assert named is not None
    own_name = named + BEFORE_GAIN * dictionary.before_gain
    yield Tried(own_name, own)
    for site, at_home in _near(named, network.config):
        writes = dictionary.writes if dictionary.transcodes else site
        for before_gain in (False, True) if at_home and site.endswith("hook_normalized") else (False,):
            name = site + BEFORE_GAIN * before_gain
            try:
                there = dictionary.moved(site, writes, before_gain=before_gain).fitted_to(network)
            except ValueError:  # another width, or a gain that is 0 somewhere
                continue
            if name != own_name:
                yield Tried(name, TextSums(there, question.skip_bos, model.text.bos_id))


def _near(named: str, config: ModelConfig) -> Iterator[tuple[str, bool]]:
    """The sites of vectors in the layers near that of a site, and whether in its own; each value of the stream once."""
    home = sites.find(named, config)[1]
    for name in sites.names(config):
        site, layer = sites.find(name, config)
        near = layer is home if home is None or layer is None else abs(layer - home) <= NEAR
        once = site.name != "hook_resid_pre" or layer == 0
        if near and once and (site.axes == "b p d" or site.name in OTHERS):
            yield name, layer == home


def _finish(merged: Partial, name: str, names: Sequence[str]) -> xr.Dataset:
    assert isinstance(merged, Parts)
    fits = [merged.parts[str(i)] for i in range(len(names))]
    scores = [fit.checked().scores() for fit in fits if isinstance(fit, Fit)]
    order = sorted(
        range(len(names)), key=lambda i: -float(scores[i]["explained_variance"].value.nan_to_num(-torch.inf))
    )
    stacked = {key: _stacked([scores[i][key] for i in order]) for key in scores[0]}
    return scored(
        name,
        stacked,
        ("site",),
        coords={"site": [names[i] for i in order], "named": ("site", [i == 0 for i in order])},
        attrs={
            "null": "explained variance 0: the mean alone",
            "tried": f"sites up to {NEAR} layer from its own",
        },
        notes=_doubts(names, scores, order[0]),
    )


def _stacked(scores: Sequence[Score]) -> Score:
    """Scores of one quantity as one over several sites."""
    value, low, high, n, null = (torch.stack(each) for each in list(zip(*scores, strict=True))[:5])
    return Score(value, low, high, n, null, scores[0].unit)


def _doubts(names: Sequence[str], scores: Sequence[dict[str, Score]], best: int) -> list[str]:
    """A note where another site leaves half as much unexplained as the dictionary's own, or none explains anything."""
    own, other = (1 - float(scores[i]["explained_variance"].value) for i in (0, best))
    if other >= 1:
        return [
            f"the dictionary explains nothing at any of the {len(names)} sites near {names[0]}: was it "
            "made for another model?"
        ]
    if other > BETTER * own:
        return []
    l0 = [float(scores[i]["l0"].value) for i in (0, best)]
    return [
        f"the dictionary names {names[0]}, where it leaves {own:.2f} of the variance unexplained (L0 {l0[0]:.3g}); "
        f"at {names[best]} it leaves {other:.2f} (L0 {l0[1]:.3g})"
    ]
