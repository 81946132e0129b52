"""A hookable Transformer and the exact analyses that take it apart.

    import interp
    model = interp.HookedTransformer.from_pretrained("demo-4l")
    interp.heads(model)
    interp.attribute(model, "When Mary and John went to the store, John gave a drink to", " Mary", " John")

Here stand the names of a first day. Everything else lives one level down, by question, and is there without an import:

    interp.attention    what heads look at: scores of heads, attention rows
    interp.causal       what an intervention changes: ablation, patching, paths, tracing, knock-outs
    interp.circuits     which edges do a task: scores, searches, evaluation, graph files
    interp.dynamics     what changes with context, depth and training
    interp.editing      changing what a model says: weight edits and their scores
    interp.features     neurons, probes, sparse autoencoders, top examples
    interp.findings     what the field reports of models, asked of this one
    interp.lenses       what a state, an output or a gradient says in tokens
    interp.residual     the stream as a sum of parts, and of paths
    interp.tokens       which input tokens matter: attribution, erasure, routes
    interp.weights      what heads and neurons do by their weights alone

    interp.edits        what an intervention may put in place of a value
    interp.metrics      what is watched while something is changed
    interp.data         batches, streams, sources, pairs of prompts
    interp.tasks        generated prompts with a known answer: indirect objects, facts, repeats
    interp.model        the network, its configuration and sites
    interp.lab          what is trained rather than loaded: training, other mixers and blocks, compiled programs
    interp.passes       hooks, planned sweeps, sampling, questions of your own
    interp.runs         questions over much data: results, stores, records
    interp.plot         the pictures
    interp.pages        the report page, and viewers for notebooks
    interp.verify       whether a model's numbers keep their contract
    interp.zoo          the demo models, planted models
    interp.families     which checkpoints are understood, one file each
    interp.compat       TransformerLens: its names on this model, its files, other exports
    interp.core         statistics, factored matrices, tables
"""

from importlib import import_module
from typing import TYPE_CHECKING

from interp.core import late
from interp.core.version import VERSION

if TYPE_CHECKING:
    from interp import (
        attention as attention,
        causal as causal,
        circuits as circuits,
        compat as compat,
        core as core,
        data as data,
        dynamics as dynamics,
        editing as editing,
        edits as edits,
        families as families,
        features as features,
        findings as findings,
        lab as lab,
        lenses as lenses,
        metrics as metrics,
        model as model,
        pages as pages,
        passes as passes,
        plot as plot,
        residual as residual,
        runs as runs,
        tasks as tasks,
        tokens as tokens,
        verify as verify,
        weights as weights,
        zoo as zoo,
    )
    from interp.attention import heads as heads
    from interp.causal import (
        ablate as ablate,
        attribution_patch as attribution_patch,
        causal_trace as causal_trace,
        patch as patch,
        path_patch as path_patch,
    )
    from interp.circuits import evaluate_circuit as evaluate_circuit, find_circuit as find_circuit
    from interp.core import frame as frame
    from interp.core.notes import Note as Note
    from interp.data import Batch as Batch, Stream as Stream
    from interp.edits import Edit as Edit
    from interp.encoder_decoder import HookedEncoderDecoder as HookedEncoderDecoder
    from interp.hooked import HookedTransformer as HookedTransformer
    from interp.lenses import backward_lens as backward_lens, logit_lens as logit_lens
    from interp.metrics import logit_difference as logit_difference
    from interp.model.parts import Part as Part
    from interp.model.tap import Read as Read
    from interp.pages.report_page import report as report
    from interp.passes import observe as observe
    from interp.residual import attribute as attribute
    from interp.runs import run as run
    from interp.tokens import token_attribution as token_attribution
    from interp.weights import composition as composition, copying as copying
    from interp.zoo import DEMOS as DEMOS

__version__ = VERSION

HOMES = {
    "Batch": "interp.data",
    "DEMOS": "interp.zoo",
    "Edit": "interp.edits",
    "HookedEncoderDecoder": "interp.encoder_decoder",
    "HookedTransformer": "interp.hooked",
    "Note": "interp.core.notes",
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
"""The names of a first day and where each lives: imported at its first use, so that `import interp` costs little.

No `__all__`: `help(interp)` would print every word of them all.
"""

WINGS = (
    *(
        "attention",
        "causal",
        "circuits",
        "dynamics",
        "editing",
        "features",
        "findings",
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
        "verify",
        "zoo",
        "families",
        "compat",
        "core",
    ),
)
"""Where everything else lives, one level down; imported at first use where that is slow."""

ROOMS = (*WINGS, "lab.depth", "lab.rasp", "lab.training")
"""Every package that has public names."""

late.MODULES |= {
    "pictures": ("interp.plot",),
    "records": ("interp.lab", "interp.wrapped"),
    "parts": ("interp.model.parts",),
}
"""Who draws a result, at the first look at one, what else config files may hold, and what names of parts say."""

_EARLIER = {
    "BackwardLens": "interp.lenses.GradientFactors, made by interp.lenses.gradient_factors",
    "Circuits": "interp.weights.HeadCircuits",
    "Mixed": "interp.tokens.Mixing",
    "Parts": "interp.residual.Decomposition",
    "board": "experiments.board, beside the package (python -m experiments.board)",
    "papers": "experiments.papers, beside the package (python -m experiments.papers)",
    "training": "interp.lab.training",
    "Put": "interp.Edit, with interp.edits.Set(values) as its change",
    "faithfulness": "interp.tokens.erasure",
    "faithfulness_curve": "interp.circuits.circuit_curve",
}
"""Names of the first edition that are gone, and what does their work now."""


def __dir__() -> list[str]:
    return sorted({*HOMES, *WINGS, "__version__"})


def __getattr__(name: str) -> object:
    """A wing or a name of `HOMES` at its first use; for others an error that says where they are."""
    if name in WINGS:
        return import_module(f"interp.{name}")
    if name in HOMES:
        found = globals()[name] = getattr(import_module(HOMES[name]), name)
        return found
    what = f"module 'interp' has no attribute {name!r}"
    if name in _EARLIER:
        raise AttributeError(f"{what}: it is called {_EARLIER[name]}")
    if homes := [room for room in ROOMS if name in import_module(f"interp.{room}").__all__]:
        raise AttributeError(f"{what}: it is called {' or '.join(f'interp.{room}.{name}' for room in homes)}")
    from interp.core.wording import nearest

    raise AttributeError(f"{what}; {nearest(name, [*HOMES, *WINGS])}")
