"""Maximum-activating examples: the texts on which a neuron, a head or a feature is largest, and its values there.

The lists are a reduction: any amount of text leaves k entries per cell with their contexts, so memory is constant and
every split of the data gives the same list. Beside them stands the distribution they are the end of: a largest value
says little without it, and the examples show where a cell peaks, not what it does the rest of the time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.contexts import ContextExamples, TopInContext, absent
from interp.core.extremes import TopRows, without_empty_ranks
from interp.core.kinds import Count
from interp.core.named import Only, Parts, Several
from interp.core.results import Score, check_result, scored
from interp.core.sketches import Histogram, quantiles
from interp.core.stats import ANYWHERE, Means, Partial, Reduction, if_at_least, ratio, upcast
from interp.data.batch import Batch
from interp.data.text import Text
from interp.features.dictionary import Dictionary
from interp.features.dictionary_metrics import counted_tokens
from interp.model.parts import Part, as_site
from interp.model.sites import find
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.observe import Subject
from interp.passes.question import ByRow, NotFiniteError, Question, Reading
from interp.runs.functions import of_data

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

CELLS = {
    "m": "neuron",
    "d": "coordinate",
    "h": "head",
    "g": "kv_head",
    "x": "expert",
    "v": "logit",
    "y": "feature",
}
"""Names of the cells of a site, by the letter of their axis."""
QUANTILES = (0.5, 0.9, 0.99, 0.999)
RELATIVE_ERROR = 0.05
FEWEST_TEXTS, FEWEST_SUMS = 256, 16
"""Texts below which a density and a mean per token get no interval (`docs/intervals.md`)."""
_BOTH = " + counted"
MARKS = ("«", "»")
"""Signs around the token of an entry in its text."""
IN_CONTEXT = ("tokens", "activation")
"""Variables that are kept along the context of every entry."""


@dataclass(frozen=True)
class TopExamples(Question):
    """Tokens at which each neuron, head or feature of a site is largest, with their contexts and its distribution.

    The value of a cell at a token depends on the site. Neurons, coordinates of the stream, logits: the number itself.
    Sites with a vector per head (`attn.hook_z`, `attn.hook_result`, ...): its norm; that of `hook_result`, ||z W_O||,
    is how much the head writes. `attn.hook_pattern`: the largest attention that the query pays, and to which `key`.
    With `dictionary`: its features of the site.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        site: the full name of a site, or a part that is a whole one, such as `L1.post`.
        cells: which neurons (heads, features), in this order; None: all. Only these leave their layer, so a few cells
            of a wide site cost little.
        top: how many tokens are listed for each cell.
        context: how many tokens before and after each one are kept.
        dictionary: a dictionary of the site, on the device of the model, whose features are the cells; None: the
            site's own cells.
        skip_bos: whether a BOS in front of a text is left out, as a query and as a key: attention and activations there
            are unlike all others. It is the first token if the batch says that it has one or if it is the tokenizer's.
        largest: whether the largest values are listed; False: the smallest.
        once_per_row: whether a row is listed at its best token only. Ties go to the smaller row, then to the smaller
            position.

    Returns:
        Dataset; the dim of cells is `neuron`, `head`, `feature`, `coordinate`, ..., here neuron; `part` names the cells
        where they are parts of the model. `examples_table` gives the tidy table of the lists,
        `interp.pages.top_examples.top_examples_page` a page.

        - `peak` [neuron, rank]: the value there.
        - `row`, `pos` [neuron, rank]: row of the data and position of the token, counted in its text with BOS as 0; -1
          where there are fewer than `top`; a `top` above 1000 is cut to what there is.
        - `text` [neuron, rank]: the context with the token between «».
        - `tokens`, `piece` [neuron, rank, offset]: ids and texts of the context; -1 beyond the ends of the text.
        - `activation` [neuron, rank, offset]: the value at each token; NaN where it does not count.
        - `value`, `low`, `high`, `n` [neuron, score]: of `density`, the share of tokens with a value above 0, of `mean`
          (95 % over texts; NaN below 256 and 16 texts), and of `max` (`min` for the smallest), which has no interval.
        - `quantiles` [neuron, q]: to 5 % of the value, those below 1e-4 in size as 0.
        - `key`, `key_token`, `key_piece` [neuron, rank], of patterns: position, id and text of the key.

    Raises:
        KeyError: an unknown site.
        ValueError: a site that has no such cells, a cell twice or (when it runs) not there, numbers that are not
            finite, and data in which no text has a token that counts.

    Caveats:
        The top of a distribution is not a summary of it (Bolukbasi et al. 2021,
        "An interpretability illusion for BERT"): look at the quantiles, and at texts in the middle, before naming a
        cell.

    Memory:
        Constant in the size of the data: what `TopRows` states, 12 bytes per token of context and entry, and 3 kB per
        cell for the quantiles.

    See Also:
        `interp.weights.neurons`: what neurons read and write, without data.

    Example:
        >>> texts = [prompt, "The cat sat on the mat and the dog sat on the cat."]
        >>> found = top_examples(model, texts, "blocks.1.mlp.hook_post", cells=[3, 17], top=2)
        >>> found.peak.dims, found.activation.sizes["offset"]
        (('neuron', 'rank'), 14)
    """

    of_layers: ClassVar[bool] = False

    site: str
    _: KW_ONLY
    cells: Sequence[int] | None = None
    top: Count = 10
    context: Sequence[int] = (10, 3)
    dictionary: Dictionary | None = None
    skip_bos: bool = True
    largest: bool = True
    once_per_row: bool = True

    def bind(self, model: Subject) -> ByRow:
        """A read of the chosen cells at the site, reduced to mergeable lists of the largest values and to sums."""
        site = as_site(self.site, model.transformer.config)
        axes = find(site, model.transformer.config)[0].axes
        dim = _cell_dim(site, axes, self.dictionary)
        cells = None if self.cells is None else tuple(int(i) for i in self.cells)
        if cells is not None and (not cells or len(set(cells)) < len(cells)):
            raise ValueError(
                f"cells that are distinct, and at least one, are required, got {list(cells)[:9]}"
            )
        if self.top < 1:
            raise ValueError(f"top must be a number of places, at least 1, got {self.top!r}")
        if len(self.context) != 2 or min(self.context) < 0:
            raise ValueError(
                f"context must be how many tokens before and how many after, got {list(self.context)}"
            )
        read = Read(
            site,
            _LargestAttention(cells) if axes == "b h q k" else _CellActivations(axes, cells, self.dictionary),
        )
        reads_keys = axes == "b h q k"
        return ByRow(
            self.name,
            Reading(
                [read], partial(_text_values, read=read, bos_id=model.text.bos_id, skip_bos=self.skip_bos)
            ),
            self._reduction(("key", "key_token") if reads_keys else ()),
            partial(
                _finish,
                name=self.name,
                site=site,
                dim=dim,
                cells=cells,
                skip_bos=self.skip_bos,
                text=model.text,
            ),
        )

    def _reduction(self, attended: tuple[str, ...]) -> Several:
        """The reductions of all rows: the top lists, the histogram of all values, the sums for density and mean."""
        before, after = self.context
        top = TopRows(self.top, "activation", 1, self.largest, self.once_per_row, before=before, after=after)
        sums = ("counted", *(f"{name}{more}" for name in ("active", "total") for more in ("", _BOTH)))
        parts: dict[str, Reduction] = {
            "examples": TopInContext(top, IN_CONTEXT, attended),
            "spread": quantiles("activation", cells=1, relative_error=RELATIVE_ERROR, low=1e-4, high=1e4),
            "sums": Only(sums, Means),
        }
        return Several(parts)


top_examples = of_data(TopExamples)


@public()
def examples_table(result: xr.Dataset) -> pd.DataFrame:
    """The lists of a `top_examples` result as a tidy table, without empty places.

    Args:
        result: what `top_examples` returned.

    Returns:
        A data frame with the columns cell (neuron, head, ...), rank, peak, row, pos, text; of patterns also key and
        key_piece.

    Example:
        >>> table = examples_table(top_examples(model, [prompt], "blocks.0.attn.hook_pattern", cells=[2], top=1))
        >>> list(table.columns)
        ['head', 'rank', 'peak', 'row', 'pos', 'key', 'key_piece', 'text']
    """
    check_result("result", result, ("rank", "peak", "row", "pos", "text"), "top_examples")
    names = ["peak", "row", "pos", *(n for n in ("key", "key_piece") if n in result), "text"]
    table = result[names].to_dataframe().reset_index()
    columns = [next(str(dim) for dim in result.peak.dims if dim != "rank"), "rank", *names]
    return table[table.row >= 0][columns].reset_index(drop=True)


# --- what a cell's value is ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CellActivations:
    """A function from a site's activation to the values of the chosen cells, `[b p c]`."""

    axes: str
    cells: tuple[int, ...] | None
    dictionary: Dictionary | None

    def __call__(self, value: Float[Tensor, "b p ..."]) -> Float[Tensor, "b p c"]:
        if self.dictionary is not None:
            values = self.dictionary.features(value)
            if values.ndim != 3:
                raise ValueError(
                    "a dictionary of the whole site is required, got one that reads head by head"
                )
        else:
            values = upcast(value).norm(dim=-1) if len(self.axes.split()) == 4 else value
        return _chosen_cells(values, self.cells)


@dataclass(frozen=True)
class _LargestAttention:
    """A function from a pattern to the 2 largest weights of every query and their keys, `[2 b q c 2]`.

    Two are taken because one of the keys may be a BOS that does not count.
    """

    cells: tuple[int, ...] | None

    def __call__(self, pattern_bhqk: Float[Tensor, "b h q k"]) -> Float[Tensor, "2 b q c n"]:
        # [b h q k] -> [b q k h] -> [b q c k]
        pattern = _chosen_cells(pattern_bhqk.movedim(1, -1), self.cells).movedim(-1, 2)
        weight, key = pattern.to(torch.promote_types(pattern.dtype, torch.float32)).topk(
            min(2, pattern.shape[-1])
        )
        return torch.stack((weight, key.to(weight)))


def _chosen_cells(value: Float[Tensor, "*n c"], cells: tuple[int, ...] | None) -> Float[Tensor, "*n s"]:
    """The values of the chosen cells; raises ValueError for a cell that the site does not have."""
    count = value.shape[-1]
    if cells is None:
        return value
    if bad := [i for i in cells if not 0 <= i < count]:
        raise ValueError(f"cells are 0 to {count - 1} at this site, got {bad[0]}")
    return value[..., torch.tensor(cells, device=value.device)]


def _cell_dim(site: str, axes: str, dictionary: Dictionary | None) -> str:
    """The result's dim of a site's cells, such as "neuron"; raises ValueError for a site without cells."""
    if dictionary is not None:
        return "feature"
    if re.fullmatch(r"b h q k", axes) and site.endswith("hook_pattern"):
        return "head"
    match = re.fullmatch(r"b p ([mdhgxvy])( [ed])?", axes)
    if match is None:
        raise ValueError(
            f"a site with neurons, coordinates, heads or experts at every token is required, {site!r} has axes [{axes}]"
        )
    return CELLS[match[1]]


def _text_values(
    trace: Trace, batch: Batch, model: Transformer, read: Read, bos_id: int | None, skip_bos: bool
) -> Mapping[str, Tensor]:
    """By text: the activation of every token that counts `[t p c]`, token ids `[t p]`, and the sums for the scores."""
    counted, value = counted_tokens(batch, bos_id, skip_bos), trace[read]
    more: dict[str, Tensor] = {}
    if isinstance(read.via, _LargestAttention):
        value, more = _attention_and_keys(value, batch, counted)
    if not bool((value.isfinite().all(-1) | ~batch.real).all()):
        raise NotFiniteError(f"finite values are required, some at {read.site} are NaN or infinite")
    by_row = {"activation": value.masked_fill(~counted[..., None], torch.nan), "tokens": batch.tokens, **more}
    by_text = {name: batch.by_text(x, batch.real, absent(x)) for name, x in by_row.items()}
    activation = by_text["activation"]
    active, total = (activation > 0).sum(1).double(), activation.nansum(1, dtype=torch.float64)
    n = (~activation[..., 0].isnan()).sum(1).double()
    sums = {
        "active": active,
        f"active{_BOTH}": active + n[:, None],
        "total": total,
        f"total{_BOTH}": total + n[:, None],
    }
    return by_text | sums | {"counted": n}


def _attention_and_keys(
    answer: Float[Tensor, "2 b q c n"], batch: Batch, counted: Bool[Tensor, "b p"]
) -> tuple[Float[Tensor, "b q c"], dict[str, Int[Tensor, "b q c"]]]:
    """The largest attention of each query to a key that counts (0 without one), and that key's position and token."""
    weight, column = answer[0], answer[1].long()
    row = torch.arange(len(batch), device=column.device)[:, None, None, None]
    best, which = weight.masked_fill(~counted[row, column], -1.0).max(-1)
    column = column.gather(-1, which[..., None])[..., 0]
    no_key = best <= 0
    keys = {"key": batch.places[row[..., 0], column], "key_token": batch.tokens[row[..., 0], column]}
    return best.clamp_min(0.0), {name: x.masked_fill(no_key, -1) for name, x in keys.items()}


def _finish(
    merged: Partial, name: str, site: str, dim: str, cells: tuple[int, ...] | None, skip_bos: bool, text: Text
) -> xr.Dataset:
    """The Dataset of the top lists, the quantiles and the scores of every cell."""
    assert isinstance(merged, Parts)
    examples, spread, sums = (merged.parts[part] for part in ("examples", "spread", "sums"))
    assert isinstance(examples, ContextExamples) and isinstance(spread, Histogram) and isinstance(sums, Means)
    top, counted = examples.top, sums.moments["counted"]
    if not bool(counted.mean > 0):
        raise ValueError(f"texts with a token that counts are required, got {counted.n} of BOS alone")
    rule, entry, best = top.rule, (dim, "rank"), top.values[:, :1]
    # the histogram's quantiles are rounded, the extreme is exact: none may lie beyond it
    bound = torch.minimum if rule.largest else torch.maximum
    values: dict[str, tuple[Sequence[str], Tensor]] = {
        "peak": (entry, top.values), "row": (entry, top.rows), "pos": (entry, top.positions),
        "quantiles": ((dim, "q"), bound(torch.stack([spread.quantile(q) for q in QUANTILES], 1), best)),
        **{
            part: ((*entry, "offset"), x) if part in IN_CONTEXT else (entry, x[..., 0])
            for part, x in examples.along.items()
        },
    }  # fmt: skip
    chosen = range(len(top.rows)) if cells is None else cells
    parts = _part_names(site, dim, chosen)
    scores = {
        "density": per_token(sums, "active", "share of tokens"),
        "mean": per_token(sums, "total", "units of the site"),
        "max" if rule.largest else "min": Score.exact(best[:, 0], "units of the site"),
    }
    result = scored(
        name,
        scores,
        (dim,),
        coords={
            dim: chosen, "rank": range(top.rows.shape[-1]), "offset": range(-rule.before, rule.after + 1),
            "q": QUANTILES,
            **({} if parts is None else {"part": ((dim,), parts)}),
        },
        others=values,
        units=dict.fromkeys(("peak", "activation", "quantiles"), "units of the site"),
        attrs={
            "site": site, "tokens_counted": round(float(counted.mean) * counted.n), "texts": counted.n,
            "pos": "tokens before it in its text", "bos": "does not count" if skip_bos else "counts",
            "order": f"the {'largest' if rule.largest else 'smallest'} first; ties by row, then pos",
            "density": "share of tokens with a value above 0", "quantiles": f"to {RELATIVE_ERROR:.0%} of the value",
            "interval": f"95 % over texts; of the density {if_at_least(FEWEST_TEXTS)}, of the mean {FEWEST_SUMS}",
            "null": "none: the largest of many values is large by chance; compare with the quantiles",
        },
        notes=top.notes(),
    )  # fmt: skip
    return _with_texts(without_empty_ranks(result, rule), text)


def _part_names(site: str, dim: str, cells: Sequence[int]) -> list[str] | None:
    """The cells' names as parts of the model, such as "L1N3"; None for cells that are no parts."""
    kinds = {
        ("neuron", "mlp"): "neuron", ("neuron", "mlp_before"): "neuron_before", ("head", "attn"): "head",
        ("head", "cross_attn"): "cross_head", ("expert", "mlp"): "expert",
    }  # fmt: skip
    at = site.split(".")
    kind = kinds.get((dim, at[2])) if len(at) == 4 else None
    return None if kind is None else [str(Part(kind, int(at[1]), i)) for i in cells]


def _with_texts(result: xr.Dataset, text: Text) -> xr.Dataset:
    """The result with the text of every token, and contexts with their token marked; shared characters show as �."""
    worded = text.worded(
        result, piece="tokens", **({"key_piece": "key_token"} if "key_token" in result else {})
    )
    marked, is_top, (open_, close) = worded.piece.to_numpy().copy(), result.offset.to_numpy() == 0, MARKS
    marked[..., is_top] = open_ + marked[..., is_top] + close
    texts = marked.sum(-1)
    texts[result.row.to_numpy() < 0] = ""
    return worded.assign(text=(result.row.dims, texts))


def per_token(sums: Means, part: str, unit: str) -> Score:
    """A sum over texts per token that counts, with its 95 % interval over texts (linearised, Student's t).

    Shares of rare events hold their mean from `FEWEST_TEXTS` texts on, sums from `FEWEST_SUMS`; NaN below.

    Args:
        sums: of every text.
        part: which sum: "active" or "total".
        unit: of the result.

    Returns:
        A `Score` over cells, without a null.
    """
    top, number, joint = (sums.moments[name] for name in (part, "counted", f"{part}{_BOTH}"))
    fewest, within = (FEWEST_TEXTS, (0.0, 1.0)) if part == "active" else (FEWEST_SUMS, ANYWHERE)
    value, low, high = ratio(top, number, joint, fewest, within=within)
    return Score(value, low, high, top.count(), torch.full_like(value, torch.nan), unit)
