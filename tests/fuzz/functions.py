"""Every public function and record with every other value in every argument, one at a time."""

import dataclasses
import functools
import importlib
import inspect
import math
import re
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xarray as xr

import interp
from interp import Batch, lab, tasks
from interp.core.fitting import fits
from interp.core.hints import hints_of
from tests.contract.calls import (
    CALLS,
    METRIC,
    NOT_RUN,
    OTHERS,
    REFUSES,
    TEXT,
    TOKENS,
    WORDS,
    called,
    circuits,
    compiled,
    directions,
    examples,
    facts_file,
    mend,
    model,
    neuron_graph,
    numbers,
    plain,
    public_methods,
    public_names,
    sae,
    signature,
    valid,
    whole_circuit,
)
from tests.fuzz import loaders
from tests.fuzz.judge import Case, Ending, unfinite
from tests.fuzz.values import DOUBTFUL, WRONG, near


def valid_result(name: str) -> object:
    """What the valid call of a function gives."""
    return called(name, FUNCTIONS[name], valid_of(name))


@functools.cache
def found_circuit() -> object:
    question = interp.circuits.FindCircuit(metric=METRIC["metric"](), edges=3)
    return interp.runs.answered(question, plain(), interp.data.Pairs(TOKENS, OTHERS))


@functools.cache
def fitted() -> object:
    return interp.runs.answered(interp.lenses.JacobianLens(skip=1), model(), TOKENS)


@functools.cache
def demo_tokenizer() -> object:
    return interp.zoo.load("demo-attn-2l")[1]


@functools.cache
def task_pairs() -> tasks.TaskPairs:
    return tasks.IndirectObjects(4).pairs(demo_tokenizer())


@functools.cache
def singular_values() -> interp.editing.SingularValues:
    return interp.editing.SingularValues.of(model(), "blocks.0.mlp.W_in")


@functools.cache
def vocabulary() -> lab.training.Vocabulary:
    return lab.training.Vocabulary.learned(["the cat sat", "the dog ran"] * 9, 260)


MADE_BY_US: Mapping[str, str] = {
    "answers, which functions give": """
        circuits.AttributionGraph circuits.Edge editing.SingularValues editing.TwoPasses lenses.GradientFactors
        features.LayerWeights weights.SingularTriples tasks.Fact tasks.FactPrompt tasks.IndirectObject tasks.TaskPairs
        model.LayerWeights
        model.Memory model.Trace passes.HookPoint runs.Results verify.Contract
        verify.ContractLine zoo.Demo
        lab.rasp.Exactness lab.training.Trained lab.training.Beams lab.training.Pruned
        Note residual.IncompleteSumError""",
    "names of places, which all that takes a part or a place checks": "Part model.Site",
    "records without a field": "features.ReLU features.Gated edits.Detach edits.Zero",
    "what a protocol asks of the user's own class": """
        tasks.Task lab.training.TrainingData verify.PairReference verify.Reference passes.Ask passes.ByRow
        passes.Question passes.Reading passes.Staged passes.WithoutData""",
    "whose cell is named by keywords": "causal.Subspace.of_result",
    "of chats, tokenizers or facts that the tiny models lack": """
        Batch.positions HookedEncoderDecoder.to_texts tasks.GivenFacts.pairs tasks.Agreement.pairs
        tasks.GreaterThan.pairs""",
    "which experiments and training call": """
        runs.Record.create runs.Record.open runs.Record.resume runs.Record.result runs.Record.table
        runs.Record.figure runs.Record.say lab.training.FixedRows.batch lab.training.PackedTexts.batch
        lab.training.Sentences.batch pages.ReportPage.save pages.ReportQuestion.of""",
    "for which a dictionary of the model's own width is needed": "features.CrossLayerTranscoder.fitted_to",
    "opened by methods, of which `loaders` damages the files": """
        HookedEncoderDecoder.from_pretrained runs.ActivationStore runs.Record families.SentencePieceTokenizer
        families.StoredTokenizer lab.training.PackedTexts lab.training.Vocabulary causal.Subspace.load
        circuits.Circuit.load editing.Mend.load lenses.TunedLens.load lenses.FittedJacobianLens.load
        lenses.FittedJacobianLens.from_neuronpedia families.SentencePieceTokenizer.read
        lab.training.Vocabulary.read runs.ActivationStore.open""",
    "made by functions of a config": "lab.rasp.Compiled",
    "changes what is imported": "compat.install compat.uninstall",
}  # fmt: skip
"""Public classes that are given nothing of a user's here, and why; pictures and pages are those of `results`."""
WRITTEN = {"path": lambda: Path(tempfile.mkdtemp()) / "written"}
SCALES = {"z": lambda: torch.ones_like(singular_values().sigma)}
VALUES = {"value": lambda: numbers(2, 3, sae().d_in).float()}
WORD_PAIRS = {"pairs": lambda: [(chr(97 + i), chr(98 + i)) for i in range(20)], "part": lambda: "mean"}
DEMO_TEXT = {"text": lambda: interp.HookedTransformer.from_pretrained("demo-attn-2l").text}
FEW = {"k": lambda: 2}
SEQUENCES = dict.fromkeys(("prompts", "source", "target"), lambda: torch.tensor([[1, 2]]))
RECORDS: Mapping[str, Mapping[str, Callable[[], object]]] = {
    "core.FactoredMatrix": {"A": lambda: numbers(4, 2), "B": lambda: numbers(2, 4)},
    "model.EncoderDecoderConfig": {
        "encoder": lambda: lab.training.encoder_decoder(8, 8).encoder,
        "decoder": lambda: lab.training.encoder_decoder(8, 8).decoder},
    "tasks.Examples": {"batch": lambda: examples().batch},
    "Batch.of": {"rows": lambda: [[5, 6], [7]]},
    "HookedEncoderDecoder.run_with_cache": dict.fromkeys(("source", "target"), lambda: torch.tensor([[1, 2]])),
    "HookedEncoderDecoder.run_with_hooks": dict.fromkeys(("source", "target"), lambda: torch.tensor([[1, 2]])),
    "HookedEncoderDecoder.generate": {"source": lambda: torch.tensor([[1, 2]]), "max_new_tokens": lambda: 1},
    "residual.ActivationCache.apply_ln_to_stack": {
        "stack": lambda: model().run_with_cache(TOKENS)[1].decompose_resid().values},
    "residual.ActivationCache.logit_attrs": {
        "stack": lambda: model().run_with_cache(TOKENS)[1].decompose_resid(),
        "answer": lambda: torch.tensor([5] * len(TOKENS))},
    "tasks.RepeatedTokens.tokens": {"vocab": lambda: 30},
    **{
        f"tasks.{name}.batch": {"place": lambda: tasks.Place(0, None), "rows": lambda: 2}
        for name in ("RepeatedSequences", "AssociativeRecall", "InContextRegression", "RepeatingChain", "SequencePairs")
    },
    "HookedTransformer.to": {"target": lambda: "cpu"},
    "Batch.packed": {"texts": lambda: [[5, 6], [7]], "width": lambda: 4},
    "Batch.unpack": {"values": lambda: numbers(1, 4)},
    "Batch.by_text": {
        "values": lambda: numbers(1, 4), "real": lambda: torch.ones(1, 4, dtype=torch.bool), "nothing": lambda: 0.0},
    "Batch.rows": {"index": lambda: torch.tensor([0])},
    "Batch.with_answers": {"answer": lambda: torch.tensor([5]), "wrong": lambda: torch.tensor([6])},
    "Batch.tokens_at": {"pos": lambda: -1},
    "causal.Subspace.angles": {"other": lambda: directions()[0]},
    **dict.fromkeys(("causal.Subspace.save", "circuits.Circuit.save", "editing.Mend.save", "lenses.TunedLens.save",
                     "lenses.FittedJacobianLens.save", "lenses.FittedJacobianLens.to_neuronpedia"),
                    WRITTEN),
    "causal.EdgeGraph.of": {"config": lambda: model().cfg},
    "causal.EdgeGraph.index": {"edge": lambda: "L0H1->logits"},
    "causal.EdgeGraph.name": {"sender": lambda: 0, "receiver": lambda: 1},
    "causal.EdgeGraph.chosen": {"edges": lambda: ["L0H1->logits"]},
    "causal.EdgeGraph.nodes_of": {"receiver": lambda: 1},
    "circuits.AttributionGraph.of_result": {"result": neuron_graph}, "circuits.AttributionGraph.write": WRITTEN,
    "core.FactoredMatrix.rows": {"index": lambda: 1}, "core.FactoredMatrix.columns": {"index": lambda: 1},
    **{f"features.Crosscoder.{name}": {"x": lambda: numbers(2, *made("features.Crosscoder").W_enc.shape[:2])}
       for name in ("encode", "before")},
    "features.Crosscoder.features": {"batch": lambda: TOKENS},
    "features.Crosscoder.edits": {"batch": lambda: TOKENS, "change": lambda: torch.zeros_like},
    "features.Crosscoder.decode": {"features": lambda: numbers(2, made("features.Crosscoder").d_sae)},
    "features.CrossLayerTranscoder.encode": {"x": lambda: numbers(2, 3), "layer": lambda: 0},
    "features.CrossLayerTranscoder.decode": {"features": lambda: {0: numbers(2, 4)}},
    "features.CrossLayerTranscoder.directions": {"features": lambda: [1], "layer": lambda: 0},
    "features.CrossLayerTranscoder.later": {"layer": lambda: 0},
    "circuits.Circuit.of": {
        "graph": lambda: whole_circuit().graph, "kept": lambda: whole_circuit().graph.exists,
        "scores": lambda: numbers(*whole_circuit().graph.exists.shape)},
    "circuits.Circuit.of_result": {"result": found_circuit},
    "editing.Mend.untrained": {"names": lambda: ["blocks.0.mlp.W_in"]},
    "editing.SingularValues.of": {"name": lambda: "blocks.0.mlp.W_in"},
    **dict.fromkeys(
        [f"editing.SingularValues.{name}" for name in ("factor", "scaled", "change", "edit")],
        SCALES),
    "editing.Continuation.texts": {"openings": lambda: [TEXT]},
    "editing.Dispatch.with_question": {"prompts": lambda: [TEXT]},
    "editing.Dispatch.probabilities": {"prompts": lambda: [TEXT]},
    "features.Dictionary.on_features": {"change": lambda: torch.zeros_like},
    **{f"{owner}.with_dictionaries": {"dictionaries": lambda: [sae()]}
       for owner in ("HookedTransformer", "model.Transformer")},
    "features.Dictionary.edits": {"change": lambda: torch.zeros_like},
    "features.Dictionary.prefix": {"n": lambda: 3}, "features.Dictionary.fitted_to": {"model": model},
    "features.Dictionary.moved": {"reads": lambda: "blocks.0.hook_resid_post"},
    **dict.fromkeys(
        [f"features.Dictionary.{name}" for name in ("features", "reconstruct", "vectors")],
        VALUES),
    "lenses.FittedJacobianLens.of_result": {"result": fitted},
    "lenses.FittedJacobianLens.directions": {"token": lambda: 5},
    "lenses.FittedJacobianLens.steer": {"token": lambda: 5, "scale": lambda: 1.0},
    "lenses.FittedJacobianLens.swap": {"a": lambda: 5, "b": lambda: 6},
    "lenses.FittedJacobianLens.draws": {"resamples": lambda: 2, "seed": lambda: 0},
    "lenses.FittedJacobianLens.place": {"site": lambda: "blocks.0.hook_resid_post"},
    "lenses.GradientFactors.in_stream": {"matrix": lambda: "W_in"},
    "lenses.GradientFactors.reconstruct": {"name": lambda: "blocks.0.mlp.W_in"},
    "lenses.GradientFactors.error": {"name": lambda: "blocks.0.mlp.W_in"},
    "residual.ActivationCache.to": {"device": lambda: "cpu"},
    "data.Pairs.of": dict.fromkeys(("clean", "corrupt"), lambda: Batch(TOKENS)),
    "edits.PerRow.of": {"rows": lambda: [1, 0]},
    "model.ModelConfig.from_dict": {"values": lambda: model().cfg.to_dict()},
    "model.EncoderDecoderConfig.from_dict": {"values": lambda: lab.training.encoder_decoder(8, 8).to_dict()},
    "model.Transformer.place": {"devices": lambda: ["cpu"]},
    "passes.Sampling.probabilities": {"logits": lambda: numbers(2, 9)},
    "dynamics.Langevin.beta": {"n": lambda: 8},
    "runs.ActivationStore.shard": {"i": lambda: 0},
    "runs.ActivationStore.read": {"name": lambda: "blocks.0.hook_resid_post"},
    "families.SentencePieceTokenizer.decode": {"ids": lambda: [5, 6]},
    "families.SentencePieceTokenizer.piece": {"token": lambda: 5},
    **dict.fromkeys(("core.FactoredMatrix.top_entries", "core.FactoredMatrix.row_top"), FEW),
    "lab.rasp.Compiled.evaluate": {"tokens": lambda: "01"},
    "lab.rasp.Compiled.expected": {"tokens": lambda: compiled().inputs(2)[0]},
    "lab.rasp.Compiled.symbols": {"row": lambda: compiled().inputs(2)[0][0]},
    "lab.training.PackedTexts.of": {
        "data": lambda: ["the cat sat", "the dog ran"] * 40, "vocabulary": vocabulary, "width": lambda: 8},
    "lab.training.Vocabulary.learned": {"texts": lambda: ["the cat sat"] * 9, "size": lambda: 260},
    **dict.fromkeys(
        [f"HookedEncoderDecoder.{name}" for name in ("to_source", "to_target", "loss", "given")],
        SEQUENCES),
    "HookedEncoderDecoder.to_texts": {"batch": lambda: Batch(torch.tensor([[1, 2]]))},
    "tasks.Examples.to": {"device": lambda: "cpu"},
    "tasks.Examples.rows": {"index": lambda: torch.tensor([0])},
    "tasks.Examples.measured": {"logits": lambda: numbers(*examples().batch.tokens.shape, 9)},
    **dict.fromkeys(
        [f"tasks.PairLists.{name}" for name in ("split", "lists", "zero_shot")],
        WORD_PAIRS),
    "tasks.TaskPairs.columns": {"role": lambda: "end"},
    **dict.fromkeys(("tasks.GivenFacts.asked", "tasks.IndirectObjects.balanced"),
                    DEMO_TEXT),
    "Stream.window": {"w": lambda: 0},
    "lab.DualChunk": {"length": lambda: 3},
    "lab.training.Distillation.mixed": {
        "hard": lambda: numbers(*examples().batch.tokens[:, 1:].shape),
        "found": lambda: numbers(*examples().batch.tokens.shape, model().cfg.d_vocab),
        "examples": examples},
    "lab.depth.Solver.flow": {"field": lambda: torch.neg, "x": lambda: numbers(2, 3)},
    "lab.Datastore.of": {"model": lambda: model().transformer, "tokens": lambda: TOKENS},
    "lab.Datastore.interpolated": {"model": lambda: model().transformer, "tokens": lambda: TOKENS},
    "lab.Datastore.log_probs": {"states": lambda: numbers(1, 2, model().cfg.d_model),
                                "d_vocab": lambda: model().cfg.d_vocab},
    "lab.rasp.Compiled.ids": {"tokens": lambda: "01"},
    "lab.rasp.Compiled.without": {"edge": lambda: min(compiled().edges), "tokens": lambda: compiled().inputs(2)[0]},
    **CALLS,
}  # fmt: skip
"""Valid calls of records and methods, beside those of the contract."""
FIELDS: Mapping[str, Callable[[], object]] = {
    **dict.fromkeys(("size", "rank", "content", "key_heads", "value_heads", "d_key", "d_value", "step",
    "n_experts", "top_k",     "block", "width", "chunk", "n_buckets", "stride", "n_layers", "n_heads"), lambda: 2),
    **dict.fromkeys(("d_mlp", "original_n_ctx", "length", "train_length", "hidden", "d_model", "n_ctx",
    "d_vocab"), lambda: 8),
    **dict.fromkeys(("factor", "low_freq_factor", "attention_factor", "weight"), lambda: 1.5),
    "high_freq_factor": lambda: 4.0, "short": lambda: (1.0,), "long": lambda: (2.0,), "cutoffs": lambda: (3,),
    "size": lambda: 2, "tokenizer": demo_tokenizer, **WORDS,
}  # fmt: skip
"""What a field of this name is, where a line says nothing else."""


def made(name: str) -> Any:
    """What the valid call of a class makes."""
    kind = dict(public_names())[name]
    return kind(**valid(name, kind))


INSTANCES: Mapping[str, Callable[[], object]] = {
    "Batch": lambda: Batch.packed([[5, 6], [7, 8]], 4),
    "Stream": lambda: interp.Stream(interp.data.open_source([TEXT]), model().text, tokens_per_batch=64),
    "causal.EdgeGraph": lambda: whole_circuit().graph, "causal.Subspace": lambda: directions()[0],
    "features.Crosscoder": lambda: made("features.Crosscoder"),
    "features.CrossLayerTranscoder": lambda: made("features.CrossLayerTranscoder"),
    "circuits.Circuit": whole_circuit,
    "circuits.AttributionGraph": lambda: interp.circuits.AttributionGraph.of_result(neuron_graph()),
    "core.FactoredMatrix": lambda: interp.core.FactoredMatrix(numbers(4, 2), numbers(2, 4)),
    "dynamics.Langevin": interp.dynamics.Langevin,
    "editing.Continuation": lambda: interp.editing.Continuation(length=20),
    "editing.Dispatch": lambda: interp.editing.Dispatch("a", {"a": 5, "b": 6}),
    "editing.Mend": mend, "editing.SingularValues": singular_values,
    "editing.WeightEdit": lambda: interp.editing.shift_edit(model(), TEXT, answer=5, layer=0, eta=0.1),
    "families.SentencePieceTokenizer": lambda: interp.families.SentencePieceTokenizer.read(
        loaders.whole("pieces") / "tokenizer.model"),
    "edits.PerRow": lambda: interp.edits.PerRow([1, 2]), "features.Dictionary": sae,
    "lab.depth.Solver": lab.depth.Solver,
    "lab.training.Distillation": lambda: lab.training.Distillation(model().transformer),
    "lab.Datastore": lambda: lab.Datastore.of(model().transformer, TOKENS),
    "lab.training.Training": lab.training.Training,
    "lenses.GradientFactors": lambda: interp.lenses.gradient_factors(model(), TOKENS, answer=5),
    "lenses.TunedLens": lambda: interp.lenses.TunedLens.untrained(model()),
    "passes.Sampling": interp.passes.Sampling,
    "runs.ActivationStore": lambda: interp.runs.ActivationStore.open(loaders.whole("a store")),
    "tasks.Examples": examples, "tasks.TaskPairs": task_pairs,
    "tasks.PairLists": lambda: tasks.PairLists(shots=2, rows=1),
    "tasks.GivenFacts": lambda: tasks.read_facts(facts_file()),
    "tasks.DocstringArguments": tasks.DocstringArguments,
    "tasks.Facts": tasks.Facts, "tasks.GreaterThan": tasks.GreaterThan,
    "tasks.IndirectObjects": tasks.IndirectObjects, "tasks.ListCopy": tasks.ListCopy,
    "weights.HeadCircuits": circuits,
    "HookedTransformer": model, "model.Transformer": lambda: model().transformer, "lab.rasp.Compiled": compiled,
    "HookedEncoderDecoder": lambda: interp.HookedEncoderDecoder(
        interp.model.build(lab.training.encoder_decoder(8, 8))),
    "lenses.FittedJacobianLens": lambda: interp.lenses.FittedJacobianLens(
        **valid("lenses.FittedJacobianLens", interp.lenses.FittedJacobianLens)),
    "residual.ActivationCache": lambda: model().run_with_cache(TOKENS)[1],
    "tasks.RepeatedTokens": lambda: tasks.RepeatedTokens(4, 2, 2),
    "tasks.RepeatedSequences": lambda: tasks.RepeatedSequences(d_vocab=20, width=30, low=3, high=9),
    "tasks.AssociativeRecall": lambda: tasks.AssociativeRecall(d_vocab=21, pairs=5, queries=3),
    "tasks.InContextRegression": lambda: tasks.InContextRegression(d_vocab=12, inputs=3, examples=4),
    "tasks.RepeatingChain": lambda: tasks.RepeatingChain(d_vocab=7, width=40, low=5, high=15),
    "tasks.SequencePairs": lambda: tasks.SequencePairs(9, 2, 5),
}  # fmt: skip
"""Of which public methods are called; those of another class are class methods."""


def everything() -> Iterator[tuple[str, object]]:
    """Every public function and class by its shortest name."""
    seen: set[int] = set()
    for wing in ("", *interp.ROOMS):
        module = importlib.import_module(f"interp.{wing}" if wing else "interp")
        for name in module.__all__ if wing else interp.HOMES:
            value = getattr(module, name)
            if callable(value) and id(value) not in seen:
                seen.add(id(value))
                yield f"{wing}.{name}".lstrip("."), value


def _found() -> Iterator[tuple[str, Callable[..., object]]]:
    yield from public_names()
    yield from public_methods()
    ours, known = {name for names in MADE_BY_US.values() for name in names.split()}, dict(public_names())
    for name, kind in everything():
        if not isinstance(kind, type):
            continue
        if (
            name not in known
            and name not in ours
            and hasattr(kind, "__post_init__")
            and not name.startswith("pages")
        ):
            yield name, kind
        for own, method in vars(kind).items():
            if (
                f"{name}.{own}" not in ours
                and not own.startswith("_")
                and hasattr(getattr(method, "__func__", method), "public")
            ):
                yield f"{name}.{own}", getattr(INSTANCES[name]() if name in INSTANCES else kind, own)


FUNCTIONS = dict(_found())
NEW = [name for name in FUNCTIONS if name not in {**dict(public_names()), **dict(public_methods())}]
"""Records and methods that are in no other table of calls."""
KINDS, DOUBTS = "wrong kinds", "doubtful values"
OTHER_WORDS = {
    **dict.fromkeys(("data", "clean", "corrupt", "batch", "text", "prompts", "source", "target"),
    "prompt|row|token|batch|examples|vector|folder|query"),
    **dict.fromkeys(("answer", "wrong", "sources"), "token|answers"),
    **dict.fromkeys(("estimate", "exact"), "effects"),
    **dict.fromkeys(("heads", "where"), "a part is required"),
    "second": "conditions", "parts": "a neuron", "replacement": "a baseline", "entry": "(an edit|a change) as JSON",
    "values": "model_type|config keys|Config requires|Config: |Config has no field", "rows": "every prompt",
    "index": "at least one token id", "d_model": "d_mlp", "scores": "sender", "labels": "classes|answers",
    "queries": "query",
    "at": "has the dims", "matrices": "at least one matrix", "planted": "an edge", "shard_entries": "per shard",
    "end": "finish with", "pairs": "at least one prompt",
    "path": "is no file|is a folder|beside the weights|a folder that is there",
    "tokenizer": "is no file|is a folder",
    "dtype": "is no file|is a folder", "device": "is no file|is a folder",
    **dict.fromkeys(("prompt", "reference", "subject", "pos", "span"), "prompt|token id|row|vector|mean prediction"),
    "layers": "variant", "layer": "no factors of", "state": "checkpoint", "tokens": "stream must|symbols",
    "truth": "directions", **dict.fromkeys(("edge", "edges"), "no part|no receiver|no sender"), "W_dec": "directions",
}  # fmt: skip
"""What else messages call an argument."""
WHOLE = {("papers", "None"), ("programs", "None"), ("training", "None"), ("strengths", "many numbers")}
"""Arguments that ask for everything there is, or for so much, that it takes minutes."""


def cases() -> Iterator[Case]:
    """Every argument of every function with everything that is put there."""
    for name in FUNCTIONS:
        yield from cases_of(name)


def cases_of(name: str) -> Iterator[Case]:
    """The same of one function."""
    for parameter in signature(FUNCTIONS[name]).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        usual = valid_of(name).get(parameter.name, parameter.default)
        values = [(KINDS, *every) for every in WRONG.items()]
        values += [(DOUBTS, *every) for every in (*DOUBTFUL.items(), *near(usual))]
        values = [each for each in values if (parameter.name, each[1]) not in WHOLE]
        for family, what, make in values:
            yield case(name, parameter.name, what, make, family)


def case(name: str, argument: str, what: str, make: Callable[[], object], family: str) -> Case:
    """The valid call of a function with another thing for one argument."""
    function = FUNCTIONS[name]
    return Case(
        family, name, f"{argument} = {what}",
        lambda: called(name, function, {**valid_of(name), argument: make()}),
        lambda: words_for(argument, make()),
        lambda: (f"{argument}(", "accept(", "function(") if callable(make()) else (),
        lambda: _is_answered(name, argument, make()),
        wrong=lambda found: _wrong(name, argument, make(), found),
    )  # fmt: skip


NOT_THERE: Mapping[str, str] = {
    **dict.fromkeys(("low", "high"), "an interval takes more rows than there are"),
    **dict.fromkeys(("null", "null_sd", "p"), "no chance level is known"),
    **dict.fromkeys(("entropy", "kl", "top_prob", "target_prob"), "no token is there: padding, or no answer"),
    **dict.fromkeys(("peak", "activation"), "lists have fewer places than were asked for"),
    **{
        f"circuits.{name} each": "there is no edge"
        for name in ("score_edges", "edge_attribution", "edge_effects")
    },
    **{
        f"features.feature_cards {name}": "an activation is constant, no token follows, or lists have fewer places"
        for name in (
            "correlation",
            "neuron_correlation",
            "neuron_cosine",
            "partner_cosine",
            "group_activation",
            "loss_change",
            "loss_effect",
        )
    },
    **{
        f"findings.findings {name}": "the model lacks what the claim is about"
        for name in ("value", "each_seed")
    },
    "lenses.jacobian_lens error": "one prompt has no standard error",
    "lenses.output_lens target_logit": "no token follows",
    "causal.agreement rank_correlation": "one of the rankings is constant",
    "lab.depth.splitting order": "the last number of steps has no next one",
    **{
        f"{name}": "an answer has fewer tokens than another"
        for name in (
            "residual.paths value",
            "residual.paths total",
            "residual.paths rounding",
            "lenses.gradient_cosines value",
        )
    },
    "causal.steering value": "all prompts are used for the direction",
    "causal.steering_curve band": "there is no random direction",
    "evaluate_circuit needed": "nodes that are not taken out",
    "attribution_patch agreement": "no prompt has two cells that differ",
    "attribution_patch size_ends": "an interval takes more rows than there are",
    "lenses.patchscope answer_log_prob": "the last target depth has no prompt that an answer could follow",
    **{
        f"editing.changed_tokens {name}": "a text of one token predicts none"
        for name in ("value", "loss", "tuned_loss")
    },
    "circuits.feature_circuit edge_value": "there is no edge, or its weight is below the threshold",
    **{
        f"circuits.feature_circuit {name}": "an interval takes more rows, a null is that of the found circuit"
        for name in ("edge_ends", "faithfulness_ends", "faithfulness_null")
    },
    **{
        f"features.{name} value": "vectors that are all alike have no variance to explain"
        for name in ("reconstruction", "reconstruction_quality", "dictionary_quality", "fitting_sites")
    },
}
"""Variables in which NaN says that there is no number, of one function or any; else where its valid call has NaN."""
UNBOUNDED = {
    "features.dictionary_quality low", "features.dictionary_quality high",  # Fieller's: the denominator may be 0
    "findings.findings lowest", "findings.findings highest",  # regions
    "lab.Datastore.interpolated it",  # with share = 1
}  # fmt: skip
"""Ends that may be infinite, and log-probabilities of 0."""
MEANT: Mapping[str, str] = {
    **dict.fromkeys(
        ("edits.Set values", "edits.Add values", "edits.Swap values"),
        "a score of -inf is a mask, NaN shows what depends on it",
    ),
    "causal.Subspace.swap values": "a score of -inf is a mask",
    "causal.identity pattern": "it is of the pattern's shape, whatever the pattern says",
    "data.open_source data": "rows that are none are set aside when they are read",
    "Batch tokens": "on the device meta they are counted for what memory takes",
    **dict.fromkeys(
        ("lab.rasp.Constant value", "lab.rasp.Aggregate default"),
        "a symbol: anything that can be told from others",
    ),
    "editing.Rome enough": "the search ends at once, or only with its steps",
    "passes.Sampling temperature": "all tokens that are kept are as likely",
    **dict.fromkeys(
        ("findings.Measured low", "findings.Measured high"),
        "NaN of too few, infinite of an interval without an end",
    ),
    "Batch.by_text nothing": "it stands where there is no value",
    "causal.RankAgreement rank_correlation": "there is none where a ranking is constant",
    "lab.training.Training clip": "no gradient is clipped",
    "lab.training.Training keep_seconds": "nothing is kept on the way",
}
"""Arguments that may be infinite or beyond 64 bits, by `function argument`, and why."""


def _wrong(name: str, argument: str, value: object, found: object) -> Ending | None:
    """What is wrong with an answer: to a value that may not be asked, or NaN that nothing finite can give."""
    hint, meant = _hint(name, argument), f"{name} {argument}" in MEANT
    if signature(FUNCTIONS[name]).parameters[argument].kind is inspect.Parameter.VAR_POSITIONAL:
        hint = tuple[hint, ...]  # type: ignore[valid-type]
    if hint is not None and not meant and not fits(value, hint):
        return Ending("let in", f"{argument} is annotated {hint}")
    endless = isinstance(value, float) and not math.isfinite(value)
    if (endless or (type(value) is int and abs(value) >= 2**63)) and not meant:
        return Ending("let in", f"{argument} = {value} is answered")
    odd = {each for each in unfinite(found) if not _says_absent(name, each)}
    if endless or any(unfinite(value)):
        gone = (
            isinstance(value, torch.Tensor | xr.Dataset)
            and not odd
            and isinstance(found, torch.Tensor | xr.Dataset | float)
        )
        lost = f"NaN or infinity of {argument} is nowhere in the answer"
        return Ending("let in", lost) if gone and not meant else None
    odd -= _usual_odd(name)
    return Ending("nan", ", ".join(sorted(odd))) if odd else None


def _says_absent(name: str, odd: str) -> bool:
    """Whether this is NaN in a variable that says so that there is no number."""
    what, _, place = odd.partition(" in ")
    if what == "infinity":
        return f"{name} {place}" in UNBOUNDED
    padded = re.search(
        "[Pp]adding is NaN|NaN at padding|padding, hold NaN|[Pp]added positions hold NaN|Padding holds NaN",
        inspect.getdoc(FUNCTIONS[name]) or "",
    )
    return bool(padded) or not NOT_THERE.keys().isdisjoint((place, f"{name} {place}"))


def _hint(name: str, argument: str) -> object:
    function = FUNCTIONS[name]
    fields = isinstance(function, type) and dataclasses.is_dataclass(function)
    return hints_of(function if fields or not isinstance(function, type) else function.__init__).get(argument)


@functools.cache
def _usual_odd(name: str) -> frozenset[str]:
    """Where the valid call gives NaN or infinity."""
    return frozenset(unfinite(called(name, FUNCTIONS[name], valid_of(name))))


def _is_answered(name: str, argument: str, value: object) -> bool:
    """Whether this very call is that of `test_the_valid_call_is_valid`; of what takes long, whether it is let in."""
    if name in NOT_RUN:
        hint = _hint(name, argument)
        return hint is not None and fits(value, hint)
    return name not in REFUSES and _stands_there(name, argument, value)


def words_for(argument: str, value: object) -> list[str]:
    """What a message may name: the argument, in any number, the value or what is in it, or its kind.

    Of a value of the right kind it may be another argument that it does not fit.
    """
    words = [argument, argument.rstrip("s"), type(value).__name__, getattr(value, "__name__", argument)]
    told = [rf"(?i)\b{re.escape(word)}" for word in words] + [OTHER_WORDS.get(argument, "^$")]
    inside = tuple(value) if isinstance(value, list | tuple | Mapping) and len(value) < 10 else ()
    for each in (value, *inside):
        if isinstance(each, str | Path):
            text = str(each)[:12]
            told.append(re.escape(text) if text.strip() else "empty")
        shown = re.escape(repr(each).strip().partition("\n")[0].strip("'")[:12])
        told.append(rf"(?<![\w.]){shown}")
    if isinstance(value, torch.Tensor):
        told.append(re.escape(str(list(value.shape))))
    return told


def _stands_there(name: str, argument: str, value: object) -> bool:
    """Whether the valid call has this very word, number or None there, said or by default."""
    usual = valid_of(name).get(argument, signature(FUNCTIONS[name]).parameters[argument].default)
    return type(value) is type(usual) and isinstance(value, str | float | int | None) and value == usual


@functools.cache
def valid_of(name: str) -> Mapping[str, object]:
    """The valid call of a function, made once."""
    return types.MappingProxyType(valid(name, FUNCTIONS[name], RECORDS, FIELDS))


assert not set(CALLS) - set(FUNCTIONS), "a line of the table that is no public name"
