"""A valid call of every public function and record, as small as can be: what the others are made of by one wrong value.

`CALLS` has one line per name, a function that gives the arguments; most words mean the same everywhere and are in
`WORDS`, so a line says only what is special. Values that other calls need are made once.
"""

import copy
import functools
import importlib
import inspect
import json
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
import transformers
import xarray as xr

import interp
import interp.dynamics
import interp.families
import interp.lab.training
import interp.passes
import interp.tasks
import interp.zoo
from interp import Edit
from interp.causal import EdgeGraph
from interp.circuits import Circuit
from interp.edits import Variant, Zero
from interp.passes.observe import as_model
from interp.passes.question import Question
from interp.weights import HeadCircuits
from tests.configs import CONFIGS, build
from tests.tiny import hooked

Made = Callable[[], object]
once = functools.cache
signature = functools.cache(inspect.signature)


OWN = "a folder of the call's own"


TOKENS = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8], [9, 8, 7, 6, 5, 9, 8, 7, 6]])
OTHERS = torch.tensor([[5, 6, 3, 8, 9, 5, 6, 7, 8], [9, 8, 4, 6, 5, 9, 8, 7, 6]])
TEXT = "When Mary and John went to the shop"
LENGTH = TOKENS.shape[1]
TOKENIZER = interp.zoo.demos.WEIGHTS / "demo-4l" / "tokenizer.json"
GPT2 = transformers.GPT2Config(vocab_size=30, n_positions=12, n_embd=8, n_layer=1, n_head=2)


@once
def model() -> interp.HookedTransformer:
    """Two layers with MLPs, and a tokenizer."""
    return hooked("gpt2")


@once
def with_features() -> interp.HookedTransformer:
    """Two layers with MLPs, a dictionary in the second, and a tokenizer."""
    return model().with_dictionaries([sae()])


@once
def plain() -> interp.HookedTransformer:
    """Two layers of attention only."""
    return hooked("attention-only")


@once
def tuned() -> interp.HookedTransformer:
    """Another model of the same kind."""
    network = copy.deepcopy(model().transformer)
    network.tie()
    with torch.no_grad():
        network.block(1).attn.out.weight.mul_(1.5)
    return interp.HookedTransformer(network, model().text.tokenizer)


@once
def mend() -> interp.editing.Mend:
    return interp.editing.Mend.untrained(model(), ["blocks.0.mlp.W_out"])


@once
def circuits() -> HeadCircuits:
    return HeadCircuits(model())


@once
def edges() -> xr.Dataset:
    """The scores of all edges, prompt by prompt."""
    found = interp.circuits.edge_effects(
        plain(), TOKENS, OTHERS, metric=interp.logit_difference(3, 4), each=True
    )
    assert isinstance(found, xr.Dataset)
    return found


@once
def circuit() -> Circuit:
    return Circuit(
        EdgeGraph(2, 1, 1), {"L0.resid->L0.mlp": 1.5, "L0.mlp->L1H0.q": -0.25, "L0.mlp->logits": 2.0}
    )


@once
def whole_circuit() -> Circuit:
    """All edges of the model of attention only."""
    graph = EdgeGraph.of(plain().cfg)
    return Circuit(graph, dict.fromkeys(graph.names(), 1.0))


@once
def neuron_graph() -> xr.Dataset:
    return interp.circuits.attribution_graph(model(), TOKENS[:1], [3, 4], most=6)


@once
def sae() -> interp.features.Dictionary:
    draw, d = torch.Generator().manual_seed(0), model().cfg.d_model
    shapes = {"W_enc": (d, 6), "b_enc": (6,), "W_dec": (6, d), "b_dec": (d,)}
    return interp.features.Dictionary(
        interp.features.TopK(2),
        {name: torch.randn(shape, dtype=torch.float64, generator=draw) for name, shape in shapes.items()},
        reads="blocks.1.hook_resid_post",
    )


@once
def split() -> interp.HookedTransformer:
    """The model with a dictionary of the stream after its last block."""
    return model().with_dictionaries([sae()])


@once
def directions() -> list[interp.causal.Subspace]:
    """One, after the first block."""
    return [interp.causal.Subspace("blocks.0.hook_resid_post", numbers(1, model().cfg.d_model))]


@once
def few_symbols() -> interp.lab.rasp.Tokens:
    return interp.lab.rasp.Tokens("ab", 3)


@once
def compiled() -> interp.lab.rasp.Compiled:
    return interp.lab.rasp.compile(interp.lab.rasp.PROGRAMS["parity"]())


@once
def keys() -> object:
    return interp.editing.key_moment(model(), TOKENS, layer=0)


@once
def attribution() -> xr.Dataset:
    return interp.token_attribution(model(), TOKENS, 3, method="values")


@once
def series() -> xr.DataArray:
    """A score that rises over the steps of training."""
    return xr.DataArray(
        np.linspace(0, 1, 8) ** 2, dims="step", coords={"step": np.arange(8) * 10}, name="score"
    )


@once
def graph_file() -> Path:
    path = Path(tempfile.mkdtemp()) / "graph.json"
    interp.circuits.write_attribution_graph(
        circuit(), interp.circuits.GraphPrompt("a b", ("a", " b"), " c", 0.5), path
    )
    return path


@once
def facts_file() -> Path:
    path = Path(tempfile.mkdtemp()) / "facts.json"
    row = {"prompt": "The cat sat on the {}", "subject": "mat", "answer": "a", "wrong": "b"}
    path.write_text(json.dumps([row]))
    return path


@once
def chats_file() -> Path:
    path = Path(tempfile.mkdtemp()) / "chats.json"
    path.write_text(json.dumps([{"role": "user", "content": "a"}]))
    return path


@once
def mib_file() -> Path:
    path = Path(tempfile.mkdtemp()) / "scores.json"
    graph = interp.causal.EdgeGraph.of(model().transformer.config)
    interp.circuits.write_mib(
        path, model(), torch.arange(graph.exists.numel()).reshape(graph.exists.shape).double()
    )
    return path


@once
def folder() -> Path:
    """A model on disk."""
    path = Path(tempfile.mkdtemp()) / "model"
    interp.families.save(build("gpt2"), path)
    return path


@once
def sae_folder() -> Path:
    path = Path(tempfile.mkdtemp()) / "sae"
    interp.features.save(sae(), path)
    return path


@once
def both_weights() -> dict[str, torch.Tensor]:
    """Of a crosscoder of two sites of the model."""
    d = model().cfg.d_model
    shapes = {"W_enc": (2, d, 4), "b_enc": (4,), "W_dec": (2, 4, d), "b_dec": (2, d)}
    return {name: torch.ones(*shape) for name, shape in shapes.items()}


@once
def layer_weights() -> interp.features.LayerWeights:
    """Of a cross-layer transcoder of one layer."""
    return interp.features.LayerWeights(
        (3, 4, 3),
        lambda: {"W_enc": torch.ones(3, 4), "b_enc": torch.ones(4)},
        lambda rows: torch.ones(4, 1, 3)[rows],
    )


@once
def span() -> torch.Tensor:
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    mask[:, 6:] = True
    return mask


@once
def examples() -> interp.tasks.Examples:
    return interp.tasks.RepeatedSequences(8, 12, 3, 4).batch(interp.tasks.Place(0, 0), 2)


@once
def few_steps() -> interp.dynamics.Langevin:
    return interp.dynamics.Langevin(chains=1, steps=2, burn_in=0)


@once
def left_out() -> xr.Dataset:
    """The exact effects of three groups of rows."""
    effects = {"value": (("group", "query"), numbers(3, 2).numpy(), {"unit": "nats"})}
    return xr.Dataset(
        {**effects, "left_out": (("group", "row"), np.eye(3) > 0)},
        {"group": range(3), "row": range(3), "query": range(2)},
    )


@once
def estimated() -> xr.Dataset:
    """What somebody thinks that they are."""
    effects = {"value": (("row", "query"), numbers(3, 2).numpy() ** 3, {"unit": "nats"})}
    return xr.Dataset(effects, {"row": range(3), "query": range(2)})


@once
def pairs() -> object:
    """Aligned prompts, as `interp.tasks` makes them."""
    answer, wrong = torch.tensor([3, 4]), torch.tensor([4, 3])
    return types.SimpleNamespace(
        clean_tokens=TOKENS, corrupt_tokens=OTHERS, keep=None, answer=answer, wrong=wrong
    )


@once
def best() -> int:
    """What the model says after the text."""
    return int(model()(TEXT)[0, -1].argmax())


@once
def state() -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """A model's weights and config as TransformerLens writes them."""
    return interp.compat.to_hooked_state(build("gpt2"))


@once
def state_file() -> Path:
    path = Path(tempfile.mkdtemp()) / "state.pt"
    torch.save(state()[0], path)
    return path


def hf_model() -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(GPT2)


def case() -> interp.editing.EditCase:
    return interp.editing.EditCase(TEXT, 5, "John", {"paraphrase": (("John gave", 5),)})


def shift(subject: object, given: interp.editing.EditCase) -> interp.editing.WeightEdit:
    return interp.editing.shift_edit(model(), given.prompt, answer=given.answer, layer=0, eta=0.1)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


WORDS: Mapping[str, Made] = {
    "model": model, "data": lambda: TOKENS, "clean": lambda: TOKENS, "corrupt": lambda: OTHERS,
    "circuits": circuits, "circuit": whole_circuit, "answer": lambda: 5, "layer": lambda: 0, "dictionary": sae,
    "site": lambda: "blocks.0.hook_resid_post", "part": lambda: "L0H1", "head": lambda: "L0H1",
    "parts": lambda: "L0N3", "src": lambda: "L0H1", "dst": lambda: "L1H2", "top": lambda: 2, "scores": edges,
    "matrix": lambda: "OV", "kind": lambda: "K", "queries": lambda: [-1], "keys": lambda: [0], "span": span,
    "subject": lambda: "Mary", "labels": lambda: [True, False], "attribution": attribution,
    "load": lambda: {"step10": model()}.__getitem__, "revisions": lambda: ["step10"], "eta": lambda: 0.1,
    "path": graph_file, "folder": lambda: "out", "vectors": lambda: numbers(2, model().cfg.d_model),
    "name": lambda: "demo-attn-2l", "config": lambda: CONFIGS["gpt2"], "edits": lambda: (), "metric": lambda: None,
    "tokens": lambda: [5, 6], "prompts": lambda: TOKENS, "change": Zero, "values": lambda: 0.5, "text": lambda: TEXT,
    "tuned": tuned,
    "directions": directions,
    "compiled": compiled,
}  # fmt: skip
"""What a required argument of this name is, where a line says nothing else."""

METRIC: Mapping[str, Made] = {"metric": lambda: interp.logit_difference(3, 4)}
ON_PLAIN: Mapping[str, Made] = {"model": plain}
PAIRED: Mapping[str, Made] = ON_PLAIN | METRIC
TEXTS: Mapping[str, Made] = {"data": lambda: TEXT}
FACTORS: Mapping[str, Made] = {"x": lambda: numbers(4), "delta": lambda: numbers(3)}
NORMAL: Mapping[str, Made] = {"first": lambda: numbers(4), "paired": lambda: True}
KINDS: Mapping[str, Made] = {"positive": lambda: TOKENS[[0, 1] * 2], "negative": lambda: OTHERS[[0, 1] * 2]}
LISTED: Mapping[str, Made] = {
    "tasks": lambda: {"next": [([i], [i + 1]) for i in range(3, 12)]},
    "lists": lambda: interp.tasks.PairLists(shots=2, rows=2),
}
FEW_HEADS: Mapping[str, Made] = {"random": lambda: 2, "top": lambda: 2}
RELATED: Mapping[str, Made] = {
    "pairs": lambda: [([i], [i + 1]) for i in range(3, 10)],
    "examples": lambda: 3,
    "layers": lambda: [0],
    "only_known": lambda: False,
}
LOOKED_AT: Mapping[str, Made] = {"key": lambda: 2}
REPEATED: Mapping[str, Made] = {"repeats": lambda: TOKENS[:, [0, 1, 2, 3, 0, 1, 2, 3]]}

CALLS: Mapping[str, Mapping[str, Made]] = {
    "copying": {"previous": lambda: interp.heads(model(), TOKENS, sentences=None).value.sel(score="previous_token")},
    # records that are no questions
    "features.Dictionary": {"kind": lambda: interp.features.TopK(2), "weights": lambda: dict(sae().named_parameters())},
    "Batch": {"tokens": lambda: TOKENS},
    "circuits.Circuit": {"graph": lambda: EdgeGraph(2, 1, 1), "scores": lambda: {"L0.mlp->logits": 2.0}},
    "causal.EdgeGraph": {"n_layers": lambda: 2, "n_heads": lambda: 2, "n_kv_heads": lambda: 2},
    "Edit": {"where": lambda: "L1H2"},
    "editing.Dispatch": {"question": lambda: (1,), "labels": lambda: {"a": 5, "b": 6}},
    "editing.EditCase": {"prompt": lambda: TEXT, "checks": lambda: {"paraphrase": (("John gave", 5),)}},
    "circuits.GraphPrompt": {"prompt": lambda: "a b", "tokens": lambda: ("a", " b"), "answer": lambda: " c",
                    "probability": lambda: 0.5},
    "HookedEncoderDecoder": {"model": lambda: interp.model.build(interp.lab.training.encoder_decoder(8, 8))},
    "HookedTransformer": {"transformer": lambda: build("gpt2")},
    "causal.RankAgreement": {"rank_correlation": lambda: 0.5, "overlap": lambda: 1.0, "same_sign": lambda: 1.0,
                             "top": lambda: 1, "n": lambda: 2},
    "circuits.CircuitProtocol": {"metric": lambda: "logits", "unit": lambda: "", "method": lambda: "exact",
                                 "search": lambda: "greedy", "replacement": lambda: "zero", "n": lambda: 1},
    "circuits.GraphNode": {"name": lambda: "a", "kind": lambda: "b", "layer": lambda: "1", "position": lambda: 0,
                           "label": lambda: "c"},
    "circuits.QKTracing": {"pairs": lambda: (("a", "b", 0.5),), "queries": lambda: (("a", 0.5),), "keys": lambda: ()},
    "tasks.Place": {"seed": lambda: 0, "step": lambda: None},
    "tasks.Examples": {"batch": lambda: interp.Batch(TOKENS)},
    "model.EncoderDecoder": {"config": lambda: interp.lab.training.encoder_decoder(8, 8)},
    "model.Weights": {"model": lambda: build("gpt2")},
    "model.KVCache": {"config": lambda: build("gpt2").config, "rows": lambda: 1, "n_max": lambda: 4,
                      "device": lambda: torch.device("cpu"), "dtype": lambda: torch.float32},
    "residual.ActivationCache": {"values": lambda: {"blocks.0.hook_resid_pre": numbers(1, 2, 24)},
                                 "model": lambda: build("gpt2")},
    "residual.Decomposition": {"values": lambda: numbers(2, 3), "parts": lambda: ("embed", "L0H0")},
    "core.FactoredMatrix": {"A": lambda: numbers(4, 2), "B": lambda: numbers(2, 4)},
    "causal.Mention": {"word": lambda: "Mary", "which": lambda: 0},
    "metrics.Metric": {"name": lambda: "m", "unit": lambda: "",
                       "value": lambda: lambda outcome: outcome.stream[:, 0, 0]},
    "tokens.Mixing": {"kernel": lambda: "norms"},
    "causal.Subspace": {"directions": lambda: numbers(2, 24)},
    "edits.Project": {"directions": lambda: numbers(2, 24)},
    "edits.Swap": {"directions": lambda: numbers(2, 24)},
    "edits.Scale": {"factor": lambda: 2.0},
    "tasks.GivenFact": {"prompt": lambda: "The cat", "answer": lambda: " sat"},
    "tasks.GivenFacts": {"source": lambda: "mine", "facts": lambda: (interp.tasks.GivenFact("The cat", " sat"),)},
    "tasks.read_facts": {"path": facts_file, "prompts": lambda: None, "template": lambda: None},
    "data.read_chats": {"path": chats_file},
    "edits.PerRow": {"places": lambda: [3, -1]},
    "features.NormTopK": {"k": lambda: 2},
    "features.Crosscoder": {
        "kind": lambda: interp.features.ReLU(), "weights": both_weights,
        "reads": lambda: ("blocks.0.hook_resid_post", "blocks.1.hook_mlp_out")},
    "features.CrossLayerTranscoder": {
        "kind": lambda: interp.features.ReLU(), "layers": lambda: {0: layer_weights()},
        "b_dec": lambda: {0: torch.zeros(3)}},
    "features.TopK": {"k": lambda: 2}, "features.AbsTopK": {"k": lambda: 2}, "features.GroupMax": {"k": lambda: 2},
    "data.Spellings": {"texts": lambda: [3, (4, 5)]},
    "features.BatchTopK": {"k": lambda: 2}, "features.Matryoshka": {"k": lambda: 2, "sizes": lambda: (2, 8)},
    "Stream": {"source": lambda: interp.data.open_source([TEXT]), "text": lambda: model().text,
               "tokens_per_batch": lambda: 64},
    "passes.Sweep": {"batch": lambda: model().text.batch(TOKENS),
                     "variants": lambda: [Variant([Edit("L0.mlp", Zero())])]},
    "lenses.TunedLens": {"sites": lambda: ("blocks.0.hook_resid_pre",), "weight": lambda: numbers(1, 24, 24),
                  "bias": lambda: numbers(1, 24), "sample": lambda: numbers(4)},
    "lenses.FittedJacobianLens": {"layers": lambda: (0,), "jacobian": lambda: numbers(1, 24, 24)},
    "editing.WeightEdit": {"name": lambda: "blocks.0.mlp.W_out", "change": lambda: numbers(40, 24)},
    # methods
    "HookedTransformer.from_pretrained": {"source": folder},
    "HookedTransformer.to_batch": {"prompts": lambda: TEXT},
    "HookedTransformer.chat": {"messages": lambda: [{"role": "user", "content": "a"}]},
    "HookedTransformer.to_single_token": {"text": lambda: "a"},
    "HookedTransformer.to_str_tokens": {"prompt": lambda: TEXT},
    "HookedTransformer.to_texts": {"batch": lambda: model().text.batch(TOKENS)},
    "HookedTransformer.generate": {"max_new_tokens": lambda: 1},
    "HookedTransformer.stream": {"prompt": lambda: TEXT, "max_new_tokens": lambda: 1},
    # functions
    "ablate": METRIC,
    "causal.agreement": {"estimate": lambda: numbers(6), "exact": lambda: numbers(6)},
    "attribution_patch": METRIC, "patch": METRIC, "path_patch": METRIC, "causal.knock_out": METRIC,
    "causal.short_circuit": METRIC, "causal.missed_effects": METRIC | {"subsets": lambda: 20},
    "causal.patch_preset": METRIC | {"preset": lambda: "resid_pre"},
    "backward_lens": {"answer": lambda: 5}, "lenses.gradient_rank": {"answer": lambda: 5},
    "lenses.gradient_cosines": {"answer": lambda: 5}, "lenses.gradient_factors": {"answer": lambda: 5},
    "lenses.imprint": FACTORS, "lenses.shift": FACTORS,
    "attribute": {"answer": lambda: 5},
    "causal.align": {"base": lambda: TOKENS, "source": lambda: OTHERS, "layers": lambda: [1],
                     "descent": lambda: interp.causal.Descent(1),
                     "pos": lambda: [3], "answer": lambda: [5, 6]},
    "causal.batches": {"pairs": pairs},
    "causal_trace": TEXTS | {"subject": lambda: "Mary", "answer": best, "samples": lambda: 1},
    "causal.subject_spread": TEXTS,
    "metrics.choice_difference": {"options": lambda: torch.tensor([3, 4]),
                                  "right": lambda: torch.tensor([[True, False]] * 2)},
    "circuits.circuit_curve": PAIRED | {"draws": lambda: 1},
    "tokens.compare_methods": {"answer": lambda: 5, "methods": lambda: ["values"]},
    "token_attribution": {"answer": lambda: 5},
    "tokens.erasure": {"answer": lambda: 5},
    "circuits.edge_attribution": PAIRED, "circuits.edge_effects": PAIRED, "evaluate_circuit": PAIRED,
    "find_circuit": PAIRED | {
        "edges": lambda: 3}, "circuits.interchange": PAIRED | {"circuits": whole_circuit},
    "circuits.score_edges": PAIRED,
    "circuits.feature_circuit": METRIC | {
        "model": with_features, "corrupt": lambda: OTHERS, "nodes": lambda: ["L1F1"], "draws": lambda: 1},
    "circuits.edge_stability": {"resamples": lambda: 2},
    "editing.diff_interactions": {"parts": lambda: ["L0.mlp", "L1.attn"]},
    "editing.edit_table": {"cases": lambda: [case()], "editors": lambda: {"shift": shift},
                   "continuation": lambda: interp.editing.Continuation(20)},
    "editing.finetune_edit": {"tuning": lambda: interp.editing.FineTuning(1)},
    "frame": {"result": attribution},
    "heads": {"repeats": lambda: interp.tasks.RepeatedTokens(4, 2, 2), "sentences": lambda: None},
    "attention.attention_attribution": LOOKED_AT, "attention.attention_paths": LOOKED_AT,
    "attention.attention_kernel": {"repeats": lambda: interp.tasks.RepeatedTokens(4, 2, 2)},
    "editing.interpolated": {"vectors": lambda: [numbers(2), numbers(2)], "weights": lambda: [0.5, 0.5]},
    "features.load": {"path": sae_folder},
    "weights.matching_scores": {"previous": lambda: numbers(2, 4)},
    "dynamics.in_context": {"early": lambda: 1, "late": lambda: 4},
    "dynamics.influence": {"rows": examples, "queries": examples},
    "dynamics.learning_coefficient": {"rows": examples, "sampler": few_steps},
    "dynamics.learning_coefficient_of": {
        "loss": lambda: lambda point: point["w"].square().sum(), "at": lambda: {"w": numbers(2)}, "rows": lambda: 9,
        "sampler": few_steps},
    "dynamics.lds": {"exact": left_out, "estimate": estimated},
    "dynamics.loss_map": {"early": lambda: 1, "late": lambda: 4},
    "observe": {"batch": lambda: TOKENS},
    "metrics.of_logits": {"function": lambda: lambda logits: logits[:, 0, 0]},
    "residual.orders": ON_PLAIN, "residual.paths": ON_PLAIN | {"answer": lambda: 5},
    "residual.term_importance": ON_PLAIN,
    "dynamics.over_checkpoints": {"question": lambda: interp.lenses.LogitLens(top=2), "data": lambda: TOKENS},
    "residual.path_matrix": {"circuits": lambda: HeadCircuits(plain()), "heads": lambda: ("L0H1", "L1H2")},
    "dynamics.per_token_loss_pca": {"losses": lambda: xr.DataArray(numbers(5, 9).numpy(), dims=("step", "prompt"))},
    "core.permutation_test": NORMAL | {"permutations": lambda: 20},
    "lab.depth.integrated": {"model": lambda: model().transformer, "tokens": lambda: TOKENS},
    "lab.depth.splitting": {"steps": lambda: (1, 2), "fine": lambda: 4},
    "dynamics.phase_change": {"series": series},
    "features.probe": {"activations": lambda: numbers(8, 3), "labels": lambda: [True, False] * 4,
                       "sizes": lambda: (1,)},
    "features.probe_neurons": {"data": lambda: TOKENS[[0, 1] * 4], "labels": lambda: [True, False] * 4,
                               "sizes": lambda: (1,)},
    "circuits.recovery": {"tables": lambda: [edges()], "planted": lambda: ["L0H0->logits"]},
    "report": {"prompt": lambda: TEXT},
    "editing.memit_edit": {"facts": lambda: [interp.editing.EditCase(TEXT, " cat", "Mary", {})],
                  "keys": lambda: [keys()], "weight": lambda: 0.1,
                  "search": lambda: interp.editing.Rome(ridge=0.1, steps=1)},
    "editing.Mend": {"networks": lambda: mend().networks, "sample": lambda: mend().sample},
    "editing.mend_edit": {"mend": mend},
    "editing.train_mend": {"cases": lambda: [interp.editing.EditCase(TEXT, 5, "Mary", {"others": (("John gave", 6),)})],
                  "names": lambda: ["blocks.0.mlp.W_out"], "tuning": lambda: interp.editing.FineTuning(1)},
    "editing.rome_edit": {"prompt": lambda: TEXT, "subject": lambda: "Mary", "keys": keys,
                  "rome": lambda: interp.editing.Rome(ridge=0.1, steps=1)},
    "tokens.evidence": {"attribution": attribution, "known": lambda: torch.ones(attribution().value.shape).bool()},
    "tokens.routes": {"shares": lambda: interp.tokens.flow_routes(model(), TOKENS)},
    "run": {"questions": lambda: [interp.lenses.LogitLens(top=2)], "data": lambda: TOKENS},
    "runs.answered": {"question": lambda: interp.lenses.LogitLens(top=2), "data": lambda: TOKENS},
    "runs.store_activations": {"data": lambda: TOKENS,
                          "sites": lambda: ["blocks.0.hook_resid_post"],
                          "folder": lambda: OWN},
    **{f"features.{name}": {"features": lambda: [0, 1], "site": lambda: "blocks.0.hook_resid_post"}
       for name in ("feature_cards", "FeatureCards")},
    "features.top_examples": {"top": lambda: 2},
    "findings.findings": {"model": lambda: interp.HookedTransformer.from_pretrained("demo-attn-2l"),
                          "claims": lambda: ["induction-heads"], "prompts": lambda: 12},
    "findings.Claim": {
        **dict.fromkeys(("text", "source", "measured", "null", "unit"), lambda: "a word"),
        "region": lambda: interp.findings.Region(0.5),
        "measure": lambda: lambda setting: interp.findings.Measured.exact(1.0)},
    "findings.Measured": {
        **dict.fromkeys(("value", "low", "high"), lambda: 0.5), "n": lambda: 3, "over": lambda: "rows"},
    "findings.verdict": {"measured": lambda: interp.findings.Measured.exact(1.0),
                         "region": lambda: interp.findings.Region(0.5)},
    "HookedTransformer.with_dictionaries": {"dictionaries": lambda: [sae()]},
    "features.train_dictionary": {"activations": lambda: numbers(16, 6).float(),
                  "kind": lambda: interp.features.TopK(2),
                  "d_sae": lambda: 8, "steps": lambda: 2, "batch_size": lambda: 4},
    "lenses.compare_lenses": {"lenses": lambda: {"logit lens": None}},
    "lenses.CompareLenses": {"lenses": lambda: {"logit lens": None}},
    **{f"lenses.{name}": {"target": lambda: TOKENS[0]} for name in ("patchscope", "Patchscope")},
    "lenses.jacobian_lens": {"skip": lambda: 1}, "lenses.JacobianLens": {"skip": lambda: 1},
    "lenses.train_tuned_lens": {"steps": lambda: 1},
    "editing.adapted": {"vectors": lambda: {"blocks.0.mlp.W_out": torch.ones(24)}},
    "editing.reinforce_z": {
        "data": lambda: TOKENS, "reward": lambda: lambda new: new[:, 0].double(), "samples": lambda: 1,
        "names": lambda: ["blocks.0.mlp.W_out"], "tuning": lambda: interp.editing.FineTuning(steps=1)},
    "editing.two_passes": {
        "prompts": lambda: TOKENS, "vectors": lambda: {},
        "dispatch": lambda: interp.editing.Dispatch((1,), {"a": 5, "b": 6})},
    "editing.train_z": {"loss": lambda: lambda logits: logits.square().mean(), "names": lambda: ["blocks.0.mlp.W_out"],
                "tuning": lambda: interp.editing.FineTuning(1)},
    "circuits.attribution_graph": {"prompt": lambda: TOKENS[:1], "most": lambda: 4},
    "circuits.prune_graph": {"graph": neuron_graph},
    "circuits.graph_scores": {"model": with_features, "prompts": lambda: TOKENS, "most": lambda: 4},
    "circuits.edge_heads": {"prompt": lambda: TOKENS[:1], "graph": neuron_graph},
    "circuits.qk_attribution": {"prompt": lambda: TOKENS[:1], "head": lambda: "L1H0", "key": lambda: 1},
    "circuits.graph_interventions": {"prompt": lambda: TOKENS[:1], "graph": neuron_graph},
    "circuits.write_attribution_graph": {"circuit": circuit, "path": lambda: Path(tempfile.mkdtemp()) / "graph.json",
                                "prompt": lambda: interp.circuits.GraphPrompt("a b", ("a", " b"), " c", 0.5)},
    "circuits.write_mib": {"path": lambda: Path(tempfile.mkdtemp()) / "scores.json",
                           "scores": lambda: interp.circuits.read_mib(mib_file(), model()).scores},
    "circuits.read_mib": {"path": mib_file},
    "circuits.MibScores": {"scores": lambda: torch.ones(2, 3), "kept": lambda: torch.ones(2, 3, dtype=torch.bool)},
    "lenses.late_layers": {"answer": lambda: 5}, "weights.singular_directions": {"count": lambda: 2},
    **{f"causal.{name}": LISTED for name in ("average_indirect_effect", "AverageIndirectEffect")},
    **{f"causal.{name}": LISTED | FEW_HEADS for name in ("function_vectors", "FunctionVectors")},
    **{f"causal.{name}": RELATED for name in ("linear_relation", "LinearRelation")},
    "causal.steering": KINDS, "causal.Steering": KINDS,
    "causal.steering_curve": METRIC | {"random": lambda: 2},
    "causal.SteeringCurve": METRIC | {"random": lambda: 2},
    "causal.feature_edits": {"model": split, "feature": lambda: "L1F3", "amount": lambda: 2.0},
    "causal.continuations": {"pairs": lambda: [("The cat sat", " on the mat")]},
    "compat.from_bridge": {"bridge": lambda: torch.nn.Linear(2, 2)},
    "compat.from_hooked_transformer": {"state": lambda: state()[0], "config": lambda: state()[1]},
    "causal.identity": {"pattern": lambda: numbers(1, 2, 3, 3)},
    "compat.load_hooked": {"path": state_file, "config": lambda: state()[1]}, "compat.load_llama2c": {"path": folder},
    "lab.depth.flow": {"x": lambda: numbers(3, 2), "qk": lambda: torch.eye(2).double(),
                      "ov": lambda: torch.eye(2).double(), "steps": lambda: 2},
    "lab.depth.trajectories": {"x": lambda: numbers(3, 2), "qk": lambda: torch.eye(2).double(),
                              "ov": lambda: torch.eye(2).double(), "steps": lambda: 2},
    "lab.depth.switched_off": {"off": lambda: ["skip"]},
    "families.any_from_folder": {"path": folder}, "families.from_folder": {"path": folder},
    "families.is_encoder_decoder": {"path": folder}, "families.tokenizer_of": {"folder": folder},
    "families.ends_of": {"source": folder},
    "families.tokenizer_in": {"path": folder},
    "families.any_from_hf_model": {"hf_model": hf_model},
    "families.from_hf_model": {"hf_model": hf_model},
    "families.load_state": {"tensors": lambda: build("gpt2").state_dict()},
    "families.config_of": {"values": lambda: GPT2.to_dict()},
    "families.save": {"model": lambda: build("gpt2"), "folder": lambda: Path(tempfile.mkdtemp())},
    "features.dictionary_match": {"W_dec": lambda: numbers(3, 4), "truth": lambda: numbers(2, 4)},
    "features.examples_table": {
        "result": lambda: interp.features.top_examples(model(), TOKENS, "blocks.0.hook_resid_post", top=2)},
    "features.neuronpedia_json": {"result": lambda: interp.features.feature_cards(
        model(), TOKENS, sae(), "blocks.0.hook_resid_post", features=[0, 1], top=2)},
    "features.reconstruction_quality": {"activations": lambda: numbers(4, 24)},
    "lenses.by_depth": {"result": lambda: interp.logit_lens(model(), TOKENS, top=2)},
    "model.mean_next_token_loss": {"logits": lambda: numbers(2, LENGTH, 10), "tokens": lambda: TOKENS},
    "model.next_token_loss": {"logits": lambda: numbers(2, LENGTH, 10), "tokens": lambda: TOKENS},
    "model.next_token_loss_of": {"model": lambda: model().transformer, "stream": lambda: numbers(2, LENGTH, 24),
                                 "tokens": lambda: TOKENS},
    "edits.edit_from_json": {"entry": lambda: interp.edits.edit_to_json(Edit("L1H2", Zero()))},
    "edits.edit_to_json": {"edit": lambda: Edit("L1H2", Zero())},
    "edits.edit_to_python": {"edit": lambda: Edit("L1H2", Zero())},
    "lab.cost": {"config": lambda: interp.lab.training.attention_only(1, 8, 12), "length": lambda: 4},
    "lab.costs": {"configs": lambda: {"one": interp.lab.training.attention_only(1, 8, 12)}, "lengths": lambda: [4, 8]},
    "lab.Segments": {"size": lambda: 4, "memory": lambda: 3},
    "lab.Datastore": {"keys": lambda: numbers(3, 24), "following": lambda: torch.tensor([1, 2, 3])},
    "lab.training.attention_only": {"n_layers": lambda: 1, "d_vocab": lambda: 8, "n_ctx": lambda: 8},
    "lab.training.beam_search": {"model": lambda: build("gpt2"), "prompts": lambda: examples().batch,
                                 "max_new_tokens": lambda: 1},
    "lab.training.encoder_decoder": {"d_vocab": lambda: 8, "n_ctx": lambda: 8},
    "lab.training.config_for": {"model": lambda: "attention-1l", "data": lambda: interp.tasks.RepeatedSequences()},
    "lab.training.exactly_right": {
        "model": lambda: interp.model.build(interp.lab.training.encoder_decoder(32, 16)),
        "examples": lambda: interp.tasks.SequencePairs().batch(interp.tasks.Place(0, 0), 2)},
    "lab.training.FixedRows": {"rows": examples, "held_out": examples},
    "lab.training.leave_out": {"config": lambda: interp.lab.training.attention_only(1, 8, 12), "rows": examples,
                           "queries": examples},
    "lab.training.Distillation": {"teacher": lambda: build("gpt2")},
    "lab.training.head_importance": {"model": lambda: build("gpt2"), "examples": examples},
    "lab.training.prune_heads": {"model": lambda: build("gpt2"), "examples": examples, "count": lambda: 1},
    "lab.training.mean_loss": {"model": lambda: build("gpt2"), "examples": examples},
    "lab.training.Sentences": {
        "task": interp.tasks.Facts, "vocabulary": lambda: interp.lab.training.Vocabulary.read(TOKENIZER)},
    "lab.training.scores": {"model": lambda: build("gpt2"), "examples": examples},
    "lab.training.train": {"config": lambda: interp.lab.training.attention_only(1, 8, 12),
                       "data": lambda: interp.tasks.RepeatedSequences(8, 12, 3, 4),
                       "training": lambda: interp.lab.training.Training(steps=1, rows=2)},
    "lab.training.xavier": {"model": lambda: interp.model.build(interp.lab.training.attention_only(1, 8, 12))},
    "verify.contract": {"reference": lambda: "none"},
    "verify.pair_contract": {"model": lambda: interp.model.build(interp.lab.training.encoder_decoder(32, 16)),
                             "reference": lambda: "none"},
    "lab.rasp.compile": {"program": lambda: interp.lab.rasp.PROGRAMS["parity"]()},
    "lab.rasp.superposed": {"width": lambda: 3},
    "lab.rasp.interchange_trained": {"training": lambda: interp.lab.rasp.InterchangeTraining(steps=1, rows=2, pairs=4)},
    "lab.rasp.interchange_accuracy": {"n": lambda: 4},
    "lab.rasp.Tokens": {"symbols": lambda: "ab", "most": lambda: 3}, "lab.rasp.Positions": {"tokens": few_symbols},
    "lab.rasp.Constant": {"value": lambda: "a"},
    "lab.rasp.Map": {"function": lambda: str.upper, "of": few_symbols},
    "lab.rasp.select": {"keys": few_symbols, "queries": few_symbols, "predicate": lambda: str.__eq__},
    "lab.rasp.Selector": {"conditions": lambda: interp.lab.rasp.everything().conditions},
    "lab.rasp.Aggregate": {"selector": interp.lab.rasp.everything, "values": few_symbols, "default": lambda: "-"},
    "lab.rasp.selector_width": {"selector": interp.lab.rasp.everything, "tokens": few_symbols},
    "lab.rasp.Sum": {
        "terms": lambda: (interp.lab.rasp.Map(ord, few_symbols(), number=True),), "weights": lambda: (1.0,)},
    "lab.rasp.Program": {"name": lambda: "copy", "output": few_symbols},
    # questions
    "attention.Heads": {"data": lambda: interp.tasks.RepeatedTokens(4, 2, 2), "sentences": lambda: None},
    "attention.AttentionAttribution": LOOKED_AT, "attention.AttentionPaths": LOOKED_AT,
    "attention.AttentionKernel": {"repeats": lambda: interp.tasks.RepeatedTokens(4, 2, 2)},
    "causal.Ablate": METRIC,
    "causal.CausalTrace": {"subject": lambda: "Mary", "answer": lambda: 5, "sigma": lambda: 0.1},
    "circuits.CircuitCurve": METRIC, "circuits.EvaluateCircuit": METRIC,
    "circuits.FindCircuit": METRIC | {"edges": lambda: 3}, "circuits.EdgeEffects": METRIC,
    "circuits.EdgeAttribution": METRIC, "circuits.Interchange": METRIC | {"circuits": whole_circuit},
    "editing.DiffInteractions": {"parts": lambda: ["L0.mlp", "L1.attn"]},
    "features.ProbeNeurons": {"labels": lambda: [True, False] * 4, "sizes": lambda: (1,)},
    "lenses.BackwardLens": {"answer": lambda: 5},
    "lenses.GradientCosines": {"answer": lambda: 5}, "lenses.GradientRank": {"answer": lambda: 5},
    "lenses.LateLayers": {"frequencies": lambda: torch.ones(model().cfg.d_vocab)},
    "weights.SingularDirections": {"count": lambda: 2},
    "tokens.CompareMethods": {"answer": lambda: 5}, "tokens.Erasure": {"answer": lambda: 5},
    "tokens.TokenAttribution": {"answer": lambda: 5},
}  # fmt: skip
"""What is special about the valid call of a public name; those that are not here have nothing special."""

REFUSES = ("compat.from_bridge", "compat.load_llama2c")
"""What requires objects of other programs: its smallest call is refused, by name."""
NOT_RUN = (
    "report",
    "editing.finetune_edit",
    "features.probe",
    "lab.training.leave_out",
    "lab.training.train",
)
"""What takes long even for the smallest call: whether a value is let in is asked of its annotation alone."""
ELSEWHERE = ("cli", "compat.install", "compat.uninstall", "plot", "pages", "serve")
"""What is not called here: pictures and pages of results, and what takes no argument."""


METHODS = (
    "from_pretrained", "edited", "to_tokens", "to_batch", "to_string", "to_str_tokens", "to_single_token",
    "run_with_cache", "run_with_hooks", "hooks", "generate", "stream", "to_texts", "chat",
)  # fmt: skip
"""What is called on a model first."""


def public_methods() -> Iterator[tuple[str, Callable[..., object]]]:
    """The methods of a model that a user calls first."""
    for name in METHODS:
        yield f"HookedTransformer.{name}", getattr(model(), name)
    yield "Transformer.edited", model().transformer.edited


def public_names() -> Iterator[tuple[str, Callable[..., object]]]:
    """Every public function, question and looked-at class by its shortest name."""
    seen: set[int] = set()
    for wing in ("", *interp.ROOMS):
        module = importlib.import_module(f"interp.{wing}" if wing else "interp")
        for name in module.__all__ if wing else interp.HOMES:
            value, full = getattr(module, name), f"{wing}.{name}".lstrip(".")
            looked_at = isinstance(value, type) and (
                issubclass(value, Question) or hasattr(value.__init__, "public")
            )
            if id(value) in seen or not (inspect.isfunction(value) or looked_at) or value is Question:
                continue
            seen.add(id(value))
            if not full.startswith(ELSEWHERE):
                yield full, value


def valid(
    name: str,
    function: Callable[..., object],
    calls: Mapping[str, Mapping[str, Made]] = CALLS,
    words: Mapping[str, Made] = WORDS,
) -> dict[str, object]:
    """The arguments of its valid call, as a table of calls and a table of words say."""
    special = calls.get(name, {})
    found = {}
    for parameter in signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        if parameter.name in special:
            found[parameter.name] = special[parameter.name]()
        elif parameter.default is inspect.Parameter.empty:
            assert parameter.name in words, (
                f"no value is known for {parameter.name} of {name}: give it a line in CALLS of tests/contract/calls.py "
                "(a record or method in RECORDS of tests/fuzz/functions.py, what only a real model lacks in "
                "tests/real/calls.py)"
            )
            found[parameter.name] = words[parameter.name]()
    return found


def called(name: str, function: Callable[..., object], given: Mapping[str, object]) -> object:
    """The call with these arguments; a question is also asked of a model."""
    rest, first = dict(given), []
    if name == "runs.store_activations" and rest["folder"] is OWN:
        rest["folder"] = tempfile.mkdtemp()  # a second call would go on with the first one's store
    parameters = list(signature(function).parameters.values())
    places = [i for i, each in enumerate(parameters) if each.kind is inspect.Parameter.VAR_POSITIONAL]
    if places:
        first = [rest.pop(each.name) for each in parameters[: places[0]]]
        several = rest.pop(parameters[places[0]].name)
        first += several if isinstance(several, tuple) else (several,)
    found = function(*first, **rest)
    if isinstance(found, AbstractContextManager):
        with found:
            pass
    if isinstance(found, Question):
        of_features, of_edges = name == "circuits.FeatureCircuit", name.startswith(("circuits", "residual"))
        found.bind(as_model(with_features() if of_features else plain() if of_edges else model()))
    return found
