"""Maximum-activating examples: the texts on which a neuron, a head or a feature is largest, and how it runs there.

The lists are a reduction: any amount of text leaves k entries per cell with their contexts, so memory is constant and
every split of the data gives the same list. Beside them stands the distribution they are the end of: a largest value
says little without it, and the examples show where a cell peaks, not what it does the rest of the time.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from interp.core.contexts import Examples, InContext, absent
from interp.core.extremes import TopRows
from interp.core.named import Only, Parts, Several
from interp.core.results import labelled
from interp.core.sketches import Histogram, quantiles
from interp.core.stats import Z95, Means, Partial, Reduction
from interp.data.batch import Batch
from interp.data.sources import Data
from interp.data.text import Text
from interp.data.windows import Feed
from interp.features.sae import SAE
from interp.features.sae_metrics import counted_tokens
from interp.model.config import ModelConfig
from interp.model.mask import Layout
from interp.model.sites import find
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.analysis import Analysis, NotFiniteError
from interp.passes.observe import Subject
from interp.runs.run import run

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

CELLS = {"m": "neuron", "d": "coordinate", "h": "head", "g": "kv_head", "x": "expert", "v": "logit"}
"""What the cells of a site are called, by the letter of their axis."""
QUANTILES = (0.5, 0.9, 0.99, 0.999)
RELATIVE_ERROR = 0.05
ROUNDING = 1e-12
"""A difference of sums that is smaller than this share of them is rounding."""
_BOTH = " + counted"
MARKS = ("«", "»")
"""What stands around the token of an entry in its text."""


def top_examples(
    model: Subject,
    data: Feed | Data,
    site: str,
    *,
    cells: Sequence[int] | None = None,
    k: int = 10,
    context: tuple[int, int] = (10, 3),
    sae: SAE | None = None,
    skip_bos: bool = True,
    largest: bool = True,
    once_per_row: bool = True,
) -> "xr.Dataset":
    """The k places where each cell of a site is largest, with their contexts, and the distribution they end.

    data: what `interp.run` takes; positions count the tokens of a text, BOS as 0. All else: `top_activations`.
    Returns Dataset[neuron, rank] (or head, feature, coordinate, ...): `value`; `row` of the data and `pos` of the token
    (-1 where there are fewer than k); `text`, the context with the token between «». [neuron, rank, offset]: `tokens`
    (-1 beyond the ends of the text), `piece`, and the `activation` at each (NaN where it does not count). [neuron]:
    `density`, the share of tokens with a value above 0, and `mean`, each with `_low` and `_high` (95 % over texts; NaN
    for a single one); `max` (`min` for the smallest). [neuron, q]: `quantiles`, to 5 % of the value, those below 1e-4
    in size as 0. For patterns also `key`, `key_token`, `key_piece`.
    `examples_table` gives the tidy table, `interp.pages.top_examples.top_examples_page` a page; attrs["rejected"] says
    how many rows were set aside.
    Caveats: the top of a distribution is not a summary of it (Bolukbasi et al. 2021, "An interpretability illusion for
    BERT"): look at the quantiles, and at texts in the middle, before naming a cell.
    Errors: those of `top_activations` and `interp.run`; ValueError if no text has a token that counts.

    Example:
        >>> texts = [prompt, "The cat sat on the mat and the dog sat on the cat."]
        >>> found = top_examples(model, texts, "blocks.1.mlp.hook_post", cells=[3, 17], k=2)
        >>> found.value.dims, found.activation.sizes["offset"]
        (('neuron', 'rank'), 14)
    """
    analysis = top_activations(
        model.transformer.config, site, cells=cells, k=k, context=context, sae=sae, bos_id=model.text.bos_id,
        skip_bos=skip_bos, largest=largest, once_per_row=once_per_row,
    )  # fmt: skip
    found = run([analysis], model, data)
    counts = {"rows": found.rows, "rejected": len(found.rejected)}
    return with_text(found[analysis.name].assign_attrs(counts), model.text)


def top_activations(
    config: ModelConfig,
    site: str,
    *,
    cells: Sequence[int] | None = None,
    k: int = 10,
    context: tuple[int, int] = (10, 3),
    sae: SAE | None = None,
    bos_id: int | None = None,
    skip_bos: bool = True,
    largest: bool = True,
    once_per_row: bool = True,
    name: str | None = None,
) -> Analysis:
    """The analysis of `top_examples`, for `interp.run`; `with_text` adds the words to its result.

    What the value of a cell at a token is depends on the site. Neurons, coordinates of the stream, logits: the number
    itself. Sites with a vector per head (`attn.hook_z`, `attn.hook_result`, ...): its norm; that of `hook_result`,
    ||z W_O||, is how much the head writes. `attn.hook_pattern`: the largest attention that the query pays, and to which
    `key`. With `sae`: its features of the site.
    cells: which neurons (heads, features), in this order; None = all. Only these leave their layer, so a few cells of a
    wide site cost little. context: how many tokens before and after. once_per_row: a row is listed at its best token
    only. largest=False lists the smallest. Ties go to the smaller row, then to the smaller position.
    skip_bos: a BOS in front of a text, the first token if the batch says that it has one or if it is `bos_id`, does not
    count, as a query or as a key: attention and activations there are unlike all others. Its activation is NaN.
    name: of the result; by default "top_" and the site. An autoencoder must be on the device of the model.
    Memory: what `TopRows` states, 12 bytes per token of context and entry, and 3 kB per cell for the quantiles.
    Errors: KeyError for an unknown site; ValueError for one that has no such cells, a cell twice or (when it runs) not
    there, and numbers that are not finite.

    Example:
        >>> asked = partial(top_activations, site="blocks.0.attn.hook_result", k=1)
        >>> sorted(interp.run([asked], model, [prompt])["top_blocks.0.attn.hook_result"].value.sizes.items())
        [('head', 8), ('rank', 1)]
    """
    axes = find(site, config)[0].axes
    dim = _dim(site, axes, sae)
    chosen = None if cells is None else tuple(int(i) for i in cells)
    if chosen is not None and (not chosen or len(set(chosen)) < len(chosen)):
        raise ValueError(f"cells that are distinct, and at least one, are required, got {list(chosen)[:9]}")
    read = Read(site, _Attention(chosen) if axes == "b h q k" else _Activation(axes, chosen, sae))
    top = TopRows(k, "activation", 1, largest, once_per_row, before=context[0], after=context[1])
    attended = ("key", "key_token") if axes == "b h q k" else ()
    reductions: dict[str, Reduction] = {
        "examples": InContext(top, ("tokens", "activation"), attended),
        "spread": quantiles("activation", cells=1, relative_error=RELATIVE_ERROR, low=1e-4, high=1e4),
        "sums": Only(
            ("counted", *(f"{name}{more}" for name in ("active", "total") for more in ("", _BOTH))), Means
        ),
    }
    return Analysis(
        name=name or f"top_{site}",
        reads=(read,),
        compute=partial(_values, read=read, bos_id=bos_id, skip_bos=skip_bos),
        reduction=Several(reductions),
        finish=partial(_finish, site=site, dim=dim, cells=chosen, skip_bos=skip_bos),
    )


def with_text(result: "xr.Dataset", text: Text) -> "xr.Dataset":
    """A result of `top_activations` with its words: `piece`, the text of every token, and `text`, the whole context.

    In `text` the token stands between «»; a character that several tokens share shows as �.

    Example:
        >>> made = top_activations(model.cfg, "blocks.1.mlp.hook_post", cells=[3], k=1, name="n")
        >>> "«" in with_text(interp.run([made], model, [prompt])["n"], model.text).text.item()
        True
    """
    dims = result.tokens.dims
    found = {"piece": (dims, text.words(result.tokens.to_numpy()))}
    offset, (open_, close) = result.offset.to_numpy(), MARKS
    marked = found["piece"][1].copy()
    marked[..., offset == 0] = open_ + marked[..., offset == 0] + close
    texts = marked.sum(-1)
    texts[result.row.to_numpy() < 0] = ""
    found["text"] = (dims[:-1], texts)
    if "key_token" in result:
        found["key_piece"] = (dims[:-1], text.words(result.key_token.to_numpy()))
    return result.assign({name: (dims, value.astype(str)) for name, (dims, value) in found.items()})


def examples_table(result: "xr.Dataset") -> "pd.DataFrame":
    """The lists of a result with words as a table: cell, rank, value, row, pos, text; without empty places.

    Example:
        >>> table = examples_table(top_examples(model, [prompt], "blocks.0.attn.hook_pattern", cells=[2], k=1))
        >>> list(table.columns)
        ['head', 'rank', 'value', 'row', 'pos', 'key', 'key_piece', 'text']
    """
    names = ["value", "row", "pos", *(n for n in ("key", "key_piece") if n in result), "text"]
    table = result[names].to_dataframe().reset_index()
    columns = [str(result.value.dims[0]), "rank", *names]
    return table[table.row >= 0][columns].reset_index(drop=True)


# --- what a cell's value is ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Activation:
    """At the site: the value of the chosen cells, `[b p c]`."""

    axes: str
    cells: tuple[int, ...] | None
    sae: SAE | None

    def __call__(self, value: Float[Tensor, "b p ..."]) -> Float[Tensor, "b p c"]:
        if self.sae is not None:
            found = self.sae.features(value)
            if found.ndim != 3:
                raise ValueError(
                    "an autoencoder of the whole site is required, got one that reads head by head"
                )
        else:
            found = value.norm(dim=-1) if len(self.axes.split()) == 4 else value
        return _chosen(found, self.cells)


@dataclass(frozen=True)
class _Attention:
    """At the pattern: the two largest weights of every query and their keys, `[2 b q c 2]`; one key may be a BOS."""

    cells: tuple[int, ...] | None

    def __call__(self, pattern_bhqk: Float[Tensor, "b h q k"]) -> Float[Tensor, "2 b q c n"]:
        pattern = _chosen(pattern_bhqk.movedim(1, -1), self.cells).movedim(-1, 2)
        weight, key = pattern.to(torch.promote_types(pattern.dtype, torch.float32)).topk(
            min(2, pattern.shape[-1])
        )
        return torch.stack((weight, key.to(weight)))


def _chosen(value: Float[Tensor, "*n c"], cells: tuple[int, ...] | None) -> Float[Tensor, "*n s"]:
    count = value.shape[-1]
    if cells is None:
        return value
    if bad := [i for i in cells if not 0 <= i < count]:
        raise ValueError(f"cells are 0 to {count - 1} at this site, got {bad[0]}")
    return value[..., torch.tensor(cells, device=value.device)]


def _dim(site: str, axes: str, sae: SAE | None) -> str:
    """What the cells of a site are called; ValueError for one that has none."""
    if sae is not None:
        return "feature"
    if re.fullmatch(r"b h q k", axes) and site.endswith("hook_pattern"):
        return "head"
    found = re.fullmatch(r"b p ([mdhgxv])( [ed])?", axes)
    if found is None:
        raise ValueError(
            f"a site with neurons, coordinates, heads or experts at every token is required, {site!r} has axes [{axes}]"
        )
    return CELLS[found[1]]


def _values(
    trace: Trace, batch: Batch, model: Transformer, read: Read, bos_id: int | None, skip_bos: bool
) -> Mapping[str, Tensor]:
    """Text by text: the activation of every token that counts, its id, and the sums behind mean and density."""
    counted, value = counted_tokens(batch, bos_id, skip_bos), trace[read]
    more: dict[str, Tensor] = {}
    if isinstance(read.via, _Attention):
        value, more = _attended(value, batch, counted)
    if not bool((value.isfinite().all(-1) | ~batch.real).all()):
        raise NotFiniteError(f"finite values are required, some at {read.site} are NaN or infinite")
    each = {"activation": value.masked_fill(~counted[..., None], torch.nan), "tokens": batch.tokens, **more}
    found = {name: _by_text(x, batch) for name, x in each.items()}
    activation = found["activation"]
    active, total = (activation > 0).sum(1).double(), activation.nansum(1, dtype=torch.float64)
    n = (~activation[..., 0].isnan()).sum(1).double()
    sums = {
        "active": active,
        f"active{_BOTH}": active + n[:, None],
        "total": total,
        f"total{_BOTH}": total + n[:, None],
    }
    return found | sums | {"counted": n}


def _attended(
    answer: Float[Tensor, "2 b q c n"], batch: Batch, counted: Bool[Tensor, "b p"]
) -> tuple[Float[Tensor, "b q c"], dict[str, Int[Tensor, "b q c"]]]:
    """The largest attention to a key that counts, 0 if there is none; the key's position in its text and its token."""
    weight, column = answer[0], answer[1].long()
    row = torch.arange(len(batch), device=column.device)[:, None, None, None]
    best, which = weight.masked_fill(~counted[row, column], -1.0).max(-1)
    column = column.gather(-1, which[..., None])[..., 0]
    index = Layout(batch.keep, batch.documents).positions(batch.tokens.shape[1], 0, column.device)
    index, none = index.expand_as(batch.tokens), best <= 0
    found = {"key": index[row[..., 0], column], "key_token": batch.tokens[row[..., 0], column]}
    return best.clamp_min(0.0), {name: x.masked_fill(none, -1) for name, x in found.items()}


def _by_text(value: Shaped[Tensor, "b p ..."], batch: Batch) -> Shaped[Tensor, "n t ..."]:
    """The same with one text per row, each from column 0 on, in the order of `Batch.identities`; else absent."""
    if batch.keep is None and batch.documents is None:
        return value
    real = batch.real
    index = Layout(batch.keep, batch.documents).positions(batch.tokens.shape[1], 0, value.device)
    text = (real & (index == 0)).flatten().cumsum(0).view_as(real) - 1
    found = value.new_full(
        (int(text[-1, -1]) + 1, int(index[real].max()) + 1, *value.shape[2:]), absent(value)
    )
    found[text[real], index[real]] = value[real]
    return found


def _finish(
    merged: Partial, site: str, dim: str, cells: tuple[int, ...] | None, skip_bos: bool
) -> "xr.Dataset":
    assert isinstance(merged, Parts)
    examples, spread, sums = (merged.parts[name] for name in ("examples", "spread", "sums"))
    assert isinstance(examples, Examples) and isinstance(spread, Histogram) and isinstance(sums, Means)
    top, counted = examples.top, sums.moments["counted"]
    if not bool(counted.mean > 0):
        raise ValueError(f"texts with a token that counts are required, got {counted.n} of BOS alone")
    rule, entry, best = top.rule, (dim, "rank"), top.values[:, :1]
    known = torch.minimum if rule.largest else torch.maximum  # no quantile is beyond the exact end
    values: dict[str, tuple[Sequence[str], Tensor]] = {
        "value": (entry, top.values), "row": (entry, top.rows), "pos": (entry, top.positions),
        **_per_token("density", sums, "active", dim), **_per_token("mean", sums, "total", dim),
        "max" if rule.largest else "min": ((dim,), best[:, 0]),
        "quantiles": ((dim, "q"), known(torch.stack([spread.quantile(q) for q in QUANTILES], 1), best)),
    }  # fmt: skip
    for name, x in examples.along.items():
        along = name in ("tokens", "activation")
        values[name] = ((*entry, "offset"), x) if along else (entry, x[..., 0])
    found = labelled(
        "top_examples",
        values,
        coords={
            dim: range(len(top.rows)) if cells is None else cells, "rank": range(rule.k),
            "offset": range(-rule.before, rule.after + 1),
        },
        attrs={
            "site": site, "tokens_counted": round(float(counted.mean) * counted.n), "texts": counted.n,
            "pos": "tokens before it in its text", "bos": "does not count" if skip_bos else "counts",
            "order": f"the {'largest' if rule.largest else 'smallest'} first; ties by row, then pos",
            "density": "share of tokens with a value above 0", "quantiles": f"to {RELATIVE_ERROR:.0%} of the value",
            "null": "none: the largest of many values is large by chance; compare with the quantiles",
        },
    )  # fmt: skip
    return found.assign_coords(q=list(QUANTILES))


def _per_token(name: str, sums: Means, part: str, dim: str) -> dict[str, tuple[Sequence[str], Tensor]]:
    """A sum over tokens that count, by their number, with the ends of its 95 % interval over texts (linearised).

    The variance of total - ratio * number needs their covariance, which that of total + number holds.
    """
    top, number, both = sums.moments[part], sums.moments["counted"], sums.moments[f"{part}{_BOTH}"]
    ratio = top.mean / number.mean
    covariance = (both.spread - top.spread - number.spread) / 2
    whole = top.spread + ratio.square() * number.spread
    spread = whole - 2 * ratio * covariance
    spread = spread.masked_fill(spread < ROUNDING * whole, 0.0)
    half = Z95 * (spread / (top.n - 1) / top.n).sqrt() / number.mean if top.n > 1 else ratio * torch.nan
    return {
        name: ((dim,), ratio),
        f"{name}_low": ((dim,), ratio - half),
        f"{name}_high": ((dim,), ratio + half),
    }
