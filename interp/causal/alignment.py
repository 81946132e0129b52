"""Distributed alignment search: directions whose exchange between two runs exchanges a variable of the model.

Geiger et al. 2023 (arXiv 2303.02536): in the base run the part of a state x in a subspace becomes that of the source
run's state s, x + (s - x) R^T R with orthonormal R [k d]. R holds the variable if the model then gives the answer that
the base prompt has with the source's value. R is learned by gradient descent, or found without one. A search finds
something in any model, so the same is done where there is nothing to find, and scored too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice, product, repeat
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from interp.causal.contrast import Contrast, site_names
from interp.causal.effects import check_one_length, dims_asked, site_dims
from interp.causal.subspace import Subspace
from interp.core.axes import describe
from interp.core.boundary import public
from interp.core.kinds import Count, Positive, PositiveCount, Seed
from interp.core.results import Score, noted, scored
from interp.core.stats import Moments, over, upcast
from interp.core.transfers import Checks, check, checks_together, to_device, to_host
from interp.core.wording import nearest
from interp.data.answers import AnswerTokens
from interp.data.batch import Answers, Batch, Prompts
from interp.data.pairs import paired
from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.edits import Edit, Set, Swap, Zero, orthonormal
from interp.model.kv_cache import Prefix
from interp.model.layout import PositionError
from interp.model.parts import axis_size
from interp.model.sites import DIMS
from interp.model.tap import Read, Tap
from interp.model.transformer import Transformer
from interp.passes.memory import bytes_per_token, that_fit
from interp.passes.metrics import Metric, Outcome, answer_loss, logit_difference
from interp.passes.observe import Model, Subject, as_model, deepest, observe
from interp.passes.question import NotFiniteError
from interp.passes.sweep import Base, Sweep, Touched, base_run
from interp.passes.variants import Variant, canonical, layer_of, placed
from interp.runs.provenance import with_origin

if TYPE_CHECKING:
    import xarray as xr

AlignMethod = Literal["das", "class means", "pca"]
"""das: learned by gradient descent; class means: the span of their differences; pca: principal components."""
Null = Literal["random subspace", "permuted variable", "re-initialised model"]
NULLS: Mapping[str, tuple[Null, ...]] = {
    "das": ("random subspace", "permuted variable", "re-initialised model"),
    "class means": ("random subspace", "permuted variable", "re-initialised model"),
    "pca": ("random subspace", "re-initialised model"),
    "given": ("random subspace",),
}
"""Nulls of each method: principal components know of no variable, and given directions are not trained."""
VECTORS = "dem"
"""Axes along which a subspace may lie: the stream, a head's width, neurons."""
_FOUND, _RANDOM = 0, 1
"""Purpose of a random draw, part of a cell's seed: the start of the search, or the random subspace."""


@public()
@dataclass(frozen=True)
class Descent:
    """How `align` learns directions: Adam on W with R = QR(W), the rate falling linearly to 0."""

    steps: PositiveCount = 100
    """Batches of training pairs."""
    rate: Positive = 0.1
    """Adam's initial rate. W starts as N(0, 1), so the rate is about the angle in radians by which a step turns R."""
    pairs: PositiveCount = 32
    """Pairs in a batch; every epoch goes through all pairs in a new random order."""


@public()
def align(
    model: Model,
    base: Prompts,
    source: Prompts,
    *,
    answer: Answers | None = None,
    wrong: Answers | None = None,
    site: str = "resid_post",
    by: Sequence[str] = ("layer", "pos"),
    layers: Sequence[int] | None = None,
    pos: Sequence[int] | None = None,
    method: AlignMethod = "das",
    rank: Count = 1,
    subspace: Subspace | Float[Tensor, "k d"] | None = None,
    labels: tuple[Sequence[int], Sequence[int]] | None = None,
    descent: Descent | None = None,
    held_out: float | Sequence[bool] = 0.5,
    nulls: Sequence[Null] | None = None,
    seed: Seed = 0,
    edits: Sequence[Edit] = (),
    prepend_bos: bool | None = None,
    batch_size: Count = 32,
) -> xr.Dataset:
    """Directions of each cell that hold a variable, found by interchange of two runs, and scores on held-out pairs.

    A pair is a base prompt, a source prompt as long whose variable has another value, and the answer that the base
    prompt has with the source's value. R [k d] is found on some pairs and scored on the others: the base run gets x +
    (s - x) R^T R, x and s the states of the base and the source run.

    Args:
        base: prompts that are intervened on.
        source: prompts whose states are put in, as long as the base prompts and aligned with them one by one.
        answer: token with the exchange, one for all pairs or one for each; None: those of the source prompts.
        wrong: token without the exchange, given like `answer`; None: none, or without `answer` those of the source
            prompts.
        site: which activation: any site of every layer with a vector at each cell.
        by: dims that tell cells apart, `layer` among them; along other dims all is exchanged at once, by one R.
        layers: layers that are searched; None: all.
        pos: positions that are searched, counted from the side where all pairs are as far; None: all, which requires
            prompts of one length.
        method: "das" descends -log p(answer) by gradient (`descent`); "class means" takes the first `rank` directions
            of the classes' means from their mean, "pca" of all states.
        rank: number of directions k.
        subspace: directions to score as they are on every pair, such as decoder rows of an SAE; None: they are
            searched.
        labels: classes of the base and of the source prompts, for "class means"; None: wrong and right answer.
        descent: settings of "das"; None: `Descent()`.
        held_out: share of the pairs that are scored and not trained on, or for each pair whether it is one. Pairs that
            share prompts with training pairs flatter the score.
        nulls: searches where there is nothing to find; None: all that the method has.
        seed: seed of the split, of the search and of the nulls. The same seed gives the same bits on the same machine.
        edits: interventions that every pass runs under.
        prepend_bos: whether texts begin with BOS; None: as the model does by default.
        batch_size: the most pairs of a pass; it changes no number.

    Returns:
        Dataset over `swapped`, the other dims `by`, and `score`. `swapped` is what was exchanged: "found"; "whole
        state", a patch, the ceiling; "random subspace"; "permuted variable", found with the answers permuted over the
        training pairs; "re-initialised model", found and scored where the numbers of each parameter are in random
        order.

        - `value`: mean over held-out pairs, with the ends `low` and `high` of its 95 % interval, `n`, and the
          coordinate `unit`. Scores: `iia`, the share of pairs whose most likely token is the answer (interchange
          intervention accuracy); `logit difference`, of answer and wrong (without wrong ones `logit`); `loss`, -log
          p(answer) in nats.
        - `null`: the same without an exchange.
        - `each` [prompt, ...]: score of every held-out pair.
        - `directions` [layer, ..., direction, d_model]: R, for `Subspace.of_result(result, layer=..., pos=...)`.

    Raises:
        ValueError: pairs, cells, ranks, splits and methods that cannot be, each by name.
        KeyError: an unknown site, dim or null.
        IndexError: a layer or position that does not exist.

    Source:
        Geiger et al. 2023, arXiv 2303.02536 (distributed alignment search).

    See Also:
        `patch`: exchanges whole states.

    Example:
        >>> base, source = torch.tensor([[5, 6, 7], [4, 6, 7]]), torch.tensor([[5, 9, 7], [4, 8, 7]])
        >>> align(model, base, source, answer=[9, 8], rank=2).value.dims
        ('swapped', 'layer', 'pos', 'score')
    """
    subject, fixed_directions = (
        as_model(model, edits),
        subspace.directions if isinstance(subspace, Subspace) else subspace,
    )
    answers = AnswerTokens.of(subject.text, answer, wrong)
    pairs = pairs_of(subject, base, source, answers, prepend_bos=prepend_bos)
    search = DirectionSearch(
        method, rank, descent or Descent(), seed, fixed_directions, _labels(labels, pairs.own), nulls
    )
    cells = AlignedCells.of(subject.transformer.config, pairs, site, by, layers, pos)
    with checks_together() as checks:
        result = search.answered(
            AlignedRuns.of(subject.transformer, cells, pairs, batch_size), held_out, checks
        )
    result = with_origin(result, subject.transformer)
    return result if answers is None else noted(result, *answers.notes(pairs.own))


CellDirections = Float[Tensor, "layer cell k d"]
"""Orthonormal rows for every cell of every layer."""


@dataclass(frozen=True)
class AlignedCells:
    """The cells that are searched, which are the same in every layer."""

    site: str
    names: tuple[str, ...]
    """The site in each layer, as a pass visits it: a stream that leaves a block under the name of the next block's."""
    caller_names: tuple[str, ...]
    """The site in each layer, as the caller named it."""
    layers: tuple[int, ...]
    dims: tuple[str, ...]
    """The dims that tell the cells of a layer apart."""
    labels: Mapping[str, Sequence[int]]
    """The indices along each of these dims."""
    together: tuple[int, ...] | None
    """The columns that every cell exchanges at once, where `pos` is not among `dims`; None: all columns."""

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        pairs: Contrast,
        site: str,
        by: Sequence[str],
        layers: Sequence[int] | None,
        pos: Sequence[int] | None,
    ) -> AlignedCells:
        """The cells that the arguments of `align` describe; raises the errors that it lists."""
        names = site_names(site, config)
        possible, letters = site_dims(names), sites.axes_of(names[0]).split()[1:]
        if letters[-1] not in VECTORS or possible[0] != "layer" or not {"q", "k"}.isdisjoint(letters):
            raise ValueError(
                f"a site of every layer with vectors is required, {site!r} is {describe(' '.join(letters))}"
            )
        dims = dims_asked(by, possible, site)
        if "layer" not in dims:
            raise ValueError(f"directions belong to one layer: `layer` is required in `by`, got {list(by)}")
        if letters[-1] in DIMS and DIMS[letters[-1]] in dims:
            raise ValueError(
                f"directions lie along {DIMS[letters[-1]]!r} of {site}, so it tells no cells apart"
            )
        of_layer = {int(name.split(".")[1]): name for name in names}
        chosen = tuple(of_layer) if layers is None else tuple(layers)
        if not chosen or not set(chosen) <= set(of_layer) or len(set(chosen)) < len(chosen):
            raise IndexError(f"different layers among {list(of_layer)} are required, got {list(chosen)}")
        if pos is None:
            check_one_length(pairs.own, f"directions by {', '.join(by)}", ": name positions in `pos`")
        labels = {
            dim: _columns(pos, pairs.own) if dim == "pos" else range(axis_size(_LETTERS[dim], config))
            for dim in dims[1:]
        }
        chosen_names = tuple(of_layer[layer] for layer in chosen)
        together = None if pos is None or "pos" in dims else tuple(_columns(pos, pairs.own))
        return cls(
            site,
            tuple(canonical(name, config) for name in chosen_names),
            chosen_names,
            chosen,
            dims[1:],
            labels,
            together,
        )

    @property
    def places(self) -> list[tuple[int, ...]]:
        """The indices of every cell of a layer, along `dims`."""
        return list(product(*self.labels.values()))

    def into(
        self, places: Sequence[tuple[int, ...]], rows: int, device: torch.device, first: int = 0
    ) -> tuple[Tensor | slice, ...]:
        """Index into states [g, b, *axes, d] that picks cell `places[g]` in the rows of each group g: [g, b, .., d].

        Args:
            device: device of the states.
            first: column of the batch that is the first column of the states.
        """
        index = torch.tensor(places, dtype=torch.long).reshape(len(places), 1, -1)
        group, row = torch.arange(len(places))[:, None], torch.arange(rows)
        along: dict[str | None, Tensor] = {}
        if self.together is not None:  # one more axis, that of the columns
            group, row, index = group[..., None], row[:, None], index[:, None]
            along["pos"] = torch.tensor(self.together) - first
        along |= {dim: index[..., i] - first * (dim == "pos") for i, dim in enumerate(self.dims)}
        inner = (DIMS.get(letter) for letter in sites.axes_of(self.names[0]).split()[1:-1])
        full_index = (group, row, *(along.get(dim, slice(None)) for dim in inner))
        return tuple(
            to_device(axis_index, device) if isinstance(axis_index, Tensor) else axis_index
            for axis_index in full_index
        )

    def at(self, place: tuple[int, ...]) -> dict[str, int | tuple[int, ...]]:
        """The cell as the index of an edit, such as `{"pos": 3, "head": 1}`."""
        together = {} if self.together is None else {"pos": self.together}
        return {**together, **dict(zip(self.dims, place, strict=True))}


_LETTERS = {dim: letter for letter, dim in DIMS.items()}


@dataclass(frozen=True, eq=False)
class SubspaceExchange:
    """x + (s - x) R^T R at one cell of each group of rows, each with an R of its own: `Swap`, differentiable in R."""

    into: tuple[Tensor | slice, ...]
    source: Float[Tensor, "g b *axes d"]
    basis: Float[Tensor, "g k d"]

    def __call__(self, value: Float[Tensor, "r *axes d"]) -> Float[Tensor, "r *axes d"]:
        """The rows of all groups with their cells exchanged."""
        cells = value.unflatten(0, (len(self.basis), -1))
        x = upcast(cells[self.into])
        along = torch.einsum("g...d, gkd -> g...k", self.source - x, self.basis)  # (s - x) R^T
        cells[self.into] = (x + torch.einsum("g...k, gkd -> g...d", along, self.basis)).to(cells)
        return cells.flatten(0, 1)


@dataclass(frozen=True, eq=False)
class AlignedRuns:
    """A model with pairs of prompts, and the passes without an exchange that all cells share."""

    model: Transformer
    cells: AlignedCells
    pairs: Contrast
    """`own` are the base prompts, `other` the source prompts; both know the answers."""
    batch_size: int
    base: Base
    """The base runs: the sites, the streams where a pass with an exchange begins, and the keys and values before it."""
    source: Mapping[str, Float[Tensor, "n *axes d"]]
    """The sites in the source runs."""

    @classmethod
    def of(cls, model: Transformer, cells: AlignedCells, pairs: Contrast, batch_size: int) -> AlignedRuns:
        """One pass over each prompt. NotFiniteError for NaN or infinity at a site."""
        config = model.config
        # Edits that stand for the exchanges of every layer: only their sites count here.
        edited = [placed(Variant([Edit(name, Zero())]), config, pairs.own.host()) for name in cells.names]
        touched = Touched.of(edited)
        common = placed(Variant(model.edits), config, pairs.own.host())
        bases = [base_run(model.unedited, rows, touched, common) for rows in pairs.own.split(batch_size)]
        base, source = Base.joined(bases), _site_values(model, pairs.other, cells.names, batch_size)
        finite = torch.stack([value.isfinite().all() for value in (*base.values.values(), *source.values())])
        message = "finite states are required, got NaN or infinity in some prompt"
        check(finite.all(), partial(NotFiniteError, message))
        return cls(model, cells, pairs, batch_size, base, source)

    def states(
        self, name: str, places: Sequence[tuple[int, ...]], rows: Int[Tensor, "n"]
    ) -> tuple[Float[Tensor, "g n ... d"], Float[Tensor, "g n ... d"]]:
        """States of each of these cells in these rows' base and source runs, in float32 at least."""
        device, groups = self.model.device, len(places)
        into, index = self.cells.into(places, len(rows), device), to_device(rows, device)
        both_runs = (run_values[name][index] for run_values in (self.base.values, self.source))
        base, source = (upcast(value.expand(groups, *value.shape)[into]) for value in both_runs)
        return base, source

    def differing_cells(self, rows: Int[Tensor, "n"]) -> dict[str, list[int]]:
        """Indices of the cells, at each site, whose states in base and source run differ in any of these pairs."""
        states = {name: self.states(name, self.cells.places, rows) for name in self.cells.names}
        flags = to_host({name: (base != source).flatten(1).any(1) for name, (base, source) in states.items()})
        return {name: differs.nonzero()[:, 0].tolist() for name, differs in flags.items()}

    def loss(
        self,
        name: str,
        places: Sequence[tuple[int, ...]],
        basis: Float[Tensor, "g k d"],
        answers: Int[Tensor, "g b"],
        rows: Int[Tensor, "b"],
    ) -> Float[Tensor, "g b"]:
        """-log p(answer) in nats of these rows after the exchange at each place, differentiable in the bases."""
        model, groups, start, c = self.model, len(places), _first_block(self.model, name), self.first(places)
        index = to_device(rows, model.device)
        source = upcast(self.source[name][index].expand(groups, *[-1] * self.source[name].ndim))
        into = self.cells.into(places, len(rows), model.device)
        exchange = SubspaceExchange(self.cells.into(places, len(rows), model.device, c), source[into], basis)
        prompts = self.pairs.own.rows(rows)
        batch = prompts.rows(torch.arange(len(rows)).repeat(groups)).to(model.device)
        entering = self.base.entering[start][index].repeat(groups, 1, 1) if start else batch.tokens
        cache = None
        if c:
            assert self.base.cache is not None
            cache = Prefix(self.base.cache.of_rows(index), c, groups, keep=prompts.keep)
        tap = Tap([], [Edit(name, exchange)])
        stream = model(
            entering[:, c:], tap, start, model.config.n_layers, keep=None if batch.keep is None else batch.keep[:, c:],
            cache=cache, types=None if start or batch.types is None else batch.types[:, c:], memory=batch.memory,
            logits_at=batch.last()[:, None] - c,
        )  # fmt: skip
        tap.close()
        logits = model.read_out(upcast(stream[:, 0]))
        loss = F.cross_entropy(logits, to_device(answers.flatten(), logits.device), reduction="none")
        return loss.unflatten(0, (groups, -1))

    def first(self, places: Sequence[tuple[int, ...]]) -> int:
        """First column that an exchange at any of these places changes; 0 where no keys and values are kept."""
        if self.base.cache is None:
            return 0
        if "pos" in self.cells.dims:
            return min(place[self.cells.dims.index("pos")] for place in places)
        return min(self.cells.together or (0,))

    def at_once(self, name: str, place: tuple[int, ...], rows: int) -> int:
        """Number of groups, of `rows` rows each, whose differentiated pass from this site on fits the memory."""
        config, columns = self.model.config, self.pairs.own.tokens.shape[1]
        token_bytes = bytes_per_token(config, columns, self.model.embed.weight.element_size(), explicit=True)
        blocks = config.n_layers - _first_block(self.model, name)
        return that_fit(self.model, token_bytes * (columns - self.first([place])) * rows * blocks)

    def scores(self, test: Int[Tensor, "n"], swapped: Mapping[str, CellDirections | None]) -> Scores:
        """Every score of every held-out pair, under each exchange in `swapped`: one sweep per batch and score."""
        places, metrics = self.cells.places, metrics_of(self.pairs.own)
        shape = len(swapped), len(self.cells.names), len(places)
        values, without = [], []
        bases = to_host({name: basis for name, basis in swapped.items() if basis is not None})
        for rows in test.split(self.batch_size):
            index = to_device(rows, self.model.device)
            sources = {name: self.source[name][index] for name in self.cells.names}
            variants = [
                Variant([Edit(name, _exchange(sources[name], directions, layer, cell), self.cells.at(place))])
                for directions in map(bases.get, swapped)
                for layer, name in enumerate(self.cells.names)
                for cell, place in enumerate(places)
            ]
            sweep = Sweep(self.model, self.pairs.own.rows(rows), variants)
            sweeps = [sweep.run(metric) for metric in metrics.values()]
            values.append(
                torch.stack([sweep_of_metric.values.mT.unflatten(1, shape) for sweep_of_metric in sweeps], -1)
            )
            without.append(torch.stack([sweep_of_metric.base for sweep_of_metric in sweeps], -1))
        return Scores(tuple(swapped), torch.cat(values), torch.cat(without))


def _exchange(
    values: Float[Tensor, "b *axes d"], directions: CellDirections | None, layer: int, cell: int
) -> Set | Swap:
    """The edit that puts the source run's values at a cell: along its directions (on the CPU), or all (None)."""
    return Set(values) if directions is None else Swap(directions[layer, cell], values)


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of held-out pairs, for some of the subspaces that were exchanged."""

    swapped: tuple[str, ...]
    values: Float[Tensor, "n swapped layer cell score"]
    without: Float[Tensor, "n score"]
    """Scores of the pairs without an exchange."""


@dataclass(frozen=True, eq=False)
class DirectionSearch:
    """Settings of the search for directions; `align` explains each field."""

    method: AlignMethod
    rank: int
    descent: Descent
    seed: int
    subspace: Float[Tensor, "k d"] | None
    labels: tuple[Int[Tensor, "n"], Int[Tensor, "n"]] | None
    """Classes of the base and the source prompts."""
    nulls: Sequence[Null] | None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"a rank of at least 1 is required, got {self.rank}")
        if self.method == "class means" and self.labels is None:
            raise ValueError("class means require classes: `labels` of base and source, or wrong answers")
        if self.subspace is not None and not (
            bool(self.subspace.isfinite().all()) and bool(self.subspace.any())
        ):
            raise ValueError("subspace must be directions of finite numbers, not all 0")
        for null in self.nulls or ():
            if null not in self._nulls:
                raise KeyError(
                    f"{self._name!r} has the nulls {', '.join(self._nulls)}, not {null!r}; {nearest(null, self._nulls)}"
                )

    def answered(self, runs: AlignedRuns, held_out: float | Sequence[bool], checks: Checks) -> xr.Dataset:
        """The result of `align`; checks: conditions that are fetched together with the scores."""
        train, test = _split(held_out, len(runs.pairs.own), self.seed, trained=self.subspace is None)
        nulls = [null for null in self._nulls if self.nulls is None or null in self.nulls]
        directions, permuted = self.directions(runs, train, permuted="permuted variable" in nulls)
        swapped: dict[str, CellDirections | None] = {"found": directions, "whole state": None}
        if "random subspace" in nulls:
            swapped["random subspace"] = self.random(runs, directions.shape[-2])
        if permuted is not None:
            swapped["permuted variable"] = permuted
        scores = [runs.scores(test, swapped)]
        if "re-initialised model" in nulls:
            reinitialised = runs.of(shuffled(runs.model, self.seed), runs.cells, runs.pairs, runs.batch_size)
            scores.append(
                reinitialised.scores(test, {"re-initialised model": self.directions(reinitialised, train)[0]})
            )
        about: dict[str, str | int | float] = {
            "method": self._name,
            "seed": self.seed,
            "pairs_trained_on": len(train),
        }
        if self._name == "das":
            about |= asdict(self.descent)
        on_host = {
            ("directions", 0): directions,
            **{("finite", i): finite for i, finite in checks.flags.items()},
        }
        for i, table in enumerate(scores):
            on_host |= {("values", i): table.values, ("without", i): table.without}
        on_host = to_host(on_host)
        checks.settle({i: on_host["finite", i] for i in checks.flags})
        scores = [
            replace(table, values=on_host["values", i], without=on_host["without", i])
            for i, table in enumerate(scores)
        ]
        return _result(runs, scores, on_host["directions", 0], test, about)

    @property
    def _name(self) -> str:
        return self.method if self.subspace is None else "given"

    @property
    def _nulls(self) -> tuple[Null, ...]:
        return NULLS[self._name]

    def directions(
        self, runs: AlignedRuns, train: Int[Tensor, "n"], *, permuted: bool = False
    ) -> tuple[CellDirections, CellDirections | None]:
        """Directions of every cell, and, if `permuted`, those for answers permuted over the training pairs."""
        orders = [torch.arange(len(train))]
        if permuted:
            orders.append(torch.randperm(len(train), generator=torch.Generator().manual_seed(self.seed)))
        bar = tqdm(runs.cells.names, desc=f"align: {self._name}", delay=1, leave=False)
        differing = runs.differing_cells(train) if self._name == "das" else {}
        layers = [
            self._of_layer(runs, i, name, train, orders, differing.get(name, ()))
            for i, name in enumerate(bar)
        ]
        bases = torch.stack(layers, 1)
        return bases[0], bases[1] if permuted else None

    def random(self, runs: AlignedRuns, rank: int) -> CellDirections:
        """Random directions in every cell, as many as were found."""
        drawn = [self._random_matrices(runs, layer, rank, _RANDOM) for layer in range(len(runs.cells.names))]
        return _rows(torch.stack(drawn))

    def _of_layer(
        self,
        runs: AlignedRuns,
        layer: int,
        name: str,
        train: Int[Tensor, "n"],
        orders: Sequence[Int[Tensor, "n"]],
        differing: Sequence[int],
    ) -> Float[Tensor, "order cell k d"]:
        """Directions of every cell of a layer, for the training pairs with their answers in each of these orders."""
        width, places = runs.source[name].shape[-1], runs.cells.places
        if self.subspace is not None:
            basis = orthonormal(self.subspace)
            if basis.shape[-1] != width:
                raise ValueError(f"directions of width {width} are required at {name}, got {basis.shape[-1]}")
            return basis.to(runs.model.device).expand(len(orders), len(places), -1, -1)
        if self.rank > width:
            raise ValueError(f"a rank of at most {width} is required at {name}, got {self.rank}")
        if self.method == "das":
            return self._learned_directions(runs, layer, train, orders, differing)
        return torch.stack(
            [
                torch.stack([self._without_gradient(runs, name, place, train, order) for place in places])
                for order in orders
            ]
        )

    def _without_gradient(
        self,
        runs: AlignedRuns,
        name: str,
        place: tuple[int, ...],
        train: Int[Tensor, "n"],
        order: Int[Tensor, "n"],
    ) -> Float[Tensor, "k d"]:
        """The directions of one cell that are found without a gradient."""
        states = [run_states[0].double() for run_states in runs.states(name, [place], train)]
        if self.method == "pca":
            return principal(torch.cat(states).flatten(0, -2), self.rank)
        assert self.labels is not None
        base, source = (labels[train][order] for labels in self.labels)
        labels = torch.cat((base, source)).to(states[0].device)
        x = torch.cat(states)
        state_labels = labels.reshape(-1, *[1] * (x.ndim - 2)).expand(x.shape[:-1])
        return principal(class_means(x.flatten(0, -2), state_labels.flatten()), self.rank)

    def _learned_directions(
        self,
        runs: AlignedRuns,
        layer: int,
        train: Int[Tensor, "n"],
        orders: Sequence[Int[Tensor, "n"]],
        differing: Sequence[int],
    ) -> Float[Tensor, "order cell k d"]:
        """Directions of every cell of a layer by gradient descent, as many cells and orders at once as fit a pass."""
        name, places, device = runs.cells.names[layer], runs.cells.places, runs.model.device
        answers = runs.pairs.own.host().answer
        assert answers is not None
        answers_of_order = torch.stack([answers[train][order] for order in orders])
        start = self._random_matrices(runs, layer, self.rank, _FOUND)
        work = [(cell, order) for cell in differing for order in range(len(orders))]
        bases = (
            _rows(start).expand(len(orders), -1, -1, -1).clone()
        )  # cells that do not differ keep their random start
        while work:
            size = runs.at_once(
                name, places[work[0][0]], min(self.descent.pairs, runs.batch_size, len(train))
            )
            cell, order = (list(indices) for indices in zip(*work[:size], strict=True))
            begin, labels = start[to_device(cell, device)], answers_of_order[order]
            learned = self._descent(runs, name, [places[i] for i in cell], begin, train, labels)
            bases[to_device(order, device), to_device(cell, device)] = learned
            work = work[size:]
        return bases

    def _descent(
        self,
        runs: AlignedRuns,
        name: str,
        places: Sequence[tuple[int, ...]],
        start: Float[Tensor, "g d k"],
        train: Int[Tensor, "n"],
        answers: Int[Tensor, "g n"],
    ) -> Float[Tensor, "g k d"]:
        """Directions R of each place after gradient descent: Adam on W with R = QR(W), from `start`."""
        weight = start.clone().requires_grad_()
        optimise = torch.optim.Adam([weight], lr=self.descent.rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimise, lambda step: 1 - step / self.descent.steps)
        for rows in _orders(len(train), self.descent.pairs, self.descent.steps, self.seed):
            grad = torch.zeros_like(weight)
            for chunk in rows.split(runs.batch_size):
                with torch.enable_grad():
                    loss = runs.loss(name, places, _rows(weight), answers[:, chunk], train[chunk])
                    batch_loss = loss.sum() / len(rows)
                grad += torch.autograd.grad(batch_loss, weight)[0]
            weight.grad = grad
            optimise.step()
            schedule.step()
        message = f"finite directions are required, those at {name} became NaN or infinite"
        check(weight.isfinite().all(), partial(NotFiniteError, message))
        return _rows(weight.detach())

    def _random_matrices(
        self, runs: AlignedRuns, layer: int, rank: int, purpose: int
    ) -> Float[Tensor, "cell d k"]:
        """A random matrix [d, k] for each cell of a layer, from a seed of the cell alone, not of the other cells."""
        width, model = runs.source[runs.cells.names[layer]].shape[-1], runs.model
        matrices = [
            np.random.default_rng([self.seed, purpose, runs.cells.layers[layer], *place]).standard_normal(
                (width, rank)
            )
            for place in runs.cells.places
        ]
        dtype = torch.promote_types(model.dtype, torch.float32)
        return to_device(torch.from_numpy(np.stack(matrices)).to(dtype), model.device)


def principal(x: Float[Tensor, "n d"], rank: int) -> Float[Tensor, "k d"]:
    """The first directions of the rows' differences from their mean, orthonormal. ValueError for fewer rows."""
    if len(x) <= rank:
        raise ValueError(
            f"more than {rank} states or classes are required for {rank} directions, got {len(x)}"
        )
    return torch.linalg.svd(x - x.mean(0), full_matrices=False).Vh[:rank]


def class_means(x: Float[Tensor, "n d"], labels: Int[Tensor, "n"]) -> Float[Tensor, "c d"]:
    """The mean of the rows of each class, by label."""
    classes, which = labels.unique(return_inverse=True)
    total = x.new_zeros(len(classes), x.shape[1]).index_add(0, which, x)
    return total / which.bincount()[:, None]


def metrics_of(batch: Batch) -> dict[str, Metric]:
    """The metrics of the scores, by name."""
    margin = logit_difference()
    accuracy = Metric("interchange intervention accuracy", "share of pairs", _is_answer)
    name = "logit" if batch.wrong is None else "logit difference"
    return {"iia": accuracy, name: margin, "loss": answer_loss()}


def _is_answer(outcome: Outcome) -> Float[Tensor, "r"]:
    """1 where the most likely token is the answer."""
    assert outcome.batch.answer is not None
    top = outcome.logits()[:, -1].argmax(-1)
    return upcast(outcome.stream.new_zeros(len(top))) + (top == outcome.batch.answer.to(top.device))


@torch.no_grad()
def shuffled(model: Transformer, seed: int = 0) -> Transformer:
    """The model with the numbers of every parameter in random order: as large as before, with nothing learned."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for name, parameter in model.named_parameters():
        order = to_device(torch.randperm(parameter.numel(), generator=generator), parameter.device)
        parameters[name] = parameter.flatten()[order].reshape(parameter.shape)
    return model.with_parameters(parameters)


def _rows(weight: Float[Tensor, "*g d k"]) -> Float[Tensor, "*g k d"]:
    """Orthonormal rows that span the columns."""
    return torch.linalg.qr(weight).Q.mT


def _first_block(model: Transformer, name: str) -> int:
    """Index of the first block that a pass with an exchange at this site has to run."""
    return layer_of(name, model.config) if model.restarts else 0


def _site_values(model: Transformer, batch: Batch, names: Sequence[str], size: int) -> dict[str, Tensor]:
    """Activations of every row at these sites, by site; `size`: rows of a pass."""
    reads, stop = [Read(name) for name in dict.fromkeys(names)], deepest(names, model.config)
    traces = [observe(model, rows, reads, stop=stop, answers_only=True).trace for rows in batch.split(size)]
    return {read.site: torch.cat([trace[read] for trace in traces]) for read in reads}


def pairs_of(
    subject: Subject,
    base: Prompts,
    source: Prompts,
    answers: AnswerTokens | None,
    *,
    prepend_bos: bool | None = None,
) -> Contrast:
    """The base and source prompts as pairs with answers. ValueError for prompts that do not align or lack answers."""
    text, sides = subject.text, {}
    for name, prompts in (("source", source), ("base", base)):
        try:
            sides[name] = text.batch(prompts, prepend_bos=prepend_bos)
        except ValueError as cause:
            raise ValueError(f"{name} prompts cannot be used: {cause}") from cause
    try:
        batch = paired(text, sides["source"], sides["base"])
    except ValueError as cause:
        raise ValueError(
            f"source prompts (clean) and base prompts (corrupted) make no pairs: {cause}"
        ) from cause
    assert isinstance(batch, Batch)
    if not subject.transformer.config.unembed:
        raise ValueError("answers require an unembedding; this model ends in its residual stream")
    batch.require_one_text("interchange")
    if answers is not None:
        batch = answers.on(replace(batch, row=None).numbered())
    if batch.answer is None:
        raise ValueError("an answer for every pair is required, got none")
    return Contrast.of(batch.right_aligned().to(subject.transformer.device), "denoise")


def _columns(pos: Sequence[int] | None, batch: Batch) -> list[int]:
    """The batch columns of the positions `pos`, which must be the same in every row. PositionError otherwise."""
    positions = tuple(range(batch.tokens.shape[1])) if pos is None else tuple(pos)
    columns = batch.tokens_at(positions).columns if positions else torch.zeros(1, 0, dtype=torch.long)
    shared: list[int] = columns[0].tolist()
    if not shared or bool((columns != columns[:1]).any()) or len(set(shared)) < len(shared):
        raise PositionError(
            "pos must be different tokens that every pair has, counted from the side where all are as far, got "
            f"{list(positions)} of {sorted(set(batch.lengths.tolist()))} tokens"
        )
    return shared


def _labels(
    labels: tuple[Sequence[int], Sequence[int]] | None, batch: Batch
) -> tuple[Int[Tensor, "n"], Int[Tensor, "n"]] | None:
    """The classes of base and source prompts: those given, else their answers; None where the base's are unknown."""
    if labels is None:
        wrong, answer = batch.host().wrong, batch.host().answer
        return None if wrong is None or answer is None else (wrong, answer)
    base, source = (torch.tensor(list(classes)) for classes in labels)
    if len(base) != len(batch) or len(source) != len(batch):
        raise ValueError(
            f"one label per prompt is required, got {len(base)} and {len(source)} for {len(batch)} pairs"
        )
    return base, source


def _split(
    held_out: float | Sequence[bool], count: int, seed: int, *, trained: bool
) -> tuple[Int[Tensor, "n"], Int[Tensor, "m"]]:
    """Indices of the pairs to train on and of the held-out pairs to score. ValueError if one of the two is empty."""
    if isinstance(held_out, Sequence):
        if len(held_out) != count:
            raise ValueError(
                f"held_out must say of each of {count} pairs whether it is one, got {len(held_out)}"
            )
        test = torch.tensor([bool(is_held_out) for is_held_out in held_out])
    elif not 0 < held_out <= 1:
        raise ValueError(f"a share of held-out pairs above 0 is required, at most 1, got {held_out}")
    else:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        test = torch.zeros(count, dtype=torch.bool)
        test[order[: round(held_out * count) if trained else count]] = True
    if not bool(test.any()) or (trained and bool(test.all())):
        raise ValueError(
            f"held_out must leave pairs to train on and pairs to score, got {int((~test).sum())} and {int(test.sum())}"
        )
    return (~test).nonzero()[:, 0], test.nonzero()[:, 0]


def _orders(count: int, size: int, steps: int, seed: int) -> Iterator[Int[Tensor, "b"]]:
    """Indices of the training pairs of every step: each epoch goes through all pairs in a new random order."""
    generator = torch.Generator().manual_seed(seed)
    orders = (torch.randperm(count, generator=generator) for _ in repeat(None))
    return islice((rows for order in orders for rows in order.split(size)), steps)


def _result(
    runs: AlignedRuns,
    tables: Sequence[Scores],
    bases: CellDirections,
    test: Int[Tensor, "n"],
    about: Mapping[str, str | int | float],
) -> xr.Dataset:
    """The Dataset of `align`: all scores with labels, intervals and nulls, and the directions of every cell."""
    cells, metrics = runs.cells, metrics_of(runs.pairs.own)
    inner = [len(labels) for labels in cells.labels.values()]
    dims, names = ("swapped", "layer", *cells.dims), [name for scores in tables for name in scores.swapped]
    values = torch.cat([scores.values for scores in tables], 1)
    without = torch.stack([scores.without.mean(0) for scores in tables for _ in scores.swapped])
    table, chance = (
        _by_cell(x, inner) for x in (values, without[:, None, None].expand(values.shape[1:])[None])
    )
    directions = bases.unflatten(1, inner) if inner else bases[:, 0]
    return scored(
        "align",
        estimates(table, chance[0], metrics),
        dims,
        coords={
            "swapped": names, "layer": cells.layers, **cells.labels, "site": (("layer",), list(cells.caller_names)),
            "prompt": test.tolist(), **({} if cells.together is None else {"column": list(cells.together)}),
        },
        attrs={**about, "site": cells.site, "rank": bases.shape[-2], "interval": over("held-out pairs")},
        others={
            "each": (("prompt", *dims, "score"), table),
            "directions": (("layer", *cells.dims, "direction", "d_model"), directions),
        },
        units={"directions": "1"},
    )  # fmt: skip


def estimates(
    values: Float[Tensor, "n *cells score"],
    chance: Float[Tensor, "*cells score"],
    metrics: Mapping[str, Metric],
) -> dict[str, Score]:
    """The mean of every score over pairs, with its interval."""
    return {
        name: Score.of(
            Moments.of(values[..., i].double()), metric.unit, chance[..., i], share=name == "iia", fewest=metric.fewest
        )
        for i, (name, metric) in enumerate(metrics.items())
    }  # fmt: skip


def _by_cell(values: Float[Tensor, "n swapped layer cell score"], inner: Sequence[int]) -> Tensor:
    """The values with their axis `cell` split into the dims `inner` that tell the cells of a layer apart."""
    return values.unflatten(3, inner) if inner else values[:, :, :, 0]
