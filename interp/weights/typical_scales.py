"""Factors from entries of circuits with norms at scale 1 to logits and scores of a pass: 1 / the norms' real scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.transfers import to_host
from interp.data.batch import Batch
from interp.model.config import ModelConfig, NoNorm
from interp.model.sites import names
from interp.model.tap import Read
from interp.passes.frozen import input_norm, output_scale
from interp.passes.observe import observe
from interp.weights.head_circuits import HeadCircuits

TOKENS = 32
"""Number of random tokens in the pass. The first is left out, since its stream is unusual in many models."""
ABOUT = f"median over {TOKENS - 1} random tokens of 1 / the scales of the norms between, which the entries take as 1"


@dataclass(frozen=True)
class TypicalFactors:
    """Factors by which a typical pass multiplies entries of circuits whose norms have the scale 1.

    NaN where circuits have no norms, norms come after sums, or a wrapped network hides them.
    """

    moved: Float[Tensor, "l"]
    """From an entry of each layer's full OV circuit to the logits that a head adds per unit of attention."""
    sought: Float[Tensor, "l"]
    """From an entry of each layer's full QK circuit to the attention score; NaN where queries or keys are normed."""
    written: float
    """From a vector of the final stream through the unembedding to the logits that it adds."""


def logits_unit(config: ModelConfig) -> str:
    """The unit of logits of a circuit: "logits" if no norm stands before the unembedding, else the norm is named."""
    return (
        "logits"
        if isinstance(config.norm, NoNorm) or not config.final_norm
        else "logits before the final norm"
    )


def scores_unit(config: ModelConfig) -> str:
    """The unit of entries of a QK circuit: "attention scores", before the norms if a norm stands before the heads."""
    return "attention scores" if isinstance(config.norm, NoNorm) else "attention scores before the norms"


def units(config: ModelConfig) -> dict[str, str]:
    """The units of the entries of full OV and QK circuits."""
    return {"OV": logits_unit(config), "QK": scores_unit(config)}


@torch.no_grad()
def typical_factors(circuits: HeadCircuits) -> TypicalFactors:
    """The typical factors of a model, from one pass over a row of random tokens, the same at every call.

    Example:
        >>> len(typical_factors(HeadCircuits(model, folded=True)).moved) == model.cfg.n_layers
        True
    """
    network, config = circuits.network, circuits.config
    unknown = torch.full((config.n_layers,), torch.nan, dtype=torch.float64)
    if isinstance(config.norm, NoNorm):
        return TypicalFactors(torch.ones_like(unknown), torch.ones_like(unknown), 1.0)
    if not circuits.folded or config.norms_sum or config.cross_attention:
        return TypicalFactors(unknown, unknown, torch.nan)
    layers = range(config.n_layers)
    before = [input_norm(network, layer, "attn_out").sites for layer in layers]
    after = [output_scale(config, layer, "attn_out") for layer in layers]
    last = ("ln_final.hook_scale",) if config.final_norm else ()
    all_sites = dict.fromkeys(site for norm_sites in (*before, *after, last) for site in norm_sites)
    known = set(names(config))
    sites = [site for site in all_sites if site in known]  # a wrapped network may hide its norms
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.d_vocab, (1, min(TOKENS, config.n_ctx)), generator=draw)
    trace = observe(network, Batch(tokens), [Read(site) for site in sites]).trace
    seen = to_host({site: trace[Read(site)] for site in sites})
    inverse = {site: float(scale[:, 1:].double().median()) ** -1 for site, scale in seen.items()}

    def through(norm_sites: tuple[str, ...]) -> float:
        return inverse.get(norm_sites[0], torch.nan) if norm_sites else 1.0

    read, added = (
        torch.tensor([through(x) for x in sites], dtype=torch.float64) for sites in (before, after)
    )
    return TypicalFactors(
        read * added * through(last), unknown if config.qk_norms else read.square(), through(last)
    )
