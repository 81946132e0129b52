"""Does a demo model keep a country's capital, continent, currency and language in different directions?

Run: `interp run experiments/variables.py -p model=demo-4l`

RAVEL's two scores (Huang et al. 2024, arXiv 2402.17700) of directions for one attribute: cause, the share of prompts
asking that attribute whose answer becomes the source country's; isolate, the share of prompts asking another attribute
whose answer stays the base country's; their mean is the score. An exchange of nothing has cause 0 and isolate 1, one of
everything 1 and 0: both score 0.5. Directions are learned on pairs of some countries and scored on pairs of others, at
the country's tokens (together) or at the prompt's last token, by the cause alone ("das") or, at the country's tokens,
by both ("das for both": pairs that ask another attribute, whose answer should stay, are among the training pairs).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import xarray as xr
from matplotlib.figure import Figure

import interp
from interp.causal import Descent, Subspace, align
from interp.core.stats import wilson
from interp.opening import OfModel
from interp.runs.record import Record
from interp.tasks import TRAINED_PHRASINGS, load_facts

BEFORE = "The {attribute} of"
"""What every prompt begins with."""
NULLS = ("random subspace", "permuted variable")


@dataclass(frozen=True)
class VariablesRun(OfModel):
    """Whose directions, of how many dimensions."""

    only: tuple[str, ...] = ()
    """Attributes; empty = the four relations of the package's facts."""
    tokens: int = 4
    """Countries of so many tokens."""
    rank: tuple[int, ...] = ()
    """Dimensions of the directions; empty = 1, 8 and 32."""
    steps: int = 100
    """Of gradient descent."""
    first: int = 1
    """How many blocks are looked into at the country's tokens: behind the first nothing is read there any more."""
    pairs: int = 150
    """Pairs of each question at most, of training and held-out countries each."""
    seed: int = 0
    """Of the draws."""

    @property
    def attributes(self) -> tuple[str, ...]:
        """What is asked about."""
        return self.only or tuple(TRAINED_PHRASINGS)

    @property
    def ranks(self) -> tuple[int, ...]:
        """In ascending order."""
        return tuple(sorted(self.rank)) or (1, 8, 32)


@dataclass(frozen=True)
class Asked:
    """Pairs of prompts that ask one attribute, and both countries' answers."""

    base: tuple[str, ...]
    source: tuple[str, ...]
    base_answer: tuple[int, ...]
    source_answer: tuple[int, ...]
    train: tuple[bool, ...]
    """Whether both countries are training countries; otherwise neither is."""

    def __len__(self) -> int:
        return len(self.base)

    def only(self, *, train: bool) -> "Asked":
        """The pairs of training countries, or of the others."""
        rows = [row for row in zip(*vars(self).values(), strict=True) if row[-1] is train]
        return Asked(*(tuple(column) for column in zip(*rows, strict=True)))


def main(job: VariablesRun, record: Record) -> None:
    """Learn, score; the table, and the figure."""
    model = job.opened()
    record.model(model)
    asked = {attribute: questions(model, attribute, job) for attribute in job.attributes}
    record.say(
        f"pairs, for training: { {name: (len(each), sum(each.train)) for name, each in asked.items()} }"
    )
    tables = [
        record.step(f"{attribute}-{place}", partial(scored, model, attribute, asked, place, job))
        for attribute in job.attributes
        for place in ("country", "end")
    ]
    table = pd.concat(tables, ignore_index=True)
    record.table("variables", table)
    record.figure("variables", figure(job, table))
    best = table.loc[table.groupby(["attribute", "place", "found", "rank"]).score.idxmax()]
    record.say(best.round(2).to_string(index=False))


def questions(model: interp.HookedTransformer, attribute: str, job: VariablesRun) -> Asked:
    """Ordered pairs of countries with different answers, half of the countries for training."""
    answers = {
        fact.subject: model.text.ids(f" {fact.object}", prepend_bos=False)[0]
        for fact in load_facts()
        if fact.relation == attribute and _columns(model, fact.subject) == job.tokens
    }
    phrasing = TRAINED_PHRASINGS[attribute][0]
    generator = np.random.default_rng(job.seed)
    every = sorted({fact.subject for fact in load_facts()})
    chosen = set(generator.permutation(every)[: len(every) // 2])
    rows = [pair for pair in permutations(sorted(answers), 2) if answers[pair[0]] != answers[pair[1]]]
    rows = [rows[i] for i in generator.permutation(len(rows))]
    kept = [
        pair
        for train in (True, False)
        for pair in [pair for pair in rows if {country in chosen for country in pair} == {train}][: job.pairs]
    ]
    return Asked(
        tuple(phrasing.format(subject=base) for base, _ in kept),
        tuple(phrasing.format(subject=source) for _, source in kept),
        tuple(answers[base] for base, _ in kept),
        tuple(answers[source] for _, source in kept),
        tuple(base in chosen for base, _ in kept),
    )


def _columns(model: interp.HookedTransformer, country: str) -> int:
    """How many tokens a country has in a prompt."""
    before = BEFORE.format(attribute="capital")
    return len(model.text.ids(f"{before} {country} is")) - len(model.text.ids(f"{before} is"))


def scored(
    model: interp.HookedTransformer, attribute: str, asked: dict[str, Asked], place: str, job: VariablesRun
) -> pd.DataFrame:
    """A row for every layer, rank and way to find directions for an attribute, at one place of the prompt.

    The last token enters the first block alike in all prompts.
    """
    own, rows = asked[attribute], []
    others = {name: each.only(train=False) for name, each in asked.items() if name != attribute}
    stay = [replace(each.only(train=True), source_answer=each.only(train=True).base_answer)
            for name, each in asked.items() if name != attribute]  # fmt: skip
    ways = {"das": own} | ({"das for both": joined([own, *stay])} if place == "country" else {})
    layers = list(range(job.first) if place == "country" else range(1, model.cfg.n_layers))
    for rank in job.ranks:
        for way, pairs in ways.items():
            nulls = NULLS if way == "das" else ()
            found = exchanged(
                model, pairs, place, job, layers=layers, rank=rank, nulls=nulls, descent=Descent(job.steps),
                held_out=[not train for train in pairs.train],
            )  # fmt: skip
            iia = found.sel(score="iia")
            for layer in layers:
                cell = {"layer": layer} | ({"pos": int(found.pos[0])} if place == "end" else {})
                here, each = Subspace.of_result(found, **cell), iia.sel(cell)
                shares = dict(zip(each.swapped.values.tolist(), each.value.values.tolist(), strict=True))
                stays = [_stays(model, other, place, job, here, layer) for other in others.values()]
                rows.append(
                    {"attribute": attribute, "place": place, "layer": layer, "rank": rank, "found": way}
                    | estimates(shares["found"], int(each.n.max()), stays)
                    | {name: shares.get(name, np.nan) for name in ("whole state", *NULLS)}
                )
    return pd.DataFrame(rows)


def joined(parts: Sequence[Asked]) -> Asked:
    """The pairs of the first, held-out ones included, with the training pairs of the others."""
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return Asked(*(tuple(value for part in column for value in part) for column in columns))


def exchanged(
    model: interp.HookedTransformer, pairs: Asked, place: str, job: VariablesRun, **how: object
) -> xr.Dataset:
    """`align` at the country's tokens together, or at the last token."""
    first = len(model.text.ids(BEFORE.format(attribute="capital")))
    length = len(model.text.ids(pairs.base[0]))
    cells = {"by": ("layer",), "pos": list(range(first, first + job.tokens))}
    if place == "end":
        cells = {"by": ("layer", "pos"), "pos": [length - 1]}
    return align(
        model, list(pairs.base), list(pairs.source), answer=list(pairs.source_answer), wrong=None,
        site="resid_pre", seed=job.seed, batch_size=64, **cells, **how,  # type: ignore[arg-type]
    )  # fmt: skip


def _stays(
    model: interp.HookedTransformer, pairs: Asked, place: str, job: VariablesRun, here: Subspace, layer: int
) -> tuple[float, int]:
    """The share of pairs that ask another attribute whose answer stays the base's, and how many there are."""
    still = replace(pairs, source_answer=pairs.base_answer)
    cell = exchanged(model, still, place, job, layers=[layer], subspace=here, nulls=[]).sel(
        score="iia", swapped="found"
    )
    return cell.value.item(), int(cell.n.item())


def estimates(cause: float, n: int, stays: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Cause, isolate and their mean, with 95 % intervals: Wilson's, and Newcombe's (1998, method 10) for the mean."""
    total = sum(count for _, count in stays)
    isolate = sum(share * count for share, count in stays) / total
    low, high = (
        each.double().numpy() for each in wilson(torch.tensor([cause, isolate]), torch.tensor([n, total]))
    )
    value = np.array([cause, isolate])
    down, up = (np.sqrt(((end - value) ** 2).sum()) / 2 for end in (low, high))
    return {
        "cause": cause, "cause_low": low[0], "cause_high": high[0], "isolate": isolate, "isolate_low": low[1],
        "isolate_high": high[1], "score": value.mean(), "low": value.mean() - down, "high": value.mean() + up,
        "pairs": n, "pairs_of_others": total,
    }  # fmt: skip


def figure(job: VariablesRun, table: pd.DataFrame) -> Figure:
    """Cause and isolate of every attribute by rank, at the layer with the best score of each place and way."""
    picture, axes = plt.subplots(
        1, len(job.attributes), figsize=(3.2 * len(job.attributes), 3.4), layout="constrained", sharey=True,
        squeeze=False,
    )  # fmt: skip
    for ax, attribute in zip(axes[0], job.attributes, strict=True):
        for colour, (name, cells) in enumerate(_lines(table[table.attribute == attribute])):
            for value, style in (("cause", "-"), ("isolate", "--")):
                ends = [cells[value] - cells[f"{value}_low"], cells[f"{value}_high"] - cells[value]]
                label = f"{name}: {value}"
                ax.errorbar(
                    cells["rank"], cells[value], ends, color=f"C{colour}", ls=style, marker=".", label=label
                )
        ax.set(title=attribute, xlabel="rank", xscale="log", ylim=(-0.02, 1.02))
        ax.set_xticks(job.ranks, [str(rank) for rank in job.ranks])
        ax.minorticks_off()
    axes[0, 0].set_ylabel("share of held-out pairs")
    picture.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=7, ncols=3, loc="outside lower center")
    picture.suptitle(f"{job.model}: directions for one attribute of a country")
    return picture


def _lines(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The layer of the best mean score of each place and way, rank by rank."""
    for (place, found), cells in table.groupby(["place", "found"]):
        layer = cells.groupby("layer").score.mean().idxmax()
        yield f"{place}, {found}", cells[cells.layer == layer].sort_values("rank")
