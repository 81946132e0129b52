"""A hookable Transformer and the exact analyses that take it apart.

    import interp
    model = interp.HookedTransformer.from_pretrained("demo-4l")
    interp.heads(model)
    interp.attribute(model, "When Mary and John went to the shop, John gave a drink to", " Mary", " John")

Here stand the names of a first day. Everything else lives one level down, by question, and is there without an import:

    interp.attention    what heads look at: scores of heads, attention rows
    interp.causal       what an intervention changes: ablation, patching, paths, tracing, knock-outs
    interp.circuits     which edges do a task: scores, searches, evaluation, graph files
    interp.dynamics     what changes with context, depth and training
    interp.editing      changing what a model says: weight edits and their scores
    interp.features     neurons, probes, sparse autoencoders, top examples
    interp.lenses       what a state, an output or a gradient says in tokens
    interp.residual     the stream as a sum of parts, and of paths
    interp.tokens       which input tokens matter: attribution, erasure, routes
    interp.weights      what heads and neurons do by their weights alone

    interp.edits        what an intervention may put in place of a value
    interp.metrics      what is watched while something is changed
    interp.data         batches, streams, sources, pairs of prompts
    interp.tasks        generated prompts with a known answer: indirect objects, facts, repeats
    interp.model        the network, its configuration and sites
    interp.lab          what is trained rather than loaded: mixers beyond softmax attention, blocks, output layers
    interp.passes       hooks, planned sweeps, sampling, questions of your own
    interp.runs         questions over much data: results, stores, records
    interp.plot         the pictures
    interp.pages        the report page, and viewers for notebooks
    interp.training     training small models
    interp.papers       published claims at toy scale, each with a verdict
    interp.verify       whether a model's numbers keep their contract
    interp.zoo          the demo models, planted models
    interp.families     which checkpoints are understood, one file each
    interp.compat       TransformerLens: its names on this model, its files, other exports
    interp.core         statistics, factored matrices, tables
"""

from importlib import import_module
from typing import TYPE_CHECKING

from interp.core import late

if TYPE_CHECKING:
    from interp import (
        attention,
        causal,
        circuits,
        compat,
        core,
        data,
        dynamics,
        editing,
        edits,
        families,
        features,
        lab,
        lenses,
        metrics,
        model,
        pages,
        papers,
        passes,
        plot,
        residual,
        runs,
        tasks,
        tokens,
        training,
        verify,
        weights,
        zoo,
    )
    from interp.attention import heads
    from interp.causal import ablate, attribution_patch, causal_trace, patch, path_patch
    from interp.circuits import evaluate_circuit, find_circuit
    from interp.core import frame
    from interp.data import Batch, Stream
    from interp.edits import Edit
    from interp.encoder_decoder import HookedEncoderDecoder
    from interp.hooked import HookedTransformer
    from interp.lenses import backward_lens, logit_lens
    from interp.metrics import logit_difference
    from interp.model.parts import Part
    from interp.model.tap import Read
    from interp.pages.report_page import report
    from interp.passes import observe
    from interp.residual import attribute
    from interp.runs import run
    from interp.tokens import token_attribution
    from interp.weights import composition, copying
    from interp.zoo import DEMOS

__version__ = "0.1.0"

__all__ = [
    "DEMOS",
    "Batch",
    "Edit",
    "HookedEncoderDecoder",
    "HookedTransformer",
    "Part",
    "Read",
    "Stream",
    "ablate",
    "attribute",
    "attribution_patch",
    "backward_lens",
    "causal_trace",
    "composition",
    "copying",
    "evaluate_circuit",
    "find_circuit",
    "frame",
    "heads",
    "logit_difference",
    "logit_lens",
    "observe",
    "patch",
    "path_patch",
    "report",
    "run",
    "token_attribution",
]

_HOMES = {
    "Batch": "interp.data",
    "DEMOS": "interp.zoo",
    "Edit": "interp.edits",
    "HookedEncoderDecoder": "interp.encoder_decoder",
    "HookedTransformer": "interp.hooked",
    "Part": "interp.model.parts",
    "Read": "interp.model.tap",
    "Stream": "interp.data",
    "ablate": "interp.causal",
    "attribute": "interp.residual",
    "attribution_patch": "interp.causal",
    "backward_lens": "interp.lenses",
    "causal_trace": "interp.causal",
    "composition": "interp.weights",
    "copying": "interp.weights",
    "evaluate_circuit": "interp.circuits",
    "find_circuit": "interp.circuits",
    "frame": "interp.core",
    "heads": "interp.attention",
    "logit_difference": "interp.metrics",
    "logit_lens": "interp.lenses",
    "observe": "interp.passes",
    "patch": "interp.causal",
    "path_patch": "interp.causal",
    "report": "interp.pages.report_page",
    "run": "interp.runs",
    "token_attribution": "interp.tokens",
}
"""Where each name of `__all__` lives: imported at its first use, so that `import interp` costs little beside torch."""

WINGS = (
    *(
        "attention",
        "causal",
        "circuits",
        "dynamics",
        "editing",
        "features",
        "lenses",
        "residual",
        "tokens",
        "weights",
    ),
    *(
        "edits",
        "metrics",
        "data",
        "tasks",
        "model",
        "lab",
        "passes",
        "runs",
        "plot",
        "pages",
        "papers",
        "training",
        "verify",
        "zoo",
        "families",
        "compat",
        "core",
    ),
)
"""Where everything else lives, one level down; imported at first use where that is slow."""

late.MODULES |= {"pictures": "interp.plot", "records": "interp.lab"}
"""Who draws a result, at the first look at one, and what else config files may hold."""

_EARLIER = {
    "BackwardLens": "interp.lenses.GradientFactors, made by interp.lenses.gradient_factors",
    "Circuits": "interp.weights.HeadCircuits",
    "Mixed": "interp.tokens.Mixing",
    "Parts": "interp.residual.Decomposition",
    "Put": "interp.Edit, with interp.edits.Set(values) as its change",
    "faithfulness": "interp.tokens.erasure",
    "faithfulness_curve": "interp.circuits.circuit_curve",
}
"""Names of the first edition that are gone, and what does their work now."""


def __dir__() -> list[str]:
    return sorted({*__all__, *WINGS, "__version__"})


def __getattr__(name: str) -> object:
    """A wing or a name of `__all__` at its first use; for others an error that says where they are."""
    if name in WINGS:
        return import_module(f"interp.{name}")
    if name in _HOMES:
        found = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return found
    what = f"module 'interp' has no attribute {name!r}"
    if name in _EARLIER:
        raise AttributeError(f"{what}: it is called {_EARLIER[name]}")
    if homes := [wing for wing in WINGS if name in import_module(f"interp.{wing}").__all__]:
        raise AttributeError(f"{what}: it is called {' or '.join(f'interp.{wing}.{name}' for wing in homes)}")
    from interp.core.boundary import nearest

    raise AttributeError(f"{what}; {nearest(name, [*__all__, *WINGS])}")
