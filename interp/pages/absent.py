"""Which tables a page lacks, and why: what the model's mixers or blocks do not offer, and what failed on the way."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from interp.core.notes import note
from interp.lenses.factors import WRITERS, present
from interp.model.config import MLP, ModelConfig
from interp.model.sites import names
from interp.pages.corrupted import why_no_edges
from interp.pages.reasons import splitting
from interp.tokens.flow_routes import why_no_routes

OF_WEIGHTS = ("circuits", "composition")
"""The tables that are read off the matrices of attention."""
OF_LAYERS = (
    "attention", "heads", "attribution_sources", "value_norms", "head_tokens", *OF_WEIGHTS, "ablation", "backward_lens",
    "flow_routes", "flow_neurons", "patching", "edges", "faithfulness",
)  # fmt: skip
"""The tables that a model without layers lacks."""
NO_LAYERS = "this model has no layers"
NO_LOGITS = "Left out: this model has no unembedding. It ends in its residual stream, so it names no tokens."
"""Instead of every section about logits."""

NO_CORRUPTED = (
    "Left out: this compares the prompt with a corrupted one, the same tokens but for those that change the answer, "
    "and none was given; interp report --prompt … --corrupt … takes one."
)
"""Instead of the sections that compare two prompts."""
FAILURES = (ValueError, ArithmeticError, MemoryError, torch.OutOfMemoryError)
"""Errors by which one section may fail without the page: numbers that are not finite, and memory. Everything else is
a bug.
"""
NEEDS = {
    "attribution_sources": ("attribution",), "ablation": ("attribution",), "attention": ("heads",),
    "circuits": ("heads",), "flow_routes": ("attribution", "logit_lens"), "flow_neurons": ("flow_routes",),
    "faithfulness": ("edges",),
}  # fmt: skip
"""Tables without which the page cannot show a table, by that table."""

T = TypeVar("T")

LACKS = {
    "bilinear": "QK circuit",
    "separable": "scores that are one product of queries and keys",
    "moves": "OV circuit",
    "additive": "values that are moved token by token",
    "patterned": "attention pattern",
}
"""Words for what a layer without a trait lacks."""
SITES = {
    "bilinear": "attn.W_Q",
    "separable": "attn.W_Q",
    "moves": "attn.W_V",
    "additive": "attn.hook_v",
    "patterned": "attn.hook_pattern",
}
"""Sites that a wrapped network would have to offer, by trait."""


@dataclass
class Absences:
    """Why tables are left out, by their names: what the model lacks from the start, what failed as it comes."""

    why: dict[str, str]
    notes: list[str] = field(default_factory=list)
    """A sentence for each section that failed."""

    def tried(self, name: str, make: Callable[[], T]) -> T | None:
        """The value of a section; None where it, or a table that it needs, fails, and then the absence is recorded."""
        if missing := [need for need in NEEDS.get(name, ()) if need in self.why]:
            self._fails(name, f"it requires {' and '.join(missing)}, which is left out")
            return None
        try:
            return make()
        except FAILURES as cause:
            message = " ".join(str(cause).split()) or "no reason given"
            self._fails(name, f"it failed ({type(cause).__name__}: {message})")
            return None

    def tables(self, work: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """The tables that can be made, by name: those that others need come before them, else order is kept."""
        found: dict[str, T] = {}
        for name in sorted(work, key=lambda name: name in NEEDS):
            if (made := None if name in self.why else self.tried(name, work[name])) is not None:
                found[name] = made
        return {name: found[name] for name in work if name in found}

    def _fails(self, name: str, why: str) -> None:
        self.why[name] = why
        self.say(f"{name} is left out of the page: {why}")

    def say(self, *sentences: str) -> None:
        """Adds notes to the page, each given as an `interp.Note` too."""
        self.notes += sentences
        for sentence in sentences:
            note(f"report: {sentence}")


def why_absent(config: ModelConfig) -> dict[str, str]:
    """The tables that a page about this model lacks, and why, but for those that need logits or a second prompt."""
    if not config.n_layers:
        return dict.fromkeys(OF_LAYERS, NO_LAYERS)
    unseen = no_patterns(config)
    unmoved = without("moves", config)
    edges = why_no_edges(config)
    factors = None if any(matrix in present(config) for matrix in WRITERS) else "its matrices are not known"
    reasons = {
        "attention": unseen,
        "heads": unseen,
        "attribution_sources": None if any(m.traits.additive for m in config.mixers) else without("additive", config),
        "value_norms": without("additive", config),
        "head_tokens": unmoved or without("bilinear", config),
        **dict.fromkeys(OF_WEIGHTS, unmoved),
        "backward_lens": config.block.why_not("matrices") or factors,
        "flow_routes": why_no_routes(config),
        "flow_neurons": why_no_routes(config) or why_no_neurons(config),
        "edges": edges,
        "faithfulness": edges,
    }  # fmt: skip
    return {name: why for name, why in reasons.items() if why}


def why_no_neurons(config: ModelConfig) -> str | None:
    """Why no MLP's share is split among neurons; None if it is."""
    if isinstance(config.mlp, MLP):
        posts = [f"blocks.{layer}.mlp.hook_post" for layer in range(config.n_layers)]
        hidden = next((site for site in posts if site not in names(config)), None)
        return config.block.why_not("matrices") or (hidden and f"this model does not show {hidden}")
    return f"its MLP has no neurons that write on their own: this model is {config.mlp_in_words}"


def why_unsplit(config: ModelConfig) -> str | None:
    """Why no head's scores are split into parts; None if those of some layers are."""
    return no_patterns(config) or (None if splitting(config) else without("separable", config))


def no_patterns(config: ModelConfig) -> str | None:
    """Why no layer has an attention pattern; None if one has."""
    if not config.n_layers:
        return NO_LAYERS
    if any(mixer.traits.patterned for mixer in config.mixers):
        return None
    return config.block.why_not("blocks.0.attn.hook_pattern") or without("patterned", config)


def without(trait: str, config: ModelConfig) -> str | None:
    """Which layers lack a trait (`Traits`) and what they have instead, in words; None if none does."""
    bare = [layer for layer, mixer in enumerate(config.mixers) if not getattr(mixer.traits, trait)]
    if not bare:
        return None
    mixers = " and ".join(dict.fromkeys(str(config.mixers[layer]) for layer in bare))
    if why := config.block.why_not(f"blocks.{bare[0]}.{SITES.get(trait, '')}"):
        mixers = f"{mixers} ({why})"
    where = f"layers {', '.join(map(str, bare))} have" if len(bare) > 1 else f"layer {bare[0]} has"
    return f"{where} no {LACKS[trait]}: positions are mixed by {mixers}"
