"""Feature cards in the JSON of Neuronpedia, one object for each feature."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from interp.core.boundary import public
from interp.core.results import check_result, in_order
from interp.features.feature_cards import SOURCES
from interp.model.config import Json

if TYPE_CHECKING:
    import xarray as xr

NEEDED: Final = ("counts", "edges", "group_tokens", "piece", "neighbour", "partner", "vector", "source")


@public()
def neuronpedia_json(result: xr.Dataset, *, dataset: str = "") -> list[Json]:
    """A result of `feature_cards` as Neuronpedia's JSON objects, one for each feature; `json.dump` writes them.

    `activations` are the top examples and then those of the groups, each with the range of its list in `bin_min` and
    `bin_max`, and in `bin_contains` the share of the active tokens that lies there. `dfa_*` sum the heads of a top
    example, where the result has them (`dfa`); keys of what it has not hold empty lists, None instead of a number.
    `neuron_alignment_l1` are sizes as shares of those of all neurons, `correlated_*_l1` cosines of activations, as
    SAEDashboard has it. The random directions are left out.

    Args:
        result: what `feature_cards` returned.
        dataset: name of the data.

    Returns:
        A list of JSON objects, in the order of the features.

    Raises:
        ValueError: another result.

    Example:
        >>> eye, zero = torch.eye(24), torch.zeros(24)
        >>> weights = {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero}
        >>> dictionary = interp.features.Dictionary(interp.features.ReLU(), weights, reads="blocks.2.hook_resid_post")
        >>> cards = interp.features.feature_cards(model, [prompt], dictionary, features=[3, 7])
        >>> [each["feature_index"] for each in neuronpedia_json(cards)]
        [3, 7]
    """
    check_result("result", result, NEEDED, "interp.features.feature_cards")
    others = [str(dim) for dim in result.dims if dim not in ("source", "score", "feature")]
    ordered = in_order("result", result, {"source": SOURCES, **dict.fromkeys(others)})
    own = ordered.sel(source=SOURCES[0])
    return [_feature(own.isel(feature=i), dataset) for i in range(own.sizes["feature"])]


def _feature(one: xr.Dataset, dataset: str) -> Json:
    """The object of one feature."""
    value = dict(zip(one.score.values.tolist(), one.value.values.tolist(), strict=True))
    found: dict[str, object] = {
        "feature_index": int(one.feature), **_neurons(one), **_partners(one), **_logits(one),
        "frac_nonzero": value["density"], **_histogram(one, "", "freq_hist_data"),
        "n_prompts_total": int(one.attrs["texts"]), "n_tokens_in_prompt": one.sizes["offset"], "dataset": dataset,
        "decoder_weights_dist": _listed(one, "head_share"), "vector": _listed(one, "vector"),
        "activations": _activations(one),
    }  # fmt: skip
    return {key: _plain(each) for key, each in found.items()}


def _neurons(one: xr.Dataset) -> dict[str, object]:
    shares = np.abs(one.alignment) / one.alignment_total if "alignment" in one else None
    return {
        "neuron_alignment_indices": _listed(one, "neuron"), "neuron_alignment_values": _listed(one, "alignment"),
        "neuron_alignment_l1": [] if shares is None else shares.values.tolist(),
        "correlated_neurons_indices": _listed(one, "active_neuron"),
        "correlated_neurons_pearson": _listed(one, "neuron_correlation"),
        "correlated_neurons_l1": _listed(one, "neuron_cosine"),
    }  # fmt: skip


def _partners(one: xr.Dataset) -> dict[str, object]:
    return {
        "correlated_features_indices": _listed(one, "partner"),
        "correlated_features_pearson": _listed(one, "correlation"),
        "correlated_features_l1": _listed(one, "partner_cosine"),
    }


def _logits(one: xr.Dataset) -> dict[str, object]:
    if "logit" not in one:
        empty: dict[str, object] = {key: [] for key in ("neg_str", "neg_values", "pos_str", "pos_values")}
        return empty | {f"logits_hist_data_bar_{name}": [] for name in ("heights", "values")}
    ends = {word: one.sel(end=end) for word, end in (("neg", "bottom"), ("pos", "top"))}
    return {
        **{f"{word}_str": end.logit_word.values.tolist() for word, end in ends.items()},
        **{f"{word}_values": end.logit.values.tolist() for word, end in ends.items()},
        **_histogram(one, "logit_", "logits_hist_data"),
    }


def _histogram(one: xr.Dataset, ours: str, theirs: str) -> dict[str, object]:
    """Heights and middles of the bins."""
    edges = one[f"{ours}edges"].to_numpy()
    return {
        f"{theirs}_bar_heights": _listed(one, f"{ours}counts"),
        f"{theirs}_bar_values": ((edges[:-1] + edges[1:]) / 2).tolist(),
    }


def _activations(one: xr.Dataset) -> list[Mapping[str, object]]:
    """The examples of the top list, and of the groups from the largest down."""
    counts, edges = one.counts.to_numpy(), one["edges"].to_numpy()
    groups = one.sizes["group"]
    width, total = len(counts) // groups, max(int(counts.sum()), 1)
    found = [_example(one.isel(rank=i), "", (edges[0], edges[-1], 1.0)) for i in range(one.sizes["rank"])]
    for g in reversed(range(groups)):
        share = counts[g * width : (g + 1) * width].sum() / total
        within = (edges[g * width], edges[(g + 1) * width], share)
        found += [_example(one.isel(group=g, place=i), "group_", within) for i in range(one.sizes["place"])]
    return [each for each in found if each]


def _example(one: xr.Dataset, prefix: str, within: tuple[float, float, float]) -> dict[str, object]:
    """One example; nothing for an empty place."""
    if int(one[f"{prefix}row"]) < 0:
        return {}
    inside = one[f"{prefix}tokens"].to_numpy() >= 0
    offset = one.offset.to_numpy()[inside]
    low, high, share = map(float, within)
    return {
        "bin_min": low, "bin_max": high, "bin_contains": share,
        "tokens": one[f"{prefix}piece"].to_numpy()[inside].tolist(),
        "values": one[f"{prefix}activation"].fillna(0.0).to_numpy()[inside].tolist(),
        "qualifying_token_index": int(np.flatnonzero(offset == 0)[0]),
        **_sources(one, prefix, inside),
    }  # fmt: skip


def _sources(one: xr.Dataset, prefix: str, inside: np.ndarray) -> dict[str, object]:
    """What all heads bring from each token to a top example; nothing where it is not known."""
    if prefix or "dfa" not in one:
        return {"dfa_values": [], "dfa_targetIndex": None, "dfa_maxValue": None}
    values = one.dfa.sum("head").to_numpy()[inside]
    target = int(np.flatnonzero(one.offset.to_numpy()[inside] == 0)[0])
    return {"dfa_values": values.tolist(), "dfa_targetIndex": target, "dfa_maxValue": float(values.max())}


def _listed(one: xr.Dataset, name: str) -> list[object]:
    """The values of a variable; none where the result has not got it."""
    values: list[object] = one[name].values.tolist() if name in one else []
    return values


def _plain(value: object) -> object:
    """The value with None in place of NaN, which JSON has no word for."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value
