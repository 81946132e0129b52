"""The table of questions that the contract is checked on: every question of the package, with what it declares."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import xarray as xr

from interp.attention import (
    AttentionAttribution,
    AttentionByDepth,
    AttentionEntropy,
    AttentionKernel,
    AttentionPaths,
    Dispersion,
    Heads,
)
from interp.attention.heads import head_scores
from interp.attention.sentences import MENTIONS, name_attention
from interp.causal import (
    Ablate,
    AttributionPatch,
    AverageIndirectEffect,
    CausalTrace,
    EdgeGraph,
    FunctionVectors,
    KnockOut,
    LinearRelation,
    MissedEffects,
    Patch,
    PathPatch,
    Recall,
    ShortCircuit,
    Steering,
    SteeringCurve,
    Subspace,
)
from interp.circuits import (
    Circuit,
    CircuitCurve,
    EdgeAttribution,
    EdgeEffects,
    EvaluateCircuit,
    FeatureCircuit,
    FindCircuit,
    Interchange,
    edge_attribution,
)
from interp.core.patterns import SCORES
from interp.core.results import labelled
from interp.core.stats import Means, Partial
from interp.dynamics import InContext, OneTokenLosses
from interp.editing import ActivationDifference, ChangedTokens, Diff, DiffInteractions
from interp.features import (
    Dictionary,
    DictionaryQuality,
    FeatureCards,
    FittingSites,
    ProbeNeurons,
    Reconstruction,
    TopExamples,
    TopK,
)
from interp.lab.depth import Consensus, RankCollapse, Refinement, Splitting
from interp.lenses import (
    BackwardLens,
    CompareLenses,
    GradientCosines,
    GradientRank,
    JacobianLens,
    LateLayers,
    LogitLens,
    OutputLens,
    Patchscope,
)
from interp.model import Transformer
from interp.model.edits import Zero
from interp.passes.question import ByRow
from interp.residual import Attribute, Orders, Paths, TermImportance
from interp.tasks import PairLists
from interp.tokens import (
    CompareMethods,
    Erasure,
    FlowRoutes,
    IntegratedGradients,
    LayerMixing,
    TokenAttribution,
)
from interp.weights import (
    BigramTable,
    Composition,
    Copying,
    Directions,
    HeadTokens,
    Neurons,
    SingularDirections,
    SkipTrigrams,
    Spectra,
    Superposition,
    TopPairs,
)
from tests.configs import CONFIGS, D_VOCAB, SPLIT, build, perturbed, some_tokens
from tests.contract.case import DATA, ROWS, Case, Dims, known, repeats, some_rows, with_names
from tests.edited import without_head, without_values

SPAN = torch.zeros(ROWS, 9, dtype=torch.bool)
SPAN[:, 5:] = True
SPAN[1, 5] = False
NEXT = {step: [([i], [i + n]) for i in range(3, 13)] for n, step in enumerate(("next", "second"), 1)}
SHORT_LISTS = PairLists(shots=3, rows=4)
LABELS = (True, False, True, False, True)
SOME_NODES = ("L0F1", "L0F3", "L0F4", "L0.error", "L1F0", "L1F2", "L1F5")
_SCORE = ("value", "low", "high", "null", "n")
_EFFECT = ("value", "low", "high", "n", "changed")
_DISTANCE = ("layer", "head", "distance")
_DEPTH = ("prompt", "depth", "pos")
_MATRIX = ("prompt", "matrix", "layer")
_ENDS = [f"{end}_{what}" for end in ("top", "bottom") for what in ("token", "word")]


def of(*names: str, over: str = "") -> Dims:
    """These variables over these dims."""
    return dict.fromkeys(names, tuple(over.split()))


def effects(over: str, runs: str = "base") -> Dims:
    """The table of effects, with those of every prompt and the metric of the runs without an intervention."""
    more = of("normalised", over=over) if runs == "clean corrupt" else {}
    return (
        of(*_EFFECT, over=over) | of("each", over=f"prompt {over}") | of(*runs.split(), over="prompt") | more
    )


def autoencoder() -> Dictionary:
    """Of random weights, active on 3 features out of 40."""
    generator, d = torch.Generator().manual_seed(0), 24
    shapes = {"W_enc": (d, 40), "b_enc": (40,), "W_dec": (40, d), "b_dec": (d,)}
    weights = {
        name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()
    }
    return Dictionary(TopK(3), weights)


def heads_on_repeats(model: str, _: Sequence[int]) -> ByRow:
    """What `heads` asks of its rows, with its moments labelled."""
    return replace(head_scores(CONFIGS[model], DATA), result=_labelled)


def _labelled(merged: Partial) -> xr.Dataset:
    assert isinstance(merged, Means)
    values = {
        f"{name}{end}": (_DISTANCE[: x.ndim], x)
        for name, moments in merged.moments.items()
        for end, x in zip(("", "_low", "_high"), (moments.mean, *moments.interval()), strict=True)
    }
    return labelled("tensors", values)


def _without_bootstrap(found: xr.Dataset) -> xr.Dataset:
    return found.drop_vars(("low", "high"), errors="ignore")


def _without_resamples(found: xr.Dataset) -> xr.Dataset:
    """Without the random circuits, which are drawn from what is active in the rows, and the interval."""
    rest = found.drop_vars(("faithfulness_ends", "faithfulness_null"), errors="ignore")
    return rest.sel(circuit=rest.circuit != "random")


def _of_methods(found: xr.Dataset) -> xr.Dataset:
    """Without the random orders, of which each prompt has its own."""
    return found.sel(attribution=found.attribution != "random").drop_vars("null", errors="ignore")


def _without_copying(found: xr.Dataset, head: str) -> xr.Dataset:
    """Without the copying scores of a head, which are read off its weights or its values."""
    layer, index = map(int, head[1:].split("H"))
    if "score" not in found.dims:
        kept = np.ones(found.copying.shape, dtype=bool)
        kept[layer, index] = False
        return found.assign({name: x.where(kept) for name, x in found.items() if "copying" in str(name)})
    here = (found.part == head) & found.score.isin(["copying", "copying_weights"])
    return found.drop_vars("label").where(~here)


_AGREEMENT = of("agreement", over="coefficient estimate")


def _but_agreement(result: xr.Dataset, head: str = "") -> xr.Dataset:
    """Cells are patched in the first prompts alone, those that differ between the runs: not those of a silent head."""
    return result.drop_vars("agreement", errors="ignore")


def _but_what_heads_give(found: xr.Dataset, head: str) -> xr.Dataset:
    """By name, without the sites of what heads give W_O: 0 there is another input of the dictionary."""
    return found.sel(site=[site for site in sorted(found.site.values) if not site.endswith("hook_z")])


def _but_what_changed(found: xr.Dataset, head: str) -> xr.Dataset:
    """But for whether the head could be changed: one that is zero already cannot."""
    if "sender" in found.dims:
        return found.assign(changed=found.changed.where(found.sender != head))
    return found.assign(changed=found.changed.where(found.part != head))


def erasure(_: str, order: Sequence[int]) -> Erasure:
    """Of an attribution that is made up."""
    scores = torch.randn(ROWS, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    made_up = xr.Dataset({"value": (("prompt", "pos"), scores[list(order)].numpy())})
    return Erasure(made_up, shares=(0.1, 0.5))


def some_circuit(model: str) -> Circuit:
    """Every third edge."""
    graph = EdgeGraph.of(CONFIGS[model])
    return Circuit(graph, {name: float(i) for i, name in enumerate(graph.names()) if i % 3})


@functools.cache
def _scores(model: str) -> xr.Dataset:
    return edge_attribution(build(model), *some_rows().pair())


@functools.cache
def tuned(model: str) -> Transformer:
    """Another model of the same config."""
    torch.manual_seed(1)
    return perturbed(CONFIGS[model], seed=1)


def curve(model: str, _: Sequence[int]) -> CircuitCurve:
    """Over the scores of edge attribution."""
    return CircuitCurve(_scores(model), fractions=(0.1, 0.5), draws=1)


EDGES: Dims = of(*_EFFECT, "normalised", over="sender receiver")
_PARTS: Dims = of("value", over="prompt part") | of("total", over="prompt")
_ATTENTION: dict[str, Case] = {
    "names": Case(
        lambda model, _: name_attention(CONFIGS[model]), of(*MENTIONS, over="prompt layer head"),
        rows=with_names,
    ),
    "heads on repeats": Case(
        heads_on_repeats,
        {
            f"{name}{end}": _DISTANCE[:2] + _DISTANCE[2:] * (name == "kernel")
            for name in (*SCORES, "copying", "kernel")
            for end in ("", "_low", "_high")
        },
        (),
        rows=repeats,
        of_others=_without_copying,
    ),
    "Heads": Case(
        Heads(repeats=DATA, sentences=None),
        of(*_SCORE, "p", over="layer head score")
        | of("label", over="layer head")
        | of("confidence", over="layer head called"),
        of_others=_without_copying,
    ),
    "AttentionKernel": Case(AttentionKernel(DATA), of(*_SCORE, over="layer head distance")),
    **{
        f"AttentionAttribution {by}": Case(
            AttentionAttribution("L1H2", key=3, by=by),  # type: ignore[arg-type]
            of("value", over="prompt query_part key_part")
            | of("total", "position", "rounding", over="prompt")
            | (of("by_query_source", "by_key_source", over="prompt layer head source") if by == "source" else {}),
        )
        for by in ("part", "head", "source")
    },
    "AttentionPaths": Case(
        AttentionPaths("L1H2", key=3, top=4),
        of("value", "share", "query_source", "query_moved", "key_source", "key_moved", over="prompt rank")
        | of("query_part", "key_part", "path", over="prompt rank")
        | of("total", over="prompt"),
    ),
    "AttentionByDepth": Case(
        AttentionByDepth(recent=2),
        of(*_SCORE, over="layer head score")
        | of("by_layer", over="layer score end")
        | of("untrained", over="layer score range"),
    ),
    **{
        f"AttentionEntropy {m}": Case(AttentionEntropy(train_length=m), of(*_SCORE, over="layer head score"))
        for m in (None, 6)
    },
    **{
        f"Dispersion {m}": Case(Dispersion(train_length=m), of(*_SCORE, over="layer head n_keys score"))
        for m in (None, 6)
    },
}  # fmt: skip
_WEIGHTS: dict[str, Case] = {
    "BigramTable": Case(
        BigramTable(), of("value", "null", "n", over="token score") | of("overall", "null_overall", over="score")
    ),
    "Composition": Case(Composition(), of("value", "null", "excess", "relative", over="src dst")),
    "Copying": Case(Copying(), of(*_SCORE, "p", over="layer head score")),
    "Directions": Case(
        Directions(torch.eye(24)[:2].double(), top=3),
        of("value", over="direction end rank") | of("norm", over="direction"),
    ),
    "SingularDirections": Case(
        SingularDirections("OV", "L0H1", count=2, top=3),
        of("value", over="direction side end rank") | of("singular_value", over="direction"),
    ),
    "Neurons": Case(
        Neurons("L0N3", top=3),
        of("value", over="part matrix end rank") | of("norm", over="part matrix"),
        needs_mlp=True,
    ),
    "HeadTokens": Case(
        HeadTokens([3, 4], top=3), of("value", "word", "word_id", over="layer head token list rank")
    ),
    "Superposition": Case(
        Superposition(), of(*_SCORE, over="layer score") | of("neuron_norm", "neuron_bias", over="layer neuron"), (),
        only="gpt2",
    ),
    "Spectra": Case(
        Spectra(top=3),
        of("norm", "stable_rank", "effective_rank", "top_share", "size", over="matrix")
        | of("singular", over="matrix index"),
    ),
    "TopPairs": Case(TopPairs("L0H1", top=3), of("value", over="part rank")),
    "SkipTrigrams": Case(SkipTrigrams("L0H1", top=3), of("ov", over="part pair rank") | of("qk", over="part pair")),
}  # fmt: skip
_RESIDUAL: dict[str, Case] = {
    **{
        f"Attribute {parts}": Case(
            Attribute(parts=parts),  # type: ignore[arg-type]
            _PARTS | (of("by_source", over="prompt layer head source") if parts == "source" else {}),
            needs_mlp=parts == "neuron",
        )
        for parts in ("layer", "sublayer", "head", "source", "neuron")
    },
    "Attribute elsewhere": Case(Attribute(pos=3), _PARTS),
    "Paths": Case(Paths(), of("value", over="prompt path") | of("total", "rounding", over="prompt")),
    "Orders": Case(Orders(), of("value", over="prompt order pos vocab")),
    "TermImportance": Case(
        TermImportance(), of(*_SCORE, over="term score") | of("terms", over="term")
    ),
}  # fmt: skip
_ROUTES = of("value", over="prompt layer head query key")
_TOKENS: dict[str, Case] = {
    "Erasure": Case(erasure, of(*_SCORE, over="score") | of("each", over="prompt score")),
    "CompareMethods": Case(
        CompareMethods(methods=("alti", "gradient_x_input"), shares=(0.5,), draws=2),
        of(*_SCORE, over="attribution score") | of("each", over="prompt attribution score"),
        only="llama-gqa",
        drawn_apart=_of_methods,
    ),
    "FlowRoutes": Case(
        FlowRoutes(), _ROUTES | of("attn_bias", "resid", "mlp", "resid_mid", over="prompt layer query"), needs_mlp=True
    ),
    "FlowRoutes attention-only": Case(
        FlowRoutes(), _ROUTES | of("attn_bias", "resid", over="prompt layer query"), needs_no_mlp=True
    ),
    **{
        f"TokenAttribution {method}": Case(
            TokenAttribution(method=method), of("value", over="prompt pos") | of(*more, over="prompt"),
            silent=without_values if method == "values" else without_head,
        )
        for method, more in {
            **dict.fromkeys(("values", "flow", "norm_rollout", "alti", "gradient_x_input"), ()),
            "alti_logit": ("initial", "mlp", "bias", "total", "error"),
        }.items()
    },
    "TokenAttribution integrated_gradients": Case(
        TokenAttribution(method=IntegratedGradients(steps=3)),
        of("value", over="prompt pos") | of("total", "error", over="prompt"),
        only="llama-gqa",
    ),
    "LayerMixing": Case(
        LayerMixing(kernel="norms"),
        of("value", over="prompt layer query key") | of("mixing_ratio", over="prompt layer query"),
    ),
}  # fmt: skip
_LENSES: dict[str, Case] = {
    **{
        f"LogitLens {name}": Case(
            question,
            of("entropy", "kl", "target_rank", "target_prob", over="prompt depth pos")
            | of("top_token", "top_prob", "word", over="prompt depth pos rank"),
        )
        for name, question in {
            "everywhere": LogitLens(top=3),
            "states": LogitLens(top=3, sites=("resid_pre", "resid_post"), pos=(0, -1)),
        }.items()
    },
    **{
        f"OutputLens {part}": Case(
            OutputLens(part, top=3),
            of("vocabulary_mean", "target_logit", "norm", over="prompt pos")
            | of(*_ENDS, "top_logit", "bottom_logit", over="prompt pos rank"),
            needs_mlp="N" in part,
        )
        for part in ("L0H1", "L1.attn", "L1N5")
    },
    **{
        f"JacobianLens {what}": Case(
            JacobianLens(tokens=tokens, skip=1, groups=3),
            of("value", over=f"layer {row} in") | of("by_group", over=f"group layer {row} in")
            | of("error", over="layer") | of("prompts", over="group"),
            drawn_apart=lambda found: found.drop_vars(("by_group", "prompts")),
        )
        for what, row, tokens in (("whole", "out", None), ("tokens", "token", (3, 14)))
    },
    "CompareLenses": Case(CompareLenses({"logit lens": None}), of(*_SCORE, over="lens depth score")),
    "Patchscope": Case(
        Patchscope(torch.tensor([3, 7, 5, 11]), top=3),
        of("entropy", "kl", "target_prob", "target_rank", over="prompt depth target_depth")
        | of("top_prob", "top_token", "word", over="prompt depth target_depth rank")
        | of("value", "low", "high", "n", over="depth target_depth") | of("unpatched_prob", over="prompt"),
    ),
    "LateLayers": Case(
        LateLayers(frequencies=torch.arange(1.0, D_VOCAB + 1)), of(*_SCORE, "null_sd", "p", over="part score")
    ),
    **{
        f"BackwardLens {', '.join(matrices)}": Case(
            BackwardLens(matrices=matrices, top=3),
            of("x", "delta", "relative_update", "target_rank", "word", over="prompt matrix layer pos")
            | of(*_ENDS, over="prompt matrix layer pos rank"),
            silent=silent,
        )
        for matrices, silent in {
            ("W_O",): without_values,
            ("W_V", "W_Q"): without_head,
        }.items()
    },
    "GradientRank": Case(
        GradientRank(matrices=("W_O",), tolerance=0.1),
        of("value", over="prompt matrix layer") | of("tokens", over="prompt")
    ),
    "GradientCosines": Case(
        GradientCosines(matrices=("W_O", "W_V")), of("value", over="prompt matrix layer other_layer")
    ),
}  # fmt: skip
_CAUSAL: dict[str, Case] = {
    "Ablate": Case(Ablate("head", change=Zero()), effects("layer head"), of_others=_but_what_changed),
    "AttributionPatch": Case(
        AttributionPatch("z"), effects("layer pos head", "clean corrupt") | _AGREEMENT,
        undrawn="a map has two dims, select", drawn_apart=_but_agreement, of_others=_but_agreement,
    ),
    "AttributionPatch heads": Case(
        AttributionPatch("z", by=("layer", "head")), effects("layer head", "clean corrupt") | _AGREEMENT,
        drawn_apart=_but_agreement, of_others=_but_agreement,
    ),
    "AttributionPatch repaired": Case(
        AttributionPatch("k", qk_fix=True, grad_drop=True, agreement=0),
        effects("layer pos kv_head", "clean corrupt") | of("size", over="layer pos kv_head")
        | of("size_ends", over="layer pos kv_head end"),
        undrawn="a map has two dims, select",
    ),
    "CausalTrace": Case(
        CausalTrace(range(2, 4), samples=2, sigma=0.3),
        of(*_EFFECT, "spread", over="layer role")
        | of("each", "each_spread", "each_changed", over="prompt layer pos")
        | of("subject", over="prompt pos")
        | of("clean", "corrupt", over="prompt")
        | of("total", over="estimate"),
        only="llama-gqa",
        rows=known,
    ),
    "AverageIndirectEffect": Case(
        AverageIndirectEffect(NEXT, lists=SHORT_LISTS),
        of("value", "low", "high", "null", "n", over="layer head")
        | of("beyond", over="layer head estimate")
        | of("by_task", over="task layer head")
        | of("correct", "shuffled", over="task"),
    ),
    "FunctionVectors": Case(
        FunctionVectors(NEXT, top=2, random=2, lists=SHORT_LISTS),
        of(*_SCORE, over="task setting layer vector score")
        | of("p", over="task setting layer score")
        | of("band", over="task setting layer score end")
        | of("random", over="task setting layer score draw")
        | of("directions", over="task layer direction d_model"),
    ),
    "LinearRelation": Case(
        LinearRelation(NEXT["next"], layers=[0], examples=3, only_known=False),
        of(*_SCORE, over="layer score")
        | of("weight", over="layer out in")
        | of("bias", over="layer out")
        | of("predicted", over="layer prompt")
        | of("answered", "known", over="prompt"),
    ),
    "KnockOut": Case(KnockOut([-1], [1, 2], by=("layer", "head")), effects("layer head"), only="llama-gqa"),
    "MissedEffects": Case(
        MissedEffects("k", subsets=20),
        of("value", "low", "high", "upper", "n", over="layer pos kv_head") | of("bound", "null", over="")
        | of("clean", "corrupt", over="prompt"),
    ),
    "Patch": Case(Patch("resid_pre"), effects("layer pos", "clean corrupt"), only="llama-gqa"),
    "Patch heads": Case(
        Patch("z", by=("layer", "head"), direction="noise"),
        effects("layer head", "clean corrupt"),
        of_others=_but_what_changed,
    ),
    "PathPatch": Case(PathPatch(), effects("part", "clean corrupt"), only="llama-gqa", of_others=_but_what_changed),
    "Recall": Case(
        lambda _, order: Recall(SPAN[list(order)], [1]),
        of(*_SCORE, over="part score") | of("each", over="prompt part score"),
        (),
        only="llama-gqa",
    ),
    "ShortCircuit": Case(ShortCircuit([0, range(2)]), effects("part")),
    "Steering": Case(
        Steering(some_tokens(6, 9), some_tokens(4, 9, seed=1), shuffles=2),
        of("value", "low", "high", "null", "n", "norm", "stream", over="layer")
        | of("shuffled", over="layer draw d_model")
        | of("directions", over="layer direction d_model"),
    ),
    "SteeringCurve": Case(
        SteeringCurve(
            [Subspace("blocks.1.hook_resid_post", torch.ones(1, 24).double())], strengths=(-1.0, 2.0), random=2,
            loss_on=some_tokens(2, 9),
        ),
        of(*_SCORE, "p", over="layer strength score")
        | of("band", over="layer strength score end")
        | of("random", over="layer strength score draw")
        | of("plain", over="score")
        | of("norm", over="layer"),
    ),
}  # fmt: skip
_CIRCUITS: dict[str, Case] = {
    "CircuitCurve": Case(
        curve,
        of(*_SCORE, over="circuit fraction score")
        | of("edges", over="fraction")
        | of("each", over="prompt circuit fraction")
        | of("full", "empty", over="prompt"),
        only="llama-gqa",
        drawn_apart=_without_bootstrap,
    ),
    "EvaluateCircuit": Case(
        lambda model, _: EvaluateCircuit(some_circuit(model), subsets=2, draws=1),
        of(*_SCORE, over="circuit score")
        | of("overlap", over="circuit")
        | of("removed", over="circuit part")
        | of("needed", "estimate", over="part")
        | of("each", over="prompt circuit")
        | of("full", "empty", over="prompt"),
        only="llama-gqa",
        drawn_apart=_without_bootstrap,
    ),
    "FeatureCircuit": Case(
        FeatureCircuit(nodes=SOME_NODES, edge_threshold=0.0, draws=2),
        of("value", "low", "high", "n", "outside", over="node")
        | of("edge_value", over="sender receiver")
        | of("edge_ends", over="sender receiver end")
        | of("faithfulness", "faithfulness_null", over="circuit errors")
        | of("faithfulness_ends", over="circuit errors end")
        | of("each", over="prompt circuit errors")
        | of("full", "empty", over="prompt")
        | of("error_share", over="layer"),
        only=SPLIT,
        drawn_apart=_without_resamples,
    ),
    "FindCircuit": Case(
        FindCircuit(method="eap", edges=10),
        EDGES | of("kept", over="sender receiver") | of("clean", "corrupt"),
    ),
    "EdgeAttribution": Case(EdgeAttribution(), EDGES | of("clean", "corrupt")),
    "EdgeEffects": Case(
        EdgeEffects(each=True),
        EDGES | of("each", over="prompt sender receiver") | of("clean", "corrupt", over="prompt"),
        only="attention-only-rotary",
    ),
    "Interchange": Case(
        lambda model, _: Interchange(some_circuit(model)),
        of("value", "low", "high", "n", over="circuit") | of("each", over="prompt circuit"),
    ),
}  # fmt: skip
_VECTORS = of(*_SCORE, over="score") | of("density", over="feature") | of("mean", over="coordinate")
_SOURCE = "source feature"
_CARDS = (
    of(*_SCORE, over="feature score")
    | of("peak", "row", "pos", over=f"{_SOURCE} rank") | of("vector", over=f"{_SOURCE} coordinate")
    | of("tokens", "activation", "piece", over=f"{_SOURCE} rank offset")
    | of("group_row", "group_pos", over=f"{_SOURCE} group place")
    | of("group_tokens", "group_activation", "group_piece", over=f"{_SOURCE} group place offset")
    | of("counts", "logit_counts", over=f"{_SOURCE} bin") | of("edges", "logit_edges", over=f"{_SOURCE} edge")
    | of("logit", "logit_token", "logit_word", over=f"{_SOURCE} end logit_rank")
    | of("neighbour", "cosine", "partner", "correlation", "partner_cosine", over=f"{_SOURCE} near")
)  # fmt: skip


def _but_groups(found: xr.Dataset) -> xr.Dataset:
    """Feature cards without the examples that are drawn by the numbers of the rows."""
    return found.drop_vars([name for name in found if str(name).startswith("group_")])


_FEATURES: dict[str, Case] = {
    "ProbeNeurons": Case(
        lambda _, order: ProbeNeurons([LABELS[i] for i in order], site="resid_post", sizes=(1,), shuffles=1),
        of(*_SCORE, "null_sd", "p", over="layer n_neurons score") | of("neuron", "weight", over="layer n_neurons rank"),
        only="llama-gqa",
        drawn_apart=lambda found: found[["n"]],  # which rows are set aside for the test
    ),
    "Reconstruction": Case(Reconstruction(autoencoder(), "L1.resid"), _VECTORS),
    "FittingSites": Case(
        FittingSites(autoencoder().moved("blocks.1.hook_resid_post")), of(*_SCORE, over="site score"),
        of_others=_but_what_heads_give,
    ),
    "FeatureCards": Case(
        FeatureCards(autoencoder(), "L1.resid", features=(3, 0), top=3, per_group=2, context=(2, 1)),
        _CARDS | of("neuron", "alignment", over=f"{_SOURCE} neuron_rank") | of("alignment_total", over=_SOURCE)
        | of("active_neuron", "neuron_correlation", "neuron_cosine", over=f"{_SOURCE} neuron_rank"),
        needs_mlp=True, drawn_apart=_but_groups,
    ),
    "FeatureCards effects": Case(
        FeatureCards(autoencoder(), "blocks.1.attn.hook_z", features=(3, 0), top=3, per_group=2, context=(2, 1),
                     dfa=True, loss_effect=True),
        _CARDS | of("head_share", over=f"{_SOURCE} head") | of("dfa", over=f"{_SOURCE} rank offset head")
        | of("dfa_outside", over=f"{_SOURCE} rank head") | of("dfa_bias", over=f"{_SOURCE} rank")
        | of("loss_change", over=f"{_SOURCE} rank offset") | of("loss_effect", over=f"{_SOURCE} rank"),
        only="gpt2", drawn_apart=_but_groups, of_others=lambda found, head: found if head < "L1" else found[[]],
    ),
    "DictionaryQuality": Case(DictionaryQuality(autoencoder(), "L1.resid", reference=some_tokens(2, 9)), _VECTORS),
    **{
        f"TopExamples {site}": Case(
            TopExamples(f"blocks.1.{site}", top=3, context=(2, 1)),
            of(*_SCORE, over=f"{dim} score")
            | of("peak", "row", "pos", "text", *more, over=f"{dim} rank")
            | of("tokens", "activation", "piece", over=f"{dim} rank offset")
            | of("quantiles", over=f"{dim} q"),
        )
        for site, dim, more in (
            ("hook_resid_pre", "coordinate", ()),
            ("attn.hook_result", "head", ()),
            ("attn.hook_pattern", "head", ("key", "key_token", "key_piece")),
        )
    },
}  # fmt: skip
_DYNAMICS: dict[str, Case] = {
    "Consensus": Case(Consensus(), of(*_SCORE, over="depth score")),
    "Consensus iterated": Case(Consensus(layer=1, repeats=3), of(*_SCORE, over="depth score")),
    "Consensus no mlp": Case(Consensus(repeats=2, mlp=False), of(*_SCORE, over="depth score"), needs_mlp=True),
    "InContext": Case(InContext(early=2, late=6), of(*_SCORE, over="index score")),
    "OneTokenLosses": Case(OneTokenLosses(), of("value", "index", over="prompt")),
    "RankCollapse": Case(RankCollapse(), of(*_SCORE, over="line depth")),
    "Refinement": Case(Refinement(times=(1, 2)), of(*_SCORE, over="times score")),
    "Splitting": Case(
        Splitting(1, steps=(1, 2), fine=4), of(*_SCORE, over="scheme steps") | of("order", over="scheme steps"),
        needs_mlp=True,
    ),
}  # fmt: skip
_OF_MODELS = of("base", "tuned", over="prompt")
_EDITING: dict[str, Case] = {
    "ActivationDifference": Case(
        lambda model, _: ActivationDifference(tuned(model), top=3),
        of(*_SCORE, over="depth score") | of("logits", over="depth end rank"),
    ),
    "ChangedTokens": Case(
        lambda model, _: ChangedTokens(tuned(model), top=3, context=(2, 1)),
        of(*_SCORE, over="score") | of("peak", "row", "pos", over="rank")
        | of("tokens", "piece", "kl", "loss", "tuned_loss", over="rank offset"),
    ),
    "Diff": Case(
        lambda model, _: Diff(tuned(model)),
        of(*_SCORE, over="what part score") | of("changed", over="what part") | of("moved", over="part")
        | of("each", over="prompt what part") | _OF_MODELS,
        refuses="an edit of {head}",
    ),
    "Diff heads": Case(
        lambda model, _: Diff(tuned(model), metric=None, parts="head", direction="noise"),
        of(*_SCORE, over="what part score") | of("changed", over="what part") | of("moved", over="part")
        | of("each", over="prompt what part") | _OF_MODELS,
        refuses="an edit of {head}",
    ),
    "DiffInteractions": Case(
        lambda model, _: DiffInteractions(tuned(model), ["L0H1", "L1.attn", "unembed"]),
        of(*_SCORE, over="what pair score") | of("changed", over="what pair")
        | of("each", over="prompt what pair") | _OF_MODELS,
        refuses="an edit of {head}",
    ),
}  # fmt: skip
CASES: dict[str, Case] = {
    **_ATTENTION, **_WEIGHTS, **_RESIDUAL, **_TOKENS, **_LENSES, **_CAUSAL, **_CIRCUITS, **_FEATURES, **_EDITING,
    **_DYNAMICS,
}  # fmt: skip


def as_scored(circuit: Circuit) -> Circuit:
    """A circuit without what the function alone adds to the record's answer: it runs what it found."""
    assert circuit.protocol is not None
    return replace(circuit, protocol=replace(circuit.protocol, faithfulness=None), notes=())
