"""A call of every public function that a model goes into, on SmolLM2, with arguments that a researcher would give.

`CALLS` and `WORDS` are read as those of `tests/contract/calls.py`, which has the smallest calls on models of two
layers; here are prompts, layers and sizes for thirty layers of nine heads. `tests/real/test_calls.py` makes each call
once, and `experiments/bench/real.py` prints what each costs.
"""

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import transformers
import xarray as xr

import interp
import interp.dynamics
import interp.families
from interp import HookedTransformer
from interp.causal import Subspace
from interp.circuits import Circuit
from interp.editing import EditCase, FineTuning
from interp.edits import Zero
from interp.families.reference import reference_of
from interp.tasks import Examples, RepeatedTokens
from tests.contract import calls
from tests.contract.calls import Made
from tests.real import wheels

once = functools.cache

PROMPTS = (
    "When Mary and John went to the store, John gave a drink to",
    "Then Tom and Anna were at the park, and Tom gave a ball to",
    "Mary and John sat down. John handed a book to",
)
CORRUPT = (
    "When Mary and John went to the store, Mary gave a drink to",
    "Then Tom and Anna were at the park, and Anna gave a ball to",
    "Mary and John sat down. Mary handed a book to",
)
ANSWERS, WRONG = (" Mary", " Anna", " Mary"), (" John", " Tom", " John")
FACT = "The Eiffel Tower is in the city of"
TEXTS = (
    "Water boils when it is hot enough, and it freezes when it is cold.",
    "The Eiffel Tower is in the city of Paris, which is the capital of France. It was built in 1889.",
    "She opened the window and looked at the garden.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "One, two, three, four, five, six, seven, eight, nine, ten.",
    "The old man walked slowly along the river, as he had done every morning for thirty years, and thought of the sea.",
    "In 1969 two people walked on the moon for the first time.",
    "A cat sat on the mat. The dog sat beside it. Nobody said a word for a long time.",
)
LABELS = (True, True, False, False, False, False, True, False)
JOY = ("I love this film", "What joy it was", "This is a wonderful day", "He smiled happily at us")
MISERY = ("I hate this film", "What misery it was", "This is a terrible day", "He frowned angrily at us")
MIDDLE, WRITER = 15, "blocks.15.mlp.W_out"


@once
def folder() -> Path:
    """The ordinary folder, which is mapped when it is opened."""
    return wheels.folder_of("smollm2")


@once
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained(folder())


@once
def tuned() -> HookedTransformer:
    """A model of the same kind: one matrix is another."""
    other = HookedTransformer.from_pretrained(folder())
    with torch.no_grad():
        other.transformer.block(MIDDLE).mlp.out.weight.mul_(1.5)
    return other


@once
def theirs() -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32)


def metric() -> interp.metrics.Metric:
    return interp.logit_difference(list(ANSWERS), list(WRONG))


@once
def edges() -> xr.Dataset:
    """The scores of all edges by first order, prompt by prompt."""
    return interp.circuits.edge_attribution(model(), list(PROMPTS), list(CORRUPT), metric=metric(), each=True)


@once
def neuron_graph() -> xr.Dataset:
    return interp.circuits.attribution_graph(model(), PROMPTS[0], ANSWERS[0], most=40)


@once
def circuit() -> Circuit:
    return interp.find_circuit(
        model(), list(PROMPTS), list(CORRUPT), metric=metric(), method="eap", edges=154
    )


@once
def circuit_of_one() -> Circuit:
    """A circuit of the first prompt."""
    one = interp.logit_difference(ANSWERS[0], WRONG[0])
    return interp.find_circuit(model(), PROMPTS[0], CORRUPT[0], metric=one, method="eap", edges=154)


def reference() -> interp.verify.Reference:
    """Transformers' network of the same file."""
    return reference_of(theirs(), model().transformer, torch.float32)


@once
def sae() -> interp.features.Dictionary:
    """A dictionary of eight times the width, not trained."""
    draw, d = torch.Generator().manual_seed(0), model().cfg.d_model
    shapes = {"W_enc": (d, 8 * d), "b_enc": (8 * d,), "W_dec": (8 * d, d), "b_dec": (d,)}
    return interp.features.Dictionary(
        interp.features.TopK(32),
        {name: torch.randn(shape, generator=draw) / d**0.5 for name, shape in shapes.items()},
        reads=f"blocks.{MIDDLE}.hook_resid_post",
    )


@once
def with_features() -> interp.HookedTransformer:
    """The model with that dictionary in its block."""
    return model().with_dictionaries([sae()])


@once
def mend() -> interp.editing.Mend:
    return interp.editing.Mend.untrained(model(), [WRITER], rank=4)


@once
def keys() -> object:
    return interp.editing.key_moment(model(), list(TEXTS), layer=2)


@once
def attribution() -> xr.Dataset:
    return interp.token_attribution(model(), list(PROMPTS), list(ANSWERS), list(WRONG))


@once
def lens() -> interp.lenses.TunedLens:
    return interp.lenses.train_tuned_lens(model(), list(TEXTS), steps=1)


@once
def state() -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """The weights and the config as TransformerLens writes them."""
    return interp.compat.to_hooked_state(model())


def new_folder() -> Path:
    return Path(tempfile.mkdtemp())


@once
def state_file() -> Path:
    path = new_folder() / "state.pt"
    torch.save(state()[0], path)
    return path.absolute()


@once
def mib_file() -> Path:
    path = new_folder() / "scores.json"
    interp.circuits.write_mib(path, model(), edges())
    return path.absolute()


@once
def graph_file() -> Path:
    path = new_folder() / "graph.json"
    interp.circuits.write_attribution_graph(circuit_of_one(), graph_prompt(), path)
    return path.absolute()


@once
def sae_folder() -> Path:
    path = new_folder() / "sae"
    interp.features.save(sae(), path)
    return path.absolute()


def graph_prompt() -> interp.circuits.GraphPrompt:
    tokens = tuple(model().to_str_tokens(PROMPTS[0]))
    return interp.circuits.GraphPrompt(PROMPTS[0], tokens, ANSWERS[0], 0.5, WRONG[0])


@once
def rows() -> Examples:
    return Examples(model().to_batch(list(TEXTS[:4])))


def direction() -> Subspace:
    draw = torch.Generator().manual_seed(0)
    return Subspace(f"blocks.{MIDDLE}.hook_resid_post", torch.randn(1, model().cfg.d_model, generator=draw))


def last_word() -> torch.Tensor:
    """The last two real tokens of each prompt."""
    keep = model().to_batch(list(PROMPTS)).real
    from_end = keep.flip(1).cumsum(1).flip(1)
    return keep & (from_end <= 2)


@once
def activations() -> torch.Tensor:
    """The stream in the middle at every real token of the texts."""
    read = interp.Read(f"blocks.{MIDDLE}.hook_resid_post")
    batch = model().to_batch(list(TEXTS))
    return interp.observe(model(), batch, [read]).trace[read][batch.real]


def fact() -> EditCase:
    return EditCase(
        FACT, " Rome", "Eiffel Tower", {"neighbourhood": (("The Louvre is in the city of", " Paris"),)}
    )


def shift(subject: object, given: EditCase) -> interp.editing.WeightEdit:
    return interp.editing.shift_edit(model(), given.prompt, answer=given.answer, layer=MIDDLE, eta=0.1)


def texts(*given: str) -> Made:
    return lambda: list(given)


WORDS: Mapping[str, Made] = {
    "model": model, "data": texts(*PROMPTS), "clean": texts(*PROMPTS), "corrupt": texts(*CORRUPT),
    "circuits": model, "circuit": circuit, "answer": texts(*ANSWERS), "wrong": texts(*WRONG),
    "layer": lambda: MIDDLE, "dictionary": sae, "site": lambda: f"blocks.{MIDDLE}.hook_resid_post",
    "part": lambda: "L23H3", "head": lambda: "L23H3", "parts": lambda: ["L15N3", "L15N4"], "src": lambda: "L16H0",
    "dst": lambda: "L17H3", "scores": edges, "metric": metric, "matrix": lambda: "OV", "kind": lambda: "K",
    "queries": lambda: [-1], "keys": lambda: [0], "key": lambda: 2, "span": last_word, "subject": lambda: "Mary",
    "labels": lambda: list(LABELS), "attribution": attribution, "load": lambda: {"step10": model()}.__getitem__,
    "revisions": lambda: ["step10"], "eta": lambda: 0.1, "folder": new_folder, "path": folder,
    "vectors": activations, "tokens": lambda: [" Mary", " John"], "prompts": texts(*PROMPTS), "text": lambda: TEXTS[1],
    "tuned": tuned, "directions": lambda: [direction()], "hf_model": theirs, "change": Zero,
    "config": lambda: model().cfg, "edits": lambda: [interp.Edit("L23H3", Zero())],
}  # fmt: skip
"""What a required argument of this name is, where a line says nothing else."""

METRIC: Mapping[str, Made] = {"metric": metric}
BOTH: Mapping[str, Made] = {"answer": WORDS["answer"], "wrong": WORDS["wrong"]}
ONE_PAIR: Mapping[str, Made] = {
    "clean": lambda: PROMPTS[0], "corrupt": lambda: CORRUPT[0],
    "metric": lambda: interp.logit_difference(ANSWERS[0], WRONG[0]),
}  # fmt: skip
ONE: Mapping[str, Made] = {"data": texts(PROMPTS[0])}
LONG: Mapping[str, Made] = {"data": texts(*TEXTS)}
REPEATED: Mapping[str, Made] = {"repeats": lambda: RepeatedTokens(period=25, repeats=2, rows=4)}
KINDS: Mapping[str, Made] = {"positive": texts(*JOY), "negative": texts(*MISERY)}
ANTONYMS: Mapping[str, Made] = {
    "tasks": lambda: {"antonym": interp.tasks.load_word_pairs()["antonym"][:24]},
    "lists": lambda: interp.tasks.PairLists(shots=4, rows=3),
}
TUNING: Mapping[str, Made] = {"names": lambda: [WRITER], "tuning": lambda: FineTuning(steps=2)}
ONE_FACT: Mapping[str, Made] = {"data": lambda: FACT, "answer": lambda: " Rome"}

CALLS: Mapping[str, Mapping[str, Made]] = {
    # looking
    "ablate": METRIC, "attribute": BOTH, "backward_lens": BOTH | {"top": lambda: 5},
    "attribution_patch": METRIC, "patch": METRIC | {"by": lambda: ("layer", "pos")}, "path_patch": METRIC,
    "heads": REPEATED | {"sentences": lambda: None}, "attention.attention_kernel": REPEATED,
    "logit_lens": {"answer": WORDS["answer"], "top": lambda: 5},
    "observe": {"batch": texts(*PROMPTS),
                "reads": lambda: [interp.Read(f"blocks.{i}.hook_resid_post") for i in range(30)]},
    "run": {"questions": lambda: [interp.lenses.LogitLens(top=5), interp.attention.AttentionEntropy()],
            "data": texts(*TEXTS)},
    "report": {"prompt": lambda: PROMPTS[0], "answer": lambda: ANSWERS[0], "wrong": lambda: WRONG[0]},
    "token_attribution": BOTH, "frame": {"result": attribution},
    "copying": {"ranks": lambda: True},
    # causes
    "causal.align": {"base": texts(PROMPTS[0], CORRUPT[0], PROMPTS[0], CORRUPT[0]),
                     "source": texts(CORRUPT[0], PROMPTS[0], CORRUPT[0], PROMPTS[0]),
                     "answer": texts(" John", " Mary", " John", " Mary"),
                     "layers": lambda: [MIDDLE], "pos": lambda: [14], "descent": lambda: interp.causal.Descent(3)},
    "causal.batches": {"pairs": lambda: interp.tasks.IndirectObjects(rows=4).pairs(model().text.tokenizer)},
    "causal.continuations": {"pairs": lambda: [(PROMPTS[0], " Mary."), (FACT, " Paris, which")]},
    "causal_trace": {"data": texts(PROMPTS[0]), "subject": lambda: "Mary", "answer": lambda: ANSWERS[0],
                     "samples": lambda: 3},
    "causal.knock_out": METRIC, "causal.short_circuit": METRIC,
    "causal.missed_effects": METRIC | {"by": lambda: ("layer", "head"), "subsets": lambda: 20},
    "causal.patch_preset": METRIC | {"preset": lambda: "attn_head_out_all_pos"},
    "causal.subject_spread": {"data": texts(PROMPTS[0], PROMPTS[2])},
    "causal.average_indirect_effect": ANTONYMS,
    "causal.function_vectors": ANTONYMS | {"random": lambda: 5},
    "causal.linear_relation": {"pairs": lambda: interp.tasks.load_word_pairs()["country_capital"][:16],
                               "template": lambda: "The capital of {input} is {output}", "examples": lambda: 2},
    "causal.feature_edits": {"model": lambda: model().with_dictionaries([sae()]), "feature": lambda: f"L{MIDDLE}F3",
                             "amount": lambda: 2.0},
    "causal.steering": KINDS, "causal.steering_curve": METRIC | {"random": lambda: 9, "loss_on": texts(*TEXTS[:2])},
    # circuits
    "circuits.circuit_curve": METRIC | {"fractions": lambda: (0.01, 0.1)},
    "circuits.edge_attribution": METRIC, "circuits.score_edges": METRIC,
    "circuits.feature_circuit": METRIC | {
        "model": with_features, "corrupt": texts(*CORRUPT), "node_threshold": lambda: 0.01, "most": lambda: 8,
        "draws": lambda: 1},
    "circuits.edge_effects": {**ONE_PAIR, "edges": lambda: 100},
    "circuits.edge_stability": {"top": lambda: 100}, "evaluate_circuit": METRIC,
    "find_circuit": METRIC | {"edges": lambda: 154}, "circuits.interchange": METRIC | {"circuits": circuit},
    "circuits.recovery": {"tables": lambda: [edges()], "planted": lambda: ["L23H3->logits"]},
    "tasks.read_facts": {"path": calls.facts_file}, "data.read_chats": {"path": calls.chats_file},
    "circuits.attribution_graph": {"prompt": lambda: PROMPTS[0], "most": lambda: 40},
    "circuits.prune_graph": {"graph": neuron_graph},
    "circuits.graph_scores": {"model": with_features, "prompts": lambda: PROMPTS[:2], "most": lambda: 8},
    "circuits.edge_heads": {"prompt": lambda: PROMPTS[0], "graph": neuron_graph, "most": lambda: 8},
    "circuits.qk_attribution": {"prompt": lambda: PROMPTS[0], "head": lambda: "L5H1", "key": lambda: 1,
                                "most": lambda: 8},
    "circuits.graph_interventions": {"prompt": lambda: PROMPTS[0], "graph": neuron_graph},
    "circuits.read_attribution_graph": {"path": graph_file}, "circuits.read_mib": {"path": mib_file},
    "circuits.write_attribution_graph": {"circuit": circuit_of_one, "prompt": graph_prompt,
                                        "path": lambda: new_folder() / "graph.json"},
    "circuits.write_mib": {"path": lambda: new_folder() / "scores.json"},
    # depth and training
    "lab.depth.consensus": {}, "dynamics.in_context": LONG | {"early": lambda: 2, "late": lambda: 8},
    "dynamics.influence": {"rows": rows, "queries": rows, "layers": lambda: [MIDDLE]},
    "dynamics.learning_coefficient": {
        "rows": rows, "sampler": lambda: interp.dynamics.Langevin(chains=1, steps=3, burn_in=1)},
    "dynamics.loss_map": LONG | {"early": lambda: 2, "late": lambda: 8},
    "dynamics.over_checkpoints": {"question": lambda: interp.lenses.LogitLens(top=5), "data": texts(*PROMPTS)},
    "lab.depth.integrated": {"model": lambda: model().transformer, "tokens": lambda: model().to_tokens(PROMPTS[0])},
    "lab.depth.splitting": {"steps": lambda: (1, 2), "fine": lambda: 4},
    "lab.depth.switched_off": {"off": lambda: ["skip"]},
    # changing
    "editing.diff": {}, "editing.diff_interactions": {"parts": lambda: ["L15.mlp", "L16.attn", "L23H3"]},
    "editing.adapted": {"vectors": lambda: {WRITER: torch.ones(576)}},
    "editing.edit_table": {"cases": lambda: [fact()], "editors": lambda: {"shift": shift},
                           "continuation": lambda: interp.editing.Continuation(20)},
    "editing.finetune_edit": ONE_FACT | {"tuning": lambda: FineTuning(steps=2)},
    "editing.gradient_edit": ONE_FACT, "editing.shift_edit": ONE_FACT, "editing.mend_edit": ONE_FACT | {"mend": mend},
    "editing.key_moment": LONG | {"layer": lambda: 2},
    "editing.memit_edit": {"facts": lambda: [fact()], "keys": lambda: [keys()],
                           "search": lambda: interp.editing.Rome(steps=2)},
    "editing.rome_edit": {"prompt": lambda: FACT, "answer": lambda: " Rome", "subject": lambda: "Eiffel Tower",
                          "keys": keys, "rome": lambda: interp.editing.Rome(steps=2)},
    "editing.reinforce_z": TUNING | {"reward": lambda: lambda new: new[:, 0].double(), "samples": lambda: 2},
    "editing.train_z": TUNING | {"loss": lambda: lambda logits: logits.square().mean()},
    "editing.train_mend": TUNING | {"cases": lambda: [fact()], "rank": lambda: 4, "batch_size": lambda: 1},
    "editing.two_passes": {"vectors": lambda: {},
                           "dispatch": lambda: interp.editing.Dispatch((1,), {"a": 5, "b": 6})},
    # features
    "features.examples_table": {"result": lambda: interp.features.top_examples(
        model(), list(TEXTS), f"blocks.{MIDDLE}.mlp.hook_post", cells=[3, 4])},
    "features.feature_cards": {"site": lambda: f"blocks.{MIDDLE}.hook_resid_post"},
    "features.neuronpedia_json": {"result": lambda: interp.features.feature_cards(
        model(), list(TEXTS), sae(), f"blocks.{MIDDLE}.hook_resid_post", most=3)},
    "features.load": {"path": sae_folder}, "features.save": {"folder": lambda: new_folder() / "sae"},
    "features.probe": {"activations": lambda: activations()[:40], "labels": lambda: [True, False] * 20},
    "features.probe_neurons": {"data": texts(*TEXTS * 3), "labels": lambda: list(LABELS * 3)},
    "features.reconstruction_quality": {"activations": activations},
    "features.dictionary_quality": {"reference": texts(*TEXTS[:3])}, "features.reconstruction": {},
    "features.fitting_sites": {},
    "features.top_examples": LONG | {"site": lambda: f"blocks.{MIDDLE}.mlp.hook_post", "cells": lambda: [3, 4]},
    "features.train_dictionary": {"activations": activations, "kind": lambda: interp.features.TopK(32),
                           "d_sae": lambda: 2304, "steps": lambda: 5, "batch_size": lambda: 64},
    # lenses
    "lenses.by_depth": {"result": lambda: interp.logit_lens(model(), PROMPTS[0], top=5)},
    "lenses.compare_lenses": {"lenses": lambda: {"logit lens": None, "tuned lens": lens()},
                              "sites": lambda: "resid_pre"},
    "lenses.gradient_cosines": BOTH, "lenses.gradient_factors": BOTH, "lenses.gradient_rank": BOTH,
    "lenses.jacobian_lens": {"data": texts(TEXTS[1]), "layers": lambda: [MIDDLE],
                             "tokens": lambda: [" Paris", " Rome"]},
    "lenses.late_layers": BOTH, "lenses.output_lens": BOTH | {"top": lambda: 5},
    "lenses.patchscope": ONE | {"top": lambda: 5},
    "lenses.train_tuned_lens": LONG | {"steps": lambda: 2},
    # sums of paths, tokens
    "residual.paths": BOTH, "residual.path_matrix": {"heads": lambda: ("L16H0", "L17H3")},
    "tokens.compare_methods": BOTH | ONE | {"answer": lambda: [" Mary"], "wrong": lambda: [" John"],
                                        "draws": lambda: 1},
    "tokens.erasure": BOTH,
    "tokens.evidence": {"known": lambda: torch.ones(attribution()["value"].shape).bool()},
    "tokens.routes": {"shares": lambda: interp.tokens.flow_routes(model(), list(PROMPTS))},
    # weights
    "weights.bigram_table": LONG, "weights.composition_directions": {"top": lambda: 5},
    "weights.directions": {"vectors": lambda: activations()[:8], "top": lambda: 5},
    "weights.matching_scores": {"previous": lambda: torch.rand(30, 9)},
    "weights.neurons": {"top": lambda: 5},
    "weights.skip_trigrams": {"sources": lambda: [" Mary", " John"], "top": lambda: 5},
    "weights.singular_directions": {"count": lambda: 3, "top": lambda: 5}, "weights.top_pairs": {"top": lambda: 10},
    # models as such
    "model.mean_next_token_loss": {"logits": lambda: model()(list(TEXTS[:1])),
                                   "tokens": lambda: model().to_tokens(TEXTS[0])},
    "model.next_token_loss": {"logits": lambda: model()(list(TEXTS[:1])),
                              "tokens": lambda: model().to_tokens(TEXTS[0])},
    "model.next_token_loss_of": {"model": lambda: model().transformer, "tokens": lambda: model().to_tokens(TEXTS[0]),
                                 "stream": lambda: activations()[None, : model().to_tokens(TEXTS[0]).shape[1]]},
    "runs.answered": {"question": lambda: interp.lenses.LogitLens(top=5), "data": texts(*PROMPTS)},
    "runs.store_activations": LONG | {"sites": lambda: [f"blocks.{MIDDLE}.hook_resid_post"]},
    "verify.contract": {"reference": reference},
    "lab.training.mean_loss": {"model": lambda: model().transformer, "examples": rows},
    "lab.training.scores": {"model": lambda: model().transformer, "examples": rows},
    "lab.training.beam_search": {"model": lambda: model().transformer, "max_new_tokens": lambda: 3,
                                 "prompts": lambda: model().to_batch(list(PROMPTS))},
    "lab.training.head_importance": {"model": lambda: model().transformer, "examples": rows},
    "lab.training.prune_heads": {"model": lambda: model().transformer, "examples": rows, "count": lambda: 1},
    "families.load_state": {"tensors": lambda: dict(model().transformer.state_dict())},
    "families.config_of": {"values": lambda: theirs().config.to_dict()}, "families.ends_of": {"source": folder},
    "families.tokenizer_of": {"folder": folder},
    "families.save": {"model": lambda: model().transformer, "folder": lambda: new_folder() / "saved"},
    "compat.from_hooked_transformer": {"state": lambda: state()[0], "config": lambda: state()[1]},
    "compat.load_hooked": {"path": state_file, "config": lambda: state()[1]},
    # methods
    "HookedTransformer.from_pretrained": {"source": folder},
    "HookedTransformer.chat": {"messages": lambda: [{"role": "user", "content": "Who wrote Hamlet?"}]},
    "HookedTransformer.to_batch": {"prompts": lambda: list(PROMPTS)},
    "HookedTransformer.to_single_token": {"text": lambda: " Mary"},
    "HookedTransformer.to_str_tokens": {"prompt": lambda: PROMPTS[0]},
    "HookedTransformer.edited": {}, "HookedTransformer.to_string": {"tokens": lambda: [5, 6]},
    "HookedTransformer.to_tokens": {"text": lambda: PROMPTS[0]},
    "HookedTransformer.to_texts": {"batch": lambda: model().to_batch(list(PROMPTS))},
    "HookedTransformer.generate": {"max_new_tokens": lambda: 10},
    "HookedTransformer.stream": {"prompt": lambda: PROMPTS[0], "max_new_tokens": lambda: 5},
}  # fmt: skip
"""What is special about the call of a public name; those that are not here have nothing special."""

OF_NO_SUCH_MODEL: Mapping[str, str] = {
    "lab.training.config_for": "the model is a name", "lab.training.xavier": "draws all weights anew",
    **dict.fromkeys(("lab.training.exactly_right", "verify.pair_contract"), "of encoder-decoders"),
}  # fmt: skip
"""What has a model among its arguments, but none like this."""
OF_FILES = ("families.any_from_folder", "families.from_folder", "families.is_encoder_decoder", "families.tokenizer_for",
            "families.tokenizer_in")  # fmt: skip
"""What reads the folder, beside those that `CALLS` has."""
GIVEN = {"model", "circuits", "load", "hf_model"}
"""The arguments that models are given as."""
REFUSED: Mapping[str, str] = {
    "weights.superposition": "superposition requires a plain MLP with biases",
}  # fmt: skip
"""What a model like this is refused by, and the sentence."""
MOST = 480
"""MiB by which a call may grow: the weights are 513."""
LARGER: Mapping[str, int] = {
    # the weights once more, in memory of their own
    **dict.fromkeys(("families.any_from_hf_model", "families.from_hf_model", "families.load_state"), 600),
    "residual.orders": 900,  # logits of 31 orders, thrice while they are added up
    "causal.align": 800,  # a null: the model with all weights in random order
    # theirs have W_U and W_E apart, and every head's matrices
    "compat.from_hooked_transformer": 800, "compat.to_hooked_state": 900, "compat.load_hooked": 1400,
    "dynamics.influence": 800,  # squares of the gradients of a layer, in float64 and merged as a tree
    "dynamics.learning_coefficient": 2000,  # what moves, its gradient and a step, of all parameters
    "lenses.train_tuned_lens": 800,  # 31 matrices, their gradients and the optimiser's two moments
    "report": 1200,  # budget 1 000: the pairs of parts of all scores of the last layer
    "verify.contract": 1000,  # transformers' network in half precision, gradients of both embeddings
}  # fmt: skip
"""MiB of those that need more, and what for."""

MISSING: Mapping[str, frozenset[str]] = {
    name: frozenset(variables.split())
    for name, variables in {
        # cells beyond a row's last token: three prompts of 12, 15 and 16 tokens
        "attribution_patch": "each agreement", "patch": "each",
        "backward_lens": "x delta relative_update", "token_attribution": "value",
        **dict.fromkeys(
            ("logit_lens", "dynamics.over_checkpoints", "runs.answered"), "top_prob entropy kl target_prob"
        ),
        "residual.orders": "value",
        "lenses.output_lens": "vocabulary_mean target_logit norm top_logit bottom_logit",
        "tokens.flow_routes": "value attn_bias resid mlp resid_mid", "tokens.layer_mixing": "value mixing_ratio",
        # pairs of heads of one layer or against the order, edges that do not exist
        **dict.fromkeys(("composition",), "value excess relative"),
        "weights.composition_scores": "tensor", "weights.matching_scores": "tensor",
        **dict.fromkeys(("circuits.edge_attribution", "circuits.score_edges"), "value normalised"),
        "circuits.edge_effects": "value normalised",
        "circuits.edge_stability": "kept",
        # nodes without edges of their own
        **dict.fromkeys(("circuits.attribution_graph", "circuits.prune_graph"), "incoming bias others"),
        "circuits.feature_circuit": "edge_value edge_ends faithfulness_null",
        # lists that end before the longest one
        "editing.changed_tokens": "peak kl loss tuned_loss", "features.top_examples": "peak activation",
        "features.feature_cards": "peak activation group_activation",
        **dict.fromkeys(("features.probe", "features.probe_neurons"), "weight"), "weights.spectra": "singular",
        # scores that only some cells have
        "causal_trace": "value spread total", "evaluate_circuit": "value needed", "heads": "confidence",
        # intervals of a rank from 64 texts on, untrained models where they are asked for
        "attention.attention_by_depth": "by_layer untrained",
        "attention.attention_paths": "query_moved key_moved", "lab.depth.splitting": "order",
        "dynamics.learning_coefficient": "spread", "editing.activation_difference": "value",
        "editing.diff": "value each",
        "lenses.compare_lenses": "value", "lenses.late_layers": "value null_sd", "weights.head_tokens": "value",
    }.items()
}  # fmt: skip
"""The variables of a result in which NaN says that there is no such number."""


@once
def functions() -> Mapping[str, Callable[..., object]]:
    """Every public function by its name."""
    return {name: value for name, value in calls.public_names() if not isinstance(value, type)}


def called_names() -> list[str]:
    """The functions that a model goes into, then what is called on a model first."""
    given = {name: GIVEN & {*calls.signature(value).parameters} for name, value in functions().items()}
    found = [name for name, models in given.items() if models or name in CALLS or name in OF_FILES]
    of_models = [f"HookedTransformer.{name}" for name in calls.METHODS]
    return [name for name in found if name not in OF_NO_SUCH_MODEL] + of_models


def function_of(name: str) -> Callable[..., object]:
    """What is called by this name: a public function, or a method of SmolLM2."""
    of_model = name.startswith("HookedTransformer.")
    found: Callable[..., object] = getattr(model(), name.partition(".")[2]) if of_model else functions()[name]
    return found


def given(name: str, special: Mapping[str, Mapping[str, Made]] = CALLS) -> dict[str, object]:
    """The arguments of a call; what other calls need is made once."""
    return calls.valid(name, function_of(name), special, WORDS)


def answer(name: str, given: Mapping[str, object]) -> object:
    """What the call gives, to its end where it comes bit by bit."""
    found = calls.called(name, function_of(name), given)
    return list(found) if isinstance(found, Iterator) else found
