"""How much of the computation of several prompts the dictionaries of a model explain, by their attribution graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from interp.circuits.attribution_graph import attribution_graph
from interp.core.boundary import public
from interp.core.kinds import FromZero
from interp.core.results import Score, scored
from interp.core.stats import Moments, over
from interp.data.batch import Prompts
from interp.model.edits import Edit
from interp.passes.observe import Model, as_model
from interp.runs.provenance import with_origin

if TYPE_CHECKING:
    import xarray as xr

SCORES = ("replacement", "completeness")


@public()
def graph_scores(
    model: Model,
    prompts: Prompts,
    *,
    by: Literal["effect", "influence"] = "effect",
    most: FromZero = 256,
    edits: Sequence[Edit] = (),
    prepend_bos: bool | None = None,
) -> xr.Dataset:
    """How much of what leads to the next token the features of a model carry, and how much the errors of dictionaries.

    For every prompt the attribution graph of its most probable next tokens is made, and two numbers are read off it.

    Args:
        model: a decoder with dictionaries (`model.with_dictionaries`).
        prompts: texts, token ids or a batch.
        by, most: which features the graph of a prompt has, as in `attribution_graph`.
        edits, prepend_bos: as in `attribution_graph`.

    Returns:
        Dataset over `score`, mean over prompts, with the ends `low` and `high` of its 95 % interval and `n`:

        - "replacement": of the influence on the logits that ends in tokens or in errors, the share of tokens.
        - "completeness": share of what enters a node that comes from no error, mean over nodes weighted by influence.

        `each` [prompt, score] has those of every prompt. 1 says that nothing is left unexplained.

    Raises:
        ValueError: no prompts, a model without dictionaries, or as in `attribution_graph`.

    Caveats:
        Both depend on how many features the graphs have. What enters from features that are left out counts as
        explained; circuit-tracer leaves it out, so that its completeness is lower where many are. A feature that
        nobody can read counts like any other.

    Source:
        Ameisen et al. 2025, "Circuit Tracing", graph scores.

    See Also:
        `interp.features.dictionary_quality`: how well a dictionary reconstructs, and what the model loses by it.

    Example:
        >>> eye, zero = torch.eye(24), torch.zeros(24)
        >>> weights = {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero}
        >>> sae = interp.features.Dictionary(interp.features.ReLU(), weights, reads="blocks.1.hook_resid_post")
        >>> found = interp.circuits.graph_scores(model.with_dictionaries([sae]), ["one two", "a b c"], most=8)
        >>> found.value.dims
        ('score',)
    """
    subject = as_model(model, edits)
    if not subject.transformer.dictionaries:
        raise ValueError("a model with dictionaries is required: model.with_dictionaries")
    batch = subject.text.batch(prompts, prepend_bos=prepend_bos)
    if not len(batch):
        raise ValueError("at least one prompt is required, got none")
    graphs = (
        attribution_graph(subject, batch.rows(torch.tensor([row])), by=by, most=most)
        for row in range(len(batch))
    )
    each = torch.tensor([[graph.attrs[name] for name in SCORES] for graph in graphs], dtype=torch.float64)
    scores = {name: Score.of(Moments.of(each[:, i]), "share", share=True) for i, name in enumerate(SCORES)}
    result = scored(
        "graph_scores",
        scores,
        (),
        others={"each": (("prompt", "score"), each)},
        attrs={"interval": over("prompts")},
    )
    return with_origin(result, subject.transformer)
