"""The same seven calls by plain transformers, TransformerLens, nnsight and interp on SmolLM2, with what each costs.

Every library has a process of its own, and they take turns: one call at a time, rounds interleaved. The code of a call
is what a user of that library would write by its documentation, one pass a cell where that says so, and its lines are
counted. The numbers are held against transformers in float64: each library may be as far from them as `SLACK` times
plain transformers in float32 is, call by call, and a rank may be any that such an error in the logits allows.

    python experiments/bench/peers.py /tmp/real/smollm2             # a quarter of an hour; nnsight: "not installed"
    python -m venv /tmp/peers
    echo "$PWD/.venv/lib/python3.11/site-packages" > /tmp/peers/lib/python3.11/site-packages/own.pth
    /tmp/peers/bin/python -m pip install --no-deps nnsight
    PYTHONPATH=$PWD python experiments/bench/peers.py /tmp/real/smollm2 --python /tmp/peers/bin/python
"""

# ruff: noqa: D102 - what the seven calls find stands in `CALLS`
from __future__ import annotations

import ast
import gc
import importlib
import importlib.metadata
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
import torch
import tyro
from measure import MIB, work
from torch import Tensor

from interp.runs.memory import LiveBytes

CLEAN, CORRUPT = "The capital of France is the city of", "The capital of Italy is the city of"
ANSWER, WRONG = " Paris", " Rome"
TEXTS = [
    CLEAN, CORRUPT, "The Eiffel Tower is in", "When Mary and John went to the shop, John gave a drink to",
    "Two plus two is", "In the beginning was the word, and the word was with", "def add(a, b):\n    return a +",
    "The cat sat on the mat, the dog lay on the rug, and the bird stayed in its",
]  # fmt: skip
CALLS = {
    "residuals": "the stream entering every block, 8 prompts of 4 to 20 tokens",
    "lens": "rank and log-probability of the answer at 31 depths, last position",
    "patterns": "attention patterns of 270 heads, 8 prompts of 4 to 20 tokens",
    "heads": "direct logit attribution of 270 heads to a pair of answers",
    "patching": "the stream patched at 30 layers x 8 positions",
    "gradients": "attribution patching of the stream at 30 layers x 8 positions",
    "ablation": "each of 270 heads set to zero",
}
SWEEPS = ("patching", "ablation")
"""Calls of hundreds of passes by most libraries: two rounds, the first one among them."""
SLACK = 8
"""How many times the rounding of plain transformers another order of the same sums may have."""
LEAST = float(np.log(np.finfo(np.float32).tiny))
"""Log-probabilities below are one: interp's lens says probabilities, which end there in float32."""
Numbers = dict[str, np.ndarray]


class Library(Protocol):
    """The seven calls of a library: methods named as `CALLS`, and `numbers`, which makes their answers comparable."""

    def numbers(self, call: str, answer: Any) -> list[Tensor]:
        """What the call found, without padding, in a form that all libraries share."""
        ...


class Plain:
    """Transformers alone, with hooks where it records nothing."""

    packages = ("transformers",)

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        )
        self.model.requires_grad_(False)
        self.answer, self.wrong = (self.tokenizer.encode(word)[0] for word in (ANSWER, WRONG))

    def residuals(self) -> Any:
        batch = self.tokenizer(TEXTS, padding=True, return_tensors="pt")
        return self.model(**batch, output_hidden_states=True).hidden_states[:-1]

    def lens(self) -> Any:
        ids = self.tokenizer(CLEAN, return_tensors="pt").input_ids
        out = self.model(ids, output_hidden_states=True)
        states = [state[0, -1] for state in out.hidden_states[:-1]]
        logits = self.model.lm_head(self.model.model.norm(torch.stack(states)))
        logits = torch.cat([logits, out.logits[:, -1]])
        ranks = (logits > logits[:, self.answer, None]).sum(-1)
        return ranks, logits.log_softmax(-1)[:, self.answer]

    def patterns(self) -> Any:
        batch = self.tokenizer(TEXTS, padding=True, return_tensors="pt")
        return self.model(**batch, output_attentions=True).attentions

    def heads(self) -> Any:
        ids, seen, last = self.tokenizer(CLEAN, return_tensors="pt").input_ids, [], []
        layers, norm = self.model.model.layers, self.model.model.norm
        handles = [
            layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0][0, -1]))
            for layer in layers
        ]
        handles.append(norm.register_forward_pre_hook(lambda _, args: last.append(args[0][0, -1])))
        self.model(ids)
        for handle in handles:
            handle.remove()
        unembed = self.model.lm_head.weight
        scale = last[0].pow(2).mean().add(norm.variance_epsilon).rsqrt()
        direction = (unembed[self.answer] - unembed[self.wrong]) * norm.weight * scale
        found = []
        for z, layer in zip(seen, layers, strict=True):
            per_head = (layer.self_attn.o_proj.weight.T @ direction) * z
            found.append(per_head.unflatten(0, (self.model.config.num_attention_heads, -1)).sum(-1))
        return torch.stack(found)

    def patching(self) -> Any:
        clean, corrupt = (self.tokenizer(text, return_tensors="pt").input_ids for text in (CLEAN, CORRUPT))
        states = self.model(clean, output_hidden_states=True).hidden_states
        found = torch.zeros(len(self.model.model.layers), corrupt.shape[1], dtype=self.model.dtype)
        for i, layer in enumerate(self.model.model.layers):
            for pos in range(corrupt.shape[1]):

                def put(_: object, args: Any, i: int = i, pos: int = pos) -> Any:
                    stream = args[0].clone()
                    stream[:, pos] = states[i][:, pos]
                    return (stream, *args[1:])

                handle = layer.register_forward_pre_hook(put)
                logits = self.model(corrupt).logits[0, -1]
                handle.remove()
                found[i, pos] = logits[self.answer] - logits[self.wrong]
        return found

    def gradients(self) -> Any:
        clean, corrupt = (self.tokenizer(text, return_tensors="pt").input_ids for text in (CLEAN, CORRUPT))
        there = self.model(clean, output_hidden_states=True).hidden_states[:-1]
        with torch.enable_grad():
            start = self.model.get_input_embeddings()(corrupt).requires_grad_()
            out = self.model(inputs_embeds=start, output_hidden_states=True)
            metric = out.logits[0, -1, self.answer] - out.logits[0, -1, self.wrong]
        here = out.hidden_states[:-1]
        slopes = torch.autograd.grad(metric, here)
        return torch.stack([((a - b) * g).sum(-1)[0] for a, b, g in zip(there, here, slopes, strict=True)])

    def ablation(self) -> Any:
        ids = self.tokenizer(CLEAN, return_tensors="pt").input_ids
        heads, width = self.model.config.num_attention_heads, self.model.config.head_dim
        found = torch.zeros(len(self.model.model.layers), heads, dtype=self.model.dtype)
        for i, layer in enumerate(self.model.model.layers):
            for head in range(heads):

                def silence(_: object, args: Any, head: int = head) -> Any:
                    z = args[0].clone()
                    z[..., head * width : (head + 1) * width] = 0
                    return (z,)

                handle = layer.self_attn.o_proj.register_forward_pre_hook(silence)
                logits = self.model(ids).logits[0, -1]
                handle.remove()
                found[i, head] = logits[self.answer] - logits[self.wrong]
        return found

    def numbers(self, call: str, answer: Any) -> list[Tensor]:
        """Streams `[layer token d]` and patterns `[layer head query key]` of each prompt; other answers as they are."""
        if call not in ("residuals", "patterns"):
            return list(answer) if isinstance(answer, tuple) else [answer]
        counts = [len(self.tokenizer(text).input_ids) for text in TEXTS]
        return cut(torch.stack(list(answer), 1), counts)

    def depth_logits(self) -> Tensor:
        """Logits `[depth word]` of the lens: a rank is what can be counted in them."""
        ids = self.tokenizer(CLEAN, return_tensors="pt").input_ids
        out = self.model(ids, output_hidden_states=True)
        states = torch.stack([state[0, -1] for state in out.hidden_states[:-1]])
        logits: Tensor = self.model.lm_head(self.model.model.norm(states))
        return torch.cat([logits, out.logits[:, -1]])


class Double(Plain):
    """The numbers that all others are held against."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, torch.float64)


class Lens:
    """TransformerLens: the bridge, norms folded (its attribution asks for that), nothing centred."""

    packages = ("transformer-lens",)

    def __init__(self, folder: Path) -> None:
        from transformer_lens.model_bridge import TransformerBridge

        self.bridge: Any = TransformerBridge.boot_transformers(str(folder), dtype=torch.float32, device="cpu")
        self.bridge.enable_compatibility_mode(
            disable_warnings=True, center_writing_weights=False, center_unembed=False, fold_value_biases=False
        )
        self.bridge.cfg.default_prepend_bos = False
        self.answer, self.wrong = (self.bridge.to_single_token(word) for word in (ANSWER, WRONG))

    def metric(self, logits: Tensor) -> Tensor:
        """The logit difference at the last position; its tools ask for a function of the logits."""
        return logits[0, -1, self.answer] - logits[0, -1, self.wrong]

    def residuals(self) -> Any:
        return self.bridge.run_with_cache(TEXTS, names_filter=lambda name: name.endswith("hook_resid_pre"))[1]

    def lens(self) -> Any:
        tools = importlib.import_module("transformer_lens.tools.analysis.logit_lens")
        found = tools.logit_lens(self.bridge, CLEAN, targets=ANSWER, return_type="log_probs")
        return found.rank_trajectory(), found.values

    def patterns(self) -> Any:
        return self.bridge.run_with_cache(TEXTS, names_filter=lambda name: name.endswith("hook_pattern"))[1]

    def heads(self) -> Any:
        tools = importlib.import_module("transformer_lens.tools.analysis.direct_logit_attribution")
        return tools.direct_logit_attribution(self.bridge, CLEAN, ANSWER, WRONG, unit="head").attribution

    def patching(self) -> Any:
        tools = importlib.import_module("transformer_lens.patching")
        clean, corrupt = self.bridge.to_tokens(CLEAN), self.bridge.to_tokens(CORRUPT)
        _, cache = self.bridge.run_with_cache(clean)
        return tools.get_act_patch_resid_pre(self.bridge, corrupt, cache, self.metric)

    def gradients(self) -> Any:
        clean, corrupt = self.bridge.to_tokens(CLEAN), self.bridge.to_tokens(CORRUPT)
        tools = importlib.import_module("transformer_lens.tools.analysis.attribution_patching")
        wanted = [f"blocks.{i}.hook_resid_pre" for i in range(self.bridge.cfg.n_layers)]
        read = tools.cache_activation_and_gradient
        with torch.enable_grad():
            there = read(
                self.bridge, clean, self.metric, names_filter=wanted, compute_gradient=False
            ).activations
            here = read(self.bridge, corrupt, self.metric, names_filter=wanted)
        slopes = here.gradients
        return torch.stack([((there[n] - here.activations[n]) * slopes[n]).sum(-1)[0] for n in wanted])

    def ablation(self) -> Any:
        tokens = self.bridge.to_tokens(CLEAN)
        found = torch.zeros(self.bridge.cfg.n_layers, self.bridge.cfg.n_heads)
        for layer in range(self.bridge.cfg.n_layers):
            for head in range(self.bridge.cfg.n_heads):

                def silence(z: Tensor, hook: object, head: int = head) -> Tensor:
                    z[:, :, head] = 0
                    return z

                hooks = [(f"blocks.{layer}.attn.hook_z", silence)]
                found[layer, head] = self.metric(self.bridge.run_with_hooks(tokens, fwd_hooks=hooks))
        return found

    def numbers(self, call: str, answer: Any) -> list[Tensor]:
        """Streams and patterns out of the cache, heads without the remainder."""
        layers, heads = self.bridge.cfg.n_layers, self.bridge.cfg.n_heads
        if call == "lens":
            return [each.flatten() for each in answer]
        if call == "heads":
            return [answer[: layers * heads].reshape(layers, heads)]
        if call not in ("residuals", "patterns"):
            return [answer]
        part = "hook_resid_pre" if call == "residuals" else "attn.hook_pattern"
        whole = torch.stack([answer[f"blocks.{i}.{part}"] for i in range(layers)], 1)
        return cut(whole, [self.bridge.to_tokens(text).shape[1] for text in TEXTS])


class Sight:
    """nnsight: traces of transformers' own model; a layer's positions or heads in one trace, an invoke each."""

    packages = ("nnsight",)

    def __init__(self, folder: Path) -> None:
        self.nnsight: Any = importlib.import_module("nnsight")
        self.model: Any = self.nnsight.TransformersModel(
            str(folder),
            task="text-generation",
            dispatch=True,
            dtype=torch.float32,
            attn_implementation="eager",
        )
        self.model.requires_grad_(False)
        self.answer, self.wrong = (self.model.tokenizer.encode(word)[0] for word in (ANSWER, WRONG))

    def residuals(self) -> Any:
        nnsight, model = self.nnsight, self.model
        with model.trace(TEXTS):
            states = nnsight.save([layer.input for layer in model.model.layers])
        return states  # noqa: RET504 - a trace's block cannot return

    def lens(self) -> Any:
        nnsight, model, answer = self.nnsight, self.model, self.answer
        with model.trace(CLEAN):
            ranks, found = nnsight.save([]), nnsight.save([])
            for state in [layer.input for layer in model.model.layers] + [model.model.layers[-1].output]:
                logits = model.lm_head(model.model.norm(state[0, -1]))
                ranks.append((logits > logits[answer]).sum())
                found.append(logits.log_softmax(-1)[answer])
        return torch.stack(ranks), torch.stack(found)

    def patterns(self) -> Any:
        nnsight, model = self.nnsight, self.model
        with model.trace(TEXTS):
            found = nnsight.save([layer.self_attn.output[1] for layer in model.model.layers])
        return found  # noqa: RET504 - a trace's block cannot return

    def heads(self) -> Any:
        nnsight, model = self.nnsight, self.model
        with model.trace(CLEAN):
            zs = nnsight.save([layer.self_attn.o_proj.input[0, -1] for layer in model.model.layers])
            last = model.model.norm.input[0, -1].save()
        norm, unembed = model.model.norm, model.lm_head.weight
        scale = last.pow(2).mean().add(norm.variance_epsilon).rsqrt()
        direction = (unembed[self.answer] - unembed[self.wrong]) * norm.weight * scale
        found = []
        for z, layer in zip(zs, model.model.layers, strict=True):
            per_head = (layer.self_attn.o_proj.weight.T @ direction) * z
            found.append(per_head.unflatten(0, (model.config.num_attention_heads, -1)).sum(-1))
        return torch.stack(found)

    def patching(self) -> Any:
        nnsight, model, answer, wrong = self.nnsight, self.model, self.answer, self.wrong
        with model.trace(CLEAN):
            clean = nnsight.save([layer.input for layer in model.model.layers])
        found = []
        for i, layer in enumerate(model.model.layers):
            with model.trace() as tracer:
                row = nnsight.save([])
                for pos in range(clean[0].shape[1]):
                    with tracer.invoke(CORRUPT):
                        layer.input[:, pos] = clean[i][:, pos]
                        logits = model.output.logits[0, -1]
                        row.append(logits[answer] - logits[wrong])
            found.append(torch.stack(row))
        return torch.stack(found)

    def gradients(self) -> Any:
        nnsight, model, answer, wrong = self.nnsight, self.model, self.answer, self.wrong
        with model.trace(CLEAN):
            there = nnsight.save([layer.input for layer in model.model.layers])
        with torch.enable_grad(), model.trace(CORRUPT):
            model.model.layers[0].input.requires_grad_()
            here = nnsight.save([layer.input for layer in model.model.layers])
            logits = model.output.logits[0, -1]
            slopes = nnsight.save([])
            with (logits[answer] - logits[wrong]).backward():
                for state in reversed(here):
                    slopes.append(state.grad)
        return torch.stack(
            [((a - b) * g).sum(-1)[0] for a, b, g in zip(there, here, slopes[::-1], strict=True)]
        )

    def ablation(self) -> Any:
        nnsight, model, answer, wrong = self.nnsight, self.model, self.answer, self.wrong
        width, found = model.config.head_dim, []
        for layer in model.model.layers:
            with model.trace() as tracer:
                row = nnsight.save([])
                for head in range(model.config.num_attention_heads):
                    with tracer.invoke(CLEAN):
                        layer.self_attn.o_proj.input[..., head * width : (head + 1) * width] = 0
                        logits = model.output.logits[0, -1]
                        row.append(logits[answer] - logits[wrong])
            found.append(torch.stack(row))
        return torch.stack(found)

    def numbers(self, call: str, answer: Any) -> list[Tensor]:
        """Streams and patterns of each prompt: it pads on the left."""
        if call not in ("residuals", "patterns"):
            return list(answer) if isinstance(answer, tuple) else [answer]
        counts = [len(self.model.tokenizer(text).input_ids) for text in TEXTS]
        return cut(torch.stack(list(answer), 1), counts, left=True)


class Ours:
    """interp."""

    packages = ("torch",)

    def __init__(self, folder: Path) -> None:
        import interp

        self.interp = interp
        self.model = interp.HookedTransformer.from_pretrained(folder, default_prepend_bos=False)
        self.metric = interp.logit_difference(ANSWER, WRONG)

    def residuals(self) -> Any:
        return self.model.run_with_cache(TEXTS, "blocks.*.hook_resid_pre")[1]

    def lens(self) -> Any:
        found = self.interp.logit_lens(self.model, CLEAN, answer=ANSWER, pos=-1)
        return found.target_rank, np.log(found.target_prob)

    def patterns(self) -> Any:
        return self.model.run_with_cache(TEXTS, "blocks.*.attn.hook_pattern")[1]

    def heads(self) -> Any:
        return self.interp.attribute(self.model, CLEAN, ANSWER, WRONG, parts="head")

    def patching(self) -> Any:
        return self.interp.patch(self.model, CLEAN, CORRUPT, "resid_pre", metric=self.metric)

    def gradients(self) -> Any:
        return self.interp.attribution_patch(
            self.model, CLEAN, CORRUPT, "resid_pre", metric=self.metric, agreement=0
        )

    def ablation(self) -> Any:
        change = self.interp.edits.Zero()
        return self.interp.ablate(self.model, CLEAN, "head", change=change, metric=self.metric)

    def numbers(self, call: str, answer: Any) -> list[Tensor]:
        """Out of the cache or the result; effects plus the metric they are effects on."""
        layers, heads = self.model.cfg.n_layers, self.model.cfg.n_heads
        if call == "lens":
            return [torch.from_numpy(each.values).flatten() for each in answer]
        if call == "heads":
            value = answer.value[0]
            return [torch.from_numpy(value[value.part.str.match(r"L\d+H\d+$")].values).reshape(layers, heads)]
        if call == "gradients":
            return [torch.from_numpy(answer.value.values)]
        if call in ("patching", "ablation"):
            start = answer.corrupt if call == "patching" else answer.base
            return [torch.from_numpy(answer.value.values + float(start[0]))]
        part = "hook_resid_pre" if call == "residuals" else "attn.hook_pattern"
        whole = torch.stack([answer[f"blocks.{i}.{part}"] for i in range(layers)], 1)
        return cut(whole, [self.model.to_tokens(text).shape[1] for text in TEXTS])


LIBRARIES: Mapping[str, Any] = {
    "transformers": Plain, "TransformerLens": Lens, "nnsight": Sight, "interp": Ours, "float64": Double,
}  # fmt: skip


def cut(whole: Tensor, counts: Sequence[int], left: bool = False) -> list[Tensor]:
    """Each prompt's own tokens out of streams `[prompt layer token d]` or patterns `[prompt layer head query key]`."""
    found = []
    for row, n in zip(whole, counts, strict=True):
        own = slice(-n, None) if left else slice(n)
        found.append(row[:, own] if whole.ndim == 4 else row[:, :, own, own])
    return found


@contextmanager
def watched(seen: list[tuple[int, int]]) -> Iterator[None]:
    """Notes rows and tokens of every pass of a block, whichever library runs it."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from interp.model.block import Block

    def note(module: object, args: tuple[Tensor, ...]) -> None:
        if isinstance(module, LlamaDecoderLayer | Block):
            seen.append((args[0].shape[0], args[0].shape[1]))

    handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


def counted(call: Callable[[], object]) -> dict[str, float]:
    """What one call dispatches and holds, and the blocks it runs."""
    seen: list[tuple[int, int]] = []
    with watched(seen), LiveBytes() as live:
        done = work(call)
    return {
        "blocks": len(seen), "token_layers": sum(rows * tokens for rows, tokens in seen),
        "operators": done.operators, "gflop": done.gflop, "mib": live.peak / MIB,
    }  # fmt: skip


def timed(call: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    gc.collect()
    start = time.process_time()
    result = call()
    spent = time.process_time() - start
    del result
    return spent


def saved(library: Any, call: str, file: str) -> float:
    """The numbers of one call, in a file; its CPU seconds."""
    start = time.process_time()
    answer = getattr(library, call)()
    spent = time.process_time() - start
    answer = library.numbers(call, answer)
    found = {str(i): each.detach().numpy() for i, each in enumerate(answer)}
    if call == "lens" and isinstance(library, Double):
        found["logits"] = library.depth_logits().numpy()
    np.savez(file, **found)
    return spent


def serve(name: str, folder: Path) -> None:
    """Answer the parent's lines, one each."""
    out, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    try:
        library = LIBRARIES[name](folder)
    except ModuleNotFoundError as error:
        print(json.dumps({"missing": str(error)}), file=out, flush=True)
        return
    versions = {package: importlib.metadata.version(package) for package in library.packages}
    print(json.dumps(versions), file=out, flush=True)
    gc.freeze()
    for line in sys.stdin:
        what, call, file = json.loads(line)
        method = getattr(library, call)
        try:
            do = {"save": lambda: saved(library, call, file), "time": lambda: timed(method)}  # noqa: B023
            answer: dict[str, object] = {"found": do.get(what, lambda: counted(method))()}  # noqa: B023
        except Exception as error:  # the parent raises it
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=out, flush=True)


class Process(NamedTuple):
    """A library at work."""

    name: str
    child: subprocess.Popen[str]
    versions: Mapping[str, str]

    @classmethod
    def start(cls, name: str, folder: Path, python: Path) -> Process:
        """Its model opened."""
        command = [str(python), __file__, str(folder), "--library", name]
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert child.stdout is not None
        return cls(name, child, json.loads(child.stdout.readline() or '{"missing": "it ended"}'))

    def ask(self, what: str, call: str, file: str = "") -> Any:
        """What the child found. Errors: RuntimeError with what it said."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        print(json.dumps([what, call, file]), file=self.child.stdin, flush=True)
        answer = json.loads(self.child.stdout.readline())
        if "error" in answer:
            raise RuntimeError(f"{self.name}, {call}: {answer['error']}")
        return answer["found"]

    def numbers(self, call: str, into: Path) -> tuple[Numbers, float]:
        """The numbers of a call, and its CPU seconds."""
        file = into / f"{self.name}.{call}.npz"
        spent = self.ask("save", call, str(file))
        return dict(np.load(file)), spent


def main(
    folder: Annotated[Path, tyro.conf.Positional],
    python: Path = Path(sys.executable),
    repeats: int = 3,
    calls: tuple[str, ...] = tuple(CALLS),
    library: str = "",
) -> None:
    """Make all calls by all libraries, compare their numbers, and print a table.

    Args:
        folder: SmolLM2-135M.
        python: the interpreter of nnsight's process, where it is installed.
        repeats: timed rounds, after one that is not timed; sweeps have two.
        calls: which of them.
        library: for the child processes: the one to serve.
    """
    if library:
        serve(library, folder)
        return
    with tempfile.TemporaryDirectory() as place:
        into = Path(place)
        reference = Process.start("float64", folder, Path(sys.executable))
        truth = {call: reference.numbers(call, into)[0] for call in calls}
        _ended(reference)
        names = [name for name in LIBRARIES if name != "float64"]
        found = [Process.start(n, folder, python if n == "nnsight" else Path(sys.executable)) for n in names]
        for each in found:
            print(each.name, dict(each.versions), file=sys.stderr, flush=True)
        print("| call | library | lines | blocks | token-layers | operators | GFLOP | MiB | CPU s | error |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for call in calls:
            _rows(call, found, truth[call], into, repeats)
        for each in found:
            _ended(each)


def _rows(call: str, found: Sequence[Process], truth: Numbers, into: Path, repeats: int) -> None:
    """The table's rows of one call."""
    present = [each for each in found if "missing" not in each.versions]
    first = {each.name: each.numbers(call, into) for each in present}
    answers = {name: numbers for name, (numbers, _) in first.items()}
    bounds = {key: SLACK * _off(answers["transformers"][key], truth[key]) for key in answers["transformers"]}
    errors = {name: _checked(name, call, answer, truth, bounds) for name, answer in answers.items()}
    seconds = {name: [spent] if call in SWEEPS else [] for name, (_, spent) in first.items()}
    for turn in range(1 if call in SWEEPS else repeats):
        for each in present if turn % 2 else reversed(present):
            seconds[each.name].append(each.ask("time", call))
    for each in found:
        if each not in present:
            print(f"| {call} | {each.name} | not installed | | | | | | | |", flush=True)
            continue
        costs = each.ask("count", call)
        cells = [
            lines_of(getattr(LIBRARIES[each.name], call)), costs["blocks"], costs["token_layers"], costs["operators"],
            f"{costs['gflop']:.4g}", f"{costs['mib']:.1f}", f"{statistics.median(seconds[each.name]):.2f}",
            f"{errors[each.name]:.1e}",
        ]  # fmt: skip
        print(f"| {call} | {each.name} | {' | '.join(map(str, cells))} |", flush=True)


def _checked(name: str, call: str, answer: Numbers, truth: Numbers, bounds: Mapping[str, float]) -> float:
    """The largest error; AssertionError where the numbers are not those of float64 but for rounding."""
    assert answer.keys() == truth.keys() - {"logits"}, f"{name}, {call}: {sorted(answer)}"
    worst = 0.0
    for key, found in answer.items():
        assert found.shape == truth[key].shape, f"{name}, {call}: {found.shape}, {truth[key].shape}"
        if call == "lens" and key == "0":
            low, high = _possible(truth["logits"], truth["0"], bounds["1"])
            assert ((low <= found) & (found <= high)).all(), f"{name}: ranks {found}, {low} to {high}"
            continue
        off = _off(found.clip(LEAST), truth[key].clip(LEAST)) if call == "lens" else _off(found, truth[key])
        assert off <= bounds[key], f"{name}, {call}: off by {off}, {bounds[key]} is rounding"
        worst = max(worst, off)
    return worst


def _off(found: np.ndarray, truth: np.ndarray) -> float:
    """The largest difference; of streams `[layer token d]` relative to each token's own size."""
    off = np.abs(found.astype(np.float64) - truth)
    if truth.ndim == 3:
        off /= np.sqrt((truth**2).mean(-1, keepdims=True))
    return float(off.max())


def _possible(logits: np.ndarray, ranks: np.ndarray, error: float) -> tuple[np.ndarray, np.ndarray]:
    """The ranks that the answer may have at each depth where every logit may be wrong by so much."""
    ordered = -np.sort(-logits, axis=-1)
    own = ordered[np.arange(len(ranks)), ranks][:, None]
    return (logits > own + 2 * error).sum(-1), (logits > own - 2 * error).sum(-1) - 1


def lines_of(function: Callable[..., object]) -> int:
    """Lines of a function's body that hold code."""
    source = textwrap.dedent(inspect.getsource(function))
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.FunctionDef)
    lines = source.splitlines()[tree.body[0].lineno - 1 :]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


def _ended(process: Process) -> None:
    assert process.child.stdin is not None
    process.child.stdin.close()
    process.child.wait()


if __name__ == "__main__":
    tyro.cli(main)
