"""Every public function and record with every other value in every argument, one at a time."""

import dataclasses
import functools
import importlib
import inspect
import math
import random
import re
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import xarray as xr

import interp
from interp import lab, tasks
from interp.core.fitting import fits
from interp.core.hints import hints_of
from tests.contract.calls import (
    CALLS,
    NOT_RUN,
    REFUSES,
    TEXT,
    TOKENS,
    WORDS,
    called,
    compiled,
    examples,
    model,
    numbers,
    public_methods,
    public_names,
    signature,
    valid,
)
from tests.fuzz.judge import Case, Ending, unfinite
from tests.fuzz.values import DOUBTFUL, WRONG, near

MADE_BY_US: Mapping[str, str] = {
    "answers, which functions give": """
        circuits.AttributionGraph circuits.Edge editing.SingularValues editing.TwoPasses lenses.GradientFactors
        features.LayerWeights weights.SingularTriples tasks.Fact tasks.FactPrompt tasks.IndirectObject tasks.TaskPairs
        model.LayerWeights
        model.Memory model.Trace passes.HookPoint runs.Results verify.Contract verify.ContractLine zoo.Demo
        lab.rasp.Exactness lab.training.Trained Note residual.IncompleteSumError""",
    "names of places, which all that takes a part or a place checks": "Part model.Site",
    "records without a field": "features.ReLU features.Gated edits.Detach edits.Zero",
    "what a protocol asks of the user's own class": """
        tasks.Task lab.training.TrainingData verify.PairReference verify.Reference passes.Ask passes.ByRow
        passes.Question passes.Reading passes.Staged passes.WithoutData""",
    "opened by methods, of which `loaders` damages the files": """
        HookedEncoderDecoder.from_pretrained runs.ActivationStore runs.Record families.SentencePieceTokenizer
        families.StoredTokenizer lab.training.PackedTexts lab.training.Vocabulary""",
    "made by functions of a config": "lab.rasp.Compiled",
    "changes what is imported": "compat.install compat.uninstall",
}  # fmt: skip
"""Public classes that are given nothing of a user's here, and why; pictures and pages are those of `results`."""
RECORDS: Mapping[str, Mapping[str, Callable[[], object]]] = {
    "core.FactoredMatrix": {"A": lambda: numbers(4, 2), "B": lambda: numbers(2, 4)},
    "model.EncoderDecoderConfig": {
        "encoder": lambda: lab.training.encoder_decoder(8, 8).encoder,
        "decoder": lambda: lab.training.encoder_decoder(8, 8).decoder},
    "tasks.Examples": {"batch": lambda: examples().batch},
    "Batch.of": {"rows": lambda: [[5, 6], [7]]},
    "HookedEncoderDecoder.run_with_cache": dict.fromkeys(("source", "target"), lambda: torch.tensor([[1, 2]])),
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
    "lab.DualChunk": {"length": lambda: 3},
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
    "prompt": lambda: TEXT, **WORDS,
}  # fmt: skip
"""What a field of this name is, where a line says nothing else."""
INSTANCES: Mapping[str, Callable[[], object]] = {
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
    "values": "model_type|config keys", "d_model": "d_mlp", "scores": "sender", "labels": "classes|answers",
    "queries": "query",
    "at": "has the dims", "matrices": "at least one matrix", "planted": "an edge", "shard_entries": "per shard",
    "end": "finish with", "pairs": "at least one prompt",
    "path": "is no file|is a folder|beside the weights|a folder that is there",
    "tokenizer": "is no file|is a folder",
    "dtype": "is no file|is a folder", "device": "is no file|is a folder",
    **dict.fromkeys(("prompt", "reference", "subject", "pos", "span"), "prompt|token id|row|vector|mean prediction"),
    "layers": "variant", "state": "checkpoint", "tokens": "stream must|symbols",
    "truth": "directions", "edge": "no part", "W_dec": "directions",
}  # fmt: skip
"""What else messages call an argument."""
WHOLE = {("papers", "None"), ("programs", "None")}
"""Arguments that ask for everything there is, minutes of work, when they are left out."""


def cases() -> Iterator[Case]:
    """Every argument of every function with everything that is put there."""
    for name in FUNCTIONS:
        yield from cases_of(name)


def cases_of(name: str, draw: random.Random | None = None, each: int = 0) -> Iterator[Case]:
    """The same of one function; with `draw` so many of them, of arguments that are drawn."""
    arguments = [
        parameter
        for parameter in signature(FUNCTIONS[name]).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    if draw is not None:
        arguments = draw.choices(arguments, k=each) if arguments else []
    for parameter in arguments:
        usual = valid_of(name).get(parameter.name, parameter.default)
        values = [(KINDS, *every) for every in WRONG.items()]
        values += [(DOUBTS, *every) for every in (*DOUBTFUL.items(), *near(usual))]
        values = [each for each in values if (parameter.name, each[1]) not in WHOLE]
        for family, what, make in values if draw is None else [draw.choice(values)]:
            yield case(name, parameter.name, what, make, family)


def case(name: str, argument: str, what: str, make: Callable[[], object], family: str) -> Case:
    """The valid call of a function with another thing for one argument."""
    function = FUNCTIONS[name]
    return Case(
        family, name, f"{argument} = {what}",
        lambda: called(name, function, {**valid_of(name), argument: make()}),
        lambda: words_for(argument, make()),
        lambda: (f"{argument}(", "accept(") if callable(make()) else (),
        lambda: _is_answered(name, argument, make()),
        wrong=lambda found: _wrong(name, argument, make(), found),
    )  # fmt: skip


NOT_THERE: Mapping[str, str] = {
    **dict.fromkeys(("low", "high"), "an interval takes more rows than there are"),
    **dict.fromkeys(("null", "null_sd", "p"), "no chance level is known"),
    **dict.fromkeys(("entropy", "kl", "top_prob", "target_prob"), "no token is there: padding, or no answer"),
    **dict.fromkeys(("peak", "activation"), "lists have fewer places than were asked for"),
    **{
        f"features.{name} value": "vectors that are all alike have no variance to explain"
        for name in ("reconstruction", "reconstruction_quality", "dictionary_quality")
    },
}
"""Variables in which NaN says that there is no number, of one function or any; else where its valid call has NaN."""
MEANT: Mapping[str, str] = {
    **dict.fromkeys(
        ("edits.Set values", "edits.Add values"), "a score of -inf is a mask, NaN shows what depends on it"
    ),
    "Batch tokens": "on the device meta they are counted for what memory takes",
    "lab.rasp.Constant value": "a symbol: anything that can be told from others",
    "lab.training.Training clip": "no gradient is clipped",
    "lab.training.Training keep_seconds": "nothing is kept on the way",
}
"""Arguments that may be infinite or beyond 64 bits, by `function argument`, and why."""


def _wrong(name: str, argument: str, value: object, found: object) -> Ending | None:
    """What is wrong with an answer: to a value that may not be asked, or NaN that nothing finite can give."""
    hint, meant = _hint(name, argument), f"{name} {argument}" in MEANT
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
        return Ending("let in", f"NaN or infinity of {argument} is nowhere in the answer") if gone else None
    odd -= _usual_odd(name)
    return Ending("nan", ", ".join(sorted(odd))) if odd else None


def _says_absent(name: str, odd: str) -> bool:
    """Whether this is NaN in a variable that says so that there is no number."""
    what, _, place = odd.partition(" in ")
    return what != "infinity" and not NOT_THERE.keys().isdisjoint((place, f"{name} {place}"))


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
