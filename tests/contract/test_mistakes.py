"""Forty mistakes that people make at public functions, each with the whole sentence that answers it.

A sentence says what was required, what arrived and, where there is one, the nearest valid thing.
"""

import math
import re
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

import interp
import interp.core
import interp.lab.depth
import interp.lab.training
import interp.zoo
from interp import edits
from tests.contract.calls import OTHERS, TOKENS, model, plain, whole_circuit
from tests.loops import over

MISTAKES: Mapping[str, tuple[Callable[[], object], str]] = {
    "a word for a number": (
        lambda: interp.weights.spectra(model(), top="three"),
        "spectra: top must be int, got 'three' (str)",
    ),
    "a truth for a number": (
        lambda: interp.weights.spectra(model(), top=True),
        "spectra: top must be int, got True (bool)",
    ),
    "a fraction for a number": (
        lambda: interp.weights.spectra(model(), top=2.5),
        "spectra: top must be int, got 2.5 (float)",
    ),
    "None for a number": (
        lambda: interp.weights.spectra(model(), top=None),
        "spectra: top must be int, got None (NoneType)",
    ),
    "a function for a number": (
        lambda: interp.weights.spectra(model(), top=abs),
        "spectra: top must be int, got the function abs",
    ),
    "a whole number of numpy": (
        lambda: interp.weights.spectra(model(), top=np.int64(2)),
        "spectra: top must be int, got np.int64(2): write int(...)",
    ),
    "a number in a tensor": (
        lambda: interp.weights.spectra(model(), top=torch.tensor(3)),
        "spectra: top must be int, got Tensor of torch.int64 and shape []: write int(...)",
    ),
    "more draws than any loop ends": (
        lambda: interp.core.permutation_test(torch.ones(3), torch.ones(3), paired=True, permutations=10**9),
        "permutation_test: permutations must be a whole number up to 10000000, got 1000000000 (int)",
    ),
    "a negative seed": (
        lambda: interp.features.probe(torch.ones(4, 2), torch.tensor([0, 1, 0, 1]), seed=-1),
        "probe: seed must be a whole number from 0 on, got -1 (int)",
    ),
    "a near word": (
        lambda: interp.patch(model(), TOKENS, OTHERS, direction="denoising"),
        "patch: direction must be 'denoise' or 'noise', got 'denoising' (str); nearest: denoise, noise",
    ),
    "a word that is near none": (
        lambda: interp.patch(model(), TOKENS, OTHERS, direction="zzz"),
        "patch: direction must be 'denoise' or 'noise', got 'zzz' (str); no name is close",
    ),
    "a word among many": (
        lambda: interp.attribute(model(), TOKENS, 3, parts="heads"),
        "attribute: parts must be one of 'layer', 'sublayer', 'head', 'source', 'neuron', 'feature', got "
        "'heads' (str); nearest: head",
    ),
    "one word for several": (
        lambda: interp.patch(model(), TOKENS, OTHERS, by="pos"),
        "patch: by must be Sequence[str] or None, got 'pos' (str): write by=('pos',)",
    ),
    "a number for words": (
        lambda: interp.patch(model(), TOKENS, OTHERS, by=3),
        "patch: by must be Sequence[str] or None, got 3 (int)",
    ),
    "one wrong item": (
        lambda: interp.patch(model(), TOKENS, OTHERS, by=("pos", 1)),
        "patch: by must be Sequence[str] or None, got ('pos', 1) (tuple)",
    ),
    "bytes for words": (
        lambda: interp.patch(model(), TOKENS, OTHERS, by=b"pos"),
        "patch: by must be Sequence[str] or None, got b'pos' (bytes)",
    ),
    "an edit alone": (
        lambda: edits.Variant(interp.Edit("L0.mlp", edits.Zero())),
        "Variant: edits must be Sequence[Edit], got Edit(where='L0.mlp', change=Zero()): write edits=(...,)",
    ),
    "values of a mapping": (
        lambda: interp.lab.costs({"small": 3}, lengths=[4]),
        "costs: configs must be Mapping[str, ModelConfig], got {'small': 3} (dict)",
    ),
    "no function": (
        lambda: interp.observe(model(), TOKENS, [], metric=3),
        "observe: metric must be Callable[[Tensor], Float[Tensor, '']] or None, got 3 (int)",
    ),
    "a change as a word": (
        lambda: interp.ablate(model(), TOKENS, change="zero"),
        "ablate: change must be Zero or Mean or Resample, got 'zero' (str): write interp.edits.Zero()",
    ),
    "a class of changes": (
        lambda: interp.ablate(model(), TOKENS, change=edits.Zero),
        "ablate: change must be Zero or Mean or Resample, got the class Zero: write Zero(...)",
    ),
    "a number for a record": (
        lambda: interp.ablate(model(), TOKENS, change=1.5),
        "ablate: change must be Zero or Mean or Resample, got 1.5 (float)",
    ),
    "a maker of metrics": (
        lambda: interp.patch(model(), TOKENS, OTHERS, metric=interp.metrics.kl_divergence),
        "patch: metric must be Metric or a function of the logits at the last token or None, got the function "
        "kl_divergence: kl_divergence makes a metric: call it, kl_divergence(...)",
    ),
    "a word for a metric": (
        lambda: interp.patch(model(), TOKENS, OTHERS, metric="kl"),
        "patch: metric must be Metric or a function of the logits at the last token or None, got 'kl' (str)",
    ),
    "a question's function for its record": (
        lambda: interp.run([interp.heads], model(), TOKENS),
        "questions are records, such as interp.lenses.LogitLens(top=5), got the function heads: write "
        "interp.attention.Heads(...)",
    ),
    "a record that is not called": (
        lambda: interp.run([interp.attention.Heads], model(), TOKENS),
        "questions are records, such as interp.lenses.LogitLens(top=5), got the class Heads: call it, Heads(...)",
    ),
    "a tensor for a question": (
        lambda: interp.run(torch.tensor(3), model(), TOKENS),
        "questions are records, such as interp.lenses.LogitLens(top=5), got Tensor of torch.int64 and shape []",
    ),
    "a model's name": (
        lambda: interp.weights.HeadCircuits("gpt2"),
        "HeadCircuits: model must be a HookedTransformer or a Transformer, got 'gpt2' (str): load it with "
        "HookedTransformer.from_pretrained('gpt2')",
    ),
    "a network of torch": (
        lambda: interp.logit_lens(torch.nn.Sequential(torch.nn.Linear(2, 2)), TOKENS),
        "logit_lens: model must be a HookedTransformer or a Transformer, got Sequential",
    ),
    "the class of models": (
        lambda: interp.logit_lens(interp.HookedTransformer, TOKENS),
        "logit_lens: model must be a HookedTransformer or a Transformer, got the class HookedTransformer",
    ),
    "a module": (
        lambda: interp.logit_lens(math, TOKENS),
        "logit_lens: model must be a HookedTransformer or a Transformer, got the module math",
    ),
    "None for prompts": (
        lambda: interp.logit_lens(model(), None),
        "logit_lens: data must be texts, token ids, a Batch, files, a data set or an iterator of rows or Pairs, "
        "got None (NoneType)",
    ),
    "bytes for prompts": (
        lambda: interp.logit_lens(model(), b"a text"),
        "logit_lens: data must be texts, token ids, a Batch, files, a data set or an iterator of rows or Pairs, "
        "got b'a text' (bytes): a text is a str, .decode() makes one",
    ),
    "fractions for ids": (
        lambda: interp.logit_lens(model(), torch.ones(2, 3)),
        "logit_lens: data must be texts, token ids, a Batch, files, a data set or an iterator of rows or Pairs, "
        "got Tensor of torch.float32 and shape [2, 3]",
    ),
    "ids without numbers": (
        lambda: interp.logit_lens(model(), torch.ones(2, 3, dtype=torch.long, device="meta")),
        "logit_lens: data must be texts, token ids, a Batch, files, a data set or an iterator of rows or Pairs, "
        "got Tensor of no numbers (device meta), torch.int64 and shape [2, 3]",
    ),
    "sparse ids": (
        lambda: interp.logit_lens(model(), torch.ones(2, 3, dtype=torch.long).to_sparse()),
        "logit_lens: data must be texts, token ids, a Batch, files, a data set or an iterator of rows or Pairs, "
        "got Tensor of layout sparse_coo, torch.int64 and shape [2, 3]",
    ),
    "a batch without numbers": (
        lambda: interp.logit_lens(model(), interp.Batch(torch.ones(2, 3, dtype=torch.long, device="meta"))),
        "token ids are required, got a batch of no numbers (device meta)",
    ),
    "a mapping that no tokenizer returns": (
        lambda: interp.logit_lens(model(), {"a": 1}),
        "logit_lens: data must be texts, token ids, a Batch, files, a data set or an iterator of rows or Pairs, "
        "got {'a': 1} (dict): a mapping requires 'input_ids', as a tokenizer returns it",
    ),
    "a fraction for an answer": (
        lambda: interp.token_attribution(model(), TOKENS, 1.5),
        "token_attribution: answer must be a text or an id, one for all prompts or one for each or None, got 1.5 "
        "(float)",
    ),
    "whole numbers for fractions": (
        lambda: edits.Project(torch.ones(2, 3).long()),
        "Project: directions must be Float[Tensor, '*k d'], got Tensor of torch.int64 and shape [2, 3]",
    ),
    "three axes for two": (
        lambda: interp.lab.depth.flow(torch.ones(2, 3, 4), qk=torch.eye(4), ov=torch.eye(4)),
        "flow: x must be Float[Tensor, 'n d'], got Tensor of torch.float32 and shape [2, 3, 4]",
    ),
    "a dtype that nobody has": (
        lambda: interp.zoo.load("groundtruth-induction", dtype="bf16"),
        "load: dtype must be a torch dtype or None, got 'bf16' (str)",
    ),
    "a word for a task's number": (
        lambda: interp.tasks.RepeatedSequences(d_vocab="x"),
        "RepeatedSequences: d_vocab must be int, got 'x' (str)",
    ),
    "a number for a training's device": (
        lambda: interp.lab.training.Training(device=3),
        "Training: device must be the name of a device such as 'cpu' or 'cuda:1', got 3 (int)",
    ),
    "a fraction for a window": (
        lambda: interp.lab.Dilated(width=1.5),
        "Dilated: width must be int, got 1.5 (float)",
    ),
    "a number for a factor": (
        lambda: interp.core.FactoredMatrix(1, torch.ones(2, 2)),
        "FactoredMatrix: A must be Float[Tensor, '... left mid'], got 1 (int)",
    ),
    "an infinite weight of a temperature": (
        lambda: interp.model.LogSteps(2, math.inf),
        "LogSteps: weight must be a number up to 1e+30, got inf (float)",
    ),
    "no edge": (
        lambda: interp.circuits.edge_effects(
            plain(), TOKENS, OTHERS, metric=interp.logit_difference(3, 4), edges=()
        ),
        "edges must name at least one edge, or be None for all, got none",
    ),
    "fewer nodes than none": (
        lambda: interp.evaluate_circuit(
            plain(), TOKENS, OTHERS, whole_circuit(), metric=interp.logit_difference(3, 4), nodes=-1
        ),
        "nodes must be a number, at least 0, got -1",
    ),
    "a device that nobody has": (
        lambda: interp.zoo.load("groundtruth-induction", device="gpu"),
        "load: device must be a device such as 'cpu' or 'cuda:1', got 'gpu' (str)",
    ),
}


@over("mistake", MISTAKES)
def test_a_mistake_is_answered_with_its_whole_sentence(mistake: str) -> None:
    call, sentence = MISTAKES[mistake]
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        call()


def test_there_are_at_least_forty() -> None:
    assert len(MISTAKES) >= 40
